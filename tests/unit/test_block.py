"""Block diffusion: its bound by enumeration, its attention against the dense mask."""

import itertools
import math

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_networks
from scipy import stats

from md4_jax.networks.attention import attend_where
from md4_jax.networks.blocks import block_diffusion_attention, rotated_halves, tile
from md4_jax.networks.rotary import rotate
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.md4 import MD4
from md4_jax.perf.hlo import traffic
from md4_jax.processes.masking import Masking
from md4_jax.protocols import UserError


def dense_mask(length: int, block: int, *, context: bool = False) -> np.ndarray:
    """bool [2 L, 2 L] of [z, x], as BD3-LM writes it: diagonal, offset and causal blocks."""
    half, place = np.divmod(np.arange(2 * length), length)
    of = place // block
    asks, keys = (half[:, None], of[:, None]), (half[None], of[None])
    diagonal = (of[:, None] == of[None]) & (half[:, None] == half[None])
    offset = (asks[1] > keys[1]) & (asks[0] == 0) & (keys[0] == 1)
    causal = (asks[1] >= keys[1]) & (asks[0] == 1) & (keys[0] == 1)
    if context:  # a clean token sees clean ones up to itself, as Nemotron-Labs-Diffusion has it
        diagonal &= asks[0] == 0
        causal &= place[:, None] >= place[None]
    return diagonal | offset | causal


@pytest.mark.parametrize("length, block, ones", [(4, 1, 20), (4, 2, 24), (4, 4, 32), (12, 3, 180)])
@pytest.mark.cases(2)
def test_b03_what_the_halves_see(length, block, ones):
    """Each entry of the mask is found by moving a value: L (L + L') of the (2 L)^2 are ones."""
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 2 * length, 1, 4)), jnp.float32) for _ in "qk")
    one_hot = jnp.eye(2 * length)[None, :, None, :]
    attend = jax.jit(block_diffusion_attention, static_argnames=("block", "causal"))
    weights = attend(query, key, one_hot, block=block)[0, :, 0]
    np.testing.assert_array_equal(weights > 0, dense_mask(length, block))
    assert int((weights > 0).sum()) == ones == length * (length + block)
    # A clean token that sees nothing to its right sees (L' - 1) / 2 tokens less on average.
    weights = attend(query, key, one_hot, block=block, causal=True)[0, :, 0]
    np.testing.assert_array_equal(weights > 0, dense_mask(length, block, context=True))
    assert int((weights > 0).sum()) == ones - length * (block - 1) // 2


@pytest.mark.parametrize("segmented", [False, True], ids=["", "segments"])
@pytest.mark.parametrize("context", [False, True], ids=["", "context"])
@pytest.mark.parametrize("length, block", [(24, 1), (24, 4), (24, 24), (40, 5)])
@pytest.mark.slow
@pytest.mark.cases(2)
def test_the_halves_are_the_dense_formula(length, block, context, segmented):
    """Outputs and gradients of both halves to 1e-5."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 2 * length, 2, 8)), jnp.float32) for _ in range(3))
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1)) if segmented else None
    weight = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def dense(q, k, v):
        mask = jnp.asarray(dense_mask(length, block, context=context))[None, None]
        if segmented:
            both = jnp.concatenate([segments, segments], axis=1)
            mask = mask & (both[:, None, :, None] == both[:, None, None, :])
        turned = [
            jnp.concatenate([rotate(h) for h in jnp.split(x, 2, axis=1)], axis=1) for x in (q, k)
        ]
        return attend_where(*turned, v, mask)

    def both(fn):
        loss = jax.value_and_grad(lambda *a: jnp.sum(fn(*a) * weight), argnums=(0, 1, 2))
        return jax.jit(loss)(q, k, v)

    def tiled(q, k, v):
        q, k = rotated_halves(q, length), rotated_halves(k, length)
        form = dict(segments=segments, causal=context)
        return block_diffusion_attention(q, k, v, block=block, **form)

    found = both(tiled)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), found, both(dense))


def test_little_is_computed_beside_what_is_allowed():
    """Scores of both halves: L (L + L') allowed, at most L T and a little more are computed."""
    length, block = 256, 4
    shapes = [jax.ShapeDtypeStruct((1, 2 * length, 1, 8), jnp.float32)] * 3
    fn = jax.jit(lambda q, k, v: block_diffusion_attention(q, k, v, block=block))
    products = traffic(fn.lower(*shapes).compile().as_text()).products
    scores = products / (2 * 2 * 8)
    allowed, most = length * (length + block), length * (length + 2 * tile(length, block))
    assert allowed < scores <= most < 0.4 * (2 * length) ** 2


@pytest.mark.parametrize(
    "depth, scan_blocks, least, most",
    [
        (1, False, 0.85, 1.05),
        pytest.param(4, True, 1.35, 1.55, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.slow
def test_a_pass_costs_less_than_two(depth, scan_blocks, least, most):
    """Matrix products of gradients by the compiler's count, beside those of one bidirectional pass:
    the last layer computes no more of x than keys and values, and no layer the empty scores, which
    are most of the work at this width."""
    length, block = 256, 16
    sizes = dict(vocab_size=5, size=64, depth=depth, heads=1, hidden=128)
    network = Transformer(**sizes, time_conditioning=False, scan_blocks=scan_blocks).build()
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    z, t = jnp.zeros((2, length), jnp.int32), jnp.zeros((2, length // block))

    def products(features) -> float:
        loss = jax.grad(lambda params: jnp.sum(features(network.bind(params))))
        return traffic(jax.jit(loss).lower(shapes).compile().as_text()).products

    plain = products(lambda denoiser: denoiser.features(z, t[:, 0]))
    both = products(lambda denoiser: denoiser.blocks.features(z, t, z, block))
    assert least < both / plain < most


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat, time_conditioning",
    [
        ("none", False),
        ("full", True),
        *(
            pytest.param(remat, timed, marks=pytest.mark.campaign)
            for remat, timed in (("none", True), ("dots", True), ("dots", False), ("full", False))
        ),
    ],
)
@pytest.mark.campaign
def test_scanned_layers_are_the_others(remat, time_conditioning):
    """Features and gradients of block diffusion, with what is computed again or kept, to 1e-4."""
    options = dict(time_conditioning=time_conditioning, remat=remat)
    scanned, listed = (
        Transformer(**SIZES, **options, scan_blocks=scan).build() for scan in (True, False)
    )
    rng = np.random.default_rng(0)
    params = tiny_networks.random_parameters(listed)
    stacked = {k: v for k, v in params.items() if not k.startswith("blocks_")}
    stacked["blocks"] = jax.tree.map(
        lambda *x: jnp.stack(x), *(params[f"blocks_{i}"] for i in range(SIZES["depth"]))
    )
    z, t = rng.integers(0, 6, X.shape), jnp.asarray(rng.random((4, L // 3)), jnp.float32)

    def both(network, params):
        def loss(params):
            h = network.bind(params).blocks.features(z, t, X, 3)
            return jnp.sum(jnp.sin(h)), h

        slopes, h = jax.jit(jax.grad(loss, has_aux=True))(params)
        return h, slopes["embedding"]

    for a, b in zip(both(scanned, stacked), both(listed, params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def block_bound(logits: np.ndarray, x: np.ndarray, block: int) -> np.ndarray:
    """The mean of the objective's terms over all masks with their exact law, [X]."""
    vocab, length = logits.shape[2], x.shape[1]
    process, objective = Masking(vocab), BlockDiffusion(block)
    shapes = [m for m in exact.patterns(block) if m.any()]
    total = np.zeros(len(x))
    denoiser = exact.block_table(logits)
    for masks in itertools.product(shapes, repeat=length // block):
        law = math.prod(1.0 / block / math.comb(block, int(m.sum())) for m in masks)
        z = np.where(np.concatenate(masks), vocab, x)
        share = jnp.full((len(x), length // block), 0.5)
        batch = exact.batch_of(x)
        total += law * np.asarray(
            objective.loss_at(denoiser, process, batch, jnp.asarray(z), share)
        )
    return total


B01 = {1: 3.4412506329, 2: 3.1195077884, 4: 3.1124319407}


@pytest.mark.parametrize("block", [1, 2, 4])
def test_b01_the_table_denoiser(block, x64):
    x = np.array([[0, 1, 1, 0]], np.int32)
    bound = block_bound(exact.table_logits(2, 4), x, block)
    np.testing.assert_allclose(bound, B01[block], rtol=1e-9)


@pytest.mark.parametrize("block", [1, 2, 4])
def test_b01_a_perfect_denoiser_has_the_likelihood_for_every_block(block, x64):
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(16)).reshape(2, 2, 2, 2)
    bound = block_bound(exact.perfect_logits(p), exact.sequences(2, 4), block)
    np.testing.assert_allclose(bound, -np.log(p.ravel()), rtol=1e-8)


SIZES = dict(vocab_size=5, size=16, depth=2, heads=2, hidden=24)
L = 12
X = np.random.default_rng(0).integers(0, 5, (4, L)).astype(np.int32)


def network_of(segments=None, **options):
    """(denoiser, its network) with noise on every leaf, since zeros hide most of it."""
    network = Transformer(**(SIZES | options)).build()
    denoiser = network.bind(
        tiny_networks.random_parameters(network),
        {} if segments is None else {"segments": segments},
    )
    asked = jax.jit(denoiser.blocks.features, static_argnums=3)
    return denoiser._replace(
        features=jax.jit(denoiser.features), blocks=denoiser.blocks._replace(features=asked)
    )


@pytest.mark.parametrize("options", [{}, dict(time_conditioning=False, qk_norm=True)])
@pytest.mark.slow
def test_a_block_as_long_as_the_sequence_is_masked_diffusion(options):
    """The same parameters, masks and times: MD4's integrand and the any-order term, to 1e-6."""
    denoiser, process, batch = network_of(**options), Masking(5), exact.batch_of(X)
    share = jnp.asarray([0.3, 0.6, 0.9, 0.5])
    z = process.mask_each(exact.keys_for(1, 4), X, share)
    for draws, other in (("times", MD4()), ("exact", AnyOrder())):
        block = BlockDiffusion(L, draws).loss_at(denoiser, process, batch, z, share[:, None])
        expected = other.loss_at(denoiser, process, batch, z, share)
        np.testing.assert_allclose(block, expected, rtol=1e-6)


@pytest.mark.slow
def test_blocks_of_one_are_the_likelihood_from_left_to_right():
    """No draw changes it, and it is the sum of one call a token, to 1e-6."""
    denoiser, process, batch = network_of(time_conditioning=False), Masking(5), exact.batch_of(X)
    values = [
        BlockDiffusion(1)(denoiser, process, batch, jnp.asarray(u), exact.keys_for(seed, 4))[0]
        for seed, u in enumerate(([0.1, 0.2, 0.7, 0.8], [0.9, 0.5, 0.3, 0.0]))
    ]
    np.testing.assert_array_equal(*values)
    total = 0.0
    for n in range(L):
        mask = np.full((4, 1), 5, np.int32)
        past = np.concatenate([X[:, :n], mask], axis=1)
        h = denoiser.blocks.features(past, jnp.ones((4, n + 1)), past, 1)[:, -1]
        total += -jax.nn.log_softmax(denoiser.unembed(h))[np.arange(4), X[:, n]]
    np.testing.assert_allclose(values[0], total, rtol=1e-6)


@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.campaign), 3, 4])
@pytest.mark.slow
@pytest.mark.cases(1)
def test_one_pass_is_one_pass_for_each_block(block):
    """Features of every block from the tokens up to its end alone, each at its own time."""
    denoiser = network_of()
    rng = np.random.default_rng(1)
    z, t = rng.integers(0, 6, X.shape), jnp.asarray(rng.random((4, L // block)), jnp.float32)
    whole = denoiser.blocks.features(z, t, X, block)
    for b in range(L // block):
        end = (b + 1) * block
        noise = rng.integers(0, 6, (4, end - block))
        seen = np.concatenate([noise, z[:, end - block : end]], axis=1)
        clean = np.concatenate([X[:, : end - block], rng.integers(0, 5, (4, block))], axis=1)
        times = jnp.concatenate([jnp.full((4, b), 0.77), t[:, b : b + 1]], axis=1)
        part = denoiser.blocks.features(seen, times, clean, block)
        np.testing.assert_allclose(part[:, -block:], whole[:, end - block : end], atol=2e-5)


@pytest.mark.slow
def test_noise_is_tied_to_no_position_and_is_even_within_a_sequence():
    """The k of 4 blocks of 4: all of 1..4 once in each sequence, in every order, uniform each."""
    objective, process = BlockDiffusion(4), Masking(5)
    x = np.zeros((2000, 16), np.int32)
    u = jnp.asarray(np.random.default_rng(0).random(2000), jnp.float32)
    seen = {}

    def features(z, t, clean, block):
        seen.update(z=z, t=t)
        return jnp.zeros((*z.shape, 5))

    denoiser = exact.of_outputs(None, given=features)
    objective(denoiser, process, exact.batch_of(x), u, exact.keys_for(0, 2000))
    count = np.asarray(seen["z"] == 5).reshape(2000, 4, 4).sum(axis=2)
    np.testing.assert_array_equal(np.sort(count, axis=1), np.tile([1, 2, 3, 4], (2000, 1)))
    share = np.mean(count[:, :, None] == np.arange(1, 5), axis=0)
    assert np.abs(share - 0.25).max() < 4 * math.sqrt(0.25 * 0.75 / 2000)
    assert seen["t"].shape == (2000, 4)


def test_the_strata_of_the_blocks_are_in_every_order():
    """The shares of three blocks, drawn as such: six orders, chi-squared, n = 1200, p > 1e-4."""
    u, seen = jnp.asarray(np.random.default_rng(0).random(1200), jnp.float32), {}

    def features(z, t, clean, block):
        seen.update(t=np.asarray(t))
        return jnp.zeros((*z.shape, 2))

    batch, keys = exact.batch_of(np.zeros((1200, 3))), exact.keys_for(0, 1200)
    denoiser = exact.of_outputs(None, given=features)
    BlockDiffusion(1, "times")(denoiser, Masking(2), batch, u, keys)
    assert (np.sort((3.0 * seen["t"]).astype(int), axis=1) == np.arange(3)).all()
    orders = np.argsort(seen["t"], axis=1) @ np.array([9, 3, 1])
    counts = np.unique(orders, return_counts=True)[1]
    assert len(counts) == 6 and stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (0.3, 0.8), (0.45, 0.95)])
def test_the_share_of_masks_lies_between_low_and_high(low, high):
    """A quarter of the shares in each quarter, and masks as many: 4 standard errors, n = 8000."""
    u, seen = (jnp.arange(500) + 0.5) / 2000, {}

    def features(z, t, clean, block):
        seen.update(z=np.asarray(z), t=np.asarray(t))
        return jnp.zeros((*z.shape, 2))

    batch, keys = exact.batch_of(np.zeros((500, 16))), exact.keys_for(0, 500)
    objective = BlockDiffusion(4, "times", low, high)
    objective(exact.of_outputs(None, given=features), Masking(2), batch, u, keys)
    share, place = seen["t"], np.linspace(low, high, 5)
    assert low <= share.min() < low + 0.001 and high - 0.001 < share.max() <= high
    np.testing.assert_array_equal(np.histogram(share, place)[0], np.full(4, 500))
    masked = (seen["z"] == 2).reshape(500, 4, 4).mean(axis=2)
    error = np.sqrt(np.mean(share * (1 - share)) / 8000)
    assert abs(np.mean(masked - share)) < 4 * error


@pytest.mark.parametrize("low, high, variance", [(0.001, 1.0, 5.9147), (0.45, 0.95, 0.4944)])
def test_b02_the_variance_of_blocks_of_one(low, high, variance):
    """At unit cross-entropy, by quadrature over the share of masks; exact draws have none."""
    share, weight = exact.quadrature(low, high, nodes=200)
    process, x = Masking(2), np.zeros((200, 1), np.int32)
    denoiser = exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, 2)))
    arguments = denoiser, process, exact.batch_of(x)
    objective = BlockDiffusion(1, "times", low, high)
    values = [
        objective.loss_at(*arguments, jnp.full((200, 1), z), jnp.asarray(share)[:, None])
        for z in (2, 0)
    ]
    hidden, seen = (np.asarray(v, np.float64) / math.log(2.0) for v in values)
    moments = [weight @ (share * hidden**k + (1 - share) * seen**k) / (high - low) for k in (1, 2)]
    np.testing.assert_allclose(moments[0], 1.0, rtol=1e-5)
    np.testing.assert_allclose(moments[1] - 1.0, variance, rtol=2e-4)
    keys = exact.keys_for(0, 200)
    exactly, _ = BlockDiffusion(1)(*arguments, jnp.asarray(share, jnp.float32), keys)
    assert np.asarray(exactly).std() < 1e-6


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(block=0), "objective.block must be at least 1, not 0"),
        (dict(draws="some"), "'exact' or 'times', not 'some'"),
        (dict(low=0.5, high=0.4, draws="times"), "not 0.5 and 0.4"),
        (dict(low=0.3, high=0.8), "set objective.draws='times'"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        BlockDiffusion(**options)


def test_a_drawn_time_is_not_called_exact():
    """With a time for each block even blocks of one token have noise (B02)."""
    network = tiny_networks.built(depth=1, time_conditioning=False)[0]
    assert BlockDiffusion(1).is_exact(network)
    assert not BlockDiffusion(1, "times").is_exact(network)
    assert not BlockDiffusion(2).is_exact(network)


def test_what_is_no_bound_is_not_called_one():
    assert BlockDiffusion(4).is_bound(Masking(5)) and BlockDiffusion(4, "times").is_bound(
        Masking(5)
    )
    assert not BlockDiffusion(4, "times", 0.3, 0.8).is_bound(Masking(5))
    with pytest.raises(UserError, match="objective.block=5 must divide .* data.length=12"):
        BlockDiffusion(5).check_length(12)


@pytest.mark.parametrize("scan_blocks", [True, False])
@pytest.mark.parametrize("time_conditioning", [True, False])
@pytest.mark.cases(2)
def test_block_by_block_with_a_memory_is_the_whole_pass(scan_blocks, time_conditioning):
    """Features of each block after the clean ones before it, to 2e-5, with room for all."""
    denoiser = network_of(scan_blocks=scan_blocks, time_conditioning=time_conditioning)
    rng, block = np.random.default_rng(1), 3
    z, t = rng.integers(0, 6, X.shape), jnp.asarray(rng.random((4, L // block)), jnp.float32)
    whole = denoiser.blocks.features(z, t, X, block)
    past = denoiser.blocks.empty_cache(4, L)
    after = jax.jit(denoiser.blocks.append_block)
    for b in range(L // block):
        part = slice(b * block, (b + 1) * block)
        h, _ = after(z[:, part], t[:, b], past)
        np.testing.assert_allclose(h, whole[:, part], atol=2e-5)
        _, past = after(X[:, part], jnp.zeros(4), past)
    assert int(past.count) == L


def test_a_memory_forgets_what_is_older_than_its_window():
    """Of 12 tokens the last 6 are seen: the same features after other tokens before these, in a
    network of one layer, whose keys follow from their token alone."""
    denoiser, block = network_of(depth=1), 3
    after = jax.jit(denoiser.blocks.append_block)

    def last(x, window):
        past = denoiser.blocks.empty_cache(4, window)
        for b in range(3):
            _, past = after(x[:, b * block : (b + 1) * block], jnp.zeros(4), past)
        return after(x[:, -block:], jnp.full(4, 0.5), past)[0]

    other = X.copy()
    other[:, :3] = (X[:, :3] + 1) % 5
    np.testing.assert_allclose(last(X, 6), last(other, 6), atol=1e-6)
    assert np.abs(last(X, 9) - last(other, 9)).max() > 1e-3


@pytest.mark.parametrize("block, given", [(1, 5), (4, 4), (4, 8)])
@pytest.mark.slow
@pytest.mark.cases(2)
def test_given_blocks_leave_the_bound_of_the_others(block, given):
    """As the same sequence without their part, for the same masks of the rest, to 1e-5."""
    denoiser, process, objective = network_of(), Masking(5), BlockDiffusion(block)
    batch, keys = exact.batch_of(X), exact.keys_for(3, 4)
    marks = np.broadcast_to(np.arange(L) < given, X.shape)
    u, seen = jnp.asarray([0.15, 0.85, 0.4, 0.6]), {}

    def features(z, t, *clean):
        seen.update(z=z, t=t)
        return denoiser.blocks.features(z, t, *clean)

    told, blocks = batch._replace(loss_mask=~marks), denoiser.blocks._replace(features=features)
    nats, _ = objective(denoiser._replace(blocks=blocks), process, told, u, keys)
    z, t = np.asarray(seen["z"]), seen["t"]
    assert (z[:, :given] == X[:, :given]).all() and (z[:, given:] == 5).any()
    h = denoiser.blocks.features(z, t, X, block)
    masked = (z == 5).reshape(4, -1, block)
    each = -jnp.take_along_axis(jax.nn.log_softmax(denoiser.unembed(h)), X[..., None], 2)[..., 0]
    sums = np.where(masked, np.asarray(each).reshape(masked.shape), 0.0).sum(axis=2)
    weight = block / np.maximum(1, masked.sum(axis=2))
    np.testing.assert_allclose(nats, (weight * sums)[:, given // block :].sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("draws", ["exact", "times"])
@pytest.mark.slow
@pytest.mark.cases(1)
def test_a_shorter_last_block_is_a_block(draws):
    """10 tokens in blocks of 4: nothing that fills up the last one is seen, masked or weighed."""
    denoiser, process, objective = network_of(), Masking(5), BlockDiffusion(4, draws)
    x, keys = X[:, :10], exact.keys_for(3, 4)
    u = jnp.asarray([0.15, 0.85, 0.4, 0.6])
    arguments = denoiser, process, exact.batch_of(x)
    nats, _ = objective(*arguments, u, keys)
    assert np.isfinite(nats).all() and (np.asarray(nats) > 0).all()
    z = np.where(np.arange(10) % 3 == 0, 5, x)
    share = jnp.asarray([[0.5, 0.25, 0.5]] * 4)
    whole = objective.loss_at(*arguments, z, share)
    before = objective.loss_at(denoiser, process, exact.batch_of(x[:, :8]), z[:, :8], share[:, :2])
    apart = network_of(segments=jnp.asarray([[0] * 10 + [1] * 2] * 4))
    padded = (np.pad(tokens, ((0, 0), (0, 2))) for tokens in (z, x))
    h = apart.blocks.features(next(padded), share, next(padded), 4)
    log_mu = jax.nn.log_softmax(denoiser.unembed(h))[:, 9]
    last = -log_mu[np.arange(4), x[:, 9]] / 0.5
    np.testing.assert_allclose(whole, before + last, rtol=1e-5)
