"""Networks by their name in a config; each option class has `build() -> Network`."""

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

NETWORKS = {
    "transformer": Transformer,
    "unet": UNet,
    "uvit": UViT,
    "dit": DiT,
    "partition": Partition,
    "sub_tokens": SubTokens,
    "modernbert": ModernBert,
    "esm": Esm,
    "lfm2": Lfm2,
    "maskgit": MaskGit,
    "diffusion_gemma": DiffusionGemma,
    "encoder_decoder": EncoderDecoder,
    "classifier": Classifier,
    "dit_classifier": PatchClassifier,
}
