"""Bound of Edit Flows from masks: docs/families/edit_flows.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.edit_flow import inserted_nats
from md4_jax.objectives.flexmdm import gap_excess, order_nats, texts
from md4_jax.objectives.head import at_noise
from md4_jax.objectives.noising import SMALLEST_TIME
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.edits import Edited
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.processes.lengths import EditsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class MaskedEditFlow:
    """Bound of Edit Flows from masks on -log p of a text with its length, in nats.

    It is that of `EditFlow`, in which each mask n of z_t also costs v_t times

        -log d_n if it is to be deleted,  -log (1 - d_n) - log R_n[x_n] if it becomes x_n,

    minus log C, where C is the number of alignments of x with the masks; one of them is drawn. d_n
    is the network's probability of deletion, and R_n its distribution of the token that replaces
    the mask (arXiv:2506.09487; the bound: docs/families/edit_flows.md).
    """

    needs: ClassVar[Needs] = Needs(
        (EditsMasks,),
        time=True,
        gaps=True,
        edits=True,
        why="how many tokens are missing depends on t",
    )
    time_power: ClassVar[int] = 2

    def is_bound(self, process: EditsMasks) -> bool:
        return process.is_complete

    def __call__(
        self, denoiser: Denoiser, process: EditsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        t = jnp.maximum(u, SMALLEST_TIME)
        x, fixed = texts(process, batch)
        noised = process.edited(keys, x, t, fixed)
        terms = self.terms_at(denoiser, process, batch, noised, t)
        # A row without counted tokens is padding of a batch, and costs nothing.
        counts = jnp.any(batch.loss_mask, axis=1)
        tokens, insertion, deletion = (jnp.where(counts, term, 0.0) for term in terms)
        orders = -order_nats(noised.created)
        alignment = jnp.where(counts, -noised.alignment, 0.0)
        extra = {
            "tokens": tokens,
            "insertion": insertion,
            "deletion": deletion,
            "orders": orders,
            "alignment": alignment,
            "present": jnp.mean(noised.z != process.absent_id, axis=1, dtype=jnp.float32),
        }
        return tokens + insertion + deletion + orders + alignment, extra

    def terms_at(
        self, denoiser: Denoiser, process: EditsMasks, batch: Batch, noised: Edited, t: Array
    ) -> tuple[Array, Array, Array]:
        """Returns the integrands of tokens, insertions and deletions at (z, t), each [B]."""
        h_BxMxD, replacing_BxMxD, outputs = denoiser.edits(noised.z, t)
        masks = noised.z == process.mask_id
        targets = jnp.take_along_axis(batch.tokens, noised.source, axis=1)
        tokens = inserted_nats(denoiser, h_BxMxD, noised, batch) + at_noise(
            denoiser, replacing_BxMxD[:, :-1], masks & ~noised.surplus,
            reduce=token_nats, padded=True, rows=(targets,),
        )  # fmt: skip
        deletes = outputs[:, :-1, 1]
        wrong = jax.nn.softplus(jnp.where(noised.surplus, -deletes, deletes))
        deletion = jnp.sum(jnp.where(masks, wrong, 0.0), axis=1)
        insertion = gap_excess(process, batch, noised, outputs[..., 0], t)
        weight = reveal_rate(process.schedule, t)
        return weight * jnp.sum(tokens, axis=1), weight * insertion, weight * deletion
