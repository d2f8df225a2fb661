"""Contexts beside images and in latents: what is read, how it is filled up, and what is refused."""

import io
import json
import pickle
import tarfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.contexts import SHAPE, made_contexts, with_contexts, write_latents
from tests.data.test_shards import make_tar, picture
from tests.data.vaes import image_data
from tread_zoo.data import StepBatches, build_data, make_loader
from tread_zoo.data.contexts import ColumnContexts, WithContexts, spread_order
from tread_zoo.data.loader import lost_items

LENGTHS = [2, 1, 3, 2, 1, 2, 1, 2]  # embeddings of width 4 an image; T is 3


def ragged(dtype=np.float32):
    """Return an array [t, 4] an image."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((length, 4)).astype(dtype) for length in LENGTHS]


def filled(array, length=3):
    """Return what an item must have: float32 [T, S], zeros below."""
    return torch.cat([
        torch.from_numpy(array.astype(np.float32)), torch.zeros(length - len(array), 4)
    ])  # fmt: skip


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_folder(root, arrays, suffix=".context.npy"):
    for i, array in enumerate(arrays):
        folder = root / ("ant" if i < 4 else "bee")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 10 * i, np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}{suffix}").write_bytes(npy(array))
    return str(root)


def by_value(*parts):
    """Return context by picture, whose pixels tell which it is."""
    return {int(part[i][0][0, 0, 0]) // 10: part[i][1] for part in parts for i in range(len(part))}


@pytest.mark.parametrize(("dtype", "suffix"), [("<f4", ".context.npy"), ("<f2", ".npy")])
def test_files_beside_pictures_are_their_contexts(tmp_path, dtype, suffix):
    arrays = ragged(dtype)
    path = write_folder(tmp_path, arrays, suffix)
    data = build_data("image_folder", path=path, context=suffix.lstrip("."), held_out=0.25)
    assert (data.context, data.num_classes, len(data.held_out)) == ((3, 4), 0, 2)
    assert data.context_keywords == {"context_length": 3, "context_size": 4}
    found = by_value(data.train, data.held_out)
    for i, array in enumerate(arrays):
        assert found[i].dtype == torch.float32
        assert torch.equal(found[i], filled(array))
    (tmp_path / "ant" / f"1{suffix}").write_bytes(npy(np.zeros((0, 4), dtype)))  # no text at all
    assert torch.equal(by_value(data.train, data.held_out)[1], torch.zeros(3, 4))
    assert data.train.item_name(0).endswith(".png")
    longer = build_data("image_folder", path=path, context=suffix, context_length=5)
    assert torch.equal(longer.train[0][1][3:], torch.zeros(2, 4))
    plain = build_data("image_folder", path=path)
    assert (plain.context, plain.num_classes, plain.context_keywords) == (None, 2, {})


def shard_members(arrays, first=0):
    members = []
    for i, array in enumerate(arrays, first):
        members += [(f"s{i}.png", picture(10 * i)), (f"s{i}.context.npy", npy(array))]
    return members


def test_members_of_shards_are_their_contexts_also_of_a_held_out_part(tmp_path):
    arrays = ragged()
    for part, chosen, first in (("train", arrays[:2], 0), ("train2", arrays[3:6], 3)):
        make_tar(tmp_path / f"{part}.tar", shard_members(chosen, first))
    make_tar(tmp_path / "val.tar", [*shard_members([arrays[2]], 2), *shard_members(arrays[6:], 6)])
    data = build_data(
        "webdataset", path=str(tmp_path / "train*.tar"), context="context.npy",
        held_out_path=str(tmp_path / "val.tar"),
    )  # fmt: skip
    assert data.context == (3, 4)  # the longest lies in the held-out part
    assert sorted(by_value(data.train)) == [0, 1, 3, 4, 5]
    for i, context in by_value(data.train, data.held_out).items():
        assert torch.equal(context, filled(arrays[i]))
    split = build_data("webdataset", path=str(tmp_path / "val.tar"), context="context.npy",
                       held_out=0.34)  # fmt: skip
    for i, context in by_value(split.train, split.held_out).items():
        assert torch.equal(context, filled(arrays[i]))


@pytest.mark.parametrize("kind", ["lists", "array", "one"])
def test_columns_of_tables_are_contexts(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    arrays = [a[:1] for a in ragged()] if kind == "one" else ragged()
    if kind == "array":
        arrays = [filled(a).numpy() for a in arrays]
    value = datasets.Value("float32")
    feature = {
        "lists": datasets.Sequence(datasets.Sequence(value)),
        "array": datasets.Array2D((3, 4), "float32"),
        "one": datasets.Sequence(value),
    }[kind]
    rows = [a[0].tolist() if kind == "one" else a.tolist() for a in arrays]
    pictures = [Image.fromarray(np.full((8, 8, 3), 10 * i, np.uint8)) for i in range(len(rows))]
    features = datasets.Features({"image": datasets.Image(), "text": feature})
    table = datasets.Dataset.from_dict({"image": pictures, "text": rows}, features=features)
    parts = datasets.DatasetDict(train=table.select([7, 0, 1, 3, 4, 5]), test=table.select([6, 2]))
    parts.save_to_disk(tmp_path / "set")
    data = build_data("hf", path=str(tmp_path / "set"), context_column="text")
    length = 1 if kind == "one" else 3
    assert data.context == (length, 4)
    assert len(data.held_out) == 2
    for part in (data, build_data("hf", path=str(tmp_path / "set"), context_column="text",
                                  split="train", held_out=0.4, context_length=length)):  # fmt: skip
        for i, context in by_value(part.train, part.held_out).items():
            assert torch.equal(context, filled(arrays[i], length))
    with pytest.raises(ValueError, match=r"context_column='texts' is unknown. Did you mean 'text'"):
        build_data("hf", path=str(tmp_path / "set"), context_column="texts")
    with pytest.raises(ValueError, match=r"data.context_column='image' is"):
        build_data("hf", path=str(tmp_path / "set"), context_column="image")


class Trap:
    """Unpickled, it would make a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        import os

        return os.mkdir, (self.folder,)


def test_a_column_of_more_numbers_than_one_array_holds(tmp_path):
    """2^31 numbers and more, of which a chunk lies in memory once, as parts of a file do."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    edges = np.arange(0, 2**20 + 1, 2**18, dtype=np.int32)
    lists = pyarrow.ListArray.from_arrays(edges, np.zeros(2**20, np.float32))
    chunk = pyarrow.ListArray.from_arrays(np.array([0, 1, 4], np.int32), lists)
    column = pyarrow.chunked_array([chunk] * 2049)
    table = datasets.Dataset(pyarrow.table({"text": column}), fingerprint="made")
    contexts = ColumnContexts([table], "text", None)
    assert contexts.shape == (3, 2**18)


def test_contexts_that_do_not_fit_are_named_and_nothing_is_unpickled(tmp_path):
    root = tmp_path / "set"
    path = write_folder(root, ragged())
    with pytest.raises(ValueError, match=r"num_classes=2 and contexts \(npy\) exclude each other"):
        build_data("image_folder", path=path, context="npy", num_classes=2)
    with pytest.raises(ValueError, match="context_length=3 is for data with contexts"):
        build_data("image_folder", path=path, context_length=3)
    with pytest.raises(ValueError, match=r"0.text.npy' is missing: every picture needs one"):
        build_data("image_folder", path=path, context="text.npy")
    options = {"context": "context.npy", "held_out": 0.0}
    short = build_data("image_folder", path=path, context_length=2, **options)
    with pytest.raises(ValueError, match=r"2.context.npy has 3 embeddings of width 4; at most 2"):
        short.train[2]
    file = root / "ant" / "1.context.npy"
    for content, words in (
        (npy(np.zeros((1, 5))), "has 1 embeddings of width 5"),
        (npy(np.zeros((1, 4), int)), r"dtype int64; it must be floats"),
        (npy(np.full((1, 4), np.nan)), "numbers that are not finite"),
        (npy(np.full((1, 4), 1e300)), "numbers that are not finite"),
        (npy(np.zeros((2, 4), np.float32))[:-3], "cannot be read as an .npy file"),
        (pickle.dumps(Trap(str(tmp_path / "sprung"))), "cannot be read as an .npy file"),
        (npy(np.array([Trap(str(tmp_path / "sprung"))])), "cannot be read as an .npy file"),
        (b"", "cannot be read as an .npy file"),
    ):
        data = build_data("image_folder", path=path, **options)
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            data.train[1]
        file.write_bytes(npy(ragged()[1]))
    assert not (tmp_path / "sprung").exists()


def members_of(folder, part):
    """Return the bytes of each member by name, by tarfile alone."""
    found = {}
    for file in sorted(folder.glob(f"{part}-*.tar")):
        with tarfile.open(file) as tar:
            found |= {m.name: tar.extractfile(m).read() for m in tar}
    return found


def test_encoded_contexts_are_the_bytes_of_numpy_and_are_read_back(tmp_path):
    folder = write_latents(tmp_path / "latents")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["context"], manifest["num_classes"]) == (list(SHAPE), 0)
    data = build_data("latents", path=str(folder), vae="none", verify="sha256")
    assert (data.context, data.num_classes) == (SHAPE, 0)
    for seed, (part, found) in enumerate((("train", data.train), ("held_out", data.held_out))):
        expected, members = made_contexts(len(found), seed).half(), members_of(folder, part)
        assert {name.partition(".")[2] for name in members} == {"latent.npy", "context.npy"}
        for i in range(len(found)):
            assert members[f"{part}_{i:09d}.context.npy"] == npy(expected[i].numpy())
            latent, context = found[i]
            assert torch.equal(context, expected[i])
            assert latent.shape == (1, 3, 4, 4)
    plain = write_latents(tmp_path / "plain", image_data(24, 6))
    for name, content in members_of(plain, "train").items():
        if name.endswith("latent.npy"):
            assert members_of(folder, "train")[name] == content
    assert "context" not in json.loads((plain / "manifest.json").read_text())
    assert build_data("latents", path=str(plain), vae="none").context is None
    dropped = build_data("latents", path=str(folder), vae="none", context=False)
    assert (dropped.context, dropped.train[0][1]) == (None, 0)
    with pytest.raises(ValueError, match=r"num_classes=4 and contexts .*data.context=false drops"):
        build_data("latents", path=str(folder), vae="none", num_classes=4)
    with pytest.raises(ValueError, match=r"data.context='npy' must be true or false"):
        build_data("latents", path=str(folder), vae="none", context="npy")
    with pytest.raises(ValueError, match=r"context=\[3, 4\], not \[5, 4\]"):
        write_latents(folder, with_contexts(shape=(5, 4)))


def test_an_overflow_of_float16_stops_the_encoding(tmp_path):
    data = with_contexts()
    data.held_out.contexts[2][0, 0] = 1e5
    with pytest.raises(ValueError, match=r"of held_out image 2 reaches 100000, beyond what float"):
        write_latents(tmp_path, data)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_cut_shard_keeps_each_image_with_its_own_context(tmp_path, indexed):
    folder = write_latents(tmp_path)
    whole = build_data("latents", path=str(folder), vae="none").train
    pairs = [whole[i] for i in range(24)]
    file = folder / "train-000001.tar"
    with tarfile.open(file) as tar:  # between the two members of a sample
        end = tar.getmember("train_000000014.context.npy").offset_data
    file.write_bytes(file.read_bytes()[:end])
    if not indexed:
        for cache in folder.glob("index_*.npz"):
            cache.unlink()
    data = build_data("latents", path=str(folder), vae="none").train
    assert [item.index for item in lost_items(data)] == list(range(15 - (not indexed), 20))
    for i in [*range(14), *range(20, 24)]:
        assert torch.equal(data[i][0], pairs[i][0])
        assert torch.equal(data[i][1], pairs[i][1])
    with pytest.raises(ValueError, match=r"000001.tar' .*cut short"):
        data[14]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_context_is_replaced_with_its_latent_in_every_epoch(tmp_path, num_workers):
    folder = write_latents(tmp_path)
    file = folder / "train-000001.tar"
    content = file.read_bytes()
    with tarfile.open(file) as tar:
        offset = tar.getmember("train_000000013.context.npy").offset_data
    file.write_bytes(content[:offset] + b"garbage" + content[offset + 7 :])
    checked = build_data("latents", path=str(folder), vae="none", verify="sha256").train
    assert [item.index for item in lost_items(checked)] == list(range(10, 20))
    data, met = build_data("latents", path=str(folder), vae="none"), []

    def load(start):
        plan = StepBatches(24, 4, seed=0, num_steps=12, start_step=start)
        loaded = make_loader(data.train, plan, num_workers, seed=0, on_corrupt=met.append)
        return [(x, c) for x, c in loaded]

    whole, rest = load(0), load(5)
    assert {item.index for item in met} == {13}
    assert f"holds no float16 context {list(SHAPE)}: the shard is damaged" in met[0].reason
    assert all(c.dtype == torch.float16 and c.shape == (4, *SHAPE) for _, c in whole)
    for one, other in zip(whole[5:], rest, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    pairs = {data.train[i][0].numpy().tobytes(): data.train[i][1] for i in range(24) if i != 13}
    for latents, contexts in whole:  # a replacement brings its own context along
        for latent, context in zip(latents, contexts, strict=True):
            assert torch.equal(pairs[latent.numpy().tobytes()], context)


def test_a_source_with_contexts_is_trained_on_as_it_is(tmp_path):
    """`WithContexts` goes through the loader as images and contexts in the order asked for."""
    data = with_contexts()
    images, contexts = next(make_loader(data.train, [[5, 0, 7]]))
    assert torch.equal(contexts, made_contexts(24)[[5, 0, 7]])
    assert torch.equal(images, image_data(24, 6).train.images[[5, 0, 7]])
    assert isinstance(data.train, WithContexts)


def test_the_first_numbers_of_the_order_are_spread_evenly():
    assert spread_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert spread_order(6) == [0, 4, 2, 1, 5, 3]
    assert (spread_order(0), spread_order(1)) == ([], [0])
    for size in (7, 100, 513):
        order = spread_order(size)
        assert sorted(order) == list(range(size))
        for count in (2, 5, 16, 64):
            chosen = [*sorted(order[:count]), size]
            gaps = [after - before for before, after in pairwise(chosen)]
            if count <= size:
                assert max(gaps) <= 4 * size / count
