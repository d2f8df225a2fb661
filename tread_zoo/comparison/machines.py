"""What the runs of a page ran on, told apart, and how much of its machine's peak each one used.

    utilisation = FLOPs of training a second, of one process / FLOPs a second of a matrix product

Each run times that product for an instant at its end, and a busy neighbour halves it. So the
largest counts that any run of the page found on the same device, with as many threads, in the same
precision, by the same torch; then the runs of a page are divided by the same number.
"""

from collections.abc import Callable, Sequence

from tread_zoo.comparison.groups import spread
from tread_zoo.comparison.results import RunResult

LEGEND = (
    "Of peak FLOPs: of one process, against the largest matrix product that these runs timed on "
    "the same device in the same precision. Peak memory: of the process that used most (of the "
    "main one, in runs of earlier versions)."
)


class Machines:
    """The machines of the runs that ended, numbered from 1 in the order in which they come.

    Args:
        results: all runs of the page.
    """

    def __init__(self, results: Sequence[RunResult]) -> None:
        ended = [result for result in results if not result.failed]
        self.known = list(dict.fromkeys(map(describe_machine, ended)))
        self._peaks: dict[tuple[str, ...], float] = {}
        for result in ended:
            kind, peak = _kind(result), result.machine.get("matmul_flops_per_s") or 0.0
            self._peaks[kind] = max(self._peaks.get(kind, 0.0), peak)

    @property
    def differ(self) -> bool:
        """Whether there are several."""
        return len(self.known) > 1

    def describe(self) -> str:
        """Return what the runs ran on; several with their numbers."""
        if not self.differ:
            return "".join(self.known)
        listed = [f"[{number}] {text}" for number, text in enumerate(self.known, start=1)]
        return f"machines {', '.join(listed)}"

    def split(self, runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
        """Return runs by the mark of their machine: "[1]", or "" where all of the page have one."""
        found: dict[str, list[RunResult]] = {}
        for run in runs:
            number = self.known.index(describe_machine(run)) + 1
            found.setdefault(f"[{number}]" if self.differ else "", []).append(run)
        return dict(sorted(found.items()))

    def spread(
        self,
        runs: Sequence[RunResult],
        value: Callable[[RunResult], float | None],
        scale: float,
        form: str,
    ) -> str:
        """Return mean and range of what depends on the machine, apart for each: "9 [1]; 5 [2]"."""
        texts = {mark: spread(own, value, scale, form) for mark, own in self.split(runs).items()}
        return "; ".join(f"{text} {mark}".rstrip() for mark, text in texts.items() if text)

    def utilisation(self, run: RunResult) -> float | None:
        """Return the share of its machine's peak that a run used; None where none was timed."""
        peak = self._peaks.get(_kind(run))
        return run.flops * run.images_per_s / run.num_processes / peak if peak else None


def describe_machine(run: RunResult) -> str:
    """Return device (a CPU with its threads), processes, precision and torch."""
    machine = run.machine
    return (
        f"{run.num_processes} process(es) on {machine.get('device')}, "
        f"{machine.get('precision')}, torch {machine.get('torch')}"
    )


def _kind(run: RunResult) -> tuple[str, ...]:
    """Return what the speed of a matrix product depends on."""
    return tuple(str(run.machine.get(key)) for key in ("device", "precision", "torch"))
