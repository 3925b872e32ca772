"""Tweedie's analytic step from scores: docs/samplers.md."""

import dataclasses
from typing import ClassVar

from md4_jax.processes.capabilities import RedrawsUniformly, RevealsMasks
from md4_jax.protocols import Needs, pytree
from md4_jax.samplers.ancestral import Ancestral


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Tweedie(Ancestral):
    """Draws from p(y) = [exp(-d Q) s]_y exp(d Q)(z_t, y) at each position, d the noise of the step.

    SEDD (arXiv:2310.16834, section 4.2). With the exact score s, each token of z_s has its exact
    distribution given z_t. It is the best step that draws tokens independently (identities T04 to
    T07). With masks it is ancestral sampling (T06). With uniform noise the process computes the
    score from the network's outputs. The step is linear in the weights of x, so it is ancestral
    sampling too.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks, RedrawsUniformly))
