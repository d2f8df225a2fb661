"""The import of checkpoints that have the published names and shapes."""

import argparse
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from safetensors.torch import save_file

from tests.data.tables import Trap
from tests.published.tensors import SHAPES, dit_shapes, theirs
from tread_zoo import list_backbones
from tread_zoo.diffusion import (
    DDPM,
    EDM,
    FlowMatching,
    NoGuidance,
)
from tread_zoo.published import FORMATS, export_checkpoint, import_checkpoint
from tread_zoo.published.conversion import build, recognize
from tread_zoo.published.reader import read_parts
from tread_zoo.registry import get_entry
from tread_zoo.runs.checkpoint import CheckpointError, find_checkpoint, load_backbone
from tread_zoo.runs.restore import restore


def imported(folder, name, content, **choices):
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / "theirs.pt")
    return import_checkpoint(folder / "theirs.pt", folder / "out", format=name, **choices)


def network(folder, name, content, **choices):
    done = imported(folder, name, content, **choices)
    return load_backbone(find_checkpoint(done.path))


# Every tensor lands, and where it should ----------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [8, 0])
def test_every_value_lands(tmp_path, name, rows):
    content = theirs(name, rows=rows)
    backbone = network(tmp_path, name, content)
    own = backbone.state_dict()
    for key in FORMATS[name].fixed(backbone):
        del content[key]
    if name == "dis" and not rows:
        for part in ("weight", "bias"):
            assert not own.pop(f"final.modulation.{part}").any(), "its head is not modulated"
    for key in own:
        if key.endswith(".bonus"):
            own[key] = own[key] * 16  # theirs is divided by the number of tokens
    if name == "zigma" and rows:
        own["label_embed.table.weight"] = own["label_embed.table.weight"][:rows]  # theirs lacks one
    landed, given = (  # the sign of a velocity may be turned
        torch.cat([v.flatten() for v in d.values()]).abs().sort()[0] for d in (own, content)
    )
    torch.testing.assert_close(landed, given, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit", "sit", "uvit", "dis", "drwkv"])
def test_published_sizes_are_recognised_by_their_shapes(name):
    form = FORMATS[name]
    presets = list_backbones(f"{form.backbone}_*_2")
    assert len(presets) >= 4
    for preset in presets:
        sizes = get_entry("backbone", preset).defaults()
        conv = sizes.get("final_conv", True)
        shapes = SHAPES[name](
            width=sizes["hidden_size"], depth=sizes["depth"], side=16, rows=1001, conv=conv
        )
        tensors = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
        backbone = build(form, form.keywords(tensors))
        assert backbone.name == preset
        assert backbone.input_size == (32, 32)
        assert (backbone.in_channels, backbone.num_classes) == (4, 1000)
        assert backbone.out_channels == (4 if name == "uvit" else 8)


def test_a_size_without_a_preset(tmp_path):
    content = theirs("dit", width=96, depth=3, patch=4, channels=3, side=2, rows=0, sigma=False)
    done = imported(tmp_path, "dit", content, num_heads=3)
    expected = {
        "input_size": 8, "in_channels": 3, "num_classes": 0, "patch_size": 4, "hidden_size": 96,
        "depth": 3, "num_heads": 3, "mlp_ratio": 4.0, "learn_sigma": False, "time_scale": 1000.0,
        "reversed_time": False,
    }  # fmt: skip
    assert done.config.items() >= expected.items()
    assert done.backbone == "dit_tiny"
    with pytest.raises(ValueError, match="divisible by 5, num_heads"):
        imported(tmp_path / "other", "dit", content, num_heads=5)


# The mathematics, written out anew ----------------------------------------------------------------


def embedded(w, x, t, y):
    """Return tokens of 2 x 2 pixels and the condition of DiT and those after it, from their own
    tensors: t is what its sinusoids are fed."""
    tokens = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=2)
    angle = t[:, None] * torch.tensor([10000 ** (-i / 128) for i in range(128)])
    time = torch.cat([angle.cos(), angle.sin()], 1)
    for i in (0, 2):
        time = F.linear(time, w[f"t_embedder.mlp.{i}.weight"], w[f"t_embedder.mlp.{i}.bias"])
        time = time if i else F.silu(time)
    condition = time + w["y_embedder.embedding_table.weight"][y]
    return tokens.flatten(2).mT + w["pos_embed"], condition


def dit_by_formula(w, x, t, y):
    width, heads, channels_out = len(w["x_embedder.proj.bias"]), 2, 8

    def linear(name, v):
        return F.linear(v, w[f"{name}.weight"], w[f"{name}.bias"])

    def modulated(v, shift, scale):
        return F.layer_norm(v, (width,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    tokens, c = embedded(w, x, t, y)
    c = F.silu(c)
    for i in range(1 + max(int(k.split(".")[1]) for k in w if k.startswith("blocks."))):
        name = f"blocks.{i}"
        s1, g1, a1, s2, g2, a2 = linear(f"{name}.adaLN_modulation.1", c).split(width, 1)
        q, k, v = linear(f"{name}.attn.qkv", modulated(tokens, s1, g1)).split(width, 2)
        mixed = []
        for qh, kh, vh in zip(*(z.split(width // heads, 2) for z in (q, k, v)), strict=True):
            mixed.append((qh @ kh.mT / math.sqrt(width // heads)).softmax(-1) @ vh)
        tokens = tokens + a1[:, None] * linear(f"{name}.attn.proj", torch.cat(mixed, 2))
        h = F.gelu(linear(f"{name}.mlp.fc1", modulated(tokens, s2, g2)), approximate="tanh")
        tokens = tokens + a2[:, None] * linear(f"{name}.mlp.fc2", h)
    shift, scale = linear("final_layer.adaLN_modulation.1", c).split(width, 1)
    values = linear("final_layer.linear", modulated(tokens, shift, scale))
    out = x.new_zeros(len(x), channels_out, *x.shape[2:])
    for row in range(2):
        for column in range(2):
            for channel in range(channels_out):
                place = (row * 2 + column) * channels_out + channel
                out[:, channel, row::2, column::2] = values[..., place].unflatten(1, (4, 4))
    return out


def inputs(batch=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 4, 8, 8, generator=generator), torch.tensor([0, 7, 3])


@pytest.mark.parametrize(
    ("name", "t", "fed", "sign"),
    [
        ("dit", [0.0, 0.25, 0.999], [0.0, 250.0, 999.0], 1),
        ("tread", [-1.5, 0.2, 1.1], [-1.5, 0.2, 1.1], 1),
        ("sit", [0.0, 0.3, 1.0], [1.0, 0.7, 0.0], -1),  # time and velocity are turned
    ],
)
def test_dit_sit_and_tread_equal_their_formula(tmp_path, name, t, fed, sign):
    content = theirs(name, width=128)
    backbone, (x, y) = network(tmp_path, name, content), inputs()
    expected = dit_by_formula(content, x, torch.tensor(fed), y)
    assert expected.std() > 0.1
    torch.testing.assert_close(backbone(x, torch.tensor(t), y), sign * expected, atol=1e-4, rtol=0)
    other = dit_by_formula(content, x, torch.rand(3), y)
    assert (other - expected).abs().max() > 0.01, "the test would not see time"


def zigma_by_formula(w, x, t, y):
    """On a grid of 4 x 4, numbered row by row; the paths are ZigMa's zigzagN8."""
    width, grid = len(w["norm_f.weight"]), torch.arange(16).view(4, 4)
    paths = [
        torch.cat([row.flip(0) if i % 2 else row for i, row in enumerate(places)])
        for turned in (grid, grid.flip(1), grid.flip(0), grid.flip(0, 1))
        for places in (turned, turned.T)
    ]

    def linear(name, v):
        return F.linear(v, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def rms(name, v):
        return F.rms_norm(v, (width,), w[f"{name}.weight"], eps=1e-5)

    (h, c), residual = embedded(w, x, t, y), 0
    for i in range(1 + max(int(k.split(".")[1]) for k in w if k.startswith("blocks."))):
        residual = residual + h
        h = rms(f"blocks.{i}.norm", residual)
        shift, scale, gate = linear(f"blocks.{i}.adaLN_modulation.1", F.silu(c)).chunk(3, 1)
        path, mixer = paths[i % 8], f"blocks.{i}.mixer"
        modulated = h * (1 + scale[:, None]) + shift[:, None]
        u, z = linear(f"{mixer}.in_proj", modulated[:, path]).chunk(2, -1)
        taps, bias = w[f"{mixer}.conv1d.weight"], w[f"{mixer}.conv1d.bias"]
        u = F.silu(F.conv1d(F.pad(u.mT, (3, 0)), taps, bias, groups=u.shape[-1]).mT)
        rank = w[f"{mixer}.dt_proj.weight"].shape[1]
        low, b, read = linear(f"{mixer}.x_proj", u).split([rank, 16, 16], -1)
        step = F.softplus(linear(f"{mixer}.dt_proj", low))
        state, scanned = 0, []
        for k in range(16):
            decay = torch.exp(-step[:, k, :, None] * w[f"{mixer}.A_log"].exp())
            state = decay * state + (step[:, k] * u[:, k])[..., None] * b[:, k, None]
            scanned.append((state * read[:, k, None]).sum(-1) + w[f"{mixer}.D"] * u[:, k])
        mixed = torch.zeros_like(h)
        mixed[:, path] = linear(f"{mixer}.out_proj", torch.stack(scanned, 1) * F.silu(z))
        h = h + gate[:, None] * mixed
    out = F.layer_norm(rms("norm_f", residual + h), (width,), eps=1e-6)
    return F.fold(  # theirs has a patch's channels last
        linear("final_layer.linear", out).unflatten(2, (4, -1)).transpose(2, 3).flatten(2).mT,
        x.shape[2:], 2, stride=2,
    )  # fmt: skip


def test_zigma_equals_its_formula(tmp_path):
    content = theirs("zigma", depth=9)
    backbone, (x, y) = network(tmp_path, "zigma", content), inputs()
    t = torch.tensor([0.0, 0.25, 0.8125])  # both ours and theirs to the bit
    expected = zigma_by_formula(content, x, 1000 * t, y)
    assert expected.std() > 0.1
    torch.testing.assert_close(-backbone(x, 1 - t, y), expected, atol=1e-4, rtol=0)
    other = zigma_by_formula(content, x, 1000 * (1 - t), y)
    assert (other - expected).abs().max() > 0.01, "the test would not see time"


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("name", ["dit", "sit", "tread", "uvit", "zigma"])
def test_a_file_that_comes_in_and_goes_out_is_the_same_to_the_bit(tmp_path, name, suffix):
    content = theirs(name)
    done = imported(tmp_path, name, content)
    file = export_checkpoint(done.path, tmp_path / f"back.{suffix}", format=name)
    (parts, _), own = read_parts(file), load_backbone(find_checkpoint(done.path)).state_dict()
    assert parts["ema"].keys() == content.keys()
    assert all(torch.equal(parts["ema"][key], content[key]) for key in content)
    again = import_checkpoint(file, tmp_path / "again", format=name)
    landed = load_backbone(find_checkpoint(again.path)).state_dict()
    assert all(torch.equal(landed[key], own[key]) for key in own)


@pytest.mark.parametrize(
    ("name", "format", "word"),
    [
        ("dit", "uvit", "backbone"),
        ("dit", "tread", "time_scale"),
        ("tread", "sit", "reversed_time"),
        ("dis", "dis", "select"),
    ],
)
def test_what_a_project_does_not_have_is_not_exported(tmp_path, name, format, word):
    done = imported(tmp_path, name, theirs(name))
    with pytest.raises(CheckpointError, match=word):
        export_checkpoint(done.path, tmp_path / "back.pt", format=format)
    assert not (tmp_path / "back.pt").exists()


@pytest.mark.parametrize(
    ("name", "own", "other", "word"),
    [
        ("sit", '"prediction": "velocity"', '"prediction": "x"', "objective.prediction=velocity"),
        ("tread", '"sigma_data": 0.5', '"sigma_data": 1.0', "objective.sigma_data=0.5"),
        ("lightning_dit", '"window": null', '"window": 2', "backbone.window=None"),
        ("zigma", '"serpentine8"', '"hilbert"', "backbone.scan_order=serpentine8"),
    ],
)
def test_a_network_that_computes_something_else_is_not_exported(tmp_path, name, own, other, word):
    done = imported(tmp_path, name, theirs(name))
    meta = find_checkpoint(done.path).path / "checkpoint.json"
    text = meta.read_text()
    assert own in text
    meta.write_text(text.replace(own, other).replace("sha256_of_the_above", "unused"))
    with pytest.raises(CheckpointError, match=f"needs {word}"):
        export_checkpoint(done.path, tmp_path / "back.pt", format=name)


def test_dis_directions_and_halves_keep_their_places(tmp_path):
    content = theirs("dis")
    own = network(tmp_path, "dis", content).state_dict()
    for block, name in ((0, "in_blocks.0"), (2, "mid_block"), (4, "out_blocks.1")):
        ours = {k.removeprefix(f"blocks.{block}.mixer."): v for k, v in own.items()}
        mixer = {k.removeprefix(f"{name}.mixer."): v for k, v in content.items()}
        for way, back in ((0, ""), (1, "_b")):
            part = slice(96 * way, 96 * (way + 1))
            assert torch.equal(ours["conv_weight"][part], mixer[f"conv1d{back}.weight"][:, 0])
            assert torch.equal(ours["select"][way], mixer[f"x_proj{back}.weight"])
            assert torch.equal(ours["step_weight"][way], mixer[f"dt_proj{back}.weight"])
            assert torch.equal(ours["A_log"][part], mixer["A_b_log" if back else "A_log"])
            assert torch.equal(ours["D"][part], mixer[f"D{back}"])
    assert torch.equal(own["blocks.4.skip_proj.weight"], content["out_blocks.1.skip_linear.weight"])


# What does not fit is named -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_missing_and_unknown_tensors_are_named(tmp_path, name):
    content = theirs(name)
    last = sorted(k for k in content if "blocks." in k)[-1]
    del content[last]
    content["projectors.0.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as error:
        imported(tmp_path, name, content)
    for words in (f"Missing: {last}", "Unknown: projectors.0.weight", f"format={name}"):
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_unknown_tensors_can_be_left_out(tmp_path):
    content = {**theirs("sit"), "projectors.0.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="drop_unknown=true"):
        imported(tmp_path, "sit", content)
    done = imported(tmp_path, "sit", content, drop_unknown=True)
    assert any("Left out: projectors.0.weight" in note for note in done.notes)


def test_other_shapes_and_trained_positions_are_named(tmp_path):
    other = {**theirs("dit"), "blocks.1.attn.proj.weight": torch.zeros(64, 32)}
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.proj\.weight gives \[64, 32\]"):
        imported(tmp_path, "dit", other)
    averaged = {**theirs("dit"), "pos_embed": theirs("dit")["pos_embed"].bfloat16()}
    notes = imported(tmp_path / "averaged", "dit", averaged).notes
    assert any("off the fixed table" in note for note in notes)
    trained = theirs("dit")
    trained["pos_embed"] += 0.01
    with pytest.raises(CheckpointError, match=r"pos_embed .* differ by 0\.01"):
        imported(tmp_path, "dit", trained)


def test_weights_that_are_not_finite_are_named(tmp_path):
    content = theirs("dit")
    content["blocks.1.attn.proj.bias"][3] = math.nan
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn\.proj\.bias"):
        imported(tmp_path, "dit", content)


def test_formats_do_not_look_like_each_other(tmp_path):
    for name in FORMATS:
        like = ["dit", "sit", "tread"] if SHAPES[name] is dit_shapes else [name]
        assert recognize(theirs(name)) == like
    with pytest.raises(CheckpointError, match="looks like format=dit or sit or tread"):
        imported(tmp_path, "dis", theirs("dit"))


def test_a_network_of_nobody(tmp_path):
    with pytest.raises(CheckpointError, match="looks like none of dit, sit"):
        imported(tmp_path, "dit", {"conv1.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="holds no network: its entries are step"):
        imported(tmp_path, "dit", {"step": 3})
    with pytest.raises(ValueError, match=r"format='sitt' is unknown\. Did you mean 'sit'"):
        imported(tmp_path, "sitt", {})
    with pytest.raises(ValueError, match="objective='edm' is none of format=sit: it has flow"):
        imported(tmp_path, "sit", theirs("sit"), objective="edm")


def test_a_folder_that_holds_a_checkpoint_is_not_written_over(tmp_path):
    (tmp_path / "out/checkpoints/.partial_step_00000000").mkdir(parents=True)  # as a kill leaves it
    imported(tmp_path, "sit", theirs("sit"))
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        imported(tmp_path, "sit", theirs("sit"))


# Labels -------------------------------------------------------------------------------------------


def test_a_table_without_a_null_row(tmp_path):
    content = theirs("sit", rows=8)
    table = content["y_embedder.embedding_table.weight"]
    done = imported(tmp_path, "sit", content, num_classes=8)
    backbone = load_backbone(find_checkpoint(done.path))
    own = backbone.label_embed.table.weight
    assert torch.equal(own[:8], table)
    torch.testing.assert_close(own[8], table.mean(0))
    assert any("do not guide with it" in note for note in done.notes)
    with pytest.raises(CheckpointError, match=r"embedding_table\.weight gives \[8, 64\]"):
        imported(tmp_path / "other", "sit", content, num_classes=5)


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_prefixes_of_wrappers(tmp_path, prefix):
    content = {f"{prefix}{key}": value for key, value in theirs("sit").items()}
    torch.save(content, tmp_path / "x.pt")
    save_file(content, tmp_path / "named_so.pt")  # a file is known by its content
    for file in tmp_path.iterdir():
        parts, step = read_parts(file)
        assert parts.keys() == {"ema"}
        assert parts["ema"].keys() == theirs("sit").keys()
        assert step == 0


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (("ema", "model"), {"ema", "model"}),
        (("ema_state_dict", "model_state_dict"), {"ema", "model"}),
        (("ema",), {"ema"}),
        (("state_dict",), {"ema"}),
    ],
)
def test_files_of_training_scripts(tmp_path, names, parts):
    """Beside the weights lie options, of classes of other packages."""
    content = {name: theirs("sit") for name in names}
    content[names[0]] = {k: v + 1 if k.endswith("bias") else v for k, v in theirs("sit").items()}
    options = OmegaConf.create({"betas": [0.9, 0.99]})
    content |= {"opt": {"state": {0: torch.zeros(2)}, "param_groups": [options]}}
    content |= {"args": argparse.Namespace(lr=1e-4), "loss": np.float64(1)}
    done = imported(tmp_path, "sit", {**content, "step": 400})
    checkpoint = find_checkpoint(done.path)
    assert checkpoint.step == 400
    files = {path.stem for path in done.path.glob("*.safetensors")}
    assert files == parts
    assert any("averaged" in note for note in done.notes) == (names == ("state_dict",))
    bias = load_backbone(checkpoint).patch_embed.bias
    torch.testing.assert_close(bias, theirs("sit")["x_embedder.proj.bias"] + 1)
    if files == {"ema"}:
        with pytest.raises(CheckpointError, match="has no part 'model'; it has ema"):
            load_backbone(checkpoint, "model")


def test_half_precision_becomes_float32(tmp_path):
    content = theirs("dis")
    done = imported(tmp_path, "dis", {key: value.bfloat16() for key, value in content.items()})
    own = load_backbone(find_checkpoint(done.path)).state_dict()
    assert {tensor.dtype for tensor in own.values()} == {torch.float32}
    torch.testing.assert_close(own["norm.weight"], content["norm_f.weight"], rtol=0.01, atol=0)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_file_cut_short(tmp_path, part, legacy):
    file = tmp_path / "x.pt"
    torch.save(theirs("sit"), file, _use_new_zipfile_serialization=not legacy)
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    with pytest.raises(CheckpointError, match=r"cannot be read.*download it again"):
        import_checkpoint(file, tmp_path / "out", format="sit")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!DOCTYPE html><html>Sign in</html>", "a web page"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
)
def test_a_text_in_place_of_the_file(tmp_path, text, words):
    (tmp_path / "x.pt").write_text(text)
    with pytest.raises(CheckpointError, match=words) as error:
        import_checkpoint(tmp_path / "x.pt", tmp_path / "out", format="sit")
    assert "weights_only" not in str(error.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_file_is_not_run(tmp_path, legacy):
    marker = tmp_path / "ran"
    content = {**theirs("sit"), "args": Trap(str(marker))}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"holds a \w+\.mkdir, .*could run code"):
        import_checkpoint(tmp_path / "x.pt", tmp_path / "out", format="sit")
    (tmp_path / "y.pt").write_bytes(pickle.dumps(content["args"], protocol=2))
    with pytest.raises(CheckpointError):
        import_checkpoint(tmp_path / "y.pt", tmp_path / "out", format="sit")
    assert not marker.exists()


# What the rest of the project makes of it ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "objective", "expected"),
    [
        ("sit", None, FlowMatching()),
        ("tread", None, EDM()),
        ("tread", "flow", FlowMatching()),
        ("dit", None, DDPM()),
        ("dis", None, DDPM()),
        ("drwkv", None, DDPM()),
        ("uvit", None, DDPM(first_step=1)),
        ("uvit_latents", None, DDPM(first_step=1, schedule="scaled_linear")),
    ],
)
def test_the_objective_is_restored(tmp_path, name, objective, expected):
    name, _, latents = name.partition("_")
    imported(tmp_path, name, theirs(name, channels=4 if latents else 3), objective=objective)
    run = restore(tmp_path / "out", weights="ema", device="cpu", precision="fp32")
    assert run.objective == expected
    assert run.sampling({}, {}).guidance == NoGuidance()
    assert not run.checkpoint.data
    with pytest.raises(CheckpointError, match="was imported"):
        run.data({})
