"""Runs whose directory or data lie in object storage, which a process of this machine plays."""

import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import runs
from runs import free_port

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("driver.py")
BEST = "--config.checkpoint.best=validation"


class Store:
    """gs://runs, whose objects are the files below `objects`."""

    def __init__(self, directory: Path):
        self.objects, port = directory / "store" / "runs", free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = [sys.executable, Path(__file__).with_name("store.py"), str(port), "runs"]
        self.variables = {
            "STORAGE_EMULATOR_HOST": self.address,
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GOOGLE_CLOUD_PROJECT": "none",
        }
        self.process = subprocess.Popen(
            command,
            env={"STORAGE_BASE": str(directory), "STORAGE_DIR": "store"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/storage/v1/b/runs", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < until and self.process.poll() is None
                time.sleep(0.1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("objects"))
    try:
        store.wait()
        yield store
    finally:
        store.process.kill()
        store.process.wait()


@pytest.fixture(scope="module")
def killed(store, start, tiny):
    """A run in gs://runs/killed that was killed in its evaluation of step 20, and what it said."""
    words = (DRIVER, "kill-in-evaluation", 20, "--config", tiny, "--workdir", "gs://runs/killed")
    process = start(*words, BEST, **store.variables)
    said = process.communicate(timeout=300)
    assert process.returncode == -9, said
    return said


@pytest.mark.campaign
def test_a_killed_run_goes_on_bit_for_bit(
    store, killed, program, tiny, trained, same_run, tmp_path
):
    ended = program("--config", tiny, "--workdir", "gs://runs/killed", BEST, **store.variables)
    assert ended.code == 0, ended
    assert "resuming from step 14" in ended.out or "resuming from step 20" in ended.out
    assert "loss curve    gs://runs/killed/figures/loss.png" in ended.out
    run = shutil.copytree(store.objects / "killed", tmp_path / "run")
    same_run(run, trained)
    nats = {row["step"]: row.get("validation/nats_per_token", 99.0) for row in runs.rows(run)}
    best = min(nats, key=nats.get)
    assert f"best          step {best}: validation/nats_per_token {nats[best]:.4f}" in ended.out
    assert (run / "checkpoints" / str(best)).is_dir()
    assert (run / "figures" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert list((run / "tensorboard").iterdir()) and list((run / "samples").glob("*.jsonl"))


@pytest.mark.campaign
def test_a_damaged_checkpoint_is_moved_aside(
    store, killed, program, tiny, trained, same_run, tmp_path
):
    address = "gs://runs/damaged"
    assert program("--config", tiny, "--workdir", address, **store.variables).code == 0
    damaged = store.objects / "damaged"
    for file in (damaged / "checkpoints" / "30").rglob("d/*"):
        file.write_bytes(b"")
    ended = program("--config", tiny, "--workdir", address, **store.variables)
    assert ended.code == 0, ended
    assert f"checkpoint 30 in {address}/checkpoints cannot be read" in ended.out
    assert "moved the unreadable checkpoint 30 to gs://runs/damaged/unreadable_check" in ended.out
    assert list((damaged / "unreadable_checkpoints").rglob("_METADATA"))
    same_run(shutil.copytree(damaged, tmp_path / "run"), trained)


def test_data_and_sampling(store, program, tiny):
    text = "\n".join(f"line {n} of a text of some length" for n in range(900))
    folder = store.objects / "texts"
    folder.mkdir()
    upload = f"{store.address}/upload/storage/v1/b/runs/o?uploadType=media&name=texts/a.txt"
    urllib.request.urlopen(urllib.request.Request(upload, text.encode(), method="POST")).close()
    words = ("--config", tiny, "--workdir", "gs://runs/of_objects")
    data = ("--config.data.name=text", "--config.data.path=gs://runs/texts/*.txt")
    ended = program(*words, *data, "--config.train.num_steps=8", **store.variables)
    assert ended.code == 0, ended
    words = (*words, *data, "--config.train.num_steps=8", "--mode", "sample")
    ended = program(*words, **store.variables)
    assert ended.code == 0, ended
    assert "gs://runs/of_objects/samples/step_00000008-2.txt" in ended.out


@pytest.mark.campaign
def test_shards_in_a_bucket(store, program, tiny, tmp_path):
    """Made by one command; training reads their bytes from the bucket."""
    text = "".join(f'{{"text": "line {n} of some text"}}\n' for n in range(900))
    (tmp_path / "a.jsonl").write_text(text)
    words = ("--config", tiny, "--config.tokenizer.name=bytes", "--config.data.name=text")
    words += (f"--config.data.path={tmp_path}/*.jsonl", "--config.data.store=gs://runs/tokens")
    ended = program(*words, "--mode", "prepare", **store.variables)
    assert ended.code == 0 and "tokenising text into gs://runs/tokens/text-" in ended.out, ended
    (manifest,) = (store.objects / "tokens").glob("text-*/manifest.json")
    assert json.loads(manifest.read_text())["is_complete"]
    words += ("--workdir", tmp_path / "run", "--config.train.num_steps=8")
    ended = program(*words, **store.variables)
    assert ended.code == 0 and "tokenising" not in ended.out, ended


def test_what_is_not_there_is_named(store, program, tiny):
    ended = program("--config", tiny, "--workdir", "gs://nowhere/run", **store.variables)
    assert ended.code == 2 and ended.err.count("error: ") == 1, ended
    assert "--workdir gs://nowhere/run cannot be written" in ended.err
