"""Sampling of variable length that inserts tokens into empty texts: docs/samplers.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.lengths import InsertsTokens
from md4_jax.protocols import Array, Denoiser, Needs, pytree
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_from
from md4_jax.samplers.insertion import allowed
from md4_jax.samplers.transforms import Transform


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Edit:
    """Inserts tokens, at most one in each gap and step (Edit Flows, arXiv:2506.09487).

    In a step from t to s gap g gets a token of Q_g with probability min(1, y_g r), where r is
    P(a token is present at s | it is absent at t) and y_g the network's expected number of missing
    tokens. A sample that becomes too long is truncated. A prompt is the beginning of the text, and
    nothing is inserted before its end.
    """

    needs: ClassVar[Needs] = Needs((InsertsTokens,), gaps=True)
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: InsertsTokens, chain: Chain, s: Array, t: Array, keys
    ) -> Chain:
        of_gap, of_token = split_keys(keys)
        rows, length = chain.z.shape
        times = jnp.full(rows, t)
        h, outputs = denoiser.gaps(chain.z, times)
        mean = jnp.exp(process.log_missing(outputs, times)) * process.insert_probability(s, t)
        new = (uniforms(of_gap, length + 1) < mean) & allowed(process, chain)
        gap = jnp.broadcast_to(jnp.arange(length + 1), new.shape)
        tokens, confidence = draw_from(denoiser, self.transform, h, gap, of_token)
        kept = chain.z != process.absent_id
        z = merged(tokens, chain.z, process.absent_id, new, kept)
        return evaluated(chain, z, merged(confidence, chain.confidence, 0.0, new, kept))

    def finish(
        self, denoiser: Denoiser, process: InsertsTokens, chain: Chain, keys: Array
    ) -> Chain:
        """Returns the chain unchanged: tokens that are missing at t = 0 remain missing."""
        return chain


def merged(fresh: Array, old: Array, empty: float, new: Array, kept: Array) -> Array:
    """Merges fresh [B, L + 1] where `new` and old [B, L] where `kept`, left-aligned: [B, L].

    fresh[b, g] comes before old[b, g]. Rows are padded with `empty`. If there is no room for all,
    the last new ones are dropped.
    """
    length = old.shape[1]
    room = length - jnp.sum(kept, axis=1, keepdims=True)
    before = jnp.minimum(jnp.cumsum(new, axis=1), room)
    new = jnp.diff(before, axis=1, prepend=0) > 0
    kept_before = jnp.pad(jnp.cumsum(kept, axis=1), ((0, 0), (1, 0)))
    of_old = jnp.where(kept, kept_before[:, :-1] + before[:, :-1], length)
    of_new = jnp.where(new, kept_before + before - 1, length)
    row = jnp.arange(len(old))[:, None]
    out = jnp.full_like(old, empty).at[row, of_old].set(old, mode="drop")
    return out.at[row, of_new].set(fresh.astype(old.dtype), mode="drop")
