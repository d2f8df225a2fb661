"""All files are written in UTF-8, and an ASCII locale ends no command."""

import ast
import os
import sys
from pathlib import Path

import pytest

from tests.comparison.recorded import write_run
from tests.processes import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FILES = [
    file
    for folder in ("tread_zoo", "backbones", "scripts", "examples")
    for file in sorted((ROOT / folder).rglob("*.py"))
]


def implicit_encodings(text):
    """Return the lines of calls that read or write text in the locale's encoding.

    ruff's PLW1514 and Python's EncodingWarning hold less: the one knows the types of few paths,
    the other sees what is run.
    """
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _is_text(node)
        if not {"encoding", None} & {keyword.arg for keyword in node.keywords}
    ]


def _is_text(call):
    """Return whether a call opens, reads or writes a text. Image, fsspec, zip and os open bytes."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in ("read_text", "write_text", "FileHandler"):
        return owner != ""  # our own functions of these names write UTF-8
    if name == "open" and not (owner in ("Image", "fsspec", "os") or "ZipFile" in owner):
        place = 0 if owner else 1
        mode = ast.unparse(call.args[place]) if len(call.args) > place else given.get("mode", "r")
        return "b" not in mode
    return "True" in (given.get("text"), given.get("universal_newlines"))


@pytest.mark.slow
def test_every_file_and_process_is_read_and_written_in_utf_8():
    found = {
        str(file.relative_to(ROOT)): lines
        for file in FILES
        if (lines := implicit_encodings(file.read_text(encoding="utf-8")))
    }
    assert not found


# A process that is forked has begun in another locale.
AS_ASCII = """
import locale, runpy, sys
locale.setlocale(locale.LC_ALL, "C")
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding="ascii", errors="surrogateescape")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(bool(sys.flags.utf8_mode), reason="Python's UTF-8 mode hides the locale")
@pytest.mark.nightly
def test_compare_works_in_a_locale_of_ascii(tmp_path):
    for routing in ("none", "tread"):
        protocol = {"notes": ["a note, déjà ±"]}
        write_run(tmp_path / "runs" / routing, routing=routing, protocol=protocol)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    script = [ROOT / "scripts" / "compare.py", f"compare.runs={tmp_path}/runs/*", "compare.out=out"]
    done = run_python("-c", AS_ASCII, *script, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "d\\xe9j\\xe0 \\xb1" in done.stdout
    for name in ("index.html", "report.md"):
        assert "déjà ±" in (tmp_path / "out" / name).read_text(encoding="utf-8")
