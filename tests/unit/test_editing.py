"""Editing of drawn tokens: its law by enumeration, and the choices of LLaDA2.1's own sampler."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from peer_folders import INSTANCES, answers, peer_folder

import md4_jax
from md4_jax.evals.samples import drawn_samples
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Prompt, UserError
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import sample
from md4_jax.samplers.transforms import Transform
from tests import exact

V, L, N = 3, 3, 20_000
LIMIT, EDIT = 0.55, 0.4


@functools.cache
def table() -> np.ndarray:
    """Logits of every state, masks included: [(V + 1)^L, L, V]."""
    return np.random.default_rng(5).normal(size=((V + 1) ** L, L, V)) * 1.2


def denoiser() -> Denoiser:
    rows, base = jnp.asarray(table(), jnp.float32), (V + 1) ** np.arange(L)[::-1]
    return Denoiser(lambda z, t: rows[z @ base], lambda h: h)


def after(z: tuple, given: tuple, step: Confidence, revealing: bool) -> dict:
    """The law of the state after one network evaluation at z."""
    logits = table()[int(np.ravel_multi_index(z, (V + 1,) * L))]
    p = np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)
    law: dict = {}
    for drawn in itertools.product(range(V), repeat=L):
        sure = np.array([p[n, token] for n, token in enumerate(drawn)])
        masks = [n for n in range(L) if z[n] == V]
        best = sorted(masks, key=lambda n: -sure[n])
        count = max(1, sum(sure[n] >= step.limit for n in masks)) if revealing else 0
        new = list(z)
        for n in range(L):
            edits = z[n] != V and n not in given and drawn[n] != z[n] and sure[n] >= step.edit
            if n in best[:count] or (step.edit and edits):
                new[n] = drawn[n]
        law[tuple(new)] = law.get(tuple(new), 0.0) + np.prod(sure)
    return law


def law_of(step: Confidence, start: tuple, given: tuple) -> dict:
    """P(sample, number of evaluations)."""
    states, ended = {(start, 0): 1.0}, {}
    while any(V in z for z, _ in states):
        new: dict = {}
        for (z, calls), q in states.items():
            moves = after(z, given, step, True).items() if V in z else [(z, 1.0)]
            for then, p in moves:
                key = then, calls + (V in z)
                new[key] = new.get(key, 0.0) + p * q
        states = new
    for _ in range(step.edit_passes if step.edit else 0):
        new = {}
        for (z, calls), q in states.items():
            for then, p in after(z, given, step, False).items():
                place = ended if then == z else new
                place[then, calls + 1] = place.get((then, calls + 1), 0.0) + p * q
        states = new
    for key, q in states.items():
        ended[key] = ended.get(key, 0.0) + q
    return ended


def drawn(step: Confidence, start: tuple, given: tuple) -> dict:
    """How often each (sample, number of evaluations) is drawn."""
    mask = np.isin(np.arange(L), given)
    prompt = Prompt(np.tile(np.where(mask, start, 0), (N, 1)), np.tile(mask, (N, 1)))
    draw = jax.jit(
        lambda keys: sample(
            denoiser(), Masking(V), step, grid=uniform(L), keys=keys, prompt=prompt
        )[0]
    )
    chain = draw(exact.keys_for(2, N))
    rows = zip(np.asarray(chain.z).tolist(), np.asarray(chain.evaluations).tolist(), strict=True)
    counts: dict = {}
    for z, calls in rows:
        counts[tuple(z), calls] = counts.get((tuple(z), calls), 0) + 1
    return counts


def agrees(counts: dict, law: dict) -> bool:
    assert np.isclose(sum(law.values()), 1.0) and counts.keys() <= law.keys()
    often = [key for key, p in law.items() if p * N >= 5]
    rest = N - sum(counts.get(key, 0) for key in often), 1.0 - sum(law[key] for key in often)
    found = [*(counts.get(key, 0) for key in often), rest[0]]
    return laws.accepted(np.array(found), np.array([*(law[key] for key in often), rest[1]]))


@pytest.mark.parametrize("given", [(), (1,)])
@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.cases(1)
def test_the_law_of_samples_and_of_the_number_of_evaluations(given, passes):
    """Against all that may be drawn in each evaluation: chi-squared, p > 1e-4."""
    step = Confidence(rule="threshold", limit=LIMIT, edit=EDIT, edit_passes=passes)
    start = tuple(2 if n in given else V for n in range(L))
    counts = drawn(step, start, given)
    assert agrees(counts, law_of(step, start, given))
    if passes:
        plain = law_of(Confidence(rule="threshold", limit=LIMIT), start, given)
        whole = dict.fromkeys(itertools.product(range(V), repeat=L), 0.0)
        for (z, _), q in plain.items():
            whole[z] += q
        seen = [sum(c for (z, _), c in counts.items() if z == key) for key in whole]
        assert not laws.accepted(np.array(seen), np.array([*whole.values()]))


@pytest.mark.slow
def test_a_sample_does_not_depend_on_its_batch():
    """One row of a batch goes on to change tokens while others have settled."""
    step = Confidence(rule="threshold", limit=LIMIT, edit=EDIT, transform=Transform(0.7))
    keys = exact.keys_for(4, 16)
    nothing = Prompt(np.zeros((16, L), np.int32), np.zeros((16, L), bool))

    def draw(keys, prompt):
        return sample(denoiser(), Masking(V), step, grid=uniform(L), keys=keys, prompt=prompt)[0]

    whole, one = draw(keys, nothing), Prompt(nothing.tokens[:1], nothing.mask[:1])
    alone_of = jax.jit(lambda key: draw(key, one))
    for row in range(16):
        alone = alone_of(keys[row : row + 1])
        for found, expected in zip(alone[:4], whole[:4], strict=True):
            assert np.array_equal(found[0], expected[row])
    assert len(set(np.asarray(whole.evaluations).tolist())) > 2


@pytest.fixture(scope="module")
def llada21(tmp_path_factory):
    folder = peer_folder(tmp_path_factory.mktemp("editing"), "llada2", model_type="llada21_moe")
    return md4_jax.load(folder, {"objective.block": 4})


@pytest.mark.campaign
def test_llada21_has_the_network_of_llada2(llada21):
    """Its own code gives the numbers of LLaDA2's for these parameters to 3e-7."""
    told = answers("llada2")
    z, clean = (jnp.asarray(told[name]) for name in ("z", "clean"))
    own = llada21.experiment.network.denoiser(llada21.params)
    found = own.unembed(own.blocks.features(z, jnp.zeros((3, 4)), clean, 4))
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :123], atol=1e-5)


@pytest.mark.parametrize(
    "number", [0, 3, *(pytest.param(n, marks=pytest.mark.campaign) for n in (1, 2))]
)
@pytest.mark.cases(1)
def test_the_tokens_that_llada21_s_sampler_draws(number, llada21):
    """Six tokens are given, two of which are in a block that goes on; 14 are drawn."""
    told = json.loads((INSTANCES / "llada21.json").read_text())[number]
    assert told["edits"] >= 2
    options = {key: told[key] for key in ("limit", "edit", "edit_passes")}
    keys = dict(num=1, length=20, temperature=0.0, name="confidence", rule="threshold", steps=4)
    tokens, given = np.zeros(20, np.int32), np.arange(20) < 6
    tokens[:6] = told["prompt"]
    experiment = llada21.sampling(keys | options)
    found = drawn_samples(experiment, llada21.params, {}, [Prompt(tokens, given)])
    assert found.tokens[0].tolist() == told["tokens"]
    assert int(found.evaluations[0]) == told["passes"]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(edit=-0.1), "sample.edit must not be negative, not -0.1"),
        (dict(edit=9.0), "sample.edit is the smallest probability .* must be at most 1, not 9.0"),
        (dict(edit_passes=-1), "sample.edit_passes must not be negative, not -1"),
        (dict(edit=0.9, semi_autoregressive=4), "sample.edit=0.9 replaces tokens of the block"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Confidence(**options)


def test_samples_that_are_edited_have_no_likelihood():
    assert Confidence("margin").is_deterministic
    assert not Confidence("margin", edit=0.9).is_deterministic
