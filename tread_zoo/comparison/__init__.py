"""Compare settings: grids of runs at equal budgets, what each one left, one table and one page."""

from tread_zoo.comparison.budget import EQUAL, check_equal, check_equal_runs, equalise
from tread_zoo.comparison.grid import Cell, collect, expand, expand_all, find_runs, run_grid
from tread_zoo.comparison.groups import Group, group_runs
from tread_zoo.comparison.page import write_page
from tread_zoo.comparison.results import RunResult, read_run
from tread_zoo.comparison.table import write_report

__all__ = [
    "EQUAL",
    "Cell",
    "Group",
    "RunResult",
    "check_equal",
    "check_equal_runs",
    "collect",
    "equalise",
    "expand",
    "expand_all",
    "find_runs",
    "group_runs",
    "read_run",
    "run_grid",
    "write_page",
    "write_report",
]
