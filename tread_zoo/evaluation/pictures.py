"""Pictures for people: grids of samples, the curve of a loss, the likeness of token states."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

_SMALLEST_SIDE = 32  # tiny images are enlarged to about this on a grid


def save_png(image: Tensor, path: Path) -> None:
    """Write one image, uint8 [C, H, W] with 1 or 3 channels."""
    from torchvision.transforms.functional import to_pil_image

    to_pil_image(image).save(path)


def save_grid(images: Tensor, path: Path, columns: int = 10) -> None:
    """Write images uint8 [N, C, H, W] as one PNG, row by row, each enlarged to be seen."""
    from torchvision.utils import make_grid

    enlarge = max(1, _SMALLEST_SIDE // max(images.shape[2:]))
    enlarged = images.repeat_interleave(enlarge, 2).repeat_interleave(enlarge, 3)
    save_png(make_grid(enlarged, nrow=columns, pad_value=128), path)


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
