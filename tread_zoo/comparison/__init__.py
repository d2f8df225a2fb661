"""Compare settings: grids of runs, what each one left, and one table."""

from tread_zoo.comparison.grid import Cell, expand, expand_all, run_grid
from tread_zoo.comparison.results import RunResult, read_run
from tread_zoo.comparison.table import write_report

__all__ = ["Cell", "RunResult", "expand", "expand_all", "read_run", "run_grid", "write_report"]
