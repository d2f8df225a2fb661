"""The page of `tread-zoo demo`, asked by gradio's own client, and the pictures on it."""

import numpy as np
import pytest
import torch
from PIL import Image

from tread_zoo.demo import EACH, build_page, draw, draw_route, draw_worth
from tread_zoo.diffusion import generate
from tread_zoo.evaluation.pictures import draw_grid
from tread_zoo.registry import available
from tread_zoo.routing import ORDERS
from tread_zoo.runs.restore import restore


@pytest.fixture(scope="module")
def run():
    return restore("mamba", weights="ema", device="cpu", precision="fp32")


@pytest.mark.slow
def test_a_picture_comes_out_of_the_noise_and_ends_as_it_is_sampled(run):
    codec = run.codec(None)
    *coming, last = draw(run, codec, None, "3", 4, 2.0, 5, 7)
    assert len(coming) == 5
    x = generate(
        run.backbone, run.objective, run.sampling({"num_steps": 5}, {"name": "cfg", "scale": 2.0}),
        indices=range(4), labels=torch.full((4,), 3), seed=7, batch_size=4,
    )  # fmt: skip
    expected = draw_grid(codec.to_pixels(x, device=x.device))
    assert np.array_equal(np.asarray(last), np.asarray(expected))
    *_, each = draw(run, codec, None, EACH, 10, 1, 2, 0)
    assert each.height > last.height, "it names the classes"
    with pytest.raises(ValueError):
        next(draw(run, codec, None, "3", 4, 2.0, 0, 7))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_route_s_picture_has_the_kept_tokens(order):
    for selector in set(available("selector")) - {"norm"}:
        picture = np.asarray(draw_route(selector, 0.75, order, 8, 2)).astype(int)
        dark = (picture[..., 2] - picture[..., 0] > 30) & (picture.sum(-1) < 450)
        assert 0.1 < dark.mean() < 0.25, "a quarter, less lines and margins"


@pytest.mark.slow
def test_the_page_draws_and_sends_nothing_elsewhere(run, monkeypatch):
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'tread-zoo[demo]'")
    from gradio_client import Client

    page = build_page(run, run.codec(None))
    assert page.analytics_enabled is False
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, show_error=True)
    assert address.startswith("http://127.0.0.1:")
    client = Client(address, verbose=False)
    try:
        job = client.submit("3", 4, 2.0, 5, 7, api_name="/draw")
        with Image.open(job.result(timeout=60)) as shown:
            assert np.array_equal(
                np.asarray(shown.convert("L")),
                np.asarray([*draw(run, run.codec(None), None, "3", 4, 2.0, 5, 7)][-1]),
            )
        assert len(job.outputs()) > 1, "it comes out of the noise"
        file = client.predict("rows", 0.5, "hilbert", 8, 0, api_name="/route")
        with Image.open(file) as shown:
            assert shown.size == (600, 600)
        with Image.open(client.predict(api_name="/blocks")) as shown:
            assert np.array_equal(np.asarray(shown.convert("RGB")), np.asarray(draw_worth(run)))
    finally:
        page.close()
