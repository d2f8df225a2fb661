"""What samples are compared with: a part of the data, or a path. Checked before any work.

    train, held_out      the part of the run's own data
    a folder             of pictures, of the samples' size
    ADM's .npz           images (`arr_0`), or Inception's statistics (`mu`, `sigma` and, for sfid,
                         `mu_s`, `sigma_s`), or both: then the Fréchet distances take the
                         statistics, which may be of more images than are in the file; other
                         extractors than Inception see the images alone
    .safetensors         of scripts/make_reference.py: statistics with the extractor, the size and
                         the rules that they were taken with, and, if asked for, every image's
                         features

Statistics allow Fréchet distances alone. They say nothing of how their images were resized: a file
of another project is as comparable as its author says, one of make_reference is checked.

Dimensions: C channels, H height, W width, D features.
"""

import functools
import hashlib
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tread_zoo.data import ImageData, image_folder
from tread_zoo.data.codec import PixelCodec
from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.extraction import FeatureSet, Needs, extract
from tread_zoo.evaluation.extractors import (
    FEATURES,
    SPATIAL,
    Extractor,
    Weights,
    file_sha256,
)
from tread_zoo.evaluation.features import INCEPTION_EXTRACTOR
from tread_zoo.evaluation.frechet import Statistics
from tread_zoo.evaluation.made_reference import (
    MADE_SUFFIX,
    Made,
    read_made,
    read_made_facts,
    write_made,
)
from tread_zoo.evaluation.metrics import FRECHET, check_counts, check_few, needs_of
from tread_zoo.evaluation.sharing import Share
from tread_zoo.evaluation.sources import (
    ADM_IMAGES,
    ImageSource,
    NpzImages,
    PartImages,
    npy_header,
    source_sha256,
)

PARTS = ("train", "held_out")
ALL_THE_SAME = (
    "evaluation.allow_few_images=true takes the distance all the same, and the record notes it."
)
# name of features -> arrays of ADM's files, and how many features Inception has there
_ADM = {FEATURES: ("mu", "sigma", 2048), SPATIAL: ("mu_s", "sigma_s", 2023)}


@dataclass(frozen=True)
class Reference:
    """The real side of a score.

    Args:
        field: how errors name it.
        name: for records: `train`, `held_out`, or a path's last part.
        shape: [C,H,W] of its images; None where a file does not say.
        source: its images, where there are some.
        made: what a file of make_reference says of itself.
        file: a file of statistics.
        statistics: names of the features that `file` has statistics of.
    """

    field: str
    name: str
    shape: tuple[int, ...] | None
    source: ImageSource | None = None
    made: Made | None = None
    file: Path | None = None
    statistics: frozenset[str] = frozenset()


def check_reference_name(value: str) -> None:
    """Raise ValueError unless `value` is a part's name, or a path to something that is there."""
    if value in PARTS or Path(value).expanduser().exists():
        return
    known = f"{unknown_name('evaluation.reference', value, PARTS)}"
    raise ValueError(
        f"{known} It may also be a folder of pictures, ADM's .npz, or a file of "
        "scripts/make_reference.py; there is none of this name."
    )


def open_part(
    field: str,
    value: str,
    data: ImageData,
    *,
    shape: tuple[int, int, int] | None = None,
    count: int | None = None,
    device: torch.device | None = None,
    replace_corrupt: bool = False,
) -> Reference:
    """Return a part of the data as a reference.

    Args:
        field: how errors name it.
        value: `train` or `held_out`.
        data: whose part.
        shape: [C,H,W] of its images; None: as they are stored.
        count: images, evenly spaced; None takes all.
        device: where latents are decoded.
        replace_corrupt: see `PartImages`.

    Raises:
        ValueError: an unknown part, or one that the data do not have.
    """
    if value not in PARTS:
        raise unknown_name(field, value, PARTS)
    part = data.train if value == "train" else data.held_out
    if part is None:
        raise ValueError(f"{field}=held_out, but {data.name} has no held-out part.")
    size = len(part)  # type: ignore[arg-type]
    if count is not None and count > size:
        raise ValueError(
            f"evaluation.num_reference={count}, but the part {value} of {data.name} has {size} "
            "images; null takes all of them."
        )
    shape = shape or (data.channels, *data.image_size)
    source = PartImages(data, part, shape, count, device, replace=replace_corrupt)
    decoded = "" if isinstance(data.codec, PixelCodec) else ", decoded latents"
    return Reference(f"{field}={value!r}", f"{value}{decoded}", shape, source)


def open_reference(
    value: str,
    data: ImageData,
    *,
    shape: tuple[int, int, int] | None = None,
    count: int | None = None,
    device: torch.device | None = None,
) -> Reference:
    """Return the reference that the setting `value` names; of files, little more than headers is
    read. See `open_part` for the other arguments.

    A picture of a folder that cannot be read is an error when it is met. In a part of the data,
    which a run trains on all the same, another takes its place, and the record notes how many.

    Raises:
        ValueError: it is not there, or is none of the kinds above.
    """
    check_reference_name(value)
    field = f"evaluation.reference={value!r}"
    if value in PARTS:
        return open_part(
            "evaluation.reference", value, data, shape=shape, count=count, device=device,
            replace_corrupt=True,
        )  # fmt: skip
    path = Path(value).expanduser()
    if path.is_dir():
        try:
            found = image_folder(
                str(path), channels=shape[0] if shape else data.channels, held_out=0.0
            )
        except ValueError as error:
            raise ValueError(f"{field} is no folder of pictures of one size: {error}") from error
        shape = (found.channels, *found.image_size)
        return Reference(field, f"{path.name}/", shape, PartImages(found, found.train, shape))
    if path.suffix == ".npz":
        return _open_npz(field, path)
    if path.suffix == MADE_SUFFIX:
        made = read_made_facts(path)
        return Reference(
            field, path.name, (made.channels, *made.image_size), None, made, path, made.statistics
        )
    raise ValueError(
        f"{field} is neither a folder of pictures, nor an .npz file, nor a {MADE_SUFFIX} file of "
        "scripts/make_reference.py."
    )


def check_reference(
    reference: Reference,
    weights: Weights,
    metrics: Collection[str],
    shape: tuple[int, ...] | None,
    *,
    allow_few_images: bool = False,
) -> None:
    """Raise ValueError where samples [C,H,W] of `shape` cannot be scored against a reference.

    Args:
        shape: None: not known yet, and not checked.
        allow_few_images: take Fréchet distances of no more images than features.
    """
    field, made = reference.field, reference.made
    if made is not None:
        own = file_sha256(weights.file)
        if made.extractor_sha256 != own:
            raise ValueError(
                f"{field} was made with the features {made.extractor}, and the samples' are "
                f"{weights.label}@{own[:8]}: a distance from one to the other means nothing. Set "
                "evaluation.extractor to the file it was made with, or make it again with "
                "scripts/make_reference.py."
            )
        if made.resize != weights.resize:
            raise ValueError(
                f"{field} was made with the resizing {made.resize!r}, and the samples' is "
                f"{weights.resize!r}; make it again with scripts/make_reference.py."
            )
    elif reference.statistics and not reference.source and not _knows_adm(weights):
        raise ValueError(
            f"{field} has statistics of Inception's features, and extractor={weights.extractor!r}: "
            f"set evaluation.extractor={INCEPTION_EXTRACTOR}, or make a reference of these "
            "features with scripts/make_reference.py."
        )
    if not (reference.shape is None or shape is None or tuple(reference.shape) == tuple(shape)):
        raise ValueError(
            f"{field} has images [C,H,W] of {tuple(reference.shape)}, and the samples are "
            f"{tuple(shape)}: bring them to that size (scripts/make_reference.py with "
            "data.image_size, or data.pad_to) before scoring."
        )
    _check_enough(reference, metrics)
    if not allow_few_images:
        _check_few(reference, metrics, weights)


def _knows_adm(weights: Weights) -> bool:
    """Return whether the statistics of ADM's files are of these features."""
    return weights.extractor == INCEPTION_EXTRACTOR


def _check_few(reference: Reference, metrics: Collection[str], weights: Weights) -> None:
    """Raise ValueError where it has no more images than a Fréchet distance takes; statistics that
    do not say of how many they are, are believed."""
    if reference.made is not None:
        count = reference.made.num_images
    elif reference.source is not None:
        count = len(reference.source)
    else:
        return
    given = reference.statistics if reference.made is None and _knows_adm(weights) else frozenset()
    check_few(
        f"{reference.field} has {count} image(s)", count,
        [m for m in metrics if FRECHET.get(m) not in given], weights,
        ways="Give a reference of {enough} images or more (evaluation.num_reference takes fewer "
        f"than there are), or evaluation.metrics=[{{others}}]; {ALL_THE_SAME}",
    )  # fmt: skip


def _check_enough(reference: Reference, metrics: Collection[str]) -> None:
    """Raise ValueError where it lacks what a metric asks for."""
    field, made = reference.field, reference.made
    if reference.source is not None:
        check_counts("reference", len(reference.source), metrics, generated=False)
        return
    if made is not None:
        check_counts("reference", made.num_images, metrics, generated=False)
    for metric in metrics:
        needs = needs_of([metric], generated=False)
        missing = needs.statistics - reference.statistics
        if missing and made is None:
            arrays = ", ".join(name for one in sorted(missing) for name in _ADM[one][:2])
            raise ValueError(
                f"{field} has no {arrays}, which {metric!r} takes; leave it out of "
                "evaluation.metrics, or give the images themselves."
            )
        if missing or not needs.rows <= (made.rows if made else frozenset()):
            asked = [m for m in metrics if FRECHET.get(m, "") in reference.statistics]
            raise ValueError(
                f"{field} has statistics alone, and {metric!r} compares images with images: make "
                "it with keep_features=true (scripts/make_reference.py), give the images "
                f"themselves, or set evaluation.metrics=[{','.join(asked) or 'fid'}]."
            )


def reference_features(
    reference: Reference,
    extractor: Extractor,
    needs: Needs,
    *,
    batch_size: int,
    share: Share,
    cache: Path | None = None,
) -> FeatureSet:
    """Return a reference's features: those of its file, and the others from its images.

    Args:
        cache: a folder in which features of images are kept for the next call. Their name is made
            of the hashes of the images and of the extractor, so that what is found there is of
            these images, which are read once more to be sure.

    Raises:
        ValueError: the file is damaged, or an image cannot be read.
    """
    if reference.made is not None:
        assert reference.file is not None
        return read_made(reference.file)
    if reference.source is not None and not (extractor and _knows_adm(extractor.weights)):
        reference = replace(reference, file=None, statistics=frozenset())
    given = {}
    if reference.file is not None:
        given = _read_adm(reference.file, needs.statistics & reference.statistics)
    rest = Needs(needs.statistics - given.keys(), needs.rows)
    found = FeatureSet(None, reference.shape, "")
    if reference.source is not None and (rest.names or reference.file is None):
        take = functools.partial(
            extract, reference.source, extractor, rest, batch_size=batch_size, share=share
        )
        if cache is None or share.num_processes > 1:
            found = take()
        else:
            digest = source_sha256(reference.source, batch_size)
            words = (digest, extractor.sha256, extractor.weights.resize, extractor.device.type,
                     sorted(rest.statistics), sorted(rest.rows), torch.__version__)  # fmt: skip
            name = hashlib.sha256(repr(words).encode()).hexdigest()
            file = cache / f"{name}{MADE_SUFFIX}"
            if not file.exists():
                write_made(file, take(), extractor, reference.name)
            replaced = getattr(reference.source, "replaced", ())
            found = replace(read_made(file), num_replaced=len(replaced))
    if reference.file is None:
        return found
    statistics = {**found.statistics, **given}
    return replace(found, statistics=statistics, sha256=file_sha256(reference.file))


def _open_npz(field: str, path: Path) -> Reference:
    """Return the reference that ADM's .npz is; arrays are not unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
        statistics = {key for key, (mean, sigma, _) in _ADM.items() if {mean, sigma} <= names}
        shapes = {n: npy_header(path, n)[0] for key in statistics for n in _ADM[key][:2]}
        source = NpzImages(path) if ADM_IMAGES in names else None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise ValueError(
            f"{field} cannot be read as an .npz file ({error}); copy or download it again."
        ) from error
    for key in statistics:
        mean, sigma, size = _ADM[key]
        if shapes[mean] != (size,) or shapes[sigma] != (size, size):
            raise ValueError(
                f"{field}: {mean!r} is {list(shapes[mean])} and {sigma!r} {list(shapes[sigma])}; "
                f"Inception has {size} of these features. Statistics of other features are made by "
                "scripts/make_reference.py."
            )
    if source is None and FEATURES not in statistics:
        raise ValueError(
            f"{field} has {', '.join(sorted(names)) or 'nothing'}; images as {ADM_IMAGES!r} "
            "(uint8 [N,H,W,C]) or statistics as 'mu' and 'sigma' are wanted. "
            "scripts/make_reference.py makes a reference of other data."
        )
    return Reference(
        field,
        path.name,
        source.shape if source else None,
        source,
        file=path if statistics else None,
        statistics=frozenset(statistics),
    )


def _read_adm(path: Path, wanted: Collection[str]) -> dict[str, Statistics]:
    """Return the statistics of ADM's .npz by name of the features."""
    found = {}
    with np.load(path, allow_pickle=False) as archive:
        for key in wanted:
            mean, sigma = (torch.from_numpy(archive[name]).double() for name in _ADM[key][:2])
            found[key] = Statistics(mean, sigma, count=None)
    return found
