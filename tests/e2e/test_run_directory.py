"""A run directory is enough: what may be asked of it without a config file, and what not."""

import json
import shutil

import numpy as np
import pytest

from md4_jax.config import load as config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_a_file(run, tiny, scratch):
    """A run of two steps on a text file, and that file."""
    text, workdir = scratch / "some.txt", scratch / "on_a_file"
    text.write_text("the cat sat on the mat. " * 200)
    words = ("data.name=text", f"data.path={text}", "network.depth=1", "train.num_steps=2")
    words += (
        "optim.warmup_steps=1",
        "evals.validation.every=0",
        "sample.num=1",
        "checkpoint.every=1",
    )
    ended = run("--config", tiny, "--workdir", workdir, *(f"--config.{word}" for word in words))
    assert ended.code == 0, ended
    return text, workdir


@pytest.fixture
def elsewhere(on_a_file, tmp_path):
    """A copy of both; the text has another name."""
    text, workdir = on_a_file
    shutil.copy(text, tmp_path / "moved.txt")
    return tmp_path / "moved.txt", shutil.copytree(workdir, tmp_path / "run")


def test_a_text_that_was_moved(elsewhere, run):
    """It is told where; the tokens are the same, so that the run goes on and is evaluated."""
    text, workdir = elsewhere
    at = ("--workdir", workdir, f"--config.data.path={text}")
    before = run("--workdir", workdir, "--mode", "eval")
    after = run(*at, "--mode", "eval")
    assert after.code == 0 and after.out == before.out
    ended = run(*at)
    assert ended.code == 0 and "trained to step 2" in ended.out, ended
    assert config.stored(workdir)["data"]["path"] == str(text)


def test_a_run_of_before_some_sections_and_keys_goes_on(elsewhere, run):
    """Its directory is enough, and what it lacks is written down."""
    text, workdir = elsewhere
    file = workdir / "config.json"
    content = json.loads(file.read_text())
    for section in ("eval", "bench", "plan"):
        del content["config"][section]
    content["config"]["checkpoint"] = {"every": 1, "keep": 3}
    content["config"]["data"]["path"] = str(text)
    file.write_text(json.dumps(content))
    shutil.rmtree(workdir / "checkpoints" / "2")
    ended = run("--workdir", workdir)
    assert ended.code == 0, ended
    assert "resuming from step 1\n" in ended.out and "trained to step 2" in ended.out
    assert config.stored(workdir)["eval"] == {"checkpoint": "newest"}
    assert config.stored(workdir)["checkpoint"]["keep_every"] == 0


def test_another_text_in_its_place(elsewhere, refused):
    text, workdir = elsewhere
    text.write_text("the cat sat on the hat. " * 200)
    at = ("--workdir", workdir, f"--config.data.path={text}")
    for mode in ("train", "eval"):
        message = refused(*at, "--mode", mode)
        assert f"{workdir} was trained on another text" in message
        assert config.stored(workdir)["data"]["path"] != str(text)
    assert "--config.evals.other.data.path=FILE" in message
    text.write_bytes("the cat sat on the mät. ".encode("latin-1") * 200)
    message = refused(*at)
    assert message.endswith("Convert it to UTF-8, or take it out of data.path.\n")


def test_a_checkpoint_that_does_not_know_its_text(elsewhere, refused, monkeypatch):
    """Of an early version: that the text is the same cannot be checked, so it is not assumed."""
    text, workdir = elsewhere
    newest = "md4_jax.training.checkpoint.Checkpoints.newest_host"
    monkeypatch.setattr(newest, lambda self: (30, {}))
    message = refused("--workdir", workdir, f"--config.data.path={text}", "--mode", "eval")
    assert "do not record which text they were trained on" in message


def test_a_run_is_timed_in_its_own_symbols_without_its_text(elsewhere, run):
    """The alphabet is in the run directory; nothing reads the text that is gone."""
    text, workdir = elsewhere
    at = ("--workdir", workdir, f"--config.data.path={text}")
    text.unlink()
    settings = ("--config.bench.parts=eval", "--config.bench.windows=1", "--config.bench.seconds=0")
    ended = run(*at, "--mode", "bench", *settings)
    assert ended.code == 0, ended
    plan = ("--mode", "plan", "--topology=cpu:1", "--config.plan.parts=eval")
    ended = run(*at, *plan)
    assert ended.code == 0, ended


def test_more_steps_are_refused_where_the_learning_rate_ends(trained, refused):
    message = refused("--workdir", trained, "--config.train.num_steps=40")
    assert "train.num_steps: 30 in the workdir, 40 asked for" in message
    assert "(optim.decay='cosine') was planned for 30 steps" in message
    assert f"--config.train.initial={trained}" in message
    message = refused("--workdir", trained, "--config.train.seed=4")
    assert "was planned for" not in message


def test_fewer_steps_than_a_run_has_made_are_refused(trained, run, refused, tmp_path):
    """At a constant learning rate, where the number of steps may change."""
    own = shutil.copytree(trained, tmp_path / "run")
    content = json.loads((own / "config.json").read_text())
    content["config"]["optim"]["decay"] = "constant"
    (own / "config.json").write_text(json.dumps(content))
    before = (own / "config.json").read_bytes()
    steps = [int(path.name) for path in (own / "checkpoints").iterdir() if path.name.isdecimal()]
    few = ("--workdir", own, "--config.train.num_steps=29")
    message = refused(*few)
    assert f"train.num_steps=29 is less than the 30 steps that {own} has made" in message
    assert f"add --back STEP, with one of the steps {sorted(steps)}" in message
    assert (own / "config.json").read_bytes() == before
    assert "30 steps" in refused(*few, "--back=30")
    message = refused(*few, "--mode=eval", "--evals=ngrams")
    assert "train.num_steps=29 changes nothing in --mode eval" in message
    ended = run(*few, f"--back={min(steps)}")
    assert ended.code == 0 and "trained to step 29" in ended.out, ended
    assert run(*few, f"--back={min(steps)}").code == 0  # which only goes on


@pytest.mark.campaign
def test_more_steps_at_a_constant_rate_are_those_of_a_longer_run(run, tiny, tmp_path, same_run):
    words = ("optim.decay=constant", "network.depth=1", "evals.test.limit=64", "sample.num=1")
    asked = ("--config", tiny, *(f"--config.{word}" for word in words))
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    assert run(*asked, "--workdir", whole, "--config.train.num_steps=14").code == 0
    assert run(*asked, "--workdir", longer, "--config.train.num_steps=10").code == 0
    ended = run("--workdir", longer, "--config.train.num_steps=14")
    assert ended.code == 0 and "resuming from step 10" in ended.out, ended
    assert json.loads((longer / "config.json").read_text())["config"]["train"]["num_steps"] == 14
    same_run(longer, whole)


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--train.batch_size=8", "did you mean --config.train.batch_size=8?"),
        ("--evals.test.draws", "did you mean --config.evals.test.draws?"),
    ],
)
def test_a_key_without_its_prefix(flag, said, tiny, refused):
    assert f"unknown flag {flag}: {said}" in refused("--config", tiny, flag)


@pytest.mark.slow
def test_the_package_is_a_program(start):
    process = start("-m", "md4_jax", "--workdir", "/nowhere")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and not out
    assert err.startswith("error: there is no --config and no run in --workdir /nowhere")


@pytest.mark.campaign
def test_a_network_that_reads_parameters_otherwise_does_not_begin_with_them(
    trained, run, tiny, refused, tmp_path
):
    """All have the same shapes; what training learns anew may change, and is said."""
    words = ("--config", tiny, f"--config.train.initial={trained}", "--config.train.num_steps=1")
    words += ("--config.optim.warmup_steps=0",)
    same = ("--config.network.head_dim=16", "--config.network.router=sigmoid")
    assert run(*words, "--workdir", tmp_path / "same", *same).code == 0
    for key, there, here in (("heads", 2, 4), ("norm_eps", 1e-06, 0.01)):
        message = refused(*words, "--workdir", tmp_path / "a", f"--config.network.{key}={here}")
        assert f"another meaning: network.{key}={there} in that run and {here} in this" in message
    ended = run(*words, "--workdir", tmp_path / "b", "--config.network.rotary_base=500.0")
    assert ended.code == 0, ended
    said = "whose network had network.rotary_base=10000.0 in that run and 500.0 in this one"
    assert said in ended.out


@pytest.mark.campaign
def test_a_first_checkpoint_that_a_disk_lost_begins_with_the_other_run_again(
    trained, run, tiny, tmp_path, arrays
):
    workdir = tmp_path / "run"
    words = ("--config", tiny, f"--config.train.initial={trained}", "--config.train.num_steps=1")
    words += ("--config.optim.warmup_steps=0", "--config.optim.learning_rate=0")
    assert run(*words, "--workdir", workdir).code == 0
    before = arrays(workdir)
    for file in (workdir / "checkpoints" / "1" / "ema").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    (workdir / "first_save.json").write_text('{"step": 1}\n')
    ended = run(*words, "--workdir", workdir)
    assert ended.code == 0, ended
    assert "the machine stopped before this first checkpoint was on its disk" in ended.out
    assert f"begins with the averaged parameters of step 30 of {trained}" in ended.out
    for name, array in arrays(workdir).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.slow
def test_a_run_that_starts_from_another_takes_its_alphabet(trained, run, tiny, refused, tmp_path):
    """A text of fewer characters would have an alphabet of its own, and other parameters."""
    text = tmp_path / "own.txt"
    text.write_text("so it goes on and on \n" * 200)
    keys = ("data.name=text", f"data.path={text}", "data.validation=0.2", "data.test=0.2")
    keys += (f"train.initial={trained}", "train.num_steps=2", "optim.warmup_steps=1")
    words = ("--config", tiny, *(f"--config.{key}" for key in keys))
    ended = run(*words, "--workdir", tmp_path / "run")
    assert ended.code == 0, ended
    kept = [
        json.loads((folder / "tokenizer.json").read_text())
        for folder in (tmp_path / "run", trained)
    ]
    assert kept[0] == kept[1]
    text.write_text("größer \n" * 600)
    assert "is not in the alphabet" in refused(*words, "--workdir", tmp_path / "other")
