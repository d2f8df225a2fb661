"""A plug-in: one file that registers a selector, a routing method, and one of each other kind.

    python scripts/train.py plugins=[my_plugin] 'routing.selector={name: checkerboard, parity: 1}' \
        optimizer=sign_sgd optimizer.learning_rate=1e-3 'evaluation.metrics=[fid,mean_gap]'

Installed as a package (see pyproject.toml) it needs no `plugins=`.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from tread_zoo import register
from tread_zoo.contract.crossing import Crossing, gather, row_index, scatter
from tread_zoo.data import ArrayDataset, ImageData
from tread_zoo.diffusion import ClassifierFree, FlowMatching
from tread_zoo.fields import Fraction
from tread_zoo.routing import Method
from tread_zoo.training.alignment import token_width


@register("selector", "checkerboard")
@dataclass(frozen=True)
class Checkerboard:
    """Keep random tokens on one colour of a checkerboard; on the other, only if more are needed."""

    parity: Annotated[int, Field(ge=0, le=1)] = 0

    def __call__(self, batch, grid, num_kept, generator):
        position = torch.arange(grid[0] * grid[1], device=generator.device)
        other = (position // grid[1] + position % grid[1] + self.parity) % 2
        order = other + generator.rand(len(position))
        return order.argsort(dim=1)[:, :num_kept].sort(dim=1).values


@dataclass(frozen=True)
class Discard(Crossing):
    """All tokens run; then those not in `ids` [B, K] get back the values they entered with."""

    ids: Tensor

    def enter(self, tokens):
        rows = row_index(self.ids, tokens.layout.num_tokens, tokens.layout.num_extra)

        def put(full, after):
            return scatter(full, rows, gather(after, rows))

        return tokens, lambda after: tokens.restore(after, put)


@register("routing", "discard")
@dataclass(frozen=True, kw_only=True)
class Discarded(Method):
    """Tokens run through all blocks, and some are set back after the middle ones.

    This control shows whether bypassed tokens must be absent, or only not updated.

    Args:
        selection_rate: fraction of tokens that are set back.
    """

    selection_rate: Fraction = 0.5

    def route(self, stack, images, step):
        chosen = stack.select(stack.span(), "auto", stack.num_kept(self.selection_rate), images)
        return (Discard(chosen.start, chosen.end, chosen.ids),)


@register("objective", "huber_flow")
@dataclass(frozen=True, kw_only=True)
class HuberFlow(FlowMatching):
    """Flow matching whose loss grows linearly beyond `delta`; logs how often errors exceed it."""

    delta: PositiveFloat = 1.0

    def loss(self, predict, x, draw):
        velocity = self.dx_dt(predict, self.noised(x, draw), draw.level)
        error = velocity - (draw.noise - x)
        losses = torch.nn.functional.huber_loss(
            error, torch.zeros_like(error), reduction="none", delta=self.delta
        )
        beyond = (error.detach().abs() > self.delta).float()
        return losses.mean(dim=(1, 2, 3)), {"beyond_delta": beyond.mean()}


@register("sampler", "midpoint")
@dataclass(frozen=True)
class Midpoint:
    """The midpoint rule: two evaluations a step, second order; the last step is Euler's."""

    default_num_steps = 12

    @torch.no_grad()
    def __call__(self, problem, x, levels):
        x = x.float()
        for level, following in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
            slope, step = problem.slope(x, level), following - level
            if following > 0:
                slope = problem.slope(x + step / 2 * slope, level + step / 2)
            x = x + step * slope
        return x


@register("guidance", "rising")
@dataclass(frozen=True, kw_only=True)
class RisingGuidance(ClassifierFree):
    """Classifier-free guidance whose scale rises from 1 at the noisiest level to `scale` at 0."""

    def dx_dt(self, batch):
        plain, guided = batch.dx_dt(), super().dx_dt(batch)
        highest = float(batch.objective.levels(1)[0])

        def dx_dt(x, level):
            part = (1 - level / highest).view(-1, 1, 1, 1)
            return torch.lerp(plain(x, level), guided(x, level), part)

        return dx_dt


@register("optimizer", "sign_sgd")
@dataclass(frozen=True)
class SignSGD:
    """Moves each parameter against the sign of a running mean of its gradient."""

    learning_rate: PositiveFloat = 1e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def build(self, backbone):
        return _SignSGD(backbone.parameters(), lr=self.learning_rate, momentum=self.momentum)


class _SignSGD(torch.optim.Optimizer):
    def __init__(self, parameters, lr, momentum):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(mean.sign(), alpha=group["lr"])


@register("lr_schedule", "inverse_sqrt")
@dataclass(frozen=True)
class InverseSqrt:
    """A linear warm-up to 1, then sqrt(warmup_steps / (step + 1))."""

    warmup_steps: PositiveInt = 50

    def __call__(self, step, num_steps):
        return min((step + 1) / self.warmup_steps, math.sqrt(self.warmup_steps / (step + 1)))


class StripesDataset(ArrayDataset):
    """Noisy stripes, and as features the same stripes without noise."""

    def __init__(self, images, labels, clean):
        super().__init__(images, labels)
        self.clean = clean

    def with_features(self):
        return _WithClean(self.images, self.labels, self.clean)


class _WithClean(StripesDataset):
    def gather(self, indices):
        return (*super().gather(indices), self.clean[indices][:, None])  # without mirrored features


@register("data", "stripes", num_steps=100)
def stripes(num_images: PositiveInt = 256, size: PositiveInt = 8, noise: NonNegativeFloat = 20.0):
    """Grey images of horizontal (class 0) or vertical (class 1) stripes. Their features
    [1, size, size] are the stripes without noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_images) % 2
    phase = torch.randint(2, (num_images,), generator=generator)
    lines = ((torch.arange(size) + phase[:, None]) % 2 * 200.0)[:, None, :].expand(-1, size, -1)
    clean = torch.where(labels[:, None, None] == 1, lines, lines.transpose(1, 2))
    images = clean + noise * torch.randn(clean.shape, generator=generator)
    images = images.clamp(0, 255).round().to(torch.uint8)[:, None]
    clean, held_out = clean[:, None] / 200, num_images // 5
    return ImageData(
        name="stripes",
        train=StripesDataset(images[held_out:], labels[held_out:], clean[held_out:]),
        held_out=ArrayDataset(images[:held_out], labels[:held_out]),
        image_size=(size, size),
        channels=1,
        num_classes=2,
        class_names=("horizontal", "vertical"),
        features=(1, *clean.shape[1:]),
    )


@register("alignment", "regression")
@dataclass(frozen=True)
class Regression:
    """Predict an encoder's features from a block's tokens by a linear map, with squared error."""

    block: int = 1
    weight: PositiveFloat = 0.1
    stop: Annotated[float, Field(gt=0, le=1)] = 1.0

    def build(self, backbone, feature_size):
        return _Regression(self.block, backbone.grid, token_width(backbone), feature_size)


class _Regression(torch.nn.Module):
    def __init__(self, block, grid, width, feature_size):
        super().__init__()
        self.block, self.grid = block, grid
        self.map = torch.nn.Linear(width, feature_size)

    def forward(self, tokens, ids, features):
        target = torch.nn.functional.adaptive_avg_pool2d(features, self.grid).flatten(2).mT
        if ids is not None:
            target = target.take_along_dim(ids[..., None], dim=1)
        return (self.map(tokens).float() - target).square().mean(dim=(1, 2))


@register("metric", "mean_gap", better="lower")
def mean_gap(generated, real):
    """Return the distance between the means of generated [n, d] and real [m, d] features."""
    return float((generated.mean(dim=0) - real.mean(dim=0)).norm())


@register("tracker", "csv")
@dataclass
class CSVTracker:
    """Writes every number as a row (step, name, value) of a file in the run's folder."""

    file_name: str = "numbers.csv"

    def start(self, run_dir: Path, step: int, settings: dict[str, Any]) -> None:
        self.path = Path(run_dir) / self.file_name

    def log(self, step: int, values: dict[str, float]) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows((step, name, value) for name, value in values.items())

    def image(self, step: int, name: str, path: Path) -> None:
        pass

    def close(self) -> None:
        pass
