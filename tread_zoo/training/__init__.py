"""Training: the run itself, its options, averaged weights, checkpoints, trackers."""

from tread_zoo.training.train import train

__all__ = ["train"]
