"""Plain cross-entropy under noise, for training only: docs/families/uniform.md."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from md4_jax.objectives.head import at_positions
from md4_jax.objectives.noising import noised
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Loss E_{t ~ U(0, 1)} E_q[ sum_n -log mu_n(z_t, t)[x_n] ] with equal weights, in nats [B].

    It is D3PM's auxiliary term (arXiv:2107.03006, eq. 5) alone. Its optimum is the posterior of x_n
    given all of z_t, z_n included. Only the mixture form turns that into the right score and step.
    It also counts tokens that noise left unchanged, so it is no bound.
    """

    needs: ClassVar[Needs] = Needs(
        (RedrawsUniformly,),
        parametrisations=("mixture",),
        why="cross-entropy learns the posterior of x_n given all of z, which the plug-in form "
        "does not want",
    )

    def is_bound(self, process: Any) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: Any, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        changed = jnp.mean(z != batch.tokens, axis=1, dtype=jnp.float32)
        return self.loss_at(denoiser, process, batch, z, t), {"changed": changed}

    def loss_at(self, denoiser: Denoiser, process: Any, batch: Batch, z: Array, t: Array) -> Array:
        """Returns the cost of each sequence at (z, t) [B]."""
        h_BxLxD, rows = denoiser.features(z, t), (batch.tokens,)
        nats_BxL = at_positions(
            denoiser, h_BxLxD, batch.loss_mask, reduce=token_nats, padded=True, rows=rows
        )
        return jnp.sum(nats_BxL, axis=1)
