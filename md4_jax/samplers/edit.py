"""Sampling of texts that begin empty, and into which tokens are inserted: docs/samplers.md."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import InsertsTokens
from md4_jax.processes.scheduled import uniforms
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_from
from md4_jax.samplers.insertion import allowed, fitting, opened
from md4_jax.samplers.transforms import Transform


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Edit:
    """Inserts tokens, at most one in each gap and step (Edit Flows, arXiv:2506.09487).

    In a step from t to s gap g gets a token of Q_g with probability min(1, y_g r), where r is
    P(a token is present at s | it is absent at t) and y_g the network's expected number of missing
    tokens. A sample that gets too long is cut at its end. A prompt is the beginning of the text,
    and nothing is inserted before its end.
    """

    needs: ClassVar[Needs] = Needs((InsertsTokens,), gaps=True)
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: InsertsTokens, chain: Chain, s: Array, t: Array, keys
    ) -> Chain:
        of_gap, of_token = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        rows, length = chain.z.shape
        times = jnp.full(rows, t)
        h, outputs = denoiser.gaps(chain.z, times)
        mean = jnp.exp(process.log_missing(outputs, times)) * process.insert_probability(s, t)
        new = (uniforms(of_gap, length + 1) < mean) & allowed(process, chain)
        new = fitting(process, chain, new.astype(jnp.int32))
        gap = jnp.broadcast_to(jnp.arange(length + 1), new.shape)
        tokens, confidence = draw_from(denoiser, self.transform, h, gap, of_token)
        chain = opened(process, chain, new, process.absent_id)
        # The new token of gap g lies behind the g old ones and those inserted before it.
        place = jnp.where(new > 0, gap + jnp.cumsum(new, axis=1) - 1, length)
        row = jnp.arange(rows)[:, None]
        z = chain.z.at[row, place].set(tokens, mode="drop")
        return evaluated(chain, z, chain.confidence.at[row, place].set(confidence, mode="drop"))

    def finish(
        self, denoiser: Denoiser, process: InsertsTokens, chain: Chain, keys: Array
    ) -> Chain:
        """Returns the chain: what is still missing at t = 0 is missing in the sample."""
        return chain
