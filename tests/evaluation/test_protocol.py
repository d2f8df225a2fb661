"""What every record says of what it depends on, and that tables refuse what differs in it."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.evaluation.tiny import Tiny, write_data
from tests.small_run import parts_of, settings
from tread_zoo.comparison.markdown import NEWER, SAME_PROTOCOL, check_same
from tread_zoo.data import ArrayDataset
from tread_zoo.data.codec import PIXELS
from tread_zoo.data.latents.codec import Decoder, LatentCodec
from tread_zoo.diffusion import EDM, FlowMatching
from tread_zoo.evaluation.protocol import decoder_record, held_out_record
from tread_zoo.training.scoring import Scorer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("tiny"))


def refused(first, second):
    """Return the words with which two protocols are refused one table; "" if they are not."""
    try:
        check_same([("one", first), ("other", second)], SAME_PROTOCOL, NEWER)
    except ValueError as error:
        return str(error)
    return ""


class Doubling:
    """An autoencoder without weights: 8x8 latents of 1 channel become 8x8 images."""

    def __init__(self, digest, factor=2.0):
        self.kind, self.sha256, self.factor = "AutoencoderOfATest", digest, factor

    def to(self, device):
        return self

    def decode(self, latents):
        return self.factor * latents


def latents_of(tiny, digest, *, known=True, scale=2.0):
    """Return the data of `tiny` as latents that an autoencoder with this hash decodes."""
    vae = Doubling(digest)
    kind, sha256 = (vae.kind, digest) if known else ("", None)
    codec = LatentCodec(
        "samples", False, "scale", (0.0,), (scale,), {"class": kind, "sha256": digest},
        Decoder("there", kind, sha256, vae),
    )  # fmt: skip
    data = tiny.parts.data
    train, held_out = (
        [(image[None].float() / 255, int(label)) for image, label in part]
        for part in (data.train, data.held_out)
    )
    return dataclasses.replace(data, train=train, held_out=held_out, codec=codec)


def test_latents_of_two_autoencoders_do_not_share_a_table(tiny, tmp_path):
    """Against one file of images, their records differed in nothing but the numbers."""
    np.savez(tmp_path / "adm.npz", arr_0=tiny.real.permute(0, 2, 3, 1).numpy())
    given = {"reference": str(tmp_path / "adm.npz"), "metrics": ["fid"]}
    one, other = (tiny.score(data=latents_of(tiny, d), **given)["protocol"] for d in "ab")
    assert one["decoder"] == {
        "class": "AutoencoderOfATest", "sha256": "a", "normalization": "scale", "shift": [0.0],
        "scale": [2.0],
    }  # fmt: skip
    assert "other was scored with decoder={'class': 'AutoencoderOfATest', 'sha256': 'b'" in refused(
        one, other
    )
    assert not refused(one, one)
    # a network on pixels has none, which is not to say that nobody knows
    pixels = tiny.score(**given)["protocol"]
    assert pixels["decoder"] is None
    assert "one with decoder={" in refused(one, pixels)
    older = {key: value for key, value in one.items() if key != "decoder"}
    assert not refused(older, other), "records from before the field are believed"


def test_an_autoencoder_that_nobody_named_before_is_told_by_what_is_there(tiny):
    found = decoder_record(latents_of(tiny, "c", known=False).codec)
    assert (found["class"], found["sha256"]) == ("AutoencoderOfATest", "c")
    codec = latents_of(tiny, "c").codec
    assert decoder_record(dataclasses.replace(codec, decoder=None)) is None
    assert decoder_record(dataclasses.replace(codec, scale=(3.0,))) != decoder_record(codec)
    assert decoder_record(PIXELS) is None


def test_a_score_of_agreement_alone_says_what_it_depends_on(tiny):
    whole, alone = tiny.score()["protocol"], tiny.score(metrics=[])["protocol"]
    names = ("seed", "uint8", "image_size", "channels", "num_generated", "decoder", "torch")
    assert {n: alone[n] for n in names} == {n: whole[n] for n in names}
    assert (alone["seed"], alone["image_size"], alone["channels"]) == (1, [8, 8], 1)
    seed = tiny.score(metrics=[], seed=2)["protocol"]
    assert "other was scored with seed=2, one with seed=1" in refused(alone, seed)


def scored(folder, *overrides, seed=0, precision="fp32"):
    """Return the record of a run of its first step, on data with random pixels."""
    file = write_data(folder / "cifar10.npz", seed=seed)
    given = ("data=npz", f"data.path={file}", "data.held_out=0.25", "training.score_every=0")
    parts = parts_of(settings(*given, *overrides))
    accelerator = SimpleNamespace(process_index=0, num_processes=1)
    return Scorer(parts, accelerator, precision).score(parts.backbone.eval(), 1, last=True)


@pytest.fixture(scope="module")
def flow(tmp_path_factory):
    return scored(tmp_path_factory.mktemp("flow"))


def test_the_held_out_loss_says_its_objective_draws_and_images(flow):
    protocol = json.loads(json.dumps(flow))["protocol"]
    assert protocol["held_out_objective"] == {
        "name": "flow", "time_distribution": "uniform", "logit_mean": 0.0, "logit_std": 1.0,
    }  # fmt: skip
    counts = [protocol[f"held_out_{name}"] for name in ("images", "draws", "seed")]
    assert counts == [15, 8, 0]
    assert len(protocol["held_out_sha256"]) == 64
    assert flow["values"].keys() == {"held_out_loss"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overrides": ["objective=edm"]}, "held_out_objective={'name': 'edm', 'sigma_data': 0.5"),
        ({"seed": 1}, "held_out_sha256="),
        ({"overrides": ["data.held_out=0.5"]}, "held_out_images=30, one with held_out_images=15"),
        ({"overrides": ["evaluation.seed=7"]}, "seed=7, one with seed=1"),
    ],
)
def test_losses_that_differ_in_it_do_not_share_a_table(flow, tmp_path, changes, words):
    """The second: two files, both called cifar10.npz."""
    overrides = changes.pop("overrides", ())
    other = scored(tmp_path, *overrides, **changes)
    assert other["protocol"]["data"] == flow["protocol"]["data"] == "cifar10.npz"
    assert words in refused(flow["protocol"], other["protocol"])


def test_rounding_is_shown_and_not_refused(flow, tmp_path):
    other = scored(tmp_path, precision="bf16")
    assert other["protocol"]["precision"] == "bf16"
    assert not refused(flow["protocol"], other["protocol"])


def test_of_an_objective_only_what_its_loss_knows_counts():
    data = SimpleNamespace(
        held_out=ArrayDataset(torch.zeros(3, 1, 2, 2).byte()), codec=SimpleNamespace(facts={})
    )

    def told(objective, data=data):
        return held_out_record(objective, data, seed=0, num_draws=1)

    assert told(EDM()) == told(EDM(sigma_max=40.0, rho=5.0))
    for objective in (EDM(p_mean=-0.4), EDM(sigma_data=1.0), FlowMatching()):
        assert told(objective)["held_out_objective"] != told(EDM())["held_out_objective"]
    # the same images with other labels, or read as other latents, are not the same data
    labelled = ArrayDataset(data.held_out.images, torch.tensor([0, 0, 1]))
    scaled = SimpleNamespace(facts={"scale": [2.0]})
    changed = [SimpleNamespace(held_out=labelled, codec=data.codec),
               SimpleNamespace(held_out=data.held_out, codec=scaled)]  # fmt: skip
    digests = {told(EDM(), one)["held_out_sha256"] for one in (data, *changed)}
    assert len(digests) == 3
    assert told(EDM(), SimpleNamespace(held_out=None, codec=PIXELS)) == {}


def test_each_key_is_compared_with_the_first_record_that_has_it():
    """An older record that comes first lets no others through that disagree."""
    shared = {"data": "d", "step": 1}
    older, one, other = shared, {**shared, "uint8": "nearest"}, {**shared, "uint8": "floor"}
    named = [("older", older), ("one", one), ("older too", older), ("other", other)]
    with pytest.raises(ValueError, match="other was scored with uint8=floor, one with uint8=near"):
        check_same(named, ("data", "step", "uint8"), ("uint8",))
    check_same(named[:3], ("data", "step", "uint8"), ("uint8",))
    with pytest.raises(ValueError, match="older too was scored with uint8=None, one with uint8=n"):
        check_same(named[1:3], ("uint8",))


def test_records_that_are_committed_belong_together():
    for file in (Path(__file__).parents[2] / "docs" / "comparison").rglob("results.json"):
        records = [r for r in json.loads(file.read_text()) if r.get("protocol")]
        keys = [key for key in SAME_PROTOCOL if key not in ("step", "sampling")]
        check_same([(str(r["choices"]), r["protocol"]) for r in records], keys, NEWER)
