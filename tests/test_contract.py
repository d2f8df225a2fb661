"""Every registered architecture keeps the contract."""

import pytest

from tread_zoo import list_backbones
from tread_zoo.registry import get_entry
from tread_zoo.testing import CHECKS, Probe
from tread_zoo.testing.probe import Advice

SMALL = {
    "dit_tiny": {"hidden_size": 32, "depth": 4},
    "gated_deltanet_tiny": {"hidden_size": 32, "depth": 4},
    "gla_tiny": {"hidden_size": 32, "depth": 4},
    "hybrid_tiny": {"hidden_size": 32, "depth": 4, "pattern": "rwkv7,attention:2,rwkv7"},
    "kda_tiny": {"hidden_size": 32, "depth": 4, "short_conv": True},
    "lightning_dit_tiny": {"hidden_size": 32, "depth": 4},
    "linear_dit_tiny": {"hidden_size": 32, "depth": 4},
    "mamba_tiny": {"hidden_size": 32, "depth": 4, "state_size": 4},
    "mamba2_tiny": {"hidden_size": 32, "depth": 4, "state_size": 4, "head_size": 16},
    "rwkv_tiny": {"hidden_size": 32, "depth": 5},
    "rwkv7_tiny": {"hidden_size": 32, "depth": 4, "head_size": 16, "low_rank": 4},
    "uvit_tiny": {"hidden_size": 32, "depth": 4},
    "zigma_tiny": {"hidden_size": 32, "depth": 4, "state_size": 4},
}


def test_every_architecture_is_checked():
    def classes(names):
        return {get_entry("backbone", name).target for name in names}

    # backbones/test_diffusers_classes.py gives each class of diffusers to the kit
    assert classes(list_backbones()) == classes([*SMALL, "diffusers"])


COMPILED = ("dit_tiny", "mamba_tiny")  # in seconds; the others nightly


def marks(name, check):
    if check != "compiles":
        return ()
    return pytest.mark.slow if name in COMPILED else pytest.mark.nightly


CASES = [pytest.param(n, c, marks=marks(n, c)) for n in SMALL for c in CHECKS]
OTHERS = [check for check in CHECKS if check != "compiles"]


@pytest.mark.filterwarnings("error::tread_zoo.testing.probe.Advice")
@pytest.mark.parametrize(("name", "check"), CASES)
def test_contract(name, check):
    if (name, check) == ("kda_tiny", "compiles"):
        pytest.skip("a minute of a C++ compiler; kernels/test_forms.py compiles its operation")
    CHECKS[check](Probe(name, overrides=SMALL[name]))


@pytest.mark.nightly
@pytest.mark.parametrize("check", OTHERS)
@pytest.mark.parametrize("name", SMALL)
def test_contract_at_the_registered_size(name, check):
    CHECKS[check](Probe(name))


def test_a_rule_of_thumb_that_a_sound_network_misses_only_advises():
    with pytest.warns(Advice, match="shuffling"):
        CHECKS["a_missing_token_leaves_the_others"](Probe("gla_tiny"))


@pytest.mark.nightly
@pytest.mark.parametrize("check", OTHERS)
@pytest.mark.parametrize("name", SMALL)
def test_contract_with_contexts(name, check):
    CHECKS[check](Probe(name, overrides=SMALL[name]).with_contexts())
