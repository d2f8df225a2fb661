import json
import logging

import pytest
import torch
from PIL import Image

from tests.small_run import parts_of, settings, train_small
from tests.training.worker import join
from tread_zoo.training import loop as module
from tread_zoo.training import train
from tread_zoo.training.averaging import WeightAverage
from tread_zoo.training.checkpoints import find_checkpoint, load_backbone
from tread_zoo.training.options import TrainingOptions
from tread_zoo.training.parts import draw_step


def test_a_run_leaves_what_it_should(run, caplog):
    with caplog.at_level(logging.INFO):
        folder = run("run", "training.sample_every=3", "training.checkpoint_every=3")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "checkpoints", "samples", "config.json", "metrics.jsonl", "loss.png", "score.json",
        "scores.jsonl",
    }  # fmt: skip
    assert [p.name for p in sorted((folder / "samples").iterdir())] == [
        "step_00000003.png", "step_00000006.png",
    ]  # fmt: skip
    assert Image.open(folder / "loss.png").size[0] > 400
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert {"loss", "learning_rate", "images_per_s", "grad_norm"} <= rows[0].keys() - {"step"}
    assert any("held_out_loss" in row for row in rows)
    score = json.loads((folder / "score.json").read_text())
    assert 0 <= score["values"]["agreement"] <= 1
    assert score["protocol"]["weights"] == "ema"
    for words in ("CPU", "selective_scan", "routing", "see 8 of 16 tokens", "MFLOPs"):
        assert words in caplog.text


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a run that saved at each step and kept three."""
    options = ("training.checkpoint_every=1", "training.keep_checkpoints=3")
    return train_small(tmp_path_factory.mktemp("finished"), *options)


def test_checkpoints_rotate(finished):
    assert [p.name for p in sorted((finished / "checkpoints").iterdir())] == [
        f"step_{step:08d}" for step in (4, 5, 6)
    ]


def test_unlabelled_data_trains_unconditionally(run, tmp_path):
    import numpy as np

    file = tmp_path / "grey.npz"
    np.savez(file, images=np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8))
    for backbone in ("dit", "mamba"):
        folder = run(backbone, f"backbone={backbone}", "data=npz", f"data.path={file}")
        assert load_backbone(find_checkpoint(folder)).num_classes == 0


def test_sizes_channels_and_classes_reach_the_backbone(run, tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    file = tmp_path / "colour.npz"
    images = rng.integers(0, 255, (40, 12, 8, 3), np.uint8)
    np.savez(file, images=images, labels=np.arange(40) % 3)
    folder = run("run", "data=npz", f"data.path={file}")
    backbone = load_backbone(find_checkpoint(folder))
    assert (backbone.input_size, backbone.in_channels, backbone.num_classes) == ((12, 8), 3, 3)


def test_the_checkpoint_holds_what_was_trained(finished):
    checkpoint = find_checkpoint(finished)
    averaged, last = (load_backbone(checkpoint, weights) for weights in ("ema", "model"))
    pairs = list(zip(averaged.parameters(), last.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all(p.dtype == torch.float32 for p in averaged.parameters())


def test_gradient_accumulation_equals_the_larger_batch():
    """Two micro-steps of 4 give the gradient of 8 images, when the draws are the same."""
    parts = parts_of(settings("training.batch_size=4"))
    for parameter in parts.backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batches = parts.batches(0, 1, 0)
    draws = [
        draw_step(parts, *next(batches), rank=0, micro_step=m, device=torch.device("cpu"))
        for m in range(2)
    ]
    for drawn in draws:
        (module.losses_of(parts.backbone, parts, drawn).mean() / 2).backward()
    small = [p.grad.clone() for p in parts.backbone.parameters()]
    parts.backbone.zero_grad()
    module.losses_of(parts.backbone, parts, join(draws)).mean().backward()
    for a, p in zip(small, parts.backbone.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, atol=1e-6, rtol=1e-4)


def test_the_average_follows_its_formula():
    network = parts_of(settings()).backbone
    average = WeightAverage(network, 0.5)
    weight, averaged = network.patch_embed.weight, average.network.patch_embed.weight
    expected = weight.detach().clone()
    for step in range(1, 6):
        torch.nn.init.normal_(weight)
        average.update(network, step, torch.ones(()))
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight.detach()
        torch.testing.assert_close(averaged, expected)
    assert not averaged.requires_grad


def options(**changes):
    return TrainingOptions(**{**settings()["training"], **changes})


def test_learning_rate_schedules():
    plan = options(num_steps=110, warmup_steps=10, learning_rate=1.0, schedule="cosine")
    assert plan.learning_rate_at(0) == pytest.approx(0.1)
    assert plan.learning_rate_at(9) == plan.learning_rate_at(10) == 1.0
    assert plan.learning_rate_at(60) == pytest.approx(0.5)
    assert plan.learning_rate_at(109) < 0.001
    linear = options(num_steps=110, warmup_steps=10, learning_rate=1.0, schedule="linear")
    assert linear.learning_rate_at(60) == pytest.approx(0.5)
    constant = options(num_steps=110, warmup_steps=10, learning_rate=1.0, schedule="constant")
    assert constant.learning_rate_at(109) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_steps": 0}, "training.num_steps=0"),
        ({"batch_size": 2.5}, "training.batch_size=2.5"),
        ({"learning_rate": -1.0}, "training.learning_rate=-1.0"),
        ({"ema_decay": 1.0}, "training.ema_decay=1.0"),
        ({"label_dropout": 1.5}, "training.label_dropout=1.5"),
        ({"max_corrupt_share": 1}, "training.max_corrupt_share=1 "),
        ({"schedule": "cosin"}, "training.schedule='cosin'.*'cosine'"),
        ({"keep_checkpoints": 0}, "training.keep_checkpoints=0"),
        ({"max_skipped_in_a_row": 0}, "training.max_skipped_in_a_row=0"),
        ({"timeout_s": 0.5}, "training.timeout_s=0.5"),
        ({"score_every": -1}, "training.score_every=-1 must be an integer >= 0"),
        ({"score_every": True}, "training.score_every=True"),
    ],
)
def test_options_that_cannot_work(changes, words):
    with pytest.raises(ValueError, match=words):
        options(**changes)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["routing.selector=rnd"], ["routing.selector='rnd'", "'random'"]),
        (["routing.selection_rate=1.0"], ["routing.selection_rate=1.0", "[0, 1)"]),
        (["routing.start=9", "routing.end=11"], ["start=9", "4 blocks"]),
        (["backbone.patch_size=3"], ["input_size=(8, 8)", "patch_size=3"]),
        (["training.batch_size=4096"], ["batch_size=4096", "1438"]),
        (["training.precision=fp16"], ["precision=fp16", "bf16 or fp32"]),
        (["device=cuda:0"], ["device='cuda:0'", "device=cpu"]),
        (["sampler.name=hune"], ["'hune'", "'heun'"]),
        (["sampler.num_steps=0"], ["sampler.num_steps=0 must"]),
        (["evaluation.extractor=vgg"], ["evaluation.extractor='vgg'", "inception"]),
        (["objective=edm", "objective.sigma_data=0"], ["sigma_data=0"]),
        (["guidance.scale=-1"], ["scale=-1"]),
        (["guidance.scale=2"], ["guidance.scale=2", "guidance=cfg guidance.scale=2"]),
        (["guidance=sparse", "guidance.weak_rate=0"], ["guidance.weak_rate=0", "strong_rate <"]),
        (["guidance=sparse", "guidance.end=9"], ["guidance=sparse", "end=9", "4 blocks"]),
        (["guidance=interval", "guidance.high=2"], ["guidance.high=2", "0 to 1"]),
        (["guidance=path_drop"], ["guidance=path_drop", "rejoin=project"]),
        (
            ["guidance=auto", "guidance.weak_checkpoint=/nowhere"],
            ["/nowhere", "holds no checkpoint"],
        ),
        (["guidance=as_run"], ["guidance=as_run", "name the guidance"]),
        (["sampler=edm_stochastic"], ["sampler=edm_stochastic is for objective=edm", "flow"]),
        (["objective=edm", "sampler=flow_sde"], ["sampler=flow_sde is for objective=flow"]),
        (["sampler.grid=rho"], ["sampler.grid='rho'", "objective=flow", "uniform"]),
        (["resume=/nowhere"], ["checkpoint='/nowhere'", "holds no checkpoint"]),
        (["resume=Latest"], ["resume='Latest'", "Did you mean 'latest'?"]),
        (["resume=latest", "overwrite=true"], ["resume=latest", "overwrite=true", "leave one"]),
        (["evaluation.num_reference=999999"], ["evaluation.num_reference=999999", "1438"]),
        (["data=npz", "data.path=/nowhere.npz"], ["/nowhere.npz"]),
    ],
)
def test_bad_settings_raise_before_anything_is_written(tmp_path, overrides, words):
    if overrides[0].startswith("device=cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU, so device=cuda works")
    folder = tmp_path / "run"
    with pytest.raises(ValueError) as error:
        train(**settings(*overrides, f"run_dir={folder}"))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("overwrite", "no", "overwrite='no' must be true or false"),
        ("seed", "abc", "seed='abc' must be a whole number"),
        ("seed", 1.5, "seed=1.5 must be a whole number"),
        ("seed", None, "seed=None must be a whole number"),
        ("device", None, "device=None must be text"),
        ("run_dir", None, "run_dir=None must be text"),
        ("resume", True, "resume=True must be text or null"),
        ("training.horizontal_flip", "no", "training.horizontal_flip='no' must be true or false"),
        ("training.activation_checkpointing", "half", "training.activation_checkpointing='half'"),
        ("evaluation.seed", "abc", "evaluation.seed='abc' must be a whole number"),
        ("evaluation.batch_size", "abc", "evaluation.batch_size='abc' must be a whole number"),
        ("evaluation.num_reference", "abc", "evaluation.num_reference='abc' must be a whole"),
        ("evaluation.metrics", None, "evaluation.metrics=None must be a list"),
        ("evaluation.metrics", "fid", r"as in evaluation.metrics=\[fid\]"),
        ("evaluation.keep_images", __file__, "evaluation.keep_images=.* is a file"),
        ("sampler.num_steps", 2.5, "sampler.num_steps=2.5 must be a whole number"),
        ("sampler.num_steps", "abc", "sampler.num_steps='abc' must be a whole number"),
        ("routing.routes", 5, "routing.routes=5 must be a list"),
        ("routing.routes", [3], r"routing.routes\[0\]=3 must be a group of settings"),
        ("data.held_out", "abc", "data.held_out='abc' must be a number"),
    ],
)
def test_values_of_another_kind_are_told_by_their_field(tmp_path, field, value, words):
    given = settings(f"run_dir={tmp_path / 'run'}")
    group, _, name = field.rpartition(".")
    (given[group] if group else given)[name] = value
    with pytest.raises(ValueError, match=words):
        train(**given)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_replaced_by_accident(run, finished, copy_of):
    folder = copy_of(finished)
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"resume=latest.*overwrite=true"):
        run("run", "seed=1")
    assert (folder / "metrics.jsonl").read_text() == before
    run("run", "seed=1", "overwrite=true")
    assert (folder / "metrics.jsonl").read_text() != before
    assert not any(path.name.startswith(".") for path in folder.iterdir())


def test_forms_set_on_the_command_line_run_and_are_told(run, caplog):
    from tread_zoo.kernels import set_forms

    try:
        with caplog.at_level(logging.INFO):
            run("run", "kernels.attention=naive")
        assert "attention: naive (set by hand)" in caplog.text
        with pytest.raises(ValueError, match=r"form of attention='naiv' is unknown"):
            run("other", "kernels.attention=naiv")
        with pytest.raises(ValueError, match=r"pip install flash-attn"):
            run("other", "kernels.attention=flash-attn")
    finally:
        set_forms({})
