"""Latents in an LMDB as MaskDiT writes it: written here with the lmdb package, key by key."""

import builtins
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from tread_zoo.data import StepBatches, build_data, make_loader

lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed: pip install lmdb")

LABELS = [3, 0, 1, 2, 0, 3, 1, 2, 3, 0]


def moments(count, size=4, seed=0):
    draws = np.random.default_rng(seed).standard_normal((count, 8, size, size))
    return draws.astype(np.float32) - np.float32(0.5)


def write(folder, array, labels=None, **changes):
    """Write z-{i}, y-{i} and length; `changes` by key with _ for -, None leaves one out."""
    values = {f"z-{i}": one.tobytes() for i, one in enumerate(array)}
    values |= {f"y-{i}": str(label).encode() for i, label in enumerate(labels or [])}
    values["length"] = str(len(array)).encode()
    values |= {key.replace("_", "-"): value for key, value in changes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    environment = lmdb.open(str(folder), map_size=1 << 26)
    with environment.begin(write=True) as transaction:
        for key, value in values.items():
            if value is not None:
                transaction.put(key.encode(), value)
    environment.close()
    (folder / "lock.mdb").unlink()
    return folder


def load(folder, **options):
    return build_data("latents", path=str(folder), **options)


def batches(data, num_workers=0):
    plan = StepBatches(len(data.train), 2, seed=0, num_steps=4)
    return list(make_loader(data.train, plan, num_workers))


@pytest.mark.parametrize("below", ["", "train"])
def test_items_are_those_that_were_written(tmp_path, below):
    array = moments(10)
    write(tmp_path / "set" / below, array, LABELS)
    data = load(tmp_path / "set", held_out=0.2)
    assert (data.num_classes, len(data.train), len(data.held_out)) == (4, 8, 2)
    assert (data.channels, data.image_size, data.codec.content) == (4, (4, 4), "mean_logvar")
    assert not data.codec.flips
    seen = []
    for part in (data.train, data.held_out):
        for i, item in enumerate(part.indices.tolist()):
            found, label = part[i]
            assert torch.equal(found, torch.from_numpy(array[item])[None])
            assert label == LABELS[item]
            seen.append(item)
    assert sorted(seen) == list(range(10))
    mean, logvar = np.split(array[data.train.indices].astype(np.float64), 2, axis=1)
    square = (mean**2 + np.exp(logvar)).mean((0, 2, 3))
    np.testing.assert_allclose(data.codec.shift, mean.mean((0, 2, 3)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(
        data.codec.scale, (square - mean.mean((0, 2, 3)) ** 2) ** -0.5, rtol=1e-5
    )
    assert os.listdir(tmp_path / "set" / below) == ["data.mdb"]  # nothing was written: no lock


def test_what_is_drawn_is_mean_and_deviation_of_the_stored_logvar(tmp_path):
    array = moments(10)
    data = load(write(tmp_path, array, LABELS), held_out=0.0)
    stored = torch.stack([data.train[i][0] for i in range(10)])
    noise = data.codec.draw(stored.shape, torch.Generator().manual_seed(1))
    mean, logvar = torch.from_numpy(array).double().chunk(2, 1)
    z = mean + torch.exp(logvar / 2) * noise
    shift, scale = (
        torch.tensor(x, dtype=torch.float64).view(4, 1, 1)
        for x in (data.codec.shift, data.codec.scale)
    )
    found = data.codec.to_model(stored, device=torch.device("cpu"), noise=noise)
    torch.testing.assert_close(found.double(), (z - shift) * scale, rtol=1e-5, atol=1e-5)


def test_labels_are_optional_and_their_number_is_the_largest_and_one(tmp_path):
    bare = load(write(tmp_path / "bare", moments(10)))
    assert (bare.num_classes, bare.train[0][1]) == (0, 0)
    folder = write(tmp_path / "classes", moments(3), [0, 11, 5])
    assert load(folder, held_out=0.0).num_classes == 12
    assert load(folder, num_classes=1000).num_classes == 1000
    assert load(folder, num_classes=0).num_classes == 0


class TestMirroredHalf:
    def near_mirror(self, array):
        return array[..., ::-1] + 0.3 * moments(len(array), seed=1)

    def test_it_is_the_second_copy(self, tmp_path):
        array = moments(10)
        mirrored = self.near_mirror(array)
        data = load(write(tmp_path, np.concatenate([array, mirrored]), LABELS * 2), held_out=0.2)
        assert (len(data.train), len(data.held_out)) == (8, 2)
        data.codec.check(flip=True)
        for i, item in enumerate(data.train.indices.tolist()):
            found, label = data.train[i]
            assert torch.equal(found, torch.from_numpy(np.stack([array[item], mirrored[item]])))
            assert label == LABELS[item]

    def test_one_class_or_no_labels_can_have_it_too(self, tmp_path):
        array = moments(10)
        both = np.concatenate([array, self.near_mirror(array)])
        for name, labels in (("one", [0] * 20), ("none", None)):
            assert load(write(tmp_path / name, both, labels)).codec.flips

    @pytest.mark.parametrize("case", ["others", "unmirrored", "labels", "odd"])
    def test_other_items_are_images_of_their_own(self, tmp_path, case):
        array, labels = moments(10), LABELS * 2
        second = self.near_mirror(array)
        if case == "others":  # a large mean of a channel makes no two latents alike
            array, second = array + 5, moments(10, seed=2) + 5
        elif case == "unmirrored":
            second = array
        elif case == "labels":
            labels = LABELS + LABELS[::-1]
        elif case == "odd":
            second, labels = second[:9], labels[:19]
        data = load(write(tmp_path, np.concatenate([array, second]), labels), held_out=0.0)
        assert len(data.train) == len(labels)
        assert not data.codec.flips


def test_one_folder_is_read_by_several_data_sets_workers_and_copies(tmp_path):
    write(tmp_path / "set", moments(10), LABELS)
    data, again = load(tmp_path / "set"), load(tmp_path / "set")
    expected = batches(data)  # opened here, before workers are forked
    for found in (
        batches(again),
        batches(data, num_workers=2),
        batches(pickle.loads(pickle.dumps(data)), num_workers=1),
    ):
        assert [y.tolist() for _, y in found] == [y.tolist() for _, y in expected]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(found, expected, strict=True))
    assert torch.equal(data.train[0][0], again.train[0][0])  # still open here


@pytest.mark.slow
def test_a_process_started_anew_reads_what_was_pickled(tmp_path):
    data = load(write(tmp_path / "set", moments(10), LABELS))
    (tmp_path / "train").write_bytes(pickle.dumps(data.train))
    code = "import pickle, sys; t = pickle.load(open(sys.argv[1], 'rb')); print(t[3][0].sum())"
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "train"], capture_output=True, text=True
    )
    assert result.stdout.strip() == str(data.train[3][0].sum()), result.stderr


def test_missing_and_odd_items_are_corrupt_items(tmp_path):
    whole = load(write(tmp_path / "set", moments(10), LABELS), held_out=0.0)
    train = pickle.dumps(whole.train)
    shutil.rmtree(tmp_path / "set")
    del whole  # and what it had opened
    write(tmp_path / "set", moments(10), LABELS, z_7=None, z_4=b"1234")
    corrupt = []
    plan = StepBatches(10, 2, seed=0, num_steps=5)
    found = list(make_loader(pickle.loads(train), plan, on_corrupt=corrupt.append))
    assert [x.shape for x, _ in found] == [(2, 1, 8, 4, 4)] * 5
    reasons = {item.index: item.reason for item in corrupt}
    assert set(reasons) == {4, 7}
    assert "data.mdb': the key 'z-4' holds 4 bytes, and 'z-0' 512, float32 [8,4,4]" in reasons[4]
    assert "data.mdb' has no key 'z-7': it was not written to its end" in reasons[7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_0": b"\0" * 8 * 4 * 4 * 2}, r"'z-0' holds 256 bytes; moments, .* \[8,h,h\].*Encode"),
        ({"z_0": b"\0" * 4 * 4 * 4 * 4}, r"'z-0' holds 256 bytes"),  # [4,4,4]: samples
        ({"z_0": b""}, r"'z-0' holds 0 bytes"),
        ({"z_0": None}, r"has no key 'z-0'"),
        ({"y_4": b"cat"}, r"'y-4' holds b'cat'; it must be a whole number"),
        ({"y_4": b"-1"}, r"'y-4' holds b'-1'; it must be a whole number"),
        ({"y_4": None, "y_6": None}, r"no key 'y-4' nor 1 others of the 10 labels"),
        ({"length": b"ten"}, r"'length' holds b'ten'; it must be a whole number"),
        ({"length": None}, r"no key 'length': it was not written to its end, or holds something"),
        ({"length": b"0"}, r"has no latents: its 'length' is 0"),
        ({"length": b"12"}, r"no key 'y-10' nor 1 others of the 12 labels"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_key(tmp_path, changes, message):
    folder = write(tmp_path, moments(10), LABELS, **changes)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_file_that_is_cut_short_is_refused_before_it_is_read(tmp_path):
    """LMDB opens it, and a read past its end would kill this process."""
    folder = write(tmp_path, moments(10, size=32), LABELS)
    content = (folder / "data.mdb").read_bytes()
    (folder / "data.mdb").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"{len(content) - 1} bytes of {len(content)}: it is cut"):
        load(folder)
    (folder / "data.mdb").write_bytes(content)
    assert len(load(folder, held_out=0.0).train) == 10


def test_other_files_of_its_name_are_refused(tmp_path):
    for content in (b"", b"x" * 9000):
        (tmp_path / "data.mdb").write_bytes(content)
        with pytest.raises(ValueError, match=r"data.mdb' cannot be opened as an LMDB"):
            load(tmp_path)
    (tmp_path / "data.mdb").unlink()
    with pytest.raises(ValueError, match=r"neither data.mdb nor train/data.mdb"):
        load(tmp_path, format="lmdb")


def test_without_the_package_the_command_is_named(tmp_path, monkeypatch):
    folder = write(tmp_path, moments(10), LABELS)
    real = builtins.__import__

    def without(name, *args, **options):
        if name == "lmdb":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r'pip install "tread-zoo\[lmdb\]"'):
        load(folder)
