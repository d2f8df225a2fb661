"""Each fault that the conformance kit promises to catch, planted and caught by its check."""

import pytest
import torch

from backbones import DiT, Mamba, UViT
from tests.testing import own_loops
from tread_zoo import register_backbone
from tread_zoo.contract.backbone import PerToken
from tread_zoo.testing import CHECKS, Probe
from tread_zoo.testing.probe import Advice

DIT = {"hidden_size": 32, "depth": 4, "num_heads": 2}
UVIT = {"hidden_size": 16, "depth": 4, "num_heads": 2}
MAMBA = {"hidden_size": 16, "depth": 4, "state_size": 4}


class AddsPositionsByIndex(DiT):
    def run_block(self, index, streams, condition, layout, skip):
        tokens = streams[0] + 0.5 * self.positions[: streams[0].shape[1]]
        return super().run_block(index, (tokens,), condition, layout, skip)


class CentresTheBatch(DiT):
    def run_block(self, index, streams, condition, layout, skip):
        tokens = streams[0] - 0.1 * streams[0].mean(dim=0)
        return super().run_block(index, (tokens,), condition, layout, skip)


class DetachesABlock(DiT):
    """The residual path goes on; what the second block adds has no gradient."""

    def run_block(self, index, streams, condition, layout, skip):
        (after,) = super().run_block(index, streams, condition, layout, skip)
        return (streams[0] + (after - streams[0]).detach() if index == 2 else after,)


class NeedsAutocast(DiT):
    """The next layer is given float32, whatever its weights are stored in."""

    def head(self, streams, condition):
        return super().head((streams[0].float(),), condition.float())


class HalvesAGradient(DiT):
    """A backward pass that was derived wrongly."""

    def run_block(self, index, streams, condition, layout, skip):
        (after,) = super().run_block(index, streams, condition, layout, skip)
        return ((after + after.detach()) / 2 if index == 1 else after,)


class WritesInPlace(DiT):
    def run_block(self, index, streams, condition, layout, skip):
        if not torch.is_grad_enabled():
            streams[0].mul_(1.01)
        return super().run_block(index, streams, condition, layout, skip)


class SeesTheBypassed(DiT):
    def embed(self, x, t, y):
        streams, condition = super().embed(x, t, y)
        return streams, condition + streams[0].mean(dim=1)


class RemembersARoute(DiT):
    """A cache that a later call reuses by mistake."""

    def run_block(self, index, streams, condition, layout, skip):
        self.factor = 0.9 if layout.ids is not None else getattr(self, "factor", 1.0)
        return super().run_block(index, (self.factor * streams[0],), condition, layout, skip)


class HasAnUnsavedTable(DiT):
    def embed(self, x, t, y):
        if not hasattr(self, "table"):
            self.table = torch.randn(self.num_tokens, len(self.positions[0])) * self.seed()
        streams, condition = super().embed(x, t, y)
        return (streams[0] + self.table,), condition

    def seed(self):
        return self.patch_embed.weight.detach().flatten()[0]


class IgnoresTheLabel(DiT):
    def embed(self, x, t, y):
        return super().embed(x, t, None)


class IgnoresContexts(UViT):
    def embed(self, x, t, y):
        return super().embed(x, t, None)


class HasANullOfItsOwn(UViT):
    """Without a context, the condition differs from zeros, the condition of an image without
    text."""

    def embed(self, x, t, y):
        streams, condition = super().embed(x, t, y)
        return (streams[0] + (y is None),), condition


class TakesAnyShape(UViT):
    def forward(self, x, t, y=None, **options):
        if y is not None and y.ndim == 3:
            full = torch.zeros(len(x), self.context_length, self.context_size)
            full[:, : y.shape[1], : y.shape[2]] = y
            y = full
        return super().forward(x, t, y, **options)


class RoundsTimes(DiT):
    def embed(self, x, t, y):
        return super().embed(x, (t * 1000).round() / 1000, y)


class TakesAClassForNone(DiT):
    def embed(self, x, t, y):
        if not self.context_size:
            y = torch.full((len(x),), self.num_classes, device=x.device) if y is None else y
            y = torch.where(y == self.num_classes, 2, y)
        return super().embed(x, t, y)


class ReturnsFloat64UnderAutocast(DiT):
    def head(self, streams, condition):
        out = super().head(streams, condition)
        return out.double() if torch.is_autocast_enabled("cpu") else out


class ShiftsByAPatch(DiT):
    def head(self, streams, condition):
        return super().head((streams[0].roll(1, dims=1),), condition)


class CutsASkip(UViT):
    default_range = (2, -4)


class HasNoSuchSelector(DiT):
    default_selector = "randm"


class ReadsAValue(DiT):
    """The scale of the input is read as a number, which the meta device does not have."""

    def embed(self, x, t, y):
        return super().embed(x / max(1.0, x.detach().abs().max().item() / 100), t, y)


class CallsForward(DiT):
    """Hooks of blocks do not run, such as those for compilation or sharding."""

    def run_block(self, index, streams, condition, layout, skip):
        return self.blocks[index].forward(streams, condition, layout)


class ConditionsByIndex(DiT):
    """A condition per token; a route's tokens wrongly take the first ones."""

    def embed(self, x, t, y):
        streams, condition = super().embed(x, t, y)
        return streams, condition.values if isinstance(condition, PerToken) else condition

    def run_block(self, index, streams, condition, layout, skip):
        if condition.ndim == 3:
            condition = condition[:, : streams[0].shape[1]]
        return super().run_block(index, streams, condition, layout, skip)


class DetachesFeatures(DiT):
    def hidden_state(self, streams):
        return streams[0].detach()


class ScansInHalf(Mamba):
    """Two streams, of which one is routed by hand and dropped."""

    def run_block(self, index, streams, condition, layout, skip):
        delta, residual = super().run_block(index, streams, condition, layout, skip)
        return delta, residual.roll(1, dims=1) if layout.ids is not None else residual


FAULTS = [
    (ShiftsByAPatch, DIT, "patches_stay_in_place"),
    (RoundsTimes, DIT, "conditions_matter"),
    (TakesAClassForNone, DIT, "conditions_matter"),
    (ReturnsFloat64UnderAutocast, DIT, "half_precision"),
    (HasNoSuchSelector, DIT, "default_selector_exists"),
    (CutsASkip, {**UVIT, "depth": 8}, "default_route_cuts_no_skip"),
    (ReadsAValue, DIT, "meta"),
    (CallsForward, DIT, "blocks_are_called_as_modules"),
    (ConditionsByIndex, DIT, "times_of_tokens"),
    (own_loops.ScansOneWay, {}, "pixels_reach_each_other"),
    (own_loops.ScansUnsortedWhenRouted, {}, "a_missing_token_leaves_the_others"),
    (own_loops.RotatesByIndex, {}, "order_alone_is_a_scans"),
    (AddsPositionsByIndex, DIT, "blocks_depend_on_what_they_declare"),
    (RemembersARoute, DIT, "pure"),
    (CentresTheBatch, DIT, "samples_do_not_mix"),
    (DetachesABlock, DIT, "gradients_flow"),
    (HalvesAGradient, DIT, "gradients_equal_differences"),
    (SeesTheBypassed, DIT, "bypassed_tokens_are_unseen"),
    (HasAnUnsavedTable, DIT, "save_and_load"),
    (IgnoresTheLabel, DIT, "conditions_matter"),
    (IgnoresContexts, UVIT, "contexts_condition_or_are_refused"),
    (HasANullOfItsOwn, UVIT, "contexts_condition_or_are_refused"),
    (TakesAnyShape, UVIT, "contexts_condition_or_are_refused"),
    (own_loops.RoutesExtraTokens, UVIT, "contexts_stay_with_their_images"),
    (ScansInHalf, MAMBA, "a_missing_token_leaves_the_others"),
    (NeedsAutocast, DIT, "half_precision"),
    (DetachesFeatures, DIT, "features"),
    (own_loops.IgnoresRoutes, UVIT, "ids_matter"),
    (own_loops.EndIsInclusive, UVIT, "blocks_see_kept_tokens"),
    (own_loops.RoutesExtraTokens, UVIT, "blocks_see_kept_tokens"),
    (own_loops.OneSetOfIdsForAll, UVIT, "tokens_leave_and_rejoin"),
    (own_loops.ZeroesTheBypassed, UVIT, "tokens_leave_and_rejoin"),
    (own_loops.SkipByIndex, UVIT, "skips_carry_their_tokens"),
    (own_loops.RunsDroppedBlocks, UVIT, "blocks_can_be_left_out"),
    (own_loops.SwallowsKeywords, UVIT, "wrong_keyword"),
    (own_loops.DecaysByKept, {}, "blocks_depend_on_what_they_declare"),
    (own_loops.ScansUnsorted, {}, "scan_order_is_the_dense_one"),
    (WritesInPlace, DIT, "blocks_depend_on_their_arguments_alone"),
]

HEALTHY = [
    (own_loops.OwnLoop, UVIT),
    (own_loops.DecaysByOwnLength, {}),
    (own_loops.ScansOverGaps, {}),
    (own_loops.Rotates, {}),
    (Mamba, {**MAMBA, "depth": 2, "gaps": "decay"}),
    (UViT, {**UVIT, "time_mlp": True, "final_conv": False, "learn_sigma": True}),
]


@pytest.fixture
def as_probe(own_registry):
    """Return a function that registers a class, for this test alone, and returns its probe."""

    def register(cls, overrides):
        register_backbone("planted")(cls)
        return Probe("planted", overrides=overrides)

    return register


@pytest.mark.filterwarnings("error::tread_zoo.testing.probe.Advice")
@pytest.mark.parametrize(
    ("fault", "overrides", "check"), FAULTS, ids=[f"{f.__name__}-{c}" for f, _, c in FAULTS]
)
def test_a_fault_is_caught(as_probe, fault, overrides, check):
    """By an invariant, or by a rule of thumb."""
    with pytest.raises((AssertionError, Advice)):
        CHECKS[check](as_probe(fault, overrides))


@pytest.mark.slow
@pytest.mark.filterwarnings("error::tread_zoo.testing.probe.Advice")
@pytest.mark.parametrize(("cls", "overrides"), HEALTHY)
def test_what_keeps_the_contract_passes(as_probe, cls, overrides):
    probe = as_probe(cls, overrides)
    for name in CHECKS.keys() - {"compiles"}:
        CHECKS[name](probe)
