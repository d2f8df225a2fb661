"""The method needs no run: what `import tread_zoo.routing` and the contract load."""

import subprocess
import sys

METHOD = ("tread_zoo.routing", "tread_zoo.contract.backbone", "tread_zoo.contract.frame")
OTHERS = ("hydra", "omegaconf", "accelerate", "datasets", "huggingface_hub", "safetensors", "wandb")
ROOMS = ("cli", "config", "data", "diffusion", "evaluation", "runs", "training")


def test_the_method_needs_no_run():
    program = f"import sys, {', '.join(METHOD)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "tread_zoo.routing.options" in loaded
    assert not loaded & {*OTHERS, *(f"tread_zoo.{room}" for room in ROOMS)}
