"""Networks whose sequences are split over eight devices, beside the same on one; prints JSON.

Its arguments are the names of the cases.

{case: {"difference": the largest one of an output or a gradient, in parts of the largest number of
that array; "work": FLOPs of each of the devices, in parts of those of one alone}}
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tiny_networks import random_parameters

from md4_jax.networks import attention as attention_module
from md4_jax.networks import blocks, splash
from md4_jax.networks.esm import Esm
from md4_jax.networks.lfm2 import Lfm2
from md4_jax.networks.modernbert import ModernBert
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.head import at_noise
from md4_jax.options import MeshOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Prompt
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import shardings_of
from md4_jax.samplers.grids import cosine
from md4_jax.samplers.loop import sample
from md4_jax.samplers.orders import AnyOrder

BATCH, LENGTH, VOCAB = 4, 64, 5
SIZES = dict(vocab_size=VOCAB, size=32, depth=2, heads=4, hidden=48)
MESH = MeshOptions(data=2, context=4)
LEAST = 1e-3  # smaller gradients are compared with this
RNG = np.random.default_rng(0)
Z = jnp.asarray(RNG.integers(0, VOCAB + 1, (BATCH, LENGTH)), jnp.int32)
X = jnp.asarray(RNG.integers(0, VOCAB, (BATCH, LENGTH)), jnp.int32)
T = jnp.asarray([0.1, 0.4, 0.6, 1.0])
SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 3, (BATCH, LENGTH)), axis=1), jnp.int32)
INDEX = jnp.asarray(np.sort(RNG.permuted(np.tile(np.arange(LENGTH), (BATCH, 1)), axis=1)[:, :16]))
KEYS = jax.random.split(jax.random.key(1), BATCH)


def whole(denoiser):
    return denoiser(Z, T)


def at_some(denoiser):
    return denoiser.features_at(Z, T, INDEX)


def at_few(denoiser):
    return denoiser.features_at(Z, T, INDEX[:, :3])  # which four devices cannot share


def of_odd_length(denoiser):
    return denoiser(Z[:, :62], T)


def in_blocks(denoiser):
    times = jnp.tile(T[:, None], (1, LENGTH // 8))
    return denoiser.unembed(denoiser.blocks.features(Z, times, X, 8))


def with_cache(denoiser):
    one, cache = denoiser.blocks.append_block(Z[:, :8], T, denoiser.blocks.empty_cache(BATCH, 32))
    two, _ = denoiser.blocks.append_block(Z[:, 8:16], T, cache)
    return jnp.concatenate([one, two], axis=1)


def in_an_order(denoiser):
    """Noisy symbols beside the clean text, both read along orders of their own."""
    rank, round = (jnp.argsort(Z + X, axis=1), jnp.broadcast_to(jnp.arange(LENGTH) // 8, Z.shape))
    return denoiser.unembed(denoiser.ordered.streams(Z, X, T, rank, round))


def losses(denoiser):
    """Those of a head that is computed at some positions only, a chunk after the other."""

    def reduce(logits, x):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), x[..., None], axis=-1)[..., 0]

    return at_noise(denoiser, denoiser.features(Z, T), Z == VOCAB, reduce=reduce, rows=(X,))


PLAIN = {}
DROPOUT = dict(dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
# With both marks the length is still even.
ESM = dict(kind=Esm, begins=1, ends=2, mesh=MeshOptions(data=4, context=2))
CASES = {
    "plain": (PLAIN, whole),
    "layers one by one": (dict(scan_blocks=False, qk_norm=True, time_conditioning=False), whole),
    "causal": (dict(causal=True), whole),
    "neighbours": (dict(local_width=5, segments=SEGMENTS), whole),
    "bfloat16 products": (dict(products="bfloat16", tied=True), whole),
    "fewer keys": (
        dict(
            kv_heads=2,
            feed_forward="gelu",
            out_bias=True,
            qkv_bias=True,
            lora_rank=2,
            lora_alpha=0.5,
        ),
        whole,
    ),
    "experts": (dict(experts=4, expert_hidden=16, balance=0.1, keys=KEYS), whole),
    "dropout": (DROPOUT | dict(keys=KEYS), whole),
    "experts and dropout": (
        DROPOUT | dict(experts=4, expert_hidden=16, balance=0.1, keys=KEYS),
        whole,
    ),
    "shifted": (dict(shifted=True), whole),
    "near": (dict(window=8, global_every=2, time_conditioning=False), whole),
    "short convolutions": (
        dict(kind=Lfm2, attention_layers=(1,), time_conditioning=False, segments=SEGMENTS),
        whole,
    ),
    "some positions": (PLAIN, at_some),
    "few positions": (PLAIN, at_few),
    "odd length": (PLAIN, of_odd_length),
    "blocks": (dict(segments=SEGMENTS), in_blocks),
    "blocks, layers one by one": (dict(scan_blocks=False, causal_context=True), in_blocks),
    "cache": (PLAIN, with_cache),
    "losses": (PLAIN, losses),
    "marks": (dict(ESM, token_dropout=True), whole),
    "marks and segments": (dict(ESM, segments=SEGMENTS), whole),
    "in an order": (dict(segments=SEGMENTS, time_conditioning=False), in_an_order),
}
# Attention by the TPU's kernel: options, and how many of [noisy, clean] ask.
KERNEL = {
    "kernel": ({}, 1),
    "kernel, causal": (dict(causal=True), 1),
    "kernel, noisy half": (dict(block=64), 1),
    "kernel, both halves": (dict(block=64, causal=True), 2),
}
SAMPLES = {"samples": 6}  # tokens of a step, which four devices cannot share
# What other cases have too, but for one option.
IN_CAMPAIGNS = {
    "bfloat16 products",
    "blocks, layers one by one",
    "causal",
    "dropout",
    "experts",
    "few positions",
    "fewer keys",
    "in an order",
    "kernel",
    "kernel, causal",
    "kernel, noisy half",
    "layers one by one",
    "marks",
    "marks and segments",
    "near",
    "odd length",
    "plain",
    "shifted",
    "short convolutions",
    "some positions",
}
TILES = 512  # positions, of which each of four devices has a tile of the kernel


def of_network(options: dict, call) -> dict[str, float]:
    """A network's outputs and gradients."""
    options = dict(options)
    context = {"segments": options.pop("segments")} if "segments" in options else {}
    keys = options.pop("keys", None)
    kind = options.pop("kind", ModernBert if "window" in options else Transformer)
    mesh = make_mesh(options.pop("mesh", MESH))
    network = kind(**(SIZES | options)).build()
    params = random_parameters(network)

    def loss(params):
        out = call(network.bind(params, context, keys))
        return jnp.mean(jnp.sin(out)), out

    split = jax.device_put(params, shardings_of({"n": params}, mesh)["n"])
    return compared(jax.grad(loss, has_aux=True), params, split, mesh)


def of_kernel(options: dict, asks: int) -> dict[str, float]:
    """Outputs and gradients of attention by the TPU's kernel, which is interpreted."""
    blockwise = "block" in options
    rng = np.random.default_rng(0)
    length = 2 * TILES if blockwise else TILES
    qkv = [jnp.asarray(rng.normal(size=(2, length, 2, 16)), jnp.float32) for _ in range(3)]
    qkv[0] = qkv[0][:, : asks * TILES]
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, TILES)), axis=1))
    attention = blocks.block_diffusion_attention if blockwise else attention_module.attend

    def loss(qkv):
        out = attention(*qkv, segments=segments, kernel="splash", **options)
        return jnp.mean(jnp.sin(out)), out

    return compared(jax.grad(loss, has_aux=True), qkv, qkv)


def of_samples(per_step: int) -> dict[str, float]:
    """Tokens that a sampler draws, so many at a time."""
    network = Transformer(**SIZES).build()
    process = Masking(VOCAB)
    params = {"network": random_parameters(network), "process": process}

    def draw(params):
        step, prompt = (
            AnyOrder(per_step=per_step),
            Prompt(jnp.zeros_like(X), jnp.zeros(X.shape, bool)),
        )
        given = dict(grid=cosine(4), keys=KEYS, prompt=prompt)
        return sample(network.denoiser(params), process, step, **given)[0].z

    mesh = make_mesh(MESH)
    split = jax.device_put(params, shardings_of(params, mesh))
    return compared(draw, params, split)


def compared(gradient, params, split, mesh=None) -> dict[str, float]:
    """Compares gradient(params) on one device with gradient(split) on eight."""
    one = jax.jit(gradient).lower(params).compile()
    with jax.set_mesh(mesh or make_mesh(MESH)):
        eight = jax.jit(gradient).lower(split).compile()
        found = eight(split)
    pairs = zip(*(jax.tree.leaves(jax.device_get(x)) for x in (one(params), found)), strict=True)
    flops = [program.cost_analysis()["flops"] for program in (one, eight)]
    apart = [np.abs(a - b).max() / max(np.abs(a).max(), LEAST) for a, b in pairs]
    return {"difference": float(max(apart)), "work": flops[1] / flops[0]}


def main() -> None:
    # Compiling is most of the time, and the programs run once.
    jax.config.update("jax_disable_most_optimizations", True)
    interpreted = functools.partial(splash.splash, interpret=True)
    attention_module.splash = blocks.splash = interpreted
    found = {}
    for cases, call in [(CASES, of_network), (KERNEL, of_kernel)]:
        found |= {name: call(*case) for name, case in cases.items() if name in sys.argv}
    found |= {name: of_samples(count) for name, count in SAMPLES.items() if name in sys.argv}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
