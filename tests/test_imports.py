"""What loads what: the method needs no run, and what everybody imports is light."""

import pytest

from tests.processes import ROOT, run_python

pytestmark = pytest.mark.slow

METHOD = (
    "import tread_zoo.routing.methods, tread_zoo.contract.backbone, tread_zoo.contract.crossing"
)
OTHERS = ("hydra", "omegaconf", "accelerate", "datasets", "huggingface_hub", "safetensors", "wandb")
ROOMS = ("cli", "config", "data", "diffusion", "evaluation", "runs", "training")


LOADED = """
import runpy, sys

def loaded(*modules):
    return [module for module in modules if module in sys.modules]
"""


@pytest.mark.slow
def test_the_method_needs_no_run_and_the_digits_no_library_of_data():
    absent = (*OTHERS, *(f"tread_zoo.{room}" for room in ROOMS))
    heavy = ("sklearn", "torchvision", "pandas", "scipy")
    code = f"{LOADED}\n{METHOD}\nprint(loaded(*{absent}))\nfrom tread_zoo import create\n"
    code += f"create('data', 'digits')\nprint(loaded(*{heavy}))"
    done = run_python("-c", code, cwd=ROOT, fresh=True)
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stderr


WRONG = ["sed=1", "training.num_step=3", "evaluation.num_images=0", "seed=x"]


@pytest.mark.slow
def test_help_wrong_settings_and_the_kit_s_plug_in_do_not_wait_for_torch():
    code = LOADED + (
        "import tread_zoo.testing.plugin\n"  # as every pytest run does
        "for command in sys.argv[1:]:\n"
        "    sys.argv = command.split()\n"
        "    try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "    except SystemExit: pass\n"
        "    found = loaded('torch', 'numpy', 'pandas', 'scipy')\n"
        "    assert not found, (command, found)\n"
    )
    scripts = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
    commands = [f"scripts/{name}.py --help" for name in scripts]
    commands += [f"scripts/train.py {word}" for word in WRONG]
    done = run_python("-c", code, *commands, cwd=ROOT, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tread-zoo train") > 1
    for word, line in zip(WRONG, done.stderr.splitlines(), strict=True):
        assert word.partition("=")[0] in line
