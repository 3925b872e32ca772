"""The loss of preferences, by hand and by enumeration, and the data that it learns from."""

import json

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noisy_blocks import in_blocks
from tiny_networks import built

from md4_jax.config import build, schema
from md4_jax.config.checks import check_training
from md4_jax.data.corpus import Corpus
from md4_jax.data.detokenise import Detokenised
from md4_jax.data.domains import TextDomain, domain_of
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.mixture import Mixture, Part
from md4_jax.data.tokenizers import Bytes
from md4_jax.objectives.preference import Preference
from md4_jax.options import TrainOptions
from md4_jax.options.data import DataOptions
from md4_jax.processes.masking import Masking
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import UserError, batch_of
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.training.step import TrainState, make_train_step

V, L, ROWS = 3, 3, 4000
# Two models that differ by more than the noise.
NOW, THEN = exact.table_logits(V, L), 0.7 * exact.table_logits(V, L)[::-1]
CHOSEN, REJECTED = np.array([0, 2, 1]), np.array([1, 1, 2])


def outputs(p):
    """Log-probabilities p at every position, whatever is seen."""
    return exact.of_outputs(lambda z, t: jnp.broadcast_to(jnp.log(p), (*z.shape, len(p))))


def called(objective, student, teacher, chosen, rejected, rows=ROWS, mask=None, process=None):
    """(loss, diagnostics) of the same pair in each row, at levels that are spread evenly."""
    process = Masking(V) if process is None else process
    tokens = np.tile(np.asarray(chosen, np.int32), (rows, 1))
    mask = np.ones(tokens.shape, bool) if mask is None else np.broadcast_to(mask, tokens.shape)
    batch = batch_of(tokens, loss_mask=mask)
    batch = batch._replace(rejected=np.tile(np.asarray(rejected, np.int32), (rows, 1)))
    u = (jnp.arange(rows) + 0.5) / rows
    both = exact.taught(student, teacher)
    call = jax.jit(lambda u, keys: objective(both, process, batch, u, keys))
    loss, extra = call(u, exact.keys_for(0, rows))
    return np.asarray(loss), {name: np.asarray(value) for name, value in extra.items()}


def test_a_single_token_by_hand():
    """Both laws are known: 2 log((.5 / .2) / 1) and log(1 + e^-margin), at every draw."""
    now, then = outputs(jnp.array([0.5, 0.3, 0.2])), outputs(jnp.full(3, 1 / 3))
    loss, extra = called(Preference(beta=2.0), now, then, [0], [2], rows=4)
    np.testing.assert_allclose(extra["margin"], 1.8325815, rtol=1e-5)  # 2 log 2.5
    np.testing.assert_allclose(loss, 0.1484200, rtol=1e-5)  # log(7.25 / 6.25)
    assert (extra["preferred"] == 1.0).all()
    loss, extra = called(Preference(beta=2.0, supervised=0.5), now, then, [2], [0], rows=4)
    np.testing.assert_allclose(extra["margin"], -1.8325815, rtol=1e-5)
    # log(7.25) and half of -log 0.2.
    np.testing.assert_allclose(loss, 1.9810015 + 0.8047190, rtol=1e-5)
    assert (extra["preferred"] == 0.0).all()


FIRST, SECOND = (
    np.array([0.5, 0.3, 0.2]),
    np.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.8, 0.1, 0.1]]),
)
NATS = -np.log(FIRST[:, None]) - np.log(SECOND)


def after(clean):
    """Outputs of a mask in a block of one: the law of the first token, or of the second."""
    p = jnp.asarray(SECOND)[clean[:, 0]] if clean.shape[1] else jnp.asarray(FIRST)[None]
    return exact.of_outputs(lambda z, t: jnp.broadcast_to(jnp.log(p)[:, None], (*z.shape, 3)))


def test_blocks_of_one_have_the_likelihood_at_every_draw():
    """Of two tokens by hand, from a start at which all texts are alike."""
    now, then = in_blocks(after), in_blocks(lambda clean: outputs(jnp.full(3, 1 / 3)))
    loss, extra = called(Preference(beta=2.0, block=1), now, then, [0, 1], [2, 0], rows=4)
    margin = 2.0 * (NATS[2, 0] - NATS[0, 1])
    np.testing.assert_allclose(extra["margin"], margin, rtol=1e-5)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-margin)), rtol=1e-4)
    assert (extra["masked"] == 1.0).all()


def right(process, second, block):
    """The right denoiser of a text whose first token has the law FIRST, then a row of `second`."""
    if not block:
        return exact.uniform_outputs(process, FIRST[:, None] * second)
    first, *each = (exact.uniform_outputs(process, p) for p in (FIRST, *second))

    def make(clean):
        if not clean.shape[1]:
            return first
        pick = clean[:, 0]

        def features(z, t):
            return jnp.stack([d.features(z, t) for d in each])[pick, jnp.arange(len(z))]

        return exact.of_outputs(features)

    return in_blocks(make)


@pytest.mark.quick(1)
@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.cases(2)
def test_uniform_noise_has_the_likelihood_in_the_mean(block, parametrisation):
    """Of right denoisers of two laws, to 4 standard errors of 4,000 pairs, whole and in blocks."""
    process = Uniform(V, parametrisation=parametrisation)
    other = SECOND[::-1]
    now, then = right(process, SECOND, block), right(process, other, block)
    objective = Preference(beta=0.5, draws=2, block=block)
    _, extra = called(objective, now, then, [0, 1], [2, 1], process=process)
    its = -np.log(FIRST[:, None]) - np.log(other)
    gain = its - NATS
    expected, margin = 0.5 * (gain[0, 1] - gain[2, 1]), extra["margin"]
    error = margin.std() / np.sqrt(ROWS)
    assert abs(margin.mean() - expected) < 4 * error and error < 0.1 * abs(expected)
    assert 0.05 < extra["changed"].mean() < 0.2  # early times are drawn more often
    same = called(objective, now, now, [0, 1], [2, 1], rows=8, process=process)[1]["margin"]
    np.testing.assert_array_equal(same, 0.0)


def test_the_prompt_counts_nowhere():
    """The loss of one token after two that are given, whatever the worse answer has there."""
    now, then = outputs(jnp.array([0.5, 0.3, 0.2])), outputs(jnp.full(3, 1 / 3))
    after = np.array([False, False, True])
    loss, _ = called(Preference(beta=2.0), now, then, [1, 1, 0], [0, 2, 2], rows=4, mask=after)
    np.testing.assert_allclose(loss, 0.1484200, rtol=1e-5)


def test_the_margin_is_that_of_the_bounds():
    """The mean over levels and masks, to 4 standard errors, of what enumeration gives."""
    now, then = exact.denoiser_of(NOW, time=0.5), exact.denoiser_of(THEN, time=0.2)
    _, extra = called(Preference(beta=0.3, draws=2), now, then, CHOSEN, REJECTED)
    pair = np.stack([CHOSEN, REJECTED]).astype(np.int32)
    own, its = (exact.any_order(d, Masking(V), pair) for d in (now, then))
    gain = its - own
    margin = extra["margin"]
    error = margin.std() / np.sqrt(ROWS)
    assert abs(margin.mean() - 0.3 * (gain[0] - gain[1])) < 4 * error < 0.05
    assert abs(extra["masked"].mean() - (L + 1) / (2 * L)) < 0.02  # k is uniform on 1..L


def test_both_models_see_the_same_noise():
    """At the start the margin is 0, not only its mean; close to it, it varies less than bounds."""
    table = exact.denoiser_of(NOW, time=0.5)
    loss, extra = called(Preference(), table, table, CHOSEN, REJECTED, rows=64)
    np.testing.assert_array_equal(extra["margin"], 0.0)
    np.testing.assert_allclose(loss, np.log(2.0), rtol=1e-6)
    near = exact.denoiser_of(1.01 * NOW, time=0.5)
    margin = called(Preference(beta=1.0, draws=1), near, table, CHOSEN, REJECTED)[1]["margin"]
    uniform = outputs(jnp.full(3, 1 / 3))
    alone = called(Preference(beta=1.0, draws=1), near, uniform, CHOSEN, REJECTED)[1]["margin"]
    assert margin.std() < 0.1 * alone.std()


def test_more_draws_bring_the_loss_down_to_that_of_the_mean_margin():
    now, then = exact.denoiser_of(NOW), exact.denoiser_of(THEN)
    pair = np.stack([CHOSEN, REJECTED]).astype(np.int32)
    own, its = (exact.any_order(d, Masking(V), pair) for d in (now, then))
    limit = np.log1p(np.exp(-2.0 * ((its - own)[0] - (its - own)[1])))
    losses = [
        called(Preference(beta=2.0, draws=n), now, then, CHOSEN, REJECTED)[0] for n in (1, 4, 16)
    ]
    means = [loss.mean() for loss in losses]
    errors = [loss.std() / np.sqrt(ROWS) for loss in losses]
    assert means[0] - means[1] > 4 * np.hypot(*errors[:2])
    assert means[1] - means[2] > 4 * np.hypot(*errors[1:])
    assert means[2] - limit > -4 * errors[2] and means[2] - limit < 0.2 * (means[0] - limit)


@pytest.mark.slow
def test_a_training_step_prefers_what_is_chosen_to_what_is_not():
    """From one start margins grow, and the model before stays as it is."""
    network, params = built(vocab_size=V)
    whole, optimizer = {"network": params, "process": Masking(V)}, optax.adam(3e-3)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, whole, whole, optimizer.init(whole), zero, zero, teacher=whole)
    step = jax.jit(make_train_step(network, Preference(), optimizer, TrainOptions(20, 8)))
    batch = batch_of(np.zeros((8, 6), np.int32))._replace(rejected=np.ones((8, 6), np.int32))
    margins = []
    for _ in range(20):
        state, metrics = step(state, batch)
        margins.append(float(metrics["margin"]))
    assert margins[0] == 0.0 and margins[-1] > 1.0
    jax.tree.map(np.testing.assert_array_equal, state.teacher, whole)


MISTAKES = [
    ({"beta": 0.0}, "objective.beta must be above 0, not 0.0"),
    ({"draws": 0}, "objective.draws must be at least 1, not 0"),
    ({"block": -1}, "objective.block must be at least 1, or 0 for the whole text, not -1"),
    ({"supervised": -1.0}, "objective.supervised must not be negative, not -1.0"),
]


@pytest.mark.parametrize("keys, said", MISTAKES)
def test_impossible_options(keys, said):
    with pytest.raises(UserError, match=said):
        Preference(**keys)


def test_a_batch_without_worse_answers_is_no_batch_for_it():
    table = exact.denoiser_of(NOW)
    with pytest.raises(ValueError, match="needs a batch with rejected answers"):
        Preference()(
            exact.taught(table, table), Masking(V), batch_of(CHOSEN[None].astype(np.int32)),
            jnp.zeros(1), exact.keys_for(0, 1),
        )  # fmt: skip


# The data

KEYS = dict(text_key="good", prompt_key="q", rejected_key="bad", validation=0, test=1)
PAIRS = [("1+1=", "2", "3"), ("a?", "a long answer", "b"), ("longer than a row", "x", "y")]
PAIRS.append(("2+2=", "4", "longer"))


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A corpus of JSON lines, whose last pair is the test split; nothing of it is kept yet."""
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))

    def corpus(*, padding="end_of_text", detokenise=False, **options):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(dict(q=q, good=a, bad=b)) + "\n" for q, a, b in PAIRS))
        source = TextFiles(str(path), **(KEYS | options))
        source = Detokenised(source, "ptb") if detokenise else source
        domain = domain_of(source, Bytes, 8)
        return Corpus(source, domain, DataOptions(8, padding=padding))

    return corpus


def shown(row) -> str:
    return "".join("$" if n == 256 else chr(n) for n in row)


def test_a_batch_has_both_answers_after_the_same_prompt(corpus, capsys):
    """Answers end with the end of text and are filled up with it, which counts."""
    data = corpus()
    batch = next(data.train_batches(batch_size=2, seed=0, rows=np.arange(2)))
    order = np.argsort(batch.tokens[:, 0])
    assert [shown(row) for row in batch.tokens[order]] == ["1+1=2$$$", "a?a long"]
    assert [shown(row) for row in batch.rejected[order]] == ["1+1=3$$$", "a?b$$$$$"]
    counted = ["".join("x" if c else "-" for c in row) for row in batch.loss_mask[order]]
    assert counted == ["----xxxx", "--xxxxxx"]
    # The third pair has no room for an answer; that is said once.
    said = capsys.readouterr().out
    assert said.count("1 of 3 pairs of the train split are left out") == 1
    assert "1 of 3 pairs of the train split are cut" in said and "worse" not in said
    assert data.sizes(["train", "test"]) == {"train": (2, 10), "test": (1, 4)}
    said = capsys.readouterr().out
    assert said.startswith("1 of 1 pairs with the worse answer of the test split are cut")
    plain = corpus(rejected_key="")
    assert plain.fingerprint() != data.fingerprint()


def test_both_answers_are_detokenised(corpus):
    data = corpus(detokenise=True)
    assert list(data.source.rejected("train")) == ["3", "b", "y"]


def test_keys_that_do_not_go_together(corpus, tmp_path):
    with pytest.raises(UserError, match="data.rejected_key='bad' needs the answer to a prompt"):
        corpus(prompt_key="")
    with pytest.raises(UserError, match="data.rejected_key='bad' needs data.padding='end_of_text'"):
        corpus(padding="hidden").sizes(["train"])
    with pytest.raises(
        UserError, match=r"line 1: no key 'worse' \(data.rejected_key\); it has bad"
    ):
        corpus(rejected_key="worse").sizes(["train"])
    with pytest.raises(UserError, match="data.parts.talk.rejected_key='bad'"):
        Mixture({"talk": Part(TextFiles("x", **KEYS), 1.0)})


WRONG = [
    ({"objective.name": "preference"}, "data.rejected_key to that of the worse one"),
    (
        {"data.rejected_key": "bad"},
        "only for objective.name='preference', because objective.name='md4'",
    ),
    (
        {"objective.name": "preference", "data.rejected_key": "bad", "train.time_power": "2.0"},
        "train.time_power=2.0 needs a loss that is a mean over times",
    ),
]


@pytest.mark.parametrize("keys, said", WRONG)
def test_what_cannot_be_trained(keys, said, corpus):
    path = corpus().source.path
    own = {"data.name": "text", "data.path": path, "data.text_key": "good", "data.prompt_key": "q"}
    own |= {"tokenizer.name": "bytes", "data.length": "8", "data.padding": "end_of_text"}
    config = schema.load_config(str(PACKAGE_ROOT / "configs/base.py"), own | keys)
    found = build.experiment(config, TextDomain(Bytes(), 8))
    with pytest.raises(UserError, match=said):
        check_training(found)
