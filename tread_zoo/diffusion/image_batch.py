"""A batch of images that are sampled together, as guidance gets it.

B batch, T embeddings of width S in a context.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.crossing import Crossing
from tread_zoo.diffusion.objective import Objective
from tread_zoo.diffusion.samplers import DxDt
from tread_zoo.routing import Method, Stack
from tread_zoo.routing.methods.none import NO_ROUTING
from tread_zoo.seeding import make_image_generator


@dataclass(frozen=True)
class ImageBatch:
    """A batch of images that are sampled together, and the networks that predict them.

    Args:
        backbone: the sampled network.
        objective: its objective in training.
        labels: [B], or contexts [B, T, S], on the network's device; None for no condition.
        indices: B positions in the seed's sequence of images.
        seed: seed of that sequence.
        levels: levels of the sampler's steps, descending, [num_steps + 1].
        weak: the network of a guidance's `weak_checkpoint`.
        routing: the routing method of training.
        draw_routes: function from the number of an evaluation of dx/dt, 0, 1, …, to its crossings
            (routed ranges of blocks), if the guidance has none of its own.
        mean_slope: whether dx/dt is the mean slope over the sampler's step, not that at the level.
    """

    backbone: Backbone
    objective: Objective
    labels: Tensor | None
    indices: Sequence[int]
    seed: int
    levels: Tensor
    weak: Backbone | None = None
    routing: Method = NO_ROUTING
    draw_routes: Callable[[int], Sequence[Crossing]] = lambda evaluation: ()
    mean_slope: bool = False

    def dx_dt(self, routes: Callable[[], Sequence[Crossing]] | None = None) -> DxDt:
        """Return the function dx/dt that the backbone predicts with the batch's labels.

        For a weak prediction, change the batch: `replace(batch, labels=…).dx_dt()`.

        Args:
            routes: function that returns the crossings (routed ranges of blocks) of the next
                evaluation; None: use `draw_routes`.
        """
        evaluations = itertools.count()
        routes = routes or (lambda: self.draw_routes(next(evaluations)))

        def dx_dt(x: Tensor, level: Tensor) -> Tensor:
            given = {"routes": routes(), **({"r": self._next(level)} if self.mean_slope else {})}
            return self.objective.dx_dt(
                lambda x_t, t: self.backbone(x_t, t, self.labels, **given), x, level
            )

        return dx_dt

    def sample_routes(self, method: Method, rate: float, evaluation: int) -> Sequence[Crossing]:
        """Return the crossings (routed ranges of blocks) of one evaluation of dx/dt, as `method`
        chooses them for the fraction `rate` of tokens to bypass blocks. The tokens depend on the
        seed, the image and `evaluation`, the number of the evaluation."""
        if rate == 0:
            return ()
        device = next(self.backbone.parameters()).device
        images = make_image_generator(
            "sparse", self.seed, evaluation, images=self.indices, device=device
        )
        return method.sample(Stack.of(self.backbone), images, rate)

    def _next(self, level: Tensor) -> Tensor:
        """Return the level [B] after `level` [B] on the sampler's grid."""
        levels = self.levels.float()
        nearest = (levels[:-1] - float(level[0])).abs().argmin()
        return torch.full_like(level, float(levels[nearest + 1]))

    def fraction_done(self, level: Tensor) -> float:
        """Return the fraction of sampling that is done: i / (n - 1) at step i of n, linear in the
        level between steps."""
        steps = self.levels[:-1].float().tolist()  # float32, the precision of samplers
        places = np.arange(len(steps)) / max(len(steps) - 1, 1)
        return float(np.interp(float(level[0]), steps[::-1], places[::-1]))
