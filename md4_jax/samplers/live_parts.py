"""States of texts that are drawn part by part: block by block, or window by window."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from md4_jax.processes.draws import fold_keys
from md4_jax.protocols import Array, Denoiser, Network, Params, Prompt
from md4_jax.runtime.sharding import to_host
from md4_jax.samplers.batches import windows
from md4_jax.samplers.blocks import Blocks, Text
from md4_jax.samplers.chain import Chain, SamplerStep, rounds_of
from md4_jax.samplers.guidance import calls
from md4_jax.samplers.live import Live, Request, Run, SampleState
from md4_jax.samplers.loop import put_prompt
from md4_jax.samplers.paths import overlap


class LiveBlocks:
    """Compiled programs that take one step of `Blocks` at each call, the same for all blocks."""

    def __init__(self, network: Network, mesh: Mesh, clean_prompts: bool, blocks: Blocks):
        self._live, self._blocks = Live(network, mesh, clean_prompts, blocks), blocks
        self._begin, self._open, self._close = (
            self._live.program(function) for function in (self._begun, self._opened, self._closed)
        )

    def watch(self, params: Params, request: Request) -> Iterator[SampleState]:
        """Yields the states of sample 0 of `Blocks`, beginning before the first step."""
        run, size = self._live.run(params, request), self._blocks.block
        text, moved, shift = self._call(self._begin, run)
        count, shift = moved.shape[1] // size, int(to_host(shift)[0])
        rounds = rounds_of(request.step, size, len(request.grid) - 1)
        path = _Path(request.prompt, self._blocks.unseen(params["process"]), count, rounds)
        each = calls(request.guidance)
        for b in range(count):
            keys = fold_keys(run.keys, b)
            first = fold_keys(keys, len(request.grid))
            text, chain, prompt = self._call(self._open, run, request.step, text, first)
            used = each * int(to_host(text.evaluations)[0])
            own = run._replace(keys=keys, inputs=run.inputs._replace(text=text), prompt=prompt)
            for state, now in self._block(own, chain, rounds):
                yield from path.put(b, b * size - shift, state, used)
                chain = now
            text = self._call(self._close, run, text, chain)
            if to_host(text.ended)[0]:
                break
        here = slice(shift, shift + len(request.prompt.tokens))
        z, confidence, used = (to_host(x)[0] for x in (text.z, text.confidence, text.evaluations))
        seen = z[here], confidence[here]
        yield SampleState(path.of, path.of, *seen, each * int(used), len(request.prompt.tokens))

    def _block(self, run: Run, chain: Chain, rounds: int) -> Iterator[tuple[SampleState, Chain]]:
        """Yields the states of a block; a given block has one state and no evaluation."""
        if not to_host(chain.prompt_mask)[0].all():
            yield from self._live.states(run, chain, rounds)
            return
        chain = put_prompt(chain, run.prompt.tokens)
        z, confidence = (to_host(x)[0] for x in (chain.z, chain.confidence))
        yield SampleState(0, rounds, z, confidence, 0), chain

    def _call(self, program: Callable, run: Run, *rest: Any) -> Any:
        with jax.set_mesh(self._live.mesh):
            return program(run.params, run.inputs, *rest, run.prompt, kind=run.kind)

    def _begun(self, denoiser: Denoiser, process: Any, prompt: Prompt) -> tuple[Text, Array, Array]:
        denoiser, moved, shift = self._blocks.placed(denoiser, prompt)
        text = self._blocks.begun(denoiser, process, moved, shift)
        return text, moved.tokens, text.first

    def _opened(
        self, denoiser: Denoiser, process: Any, step: SamplerStep, text: Text, keys: Array, prompt
    ) -> tuple[Text, Chain, Prompt]:
        denoiser, moved, _ = self._blocks.placed(denoiser, prompt)
        here = self._blocks.part(moved, text)
        return *self._blocks.opened(denoiser, process, step, text, moved, keys), here

    def _closed(
        self, denoiser: Denoiser, process: Any, text: Text, chain: Chain, prompt: Prompt
    ) -> Text:
        denoiser, *_ = self._blocks.placed(denoiser, prompt)
        return self._blocks.closed(denoiser, process, text, chain._replace(memory=None))


def watch_windows(
    live: Live, params: Params, request: Request, window: int, stride: int
) -> Iterator[SampleState]:
    """Yields the states of sample 0 of `draw_samples`, window by window."""
    tokens, known = (np.array(x) for x in request.prompt)
    parts = list(windows(len(tokens), window, stride))
    rounds = rounds_of(request.step, window, len(request.grid) - 1)
    path, used = _Path(request.prompt, -1, len(parts), rounds), 0
    for number, part in enumerate(parts):
        own = request._replace(prompt=Prompt(tokens[part], known[part]))
        stays = path.confidence[part].copy()
        for state in live.watch(params, own, number, rounds):
            confidence = np.where(known[part], stays, state.confidence)
            yield from path.put(number, part.start, state._replace(confidence=confidence), used)
        tokens[part], known[part] = state.z, True
        used += state.evaluations
    yield SampleState(path.of, path.of, path.z, path.confidence, used, len(tokens))


class _Path:
    """Text on the host, drawn part by part with equally many steps per part."""

    def __init__(self, prompt: Prompt, unseen: int, parts: int, rounds: int):
        self.z = np.where(prompt.mask, prompt.tokens, unseen)
        self.confidence = prompt.mask.astype(np.float32)
        self.of, self._rounds = parts * (rounds + 1) - 1, rounds

    def put(self, number: int, begin: int, part: SampleState, used: int) -> Iterator[SampleState]:
        """Writes a state of a part, which may extend beyond the text, and yields the text.

        The last state is not yielded; the caller yields it once it knows where the text ends.

        used  network evaluations of the parts before
        """
        here, inside = overlap(begin, len(part.z), len(self.z))
        self.z[here], self.confidence[here] = part.z[inside], part.confidence[inside]
        step = number * (self._rounds + 1) + part.step
        if step < self.of:
            evaluations = used + part.evaluations
            seen = self.z.copy(), self.confidence.copy()
            yield SampleState(step, self.of, *seen, evaluations, here.start)
