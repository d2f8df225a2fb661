"""Checkpoints of strangers: whatever is wrong with one is a single line that names it.

Each damage is done to a small run's checkpoint, or to a network that was saved alone.
"""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.published.tensors import theirs
from tests.small_run import full_settings, settings
from tread_zoo import create_backbone, load_pretrained, save_pretrained
from tread_zoo.data.files import checksum
from tread_zoo.factory import describe_backbone
from tread_zoo.model_card import write_model_folder
from tread_zoo.published.reader import read_parts
from tread_zoo.runs.checkpoint import CheckpointError, load_backbone, save_checkpoint
from tread_zoo.runs.folder import resolve_run
from tread_zoo.runs.init_from import load_source, resolve_init_from
from tread_zoo.runs.restore import restore

STEP = Path("checkpoints", "step_00000001")
SMALL = {"depth": 3, "hidden_size": 8, "num_heads": 2}
UNSAID = {field: value for field, value in settings().items() if field != "backbone"}
SIZES = {"input_size": 8, "in_channels": 1, "num_classes": 10}


def sampled(folder):
    return restore(folder, weights="ema", device="cpu", precision="fp32").backbone


def started(folder):
    fields, source = resolve_init_from({**UNSAID, "init_from": str(folder)})
    network = create_backbone(**fields["backbone"], **SIZES)
    load_source(source, resolve_run({**fields, "run_dir": f"{folder}_next"})[0], network)
    return network


def resumed(folder):
    config, checkpoint = resolve_run({"resume": str(folder)})
    load_backbone(checkpoint, "model")
    return config, checkpoint


LOADERS = [load_pretrained, sampled, started, resumed]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folder of a run with one checkpoint, as training saves it."""
    network = create_backbone("dit_tiny", **SMALL, **SIZES)
    config = full_settings(*(f"backbone.{key}={value}" for key, value in SMALL.items()))
    meta = {
        "step": 1, "config": config, "plugins": [], "backbone": describe_backbone(network),
        "data": {"name": "digits", "num_images": 9, "num_classes": 10}, "images_per_step": 8,
        "seconds": {}, "optimizer": [], "scaler": None,
    }  # fmt: skip
    parts = {"model": network.state_dict(), "ema": network.state_dict()}
    folder = tmp_path_factory.mktemp("source") / "run"
    save_checkpoint(folder, parts, meta, keep=1)
    return folder


@pytest.fixture
def folder(source, tmp_path):
    """Return a copy of the checkpoint, which may be damaged."""
    return Path(shutil.copytree(source / STEP, tmp_path / "run" / STEP))


def edit(folder, change):
    """Change the metadata as a stranger would, who writes no checksum of them."""
    file = folder / "checkpoint.json"
    metadata = json.loads(file.read_text())
    metadata.pop("sha256_of_the_above", None)
    change(metadata)
    file.write_text(json.dumps(metadata))


def with_value(path, *value):
    """Return a damage: metadata with another value at a dotted path, or without it."""

    def damage(folder):
        def change(metadata):
            *groups, last = path.split(".")
            for group in groups:
                metadata = metadata[group]
            metadata.pop(last, None)
            metadata.update(dict.fromkeys([last], *value) if value else {})

        edit(folder, change)

    return damage


def with_text(content):
    """Return a damage: another content of the metadata's file."""
    return lambda folder: (folder / "checkpoint.json").write_bytes(content)


def with_weights(change):
    """Return a damage: other bytes in each file of weights, with the right checksums."""

    def damage(folder):
        files = sorted(folder.glob("*.safetensors"))
        for file in files:
            file.write_bytes(change(file.read_bytes()))
        edit(folder, lambda meta: meta.update(sha256={f.name: checksum(f) for f in files}))

    return damage


def header(text):
    return lambda content: struct.pack("<Q", len(text)) + text


TEXTS = {
    "nothing": b"",
    "cut short": b'{"format": 2, "step": 1',
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "not UTF-8": b'{"format": "\xff\xfe"}',
}
MISSING = ["format", "step", "plugins", "sha256", "config", "backbone"]
WRONG = [("format", 99), ("format", [1]), ("backbone", None), ("config", None), ("sha256", None)]
HEADERS = {
    "no JSON": b"{nothing}",
    "not UTF-8": b'{"\xff": 0}',
    "null": b'{"w": null}',
    "an unknown type": b'{"w": {"dtype": "F3", "shape": [0], "data_offsets": [0, 0]}}',
    "a wrong size": b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
}
DAMAGES = {
    **{f"metadata: {name}": with_text(text) for name, text in TEXTS.items()},
    **{f"{path} missing": with_value(path) for path in MISSING},
    **{f"{path}={json.dumps(value)}": with_value(path, value) for path, value in WRONG},
    **{f"header: {name}": with_weights(header(text)) for name, text in HEADERS.items()},
    "weights: nothing": with_weights(lambda content: b""),
    "weights: cut short": with_weights(lambda content: content[:-8]),
    "weights: a web page": with_weights(lambda content: b"<!DOCTYPE html><html></html>"),
    "weights: a long header": with_weights(lambda content: b"\xff" * 8 + content[8:]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_wrong_is_one_line_that_names_the_checkpoint(damage, folder):
    damage(folder)
    for load in LOADERS:
        with pytest.raises(CheckpointError) as error:
            load(folder)
        said = str(error.value)
        assert str(folder) in said
        assert said.isprintable(), "one line"
        assert len(said) < 900


def test_a_checkpoint_without_what_training_needs_is_not_resumed(folder):
    with_value("data")(folder)
    with pytest.raises(CheckpointError, match="has no data"):
        resumed(folder)


def test_an_unknown_objective_is_said_where_it_is_used(folder):
    with_value("config.objective.name", "no_such")(folder)
    load_pretrained(folder)
    for load in (sampled, resumed):
        with pytest.raises(CheckpointError, match=f"{folder}.*no_such"):
            load(folder)


def test_each_way_of_loading_takes_a_whole_checkpoint(folder):
    expected = load_file(folder / "ema.safetensors")
    for load in LOADERS[:3]:
        assert same(load(folder), expected)
    config, checkpoint = resumed(folder)
    assert (config.backbone["depth"], checkpoint.step) == (3, 1)
    write_model_folder(folder, folder.parent / "pushed")
    assert same(sampled(folder.parent / "pushed"), expected)


def same(network, tensors):
    state = network.state_dict()
    return state.keys() == tensors.keys() and all(
        torch.equal(v, state[k]) for k, v in tensors.items()
    )


# A network alone ----------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """Return the folder of a network that was saved alone."""
    return save_pretrained(create_backbone("dit_tiny", **SMALL, **SIZES), tmp_path / "alone")


def test_a_network_alone_has_a_checksum(alone):
    load_pretrained(alone)
    weights, content = alone / "model.safetensors", (alone / "model.safetensors").read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{alone} is damaged: model.safetensors differs"):
        load_pretrained(alone)
    metadata = json.loads((alone / "config.json").read_text())
    del metadata["sha256"]  # as earlier versions wrote it
    (alone / "config.json").write_text(json.dumps(metadata))
    load_pretrained(alone)


def test_files_of_the_hub_s_cache_are_links(alone, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "f0", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(alone.iterdir()):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / str(number), snapshot))
    load_pretrained(snapshot)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("load", LOADERS[:3])
def test_weights_that_are_not_finite_are_named(folder, load, value):
    def change(tensors):
        tensors["final.linear.bias"][0] = value
        return tensors

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=rf"{folder}: 1 of .* NaN or infinite.*final\.linear"):
        load(folder)


# Wrappers -----------------------------------------------------------------------------------------


def rewrite(folder, change):
    """Change the tensors of a checkpoint, with the right checksums."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        save_file(change(load_file(file)), file)
    edit(folder, lambda meta: meta.update(sha256={f.name: checksum(f) for f in files}))


WRAPPED = {
    "blocks.0._orig_mod.": "blocks.0.",
    "blocks.1._checkpoint_wrapped_module.": "blocks.1.",
    "blocks.2._fsdp_wrapped_module._orig_mod.": "blocks.2.",
    "module.": "",
}


def wrap(tensors):
    """Return tensors under the names that a network whose parts are wrapped gives them."""

    def name(key):
        given = sorted(WRAPPED.items(), key=lambda pair: -len(pair[1]))
        wrapper, plain = next(pair for pair in given if key.startswith(pair[1]))
        return wrapper + key.removeprefix(plain)

    return {name(key): tensor for key, tensor in tensors.items()}


def test_a_compiled_network_is_saved_under_its_own_names(tmp_path):
    network = create_backbone("dit_tiny", **SMALL, **SIZES)
    network.blocks[0] = torch.compile(network.blocks[0])
    assert any("_orig_mod" in name for name in network.state_dict())
    save_pretrained(torch.compile(network), tmp_path)
    network.blocks[0] = network.blocks[0]._orig_mod
    assert same(load_pretrained(tmp_path), network.state_dict())


def test_an_import_has_no_wrappers(tmp_path):
    content = theirs("sit")
    torch.save(wrap(content), tmp_path / "x.pt")
    parts, _ = read_parts(tmp_path / "x.pt")
    assert parts["ema"].keys() == content.keys()
