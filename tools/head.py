"""Compares the cost of the vocabulary head and its loss in three implementations.

    python tools/head.py --topology v5e:8x8 [--rows 512 --length 1024 --size 768 --symbols 50257]

Compiles the masked cross-entropy and its gradient with respect to features and head for the chips
of a topology (cpu:1, v5e:8x8; TPUs need libtpu). The dtype is bfloat16 on TPUs and float32 on CPUs,
and rows are split over all chips.

    plain      logits of all positions at once
    chunked    all positions, a chunk of logits at a time (`objectives/head.py`)
    gathered   only the masked positions, if they fit into the smallest capacity

Bytes are per chip. GFLOP counts the matrix products, on CPUs only.
"""

import argparse
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.objectives.head import at_noise, at_positions
from md4_jax.objectives.token_nats import token_nats
from md4_jax.options import MeshOptions
from md4_jax.perf.chips import devices_of
from md4_jax.perf.hlo import traffic
from md4_jax.protocols import Accelerator, Array, Denoiser, UserError
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import BATCH_AXES


def loss_of(form: str, groups: int):
    """Returns loss((h, head), x, masked): the sum of nats over the masked positions."""

    def loss(leaves: tuple[Array, Array], x: Array, masked: Array) -> Array:
        h, head = leaves
        denoiser = Denoiser(
            lambda z, t: h,
            lambda h: (h @ head.astype(h.dtype)).astype(jnp.float32),
            Accelerator((groups, 1)),
        )
        if form == "plain":
            return jnp.sum(jnp.where(masked, token_nats(denoiser.unembed(h), x), 0.0))
        at = at_noise if form == "gathered" else at_positions
        return jnp.sum(at(denoiser, h, masked, reduce=token_nats, rows=(x,)))

    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="cpu:1")
    for name, default in (("rows", 512), ("length", 1024), ("size", 768), ("symbols", 50257)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    if flags.topology.startswith("cpu:"):
        count = flags.topology.removeprefix("cpu:")
        forced = f" --xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + forced
    try:
        mesh = make_mesh(MeshOptions(), devices_of(flags.topology))
    except UserError as error:
        sys.exit(f"error: {error}")
    cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = jnp.float32 if cpu else jnp.bfloat16
    split, whole = (NamedSharding(mesh, spec) for spec in (P(BATCH_AXES), P()))
    shape = (flags.rows, flags.length)
    h = jax.ShapeDtypeStruct((*shape, flags.size), dtype, sharding=split)
    head = jax.ShapeDtypeStruct((flags.size, flags.symbols), jnp.float32, sharding=whole)
    x, masked = (jax.ShapeDtypeStruct(shape, d, sharding=split) for d in (jnp.int32, bool))
    print("| head | temporaries MiB | read and written MiB | GFLOP |\n|---|---|---|---|")
    for form in ("plain", "chunked", "gathered"):
        gradient = jax.jit(jax.value_and_grad(loss_of(form, mesh.size)))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = gradient.lower((h, head), x, masked)
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"| {form} | does not fit | | |", flush=True)
            continue
        counted = traffic(compiled.as_text())
        work = f"{counted.products / 1e9:,.0f}" if counted.products else ""
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        print(f"| {form} | {memory:,.0f} | {counted.moved / 2**20:,.0f} | {work} |", flush=True)


if __name__ == "__main__":
    main()
