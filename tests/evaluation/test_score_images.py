"""Images that lie there: a run's kept ones have its scores, and what does not fit is told."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image

from tests.evaluation.tiny import METRICS, Tiny, write_features
from tests.scripts.test_command_line import call
from tests.small_run import CONFIGS, train_small
from tread_zoo.cli import as_keywords
from tread_zoo.data import digits
from tread_zoo.evaluation import score
from tread_zoo.evaluation.evaluate import EvaluationOptions, classifier_agreement, describe_record
from tread_zoo.evaluation.pictures import save_png
from tread_zoo.evaluation.score_images import open_samples, record_path, score_images
from tread_zoo.evaluation.sources import TensorImages, source_sha256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def scored(tiny):
    """A run's own record, its images in a folder, and as ADM's .npz with labels."""
    folder = tiny.folder / "kept"
    record = tiny.score(keep_images=str(folder))
    pictures = [np.asarray(Image.open(path)) for path in sorted(folder.iterdir())]
    images = np.stack(pictures)[..., None]
    np.savez(tiny.folder / "kept.npz", arr_0=images, arr_1=np.arange(23) % 3)
    return record, folder, tiny.folder / "kept.npz", torch.from_numpy(images).permute(0, 3, 1, 2)


def scores_of(tiny, path, data=None, **changes):
    samples = open_samples(str(path), data)
    options = tiny.options(**{"num_images": len(samples.source), **changes})
    return score_images(samples, options, data)


def random_images(seed, count=12, channels=3):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, channels, 8, 8)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def write_folder(folder, images, suffix="png"):
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        save_png(image, folder / f"{number:03d}.{suffix}")
    return folder


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_kept_images_have_the_scores_of_their_run(tiny, scored, kind):
    """To the bit where the batches are the same; in others, sums are taken in another order."""
    own, folder, file, images = scored
    path = folder if kind == "folder" else file
    found = scores_of(tiny, path, tiny.parts.data)
    values, real = dict(own["values"]), dict(own["real"])
    if kind == "folder":  # without labels nobody agrees with them
        values.pop("agreement")
        real.pop("agreement")
    assert found["values"] == values
    assert found["values"].keys() >= set(METRICS)
    assert found["real"] == real
    assert found["protocol"]["samples_sha256"] == source_sha256(TensorImages(images), 5)
    other = scores_of(tiny, path, tiny.parts.data, batch_size=4)["values"]
    for name, value in values.items():
        assert other[name] == pytest.approx(value, rel=1e-9 if name == "fid" else 1e-5, abs=1e-7)


@pytest.mark.slow
def test_a_run_of_digits_and_its_kept_images_agree_through_the_scripts(tmp_path):
    metrics = "evaluation.metrics=[fid,kid,precision]"
    kept = [f"evaluation.keep_images={tmp_path / 'kept'}", "evaluation.num_images=70"]
    train_small(tmp_path / "run", metrics, *kept, "training.num_steps=2")
    said = call("score_images.py", "samples=kept", "data=digits", metrics, cwd=tmp_path)
    own = json.loads((tmp_path / "run" / "score.json").read_text())
    found = json.loads((tmp_path / "kept_score.json").read_text())
    assert found["values"].keys() == {"fid", "kid", "kid_std", "precision"}
    for part in ("values", "real"):
        for name, value in found[part].items():
            assert own[part][name] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert "70 samples against 1438 images of digits (train, sha256 " in said
    assert re.search(r"written to .*kept_score\.json$", said.rstrip())
    said = call("score_images.py", "samples=nowhere", "out=x.json", cwd=tmp_path, expect=1)
    assert said.startswith("error: samples='nowhere' is neither")
    assert not (tmp_path / "x.json").exists()


def test_the_record_has_the_protocol_and_says_what_nobody_knows(tiny, scored):
    own, folder, _, _ = scored
    found = scores_of(tiny, folder, tiny.parts.data)
    assert json.loads(json.dumps(found)) == found
    mine, theirs = found["protocol"], own["protocol"]
    unknown = {
        "labels", "sampling", "weights", "step", "precision", "uint8", "judge", "decoder",
    }  # fmt: skip
    for name in theirs.keys() - unknown:
        assert mine[name] == theirs[name], name
    assert [mine[name] for name in ("labels", "weights", "step", "precision")] == ["unknown"] * 4
    assert mine["sampling"] == {"sampler": "unknown"}
    assert mine["uint8"] == "bytes as they were given"
    assert "judge" not in mine, "nobody knows what these samples should show"
    said = "\n".join(describe_record(found))
    assert "sampler unknown" in said
    assert "guidance" not in said


@pytest.mark.parametrize("channels", [1, 3])
def test_two_folders_score_as_their_pixels(tmp_path, channels):
    """No data are named; grey pictures have one channel, and one in colour makes all so."""
    features = write_features(tmp_path / "own.safetensors", shape=(channels, 8, 8))
    images, real = random_images(1, channels=channels), random_images(2, 15, channels)
    folder = write_folder(tmp_path / "a", images)
    write_folder(tmp_path / "b", real)
    if channels == 3:
        Image.fromarray(images[0, 0].numpy()).save(folder / "000.png")
        images[0] = images[0, :1]
    options = EvaluationOptions(12, features, METRICS, str(tmp_path / "b"), seed=1, batch_size=7,
                                allow_few_images=True)  # fmt: skip
    found = score_images(open_samples(str(folder)), options)
    whole = score(
        images, real, extractor=features, metrics=METRICS, seed=1, batch_size=7,
        allow_few_images=True,
    )  # fmt: skip
    assert found["values"] == whole["values"]
    assert found["real"] == {}
    assert found["protocol"]["reference_sha256"] == whole["reference_sha256"]
    assert "15 images of b/ (b/, sha256 " in "\n".join(describe_record(found))


def test_labels_count_where_they_are_those_of_the_data(tiny, tmp_path):
    images, labels = random_images(3, channels=1), torch.arange(12) // 4
    for label in range(3):
        write_folder(tmp_path / "a" / str(label), images[labels == label])
    agreed = classifier_agreement(tiny.extractor, images, labels)
    data = tiny.parts.data
    assert data.class_names == ("0", "1", "2")
    found = scores_of(tiny, tmp_path / "a", data, metrics=["fid"])
    assert found["values"]["agreement"] == agreed
    assert found["protocol"]["labels"] == "sub-folders, by the names of the classes"
    real = str(write_folder(tmp_path / "real", images))
    (tmp_path / "a" / "1").rename(tmp_path / "a" / "one")
    for other in (data, None):
        reference = "train" if other else real
        found = scores_of(tiny, tmp_path / "a", other, metrics=["fid"], reference=reference)
        assert "agreement" not in found["values"]
        assert found["protocol"]["labels"] == "unknown"
    np.savez(tmp_path / "a.npz", arr_0=images.permute(0, 2, 3, 1), arr_1=labels)
    alone = scores_of(tiny, tmp_path / "a.npz", metrics=["fid"], reference=real)
    assert alone["values"]["agreement"] == agreed, "the classifier numbers its classes, too"
    without = dataclasses.replace(data, num_classes=0, class_names=())
    found = scores_of(tiny, tmp_path / "a.npz", without, metrics=["fid"])
    assert "agreement" not in found["values"]


def test_digits_are_read_by_the_same_judge(tmp_path):
    data = digits()
    held_out = data.held_out
    images, labels = held_out.images[:40], held_out.labels[:40]
    wrong = labels.clone()
    wrong[:10] = (wrong[:10] + 1) % 10
    np.savez(tmp_path / "d.npz", arr_0=images.permute(0, 2, 3, 1), arr_1=wrong)
    options = EvaluationOptions(40, "auto", ["kid"], "train", seed=1, batch_size=9)
    found = score_images(open_samples(str(tmp_path / "d.npz")), options, data)
    assert 0.7 <= found["values"]["agreement"] <= 0.75
    assert found["real"]["agreement"] > 0.98


def test_lossy_files_are_noted(tiny, tmp_path):
    folder = write_folder(tmp_path / "a", random_images(4, channels=1))
    write_folder(tmp_path / "real", random_images(5, channels=1))
    (folder / "000.png").unlink()
    save_png(random_images(4, channels=1)[0], folder / "000.jpg")
    given = {"metrics": ["kid"], "reference": str(tmp_path / "real")}
    notes = scores_of(tiny, folder, **given)["protocol"]["notes"]
    assert [note.partition(":")[0] for note in notes] == [
        "1 of 12 samples are files of a lossy kind (.jpg, .jpeg, .webp)"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_images": 24}, r"evaluation.num_images=24, but samples='kept/' has 23 images"),
        ({"keep_images": "x"}, r"keep_images='x' is of no use: .* kept already"),
        ({"data": None}, r"reference='train' is a part of data, and none are named: add data="),
        ({"metrics": []}, r"metrics=\[\] leaves nothing to score"),
        ({"metrics": ["sfid"]}, r"'sfid', which is defined on layers of Inception"),
        ({"path": "colour"}, r"\(3, 8, 8\), and data='tiny.npz' of \(1, 8, 8\): bring both"),
        ({"data": None, "reference": "colour"}, r"colour'.* has pictures in colour, and samples"),
        ({"data": None, "reference": "wide"}, r"of \(1, 8, 16\), and the samples are \(1, 8, 8\)"),
        ({"path": "many.npz"}, r"has the label 8, and data='tiny.npz' has 3 classes"),
        ({"path": "many.npz", "data": None, "reference": "grey"}, r"knows 3 classes, .* have 9"),
    ],
)
def test_what_does_not_fit_is_told_before_any_image_is_read(
    tiny, scored, monkeypatch, tmp_path, changes, words
):
    monkeypatch.setattr("tread_zoo.evaluation.score_images.extract", None)
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "colour", random_images(0))
    write_folder(tmp_path / "grey", random_images(0, channels=1))
    write_folder(tmp_path / "wide", random_images(0, channels=1).repeat(1, 1, 1, 2))
    images = random_images(0, channels=1).permute(0, 2, 3, 1)
    np.savez(tmp_path / "many.npz", arr_0=images, arr_1=np.full(12, 8))
    given = {"path": scored[1], "data": tiny.parts.data, **changes}
    with pytest.raises(ValueError, match=words):
        scores_of(tiny, given.pop("path"), given.pop("data"), **given)


def test_latents_are_no_images_to_compare_with(tiny, scored):
    class Codec:
        has_pixels = False

    data = dataclasses.replace(tiny.parts.data, codec=Codec())
    with pytest.raises(ValueError, match="samples='kept/' cannot be scored: latents are not"):
        scores_of(tiny, scored[1], data)


def test_a_picture_that_cannot_be_read_is_named_and_not_replaced(tiny, tmp_path):
    folder = write_folder(tmp_path / "a", random_images(4, channels=1))
    real = str(write_folder(tmp_path / "real", random_images(5, channels=1)))
    whole = (folder / "005.png").read_bytes()
    (folder / "005.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"005.png' cannot be read"):
        scores_of(tiny, folder, reference=real)


def test_samples_that_are_none(tmp_path):
    cases = {
        "nowhere": r"samples=.*nowhere' is neither a folder of pictures nor an .npz",
        "empty": r"is no folder of pictures of one size: samples=.*has no pictures",
        "two": r"one size: the pictures differ in size.* give its samples.npz",
        "none.npz": r"none.npz' has images; images are wanted as 'arr_0'",
        "labels.npz": r"'arr_1' is float64 \[2, 1\]; labels of 2 images",
        "floats.npz": r"samples=.*floats.npz': 'arr_0' is float64 \[2, 8, 8, 1\]; images are",
        "cut.npz": r"samples=.*cut.npz' cannot be read as an .npz file",
    }
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "two", random_images(0))
    save_png(random_images(0)[0].repeat(1, 2, 2), tmp_path / "two" / "grid.png")
    images = np.zeros((2, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "none.npz", images=images)
    np.savez(tmp_path / "labels.npz", arr_0=images, arr_1=np.zeros((2, 1)))
    np.savez(tmp_path / "floats.npz", arr_0=images.astype(float))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "none.npz").read_bytes()[:100])
    for name, words in cases.items():
        with pytest.raises(ValueError, match=words):
            open_samples(str(tmp_path / name))


def test_a_record_lies_beside_its_samples_by_their_whole_name(tmp_path, monkeypatch):
    """The name of a folder has no suffix to be cut off; "." has a name, too."""
    for name in ("cfg_1.0", "cfg_1.5"):
        (tmp_path / name).mkdir()
    (tmp_path / "a.npz").write_bytes(b"")
    monkeypatch.chdir(tmp_path / "cfg_1.0")
    found = [record_path(path) for path in (".", "../cfg_1.5", "../cfg_1.5/", "../a.npz")]
    assert found == [
        tmp_path / f"{name}_score.json" for name in ("cfg_1.0", "cfg_1.5", "cfg_1.5", "a")
    ]


def test_the_script_composes_with_data_and_without():
    def composed(*overrides):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return as_keywords(compose("score_images", overrides=["samples=x", *overrides]))

    given = composed()
    assert "data" not in given
    options = EvaluationOptions(**{**given["evaluation"], "num_images": 7})
    assert options.reference == "train"
    assert given["evaluation"]["num_images"] is None
    assert composed("data=npz", "data.path=y")["data"]["path"] == "y"
