"""Digits and .npz files, by name; each bad input has its one clear error."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tread_zoo.data import build_data, npz

FASHION = Path(__file__).parents[2].parent / "shared" / "data" / "fashion_mnist.npz"


def _images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def _save(tmp_path, **arrays):
    file = tmp_path / "set.npz"
    np.savez(file, **arrays)
    return str(file)


def test_digits():
    data = build_data("digits")
    assert (data.name, data.image_size, data.channels) == ("digits", (8, 8), 1)
    assert data.num_classes == len(data.class_names) == 10
    assert len(data.train) + len(data.held_out) == 1797
    assert len(data.held_out) == 359
    image, label = data.train[0]
    assert (image.shape, image.dtype, type(label)) == ((1, 8, 8), torch.uint8, int)
    assert (int(data.train.images.min()), int(data.train.images.max())) == (0, 255)
    assert data.held_out.labels.bincount().min() >= 35
    assert build_data("digits", held_out=0.0).held_out is None


def test_digits_values_are_the_stored_ones():
    from sklearn.datasets import load_digits

    data = build_data("digits", held_out=0.0)
    stored = torch.from_numpy(load_digits().images)
    back = data.train.images.squeeze(1).double() * 16 / 255
    assert torch.equal(back.round(), stored)


def test_unknown_names_and_options_suggest_the_nearest():
    with pytest.raises(ValueError, match=r"data.name='digit' is unknown. Did you mean 'digits'"):
        build_data("digit")
    with pytest.raises(ValueError, match=r"data.heldout=0.1 .*data.held_out\?.*Known: held_out"):
        build_data("digits", heldout=0.1)
    with pytest.raises(ValueError, match=r"data.path is missing; data.name='npz'"):
        build_data("npz", pad_to=32)


def test_npz_with_its_own_test_part(tmp_path):
    x, y = _images(12, 6, 5), np.arange(12) % 3
    path = _save(tmp_path, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    data = build_data("npz", path=path)
    assert (data.image_size, data.channels, data.num_classes) == ((6, 5), 1, 3)
    assert data.class_names == ("0", "1", "2")
    assert (len(data.train), len(data.held_out)) == (12, 4)
    assert torch.equal(data.train.images.squeeze(1), torch.from_numpy(x))
    assert data.train.labels.tolist() == y.tolist()
    assert data.name == "set.npz"


@pytest.mark.parametrize(("images_key", "labels_key"), [("images", "labels"), ("arr_0", "arr_1")])
def test_npz_other_names_and_split(tmp_path, images_key, labels_key):
    path = _save(tmp_path, **{images_key: _images(40, 6, 6), labels_key: np.arange(40) % 2})
    data = npz(path)
    assert (len(data.train), len(data.held_out), data.num_classes) == (36, 4, 2)


def test_npz_channels_first_and_last_are_the_same(tmp_path):
    x = _images(10, 6, 5, 3)
    last = npz(_save(tmp_path, images=x), held_out=0.0)
    first = npz(_save(tmp_path, images=x.transpose(0, 3, 1, 2)), held_out=0.0)
    assert (last.image_size, last.channels) == ((6, 5), 3)
    assert torch.equal(last.train.images, first.train.images)
    assert last.train.images.is_contiguous()


def test_npz_without_labels_is_unconditional(tmp_path):
    data = npz(_save(tmp_path, images=_images(10, 6, 6)))
    assert (data.num_classes, data.class_names) == (0, ())
    assert data.train[0][1] == 0


def test_npz_labels_can_be_dropped_or_given_more_classes(tmp_path):
    path = _save(tmp_path, images=_images(10, 6, 6), labels=np.arange(10).reshape(10, 1))
    assert npz(path, num_classes=0).num_classes == 0
    assert npz(path, num_classes=0, held_out=0.0).train.labels.unique().tolist() == [0]
    assert npz(path, num_classes=12).num_classes == 12


def test_npz_keys_by_name(tmp_path):
    path = _save(tmp_path, pics=_images(10, 6, 6), kinds=np.zeros(10, int))
    assert npz(path, images_key="pics").num_classes == 0
    assert npz(path, images_key="pics", labels_key="kinds").num_classes == 1


def test_npz_pads_centred_with_zeros(tmp_path):
    x = _images(3, 6, 5)
    path = _save(tmp_path, images=x)
    padded = npz(path, pad_to=8, held_out=0.0).train.images[:, 0]
    assert padded.shape == (3, 8, 8)
    assert torch.equal(padded[:, 1:7, 1:6], torch.from_numpy(x))
    assert padded.sum() == x.sum()
    assert npz(path, pad_to=[6, 9]).image_size == (6, 9)


_GOOD = _images(10, 6, 6)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"images": _GOOD / 255}, {}, r"'images' has dtype float64 .*\(x \* 255\)"),
        ({"images": _GOOD / 127.5 - 1}, {}, r"from -1 to 1;.*\(\(x \+ 1\) \* 127.5\)"),
        ({"images": _GOOD.astype(int)}, {}, r"dtype int64 .*x.astype\(numpy.uint8\)"),
        ({"images": _GOOD * 300.0}, {}, r"values from .* to 76500; .*clip"),
        ({"images": _GOOD[:, 0]}, {}, r"shape \(10, 6\); images must be \[N,H,W\]"),
        ({"images": _images(5, 7, 6, 5)}, {}, r"neither axis 1 nor axis 3 can be the channels"),
        ({"images": _images(5, 3, 6, 3)}, {}, r"both of axes 1 and 3 could be the channels"),
        ({"images": _GOOD[:0]}, {}, r"shape \(0, 6, 6\) is empty"),
        ({"images": _GOOD, "labels": np.zeros(9, int)}, {}, r"'labels' has shape \(9,\) for 10"),
        ({"images": _GOOD, "labels": np.zeros(10)}, {}, r"'labels' has dtype float64; labels must"),
        ({"images": _GOOD, "labels": np.arange(10) - 1}, {}, r"has the label -1; .*num_classes=0"),
        (
            {"images": _GOOD, "labels": np.arange(10)},
            {"num_classes": 5},
            r"num_classes=5, but .*label 9; .*0 … 4. Use at least 10",
        ),
        ({"images": _GOOD}, {"num_classes": 5}, r"num_classes=5, but .* has no labels; add"),
        ({"images": _GOOD}, {"num_classes": -1}, r"num_classes=-1 must be 0"),
        ({"pics": _GOOD}, {}, r"none of the known names .*it has: pics. Set data.images_key"),
        ({"images": _GOOD}, {"images_key": "x"}, r"data.images_key='x' is not in .*has: images"),
        ({"images": _GOOD}, {"labels_key": "y"}, r"data.labels_key='y' is not in .*has: images"),
        (
            {"x_train": _GOOD, "y_train": np.zeros(10, int), "x_test": _GOOD},
            {},
            r"no 'y_test' for 'x_test'",
        ),
        ({"x_train": _GOOD, "x_test": _GOOD[:, 1:]}, {}, r"'x_train' has .* 6, 6\), 'x_test' of"),
        ({"images": _GOOD}, {"pad_to": 5}, r"data.pad_to=5 does not fit: .* 6x6; give"),
        ({"images": _GOOD}, {"held_out": 1.5}, r"data.held_out=1.5"),
        ({"images": np.array([{}])}, {}, r"cannot be read as an .npz file of plain arrays"),
    ],
)
def test_npz_refuses(tmp_path, arrays, options, message):
    path = _save(tmp_path, **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        npz(path, **options)
    if not {"held_out", "num_classes"} & set(options):
        assert repr(path) in str(caught.value)


def test_npz_files_that_cannot_be_read(tmp_path):
    missing = str(tmp_path / "no.npz")
    with pytest.raises(ValueError, match=r"no.npz' does not exist; set data.path"):
        npz(missing)
    with pytest.raises(ValueError, match=r"is a folder; .*data.name=image_folder"):
        npz(str(tmp_path))
    bare = tmp_path / "bare.npy"
    np.save(bare, _GOOD)
    with pytest.raises(ValueError, match=r"bare.npy' cannot be read .*one bare array"):
        npz(str(bare))
    empty = tmp_path / "empty.npz"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty.npz' cannot be read"):
        npz(str(empty))


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.95])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_cut_short(tmp_path, keep, save):
    file = tmp_path / "cut.npz"
    save(file, images=_images(50, 16, 16))
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match=r"cut.npz' cannot be read .*download it again"):
        npz(str(file))


def test_npz_with_a_flipped_byte(tmp_path):
    file = tmp_path / "flipped.npz"
    np.savez_compressed(file, images=_images(50, 16, 16))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"flipped.npz' cannot be read"):
        npz(str(file))


def test_fashion_mnist():
    if not FASHION.exists():
        pytest.skip(f"{FASHION.name} is not here")
    data = build_data("npz", path=str(FASHION), pad_to=32)
    assert (len(data.train), len(data.held_out)) == (60000, 10000)
    assert (data.image_size, data.channels, data.num_classes) == ((32, 32), 1, 10)
