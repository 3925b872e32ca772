"""Samples of p(x) exp(strength r(x)) for a reward r, without training: docs/samplers.md#rewards."""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from md4_jax.options import SampleOptions
from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Array, Denoiser, Network, Params, Prompt, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import batch_sharding, batch_shards, local_rows, to_global, to_host
from md4_jax.runtime.stopping import stop_if_asked
from md4_jax.samplers import loop
from md4_jax.samplers.batches import Samples, context_of, row_keys
from md4_jax.samplers.chain import Chain, SamplerStep
from md4_jax.samplers.guidance import calls, guided, with_clean_prompt
from md4_jax.samplers.particles import Population, Steered, SteeringOptions

# (tokens int32 [N, L], domain) -> reward of each sequence, [N].
Reward = Callable[[np.ndarray, Any], Any]


class Steering(NamedTuple):
    """Reward by which samples are steered, with the domain that decodes their tokens."""

    options: SteeringOptions
    reward: Reward
    domain: Any

    def opened(self, run_of: Callable, programs: dict) -> "Steering":
        """Returns a copy whose reward may load other models with `run_of` (evals/context.py)."""
        if not hasattr(self.reward, "opened"):
            return self
        return self._replace(reward=self.reward.opened(run_of, programs))

    def rewards(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the rewards float64 [N] of tokens [N, L]; UserError if they are not numbers."""
        return self.checked(self.reward(tokens, self.domain), len(tokens))

    def checked(self, rewards: Any, count: int) -> np.ndarray:
        """Returns rewards as float64 [count]; UserError if they are not `count` numbers."""
        found = np.asarray(rewards, np.float64)
        kind = type(self.reward).__name__
        if found.shape != (count,):
            raise UserError(
                f"sample.reward: {kind} returned an array of the shape {found.shape} for "
                f"{amount(count, 'sequence')}; it must return one number for each"
            )
        if not np.isfinite(found).all():
            raise UserError(
                f"sample.reward: {kind} returned {found[~np.isfinite(found)][0]} for a sequence; "
                "rewards must be finite numbers"
            )
        return found


class Programs:
    """Compiled programs that move particles; they work for any reward.

    start   draws the chains at t = 1
    steps   takes `count` steps of the grid, from the index `first` on, after resampling
    look    draws clean sequences from the denoiser's prediction at the state
    finish  removes the noise that remains after the last step
    """

    def __init__(
        self,
        network: Network,
        grid: np.ndarray,
        mesh: Mesh,
        guidance: float,
        clean_prompts: bool = False,
    ):
        self.mesh, self.guidance, self.grid = mesh, guidance, grid
        self._clean_prompts = clean_prompts
        self._network = network
        self._functions = {
            function.__name__[1:]: jit(functools.partial(self._run, function), mesh, network)
            for function in (_start, _steps, _look, _finish)
        }

    def call(self, name: str, *arguments: Any) -> Any:
        """Runs a program, which is compiled at its first call of a shape."""
        with jax.set_mesh(self.mesh):
            return self._functions[name](*arguments)

    def _run(self, function: Callable, params: Params, step: SamplerStep, given, *rest: Any):
        keys, prompt, context = given
        denoiser, process = guided(self._network, params, context, self.guidance, prompt)
        if self._clean_prompts:
            denoiser = with_clean_prompt(denoiser, process, prompt)
        keys = jax.lax.with_sharding_constraint(keys, batch_sharding(self.mesh))
        return function(_Run(denoiser, process, step, self.grid, keys, prompt), *rest)


class _Run(NamedTuple):
    """A run of particles, with their keys [S P] and prompt [S P, L]."""

    denoiser: Denoiser
    process: Any
    step: SamplerStep
    grid: np.ndarray
    keys: Array
    prompt: Prompt


def _start(run: _Run) -> Chain:
    chain = loop.start(run.process, run.step, run.prompt, fold_keys(run.keys, len(run.grid)))
    return loop.with_memory(run.denoiser, run.process, run.step, chain)


def _steps(run: _Run, chain: Chain, parents: Array, first: Array, count: Array) -> Chain:
    # Each place counts its own evaluations; their sum is what was computed.
    taken = jax.tree.map(lambda part: part[parents], chain)
    chain, times = taken._replace(evaluations=chain.evaluations), jnp.asarray(run.grid)

    def body(number: Array, chain: Chain) -> Chain:
        index = first - number
        both, own = (times[index - 1], times[index]), fold_keys(run.keys, index)
        return loop.one_step(
            run.denoiser, run.process, run.step, chain, both, tokens=run.prompt.tokens, keys=own
        )

    return jax.lax.fori_loop(0, count, body, chain)


def _look(run: _Run, chain: Chain, index: Array) -> tuple[Array, Array]:
    own, step = fold_keys(fold_keys(run.keys, len(run.grid) + 1), index), run.step
    now = loop.time_of(step, jnp.asarray(run.grid)[index])
    guess = loop.without_noise(run.denoiser, run.process, step.transform, chain, now, own)
    return loop.put_prompt(guess, run.prompt.tokens).z, guess.evaluations


def _finish(run: _Run, chain: Chain) -> Chain:
    chain = loop.finish(run.denoiser, run.process, run.step, chain, fold_keys(run.keys, 0))
    return loop.put_prompt(chain, run.prompt.tokens)


def draw_steered(
    programs: Programs,
    params: Params,
    step: SamplerStep,
    options: SampleOptions,
    prompts: Sequence[Prompt],
    steering: Steering,
    *,
    context: Mapping[str, np.ndarray] | None = None,
) -> Samples:
    """Draws `options.num` samples of each prompt by sequential Monte Carlo.

    Each sample has its own particles and keys, so that it does not depend on the rest of its
    batch. `options.batch_size` particles run at once, or those of one sample if they are more.
    """
    tokens, mask = (
        np.repeat(np.stack(parts), options.num, axis=0) for parts in zip(*prompts, strict=True)
    )
    total, particles = len(tokens), steering.options.particles
    context = context_of(options, total) if context is None else context
    shards = batch_shards(programs.mesh)
    even = shards // math.gcd(shards, particles)  # samples whose particles all shards can share
    size = -(-min(max(1, options.batch_size // particles), total) // even) * even
    found = []
    for start in range(0, total, size):
        rows = np.minimum(np.arange(start, start + size), total - 1)
        keys = row_keys(options.seed, 0, np.arange(start, start + size))
        own = np.repeat(rows, particles)[local_rows(programs.mesh, size * particles)]
        own_context = {name: np.asarray(values)[own] for name, values in context.items()}
        given = (Prompt(tokens[own], mask[own]), own_context)
        found.append(_batch(programs, params, step, given, keys, steering))
    out, evaluations, how, seconds = zip(*found, strict=True)
    out, evaluations = np.concatenate(out)[:total], np.concatenate(evaluations)[:total]
    steered = Steered(*(np.concatenate(parts)[:total] for parts in zip(*how, strict=True)))
    used = calls(programs.guidance) * evaluations
    lengths = np.full(total, out.shape[1])
    return Samples(out, mask, lengths, used, sum(seconds), None, steered)


def _batch(
    programs: Programs, params: Params, step: SamplerStep, given, keys: Array, steering: Steering
) -> tuple[np.ndarray, np.ndarray, Steered, float]:
    """Draws S samples with these keys [S]; returns tokens, evaluations, how, and seconds."""
    particles, every = steering.options.particles, steering.options.every
    samples, count = len(keys), len(programs.grid) - 1
    own = _particle_keys(keys, particles)
    given = (own, *to_global(given, programs.mesh))
    population, began = Population(steering.options, samples), time.perf_counter()
    stay = parents = np.arange(samples * particles, dtype=np.int32)
    looks, useful = np.zeros_like(stay), particles > 1 and steering.options.threshold > 0
    chain = programs.call("start", params, step, given)
    for first in range(count, 0, -every):
        stop_if_asked()
        taken = min(every, first)
        now = (np.int32(first), np.int32(taken))
        chain = programs.call("steps", params, step, given, chain, parents, *now)
        parents = stay
        if useful and first > taken:
            looked = programs.call("look", params, step, given, chain, np.int32(first - taken))
            guess, used = to_host(looked)
            looks += used - to_host(chain.evaluations)
            population.weigh(steering.rewards(guess))
            parents = population.resample(_uniforms(keys, first))
    chain = to_host(programs.call("finish", params, step, given, chain))
    population.weigh(steering.rewards(chain.z))
    chosen, how = population.choose(_uniforms(keys, 0))
    used = (chain.evaluations + looks).reshape(samples, particles).sum(axis=1)
    return chain.z[chosen], used, how, time.perf_counter() - began


def _particle_keys(keys: Array, particles: int) -> Array:
    """Returns the keys [S P] of the particles of samples with keys [S]."""
    each = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return each(fold_keys(keys, 0), jnp.arange(particles)).reshape(-1)


def _uniforms(keys: Array, index: int) -> np.ndarray:
    """Returns a number in [0, 1) for each sample, float64 [S], for the resampling at an index."""
    own = fold_keys(fold_keys(keys, 1), index)
    bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(own))
    high, low = bits.astype(np.uint64).T
    return (high * 2**21 + (low >> np.uint64(11))) / 2.0**53
