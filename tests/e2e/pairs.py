"""Trains one step of every objective with every process that it goes with; prints JSON.

The same with MD4 and every other network.

pairs.py first|all: on a mesh of one device and on one of eight, in float32; all the pairs, or each
objective but those ALIKE with the first process that it goes with, and one network of images.
"""

import json
import math
import sys

import exact
import jax
import numpy as np
import optax
from tiny_networks import SIZES_OF

from md4_jax.networks.partition import Partition
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.md4 import MD4
from md4_jax.options import MeshOptions, TrainOptions
from md4_jax.processes import PROCESSES
from md4_jax.processes.masking import Masking
from md4_jax.protocols import batch_of
from md4_jax.runtime.sharding import make_mesh, shardings_of, to_global
from md4_jax.training.step import init_state, make_train_step

VOCAB, LENGTH, BATCH = 6, 8, 16
MESHES = {"one": MeshOptions(data=1), "eight": MeshOptions(data=2, fsdp=2, tensor=2)}
# Sums over tokens as in another objective's loss, with other weights or scores.
ALIKE = (
    "md4_discrete", "t_dce", "lambda_dce", "along_order", "autoregressive", "concrete_score",
    "score_entropy", "gidd", "d3pm", "dcd", "any_order", "cross_entropy", "uniform_elbo", "sdtt",
    "generalized_kl", "every_order", "flexmdm", "edit_flow",
)  # fmt: skip


def one_step(objective, process, mesh, options=None) -> dict[str, float]:
    text = dict(vocab_size=VOCAB, size=16, heads=2, hidden=64, scan_blocks=False)
    if options is None and objective.needs.swapped:
        options = Partition(**text, depth=2)
    elif options is None:
        text |= dict(depth=1, causal=objective.needs.causal, gaps=objective.needs.gaps)
        text |= dict(edits=objective.needs.edits)
        options = Transformer(**text, time_conditioning=True)
    network = options.build()
    length = math.prod(getattr(options, "shape", (LENGTH,)))
    optimizer = optax.sgd(0.1)

    def state():
        # Away from the start, where the head is zero and all outputs alike.
        taught = objective.needs.teacher
        fresh = init_state(jax.random.key(0), network, process, optimizer, taught=taught)
        moved = jax.tree.map(
            lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), fresh.params
        )
        return fresh._replace(params=moved)

    shardings = shardings_of(jax.eval_shape(state), mesh)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, length)).astype(np.int32)
    train = TrainOptions(num_steps=1, batch_size=BATCH)
    with jax.set_mesh(mesh):
        made = jax.jit(state, out_shardings=shardings)()
        batch = to_global(batch_of(tokens), mesh)
        _, metrics = jax.jit(make_train_step(network, objective, optimizer, train))(made, batch)
    return {name: float(value) for name, value in metrics.items()}


def numbers(mesh, is_brief: bool) -> dict[str, dict[str, float]]:
    found = {}
    for name, make in OBJECTIVES.items():
        fitting = [
            kind for kind, process in PROCESSES.items() if exact.fits(make(), process(VOCAB))
        ]
        if is_brief:
            fitting = [] if name in ALIKE else fitting[:1]
        for kind in fitting:
            found[f"{name}, {kind}"] = one_step(make(), PROCESSES[kind](VOCAB), mesh)
    others = [make for make in SIZES_OF if make not in (Transformer, Partition)]
    images = [make for make in others if "shape" in SIZES_OF[make]]
    # The last one, a DiT, takes half of the time that the first takes, a U-Net.
    for make in images[-1:] if is_brief else others:
        sizes = SIZES_OF[make] | dict(vocab_size=VOCAB, dropout=0.1)
        sizes |= dict(shape=(4, 4, 2)) if make in images else {}
        found[make.__name__] = one_step(MD4(), Masking(VOCAB), mesh, make(**sizes))
    return found


def main() -> None:
    # Compiling is most of the time, and the programs run once.
    jax.config.update("jax_disable_most_optimizations", True)
    is_brief = sys.argv[1] == "first"
    print(json.dumps({name: numbers(make_mesh(o), is_brief) for name, o in MESHES.items()}))


if __name__ == "__main__":
    main()
