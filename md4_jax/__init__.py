"""Discrete diffusion models of text and images in JAX."""

__version__ = "0.1.0"
