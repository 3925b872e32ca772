"""Remasking (ReMDM), in which tokens become masks again: docs/samplers.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.transforms import Transform

STRATEGIES = ("cap", "rescale", "confidence")


@pytree("transform", "eta")
@dataclasses.dataclass(frozen=True)
class Remask:
    """Ancestral sampling in which a token becomes a mask again with probability sigma.

    ReMDM (arXiv:2503.00307): sigma <= sigma_max = min(1, (1 - alpha_s)/alpha_t), and a mask is
    revealed with probability (alpha_s - (1 - sigma) alpha_t)/(1 - alpha_t). Then z_s given x is
    distributed as without remasking, and as in training.

    strategy    cap         sigma = min(eta, sigma_max)
                rescale     sigma = eta sigma_max
                confidence  sigma = eta sigma_max softmax(-confidence) of each token, where
                            confidence is the probability with which it was drawn. The expected
                            number of masks stays that of ancestral sampling
    since, until  tokens are remasked only in steps from t in (until, since]
    loop        alpha stays at `held` while t is in (until, since]; before and after, time runs
                faster to compensate
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    strategy: str = "cap"
    eta: float = 0.02
    since: float = 1.0
    until: float = 0.0
    loop: bool = False
    held: float = 0.9
    transform: Transform = Transform()

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise UserError(f"sample.strategy must be one of {known}, not {self.strategy!r}")
        if isinstance(self.eta, float | int) and not 0 <= self.eta <= 1:
            raise UserError(f"sample.eta must lie in [0, 1], not {self.eta}")
        if not 0 <= self.until < self.since <= 1:
            raise UserError(
                "sample.until and sample.since need 0 <= until < since <= 1, "
                f"not {self.until} and {self.since}"
            )
        if not 0 < self.held < 1:
            raise UserError(f"sample.held, a value of alpha, must lie in (0, 1), not {self.held}")
        if self.loop and not self.since < 1:
            raise UserError(
                f"sample.loop=True needs sample.since < 1, not {self.since}: alpha rises "
                "between t = 1 and sample.since"
            )

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        active = (t > self.until) & (t <= self.since)
        s, t = self.time(process, s), self.time(process, t)
        sigma = jnp.where(active, self.sigma(process, chain, s, t), 0.0)
        both = sigma, self._reveal(process, chain, sigma, s, t)
        return reveal.exchange(denoiser, self.transform, process, chain, both, t=t, keys=keys)

    def time(self, process: RevealsMasks, t: Array) -> Array:
        """Maps a time t of the grid to the time of the process; t itself without the loop."""
        if not self.loop:
            return t
        at = process.schedule.inverse(jnp.float32(1.0 - self.held))
        before = at + (1.0 - at) * (t - self.since) / (1.0 - self.since)
        after = at * t / max(self.until, 1e-30)
        return jnp.where(t > self.since, before, jnp.where(t > self.until, at, after))

    def sigma(self, process: RevealsMasks, chain: Chain, s: Array, t: Array) -> Array:
        """P(a token becomes a mask again): [] or [B, L]."""
        noise, signal = process.schedule.one_minus_alpha(s), process.schedule.alpha(t)
        most = jnp.minimum(1.0, noise / jnp.maximum(signal, jnp.finfo(jnp.float32).tiny))
        if self.strategy == "cap":
            return jnp.minimum(self.eta, most)
        if self.strategy == "rescale":
            return self.eta * most
        free = ~process.is_noise(chain.z) & ~chain.prompt_mask
        share = jax.nn.softmax(jnp.where(free, -chain.confidence, -jnp.inf), axis=1)
        return self.eta * most * jnp.where(free, share, 0.0)

    def _reveal(
        self, process: RevealsMasks, chain: Chain, sigma: Array, s: Array, t: Array
    ) -> Array:
        """P(a mask is revealed) = (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t): [] or [B, 1]."""
        rising = process.reveal_probability(s, t)
        if sigma.ndim == 0:
            noise = jnp.maximum(process.schedule.one_minus_alpha(t), jnp.finfo(jnp.float32).tiny)
            return rising + sigma * process.schedule.alpha(t) / noise
        masks = jnp.sum(process.is_noise(chain.z), axis=1, keepdims=True)
        return rising + jnp.sum(sigma, axis=1, keepdims=True) / jnp.maximum(masks, 1)
