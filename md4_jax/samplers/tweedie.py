"""The analytic (Tweedie) step from scores: docs/samplers.md."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RedrawsUniformly, RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers import reveal
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.transforms import Transform


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Tweedie:
    """p(y) = [exp(-d Q) s]_y exp(d Q)(z_t, y) at each position, d the noise between s and t.

    SEDD (arXiv:2310.16834, section 4.2): with the exact score s it is the exact law of each
    token of z_s given all of z_t, and their product is the best that independent tokens can
    do (identities T04 to T07). On masks it is ancestral sampling (T06). On uniform noise the
    score is made from the network's outputs as the process's parametrisation says, and the step
    is again that of ancestral sampling: the scores are linear in the weights of x.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks, RedrawsUniformly))
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks | RedrawsUniformly,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        if isinstance(process, RevealsMasks):
            return reveal.step_by_chance(self, denoiser, process, chain, s, t, keys)
        times = jnp.full(chain.z.shape[:1], t)
        outputs = self.transform(denoiser(chain.z, times))
        logits = process.reverse_logits(outputs, chain.z, jnp.full_like(times, s), times)
        z = draw_token(keys, logits)
        return evaluated(chain, z, probability(logits, z))

    def chance(self, process: RevealsMasks, s: Array, t: Array) -> Array:
        """P(a mask is revealed) = (alpha_s - alpha_t) / (1 - alpha_t), by identity T06."""
        return process.reveal_probability(s, t)
