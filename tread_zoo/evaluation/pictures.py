"""Pictures to look at: grids of samples, animations of such grids, and plots of losses."""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from tread_zoo.data.files import atomic_file
from tread_zoo.data.split import evenly_spaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

_SMALLEST_SIDE = 64  # tiny images are enlarged to about this on a grid
_COLUMNS, _ROWS, _TITLE_HEIGHT = 10, 10, 18  # most columns and rows of a grid; pixels
_FRAMES, _FRAME_SIDE, _FRAME_MS, _LAST_FRAME_MS = 20, 360, 250, 2500
Frame = TypeVar("Frame")


def save_png(image: Tensor, path: Path) -> None:
    """Write one image, uint8 [C, H, W] with 1 or 3 channels, as the PNG file `path`."""
    from torchvision.transforms.functional import to_pil_image

    with atomic_file(path, alone=False) as stream:
        to_pil_image(image).save(stream, "PNG")


def save_numbered(images: Tensor, numbers: Iterable[int], folder: Path) -> None:
    """Write images uint8 [B, C, H, W] to `folder` under their `numbers`, image 7 as 000007.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in zip(numbers, images, strict=True):
        save_png(image, folder / f"{number:06d}.png")


def save_grid(images: Tensor, path: Path, names: Sequence[str] = ()) -> None:
    """Write the picture of `draw_grid` as a PNG. Its metadata `grid` has the numbers of rows and
    columns, and the height of the titles in pixels."""
    from PIL.PngImagePlugin import PngInfo

    picture, info = draw_grid(images, names), PngInfo()
    info.add_text("grid", picture.info["grid"])
    with atomic_file(path, alone=False) as stream:
        picture.save(stream, "PNG", pnginfo=info)


def draw_grid(images: Tensor, names: Sequence[str] = ()) -> "Image.Image":
    """Return up to ten rows of images uint8 [N, C, H, W] as one picture; tiny images are enlarged.

    `names` has the class or prompt of each image. If at most ten names repeat in a fixed order,
    each column shows one of them, with the name above it.
    """
    from torchvision.transforms.functional import to_pil_image
    from torchvision.utils import make_grid

    count = len(set(names))
    columns = _COLUMNS // count * count if 1 < count <= _COLUMNS else _COLUMNS
    images = images[: columns * _ROWS]
    enlarge = max(1, _SMALLEST_SIDE // max(images.shape[2:]))
    enlarged = images.repeat_interleave(enlarge, 2).repeat_interleave(enlarge, 3)
    grid = make_grid(enlarged, nrow=columns, pad_value=128)[: images.shape[1]]  # undo make_grid RGB
    picture, titled = to_pil_image(grid), 1 < count <= _COLUMNS and len(names) >= columns
    if titled and all(name == names[i % columns] for i, name in enumerate(names[: len(images)])):
        picture = _with_titles(picture, names[:columns])
    rows, top = -(-len(images) // columns), picture.height - grid.shape[1]
    picture.info["grid"] = f"{rows} {min(columns, len(images))} {top}"
    return picture


def _with_titles(picture: "Image.Image", titles: Sequence[str]) -> "Image.Image":
    """Return a grid with a title above each column; long titles are cut."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"  # many alphabets
    font, width = ImageFont.truetype(str(file), 11), (picture.width - 2) // len(titles)
    taller = Image.new(picture.mode, (picture.width, picture.height + _TITLE_HEIGHT), "white")
    taller.paste(picture, (0, _TITLE_HEIGHT))
    draw = ImageDraw.Draw(taller)
    for column, title in enumerate(titles):
        shown = title
        while draw.textlength(shown, font) > width - 4 and len(shown) > 1:
            shown = shown[:-2] + "…"
        middle = 1 + column * width + width // 2
        draw.text((middle, _TITLE_HEIGHT // 2), shown, "black", font, anchor="mm")
    return taller


def save_animation(pictures: "Sequence[Path | Image.Image]", path: Path) -> None:
    """Write at most 20 evenly spaced pictures, all of one size, as a GIF; the last is shown
    longer. A path stands for the picture in that file."""
    from PIL import Image

    frames = []
    for picture in _chosen(pictures):
        frame = (Image.open(picture) if isinstance(picture, Path) else picture).convert("RGB")
        frame.thumbnail((_FRAME_SIDE, _FRAME_SIDE))
        frames.append(frame.quantize(32))
    first, *rest = frames
    times = [*[_FRAME_MS] * len(rest), _LAST_FRAME_MS]
    with atomic_file(path) as stream:
        first.save(stream, "GIF", save_all=True, append_images=rest, duration=times, loop=0)


def save_frames(
    frames: Sequence[Tensor],
    to_pixels: Callable[[Tensor], Tensor],
    path: Path,
    names: Sequence[str] = (),
) -> None:
    """Write a GIF that shows at most 20 of `frames`, evenly spaced, each as a grid of images.
    `to_pixels` maps a frame to uint8 [N, C, H, W]; for `names` see `draw_grid`."""
    images = [to_pixels(frame) for frame in _chosen(frames)]
    save_animation([draw_grid(each, names[: len(each)]) for each in images], path)


def _chosen(frames: Sequence[Frame]) -> list[Frame]:
    """Return at most 20 evenly spaced frames, the last among them."""
    return [frames[-1 - i] for i in evenly_spaced(len(frames), _FRAMES)][::-1]


def plot_losses(
    rows: Sequence[dict[str, float]], path: Path, names: Sequence[str] = ("loss", "held_out_loss")
) -> None:
    """Plot the values `names` of a run against the step, side by side, as a picture at `path`,
    whose suffix sets the format. `rows` are the lines of metrics.jsonl. The title is the name of
    the folder that `path` is in."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    drawn = [name for name in names if any(name in row for row in rows)] or names[:1]
    figure = Figure(figsize=(7 if len(drawn) == 1 else 10, 4), layout="constrained")
    figure.suptitle(path.absolute().parent.name, fontsize=11)
    for axes, name in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        dots = "held" in name or len(points) == 1  # a line with one point is invisible
        axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="." if dots else "")
        title = name.replace("held_out", "held-out").replace("_", " ")
        title += " (dense, averaged weights)" if "held" in name else ""
        axes.set_title(f"{title}: {points[-1][1]:.4g}" if points else title, fontsize=10)
        axes.set(xlabel="optimizer step", ylabel="loss")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        values = [value for _, value in points]
        if values and min(values) > 0 and max(values) > 5 * min(values):
            axes.set_yscale("log")  # alignment can make a loss negative
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def draw_loss_rises(record: Mapping[str, Any]) -> "Image.Image":
    """Return a picture of how much the loss rises without each block, in percent, from a record of
    `tread_zoo.evaluation.contribution`; ranges of blocks are shaded."""
    from matplotlib.figure import Figure

    count, rises = len(record["blocks"]), [100 * rise for rise in record["loss_rises"]]
    axes = (figure := Figure(figsize=(6, 3.5), layout="constrained")).subplots()
    bars = axes.bar(range(count), rises[:count], color="tab:blue")
    texts = [f"{rise:.0f}" if abs(rise) >= 9.5 else f"{rise:.2g}" for rise in rises[:count]]
    axes.bar_label(bars, texts, fontsize=8, padding=2)
    title = f"loss on {record['num_images']} pictures without each block"
    for (start, end, _), rise in zip(record["ranges"], rises[count:], strict=True):
        axes.axvspan(start - 0.5, end - 0.5, color="tab:orange", alpha=0.15)
        title += f"\nwithout all of {start} … {end - 1}, the routed ones: {rise:+.2g} %"
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="block", ylabel="rise, %", xticks=range(count))
    axes.set_yscale("symlog", linthresh=1)
    axes.margins(y=0.1)
    return to_picture(figure)


def to_picture(figure: "Figure") -> "Image.Image":
    """Return a figure of matplotlib as a picture."""
    from PIL import Image

    figure.savefig(stream := io.BytesIO(), dpi=100)
    return Image.open(stream).convert("RGB")
