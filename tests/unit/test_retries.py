"""Writes that fail for a while are repeated; a failure that stays names file and errno."""

import errno
import functools
import os
import re
import threading

import jax
import numpy as np
import pytest
from tensorboardX.record_writer import RecordWriter
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from md4_jax.protocols import UserError
from md4_jax.runtime import errors, paths, retries
from md4_jax.training import items, writers
from md4_jax.training.trackers import Tracked, Trackers
from md4_jax.training.writers import Writer


@pytest.fixture
def naps(monkeypatch):
    """The pauses, which take no time."""
    taken = []
    monkeypatch.setattr(retries.time, "sleep", taken.append)
    return taken


def failing(times: int, action, number: int = errno.EIO):
    """The action, whose first calls fail."""
    left = [times]

    def call(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), "/disk/file")
        return action(*arguments, **options)

    return call


def test_pauses_grow(naps, capsys):
    assert retries.patiently(failing(4, lambda: "done"), 5) == "done"
    assert naps == [1.0, 2.0, 4.0, 8.0]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "warning: [Errno 5] Input/output error: '/disk/file'. Trying again in 1 s"


def test_the_last_failure_is_said(naps, tmp_path):
    with pytest.raises(UserError) as caught, errors.said(paths.place(tmp_path)):
        retries.patiently(failing(9, lambda: None), 2)
    assert naps == [1.0, 2.0]
    assert "/disk/file: Input/output error (errno 5)" in str(caught.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_run_of_somebody_else_is_not_resumed_by_sampling(number, tmp_path):
    said = errors.said(paths.place(tmp_path), resumes=False)
    with pytest.raises(UserError) as caught, said:
        raise OSError(number, "it is locked", "/disk/file")
    assert "or copy the run to a writable directory, and start the same command again" in str(
        caught.value
    )
    assert "resumes" not in str(caught.value)


def test_a_run_that_was_moved_while_it_ran_is_not_begun_again(tmp_path):
    """By the same command, which has the old place."""
    place = paths.place(tmp_path / "run")

    def said() -> str:
        with pytest.raises(UserError) as caught, errors.said(place):
            (place / "rows").read_text()
        return str(caught.value)

    assert re.search("run is gone: it was moved .* with its new place as --workdir", said())
    place.mkdir()
    assert re.search("rows: No such file .* start the same command again", said())


def test_rows_wait_in_memory_and_are_written_once(naps, tmp_path, monkeypatch):
    writer = Writer(paths.place(tmp_path), resume_step=0, retries=3)
    monkeypatch.setattr(writers, "append", failing(2, paths.append))
    writer.write(1, {"a": 1.0})
    writer.write(2, {"a": 2.0})
    writer.close()
    assert [row["a"] for row in writers.read_rows(tmp_path / "metrics.jsonl")] == [1.0, 2.0]
    assert naps == [1.0, 2.0]


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    file = paths.place(tmp_path / "rows")
    paths.append(file, "one\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(1, os.fsync))
        with pytest.raises(OSError, match="Input/output"):
            paths.append(file, "two\n")
    assert file.read_text() == "one\n"
    file.write_text("one\ntw")  # a process was killed
    paths.append(file, "three\n")
    assert file.read_text() == "one\nthree\n"


def test_two_processes_that_append_at_once_take_turns(tmp_path, monkeypatch):
    """Otherwise the line of the second is removed by the first, as if it were half a line."""
    file, measure, others = paths.place(tmp_path / "rows"), paths._whole_lines, []

    def slowly(opened) -> int:
        monkeypatch.setattr(paths, "_whole_lines", measure)
        found = measure(opened)
        others.append(threading.Thread(target=paths.append, args=(file, "of another\n")))
        others[0].start()
        others[0].join(timeout=0.2)
        return found

    monkeypatch.setattr(paths, "_whole_lines", slowly)
    paths.append(file, "mine\n")
    others[0].join()
    assert file.read_text() == "mine\nof another\n"


def test_lines_whose_file_has_no_lasting_name_yet_are_appended_once(tmp_path, monkeypatch):
    file = paths.place(tmp_path / "rows")
    monkeypatch.setattr(paths, "sync_names", failing(1, paths.sync_names))
    with pytest.raises(OSError):
        paths.append(file, "one\n")
    paths.append(file, "one\n")
    assert file.read_text() == "one\n"


def test_a_row_is_on_the_disk_when_it_is_written(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def noting(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noting)
    paths.append(paths.place(tmp_path / "rows"), "one\n")
    assert synced == [str(tmp_path / "rows"), str(tmp_path)]


def test_tensorboard_ends_alone(tmp_path, monkeypatch):
    said, run = [], Tracked(paths.place(tmp_path), {}, 0)
    make = functools.partial(Trackers, ["tensorboard"], run, said.append)
    writer = Writer(paths.place(tmp_path), resume_step=0, trackers=make)
    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", failing(1, RecordWriter.write))
        for step in range(1, 30):
            writer.write(step, {"a": float(step)})
    writer.close()
    assert len(writers.read_rows(tmp_path / "metrics.jsonl")) == 29
    assert len(said) == 1 and "tensorboard of log.trackers failed" in said[0]


def test_the_system_has_the_last_word():
    """TensorStore says why at the end of a long sentence about files."""
    file = "/home/somebody/runs/mine/checkpoints/3.orbax-checkpoint-tmp/ema.orbax-checkpoint-tmp"
    words = (
        f'UNKNOWN: Error writing "network/head/kernel" in database at "{file}": Failed writing: '
        f'"{file}/d/387f9b8abcae8b088b05202123db0e8b": Failed to write 2129473 bytes to file 7: '
    )
    said = items.reason(ValueError(words + "Input/output error [os_error_code='5']"))
    assert said.startswith("UNKNOWN: Error writing") and len(said) == 300
    assert said.endswith("Input/output error [os_error_code='5']")
    for full in ("No space left on device", "Disk quota exceeded"):
        assert items.reason(ValueError(f"{words}{full} [os_error_code='28']")) == full


def test_no_memory_is_said(tmp_path):
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        said = pytest.raises(UserError, match="not enough memory .*batch_size")
        with said, errors.said(paths.place(tmp_path)):
            raise error
    with pytest.raises(jax.errors.JaxRuntimeError), errors.said(paths.place(tmp_path)):
        raise jax.errors.JaxRuntimeError("INTERNAL: a fault")


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    odd = ["5", "{}", '{"step": "x"}', '{"step": 1e999}', "[" * 9000, '{"step": ' + "9" * 5000]
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b"\xff\n" + "\n".join([*odd, '{"step": 3, "a": 1}']).encode())
    assert writers.read_rows(log) == [{"step": 3, "a": 1}]
    assert np.isfinite(writers.read_rows(log)[0]["a"])


def test_a_pattern_at_which_the_tokenizers_library_panics_is_said(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with (
        pytest.raises(UserError, match="library failed: .*retry-limit"),
        errors.said(paths.place(tmp_path)),
    ):
        tokenizer.encode(40 * "a" + "b")
