"""What this machine has for the project, whether it computes rightly, and what would help.

Every function returns lines of text or plain facts; `scripts/doctor.py` prints them.
"""

import importlib.metadata
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass

import torch

from tread_zoo import __version__
from tread_zoo.kernels import describe, get_forms
from tread_zoo.kernels.dispatch import (
    NAIVE,
    get_example,
    get_form,
    import_problem,
    list_forms,
    unusable,
)
from tread_zoo.kernels.verify import TOLERANCE, cast, compare
from tread_zoo.registry import create_backbone, list_backbones
from tread_zoo.routing import build_routing
from tread_zoo.runtime import autocast, describe_device, resolve_precision
from tread_zoo.seeding import make_generator


@dataclass(frozen=True)
class Package:
    """An optional package: its name on the index, the module that is imported, what it is for."""

    name: str
    module: str
    purpose: str
    install: str


KERNEL_PACKAGES = (
    Package("triton", "triton", "our fused scans", "pip install triton"),
    Package("fla-core", "fla", "ssd", 'pip install -e ".[cuda]"'),
    Package(
        "mamba-ssm", "mamba_ssm", "selective_scan, ssd",
        'pip install --no-build-isolation -e ".[cuda-build]"',
    ),
    Package(
        "causal-conv1d", "causal_conv1d", "causal_conv1d",
        'pip install --no-build-isolation -e ".[cuda-build]"',
    ),
    Package(
        "flash-attn", "flash_attn", "attention, by hand",
        'pip install --no-build-isolation -e ".[cuda-build]"',
    ),
)  # fmt: skip
OTHER_PACKAGES = (
    Package("torchvision", "torchvision", "inception features", "pip install torchvision"),
    Package("torch-fidelity", "torch_fidelity", "distances", "pip install torch-fidelity"),
    Package("accelerate", "accelerate", "training", "pip install accelerate"),
    Package("wandb", "wandb", "tracker=wandb", 'pip install -e ".[wandb]"'),
    Package("tensorboard", "tensorboard", "tracker=tensorboard", 'pip install -e ".[tensorboard]"'),
)


@dataclass(frozen=True)
class Check:
    """One self-test: what was run, how it went, and in how many seconds."""

    name: str
    fine: bool
    words: str
    seconds: float


def describe_machine(device: torch.device) -> list[str]:
    """Return versions and hardware."""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if torch.version.hip:
        built = f"built for ROCm {torch.version.hip}"
    lines = [
        f"tread_zoo  {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"torch      {torch.__version__}, {built}",
        f"device     {describe_device(device)}",
        f"precision  {resolve_precision('auto', device)}, as precision=auto chooses",
    ]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        lines.append(
            f"           compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return lines


def describe_packages() -> list[str]:
    """Return a line for each optional package: its version, and why it cannot be imported."""
    lines = []
    for package in (*KERNEL_PACKAGES, *OTHER_PACKAGES):
        state = _version(package) or "missing"
        if state != "missing" and (problem := import_problem(package.module)) is not None:
            state += f", but {problem}"
        lines.append(f"{package.name:24s} {state:22s} {package.purpose}")
    return lines


def describe_choices(device: torch.device) -> list[str]:
    """Return a line for each operation: what runs on `device`, and why not another form."""
    return describe(device)


def check_kernels(device: torch.device) -> list[Check]:
    """Compare every form that can be used on `device` with the naive one in float64."""
    checks = []
    for op in get_forms():
        for name in list_forms(op):
            form = get_form(op, name)
            if name == NAIVE or unusable(op, form, device) is not None:
                continue
            began = time.perf_counter()
            args = cast(get_example(op, device), form.check_dtype)
            truth = get_form(op, NAIVE).run
            found = compare(
                lambda *a, run=form.run: run(*cast(a, form.check_dtype)).double(),  # noqa: B023
                truth,
                cast(args, torch.float64),
            )
            checks.append(
                Check(
                    f"{op}: {name}",
                    max(found) <= TOLERANCE[form.check_dtype],
                    f"relative error {found.output:.0e}, gradients {found.gradient:.0e}",
                    time.perf_counter() - began,
                )
            )
    return checks


def check_backbones(device: torch.device, pattern: str = "*_tiny") -> list[Check]:
    """Run one routed forward and backward pass of each small backbone on `device`."""
    precision = resolve_precision("auto", device)
    checks = []
    for name in list_backbones(pattern):
        began = time.perf_counter()
        network = create_backbone(name, input_size=8, in_channels=1, num_classes=10).to(device)
        routing = build_routing(
            "tread",
            num_blocks=network.num_blocks,
            default_selector=network.default_selector,
            default_range=network.default_range,
        )
        generator = make_generator("doctor", 0)
        routes = [route.to(device) for route in routing.draw(4, network.grid, generator)]
        x = torch.randn(4, 1, 8, 8, generator=generator).to(device)
        labels = torch.arange(4, device=device)
        with autocast(device, precision):
            out = network(x, torch.full((4,), 0.5, device=device), labels, routes=routes)
        (out.float() - x).square().mean().backward()
        grads = [p.grad for p in network.parameters()]
        finite = all(g is not None and bool(torch.isfinite(g).all()) for g in grads)
        checks.append(
            Check(
                f"{name}: one routed step",
                finite,
                "every gradient is finite" if finite else "a gradient is missing or not finite",
                time.perf_counter() - began,
            )
        )
    return checks


def suggest(device: torch.device) -> list[str]:
    """Return what would make things faster here, each with its command."""
    if device.type == "cpu":
        if _has_nvidia_gpu() and not torch.cuda.is_available():
            return [
                "nvidia-smi sees a GPU that torch does not use: install a torch built for your "
                "driver, see https://pytorch.org/get-started/locally"
            ]
        return ["nothing to install: on a CPU the plain-torch forms are the fast ones"]
    if device.type != "cuda":
        return ["nothing to install: fused forms need a CUDA GPU"]
    lines: dict[str, list[str]] = {}
    for package in KERNEL_PACKAGES:
        if import_problem(package.module) is not None and package.name != "flash-attn":
            lines.setdefault(package.install, []).append(f"{package.name} ({package.purpose})")
    return [f"{command}   # {', '.join(brings)}" for command, brings in lines.items()] or [
        "nothing: every package that helps is here"
    ]


def _version(package: Package) -> str | None:
    for name in (package.name, package.module):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "GPU" in done.stdout
