"""Contexts beside images and in latents: reading, padding and errors."""

import pickle

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.tables import (
    SHAPE,
    Trap,
    filled,
    flat,
    made_contexts,
    npy,
    picture_table,
    values_of,
    with_contexts,
    write_latents,
    write_tar,
)
from tread_zoo.data import make_loader
from tread_zoo.registry import create


def write_folder(root, arrays, suffix="context.npy"):
    for i, array in enumerate(arrays):
        folder = root / ("ant" if i < 4 else "bee")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(flat(i)).save(folder / f"{i}.png")
        (folder / f"{i}.{suffix}").write_bytes(npy(array))
    return str(root)


def by_value(*parts):
    """Return contexts by picture; the pixels of a picture identify it."""
    return dict(
        zip(values_of(*parts), (p[i][1] for p in parts for i in range(len(p))), strict=True)
    )


@pytest.mark.parametrize(("dtype", "suffix"), [("<f4", "context.npy"), ("<f2", "npy")])
def test_files_beside_pictures_are_their_contexts(tmp_path, dtype, suffix):
    arrays = [array.astype(dtype) for array in made_contexts(8)]
    path = write_folder(tmp_path, arrays, suffix)
    data = create("data", "image_folder", path=path, context=suffix, held_out=0.25)
    assert (data.context, data.num_classes, len(data.held_out)) == (SHAPE, 0, 2)
    assert data.context_keywords == {"context_length": 3, "context_size": 4}
    for i, context in by_value(data.train, data.held_out).items():
        assert torch.equal(context, filled(arrays[i].astype("<f4")))
    (tmp_path / "ant" / f"1.{suffix}").write_bytes(npy(np.zeros((0, 4), dtype)))  # no text at all
    assert torch.equal(by_value(data.train, data.held_out)[1], torch.zeros(3, 4))
    longer = create("data", "image_folder", path=path, context=suffix, context_length=5)
    assert torch.equal(longer.train[0][1][3:], torch.zeros(2, 4))
    plain = create("data", "image_folder", path=path)
    assert (plain.context, plain.num_classes, plain.context_keywords) == (None, 2, {})


def test_members_of_shards_are_their_contexts(tmp_path):
    arrays = made_contexts(6)
    write_tar(tmp_path / "a.tar", range(6), contexts=arrays)
    given = {"path": str(tmp_path / "a.tar"), "context": "context.npy"}
    data = create("data", "webdataset", held_out=0.5, **given)
    assert (data.context, len(data.held_out)) == (SHAPE, 3)
    for i, context in by_value(data.train, data.held_out).items():
        assert torch.equal(context, filled(arrays[i]))


@pytest.mark.parametrize("kind", ["lists", "array", "one"])
def test_columns_of_tables_are_contexts(tmp_path, kind):
    arrays = [array[:1] for array in made_contexts(8)] if kind == "one" else made_contexts(8)
    if kind == "array":
        arrays = [filled(array).numpy() for array in arrays]
    value = datasets.Value("float32")
    feature = {
        "lists": datasets.Sequence(datasets.Sequence(value)),
        "array": datasets.Array2D((3, 4), "float32"),
        "one": datasets.Sequence(value),
    }[kind]
    rows = [array[0].tolist() if kind == "one" else array.tolist() for array in arrays]
    table = picture_table(range(8), text=(feature, rows))
    parts = datasets.DatasetDict(train=table.select([7, 0, 1, 3, 4, 5]), test=table.select([6, 2]))
    parts.save_to_disk(tmp_path / "set")
    given = {"path": str(tmp_path / "set"), "context_column": "text"}
    data = create("data", "hf", **given)
    length = 1 if kind == "one" else 3
    assert (data.context, len(data.held_out)) == ((length, 4), 2)
    for i, context in by_value(data.train, data.held_out).items():
        assert torch.equal(context, filled(arrays[i], length))
    with pytest.raises(ValueError, match="num_classes=2 and contexts exclude"):
        create("data", "hf", num_classes=2, **given)


def test_contexts_that_do_not_fit_are_named_and_nothing_is_unpickled(tmp_path):
    root, good = tmp_path / "set", made_contexts(8)
    given = {"path": write_folder(root, good), "held_out": 0.0, "context": "context.npy"}
    data = create("data", "image_folder", context_length=3, **given)
    file, sprung = root / "ant" / "1.context.npy", str(tmp_path / "sprung")
    for content in (
        npy(np.zeros((4, 4))),  # too many
        npy(np.zeros((1, 5))),  # too wide
        npy(np.zeros((1, 4), int)),
        npy(np.full((1, 4), np.nan)),
        npy(np.full((1, 4), 1e300)),
        npy(np.zeros((2, 4), np.float32))[:-3],
        pickle.dumps(Trap(sprung)),
        npy(np.array([Trap(sprung)])),
        b"",
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="context"):
            data.train[1]
    assert not (tmp_path / "sprung").exists()
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"1\.context\.npy"):
        create("data", "image_folder", **given)


def test_encoded_contexts_are_read_back_or_dropped(tmp_path):
    folder = write_latents(tmp_path / "latents")
    data = create("data", "latents", path=str(folder), vae="none")
    assert (data.context, data.num_classes) == (SHAPE, 0)
    for seed, part in enumerate((data.train, data.held_out)):
        for i, array in enumerate(made_contexts(len(part), seed)):
            latent, context = part[i]
            assert torch.equal(context, filled(array).half())
            assert latent.shape == (1, 3, 4, 4)
    latents, contexts = next(make_loader(data.train, [[5, 0, 7]]))
    assert (latents.shape, contexts.shape) == ((3, 1, 3, 4, 4), (3, *SHAPE))
    dropped = create("data", "latents", path=str(folder), vae="none", context=False)
    assert (dropped.context, dropped.train[0][1]) == (None, 0)


def test_an_overflow_of_float16_stops_the_encoding(tmp_path):
    data = with_contexts()
    data.held_out[2][1][0, 0] = 1e5
    with pytest.raises(ValueError, match="100000, beyond what float16"):
        write_latents(tmp_path, data)
