"""Sampler of discrete flow matching: docs/families/flow_matching.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.processes.capabilities import HasFlow
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.transforms import Transform

RATES = ("integrated", "frozen")


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Flow:
    """Draws clean tokens x from the denoiser; each position may then jump towards its token.

    Discrete flow matching (arXiv:2407.15595; arXiv:2412.06264, MixtureDiscreteEulerSolver). With
    uniform noise the probability of a jump to y is mu_y p. With w = -alpha' / (1 - alpha) and
    h = t - s, the option `rate` determines p:

    integrated  1 - exp(-int_s^t w) = (alpha_s - alpha_t) / (1 - alpha_t), exact for given x
    frozen      1 - exp(-h w(t)), the published step, and 1 in the step to s = 0

    With metric-induced noise (arXiv:2412.03487) a step is `MetricPath.flow_step`, first order in h.
    With the optimal denoiser and small steps, z_s has the distribution of the process at s.
    """

    needs: ClassVar[Needs] = Needs((HasFlow,))
    level: ClassVar[None] = None

    rate: str = "integrated"
    transform: Transform = Transform()

    def __post_init__(self):
        if self.rate not in RATES:
            raise UserError(f"sample.rate must be one of {', '.join(RATES)}, not {self.rate!r}")

    def __call__(
        self, denoiser: Denoiser, process: HasFlow, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        clean_keys, jump_keys = split_keys(keys)
        before, now = (jnp.full(len(chain.z), time) for time in (s, t))
        outputs = self.transform(denoiser(chain.z, now))
        logits = process.clean_logits(outputs, chain.z, now)
        x = draw_token(clean_keys, logits)
        z = process.flow_step(jump_keys, chain.z, x, (before, now), self.rate == "frozen")
        kept = (z == chain.z) & (s > 0.0)
        return evaluated(chain, z, jnp.where(kept, chain.confidence, probability(logits, z)))
