"""Sampling of uniform noise that accepts confident tokens and replaces the others by noise."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Conditioned, Denoiser, Needs, UserError, pytree
from md4_jax.runtime.scopes import likely
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, entropy, probability
from md4_jax.samplers.transforms import Transform, predicts_ratios


class Memory(NamedTuple):
    """State that one step passes to the next; the batch axis is first.

    likeliest   int32 [B, N, L], the most likely tokens of the last N steps, -1 before the first
    confidence  float32 [B, L], probabilities of those of the last step
    settled     bool [B], whether a sequence takes no more steps
    signal      [B, L, D], of `Conditioned`; None for a network without self-conditioning
    """

    likeliest: Array
    confidence: Array
    settled: Array
    signal: Array | None


@pytree("transform", "entropy_bound", "confidence_threshold", "cooling")
@dataclasses.dataclass(frozen=True)
class EntropyBound:
    """Accepts the drawn tokens of least entropy and replaces all others by new uniform noise.

    A step draws a token everywhere and accepts as many as the EB-Sampler does (arXiv:2505.24857):
    as many as possible while the sum of their entropies, without the largest, is at most
    `entropy_bound` nats. The result is the most likely tokens of the last step. This is the sampler
    of DiffusionGemma (google-deepmind/gemma, transformers 5.24). A network with self-conditioning
    also reads the prediction of the previous step (arXiv:2208.04202).

    cooling  the temperature falls from sample.temperature at t = 1 to this fraction of it at t = 0
    stability_threshold, confidence_threshold  a sequence stops when its most likely tokens have not
             changed for so many steps, and its mean entropy is below so many nats; 0: never

    The samples do not have the distribution of the model.
    """

    needs: ClassVar[Needs] = Needs((RedrawsUniformly,))
    level: ClassVar[None] = None

    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    cooling: float = 0.5
    transform: Transform = Transform()

    def __post_init__(self):
        for key in ("entropy_bound", "confidence_threshold"):
            value = getattr(self, key)
            if isinstance(value, float | int) and value < 0:
                raise UserError(f"sample.{key} must not be negative, not {value}")
        if self.stability_threshold < 0:
            raise UserError(
                f"sample.stability_threshold must not be negative, not {self.stability_threshold}"
            )
        if isinstance(self.cooling, float | int) and not 0 <= self.cooling <= 1:
            raise UserError(f"sample.cooling must lie in [0, 1], not {self.cooling}")

    def begin(self, denoiser: Denoiser, process: RedrawsUniformly, chain: Chain) -> Memory:
        """Returns the memory for the first step."""
        rows, length = chain.z.shape
        signal = None
        if denoiser.recall is not None:
            called = lambda z: denoiser.recall(denoiser(z, jnp.zeros(rows)))  # noqa: E731
            shape = jax.eval_shape(called, chain.z)
            signal = jnp.zeros(shape.shape, shape.dtype)
        steps = max(1, self.stability_threshold)
        none = jnp.full((rows, steps, length), -1, chain.z.dtype)
        return Memory(
            none, jnp.zeros_like(chain.confidence), jnp.all(chain.prompt_mask, axis=1), signal
        )

    def __call__(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        del s

        def step(chain: Chain) -> Chain:
            after = self._step(denoiser, process, chain, t, keys)
            stays = chain.memory.settled
            return jax.tree.map(lambda old, new: _where(stays, old, new), chain, after)

        with likely():
            return jax.lax.cond(jnp.all(chain.memory.settled), lambda chain: chain, step, chain)

    def _step(
        self, denoiser: Denoiser, process: RedrawsUniformly, chain: Chain, t: Array, keys: Array
    ) -> Chain:
        token_keys, noise_keys = split_keys(keys)
        memory, prompt = chain.memory, chain.prompt_mask
        read = chain.z if memory.signal is None else Conditioned(chain.z, memory.signal)
        times = jnp.full(len(chain.z), t)
        outputs = denoiser(read, times)
        plain = process.clean_logits(outputs, chain.z, times)
        warmth = self.cooling + (1.0 - self.cooling) * t
        if predicts_ratios(process):
            logits = self.transform(plain / warmth)
        else:
            logits = process.clean_logits(self.transform(outputs / warmth), chain.z, times)
        drawn, likeliest = draw_token(token_keys, logits), jnp.argmax(logits, axis=-1)
        entropies = jnp.where(prompt, 0.0, entropy(logits))
        accepted = least(entropies, self.entropy_bound)
        z = jnp.where(accepted, drawn, process.prior(noise_keys, chain.z.shape[1]))
        confidence = jnp.where(accepted, probability(plain, drawn), 0.0)
        likeliest = likeliest.astype(chain.z.dtype)
        return chain._replace(
            z=z.astype(chain.z.dtype),
            confidence=confidence,
            evaluations=chain.evaluations + 1,
            memory=Memory(
                jnp.concatenate([memory.likeliest, likeliest[:, None]], axis=1)[:, 1:],
                probability(plain, likeliest),
                self._done(memory.likeliest, likeliest, entropies, prompt),
                None if memory.signal is None else denoiser.recall(logits),
            ),
        )

    def _done(self, before: Array, now: Array, entropies: Array, prompt: Array) -> Array:
        """Returns whether each sequence has settled, bool [B]."""
        same = jnp.all((before == now[:, None]) | prompt[:, None], axis=(1, 2))
        open_B = jnp.sum(~prompt, axis=1)
        certain = jnp.sum(entropies, axis=1) < self.confidence_threshold * open_B
        return certain & (same if self.stability_threshold else True)

    def finish(
        self, denoiser: Denoiser, process: RedrawsUniformly, chain: Chain, keys: Array
    ) -> Chain:
        """Takes the most likely tokens of the last step."""
        return chain._replace(z=chain.memory.likeliest[:, -1], confidence=chain.memory.confidence)


def least(values: Array, bound: Array | float) -> Array:
    """Marks the smallest values [B, L] whose sum, without the largest of them, is within bound."""
    order = jnp.argsort(values, axis=1)
    ascending = jnp.take_along_axis(values, order, axis=1)
    within = jnp.cumsum(ascending, axis=1) - ascending <= bound
    return jnp.take_along_axis(within, jnp.argsort(order, axis=1), axis=1)


def _where(chosen: Array, one: Array, other: Array) -> Array:
    """Selects rows of `one` where chosen [B], and of `other` elsewhere."""
    return jnp.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), one, other)
