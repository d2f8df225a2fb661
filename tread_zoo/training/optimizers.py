"""Optimizers: dataclasses of options whose `build` makes a `torch.optim.Optimizer` of a backbone.

The loop multiplies the learning rate that each parameter group starts with by the schedule's
factor; it knows nothing else of an optimizer.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import NonNegativeFloat, PositiveFloat

from tread_zoo.backbone import Backbone
from tread_zoo.registry import register


class OptimizerPart(Protocol):
    """What is registered as an optimizer."""

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters of `backbone`, on their device."""


@register("optimizer", "adamw")
@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101), of every parameter alike.

    Args:
        learning_rate: its peak; auto is what the backbone's preset is trained with.
        weight_decay, beta1, beta2: as of torch.
    """

    learning_rate: Literal["auto"] | PositiveFloat = "auto"
    weight_decay: NonNegativeFloat = 0.0
    beta1: NonNegativeFloat = 0.9
    beta2: NonNegativeFloat = 0.99

    def build(self, backbone: Backbone) -> torch.optim.Optimizer:
        """Return torch's AdamW; the step is one kernel where torch has one."""
        assert self.learning_rate != "auto", "make_config resolves it"
        return torch.optim.AdamW(
            backbone.parameters(),
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            fused=next(backbone.parameters()).device.type in ("cpu", "cuda"),
        )
