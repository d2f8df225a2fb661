"""The bidirectional WKV in Triton: a running maximum in registers, forward and backward.

With p_t the positions and s = w/T, the state of some steps i <= j, seen from step j, is

    m = max_i k_i - (p_j - p_i) s,     (N, D) = Σ_i exp(k_i - (p_j - p_i) s - m) (v_i, 1)

Two states are merged as follows: the older one decays by the distance between them, both are scaled
to the larger maximum, and their sums are added. For step t, three terms are scaled to their largest
exponent r_t: the state of all steps before t, seen from t-1 and decayed by p_t - p_{t-1} - 1; the
same from the other side; and the step's own term, exp(u + k_t) (v_t, 1). Their sum is
exp(r_t) (N_t, D_t). Nothing overflows and no quotient is 0/0, as in the torch form.

    out_t = N_t / D_t,     ℓ_t = r_t + log D_t,     W_ti = exp(k_i - (|p_t - p_i| - 1) s - ℓ_t) <= 1

are the output, the logarithm of its denominator, and the weight of v_i in out_t. The weight of the
step itself is W_tt = exp(u + k_t - ℓ_t). The gradients are sums over t of the same form as those
over i above, with -ℓ_t in place of the keys and ∂out_t (1, out_t) in place of the values:

    (A_i, Z_i) = Σ_t W_ti ∂out_t (1, out_t),     ∂v_i = A_i,   ∂k_i = v_i A_i - Z_i
    ∂u = Σ_i W_ii ∂out_i (v_i - out_i)
    ∂s = -Σ_{t≠i} (|p_t - p_i| - 1) W_ti ∂out_t (v_i - out_t)

For ∂s, the sums A and Z are also carried with each term multiplied by its distance: A' and Z'.

Autograd keeps the inputs, the output and ℓ (float32). ∂s and ∂u are sums over the batch and the
steps, so over programs. Each program writes its part, and the parts are summed afterwards, without
atomics: every run gives the same bits.

Dimensions: B batch, L length, C channels, n chunks of L.
"""

from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.bidirectional_wkv.torch_form import flops, outputs_like
from tread_zoo.kernels.launch import launch
from tread_zoo.kernels.operators import make_operator

KERNELS = "tread_zoo.kernels.bidirectional_wkv.triton_kernels"
CHUNK = 16  # steps of a program. More fill its registers; with fewer it has more chunks to merge
GROUP = 4  # steps whose loads are in flight together; CHUNK / GROUP is a power of two
BLOCK = 32  # channels of a program, one per thread
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
if torch.version.hip is None:
    # With 128 registers, 16 programs fit on a multiprocessor; only NVIDIA's compiler takes a limit.
    # The last kernel would take 200, so it spills: at most 5 % of its instructions.
    OPTIONS["maxnreg"] = 128


def _forward(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Return the output and, in float32, the logarithm ℓ of its denominator: both [B, L, C]."""
    k, v, w, u = (x.contiguous() for x in (k, v, w, u))
    places = None if positions is None else positions.contiguous()
    out, lse = torch.empty_like(v), torch.empty_like(k, dtype=torch.float32)
    edges = _edges(k, size=3)
    _launch("summarise", k, length, k, v, w, places, edges)
    _launch("average", k, length, k, v, w, u, places, edges, out, lse)
    return out, lse


def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, w and u. `grad` is the gradient of the output; `out` and `lse`
    are the results of `_forward`, and `args` its arguments."""
    *tensors, positions, length = args
    grad, k, v, w, u = (x.contiguous() for x in (grad, *tensors))
    places = None if positions is None else positions.contiguous()
    gk, gv, edges = torch.empty_like(k), torch.empty_like(v), _edges(k, size=5)
    gs, gu = lse.new_empty(2, len(k), edges.shape[1], k.shape[2])
    _launch("summarise_grads", k, length, grad, out, lse, w, places, edges)
    arguments = (grad, out, lse, k, v, w, u, places, edges, gk, gv, gs, gu)
    _launch("differentiate", k, length, *arguments)
    return gk, gv, (gs.sum((0, 1)) / length).to(w.dtype), gu.sum((0, 1)).to(u.dtype)


def _edges(k: Tensor, size: int) -> Tensor:
    """Return uninitialised float32 [B, n, 2, size, C]: for each of the n chunks of k [B, L, C], the
    states at its two edges, `size` numbers for each channel."""
    batch, num_tokens, channels = k.shape
    num_chunks = -(-num_tokens // CHUNK)
    return k.new_empty(batch, num_chunks, 2, size, channels, dtype=torch.float32)


def _launch(kernel: str, k: Tensor, length: int, *tensors: Tensor | None) -> None:
    """Run the kernel that is called `kernel` on `tensors`, for all chunks and channels of k
    [B, L, C]. The whole sequence, of which k may be a subset, has `length` steps."""
    batch, num_tokens, channels = k.shape
    num_chunks = -(-num_tokens // CHUNK)
    grid = (batch * num_chunks, -(-channels // BLOCK))
    sizes = (num_tokens, float(length), channels, num_chunks)
    options = {"CHUNK": CHUNK, "GROUP": GROUP, "BLOCK": BLOCK, **OPTIONS}
    launch(KERNELS, kernel, k.device, grid, *tensors, *sizes, **options)


# FLOPs belong to the operation: they do not depend on the form that runs.
bidirectional_wkv_triton = make_operator(
    "bidirectional_wkv_triton",
    _forward,
    _backward,
    empty=outputs_like,
    flops=flops,
    num_gradients=4,
    num_kept=2,
)
