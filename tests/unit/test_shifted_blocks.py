"""Block diffusion with networks whose logits are made at the position before a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import bound

from md4_jax.objectives.autoregressive import Autoregressive
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Accelerator, Prompt, batch_of
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.guidance import both
from md4_jax.samplers.loop import sample
from tests import exact

V, L, P = 5, 12, 3
RNG = np.random.default_rng(4)
X = jnp.asarray(RNG.integers(0, V, (2, L)))
Z = jnp.where(RNG.random((2, L)) < 0.5, V, X)
T = jnp.asarray(RNG.random((2, L // P)), jnp.float32)
# Two documents, of which one begins within a block, and padding.
SEGMENTS = jnp.array([[0] * 4 + [1] * 5 + [-1] * 3, [0] * 12])


@pytest.mark.quick(1)
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one text", "documents"])
@pytest.mark.parametrize("options", [{}, dict(scan_blocks=False), dict(time_conditioning=True)])
@pytest.mark.cases(1)
def test_a_block_begins_with_the_end_of_the_clean_block_before_it(options, segments):
    """Elsewhere features are those of the noisy neighbour, and a document begins with its own."""
    plain, found = (bound(segments, shifted=x, **options).blocks.features for x in (False, True))
    noisy, clean = plain(Z, T, X, P), plain(X, jnp.zeros_like(T), X, P)
    place = np.arange(1, L)
    expected = np.array(noisy)
    expected[:, 1:] = np.where((place % P == 0)[:, None], clean[:, :-1], noisy[:, :-1])
    if segments is not None:
        begins = np.diff(segments, axis=1, prepend=-2) != 0
        expected[begins] = np.asarray(noisy)[begins]
    np.testing.assert_allclose(found(Z, T, X, P), expected, atol=2e-5)


@pytest.mark.campaign
def test_the_last_block_may_be_shorter():
    whole, found = (bound(shifted=True).blocks.features(*x) for x in ((Z, T, X, 5), (Z, T, X, 5)))
    assert whole.shape == found.shape == (2, L, 16)
    first = bound(shifted=True).blocks.features(Z[:, :10], T, X[:, :10], 5)
    np.testing.assert_allclose(whole[:, :10], first, atol=2e-5)


@pytest.mark.parametrize("options", [{}, dict(scan_blocks=False, time_conditioning=True)])
@pytest.mark.cases(1)
def test_block_by_block_with_a_memory_is_the_whole_pass(options):
    denoiser = bound(shifted=True, **options)
    whole = denoiser.blocks.features(Z, T, X, P)
    past = denoiser.blocks.empty_cache(2, L)
    for b in range(L // P):
        part = slice(b * P, (b + 1) * P)
        h, _ = denoiser.blocks.append_block(Z[:, part], T[:, b], past)
        np.testing.assert_allclose(h, whole[:, part], atol=2e-5)
        _, past = denoiser.blocks.append_block(X[:, part], jnp.zeros(2), past)


@pytest.mark.slow
def test_blocks_of_one_are_the_causal_network():
    """The bound is its likelihood, with the first token drawn from what it says after a mask."""
    causal, denoiser = bound(causal=True), bound(shifted=True)
    objective, batch = BlockDiffusion(1), exact.batch_of(X)
    u, keys = jnp.asarray([0.3, 0.7]), exact.keys_for(0, 2)
    nats, _ = objective(denoiser, Masking(V), batch, u, keys)
    later = causal.unembed(causal.features(X, jnp.zeros(2))[:, :-1])
    first = causal.unembed(causal.features(jnp.full((2, 1), V), jnp.zeros(2)))
    log_mu = jax.nn.log_softmax(jnp.concatenate([first, later], axis=1))
    each = -jnp.take_along_axis(log_mu, X[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(nats, each.sum(axis=1), rtol=1e-5)
    # The autoregressive objective reads a mask before the text as well.
    other, _ = Autoregressive()(causal, Masking(V), batch, u, keys)
    assert np.all(np.abs(other - nats) > 1e-3)


def in_full(denoiser, step, *, steps: int, keys, prompt: Prompt):
    """The same blocks, each step of which reads [noisy, clean] whole, without a cache."""
    z = jnp.where(prompt.mask, prompt.tokens, V)
    for b in range(L // P):
        part = slice(b * P, (b + 1) * P)

        def features(inner, t, z=z, part=part):
            noisy, times = z.at[:, part].set(inner), jnp.tile(t[:, None], (1, L // P))
            return denoiser.blocks.features(noisy, times, z, P)[:, part]

        own = denoiser._replace(features=features, accelerator=Accelerator())
        chain, _ = sample(
            own, Masking(V), step, grid=uniform(steps),
            keys=jax.vmap(jax.random.fold_in, (0, None))(keys, b),
            prompt=jax.tree.map(lambda x, part=part: x[:, part], prompt),
        )  # fmt: skip
        z = z.at[:, part].set(chain.z)
    return z


SURE = Confidence(rule="threshold", limit=0.4)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "shifted, step, cached",
    [
        (True, SURE, True),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                (False, SURE, True), (True, Ancestral(), True), (True, Confidence(), False),
            )
        ),
    ],
)  # fmt: skip
def test_samples_are_those_of_whole_passes(shifted, step, cached):
    """Of several texts, of which the first five tokens are given."""
    rows = 6
    given = jnp.broadcast_to(jnp.arange(L) < 5, (rows, L))
    prompt = Prompt(jnp.broadcast_to(X[:1], (rows, L)), given)
    denoiser, keys = bound(shifted=shifted), exact.keys_for(0, rows)
    blocks = Blocks(P, L, cached=cached)
    found, _ = blocks(denoiser, Masking(V), step, grid=uniform(3), keys=keys, prompt=prompt)
    expected = in_full(denoiser, step, steps=3, keys=keys, prompt=prompt)
    assert np.array_equal(found.z, expected) and len(np.unique(found.z, axis=0)) > 1


def test_two_networks_side_by_side_keep_two_memories():
    """As guidance has them."""
    one, other = bound(shifted=True), bound(shifted=True, rotary_base=20.0)
    pair = both(one, other, lambda a, b: a + b)
    past, parts = pair.blocks.empty_cache(2, L), []
    for begin in range(0, L, P):
        part = slice(begin, begin + P)
        parts.append(pair.blocks.append_block(Z[:, part], jnp.zeros(2), past)[0])
        _, past = pair.blocks.append_block(X[:, part], jnp.zeros(2), past)
    found = jnp.concatenate(parts, axis=1)
    times = jnp.zeros_like(T)
    expected = [d.blocks.features(Z, times, X, P) for d in (one, other)]
    np.testing.assert_allclose(found, jnp.concatenate(expected, axis=-1), atol=2e-5)


def test_the_next_token_of_a_clean_text_is_that_of_a_network_without_shift():
    """Its own features predict the token after it, whatever is shifted in blocks."""
    losses = [
        BlockDiffusion(P, left_to_right=0.3)(
            bound(shifted=shifted, causal_context=True), Masking(V),
            batch_of(np.asarray(X)), jnp.full(2, 0.4), exact.keys_for(0, 2),
        )[1]["left_to_right"]
        for shifted in (True, False)
    ]  # fmt: skip
    assert np.all(np.asarray(losses) > 0)
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_learned_positions_end_before_what_fills_the_last_block():
    """A text of 6 tokens, moved by 1 to the right: its last block has 2 tokens behind its end."""
    denoiser, t = bound(positions=6, causal_context=True), jnp.zeros(2)
    blocks = denoiser.blocks
    cache = blocks.beginning(blocks.empty_cache(2, 6), jnp.full(2, 1))
    for begin in (0, 3):
        cache = blocks.read(X[:, begin : begin + 3], t, cache)
    h, _ = blocks.append_block(X[:, 6:9], t, cache)
    assert np.isfinite(h).all()
