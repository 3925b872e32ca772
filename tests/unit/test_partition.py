"""Partition generative modelling: what each group sees, the bound from two groups, and sampling."""

import functools
import re
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import built

from md4_jax.config import build, schema
from md4_jax.networks.partition import Partition
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.partition import Partition as Bound
from md4_jax.objectives.partition import has_prompt
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Linear, Polynomial, Power
from md4_jax.protocols import UserError, batch_of
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample

V, MASK = 5, 5
X = np.array([[0, 3, 2, 3, 1, 1, 4], [4, 4, 0, 2, 0, 2, 1]])
GROUP = np.array([[0, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 1]], bool)
T = np.zeros(2, np.float32)


@functools.cache
def compiled(name, **options):
    network, params = built(Partition, depth=4, **options)
    run = jax.jit(lambda p, context, *inputs: getattr(network.bind(p, context), name)(*inputs))
    return functools.partial(run, params)


def call(name, *inputs, context=None, **options):
    """A function of the denoiser of a small network."""
    return np.asarray(compiled(name, **options)(context, *map(jnp.asarray, inputs)))


@pytest.mark.parametrize(
    "options", [{}, dict(scan_blocks=False, decoder_depth=1, qk_norm=True, kv_heads=1)]
)
def test_each_token_is_predicted_from_the_other_group_alone(options):
    """Whatever stands in its own group changes nothing, and each token of the other does."""
    h = call("swapped", X, GROUP, **options)
    for row, position in np.ndindex(*X.shape):
        other = X.copy()
        other[row, position] = (X[row, position] + 1) % V
        found = call("swapped", other, GROUP, **options)
        mates = GROUP[row] == GROUP[row, position]
        np.testing.assert_array_equal(found[row, mates], h[row, mates])
        assert (np.abs(found - h)[row, ~mates].max(axis=1) > 1e-4).all()
        np.testing.assert_array_equal(found[1 - row], h[1 - row])


def test_both_groups_are_those_of_the_denoiser_with_masks():
    h = call("swapped", X, GROUP)
    for group in (GROUP, ~GROUP):
        masked = call("features", np.where(group, MASK, X), T)
        np.testing.assert_allclose(masked[group], h[group], rtol=1e-5, atol=1e-5)


def test_a_text_of_masks_is_predicted_from_the_start_and_the_position():
    h = call("features", np.full_like(X, MASK), T)
    np.testing.assert_array_equal(h[0], h[1])
    assert np.isfinite(h).all() and (np.abs(np.diff(h[0], axis=0)).max(axis=1) > 1e-3).all()
    whole = call("swapped", X, np.ones_like(GROUP))
    np.testing.assert_allclose(whole, h, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["swapped", "features"])
def test_documents_of_a_packed_text_stay_apart(name):
    context = {"segments": jnp.asarray([[0, 0, 0, 0, 1, 1, -1]] * 2)}
    masked = (X, GROUP) if name == "swapped" else (np.where(GROUP, MASK, X), T)
    h = call(name, *masked, context=context)
    other = np.where(np.arange(7) < 4, (X + 1) % V, X)
    changed = (other, GROUP) if name == "swapped" else (np.where(GROUP, MASK, other), T)
    found = call(name, *changed, context=context)
    np.testing.assert_array_equal(found[:, 4:], h[:, 4:])
    assert (np.abs(found - h)[:, :4].max(axis=(1, 2)) > 1e-3).all()
    assert np.abs(call(name, *masked) - h).max() > 1e-3


@pytest.mark.campaign
@pytest.mark.parametrize("most", [0, 8, 9, 30, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_the_quick_path_says_the_same(most, packed):
    """With the visible tokens moved to the front, in all sizes: none, one, just above one, all."""
    rng = np.random.default_rng(most)
    z = rng.integers(0, V, (3, 64))
    for row, visible in enumerate((most, most // 2, 0)):
        z[row, rng.permutation(64)[visible:]] = MASK
    context = {"segments": jnp.asarray(np.arange(64)[None] // 40 * np.ones((3, 1), int))}
    context, t = context if packed else None, np.zeros(3, np.float32)
    index = rng.integers(0, 64, (3, 10))
    h = np.take_along_axis(call("features", z, t, context=context), index[..., None], axis=1)
    found = call("features_at", z, t, index, context=context)
    np.testing.assert_allclose(found, h, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Ancestral(), id="ancestral"),
        pytest.param(Confidence(), id="confidence", marks=pytest.mark.campaign),
    ],
)
def test_samples_are_the_same_with_and_without_the_quick_path(step):
    network, params = built(Partition, depth=2)
    process, keys = Masking(V), exact.keys_for(3, 2)
    called = []

    def drawn(params, quick):
        denoiser = network.bind(params)
        own = denoiser.accelerator
        at = lambda *a: called.append(a) or own.features_at(*a)  # noqa: E731
        shortcuts = own._replace(features_at=at if quick else None)
        denoiser = denoiser._replace(accelerator=shortcuts)
        prompt = no_prompt(2, 64)
        return sample(denoiser, process, step, grid=uniform(8), keys=keys, prompt=prompt)[0].z

    quick, plain = (jax.jit(drawn, static_argnums=1)(params, x) for x in (True, False))
    np.testing.assert_array_equal(quick, plain)
    assert (np.asarray(quick) < V).all()
    assert called


def of_network(vocab, length):
    """The logits of a small network in all states, as a table: [(V + 1)^L, L, V]."""
    network, params = built(Partition, vocab_size=vocab, depth=2)
    z = jnp.asarray(exact.sequences(vocab + 1, length))
    return np.asarray(jax.jit(lambda p, z: network.bind(p)(z, jnp.zeros(len(z))))(params, z))


SCHEDULES = [Linear(), Polynomial(2.0), Cosine(), Power(2.0)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.cases(2)
def test_the_bound_is_that_of_md4_for_every_schedule(schedule):
    """By enumeration of all patterns, for any denoiser; M06 has the numbers."""
    process, x = Masking(2, schedule), exact.sequences(2, 3)
    denoiser = exact.denoiser_of(exact.table_logits(2, 3))
    t, weight = exact.quadrature()
    masked = process.schedule.one_minus_alpha(jnp.asarray(t))
    loss_at = exact.bind(Bound(), denoiser, process)
    values = exact.expected(loss_at, process.mask_id, x, t, masked) @ weight
    np.testing.assert_allclose(values, exact.any_order(denoiser, process, x), rtol=1e-9)
    mean = exact.P_V2L3.ravel() @ values
    np.testing.assert_allclose([values[0], values[-1], mean], [
        1.8263484685, 2.6368421674, 2.2885332526,
    ], rtol=1e-9)  # fmt: skip


@pytest.mark.usefixtures("x64")
def test_the_right_network_reaches_the_entropy():
    denoiser, process = exact.denoiser_of(exact.perfect_logits(exact.P_V3L2)), Masking(3)
    t, weight = exact.quadrature()
    loss_at = exact.bind(Bound(), denoiser, process)
    values = exact.expected(loss_at, 3, exact.sequences(3, 2), t, t) @ weight
    np.testing.assert_allclose(values, -np.log(exact.P_V3L2.ravel()), rtol=1e-9)


def test_the_bound_of_the_network_in_one_pass_is_that_of_its_denoiser():
    """The network reads both groups at once; MD4's bound asks it about one after the other."""
    network, params = built(Partition, vocab_size=3, depth=2)
    process, x = Masking(3), exact.sequences(3, 3)
    t, weight = exact.quadrature(nodes=6)  # both integrands are polynomials of degree 3

    @jax.jit
    def loss_at(batch, z, t):
        return Bound().loss_at(network.bind(params), process, batch, z, t)

    values = exact.expected(loss_at, 3, x, t, t) @ weight
    table = exact.denoiser_of(of_network(3, 3))
    np.testing.assert_allclose(values, exact.continuous(table, process, x, nodes=6), rtol=2e-6)
    assert np.ptp(values) > 0.1


@pytest.mark.usefixtures("x64")
def test_a_text_with_a_prompt_is_predicted_from_it_alone():
    """The second group would lack the prompt. Padding, a segment that nobody reads, is none."""
    denoiser, process = exact.denoiser_of(exact.table_logits(2, 3)), Masking(2)
    counts = np.array([[False, True, True]] * 4)
    x = np.array([[0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]], np.int32)
    u, keys = jnp.array([0.2, 0.5, 0.7, 0.9]), exact.keys_for(0, 4)
    batch = batch_of(x, loss_mask=counts)
    found = Bound()(denoiser, process, batch, u, keys)[0]
    np.testing.assert_allclose(found, MD4()(denoiser, process, batch, u, keys)[0], rtol=1e-12)
    segments = np.array([[-1, 0, 0], [0, 0, 0], [-1, 0, 0], [0, 0, 0]])
    told = batch_of(x, loss_mask=counts, context={"segments": segments})
    np.testing.assert_array_equal(has_prompt(told), [False, True, False, True])
    assert not np.any(has_prompt(batch_of(x)))


def test_the_loss_has_a_finite_gradient_at_all_times_and_none_of_rows_that_fill_up():
    network, params = built(Partition, depth=2)
    tokens = jnp.array([[1, 2, 3, 0]] * 4)
    u, keys = jnp.array([0.0, 1e-4, 0.5, 1 - 2.0**-24]), exact.keys_for(0, 4)

    def loss(p, mask):
        batch = batch_of(tokens, loss_mask=mask)
        return jnp.sum(Bound()(network.bind(p, {}, keys), Masking(V), batch, u, keys)[0])

    slopes = jax.jit(jax.grad(loss))
    for mask in (np.ones((4, 4), bool), np.zeros((4, 4), bool)):
        found = jax.tree.leaves(slopes(params, mask))
        assert all(np.isfinite(x).all() for x in found)
        assert any(np.any(x != 0) for x in found) == mask.any()


@pytest.mark.parametrize("rate", ["dropout", "embedding_dropout"])
def test_dropout_is_of_training_alone_and_lets_no_token_through(rate):
    network, params = built(Partition, depth=2, **{rate: 0.5})
    other = jnp.where(GROUP, (X + 1) % V, X)
    run = jax.jit(lambda p, x, k: network.bind(p, {}, k).swapped(x, jnp.asarray(GROUP)))
    h = run(params, jnp.asarray(X), exact.keys_for(0, 2))
    assert np.abs(h - run(params, jnp.asarray(X), exact.keys_for(1, 2))).max() > 1e-3
    assert np.abs(h - run(params, jnp.asarray(X), None)).max() > 1e-3
    found = run(params, other, exact.keys_for(0, 2))
    np.testing.assert_array_equal(found[GROUP], h[GROUP])


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(time_conditioning=True), "needs network.time_conditioning=False"),
        (dict(causal=True), "needs network.causal=False"),
        (dict(positions=64), "needs network.positions=0"),
        (dict(out_bias=True), "needs network.out_bias=False"),
        (dict(classes=3), "needs network.classes=0"),
        (dict(local_width=3), "needs network.local_width=0"),
        (dict(attention="splash"), "needs network.attention='plain', not 'splash'"),
        (dict(decoder_depth=4), "network.decoder_depth=4 must be below network.depth=4"),
        (dict(depth=1), "network.depth must be at least 2"),
    ],
)
def test_what_the_network_does_not_have_is_refused(changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        Partition(**(dict(vocab_size=V, size=16, depth=4, heads=2) | changes))


def test_the_time_is_not_told():
    assert built(Partition, depth=2)[0].time_free
    z = np.where(GROUP, MASK, X)
    np.testing.assert_array_equal(call("features", z, T), call("features", z, T + 0.7))


def test_labels_are_refused():
    network, params = built(Partition, depth=2)
    with pytest.raises(UserError, match="inputs segments, not 'label'"):
        network.bind(params, {"label": jnp.zeros(2, int)})


def test_parameters_are_counted_without_rows_that_stand_for_nothing():
    """One layer of attention more than a transformer of this depth, a bias and a gain."""
    sizes = dict(vocab_size=5, size=16, depth=4, heads=2, hidden=24, time_conditioning=False)
    one, other = Partition(**sizes).build(), Transformer(**sizes).build()
    more, fewer = (n.size(jax.eval_shape(n.init, jax.random.key(0))) for n in (one, other))
    assert more - fewer == 4 * 16 * 16 + 16 + 16


def experiment(name, **words):
    """The experiment of a small network of a config, on one device."""
    words = {"network.size": "16", "network.depth": "2", "network.heads": "2"} | words
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / name), words | {"mesh.data": "1"})
    own = dict(vocab_size=27, eot_id=0, unit="token", shape=(1024,), encode=lambda text: [0])
    return build.experiment(config, types.SimpleNamespace(**own))


def test_the_config_is_evaluated_by_the_bound_of_any_order():
    found = experiment("partition_owt.py", **{"network.decoder_depth": "1"})
    assert isinstance(found.objective, Bound)
    assert isinstance(found.evals["test"].objective, AnyOrder)


def test_the_bound_needs_the_network():
    with pytest.raises(UserError, match=r"name='partition' needs network.name='partition': it"):
        experiment("mdlm_owt.py", **{"objective.name": "partition"})
