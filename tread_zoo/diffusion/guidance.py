"""Guidance combines two drifts: away from a weak prediction, towards and past a strong one.

    d = d_weak + w (d_strong - d_weak)           w = 0: weak, w = 1: strong, w > 1: extrapolation

This is classifier-free guidance (arXiv 2207.12598, with w = 1 + its w) where the weak prediction
has no label, and also autoguidance or guidance by a sparser route where it is something else. At
one (x, level) the drift is an affine function of the estimate (EDM's denoiser D, flow matching's
velocity), with the same coefficients in both branches; so guiding drifts is guiding estimates, of
all C channels.

Dimensions: B batch, C channels, H height, W width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tread_zoo.diffusion.objective import Network, Objective
from tread_zoo.diffusion.samplers import Drift


def combine(weak: Drift, strong: Drift, scale: float) -> Drift:
    """Return weak + scale (strong - weak); at a scale of 1 or 0 that branch itself, alone.

    Raises:
        ValueError: `scale` is negative or not finite.
    """
    check_scale(scale)
    if scale == 1:
        return strong
    if scale == 0:
        return weak

    def guided(x: Tensor, level: Tensor) -> Tensor:
        weak_drift = weak(x, level)
        return weak_drift + scale * (strong(x, level) - weak_drift)

    return guided


def check_scale(scale: float) -> None:
    """Raise `ValueError` unless `scale` is finite and at least 0."""
    if not math.isfinite(scale) or scale < 0:
        raise ValueError(
            f"guidance scale={scale} must be finite and at least 0: 0 is the weak branch, 1 the "
            "strong one, more than 1 guides."
        )


def classifier_free(
    network_of_labels: Callable[[Tensor], Network],
    labels: Tensor,
    null_label: int,
    *,
    objective: Objective,
    scale: float = 1.0,
) -> Drift:
    """Return the drift of classifier-free guidance for `labels` [B].

    Two calls of B rather than one of 2B: what else is bound to the network, such as routes [B,K],
    then keeps its batch size, and the memory stays that of unguided sampling.

    Args:
        network_of_labels: binds labels [B] to a network.
        labels: the classes to sample.
        null_label: the label that stood for "no class" in training.
        objective: turns a network into a drift.
        scale: 1, the default, is the conditional branch alone; 0 the unconditional one; at both
            only that branch is evaluated.

    Raises:
        ValueError: `scale` is negative or not finite.
    """

    def drift_for(bound: Tensor) -> Drift:
        network = network_of_labels(bound)
        return lambda x, level: objective.drift(network, x, level)

    null_labels = torch.full_like(labels, null_label)
    return combine(weak=drift_for(null_labels), strong=drift_for(labels), scale=scale)
