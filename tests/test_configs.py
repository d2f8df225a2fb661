"""Every YAML composes, and what it composes is built."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from tests.small_run import CONFIGS, full_settings, parts_of, settings
from tread_zoo import list_backbones
from tread_zoo.cli import as_keywords, register_configs
from tread_zoo.kernels import get_forms
from tread_zoo.registry import available, get_entry

GRID = ("num_steps", "grid", "shift", "rho")
GROUPS = ("backbone", "routing", "objective", "sampler", "guidance", "training", "evaluation")
OPTIONS = [(g, p.stem) for g in GROUPS for p in sorted((CONFIGS / g).glob("*.yaml"))]


# What an option needs beside itself; and what refuses it where a new network is trained on the
# defaults, for it asks for what is not there.
BESIDE = {("sampler", "edm_stochastic"): ["objective=edm"]}
REFUSED = {
    ("sampler", "as_run"): "sampler=as_run repeats",
    ("guidance", "as_run"): "guidance=as_run repeats",
    ("guidance", "auto"): "guidance.checkpoint is not set",
    ("guidance", "path_drop"): "rejoin=project",
}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_builds(group, option):
    beside = BESIDE.get((group, option), [])
    if (group, option) not in REFUSED:
        parts_of(full_settings(f"{group}={option}", *beside))
        return
    with pytest.raises(ValueError, match=REFUSED[group, option]):
        parts_of(full_settings(f"{group}={option}"))


@pytest.mark.parametrize(
    ("group", "names"), [("sampler", available("sampler")), ("guidance", available("guidance"))]
)
def test_every_kind_is_an_option_with_its_defaults(group, names):
    """What a YAML says is what the code defaults to, but for steps; as_run has every field."""
    files = {
        path.stem: yaml.safe_load(path.read_text()) for path in (CONFIGS / group).glob("*.yaml")
    }
    assert set(files) == {"as_run", *names}
    fields = set()
    for name, kind in names.items():
        given = {key: value for key, value in files[name].items() if key not in GRID}
        assert given.pop("name") == name
        given = {key: None if value == "???" else value for key, value in given.items()}
        known = {field.name: field.default for field in dataclasses.fields(kind)}
        assert given == {**known, **({"checkpoint": None} if "checkpoint" in known else {})}
        fields |= set(files[name])
    assert set(files["as_run"]) == fields
    assert set(files["as_run"].values()) == {None}


@pytest.mark.parametrize("option", [p.stem for p in sorted((CONFIGS / "tracker").glob("*.yaml"))])
def test_every_tracker_names_itself(option):
    assert full_settings(f"tracker={option}")["tracker"]["name"] == option


@pytest.mark.parametrize("option", [p.stem for p in sorted((CONFIGS / "data").glob("*.yaml"))])
def test_every_data_option_is_complete_but_for_its_path(option):
    if option == "digits":
        assert full_settings()["data"]["name"] == "digits"
        return
    if option in ("cifar10", "fashion_mnist"):  # their path is a cache folder unless it is given
        with pytest.raises(ValueError, match=r"/nowhere' lacks .*data.download=true"):
            parts_of(full_settings(f"data={option}", "data.path=/nowhere", "data.download=false"))
        return
    with pytest.raises(ValueError, match=r"data.path is not set: add data.path="):
        full_settings(f"data={option}")
    with pytest.raises(ValueError, match="/nowhere"):
        parts_of(full_settings(f"data={option}", "data.path=/nowhere"))


def test_every_registered_backbone_is_an_option_with_its_sizes():
    """Composed for one size of each architecture; for the others, what hydra would read."""
    register_configs()
    store = ConfigStore.instance()
    for name in list_backbones():
        expected = {"name": name, **get_entry("backbone", name).defaults()}
        assert OmegaConf.to_container(store.load(f"backbone/{name}.yaml").node) == expected
        if name.endswith("_tiny"):
            assert full_settings(f"backbone={name}")["backbone"] == expected


@pytest.mark.parametrize("script", ["sample", "evaluate", "probe_routes"])
def test_the_other_scripts_compose(script):
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        given = as_keywords(compose(script, overrides=["checkpoint=x"]))
    assert given["checkpoint"] == "x"


@pytest.mark.parametrize("script", ["sample", "evaluate"])
def test_sampling_is_as_the_run_unless_a_kind_or_a_value_is_given(script):
    register_configs()

    def composed(*overrides):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return as_keywords(compose(script, overrides=["checkpoint=x", *overrides]))

    given = composed("guidance.scale=3", "sampler.num_steps=9")
    for group, own in (("guidance", {"scale": 3}), ("sampler", {"num_steps": 9})):
        assert {key: value for key, value in given[group].items() if value is not None} == own
    sparse = composed("guidance=sparse", "guidance.weak_rate=0.6")["guidance"]
    assert (sparse["name"], sparse["scale"], sparse["weak_rate"]) == ("sparse", 2.0, 0.6)
    with pytest.raises(Exception, match="weak_rat"):
        composed("guidance=sparse", "guidance.weak_rat=0.6")
    with pytest.raises(ValueError, match=r"guidance.checkpoint is not set: add guidance.check"):
        composed("guidance=auto")


def test_the_import_composes():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        given = compose("import_checkpoint", overrides=["format=sit", "in=a.pt", "out=b"])
    assert set(as_keywords(given)) == {
        "format", "in", "out", "objective", "num_heads", "num_classes", "drop_unknown",
    }  # fmt: skip


def test_the_reference_composes():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        given = as_keywords(compose("make_reference", overrides=["out=r.safetensors"]))
    assert (given["part"], given["extractor"], given["keep_features"]) == ("train", "auto", False)


def test_a_missing_checkpoint_is_asked_for():
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("sample")
    with pytest.raises(ValueError, match=r"checkpoint is not set: add checkpoint="):
        as_keywords(config)


def test_a_misspelt_override_is_refused():
    with pytest.raises(Exception, match="hiden_size"):
        settings("backbone.hiden_size=8")
    with pytest.raises(Exception, match="selecton_rate"):
        settings("routing.selecton_rate=0.5")


def test_the_form_of_an_operation_is_an_override():
    forms = full_settings("kernels.selective_scan=torch")["kernels"]
    assert forms == {**dict.fromkeys(get_forms(), "auto"), "selective_scan": "torch"}
    with pytest.raises(Exception, match="selectiv_scan"):
        full_settings("kernels.selectiv_scan=torch")


def test_several_routes_come_through_the_command_line():
    two = "routing.routes=[{start: 1, end: 2}, {start: 2, end: 3, selection_rate: 0.25}]"
    parts = parts_of(settings(two))
    assert [(p.start, p.end, p.selection_rate) for p in parts.routing.plans] == [
        (1, 2, 0.5), (2, 3, 0.25),
    ]  # fmt: skip


def test_no_config_hides_a_size_that_lives_in_code():
    for path in (CONFIGS / "backbone").glob("*.yaml"):
        keys = set(OmegaConf.load(path))
        assert keys == {"defaults"}, f"{Path(path).name} repeats {keys}"
