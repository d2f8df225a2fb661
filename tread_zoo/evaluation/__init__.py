"""Quality and cost: registered metrics, scores with their protocol, held-out loss, FLOPs."""

from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.evaluation.score import score

__all__ = ["Protocol", "score"]
