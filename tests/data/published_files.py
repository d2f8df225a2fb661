"""Small files in the formats in which Fashion-MNIST and CIFAR-10 are published."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10

NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
FASHION_MNIST = Path(__file__).parents[3] / "shared" / "data" / "fashion_mnist.npz"  # the real one


def write_fashion_mnist(folder):
    """Write 40 + 20 images and labels as torchvision unpacks them; return the four arrays."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 256, (40, 28, 28), np.uint8), np.arange(40, dtype=np.uint8) % 10,
        rng.integers(0, 256, (20, 28, 28), np.uint8), np.arange(20, dtype=np.uint8) % 10,
    ]  # fmt: skip
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, array in zip(NAMES, arrays, strict=True):
        header = struct.pack(">HBB", 0, 8, array.ndim)
        header += struct.pack(f">{array.ndim}I", *array.shape)
        (raw / f"{name}-ubyte").write_bytes(header + array.tobytes())
    return arrays


def write_cifar10(folder, monkeypatch):
    """Write five files of 4 images and one of 2, as torchvision unpacks them, and register their
    MD5 sums; return all images [22, 3, 32, 32] and labels."""
    rng, files = np.random.default_rng(0), {}
    images = rng.integers(0, 256, (22, 3072), np.uint8)
    labels = rng.integers(0, 10, 22).tolist()
    for n in range(6):
        own = slice(4 * n, 4 * n + 4)
        content = {"data": images[own], "labels": labels[own]}
        files["test_batch" if n == 5 else f"data_batch_{n + 1}"] = content
    files["batches.meta"] = {"label_names": list("abcdefghij")}
    (folder / "cifar-10-batches-py").mkdir()
    known = []
    for name, content in files.items():
        written = pickle.dumps(content)
        (folder / "cifar-10-batches-py" / name).write_bytes(written)
        known.append([name, hashlib.md5(written).hexdigest()])
    monkeypatch.setattr(CIFAR10, "train_list", known[:5])
    monkeypatch.setattr(CIFAR10, "test_list", known[5:6])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": known[6][1]})
    return images.reshape(22, 3, 32, 32), labels
