"""The Triton forms on a CPU, by Triton's interpreter, in one process for all operations."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run_python

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.skipif(find_spec("triton") is None, reason="no module named 'triton'")
def test_forms_equal_their_formulas_under_the_interpreter() -> None:
    tests = sorted(str(path) for path in FOLDER.glob("[!_]*.py"))
    assert len(tests) == 2
    env = {**os.environ, "TRITON_INTERPRET": "1"}  # read when torchvision imports Triton: fresh
    done = run_python("-m", "pytest", "-q", *tests, cwd=FOLDER.parents[2], env=env, fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed", done.stdout, re.MULTILINE), done.stdout  # none skipped
