"""Folders of pictures: classes, sizes, and what cannot be read."""

import numpy as np
import pytest
import torch
from PIL import Image

from tread_zoo.data import StepBatches, build_data, image_folder, make_loader
from tread_zoo.data.pictures import resize_and_crop


def _write(file, height=8, width=8, mode="RGB", value=None, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    pixels = np.random.default_rng(height * width).integers(0, 256, shape, dtype=np.uint8)
    if value is not None:
        pixels[:] = value
    Image.fromarray(pixels).save(file, **options)
    return pixels


@pytest.fixture
def folder(tmp_path):
    """Two classes of 5 pictures, of all kinds of names, one nested, beside what is to ignore."""
    root = tmp_path / "pets"
    for i, name in enumerate(["a.png", "b.PNG", "c.jpg", "deep/er/d.jpeg", "e.bmp"]):
        _write(root / "cat" / name, value=i)
    for i in range(5):
        _write(root / "ant" / f"{i}.webp", value=100 + i, lossless=True)
    (root / "cat" / "notes.txt").write_text("no picture")
    (root / "cat" / "._a.png").write_text("no picture")
    (root / ".hidden").mkdir()
    return root


def test_classes_are_sub_folders_by_name(folder):
    data = build_data("image_folder", path=str(folder), held_out=0.0)
    assert data.class_names == ("ant", "cat")
    assert (data.name, data.num_classes, data.channels) == ("pets/", 2, 3)
    assert data.image_size == (8, 8)
    assert (len(data.train), data.held_out) == (10, None)
    assert [data.train[i][1] for i in range(10)] == [0] * 5 + [1] * 5
    image, label = data.train[0]
    assert (image.shape, image.dtype, type(label)) == ((3, 8, 8), torch.uint8, int)
    assert [int(data.train[i][0].float().mean().round()) for i in range(10)] == [
        *range(100, 105),
        *range(5),
    ]


def test_the_labels_can_be_dropped(folder):
    data = image_folder(str(folder), held_out=0.0, num_classes=0)
    assert (data.num_classes, data.class_names, len(data.train)) == (0, (), 10)
    assert {data.train[i][1] for i in range(10)} == {0}
    with pytest.raises(ValueError, match=r"data.num_classes=3: the set has 2 classes"):
        image_folder(str(folder), num_classes=3)


def test_the_held_out_part_is_the_same_each_time(folder):
    first, second = (image_folder(str(folder), held_out=0.4) for _ in range(2))
    assert first.held_out.files == second.held_out.files
    assert len(first.held_out) == 4
    assert not set(first.held_out.files) & set(first.train.files)


def test_a_flat_folder_is_unlabelled(tmp_path):
    pixels = _write(tmp_path / "a.png", 6, 9)
    _write(tmp_path / "b.png", 6, 9)
    data = image_folder(str(tmp_path), held_out=0.0)
    assert (data.num_classes, data.class_names, data.image_size) == (0, (), (6, 9))
    assert torch.equal(data.train[0][0], torch.from_numpy(pixels).permute(2, 0, 1))
    assert data.train[1][1] == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_loads_in_batches(folder, num_workers):
    data = image_folder(str(folder), image_size=4, held_out=0.0)
    batches = StepBatches(len(data.train), 5, seed=0, num_steps=3)
    loaded = list(make_loader(data.train, batches, num_workers))
    assert [tuple(images.shape) for images, _ in loaded] == [(5, 3, 4, 4)] * 3
    assert loaded[0][1].dtype == torch.int64


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "1", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_8_bit_kinds_become_the_channels_asked_for(tmp_path, mode, channels):
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (8, 8), (200, 200, 200)).convert(mode).save(tmp_path / f"a.{suffix}")
    image, _ = image_folder(str(tmp_path), channels=channels, held_out=0.0).train[0]
    assert image.shape == (channels, 8, 8)


def test_a_camera_held_sideways_is_turned(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    _write(tmp_path / "a.jpg", 8, 16, exif=exif)
    data = image_folder(str(tmp_path), held_out=0.0)
    assert data.image_size == (16, 8)
    assert data.train[0][0].shape == (3, 16, 8)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (65, 130), (200, 33), (20, 9), (16, 16)])
def test_resize_and_crop_gives_the_square_and_keeps_a_flat_colour(height, width):
    image = Image.new("RGB", (width, height), (10, 20, 30))
    out = np.asarray(resize_and_crop(image, 16))
    assert out.shape == (16, 16, 3)
    assert (out == (10, 20, 30)).all()


def test_resize_and_crop_takes_the_centre_and_does_not_alias():
    bands = np.zeros((32, 96), dtype=np.uint8)
    bands[:, 32:64] = 255
    assert np.asarray(resize_and_crop(Image.fromarray(bands), 32)).min() == 255
    stripes = np.zeros((128, 128), dtype=np.uint8)
    stripes[:, ::2] = 255
    small = np.asarray(resize_and_crop(Image.fromarray(stripes), 16))
    assert np.abs(small.astype(int) - 127).max() <= 1


def test_sizes_that_differ_are_named_before_training(folder):
    _write(folder / "cat" / "z.png", 8, 10)
    with pytest.raises(ValueError, match=r"0.webp' is 8x8, .*z.png' is 8x10.*data.image_size"):
        image_folder(str(folder))
    assert image_folder(str(folder), image_size=8).image_size == (8, 8)


def test_folders_that_are_refused(tmp_path, folder):
    with pytest.raises(ValueError, match=r"nowhere' does not exist; set data.path"):
        image_folder(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"a.png' is a file; set data.path to a folder"):
        image_folder(str(folder / "cat" / "a.png"))
    with pytest.raises(ValueError, match=r"data.channels=4 must be 1"):
        image_folder(str(folder), channels=4)
    with pytest.raises(ValueError, match=r"data.image_size=0 must be 1"):
        image_folder(str(folder), image_size=0)
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"class folder 'empty' has no pictures .*remove it"):
        image_folder(str(folder))
    with pytest.raises(ValueError, match=r"empty' has no pictures \(.jpg"):
        image_folder(str(folder / "empty"))
    _write(folder / "loose.png")
    with pytest.raises(ValueError, match=r"'loose.png' beside 'ant'.*sub-folders"):
        image_folder(str(folder))


def test_pictures_that_cannot_be_read_are_named(folder):
    whole = (folder / "cat" / "c.jpg").read_bytes()
    cut = folder / "ant" / "cut.jpg"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    data = image_folder(str(folder), image_size=4, held_out=0.0)
    index = data.train.files.index(str(cut))
    with pytest.raises(ValueError, match=r"cut.jpg' cannot be read .*or remove it"):
        data.train[index]
    cut.write_text("no picture at all")
    with pytest.raises(ValueError, match=r"cut.jpg' cannot be read"):
        data.train[index]
    with pytest.raises(ValueError, match=r"cut.jpg' cannot be read"):
        image_folder(str(folder))


def test_more_than_8_bits_are_refused_not_clipped(tmp_path):
    Image.fromarray(np.full((8, 8), 3000, dtype=np.uint16)).save(tmp_path / "a.png")
    data = image_folder(str(tmp_path), held_out=0.0)
    with pytest.raises(ValueError, match=r"a.png' .*more than 8 bits"):
        data.train[0]
