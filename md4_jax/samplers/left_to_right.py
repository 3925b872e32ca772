"""Sampling of a causal model, one token after another: docs/equations.md, Autoregressive."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.masking import Masking
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers.transforms import Transform, draw_token


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LeftToRight:
    """x_n ~ p(x_n | x_{<n}), n = 0, 1, ..., of a network trained by `autoregressive`.

    A step t -> s fills the positions from round(L (1 - t)) up to round(L (1 - s)), one network
    evaluation each, so that every grid gives the same exact law in L evaluations; steps and
    grid say only how many are filled at once. The network reads [m, z_0, ..., z_{L-2}] at
    time 0. Positions that are no mask are kept. Every evaluation is of the whole sequence.
    """

    needs: ClassVar[Needs] = Needs((Masking,), causal=True)

    transform: Transform = Transform()

    def __call__(
        self, denoiser: Denoiser, process: Masking, z: Array, s: Array, t: Array, keys: Array
    ) -> Array:
        first, end = (jnp.round(z.shape[1] * (1.0 - time)).astype(jnp.int32) for time in (t, s))
        return self._fill(denoiser, process, z, keys, first, end)

    def evaluations(self, steps: int, length: int) -> int:
        """One network evaluation a token, whatever the steps."""
        return length

    def unfinished(self, process: Masking, z: Array) -> Array:
        """Whether a mask is left: never after a grid from 1 to 0."""
        return jnp.any(z == process.mask_id)

    def finish(self, denoiser: Denoiser, process: Masking, z: Array, keys: Array) -> Array:
        """What is left is drawn left to right."""
        return self._fill(denoiser, process, z, keys, jnp.int32(0), jnp.int32(z.shape[1]))

    def _fill(
        self, denoiser: Denoiser, process: Masking, z: Array, keys: Array, first: Array, end: Array
    ) -> Array:
        times = jnp.zeros(len(z))
        begin_Bx1 = jnp.full((len(z), 1), process.mask_id, z.dtype)

        def body(n: Array, z: Array) -> Array:
            here = jax.vmap(jax.random.fold_in, (0, None))(keys, n)
            shifted = jnp.concatenate([begin_Bx1, z[:, :-1]], axis=1)
            h_BxLxD = denoiser.features(shifted, times)
            h_Bx1xD = jax.lax.dynamic_slice_in_dim(h_BxLxD, n, 1, axis=1)
            drawn_Bx1 = draw_token(here, self.transform(denoiser.unembed(h_Bx1xD)))
            old_Bx1 = jax.lax.dynamic_slice_in_dim(z, n, 1, axis=1)
            new_Bx1 = jnp.where(old_Bx1 == process.mask_id, drawn_Bx1, old_Bx1)
            return jax.lax.dynamic_update_slice_in_dim(z, new_Bx1, n, axis=1)

        return jax.lax.fori_loop(first, end, body, jnp.asarray(z))
