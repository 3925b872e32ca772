"""Mixture of the tables of counts and the network: weights of each table at each position."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.linear import Linear
from md4_jax.networks.tables import LOOKUPS, Evidence
from md4_jax.protocols import Array

HIDDEN = 128
# Weight of each table before anything is learned: small, since the tables say much the same.
FIRST = 0.15
# Divisors that bring log counts and log ratios near 1.
COUNTS, RATIOS = 5.0, 3.0


class TableMixture(nn.Module):
    """Adds up log ratios of the tables, sum_k w_k log (p_k V), with learned weights w.

    Weights are those of the evidence alone, from a layer on how much each table has counted and how
    sure it is, plus those of the network's features. Logistic mixing of this kind is what
    compressors do (Mahoney, "Adaptive weighing of context models", 2005).
    """

    dtype: jnp.dtype
    products: str

    def setup(self):
        self.hidden = Linear(HIDDEN, self.dtype, bias=True, products=self.products)
        self.of_evidence = Linear(LOOKUPS, self.dtype, zeros=True, bias=True)
        self.of_features = Linear(LOOKUPS, self.dtype, zeros=True, bias=True)

    def weights(self, evidence: Evidence) -> Array:
        """Returns the weights of the evidence alone, [B, P, K]."""
        surest = jnp.max(evidence.log_ratios, axis=-1) / RATIOS
        counted = jnp.log1p(evidence.counted) / COUNTS
        known = jax.nn.gelu(self.hidden(jnp.concatenate([counted, surest], axis=-1)))
        return FIRST + self.of_evidence(known).astype(jnp.float32)

    def logits(self, h: Array, evidence: Evidence, weights: Array) -> Array:
        """Returns what is added to the logits of positions with features h: [B, P, V]."""
        return mixed(weights + self.of_features(h).astype(jnp.float32), evidence)


def mixed(weights: Array, evidence: Evidence) -> Array:
    """Returns sum_k w_k log_ratios_k, [B, P, V]."""
    return jnp.einsum("bpk,bpkv->bpv", weights, evidence.log_ratios)
