"""Make a reference of real images once: statistics of their features, to score samples against.

python scripts/make_reference.py data=npz data.path=fashion.npz extractor=f.safetensors \
    out=r.safetensors
python scripts/make_reference.py data=image_folder data.path=photos data.image_size=64 \
    data.held_out=0 keep_features=true out=photos.safetensors
python scripts/evaluate.py checkpoint=… evaluation.reference=photos.safetensors

The file says which extractor it was made with (with the hash of its weights), of how many images of
which size, and their hash; another extractor or size is refused. See docs/evaluation.md.
"""

import logging

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors

logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="make_reference")
@clear_errors
def main(config: DictConfig) -> None:
    import torch

    from tread_zoo.data import build_data
    from tread_zoo.evaluation.dinov2 import DINOV2_EXTRACTORS
    from tread_zoo.evaluation.extraction import extract
    from tread_zoo.evaluation.extractors import find_weights, open_extractor
    from tread_zoo.evaluation.features import DIGITS_EXTRACTOR, INCEPTION_EXTRACTOR
    from tread_zoo.evaluation.made_reference import check_out, reference_needs, write_made
    from tread_zoo.evaluation.metrics import check_few
    from tread_zoo.evaluation.references import open_part
    from tread_zoo.evaluation.sharing import end_share, start_share
    from tread_zoo.evaluation.sources import pixel_shape
    from tread_zoo.outputs import check_out_file
    from tread_zoo.runtime import resolve_device

    settings = as_keywords(config)
    device, out = resolve_device(settings["device"]), check_out_file("out", settings["out"])
    check_out(out)
    data = build_data(**settings["data"])
    data.codec.prepare(device)
    shape = pixel_shape(data, device)
    source = open_part("part", settings["part"], data, shape=shape, device=device).source
    name = settings["extractor"]
    if name == "auto":
        name = DIGITS_EXTRACTOR if data.name == "digits" else INCEPTION_EXTRACTOR
    weights = find_weights(
        name,
        inception_weights=settings["inception_weights"],
        dinov2_weights=settings["dinov2_weights"],
    )
    weights.check_shape(source.shape)
    if not settings["allow_few_images"]:
        found = f"part={settings['part']} of {data.name} has {len(source)} image(s)"
        metrics = ["fd_dinov2" if name in DINOV2_EXTRACTORS else "fid"]
        ways = "Name data of {enough} images or more; allow_few_images=true makes it all the same."
        check_few(found, len(source), metrics, weights, ways=ways)
    needs = reference_needs(name, keep_features=settings["keep_features"])
    share = start_share(device)
    place = device if device.type == "cuda" else torch.device("cpu")
    extractor = open_extractor(weights, needs.names, place)
    found = extract(source, extractor, needs, batch_size=settings["batch_size"], share=share)
    end_share(share)
    if not share.is_main:
        return
    made = write_made(out, found, extractor, about=f"{data.name}, {settings['part']}")
    kept = ", with their features" if made.rows else ""
    logger.info(
        "%d images %s of %s (sha256 %s…), features %s%s, written to %s",
        made.num_images, "x".join(map(str, found.shape)), made.about, made.sha256[:8],
        made.extractor, kept, out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
