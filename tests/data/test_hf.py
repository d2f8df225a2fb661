"""Data sets that the `datasets` library wrote here: saved, as parquet, as pictures."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tread_zoo.data import StepBatches, build_data, make_loader

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _table(count=12, size=(8, 8), labels=None, **columns):
    pixels = np.random.default_rng(count).integers(0, 256, (count, *size, 3), np.uint8)
    kind = datasets.ClassLabel(names=["ant", "bee", "cat"])
    labels = [i % 3 for i in range(count)] if labels is None else labels
    table = datasets.Dataset.from_dict(
        {"picture": [Image.fromarray(one) for one in pixels], "kind": labels, **columns},
        features=datasets.Features(
            {
                "picture": datasets.Image(),
                "kind": kind,
                **dict.fromkeys(columns, datasets.Value("string")),
            }
        ),
    )
    return table, torch.from_numpy(pixels).permute(0, 3, 1, 2)


def test_a_saved_set_with_its_own_test_split(tmp_path):
    (train, pixels), (test, test_pixels) = _table(12), _table(6)
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "set")
    data = build_data("hf", path=str(tmp_path / "set"))
    assert (data.image_size, data.channels, data.num_classes) == ((8, 8), 3, 3)
    assert data.class_names == ("ant", "bee", "cat")
    assert data.name == "hf:set"
    for part, expected in ((data.train, pixels), (data.held_out, test_pixels)):
        assert torch.equal(torch.stack([part[i][0] for i in range(len(part))]), expected)
        assert [part[i][1] for i in range(len(part))] == [i % 3 for i in range(len(part))]
    assert data.train.item_name(3).endswith("row 3")
    other = build_data("hf", path=str(tmp_path / "set"), split="test", held_out=0.5, num_classes=0)
    assert (len(other.train), len(other.held_out), other.num_classes) == (3, 3, 0)


def test_what_is_trained_on_is_never_what_is_held_out(tmp_path):
    (train, _), (test, _) = _table(12), _table(20)
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "set")
    data = build_data("hf", path=str(tmp_path / "set"), split="test")
    assert (len(data.train), len(data.held_out)) == (18, 2)
    assert not set(data.train.rows.tolist()) & set(data.held_out.rows.tolist())


def test_a_saved_set_without_splits_and_its_fixed_tenth(tmp_path):
    table, pixels = _table(20)
    table.save_to_disk(tmp_path / "set")
    first, second = (build_data("hf", path=str(tmp_path / "set")) for _ in range(2))
    assert (len(first.train), len(first.held_out)) == (18, 2)
    assert torch.equal(first.held_out.rows, second.held_out.rows)
    row = int(first.held_out.rows[0])
    assert torch.equal(first.held_out[0][0], pixels[row])
    assert first.held_out[0][1] == row % 3


def test_parquet_files_resized_to_grey_through_the_loader(tmp_path):
    table, _ = _table(10, size=(12, 20))
    table.to_parquet(tmp_path / "set" / "train-00000.parquet")
    data = build_data("hf", path=str(tmp_path / "set"), image_size=8, channels=1, held_out=0.2)
    assert (data.image_size, len(data.train), len(data.held_out)) == ((8, 8), 8, 2)
    batches = StepBatches(8, 4, seed=0, num_steps=2)
    loaded = list(make_loader(data.train, batches, 1))
    assert [tuple(images.shape) for images, _ in loaded] == [(4, 1, 8, 8)] * 2
    with pytest.raises(ValueError, match=r"data.split='tran' is unknown.*Did you mean 'train'"):
        build_data("hf", path=str(tmp_path / "set"), split="tran")
    part = build_data("hf", path=str(tmp_path / "set"), split="train[:50%]", held_out=0.0)
    assert len(part.train) == 5


def test_a_folder_of_pictures_and_a_cut_one(tmp_path):
    for label, name in enumerate(("ant", "bee")):
        folder = tmp_path / "set" / "train" / name
        folder.mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (8, 8), (10 * label, i, 0)).save(folder / f"{i}.png")
    data = build_data("hf", path=str(tmp_path / "set"), held_out=0.0, image_size=8)
    assert data.class_names == ("ant", "bee")
    assert data.train[4][0][:, 0, 0].tolist() == [10, 1, 0]
    cut = tmp_path / "set" / "train" / "bee" / "1.png"
    cut.write_bytes(cut.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"bee/1.png' cannot be read"):
        data.train[4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"streaming": True}, r"data.streaming=true cannot be trained on.*train\[:10%\]"),
        ({"image_column": "pictur"}, r"data.image_column='pictur' is unknown.*'picture'"),
        ({"label_column": "caption"}, r"'caption' is .*class_encode_column"),
        ({"label_column": "knd"}, r"data.label_column='knd' is unknown.*'kind'"),
        ({"num_classes": 5}, r"data.num_classes=5: the set has 3 classes"),
        ({"num_classes": -1}, r"data.num_classes=-1 must be"),
        ({"test_split": "valid"}, r"data.test_split='valid' is unknown"),
        ({"test_split": "train", "held_out": 0.1}, r"exclude each other"),
        ({"test_split": "train"}, r"data.test_split='train' is what is trained on"),
        ({"channels": 2}, r"data.channels=2"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, words):
    table, _ = _table(9, caption=["a"] * 9)
    table.save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=words):
        build_data("hf", path=str(tmp_path / "set"), **options)


def test_sizes_that_differ_and_labels_that_are_missing(tmp_path):
    (one, _), (other, _) = _table(6), _table(6, size=(8, 9))
    datasets.DatasetDict(train=one, test=other).save_to_disk(tmp_path / "sizes")
    with pytest.raises(ValueError, match=r"row 0' is 8x8, .*split test, row 0' is 8x9.*image_size"):
        build_data("hf", path=str(tmp_path / "sizes"))
    (unlabelled, _) = _table(6, labels=[-1] * 6)
    datasets.DatasetDict(train=one, test=unlabelled).save_to_disk(tmp_path / "labels")
    with pytest.raises(ValueError, match=r"test: 'kind' reaches from -1 to -1.*num_classes=0"):
        build_data("hf", path=str(tmp_path / "labels"))
    assert build_data("hf", path=str(tmp_path / "labels"), num_classes=0).num_classes == 0


def test_what_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"data.path='/no/where' does not exist"):
        build_data("hf", path="/no/where")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty'.*cannot be loaded by the datasets library"):
        build_data("hf", path=str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install \"tread-zoo\[hf\]\""):
        build_data("hf", path="someone/something")
