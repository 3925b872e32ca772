"""Times each part of a config on this machine, relative to its matrix product rate."""

import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.data.units import OF_IMAGES
from md4_jax.evals.likelihood import make_eval_step, reported
from md4_jax.experiment import (
    Experiment,
    drawn_classes,
    rows_of,
    sample_block,
    sample_length,
)
from md4_jax.perf import names
from md4_jax.perf.hlo import traffic
from md4_jax.perf.inputs import (
    completed,
    context_shapes,
    data_of,
    sample_prompts,
    sample_rows,
    sampler_of,
)
from md4_jax.perf.work import (
    forward_flops,
    positions_cached,
    positions_of_evaluation,
    training_flops,
)
from md4_jax.protocols import Batch, batch_of
from md4_jax.runtime.compiling import compile_ahead, jit
from md4_jax.runtime.sharding import local_rows, max_over_processes, to_global, to_host
from md4_jax.samplers.batches import context_of
from md4_jax.training.loop import fresh_state, step_program

MATRIX = {"cpu": 2048}  # size of the square product that gives the machine's rate
OTHER_MATRIX = 8192


class Part(NamedTuple):
    """One timed program.

    call       runs it once and returns arrays to wait for
    tokens     number of tokens processed per call
    flops      of the compiled program: on CPUs its matrix products (`hlo.traffic`), elsewhere the
               compiler's count, which counts a loop's body once; 0 for a sampler, because its
               loops depend on the data, and for the input
    model      FLOPs by the network's formula: three forward passes for a training step, complete
               evaluations for a sampler, which may need only a part of each
    compile    seconds
    temporary, arguments  bytes per device
    evaluations  network evaluations per sequence in a call of a sampler
    text       HLO text of the compiled program; "" for the input
    """

    call: Callable[[], Any]
    tokens: int
    flops: float = 0.0
    model: float = 0.0
    compile: float = 0.0
    temporary: int = 0
    arguments: int = 0
    evaluations: float = 0.0
    text: str = ""


def bench(experiment: Experiment, corpus: Corpus | None) -> dict[str, Any]:
    """Times the selected parts; returns {part: numbers} for a JSON line and for a table.

    UserError for bench.names if CUDA graphs would hide the names, and as from `sample_rows`.
    """
    options = experiment.bench
    if "sample" in options.chosen:
        sample_rows(experiment)
    if options.names:
        names.check_shown(jax.default_backend(), os.environ.get("XLA_FLAGS", ""))
    out: dict[str, Any] = {"device": jax.devices()[0].device_kind, "devices": experiment.mesh.size}
    for name in options.chosen:
        part = MAKERS[name](experiment, corpus)
        rows, rates = [], []
        jax.block_until_ready(part.call())
        square = matrix_product(experiment)
        for _ in range(options.windows):
            rates.append(square.flops / window(square.call, 0.3))
            rows.append(window(part.call, options.seconds))
        out[name] = _numbers(part, rows, rates)
        if experiment.domain.unit in OF_IMAGES:
            per_second = out[name]["tokens_per_second"]
            out[name]["images_per_second"] = per_second / experiment.data.length
        if options.names and part.text:
            seconds = names.by_name(part.text, part.call)
            out[name]["names"] = names.summary(seconds, options.names)
    return out


def window(call: Callable[[], Any], seconds: float) -> float:
    """Returns the seconds per call, over as many calls as fit into the given time."""
    if jax.process_count() > 1:
        return window_together(call, seconds)
    count, began = 0, time.perf_counter()
    while True:
        done = call()
        count += 1
        if time.perf_counter() - began >= seconds:
            jax.block_until_ready(done)
            return (time.perf_counter() - began) / count
        if count % 4 == 0:
            jax.block_until_ready(done)


def window_together(call: Callable[[], Any], seconds: float) -> float:
    """Returns the same as `window` for several processes, which wait for each other in a program.

    So all of them must make the same number of calls: the number that fills the time of the
    fastest.
    """
    began = time.perf_counter()
    jax.block_until_ready(call())
    once = time.perf_counter() - began
    count = max_over_processes(max(1, math.ceil(seconds / once)))
    began = time.perf_counter()
    for number in range(1, count + 1):
        done = call()
        if number % 4 == 0 or number == count:
            jax.block_until_ready(done)
    return (time.perf_counter() - began) / count


def _numbers(part: Part, rows: list[float], rates: list[float]) -> dict[str, float]:
    typical, rate = statistics.median(rows), statistics.median(rates)
    numbers = {
        "seconds": typical,
        "seconds_min": min(rows),
        "seconds_max": max(rows),
        "tokens_per_second": part.tokens / typical,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if part.model:
        numbers |= {
            "matrix_gflops": rate / 1e9,
            "compiler_gflop": part.flops / 1e9,
            "model_gflop": part.model / 1e9,
            "compiler_utilisation": part.flops / typical / rate,
            "model_utilisation": part.model / typical / rate,
            "compile_seconds": part.compile,
            "temporary_mib": part.temporary / 2**20,
            "arguments_mib": part.arguments / 2**20,
        }
    if part.evaluations:
        numbers["network_evaluations"] = part.evaluations
        numbers["seconds_per_evaluation"] = typical / part.evaluations
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        numbers["peak_device_gib"] = stats["peak_bytes_in_use"] / 2**30
    return numbers


def matrix_product(experiment: Experiment) -> Part:
    """Makes a square product of the network's operand type; its rate defines 100% utilisation."""
    side = MATRIX.get(jax.default_backend(), OTHER_MATRIX)
    dtype = jnp.dtype(experiment.config["network"].get("dtype", "float32"))
    total = dtype
    if experiment.network.products == "bfloat16":
        dtype, total = jnp.dtype("bfloat16"), jnp.dtype("float32")
    a = jax.random.normal(jax.random.key(0), (side, side), dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=total))
    jax.block_until_ready(product(a))
    return Part(lambda: product(a), side, flops=2.0 * side**3 * experiment.mesh.size)


def _compiled(fn: Callable, *arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Compiles a program; returns (it, the fields of `Part` that are known then)."""
    began = time.perf_counter()
    compiled = compile_ahead(fn, *arguments)
    spent = time.perf_counter() - began
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    text = compiled.as_text()
    facts = dict(
        text=text,
        flops=traffic(text).products or float(cost["flops"]),
        compile=spent,
        temporary=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
    )
    return compiled, facts


def _batch(experiment: Experiment, size: int, changes: Mapping[str, Any] | None = None) -> Batch:
    """Makes a batch of random tokens; changes: overridden keys of the `data` section."""
    generator, data = np.random.default_rng(0), data_of(experiment, changes)
    shape = (size, data["length"])
    tokens = generator.integers(0, experiment.domain.vocab_size, shape, dtype=np.int32)
    tokens = tokens[local_rows(experiment.mesh, size)]
    shapes = context_shapes(experiment, tokens.shape, changes)
    context = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    return to_global(batch_of(tokens, context=context), experiment.mesh)


def _train(experiment: Experiment, corpus: Corpus | None) -> Part:
    del corpus
    with jax.set_mesh(experiment.mesh):
        state = fresh_state(experiment)
        rows = experiment.train.batch_size
        own = len(local_rows(experiment.mesh, rows))
        rewards = to_global(np.zeros(own, np.float32), experiment.mesh)
        batch = completed(experiment.objective, _batch(experiment, rows), rewards)
        compiled, facts = _compiled(step_program(experiment, state), state, batch)
    held = [state]
    tokens = batch.tokens.size
    model = tokens * training_flops(experiment, state)

    def call():
        held[0], metrics = compiled(held[0], batch)
        return metrics

    return Part(call, tokens, model=model, **facts)


def _eval(experiment: Experiment, corpus: Corpus | None) -> Part:
    del corpus
    params = fresh_state(experiment).averaged
    bound = reported(experiment)
    batch = _batch(experiment, bound.sequences(experiment), bound.data)
    count = bound.count(experiment.network)
    step = make_eval_step(experiment.network, bound.objective, count, bound.seed)
    with jax.set_mesh(experiment.mesh):
        compiled, facts = _compiled(
            jit(step, experiment.mesh, experiment.network), params, batch, jnp.int32(0)
        )
    tokens = batch.tokens.size * count
    length = batch.tokens.shape[1]
    model = tokens * forward_flops(experiment, params["network"], bound.objective, length)
    return Part(lambda: compiled(params, batch, jnp.int32(0)), tokens, model=model, **facts)


def _sample(experiment: Experiment, corpus: Corpus | None) -> Part:
    del corpus
    rows, guide, own = sample_rows(experiment), experiment.guide, fresh_state(experiment).averaged
    params = guide.beside(own) if guide else own
    sampler = sampler_of(experiment)
    keys = jax.random.split(jax.random.key(0), rows)
    mine = len(local_rows(experiment.mesh, rows))
    prompts = to_global(sample_prompts(experiment, mine), experiment.mesh)
    inputs = context_of(experiment.sample, mine, drawn_classes(experiment))
    inputs = to_global(inputs, experiment.mesh)
    arguments = [(params, experiment.sampler_step, keys, prompt, inputs) for prompt in prompts]
    with jax.set_mesh(experiment.mesh):
        compiled, facts = _compiled(sampler.program, *arguments[0])

    def call():
        return [compiled(*each)[0] for each in arguments]

    facts["flops"] = 0.0
    used = sampler.calls * sum(float(np.mean(to_host(chain.evaluations))) for chain in call())
    # With blocks, an evaluation is for one block. Appending to the cache is not counted.
    window = prompts[0].tokens.shape[1]
    of_one = math.nan if guide else forward_flops(experiment, own["network"], length=window)
    read = positions_cached(experiment, own, window)
    each = positions_of_evaluation(experiment, own, window)
    read = read if each is None else None  # these evaluations were counted
    size = used * (each or sample_block(experiment) or window)
    model = rows * of_one * (size if read is None else sampler.calls * len(prompts) * read)
    return Part(call, rows * sample_length(experiment), model=model, evaluations=used, **facts)


def _data(experiment: Experiment, corpus: Corpus | None) -> Part:
    rows = rows_of(experiment, experiment.train.batch_size)
    batches: Iterator[Batch] = corpus.train_batches(seed=experiment.train.seed, **rows)
    return Part(lambda: next(batches), experiment.train.batch_size * experiment.data.length)


MAKERS = {"train": _train, "eval": _eval, "sample": _sample, "data": _data}
