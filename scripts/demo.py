"""Show a trained network in a browser: how it samples images, and which tokens routing keeps.

tread-zoo demo                                   # a small network that comes with the package
tread-zoo demo checkpoint=runs/mine port=7861

It needs gradio: pip install 'tread-zoo[demo]'. The page is for this machine alone, at 127.0.0.1.
"""

import logging
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.cli import command
from tread_zoo.config import Weights
from tread_zoo.fields import OPTIONS, RARE, Device, check

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class DemoConfig:
    """Settings of tread-zoo demo.

    Args:
        plugins, checkpoint, weights, device, precision, kernels: see `CheckpointConfig`.
        vae: folder of the autoencoder; null takes the run's.
        text_encoder: folder of the text encoder; null takes the run's.
        port: port of the page, http://127.0.0.1:PORT.
    """

    plugins: tuple[str, ...] = ()
    checkpoint: str = "dit_fashion_mnist"
    weights: Weights = "ema"
    vae: str | None = None
    text_encoder: str | None = None
    device: Device = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    kernels: Annotated[dict[str, str], RARE] = field(default_factory=dict)
    port: PositiveInt = 7860


@command("demo", DemoConfig)
def main(settings: dict[str, Any]) -> None:
    config = check(DemoConfig, settings)  # before torch is imported, which takes seconds
    from tread_zoo.demo import build_page
    from tread_zoo.kernels import set_forms
    from tread_zoo.runs.restore import restore

    logging.getLogger("httpx").setLevel(logging.WARNING)  # gradio asks whether it is up
    set_forms(config.kernels)
    run = restore(
        config.checkpoint, weights=config.weights, device=config.device, precision=config.precision
    )
    page = build_page(run, run.codec(config.vae), config.text_encoder)
    logger.info("%-9s http://127.0.0.1:%d; Ctrl-C ends it", "demo", config.port)
    page.launch(server_name="127.0.0.1", server_port=config.port, show_error=True, quiet=True)


if __name__ == "__main__":
    main()
