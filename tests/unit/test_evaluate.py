"""The evaluator over batches, and samples in batches of one shape and as files."""

import json
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax import report
from md4_jax.data.tokenizers import Characters
from md4_jax.evaluate import EvalOptions, Evaluator
from md4_jax.processes.masking import Masking
from md4_jax.prompts import Template
from md4_jax.protocols import Batch, Network, UserError
from md4_jax.sample import SampleOptions, Samples, draw_samples, make_sampler, write_samples
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import cosine
from md4_jax.samplers.loop import blank, sample
from md4_jax.sharding import MeshOptions, make_mesh

MESH = make_mesh(MeshOptions(data=1))


def batch(first_tokens, weight):
    tokens = np.repeat(np.asarray(first_tokens, np.int32)[:, None], 2, axis=1)
    return Batch(tokens, np.asarray(weight, np.float32), {})


def evaluator(draws=2):
    """nats of a sequence: its first token, plus the number of its batch, plus the draw."""

    def step(params, batch, index):
        nats = batch.tokens[:, 0] + 10.0 * index + params
        nats = nats + jnp.arange(draws, dtype=jnp.float32)[:, None]
        return {"nats": nats, "prior": jnp.full_like(nats, 0.5)}

    return Evaluator(step, MESH, draws, characters=False)


def test_all_batches_are_pooled_without_padding():
    result = evaluator()(jnp.float32(0.0), [batch([1, 3], [1, 1]), batch([5, 99], [1, 0])])
    # Draws average to + 0.5: 1.5, 3.5 and, in the second batch, 15.5; two tokens each.
    assert result["sequences"] == 3 and result["draws"] == 2 and result["tokens"] == 6
    assert result["nats_per_token"] == pytest.approx(20.5 / 6)
    assert result["prior_bits_per_token"] == pytest.approx(0.25 / np.log(2))
    assert result["diffusion_bits_per_token"] == pytest.approx((20.5 / 6 - 0.25) / np.log(2))
    assert "reconstruction_bits_per_token" not in result


def test_bytes_and_words_are_those_of_the_rows_that_count():
    """Nats 1.5, 3.5 and 15.5 of sequences of 4, 1 and 5 bytes; the last row is padding."""
    texts = [np.array([[4, 1], [1, 1]], np.int32), np.array([[5, 2], [9, 9]], np.int32)]
    parts = (([1, 3], [1, 1]), ([5, 99], [1, 0]))
    batches = [batch(*part)._replace(text=text) for part, text in zip(parts, texts, strict=True)]
    result = evaluator()(jnp.float32(0.0), batches)
    assert (result["bytes"], result["words"]) == (10, 4)
    assert result["bits_per_byte"] == pytest.approx(20.5 / 10 / np.log(2))
    assert result["word_perplexity"] == pytest.approx(np.exp(20.5 / 4))
    said = report.line(result)
    for name, form, unit in (
        ("bits_per_byte", ".4f", " bits/byte"),
        ("word_perplexity", ".5g", ""),
    ):
        assert f"<= {result[name]:{form}} +- {result[name + '_se']:{form}}{unit}" in said


def test_the_model_among_n_grams_has_its_error_unless_it_is_exact():
    result = evaluator()(jnp.float32(0.0), [batch([1, 3], [1, 1])])
    error = f"+- {result['bits_per_token_se']:.4f}"
    assert f"this model (bound, {error})" in report.ladder([5.0, 0.5], result)
    assert "this model (exact)" in report.ladder([5.0], result | {"exact": True})


def test_what_a_process_learned_is_named_from_both_ends():
    process = types.SimpleNamespace(learned=lambda: {"power": np.array([2.0, 0.5, 3.0, 1.0])})
    assert report.learned(process, Characters("abcd"), most=2).splitlines() == [
        "power by symbol: min 0.5000, mean 1.6250, max 3.0000",
        "  largest: 'c' 3.000, 'a' 2.000",
        "  smallest: 'b' 0.500, 'd' 1.000",
    ]


def test_given_tokens_are_not_counted():
    """One of the four tokens of these two sequences is given: 1.5 + 3.5 nats over three."""
    marks = np.array([[True, False], [False, False]])
    result = evaluator()(jnp.float32(0.0), [batch([1, 3], [1, 1])._replace(given=marks)])
    assert result["tokens"] == 3 and result["nats_per_token"] == pytest.approx(5.0 / 3)


def test_a_limit_is_rounded_up_to_whole_batches():
    batches = [batch([1, 1], [1, 1])] * 5
    for limit, sequences in ((1, 2), (2, 2), (3, 4), (0, 10), (99, 10)):
        assert evaluator()(jnp.float32(0.0), batches, limit)["sequences"] == sequences


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(draws=0), "eval.draws must be at least 1, not 0"),
        (dict(limit=-1), "eval.limit must not be negative, not -1"),
        (dict(split="dev"), "train, validation or test, not 'dev'"),
    ],
)
def test_impossible_eval_options(options, words):
    with pytest.raises(UserError, match=words):
        EvalOptions(**options)


NETWORK = Network(
    lambda key: {}, lambda params: exact.denoiser_of(exact.table_logits(3, 2)), time_free=True
)
PARAMS = {"network": {}, "process": Masking(3)}
SAMPLER = make_sampler(NETWORK, sample, cosine(4), MESH)
BLANK = Template(*(row[0] for row in blank(1, 2)))


@pytest.mark.slow
def test_a_sample_depends_on_the_seed_and_its_number_alone():
    def drawn(**options):
        asked = SampleOptions(**options)
        return draw_samples(SAMPLER, PARAMS, Ancestral(), asked, [BLANK], mesh=MESH, window=2)

    samples = drawn(num=7, batch_size=7)
    whole = samples.tokens
    assert whole.shape == (7, 2) and (whole < 3).all()
    assert samples.seconds > 0 and samples.frames is None and (samples.lengths == 2).all()
    assert ((samples.evaluations >= 1) & (samples.evaluations <= 2)).all()
    np.testing.assert_array_equal(drawn(num=7, batch_size=3).tokens, whole)
    np.testing.assert_array_equal(drawn(num=2, batch_size=7).tokens, whole[:2])
    assert (drawn(num=7, batch_size=7, seed=1).tokens != whole).any()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(num=0), "sample.num must be at least 1, not 0"),
        (dict(length=-1), "sample.length must not be negative, not -1"),
    ],
)
def test_impossible_sample_options(options, words):
    with pytest.raises(UserError, match=words):
        SampleOptions(**options)


def test_samples_are_written_to_read_and_for_programs_and_none_is_overwritten(tmp_path):
    tokens = np.array([[0, 1], [2, 2]])
    samples = Samples(tokens, tokens < 0, np.array([2, 1]), np.array([5, 6]), 1.0, None)
    paths = [
        write_samples(tmp_path / "samples", 12, ["ab", "ü\nc"], samples, {"seed": 3})
        for _ in range(3)
    ]
    assert [path.name for path in paths] == [
        "step_00000012.txt", "step_00000012-2.txt", "step_00000012-3.txt"
    ]  # fmt: skip
    assert paths[0].read_text(encoding="utf-8").splitlines() == [
        "--- sample 0 ---", "ab", "", "--- sample 1 ---", "ü", "c"
    ]  # fmt: skip
    lines = paths[1].with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["text"] for row in rows] == ["ab", "ü\nc"]
    assert rows[1] == {
        "sample": 1, "step": 12, "seed": 3, "network_evaluations": 6, "text": "ü\nc",
        "tokens": [2],
    }  # fmt: skip


def test_the_compiled_sampler_is_made_once_for_all_settings():
    from md4_jax.samplers.transforms import Transform

    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(4))
    traced = []

    def loop(*arguments, **settings):
        traced.append(settings)
        return sample(*arguments, **settings)

    sampler = make_sampler(NETWORK, loop, cosine(4), MESH)
    with jax.set_mesh(MESH):
        for temperature in (0.3, 0.7, 0.9):
            sampler(PARAMS, Ancestral(Transform(temperature, 0.5)), keys, *blank(4, 2))
    assert len(traced) == 1
