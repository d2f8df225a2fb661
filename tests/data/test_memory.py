"""Data in memory: digits, npz, Fashion-MNIST and CIFAR-10 as published."""

import logging

import numpy as np
import pytest
import torch

from tests.data.published_files import write_cifar10, write_fashion_mnist
from tread_zoo.registry import create


def images_of(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def save(tmp_path, **arrays):
    np.savez(tmp_path / "set.npz", **arrays)
    return str(tmp_path / "set.npz")


@pytest.mark.slow
def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    data = create("data", "digits")
    assert (data.name, data.image_size, data.channels) == ("digits", (8, 8), 1)
    assert data.num_classes == len(data.class_names) == 10
    assert (len(data.train), len(data.held_out)) == (1438, 359)
    assert data.held_out.labels.bincount().min() >= 35
    whole = create("data", "digits", held_out=0.0)
    assert whole.held_out is None
    back = whole.train.images.squeeze(1).double() * 16 / 255
    assert torch.equal(back.round(), torch.from_numpy(load_digits().images))


def test_npz_with_its_own_test_part(tmp_path):
    x, y = images_of(12, 6, 5), np.arange(12) % 3
    path = save(tmp_path, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    data = create("data", "npz", path=path)
    assert (data.name, data.image_size, data.channels) == ("set.npz", (6, 5), 1)
    assert data.class_names == ("0", "1", "2")
    assert torch.equal(data.train.images.squeeze(1), torch.from_numpy(x))
    assert data.train.labels.tolist() == y.tolist()
    assert torch.equal(data.held_out.images.squeeze(1), torch.from_numpy(x[:4]))


@pytest.mark.parametrize("keys", [("images", "labels"), ("arr_0", "arr_1")])
def test_npz_names_split_and_dropped_labels(tmp_path, keys):
    path = save(tmp_path, **{keys[0]: images_of(40, 6, 6), keys[1]: np.arange(40)[:, None] % 2})
    data = create("data", "npz", path=path)
    assert (len(data.train), len(data.held_out), data.num_classes) == (36, 4, 2)
    bare = create("data", "npz", path=path, num_classes=0)
    assert (bare.num_classes, bare.class_names, bare.train.labels.unique().tolist()) == (0, (), [0])
    assert create("data", "npz", path=path, num_classes=5).num_classes == 5
    unlabelled = create("data", "npz", path=save(tmp_path, images=images_of(10, 6, 6)))
    assert unlabelled.num_classes == 0


def test_npz_channels_first_and_last_and_padding(tmp_path):
    x = images_of(10, 6, 5, 3)
    last = create("data", "npz", path=save(tmp_path, images=x), held_out=0.0)
    path = save(tmp_path, images=x.transpose(0, 3, 1, 2))
    first = create("data", "npz", path=path, held_out=0.0)
    assert (last.image_size, last.channels) == ((6, 5), 3)
    assert torch.equal(last.train.images, first.train.images)
    padded = create("data", "npz", path=path, pad_to=[8, 9], held_out=0.0).train.images
    assert torch.equal(padded[:, :, 1:7, 2:7], first.train.images)
    assert (padded.shape[2:], int(padded.long().sum())) == ((8, 9), x.astype(int).sum())


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ({"images": images_of(10, 6, 6) / 255}, {}),
        ({"images": images_of(5, 7, 6, 5)}, {}),
        ({"images": images_of(10, 6, 6), "labels": np.arange(10) - 1}, {}),
        ({"images": images_of(10, 6, 6), "labels": np.arange(9)}, {}),
        ({"images": images_of(10, 6, 6), "labels": np.arange(10)}, {"num_classes": 5}),
        ({"pics": images_of(10, 6, 6)}, {}),
        ({"images": images_of(10, 6, 6)}, {"pad_to": 5}),
        ({"images": np.array([{}])}, {}),
    ],
)
def test_npz_refuses_what_would_train_wrongly(tmp_path, arrays, options):
    with pytest.raises(ValueError, match=r"set\.npz|held_out|pad_to|labels|allow_pickle"):
        create("data", "npz", path=save(tmp_path, **arrays), **options)


def test_classes_without_images_are_remarked_on(tmp_path, caplog):
    path = save(tmp_path, images=images_of(10, 6, 6), labels=np.arange(10) % 3 + 1)
    with caplog.at_level(logging.WARNING):
        data = create("data", "npz", path=path, held_out=0.0)
    assert data.num_classes == 4
    assert "1 of 4 classes have no image (0)" in caplog.text


def test_fashion_mnist_padded_unlabelled_and_split(tmp_path):
    x, y, test_x, test_y = write_fashion_mnist(tmp_path)
    data = create("data", "fashion_mnist", path=str(tmp_path))
    assert (data.image_size, data.channels, data.class_names[9]) == ((28, 28), 1, "Ankle boot")
    for part, images, labels in ((data.train, x, y), (data.held_out, test_x, test_y)):
        assert torch.equal(part.images[:, 0], torch.from_numpy(images))
        assert part.labels.tolist() == labels.tolist()
    given = {"pad_to": 32, "num_classes": 0, "held_out": 0.25}
    data = create("data", "fashion_mnist", path=str(tmp_path), **given)
    assert (data.image_size, data.num_classes, data.class_names) == ((32, 32), 0, ())
    assert (len(data.train), len(data.held_out)) == (30, 10)  # the test part is left alone
    together = torch.cat([data.train.images, data.held_out.images])
    assert int(together.long().sum()) == int(x.astype(np.int64).sum())
    with pytest.raises(ValueError, match="from 0 to 9"):
        create("data", "fashion_mnist", path=str(tmp_path), num_classes=7)


def test_cifar10_is_what_was_written_and_another_file_is_refused(tmp_path, monkeypatch):
    images, labels = write_cifar10(tmp_path, monkeypatch)
    data = create("data", "cifar10", path=str(tmp_path))
    assert (data.image_size, data.channels, data.class_names[6]) == ((32, 32), 3, "g")
    for part, own in ((data.train, slice(20)), (data.held_out, slice(20, 22))):
        assert torch.equal(part.images, torch.from_numpy(images[own]))
        assert part.labels.tolist() == labels[own]
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"a pickle of somebody")
    with pytest.raises(RuntimeError, match="corrupted"):
        create("data", "cifar10", path=str(tmp_path))
