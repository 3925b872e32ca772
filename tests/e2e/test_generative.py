"""Generative perplexity under a causal run and under a model of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
from peer_folders import peer_folder

import md4_jax
from md4_jax.evals import judges
from md4_jax.evals.generative import GenerativePerplexity
from md4_jax.evals.judged import cut
from md4_jax.model import hub, judging
from md4_jax.protocols import UserError

CAUSAL = ("network.causal=True", "objective.name=autoregressive", "sample.name=left_to_right")


def not_fetched(name: str) -> None:
    raise UserError(f"{name} cannot be fetched: no network")


def keys(*pairs: str) -> list[str]:
    return [f"--config.{pair}" for pair in pairs]


@pytest.fixture(scope="module")
def judge(run, tiny, scratch):
    """The workdir of a causal run of two steps."""
    workdir = scratch / "judge"
    few = ("train.num_steps=2", "optim.warmup_steps=1", "evals.validation.every=0", "log.every=1")
    ended = run("--config", tiny, "--workdir", workdir, *keys(*CAUSAL, *few))
    assert ended.code == 0, ended
    return workdir


def judged(run, workdir, *pairs: str) -> dict:
    name = "evals.judged.name=generative_perplexity"
    ended = run("--mode", "eval", "--workdir", workdir, "--evals", "judged", *keys(name, *pairs))
    assert ended.code == 0, ended
    return json.loads(ended.out.splitlines()[-1])


def test_texts_end_with_the_first_end_of_text():
    rows = [np.array(row) for row in ([0, 5, 0, 6], [5, 6, 7], [1, 2, 3, 0, 4, 5])]
    assert [row.tolist() for row in cut(rows, 5, 0)] == [[0, 5, 0], [5, 6, 7], [1, 2, 3, 0]]
    assert [len(row) for row in cut(rows, 3, 0)] == [3, 3, 3]
    assert [len(row) for row in cut(rows, 5, None)] == [4, 3, 5]


@pytest.mark.campaign
def test_the_perplexity_is_that_of_the_texts_under_the_run(run, trained, judge, tmp_path):
    """The same samples, scored by the judge from Python."""
    found = judged(run, trained, f"evals.judged.judge={judge}", "sample.num=5", "sample.seed=3")
    texts = md4_jax.load(str(trained)).sample(5, seed=3).texts
    scores = md4_jax.load(str(judge)).score(texts)
    assert scores.exact and found["judged"] == 5 and found["judge_tokens"] == 5 * 16
    nats = scores.nats.sum() / scores.tokens.sum()
    assert found["generative_perplexity"] == pytest.approx(np.exp(nats), rel=1e-5)
    assert found["generative_bits_per_byte"] == pytest.approx(nats / np.log(2), rel=1e-5)
    entropies = (found["judge_unigram_entropy_bits"], found["unigram_entropy_bits"])
    assert entropies[0] == pytest.approx(entropies[1]) and found["first_token_counts"] is True
    assert (found["judge_length"], found["end_of_text"]) == (16, "first")
    short = judged(
        run, trained, f"evals.judged.judge={judge}", "sample.seed=3", "evals.judged.num=3",
        "evals.judged.length=4",
    )  # fmt: skip
    assert (short["judged"], short["judge_tokens"], short["judge_length"]) == (3, 12, 4)


@pytest.mark.campaign
def test_a_judge_rewards_samples(run, refused, trained, judge):
    words = ("--mode", "sample", "--workdir", trained)
    reward = ("sample.reward.name=judge", f"sample.reward.judge={judge}", "sample.num=3")
    ended = run(*words, *keys(*reward, "sample.reward.particles=2"))
    assert ended.code == 0, ended
    found = json.loads(ended.out.splitlines()[-1])
    rows = Path(found["texts"]).with_suffix(".jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in rows]
    scores = md4_jax.load(str(judge)).score([row["text"] for row in rows])
    np.testing.assert_allclose([row["reward"] for row in rows], -scores.nats, rtol=1e-5)
    own = f"--config.sample.reward.judge={trained}"
    assert f"sample.reward.judge={trained} is not causal" in refused(*words, *keys(*reward), own)


def test_a_judge_that_is_not_there_is_missed_before_training(refused, tiny, tmp_path, monkeypatch):
    """And not when it first judges, which may be hours later."""
    monkeypatch.setitem(judges.PACKAGES, judges.MARK, (("no_such_package",), "judge"))
    monkeypatch.setitem(judges.PACKAGES, "hf:", ((), "hub"))
    monkeypatch.setattr(hub, "snapshot", not_fetched)
    words = ("--config", tiny, "--workdir", tmp_path / "run")
    kind = keys("evals.judged.name=generative_perplexity", "evals.judged.final=True")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for judge, said in (
        (
            tmp_path / "empty",
            "empty contains neither a run with a checkpoint nor a model in *.safe",
        ),
        (
            tmp_path / "none",
            f"judge={tmp_path / 'none'} is not the directory of a run or of a model",
        ),
        ("transformers:gpt2", "needs no_such_package: pip install -e '.[judge]'"),
        ("hf:nobody/gpt", "evals.judged.judge=hf:nobody/gpt: hf:nobody/gpt cannot be fetched"),
    ):
        assert said in refused(*words, *kind, *keys(f"evals.judged.judge={judge}"))
    assert not (tmp_path / "run").exists()


def test_impossible_judges(refused, trained):
    name = ("--mode", "eval", "--workdir", trained, "--evals", "judged")
    kind = keys("evals.judged.name=generative_perplexity")
    assert "evals.judged.judge must be the directory of a causal run" in refused(*name, *kind)
    with_judge = lambda what: refused(*name, *kind, *keys(f"evals.judged.judge={what}"))  # noqa: E731
    assert "evals.judged.judge=/nowhere is not the directory of a run" in with_judge("/nowhere")
    assert f"evals.judged.judge={trained} is not causal" in with_judge(trained)
    for options, words in (
        (dict(end_of_text="last"), "end_of_text must be first or all, not 'last'"),
        (dict(batch_size=0), "batch_size must be at least 1, not 0"),
        (dict(num=-1), "num must not be negative, not -1"),
    ):
        with pytest.raises(UserError, match=words):
            GenerativePerplexity("runs/ar", **options)


@pytest.mark.slow
def test_samples_are_judged_by_a_published_model(run, refused, trained, tmp_path):
    """A GPT-2 that is computed here: it reads the text alone, whose first token is free."""
    folder = peer_folder(tmp_path, "gpt2")
    found = judged(run, trained, f"evals.judged.judge={folder}", "sample.num=4", "sample.seed=3")
    model = md4_jax.load(folder)
    texts = [model.domain.encode(x) for x in md4_jax.load(str(trained)).sample(4, seed=3).texts]
    texts = [text for text in texts if len(text) > 1]
    assert found["first_token_counts"] is False and found["judge_length"] == 64
    assert found["judge_tokens"] == sum(len(text) - 1 for text in texts)
    nats = 0.0
    for text in texts:
        logits = np.asarray(model.logits([text]), np.float64)[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        nats -= sum(logs[place, token] for place, token in enumerate(text[1:]))
    expected = np.exp(nats / found["judge_tokens"])
    assert found["generative_perplexity"] == pytest.approx(expected, rel=1e-5)
    name = ("--mode", "eval", "--workdir", trained, "--evals", "judged")
    kind = keys("evals.judged.name=generative_perplexity", f"evals.judged.judge={folder}")
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_head": 4, "n_inner": 3}')
    assert f"evals.judged.judge={folder}: {folder}: config.json says" in refused(*name, *kind)


@pytest.mark.filterwarnings("ignore")
def test_a_judge_computed_here_is_that_of_transformers(tmp_path):
    """The same GPT-2 in both: costs, features and what they leave out."""
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[judge]'")
    pytest.importorskip("transformers", reason="needs transformers")
    folder = peer_folder(tmp_path, "gpt2")
    theirs = judges.TransformersJudge("judge", str(folder))
    ours = judges.PublishedJudge(*judging.read("judge", str(folder), {})[:2], {})
    texts = ["tobeornottobe", "ab", "A-Z"]
    ids = [judge.tokens(texts) for judge in (theirs, ours)]
    assert [row.tolist() for row in ids[0]] == [row.tolist() for row in ids[1]]
    assert theirs.length == ours.length and theirs.counts_first == ours.counts_first
    found, expected = (judge.judge(ids[0], 2) for judge in (ours, theirs))
    np.testing.assert_allclose(found.nats, expected.nats, rtol=1e-5)
    assert found.size.tolist() == expected.size.tolist() == [12, 1, 2]
    features = [judge.features(ids[0], 2) for judge in (ours, theirs)]
    np.testing.assert_allclose(*features, atol=1e-5)
    for text, row in zip(texts, ids[0], strict=True):
        assert ours.counted(text, row) == theirs.counted(text, row) == text[1:]


@pytest.fixture(scope="module")
def random_gpt(scratch):
    """A folder with a causal model of random weights and a tokenizer of letters."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[judge]'")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    symbols = ["<|endoftext|>", "\n", *map(chr, range(32, 127))]
    letters = Tokenizer(models.WordLevel({s: k for k, s in enumerate(symbols)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    # Its decoder puts spaces between letters, which are not part of the text.
    torch.manual_seed(0)
    sizes = dict(n_positions=32, n_embd=16, n_layer=1, n_head=2, vocab_size=len(symbols))
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    folder = str(scratch / "gpt")
    made.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token=symbols[0]
    ).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_gives_the_sum_of_its_log_probabilities(random_gpt):
    """Texts of several lengths in one batch, against each one alone; the first token is free."""
    import torch

    judge = judges.TransformersJudge("judge", random_gpt)
    ids = judge.tokens(["to be or not", "a", "so it goes on"])
    assert judge.length == 32 and [len(row) for row in ids] == [12, 1, 13]
    found, features = judge.judge(ids, 2), judge.features(ids, 2)
    assert found.size.tolist() == [11, 0, 12] and features.shape == (3, 16)
    for row, nats in zip(ids, found.nats, strict=True):
        with torch.no_grad():
            logits = judge._model(torch.tensor(row[None].astype(np.int64))).logits[0]
        logs = torch.log_softmax(logits.double(), dim=-1).numpy()
        alone = -sum(logs[place, token] for place, token in enumerate(row[1:]))
        assert nats == pytest.approx(alone, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_samples_are_judged_by_a_model_of_transformers(run, trained, random_gpt):
    found = judged(run, trained, f"evals.judged.judge=transformers:{random_gpt}", "sample.num=4")
    assert found["first_token_counts"] is False and found["judge_tokens"] == 4 * 15
    ratio = found["generative_bits_per_token"] / found["generative_bits_per_byte"]
    assert ratio == pytest.approx(1.0)  # of the 15 bytes that follow the first
    # Random weights know nothing: about as many choices as symbols.
    assert 60 < found["generative_perplexity"] < 160
