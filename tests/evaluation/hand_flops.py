"""FLOPs of the backbones by hand, from the published formulas of their layers, without their code.

A product [n, a] x [a, b] is n a b multiply-adds of 2 FLOPs, and its backward pass has two products
of the same size, one for each factor; a factor that needs no gradient, pixels and sinusoids, saves
its own. So

    forward  = products + scans
    backward = 2 products - first + scans_backward

N tokens of the image, E extra ones ahead of them (time, label), n of a block (N or those kept),
L = E + n, D width, I inner width, S states, p values of a patch going in, q coming out.
"""

from dataclasses import dataclass
from math import ceil


@dataclass
class Cost:
    """The FLOPs of one image: all products, the products whose input needs no gradient, and the
    scans."""

    products: int = 0
    first: int = 0
    scans: int = 0
    scans_backward: int = 0

    @property
    def forward(self):
        return self.products + self.scans

    @property
    def both(self):
        return 3 * self.products - self.first + self.scans + self.scans_backward

    def linear(self, n, a, b, *, first=False):
        self.products += 2 * n * a * b
        self.first += 2 * n * a * b * first

    def stem(self, N, p, D):
        """Patches in, and the time of 256 sinusoids."""
        self.linear(N, p, D, first=True)
        self.linear(1, 256, D, first=True)
        self.linear(1, D, D)

    def transformer(self, n, D):
        self.linear(n, D, 3 * D)  # q, k, v
        self.linear(n, D, n)  # q kᵀ of all heads together
        self.linear(n, n, D)  # the mean of v
        self.linear(n, D, D)
        self.linear(n, D, 4 * D)
        self.linear(n, 4 * D, D)


def tokens_by_block(num_blocks, num_tokens, routes):
    """Return n for each block; routes are (start, end, kept)."""
    counts = [num_tokens] * num_blocks
    for start, end, kept in routes:
        counts[start:end] = [kept] * (end - start)
    return counts


def dit(N, p, q, *, D, depth, labels=True, routes=()):
    """A label is looked up and added, which costs nothing here."""
    cost = Cost()
    cost.stem(N, p, D)
    for n in tokens_by_block(depth, N, routes):
        cost.linear(1, D, 6 * D)  # shift, scale and gate of both branches
        cost.transformer(n, D)
    cost.linear(1, D, 2 * D)  # shift and scale of the head
    cost.linear(N, D, q)
    return cost


def dis_shell(mixer, N, p, q, *, D, depth, labels=True, routes=()):
    """DiS: stem and head around depth + 1 blocks; `mixer` adds what one does on L tokens."""
    cost, extra = Cost(), 1 + labels
    cost.linear(N, p, D, first=True)
    cost.linear(1, D, 4 * D, first=True)  # time
    cost.linear(1, 4 * D, D)
    for index, n in enumerate(tokens_by_block(depth + 1, N, routes)):
        if index > depth // 2:
            cost.linear(extra + n, 2 * D, D)  # the skip joined
        mixer(cost, extra + n)
    cost.linear(1, D, 2 * D)  # shift and scale of the head
    cost.linear(N, D, q)
    return cost


def mamba(N, p, q, *, D, depth, S, rank, taps=4, **rest):
    """A token, channel and state cost 7 forward: Δ A, 2^x, (Δ u) B, a h + b and C · h. Backward 20:
    h again 5, C ∂y 1, a g + C ∂y 2, ∂x, ∂B and ∂C 2 each, q = a g h 2, ∂A 2, ∂Δ 2."""
    inner = 2 * D

    def mixer(cost, L):
        cost.linear(L, D, 2 * inner)  # u and the gate
        for _ in range(2):  # directions
            cost.linear(L * inner, taps, 1)  # one filter a channel
            cost.linear(L, inner, rank + S + S)  # step, B, C
            cost.linear(L, rank, inner)
            cost.scans += 7 * L * inner * S
            cost.scans_backward += 20 * L * inner * S
        cost.linear(L, inner, D)

    return dis_shell(mixer, N, p, q, D=D, depth=depth, **rest)


def mamba2(N, p, q, *, D, depth, expand, S, P, taps=4, **rest):
    """The chunked dual (arXiv 2405.21060, section 6). Within a chunk of Q steps: the scores C Bᵀ,
    shared by all heads of a direction, and their product with the inputs. Between chunks: the
    state after a chunk, and its effect on the next chunk. Step by step, the recurrence would cost
    5 per token, channel and state; no form computes it in that way.

    Backward: the scores again and their two gradients; two products for each product; five products
    with the states (two for the states' gradient, two for B and C, and the effect again); and for
    the decays a sum over all pairs around a step, a product with ones [Q, Q] per head.
    """
    inner = expand * D
    heads = inner // P

    def mixer(cost, L):
        cost.linear(L, D, 2 * inner + 2 * S + heads)  # gate, inputs, B, C, step
        chunks = ceil(L / 64)
        Q = ceil(L / chunks)
        for _ in range(2):  # directions
            cost.linear(L * (inner + 2 * S), taps, 1)  # one filter a channel, of B and C too
            scores = 2 * chunks * Q * Q * S
            weighted = 2 * chunks * Q * Q * inner
            pairs = 2 * chunks * Q * Q * Q * heads
            states = 2 * (chunks - 1) * Q * inner * S
            cost.scans += scores + weighted + 2 * states
            cost.scans_backward += 3 * scores + 2 * weighted + pairs + 5 * states
        cost.linear(L, inner, D)

    return dis_shell(mixer, N, p, q, D=D, depth=depth, **rest)


def rwkv(N, p, q, *, D, depth, labels=True, routes=()):
    """A token and channel cost 54 forward: 21 in each direction (maximum 2, both decays 7, the two
    sums 5, what the output reads of them 7) and 12 for the own term and the quotient. Backward 94:
    the 54 again, 15 a direction and 10."""
    cost = Cost()
    cost.stem(N, p, D)
    for index, n in enumerate(tokens_by_block(depth, N, routes)):
        if index > depth // 2:
            cost.linear(n, 2 * D, D)  # the skip joined
        cost.linear(1, D, 6 * D)  # shift, scale and gate of both mixes
        for _ in ("r", "k", "v", "out"):
            cost.linear(n, D, D)
        cost.scans += 54 * n * D
        cost.scans_backward += 94 * n * D
        cost.linear(n, D, D)  # the channel mix: r, k and back
        cost.linear(n, D, 4 * D)
        cost.linear(n, 4 * D, D)
    cost.linear(1, D, 2 * D)  # shift and scale of the head
    cost.linear(N, D, q)
    return cost
