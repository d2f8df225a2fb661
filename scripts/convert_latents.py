"""Write the latents of other projects as a table for data=latents.

tread-zoo convert-latents maskdit imagenet_256_latent_lmdb out
tread-zoo convert-latents lightningdit vavae_f16d32/imagenet_train_256 out --vae folder
tread-zoo convert-latents repa vae-sd out --vae stabilityai/sd-vae-ft-ema

--vae names the autoencoder that made them, a folder or a hub's name: without it there are no
pictures, and data.normalization=scale has no factor.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread_zoo.cli import errors_in_one_line
from tread_zoo.errors import missing_path

if TYPE_CHECKING:
    from torch import Tensor

Item = tuple["Tensor", Any, str]  # [K,C',h,w], the second copy mirrored; label, -1 without; a name
Source = tuple[tuple[str, ...], Iterable[Item]]  # class names, items


def maskdit(path: Path, mirrored: bool) -> Source:
    """Return MaskDiT's LMDB: `z-{i}` float32 [8,h,h], mean and logvar; `y-{i}` and `length` in
    digits. Extracted with --xflip, its second half is that of the mirrored images."""
    import lmdb
    import torch

    folder = path if (path / "data.mdb").exists() else path / "train"
    if not (folder / "data.mdb").is_file():
        raise ValueError(f"path={str(path)!r} has no data.mdb: it is not MaskDiT's")

    def items() -> Iterator[Item]:
        with lmdb.open(str(folder), readonly=True, lock=False).begin() as reader:

            def value(key: str) -> bytes:
                found = reader.get(key.encode())
                if found is None:
                    raise ValueError(f"{folder} has no {key}: it is not MaskDiT's")
                return found

            def read(index: int) -> torch.Tensor:
                values = torch.frombuffer(bytearray(value(f"z-{index}")), dtype=torch.float32)
                side = int((len(values) // 8) ** 0.5)
                if not side or len(values) != 8 * side**2:
                    raise ValueError(
                        f"{folder}: z-{index} has {len(values)} numbers, not 8 x h x h"
                    )
                return values.view(8, side, side)

            length = int(value("length"))
            count = length // 2 if mirrored else length
            for index in range(count):
                copies = [read(index), read(index + count)] if mirrored else [read(index)]
                yield torch.stack(copies), value(f"y-{index}").decode(), f"z-{index}"

    return (), items()


def lightningdit(path: Path, mirrored: bool) -> Source:
    """Return LightningDiT's safetensors: `latents` and `latents_flip` [n,C,h,w], `labels` [n]."""
    import torch
    from safetensors import safe_open

    def items() -> Iterator[Item]:
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as reader:
                there = set(reader.keys())
                if not {"latents", "labels"} <= there:
                    raise ValueError(
                        f"{file} has {', '.join(sorted(there))}, no latents and labels"
                    )
                names = [name for name in ("latents", "latents_flip") if name in there]
                slices = [reader.get_slice(name) for name in names]
                labels = reader.get_tensor("labels").tolist()
                if any(one.get_shape()[:1] != [len(labels)] for one in slices):
                    raise ValueError(
                        f"{file} has {len(labels)} labels, but another number of latents"
                    )
                for row, label in enumerate(labels):
                    copies = torch.cat([one[row : row + 1] for one in slices])
                    yield copies, label, f"{file}, row {row}"

    return (), items()


def repa(path: Path, mirrored: bool) -> Source:
    """Return the .npy files of REPA and EDM2, each [2C,h,w], mean and standard deviation, with the
    labels of dataset.json."""
    import torch

    from tread_zoo.data.contexts import load_npy

    files = sorted(file for file in path.rglob("[!.]*.npy") if file.is_file())
    found, names = _labels_of(
        path / "dataset.json", [f.relative_to(path).as_posix() for f in files]
    )

    def items() -> Iterator[Item]:
        for file, label in zip(files, found, strict=True):
            array = load_npy(file)
            if (
                array.dtype.kind != "f"
                or array.ndim < 3
                or array.size != math.prod(array.shape[-3:])
            ):
                raise ValueError(
                    f"{file} is {array.dtype} {list(array.shape)}, not floats [2C,h,w]"
                )
            array = array.astype(array.dtype.newbyteorder("="))  # torch has no other byte order
            yield torch.from_numpy(array.reshape(1, *array.shape[-3:])), label, str(file)

    return names, items()


def _labels_of(file: Path, names: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Return the labels of files in a dataset.json, -1 where it has none, and class names."""
    try:
        pairs = json.loads(file.read_text(encoding="utf-8"))["labels"]
        labels = dict(pairs or [])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f'{file} is not {{"labels": [["file", label], …]}} ({type(error).__name__}: {error})'
        ) from error
    if not labels:
        return [-1] * len(names), ()
    missing = [name for name in names if name not in labels]
    if missing:
        raise ValueError(f"{file} has no label of {len(missing)} files, such as {missing[0]!r}")
    from tread_zoo.data.labels import read_labels

    numbers, words = read_labels([labels[name] for name in names], f"{file}: labels")
    return numbers.tolist(), words


FORMATS: dict[str, tuple[Callable[[Path, bool], Source], str]] = {
    "maskdit": (maskdit, "mean_logvar"),
    "lightningdit": (lightningdit, "samples"),
    "repa": (repa, "mean_std"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tread-zoo convert-latents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vae", help="the autoencoder: a folder, or a name on the hub")
    parser.add_argument("--mirrored", action="store_true", help="of MaskDiT's --xflip")
    args = parser.parse_args()
    with errors_in_one_line(os.environ.get("HYDRA_FULL_ERROR") == "1"):
        count = convert(args.format, args.path, args.out, vae=args.vae, mirrored=args.mirrored)
    print(f"{count} latents: data=latents data.path={args.out}")


def convert(kind: str, path: Path, out: Path, *, vae: str | None, mirrored: bool) -> int:
    """Return the number of latents that are written. Raises ValueError if they cannot be read."""
    read, content = FORMATS[kind]
    if not path.is_dir():
        raise missing_path("path", str(path))
    from tread_zoo.data.encode import write_table
    from tread_zoo.data.vae import load_vae

    metadata = load_vae(vae).metadata if vae else None
    try:
        names, items = read(path, mirrored)
        return write_table(out, items, content=content, vae=metadata, class_names=names)
    except (ValueError, OSError):
        raise
    except Exception as error:  # lmdb and safetensors have kinds of their own
        raise ValueError(f"{path} cannot be read as latents of {kind}: {error}") from error


if __name__ == "__main__":
    main()
