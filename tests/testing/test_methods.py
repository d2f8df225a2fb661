"""Every registered routing method keeps to its contract, on every architecture."""

import pytest

from tests.test_contract import SMALL
from tread_zoo import available
from tread_zoo.testing.method_checks import CHECKS, MethodProbe
from tread_zoo.testing.probe import Probe

QUICK = {"hidden_size": 24, "depth": 6, "num_heads": 2}
METHODS = {
    **{name: name for name in available("routing")},
    "tread_falling": {"name": "tread", "selection_rate": ["linear", 0.75, 0.25], "warm_start": 0.2},
}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
ALIKE = ("none", "random_ltd", "microdit", "tread_falling")  # their crossings are those of tread


def marks(method, check):
    if check != "compiles":
        return ()
    return pytest.mark.nightly if method in ALIKE else pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "check"), [pytest.param(m, c, marks=marks(m, c)) for m in METHODS for c in CHECKS]
)
def test_method(method, check):
    CHECKS[check](MethodProbe(METHODS[method], Probe("dit_tiny", overrides=QUICK)))


@pytest.mark.nightly
@pytest.mark.parametrize("check", ["calls_are_pure", "an_image_alone_equals_itself", "sampling"])
@pytest.mark.parametrize("name", SMALL)
@EVERY_METHOD
def test_method_on_every_architecture(method, name, check):
    """Three checks that show what a row does to a method; the others are on one row."""
    depth = 7 if name == "rwkv_tiny" else 6  # an odd one
    CHECKS[check](MethodProbe(method, Probe(name, overrides={**SMALL[name], "depth": depth})))
