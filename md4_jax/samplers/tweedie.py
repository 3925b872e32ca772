"""The analytic (Tweedie) step from scores: docs/samplers.md."""

import dataclasses
import functools
from typing import ClassVar

import jax

from md4_jax.processes.capabilities import RedrawsUniformly, RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.transforms import Transform


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Tweedie:
    """p(y) = [exp(-d Q) s]_y exp(d Q)(z_t, y) at each position, d the noise between s and t.

    SEDD (arXiv:2310.16834, section 4.2): with the exact score s it is the exact law of each
    token of z_s given all of z_t, and their product is the best that independent tokens can
    do (identities T04 to T07). On masks it is ancestral sampling (T06). On uniform noise the
    score is made from the network's outputs as the process's parametrisation says. Since it is
    linear in the weights of x, the step is that of ancestral sampling again.
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
        return Ancestral(self.transform)(denoiser, process, chain, s, t, keys)

    def reveal_probability(self, process: RevealsMasks, s: Array, t: Array) -> Array:
        """P(a mask is revealed) = (alpha_s - alpha_t) / (1 - alpha_t), by identity T06."""
        return process.reveal_probability(s, t)
