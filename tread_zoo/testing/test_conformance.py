"""Runs every check on every requested backbone or routing method, also from other packages.

pytest --pyargs tread_zoo.testing --backbone my_package:my_name
pytest --pyargs tread_zoo.testing --routing my_package:my_name
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from tread_zoo.registry import get_entry
from tread_zoo.testing import method_checks
from tread_zoo.testing.conformance import CHECKS
from tread_zoo.testing.method_checks import MethodProbe
from tread_zoo.testing.probe import Probe

USAGE = (
    "name what to check: pytest --pyargs tread_zoo.testing --backbone my_package:my_name, or "
    "--routing my_package:my_name (or NAME for one of tread_zoo or a plug-in). If tread_zoo is on "
    "the path but not installed, add -p tread_zoo.testing.plugin."
)
# One backbone each for: attention; long skips and two streams; a first value shared by all blocks.
ROWS = {
    "dit_tiny": {"depth": 6, "hidden_size": 24, "num_heads": 2},
    "mamba_tiny": {"depth": 6, "hidden_size": 24},
    "rwkv7_tiny": {"depth": 6, "hidden_size": 32},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    backbones = config.getoption("--backbone", default=None) or []
    methods = config.getoption("--routing", default=None) or []
    if not backbones and not methods:
        raise pytest.Collector.CollectError(USAGE)
    size = config.getoption("--backbone-input-size")
    overrides = dict(config.getoption("--backbone-override"))
    probes = {name: make_probe(name, size, overrides) for name in backbones}
    if "method_probe" in metafunc.fixturenames:
        rows = probes or {name: Probe(name, overrides=small) for name, small in ROWS.items()}
        options = dict(config.getoption("--routing-override"))
        pairs = {
            f"{method}-{row}": MethodProbe(make_method(method, options), probe)
            for method in methods
            for row, probe in rows.items()
        }
        metafunc.parametrize("method_probe", pairs.values(), ids=pairs.keys())
        checks: dict[str, Any] = method_checks.CHECKS if methods else {}
    else:
        metafunc.parametrize("probe", probes.values(), ids=probes.keys())
        checks = CHECKS if backbones else {}
    metafunc.parametrize("check", checks.values(), ids=checks.keys())


def make_probe(backbone: str, size: tuple[int, int] | None, overrides: dict[str, object]) -> Probe:
    """Return a probe of `backbone`, written [PACKAGE:]NAME, with inputs of height and width `size`
    (None: the probe's default) and the keywords `overrides`. Raises CollectError if the backbone
    cannot be built or has fewer than 3 blocks."""
    try:
        probe = Probe(_imported("--backbone", backbone), overrides=overrides)
        if size is not None:
            probe.input_size = size
        num_blocks = probe.build().num_blocks
    except Exception as error:
        raise pytest.Collector.CollectError(f"--backbone {backbone}: {error}") from error
    if num_blocks < 3:
        raise pytest.Collector.CollectError(
            f"--backbone {backbone} has {num_blocks} blocks; the checks route the middle ones and "
            "need 3: set the depth with --backbone-override."
        )
    return probe


def make_method(method: str, options: dict[str, object]) -> dict[str, Any]:
    """Return a mapping with the name and all options of the routing method `method`, written
    [PACKAGE:]NAME. Raises CollectError if it cannot be loaded or does not take `options`."""
    try:
        name = _imported("--routing", method)
        return {"name": name, **get_entry("routing", name).complete(options)}
    except Exception as error:
        raise pytest.Collector.CollectError(f"--routing {method}: {error}") from error


def _imported(option: str, text: str) -> str:
    """Import the package in `text`, written [PACKAGE:]NAME, if there is one, and return the name.
    `option` is the option of pytest that has the text, for errors."""
    package, _, name = text.rpartition(":")
    try:
        if package:
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise pytest.Collector.CollectError(
            f"{option} {text}: {error}. Is it installed, or on PYTHONPATH? `python -m pytest` adds "
            "the current folder."
        ) from error
    return name


def test_contract(probe: Probe, check: Callable[[Probe], None]) -> None:
    check(probe)


def test_method(method_probe: MethodProbe, check: Callable[[MethodProbe], None]) -> None:
    check(method_probe)
