"""Hashed tables of neighbours: what they see, what they learn, and what they leave alone."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.networks.tables import WINDOWS, Tables
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.draws import draws
from md4_jax.options import TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Batch, UserError, batch_of
from md4_jax.training.optim import AdamW
from md4_jax.training.step import init_state, make_train_step

V, ROWS = 5, 2**12
TABLES = Tables(V, ROWS, rate=0.1, draws=2)
ONE = jnp.ones(())


def texts(rows: int, length: int) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (rows, length), 0, V)


def keys(count: int, seed: int = 1) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def filled() -> dict[str, jax.Array]:
    rows = jax.random.normal(jax.random.key(2), (len(WINDOWS) * ROWS, V))
    return {"rows": rows, "squares": jnp.zeros(len(WINDOWS) * ROWS)}


def test_a_table_sees_its_window_and_not_the_token_itself():
    z, middle = texts(1, 21), 10
    own = TABLES.addresses(z)[:, 0, middle]
    for offset in range(-8, 9):
        other = z.at[0, middle + offset].set((z[0, middle + offset] + 1) % V)
        changed = TABLES.addresses(other)[:, 0, middle] != own
        sees = [offset != 0 and -left <= offset <= right for left, right in WINDOWS]
        np.testing.assert_array_equal(changed, sees)


def test_addresses_of_a_table_are_its_own_rows():
    found = TABLES.addresses(texts(16, 64))
    for number in range(len(WINDOWS)):
        assert found[number].min() >= number * ROWS
        assert found[number].max() < (number + 1) * ROWS
    # One neighbour on each side: V^2 pairs inside, and V at each of the two ends. Few of them
    # share a row.
    assert V * V + 2 * V - 3 <= len(np.unique(found[0])) <= V * V + 2 * V


def test_neighbours_of_another_segment_are_as_beyond_the_end():
    one, other = texts(1, 9), texts(1, 7) * 0 + 3
    together = jnp.concatenate([one, other], axis=1)
    segments = jnp.array([[0] * 9 + [1] * 7])
    apart = jnp.concatenate([TABLES.addresses(one), TABLES.addresses(other)], axis=2)
    np.testing.assert_array_equal(TABLES.addresses(together, segments), apart)
    assert (TABLES.addresses(together) != apart).any()


def test_logits_of_some_positions_are_those_of_all():
    z, state = texts(3, 16), filled()
    index = jnp.array([[0, 5, 15], [1, 1, 2], [14, 3, 8]])
    everywhere = TABLES.logits(state, z)
    chex.assert_shape(everywhere, (3, 16, V))
    some = jnp.take_along_axis(everywhere, index[..., None], axis=1)
    np.testing.assert_allclose(TABLES.logits(state, z, index=index), some, atol=1e-5)


def test_the_first_step_of_a_single_token():
    # Hidden in one of the two texts, with nothing around it: a row in each table, twice with two
    # draws. p = 1/3, so that the error is (1, 1, -2) / 3 and its mean square 2/9.
    tables = Tables(3, 2, rate=0.3, draws=2)
    batch = batch_of(jnp.array([[2]]))
    found = tables.learned(tables.init(), batch, keys(1), ONE)
    used = np.unique(tables.addresses(jnp.array([[3]])))
    assert len(used) == len(WINDOWS)
    np.testing.assert_allclose(found["squares"][used], 2 * 2 / 9, rtol=1e-6)
    step = 2 * 0.3 * np.array([-1, -1, 2]) / 3 / np.sqrt(2 * 2 / 9)
    np.testing.assert_allclose(found["rows"][used], np.tile(step, (len(used), 1)), rtol=1e-5)
    rest = np.setdiff1d(np.arange(2 * len(WINDOWS)), used)
    assert not found["rows"][rest].any() and not found["squares"][rest].any()


def test_the_neighbours_of_a_hidden_token_are_hidden_in_two_of_three():
    # Share u ~ U(0, 1): E[u^2 + (1 - u)^2] = 2/3. The first step adds the same to the squares of a
    # row for each token, so that they count.
    count = 3000
    tables = dataclasses.replace(TABLES, vocab_size=2, draws=1)
    batch = batch_of(jnp.zeros((count, 2), jnp.int32))
    squares = tables.learned(tables.init(), batch, keys(count), ONE)["squares"]
    hidden, shown = (squares[tables.addresses(jnp.array([[2, z]]))[0, 0, 0]] for z in (2, 0))
    # Only the first token of a text has these rows: one draw for each text.
    assert abs(hidden / (hidden + shown) - 2 / 3) < 4 * np.sqrt(2 / 9 / count)


def test_what_neighbours_determine_is_learned():
    # 0 1 2 3 4 0 1 2 ...: one visible neighbour tells the token.
    tokens = (jnp.arange(4)[:, None] + jnp.arange(40)[None]) % V
    batch, state = batch_of(tokens), TABLES.init()
    learned = jax.jit(TABLES.learned)
    for number in range(60):
        state = learned(state, batch, keys(4, number), ONE)
    hidden = jax.random.bernoulli(jax.random.key(9), 0.3, tokens.shape)
    logits = TABLES.logits(state, jnp.where(hidden, V, tokens))
    right = jax.nn.softmax(logits)[jnp.arange(4)[:, None], jnp.arange(40)[None], tokens]
    assert right[hidden].mean() > 0.95


@pytest.mark.parametrize("none", ["weight", "mask"])
def test_nothing_is_learned_of_nothing(none):
    tokens = texts(2, 8)
    counted = jnp.full(tokens.shape, none != "mask")
    batch = Batch(tokens, counted, {})
    weight = ONE * (none != "weight")
    chex.assert_trees_all_equal(TABLES.learned(filled(), batch, keys(2), weight), filled())


def test_a_token_that_does_not_count_stays_visible():
    tokens = texts(1, 3)
    batch = Batch(tokens, jnp.array([[True, False, True]]), {})
    state = TABLES.learned(TABLES.init(), batch, keys(1), ONE)
    visible = {
        int(address)
        for left in (tokens[0, 0], V)
        for right in (tokens[0, 2], V)
        for n, z in ((0, [V, tokens[0, 1], right]), (2, [left, tokens[0, 1], V]))
        for address in TABLES.addresses(jnp.array([z]))[:, 0, n]
    }
    assert set(np.flatnonzero(state["squares"])) <= visible


@pytest.fixture
def training():
    """(state, step) of a small network with tables, in float32."""

    def made(tables: int, learning_rate: float = 1e-3):
        options = Transformer(V, 16, 1, 2, tables=tables, tables_rate=0.02, scan_blocks=False)
        network = options.build()
        optimizer, _ = AdamW(learning_rate=learning_rate, warmup_steps=1).build(100)
        train = TrainOptions(batch_size=4, num_steps=100, ema=0.5)
        state = init_state(jax.random.key(0), network, Masking(V), optimizer)
        step = jax.jit(make_train_step(network, AnyOrder(), optimizer, train))
        return network, state, step

    return made


def test_a_batch_is_predicted_before_it_is_learned(training):
    batch = batch_of(texts(4, 12))
    _, plain_state, plain = training(0)
    network, state, step = training(ROWS)
    _, told = plain(plain_state, batch)
    after, first = step(state, batch)
    assert first["nats"] == told["nats"]
    assert after.ema["companion"]["squares"].any()
    # The second step of the same batch profits.
    _, second = step(after, batch)
    _, plain_second = plain(plain(plain_state, batch)[0], batch)
    assert second["nats"] < plain_second["nats"]
    # Drawn with the keys of the step, whatever the mesh.
    _, drawn = draws(0, jnp.int32(0), 4)
    expected = network.companion.learned(network.companion.init(), batch, drawn, ONE)
    chex.assert_trees_all_close(after.ema["companion"], expected, rtol=1e-6)


def test_a_step_that_is_skipped_teaches_the_tables_nothing(training):
    _, state, step = training(ROWS)
    state, _ = step(state, batch_of(texts(4, 12)))
    broken = state._replace(
        params=jax.tree.map(lambda x: x * jnp.nan, state.params), ema=dict(state.ema)
    )
    after, metrics = step(broken, batch_of(texts(4, 12)))
    assert metrics["skipped"] == 1
    chex.assert_trees_all_equal(after.ema["companion"], state.ema["companion"])


def test_the_tables_add_to_the_logits_of_the_network(training):
    network, state, _ = training(ROWS)
    params = state.ema | {"companion": filled()}
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.full(2, 0.4)
    denoiser = network.denoiser(params)
    plain = network.denoiser(state.ema)
    added = network.companion.logits(filled(), z)
    np.testing.assert_allclose(denoiser(z, t), plain(z, t) + added, atol=1e-5)
    index = jnp.array([[0, 3], [6, 9]])
    some = denoiser.unembed(denoiser.features_at(z, t, index))
    expected = jnp.take_along_axis(denoiser(z, t), index[..., None], axis=1)
    np.testing.assert_allclose(some, expected, atol=1e-5)
    twice = denoiser.repeated(2)(jnp.repeat(z, 2, axis=0), jnp.full(4, 0.4))
    np.testing.assert_allclose(twice, jnp.repeat(denoiser(z, t), 2, axis=0), atol=1e-5)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(tables=1000), "network.tables must be 0 or a power of two, not 1000"),
        (dict(tables=4, vocab_size=5000), "needs a vocabulary of at most 1024 symbols"),
        (dict(tables=4, tables_rate=0.0), "network.tables_rate must be above 0"),
        (dict(tables=4, tables_draws=0), "network.tables_draws at least 1"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(UserError, match=said):
        Transformer(**(dict(vocab_size=V, size=16, depth=1, heads=2) | options)).build()
