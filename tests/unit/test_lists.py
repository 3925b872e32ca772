"""Lists of counts: tables of vocabularies that are too large for a count of each symbol."""

import dataclasses
import functools
import itertools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.networks import codes, lists
from md4_jax.networks.evidence import Evidence
from md4_jax.networks.lists import DISCOUNT, LISTED, Lists, counts_of
from md4_jax.networks.mixture import EXPECTED, FIRST, ListMixture, likeliest
from md4_jax.networks.neighbours import WORDS
from md4_jax.networks.rows import COUNTED
from md4_jax.networks.tables import LARGEST_VOCABULARY, Tables
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.options import TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Batch, batch_of
from md4_jax.training.optim import AdamW
from md4_jax.training.step import init_state, make_train_step

V = 40
# Rows enough that no two combinations of these short texts share one.
TABLES = Lists(V, LISTED * 2**14, 10**6)
LARGE = LARGEST_VOCABULARY + 1
OPTIONS = Transformer(
    LARGE, 16, 1, 2, scan_blocks=False, tables=LISTED * 2**12, tables_tokens=500, tables_hidden=4
)


def texts(rows: int, length: int, symbols: int = V) -> jax.Array:
    """Texts in which some symbols are much more frequent than others."""
    drawn = jax.random.exponential(jax.random.key(0), (rows, length)) * symbols / 3
    return jnp.minimum(drawn.astype(jnp.int32), symbols - 1)


@functools.cache
def counter(tables: Lists):
    return tables.counter()


def learned(batch: Batch, tables: Lists = TABLES) -> dict[str, jax.Array]:
    """Lists of a text, of which they have counted all sequences."""
    state, count = tables.init(), counter(tables)
    for table in range(len(tables.sizes)):
        state = count(state, batch, table)
    return {**state, "sequences": jnp.int32(len(batch.tokens))}


def counted(tokens: np.ndarray, seen: dict[int, int]) -> Counter:
    """How often each token has these neighbours {distance: symbol}, by reading the texts."""
    reach = WORDS.reach
    found = Counter()
    for text in tokens:
        padded = np.pad(text, reach, constant_values=V)
        for at, token in enumerate(text, reach):
            if all(padded[at + n] == symbol for n, symbol in seen.items()):
                found[int(token)] += 1
    return found


def kept(times: Counter) -> tuple[dict[int, int], int]:
    """The most frequent tokens, of equal ones the smallest, and how many others there are."""
    order = sorted(times, key=lambda token: (-times[token], token))
    listed = {token: times[token] for token in order[:LISTED]}
    return listed, times.total() - sum(listed.values())


def visible(z: np.ndarray, position: int, window: tuple[int, int]) -> dict[int, int]:
    """The visible neighbours of a position in a window, with V beyond the ends."""
    around = [n for n in range(-window[0], window[1] + 1) if n]
    symbols = {n: int(z[position + n]) if 0 <= position + n < len(z) else None for n in around}
    return {n: V if symbol is None else symbol for n, symbol in symbols.items() if symbol != V}


def told(evidence: Evidence, row: int, position: int, lookup: int) -> dict[int, float]:
    """The counts of one look-up by symbol."""
    symbols = np.asarray(evidence.symbols[row, position])
    counts = np.asarray(evidence.counts[row, position, lookup])
    assert not counts[symbols == V].any()
    return {int(s): float(c) for s, c in zip(symbols, counts, strict=True) if c}


@pytest.mark.quick(1)
@pytest.mark.parametrize("half", [None, 0, 1])
@pytest.mark.cases(1)
def test_what_is_looked_up_is_what_the_text_has_between_the_visible_neighbours(half):
    # 15 and fewer are exact, so the texts are short.
    tokens = np.asarray(texts(6, 14))
    parts = (tokens[:3], tokens[3:])
    z = np.where(np.random.default_rng(3).random(tokens.shape) < 0.6, V, tokens)
    asked = None if half is None else jnp.full(6, half)
    found = TABLES.evidence(learned(batch_of(jnp.asarray(tokens))), jnp.asarray(z), half=asked)
    with_others = 0
    places = itertools.product(range(6), range(14), enumerate(WORDS.windows))
    for row, position, (number, window) in places:
        seen = visible(z[row], position, window)
        expected, others = Counter(), 0
        for part in parts if half is None else [parts[half]]:
            listed, rest = kept(counted(part, seen))
            expected.update(listed)
            others += rest
        assert told(found, row, position, number) == expected
        assert found.counted[row, position, number] == expected.total() + others
        with_others += others > 0
    assert with_others > 10


def test_estimates_by_hand():
    tokens = jnp.array([[5, 6, 5], [5, 8, 5], [5, 8, 5], [5, 9, 5], [5, 7, 4]])
    found = TABLES.evidence(learned(batch_of(tokens)), jnp.array([[5, V, 5]]))
    number = WORDS.windows.index((1, 1))
    assert told(found, 0, 1, number) == {6: 1, 8: 2, 9: 1}
    at = {int(s): n for n, s in enumerate(found.symbols[0, 1])}
    estimates = np.exp(found.estimates[0, 1, number])
    for symbol, count in ((6, 1), (8, 2), (9, 1)):
        np.testing.assert_allclose(estimates[at[symbol]], (count - DISCOUNT) / 4, rtol=1e-6)
    # 7 stood right of a 5, as other look-ups know.
    assert estimates[at[7]] < 1e-8


def test_symbols_are_listed_once():
    z = texts(4, 14).at[:, ::2].set(V)
    found = np.asarray(TABLES.evidence(learned(batch_of(texts(4, 14))), z).symbols)
    real = [symbols[symbols < V].tolist() for symbols in found.reshape(-1, found.shape[-1])]
    assert all(len(symbols) == len(set(symbols)) for symbols in real)
    assert max(len(symbols) for symbols in real) > 10


@pytest.mark.slow
def test_no_sequence_of_a_batch_of_training_reads_its_own_half():
    text = batch_of(texts(6, 14))
    numbers = jnp.array([1, 4, 8])
    batch = batch_of(text.tokens[numbers % 6])._replace(number=numbers)
    z = batch.tokens.at[:, ::2].set(V)

    def read(text: Batch) -> Evidence:
        state = learned(text)
        half = TABLES.announced(state, batch).context[COUNTED]
        return TABLES.evidence(state, z, half=half)

    # Other tokens in the first half, to which sequence 1 belongs, in the second, and in neither.
    first, second = (text.tokens.at[part].set(7) for part in (slice(3), slice(3, 6)))
    plain, other_first, other_second = (read(batch_of(x)) for x in (text.tokens, first, second))

    def same(one: Evidence, other: Evidence) -> list[bool]:
        return [bool((one.counts[n] == other.counts[n]).all()) for n in range(3)]

    assert same(plain, other_first) == [True, False, False]
    assert same(plain, other_second) == [False, True, True]
    # Nothing but training has a half.
    assert TABLES.announced(learned(text), text).context == {}


def test_shares_are_those_of_the_whole_text():
    tokens = jnp.zeros((4, 14), jnp.int32).at[:, 3].set(1)
    asked = jnp.ones((4, 14), bool).at[:, 0].set(False)
    shares = learned(Batch(tokens, asked, {}))["shares"]
    np.testing.assert_allclose(shares.sum(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(shares[:3] / shares[2], [97, 9, 1], rtol=1e-5)


def test_tokens_that_do_not_count_are_neighbours_all_the_same():
    tokens = jnp.array([[3, 4, 5]] * 2)
    state = learned(Batch(tokens, jnp.array([[False, True, False]] * 2), {}))
    assert (state["counts"].sum(axis=(1, 2)) == len(TABLES.sizes)).all()
    found = TABLES.evidence(state, jnp.array([[3, V, 5]]))
    assert told(found, 0, 1, WORDS.windows.index((1, 1))) == {4: 2}


@pytest.mark.campaign
def test_neighbours_of_another_segment_are_as_beyond_the_end():
    one, other = texts(2, 9), texts(2, 7) * 0 + 3
    together = jnp.concatenate([one, other], axis=1)
    segments = jnp.array([[0] * 9 + [1] * 7] * 2)
    apart = jnp.concatenate([TABLES.looked_up(one), TABLES.looked_up(other)], axis=1)
    np.testing.assert_array_equal(TABLES.looked_up(together, segments), apart)
    assert (TABLES.looked_up(together) != apart).any()
    state = learned(batch_of(together)._replace(context={"segments": segments}))
    found = TABLES.evidence(state, together.at[:, 8].set(V), segments)
    seen = {-1: int(one[0, 7]), 1: V}
    expected = sum((counted(np.asarray(x), seen) for x in (one, other)), Counter())
    assert told(found, 0, 8, WORDS.windows.index((1, 1))) == expected


def test_a_large_count_leaves_no_others():
    # 1,056 is rounded to 1,024; what is listed is all that there is.
    rows, symbols = np.zeros(1056, int), np.full(1056, 7)
    found = lists.listed(rows, symbols, 2, V)
    assert codes.decoded(found["counts"][0, 0]) == 1024
    assert found["others"].tolist() == [0, 0]
    assert (found["symbols"] == [[7, *[V] * 15], [V] * 16]).all()


def test_codes_of_counts_are_those_of_the_tables():
    counts = np.unique(np.geomspace(1, codes.LARGEST, 100_000).astype(np.int64))
    counts = np.append(np.arange(300), counts)
    expected = codes.coded(jnp.asarray(counts, jnp.int32))
    np.testing.assert_array_equal(lists._coded(counts), expected)


def plain_sum(logits: jax.Array, symbols: jax.Array, added: jax.Array) -> jax.Array:
    """log(exp(logits) + exp(added)) with a table of what is added to each symbol."""
    marks = jax.nn.one_hot(symbols, logits.shape[1])
    return jnp.log(jnp.exp(logits) + jnp.einsum("nc,ncv->nv", jnp.exp(added), marks))


def test_shares_are_added_to_the_probabilities_and_their_gradient():
    keys = jax.random.split(jax.random.key(1), 3)
    logits, weights = (jax.random.normal(key, (3, 9)) for key in keys[:2])
    added = jax.random.normal(keys[2], (3, 4))
    # 9 stands for no symbol.
    symbols = jnp.array([[0, 3, 8, 9], [2, 9, 9, 4], [9, 9, 9, 9]])

    def value(function, logits, added):
        return jnp.sum(weights * function(logits, symbols, added))

    both = jax.value_and_grad(value, argnums=(1, 2))
    found, expected = (both(f, logits, added) for f in (lists._with_shares, plain_sum))
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(lists._with_shares(logits, symbols, added)[2], logits[2])


def test_the_likeliest_symbols_by_hand():
    counts = jnp.zeros((1, 1, 2, 12)).at[0, 0, 0, :11].set(1.0)
    symbols = jnp.arange(12)[None, None] + 100
    logits = jnp.log(jnp.arange(1.0, 13.0))[None, None]
    shares, found = likeliest(Evidence(counts, counts, counts[..., 0], symbols), logits)
    # 1 + 2 + ... + 11 beside a 1 of the network; the last symbol has no count.
    np.testing.assert_array_equal(found[0, 0], 110 - np.arange(EXPECTED))
    np.testing.assert_allclose(shares[0, 0], (11 - np.arange(EXPECTED)) / 67, rtol=1e-5)


@pytest.fixture(scope="module")
def training():
    """(network, state with lists of a text, that text, step)."""
    network = OPTIONS.build()
    optimizer, _ = AdamW(learning_rate=1e-2, warmup_steps=1).build(100)
    train = TrainOptions(batch_size=4, num_steps=100, ema=0.5)
    state = init_state(jax.random.key(0), network, Masking(LARGE), optimizer)
    text = batch_of(texts(8, 12, LARGE))._replace(number=jnp.arange(8))
    companion = learned(text, network.companion)
    state = state._replace(ema=state.ema | {"companion": companion})
    step = jax.jit(make_train_step(network, AnyOrder(), optimizer, train))
    return network, state, text, step


def test_the_lists_add_to_the_probabilities_of_the_network(training):
    network, state, text, _ = training
    z, t = text.tokens.at[:, ::3].set(LARGE), jnp.full(8, 0.4)
    segments = jnp.arange(12)[None].repeat(8, axis=0) // 5
    found = jax.jit(network.companion.evidence)(state.ema["companion"], z, segments)
    # The head starts at zero, and each look-up has the same weight.
    added = FIRST / WORDS.lookups * jnp.exp(found.estimates).sum(axis=2)
    shares = jnp.broadcast_to(state.ema["companion"]["shares"], (8, 12, LARGE))
    marks = jax.nn.one_hot(found.symbols, LARGE)
    expected = jnp.log(shares + jnp.einsum("blc,blcv->blv", added, marks))
    logits = jax.jit(lambda params: network.denoiser(params, {"segments": segments})(z, t))
    np.testing.assert_allclose(logits(state.ema), expected, atol=1e-4)
    assert jnp.abs(expected - jnp.log(shares)).max() > 1


@pytest.mark.campaign
def test_weights_and_correction_are_learned_and_the_lists_stay(training):
    _, state, text, step = training
    batch = jax.tree.map(lambda x: x[2:6], text)
    after, first = step(state, batch)
    after, second = step(after, batch)
    assert second["nats"] < first["nats"]
    chex.assert_trees_all_equal(after.ema["companion"], state.ema["companion"])
    before, learnt = (x.params["network"]["mixture"] for x in (state, after))
    for name in before:
        assert jnp.abs(before[name]["kernel"] - learnt[name]["kernel"]).max() > 0, name


@pytest.mark.campaign
def test_some_positions_and_repeated_rows_of_a_trained_network(training):
    network, state, text, step = training
    for _ in range(3):
        state, _ = step(state, jax.tree.map(lambda x: x[:4], text))
    z, t = text.tokens[:2].at[:, ::3].set(LARGE), jnp.array([0.4, 0.7])
    denoiser = network.denoiser(state.ema)
    everywhere = denoiser(z, t)
    index = jnp.array([[0, 3], [6, 9]])
    some = denoiser.unembed(denoiser.features_at(z, t, index))
    expected = jnp.take_along_axis(everywhere, index[..., None], axis=1)
    np.testing.assert_allclose(some, expected, atol=1e-4)
    twice = denoiser.repeated(2)(jnp.repeat(z, 2, axis=0), jnp.repeat(t, 2))
    np.testing.assert_allclose(twice, jnp.repeat(everywhere, 2, axis=0), atol=1e-4)


@pytest.mark.campaign
def test_the_network_reads_what_the_lists_expect(training):
    network, state, text, _ = training
    z, t = text.tokens.at[:, ::3].set(LARGE), jnp.full(8, 0.4)
    empty = network.companion.init()
    told, without = (
        network.denoiser(state.ema | {"companion": x}).features(z, t)[..., : OPTIONS.size]
        for x in (state.ema["companion"], empty)
    )
    assert jnp.abs(told - without)[:, ::3].mean() > 0.01


@pytest.mark.campaign
def test_the_correction_treats_all_symbols_alike():
    """Another order of the listed symbols orders what is added otherwise, and changes no more."""
    mixture = ListMixture(3, jnp.float32, "float32", units=6)
    counts = jax.random.randint(jax.random.key(0), (2, 2, 3, 7), 0, 5).astype(jnp.float32)
    h, order = jax.random.normal(jax.random.key(1), (2, 2, 8)), jnp.array([4, 2, 0, 6, 1, 3, 5])

    def logits(mixture: ListMixture, h: jax.Array, evidence: Evidence) -> jax.Array:
        return mixture.logits(h, evidence, mixture.known(evidence))

    def evidence(counts: jax.Array) -> Evidence:
        total = counts.sum(axis=-1)
        return Evidence(jnp.log(counts / total[..., None] + 1e-9), counts, total)

    params = mixture.init(jax.random.key(2), h, evidence(counts), method=logits)
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(3), x.shape), params)
    found = mixture.apply(params, h, evidence(counts), method=logits)
    renamed = mixture.apply(params, h, evidence(counts[..., order]), method=logits)
    np.testing.assert_allclose(renamed, found[..., order], atol=1e-4)
    without = ListMixture(3, jnp.float32, "float32").apply(
        params, h, evidence(counts), method=logits
    )
    assert jnp.abs(found - without).mean() > 0.05


def test_the_size_of_the_vocabulary_chooses():
    assert isinstance(counts_of(LARGEST_VOCABULARY, 2**20, 100), Tables)
    assert isinstance(counts_of(LARGE, 2**20, 100), Lists)
    symbols = {size: Lists(size, 2**12, 100).init()["symbols"] for size in (2**16 - 1, 2**16)}
    assert [x.dtype for x in symbols.values()] == [jnp.uint16, jnp.int32]
    assert all((x == size).all() for size, x in symbols.items())


def test_sets_of_words():
    offsets = {tuple(n for j, n in enumerate(WORDS.offsets) if one >> j & 1) for one in WORDS.sets}
    assert len(offsets) == len(WORDS.sets) == 44
    assert {(), (-4,), (-4, 4), (-2, -1, 1, 2), (-3, -2, -1)} <= offsets
    assert not {(-3, -2, -1, 1), (-4, -1, 1)} & offsets


def test_options_of_a_run_are_kept_by_the_network():
    network = dataclasses.replace(OPTIONS, tables_tokens=77).build()
    assert network.companion == Lists(LARGE, OPTIONS.tables, 77)


def test_types_are_the_same_where_jax_has_64_bits():
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.dtype, jax.eval_shape(TABLES.init))
    assert wide == jax.tree.map(lambda x: x.dtype, jax.eval_shape(TABLES.init))
    assert wide["shares"] == jnp.float32
