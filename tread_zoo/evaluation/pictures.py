"""Pictures for people: grids of samples and the curve of a loss."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

_SMALLEST_SIDE = 32  # tiny images are enlarged to about this on a grid


def save_png(image: Tensor, path: Path) -> None:
    """Write one image, uint8 [C, H, W] with 1 or 3 channels."""
    _to_picture(image.permute(1, 2, 0).numpy()).save(path)


def save_grid(images: Tensor, path: Path, columns: int = 10) -> None:
    """Write images uint8 [N, C, H, W] as one PNG, row by row, each enlarged to be seen."""
    count, channels, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    enlarge = max(1, _SMALLEST_SIDE // max(height, width))
    margin = 2
    cell = (height * enlarge + margin, width * enlarge + margin)
    canvas = np.full((rows * cell[0] + margin, columns * cell[1] + margin, channels), 128, np.uint8)
    pixels = images.permute(0, 2, 3, 1).numpy().repeat(enlarge, axis=1).repeat(enlarge, axis=2)
    for index, picture in enumerate(pixels):
        top = margin + index // columns * cell[0]
        left = margin + index % columns * cell[1]
        canvas[top : top + cell[0] - margin, left : left + cell[1] - margin] = picture
    _to_picture(canvas).save(path)


def plot_losses(
    rows: Sequence[dict[str, float]], path: Path, names: Sequence[str] = ("loss", "held_out_loss")
) -> None:
    """Plot the named values of metric rows against `step` as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss")
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            label = f"{name} (dense, averaged weights)" if name == "held_out_loss" else name
            axes.plot(*zip(*points, strict=True), label=label, marker="." if "held" in name else "")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)


def plot_similarity(
    matrix: Sequence[Sequence[float]],
    changes: Sequence[float],
    route: tuple[int, int],
    path: Path,
    title: str,
) -> None:
    """Draw the likeness of token states as a heat map and the change of each block as bars.

    Args:
        matrix: [S, S], of the states before block 0 … S - 2 and after the last.
        changes: [S - 1], by block, at least 3.
        route: [start, end), marked in both.
        path: of the PNG.
        title: above the heat map.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    start, end = route
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(np.asarray(matrix), cmap="viridis", vmax=1.0)
    side = end - start + 1
    left.add_patch(
        Rectangle((start - 0.5, start - 0.5), side, side, fill=False, color="tab:red", lw=2)
    )
    left.set(xlabel="state before block", ylabel="state before block", title=title)
    figure.colorbar(image, ax=left, shrink=0.8)
    inside = [start <= block < end for block in range(len(changes))]
    colours = ["tab:red" if routed else "tab:gray" for routed in inside]
    right.bar(range(len(changes)), changes, color=colours)
    middle = changes[1:-1]
    right.axhline(
        sum(middle) / len(middle), color="black", lw=1, label="mean, first and last apart"
    )
    right.set(xlabel="block", ylabel="change", title=f"proposed route [{start}, {end}) in red")
    right.legend()
    figure.savefig(path, dpi=120)


def _to_picture(pixels: np.ndarray):  # type: ignore[no-untyped-def]
    """Return a PIL image of uint8 [H, W, C]; only the first three of other channel counts."""
    from PIL import Image

    if pixels.shape[-1] == 1:
        return Image.fromarray(pixels[..., 0])
    return Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
