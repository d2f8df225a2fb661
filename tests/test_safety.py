"""No file that was read can run code: a walk through all of the source, and files that try."""

import ast
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from tests.small_run import CONFIGS
from tread_zoo.cli import as_keywords, register_configs
from tread_zoo.plain import check_hydra

ROOT = Path(__file__).parents[1]
TOPS = ("tread_zoo", "backbones", "scripts")
# Modules that load code with data.
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "extractall", "extract", "unpack_archive", "unsafe_load", "full_load", "instantiate",
    "get_class", "get_method", "get_object", "load_state_dict_from_url", "system", "popen",
}  # fmt: skip
SAFE = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "torch.hub.load": ("source", "local"),  # DINOv2's code, of a clone that the user made
}


def violations(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        yield from (f"{node.lineno}: imports {name}" for name in names & LOADERS)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if called in SAFE:
            keyword, value = SAFE[called]
            if given.get(keyword) != value:
                yield f"{node.lineno}: {called} without {keyword}={value}"
        elif (
            called in BUILTINS
            or called == "yaml.load"
            or called.startswith("torch.hub.load")
            or (owner and name in CALLS)
        ):
            yield f"{node.lineno}: {called}"


def test_no_source_loads_code_with_data():
    found = []
    for file in sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py")):
        text = file.read_text()
        name = file.relative_to(ROOT).as_posix()
        lines = [f"{name}:{line}" for line in violations(ast.parse(text))]
        # An exception is caught by its name there, and nothing else of pickle is used.
        if text.count("pickle.") == text.count("pickle.UnpicklingError"):
            lines = [line for line in lines if not line.endswith("imports pickle")]
        found += lines
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "import pickle",
        "np.load(f, allow_pickle=True)", "from joblib import load", "archive.extractall(to)",
        "hydra.utils.instantiate(c)", "yaml.load(f)", "torch.hub.load('a', 'b')", "eval(x)",
        "shutil.unpack_archive(a)", "tar.extract(m)",
    ],
)  # fmt: skip
def test_the_walk_finds(text):
    assert len(list(violations(ast.parse(text)))) == 1


def test_no_configuration_names_code():
    """hydra's own plugins, its launchers among them, are configured by _target_; nothing else."""
    files = sorted(CONFIGS.rglob("*.yaml"))
    assert len(files) > 30
    for file in files:
        if "hydra" not in file.relative_to(CONFIGS).parts:
            assert "_target_" not in file.read_text(), file


@pytest.mark.parametrize("place", ["sampler", "routing.routes[0]"])
def test_a_configuration_with_code_is_refused(place):
    evil = {"_target_": "os.system", "command": "true"}
    config = {"sampler": evil} if place == "sampler" else {"routing": {"routes": [evil]}}
    with pytest.raises(ValueError, match=r"_target_='os.system'") as error:
        as_keywords(OmegaConf.create(config))
    assert f"the configuration.{place} holds" in str(error.value)


EVIL = {"_target_": "torch.load", "f": "evil.pt", "weights_only": False}


@pytest.mark.parametrize(
    ("node", "field"),
    [
        ({"callbacks": {"x": EVIL}}, "hydra.callbacks"),
        ({"callbacks": "${elsewhere}"}, "hydra.callbacks"),
        ({"launcher": EVIL}, "hydra.launcher._target_='torch.load'"),
        ({"launcher": "${elsewhere}"}, "hydra.launcher._target_"),
        ({"sweeper": {**EVIL, "_target_": "${elsewhere}"}}, "hydra.sweeper._target_"),
        ({"job_logging": {"handlers": {"x": {"()": "os.system"}}}}, r"handlers.x.\(\)='os.system'"),
        ({"hydra_logging": {"formatters": {"x": {"class": "torch.load"}}}}, "formatters.x.class"),
        ({"job_logging": {"handlers": {"x": "${elsewhere}"}}}, "handlers.x="),
        ({"help": EVIL}, "hydra.help holds _target_"),
    ],
)
def test_hydras_own_node_names_known_code_alone(node, field):
    with pytest.raises(ValueError, match=field):
        check_hydra(node)


@pytest.mark.parametrize("given", [[], ["hydra/launcher=slurm"], ["hydra/job_logging=default"]])
def test_what_hydra_brings_is_allowed(given):
    """And the loader that every script composes with is the one that checks."""
    if given == ["hydra/launcher=slurm"]:
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        node = compose("train", [*given], return_hydra_config=True).hydra
        assert node.launcher._target_.startswith("hydra")
        with pytest.raises(ConfigCompositionException, match=r"hydra.callbacks=.*torch.load"):
            compose("train", ["+hydra.callbacks.x={_target_: torch.load, f: evil.pt}"])
