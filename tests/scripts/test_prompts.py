"""From pictures with captions to pictures of prompts, by the commands and by the pipeline."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.text_encoders import save_t5
from tests.scripts.test_command_line import call
from tests.small_run import SMALL
from tests.training.test_contexts import CAPTIONS, MOVES, pictures_of
from tread_zoo.demo import draw
from tread_zoo.runs.restore import restore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on nine kinds of pictures with captions, each at nine places."""
    folder = tmp_path_factory.mktemp("captions")
    (folder / "drawn").mkdir()
    for number, caption in enumerate(CAPTIONS):
        for move, image in enumerate(pictures_of(*caption)):
            pixels = (255 * image).byte().permute(1, 2, 0).contiguous().numpy()
            file = folder / "drawn" / f"{number}_{move}.png"
            Image.fromarray(pixels).save(file)
            file.with_suffix(".txt").write_text(" ".join(caption))
    save_t5(folder / "t5")
    said = call(
        "encode.py", "data=image_folder", "data.path=drawn", "vae=none", "text_encoder=t5",
        "out=table", "device=cpu", cwd=folder,
    )  # fmt: skip
    assert "81 captions, 0 of them empty; 3 embeddings each" in said
    said = call(
        "train.py", *SMALL, "data=table", "data.path=table", "backbone.hidden_size=48",
        "backbone.depth=5", "training.num_steps=250", "training.batch_size=32",
        "training.log_every=100", "training.ema_decay=0.97", "optimizer.learning_rate=0.004",
        "run_dir=run", cwd=folder,
    )  # fmt: skip
    assert "contexts of 3 embeddings of width 16, captions by" in said
    return folder


def agreement(samples, numbers):
    """Return the fraction of samples [n, 3, 8, 8] in 0 … 1 that are nearest to their caption's."""
    drawn = torch.cat([pictures_of(*caption) for caption in CAPTIONS])
    far = torch.cdist(samples.flatten(1), drawn.flatten(1))
    return float((far.argmin(1) // len(MOVES) == torch.tensor(numbers)).float().mean())


def test_a_prompt_is_drawn(trained):
    prompts = [" ".join(caption) for caption in CAPTIONS]
    given = ["checkpoint=run", "sampler.num_steps=10", "device=cpu"]
    said = call(
        "sample.py", *given, f"prompt={prompts}", "num_images=36", "guidance.scale=1.5",
        "out=nine", cwd=trained,
    )  # fmt: skip
    assert "cfg" in said
    with np.load(trained / "nine" / "samples.npz") as arrays:
        samples = torch.from_numpy(arrays["arr_0"]).permute(0, 3, 1, 2) / 255
    assert agreement(samples, [i % 9 for i in range(36)]) > 0.5, "chance is 0.11"
    said = call("sample.py", *given, "prompt=red cross, a frame", "out=one", cwd=trained)
    assert "has 6 tokens, of which the network takes 3" in said
    record = json.loads((trained / "one" / "sampling.json").read_text())["settings"]
    assert record["prompt"] == "red cross, a frame"
    assert '"cfg"' in json.dumps(record), "prompts are guided"
    save_t5(trained / "other", seed=1)
    other = [*given, "prompt=red cross", "out=two", "text_encoder=other"]
    assert "another encoder" in call("sample.py", *other, cwd=trained, expect=1)


def test_a_pipeline_takes_prompts_and_is_saved_with_its_encoder(trained, tmp_path):
    from tread_zoo.pipeline import TreadZooPipeline

    pipe = TreadZooPipeline.from_checkpoint(str(trained / "run"))
    prompts = [" ".join(caption) for caption in CAPTIONS]
    given = {"num_inference_steps": 10, "guidance_scale": 1.5, "output_type": "pt"}

    def draw(pipe):
        return pipe(prompt=prompts * 4, generator=torch.Generator().manual_seed(0), **given).images

    images = draw(pipe)
    assert agreement(images, [i % 9 for i in range(36)]) > 0.5
    pipe.save_pretrained(tmp_path / "saved")
    assert torch.equal(draw(TreadZooPipeline.from_pretrained(tmp_path / "saved")), images)
    assert len(pipe(prompt="red frame", num_images=3, **given).images) == 3
    plain = TreadZooPipeline.from_checkpoint(str(trained / "run"), text_encoder="none")
    with pytest.raises(ValueError, match="text_encoder"):
        plain(prompt="red frame")


def test_the_demo_draws_a_prompt_or_what_the_data_say(trained, monkeypatch):
    monkeypatch.chdir(trained)
    run = restore("run", weights="ema", device="cpu", precision="fp32")
    encoder, codec = run.text_encoder(), run.codec(None)
    for prompt in ("red cross", ""):
        *_, picture = draw(run, codec, encoder, prompt, 2, 1.5, 3, 0)
        assert picture.width > 100
