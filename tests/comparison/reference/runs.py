"""Folders of runs, written from numbers that are known."""

import json

from tread_zoo.comparison.reference.traces import HELD_OUT, TRAINING

SETTINGS = {
    "backbone": {"name": "dit_tiny", "config": {"depth": 12, "hidden_size": 64}},
    "routing": {"name": "none"},
    "objective": {"name": "flow"},
    "data": {"name": "digits", "image_size": [8, 8], "channels": 1, "num_classes": 10,
             "num_images": 1438},
    "data_options": {"name": "digits"},
    "training": {"num_steps": 100, "batch_size": 64, "gradient_accumulation_steps": 1,
                 "learning_rate": 0.006, "log_every": 10,
                 "precision": "auto", "sample_every": 20},
    "sampler": {"name": "euler", "num_steps": 25},
    "guidance": {"name": "none", "scale": 1.0},
    "evaluation": {"num_images": 500},
    "seed": 0,
}  # fmt: skip
SCORE = {
    "values": {"agreement": 0.9, "kid": 0.5, "kid_std": 0.1, "held_out_loss": 0.4},
    "held_out_loss_by_level": [0.7, 0.5, 0.3, 0.1],
    "protocol": {"data": "digits", "weights": "ema", "step": 100, "extractor": "cnn@1",
                 "num_generated": 500, "held_out_draws": 8,
                 "sampling": {"sampler": "euler", "num_steps": 25, "nfe": 25}},
    "run": {"device": "a CPU", "precision": "fp32", "num_processes": 1, "torch": "2.0",
            "seconds": {"training": 12.5}, "peak_memory_bytes": 2**21},
}  # fmt: skip


def write_run(folder, *, seed=0, losses=None, held_out=None, score=SCORE, **settings):
    """Write a run whose losses are by step; its levels are all as the loss itself.

    Args:
        losses, held_out: {step: value}.
        score: of score.json; None for a run that has not ended.
        settings: groups in place of those of `SETTINGS`.
    """
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {**SETTINGS, **settings, "seed": seed})
    measured = {"images_per_s": 100.0}
    rows = [
        {"step": step, **dict.fromkeys(TRAINING, value), **measured}
        for step, value in (losses or {}).items()
    ]
    rows += [{"step": s, **dict.fromkeys(HELD_OUT, v)} for s, v in (held_out or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if score is not None:
        write_json(folder / "score.json", score)
    return folder


def write_json(path, value):
    path.write_text(json.dumps(value))


def run_from_curve(folder, curve, index, *, factor=1.0):
    """Write the folder of run `index` of a curve; its losses are multiplied by `factor`."""
    seed = curve.runs[index]
    settings = {**curve.settings, "data_options": {}, "evaluation": {}, "seed": seed.seed}
    rows = {}
    for name in curve.names:
        for step, value in curve.points_of(name, seed):
            rows.setdefault((step, "held" in name), {"step": step})[name] = value * factor
    for (_, held), row in rows.items():
        if not held:
            row |= {"images_per_s": seed.images_per_s}
    by_level = [seed.scores[name] for name in HELD_OUT[1:]]
    values = {name: v for name, v in seed.scores.items() if name not in HELD_OUT[1:]}
    record = {
        "values": values,
        "real": {},
        "held_out_loss_by_level": by_level,
        "protocol": curve.protocol,
        "run": {**seed.machine, "peak_memory_bytes": seed.peak_memory},
    }
    folder.mkdir(parents=True)
    write_json(folder / "config.json", settings)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    write_json(folder / "score.json", record)
    return folder
