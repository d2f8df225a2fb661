"""The study of guidance as a user meets it: one command, a report, the same command again."""

import pytest
from hydra import compose, initialize_config_dir

from tests.comparison.test_guidance_study import leave_run
from tests.scripts.test_command_line import call
from tests.small_run import CONFIGS
from tread_zoo.cli import as_keywords, register_configs
from tread_zoo.comparison.guidance_study import Study
from tread_zoo.comparison.guidance_study.asked import read_guidances, read_samplers
from tread_zoo.diffusion import GUIDANCE
from tread_zoo.evaluation.evaluate import EvaluationOptions


def test_the_settings_are_complete_and_can_be_read():
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        given = as_keywords(compose("compare_guidance", overrides=["runs=[x]"]))
    study = Study(**{key: given[key] for key in Study.__dataclass_fields__})
    asked = read_guidances(study.guidances, study.scales)
    assert {one.settings["name"] for one in asked} == set(GUIDANCE)
    assert [one.label for one in read_samplers(study.samplers)] == ["as_run"]
    EvaluationOptions(**given["evaluation"])


def test_a_misspelt_guidance_is_one_clear_line(tmp_path):
    said = call("compare_guidance.py", "runs=[x]", "guidances=[spars]", cwd=tmp_path, expect=1)
    assert said.startswith("error: guidances: name='spars' is unknown. Did you mean 'sparse'?")
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_command_makes_the_report_and_again_only_reads(tmp_path):
    leave_run(tmp_path / "runs" / "a")
    words = (
        "runs=[runs/a]", "scales=[2]", "samplers=[euler,{name: dpmpp_2m, shift: 2}]", "device=cpu",
        "guidances=[none,auto,{name: sparse, weak_rate: 0.5}]", "evaluation.num_images=20", "out=o",
        "evaluation.allow_few_images=true",
    )  # fmt: skip
    said = call("compare_guidance.py", *words, cwd=tmp_path)
    assert "6 records, 0 of them done" in said
    text = (tmp_path / "o" / "report.md").read_text()
    assert text in said
    assert "| `sparse weak_rate=0.5` | `dpmpp_2m shift=2` | 2 |" in text
    assert "digits-cnn-64@" in text
    names = {path.name for path in (tmp_path / "o").iterdir()}
    pictures = {"scales_a.png", "samples_a.png"}
    assert names == {"report.md", "results.csv", "results.json", "records", *pictures}
    again = call("compare_guidance.py", *words, cwd=tmp_path)
    assert "6 records, 6 of them done" in again
    assert (tmp_path / "o" / "report.md").read_text() == text
