"""Euler and tau-leaping: steps with reverse rates that are constant over [s, t]."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import HasRates, RevealsMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.ancestral import evaluated, reveal_masks
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token
from md4_jax.samplers.transforms import Transform, check_exclude

PROCESSES = (RevealsMasks, HasRates)


def moves(rates: Array, probability: Array, z: Array, keys: Array) -> tuple[Array, Array]:
    """Lets each position jump with `probability` [B, L]; returns (z, probability of its outcome).

    A jump goes to y in proportion to rates[..., y]; rates [B, L, S] are 0 at z itself.
    """
    when, what = split_keys(keys)
    target = draw_token(what, jnp.log(rates))
    jumped = uniforms(when, z.shape[1]) < probability
    total = jnp.sum(rates, axis=-1)
    share = jnp.take_along_axis(rates, target[..., None], axis=-1)[..., 0]
    went = probability * share / jnp.where(total > 0, total, 1.0)
    return jnp.where(jumped, target, z), jnp.where(jumped, went, 1.0 - probability)


def leap(step, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array):
    """Takes one step; a position jumps with probability step.jump_probability(expected jumps)."""
    if isinstance(process, RevealsMasks):
        return reveal_masks(step, denoiser, process, chain, s, t, keys)
    times = jnp.full(chain.z.shape[:1], t)
    outputs = step.transform(denoiser(chain.z, times))
    rates = process.reverse_rates(outputs, chain.z, times)
    expected = (t - s) * jnp.sum(rates, axis=-1)
    z, confidence = moves(rates, step.jump_probability(expected), chain.z, keys)
    return evaluated(chain, z, jnp.where(z == chain.z, chain.confidence, confidence))


def expected_reveals(process: RevealsMasks, s: Array, t: Array) -> Array:
    """Expected jumps of a mask at the rate of t: (t - s) (-alpha'_t) / (1 - alpha_t)."""
    jumps = (t - s) * reveal_rate(process.schedule, t)
    # If 1 - alpha_t underflows, all masks are revealed.
    return jnp.where(process.schedule.one_minus_alpha(t) > 0, jumps, 1.0)


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class Euler:
    """Lets a position jump with probability min(1, h rate), with h = t - s and the rate at t.

    First order in h (identity T08). On masks, a linear alpha gives exactly the probability of
    ancestral sampling (T09).
    """

    needs: ClassVar[Needs] = Needs(PROCESSES)
    level: ClassVar[None] = None

    transform: Transform = Transform()

    def check(self, process: Any) -> None:
        """Raises UserError if excluded symbols may remain in the sample."""
        check_exclude(self.transform, process, "euler")

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        return leap(self, denoiser, process, chain, s, t, keys)

    def jump_probability(self, expected: Array) -> Array:
        """P(a position jumps) from the expected number of its jumps."""
        return jnp.minimum(expected, 1.0)

    def reveal_probability(self, process: RevealsMasks, s: Array, t: Array) -> Array:
        """P(a mask is revealed)."""
        return self.jump_probability(expected_reveals(process, s, t))


RULES = ("first", "reject", "sum")


@pytree("transform")
@dataclasses.dataclass(frozen=True)
class TauLeaping:
    """Draws Poisson(h rate) jumps to each symbol at each position, with the rates at t.

    tauLDR (arXiv:2205.14987, section 4.3). `several` is the effect of several jumps of a position:

    first   the first jump is made: a position moves with probability 1 - exp(-h rate)
    reject  it moves only with exactly one jump: h rate exp(-h rate) (tauLDR, categorical data)
    sum     distances are summed and the sum is clipped (tauLDR, ordinal data); for the ordered
            symbols of the process `rates` with a gaussian kernel
    """

    needs: ClassVar[Needs] = Needs(PROCESSES)
    level: ClassVar[None] = None

    several: str = "first"
    transform: Transform = Transform()

    def __post_init__(self):
        if self.several not in RULES:
            known = ", ".join(RULES)
            raise UserError(f"sample.several must be one of {known}, not {self.several!r}")

    def check(self, process: Any) -> None:
        """Raises UserError for several='sum' without an order, and for excluded symbols."""
        check_exclude(self.transform, process, "tau_leaping")
        if self.several == "sum" and not getattr(process, "is_ordered", False):
            raise UserError(
                "sample.several='sum' adds distances between symbols, so that it needs "
                "process.name='rates' with process.kernel='gaussian_target' or "
                "'gaussian_symmetric'; otherwise set sample.several to 'first' or 'reject'"
            )

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        if self.several != "sum":
            return leap(self, denoiser, process, chain, s, t, keys)
        times = jnp.full(chain.z.shape[:1], t)
        outputs = self.transform(denoiser(chain.z, times))
        rates = (t - s) * process.reverse_rates(outputs, chain.z, times)
        # Floats: near alpha = 0 the number of jumps times a distance overflows int32.
        jumps = jax.vmap(jax.random.poisson)(keys, rates).astype(rates.dtype)
        away = jnp.arange(rates.shape[-1]) - chain.z[..., None]
        moved = jnp.sum(jumps * away, axis=-1)
        z = jnp.clip(chain.z + moved, 0, rates.shape[-1] - 1).astype(jnp.int32)
        return evaluated(chain, z, jnp.exp(-jnp.sum(rates, axis=-1)))

    def jump_probability(self, expected: Array) -> Array:
        """P(a position jumps) from the expected number of its jumps."""
        if self.several == "reject":
            return expected * jnp.exp(-expected)
        return -jnp.expm1(-expected)

    def reveal_probability(self, process: RevealsMasks, s: Array, t: Array) -> Array:
        """P(a mask is revealed)."""
        return self.jump_probability(expected_reveals(process, s, t))
