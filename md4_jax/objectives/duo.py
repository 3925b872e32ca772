"""Training loss of Duo's curriculum: docs/families/uniform.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.noising import noised, prompted
from md4_jax.objectives.score_entropy import with_ends
from md4_jax.objectives.token_nats import counted
from md4_jax.objectives.uniform_elbo import UniformELBO, uniform_nats
from md4_jax.processes import duality
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.protocols import Array, Batch, Denoiser, Mixture, Needs, UserError


@dataclasses.dataclass(frozen=True)
class Duo:
    """Integrand of `uniform_elbo` at z = argmax(w), with softmax(w / tau) as network input.

    w = a onehot(x) + s noise is Gaussian (Duo, arXiv:2506.10892), so that z is distributed as with
    uniform noise. The network's input has more information than z: symbols that are almost largest.

        L = (high - low) E_gamma[ -(d alpha / d gamma) / alpha * nats(z, mu) ],

    with gamma = log(s^2 / a^2) uniform between low and high. It is part of the bound's integral,
    but for a network that sees more than z. So it is a training-only loss, not a bound.

    temperature  tau of the softmax
    kept         number of largest symbols other than x in the softmax; the others are left out
    until        number of steps after which the loss is `uniform_elbo`; 0: never
    """

    needs: ClassVar[Needs] = Needs(
        (RedrawsUniformly,),
        parametrisations=("joint", "mixture"),
        mixtures=True,
        why="its outputs must be a distribution over x",
    )

    temperature: float = 1e-3
    low: float = -3.55
    high: float = -1.85
    kept: int = 4
    until: int = 0

    def __post_init__(self):
        if self.temperature <= 0:
            raise UserError(f"objective.temperature must be above 0, not {self.temperature}")
        if not self.low < self.high:
            raise UserError(f"objective.low={self.low} must be below objective.high={self.high}")
        for key, least in (("kept", 1), ("until", 0)):
            if getattr(self, key) < least:
                raise UserError(
                    f"objective.{key} must be at least {least}, not {getattr(self, key)}"
                )

    @property
    def afterwards(self) -> "AfterDuo":
        """The loss of the steps from `until` on."""
        return AfterDuo()

    def is_bound(self, process: RedrawsUniformly) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: RedrawsUniformly, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        gamma, size = self.low + u * (self.high - self.low), process.vocab_size
        symbols, heights = duality.leaders(
            keys, batch.tokens, gamma, size, min(self.kept, size - 1)
        )
        chosen = jnp.argmax(heights, axis=-1)[..., None]
        z = prompted(batch, jnp.take_along_axis(symbols, chosen, axis=-1)[..., 0])
        weights = self.weights(heights, gamma)
        # Tokens that do not count stay clean: x comes first.
        weights = jnp.where(batch.loss_mask[..., None], weights, jnp.eye(heights.shape[-1])[0])
        nats = self.loss_at(denoiser, process, batch, z, Mixture(symbols, weights), gamma)
        return nats, _changed(z, batch)

    def weights(self, heights: Array, gamma: Array) -> Array:
        """Returns softmax(w / tau) over the symbols that were drawn: [B, L, K] -> [B, L, K]."""
        scale = jnp.sqrt(jax.nn.sigmoid(gamma)) / self.temperature
        below = heights - jnp.max(heights, axis=-1, keepdims=True)
        return jax.nn.softmax(scale[:, None, None] * below, axis=-1)

    def loss_at(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        batch: Batch,
        z: Array,
        seen: Mixture,
        gamma: Array,
    ) -> Array:
        """Returns the integrand [B] at z [B, L] and gamma [B]; `seen` is the network's input."""
        at = duality.level(gamma, process.vocab_size)
        outputs = denoiser(seen, process.schedule.inverse(at.noise))
        odds = process.vocab_size * at.alpha / at.noise
        nats_BxL = uniform_nats(process, outputs, z, batch.tokens, odds[:, None])
        return (self.high - self.low) * -at.slope / at.alpha * counted(nats_BxL, batch)


@dataclasses.dataclass(frozen=True)
class AfterDuo(UniformELBO):
    """The bound, with the diagnostics of the curriculum."""

    def __call__(
        self, denoiser: Denoiser, process: RedrawsUniformly, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        z, t = noised(process, batch, u, keys)
        nats, _ = with_ends(self.loss_at(denoiser, process, batch, z, t), process, batch)
        return nats, _changed(z, batch)


def _changed(z: Array, batch: Batch) -> dict[str, Array]:
    """Returns the fraction of tokens that noise has changed [B], for the log."""
    return {"changed": jnp.mean(z != batch.tokens, axis=1, dtype=jnp.float32)}
