"""Losses of kept and bypassed patches, beside a loop over patches."""

import pytest
import torch

from tread_zoo.diffusion import EDM, FlowMatching
from tread_zoo.routing.token_loss import split_loss

P, SIDES = 2, (4, 6)


def estimate(objective, raw, x_t, level):
    """Return the clean data behind x_t as the raw output means it."""
    if isinstance(objective, FlowMatching):
        return x_t - level * raw
    std = objective.sigma_data
    total = level**2 + std**2
    return std**2 / total * x_t + level * std / total**0.5 * raw


@pytest.mark.parametrize("objective", [EDM(), FlowMatching()], ids=["edm", "flow"])
def test_each_patch_has_its_own_loss(objective):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, *SIDES, generator=generator)
    draw = objective.draw(x.shape, generator)
    raw = torch.randn(3, 4, *SIDES, generator=generator)  # 2 C channels, as with a learned sigma
    bypassed = torch.tensor([[1, 0, 0, 1, 0, 1], [0] * 6, [0, 1, 1, 1, 1, 1]]).bool()
    given = []
    losses, values = split_loss(
        objective, lambda *inputs: given.append(inputs) or raw, x, draw,
        bypassed=bypassed, patch_size=P, weight=0.3,
    )  # fmt: skip
    plain, _ = objective.loss(lambda *inputs: given.append(inputs) or raw, x, draw)
    for one, other in zip(*given, strict=True):  # the network is shown images, once
        torch.testing.assert_close(one, other)
    for i in range(3):
        t, kept, away = float(draw.level[i]), [], []
        signal, weight = 1 - t, 1 / t**2
        if isinstance(objective, EDM):
            signal, weight = 1, 1 / t**2 + 1 / objective.sigma_data**2
        x_t = signal * x[i] + t * draw.noise[i]
        clean = estimate(objective, raw[i, :2], x_t, t)
        for n in range(6):
            place = (..., slice(n // 3 * P, n // 3 * P + P), slice(n % 3 * P, n % 3 * P + P))
            if bypassed[i, n]:
                away.append((clean - x_t)[place].square().mean())
            else:
                kept.append(weight * (clean - x[i])[place].square().mean())
        expected = sum(away) / max(1, len(away))
        torch.testing.assert_close(values["reconstruction"][i], torch.as_tensor(expected))
        torch.testing.assert_close(losses[i], sum(kept) / len(kept) + 0.3 * expected)
    torch.testing.assert_close(losses[1], plain[1])
