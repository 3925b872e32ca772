"""SDLM: windows of a token and masks after clean tokens, and longest prefix decoding."""

import itertools
import json

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_networks
from noisy_blocks import drawn
from peer_folders import answers, peer_folder
from safetensors.numpy import load_file

import md4_jax
from md4_jax.config import evaluators
from md4_jax.evals.samples import drawn_samples
from md4_jax.model import answers as chats
from md4_jax.objectives.sdlm import SDLM
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt, UserError, batch_of
from md4_jax.samplers import loop
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.longest_prefix import LongestPrefix

CLOSE, SYMBOLS, ROWS, SIZE = 3e-5, 123, 128, 4
TOLD = answers("sdlm")
CLEAN = np.asarray(TOLD["clean"])
WINDOWS = np.asarray(TOLD["windows"])[..., :SYMBOLS]
NATS = -(WINDOWS - np.log(np.sum(np.exp(WINDOWS), axis=-1, keepdims=True)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("sdlm"), "sdlm"))


@pytest.fixture(scope="module")
def costs(model):
    """(which tokens count, where windows begin) -> the loss of the clean texts."""
    own, x = model.experiment, jnp.asarray(CLEAN)
    denoiser = own.network.denoiser(model.params)

    @jax.jit
    def loss(counts, begin):
        batch = batch_of(x)._replace(loss_mask=counts)
        return SDLM(SIZE).loss_at(denoiser, own.process, batch, begin)

    return lambda counts, begin: np.asarray(loss(jnp.asarray(counts), jnp.asarray(begin)))


def limit_of(told: dict) -> dict:
    """Keys of a run. Its entropy is divided by that of all rows, which are more than symbols."""
    if told["alg"] == "prob_conf":
        return dict(limit=told["limit"], width=told["width"])
    part = np.log(ROWS) / np.log(SYMBOLS)
    return dict(limit=1 - (1 - told["limit"]) * part, width=told["width"], score="entropy")


def test_its_config_says_windows_and_the_sampler(model):
    network = model.config["network"]
    assert model.config["objective"] == {"name": "sdlm", "block_size": SIZE}
    assert model.experiment.sampler_step == LongestPrefix(width=SIZE)
    assert network["qkv_bias"] and not (network["causal"] or network["shifted"])
    assert model.domain.vocab_size == SYMBOLS == model.experiment.process.mask_id


def test_the_costs_of_windows_are_those_of_its_own_code(model, costs):
    """Of those that lie within the texts, whose windows are as long as theirs."""
    own, x = model.experiment, jnp.asarray(CLEAN)
    denoiser, one = own.network.denoiser(model.params), SDLM(SIZE, "token")
    run = jax.jit(lambda x: one.of_tokens(denoiser, own.process, batch_of(x), None, None))
    each, seen = run(x), 0
    for row, starts in enumerate(TOLD["starts"]):
        for window, start in enumerate(starts):
            if start + SIZE <= 12:
                after = CLEAN[row, start + 1 : start + 1 + SIZE]
                expected = NATS[row, window, np.arange(len(after)), after]
                np.testing.assert_allclose(each[row, start + 1], expected[0], atol=CLOSE)
                counts = np.zeros((2, 12), bool)
                counts[row, start + 1 : start + 1 + SIZE] = True
                found = costs(counts, [start % SIZE] * 2)[row]
                np.testing.assert_allclose(found, expected.sum(), atol=4 * CLOSE)
                seen += 1
    assert seen == 7


def test_u_draws_where_windows_begin_and_the_first_token_costs_nothing(model, costs):
    own, x = model.experiment, jnp.asarray(CLEAN)
    denoiser, counts = own.network.denoiser(model.params), np.ones((2, 12), bool)
    run = jax.jit(lambda u: SDLM(SIZE)(denoiser, own.process, batch_of(x), u, None)[0])
    for begins in ((0, 3), (2, 1)):
        found = run((jnp.asarray(begins) + 0.5) / SIZE)
        np.testing.assert_allclose(found, costs(counts, begins), rtol=1e-5)
    counts[:, 1:] = False
    assert not costs(counts, [0, 1]).any()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("number", range(len(TOLD["samples"])))
@pytest.mark.cases(2)
def test_the_tokens_that_its_decoder_keeps_in_each_step(number, cached, model):
    """By probability and by entropy, with windows of other sizes than in training."""
    told = TOLD["samples"][number]
    length = len(told["prompt"]) + told["length"]
    expected = (told["prompt"] + told["drawn"][-1])[:length]
    found, passes = drawn(model, told["prompt"], length, steps=3, cached=cached, **limit_of(told))
    assert found == expected and passes == len(told["drawn"])


@pytest.mark.slow
def test_its_states_are_those_of_its_decoder(model):
    told = TOLD["samples"][0]
    begin, length = len(told["prompt"]), len(told["prompt"]) + told["length"]
    asked = dict(num=1, length=length, temperature=0.0, steps=1, **limit_of(told))
    experiment = model.sampling(asked)
    tokens, given = np.zeros((1, length), np.int32), np.arange(length)[None] < begin
    tokens[0, :begin] = told["prompt"]
    _, frames = experiment.loop(
        experiment.network.denoiser(model.params), experiment.process, experiment.sampler_step,
        grid=experiment.grid, keys=exact.keys_for(0, 1), prompt=Prompt(tokens, given), trace=1,
    )  # fmt: skip
    sizes = [np.sum(z[0] != SYMBOLS) - begin for z in np.asarray(frames.z)]
    sizes = [size for n, size in enumerate(sizes) if n == 0 or size != sizes[n - 1]]
    assert sizes == [0, *(min(len(x), told["length"]) for x in told["drawn"])]


def test_self_speculative_decoding_draws_the_same_one_by_one(model):
    """Which verifies the tokens of a window by windows that begin at each of them."""
    told, length = TOLD["samples"][0], TOLD["samples"][0]["length"]
    prompt, verified = told["prompt"], TOLD["speculative"][-1]
    found, passes = drawn(model, prompt, len(prompt) + length, steps=1, limit=1.0)
    assert found == prompt + verified[:length] and passes == length


def test_padding_behind_an_answer_changes_nothing(model):
    """Windows reach beyond the text, also where a chat's canvas ends."""
    told = TOLD["samples"][1]
    size, keys = told["length"], limit_of(told)
    ids = np.asarray(told["prompt"], np.int32)
    found = chats.drawn(model, [ids], size, dict(temperature=0.0, steps=1, **keys))[0]
    assert found.tolist() == told["drawn"][-1][:size]


@pytest.mark.campaign
def test_given_tokens_behind_masks_stay_and_are_seen_by_later_ones(model):
    tokens = np.random.default_rng(0).integers(0, 119, (2, 24)).astype(np.int32)
    given = np.zeros((2, 24), bool)
    given[:, :3], given[0, 6], given[1, 5:18] = True, True, True
    prompts = [Prompt(*row) for row in zip(tokens, given, strict=True)]
    found = []
    for cached in (True, False):
        asked = dict(num=1, length=24, temperature=0.0, steps=1, limit=0.2, cached=cached)
        experiment = model.sampling(asked)
        found.append(drawn_samples(experiment, model.params, {}, prompts))
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_array_equal(found[0].evaluations, found[1].evaluations)
    np.testing.assert_array_equal(found[0].tokens[given], tokens[given])
    alone, passes = drawn(model, found[0].tokens[1, :18], 24, steps=1, limit=0.2)
    assert alone == found[0].tokens[1].tolist()
    before, more = drawn(model, tokens[1, :3], 5, steps=1, limit=0.2)
    assert before == found[0].tokens[1, :5].tolist()
    assert found[0].evaluations[1] == passes + more


@pytest.fixture(scope="module")
def tiny():
    """A denoiser of 2 symbols, its process, and the costs of all texts of 4 one by one."""
    network, params = tiny_networks.built(vocab_size=2, time_conditioning=False)
    denoiser, process = network.bind(jax.tree.map(jnp.asarray, params)), Masking(2)
    texts = jnp.asarray(list(itertools.product(range(2), repeat=4)))
    nats, _ = jax.jit(lambda x: SDLM(2, "token")(denoiser, process, batch_of(x), None, None))(texts)
    return denoiser, process, np.asarray(nats)


def test_the_chances_of_all_texts_sum_to_one(tiny):
    nats = tiny[2]
    np.testing.assert_allclose(np.exp(-nats).sum(), 1.0, rtol=1e-5)
    assert np.ptp(nats) > 0.1


@pytest.mark.slow
def test_texts_drawn_one_by_one_have_these_chances(tiny):
    """Windows of 2 do not reach beyond the text. 4000 draws, within 4.5 standard errors."""
    denoiser, process, nats = tiny
    many, step = 4000, LongestPrefix(width=2, limit=1.0)
    run = jax.jit(lambda keys: loop.sample(
        denoiser, process, step, grid=uniform(1), keys=keys, prompt=loop.no_prompt(many, 4)
    )[0])  # fmt: skip
    chain = run(exact.keys_for(5, many))
    number = np.asarray(chain.z) @ [8, 4, 2, 1]
    found, chance = np.bincount(number, minlength=16) / many, np.exp(-nats)
    assert np.abs((found - chance) / np.sqrt(chance * (1 - chance) / many)).max() < 4.5
    assert np.all(chain.evaluations == 4)
    one = SDLM(2, "token")
    each = jax.jit(lambda x: one.of_tokens(denoiser, process, batch_of(x), None, None))(chain.z)
    np.testing.assert_allclose(chain.confidence, np.exp(-each), rtol=1e-5)


def test_what_is_exported_is_what_was_read(model, tmp_path):
    folder = model.export(tmp_path / "exported")
    found, expected = (load_file(f"{x}/model.safetensors") for x in (folder, model.origin))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rows = SYMBOLS + 1 if name == "model.embed_tokens.weight" else len(value)
        assert np.array_equal(found[name][:rows], value[:rows]), name
    assert json.loads((folder / "config.json").read_text()) == TOLD["config"]
    eight = md4_jax.load(model.origin, {"objective.block_size": 8}).export(tmp_path / "eight")
    assert json.loads((eight / "config.json").read_text())["block_size"] == 8
    assert md4_jax.load(eight).experiment.sampler_step.width == 8
    whole = {"objective.name": "md4", "sample.name": "ancestral"}
    with pytest.raises(UserError, match="the model has objective.name='md4'"):
        md4_jax.load(model.origin, whole).export(tmp_path / "again")


def test_scores_are_the_exact_costs(model):
    """Also of a text that is padded: of the windows that do not reach beyond it."""
    own, text = model.experiment, "abcde"
    tokens = jnp.asarray([model.domain.encode(text)])
    denoiser = own.network.denoiser(model.params)
    expected, _ = SDLM(SIZE, "token")(denoiser, own.process, batch_of(tokens), None, None)
    found = model.score([text])
    assert found.exact and found.objective == "SDLM"
    np.testing.assert_allclose(found.nats, expected, rtol=1e-5)


def test_evaluators_have_the_windows_of_training():
    assert evaluators.named("evals.test.objective", {"name": "sdlm"}, SDLM(8)) == SDLM(8, "token")
    assert evaluators.tightest("evals.test", SDLM(8), Masking(3), None) == SDLM(8, "token")


def test_causal_windows_are_refused(tmp_path):
    with pytest.raises(UserError, match="causal_attn=True; only False is supported"):
        md4_jax.load(peer_folder(tmp_path, "sdlm", causal_attn=True))


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"sample.name": "streaming"},
            "sample.name='streaming' does not fit objective.name='sdlm'",
        ),
        (
            {"objective.name": "wedlm"},
            "sample.name='longest_prefix' does not fit objective.name='wedlm': only",
        ),
        (
            {"evals.test.objective.name": "eso_orders"},
            "evals.test.objective.name='eso_orders' does not fit objective.name='sdlm'.*'sdlm'$",
        ),
    ],
)
def test_other_orders_are_refused(changes, match, model):
    with pytest.raises(UserError, match=match):
        md4_jax.load(model.origin, changes)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: LongestPrefix(width=1), "sample.width must be at least 2, not 1"),
        (lambda: LongestPrefix(limit=1.5), r"sample.limit must lie in \[0, 1\], not 1.5"),
        (lambda: LongestPrefix(score="margin"), "sample.score must be 'probability' or 'entropy'"),
        (lambda: SDLM(1), "objective.block_size must be at least 2, not 1: windows of one"),
        (lambda: SDLM(draws="times"), "objective.draws must be 'window' or 'token', not 'times'"),
    ],
)
def test_bad_options_are_refused(make, match):
    with pytest.raises(UserError, match=match):
        make()
