"""The exponential moving average of the weights, in float32.

    average_k = average_(k-1) + (1 - d_k) (weights_k - average_(k-1))
    d_k = min(decay, (1 + k) / (10 + k))            k = 1, 2, …: early averages forget the start

`torch.optim.swa_utils.AveragedModel` is not used: its first update copies the weights instead of
averaging, and it deep-copies the network, which one that is sharded by FSDP2 refuses.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from tread_zoo.backbone import Backbone


class WeightAverage:
    """A copy of a network whose parameters average those of the trained one.

    Args:
        network: copied before it is sharded.
        decay: in [0, 1); 0 makes the copy follow the weights.
    """

    def __init__(self, network: Backbone, decay: float) -> None:
        self.network: Backbone = deepcopy(network).eval().requires_grad_(False)
        self.decay = decay
        self._slices: dict[str, Tensor] = {}  # by name, where the weights are sharded

    def to(self, device: torch.device, network: nn.Module) -> None:
        """Move the averages to where the weights of `network` are; sharded as they are."""
        for name, weight in network.named_parameters():
            if is_sharded(weight):
                self._slices[name] = slice_like(self.network.get_parameter(name), weight)
        if not self._slices:
            self.network.to(device)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Add the weights after optimizer step `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages: Sequence[Tensor] = list(self._slices.values()) or list(self.network.parameters())
        weights = list(network.parameters())
        torch._foreach_lerp_(_local(averages), _local(weights), 1 - decay)

    def whole(self, device: torch.device) -> Backbone:
        """Return the averaged network on `device`; if it is sharded, every rank must call this, and
        `release` frees the memory again."""
        for name, part in self._slices.items():
            self.network.get_parameter(name).copy_(part.full_tensor())  # type: ignore[attr-defined]
        return self.network.to(device)

    def release(self) -> None:
        """Move the whole network of sharded weights off its device."""
        if self._slices:
            self.network.cpu()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank has only a slice of the tensor: it is torch's `DTensor`."""
    return hasattr(tensor, "full_tensor")


def slice_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of a whole tensor, cut as `like` is; itself if that is whole."""
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # src_data_rank=None: every rank read the same file, so that nothing has to be sent.
    return distribute_tensor(tensor.detach().to(like.device), mesh, placements, src_data_rank=None)


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]
