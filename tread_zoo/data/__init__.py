"""Training data: registered sources, the batches of each step, and codecs to and from pixels."""

import tread_zoo.data.latents
import tread_zoo.data.table  # noqa: F401  (both register)
from tread_zoo.data.builtin import digits
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
    prefetch_to_device,
    read_items,
)

__all__ = [
    "PIXELS",
    "ArrayDataset",
    "Codec",
    "CorruptItem",
    "CorruptLog",
    "ImageData",
    "StepBatches",
    "digits",
    "make_loader",
    "prefetch_to_device",
    "read_items",
    "to_model_range",
    "to_uint8",
]
