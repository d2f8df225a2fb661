"""The kit as another package uses it: from a folder of its own, by pytest's command line."""

import os
from pathlib import Path

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

STRANGER = """
from backbones import DiT
from tread_zoo import register_backbone

@register_backbone("stranger_tiny", hidden_size=32, num_heads=2)
class Stranger(DiT):
    pass

@register_backbone("stranger_wrong", hidden_size=32, depth=4, num_heads=2)
class Wrong(DiT):
    def head(self, streams, condition):
        return super().head((streams[0].roll(1, dims=1),), condition)
"""


@pytest.fixture
def folder(tmp_path):
    """Return an empty folder beside the stranger's package."""
    (tmp_path / "strange_nets").mkdir()
    (tmp_path / "strange_nets" / "__init__.py").write_text("")
    (tmp_path / "strange_nets" / "dits.py").write_text(STRANGER)
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def run_kit(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder.parent)])}
    kit = ["-m", "pytest", "-p", "tread_zoo.testing.plugin", "-q", "-rA"]
    done = run_python(*kit, "--pyargs", "tread_zoo.testing", *arguments, cwd=folder, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_strangers_backbones_are_checked(folder):
    code, said = run_kit(
        folder, "--backbone", "strange_nets.dits:stranger_tiny", "--backbone", "stranger_wrong",
        "--backbone-override", "depth=3", "--backbone-input-size", "4x8",
        "-k", "shapes or pure or patches",
    )  # fmt: skip
    assert code == 1, said
    for check in ("shapes", "pure", "patches_stay_in_place"):
        assert f"strange_nets.dits:stranger_tiny-{check}]" in said, said
    failed = [line for line in said.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1, said
    assert "stranger_wrong-patches_stay_in_place" in failed[0]
    assert "5 passed" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name what to check"),
        (["--backbone", "dit_tiny", "--backbone-override", "depth=2"], "has 2 blocks"),
    ],
)
def test_what_is_wrong_is_said_at_once(folder, arguments, words):
    code, said = run_kit(folder, *arguments)
    assert code not in (0, 1), said
    assert words in said
    assert "Traceback" not in said
