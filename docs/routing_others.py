"""Print the table of docs/comparison/diffusers_classes.md: which classes can be routed, by trying.

python docs/routing_others.py
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import diffusers
import torch

from tests.routing.others.cases import CASES, build, run
from tread_zoo import enable_routing


def row(name: str) -> str:
    """Return a row of the table: one routed pass of a tiny network with random weights."""
    case, network = CASES[name], build(name)
    inputs = case.inputs(2)
    dense = run(network, inputs)
    try:
        routes = enable_routing(network, start=case.start, end=case.end)
        run(network, inputs)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).replace("|", "/")
        return f"| {name} | refused | {reason} |"
    with routes.dense():
        same = torch.equal(run(network, inputs), dense)
    worst = max(verdict.error or 0.0 for verdict in routes.verdicts.values())
    chosen = "the batch" if routes.shared else "each image"
    kinds = ", ".join(kind.split(" of ")[0] for kind in routes.verdicts)
    assert same, f"{name} is not dense within dense()"
    return f"| {name} | for {chosen} | {kinds}: {worst:.0e} |"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    diffusers.logging.set_verbosity_error()
    print(f"diffusers {diffusers.__version__}, torch {torch.__version__.split('+')[0]}\n")
    print("| class | tokens are chosen | proof: error of reordered tokens, or why not |")
    print("|---|---|---|")
    for name in sorted(CASES):
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
