"""Make a recipe's reference curve from runs of it, and write it into the recipe's head.

python scripts/train.py -m experiment=digits_dit_tread seed=0,1
python scripts/make_curve.py recipe=digits_dit_tread hardware="2 cores of an AMD EPYC" \
    runs=[runs/digits_dit_tiny_tread_flow_seed0,runs/digits_dit_tiny_tread_flow_seed1]

The runs must have the recipe's settings; where the data lie, how often was logged, precision and
scoring may differ. It writes configs/experiment/curves/<recipe>.json, the block of comments at
the head of the recipe, and the table of docs/recipes.md. To compare a run with the curve:
scripts/compare.py compare.to=reference.
"""

import subprocess
from pathlib import Path

import hydra
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

ROOT = Path(__file__).resolve().parents[1]

register_configs()


@hydra.main(version_base="1.3", config_path="../configs", config_name="make_curve")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo import __version__
    from tread_zoo.comparison.reference import (
        load_curves,
        make_curve,
        read_trace,
        recipe_block,
        recipe_table,
        replace_between,
        wanted_settings,
    )
    from tread_zoo.comparison.reference.documents import BEGIN, END, TABLE_BEGIN, TABLE_END
    from tread_zoo.errors import unknown_name

    settings = as_keywords(config)
    recipe, folder = settings["recipe"], Path(settings["configs"] or ROOT / "configs/experiment")
    yaml, page = folder / f"{recipe}.yaml", Path(settings["docs"] or ROOT / "docs/recipes.md")
    if not yaml.exists():
        raise unknown_name("recipe", recipe, [path.stem for path in folder.glob("*.yaml")])
    traces = [read_trace(Path(run)) for run in settings["runs"]]
    if not traces:
        raise ValueError("runs=[] names no run; give the folders of two seeds or more.")
    wanted = wanted_settings(compose_recipe(recipe), traces[0].settings["data"])
    curve = make_curve(
        recipe,
        wanted,
        traces,
        hardware=settings["hardware"] or "",
        data_note=settings["data_note"] or "",
        package={"version": __version__, "commit": commit()},
    )
    head = replace_between(yaml.read_text(), BEGIN, END, recipe_block(curve), str(yaml))
    curves = folder / "curves"
    table = recipe_table({**load_curves(curves), recipe: curve})
    text = replace_between(page.read_text(), TABLE_BEGIN, TABLE_END, table, str(page))
    curves.mkdir(exist_ok=True)
    (curves / f"{recipe}.json").write_text(curve.as_text())
    yaml.write_text(head)
    page.write_text(text)
    print("\n".join(recipe_block(curve)))
    print(f"written: {curves / recipe}.json, {yaml}, {page}")


def compose_recipe(recipe: str) -> dict:
    """Return the keywords of `train` for a recipe; a path that only the user knows is left open."""
    assert GlobalHydra.instance().is_initialized(), "hydra.main has opened the folder of configs"
    return as_keywords(compose("train", overrides=[f"experiment={recipe}", "++data.path=there"]))


def commit() -> str | None:
    """Return the commit of this checkout, marked where it was changed since; None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    main()
