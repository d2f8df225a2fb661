"""Import, then sample, as a user does it."""

import numpy as np
import pytest
import torch

from tests.published.tensors import theirs
from tests.scripts.test_command_line import call

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_import_sample_and_export(tmp_path):
    torch.save({"ema": theirs("sit", channels=3)}, tmp_path / "theirs.pt")
    said = call("import_checkpoint.py", "format=sit", "in=theirs.pt", "out=runs/sit", cwd=tmp_path)
    assert "sit_tiny" in said
    assert "hidden_size=64" in said
    assert "num_heads=1" in said
    call(
        "sample.py", "checkpoint=runs/sit", "num_images=3", "sampler.num_steps=2", "device=cpu",
        "out=made", cwd=tmp_path,
    )  # fmt: skip
    names = {path.name for path in (tmp_path / "made").iterdir()} - {"sampling.json"}
    assert names == {"samples.npz", *(f"{i:06d}.png" for i in range(3))}
    assert (tmp_path / "made_grid.png").exists()
    command = ["export=true", "format=sit", "in=runs/sit", "out=back.pt"]
    call("import_checkpoint.py", *command, cwd=tmp_path)
    back = torch.load(tmp_path / "back.pt")
    assert all(torch.equal(back[key], value) for key, value in theirs("sit", channels=3).items())


@pytest.mark.slow
def test_a_network_of_ddpm_is_sampled_with_guidance(tmp_path):
    torch.save(theirs("dit"), tmp_path / "theirs.pt")
    call("import_checkpoint.py", "format=dit", "in=theirs.pt", "out=runs/dit", cwd=tmp_path)
    call(
        "sample.py", "checkpoint=runs/dit", "label=5", "guidance=cfg", "guidance.scale=4",
        "num_images=2", "sampler.num_steps=3", "device=cpu", "out=made", cwd=tmp_path,
    )  # fmt: skip
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {"latents.npz", "sampling.json"}
    latents = np.load(tmp_path / "made/latents.npz")
    assert latents["arr_0"].shape == (2, 4, 8, 8)
    assert np.isfinite(latents["arr_0"]).all()
    assert latents["arr_1"].tolist() == [5, 5]
