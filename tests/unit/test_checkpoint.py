"""Checkpoints: the first one that is saved is read back before any other is deleted."""

import gc
import json
import os
import zlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from md4_jax.options import CheckpointOptions
from md4_jax.protocols import UserError
from md4_jax.runtime import paths, sharding
from md4_jax.training import checkpoint, items
from md4_jax.training.checkpoint import Checkpoints

# What TensorStore's threads say after a failed read; main silences it for users.
quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def collected():
    """What Orbax leaves of a failed read is collected within the test that made it fail."""
    yield
    gc.collect()


class State(NamedTuple):
    """A train state in miniature."""

    ema: Any
    params: Any
    step: Any


def state(step: int) -> State:
    return State({"w": jnp.arange(3.0) + step}, {"w": jnp.arange(5.0) - step}, jnp.int32(step))


@pytest.fixture
def opened(tmp_path):
    """Opens the checkpoints of one directory, with options for keeping; all are closed."""
    made = []

    def opened(keep: int, **more: int) -> Checkpoints:
        directory = paths.place(tmp_path / "checkpoints")
        options = CheckpointOptions(every=1, keep=keep, **more)
        made.append(Checkpoints(directory, options))
        return made[-1]

    yield opened
    for checkpoints in made:
        checkpoints.close()


def steps(directory) -> list[int]:
    return sorted(int(p.name) for p in (directory / "checkpoints").iterdir() if p.name.isdigit())


def damage_at_commit(monkeypatch, step: int) -> None:
    """Empties the arrays of that checkpoint once it is on the disk."""
    wait = checkpoint.ocp.CheckpointManager.wait_until_finished

    def damaging(manager):
        wait(manager)
        for file in (manager.directory / str(step)).glob("*/d/*"):
            file.write_text("")

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "wait_until_finished", damaging)


@quiet
@pytest.mark.usefixtures("collected")
def test_none_is_deleted_before_the_first_was_read_back(opened, tmp_path, monkeypatch):
    before = opened(keep=2)
    for step in (1, 2):
        before.save(step, state(step), {})
    before.wait()
    damage_at_commit(monkeypatch, 3)
    with pytest.raises(UserError, match="checkpoint 3 .* cannot be read back") as caught:
        opened(keep=1).save(3, state(3), {})
    assert "The earlier checkpoints were kept" in str(caught.value) and "step 1, 2." in str(
        caught.value
    )
    assert steps(tmp_path) == [1, 2, 3]
    monkeypatch.undo()
    found, _ = opened(keep=1).restore(jax.tree.map(shape, state(0)), say=lambda line: None)
    assert int(found.step) == 2


@quiet
@pytest.mark.usefixtures("collected")
def test_a_first_save_that_cannot_be_read_back(opened, monkeypatch):
    damage_at_commit(monkeypatch, 1)
    with pytest.raises(UserError, match="checkpoint 1 .* cannot be read back.*There is no earlier"):
        opened(keep=1).save(1, state(1), {})


@quiet
@pytest.mark.usefixtures("collected")
def test_a_first_save_of_which_the_disk_lost_a_part(opened, tmp_path, monkeypatch):
    """The run begins anew; with the whole first checkpoint on the disk it is refused."""
    notes = []

    def synced(directory):
        notes.append((tmp_path / "first_save.json").read_text())
        paths.sync_all(directory)

    monkeypatch.setattr(checkpoint, "sync_all", synced)
    opened(keep=1).save(3, state(3), {})
    assert notes[0] == '{"step": 3}\n' and not (tmp_path / "first_save.json").exists()
    for file in (tmp_path / "checkpoints" / "3").glob("*/d/*"):
        file.write_text("")
    with pytest.raises(UserError, match="none of the checkpoints \\[3\\] .* can be read"):
        opened(keep=1).restore(jax.tree.map(shape, state(0)), say=print)
    (tmp_path / "first_save.json").write_text(notes[0])
    said = []
    again = opened(keep=1)
    assert again.restore(jax.tree.map(shape, state(0)), say=said.append) is None
    assert "before this first checkpoint was on" in said[1] and "moved the unreadable" in said[2]
    assert len(list((tmp_path / "unreadable_checkpoints").iterdir())) == 1
    again.save(3, state(3), {})
    assert steps(tmp_path) == [3] and not (tmp_path / "first_save.json").exists()


@pytest.mark.parametrize("part", [1, 12, 2**28])
def test_read_back_part_by_part(part, opened, tmp_path, monkeypatch):
    """As many are kept as are asked for, and each is what was saved."""
    monkeypatch.setattr(items, "PART_BYTES", part)
    for step in range(1, 6):
        opened(keep=2).save(step, state(step), {"data": step})
    assert steps(tmp_path) == [4, 5]
    found, host = opened(keep=2).restore(jax.tree.map(shape, state(0)))
    assert host == {"data": 5}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state(5)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_every_array_is_read_back(opened, monkeypatch):
    read = []
    whole = items.read_part
    monkeypatch.setattr(
        items, "read_part", lambda where, part: read.extend(part) or whole(where, part)
    )
    checkpoints = opened(keep=1)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {})
    checkpoints.wait()
    assert sorted(read) == ["params/w", "step", "w"]  # once, of the first
    assert checkpoints.steps() == [3]


@pytest.mark.parametrize("name", ["params/w", "step", "w"])
def test_one_wrong_bit_is_seen(name, opened, monkeypatch):
    whole = items.read_part

    def flipped(where, part):
        found = whole(where, part)
        return {k: x + 1 if k == name else x for k, x in found.items()}

    monkeypatch.setattr(items, "read_part", flipped)
    with pytest.raises(UserError, match=f"{name} has a wrong checksum"):
        opened(keep=1).save(1, state(1), {})


def test_a_first_save_whose_host_file_is_another_whole_one(opened, monkeypatch):
    """As of a file system that hands out what was there before: its own checksum is right."""
    restore = checkpoint.ocp.CheckpointManager.restore

    def stale(manager, step, args):
        found = restore(manager, step, args=args)
        record = {**found["host"], "state": {"sequences": 10}}
        record.pop("crc32")
        return {"host": {**record, "crc32": items.crc32(record)}}

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "restore", stale)
    with pytest.raises(UserError, match="cannot be read back: its host file differs from what"):
        opened(keep=1).save(1, state(1), {"sequences": 20})


def test_a_host_file_with_another_number_in_it_is_not_taken(opened, tmp_path):
    """It is readable and of the same form, but not what was saved."""
    checkpoints = opened(keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"sequences": 10 * step})
    checkpoints.wait()
    files = (tmp_path / "checkpoints" / "2" / "host").iterdir()
    (file,) = (path for path in files if '"sequences": 20' in read(path))
    file.write_text(read(file).replace("20", "30", 1))
    said = []
    _, host = opened(keep=2).restore(jax.tree.map(shape, state(0)), say=said.append)
    assert host == {"sequences": 10}
    assert "checkpoint 2" in said[0] and "its host file has a wrong checksum" in said[0]


def test_the_best_and_those_of_every_so_many_steps_stay(opened, tmp_path):
    checkpoints = opened(keep=1, keep_every=4)
    for step in range(1, 11):
        checkpoints.best = lambda steps: 3 if 3 in steps else None
        checkpoints.save(step, state(step), {})
    checkpoints.wait()
    assert steps(tmp_path) == checkpoints.steps() == [3, 4, 8, 10]
    checkpoints.best = lambda steps: 10
    checkpoints.prune()
    assert steps(tmp_path) == checkpoints.steps() == [4, 8, 10]


def test_options_that_keep_less_delete_after_the_first_save_alone(opened, tmp_path):
    before = opened(keep=2, keep_every=2)
    before.best = lambda steps: 1
    for step in range(1, 6):
        before.save(step, state(step), {})
    before.wait()
    assert steps(tmp_path) == [1, 2, 4, 5]
    less = opened(keep=1)
    less.prune()  # it has saved nothing
    assert int(less.restore(jax.tree.map(shape, state(0)))[0].step) == 5
    assert steps(tmp_path) == [1, 2, 4, 5]
    less.best = lambda steps: 2
    less.save(6, state(6), {})
    assert steps(tmp_path) == [2, 6]


def test_the_best_before_stays_until_the_next_one_is_whole(opened, tmp_path, monkeypatch):
    checkpoints = opened(keep=1, retries=0)
    checkpoints.best = lambda steps: 1
    for step in (1, 2):
        checkpoints.save(step, state(step), {})
    checkpoints.wait()

    def full(*arguments, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoints._manager._checkpointer, "save", full)
    checkpoints.best = lambda steps: 3 if 3 in steps else 1
    with pytest.raises(UserError, match="No space left on device.*: step 1, 2;"):
        checkpoints.save(3, state(3), {})
    assert steps(tmp_path) == [1, 2]


@quiet
@pytest.mark.usefixtures("collected")
def test_a_checkpoint_that_this_user_may_not_read_is_not_damaged(opened, tmp_path, monkeypatch):
    """No older one is taken in its place, which would lose what was trained since."""
    checkpoints = opened(keep=3)
    for step in (1, 2):
        checkpoints.save(step, state(step), {})
    checkpoints.wait()
    folder, template = tmp_path / "checkpoints", jax.tree.map(shape, state(0).ema)
    (file,) = (folder / "2").glob("ema/d/*")
    file.write_text("")  # root may read every file
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: str(path) != str(file))
        with pytest.raises(UserError, match=rf"ema/d/\w+ cannot be read: Perm.* a\+rX {folder}/2$"):
            checkpoints.restore_ema(template)
        patch.setattr(os, "access", lambda path, mode: not mode & os.X_OK)
        with pytest.raises(UserError, match="checkpoints cannot be read: Permission denied"):
            items.check_allowed(paths.place(folder), below=False)
    assert checkpoints.restore_ema(template)[0] == 1


@quiet
@pytest.mark.usefixtures("collected")
def test_one_step_that_is_asked_for(opened, tmp_path):
    checkpoints = opened(keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"elapsed": 10 * step})
    checkpoints.wait()
    template = jax.tree.map(shape, state(0).ema)
    for asked, found in ((None, 3), (1, 1), (2, 2)):
        step, ema, host = checkpoints.restore_ema(template, step=asked)
        assert (step, host["elapsed"]) == (found, 10 * found)
        assert ema["w"].tolist() == [found, found + 1, found + 2]
    for file in (tmp_path / "checkpoints" / "2").glob("ema/d/*"):
        file.write_text("")
    with pytest.raises(UserError, match="checkpoint 2 .* cannot be read: .* \\[1, 2, 3\\]: choose"):
        checkpoints.restore_ema(template, step=2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda ema: ema | {"w": ema["w"].update(shape=(9,))},
            "an array of the shape (3,) where the network of this config has (9,)",
        ),
        (
            lambda ema: ema | {"v": ema["w"]},
            "it lacks an array that the network of this config has",
        ),
    ],
)
@pytest.mark.usefixtures("collected")
def test_arrays_of_another_network_are_told_from_damage(opened, change, expected):
    checkpoints = opened(keep=1)
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    template = change(jax.tree.map(shape, state(1).ema))
    with pytest.raises(UserError) as caught:
        checkpoints.restore_ema(template, step=1)
    said = str(caught.value)
    assert expected in said and "config.json" in said
    assert "Truncating" not in said and "structures" not in said


def test_arrays_of_another_type_are_told_from_damage(opened):
    """As of a version whose parameters had 64 bits with JAX_ENABLE_X64."""
    checkpoints = opened(keep=1)
    with jax.enable_x64(True):
        before = state(1)._replace(ema={"w": jnp.arange(3.0) / 3})
        assert before.ema["w"].dtype == jnp.float64
        checkpoints.save(1, before, {})
        checkpoints.wait()
    with pytest.raises(UserError) as caught:
        checkpoints.restore_ema(jax.tree.map(shape, state(1).ema), step=1)
    said = str(caught.value)
    assert "stores ema w as float64, but the network of this config has float32" in said
    assert "checksum" not in said


@pytest.mark.usefixtures("collected")
def test_memory_is_given_back_after_each_save(opened, monkeypatch):
    given = []
    monkeypatch.setattr("md4_jax.training.checkpoint.give_back", lambda: given.append(True))
    checkpoints = opened(keep=1)
    for step in (1, 2):
        checkpoints.save(step, state(step), {})
        checkpoints.wait()
        assert given and checkpoints.steps()[-1] == step
        given.clear()


def read(file) -> str:
    return file.read_text()


def shape(x) -> jax.ShapeDtypeStruct:
    where = SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


@pytest.mark.parametrize("name", ["run[1]", "a*", "?", "b\\c", "[x]/run"])
def test_a_directory_that_is_a_pattern_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="could not be read again"):
        paths.check_name(paths.place(tmp_path / name))
    with pytest.raises(UserError, match="could not be read again"):
        paths.check_name(paths.place(f"{tmp_path}/{name}"))


@pytest.mark.parametrize("name", ["a run", "ünï", "a]b", "{a}", "$HOME", "a'b", "%41", "a;b#c"])
def test_other_names_are_kept_and_read(name, tmp_path):
    paths.check_name(paths.place(tmp_path / name))
    checkpoints = Checkpoints(paths.place(tmp_path / name), CheckpointOptions())
    checkpoints.save(1, state(1), {})
    assert checkpoints.restore(jax.tree.map(shape, state(0))) is not None
    checkpoints.close()


def failing_saves(checkpoints, monkeypatch, times: int) -> None:
    """Lets so many saves fail in the background."""
    save, left = checkpoint.ocp.CheckpointManager.save, [times]

    def failing(manager, step, args):
        if left[0]:
            left[0] -= 1
            monkeypatch.setattr(manager, "check_for_errors", full, raising=False)
            return True
        return save(manager, step, args=args)

    def full():
        raise OSError(28, "No space left on device", "/disk/file")

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "save", failing)
    monkeypatch.setattr(checkpoint.retries.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize(
    "saved, said",
    [((), "There is no complete checkpoint;"), ((1,), "Complete checkpoints: step 1;")],
)
def test_a_save_that_fails_names_the_checkpoints_that_there_are(saved, said, opened, monkeypatch):
    checkpoints = opened(keep=2, retries=0)
    for step in saved:
        checkpoints.save(step, state(step), {})
    assert not checkpoints.wait()
    failing_saves(checkpoints, monkeypatch, 1)
    with pytest.raises(UserError, match=f"No space left.*{said}"):
        checkpoints.save(2, state(2), {})
        checkpoints.wait()


@pytest.mark.parametrize("times", [1, 3])
def test_a_save_that_fails_for_a_while(times, opened, tmp_path, monkeypatch):
    checkpoints = opened(keep=1, retries=3)
    checkpoints.save(1, state(1), {})
    failing_saves(checkpoints, monkeypatch, times)
    checkpoints.save(2, state(2), {})
    assert steps(tmp_path) == [1] and checkpoints.has_failed()
    checkpoints.save(3, state(3), {"data": 3})
    assert not checkpoints.wait() and steps(tmp_path) == [3]
    assert opened(keep=1).restore(jax.tree.map(shape, state(0)))[1] == {"data": 3}


def test_a_save_that_fails_too_often(opened, tmp_path, monkeypatch):
    checkpoints = opened(keep=1, retries=2)
    checkpoints.save(1, state(1), {})
    failing_saves(checkpoints, monkeypatch, 9)
    checkpoints.save(2, state(2), {})
    assert checkpoints.wait()
    with pytest.raises(UserError, match="No space left on device.*: step 1;"):
        checkpoints.save(2, state(2), {})
    assert steps(tmp_path) == [1]


def test_a_store_that_is_away_for_a_while(opened, tmp_path, monkeypatch):
    """The directory cannot be opened then; errors of a store are no OSErrors."""
    checkpoints = opened(keep=1, retries=3)
    checkpoints.save(1, state(1), {})
    failing_saves(checkpoints, monkeypatch, 2)
    again, left = checkpoints._opened, [2]

    def away():
        if left[0]:
            left[0] -= 1
            raise RuntimeError("503, the service is unavailable")
        return again()

    monkeypatch.setattr(checkpoints, "_opened", away)
    checkpoints.save(2, state(2), {})
    assert checkpoints.has_failed()
    checkpoints.save(3, state(3), {})
    assert not checkpoints.wait() and steps(tmp_path) == [3]


def test_a_store_that_stays_away(opened, monkeypatch):
    checkpoints = opened(keep=1, retries=0)
    checkpoints.save(1, state(1), {})
    failing_saves(checkpoints, monkeypatch, 1)

    def away(directory):
        raise RuntimeError("503, the service is unavailable")

    monkeypatch.setattr(type(checkpoints.directory), "iterdir", away)
    with pytest.raises(UserError, match="No space left.*Complete checkpoints: step 1;"):
        checkpoints.save(2, state(2), {})
        checkpoints.wait()


def test_the_note_of_the_first_save_is_written_again(opened, tmp_path, monkeypatch):
    begin, failed = checkpoint.first_save.begin, []

    def failing(workdir, step):
        if not failed:
            failed.append(step)
            raise OSError(28, "No space left on device", "/disk/file")
        begin(workdir, step)

    monkeypatch.setattr(checkpoint.first_save, "begin", failing)
    monkeypatch.setattr(checkpoint.retries.time, "sleep", lambda seconds: None)
    opened(keep=1, retries=1).save(1, state(1), {})
    assert failed == [1] and steps(tmp_path) == [1]


def test_none_is_deleted_after_a_flush_that_failed(opened, tmp_path, monkeypatch):
    """What was not written is lost then, and the next flush says nothing of it."""
    checkpoints, failed = opened(keep=1, retries=1), []

    def failing(directory):
        if directory.name == "2" and not failed:
            failed.append(directory)
            raise OSError(5, "Input/output error", str(directory))

    monkeypatch.setattr(checkpoint, "sync_all", failing)
    monkeypatch.setattr(checkpoint.retries.time, "sleep", lambda seconds: None)
    for step in (1, 2):
        checkpoints.save(step, state(step), {})
    assert checkpoints.wait() and failed
    checkpoints.save(3, state(3), {})
    assert {1, 2} < set(steps(tmp_path))  # when the save of 3 began, 2 may have been lost
    assert not checkpoints.wait() and steps(tmp_path) == [3]


def test_none_is_deleted_before_the_disk_has_the_next(opened, tmp_path, monkeypatch):
    """Every file of it, its folders and its name."""
    checkpoints, synced = opened(keep=1), set()
    sync = os.fsync

    def noting(handle):
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    delete = checkpoint.ocp.CheckpointManager.delete

    def deleting(manager, step):
        newest = tmp_path / "checkpoints" / str(step + 1)
        assert {str(p) for p in (newest, newest.parent, *newest.rglob("*"))} <= synced
        delete(manager, step)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "delete", deleting)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {})
    checkpoints.wait()
    assert steps(tmp_path) == [3]


@pytest.fixture
def other(monkeypatch):
    """Makes another process that sees these steps, and a clock that only naps move; the naps."""

    def other(seen: list[list[int]]) -> list[float]:
        naps: list[float] = []

        def together(numbers):
            crc = zlib.crc32(json.dumps(seen[min(len(naps), len(seen) - 1)]).encode()) >> 1
            theirs = [crc, -crc] if len(numbers) == 2 else [0]
            return [max(pair) for pair in zip(numbers, theirs, strict=True)]

        monkeypatch.setattr(sharding, "max_of_each", together)
        clock = SimpleNamespace(monotonic=lambda: sum(naps), sleep=naps.append)
        monkeypatch.setattr(items, "time", clock)
        return naps

    return other


def test_a_process_with_an_old_list_of_checkpoints_is_awaited(opened, other):
    """Else it would begin with an older checkpoint than the others, without an error."""
    kept, read = opened(2), []
    kept.save(1, state(1), {})
    kept.wait()
    naps = other([[], [], [], [1]])
    items.wait_for_same(kept.steps, lambda: read.append(1), kept.directory)
    assert naps == [1.0] * 3 and len(read) == 3


def test_machines_that_do_not_share_the_directory_are_told(opened, other):
    kept = opened(2)
    kept.save(1, state(1), {})
    kept.wait()
    naps = other([[]])
    with pytest.raises(UserError, match=r"this one sees those of the steps \[1\]: --workdir must"):
        kept.restore(jax.eval_shape(lambda: state(1)))
    assert sum(naps) == pytest.approx(items.LISTED_SECONDS, abs=2)
