"""The exponential moving average of the weights, in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn

from tread_zoo.backbone import Backbone


class WeightAverage:
    """Keep a copy of a network whose parameters average those of the trained one.

    After step k (from 1): average += (1 - d_k) * (weights - average), with
    d_k = min(decay, (1 + k) / (10 + k)), so that early averages forget the random start. A step
    that was skipped leaves them as they are.

    Args:
        network: copied; must not yet be wrapped by accelerate.
        decay: in [0, 1); 0 makes the copy follow the weights.
    """

    def __init__(self, network: Backbone, decay: float) -> None:
        self.network: Backbone = deepcopy(network).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, network: Backbone, step: int, applied: Tensor) -> None:
        """Take in the weights after optimizer step `step`, counted from 1.

        applied: scalar on the weights' device, 1, or 0 if the step was skipped.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = _local(self.network), _local(network)
        share = applied * (1 - decay)
        torch._foreach_lerp_(averages, weights, [share] * len(weights))

    @contextmanager
    def whole(self, *, everywhere: bool = False) -> Iterator[Backbone | None]:
        """Give the averaged network, whole.

        Args:
            everywhere: to every process; else, where it is sharded, to the main one alone, and None
                to the others.
        """
        yield self.network


def _local(network: nn.Module) -> list[Tensor]:
    """Return the parameters, or this rank's slices of them: an average needs no other's."""
    return [p.to_local() if hasattr(p, "to_local") else p for p in network.parameters()]
