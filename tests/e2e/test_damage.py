"""Checkpoints that are broken on the disk, a full disk, and losses that are not finite."""

import errno
import gc
import os
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.config import build
from md4_jax.config import load as config
from md4_jax.data.domains import stored_domain
from md4_jax.objectives.md4 import MD4
from md4_jax.runtime.paths import place
from md4_jax.training import loop as train
from md4_jax.training.checkpoint import Checkpoints
from md4_jax.training.writers import Writer

# What TensorStore's threads say after a failed read; main silences it for users.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected():
    """What Orbax leaves of a failed read is collected within the test that made it fail."""
    yield
    gc.collect()


def kinds(checkpoint: Path) -> dict[str, Path]:
    """One file for each kind of file in a checkpoint; names that are hashes become *."""
    found = {}
    for file in sorted(p for p in checkpoint.rglob("*") if p.is_file()):
        found.setdefault(re.sub(r"[0-9a-f]{32}", "*", str(file.relative_to(checkpoint))), file)
    return found


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path, place: float = 0.5, bit: int = 3) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    file.write_bytes(content)


DAMAGES = {"cut": cut, "empty": empty, "deleted": os.remove, "flipped": flip}


@pytest.fixture(scope="module")
def exp(trained):
    asked = config.stored(trained)
    return build.experiment(asked, stored_domain(trained, asked["data"]["length"]))


def restore(exp, workdir: Path) -> tuple[int, dict[str, bytes], list[str]]:
    """(step, bytes of all arrays and the host's state, what was said)."""
    said = []
    checkpoints = Checkpoints(workdir / "checkpoints", exp.checkpoint)
    state, host = checkpoints.restore(train.abstract_state(exp), say=said.append)
    checkpoints.close()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    content = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
    return int(state.step), content | {"host": repr(host)}, said


@pytest.fixture(scope="module")
def intact(exp, trained, scratch):
    """{step: content} of the two newest checkpoints."""
    workdir = Path(shutil.copytree(trained, scratch / "intact"))
    newest = restore(exp, workdir)
    shutil.rmtree(workdir / "checkpoints" / "30")
    before = restore(exp, workdir)
    assert (newest[0], before[0]) == (30, 28)
    return {30: newest[1], 28: before[1]}


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "flipped",
        *(pytest.param(k, marks=pytest.mark.campaign) for k in ("empty", "deleted")),
    ],
)
@pytest.mark.cases(1)
def test_each_kind_of_file(damage, exp, trained, intact, tmp_path):
    """Either the file is not needed and every byte is read, or the checkpoint before is taken."""
    fell_back = set()
    for number, kind in enumerate(kinds(trained / "checkpoints" / "30")):
        workdir = tmp_path / str(number)
        shutil.copytree(trained / "checkpoints", workdir / "checkpoints")
        DAMAGES[damage](kinds(workdir / "checkpoints" / "30")[kind])
        step, content, said = restore(exp, workdir)
        assert step in (28, 30), (kind, said)
        assert content == intact[step], (kind, said)
        if step == 28:
            fell_back.add(kind)
            assert not (workdir / "checkpoints" / "30").exists(), kind
            assert "checkpoint 30" in said[0] and "cannot be read" in said[0], kind
            assert any("moved the unreadable checkpoint 30 to" in line for line in said)
            assert len(list((workdir / "unreadable_checkpoints").iterdir())) == 1
    assert {kind.split("/")[0] for kind in fell_back} >= {"ema", "train", "host"}


def test_no_flipped_bit_passes_unseen(exp, trained, intact, tmp_path):
    """30 bits, each in a random place of the arrays' files or of the host's state."""
    rng = np.random.default_rng(0)
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    newest, pristine = tmp_path / "checkpoints" / "30", trained / "checkpoints" / "30"
    files = sorted(p.relative_to(newest) for p in newest_data(tmp_path))
    files += sorted(p.relative_to(newest) for p in (newest / "host").iterdir())
    fell_back = 0
    for _ in range(30):
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(pristine, newest)
        file = files[rng.integers(len(files))]
        flip(newest / file, rng.random(), rng.integers(8))
        step, content, said = restore(exp, tmp_path)
        assert content == intact[step], (file, said)
        fell_back += step == 28
    # Which bits matter depends on the names of the files, which differ from run to run.
    assert fell_back > 2, "most flips met bytes that nobody reads"


def newest_data(workdir: Path) -> list[Path]:
    """The files of the newest checkpoint that hold the arrays."""
    return [p for p in (workdir / "checkpoints" / "30").rglob("d/*") if p.is_file()]


def break_all(files: list[Path]) -> None:
    for file in files:
        empty(file)


def test_training_goes_on_from_the_checkpoint_before(copy, run, tiny, trained, same_run):
    break_all(newest_data(copy))
    ended = run("--config", tiny, "--workdir", copy)
    assert ended.code == 0, ended
    assert "checkpoint 30 in" in ended.out and "cannot be read" in ended.out
    assert "resuming from step 28\n" in ended.out
    assert [p.name.split("-")[0] for p in (copy / "unreadable_checkpoints").iterdir()] == ["30"]
    same_run(copy, trained)


@pytest.mark.parametrize("mode", ["eval", "sample"])
@pytest.mark.cases(1)
def test_reading_modes_take_the_one_before_and_change_nothing(mode, copy, run, tiny, snapshot):
    break_all(newest_data(copy))
    before = snapshot(copy / "checkpoints")
    ended = run("--config", tiny, "--workdir", copy, "--mode", mode)
    assert ended.code == 0, ended
    assert "checkpoint 30 in" in ended.out and "falling back" in ended.out
    assert "step 28" in ended.out
    assert snapshot(copy / "checkpoints") == before


@pytest.mark.parametrize("mode", ["train", "eval", "sample"])
def test_no_checkpoint_can_be_read(mode, copy, refused, tiny, snapshot):
    break_all([p for p in (copy / "checkpoints").rglob("d/*") if p.is_file()])
    before = snapshot(copy)
    message = refused("--config", tiny, "--workdir", copy, "--mode", mode)
    assert "none of the checkpoints [21, 28, 30] in" in message
    after = snapshot(copy)
    assert {k: v for k, v in after.items() if k in before} == before  # nothing lost or changed
    assert all(name.startswith("tensorboard") for name in after.keys() - before.keys())


def test_no_checkpoint_is_there_any_more(copy, refused, tiny, snapshot):
    shutil.rmtree(copy / "checkpoints")
    before = snapshot(copy)
    for words in ((), ("--config", tiny)):
        message = refused("--workdir", copy, *words)
        assert f"{copy} holds no checkpoint, but it has been trained to step 30" in message
        assert snapshot(copy) == before


@pytest.mark.parametrize("mode", ["train", "eval", "sample"])
@pytest.mark.cases(1)
def test_a_tokenizer_cut_short(mode, copy, refused, run, tiny, snapshot, same_run, trained):
    kept = copy / "tokenizer.json"
    cut(kept)
    before = snapshot(copy)
    message = refused("--config", tiny, "--workdir", copy, "--mode", mode)
    assert f"{kept} is damaged" in message
    assert snapshot(copy) == before
    kept.rename(copy / "moved")  # as the message says
    assert run("--config", tiny, "--workdir", copy).code == 0
    assert kept.read_bytes() == (trained / "tokenizer.json").read_bytes()
    same_run(copy, trained)


@pytest.fixture
def of_a_file(run, tiny, tmp_path):
    """A run on a text file, of 7 steps; (its text file, its workdir, its arguments)."""
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text("".join(rng.choice(list("abc \n"), 9000)))
    arguments = ("--config", tiny, "--workdir", tmp_path / "run", "--config.data.name=text")
    arguments += (f"--config.data.path={text}", "--config.train.num_steps=7")
    arguments += (
        "--config.evals.validation.every=0",
        "--config.network.depth=1",
        "--config.sample.num=1",
    )
    assert run(*arguments).code == 0
    return text, tmp_path / "run", arguments


def test_a_run_is_not_resumed_on_another_text(of_a_file, refused, run, snapshot):
    """Even one of the same length, written with the old time; the old text is taken back."""
    text, workdir, arguments = of_a_file
    content, at, before = text.read_text(), text.stat(), snapshot(workdir)
    text.write_text(content.replace("a", "b", 1))
    os.utime(text, ns=(at.st_atime_ns, at.st_mtime_ns))
    message = refused(*arguments)
    assert f"{workdir} was trained on another text" in message
    assert len(set(re.findall(r"8,100 tokens, CRC-32 ([0-9a-f]{8})", message))) == 2
    assert snapshot(workdir) == before
    text.write_text(content)
    assert run(*arguments).code == 0


@pytest.mark.campaign
def test_a_checkpoint_without_a_fingerprint_is_resumed(of_a_file, run, monkeypatch):
    text, _, arguments = of_a_file
    read = Checkpoints.restore

    def old(self, template, say=print):
        found = read(self, template, say)
        if found is not None:
            found[1].pop("text")
        return found

    monkeypatch.setattr(Checkpoints, "restore", old)
    text.write_text(text.read_text().replace("a", "b"))
    assert run(*arguments).code == 0


@pytest.mark.campaign
def test_kept_tokens_that_are_damaged_are_made_again(copy, run, tiny, scratch, trained, same_run):
    shutil.rmtree(copy / "checkpoints" / "30")
    for file in (scratch / "cache" / "tokens").glob("train-*"):
        if not file.name.endswith(".json"):
            cut(file)
    ended = run("--config", tiny, "--workdir", copy)
    assert ended.code == 0, ended
    assert "is damaged or was changed: tokens is 501927, not 1003854" in ended.out
    assert "resuming from step 28" in ended.out
    same_run(copy, trained)


@pytest.fixture
def small_disk(tmp_path):
    """A directory with room for a few megabytes."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(where)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.campaign
@pytest.mark.parametrize("free_kib", [600, 8])
def test_the_disk_is_full(free_kib, small_disk, tiny, trained, start, program, same_run):
    """Whatever it is that finds no room, it is said, and with more room the run is the same.

    Disks with some hundred KiB free are among the faults of chaos.py too.
    """
    workdir = small_disk / "run"
    arguments = ("--config", tiny, "--workdir", workdir, "--config.checkpoint.retries=0")
    driver = tiny.with_name("driver.py")
    process = start(driver, "kill-in-save", 14, *arguments)
    process.communicate(timeout=120)
    assert [p.name for p in (workdir / "checkpoints").glob("7*")] == ["7"]
    room = os.statvfs(small_disk)
    filling = room.f_bavail * room.f_frsize - free_kib * 1024
    (small_disk / "filling").write_bytes(bytes(max(0, filling)))
    ended = program(*arguments)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    assert ended.err.count("error: ") == 1 and str(workdir) in ended.err
    assert "No space left" in ended.err or "free some space" in ended.err
    (small_disk / "filling").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    ended = program(*arguments)
    assert ended.code == 0, ended
    assert re.search(r"resuming from step (7|14|21|28)\n", ended.out)
    same_run(workdir, trained)


def test_metrics_cannot_be_written(tmp_path, run, tiny, monkeypatch):
    def full(self, step, numbers):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "metrics.jsonl"))

    monkeypatch.setattr(Writer, "write", full)
    ended = run("--config", tiny, "--workdir", tmp_path / "run")
    assert ended.code == 2
    assert "No space left on device" in ended.err and "Traceback" not in ended.err


def test_a_workdir_that_cannot_be_written(tiny, tmp_path, refused):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    message = refused("--config", tiny, "--workdir", tmp_path / "run")
    assert str(tmp_path / "run") in message and "cannot be written" in message


def test_a_run_of_somebody_else_may_be_copied(copy, refused, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(type(place(copy)), "write_text", refuse)
    for mode, where in (("train", f"--workdir {copy}"), ("sample", f"{copy}/samples")):
        message = refused("--workdir", copy, "--mode", mode)
        assert f"{where} cannot be written: Permission denied. Copy the run to a dir" in message
    assert "or draw samples in Python, which writes no files" in message


@pytest.fixture
def poisoned(monkeypatch):
    """From the step on, so many losses are not finite; steps count from 1."""

    def poisoned(first: int, count: int) -> None:
        make = train.make_train_step

        def poison(*parts, **options):
            step_fn = make(*parts, **options)

            def step(state, batch):
                bad = (state.step + 1 >= first) & (state.step + 1 < first + count)
                poison = jnp.where(bad, jnp.nan, 0.0)
                seen = jax.tree.map(lambda x: x + poison, state.params)
                new, metrics = step_fn(state._replace(params=seen), batch)
                kept = jax.tree.map(lambda a, b: jnp.where(bad, b, a), new.params, state.params)
                return new._replace(params=kept), metrics

            return step

        monkeypatch.setattr(train, "make_train_step", poison)

    return poisoned


@pytest.mark.campaign
def test_steps_that_are_skipped_are_counted(poisoned, run, tiny, tmp_path, rows, arrays):
    poisoned(first=11, count=3)
    workdir = tmp_path / "run"
    ended = run("--config", tiny, "--workdir", workdir)
    assert ended.code == 0, ended
    assert "step 11 skipped: non-finite loss, gradient or update" in ended.err
    assert ", 2 skipped" in ended.err and ", 3 skipped" in ended.err
    lines = [row for row in rows(workdir) if "skipped" in row]
    assert [row["skipped"] for row in lines] == [0, 0, 0, 2, 3, 3, 3, 3, 3, 3]
    assert all(np.isfinite(row["train_bits_per_token"]) for row in lines)
    final = arrays(workdir)
    assert final["skipped"] == 3 and final["skipped_in_a_row"] == 0 and final["step"] == 30
    assert all(np.isfinite(value).all() for value in final.values())


@pytest.mark.campaign
def test_too_many_in_a_row_stop_the_run(poisoned, run, tiny, tmp_path, arrays, rows, monkeypatch):
    poisoned(first=17, count=1000)
    workdir = tmp_path / "run"
    arguments = ("--config", tiny, "--workdir", workdir, "--config.train.max_skipped_in_a_row=6")
    ended = run(*arguments)
    assert ended.code == 2
    assert "6 steps in a row had a non-finite loss" in ended.err
    assert "train.max_skipped_in_a_row=6" in ended.err and "optim.learning_rate" in ended.err
    assert "Traceback" not in ended.err
    final = arrays(workdir)
    assert final["step"] == 21
    assert all(np.isfinite(value).all() for value in final.values())
    monkeypatch.undo()  # the cause is mended: the same command goes on
    ended = run(*arguments)
    assert ended.code == 0, ended
    assert arrays(workdir)["skipped"] == 5  # of the 21 steps in the checkpoint


@pytest.mark.campaign
def test_a_learning_rate_that_diverges(run, tiny, tmp_path, arrays):
    """Whatever it does to the loss, what is saved stays finite."""
    workdir = tmp_path / "run"
    ended = run(
        *("--config", tiny, "--workdir", workdir, "--config.optim.learning_rate=1e30"),
        *("--config.optim.warmup_steps=0", "--config.train.max_skipped_in_a_row=8"),
    )
    assert ended.code == 2
    assert "8 steps in a row had a non-finite loss" in ended.err
    assert all(np.isfinite(value).all() for value in arrays(workdir).values())


def test_no_finite_loss_at_all(run, tiny, tmp_path, monkeypatch):
    def never(self, denoiser, process, batch, u, keys):
        return jnp.full(batch.tokens.shape[:1], np.nan), {}

    monkeypatch.setattr(MD4, "__call__", never)
    workdir = tmp_path / "run"
    ended = run(
        *("--config", tiny, "--workdir", workdir, "--config.train.max_skipped_in_a_row=5"),
    )
    assert ended.code == 2
    assert "5 steps in a row" in ended.err
    assert not list((workdir / "checkpoints").glob("[0-9]*"))
