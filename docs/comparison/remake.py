"""Write the reports of committed comparisons again, in the current form, from `results.csv`.

python docs/comparison/remake.py                              # all of them
python docs/comparison/remake.py docs/comparison/methods_matrix title='Routing methods by backbone'

This writes `report.md` and `quality.png`, and the page if the folder is new or has an .html file.
Title and command are taken from the existing report unless given; pictures of samples are taken
from the existing page. The curves of these runs were not kept, so only equal steps are compared.
"""

import base64
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from tread_zoo.comparison.findings import COSTS, group_settings
from tread_zoo.comparison.report import write_report
from tread_zoo.comparison.results import read_table

RECORDS = {"folder", "seed", "ended", "steps", "images", "flops_per_step", "machine", "loss"}
RECORDS |= {*COSTS, "peak_memory_bytes", "num_classes"}
CURVES = ["folder", "source", "metric", "step", "flops", "seconds", "value"]
PICTURE = r'<img (?:id="[^"]*" )?alt="([^"]*)" src="data:image/png;base64,([^"]*)"'


def read_records(folder: Path) -> pd.DataFrame:
    """Return the runs of `results.csv` as `read_runs` gives them, without protocol and pictures."""
    runs = read_table(folder / "results.csv")
    others = [n for n in runs if n not in RECORDS and not n.startswith("contribution_")]
    first_score = next(i for i, name in enumerate(others) if name in ("held_out_loss", "fid"))
    scores = [name for name in others if f"real_{name}" in others] or others[first_score:]
    scores += ["held_out_loss"] * ("held_out_loss" not in scores)
    runs.attrs["metrics"] = scores
    runs.attrs["settings"] = [n for n in others if n not in scores and not n.startswith("real_")]
    return runs.assign(num_classes=10, protocol=[{}] * len(runs), samples=None)


def main(folder: Path, title: str, command: str) -> None:
    runs, report = read_records(folder), folder / "report.md"
    text = report.read_text() if report.exists() else f"# {folder.name}"
    page = next(folder.glob("*.html"), None if report.exists() else folder / "page.html")
    before = re.findall(PICTURE, page.read_text() if page and page.exists() else "")
    pictures = {label: base64.b64decode(image) for label, image in before}
    with TemporaryDirectory() as name:
        scratch = Path(name)
        for number, setting in enumerate(group_settings(runs)):
            if setting.label in pictures:
                path = scratch / str(number) / "samples.png"
                path.parent.mkdir()
                path.write_bytes(pictures[setting.label])
                path.with_name("real.png").write_bytes(pictures["real images"])
                runs.loc[setting.runs.index, "samples"] = str(path)
        [*known] = re.findall(r"```bash\n(.*?)\n```", text, re.DOTALL) or [""]
        title = title or text.partition("\n")[0].removeprefix("# ")
        out, curves = scratch / "out", pd.DataFrame(columns=CURVES)
        write_report(runs, curves, out, title=title, command=command or known[0])
        for made, kept in (("report.md", report), ("quality.png", folder), ("index.html", page)):
            if kept:
                shutil.copy(out / made, kept)


if __name__ == "__main__":
    words = [word.partition("=") for word in sys.argv[1:]]
    given = {name: value for name, is_option, value in words if is_option}
    named = [Path(name) for name, is_option, _ in words if not is_option]
    for folder in named or [file.parent for file in Path(__file__).parent.glob("**/report.md")]:
        main(folder, given.get("title", ""), given.get("command", ""))
