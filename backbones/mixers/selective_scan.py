"""Selective state spaces, as in Mamba (arXiv 2312.00752), in one direction or in both.

The mixer scans along a curve. The directions share the first and the last projection, and each has
its own parameters between them:

    u, z  = Linear(x)
    u_dir = SiLU(conv1d(u, in that direction))
    step, B, C = linear in u_dir;  step = softplus(Linear(step) + bias)
    y     = sum over directions of scan(u_dir, step, -exp(A_log), B, C, D)
    out   = Linear(y * SiLU(z))

B batch, L = E + K tokens present, D width, I = expand * D inner width, S state size.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from backbones.mixers.scan import (
    ScanMixer,
    at_least_float32,
    both_ways,
    convolve_ways,
    init_step_bias,
    init_uniform,
    mark_no_weight_decay,
    scan_ways,
)
from tread_zoo.kernels import selective_scan
from tread_zoo.routing.orders import ScanOrder
from tread_zoo.routing.scans import Gaps, Scan


class SelectiveScan(ScanMixer):
    """Selective scans over [B, L, D] in both directions, summed.

    Parameters of both directions are stacked along the first axis, forward first. One call of each
    kernel serves both, or one per direction if it must heed gaps. The class attribute `ways` is the
    number of directions.

    Args:
        hidden_size: D.
        expand: inner width I divided by D.
        state_size: size of the state, S.
        conv_width: taps of the causal convolution before the scan.
        scan: `scan_order`, `gaps` and `index`, see `ScanMixer`.
    """

    ways: ClassVar[int] = 2

    def __init__(
        self,
        hidden_size: int,
        expand: PositiveInt = 2,
        state_size: PositiveInt = 16,
        conv_width: PositiveInt = 4,
        **scan: Any,
    ) -> None:
        super().__init__(**scan)
        inner, ways = expand * hidden_size, self.ways
        self.inner, self.state_size = inner, state_size
        self.step_rank = math.ceil(hidden_size / 16)
        self.parts = (self.step_rank, state_size, state_size)
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(ways * inner, conv_width))
        self.conv_bias = nn.Parameter(torch.empty(ways * inner))
        self.fused_rows: dict[str, tuple[int, ...]] = {"in_proj.weight": (inner, inner)}
        self._add_selection()
        self.step_bias = nn.Parameter(torch.empty(ways * inner))
        self.A_log = nn.Parameter(torch.empty(ways * inner, state_size))
        self.D = nn.Parameter(torch.empty(ways * inner))
        mark_no_weight_decay(self.step_bias, self.A_log, self.D)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def _add_selection(self) -> None:
        """Add the weights that compute the scan's step, B and C. `OneWayScan` overrides this to
        name them as in ZigMa's checkpoints."""
        self.select = nn.Parameter(torch.empty(2, sum(self.parts), self.inner))
        self.step_weight = nn.Parameter(torch.empty(2, self.inner, self.step_rank))
        self.fused_rows["select"] = 2 * self.parts

    def _selection(self, way: int) -> tuple[Tensor, Tensor]:
        """Return the two weights of direction `way`, 0 forward or 1 backward. The first,
        [R + 2 S, I], maps u of width I to R channels for the step, to B and to C of S states each;
        the second, [I, R], maps the R channels to I steps."""
        return self.select[way], self.step_weight[way]

    def forward(self, x: Tensor, scan: Scan) -> Tensor:
        u, z = self.in_proj(scan.permute(x)).chunk(2, dim=-1)
        gaps: Sequence[Tensor] | None = None if self.gaps == "ignore" else scan.gaps()
        gaps = gaps and gaps[: self.ways]
        segments = gaps and [(lengths > 1).cumsum(1) for lengths in gaps]
        u = both_ways(u, scan, dim=-1) if self.ways == 2 else u
        u = convolve_ways(u, self.conv_weight, self.conv_bias, segments)
        steps, inputs, outputs = [], [], []
        for way, part in enumerate(u.split(self.inner, dim=-1)):
            select, step_weight = self._selection(way)
            step, b, c = F.linear(part, select).split(self.parts, dim=-1)
            steps.append(F.linear(step, step_weight))
            inputs.append(b)
            outputs.append(c)
        scanned = (
            u,
            torch.cat(steps, dim=-1),
            -torch.exp(at_least_float32(self.A_log)),
            torch.stack(inputs, dim=2),
            torch.stack(outputs, dim=2),
            at_least_float32(self.D),
            at_least_float32(self.step_bias),
        )
        y = scan_ways(selective_scan, scanned, gaps if self.gaps == "decay" else None)
        if self.ways == 2:
            forward, backward = y.chunk(2, dim=-1)
            y = forward + scan.flip(backward)
        return scan.restore(self.out_proj(y * F.silu(z)))

    def initialize(self, num_blocks: int) -> None:
        """Set the weights, except `in_proj`, which `ScanBackbone` draws as listed.

        | parameter | value |
        |---|---|
        | `in_proj`, `select`, `step_weight` | uniform within ±1 / sqrt(fan in) |
        | `out_proj` | the same, divided by sqrt(number of blocks) |
        | `conv_weight`, `conv_bias` | uniform within ±1 / sqrt(conv_width); 0 |
        | `step_bias` | its softplus log-uniform in 0.001 … 0.1 |
        | `A_log` | log 1 … log S for each channel |
        | `D` | 1 |
        """
        init_uniform(self.out_proj.weight, self.inner * num_blocks)
        init_uniform(self.conv_weight, self.conv_weight.shape[1])
        init_uniform(self.select, self.inner)
        init_uniform(self.step_weight, self.step_rank)
        self._initialize_rates()

    def _initialize_rates(self) -> None:
        nn.init.zeros_(self.conv_bias)
        init_step_bias(self.step_bias)
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.state_size + 1).float().log())
        nn.init.ones_(self.D)


class OneWayScan(SelectiveScan):
    """A selective scan over [B, L, D] in one direction, along the layer's own curve, as in ZigMa.
    `ways` is the number of directions."""

    default_selector: ClassVar[str] = "blocks"
    ways: ClassVar[int] = 1

    def __init__(
        self,
        hidden_size: int,
        *,
        scan_order: ScanOrder = "serpentine8",
        gaps: Gaps = "reset",
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, scan_order=scan_order, gaps=gaps, **options)

    def _add_selection(self) -> None:
        self.select = nn.Linear(self.inner, sum(self.parts), bias=False)  # type: ignore[assignment]
        self.step_weight = nn.Parameter(torch.empty(self.inner, self.step_rank))
        self.fused_rows["select.weight"] = self.parts

    def _selection(self, way: int) -> tuple[Tensor, Tensor]:
        return self.get_parameter("select.weight"), self.step_weight

    def initialize(self, num_blocks: int) -> None:
        """Set every weight, `in_proj` included, as `SelectiveScan.initialize` lists."""
        init_uniform(self.in_proj.weight, self.in_proj.in_features)
        init_uniform(self.get_parameter("select.weight"), self.inner)
        init_uniform(self.step_weight, self.step_rank)
        init_uniform(self.out_proj.weight, self.inner * num_blocks)
        init_uniform(self.conv_weight, self.conv_weight.shape[1])
        self._initialize_rates()
