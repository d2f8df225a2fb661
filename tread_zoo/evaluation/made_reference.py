"""The file of `scripts/make_reference.py`: one safetensors file that says what it was taken with.

    <features>.mean, <features>.covariance   float64 [D], [D, D]
    <features>.rows                          float32 [N, D], where they were kept
    metadata "reference"                     the fields of `Made`, as JSON

Dimensions: N images, D features.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tread_zoo.evaluation.extraction import FeatureSet, Needs
from tread_zoo.evaluation.extractors import FEATURES, SPATIAL, Extractor
from tread_zoo.evaluation.features import INCEPTION_EXTRACTOR
from tread_zoo.evaluation.frechet import Statistics

MADE_SUFFIX = ".safetensors"
_KEY = "reference"


@dataclass(frozen=True)
class Made:
    """What a reference says of itself.

    Args:
        about: the data, in words.
        sha256: of the images, see `tread_zoo.evaluation.sources`.
        num_images, image_size, channels: of the images, (H, W) as they were given to the extractor.
        extractor, extractor_sha256: its label, and the hash of its weights.
        resize: what the extractor did to an image first.
        torch, torch_fidelity: versions.
        statistics, rows: names of the features that are in the file.
    """

    about: str
    sha256: str
    num_images: int
    image_size: tuple[int, int]
    channels: int
    extractor: str
    extractor_sha256: str
    resize: str
    torch: str
    torch_fidelity: str
    statistics: frozenset[str]
    rows: frozenset[str]


def reference_needs(extractor: str, *, keep_features: bool) -> Needs:
    """Return what a reference is made of: all statistics that the extractor has, and, if they are
    to be kept, the features of every image."""
    spatial = {SPATIAL} if extractor == INCEPTION_EXTRACTOR else set()
    rows = frozenset({FEATURES} if keep_features else ())
    return Needs(frozenset({FEATURES, *spatial}), rows)


def check_out(path: Path) -> None:
    """Raise ValueError unless a reference can be written to `path` and found again by its name."""
    if path.suffix != MADE_SUFFIX:
        raise ValueError(f"out={str(path)!r} must end in {MADE_SUFFIX}, as references do.")
    if path.exists():
        raise ValueError(f"out={str(path)!r} is there already; remove it, or name another file.")


def write_made(path: Path, found: FeatureSet, extractor: Extractor, about: str) -> Made:
    """Write the features of some images to one file, which appears whole; return what it says."""
    import torch
    import torch_fidelity
    from safetensors.torch import save_file

    assert found.count is not None
    assert found.shape is not None
    channels, height, width = found.shape
    made = Made(
        about=about,
        sha256=found.sha256,
        num_images=found.count,
        image_size=(height, width),
        channels=channels,
        extractor=extractor.label,
        extractor_sha256=extractor.sha256,
        resize=extractor.weights.resize,
        torch=str(torch.__version__),
        torch_fidelity=torch_fidelity.__version__,
        statistics=frozenset(found.statistics),
        rows=frozenset(found.rows),
    )
    tensors = {f"{name}.rows": rows.contiguous() for name, rows in found.rows.items()}
    for name, statistics in found.statistics.items():
        tensors[f"{name}.mean"] = statistics.mean.contiguous()
        tensors[f"{name}.covariance"] = statistics.covariance.contiguous()
    facts = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(made).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={_KEY: json.dumps(facts)})
    partial.replace(path)
    return made


def read_made_facts(path: Path) -> Made:
    """Return what a file says of itself; its tensors are not read.

    Raises:
        ValueError: it is no file of make_reference.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})[_KEY])
            facts |= {name: frozenset(facts[name]) for name in ("statistics", "rows")}
            return Made(**{**facts, "image_size": tuple(facts["image_size"])})
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"evaluation.reference={str(path)!r} is no reference ({type(error).__name__}: {error})."
            f" scripts/make_reference.py out={path} makes one."
        ) from error


def read_made(path: Path) -> FeatureSet:
    """Return all that a file has.

    Raises:
        ValueError: it is no file of make_reference.
    """
    from safetensors.torch import load_file

    made, tensors = read_made_facts(path), load_file(path)
    return FeatureSet(
        made.num_images,
        (made.channels, *made.image_size),
        made.sha256,
        {
            name: Statistics(
                tensors[f"{name}.mean"], tensors[f"{name}.covariance"], made.num_images
            )
            for name in made.statistics
        },
        {name: tensors[f"{name}.rows"] for name in made.rows},
    )
