"""Crossings for most routing methods: each says which tokens a range of blocks sees.

    Select    blocks see only the tokens `ids`; the others rejoin unchanged (TREAD, 2501.04765)
    Ranked    the same, but the tokens are chosen by a score of their states
    Skip      the blocks do not run

`Ranked` samples tokens without replacement, with probabilities proportional to their score s
(Gumbel top-k; Kool et al. 2019, arXiv 1903.06059, section 3). The noise g is drawn in advance:

    key_i = log s_i + g_i,  g_i ~ Gumbel(0, 1);  the K tokens with the largest keys are kept

B batch, N tokens of the grid in raster order, K kept tokens, E extra tokens, D width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tread_zoo.contract.crossing import Crossing, Exit, Streams, Tokens, gather, row_index, scatter
from tread_zoo.seeding import ImageGenerator

Absent = Callable[[Streams], Streams]  # input of the blocks -> output for tokens that did not run


def num_kept_tokens(num_tokens: int, selection_rate: float) -> int:
    """Return K = N - floor(N * selection_rate): how many of N = `num_tokens` tokens run if the
    fraction `selection_rate` of them bypasses the routed blocks.

    Raises:
        ValueError: `selection_rate` is outside [0, 1).
    """
    if not 0.0 <= selection_rate < 1.0:
        raise ValueError(
            f"selection_rate={selection_rate} is outside [0, 1): it is the fraction of tokens that "
            "bypass the routed blocks; 0.5 is TREAD's default, routing=none switches routing off."
        )
    # 100 * 0.29 is 28.999… in floating point, so round before the floor. TREAD's released code does
    # not round and keeps one more token at such rates.
    return num_tokens - math.floor(round(num_tokens * selection_rate, 9))


@dataclass(frozen=True)
class Select(Crossing):
    """Blocks `start … end-1` run only on the tokens `ids` and extra tokens (time, label, context).

    Selecting all tokens changes nothing.

    Args:
        start: first routed block, 0 … depth-1.
        end: first block that sees all tokens again, start+1 … depth.
        ids: int64 [B, K], raster positions of the kept tokens, strictly ascending in each row.
        absent: function from all tokens (the streams) before the range to the values that bypassed
            tokens get after it; None: they stay unchanged.

    Raises:
        ValueError: the ids are not as above (values are checked on a CPU only). When a network
            runs: they do not fit the batch or the grid, or another route has removed tokens.
    """

    ids: Tensor
    absent: Absent | None = None

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.ids.ndim != 2 or self.ids.shape[1] == 0:
            raise ValueError(
                f"ids are {self.ids.dtype} {list(self.ids.shape)}; they must be int64 [batch, kept "
                "tokens] with at least one kept token."
            )
        if not _readable(self.ids):
            return
        if bool((self.ids[:, 1:] <= self.ids[:, :-1]).any()) or bool((self.ids[:, :1] < 0).any()):
            raise ValueError(
                "ids must be strictly ascending raster positions in every row; sort them (scans, "
                "convolutions and shifts depend on the order)."
            )

    @property
    def num_kept(self) -> int:
        """K, the number of tokens that the blocks see."""
        return self.ids.shape[1]

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        layout = tokens.layout
        check_ids(self.ids, tokens)
        if self.num_kept == layout.num_tokens:
            return tokens, lambda after: after
        rows = row_index(self.ids, layout.num_tokens, layout.num_extra)
        absent = None if self.absent is None else self.absent(tokens.streams)

        def exit(after: Tokens) -> Tokens:
            return tokens.restore(after, lambda full, kept: scatter(full, rows, kept), absent)

        return tokens.map(lambda stream: gather(stream, rows), self.ids), exit


@dataclass(frozen=True)
class Ranked(Crossing):
    """Blocks run only on K random tokens; a token with a higher score is likelier to be kept.

    Args:
        start, end, absent: see `Select`.
        num_kept: K.
        noise: Gumbel noise [B, N]; infinite for tokens that must be kept.
        score: function from the tokens [B, N, D] before the range to scores [B, N] >= 0, computed
            without gradient. If there are several streams (tensors of tokens), it gets the first.
    """

    num_kept: int
    noise: Tensor
    score: Callable[[Tensor], Tensor]
    absent: Absent | None = None

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        state = tokens.streams[0][:, tokens.layout.num_extra :].detach()
        score = self.score(state).detach().float()
        key = score.clamp_min(torch.finfo(score.dtype).tiny).log() + self.noise
        ids = key.topk(self.num_kept, dim=1).indices.sort(dim=1).values
        return Select(self.start, self.end, ids, self.absent).enter(tokens)


@dataclass(frozen=True)
class Skip(Crossing):
    """No token runs blocks `start … end-1`, extra tokens included.

    After the range all tokens (the streams) are as before it, or what the function `absent` returns
    for them. A long skip from a block in the range has the tokens from before the range, too.
    """

    absent: Absent | None = None

    runs: ClassVar[bool] = False

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        absent = None if self.absent is None else self.absent(tokens.streams)

        def exit(after: Tokens) -> Tokens:
            return after if absent is None else after._replace(streams=absent)

        return tokens, exit


def check_trained(
    crossings: Sequence[Crossing], span: tuple[int, int], kinds: tuple[type[Crossing], ...]
) -> Sequence[Any]:
    """Return `crossings` unchanged if they suit a network whose routing weights were trained for
    the range of blocks `span`, (start, end), and for crossings of the classes `kinds`.

    Raises:
        ValueError: a crossing other than a `Skip` has another range, or another class.
    """
    for each in crossings:
        fits = isinstance(each, kinds) and (each.start, each.end) == span
        if not fits and not isinstance(each, Skip):
            raise ValueError(
                f"{type(each).__name__} [{each.start}, {each.end}): this network learned to be "
                f"routed over [{span[0]}, {span[1]}): route there, or train with routing=tread."
            )
    return crossings


def draw_gumbel(num_tokens: int, generator: ImageGenerator) -> Tensor:
    """Return Gumbel noise [B, num_tokens] for the B images of `generator`."""
    uniform = generator.rand(num_tokens)
    return -(-uniform.clamp_min(torch.finfo(uniform.dtype).tiny).log()).log()


def bypassed_tokens(
    routes: Sequence[Crossing], batch: int, num_tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return bool [batch, num_tokens] on `device`: True for tokens that a `Select` in `routes`
    drops. Other crossings are not counted."""
    away = torch.zeros(batch, num_tokens, dtype=torch.bool, device=device)
    for route in routes:
        if isinstance(route, Select):
            away |= torch.ones_like(away).scatter(1, route.ids, False)
    return away


def check_ids(ids: Tensor, tokens: Tokens) -> None:
    """Raise `ValueError` unless ids [B, K] fit the batch and the grid of `tokens`, and `tokens` are
    all tokens of the grid."""
    layout, batch = tokens.layout, len(tokens.streams[0])
    if layout.ids is not None:
        raise ValueError("a route starts where tokens are missing: two choices cannot be nested.")
    if len(ids) != batch:
        raise ValueError(f"ids are of a batch of {len(ids)}, not {batch}.")
    beyond = ids.shape[1] > layout.num_tokens
    if beyond or (batch and _readable(ids) and int(ids[:, -1].max()) >= layout.num_tokens):
        raise ValueError(f"ids go beyond the grid's {layout.num_tokens} tokens.")


def _readable(ids: Tensor) -> bool:
    """Return whether the values of `ids` can be read without waiting for a device: on a CPU, and
    not while code is compiled."""
    return ids.device.type == "cpu" and not torch.compiler.is_compiling()
