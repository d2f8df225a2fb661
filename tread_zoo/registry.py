"""The registry: backbones by name.

    @register_backbone("my_net_tiny", hidden_size=64, depth=6)
    class MyNet(Backbone): ...

    create_backbone("my_net_tiny", input_size=32, in_channels=4, num_classes=10)

Other packages add theirs through the entry-point group `tread_zoo.backbones`: the entry's name is
the backbone's name, its value a module (or an object in one) whose import registers it.
"""

import fnmatch
import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from tread_zoo.backbone import Backbone
from tread_zoo.errors import unknown_name
from tread_zoo.kinds import check_keywords

ENTRY_POINT_GROUP = "tread_zoo.backbones"
ZOO_PACKAGE = "backbones"  # loaded by name at first use: the method does not depend on the zoo
CONTEXT_KEYWORDS = ("context_length", "context_size")

BackboneClass = TypeVar("BackboneClass", bound=type[Backbone])


@dataclass(frozen=True)
class BackboneEntry:
    """A registered name: the class, and the keywords that make the variant."""

    name: str
    cls: type[Backbone]
    preset: dict[str, Any]

    def keywords(self) -> dict[str, Any]:
        """Return every keyword of the constructor with this variant's value; required ones and
        those of contexts, which come from the data, are left out."""
        parameters = inspect.signature(self.cls).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        keywords = {**defaults, **self.preset}
        return {key: value for key, value in keywords.items() if key not in CONTEXT_KEYWORDS}

    @property
    def takes_contexts(self) -> bool:
        """Whether its constructor has the keywords for contexts."""
        return set(CONTEXT_KEYWORDS) <= inspect.signature(self.cls).parameters.keys()


_entries: dict[str, BackboneEntry] = {}
_broken: dict[str, Exception] = {}  # entry points that failed to import, by name
_loaded = False


def register_backbone(name: str, **preset: Any) -> Callable[[BackboneClass], BackboneClass]:
    """Return a class decorator that registers a variant under `name`.

    Args:
        name: architecture_size_patch, as in `dit_b_2`.
        preset: constructor keywords that make this variant.

    Raises:
        ValueError: the name is taken, is no identifier, or a preset keyword is none of the
            constructor's, or the constructor swallows any keyword.
    """

    def register(cls: BackboneClass) -> BackboneClass:
        if not name.isidentifier():
            raise ValueError(f"backbone name {name!r} must be an identifier such as dit_b_2.")
        if name in _entries:
            taken = _entries[name].cls
            raise ValueError(
                f"backbone {name!r} is already registered by {taken.__module__}.{taken.__name__}; "
                "choose another name."
            )
        parameters = inspect.signature(cls).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ValueError(
                f"{cls.__name__} takes **keywords: a misspelt one would pass unnoticed. "
                "Name each keyword in its constructor."
            )
        for key in preset:
            if key not in parameters:
                raise unknown_name(f"{name} preset keyword", key, parameters)
        _entries[name] = BackboneEntry(name, cls, preset)
        return cls

    return register


def create_backbone(
    name: str,
    *,
    input_size: int | tuple[int, int],
    in_channels: int,
    num_classes: int,
    **overrides: Any,
) -> Backbone:
    """Build the backbone `name` with fresh weights from torch's global generator.

    Args:
        input_size: height and width of its input, one integer or two.
        in_channels: channels of its input.
        num_classes: number of labels; 0 makes it unconditional.
        overrides: any other keyword of its constructor, in place of the preset's value.

    Raises:
        ValueError: an unknown name or keyword (the nearest is suggested), contexts for one that
            takes none, a value of another kind than the constructor's annotation, or one that it
            refuses.
    """
    entry = get_backbone_entry(name)
    if not entry.takes_contexts and any(overrides.pop(key, 0) for key in CONTEXT_KEYWORDS):
        able = sorted(other.name for other in _entries.values() if other.takes_contexts)
        raise ValueError(
            f"{name} takes no contexts (context_size): {entry.cls.why_no_context}. "
            f"Those that do: {', '.join(able)}. Or leave the contexts out: data.context=false for "
            "latents, null for images."
        )
    known = inspect.signature(entry.cls).parameters
    for key in overrides:
        if key not in known:
            raise unknown_name(f"{name} keyword", key, known)
    check_keywords("backbone", entry.cls, overrides)
    config = {
        "input_size": input_size,
        "in_channels": in_channels,
        "num_classes": num_classes,
        **entry.preset,
        **overrides,
    }
    backbone = entry.cls(**config)
    backbone.name, backbone.config = name, config
    return backbone


def list_backbones(pattern: str = "*") -> list[str]:
    """Return the registered names that match a shell pattern such as `mamba*`, sorted."""
    _load_all()
    return sorted(name for name in _entries if fnmatch.fnmatchcase(name, pattern))


def get_backbone_entry(name: str) -> BackboneEntry:
    """Return what is registered under `name`.

    Raises:
        ValueError: an unknown name.
        Exception: the error with which the package that should give this name failed to import.
    """
    _load_all()
    if name not in _entries and name in _broken:
        raise _broken[name]
    if name not in _entries:
        raise unknown_name("backbone", name, _entries)
    return _entries[name]


def _load_all() -> None:
    """Import our backbones and the plug-ins, once; one that fails is named and passed over."""
    global _loaded
    if _loaded:
        return
    zoo = importlib.import_module(ZOO_PACKAGE)
    if getattr(zoo, "__distribution__", None) != "tread-zoo":
        where = getattr(zoo, "__file__", None) or list(getattr(zoo, "__path__", []))
        raise ImportError(
            f"the package `{ZOO_PACKAGE}` found at {where} is not tread-zoo's: another package or "
            "folder of that name comes first on the import path. Rename it or change the order."
        )
    _loaded = True  # before the plug-ins, which may ask for the list themselves
    for plugin in entry_points(group=ENTRY_POINT_GROUP):
        _load_plugin(plugin)


def _load_plugin(plugin: EntryPoint) -> None:
    try:
        plugin.load()
        if plugin.name not in _entries:
            raise ValueError(
                f"entry point {plugin.name!r} ({plugin.value}) was imported but did not call "
                f"register_backbone({plugin.name!r})."
            )
    except Exception as error:
        _broken[plugin.name] = error
        warnings.warn(
            f"backbone {plugin.name!r} from {plugin.value} is left out: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
