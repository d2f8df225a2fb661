"""Quality and cost of networks: metrics, scores recorded with all they depend on, loss, FLOPs."""

from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.evaluation.score import score

__all__ = ["Protocol", "score"]
