"""What blocks are worth: planted networks, and a loop of one's own, for every architecture."""

import pytest
import torch
from torch import nn

from tests.evaluation.tiny import Tiny
from tests.test_contract import SMALL
from tread_zoo import create
from tread_zoo.contract.backbone import Layout
from tread_zoo.contract.crossing import plain_condition
from tread_zoo.evaluation.contribution import (
    contributions,
    data_contributions,
    describe_contributions,
    own_contributions,
    ranges_of,
)
from tread_zoo.evaluation.evaluate import describe_record
from tread_zoo.routing import Skip
from tread_zoo.routing.methods.none import NO_ROUTING
from tread_zoo.runs.restore import restore
from tread_zoo.seeding import make_generator, per_image_generator
from tread_zoo.testing import Probe

SIZES = {"objective": create("objective", "flow"), "precision": "fp32"}


def whole_loop(backbone, inputs, without):
    streams, condition = backbone.embed(*inputs)
    layout, skips = Layout(backbone.grid, backbone.num_extra_tokens, None, len(inputs[0])), {}
    condition = plain_condition(condition)
    for i in range(backbone.num_blocks):
        if i not in without:
            skip = skips[backbone.skips[i]] if i in backbone.skips else None
            streams = backbone.run_block(i, streams, condition, layout, skip)
        skips[i] = streams[0]
    return backbone.head(streams, condition)


@pytest.mark.parametrize("name", SMALL)
def test_blocks_left_out_pass_the_streams_on(name):
    probe = Probe(name, overrides=SMALL[name])
    backbone, inputs = probe.build(), probe.inputs()
    with torch.no_grad():
        for without in ([], [0], [1, 2], [backbone.num_blocks - 1]):
            expected = whole_loop(backbone, inputs, without)
            out = backbone(*inputs, routes=[Skip(i, i + 1) for i in without])
            torch.testing.assert_close(out, expected)
        worth = contributions(backbone, x=inputs[0], y=inputs[2], ranges=[(1, 3)], **SIZES)
    assert len(worth["blocks"]) == backbone.num_blocks
    assert all(value > 0 for value in worth["blocks"])
    ((start, end, value),) = worth["ranges"]
    assert (start, end) == (1, 3)
    assert value > 0


def test_a_block_that_is_not_there_cannot_be_left_out():
    probe = Probe("dit_tiny", overrides=SMALL["dit_tiny"])
    with pytest.raises(ValueError, match="4 blocks"):
        probe.build()(*probe.inputs(), routes=[Skip(4, 5)])


class Planted(nn.Module):
    """Blocks whose parts of the output are known."""

    num_blocks, parts = 3, (0.1, 0.0, 0.5)

    def forward(self, x, t, y=None, *, routes=()):
        without = [i for route in routes for i in range(route.start, route.end)]
        return x * (1 - sum(self.parts[i] for i in without))


@pytest.mark.parametrize("objective", ["flow", "edm", "ddpm"])
def test_planted_parts_of_the_output_are_found(objective):
    x = torch.randn(5, 1, 8, 8)
    worth = contributions(
        Planted(), create("objective", objective), x, None, ranges=[(0, 2), (0, 3)],
        precision="fp32", batch_size=4,
    )  # fmt: skip
    assert worth["blocks"] == pytest.approx([0.1, 0, 0.5], abs=1e-6)
    assert [end for *_, end in worth["ranges"]] == pytest.approx([0.1, 0.6], abs=1e-6)
    assert worth["loss_rises"][1] == 0
    rise = 100 * worth["loss_rises"][3]
    assert describe_contributions(worth)[1] == (
        f"blocks 0 … 1 change the output by 10 %; without them the loss rises by {rise:.2g} %"
    )
    if objective == "flow":
        assert worth["levels"] == pytest.approx([0.2, 0.5, 0.8], abs=0.01)


def test_the_rise_of_the_loss_is_that_of_a_loop_by_hand():
    """Flow matching: the mean of |v + a x_t|^2, where a is the remaining fraction of the output."""
    x, objective = torch.randn(5, 1, 8, 8), create("objective", "flow")
    worth = contributions(Planted(), objective, x, None, ranges=[(0, 3)], precision="fp32")
    generator = make_generator("worth")
    levels = objective.draw((100_000, 1, 1, 1), per_image_generator(generator, 100_000)).level
    levels = levels.quantile(torch.tensor([0.2, 0.5, 0.8]))
    noise = objective.draw(tuple(x.shape), per_image_generator(generator, 5)).noise

    def loss(left):
        errors = [((noise - x) - left * ((1 - t) * x + t * noise)).square().mean() for t in levels]
        return sum(errors) / 3

    assert worth["loss"] == pytest.approx(float(loss(1)), rel=1e-5)
    for left, rise in zip((0.9, 1, 0.5, 0.4), worth["loss_rises"], strict=True):
        assert rise == pytest.approx(float(loss(left) / loss(1) - 1), abs=1e-5)


def test_the_default_range_stands_for_the_routes_of_a_dense_network_that_has_it():
    deep, shallow = (
        Probe("dit_tiny", overrides={"hidden_size": 32, "depth": depth}).build() for depth in (9, 5)
    )
    assert ranges_of(deep, NO_ROUTING) == [(2, 5)]
    assert ranges_of(shallow, NO_ROUTING) == []
    for name in ("tread", "random_ltd", "sprint", "layer_drop"):
        assert ranges_of(deep, create("routing", name, start=1, end=7)) == [(1, 7)]


def test_a_score_has_them(tmp_path):
    tiny = Tiny(tmp_path)
    record = tiny.score(block_ranges=[[0, 2]])
    assert len(record["contributions"]["blocks"]) == 2
    assert "blocks 0 … 1 change the output by" in "\n".join(describe_record(record))
    again = tiny.score(metrics=[], extractor="auto", block_ranges=[[0, 2]])
    assert again["contributions"] == record["contributions"]


@pytest.mark.slow
def test_on_images_of_its_own_a_network_s_blocks_rank_as_on_real_ones():
    run = restore("dit", weights="ema", device="cpu", precision="fp32")
    sampling = run.sampling({"num_steps": 10}, {})
    own = own_contributions(run.backbone, run.objective, sampling, precision="fp32")
    ranges = [(start, end) for start, end, _ in own["ranges"]]
    assert ranges == [*ranges_of(run.backbone, run.routing)]
    real = data_contributions(
        run.backbone, run.objective, run.data({}), ranges=ranges, precision="fp32", num_images=16
    )
    count = run.backbone.num_blocks
    most = [
        {index for index in range(count) if record["loss_rises"][index] > 0.02}
        for record in (own, real)
    ]
    assert most[0] == most[1]
    assert 2 < len(most[0]) < count
    rise = own["loss_rises"][count]
    assert abs(rise - real["loss_rises"][count]) < 0.05
