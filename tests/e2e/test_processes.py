"""One program in several processes: the same data, draws and losses as in one."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import runs as kept
from peer_folders import peer_folder
from runs import free_port

from md4_jax.protocols import UserError
from md4_jax.runtime import distributed

pytestmark = pytest.mark.slow

WIDE = ("network.size=64", "network.heads=8", "network.hidden=64", "network.depth=1")
OFTEN = (
    *("train.num_steps=6", "log.every=1", "evals.validation.every=2", "checkpoint.every=3"),
    *("checkpoint.keep=1", "checkpoint.best=validation"),
    *("optim.learning_rate=0.001", "sample.num=5", "sample.batch_size=4"),
    "evals.test.batch_size=512",
)
# name: (processes, devices of each, mesh)
RUNS = {
    "one": (1, 4, ("mesh.data=4",)),
    "two, data": (2, 2, ("mesh.data=4",)),
    "two, fsdp": (2, 2, ("mesh.data=2", "mesh.fsdp=2")),
    "four, tensor across two": (4, 1, ("mesh.data=2", "mesh.tensor=2")),
    "two, context": (2, 2, ("mesh.data=1", "mesh.context=4")),
}
FOUR = "four, tensor across two"
RARE = ("two, data", FOUR, "two, context")
OTHERS = [
    "two, fsdp",
    *(pytest.param(name, marks=pytest.mark.campaign) for name in RARE),
]
ROUNDING = 2e-5  # relative; float32 sums in another order, six updates on


@pytest.fixture(scope="module")
def together(start):
    """Runs one command in several processes that share a directory: [(out, err, code)].

    own: more words of each process.
    """

    def together(processes: int, devices: int, *arguments, own=()):
        port = free_port()
        flags = f"--xla_force_host_platform_device_count={devices}"
        started = []
        for index in range(processes):
            words = [f"--distributed=127.0.0.1:{port},{processes},{index}"]
            words = words if processes > 1 else []
            words = ["-m", "md4_jax.main", *arguments, *words, *(own[index] if own else ())]
            started.append(start(*words, XLA_FLAGS=flags))
        return [(*p.communicate(timeout=900), p.returncode) for p in started]

    return together


# The library under the collectives writes from several threads, whose words mix within a line.
GLOO = {"Gloo", "Rank", "is", "connected", "to", "peer", "ranks", "Expected", "number", "of"}


def said(out: str) -> list[str]:
    """What is not said by the library under the collectives."""
    return [line for line in out.splitlines() if set(re.findall("[A-Za-z]+", line)) - GLOO]


@pytest.fixture(scope="module")
def runs(together, tiny, once):
    """{name: workdir} of the same run by so many processes, made when it is asked for."""

    class Runs(dict):
        def __missing__(self, name):
            processes, devices, mesh = RUNS[name]

            def make(directory):
                flags = [f"--config.{word}" for word in (*WIDE, *OFTEN, *mesh)]
                words = ("--config", tiny, "--workdir", directory, *flags)
                ended = together(processes, devices, *words)
                assert all(code == 0 for _, _, code in ended), ended
                others = [said(out) for out, _, _ in ended[1:]]
                assert others == [[]] * (processes - 1)  # one writes

            self[name] = once(f"processes {name}", make)
            return self[name]

    return Runs()


def saved(workdir) -> list[int]:
    return sorted(int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit())


def numbers(found: list[dict], name: str) -> np.ndarray:
    return np.array([row[name] for row in found if name in row])


@pytest.mark.parametrize("name", OTHERS)
def test_losses_and_draws(name, runs, rows):
    """Losses to rounding; shares of masked tokens, which order and draws decide, exactly."""
    found, expected = rows(runs[name]), rows(runs["one"])
    assert [r.keys() for r in found] == [r.keys() for r in expected]
    for key in ("train_bits_per_token", "grad_norm", "validation/nats_per_token"):
        got, wanted = numbers(found, key), numbers(expected, key)
        assert len(wanted) == (3 if key.startswith("validation") else 6)
        np.testing.assert_allclose(got, wanted, rtol=ROUNDING, err_msg=key)
    assert numbers(found, "masked").tolist() == numbers(expected, "masked").tolist()


@pytest.mark.parametrize("name", OTHERS)
def test_samples_and_the_whole_split(name, runs):
    """Five samples in batches of four; the test split, whose last batch is not full."""
    file = "samples/step_00000006.jsonl"
    assert (runs[name] / file).read_text() == (runs["one"] / file).read_text()
    found, expected = (kept.evaluated(runs[n]) for n in (name, "one"))
    for count in ("sequences", "tokens", "bytes", "words"):
        assert found[count] == expected[count] > 0
    assert found["nats_per_token"] == pytest.approx(expected["nats_per_token"], rel=ROUNDING)
    assert found["nats_per_token_se"] == pytest.approx(expected["nats_per_token_se"], rel=1e-3)


@pytest.mark.campaign
def test_the_bench_times_one_batch_together(together, tiny, tmp_path):
    """Each process makes its rows of it, and all call a program equally often."""
    words = ("--mode", "bench", "--config", tiny, "--workdir", tmp_path / "run")
    keys = ("bench.windows=2", "bench.seconds=0.05", "mesh.data=4", "sample.batch_size=6", *WIDE)
    ended = together(2, 2, *words, *(f"--config.{key}" for key in keys))
    assert all(code == 0 for _, _, code in ended), ended
    assert said(ended[1][0]) == []
    result = json.loads(said(ended[0][0])[-1])
    tokens = {"train": 8 * 16, "eval": 64 * 16, "sample": 8 * 16, "data": 8 * 16}
    for part, count in tokens.items():
        found = result[part]["tokens_per_second"] * result[part]["seconds"]
        assert found == pytest.approx(count)


@pytest.mark.campaign
def test_steered_samples(runs, together):
    """By one process and by two, with the same number of devices: particles are split over both."""
    workdir, found = runs["two, fsdp"], []
    reward = ("name=pattern", "pattern=e", "particles=4", "every=2", "threshold=1")
    words = ("--mode", "sample", "--workdir", workdir, "--config.sample.steps=6")
    words += tuple(f"--config.sample.reward.{word}" for word in reward)
    for processes, devices in ((1, 4), (2, 2)):
        ended = together(processes, devices, *words)
        assert all(code == 0 for _, _, code in ended), ended
        numbers = json.loads(said(ended[0][0])[-1])
        found.append(Path(numbers["texts"]).with_suffix(".jsonl").read_text())
    rewards = [json.loads(line)["reward"] for line in found[0].splitlines()]
    assert found[0] == found[1] and len(rewards) == 5 and max(rewards) > 0


@pytest.mark.campaign
def test_a_policy_learns_from_a_judge(together, tiny, tmp_path, rows):
    """The judge computes on the devices of both processes, each of which draws half the texts."""
    judge = peer_folder(tmp_path, "gpt2")
    words = ("train.num_steps=3", "log.every=1", "optim.warmup_steps=1", "checkpoint.every=0")
    words += ("objective.name=policy", "objective.group=2", "evals.validation.every=0")
    words += ("evals.test.final=False", "evals.samples.final=False", "mesh.data=2")
    words += ("sample.reward.name=judge", f"sample.reward.judge={judge}")
    found = []
    for processes in (1, 2):
        workdir = tmp_path / str(processes)
        flags = [f"--config.{word}" for word in words]
        ended = together(processes, 2 // processes, "--config", tiny, "--workdir", workdir, *flags)
        assert all(code == 0 for _, _, code in ended), ended
        found.append(numbers(rows(workdir), "reward"))
    np.testing.assert_allclose(found[1], found[0], rtol=ROUNDING)
    assert len(found[0]) == 3 and (found[0] < -10).all()


@pytest.mark.parametrize("name", ["one", *OTHERS])
def test_the_last_and_the_best_are_kept(name, runs, rows):
    """Each evaluation may save, by all processes together, between the steps that are due."""
    found = {r["step"]: r.get("validation/nats_per_token", np.inf) for r in rows(runs[name])}
    assert saved(runs[name]) == sorted({min(found, key=found.get), 6})


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_are_close(name, runs, arrays):
    found, expected = arrays(runs[name]), arrays(runs["one"])
    assert found.keys() == expected.keys()
    for key in found:
        if key.startswith(("params", "ema")):
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.campaign
def test_the_number_of_processes_may_change_when_a_run_is_continued(
    runs, together, tiny, tmp_path, rows, arrays
):
    """A step by four processes, one by two, four by one: as undisturbed, to rounding."""
    workdir = tmp_path / "run"
    common = ["--config", tiny, "--workdir", workdir]
    common += [f"--config.{word}" for word in (*WIDE, *OFTEN)]
    # The budget ends a part after its first step.
    brief = ["--config.train.seconds=1e-6", "--config.log.every=2"]
    parts = {
        4: (1, ["--config.mesh.data=4", *brief]),
        2: (2, ["--config.mesh.data=2", "--config.mesh.fsdp=2", *brief]),
        1: (1, []),
    }
    for number, (processes, (devices, words)) in enumerate(parts.items()):
        ended = together(processes, devices, *common, *words)
        assert all(code == 0 for _, _, code in ended), ended
        assert (f"resuming from step {number}\n" in ended[0][0]) == (number > 0)
    found, expected = rows(workdir), rows(runs["one"])
    for key, tolerance in (("train_bits_per_token", ROUNDING), ("masked", 1e-6)):
        wanted = numbers(expected, key)
        # The first line is the mean of two steps, by different processes.
        means = [wanted[:2].mean(), *wanted[2:]]
        np.testing.assert_allclose(numbers(found, key), means, rtol=tolerance, err_msg=key)
    ends = [numbers(r, "validation/nats_per_token")[-1] for r in (found, expected)]
    assert ends[0] == pytest.approx(ends[1], rel=ROUNDING)
    mine, theirs = arrays(workdir), arrays(runs["one"])
    for key in mine:
        if key.startswith(("params", "ema")):
            np.testing.assert_allclose(mine[key], theirs[key], rtol=1e-3, atol=1e-4, err_msg=key)


def test_processes_with_different_settings_are_refused(together, tiny, tmp_path):
    common = ("--config", tiny, "--workdir", tmp_path / "run")
    own = ([], ["--config.train.seed=7", "--config.data.store=elsewhere"])
    (_, first, code), (_, second, other) = together(2, 1, *common, own=own)
    assert (code, other) == (2, 2)
    assert "train.seed=7 in this process and 0 in process 0. Start" in second
    assert "different settings, which another process names" in first
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign
def test_what_process_0_alone_cannot_write_ends_both_with_a_sentence(together, tiny, copy):
    """Neither process is ended by the runtime of the other, and later evaluators still run."""
    shutil.rmtree(copy / "samples")
    (copy / "samples").touch()
    evals = ("--mode", "eval", "--evals", "samples,test", "--config.sample.num=2")
    (out, first, code), (other_out, second, other) = together(2, 1, "--workdir", copy, *evals)
    assert (code, other) == (2, 2) and not said(other_out)
    assert [line for line in first.splitlines() if line] == [
        f"error: evals.samples: {copy / 'samples'}: File exists (errno 17): correct that"
    ]
    assert second == "error: evals.samples failed in another process, which says why\n"
    assert "bits_per_token" in json.loads(said(out)[-1])


def test_process_0_must_be_there(monkeypatch):
    monkeypatch.setattr(distributed, "CONNECT_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"process 0 did not listen on 127.0.0.1:\d+ within 0.1 s"):
        distributed.start(f"127.0.0.1:{free_port()},2,1")
    with pytest.raises(UserError, match="the host 'nowhere.invalid' was not found: "):
        distributed.start("nowhere.invalid:1,2,1")


@pytest.mark.campaign
def test_a_signal_and_the_clock_need_no_line_of_the_log(start, tiny, tmp_path):
    """One of two processes gets SIGTERM: both stop at one step, which is saved, within seconds."""
    words = ("train.num_steps=1000000", "log.every=1000000", "checkpoint.every=1000000")
    words += ("checkpoint.seconds=0.5", "evals.validation.every=0", "network.depth=1")
    arguments = ("--config", tiny, "--workdir", tmp_path, *(f"--config.{w}" for w in words))
    address = f"--distributed=127.0.0.1:{free_port()},2"
    both = [start("-m", "md4_jax.main", *arguments, f"{address},{index}") for index in range(2)]
    until = time.monotonic() + 240
    while len(saved(tmp_path)) < 2:  # by the clock
        assert time.monotonic() < until and all(p.poll() is None for p in both)
        time.sleep(0.1)
    both[1].send_signal(signal.SIGTERM)
    struck = time.monotonic()
    said = [p.communicate(timeout=120) for p in both]
    assert [p.returncode for p in both] == [128 + signal.SIGTERM] * 2, said
    assert time.monotonic() - struck < 30  # two cores: a second, a save and the end of JAX
    step = int(re.search(r"SIGTERM: step (\d+) is saved", said[0][0])[1])
    assert saved(tmp_path)[-1] == step


@pytest.mark.campaign
def test_a_signal_ends_an_evaluation_of_two(start, tiny, tmp_path, rows):
    """One of them gets it in the second batch: no third one is computed, and the step is saved."""
    words = ("evals.validation.every=2", "evals.validation.batch_size=8", "network.depth=1")
    words += ("evals.validation.limit=0", "log.every=1")
    arguments = ("--config", tiny, "--workdir", tmp_path, *(f"--config.{w}" for w in words))
    address = f"--distributed=127.0.0.1:{free_port()},2"
    driver = (tiny.with_name("driver.py"), "signal-in-batch", 1)
    both = [start(*driver, *arguments, f"{address},{index}") for index in range(2)]
    (out, first), (_, second) = (p.communicate(timeout=120) for p in both)
    assert [p.returncode for p in both] == [128 + signal.SIGTERM] * 2, (first, second)
    assert "SIGTERM: step 2 is saved in " in out and saved(tmp_path) == [2]
    assert "after this batch or a few more, without the results of this evaluation" in second
    assert not [row for row in rows(tmp_path) if "validation/nats_per_token" in row]


@pytest.mark.campaign
def test_one_of_four_stands_still(start, together, tiny, tmp_path):
    """The others end with a sentence once its time is up; two processes go on with the run."""
    words = [f"--config.{word}" for word in (*WIDE, *OFTEN, "train.num_steps=100000")]
    arguments = ["--config", tiny, "--workdir", tmp_path, *words, "--config.optim.decay=constant"]
    address = f"--distributed=127.0.0.1:{free_port()},4"
    four = [start("-m", "md4_jax.main", *arguments, f"{address},{index}") for index in range(4)]
    until = time.monotonic() + 300
    while not saved(tmp_path):
        assert time.monotonic() < until and all(p.poll() is None for p in four)
        time.sleep(0.1)
    four[2].send_signal(signal.SIGSTOP)
    others = [p for p in four if p is not four[2]]
    said = [p.communicate(timeout=4 * distributed.HEARTBEAT_SECONDS) for p in others]
    assert all(p.returncode not in (0, None) for p in others)
    assert all("error: " in err or "another task died" in err for _, err in said), said
    four[2].kill()
    last = saved(tmp_path)[-1] + 2
    ended = together(2, 1, *arguments, f"--config.train.num_steps={last}")
    assert all(code == 0 for _, _, code in ended), ended
    assert saved(tmp_path)[-1] == last


@pytest.mark.parametrize(
    "how, words",
    [
        ("here", "HOST:PORT,PROCESSES,INDEX, not 'here'"),
        ("localhost:1234,2", "HOST:PORT,PROCESSES,INDEX"),
        ("localhost:http,2,1", "HOST:PORT,PROCESSES,INDEX"),
        ("localhost:1234,2,2", "INDEX must lie in 0..1, not 2"),
        ("localhost:1234,0,0", "PROCESSES must be at least 1, not 0"),
        ("", "--distributed is empty, perhaps because a shell variable is not set"),
    ],
)
def test_a_wrong_address_is_refused(how, words, refused, tiny, tmp_path):
    asked = "--config", tiny, "--workdir", tmp_path / "run", "--distributed", how
    assert words in refused(*asked)
