import functools
import json
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest

from tests.data.tables import write_tar
from tests.processes import ROOT, run_python
from tests.small_run import SMALL
from tread_zoo.credentials import without_credentials
from tread_zoo.model_card import write_model_folder
from tread_zoo.runs.hub import upload
from tread_zoo.training.loop import train

SECRETS = ("SECRET1", "SECRET2")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://h/x.tar?token=SECRET1", "http://h/x.tar?***"),
        ("data.path='https://h/{0..9}.tar?SECRET1'", "data.path='https://h/{0..9}.tar?***'"),
        ("http://me:SECRET1@h:8000/x.tar", "http://***@h:8000/x.tar"),
        ("s3://key:SECRET1/with+slash=@bucket/x.tar", "s3://***@bucket/x.tar"),
        ("simplecache::s3://SECRET1@bucket/x?versionId=SECRET2", "simplecache::s3://***@bucket/x?***"),
        ("pipe:curl -H 'Authorization: Bearer SECRET1' https://h/x", "pipe:***"),
        # nothing is secret in these
        ("http://h:8000/a@2x/x.tar", "http://h:8000/a@2x/x.tar"),
        ("hf://datasets/user/set@main/x.tar", "hf://datasets/user/set@main/x.tar"),
        ("s3://bucket/x-0?.tar", "s3://bucket/x-0?.tar"),
        ("/data/photos: what?", "/data/photos: what?"),
    ],
)  # fmt: skip
def test_what_gives_access_is_hidden(text, kept):
    assert without_credentials(text) == kept
    assert without_credentials({"a": [kept, 1, (kept,)]}) == {"a": [kept, 1, (kept,)]}


@pytest.fixture
def server(tmp_path):
    """Yield the address of a server of tar shards that answers whatever the query is."""
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "x.tar", range(40))

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    serving = functools.partial(Handler, directory=tmp_path / "shards")
    with ThreadingHTTPServer(("127.0.0.1", 0), serving) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        yield f"http://me:SECRET2@127.0.0.1:{answering.server_port}"
        answering.shutdown()


def files_with_secrets(folder):
    """Return the files of a folder, or their names, that contain a secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        path.name
        for path in files
        if any(s in path.name or s.encode() in path.read_bytes() for s in SECRETS)
    ]


@pytest.mark.slow
def test_a_run_on_shards_behind_a_token_keeps_it_to_itself(tmp_path, server, monkeypatch):
    """The address comes from the environment; nothing that is written or printed has the token,
    and a run goes on with another one."""
    words = [*SMALL, "data=webdataset", "data.held_out=0.2", "evaluation.metrics=[]"]
    cache, run = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}, tmp_path / "run"
    env = {**os.environ, **cache, "SHARDS": f"{server}/x.tar?token=SECRET1"}
    words += ["data.path=${oc.env:SHARDS}", "tracker=tensorboard", f"run_dir={run}"]
    done = run_python(ROOT / "scripts/train.py", *words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS)
    assert "x.tar?***" in (run / "config.json").read_text()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    given = {"resume": "latest", "run_dir": str(run), "training": {"num_steps": 8}}
    with pytest.raises(ValueError, match=r"give data\.path again"):
        train(**given)
    train(**given, data={"path": f"{server}/x.tar?token=SECRET2"})
    write_model_folder(run)
    assert files_with_secrets(run) == []


def test_an_old_record_with_a_token_is_not_uploaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"path": "https://h/x.tar?token=SECRET1"}))
    with pytest.raises(ValueError, match=r"config.json has an address with credentials") as caught:
        upload(tmp_path, "user/name", private=True)
    assert "SECRET1" not in str(caught.value)
