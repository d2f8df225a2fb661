"""Options of pytest for the checks of backbones and routing methods.

pytest loads this in every run wherever tread_zoo is installed, so it imports no more than pytest:
neither torch nor the zoo.
"""

import argparse
import ast
from typing import Any

import pytest

pytest.register_assert_rewrite(
    "tread_zoo.testing.conformance",
    "tread_zoo.testing.block_checks",
    "tread_zoo.testing.flow_checks",
    "tread_zoo.testing.method_checks",
    "tread_zoo.testing.probe",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tread_zoo", "tread_zoo: pytest --pyargs tread_zoo.testing")
    group.addoption(
        "--backbone",
        action="append",
        default=[],
        metavar="[PACKAGE:]NAME",
        help="check this registered backbone, importing the package (or module) first; repeatable",
    )
    group.addoption(
        "--routing",
        action="append",
        default=[],
        metavar="[PACKAGE:]NAME",
        help="check this registered routing method on small backbones, or on the backbones that "
        "--backbone names; repeatable",
    )
    group.addoption(
        "--routing-override",
        action="append",
        default=[],
        type=parse_override,
        metavar="KEY=VALUE",
        help="option of the method; repeatable",
    )
    group.addoption(
        "--backbone-override",
        action="append",
        default=[],
        type=parse_override,
        metavar="KEY=VALUE",
        help="keyword of its constructor, to check it at a small size; repeatable",
    )
    group.addoption(
        "--backbone-input-size",
        type=parse_size,
        metavar="HxW",
        help="height and width of its input, 8x12 by default: not square, to catch swapped axes",
    )


def parse_override(text: str) -> tuple[str, Any]:
    """Return (key, value) of `key=value`. The value is read as a Python literal, `true` and `false`
    included; what is no literal stays a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE, such as depth=4")
    try:
        return key, ast.literal_eval(value.capitalize() if value in ("true", "false") else value)
    except (SyntaxError, ValueError):
        return key, value


def parse_size(text: str) -> tuple[int, int]:
    """Return (height, width) of `8x12`, or of `8` for a square."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 8x12 or 8")
    return int(sides[0]), int(sides[-1])
