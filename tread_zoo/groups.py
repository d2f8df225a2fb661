"""Hydra's view of a script's fields.

A field that chooses a registered part is a group of hydra, and every name is accepted as a choice.
The registry checks the name later, so that composing settings imports no part or plug-in.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from tread_zoo.config import PART_FIELDS, default_part
from tread_zoo.fields import default_fields
from tread_zoo.registry import available


def store_fields(
    name: str, config: type, presets: Mapping[str, str | None], whole: bool = False
) -> None:
    """Tell hydra the fields of a script. Where a field is a mapping, hydra accepts any keys in it.

    Args:
        name, config: name of the script, and the class of its settings.
        presets: groups of preset files, each with the file chosen by default or None. The settings
            in these files replace defaults.
        whole: also store the fields' defaults and those of registered parts, to show them.
    """
    node, chosen = dict[str, Any](), dict[str, Any]()
    for field, default in default_fields(config).items():
        if field in PART_FIELDS and isinstance(default, str):
            chosen[field] = default if whole else None
            node[field] = OmegaConf.create({}, flags={"struct": False})
        elif isinstance(default, Mapping):
            node[field] = OmegaConf.create(dict(default) if whole else {}, flags={"struct": False})
        else:
            node[field] = default if whole else "???"
    chosen |= {field: None for field in PART_FIELDS if field in node and field not in chosen}
    node["defaults"] = ["_self_", *({group: option} for group, option in chosen.items())]
    node["defaults"] += [{group: option} for group, option in presets.items()]
    node["defaults"] += [{"override hydra/job_logging": "plain"}]
    sweep = {"dir": "runs/sweep", "subdir": "${hydra.job.num}"}
    node["hydra"] = {"output_subdir": None, "run": {"dir": "."}, "sweep": sweep}
    ConfigStore.instance().store(name, node)
    RegistrySearchPath.groups = [*chosen]
    RegistrySource.whole = [field for field, option in chosen.items() if option]
    for plugin in (RegistrySource, RegistrySearchPath):
        Plugins.instance().register(plugin)


class RegistrySource(ConfigSource):
    """A source from which hydra takes the choices of the groups in `path`: the registered names.
    `whole` lists the groups whose options are shown with their defaults."""

    whole: Sequence[str] = ()

    @staticmethod
    def scheme() -> str:
        return "registry"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in self.path.split(",") and config_path != ""

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.rpartition("/")
        return self.is_group(group) and name != ""

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.rpartition("/")
        options: dict[str, Any] = {"name": name}
        if group in self.whole:
            with suppress(ValueError):  # a plug-in's name, or a wrong one
                options = default_part(group, name)
        node = OmegaConf.create(options, flags={"struct": False})
        return ConfigResult("tread_zoo", config_path, node, {"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return available(config_path.strip("/"))


class RegistrySearchPath(SearchPathPlugin):
    """Hydra's search path, with a `RegistrySource` of `groups` after all files, even those of
    --config-dir."""

    groups: Sequence[str] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("schema", f"registry://{','.join(self.groups)}")
