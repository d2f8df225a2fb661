"""A forked process does what a fresh interpreter does."""

import json
import os
import subprocess

import pytest

from tests.processes import run_python

TELLS = """
import json, os, sys
print(json.dumps([__name__, sys.argv[1:], os.getcwd(), os.environ.get("TELL"), sys.stdin.read()]),
      flush=True)
os.system("echo from a child")
sys.exit("error: so")
"""


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_a_forked_process_does_what_a_fresh_one_does(tmp_path, how):
    script = tmp_path / "tells.py"
    script.write_text(TELLS)
    command = {"script": [script], "-m": ["-m", "tells"], "-c": ["-c", TELLS]}[how]
    env = {**os.environ, "TELL": "a=b", "PYTHONUNBUFFERED": "1"}
    fresh, forked = (
        run_python(*command, "one", "x=[1, 2]", cwd=tmp_path, env=env, fresh=fresh)
        for fresh in (True, False)
    )
    assert vars(forked) | {"args": fresh.args} == vars(fresh)
    output, child = forked.stdout.splitlines()
    assert json.loads(output) == ["__main__", ["one", "x=[1, 2]"], str(tmp_path), "a=b", ""]
    assert (child, forked.stderr, forked.returncode) == ("from a child", "error: so\n", 1)


def test_what_hangs_is_killed():
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(60)", timeout=0.2)


def test_nothing_of_this_project_is_there_before_and_a_cuda_device_could_be_used():
    names = ("torch", "tread_zoo", "backbones")
    code = f"import sys, torch; print([n in sys.modules for n in {names}])"
    code += "; print(torch.cuda._is_in_bad_fork())"
    assert run_python("-c", code).stdout == "[True, False, False]\nFalse\n"
