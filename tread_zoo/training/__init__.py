"""Training: the run itself, its options, averaged weights, checkpoints, trackers."""

from tread_zoo.training.loop import train

__all__ = ["train"]
