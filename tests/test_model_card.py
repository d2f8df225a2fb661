"""A run as others get it: the folder that scripts/push.py writes, and scripts that take it."""

import ast
import html
import json
import re
import shutil
from contextlib import nullcontext

import huggingface_hub
import markdown
import pytest
import torch

from tests.processes import ROOT, run_python
from tests.published.tensors import theirs
from tests.small_run import train_small
from tread_zoo import load_pretrained, save_pretrained
from tread_zoo.model_card import write_model_folder
from tread_zoo.published import import_checkpoint
from tread_zoo.runs.checkpoint import CheckpointError, find_checkpoint, load_backbone
from tread_zoo.runs.restore import restore


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return train_small(folder)


@pytest.fixture
def pushed(run, tmp_path):
    return write_model_folder(run, tmp_path / "pushed", license="apache-2.0", repo="someone/digits")


def state(backbone):
    return torch.cat([value.flatten() for value in backbone.state_dict().values()])


def test_the_card_has_recipe_scores_and_licence(run, pushed):
    files = {path.name for path in pushed.iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors", "samples.png"}
    text = (pushed / "README.md").read_text()
    card = huggingface_hub.ModelCard(text)
    record = json.loads((run / "score.json").read_text())
    scores = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert scores == pytest.approx(record["values"], rel=5e-3)
    assert card.data.eval_results[0].task_type == "class-conditional-image-generation"
    assert "class-conditional-image-generation" in card.data.tags
    assert card.data.license == "apache-2.0"
    facts = json.loads((run / "facts.json").read_text())
    for said in (
        "dit_tiny", "![Samples](samples.png)", "flow", "digits", "adamw", "6 steps of 8 images",
        "of 16 tokens", f"{facts['flops_routed'] / 1e6:.1f} M per image", "held_out_loss",
        "checkpoint=someone/digits", "euler 2 steps",
    ):  # fmt: skip
        assert said in text, said


@pytest.mark.slow
def test_guided_samples_are_shown_with_their_settings(run, tmp_path):
    """One grid per setting; a grid of one class alone is not shown."""
    other = shutil.copytree(run, tmp_path / "other")
    for given in ("guidance.scale=1.5", "guidance.scale=1.5 seed=1", "guidance.scale=3 label=1"):
        words = [f"checkpoint={other}", "num_images=10", "device=cpu", *given.split()]
        done = run_python(ROOT / "scripts/sample.py", *words)
        assert done.returncode == 0, done.stderr
    pushed = write_model_folder(other)
    assert {path.name for path in pushed.glob("*.png")} == {"samples.png", "samples_2.png"}
    text = (pushed / "README.md").read_text()
    assert "Samples by euler 2 steps, cfg guidance 1.5, 4 evaluations" in text
    assert "![Samples](samples_2.png)" in text


@pytest.mark.parametrize(
    ("extractor", "expected"), [("inception-v3-compat@0123", "fid"), ("x@01", "frechet-distance")]
)
def test_fid_is_a_distance_of_inception_s_features_alone(run, tmp_path, extractor, expected):
    other = shutil.copytree(run, tmp_path / "other")
    record = json.loads((other / "score.json").read_text())
    record["protocol"]["extractor"] = extractor
    (other / "score.json").write_text(json.dumps(record | {"values": {"fid": 1.23456}}))
    card = huggingface_hub.ModelCard((write_model_folder(other) / "README.md").read_text())
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == (expected, 1.23)


def test_half_the_space_loses_no_more_than_float16_does(run, pushed, tmp_path):
    half = write_model_folder(run, tmp_path / "half", half=True)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (half, pushed)]
    assert sizes[0] < 0.6 * sizes[1]
    whole = state(load_pretrained(pushed))
    assert torch.equal(state(load_pretrained(half)), whole.half().float())


@pytest.mark.parametrize(
    "name", ['x"\n---\nlicense: mit', "a | b", "<script>alert(1)</script>", "a: &b *c", "```\n# b"]
)
def test_names_are_text_in_every_part_of_the_card(run, tmp_path, name):
    """In the YAML, in tables, in commands and in HTML, whatever the name of a folder or licence."""
    folder = write_model_folder(run, tmp_path / "pushed", license=f"other {name}", repo=name)
    text = (folder / "README.md").read_text(encoding="utf-8")
    card = huggingface_hub.ModelCard(text)
    assert (card.data.license, card.data.model_name) == (f"other {name}", name.rpartition("/")[2])
    body = text.split("\n---\n", 1)[1]
    shown = markdown.markdown(body, extensions=["tables", "fenced_code"])
    _, *headings = re.findall("<h[1-6]>(.*)</h[1-6]>", shown)
    assert headings == ["Use", "Recipe", "Scores", "Licence"]
    assert "<script" not in shown
    assert shown.count("<pre>") == shown.count("</pre>") == 3
    assert "license: mit" not in body.splitlines()
    code = html.unescape(re.findall("<pre><code[^>]*>(.*?)</code></pre>", shown, re.DOTALL)[1])
    assert ast.literal_eval(code.rpartition("load_pretrained")[2].strip()) == name


@pytest.mark.slow
def test_nothing_of_this_machine_is_published(run, tmp_path):
    """Neither of the run and its place, nor of files that its settings and scores name."""
    other = train_small(
        tmp_path / "other", "backbone=dit_tiny", "guidance=auto", f"guidance.weak_checkpoint={run}"
    )
    record = json.loads((other / "score.json").read_text())
    record["protocol"] |= {"reference": f"{tmp_path}/x.npz", "extractor": "y", "num_reference": 3}
    record["protocol"]["reference_sha256"] = "x"
    (other / "score_x.json").write_text(json.dumps(record | {"values": {"fid": 1.0}}))
    for folder in (write_model_folder(other), write_model_folder(other, tmp_path / "out")):
        card = (folder / "README.md").read_text()
        assert "against 3 x.npz" in card
        for text in (card, (folder / "config.json").read_text()):
            assert str(run.parent) not in text
            assert str(tmp_path) not in text


@pytest.mark.parametrize("name", ["dit", "sit"])
def test_imported_weights_keep_their_licence(tmp_path, name):
    torch.save(theirs(name), tmp_path / "theirs.pt")
    done = import_checkpoint(tmp_path / "theirs.pt", tmp_path / "run", format=name)
    card = huggingface_hub.ModelCard.load(
        write_model_folder(done.path, tmp_path / "one") / "README.md"
    )
    assert card.data.license == {"dit": "cc-by-nc-4.0", "sit": "mit"}[name]
    with pytest.raises(ValueError, match="cc-by-nc") if name == "dit" else nullcontext():
        write_model_folder(done.path, tmp_path / "two", license="apache-2.0")


def test_a_pushed_run_is_a_checkpoint(run, pushed):
    averaged = load_backbone(find_checkpoint(run))
    for backbone in (
        load_backbone(find_checkpoint(pushed)),
        load_pretrained(pushed),
        load_pretrained(run),
    ):
        assert torch.equal(state(backbone), state(averaged))
    restored = restore(pushed, weights="ema", device="cpu", precision="fp32")
    assert restored.sampling({}, {}).num_steps == 2
    assert restored.run_dir == pushed
    (pushed / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="damaged"):
        find_checkpoint(pushed)


def test_what_was_pushed_is_asked_for_by_its_name(run, tmp_path):
    pushed = find_checkpoint(write_model_folder(run, tmp_path / "pushed", weights="model"))
    model = load_backbone(find_checkpoint(run), "model")
    assert torch.equal(state(load_backbone(pushed, "model")), state(model))
    with pytest.raises(CheckpointError, match="set weights=model"):
        load_backbone(pushed, "ema")
    assert not list(pushed.path.glob("*.png"))  # the run's pictures are of the averaged weights
    assert " weights=model num_images" in (pushed.path / "README.md").read_text()
    whole = restore(run, weights="ema", device="cpu", precision="fp32")
    guidance = {"name": "auto", "weak_checkpoint": str(pushed.path)}
    weak = whole.weak(whole.sampling({}, guidance))
    assert torch.equal(state(weak.backbone), state(model))


def test_a_name_of_the_hub_is_a_checkpoint(pushed, tmp_path, monkeypatch):
    def snapshot_download(name, *, local_dir, **options):
        if name != "someone/digits":
            raise huggingface_hub.errors.LocalEntryNotFoundError("no such repository")
        return str(shutil.copytree(pushed, local_dir))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    found = find_checkpoint("someone/digits")
    assert (found.step, found.run_dir.as_posix()) == (6, "runs/someone/digits")
    with pytest.raises(CheckpointError, match="someone/nothing"):
        find_checkpoint("someone/nothing")
    with pytest.raises(CheckpointError, match="there is no runs"):
        find_checkpoint("runs/nothing")  # a slip, not a name: runs/ is here


def test_a_network_alone_is_no_checkpoint(run, tmp_path):
    save_pretrained(load_backbone(find_checkpoint(run)), tmp_path)
    with pytest.raises(CheckpointError, match="network alone"):
        find_checkpoint(tmp_path)
