"""What a config takes on devices that are not there: compiled for a topology, and not run."""

import collections
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.bench import forward_flops
from md4_jax.experiment import Experiment, eval_batch_size, sample_length
from md4_jax.protocols import Batch, UserError
from md4_jax.sample import make_sampler
from md4_jax.samplers.loop import sample
from md4_jax.sharding import batch_sharding
from md4_jax.step import make_eval_step, make_train_step
from md4_jax.train import abstract_state


class Chip(NamedTuple):
    """Published numbers of one chip: bytes, bf16 FLOP/s, bytes/s of memory and of all links."""

    memory: float
    flops: float
    bandwidth: float
    links: float


CHIPS = {
    "TPU v4": Chip(32 * 2**30, 275e12, 1228e9, 300e9),
    "TPU v5 lite": Chip(16 * 2**30, 197e12, 819e9, 200e9),
    "TPU v5": Chip(95 * 2**30, 459e12, 2765e9, 600e9),
    "TPU v6 lite": Chip(32 * 2**30, 918e12, 1640e9, 448e9),
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "f64": 8}


class Plan(NamedTuple):
    """One compiled program on one chip.

    arguments, outputs, temporaries  bytes; outputs without what is written over arguments
    moved                            bytes read and written, by the compiler's count
    collectives                      {kind: (how many, bytes that a chip receives)}, loops unrolled
    flops                            by the formula of `bench`, of one chip
    compile                          seconds
    """

    arguments: int
    outputs: int
    temporaries: int
    moved: float
    collectives: dict[str, tuple[int, float]]
    flops: float
    compile: float

    @property
    def memory(self) -> int:
        return self.arguments + self.outputs + self.temporaries


def devices_of(topology: str) -> list:
    """The devices of 'v5e:16x16' (needs libtpu) or 'cpu:8'; UserError for one that is none."""
    kind, _, shape = topology.partition(":")
    if kind == "cpu":
        here = jax.devices("cpu")
        if not shape.isdigit() or not 0 < int(shape) <= len(here):
            raise UserError(
                f"--topology {topology} needs {shape or 'a number of'} devices and there are "
                f"{len(here)}: XLA_FLAGS=--xla_force_host_platform_device_count={shape or 8}"
            )
        return here[: int(shape)]
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        first = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"--topology {topology}: {first}. They look like v5e:16x16, v5p:4x4x8, v6e:8x8 or "
            "cpu:8, and those of TPUs need pip install libtpu"
        ) from error


def plan(exp: Experiment) -> dict[str, Plan]:
    """The training step, the evaluation step and the sampler of an experiment."""
    shapes = abstract_state(exp)
    programs = {
        "train": lambda: _train(exp, shapes),
        "eval": lambda: _eval(exp, shapes),
        "sample": lambda: _sample(exp, shapes),
    }
    return {name: make() for name, make in programs.items()}


def _train(exp: Experiment, shapes: Any) -> Plan:
    step = make_train_step(exp.network, exp.objective, exp.optimizer, exp.train)
    batch = _batch(exp, exp.train.batch_size, exp.data.length)
    flops = 3.0 * batch.tokens.size * forward_flops(exp, shapes.params["network"])
    return _compiled(exp, jax.jit(step, donate_argnums=0), flops, shapes, batch)


def _eval(exp: Experiment, shapes: Any) -> Plan:
    step = make_eval_step(exp.network, exp.eval_objective, exp.eval.draws, exp.eval.seed)
    batch = _batch(exp, eval_batch_size(exp), exp.data.length)
    flops = exp.eval.draws * batch.tokens.size * forward_flops(exp, shapes.params["network"])
    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(exp.mesh, P()))
    return _compiled(exp, jax.jit(step), flops, shapes.ema, batch, index)


def _sample(exp: Experiment, shapes: Any) -> Plan:
    rows, length = exp.sample.batch_size, sample_length(exp)
    shards = math.prod(exp.mesh.shape[axis] for axis in ("data", "fsdp"))
    rows = -(-rows // shards) * shards
    step = make_sampler(exp.network, sample, exp.grid, exp.mesh)
    split = batch_sharding(exp.mesh)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    keys = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=NamedSharding(exp.mesh, P()))
    tokens, given = (
        jax.ShapeDtypeStruct((rows, length), dtype, sharding=split) for dtype in (jnp.int32, bool)
    )
    flops = exp.sample.steps * rows * length * forward_flops(exp, shapes.params["network"])
    return _compiled(exp, step, flops, shapes.ema, exp.sampler_step, keys, tokens, given)


def _batch(exp: Experiment, rows: int, length: int) -> Batch:
    split = batch_sharding(exp.mesh)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=split)
    weight = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=split)
    context = {"segments": tokens} if exp.data.separate_documents else {}
    return Batch(tokens, weight, context)


def _compiled(exp: Experiment, fn: Callable, flops: float, *arguments: Any) -> Plan:
    began = time.perf_counter()
    # Not jax.set_mesh: constants are computed while tracing, and these devices compute nothing.
    with jax.sharding.use_abstract_mesh(exp.mesh.abstract_mesh):
        compiled = fn.lower(*arguments).compile()
    spent = time.perf_counter() - began
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return Plan(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        float(cost.get("bytes accessed", 0.0)),
        collectives(compiled.as_text()),
        flops / exp.mesh.size,
        spent,
    )


def collectives(text: str) -> dict[str, tuple[int, float]]:
    """{kind: (how many, bytes received)} of a program's text, bodies of loops as often as they run.

    Bytes of a result of size n over g devices: all-gather and all-to-all n (g - 1) / g,
    reduce-scatter n (g - 1), all-reduce 2 n (g - 1) / g, permute n.
    """
    bodies = _computations(text)
    times = _times(bodies)
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for name, lines in bodies.items():
        for line in lines:
            kind, size = _collective(line)
            if kind and times[name]:
                found[kind][0] += times[name]
                found[kind][1] += times[name] * size
    return {kind: (int(count), size) for kind, (count, size) in found.items()}


def _computations(text: str) -> dict[str, list[str]]:
    """{name: lines} of each computation; the entry is called ENTRY."""
    bodies, name = {}, ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = "ENTRY" if head[1] else head[2]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    return bodies


def _times(bodies: Mapping[str, list[str]]) -> dict[str, int]:
    """How often each computation runs; loops of unknown length once."""
    times: dict[str, int] = collections.defaultdict(int)

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in bodies.get(name, ()):
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            each = int(trips[1]) if trips and " while(" in line else 1
            called = re.findall(r"(?:calls|body|to_apply)=%?([\w.\-]+)", line)
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            called += re.findall(r"[\w.\-]+", branches[1]) if branches else []
            for other in called:
                visit(other, count * each)

    visit("ENTRY", 1)
    return times


def _collective(line: str) -> tuple[str, float]:
    """(kind, bytes received by a device) of an instruction; ('', 0) of another."""
    match = re.search(r"= (.*?) (" + "|".join(COLLECTIVES) + r")(?:-start)?\(", line)
    if not match:
        return "", 0.0
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
    if "-start(" in line:  # of (operand, result) pairs the results
        shapes = shapes[len(shapes) // 2 :]
    size = sum(BYTES.get(t, 4) * math.prod(map(int, filter(None, d.split(",")))) for t, d in shapes)
    group = _group(line)
    share = (group - 1) / group
    factor = {"all-reduce": 2 * share, "reduce-scatter": group - 1, "collective-permute": 1.0}
    return match[2], size * factor.get(match[2], share)


def _group(line: str) -> int:
    """Devices of one group of a collective."""
    tiled = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if tiled:
        return int(tiled[2])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else 2


def table(plans: Mapping[str, Plan], chip: Chip | None) -> str:
    """The plans as a markdown table; with a chip the time that each resource would take."""
    lines = [
        "| program | arguments | outputs | temporaries | GFLOP a chip | moved | collectives "
        "| least seconds: compute, memory, links | compile s |",
        "|---" * 9 + "|",
    ]
    for name, p in plans.items():
        kinds = ", ".join(f"{n} {k} {_mib(b)}" for k, (n, b) in sorted(p.collectives.items()))
        times = "" if chip is None else ", ".join(f"{s:.4f}" for s in seconds(p, chip))
        lines.append(
            f"| {name} | {_mib(p.arguments)} | {_mib(p.outputs)} | {_mib(p.temporaries)} "
            f"| {p.flops / 1e9:,.1f} | {_mib(p.moved)} | {kinds or 'none'} | {times} "
            f"| {p.compile:.0f} |"
        )
    return "\n".join(lines)


def seconds(p: Plan, chip: Chip) -> tuple[float, float, float]:
    """What arithmetic, memory and links would each take alone at the published rates."""
    received = sum(size for _, size in p.collectives.values())
    return p.flops / chip.flops, p.moved / chip.bandwidth, received / chip.links


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def check_fits(plans: Mapping[str, Plan], chip: Chip, exp: Experiment) -> None:
    """UserError, with the numbers, for a program that needs more than the chip has."""
    name, worst = max(plans.items(), key=lambda item: item[1].memory)
    if worst.memory > chip.memory:
        remat = "" if exp.config["network"].get("remat") else "network.remat=True, "
        raise UserError(
            f"the {name} program needs {worst.memory / 2**30:.1f} GiB on each chip, which has "
            f"{chip.memory / 2**30:.0f}: {worst.arguments / 2**30:.1f} arguments and "
            f"{worst.temporaries / 2**30:.1f} temporaries. Try {remat}a larger "
            f"train.microbatches than {exp.train.microbatches}, a larger mesh.fsdp than "
            f"{exp.mesh.shape['fsdp']}, or network.dtype=bfloat16"
        )
