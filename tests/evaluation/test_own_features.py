"""Features from a classifier of one's own: made by the script, used by path, refused if wrong."""

import json

import numpy as np
import pytest
import torch

from tests.scripts.test_command_line import call
from tests.small_run import SMALL
from tread_zoo.evaluation import score
from tread_zoo.evaluation.evaluate import classifier_agreement
from tread_zoo.evaluation.features import ClassifierFeatures, load_features, save_features


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    network = ClassifierFeatures(image_size=(8, 12), channels=3, num_classes=4, num_features=16)
    save_features(network, tmp_path / "own.safetensors", "a test's")
    return tmp_path / "own.safetensors"


def images(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 8, 12), dtype=torch.uint8, generator=generator)


def test_what_was_saved_is_loaded(file):
    network = load_features(file)
    features, logits = network(images(5))
    assert (features.shape, logits.shape) == ((5, 16), (5, 4))
    torch.manual_seed(0)
    fresh = ClassifierFeatures(image_size=(8, 12), channels=3, num_classes=4, num_features=16)
    assert torch.equal(fresh(images(5))[1], logits)
    assert [p.name for p in file.parent.iterdir()] == ["own.safetensors"]


def test_distances_are_those_of_its_features(file):
    """Against the closed form of the Fréchet distance on features taken by hand."""
    from scipy.linalg import sqrtm

    a, b = images(200, 1), images(300, 2) // 2
    state = torch.get_rng_state()
    record = score(a, b, extractor=str(file), metrics=["fid"])
    assert torch.equal(torch.get_rng_state(), state)
    x, y = (load_features(file)(part)[0].double().numpy() for part in (a, b))
    s, t = np.cov(x.T), np.cov(y.T)
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(s + t - 2 * sqrtm(s @ t).real)
    assert record["values"]["fid"] == pytest.approx(expected, rel=1e-3)
    assert record["extractor"].startswith("own@")


def test_agreement_counts_right_readings(file):
    labels = load_features(file)(images(9))[1].argmax(dim=1)
    assert classifier_agreement(str(file), images(9), labels) == 1.0
    wrong = labels.clone()
    wrong[:3] = (wrong[:3] + 1) % 4
    assert classifier_agreement(str(file), images(9), wrong) == pytest.approx(6 / 9)
    with pytest.raises(ValueError, match="knows 4 classes, and label 4"):
        classifier_agreement(str(file), images(9), torch.full((9,), 4))


def test_other_sizes_and_other_files_are_refused(file, tmp_path):
    small = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"trained on images \[C,H,W\] of \(3, 8, 12\)"):
        score(small, small, extractor=str(file), metrics=["fid"])
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    for name in ("bad.safetensors", "absent.safetensors"):
        with pytest.raises(ValueError, match=r"is no file of features .*make_features\.py"):
            score(small, small, extractor=str(tmp_path / name), metrics=["fid"])


def test_the_script_makes_features_that_a_run_is_scored_with(tmp_path):
    said = call("make_features.py", "out=f.safetensors", "num_steps=60", cwd=tmp_path)
    assert float(said.split("held-out accuracy ")[1].split()[0]) > 0.8
    call(
        "train.py", *SMALL, "evaluation.extractor=f.safetensors", "evaluation.metrics=[fid]",
        "evaluation.allow_few_images=true", "run_dir=run", cwd=tmp_path,
    )  # fmt: skip
    score = json.loads((tmp_path / "run" / "score.json").read_text())
    assert score["protocol"]["extractor"].startswith("f@")
    assert {"fid", "agreement"} <= score["values"].keys()
    said = call("train.py", *SMALL, "evaluation.extractor=g.safetensors", cwd=tmp_path, expect=1)
    assert "is no file of features" in said
