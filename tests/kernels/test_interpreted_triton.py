"""The Triton forms equal their formulas on a CPU, interpreted, in one process of their own."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="no module named 'triton'")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_forms_equal_their_formulas_under_the_interpreter(which):
    files = sorted((ROOT / "tests/kernels/interpreted").glob("[a-z]*.py"))
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run_python("-m", "pytest", "-q", "-m", which, *files, cwd=ROOT, env=env, fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed(, \d+ deselected)? in", done.stdout, re.MULTILINE), done.stdout
