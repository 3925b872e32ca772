"""Runs in turn for each combination of values: `md4_jax sweep`."""

import jax
import pytest

from md4_jax import main, modes
from md4_jax.config import load, sweep
from md4_jax.protocols import UserError
from md4_jax.runtime import distributed

LINE = ["sweep", "FOLDER", "--config", "quickstart", "--config.train.seed=3"]


def test_every_combination_the_last_key_fastest():
    found = sweep.combinations(["optim.learning_rate=1e-3,3e-4", "data.path=a/b,c"])
    wanted = {
        "learning_rate=1e-3,path=a_b": {"optim.learning_rate": "1e-3", "data.path": "a/b"},
        "learning_rate=1e-3,path=c": {"optim.learning_rate": "1e-3", "data.path": "c"},
        "learning_rate=3e-4,path=a_b": {"optim.learning_rate": "3e-4", "data.path": "a/b"},
        "learning_rate=3e-4,path=c": {"optim.learning_rate": "3e-4", "data.path": "c"},
    }
    assert list(found.items()) == list(wanted.items())


def test_a_comma_within_brackets_is_part_of_a_value():
    asked = ["sample.grid=cosine,[1, 0.5,0],(1,(0.2)),{}", "log.profile=(1,2),(3,4)"]
    found = sweep.combinations(asked)
    lists = ["cosine", "[1, 0.5,0]", "(1,(0.2))", "{}"]
    both = [
        {"sample.grid": grid, "log.profile": steps}
        for grid in lists
        for steps in ("(1,2)", "(3,4)")
    ]
    assert list(found.values()) == both
    assert list(found)[:4] == [
        "grid=cosine,profile=1_2", "grid=cosine,profile=3_4",
        "grid=1_0.5_0,profile=1_2", "grid=1_0.5_0,profile=3_4",
    ]  # fmt: skip


def test_keys_with_the_same_last_word_are_told_apart():
    keys = ["optim.name", "sample.name", "train.seed", "evals.a.data.path", "data.path"]
    (name,) = sweep.combinations([f"{key}=x" for key in keys])
    assert name == "optim.name=x,sample.name=x,seed=x,a.data.path=x,data.path=x"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            ["sample.grid=[1,0],[1,0.5"],
            r"grid=\[1,0\],\[1,0.5: the closing bracket '\]' is missing",
        ),
        (["sample.grid=[1,0),1"], r"'\)' closes a bracket that was not"),
        (["sample.grid=1]"], r"'\]' closes a bracket that was not"),
        (["seed=1,2"], "seed=1,2: it must be --vary SECTION.KEY=VALUE,VALUE"),
        (["train.seed"], "it must be --vary SECTION.KEY"),
        (["train.seed=1,,2"], "it must be --vary SECTION.KEY"),
        (["train.seed=1,1"], "names a value twice"),
        (["train.seed=1", "train.seed=2"], "names a key twice: train.seed, train.seed"),
        (["data.path=a/b,a_b"], "the same name"),
    ],
)
def test_what_is_no_sweep(asked, why):
    with pytest.raises(UserError, match=why):
        sweep.combinations(asked)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (LINE, "sweep and --vary .* need each other"),
        (["--config", "quickstart", "--vary", "train.seed=1"], "sweep and --vary .* each other"),
        (["sweep", "--config", "quickstart", "--vary", "train.seed=1"], "needs --config FILE, and"),
        (["sweep", "FOLDER", "--vary", "train.seed=1"], "needs --config FILE, and"),
        ([*LINE, "--vary", "optim.learning_rates=1"], "learning_rates"),
        ([*LINE, "--vary", "sample.seed=0,1,00"], "seed=0 and seed=00, but their values are equal"),
        (
            [*LINE, "--vary", "optim.learning_rate=1e-3,0.001"],
            "learning_rate=1e-3 and learning_rate=0.001, but their values are equal",
        ),
        (
            [*LINE, "--vary", "train.seed=0,1"],
            "train.seed is given by --vary and --config.train.seed",
        ),
        ([*LINE, "--vary", "train.batch_size=8,eight"], "eight"),
        (
            [*LINE, "--vary", "network.heads=2,3"],
            "run heads=3: network.size=128 must be a multiple of twice network.heads=3",
        ),
        (
            [*LINE, "--vary", "train.initial=nowhere"],
            "run initial=nowhere: train.initial=nowhere holds no run",
        ),
        (
            [*LINE, "--vary", "optim.learning_rate=1,-1"],
            "run learning_rate=-1: optim.learning_rate",
        ),
    ],
)
def test_bad_commands_start_no_run(line, why, tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(UserError, match=why):
        main.run([word.replace("FOLDER", str(tmp_path)) for word in line])


def swept(tmp_path, monkeypatch, train) -> int:
    """Exit code of a sweep over three batch sizes whose runs are `train`."""
    monkeypatch.setattr(modes, "run", train)
    line = [word.replace("FOLDER", str(tmp_path)) for word in LINE]
    return main.run([*line, "--vary", "train.batch_size=8,16,32"])


def test_runs_in_turn_and_one_that_fails(tmp_path, monkeypatch, capsys):
    calls = []

    def train(mode, call):
        calls.append(call)
        if call.config["train"]["batch_size"] == 16:
            raise UserError("it diverged")
        call.workdir.mkdir(parents=True)
        load.store(call.workdir, call.config)
        return 0

    assert swept(tmp_path, monkeypatch, train) == 1
    assert [call.workdir.name for call in calls] == [f"batch_size={n}" for n in (8, 16, 32)]
    assert all(call.config["train"]["seed"] == 3 for call in calls)
    told = capsys.readouterr()
    assert "run 2 of 3: batch_size=16" in told.out and "error: it diverged" in told.err
    table = told.out.split("\n\n")[-1]
    assert "batch_size=8 " in table and "batch_size=32 " in table and "batch_size=16" not in table
    # The command that a run says continues that run alone.
    assert calls[0].command.startswith("python -m md4_jax --config=quickstart --mode=train ")
    assert "--config.train.batch_size=8" in calls[0].command and "vary" not in calls[0].command


def test_of_several_processes_a_mistake_ends_the_sweep(tmp_path, monkeypatch):
    """One alone may meet it, and would be in the next run while the others are in this one."""
    calls = []

    def train(mode, call):
        calls.append(call)
        raise UserError("the directory is in use")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "check_alike", lambda facts: None)
    with pytest.raises(UserError, match="run 1 of 3, batch_size=8: the directory is in use"):
        swept(tmp_path, monkeypatch, train)
    assert len(calls) == 1


def test_a_signal_ends_the_sweep(tmp_path, monkeypatch, capsys):
    calls = []
    code = swept(tmp_path, monkeypatch, lambda mode, call: calls.append(call) or 143)
    assert code == 143 and len(calls) == 1
    assert "give its command again" in capsys.readouterr().err
