"""Base of a run: its frozen parameters, written once, whole or not at all, and checked."""

import json

import chex
import jax
import jax.numpy as jnp
import pytest

from md4_jax.protocols import UserError
from md4_jax.runtime import paths
from md4_jax.training import base, items

# What TensorStore's threads say after a failed read; main silences it for users.
quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def frozen(shift: float = 0.0):
    leaves = {"w": jnp.arange(6.0).reshape(2, 3) + shift, "v": jnp.ones(4)}
    return {"network": {"blocks": leaves, "half": jnp.arange(3.0).astype(jnp.bfloat16)}}


def template(dtype=None):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place), frozen()
    )


def read(workdir, wanted=None):
    """Reads the base that a checkpoint of the same run goes with."""
    return base.read(workdir, wanted or template(), base.mark(workdir))


@pytest.fixture
def workdir(tmp_path):
    return paths.place(tmp_path)


def files(workdir) -> dict[str, int]:
    return {
        str(path.relative_to(workdir)): path.stat().st_mtime_ns
        for path in sorted(workdir.rglob("*"))
        if path.is_file()
    }


def test_it_is_read_as_it_was_written(workdir, tmp_path):
    base.keep(workdir, frozen())
    found = read(workdir)
    chex.assert_trees_all_equal(found, frozen())
    chex.assert_trees_all_equal_dtypes(found, frozen())
    # The same again is left as it is.
    before = files(tmp_path)
    base.keep(workdir, frozen())
    assert files(tmp_path) == before


def test_it_is_read_in_the_type_that_is_asked_for(workdir):
    base.keep(workdir, frozen())
    found = read(workdir, template(jnp.bfloat16))
    wanted = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen())
    chex.assert_trees_all_equal(found, wanted)
    chex.assert_trees_all_equal_dtypes(found, wanted)


def test_it_is_read_part_by_part(workdir, monkeypatch):
    base.keep(workdir, frozen())
    monkeypatch.setattr(items, "PART_BYTES", 1)
    asked, read_part = [], items.read_part
    monkeypatch.setattr(
        items, "read_part", lambda folder, part: asked.append(list(part)) or read_part(folder, part)
    )
    chex.assert_trees_all_equal(read(workdir), frozen())
    assert [len(part) for part in asked] == [1, 1, 1]


def test_nothing_frozen_writes_and_reads_nothing(workdir, tmp_path):
    base.keep(workdir, ())
    assert base.read(workdir, (), {}) == () and list(tmp_path.iterdir()) == []


def test_the_base_of_a_start_without_a_checkpoint_is_moved_aside(workdir, tmp_path):
    base.keep(workdir, frozen())
    base.keep(workdir, frozen(shift=1.0))
    chex.assert_trees_all_equal(read(workdir), frozen(shift=1.0))
    (aside,) = (tmp_path / "unreadable_checkpoints").iterdir()
    moved = aside.rename(tmp_path / "other").parent / "other"
    (tmp_path / "run").mkdir()
    moved.rename(tmp_path / "run" / base.FOLDER)
    chex.assert_trees_all_equal(read(workdir / "run"), frozen())


def test_a_base_whose_writing_was_cut_short(workdir, tmp_path):
    """Without its record it is none, and is written anew."""
    base.keep(workdir, frozen())
    (tmp_path / base.FOLDER / base.RECORD).unlink()
    with pytest.raises(UserError, match="base with the frozen .* is missing or incomplete"):
        read(workdir)
    base.keep(workdir, frozen())
    chex.assert_trees_all_equal(read(workdir), frozen())


def change_record(tmp_path, change) -> None:
    file = tmp_path / base.FOLDER / base.RECORD
    record = json.loads(file.read_text())
    record.pop("crc32")
    change(record)
    file.write_text(json.dumps({**record, "crc32": items.crc32(record)}))


def test_a_changed_array_is_named(workdir, tmp_path):
    base.keep(workdir, frozen())

    def change(record):
        record["checksums"]["network/blocks/w"] += 1

    change_record(tmp_path, change)
    with pytest.raises(UserError, match="network/blocks/w has a wrong checksum"):
        read(workdir)


def test_a_damaged_record_is_named(workdir, tmp_path):
    base.keep(workdir, frozen())
    file = tmp_path / base.FOLDER / base.RECORD
    file.write_text(file.read_text().replace('"float32"', '"float64"'))
    with pytest.raises(UserError, match=r"base/record.json is damaged \(its checksum is wrong"):
        read(workdir)


def test_a_base_with_a_damaged_record_is_moved_aside_by_a_run_that_begins(workdir, tmp_path):
    base.keep(workdir, frozen())
    (tmp_path / base.FOLDER / base.RECORD).write_text("{")
    base.keep(workdir, frozen())
    chex.assert_trees_all_equal(read(workdir), frozen())
    assert len(list((tmp_path / "unreadable_checkpoints").iterdir())) == 1


def test_the_base_of_another_run_is_refused(workdir):
    """Its checkpoints were saved beside other values of the same parameters."""
    base.keep(workdir / "one", frozen())
    base.keep(workdir / "other", frozen(shift=1.0))
    with pytest.raises(UserError, match="one/base does not belong to the checkpoints beside it"):
        base.read(workdir / "one", template(), base.mark(workdir / "other"))
    with pytest.raises(UserError, match="one/base does not belong to the checkpoints beside it"):
        base.read(workdir / "one", template(), {})


@quiet
def test_lost_arrays_are_named(workdir, tmp_path):
    base.keep(workdir, frozen())
    for file in (tmp_path / base.FOLDER / base.ARRAYS).rglob("d/*"):
        file.write_text("")
    with pytest.raises(
        UserError, match="the frozen parameters of the run, cannot be read: .+Restore"
    ):
        read(workdir)


def test_a_parameter_that_the_base_lacks_is_named(workdir):
    base.keep(workdir, {"network": {"half": frozen()["network"]["half"]}})
    with pytest.raises(UserError, match="lacks network/blocks/v, which the network of this config"):
        read(workdir)


@quiet
def test_a_base_that_cannot_be_read_back_is_refused(workdir, monkeypatch):
    monkeypatch.setattr(base, "_difference", lambda *_: "it differs")
    with pytest.raises(UserError, match="base was written, but cannot be read back: it differs"):
        base.keep(workdir, frozen())


def test_a_write_that_fails_is_repeated(workdir, monkeypatch):
    real, failures = base._write, [OSError(28, "No space left on device")] * 2

    def write(*arguments):
        if failures:
            raise failures.pop()
        real(*arguments)

    monkeypatch.setattr(base, "_write", write)
    monkeypatch.setattr(base.retries, "FIRST_PAUSE", 0.0)
    with pytest.raises(UserError, match="could not be saved in .*base: .*No space left"):
        base.keep(workdir, frozen(), again=0)
    base.keep(workdir, frozen(), again=1)
    chex.assert_trees_all_equal(read(workdir), frozen())
