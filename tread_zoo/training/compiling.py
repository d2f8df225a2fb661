"""torch.compile, block by block: one small graph, made once and used by all blocks alike.

    embed -> block 0 … block depth-1 -> head           (each block compiled, the rest as it is)

Blocks of one kind share their graphs, so that compiling takes as long for 28 blocks as for 2.
Which tokens a route keeps is data, not code; how many there are is a dynamic size from the second
number on. So a step may be routed or dense, and its rate may follow a schedule, without compiling
anew: at most one graph for each block and number of tokens, and in practice far fewer.
"""

import importlib.util
import os
import shutil

import torch

from tread_zoo.backbone import Backbone

BACKEND = "inductor"


def check_compiler(device: torch.device) -> None:
    """Check that what generates code on a device is there, before any work is done.

    Raises:
        ValueError: Triton or a C++ compiler is missing.
    """
    if BACKEND != "inductor":
        return
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError(
            "training.compile=true needs Triton on a GPU, which torch's Linux wheels bring along; "
            "run `pip install triton`, or set training.compile=false."
        )
    known = (os.environ.get("CXX"), "g++", "clang++", "cl")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in known):
        raise ValueError(
            "training.compile=true needs a C++ compiler on a CPU (g++, clang++, or what CXX "
            "names); install one, or set training.compile=false."
        )


def compile_blocks(network: Backbone) -> None:
    """Compile each block of `network` in place, at its first call.

    Parameters, their names and the hooks of the blocks stay what they are. Copies of the network
    are not compiled. Call it before sharding.
    """
    config = torch._dynamo.config
    # Blocks of every kind (with a skip or without, routed or dense) share one cache.
    config.recompile_limit = max(config.recompile_limit, 8 * network.num_blocks)
    # DDP would cut graphs at its buckets; between blocks it can send gradients early as it is.
    config.optimize_ddp = False
    for block in network.blocks:
        block.compile(backend=BACKEND)
