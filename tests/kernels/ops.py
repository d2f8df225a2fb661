"""Inputs of every operation and how a form is run; the truth is the naive form in float64.

B batch, L length, D width, H heads, P values of a head, N states, G groups, W taps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo import kernels
from tread_zoo.kernels.dispatch import get_implementation


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normals(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = seeded(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def leaves(values: list[Tensor], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [x.detach().to(device, dtype).requires_grad_() for x in values]


def attention(shape: tuple[int, ...]) -> list[Tensor]:
    """Return q, k and v [B, H, L, P]."""
    return normals(*[shape] * 3)


def causal_conv1d(shape: tuple[int, ...]) -> list[Tensor]:
    """Return x, weight and bias for a shape [B, L, D, W]."""
    batch, length, width, taps = shape
    return normals((batch, length, width), (width, taps), (width,))


def selective_scan(shape: tuple[int, ...]) -> list[Tensor]:
    """Return u, Δ, A, B, C and D for a shape [B, L, D, N, G]."""
    batch, length, width, size, groups = shape
    tokens, vectors = (batch, length, width), (batch, length, groups, size)
    u, delta, A, B, C, D = normals(tokens, tokens, (width, size), vectors, vectors, (width,))
    return [u, F.softplus(delta - 2), -torch.exp(A), B, C, D]


def ssd(shape: tuple[int, ...]) -> list[Tensor]:
    """Return x, Δ, A, B, C and D for a shape [B, L, H, P, N, G]."""
    batch, length, heads, width, size, groups = shape
    vectors = (batch, length, groups, size)
    x, delta, A, B, C, D = normals(
        (batch, length, heads, width), (batch, length, heads), (heads,), vectors, vectors, (heads,)
    )
    return [x, F.softplus(delta - 2), -torch.exp(A), B, C, D]


def gated_linear_attention(shape: tuple[int, ...]) -> list[Tensor]:
    """Return q, k, v and log-decays for a shape [B, L, H, K, V]."""
    *keys, width = shape
    q, k, v, gate = normals(tuple(keys), tuple(keys), (*keys[:3], width), tuple(keys))
    return [q, k, v, F.logsigmoid(2 * gate)]


def gated_delta_rule(shape: tuple[int, ...]) -> list[Tensor]:
    """Return q, k, v, β and log-decays, one a head, for a shape [B, L, H, K, V]."""
    batch, length, heads, width, size = shape
    tokens, keys = (batch, length, heads), (batch, length, heads, width)
    q, k, v, beta, gates = normals(keys, keys, (*tokens, size), tokens, tokens)
    return [q, F.normalize(k, dim=-1), v, beta.sigmoid(), -F.softplus(gates)]


def kda(shape: tuple[int, ...]) -> list[Tensor]:
    """Return the same with a log-decay for each channel."""
    *inputs, _ = gated_delta_rule(shape)
    return [*inputs, -F.softplus(normals(shape[:4])[0])]


def bidirectional_wkv(
    shape: tuple[int, ...], reach: float = 5.0, keys: float = 1.0
) -> list[Tensor]:
    """Return k in ±2 `keys`, v, w up to `reach` and u, the same numbers for each dtype."""
    batch, length, channels = shape
    generator = seeded(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    k = keys * normal(batch, length, channels).clamp(-2, 2)
    w = reach * torch.rand(channels, generator=generator) + 1e-3 * reach
    return [k, normal(batch, length, channels), w, normal(channels)]


def dplr_delta_rule(shape: tuple[int, ...]) -> list[Tensor]:
    """Return q, k, v, a, b and the log-decay as RWKV-7 has them for a shape [B, L, H, K, V]."""
    *tokens, size, width = shape
    q, k, a, rate, decay, v = normals(*[(*tokens, size)] * 5, (*tokens, width))
    a = F.normalize(a, dim=-1)
    return [q, k, v, -a, a * rate.sigmoid(), -0.6 * decay.sigmoid()]


def make_segments(batch: int, length: int) -> Tensor:
    """Return segment ids that change at random places and occur again: 0, 1, 2, 0, …"""
    return (torch.rand(batch, length, generator=seeded(1)) < 0.2).long().cumsum(dim=1) % 3


def same_segment(ids: Tensor | None) -> Tensor | None:
    """Return bool [B, L, L]: whether two tokens are in one run of equal ids."""
    if ids is None:
        return None
    runs = F.pad(ids.diff(dim=1) != 0, (1, 0)).cumsum(1)
    return runs[:, :, None] == runs[:, None]


def make_gaps(batch: int, length: int) -> Tensor:
    return torch.randint(1, 6, (batch, length), generator=seeded(2))


def make_mask(length: int) -> Tensor:
    """Return a random mask, bool [1, 1, L, L], in which each token sees itself."""
    drawn = torch.rand(1, 1, length, length, generator=seeded(1)) < 0.5
    return drawn | torch.eye(length, dtype=torch.bool)


def make_positions(batch: int, length: int, whole: int) -> Tensor:
    scores = torch.rand(batch, whole, generator=seeded(1))
    return scores.argsort(dim=1)[:, :length].sort(dim=1).values


def run(form: Callable, inputs: list[Tensor], *tokens: Any) -> list[Tensor]:
    """Return the output and the gradient of every input for one fixed gradient of the output,
    which is the same in half precision. The backward pass runs outside autocast, as it should."""
    y = form(*inputs, *tokens)
    grad = torch.randn(y.shape, generator=seeded(2)).bfloat16()
    with torch.autocast(y.device.type, enabled=False):
        return [y, *torch.autograd.grad(y, inputs, grad.to(y))]


def by_pairs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, same: Tensor | None = None) -> Tensor:
    """Return Σ_{j <= i} Σ_c q_ic k_jc exp(g_{j+1,c} + … + g_ic) v_j over the j in the segment of i;
    q, k and g [B, L, H, K], or g [B, L, H, 1]."""
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    seen = (seen if same is None else seen & same)[..., None, None]
    sums = g.double().cumsum(1)
    falls = (sums[:, :, None] - sums[:, None]).masked_fill(~seen, -torch.inf).exp()
    weights = (q.double()[:, :, None] * k.double()[:, None] * falls).sum(-1)
    return torch.einsum("bijh,bjhp->bihp", weights, v.double()).to(v)


def relative_error(ours: Tensor, truth: Tensor, floor: float = 1e-6) -> float:
    return ((ours.double() - truth.double()).norm() / truth.norm().clamp_min(floor)).item()


def assert_close(ours: list[Tensor], truth: list[Tensor], bound: float, floor: float = 1e-6):
    for mine, true in zip(ours, truth, strict=True):
        assert mine.isfinite().all()
        assert relative_error(mine, true, floor) <= bound


@dataclass(frozen=True)
class Op:
    """How an operation is tested.

    Args:
        make: Inputs of a shape in float64.
        shapes: The first one is small.
        tokens: Names of the arguments after the inputs.
        half: The inputs that may be in half precision.
        bound: Largest error of the torch form in float32, relative to the norm of each result.
        floor: Norm below which a result counts as zero.
        bar: A shape of training, and the MiB that may be kept there for the backward pass.
        function: The public function, if it has another name.
    """

    name: str
    make: Callable[..., list[Tensor]]
    shapes: list[tuple[int, ...]]
    tokens: tuple[str, ...]
    half: tuple[int, ...]
    bound: float
    floor: float = 1e-6
    bar: tuple[tuple[int, ...], float] | None = None
    function: str = ""

    def form(self, name: str) -> Callable:
        return get_implementation(self.name, name).run

    def public(self, *args: Any) -> Tensor:
        """The public function, with the arguments that the forms take."""
        count = len(args) - len(self.tokens)
        rest = dict(zip(self.tokens, args[count:], strict=True))
        return getattr(kernels, self.function or self.name)(*args[:count], **rest)

    def inputs(self, shape=None, dtype=torch.float64, device="cpu", **options) -> list[Tensor]:
        return leaves(self.make(shape or self.shapes[0], **options), dtype, device)

    def rest(self, shape=None, subset: bool = False) -> tuple[Any, ...]:
        """Return the arguments after the inputs, for all tokens or for a subset."""
        batch, length = (shape or self.shapes[0])[:2]
        values = {
            "segment_ids": make_segments(batch, length) if subset else None,
            "step_bias": None,
            "gaps": make_gaps(batch, length) if subset else None,
            "positions": make_positions(batch, length, 3 * length) if subset else None,
            "length": 3 * length if subset else length,
            "silu": subset,
            "scale": 0.7,
            "mask": make_mask((shape or self.shapes[0])[2]) if subset else None,
        }
        return tuple(values[name] for name in self.tokens)

    def mixed(self, shape=None, dtype=torch.bfloat16, device="cpu", **options) -> list[Tensor]:
        """Return inputs, some in half precision and the others in float32."""
        inputs = self.inputs(shape, torch.float32, device, **options)
        for index in self.half:
            inputs[index] = inputs[index].detach().to(dtype).requires_grad_()
        return inputs


OPS = {
    op.name: op
    for op in (
        Op(
            "attention", attention, [(2, 3, 16, 8), (1, 2, 7, 5), (2, 1, 1, 4), (1, 1, 300, 16)],
            ("mask",), (0, 1, 2), 1e-5, floor=0.1,
        ),
        Op(
            "causal_conv1d", causal_conv1d,
            [(2, 9, 6, 4), (1, 1, 3, 4), (2, 5, 4, 1), (1, 6, 2, 7)],
            ("segment_ids", "silu"), (0,), 2e-6,
        ),
        Op(
            "selective_scan", selective_scan,
            [(2, 9, 4, 3, 2), (2, 1, 4, 3, 1), (3, 7, 6, 1, 3), (1, 17, 8, 4, 1), (2, 43, 4, 5, 2)],
            ("step_bias", "segment_ids"), (0, 3, 4), 1e-5, bar=((4, 256, 384, 16, 1), 5.0),
        ),
        Op(
            "ssd", ssd,
            [(2, 9, 4, 3, 2, 2), (2, 1, 2, 3, 4, 1), (3, 7, 6, 5, 1, 3), (1, 65, 4, 4, 5, 4),
             (2, 187, 6, 4, 3, 2)],
            ("segment_ids", "gaps"), (0, 3, 4), 2e-6, bar=((4, 256, 6, 64, 64, 1), 3.5),
        ),
        Op(
            "gated_linear_attention", gated_linear_attention,
            [(2, 9, 2, 3, 4), (2, 1, 1, 2, 3), (1, 32, 3, 4, 1), (2, 77, 2, 5, 4)],
            ("segment_ids", "scale"), (0, 1, 2), 2e-6, bar=((4, 256, 6, 64, 64), 10.0),
        ),
        Op(
            "gated_delta_rule", gated_delta_rule,
            [(2, 9, 3, 4, 5), (1, 1, 2, 3, 3), (1, 32, 1, 4, 2), (2, 75, 2, 8, 4)],
            ("segment_ids", "scale"), (0, 1, 2), 3e-6, bar=((1, 256, 6, 64, 64), 8.0),
        ),
        Op(
            "kda", kda, [(2, 9, 3, 4, 5), (1, 1, 2, 3, 3), (1, 32, 1, 4, 2), (2, 75, 2, 8, 4)],
            ("segment_ids", "scale"), (0, 1, 2), 3e-6, bar=((1, 256, 6, 64, 64), 13.0),
            function="gated_delta_rule",
        ),
        Op(
            "bidirectional_wkv", bidirectional_wkv,
            [(2, 9, 4), (1, 2, 4), (2, 33, 8), (16, 18, 24)],
            ("positions", "length"), (0, 1), 5e-6, bar=((1, 256, 48), 0.19),
        ),
        Op(
            "dplr_delta_rule", dplr_delta_rule,
            [(2, 9, 2, 3, 4), (1, 1, 2, 3, 2), (2, 65, 3, 8, 5), (1, 130, 1, 4, 4)],
            ("segment_ids", "scale"), (0, 1, 2, 3, 4), 2e-6, floor=0.1,
            bar=((1, 256, 6, 64, 64), 11.0),
        ),
    )
}  # fmt: skip
