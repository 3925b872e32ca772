"""A training loss: plain cross-entropy under noise."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from md4_jax.objectives.noising import noised
from md4_jax.objectives.token_nats import counted, token_nats
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Process


@dataclasses.dataclass(frozen=True)
class CleanCrossEntropy:
    """E_t E_q[ sum_n -log mu_n(z_t, t)[x_n] ] for any process: for training, no bound."""

    needs: ClassVar[Needs] = Needs((Process,))

    def is_bound(self, process: Any) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: Process, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        """(nats [B], the part of tokens that noise has changed)."""
        z, t = noised(process, batch, u, keys)
        nats = counted(token_nats(denoiser(z, t), batch.tokens), batch)
        return nats, {"changed": jnp.mean(z != batch.tokens, axis=1, dtype=jnp.float32)}
