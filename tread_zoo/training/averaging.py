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
    d_k = min(decay, (1 + k) / (10 + k)), so that early averages forget the random start.

    Args:
        network: copied; must not yet be wrapped by accelerate.
        decay: in [0, 1); 0 makes the copy follow the weights.
    """

    def __init__(self, network: Backbone, decay: float) -> None:
        self.network: Backbone = deepcopy(network).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, network: Backbone, step: int) -> None:
        """Take in the weights after optimizer step `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(_local(self.network), _local(network), 1 - decay)

    @contextmanager
    def whole(self) -> Iterator[Backbone | None]:
        """Give the averaged network; where it is sharded, to the main process alone."""
        yield self.network


def _local(network: nn.Module) -> list[Tensor]:
    """Return the parameters, or this rank's slices of them: an average needs no other's."""
    return [p.to_local() if hasattr(p, "to_local") else p for p in network.parameters()]
