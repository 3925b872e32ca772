"""Steps that take the reverse rates at t for all of [s, t]: Euler and tau-leaping."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import HasRates, RevealsMasks
from md4_jax.processes.scheduled import uniforms
from md4_jax.protocols import Array, Denoiser, Needs, UserError
from md4_jax.samplers.ancestral import evaluated, reveal_masks
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token
from md4_jax.samplers.transforms import Transform

PROCESSES = (RevealsMasks, HasRates)


def moves(rates: Array, probability: Array, z: Array, keys: Array) -> tuple[Array, Array]:
    """Jumps at each position with that probability: (z, the probability of what happened).

    A position jumps to y with odds rates[..., y]. rates [B, L, S], 0 at z itself;
    probability [B, L].
    """
    when, what = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    target = draw_token(what, jnp.log(rates))
    jumped = uniforms(when, z.shape[1]) < probability
    total = jnp.sum(rates, axis=-1)
    share = jnp.take_along_axis(rates, target[..., None], axis=-1)[..., 0]
    went = probability * share / jnp.where(total > 0, total, 1.0)
    return jnp.where(jumped, target, z), jnp.where(jumped, went, 1.0 - probability)


def leap(step, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array):
    """Takes one step; a position jumps with step.jump_probability of its expected jumps."""
    if isinstance(process, RevealsMasks):
        return reveal_masks(step, denoiser, process, chain, s, t, keys)
    times = jnp.full(chain.z.shape[:1], t)
    outputs = step.transform(denoiser(chain.z, times))
    rates = process.reverse_rates(outputs, chain.z, times)
    expected = (t - s) * jnp.sum(rates, axis=-1)
    z, confidence = moves(rates, step.jump_probability(expected), chain.z, keys)
    return evaluated(chain, z, jnp.where(z == chain.z, chain.confidence, confidence))


def expected_reveals(process: RevealsMasks, s: Array, t: Array) -> Array:
    """(t - s) (-alpha'_t) / (1 - alpha_t): jumps of a mask in the step, at the rate of t."""
    noise = process.schedule.one_minus_alpha(t)
    jumps = (t - s) * -process.schedule.dalpha(t) / jnp.where(noise > 0, noise, 1.0)
    # Noise that is too small for a float leaves no mask.
    return jnp.where(noise > 0, jumps, 1.0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Euler:
    """A position jumps with probability min(1, h rate), h = t - s, the rates being those at t.

    First order in h (identity T08). On masks the probability equals that of ancestral sampling
    exactly if alpha is linear (T09).
    """

    needs: ClassVar[Needs] = Needs(PROCESSES)
    level: ClassVar[None] = None

    transform: Transform = Transform()

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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["transform"], meta_fields=["several"]
)
@dataclasses.dataclass(frozen=True)
class TauLeaping:
    """Each position makes Poisson(h rate) jumps to each symbol, the rates being those at t.

    tauLDR (arXiv:2205.14987, section 4.3). Symbols cannot be added, so that several jumps of a
    position need a rule:

    first   the first one is taken: a position moves with probability 1 - exp(-h rate)
    reject  it stays unless there was exactly one: h rate exp(-h rate) (tauLDR, categorical data)
    sum     all are taken, as distances between ordered symbols, cut off at the ends (tauLDR,
            ordinal data): process rates with a gaussian kernel
    """

    needs: ClassVar[Needs] = Needs(PROCESSES)
    level: ClassVar[None] = None

    several: str = "first"
    transform: Transform = Transform()

    def __post_init__(self):
        if self.several not in RULES:
            raise UserError(f"sample.several must be one of {', '.join(RULES)}: {self.several!r}")

    def check(self, process: Any) -> None:
        """UserError where jumps are to be added and symbols are not ordered."""
        if self.several == "sum" and not getattr(process, "is_ordered", False):
            raise UserError(
                "sample.several='sum' adds up distances between symbols and needs "
                "process.name='rates' with process.kernel='gaussian_target' or "
                "'gaussian_symmetric'; take 'first' or 'reject'"
            )

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        if self.several != "sum":
            return leap(self, denoiser, process, chain, s, t, keys)
        times = jnp.full(chain.z.shape[:1], t)
        outputs = self.transform(denoiser(chain.z, times))
        rates = (t - s) * process.reverse_rates(outputs, chain.z, times)
        # As floats: near alpha = 0 the number of jumps times a distance is too large for int32.
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
