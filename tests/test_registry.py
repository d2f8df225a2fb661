"""Parts by name: what is registered, how it is made, how others' parts come in."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from pydantic import Field, PositiveInt

from tests.processes import run_python
from tread_zoo import available, create, create_backbone, list_backbones, register, registry
from tread_zoo.config import make_config
from tread_zoo.registry import KINDS, check_plugins, complete, get_entry

# Trackers need their packages, and guidance=custom something that the weak prediction lacks.
NOT_BY_ITSELF = {*available("tracker"), "custom"} - {"local"}
SMALL = {"input_size": 8, "in_channels": 1, "num_classes": 10}


pytestmark = pytest.mark.usefixtures("own_registry")


@dataclass(frozen=True)
class Every:
    """A selector of every n-th token."""

    stride: PositiveInt = 2
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __call__(self, batch, grid, num_kept, generator):
        return torch.arange(0, num_kept * self.stride, self.stride).expand(batch, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_parts_and_every_part_knows_its_defaults(kind):
    assert available(kind)
    for name in available(kind):
        entry = get_entry(kind, name)
        required = {k for k, p in entry.parameters().items() if p.default is p.empty}
        if required - set(registry.FROM_DATA) or name in NOT_BY_ITSELF:
            continue
        assert complete(kind, name) == {"name": name, **entry.complete(entry.defaults())}


def test_a_part_is_made_from_a_name_a_mapping_and_options():
    register("selector", "every")(Every)
    assert create("selector", "every") == Every()
    assert create("selector", {"name": "every", "stride": 3}) == Every(stride=3)
    assert create("selector", "every", stride=4) == Every(stride=4)
    assert "every" in available("selector", "ev*")


def test_a_preset_changes_defaults_and_a_function_has_its_keywords_as_options():
    register("selector", "sparse_grid", preset={"stride": 5})(Every)
    assert create("selector", "sparse_grid") == Every(stride=5)

    @register("metric", "scaled_gap", better="lower")
    def scaled_gap(generated, real, *, scale: float = 1.0):
        return scale * float((generated.mean() - real.mean()).abs())

    assert create("metric", "scaled_gap", scale=3.0)(torch.ones(2, 1), torch.zeros(2, 1)) == 3.0
    assert get_entry("metric", "scaled_gap").metadata["better"] == "lower"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strde": 2}, "Did you mean selector.stride"),
        ({"stride": 0}, "selector.stride=0"),
        ({"stride": 1.5}, "selector.stride=1.5"),
        ({"stride": True}, "selector.stride=True"),
        ({"jitter": 1.0}, "selector.jitter=1.0"),
        ({"jitter": "much"}, "selector.jitter='much'"),
    ],
)
def test_options_are_held_to_their_annotations(options, words):
    register("selector", "every")(Every)
    with pytest.raises(ValueError) as error:
        create("selector", "every", **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sampler_has_no_field_that_every_sampler_has():
    @dataclass(frozen=True)
    class Own:
        num_steps: int = 5

    register("sampler", "own")(Own)
    with pytest.raises(ValueError, match="default_num_steps"):
        make_config(sampler={"name": "own", "num_steps": 3})


def test_what_cannot_be_registered():
    register("selector", "every")(Every)
    register("selector", "every")(Every)  # the same again, as a reload does

    @dataclass
    class Other:
        def __call__(self, batch, grid, num_kept, generator): ...

    with pytest.raises(ValueError, match="already registered"):
        register("selector", "every")(Other)
    for wrong, words in (
        (lambda: register("selector", "not-a-name"), "identifier"),
        (lambda: register("selector", "wrong", preset={"strid": 1})(Every), "stride"),
        (lambda: register("metric", "swallows")(lambda real, **options: 0.0), "keyword"),
        (lambda: register("data", "named")(lambda name="digits": None), "option `name`"),
        (lambda: register("metric", "misspelt", beter="lower"), "better"),
        (lambda: available("samplr"), "'sampler'"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


def test_backbones_by_timms_verbs():
    assert "dit_b_2" in list_backbones("dit*")
    backbone = create_backbone("dit", depth=3, **SMALL)
    assert (backbone.name, backbone.num_blocks) == ("dit_tiny", 3)
    again = create_backbone(backbone.name, **backbone.config)
    assert again.state_dict().keys() == backbone.state_dict().keys()
    with pytest.raises(ValueError, match="exclude each other"):
        create_backbone("dit", context_length=3, context_size=4, **SMALL)


@pytest.mark.slow
def test_an_installed_plug_in_is_found_and_a_broken_one_is_named(tmp_path):
    """Two packages with entry points: the parts of one are there, the other warns and is named."""
    for name, code in {
        "good_plugin": "from tread_zoo import register\n"
        "from tread_zoo.routing.selectors import Rows\n"
        "register('selector', 'good_rows')(type('GoodRows', (Rows,), {}))\n",
        "bad_plugin": "import a_module_that_is_not_there\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tread_zoo.plugins]\n{name} = {name}\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import tread_zoo as z\n"
        "print('good_rows' in z.available('selector'))\n"
        "try: z.create('selector', 'bad_rows')\n"
        "except ValueError as error: print(error)\n"
    )
    done = run_python("-c", code)
    assert done.stdout.startswith("True\n"), done.stderr
    assert "bad_plugin" in done.stderr
    assert "a_module_that_is_not_there" in done.stdout


def test_a_plug_in_that_a_file_names_must_be_loaded():
    check_plugins(["json"], "the checkpoint")
    with pytest.raises(ValueError, match=r"plugins=\[stranger_plugin\]"):
        check_plugins(["stranger_plugin"], "the checkpoint")
