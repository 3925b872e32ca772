"""Predictor-corrector sampling: docs/samplers.md."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import HasForwardRates, RevealsMasks
from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.runtime.scopes import turns
from md4_jax.samplers import reveal
from md4_jax.samplers.ancestral import Ancestral, evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.jumps import Euler, TauLeaping, moves
from md4_jax.samplers.transforms import Transform, check_exclude

PREDICTORS = {"ancestral": Ancestral, "euler": Euler, "tau_leaping": TauLeaping}


@pytree("transform", "size")
@dataclasses.dataclass(frozen=True)
class PredictorCorrector:
    """Takes a reverse step to s, then `corrections` steps of a chain that leaves p_s unchanged.

    tauLDR (arXiv:2205.14987, section 4.4): the chain with rates R_s + Rhat_s, forward and reverse,
    has the stationary distribution p_s (identity T03), so it corrects errors of earlier steps. Each
    correction runs it for the time h = size (t - s), with one network evaluation. There are none
    at s = 0.

    Masks: a token becomes a mask with probability (1 - alpha) e, and a mask a token with alpha e,
    where e = 1 - exp(-h (-alpha')/(alpha (1 - alpha))). This is exact for one position, and the
    expected number of masks stays. Other noise: each position makes its first jump in the time h.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks, HasForwardRates))
    level: ClassVar[None] = None

    predictor: str = "ancestral"
    corrections: int = 1
    size: float = 1.0
    transform: Transform = Transform()

    def __post_init__(self):
        if self.predictor not in PREDICTORS:
            known = ", ".join(PREDICTORS)
            raise UserError(f"sample.predictor must be one of {known}, not {self.predictor!r}")
        if self.corrections < 1:
            raise UserError(f"sample.corrections must be at least 1, not {self.corrections}")
        if isinstance(self.size, float | int) and not self.size > 0:
            raise UserError(f"sample.size must be positive, not {self.size}")

    @property
    def evaluations_each(self) -> int:
        """Network evaluations of a step of the grid."""
        return 1 + self.corrections

    def check(self, process: Any) -> None:
        """Raises UserError for excluded symbols that a predictor of jumps may leave."""
        if self.predictor != "ancestral":
            check_exclude(self.transform, process, "predictor_corrector")

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        predict = PREDICTORS[self.predictor](transform=self.transform)
        chain = predict(denoiser, process, chain, s, t, fold_keys(keys, 0))

        def body(index: Array, chain: Chain) -> Chain:
            return self.correct(
                denoiser, process, chain, s, self.size * (t - s), fold_keys(keys, index)
            )

        count = jnp.where(s > 0, self.corrections, 0)
        with turns(self.corrections):
            return jax.lax.fori_loop(1, count + 1, body, chain)

    def correct(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, h: Array, keys: Array
    ) -> Chain:
        """Runs the chain with rates R_s + Rhat_s for the time h."""
        if isinstance(process, RevealsMasks):
            return self._masks(denoiser, process, chain, s, h, keys)
        times = jnp.full(chain.z.shape[:1], s)
        outputs = self.transform(denoiser(chain.z, times))
        rates = process.reverse_rates(outputs, chain.z, times)
        rates = rates + process.beta(times)[:, None, None] * process.forward_rates(chain.z)
        leaves = -jnp.expm1(-h * jnp.sum(rates, axis=-1))
        z, confidence = moves(rates, leaves, chain.z, keys)
        return evaluated(chain, z, jnp.where(z == chain.z, chain.confidence, confidence))

    def _masks(self, denoiser, process: RevealsMasks, chain: Chain, s, h, keys) -> Chain:
        alpha, noise = process.schedule.alpha(s), process.schedule.one_minus_alpha(s)
        tiny = jnp.finfo(jnp.float32).tiny
        rate = -process.schedule.dalpha(s) / jnp.maximum(alpha * noise, tiny)
        changed = -jnp.expm1(-h * rate)
        both = noise * changed, alpha * changed
        return reveal.exchange(denoiser, self.transform, process, chain, both, t=s, keys=keys)
