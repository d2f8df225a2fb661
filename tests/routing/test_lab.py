"""Every selector and every schedule with every architecture: one real step.

The objectives take turns, so that each meets every architecture, every selector, every schedule.
"""

import dataclasses
import functools

import pytest
import torch

from tests.small_run import parts_of, settings
from tests.test_contract import SMALL
from tread_zoo import available
from tread_zoo.routing import GAPS, ORDERS, build_routing, num_kept_tokens
from tread_zoo.training.loop import step_loss

OBJECTIVES = available("objective")
SELECTOR_NAMES = available("selector")
NUM_STEPS = 8
SELECTORS = {
    **{name: {"selector": name} for name in SELECTOR_NAMES},
    "hilbert": {"selector": {"name": "segments", "order": "hilbert"}},
    "per batch": {"selector": "blocks", "per_batch": True},
    "per batch norm": {"selector": "norm", "per_batch": True},
}
# name -> fields of the routing, and the rate of the step that is taken; None: it is dense
SCHEDULES = {
    "linear": ({"schedule": "linear", "final_rate": 0.75}, 7, 0.75),
    "cosine": ({"schedule": "cosine", "final_rate": 0.25}, 7, 0.25),
    "steps": ({"schedule": "steps", "rate_steps": [[0.25, 0.625]]}, 2, 0.625),
    "warm start": ({"warm_start": 0.25, "selector": "norm"}, 1, None),
    "dense tail": ({"dense_tail": 0.25}, 7, None),
    "probability": ({"probability": 1e-9}, 3, None),
}
CASES = {
    **{name: (fields, 3, 0.5) for name, fields in SELECTORS.items()},
    **SCHEDULES,
}


WALKS = {  # of the scans
    **{gaps: [f"backbone.gaps={gaps}"] for gaps in GAPS},
    **{name: [f"backbone.scan_order={name}", "backbone.gaps=decay"] for name in ORDERS},
    "unsorted": ["backbone.scan_order=unsorted", "backbone.gaps=ignore"],
}
RATES = (0.25, 0.5, 0.625, 0.75)


@functools.cache
def small_parts(backbone, objective, *more):
    """Return the parts of a tiny run whose weights are random everywhere."""
    parts = parts_of(
        settings(
            f"backbone={backbone}", f"objective={objective}", "training.batch_size=3",
            f"training.num_steps={NUM_STEPS}",
            *(f"backbone.{key}={value}" for key, value in SMALL[backbone].items()), *more,
        )
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in parts.backbone.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return parts


def with_routing(parts, fields):
    network = parts.backbone
    routing = build_routing(
        "tread", num_blocks=network.num_blocks, default_selector=network.default_selector,
        start=1, end=3, **fields,
    )  # fmt: skip
    return dataclasses.replace(parts, routing=routing)


def step_of(setup, step):
    """Return the routes that the network got in a step, its loss and its gradients."""
    got = []

    def model(x, t, y, *, routes):
        got.extend(routes)
        return setup.backbone(x, t, y, routes=routes)

    setup.backbone.zero_grad()
    loss = step_loss(setup, next(setup.batches()), step, model=model).losses.mean()
    loss.backward()
    return got, loss.detach(), [p.grad for p in setup.backbone.parameters()]


def in_turns():
    """Return (backbone, objective, case): every selector with every backbone, and a schedule, which
    knows no backbone, with one of them."""
    backbones, objectives = list(SMALL), available("objective")
    return [
        (backbone, objectives[(row + column) % len(objectives)], case)
        for row, backbone in enumerate(backbones)
        for column, case in enumerate(CASES)
        if case in SELECTORS or column % len(backbones) == row
    ]


@pytest.mark.parametrize(("backbone", "objective", "case"), in_turns())
def test_one_step(backbone, objective, case):
    fields, step, rate = CASES[case]
    check_step(with_routing(small_parts(backbone, objective), fields), step, rate, case)


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("backbone", ["mamba_tiny", "mamba2_tiny", "rwkv_tiny"])
def test_one_step_of_every_walk(backbone, walk):
    turn = list(WALKS).index(walk) + len(backbone)
    objective = available("objective")[turn % len(available("objective"))]
    parts = small_parts(backbone, objective, *WALKS[walk])
    rate = RATES[turn % len(RATES)]
    fields = {"selector": SELECTOR_NAMES[turn % len(SELECTOR_NAMES)], "selection_rate": rate}
    check_step(with_routing(parts, fields), 3, rate, walk)


def check_step(parts, step, rate, case):
    routes, loss, grads = step_of(parts, step)
    again, same_loss, _ = step_of(parts, step)
    num_tokens = parts.backbone.num_tokens
    assert len(routes) == (rate is not None)
    for route, other in zip(routes, again, strict=True):
        assert (route.start, route.end) == (1, 3)
        assert route.ids.shape == (3, num_kept_tokens(num_tokens, rate))
        assert (route.ids.diff(dim=1) > 0).all()
        assert 0 <= int(route.ids.min()) <= int(route.ids.max()) < num_tokens
        assert torch.equal(route.ids, other.ids)
        if "per batch" in case:
            assert (route.ids == route.ids[0]).all()
    assert torch.isfinite(loss)
    assert torch.equal(loss, same_loss)
    assert all(grad is not None and torch.isfinite(grad).all() for grad in grads)
