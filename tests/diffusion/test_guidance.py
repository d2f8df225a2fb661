"""Guidance: which networks are called, with which labels and tokens, and what it adds up to."""

from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import product

import pytest
import torch

from tread_zoo import create, create_backbone
from tread_zoo.diffusion import (
    EDM,
    AutoGuidance,
    ClassifierFree,
    CustomGuidance,
    EDMStochastic,
    Euler,
    FlowMatching,
    FlowSDE,
    Heun,
    ImageBatch,
    IntervalGuidance,
    NoGuidance,
    PathDropGuidance,
    Problem,
    SamplingOptions,
    SparseAutoGuidance,
    SparseClassifierFree,
    SparseGuidance,
    build_sampling,
    check_weak,
    combine,
    default_labels,
    generate,
)
from tread_zoo.factory import add_routing
from tread_zoo.routing.methods.none import NO_ROUTING

NULL = 10
LABELS = torch.tensor([2, 7])
X = torch.randn(2, 5, 4, 4, generator=torch.Generator().manual_seed(0))
LEVEL = torch.tensor([0.3, 0.3])


class Spy:
    """A linear backbone: x times the gain of its label and routes, plus t. It records its calls."""

    num_classes, context_length, context_size = NULL, 0, 0
    in_channels, input_size, grid, num_blocks = 5, (4, 4), (4, 4), 12
    default_selector, default_range, widths, skips = "random", (2, -4), (1,), {}

    def parameters(self):
        return iter([torch.zeros(1)])

    def __init__(self, factor=1.0):
        self.factor, self.calls = factor, []

    def null_like(self, y):
        return torch.full_like(y, NULL)

    def __call__(self, x, t, y=None, *, routes=()):
        self.calls.append((None if y is None else y.tolist(), tuple(routes)))
        kept = [getattr(route, "num_kept", 0) for route in routes]  # blocks left out keep none
        gain = self.gain(torch.zeros(len(x)) if y is None else y, kept)
        return x * gain.to(x.dtype) + t.view(-1, 1, 1, 1)

    def gain(self, label, kept):
        of_tokens = 1 - sum(16 - k for k in kept) / 100
        return (self.factor * (1 + label.double()) * of_tokens).view(-1, 1, 1, 1)


@pytest.fixture(params=[EDM(), FlowMatching()], ids=["edm", "flow"])
def objective(request):
    return request.param


def batch_of(objective, labels=LABELS, **options):
    usual = {"indices": [0, 1], "seed": 0, "levels": objective.levels(10), "weak": Spy(0.5)}
    usual["routing"] = create("routing", "sprint")
    return ImageBatch(Spy(), objective, labels, **{**usual, **options})


# The combinator -----------------------------------------------------------------------------------


def test_combine_by_hand():
    weak, strong = (lambda x, level: x), (lambda x, level: 4 * x)
    assert combine(weak, strong, 1) is strong
    assert combine(weak, strong, 0.0) is weak
    assert torch.equal(combine(weak, strong, 2.0)(torch.ones(1), LEVEL), torch.tensor([7.0]))
    first = combine(weak, strong, 2.0, channels=1)(torch.ones(1, 2), LEVEL)
    assert torch.equal(first, torch.tensor([[7.0, 4.0]]))


PARTS = {
    "drop_label": [False, True],
    "weak_rate": [0.0, 0.5, ("linear", 0.5, 0.25)],
    "drop_path": [False, True],
    "weak_checkpoint": [None, "x"],
    "strong_rate": [0.0, ("cosine", 0.0, 0.75)],
    "scale": [3.0, ("linear", 3.0, 0.0)],
}


@pytest.mark.parametrize(("level", "done"), [(1.0, 0.0), (0.5, 0.5), (0.25, 1.0)])
def test_all_parts_together_are_the_formula(level, done):
    """In float64, at the first, the middle and the last of 3 steps."""
    batch = batch_of(FlowMatching(), levels=torch.tensor([1, 0.5, 0.25, 0]))
    x, level = X.double(), torch.tensor(level)
    for values in product(*PARTS.values()):
        label, weak_rate, path, checkpoint, strong_rate, scale = values
        options = dict(zip(PARTS, values, strict=True))
        if not (label or path or checkpoint) and (strong_rate or not weak_rate):
            with pytest.raises(ValueError, match="strong_rate"):
                CustomGuidance(**options)
            continue
        w, weak_rate, strong_rate = (
            value[1] + done * (value[2] - value[1]) if isinstance(value, tuple) else value
            for value in (scale, weak_rate, strong_rate)
        )
        kept = [0] if path else [16 - 16 * weak_rate]
        of_label = torch.tensor([NULL, NULL]) if label else LABELS
        weak = (batch.weak if checkpoint else batch.backbone).gain(of_label, kept) * x + level
        strong = batch.backbone.gain(LABELS, [16 - 16 * strong_rate]) * x + level
        found = CustomGuidance(**options).dx_dt(batch)(x, level.expand(2))
        torch.testing.assert_close(found, weak + w * (strong - weak), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        ClassifierFree, IntervalGuidance,
        lambda **options: CustomGuidance(drop_label=True, scale=("linear", 2.0, 0.0), **options),
    ],
)  # fmt: skip
def test_other_channels_are_not_guided(kind):
    """The first channels equal those of full guidance; the other channels equal the unguided
    prediction."""
    batch, level = batch_of(FlowMatching(), levels=torch.tensor([1, 0.5, 0.25, 0])), LEVEL
    some, every, none = (
        guidance.dx_dt(batch)(X, level) for guidance in (kind(channels=2), kind(), NoGuidance())
    )
    assert torch.equal(some, torch.cat([every[:, :2], none[:, 2:]], dim=1))
    assert not torch.isclose(every, none).any()


RAMPS = {"weak_rate": ("cosine", 0.6, 0.0), "strong_rate": ("cosine", 0.0, 0.6)}
POINTS = [
    (ClassifierFree(channels=2), {"drop_label": True, "channels": 2}),
    (IntervalGuidance(high=0.25), {"drop_label": True, "high": 0.25}),
    (SparseGuidance(routing="tread"), {"weak_rate": 0.7, "routing": "tread"}),
    (AutoGuidance(weak_checkpoint="x"), {"weak_checkpoint": "x"}),
    (PathDropGuidance(scale=0.5), {"drop_label": True, "drop_path": True, "scale": 0.5}),
    (SparseClassifierFree(), {"drop_label": True, "weak_rate": 0.5}),
    (SparseAutoGuidance(weak_checkpoint="x"), {"weak_checkpoint": "x", **RAMPS}),
]


@pytest.mark.parametrize(("kind", "parts"), POINTS, ids=lambda value: type(value).__name__)
def test_the_kinds_are_points_of_parts(kind, parts):
    whole = CustomGuidance(**parts)
    for option in fields(whole):
        assert getattr(kind, option.name) == getattr(whole, option.name)


# Which networks are called ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "inside"), [(0.1, False), (0.101, True), (0.5, True), (0.501, False)]
)
def test_interval_guides_inside_and_calls_one_network_outside(objective, level, inside):
    """low < level <= high, and there it is cfg to the bit."""
    batch, level = batch_of(objective), torch.tensor([level, level])
    result = IntervalGuidance(scale=3.0, low=0.1, high=0.5).dx_dt(batch)(X, level)
    assert len(batch.backbone.calls) == (2 if inside else 1)
    same = ClassifierFree(scale=3.0) if inside else NoGuidance()
    assert torch.equal(result, same.dx_dt(batch_of(objective))(X, level))


@pytest.mark.parametrize(
    ("sampler", "rate", "kept"),
    [
        (Euler(), 0.5, [8, 8, 8, 8, 8]),
        (Euler(), ("linear", 0.5, 0.0), [8, 10, 12, 14, None]),
        (Euler(), ("cosine", 0.0, 0.5), [None, 15, 12, 10, 8]),  # 0, 0.07, 0.25, 0.43, 0.5
        (Euler(), ("interval", 0.5, 0.25, 0.5), [None, 8, 8, None, None]),
        (Heun(), ("linear", 0.5, 0.0), [8, 10, 10, 12, 12, 14, 14, None, None]),
    ],
)
def test_a_rate_follows_the_fraction_of_steps(objective, sampler, rate, kept):
    """The rates are equal for every objective. Where nothing is dropped, one call is made."""
    levels = objective.levels(5)
    batch = batch_of(objective, levels=levels)
    dx_dt = CustomGuidance(weak_rate=rate).dx_dt(batch)
    sampler(Problem(dx_dt, objective, None), X, levels)
    expected = [call for k in kept for call in ([[k], []] if k else [[]])]
    assert [[route.num_kept for route in routes] for _, routes in batch.backbone.calls] == expected
    assert all(labels == LABELS.tolist() for labels, _ in batch.backbone.calls)


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
    for few, many in together:  # the strong prediction sees every token that the weak one sees
        assert all(torch.isin(*rows).all() for rows in zip(few, many, strict=True))


# Bad input ----------------------------------------------------------------------------------------


def test_a_route_that_the_network_cannot_rejoin_is_refused_before_sampling():
    network, trained = tiny(), create("routing", "sprint", start=3, end=6)
    add_routing(network, trained)
    for start, end, fits in ((2, 5, False), (3, 6, True)):
        other = {"name": "tread", "start": start, "end": end}
        guidance = SparseGuidance(routing=other)
        sampling = SamplingOptions(Euler(), 2, guidance=guidance, trained=trained)
        with nullcontext() if fits else pytest.raises(ValueError, match=r"\[3, 6\)"):
            draw(network, sampling, [0])


def tiny(name="dit_tiny", **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, "hidden_size": 16}
        network = create_backbone(name, **{**sizes, "depth": 8, **options})
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    return network.eval()


@pytest.mark.parametrize(
    ("guidance", "options"),
    [
        (ClassifierFree(), {"num_classes": 0}),
        (IntervalGuidance(high=1.5), {}),
        (SparseGuidance(routing={"name": "tread", "start": 3, "end": 40}), {}),
        (PathDropGuidance(), {}),
        (AutoGuidance(weak_checkpoint="x"), {}),
        (CustomGuidance(weak_rate=0.5, drop_label=("interval", 0.5, 1.0)), {"num_classes": 0}),
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
        (NoGuidance(), {"label_dropout": 0.0, "routing": "none"}, True),
        (ClassifierFree(), {"label_dropout": 0.0}, False),
        (ClassifierFree(scale=1.0), {"label_dropout": 0.0}, True),
        (ClassifierFree(), {}, True),
        (PathDropGuidance(), {"routing": "tread"}, False),
        (PathDropGuidance(), {"routing": "sprint"}, True),
        (PathDropGuidance(), {"routing": {"name": "sprint", "path_drop": 0.0}}, False),
        (PathDropGuidance(), {"routing": "layer_drop"}, True),
        (PathDropGuidance(), {"routing": "sprint", "label_dropout": 0.0}, False),
        (PathDropGuidance(), {"routing": "sprint", "label_dropout": 0.0, "num_classes": 0}, True),
        (SparseGuidance(), {"routing": "none"}, False),
        (SparseGuidance(), {"routing": "maskdit"}, False),
        (SparseGuidance(routing="token_merging"), {"routing": "none"}, True),
        (SparseGuidance(scale=1.0), {"routing": "none"}, True),
        (SparseGuidance(scale=1.0, strong_rate=0.2), {"routing": "none"}, False),
        (SparseGuidance(), {}, True),
        (SparseClassifierFree(), {"label_dropout": 0.0}, False),
        (SparseClassifierFree(), {"routing": "none"}, False),
    ],
    ids=repr,
)
def test_what_training_never_showed_is_refused(guidance, training, fits):
    trained = create("routing", training.get("routing", "tread"))
    options = SamplingOptions(Euler(), 2, guidance=guidance, trained=trained)
    network = tiny(num_classes=training.get("num_classes", 10))
    with nullcontext() if fits else pytest.raises(ValueError, match="train"):
        options.check_training(network, training.get("label_dropout", 0.1))


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
    labels = default_labels(indices, network.num_classes)
    more |= {"indices": indices, "labels": labels, "seed": 3, "batch_size": batch_size}
    if options.trained is NO_ROUTING:
        options = replace(options, trained=create("routing", "tread"))
    return generate(network, objective or FlowMatching(), options, **more)


RAMP = CustomGuidance(weak_rate=("cosine", 0.7, 0.3), drop_label=("interval", 0.5, 1.0))


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (FlowMatching(), SamplingOptions(Heun(), 3, guidance=RAMP)),
        (FlowMatching(), SamplingOptions(FlowSDE(diffusion=2.0), 3, guidance=ClassifierFree())),
        (EDM(), SamplingOptions(EDMStochastic(), 3, guidance=SparseGuidance())),
    ],
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
        "diffusion": 2.0, "last_step": 0.0, "selection_rate": 0.0,
        "guidance": "interval", "guidance_scale": 3.0, "guidance_low": 0.1, "guidance_high": 0.7,
            "guidance_channels": None,
    }  # fmt: skip
    assert build_sampling("heun") == SamplingOptions(Heun(), 18)
