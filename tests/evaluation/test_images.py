"""Images from an array, a folder or an .npz, and references of statistics, give one number; other
files are refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.tables import Stub, image_data, write_latents
from tests.evaluation.tiny import METRICS, random_images, write_features, write_npz
from tread_zoo.data.latents import latents
from tread_zoo.evaluation import score
from tread_zoo.evaluation.features import find_extractor
from tread_zoo.evaluation.images import open_images, part_images
from tread_zoo.evaluation.pictures import save_png
from tread_zoo.evaluation.score import extract, open_reference, write_statistics

REAL, SAMPLES = random_images(45), random_images(30, seed=1) // 2


def write_folder(folder, images):
    folder.mkdir()
    for number, image in enumerate(images):
        save_png(image, folder / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return write_features(tmp_path_factory.mktemp("own") / "own.safetensors")


def write_reference(path, images, extractor):
    """Write statistics as the script does, and return the path."""
    found = find_extractor(extractor)
    network = found.load(["pooled"], torch.device("cpu"))
    features = extract(open_images(images), network, statistics=["pooled"], batch_size=11)
    write_statistics(path, features, found)
    return str(path)


def test_the_same_images_give_the_same_numbers_wherever_they_are(own, tmp_path):
    given = {"metrics": METRICS, "extractor": own, "batch_size": 7}
    whole = score(SAMPLES, REAL, **given)
    write_folder(tmp_path / "real", REAL)
    write_folder(tmp_path / "samples", SAMPLES)
    (tmp_path / "real" / "readme.txt").write_text("not a picture")
    np.savez_compressed(tmp_path / "packed.npz", arr_0=REAL.permute(0, 2, 3, 1).numpy())
    pairs = [(tmp_path / "samples", tmp_path / "packed.npz"),
             (write_npz(tmp_path / "s.npz", SAMPLES), tmp_path / "real")]  # fmt: skip
    for images, reference in pairs:
        record = score(images, reference, **given)
        assert record["values"] == whole["values"]
        for field in ("samples_sha256", "reference_sha256", "num_reference"):
            assert record["protocol"][field] == whole["protocol"][field], field
    path = write_reference(tmp_path / "statistics.npz", REAL, own)
    alone = score(SAMPLES, path, ["fid", "isc"], extractor=own)
    assert alone["values"]["fid"] == pytest.approx(whole["values"]["fid"], rel=1e-5)
    assert alone["protocol"]["num_reference"] == 45


@pytest.mark.slow
def test_statistics_are_of_one_extractor_and_allow_distances_alone(own, tmp_path):
    path = write_reference(tmp_path / "r.npz", REAL, own)
    with pytest.raises(ValueError, match=r"'kid' compares images, and .* has statistics alone"):
        score(SAMPLES, path, ["fid", "kid"], extractor=own)
    other = write_features(tmp_path / "other.safetensors", seed=5)
    with pytest.raises(ValueError, match=r"of other@.*ones of own@\w{8}"):
        score(SAMPLES, path, ["fid"], extractor=other)
    spatial = {"mu_s": np.zeros(2023), "sigma_s": np.eye(2023)}
    np.savez(tmp_path / "adm.npz", mu=np.zeros(2048), sigma=np.eye(2048), **spatial)
    assert open_reference(tmp_path / "adm.npz").statistics.keys() == {"pooled", "spatial"}
    with pytest.raises(ValueError, match="ones of inception-v3-compat"):
        score(SAMPLES, tmp_path / "adm.npz", ["fid"], extractor=own)
    assert score(SAMPLES, tmp_path / "adm.npz", ["isc"], extractor=own)["values"], "needs no real"


def test_statistics_beside_images_are_taken_for_the_distances(own, tmp_path):
    """As in ADM's files, whose statistics are of more images than the file has."""
    write_reference(tmp_path / "r.npz", REAL, own)
    with np.load(tmp_path / "r.npz") as archive:
        arrays = dict(archive)
    arrays.pop("num_images")
    np.savez(tmp_path / "both.npz", arr_0=REAL[:20].permute(0, 2, 3, 1).numpy(), **arrays)
    both = score(SAMPLES, tmp_path / "both.npz", ["fid", "kid"], extractor=own)
    assert both["values"]["fid"] == pytest.approx(
        score(SAMPLES, REAL, ["fid"], extractor=own)["values"]["fid"], rel=1e-5
    )
    kid = score(SAMPLES, REAL[:20], ["kid"], extractor=own)["values"]["kid"]
    assert both["values"]["kid"] == kid
    only = open_reference(tmp_path / "both.npz")
    assert only.statistics.keys() == {"pooled"}
    other = write_features(tmp_path / "other.safetensors", seed=5)
    found = score(SAMPLES, tmp_path / "both.npz", ["fid"], extractor=other)
    expected = score(SAMPLES, REAL[:20], ["fid"], extractor=other)
    assert found["values"] == expected["values"], "other extractors see the images alone"


def test_folders_within_folders_grey_and_colour_and_labels_of_arr_1(tmp_path):
    images = random_images(6)
    for name, some in (("a", images[:2]), ("b", images[2:])):
        write_folder(tmp_path / name, some)
    assert torch.equal(open_images(tmp_path).read(range(1, 4))[0], images[1:4])
    save_png(random_images(1, channels=3)[0], tmp_path / "a" / "colour.png")
    mixed = open_images(tmp_path)
    assert mixed.shape == (3, 8, 8)
    assert torch.equal(mixed.read(range(1))[0], images[:1].expand(-1, 3, -1, -1))
    packed = open_images(write_npz(tmp_path / "x.npz", images, [0, 1, 2, 0, 1, 2]))
    assert packed.read(range(2, 4))[1].tolist() == [2, 0]
    assert torch.equal(packed.read(range(2))[0], images[:2]), "going back"


def test_pictures_that_lie_on_their_side_have_their_upright_size(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (12, 8)).save(tmp_path / "a.jpg", exif=exif)
    Image.new("L", (8, 12)).save(tmp_path / "b.jpg")
    assert open_images(tmp_path).shape == (1, 12, 8)


def test_what_are_no_images_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    two = write_folder(tmp_path / "two", random_images(2))
    Image.new("L", (9, 8)).save(two / "z.png")
    np.savez(tmp_path / "floats.npz", arr_0=np.zeros((2, 8, 8, 1)))
    np.savez(tmp_path / "none.npz", images=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "none.npz").read_bytes()[:50])
    pixels = np.zeros((2, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "without.npz", arr_0=pixels[:0])
    np.savez(tmp_path / "halves.npz", arr_0=pixels, arr_1=[0.5, 1.5])
    np.savez(tmp_path / "words.npz", arr_0=pixels, arr_1=["cat", "dog"])
    np.savez(tmp_path / "more.npz", arr_0=pixels, arr_1=[0, 1, 2])
    for name, words in {
        "nowhere": "nowhere", "empty": "no pictures", "two": "8x8 and .*z.png is 8x9",
        "floats.npz": "float64", "none.npz": "arr_0", "text.npz": "text|pickle", "cut.npz": "cut",
        "without.npz": "no images", "halves.npz": "0.5", "words.npz": "labels",
        "more.npz": "labels",
    }.items():  # fmt: skip
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            open_images(tmp_path / name)
    with pytest.raises(ValueError, match="mu and sigma"):
        open_reference(tmp_path / "none.npz")


def test_a_picture_that_cannot_be_read_is_named(own, tmp_path):
    folder = write_folder(tmp_path / "a", random_images(12))
    whole = (folder / "005.png").read_bytes()
    (folder / "005.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"005\.png"):
        score(folder, REAL, ["kid"], extractor=own)


def test_latents_are_decoded_before_they_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("tread_zoo.data.latents.load_vae", lambda name: Stub())
    data = latents(str(write_latents(tmp_path / "latents", image_data(), dtype="float32")))
    images = part_images(data, data.held_out, "held_out", count=3)
    assert images.shape == (3, 8, 8)
    pixels, labels = images.read(range(1, 3))
    originals = image_data().held_out.images[[1, 3]].float()  # 3 of 5, evenly spaced
    blurred = torch.nn.functional.avg_pool2d(originals, 2).repeat_interleave(2, -1)
    assert (pixels - blurred.repeat_interleave(2, -2)).abs().max() <= 1
    assert labels.tolist() == [1, 3]
