"""From pictures with captions to pictures of prompts, by the commands and by the pipeline."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.text_encoders import save_t5
from tests.scripts.test_command_line import call
from tests.small_run import SMALL
from tests.training.test_contexts import CAPTIONS, pictures_of
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
        "backbone.depth=5", "training.num_steps=50", "training.batch_size=32",
        "training.ema_decay=0.9", "optimizer.learning_rate=0.004", "run_dir=run", cwd=folder,
    )  # fmt: skip
    assert "contexts of 3 embeddings of width 16, captions by" in said
    return folder


PROMPTS = [" ".join(caption) for caption in CAPTIONS]


def test_each_image_is_drawn_for_its_prompt(trained):
    """That a network learns what captions say: training/test_contexts.py."""
    given = ["checkpoint=run", "sampler.num_steps=4", "device=cpu", "guidance.scale=1.5"]

    def drawn(name, prompts, *more):
        said = call("sample.py", *given, f"prompt={prompts}", f"out={name}", *more, cwd=trained)
        assert "cfg" in said
        return np.load(trained / name / "samples.npz")["arr_0"].astype(int)

    nine = drawn("nine", PROMPTS, "num_images=9")
    own, other = (drawn(f"alone_{i}", PROMPTS[i], "num_images=1", "first_index=3") for i in (3, 4))
    assert np.abs(own[0] - nine[3]).max() <= 1
    assert np.abs(other[0] - nine[3]).max() > 1
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
    given = {"num_inference_steps": 3, "guidance_scale": 1.5, "output_type": "pt"}

    def draw(pipe):
        return pipe(prompt=PROMPTS, generator=torch.Generator().manual_seed(0), **given).images

    images = draw(pipe)
    assert len(images) == 9
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
