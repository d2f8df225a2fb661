"""Reports of tread-zoo doctor: this machine, its kernels, the registered backbones."""

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from tread_zoo.contract.backbone import Backbone
from tread_zoo.contract.crossing import Crossing
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.factory import create_backbone
from tread_zoo.kernels import get_forms
from tread_zoo.kernels.dispatch import NAIVE, get_example, get_implementation, list_forms, unusable
from tread_zoo.kernels.packages import import_problem
from tread_zoo.kernels.verify import cast, difference, outputs_and_gradients
from tread_zoo.registry import create, get_entry, list_backbones
from tread_zoo.routing import Stack, Step
from tread_zoo.runtime import DTYPES, autocast, describe_device, resolve_precision
from tread_zoo.seeding import make_generator, make_image_generator
from tread_zoo.version import describe_code

# (distribution, module, what it is for, how it is installed)
CUDA = 'pip install "tread-zoo[cuda]"'
BUILD = 'pip install --no-build-isolation "tread-zoo[cuda-build]"'
PACKAGES = (
    ("triton", "triton", "our fused scans", "pip install triton"),
    ("fla-core", "fla", "ssd, linear attention, delta rules", CUDA),
    ("mamba-ssm", "mamba_ssm", "selective_scan, ssd", CUDA),
    ("causal-conv1d", "causal_conv1d", "causal_conv1d", CUDA),
    ("flash-attn", "flash_attn", "attention, by hand", BUILD),
)


def describe_machine(device: torch.device) -> list[str]:
    """Return lines on versions and hardware. `device` is where a run would compute."""
    lines = [
        f"tread_zoo  {describe_code()}, Python {platform.python_version()}, {platform.platform()}",
        f"torch      {torch.__version__}",
        f"device     {describe_device(device)}",
        f"precision  {resolve_precision('auto', device)}, as precision=auto chooses",
    ]
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        lines.append(f"memory     {memory / 2**30:.0f} GiB")
        lines.append("capability {}.{}".format(*torch.cuda.get_device_capability(device)))
        lines.append("TF32       for float32 products, unless precision=fp32")
        file = Path("/sys/module/nvidia/version")
        driver = file.read_text(encoding="utf-8").strip() if file.exists() else "unknown"
        lines.append(f"driver     {driver}")
    return lines


def describe_packages(device: torch.device) -> list[str]:
    """Return a line per optional package, with its version. For one that cannot be imported, the
    line says why and, on a GPU, which command installs it."""
    lines = []
    for name, module, purpose, install in PACKAGES:
        problem = import_problem(module)
        try:
            state = importlib.metadata.version(name)
            state += f", but {problem}" if problem else ""
        except importlib.metadata.PackageNotFoundError:
            state = "missing" if problem else "installed"
        remedy = f"   {install}" if problem and device.type == "cuda" else ""
        lines.append(f"{name:16s} {state:22s} {purpose}{remedy}")
    return lines


def routes_of(
    network: Backbone, num_images: int, device: torch.device | str = "cpu"
) -> Sequence[Crossing]:
    """Return the routes (as crossings: ranges of blocks that see fewer tokens) of `num_images`
    images, as one training step of routing=tread chooses them."""
    images = make_image_generator("doctor", images=range(num_images), device=device)
    routes: Sequence[Crossing] = create("routing", "tread").draw(
        Stack.of(network), images, Step(0, 1, 0)
    )
    return routes


def check_kernels(device: torch.device) -> list[tuple[str, bool]]:
    """Return pairs (line, whether the errors are small), one for each implementation of an
    operation, except the plain formula, that can be used here. It runs on `device` in the precision
    that `auto` means there; the line has its errors of output and gradients, relative to the plain
    formula in float64."""
    checks, dtype = [], DTYPES[resolve_precision("auto", device)]
    for op in get_forms():
        for name in list_forms(op):
            form, args = get_implementation(op, name), get_example(op, device, dtype)
            if name == NAIVE or unusable(op, form, device, dtype) or form.refuses(*args):
                continue
            exact = cast(args, torch.float64)
            truth = outputs_and_gradients(get_implementation(op, NAIVE).run, exact)
            error = difference(outputs_and_gradients(form.run, args), truth)
            words = f"{op}: {name}, error {error.output:.0e}, of gradients {error.gradient:.0e}"
            checks.append((words, max(error) <= form.tolerance(dtype)))
    return checks


def check_backbones(device: torch.device, pattern: str = "*_tiny") -> list[tuple[str, bool]]:
    """Return pairs (line, whether the test passed), one for each backbone whose name matches
    `pattern`. The test is that a training step with a route gives finite gradients on `device`."""
    checks = []
    for name in _sizes(pattern):
        network = create_backbone(name, input_size=8, in_channels=1, num_classes=10).to(device)
        generator = make_generator("doctor", 0)
        routes = routes_of(network, 4, device)
        x = torch.randn(4, 1, 8, 8, generator=generator).to(device)
        with autocast(device, resolve_precision("auto", device)):
            t, y = torch.full((4,), 0.5, device=device), torch.arange(4, device=device)
            out = network(x, t, y, routes=routes)
        (out.float() - x).square().mean().backward()
        grads = [p.grad for p in network.parameters()]
        fine = all(g is not None and bool(torch.isfinite(g).all()) for g in grads)
        checks.append((f"{name}: one routed step", fine))
    return checks


def _sizes(pattern: str) -> list[str]:
    """Return the names of the backbones that match `pattern` and have no required options."""
    entries = {name: get_entry("backbone", name) for name in list_backbones(pattern)}
    return [
        name
        for name, entry in entries.items()
        if entry.parameters().keys() <= entry.defaults().keys()
    ]


def list_sizes(pattern: str, input_size: int, in_channels: int, num_classes: int) -> list[str]:
    """Return a table, as lines, of the backbones that match `pattern`: parameters, FLOPs of a
    forward pass without and with a route at rate 0.5, tokens, blocks, default route and selector.
    The other arguments are those of `create_backbone`. No network is run."""
    columns = ("M params", "GFLOPs", "routed", "tokens", "blocks", "route")
    lines = [f"{'backbone':25s}" + "".join(f"{c:>9s}" for c in columns) + "  selector"]
    sizes = {"input_size": input_size, "in_channels": in_channels, "num_classes": num_classes}
    for name in _sizes(pattern):
        with torch.device("meta"):
            network = create_backbone(name, **sizes)
        routes = routes_of(network, 1, "meta")
        dense, routed = count_flops(network), count_flops(network, routes=routes)
        millions = sum(p.numel() for p in network.parameters()) / 1e6
        (route,) = routes
        lines.append(
            f"{name:25s}{millions:9.2f}{dense / 1e9:9.3f}{routed / 1e9:9.3f}{network.num_tokens:9d}"
            f"{network.num_blocks:9d}{f'{route.start}:{route.end}':>9s}  {network.default_selector}"
        )
    return lines
