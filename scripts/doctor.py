"""Say what this machine has, which form of each operation runs and why, and what would help.

python scripts/doctor.py
python scripts/doctor.py device=cpu kernels.selective_scan=naive

Ends with status 1 if a self-test fails.
"""

import sys

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="doctor")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo import diagnosis
    from tread_zoo.kernels import set_forms
    from tread_zoo.runtime import resolve_device

    settings = as_keywords(config)
    device = resolve_device(settings["device"])
    set_forms(settings["kernels"])
    show("Machine", diagnosis.describe_machine(device))
    show("Optional packages", diagnosis.describe_packages())
    show("What runs", diagnosis.describe_choices(device))
    checks = diagnosis.check_kernels(device) + diagnosis.check_backbones(device)
    show(
        f"Self-test, {sum(check.seconds for check in checks):.1f} s",
        [
            f"{'ok' if check.fine else 'FAILED':7s} {check.name:28s} {check.words}"
            for check in checks
        ],
    )
    show("What would make it faster", diagnosis.suggest(device))
    failed = [check.name for check in checks if not check.fine]
    if failed:
        sys.exit(f"error: the self-test failed: {'; '.join(failed)}")


def show(title: str, lines: list[str]) -> None:
    print(title, *(f"  {line}" for line in lines), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
