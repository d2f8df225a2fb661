"""What loads what: the method needs no run, and what everybody imports is light."""

import pytest

from tests.processes import ROOT, run_python

METHOD = (
    "import tread_zoo.routing.methods, tread_zoo.contract.backbone, tread_zoo.contract.crossing"
)
OTHERS = ("hydra", "omegaconf", "accelerate", "datasets", "huggingface_hub", "safetensors", "wandb")
ROOMS = ("cli", "config", "data", "diffusion", "evaluation", "runs", "training")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (METHOD, {*OTHERS, *(f"tread_zoo.{room}" for room in ROOMS)}),
        ("import tread_zoo.cli", {"torch"}),
        ("import tread_zoo.testing.plugin", {"torch"}),  # as every pytest run does
        ("from tread_zoo import create; create('data', 'digits')",
         {"sklearn", "torchvision", "pandas", "scipy"}),
    ],
)  # fmt: skip
def test_what_is_not_needed_is_not_imported(code, absent):
    done = run_python("-c", f"{code}; import sys; print(*sys.modules)", cwd=ROOT, fresh=True)
    assert done.returncode == 0, done.stderr
    assert "tread_zoo" in done.stdout.split()
    assert not absent & set(done.stdout.split())


WRONG = ["sed=1", "training.num_step=3", "evaluation.num_images=0", "seed=x"]


def test_help_and_wrong_settings_do_not_wait_for_torch():
    code = (
        "import runpy, sys\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = command.split()\n"
        "    try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "    except SystemExit: pass\n"
        "    loaded = [m for m in ('torch', 'numpy', 'pandas', 'scipy') if m in sys.modules]\n"
        "    assert not loaded, (command, loaded)\n"
    )
    scripts = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
    commands = [f"scripts/{name}.py --help" for name in scripts]
    commands += [f"scripts/train.py {word}" for word in WRONG]
    done = run_python("-c", code, *commands, cwd=ROOT, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tread-zoo train") > 1
    for word, line in zip(WRONG, done.stderr.splitlines(), strict=True):
        assert word.partition("=")[0] in line
