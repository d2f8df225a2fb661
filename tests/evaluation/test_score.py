"""Scores: against formulas and torch-fidelity, plug-ins, protocols, and what is refused."""

import json
import warnings
import weakref

import pytest
import torch

from tests.evaluation.tiny import random_images, write_features, write_npz
from tread_zoo import register
from tread_zoo.data import digits
from tread_zoo.evaluation import Protocol, score
from tread_zoo.evaluation.features import load_features
from tread_zoo.evaluation.images import Images, open_images
from tread_zoo.evaluation.metrics import FeatureSet, build_metrics
from tread_zoo.evaluation.score import extract
from tread_zoo.registry import available, get_entry

TRAIN, HELD_OUT = digits().train, digits().held_out


def test_metrics_equal_those_of_torch_fidelity_on_the_same_features():
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    images, real = HELD_OUT.images[:200], TRAIN.images[:300]
    ours, of_real = map(load_features(), (images, real))
    x, logits, y = ours["pooled"], ours["logits"], of_real["pooled"]
    options = {"prc_neighborhood": 3, "prc_batch_size": 50, "verbose": False}
    theirs = {
        **fid_statistics_to_metric(*map(fid_features_to_statistics, (x, y)), verbose=False),
        **kid_features_to_metric(x, y, kid_subset_size=100, rng_seed=3, verbose=False),
        **isc_features_to_metric(logits, rng_seed=3),
        **prc_features_to_metric(x, y, **options),
    }
    metrics = ["fid", {"name": "kid", "subset_size": 100, "seed": 3}, "precision", "recall",
               {"name": "isc", "seed": 3}]  # fmt: skip
    values = score(images, real, metrics, batch_size=50)["values"]
    assert values["fid"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-3)
    for name, other in (
        ("kid", "kernel_inception_distance_mean"), ("precision", "precision"),
        ("recall", "recall"), ("isc", "inception_score_mean"),
    ):  # fmt: skip
        assert values[name] == pytest.approx(theirs[other], rel=1e-5, abs=1e-8), name


def test_precision_and_recall_do_not_depend_on_where_features_lie():
    """Float32 features whose mean is 1,000 times their standard deviation."""
    torch.manual_seed(0)
    sets = [0.8 * torch.randn(200, 16), torch.randn(300, 16)]
    for metric in build_metrics(["precision", "recall"]):
        here, far = (
            metric.compute(*(FeatureSet(rows={"pooled": x + shift}) for x in sets))
            for shift in (0, 1000)
        )
        assert 0.1 < here[metric.name] < 0.99
        assert far[metric.name] == pytest.approx(here[metric.name], abs=0.01)


# Plug-ins -----------------------------------------------------------------------------------------


@register("metric", "of_a_test_gap", better="lower")
def gap(generated, real, *, power: float = 1.0):
    return float((generated.mean(0) - real.mean(0)).norm() ** power)


@register("metric", "of_a_test_traces", better="lower", statistics=True)
def traces(generated, real):
    warnings.warn("doubtful", RuntimeWarning, stacklevel=2)
    return {name: s.covariance.trace() for name, s in (("one", generated), ("other", real))}


@register("metric", "of_a_test_sharp", better="higher", features="logits", min_images=5)
def sharp(generated):
    return generated.softmax(1).amax(1).mean()


def test_a_metric_of_ones_own_is_one_function():
    network, images, others = load_features(), HELD_OUT.images[:80], TRAIN.images[:90]
    metrics = [
        "fid",
        {"name": "of_a_test_gap", "power": 2.0},
        "of_a_test_traces",
        "of_a_test_sharp",
    ]
    record = score(images, others, metrics)
    ours, of_others = network(images), network(others)
    x, logits, y = ours["pooled"], ours["logits"], of_others["pooled"]
    values = record["values"]
    assert values.keys() == {"fid", "of_a_test_gap", "one", "other", "of_a_test_sharp"}
    assert values["of_a_test_gap"] == pytest.approx(float((x.mean(0) - y.mean(0)).square().sum()))
    assert values["one"] == pytest.approx(float(x.double().var(0).sum()), rel=1e-5)
    assert values["of_a_test_sharp"] == pytest.approx(float(logits.softmax(1).amax(1).mean()))
    assert record["protocol"]["notes"] == ["of_a_test_traces: doubtful"]
    assert record["protocol"]["metrics"][1] == {"name": "of_a_test_gap", "power": 2.0}


def test_every_registered_metric_says_its_direction():
    for name in available("metric"):
        assert get_entry("metric", name).metadata["better"] in ("lower", "higher"), name


# Protocols ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"step": 7, "batch_size": 9}, True),
        ({"seed": 1}, False),
        ({"metrics": [{"name": "kid", "subset_size": 20}]}, False),
        ({"reference": TRAIN.images[1:51]}, False),
        ({"images": HELD_OUT.images[:31]}, False),
        ({"weights": "model"}, False),
    ],
)
def test_scores_compare_where_their_protocols_are_equal(changes, same):
    given = {"images": HELD_OUT.images[:30], "reference": TRAIN.images[:50], "metrics": ["kid"]}
    one, other = score(**given), score(**{**given, **changes})
    protocols = [Protocol.of(json.loads(json.dumps(record))) for record in (one, other)]
    assert (protocols[0] == protocols[1]) is same
    assert (protocols[0].digest == protocols[1].digest) is same


def test_scoring_is_repeatable_quiet_and_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    state = torch.get_rng_state()
    given = {"images": HELD_OUT.images[:30], "reference": TRAIN.images[:50]}
    first, second = (score(**given, metrics=["kid", "recall"]) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_label_accuracy_is_of_the_extractors_own_classifier():
    def read(rows):
        return HELD_OUT.images[list(rows)], labels[list(rows)]

    images = Images("labelled", (1, 8, 8), len(HELD_OUT), read, 10)
    right = load_features()(HELD_OUT.images)["logits"].argmax(1)
    for labels in (HELD_OUT.labels, (HELD_OUT.labels + 1) % 10):
        values = score(images, TRAIN.images, ["label_accuracy"], batch_size=50)["values"]
        assert values["label_accuracy"] == pytest.approx(float((right == labels).double().mean()))


def test_no_more_than_two_batches_are_in_memory():
    """A set of any size can be gone through: what was read is let go."""
    alive, most = weakref.WeakSet(), []

    def read(rows):
        images = torch.full((len(rows), 1, 8, 8), rows.start, dtype=torch.uint8)
        alive.add(images)
        most.append(len(alive))
        return images, None

    extract(
        Images("many", (1, 8, 8), 100, read), load_features(), statistics=["pooled"], batch_size=5
    )
    assert len(most) == 20
    assert max(most) <= 2


GREY = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": ["fdi"]}, "Did you mean 'fid'"),
        ({"metrics": ["kid", {"name": "kid", "seed": 1}]}, "'kid' twice"),
        ({"extractor": "digits-cnn"}, "digits-cnn-64"),
        ({"images": GREY.float()}, "torch.float32"),
        ({"images": GREY[:1], "metrics": ["kid"]}, "'kid' takes 10 images.*has 1"),
        ({"reference": GREY[:3], "metrics": ["recall"]}, "takes 4 images, and the reference has 3"),
        ({"metrics": ["fid"]}, "64 features.*give 65"),
        ({"images": GREY[..., 1:]}, r"\(1, 8, 7\)"),
        ({"images": GREY.expand(-1, 3, -1, -1)}, "inception"),
        ({"metrics": ["sfid"]}, "spatial features.*inception"),
        ({"metrics": ["fd_dinov2"]}, r"dinov2-\*"),
    ],
)
def test_what_cannot_be_scored_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        score(**{"images": GREY, "reference": GREY, "metrics": ["kid"], **changes})


def test_a_classifier_of_fewer_classes_cannot_read_labels(tmp_path):
    few = write_features(tmp_path / "few.safetensors", num_classes=2)
    images = random_images(12)
    path = write_npz(tmp_path / "a.npz", images, [0, 1, 2] * 4)
    assert open_images(path).num_classes == 3
    for scored in (path, images):
        with pytest.raises(ValueError, match=r"reads 2 classes with .*, and the labels are of"):
            score(scored, images, ["label_accuracy"], extractor=few)
