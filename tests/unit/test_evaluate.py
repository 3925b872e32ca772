"""The evaluator over batches, and samples in batches of one shape and as files."""

import dataclasses
import errno
import functools
import json
import math
import types
from unittest import mock

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playgrounds import of_text

from md4_jax.config import schema
from md4_jax.config.starting import experiment_of
from md4_jax.data.domains import TextDomain
from md4_jax.data.tokenizers import Characters
from md4_jax.evals import likelihood
from md4_jax.evals import report as eval_report
from md4_jax.evals.context import Context
from md4_jax.evals.likelihood import Estimator, LikelihoodBound, make_eval_step
from md4_jax.evals.metrics import Likelihood
from md4_jax.evals.samples import DrawnSamples
from md4_jax.generate import writers
from md4_jax.generate.writers import write_samples
from md4_jax.objectives.autoregressive import AlongOrder
from md4_jax.options import MeshOptions, SampleOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Network, Prompt, UserError, batch_of
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.paths import place
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.batches import Samples, context_of, draw_samples, make_sampler
from md4_jax.samplers.grids import cosine
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.training.loop import fresh_state

MESH = make_mesh(MeshOptions(data=1))
FLOAT32 = Network(init=None, bind=None, time_free=False)  # its operands choose compiler options


def batch(first_tokens, counts):
    tokens = np.repeat(np.asarray(first_tokens, np.int32)[:, None], 2, axis=1)
    return batch_of(tokens, loss_mask=np.repeat(np.asarray(counts, bool)[:, None], 2, axis=1))


def estimator(draws=2):
    """nats of a sequence: its first token, plus the number of its batch, plus the draw."""

    def step(params, batch, index):
        nats = batch.tokens[:, 0] + 10.0 * index + params
        nats = nats + jnp.arange(draws, dtype=jnp.float32)[:, None]
        return {"nats": nats, "prior": jnp.full_like(nats, 0.5)}

    return Estimator(step, FLOAT32, MESH, draws)


def test_evaluators_with_the_same_bound_share_one_program(monkeypatch):
    """What is compiled depends on the bound, the draws and their seed, and on nothing else."""
    made = []

    def step_of(network, objective, draws, seed, guidance):
        made.append((objective, draws, seed))
        return lambda params, batch, index: {"nats": batch.tokens[:, 0][None] + 0.0 * index}

    monkeypatch.setattr(likelihood, "make_eval_step", step_of)
    domain = types.SimpleNamespace(unit="token")
    experiment = types.SimpleNamespace(network=NETWORK, mesh=MESH, domain=domain)
    programs = {}
    for objective, options in (
        ("md4", dict(split="validation", limit=2)),
        ("md4", dict(split="test", data={"path": "FILE"}, every=7)),
        ("md4", dict(draws=2)),
        ("md4", dict(seed=1)),
        ("any_order", dict(split="validation")),
    ):
        bound = LikelihoodBound(objective, **options)
        found = bound.of_batches(experiment, None, [batch([1, 3], [1, 1])] * 2, programs)
        assert found["sequences"] == (2 if "limit" in options else 4)
    assert made == [("md4", 1, 0), ("md4", 2, 0), ("md4", 1, 1), ("any_order", 1, 0)]


def test_what_is_exact_is_computed_once(monkeypatch):
    """Draws change nothing there; the line names none."""
    monkeypatch.setattr(
        likelihood,
        "make_eval_step",
        lambda network, objective, draws, seed, guidance: step_of(draws),
    )

    def step_of(draws):
        return lambda params, batch, index: {"nats": jnp.tile(batch.tokens[:, 0], (draws, 1))}

    domain = types.SimpleNamespace(unit="token")
    experiment = types.SimpleNamespace(network=NETWORK, mesh=MESH, domain=domain)
    for objective, draws, words in (
        (AlongOrder("left_to_right"), 1, "(2 sequences)"),
        (AlongOrder(), 4, "(2 sequences, 4 draws each)"),
    ):
        bound = LikelihoodBound(objective, draws=4)
        found = bound.of_batches(experiment, None, [batch([1, 3], [1, 1])], {})
        assert found["draws"] == draws and eval_report.line(found).endswith(words)


def test_the_network_is_told_the_labels():
    """Nats of a sequence that are its label."""
    network = Network(
        lambda key: {},
        lambda params, context, keys: Denoiser(lambda z, t: context["label"], lambda h: h),
        time_free=True,
    )
    objective = lambda denoiser, process, batch, u, keys: (denoiser(batch.tokens, u), {})  # noqa: E731
    step = make_eval_step(network, objective, 2, seed=0)
    labelled = batch([1, 3], [1, 1])._replace(context={"label": jnp.asarray([2.0, 5.0])})
    nats = step({"network": {}, "process": Masking(9)}, labelled, jnp.int32(0))["nats"]
    np.testing.assert_array_equal(nats, [[2.0, 5.0]] * 2)


def test_all_batches_are_pooled_without_padding():
    result = estimator()(jnp.float32(0.0), [batch([1, 3], [1, 1]), batch([5, 99], [1, 0])])
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
    result = estimator()(jnp.float32(0.0), batches)
    assert (result["bytes"], result["words"]) == (10, 4)
    assert result["bits_per_byte"] == pytest.approx(20.5 / 10 / np.log(2))
    assert result["word_perplexity"] == pytest.approx(np.exp(20.5 / 4))
    said = eval_report.line(result)
    for name, form, unit in (
        ("bits_per_byte", ".4f", " bits/byte"),
        ("word_perplexity", ".5g", ""),
    ):
        assert f"<= {result[name]:{form}} +- {result[name + '_se']:{form}}{unit}" in said
    # exp(720) is no float64, and the largest number would be no bound.
    large = Likelihood()
    large.add(np.array([[720.0]]), np.array([9]), text=np.array([[9, 1]]))
    said = eval_report.line({**large.result(), "draws": 1, "exact": False})
    assert "perplexity <= " in said and "word" not in said


def test_the_model_among_n_grams_has_its_error_unless_it_is_exact():
    result = estimator()(jnp.float32(0.0), [batch([1, 3], [1, 1])])
    error = f"+- {result['bits_per_token_se']:.4f}"
    assert f"this model (bound, {error})" in eval_report.ladder([5.0, 0.5], result)
    assert "this model (exact)" in eval_report.ladder([5.0], result | {"exact": True})


def test_what_a_process_learned_is_named_from_both_ends():
    process = types.SimpleNamespace(learned=lambda: {"power": np.array([2.0, 0.5, 3.0, 1.0])})
    assert eval_report.learned(process, TextDomain(Characters("abcd"), 4), most=2).splitlines() == [
        "power by symbol: min 0.5000, mean 1.6250, max 3.0000",
        "  largest: 'c' 3.000, 'a' 2.000",
        "  smallest: 'b' 0.500, 'd' 1.000",
    ]


def test_tokens_that_are_conditioned_on_are_not_counted():
    """One of the four tokens of these two sequences is a prompt: 1.5 + 3.5 nats over three."""
    marks = np.array([[True, False], [False, False]])
    result = estimator()(jnp.float32(0.0), [batch([1, 3], [1, 1])._replace(loss_mask=~marks)])
    assert result["tokens"] == 3 and result["nats_per_token"] == pytest.approx(5.0 / 3)


def test_a_limit_is_rounded_up_to_whole_batches():
    batches = [batch([1, 1], [1, 1])] * 5
    for limit, sequences in ((1, 2), (2, 2), (3, 4), (0, 10), (99, 10)):
        assert estimator()(jnp.float32(0.0), batches, limit)["sequences"] == sequences


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(draws=0), "draws must be at least 1, not 0"),
        (dict(draws=2.5), "draws must be a whole number, not 2.5"),
        (dict(seed="a"), "seed must be a whole number, not 'a'"),
        (dict(stride=True), "stride must be a whole number, not True"),
        (dict(limit=-1), "limit must not be negative, not -1"),
        (dict(split="dev"), "train, validation, test or all, not 'dev'"),
    ],
)
def test_impossible_options_of_a_bound(options, words):
    with pytest.raises(UserError, match=words):
        LikelihoodBound(None, **options)


def test_whole_numbers_may_be_those_of_numpy():
    assert LikelihoodBound(None, draws=np.int64(2), seed=np.uint32(3)).draws == 2


NETWORK = Network(
    lambda key: {},
    lambda params, context, keys: exact.denoiser_of(exact.table_logits(3, 2)),
    time_free=True,
)
PARAMS = {"network": {}, "process": Masking(3)}
SAMPLER = make_sampler(NETWORK, sample, cosine(4), MESH)
BLANK = Prompt(*(row[0] for row in no_prompt(1, 2)))


@pytest.mark.slow
def test_a_sample_depends_on_the_seed_and_its_number_alone():
    def drawn(**options):
        asked = SampleOptions(**options)
        return draw_samples(SAMPLER, PARAMS, Ancestral(), asked, [BLANK], window=2)

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


def texts_of(directory) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_two_processes_that_write_samples_of_a_step_at_once_keep_both(tmp_path):
    def meanwhile(file) -> None:
        file.write_text("mine")
        writers._write(tmp_path, 3, {".txt": lambda file: file.write_text("of another")})

    path = writers._write(tmp_path, 3, {".txt": meanwhile})
    assert path == tmp_path / "step_00000003-2.txt"
    assert texts_of(tmp_path) == {"step_00000003.txt": "of another", path.name: "mine"}


def test_files_of_samples_are_complete_or_not_there(tmp_path):
    """And a file whose partner was deleted is not overwritten."""

    def full(file) -> None:
        file.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError):
        writers._write(tmp_path, 3, {".txt": lambda file: file.write_text("a"), ".jsonl": full})
    assert not texts_of(tmp_path)
    (tmp_path / "step_00000003.jsonl").write_text("earlier")
    endings = (".txt", ".jsonl")
    writers._write(tmp_path, 3, dict.fromkeys(endings, lambda file: file.write_text("a")))
    named = {f"step_00000003-2{ending}": "a" for ending in endings}
    assert texts_of(tmp_path) == {"step_00000003.jsonl": "earlier", **named}


@pytest.mark.slow
def test_rows_of_samples_tell_how_to_draw_them_again(tmp_path):
    """Keys that differ from their defaults, and the template and the class of each row."""
    file = tmp_path / "templates.txt"
    file.write_text("a_\n\nb\\n_\n")
    model = of_text({"label_dropout": 0.0})
    asked = dict(
        name="confidence", score="margin", per_step=2, top_k=5, length=8, num=2, seed=3,
        templates=str(file), batch_size=2, trace=True,
    )  # fmt: skip
    experiment, quiet = model.sampling(asked), lambda line: None
    assert writers.record(model.sampling({"num": 4, "steps": 7})) == {
        "seed": 0, "sampler": model.config["sample"]["name"], "steps": 7, "grid": "cosine",
        "temperature": 1.0,
    }  # fmt: skip
    context = Context("samples", 0, place(tmp_path), None, None, None, {}, {}, quiet)
    DrawnSamples().run(experiment, model.params, context)
    (written,) = (tmp_path / "samples").glob("*.jsonl")
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    labels = context_of(experiment.sample, 4, 2)["label"].tolist()
    assert [row["template"] for row in rows] == ["a_", "a_", "b\n_", "b\n_"]
    assert [row["label"] for row in rows] == labels
    kept = {key: rows[0][key] for key in asked if key in rows[0]}
    left = ("name", "batch_size", "trace")
    assert kept == {key: value for key, value in asked.items() if key not in left}
    assert rows[0]["sampler"] == "confidence"


def test_a_judge_of_documents_scores_samples_as_another_judge_does(tmp_path, monkeypatch):
    """Samples are whole sequences, whatever `data.windows` says of the text it was trained on."""
    model = of_text({})
    experiment, found = model.sampling({"num": 2, "steps": 2, "judge": "self"}), []
    programs = {}
    for windows in ("grid", "documents"):
        judge = experiment._replace(data=dataclasses.replace(experiment.data, windows=windows))
        of_params = functools.partial(lambda judge, params: (judge, params), judge)
        context = Context("samples", 0, place(tmp_path), None, of_params, None, programs, {}, str)
        result = DrawnSamples().run(experiment, model.params, context)
        found.append({key: x for key, x in result.items() if key.startswith("judge")})
    assert found[0]["judge_sequences"] == 2 and found[0]["judge_nats_per_token"] > 0
    assert found[0] == found[1]
    written, said = (tmp_path / "samples" / "step_00000000.txt").read_text(), []
    # What took hours to draw is printed even if it cannot be written.
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(writers, "write_samples", mock.Mock(side_effect=full))
    with pytest.raises(OSError):
        DrawnSamples().run(experiment, model.params, context._replace(say=said.append))
    assert said == [f"samples:\n{written}"]


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
            step = Ancestral(Transform(temperature, 0.5))
            sampler.program(PARAMS, step, keys, no_prompt(4, 2), {})
    assert len(traced) == 1


def test_padding_that_counts_is_no_byte_and_no_word(tmp_path):
    """Of uniform predictions: V symbols are equally likely at each of the L positions of a row."""
    (tmp_path / "texts.jsonl").write_text('{"text": "to be"}\n{"text": "or"}\n' * 3)
    words = {
        "data.name": "text", "data.path": str(tmp_path / "texts.jsonl"), "data.length": "8",
        "data.windows": "documents", "data.padding": "end_of_text", "tokenizer.name": "bytes",
        "data.validation": "0", "data.test": "7", "network.tables": "0", "network.size": "16",
        "network.depth": "1", "network.heads": "2", "network.hidden": "32", "mesh.data": "1",
        "train.batch_size": "2",
    }  # fmt: skip
    config, told = schema.load_config("quickstart", words), []
    experiment, corpus = experiment_of(config, None)
    params, bound = fresh_state(experiment).averaged, experiment.evals["test"]
    context = types.SimpleNamespace(
        corpus=lambda changes: corpus, programs={}, name="test", say=told.append
    )
    found = bound.run(experiment, params, context)
    nats = 2 * 8 * np.log(257)  # of two rows, whatever they hold
    assert (found["tokens"], found["bytes"], found["words"]) == (16, 7, 3)
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / 7, rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(np.exp(nats / 3), rel=1e-4)
    assert found["bits_per_token"] == pytest.approx(np.log2(257), rel=1e-5)
    assert found["padding"] == "end_of_text"
    assert told[0].endswith("; padding counts among the tokens, not among bytes and words")


def test_numbers_that_json_lacks_are_null_at_any_depth():
    found = eval_report.finite({"a": math.nan, "b": {"c": math.inf, "d": {"e": -math.inf, "f": 1}}})
    assert found == {"a": None, "b": {"c": None, "d": {"e": None, "f": 1}}}
