"""Tables of counts: what they see, what they count, and what the network makes of it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.networks import tables as tables_module
from md4_jax.networks.mixture import FIRST
from md4_jax.networks.tables import PRIOR, WINDOWS, Tables
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.trunk import TransformerModule
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.draws import draws
from md4_jax.options import TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Batch, UserError, batch_of
from md4_jax.training.optim import AdamW
from md4_jax.training.step import init_state, make_train_step

V, ROWS = 5, 2**12
TABLES = Tables(V, ROWS, draws=2)
ONE = jnp.ones((), bool)
OPTIONS = Transformer(V, 16, 1, 2, scan_blocks=False)


def texts(rows: int, length: int) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (rows, length), 0, V)


def keys(count: int, seed: int = 1) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def filled() -> dict[str, jax.Array]:
    counts = jax.random.randint(jax.random.key(2), (sum(TABLES.sizes), V), 0, 9)
    return {"counts": counts, "counted": jnp.int32(7)}


def test_a_table_sees_its_window_and_not_the_token_itself():
    z, middle = texts(1, 21), 10
    own = TABLES.addresses(z)[:, 0, middle]
    for offset in range(-8, 9):
        other = z.at[0, middle + offset].set((z[0, middle + offset] + 1) % V)
        changed = TABLES.addresses(other)[:, 0, middle] != own
        sees = [offset != 0 and -left <= offset <= right for left, right in WINDOWS]
        np.testing.assert_array_equal(changed, sees)


def test_addresses_of_a_table_are_its_own_rows():
    found, first = TABLES.addresses(texts(16, 64)), 0
    for number, rows in enumerate(TABLES.sizes):
        assert found[number].min() >= first
        first += rows
        assert found[number].max() < first


def test_windows_with_few_combinations_share_no_row():
    # V symbols or the end: no two pairs or triples of neighbours have the same row.
    found, z = np.asarray(TABLES.addresses(texts(64, 64))), np.asarray(texts(64, 64))
    padded = np.pad(z, ((0, 0), (2, 2)), constant_values=V + 1)
    for number, offsets in ((0, (-1, 1)), (WINDOWS.index((2, 1)), (-2, -1, 1))):
        neighbours = np.stack([padded[:, 2 + n : 66 + n] for n in offsets]).reshape(
            len(offsets), -1
        )
        rows = found[number].reshape(-1)
        different = len(np.unique(neighbours, axis=1).T)
        assert len(np.unique(rows)) == different
        assert len(np.unique(np.vstack([neighbours, rows]), axis=1).T) == different
        assert TABLES.sizes[number] == (V + 2) ** len(offsets) < ROWS


def test_larger_windows_are_spread_over_all_rows():
    # 4096 draws of 4096 rows hit 1 - 1/e of them, +- 0.005.
    number = WINDOWS.index((5, 5))
    assert TABLES.sizes[number] == ROWS
    inside = TABLES.addresses(texts(16, 266))[number, :, 5:261]
    assert abs(len(np.unique(inside)) / ROWS - (1 - np.exp(-1))) < 5 * 0.005


def test_neighbours_of_another_segment_are_as_beyond_the_end():
    one, other = texts(1, 9), texts(1, 7) * 0 + 3
    together = jnp.concatenate([one, other], axis=1)
    segments = jnp.array([[0] * 9 + [1] * 7])
    apart = jnp.concatenate([TABLES.addresses(one), TABLES.addresses(other)], axis=2)
    np.testing.assert_array_equal(TABLES.addresses(together, segments), apart)
    assert (TABLES.addresses(together) != apart).any()


def test_estimates_by_hand():
    # 3, 1 and 0 of 3 tokens, and nothing: PRIOR is spread over all three.
    tables = Tables(3, 2, draws=1)
    state = tables.init()
    z = jnp.array([[3]])
    row = tables.addresses(z)[0, 0, 0]
    state["counts"] = state["counts"].at[row].set(jnp.array([3, 1, 0]))
    found = tables.evidence(state, z)
    expected = np.log(3 * (np.array([3, 1, 0]) + PRIOR / 3) / (4 + PRIOR))
    np.testing.assert_allclose(found.log_ratios[0, 0, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(found.log_ratios[0, 0, 1:], 0)
    np.testing.assert_array_equal(found.counted[0, 0], [4] + [0] * (len(WINDOWS) - 1))


def test_a_token_alone_is_counted_once_a_draw():
    # Hidden in one of the two texts, with nothing around it.
    tables = Tables(3, 2, draws=2)
    found = tables.learned(tables.init(), batch_of(jnp.array([[2]])), keys(1), ONE)
    used = np.unique(tables.addresses(jnp.array([[3]])))
    assert len(used) == len(WINDOWS)
    expected = np.zeros((sum(tables.sizes), 3))
    expected[used, 2] = 2
    np.testing.assert_array_equal(found["counts"], expected)
    assert found["counted"] == 2


def test_the_neighbours_of_a_hidden_token_are_hidden_in_two_of_three():
    # Share u ~ U(0, 1): E[u^2 + (1 - u)^2] = 2/3.
    count = 3000
    tables = dataclasses.replace(TABLES, vocab_size=2, draws=1)
    batch = batch_of(jnp.zeros((count, 2), jnp.int32))
    counts = tables.learned(tables.init(), batch, keys(count), ONE)["counts"][:, 0]
    hidden, shown = (counts[tables.addresses(jnp.array([[2, z]]))[0, 0, 0]] for z in (2, 0))
    # Only the first token of a text has these rows: one draw for each text.
    assert hidden + shown == count
    assert abs(hidden / count - 2 / 3) < 4 * np.sqrt(2 / 9 / count)


def test_what_neighbours_determine_is_known_after_one_text():
    # 0 1 2 3 4 0 1 2 ...: one visible neighbour tells the token.
    tokens = (jnp.arange(4)[:, None] + jnp.arange(40)[None]) % V
    state = jax.jit(TABLES.learned)(TABLES.init(), batch_of(tokens), keys(4), ONE)
    z = tokens.at[:, 1::3].set(V)
    known = TABLES.evidence(state, z).log_ratios[:, :, 0]
    right = jax.nn.softmax(known)[jnp.arange(4)[:, None], jnp.arange(40)[None], tokens]
    assert right[:, 1::3].min() > 0.8


def test_tables_that_are_full_count_no_more(monkeypatch):
    monkeypatch.setattr(tables_module, "MOST_COUNTED", 40)
    batch, state = batch_of(texts(1, 8)), TABLES.init()
    for step in range(4):
        before, state = state, TABLES.learned(state, batch, keys(1, step), ONE)
        # 8 tokens, hidden once in each of 2 draws.
        assert state["counted"] == min(16 * (step + 1), 32)
        assert state["counts"].sum() == state["counted"] * len(WINDOWS)
    chex.assert_trees_all_equal(state, before)


@pytest.mark.parametrize("none", ["good", "mask"])
def test_nothing_is_learned_of_nothing(none):
    tokens = texts(2, 8)
    counted = jnp.full(tokens.shape, none != "mask")
    batch = Batch(tokens, counted, {})
    good = ONE & (none != "good")
    chex.assert_trees_all_equal(TABLES.learned(filled(), batch, keys(2), good), filled())


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
    assert set(np.flatnonzero(state["counts"].sum(axis=1))) <= visible


def told(numbers: list[int], epoch: int, length: int = 9) -> Batch:
    """A batch of these sequences of the training data."""
    place = jnp.array([[epoch, number] for number in numbers])
    return batch_of(texts(8, length)[jnp.array(numbers)])._replace(place=place)


def test_a_sequence_that_comes_again_is_taken_out_and_put_back():
    each = keys(8)
    first, second = told([0, 1, 2], epoch=0), told([1, 5], epoch=0)
    mixed = told([1, 6], epoch=0)._replace(place=jnp.array([[1, 1], [0, 6]]))
    state = TABLES.learned(TABLES.init(), first, each[jnp.array([0, 1, 2])], ONE)
    own = each[jnp.array([1, 6])]
    # Sequence 1 comes again, 6 is new.
    held_out = TABLES.without(state, mixed, own)
    others = TABLES.learned(TABLES.init(), told([0, 2], epoch=0), each[jnp.array([0, 2])], ONE)
    chex.assert_trees_all_equal(held_out["counts"], others["counts"])
    after = TABLES.learned(held_out, mixed, own, ONE)
    new = TABLES.learned(state, told([6], epoch=0), each[jnp.array([6])], ONE)
    chex.assert_trees_all_equal(after, new)
    # And with a step that was not good only the new one is lost.
    chex.assert_trees_all_equal(TABLES.learned(held_out, mixed, own, ~ONE), state)
    # In its first epoch nothing is taken out.
    chex.assert_trees_all_equal(TABLES.without(state, second, each[jnp.array([1, 5])]), state)


def test_what_was_never_counted_is_no_negative_evidence():
    batch = told([3], epoch=1)
    below = TABLES.without(TABLES.init(), batch, keys(1))
    assert below["counts"].min() < 0
    z = batch.tokens.at[:, ::2].set(V)
    chex.assert_trees_all_equal(TABLES.evidence(below, z), TABLES.evidence(TABLES.init(), z))


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


def test_a_batch_is_predicted_before_it_is_learned(training):
    batch = batch_of(texts(4, 12))
    _, plain_state, plain = training(0)
    network, state, step = training(ROWS)
    _, told = plain(plain_state, batch)
    after, first = step(state, batch)
    assert first["nats"] == told["nats"]
    assert after.ema["companion"]["counts"].any()
    # The second step of the same batch profits.
    _, second = step(after, batch)
    _, plain_second = plain(plain(plain_state, batch)[0], batch)
    assert second["nats"] < plain_second["nats"]
    # Drawn with the keys of the step, whatever the mesh.
    _, drawn = draws(0, jnp.int32(0), 4)
    expected = network.companion.learned(network.companion.init(), batch, drawn, ONE)
    chex.assert_trees_all_equal(after.ema["companion"], expected)


def test_a_text_is_no_easier_to_predict_in_later_epochs(training):
    _, state, step = training(ROWS)
    others, batch = told([4, 5, 6, 7], epoch=0), told([0, 1, 2, 3], epoch=0)
    state, _ = step(state, others)
    seen, _ = step(state, batch)
    counts = seen.ema["companion"]
    # Same parameters and draws of a later step, once without the batch in the tables, once with it.
    later_step = state._replace(step=state.step + 5)
    again = later_step._replace(ema=state.ema | {"companion": counts})
    _, before = step(later_step, batch)
    after, later = step(again, told([0, 1, 2, 3], epoch=1))
    assert later["nats"] == before["nats"]
    chex.assert_trees_all_equal(after.ema["companion"], counts)
    _, leaked = step(again, batch)
    assert leaked["nats"] < 0.99 * before["nats"]


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
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.full(2, 0.4)
    # The head starts at zero, and each table has the weight FIRST.
    denoiser = network.denoiser(state.ema | {"companion": filled()})
    added = FIRST * network.companion.evidence(filled(), z).log_ratios.sum(axis=2)
    np.testing.assert_allclose(denoiser(z, t), added, atol=1e-5)


def test_some_positions_and_repeated_rows_of_a_trained_network(training):
    network, state, step = training(ROWS, learning_rate=0.03)
    for _ in range(5):
        state, _ = step(state, batch_of(texts(4, 12)))
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.array([0.4, 0.7])
    denoiser = network.denoiser(state.ema)
    everywhere = denoiser(z, t)
    assert (
        jnp.abs(
            everywhere
            - FIRST * network.companion.evidence(state.ema["companion"], z).log_ratios.sum(axis=2)
        ).max()
        > 0.1
    )
    index = jnp.array([[0, 3], [6, 9]])
    some = denoiser.unembed(denoiser.features_at(z, t, index))
    expected = jnp.take_along_axis(everywhere, index[..., None], axis=1)
    np.testing.assert_allclose(some, expected, atol=1e-5)
    twice = denoiser.repeated(2)(jnp.repeat(z, 2, axis=0), jnp.repeat(t, 2))
    np.testing.assert_allclose(twice, jnp.repeat(everywhere, 2, axis=0), atol=1e-5)


@pytest.mark.parametrize("scan_blocks", [False, True])
def test_without_blocks_a_position_has_what_the_tables_say_of_it(scan_blocks):
    options = dataclasses.replace(OPTIONS, depth=0, tables=ROWS, scan_blocks=scan_blocks)
    network = options.build()
    params = {"network": network.init(jax.random.key(0)), "process": Masking(V)}
    denoiser = network.denoiser(params | {"companion": filled()})
    z, t, index = texts(2, 12), jnp.full(2, 0.4), jnp.array([[0, 3], [6, 9]])
    some = denoiser.unembed(denoiser.features_at(z, t, index))
    expected = FIRST * network.companion.evidence(filled(), z).at(index).log_ratios.sum(axis=2)
    np.testing.assert_allclose(some, expected, atol=1e-5)


def test_weights_of_the_tables_are_learned(training):
    _, state, step = training(ROWS)
    first = state.params["network"]["mixture"]
    for _ in range(2):
        state, _ = step(state, batch_of(texts(4, 12)))
    second = state.params["network"]["mixture"]
    for name in ("of_evidence", "of_features"):
        assert not first[name]["kernel"].any() and second[name]["kernel"].any()


def test_the_network_reads_what_the_tables_expect(training):
    # Two logits of ln 3 among five: shares 3, 3, 1, 1, 1 of 9, less 1/5 each.
    _, state, _ = training(ROWS)
    module = TransformerModule(dataclasses.replace(OPTIONS, tables=ROWS).resolved("cpu"))
    logits = jnp.log(jnp.array([3.0, 3, 1, 1, 1]))
    z = jnp.array([[V, 2]])
    vectors = state.params["network"]["embedding"][:V]
    found = module.apply(
        {"params": state.params["network"]}, z, jnp.broadcast_to(logits, (1, 2, V)),
        method="_expected",
    )  # fmt: skip
    shares = np.array([3, 3, 1, 1, 1]) / 9 - 0.2
    np.testing.assert_allclose(found[0, 0], shares @ np.asarray(vectors), atol=1e-5)
    np.testing.assert_array_equal(found[0, 1], 0)


def test_features_depend_on_what_the_tables_expect(training):
    network, state, _ = training(ROWS)
    plain, plain_state, _ = training(0)
    z, t = texts(2, 12).at[:, ::3].set(V), jnp.full(2, 0.4)
    without = plain.denoiser(plain_state.ema).features(z, t)
    empty, told = (
        network.denoiser(state.ema | {"companion": tables}).features(z, t)[..., :-V]
        for tables in (TABLES.init(), filled())
    )
    np.testing.assert_allclose(empty, without, atol=1e-5)
    assert jnp.abs(told - without)[:, ::3].mean() > 0.1


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(tables=1000), "network.tables must be 0 or a power of two, not 1000"),
        (dict(tables=4, vocab_size=5000), "needs a vocabulary of at most 1024 symbols"),
        (dict(depth=-1), "network.depth must not be negative, not -1"),
        (dict(tables=4, tables_draws=0), "network.tables_draws must be at least 1, not 0"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(UserError, match=said):
        Transformer(**(dict(vocab_size=V, size=16, depth=1, heads=2) | options)).build()
