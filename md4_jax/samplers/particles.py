"""Weights and resampling of particles, in float64 on the host: docs/samplers.md#rewards."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount, plus_minus


@dataclasses.dataclass(frozen=True)
class SteeringOptions:
    """Keys of the section `sample.reward` for every reward.

    strength   lambda in p(x) exp(lambda r(x)), the target distribution
    particles  chains of each sample, of which one is returned
    every      steps between two evaluations of the reward
    threshold  particles are resampled if the effective sample size is below this fraction of
               `particles`. 0: never; 1: whenever their weights differ
    """

    strength: float = 1.0
    particles: int = 4
    every: int = 8
    threshold: float = 0.5

    def __post_init__(self):
        for key in ("particles", "every"):
            if getattr(self, key) < 1:
                raise UserError(f"sample.reward.{key} must be at least 1, not {getattr(self, key)}")
        if not np.isfinite(self.strength):
            raise UserError(f"sample.reward.strength must be a finite number, not {self.strength}")
        if not 0 <= self.threshold <= 1:
            raise UserError(f"sample.reward.threshold must lie in [0, 1], not {self.threshold}")


class Steered(NamedTuple):
    """Record of how N samples were steered by a reward r with strength lambda.

    rewards      float64 [N], r of each sample
    log_means    float64 [N], log of an estimate of E_p[exp(lambda r)] by the particles of each
                 sample. The estimate is unbiased, its log is not
    effective    float64 [N], effective sample size at the end
    resamplings  int64 [N], how often the particles of a sample were resampled
    """

    rewards: np.ndarray
    log_means: np.ndarray
    effective: np.ndarray
    resamplings: np.ndarray

    def numbers(self) -> dict[str, Any]:
        """Returns the means over samples, with standard errors (None for one sample)."""
        log_mean, its_error = log_mean_exp(self.log_means)
        return {
            "reward": float(self.rewards.mean()),
            "reward_se": standard_error(self.rewards),
            "log_mean_exp_reward": log_mean,
            "log_mean_exp_reward_se": its_error,
            "effective_particles": float(self.effective.mean()),
            "resamplings": float(self.resamplings.mean()),
        }

    def line(self, options: SteeringOptions) -> str:
        """Returns the means as a line of text."""
        found = self.numbers()
        mean, error = found["log_mean_exp_reward"], found["log_mean_exp_reward_se"]
        said, of_mean = plus_minus(found["reward_se"], ".3g"), plus_minus(error, ".3g")
        return (
            f"reward {found['reward']:.4g}{said}; {found['effective_particles']:.1f} of "
            f"{amount(options.particles, 'particle')} effective; log E[exp({options.strength:g} "
            f"reward)] {mean:.4g}{of_mean}"
        )


class Population:
    """Particles of S samples, P of each, between two resamplings.

    The potential of the k-th evaluation of the reward is exp(lambda (r_k - r_(k-1))), with r_0 = 0
    (arXiv:2501.06848, "difference"). The product of potentials along a path is exp(lambda r) for
    its last reward. So the product over resamplings of the particles' mean weight is an unbiased
    estimate of E_p[exp(lambda r)], whatever the earlier rewards.
    """

    def __init__(self, options: SteeringOptions, samples: int):
        shape = (samples, options.particles)
        self._options = options
        self._log_weights, self._rewards = np.zeros(shape), np.zeros(shape)
        self._log_means, self._count = np.zeros(samples), np.zeros(samples, np.int64)

    def weigh(self, rewards: np.ndarray) -> None:
        """Multiplies the weights by the potentials of these rewards [S P]."""
        rewards = np.asarray(rewards, np.float64).reshape(self._rewards.shape)
        self._log_weights = self._log_weights + self._options.strength * (rewards - self._rewards)
        self._rewards = rewards

    def resample(self, uniforms: np.ndarray) -> np.ndarray:
        """Resamples where weights are uneven; returns the parent of each particle, int [S P]."""
        samples, particles = self._rewards.shape
        weights = np.exp(self._log_weights - self._log_weights.max(axis=1, keepdims=True))
        uneven = effective_number(weights) < self._options.threshold * particles
        parents = np.where(uneven[:, None], systematic(weights, uniforms), np.arange(particles))
        self._log_means += np.where(uneven, self._log_mean_weights(), 0.0)
        self._log_weights = np.where(uneven[:, None], 0.0, self._log_weights)
        self._rewards = np.take_along_axis(self._rewards, parents, axis=1)
        self._count += uneven
        places = parents + particles * np.arange(samples)[:, None]
        return places.ravel().astype(np.int32)

    def choose(self, uniforms: np.ndarray) -> tuple[np.ndarray, Steered]:
        """Draws one particle of each sample by weight; returns their indices [S] in [S P]."""
        samples, particles = self._rewards.shape
        weights = np.exp(self._log_weights - self._log_weights.max(axis=1, keepdims=True))
        one = _where_reached(weights, uniforms[:, None])
        rewards = np.take_along_axis(self._rewards, one, axis=1)[:, 0]
        means = self._log_means + self._log_mean_weights()
        how = Steered(rewards, means, effective_number(weights), self._count)
        return one[:, 0] + particles * np.arange(samples), how

    def _log_mean_weights(self) -> np.ndarray:
        most = self._log_weights.max(axis=1)
        return most + np.log(np.mean(np.exp(self._log_weights - most[:, None]), axis=1))


def effective_number(weights: np.ndarray) -> np.ndarray:
    """Returns (sum w)^2 / sum w^2 of each row: between 1 and the number of particles."""
    return weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1)


def systematic(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Draws as many parents as there are particles, with one number in [0, 1) for each row.

    weights [S, P], uniforms [S] -> int [S, P]. A particle with normalised weight w has floor(P w)
    or ceil(P w) children, P w on average.
    """
    particles = weights.shape[1]
    return _where_reached(weights, (uniforms[:, None] + np.arange(particles)) / particles)


def _where_reached(weights: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Returns the first particle at which cumulative weights exceed each level: [S, K]."""
    shares = np.cumsum(weights, axis=1)
    # Divided by their last value, so that levels below 1 never select a last particle of weight 0.
    shares = shares / shares[:, -1:]
    return np.sum(shares[:, None, :] <= levels[:, :, None], axis=2)


def log_mean_exp(logs: np.ndarray) -> tuple[float, float | None]:
    """Returns log(mean(exp(logs))) and its standard error by the delta method."""
    most = logs.max()
    scaled = np.exp(logs - most)
    mean, error = float(scaled.mean()), standard_error(scaled)
    return float(most + np.log(mean)), None if error is None else error / mean


def standard_error(values: np.ndarray) -> float | None:
    """Returns the standard error of the mean; None for a single value."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
