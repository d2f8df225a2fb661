"""Make a reference of real images once: statistics of their features, to score samples against.

tread-zoo make-reference data=npz data.path=fashion.npz \\
    evaluation.extractor=f.safetensors out=r.npz
tread-zoo make-reference data=image_folder data.path=photos data.held_out=0 out=photos.npz
tread-zoo evaluate checkpoint=… evaluation.reference=photos.npz evaluation.metrics=[fid]

The reference is for fid, sfid and fd_dinov2, which need only statistics. The file records its
extractor, with the hash of the extractor's weights, and works with no other. With accelerate
launch, processes share the images.
"""

import logging
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from tread_zoo.cli import command
from tread_zoo.config import EvaluationConfig, part_type
from tread_zoo.fields import OPTIONS, Device, check

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class ReferenceConfig:
    """What tread-zoo make-reference writes.

    Args:
        plugins, data, device: see `RunConfig`.
        out: an .npz file, for evaluation.reference.
        evaluation: only the fields `reference` (`train` or `held_out`), `num_reference`,
            `batch_size`, `extractor` and the files of the extractor's weights are used.
    """

    plugins: tuple[str, ...] = ()
    data: part_type("digits") = "digits"  # type: ignore[valid-type]
    out: str
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: Device = "auto"


@command("make_reference", ReferenceConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(ReferenceConfig, settings)
    out = Path(config.out).expanduser()
    if out.suffix != ".npz":
        raise ValueError(f"out={config.out} must end in .npz, as references do.")
    from tread_zoo.evaluation.evaluate import make_evaluation  # torch takes seconds
    from tread_zoo.evaluation.score import distributed, extract, write_statistics
    from tread_zoo.registry import create
    from tread_zoo.runtime import resolve_device

    out.parent.mkdir(parents=True, exist_ok=True)
    device = resolve_device(config.device)
    data = create("data", config.data)
    options = replace(config.evaluation, metrics=({"name": "kid"},))  # kid takes any features
    with distributed(device) as is_main:  # first: each process gets its own GPU
        data.codec.prepare(device)
        evaluation = make_evaluation(options, data, device=device)
        extractor, images = evaluation.extractor, evaluation.reference.images
        if extractor is None or images is None:
            why = evaluation.not_scored or "evaluation.reference must be train or held_out."
            raise ValueError(why)
        evaluation.fit(len(images), images.shape, 0)
        names = {"pooled", "spatial"} & set(extractor.sizes)
        network = extractor.load(names, device)
        features = extract(images, network, statistics=names, batch_size=options.batch_size)
    if not is_main:
        return
    write_statistics(out, features, extractor)
    logger.info("%d images of %s, %s, features %s, written to %s",
                len(images), data.name, images.name, extractor.label, out)  # fmt: skip


if __name__ == "__main__":
    main()
