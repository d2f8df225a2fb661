"""What a run writes, computes and refuses."""

import copy
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from tests.small_run import (
    SMALL,
    fields_of,
    parts_of,
    save_photos,
    settings,
    train_quickly,
    train_small,
)
from tread_zoo.config import make_config
from tread_zoo.diffusion import FlowMatching
from tread_zoo.registry import register
from tread_zoo.runs.checkpoint import find_checkpoint, load_backbone
from tread_zoo.training import loop
from tread_zoo.training.ema import WeightAverage
from tread_zoo.training.loop import train
from tread_zoo.training.meters import Window
from tread_zoo.training.optimizer_state import optimizer_state
from tread_zoo.training.run_page import write_run_page
from tread_zoo.training.setup import make_accelerator, to_devices
from tread_zoo.training.step import draw_step, step_loss
from tread_zoo.training.trackers import read_metrics


def test_a_run_leaves_what_it_should(tmp_path, caplog):
    options = ("training.sample_every=3", "training.checkpoint_every=3", f"run_dir={tmp_path}/run")
    with caplog.at_level(logging.INFO):
        folder = train(**settings(*options))
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {
        "checkpoints", "samples", "commands.jsonl", "config.json", "facts.json", "metrics.jsonl",
        "index.html", "loss.png", "samples.gif", "score.json", "scores.jsonl", "train.log",
    }  # fmt: skip
    assert [p.name for p in sorted((folder / "samples").iterdir())] == [
        "real.png", "step_00000003.png", "step_00000006.png",
    ]  # fmt: skip
    assert Image.open(folder / "loss.png").size[0] > 400
    rows = read_metrics(folder)
    expected = {"loss", "learning_rate", "images_per_s", "grad_norm", "peak_memory", "loss_level_1"}
    assert expected <= rows[0].keys()
    assert any("held_out_loss" in row for row in rows)
    assert "mfu" not in rows[0], "the peak of a CPU is not known"
    score = json.loads((folder / "score.json").read_text())
    assert 0 <= score["values"]["label_accuracy"] <= 1
    assert score["protocol"]["weights"] == "ema"
    config = json.loads((folder / "config.json").read_text())
    assert config == settings(*options)
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["num_steps"] == 6
    assert facts["data"]["num_images"] == 1438
    assert 0 < facts["flops_routed"] < facts["flops_dense"]
    assert facts["num_parameters"] == sum(p.numel() for p in parts_of(config).backbone.parameters())
    (kernel,) = (text for text in caplog.messages if text.startswith("kernel "))
    assert "attention" in kernel, "the kernels are those of the run's own architecture"
    for words in ("CPU", "see 8 of 16 tokens", "learning_rate 0.012", "1438 images", "step 2/6"):
        assert words in caplog.text
    log = (folder / "train.log").read_text()
    assert "for 3 steps" in log, "how long the run will take"
    assert "step 6/6" in log
    assert log.splitlines()[0].startswith("20")  # the year


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a run that ended."""
    return train_small(tmp_path_factory.mktemp("finished"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "labels"), [((12, 8, 3), {"labels": np.arange(40) % 3}), ((8, 8), {})]
)
def test_sizes_channels_and_classes_reach_the_backbone(run, tmp_path, size, labels):
    images = np.random.default_rng(0).integers(0, 255, (40, *size), np.uint8)
    np.savez(tmp_path / "x.npz", images=images, **labels)
    network = load_backbone(find_checkpoint(run("run", "data=npz", f"data.path={tmp_path}/x.npz")))
    assert (network.input_size, network.in_channels) == (size[:2], 3 if labels else 1)
    assert network.num_classes == (3 if labels else 0)


@pytest.mark.slow
def test_what_is_computed_again_costs_no_more_in_reports(finished, run):
    again = run("again", "training.activation_checkpointing=1", "training.num_steps=1")
    first, second = (json.loads((f / "facts.json").read_text()) for f in (finished, again))
    assert first["flops_dense"] == second["flops_dense"]


@pytest.mark.parametrize("limit", [0, 0.01])
def test_a_step_is_the_mean_gradient_of_its_micro_steps_clipped(run, limit):
    """Plain SGD applies the gradient itself; max_grad_norm=0 does not clip it."""
    setup = parts_of(settings("training.gradient_accumulation_steps=2"))
    before = {k: v.detach().clone() for k, v in setup.backbone.named_parameters()}
    batches = setup.batches()
    for micro in range(2):
        drawn = draw_step(setup, next(batches), micro, 0, torch.device("cpu"))
        (step_loss(setup, drawn).losses.mean() / 2).backward()
    folder = run(
        "run", "training.gradient_accumulation_steps=2", "training.num_steps=1",
        "optimizer=sgd_for_tests", "lr_schedule=constant", "lr_schedule.warmup_steps=0",
        f"training.max_grad_norm={limit}",
    )  # fmt: skip
    norm = float(torch.cat([p.grad.flatten() for p in setup.backbone.parameters()]).norm())
    assert norm > 0.1
    scale = limit / norm if limit else 1
    after = load_backbone(find_checkpoint(folder), "model").state_dict()
    for name, parameter in setup.backbone.named_parameters():
        expected = before[name] - scale * parameter.grad
        torch.testing.assert_close(after[name], expected, atol=1e-6, rtol=1e-4)


@register("optimizer", "sgd_for_tests")
@dataclass(frozen=True)
class SGD:
    def build(self, backbone):
        return torch.optim.SGD(backbone.parameters(), lr=1.0)


@register("objective", "flow_with_a_number")
@dataclass(frozen=True)
class FlowWithANumber(FlowMatching):
    def loss(self, predict, x, draw):
        losses, values = super().loss(predict, x, draw)
        return losses, {**values, "brightness": x.mean(dim=(1, 2, 3)), "twice": 2 * losses}


@pytest.mark.slow
def test_schedules_count_optimizer_steps(run):
    """Whatever the number of micro-steps: of the rate of routes, and the learning rate."""
    given = ["training.gradient_accumulation_steps=2", "routing.start=1", "routing.end=3"]
    given += ["routing.selection_rate=[steps,0.5,[0.5,0.75]]"]
    setup = parts_of(settings(*given, "training.horizontal_flip=true"))
    kept = [
        draw_step(setup, batch, micro, 0, torch.device("cpu"))[3][0].ids.shape[1]
        for micro, batch in enumerate(setup.batches())
    ]
    assert kept == 6 * [8] + 6 * [4]  # of 16 tokens
    given += ["lr_schedule=linear", "lr_schedule.warmup_steps=2", "training.log_every=1"]
    given += ["evaluation.metrics=[]"]
    rows = read_metrics(run("run", *given, "optimizer.learning_rate=1e-3"))
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_losses_are_logged_by_noise_level_the_lowest_first():
    state = to_devices(
        parts_of(settings()), make_accelerator(parts_of(settings()), torch.device("cpu"), "fp32"),
        None,
    )  # fmt: skip
    window, levels = Window(state), torch.tensor([0.7, 0.1, 0.9, 0.3])
    window.add(2 * levels, {}, levels)
    state.step, state.seconds["training"] = 1, 1.0
    numbers = window.close(state)
    found = [numbers[f"loss_level_{i}"] for i in (1, 2, 3, 4)]
    assert found == pytest.approx([0.2, 0.6, 1.4, 1.8])


@pytest.mark.slow
def test_what_the_objective_names_is_logged(run):
    rows = [r for r in read_metrics(run("run", "objective=flow_with_a_number")) if "loss" in r]
    for row in rows:  # means of the window
        assert row["twice"] == pytest.approx(2 * row["loss"], rel=1e-5)
        assert -1 < row["brightness"] < 1


@register("objective", "flow_that_breaks")
@dataclass(frozen=True)
class FlowThatBreaks(FlowMatching):
    """Flow matching whose loss at step `at`, or whose gradient, is not finite."""

    value: str = "nan"
    at: int = 3
    losses: ClassVar[list] = []  # of each step

    def loss(self, predict, x, draw):
        losses, values = super().loss(predict, x, draw)
        self.losses.extend([losses] * (not x.is_meta))  # FLOPs are counted there
        if len(self.losses) == self.at and not x.is_meta:
            broken = losses + float(self.value) if self.value != "gradient" else losses
            broken.register_hook(lambda gradient: gradient * math.inf)
            return broken, values
        return losses, values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "words"), [("nan", "nan"), ("inf", "inf"), ("gradient", r"[0-9.]+, the norm of its")]
)
@pytest.mark.parametrize("every", [1, 5])
def test_a_step_that_is_not_finite_ends_the_run_without_it(
    run, tmp_path, monkeypatch, value, words, every
):
    """The host learns of it where it waits anyway: at a checkpoint, or a line of the log. Averages
    stay as they are, too."""
    moved, update = [], WeightAverage.update

    def updated(average, *given):
        before = copy.deepcopy(average.network.state_dict())
        update(average, *given)
        after = average.network.state_dict()
        moved.append(not all(torch.equal(tensor, after[key]) for key, tensor in before.items()))

    monkeypatch.setattr(WeightAverage, "update", updated)
    FlowThatBreaks.losses.clear()
    given = ["objective=flow_that_breaks", f"objective.value={value}", "training.log_every=5"]
    with pytest.raises(FloatingPointError, match=rf"step 3: the loss is {words}.*resume=latest"):
        run("run", *given, f"training.checkpoint_every={every % 5}")
    assert len(FlowThatBreaks.losses) == (3 if every == 1 else 5)
    assert moved == [True, True, False, True, True][: len(FlowThatBreaks.losses)]
    assert "the loss is" in (tmp_path / "run" / "train.log").read_text()
    if every == 1:
        checkpoint = find_checkpoint(tmp_path / "run")
        assert checkpoint.step == 2
        assert all(tensor.isfinite().all() for tensor in checkpoint.tensors("model").values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd_for_tests"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer):
    """Neither weights nor moments nor averages; the last optimizer knows no `found_inf`."""
    options = [f"optimizer={optimizer}", "training.ema_snapshots_every=3"]
    setup = parts_of(settings(*options, "training.gradient_accumulation_steps=2"))
    state = to_devices(setup, make_accelerator(setup, torch.device("cpu"), "fp32"), None)
    batches, window, changed = setup.batches(), Window(state), []
    weight = next(setup.backbone.parameters())
    for bad in (False, False, True, False):
        before = copy.deepcopy(tensors_of(state))
        factor = math.nan if bad else 1.0
        hook = weight.register_hook(lambda gradient, factor=factor: factor * gradient)
        skipped = loop.optimize(state, batches, window)
        state.step += 1
        for average in state.averages.values():
            average.update(setup.backbone, state.step, skipped)
        hook.remove()
        assert bool(skipped) == bad
        now = tensors_of(state)
        changed.append(sum(not torch.equal(now[key], value) for key, value in before.items()))
    assert changed[2] == 0
    assert min(changed[1], changed[3]) > 10


def tensors_of(state):
    """Return all that a step changes, by name."""
    moments, _ = optimizer_state(state.optimizer, state.parameters)
    averages = {
        f"{part}.{name}": tensor
        for part, average in state.averages.items()
        for name, tensor in average.network.named_parameters()
    }
    return {**state.parameters, **moments, **averages}


@register("guidance", "fails")
@dataclass(frozen=True)
class Fails:
    def dx_dt(self, batch):
        return {}["slope"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["routing.start=9", "routing.end=11"], "start=9.*4 blocks"),
        (["backbone.patch_size=3"], r"input_size=\(8, 8\).*patch_size=3"),
        (["training.precision=fp16"], "precision=fp16"),
        (["guidance=path_drop"], "guidance.drop_path.*routing=sprint"),
        (["routing.warm_start=0.5", "routing.dense_tail=0.45", "training.num_steps=2"],
         "leave none of training.num_steps=2"),
        (["guidance=cfg", "guidance.channels=99"], r"guidance\.channels=99.* 1"),
        (["guidance=fails"], "guidance=fails.*KeyError"),
        (["resume=/nowhere"], "there is no /nowhere"),
        (["data=npz", "data.path=/nowhere.npz"], "/nowhere.npz"),
    ],
)  # fmt: skip
def test_bad_settings_raise_before_anything_is_written(run, tmp_path, overrides, words):
    with pytest.raises((ValueError, OSError), match=words):
        run("run", *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_finished_run_is_not_replaced_by_accident(run, finished, copy_of, tmp_path):
    folder = copy_of(finished)
    (folder / "config.json").unlink()  # as that of an imported network
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"resume=latest.*overwrite=true"):
        run("run", "seed=1")
    assert (folder / "metrics.jsonl").read_text() == before
    run("run", "training.num_steps=1", "overwrite=true")
    (aside,) = tmp_path.glob("run.*")
    assert (aside / "metrics.jsonl").read_text() == before
    assert [find_checkpoint(each).step for each in (aside, folder)] == [6, 1]


def test_a_folder_of_something_else_is_left_alone(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        run("run", "overwrite=true")


@pytest.mark.slow
def test_forms_set_by_hand_run_and_are_refused_by_name(run):
    from tread_zoo.kernels import get_forms, set_forms

    try:
        run("run", "kernels.attention=naive")
        assert get_forms()["attention"] == "naive"
        with pytest.raises(ValueError, match=r"form of attention='naiv' is unknown"):
            run("other", "kernels.attention=naiv")
    finally:
        set_forms({})


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["dit", pytest.param("mamba", marks=pytest.mark.nightly)])
def test_compiled_blocks_train_as_they_are(run, monkeypatch, backbone):
    """Graphs are captured, not translated, which suffices to test compiling and resuming."""
    from tread_zoo.training import setup

    monkeypatch.setattr(setup, "COMPILE_BACKEND", "eager")
    plain, compiled = (
        read_metrics(run(name, f"backbone={backbone}", f"training.compile={name}"))
        for name in ("false", "true")
    )
    for one, other in zip(plain, compiled, strict=True):
        assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [4, 0])
def test_real_images_lie_beside_samples_of_their_classes(run, tmp_path, num_classes):
    """Of a set that is sorted by class, as many are; without labels they are of all of it."""
    labels = np.arange(200) // 50
    images = np.broadcast_to((60 * labels)[:, None, None], (200, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "sorted.npz", images=images, labels=labels)
    data = ["data=npz", f"data.path={tmp_path}/sorted.npz", f"data.num_classes={num_classes}"]
    folder = run("run", *data, "training.num_steps=1")
    picture = Image.open(folder / "samples" / "real.png")
    rows, columns, top = map(int, picture.info["grid"].split())
    grid, side = np.asarray(picture)[top:], picture.width // columns
    shown = (grid[side // 2 :: side, side // 2 :: side][:rows, :columns] // 60).flatten().tolist()
    if num_classes:
        assert (rows, columns) == (10, 8)  # two columns for each class
        assert shown == [i % 4 for i in range(80)]
    else:
        assert set(shown) == {0, 1, 2, 3}


@pytest.mark.slow
def test_what_is_said_before_the_folder_is_there_is_in_the_log(run, tmp_path):
    """What the data leaves out, and a route that does not fit."""
    for number in range(20):
        folder = tmp_path / "own" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    (tmp_path / "own" / "a" / "notes.md").write_text("no picture")
    logging.getLogger("tread_zoo").setLevel(logging.NOTSET)
    folder = run(
        "run", "data=image_folder", f"data.path={tmp_path / 'own'}", "evaluation.metrics=[]"
    )
    text = (folder / "train.log").read_text()
    for word in ("ignored ", "routing: "):
        assert text.count(f"  {word}") == 1, word
    assert text.index("  ignored ") < text.index("  backbone ")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", "held_out"])
def test_an_item_that_cannot_be_read_is_listed_and_logged_once(run, tmp_path, caplog, part):
    data = save_photos(tmp_path / "photos")
    items = getattr(parts_of(settings(*data)).data, part)
    bad = Path(items.item_name(0))
    bad = bad.rename(bad.with_name(f"{bad.stem}\n\u2028\x85.png"))
    bad.write_bytes(bad.read_bytes()[:60])
    every = ["training.batch_size=12", "training.sample_every=2", "sampler.num_steps=1"]
    done = run("run", *data, *every)
    (line,) = (done / "corrupt.txt").read_text().splitlines()
    assert bad.stem[:2] in line
    assert any(row.get("corrupt_items") == 1 for row in read_metrics(done))
    assert sum(str(bad.parent) in record.message for record in caplog.records) == 1
    with pytest.raises(ValueError, match=r"1 of 40 .* training.max_corrupt_share=0 "):
        run("other", *data, *every, "training.max_corrupt_share=0")


def test_blocks_to_measure_that_the_network_lacks_are_refused_at_the_start(run):
    with pytest.raises(ValueError, match=r"block_ranges has \[2, 80\].* give 0 <= start"):
        run("run", "evaluation.block_ranges=[[2,80]]")


@pytest.mark.slow
def test_a_budget_of_flops_sets_the_steps(tmp_path, monkeypatch):
    """Routing gets more steps for it; a resume with a larger one goes on."""
    budget, facts = 1e8, {}
    for name, routing in {"dense": "none", "routed": "tread"}.items():
        given = fields_of(*(word for word in SMALL if "num_steps=6" not in word))
        given["training"] |= {"num_flops": budget, "activation_checkpointing": 1}
        train_quickly(**given, routing=routing, run_dir=str(tmp_path / name))
        facts[name] = json.loads((tmp_path / name / "facts.json").read_text())
        per_step = facts[name]["images_per_step"] * facts[name]["flops_routed"]
        assert abs(facts[name]["num_steps"] - budget / per_step) <= 0.5
    assert facts["routed"]["num_steps"] > facts["dense"]["num_steps"]
    monkeypatch.chdir(tmp_path)
    assert train_quickly(**given) == train_quickly(**given, resume="latest")  # a folder by name
    run = tmp_path / "dense"
    train_quickly(resume="latest", run_dir=str(run), training={"num_flops": 1.5 * budget})
    assert find_checkpoint(run).step == round(1.5 * budget / 8 / facts["dense"]["flops_dense"])
    with pytest.raises(ValueError, match=r"training.num_flops=1e\+08 sets .* leave one"):
        make_config(training={"num_flops": budget, "num_steps": 3})


@pytest.mark.slow
def test_a_run_s_page_shows_its_losses_and_samples_and_how_it_ended(run, tmp_path):
    """While it trains, it loads itself again."""
    page = tmp_path / "run" / "index.html"
    FlowThatBreaks.losses.clear()
    with pytest.raises(FloatingPointError):
        run("run", "objective=flow_that_breaks", "objective.at=6", "training.log_every=1")
    assert "error: step 6: the loss is nan" in page.read_text()
    assert page.read_text().count("<polyline") == 2
    write_run_page(page.parent, read_metrics(page.parent), ["step 5/6", "a <b>"])
    assert 'http-equiv="refresh"' in page.read_text()
    assert "a &lt;b&gt;" in page.read_text()
    run("run", "overwrite=true", "training.log_every=1")
    for words in ("label_accuracy", 'src="samples/step_00000006.png"'):
        assert words in page.read_text()
    assert "refresh" not in page.read_text()
