"""How good samples are: registered metrics, one `score` with its protocol, held-out loss, FLOPs."""

from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.evaluation.score import score

__all__ = ["Protocol", "score"]
