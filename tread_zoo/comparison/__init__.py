"""Comparisons of settings: run a grid of processes, read the runs as tables, write one report."""

from tread_zoo.comparison.grid import Cell, check_same_commands, expand, run_cells
from tread_zoo.comparison.report import write_report
from tread_zoo.comparison.results import find_runs, read_curves, read_runs, read_table

__all__ = [
    "Cell",
    "check_same_commands",
    "expand",
    "find_runs",
    "read_curves",
    "read_runs",
    "read_table",
    "run_cells",
    "write_report",
]
