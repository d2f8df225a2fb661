"""The page of tread-zoo demo: how a network samples images, and which tokens routing keeps."""

import os
import queue
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from PIL import Image

from tread_zoo.data import Codec
from tread_zoo.data.text import TextEncoder
from tread_zoo.diffusion import default_labels, generate
from tread_zoo.diffusion.conditions import conditions_of, contexts_of
from tread_zoo.evaluation.contribution import own_contributions
from tread_zoo.evaluation.pictures import draw_grid, draw_loss_rises, to_picture
from tread_zoo.registry import available, create
from tread_zoo.routing import ORDERS, Stack, num_kept_tokens, scan_order
from tread_zoo.runs.restore import Restored
from tread_zoo.seeding import make_image_generator

EACH = "each in turn"
HOW_ROUTES = """
Dark tokens run through the routed blocks, the others bypass them. A scan walks along the line, and
jumps where it is red. This network: """


def build_page(run: Restored, codec: Codec, text_encoder: str | None = None) -> Any:
    """Return the page of a network as gradio's Blocks; `codec` turns its samples into images.
    `text_encoder` is a folder or a name on the hub; None: the run's. Raises ValueError if gradio is
    missing or if latents cannot be decoded."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # no request leaves this machine
    try:
        import gradio as gr
    except ImportError:
        raise ValueError("the demo needs gradio: pip install 'tread-zoo[demo]'.") from None
    if not codec.has_pixels:
        raise ValueError("the network makes latents: set vae=… to their autoencoder.")
    codec.prepare(next(run.backbone.parameters()).device)
    usual, condition, encoder = run.sampling({}, {}).num_steps, gr.State(EACH), None
    with gr.Blocks(title="tread-zoo", analytics_enabled=False) as page:
        gr.Markdown(f"# tread-zoo: {run.backbone.name}")
        with gr.Tab("Pictures"), gr.Row():
            with gr.Column():
                if "text_encoder" in run.checkpoint.data:
                    encoder = run.text_encoder(text_encoder)
                    condition = gr.Textbox(label="prompt", placeholder="none: of the data")
                elif run.backbone.num_classes:
                    condition = gr.Dropdown([EACH, *class_names(run)], label="class", value=EACH)
                rest = [
                    gr.Slider(1, 40, 10, step=1, label="pictures"),
                    gr.Slider(1, 8, 1, label="guidance (1: none)"),
                    gr.Slider(1, max(100, usual), usual, step=1, label="steps"),
                    gr.Number(0, precision=0, label="seed"),
                ]
                button = gr.Button("draw", variant="primary")
            shown = gr.Image(label="out of the noise", scale=2, format="png")
        with gr.Tab("Routing"), gr.Row():
            with gr.Column():
                gr.Markdown(HOW_ROUTES + run.routing.describe(Stack.of(run.backbone)))
                every = available("selector")
                names = [n for n in every if not hasattr(create("selector", n), "score")]
                choices = [
                    gr.Dropdown(names, label="selector", value="random"),
                    gr.Slider(0, 0.9, 0.5, step=0.05, label="selection rate: what bypasses"),
                    gr.Dropdown([*ORDERS], label="order of a scan", value="raster"),
                    gr.Slider(4, 32, 16, step=1, label="side of the grid"),
                    gr.Number(0, precision=0, label="image"),
                ]
                measure = gr.Button("measure what each block is worth")
            with gr.Column(scale=2):
                kept = gr.Image(label="tokens", format="png")
                worth = gr.Image(label="without a block, on images of its own", format="png")
        drawing = partial(draw, run, codec, encoder)
        events = [button.click, page.load]
        gr.on(events, drawing, [condition, *rest], shown, api_name="draw")
        events = [*(choice.change for choice in choices), page.load]
        gr.on(events, draw_route, choices, kept, api_name="route")
        measure.click(partial(draw_worth, run), [], worth, api_name="blocks")
    return page


def class_names(run: Restored) -> list[str]:
    return list(run.class_names) or [str(label) for label in range(run.backbone.num_classes)]


def draw(
    run: Restored, codec: Codec, encoder: TextEncoder | None,
    condition: str, count: int, scale: float, steps: int, seed: int,
) -> Iterator[Image.Image]:  # fmt: skip
    """Yield a grid of `count` images again and again while a thread samples them in `steps` steps.
    `condition` is a class's name, a prompt for the text `encoder`, or `EACH`, all classes in turn.
    Without a prompt, a network with contexts gets those of its data. A `scale` of 1 means no
    guidance. `codec` decodes the samples. For errors see `Restored.sampling`."""
    network, indices, names = run.backbone, range(count), class_names(run)
    guidance = {"name": "none"} if scale == 1 else {"name": "cfg", "scale": float(scale)}
    labels, titles = default_labels(indices, network.num_classes), list[str]()
    if labels is not None:
        labels = labels if condition == EACH else torch.full_like(labels, names.index(condition))
        titles = [names[label] for label in labels.tolist()]
    elif encoder is not None and condition not in ("", EACH):
        labels = contexts_of([condition], encoder, network).of(indices)
    elif network.context_size:
        labels = conditions_of(network, run.data({})).of(indices)
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()  # tensors, perhaps an error, None

    def sample() -> None:
        try:
            sampling = run.sampling({"num_steps": steps}, guidance)
            x = generate(
                network, run.objective, sampling, indices=indices, labels=labels, seed=seed,
                batch_size=count, precision=run.precision, watch=seen.put,
            )  # fmt: skip
            seen.put(x)
        except BaseException as error:
            seen.put(error)
        seen.put(None)

    threading.Thread(target=sample, daemon=True).start()
    for x in iter(seen.get, None):
        if isinstance(x, BaseException):
            raise x
        yield draw_grid(codec.to_pixels(x, device=next(network.parameters()).device), titles)


def draw_route(selector: str, rate: float, order: str, side: int, image: int) -> Image.Image:
    """Return a picture of the tokens that a selector keeps, and of the path of a scan over them.

    Args:
        selector: name of the selector.
        rate: fraction of the tokens that are dropped.
        order: the scan's order, one of `ORDERS`.
        side: height and width of the grid of tokens.
        image: seed of the choice of tokens.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    grid, images = (side, side), make_image_generator("route", images=[image])
    ids = create("selector", selector)(1, grid, num_kept_tokens(side * side, rate), images)[0]
    present = torch.zeros(side * side, dtype=torch.bool).scatter(0, ids, True)
    curve = scan_order(order, grid)
    places = present[curve].nonzero().flatten()
    points = [divmod(token, side)[::-1] for token in curve[places].tolist()]  # x, y
    colours = ["white" if step == 1 else "tab:red" for step in places.diff().tolist()]
    axes = (figure := Figure(figsize=(6, 6), layout="constrained")).subplots()
    axes.imshow(present.view(grid), cmap="Blues", vmin=-0.2, vmax=1.2)
    axes.add_collection(LineCollection([*pairwise(points)], colors=colours))
    axes.set(xticks=[], yticks=[], title=f"{len(ids)} of {side * side} tokens")
    return to_picture(figure)


def draw_worth(run: Restored) -> Image.Image:
    """Return a picture of how much the loss on sampled images rises without each block."""
    sampling = run.sampling({}, {})
    record = own_contributions(run.backbone, run.objective, sampling, precision=run.precision)
    return draw_loss_rises(record)
