"""Mamba: a bidirectional selective state space in place of attention, after DiS (arXiv 2402.05608).

    [delta_i = Linear(cat(delta_i, delta_{depth-i}))]        in the second half: long skips
    residual = residual + delta
    delta    = Mixer(RMSNorm(residual))

Time and label are tokens ahead of the image's. The mixer scans the sequence both ways, in raster
order or along another curve; the directions share their projections in and out and own everything
between:

    u, z  = Linear(x)
    u_dir = SiLU(conv1d(u, taken in that direction))
    step, B, C = linear in u_dir;  step = softplus(step + bias)
    y     = sum over directions of scan(u_dir, step, -exp(A_log), B, C, D)
    out   = Linear(y * SiLU(z))

Two streams travel per token, delta and the residual; a route takes both along. A routed sequence is
walked in the full scan order with the missing tokens deleted; `gaps` says what the gaps are to it.

B batch, L = E + K tokens present, D width, I = expand * D inner width, S state size.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.backbone import Backbone, Layout, Streams
from tread_zoo.kernels import selective_scan
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


class BidirectionalMixer(nn.Module):
    """Selective scans over [B, L, D] in both directions, summed.

    The directions' own parameters are stacked along their first axis, forward first, so that one
    call of each kernel serves both.
    """

    def __init__(
        self,
        hidden_size: int,
        expand: int,
        state_size: int,
        conv_width: int,
        scan_order: str = "raster",
        index: int = 0,
        gaps: str = "ignore",
    ) -> None:
        super().__init__()
        inner = expand * hidden_size
        self.inner, self.state_size = inner, state_size
        self.step_rank = math.ceil(hidden_size / 16)
        self.scan_order, self.index, self.gaps = scan_order, index, gaps
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * inner, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(2 * inner))
        self.select = nn.Parameter(torch.empty(2, self.step_rank + 2 * state_size, inner))
        self.step_weight = nn.Parameter(torch.empty(2, inner, self.step_rank))
        self.step_bias = nn.Parameter(torch.empty(2 * inner))
        self.A_log = nn.Parameter(torch.empty(2 * inner, state_size))
        self.D = nn.Parameter(torch.empty(2 * inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        scan = make_scan(layout, self.scan_order, self.index, len(x), x.device)
        u, z = self.in_proj(scan.permute(x)).chunk(2, dim=-1)
        segments = None if self.gaps == "ignore" else scan.segment_ids()
        u = F.silu(convolve_both_ways(u, self.conv_weight, self.conv_bias, segments))
        steps, inputs, outputs = [], [], []
        for direction, part in enumerate(u.split(self.inner, dim=-1)):
            selected = F.linear(part, self.select[direction])
            step, b, c = selected.split([self.step_rank, self.state_size, self.state_size], dim=-1)
            steps.append(F.linear(step, self.step_weight[direction]))
            inputs.append(b)
            outputs.append(c)
        scanned = (
            u,
            F.softplus(_full(torch.cat(steps, dim=-1)) + _full(self.step_bias)),
            -torch.exp(_full(self.A_log)),
            torch.stack(inputs, dim=2),
            torch.stack(outputs, dim=2),
            _full(self.D),
        )
        y = scan_both_ways(
            selective_scan, scanned, scan.gaps_both_ways() if self.gaps == "decay" else None
        )
        forward, backward = y.chunk(2, dim=-1)
        return scan.restore(self.out_proj((forward + backward.flip(1)) * F.silu(z)))


class MambaBlock(nn.Module):
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


class Mamba(Backbone):
    """`depth // 2` blocks, a middle one, and `depth // 2` blocks that take the first ones' skips.

    Args:
        input_size, in_channels, num_classes, patch_size, learn_sigma: see `Backbone`.
        hidden_size: D.
        depth: even; the stack has depth + 1 blocks.
        expand: inner width over D.
        state_size: S.
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
        depth: int = 24,
        expand: int = 2,
        state_size: int = 16,
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
        if depth < 2 or depth % 2:
            raise ValueError(f"depth={depth} must be even and at least 2: skips join the halves.")
        check_scan(scan_order, gaps)
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
        self.blocks = nn.ModuleList(
            MambaBlock(
                hidden_size,
                BidirectionalMixer(
                    hidden_size, expand, state_size, conv_width, scan_order, index, gaps
                ),
                has_skip=index in self.skips,
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
        | linear layers, `select`, `step_weight` | uniform within 1 / sqrt(fan in); biases 0 |
        | `out_proj` of each mixer | the same, over sqrt(number of blocks) |
        | `conv_weight`, `conv_bias` | uniform within 1 / sqrt(conv_width); 0 |
        | positions, label table | normal, std 0.02 |
        | `step_bias` | softplus of it log-uniform in 0.001 … 0.1 |
        | `A_log` | log 1 … log S for each channel |
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
            if isinstance(module, BidirectionalMixer):
                self._initialize_mixer(module, self.num_blocks)
        self.final.zero()

    @staticmethod
    def _initialize_mixer(mixer: BidirectionalMixer, num_blocks: int) -> None:
        _uniform(mixer.out_proj.weight, mixer.inner * num_blocks)
        _uniform(mixer.conv_weight, mixer.conv_weight.shape[1])
        nn.init.zeros_(mixer.conv_bias)
        _uniform(mixer.select, mixer.inner)
        _uniform(mixer.step_weight, mixer.step_rank)
        with torch.no_grad():
            step = torch.empty_like(mixer.step_bias).uniform_(math.log(0.001), math.log(0.1)).exp()
            mixer.step_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
            mixer.A_log.copy_(torch.arange(1, mixer.state_size + 1).float().log())
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


def _uniform(weight: Tensor, fan_in: int) -> None:
    """Fill a weight uniformly within 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound)


def _full(x: Tensor) -> Tensor:
    """Return x in float32, or float64 where it is: steps and rates do not bear half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


_SIZES = {
    "s": {"depth": 24, "hidden_size": 368},
    "b": {"depth": 24, "hidden_size": 768},
    "m": {"depth": 48, "hidden_size": 768},
    "l": {"depth": 48, "hidden_size": 1024},
    "h": {"depth": 48, "hidden_size": 1536},
}

for _size, _keywords in _SIZES.items():
    register_backbone(f"mamba_{_size}_2", patch_size=2, **_keywords)(Mamba)
# Sizes for comparisons: every architecture has them, of nearly the same number of parameters.
register_backbone("mamba_tiny", patch_size=2, hidden_size=104, depth=8, state_size=4)(Mamba)
register_backbone("mamba_matched_s", patch_size=2, hidden_size=392, depth=24)(Mamba)
register_backbone("mamba_matched_b", patch_size=2, hidden_size=800, depth=24)(Mamba)
