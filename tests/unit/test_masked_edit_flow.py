"""Edit Flows from masks by enumeration: texts of 0 to 3 tokens of two symbols, and 1 to 3 masks."""

import collections
import itertools
import math

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate

from md4_jax.objectives.flexmdm import order_nats
from md4_jax.objectives.masked_edit_flow import MaskedEditFlow
from md4_jax.processes.edits import Edited, Edits
from md4_jax.processes.schedules import Cosine, Linear, Polynomial
from md4_jax.protocols import Denoiser, Prompt, UserError, batch_of
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.masked_edit import MaskedEdit

V, LONGEST = 2, 3
MASK, ABSENT, DELETED = V, V + 1, V
TEXTS = [x for n in range(LONGEST + 1) for x in itertools.product(range(V), repeat=n)]
# Far from uniform, so that neither symbols nor lengths nor places are alike.
P = np.random.default_rng(5).dirichlet(np.full(len(TEXTS), 0.7))
ENTROPY = -float(P @ np.log(P))
NONE = -700.0  # the logarithm of what does not happen


def padded(x, fill=0, length=LONGEST) -> list[int]:
    return [*x, *[fill] * (length - len(x))]


def alignments(x, masks: int, fixed: int):
    """Yields the columns (mask there, token or None) of each alignment; `fixed` tokens are kept."""
    given, free = x[:fixed], x[fixed:]
    masks = max(masks - fixed, 0)
    for pairs in itertools.combinations(range(max(masks, len(free))), min(masks, len(free))):
        tokens, columns = iter(free), [(False, k) for k in given]
        for n in range(max(masks, len(free))):
            has_token = masks <= len(free) or n in pairs
            columns.append((masks > len(free) or n in pairs, next(tokens) if has_token else None))
        yield columns


class State(collections.namedtuple("State", "z edits gaps fields chance")):
    """z; what each symbol becomes (a symbol, DELETED); tokens of each gap; `Edited`; chance."""


def states(x, absent: float, masks: int, fixed: int = 0):
    """Yields all that may become of x."""
    every = list(alignments(x, masks, fixed))
    for columns in every:
        for made in itertools.product((False, True), repeat=len(columns)):
            if not all(made[:fixed]):
                continue
            chance = math.prod(1.0 - absent if m else absent for m in made[fixed:]) / len(every)
            yield state_of(columns, made, fixed, chance, math.log(len(every)))


def state_of(columns, made, fixed: int, chance: float, ways: float) -> State:
    z, edits, gaps, source, deleted, gap, created = [], [], [[]], [], [], [], []
    for n, ((has_mask, token), done) in enumerate(zip(columns, made, strict=True)):
        missing = not has_mask and not done
        if token is not None:
            deleted.append(missing)
            gap.append(len(z) if missing else 0)
            created.append(not has_mask and n >= fixed)
        if missing:
            gaps[-1].append(token)
        elif not (done and token is None):
            z.append(token if done else MASK)
            edits.append(DELETED if token is None else token)
            source.append(0 if token is None else len(deleted) - 1)
            gaps.append([])
    surplus = [symbol == MASK and edit == DELETED for symbol, edit in zip(z, edits, strict=True)]
    counts = padded([len(g) for g in gaps], 0, LONGEST + 1)
    fields = Edited(
        padded(z, ABSENT), padded(source), padded(surplus, False), counts,
        padded(deleted, False), padded(gap), padded(created, False), ways,
    )  # fmt: skip
    return State(tuple(z), edits, gaps, fields, chance)


def posteriors(absent: float, masks: int, texts=TEXTS, p=P, fixed: int = 0):
    """{z: (what each symbol becomes [len, V + 1], tokens in each gap [len + 1, V])} by Bayes."""
    total = {}
    for x, prior in zip(texts, p, strict=True):
        for state in states(x, absent, masks, fixed):
            size = len(state.z)
            edits, gaps, mass = total.setdefault(
                state.z, [np.zeros((size, V + 1)), np.zeros((size + 1, V)), np.zeros(1)]
            )
            weight = prior * state.chance
            mass += weight
            for n, edit in enumerate(state.edits):
                edits[n, edit] += weight
            for n, k in ((n, k) for n, gap in enumerate(state.gaps) for k in gap):
                gaps[n, k] += weight
    return {z: (edits / mass, gaps / mass) for z, (edits, gaps, mass) in total.items() if mass}


def tables(absent: float, found):
    """What a network says that knows this, by the code of z: (logits, replacing, outputs)."""
    size = (V + 2) ** LONGEST
    logits, replacing = np.zeros((2, size, LONGEST + 1, V))
    outputs = np.full((size, LONGEST + 1, 2), NONE)
    with np.errstate(divide="ignore"):
        for z, (edits, gaps) in found.items():
            row, n = np.array(padded(z, ABSENT)) @ (V + 2) ** np.arange(LONGEST), len(z)
            logits[row, : n + 1] = np.log(gaps)
            outputs[row, : n + 1, 0] = np.log(gaps.sum(axis=1) / absent)
            replacing[row, :n] = np.log(edits[:, :V])
            outputs[row, :n, 1] = np.log(edits[:, V]) - np.log(edits[:, :V].sum(axis=1))
    return [np.clip(table, NONE, -NONE) for table in (logits, replacing, outputs)]


def table_denoiser(*tables) -> Denoiser:
    def edits(z, t):
        row = z @ (V + 2) ** jnp.arange(LONGEST)
        return tuple(jnp.asarray(table)[row] for table in tables)

    return Denoiser(None, lambda h: h, edits=edits)


def texts_batch(texts, fixed: int = 0):
    """The texts as a batch of which the tokens from `fixed` on count."""
    mask = [[fixed <= n < len(x) for n in range(LONGEST)] for x in texts]
    return batch_of(np.array([padded(x) for x in texts], np.int32), loss_mask=np.array(mask))


def stacked(fields) -> Edited:
    return Edited(*(np.array(part) for part in zip(*fields, strict=True)))


def integral(process, network, texts=TEXTS, fixed: int = 0):
    """The bound of each text by quadrature over t and enumeration of alignments and z.

    network: probability that an edit is still to be made -> the tables
    """
    half, weights = exact.quadrature(high=0.5, nodes=20, power=4)
    rows = [(i, s) for i, x in enumerate(texts) for s in states(x, 0.5, process.masks, fixed)]
    number, noised = np.array([i for i, _ in rows]), stacked(state.fields for _, state in rows)
    batch = texts_batch([texts[i] for i in number], fixed)
    call = jax.jit(
        lambda t, *tables: sum(
            MaskedEditFlow().terms_at(table_denoiser(*tables), process, batch, noised, t)
        )
    )
    total = np.zeros(len(texts))
    for time, share in zip([*half, *(1.0 - half)], [*weights, *weights], strict=True):
        absent = float(process.schedule.one_minus_alpha(jnp.float64(time)))
        chance = [s.chance for x in texts for s in states(x, absent, process.masks, fixed)]
        values = np.asarray(call(jnp.full(len(number), time), *network(absent)))
        values = values - np.asarray(order_nats(noised.created)) - noised.alignment
        total += share * np.bincount(number, np.array(chance) * values, len(texts))
    return total


def right(masks: int):
    return lambda absent: tables(absent, posteriors(absent, masks))


@pytest.mark.parametrize("masks", [1, 2, 3])
@pytest.mark.parametrize("schedule", [Linear(), Polynomial(2.0), Cosine()])
@pytest.mark.cases(2)
def test_the_mean_bound_of_the_exact_network_is_the_entropy(schedule, masks, x64):
    """Of the source of texts, their lengths included, however many masks there are."""
    found = P @ integral(Edits(V, schedule, masks), right(masks))
    assert found == pytest.approx(ENTROPY, abs=2e-5)


@pytest.mark.parametrize("masks", [1, 2, 3])
@pytest.mark.cases(2)
def test_a_prompt_is_conditioned_on(masks, x64):
    """The mean bound of what follows the first symbol is its conditional entropy."""
    kept = [n for n, x in enumerate(TEXTS) if len(x) >= 2]
    texts, p = [TEXTS[n] for n in kept], P[kept] / P[kept].sum()
    given = np.array([p[[x[0] == k for x in texts]].sum() for k in range(V)])
    known = lambda absent: tables(absent, posteriors(absent, masks, texts, p, 1))  # noqa: E731
    found = p @ integral(Edits(V, masks=masks), known, texts, 1)
    assert found == pytest.approx(given @ np.log(given) - p @ np.log(p), abs=2e-5)


def test_the_gap_between_a_prompt_and_a_mask_is_open():
    """Also if the mask is to be deleted: the model might insert a token there."""
    process, batch = Edits(V, masks=3), texts_batch([(1, 0)], 1)
    whole = (s for s in states((1, 0), 0.5, 3, 1) if s.z == (1, MASK, MASK))
    first = next(s for s in whole if s.edits[1] == DELETED)
    terms = [
        MaskedEditFlow().terms_at(
            Denoiser(None, lambda h: h, edits=lambda z, t, o=o: (jnp.zeros((1, 4, V)),) * 2 + (o,)),
            process, batch, stacked([first.fields]), jnp.full(1, 0.5),
        )[1]
        for o in (jnp.zeros((1, 4, 2)), jnp.zeros((1, 4, 2)).at[:, 1, 0].set(1.0))
    ]  # fmt: skip
    # v = 2 and 1 - alpha = 1/2, so that each gap costs exp(output).
    np.testing.assert_allclose(terms[1] - terms[0], math.e - 1.0, rtol=1e-5)


def test_without_the_constants_it_is_another_number(x64):
    """Of one mask: log n alignments, and of two tokens beside each other two orders."""
    for x in TEXTS:
        ways = np.array([s.fields.alignment for s in states(x, 0.5, 1)])
        assert np.all(ways == (math.log(len(x)) if x else 0.0))
        created = np.array([s.fields.created for s in states(x, 0.5, 1)])
        assert (np.mean(order_nats(created)) > 0.0) == (len(x) == 3)


@pytest.mark.parametrize("seed, masks", [(0, 1), (1, 2), (2, 2), (3, 3)])
@pytest.mark.cases(2)
def test_it_is_above_the_negative_logarithm_for_every_network_and_text(seed, masks, x64):
    """P(text) of the model is the solution of its master equation in -log(1 - alpha)."""
    coin = np.random.default_rng(seed)
    strings = [z for n in range(LONGEST + 1) for z in itertools.product(range(V + 1), repeat=n)]
    known, said = posteriors(0.5, masks), {}
    for z in strings:  # near the right network, so that the bound is not far from its aim
        wrong = coin.dirichlet(np.ones(V + 1), len(z)).reshape(len(z), V + 1)
        edits, gaps = known.get(z, (wrong, np.ones((len(z) + 1, V))))
        said[z] = (
            0.8 * edits + 0.2 * wrong,
            (gaps + 0.1) * np.exp(coin.normal(0.5, 0.3, gaps.shape)),
        )
    editing, inserting = np.zeros((2, len(strings), len(strings)))
    for number, z in enumerate(strings):
        edits, gaps = said[z]
        inserting[number, number] = -gaps.sum()  # to longer texts than these too
        for gap, k in itertools.product(range(len(z) + 1), range(V)):
            after = (*z[:gap], k, *z[gap:])
            if len(after) <= LONGEST:
                inserting[number, strings.index(after)] += gaps[gap, k]
        for n, k in itertools.product(np.flatnonzero(np.array(z) == MASK), range(V + 1)):
            after = (*z[:n], *([] if k == DELETED else [k]), *z[n + 1 :])
            editing[number, strings.index(after)] += edits[n, k]
            editing[number, number] -= edits[n, k]
    law = integrate.solve_ivp(
        lambda at, p: p @ editing + math.exp(-at) * (p @ inserting),
        (0.0, 40.0),
        np.eye(len(strings))[strings.index((MASK,) * masks)],
        rtol=1e-9,
        atol=1e-12,
    ).y[:, -1]
    nats = -np.log([law[strings.index(x)] for x in TEXTS])
    network = lambda absent: tables(absent, {z: (e, absent * g) for z, (e, g) in said.items()})  # noqa: E731
    excess = integral(Edits(V, masks=masks), network) - nats
    assert (excess > -1e-5).all() and excess.max() > 1e-2 and P @ excess < 0.8


@pytest.mark.parametrize(
    "x, masks, fixed",
    [((1, 0, 1), 2, 0), ((1,), 3, 0), ((1, 0), 2, 0), ((1, 0, 1), 2, 1), ((0, 1), 3, 1)],
)
def test_the_law_of_noise(x, masks, fixed):
    """Of the string and all that is told of its alignment, by enumeration."""
    process, rows, t = Edits(V, Polynomial(2.0), masks), 20_000, 0.6
    text = jnp.tile(jnp.array(padded(x, ABSENT)), (rows, 1))
    marked = np.tile(np.arange(LONGEST) < fixed, (rows, 1))
    found = jax.jit(process.edited)(exact.keys_for(1, rows), text, jnp.full(rows, t), marked)
    found = Edited(*map(np.asarray, found))
    known = (found.z != ABSENT) & ~found.surplus
    found = found._replace(
        source=np.where(known, found.source, 0), gap=np.where(found.deleted, found.gap, 0)
    )
    expected = collections.Counter()
    for state in states(x, 0.36, masks, fixed):
        key = tuple(np.concatenate([np.ravel(part) for part in state.fields[:-1]]))
        expected[key] += state.chance
        np.testing.assert_allclose(found.alignment, state.fields.alignment, atol=1e-6)
    told = np.concatenate(found[:-1], axis=1).astype(int)
    total = 0.0
    for row, chance in expected.items():
        share = np.all(told == np.array(row), axis=1).mean()
        assert abs(share - chance) <= 4.5 * math.sqrt(chance * (1 - chance) / rows) + 1e-9
        total += share
    assert total == pytest.approx(1.0)


def test_there_are_no_masks_before_a_prompt_in_the_middle():
    process, x = Edits(V, masks=2), jnp.array([[1, 0, 1]])
    fixed = jnp.array([[False, True, False]])
    found = process.edited(exact.keys_for(0, 1), x, jnp.ones(1), fixed)
    np.testing.assert_array_equal(found.z, [[0, ABSENT, ABSENT]])
    np.testing.assert_array_equal(found.created, [[True, False, True]])
    np.testing.assert_array_equal(found.missing, [[1, 1, 0, 0]])


def test_texts_are_whole_at_0_and_masks_at_1():
    process, x = Edits(V, masks=2), jnp.array([[1, 0, 1], [1, ABSENT, ABSENT], [ABSENT] * 3])
    for t, expected in ((0.0, x), (1.0, [[MASK, MASK, ABSENT]] * 3)):
        z = process.corrupt(exact.keys_for(0, 3), x, jnp.full(3, t))
        np.testing.assert_array_equal(z, expected)
    np.testing.assert_array_equal(process.prior(exact.keys_for(0, 1), 3), [[MASK, MASK, ABSENT]])
    with pytest.raises(UserError, match="process.masks must be at least 1, not 0"):
        Edits(V, masks=0)


def test_a_draw_has_the_mean_of_the_enumeration(x64):
    """At one time, for a text with inserted tokens: terms, constants and all."""
    process, x, rows = Edits(V, Polynomial(2.0), 1), (1, 0, 1), 20_000
    known, every = table_denoiser(*right(1)(0.36)), list(states(x, 0.36, 1))
    noised, batch = stacked(s.fields for s in every), texts_batch([x] * len(every))
    terms = sum(MaskedEditFlow().terms_at(known, process, batch, noised, jnp.full(len(every), 0.6)))
    values = np.asarray(terms) - np.asarray(order_nats(noised.created)) - math.log(3)
    expected = values @ [s.chance for s in every]
    draw = jax.jit(
        lambda batch, keys: MaskedEditFlow()(known, process, batch, jnp.full(rows, 0.6), keys)
    )
    nats, extra = draw(texts_batch([x] * rows), exact.keys_for(2, rows))
    assert abs(nats.mean() - expected) < 4.5 * nats.std() / math.sqrt(rows)
    parts = ("tokens", "insertion", "deletion", "orders", "alignment")
    np.testing.assert_allclose(nats, sum(extra[name] for name in parts), rtol=1e-6)


def chain_law(process, grid) -> np.ndarray:
    """The law of the sampler's texts by enumeration of its steps."""
    now, times = {(MASK,) * process.masks: 1.0}, np.asarray(grid, float)[::-1]
    for t, s in itertools.pairwise(times):
        at_t, at_s = (float(process.schedule.one_minus_alpha(jnp.float64(x))) for x in (t, s))
        share, after = 1.0 - at_s / at_t, collections.Counter()
        found = posteriors(at_t, process.masks)
        for z, mass in now.items():
            edits, gaps = found[z]
            mean = gaps * share
            law = mean / np.maximum(mean.sum(axis=1, keepdims=True), 1.0)
            options = []
            for n in range(len(z) + 1):
                options.append([(1.0 - law[n].sum(), ()), *((law[n, k], (k,)) for k in range(V))])
                if n < len(z) and z[n] == MASK:
                    become = [(share * edits[n, k], (k,)) for k in range(V)]
                    gone = (share * edits[n, DELETED], ())
                    options.append([(1.0 - share, (MASK,)), *become, gone])
                elif n < len(z):
                    options.append([(1.0, (z[n],))])
            options = [[each for each in part if each[0] > 1e-9] for part in options]
            for each in itertools.product(*options):
                chance = mass * math.prod(c for c, _ in each)
                if chance > 1e-12:
                    after[grown([what for _, what in each])] += chance
        now = after
    return np.array([now[x] for x in TEXTS])


def grown(each) -> tuple[int, ...]:
    """The text of what comes in a gap, of a symbol, in the next gap, and so on, cut at its end."""
    room, text = LONGEST - sum(map(len, each[1::2])), []
    for n, part in enumerate(each):
        if n % 2 == 0 and part:
            text += part if room else ()
            room -= room > 0
        else:
            text += part
    return tuple(text)


def drawn_texts(process, grid, rows: int, prompt=None) -> np.ndarray:
    """Samples z [rows, L] of the exact network."""
    times = np.asarray(grid, float)[1:]
    levels = [float(process.schedule.one_minus_alpha(jnp.float64(t))) for t in times]
    every = [jnp.stack(x) for x in zip(*(right(process.masks)(a) for a in levels), strict=True)]

    def edits(z, t):
        row, at = z @ (V + 2) ** jnp.arange(LONGEST), jnp.argmin(jnp.abs(times - t[0]))
        return tuple(table[at, row] for table in every)

    denoiser = Denoiser(None, lambda h: h, edits=edits)
    prompt = no_prompt(rows, LONGEST) if prompt is None else prompt
    arguments = dict(grid=grid, prompt=prompt)
    call = jax.jit(
        lambda keys: sample(denoiser, process, MaskedEdit(), keys=keys, **arguments)[0].z
    )
    return np.asarray(call(exact.keys_for(0, rows)))


def distance(law) -> float:
    return np.abs(law - P).sum() / 2


def test_the_law_of_the_samples_is_that_of_the_source(x64):
    """It is so up to an error that falls as 1 / steps, and the draws have the law of the steps."""
    process = Edits(V, Polynomial(2.0), 2)
    far, near = (distance(chain_law(process, uniform(steps))) for steps in (4, 16))
    assert near < 0.05 and near < 0.4 * far
    rows, grid = 8000, uniform(4)
    z, law = drawn_texts(process, grid, rows), chain_law(process, grid)
    found = np.array([np.all(z == padded(x, ABSENT), axis=1).mean() for x in TEXTS])
    assert law.sum() == pytest.approx(1.0, abs=1e-6) and found.sum() == pytest.approx(1.0)
    np.testing.assert_array_less(np.abs(found - law), 4.5 * np.sqrt(law * (1 - law) / rows) + 1e-6)
    assert distance(law) > 0.02  # so that the law of the steps is told from that of the source


@pytest.mark.parametrize("masks", [1, 3])
def test_a_prompt_is_the_beginning_of_every_sample(masks, x64):
    """Also of one that is as long as the masks."""
    tokens, mask = np.tile([1, 0, 0], (500, 1)), np.tile([True, False, False], (500, 1))
    prompt = Prompt(tokens.astype(np.int32), mask)
    z = drawn_texts(Edits(V, Polynomial(2.0), masks), uniform(8), 500, prompt)
    assert (z[:, 0] == 1).all() and len(np.unique(z, axis=0)) > 2
    assert (z != MASK).all()
