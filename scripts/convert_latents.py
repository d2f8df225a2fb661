"""Write the latents of other projects as a table for data=latents.

tread-zoo convert-latents maskdit imagenet_256_latent_lmdb out
tread-zoo convert-latents lightningdit vavae_f16d32/imagenet_train_256 out --vae folder
tread-zoo convert-latents repa vae-sd out --vae stabilityai/sd-vae-ft-ema

--vae names the autoencoder that made them, a folder or a hub's name: without it there are no
pictures, and data.normalization=scale has no factor.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Item = tuple[Tensor, int]  # [K,C',h,w], the second copy mirrored; label, -1 without


def maskdit(path: Path, mirrored: bool) -> Iterator[Item]:
    """Yield MaskDiT's LMDB: `z-{i}` float32 [8,h,h], mean and logvar; `y-{i}` and `length` in
    digits. Extracted with --xflip, its second half is that of the mirrored images."""
    import lmdb

    folder = path if (path / "data.mdb").exists() else path / "train"
    with lmdb.open(str(folder), readonly=True, lock=False).begin() as reader:

        def value(key: bytes) -> bytes:
            found = reader.get(key)
            if found is None:
                raise ValueError(f"{folder} has no {key.decode()}: it is not MaskDiT's")
            return found

        def read(index: int) -> Tensor:
            values = torch.frombuffer(bytearray(value(b"z-%d" % index)), dtype=torch.float32)
            side = int((len(values) // 8) ** 0.5)
            return values.view(8, side, side)

        length = int(value(b"length"))
        count = length // 2 if mirrored else length
        for index in range(count):
            copies = [read(index), read(index + count)] if mirrored else [read(index)]
            yield torch.stack(copies), int(value(b"y-%d" % index))


def lightningdit(path: Path, mirrored: bool) -> Iterator[Item]:
    """Yield LightningDiT's safetensors: `latents` and `latents_flip` [n,C,h,w], `labels` [n]."""
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as reader:
            names = [n for n in ("latents", "latents_flip") if n in reader.keys()]  # noqa: SIM118
            slices, labels = [reader.get_slice(name) for name in names], reader.get_tensor("labels")
            for row, label in enumerate(labels.tolist()):
                yield torch.cat([one[row : row + 1] for one in slices]), label


def repa(path: Path, mirrored: bool) -> Iterator[Item]:
    """Yield the .npy files of REPA and EDM2, each [2C,h,w], mean and standard deviation, with the
    labels of dataset.json."""
    labels = dict(json.loads((path / "dataset.json").read_text())["labels"] or [])
    for file in sorted(path.rglob("*.npy")):
        array = np.load(file, allow_pickle=False)
        label = labels[file.relative_to(path).as_posix()] if labels else -1
        yield torch.from_numpy(array.reshape(1, *array.shape[-3:])), label


FORMATS = {
    "maskdit": (maskdit, "mean_logvar"),
    "lightningdit": (lightningdit, "samples"),
    "repa": (repa, "mean_std"),
}


def main() -> None:
    from tread_zoo.data.encode import write_table
    from tread_zoo.data.vae import load_vae

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
    read, content = FORMATS[args.format]
    vae = load_vae(args.vae).metadata if args.vae else None
    count = write_table(args.out, read(args.path, args.mirrored), content=content, vae=vae)
    print(f"{count} latents: data=latents data.path={args.out}")


if __name__ == "__main__":
    main()
