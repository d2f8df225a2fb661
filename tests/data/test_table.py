"""Pictures in folders, tables and tar shards."""

import io
import logging
import tarfile

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.tables import flat, picture_table, values_of, write_tar
from tread_zoo.data import CorruptLog, StepBatches, make_loader
from tread_zoo.data.pictures import open_picture, read_picture, resize_and_crop
from tread_zoo.registry import create


@pytest.fixture
def folder(tmp_path):
    """Two classes of 5 flat pictures, of all kinds of names, one nested, beside other files."""
    root = tmp_path / "pets"
    for i, name in enumerate(["a.png", "b.PNG", "c.jpg", "deep/er/d.jpeg", "e.bmp"]):
        (root / "cat" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(flat(10 * i)).save(root / "cat" / name)
    (root / "ant").mkdir()
    for i in range(5):
        Image.fromarray(flat(100 + i)).save(root / "ant" / f"{i}.webp", lossless=True)
    (root / "cat" / "notes.md").write_text("no picture")
    (root / "cat" / "._a.png").write_text("no picture")
    (root / ".hidden").mkdir()
    return root


def test_classes_are_sub_folders_and_other_files_are_named(folder, caplog):
    with caplog.at_level(logging.WARNING):
        data = create("data", "image_folder", path=str(folder), held_out=0.0)
    assert "files that are no pictures: 1 .md" in caplog.text
    assert (data.name, data.class_names, data.image_size) == ("pets/", ("ant", "cat"), (8, 8))
    assert (data.channels, data.held_out) == (3, None)
    assert values_of(data.train) == [100, 101, 102, 103, 104, 0, 10, 20, 30, 40]
    assert [data.train[i][1] for i in range(10)] == [0] * 5 + [1] * 5
    assert data.train.item_name(8).endswith("deep/er/d.jpeg")
    bare = create("data", "image_folder", path=str(folder), num_classes=0)
    assert (bare.num_classes, bare.train[0][1]) == (0, 0)


def test_a_flat_folder_is_unlabelled_and_rows_come_before_columns(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    data = create("data", "image_folder", path=str(tmp_path), held_out=0.0)
    assert (data.num_classes, data.class_names, data.image_size) == (0, (), (6, 9))
    assert torch.equal(data.train[0][0], torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.parametrize("source", ["image_folder", "npz", "table", "latents", "webdataset", "hf"])
def test_a_path_that_is_not_there_is_answered_with_what_lies_near(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(ValueError, match=r"data\.path='./fotos' .* mean 'photos'"):
        create("data", source, path="./fotos")


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "1", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_all_8_bit_kinds(tmp_path, mode, channels):
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (8, 8), (200, 200, 200)).convert(mode).save(tmp_path / f"a.{suffix}")
    data = create("data", "image_folder", path=str(tmp_path), channels=channels, held_out=0.0)
    assert data.train[0][0].shape == (channels, 8, 8)


def test_a_camera_held_sideways_is_turned(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(flat(1, (8, 16))).save(tmp_path / "a.jpg", exif=exif)
    data = create("data", "image_folder", path=str(tmp_path), held_out=0.0)
    assert data.image_size == (16, 8)
    assert data.train[0][0].shape == (3, 16, 8)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (65, 130), (200, 33), (20, 9), (16, 16)])
def test_resize_and_crop_gives_the_square_and_keeps_a_flat_colour(height, width):
    out = np.asarray(resize_and_crop(Image.new("RGB", (width, height), (10, 20, 30)), (16, 16)))
    assert out.shape == (16, 16, 3)
    assert (out == (10, 20, 30)).all()


def test_resize_and_crop_takes_the_centre_and_does_not_alias():
    bands = np.zeros((32, 96), dtype=np.uint8)
    bands[:, 32:64] = 255
    assert np.asarray(resize_and_crop(Image.fromarray(bands), (32, 32))).min() == 255
    stripes = np.zeros((128, 128), dtype=np.uint8)
    stripes[:, ::2] = 255
    small = np.asarray(resize_and_crop(Image.fromarray(stripes), (16, 16)))
    assert np.abs(small.astype(int) - 127).max() <= 1


@pytest.mark.parametrize("crop", ["center", "pad"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_any_shape_fill_a_rectangle_or_are_shown_whole(tmp_path, crop, channels):
    """Each is red with a blue left edge and a green right one."""
    for number, (height, width) in enumerate([(40, 40), (20, 80), (90, 30), (7, 9)]):
        pixels = np.full((height, width, 3), (200, 0, 0), np.uint8)
        pixels[:, : width // 8 + 1], pixels[:, -(width // 8 + 1) :] = (0, 0, 200), (0, 200, 0)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    data = create("data", {"name": "image_folder", "path": str(tmp_path), "held_out": 0.0,
                           "image_size": [16, 24], "channels": channels, "crop": crop,
                           "background": "#ff00ff"})  # fmt: skip
    assert data.image_size == (16, 24)
    images = [data.train[index][0] for index in range(4)]
    assert all(image.shape == (channels, 16, 24) for image in images)
    border = torch.tensor([255, 0, 255] if channels == 3 else [105]).view(-1, 1, 1)
    shares = [float((image == border).all(0).float().mean()) for image in images]
    if crop == "center":
        assert shares == [0, 0, 0, 0]
    else:  # 16 of 24 columns, 6 of 16 rows, 5 of 24 columns, 21 of 24 columns
        assert shares == pytest.approx([8 / 24, 10 / 16, 19 / 24, 3 / 24])
        left = [image[..., int((image != border).any(0).any(0).nonzero()[0])] for image in images]
        if channels == 3:
            assert all(int(column[2].max()) > 100 for column in left)  # the blue edge is there


def test_a_large_jpeg_is_decoded_at_a_smaller_size_and_looks_the_same():
    rows, columns = np.mgrid[:640, :900] / 100
    waves = [np.sin(rows * a + columns * b) for a, b in [(3, 2), (1, 9), (14, 5)]]
    noise = np.random.default_rng(0).normal(0, 20, (640, 900, 3))
    photo = (128 + 80 * np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(photo).save(stored, "jpeg", quality=95)
    assert open_picture(stored.getvalue(), (64, 64)).size == (113, 80)
    whole = np.asarray(resize_and_crop(open_picture(stored.getvalue()), (64, 64)), dtype=int)
    small = read_picture(stored.getvalue(), (64, 64), 3).permute(1, 2, 0).numpy()
    assert np.abs(small - whole).mean() < 1
    assert open_picture(stored.getvalue(), (321, 321)).size == (
        900,
        640,
    )  # less than half would be left


def test_folders_that_cannot_be_trained_on(folder, tmp_path):
    Image.fromarray(flat(7, (8, 10))).save(folder / "cat" / "z.png")
    with pytest.raises(ValueError, match=r"8x8.*8x10.*data.image_size"):
        create("data", "image_folder", path=str(folder))
    assert create("data", "image_folder", path=str(folder), image_size=4).image_size == (4, 4)
    with pytest.raises(ValueError, match=r"data\.channels=4"):
        create("data", "image_folder", path=str(folder), channels=4)
    Image.fromarray(flat(7)).save(folder / "loose.png")
    with pytest.raises(ValueError, match=r"'loose.png' beside 'ant'"):
        create("data", "image_folder", path=str(folder))
    with pytest.raises(ValueError, match="no pictures"):
        create("data", "image_folder", path=str(tmp_path / "pets" / ".hidden"))
    with pytest.raises(ValueError, match="has no 'nowhere'"):
        create("data", "image_folder", path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_picture_that_cannot_be_read_costs_that_picture(folder, tmp_path, num_workers):
    """One cut short, one of 16 bits a channel, which would be clipped, and one of another size."""
    given = {"path": str(folder), "held_out": 0.0}
    cut = folder / "cat" / "a.png"
    cut.write_bytes(cut.read_bytes()[:45])
    data = create("data", "image_folder", **given)
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save(folder / "cat" / "b.PNG")
    Image.fromarray(flat(20, (9, 9))).save(folder / "cat" / "c.jpg")
    log = CorruptLog(tmp_path / "corrupt.txt", [data.train], 0.3)
    plan = StepBatches(10, 5, seed=0, num_steps=4)
    loaded = list(make_loader(data.train, plan, num_workers))
    seen = {int(image[0, 0, 0]) for images, _ in loaded for image in images}
    assert seen == {100, 101, 102, 103, 104, 30, 40}
    rows = dict(line.split("\t")[1:] for line in log.file.read_text().splitlines())
    assert rows.keys() == {str(folder / "cat" / n) for n in ("a.png", "b.PNG", "c.jpg")}
    assert "more than 8 bits" in rows[str(folder / "cat" / "b.PNG")]
    CorruptLog(tmp_path / "strict.txt", [data.train], 0.2)
    with pytest.raises(ValueError, match=r"3 of 10 .*strict\.txt"):
        list(make_loader(data.train, plan, num_workers))


# The `datasets` library ---------------------------------------------------------------------------


def test_a_saved_set_with_its_own_test_split(tmp_path):
    parts = datasets.DatasetDict(train=picture_table(range(12)), test=picture_table(range(20, 26)))
    parts.save_to_disk(tmp_path / "set")
    data = create("data", "hf", path=str(tmp_path / "set"))
    assert (data.name, data.image_size, data.channels) == ("hf:set", (8, 8), 3)
    assert data.class_names == ("ant", "bee", "cat")
    assert values_of(data.train) == list(range(12))
    assert values_of(data.held_out) == list(range(20, 26))
    assert data.held_out[1][1] == 21 % 3
    other = create("data", "hf", path=str(tmp_path / "set"), split="test", num_classes=0)
    assert other.num_classes == 0
    assert sorted(values_of(other.train, other.held_out)) == list(range(20, 26))
    split = create("data", "hf", path=str(tmp_path / "set"), held_out=0.25)
    assert sorted(values_of(split.train, split.held_out)) == list(range(12))


@pytest.mark.slow
def test_parquet_files_resized_to_grey_through_the_loader(tmp_path):
    picture_table(range(10), size=(12, 20)).to_parquet(tmp_path / "set" / "train-00000.parquet")
    given = {"path": str(tmp_path / "set"), "image_size": 8, "channels": 1}
    data = create("data", "hf", held_out=0.2, **given)
    assert (data.image_size, len(data.train), len(data.held_out)) == ((8, 8), 8, 2)
    loaded = list(make_loader(data.train, StepBatches(8, 4, seed=0, num_steps=2), 1))
    assert [tuple(images.shape) for images, _ in loaded] == [(4, 1, 8, 8)] * 2
    part = create("data", "hf", split="train[:50%]", held_out=0.0, **given)
    assert len(part.train) == 5
    with pytest.raises(ValueError, match=r"data.split='tran' is unknown.*Did you mean 'train'"):
        create("data", "hf", split="tran", **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_column": "pictur"}, r"pictur.*not in the dataset.*picture"),
        ({"label_column": "caption"}, r"'caption' has 0\.5.*data\.num_classes=0"),
        ({"num_classes": 2}, r"from 0 to 2"),
        ({"streaming": True}, r"data.*streaming"),
    ],
)
def test_options_of_tables_that_do_not_fit(tmp_path, options, words):
    table = picture_table(range(9), caption=(datasets.Value("float32"), [0.5] * 9))
    table.save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match=words):
        create("data", "hf", path=str(tmp_path / "set"), **options)


# Tar shards ---------------------------------------------------------------------------------------


def test_shards_by_folder_and_by_pattern(tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"{number:02d}.tar", range(10 * number, 10 * number + 10))
    data = create("data", "webdataset", path=str(tmp_path), held_out=0.2)
    assert (data.num_classes, data.image_size) == (4, (8, 8))
    assert sorted(values_of(data.train, data.held_out)) == list(range(30))
    assert all(data.train[i][1] == value % 4 for i, value in enumerate(values_of(data.train)))
    pattern = f"{tmp_path}/{{00..01}}.tar"
    some = create("data", "webdataset", path=pattern, held_out=0.0, num_classes=0)
    assert values_of(some.train) == list(range(20))
    assert (some.num_classes, some.train[1][1]) == (0, 0)


@pytest.mark.parametrize("suffixes", [("png", "jpg"), ("jpeg", "webp")])
def test_shards_of_several_kinds_of_pictures(tmp_path, suffixes):
    """A sample has the picture that is there, whichever shard or kind the table began with."""
    for number, suffix in enumerate(suffixes):
        values = range(10 * number, 10 * number + 10)
        write_tar(tmp_path / f"{number}.tar", values, suffix=suffix)
    data = create("data", "webdataset", path=str(tmp_path), held_out=0.0)
    assert values_of(data.train) == list(range(20))
    assert [data.train[i][1] for i in range(20)] == [value % 4 for value in range(20)]
    assert data.train.item_name(12).endswith(suffixes[1])
    assert data.train.stored(12).startswith(b"\x89PNG")


def test_a_shard_that_is_cut_is_refused(tmp_path):
    file = tmp_path / "0.tar"
    write_tar(file, range(6))
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(tarfile.ReadError, match="unexpected end of data"):
        create("data", "webdataset", path=str(tmp_path))
