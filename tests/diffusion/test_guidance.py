"""Guidance: which branch is evaluated, and what it adds up to."""

import math

import pytest
import torch

from tread_zoo.diffusion import EDM, FlowMatching, classifier_free, combine

NULL = 10
LABELS = torch.tensor([2, 7])
X = torch.randn(2, 5, 4, 4, generator=torch.Generator().manual_seed(0))
LEVEL = torch.tensor([0.3, 0.8])


class LabelledNetwork:
    """A network that depends on its label, in each channel, and counts its evaluations."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, labels):
        def network(x, t):
            self.seen.append(labels.tolist())
            return x * (1 + labels.view(-1, 1, 1, 1)) + t.view(-1, 1, 1, 1)

        return network


@pytest.fixture(params=[EDM(), FlowMatching()], ids=["edm", "flow"])
def objective(request):
    return request.param


@pytest.mark.parametrize(
    ("options", "labels"),
    [({}, LABELS), ({"scale": 1.0}, LABELS), ({"scale": 0.0}, torch.tensor([NULL, NULL]))],
)
def test_one_branch_alone(objective, options, labels):
    """The default is the conditional branch, and one evaluation."""
    network = LabelledNetwork()
    drift = classifier_free(network, LABELS, NULL, objective=objective, **options)
    found = drift(X, LEVEL)
    assert network.seen == [labels.tolist()]
    assert torch.equal(found, objective.drift(network(labels), X, LEVEL))


def test_guides_all_channels_linearly(objective):
    network = LabelledNetwork()
    drift = classifier_free(network, LABELS, NULL, objective=objective, scale=3.0)
    found = drift(X, LEVEL)
    assert len(network.seen) == 2
    conditional = objective.drift(network(LABELS), X, LEVEL)
    unconditional = objective.drift(network(torch.tensor([NULL, NULL])), X, LEVEL)
    torch.testing.assert_close(found, 3 * conditional - 2 * unconditional, rtol=1e-4, atol=1e-4)
    differs = (found - conditional).abs().amax(dim=(0, 2, 3))
    assert (differs > 0.1).all()


def test_guiding_drifts_is_guiding_estimates(objective):
    network = LabelledNetwork()
    drift = classifier_free(network, LABELS, NULL, objective=objective, scale=2.5)
    strong = objective.denoise(network(LABELS), X, LEVEL)
    weak = objective.denoise(network(torch.tensor([NULL, NULL])), X, LEVEL)
    estimate = weak + 2.5 * (strong - weak)
    expected = (X - estimate) / LEVEL.view(-1, 1, 1, 1)
    torch.testing.assert_close(drift(X, LEVEL), expected, rtol=1e-4, atol=1e-4)


def test_combine_by_hand():
    def weak(x, level):
        return x

    def strong(x, level):
        return 4 * x

    assert combine(weak, strong, 1) is strong
    assert combine(weak, strong, 0.0) is weak
    assert torch.equal(combine(weak, strong, 2.0)(torch.ones(1), LEVEL), torch.tensor([7.0]))
    assert torch.equal(combine(weak, strong, 0.5)(torch.ones(1), LEVEL), torch.tensor([2.5]))


@pytest.mark.parametrize("scale", [-0.1, math.inf, math.nan])
def test_wrong_scales_are_named(scale, objective):
    with pytest.raises(ValueError, match=r"scale=.* must be finite and at least 0"):
        classifier_free(LabelledNetwork(), LABELS, NULL, objective=objective, scale=scale)
