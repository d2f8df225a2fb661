"""Losses per token: with a level for each token, or split into kept and bypassed tokens.

The objective gets each patch as an image, so it must not mix pixels. The split loss is that of
MaskDiT (arXiv 2306.09305, section 3.3). With the objective's loss l_i at patch i, its estimate D of
the clean data, and the sets S of kept and M of bypassed tokens,

    L = mean over S of l_i + weight mean over M of |D_i - x_t,i|^2

The second term reconstructs the noisy input, D - x_t. MaskDiT's weight is 0.1; its released code
also standardises each patch of x_t, its formula does not. The term grows with the squared noise, so
it outweighs all else with objective=ddpm, whose sigma reaches 157. A weight of 0 leaves bypassed
tokens out of the loss, as in MicroDiT (arXiv 2407.15811).

B batch, N tokens, C channels, p patch size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tread_zoo.contract.layers import patchify, unpatchify
from tread_zoo.diffusion.objective import Draw, Objective, Predict, per_image


def split_loss(
    objective: Objective,
    predict: Predict,
    x: Tensor,
    draw: Draw,
    *,
    bypassed: Callable[[], Tensor],
    patch_size: int,
    weight: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each image [B] as above, the values of `objective.loss`, and
    `reconstruction`, the mean over M, or 0 where M is empty.

    Args:
        objective, predict, x, draw: as of `Objective.loss`.
        bypassed: called after `predict`: bool [B, N].
        patch_size, weight: p, of the second term.
    """
    losses, values, output = _token_losses(
        objective, predict, x, draw.noise, draw.level, patch_size
    )
    x_t = per_image(objective.signal(draw.level)) * x
    x_t = x_t + per_image(objective.noise(draw.level)) * draw.noise
    slope = objective.dx_dt(lambda *_: output, x_t, draw.level)
    miss = (objective.estimate(x_t, slope, draw.level) - x_t).square()
    missed = patchify(miss, patch_size).mean(dim=2)
    away = bypassed()
    reconstruction = _mean(missed, away)
    losses = _mean(losses, ~away) + weight * reconstruction
    return losses, {**values, "reconstruction": reconstruction}


def loss_by_token(
    objective: Objective, predict: Predict, x: Tensor, draw: Draw, *, patch_size: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each image [B] whose tokens have `draw.token_levels` [B, N], which
    `predict` gets as noise labels, and the values of `objective.loss`.

    Args:
        objective, predict, x, draw: as of `Objective.loss`.
        patch_size: p.
    """
    assert draw.token_levels is not None
    losses, values, _ = _token_losses(
        objective, predict, x, draw.noise, draw.token_levels, patch_size
    )
    return losses.mean(dim=1), values


def _token_losses(
    objective: Objective, predict: Predict, x: Tensor, noise: Tensor, levels: Tensor, p: int
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the losses [B, N], the objective's values, and the output, at levels [B] or [B, N]."""
    batch, grid = len(x), (x.shape[2] // p, x.shape[3] // p)
    num_tokens = grid[0] * grid[1]
    outputs: list[Tensor] = []

    def cut(images: Tensor) -> Tensor:
        """Return [B N, C, p, p]."""
        return patchify(images, p).view(batch * num_tokens, -1, p, p)

    def predict_patches(patches: Tensor, t: Tensor) -> Tensor:
        tokens = patches.permute(0, 2, 3, 1).reshape(batch, num_tokens, -1)
        t = t.view(batch, num_tokens)
        images = unpatchify(tokens, p, grid)
        outputs.append(predict(images, t if levels.ndim == 2 else t[:, 0]))
        return cut(outputs[0])

    each = levels if levels.ndim == 2 else levels[:, None].expand(-1, num_tokens)
    losses, values = objective.loss(predict_patches, cut(x), Draw(cut(noise), each.reshape(-1)))
    return losses.view(batch, num_tokens), values, outputs[0]


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the means [B] of the chosen values of [B, N]; 0 if there are none."""
    total = torch.where(chosen, values, 0.0).sum(dim=1)
    return total / chosen.sum(dim=1).clamp_min(1)
