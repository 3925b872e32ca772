"""Tabular denoisers: one free entry for each noised state and output."""

import jax
import jax.numpy as jnp

from md4_jax.processes.duality import strongest
from md4_jax.protocols import Array, Blockwise, Denoiser, Mixture, Ordered

FEATURES = 4


def zeros(symbols: int, length: int) -> Array:
    """Returns a table of zeros: [FEATURES, (V + 1)^L, L, V]."""
    return jnp.zeros((FEATURES, (symbols + 1) ** length, length, symbols))


def drawn(key: Array, symbols: int, length: int, *, scale: float) -> Array:
    """Draws a table with standard normal entries times `scale`."""
    return scale * jax.random.normal(key, zeros(symbols, length).shape)


def tabled(table: Array, *, causal: bool) -> Denoiser:
    """Returns the denoiser of a table; outputs are linear in functions of t.

    causal: a position sees nothing to its right. In calls by blocks, a position sees its block and
    the clean earlier blocks.
    """
    length, symbols = table.shape[2:]
    states, here = round(table.shape[1] ** (1 / length)), jnp.arange(length)

    def of_state(z: Array, t: Array, end: Array) -> Array:
        """Outputs [B, L, V] of positions that see z [B, L, L or 1] before `end` [L]."""
        seen = jnp.where(here[None, :, None] < end, jnp.broadcast_to(z, (*z.shape[:2], length)), 0)
        code = jnp.sum(seen * states ** here[:, None], axis=1)
        return jnp.einsum("fblv,blf->blv", table[:, code, here], _functions(t))

    def features(z: Array | Mixture, t: Array) -> Array:
        z = strongest(z)
        end = here + 1 if causal else jnp.full(length, length)
        return of_state(z[:, :, None], jnp.broadcast_to(t[:, None], z.shape), end)

    def of_blocks(z: Array, t: Array, clean: Array, block: int, *_) -> Array:
        """Outputs of positions at the times t [B, G] of their blocks."""
        own = here // block
        shown = jnp.where(own[:, None] == own, z[:, :, None], clean[:, :, None])
        return of_state(shown, t[:, own], (own + 1) * block)

    def swapped(x: Array, group: Array) -> Array:
        """Outputs for each of two groups of tokens with that group masked, at a common time."""
        t = jnp.full(len(x), 0.5)
        first, second = (features(jnp.where(part, symbols, x), t) for part in (group, ~group))
        return jnp.where(group[..., None], first, second)

    def of_seen(z: Array, seen: Array) -> Array:
        """Outputs of positions that see z where `seen` [B, L, L] is true, and masks elsewhere."""
        shown = jnp.where(jnp.swapaxes(seen, 1, 2), z[:, :, None], symbols)
        return of_state(shown, jnp.zeros(z.shape), jnp.full(length, length))

    def in_order(z: Array, t: Array, rank: Array, index: Array | None) -> Array:
        """Outputs of all positions, whatever the index; each sees those before it in the order."""
        del t, index
        return of_seen(z, (rank[:, None] < rank[:, :, None]) | jnp.eye(length, dtype=bool))

    def predictions(x: Array, t: Array, rank: Array, round: Array) -> Array:
        """Outputs of masks that see earlier rounds; other masks are indistinguishable."""
        del t, rank
        return of_seen(x, round[:, None] < round[:, :, None])

    def streams(z: Array, x: Array, t: Array, rank: Array, round: Array, index: Array | None):
        """Outputs of the symbols of z, then of the tokens of x, which see x up to themselves."""
        parts = _shown(z, x, rank, round, symbols)
        whole = jnp.full(length, length)
        h = jnp.concatenate([of_state(each, jnp.zeros(z.shape), whole) for each in parts], axis=1)
        return h if index is None else jnp.take_along_axis(h, index[..., None], axis=1)

    blocks = Blockwise(of_blocks, None, None)
    ordered = Ordered(in_order, predictions, None, None, streams=streams)
    return Denoiser(features, lambda h: h, blocks=blocks, swapped=swapped, ordered=ordered)


def _shown(z: Array, x: Array, rank: Array, round: Array, mask: int) -> tuple[Array, Array]:
    """Returns what each noisy symbol and each clean token of `streams` sees: [B, L, L of them]."""
    here = jnp.arange(z.shape[1])
    before = (rank[:, :, None] < rank[:, None]) | jnp.eye(len(here), dtype=bool)
    noisy = jnp.where(before & (round[:, :, None] == round[:, None]), z[:, :, None], mask)
    noisy = jnp.where(round[:, :, None] < round[:, None], x[:, :, None], noisy)
    return noisy, jnp.where(here[:, None] <= here, x[:, :, None], mask)


def _functions(t: Array) -> Array:
    """Returns 1, t, log t and log(1 - t): [..., FEATURES]."""
    least = 1e-7
    logs = (jnp.log(jnp.maximum(t, least)), jnp.log(jnp.maximum(1.0 - t, least)))
    return jnp.stack([jnp.ones_like(t), t, *logs], axis=-1)
