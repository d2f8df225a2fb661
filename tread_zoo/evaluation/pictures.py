"""Pictures for people: grids of samples, their animation, the curve of a loss, the likeness of
token states."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tread_zoo.data.files import written_whole
from tread_zoo.data.split import evenly_spaced

_SMALLEST_SIDE = 32  # tiny images are enlarged to about this on a grid
_FRAMES, _FRAME_SIDE, _FRAME_MS, _LAST_FRAME_MS = 20, 360, 250, 2500


def save_png(image: Tensor, path: Path) -> None:
    """Write one image, uint8 [C, H, W] with 1 or 3 channels."""
    from torchvision.transforms.functional import to_pil_image

    to_pil_image(image).save(path)


def save_grid(images: Tensor, path: Path, columns: int = 10) -> None:
    """Write images uint8 [N, C, H, W] as a PNG grid, row by row; tiny images are enlarged."""
    from torchvision.utils import make_grid

    enlarge = max(1, _SMALLEST_SIDE // max(images.shape[2:]))
    enlarged = images.repeat_interleave(enlarge, 2).repeat_interleave(enlarge, 3)
    grid = make_grid(enlarged, nrow=columns, pad_value=128)[: images.shape[1]]  # it makes grey RGB
    save_png(grid, path)


def save_animation(pictures: Sequence[Path], path: Path) -> None:
    """Write at most 20 evenly spaced pictures of one size as a GIF; the last is shown longer."""
    from PIL import Image

    chosen = [pictures[-1 - i] for i in evenly_spaced(len(pictures), _FRAMES)][::-1]
    frames = []
    for picture in chosen:
        frame = Image.open(picture).convert("RGB")
        frame.thumbnail((_FRAME_SIDE, _FRAME_SIDE))
        frames.append(frame.quantize(32))
    first, *rest = frames
    times = [*[_FRAME_MS] * len(rest), _LAST_FRAME_MS]
    with written_whole(path) as stream:
        first.save(stream, "GIF", save_all=True, append_images=rest, duration=times, loop=0)


def plot_losses(
    rows: Sequence[dict[str, float]], path: Path, names: Sequence[str] = ("loss", "held_out_loss")
) -> None:
    """Plot each named value of metric rows against `step`, beside each other where there are
    several, with the folder of `path` as the title; the format follows the suffix."""
    from matplotlib.figure import Figure

    drawn = [name for name in names if any(name in row for row in rows)] or names[:1]
    figure = Figure(figsize=(7 if len(drawn) == 1 else 10, 4), layout="constrained")
    figure.suptitle(path.absolute().parent.name, fontsize=11)
    for axes, name in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        dots = "held" in name or len(points) == 1  # a line of one point is not seen
        axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="." if dots else "")
        title = name.replace("held_out", "held-out").replace("_", " ")
        title += " (dense, averaged weights)" if "held" in name else ""
        axes.set_title(f"{title}: {points[-1][1]:.4g}" if points else title, fontsize=10)
        axes.set(xlabel="optimizer step", ylabel="loss")
        _readable_ticks(axes, [value for _, value in points])
    figure.savefig(path, dpi=120)


def _readable_ticks(axes: Any, values: Sequence[float]) -> None:
    """Label ticks by plain numbers, on a logarithmic axis where values span a factor of five."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if values and min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")  # with an alignment a loss may not be positive
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def plot_similarity(
    matrix: Sequence[Sequence[float]],
    changes: Sequence[float],
    route: tuple[int, int],
    path: Path,
    title: str,
) -> None:
    """Plot the similarity of token states as a heat map, and the change by each block as bars.

    Args:
        matrix: [S, S], of the states before block 0 … S - 2 and after the last.
        changes: [S - 1], by block, at least 3.
        route: [start, end), marked in both.
        path: a PNG file.
        title: of the heat map.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    (start, end), middle = route, changes[1:-1]
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    heat, corner, side = left.imshow(matrix, cmap="viridis", vmax=1.0), start - 0.5, end - start + 1
    left.add_patch(Rectangle((corner, corner), side, side, fill=False, color="tab:red", lw=2))
    left.set(xlabel="state before block", ylabel="state before block", title=title)
    figure.colorbar(heat, ax=left, shrink=0.8)
    colours = ["tab:red" if start <= block < end else "tab:gray" for block in range(len(changes))]
    right.bar(range(len(changes)), changes, color=colours)
    mean = sum(middle) / len(middle)
    right.axhline(mean, color="black", lw=1, label="mean, first and last apart")
    right.set(xlabel="block", ylabel="change", title=f"proposed route [{start}, {end}) in red")
    right.legend()
    figure.savefig(path, dpi=120)
