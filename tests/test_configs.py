"""Every YAML composes, and what it composes is built."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.training.conftest import CONFIGS, settings
from tread_zoo import list_backbones
from tread_zoo.cli import as_keywords, register_configs
from tread_zoo.registry import get_backbone_entry
from tread_zoo.training.parts import build_parts

GROUPS = ("backbone", "routing", "objective", "sampler", "guidance", "training", "evaluation")
OUTSIDE = {"tracker", "device", "run_dir", "resume", "overwrite"}
OPTIONS = [(g, p.stem) for g in GROUPS for p in sorted((CONFIGS / g).glob("*.yaml"))]


def compose_train(*overrides):
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return as_keywords(compose("train", overrides=list(overrides)))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_builds(group, option):
    given = compose_train(f"{group}={option}")
    build_parts(**{k: v for k, v in given.items() if k not in OUTSIDE})


@pytest.mark.parametrize("option", [p.stem for p in sorted((CONFIGS / "tracker").glob("*.yaml"))])
def test_every_tracker_names_itself(option):
    assert compose_train(f"tracker={option}")["tracker"]["name"] == option


@pytest.mark.parametrize("option", [p.stem for p in sorted((CONFIGS / "data").glob("*.yaml"))])
def test_every_data_option_is_complete_but_for_its_path(option):
    if option == "digits":
        assert compose_train()["data"]["name"] == "digits"
        return
    with pytest.raises(ValueError, match=r"data.path is not set: add data.path="):
        compose_train(f"data={option}")
    with pytest.raises(ValueError, match="/nowhere"):
        given = compose_train(f"data={option}", "data.path=/nowhere")
        build_parts(**{k: v for k, v in given.items() if k not in OUTSIDE})


@pytest.mark.parametrize("name", list_backbones())
def test_every_registered_backbone_is_an_option_with_its_sizes(name):
    given = compose_train(f"backbone={name}")["backbone"]
    assert given == {"name": name, **get_backbone_entry(name).keywords()}


@pytest.mark.parametrize("script", ["sample", "evaluate"])
def test_the_other_scripts_compose(script):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        given = as_keywords(compose(script, overrides=["checkpoint=x"]))
    assert given["checkpoint"] == "x"


def test_a_missing_checkpoint_is_asked_for():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        with pytest.raises(ValueError, match=r"checkpoint is not set: add checkpoint="):
            as_keywords(compose("sample"))


def test_a_misspelt_override_is_refused():
    with pytest.raises(Exception, match="hiden_size"):
        settings("backbone.hiden_size=8")
    with pytest.raises(Exception, match="selecton_rate"):
        settings("routing.selecton_rate=0.5")


def test_several_routes_come_through_the_command_line():
    given = settings("routing.routes=[{start: 1, end: 2}, {start: 2, end: 3, selection_rate: 0.25}]")
    parts = build_parts(**{k: v for k, v in given.items() if k not in OUTSIDE})
    assert [(p.start, p.end, p.selection_rate) for p in parts.routing.plans] == [
        (1, 2, 0.5), (2, 3, 0.25),
    ]  # fmt: skip


def test_no_config_hides_a_size_that_lives_in_code():
    for path in (CONFIGS / "backbone").glob("*.yaml"):
        keys = set(OmegaConf.load(path))
        assert keys == {"defaults"}, f"{Path(path).name} repeats {keys}"
