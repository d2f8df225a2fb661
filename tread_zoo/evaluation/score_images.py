"""Score images that lie there already: a folder of pictures or an .npz of ADM's, anyone's.

    images -> features -> distances to a reference, and agreement with labels where these are known

They go the way that `tread_zoo.evaluation.evaluate` sends its samples, so the kept images of a run
have its scores. What images do not tell (sampler, checkpoint, averaged weights or not) is "unknown"
in the record.

Dimensions: N images, B of a batch, C channels, H height, W width.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tread_zoo.data import ImageData, image_folder
from tread_zoo.data.from_folder import FileDataset
from tread_zoo.data.pictures import picture_channels
from tread_zoo.evaluation.agreement import digits_agreement
from tread_zoo.evaluation.evaluate import (
    UNKNOWN,
    EvaluationOptions,
    Plan,
    add_agreement,
    add_distances,
    check_evaluation,
    real_sets,
)
from tread_zoo.evaluation.extraction import ALONE, extract
from tread_zoo.evaluation.known import Known
from tread_zoo.evaluation.protocol import drawn_record
from tread_zoo.evaluation.references import PARTS
from tread_zoo.evaluation.sharing import Share
from tread_zoo.evaluation.sources import ADM_IMAGES, ImageSource, NpzImages, pixel_shape

ADM_LABELS = "arr_1"  # int [N], beside ADM's images
LOSSY = (".jpg", ".jpeg", ".webp")
AS_GIVEN = "bytes as they were given"


@dataclass(frozen=True)
class Samples:
    """Images to be scored.

    Args:
        name: for records.
        source: the images.
        labels: int64 [N], what each shows; None: not known.
        labelled_by: where the labels are from, for records; "unknown" without them.
        notes: what makes a score of them doubtful.
    """

    name: str
    source: ImageSource
    labels: Tensor | None
    labelled_by: str
    notes: Sequence[str] = ()


class FolderImages:
    """The pictures of a folder; one that cannot be read raises, for no other may take its place.

    Args:
        files: and how to read them.
        shape: [C,H,W], which all have.
    """

    def __init__(self, files: FileDataset, shape: tuple[int, int, int]):
        self.files, self.shape = files, shape

    def __len__(self) -> int:
        return len(self.files)

    def read(self, chosen: range) -> Tensor:
        """Return some of them, uint8 [B,C,H,W].

        Raises:
            ValueError: a picture that cannot be read, with its name.
        """
        return torch.stack([self.files[index][0] for index in chosen])


def open_samples(path: str, data: ImageData | None = None) -> Samples:
    """Return the images at a path; little more than headers is read.

    Args:
        path: a folder of pictures (grey if all of them are), or an .npz file with `arr_0`, uint8
            [N,H,W,C], and perhaps labels `arr_1`.
        data: sub-folders that have the names of its classes give labels; others are not known.

    Raises:
        ValueError: there is nothing of this kind.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return _open_folder(path, place, data)
    if place.suffix == ".npz" and place.is_file():
        return _open_npz(path, place)
    raise ValueError(
        f"samples={path!r} is neither a folder of pictures nor an .npz file with arr_0, as "
        "evaluation.keep_images and scripts/sample.py leave them."
    )


def record_path(samples: str) -> Path:
    """Return where the record of samples goes if nobody says: beside them, by their name."""
    place = Path(samples).expanduser().resolve()
    name = place.name if place.is_dir() else place.stem  # a folder's name has no suffix
    return place.with_name(f"{name}_score.json")


def score_images(
    samples: Samples,
    options: EvaluationOptions,
    data: ImageData | None = None,
    *,
    device: torch.device | None = None,
    share: Share = ALONE,
) -> dict[str, Any]:
    """Score images against a reference, and return a record as `evaluate` does.

    Args:
        samples: see `open_samples`.
        options: `num_images` is as many as there are, and `keep_images` None.
        data: whose part the reference is, where it is one; digits tell of agreement, too.
        device: of the extractor; None is the CPU.
        share: this process's part; the main one's record has the values.

    Raises:
        ValueError: images and reference do not fit each other, or the options.
    """
    device = device or torch.device("cpu")
    if data is not None and not data.num_classes:
        samples = replace(samples, labels=None, labelled_by=UNKNOWN)
    plan = _check(samples, options, data, device)
    extractor = plan.open(device)
    batch_size = options.batch_size
    found = None
    if extractor is not None:
        needs = plan.needs(generated=True)
        found = extract(samples.source, extractor, needs, batch_size=batch_size, share=share)
    reference, held_out = real_sets(plan, extractor, share, Known(), with_held_out=True, cache=None)
    record: dict[str, Any] = {"values": {}, "real": {}}
    record["protocol"] = {
        "data": plan.reference.name if data is None else data.name,
        "reference": plan.reference.name,
        "samples": samples.name,
        "labels": samples.labelled_by,
        **dict.fromkeys(("weights", "step", "precision"), UNKNOWN),
        "sampling": {"sampler": UNKNOWN},
        **drawn_record(
            len(samples.source),
            samples.source.shape,
            seed=options.seed,
            uint8=AS_GIVEN,
            decoder=UNKNOWN,
        ),
    }
    if not share.is_main:
        return record
    right = _count_right(samples, batch_size) if plan.judge == "svm" else None
    add_agreement(record, plan, extractor, found, held_out, samples.labels, right)
    add_distances(record, plan, extractor, found, reference, held_out)
    if found is not None:
        record["protocol"] |= {"uint8": AS_GIVEN, "samples_sha256": found.sha256}
    if samples.notes:
        record["protocol"]["notes"] = [*record["protocol"].get("notes", ()), *samples.notes]
    return record


def _check(
    samples: Samples, options: EvaluationOptions, data: ImageData | None, device: torch.device
) -> Plan:
    """Return what will be done; nothing is read."""
    count, shape = len(samples.source), samples.source.shape
    if options.num_images != count:
        raise ValueError(
            f"evaluation.num_images={options.num_images}, but samples={samples.name!r} has {count} "
            "images, and all are scored: leave it out, or see which are missing."
        )
    if options.keep_images is not None:
        raise ValueError(
            f"evaluation.keep_images={options.keep_images!r} is of no use: the images of "
            f"samples={samples.name!r} are kept already. Leave it out."
        )
    if data is None and options.reference in PARTS:
        raise ValueError(
            f"evaluation.reference={options.reference!r} is a part of data, and none are named: "
            "add data=… with its options (data=cifar10), or set evaluation.reference to a folder, "
            "ADM's .npz, or a file of scripts/make_reference.py."
        )
    if data is not None and data.codec.has_pixels:
        own = pixel_shape(data, device)
        if own != shape:
            raise ValueError(
                f"samples={samples.name!r} has images [C,H,W] of {shape}, and data={data.name!r} "
                f"of {own}: bring both to one size (data.image_size, data.pad_to) before scoring."
            )
    if data is not None and samples.labels is not None and samples.labels.max() >= data.num_classes:
        raise ValueError(
            f"samples={samples.name!r} has the label {int(samples.labels.max())}, and "
            f"data={data.name!r} has {data.num_classes} classes: name the data that they are of, "
            f"or leave {ADM_LABELS!r} out."
        )
    plan = check_evaluation(
        options,
        _as_data(samples) if data is None else data,
        labelled=samples.labels is not None,
        shape=shape,
        device=device,
    )
    files = getattr(plan.reference.source, "part", None)
    if shape[0] == 1 and isinstance(files, FileDataset) and not _all_grey(files):
        raise ValueError(
            f"{plan.reference.field} has pictures in colour, and samples={samples.name!r} are "
            "grey: write both in colour, or both in grey."
        )
    if plan.not_scored:
        raise ValueError(f"samples={samples.name!r} cannot be scored: {plan.not_scored}")
    if not plan.metrics and not plan.judge:
        raise ValueError("evaluation.metrics=[] leaves nothing to score; name some, as in [fid].")
    return plan


def _count_right(samples: Samples, batch_size: int) -> int:
    """Return how many digits are read as their labels."""
    assert samples.labels is not None
    right, count = 0, len(samples.source)
    for first in range(0, count, batch_size):
        chosen = range(first, min(first + batch_size, count))
        labels = samples.labels[chosen.start : chosen.stop]
        right += round(digits_agreement(samples.source.read(chosen), labels) * len(chosen))
    return right


def _open_folder(path: str, place: Path, data: ImageData | None) -> Samples:
    try:
        found = image_folder(path, held_out=0.0)
        files = found.train
        assert isinstance(files, FileDataset)
        files.channels = 1 if _all_grey(files) else 3
    except ValueError as error:
        reason = str(error).replace("data.path=", "samples=")
        raise ValueError(
            f"samples={path!r} is no folder of pictures of one size: {reason} (The folder of "
            "scripts/sample.py has a grid among its pictures: give its samples.npz.)"
        ) from error
    labels, labelled_by = None, UNKNOWN
    if found.class_names and data is not None and found.class_names == tuple(data.class_names):
        labels, labelled_by = torch.tensor(files.labels), "sub-folders, by the names of the classes"
    lossy = sum(file.lower().endswith(LOSSY) for file in files.files)
    notes = [] if not lossy else [
        f"{lossy} of {len(files)} samples are files of a lossy kind ({', '.join(LOSSY)}): what "
        "compression did to them counts as a difference from the reference. PNG files have none."
    ]  # fmt: skip
    source = FolderImages(files, (files.channels, *found.image_size))
    return Samples(found.name, source, labels, labelled_by, notes)


def _all_grey(pictures: FileDataset) -> bool:
    return all(picture_channels(file, file) == 1 for file in pictures.files)


def _open_npz(path: str, place: Path) -> Samples:
    try:
        with np.load(place, allow_pickle=False) as archive:
            names = archive.files
            array = archive[ADM_LABELS] if ADM_LABELS in names else None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ValueError(
            f"samples={path!r} cannot be read as an .npz file of plain arrays ({error}); copy or "
            "download it again."
        ) from error
    if ADM_IMAGES not in names:
        raise ValueError(
            f"samples={path!r} has {', '.join(sorted(names)) or 'nothing'}; images are wanted as "
            f"{ADM_IMAGES!r}, uint8 [N,H,W,C]."
        )
    source = NpzImages(place, field="samples")
    if array is None:
        return Samples(place.name, source, None, UNKNOWN)
    if array.dtype.kind not in "iu" or array.shape != (len(source),) or array.min() < 0:
        raise ValueError(
            f"samples={path!r}: {ADM_LABELS!r} is {array.dtype} {list(array.shape)}; labels of "
            f"{len(source)} images are wanted as so many whole numbers from 0 on. Leave the array "
            "out if it has something else."
        )
    return Samples(place.name, source, torch.from_numpy(array.astype(np.int64)), ADM_LABELS)


def _as_data(samples: Samples) -> ImageData:
    """Return the samples as data of no parts, for where no other data are named."""
    channels, *size = samples.source.shape
    return ImageData(
        name=samples.name,
        train=samples.source,  # type: ignore[arg-type]
        held_out=None,
        image_size=(size[0], size[1]),
        channels=channels,
        num_classes=0 if samples.labels is None else int(samples.labels.max()) + 1,
        class_names=(),
    )
