"""Bound of Edit Flows with insertions, for texts of any length: docs/families/edit_flows.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.flexmdm import gap_excess, texts, with_orders
from md4_jax.objectives.head import at_noise
from md4_jax.objectives.noising import SMALLEST_TIME
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.deletion import Deleted
from md4_jax.processes.edits import Edited
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.processes.lengths import InsertsTokens
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class EditFlow:
    """Bound of Edit Flows on -log p of a text with its length, in nats (arXiv:2506.09487).

    L(x) = int_0^1 v_t E_q[ sum_g y_g - sum_i (1 + log y_g(i) + log Q_g(i)[x_i]) ] dt
         = int_0^1 v_t E_q[ sum_i -log Q_g(i)[x_i] + sum_g D(c_g, y_g) ] dt - K(x),

    where sums over i are over missing tokens, and g(i) is the gap of token i. c_g is the number of
    missing tokens in gap g and y_g the network's expectation of it. Q_g is the network's
    distribution of the token inserted there. v = -alpha' / (1 - alpha), K(x) is that of FlexMDM,
    and D(c, y) = y - c + c log(c / y). The second form is computed: D is 0 if y_g = c_g.
    """

    needs: ClassVar[Needs] = Needs(
        (InsertsTokens,),
        time=True,
        gaps=True,
        why="how many tokens are missing depends on t",
    )
    time_power: ClassVar[int] = 2

    def is_bound(self, process: InsertsTokens) -> bool:
        return process.is_complete

    def __call__(
        self, denoiser: Denoiser, process: InsertsTokens, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        t = jnp.maximum(u, SMALLEST_TIME)
        x, fixed = texts(process, batch)
        noised = process.delete(keys, x, t, fixed)
        tokens, insertion = self.terms_at(denoiser, process, batch, noised, t)
        return with_orders(process, batch, noised.z, tokens=tokens, insertion=insertion)

    def terms_at(
        self, denoiser: Denoiser, process: InsertsTokens, batch: Batch, noised: Deleted, t: Array
    ) -> tuple[Array, Array]:
        """Returns the integrands of the tokens and of their number at (z, t), each [B]."""
        h_BxMxD, outputs = denoiser.gaps(noised.z, t)
        nats = inserted_nats(denoiser, h_BxMxD, noised, batch)
        excess = gap_excess(process, batch, noised, outputs, t)
        weight = reveal_rate(process.schedule, t)
        return weight * jnp.sum(nats, axis=1), weight * excess


def inserted_nats(
    denoiser: Denoiser, h_BxMxD: Array, noised: Deleted | Edited, batch: Batch
) -> Array:
    """Returns -log Q(x_i) of each missing token i of x in its gap, and 0 elsewhere: [B, L]."""
    # All tokens that are missing in a gap have the same distribution.
    h_BxLxD = jnp.take_along_axis(h_BxMxD, noised.gap[..., None], axis=1)
    rows = (batch.tokens,)
    return at_noise(denoiser, h_BxLxD, noised.deleted, reduce=token_nats, padded=True, rows=rows)
