from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest

from tread_zoo.cli import clear_errors
from tread_zoo.data import build_data
from tread_zoo.kinds import check_fields, check_keywords, check_kind, check_typed


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, bool), (3, int), (np.int64(3), int), (3, float), (0.5, float), ("a", str),
        (Path("a"), str), (None, str | None), ((), Sequence[str]), (["a", "b"], Sequence[str]),
        ([[0.1, 1], [0.2, 0]], Sequence[Sequence[float]]), ({}, dict[str, Any]),
        ({"a": 1}, Mapping[str, int] | None), (True, bool | int), ("auto", int | str),
        (5, Callable), ("a", tuple[int, int]), (object(), Any),
    ],
)  # fmt: skip
def test_what_is_of_its_kind_or_of_no_known_kind_passes(value, hint):
    check_kind("a.b", value, hint)


@pytest.mark.parametrize(
    ("value", "hint", "words"),
    [
        ("no", bool, "a.b='no' must be true or false."),
        (1, bool, "a.b=1 must be true or false."),
        (True, int, "a.b=True must be a whole number."),
        (2.0, int, "a.b=2.0 must be a whole number."),
        (True, float, "a.b=True must be a number."),
        ("1", float | None, "a.b='1' must be a number or null."),
        (None, str, "a.b=None must be text."),
        (5, str, "a.b=5 must be text; a name that looks like a number takes two pairs of quotes, "
                 "\"a.b='5'\"."),
        ("fid", Sequence[str], "a.b='fid' must be a list, as in a.b=[fid]."),
        ([["x"], [1, "y"]], Sequence[Sequence[float]], "a.b[0][0]='x' must be a number."),
        ([3], Sequence[Mapping[str, Any]], "a.b[0]=3 must be a group of settings."),
    ],
)  # fmt: skip
def test_what_is_not_is_told(value, hint, words):
    with pytest.raises(ValueError) as error:
        check_kind("a.b", value, hint)
    assert str(error.value) == words


def test_dataclasses_functions_and_typed_dicts_name_their_kinds():
    @dataclass
    class Options:
        count: int
        name: str = "a"

        def __post_init__(self):
            check_fields("group", self)

    Options(1)
    with pytest.raises(ValueError, match=r"group\.count='1' must be a whole number"):
        Options("1")

    def build(count: int, anything=None): ...

    check_keywords("group", build, {"count": 1, "anything": "x"})
    with pytest.raises(ValueError, match=r"group: field='cuont' is unknown\."):
        check_keywords("group", build, {"cuont": 1})

    class Settings(TypedDict):
        label: int | None

    check_typed({"label": None, "more": 1}, Settings)
    with pytest.raises(ValueError, match="label='x' must be a whole number or null"):
        check_typed({"label": "x"}, Settings)


@pytest.mark.parametrize(
    ("option", "value"),
    [("image_size", "abc"), ("image_size", [16, 24]), ("num_classes", "abc"), ("path", 5)],
)
def test_options_of_data(tmp_path, option, value):
    with pytest.raises(ValueError, match=rf"data\.{option}=.* must be"):
        build_data("image_folder", **{"path": str(tmp_path), option: value})


@pytest.mark.parametrize(
    ("config", "said"),
    [({"resume": None}, "stopped by Ctrl-C; continue with resume=latest\n"),
     ({}, "stopped by Ctrl-C\n")],
)  # fmt: skip
def test_ctrl_c_is_one_line(capsys, config, said):
    @clear_errors
    def main(config):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        main(config)
    assert (end.value.code, capsys.readouterr().err) == (130, said)


def test_programming_errors_keep_their_traceback():
    @clear_errors
    def main(config):
        raise TypeError("a mistake of ours")

    with pytest.raises(TypeError):
        main({})
