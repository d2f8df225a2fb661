"""Schedules and importance in real steps: what is drawn, what it costs, and how it resumes."""

import logging
import os
import signal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.small_run import parts_of, settings
from tests.training.test_resume import assert_same_end
from tread_zoo.comparison import read_run
from tread_zoo.evaluation.flops import count_flops, training_flops
from tread_zoo.kernels import set_forms
from tread_zoo.routing import PendingRoute, build_selector, num_kept_tokens
from tread_zoo.seeding import make_generator
from tread_zoo.training import loop as module
from tread_zoo.training.loop import losses_of
from tread_zoo.training.parts import draw_step
from tread_zoo.training.stopping import Stopped

CPU = torch.device("cpu")
LINEAR = ["routing.schedule=linear", "routing.selection_rate=0.75", "routing.final_rate=0.25"]
STEPS = [
    "routing.schedule=steps", "routing.selection_rate=0.75", "routing.rate_steps=[[0.5, 0.25]]",
]  # fmt: skip
EVERYTHING = [
    "routing.selector=norm", "routing.probability=0.7", "routing.dense_tail=0.2",
    "training.gradient_accumulation_steps=2", "training.activation_checkpointing=true",
]  # fmt: skip


def draws(parts, num_micro_steps, rank=0):
    """Return what a rank draws at each micro-step of a run."""
    images, labels = next(parts.batches(0, 1, 0))
    return [
        draw_step(
            parts, images, labels, rank=rank, num_ranks=rank + 1, micro_step=micro, device=CPU
        )
        for micro in range(num_micro_steps)
    ]


@pytest.fixture
def plain_attention():
    """The fused attention of a CPU counts what its backward pass computes again."""
    set_forms({"attention": "naive"})
    yield
    set_forms({})


def kept(drawn):
    return [route.num_kept for route in drawn.routes]


def test_the_order_of_the_draws_is_what_it_always_was():
    """Flips, dropped labels, level and noise, ids: a run of before schedules repeats to the bit."""
    parts = parts_of(settings("routing.selection_rate=0.25", "routing.selector=blocks"))
    (drawn,) = draws(parts, 1)
    generator = make_generator("train", 0, 0, 0)
    for _ in range(2):
        torch.rand(8, generator=generator)
    expected = parts.objective.draw((8, 1, 8, 8), generator)
    assert torch.equal(drawn.draw.noise, expected.noise)
    assert torch.equal(drawn.draw.level, expected.level)
    ids = build_selector("blocks")(8, (4, 4), num_kept_tokens(16, 0.25), generator)
    assert torch.equal(drawn.routes[0].ids, ids)


@pytest.mark.parametrize("options", [["routing=none"], [*LINEAR, "routing.selector=norm"]])
def test_routing_changes_no_other_draw(options):
    plain = draws(parts_of(settings()), 3)
    for one, other in zip(plain, draws(parts_of(settings(*options)), 3), strict=True):
        assert torch.equal(one.draw.noise, other.draw.noise)
        assert torch.equal(one.draw.level, other.draw.level)
        assert torch.equal(one.labels, other.labels)


def test_micro_steps_and_ranks_of_a_step_are_routed_alike():
    parts = parts_of(settings(*LINEAR, *EVERYTHING, "training.num_steps=20"))
    found = [kept(drawn) for drawn in draws(parts, 40)]
    assert found[::2] == found[1::2]
    assert found == [kept(drawn) for drawn in draws(parts, 40, rank=1)]
    assert found[32:] == [[]] * 8
    assert [] in found[:32]
    assert {4, 12} <= {count for counts in found[:32] for count in counts}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_norm_keeps_what_the_importance_says_and_sends_gradients(precision, monkeypatch):
    parts = parts_of(settings("routing.selector=norm", f"training.precision={precision}"))
    torch.manual_seed(0)
    for parameter in parts.backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    (drawn,) = draws(parts, 1)
    (pending,) = drawn.routes
    assert isinstance(pending, PendingRoute)
    calls, given = [], []
    original = parts.backbone.importance

    def importance(*arguments):
        given.append((torch.is_autocast_enabled("cpu"), original(*arguments)))
        return given[-1][1]

    monkeypatch.setattr(parts.backbone, "importance", importance)

    def model(x, t, y, *, routes):
        calls.append((x, t, y, routes))
        return parts.backbone(x, t, y, routes=routes)

    losses_of(model, parts, drawn).mean().backward()
    ((x, t, y, (route,)),) = calls
    ((half, by_norm),) = given
    assert half == (precision == "bf16")
    assert torch.equal(route.ids, pending.resolve(by_norm).ids)
    torch.testing.assert_close(by_norm, original(x, t, y, route.start), atol=0.0, rtol=0.02)
    assert all(torch.isfinite(p.grad).all() for p in parts.backbone.parameters())


@pytest.mark.parametrize(
    "options",
    [
        ["routing.warm_start=0.4", "routing.selector=norm", *LINEAR],
        ["routing.schedule=steps", "routing.rate_steps=[[0.5, 0.0]]", "routing.dense_tail=0.2"],
        ["routing.routes=[{start: 1, end: 2, selector: norm}, {start: 2, end: 3}]", *LINEAR],
    ],
)
def test_the_flops_of_a_run_are_the_mean_over_its_steps(options, plain_attention):
    parts = parts_of(settings(*options))
    total = 0
    for drawn in draws(parts, 6):
        with FlopCounterMode(display=False) as counter:
            losses_of(parts.backbone, parts, drawn).mean().backward()
        total += counter.get_total_flops()
    assert training_flops(parts.backbone, parts.routing, 6) == pytest.approx(total / 6 / 8)


def test_a_probability_weighs_routed_and_dense_steps():
    parts = parts_of(settings("routing.probability=0.25", "routing.dense_tail=0.5"))
    dense = count_flops(parts.backbone, backward=True)
    (route,) = parts.routing.draw(1, (4, 4), make_generator("test"))
    routed = count_flops(parts.backbone, routes=[route], backward=True)
    expected = (dense * 0.75 + routed * 0.25) / 2 + dense / 2
    assert training_flops(parts.backbone, parts.routing, 10) == pytest.approx(expected)


def test_importance_costs_the_blocks_ahead_of_the_route():
    parts = parts_of(settings())
    norm = parts_of(settings("routing.selector=norm"))
    start = norm.routing.plans[0].start
    x, t, y = torch.randn(1, 1, 8, 8), torch.rand(1), torch.tensor([3])
    with FlopCounterMode(display=False) as counter:
        norm.backbone.importance(x, t, y, start)
    extra = counter.get_total_flops()
    assert extra > 0
    plain, by_norm = (training_flops(p.backbone, p.routing, 6) for p in (parts, norm))
    assert by_norm == plain + extra


def test_a_scheduled_run_by_importance_tells_its_cost_and_resumes_to_the_bit(
    run, monkeypatch, caplog
):
    options = [*STEPS, *EVERYTHING, "training.precision=bf16"]
    with caplog.at_level(logging.INFO):
        unbroken = run("unbroken", *options)
    parts = parts_of(settings(*options))
    mean = training_flops(parts.backbone, parts.routing, 6)
    assert "see 4 … 12 of 16 tokens (norm; rate 0.75, from 50% 0.25)" in caplog.text
    assert f"{mean / 1e6:.1f} MFLOPs an image, forward and backward, on average over" in caplog.text
    parts.backbone.checkpoint_blocks = False  # the table leaves out what is computed twice
    assert read_run(unbroken).flops == round(training_flops(parts.backbone, parts.routing, 6))

    original = module.draw_step

    def draw(parts, *batch, micro_step, **keywords):
        if micro_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(parts, *batch, micro_step=micro_step, **keywords)

    monkeypatch.setattr(module, "draw_step", draw)
    with pytest.raises(Stopped):
        run("broken", *options)
    monkeypatch.undo()
    assert_same_end(unbroken, run("broken", *options, "resume=latest"))


def test_a_run_too_short_to_route_says_so():
    with pytest.raises(ValueError, match=r"warm_start=0.4 .*dense_tail=0.3 .*num_steps=2 "):
        parts_of(
            settings("routing.warm_start=0.4", "routing.dense_tail=0.3", "training.num_steps=2")
        )
    assert parts_of(settings("routing=none", "training.num_steps=1")).routing.plans == ()
