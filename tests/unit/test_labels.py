"""Classes that the transformer is told of: what a label changes, where it goes, what is refused."""

import functools
import math

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny_networks import random_parameters

from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.options import MeshOptions, TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import shardings_of
from md4_jax.training.step import init_state, make_train_step

pytestmark = pytest.mark.slow

SIZES = dict(vocab_size=5, size=16, depth=2, heads=2, hidden=24, classes=3)
Z = jnp.asarray([[0, 5, 2, 3, 5, 1], [4, 4, 5, 5, 0, 2], [5, 5, 5, 5, 5, 5]])
T = jnp.asarray([0.1, 0.6, 1.0])
LABEL = jnp.asarray([2, 0, 1])
every_form = pytest.mark.parametrize("scan_blocks", [True, False], ids=["scanned", "unrolled"])
both_times = pytest.mark.parametrize("time_conditioning", [True, False], ids=["time", "time-free"])


@functools.cache
def built(**options):
    """(network, parameters with noise on every leaf, which zeros would hide)."""
    network = Transformer(**(SIZES | options)).build()
    return network, random_parameters(network)


def unrolled(params):
    rest = {name: value for name, value in params.items() if name != "blocks"}
    parts = [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(SIZES["depth"])]
    return rest | {f"blocks_{i}": part for i, part in enumerate(parts)}


def logits(network, params, z=Z, t=T, **context):
    return np.asarray(network.bind(params, context)(z, t))


@both_times
def test_a_label_changes_every_row_and_no_other(time_conditioning):
    network, params = built(time_conditioning=time_conditioning)
    assert network.time_free == (not time_conditioning)
    known = logits(network, params, label=LABEL)
    other = logits(network, params, label=LABEL.at[1].set(2))
    assert np.abs(other - known)[1].max() > 1e-3
    np.testing.assert_array_equal(other[[0, 2]], known[[0, 2]])
    if network.time_free:
        np.testing.assert_array_equal(logits(network, params, t=1.0 - T, label=LABEL), known)


@both_times
@pytest.mark.cases(1)
def test_no_label_is_a_row_of_its_own(time_conditioning):
    """Without one, and with any number that is no class: the last row, which is not a class."""
    network, params = built(time_conditioning=time_conditioning)
    without = logits(network, params)
    for absent in (3, -1, 99):
        found = logits(network, params, label=jnp.full(3, absent))
        np.testing.assert_allclose(found, without, atol=1e-6)
    assert params["label_table"].shape == (4, 16)
    for label in range(3):
        assert np.abs(logits(network, params, label=jnp.full(3, label)) - without).max() > 1e-3


@pytest.mark.campaign
@both_times
def test_labels_are_learned_from_the_true_start(time_conditioning):
    """Two classes of constant sequences: after some steps each label says which token it is."""
    options = SIZES | dict(time_conditioning=time_conditioning, depth=1, classes=2)
    network, optimizer = Transformer(**options).build(), optax.adam(0.02)
    process, label = Masking(5), np.arange(8) % 2
    batch = exact.batch_of(np.repeat(label[:, None], 6, axis=1), label=label)
    state = init_state(jax.random.key(0), network, process, optimizer)
    train = TrainOptions(batch_size=8)
    step = jax.jit(make_train_step(network, AnyOrder(), optimizer, train))
    mask, ones = jnp.full((2, 6), 5), jnp.ones(2)
    chosen = jnp.asarray([0, 1])

    def told(state):
        denoiser = network.denoiser(state.params, {"label": chosen})
        return np.asarray(jax.nn.log_softmax(denoiser(mask, ones)))

    assert (told(state) == told(state)[::-1]).all()
    for _ in range(4):
        state, _ = step(state, batch)
    first = told(state)
    assert np.abs(first[0] - first[1]).max() > 1e-3
    for _ in range(60):
        state, _ = step(state, batch)
    last = told(state)
    assert (last[0, :, 0] > math.log(0.9)).all() and (last[1, :, 1] > math.log(0.9)).all()


@both_times
@pytest.mark.parametrize("options", [{}, dict(qk_norm=True, remat="full")], ids=["", "remat"])
@pytest.mark.cases(2)
def test_scanned_and_unrolled_blocks_agree(time_conditioning, options):
    scanned, params = built(time_conditioning=time_conditioning, **options)
    loop, _ = built(time_conditioning=time_conditioning, **options, scan_blocks=False)
    np.testing.assert_allclose(
        logits(scanned, params, label=LABEL), logits(loop, unrolled(params), label=LABEL), atol=2e-5
    )


@every_form
@both_times
@pytest.mark.cases(2)
def test_features_of_some_positions_and_repeated_rows_keep_their_label(
    time_conditioning, scan_blocks
):
    network, params = built(time_conditioning=time_conditioning, scan_blocks=scan_blocks)
    denoiser = network.bind(params, {"label": LABEL})
    h, index = np.asarray(denoiser.features(Z, T)), jnp.asarray([[4, 0], [1, 2], [5, 3]])
    some = denoiser.features_at(Z, T, index)
    np.testing.assert_allclose(some, np.take_along_axis(h, index[..., None], 1), atol=2e-5)
    twice = denoiser.repeated(2).features(jnp.repeat(Z, 2, axis=0), jnp.repeat(T, 2))
    np.testing.assert_allclose(twice, np.repeat(h, 2, axis=0), atol=2e-5)


@every_form
@both_times
@pytest.mark.cases(1)
def test_blocks_and_a_cache_with_a_label_are_the_full_pass(time_conditioning, scan_blocks):
    """One block as long as the sequence is the plain pass; block after block is the one pass."""
    network, params = built(time_conditioning=time_conditioning, scan_blocks=scan_blocks)
    denoiser = network.bind(params, {"label": LABEL})
    whole = denoiser.blocks.features(Z, T[:, None], Z, 6)
    np.testing.assert_allclose(whole, denoiser.features(Z, T), atol=2e-5)
    x, t = jnp.minimum(Z, 4), jnp.asarray([[0.3, 0.9], [0.5, 0.1], [0.7, 0.2]])
    passed, cache = denoiser.blocks.features(Z, t, x, 3), denoiser.blocks.empty_cache(3, 6)
    for b in range(2):
        part = slice(3 * b, 3 * b + 3)
        h, _ = denoiser.blocks.append_block(Z[:, part], t[:, b], cache)
        np.testing.assert_allclose(h, passed[:, part], atol=2e-5)
        _, cache = denoiser.blocks.append_block(x[:, part], jnp.zeros(3), cache)
    other = network.bind(params, {"label": LABEL[::-1]}).blocks.features(Z, t, x, 3)
    assert np.abs(other - passed)[0].max() > 1e-3


def test_labels_go_with_segments():
    network, params = built()
    segments = jnp.asarray([[0, 0, 0, 1, 1, 1]] * 3)
    before = logits(network, params, label=LABEL, segments=segments)
    after = logits(network, params, Z.at[:, 4].set(3), label=LABEL, segments=segments)
    np.testing.assert_allclose(after[:, :3], before[:, :3], atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.cases(1)
def test_the_rate_at_which_labels_are_withheld(rate):
    """Of 4,000 rows in training, within 4 standard errors; without keys none is."""
    network, params = built(label_dropout=rate, depth=1)
    rows = 4000
    z, t, label = jnp.tile(Z[:1], (rows, 1)), jnp.full(rows, 0.4), jnp.full(rows, 1)
    known, null = (
        logits(network, params, z[:1], t[:1], label=jnp.full(1, number)) for number in (1, 3)
    )
    call = jax.jit(lambda keys: network.bind(params, {"label": label}, keys)(z, t))
    found = np.asarray(call(exact.keys_for(0, rows)))
    dropped = np.abs(found - null).max(axis=(1, 2)) < 1e-4
    kept = np.abs(found - known).max(axis=(1, 2)) < 1e-4
    assert (dropped ^ kept).all()
    assert abs(dropped.mean() - rate) < 4 * math.sqrt(rate * (1 - rate) / rows)
    np.testing.assert_array_equal(call(exact.keys_for(0, rows)), found)
    assert (np.abs(logits(network, params, z, t, label=label) - known) < 1e-4).all()


@pytest.mark.campaign
def test_copies_of_a_row_keep_or_lose_their_label_together():
    network, params = built(label_dropout=0.5, depth=1)
    denoiser = network.bind(params, {"label": LABEL[:1].repeat(16)}, exact.keys_for(0, 16))
    z = jnp.tile(Z[:1], (32, 1))
    out = np.asarray(denoiser.repeated(2)(z, jnp.full(32, 0.4)))
    np.testing.assert_allclose(out[::2], out[1::2], atol=1e-6)
    once = np.asarray(denoiser(z[:16], jnp.full(16, 0.4)))
    np.testing.assert_allclose(out[::2], once, atol=1e-6)
    assert len(np.unique(np.round(once[:, 0, 0], 4))) == 2


def test_the_table_is_laid_out():
    network, _ = built()
    params = jax.eval_shape(network.init, jax.random.key(0))
    specs = shardings_of({"network": params}, make_mesh(MeshOptions(data=1)))
    assert specs["network"]["label_table"].spec == P(None, "fsdp")


def test_without_classes_there_is_no_table():
    params = jax.eval_shape(built(classes=0)[0].init, jax.random.key(0))
    assert "label_table" not in params


def test_what_does_not_go_together_is_refused():
    network, params = built(classes=0)
    with pytest.raises(UserError, match="labels, but network.classes=0: set network.classes"):
        network.bind(params, {"label": LABEL})
    with pytest.raises(UserError, match="inputs segments and label, not 'caption'"):
        network.bind(params, {"caption": LABEL})
    with pytest.raises(UserError, match="network.classes must not be negative, not -1"):
        Transformer(**(SIZES | dict(classes=-1)))
    for rate in (-0.1, 1.0):
        with pytest.raises(UserError, match=r"network.label_dropout must lie in \[0, 1\), not"):
            Transformer(**(SIZES | dict(label_dropout=rate)))
