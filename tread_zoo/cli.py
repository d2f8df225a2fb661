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
    default_fields,
)
from tread_zoo.errors import unknown_field, unknown_name
from tread_zoo.registry import available, get_entry, load_plugins, split

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent
HOME = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent  # a wheel, or a clone
CONFIGS, SCRIPTS = HOME / "configs", HOME / "scripts"
AS_RUN = "as_run"  # of an option: as a checkpoint's run had it
GROUPS = (*PART_FIELDS, "routing")  # of a run
PARSER = OverridesParser.create()
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
            with errors_in_one_line(), _worded():
                sys.argv[1:] = spell_out(sys.argv[1:], groups)
                load_plugins(plugins_named_by(sys.argv[1:]))
                register_groups(name, config, groups)
                if {"-h", "--help"} & set(sys.argv):
                    print(describe(name, groups))
                    return
                if not NO_OVERRIDES & set(sys.argv):
                    check_overrides(name, sys.argv[1:])
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(job)()

        def job(composed: DictConfig) -> None:
            with errors_in_one_line("; continue with resume=latest" if name == "train" else ""):
                run(as_settings(composed))

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
        if as_run:
            store.store(group=kind, name=AS_RUN, node={"name": None, **every})
    if "routing" in groups:
        routing = default_fields(RunConfig)["routing"]
        store.store(group="routing", name="tread", node=_listed(routing))
        store.store(group="routing", name="none", node={"name": "none"})


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
    with _worded():
        overrides = spell_out(overrides, groups)
        load_plugins(plugins_named_by(overrides))
        register_groups(name, config, groups)
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return as_settings(compose(name, overrides=list(overrides)))


def check_overrides(name: str, words: Sequence[str]) -> None:
    """Compose the command line `words` of a script once, the first value of each sweep, to say in
    one line what hydra says in many.

    Raises:
        ValueError: an override that names no field or no option; the nearest is suggested.
    """
    chosen, folders, overrides = _parse(words)
    single = [f"hydra.searchpath=[file://{folder}]" for folder in folders[1:]]  # --config-dir
    for text, parsed in zip(overrides, PARSER.parse_overrides(overrides), strict=True):
        if parsed.is_sweep_override():
            text = f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}"
        single.append(text)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        compose(chosen or name, overrides=single)


def spell_out(words: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Return a command line on which a part that is given as a mapping, `group={name: x, a: 1}`, is
    chosen as hydra does: `group=x group.a=1`."""
    spelled = []
    for word in words:
        group, _, text = word.partition("=")
        is_mapping = group in groups and text.startswith("{")
        parsed = PARSER.parse_override(word) if is_mapping else None
        if parsed is None or parsed.is_sweep_override():
            spelled.append(word)
            continue
        name, options = split(group, parsed.value())  # type: ignore[arg-type]
        spelled += [f"{group}={name}", *(f"{group}.{k}={_text(v)}" for k, v in options.items())]
    return spelled


def _text(value: Any) -> str:
    """Return a value as hydra's grammar writes it."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{k}:{_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str):
        return "'{}'".format(value.replace("'", "\\'"))
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
            modules += [named] if isinstance(named, str) else named
        elif value:
            files.append(f"{key}/{value}.yaml")
    for path in (folder / file for folder in folders for file in files):
        if path.is_file():
            own: Any = OmegaConf.load(path)
            modules += own.get("plugins") or []
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
def _worded() -> Iterator[None]:
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
            group = str(cause.full_key).rpartition(".")[0]
            raise unknown_field(group, cause.key, map(str, cause.parent_node)) from None
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
