"""Every registered routing method keeps to its contract, on rows of every kind."""

import pytest

from tread_zoo import available
from tread_zoo.testing.method_checks import CHECKS, MethodProbe
from tread_zoo.testing.probe import Probe

# attention; long skips and two streams; values of the first block
ROWS = {"dit_tiny": 6, "mamba_tiny": 7, "rwkv7_tiny": 6}
SMALL = {"hidden_size": 24, "depth": 6}
METHODS = {
    **{name: name for name in available("routing")},
    "tread_falling": {"name": "tread", "selection_rate": ["linear", 0.75, 0.25], "warm_start": 0.2},
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_method(method, check):
    check(MethodProbe(method, Probe("dit_tiny", overrides=SMALL | {"num_heads": 2})))
