"""Compare settings: grids of processes, their runs as tables, one report, and reference curves."""

from tread_zoo.comparison.grid import Cell, check_same_commands, expand, run_cells
from tread_zoo.comparison.reference import compare_with_curve, describe_comparison, make_curve
from tread_zoo.comparison.report import write_report
from tread_zoo.comparison.results import find_runs, read_curves, read_runs

__all__ = [
    "Cell",
    "check_same_commands",
    "compare_with_curve",
    "describe_comparison",
    "expand",
    "find_runs",
    "make_curve",
    "read_curves",
    "read_runs",
    "run_cells",
    "write_report",
]
