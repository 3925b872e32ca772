"""Autoencoders that turn images into grids of codes, and codes into images: docs/images.md."""

from md4_jax.autoencoders.vq import ARRAYS, CONFIG, FOLDER, Autoencoder, read

__all__ = ["ARRAYS", "CONFIG", "FOLDER", "Autoencoder", "read"]
