"""What the scripts share: configurations for every backbone, and errors as one clear line."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tread_zoo.plain import check_plain


def register_configs() -> None:
    """Make what the code knows known to hydra: backbones and kernels.

    Every registered backbone is an option of the group `backbone`, with the constructor's keywords
    and the variant's values, so that sizes live once, in code, and `backbone.depth=6` is checked
    for its spelling. `kernels: default` has every operation, so that `kernels.attention=torch` is.
    """
    from hydra.core.config_store import ConfigStore

    from tread_zoo.kernels import get_forms
    from tread_zoo.registry import get_backbone_entry, list_backbones

    store = ConfigStore.instance()
    for name in list_backbones():
        node = {"name": name, **get_backbone_entry(name).keywords()}
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
    """Turn an error that names its remedy into one line and exit status 1.

    HYDRA_FULL_ERROR=1 shows the whole traceback instead.
    """

    @functools.wraps(main)
    def wrapped(config: DictConfig) -> None:
        try:
            main(config)
        except (ValueError, FloatingPointError, OSError) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            sys.exit(f"error: {error}")

    return wrapped
