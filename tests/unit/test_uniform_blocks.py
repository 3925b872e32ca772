"""Blocks of uniform noise: the bound by enumeration, its draws, and the law of samples."""

import functools

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.draws import at_early_times
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.processes.schedules import Cosine, Geometric, Linear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, Prompt, UserError
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.blocks import UNSEEN, Blocks
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import Frames
from md4_jax.samplers.paths import whole
from md4_jax.samplers.stops import Stop

pytestmark = pytest.mark.slow

V, L, P = 2, 4, 2
LAW = np.random.default_rng(0).dirichlet(np.ones(V**L)).reshape((V,) * L)
X = exact.sequences(V, L)


def after(prefix: tuple, block: int) -> np.ndarray:
    """The law of the tokens of a block given the text before it, [V, ..., V]."""
    rest = LAW[prefix].reshape((V,) * block + (-1,)).sum(axis=-1)
    return rest / rest.sum()


def right(process, block: int, b: int, prefix: tuple):
    """Exact outputs for block b after a text, (z [B, block], t [B]) -> [B, block, V]."""
    return exact.uniform_outputs(process, after(prefix, block)).features


def wrong(process, block: int, b: int, prefix: tuple):
    """Outputs for block b that depend on z, t and the text, and are right for no data."""

    def features(z, t):
        seen = jnp.sum(z * jnp.arange(1, block + 1), axis=1) + 1.7 * b
        phase = 2.1 * seen + 3.0 * t + sum(0.7 * (n + 1) * token for n, token in enumerate(prefix))
        return jnp.sin(phase[:, None, None] + 3.7 * jnp.arange(block)[:, None] + jnp.arange(V))

    return features


def in_blocks(outputs, process) -> Denoiser:
    """The denoiser of outputs(process, block, b, prefix)."""

    def features(z, t, clean, block):
        assert t.shape == (len(z), L // block)
        parts = []
        for b in range(L // block):
            own = z[:, b * block : (b + 1) * block]
            part = jnp.zeros((len(z), block, V))
            for prefix in exact.sequences(V, b * block):
                here = (clean[:, : b * block] == prefix).all(axis=1)[:, None, None]
                found = outputs(process, block, b, tuple(prefix))(own, t[:, b])
                part = jnp.where(here, found, part)
            parts.append(part)
        return jnp.concatenate(parts, axis=1)

    return exact.of_outputs(None, given=features)


def part_by_part(outputs, process, block: int) -> np.ndarray:
    """The sum over blocks of each one's bound as a text of its own after the clean ones, [X].

    By enumeration and quadrature, with the other form of the bound, and with what the ends cost.
    """
    total = np.zeros(len(X))
    for b in range(L // block):
        for row, x in enumerate(X):
            prefix, own = tuple(x[: b * block]), x[None, b * block : (b + 1) * block]
            alone = Denoiser(outputs(process, block, b, prefix), lambda h: h)
            total[row] += exact.uniform_integral(ScoreEntropy(), alone, process, own)[0]
    ends = process.prior_nats(X) + process.reconstruction_nats(X)
    return total + np.asarray(ends).sum(axis=1)


def bound(outputs, process, block: int) -> np.ndarray:
    """The whole bound as the objective adds it up, its integral by enumeration: [X]."""
    objective, denoiser, batch = UniformELBO(block), in_blocks(outputs, process), exact.batch_of(X)
    _, parts = objective(denoiser, process, batch, jnp.full(16, 0.5), exact.keys_for(0, 16))
    ends = np.asarray(parts["prior"] + parts["reconstruction"])

    def loss_at(batch, z, t):
        times = jnp.broadcast_to(t[:, None], (len(z), L // block))
        return objective.loss_at(denoiser, process, batch, z, times)

    t, weight = exact.quadrature(nodes=60, power=3)
    values = exact.over_states(loss_at, V, X, t)
    return (values * exact.noise_law(process, X, t)).sum(axis=2) @ weight + ends


@pytest.mark.cases(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_the_right_denoiser_has_the_nats_of_the_data_for_every_block(block, parametrisation):
    process = Uniform(V, Linear(), parametrisation)
    found = bound(right, process, block)
    np.testing.assert_allclose(found, -np.log(LAW.ravel()), rtol=1e-8)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "process", [Uniform(V, Cosine()), Uniform(V, Geometric(0.01, 3.0), "mixture")]
)
@pytest.mark.parametrize("block", [1, 2])
def test_any_denoiser_has_the_sum_of_the_bounds_of_its_blocks(block, process):
    """With a schedule that has ends, their terms too."""
    found, expected = (f(wrong, process, block) for f in (bound, part_by_part))
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert LAW.ravel() @ found > -LAW.ravel() @ np.log(LAW.ravel()) + 0.1


def plain(objective, process, x, z, t, block: int) -> np.ndarray:
    """The loss of each block alone, as a text after the clean blocks: [B, G]."""
    parts = []
    for b in range(L // block):
        part, rows = slice(b * block, (b + 1) * block), []
        for row in range(len(x)):
            features = wrong(process, block, b, tuple(x[row, : b * block]))
            alone, own = Denoiser(features, lambda h: h), exact.batch_of(x[row : row + 1, part])
            z_own = jnp.asarray(z[row : row + 1, part])
            rows += list(objective.loss_at(alone, process, own, z_own, t[row : row + 1, b]))
        parts.append(rows)
    return np.array(parts, np.float64).T


@pytest.mark.parametrize("kind", [UniformELBO, CrossEntropy])
@pytest.mark.usefixtures("x64")
@pytest.mark.cases(1)
def test_each_block_has_its_time_and_its_weight(kind):
    """loss_at with other times and weights in each block, beside the losses of the blocks alone."""
    process, rng = Uniform(V, parametrisation="mixture"), np.random.default_rng(1)
    x, z = rng.integers(0, V, (6, L)), rng.integers(0, V, (6, L))
    t, weight = jnp.asarray(rng.random((6, 2))), jnp.asarray(rng.random((6, 2)))
    denoiser, batch = in_blocks(wrong, process), exact.batch_of(x)
    arguments = denoiser, process, batch, jnp.asarray(z), t
    each = plain(kind(), process, x, z, t, P)
    np.testing.assert_allclose(kind(P).loss_at(*arguments), each.sum(axis=1), rtol=1e-10)
    found = kind(P).loss_at(*arguments, weight)
    np.testing.assert_allclose(found, (weight * each).sum(axis=1), rtol=1e-10)


@pytest.mark.parametrize(
    "process, power", [(Uniform(V, Geometric(0.01, 3.0)), 1.0), (Uniform(V), 5.0)]
)
@pytest.mark.cases(1)
def test_the_mean_of_the_draws_is_the_bound(process, power):
    """n = 40,000 draws of one text, plain and early: within 4 standard errors of enumeration."""
    n = 40_000
    with jax.enable_x64(True):
        expected = part_by_part(wrong, process, P)[6]
    batch = exact.batch_of(np.tile(X[6], (n, 1)))
    call, denoiser = at_early_times(UniformELBO(P), power), in_blocks(wrong, process)
    u = (jnp.arange(n) + 0.5) / n
    draw = jax.jit(lambda keys: call(denoiser, process, batch, u, keys)[0])
    nats = np.asarray(draw(exact.keys_for(3, n)), np.float64)
    error = nats.std() / np.sqrt(n)
    assert abs(nats.mean() - expected) < 4 * error
    assert error < 0.01 * expected  # so that the test says something


def seen(objective, x, u, seed=0, vocab=5, power=1.0):
    """(z, t) of a call of the objective, as the denoiser gets them, and its diagnostics."""
    got = {}

    def features(z, t, clean, block):
        got.update(z=np.asarray(z), t=np.asarray(t))
        np.testing.assert_array_equal(clean, x.tokens)
        return jnp.zeros((*z.shape, vocab))

    process = Uniform(vocab, parametrisation="mixture")
    denoiser = exact.of_outputs(None, given=features)
    keys = exact.keys_for(seed, len(u))
    call = at_early_times(objective, power)
    _, extra = call(denoiser, process, x, jnp.asarray(u, jnp.float32), keys)
    return got["z"], got["t"], extra


def test_each_block_has_the_noise_of_its_time():
    """Blocks of 64 of 3: a third of the times each, and as many tokens changed as they say.

    4/5 (1 - alpha) of a block's 64 tokens, within 5 standard errors for each of 600 blocks.
    """
    n = 200
    x = exact.batch_of(np.random.default_rng(0).integers(0, 5, (n, 192)))
    z, t, extra = seen(CrossEntropy(64), x, (np.arange(n) + 0.5) / n)
    assert (np.sort((3.0 * t).astype(int), axis=1) == np.arange(3)).all()
    changed = (z != x.tokens).reshape(n, 3, 64).mean(axis=2)
    error = np.sqrt(0.8 * t * (1.0 - 0.8 * t) / 64)
    assert (np.abs(changed - 0.8 * t) < 5 * error + 1e-6).all()
    spread = np.unique(np.argsort(t, axis=1) @ np.array([9, 3, 1]))
    assert len(spread) == 6
    np.testing.assert_allclose(extra["changed"], changed.mean(axis=1), rtol=1e-6)


def test_blocks_have_noise_of_their_own():
    """Of tokens 0 that both of two blocks redraw to something else, a quarter agree, +- 5 SE."""
    z, _, _ = seen(CrossEntropy(64), exact.batch_of(np.zeros((200, 128))), np.full(200, 0.4))
    one, other = z[:, :64], z[:, 64:]
    same = (one == other)[(one > 0) & (other > 0)]
    assert len(same) > 2000 and abs(same.mean() - 0.25) < 5 * np.sqrt(0.1875 / len(same))


@pytest.mark.campaign
def test_early_times_are_early_in_every_block():
    """t = v^5, v the times without: their fifth roots are spread over the blocks."""
    x, u = exact.batch_of(np.zeros((50, 12))), (np.arange(50) + 0.5) / 50
    plainly, early = (seen(UniformELBO(4), x, u, power=p)[1] for p in (1.0, 5.0))
    np.testing.assert_allclose(early, np.maximum(plainly**5.0, 2.0**-24), rtol=1e-5)


def test_what_does_not_count_stays_clean_and_costs_nothing():
    """Two tokens of the second block, in the z that the network sees and in the loss."""
    tokens = np.random.default_rng(0).integers(0, 5, (400, 6))
    counts = np.broadcast_to([1, 1, 1, 0, 1, 0], tokens.shape).astype(bool)
    batch = exact.batch_of(tokens)._replace(loss_mask=jnp.asarray(counts))
    z, t, _ = seen(CrossEntropy(3), batch, np.full(400, 0.7))
    assert (z == tokens)[~counts].all() and (z != tokens)[counts].mean() > 0.3
    process = Uniform(5, parametrisation="mixture")
    flat = exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, 5)))
    nats = CrossEntropy(3).loss_at(flat, process, batch, jnp.asarray(z), jnp.asarray(t))
    np.testing.assert_allclose(nats, 4 * np.log(5.0), rtol=1e-5)


@pytest.mark.campaign
def test_a_shorter_last_block_is_a_block():
    x = exact.batch_of(np.random.default_rng(0).integers(0, 5, (300, 10)))
    z, t, _ = seen(UniformELBO(4), x, (np.arange(300) + 0.5) / 300)
    assert z.shape == (300, 10) and t.shape == (300, 3)
    late = t[:, 2] > 0.9
    assert (z != x.tokens)[late, 8:].mean() > 0.6


SIZES = dict(size=16, heads=2, hidden=24, depth=2)


@functools.cache
def network(vocab: int = V) -> Denoiser:
    """A transformer with noise on every leaf, and logits that leave no token unlikely."""
    made, rng = Transformer(vocab, **SIZES, initial="torch").build(), np.random.default_rng(3)
    params = jax.jit(made.init)(jax.random.key(0))
    noise = lambda x: x + 0.6 * rng.normal(size=x.shape).astype(x.dtype)  # noqa: E731
    bound = made.bind(jax.tree.map(noise, params))
    blocks = bound.blocks._replace(features=jax.jit(bound.blocks.features, static_argnums=3))
    unembed = lambda h: 1.5 * jnp.sin(bound.unembed(h))  # noqa: E731
    return bound._replace(features=jax.jit(bound.features), unembed=unembed, blocks=blocks)


@pytest.mark.parametrize("kind", [UniformELBO, CrossEntropy])
@pytest.mark.cases(1)
def test_a_block_as_long_as_the_text_is_the_plain_objective(kind):
    """The same network, noise and times: to 1e-5, and one time for each text."""
    process, rng = Uniform(5, parametrisation="mixture"), np.random.default_rng(0)
    batch = exact.batch_of(rng.integers(0, 5, (4, 12)))
    t = jnp.asarray([0.2, 0.4, 0.6, 0.9])
    z = process.corrupt(exact.keys_for(1, 4), batch.tokens, t)
    whole = kind().loss_at(network(5), process, batch, z, t)
    block = kind(12).loss_at(network(5), process, batch, z, t[:, None])
    np.testing.assert_allclose(block, whole, rtol=1e-5)
    np.testing.assert_allclose(seen(kind(12), batch, t)[1], t[:, None], rtol=1e-6)


PROCESS, STEPS = Uniform(V, parametrisation="mixture"), 3
STATES = exact.sequences(V, P)


def kernel(prefix: tuple, z: np.ndarray, seen: np.ndarray, s: float, t: float) -> np.ndarray:
    """p(z_s = y | z_t = z) of each token of the block after a text, where the network sees `seen`.

    From whole passes of the network, without a cache: [Z, P, V].
    """
    begin, rows = len(prefix), len(z)
    clean = np.zeros((rows, L), np.int32)
    clean[:, :begin] = prefix
    noisy = clean.copy()
    noisy[:, begin : begin + P] = seen
    times = jnp.full((rows, L // P), t)
    outputs = network().unembed(network().blocks.features(noisy, times, clean, P))
    logits = PROCESS.reverse_logits(
        outputs[:, begin : begin + P], jnp.asarray(z), jnp.full(rows, s), jnp.full(rows, t)
    )
    return np.asarray(jax.nn.softmax(logits), np.float64)


def law_of_block(prefix: tuple, given: dict, is_clean: bool) -> np.ndarray:
    """The law of a block after a text, enumerated step by step: [Z].

    given  {place: token} of the prompt in it, which the network sees clean or at the time's noise
    """
    grid = np.asarray(uniform(STEPS), np.float64)
    prompt = np.array([[given.get(n, token) for n, token in enumerate(z)] for z in STATES])
    free = [n for n in range(P) if n not in given]
    same = np.array([[all(a[n] == b[n] for n in free) for b in STATES] for a in STATES])
    law = np.full(len(STATES), 1.0 / len(STATES))
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        # The prompt has the noise of t, whatever the step before has made of it.
        chance = np.ones(len(STATES))
        for n, token in given.items():
            chance *= (1.0 - t) * (STATES[:, n] == token) + t / V
        law = (law @ same) * chance
        step = kernel(prefix, STATES, prompt if is_clean else STATES, float(s), float(t))
        law = law @ np.prod([step[:, n][:, STATES[:, n]] for n in range(P)], axis=0)
    out = np.zeros(len(STATES))
    for z, p in zip(prompt, law, strict=True):
        out[np.flatnonzero((z == STATES).all(axis=1))[0]] += p
    return out


def law_of_texts(prompt: dict, is_clean: bool) -> np.ndarray:
    """The law of texts [V^L]: {place: token} of the prompt."""
    given = [{n - b * P: x for n, x in prompt.items() if n // P == b} for b in range(L // P)]
    first = law_of_block((), given[0], is_clean)
    parts = [
        p * law_of_block(tuple(z), given[1], is_clean) for z, p in zip(STATES, first, strict=True)
    ]
    return np.concatenate(parts)


def drawn(prompt: dict, is_clean: bool, rows: int, trace: int = 0, **options):
    """(chain, frames) of Blocks, compiled."""
    tokens, marks = np.zeros((rows, L), np.int32), np.zeros((rows, L), bool)
    for place, token in prompt.items():
        tokens[:, place], marks[:, place] = token, True
    given = Prompt(jnp.asarray(tokens), jnp.asarray(marks))
    denoiser, blocks = network(), Blocks(P, L, clean_prompts=is_clean, **options)
    call = jax.jit(
        lambda keys: blocks(
            denoiser, PROCESS, Ancestral(), grid=uniform(STEPS), keys=keys, prompt=given,
            trace=trace,
        )
    )  # fmt: skip
    chain, parts = call(exact.keys_for(5, rows))
    return chain, Frames(*whole(jax.device_get(parts))) if trace else None


PROMPTS = {
    "nothing is given": ({}, False),
    "with noise": ({0: 1, 1: 0, 3: 1}, False),
    "clean": ({0: 1, 1: 0, 3: 1}, True),
    "clean, in both blocks": ({0: 1, 3: 0}, True),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.cases(1)
def test_the_law_of_samples(name):
    """Three steps in each of two blocks: chi-squared, n = 20,000, p > 1e-4."""
    prompt, is_clean = PROMPTS[name]
    law = law_of_texts(prompt, is_clean)
    assert law.sum() == pytest.approx(1.0)
    z = np.asarray(drawn(prompt, is_clean, laws.N)[0].z)
    assert all((z[:, place] == token).all() for place, token in prompt.items())
    assert laws.accepted(laws.counted(z, V), law)
    if prompt:
        assert not laws.accepted(laws.counted(z, V), law_of_texts(prompt, not is_clean))


def test_a_block_that_is_given_costs_nothing():
    chain, frames = drawn({0: 1, 1: 0}, False, 4, trace=1)
    np.testing.assert_array_equal(chain.evaluations, STEPS)
    assert (np.asarray(frames.z)[:, 0, :P] == [1, 0]).all()


@pytest.mark.campaign
@pytest.mark.parametrize("is_clean", [False, True])
def test_with_and_without_the_memory_the_samples_are_the_same(is_clean):
    prompt = {0: 1, 3: 0} if is_clean else {}
    kept, again = (drawn(prompt, is_clean, 64, cached=c)[0] for c in (True, False))
    np.testing.assert_array_equal(kept.z, again.z)
    assert (np.asarray(kept.evaluations) == STEPS * L // P).all()


def test_a_text_ends_with_its_block_and_the_symbol_that_ends_it_is_behind_it():
    free, _ = drawn({}, False, 64)
    chain, frames = drawn({}, False, 64, trace=64, stop=Stop((1,)))
    free, z = np.asarray(free.z), np.asarray(chain.z)
    ended = (free[:, :P] == 1).any(axis=1)
    assert 0 < ended.sum() < 64
    np.testing.assert_array_equal(z[:, :P], free[:, :P])
    assert (z[ended, P:] == 1).all()
    np.testing.assert_array_equal(z[~ended], free[~ended])
    np.testing.assert_array_equal(chain.evaluations, np.where(ended, STEPS, 2 * STEPS))
    last = np.asarray(frames.z)[-1]
    assert (last[ended, P:] == UNSEEN).all()
    np.testing.assert_array_equal(last[~ended], z[~ended])


@pytest.mark.cases(1)
@pytest.mark.parametrize("stop", [Stop(), Stop((0, 1))])
def test_the_trace_shows_noise_in_one_block_after_another(stop):
    """Blocks that are not begun are unseen, but for the prompt, also if they are never drawn."""
    chain, frames = drawn({3: 1}, False, 8, trace=3, stop=stop)
    z, end = np.asarray(frames.z), np.asarray(chain.z)[:3]
    assert z.shape == (2 * (STEPS + 1), 3, L)
    assert (z[: STEPS + 1, :, 2] == UNSEEN).all() and (z[: STEPS + 1, :, 3] == 1).all()
    assert (z[: STEPS + 1, :, :P] >= 0).all()
    if stop.symbols:
        assert (z[:, :, 2] == UNSEEN).all() and (z[:, :, 3] == 1).all()
        np.testing.assert_array_equal(z[-1, :, :P], end[:, :P])
    else:
        assert (z[STEPS + 1 :, :, 2] >= 0).all()
        np.testing.assert_array_equal(z[-1], end)
    np.testing.assert_array_equal(z[STEPS, :, :P], end[:, :P])


def test_each_block_begins_with_noise_of_its_own():
    """Half of two symbols differ from those of the block before: 1000, within 5 standard errors."""
    frames = np.asarray(drawn({}, False, 500, trace=500)[1].z)
    first, second = frames[0, :, :P], frames[STEPS + 1, :, P:]
    assert abs(np.mean(first != second) - (V - 1) / V) < 5 * 0.5 / np.sqrt(first.size)


@pytest.mark.parametrize("kind", [UniformELBO, CrossEntropy])
def test_blocks_that_do_not_fit_are_refused(kind):
    with pytest.raises(UserError, match="must be at least 1, or 0 for the whole text, not -1"):
        kind(-1)
    with pytest.raises(UserError, match="objective.block=5 must divide .* data.length=12"):
        kind(5).check_length(12)
    kind(4).check_length(12)
    kind().check_length(13)
    assert kind(4).needs.blockwise and not kind().needs.blockwise
