"""Mixture of the tables of counts and the network: one estimate for each symbol at a position."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.linear import Linear
from md4_jax.networks.neighbours import LOOKUPS
from md4_jax.networks.tables import Evidence
from md4_jax.protocols import Array

HIDDEN = 128
# Weight of each table before anything is learned: small, since the tables say much the same. The
# tables of 4 million letters of text8 then have a bound of 2.36 bits, with 0.15 one of 4.42.
FIRST = 0.04
# Factor of what its last layers add, so that learning rates that suit a transformer do not throw
# these sums about: 2.13 instead of 2.81 bits on text8 over the first 100 steps, and 0.003 fewer
# after 2,000.
OUTPUT = 0.1
# Divisors that bring log counts and log ratios near 1.
COUNTS, RATIOS = 5.0, 3.0


class TableMixture(nn.Module):
    """Adds up log ratios of the tables, sum_k w_k log (p_k V), with learned weights w.

    Weights are those of the evidence alone, from a layer on how much each table has counted and how
    sure it is, plus those of the network's features. Logistic mixing of this kind is what
    compressors do (Mahoney, "Adaptive weighing of context models", 2005).

    With `units` the sum is corrected: a network of two hidden layers, the same for each symbol,
    reads what all tables say of that symbol. The evidence as a whole and the features shift its
    first layer and scale its second.
    """

    dtype: jnp.dtype
    products: str
    units: int = 0

    def setup(self):
        self.hidden = Linear(HIDDEN, self.dtype, bias=True, products=self.products)
        self.of_evidence = Linear(LOOKUPS, self.dtype, zeros=True, bias=True)
        self.of_features = Linear(LOOKUPS, self.dtype, zeros=True, bias=True)
        if self.units:
            second = -(-self.units // 2)
            both = self.units + second
            self.gates_of_evidence = Linear(both, self.dtype, bias=True)
            self.gates_of_features = Linear(both, self.dtype, zeros=True)
            self.first = Linear(self.units, self.dtype, scale=0.1, products=self.products)
            self.second = Linear(second, self.dtype, bias=True, products=self.products)
            self.correction = Linear(1, self.dtype, zeros=True)

    def known(self, evidence: Evidence) -> Array:
        """Returns features of the evidence as a whole, [B, P, HIDDEN]."""
        surest = jnp.max(evidence.log_ratios, axis=-1) / RATIOS
        counted = jnp.log1p(evidence.counted) / COUNTS
        return jax.nn.gelu(self.hidden(jnp.concatenate([counted, surest], axis=-1)))

    def weights(self, known: Array) -> Array:
        """Returns the weights of the evidence alone, [B, P, K]."""
        return FIRST + OUTPUT * self.of_evidence(known).astype(jnp.float32)

    def logits(self, h: Array, evidence: Evidence, known: Array) -> Array:
        """Returns what is added to the logits of positions with features h: [B, P, V]."""
        weights = self.weights(known) + OUTPUT * self.of_features(h).astype(jnp.float32)
        added = mixed(weights, evidence)
        return added + self._corrections(h, evidence, known) if self.units else added

    def _corrections(self, h: Array, evidence: Evidence, known: Array) -> Array:
        """Returns the correction of each symbol, [B, P, V]."""
        gates = self.gates_of_evidence(known) + self.gates_of_features(h)
        shift, scale = jnp.split(gates[..., None, :], [self.units], axis=-1)
        told = [evidence.log_ratios, jnp.log1p(evidence.counts) / RATIOS]
        told = jnp.swapaxes(jnp.concatenate(told, axis=-2), -1, -2)
        x = jax.nn.relu(self.first(told) + shift)
        x = jax.nn.relu(self.second(x) * (1.0 + scale))
        return OUTPUT * self.correction(x)[..., 0].astype(jnp.float32)


def mixed(weights: Array, evidence: Evidence) -> Array:
    """Returns sum_k w_k log_ratios_k, [B, P, V]."""
    return jnp.einsum("bpk,bpkv->bpv", weights, evidence.log_ratios)
