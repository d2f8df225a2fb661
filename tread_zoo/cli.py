"""From a command line to a script's settings: hydra composes only the settings that are given.

    @command("train", RunConfig)
    def main(settings): train(**settings)

`tread_zoo.config` completes and checks them. A field that chooses a registered part, such as the
backbone, is a hydra group (`tread_zoo.groups`). A user's error is one line; HYDRA_FULL_ERROR=1
shows the traceback.
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import env_override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tread_zoo.config import RunConfig
from tread_zoo.credentials import without_credentials
from tread_zoo.errors import unknown_field, unknown_name
from tread_zoo.fields import default_fields
from tread_zoo.groups import store_fields
from tread_zoo.help import describe
from tread_zoo.registry import KINDS, load_plugins

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent
HOME = PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent  # a wheel, or a clone
CONFIGS, SCRIPTS = HOME / "configs", HOME / "scripts"
PRESETS: dict[str, dict[str, str | None]] = {  # groups of files with settings, by script
    "train": {"experiment": None},
    "compare": {"study": "architectures"},
}
PARSER = OverridesParser.create()
FLAGS_WITH_VALUE = {
    "-c", "--cfg", "-p", "--package", "-i", "--info", "-cd", "--config-dir", "-cn", "--config-name",
}  # fmt: skip
FLAGS_THAT_SHOW = {"-c", "--cfg", "-sc", "--shell-completion"}


def command(
    name: str, config: type
) -> Callable[[Callable[[dict[str, Any]], None]], Callable[[], None]]:
    """Return a decorator that turns a function of settings into a script's main function.

    Args:
        name: name of the script.
        config: configuration class of the settings.
    """

    def decorate(run: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        @functools.wraps(run)
        def main() -> None:
            words, traceback = sys.argv[1:], os.environ.get("HYDRA_FULL_ERROR") == "1"

            def job(composed: DictConfig) -> None:
                saved = "; if a checkpoint was saved, resume=latest continues from it"
                remedy = saved if name == "train" else ""
                with errors_in_one_line(traceback, f"stopped by Ctrl-C{remedy}"):
                    settings = _user_settings(composed, config)
                    import_plugins(settings.get("plugins", ()))
                    run(settings)

            with errors_in_one_line(traceback), plain_errors(name, config):
                if {"-h", "--help"} & set(words):
                    import_plugins(plugins_among(words))
                    doc = run.__globals__["__doc__"]
                    print(describe(doc, config, words, presets(name, config)))
                    return
                check_words(words, config)
                shown = {word.partition("=")[0] for word in words} & FLAGS_THAT_SHOW
                store_fields(name, config, PRESETS.get(name, {}), whole=bool(shown))
                sys.argv[1:] = map(readable, words)
                with env_override({"HYDRA_FULL_ERROR": "1"}):  # `plain_errors` rewords them
                    hydra.main(str(CONFIGS), name, version_base="1.3")(job)()

        main.config = config  # type: ignore[attr-defined]
        return main

    return decorate


def compose_settings(
    name: str, overrides: Sequence[str], config: type = RunConfig
) -> dict[str, Any]:
    """Return the settings that a script would get from `overrides` on its command line. Settings
    that no override or preset names are left out.

    Args:
        name: name of the script.
        overrides: words as on its command line, such as "seed=1".
        config: configuration class of the settings.
    """
    with plain_errors(name, config):
        store_fields(name, config, PRESETS.get(name, {}))
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            settings = _user_settings(compose(name, overrides=[*map(readable, overrides)]), config)
    import_plugins(settings.get("plugins", ()))
    return settings


def import_plugins(modules: Sequence[str]) -> None:
    """Import modules that register parts. They may be in the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    load_plugins(modules)


def plugins_among(words: Sequence[str]) -> Any:
    """Return the modules that `plugins=` names on a command line."""
    given = [word for word in words if word.partition("=")[0] == "plugins"]
    return PARSER.parse_override(readable(given[-1])).value() if given else ()


def presets(name: str, config: type) -> dict[str, list[str]]:
    """Return the names of a script's preset files, by group. A group is a folder of `CONFIGS`.
    `config` is the class of the script's settings."""
    groups = [*PRESETS.get(name, {}), *(["routing"] if config is RunConfig else [])]
    return {group: [path.stem for path in (CONFIGS / group).glob("*.yaml")] for group in groups}


def _user_settings(composed: DictConfig, config: type) -> dict[str, Any]:
    """Return the settings the user gave, hydra's `composed`, as plain values. An interpolation
    `${…}` in them may also refer to a default of the class `config`."""
    given: Any = OmegaConf.to_container(composed)
    given = {field: value for field, value in given.items() if value != {}}
    defaults = OmegaConf.create(default_fields(config))
    resolved: Any = OmegaConf.to_container(OmegaConf.merge(defaults, given), resolve=True)
    return _entries_in(resolved, given)


def _entries_in(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested mapping `values` without keys that `fields`, nested in the same way, lacks
    or has as "???"."""
    return {
        field: _entries_in(values[field], inner) if isinstance(inner, Mapping) else values[field]
        for field, inner in fields.items()
        if inner != "???"  # OmegaConf's sign for a missing value
    }


def check_words(words: Sequence[str], config: type) -> None:
    """Raise a `ValueError` for a word that is neither an override nor a flag of hydra. The error
    shows how to write the setting that is probably meant; `config` is the class of the settings."""
    fields = default_fields(config)
    for number, word in enumerate(words):
        name, equals, value = word.lstrip("-~").replace("-", "_").partition("=")
        if name in KINDS and re.fullmatch(r"-?[\d.]+", value):
            example = (
                f"guidance=cfg guidance.scale={value}" if name == "guidance" else f"--help {name}"
            )
            raise ValueError(f"{word} is a number, and {name} has a name: {example}.")
        if name in KINDS and value.startswith("["):  # hydra would take the last one
            inner = value.strip("[]")
            raise ValueError(f"{word}: {name} has one name; tread-zoo compare {name}={inner}.")
        is_flag = word[:1] == "-" and name.partition(".")[0] not in fields
        if is_flag or (equals and word[:1] != "-"):
            continue
        if number and words[number - 1] in FLAGS_WITH_VALUE:
            continue
        following = next((w for w in words[number + 1 :] if w[:1] != "-" and "=" not in w), "")
        meant = f"{name}={value or following or '…'}"
        if name not in fields and word[:1] != "-":
            meant = f"checkpoint={word}" if "checkpoint" in fields else "seed=1"
        raise ValueError(f"{word}: settings are written field=value, as in {meant}.")


def readable(word: str) -> str:
    """Return an override, with its value quoted if hydra's grammar cannot read it, such as a path
    with `ü` or `=`. `bypass_rate` becomes `selection_rate`, TREAD's name for it."""
    word = re.sub(r"^(routing|sampler)\.bypass_rate=", r"\1.selection_rate=", word)
    field, equals, value = word.partition("=")
    if field == "prompt" and value[:1] not in ("[", "'", '"'):
        return f"{field}={quoted(value)}"  # a text may have commas and brackets
    try:
        if equals and not word.startswith("-"):
            PARSER.parse_override(word)
    except HydraException:
        return f"{field}={quoted(value)}"
    return word


def quoted(path: str | Path) -> str:
    """Return a path or text in hydra's quotes."""
    return "'{}'".format(str(path).replace("'", "\\'"))


@contextmanager
def errors_in_one_line(
    traceback: bool = False, stopped: str = "stopped by Ctrl-C", status: int = 1
) -> Iterator[None]:
    """Print a ValueError, FloatingPointError or OSError of the context in one line, and exit.

    The exit status is `status`, or 130 after Ctrl-C, when `stopped` is printed instead. If nobody
    reads the output any more, as after a pipe to `head`, nothing is printed and the status is 141,
    a shell's SIGPIPE. In a sweep an error ends only its own job, and hydra exits with 1. With
    `traceback`, errors are raised unchanged.

    Characters that the locale cannot show are printed as escape codes.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook
            stream.reconfigure(errors="backslashreplace")
    if traceback:
        yield
        return
    try:
        yield
        sys.stdout.flush()
    except (ValueError, FloatingPointError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            sys.exit(141)
        sweeping = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
        if sweeping and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            logger.error("error: %s", error)
            raise
        text = without_credentials(str(error)).replace("\n", " ")
        print(f"error: {text}", file=sys.stderr)
        sys.exit(status)
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        sys.exit(130)


def _nobody_reads() -> bool:
    """Return whether the reader of the standard output is gone. To find out, an empty line is
    printed. If nobody reads it, all further output is discarded."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its exit
        return True
    return False


@contextmanager
def plain_errors(name: str, config: type) -> Iterator[None]:
    """Turn hydra's errors about a script's settings into a `ValueError` of one line. For an unknown
    name, it suggests the nearest. `name` is the script's, `config` the class of its settings."""
    try:
        yield
    except MissingConfigException as error:
        file = str(error.missing_cfg_file)
        is_part = file.partition("/")[0] in KINDS  # whose name may have a /, as in DiT-XL/2
        group, _, option = file.partition("/") if is_part else file.rpartition("/")
        if group == "data" and "/" in option:
            raise ValueError(
                f"data={option!r} is a path, and data names a source: for a folder of images, "
                f"data=image_folder data.path={option} data.image_size=64."
            ) from None
        if error.options:
            raise unknown_name(group, option, error.options) from None
        raise ValueError(str(error).splitlines()[0]) from None
    except HydraException as error:
        text, cause = str(error), error.__cause__
        several = re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'", text)
        if several:
            raise ValueError(_several_values(name, several[1])) from None
        no_group = re.match(r"Could not override '([^']+)'\. No match", text)
        fields = {**default_fields(config), **PRESETS.get(name, {})}
        if no_group:
            raise unknown_field("", no_group[1], fields) from None
        if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
            group, key = str(cause.full_key).rpartition(".")[0], str(cause.key)
            if group:
                raise unknown_field(group, key, map(str, cause.parent_node)) from None
            raise unknown_field("", key, fields, fields) from None
        raise ValueError("; ".join(text.split("\n")[:2])) from None


def _several_values(name: str, override: str) -> str:
    field, _, value = override.partition("=")
    text = f'A value that has a comma takes quotes, as in "{field}={quoted(value)}".'
    if name == "compare":
        return f"{override} has several values. {text}"
    compared = f", or tread-zoo compare {override} for a report" if name == "train" else ""
    return f"{override} has several values: add -m to run one after the other{compared}. {text}"
