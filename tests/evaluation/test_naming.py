"""Files of scores: the plain name is that of the run's own settings, and of no others."""

import pytest

from tests.small_run import parts_of, settings
from tread_zoo.diffusion import build_sampling
from tread_zoo.evaluation.naming import score_file, settings_of_score

RUN = settings()
OWN = {"name": "euler", "num_steps": 25}


def told(sampler=OWN, guidance=None, evaluation=None, **others):
    sampling = build_sampling(sampler, guidance or {"name": "none"}).as_dict()
    given = {"weights": "ema", "precision": "auto", **others}
    return settings_of_score(sampling, evaluation or RUN["evaluation"], **given)


def test_a_run_as_it_is_has_the_plain_name():
    assert score_file(750, told(), told()) == "score_00000750.json"
    changed = {**RUN["evaluation"], "batch_size": 3, "keep_images": "/there"}
    assert score_file(750, told(evaluation=changed), told()) == "score_00000750.json"
    # a run from before a setting was there had what is usual
    saved = parts_of(RUN).settings["evaluation"]
    assert "allow_few_images" not in saved
    older = {key: value for key, value in saved.items() if key != "num_reference"}
    assert score_file(750, told(), told(evaluation=older)) == "score_00000750.json"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"guidance": {"name": "cfg", "scale": 3.0}}, "cfg3_"),
        ({"sampler": {"name": "heun", "num_steps": 25}}, "heun25_"),
        ({"sampler": {**OWN, "shift": 3.0}}, ""),
        ({"weights": "model"}, "model_"),
        ({"precision": "fp32"}, ""),
        ({"evaluation": {**RUN["evaluation"], "num_images": 50000}}, "50000images_"),
        ({"evaluation": {**RUN["evaluation"], "seed": 2}}, ""),
        ({"evaluation": {**RUN["evaluation"], "reference": "held_out"}}, ""),
        ({"data.pad_to": 32}, ""),
    ],
)
def test_any_difference_has_a_name_of_its_own(changes, words):
    name = score_file(750, told(**changes), told())
    assert name.startswith(f"score_00000750_{words}")
    assert name == score_file(750, told(**changes), told()), "the same again is the same file"
    assert len(name.removesuffix(".json").rpartition("_")[2]) == 6


def test_other_values_have_other_names():
    values = [{"name": "cfg", "scale": scale} for scale in (2.0, 2.0000001)]
    names = {score_file(7, told(guidance=one), told()) for one in values}
    assert len(names) == 2
    plain = score_file(7, told(), told(guidance=values[0]))
    assert plain.startswith("score_00000007_unguided_")
