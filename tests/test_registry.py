import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

import tread_zoo
from backbones.dit import DiT
from tread_zoo import create_backbone, list_backbones, register_backbone, registry
from tread_zoo.backbone import Backbone

SIZES = {"input_size": 8, "in_channels": 1, "num_classes": 10}


@pytest.fixture
def own_names(monkeypatch):
    """Let a test register names that vanish with it."""
    list_backbones()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(registry, "_broken", {})


def test_the_three_verbs_come_from_the_top():
    assert {"create_backbone", "list_backbones", "register_backbone"} <= set(tread_zoo.__all__)
    with pytest.raises(AttributeError, match="create_backbones"):
        _ = tread_zoo.create_backbones


def test_names_are_architecture_size_patch():
    assert list_backbones("mamba_?_2") == [
        "mamba_b_2", "mamba_h_2", "mamba_l_2", "mamba_m_2", "mamba_s_2",
    ]  # fmt: skip
    sizes = {f"dit_{size}_{patch}" for size in ("s", "b", "l", "xl") for patch in (2, 4, 8)}
    assert sizes == set(list_backbones("dit_*_[248]"))
    assert list_backbones("nothing*") == []


def test_create_remembers_name_and_keywords():
    backbone = create_backbone("dit_tiny", **SIZES, depth=4)
    assert backbone.name == "dit_tiny"
    assert backbone.config["depth"] == 4
    assert backbone.config["hidden_size"] == 64
    assert len(backbone.blocks) == 4


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"backbone='mamba_tinny'.*Did you mean 'mamba_tiny'"):
        create_backbone("mamba_tinny", **SIZES)


def test_an_unknown_keyword_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"'hiden_size'.*Did you mean 'hidden_size'"):
        create_backbone("dit_tiny", **SIZES, hiden_size=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_size": 9}, ["input_size=(9, 9)", "patch_size=2"]),
        ({"in_channels": 0}, ["in_channels=0"]),
        ({"num_classes": -1}, ["num_classes=-1"]),
        ({"num_heads": 3}, ["hidden_size=64", "num_heads=3"]),
        ({"input_size": (8, 8, 8)}, ["input_size=(8, 8, 8)"]),
    ],
)
def test_sizes_that_do_not_fit(changes, words):
    with pytest.raises(ValueError) as error:
        create_backbone("dit_tiny", **{**SIZES, **changes})
    assert all(word in str(error.value) for word in words)


@pytest.mark.usefixtures("own_names")
def test_a_duplicate_raises_and_names_the_owner():
    with pytest.raises(ValueError, match=r"'dit_tiny' is already registered by backbones.dit.DiT"):
        register_backbone("dit_tiny")(DiT)


@pytest.mark.usefixtures("own_names")
def test_a_wrong_preset_keyword_raises_at_registration():
    with pytest.raises(ValueError, match=r"'dept'.*'depth'"):
        register_backbone("dit_wrong", dept=3)(DiT)
    assert "dit_wrong" not in list_backbones()


@pytest.mark.usefixtures("own_names")
def test_a_constructor_that_swallows_keywords_is_refused():
    class Swallows(Backbone):
        def __init__(self, **keywords):
            super().__init__(**keywords)

    with pytest.raises(ValueError, match="misspelt"):
        register_backbone("swallows")(Swallows)


def _plug_in(monkeypatch, *, body):
    """Pretend that a package with this module body is installed."""
    module = types.ModuleType("plugin_for_test")
    exec(body, module.__dict__)
    monkeypatch.setitem(sys.modules, "plugin_for_test", module)
    entry = EntryPoint("stranger_tiny", "plugin_for_test", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(registry, "_loaded", False)


@pytest.mark.usefixtures("own_names")
def test_an_entry_point_adds_a_backbone(monkeypatch):
    class Stranger(DiT):
        pass

    body = "from tread_zoo import register_backbone"
    _plug_in(monkeypatch, body=body)
    monkeypatch.setattr(
        EntryPoint, "load", lambda self: register_backbone("stranger_tiny", depth=2)(Stranger)
    )
    assert "stranger_tiny" in list_backbones()
    assert type(create_backbone("stranger_tiny", **SIZES)) is Stranger


@pytest.mark.usefixtures("own_names")
def test_a_plug_in_that_fails_is_named_passed_over_and_raises_when_asked_for(monkeypatch):
    _plug_in(monkeypatch, body="")

    def fail(self):
        raise ImportError("No module named 'strange_dependency'")

    monkeypatch.setattr(EntryPoint, "load", fail)
    with pytest.warns(UserWarning, match=r"stranger_tiny.*strange_dependency"):
        names = list_backbones()
    assert "stranger_tiny" not in names
    assert "dit_tiny" in names
    with pytest.raises(ImportError, match="strange_dependency"):
        create_backbone("stranger_tiny", **SIZES)


@pytest.mark.usefixtures("own_names")
def test_a_plug_in_that_registers_nothing_is_named(monkeypatch):
    _plug_in(monkeypatch, body="")
    with pytest.warns(UserWarning, match="did not call register_backbone"):
        list_backbones()


def test_a_foreign_package_called_backbones_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "backbones", types.ModuleType("backbones"))
    monkeypatch.setattr(registry, "_loaded", False)
    with pytest.raises(ImportError, match="not tread-zoo's"):
        list_backbones()


def test_weights_come_from_the_global_generator():
    def first_weight(seed):
        torch.manual_seed(seed)
        return create_backbone("dit_tiny", **SIZES).patch_embed.weight

    assert torch.equal(first_weight(0), first_weight(0))
    assert not torch.equal(first_weight(0), first_weight(1))
