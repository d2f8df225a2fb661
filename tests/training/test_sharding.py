"""Which launches shard, and what slices are. Sharded training itself: test_distributed.py."""

import argparse

import pytest
import torch

from tests.small_run import CONFIGS
from tread_zoo.training.sharding import sharding_asked_for, slice_like, whole_tensors

FILES = sorted((CONFIGS / "accelerate").glob("*.yaml"))
PROCESSES = {
    "cpu": 2, "cpu_fsdp2": 2, "one_gpu": 1,
    "ddp": 8, "fsdp2": 8, "ddp_nodes": 16, "fsdp2_nodes": 16,
}  # fmt: skip


@pytest.fixture
def launch_environment(monkeypatch):
    """Return a function that sets what `accelerate launch` would, and returns its arguments."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    def prepare(*options):
        parser = launch.launch_command_parser()
        args = parser.parse_args([*options, "scripts/train.py", "device=cuda"])
        args, _, _ = launch._validate_launch_command(args)
        kept = argparse.Namespace(**vars(args))
        for name, value in prepare_multi_gpu_env(args).items():
            monkeypatch.setenv(name, value)
        return kept

    return prepare


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_every_file(file, launch_environment):
    from accelerate.utils import FullyShardedDataParallelPlugin

    args = launch_environment("--config_file", str(file))
    assert args.num_processes == PROCESSES[file.stem]
    assert args.num_machines == (2 if "nodes" in file.stem else 1)
    assert sharding_asked_for() == ("fsdp2" in file.stem) == args.use_fsdp
    if args.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--fsdp_version=1", "fsdp_version=1 .* set fsdp_version: 2"),
        ("--fsdp_offload_params=true", "fsdp_offload_params=true"),
        ("--fsdp_activation_checkpointing=true", "use training.activation_checkpointing=true"),
    ],
)
def test_what_is_not_done_here_is_refused(option, message, launch_environment):
    launch_environment("--config_file", str(CONFIGS / "accelerate" / "fsdp2.yaml"), option)
    with pytest.raises(ValueError, match=message):
        sharding_asked_for()


def test_whole_tensors_are_left_alone():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    assert whole_tensors(tensors, keep=True)["a"] is tensors["a"]
    assert whole_tensors(tensors, keep=False) == {}
    assert slice_like(tensors["a"], tensors["a"]) is tensors["a"]
