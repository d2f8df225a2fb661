"""Folders of runs, written from known numbers."""

import json
from unittest import mock

from PIL import Image

from tread_zoo.comparison import figures
from tread_zoo.config import make_config

FLOPS = {"none": 1000.0, "tread": 700.0}


def write_run(
    folder,
    *,
    backbone="dit_tiny",
    routing="none",
    seed=0,
    final=0.4,
    steps=100,
    every=20,
    values=None,
    protocol=None,
    held_out=None,
    seconds=10.0,
    ended=True,
    device="a CPU",
    worth=None,
    real=None,
    flops=None,
    **settings,
):
    """Write a run whose held-out loss falls like 1 / step to `final`, and return its folder.

    Args:
        values: further scores at the end; before, they change in proportion to the loss.
        worth: the contribution of each block, and last that of the range [1, 3).
        protocol, held_out: entries that replace the common ones.
        flops: FLOPs per image; None: those of `FLOPS`.
        settings: groups that replace the defaults.
    """
    (folder / "samples").mkdir(parents=True)
    training = {"num_steps": steps, "log_every": every, **settings.pop("training", {})}
    routing = routing if isinstance(routing, dict) else {"name": routing}
    config = make_config(
        backbone=backbone, routing=routing, seed=seed, training=training, run_dir=str(folder),
        **settings,
    ).as_dict()  # fmt: skip
    flops = flops or FLOPS.get(routing["name"], FLOPS["tread"])
    facts = {
        "data": {"num_images": 1438, "image_size": [8, 8], "num_classes": 10},
        "num_parameters": 900_000 + 10 * len(str(backbone)),
        "flops_dense": FLOPS["none"],
        "flops_routed": flops,
        "flops_by_stage": [[steps, flops]],
        "num_steps": steps,
        "images_per_step": config["training"]["batch_size"],
    }
    common = {"data": "digits", "reference": "train", "weights": "ema", "notes": [],
              "sampling": {"sampler": "euler"}, "flops_per_image": 5000}  # fmt: skip

    def loss(step):
        return final * (1 + 2 * (1 / step - 1 / steps) * 10)

    def scaled(factor):
        return {name: value * factor for name, value in (values or {}).items()}

    def record(step):
        return {
            "values": {"held_out_loss": loss(step), **scaled(loss(step) / final)},
            "real": real or {name: value / 4 for name, value in (values or {}).items()},
            "protocol": {**common, "step": step, **(protocol or {})},
            "held_out_loss_by_level": [loss(step) * k for k in (4, 3, 2, 1)],
            "held_out": {"draws": 8, **(held_out or {})},
            "contributions": {"blocks": worth, "ranges": [[1, 3, worth[-1]]]} if worth else {},
            "run": {"device": device, "precision": "bf16", "num_processes": 1, "torch": "2.15",
                    "seconds": {"training": seconds * step / steps}},
        }  # fmt: skip

    logged = [
        {"step": step, "loss": 2 * loss(step), "images_per_s": 640.0, "learning_rate": 1e-3}
        for step in range(every, steps + 1, every)
    ]
    scored = [record(step) for step in range(every, steps + 1, every)]
    write_lines(folder / "metrics.jsonl", logged)
    write(folder / "config.json", config)
    write(folder / "facts.json", facts)
    if ended:
        write_lines(folder / "scores.jsonl", scored)
        write(folder / "score.json", scored[-1])
    Image.effect_noise((80, 80), 60 + seed).save(folder / "samples" / f"step_{steps:08d}.png")
    return folder


def write(path, value):
    path.write_text(json.dumps(value))


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def without_figures():
    """Return a context in which no figure of a report is drawn: that takes most of its time."""
    names = ("draw_lines", "draw_plane", "add_legend")
    nothing = {name: mock.Mock() for name in names}
    return mock.patch.multiple(figures, as_svg=lambda *given, **options: "<svg></svg>", **nothing)
