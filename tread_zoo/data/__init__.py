"""Images to train on: sources by name, which images a step sees, and their range of values."""

from tread_zoo.data.batches import StepBatches
from tread_zoo.data.build import SOURCES, build_data
from tread_zoo.data.codec import PIXELS, Codec
from tread_zoo.data.dataset import ArrayDataset, ImageData
from tread_zoo.data.from_cifar10 import cifar10
from tread_zoo.data.from_fashion_mnist import fashion_mnist
from tread_zoo.data.from_folder import image_folder
from tread_zoo.data.from_hf import hf
from tread_zoo.data.from_npz import npz
from tread_zoo.data.from_shards import webdataset
from tread_zoo.data.from_sklearn import digits
from tread_zoo.data.loader import CorruptItem, make_loader, read_items, told_of_dead_workers
from tread_zoo.data.ranges import to_model_range, to_uint8

__all__ = [
    "PIXELS",
    "SOURCES",
    "ArrayDataset",
    "Codec",
    "CorruptItem",
    "ImageData",
    "StepBatches",
    "build_data",
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
    "told_of_dead_workers",
    "webdataset",
]
