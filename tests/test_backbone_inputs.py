"""What a backbone is called with by mistake: one ValueError that says what it takes."""

import pytest
import torch

from tests.test_contract import SMALL
from tread_zoo import create_backbone
from tread_zoo.routing import Route

X, T, Y = torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.tensor([0, 3])
ROUTE = Route(1, 3, torch.tensor([[0, 3], [1, 2]]))


def built(name="dit_tiny", **changes):
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 3, **SMALL[name], **changes}
    return create_backbone(name, **sizes)


@pytest.fixture(scope="module")
def backbone():
    return built()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            (X, T, torch.tensor([0, 4])),
            "y reaches from 0 to 4; labels are 0 … 2, and 3 is the null",
        ),
        ((X, T, torch.tensor([-1, 0])), "y reaches from -1 to 0"),
        ((X, T, Y.float()), "y has shape [2] and dtype torch.float32; expected labels, int64"),
        ((X, T, [0, 1]), "y is a list; expected a tensor"),
        ((X, 0.5, Y), "t is a float; expected a tensor"),
        ((X, T[0], Y), "t has shape []; expected [2]"),
        ((X.double(), T, Y), "x is torch.float64; this network's weights are torch.float32"),
        ((X.byte(), T, Y), "x is torch.uint8; this network's weights are torch.float32"),
        ((X.numpy(), T, Y), "x is a ndarray; expected a tensor"),
    ],
)
def test_inputs_of_another_type(backbone, inputs, words):
    with pytest.raises(ValueError) as error:
        backbone(*inputs)
    assert str(error.value).startswith(words), str(error.value)


@pytest.mark.parametrize("routes", [None, ROUTE, [ROUTE.ids], iter([ROUTE])])
def test_routes_that_are_no_list_of_routes(backbone, routes):
    with pytest.raises(ValueError, match=r"routes is a .*routes=\[route\]"):
        backbone(X, T, Y, routes=routes)


@pytest.mark.parametrize("size", [8.0, None, "8", True, (8, 8.0)])
def test_sizes_that_are_no_integers(size):
    with pytest.raises(ValueError, match=r"input_size=.* must be one positive integer or two"):
        built(input_size=size)


def test_a_numpy_integer_is_told_apart():
    import numpy as np

    with pytest.raises(ValueError, match=r"input_size=np.int64\(8\) must be one positive integer"):
        built(input_size=np.int64(8))


@pytest.mark.parametrize("name", SMALL)
def test_an_empty_batch_is_empty(name):
    network = built(name)
    none = Route(1, 3, torch.zeros(0, 5, dtype=torch.int64))
    for routes in ((), (none,)):
        assert network(X[:0], T[:0], Y[:0], routes=routes).shape == X[:0].shape
    with pytest.raises(ValueError, match=r"t has shape \[2\]; expected \[0\]"):
        network(X[:0], T, Y[:0])
