"""Each fault of a routing method that its kit promises to catch, planted, and its check."""

from dataclasses import dataclass, replace

import pytest
import torch

from tread_zoo import register
from tread_zoo.contract.crossing import Crossing, gather, row_index, scatter
from tread_zoo.routing import Select, Skip
from tread_zoo.routing.methods import Sprint, Tread
from tread_zoo.routing.methods.sprint import Fusions
from tread_zoo.testing.method_checks import CHECKS, MethodProbe
from tread_zoo.testing.probe import Advice, Probe


class Plain(Tread):
    """TREAD; each fault changes one thing of it."""

    def choose(self, stack, images, step):
        return super().route(stack, images, step)

    def route(self, stack, images, step):
        return tuple(self.change(each) for each in self.choose(stack, images, step))

    def change(self, crossing):
        return crossing


class DrawsFromTheGlobalGenerator(Plain):
    def change(self, crossing):
        ids = torch.rand(len(crossing.ids), 24).topk(crossing.num_kept).indices.sort().values
        return replace(crossing, ids=ids)


class DrawsForTheBatch(Plain):
    """Every image keeps the tokens chosen for the first image of its rank."""

    def change(self, crossing):
        return replace(crossing, ids=crossing.ids[:1].expand(len(crossing.ids), -1))


class AlwaysKeepsTheSame(Plain):
    def change(self, crossing):
        return replace(crossing, ids=torch.arange(crossing.num_kept).expand(crossing.ids.shape))


class RoutesExtraTokens(Plain):
    def change(self, crossing):
        return Rolled(crossing.start, crossing.end, crossing.ids)


@dataclass(frozen=True)
class Rolled(Select):
    def enter(self, tokens):
        kept, exit = super().enter(tokens)
        return kept._replace(streams=tuple(s.roll(1, dims=1) for s in kept.streams)), exit


class LosesTokens(Plain):
    """Bypassed tokens do not return: only kept tokens remain."""

    def change(self, crossing):
        return Lost(crossing.start, crossing.end, crossing.ids)


@dataclass(frozen=True)
class Lost(Select):
    def enter(self, tokens):
        kept, _ = super().enter(tokens)
        return kept, lambda after: after


class LosesSkips(Plain):
    def change(self, crossing):
        return WithoutSkips(crossing.start, crossing.end, crossing.ids)


@dataclass(frozen=True)
class WithoutSkips(Select):
    def enter(self, tokens):
        kept, exit = super().enter(tokens)
        return kept, lambda after: exit(after)._replace(skips=tokens.skips)


class MixesImages(Plain):
    def change(self, crossing):
        return Mixed(crossing.start, crossing.end, crossing.ids)


@dataclass(frozen=True)
class Mixed(Select):
    def enter(self, tokens):
        kept, exit = super().enter(tokens)
        mixed = tuple(s - 0.1 * s.mean(dim=0) for s in kept.streams)
        return kept._replace(streams=mixed), exit


class HalvesAGradient(Plain):
    def change(self, crossing):
        return Halved(crossing.start, crossing.end, crossing.ids)


@dataclass(frozen=True)
class Halved(Select):
    def enter(self, tokens):
        kept, exit = super().enter(tokens)
        return kept._replace(streams=tuple((s + s.detach()) / 2 for s in kept.streams)), exit


class RemembersTokens(Plain):
    """State on a module of the crossing, which a recomputation or a later call finds changed."""

    def change(self, crossing):
        return Remembering(crossing.start, crossing.end, crossing.ids, [])


@dataclass(frozen=True)
class Remembering(Crossing):
    ids: torch.Tensor
    seen: list

    def enter(self, tokens):
        self.seen.append(1)
        factor = 1 + 0.1 * len(self.seen)
        streams = tuple(factor * s for s in tokens.streams)
        return tokens._replace(streams=streams), lambda after: after


class KeepingAllScales(Plain):
    def choose(self, stack, images, step):
        return (Scaled(2, 4),)


@dataclass(frozen=True)
class Scaled(Crossing):
    def enter(self, tokens):
        streams = tuple(1.1 * s for s in tokens.streams)
        return tokens._replace(streams=streams), lambda after: after


class CountsNineTenths(Plain):
    def outcomes(self, stack, images, step):
        return [(0.9, self.route(stack, images, step))]


class LeavesBlocksOut(Plain):
    """Leaves blocks out, but does not declare idle weights."""

    def choose(self, stack, images, step):
        return (Skip(2, 4),) if step.index % 2 else ()


class SaysTooMuch(Plain):
    def describe(self, stack):
        return "two\nlines"


class ReadsAValue(Plain):
    """Reads a value, which the meta device, where FLOPs are counted, does not have."""

    def change(self, crossing):
        assert int(crossing.ids.sum()) >= 0
        return crossing


class SharesItsMap(Sprint):
    """Every network fuses with the weights of the first network."""

    def build(self, stack):
        module = Shared(stack.span(), stack.widths, self.absent)
        module.first.append(module)
        return module


class Shared(Fusions):
    first: list = []  # noqa: RUF012

    def forward(self, dense, output):
        return Fusions.forward(self.first[0], dense, output)


class RefusesOtherCrossings(Sprint):
    """Refuses other crossings, so no block of its network can be left out."""

    def build(self, stack):
        return Strict(stack.span(), stack.widths, self.absent)


class Strict(Fusions):
    def cross(self, crossings):
        if any(isinstance(c, Skip) and c.end - c.start == 1 for c in crossings):
            raise ValueError("one block is too few")
        return super().cross(crossings)


class TurnsToNaN(Sprint):
    def weak(self, stack):
        return (Nowhere(*stack.span(self.start, self.end)),)


@dataclass(frozen=True)
class Nowhere(Skip):
    def enter(self, tokens):
        return tokens, lambda after: after._replace(streams=tuple(s / 0 for s in after.streams))


class RoundsInHalf(Plain):
    def change(self, crossing):
        return Rounded(crossing.start, crossing.end, crossing.ids)


@dataclass(frozen=True)
class Rounded(Select):
    def enter(self, tokens):
        kept, exit = super().enter(tokens)
        if torch.is_autocast_enabled("cpu"):
            kept = kept._replace(streams=tuple(2 * s for s in kept.streams))
        return kept, exit


class GraphsDiffer(Plain):
    def change(self, crossing):
        return Differs(crossing.start, crossing.end, crossing.ids)


@dataclass(frozen=True)
class Differs(Select):
    """Compiled blocks get other tokens."""

    def enter(self, tokens):
        rows = row_index(self.ids, tokens.layout.num_tokens, tokens.layout.num_extra)
        factor = 1.0 if GraphsDiffer.calls == 0 else 1.1
        GraphsDiffer.calls += 1
        return (
            tokens.map(lambda s: factor * gather(s, rows), self.ids),
            lambda after: tokens.restore(after, lambda full, kept: scatter(full, rows, kept)),
        )


GraphsDiffer.calls = 0


FAULTS = [
    (SaysTooMuch, "options_round_trip"),
    (RoutesExtraTokens, "tokens_return_whole"),
    (LosesTokens, "tokens_return_whole"),
    (LosesSkips, "tokens_return_whole"),
    (DrawsFromTheGlobalGenerator, "draws_belong_to_images"),
    (DrawsForTheBatch, "draws_belong_to_images"),
    (AlwaysKeepsTheSame, "draws_belong_to_images"),
    (RemembersTokens, "calls_are_pure"),
    (RemembersTokens, "recomputation"),
    (MixesImages, "an_image_alone_equals_itself"),
    (KeepingAllScales, "keeping_all_is_dense"),
    (LeavesBlocksOut, "gradients_flow"),
    (HalvesAGradient, "gradients_equal_differences"),
    (RoundsInHalf, "half_precision"),
    (GraphsDiffer, "compiles"),
    (CountsNineTenths, "costs_are_counted"),
    (ReadsAValue, "costs_are_counted"),
    (SharesItsMap, "described_weights_load"),
    (RefusesOtherCrossings, "a_block_can_be_left_out"),
    (TurnsToNaN, "sampling"),
]


@pytest.fixture
def planted(own_registry):
    """Return a function that registers a method, for this test alone, and returns its probe."""

    def probe(cls):
        own = "__dataclass_params__" in vars(cls)
        made = cls if own else dataclass(frozen=True, kw_only=True)(cls)
        register("routing", "planted")(made)
        sizes = {"hidden_size": 24, "depth": 6, "num_heads": 2}
        return MethodProbe("planted", Probe("uvit_tiny", overrides=sizes))

    return probe


@pytest.mark.filterwarnings("error::tread_zoo.testing.probe.Advice")
@pytest.mark.parametrize(
    ("fault", "check"), FAULTS, ids=[f"{f.__name__}-{check}" for f, check in FAULTS]
)
def test_a_fault_is_caught(planted, fault, check):
    probe = planted(fault)
    probe.build()  # the fault is not there
    with pytest.raises((AssertionError, RuntimeError, ValueError, NotImplementedError, Advice)):
        CHECKS[check](probe)


@pytest.mark.slow
def test_what_keeps_the_contract_passes(planted):
    probe = planted(Plain)
    for name in CHECKS.keys() - {"compiles"}:
        CHECKS[name](probe)
