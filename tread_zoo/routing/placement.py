"""Where in the depth to route: how similar token states are between blocks of a trained network.

    state s_i    input of block i, or output of the last one: all streams, concatenated
    cosine       S_ij = mean over tokens of  s_i . s_j / (|s_i| |s_j|)
    linear CKA   S_ij = |X_i^T X_j|^2 / (|X_i^T X_i| |X_j^T X_j|), Frobenius norms, the columns of
                 X_i [n, D] centred over tokens                     (arXiv 1905.00414, section 3)
    change       c_i = 1 - S_{i,i+1}, of block i, averaged over noise levels

A bypassed token has s_start where s_end is expected, so blocks that change tokens little lose
little. Cosine counts a rotated state as changed; CKA does not, because a fusion can rotate it back.

The proposed range [start, end) excludes the first and the last block and is not entered or left by
a long skip. Among these it maximises the gain, the sum over its blocks of (m - c_i), where m is the
mean of c without the first and the last block; of equal ranges the longest. Whether a network
trains better with it needs a run.

B batch, n tokens measured, D channels of all streams, S = depth + 1 states.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """A range of blocks, and how much less than average they change their tokens."""

    start: int
    end: int
    gain: float


@contextmanager
def recording(backbone: Any, places: Tensor) -> Iterator[list[Tensor]]:
    """Record the states of every dense call: a list of float32 [S, B * len(places), D].

    Args:
        backbone: a `Backbone`, whose blocks are watched meanwhile.
        places: int64 raster positions of the tokens to record; extra tokens are never routed.
    """
    calls: list[Tensor] = []
    states: list[Tensor] = []
    rows = places + backbone.num_extra_tokens
    original, override = backbone.run_block, vars(backbone).get("run_block")

    def state_of(streams: Sequence[Tensor]) -> Tensor:
        picked = [stream[:, rows.to(stream.device)].float() for stream in streams]
        return torch.cat(picked, dim=-1).flatten(0, 1).cpu()

    def watched(index: int, streams: Any, *others: Any) -> Any:
        states.append(state_of(streams))
        after = original(index, streams, *others)
        if index == backbone.num_blocks - 1:
            calls.append(torch.stack([*states, state_of(after)]))
            states.clear()
        return after

    backbone.run_block = watched
    try:
        yield calls
    finally:
        del backbone.run_block
        if override is not None:
            backbone.run_block = override


def similarity(states: Tensor, measure: Literal["cosine", "cka"]) -> Tensor:
    """Return the similarity float64 [S, S] of states [S, n, D], 1 on the diagonal."""
    if measure == "cosine":
        flat = F.normalize(states.double(), dim=-1).flatten(1)
        return flat @ flat.T / states.shape[1]
    centered = states - states.mean(dim=1, keepdim=True)
    count = len(states)
    products = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i, count):
            cross = centered[i].T @ centered[j]
            products[i, j] = products[j, i] = cross.double().square().sum()
    norms = products.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    return products / (norms[:, None] * norms)


def propose_route(changes: Sequence[float], skips: Mapping[int, int]) -> Proposal:
    """Return the range [start, end) by the rule above.

    Args:
        changes: c_i of each block.
        skips: producer by consumer, as in `Backbone.skips`.

    Raises:
        ValueError: fewer than 3 blocks, or skips that every range would cut.
    """
    depth, middle = len(changes), changes[1:-1]
    mean = sum(middle) / max(len(middle), 1)
    proposals = [
        Proposal(start, end, sum(mean - change for change in changes[start:end]))
        for start in range(1, depth - 1)
        for end in range(start + 1, depth)
        if all((start <= c < end) == (start <= p < end) for c, p in skips.items())
    ]
    if not proposals:
        raise ValueError(
            f"no range of the {depth} blocks excludes the first and the last one and cuts no long "
            "skip: a route needs 3 blocks or more."
        )
    return max(proposals, key=lambda one: (round(one.gain, 9), one.end - one.start))
