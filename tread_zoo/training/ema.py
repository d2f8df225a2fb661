"""Averages of the weights, in float32.

    average_k = average_(k-1) + (1 - d_k) (weights_k - average_(k-1))          k = 1, 2, …
    d_k = decay                             exponential, with `training.ema_warmup=false`
    d_k = min(decay, (1 + k) / (10 + k))    exponential, which forgets the first steps sooner
    d_k = (1 - 1/k)^p                       power function (EDM2, arXiv 2312.02696, section 3)

After t steps, step k has the weight (k^p - (k-1)^p) / t^p in a power-function average. As a density
over times τ in [0, t], this profile is p τ^(p-1) / t^p. Its standard deviation is `width` times t,
and p follows from `width` (`sigma_rel` in the paper, whose gamma is p - 1). From averages of two
widths, `tread_zoo.runs.posthoc_ema` computes averages of other widths.

`torch.optim.swa_utils.AveragedModel` is not used: its first update copies the weights instead of
averaging, and it deep-copies the network, which fails for networks sharded by FSDP2.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from tread_zoo.contract.backbone import Backbone
from tread_zoo.runs.posthoc_ema import width_to_exponent
from tread_zoo.training.sharding import full_tensor, is_sharded, slice_like


class WeightAverage:
    """A copy of a network whose parameters are averages of the trained network's.

    Args:
        network: the trained network, before it is sharded.
        decay: function from a step to the factor with which the old average enters the new one,
            made by `exponential_decay` or `power_decay`. 0 sets the averages to the weights.
    """

    def __init__(self, network: Backbone, decay: Callable[[int], float]) -> None:
        # The weights require gradients although none is computed: autocast only caches casts of
        # such weights from one step of a sampler to the next.
        self.network: Backbone = deepcopy(network).eval()
        self.decay = decay
        self._slices: dict[str, Tensor] = {}  # this rank's, by name, if weights are sharded

    def to(self, device: torch.device, network: nn.Module) -> None:
        """Move the averages to `device`. If the weights of `network` are sharded, shard the
        averages in the same way instead."""
        for name, weight in network.named_parameters():
            if is_sharded(weight):
                self._slices[name] = slice_like(self.network.get_parameter(name), weight)
        if not self._slices:
            self.network.to(device)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int, skipped: Tensor | None = None) -> None:
        """Update the averages with the weights of `network` after optimizer step `step`, counted
        from 1. `skipped` is a number on the averages' device; if it is 1.0, nothing changes."""
        averages: Sequence[Tensor] = list(self._slices.values()) or list(self.network.parameters())
        weights = list(network.parameters())
        # average -= (1 - decay) (average - weights): SGD with the weights as negated gradient and a
        # weight decay of 1. Its kernel reads `skipped` on the device.
        torch._fused_sgd_(
            _local(averages), _local(weights), [], lr=1 - self.decay(step), weight_decay=1.0,
            maximize=True, momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False,
            found_inf=skipped,
        )  # fmt: skip

    @torch.no_grad()
    def full_network(self, device: torch.device) -> Backbone:
        """Return the averaged network on `device`. If the averages are sharded, every rank must
        call this, and `release` frees the memory of the whole network."""
        for name, part in self._slices.items():
            self.network.get_parameter(name).copy_(full_tensor(part))
        return self.network.to(device)

    def release(self) -> None:
        """Move the copy that `full_network` made of sharded weights back to the CPU."""
        if self._slices:
            self.network.cpu()


def exponential_decay(decay: float, *, warmup: bool = True) -> Callable[[int], float]:
    """Return the function from a step to the decay of an exponential average at this step. With
    `warmup`, the decay grows up to `decay`; otherwise it is `decay` from the start."""
    return lambda step: min(decay, (1 + step) / (10 + step)) if warmup else decay


def power_decay(width: float) -> Callable[[int], float]:
    """Return the function from a step k to the decay (1 - 1/k)^p of a power-function average. Its
    relative width `width` determines p."""
    power = width_to_exponent(width)
    return lambda step: (1 - 1 / step) ** power


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]
