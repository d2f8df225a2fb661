"""Every command that a document shows composes, and its settings pass the configuration's check."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts.compare import read_settings
from scripts.sample import SampleConfig
from tests.published.tensors import theirs
from tests.small_run import fields_of
from tread_zoo.__main__ import COMMANDS as SCRIPTS
from tread_zoo.checkpoint_config import EvaluateConfig
from tread_zoo.cli import compose_settings
from tread_zoo.config import make_config
from tread_zoo.data.encode import write_table
from tread_zoo.fields import check
from tread_zoo.published import import_checkpoint
from tread_zoo.runs.checkpoint import find_checkpoint
from tread_zoo.runs.restore import restore
from tread_zoo.training.loop import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROGRAM = re.compile(r"(^|&& )tread-zoo |\b(python|accelerate|torchrun|srun)\b")
SCRIPT = re.compile(
    rf"scripts/({'|'.join(SCRIPTS.values())})\.py|"
    rf"(?:tread-zoo|-m tread_zoo) ({'|'.join(SCRIPTS)})\b"
)


def documented():
    """Yield (where, text) of all that may hold commands."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        fenced = re.compile(r"^```\w*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
        if page.name == "report.md":  # a record of what was run
            continue
        blocks = fenced.findall(page.read_text())
        rest = fenced.sub("", page.read_text())
        inline = re.findall(r"`((?:python|accelerate|torchrun|tread-zoo)[^`]*)`", rest)
        yield from ((page.name, text) for text in (*blocks, *inline))
    for script in sorted((ROOT / "scripts").glob("*.py")):
        yield script.name, ast.get_docstring(ast.parse(script.read_text())) or ""
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        text = re.sub(r"\\\n#\s*", "", file.read_text())
        lines = re.findall(r"^# ((?:python|accelerate|tread-zoo) .*)$", text, flags=re.MULTILINE)
        yield from ((file.name, line.split("   ")[0]) for line in lines)  # words may follow


def commands():
    """Yield (where, command line) of every script with overrides."""
    for where, text in documented():
        for line in text.replace("\\\n", " ").splitlines():
            if SCRIPT.search(line) and PROGRAM.search(line.strip()):
                yield where, line.strip()


COMMANDS = sorted(set(commands()))


def overrides_of(line):
    """Return the script and the hydra overrides of a command, of a sweep the first value."""
    script = SCRIPT.search(line)
    rest = line[script.end() :].replace("$run", "runs/x")
    rest = rest.removesuffix("'") if "bash -c '" in line else rest
    words = shlex.split(rest, comments=True)
    given = [word.replace("…", "x") for word in words]
    given = [word for word in given if "=" in word and not word.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(given)
    single = [
        f"{one.get_key_element()}={next(iter(one.sweep_string_iterator()))}"
        if one.is_sweep_override()
        else word
        for word, one in zip(given, parsed, strict=True)
    ]
    return script[1] or SCRIPTS[script[2]], single


TINY = [
    "training.num_steps=2", "training.batch_size=4", "training.precision=fp32", "device=cpu",
    "sampler.num_steps=2",
]  # fmt: skip


@pytest.mark.slow
def test_the_recipe_of_finetuning_runs(tmp_path, monkeypatch):
    """An imported DiT, on latents of other classes: with routing, then densely."""
    monkeypatch.chdir(tmp_path)
    weights = theirs("dit", width=32, depth=4)
    torch.save(weights, "DiT-XL-2-256x256.pt")
    vae = {"name": "none", "class": "x", "sha256": "x", "shift_factor": 0.0, "scaling_factor": 0.2}
    batch = torch.randn(20, 1, 4, 8, 8), torch.arange(20) % 3
    write_table(Path("photos_latents"), [batch], content="samples", vae=vae)
    page = (ROOT / "docs" / "sharing.md").read_text()
    recipe = page.partition("## Finetuning")[2].partition("```bash\n")[2].partition("```")[0]
    lines = recipe.replace("\\\n", " ").splitlines()
    for script, overrides in map(overrides_of, lines):
        if script == "import_checkpoint":
            given = dict(word.split("=") for word in overrides)
            import_checkpoint(given.pop("in"), **given)
        elif script == "train":
            train(**compose_settings("train", [*overrides, *TINY]))
    routed, dense = (find_checkpoint(f"runs/{name}") for name in ("routed", "dense"))
    assert [run.config().routing["name"] for run in (routed, dense)] == ["tread", "none"]
    start, end = weights["blocks.3.mlp.fc2.weight"], dense.tensors("ema")["blocks.3.mlp.fc2.weight"]
    assert 0 < (end - start).abs().max() < 1e-3, "it starts from their weights, and learns"
    assert dense.meta["backbone"]["config"]["time_scale"] == 1000
    run = restore("runs/dense", weights="ema", device="cpu", precision="fp32")
    assert run.sampling({}, {"name": "cfg", "scale": 4.0}).num_steps == 2


def test_there_are_commands_to_read():
    assert len(COMMANDS) > 40
    assert {"README.md", "data.md", "train.py", "slurm.yaml"} <= {where for where, _ in COMMANDS}


@pytest.mark.parametrize("page", sorted({where for where, _ in COMMANDS}))
def test_the_documented_commands_have_settings_that_work(page):
    for line in (line for where, line in COMMANDS if where == page):
        script, overrides = overrides_of(line)
        others = ("plugins=", "backbone=mixer", "hydra/launcher", "hydra.launcher")
        if any(word.startswith(others) for word in overrides):
            continue  # needs a module or a launcher that is not here
        if script == "compare":
            study = [word for word in overrides if word.startswith("compare.study=")]
            fixed = read_settings(study)["fixed"] if study else ()
            overrides = [word for word in overrides if not word.startswith("compare.")]
            overrides = [*fixed, *overrides]
        if script == "sample":
            check(SampleConfig, compose_settings("sample", overrides, SampleConfig))
        elif "compare.runs" in line:  # they are of the script that scores
            overrides = ["checkpoint=x", *overrides]
            check(EvaluateConfig, compose_settings("evaluate", overrides, EvaluateConfig))
        elif script in ("train", "compare"):
            preset = any(word.startswith("experiment=") for word in overrides)
            make_config(
                **(compose_settings("train", overrides) if preset else fields_of(*overrides))
            )
