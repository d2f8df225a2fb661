"""Images to train on: sources by name, which images a step sees, and their range of values."""

import tread_zoo.data.latents  # noqa: F401  (registers)
from tread_zoo.data.dataset import (
    PIXELS,
    ArrayDataset,
    Codec,
    ImageData,
    to_model_range,
    to_uint8,
)
from tread_zoo.data.loader import (
    CorruptItem,
    CorruptLog,
    StepBatches,
    make_loader,
    read_items,
)
from tread_zoo.data.memory import cifar10, digits, fashion_mnist, npz
from tread_zoo.data.table import hf, image_folder, webdataset

__all__ = [
    "PIXELS",
    "ArrayDataset",
    "Codec",
    "CorruptItem",
    "CorruptLog",
    "ImageData",
    "StepBatches",
    "cifar10",
    "digits",
    "fashion_mnist",
    "hf",
    "image_folder",
    "make_loader",
    "npz",
    "read_items",
    "to_model_range",
    "to_uint8",
    "webdataset",
]
