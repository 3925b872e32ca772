"""Reverse steps and time grids by their name in a config."""

from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import cosine, uniform

SAMPLERS = {
    "ancestral": Ancestral,
}

GRIDS = {
    "cosine": cosine,
    "uniform": uniform,
}
