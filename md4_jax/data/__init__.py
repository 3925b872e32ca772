"""Data: sources, tokenizers and batches. A new source or tokenizer needs a file and a line here."""

from md4_jax.data.proteins import Proteins
from md4_jax.data.sources.cifar10 import Cifar10
from md4_jax.data.sources.digits import Digits
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.folders import ImageFolder
from md4_jax.data.sources.imagenet import DownsampledImageNet
from md4_jax.data.sources.mixture import Mixture
from md4_jax.data.sources.mnist import FashionMnist, Mnist
from md4_jax.data.sources.public import PublicText
from md4_jax.data.sources.shakespeare import Shakespeare
from md4_jax.data.sources.text8 import Text8
from md4_jax.data.sources.tfds import TfdsText
from md4_jax.data.sources.tfds_images import TfdsImages
from md4_jax.data.tokenizers import BytePairs, Bytes, Characters, Text8Symbols

SOURCES = {
    "text8": Text8,
    "text": TextFiles,
    "mixture": Mixture,
    "public": PublicText,
    "tfds": TfdsText,
    "shakespeare": Shakespeare,
    "digits": Digits,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "cifar10": Cifar10,
    "imagenet": DownsampledImageNet,
    "images": ImageFolder,
    "tfds_images": TfdsImages,
}

TOKENIZERS = {
    "text8": Text8Symbols,
    "characters": Characters,
    "bytes": Bytes,
    "bpe": BytePairs,
    "proteins": Proteins,
}
