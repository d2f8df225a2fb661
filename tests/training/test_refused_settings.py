"""Settings that cannot work are one ValueError with the field's name, before anything is made."""

import inspect
from dataclasses import replace

import pytest

from tests.small_run import parts_of, settings, train_small
from tread_zoo import list_backbones
from tread_zoo.data import SOURCES, build_data
from tread_zoo.kinds import check_keywords
from tread_zoo.registry import get_entry
from tread_zoo.training.checkpoints import Checkpoint
from tread_zoo.training.restore import restore

UNTRAINED = [
    (["guidance=cfg", "training.label_dropout=0"], r"guidance=cfg .*training.label_dropout=0"),
    (["guidance=interval", "training.label_dropout=0"], r"guidance=interval .*label_dropout=0"),
    (["guidance=sparse", "routing=none"], r"guidance=sparse .*routing=none"),
]


@pytest.mark.parametrize(("overrides", "words"), UNTRAINED)
def test_a_weak_prediction_that_training_never_shows(overrides, words):
    with pytest.raises(ValueError, match=words):
        parts_of(settings(*overrides))


def test_the_same_guidance_where_it_takes_no_weak_prediction_or_a_trained_one():
    for fits in (
        ["guidance=cfg", "guidance.scale=1", "training.label_dropout=0"],
        ["guidance=sparse", "guidance.scale=1", "routing=none"],
        ["guidance=sparse", "training.label_dropout=0"],
    ):
        parts_of(settings(*fits))


def test_a_run_is_not_sampled_with_what_it_never_learnt(tmp_path):
    folder = train_small(tmp_path / "run", "training.num_steps=1", "routing=none")
    run = restore(folder, weights="ema", device="cpu", precision="fp32")
    sampler = {"name": None, "num_steps": None}
    with pytest.raises(ValueError, match=r"guidance=sparse .*routing=none"):
        run.sampling(sampler, {"name": "sparse"})
    assert run.sampling(sampler, {"name": "cfg"}).guidance.name == "cfg"
    meta = {**run.checkpoint.meta, "training": {"label_dropout": 0.0}}
    never = replace(run, checkpoint=Checkpoint(run.checkpoint.path, meta))
    with pytest.raises(ValueError, match=r"guidance=cfg .*label_dropout=0"):
        never.sampling(sampler, {"name": "cfg"})
    imported = {key: value for key, value in meta.items() if key not in ("training", "routing")}
    other = replace(run, checkpoint=Checkpoint(run.checkpoint.path, imported))
    for name in ("cfg", "sparse"):
        assert other.sampling(sampler, {"name": name}).guidance.name == name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["backbone.depth=3.5"], "backbone.depth=3.5 must be a whole number"),
        (["backbone.depth=null"], "backbone.depth=None must be a whole number"),
        (["backbone.depth=0", "routing=none"], "depth=0 must be a positive integer"),
        (["backbone.hidden_size=0"], "hidden_size=0 must be a positive integer"),
        (["backbone.hidden_size=-64"], "hidden_size=-64 must be a positive integer"),
        (["backbone.num_heads=0"], "num_heads=0 must be a positive integer"),
        (["backbone.mlp_ratio=-1"], "mlp_ratio=-1 must be a positive number"),
        (["backbone.mlp_ratio=wide"], "backbone.mlp_ratio='wide' must be a number"),
        (["backbone.learn_sigma=maybe"], "backbone.learn_sigma='maybe' must be true or false"),
        (["backbone=uvit", "backbone.num_heads=0"], "num_heads=0 must be a positive integer"),
        (["backbone=rwkv", "backbone.mlp_ratio=0"], "mlp_ratio=0 must be a positive number"),
        (["backbone=mamba", "backbone.expand=2.5"], "backbone.expand=2.5 must be a whole number"),
        (["routing.selector=blocks", "routing.block_size=1.5"], "routing.block_size=1.5 must be"),
        (["routing.selector=segments", "routing.segment_length=x"], "routing.segment_length='x'"),
        (["objective=edm", "objective.sigma_data=0"], "objective.sigma_data=0 must be"),
        (["data.held_out=abc"], "data.held_out='abc' must be a number"),
    ],
)
def test_sizes_and_kinds(overrides, words):
    with pytest.raises(ValueError) as error:
        parts_of(settings(*overrides))
    assert str(error.value).startswith(words), str(error.value)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("image_size", "abc", "data.image_size='abc' must be a whole number or null"),
        ("image_size", [16, 24], "data.image_size=[16, 24] must be a whole number or null"),
        ("num_classes", "abc", "data.num_classes='abc' must be a whole number or null"),
        ("held_out", True, "data.held_out=True must be a number"),
        ("path", 5, "data.path=5 must be text"),
    ],
)
def test_kinds_of_the_options_of_data(option, value, words):
    with pytest.raises(ValueError) as error:
        build_data("image_folder", **{"path": "nowhere", option: value})
    assert str(error.value).startswith(words)


def test_every_option_of_our_data_and_backbones_has_a_kind_that_is_checked():
    """An annotation that is not understood would let anything pass, unseen."""
    unchecked = set()
    for function in (
        *SOURCES.values(),
        *{get_entry("backbone", n).target for n in list_backbones()},
    ):
        for name in inspect.signature(function).parameters:
            try:
                check_keywords("x", function, {name: object()})
            except ValueError:
                continue
            unchecked.add(name)
    assert unchecked == {"input_size"}  # one or two whole numbers, checked by the backbone
