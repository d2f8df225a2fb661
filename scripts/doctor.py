"""Show what this machine has, which code runs each operation and why, and what is registered.

tread-zoo doctor
tread-zoo doctor device=cpu kernels.selective_scan=naive
tread-zoo doctor backbones='mamba*' input_size=8 in_channels=1    # FLOPs, routes

The exit status is 1 if a self-test fails.
"""

import sys
from dataclasses import field
from typing import Annotated, Any

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.cli import command
from tread_zoo.fields import OPTIONS, RARE, Device, check
from tread_zoo.registry import KINDS, available


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class DoctorConfig:
    """What tread-zoo doctor shows.

    Args:
        device, kernels: see `RunConfig`.
        backbones: a pattern of names, such as "mamba*": show only a table of these backbones'
            sizes, FLOPs and default routes.
        input_size: side of the images for which the table is computed.
        in_channels: number of channels of the images for which the table is computed.
        num_classes: number of classes for which the table is computed.
    """

    device: Device = "auto"
    kernels: Annotated[dict[str, str], RARE] = field(default_factory=dict)
    backbones: str | None = None
    input_size: PositiveInt = 32
    in_channels: PositiveInt = 4
    num_classes: NonNegativeInt = 1000


@command("doctor", DoctorConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(DoctorConfig, settings)  # before torch is imported, which takes seconds
    from tread_zoo import doctor
    from tread_zoo.kernels import describe, set_forms
    from tread_zoo.runtime import resolve_device

    if config.backbones is not None:
        sizes = (config.input_size, config.in_channels, config.num_classes)
        print(*doctor.list_sizes(config.backbones, *sizes), sep="\n")
        return
    device = resolve_device(config.device)
    set_forms(config.kernels)
    show("Machine", doctor.describe_machine(device))
    show("Optional packages", doctor.describe_packages(device))
    show("What runs", describe(device))
    show("What is registered", [f"{kind:12s} {', '.join(available(kind))}" for kind in KINDS])
    checks = doctor.check_kernels(device) + doctor.check_backbones(device)
    show("Self-test", [f"{'ok' if fine else 'FAILED':7s} {words}" for words, fine in checks])
    failed = [words for words, fine in checks if not fine]
    if failed:
        sys.exit(f"error: the self-test failed: {'; '.join(failed)}")


def show(title: str, lines: list[str]) -> None:
    print(title, *(f"  {line}" for line in lines), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
