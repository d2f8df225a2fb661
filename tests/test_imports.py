"""The method needs no run: what `import tread_zoo.routing` and the contract load."""

import subprocess
import sys

METHOD = ("tread_zoo.routing", "tread_zoo.contract.backbone", "tread_zoo.contract.frame")
OTHERS = ("hydra", "omegaconf", "accelerate", "datasets", "huggingface_hub", "safetensors", "wandb")
ROOMS = ("cli", "config", "data", "diffusion", "evaluation", "runs", "training")


def loaded_by(*modules):
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_method_needs_no_run():
    loaded = loaded_by(*METHOD)
    assert "tread_zoo.routing.options" in loaded
    assert not loaded & {*OTHERS, *(f"tread_zoo.{room}" for room in ROOMS)}


def test_a_command_line_is_read_without_torch():
    assert "torch" not in loaded_by("tread_zoo.cli")
