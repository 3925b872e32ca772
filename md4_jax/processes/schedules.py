"""Signal levels alpha_t of the forward process (docs/families/notation.md).

All functions are elementwise in t [B] or scalar and keep the dtype of t. 1 - alpha is computed
without cancellation, since bounds need only that. In continuous time a bound is equal for all
schedules from alpha_0 = 1 to alpha_1 = 0 (MD4, arXiv:2406.04329, section 3).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, Schedule, UserError

# One float32 step before t = 1, where alpha may be 0 and rates infinite.
LATEST = 1.0 - 2.0**-24
# Limits of the powers of t and of 1 - t. Bounds integrate from t = 2^-24 to LATEST, where alpha is
# then within 2^-12 of 1 and of 0. With power 0.25 it is 2^-6 from one end, and md4 can miss 1% of
# the bound; with 1e4 it can miss 0.06%.
LEAST_POWER, MOST_POWER = 0.5, 1e3
TOO_FAST = "must lie between 0.5 and 1000, or bounds miss a part where alpha changes fastest"


@dataclasses.dataclass(frozen=True)
class Linear:
    """Schedule alpha_t = 1 - t."""

    def alpha(self, t: Array) -> Array:
        return 1.0 - t

    def one_minus_alpha(self, t: Array) -> Array:
        return jnp.asarray(t)

    def dalpha(self, t: Array) -> Array:
        return -jnp.ones_like(t)

    def inverse(self, one_minus_alpha: Array) -> Array:
        return jnp.clip(one_minus_alpha, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Polynomial:
    """Schedule alpha_t = 1 - t^power."""

    power: float = 2.0

    def __post_init__(self):
        if not LEAST_POWER <= self.power <= MOST_POWER:
            raise UserError(f"process.schedule.power={self.power} {TOO_FAST}")

    def alpha(self, t: Array) -> Array:
        return -jnp.expm1(self.power * jnp.log(t))

    def one_minus_alpha(self, t: Array) -> Array:
        return t**self.power

    def dalpha(self, t: Array) -> Array:
        return -self.power * t ** (self.power - 1.0)

    def inverse(self, one_minus_alpha: Array) -> Array:
        return jnp.clip(one_minus_alpha, 0.0, 1.0) ** (1.0 / self.power)


@dataclasses.dataclass(frozen=True)
class Power:
    """Schedule alpha_t = (1 - t)^exponent.

    Discrete flow matching's kappa = t^exponent, whose time runs the other way (arXiv:2407.15595).
    """

    exponent: float = 2.0

    def __post_init__(self):
        if not LEAST_POWER <= self.exponent <= MOST_POWER:
            raise UserError(f"process.schedule.exponent={self.exponent} {TOO_FAST}")

    def alpha(self, t: Array) -> Array:
        return (1.0 - t) ** self.exponent

    def one_minus_alpha(self, t: Array) -> Array:
        return -jnp.expm1(self.exponent * jnp.log1p(-t))

    def dalpha(self, t: Array) -> Array:
        return -self.exponent * (1.0 - t) ** (self.exponent - 1.0)

    def inverse(self, one_minus_alpha: Array) -> Array:
        return -jnp.expm1(jnp.log1p(-jnp.clip(one_minus_alpha, 0.0, 1.0)) / self.exponent)


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Schedule alpha_t = 1 - cos(pi/2 (1 - t)), so that 1 - alpha_t = sin(pi t / 2)."""

    def alpha(self, t: Array) -> Array:
        return 2.0 * jnp.sin(0.25 * math.pi * (1.0 - t)) ** 2

    def one_minus_alpha(self, t: Array) -> Array:
        return jnp.sin(0.5 * math.pi * t)

    def dalpha(self, t: Array) -> Array:
        return -0.5 * math.pi * jnp.sin(0.5 * math.pi * (1.0 - t))

    def inverse(self, one_minus_alpha: Array) -> Array:
        return 2.0 / math.pi * jnp.arcsin(jnp.clip(one_minus_alpha, 0.0, 1.0))


@dataclasses.dataclass(frozen=True)
class ShiftedCosine:
    """Schedule alpha_t = cos(pi/2 (t + shift) / (1 + shift)), divided by its value at t = 0.

    Multinomial diffusion (arXiv:2102.05379) and D3PM's uniform noise on text (arXiv:2107.03006,
    appendix B.2). It falls slowly near t = 0, where `cosine` falls fast.
    """

    shift: float = 0.008

    def __post_init__(self):
        if not self.shift >= 0:
            raise UserError(f"process.schedule.shift must not be negative, not {self.shift}")

    @property
    def _slope(self) -> float:
        """Slope a of the angle a (t + shift), whose cosine is alpha up to a factor."""
        return 0.5 * math.pi / (1.0 + self.shift)

    @property
    def _first(self) -> float:
        return math.cos(self._slope * self.shift)

    def alpha(self, t: Array) -> Array:
        return jnp.sin(self._slope * (1.0 - t)) / self._first

    def one_minus_alpha(self, t: Array) -> Array:
        half = 0.5 * self._slope * t
        return 2.0 / self._first * jnp.sin(half) * jnp.sin(half + self._slope * self.shift)

    def dalpha(self, t: Array) -> Array:
        return -self._slope / self._first * jnp.cos(self._slope * (1.0 - t))

    def inverse(self, one_minus_alpha: Array) -> Array:
        alpha = 1.0 - jnp.clip(one_minus_alpha, 0.0, 1.0)
        return jnp.clip(1.0 - jnp.arcsin(self._first * alpha) / self._slope, 0.0, 1.0)


class _Integrated:
    """Schedule alpha = exp(-sigma_bar)."""

    def alpha(self, t: Array) -> Array:
        return jnp.exp(-self._sigma_bar(t))

    def one_minus_alpha(self, t: Array) -> Array:
        return -jnp.expm1(-self._sigma_bar(t))


@dataclasses.dataclass(frozen=True)
class Geometric(_Integrated):
    """Schedule alpha_t = exp(-sigma_bar_t), sigma_bar_t = minimum^(1-t) maximum^t.

    SEDD (arXiv:2310.16834). It starts at alpha_0 = exp(-minimum) < 1 and stops at
    alpha_1 = exp(-maximum) > 0, so that the integral over t in [0, 1] is only a part of the bound.
    """

    minimum: float = 1e-3
    maximum: float = 20.0

    def __post_init__(self):
        if not 0 < self.minimum < self.maximum:
            raise UserError(
                "process.schedule needs 0 < minimum < maximum, "
                f"not minimum={self.minimum} and maximum={self.maximum}"
            )

    def _sigma_bar(self, t: Array) -> Array:
        return self.minimum * jnp.exp(t * math.log(self.maximum / self.minimum))

    def dalpha(self, t: Array) -> Array:
        return -math.log(self.maximum / self.minimum) * self._sigma_bar(t) * self.alpha(t)

    def inverse(self, one_minus_alpha: Array) -> Array:
        sigma_bar = -jnp.log1p(-jnp.clip(one_minus_alpha, 0.0, 1.0))
        ratio = jnp.clip(sigma_bar, self.minimum, self.maximum) / self.minimum
        return jnp.log(ratio) / math.log(self.maximum / self.minimum)


@dataclasses.dataclass(frozen=True)
class Exponential(_Integrated):
    """Schedule alpha_t = exp(-scale (exponent^t - 1)), so that the rate grows as exponent^t.

    tauLDR (arXiv:2205.14987). It starts at alpha_0 = 1 and stops above 0, at
    exp(-scale (exponent - 1)). tauLDR's base of 3 on CIFAR-10 counts time in the rates of its own
    generator. Those of `Rates` are scaled to a gap of 1: there scale is 3 times `Kernel.gap`.
    """

    scale: float = 0.06276
    exponent: float = 100.0

    def __post_init__(self):
        if not (self.scale > 0 and self.exponent > 1):
            raise UserError(
                "process.schedule needs scale > 0 and exponent > 1, "
                f"not scale={self.scale} and exponent={self.exponent}"
            )

    def _sigma_bar(self, t: Array) -> Array:
        return self.scale * jnp.expm1(t * math.log(self.exponent))

    def dalpha(self, t: Array) -> Array:
        slope = math.log(self.exponent)
        return -self.scale * slope * jnp.exp(t * slope) * self.alpha(t)

    def inverse(self, one_minus_alpha: Array) -> Array:
        sigma_bar = -jnp.log1p(-jnp.clip(one_minus_alpha, 0.0, 1.0))
        return jnp.clip(jnp.log1p(sigma_bar / self.scale) / math.log(self.exponent), 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class LogLinear:
    """Schedule alpha_t = 1 - (1 - eps) t of SEDD, RADD and MDLM.

    sigma_bar_t = -log1p(-(1 - eps) t). It stops at alpha_1 = eps, so that sigma = -alpha' / alpha
    stays finite.
    """

    eps: float = 1e-3

    def __post_init__(self):
        if not 0 < self.eps < 1:
            raise UserError(f"process.schedule.eps must lie in (0, 1), not {self.eps}")

    def alpha(self, t: Array) -> Array:
        return 1.0 - (1.0 - self.eps) * t

    def one_minus_alpha(self, t: Array) -> Array:
        return (1.0 - self.eps) * t

    def dalpha(self, t: Array) -> Array:
        return -(1.0 - self.eps) * jnp.ones_like(t)

    def inverse(self, one_minus_alpha: Array) -> Array:
        return jnp.clip(one_minus_alpha / (1.0 - self.eps), 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Schedule alpha = (1 - 2 eps) base.alpha + eps, in [eps, 1 - eps] as in MD4's code.

    The loss over t in [0, 1] is the part of the bound with 1 - alpha in [eps, 1 - eps] (identity
    M17), so that it is for training only.
    """

    base: Schedule = Linear()
    eps: float = 1e-4

    def __post_init__(self):
        if not 0 <= self.eps < 0.5:
            raise UserError(f"process.schedule.eps must lie in [0, 0.5), not {self.eps}")

    def alpha(self, t: Array) -> Array:
        return (1.0 - 2.0 * self.eps) * self.base.alpha(t) + self.eps

    def one_minus_alpha(self, t: Array) -> Array:
        return (1.0 - 2.0 * self.eps) * self.base.one_minus_alpha(t) + self.eps

    def dalpha(self, t: Array) -> Array:
        return (1.0 - 2.0 * self.eps) * self.base.dalpha(t)

    def inverse(self, one_minus_alpha: Array) -> Array:
        return self.base.inverse((one_minus_alpha - self.eps) / (1.0 - 2.0 * self.eps))


SCHEDULES = {
    "linear": Linear,
    "polynomial": Polynomial,
    "power": Power,
    "cosine": Cosine,
    "shifted_cosine": ShiftedCosine,
    "geometric": Geometric,
    "exponential": Exponential,
    "log_linear": LogLinear,
    "clipped": Clipped,
}


def reaches_one(schedule: Schedule) -> bool:
    """Returns whether alpha_1 = 0, also while a program is traced."""
    with jax.ensure_compile_time_eval():
        return bool(schedule.alpha(jnp.float32(1.0)) <= jnp.finfo(jnp.float32).tiny)


def covers_unit_interval(schedule: Schedule) -> bool:
    """Returns whether alpha runs exactly from 1 at t = 0 to 0 at t = 1."""
    start, end = schedule.one_minus_alpha(jnp.float32(0.0)), schedule.alpha(jnp.float32(1.0))
    return bool(abs(start) == 0.0 and abs(end) <= jnp.finfo(jnp.float32).tiny)
