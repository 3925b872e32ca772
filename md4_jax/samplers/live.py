"""Sampling one step at a time, to show each state: docs/playground.md."""

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
from md4_jax.samplers.blocks import Blocks, Text
from md4_jax.samplers.chain import Chain, RevealsInOrder, SamplerStep, rounds_of
from md4_jax.samplers.classifier import Guide
from md4_jax.samplers.guidance import calls, guided, weighed, with_clean_prompt
from md4_jax.samplers.transforms import Transform


class SampleState(NamedTuple):
    """State of one sample.

    step         number of steps taken
    of           total number of steps
    z            int32 [L], its symbols
    confidence   float32 [L], as in `Chain`
    evaluations  network calls so far
    settled      number of leading symbols that no later step changes
    """

    step: int
    of: int
    z: np.ndarray
    confidence: np.ndarray
    evaluations: int
    settled: int = 0


class Request(NamedTuple):
    """Request for one sample: its sampler, grid, seed, prompt [L], context {name: []}, guidance."""

    step: SamplerStep
    grid: np.ndarray
    seed: int
    prompt: Prompt
    context: Mapping[str, Any]
    guidance: float


class Inputs(NamedTuple):
    """Arguments from which a denoiser is made.

    context  inputs of the network, {name: [B]}
    weight   of guidance
    prompt   of the whole texts, [B, L]
    text     texts in block-wise sampling, `opened` by `Blocks`; None: whole texts are drawn
    """

    context: Mapping[str, Array]
    weight: Array
    prompt: Prompt
    text: Text | None = None


class Run(NamedTuple):
    """Arguments shared by all programs of a text, or of a block of it.

    kind    weight of guidance if it is 0 or 1, else None
    keys    [B]
    prompt  of the text or the block, [B, L]
    """

    request: Request
    params: Params
    inputs: Inputs
    kind: float | None
    keys: Array
    prompt: Prompt


class Live:
    """Compiled programs that take one step of `loop.sample`, or of `Blocks`, at each call.

    A program is compiled once for each kind of sampler and each length, and serves all grids,
    prompts, seeds, temperatures and weights of guidance, and all blocks. Only `_plan`, which does
    not call the network, is compiled again for another number of steps.
    """

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        clean_prompts: bool = False,
        blocks: Blocks | None = None,
        guide: Guide | None = None,
    ):
        self.mesh, self._network, self._clean_prompts = mesh, network, clean_prompts
        self._blocks, self._guide = blocks, guide
        self._start = jit(_start, mesh, network)
        self._plan = jit(_plan, mesh, network, static_argnames="capacity")
        self._step, self._further, self._finish = (
            self._stepping(function) for function in (_one_step, _one_further, _finish)
        )
        self._pass = jit(self._one_pass, mesh, network, static_argnames=("kind", "capacity"))

    def program(self, function: Callable) -> Callable:
        """Compiles a function; (denoiser, process) are replaced by (params, inputs) and kind=."""

        def bound(params: Params, inputs: Inputs, *rest, kind: Any):
            return function(*self._bound(params, inputs, kind), *rest)

        return jit(bound, self.mesh, self._network, static_argnames="kind")

    def _stepping(self, function: Callable) -> Callable:
        """Compiles a function of (denoiser, process, step, ...), guided by a classifier if any."""

        def bound(params: Params, inputs: Inputs, step: SamplerStep, *rest, kind: Any):
            denoiser, process = self._bound(params, inputs, kind)
            if self._guide is not None:
                denoiser, process, step = self._guide.guided(params, denoiser, process, step)
            return function(denoiser, process, step, *rest)

        return jit(bound, self.mesh, self._network, static_argnames="kind")

    def _one_pass(
        self, params: Params, inputs: Inputs, transform: Transform, *rest, kind: Any, **options
    ) -> reveal.Drawing:
        """Calls `reveal.one_pass`, guided if there is a classifier."""
        denoiser, process = self._bound(params, inputs, kind)
        if self._guide is not None:
            denoiser, transform = self._guide.raised(params, denoiser, process, transform)
        return reveal.one_pass(denoiser, transform, *rest, **options)

    def _bound(self, params: Params, inputs: Inputs, kind: Any) -> tuple[Denoiser, Any]:
        """Makes denoiser and process from their arguments."""
        make = weighed if kind is None else guided
        weight = inputs.weight if kind is None else kind
        denoiser, process = make(self._network, params, inputs.context, weight, inputs.prompt)
        if self._clean_prompts:
            denoiser = with_clean_prompt(denoiser, process, inputs.prompt)
        if inputs.text is not None:
            denoiser, moved, _ = self._blocks.placed(denoiser, inputs.prompt)
            denoiser = self._blocks.within(denoiser, process, inputs.text, moved)
        return denoiser, process

    def run(self, params: Params, request: Request, window: int = 0) -> Run:
        """Returns the arguments of the programs for a request, or for a window of a long text."""
        rows = batch_shards(self.mesh)
        whole = Prompt(*(np.repeat(x[None], rows, axis=0) for x in request.prompt))
        context = {name: np.repeat([value], rows) for name, value in request.context.items()}
        keys = row_keys(request.seed, window, np.arange(rows))
        prompt, context = to_global((whole, context), self.mesh)
        weight = float(request.guidance)
        kind = weight if weight in (0.0, 1.0) else None
        inputs = Inputs(context, jnp.float32(weight), prompt)
        return Run(request, params, inputs, kind, keys, prompt)

    def watch(
        self, params: Params, request: Request, window: int = 0, of: int = 0
    ) -> Iterator[SampleState]:
        """Yields the states of sample 0 of `loop.sample`, beginning before the first step.

        window  index of the window of a long text
        of      total number of steps to report; 0: the number for this text
        """
        run = self.run(params, request, window)
        with jax.set_mesh(self.mesh):
            first = fold_keys(run.keys, jnp.int32(len(request.grid)))
            chain = self._start(params["process"], request.step, run.prompt, first)
        for state, _ in self.states(run, chain, of):
            yield state

    def states(self, run: Run, chain: Chain, of: int = 0) -> Iterator[tuple[SampleState, Chain]]:
        """Yields the states from the chain at t = 1 on, each with its chain."""
        step = run.request.step
        by_schedule = reveal.has_schedule(step, run.params["process"])
        if self._guide is not None:  # reveals depend on the network
            by_schedule = by_schedule and isinstance(step, RevealsInOrder)
        return (self._by_schedule if by_schedule else self._step_by_step)(run, chain, of)

    def _step_by_step(self, run: Run, chain: Chain, of: int) -> Iterator[tuple[SampleState, Chain]]:
        grid, step, each = run.request.grid, run.request.step, calls(run.request.guidance)
        own, last = (run.params, run.inputs, step), len(grid) - 1
        count, taken = rounds_of(step, chain.z.shape[1], last), 0
        first_keys, end_keys = run.keys, fold_keys(run.keys, 0)

        def seen(taken: int) -> SampleState:
            z, confidence, used = (x[0] for x in to_host((chain.z, chain.confidence, chain[3])))
            return SampleState(taken, of or count, z, confidence, each * int(used))

        yield seen(0), chain
        while taken < count:
            index = last - taken
            with jax.set_mesh(self.mesh):
                if index > 0:
                    times = jnp.float32(grid[index - 1]), jnp.float32(grid[index])
                    keys = fold_keys(first_keys, index)
                    tokens = run.prompt.tokens
                    chain = self._step(*own, chain, times, tokens, keys, kind=run.kind)
                elif np.any(step.left(run.params["process"], to_host(chain.z)[0])):
                    number = jnp.int32(-index)
                    chain = self._further(*own, chain, end_keys, number, kind=run.kind)
                else:  # Further steps would change nothing.
                    taken = count - 1
                taken += 1
                if taken == count:
                    rest = run.prompt.tokens, end_keys, jnp.int32(count - last)
                    chain = self._finish(*own, chain, *rest, kind=run.kind)
            yield seen(taken), chain

    def _by_schedule(self, run: Run, chain: Chain, of: int) -> Iterator[tuple[SampleState, Chain]]:
        request, process = run.request, run.params["process"]
        count, length = len(request.grid) - 1, chain.z.shape[1]
        most = reveal.capacity_of(request.step, process, request.grid, length)
        # Few capacities, so that few programs are compiled; tokens do not depend on it.
        most = min(length, 2 ** (most - 1).bit_length())
        with jax.set_mesh(self.mesh):
            grid, own = jnp.asarray(request.grid), fold_keys(run.keys, count)
            passes = self._plan(process, request.step, chain, grid, own, capacity=most)
        state = reveal.begin(chain)
        number, rounds, evaluations = (to_host(x)[0] for x in passes[3:])
        taken = [int(rounds[number == k][0]) + 1 for k in range(evaluations)]
        count = of or rounds_of(request.step, length, count)
        each, keys = calls(request.guidance), fold_keys(run.keys, len(request.grid) + 1)
        done, before = chain.evaluations + passes.count, int(to_host(chain.evaluations)[0])
        yield SampleState(0, count, *(x[0] for x in to_host(state[2:])), each * before), chain
        for k, at in enumerate(taken):
            with jax.set_mesh(self.mesh):
                state = self._pass(
                    run.params, run.inputs, request.step.transform, passes, state,
                    keys=keys, kind=run.kind, capacity=most,
                )  # fmt: skip
            z, confidence = (x[0] for x in to_host(state[2:]))
            chain = Chain(state.z, chain.prompt_mask, state.confidence, done)
            yield SampleState(min(at, count), count, z, confidence, each * (before + k + 1)), chain


def _start(process: Any, step: SamplerStep, prompt: Prompt, keys: Array) -> Chain:
    return loop.start(process, step, prompt, keys)


def _plan(process: Any, step: SamplerStep, chain: Chain, grid: Array, keys: Array, *, capacity):
    schedule = reveal.schedule_of(step, process, chain, grid, keys)
    return reveal.passes_of(chain.z, schedule, capacity)


def _one_step(denoiser: Denoiser, process: Any, step, chain, times, tokens, keys) -> Chain:
    chain = loop.with_memory(denoiser, process, step, chain)
    return loop.one_step(denoiser, process, step, chain, times, tokens=tokens, keys=keys)


def _one_further(denoiser: Denoiser, process: Any, step, chain, keys, number) -> Chain:
    return step.step_further(denoiser, process, chain, keys, number)


def _finish(denoiser: Denoiser, process: Any, step, chain, tokens, keys, taken) -> Chain:
    return loop.put_prompt(loop.finish(denoiser, process, step, chain, keys, taken), tokens)
