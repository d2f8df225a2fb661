"""Images to train on: sources by name, which images a step sees, and their range of values."""

from tread_zoo.data.batches import StepBatches
from tread_zoo.data.build import SOURCES, build_data
from tread_zoo.data.codec import PIXELS, Codec
from tread_zoo.data.dataset import ArrayDataset, ImageData
from tread_zoo.data.from_folder import image_folder
from tread_zoo.data.from_npz import npz
from tread_zoo.data.from_shards import webdataset
from tread_zoo.data.from_sklearn import digits
from tread_zoo.data.loader import make_loader
from tread_zoo.data.ranges import to_model_range, to_uint8

__all__ = [
    "PIXELS",
    "SOURCES",
    "ArrayDataset",
    "Codec",
    "ImageData",
    "StepBatches",
    "build_data",
    "digits",
    "image_folder",
    "make_loader",
    "npz",
    "to_model_range",
    "to_uint8",
    "webdataset",
]
