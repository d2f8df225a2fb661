"""`enable_routing`: tokens bypass some blocks of another project's network in training.

    routes = enable_routing(transformer, start=2, end=-2, selection_rate=0.5)

B batch, N image tokens, D width.
"""

import inspect
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tread_zoo.contract.crossing import Crossing, check_crossings
from tread_zoo.process_group import rank_and_number
from tread_zoo.registry import create
from tread_zoo.routing.method import Crossings, Method, Stack, Step
from tread_zoo.routing.others.calls import Call, RoutedPass
from tread_zoo.routing.others.check import Verdict
from tread_zoo.routing.others.families import FAMILIES, REFUSED, Arguments, Family
from tread_zoo.routing.select import Ranked, Select, Skip, bypassed_tokens
from tread_zoo.seeding import make_image_generator

SLOT = "_token_routes"


class Routes:
    """The handle of a routed network, made by `enable_routing`."""

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        family: Family,
        lists: Sequence[str],
        *,
        seed: int,
        tokens: str | None,
        grid: tuple[int, int] | None,
    ) -> None:
        self.network, self.method, self.family, self.lists = network, method, family, lists
        self.seed, self.tokens, self.grid = seed, tokens, grid
        self.title = type(network).__name__
        self.edges = [0]
        for name in lists:
            self.edges.append(self.edges[-1] + len(network.get_submodule(name)))  # type: ignore[arg-type]
        self.count, self.passes = 0, 0  # forward passes of the run, and of this step
        self.step: tuple[int, int] | None = None
        self.on, self.warned = True, False
        self.kept: Tensor | None = None
        self.drawn: Crossings = ()
        self.verdicts: dict[str, Verdict] = {}
        self.tested: set[tuple[str, int]] = set()  # classes, and for which number of image tokens
        self.outputs: dict[type, list[str | None]] = {}
        self.single: dict[type, bool] = {}
        self.running: list[RoutedPass | None] = []  # passes, the innermost last; None: not routed
        self.stack: Stack | None = None
        self.hooks = (
            network.register_forward_pre_hook(self._begin, with_kwargs=True),
            network.register_forward_hook(self._end, always_call=True),
        )
        network.__dict__[SLOT] = self

    # What users call ------------------------------------------------------------------------------

    def set_step(self, step: int, num_steps: int) -> None:
        """Set the optimizer step, counted from 0, and the run's number of steps. `warm_start`,
        `dense_tail` and rates that change during training depend on both.

        Each forward pass of a step chooses its own tokens; setting a step again repeats its
        choices.
        """
        self.step, self.passes = (step, num_steps), 0

    def keep(self, mask: Tensor | None) -> None:
        """Never drop the tokens that are True in `mask` [B, N], until `keep` is called again; None
        removes the mask."""
        if mask is not None and not hasattr(self.method, "selector"):
            raise ValueError(f"method={self.method.name} chooses no tokens, so it can keep none.")
        self.kept = mask

    @contextmanager
    def dense(self) -> Iterator[nn.Module]:
        """Run all blocks on all tokens within the context; networks in eval() always do so."""
        was, self.on = self.on, False
        try:
            yield self.network
        finally:
            self.on = was

    def bypassed(self) -> Tensor:
        """Return bool [B, N], True for tokens that a `Select` dropped in the last routed pass, for
        losses that ignore them. Other crossings are not counted.

        Raises:
            RuntimeError: no pass was routed yet.
            ValueError: the method or the selector chooses tokens by their states, in the pass.
        """
        if self.stack is None:
            raise RuntimeError("no pass was routed yet.")
        if not self.method.drawn or any(isinstance(each, Ranked) for each in self.drawn):
            raise ValueError(
                f"method={self.method.name} chooses tokens by their states, so it is unknown which "
                "bypassed: use a choice that is made before the pass, such as selector=random."
            )
        selects = [each for each in self.drawn if hasattr(each, "ids")]
        return bypassed_tokens(selects, self.batch, self.stack.num_tokens, self.device)

    def describe(self) -> str:
        """Return lines of text: the lists of blocks, the method, and the result of testing whether
        each class of blocks may be routed."""
        blocks = zip(self.lists, self.edges[1:], self.edges, strict=False)
        words = [f"{name} {start} … {end - 1}" for name, end, start in blocks]
        lines = [f"{self.title}: {', '.join(words)}"]
        if self.stack is None:
            lines.append(f"{self.method.name}; tokens are counted in the first routed pass")
        else:
            lines.append(self.method.describe(self.stack))
        for kind, verdict in self.verdicts.items():
            proof = "unverified, it changes no token yet"
            if verdict.error is not None:
                proof = f"reordered tokens change its update by {verdict.error:.1e}"
            lines.append(f"{kind}: {proof}")
        return "\n".join(lines)

    def disable(self) -> None:
        """Restore the network to its state before `enable_routing`."""
        for hook in self.hooks:
            hook.remove()
        self.network.__dict__.pop(SLOT, None)

    def state_dict(self) -> dict[str, int]:
        """Return the state that a resumed run needs to make the same choices as an unbroken one."""
        return {"count": self.count, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.count, self.seed = state["count"], state["seed"]

    # A pass of the network ------------------------------------------------------------------------

    def _begin(self, network: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.append(None)  # `_end` also runs if this raises
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a routed network cannot be compiled as a whole, for each pass draws its tokens: "
                "compile its blocks, as with compile_repeated_blocks()."
            )
        if not self.on or not self._trains(network):
            return
        names = list(inspect.signature(type(network).forward).parameters)[1:]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if self.family.unfit is not None and (why := self.family.unfit(network, arguments)):
            raise ValueError(f"{self.title} cannot be routed: {why}.")
        routed = RoutedPass(self, arguments, self._draws())
        self.running[-1] = routed
        watched = [(name, None) for name in self.family.watch]
        for path, first in [*zip(self.lists, self.edges, strict=False), *watched]:
            parent, _, name = path.rpartition(".")
            owner = network.get_submodule(parent)
            blocks: Any = owner._modules[name]
            routed.replaced.append((owner.__dict__, name, owner.__dict__.get(name)))
            owner.__dict__[name] = [
                Call(routed, None if first is None else first + i, block)
                for i, block in enumerate(blocks)
            ]

    def _end(self, network: nn.Module, args: Any, output: Any) -> None:
        routed = self.running.pop()
        if routed is None:
            return
        for attributes, name, value in routed.replaced:
            if value is None:
                del attributes[name]
            else:
                attributes[name] = value  # from the enclosing pass
        routed.close()
        if output is not None:  # it is None when forward raised
            routed.check_calls()

    def _trains(self, network: nn.Module) -> bool:
        if not torch.is_grad_enabled():
            return False
        if network.training:
            return True
        if not self.warned and any(each.requires_grad for each in network.parameters()):
            self.warned = True
            warnings.warn(
                f"{self.title} runs with gradients in eval(), where nothing is routed: call "
                "train() to route it.",
                stacklevel=3,
            )
        return False

    def _draws(self) -> tuple[Step, int]:
        """Return the `Step` of a new forward pass, and the number of the pass within that step."""
        if self.step is None:
            if _is_scheduled(self.method):
                raise RuntimeError(
                    f"method={self.method.name} changes over training: call routes.set_step(step, "
                    "num_steps) before each step."
                )
            self.count += 1
            return Step(self.count - 1, self.count, self.seed), 0
        self.passes += 1
        return Step(*self.step, self.seed), self.passes - 1

    # What a pass needs ----------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all lists."""
        return self.edges[-1]

    def list_of(self, index: int) -> int:
        """Return which of `lists` has the block `index`, as a number from 0."""
        return sum(edge <= index for edge in self.edges[1:])

    def kind(self, index: int, block: nn.Module) -> str:
        """Return a block's class and list as text, the key of `verdicts`. Blocks of one class may
        differ between lists."""
        title = type(getattr(block, "_orig_mod", block)).__name__
        return f"{title} of {self.lists[self.list_of(index)]}"

    def named(self, block: nn.Module, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
        """Return {name: argument} of a call of `block` with `args` and `kwargs`."""
        inner: Any = type(getattr(block, "_orig_mod", block))
        names = list(inspect.signature(inner.forward).parameters)[1 : len(args) + 1]
        return {**dict(zip(names, args, strict=True)), **kwargs}

    def draw(
        self, draws: tuple[Step, int], x: Tensor, num_tokens: int, arguments: Arguments
    ) -> list[Crossing]:
        """Return the crossings (routed ranges of blocks) of one forward pass, in order.

        Args:
            draws: the step, and the number of the pass within it.
            x: the tokens [B, N + T, D] of the first block: N of the image and T others.
            num_tokens: N.
            arguments: the arguments of the network's forward, by name.
        """
        step, number = draws
        batch, device = len(x), x.device
        grid = self.grid or _find_grid(arguments, num_tokens) or (1, num_tokens)
        if grid[0] * grid[1] != num_tokens:
            raise ValueError(
                f"grid={grid} does not have the {num_tokens} image tokens of this pass."
            )
        first = batch * rank_and_number()[0]
        numbers = [0] * batch if self.family.shared else range(first, first + batch)
        images = make_image_generator(
            "routes", step.seed, step.index, number, images=numbers, device=device
        )
        stack = self.stack = self._stack(grid, x.shape[2])
        if self.kept is not None:
            stack = replace(stack, keep=self._keep(batch, num_tokens, device))
        with torch.no_grad():
            self.drawn = self.method.draw(stack, images, step)
        self.batch, self.device = batch, device
        crossings = check_crossings(self.drawn, self.num_blocks)
        for crossing in crossings:
            self._check_crossing(crossing)
        return crossings

    def _keep(self, batch: int, num_tokens: int, device: torch.device) -> Tensor:
        assert self.kept is not None
        if self.kept.shape != (batch, num_tokens) or self.kept.dtype != torch.bool:
            raise ValueError(
                f"keep is {self.kept.dtype} {list(self.kept.shape)}; the blocks see a batch of "
                f"{batch} with {num_tokens} image tokens: give bool [{batch}, {num_tokens}]."
            )
        kept = self.kept.to(device)
        return kept.any(dim=0, keepdim=True).expand(batch, -1) if self.family.shared else kept

    def _stack(self, grid: tuple[int, int], width: int) -> Stack:
        return Stack(self.num_blocks, grid, (width,), {}, (2, -2))

    def _check_crossing(self, crossing: Crossing) -> None:
        """Raise `ValueError` if this network cannot run a `Crossing`."""
        where = f"{type(crossing).__name__} [{crossing.start}, {crossing.end})"
        starts = range(crossing.start, crossing.end)
        if any(each is not crossing and each.start in starts for each in self.drawn):
            raise ValueError(f"{where} overlaps another: only disjoint routes suit {self.title}.")
        inner = [edge for edge in self.edges[1:-1] if crossing.start < edge < crossing.end]
        if inner and not self.family.crosses:
            raise ValueError(
                f"{where}: a route of {self.title} must not run across block {inner[0]}, where "
                "another list begins."
            )
        if self.family.shared and not isinstance(crossing, Skip | Select):
            raise ValueError(
                f"{where} chooses tokens by the state of each image, and {self.title} takes one "
                "choice for a whole batch: use a method that draws, as tread or random_ltd."
            )

    def extra(self, arguments: Arguments, x: Tensor) -> int:
        """Return T, the number of non-image tokens among the tokens x [B, N + T, D] of the first
        block. `arguments` are those of the network's forward, by name."""
        if self.family.watch:
            raise RuntimeError(f"{self.title} has no {self.family.watch[0]}, which shows N.")
        return 0 if self.family.extra is None else self.family.extra(arguments, x)


def enable_routing(
    network: nn.Module,
    method: str | Mapping[str, Any] = "tread",
    *,
    seed: int = 0,
    extra: int | Callable[[Arguments, Tensor], int] | None = None,
    blocks: Sequence[str] | None = None,
    tokens: str | None = None,
    grid: tuple[int, int] | None = None,
    **options: Any,
) -> Routes:
    """Return the handle of a network whose tokens bypass some of its blocks in training.

    Only the network's lists of blocks are changed, and only while it runs in train() mode with
    gradients. Each class of blocks is tested first, and refused if it cannot be routed.

    Args:
        network: a transformer of diffusers, or any network whose blocks are called from lists. It
            may be wrapped by DistributedDataParallel, `torch.compile` or peft.
        method: registered routing method that owns no weights; `options` are its fields.
        seed: seed of the random choices.
        extra: T, the number of other tokens that precede the N image tokens in the sequence of the
            first block, or a function that returns it from the network's arguments, by name, and
            the sequence [B, N + T, D]. Needed for classes not in
            docs/comparison/diffusers_classes.md.
        blocks: paths of the lists of blocks, in order of use.
        tokens: name of the block's argument that has the tokens; by default the first.
        grid: (h, w) of the image tokens in raster order, for selectors that use it.

    Raises:
        ValueError: the method or an option is wrong, or the network cannot be routed.
    """
    network = _unwrap(network)
    _check_network(network)
    part = {"name": method} if isinstance(method, str) else dict(method)
    chosen = create("routing", {**part, **options})
    if type(chosen).build is not Method.build:
        raise ValueError(
            f"method={chosen.name} owns weights, which only this project's backbones hold: choose "
            "tread, random_ltd, layer_drop, token_merging or microdit."
        )
    family = _family(network, extra)
    lists = _lists(network, blocks or family.lists)
    routes = Routes(network, chosen, family, lists, seed=seed, tokens=tokens, grid=grid)
    try:
        chosen.check(routes._stack((64, 64), 1))
    except ValueError:
        routes.disable()
        raise
    return routes


def _check_network(network: nn.Module) -> None:
    title = type(network).__name__
    if SLOT in network.__dict__:
        raise ValueError(f"{title} is routed already: call disable() of its handle first.")
    if (name := _class(network, REFUSED)) is not None:
        raise ValueError(f"{title} cannot be routed: {REFUSED[name]}.")
    if getattr(network, "_parallel_config", None) is not None:
        raise ValueError(
            f"{title} splits its tokens or weights over devices by a context or tensor parallel "
            "plan, with which it cannot be routed: use DDP or FSDP."
        )


def _class(network: nn.Module, names: Container[str]) -> str | None:
    """Return the name of the network's class that is in `names`: its own or, as for networks that
    FSDP shards, that of a base class; or None."""
    return next((c.__name__ for c in type(network).__mro__ if c.__name__ in names), None)


def _family(network: nn.Module, extra: Any) -> Family:
    name = _class(network, FAMILIES)
    known = None if name is None else FAMILIES[name]
    if extra is None and known is None:
        raise ValueError(
            f"{type(network).__name__} is not a known class: say how many tokens of its sequence "
            "are not of the image, enable_routing(extra=0) if none."
        )
    family = known or Family()
    if extra is None:
        return family
    count = extra if callable(extra) else lambda arguments, x: extra
    return replace(family, extra=count)


def _lists(network: nn.Module, paths: Sequence[str]) -> list[str]:
    modules = dict(network.named_modules())
    found = [each for each in paths if isinstance(modules.get(each), nn.ModuleList | nn.Sequential)]
    if not found:
        raise ValueError(
            f"{type(network).__name__} has no list of blocks named {', '.join(paths)}: name its "
            "own with enable_routing(blocks=…)."
        )
    return found


def _unwrap(network: nn.Module) -> nn.Module:
    while True:  # DistributedDataParallel, torch.compile, peft
        inner = getattr(network, "module", None) or getattr(network, "_orig_mod", None)
        base: Any = getattr(network, "get_base_model", None)
        inner = base() if inner is None and base else inner
        if not isinstance(inner, nn.Module):
            return network
        network = inner


def _is_scheduled(method: Method) -> bool:
    changes = any(isinstance(rate, list | tuple) for rate in method.rates())
    return changes or method.warm_start > 0 or method.dense_tail > 0


def _find_grid(arguments: Arguments, num_tokens: int) -> tuple[int, int] | None:
    """Return the grid (h, w) of the `num_tokens` square patches of the image [B, C, H, W] in the
    argument `hidden_states`, or None if there is no such image or grid."""
    x = arguments.get("hidden_states")
    if not isinstance(x, Tensor) or x.ndim != 4:
        return None
    height, width = x.shape[2:]
    patch = round((height * width / num_tokens) ** 0.5)
    if patch and height % patch == 0 == width % patch:
        grid = height // patch, width // patch
        return grid if grid[0] * grid[1] == num_tokens else None
    return None
