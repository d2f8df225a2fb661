"""The loss of an objective for each token. The objective gets each patch as an image of its own, so
its loss must not relate pixels of different patches.

B batch, N tokens, C channels, p patch size.
"""

from typing import Any

import torch
from torch import Tensor

from tread_zoo.contract.layers import patchify, unpatchify


def token_losses(
    objective: Any, predict: Any, x: Tensor, draw: Any, levels: Tensor, patch_size: int
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the loss of each token [B, N], a dict of the further values that `objective.loss`
    returns, and the network's output [B, C_out, H, W].

    Args:
        objective, predict, x, draw: see `tread_zoo.diffusion.Objective.loss`.
        levels: noise levels [B], or [B, N]; `predict` gets noise labels of the same shape.
        patch_size: side of a patch in pixels.
    """
    p, batch, grid = patch_size, len(x), (x.shape[2] // patch_size, x.shape[3] // patch_size)
    num_tokens = grid[0] * grid[1]
    outputs: list[Tensor] = []

    def cut(images: Tensor) -> Tensor:
        """Return each patch of `images` [B, C, H, W] as an image of side p: [B N, C, p, p]."""
        return patchify(images, p).view(batch * num_tokens, -1, p, p)

    def predict_patches(patches: Tensor, t: Tensor) -> Tensor:
        tokens = patches.permute(0, 2, 3, 1).reshape(batch, num_tokens, -1)
        t = t.view(batch, num_tokens)
        images = unpatchify(tokens, p, grid)
        outputs.append(predict(images, t if levels.ndim == 2 else t[:, 0]))
        return cut(outputs[0])

    each = levels if levels.ndim == 2 else levels[:, None].expand(-1, num_tokens)
    drawn = type(draw)(cut(draw.noise), each.reshape(-1))
    losses, values = objective.loss(predict_patches, cut(x), drawn)
    return losses.view(batch, num_tokens), values, outputs[0]


def loss_by_token(
    objective: Any, predict: Any, x: Tensor, draw: Any, *, patch_size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each image [B], which is the mean over the image's tokens, and a dict of
    the further values that `objective.loss` returns. Each token has its own noise level,
    `draw.token_levels` [B, N]. For the arguments see `token_losses`."""
    losses, values, _ = token_losses(objective, predict, x, draw, draw.token_levels, patch_size)
    return losses.mean(dim=1), values


def split_loss(
    objective: Any,
    predict: Any,
    x: Tensor,
    draw: Any,
    *,
    bypassed: Tensor,
    patch_size: int,
    weight: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss of each image [B] that treats kept and bypassed tokens differently.

    Let l_i be the objective's loss at patch i, x_t the noisy input, D the estimate of the clean
    data, S the set of kept and M the set of bypassed tokens. Then, as in MaskDiT (arXiv 2306.09305,
    section 3.3),

        L = mean over S of l_i + weight mean over M of |D_i - x_t,i|^2

    The second term, a mean over the values of a patch, reconstructs the noisy input. MaskDiT's
    weight is 0.1. Its released code also standardises each patch of x_t; its formula does not. The
    term grows with the squared noise, so it dominates with objective=ddpm, whose sigma reaches 157.

    Args:
        objective, predict, x, draw: see `tread_zoo.diffusion.Objective.loss`.
        bypassed: bool [B, N], True for tokens that bypassed.
        patch_size: side of a patch in pixels.
        weight: factor on the second term.

    Returns:
        The losses, and a dict: the further values of `objective.loss`, and `reconstruction`, the
        mean over M (0 where M is empty).
    """
    losses, values, output = token_losses(objective, predict, x, draw, draw.level, patch_size)
    shape = (-1, *[1] * (x.ndim - 1))
    x_t = objective.signal(draw.level).view(shape) * x
    x_t = x_t + objective.noise(draw.level).view(shape) * draw.noise
    slope = objective.dx_dt(lambda *_: output, x_t, draw.level)
    miss = (objective.estimate(x_t, slope, draw.level) - x_t).square()
    missed = patchify(miss, patch_size).mean(dim=2)
    reconstruction = _mean(missed, bypassed)
    losses = _mean(losses, ~bypassed) + weight * reconstruction
    return losses, {**values, "reconstruction": reconstruction}


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of each row of `values` [B, N] where `chosen` [B, N] is True: [B]; 0 for rows
    without any."""
    total = torch.where(chosen, values, 0.0).sum(dim=1)
    return total / chosen.sum(dim=1).clamp_min(1)
