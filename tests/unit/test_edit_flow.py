"""Edit Flows by enumeration: texts of 0 to 3 tokens of two symbols, and all parts of them."""

import collections
import itertools
import math

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg

from md4_jax.objectives.edit_flow import EditFlow
from md4_jax.objectives.flexmdm import order_nats, order_table
from md4_jax.processes.deletion import Deleted, Deletion
from md4_jax.processes.schedules import Cosine, Polynomial
from md4_jax.protocols import Denoiser, Prompt, batch_of
from md4_jax.samplers.edit import Edit
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.transforms import Transform

V, LONGEST = 2, 3
ABSENT = V + 1
TEXTS = [x for n in range(LONGEST + 1) for x in itertools.product(range(V), repeat=n)]
# Far from uniform, so that neither symbols nor lengths nor places are alike.
P = np.random.default_rng(5).dirichlet(np.full(len(TEXTS), 0.7))
ENTROPY = -float(P @ np.log(P))
PROCESSES = {
    "linear": Deletion(V),
    "polynomial": Deletion(V, Polynomial(2.0)),
    "cosine": Deletion(V, Cosine()),
}
NONE = -700.0  # the logarithm of what does not happen


def padded(x, fill=0, length=LONGEST) -> list[int]:
    return [*x, *[fill] * (length - len(x))]


def parts(x, absent: float, fixed=()):
    """Yields (z, source, deleted, probability) of all parts of x; those of `fixed` stay."""
    for gone in itertools.product((False, True), repeat=len(x)):
        if any(gone[n] for n in fixed):
            continue
        source = [n for n in range(len(x)) if not gone[n]]
        chance = math.prod(
            absent if g else 1.0 - absent for n, g in enumerate(gone) if n not in fixed
        )
        yield tuple(x[n] for n in source), source, gone, chance


def gap_of(n: int, gone) -> int:
    return n - sum(gone[:n])


def expected_counts(absent: float, p=P, texts=TEXTS, fixed=()):
    """{z: expected number of missing tokens of each symbol in each gap [len + 1, V]} by Bayes."""
    total = {}
    for x, prior in zip(texts, p, strict=True):
        for z, _, gone, chance in parts(x, absent, fixed):
            counts, mass = total.setdefault(z, [np.zeros((len(z) + 1, V)), np.zeros(1)])
            mass += prior * chance
            for n in np.flatnonzero(gone):
                counts[gap_of(n, gone), x[n]] += prior * chance
    return {z: counts / mass for z, (counts, mass) in total.items() if mass}


def row_of(z):
    return z @ (V + 2) ** np.arange(LONGEST)


def tables(absent: float, counts) -> tuple[np.ndarray, np.ndarray]:
    """(logits of Q, outputs) of a network that expects these counts, by the code of z."""
    size = (V + 2) ** LONGEST
    logits, outputs = np.zeros((size, LONGEST + 1, V)), np.full((size, LONGEST + 1), NONE)
    with np.errstate(divide="ignore"):
        for z, count in counts.items():
            row, gaps = row_of(np.array(padded(z, ABSENT))), len(z) + 1
            logits[row, :gaps] = np.maximum(np.log(count), NONE)
            outputs[row, :gaps] = np.maximum(np.log(count.sum(axis=1) / absent), NONE)
    return logits, outputs


def table_denoiser(logits, outputs) -> Denoiser:
    def gaps(z, t):
        row = z @ (V + 2) ** jnp.arange(LONGEST)
        return jnp.asarray(logits)[row], jnp.asarray(outputs)[row]

    return Denoiser(None, lambda h: h, gaps=gaps)


def texts_batch(texts, first=0):
    """The texts as a batch of which the tokens from `first` on count."""
    mask = [[first <= n < len(x) for n in range(LONGEST)] for x in texts]
    return batch_of(np.array([padded(x) for x in texts], np.int32), loss_mask=np.array(mask))


def states(texts, fixed=()) -> tuple[np.ndarray, Deleted]:
    """(number of the text, what is left of it) of all parts of all texts."""
    rows = [(i, x, *part) for i, x in enumerate(texts) for part in parts(x, 0.5, fixed)]
    z = np.array([padded(z, ABSENT) for _, _, z, *_ in rows], np.int32)
    source = np.array([padded(source) for *_, source, _, _ in rows], np.int32)
    deleted = np.array([padded(gone, False) for *_, gone, _ in rows])
    gap = np.array(
        [[gap_of(n, padded(gone, True)) for n in range(LONGEST)] for *_, gone, _ in rows]
    )
    missing = [np.bincount(g[d], minlength=LONGEST + 1) for g, d in zip(gap, deleted, strict=True)]
    number = np.array([i for i, *_ in rows])
    return number, Deleted(z, source, np.array(missing, np.int32), deleted, gap.astype(np.int32))


def whole_time() -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of [0, 1], dense at both ends."""
    t, weight = exact.quadrature(high=0.5, nodes=20, power=4)
    return np.append(t, 1.0 - t), np.append(weight, weight)


def integral(process, network, texts=TEXTS, fixed=()):
    """The bound of each text by quadrature over t and enumeration of z.

    network: probability that a token is absent -> (logits, outputs) by the code of z
    """
    number, noised = states(texts, fixed)
    batch = texts_batch([texts[n] for n in number], len(fixed))
    call = jax.jit(
        lambda logits, outputs, t: sum(
            EditFlow().terms_at(table_denoiser(logits, outputs), process, batch, noised, t)
        )
    )
    total = np.zeros(len(texts))
    for time, share in zip(*whole_time(), strict=True):
        absent = float(process.schedule.one_minus_alpha(jnp.float64(time)))
        chance = np.array([part[3] for x in texts for part in parts(x, absent, fixed)])
        values = call(*network(absent), jnp.full(len(number), time))
        total += share * np.bincount(number, chance * np.asarray(values), len(texts))
    return total - np.asarray(order_nats(texts_batch(texts, len(fixed)).loss_mask), float)


def right(absent: float):
    return tables(absent, expected_counts(absent))


@pytest.mark.parametrize("name", PROCESSES)
def test_the_mean_bound_of_the_exact_network_is_the_entropy(name, x64):
    """Of the source of texts, their lengths included, whatever the schedule."""
    assert P @ integral(PROCESSES[name], right) == pytest.approx(ENTROPY, abs=2e-5)


def test_without_the_constant_it_is_another_number(x64):
    found, constant = integral(PROCESSES["linear"], right), order_table(3)
    assert P @ (found + [constant[len(x)] for x in TEXTS]) > ENTROPY + 0.1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_is_above_the_negative_logarithm_for_every_network_and_text(seed, x64):
    """P(text) of the model is a matrix exponential: in 1 - alpha its rates are constant here.

    The bound of the empty text, to which one path leads, is reached.
    """
    coin = np.random.default_rng(seed)
    rates = {x: np.exp(coin.normal(0.0, 0.7, (len(x) + 1, V))) for x in TEXTS}
    generator = np.zeros((len(TEXTS), len(TEXTS)))
    for number, z in enumerate(TEXTS):
        generator[number, number] = -rates[z].sum()  # to longer texts than these too
        for gap, k in itertools.product(range(len(z) + 1), range(V)):
            after = (*z[:gap], k, *z[gap:])
            if len(after) <= LONGEST:
                generator[number, TEXTS.index(after)] += rates[z][gap, k]
    nats = -np.log(linalg.expm(generator)[0])
    network = lambda absent: tables(absent, {z: absent * r for z, r in rates.items()})  # noqa: E731
    for process in PROCESSES.values():
        excess = integral(process, network) - nats
        assert excess[0] == pytest.approx(0.0, abs=1e-5) and (excess[1:] > 1e-4).all()
        assert P @ excess < 1.5


@pytest.mark.parametrize("name, per_token", [("linear", 0.0), ("polynomial", math.log(2) - 0.5)])
def test_the_paper_s_loss_differs_by_a_constant(name, per_token, x64):
    """The sum of all rates, minus v times the logarithm of those that are needed.

    Less by the divergence of the density of the times of deletion from the uniform one.
    """
    process, total = PROCESSES[name], np.zeros(len(TEXTS))
    for time, share in zip(*whole_time(), strict=True):
        absent, slope = (
            float(f(jnp.float64(time)))
            for f in (process.schedule.one_minus_alpha, process.schedule.dalpha)
        )
        v = -slope / absent
        rates = {z: v * counts for z, counts in expected_counts(absent).items()}
        for number, x in enumerate(TEXTS):
            for z, _, gone, chance in parts(x, absent):
                needed = [rates[z][gap_of(n, gone), x[n]] for n in np.flatnonzero(gone)]
                total[number] += share * chance * (rates[z].sum() - v * np.log(needed).sum())
    lengths = np.array([len(x) for x in TEXTS])
    found = integral(process, right)
    np.testing.assert_allclose(total, found - per_token * lengths, atol=3e-4)


def test_a_prompt_is_conditioned_on(x64):
    """The mean bound of what follows the first symbol is its conditional entropy."""
    kept = [n for n, x in enumerate(TEXTS) if len(x) >= 2]
    texts, p = [TEXTS[n] for n in kept], P[kept] / P[kept].sum()
    given = np.array([p[[x[0] == k for x in texts]].sum() for k in range(V)])
    known = lambda absent: tables(absent, expected_counts(absent, p, texts, (0,)))  # noqa: E731
    found = p @ integral(PROCESSES["linear"], known, texts, (0,))
    assert found == pytest.approx(given @ np.log(given) - p @ np.log(p), abs=2e-5)


@pytest.mark.parametrize("t", [0.2, 0.7])
@pytest.mark.parametrize("name", PROCESSES)
def test_the_law_of_noise(name, t):
    """Of the string and its alignment at once, by enumeration; the first token of one is fixed."""
    process, x, rows = PROCESSES[name], (1, 0, 1), 20_000
    absent = float(process.schedule.one_minus_alpha(jnp.float32(t)))
    for fixed in ((), (0,)):
        marked = np.tile([n in fixed for n in range(3)], (rows, 1))
        found = jax.jit(process.delete)(
            exact.keys_for(1, rows), jnp.tile(jnp.array(x), (rows, 1)), jnp.full(rows, t), marked
        )
        z, source, missing, deleted, gap = map(np.asarray, found)
        told = [z, np.where(z == ABSENT, 0, source), missing, deleted, gap]
        told, total = np.concatenate(told, axis=1), 0.0
        _, expected = states([x], fixed)
        for row, (*_, chance) in zip(
            np.concatenate([*expected], axis=1), parts(x, absent, fixed), strict=True
        ):
            share = np.all(told == row, axis=1).mean()
            assert abs(share - chance) <= 4.5 * math.sqrt(chance * (1 - chance) / rows) + 1e-9
            total += share
        assert total == pytest.approx(1.0)


def test_texts_are_whole_at_0_and_empty_at_1():
    process, x = PROCESSES["linear"], jnp.array([[1, 0, ABSENT], [1, 0, 1]])
    for t, expected in ((0.0, x), (1.0, jnp.full_like(x, ABSENT))):
        z = process.corrupt(exact.keys_for(0, 2), x, jnp.full(2, t))
        np.testing.assert_array_equal(z, expected)
    assert process.is_complete


def test_a_draw_has_the_mean_of_the_enumeration(x64):
    """At one time, for a text of three tokens: terms, constant and all."""
    process, t, x, rows = PROCESSES["polynomial"], 0.6, (1, 0, 1), 20_000
    known = table_denoiser(*right(0.36))
    number, noised = states([x])
    batch = texts_batch([x] * len(number))
    terms = EditFlow().terms_at(known, process, batch, noised, jnp.full(len(number), t))
    chance = [part[3] for part in parts(x, 0.36)]
    expected = np.asarray(sum(terms)) @ chance - order_table(3)[3]
    draw = jax.jit(lambda batch, keys: EditFlow()(known, process, batch, jnp.full(rows, t), keys))
    nats, extra = draw(texts_batch([x] * rows), exact.keys_for(2, rows))
    assert abs(nats.mean() - expected) < 4.5 * nats.std() / math.sqrt(rows)
    whole = extra["tokens"] + extra["insertion"] + extra["orders"]
    np.testing.assert_allclose(nats, whole, rtol=1e-6)


def chain_law(process, grid) -> np.ndarray:
    """The law of the sampler's texts by enumeration of its steps."""
    now, times = {(): 1.0}, np.asarray(grid, float)[::-1]
    for t, s in itertools.pairwise(times):
        at_t, at_s = (float(process.schedule.one_minus_alpha(jnp.float64(x))) for x in (t, s))
        found, after = expected_counts(at_t), collections.defaultdict(float)
        for z, mass in now.items():
            mean = found[z] * (1.0 - at_s / at_t)
            total = np.minimum(mean.sum(axis=1, keepdims=True), 1.0)
            law = np.concatenate(
                [1.0 - total, total * mean / mean.sum(axis=1, keepdims=True).clip(1e-300)], axis=1
            )
            for each in itertools.product(range(V + 1), repeat=len(z) + 1):
                chance = math.prod(law[gap, k] for gap, k in enumerate(each))
                if chance:
                    after[grown(z, each)] += mass * chance
        now = after
    return np.array([now[x] for x in TEXTS])


def grown(z, each) -> tuple[int, ...]:
    """The text with symbol each[g] - 1 inserted in gap g, 0 for none, as far as there is room."""
    room, text = LONGEST - len(z), []
    for symbol, old in zip(each, [*z, None], strict=True):
        if symbol and room:
            text.append(symbol - 1)
            room -= 1
        text += [] if old is None else [old]
    return tuple(text)


def drawn_texts(process, grid, rows: int, prompt=None) -> np.ndarray:
    """Samples z [rows, L] of the exact network."""
    times = np.asarray(grid, float)[1:]
    each = [right(float(process.schedule.one_minus_alpha(jnp.float64(t)))) for t in times]
    logits, outputs = (jnp.stack(x) for x in zip(*each, strict=True))

    def gaps(z, t):
        row, at = z @ (V + 2) ** jnp.arange(LONGEST), jnp.argmin(jnp.abs(times - t[0]))
        return logits[at, row], outputs[at, row]

    denoiser = Denoiser(None, lambda h: h, gaps=gaps)
    prompt = no_prompt(rows, LONGEST) if prompt is None else prompt
    call = jax.jit(
        lambda keys: sample(denoiser, process, Edit(), grid=grid, keys=keys, prompt=prompt)[0].z
    )
    return np.asarray(call(exact.keys_for(0, rows)))


def distance(law) -> float:
    return np.abs(law - P).sum() / 2


def test_the_law_of_the_samples_is_that_of_the_source(x64):
    """It is so up to an error that falls as 1 / steps, and the draws have the law of the steps."""
    process = PROCESSES["polynomial"]
    far, near = (distance(chain_law(process, uniform(steps))) for steps in (16, 64))
    assert near < 0.03 and near < 0.35 * far
    rows, grid = 8000, uniform(4)
    z, law = drawn_texts(process, grid, rows), chain_law(process, grid)
    found = np.array([np.all(z == padded(x, ABSENT), axis=1).mean() for x in TEXTS])
    assert law.sum() == pytest.approx(1.0) and found.sum() == pytest.approx(1.0)
    np.testing.assert_array_less(np.abs(found - law), 4.5 * np.sqrt(law * (1 - law) / rows) + 1e-9)
    assert distance(law) > 0.05  # so that the law of the steps is told from that of the source


def test_a_prompt_is_the_beginning_of_every_sample(x64):
    tokens, mask = np.tile([1, 0, 0], (500, 1)), np.tile([True, False, False], (500, 1))
    prompt = Prompt(tokens.astype(np.int32), mask)
    z = drawn_texts(PROCESSES["polynomial"], uniform(8), 500, prompt)
    assert (z[:, 0] == 1).all() and len(np.unique(z, axis=0)) > 3


def test_tokens_are_inserted_where_there_is_room():
    """Symbols behind a gap move; what the length does not hold is left out from the end on."""
    process, length = Deletion(5), 6
    z = jnp.array([[0, 1, 6, 6, 6, 6], [0, 1, 2, 3, 6, 6], [6] * 6, [0, 1, 2, 3, 4, 0]])
    gaps = jnp.arange(length + 1)
    outputs = jnp.where(
        jnp.array([[1, 0, 1, 0, 0, 0, 0], [1] * 7, [1] * 7, [1] * 7]) > 0, 5.0, NONE
    )
    logits = jnp.where(jnp.arange(5) == ((gaps + 2) % 5)[:, None], 0.0, -1.0)  # gap g gets g + 2
    found = jnp.tile(logits, (4, 1, 1)), outputs
    denoiser = Denoiser(None, lambda h: h, gaps=lambda z, t: found)
    chain = exact.chain_of(z)._replace(confidence=jnp.where(z < 5, 0.5, 0.0))
    step = Edit(Transform(temperature=0.0))
    after = step(denoiser, process, chain, jnp.float32(0.0), jnp.float32(0.5), exact.keys_for(0, 4))
    expected = [[2, 0, 1, 4, 6, 6], [2, 0, 3, 1, 2, 3], [2, 6, 6, 6, 6, 6], [0, 1, 2, 3, 4, 0]]
    np.testing.assert_array_equal(after.z, expected)
    sure = 1.0 / (1.0 + 4.0 * math.exp(-1.0))
    new = [[1, 0, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    old = np.where(np.array(expected) < 5, 0.5, 0.0)
    np.testing.assert_allclose(after.confidence, np.where(new, sure, old), rtol=1e-6)
    assert (after.evaluations == 1).all()
