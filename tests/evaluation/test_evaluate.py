"""Whole scores: against torch-fidelity on the same images, streamed, shared by processes."""

import dataclasses
import json
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from tests.evaluation.tiny import METRICS, Tiny, write_data, write_features
from tests.scripts.test_command_line import call
from tests.small_run import SMALL, full_settings, parts_of, settings
from tests.training.test_distributed import launch
from tread_zoo.data import ArrayDataset, digits, to_uint8
from tread_zoo.diffusion import generate
from tread_zoo.evaluation import score
from tread_zoo.evaluation.dinov2 import DINOV2_WIDTHS
from tread_zoo.evaluation.evaluate import classifier_agreement, describe_record
from tread_zoo.evaluation.extraction import Needs, extract
from tread_zoo.evaluation.extractors import (
    FEATURES,
    INCEPTION_SIZES,
    Weights,
    find_weights,
    open_extractor,
)
from tread_zoo.evaluation.features import load_digits_features
from tread_zoo.evaluation.made_reference import write_made
from tread_zoo.evaluation.metrics import check_few
from tread_zoo.evaluation.sharing import Share
from tread_zoo.evaluation.sources import TensorImages


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def samples(tiny):
    """What the evaluation draws, drawn in one go: images and labels."""
    labels = torch.arange(23) % 3
    parts = tiny.parts
    x = generate(
        tiny.backbone, parts.objective, parts.sampling, indices=range(23), labels=labels, seed=1,
        batch_size=7,
    )  # fmt: skip
    return to_uint8(x), labels


def test_metrics_equal_those_of_torch_fidelity_on_the_same_images():
    """Its own loop over the images, its own statistics and metrics, around the same network."""
    import torch_fidelity
    from torch.utils.data import Dataset

    network = load_digits_features()

    class Images(Dataset):
        def __init__(self, images):
            self.images = images

        def __len__(self):
            return len(self.images)

        def __getitem__(self, index):
            return self.images[index].expand(3, -1, -1)

    class Digits(torch_fidelity.FeatureExtractorBase):
        def __init__(self, name, features_list, **settings):
            super().__init__(name, features_list)

        @staticmethod
        def get_provided_features_list():
            return "64", "logits"

        @staticmethod
        def get_default_feature_layer_for_metric(metric):
            return "logits" if metric == "isc" else "64"

        def forward(self, images):
            found = dict(zip(("64", "logits"), network(images[:, :1]), strict=True))
            return tuple(found[name] for name in self.features_list)

    torch_fidelity.register_feature_extractor("of-a-test", Digits)
    data = digits()
    generated, real = data.held_out.images[:200], data.train.images[:300]
    theirs = torch_fidelity.calculate_metrics(
        input1=Images(generated), input2=Images(real), feature_extractor="of-a-test", batch_size=50,
        fid=True, kid=True, prc=True, isc=True, kid_subset_size=200, rng_seed=3, cuda=False,
        cache=False, save_cpu_ram=True, verbose=False,
    )  # fmt: skip
    ours = score(generated, real, metrics=METRICS, seed=3, batch_size=50)["values"]
    assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-3)
    for name, other in (
        ("kid", "kernel_inception_distance_mean"), ("kid_std", "kernel_inception_distance_std"),
        ("precision", "precision"), ("recall", "recall"), ("isc", "inception_score_mean"),
        ("isc_std", "inception_score_std"),
    ):  # fmt: skip
        assert ours[name] == pytest.approx(theirs[other], rel=1e-5, abs=1e-8), name


def test_streamed_samples_score_as_if_they_were_all_there(tiny, samples):
    images, labels = samples
    record = tiny.score()
    whole = score(
        images, tiny.real, extractor=tiny.extractor, metrics=METRICS, seed=1, batch_size=7
    )
    values = dict(record["values"])
    assert values.pop("agreement") == classifier_agreement(tiny.extractor, images, labels)
    assert values == whole["values"]
    for field in ("extractor_sha256", "reference_sha256", "num_generated", "num_reference"):
        assert record["protocol"][field] == whole[field]
    held_out = tiny.parts.data.held_out
    real = score(
        held_out.images, tiny.real, extractor=tiny.extractor, metrics=METRICS, seed=1, batch_size=7,
        allow_few_images=True,
    )["values"]  # fmt: skip
    agreed = classifier_agreement(tiny.extractor, held_out.images, held_out.labels)
    assert record["real"] == {"agreement": agreed, **real}


def test_few_images_held_out_are_scored_by_what_they_allow(tiny):
    whole = tiny.parts.data
    for count, allowed in ((1, set()), (3, {"fid", "kid", "kid_std"})):
        few = dataclasses.replace(
            whole, held_out=ArrayDataset(*whole.held_out.gather(torch.arange(count)))
        )
        record = tiny.score(data=few)
        assert record["real"].keys() == {"agreement", *allowed}
        assert record["values"].keys() > set(METRICS)


def test_the_record_is_json_and_has_the_protocol(tiny):
    record = tiny.score()
    assert json.loads(json.dumps(record)) == record
    protocol = record["protocol"]
    assert protocol["extractor"] == f"own@{protocol['extractor_sha256'][:8]}"
    assert (protocol["resize"], protocol["device"], protocol["precision"]) == (
        "none",
        "cpu",
        "fp32",
    )
    assert protocol["uint8"].startswith("clamp to [-1, 1]")
    assert (protocol["torch"], protocol["seed"]) == (torch.__version__, 1)
    assert len(protocol["reference_sha256"]) == 64
    assert protocol["sampling"]["nfe"] == 2
    said = "\n".join(describe_record(record))
    assert f"tiny.npz (train, sha256 {protocol['reference_sha256'][:8]})" in said
    assert "notes" not in protocol, "23 and 45 images are more than 16 features"
    few = tiny.score(num_images=12, metrics=["fid"])
    assert "note: fid: the samples' covariance, of 16 features, is singular" in "\n".join(
        describe_record(few)
    )


def test_samples_are_kept_where_asked_and_never_mixed(tiny, samples, tmp_path):
    folder = tmp_path / "kept"
    tiny.score(metrics=[], keep_images=str(folder))
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{number:06d}.png" for number in range(23)]
    found = np.stack([np.asarray(Image.open(folder / name)) for name in names])
    assert np.array_equal(found, samples[0][:, 0].numpy())
    with pytest.raises(ValueError, match=r"keep_images=.*kept' is not empty"):
        tiny.score(metrics=[], keep_images=str(folder))


def test_a_network_that_gives_nan_is_told(tiny):
    head = list(tiny.backbone.parameters())[-1]
    kept = head.detach().clone()
    with torch.no_grad():
        head.fill_(float("nan"))
    try:
        with pytest.raises(ValueError, match=r"has NaN; no image can be made of it"):
            tiny.score()
    finally:
        with torch.no_grad():
            head.copy_(kept)


def test_too_few_images_are_told_before_any_work(tiny, monkeypatch):
    monkeypatch.setattr("tread_zoo.evaluation.evaluate.generate", None)
    with pytest.raises(ValueError, match=r"evaluation.num_images has 9 image\(s\); isc takes at"):
        tiny.score(num_images=9)
    few = write_features(tiny.folder / "few.safetensors", num_classes=2)
    with pytest.raises(ValueError, match="knows 2 classes, and the data have 3"):
        tiny.score(extractor=few)
    wide = write_features(tiny.folder / "wide.safetensors", shape=(1, 8, 12))
    with pytest.raises(ValueError, match=r"trained on images \[C,H,W\] of \(1, 8, 12\)"):
        tiny.score(extractor=wide)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": ["sfid"]}, r"'sfid', which is defined on layers of Inception"),
        ({"metrics": ["fd_dinov2"]}, r"'fd_dinov2'.*set extractor='dinov2-vit-l-14'"),
        ({"metrics": ["fid"], "extractor": "dinov2-vit-l-14"}, r"call it 'fd_dinov2'"),
        ({"metrics": ["isc"], "extractor": "dinov2-vit-l-14"}, r"it has no classes"),
        ({"metrics": ["fdi"]}, r"evaluation.metrics='fdi' is unknown. Did you mean 'fid'"),
    ],
)
def test_metrics_that_do_not_fit_the_features(tiny, changes, words):
    with pytest.raises(ValueError, match=words):
        tiny.options(**changes)


def test_no_more_than_three_batches_are_in_memory(tiny):
    """A set of any size can be gone through: what was read is let go."""
    alive, most = weakref.WeakSet(), []

    class Many:
        shape = (1, 8, 8)

        def __len__(self):
            return 100

        def read(self, chosen):
            images = torch.full((len(chosen), 1, 8, 8), chosen.start, dtype=torch.uint8)
            alive.add(images)
            most.append(len(alive))
            return images

    extractor = open_extractor(find_weights(tiny.extractor), [FEATURES], torch.device("cpu"))
    found = extract(Many(), extractor, Needs(frozenset({FEATURES})), batch_size=5)
    assert (found.count, found.rows) == (100, {})
    assert len(most) == 20
    assert max(most) <= 3


def test_every_image_is_of_one_process():
    for count, size, world in ((23, 7, 2), (20, 10, 3), (3, 10, 2), (0, 5, 2)):
        ranges = [list(Share(rank, world).batches(count, size)) for rank in range(world)]
        numbers = [number for own in ranges for chosen in own for number in chosen]
        assert sorted(numbers) == list(range(count))
        assert [chosen for own in ranges for chosen in own if len(chosen) == size] or count < size


@pytest.mark.slow
def test_two_processes_score_as_one(tmp_path, free_port):
    write_data(tmp_path / "tiny.npz")
    features = write_features(tmp_path / "own.safetensors")
    data = ["data=npz", f"data.path={tmp_path / 'tiny.npz'}", "data.held_out=0.25"]
    call("train.py", *SMALL, *data, f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    asked = [
        f"checkpoint={tmp_path / 'run'}", "device=cpu", f"evaluation.extractor={features}",
        f"evaluation.metrics=[{','.join(METRICS)}]", "evaluation.num_images=33",
        "evaluation.batch_size=8", "evaluation.allow_few_images=true",
    ]  # fmt: skip

    def keeping(name):
        return [*asked, f"out={tmp_path / name}.json", f"evaluation.keep_images={tmp_path / name}"]

    call("evaluate.py", *keeping("one"), cwd=tmp_path)
    said = launch("scripts/evaluate.py", *keeping("two"), port=free_port)
    assert said.count("written to") == 1
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for part in ("values", "real"):
        assert one[part].keys() == two[part].keys() >= set(METRICS)
        for name, value in one[part].items():
            # statistics are summed in another order; all else is the same to the bit
            assert two[part][name] == (pytest.approx(value, rel=1e-9) if name == "fid" else value)
    assert one["protocol"] == two["protocol"]
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    assert len(list((tmp_path / "two").iterdir())) == 33


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_images": 16}, r"evaluation.num_images=16, and 'fid' compares covariances of 16 feat"
         r"ures \(own\).*Set evaluation.num_images=17 or more.*metrics=\[kid,precision,recall,isc\]"
         r"; evaluation.allow_few_images=true"),
        ({"num_reference": 16}, r"reference='train' has 16 image\(s\), and 'fid'.*Give a "
         r"reference of 17 images"),
        ({"reference": "held_out"}, r"reference='held_out' has 15 image\(s\), and 'fid'"),
        ({"reference": "made"}, r"made.safetensors' has 16 image\(s\), and 'fid'"),
    ],
)  # fmt: skip
def test_a_distance_takes_more_images_than_features(tiny, monkeypatch, changes, words):
    """Before anything is sampled; without distances, or asked for all the same, it is scored."""
    if changes.get("reference") == "made":
        opened = open_extractor(find_weights(tiny.extractor), [FEATURES], torch.device("cpu"))
        needs = Needs(frozenset({FEATURES}), frozenset({FEATURES}))
        found = extract(TensorImages(tiny.real[:16]), opened, needs, batch_size=9)
        write_made(tiny.folder / "made.safetensors", found, opened, "few")
        changes = {"reference": str(tiny.folder / "made.safetensors")}
    rest = [metric for metric in METRICS if metric != "fid"]
    assert "fid" not in tiny.score(**changes, metrics=rest, allow_few_images=False)["values"]
    noted = tiny.score(**changes)["protocol"]["notes"]
    assert "covariance, of 16 features, is singular" in "".join(noted)
    monkeypatch.setattr("tread_zoo.evaluation.evaluate.generate", None)
    with pytest.raises(ValueError, match=words):
        tiny.score(**changes, allow_few_images=False)


def test_images_held_out_are_scored_by_what_they_are_enough_for(tiny):
    """15 of them, and 16 features: their distance would be of another kind than the samples'."""
    record = tiny.score(allow_few_images=False)
    assert "fid" in record["values"]
    assert record["real"].keys() == record["values"].keys() - {"fid"}


@pytest.mark.parametrize(
    ("extractor", "metric", "enough"),
    [("digits-cnn-64", "fid", 65), ("inception-v3-compat", "fid", 2049),
     ("inception-v3-compat", "sfid", 2024), ("dinov2-vit-l-14", "fd_dinov2", 1025)],
)  # fmt: skip
def test_how_many_are_enough(extractor, metric, enough, tmp_path):
    """As the networks have them: 64, 2048, 17x17x7, and 1024 of the large transformer."""
    sizes = {"digits-cnn-64": {FEATURES: 64}, "inception-v3-compat": INCEPTION_SIZES}
    given = sizes.get(extractor, {FEATURES: DINOV2_WIDTHS.get(extractor)})
    weights = Weights(extractor, tmp_path, extractor, None, "", given)
    if extractor == "digits-cnn-64":
        assert find_weights(extractor).sizes == given
    check_few("x", enough, [metric, "kid"], weights, ways="")
    with pytest.raises(ValueError, match=f"x, and '{metric}' compares"):
        check_few("x", enough - 1, [metric, "kid"], weights, ways="")


def test_training_refuses_before_the_first_step(tmp_path):
    asked = ("evaluation.metrics=[fid,kid]", "evaluation.num_images=64")
    with pytest.raises(ValueError, match=r"evaluation.num_images=64, and 'fid'.*=65 or more"):
        parts_of(settings(*asked))
    assert "allow_few_images" not in parts_of(settings()).settings["evaluation"]
    noted = parts_of(settings(*asked, "evaluation.allow_few_images=true"))
    assert noted.settings["evaluation"]["allow_few_images"] is True


def test_the_default_run_has_enough_images():
    assert parts_of(full_settings()).evaluation.num_images == 500
