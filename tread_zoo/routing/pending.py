"""Routes that wait for the network's importance of the tokens.

    key_i = log importance_i + g_i,  g_i ~ Gumbel(0, 1);  the K tokens with the largest keys stay

This draws tokens without replacement, with probabilities proportional to their importance (Gumbel
top-k; Kool et al. 2019, arXiv 1903.06059, section 3). The noise g is drawn in advance, and the
importance is computed from the noisy images without gradient, so forward draws nothing.

B batch, N tokens, K kept tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tread_zoo.routing.routes import UNCHANGED, Bypass, PathDrop, Route
from tread_zoo.seeding import ImageGenerator


@dataclass(frozen=True)
class PendingRoute:
    """A route that waits for the importance of its tokens.

    Args:
        start, end, bypass: as of `Route`.
        num_kept: K.
        noise: Gumbel noise [B, N], or [1, N] with `per_batch`.
        per_batch: the batch of all ranks keeps the same tokens, by its mean importance.
    """

    start: int
    end: int
    num_kept: int
    noise: Tensor
    bypass: Bypass = UNCHANGED
    per_batch: bool = False

    @property
    def ids(self) -> Tensor:
        """Raise `ValueError`, so that a network given a pending route says what to do."""
        raise ValueError(
            f"route [{self.start}, {self.end}) keeps tokens by their importance and has no ids "
            "yet: call resolve_routes before the network."
        )

    def to(self, device: torch.device | str) -> "PendingRoute":
        """Return the same route with its noise on `device`."""
        return replace(self, noise=self.noise.to(device, non_blocking=True))

    def resolve(self, importance: Tensor) -> Route:
        """Return the concrete route for importances [B, N], none negative."""
        batch, num_tokens = len(self.noise), self.noise.shape[1]
        if (
            importance.ndim != 2
            or importance.shape[1] != num_tokens
            or not (self.per_batch or len(importance) == batch)
        ):
            raise ValueError(
                f"importance has shape {list(importance.shape)}; expected [{batch}, {num_tokens}]."
            )
        weight = importance.detach().float()
        if self.per_batch:
            weight = weight.mean(dim=0, keepdim=True)
            if dist.is_initialized() and not weight.is_meta:  # on meta, FLOPs are counted
                dist.all_reduce(weight)
        key = weight.clamp_min(torch.finfo(weight.dtype).tiny).log() + self.noise
        ids = key.topk(self.num_kept, dim=1).indices.sort(dim=1).values
        ids = ids.expand(len(importance), -1)
        return Route.of_sorted(self.start, self.end, ids, self.bypass)


def draw_gumbel(num_tokens: int, generator: ImageGenerator) -> Tensor:
    """Return Gumbel noise [B, num_tokens]."""
    uniform = generator.rand(num_tokens)
    return -(-uniform.clamp_min(torch.finfo(uniform.dtype).tiny).log()).log()


def resolve_routes(
    routes: Sequence[Route | PendingRoute | PathDrop], importance: Callable[[int], Tensor]
) -> tuple[Route | PathDrop, ...]:
    """Return concrete routes, and dropped paths as they are.

    Args:
        routes: of one step.
        importance: start of a route -> importance [B, N] of the tokens there, for pending routes.
    """
    return tuple(
        route.resolve(importance(route.start)) if isinstance(route, PendingRoute) else route
        for route in routes
    )
