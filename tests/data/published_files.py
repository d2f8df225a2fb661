"""Small files in the formats in which Fashion-MNIST and CIFAR-10 are published."""

import io
import struct
import tarfile

import numpy as np

NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


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


def write_cifar10(folder):
    """Write an archive of five files of 4 records and one of 2; return the records by name."""
    rng = np.random.default_rng(0)
    records = {}
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
            labels = rng.integers(0, 10, (2 if "test" in name else 4, 1), np.uint8)
            pixels = rng.integers(0, 256, (len(labels), 3072), np.uint8)
            records[name] = np.concatenate([labels, pixels], axis=1)
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            entry.size = records[name].nbytes
            archive.addfile(entry, io.BytesIO(records[name].tobytes()))
    return records
