"""Bounds and losses by their name in a config."""

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.md4 import MD4, DiscreteMD4
from md4_jax.objectives.score_entropy import ScoreEntropy

OBJECTIVES = {
    "md4": MD4,
    "md4_discrete": DiscreteMD4,
    "any_order": AnyOrder,
    "genmd4": GenMD4,
    "score_entropy": ScoreEntropy,
}
