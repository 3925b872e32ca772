"""Tables of counts: what they see, what they count, and what the network makes of it."""

import dataclasses
import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.networks import codes
from md4_jax.networks.evidence import Evidence
from md4_jax.networks.mixture import FIRST, TableMixture
from md4_jax.networks.neighbours import LETTERS
from md4_jax.networks.rows import COUNTED
from md4_jax.networks.tables import PRIOR, Tables
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.trunk import TransformerModule
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.options import TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Batch, UserError, batch_of
from md4_jax.training.optim import AdamW
from md4_jax.training.step import init_state, make_train_step

LOOKUPS, OFFSETS, REACH = LETTERS.lookups, LETTERS.offsets, LETTERS.reach
V, ROWS = 5, 2000
SIZE = V * ROWS + 3
TABLES = Tables(V, SIZE, 100)
OPTIONS = Transformer(V, 16, 1, 2, scan_blocks=False, tables_hidden=4)


def texts(rows: int, length: int) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (rows, length), 0, V)


def filled() -> dict[str, jax.Array]:
    counts = jax.random.randint(jax.random.key(2), (sum(TABLES.sizes), V), 0, 9)
    return state_of(TABLES, counts)


def state_of(tables: Tables, counts: jax.Array) -> dict[str, jax.Array]:
    """A state with these counts in the rows of all tables together."""
    return {**tables.init(), "counts": codes.coded(counts)}


def counts_of(state: dict[str, jax.Array]) -> jax.Array:
    """The rows of all tables together."""
    return codes.decoded(state["counts"])


@functools.partial(jax.jit, static_argnames="tables")
def learned(batch: Batch, tables: Tables = TABLES) -> dict[str, jax.Array]:
    """Tables that have counted the tokens of a batch."""
    text = jax.tree.map(lambda x: x[:, None], batch)
    count = lambda table, state: tables.with_table(state, text, table)  # noqa: E731
    return jax.lax.fori_loop(0, len(tables.sizes), count, tables.init())


@functools.partial(jax.jit, static_argnames="tables")
def counted_in(
    tokens: jax.Array, segments: jax.Array | None = None, tables: Tables = TABLES
) -> jax.Array:
    """Rows in which each position is counted, among those of all tables: [S, B, L]."""
    of_one = functools.partial(tables.counted_in, tokens=tokens, segments=segments)
    firsts = jnp.cumsum(jnp.array([0, *tables.sizes[:-1]]))
    return jax.vmap(of_one)(jnp.arange(len(firsts))) + firsts[:, None, None]


def offsets(chosen: int) -> tuple[int, ...]:
    """The neighbours of a set."""
    return tuple(n for j, n in enumerate(OFFSETS) if chosen >> j & 1)


def visible(z: np.ndarray, position: int, window: tuple[int, int]) -> dict[int, int]:
    """The visible neighbours of a position in a window, with V beyond the ends."""
    found = {n: position + n for n in range(-window[0], window[1] + 1) if n}
    symbols = {n: int(z[at]) if 0 <= at < len(z) else -1 for n, at in found.items()}
    return {n: V if symbol < 0 else symbol for n, symbol in symbols.items() if symbol != V}


def between(tokens: np.ndarray, neighbours: dict[int, int]) -> Counter:
    """How often each token stands between these neighbours, by reading the text."""
    padded = np.pad(tokens, REACH, constant_values=V)
    return Counter(
        int(token)
        for at, token in enumerate(tokens, REACH)
        if all(padded[at + n] == symbol for n, symbol in neighbours.items())
    )


def test_sets_are_the_subsets_of_the_windows_and_all_pairs_and_triples():
    found = {offsets(chosen) for chosen in LETTERS.sets}
    assert len(found) == len(LETTERS.sets) == 692
    assert {(), (-6, 6), (-6, -3, 6), (-4, -2, 1, 4), (-5, -1, 1, 3), (1, 2, 3, 4, 5, 6)} <= found
    assert not {(-6, -5, -1, 1), (-5, -4, 4, 5), (-1, 1, 2, 6)} & found


def test_a_table_sees_its_set_and_not_the_token_itself():
    z, middle = texts(1, 21), 10
    own = counted_in(z)[:, 0, middle]
    exact = np.array([(V + 1) ** len(offsets(chosen)) <= ROWS for chosen in LETTERS.sets])
    assert 200 < exact.sum() < len(exact)
    for offset in range(-8, 9):
        other = z.at[0, middle + offset].set((z[0, middle + offset] + 1) % V)
        changed = np.asarray(counted_in(other)[:, 0, middle] != own)
        sees = np.array([offset in offsets(chosen) for chosen in LETTERS.sets])
        np.testing.assert_array_equal(changed[exact], sees[exact])
        assert not changed[~sees].any()
        # Two combinations of a hashed table share a row in one of ROWS cases.
        assert (changed != sees).sum() <= 1


def test_rows_of_a_table_are_its_own():
    found, first = counted_in(texts(16, 64)), 0
    for number, rows in enumerate(TABLES.sizes):
        assert found[number].min() >= first
        first += rows
        assert found[number].max() < first


def test_sets_with_few_combinations_share_no_row():
    z = np.asarray(texts(64, 64))
    padded = np.pad(z, ((0, 0), (REACH, REACH)), constant_values=V)
    found = np.asarray(counted_in(jnp.asarray(z)))
    for chosen in ((-1, 1), (-2, -1, 1), (-6, 6), (-1, 1, 2, 3)):
        number = [offsets(one) for one in LETTERS.sets].index(chosen)
        neighbours = np.stack([padded[:, REACH + n : REACH + n + 64] for n in chosen])
        neighbours = neighbours.reshape(len(chosen), -1)
        rows = found[number].reshape(-1)
        different = len(np.unique(neighbours, axis=1).T)
        assert len(np.unique(rows)) == different
        assert len(np.unique(np.vstack([neighbours, rows]), axis=1).T) == different
        assert TABLES.sizes[number] == (V + 1) ** len(chosen) < ROWS


def test_larger_sets_are_spread_over_all_rows():
    # 2048 draws of 2000 rows hit 1 - exp(-1.024) of them, +- 0.007.
    number = [offsets(chosen) for chosen in LETTERS.sets].index((-4, -3, -2, -1, 1, 2, 3, 4))
    assert TABLES.sizes[number] == ROWS
    inside = counted_in(texts(16, 140))[number, :, 6:134]
    assert abs(len(np.unique(inside)) / ROWS - (1 - np.exp(-1.024))) < 5 * 0.007


@pytest.mark.slow
def test_what_is_looked_up_is_what_the_text_has_between_the_visible_neighbours():
    # Rows enough that no two combinations of this text share one.
    tables = Tables(V, 2**18, 100)
    tokens = np.asarray(texts(1, 60))
    counts = counts_of(learned(batch_of(jnp.asarray(tokens)), tables))
    z = np.where(np.random.default_rng(3).random(tokens.shape) < 0.5, V, tokens)
    found = np.asarray(counts[tables.looked_up(jnp.asarray(z))[0]])
    for position in range(60):
        for number, window in enumerate(LETTERS.windows):
            expected = between(tokens[0], visible(z[0], position, window))
            told = [expected[token] for token in range(V)]
            np.testing.assert_array_equal(found[position, number], told)


def test_the_last_lookups_are_of_the_nearest_visible_neighbours():
    sets = [offsets(chosen) for chosen in LETTERS.sets]

    def nearest(*seen: int) -> list[tuple[int, ...]]:
        bits = sum(1 << OFFSETS.index(n) for n in seen)
        return [sets[number] for number in LETTERS.tables[bits, -2:]]

    assert nearest(-6, 6) == [(-6, 6)] * 2
    assert nearest(-6, -1, 5, 6) == [(-1, 5, 6), (-6, -1, 5)]
    assert nearest(-6, -2, -1, 5) == [(-2, -1, 5)] * 2
    # Of two that are equally far either goes first.
    assert nearest(-6, -1, 1, 6) == [(-1, 1, 6), (-6, -1, 1)]
    assert nearest(-5, -4, 1, 5) == [(-4, 1, 5), (-5, -4, 1)]


@pytest.mark.slow
def test_neighbours_of_another_segment_are_as_beyond_the_end():
    one, other = texts(1, 9), texts(1, 7) * 0 + 3
    together = jnp.concatenate([one, other], axis=1)
    segments = jnp.array([[0] * 9 + [1] * 7])
    for rows, axis in ((counted_in, 2), (TABLES.looked_up, 1)):
        apart = jnp.concatenate([rows(one), rows(other)], axis=axis)
        np.testing.assert_array_equal(rows(together, segments), apart)
        assert (rows(together) != apart).any()


def test_estimates_by_hand():
    # 3, 1 and 0 of 3 tokens, and nothing: PRIOR is spread over all three.
    tables = Tables(3, 6, 100)
    z = jnp.array([[3]])
    row = tables.looked_up(z)[0, 0, 0]
    for counts, total in (([3, 1, 0], 4), ([0, 0, 0], 0)):
        empty = jnp.zeros((sum(tables.sizes), 3), jnp.int32)
        state = state_of(tables, empty.at[row].set(jnp.array(counts)))
        found = tables.evidence(state, z)
        expected = np.log(3 * (np.array(counts) + PRIOR / 3) / (total + PRIOR))
        np.testing.assert_allclose(found.estimates[0, 0, 0], expected, rtol=1e-6)
        assert found.counted[0, 0, 0] == total


def test_every_token_is_counted_once_in_every_table():
    batch = batch_of(texts(2, 12))
    ends = np.cumsum(TABLES.sizes)[:-1]
    for counts in np.split(np.asarray(counts_of(learned(batch))), ends):
        np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(np.ravel(batch.tokens)))


def test_what_neighbours_determine_is_known_after_one_text():
    # 0 1 2 3 4 0 1 2 ...: one visible neighbour tells the token.
    tokens = (jnp.arange(4)[:, None] + jnp.arange(40)[None]) % V
    z = tokens.at[:, 1::3].set(V)
    known = TABLES.evidence(learned(batch_of(tokens)), z).estimates[:, :, 0]
    right = jax.nn.softmax(known)[jnp.arange(4)[:, None], jnp.arange(40)[None], tokens]
    assert right[:, 1::3].min() > 0.8


def test_a_token_that_does_not_count_is_a_neighbour_all_the_same():
    tokens = texts(1, 3)
    state = learned(Batch(tokens, jnp.array([[False, True, False]]), {}))
    assert counts_of(state).sum() == len(TABLES.sizes)
    number = [offsets(chosen) for chosen in LETTERS.sets].index((-1, 1))
    row = counted_in(tokens)[number, 0, 1]
    np.testing.assert_array_equal(counts_of(state)[row], jax.nn.one_hot(tokens[0, 1], V))


def test_counts_are_exact_to_15_and_off_by_a_sixteenth_at_most():
    small = jnp.arange(16)
    np.testing.assert_array_equal(codes.decoded(codes.coded(small)), small)
    large = np.unique(np.geomspace(16, codes.LARGEST, 100_000).astype(np.int64))
    found = np.asarray(codes.decoded(codes.coded(jnp.asarray(large, jnp.int32))))
    assert (np.abs(found - large) <= large / 16).all() and (np.diff(found) >= 0).all()
    # Rounded to the nearest: on average nothing is lost.
    assert abs(np.mean(found / large) - 1) < 1e-3
    assert codes.coded(jnp.int32(codes.LARGEST)) == codes.MOST == 224


def test_every_code_but_the_last_few_is_that_of_its_count():
    every = jnp.arange(225, dtype=jnp.uint8)
    np.testing.assert_array_equal(codes.coded(codes.decoded(every)), every)


def test_counts_of_a_long_text_are_rounded_once():
    tokens = jnp.zeros((3, 8000), jnp.int32)
    found = counts_of(learned(batch_of(tokens)))[counted_in(tokens)[:, 0, 2000], 0]
    # At most 6 tokens at either end of a sequence have other neighbours.
    assert (jnp.abs(found - 24_000) <= 24_000 / 16).all()


def test_the_batches_of_a_text_are_counted_together():
    batch = batch_of(texts(6, 9), loss_mask=jax.random.bernoulli(jax.random.key(1), 0.7, (6, 9)))
    text = jax.tree.map(lambda x: x.reshape(2, 3, 9), batch)
    state, counting = TABLES.init(), jax.jit(TABLES.with_table, donate_argnums=0)
    # In any order: a table leaves the rows of all others alone.
    for table in reversed(range(len(TABLES.sizes))):
        state = counting(state, text, table)
    chex.assert_trees_all_equal(state, learned(batch))


def numbered(*numbers: int) -> Batch:
    """A batch of these sequences of the training data."""
    return batch_of(texts(8, 9)[jnp.array(numbers)])._replace(number=jnp.array(numbers))


def test_a_token_of_the_training_text_is_looked_up_without_its_own_count():
    text = numbered(0, 1, 2)
    state = {**learned(text), "sequences": jnp.int32(3)}
    # Sequence 1 is counted, 6 is not.
    batch = TABLES.announced(state, numbered(1, 6))
    z = batch.tokens.at[:, 2::3].set(V)
    found = TABLES.evidence(state, z, own=batch.context[COUNTED])
    for position in range(9):
        # As if this token had never been counted, only seen as a neighbour of others.
        counted = text.loss_mask.at[1, position].set(False)
        expected = TABLES.evidence(learned(text._replace(loss_mask=counted)), z)
        for one, other in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_allclose(one[0, position], other[0, position], rtol=1e-6)
    plain = TABLES.evidence(state, z)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[1], x) for x in (found, plain)))
    assert (found.counted[0] == plain.counted[0] - 1).all()


def test_only_rows_between_the_neighbours_of_the_text_have_counted_a_token():
    """A teacher draws other tokens, and a rejected answer has other ones."""
    text = numbered(0, 1, 2)
    state = {**learned(text), "sequences": jnp.int32(3)}
    batch = TABLES.announced(state, numbered(1))
    z = batch.tokens.at[:, 2::3].set(V)
    z = z.at[:, 4].set((batch.tokens[:, 4] + 1) % V)
    found = TABLES.evidence(state, z, own=batch.context[COUNTED])
    assert (found.counts >= 0).all() and jnp.isfinite(found.estimates).all()
    plain = TABLES.evidence(state, z)
    for position in range(9):
        counted = text.loss_mask.at[1, position].set(False)
        expected = TABLES.evidence(learned(text._replace(loss_mask=counted)), z)
        for one, other in zip(found[:3], expected[:3], strict=True):
            np.testing.assert_allclose(one[0, position], other[0, position], rtol=1e-6)
    # Next to the other token some rows have counted the own token, and some have not.
    assert set(np.unique((plain.counted - found.counted)[0, 3])) == {0, 1}


def test_tokens_that_do_not_count_have_no_own_count():
    state = {**TABLES.init(), "sequences": jnp.int32(4)}
    batch = numbered(3)._replace(loss_mask=jnp.arange(9)[None] % 2 == 0)
    own = TABLES.announced(state, batch).context[COUNTED]
    np.testing.assert_array_equal(own[0, ::2], batch.tokens[0, ::2])
    np.testing.assert_array_equal(own[0, 1::2], ~batch.tokens[0, 1::2])
    found, plain = (TABLES.evidence(filled(), batch.tokens, own=x) for x in (own, None))
    fewer = np.asarray(plain.counted - found.counted)[0]
    assert (fewer[::2] == 1).all() and (fewer[1::2] == 0).all()
    # A batch that is not of the training data has none at all.
    assert TABLES.announced(state, batch_of(batch.tokens)).context == {}


@pytest.fixture
def training():
    """(state, step) of a small network with tables, in float32."""

    def made(tables: int, learning_rate: float = 1e-3):
        network = dataclasses.replace(OPTIONS, tables=tables).build()
        optimizer, _ = AdamW(learning_rate=learning_rate, warmup_steps=1).build(100)
        train = TrainOptions(batch_size=4, num_steps=100, ema=0.5)
        state = init_state(jax.random.key(0), network, Masking(V), optimizer)
        step = jax.jit(make_train_step(network, AnyOrder(), optimizer, train))
        return network, state, step

    return made


@pytest.mark.campaign
def test_a_step_looks_tokens_up_without_their_own_counts(training):
    _, state, step = training(SIZE)
    # All that the tables know is one token of the batch.
    one = jnp.zeros((4, 9), bool).at[0, 4].set(True)
    batch = numbered(0, 1, 2, 3)._replace(loss_mask=one)
    told = state._replace(ema=state.ema | {"companion": {**learned(batch), "sequences": 4}})
    with_others = state._replace(ema=state.ema | {"companion": learned(batch)})
    _, empty = step(state, batch)
    after, own = step(told, batch)
    _, leaked = step(with_others, batch)
    assert 0 < leaked["nats"] < 0.99 * own["nats"] and own["nats"] == empty["nats"]
    # The tables stay as they are.
    chex.assert_trees_all_equal(after.ema["companion"], told.ema["companion"])


@pytest.mark.campaign
def test_microbatches_look_up_their_own_rows(training):
    network, state, step = training(SIZE)
    batch = numbered(0, 1, 2, 3)
    tables = {**learned(batch), "sequences": jnp.int32(4)}
    state = state._replace(ema=state.ema | {"companion": tables})
    optimizer, _ = AdamW(learning_rate=1e-3, warmup_steps=1).build(100)
    options = TrainOptions(batch_size=4, num_steps=100, ema=0.5, microbatches=2)
    halves = jax.jit(make_train_step(network, AnyOrder(), optimizer, options))
    _, whole = step(state, batch)
    _, parts = halves(state, batch)
    np.testing.assert_allclose(parts["nats"], whole["nats"], rtol=1e-5)


def test_the_tables_add_to_the_logits_of_the_network(training):
    network, state, _ = training(SIZE)
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.full(2, 0.4)
    # The head starts at zero, and each table has the weight FIRST.
    denoiser = network.denoiser(state.ema | {"companion": filled()})
    added = FIRST / LOOKUPS * network.companion.evidence(filled(), z).estimates.sum(axis=2)
    np.testing.assert_allclose(denoiser(z, t), added, atol=1e-5)


def test_tables_of_a_network_see_no_other_segment(training):
    network, state, _ = training(SIZE)
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.full(2, 0.4)
    segments = jnp.arange(12)[None].repeat(2, axis=0) // 5
    denoiser = network.denoiser(state.ema | {"companion": filled()}, {"segments": segments})
    found = network.companion.evidence(filled(), z, segments).estimates
    np.testing.assert_allclose(denoiser(z, t), FIRST / LOOKUPS * found.sum(axis=2), atol=1e-5)


@pytest.mark.campaign
def test_some_positions_and_repeated_rows_of_a_trained_network(training):
    network, state, step = training(SIZE, learning_rate=0.03)
    state = state._replace(ema=state.ema | {"companion": filled()})
    for _ in range(5):
        state, _ = step(state, batch_of(texts(4, 12)))
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.array([0.4, 0.7])
    denoiser = network.denoiser(state.ema)
    everywhere = denoiser(z, t)
    assert (
        jnp.abs(
            everywhere
            - FIRST
            / LOOKUPS
            * network.companion.evidence(state.ema["companion"], z).estimates.sum(axis=2)
        ).max()
        > 0.1
    )
    index = jnp.array([[0, 3], [6, 9]])
    some = denoiser.unembed(denoiser.features_at(z, t, index))
    expected = jnp.take_along_axis(everywhere, index[..., None], axis=1)
    np.testing.assert_allclose(some, expected, atol=1e-5)
    twice = denoiser.repeated(2)(jnp.repeat(z, 2, axis=0), jnp.repeat(t, 2))
    np.testing.assert_allclose(twice, jnp.repeat(everywhere, 2, axis=0), atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("scan_blocks", [False, True])
def test_without_blocks_a_position_has_what_the_tables_say_of_it(scan_blocks):
    options = dataclasses.replace(OPTIONS, depth=0, tables=SIZE, scan_blocks=scan_blocks)
    network = options.build()
    params = {"network": network.init(jax.random.key(0)), "process": Masking(V)}
    denoiser = network.denoiser(params | {"companion": filled()})
    z, t, index = texts(2, 12), jnp.full(2, 0.4), jnp.array([[0, 3], [6, 9]])
    some = denoiser.unembed(denoiser.features_at(z, t, index))
    expected = (
        FIRST / LOOKUPS * network.companion.evidence(filled(), z).at(index).estimates.sum(axis=2)
    )
    np.testing.assert_allclose(some, expected, atol=1e-5)


@pytest.mark.campaign
def test_weights_of_the_tables_are_learned(training):
    _, state, step = training(SIZE)
    first = state.params["network"]["mixture"]
    state = state._replace(ema=state.ema | {"companion": filled()})
    for _ in range(2):
        state, _ = step(state, batch_of(texts(4, 12)))
    second = state.params["network"]["mixture"]
    for name in ("of_evidence", "of_features", "correction", "gates_of_features"):
        assert not first[name]["kernel"].any() and second[name]["kernel"].any()


@pytest.mark.slow
def test_the_correction_treats_all_symbols_alike():
    """Other names of the symbols name the corrections otherwise, and change nothing else."""
    mixture = TableMixture(LOOKUPS, jnp.float32, "float32", units=6)
    counts = jax.random.randint(jax.random.key(0), (2, 3, LOOKUPS, V), 0, 9).astype(jnp.float32)
    h = jax.random.normal(jax.random.key(1), (2, 3, 8))

    def logits(mixture: TableMixture, h: jax.Array, evidence: Evidence) -> jax.Array:
        return mixture.logits(h, evidence, mixture.known(evidence))

    def evidence(order: jax.Array) -> Evidence:
        asked = counts[..., order]
        shares = (asked + PRIOR / V) / (asked.sum(axis=-1, keepdims=True) + PRIOR)
        return Evidence(jnp.log(shares * V), asked, asked.sum(axis=-1))

    plain, order = jnp.arange(V), jnp.array([3, 0, 4, 1, 2])
    params = mixture.init(jax.random.key(2), h, evidence(plain), method=logits)
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(3), x.shape), params)
    found, renamed = (mixture.apply(params, h, evidence(o), method=logits) for o in (plain, order))
    np.testing.assert_allclose(renamed, found[..., order], atol=1e-4)
    without = TableMixture(LOOKUPS, jnp.float32, "float32").apply(
        params, h, evidence(plain), method=logits
    )
    assert jnp.abs(found - without).mean() > 0.1
    # The correction depends on the features too.
    other = mixture.apply(params, h + 1.0, evidence(plain), method=logits)
    assert jnp.abs((other - found).std(axis=-1)).max() > 0.01


def test_the_network_reads_what_the_tables_expect(training):
    # Two logits of ln 3 among five: shares 3, 3, 1, 1, 1 of 9, less 1/5 each.
    _, state, _ = training(SIZE)
    module = TransformerModule(dataclasses.replace(OPTIONS, tables=SIZE).resolved("cpu"))
    logits = jnp.log(jnp.array([3.0, 3, 1, 1, 1]))
    z = jnp.array([[V, 2]])
    vectors = state.params["network"]["embedding"][:V]
    found = module.apply(
        {"params": state.params["network"]}, z, jnp.broadcast_to(logits, (1, 2, V)),
        TABLES.nothing(z), method="_expected",
    )  # fmt: skip
    shares = np.array([3, 3, 1, 1, 1]) / 9 - 0.2
    np.testing.assert_allclose(found[0, 0], shares @ np.asarray(vectors), atol=1e-5)
    np.testing.assert_array_equal(found[0, 1], 0)


def test_features_depend_on_what_the_tables_expect(training):
    network, state, _ = training(SIZE)
    plain, plain_state, _ = training(0)
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.full(2, 0.4)
    without = plain.denoiser(plain_state.ema).features(z, t)
    empty, told = (
        network.denoiser(state.ema | {"companion": tables}).features(z, t)[..., :-V]
        for tables in (TABLES.init(), filled())
    )
    np.testing.assert_allclose(empty, without, atol=1e-5)
    assert jnp.abs(told - without)[:, ::3].mean() > 0.05


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(tables=4), "network.tables=4 must be 0 or at least 5, the number of counts"),
        (dict(tables=15, vocab_size=5000), "must be 0 or at least 16, the number of counts"),
        (dict(tables=8, tables_tokens=2**31), "network.tables_tokens must lie between 1 and"),
        (
            dict(tables=2**28, vocab_size=27),
            "network.tables=268435456 makes .* more than 2,147,483,647: reduce it",
        ),
        (dict(tables_hidden=-1), "network.tables_hidden must not be negative, not -1"),
        (dict(depth=-1), "network.depth must not be negative, not -1"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(UserError, match=said):
        Transformer(**(dict(vocab_size=V, size=16, depth=1, heads=2) | options)).build()
