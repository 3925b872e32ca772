"""Guidance towards a class by a classifier of noisy sequences: docs/samplers.md#classifiers.

    p(z_s | z_t, y) prop p(z_s | z_t) p(y | z_s)^gamma            (arXiv:2412.10193, D-CBG)

is drawn independently at each position: for each symbol v the classifier reads z_t with v there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.options.guide import ClassifierOptions
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.processes.outputs import widened
from md4_jax.protocols import (
    Accelerator,
    Array,
    Denoiser,
    Mixture,
    Network,
    Params,
    Process,
)
from md4_jax.samplers.chain import RevealsInOrder, SamplerStep
from md4_jax.samplers.guidance import Derived, rates_of
from md4_jax.samplers.transforms import Transform

# Number of sequences that the classifier reads at once, for method=exact.
ROWS = 1024
# Key of the classifier among the parameters that samplers are given.
CLASSIFIER = "classifier"
# (z [B, L], t [B]) -> log p(y | z, t) [B]; z may be a `Mixture`.
LogProbability = Callable[[Array | Mixture, Array], Array]


class Guide(NamedTuple):
    """Classifier of a run, and the class towards which samples are guided.

    label    the class
    network  of the classifier, and its parameters; None until the run is read
    """

    options: ClassifierOptions
    label: int
    network: Network | None = None
    params: Params | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Fields on which compiled programs depend."""
        return self.network, self.options.classifier_method

    def beside(self, params: Params) -> Params:
        """Returns the parameters of a model with those of the classifier, its label and gamma."""
        strength = np.float32(self.options.classifier_strength)
        return {**params, CLASSIFIER: (self.params, np.int32(self.label), strength)}

    def guided(
        self, params: Params, denoiser: Denoiser, process: Process, step: SamplerStep
    ) -> tuple[Denoiser, Any, SamplerStep]:
        """Returns denoiser, process and step that draw samples of the class; params: `beside`."""
        return towards(denoiser, process, step, *self._pull(params))

    def raised(
        self, params: Params, denoiser: Denoiser, process: RevealsMasks, transform: Transform
    ) -> tuple[Denoiser, Transform]:
        """Returns guided denoiser and transform for masks whose reveals are not guided."""
        gains, strength = self._pull(params)
        return _raised(denoiser, process, transform, gains, strength), Transform()

    def _pull(self, params: Params) -> tuple[Callable, Array]:
        """Returns the gains of the class, and their weight."""
        own, label, strength = params[CLASSIFIER]
        bound = self.network.denoiser(own)

        def log_probability(z: Array | Mixture, t: Array) -> Array:
            return jax.nn.log_softmax(widened(bound.classify(z, t)))[:, label]

        gains = exact_gains if self.options.classifier_method == "exact" else taylor_gains
        return functools.partial(gains, log_probability), strength


def exact_gains(
    log_probability: LogProbability, z: Array, t: Array, symbols: int, index: Array | None = None
) -> Array:
    """Returns log p(y | z with v at n) - log p(y | z) of each position n and symbol v.

    [B, L, S] for all positions, or [B, P, S] for those of index [B, P]. This takes P S evaluations
    of the classifier for each sequence, `ROWS` at a time.
    """
    (batch, length), place = z.shape, jnp.arange(z.shape[1])
    index = jnp.broadcast_to(place, z.shape) if index is None else index
    count = index.shape[1] * symbols
    size = max(1, min(count, ROWS // batch))

    def changed(number: Array) -> Array:
        """Returns log p(y | z) after the changes with these indices [C]: [B, C]."""
        here = index[:, number // symbols][..., None] == place
        rows = jnp.where(here, (number % symbols)[:, None], z[:, None])
        found = log_probability(rows.reshape(-1, length), jnp.repeat(t, len(number)))
        return found.reshape(batch, -1)

    numbers = jnp.minimum(jnp.arange(-(-count // size) * size), count - 1).reshape(-1, size)
    found = jnp.moveaxis(jax.lax.map(changed, numbers), 0, 1).reshape(batch, -1)
    return _less_own(found[:, :count].reshape(*index.shape, symbols), z, index)


def taylor_gains(
    log_probability: LogProbability, z: Array, t: Array, symbols: int, index: Array | None = None
) -> Array:
    """Approximates `exact_gains` to first order in the one-hot vectors of z.

    The result is the gradient of log p(y | z) with respect to these vectors, minus its entry at z
    itself. It takes one evaluation and its gradient (TAG, arXiv:2406.01572).
    """

    def total(weights: Array) -> Array:
        return jnp.sum(log_probability(Mixture(jnp.arange(symbols), weights), t))

    slope = jax.grad(total)(jax.nn.one_hot(z, symbols))
    if index is None:
        index = jnp.broadcast_to(jnp.arange(z.shape[1]), z.shape)
    else:
        slope = jnp.take_along_axis(slope, index[..., None], axis=1)
    return _less_own(slope, z, index)


def _less_own(values: Array, z: Array, index: Array) -> Array:
    own = jnp.take_along_axis(z, index, axis=1)[..., None]
    return values - jnp.take_along_axis(values, own, axis=2)


def towards(
    denoiser: Denoiser, process: Process, step: SamplerStep, gains: Callable, strength: Array
) -> tuple[Denoiser, Any, SamplerStep]:
    """Returns denoiser, process and step guided by gains(z, t, symbols, index).

    With masks the logits of a revealed token become
    log mu_v + gamma (log p(y | z with v) - log p(y | z)), where the transform is applied to mu
    before. For a step that reveals masks in an order nothing else changes. For other steps the
    classifier also changes whether a mask is revealed: `GuidedMasks`. With other noise only the
    process changes: `GuidedNoise`.
    """
    if not isinstance(process, RevealsMasks):
        return denoiser, GuidedNoise(process, gains, strength), step
    raised = _raised(denoiser, process, step.transform, gains, strength)
    plain = dataclasses.replace(step, transform=Transform())
    if isinstance(step, RevealsInOrder):
        return raised, process, plain
    return raised, GuidedMasks(process), plain


def _raised(
    denoiser: Denoiser, process: Process, transform: Transform, gains: Callable, strength: Array
) -> Denoiser:
    """Returns the denoiser of masks with guided logits; its features include the gains."""
    symbols = process.vocab_size

    def joined(h: Array, z: Array, t: Array, index: Array | None) -> Array:
        gain = strength * gains(z, t, symbols + 1, index)[..., :symbols]
        return jnp.concatenate([h.astype(gain.dtype), gain], axis=-1)

    def features(z: Array, t: Array) -> Array:
        return joined(denoiser.features(z, t), z, t, None)

    def features_at(z: Array, t: Array, index: Array) -> Array:
        return joined(denoiser.features_at(z, t, index), z, t, index)

    def unembed(h: Array) -> Array:
        own, gain = jnp.split(h, [h.shape[-1] - symbols], axis=-1)
        return jax.nn.log_softmax(transform(denoiser.unembed(own))) + gain

    return Denoiser(features, unembed, Accelerator(denoiser.accelerator.groups, features_at))


class GuidedMasks(Derived):
    """Process of masks in which reveals depend on guided outputs, log mu_v + gamma gain_v.

    The odds of a reveal are those of the process times sum_v mu_v exp(gamma gain_v), since a mask
    that is not revealed has gain 0.
    """

    def __init__(self, process: RevealsMasks):
        # Reveals depend on the network, so the process must not be a `RevealsMasks`.
        super().__init__(process, {}, without=("reveal_probability",))
        self.masks = process

    def revealed(self, outputs: Array, s: Array, t: Array) -> Array:
        """Returns P(a mask at time t is revealed in the step to s), [B, L]."""
        probability = self.masks.reveal_probability(s, t)
        odds = jnp.log(probability) - jnp.log1p(-probability)
        return jax.nn.sigmoid(odds + jax.nn.logsumexp(outputs, axis=-1))

    def reverse_rates(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns the rates R(z_n -> v) (p(y | z with v) / p(y | z))^gamma (arXiv:2406.01572)."""
        rates = reveal_rate(self.masks.schedule, t)[:, None, None] * rates_of(outputs)
        rates = jnp.where(self.masks.is_noise(z)[..., None], rates, 0.0)
        return jnp.pad(rates, ((0, 0), (0, 0), (0, 1)))


class GuidedNoise(Derived):
    """Process of noise other than masks, with steps guided by a classifier.

        reverse_logits  log p(z_s | z_t) + gamma gain at time s
        clean_logits    the same of the step to clean data, with the gain at time 0
        reverse_rates   R exp(gamma gain) at time t (arXiv:2406.01572)

    p(y | z_s) is evaluated at time s, since y depends on z_t only through z_s. So samples of one
    token are exact with any number of steps.
    """

    def __init__(self, process: Process, gains: Callable, strength: Array):
        symbols = process.vocab_size + (getattr(process, "mask_id", None) is not None)

        def gain(z: Array, t: Array, like: Array) -> Array:
            return strength * gains(z, t, symbols)[..., : like.shape[-1]]

        def reverse_logits(outputs: Array, z: Array, s: Array, t: Array) -> Array:
            logits = jax.nn.log_softmax(process.reverse_logits(outputs, z, s, t))
            return logits + gain(z, s, logits)

        def clean_logits(outputs: Array, z: Array, t: Array) -> Array:
            logits = jax.nn.log_softmax(process.clean_logits(outputs, z, t))
            return logits + gain(z, jnp.zeros_like(t), logits)

        def reverse_rates(outputs: Array, z: Array, t: Array) -> Array:
            rates = process.reverse_rates(outputs, z, t)
            return rates_of(jnp.log(rates) + gain(z, t, rates))

        steps = (reverse_logits, clean_logits, reverse_rates)
        super().__init__(process, {step.__name__: step for step in steps})
