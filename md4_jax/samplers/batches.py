"""Sampling in batches of one compiled shape; long texts are drawn window by window."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from md4_jax.options import SampleOptions
from md4_jax.protocols import Array, Network, Params, Prompt
from md4_jax.runtime.compiling import compile_ahead, jit
from md4_jax.runtime.sharding import batch_sharding, batch_shards, local_rows, to_global, to_host
from md4_jax.runtime.stopping import stop_if_asked
from md4_jax.samplers.chain import SamplerStep
from md4_jax.samplers.classifier import Guide
from md4_jax.samplers.guidance import calls, guided, with_clean_prompt
from md4_jax.samplers.loop import Frames
from md4_jax.samplers.particles import Steered
from md4_jax.samplers.paths import Parts, Runs, runs, whole

LABEL = 2**31  # separates the key of a sample's class from those of its tokens


class Samples(NamedTuple):
    """N samples as `draw_samples` returns them.

    tokens       int32 [N, L]
    prompt_mask  bool [N, L], the tokens that the user fixed
    lengths      int64 [N], number of tokens of each text; ignore later positions
    evaluations  int64 [N], number of network evaluations of each sequence
    seconds      run time of the compiled programs, without compilation
    paths        of the first R sequences through each of W windows; None without a trace
    steered      rewards and weights, if samples were steered by a reward; else None
    """

    tokens: np.ndarray
    prompt_mask: np.ndarray
    lengths: np.ndarray
    evaluations: np.ndarray
    seconds: float
    paths: Sequence[Parts] | None
    steered: Steered | None = None

    @property
    def frames(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Frames (z, confidence) of the first R whole texts after each step, both [W, F, R, L].

        z is -1 at positions that no window has reached. With blocks, frames take much memory;
        `path` omits frames in which nothing changes.
        """
        if self.paths is None:
            return None
        z, confidence = (np.stack(x) for x in zip(*map(whole, self.paths), strict=True))
        return z, confidence

    def path(self, row: int) -> Runs:
        """Returns the path of one of the first R texts."""
        return runs(self.paths, row)


class Sampler(NamedTuple):
    """A compiled sampler.

    program  (params, step, keys [B], prompt [B, L], context {name: [B]}) -> (Chain, frames)
    mesh     devices over which each batch is split
    calls    network calls per evaluation of the chain: two with guidance
    """

    program: Callable[..., tuple[Any, Any]]
    mesh: Mesh
    calls: int = 1


def make_sampler(
    network: Network,
    loop: Callable,
    grid: np.ndarray,
    mesh: Mesh,
    *,
    trace: int = 0,
    guidance: float | Guide = 1.0,
    clean_prompts: bool = False,
) -> Sampler:
    """Makes the sampler of a network along a grid; loop is `loop.sample` or a `Blocks`.

    trace          number of sequences R of the first batch whose frames are kept
    guidance       weight of classifier-free guidance, or a classifier that guides the samples; the
                   params then include those of the classifier (`Guide.beside`)
    clean_prompts  whether the network was trained on clean prompts
    """
    guide = guidance if isinstance(guidance, Guide) else None
    weight = guidance if guide is None else 1.0

    def run(params: Params, step: SamplerStep, keys: Array, prompt: Prompt, context: Mapping):
        denoiser, process = guided(network, params, context, weight, prompt)
        if clean_prompts:
            denoiser = with_clean_prompt(denoiser, process, prompt)
        if guide is not None:
            denoiser, process, step = guide.guided(params, denoiser, process, step)
        keys = jax.lax.with_sharding_constraint(keys, batch_sharding(mesh))
        return loop(denoiser, process, step, grid=grid, keys=keys, prompt=prompt, trace=trace)

    return Sampler(jit(run, mesh, network), mesh, calls(weight))


def draw_samples(
    sampler: Sampler,
    params: Params,
    step: SamplerStep,
    options: SampleOptions,
    prompts: Sequence[Prompt],
    *,
    window: int,
    context: Mapping[str, np.ndarray] | None = None,
) -> Samples:
    """Draws `options.num` samples of each prompt, in batches of one compiled shape.

    window   number of tokens that the network reads at once. A longer text is drawn window by
             window. Each window begins `options.stride` tokens after the previous one, and tokens
             of the overlap are its prompt
    context  other inputs of the network for each of the N samples, {name: [N, ...]}; None:
             `context_of(options, N)`
    """
    mesh = sampler.mesh
    tokens, prompt_mask = (
        np.repeat(np.stack(parts), options.num, axis=0) for parts in zip(*prompts, strict=True)
    )
    total, shards = len(tokens), batch_shards(mesh)
    context = context_of(options, total) if context is None else context
    size = -(-min(options.batch_size, total) // shards) * shards
    out, known = tokens.copy(), prompt_mask.copy()
    confidence = np.where(known[:size], np.float32(1), np.float32(0))  # of those to be traced
    evaluations, seconds, paths, compiled = np.zeros(total, np.int64), 0.0, [], None
    for number, part in enumerate(windows(tokens.shape[1], window, options.stride)):
        for start in range(0, total, size):
            stop_if_asked()
            rows = np.minimum(np.arange(start, start + size), total - 1)
            keys = row_keys(options.seed, number, np.arange(start, start + size))
            own = rows[local_rows(mesh, size)]
            prompt = Prompt(out[own][:, part], known[own][:, part])
            own_context = {name: np.asarray(values)[own] for name, values in context.items()}
            arguments = (params, step, keys, *to_global((prompt, own_context), mesh))
            with jax.set_mesh(mesh):
                compiled = compiled or compile_ahead(sampler.program, *arguments)
                began = time.perf_counter()
                chain, path = jax.block_until_ready(compiled(*arguments))
            seconds += time.perf_counter() - began
            if path is not None and start == 0:
                paths.append(_parts(to_host(path), out, known, confidence, part))
                confidence = _at_end(paths[-1])
            keep = min(size, total - start)
            out[start : start + keep, part] = to_host(chain.z)[:keep]
            used = sampler.calls * to_host(chain.evaluations)
            evaluations[start : start + keep] += used[:keep]
        known[:, part] = True
    # Positions after the end of a text are masks.
    ended = np.asarray(params["process"].is_noise(out))
    lengths = np.where(ended.any(axis=1), ended.argmax(axis=1), out.shape[1])
    return Samples(out, prompt_mask, lengths, evaluations, seconds, paths or None)


def cut(drawn: Samples, ends: Sequence[int]) -> Samples:
    """Returns the samples with each text cut after the first drawn symbol of `ends`."""
    ended = np.isin(drawn.tokens, ends) & ~drawn.prompt_mask
    lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, drawn.tokens.shape[1])
    return drawn._replace(lengths=np.minimum(drawn.lengths, lengths))


def context_of(options: SampleOptions, count: int, classes: int = 0) -> dict[str, np.ndarray]:
    """Returns the context of `count` samples: the class label of the options, if there is one.

    classes  without a label in the options, the label of a sample is drawn from this number of
             classes, by the seed and the sample's index; 0: no label
    """
    if options.label >= 0:
        return {"label": np.full(count, options.label, np.int32)}
    if not classes:
        return {}
    keys = row_keys(options.seed, 0, np.arange(count))
    drawn = jax.vmap(lambda key: jax.random.randint(jax.random.fold_in(key, LABEL), (), 0, classes))
    return {"label": np.asarray(drawn(keys), np.int32)}


def windows(length: int, window: int, stride: int) -> Iterator[slice]:
    """Yields the windows of a text in the order of drawing; the last one ends with the text."""
    start = 0
    while start + window < length:
        yield slice(start, start + window)
        start += stride
    yield slice(max(0, length - window), length)


def row_keys(seed: int, window: int, rows: np.ndarray) -> Array:
    """Returns the key of each sample, which depends only on the seed and the sample's index."""
    root = jax.random.key(seed)
    if window:
        root = jax.random.fold_in(root, 2**31 + window)
    return jax.vmap(jax.random.fold_in, (None, 0))(root, rows)


def _parts(
    path: Frames | Parts, tokens: np.ndarray, known: np.ndarray, confidence: np.ndarray, part: slice
) -> Parts:
    """Returns the paths of a window in whole texts, with -1 where nothing is drawn yet."""
    if isinstance(path, Parts):  # blocks, which know their places
        traced = min(path.z.shape[2], len(tokens))
        first = tuple(x[:traced] for x in path.first)
        return Parts(
            path.z[:, :, :traced], path.confidence[:, :, :traced], path.begin[:, :traced], first
        )
    traced = min(path.z.shape[1], len(tokens))
    tokens, known, confidence = (x[:traced] for x in (tokens, known, confidence))
    after = np.where(known[:, part], confidence[:, part], path.confidence[:, :traced])
    first = (np.where(known, tokens, -1), confidence)
    return Parts(path.z[None, :, :traced], after[None], np.full((1, traced), part.start), first)


def _at_end(parts: Parts) -> np.ndarray:
    """Returns the confidence [R, L] after the last step of a window."""
    ends = parts._replace(z=parts.z[:, -1:], confidence=parts.confidence[:, -1:])
    return whole(ends)[1][-1]
