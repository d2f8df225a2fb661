"""Data by name, with the options of its function and no others."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tread_zoo.data.dataset import ImageData
from tread_zoo.data.from_cifar10 import cifar10
from tread_zoo.data.from_fashion_mnist import fashion_mnist
from tread_zoo.data.from_folder import image_folder
from tread_zoo.data.from_hf import hf
from tread_zoo.data.from_npz import npz
from tread_zoo.data.from_shards import webdataset
from tread_zoo.data.from_sklearn import digits
from tread_zoo.data.latents import latents
from tread_zoo.errors import unknown_name
from tread_zoo.kinds import check_keywords

SOURCES: dict[str, Callable[..., ImageData]] = {
    "cifar10": cifar10,
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "hf": hf,
    "image_folder": image_folder,
    "latents": latents,
    "npz": npz,
    "webdataset": webdataset,
}


CONTEXTS = ("context", "context_length", "context_column")  # options that older runs lack


def as_set(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of data by which runs are told apart: those of contexts only where they
    are not the usual ones, for runs from before they were there are runs without them."""
    parameters = inspect.signature(SOURCES[options["name"]]).parameters
    return {
        name: value
        for name, value in options.items()
        if name not in CONTEXTS or name not in parameters or value != parameters[name].default
    }


def build_data(name: str, **options: object) -> ImageData:
    """Return the data called `name`; `options` are the keywords of its function in `SOURCES`.

    Raises ValueError for an unknown name or option, one that is missing, or one of another kind.
    """
    if name not in SOURCES:
        raise unknown_name("data.name", name, SOURCES)
    parameters = inspect.signature(SOURCES[name]).parameters
    for option, value in options.items():
        if option not in parameters:
            near = difflib.get_close_matches(option, parameters, n=1, cutoff=0.4)
            hint = f" Did you mean data.{near[0]}?" if near else ""
            raise ValueError(
                f"data.{option}={value!r} is no option of data.name={name!r}.{hint} "
                f"Known: {', '.join(sorted(parameters))}."
            )
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and options.get(option) is None:
            raise ValueError(
                f"data.{option} is missing; data.name={name!r} needs it. "
                f"Set data.{option}=… on the command line or in the data configuration."
            )
    check_keywords("data", SOURCES[name], options)
    return SOURCES[name](**options)
