"""Checkpoints of earlier versions, in which one configuration combined all routing methods."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.small_run import train_small
from tread_zoo import create
from tread_zoo.data.files import checksum
from tread_zoo.runs.checkpoint import CheckpointError, find_checkpoint, load_backbone
from tread_zoo.runs.old_routing import new_keys, new_metadata, new_routing

pytestmark = pytest.mark.slow

OLD = {
    "start": 2, "end": "auto", "selection_rate": 0.5, "selector": "auto", "per_batch": False,
    "schedule": "constant", "final_rate": None, "rate_steps": [], "carry_from": None,
    "detach": False, "sparsify": True, "redraw": False, "name": "tread", "routes": [],
    "warm_start": 0.1, "dense_tail": 0.0, "probability": 1.0, "rejoin": "replace",
    "bypassed": "dense", "path_drop_probability": 0.0, "reconstruction_weight": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"name": "tread", "selection_rate": 0.5}),
        ({"name": "none"}, {"name": "none"}),
        (
            {"rejoin": "project", "bypassed": "zero", "path_drop_probability": 0.2},
            {"name": "sprint", "absent": "zero", "path_drop": 0.2},
        ),
    ],
)
def test_each_combination_is_the_method_that_it_means(changes, expected):
    found = new_routing({**OLD, **changes})
    assert expected.items() <= found.items()
    create("routing", found)
    assert new_routing(found) == found, "a file of today is read as it is"


@pytest.mark.parametrize(
    "changes",
    [
        {"detach": True},
        {"redraw": True},
        {"schedule": "linear"},
        {"rejoin": "mask"},
        {"rejoin": "project", "routes": [{"start": 1, "end": 2}]},
        {"rejoin": "project", "per_batch": True},
    ],
)
def test_what_no_method_has_is_named(changes):
    with pytest.raises(ValueError, match="routing"):
        new_routing({**OLD, **changes})


def test_guidance_and_weights_move_to_their_places():
    metadata = {
        "config": {"routing": dict(OLD), "guidance": {"name": "parts"}},
        "backbone": {"name": "dit_tiny", "fusions": [[2, 8]], "bypassed": "zero"},
    }
    new = new_metadata(metadata)
    assert new["config"]["guidance"] == {"name": "custom"}
    assert new["backbone"]["routing"] == {"name": "sprint", "absent": "zero", "start": 2, "end": 8}
    names = ["fusions.2_8_zero.weights.0", "fusions.2_8.biases.1|exp_avg", "blocks.0.a"]
    expected = ["routing.weights.0", "routing.biases.1|exp_avg", "blocks.0.a"]
    assert list(new_keys(dict.fromkeys(names))) == expected


def test_removed_options_are_left_out_where_they_changed_nothing():
    old = {
        "routing": {"name": "tread", "per_batch": False},
        "sampler": {"routing": {"name": "token_merging", "every": 0, "share": 0.25, "rate": 0.5}},
        "guidance": {"name": "sparse", "routing": {"name": "layer_drop", "unit": "block"}},
    }
    assert new_metadata({"config": old})["config"] == {
        "routing": {"name": "tread"},
        "sampler": {"routing": {"name": "token_merging", "rate": 0.5}},
        "guidance": {"name": "sparse", "routing": {"name": "layer_drop", "unit": "block"}},
    }


def aged(folder):
    """Write a checkpoint of today as an earlier version would have."""
    checkpoint = find_checkpoint(folder).path
    meta = json.loads((checkpoint / "checkpoint.json").read_text())
    meta.pop("sha256_of_the_above")
    routing = meta["config"]["routing"]
    meta["config"]["routing"] = {
        **OLD, "start": routing["start"], "end": routing["end"], "rejoin": "project",
        "path_drop_probability": routing["path_drop"], "warm_start": 0.0,
        "selection_rate": routing["selection_rate"],
    }  # fmt: skip
    meta["config"]["objective"]["second_level"] = 0.0
    del meta["config"]["objective"]["second_level_fraction"]
    meta["config"]["optimizer"]["decayed"] = meta["config"]["optimizer"].pop("weight_decay_on")
    meta["backbone"] = {**meta["backbone"], "fusions": [[1, 3]]}
    del meta["backbone"]["routing"]
    for name in meta["sha256"]:
        tensors = load_file(checkpoint / name)
        renamed = {k.replace("routing.", "fusions.1_3.", 1): v for k, v in tensors.items()}
        save_file(renamed, checkpoint / name)
        meta["sha256"][name] = checksum(checkpoint / name)
    (checkpoint / "checkpoint.json").write_text(json.dumps(meta))


@pytest.mark.slow
def test_a_run_resumed_from_an_old_checkpoint_equals_an_unbroken_one(tmp_path):
    given = ["routing=sprint", "routing.absent=dense", "routing.path_drop=0.5"]
    given += ["training.checkpoint_every=3", "training.keep_checkpoints=9"]
    unbroken = train_small(tmp_path / "unbroken", *given)
    half = Path(shutil.copytree(tmp_path / "unbroken", tmp_path / "half"))
    shutil.rmtree(half / "checkpoints/step_00000006")
    aged(half)
    network = load_backbone(find_checkpoint(half))
    assert network.routing.span == (1, 3)
    train_small(tmp_path / "half", *given, "resume=latest")
    ends = [load_file(find_checkpoint(run).path / "model.safetensors") for run in (unbroken, half)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.slow
def test_a_checkpoint_that_no_method_reads_says_so(tmp_path):
    folder = train_small(tmp_path / "run", "routing=sprint", "routing.absent=dense")
    aged(folder)
    file = find_checkpoint(folder).path / "checkpoint.json"
    meta = json.loads(file.read_text())
    meta["config"]["routing"]["detach"] = True
    file.write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match="detach"):
        find_checkpoint(folder)
