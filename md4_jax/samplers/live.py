"""Sampling one step at a time, so that each state can be watched: docs/playground.md."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Array, Denoiser, Network, Params, Prompt
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import batch_shards, to_global, to_host
from md4_jax.samplers import loop, reveal
from md4_jax.samplers.batches import row_keys
from md4_jax.samplers.chain import Chain, SamplerStep
from md4_jax.samplers.guidance import calls, guided, weighed, with_clean_prompt


class Watched(NamedTuple):
    """State of one sample.

    step         steps that are taken
    of           steps in all
    z            int32 [L], its symbols
    confidence   float32 [L], as in `Chain`
    evaluations  network calls so far
    """

    step: int
    of: int
    z: np.ndarray
    confidence: np.ndarray
    evaluations: int


class Asked(NamedTuple):
    """Request for one sample: its sampler, grid, seed, prompt [L], context {name: []}, guidance."""

    step: SamplerStep
    grid: np.ndarray
    seed: int
    prompt: Prompt
    context: Mapping[str, Any]
    guidance: float


class _Run(NamedTuple):
    """Arguments that all programs of a request share; kind is a weight of 0 or 1, else None."""

    asked: Asked
    params: Params
    told: tuple[Mapping[str, Array], Array, Prompt]
    kind: float | None
    keys: Array
    prompt: Prompt


class Live:
    """Compiled programs that take one step of `loop.sample` at each call.

    A program is compiled once for each kind of sampler and each length, and serves all grids,
    prompts, seeds, temperatures and weights of guidance. Only `_plan`, which does not call the
    network, is compiled again for another number of steps.
    """

    def __init__(self, network: Network, mesh: Mesh, clean_prompts: bool = False):
        self._network, self._mesh, self._clean_prompts = network, mesh, clean_prompts
        self._start = jit(_start, mesh, network)
        self._plan = jit(_plan, mesh, network, static_argnames="capacity")
        self._step = jit(self._bound(_one_step), mesh, network, static_argnames="kind")
        self._finish = jit(self._bound(_finish), mesh, network, static_argnames="kind")
        self._pass = jit(self._bound(_pass), mesh, network, static_argnames=("kind", "capacity"))

    def _bound(self, function: Callable) -> Callable:
        """Returns the function with (params, told, kind) in place of a denoiser."""

        def bound(params: Params, told: tuple[Mapping, Array, Prompt], *rest, kind: Any, **static):
            context, weight, prompt = told
            make = weighed if kind is None else guided
            denoiser, process = make(
                self._network, params, context, weight if kind is None else kind, prompt
            )
            if self._clean_prompts:
                denoiser = with_clean_prompt(denoiser, process, prompt)
            return function(denoiser, process, *rest, **static)

        return bound

    def watch(self, params: Params, asked: Asked) -> Iterator[Watched]:
        """Yields the states of sample 0 of `loop.sample`, that before the first step first."""
        rows = batch_shards(self._mesh)
        whole = Prompt(*(np.repeat(x[None], rows, axis=0) for x in asked.prompt))
        context = {name: np.repeat([value], rows) for name, value in asked.context.items()}
        keys = row_keys(asked.seed, 0, np.arange(rows))
        prompt, context = to_global((whole, context), self._mesh)
        weight = float(asked.guidance)
        kind = weight if weight in (0.0, 1.0) else None
        run = _Run(asked, params, (context, jnp.float32(weight), prompt), kind, keys, prompt)
        with jax.set_mesh(self._mesh):
            count = jnp.int32(len(asked.grid))
            chain = self._start(params["process"], asked.step, prompt, fold_keys(keys, count))
        if reveal.has_schedule(asked.step, params["process"]):
            yield from self._by_schedule(run, chain)
        else:
            yield from self._step_by_step(run, chain)

    def _step_by_step(self, run: _Run, chain: Chain) -> Iterator[Watched]:
        grid, step, each = run.asked.grid, run.asked.step, calls(run.asked.guidance)
        count = len(grid) - 1

        def seen(taken: int) -> Watched:
            z, chances, used = (x[0] for x in to_host((chain.z, chain.confidence, chain[3])))
            return Watched(taken, count, z, chances, each * int(used))

        yield seen(0)
        for index in range(count, 0, -1):
            times = jnp.float32(grid[index - 1]), jnp.float32(grid[index])
            with jax.set_mesh(self._mesh):
                keys = fold_keys(run.keys, index)
                chain = self._step(
                    run.params, run.told, step, chain, times, run.prompt.tokens, keys,
                    kind=run.kind,
                )  # fmt: skip
                if index == 1:
                    chain = self._finish(
                        run.params, run.told, step, chain, run.prompt.tokens,
                        fold_keys(run.keys, 0), kind=run.kind,
                    )  # fmt: skip
            yield seen(count - index + 1)

    def _by_schedule(self, run: _Run, chain: Chain) -> Iterator[Watched]:
        asked, count = run.asked, len(run.asked.grid) - 1
        length = len(asked.prompt.tokens)
        most = reveal.capacity_of(asked.step, run.params["process"], asked.grid, length)
        # Few capacities, so that few programs are compiled; it changes no token.
        most = min(length, 2 ** (most - 1).bit_length())
        with jax.set_mesh(self._mesh):
            grid, own = jnp.asarray(asked.grid), fold_keys(run.keys, count)
            process = run.params["process"]
            passes = self._plan(process, asked.step, chain, grid, own, capacity=most)
        state = reveal.begin(chain)
        number, rounds, evaluations = (to_host(x)[0] for x in passes[3:])
        taken = [int(rounds[number == k][0]) + 1 for k in range(evaluations)]
        count = max([count, *(t for t in taken if t <= reveal.LAST)])
        each = calls(asked.guidance)
        yield Watched(0, count, *(x[0] for x in to_host(state[2:])), 0)
        for k, at in enumerate(taken):
            with jax.set_mesh(self._mesh):
                own = fold_keys(run.keys, len(asked.grid) + 1)
                state = self._pass(
                    run.params, run.told, asked.step.transform, passes, state, own,
                    kind=run.kind, capacity=most,
                )  # fmt: skip
            z, chances = (x[0] for x in to_host(state[2:]))
            yield Watched(min(at, count), count, z, chances, each * (k + 1))


def _start(process: Any, step: SamplerStep, prompt: Prompt, keys: Array) -> Chain:
    return loop.start(process, step, prompt, keys)


def _plan(process: Any, step: SamplerStep, chain: Chain, grid: Array, keys: Array, *, capacity):
    schedule = reveal.schedule_of(step, process, chain, grid, keys)
    return reveal.passes_of(chain.z, schedule, capacity)


def _pass(denoiser: Denoiser, process: Any, transform, passes, state, keys, *, capacity):
    del process
    return reveal.one_pass(denoiser, transform, passes, state, keys=keys, capacity=capacity)


def _one_step(denoiser: Denoiser, process: Any, step, chain, times, tokens, keys) -> Chain:
    chain = loop.with_memory(denoiser, process, step, chain)
    return loop.one_step(denoiser, process, step, chain, times, tokens=tokens, keys=keys)


def _finish(denoiser: Denoiser, process: Any, step, chain, tokens, keys) -> Chain:
    return loop.put_prompt(loop.finish(denoiser, process, step, chain, keys), tokens)
