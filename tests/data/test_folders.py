"""Folders of pictures: the same files for training, scoring and references."""

import os

import numpy as np
import pytest
from PIL import Image

from tests.data.tables import flat, values_of
from tread_zoo.data import ImageData
from tread_zoo.data.pictures import read_picture
from tread_zoo.evaluation.images import open_images
from tread_zoo.registry import create


def write(folder, *values):
    folder.mkdir(parents=True, exist_ok=True)
    for value in values:
        Image.fromarray(flat(value)).save(folder / f"{value}.png")


def trained_on(folder, **options) -> ImageData:
    return create("data", "image_folder", path=str(folder), held_out=0.0, **options)


def test_links_do_not_multiply_pictures(tmp_path, caplog):
    root = tmp_path / "own"
    write(root / "b", 1, 2)
    write(root / "c", 3)
    (root / "b" / "latest").symlink_to("../b")
    (root / "b" / "up").symlink_to(root)
    (root / "a").symlink_to("c")
    data = trained_on(root)
    assert (values_of(data.train), data.class_names) == ([1, 2, 3], ("b", "c"))
    assert len(open_images(root)) == 3
    assert "links" in caplog.text
    write(tmp_path / "elsewhere", 4)
    (root / "d").symlink_to(tmp_path / "elsewhere")
    assert trained_on(root).class_names == ("b", "c", "d"), "a link out of the folder is read"


def test_hidden_files_and_pipes_are_left_out(tmp_path, caplog):
    write(tmp_path / "own", 1, 2)
    write(tmp_path / "own" / ".ipynb_checkpoints", 3)
    (tmp_path / "own" / "._1.png").write_text("of macOS")
    os.mkfifo(tmp_path / "own" / "pipe.png")
    (tmp_path / "own" / "gone.png").symlink_to("nowhere.png")
    assert values_of(trained_on(tmp_path / "own").train) == [1, 2]
    assert "2 no regular file" in caplog.text
    assert len(open_images(tmp_path / "own")) == 2


def test_train_and_val_are_no_classes(tmp_path):
    write(tmp_path / "train" / "cat", 1, 2)
    write(tmp_path / "val" / "cat", 3)
    with pytest.raises(ValueError, match=r"data\.path=.*train"):
        trained_on(tmp_path)
    assert len(trained_on(tmp_path, num_classes=0).train) == 3
    assert trained_on(tmp_path / "train").class_names == ("cat",)


def test_folders_of_one_name_in_two_forms_are_one_class(tmp_path):
    write(tmp_path / "caf\u00e9", 1)
    write(tmp_path / "cafe\u0301", 2)
    data = trained_on(tmp_path)
    assert (data.class_names, [data.train[i][1] for i in range(2)]) == (("caf\u00e9",), [0, 0])


def test_a_name_that_is_not_utf8_is_one_line(tmp_path):
    write(tmp_path, 1)
    try:
        os.rename(tmp_path / "1.png", os.fsencode(tmp_path) + b"/caf\xe9.png")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    with pytest.raises(ValueError, match=r"data\.path.*not UTF-8"):
        trained_on(tmp_path)


# Transparency -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "RGB"])
def test_an_invisible_colour_never_shows(tmp_path, kind):
    """The left half is transparent: its stored colour is black, the background is not."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[:, 4:] = 255
    grey = np.full((8, 8), 90, np.uint8)
    grey[:, :4] = 0
    if kind in ("RGBA", "LA"):
        stored = np.stack([*[grey] * (len(kind) - 1), alpha], axis=-1)
        Image.fromarray(stored).save(tmp_path / "a.png")
    else:  # one colour is the transparent one
        picture = Image.fromarray(grey).convert(kind)
        clear = picture.getpixel((0, 0))
        picture.save(tmp_path / "a.png", transparency=clear)
    image = trained_on(tmp_path).train[0][0]
    assert (image[:, :, :4] == 255).all()
    assert (image[:, :, 4:] == 90).all()
    red = trained_on(tmp_path, background="#ff0000").train[0][0]
    assert red[:, 0, 0].tolist() == [255, 0, 0]
    assert set(trained_on(tmp_path, image_size=4).train[0][0][:, :, :2].unique().tolist()) == {255}
    scored = open_images(tmp_path).read(range(1))[0][0]
    assert (scored == image[: len(scored)]).all()


def test_a_background_that_is_no_colour(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(ValueError, match=r"background.*whte"):
        trained_on(tmp_path, background="whte")


def test_a_file_is_a_picture_by_its_content(tmp_path, monkeypatch, caplog):
    """PostScript under a picture's name does not start Ghostscript; AVIF and JFIF are pictures."""
    started = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args: started.append(args))
    write(tmp_path / "a", 1, 2)
    drawn = Image.new("RGB", (8, 8), "red")
    drawn.save(tmp_path / "a" / "three.jfif", "JPEG")
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (tmp_path / "a" / "four.heic").write_bytes(b"no picture")
    assert len(trained_on(tmp_path).train) == 3
    assert "HEIC" in caplog.text
    with pytest.raises(ValueError, match="cannot be read"):
        read_picture(script, (8, 8), 3)
    assert started == []
