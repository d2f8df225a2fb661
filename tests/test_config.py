"""The configuration: what it takes, what it refuses in one line, what makes two runs the same."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.compare import CompareConfig
from scripts.sample import SampleConfig
from tests.small_run import fields_of
from tread_zoo import available, create
from tread_zoo.checkpoint_config import EvaluateConfig
from tread_zoo.cli import command, compose_settings
from tread_zoo.config import (
    PART_FIELDS,
    RunConfig,
    RunFields,
    TrainingConfig,
    flatten,
    make_config,
)
from tread_zoo.fields import check, default_fields
from tread_zoo.help import describe, settings
from tread_zoo.routing import Stack
from tread_zoo.runtime import resolve_device

ROOT = Path(__file__).parents[1]
NEEDS = {  # what an option needs beside itself
    "diffusers": ["backbone.cls=SD3Transformer2DModel"],
    "edm_stochastic": ["objective=edm"],
    "auto": ["guidance.weak_checkpoint=x"],
    "custom": ["guidance.drop_label=true"],
    "sparse_auto": ["guidance.weak_checkpoint=x"],
}
FROM_A_PATH = ("hf", "image_folder", "latents", "table", "npz", "webdataset")
NEEDS |= {name: ["data.path=x", "training.num_steps=3"] for name in FROM_A_PATH}


def compose(*overrides):
    return make_config(**compose_settings("train", overrides))


def test_the_command_line_and_python_have_the_same_defaults():
    assert not compose().differences(make_config())


@pytest.mark.parametrize("group", PART_FIELDS)
def test_every_registered_part_is_an_option_of_its_group(group):
    """One of them is composed; the others are like it."""
    names = ["local"] if group == "tracker" else available(group)  # others need their packages
    for name in names:
        needs = NEEDS.get(name, [])
        config = make_config(**fields_of(f"{group}={name}", *needs))
        assert getattr(config, group)["name"] == name
    assert not compose(f"{group}={name}", *needs).differences(config)


def test_an_editor_completes_the_fields_that_there_are():
    assert RunFields.__annotations__.keys() == default_fields(RunConfig).keys()
    config = make_config(backbone="dit", training=TrainingConfig(num_steps=7))
    assert config == make_config(backbone={"name": "dit"}, training={"num_steps": 7})


def test_null_is_given_and_what_is_not_given_is_the_run_s_own():
    given = ["checkpoint=x", "evaluation.num_reference=null"]
    assert compose_settings("evaluate", given, EvaluateConfig) == {
        "checkpoint": "x",
        "evaluation": {"num_reference": None},
    }


def test_options_without_a_name_are_those_of_the_default_part():
    config = compose("optimizer.weight_decay=0.1", "data.held_out=0.5")
    assert (config.optimizer["name"], config.optimizer["weight_decay"]) == ("adamw", 0.1)
    assert config == make_config(optimizer={"weight_decay": 0.1}, data={"held_out": 0.5})


def test_a_bypass_rate_is_a_selection_rate():
    config = compose("routing.bypass_rate=0.3", "sampler.bypass_rate=0.2")
    assert config.routing["selection_rate"] == 0.3
    assert config.sampler["selection_rate"] == 0.2


def test_a_value_may_name_a_setting_that_is_not_given():
    assert compose("seed=3", "run_dir=x_${seed}_${training.batch_size}").run_dir == "x_3_64"


def test_a_configuration_goes_through_plain_values_unchanged():
    config = compose(
        "backbone=mamba", "routing.selector={name: blocks, size: 4}", "evaluation.metrics=[fid]",
        "routing.routes=[{start: 2, end: 4}, {start: 5, selection_rate: 0.25}]",
    )  # fmt: skip
    assert make_config(**config.as_dict()) == config
    assert config.routing["selector"] == {"name": "blocks", "size": 4}


def test_a_part_is_a_name_or_a_mapping_on_the_command_line():
    given = ["optimizer={name: muon, momentum: 0.9}", "backbone={name: dit, depth: 3}"]
    assert compose(*given) == compose(
        "optimizer=muon", "optimizer.momentum=0.9", "backbone=dit", "backbone.depth=3"
    )
    sparse = compose("guidance={name: sparse, routing: {name: tread, start: 3}}").guidance
    assert sparse["routing"]["name"] == "tread"
    assert sparse["routing"]["start"] == 3
    with pytest.raises(ValueError, match=r"optimizer\.momentum"):
        compose("optimizer={name: muon, momntum: 0.9}")


def test_automatic_values_are_those_of_backbone_and_data():
    assert make_config(backbone="dit").optimizer["learning_rate"] == 1.2e-2
    assert make_config(backbone="dit_s_4").optimizer["learning_rate"] == 3e-4
    assert make_config(backbone="dit_xl_2").optimizer["learning_rate"] == 1e-4
    assert make_config().training.num_steps == 800
    assert make_config(sampler="heun").sampler["num_steps"] == 18
    with pytest.raises(ValueError, match=r"training\.num_steps"):
        make_config(data={"name": "npz", "path": "x.npz"})


@pytest.mark.parametrize("device", ["cpu:1", "cuda:99", "xpu", "gpu", "cpu:x"])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(ValueError, match=f"device='{device}' is"):
        resolve_device(device)


def test_the_same_run_is_told_by_what_it_computes():
    config = make_config()
    assert not config.differences(make_config(run_dir="elsewhere", training={"log_every": 1}))
    other = make_config(seed=1, training={"batch_size": 8}, routing={"selection_rate": 0.25})
    assert set(config.differences(other)) == {
        "seed", "training.batch_size", "routing.selection_rate",
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_is_named_after_what_is_not_as_by_default():
    def name(*overrides):
        return compose(*overrides).run_dir.removeprefix("runs/")

    readme = "digits_mamba_tiny_tread_flow_seed0"
    assert name("backbone=mamba", "routing=tread") == readme
    ignored = ["training.log_every=7", "device=cpu", "training.num_steps=800", "optimizer=adamw"]
    assert name("backbone=mamba", *ignored) == readme
    assert name("experiment=digits", "backbone=mamba") == readme
    assert name("routing.selection_rate=0.25") == (
        "digits_dit_tiny_tread_flow_routing.selection_rate-0.25_seed0"
    )
    own = name("data=image_folder", "data.path=photos", "training.num_steps=5", "optimizer=muon")
    assert own == (
        "image_folder_dit_tiny_tread_flow_data.path-photos_optimizer-muon_training.num_steps-5_seed0"
    )
    sweeps = [
        [f"{field}={value}" for value in values]
        for field, values in {
            "routing.selector": ["rows", "{name: blocks, size: 4}", "{name: blocks, size: 2}"],
            "optimizer.learning_rate": ["1e-3", "1e-4"],
            "evaluation.metrics": ["[fid]", "[kid]"],
            "sampler": ["heun", "{name: flow_sde, diffusion: 2}"],
        }.items()
    ]
    names = [name(member) for sweep in sweeps for member in sweep]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w.-]{1,240}", each) for each in names)


def check_error(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backbone=dit_xl2", ["backbone='dit_xl2'", "'dit_xl_2'", "Nearest of"]),
        ("backbon=dit", ["backbon ", "backbone"]),
        ("training.num_step=3", ["training.num_step ", "training.num_steps"]),
        ("sampler.s_churn=1", ["sampler.s_churn "]),
        ("data=npz", ["data.path", "data.path=…"]),
        ("plugins=[no_such_module]", ["no_such_module", "PYTHONPATH"]),
        ("training.learning_rate=1e-3", ["training.learning_rate ", "optimizer.learning_rate?"]),
        ("training.epochs=3", ["training.num_steps?"]),
        ("lr=1e-3", ["optimizer.learning_rate?"]),
        ("objective=rectified_flow", ["'flow'?"]),
        ("guidance=parts", ["'custom'?"]),
        ("objective.second_level=0.25", ["objective.second_level_fraction"]),
        ("routing.rate=0.5", ["routing.selection_rate?"]),
        ("data.path=x", ["data.path is no setting of data=digits", "image_folder"]),
        ("routing=none routing.selection_rate=0.25", ["routing=none", "tread"]),
    ],
)
def test_a_wrong_override_is_one_line_with_the_nearest_name(override, words):
    check_error(lambda: compose(*override.split(" ")), words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.num_steps=0", ["training.num_steps=0", "greater than 0"]),
        ("training.num_workers=5000", ["training.num_workers=5000", "1024"]),
        ("training.num_steps=many", ["training.num_steps='many'", "'auto'"]),
        ("training.horizontal_flip=maybe", ["training.horizontal_flip='maybe'", "boolean"]),
        ("routing.selector=bloks", ["routing.selector='bloks'", "'blocks'"]),
        ("routing.selector={name: blocks, sise: 4}", ["routing.selector.size"]),
        ("routing.routes=[{start: 2, ennd: 4}]", ["routing.routes[0].ennd", "end"]),
        ("routing.path_drop_probability=0.1", ["routing.path_drop of routing=sprint"]),
        ("evaluation.metrics=fid", ["evaluation.metrics='fid'", "[fid]"]),
        ("evaluation.metrics=[fidd]", ["'fidd'", "'fid'"]),
        ("data={name: npz, path: 7}", ["data.path=7", "quotes"]),
        ("seed=abc", ["seed='abc'", "integer"]),
        ("training.max_grad_norm=1e-300", ["training.max_grad_norm=1e-300"]),
        ("lr_schedule.warmup_steps=800", ["warmup_steps=800", "num_steps=800"]),
        ("routing.selection_rate=[steps,0.5]", ["routing.selection_rate", "[linear, 0.75"]),
    ],
)
def test_a_wrong_value_is_one_line_with_field_value_and_remedy(override, words):
    check_error(lambda: make_config(**fields_of(override)), words)


def test_numbers_of_numpy_and_torch_are_numbers():
    config = make_config(
        seed=np.int64(3), optimizer={"name": "adamw", "learning_rate": np.float64(0.5)},
        training={"batch_size": np.int32(4)}, routing={"selection_rate": torch.tensor(0.25)},
    )  # fmt: skip
    assert (config.seed, config.optimizer["learning_rate"]) == (3, 0.5)
    assert (config.training.batch_size, config.routing["selection_rate"]) == (4, 0.25)


def test_short_runs_warm_up_for_a_part_of_their_steps():
    for num_steps, warmup_steps in ((800, 50), (20, 4), (1, 0)):
        config = make_config(training={"num_steps": num_steps})
        assert config.lr_schedule["warmup_steps"] == warmup_steps
        rate = create("lr_schedule", "cosine")  # with auto
        given = create("lr_schedule", config.lr_schedule)
        assert [rate(i, num_steps) for i in range(9)] == [given(i, num_steps) for i in range(9)]


@pytest.mark.parametrize("path", ["runs/ünï", "a=b", "a'b", "a b", "a'=ü,b"])
def test_ordinary_paths_need_no_quotes_but_those_of_the_shell(path):
    assert compose(f"run_dir={path}").run_dir == path


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--backbone", "dit_tiny"], "backbone=dit_tiny"),
        (["backbone", "dit_tiny"], "backbone=dit_tiny"),
        (["seed=1", "runs/photos"], "field=value"),
        (["seed"], "seed="),
        (["~routing", "seed=1"], "routing=…"),
        (["run_dir=x_${training.batchsize}"], "'training.batchsize' not found"),
        (["backbone=dit,mamba"], "tread-zoo compare backbone=dit,mamba"),
        (["seed=range(3)"], "-m"),
        (["experment=digits"], "experiment?"),
        (["experiment=digit"], "'digits'"),
        (["hydra/launcher=slrum"], "'slurm'"),
        (["-m", "seed=0,1", "sed=1"], "seed?"),
        (["guidance=4"], "guidance=cfg guidance.scale=4"),
        (["backbone=DiT-XL/2"], "'dit_xl_2'?"),
        (["data=/data/photos"], "data=image_folder data.path=/data/photos"),
        (["--help", "backbon"], "'backbone'?"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_right_spelling(
    words, meant, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as end:
        command("train", RunConfig)(lambda settings: None)()
    error = capsys.readouterr().err
    assert end.value.code == 1
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert meant in error


@pytest.mark.parametrize("kind", [ValueError, FloatingPointError, OSError])
def test_an_error_of_a_run_is_one_line_and_status_1(kind, monkeypatch, capsys):
    def fail(settings):
        raise kind("step 3: the loss is nan")

    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1"])
    with pytest.raises(SystemExit) as end:
        command("train", RunConfig)(fail)()
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: step 3: the loss is nan\n"


@pytest.mark.parametrize("text", ["emma", "ema:", "ema:wide", "model:0.1"])
def test_weights_have_one_form_or_are_refused(text):
    fields = {"checkpoint": "x", "weights": "ema:0.050"}
    assert check(SampleConfig, fields).weights == "ema:0.05"
    wrong = {**fields, "weights": text}
    check_error(lambda: check(SampleConfig, wrong), [f"weights={text!r}", "ema:0.05"])


RECIPES = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
CHOICES = [("dit", "none"), ("mamba", "tread"), ("uvit", "tread_random")]


def test_the_released_route_counts_the_end_block():
    routing = compose("routing=tread_released").routing
    stack = Stack(12, (4, 4), widths=(8,), skips={})
    assert create("routing", routing).ranges(stack) == [(2, 9)]


@pytest.mark.parametrize(("number", "recipe"), enumerate(RECIPES))
def test_a_recipe_goes_with_every_backbone_and_routing(number, recipe):
    path = ["data.path=x"] if recipe.startswith(("imagenet256", "photos")) else []
    backbone, routing = CHOICES[number % len(CHOICES)]
    config = compose(f"experiment={recipe}", f"backbone={backbone}", f"routing={routing}", *path)
    assert config.backbone["name"] == f"{backbone}_tiny"
    assert config.routing["name"] == routing.partition("_")[0]


@pytest.mark.slow
def test_the_recipes_of_sit_and_tread_have_their_settings():
    both = {
        "data.normalization": "scale", "training.max_grad_norm": 0, "training.ema_decay": 0.9999,
        "training.ema_warmup": False, "training.batch_size": 32, "optimizer.learning_rate": 1e-4,
        "optimizer.beta2": 0.999, "lr_schedule.warmup_steps": 0, "evaluation.labels": "random",
        "evaluation.num_images": 50000,
    }  # fmt: skip
    sit = {"objective.name": "flow", "sampler.name": "flow_sde", "sampler.num_steps": 250}
    sit |= {"sampler.diffusion": 2, "sampler.last_step": 0.04}
    tread = {"objective.name": "edm", "objective.sigma_data": 0.5}
    tread |= {"sampler.name": "heun", "sampler.num_steps": 40}
    for recipe, own in (("imagenet256_sit", sit), ("imagenet256_tread", tread)):
        config = flatten(compose(f"experiment={recipe}", "data.path=x").as_dict())
        assert {key: config[key] for key in both | own} == both | own


@pytest.mark.slow
def test_a_part_that_a_preset_chose_leaves_with_its_options():
    recipe = compose("experiment=digits_one_step")
    assert (recipe.objective["name"], recipe.objective["guidance_scale"]) == ("mean_flow", 2)
    other = compose("experiment=digits_one_step", "objective=flow", "sampler=euler")
    assert other.objective == make_config().objective


COMMANDS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", [s for s in COMMANDS if s != "resume"])
def test_each_setting_of_each_command_has_a_sentence(script):
    module = importlib.import_module(f"scripts.{script}")
    config = CompareConfig if script == "compare" else module.main.config
    listed = list(settings(config))
    assert [setting.name for setting, sentence in listed if not sentence] == []
    assert {s.name.partition(".")[0] for s, _ in listed} == set(default_fields(config))


def test_help_shows_settings_with_defaults_and_sentences_the_rare_ones_if_asked():
    def shown(*words):
        return describe("A script.", RunConfig, ["--help", *words], {"experiment": ["digits"]})

    text = shown()
    assert re.search(r"training.batch_size=64 +images per process", text)
    assert "a preset: digits" in text
    assert "training.timeout_s" not in text
    assert "training.timeout_s" in shown("all")
    assert "mamba_tiny" in shown("backbone")
    assert "sprint" in shown("routing")
    part = shown("optimizer=muon", "sampler=heun", "routing=sprint")
    assert re.search(r"routing.absent=token +what the map gets", part)
    assert re.search(r"optimizer.momentum=0.95 +as in torch", part)
    assert "sampler.shift=1.0" in part
