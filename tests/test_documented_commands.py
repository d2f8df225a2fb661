"""Every command that a document shows is one that a shell and hydra can read."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tread_zoo.data import build_data

ROOT = Path(__file__).parents[1]
NAMES = [p.stem for p in (ROOT / "scripts").glob("*.py") if "@hydra.main" in p.read_text()]
SCRIPT = re.compile(rf"scripts/({'|'.join(NAMES)})\.py")


def documented():
    """Yield (where, text) of all that may hold commands."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        fenced = re.compile(r"^```\w*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
        blocks = fenced.findall(page.read_text())
        rest = fenced.sub("", page.read_text())
        inline = re.findall(r"`((?:python|accelerate|torchrun)[^`]*)`", rest)
        yield from ((page.name, text) for text in (*blocks, *inline))
    for script in sorted((ROOT / "scripts").glob("*.py")):
        yield script.name, ast.get_docstring(ast.parse(script.read_text())) or ""
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        lines = re.findall(r"^# (python .*)$", file.read_text(), flags=re.MULTILINE)
        yield from ((file.name, line.split("   ")[0]) for line in lines)  # words may follow


def commands():
    """Yield (where, command line) of every script with overrides."""
    for where, text in documented():
        for line in text.replace("\\\n", " ").splitlines():
            if SCRIPT.search(line) and re.match(r"\s*(python|accelerate|torchrun|srun)\b", line):
                yield where, line.strip()


COMMANDS = sorted(set(commands()))


def overrides_of(line):
    """Return the hydra overrides of a command as a shell would hand them over."""
    words = shlex.split(line.replace("$run", "runs/x"), comments=True)
    start = next(i for i, word in enumerate(words) if SCRIPT.search(word))
    given = [word.replace("…", "x") for word in words[start + 1 :]]
    return [word for word in given if not word.startswith("-") and word != "x"]


def test_there_are_commands_to_read():
    assert len(COMMANDS) > 60
    assert {"README.md", "data.md", "train.py", "sample.yaml"} <= {where for where, _ in COMMANDS}


@pytest.mark.parametrize(("where", "line"), COMMANDS)
def test_a_documented_command_parses(where, line):
    OverridesParser.create().parse_overrides(overrides_of(line))


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"name": "hf", "path": "owner/name", "streaming": True}, 1),
        ({"name": "webdataset", "path": "https://host/set/*.tar"}, 1),
        ({"name": "webdataset", "path": "nowhere-*.tar"}, 2),
    ],
)
def test_what_an_error_says_to_type_parses(options, count):
    with pytest.raises(ValueError) as error:
        build_data(**options)
    hints = re.findall(r"\"data\.\w+=[^\"]*\"", str(error.value))
    assert len(hints) == count
    parsed = OverridesParser.create().parse_overrides([shlex.split(hint)[0] for hint in hints])
    assert all("'" not in override.value() for override in parsed)
