"""Reference curves: what a recipe gave, seed by seed, and whether a run lies on it."""

from tread_zoo.comparison.reference.band import Verdict, judge
from tread_zoo.comparison.reference.curve import Curve, load_curve, load_curves, make_curve
from tread_zoo.comparison.reference.documents import recipe_block, recipe_table, replace_between
from tread_zoo.comparison.reference.report import Comparison, compare_run, write_comparison
from tread_zoo.comparison.reference.settings import (
    differences,
    find_recipe,
    wanted_settings,
)
from tread_zoo.comparison.reference.traces import Trace, read_trace

__all__ = [
    "Comparison",
    "Curve",
    "Trace",
    "Verdict",
    "compare_run",
    "differences",
    "find_recipe",
    "judge",
    "load_curve",
    "load_curves",
    "make_curve",
    "read_trace",
    "recipe_block",
    "recipe_table",
    "replace_between",
    "wanted_settings",
    "write_comparison",
]
