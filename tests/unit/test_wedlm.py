"""WeDLM: tokens before masks in a causal network, and its streaming parallel decoding."""

import dataclasses
import itertools
import json

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy_blocks import drawn
from peer_folders import answers, peer_folder
from safetensors.numpy import load_file

import md4_jax
from md4_jax.evals.samples import drawn_samples
from md4_jax.objectives.eso import EsoOrders
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt, UserError, batch_of
from md4_jax.samplers import loop
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.streaming import Streaming

CLOSE, SYMBOLS, MASK = 3e-5, 123, 121
TOLD = answers("wedlm")


def own(entries) -> np.ndarray:
    """Entries of their vocabulary as symbols here, where the mask is the last."""
    entries = np.asarray(entries)
    return np.where(entries == MASK, SYMBOLS, entries - (entries > MASK))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("wedlm"), "wedlm"))


@pytest.fixture(scope="module")
def logits(model):
    """z -> logits of texts that are read with all tokens before all masks, without a cache."""
    denoiser = model.experiment.network.denoiser(model.params)

    @jax.jit
    def read(z):
        rank = jnp.argsort(jnp.argsort(z == SYMBOLS, axis=1, stable=True), axis=1)
        h = denoiser.ordered.features(z, jnp.zeros(len(z)), rank)
        return denoiser.unembed(h)

    return lambda z: np.asarray(read(jnp.asarray(z)))


def test_its_config_says_an_order_and_the_sampler(model):
    network = model.config["network"]
    assert model.config["objective"] == {"name": "wedlm"}
    assert model.experiment.sampler_step == Streaming(width=16, limit=0.4, penalty=0.02)
    assert network["qk_norm"] and not (network["causal"] or network["shifted"])
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id


def test_the_logits_with_tokens_before_masks(logits):
    expected = np.delete(np.asarray(TOLD["outputs"]), MASK, axis=-1)[..., :SYMBOLS]
    np.testing.assert_allclose(logits(own(TOLD["z"])), expected, atol=CLOSE)


def test_the_mask_of_its_code_if_the_config_has_none(tmp_path):
    folder = peer_folder(tmp_path, "wedlm", mask_token_id=None)
    with pytest.raises(UserError, match="the mask is 151665 .*must be below .* 128"):
        md4_jax.load(folder)


def test_what_is_exported_is_what_was_read(model, tmp_path):
    folder = model.export(tmp_path / "exported")
    found, expected = (load_file(f"{x}/model.safetensors") for x in (folder, model.origin))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rows = SYMBOLS + 1 if name == "model.embed_tokens.weight" else len(value)
        assert np.array_equal(found[name][:rows], value[:rows]), name
    assert json.loads((folder / "config.json").read_text()) == {**TOLD["config"]}
    whole = {"objective.name": "md4", "sample.name": "ancestral"}
    with pytest.raises(UserError, match="the model has objective.name='md4'"):
        md4_jax.load(model.origin, whole).export(tmp_path / "again")


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("number", range(len(TOLD["samples"])))
@pytest.mark.cases(2)
def test_the_tokens_that_its_decoder_draws(number, cached, model):
    """And in as many evaluations."""
    told = TOLD["samples"][number]
    options = {key: told[key] for key in ("width", "limit", "penalty")}
    found, passes = drawn(
        model, own(told["prompt"]), told["length"], cached=cached, steps=3, **options
    )
    assert found == own(told["tokens"]).tolist() and passes == told["passes"]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    "number, case", [*itertools.product(range(len(TOLD["samples"])), range(2))]
)
@pytest.mark.cases(1)
def test_a_text_stops_where_its_decoder_stops(number, case, cached, model):
    """After as many evaluations."""
    told = TOLD["samples"][number]
    ending = told["stopped"][case]
    size, length, stops = len(told["prompt"]), told["length"], (int(own(ending["stop"])),)
    tokens, given = np.zeros(length, np.int32), np.arange(length) < size
    tokens[:size] = own(told["prompt"])
    options = {key: told[key] for key in ("width", "limit", "penalty")}
    asked = {"num": 1, "length": length, "temperature": 0.0, "steps": 3, "cached": cached}
    experiment = model.sampling(asked | options)
    step = dataclasses.replace(experiment.sampler_step, stops=stops)
    experiment = experiment._replace(sampler_step=step, ends=stops)
    found = drawn_samples(experiment, model.params, {}, [Prompt(tokens, given)])
    end = ending["length"]
    assert found.lengths[0] == end and found.evaluations[0] == ending["passes"]
    assert found.tokens[0, :end].tolist() == own(told["tokens"])[:end].tolist()


def test_a_stop_of_the_prompt_or_behind_a_mask_ends_nothing():
    """And masks of texts that have ended are filled, so that no evaluation is taken for them."""
    process, step = Masking(4), Streaming(width=2, stops=(3, 2))
    z = jnp.asarray([[3, 0, 4, 4], [3, 0, 4, 3], [0, 2, 1, 4], [0, 3, 4, 1], [0, 2, 1, 0]])
    given = jnp.asarray([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]]) > 0
    found = step._ended(process, z, given).tolist()
    assert found == [[3, 0, 4, 4], [3, 0, 4, 3], [0, 2, 1, 3], [0, 3, 3, 1], [0, 2, 1, 0]]


def slowly(logits, text, width: int, limit: float, penalty: float) -> tuple[list, int]:
    """What is drawn by going over the masks one by one, and the number of evaluations."""
    text, passes = list(text), 0
    while SYMBOLS in text:
        found, first, costs = logits([text])[0], text.index(SYMBOLS), {}
        for place in range(first, min(first + width, len(text))):
            if text[place] == SYMBOLS:
                chances = np.exp(found[place] - np.logaddexp.reduce(found[place]))
                nats = -float(np.sum(chances * np.log(np.maximum(chances, 1e-300))))
                costs[place] = nats + penalty * (place - first)
        sure = [place for place, cost in costs.items() if cost < limit]
        for place in sure or [min(costs, key=costs.get)]:
            text[place] = int(np.argmax(found[place]))
        passes += 1
    return text, passes


@pytest.mark.campaign
def test_given_tokens_may_follow_masks(model, logits):
    """Near and far, in texts of one batch that need different numbers of evaluations."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 119, (3, 24)).astype(np.int32)
    given = np.zeros((3, 24), bool)
    given[:, :3], given[0, [7, 20]], given[1, :20], given[2, [5, 6]] = True, True, True, True
    options = dict(width=4, limit=1.2, penalty=0.05)
    prompts = [Prompt(*row) for row in zip(tokens, given, strict=True)]
    found = []
    for cached in (True, False):
        asked = {"num": 1, "length": 24, "temperature": 0.0, "steps": 2, "cached": cached}
        experiment = model.sampling(asked | options)
        found.append(drawn_samples(experiment, model.params, {}, prompts))
    for row, text in enumerate(np.where(given, tokens, SYMBOLS).tolist()):
        expected, passes = slowly(logits, text, **options)
        for each in found:
            assert each.tokens[row].tolist() == expected and each.evaluations[row] == passes


def test_padding_behind_the_text_leaves_the_cache_in_use(model):
    """The padding of a chat is hidden, so that no evaluation reads the whole text."""
    passes = {"whole": 0}
    told = {"segments": jnp.where(jnp.arange(32) < 20, 0, -1)[None]}
    tokens = jnp.where(jnp.arange(32) < 4, 7, 0)[None]

    def counted(denoiser):
        def features(*arguments):
            jax.debug.callback(lambda: passes.update(whole=passes["whole"] + 1))
            return denoiser.ordered.features(*arguments)

        return denoiser._replace(ordered=denoiser.ordered._replace(features=features))

    def texts(cached: bool):
        step = Streaming(width=4, limit=0.0, cached=cached)
        given = Prompt(tokens, (jnp.arange(32) < 4)[None] | (jnp.arange(32) >= 20)[None])
        bound = counted(model.experiment.network.bind(model.params["network"], told))
        run = jax.jit(lambda keys: loop.sample(
            bound, model.experiment.process, step, grid=uniform(2), keys=keys, prompt=given
        )[0].z)  # fmt: skip
        found = np.asarray(run(exact.keys_for(1, 1)))
        jax.effects_barrier()
        return found

    without = texts(False)
    assert passes["whole"] == 16
    passes["whole"] = 0
    np.testing.assert_array_equal(texts(True), without)
    assert passes["whole"] == 0


def test_its_likelihood_is_that_of_one_token_after_another(model, logits):
    """By the bound that evaluators report, which is exact here."""
    text = own(TOLD["z"])[:1]
    text = np.where(text == SYMBOLS, 7, text)
    length = text.shape[1]
    seen = np.where(np.tri(length, length, -1, bool), text, SYMBOLS)
    logs = jax.nn.log_softmax(logits(seen)[np.arange(length), np.arange(length)])
    expected = -np.asarray(logs)[np.arange(length), text[0]].sum()
    denoiser, process = model.experiment.network.denoiser(model.params), model.experiment.process
    bound = jax.jit(lambda *more: EsoOrders(0.0)(denoiser, process, *more))(
        batch_of(text), jnp.zeros(1), exact.keys_for(0, 1)
    )
    np.testing.assert_allclose(bound[0], [expected], rtol=1e-5)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(width=0), "sample.width must be at least 1, not 0"),
        (dict(limit=-0.1), "sample.limit must not be negative, not -0.1"),
        (dict(penalty=-1.0), "sample.penalty must not be negative, not -1.0"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(UserError, match=match):
        Streaming(**options)
