"""MeanFlow: the mean velocity between two times, its derivative, its target, few steps."""

import json
from dataclasses import replace

import pytest
import torch

from tests import drawn
from tests.small_run import parts_of, settings, train_small
from tread_zoo import available, create_backbone
from tread_zoo.cli import compose_settings
from tread_zoo.diffusion import (
    CustomGuidance,
    Draw,
    FlowMatching,
    Mean,
    MeanFlow,
    NoGuidance,
    SamplingOptions,
    generate,
    initial_noise,
)
from tread_zoo.diffusion.mean_flow import mean_slope
from tread_zoo.evaluation.held_out import held_out_loss, held_out_record
from tread_zoo.seeding import make_generator
from tread_zoo.training.loop import train
from tread_zoo.training.step import draw_step, step_loss

SHAPE = (4, 1, 8, 8)
ROWS = [name for name in available("backbone") if name.endswith("_tiny")]


def _draw(t, r, dtype=torch.float32):
    generator = make_generator("test", 1)
    x, noise = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
    return x, Draw(noise, torch.tensor(t, dtype=dtype), torch.tensor(r, dtype=dtype))


def _network(name="dit_tiny", **options):
    backbone = create_backbone(name, input_size=8, in_channels=1, num_classes=10, **options)
    generator = make_generator("test", 2)
    with torch.no_grad():
        for parameter in backbone.parameters():  # an untrained DiT would return zeros
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return backbone


@pytest.mark.parametrize("name", ROWS)
def test_every_row_takes_the_other_end_of_a_span(name):
    """At r = t the output equals the output at t, to the bit; below, another."""
    backbone, t, y = _network(name), torch.tensor([0.2, 0.5, 0.9]), torch.tensor([0, 1, 10])
    x = torch.randn(3, *SHAPE[1:], generator=make_generator("test", 3))
    with torch.no_grad():
        at_t = backbone(x, t, y)
        assert torch.equal(backbone(x, t, y, r=t), at_t)
        assert not torch.isclose(backbone(x, t, y, r=t / 2), at_t).all(-1).all(-1).any()
        routes = drawn.draw(backbone, batch=3)
        routed = [backbone(x, t, y, r=r, routes=routes) for r in (t, None)]
        assert torch.equal(*routed)


def test_an_empty_span_is_flow_matching():
    backbone, y = _network(), torch.tensor([0, 1, 2, 10])
    x, draw = _draw([0.1, 0.4, 0.7, 1.0], [0.1, 0.4, 0.7, 1.0])

    def predict(x, t, y=y, **given):
        return backbone(x, t, y, **given)

    flow, _ = FlowMatching().loss(predict, x, draw)
    for objective in (MeanFlow(), MeanFlow(derivative="exact"), MeanFlow(loss_power=0.0)):
        loss, values = objective.loss(predict, x, draw)
        assert torch.equal(values["squared_error"], flow)
        weight = (flow * x[0].numel() + 0.01) / x[0].numel()  # c stands beside the sum
        torch.testing.assert_close(loss, flow / weight**objective.loss_power, rtol=1e-5, atol=0)
        plain, _ = objective.loss(predict, x, Draw(draw.noise, draw.level))
        assert torch.equal(plain, flow)


def test_draws():
    draw = MeanFlow().draw((40000, 1, 1, 1), make_generator("test", 5))
    t, r = draw.level, draw.end
    assert (r <= t).all()
    assert (r == t).double().mean() == pytest.approx(0.75, abs=0.01)
    both = torch.cat([t[r < t], r[r < t]]).logit()  # of two draws, the larger and the smaller
    assert both.mean() == pytest.approx(-0.4, abs=0.03)
    assert both.std() == pytest.approx(1.0, abs=0.03)


def test_gaussian_data_in_closed_form(gaussian):
    """Of the known mean velocity u, u + (t - r) d/dt u is the known velocity (eq. 6)."""
    problem = gaussian("mean_flow")
    x, draw = _draw([0.3, 0.6, 0.9, 1.0], [0.1, 0.2, 0.8, 0.0], torch.float64)
    predict, t, r = problem.predict(), draw.level, draw.end
    velocity = predict(x, t)
    slope = mean_slope(predict, x, t, r, velocity)
    left = predict(x, t, r) + (t - r).view(-1, 1, 1, 1) * slope
    torch.testing.assert_close(left, velocity, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("derivative", ["exact", "difference"])
def test_the_loss_of_the_true_mean_is_zero(gaussian, derivative):
    """Of data that are one point the drawn velocity is the true one."""
    problem = replace(gaussian("mean_flow"), std=0.0)
    _, draw = _draw([0.3, 0.6, 0.9, 1.0], [0.1, 0.599, 0.8, 0.0], torch.float64)
    x = torch.full(SHAPE, problem.mean, dtype=torch.float64)
    loss, _ = MeanFlow(derivative=derivative).loss(problem.predict(), x, draw)
    assert loss.max() < 1e-12


def test_the_difference_by_hand():
    """Of u = 3 x + 2 t - r, over a span of more than the step and of less, in float64."""
    x, draw = _draw([0.9, 0.9, 0.9, 1.0], [0.1, 0.7, 0.8, 0.0], torch.float64)
    step, t, r = 0.25, *(each.view(-1, 1, 1, 1) for each in (draw.level, draw.end))

    def u(x, t, r):
        return 3 * x + 2 * t.view(-1, 1, 1, 1) - r.view(-1, 1, 1, 1)

    x_t, velocity = (1 - t) * x + t * draw.noise, draw.noise - x
    slope = (u(x_t, t, r) - u(x_t - step * velocity, t - step, r)) / step
    target = velocity - (t - r - step).clamp(min=0) * slope
    objective = MeanFlow(step=step, loss_power=0.0)
    loss, _ = objective.loss(lambda x, t, r: u(x, t, r), x, draw)
    torch.testing.assert_close(loss, (u(x_t, t, r) - target).square().mean(dim=(1, 2, 3)))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_an_exact_derivative_or_says_so(name):
    x, draw = _draw([0.5, 0.7, 0.9, 1.0], [0.2, 0.0, 0.8, 0.0])
    objective = MeanFlow(derivative="exact")
    without = ("gla", "mamba", "mamba2", "rwkv", "rwkv7", "zigma")
    if name.removesuffix("_tiny") in without:
        with pytest.raises(ValueError, match="derivative"):
            objective.loss(_network(name), x, draw)
    else:
        assert objective.loss(_network(name), x, draw)[0].isfinite().all()


@pytest.mark.parametrize("name", ["dit_tiny", "lightning_dit_tiny"])
def test_the_difference_tends_to_the_derivative(name):
    """In float64, in proportion to its step."""
    backbone = _network(name, time_scale=1.0).double()
    x, draw = _draw([0.5, 0.7, 0.9, 1.0], [0.2, 0.0, 0.8, 0.0], torch.float64)

    def error(**options):
        objective = MeanFlow(loss_power=0.0, **options)
        with torch.no_grad():
            return objective.loss(backbone, x, draw)[0]

    exact = error(derivative="exact")
    coarse, fine = (error(step=step) - exact for step in (2e-4, 1e-4))
    assert fine.abs().max() < 1e-3 * exact.max()
    torch.testing.assert_close(coarse / fine, torch.full_like(fine, 2), rtol=0.05, atol=0)


def test_guidance_inside_the_target():
    """Equation 19, at r = t, where there is no correction."""
    x, draw = _draw([0.2, 0.4, 0.6, 0.8], [0.2, 0.4, 0.6, 0.8])
    objective = MeanFlow(guidance_scale=1.5, guidance_mix=0.4, loss_power=0.0)

    def predict(x, t, y=True, **given):
        return 3 * x if y else 2 * x

    x_t = objective.noised(x, draw)
    target = 1.5 * (draw.noise - x) + 0.4 * 3 * x_t + (1 - 1.5 - 0.4) * 2 * x_t
    loss, _ = objective.loss(predict, x, draw)
    torch.testing.assert_close(loss, (3 * x_t - target).square().mean(dim=(1, 2, 3)))


def test_held_out_losses_of_other_targets_compare():
    """They are flow matching's levels, whatever the target and its weight."""
    one, other = (parts_of(settings("objective=mean_flow", *more)) for more in ([], [
        "objective.derivative=exact", "objective.loss_power=0", "objective.equal_fraction=0.5",
        "objective.guidance_scale=2", "objective.guidance_mix=0.5",
    ]))  # fmt: skip
    losses, records = zip(*(
        (held_out_loss(one.backbone, setup.objective, one.data, seed=0, precision="fp32"),
         held_out_record(setup.objective, setup.data, seed=0, num_draws=1))
        for setup in (one, other)
    ), strict=True)  # fmt: skip
    assert losses[0] == losses[1]
    assert records[0] == records[1]


# Sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_step_goes_by_the_mean(num_steps):
    """Equation 12, x_r = x_t - (t - r) u; guidance mixes means."""
    backbone, y, ones = _network(), torch.tensor([3, 7]), torch.ones(2)
    for guidance, scale in ((NoGuidance(), 1), (CustomGuidance(scale=2.0, drop_label=True), 2)):
        options = SamplingOptions(Mean(), num_steps, guidance=guidance)
        images = generate(
            backbone, MeanFlow(), options, indices=[0, 1], labels=y, seed=0, batch_size=2
        )
        x = initial_noise(SHAPE[1:], 0, [0, 1])
        for i in range(num_steps):
            t, r = (ones * (1 - j / num_steps) for j in (i, i + 1))
            with torch.no_grad():
                weak, strong = (backbone(x, t, label, r=r) for label in (None, y))
            x = x - (weak + scale * (strong - weak)) / num_steps
        torch.testing.assert_close(images, x, rtol=1e-4, atol=1e-4)


# Training -----------------------------------------------------------------------------------------


def test_all_calls_of_a_step_keep_the_same_tokens():
    setup = parts_of(
        settings(
            "objective=mean_flow", "objective.guidance_scale=2", "objective.guidance_mix=0.5",
        )
    )  # fmt: skip
    calls = []

    def network(x, t, y, *, routes, r=None):
        calls.append(routes[0].ids)
        return setup.backbone(x, t, y, routes=routes, r=r)

    drawn = draw_step(setup, next(setup.batches(0, 1, 0)), 0, 0, torch.device("cpu"))
    step_loss(setup, drawn, model=network)
    assert len(calls) == 4
    assert all(torch.equal(calls[0], other) for other in calls)


@pytest.mark.slow
def test_training_and_sampling(tmp_path):
    run = train_small(
        tmp_path, "objective=mean_flow", "sampler=mean", "sampler.num_steps=1", "routing=tread",
        "objective.guidance_scale=2",
    )  # fmt: skip
    assert '"squared_error"' in (run / "metrics.jsonl").read_text()


@pytest.mark.nightly
def test_one_step_shows_the_label(tmp_path):
    """The documented experiment, smaller and shorter: 76 s on one thread of an Intel Xeon."""
    size = ["backbone=dit_tiny", "backbone.depth=8", "training.num_steps=500"]
    settings = compose_settings("train", ["experiment=digits_one_step", *size])
    run = train(**{**settings, "run_dir": str(tmp_path / "run")})
    score = json.loads((run / "score.json").read_text())
    assert score["protocol"]["nfe"] == 1
    assert score["values"]["label_accuracy"] > 0.85


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("routing=maskdit", "routing=maskdit"),
        ("routing=token_merging", "routing=token_merging"),
        ("routing.selector=norm", "selector"),
        ("training.label_dropout=0", "label_dropout"),
    ],
)
def test_training_that_cannot_give_what_it_needs_is_refused(override, word):
    with pytest.raises(ValueError, match=word):
        parts_of(settings("objective=mean_flow", "objective.guidance_scale=2", override))
