"""From noise to data: the one place where the steps of a sampler are run."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.capabilities import RevealsBySymbol, RevealsMasks
from md4_jax.protocols import Array, Denoiser
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import Chain, RevealSchedule, SamplerStep
from md4_jax.samplers.draw import draw_token, probability


class Frames(NamedTuple):
    """The first sequence of a batch after each step: z int32 and confidence float32, [T + 1, L]."""

    z: Array
    confidence: Array


def sample(
    denoiser: Denoiser,
    process: Any,
    step: SamplerStep,
    *,
    grid: np.ndarray,
    keys: Array,
    fixed: tuple[Array, Array],
    trace: bool = False,
) -> tuple[Chain, Frames | None]:
    """Runs the reverse process along a grid t(0) < ... < t(T) of float32 times.

    keys [B]: one random key a sequence, so that a sample does not depend on its neighbours in
    a batch. fixed = (tokens, given), [B, L]: where given, the tokens hold what the user fixed;
    the network sees them without noise if the process has a mask, else with that of the time,
    and they come out unchanged.
    Noise that is left after the last step (a schedule that does not reach alpha_0 = 1) is then
    drawn from the denoiser. trace also returns the path of the first sequence.
    """
    (tokens, given), steps = fixed, len(grid) - 1
    chain = begin(process, tokens, given, _fold(keys, steps + 1))
    planning = reveal.plan_of(step, process, chain, grid, _fold(keys, steps))
    done = False
    if planning is None:
        every = denoiser, process, step
        chain, frames = _scan(every, chain, grid, keys, tokens, trace)
    else:
        (plan, room, done), before = planning, chain
        chain = reveal.run(
            denoiser, step.transform, process, chain, plan, keys=_fold(keys, steps + 2), room=room
        )
        rounds = max(steps, chain.z.shape[1])
        frames = _replayed(before, chain, plan, rounds) if trace else None
    if not done:
        chain = _finished(denoiser, process, step, chain, _fold(keys, 0))
    chain = chain._replace(
        z=jnp.where(given, tokens, chain.z), confidence=jnp.where(given, 1.0, chain.confidence)
    )
    if frames is not None:
        last = (chain.z[:1], chain.confidence[:1])
        frames = Frames(*(jnp.concatenate(both) for both in zip(frames, last, strict=True)))
    return chain, frames


def begin(process: Any, tokens: Array, given: Array, keys: Array) -> Chain:
    """The chain at t = 1, with what is given."""
    prior_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    z = process.prior(prior_keys, tokens.shape[1])
    none = jnp.zeros(len(z), jnp.int32)
    given = jnp.asarray(given)
    chain = Chain(z, given, given.astype(jnp.float32), none)
    return clamped(process, chain, tokens, jnp.float32(1.0), noise_keys)


def clamped(process: Any, chain: Chain, tokens: Array, t: Array, keys: Array) -> Chain:
    """What is given put back, noised to time t where noise is not a mask."""
    if not process.shows_clean:
        tokens = process.corrupt(keys, tokens, jnp.full(len(tokens), t))
    return chain._replace(
        z=jnp.where(chain.prompt_mask, tokens, chain.z),
        confidence=jnp.where(chain.prompt_mask, 1.0, chain.confidence),
    )


def _fold(keys: Array, index: Array | int) -> Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys, index)


def _scan(every: tuple, chain, grid, keys, tokens, trace) -> tuple[Chain, Any]:
    """The steps one by one; `every` (denoiser, process, step) is the same in all of them."""
    (denoiser, process, step), grid = every, jnp.asarray(grid)

    def body(chain: Chain, index: Array):
        s, t = grid[index - 1], grid[index]
        step_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(_fold(keys, index)), 1, 0)
        out = step(denoiser, process, chain, s, t, step_keys)
        time = s if step.level is None else jnp.float32(step.level)
        out = clamped(process, out, tokens, time, noise_keys)
        return out, Frames(chain.z[0], chain.confidence[0]) if trace else None

    return jax.lax.scan(body, chain, jnp.arange(len(grid) - 1, 0, -1))


def _replayed(before: Chain, after: Chain, plan: RevealSchedule, rounds: int) -> Frames:
    """The path that a plan has taken, round by round."""
    drawn = plan.round[0] < jnp.arange(rounds)[:, None]
    return Frames(
        jnp.where(drawn, after.z[0], before.z[0]),
        jnp.where(drawn, after.confidence[0], before.confidence[0]),
    )


def _finished(denoiser: Denoiser, process: Any, step: SamplerStep, chain: Chain, keys: Array):
    """Noise that is left at t = 0 is drawn (not maximised) from the denoiser there."""
    if isinstance(process, RevealsMasks | RevealsBySymbol):
        left = reveal.masked(process, chain)
        return reveal.draw_where(
            denoiser, step.transform, process, chain, left, t=jnp.float32(0.0), keys=keys
        )

    time = 0.0 if step.level is None else step.level

    def clean(chain: Chain) -> Chain:
        times = jnp.full(len(chain.z), time, jnp.float32)
        outputs = step.transform(denoiser(chain.z, times))
        logits = process.clean_logits(outputs, chain.z, times)
        z = draw_token(keys, logits)
        return chain._replace(
            z=z, confidence=probability(logits, z), evaluations=chain.evaluations + 1
        )

    return jax.lax.cond(process.noise_left(jnp.float32(time)), clean, lambda chain: chain, chain)


def blank(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, given) of `rows` sequences of which nothing is given."""
    return np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
