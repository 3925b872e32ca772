"""Reverse steps and time grids by their name in a config."""

from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import cosine, uniform
from md4_jax.samplers.left_to_right import LeftToRight
from md4_jax.samplers.metropolis import Metropolis

SAMPLERS = {
    "ancestral": Ancestral,
    "left_to_right": LeftToRight,
    "metropolis": Metropolis,
}

GRIDS = {
    "cosine": cosine,
    "uniform": uniform,
}
