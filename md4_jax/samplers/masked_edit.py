"""Sampling of variable length that edits a text of masks: docs/samplers.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.lengths import EditsMasks
from md4_jax.protocols import Array, Denoiser, Needs, pytree
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_from
from md4_jax.samplers.edit import merged
from md4_jax.samplers.insertion import allowed
from md4_jax.samplers.transforms import Transform


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class MaskedEdit:
    """Replaces and deletes masks, and inserts tokens (Edit Flows, arXiv:2506.09487).

    In a step from t to s each mask is edited with probability r = P(the edit has been made at s |
    it has not been made at t), which is exact: it is deleted with the network's probability, and
    otherwise replaced by a token. Gap g gets one token with probability min(1, y_g r), as in
    `Edit`. A sample that becomes too long is truncated. A prompt is the beginning of the text.
    """

    needs: ClassVar[Needs] = Needs((EditsMasks,), gaps=True, edits=True)
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: EditsMasks, chain: Chain, s: Array, t: Array, keys
    ) -> Chain:
        of_edit, of_deletion, of_gap, of_token, of_mask = split_keys(keys, 5)
        rows, length = chain.z.shape
        times, share = jnp.full(rows, t), process.insert_probability(s, t)
        h, replacing, outputs = denoiser.edits(chain.z, times)
        edited = (chain.z == process.mask_id) & (uniforms(of_edit, length) < share)
        deletes = uniforms(of_deletion, length) < jax.nn.sigmoid(outputs[:, :-1, 1])
        mean = jnp.exp(process.log_missing(outputs[..., 0], times)) * share
        new = (uniforms(of_gap, length + 1) < mean) & allowed(process, chain)
        gap = jnp.broadcast_to(jnp.arange(length + 1), new.shape)
        fresh, fresh_confidence = draw_from(denoiser, self.transform, h, gap, of_token)
        tokens, token_confidence = draw_from(
            denoiser, self.transform, replacing[:, :-1], gap[:, :-1], of_mask
        )
        z = jnp.where(edited, tokens, chain.z)
        confidence = jnp.where(edited, token_confidence, chain.confidence)
        kept = (z != process.absent_id) & ~(edited & deletes)
        z, confidence = (
            merged(*parts, new, kept)
            for parts in ((fresh, z, process.absent_id), (fresh_confidence, confidence, 0.0))
        )
        return evaluated(chain, z, confidence)

    def finish(self, denoiser: Denoiser, process: EditsMasks, chain: Chain, keys: Array) -> Chain:
        """Returns the chain unchanged: the last step has edited all masks."""
        return chain
