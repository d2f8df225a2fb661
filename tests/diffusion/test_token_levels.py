"""Two noise levels in one image: what tokens draw, how each is noised, what training needs."""

from dataclasses import replace

import pytest
import torch

from tests.small_run import parts_of, settings, train_small
from tread_zoo.contract.layers import patchify
from tread_zoo.diffusion import FlowMatching
from tread_zoo.routing.token_loss import loss_by_token
from tread_zoo.seeding import make_image_generator
from tread_zoo.training.step import draw_step, step_loss

P, SHAPE = 2, (3, 1, 8, 8)


def _generator(batch, number=0):
    return make_image_generator("test", 0, number, images=range(batch), device="cpu")


def _draw(objective):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return x, objective.draw(SHAPE, _generator(3))


@pytest.mark.parametrize("space", ["velocity", "noise"])
def test_equal_times_are_plain(space):
    """Of images, noise and times in eighths, of which no sum is rounded, to the bit."""
    objective = FlowMatching(loss_space=space)
    x, draw = _draw(objective)
    x, noise = ((8 * z).round() / 8 for z in (x, draw.noise))
    draw = replace(draw, noise=noise, level=torch.tensor([0.125, 0.5, 0.75]))
    each = replace(draw, token_levels=draw.level[:, None].expand(-1, 16))
    plain, _ = objective.loss(lambda x, t: x.clamp(max=1), x, draw)
    losses, _ = loss_by_token(objective, lambda x, t: x.clamp(max=1), x, each, patch_size=P)
    assert torch.equal(losses, plain)


def test_without_a_second_level_nothing_changes():
    given = [parts_of(settings(*more)) for more in ([], ["objective.second_level_fraction=0"])]
    cpu = torch.device("cpu")
    drawn = [draw_step(one, next(one.batches(0, 1, 0)), 0, 0, cpu) for one in given]
    assert torch.equal(*(step_loss(*pair).losses for pair in zip(given, drawn, strict=True)))


def test_each_token_is_noised_at_its_own_time():
    objective = FlowMatching(second_level_fraction=0.25)
    x, draw = _draw(objective)
    t = objective.draw_token_levels(draw.level, 16, _generator(3, 1))
    given = []

    def predict(x_t, each):
        given.append((x_t, each))
        return x_t

    losses, _ = loss_by_token(objective, predict, x, replace(draw, token_levels=t), patch_size=P)
    ((x_t, each),) = given
    assert torch.equal(each, t)
    patches, noise = patchify(x, P), patchify(draw.noise, P)
    noised = (1 - t[..., None]) * patches + t[..., None] * noise
    torch.testing.assert_close(patchify(x_t, P), noised)
    expected = (noised - (noise - patches)).square().mean(dim=(1, 2))
    torch.testing.assert_close(losses, expected)


def test_a_token_s_time_is_distributed_as_an_image_s():
    objective = FlowMatching(
        second_level_fraction=0.25, time_distribution="logit_normal", logit_mean=0.5, shift=2.0
    )
    level = objective.draw((20000, 1, 1, 1), _generator(20000)).level
    times = objective.draw_token_levels(level, 4, _generator(20000, 1))
    assert (times != level[:, None]).double().mean() == pytest.approx(0.25, abs=0.01)
    assert all(len(row.unique()) <= 2 for row in times[:100])
    places = torch.tensor([0.1, 0.5, 0.9])
    for one in (times[:, 0], times[:, 3]):
        torch.testing.assert_close(
            one.quantile(places), level.quantile(places), atol=0.01, rtol=0.01
        )


@pytest.mark.slow
def test_training(tmp_path):
    """Routed, without alignment: the draws belong to the step, and the run ends."""
    overrides = ("objective.second_level_fraction=0.25", "routing=tread")
    setup = parts_of(settings(*overrides))
    batch = next(setup.batches(0, 1, 0))
    first, again = (draw_step(setup, batch, 0, 0, torch.device("cpu"))[2] for _ in range(2))
    assert torch.equal(first.token_levels, again.token_levels)
    assert (first.token_levels != first.level[:, None]).any()
    train_small(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["backbone=mamba_tiny"], "second_level_fraction"),
        (["routing=maskdit"], "maskdit"),
    ],
)
def test_what_a_second_level_does_not_fit_is_refused(overrides, word):
    with pytest.raises(ValueError, match=word):
        parts_of(settings("objective.second_level_fraction=0.25", *overrides))
