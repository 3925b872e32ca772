"""Data that is fetched and tokenised from the command line, and then trained on."""

import json
import signal
import sys
import time
import zlib

import numpy as np
import pytest
import stand_ins
from records import prepare
from runs import free_port

pytestmark = pytest.mark.slow

PAGES = [f"page {n} of the web, {'with some text ' * (n % 5)}" for n in range(120)]
BYTES = ("--config.tokenizer.name=bytes",)
SHORT = ("--config.train.num_steps=4", "--config.checkpoint.every=4")


def data(**keys) -> list[str]:
    return [f"--config.data.{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="module")
def archive(scratch):
    """OpenWebText's archive, small, in the cache directory."""
    (scratch / "cache").mkdir(exist_ok=True)
    return stand_ins.openwebtext(scratch / "cache", PAGES)


def test_an_archive_in_the_cache_is_prepared_and_trained_on(archive, run, tiny, tmp_path):
    words = ("--config", tiny, *BYTES, *data(name="public", dataset="openwebtext", test=30))
    ended = run(*words, "--mode", "prepare")
    assert ended.code == 0, ended
    assert "tokenising openwebtext into" in ended.out and "is not the published file" in ended.out
    found = json.loads(ended.out.splitlines()[-1])
    assert found["tokens"] == found["sizes"]["train"]["tokens"] > 1000
    ended = run(*words, *SHORT, "--workdir", tmp_path / "run")
    assert ended.code == 0, ended
    assert f"train: {found['tokens']:,} tokens" in ended.out and "tokenising" not in ended.out
    ended = run("--workdir", tmp_path / "run", "--mode", "eval")
    assert ended.code == 0, ended


def test_a_prepared_set_of_tfds_is_trained_on_and_evaluated(run, tiny, tmp_path):
    """LM1B by its name in TFDS, in several files and without TensorFlow."""
    loaded = "tensorflow" in sys.modules
    root = prepare(tmp_path / "tfds", {"train": 300, "test": 40}, "lm1b", "1.1.0")
    words = ("--config", tiny, *BYTES, *data(name="tfds", dataset="lm1b", data_dir=root))
    ended = run(*words, "--mode", "prepare")
    assert ended.code == 0, ended
    texts = [f"train ö {i}".encode() for i in range(285)]
    tokens = json.loads(ended.out.splitlines()[-1])["sizes"]["train"]["tokens"]
    assert tokens == sum(map(len, texts)) + 285  # 15 of 300 are the validation split
    workdir = ("--workdir", tmp_path / "run")
    ended = run(*words, *workdir, "--config.train.num_steps=5", "--config.checkpoint.every=5")
    assert ended.code == 0 and "trained to step 5" in ended.out, ended
    ended = run(*workdir, "--mode", "eval", "--evals", "test")
    assert ended.code == 0, ended
    found = json.loads(ended.out.splitlines()[-1])
    held_out = sum(len(f"test ö {i}".encode()) + 1 for i in range(40))
    assert found["tokens"] == held_out and 0 < found["bits_per_token"] < 16
    assert ("tensorflow" in sys.modules) == loaded


def test_the_sets_of_zero_shot_evaluators_are_prepared(run, refused, tiny, tmp_path):
    """And not the split of the run's own data that has the name of theirs."""
    keys = dict(name="zero_shot", sets="ptb", path=tmp_path, split="all", length=12)
    words = ["--config", tiny, "--mode", "prepare"]
    words += [f"--config.evals.others.{key}={value}" for key, value in keys.items()]
    words += [f"--config.evals.path.{key}={value}" for key, value in dict(name="path").items()]
    final = "--config.evals.others.final=True"
    assert f"evals.others.path={tmp_path} has no folder ptb" in refused(*words, final)
    assert run(*words).code == 0  # nothing reads them
    (tmp_path / "ptb").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text(" the firm 's shares rose \n" * 9)
    ended = run(*words, final)
    assert ended.code == 0, ended
    sizes = json.loads(ended.out.splitlines()[-1])["sizes"]
    assert set(sizes) == {"train", "validation", "test"}


@pytest.mark.campaign
def test_killed_while_it_tokenises(program, start, environment, tiny, tmp_path):
    """Three shards; the rest after the kill, and the bytes of all."""
    text, path = "abcdefghij klmnopqrstuvw " * 4000, tmp_path / "big.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(800)))
    words = ("-m", "md4_jax.main", "--config", tiny, "--mode", "prepare", *BYTES)
    words += (*data(name="text", path=path, test=20, validation=20, store=tmp_path / "store"),)
    process = start(*words)
    until = time.monotonic() + 60
    while not list((tmp_path / "store").glob("*/manifest.json")) and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    (manifest,) = (tmp_path / "store").glob("*/manifest.json")
    left = json.loads(manifest.read_text())
    assert left["shards"] and not left["is_complete"]
    ended = program(*words[2:])
    assert ended.code == 0, ended
    made = json.loads(manifest.read_text())
    assert made["is_complete"] and made["shards"][: len(left["shards"])] == left["shards"]
    raw = b"".join(
        np.frombuffer(f"{n} {text}".encode(), np.uint8).astype(np.uint16).tobytes() + b"\x00\x01"
        for n in range(760)
    )
    found = json.loads(ended.out.splitlines()[-1])
    assert (found["tokens"], found["crc32"]) == (len(raw) // 2, zlib.crc32(raw))


def test_processes_of_a_pod_prepare_once(archive, start, tiny, tmp_path):
    """Each on the same disk; both then have the same data, or training would refuse."""
    words = ("-m", "md4_jax.main", "--config", tiny, "--mode", "prepare", *BYTES)
    words += (*data(name="public", dataset="openwebtext", path=archive, test=20),)
    words += (f"--config.data.store={tmp_path}", "--workdir", tmp_path / "run")
    at = f"127.0.0.1:{free_port()}"
    both = [start(*words, "--distributed", f"{at},2,{index}") for index in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("tokenising openwebtext into" in out for out, _ in said) == 1


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(name="public", dataset="openwebtex"), "data.dataset='openwebtex' is not known"),
        (dict(name="public"), "data.dataset is needed by data.name='public'"),
        (
            dict(name="public", dataset="openwebtext", path="/nowhere"),
            "data.path: no file matches '/nowhere'",
        ),
    ],
)
def test_what_cannot_be_prepared(keys, words, tiny, refused, tmp_path):
    assert words in refused("--config", tiny, "--mode", "prepare", *BYTES, *data(**keys))
