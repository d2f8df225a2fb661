"""A network's samples scored: streamed, cached, kept, shared by processes; the held-out loss."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.published_files import write_fashion_mnist
from tests.evaluation.tiny import METRICS, Tiny, random_images, write_npz
from tests.processes import run_ranks
from tread_zoo import create
from tread_zoo.config import make_config
from tread_zoo.data import ArrayDataset, digits, to_uint8
from tread_zoo.diffusion import EDM, FlowMatching, generate
from tread_zoo.diffusion.conditions import conditions_of
from tread_zoo.evaluation import Protocol, score
from tread_zoo.evaluation.evaluate import (
    check_evaluation,
    check_kept_images,
    describe_record,
    score_names,
)
from tread_zoo.evaluation.features import INCEPTION_URL
from tread_zoo.evaluation.held_out import held_out_loss, held_out_record, stack_part
from tread_zoo.seeding import make_image_generator

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def samples(tiny):
    """The samples of the evaluation, made in a single batch."""
    x = generate(
        tiny.backbone, tiny.objective, tiny.sampling, indices=range(23),
        labels=torch.arange(23) % 3, seed=1, batch_size=7,
    )  # fmt: skip
    return to_uint8(x)


@pytest.fixture(scope="module")
def record(tiny):
    return tiny.score()


@pytest.mark.slow
def test_streamed_samples_score_as_if_they_were_all_there(tiny, samples, record, tmp_path):
    labelled = write_npz(tmp_path / "samples.npz", samples, [i % 3 for i in range(23)])
    metrics = ["label_accuracy", *METRICS]
    given = {"extractor": tiny.extractor, "metrics": metrics, "batch_size": 7}
    whole = score(labelled, tiny.real, **given)
    assert record["values"] == whole["values"]
    for field in ("extractor_sha256", "reference_sha256", "samples_sha256", "num_reference"):
        assert record["protocol"][field] == whole["protocol"][field], field
    held_out = tiny.data.held_out
    real = score(
        write_npz(tmp_path / "r.npz", held_out.images, held_out.labels), tiny.real, **given
    )
    assert record["real"] == real["values"]


def test_labels_are_drawn_at_random_if_asked(tiny, record, tmp_path):
    """By the seed and the number of the image alone."""
    drawn = conditions_of(tiny.backbone, tiny.data, 1).of(range(3000))
    assert drawn.bincount().tolist() == pytest.approx([1000] * 3, abs=100)
    assert conditions_of(tiny.backbone, tiny.data, 1).of([2, 7]).tolist() == drawn[[2, 7]].tolist()
    at_random = tiny.score(labels="random")
    assert at_random["protocol"]["labels"] == "at random"
    assert Protocol.of(at_random) != Protocol.of(record)
    x = generate(
        tiny.backbone, tiny.objective, tiny.sampling, indices=range(23), labels=drawn[:23],
        seed=1, batch_size=7,
    )  # fmt: skip
    images = write_npz(tmp_path / "samples.npz", to_uint8(x), drawn[:23])
    given = {"extractor": tiny.extractor, "metrics": ["label_accuracy", *METRICS], "batch_size": 7}
    assert at_random["values"] == score(images, tiny.real, **given)["values"]


def test_the_record_is_json_and_has_the_protocol(record):
    assert json.loads(json.dumps(record)) == record
    protocol = Protocol.of(record)
    assert (protocol.num_generated, protocol.num_reference, protocol.nfe) == (23, 45, 2)
    assert protocol.sampling["sampler"] == "euler"
    assert (protocol.data, protocol.reference, protocol.labels) == (
        "tiny", "train", "i mod num_classes",
    )  # fmt: skip
    assert score_names(record)["score/fid"] == record["values"]["fid"]
    text = "\n".join(describe_record(record))
    assert "label_accuracy" in text
    assert "2 evaluations" in text
    assert "real" in text.splitlines()[0]
    against_held_out = describe_record(record | {"real": {}})
    assert "real" not in against_held_out[0], "a column without a value"


def test_samples_are_kept_where_asked_and_never_mixed(tiny, samples, tmp_path):
    folder = tmp_path / "kept"
    record = tiny.score(metrics=[], keep_images=str(folder))
    assert record["values"] == {}
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{number:06d}.png" for number in range(23)]
    found = np.stack([np.asarray(Image.open(folder / name)) for name in names])
    assert np.array_equal(found, samples[:, 0].numpy())
    with pytest.raises(ValueError, match="keep_images"):
        check_kept_images(tiny.options(keep_images=str(folder)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_images": 9, "metrics": ["isc"]}, "evaluation.num_images has 9"),
        ({"num_images": 12}, "give 13"),
        ({"num_reference": 12}, "the reference has 12"),
        ({"reference": "trian"}, "trian"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_any_work(tiny, changes, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        check_evaluation(tiny.options(**changes), tiny.data)


def photos(folder):
    """Return the data of data=image_folder data.path=photos data.image_size=64 for 12 pictures."""
    for number in range(12):
        picture = Image.fromarray(np.full((70, 64, 3), 20 * number, np.uint8))
        (folder / "photos" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture.save(folder / "photos" / "ab"[number % 2] / f"{number}.png")
    return create("data", "image_folder", path=str(folder / "photos"), image_size=64)


@pytest.mark.parametrize("has_weights", [True, False])
def test_own_images_are_scored_by_default_as_far_as_they_can(tmp_path, monkeypatch, has_weights):
    """README's command, with Inception's weights in torch's hub folder and without."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    if has_weights:
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / INCEPTION_URL.rpartition("/")[2]).touch()
    evaluation = check_evaluation(make_config().evaluation, photos(tmp_path))
    names = [metric.name for metric in evaluation.metrics]
    assert names == (["kid", "precision", "recall"] if has_weights else [])
    assert ("2049" if has_weights else "https://") in evaluation.not_scored


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, set()), (5, {"precision", "recall"}),
        (12, {"kid", "kid_std", "precision", "recall"}),
        (13, {"kid", "kid_std", "precision", "recall", "fid"}),
    ],
)  # fmt: skip
def test_few_images_are_scored_by_the_metrics_that_they_allow(tiny, count, names):
    """Samples, and held-out images beside them."""
    part = ArrayDataset(*tiny.data.held_out.gather(torch.arange(count)))
    data = dataclasses.replace(tiny.data, held_out=part)
    record = tiny.score(metrics="auto", num_images=count, data=data)
    assert record["values"].keys() == record["real"].keys() == {"label_accuracy", *names}
    reasons = [line for line in describe_record(record) if line.startswith("not scored: ")]
    assert any("fid takes" in line or "fid compares" in line for line in reasons) == (
        "fid" not in names
    )


def test_no_metrics_means_that_nothing_is_drawn_and_nothing_is_said(tiny):
    record = tiny.score(metrics=[])
    assert (record["values"], record["real"]) == ({}, {})
    assert "num_generated" not in record["protocol"]
    assert not any("images" in line for line in describe_record(record))
    alone = "\n".join(describe_record(tiny.score(metrics=["label_accuracy"])))
    assert "23 images, features" in alone, "nothing was compared"


def test_images_with_a_shipped_extractor_choose_it(tiny, tmp_path):
    write_fashion_mnist(tmp_path)
    clothes = create("data", "fashion_mnist", path=str(tmp_path), pad_to=32)
    for data, name in ((digits(), "digits-cnn-64"), (clothes, "fashion-cnn-128")):
        options = tiny.options(extractor="auto", num_images=129, metrics=["kid"])
        evaluation = check_evaluation(options, data, num_classes=10)
        assert evaluation.extractor.name == name
        assert "label_accuracy" in [metric.name for metric in evaluation.metrics]
    # of other data its classes mean nothing
    other = check_evaluation(tiny.options(extractor="digits-cnn-64", metrics=["kid"]), tiny.data)
    assert "label_accuracy" not in [metric.name for metric in other.metrics]
    # nor does it know classes that it was not trained on
    more = check_evaluation(tiny.options(metrics=["kid"]), tiny.data, num_classes=99)
    assert "label_accuracy" not in [metric.name for metric in more.metrics]


WORKER = """
import json, sys
from pathlib import Path
import torch
from tests.evaluation.tiny import Tiny
from tread_zoo.evaluation.score import distributed
folder = Path(sys.argv[1])
with distributed(torch.device("cpu")) as is_main:
    import torch.distributed as dist
    (folder / f"{dist.get_rank()}").mkdir()
    record = Tiny(folder / f"{dist.get_rank()}").score(num_images=33, batch_size=8)
if is_main:
    (folder / "record.json").write_text(json.dumps(record))
else:
    assert record["values"] == {}
"""


@pytest.mark.slow
def test_two_processes_score_as_one(tiny, tmp_path, free_port):
    ended = run_ranks("-c", WORKER, str(tmp_path), port=free_port)
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    two = json.loads((tmp_path / "record.json").read_text())
    one = tiny.score(num_images=33, batch_size=8)
    assert one["protocol"] == two["protocol"]
    for part in ("values", "real"):
        assert one[part].keys() == two[part].keys() >= set(METRICS)
        for name, value in one[part].items():
            # statistics are summed in another order; all else is the same to the bit
            assert two[part][name] == (pytest.approx(value, rel=1e-9) if name == "fid" else value)


# The held-out loss --------------------------------------------------------------------------------


def test_the_held_out_loss_is_that_of_fixed_draws_by_level(tiny):
    """Against a network whose loss is known at each level: it predicts nothing."""
    network, data = tiny.backbone, tiny.data
    given = {"seed": 3, "precision": "fp32"}
    state = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    one = held_out_loss(network, tiny.objective, data, **given)
    several = [held_out_loss(network, tiny.objective, data, num_draws=4, **given) for _ in "ab"]
    network.load_state_dict(state)
    x = data.codec.to_model(data.held_out.images, device=torch.device("cpu"))
    draws = [
        tiny.objective.draw(x.shape, make_image_generator("held_out", 3, n, images=range(len(x))))
        for n in range(4)
    ]
    for (mean, fourths), count in ((one, 1), (several[0], 4)):
        losses = torch.cat([(d.noise - x).square().mean((1, 2, 3)) for d in draws[:count]])
        losses = losses[torch.cat([d.level for d in draws[:count]]).argsort()]
        assert mean == pytest.approx(float(losses.mean()), rel=1e-6)
        assert fourths == pytest.approx([float(p.mean()) for p in losses.tensor_split(4)], rel=1e-5)
    assert several[0] == several[1]


def test_held_out_images_are_of_all_the_data_however_they_are_sorted():
    labels = stack_part(ArrayDataset(random_images(60), torch.arange(60)), 6)[1]
    assert labels.diff().tolist() == pytest.approx([10] * 5, abs=2)


def test_the_held_out_record_knows_objective_draws_and_images(tiny):
    def record_of(objective, data=tiny.data, **changes):
        return held_out_record(objective, data, **{"seed": 0, "num_draws": 1, **changes})

    one = record_of(EDM())
    assert one == record_of(EDM(sigma_max=40.0, rho=5.0)), "no loss knows them"
    held_out = tiny.data.held_out
    relabelled = ArrayDataset(held_out.images, (held_out.labels + 1) % 3)
    repainted = ArrayDataset(random_images(15, seed=9), held_out.labels)
    others = [record_of(EDM(p_mean=-0.4)), record_of(FlowMatching()), record_of(EDM(), seed=1)]
    others += [
        record_of(EDM(), dataclasses.replace(tiny.data, held_out=part))
        for part in (relabelled, repainted)
    ]
    assert all(other != one for other in others)
    assert record_of(EDM(), dataclasses.replace(tiny.data, held_out=None)) == {}
