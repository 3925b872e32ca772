"""Trains one step of every objective with every process that it goes with; prints JSON.

The same with every other network.

pairs.py first|all: on a mesh of one device and on one of eight, in float32; all the pairs, or each
objective but those ALIKE with the first process that it goes with, and one network of images.
"""

import json
import math
import sys

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny_networks import SIZES_OF, random_parameters

from md4_jax.networks.classifier import Classifier
from md4_jax.networks.diffusion_gemma import DiffusionGemma
from md4_jax.networks.maskgit import MaskGit
from md4_jax.networks.partition import Partition
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.md4 import MD4
from md4_jax.options import MeshOptions, TrainOptions
from md4_jax.processes import PROCESSES
from md4_jax.processes.masking import Masking
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import batch_of
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import shardings_of, to_global
from md4_jax.training.step import TrainState, make_train_step

VOCAB, LENGTH, BATCH = 6, 8, 16
MESHES = {"one": MeshOptions(data=1), "eight": MeshOptions(data=1, fsdp=2, context=2, tensor=2)}
# Sums over tokens as in another objective's loss, with other weights or scores.
ALIKE = (
    "md4_discrete", "t_dce", "lambda_dce", "along_order", "autoregressive", "concrete_score",
    "score_entropy", "gidd", "d3pm", "dcd", "any_order", "cross_entropy", "uniform_elbo", "sdtt",
    "generalized_kl", "every_order", "flexmdm", "edit_flow", "preference", "policy",
)  # fmt: skip


def one_step(objective, process, mesh, options=None) -> dict[str, float]:
    text = dict(vocab_size=VOCAB, size=16, heads=2, hidden=64, scan_blocks=False)
    if options is None and objective.needs.swapped:
        options = Partition(**text, depth=2)
    elif options is None and objective.needs.classifies:
        options = Classifier(**text, depth=1, classes=3)
    elif options is None:
        text |= dict(depth=1, causal=objective.needs.causal, gaps=objective.needs.gaps)
        text |= dict(edits=objective.needs.edits)
        options = Transformer(**text, time_conditioning=not objective.needs.ordered)
    network = options.build()
    length = math.prod(getattr(options, "shape", (LENGTH,)))
    optimizer = optax.sgd(0.1)
    state = start(network, process, optimizer, taught=objective.needs.teacher)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, length)).astype(np.int32)
    train = TrainOptions(num_steps=1, batch_size=BATCH)
    with jax.set_mesh(mesh):
        placed = jax.device_put(state, shardings_of(state, mesh))
        told = {"label": tokens[:, 0] % 3} if objective.needs.classifies else {}
        batch = to_global(exact.with_opinions(batch_of(tokens, context=told)), mesh)
        _, metrics = jax.jit(make_train_step(network, objective, optimizer, train))(placed, batch)
    return {name: float(value) for name, value in metrics.items()}


def start(network, process, optimizer, *, taught: bool) -> TrainState:
    """A state away from the usual start, where the head is zero and all outputs alike."""
    params = {"network": random_parameters(network), "process": process.init()}
    zero = jnp.zeros((), jnp.int32)
    teacher = params | {"network": random_parameters(network, 0.2)} if taught else ()
    return TrainState(zero, params, params, optimizer.init(params), zero, zero, teacher=teacher)


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
        sizes, pair = SIZES_OF[make] | dict(vocab_size=VOCAB), (MD4(), Masking(VOCAB))
        sizes |= dict(shape=(4, 4, 2)) if make in images else {}
        here = mesh
        if make is MaskGit:  # whose sequences may not be split
            sizes |= dict(positions=LENGTH)
            here = make_mesh(MeshOptions(data=2, fsdp=2, tensor=2)) if mesh.size > 1 else mesh
        if make is DiffusionGemma:  # which has no mask
            pair = CrossEntropy(), Uniform(VOCAB)
        elif getattr(make, "classifies", False):
            pair = OBJECTIVES["classifier"](), Masking(VOCAB)
        else:
            sizes |= dict(dropout=0.1)
        found[make.__name__] = one_step(*pair, here, make(**sizes))
    return found


def main() -> None:
    # Compiling is most of the time, and the programs run once.
    jax.config.update("jax_disable_most_optimizations", True)
    is_brief = sys.argv[1] == "first"
    print(json.dumps({name: numbers(make_mesh(o), is_brief) for name, o in MESHES.items()}))


if __name__ == "__main__":
    main()
