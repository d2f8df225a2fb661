"""Sharded weights, one slice for each rank (FSDP2): torch's `DTensor`."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

CAST = (nn.Linear, nn.Conv1d, nn.Conv2d)  # layers that autocast runs in half precision


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank has only a slice of the tensor."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks; every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def slice_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's slice of the whole `tensor`, sharded like `like`; `tensor` itself if
    `like` is not sharded or has another shape."""
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # src_data_rank=None: every rank has read the same file, so nothing has to be sent.
    return distribute_tensor(tensor.detach().to(like.device), mesh, placements, src_data_rank=None)


def sharding_requested() -> bool:
    """Return whether `accelerate launch` requests FSDP, in its configuration file or by
    `--use_fsdp`. Raises ValueError for settings of FSDP that would be ignored here."""
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
    """Shard the weights of all modules over all ranks, in place. The first module is the network,
    whose blocks are sharded one by one.

    A block whose weights are all cast by autocast is gathered in `dtype`, with equal results. A
    block with norms, or with rates and steps of scans, is gathered in float32. Gradients are
    reduced in float32. accelerate's own plugin is not used: it finds blocks by class names and does
    not support CPUs.
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
