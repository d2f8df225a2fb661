"""What the scripts share: configurations for every backbone, and ends in one clear line.

An error that names its remedy, and Ctrl-C, are told in a line; so is Ctrl-C while a script still
imports, from the import of this module on. HYDRA_FULL_ERROR=1 shows tracebacks instead.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from tread_zoo.plain import check_hydra, check_plain

logger = logging.getLogger(__name__)


def register_configs() -> None:
    """Make what the code knows known to hydra: backbones and kernels.

    Every registered backbone is an option of the group `backbone`, with the constructor's keywords
    and the variant's values, so that sizes live once, in code, and `backbone.depth=6` is checked
    for its spelling. `kernels: default` has every operation, so that `kernels.attention=torch` is.
    """
    from hydra.core.config_store import ConfigStore

    from tread_zoo.kernels import get_forms
    from tread_zoo.registry import get_entry, list_backbones

    store = ConfigStore.instance()
    for name in list_backbones():
        node = {"name": name, **get_entry("backbone", name).defaults()}
        store.store(group="backbone", name=name, node=node, provider="tread_zoo")
    forms = dict.fromkeys(get_forms(), "auto")
    store.store(group="kernels", name="default", node=forms, provider="tread_zoo")


def as_keywords(config: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain keywords.

    Raises:
        ValueError: a value that must be given is missing, or one names code to be run.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError(f"{missing[0]} is not set: add {missing[0]}=… to the command line.")
    keywords = OmegaConf.to_container(config, resolve=True)
    assert isinstance(keywords, dict)
    check_plain(keywords, "the configuration")
    return {str(key): value for key, value in keywords.items()}


def clear_errors(main: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """Turn an error that names its remedy into one line and exit status 1, Ctrl-C into one and 130.

    In a sweep of a single process an error ends its job alone: it is told, the others go on, and
    hydra ends with status 1. Several processes end, for some of them may still be in the job.
    """

    @functools.wraps(main)
    def wrapped(config: DictConfig) -> None:
        if _shows_tracebacks():
            main(config)
            return
        try:
            main(config)
        except (ValueError, FloatingPointError, OSError) as error:
            if _is_in_a_sweep():
                logger.error("error: %s", error)
                raise CompactHydraException(f"error: {error}") from None
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            _leave_interrupted("; continue with resume=latest" if "resume" in config else "")

    return wrapped


def _is_in_a_sweep() -> bool:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or not HydraConfig.initialized():
        return False
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _shows_tracebacks() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def _leave_interrupted(remedy: str = "") -> NoReturn:
    print(f"stopped by Ctrl-C{remedy}", file=sys.stderr)
    sys.exit(130)


def _tell_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Take the place of `sys.excepthook`: Ctrl-C where no script's main is under way yet."""
    if issubclass(kind, KeyboardInterrupt) and not _shows_tracebacks():
        _leave_interrupted()
    sys.__excepthook__(kind, error, trace)


def _docstring_of_the_script() -> str:
    """Return what `--help` begins with: see configs/hydra/help/script.yaml."""
    return (sys.modules["__main__"].__doc__ or "").replace("$", "$$")


def _checked(load: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """Check what hydra composed before hydra acts on it: it calls what its own node names."""

    @functools.wraps(load)
    def wrapped(*args: Any, **kwargs: Any) -> DictConfig:
        config = load(*args, **kwargs)
        if "hydra" in config:
            node = OmegaConf.to_container(config.hydra, resolve=False)
            try:
                check_hydra(node)
            except ValueError as error:
                raise ConfigCompositionException(str(error)) from None
        return config

    return wrapped


sys.excepthook = _tell_uncaught
# For runs, sweeps and hydra.compose alike, and for every job of a sweep.
ConfigLoaderImpl.load_configuration = _checked(  # type: ignore[method-assign]
    ConfigLoaderImpl.load_configuration
)
OmegaConf.register_new_resolver("script", _docstring_of_the_script, replace=True)
