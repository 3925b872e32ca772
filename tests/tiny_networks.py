"""Small networks whose parameters are all far from zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.networks import NETWORKS
from md4_jax.networks.classifier import Classifier, PatchClassifier
from md4_jax.networks.diffusion_gemma import DiffusionGemma
from md4_jax.networks.dit import DiT
from md4_jax.networks.encoder_decoder import EncoderDecoder
from md4_jax.networks.esm import Esm
from md4_jax.networks.lfm2 import Lfm2
from md4_jax.networks.maskgit import MaskGit
from md4_jax.networks.modernbert import ModernBert
from md4_jax.networks.partition import Partition
from md4_jax.networks.sub_tokens import SubTokens
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.unet import UNet
from md4_jax.networks.uvit import UViT

SIZES = dict(vocab_size=5, size=16, depth=2, heads=2, hidden=24)
# Images of 2 x 3 pixels with one channel are sequences of 6 too.
CONVOLVED = dict(vocab_size=5, shape=(2, 3, 1), blocks=1)
SIZES_OF = {
    Transformer: SIZES,
    Partition: SIZES,
    SubTokens: SIZES,
    ModernBert: SIZES | dict(window=4, global_every=2),
    Lfm2: SIZES | dict(attention_layers=(1,)),
    Esm: SIZES,
    MaskGit: SIZES | dict(positions=6, registers=2),
    DiffusionGemma: SIZES
    | dict(
        kv_heads=1,
        head_dim=8,
        global_kv_heads=1,
        global_head_dim=12,
        window=4,
        global_every=2,
        experts=4,
        expert_hidden=8,
    ),
    EncoderDecoder: SIZES | dict(decoder_depth=1),
    Classifier: SIZES | dict(classes=3),
    PatchClassifier: SIZES | dict(shape=(2, 3, 1), patch=1, embedding=8, classes=3),
    UNet: CONVOLVED | dict(channels=64),
    UViT: CONVOLVED | dict(channels=32, size=16, depth=2, heads=2, patch=1),
    DiT: SIZES | dict(shape=(2, 3, 1), patch=1, embedding=8, head_size=16),
}
# Networks by name that predict tokens.
OF_TOKENS = {k: make for k, make in NETWORKS.items() if not getattr(make, "classifies", False)}
Z = jnp.asarray([[0, 5, 2, 3, 5, 1], [4, 4, 5, 5, 0, 2], [5, 5, 5, 5, 5, 5]])
T = jnp.asarray([0.1, 0.6, 1.0])


def perturbed(params, scale=0.3):
    """Noise on every leaf: at initialisation zeros hide most of the network."""
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noisy = [jnp.asarray(x + scale * rng.normal(size=x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, noisy)


def random_parameters(network, scale=0.3):
    """Noise on every leaf, around 1 for the scales of norms.

    Its own initial values have zeros, and take twice as long to compile as its logits.
    """
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return perturbed(jax.tree_util.tree_map_with_path(_centre, shapes), scale)


def _centre(path, leaf):
    return np.full(leaf.shape, float(path[-1].key == "scale"), leaf.dtype)


@functools.cache
def built(make=Transformer, **options):
    """(network, parameters far from zero)."""
    network = make(**(SIZES_OF[make] | options)).build()
    return network, random_parameters(network)


def bound(segments=None, **options):
    """A denoiser of texts without times, as published models are; parameters far from zero."""
    published = dict(heads=4, time_conditioning=False, initial="torch")
    network, params = built(**(published | options))
    return network.bind(params, {} if segments is None else {"segments": segments})


def logits(network, params, z=Z, t=T, **context):
    return logits_of(network, params, z, t, context)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(network, params, z, t, context):
    """Traced and compiled once for each network, however often it is called."""
    return network.bind(params, context)(z, t)
