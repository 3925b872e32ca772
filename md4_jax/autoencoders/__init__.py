"""Autoencoders that turn images into grids of codes, and codes into images: docs/images.md."""

from md4_jax.autoencoders.vq import ARRAYS, CONFIG, FOLDER, Autoencoder, read
from md4_jax.runtime.tensors import TORCH as FILES  # endings of an autoencoder that is one file

__all__ = ["ARRAYS", "CONFIG", "FILES", "FOLDER", "Autoencoder", "read"]
