"""Pictures for people."""

import re

import numpy as np
import torch
from PIL import Image

from tread_zoo.evaluation.pictures import plot_losses, save_animation, save_grid


def test_an_animation_ends_with_the_last_picture_and_is_small(tmp_path):
    paths = [tmp_path / f"{i:02}.png" for i in range(50)]
    for i, path in enumerate(paths):
        save_grid(torch.full((4, 3, 256, 256), 5 * i, dtype=torch.uint8), path, columns=2)
    save_animation(paths, tmp_path / "all.gif")
    with Image.open(tmp_path / "all.gif") as animation:
        count, first = animation.n_frames, animation.convert("RGB").getpixel((50, 50))
        animation.seek(count - 1)
        last = animation.convert("RGB").getpixel((50, 50))
        assert 10 <= count <= 25
        assert max(animation.size) < 400
    assert np.abs(np.subtract(last, 5 * 49)).max() <= 4
    assert np.subtract(last, first).min() > 200


def test_losses_have_a_title_readable_ticks_and_the_held_out_curve_beside(tmp_path):
    rows = [{"step": 20 * i, "loss": 0.47 - 0.001 * i} for i in range(1, 50)]
    rows += [{"step": 200 * i, "held_out_loss": 0.46 - 0.01 * i} for i in range(1, 5)]
    (tmp_path / "a_run").mkdir()
    plot_losses(rows, tmp_path / "a_run" / "loss.svg")
    texts = re.findall("<!-- (.*?) -->", (tmp_path / "a_run" / "loss.svg").read_text())
    assert "a_run" in texts
    assert sum("held-out loss" in text for text in texts) == 1
    assert len([text for text in texts if re.fullmatch(r"0\.4\d*", text)]) >= 8


def test_a_curve_of_one_point_is_seen_and_none_draws_nothing(tmp_path):
    for name, rows in (("one", [{"step": 4, "loss": 0.5}]), ("none", [])):
        plot_losses(rows, tmp_path / f"{name}.svg", names=["loss"])
    one, none = ((tmp_path / f"{name}.svg").read_text() for name in ("one", "none"))
    assert "fill: #1f77b4" in one, "a marker: a line of one point is not seen"
    assert "fill: #1f77b4" not in none
