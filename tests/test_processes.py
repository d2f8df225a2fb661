"""A forked process does what a fresh interpreter does."""

import json
import os
import subprocess
import time

import pytest

from tests.processes import run_python

TELLS = """
import json, os, sys
print(json.dumps([__name__, sys.argv[1:], os.getcwd(), os.environ.get("TELL"), sys.stdin.read()]),
      flush=True)
print("aside", file=sys.stderr)
os.system("echo from a child")
"""


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_arguments_folder_environment_and_output_are_those_of_a_fresh_one(tmp_path, how):
    script = tmp_path / "tells.py"
    script.write_text(TELLS)
    command = {"script": [script], "-m": ["-m", "tells"], "-c": ["-c", TELLS]}[how]
    env = {**os.environ, "TELL": "a=b", "PYTHONUNBUFFERED": "1"}
    done = [
        run_python(*command, "one", "x=[1, 2]", cwd=tmp_path, env=env, fresh=fresh)
        for fresh in (True, False)
    ]
    assert (done[0].returncode, done[0].stdout, done[0].stderr) == (
        done[1].returncode, done[1].stdout, done[1].stderr,
    )  # fmt: skip
    told, child = done[1].stdout.splitlines()
    assert json.loads(told) == ["__main__", ["one", "x=[1, 2]"], str(tmp_path), "a=b", ""]
    assert (child, done[1].stderr) == ("from a child", "aside\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit('error: so')", 1),
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
        ("import os; os.kill(os.getpid(), 15)", -15),
    ],
)
def test_the_exit_status_is_that_of_a_fresh_one(code, status):
    done = [run_python("-c", code, fresh=fresh) for fresh in (True, False)]
    assert [each.returncode for each in done] == [status] * 2
    assert [each.stderr.splitlines()[-1:] for each in done] == [
        done[0].stderr.splitlines()[-1:]
    ] * 2


def test_what_hangs_is_killed():
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(60)", timeout=0.2)
    assert time.monotonic() - start < 30


def test_nothing_of_this_project_is_there_before():
    code = "import sys; print([n in sys.modules for n in ('torch', 'tread_zoo', 'backbones')])"
    assert run_python("-c", code).stdout == "[True, False, False]\n"


def test_a_cuda_device_could_still_be_used():
    """No import of the server asked for devices: after that, a fork cannot."""
    code = "import torch; print(torch.cuda._is_in_bad_fork())"
    assert run_python("-c", code).stdout == "False\n"
