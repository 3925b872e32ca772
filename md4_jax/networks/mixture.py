"""Mixing of tables of counts with the network: one estimate for each symbol at a position."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.evidence import Evidence
from md4_jax.networks.linear import Linear
from md4_jax.protocols import Array

HIDDEN = 128
# Initial sum of the weights of all look-ups: little more than the weight of one, since estimates of
# the tables are highly correlated. Tables of 4 million letters of text8 then have a bound of 2.36
# bits, and of 4.42 bits with a sum of 4.8.
FIRST = 1.28
# Factor of the output of the last layers, so that learning rates for a transformer are not too
# large for these sums: 2.13 instead of 2.81 bits on text8 over the first 100 steps, and 0.003 bits
# fewer after 2,000.
OUTPUT = 0.1
# Number of listed symbols whose vectors the network reads.
EXPECTED = 8
# Divisors that scale log counts and log ratios to about 1.
COUNTS, RATIOS = 5.0, 3.0


class TableMixture(nn.Module):
    """Computes a weighted sum of the tables' log ratios, sum_k w_k log (p_k V), with learned w.

    A weight is the sum of two terms: one computed from the evidence, namely the counts of each
    table and its confidence, and one from the network's features. This is logistic mixing, as in
    data compression (Mahoney, "Adaptive weighing of context models", 2005).

    With `units` a correction is added: a network of two hidden layers, applied to each symbol,
    reads the estimates of all tables for this symbol. The evidence as a whole and the features
    shift its first layer and scale its second.
    """

    lookups: int
    dtype: jnp.dtype
    products: str
    units: int = 0

    def setup(self):
        self.hidden = Linear(HIDDEN, self.dtype, bias=True, products=self.products)
        self.of_evidence = Linear(self.lookups, self.dtype, zeros=True, bias=True)
        self.of_features = Linear(self.lookups, self.dtype, zeros=True, bias=True)
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
        surest = jnp.max(evidence.estimates, axis=-1) / RATIOS
        counted = jnp.log1p(evidence.counted) / COUNTS
        return jax.nn.gelu(self.hidden(jnp.concatenate([counted, surest], axis=-1)))

    def weights(self, known: Array) -> Array:
        """Returns the term of the weights that is computed from the evidence, [B, P, K]."""
        return FIRST / self.lookups + OUTPUT * self.of_evidence(known).astype(jnp.float32)

    def logits(self, h: Array, evidence: Evidence, known: Array) -> Array:
        """Returns the terms to add to the logits of the symbols of the evidence: [B, P, C].

        h: features of these positions.
        """
        weights = self.weights(known) + OUTPUT * self.of_features(h).astype(jnp.float32)
        added = self.mixed(weights, evidence)
        return added + self._corrections(h, evidence, known) if self.units else added

    @staticmethod
    def mixed(weights: Array, evidence: Evidence) -> Array:
        """Returns the sum of the estimates with these weights [B, P, K]: [B, P, C]."""
        return jnp.einsum("bpk,bpkc->bpc", weights, evidence.estimates)

    def _corrections(self, h: Array, evidence: Evidence, known: Array) -> Array:
        """Returns the correction of each symbol, [B, P, C]."""
        gates = self.gates_of_evidence(known) + self.gates_of_features(h)
        shift, scale = jnp.split(gates[..., None, :], [self.units], axis=-1)
        read = jnp.swapaxes(self._estimates_read(evidence), -1, -2)
        x = jax.nn.relu(self.first(read) + shift)
        x = jax.nn.relu(self.second(x) * (1.0 + scale))
        return OUTPUT * self.correction(x)[..., 0].astype(jnp.float32)

    @staticmethod
    def _estimates_read(evidence: Evidence) -> Array:
        """Returns what the correction reads of each symbol, [B, P, 2 K, C]."""
        read = [evidence.estimates, jnp.log1p(evidence.counts) / RATIOS]
        return jnp.concatenate(read, axis=-2)


class ListMixture(TableMixture):
    """Computes a weighted sum of the lists' probabilities, sum_k g_k p_k(v), with learned g > 0.

    A symbol that is not listed need not be rare. So, unlike in `TableMixture`, estimates are added
    to the probabilities of the network and not to its logits, as in Jelinek-Mercer interpolation.
    Sums of log ratios of counts gave about 0.2 bits per token more (web text, 0.9 million tokens of
    GPT-2). Weights and corrections are logarithms here.
    """

    def known(self, evidence: Evidence) -> Array:
        """Returns features of the evidence as a whole, [B, P, HIDDEN]."""
        counted = jnp.log1p(evidence.counted) / COUNTS
        surest = jnp.exp(jnp.max(evidence.estimates, axis=-1))
        kinds = jnp.log1p(jnp.sum(evidence.counts > 0, axis=-1))
        return jax.nn.gelu(self.hidden(jnp.concatenate([counted, surest, kinds], axis=-1)))

    def weights(self, known: Array) -> Array:
        """Returns the logarithms of the weights from the evidence, [B, P, K]."""
        return jnp.log(FIRST / self.lookups) + self.of_evidence(known).astype(jnp.float32)

    @staticmethod
    def mixed(weights: Array, evidence: Evidence) -> Array:
        """Returns log sum_k g_k p_k from the logarithms of weights and estimates: [B, P, C]."""
        return jax.nn.logsumexp(weights[..., None] + evidence.estimates, axis=-2)

    @staticmethod
    def _estimates_read(evidence: Evidence) -> Array:
        """Returns what the correction reads of each symbol, [B, P, 2 K, C]."""
        seen = evidence.counts > 0
        read = [jnp.where(seen, evidence.estimates, 0.0), jnp.log1p(evidence.counts)]
        return jnp.concatenate(read, axis=-2) / RATIOS


def likeliest(evidence: Evidence, logits: Array) -> tuple[Array, Array]:
    """Returns (shares, symbols) of the most likely listed symbols, each [B, P, EXPECTED].

    logits: logarithms of the terms that are added to their probabilities, [B, P, C].
    """
    added = jnp.where(jnp.any(evidence.counts > 0, axis=-2), jnp.exp(logits), 0.0)
    total = 1.0 + jnp.sum(added, axis=-1, keepdims=True)
    shares, at = jax.lax.top_k(added / total, min(EXPECTED, logits.shape[-1]))
    return shares, jnp.take_along_axis(evidence.symbols, at, axis=-1)
