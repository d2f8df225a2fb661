"""A grid runs every combination once, each in a process, and resumes where it stopped."""

import io
import multiprocessing
import sys
import threading
import time

import pytest
from filelock import FileLock

from tread_zoo.comparison import Cell, check_same_commands, expand, run_cells
from tread_zoo.config import file_name

SCORE = '{"values": {"fid": 2.5}}'


def cell(tmp_path, name, code):
    """Return a cell that runs Python code, in which `result` is the path of the result."""
    result = tmp_path / f"{name}.json"
    head = f"import pathlib, sys\nresult = pathlib.Path({str(result)!r})\n"
    command = (sys.executable, "-c", head + code)
    return Cell(name, {}, command, result, tmp_path / "logs" / f"{name}.log")


def run(cells, **options):
    stream = io.StringIO()
    return run_cells(cells, stream=stream, **options), stream.getvalue()


def test_every_combination_comes_once_and_the_first_seed_of_all_before_the_second():
    grids = [
        {"backbone": ["dit", "mamba"], "seed": ["0", "1"]},
        {"backbone": ["dit"], "routing.selection_rate": ["0.25"], "seed": ["0", "1"]},
        {"backbone": ["mamba"], "seed": ["1"]},
    ]
    cells = expand(grids, ["device=cpu"])
    assert [choices["seed"] for choices, _ in cells] == ["0"] * 3 + ["1"] * 3
    assert cells[0][1] == ["device=cpu", "backbone=dit", "seed=0"]
    assert len({file_name(choices) for choices, _ in cells}) == 6


@pytest.mark.parametrize("field", ["run_dir", "resume", "overwrite"])
def test_what_the_comparison_sets_is_refused(field):
    with pytest.raises(ValueError, match=field):
        expand([{"seed": ["0"]}], [f"+{field}=x"])
    with pytest.raises(ValueError, match="no cell"):
        expand([])


def test_names_are_files_of_their_own(tmp_path):
    paths = ["a/b.npz", "a b.npz", "x" * 300 + "1", "x" * 300 + "2", "plain.npz"]
    names = [file_name({"data.path": path}) for path in paths]
    assert names[-1] == "data.path-plain.npz"
    for name in names:
        (tmp_path / name).mkdir()
    assert len(set(names)) == len(paths)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell a cell")
def test_cells_of_a_comparison_that_is_killed_save_and_end(tmp_path):
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(result.with_name('saved').touch()))\n"
        "result.with_name('begun').touch()\ntime.sleep(30)"
    )
    cells = [cell(tmp_path, "a", code)]
    comparison = multiprocessing.get_context("fork").Process(target=run, args=(cells,))
    comparison.start()
    for event in (begun, saved):
        deadline = time.monotonic() + 25
        while not event.exists():
            assert time.monotonic() < deadline, event
            time.sleep(0.02)
        comparison.kill()
    comparison.join()


@pytest.mark.slow
@pytest.mark.parametrize("ends_well", [True, False])
def test_a_cell_that_another_process_trains_is_waited_for(tmp_path, ends_well):
    waited = cell(tmp_path / "run", "a", f"print('again'); result.write_text({SCORE!r})")
    cells = [waited, cell(tmp_path / "other", "b", f"result.write_text({SCORE!r})")]
    for each in cells:
        each.result.parent.mkdir()
    other = FileLock(tmp_path / "run" / ".lock", thread_local=False)  # as a run has it
    other.acquire()

    def end():
        if ends_well:
            waited.result.write_text(SCORE)
        other.release()

    threading.Timer(1.0, end).start()
    failed, shown = run(cells)
    assert failed == {}
    assert shown.count("another process trains it") == 1
    assert waited.log.exists() != ends_well, "it is continued if it did not end well"
    assert cells[1].result.exists()


def test_a_cell_that_fails_is_reported_and_the_others_go_on(tmp_path):
    cells = [
        cell(tmp_path, "bad", "print('step 1'); sys.exit('error: out of luck')"),
        cell(tmp_path, "good", f"result.write_text({SCORE!r})"),
        cell(tmp_path, "done", "raise AssertionError"),
    ]
    cells[2].result.write_text(SCORE.replace("2.5", "1.25"))
    failed, shown = run(cells)
    assert list(failed) == ["bad"]
    assert "exit status 1: error: out of luck" in failed["bad"]
    assert "3 cells, 1 of them done" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["done", "fid", "1.25"] in lines
    assert ["good", "fid", "2.5"] in lines
    cells[0].result.write_text(SCORE)
    assert run(cells)[0] == {}, "nothing is left to run"


def test_cells_run_at_the_same_time(tmp_path):
    meet = (
        f"import time, os\nresult.write_text({SCORE!r})\n"
        "other = result.with_name('{}')\n"
        "end = time.time() + 60\nwhile not other.exists() and time.time() < end: time.sleep(.01)\n"
        "if not other.exists(): result.unlink()\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    cells = [
        cell(tmp_path, "a", meet.replace("{}", "b.json")),
        cell(tmp_path, "b", meet.replace("{}", "a.json")),
    ]
    assert run(cells, jobs=2, devices=["4", "7"])[0] == {}
    assert sorted(cell.log.read_text() for cell in cells) == ["4\n", "7\n"]


def test_a_folder_of_other_settings_is_not_taken_for_these(tmp_path):
    def grid(*overrides):
        names = ["dit", "mamba"]
        return [
            Cell(n, {}, ("python", "train.py", *overrides, f"backbone={n}"), tmp_path, tmp_path)
            for n in names
        ]

    check_same_commands(grid("training.num_steps=5")[:1], tmp_path)
    check_same_commands(grid("training.num_steps=5"), tmp_path)
    with pytest.raises(ValueError, match=r"num_steps=5 instead of training\.num_steps=6"):
        check_same_commands(grid("training.num_steps=6"), tmp_path)
