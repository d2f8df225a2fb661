"""Real images as a data set, a folder, an .npz or a file: one number; others are refused."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.evaluation.tiny import METRICS, Tiny, write_features
from tests.scripts.test_command_line import call
from tread_zoo.data import image_folder
from tread_zoo.data.codec import PIXELS
from tread_zoo.evaluation import evaluate as evaluate_module
from tread_zoo.evaluation.extraction import Needs, extract
from tread_zoo.evaluation.extractors import (
    FEATURES,
    INCEPTION_SIZES,
    SPATIAL,
    Weights,
    find_weights,
    open_extractor,
)
from tread_zoo.evaluation.made_reference import check_out, read_made, write_made
from tread_zoo.evaluation.pictures import save_png
from tread_zoo.evaluation.references import check_reference, open_reference, reference_features
from tread_zoo.evaluation.sharing import Share
from tread_zoo.evaluation.sources import NpzImages, PartImages, TensorImages, source_sha256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


def make(tiny, name, *, rows=False, extractor=None, images=None):
    """Write a reference as the script does, and return its path."""
    opened = open_extractor(
        find_weights(extractor or tiny.extractor), [FEATURES], torch.device("cpu")
    )
    needs = Needs(frozenset({FEATURES}), frozenset({FEATURES} if rows else ()))
    source = TensorImages(tiny.real if images is None else images)
    write_made(tiny.folder / name, extract(source, opened, needs, batch_size=11), opened, "tiny")
    return str(tiny.folder / name)


@pytest.fixture(scope="module")
def by_train(tiny):
    return tiny.score()


def test_the_same_images_give_the_same_numbers_wherever_they_lie(tiny, by_train):
    folder = tiny.folder / "pictures"
    folder.mkdir()
    for number, image in enumerate(tiny.real):
        save_png(image, folder / f"{number:03d}.png")
    np.savez_compressed(tiny.folder / "adm.npz", arr_0=tiny.real.permute(0, 2, 3, 1).numpy())
    paths = [str(folder), str(tiny.folder / "adm.npz"), make(tiny, "made.safetensors", rows=True)]
    names = []
    for path in paths:
        record = tiny.score(reference=path)
        assert record["values"].keys() >= set(METRICS)
        for name, value in by_train["values"].items():
            # batches of another size, or statistics of 11 images at a time: rounding alone
            assert record["values"][name] == pytest.approx(value, rel=1e-5), (path, name)
        for field in ("reference_sha256", "num_reference", "extractor"):
            assert record["protocol"][field] == by_train["protocol"][field], (path, field)
        names.append(record["protocol"]["reference"])
        assert "fid" not in record["real"], "held-out images may be in it"
    assert names == ["pictures/", "adm.npz", "made.safetensors"]
    assert by_train["protocol"]["reference"] == "train"
    assert by_train["real"].keys() == by_train["values"].keys()


def test_statistics_allow_the_distance_alone_and_say_so_before_any_work(
    tiny, by_train, monkeypatch
):
    path = make(tiny, "statistics.safetensors")
    record = tiny.score(reference=path, metrics=["fid"])
    assert record["values"]["fid"] == pytest.approx(by_train["values"]["fid"], rel=1e-5)

    def never(*_, **__):
        raise AssertionError("sampled before the reference was checked")

    monkeypatch.setattr(evaluate_module, "generate", never)
    with pytest.raises(
        ValueError,
        match=r"statistics alone, and 'kid'.*keep_features=true.*evaluation.metrics=\[fid\]",
    ):
        tiny.score(reference=path, metrics=["fid", "kid"])


def test_a_reference_of_other_features_or_sizes_is_refused(tiny):
    other = write_features(tiny.folder / "other.safetensors", seed=5)
    path = make(tiny, "others.safetensors", extractor=other)
    with pytest.raises(ValueError, match=r"made with the features other@\w{8}, and .* own@"):
        tiny.score(reference=path, metrics=["fid"])
    np.savez(tiny.folder / "wide.npz", arr_0=np.zeros((9, 8, 12, 1), np.uint8))
    with pytest.raises(
        ValueError, match=r"images \[C,H,W\] of \(1, 8, 12\), and the samples are \(1"
    ):
        tiny.score(reference=str(tiny.folder / "wide.npz"))
    with pytest.raises(ValueError, match=r"reference has 3 image\(s\); precision takes at least 4"):
        tiny.score(reference=make(tiny, "few.safetensors", rows=True, images=tiny.real[:3]))


def write_adm(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize(
    ("name", "arrays", "words"),
    [
        ("trian", None, r"evaluation.reference='trian' is unknown. Did you mean 'train'"),
        ("x.txt", b"", "neither a folder of pictures, nor an .npz"),
        ("x.npz", b"no archive", r"cannot be read as an .npz file .*copy or download it again"),
        ("x.npz", {"arr_1": np.zeros(3)}, "has arr_1; images as 'arr_0'"),
        ("x.npz", {"arr_0": np.zeros((2, 8, 8, 1))}, r"'arr_0' is float64 \[2, 8, 8, 1\]"),
        ("x.npz", {"mu": np.zeros(3), "sigma": np.eye(3)}, r"'mu' is \[3\].*Inception has 2048"),
        ("x.safetensors", b"{}", r"is no reference .*make_reference.py out="),
        ("own.safetensors", None, r"is no reference \(KeyError"),
    ],
)  # fmt: skip
def test_what_is_no_reference_is_told(tiny, tmp_path, monkeypatch, name, arrays, words):
    monkeypatch.chdir(tmp_path)
    if name == "own.safetensors":
        name = tiny.extractor
    elif isinstance(arrays, bytes):
        (tmp_path / name).write_bytes(arrays)
    elif arrays is not None:
        write_adm(tmp_path / name, **arrays)
    with pytest.raises(ValueError, match=words):
        tiny.score(reference=name)


def test_pictures_of_several_sizes_are_refused(tiny, tmp_path):
    for number, side in enumerate((8, 9)):
        save_png(torch.zeros(1, side, side, dtype=torch.uint8), tmp_path / f"{number}.png")
    with pytest.raises(ValueError, match="no folder of pictures of one size: the pictures differ"):
        tiny.score(reference=str(tmp_path))


def test_statistics_of_adm_are_of_inception_and_taken_as_they_are(tiny, tmp_path):
    mean = np.arange(2048, dtype=np.float64)
    statistics = {"mu": mean, "sigma": np.eye(2048) * 2}
    path = write_adm(tmp_path / "adm.npz", **statistics)
    with pytest.raises(ValueError, match=r"statistics of Inception's features, and extractor="):
        tiny.score(reference=path, metrics=["fid"])
    reference = open_reference(path, tiny.parts.data)
    assert (reference.shape, reference.statistics) == (None, {FEATURES})
    needs = Needs(frozenset({FEATURES}))
    found = reference_features(reference, None, needs, batch_size=3, share=Share())
    assert torch.equal(found.statistics[FEATURES].mean, torch.from_numpy(mean))
    assert torch.equal(found.statistics[FEATURES].covariance, 2 * torch.eye(2048).double())
    assert (found.count, len(found.sha256)) == (None, 64)
    assert SPATIAL not in reference.statistics


def test_images_of_an_npz_are_read_in_any_order_and_a_cut_is_told(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (13, 4, 6, 3), dtype=np.uint8)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", arr_0=images, arr_1=np.zeros(13))
        source = NpzImages(tmp_path / "x.npz")
        assert (len(source), source.shape) == (13, (3, 4, 6))
        for chosen in (range(5, 9), range(10, 13), range(2)):
            expected = images[chosen.start : chosen.stop].transpose(0, 3, 1, 2)
            assert np.array_equal(source.read(chosen).numpy(), expected)
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole.replace(whole[200:300], bytes(100), 1))
    with pytest.raises(ValueError, match=r"x.npz' is damaged"):
        source_sha256(NpzImages(tmp_path / "x.npz"), 4)


def test_the_hash_is_of_the_pixels_in_their_order(tiny):
    images = tiny.real
    expected = source_sha256(TensorImages(images), 10)
    data = SimpleNamespace(codec=PIXELS)
    part = PartImages(data, [(image, 0) for image in images], (1, 8, 8))
    assert source_sha256(part, 7) == expected
    assert source_sha256(TensorImages(images.flip(0)), 10) != expected
    changed = images.clone()
    changed[44, 0, 7, 7] ^= 1
    assert source_sha256(TensorImages(changed), 10) != expected
    assert source_sha256(TensorImages(images.transpose(2, 3).reshape(45, 1, 4, 16)), 10) != expected


def test_kept_features_are_of_these_images_and_no_others(tiny, by_train, tmp_path, monkeypatch):
    extracted = []
    original = evaluate_module.reference_features.__globals__["extract"]

    def counted(source, *given, **more):
        extracted.append(len(source))
        return original(source, *given, **more)

    monkeypatch.setitem(evaluate_module.reference_features.__globals__, "extract", counted)
    real = by_train["real"]
    for _ in range(2):
        record = tiny.score(real=real, cache=tmp_path)
        assert record["real"] == real
        for name, value in by_train["values"].items():
            assert record["values"][name] == pytest.approx(value, rel=1e-9)
    assert extracted == [45]
    before = tiny.real[3].clone()
    tiny.real[3] ^= 255
    try:
        changed = tiny.score(real=real, cache=tmp_path)
    finally:
        tiny.real[3] = before
    assert extracted == [45, 45]
    assert changed["values"]["fid"] != record["values"]["fid"]


def test_the_script_makes_what_the_evaluation_takes(tiny):
    data = ["data=npz", "data.path=tiny.npz", "data.held_out=0.25", "extractor=own.safetensors"]
    out = ["keep_features=true", "out=r.safetensors", "device=cpu"]
    said = call("make_reference.py", *data, *out, cwd=tiny.folder)
    assert "45 images 1x8x8 of tiny.npz, train" in said
    made = read_made(tiny.folder / "r.safetensors")
    sha256 = source_sha256(TensorImages(tiny.real), 10)
    assert (made.count, made.sha256, made.rows[FEATURES].shape) == (45, sha256, (45, 16))
    for name, words in (("r.safetensors", "is there already"), ("r.npz", "must end in")):
        with pytest.raises(ValueError, match=words):
            check_out(tiny.folder / name)
    record = json.loads(json.dumps(tiny.score(reference=str(tiny.folder / "r.safetensors"))))
    assert record["protocol"]["reference_sha256"] == sha256


def test_statistics_of_inception_are_no_matter_to_other_features_where_images_are(tiny, by_train):
    """As in ADM's VIRTUAL_*: `arr_0` beside `mu` and `sigma`."""
    arrays = {
        "arr_0": tiny.real.permute(0, 2, 3, 1).numpy(),
        "mu": np.full(2048, 1e3), "sigma": np.eye(2048),
        "mu_s": np.full(2023, 1e3), "sigma_s": np.eye(2023),
    }  # fmt: skip
    record = tiny.score(reference=write_adm(tiny.folder / "both.npz", **arrays))
    for name, value in by_train["values"].items():
        assert record["values"][name] == pytest.approx(value, rel=1e-5), name
    for field in ("reference_sha256", "num_reference"):
        assert record["protocol"][field] == by_train["protocol"][field], field


def test_few_images_beside_statistics_are_enough_for_the_distance(tiny, tmp_path):
    """Inception's are of as many images as their author had; kid takes those of the file."""
    path = write_adm(
        tmp_path / "both.npz", arr_0=np.zeros((5, 8, 8, 1), np.uint8),
        mu=np.zeros(2048), sigma=np.eye(2048),
    )  # fmt: skip
    reference = open_reference(path, tiny.parts.data)
    inception = Weights("inception-v3-compat", tmp_path, "i", None, "", INCEPTION_SIZES)
    check_reference(reference, inception, ["fid", "kid"], (1, 8, 8))
    with pytest.raises(ValueError, match=r"has 5 image\(s\), and 'sfid' compares .* 2023 features"):
        check_reference(reference, inception, ["sfid"], (1, 8, 8))


def cut(path):
    """Leave the first half of a picture."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_pictures(folder, images):
    folder.mkdir()
    for number, image in enumerate(images):
        save_png(image, folder / f"{number:03d}.png")
    return folder


def test_a_reference_with_a_picture_that_cannot_be_read_is_refused(tiny, tmp_path):
    folder = write_pictures(tmp_path / "pictures", tiny.real)
    cut(folder / "007.png")
    with pytest.raises(ValueError, match=r"007.png.* cannot be read .*no other image may take its"):
        tiny.score(reference=str(folder))
    data = ["data=image_folder", "data.path=pictures", "data.held_out=0", "data.image_size=8",
            "data.channels=1"]  # fmt: skip
    given = [f"extractor={tiny.extractor}", "out=r.safetensors", "device=cpu"]
    said = call("make_reference.py", *data, *given, cwd=tmp_path, expect=1)
    assert "007.png" in said
    assert not (tmp_path / "r.safetensors").exists()


def test_a_run_that_trained_past_a_picture_is_scored_and_the_record_says_so(tiny, tmp_path):
    """It would else lose its score at the end, for what training tells and goes past."""
    folder = write_pictures(tmp_path / "pictures", tiny.real)
    data = image_folder(str(folder), channels=1, held_out=0.0)
    cut(folder / "007.png")
    data = dataclasses.replace(data, num_classes=3)
    record = tiny.score(data=data)
    notes = record["protocol"]["notes"]
    assert [n for n in notes if n.startswith("1 of 45 reference images could not be read")]
    assert record["protocol"]["num_reference"] == 45
    whole = tiny.score(reference=str(write_pictures(tmp_path / "whole", tiny.real)))
    assert not any("could not be read" in n for n in whole["protocol"].get("notes", ()))
    assert record["protocol"]["reference_sha256"] != whole["protocol"]["reference_sha256"]


def test_a_file_of_too_few_images_is_not_made(tiny, tmp_path):
    data = ["data=npz", f"data.path={tiny.folder / 'tiny.npz'}", "data.held_out=0.75"]
    given = [*data, f"extractor={tiny.extractor}", "out=r.safetensors", "device=cpu"]
    said = call("make_reference.py", *given, cwd=tmp_path, expect=1)
    assert "part=train of tiny.npz has 15 image(s), and 'fid' compares covariances of 16" in said
    call("make_reference.py", *given, "allow_few_images=true", cwd=tmp_path)
    assert read_made(tmp_path / "r.safetensors").count == 15
