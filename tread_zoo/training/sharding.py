"""Fully sharded training (FSDP2): every rank keeps a slice of each weight, average and moment.

    forward, backward of a block:  all-gather its weights -> compute -> drop them
    end of a block's backward:     reduce-scatter its gradients, mean over ranks
    optimizer, averaged weights:   on the slices alone

Accelerate launches the ranks and says whether to shard; torch's `fully_shard` does it, once for
each block, whatever the architecture, and once for what stands around the blocks. Weights,
gradients and their mean stay float32, and autocast computes as it does without sharding, so the
numbers are those of DDP up to the order of sums. What leaves a run (checkpoints, samples) is whole:
slices are joined one tensor at a time, and the main process alone keeps the result, on its CPU. To
be scored, the averaged weights are whole in every process for as long as it takes.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tread_zoo.backbone import Backbone
from tread_zoo.runtime import autocast
from tread_zoo.training.averaging import WeightAverage

if TYPE_CHECKING:
    from accelerate import Accelerator


def sharding_asked_for() -> bool:
    """Return whether `accelerate launch` was told to use FSDP, by its file or `--use_fsdp`.

    Raises:
        ValueError: a setting of its `fsdp_config` that this project does not do.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return False
    for name, works, remedy in (
        ("VERSION", "2", "set fsdp_version: 2"),
        ("OFFLOAD_PARAMS", "false", "leave it out: slices stay on their device"),
        ("ACTIVATION_CHECKPOINTING", "false", "use training.activation_checkpointing=true"),
    ):
        given = os.environ.get(f"FSDP_{name}", works).lower()
        if given != works:
            raise ValueError(
                f"fsdp_{name.lower()}={given} of accelerate's configuration cannot be used here; "
                f"{remedy}. configs/accelerate/ has files that work."
            )
    return True


def place(
    network: Backbone, average: WeightAverage, accelerator: "Accelerator", precision: str
) -> tuple[WeightAverage, Backbone]:
    """Move a network and its average to the accelerator's device, sliced if that was asked for.

    Every rank must call this, with the same weights.

    Returns:
        The average, and a network that is whole, to be counted and described.
    """
    device = accelerator.device
    if not (sharding_asked_for() and torch.distributed.is_initialized()):
        network.to(device)
        average.network.to(device)
        return average, network
    sharded = ShardedAverage(average, device, is_main=accelerator.is_main_process)
    shard(network, device)
    _compute_in(network, device, precision)
    return sharded, sharded.template


def prepare(
    network: Backbone, optimizer: torch.optim.Optimizer, accelerator: "Accelerator"
) -> tuple[nn.Module, Any]:
    """Return the network and the optimizer as accelerate wraps them."""
    if is_sliced(next(network.parameters())):
        return network, accelerator.prepare_optimizer(optimizer, device_placement=False)
    model, stepper = accelerator.prepare(network, optimizer)
    return model, stepper


def shard(network: Backbone, device: torch.device) -> None:
    """Slice a network's parameters over all ranks, in place, and move them to `device`.

    Each block gathers and drops its own weights; those of embedding, head and fusions are gathered
    together and kept from forward to backward. `fsdp_reshard_after_forward: false` keeps those of
    the blocks too: faster, more memory.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for block in network.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(network, "importance")


def _compute_in(network: Backbone, device: torch.device, precision: str) -> None:
    """Make forward compute in a resolved precision and return float32, as accelerate does."""
    forward = network.forward

    def in_precision(*args: Any, **keywords: Any) -> Tensor:
        with autocast(device, precision):
            return forward(*args, **keywords).float()

    network.forward = in_precision  # type: ignore[method-assign]


class ShardedAverage(WeightAverage):
    """Averaged weights of which each rank has a slice.

    Args:
        average: whole; its network is sharded here.
        device: of this rank.
        is_main: this is the process that samples and saves.

    Attributes:
        template: a whole network on the CPU, filled when it is asked for.
    """

    def __init__(self, average: WeightAverage, device: torch.device, *, is_main: bool) -> None:
        self.network, self.decay, self.device = average.network, average.decay, device
        self.is_main = is_main
        self.template = deepcopy(average.network).cpu()
        shard(self.network, device)

    @contextmanager
    def whole(self, *, everywhere: bool = False) -> Iterator[Backbone | None]:
        """Give the whole averaged network on this process's device: to the main process, to every
        one if `everywhere`, and None to those that do not get it.

        Every rank must enter, and slices are sent to all of them either way. Afterwards the
        device's memory is free again.
        """
        keep = everywhere or self.is_main
        tensors = whole_tensors(self.network.state_dict(), keep=keep)
        if not keep:
            yield None
            return
        self.template.load_state_dict(tensors)
        del tensors
        self.template.to(self.device)
        try:
            yield self.template
        finally:
            self.template.cpu()


def whole_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Join sliced tensors, one after the other; every rank must call this.

    Tensors that are not sliced are returned as they are.

    Args:
        tensors: the same names in the same order on every rank.
        keep: return the joined ones, on the CPU; without it the result is empty.
    """
    whole = {}
    for name, tensor in tensors.items():
        if is_sliced(tensor):
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
            tensor = tensor.cpu() if keep else tensor
        if keep:
            whole[name] = tensor
    return whole


def slice_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of a whole tensor, cut as `like` is; itself if that is whole."""
    if not is_sliced(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # src_data_rank=None: every rank read the same file, so that nothing has to be sent.
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def is_sliced(tensor: Tensor) -> bool:
    """Return whether this rank has but a slice of the tensor: it is torch's `DTensor`."""
    return hasattr(tensor, "full_tensor")
