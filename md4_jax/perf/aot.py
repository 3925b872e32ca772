"""Compiles a config for absent devices, and counts bytes, FLOPs and collectives."""

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.evals.likelihood import make_eval_step, reported
from md4_jax.experiment import Experiment, drawn_classes, sample_block
from md4_jax.perf.chips import Chip
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
    evaluations,
    forward_flops,
    positions_cached,
    sampling_steps,
    training_flops,
)
from md4_jax.protocols import Batch, UserError
from md4_jax.runtime.compiling import jit, kept_with_names
from md4_jax.runtime.sharding import batch_sharding
from md4_jax.samplers.batches import context_of
from md4_jax.training.loop import abstract_state, step_program
from md4_jax.training.precision import abstract_params


class Plan(NamedTuple):
    """Figures of a compiled program on one chip.

    For a sampler, flops, moved and collectives are sums over all windows of a sample.

    arguments, outputs, temporaries  bytes; outputs without donated arguments
    moved                            bytes read and written in memory, by `hlo.traffic`
    collectives                      {kind: (count, bytes received)}, by `hlo.traffic`
    flops                            by the formula of `bench`
    counted, accessed                FLOPs and bytes counted by the compiler, with the body of a
                                     loop counted once; 0 on GPUs, where it does not count
    compile                          seconds
    """

    arguments: int
    outputs: int
    temporaries: int
    moved: float
    collectives: dict[str, tuple[int, float]]
    flops: float
    counted: float
    accessed: float
    compile: float

    @property
    def memory(self) -> int:
        return self.arguments + self.outputs + self.temporaries


def sizes(experiment: Experiment) -> dict[str, int]:
    """Returns the number of parameters, depth and width of the network, and the sequence length."""
    params = abstract_state(experiment).whole["network"]
    network = experiment.config["network"]
    return {
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "length": experiment.data.length,
        **{name: network[name] for name in ("depth", "size") if name in network},
    }


def plan(experiment: Experiment) -> dict[str, Plan]:
    """Compiles the selected programs: training step, evaluation step and sampler."""
    programs = {"train": _train, "eval": _eval, "sample": _sample}
    if "sample" in experiment.plan.chosen:
        sample_rows(experiment)  # reports what cannot be planned before compiling
    return {name: programs[name](experiment) for name in experiment.plan.chosen}


def _train(experiment: Experiment) -> Plan:
    shapes = abstract_state(experiment)
    batch = _batch(experiment, experiment.train.batch_size)
    rows, split = batch.tokens.shape[:1], batch.tokens.sharding
    rewards = jax.ShapeDtypeStruct(rows, jnp.float32, sharding=split)
    batch = completed(experiment.objective, batch, rewards)
    flops = batch.tokens.size * training_flops(experiment, shapes)
    return _compiled(experiment, step_program(experiment, shapes), flops, shapes, batch)


def _eval(experiment: Experiment) -> Plan:
    params = abstract_params(experiment)
    bound = reported(experiment)
    count = bound.count(experiment.network)
    step = make_eval_step(experiment.network, bound.objective, count, bound.seed)
    batch = _batch(experiment, bound.sequences(experiment), bound.data)
    length = batch.tokens.shape[1]
    flops = forward_flops(experiment, params["network"], bound.objective, length)
    flops *= count * batch.tokens.size
    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(experiment.mesh, P()))
    program = jit(step, experiment.mesh, experiment.network)
    return _compiled(experiment, program, flops, params, batch, index)


def _sample(experiment: Experiment) -> Plan:
    params = abstract_params(experiment)
    rows = sample_rows(experiment)
    first, *others = sample_prompts(experiment, rows)
    sampler = sampler_of(experiment)
    split = batch_sharding(experiment.mesh)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    keys = jax.ShapeDtypeStruct(
        keys.shape, keys.dtype, sharding=NamedSharding(experiment.mesh, P())
    )
    prompt, inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
        (first, context_of(experiment.sample, rows, drawn_classes(experiment))),
    )
    length, count = first.tokens.shape[1], 1 + len(others)
    of_path = sample_block(experiment) or length
    steps = sampling_steps(experiment, of_path)
    read = positions_cached(experiment, params, length)
    read = read or evaluations(experiment, of_path) * length
    flops = sampler.calls * rows * read
    flops *= forward_flops(experiment, params["network"], length=length)
    guide = experiment.guide
    if guide is not None:
        flops = math.nan  # the formula is of one network
        params = guide._replace(params=_replicated(guide.params, experiment)).beside(params)
    arguments = (params, experiment.sampler_step, keys, prompt, inputs)
    window = _compiled(experiment, sampler.program, flops, *arguments, rounds=steps)
    received = {kind: (count * n, count * size) for kind, (n, size) in window.collectives.items()}
    return window._replace(
        flops=count * window.flops, moved=count * window.moved, collectives=received
    )


def _replicated(arrays: Any, experiment: Experiment) -> Any:
    """Returns the shapes of arrays that every device holds as a whole."""
    whole = NamedSharding(experiment.mesh, P())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arrays)


def _batch(experiment: Experiment, rows: int, changes: Mapping[str, Any] | None = None) -> Batch:
    """Returns the shapes of a batch; changes: overridden keys of the `data` section."""
    split, data = batch_sharding(experiment.mesh), data_of(experiment, changes)
    shape = (rows, data["length"])
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=split)
    loss_mask = jax.ShapeDtypeStruct(shape, bool, sharding=split)
    context = {
        name: jax.ShapeDtypeStruct(size, jnp.int32, sharding=split)
        for name, size in context_shapes(experiment, shape, changes).items()
    }
    return Batch(tokens, loss_mask, context)


def _compiled(
    experiment: Experiment, fn: Callable, flops: float, *arguments: Any, rounds: int = 1
) -> Plan:
    """Compiles a program; rounds: iterations of loops with a data-dependent length."""
    began = time.perf_counter()
    # Not jax.set_mesh, which would compute constants on the absent devices.
    with jax.sharding.use_abstract_mesh(experiment.mesh.abstract_mesh):
        lowered = fn.lower(*arguments)
    try:
        with kept_with_names():  # which `traffic` reads
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith("INTERNAL"):
            raise UserError(
                f"XLA failed: {str(error).splitlines()[0][:200]}. If the TPU or GPU library does "
                f"not match jax {jax.__version__}, run pip install 'jax[tpu]=={jax.__version__}', "
                "with cuda13 instead of tpu for a GPU"
            ) from error
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        numbers = re.search(r"(Ran out of .*?|Used .*?) ?\.? (HLO module|Exceeded)", str(error))
        said = numbers[1] if numbers else str(error).splitlines()[0][:300]
        raise UserError(
            f"a program does not fit the chip: {said}. " + remedies(experiment)
        ) from error
    spent = time.perf_counter() - began
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    moving = traffic(compiled.as_text(), rounds)
    return Plan(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        moving.moved,
        moving.collectives,
        flops / experiment.mesh.size,
        float(cost.get("flops", 0.0)),
        float(cost.get("bytes accessed", 0.0)),
        spent,
    )


def table(plans: Mapping[str, Plan], chip: Chip | None) -> str:
    """Formats plans as a Markdown table, with the time per resource if a chip is given."""
    lines = [
        "| program | arguments | outputs | temporaries | GFLOP a chip | moved | collectives "
        "| least seconds: compute, memory, links | utilisation at most | compile s |",
        "|---" * 10 + "|",
    ]
    for name, p in plans.items():
        kinds = ", ".join(f"{n} {k} {_mib(b)}" for k, (n, b) in sorted(p.collectives.items()))
        times = seconds(p, chip) if chip else ()
        most = f"{times[0] / max(times):.0%}" if times else ""
        lines.append(
            f"| {name} | {_mib(p.arguments)} | {_mib(p.outputs)} | {_mib(p.temporaries)} "
            f"| {p.flops / 1e9:,.1f} | {_mib(p.moved)} | {kinds or 'none'} "
            f"| {', '.join(f'{s:.4f}' for s in times)} | {most} | {p.compile:.0f} |"
        )
    return "\n".join(lines)


def seconds(p: Plan, chip: Chip) -> tuple[float, float, float]:
    """Returns the seconds for only arithmetic, memory or links, at published rates."""
    received = sum(size for _, size in p.collectives.values())
    return p.flops / chip.flops, p.moved / chip.bandwidth, received / chip.links


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def check_fits(plans: Mapping[str, Plan], chip: Chip, experiment: Experiment) -> None:
    """Raises UserError, with the numbers, if a program needs more memory than the chip has."""
    name, worst = max(plans.items(), key=lambda item: item[1].memory)
    if worst.memory > chip.memory:
        raise UserError(
            f"the {name} program needs {worst.memory / 2**30:.1f} GiB on each chip, but a chip "
            f"has {chip.memory / 2**30:.0f}: {worst.arguments / 2**30:.1f} arguments, "
            f"{worst.outputs / 2**30:.1f} outputs and {worst.temporaries / 2**30:.1f} "
            "temporaries. " + remedies(experiment)
        )


def remedies(experiment: Experiment) -> str:
    """Names the keys that would reduce the memory of this config."""
    network, shape = experiment.config["network"], experiment.mesh.shape
    stronger = {"none": "network.remat=dots or full", "dots": "network.remat=full"}
    words = [stronger.get(network.get("remat"), "")]
    words.append(f"a larger train.microbatches than {experiment.train.microbatches or 1}")
    words.append(f"a larger mesh.fsdp than {shape['fsdp']}")
    if experiment.network.splits:
        words.append(f"a larger mesh.context than {shape['context']}")
    words.append("network.dtype=bfloat16" if network.get("dtype") == "float32" else "")
    return "Try " + ", ".join(word for word in words if word)
