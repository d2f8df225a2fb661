"""The shell of DiS (arXiv 2402.05608): all of a backbone whose blocks scan, but the scan.

    delta = cat(label, time, patches) + positions;  residual = 0
    [delta_i = Linear(cat(delta_i, delta_{depth-i}))]        in the second half: long skips
    residual = residual + delta
    delta    = Mixer(RMSNorm(residual))
    out      = AdaLNHead(RMSNorm(residual + delta), SiLU(time + label))

Time and label are tokens ahead of the image's. A context's come first, in both directions of a
scan: its state has read the text when it meets the image. Two streams travel per token, delta and
the residual; a route takes both along. A mixer walks over the tokens that are there in the full
scan order with the missing ones deleted; `gaps` says what the gaps are to it.

A backbone of this kind brings its mixer and its sizes:

    class Mamba(ScanBackbone):
        def __init__(self, *, …):
            super().__init__(…, make_mixer=lambda index: BidirectionalMixer(…))

B batch, L = E + K tokens present, D width.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.backbone import Backbone, Layout, Streams
from tread_zoo.layers import (
    AdaLNHead,
    LabelEmbedder,
    TimestepEmbedder,
    patchify,
    unpatchify,
)
from tread_zoo.routing.scans import Gaps, Scan, check_scan


class ScanMixer(nn.Module, ABC):
    """What mixes tokens [B, L, D] -> [B, L, D], which stand in raster order before and after."""

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Return the mixed tokens; `layout` says which these are."""

    @abstractmethod
    def initialize(self, num_blocks: int) -> None:
        """Set every weight; linear layers are uniform within 1 / sqrt(fan in) before the call."""


class ScanBlock(nn.Module):
    """[skip joined] then residual + norm + mixer: (delta, residual) -> (delta, residual)."""

    def __init__(self, hidden_size: int, mixer: ScanMixer, has_skip: bool) -> None:
        super().__init__()
        self.skip_proj = nn.Linear(2 * hidden_size, hidden_size) if has_skip else None
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.mixer = mixer

    def forward(self, streams: Streams, layout: Layout, skip: Tensor | None) -> Streams:
        delta, residual = streams
        if self.skip_proj is not None:
            assert skip is not None, "the block loop hands a skip to each block in `skips`"
            delta = self.skip_proj(torch.cat([delta, skip], dim=-1))
        residual = residual + delta
        return self.mixer(self.norm(residual), layout), residual


class ScanBackbone(Backbone):
    """`depth // 2` blocks, a middle one, and `depth // 2` blocks that take the first ones' skips.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, even.
        depth: even; the stack has depth + 1 blocks.
        scan_order: of the mixers, a name in `tread_zoo.routing.ORDERS`.
        gaps: what a route's gaps are to them, a name in `tread_zoo.routing.GAPS`.
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.
        make_mixer: (index of the block) -> its mixer, with that order and those gaps.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown scan_order or gaps.
    """

    default_selector: ClassVar[str] = "rows"
    takes_contexts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int,
        learn_sigma: bool,
        hidden_size: int,
        depth: int,
        scan_order: str,
        gaps: Gaps,
        time_scale: float,
        make_mixer: Callable[[int], ScanMixer],
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            depends_on=scan_dependence(scan_order, gaps),
            learn_sigma=learn_sigma,
        )
        if depth % 2:
            raise ValueError(f"depth={depth} must be even: skips join the halves.")
        if hidden_size % 2:
            raise ValueError(
                f"hidden_size={hidden_size} must be even: half the sinusoids are cosines."
            )
        check_scan(scan_order, gaps)
        self.num_extra_tokens = 2 if num_classes else 1
        self.skips = {depth - i: i for i in range(depth // 2)}
        self.patch_embed = nn.Linear(in_channels * patch_size**2, hidden_size)
        self.positions = nn.Parameter(
            torch.empty(self.num_extra_tokens + self.num_tokens, hidden_size)
        )
        self.time_embed = TimestepEmbedder(
            hidden_size, frequency_size=hidden_size, mlp_size=4 * hidden_size, time_scale=time_scale
        )
        self.label_embed = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.blocks = nn.ModuleList(
            ScanBlock(hidden_size, make_mixer(index), has_skip=index in self.skips)
            for index in range(depth + 1)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.final = AdaLNHead(hidden_size, patch_size, self.out_channels)
        self.initialize()

    def initialize(self) -> None:
        """Set every weight; called once, last.

        | parameter | value |
        |---|---|
        | linear layers | uniform within 1 / sqrt(fan in); biases 0 |
        | positions, label table | normal, std 0.02 |
        | mixers | what their `initialize` says |
        | norms | 1 |
        | the head's modulation and last layer | 0 |
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_uniform(module.weight, module.in_features)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions, std=0.02)
        if self.label_embed is not None:
            nn.init.normal_(self.label_embed.table.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, ScanMixer):
                module.initialize(self.num_blocks)
        self.final.zero()

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Tensor]:
        time = self.time_embed(t)
        condition, extra = time, [time.unsqueeze(1)]
        if self.label_embed is not None:
            label = self.label_embed(y, len(x))
            condition, extra = time + label, [label.unsqueeze(1), *extra]
        tokens = self.patch_embed(patchify(x, self.patch_size))
        delta = torch.cat([*extra, tokens], dim=1) + self.positions
        delta = self.prepend_context(delta, y)
        return (delta, torch.zeros_like(delta)), F.silu(condition)

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        out: tuple[Tensor, ...] = self.blocks[index](streams, layout, skip)
        return out

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        delta, residual = (stream[:, self.num_extra_tokens :] for stream in streams)
        tokens = self.final(self.norm(residual + delta), condition)
        return unpatchify(tokens, self.patch_size, self.grid)

    def hidden_state(self, streams: Streams) -> Tensor:
        delta, residual = streams
        return residual + delta


# For mixers ---------------------------------------------------------------------------------------


def scan_dependence(scan_order: str, gaps: Gaps) -> tuple[str, ...]:
    """Return what a mixer along this order, with these gaps, depends on."""
    if scan_order != "raster":
        return ("order", "ids", "grid")
    return ("order",) if gaps == "ignore" else ("order", "ids")


def init_uniform(weight: Tensor, fan_in: int) -> None:
    """Fill a weight uniformly within 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)


def init_convolution(weight: Tensor, bias: Tensor) -> None:
    """Set the taps [D, W] uniformly within 1 / sqrt(W), and the bias to 0."""
    init_uniform(weight, weight.shape[1])
    nn.init.zeros_(bias)


@torch.no_grad()
def init_step_bias(bias: Tensor) -> None:
    """Draw a bias whose softplus, the step, is log-uniform in 0.001 … 0.1."""
    step = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus


def init_selective_scan(step_bias: Tensor, A_log: Tensor, D: Tensor) -> None:
    """Draw steps as `init_step_bias`, and set the rates of each channel to 1 … S and D to 1."""
    init_step_bias(step_bias)
    with torch.no_grad():
        A_log.copy_(torch.arange(1, A_log.shape[1] + 1).float().log())
    nn.init.ones_(D)


def both_ways(x: Tensor, scan: Scan, dim: int = 0) -> Tensor:
    """Return a walk [B, L, ..], and below it the same walk backwards: [2 B, L, ..]; or beside it,
    along another `dim`."""
    return torch.cat([x, scan.flip(x)], dim)


def sum_ways(x: Tensor, scan: Scan) -> Tensor:
    """Return what two walks [2 B, L, ..] found, added up token by token, in float32 at least."""
    forward, backward = full(x).chunk(2)
    return forward + scan.flip(backward)


def decay_over_gaps(log_decay: Tensor, scan: Scan) -> Tensor:
    """Return the log-decays [2 B, L, ..] of two walks times the lengths of the gaps they cross."""
    gaps = scan.gaps_both_ways()
    if gaps is None:
        return log_decay
    lengths = torch.cat(gaps)
    return log_decay * lengths.view(*lengths.shape, *[1] * (log_decay.ndim - 2))


def full(x: Tensor) -> Tensor:
    """Return x in float32, or float64 where it is: steps and rates do not bear half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
