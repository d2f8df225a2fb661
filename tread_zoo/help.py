"""`--help`: settings with their defaults and descriptions, from the docstrings.

tread-zoo train --help                   # the usual settings
tread-zoo train --help all               # every setting
tread-zoo train --help backbone          # the names of a group
tread-zoo train --help optimizer=muon    # the settings of a part
"""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from tread_zoo.checkpoint_config import CheckpointConfig
from tread_zoo.config import (
    PART_FIELDS,
    EvaluationConfig,
    RunConfig,
    SamplingGrid,
    TrainingConfig,
)
from tread_zoo.errors import unknown_name
from tread_zoo.fields import RARE, Setting, default_fields, walk
from tread_zoo.registry import available, get_entry

WIDTH, INDENT = 110, 34
SENTENCE = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
SHARED = (CheckpointConfig, EvaluationConfig, TrainingConfig, RunConfig)  # "see `…`"


def describe(
    doc: str,
    config: type,
    words: Sequence[str],
    presets: Mapping[str, Sequence[str]],
    prefix: str = "",
) -> str:
    """Return the help text of a script, or of the parts that its command line names.

    Args:
        doc: docstring of the script.
        config: class of its settings.
        words: words of the command line.
        presets: names of preset files, by group.
        prefix: prefix of the settings' names.
    """
    parts = [field for field in default_fields(config) if field in PART_FIELDS]
    chosen = [word.partition("=")[::2] for word in words if word.partition("=")[0] in parts]
    if chosen:
        return "\n".join(_part(*part) if part[1] else group(part[0]) for part in chosen)
    topics = [word for word in words if "=" not in word and word[:1] != "-" and word != "all"]
    if topics:
        raise unknown_name("--help", topics[0], parts)
    every, shown = "all" in words, ""
    lines = [doc.strip(), "", "Settings, written field=value:", ""]
    for name, options in presets.items():
        lines.append(_line(f"{prefix}{name}", "…", f"a preset: {', '.join(sorted(options))}"))
    for setting, sentence in settings(config):
        if every or RARE not in setting.marks:
            lines += [""] * (setting.name.rpartition(".")[0] != shown)
            lines.append(_line(prefix + setting.name, setting.default, sentence))
            shown = setting.name.rpartition(".")[0]
    lines.append("")
    if parts:
        first = parts[0]
        lines.append(f"--help {first}: what {first} may be; --help {first}=NAME: its settings")
    if not every:
        lines.append("--help all: also the settings that are rarely changed")
    return "\n".join(lines)


def settings(config: type) -> Iterator[tuple[Setting, str]]:
    """Yield each setting of a configuration class with its description."""
    groups: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(config)}
    explained, shared = {"": sentences(config)}, sentences(*SHARED)
    for setting in walk(config):
        group, _, name = setting.name.rpartition(".")
        if group not in explained:
            explained[group] = sentences(groups[group])
        sentence = explained[group].get(name, "")
        if sentence.startswith("see "):
            sentence = shared[name]
        if get_origin(setting.type) is Literal and len(get_args(setting.type)) > 1:
            sentence = f"{sentence} [{', '.join(get_args(setting.type))}]"
        yield setting, sentence


def sentences(*targets: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each argument, from the docstrings of functions, classes and their
    base classes. If a name occurs several times, the last target counts."""
    explained: dict[str, str] = {}
    for target in targets:
        own: dict[str, str] = {}
        for each in inspect.getmro(target) if inspect.isclass(target) else [target]:
            arguments = inspect.cleandoc(each.__doc__ or "").partition("\nArgs:\n")[2]
            for names, sentence in SENTENCE.findall(arguments.partition("\n\n")[0]):
                plain = " ".join(sentence.replace("`", "").split())
                for name in names.split(", "):
                    own.setdefault(name, plain)
        explained |= own
    return explained


def group(kind: str, pattern: str = "*") -> str:
    """Return the registered names of `kind` that match a shell pattern. Names of the same class are
    listed together, above the first paragraph of its docstring."""
    by_target: dict[Any, list[str]] = {}
    for name in available(kind, pattern):
        by_target.setdefault(get_entry(kind, name).target, []).append(name)
    lines = [f"{kind}="]
    for target, names in by_target.items():
        lines += [_fill(", ".join(names), "  "), _fill(_summary(target), "      ")]
    return "\n".join(lines)


def _part(kind: str, name: str) -> str:
    """Return a text on the registered part `name` of `kind`: what it does, and its settings."""
    entry = get_entry(kind, name)
    targets = [get_entry(kind, other).target for other in available(kind)]  # they share options
    targets += [getattr(entry.target, role, object) for role in ("mixer", "mlp")]
    explained = sentences(*targets, entry.target)
    values = entry.options()
    order = {name: place for place, name in enumerate(sentences(entry.target))}
    values = dict(sorted(values.items(), key=lambda each: order.get(each[0], len(order))))
    lines = [_fill(f"{kind}={entry.name}: {_summary(entry.target)}", "")]
    lines += [_line(f"{kind}.{k}", v, explained.get(k, "")) for k, v in values.items()]
    if kind == "sampler":
        lines += [_line(f"sampler.{s.name}", s.default, text) for s, text in settings(SamplingGrid)]
    return "\n".join(lines)


def _summary(target: Any) -> str:
    return (inspect.getdoc(target) or "").partition("\n\n")[0]


def _line(name: str, default: Any, sentence: str) -> str:
    """Return the line of a setting: its name, its default, and `sentence` beside or below them."""
    if isinstance(default, Mapping):
        value = "…"
    elif isinstance(default, str):
        value = default.replace("???", "…")
    else:
        value = json.dumps(default)
    label, pad = f"  {name}={value}", " " * INDENT
    text = _fill(sentence, pad)
    return f"{label}\n{text}" if len(label) >= INDENT - 1 else label + text[len(label) :]


def _fill(text: str, indent: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent
    )
