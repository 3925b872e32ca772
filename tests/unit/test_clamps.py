"""What every sampler owes: what is given comes out, samples stay apart, the trace ends in them."""

import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import Hybrid

from md4_jax.processes.masking import Masking
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import Geometric, LogLinear
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, Prompt
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.classifier import GuidedMasks, GuidedNoise
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.guidance import GuidedProcess, rates_of
from md4_jax.samplers.jumps import TauLeaping
from md4_jax.samplers.loop import sample
from md4_jax.samplers.orders import AnyOrder
from md4_jax.samplers.predictor_corrector import PredictorCorrector
from md4_jax.samplers.remask import Remask

V, L, STEPS, ROWS = 3, 3, 5, 12
TABLE = exact.denoiser_of(exact.table_logits(V, L), time=0.3)


def causal(z, t):
    """Outputs that depend on the positions up to each one alone."""
    code = jnp.cumsum((z + 1) * 5 ** jnp.arange(L), axis=1)
    return jnp.sin(1.0 + code[..., None] + 2.3 * jnp.arange(V))


def cases() -> dict:
    """Every sampler of the registry with every process that it fits, and some other settings."""
    found = {"masking, left_to_right": (Masking(V), SAMPLERS["left_to_right"]())}
    for name, make in exact.PROCESS_CASES.items():
        process = make(V).init()
        for sampler, step in exact.samplers_for(process).items():
            found[f"{name}, {sampler}"] = (process, step())
    found |= {
        "hybrid, ancestral": (Hybrid(V), SAMPLERS["ancestral"]()),
        "masking, remask by confidence": (Masking(V), Remask("confidence", 0.7)),
        "masking, remask in a loop": (
            Masking(V),
            Remask("rescale", 0.5, since=0.7, until=0.3, loop=True),
        ),
        "masking, eso": (Masking(V), SAMPLERS["eso"](0.5, cached=False)),
        "masking, streaming": (Masking(V), SAMPLERS["streaming"](width=2, limit=1.0)),
        "masking, right_to_left": (Masking(V), AnyOrder("right_to_left", per_step=2)),
        "masking left at the end": (Masking(V, Geometric(1.0, 9.0)), Remask()),
        "gaussian, sum": (Rates(V, kernel="gaussian_symmetric"), TauLeaping("sum")),
        "uniform left at the end": (
            Uniform(V, Geometric(0.5, 9.0), "mixture"),
            PredictorCorrector("euler", 2),
        ),
        "log_linear, tau_leaping": (Uniform(V, LogLinear(0.1)), TauLeaping("reject")),
    }
    return found


def marked() -> list:
    """Those without masks are slow, for their number, and variants are left to campaigns."""
    marks = {"masking": [], "transition": pytest.mark.campaign, "rates": pytest.mark.campaign}

    def mark(name: str):
        is_variant = name.count(",") > 1  # another parametrisation, for example
        return pytest.mark.campaign if is_variant else marks.get(name.partition(",")[0], [])

    return [pytest.param(*case, id=name, marks=mark(name)) for name, case in cases().items()]


def user(seed: int, *, grows: bool = False):
    """(tokens, given): rows of random length of which some, all or nothing is given.

    grows: what is given is the beginning of a text.
    """
    rng = np.random.default_rng(seed)
    given = rng.random((ROWS, L)) < rng.random((ROWS, 1))
    given[1], given[5] = True, False
    given = -np.sort(-given.astype(int), axis=1) > 0 if grows else given
    return rng.integers(0, V, (ROWS, L)).astype(np.int32), given


def test_every_sampler_and_every_process_is_among_the_cases():
    names = {tuple(name.split(", ")) for name in cases()}
    # What is given moves as a text gets longer and shorter: test_resize.py. A window reaches beyond
    # the text, and so beyond the tables of the cases: test_sdlm.py. Drafts are verified by a
    # network that also reads from left to right: test_self_speculative.py.
    others = {"resize", "longest_prefix", "self_speculative"}
    assert {name[-1] for name in names} >= set(SAMPLERS) - others
    assert {name[0] for name in names} >= {"masking", "uniform", "transition", "rates"}
    assert isinstance(cases()["transition, ancestral"][0], Transition)


@pytest.mark.slow
@pytest.mark.parametrize("process, step", marked())
@pytest.mark.cases(4)
def test_given_tokens_come_out_and_samples_stay_apart(process, step):
    denoiser = Denoiser(causal, lambda h: h) if step.needs.causal else TABLE

    @functools.partial(jax.jit, static_argnames="trace")
    def run(keys, tokens, given, trace=True):
        arguments = dict(grid=uniform(STEPS), keys=keys, prompt=Prompt(tokens, given))
        return sample(denoiser, process, step, trace=trace, **arguments)

    grows = step.needs.gaps
    for seed in (0, 1):
        (tokens, given), keys = user(seed, grows=grows), exact.keys_for(seed, ROWS)
        chain, frames = jax.tree.map(np.asarray, run(keys, tokens, given))
        drawn = chain.z[chain.z != V + 1] if grows else chain.z
        assert chain.z.dtype == np.int32 and (drawn >= 0).all() and (drawn < V).all()
        np.testing.assert_array_equal(chain.z[given], tokens[given])
        np.testing.assert_array_equal(chain.z[1], tokens[1])
        np.testing.assert_array_equal(chain.prompt_mask, given)
        assert (chain.confidence[given] == 1.0).all()
        assert ((chain.confidence >= 0.0) & (chain.confidence <= 1.0 + 1e-6)).all()
        assert (chain.evaluations[~given.all(axis=1)] > 0).all()
        assert (chain.z[~given] != tokens[~given]).any()

        # Other places in the batch, and other rows beside them.
        order, half = np.random.default_rng(seed).permutation(ROWS), ROWS // 2
        keep = np.arange(ROWS) < half
        others = exact.keys_for(seed + 9, ROWS), *user(seed + 9, grows=grows)
        mixed = (
            jnp.where(keep.reshape(-1, *[1] * (new.ndim - 1)), old[order], new)
            for old, new in zip((keys, tokens, given), others, strict=True)
        )
        other, path = run(*mixed)
        for found, before in ((other.z, chain.z), (other.evaluations, chain.evaluations)):
            np.testing.assert_array_equal(found[:half], before[order][:half])
        np.testing.assert_allclose(
            other.confidence[:half], chain.confidence[order][:half], atol=1e-6
        )
        for first, (z, confidence) in ((0, frames), (order[0], path)):
            z, confidence = z[:, 0], confidence[:, 0]
            assert z.shape == confidence.shape and z.shape[1] == L
            assert len(z) >= 3  # the beginning, and at least the rounds of an order, two at a time
            np.testing.assert_array_equal(z[-1], chain.z[first])
            np.testing.assert_allclose(confidence[-1], chain.confidence[first], atol=1e-6)
            if process.shows_clean:
                np.testing.assert_array_equal(
                    z[:, given[first]], np.tile(tokens[first, given[first]], (len(z), 1))
                )
            elif not process.is_noise(jnp.array([V])):
                assert (np.asarray(z) < V).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ancestral", "remask", "first_hitting"])
@pytest.mark.cases(1)
def test_a_trace_changes_nothing(name):
    tokens, given = user(2)
    arguments = TABLE, Masking(V), SAMPLERS[name]()
    settings = dict(grid=uniform(STEPS), keys=exact.keys_for(2, ROWS), prompt=Prompt(tokens, given))
    plain, frames = jax.jit(lambda: sample(*arguments, **settings))()
    traced, path = jax.jit(lambda: sample(*arguments, **settings, trace=True))()
    assert frames is None and path is not None
    jax.tree.map(np.testing.assert_array_equal, plain, traced)


def test_given_tokens_are_seen_with_the_noise_of_the_time():
    """Uniform noise, V = 3, 4000 given tokens: at t those that are their own are a share
    1 - t + t / 3 of them, within 4 standard errors, and all of them at the end."""
    tokens = np.zeros((1, 4000), np.int32)
    flat = Denoiser(lambda z, t: jnp.zeros((*z.shape, V)), lambda h: h)
    _, frames = sample(
        flat, Uniform(V), SAMPLERS["ancestral"](), grid=uniform(4), keys=exact.keys_for(0, 1),
        prompt=Prompt(tokens, tokens == 0), trace=True,
    )  # fmt: skip
    own = np.mean(np.asarray(frames.z) == 0, axis=(1, 2))
    expected = np.array([1 / 3, 1 / 2, 2 / 3, 5 / 6, 1.0])
    assert (np.abs(own - expected) <= 4 * np.sqrt(expected * (1 - expected) / 4000)).all()


def test_guided_rates_are_finite_and_keep_their_shares():
    """e^106 and e^113 are no float32: a position jumps for certain, mostly to the larger one."""

    class Told:
        def reverse_rates(self, outputs, z, t):
            return outputs

    told = jnp.array([[[1e4, 1e4, 0.0], [3.0, 2.0, 0.0]]])
    free = jnp.array([[[1e-3, 3e-4, 1.0], [1.0, 4.0, 0.0]]])
    rates = GuidedProcess(Told(), 7.0).reverse_rates(jnp.stack([told, free]), None, None)
    assert np.isfinite(rates).all() and np.isfinite(np.sum(rates)) and rates[0, 0, 0] > 1e20
    np.testing.assert_allclose(rates[0, 0, 1] / rates[0, 0, 0], (10 / 3) ** 6, rtol=1e-4)
    np.testing.assert_allclose(rates[0, 1], [3.0**7, 2.0**7 / 4.0**6, 0.0], rtol=1e-5)
    assert (rates_of(jnp.full((2, 3), -jnp.inf)) == 0.0).all()


def test_rates_that_follow_a_classifier_are_finite():
    """A gain of 20 e-folds with strength 5 is no float32."""
    gain = jnp.array([[[100.0, 101.0, -jnp.inf]]])
    process = Uniform(V)
    z, t, outputs = jnp.array([[2]]), jnp.full(1, 0.5), jnp.zeros((1, 1, V))
    noise = GuidedNoise(process, lambda z, t, symbols: gain, 1.0)
    found = np.asarray(noise.reverse_rates(outputs, z, t))[0, 0]
    masks = GuidedMasks(Masking(V)).reverse_rates(gain, jnp.array([[V]]), t)[0, 0]
    for rates in (found, np.asarray(masks)[:V]):
        assert np.isfinite(rates).all() and rates[0] > 1e20 and rates[2] == 0.0
        np.testing.assert_allclose(rates[1] / rates[0], np.e, rtol=1e-4)
