"""The vocabulary head at chosen positions alone: same values and gradients as everywhere."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives import head
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.draws import antithetic_times
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.head import CAPACITIES, at_positions
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Linear, Polynomial
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Accelerator, Denoiser

pytestmark = pytest.mark.slow

B, L, D, V = 4, 8, 6, 1100
KEY = jax.random.key(0)
PARAMS = {
    "embedding": jax.random.normal(KEY, (V + 1, D)),
    "head": 0.3 * jax.random.normal(jax.random.fold_in(KEY, 1), (D, V)),
}
X = np.random.default_rng(0).integers(0, V, (B, L)).astype(np.int32)
CHOSEN = np.random.default_rng(1).random((B, L)) < 0.5
Z = np.where(CHOSEN, V, X)


def denoiser_of(params, groups=(1, 1), seen=None) -> Denoiser:
    def unembed(h):
        if seen is not None:
            seen.append(h.shape)
        return h @ params["head"]

    features = lambda z, t: jnp.tanh(params["embedding"][z])  # noqa: E731
    return Denoiser(features, unembed, Accelerator(groups))


def nats(params, groups=(1, 1), seen=None, *, share):
    """With room for that share of the positions of each group: parts of a batch and of a text."""
    denoiser = denoiser_of(params, groups, seen)
    h = denoiser.features(Z, jnp.zeros(B))
    return at_positions(
        denoiser,
        h,
        jnp.asarray(CHOSEN),
        reduce=token_nats,
        rows=(jnp.asarray(X),),
        capacities=(share,),
    )


def plainly(params):
    return jnp.where(CHOSEN, token_nats(denoiser_of(params)(Z, jnp.zeros(B)), X), 0.0)


def both(function, weight=None):
    """Values, and the gradient of their sum weighted by row."""
    weight = jnp.arange(1.0, B + 1)[:, None]

    def loss(params):
        values = function(params)
        return jnp.sum(weight * values), values

    (_, values), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS)
    return values, gradient


@pytest.mark.parametrize("chunk", [2**24, 3000])
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (4, 1), (2, 4)])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.1])
@pytest.mark.cases(3)
def test_gathering_changes_neither_values_nor_gradients(share, groups, chunk, monkeypatch):
    """With room for all that are masked, with too little (0.1), in chunks of two rows or whole."""
    monkeypatch.setattr(head, "LOGITS", head.LOGITS._replace(at_once=chunk))
    values, gradient = both(lambda params: nats(params, groups, share=share))
    expected, its_gradient = both(plainly)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    for name in PARAMS:
        np.testing.assert_allclose(gradient[name], its_gradient[name], rtol=1e-4, atol=1e-6)
    assert (np.asarray(values)[~CHOSEN] == 0).all() and (np.asarray(values)[CHOSEN] > 0).all()


def test_rows_as_wide_as_the_logits_are_gathered_like_them(monkeypatch):
    """What is added to the logits of a position, in chunks of two rows."""
    monkeypatch.setattr(head, "LOGITS", head.LOGITS._replace(at_once=3000))
    added, chosen = jax.random.normal(KEY, (B, L, V)), jnp.asarray(CHOSEN)
    denoiser = denoiser_of(PARAMS, (2, 1))
    values = at_positions(
        denoiser, denoiser.features(Z, jnp.zeros(B)), chosen, rows=(jnp.asarray(X), added),
        reduce=lambda logits, x, more: token_nats(logits + more, x), capacities=(0.8,),
    )  # fmt: skip
    plain = token_nats(denoiser(Z, jnp.zeros(B)) + added, X)
    np.testing.assert_allclose(values, jnp.where(chosen, plain, 0.0), rtol=1e-5)


@pytest.mark.parametrize("crowded", [0, 1])
def test_no_token_is_dropped_where_one_part_of_the_batch_has_all(crowded):
    """Two parts of 16 with a capacity of 10 each: 16 chosen in one of them, 4 in the other."""
    chosen = np.ones((B, L), bool)
    chosen[2 * (1 - crowded) : 2 * (2 - crowded), 2:] = False
    h, x = denoiser_of(PARAMS).features(X, jnp.zeros(B)), jnp.asarray(X)
    values = at_positions(
        denoiser_of(PARAMS, (2, 1)), h, jnp.asarray(chosen), reduce=token_nats, rows=(x,),
        capacities=(10 / 16,),
    )  # fmt: skip
    assert ((np.asarray(values) > 0) == chosen).all()


@pytest.mark.parametrize("dtype, digits", [("float32", 2.0**-18), ("bfloat16", 2.0**-7)])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.cases(2)
def test_of_any_shape_type_and_capacity_it_is_the_plain_form(seed, dtype, digits, monkeypatch):
    """Gradients in features and head to the digits of the type, of the largest entry; none, some
    or all chosen, in parts of a batch, with capacities of a hundredth to all of them."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    rows, length, size = groups[0] * int(rng.integers(1, 4)), *rng.integers(2, 20, 2)
    symbols, share = int(rng.integers(1024, 1500)), float(rng.choice([0.01, 0.3, 0.6, 1.0]))
    chunk = int(rng.choice([5 * symbols, 2**24]))
    monkeypatch.setattr(head, "LOGITS", head.LOGITS._replace(at_once=chunk))
    chosen = jnp.asarray(rng.random((rows, length)) < rng.choice([0.0, 0.3, 0.6, 1.0]))
    x = jnp.asarray(rng.integers(0, symbols, (rows, length)), jnp.int32)
    weight = jnp.asarray(rng.normal(size=(rows, length)), jnp.float32)
    leaves = [
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((rows, length, size), (size, symbols))
    ]

    def unembed(h, kernel):
        return (h @ kernel).astype(jnp.float32)

    def gathered(h, kernel):
        denoiser = Denoiser(None, lambda h: unembed(h, kernel), Accelerator(groups))
        capacities = tuple(sorted({share, 0.5}))
        values = at_positions(
            denoiser, h, chosen, reduce=token_nats, rows=(x,), capacities=capacities
        )
        return jnp.sum(weight * values)

    def plain(h, kernel):
        return jnp.sum(jnp.where(chosen, weight * token_nats(unembed(h, kernel), x), 0.0))

    (found, slopes), (expected, its_slopes) = (
        jax.jit(jax.value_and_grad(form, argnums=(0, 1)))(*leaves) for form in (gathered, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(slopes, its_slopes, strict=True):
        a, b = (np.asarray(g, np.float32) for g in (a, b))
        assert np.abs(a - b).max() <= digits * np.abs(b).max()


def test_the_head_is_computed_for_the_capacity_or_for_all():
    seen = []
    jax.eval_shape(lambda params: nats(params, (2, 1), seen, share=0.6), PARAMS)
    shapes = {shape[:-1] for shape in seen if len(shape) == 3}
    assert shapes == {(2, 10), (2, 16)}  # ceil(0.6 * 16), and the fallback


def test_what_a_device_takes_is_of_its_own_part_of_the_texts():
    """Two halves of a batch of four texts, each text in four parts of two places."""
    places = jnp.arange(B * L).reshape(B, L)
    grouped = head._grouped(places, (2, 4))
    first = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert grouped.tolist() == first + [[16 + place for place in part] for part in first]
    assert head._ungrouped(grouped, (2, 4), (B, L)).tolist() == places.tolist()


def test_texts_that_parts_do_not_divide_stay_whole():
    values = jnp.zeros((B, 7))
    denoiser = denoiser_of(PARAMS, (2, 4))
    h = denoiser.features(Z[:, :7], jnp.zeros(B))
    found = at_positions(
        denoiser,
        h,
        values == 0,
        reduce=token_nats,
        rows=(jnp.asarray(X[:, :7]),),
        capacities=(0.8,),
    )
    np.testing.assert_allclose(found, token_nats(denoiser.unembed(h), X[:, :7]), rtol=1e-5)


def test_a_small_vocabulary_is_not_gathered(monkeypatch):
    monkeypatch.setattr(head, "LEAST_VOCABULARY", V + 1)
    seen = []
    jax.eval_shape(lambda params: nats(params, (1, 1), seen, share=0.5), PARAMS)
    assert {shape[:-1] for shape in seen if len(shape) == 3} == {(1, 32)}


def temporary(nats) -> int:
    """Bytes of the compiled gradient beside its arguments and results."""
    grad = jax.jit(jax.grad(lambda params: jnp.sum(nats(params))))
    return grad.lower(PARAMS).compile().memory_analysis().temp_size_in_bytes


def test_no_array_of_all_logits_is_alive(monkeypatch):
    """The compiled gradient's temporary memory is less than one float32 [B, L, V]."""
    monkeypatch.setattr(head, "LOGITS", head.Logits(4000, kept=4000))
    assert temporary(lambda params: nats(params, share=0.6)) < B * L * V * 4
    assert temporary(plainly) > B * L * V * 4


@pytest.mark.parametrize("platform, loops", [("gpu", False), ("cpu", True), ("tpu", True)])
def test_a_gpu_computes_more_logits_at_once(platform, loops, monkeypatch):
    """All of 4 x 8 x 1,100, where others have room for 5 rows."""
    monkeypatch.setattr(head, "LOGITS", head.Logits(5 * V, kept=0))
    x, plain = jnp.asarray(X), denoiser_of(PARAMS)
    told = plain._replace(accelerator=Accelerator(platform=platform))

    def loss(h):
        found = at_positions(told, h, jnp.ones((B, L), bool), reduce=token_nats, rows=(x,))
        return jnp.sum(found)

    h = plain.features(Z, jnp.zeros(B))
    assert ("stablehlo.while" in jax.jit(loss).lower(h).as_text()) == loops


@pytest.mark.parametrize("objective", [AnyOrder(), AnyOrder(0.0, 0.6), MD4()])
@pytest.mark.parametrize("schedule", [None, Cosine(), Polynomial(2.0)])
@pytest.mark.cases(3)
def test_objectives_that_gather_are_what_they_were(objective, schedule, monkeypatch):
    process = Masking(V, *([schedule] if schedule else []))
    u = np.array([0.2, 0.8, 0.45, 0.55], np.float32)
    arguments = process, exact.batch_of(X), jnp.asarray(u), exact.keys_for(3, B)
    gathered, _ = objective(denoiser_of(PARAMS), *arguments)
    monkeypatch.setattr(head, "LEAST_VOCABULARY", V + 1)
    np.testing.assert_allclose(gathered, objective(denoiser_of(PARAMS), *arguments)[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective, process",
    [
        (GenMD4(), StateDependent(V, 2.0).init()),
        (ScoreEntropy(), Masking(V)),
        (ScoreEntropy(scaled=False), Masking(V, Cosine())),
        (CrossEntropy(), Uniform(V, parametrisation="mixture")),
    ],
)
@pytest.mark.cases(1)
def test_other_families_that_gather_are_what_they_were(objective, process, monkeypatch):
    """Values and gradients, also in what the process learns."""

    def loss(params, process):
        u = jnp.asarray([0.2, 0.8, 0.45, 0.55])
        arguments = process, exact.batch_of(X), u, exact.keys_for(3, B)
        nats, _ = objective(denoiser_of(params), *arguments)
        return jnp.sum(nats * jnp.arange(1.0, B + 1)), nats

    call = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    monkeypatch.setattr(head, "LOGITS", head.LOGITS._replace(at_once=5000))
    (_, gathered), gradients = call(PARAMS, process)
    monkeypatch.setattr(head, "LEAST_VOCABULARY", V + 1)
    monkeypatch.setattr(head, "LOGITS", head.LOGITS._replace(at_once=2**24))
    (_, plain), its_gradients = call(PARAMS, process)
    np.testing.assert_allclose(gathered, plain, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(its_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "schedule, capacity", [(Linear(), CAPACITIES[0]), (Polynomial(2.0), CAPACITIES[0]),
                           (Cosine(), CAPACITIES[1])]
)  # fmt: skip
@pytest.mark.cases(2)
def test_a_capacity_holds_the_masks_of_nearly_every_batch(schedule, capacity):
    """2,000 batches of 8 x 256 with antithetic times."""
    process, x = Masking(5, schedule), np.zeros((8, 256), np.int32)

    def one(key):
        z = process.corrupt(
            jax.random.split(key, 8), x, antithetic_times(jax.random.uniform(key), 8)
        )
        return jnp.sum(z == 5)

    counts = jax.lax.map(one, jax.random.split(KEY, 2000))
    assert jnp.mean(counts > capacity * x.size) < 0.01
