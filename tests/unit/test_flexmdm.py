"""FlexMDM by enumeration: texts of 0 to 3 symbols of two kinds, and all that may become of them."""

import collections
import itertools
import math

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.objectives.flexmdm import (
    FlexMDM,
    open_gaps,
    order_nats,
    order_table,
    poisson_divergence,
)
from md4_jax.processes.insertion import Insertion, Noised
from md4_jax.processes.schedules import Cosine, Linear, LogLinear, Polynomial
from md4_jax.protocols import Denoiser, Prompt, UserError, batch_of
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.insertion import ORDERS, Insert, inserted
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.transforms import Transform

V, LONGEST = 2, 3
MASK, ABSENT = V, V + 1
TEXTS = [x for n in range(LONGEST + 1) for x in itertools.product(range(V), repeat=n)]
# Far from uniform, so that neither symbols nor lengths nor places are alike.
P = np.random.default_rng(3).dirichlet(np.full(len(TEXTS), 0.7))
PROCESSES = {
    "linear": Insertion(V),
    "two schedules": Insertion(V, Linear(), Polynomial(2.0)),
    "insertion first": Insertion(V, Polynomial(3.0), Cosine()),
}


def padded(x, fill=0) -> list[int]:
    return [*x, *[fill] * (LONGEST - len(x))]


def texts_batch(texts=TEXTS, counted=None):
    """The texts as a batch; counted: which tokens count, else all."""
    mask = [[n < len(x) for n in range(LONGEST)] for x in texts]
    return batch_of(
        np.array([padded(x) for x in texts], np.int32),
        loss_mask=np.array(mask if counted is None else counted),
    )


def chances(process, t: float) -> tuple[float, float, float]:
    """P(absent), P(masked), P(clean) of a token at t: an integral over the time of its removal."""
    at_t = float(process.schedule.one_minus_alpha(jnp.float64(t)))
    absent = float(process.insertion.one_minus_alpha(jnp.float64(t)))
    v, weight = exact.quadrature(nodes=40)
    removal = absent ** (1.0 - v)  # the points lie densely where the integrand changes
    tau = process.insertion.inverse(jnp.asarray(removal))
    share = at_t / np.asarray(process.schedule.one_minus_alpha(tau))
    masked = -math.log(absent) * float(weight @ (share * removal))
    return absent, masked, 1.0 - absent - masked


def outcomes(x, law, fixed=()):
    """Yields (z, source, missing, probability) of all that may become of x."""
    kinds = [(2,) if n in fixed else (0, 1, 2) for n in range(len(x))]
    for each in itertools.product(*kinds):
        source = [n for n, kind in enumerate(each) if kind]
        z = tuple(MASK if each[n] == 1 else x[n] for n in source)
        ends = [-1, *source, len(x)]
        missing = [b - a - 1 for a, b in itertools.pairwise(ends)]
        chance = math.prod(law[kind] for n, kind in enumerate(each) if n not in fixed)
        yield z, source, missing, chance


def best(process, t: float, p=P, texts=TEXTS, fixed=()):
    """{z: (posterior of each symbol [len, V], expected missing tokens [len + 1])} by Bayes."""
    law, total = chances(process, t), {}
    for x, prior in zip(texts, p, strict=True):
        for z, source, missing, chance in outcomes(x, law, fixed):
            tokens, gaps, mass = total.setdefault(
                z, [np.zeros((len(z), V)), np.zeros(len(z) + 1), np.zeros(1)]
            )
            tokens += prior * chance * np.eye(V)[[x[n] for n in source]].reshape(-1, V)
            gaps += prior * chance * np.array(missing)
            mass += prior * chance
    return {z: (tokens / mass, gaps / mass) for z, (tokens, gaps, mass) in total.items() if mass}


def code(z) -> np.ndarray:
    return np.asarray(z) @ (V + 2) ** np.arange(LONGEST)


def table_denoiser(process, t: float, found) -> Denoiser:
    """The denoiser that knows these posteriors at the time t."""
    absent = float(process.insertion.one_minus_alpha(jnp.float64(t)))
    logits = np.zeros(((V + 2) ** LONGEST, LONGEST + 1, V))
    outputs = np.zeros(((V + 2) ** LONGEST, LONGEST + 1))
    with np.errstate(divide="ignore"):
        for z, (tokens, gaps) in found.items():
            row = code(padded(z, ABSENT))
            logits[row, : len(z)] = np.maximum(np.log(tokens), -700.0)
            outputs[row, : len(z) + 1] = np.maximum(np.log(gaps / absent), -700.0)

    def gaps(z, t):
        row = z @ (V + 2) ** jnp.arange(LONGEST)
        return jnp.asarray(logits)[row], jnp.asarray(outputs)[row]

    return Denoiser(None, lambda h: h, gaps=gaps)


def terms(process, texts, fixed=(), counted=None):
    """(states of all texts as rows, their text, probability as a function of the time)."""
    rows = [
        (number, *outcome)
        for number, x in enumerate(texts)
        for outcome in outcomes(x, (0.0, 0.0, 0.0), fixed)
    ]
    number = np.array([row[0] for row in rows])
    noised = Noised(
        np.array([padded(row[1], ABSENT) for row in rows], np.int32),
        np.array([padded(row[2]) for row in rows], np.int32),
        np.array([[*row[3], *[0] * (LONGEST + 1 - len(row[3]))] for row in rows], np.int32),
    )
    return number, noised, texts_batch([texts[n] for n in number], counted and counted(number))


def whole_time() -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of [0, 1], dense at both ends."""
    (t, weight) = exact.quadrature(high=0.5, nodes=20, power=4)
    return np.append(t, 1.0 - t), np.append(weight, weight)


def integral(process, texts=TEXTS, p=P, fixed=(), counted=None, objective=None, **changed):
    """The bound of each text by quadrature over t and enumeration of z; changed: the answers."""
    objective = objective or FlexMDM()
    number, noised, batch = terms(process, texts, fixed, counted)
    call = jax.jit(
        lambda logits, outputs, t: sum(
            objective.terms_at(
                Denoiser(None, lambda h: h, gaps=lambda z, t: (logits, outputs)),
                process, batch, noised, t,
            )
        )
    )  # fmt: skip
    total = np.zeros(len(texts))
    for time, share in zip(*whole_time(), strict=True):
        law = chances(process, time)
        chance = np.array([
            outcome[3] for x in texts for outcome in outcomes(x, law, fixed)
        ])  # fmt: skip
        known = table_denoiser(process, time, best(process, time, p, texts, fixed))
        logits, outputs = known.gaps(jnp.asarray(noised.z), None)
        outputs = outputs + changed.get("gaps", 0.0)
        values = call(logits, outputs, jnp.full(len(number), time))
        total += share * np.bincount(number, chance * np.asarray(values), len(texts))
    whole = texts_batch(texts, counted and counted(np.arange(len(texts))))
    return total - np.asarray(order_nats(whole.loss_mask), float)


def entropy(p) -> float:
    return -float(p @ np.log(p))


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.cases(2)
def test_the_mean_bound_of_the_exact_network_is_the_entropy(name, x64):
    """Of the source of texts, their lengths included, whatever the schedules."""
    assert P @ integral(PROCESSES[name]) == pytest.approx(entropy(P), abs=2e-5)


# The time at which the last masks are revealed, when nothing is missing any more.
LAST = 1e-6


def drawn_texts(grid, rows: int, prompt=None, order: str = "random"):
    """Samples z [rows, L] of the exact network."""
    process, times = PROCESSES["two schedules"], np.append(LAST, np.asarray(grid, float)[1:])
    tables = [table_denoiser(process, t, best(process, t)).gaps for t in times]
    every = jnp.arange((V + 2) ** LONGEST)[:, None] // (V + 2) ** jnp.arange(LONGEST) % (V + 2)
    logits, outputs = (jnp.stack(x) for x in zip(*(f(every, None) for f in tables), strict=True))

    def gaps(z, t):
        row, at = z @ (V + 2) ** jnp.arange(LONGEST), jnp.argmin(jnp.abs(times - t[0]))
        return logits[at, row], outputs[at, row]

    denoiser = Denoiser(None, lambda h: h, gaps=gaps)
    prompt = no_prompt(rows, LONGEST) if prompt is None else prompt
    call = jax.jit(
        lambda keys: (
            sample(denoiser, process, Insert(order), grid=grid, keys=keys, prompt=prompt)[0].z
        )
    )
    return np.asarray(call(exact.keys_for(0, rows)))


def chain_law(grid) -> np.ndarray:
    """The law of the sampler's texts by enumeration of its steps, Poisson tails included."""
    process, now = PROCESSES["two schedules"], {(): 1.0}
    times = [*np.asarray(grid, float)[::-1], LAST]
    for t, s in itertools.pairwise(times):
        found, after = best(process, max(t, LAST)), collections.defaultdict(float)
        last = s == LAST and t == 0.0
        reveal, insert = (1.0, 0.0) if last else (1.0 - s / t, 1.0 - (s / t) ** 2)
        for z, mass in now.items():
            tokens, gaps = found[z]
            for new, chance in insertions(gaps * insert, LONGEST - len(z)):
                for symbols, share in reveals(z, tokens, reveal):
                    after[grown(symbols, new)] += mass * chance * share
        now = after
    return np.array([now[x] for x in TEXTS])


def insertions(mean, room):
    """Yields (numbers of masks of each gap, probability), cut off where the room ends."""
    for each in itertools.product(range(room + 1), repeat=len(mean)):
        law = [
            stats.poisson.pmf(k, m) if k < room else stats.poisson.sf(k - 1, m)
            for k, m in zip(each, mean, strict=True)
        ]
        total = np.minimum(np.cumsum(each), room)
        yield np.diff(total, prepend=0), math.prod(law)


def reveals(z, tokens, probability):
    """Yields (symbols, probability) of what the masks of z become."""
    options = [
        [(symbol, 1.0)]
        if symbol != MASK
        else [(MASK, 1.0 - probability), *((v, probability * tokens[n][v]) for v in range(V))]
        for n, symbol in enumerate(z)
    ]
    for each in itertools.product(*options):
        yield [symbol for symbol, _ in each], math.prod(share for _, share in each)


def grown(symbols, new) -> tuple[int, ...]:
    parts = [[MASK] * n + [symbol] for n, symbol in zip(new, symbols, strict=False)]
    return (*itertools.chain(*parts), *[MASK] * new[len(symbols)])


def distance(law) -> float:
    return np.abs(law - P).sum() / 2


@pytest.mark.slow
def test_the_law_of_the_samples_is_that_of_the_source(x64):
    """It is so up to an error that falls as 1 / steps, and the draws have the law of the steps."""
    far, near = (distance(chain_law(uniform(steps))) for steps in (16, 64))
    assert near < 0.03 and near < 0.35 * far
    rows, grid = 8000, uniform(5)
    z, law = drawn_texts(grid, rows), chain_law(grid)
    found = np.array([np.all(z == padded(x, ABSENT), axis=1).mean() for x in TEXTS])
    assert law.sum() == pytest.approx(1.0) and found.sum() == pytest.approx(1.0)
    np.testing.assert_array_less(np.abs(found - law), 4.5 * np.sqrt(law * (1 - law) / rows) + 1e-9)
    assert distance(law) > 0.1  # so that the law of the steps is told from that of the source


@pytest.mark.campaign
def test_masks_in_order_of_confidence_have_the_law_of_the_source_too(x64):
    """Up to the steps; chosen by the token that was drawn, they are at 0.10."""
    rows, grid = 6000, uniform(16)
    z = drawn_texts(grid, rows, order="confidence")
    found = np.array([np.all(z == padded(x, ABSENT), axis=1).mean() for x in TEXTS])
    noise = np.sqrt(P * (1 - P) / rows).sum() / 2  # of a sum of differences
    assert distance(found) < distance(chain_law(grid)) + 1.5 * noise


def test_both_rates_of_a_step():
    """From 0.8 to 0.4: half of the masks stay, and of what is missing (0.4 / 0.8)^2."""
    rows, process = 4000, PROCESSES["two schedules"]
    # One token is missing, behind the two masks.
    outputs = jnp.where(jnp.arange(7) == 2, -math.log(0.8**2), -700.0)
    found = jnp.zeros((rows, 7, V)), jnp.tile(outputs, (rows, 1))
    denoiser = Denoiser(None, lambda h: h, gaps=lambda z, t: found)
    chain = exact.chain_of(np.tile([MASK, MASK, *[ABSENT] * 4], (rows, 1)))
    s, t = jnp.float32(0.4), jnp.float32(0.8)
    z = Insert()(denoiser, process, chain, s, t, exact.keys_for(4, rows)).z
    share, added = (z[:, :2] == MASK).mean(), (z[:, 2:] == MASK).sum(axis=1)
    assert share == pytest.approx(0.5, abs=4.5 * math.sqrt(0.25 / (2 * rows)))
    assert added.mean() == pytest.approx(0.75, abs=4.5 * math.sqrt(0.75 / rows))


@pytest.mark.slow
def test_by_confidence_as_many_masks_are_revealed_and_the_likeliest():
    """Of six masks that differ in how sure the network is of them, in an order of places."""
    rows, process, sure = 200, Insertion(V), np.array([3, 1, 5, 0, 4, 2])
    logits = jnp.tile(jnp.stack([2.0 + jnp.asarray(sure), jnp.zeros(6)], axis=1), (rows, 1, 1))
    found = exact.at_end(logits), jnp.full((rows, 7), -700.0)
    denoiser = Denoiser(None, lambda h: h, gaps=lambda z, t: found)
    chain = exact.chain_of(np.full((rows, 6), MASK))
    arguments = jnp.float32(0.4), jnp.float32(0.8), exact.keys_for(0, rows)
    steps = {name: Insert(name, Transform(temperature=0.0)) for name in ORDERS}
    masks = {
        name: np.asarray(step(denoiser, process, chain, *arguments).z == MASK)
        for name, step in steps.items()
    }
    left = masks["random"].sum(axis=1)
    np.testing.assert_array_equal(masks["confidence"], sure < left[:, None])
    assert len(np.unique(left)) > 3 and (masks["random"] != masks["confidence"]).any()
    with pytest.raises(UserError, match="sample.order must be 'random' or 'confidence'"):
        Insert("left_to_right")


def test_a_prompt_is_the_beginning_of_every_sample(x64):
    tokens, mask = np.tile([1, 0, 0], (500, 1)), np.tile([True, False, False], (500, 1))
    z = drawn_texts(uniform(8), 500, Prompt(tokens.astype(np.int32), mask))
    assert (z[:, 0] == 1).all() and len(np.unique(z, axis=0)) > 4
    assert (z != MASK).all()


@pytest.mark.parametrize("t", [0.2, 0.7])
@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.cases(3)
def test_the_law_of_noise(name, t):
    """Of the string and its alignment at once, by enumeration; the first token of one is fixed."""
    process, x, rows = PROCESSES[name], (1, 0, 1), 20_000
    with jax.enable_x64(True):
        law = chances(process, t)
    for fixed in ((), (0,)):
        marked = np.tile([n in fixed for n in range(3)], (rows, 1))
        found = jax.jit(process.noised)(
            exact.keys_for(1, rows), jnp.tile(jnp.array(x), (rows, 1)), jnp.full(rows, t), marked
        )
        z, source, missing = map(np.asarray, found)
        told = np.concatenate([z, np.where(z == ABSENT, 0, source), missing], axis=1)
        total = 0.0
        for of_z, of_x, gaps, chance in outcomes(x, law, fixed):
            row = padded(of_z, ABSENT) + padded(of_x) + [*gaps, *[0] * (4 - len(gaps))]
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


@pytest.mark.parametrize("key", ["schedule", "insertion"])
def test_it_is_no_bound_if_either_schedule_stops_short(key):
    assert FlexMDM().is_bound(Insertion(2))
    assert not FlexMDM().is_bound(Insertion(2, **{key: LogLinear(eps=0.01)}))


def test_a_wrong_network_costs_more_and_the_paper_s_loss_is_a_constant_above(x64):
    right = integral(PROCESSES["linear"])
    wrong = integral(PROCESSES["linear"], gaps=0.3)
    assert P @ wrong > P @ right + 0.01
    constant = [order_table(3)[len(x)] for x in TEXTS]
    assert P @ (right + constant) > entropy(P) + 0.3


def test_a_prompt_is_conditioned_on(x64):
    """The mean bound of what follows the first symbol is its conditional entropy."""
    kept = [n for n, x in enumerate(TEXTS) if len(x) >= 2]
    texts, p = [TEXTS[n] for n in kept], P[kept] / P[kept].sum()
    first = np.array([x[0] for x in texts])
    given = np.array([p[first == k].sum() for k in range(V)])
    counted = lambda number: [[0 < n < len(texts[i]) for n in range(LONGEST)] for i in number]  # noqa: E731
    found = p @ integral(PROCESSES["linear"], texts, p, (0,), counted)
    assert found == pytest.approx(entropy(p) - entropy(given), abs=2e-5)


def test_a_draw_has_the_mean_of_the_enumeration(x64):
    """At one time, for a text of three tokens and a longer array: terms, constant and all."""
    process, t, x, rows = PROCESSES["two schedules"], 0.4, (1, 0, 1), 20_000
    known = table_denoiser(process, t, best(process, t))
    number, noised, batch = terms(process, [x])
    parts = FlexMDM().terms_at(known, process, batch, noised, jnp.full(len(number), t))
    chance = [outcome[3] for outcome in outcomes(x, chances(process, t))]
    expected = np.asarray(sum(parts)) @ chance - order_table(3)[3]
    draw = jax.jit(lambda batch, keys: FlexMDM()(known, process, batch, jnp.full(rows, t), keys))
    nats, extra = draw(texts_batch([x] * rows), exact.keys_for(2, rows))
    assert abs(nats.mean() - expected) < 4.5 * nats.std() / math.sqrt(rows)
    whole = extra["unmasking"] + extra["insertion"] + extra["orders"]
    np.testing.assert_allclose(nats, whole, rtol=1e-6)


def test_gaps_in_which_nothing_can_be_missing():
    """Before a prompt and between its neighbours; behind the end of z there are none."""
    held = np.array([[True, True, True, False]] * 3)
    fixed = np.array([[True, True, False, False], [True, False, True, False], [False] * 4])
    missing = np.zeros((3, 5), int)
    expected = [
        [False, False, True, True, False],
        [False, True, True, True, False],
        [True, True, True, True, False],
    ]
    np.testing.assert_array_equal(open_gaps(held, fixed, missing), expected)
    missing[0, 1] = 2  # an answer between two prompts, of which nothing is there
    assert open_gaps(held, fixed, missing)[0, 1]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_orders_of_insertion(n):
    """The mean over all orders of the sum of log c, c the missing tokens of the gap at its time."""
    total = 0.0
    for order in itertools.permutations(range(n)):
        there = [-1, n]
        for token in order:
            low = max(m for m in there if m < token)
            high = min(m for m in there if m > token)
            total += math.log(high - low - 1)
            there.append(token)
    expected = total / math.factorial(n)
    assert order_table(n)[n] == pytest.approx(expected, abs=1e-12)
    counts = np.array([[True] * n + [False] * (6 - n), [False] * (6 - n) + [True] * n])
    np.testing.assert_allclose(order_nats(counts), expected, rtol=1e-6)


def test_orders_of_runs_between_prompts_add_up():
    counts = np.array([[True, True, False, True, True, True, False, False]])
    table = order_table(3)
    np.testing.assert_allclose(order_nats(counts), table[2] + table[3], rtol=1e-6)


def test_the_divergence_keeps_its_digits():
    count, log_y = np.array([0, 1, 3, 3, 1]), np.array([-3.0, 1.0, 0.5, math.log(3) + 1e-3, -20.0])
    y = np.exp(log_y)
    expected = y - count + count * (np.log(np.maximum(count, 1)) - log_y)
    found = poisson_divergence(jnp.asarray(count), jnp.asarray(log_y, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    np.testing.assert_allclose(found[3], 3 * 1e-6 / 2, rtol=1e-2)


@pytest.mark.parametrize("log_missing", [22.0, 1000.0])
def test_old_tokens_survive_in_order_whatever_the_network_expects(log_missing):
    """With e^22 / 2 new tokens in each gap the sum of their numbers is no int32."""
    process, z = Insertion(5), jnp.array([[0, 1, 2, 3, 6, 6, 6, 6]] * 16)

    def gaps(z, t):
        expected = jnp.full((len(z), z.shape[1] + 1), log_missing).at[:, :2].set(-jnp.inf)
        return jnp.zeros((len(z), z.shape[1] + 1, 5)), expected

    denoiser = Denoiser(None, lambda h: h, gaps=gaps)
    after = Insert()(
        denoiser, process, exact.chain_of(z), *map(jnp.float32, (0.5, 1.0)), exact.keys_for(0, 16)
    )
    np.testing.assert_array_equal(after.z, [[0, 1, 5, 5, 5, 5, 2, 3]] * 16)


def test_large_numbers_of_new_masks_do_not_overflow():
    z = jnp.array([[0, 1, 2, 6, 6, 6]])
    new = jnp.array([[1, 0, 2**31 - 1, 2**31 - 1, 2**31 - 1, 0, 0]])
    after = inserted(Insertion(5), exact.chain_of(z), new)
    np.testing.assert_array_equal(after.z, [[5, 0, 1, 5, 5, 2]])


def test_masks_are_inserted_where_there_is_room():
    """Symbols behind a gap move; what the length does not hold is left out from the end on."""
    process = Insertion(5)
    z = jnp.array([[0, 5, 2, 6, 6, 6], [0, 1, 2, 3, 6, 6], [6] * 6])
    chance = jnp.where(z < 5, 0.5, 0.0)
    chain = exact.chain_of(z)._replace(confidence=chance)
    new = jnp.array([[1, 0, 2, 0, 0, 0, 0], [0, 1, 3, 0, 4, 0, 0], [9, 0, 0, 0, 0, 0, 0]])
    after = inserted(process, chain, new)
    np.testing.assert_array_equal(
        after.z, [[5, 0, 5, 5, 5, 2], [0, 5, 1, 5, 2, 3], [5, 5, 5, 5, 5, 5]]
    )
    np.testing.assert_array_equal(after.confidence, np.where(np.asarray(after.z) < 5, 0.5, 0.0))
