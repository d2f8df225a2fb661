"""Mamba-2: a bidirectional state-space dual (arXiv 2405.21060) in the shell of DiS (2402.05608).

    [delta_i = Linear(cat(delta_i, delta_{depth-i}))]        in the second half: long skips
    residual = residual + delta
    delta    = Mixer(RMSNorm(residual))

Time and label are tokens ahead of the image's. The mixer scans the sequence both ways, in raster
order or along another curve; the directions share their projections in and out and own everything
between:

    z, u, step  = Linear(x)                                  u holds the inputs, B and C
    inputs, B, C = SiLU(conv1d(u, taken in that direction))
    step = softplus(step + bias)
    y    = sum over directions of ssd(inputs, step, -exp(A_log), B, C, D)
    out  = Linear(RMSNorm(y * SiLU(z)))

What sets it apart from `mamba` is that step, rate and D are one number for a head of P channels, so
that the scan is made of matrix products and the states can be many; that all it selects by comes
out of the first projection, not out of the convolved inputs; and the norm ahead of the last one.

Two streams travel per token, delta and the residual; a route takes both along. A routed sequence is
walked in the full scan order with the missing tokens deleted; `gaps` says what the gaps are to it.

B batch, L = E + K tokens present, D width, I = expand * D inner width, P head size, S state size.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.backbone import Backbone, Layout, Streams
from tread_zoo.kernels import ssd
from tread_zoo.layers import (
    AdaLNHead,
    LabelEmbedder,
    TimestepEmbedder,
    convolve_both_ways,
    patchify,
    scan_both_ways,
    unpatchify,
)
from tread_zoo.registry import register_backbone
from tread_zoo.routing import check_scan, make_scan


class BidirectionalSSD(nn.Module):
    """State-space duals over [B, L, D] in both directions, summed.

    The directions' own parameters are stacked along their first axis, forward first, so that one
    call of each kernel serves both: they are groups of it, each with its B and C.
    """

    def __init__(
        self,
        hidden_size: int,
        expand: int,
        state_size: int,
        head_size: int,
        conv_width: int,
        scan_order: str = "raster",
        index: int = 0,
        gaps: str = "ignore",
    ) -> None:
        super().__init__()
        inner = expand * hidden_size
        num_heads, mixed = inner // head_size, inner + 2 * state_size
        self.head_size = head_size
        self.parts = [inner, mixed, num_heads]
        self.mixed_parts = [inner, state_size, state_size]
        self.scan_order, self.index, self.gaps = scan_order, index, gaps
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * mixed, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(2 * mixed))
        self.step_bias = nn.Parameter(torch.empty(2 * num_heads))
        self.A_log = nn.Parameter(torch.empty(2 * num_heads))
        self.D = nn.Parameter(torch.empty(2 * num_heads))
        self.norm = nn.RMSNorm(inner, eps=1e-5)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        scan = make_scan(layout, self.scan_order, self.index, len(x), x.device)
        z, u, step = self.in_proj(scan.permute(x)).split(self.parts, dim=-1)
        segments = None if self.gaps == "ignore" else scan.segment_ids()
        u = F.silu(convolve_both_ways(u, self.conv_weight, self.conv_bias, segments))
        inputs, b, c = u.unflatten(-1, (2, -1)).split(self.mixed_parts, dim=-1)  # [B, L, 2, ...]
        steps = torch.cat([step, step.flip(1)], dim=-1)
        scanned = (
            inputs.reshape(*inputs.shape[:2], -1, self.head_size),
            F.softplus(_full(steps) + _full(self.step_bias)),
            -torch.exp(_full(self.A_log)),
            b,
            c,
            _full(self.D),
        )
        y = scan_both_ways(ssd, scanned, scan.gaps_both_ways() if self.gaps == "decay" else None)
        forward, backward = y.flatten(2).chunk(2, dim=-1)
        y = (forward + backward.flip(1)) * F.silu(z)
        return scan.restore(self.out_proj(self.norm(_full(y))))


class Mamba2Block(nn.Module):
    """[skip joined] then residual + norm + mixer: (delta, residual) -> (delta, residual)."""

    def __init__(self, hidden_size: int, mixer: nn.Module, has_skip: bool) -> None:
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


class Mamba2(Backbone):
    """`depth // 2` blocks, a middle one, and `depth // 2` blocks that take the first ones' skips.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D, even.
        depth: even; the stack has depth + 1 blocks.
        expand: inner width over D.
        state_size: S.
        head_size: P, a divisor of the inner width.
        conv_width: taps of the causal convolution ahead of the scan.
        scan_order: of conv and scan, a name in `tread_zoo.routing.ORDERS`.
        gaps: what a route's gaps are to it. `ignore`: both run over a gap as if its sides were
            neighbours. `reset`: the convolution sees zeros beyond it. `decay`: so it does, and the
            state decays by the length of the gap, exp(gap Δ A).
        time_scale: factor on t before its sinusoids; 1000 suits noise labels of order 1.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown scan_order or gaps.
    """

    default_selector: ClassVar[str] = "rows"
    why_no_context: ClassVar[str] = (
        "tokens ahead of a scan reach the image's in one direction alone, and fade on the way"
    )

    def __init__(
        self,
        *,
        input_size: int | tuple[int, int],
        in_channels: int,
        num_classes: int,
        patch_size: int = 2,
        hidden_size: int = 384,
        depth: int = 28,
        expand: int = 2,
        state_size: int = 64,
        head_size: int = 64,
        conv_width: int = 4,
        scan_order: str = "raster",
        gaps: str = "ignore",
        learn_sigma: bool = False,
        time_scale: float = 1000.0,
    ) -> None:
        super().__init__(
            input_size=input_size,
            in_channels=in_channels,
            num_classes=num_classes,
            patch_size=patch_size,
            learn_sigma=learn_sigma,
        )
        _check_sizes(hidden_size, depth, expand, state_size, head_size, conv_width)
        check_scan(scan_order, gaps)
        if not time_scale > 0:
            raise ValueError(f"time_scale={time_scale!r} must be positive.")
        self.num_extra_tokens = 2 if num_classes else 1
        self.skips = {depth - i: i for i in range(depth // 2)}
        self.block_knows = ("order",) if gaps == "ignore" else ("order", "ids")
        if scan_order != "raster":
            self.block_knows = ("order", "ids", "grid")
        self.patch_embed = nn.Linear(in_channels * patch_size**2, hidden_size)
        self.positions = nn.Parameter(
            torch.empty(self.num_extra_tokens + self.num_tokens, hidden_size)
        )
        self.time_embed = TimestepEmbedder(
            hidden_size, frequency_size=hidden_size, mlp_size=4 * hidden_size, time_scale=time_scale
        )
        self.label_embed = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        mixer = (hidden_size, expand, state_size, head_size, conv_width, scan_order)
        self.blocks = nn.ModuleList(
            Mamba2Block(
                hidden_size, BidirectionalSSD(*mixer, index, gaps), has_skip=index in self.skips
            )
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
        | `out_proj` of each mixer | the same, over sqrt(number of blocks) |
        | `conv_weight`, `conv_bias` | uniform within 1 / sqrt(conv_width); 0 |
        | positions, label table | normal, std 0.02 |
        | `step_bias` | softplus of it log-uniform in 0.001 … 0.1 |
        | `A_log` | exp of it uniform in 1 … 16 |
        | `D`, norms | 1 |
        | the head's modulation and last layer | 0 |
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _uniform(module.weight, module.in_features)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions, std=0.02)
        if self.label_embed is not None:
            nn.init.normal_(self.label_embed.table.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, BidirectionalSSD):
                self._initialize_mixer(module, self.num_blocks)
        self.final.zero()

    @staticmethod
    def _initialize_mixer(mixer: BidirectionalSSD, num_blocks: int) -> None:
        _uniform(mixer.out_proj.weight, mixer.out_proj.in_features * num_blocks)
        _uniform(mixer.conv_weight, mixer.conv_weight.shape[1])
        nn.init.zeros_(mixer.conv_bias)
        with torch.no_grad():
            step = torch.empty_like(mixer.step_bias).uniform_(math.log(0.001), math.log(0.1)).exp()
            mixer.step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
            mixer.A_log.uniform_(1, 16).log_()
        nn.init.ones_(mixer.D)

    def embed(self, x: Tensor, t: Tensor, y: Tensor | None) -> tuple[Streams, Tensor]:
        time = self.time_embed(t)
        condition, extra = time, [time.unsqueeze(1)]
        if self.label_embed is not None:
            label = self.label_embed(y, len(x))
            condition, extra = time + label, [label.unsqueeze(1), *extra]
        tokens = self.patch_embed(patchify(x, self.patch_size))
        delta = torch.cat([*extra, tokens], dim=1) + self.positions
        return (delta, torch.zeros_like(delta)), F.silu(condition)

    def run_block(
        self, index: int, streams: Streams, condition: Tensor, layout: Layout, skip: Tensor | None
    ) -> Streams:
        return self.blocks[index](streams, layout, skip)

    def head(self, streams: Streams, condition: Tensor) -> Tensor:
        delta, residual = (stream[:, self.num_extra_tokens :] for stream in streams)
        tokens = self.final(self.norm(residual + delta), condition)
        return unpatchify(tokens, self.patch_size, self.grid)


def _check_sizes(
    hidden_size: int, depth: int, expand: int, state_size: int, head_size: int, conv_width: int
) -> None:
    sizes = {
        "hidden_size": hidden_size,
        "depth": depth,
        "expand": expand,
        "state_size": state_size,
        "head_size": head_size,
        "conv_width": conv_width,
    }
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer.")
    if depth % 2:
        raise ValueError(f"depth={depth} must be even and at least 2: skips join the halves.")
    if hidden_size % 2:
        raise ValueError(f"hidden_size={hidden_size} must be even: half the sinusoids are cosines.")
    if expand * hidden_size % head_size:
        raise ValueError(
            f"head_size={head_size} must divide the inner width, expand * hidden_size = "
            f"{expand * hidden_size}."
        )


def _uniform(weight: Tensor, fan_in: int) -> None:
    """Fill a weight uniformly within 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)


def _full(x: Tensor) -> Tensor:
    """Return x in float32, or float64 where it is: steps and rates do not bear half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Sizes for comparisons; nobody has published diffusion networks of this kind.
register_backbone(
    "mamba2_tiny", patch_size=2, hidden_size=138, depth=8, expand=1, state_size=16, head_size=46
)(Mamba2)
register_backbone("mamba2_matched_s", patch_size=2, hidden_size=384, depth=28)(Mamba2)
register_backbone("mamba2_matched_b", patch_size=2, hidden_size=768, depth=28)(Mamba2)
