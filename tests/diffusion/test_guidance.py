"""Guidance: which networks are called, with which labels and tokens, and what it adds up to."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from tests.test_contract import SMALL
from tread_zoo import create, create_backbone, register, registry
from tread_zoo.diffusion import (
    EDM,
    AutoGuidance,
    ClassifierFree,
    EDMStochastic,
    Euler,
    FlowMatching,
    FlowSDE,
    Heun,
    ImageBatch,
    IntervalGuidance,
    NoGuidance,
    PathDropGuidance,
    SamplingOptions,
    SparseGuidance,
    build_sampling,
    check_weak,
    combine,
    default_labels,
    generate,
)
from tread_zoo.routing import PathDrop

NULL = 10
LABELS = torch.tensor([2, 7])
X = torch.randn(2, 5, 4, 4, generator=torch.Generator().manual_seed(0))
LEVEL = torch.tensor([0.3, 0.3])
GUIDED = [
    ClassifierFree(scale=3.0),
    IntervalGuidance(scale=3.0, low=0.1, high=0.5),
    SparseGuidance(scale=3.0, strong_rate=0.25, weak_rate=0.75),
    AutoGuidance(scale=3.0, weak_checkpoint="x"),
    PathDropGuidance(scale=3.0),
]


class Spy:
    """A backbone that depends on label, routes and itself in every channel, and notes its calls."""

    num_classes, context_length, context_size = NULL, 0, 0
    in_channels, input_size, grid, num_blocks = 5, (4, 4), (4, 4), 12
    default_selector, default_range = "random", (2, -4)
    fused_ranges = ((2, 5), (6, 9))

    def __init__(self, factor=1.0):
        self.factor, self.calls = factor, []

    def null_like(self, y):
        return torch.full_like(y, NULL)

    def __call__(self, x, t, y=None, *, routes=()):
        self.calls.append((None if y is None else y.tolist(), tuple(routes)))
        label = torch.zeros(len(x)) if y is None else y.float()
        routed = sum(getattr(route, "ids", torch.ones(1)).float().mean() for route in routes)
        scale = self.factor * (1 + label + routed).view(-1, 1, 1, 1)
        return x * scale + t.view(-1, 1, 1, 1)


@pytest.fixture(params=[EDM(), FlowMatching()], ids=["edm", "flow"])
def objective(request):
    return request.param


def batch_of(objective, backbone=None, labels=LABELS, **options):
    options = {"indices": [0, 1], "seed": 0, "weak": Spy(0.5), **options}
    return ImageBatch(backbone or Spy(), objective, labels, **options)


# The combinator -----------------------------------------------------------------------------------


def test_combine_by_hand():
    def weak(x, level):
        return x

    def strong(x, level):
        return 4 * x

    assert combine(weak, strong, 1) is strong
    assert combine(weak, strong, 0.0) is weak
    assert torch.equal(combine(weak, strong, 2.0)(torch.ones(1), LEVEL), torch.tensor([7.0]))
    assert torch.equal(combine(weak, strong, 0.5)(torch.ones(1), LEVEL), torch.tensor([2.5]))
    first = combine(weak, strong, 2.0, channels=1)(torch.ones(1, 2), LEVEL)
    assert torch.equal(first, torch.tensor([[7.0, 4.0]]))


@pytest.mark.parametrize("guidance", GUIDED, ids=lambda g: type(g).__name__)
def test_every_kind_is_linear_in_both_branches_on_all_channels(objective, guidance):
    strong, weak, guided = (
        replace(guidance, scale=scale).dx_dt(batch_of(objective))(X, LEVEL)
        for scale in (1.0, 0.0, 3.0)
    )
    torch.testing.assert_close(guided, 3 * strong - 2 * weak, rtol=1e-4, atol=1e-4)
    assert ((guided - strong).abs().amax(dim=(0, 2, 3)) > 0.1).all()


def test_guiding_slopes_is_guiding_estimates(objective):
    batch = batch_of(objective)
    slope = ClassifierFree(scale=2.5).dx_dt(batch)(X, LEVEL)
    strong, weak = (
        objective.estimate(X, replace(batch, labels=labels).dx_dt()(X, LEVEL), LEVEL)
        for labels in (LABELS, torch.tensor([NULL, NULL]))
    )
    estimate = weak + 2.5 * (strong - weak)
    expected = (X - estimate) / LEVEL.view(-1, 1, 1, 1)
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-4)


# Which networks are called ------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "calls"), [(0.1, 1), (0.101, 2), (0.5, 2), (0.501, 1)])
def test_interval_guides_inside_and_calls_one_network_outside(objective, level, calls):
    """low < level <= high, and there it is cfg to the bit."""
    batch, level = batch_of(objective), torch.full((2,), level)
    result = IntervalGuidance(scale=3.0, low=0.1, high=0.5).dx_dt(batch)(X, level)
    assert len(batch.backbone.calls) == calls
    same = ClassifierFree(scale=3.0) if calls == 2 else NoGuidance()
    assert torch.equal(result, same.dx_dt(batch_of(objective))(X, level))


def test_interval_with_levels_on_both_sides(objective):
    level = torch.tensor([0.3, 0.8])
    result = IntervalGuidance(scale=3.0, low=0.1, high=0.5).dx_dt(batch_of(objective))(X, level)
    inside = ClassifierFree(scale=3.0).dx_dt(batch_of(objective))(X, level)
    outside = NoGuidance().dx_dt(batch_of(objective))(X, level)
    assert torch.equal(result[0], inside[0])
    assert torch.equal(result[1], outside[1])


@pytest.mark.parametrize("labels", [LABELS, None], ids=["labels", "none"])
def test_sparse_keeps_the_label_on_both_branches(objective, labels):
    batch = batch_of(objective, labels=labels)
    dx_dt = SparseGuidance(scale=2.0, strong_rate=0.25, weak_rate=0.75).dx_dt(batch)
    for _ in range(3):
        dx_dt(X, LEVEL)
    expected = None if labels is None else labels.tolist()
    assert [labels for labels, _ in batch.backbone.calls] == [expected] * 6
    kept = [[(r.start, r.end, r.num_kept) for r in routes] for _, routes in batch.backbone.calls]
    assert kept == [[(2, 8, 4)], [(2, 8, 12)]] * 3


def drawn_ids(indices, seed=0, evaluations=40):
    """Return the kept ids of each evaluation at both rates, [evaluations, 2, B, K] as lists."""
    batch = batch_of(FlowMatching(), labels=None, indices=indices, seed=seed)
    dx_dt = SparseGuidance(scale=2.0, strong_rate=0.25, weak_rate=0.75).dx_dt(batch)
    x, level = torch.zeros(len(indices), 5, 4, 4), torch.full((len(indices),), 0.5)
    for _ in range(evaluations):
        dx_dt(x, level)
    ids = [routes[0].ids for _, routes in batch.backbone.calls]
    return list(zip(ids[::2], ids[1::2], strict=True))


def test_kept_tokens_depend_on_seed_image_and_evaluation_alone():
    together = drawn_ids([0, 1, 2, 3, 4])
    for indices in ([3], [4, 1], [2, 0, 3]):
        for whole, part in zip(together, drawn_ids(indices), strict=True):
            for every, some in zip(whole, part, strict=True):
                assert torch.equal(every[indices], some)
    weak = torch.stack([pair[0] for pair in together])  # [40, 5, 4]
    assert len(weak.flatten(0, 1).unique(dim=0)) > 170, "images or evaluations share their tokens"
    other = torch.stack([pair[0] for pair in drawn_ids([0, 1, 2, 3, 4], seed=1)])
    assert (weak == other).all(dim=-1).float().mean() < 0.05


def test_what_the_weak_branch_sees_the_strong_one_sees_too():
    for weak, strong in drawn_ids([0, 1]):
        assert torch.isin(weak[0], strong[0]).all()
        assert torch.isin(weak[1], strong[1]).all()


def test_auto_calls_two_networks_with_the_same(objective):
    batch = batch_of(objective)
    guided = AutoGuidance(scale=2.0, weak_checkpoint="x").dx_dt(batch)(X, LEVEL)
    assert batch.backbone.calls == batch.weak.calls == [(LABELS.tolist(), ())]
    strong, weak = batch.dx_dt()(X, LEVEL), replace(batch, backbone=batch.weak).dx_dt()(X, LEVEL)
    torch.testing.assert_close(guided, 2 * strong - weak, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="weak network"):
        AutoGuidance(weak_checkpoint="x").dx_dt(batch_of(objective, weak=None))


def test_path_drop_skips_the_fused_ranges_with_the_label(objective):
    batch = batch_of(objective)
    PathDropGuidance(scale=2.0).dx_dt(batch)(X, LEVEL)
    skipped = (PathDrop(2, 5), PathDrop(6, 9))
    assert batch.backbone.calls == [([2, 7], skipped), ([2, 7], ())]


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("spars", "sparse", 1),
        ("cfg", "weak_rate", 0.5),
        ("cfg", "scale", -0.1),
        ("interval", "low", 0.7),
        ("sparse", "strong_rate", 0.7),
        ("sparse", "weak_rate", 1.0),
        ("sparse", "selector", {"name": "blocks", "size": 0}),
        ("auto", "weak_checkpoint", None),
    ],
)
def test_wrong_options_are_named(name, option, value):
    with pytest.raises(ValueError, match=option):
        create("guidance", name, **{option: value})


def tiny(name="dit_tiny", **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {
            "input_size": 8,
            "in_channels": 1,
            "num_classes": 10,
            "hidden_size": 16,
            "depth": 8,
        }
        network = create_backbone(name, **{**sizes, **options})
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return network.eval()


@pytest.mark.parametrize(
    ("guidance", "options"),
    [
        (ClassifierFree(), {"num_classes": 0}),
        (IntervalGuidance(), {"num_classes": 0}),
        (IntervalGuidance(high=1.5), {}),
        (SparseGuidance(start=3, end=40), {}),
        (SparseGuidance(selector="norm"), {}),
        (PathDropGuidance(), {}),
    ],
    ids=repr,
)
def test_what_a_network_cannot_do_is_refused_before_sampling(guidance, options, monkeypatch):
    network = tiny(**options)
    monkeypatch.setattr(network, "forward", None)
    with pytest.raises(ValueError, match="guidance"):
        draw(network, SamplingOptions(Euler(), 2, guidance=guidance), [0])
    if guidance == IntervalGuidance(high=1.5):  # EDM's levels reach further
        assert SamplingOptions(Euler(), 2, guidance=guidance).check(network, EDM()) is None


@pytest.mark.parametrize(
    ("guidance", "training", "fits"),
    [
        (NoGuidance(), {"label_dropout": 0.0, "has_routes": False}, True),
        (ClassifierFree(), {"label_dropout": 0.0}, False),
        (IntervalGuidance(), {"label_dropout": 0.0}, False),
        (ClassifierFree(scale=1.0), {"label_dropout": 0.0}, True),
        (ClassifierFree(), {}, True),
        (SparseGuidance(), {"has_routes": False}, False),
        (SparseGuidance(scale=1.0), {"has_routes": False}, True),
        (SparseGuidance(scale=1.0, strong_rate=0.2), {"has_routes": False}, False),
        (SparseGuidance(), {}, True),
    ],
    ids=repr,
)
def test_what_training_never_showed_is_refused(guidance, training, fits):
    options = SamplingOptions(Euler(), 2, guidance=guidance)
    facts = {"conditional": True, "label_dropout": 0.1, "has_routes": True, **training}
    if fits:
        options.check_training(**facts)
    else:
        with pytest.raises(ValueError, match="train"):
            options.check_training(**facts)


@pytest.mark.parametrize(
    ("of_weak", "objective"),
    [
        ({}, EDM()),
        ({}, FlowMatching(prediction="x")),
        ({"num_classes": 3}, FlowMatching()),
        ({"input_size": 4}, FlowMatching()),
    ],
)
def test_a_weak_network_of_other_data_or_another_objective_is_refused(of_weak, objective):
    check_weak(tiny(), FlowMatching(), tiny(depth=3), FlowMatching(time_distribution="uniform"))
    with pytest.raises(ValueError, match="weak_checkpoint"):
        check_weak(tiny(), FlowMatching(), tiny(**of_weak), objective)
    with pytest.raises(ValueError, match="sigma_data"):
        check_weak(tiny(), EDM(), tiny(), EDM(sigma_data=1.0))


# From seeds to images -----------------------------------------------------------------------------


def draw(network, options, indices, *, batch_size=8, objective=None, **more):
    objective = objective or FlowMatching()
    labels = default_labels(indices, network.num_classes)
    return generate(
        network, objective, options, indices=indices, labels=labels, seed=3,
        batch_size=batch_size, **more,
    )  # fmt: skip


IN_TURNS = [("dit_tiny", guidance) for guidance in GUIDED] + [
    (name, GUIDED[row % len(GUIDED)]) for row, name in enumerate(SMALL)
]


@pytest.mark.parametrize(("number", "name", "guidance"), [(i, *x) for i, x in enumerate(IN_TURNS)])
def test_every_guidance_and_every_backbone_in_turns(number, name, guidance):
    objective = (EDM(), FlowMatching())[number % 2]
    network, weak = tiny(name, **SMALL[name]), None
    if isinstance(guidance, PathDropGuidance):
        network.add_fusions([(1, 3)])
    if isinstance(guidance, AutoGuidance):
        weak = tiny("dit_tiny", depth=2, num_heads=1)
    if isinstance(guidance, IntervalGuidance) and isinstance(objective, EDM):
        guidance = IntervalGuidance(scale=3.0, low=0.1, high=50.0)
    given = {"objective": objective, "indices": [0, 1, 2]}
    options = SamplingOptions(Euler(), 3, guidance=guidance)
    images = draw(network, options, weak=weak, **given)
    assert images.isfinite().all()
    assert torch.equal(images, draw(network, options, weak=weak, **given))
    assert not torch.allclose(images, draw(network, SamplingOptions(Euler(), 3), **given))


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (FlowMatching(), SamplingOptions(Heun(), 3, guidance=SparseGuidance())),
        (FlowMatching(), SamplingOptions(FlowSDE(diffusion=2.0), 3, guidance=ClassifierFree())),
        (EDM(), SamplingOptions(EDMStochastic(), 3, guidance=SparseGuidance())),
    ],
    ids=["sparse", "sde", "churn"],
)
def test_an_image_repeats_whatever_the_batch_size_and_order(objective, options):
    network = tiny()
    whole = draw(network, options, range(5), objective=objective)
    again = draw(network, options, range(5), objective=objective, batch_size=2)
    some = draw(network, options, [4, 1], objective=objective)
    torch.testing.assert_close(whole, again, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole[[4, 1]], some, rtol=1e-4, atol=1e-4)
    assert (whole[1:] - whole[:1]).abs().amax(dim=(1, 2, 3)).min() > 0.01


# Settings -----------------------------------------------------------------------------------------


def test_settings_become_options_and_back():
    options = build_sampling(
        {"name": "flow_sde", "num_steps": 7, "grid": "quadratic", "diffusion": 2.0},
        {"name": "interval", "scale": 3.0, "low": 0.1},
    )
    assert options.sampler == FlowSDE(diffusion=2.0)
    assert options.guidance == IntervalGuidance(scale=3.0, low=0.1)
    assert options.as_dict() == {
        "sampler": "flow_sde", "num_steps": 7, "grid": "quadratic", "shift": 1.0, "rho": "auto",
        "diffusion": 2.0,
        "guidance": "interval", "guidance_scale": 3.0, "guidance_low": 0.1, "guidance_high": 0.7,
            "guidance_channels": None,
    }  # fmt: skip
    assert build_sampling("heun") == SamplingOptions(Heun(), 18)
    selector = {"name": "blocks", "size": 4}
    guidance = build_sampling("heun", {"name": "sparse", "selector": selector}).guidance
    assert guidance.selector == selector


# Parts of others ----------------------------------------------------------------------------------


@pytest.fixture
def plugin(monkeypatch):
    """Register an objective, two samplers and a guidance with the least that each needs."""
    monkeypatch.setattr(registry, "_entries", {**registry._entries})
    create("guidance", "none")  # ours are loaded before

    @register("objective", "noise_prediction")
    class NoisePrediction:
        initial_std = 1.0

        def draw(self, shape, generator):
            raise NotImplementedError

        def dx_dt(self, predict, x_t, level):
            return predict(x_t, level) - x_t

        def levels(self, num_steps, grid):
            return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)

    @register("sampler", "midpoint")
    @dataclass(frozen=True)
    class Midpoint:
        default_num_steps: ClassVar[int] = 3
        place: float = 0.5

        def __call__(self, problem, x, levels):
            for level, after in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
                step = after - level
                middle = x + self.place * step * problem.slope(x, level)
                x = x + step * problem.slope(middle, level + self.place * step)
            return x

    @register("sampler", "leap")
    def leap(problem, x, levels, *, length: float = 1.0):
        return x - length * problem.slope(x, float(levels[0]))

    @register("guidance", "smaller")
    @dataclass(frozen=True)
    class Smaller:
        weak_checkpoint: str
        scale: float = 2.0

        def dx_dt(self, batch):
            return combine(replace(batch, backbone=batch.weak).dx_dt(), batch.dx_dt(), self.scale)

    return NoisePrediction()


@pytest.mark.parametrize("sampler", ["euler", "heun", "midpoint", "leap"])
def test_parts_of_others_work_like_ours(plugin, sampler):
    guidance = {"name": "smaller", "weak_checkpoint": "runs/small", "scale": 3.0}
    options = build_sampling({"name": sampler, "num_steps": 2}, guidance)
    options.check_training(conditional=True, label_dropout=0.0, has_routes=False)
    network, weak = tiny(), tiny(depth=2)
    images = draw(network, options, [0, 1], objective=plugin, weak=weak)
    plain = draw(
        network, build_sampling({"name": sampler, "num_steps": 2}), [0, 1], objective=plugin
    )
    assert images.isfinite().all()
    assert not torch.equal(images, plain)
    record = options.as_dict()
    assert (record["sampler"], record["guidance"], record["guidance_scale"]) == (
        sampler, "smaller", 3.0
    )  # fmt: skip
    own = {"midpoint": ("place", 0.5), "leap": ("length", 1.0)}.get(sampler, ("num_steps", 2))
    assert record[own[0]] == own[1]
