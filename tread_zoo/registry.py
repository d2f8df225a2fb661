"""The registry: backbones, objectives, samplers and all other kinds of parts, by name.

    @register("selector", "checkerboard")
    @dataclass(frozen=True)
    class Checkerboard:
        parity: int = 0
        def __call__(self, batch, grid, num_kept, generator): ...

    create("selector", "checkerboard", parity=1)
    create("selector", {"name": "checkerboard", "parity": 1})

The options of a part are the fields of its dataclass, the keywords of its constructor, or the
keyword-only parameters of its function. A data source is a dataclass with a method `load`, or a
function all of whose parameters are options. `create` checks values against the annotations, as
pydantic does, with `Annotated[..., Field(...)]` for ranges.

Other projects add parts by the entry-point group `tread_zoo.plugins`, whose values are modules that
register parts when imported, or by `plugins=[my_module]`.
"""

import difflib
import fnmatch
import functools
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from tread_zoo.credentials import are_hidden
from tread_zoo.errors import USUAL_NAMES, describe_invalid, missing_path, unknown_name
from tread_zoo.fields import OPTIONS, as_plain

_PACKAGE = Path(__file__).resolve().parent
PRETRAINED = _PACKAGE / "pretrained"
if not PRETRAINED.exists():  # a clone
    PRETRAINED = _PACKAGE.parent / "examples" / "checkpoints"

Target = TypeVar("Target", bound=Callable[..., Any])

# Modules that register our parts, imported when a kind is first used.
_HOMES = {
    "backbone": "backbones",
    "routing": "tread_zoo.routing.methods",
    "selector": "tread_zoo.routing.selectors",
    "objective": "tread_zoo.diffusion",
    "sampler": "tread_zoo.diffusion",
    "guidance": "tread_zoo.diffusion",
    "optimizer": "tread_zoo.training.optimizers",
    "lr_schedule": "tread_zoo.training.lr_schedules",
    "data": "tread_zoo.data",
    "metric": "tread_zoo.evaluation.metrics",
    "tracker": "tread_zoo.training.trackers",
    "alignment": "tread_zoo.training.alignment",
}
KINDS = tuple(_HOMES)
PLUGIN_GROUP = "tread_zoo.plugins"
STRICT = ConfigDict(**OPTIONS, arbitrary_types_allowed=True, frozen=True)
FROM_DATA = ("input_size", "in_channels", "num_classes")  # no options of a backbone


@dataclass(frozen=True)
class Entry:
    """A registered name of a `kind` of parts: a class or function (`target`), a preset that
    replaces some of its defaults, and metadata, such as a metric's `better`."""

    kind: str
    name: str
    target: Callable[..., Any]
    preset: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> dict[str, inspect.Parameter]:
        """Return the parameters of the target that are options, by name. For a backbone, parameters
        that come from the data are not options."""
        every = inspect.isclass(self.target) or self.kind == "data"
        return {
            name: parameter
            for name, parameter in inspect.signature(self.target).parameters.items()
            if (every or parameter.kind is parameter.KEYWORD_ONLY)
            and not (self.kind == "backbone" and name in FROM_DATA)
        }

    def defaults(self) -> dict[str, Any]:
        """Return the default values of this variant's options."""
        given = {k: p.default for k, p in self.parameters().items() if p.default is not p.empty}
        return {**given, **self.preset}

    def options(self) -> dict[str, Any]:
        """Return all options with their defaults; a required one has "???"."""
        return {**dict.fromkeys(self.parameters(), "???"), **self.defaults()}

    @functools.cached_property
    def schema(self) -> type[BaseModel]:
        """The options as a pydantic model."""
        try:
            signature = inspect.signature(self.target, eval_str=True)
        except NameError:  # types imported only for type checkers
            signature = inspect.Signature()
        parameters = signature.parameters.values()
        hints = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
        defaults = {**dict.fromkeys(self.parameters(), ...), **self.defaults()}
        fields: dict[str, Any] = {k: (hints.get(k, Any), v) for k, v in defaults.items()}
        return create_model(f"{self.kind}_{self.name}", __config__=STRICT, **fields)

    def complete(self, options: Mapping[str, Any], field: str | None = None) -> dict[str, Any]:
        """Return all options as plain values: the given `options`, checked, and defaults.

        Args:
            options: some of the part's options.
            field: the setting that has the options, named in errors; None: the kind.

        Raises:
            ValueError: an option is unknown or missing, or a value is wrong.
        """
        where = field or self.kind
        for option in [key for key in options if key not in self.parameters()]:
            if holders := self._others_with(option):
                raise ValueError(
                    f"{where}.{option} is no setting of {where}={self.name}: set {where}="
                    f"{' or '.join(holders)}, too."
                )
        plain = json.dumps(dict(options), default=as_plain)
        try:
            model = self.schema.model_validate_json(plain)
        except ValidationError as error:
            raise describe_invalid(where, error, json.loads(plain), self.defaults()) from None
        values = {name: getattr(model, name) for name in type(model).model_fields}
        if is_dataclass(self.target):
            self.target(**values)  # raises if values exclude each other
        return values

    def _others_with(self, option: str) -> list[str]:
        """Return the names of other parts of this kind that have `option`. Return [] if this part
        has an option of a similar name, which is probably meant."""
        usual = USUAL_NAMES.get(option, "").rpartition(".")[2]
        if difflib.get_close_matches(option, self.parameters(), 1) or usual in self.parameters():
            return []
        names = available(self.kind)
        return [name for name in names if option in get_entry(self.kind, name).parameters()]

    def build(self, options: Mapping[str, Any], field: str | None = None) -> Any:
        """Return the part: an instance of the class, the data of a source, or the function with its
        options bound.

        Raises:
            ValueError: see `complete`; or the path of the data does not exist.
        """
        values = self.complete(options, field)
        if self.kind != "data" and not inspect.isclass(self.target):
            return functools.partial(self.target, **values) if values else self.target
        path = values.get("path") if self.kind == "data" else None
        if are_hidden(path):
            raise ValueError(
                f"{field or self.kind}.path={path!r} was saved without its credentials: give "
                f"{field or self.kind}.path again."
            )
        try:
            made = self.target(**values)
            return made.load() if self.kind == "data" and inspect.isclass(self.target) else made
        except OSError as error:
            named = isinstance(path, str) and "://" not in path  # a path, not a bucket
            if named and not Path(str(path)).expanduser().exists():
                why = "" if error.errno else str(error).partition("\n")[0]
                raise missing_path(f"{field or self.kind}.path", str(path), why) from error
            raise


_entries: dict[tuple[str, str], Entry] = {}
_loaded: set[str] = set()  # kinds, and plug-ins' entry points
_broken: dict[str, str] = {}  # plug-ins that could not be imported, and why
_METADATA = {
    "backbone": {"learning_rate"},
    "metric": {"better", "features", "statistics", "extractor", "min_images", "labels"},
    "data": {"num_steps"},
}


def register(
    kind: str, name: str, *, preset: Mapping[str, Any] | None = None, **metadata: Any
) -> Callable[[Target], Target]:
    """Return a decorator that registers a class or function under `name`.

    Args:
        kind: one of `KINDS`.
        name: an identifier.
        preset: options of this variant, which replace the target's defaults.
        metadata: for a backbone `learning_rate`, AdamW's rate for it; for a metric `better`,
            "lower" or "higher", and more in `tread_zoo.evaluation.metrics`; for a data source
            `num_steps`, the length of its recipe.

    Raises:
        ValueError: the kind or a key of `metadata` is unknown; the name is taken or no identifier;
            a preset is not an option; or the target takes `name` or `**keywords`.
    """
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    if not name.isidentifier():
        raise ValueError(f"{kind} name {name!r} must be an identifier such as my_{kind}.")
    for key in metadata:
        if key not in _METADATA.get(kind, ()):
            raise unknown_name(f"register({kind!r}) keyword", key, _METADATA.get(kind, ()))

    def decorate(target: Target) -> Target:
        stated = {k: v for k, v in metadata.items() if v is not None}
        entry = Entry(kind, name, target, dict(preset or {}), stated)
        taken = _entries.get((kind, name))
        if taken is not None and _place(taken) != _place(entry):
            raise ValueError(f"{kind} {name!r} is already registered by {_place(taken)}.")
        parameters = inspect.signature(target).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise ValueError(
                f"{_place(entry)} takes **keywords: a misspelt one would pass unnoticed. Name each."
            )
        if "name" in parameters:  # it would choose another part
            raise ValueError(f"{_place(entry)} has an option `name`: give it another one.")
        for option in entry.preset:
            if option not in parameters:
                raise unknown_name(f"{kind} {name!r}: preset", option, parameters)
        _entries[kind, name] = entry
        return target

    return decorate


def create(kind: str, part: str | Mapping[str, Any], **options: Any) -> Any:
    """Return a registered part, such as a sampler, by name.

    Args:
        kind: one of `KINDS`; for backbones see `tread_zoo.create_backbone`.
        part: its name, or a mapping with `name` and options.
        options: further options.

    Raises:
        ValueError: a name or option is unknown (the nearest is suggested), or a value is wrong.
    """
    name, given = split(kind, part)
    return get_entry(kind, name).build({**given, **options})


def available(kind: str, pattern: str = "*") -> list[str]:
    """Return the names of a kind that match a shell pattern such as `mamba*`, sorted."""
    _load(kind)
    return sorted(n for k, n in _entries if k == kind and fnmatch.fnmatchcase(n, pattern))


def get_entry(kind: str, name: str, field: str | None = None) -> Entry:
    """Return the entry registered as `name`; a backbone's bare name means its size `tiny`.

    Raises:
        ValueError: the name is unknown. The error names `field`, by default the kind.
    """
    _load(kind)
    for candidate in (name, f"{name}_tiny") if kind == "backbone" else (name,):
        if (kind, candidate) in _entries:
            return _entries[kind, candidate]
    known = available(kind)
    known += [n.removesuffix("_tiny") for n in known if kind == "backbone" and n.endswith("_tiny")]
    error = unknown_name(field or kind, name, known)
    if _broken:
        why = "; ".join(f"{plugin}: {reason}" for plugin, reason in _broken.items())
        error = ValueError(f"{error} Plug-ins that could not be loaded: {why}")
    raise error


def split(kind: str, part: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a part of `kind`, given as a name or a mapping with
    `name`."""
    if isinstance(part, str):
        return part, {}
    if not isinstance(part, Mapping) or not isinstance(part.get("name"), str):
        raise ValueError(
            f"{kind}={part!r} must be a name, or a mapping with name, as in {{name: …}}."
        )
    return part["name"], {k: v for k, v in part.items() if k != "name"}


def complete(kind: str, part: str | Mapping[str, Any], field: str | None = None) -> dict[str, Any]:
    """Return `{"name": …, option: value, …}` with every option of the part, checked. Errors name
    `field`, by default the kind."""
    name, options = split(field or kind, part)
    entry = get_entry(kind, name, field)
    return {"name": entry.name, **entry.complete(options, field)}


def describe_part(kind: str, part: Any) -> dict[str, Any]:
    """Return `{"name": …, option: value, …}` for a part that is an instance or a function. An
    unregistered part has the name of its class or function."""
    bound = isinstance(part, functools.partial)
    made_by = part.func if bound else part if inspect.isroutine(part) else type(part)
    for name in available(kind):
        entry = get_entry(kind, name)
        if entry.target is made_by:
            given = {k: getattr(part, k) for k in entry.parameters() if hasattr(part, k)}
            return {"name": name, **(part.keywords if bound else given)}
    return {"name": made_by.__name__}


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that register parts. Raises ValueError if one cannot be imported."""
    is_list = isinstance(modules, list | tuple)
    if not is_list or not all(isinstance(module, str) for module in modules):
        raise ValueError(f"plugins={modules!r} must be a list of modules, as in [my_module].")
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"plugins=[{module}] cannot be imported: {error}. Call from its folder, put "
                "that on PYTHONPATH, or install it."
            ) from error


def plugins_of(parts: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return the modules, other than ours, that registered `parts` or other parts used by them.
    `parts` are pairs (kind, {"name": …, options}). A class lists the parts it uses, as pairs
    (kind, name), if it has the method `used_parts(options)`."""
    modules = set()
    for kind, part in parts:
        target = get_entry(kind, part["name"]).target
        others = target.used_parts(part) if hasattr(target, "used_parts") else []
        modules.add(target.__module__)
        modules |= {get_entry(*other).target.__module__ for other in others}
    return sorted(m for m in modules if m.partition(".")[0] not in ("tread_zoo", "backbones"))


def check_plugins(modules: Iterable[str], where: str) -> None:
    """Raise a `ValueError` unless the plug-ins `modules` are already imported. The error names
    `where`, the file that needs them."""
    _load("backbone")
    missing = [module for module in modules if module not in sys.modules]
    if missing:
        raise ValueError(
            f"{where} was made with the plug-in {', '.join(missing)}, which is not loaded: add "
            f"plugins=[{','.join(missing)}], or install the package that has it."
        )


# Backbones, by timm's names ----------------------------------------------------------------------


def register_backbone(
    name: str, *, learning_rate: float | None = None, **preset: Any
) -> Callable[[Target], Target]:
    """Return a class decorator that registers a variant of a backbone.

    Args:
        name: architecture_size_patch, as in `dit_b_2`.
        learning_rate: AdamW's rate for it, used by `optimizer.learning_rate=auto`.
        preset: constructor keywords of this variant.
    """
    return register("backbone", name, preset=preset, learning_rate=learning_rate)


def list_backbones(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Return the names of backbones that match a shell pattern such as `mamba*`, sorted. With
    `pretrained`, list trained networks that come with the package, for `load_pretrained`."""
    if pretrained:
        return sorted(folder.name for folder in PRETRAINED.glob(pattern))
    return available("backbone", pattern)


def _place(entry: Entry) -> str:
    return f"{entry.target.__module__}.{entry.target.__qualname__}"


def _load(kind: str) -> None:
    """Import our parts of a kind and the installed plug-ins, once. A plug-in that fails to import
    is left out with a warning."""
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)
    if kind not in _loaded:
        home = importlib.import_module(_HOMES[kind])
        if kind == "backbone" and getattr(home, "__distribution__", None) != "tread-zoo":
            where = getattr(home, "__file__", None) or list(getattr(home, "__path__", []))
            raise ImportError(
                f"the package `backbones` found at {where} is not tread-zoo's: another package or "
                "folder of that name comes first on the import path."
            )
        _loaded.add(kind)
    if PLUGIN_GROUP in _loaded:
        return
    _loaded.add(PLUGIN_GROUP)  # first, because plug-ins may call `available`
    for plugin in entry_points(group=PLUGIN_GROUP):
        try:
            plugin.load()
        except Exception as error:
            _broken[plugin.value] = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the plug-in {plugin.value} is left out: {_broken[plugin.value]}", stacklevel=3
            )
