"""Distances between generated and real images, with the protocol that makes them comparable.

fid: Fréchet distance of two Gaussians, |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)) (Heusel et al.
  2017). kid, kid_std: squared kernel distance, cubic kernel, mean and deviation over 100 subsets
  (Bińkowski et al. 2018). Unbiased, so it may fall below 0; between sets that share images, or
  that have each class in one proportion, it does.
precision, recall: fraction of generated images that lie in the ball of some real one, out to its
  3rd nearest neighbour, and the reverse (Kynkäänniemi et al. 2019).
isc, isc_std: exp of the mean KL of the class given an image from the class at large, over 10
  parts (Salimans et al. 2016).

Dimensions: N generated images, M reference images, C channels, H height, W width.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.features import (
    DIGITS_EXTRACTOR,
    DIGITS_WEIGHTS,
    INCEPTION_EXTRACTOR,
    extractor_id,
    find_inception_weights,
    load_features,
    register_classifier_extractor,
    register_digits_extractor,
)

EXTRACTORS = (DIGITS_EXTRACTOR, INCEPTION_EXTRACTOR)
FEATURES_SUFFIX = ".safetensors"  # of the files that scripts/make_features.py writes
METRICS = ("fid", "kid", "precision", "recall", "isc")
KID_SUBSETS = 100
KID_SUBSET_SIZE = 1000
_ISC_PARTS = 10
_NEIGHBOURS = 3

# The fewest images with which each is defined.
_FEWEST = {"fid": 2, "kid": 2, "precision": _NEIGHBOURS + 1, "recall": _NEIGHBOURS + 1}
_FEWEST_GENERATED = {**_FEWEST, "isc": _ISC_PARTS}

# torch-fidelity's names -> ours, with the metric that asks for each.
_VALUES = {
    "fid": {"frechet_inception_distance": "fid"},
    "kid": {"kernel_inception_distance_mean": "kid", "kernel_inception_distance_std": "kid_std"},
    "precision": {"precision": "precision"},
    "recall": {"recall": "recall"},
    "isc": {"inception_score_mean": "isc", "inception_score_std": "isc_std"},
}


def score(
    generated: Tensor,
    reference: Tensor,
    *,
    extractor: str = DIGITS_EXTRACTOR,
    metrics: Sequence[str] = ("fid", "kid", "precision", "recall"),
    seed: int = 0,
    batch_size: int = 64,
    inception_weights: str | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    cache: Path | None = None,
) -> dict[str, object]:
    """Return a record: the values and all that they depend on.

    generated uint8 [N,C,H,W], reference uint8 [M,C,H,W]; grey images (C = 1) are repeated to 3
    channels. `seed` chooses the subsets of kid and the parts of isc. kid's subsets have 1000
    images, or all of the smaller set where it has fewer: the size is in the record. The
    features of the reference are kept in the folder `cache` and taken from there where its images
    and the extractor are the same; None keeps nothing. Only a folder of one's own will do: its
    files are pickles. The global random numbers are left as they were.

    The record: values {name: float}, extractor (name@hash of its weights), num_generated,
    num_reference, image_size [H, W], channels, seed, kid_subset_size (None without kid),
    torch_fidelity (version).

    Raises ValueError for unknown names, images that do not fit, too few of them, or weights that
    are not there.
    """
    for metric in metrics:
        if metric not in METRICS:
            raise unknown_name("metrics", metric, METRICS)
    if not metrics:
        raise ValueError(f"metrics={metrics!r} names none; use some of {', '.join(METRICS)}.")
    check_extractor("extractor", extractor)
    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    _check_images(generated, reference, extractor, metrics)
    name, weights = _prepare_extractor(extractor, inception_weights)
    subset_size = min(KID_SUBSET_SIZE, len(generated), len(reference))

    import torch_fidelity

    with torch.random.fork_rng(devices=[]):
        found = torch_fidelity.calculate_metrics(
            input1=_RgbImages(generated),
            input2=_RgbImages(reference),
            fid="fid" in metrics,
            kid="kid" in metrics,
            prc="precision" in metrics or "recall" in metrics,
            isc="isc" in metrics,
            isc_splits=_ISC_PARTS,
            kid_subsets=KID_SUBSETS,
            kid_subset_size=subset_size,
            prc_neighborhood=_NEIGHBOURS,
            feature_extractor=name,
            feature_extractor_weights_path=str(weights),
            cuda=device == "cuda",
            batch_size=batch_size,
            rng_seed=seed,
            cache=cache is not None,
            cache_root=None if cache is None else str(cache),
            input2_cache_name=None if cache is None else _content_name(reference),
            save_cpu_ram=True,
            verbose=False,
        )
    values = {ours: found[theirs] for m in metrics for theirs, ours in _VALUES[m].items()}
    return {
        "values": values,
        "extractor": extractor_id(weights.stem if is_file(extractor) else extractor, weights),
        "num_generated": len(generated),
        "num_reference": len(reference),
        "image_size": list(generated.shape[2:]),
        "channels": generated.shape[1],
        "seed": seed,
        "kid_subset_size": subset_size if "kid" in metrics else None,
        "torch_fidelity": torch_fidelity.__version__,
    }


def is_file(extractor: str) -> bool:
    """Return whether an extractor is a file that `scripts/make_features.py` wrote."""
    return extractor.endswith(FEATURES_SUFFIX)


def check_extractor(field: str, extractor: str, others: Sequence[str] = ()) -> None:
    """Raise ValueError unless an extractor is a known name, or a sound file of features."""
    if is_file(extractor):
        load_features(Path(extractor))
    elif extractor not in (*others, *EXTRACTORS):
        raise unknown_name(field, extractor, (*others, *EXTRACTORS))


def check_scoring(
    generated: Tensor,
    reference: Tensor,
    extractor: str,
    metrics: Sequence[str],
    inception_weights: str | None = None,
) -> None:
    """Raise ValueError where the two sets cannot be scored against each other; see `score`.

    Only dtypes and shapes are looked at, and whether the extractor's weights are there.
    """
    _check_images(generated, reference, extractor, metrics)
    _prepare_extractor(extractor, inception_weights)


class _RgbImages(Dataset):
    """Images uint8 [N,C,H,W] as torch-fidelity wants them: items uint8 [3,H,W]."""

    def __init__(self, images: Tensor):
        self.images = images.cpu()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index].expand(3, -1, -1)


def _content_name(images: Tensor) -> str:
    """Return a name that only these images have."""
    digest = hashlib.sha256(images.cpu().contiguous().numpy().tobytes())
    return f"{'x'.join(map(str, images.shape))}-{digest.hexdigest()}"


def _prepare_extractor(extractor: str, inception_weights: str | None) -> tuple[str, Path]:
    """Return the name under which torch-fidelity knows `extractor` from here on, and its file."""
    if extractor == INCEPTION_EXTRACTOR:
        return extractor, find_inception_weights(inception_weights)
    if inception_weights is not None:
        raise ValueError(
            f"inception_weights={inception_weights!r} is of no use with extractor={extractor!r}; "
            f"leave it out, or set extractor={INCEPTION_EXTRACTOR!r}."
        )
    if is_file(extractor):
        return register_classifier_extractor(Path(extractor)), Path(extractor)
    register_digits_extractor()
    return extractor, DIGITS_WEIGHTS


def _check_images(
    generated: Tensor, reference: Tensor, extractor: str, metrics: Sequence[str]
) -> None:
    """Raise ValueError where the two sets cannot be scored against each other."""
    sets = (("generated", generated, _FEWEST_GENERATED), ("reference", reference, _FEWEST))
    for name, images, fewest in sets:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"{name} has dtype {images.dtype} and shape {tuple(images.shape)}; score wants "
                "uint8 [N,C,H,W] with 1 or 3 channels (tread_zoo.data.to_uint8 converts)."
            )
        for metric in metrics:
            if len(images) < fewest.get(metric, 0):
                raise ValueError(
                    f"{name} has {len(images)} image(s); {metric} takes at least {fewest[metric]}, "
                    "and some hundreds before it says much. Give more images, or leave "
                    f"{metric!r} out of metrics."
                )
    if generated.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"generated has images [C,H,W] of {tuple(generated.shape[1:])}, reference of "
            f"{tuple(reference.shape[1:])}; bring both to one size before scoring."
        )
    if is_file(extractor):
        wanted = load_features(Path(extractor)).shape
        if tuple(generated.shape[1:]) != wanted:
            raise ValueError(
                f"extractor={extractor!r} was trained on images [C,H,W] of {wanted}, and these are "
                f"{tuple(generated.shape[1:])}; make features of this size with "
                "scripts/make_features.py."
            )
    if extractor == DIGITS_EXTRACTOR and tuple(generated.shape[1:]) != (1, 8, 8):
        raise ValueError(
            f"extractor={DIGITS_EXTRACTOR!r} knows grey 8x8 digits only, and the images [C,H,W] "
            f"are {tuple(generated.shape[1:])}; use extractor={INCEPTION_EXTRACTOR!r}."
        )
