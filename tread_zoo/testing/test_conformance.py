"""Every check on every requested backbone, also of other packages.

pytest --pyargs tread_zoo.testing --backbone my_package:my_name
"""

import importlib
from collections.abc import Callable

import pytest

from tread_zoo.testing.conformance import CHECKS
from tread_zoo.testing.probe import Probe

USAGE = (
    "name the backbone to check: pytest --pyargs tread_zoo.testing --backbone my_package:my_name "
    "(or --backbone NAME for one of tread_zoo or a plug-in). If tread_zoo is on the path but not "
    "installed, add -p tread_zoo.testing.plugin."
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    backbones = config.getoption("--backbone", default=None)
    if not backbones:
        raise pytest.Collector.CollectError(USAGE)
    size = config.getoption("--backbone-input-size")
    overrides = dict(config.getoption("--backbone-override"))
    probes = {name: make_probe(name, size, overrides) for name in backbones}
    metafunc.parametrize("probe", probes.values(), ids=probes.keys())
    metafunc.parametrize("check", CHECKS.values(), ids=CHECKS.keys())


def make_probe(backbone: str, size: tuple[int, int] | None, overrides: dict[str, object]) -> Probe:
    """Return a probe of a backbone. Raises CollectError if it cannot be built."""
    package, _, name = backbone.rpartition(":")
    try:
        if package:
            importlib.import_module(package)
        probe = Probe(name, overrides=overrides)
        if size is not None:
            probe.input_size = size
        num_blocks = probe.build().num_blocks
    except ModuleNotFoundError as error:
        raise pytest.Collector.CollectError(
            f"--backbone {backbone}: {error}. Is it installed, or on PYTHONPATH? `python -m "
            "pytest` adds the current folder."
        ) from error
    except Exception as error:
        raise pytest.Collector.CollectError(f"--backbone {backbone}: {error}") from error
    if num_blocks < 3:
        raise pytest.Collector.CollectError(
            f"--backbone {backbone} has {num_blocks} blocks; the checks route the middle ones and "
            "need 3: set the depth with --backbone-override."
        )
    return probe


def test_contract(probe: Probe, check: Callable[[Probe], None]) -> None:
    check(probe)
