"""How long does saving stop a run? Our checkpoints beside torch's asynchronous ones.

python benchmarks/saving.py dit_b_2
python benchmarks/saving.py dit_l_2 --rounds 3 --folder /where/runs/are

What is saved is a training state of 16 bytes per parameter: weights, averages and AdamW's moments.
`ours` writes, hashes and syncs it, and the run waits. `async_save` of torch.distributed.checkpoint
copies it, and the run goes on (`copied`) while a thread writes it without checksums (`written`).
The copy takes 16 bytes per parameter. Both ways take turns.
"""

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from timing import make_parser, parse

from tread_zoo.runs.checkpoint import save_checkpoint


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk of the runs")
    args, backbone = parse(parser)
    weights = {name: p.detach().cpu() for name, p in backbone.named_parameters()}
    parts = {
        part: {name: torch.randn_like(tensor) for name, tensor in weights.items()}
        for part in ("model", "ema", "exp_avg", "exp_avg_sq")
    }
    gigabytes = sum(t.nbytes for part in parts.values() for t in part.values()) / 1e9
    rounds = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        torch.distributed.init_process_group(
            "gloo", (Path(folder) / "group").absolute().as_uri(), rank=0, world_size=1
        )
        for _ in range(args.rounds):
            rounds.append(save_in_turns(parts, Path(folder)))
    torch.distributed.destroy_process_group()
    print(f"{gigabytes:.2f} GB: ", end="")
    whole = median(each["ours"] for each in rounds)
    print(f"ours {whole:.2f} s, {gigabytes / whole:.2f} GB/s", end="")
    for name in ("copied", "written"):
        seconds = median(each[name] for each in rounds)
        ratio = median(each[name] / each["ours"] for each in rounds)
        print(f"; {name} {seconds:.2f} s, {ratio:.2f} of ours", end="")
    print()


def save_in_turns(parts: dict[str, dict[str, torch.Tensor]], folder: Path) -> dict[str, float]:
    """Save `parts` in both ways, and return the seconds of `ours`, `copied` and `written`."""
    seconds, began = {}, time.perf_counter()
    save_checkpoint(folder, parts, {"step": 1}, 1)
    seconds["ours"] = time.perf_counter() - began
    began = time.perf_counter()
    saving = dcp.async_save(dict(parts), checkpoint_id=folder / "async")
    seconds["copied"] = time.perf_counter() - began
    saving.result()
    seconds["written"] = time.perf_counter() - began
    shutil.rmtree(folder / "async")
    return seconds


if __name__ == "__main__":
    main()
