"""Choices of tokens: which are refused, and the chances of tokens with higher scores."""

import itertools
import math

import pytest
import torch

from tests.test_contract import SMALL
from tread_zoo.contract.crossing import Layout, Tokens, check_crossings
from tread_zoo.routing import Ranked, Select, Skip, num_kept_tokens
from tread_zoo.routing.select import draw_gumbel
from tread_zoo.seeding import make_image_generator
from tread_zoo.testing import Probe


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 49, 64, 100, 256])
def test_num_kept_is_n_minus_floor_of_n_times_rate(num_tokens):
    for percent in range(100):
        exact = num_tokens - num_tokens * percent // 100
        assert num_kept_tokens(num_tokens, percent / 100) == exact
        assert exact >= 1


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_rate_outside_zero_to_one(rate):
    with pytest.raises(ValueError, match="selection_rate"):
        num_kept_tokens(16, rate)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[3, 1]], "ascending"),
        ([[0, 1], [2, 2]], "ascending"),
        ([[-1, 2]], "ascending"),
        ([[0.0, 1.0]], "int64"),
        ([0, 1], "int64"),
    ],
)
def test_ids_that_are_no_sorted_rows_raise(ids, words):
    with pytest.raises(ValueError, match=words):
        Select(1, 3, torch.tensor(ids))


@pytest.mark.parametrize("span", [(2, 2), (3, 1), (-1, 2), (2, 9)])
def test_ranges_that_are_none_of_the_blocks(span):
    with pytest.raises(ValueError, match="8 blocks"):
        check_crossings([Skip(*span)], 8)


def test_crossings_are_disjoint_or_nested_and_come_in_order():
    inner, outer, later = Skip(2, 3), Skip(1, 4), Skip(4, 6)
    assert check_crossings([later, inner, outer], 8) == [outer, inner, later]
    with pytest.raises(ValueError, match="disjoint"):
        check_crossings([Skip(1, 4), Skip(3, 6)], 8)


@pytest.mark.parametrize(
    ("ids", "words"), [([[0, 1]], "batch of 1, not 3"), ([[0, 1]] * 2 + [[0, 24]], "24 tokens")]
)
def test_ids_that_do_not_fit_the_network(ids, words):
    probe = Probe("dit_tiny", overrides=SMALL["dit_tiny"])
    with pytest.raises(ValueError, match=words):
        probe.build()(*probe.inputs(3), routes=[Select(1, 3, torch.tensor(ids))])


def test_two_choices_do_not_nest():
    probe = Probe("dit_tiny", overrides=SMALL["dit_tiny"])
    backbone = probe.build()
    routes = [probe.route(backbone, 1, 3), probe.route(backbone, 2, 3)]
    with pytest.raises(ValueError, match="nested"):
        backbone(*probe.inputs(), routes=routes)


# A score chooses ----------------------------------------------------------------------------------


def chosen(scores, num_kept):
    """Return the ids [B, K] of tokens whose only channel is their score [B, N]."""
    batch, num_tokens = scores.shape
    noise = draw_gumbel(num_tokens, make_image_generator("test ranked", images=range(batch)))
    crossing = Ranked(0, 1, num_kept, noise, lambda x: x[..., 0])
    layout = Layout((1, num_tokens), 0, batch=batch)
    tokens, _ = crossing.enter(Tokens((scores[..., None],), {}, None, layout))
    return tokens.layout.ids


def chances(weights, num_kept):
    """Return each token's chance to be among `num_kept` drawn one by one, by enumeration."""
    found = [0.0] * len(weights)
    for drawn in itertools.permutations(range(len(weights)), num_kept):
        chance, left = 1.0, sum(weights)
        for token in drawn:
            chance *= weights[token] / left
            left -= weights[token]
        for token in drawn:
            found[token] += chance
    return torch.tensor(found)


@pytest.mark.parametrize("num_kept", [1, 2, 3, 4])
def test_tokens_stay_with_the_chances_of_drawing_without_replacement(num_kept):
    weights = [4.0, 1.0, 2.0, 0.5, 1.0]
    ids = chosen(torch.tensor(weights).expand(40000, 5), num_kept)
    share = torch.zeros(5).index_add(0, ids.flatten(), torch.ones(40000 * num_kept)) / 40000
    torch.testing.assert_close(share, chances(weights, num_kept), atol=0.012, rtol=0)


def test_ranked_ids_are_sorted_unique_and_exactly_k():
    scores = torch.rand(6, 35) * torch.logspace(-30, 3, 35)
    scores[:, 1] = 0.0
    ids = chosen(scores, 14)
    assert ids.shape == (6, 14)
    assert (ids[:, 1:] > ids[:, :-1]).all()
    assert ids.max() < 35


def test_a_score_leaves_gradients_alone():
    """Of equal scores and noise, a `Ranked` choice is the `Select` of the same tokens."""
    probe = Probe("dit_tiny", overrides=SMALL["dit_tiny"])
    backbone, inputs = probe.build(), probe.inputs()
    noise = torch.rand(len(inputs[0]), backbone.num_tokens)
    ranked = Ranked(1, 3, 5, noise, lambda x: x.square().sum(-1) * 0 + 1)
    ids = noise.topk(5, dim=1).indices.sort(dim=1).values
    results = []
    for route in (ranked, Select(1, 3, ids)):
        out = backbone(*inputs, routes=[route])
        results.append([out, *torch.autograd.grad(out.square().sum(), backbone.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
