"""Every command that a document shows composes, and its settings pass the configuration's check."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts.compare import read_settings
from tests.small_run import fields_of
from tread_zoo.__main__ import COMMANDS as SCRIPTS
from tread_zoo.cli import compose_settings
from tread_zoo.config import EvaluateConfig, SampleConfig, check, make_config

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


def test_there_are_commands_to_read():
    assert len(COMMANDS) > 40
    assert {"README.md", "data.md", "train.py", "sample.yaml"} <= {where for where, _ in COMMANDS}


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
        groups = ("sampler", "guidance")
        if script == "sample":
            check(SampleConfig, compose_settings("sample", overrides, SampleConfig, groups))
        elif "compare.runs" in line:  # they are of the script that scores
            overrides = ["checkpoint=x", *overrides]
            check(EvaluateConfig, compose_settings("evaluate", overrides, EvaluateConfig, groups))
        elif script in ("train", "compare"):
            preset = any(word.startswith("experiment=") for word in overrides)
            make_config(
                **(compose_settings("train", overrides) if preset else fields_of(*overrides))
            )
