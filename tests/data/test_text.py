"""Captions and labels of folders, tables and shards, and contexts by text encoders."""

import io
import json
import logging
import tarfile
import unicodedata

import datasets
import pytest
import torch
from PIL import Image

from tests.data.tables import flat, picture_table, png
from tests.data.text_encoders import ENCODERS, save_t5
from tread_zoo.checkpoint_config import EncodingConfig
from tread_zoo.data.encode import encode
from tread_zoo.data.loader import CorruptItem, read_item
from tread_zoo.data.text import load_text_encoder
from tread_zoo.registry import create

TEXTS = ["a red cross", "a green frame", "blue stripes", "a cross", "a blue cross", "red"]


def write_pictures(root, names):
    for value, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(flat(value)).save(root / name)


def in_text_files(root):
    write_pictures(root, [f"{i}.png" for i in range(6)])
    for i, text in enumerate(TEXTS):
        (root / f"{i}.txt").write_text(f"{text}\n")
    return {"data": "image_folder", "path": root}


def in_csv(root):
    write_pictures(root, [f"in/{i}.png" for i in range(6)])
    rows = [f'in/{i}.png,"{text}"' for i, text in enumerate(TEXTS)]
    (root / "metadata.csv").write_text("\n".join(["file_name,text", *reversed(rows)]))
    return {"data": "image_folder", "path": root}


def in_json_lines(root):
    write_pictures(root, [f"{i}.png" for i in range(6)])
    rows = [{"file_name": f"{i}.png", "what": [text, "x"]} for i, text in enumerate(TEXTS)]
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"data": "image_folder", "path": root, "caption_column": "what"}


def in_a_column(root):
    picture_table(range(6), caption=(datasets.Value("string"), TEXTS)).save_to_disk(root)
    return {"data": "hf", "path": root}


def in_shards(root, suffix="txt"):
    root.mkdir()
    with tarfile.open(root / "a.tar", "w") as tar:
        for i, text in enumerate(TEXTS):
            value = text if suffix == "txt" else json.dumps({"url": "x", "caption": text})
            for kind, content in (("png", png(flat(i))), (suffix, value.encode())):
                info = tarfile.TarInfo(f"{i}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return {"data": "webdataset", "path": root}


def in_json_of_shards(root):
    return in_shards(root, "json")


PLACES = [in_text_files, in_csv, in_json_lines, in_a_column, in_shards, in_json_of_shards]


@pytest.mark.parametrize("write", PLACES)
def test_a_picture_s_caption_is_found_where_people_keep_it(tmp_path, write, caplog):
    given = {**(options := write(tmp_path / "set")), "path": str(options["path"])}
    kind = given.pop("data")
    with caplog.at_level(logging.INFO):
        data = create("data", kind, held_out=0.3, **given)
    assert "captions" in caplog.text
    assert "ignored" not in caplog.text
    found = {}
    for part in (data.train, data.held_out):
        found |= {int(part[i][0][0, 0, 0]): part.caption(i) for i in range(len(part))}
    assert [found[i] for i in range(6)] == TEXTS
    with pytest.raises(ValueError, match="nothing"):
        create("data", kind, **{**given, "caption_column": "nothing"})


@pytest.mark.parametrize("kind", ["csv", "jsonl", "dataset.json"])
def test_labels_of_metadata_take_the_place_of_sub_folders(tmp_path, kind):
    root, labels = tmp_path / "set", [1, 0, 2, 1, 0, 2]
    names = [f"{i // 3:05}/é{i}.png" for i in range(6)]
    write_pictures(root, [unicodedata.normalize("NFD", name) for name in names])  # as macOS does
    rows = list(zip(names, labels, strict=True))
    if kind == "csv":
        lines = ["file_name,label", *(f"{name},{'abc'[label]}" for name, label in rows)]
        (root / "metadata.csv").write_text("\n".join(lines))
    elif kind == "jsonl":
        lines = [json.dumps({"file_name": name, "label": label}) for name, label in rows]
        (root / "metadata.jsonl").write_text("\n".join(lines))
    else:
        (root / "dataset.json").write_text(json.dumps({"labels": rows}))
    data = create("data", "image_folder", path=str(root), held_out=0.0)
    assert data.class_names == (tuple("abc") if kind == "csv" else tuple("012"))
    assert [data.train[i][1] for i in range(6)] == labels


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.csv", "path,text\n0.png,a"),
        ("metadata.csv", "file_name,text\nother.png,a"),
        ("metadata.jsonl", "{"),
        ("metadata.jsonl", '{"file_name": "0.png", "a": 1}\n{"file_name": "1.png", "a": "b"}'),
        ("dataset.json", '{"labels": [3]}'),
    ],
)
def test_metadata_that_do_not_fit_are_one_line(tmp_path, name, content):
    write_pictures(tmp_path, ["0.png", "1.png"])
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"metadata|dataset\.json"):
        create("data", "image_folder", path=str(tmp_path))


# Encoders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ENCODERS)
def test_a_context_is_the_encoding_less_that_of_the_empty_text(tmp_path, kind, whole):
    """Text by text, without padding; a cut text keeps its end token, as the tokenizer has it."""
    encoder = load_text_encoder(ENCODERS[kind](tmp_path / kind, whole=whole))

    def states(text, length):
        ids = encoder.tokenizer([text], truncation=True, max_length=length, return_tensors="pt")
        found = torch.zeros(length, 16)
        found[: ids.input_ids.shape[1]] = encoder.network(ids.input_ids).last_hidden_state[0]
        return found

    texts = [*TEXTS, ""]
    for length in (4, 12):
        contexts = encoder.encode(texts, length)
        expected = torch.stack([states(text, length) - states("", length) for text in texts])
        torch.testing.assert_close(contexts, expected, atol=1e-5, rtol=1e-4)
        assert not contexts[-1].any()
        assert contexts[0].abs().max() > 0.1


@pytest.mark.slow
def test_captions_become_contexts_of_a_table(tmp_path, caplog):
    options = in_text_files(tmp_path / "set")
    (tmp_path / "set" / "3.txt").write_text("")
    data = create("data", "image_folder", path=str(options["path"]), held_out=0.3)
    encoder = load_text_encoder(ENCODERS["t5"](tmp_path / "t5"))
    config = EncodingConfig(vae="none", out="", batch_size=2)
    with caplog.at_level(logging.INFO):
        assert encode(data, None, tmp_path / "table", config, text=encoder)
    assert "6 captions, 1 of them empty; 4 embeddings each" in caplog.text
    table = create("data", "table", path=str(tmp_path / "table"))
    assert table.context == (4, 16)
    assert table.text_encoder == {"name": encoder.name, **encoder.metadata}
    for part in (table.train, table.held_out):
        for image, context in (part[i] for i in range(len(part))):
            text = "" if (value := int(image[0, 0, 0])) == 3 else TEXTS[value]
            torch.testing.assert_close(context, encoder.encode([text], 4)[0].half())
    other = EncodingConfig(vae="none", out="", text_length=3)
    with pytest.raises(ValueError, match="differs in"):
        encode(data, None, tmp_path / "table", other, text=encoder)
    none = create("data", "digits")
    with pytest.raises(ValueError, match="no captions"):
        encode(none, None, tmp_path / "none", config, text=encoder)


def test_what_is_no_whole_text_encoder_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = ENCODERS["t5"](tmp_path / "t5")
    weights = load_file(f"{path}/model.safetensors")
    kept = {name: w for name, w in weights.items() if "final_layer_norm" not in name}
    save_file(kept, f"{path}/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="final_layer_norm"):
        load_text_encoder(path)
    config = json.loads((tmp_path / "t5" / "config.json").read_text())
    (tmp_path / "t5" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(ValueError, match="bert"):
        load_text_encoder(path)


# In training, without a table ---------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TREAD_ZOO_CACHE", str(tmp_path / "contexts"))
    return tmp_path / "contexts"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("write", [in_text_files, in_a_column, in_json_of_shards])
def test_an_encoder_in_the_data_gives_the_contexts_of_a_table(tmp_path, cache, write, kind):
    given = {**(options := write(tmp_path / "set")), "path": str(options["path"])}
    source, encoder = given.pop("data"), ENCODERS[kind](tmp_path / kind)
    config = EncodingConfig(vae="none", out="", text_length=5)
    data = create("data", source, held_out=0.3, **given)
    encode(data, None, tmp_path / "table", config, text=load_text_encoder(encoder))
    table = create("data", "table", path=str(tmp_path / "table"))
    data = create("data", source, held_out=0.3, text_encoder=encoder, text_length=5, **given)
    assert (data.context, data.text_encoder) == (table.context, table.text_encoder)
    assert data.num_classes == 0
    for part, other in ((data.train, table.train), (data.held_out, table.held_out)):
        for i in range(len(other)):
            (image, context), (same, expected) = part[i], other[i]
            assert torch.equal(image, same)
            assert context.dtype == expected.dtype
            torch.testing.assert_close(context, expected, atol=2e-3, rtol=2e-3)


def test_contexts_are_computed_once_for_the_same_captions_and_encoder(tmp_path, cache):
    options, encoder = in_text_files(tmp_path / "set"), ENCODERS["t5"](tmp_path / "t5")
    given = {"path": str(options["path"]), "text_encoder": encoder}

    def files():
        create("data", "image_folder", **given)
        return {file.name: file.stat().st_mtime_ns for file in cache.glob("*.bin")}

    first = files()
    assert files() == first
    assert len(first) == 1
    (tmp_path / "set" / "0.txt").write_text("green")
    assert len(files()) == 2
    given["text_encoder"] = save_t5(tmp_path / "other", seed=1)
    assert len(files()) == 3


def test_a_caption_that_cannot_be_read_is_a_corrupt_item(tmp_path, cache):
    options, encoder = in_text_files(tmp_path / "set"), ENCODERS["t5"](tmp_path / "t5")
    (tmp_path / "set" / "3.txt").write_bytes(b"\xff\xfe\xff")
    given = {"path": str(options["path"]), "text_encoder": encoder, "held_out": 0.0}
    data = create("data", "image_folder", **given)
    found = [read_item(data.train, i) for i in range(6)]
    assert [isinstance(item, CorruptItem) for item in found] == [i == 3 for i in range(6)]
    assert found[3].name.endswith("3.png")


def test_images_without_captions_take_no_encoder(tmp_path, cache):
    write_pictures(tmp_path / "set", ["0.png", "1.png"])
    encoder = ENCODERS["t5"](tmp_path / "t5")
    with pytest.raises(ValueError, match="no captions"):
        create("data", "image_folder", path=str(tmp_path / "set"), text_encoder=encoder)
