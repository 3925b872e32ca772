"""Evaluators of a kind, on a trained run: path, information profile and zero-shot sets."""

import hashlib
import json
import shutil

import pytest


@pytest.fixture(scope="module")
def own(trained, tmp_path_factory):
    """A copy of the run, into which files may be written."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("measures") / "run")


def last(out: str) -> dict:
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


@pytest.mark.slow
def test_the_path_of_a_sampler(run, refused, own):
    at = ("--workdir", own, "--mode", "eval", "--evals=path")
    some = ("--config.evals.path.name=path", "--config.evals.path.limit=64")
    margin = ("--config.sample.name=confidence", "--config.sample.score=margin")
    found = last(run(*at, *some, *margin).out)
    assert found["exact"] is True and found["sampler"] == "confidence" and found["steps"] == 4
    assert 0 < found["bits_per_token_se"] < found["bits_per_token"] < 10
    ended = run(*at, *some)
    assert "path (test split): <= " in ended.out and last(ended.out)["exact"] is False
    message = refused(*at, *some, "--config.sample.name=confidence")
    assert "evals.path: sample.name='confidence' has no likelihood along a path" in message
    assert "sample.top_k=3 gives most texts" in refused(*at, *some, "--config.sample.top_k=3")
    reward = ("--config.sample.reward.name=pattern", "--config.sample.reward.pattern=a")
    message = refused(*at, *some, *reward)
    assert (
        "evals.path: sample.reward.name='pattern' changes the distribution of the samples"
        in message
    )


@pytest.mark.campaign
def test_the_profile_gives_the_optimal_grid(run, refused, own):
    at = ("--workdir", own, "--mode")
    message = refused(*at, "sample", "--config.sample.grid=optimal")
    assert f"--workdir {own} --mode eval --evals information_profile" in message
    ended = run(*at, "eval", "--evals=information_profile")
    assert "predicted loss of parallel reveals, bits per character" in ended.out
    found = last(ended.out)
    assert found["optimal_1_steps_bits_per_token"] == found["uniform_1_steps_bits_per_token"]
    # Of a network that has learned little, both are 0 but for rounding.
    least = found["cosine_4_steps_bits_per_token"] + 1e-12
    assert found["optimal_4_steps_bits_per_token"] <= least
    kept = json.loads((own / "information_profile.json").read_text())
    assert len(kept["nats"]) == 16 and kept["steps"] == [1, 2, 4, 8, 16]
    assert (own / "figures" / "information_profile.png").exists()
    for name, more in (("any_order", ["--config.sample.per_step=0"]), ("ancestral", [])):
        sampler = [f"--config.sample.name={name}", "--config.sample.grid=optimal", *more]
        ended = run(*at, "sample", *sampler)
        assert ended.code == 0 and last(ended.out)["network_evaluations"] <= 4


def test_zero_shot(run, refused, own, tiny, tmp_path):
    for name, file, text in (
        ("ptb", "ptb.valid.txt", " the firm 's shares rose \n they fell \n" * 9),
        ("lambada", "lambada_test.jsonl", '{"text": "He said go"}\n' * 9),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    keys = dict(sets="ptb,lambada", path=tmp_path, batch_size=8, length=12)
    given = [f"--config.evals.zero_shot.{key}={value}" for key, value in keys.items()]
    at = ("--workdir", own, "--mode", "eval", "--evals=zero_shot", *given)
    ended = run(*at)
    found = last(ended.out)
    assert found["ptb_split"] == "validation" and found["lambada_split"] == "test"
    assert "zero_shot ptb (validation): <= " in ended.out
    sets = json.loads((own / "zero_shot.json").read_text())["sets"]
    text = ["the firm's shares rose", "they fell"] * 9
    expected = hashlib.sha256("".join(f"{one}\0" for one in text).encode()).hexdigest()
    assert sets["ptb"]["detokenised_sha256"] == expected
    assert sets["ptb"]["detokenise"] == "ptb" and sets["ptb"]["documents"] == 18
    assert (sets["ptb"]["length"], sets["ptb"]["stride"], sets["ptb"]["chunks"]) == (
        12, 12, "concatenate"
    )  # fmt: skip
    raw = hashlib.sha256((tmp_path / "ptb" / "ptb.valid.txt").read_bytes()).hexdigest()
    assert sets["ptb"]["raw_sha256"] == [["ptb.valid.txt", raw]]
    assert sets["ptb"]["result"]["tokens"] == found["ptb_tokens"] == sets["ptb"]["tokens"]
    again = last(run(*at, "--config.evals.zero_shot.chunks=documents").out)
    assert again["ptb_sequences"] == 18
    kept = json.loads((own / "zero_shot.json").read_text())["sets"]["ptb"]
    assert kept["detokenised_sha256"] == expected
    assert kept["tokens_sha256"] != sets["ptb"]["tokens_sha256"]
    said = refused(*at, "--config.evals.zero_shot.split=test")
    assert f"zero_shot: ptb in {tmp_path}/ptb: the test split has 0 tokens" in said
    assert "choose another split by evals.zero_shot.split" in said
    file = tmp_path / "ptb" / "ptb.valid.txt"
    said = refused(*at, f"--config.evals.zero_shot.path={file}")
    assert f"evals.zero_shot.path={file} is a file: it must be a folder" in said
    assert "sets contains the unknown name 'c4'" in refused(*at, "--config.evals.zero_shot.sets=c4")
    none = refused(*at, "--config.evals.zero_shot.sets=")
    assert "evals.zero_shot.sets='' must name at least one of lambada" in none
    # A run that is to end with it says so before it trains.
    new = ("--config", tiny, "--workdir", tmp_path / "new", *given)
    new += ("--config.evals.zero_shot.final=True", "--config.evals.zero_shot.split=test")
    assert "evals.zero_shot: ptb" in refused(*new)
    assert not (tmp_path / "new" / "metrics.jsonl").exists()


def test_zero_shot_of_one_sequence_is_json(run, own, tmp_path):
    """Though a single text has no standard error."""
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text('{"text": "He said go"}\n')
    keys = dict(sets="lambada", path=tmp_path, batch_size=8)
    given = [f"--config.evals.zero_shot.{key}={value}" for key, value in keys.items()]
    ended = run("--workdir", own, "--mode", "eval", "--evals=zero_shot", *given)
    assert ended.code == 0, ended
    kept = json.loads((own / "zero_shot.json").read_text(), parse_constant=pytest.fail)
    result = kept["sets"]["lambada"]["result"]
    assert result["sequences"] == 1 and result["bits_per_token_se"] is None


@pytest.mark.campaign
def test_audit(run):
    """The mode reads a config alone, and its code says whether all bounds are bounds."""
    given = ("--config.objective.name=any_order", "--config.audit.steps=20")
    ended = run("--config", "configs/base.py", "--mode", "audit", *given)
    assert ended.code == 0 and "a bound of -log p, and tight on independent data" in ended.out
    assert last(ended.out)["objective"]["passed"] is True
