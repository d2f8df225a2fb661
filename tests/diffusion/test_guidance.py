"""Guidance: which networks are asked, with which labels and tokens, and what it adds up to."""

import itertools
import math

import pytest
import torch

from tread_zoo import create_backbone, list_backbones
from tread_zoo.diffusion import (
    EDM,
    GUIDANCE,
    AutoGuidance,
    ClassifierFree,
    DPMSolver2M,
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
    build_guidance,
    build_sampling,
    combine,
    default_labels,
    generate,
    num_evaluations,
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
    AutoGuidance(scale=3.0, checkpoint="x"),
    PathDropGuidance(scale=3.0),
]


class Spy:
    """A backbone that depends on label, routes and itself in every channel, and says its calls."""

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


def scaled(guidance, scale):
    return build_guidance(guidance.name, **{**vars(guidance), "scale": scale})


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


@pytest.mark.parametrize("guidance", GUIDED, ids=lambda g: g.name)
def test_every_kind_is_linear_in_both_branches_on_all_channels(objective, guidance):
    strong, weak, found = (
        scaled(guidance, scale).drift(batch_of(objective))(X, LEVEL) for scale in (1.0, 0.0, 3.0)
    )
    torch.testing.assert_close(found, 3 * strong - 2 * weak, rtol=1e-4, atol=1e-4)
    assert ((found - strong).abs().amax(dim=(0, 2, 3)) > 0.1).all()


@pytest.mark.parametrize("guidance", GUIDED, ids=lambda g: g.name)
def test_scale_one_is_the_strong_branch_alone(objective, guidance):
    batch, plain = batch_of(objective), batch_of(objective)
    found = scaled(guidance, 1.0).drift(batch)(X, LEVEL)
    assert len(batch.backbone.calls) + len(batch.weak.calls) == 1
    labels, routes = batch.backbone.calls[0]
    assert labels == LABELS.tolist()
    if guidance.name != "sparse":
        assert not routes
        assert torch.equal(found, NoGuidance().drift(plain)(X, LEVEL))


def test_guiding_drifts_is_guiding_estimates(objective):
    batch = batch_of(objective)
    drift = ClassifierFree(scale=2.5).drift(batch)(X, LEVEL)
    strong, weak = (
        objective.denoise(lambda x, t, y=y: batch.backbone(x, t, y), X, LEVEL)
        for y in (LABELS, torch.tensor([NULL, NULL]))
    )
    estimate = weak + 2.5 * (strong - weak)
    expected = (X - estimate) / LEVEL.view(-1, 1, 1, 1)
    torch.testing.assert_close(drift, expected, rtol=1e-4, atol=1e-4)


# Which networks are asked, and for what -----------------------------------------------------------


def test_cfg_drops_the_label_of_the_weak_branch_alone(objective):
    batch = batch_of(objective)
    ClassifierFree(scale=2.0).drift(batch)(X, LEVEL)
    assert sorted(labels for labels, _ in batch.backbone.calls) == [[2, 7], [NULL, NULL]]


@pytest.mark.parametrize(("level", "calls"), [(0.1, 1), (0.101, 2), (0.5, 2), (0.501, 1)])
def test_interval_guides_inside_and_asks_one_network_outside(objective, level, calls):
    """low < level <= high, and there it is cfg to the bit."""
    batch, level = batch_of(objective), torch.full((2,), level)
    found = IntervalGuidance(scale=3.0, low=0.1, high=0.5).drift(batch)(X, level)
    assert len(batch.backbone.calls) == calls
    same = ClassifierFree(scale=3.0) if calls == 2 else NoGuidance()
    assert torch.equal(found, same.drift(batch_of(objective))(X, level))


def test_interval_with_levels_on_both_sides(objective):
    level = torch.tensor([0.3, 0.8])
    found = IntervalGuidance(scale=3.0, low=0.1, high=0.5).drift(batch_of(objective))(X, level)
    inside = ClassifierFree(scale=3.0).drift(batch_of(objective))(X, level)
    outside = NoGuidance().drift(batch_of(objective))(X, level)
    assert torch.equal(found[0], inside[0])
    assert torch.equal(found[1], outside[1])


@pytest.mark.parametrize("labels", [LABELS, None], ids=["labels", "none"])
def test_sparse_keeps_the_label_on_both_branches(objective, labels):
    batch = batch_of(objective, labels=labels)
    drift = SparseGuidance(scale=2.0, strong_rate=0.25, weak_rate=0.75).drift(batch)
    for _ in range(3):
        drift(X, LEVEL)
    expected = None if labels is None else labels.tolist()
    assert [labels for labels, _ in batch.backbone.calls] == [expected] * 6
    kept = [[(r.start, r.end, r.num_kept) for r in routes] for _, routes in batch.backbone.calls]
    assert kept == [[(2, 8, 4)], [(2, 8, 12)]] * 3


def test_a_strong_rate_of_zero_is_the_dense_network(objective):
    batch = batch_of(objective)
    SparseGuidance(scale=2.0).drift(batch)(X, LEVEL)
    assert sorted(len(routes) for _, routes in batch.backbone.calls) == [0, 1]


def drawn_ids(indices, seed=0, evaluations=40):
    """Return the kept ids of each evaluation at both rates, [evaluations, 2, B, K] as lists."""
    batch = batch_of(FlowMatching(), labels=None, indices=indices, seed=seed)
    drift = SparseGuidance(scale=2.0, strong_rate=0.25, weak_rate=0.75).drift(batch)
    x, level = torch.zeros(len(indices), 5, 4, 4), torch.full((len(indices),), 0.5)
    for _ in range(evaluations):
        drift(x, level)
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


def test_auto_asks_two_networks_for_the_same(objective):
    batch = batch_of(objective)
    found = AutoGuidance(scale=2.0, checkpoint="x").drift(batch)(X, LEVEL)
    assert batch.backbone.calls == batch.weak.calls == [(LABELS.tolist(), ())]
    strong, weak = (
        objective.drift(lambda x, t, n=network: n(x, t, LABELS), X, LEVEL)
        for network in (batch.backbone, batch.weak)
    )
    torch.testing.assert_close(found, 2 * strong - weak, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="guidance=auto was given no weak network"):
        AutoGuidance(checkpoint="x").drift(batch_of(objective, weak=None))


def test_path_drop_skips_the_fused_ranges_with_the_label(objective):
    batch = batch_of(objective)
    PathDropGuidance(scale=2.0).drift(batch)(X, LEVEL)
    skipped = (PathDrop(2, 5), PathDrop(6, 9))
    assert batch.backbone.calls == [([2, 7], skipped), ([2, 7], ())]


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GUIDANCE))
@pytest.mark.parametrize("scale", [-0.1, math.inf, math.nan, "2", True])
def test_wrong_scales_are_named(name, scale):
    with pytest.raises(ValueError, match=r"guidance.scale=.* must be finite and at least 0"):
        build_guidance(name, scale=scale)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("spars", {}, r"guidance='spars'.*mean 'sparse'"),
        ("sparse", {"weak_rat": 0.5}, r"guidance=sparse: field='weak_rat'.*mean 'weak_rate'"),
        ("cfg", {"weak_rate": 0.5}, r"guidance=cfg: field='weak_rate' is unknown.*Known: scale"),
        ("none", {"scale": 2.0}, r"guidance.scale=2.0 needs a kind of guidance: guidance=cfg"),
        ("interval", {"low": 0.5, "high": 0.2}, r"guidance.low=0.5, guidance.high=0.2"),
        ("interval", {"low": 0.5, "high": 0.5}, r"0 <= low < high must hold"),
        ("interval", {"low": -0.5}, r"guidance.low=-0.5"),
        ("sparse", {"strong_rate": 0.7, "weak_rate": 0.5}, r"strong_rate=0.7, guidance.weak_rate"),
        ("sparse", {"strong_rate": 0.7}, r"0 <= strong_rate < weak_rate < 1 must hold"),
        ("sparse", {"weak_rate": 1.0}, r"guidance.weak_rate=1.0"),
        ("sparse", {"selector": "rnd"}, r"guidance.selector='rnd'.*mean 'random'"),
        ("auto", {}, r"guidance.checkpoint is not set"),
        ("auto", {"checkpoint": "x", "weights": "emma"}, r"guidance.weights='emma'.*mean 'ema'"),
    ],
)
def test_wrong_settings_are_named(name, options, words):
    with pytest.raises(ValueError, match=words):
        build_guidance(name, **options)


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
    ("guidance", "options", "words"),
    [
        (
            ClassifierFree(),
            {"num_classes": 0},
            r"guidance=cfg with guidance.scale=2.0 needs labels",
        ),
        (IntervalGuidance(), {"num_classes": 0}, r"guidance=interval .* needs labels"),
        (IntervalGuidance(high=1.5), {}, r"guidance.high=1.5 .* objective=flow, .* 0 to 1\."),
        (SparseGuidance(start=3, end=40), {}, r"guidance=sparse, .*end=40 is no range"),
        (PathDropGuidance(), {}, r"path_drop needs a network .*rejoin=project.*guidance=sparse"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_a_network_cannot_do_is_refused_before_sampling(guidance, options, words, monkeypatch):
    network = tiny(**options)
    monkeypatch.setattr(network, "forward", None)
    with pytest.raises(ValueError, match=words):
        draw(network, SamplingOptions(Euler(), 2, guidance=guidance), [0])
    if not options:
        assert IntervalGuidance(high=1.5).check(network, EDM()) is None


def test_unconditional_networks_are_guided_without_labels():
    network = tiny(num_classes=0)
    plain = draw(network, SamplingOptions(Euler(), 2), [0, 1])
    for guidance in (ClassifierFree(scale=1.0), SparseGuidance(), AutoGuidance(checkpoint="x")):
        options = SamplingOptions(Euler(), 2, guidance=guidance)
        found = draw(network, options, [0, 1], weak=tiny(num_classes=0, depth=1))
        assert torch.equal(found, plain) == (guidance.name == "cfg")


# From seeds to images -----------------------------------------------------------------------------


def draw(network, options, indices, *, batch_size=8, objective=None, **more):
    objective = objective or FlowMatching()
    labels = default_labels(indices, network.num_classes)
    return generate(
        network, objective, options, indices=indices, labels=labels, seed=3,
        batch_size=batch_size, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("column", "guidance"), enumerate(GUIDED), ids=[g.name for g in GUIDED])
@pytest.mark.parametrize(("row", "name"), enumerate(list_backbones("*_tiny")))
def test_every_guidance_runs_on_every_backbone(row, name, column, guidance):
    objective = (EDM(), FlowMatching())[(row + column) % 2]  # each meets every row and column
    sizes = {"depth": 7 if name == "rwkv_tiny" else 8}  # skips: odd there, even elsewhere
    if name == "mamba2_tiny":
        sizes["head_size"] = 8
    network, weak = tiny(name, **sizes), None
    if guidance.name == "path_drop":
        network.add_fusions([(2, 5)])
    if guidance.name == "auto":
        weak = tiny("dit_tiny", depth=2, num_heads=1)
    if guidance.name == "interval" and isinstance(objective, EDM):
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
        {"name": "dpmpp_2m", "num_steps": 7, "grid": "quadratic", "shift": 2.0},
        {"name": "interval", "scale": 3.0, "low": 0.1},
    )
    assert options.sampler == DPMSolver2M()
    assert options.guidance == IntervalGuidance(scale=3.0, low=0.1)
    assert options.as_dict() == {
        "sampler": "dpmpp_2m", "num_steps": 7, "grid": "quadratic", "shift": 2.0, "rho": "auto",
        "guidance": "interval", "guidance_scale": 3.0, "guidance_low": 0.1, "guidance_high": 0.7,
    }  # fmt: skip


def test_settings_of_older_checkpoints():
    sampler = {"name": "euler", "num_steps": 7}
    assert build_sampling(sampler, {"scale": 1.0}).guidance == NoGuidance()
    assert build_sampling(sampler, {"scale": 1.5}).guidance == ClassifierFree(scale=1.5)


@pytest.mark.parametrize(
    ("sampler", "guidance", "words"),
    [
        ({"name": "huen"}, {"name": "none"}, "sampler='huen'.*mean 'heun'"),
        ({"name": "heun", "s_churn": 1}, {"name": "none"}, "sampler=heun: field='s_churn'"),
        ({"name": None}, {"name": "none"}, "sampler=as_run repeats what a checkpoint"),
        ({"name": "heun"}, {"name": None}, "guidance=as_run repeats what a checkpoint"),
    ],
)
def test_settings_that_cannot_be(sampler, guidance, words):
    with pytest.raises(ValueError, match=words):
        build_sampling({"num_steps": 3, **sampler}, guidance)


def test_a_drift_is_evaluated_as_often_as_the_sampler_says():
    """On a real network: the evaluations of a guided run are those of the sampler, twice."""
    for sampler, guidance in itertools.product(
        (Euler(), Heun(), DPMSolver2M()), (NoGuidance(), ClassifierFree(), SparseGuidance())
    ):
        network, calls = tiny(depth=3), []
        network.register_forward_pre_hook(lambda *_, seen=calls: seen.append(1))
        draw(network, SamplingOptions(sampler, 3, guidance=guidance), [0])
        branches = 1 if guidance.name == "none" else 2
        assert len(calls) == branches * num_evaluations(sampler.name, 3)
