"""Weights in slices, one for each rank (FSDP2): torch's `DTensor`."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

CAST = (nn.Linear, nn.Conv1d, nn.Conv2d)  # autocast computes them in half precision


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank has only a slice of the tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the slices of all ranks; every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def slice_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of a whole tensor, cut as `like` is; itself if that is whole."""
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # src_data_rank=None: every rank read the same file, so that nothing has to be sent.
    return distribute_tensor(tensor.detach().to(like.device), mesh, placements, src_data_rank=None)


def sharding_requested() -> bool:
    """Return whether `accelerate launch` is to use FSDP, by its file or `--use_fsdp`; settings of
    its `fsdp_config` that would be ignored are a `ValueError`."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return False
    for name, works, remedy in (
        ("VERSION", "2", "set fsdp_version: 2"),
        ("OFFLOAD_PARAMS", "false", "leave it out: slices stay on their device"),
        ("ACTIVATION_CHECKPOINTING", "false", "use training.activation_checkpointing=true"),
    ):
        given = os.environ.get(f"FSDP_{name}", works).lower()
        if given != works:
            raise ValueError(f"fsdp_{name.lower()}={given} of accelerate is not used: {remedy}.")
    return True


def shard(modules: Sequence[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
    """Slice the weights of the network, the first module, and of others over all ranks, in place:
    each block by itself, and the rest.

    A block of which autocast casts every weight is gathered in `dtype`, which computes the same;
    rates and steps of a scan, and norms, do not bear it. Gradients are reduced in float32.
    accelerate's own plugin finds blocks by the names of classes, and does not know the CPU.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    network: Any = modules[0]
    marked = [n for n, p in network.named_parameters() if hasattr(p, "_no_weight_decay")]
    for block in network.blocks:
        cast = {p for m in block.modules() if isinstance(m, CAST) for p in m.parameters()}
        policy = MixedPrecisionPolicy(
            param_dtype=dtype if cast == set(block.parameters()) else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for name in marked:  # the slices are new parameters
        network.get_parameter(name)._no_weight_decay = True
