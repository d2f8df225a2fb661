"""Pictures for people."""

import numpy as np
import pytest
import torch
from PIL import Image

from tread_zoo.evaluation.pictures import save_animation, save_grid


@pytest.mark.slow
def test_an_animation_ends_with_the_last_picture_and_is_small(tmp_path):
    paths = [tmp_path / f"{i:02}.png" for i in range(50)]
    for i, path in enumerate(paths):
        save_grid(torch.full((4, 3, 256, 256), 5 * i, dtype=torch.uint8), path)
    save_animation(paths, tmp_path / "all.gif")
    with Image.open(tmp_path / "all.gif") as animation:
        count, first = animation.n_frames, animation.convert("RGB").getpixel((50, 50))
        animation.seek(count - 1)
        last = animation.convert("RGB").getpixel((50, 50))
        assert 10 <= count <= 25
        assert max(animation.size) < 400
    assert np.abs(np.subtract(last, 5 * 49)).max() <= 4
    assert np.subtract(last, first).min() > 200


@pytest.mark.parametrize(("count", "columns"), [(2, 10), (3, 9), (10, 10), (11, 10), (0, 10)])
def test_a_column_of_a_grid_has_one_class_and_its_name_above(tmp_path, count, columns):
    names = [f"class {i % count}" for i in range(100)] if count else []
    images = torch.arange(100).remainder(count or 7).mul(20).view(-1, 1, 1, 1)
    save_grid(images.expand(-1, 3, 16, 20).to(torch.uint8), tmp_path / "grid.png", names)
    with Image.open(tmp_path / "grid.png") as picture:
        rows, found, top = map(int, picture.info["grid"].split())
        pixels = np.asarray(picture.convert("RGB"))
    assert (rows, found) == (10, columns)
    assert (top > 0) == (1 < count <= 10)
    width, height = (pixels.shape[1] - 2) // columns, (pixels.shape[0] - top - 2) // rows
    assert width > height >= 48  # enlarged
    for i in (0, 1, columns, 4 * columns + 2):
        middle = pixels[top + i // columns * height + 24, i % columns * width + 30]
        assert (middle == i % (count or 7) * 20).all()
    if top:  # black on white, also where names are long
        assert (pixels[: top - 1].reshape(top - 1, -1).min(0) < 100).sum() > 20 * columns
        assert pixels[0].min() == 255
