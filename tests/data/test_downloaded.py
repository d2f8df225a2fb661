"""Fashion-MNIST and CIFAR-10 from files written here in their published formats."""

import gzip
import hashlib
import http.server
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.data.published_files import idx, write_cifar10, write_fashion_mnist
from tread_zoo.data import build_data
from tread_zoo.data.download import RemoteFile, cache_folder, fetch


@pytest.fixture
def fashion(tmp_path):
    """40 + 20 images in the four files; returns the folder and the arrays."""
    return tmp_path, write_fashion_mnist(tmp_path)


@pytest.fixture
def cifar(tmp_path):
    """Five files of 4 records and one of 2, in an archive; returns its folder and the records."""
    return tmp_path, write_cifar10(tmp_path)


def test_fashion_mnist_is_what_was_written(fashion):
    folder, (x, y, test_x, test_y) = fashion
    data = build_data("fashion_mnist", path=str(folder), download=False)
    assert (data.name, data.image_size, data.channels) == ("fashion_mnist", (28, 28), 1)
    assert (data.num_classes, data.class_names[9]) == (10, "Ankle boot")
    for part, images, labels in ((data.train, x, y), (data.held_out, test_x, test_y)):
        assert torch.equal(part.images[:, 0], torch.from_numpy(images))
        assert part.labels.tolist() == labels.tolist()


def test_fashion_mnist_padded_unlabelled_and_split(fashion):
    folder, (x, *_) = fashion
    data = build_data(
        "fashion_mnist", path=str(folder), pad_to=32, num_classes=0, held_out=0.25
    )  # fmt: skip
    assert (data.image_size, data.num_classes, data.class_names) == ((32, 32), 0, ())
    assert (len(data.train), len(data.held_out)) == (30, 10)  # the test part is left alone
    together = torch.cat([data.train.images, data.held_out.images])
    assert int(together.long().sum()) == int(x.astype(np.int64).sum())
    assert data.train.labels.unique().tolist() == [0]
    with pytest.raises(ValueError, match=r"data.num_classes=7: the set has 10 classes"):
        build_data("fashion_mnist", path=str(folder), num_classes=7)


def test_a_folder_that_torchvision_made_will_do(fashion, tmp_path):
    folder, (x, *_) = fashion
    inner = tmp_path / "root" / "FashionMNIST" / "raw"
    inner.mkdir(parents=True)
    for file in folder.glob("*.gz"):
        file.rename(inner / file.name)
    data = build_data("fashion_mnist", path=str(tmp_path / "root"), download=False)
    assert len(data.train) == len(x)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: whole[: len(whole) // 2], "no whole gzipped IDX file"),
        (lambda whole: b"<html>not found</html>", "no whole gzipped IDX file"),
        (lambda whole: gzip.compress(gzip.decompress(whole)[:-1]), r"shape \[40\] and 39 values"),
        (lambda whole: idx(np.zeros((4, 4), np.uint8)), "a file of 1 axes"),
        (lambda whole: idx(np.arange(39, dtype=np.uint8) % 10), "40 images.* 39 labels"),
        (lambda whole: idx(np.full(40, 10, np.uint8)), "one label from 0 to 9"),
    ],
)
def test_a_damaged_file_is_named_with_its_remedy(fashion, damage, words):
    folder, _ = fashion
    file = folder / "train-labels-idx1-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=words) as error:
        build_data("fashion_mnist", path=str(folder), download=False)
    assert file.name in str(error.value)
    assert "downloaded again" in str(error.value)


def test_cifar10_from_the_archive_and_unpacked(cifar):
    folder, records = cifar
    train = np.concatenate([records[f"data_batch_{n}"] for n in range(1, 6)])
    for _ in range(2):
        data = build_data("cifar10", path=str(folder), download=False)
        assert (data.name, data.image_size, data.channels) == ("cifar10", (32, 32), 3)
        assert (data.num_classes, data.class_names[6]) == (10, "frog")
        assert data.train.labels.tolist() == train[:, 0].tolist()
        # Red plane first, raster order: the pixel (row 2, column 5) of the green plane.
        assert data.train.images[3, 1, 2, 5] == train[3, 1 + 1024 + 2 * 32 + 5]
        assert len(data.train) == 20
        assert data.held_out.labels.tolist() == records["test_batch"][:, 0].tolist()
        with tarfile.open(folder / "cifar-10-binary.tar.gz") as archive:
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
            archive.extractall(folder, **safe)
    (folder / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"data_batch_3.bin.*unpack"):
        build_data("cifar10", path=str(folder), download=False)


def test_cifar10_that_is_damaged(cifar):
    folder, records = cifar
    archive = folder / "cifar-10-binary.tar.gz"
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], b"no archive"):
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz' is not the whole"):
            build_data("cifar10", path=str(folder), download=False)
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir()
    for name, content in records.items():
        (inner / f"{name}.bin").write_bytes(content.tobytes())
    (inner / "test_batch.bin").write_bytes(records["test_batch"].tobytes()[:-5])
    with pytest.raises(ValueError, match=r"6141 bytes, which are no whole records of 3073"):
        build_data("cifar10", path=str(folder), download=False)
    (inner / "test_batch.bin").write_bytes(bytes([77]) + bytes(3072))
    with pytest.raises(ValueError, match=r"label 77; CIFAR-10 has 0 … 9"):
        build_data("cifar10", path=str(folder), download=False)


@pytest.fixture
def server(tmp_path):
    """Serve `tmp_path`; return the address, and the list of what was asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            asked.append(self.command)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", asked
        running.shutdown()
        thread.join()


def test_files_are_fetched_once_checked_and_whole(tmp_path, server):
    """A server on this machine stands for the network."""
    source = tmp_path / "there" / "a.bin"
    source.parent.mkdir()
    source.write_bytes(b"content")
    address, asked = server
    file = RemoteFile("a.bin", f"{address}/there/a.bin", hashlib.md5(b"content").hexdigest())
    here = tmp_path / "here"
    fetch("some", [file], tmp_path / "alone", download=True)
    once = len(asked)
    with ThreadPoolExecutor(3) as pool:  # as several ranks would
        tasks = [pool.submit(fetch, "some", [file], here, download=True) for _ in range(3)]
    assert [task.result() for task in tasks] == [None] * 3
    assert len(asked) == 2 * once
    assert (here / "a.bin").read_bytes() == b"content"
    source.unlink()
    fetch("some", [file], here, download=True)  # it is there
    (here / "a.bin").unlink()
    with pytest.raises(ValueError, match=r"a.bin could not be downloaded into .*there/a.bin"):
        fetch("some", [file], here, download=True)
    source.write_bytes(b"kontent")
    with pytest.raises(ValueError, match=r"MD5 .*it should be .*put what you fetched into"):
        fetch("some", [file], here, download=True)
    assert not [path for path in here.iterdir() if path.name != ".download.lock"]


def test_what_is_missing_is_named_with_its_address(tmp_path, monkeypatch):
    monkeypatch.setenv("TREAD_ZOO_CACHE", str(tmp_path))
    assert cache_folder("cifar10") == tmp_path / "cifar10"
    with pytest.raises(ValueError, match=r"cifar10' lacks cifar-10-binary.tar.gz") as error:
        build_data("cifar10", download=False)
    for words in ("https://www.cs.toronto.edu", "data.download=true", str(tmp_path / "cifar10")):
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"lacks train-images-idx3-ubyte.gz, train-labels"):
        build_data("fashion_mnist", download=False)
    assert list(tmp_path.iterdir()) == []
