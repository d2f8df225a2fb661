"""From a command line to a script's settings: hydra composes them, `tread_zoo.config` checks them.

    @command("train", RunConfig)
    def main(settings): train(**settings)

Every registered part is an option of its hydra group without a YAML, whoever registered it:
plug-ins named by `plugins=[my_module]`, on the command line or in a YAML that it names, are
imported before hydra composes. An error of a user's ends in one line; HYDRA_FULL_ERROR=1 shows the
traceback.
"""

import argparse
import functools
import gc
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tread_zoo.config import (
    PART_FIELDS,
    EvaluationConfig,
    RunConfig,
    SamplingGrid,
)
from tread_zoo.errors import unknown_field, unknown_name
from tread_zoo.fields import default_fields
from tread_zoo.registry import available, get_entry, load_plugins, split

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent
HOME = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent  # a wheel, or a clone
CONFIGS, SCRIPTS = HOME / "configs", HOME / "scripts"
AS_RUN = "as_run"  # of an option: as a checkpoint's run had it
GROUPS = (*PART_FIELDS, "routing")  # of a run
PARSER = OverridesParser.create()
HYDRA_FLAGS = {
    "--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p",
    "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc", "--config-path", "-cp",
    "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun", "--info", "-i",
}  # fmt: skip
NO_OVERRIDES = {"--hydra-help", "--version", "--shell-completion", "-sc"}  # flags of hydra's


def command(
    name: str, config: type, groups: Sequence[str] = ()
) -> Callable[[Callable[[dict[str, Any]], None]], Callable[[], None]]:
    """Return a decorator that makes a script's main function from one that takes its settings.

    Args:
        name: of configs/<name>.yaml, whose defaults list begins with `defaults_of_<name>`: the
            fields of `config`.
        config: the configuration class of the settings.
        groups: fields that choose a part.
    """

    def decorate(run: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        @functools.wraps(run)
        def main() -> None:
            gc.disable()  # it would search all that is imported below for garbage, again and again
            with errors_in_one_line(), worded():
                check_words(sys.argv[1:], default_fields(config))
                sys.argv[1:] = spell_out(sys.argv[1:], groups)
                load_plugins(plugins_named_by(sys.argv[1:]))
                register_groups(name, config, groups)
                composed = name
                if name == "train" and names_a_run(sys.argv[1:]):
                    composed = "resume"
                    register_groups(composed, config, groups)
                if {"-h", "--help"} & set(sys.argv):
                    print(describe(name, groups))
                    return
                if not NO_OVERRIDES & set(sys.argv):
                    check_overrides(composed, sys.argv[1:])
            gc.freeze()
            gc.enable()
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=composed)(job)()

        def job(composed: DictConfig) -> None:
            with errors_in_one_line("; continue with resume=latest" if name == "train" else ""):
                settings = as_settings(composed)
                run(given(settings) if name == "train" else settings)

        return main

    return decorate


def register_groups(name: str, config: type, groups: Sequence[str]) -> None:
    """Give hydra the defaults of a script and every registered part of its groups."""
    from tread_zoo.kernels import get_forms

    store = ConfigStore.instance()
    defaults = default_fields(config)
    node = {k: v for k, v in defaults.items() if k not in groups}
    if "kernels" in node:
        node["kernels"] = dict.fromkeys(get_forms(), "auto")
    if node.get("evaluation") == {}:  # as a checkpoint's run had it, but for what is given
        node["evaluation"] = dict.fromkeys(default_fields(EvaluationConfig), AS_RUN)
    unset = AS_RUN if name == "resume" else None
    if name == "resume":
        node = _unset(node)
    node["hydra"] = {"output_subdir": None, "run": {"dir": "."}}
    store.store(name=f"defaults_of_{name}", node=_listed(node), package="_global_")
    for kind in set(groups) & set(PART_FIELDS):
        as_run, every = defaults[kind] == {}, dict[str, None]()
        for part in available(kind):
            entry = get_entry(kind, part)
            options: dict[str, Any] = dict.fromkeys(entry.parameters(), "???")
            options |= default_fields(SamplingGrid) if kind == "sampler" else {}
            options |= entry.defaults()
            every |= dict.fromkeys(options)
            if as_run:  # what is not given stays as the checkpoint's run had it
                options = dict.fromkeys(options)
            chosen = {"name": part, **_listed(options)}
            store.store(group=kind, name=part, node=chosen, provider="tread_zoo")
            if kind == "backbone" and part.endswith("_tiny"):
                store.store(group=kind, name=part.removesuffix("_tiny"), node=chosen)
        if as_run or name == "resume":
            store.store(group=kind, name=AS_RUN, node=dict.fromkeys(["name", *every], unset))
    if "routing" in groups:
        routing = default_fields(RunConfig)["routing"]
        store.store(group="routing", name="tread", node=_listed(routing))
        store.store(group="routing", name="none", node={"name": "none"})
        store.store(group="routing", name=AS_RUN, node=dict.fromkeys(routing, unset))


def describe(name: str, groups: Sequence[str]) -> str:
    """Return the help of a script: its docstring, the options of each group, every default.

    hydra's own help copies all that is registered once for each group, which takes seconds.
    """
    lines = [(sys.modules["__main__"].__doc__ or "").strip(), ""]
    lines += ["Groups (group=option):", ""] if groups else []
    for group in (*groups, *(("experiment",) if name == "train" else ())):
        options = {path.stem for path in (CONFIGS / group).glob("*.yaml")}
        options |= set(available(group)) if group in PART_FIELDS else set()
        options |= {"none", "tread"} if group == "routing" else set()
        listed = f"{group}: {', '.join(sorted(options))}"
        lines.append(textwrap.fill(listed, 100, subsequent_indent="    "))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        defaults = OmegaConf.to_yaml(compose(name))
    explained = "Defaults (field=value changes one; tread_zoo/config.py explains them):"
    return "\n".join([*lines, "", explained, "", defaults])


def names_a_run(words: Sequence[str]) -> bool:
    """Return whether `resume=` names the folder of a run or checkpoint, whose settings hold."""
    values = [word.partition("=")[2].strip("'\"") for word in words if word.startswith("resume=")]
    return any(value not in ("", "null", "latest", "auto") for value in values)


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that are as a run had them."""
    inner = {k: given(v) if isinstance(v, Mapping) else v for k, v in settings.items()}
    return {k: v for k, v in inner.items() if v not in (AS_RUN, {})}


def _unset(node: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _unset(v) if isinstance(v, Mapping) and v else AS_RUN for k, v in node.items()}


def as_settings(composed: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain values.

    Raises:
        ValueError: a value that must be given is missing.
    """
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ValueError(f"{missing[0]} is not set: add {missing[0]}=… to the command line.")
    settings = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}


def compose_settings(
    name: str, overrides: Sequence[str], config: type = RunConfig, groups: Sequence[str] = GROUPS
) -> dict[str, Any]:
    """Return the settings of a script for some overrides, from Python; see `command`.

    Raises:
        ValueError: an override that names no field or no option, in one line.
    """
    with worded():
        overrides = spell_out(overrides, groups)
        load_plugins(plugins_named_by(overrides))
        register_groups(name, config, groups)
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return as_settings(compose(name, overrides=list(overrides)))


def check_overrides(name: str, words: Sequence[str]) -> None:
    """Compose the command line `words` of a script, with the first value of each sweep and with all
    that choose a part, to say in one line what hydra says in many.

    Raises:
        ValueError: an override that names no field or no option (the nearest is suggested), or
            several values where no sweep is asked for.
    """
    chosen, folders, overrides = _parse(words)
    sweeps: dict[int, list[str]] = {}  # by place in the command line
    for place, parsed in enumerate(PARSER.parse_overrides(overrides)):
        if parsed.is_sweep_override():
            field = parsed.get_key_element()
            sweeps[place] = [f"{field}={value}" for value in parsed.sweep_string_iterator()]
    if sweeps and not {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(words):
        text = overrides[min(sweeps)]
        compared = f", or tread-zoo compare {text} for a report" if name == "train" else ""
        raise ValueError(
            f"{text} has several values: add -m to run one after the other{compared}. A value that "
            f'has a comma takes quotes, as in "{_quoted(text)}".'
        )
    firsts = [sweeps.get(place, [text])[0] for place, text in enumerate(overrides)]
    firsts += [f"hydra.searchpath=[file://{folder}]" for folder in folders[1:]]  # --config-dir
    others = [(place, text) for place, texts in sweeps.items() for text in texts[1:]]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        compose(chosen or name, overrides=firsts)
        for place, text in others:
            if text.partition("=")[0] in GROUPS:
                compose(chosen or name, overrides=[*firsts[:place], text, *firsts[place + 1 :]])


def check_words(words: Sequence[str], fields: Mapping[str, Any]) -> None:
    """Check that a command line is made of overrides and hydra's flags.

    Args:
        words: of the command line.
        fields: that the script has.

    Raises:
        ValueError: a word is neither; how it is spelt.
    """
    overrides = _parse(words)[2]
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        following = next((w for w in words[place + 1 : place + 2] if w[:1] != "-"), "")
        is_flag, name = word.startswith("-"), name.replace("-", "_")
        if is_flag and (word.split("=")[0] in HYDRA_FLAGS or word == "-"):
            continue
        if not is_flag and (equals or word not in overrides or word.startswith("~")):
            continue
        meant = f"{name}={value or following or '…'}"
        if not is_flag and name not in fields:
            meant = f"checkpoint={word}" if "checkpoint" in fields else "seed=1"
        raise ValueError(f"{word}: settings are written field=value, as in {meant}.")


def spell_out(words: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return a command line as hydra reads it: a value that its grammar has no place for, as paths
    with `ü` or `=`, is quoted, and a part that is given as a mapping, `group={name: x, a: 1}`, is
    chosen as `group=x group.a=1`."""
    spelled = []
    for word in map(_readable, words):
        group, _, text = word.partition("=")
        is_mapping = group in groups and text.startswith("{")
        parsed = PARSER.parse_override(word) if is_mapping else None
        if parsed is None or parsed.is_sweep_override():
            spelled.append(word)
            continue
        name, options = split(group, parsed.value())  # type: ignore[arg-type]
        spelled += [f"{group}={name}", *(f"{group}.{k}={_text(v)}" for k, v in options.items())]
    return spelled


def _readable(word: str) -> str:
    """Return an override, quoted if hydra cannot read its value."""
    try:
        if "=" in word and not word.startswith("-"):
            PARSER.parse_override(word)
    except HydraException:
        return _quoted(word)
    return word


def _quoted(override: str) -> str:
    field, _, value = override.partition("=")
    return f"{field}={_text(value)}"


def quoted(path: str | Path) -> str:
    """Return a path or text as hydra reads it, whatever it has in it."""
    return "'{}'".format(str(path).replace("'", "\\'"))


def _text(value: Any) -> str:
    """Return a value as hydra's grammar writes it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{k}:{_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str):
        return quoted(value)
    return json.dumps(value)  # a number, true, false or null


def plugins_named_by(words: Sequence[str]) -> list[str]:
    """Return the modules that `plugins=[…]` names among the words of a command line, or in a YAML
    that one of them chooses."""
    name, folders, overrides = _parse(words)
    files = [f"{name}.yaml"] if name else []
    modules: list[str] = []
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key == "plugins":
            named: Any = PARSER.parse_override(word).value()
            modules += named if isinstance(named, list) else [named]
        elif value:
            files.append(f"{key}/{value}.yaml")
    for path in (folder / file for folder in folders for file in files):
        if path.is_file():
            own: Any = OmegaConf.load(path)
            modules += list(own.get("plugins") or [])
    return modules


@contextmanager
def errors_in_one_line(after_interrupt: str = "") -> Iterator[None]:
    """Turn an error that names its remedy into one line and exit status 1, Ctrl-C into one and 130.

    In a sweep an error ends its job alone: the others go on, and hydra ends with status 1.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        yield
        return
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        sweeping = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
        if sweeping and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            logger.error("error: %s", error)
            raise CompactHydraException(f"error: {error}") from None
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C{after_interrupt}", file=sys.stderr)
        sys.exit(130)


@contextmanager
def worded() -> Iterator[None]:
    """Turn hydra's errors into a `ValueError` of one line, with the nearest name."""
    try:
        yield
    except MissingConfigException as error:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if not error.options:
            raise ValueError(str(error).splitlines()[0]) from None
        raise unknown_name(group, option, error.options) from None
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
            group, root = str(cause.full_key).rpartition(".")[0], cause.parent_node._get_root()
            tree: Any = OmegaConf.to_container(root, resolve=False)
            tree.pop("hydra", None)
            known = [key for key in map(str, cause.parent_node) if key != "hydra"]
            if known == ["name"] and group in GROUPS:
                chosen = cause.parent_node["name"]
                listed = {file.removesuffix(".yaml") for file in ConfigStore.instance().list(group)}
                others = " or ".join(sorted(listed - {chosen, AS_RUN}))
                raise ValueError(
                    f"{group}.{cause.key} is no setting, because {group}={chosen} has none: set "
                    f"{group}={others}."
                ) from None
            raise unknown_field(group, cause.key, known, tree) from None
        raise ValueError("; ".join(str(error).split("\n")[:2])) from None


def _listed(node: Any) -> Any:
    """Return plain values as OmegaConf takes them."""
    if isinstance(node, Mapping):
        return {key: _listed(value) for key, value in node.items()}
    return [_listed(value) for value in node] if isinstance(node, list | tuple) else node


def _parse(words: Sequence[str]) -> tuple[str | None, list[Path], list[str]]:
    """Return --config-name, the folders to look for configurations in, and the overrides."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--cfg", "-c", "--package", "-p"):  # of hydra's, with a value
        parser.add_argument(flag)
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd", type=Path)
    flags, rest = parser.parse_known_args(list(words))
    folders = [CONFIGS, *([flags.config_dir.resolve()] if flags.config_dir else [])]
    return flags.config_name, folders, [word for word in rest if not word.startswith("-")]
