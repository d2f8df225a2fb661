"""Write committed comparisons again, in today's form, from their records.

python docs/comparison/remake.py docs/comparison/digits …

Of each folder `results.csv` is read, of its report the title and the command, and of its page the
pictures of samples. No curves were kept of these runs, so they compare at equal steps alone.
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
CURVES = ["folder", "source", "metric", "step", "flops", "seconds", "value"]


def read_records(folder: Path) -> pd.DataFrame:
    """Return the runs of `results.csv` as `read_runs` gives them, without protocol and pictures."""
    runs = read_table(folder / "results.csv")
    others = [name for name in runs if name not in RECORDS | {*COSTS, "peak_memory_bytes"}]
    first_score = next(i for i, name in enumerate(others) if name in ("held_out_loss", "fid"))
    scores = [name for name in others if f"real_{name}" in others] or others[first_score:]
    scores += ["held_out_loss"] * ("held_out_loss" not in scores)
    runs.attrs["metrics"] = scores
    runs.attrs["settings"] = [n for n in others if n not in scores and not n.startswith("real_")]
    return runs.assign(num_classes=10, protocol=[{}] * len(runs), samples=None)


def main(folder: Path) -> None:
    runs, report = read_records(folder), (folder / "report.md").read_text()
    [page] = [*folder.glob("*.html")] or [None]
    with TemporaryDirectory() as name:
        scratch = Path(name)
        images = re.findall(
            r'<img (?:id="[^"]*" )?alt="([^"]*)" src="data:image/png;base64,([^"]*)"',
            page.read_text() if page else "",
        )
        pictures = {label: base64.b64decode(image) for label, image in images}
        for number, setting in enumerate(group_settings(runs)):
            if setting.label in pictures:
                path = scratch / str(number) / "samples.png"
                path.parent.mkdir()
                path.write_bytes(pictures[setting.label])
                path.with_name("real.png").write_bytes(pictures["real images"])
                runs.loc[setting.runs.index, "samples"] = str(path)
        out = scratch / "out"
        command = re.search(r"```bash\n(.*?)\n```", report, re.DOTALL)
        write_report(
            runs,
            pd.DataFrame(columns=CURVES),
            out,
            title=report.partition("\n")[0].removeprefix("# "),
            command=command[1] if command else "",
        )
        for made, kept in (("report.md", "report.md"), ("quality.png", "quality.png")):
            shutil.copy(out / made, folder / kept)
        if page:
            shutil.copy(out / "index.html", page)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
