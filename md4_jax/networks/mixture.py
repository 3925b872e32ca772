"""Mixture of the tables of counts and the network: one estimate for each symbol at a position."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.evidence import Evidence
from md4_jax.networks.linear import Linear
from md4_jax.protocols import Array

HIDDEN = 128
# Weights of all look-ups together before anything is learned: little more than that of one, since
# the tables say much the same. Those of 4 million letters of text8 then have a bound of 2.36 bits,
# with 4.8 one of 4.42.
FIRST = 1.28
# Factor of what its last layers add, so that learning rates that suit a transformer do not throw
# these sums about: 2.13 instead of 2.81 bits on text8 over the first 100 steps, and 0.003 fewer
# after 2,000.
OUTPUT = 0.1
# Listed symbols whose vectors the network reads.
EXPECTED = 8
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
        """Returns the weights of the evidence alone, [B, P, K]."""
        return FIRST / self.lookups + OUTPUT * self.of_evidence(known).astype(jnp.float32)

    def logits(self, h: Array, evidence: Evidence, known: Array) -> Array:
        """Returns what to add to the logits of the symbols of the evidence: [B, P, C].

        h: features of these positions.
        """
        weights = self.weights(known) + OUTPUT * self.of_features(h).astype(jnp.float32)
        added = self.mixed(weights, evidence)
        return added + self._corrections(h, evidence, known) if self.units else added

    @staticmethod
    def mixed(weights: Array, evidence: Evidence) -> Array:
        """Returns the estimates with these weights [B, P, K] added up, [B, P, C]."""
        return jnp.einsum("bpk,bpkc->bpc", weights, evidence.estimates)

    def _corrections(self, h: Array, evidence: Evidence, known: Array) -> Array:
        """Returns the correction of each symbol, [B, P, C]."""
        gates = self.gates_of_evidence(known) + self.gates_of_features(h)
        shift, scale = jnp.split(gates[..., None, :], [self.units], axis=-1)
        told = jnp.swapaxes(self._told(evidence), -1, -2)
        x = jax.nn.relu(self.first(told) + shift)
        x = jax.nn.relu(self.second(x) * (1.0 + scale))
        return OUTPUT * self.correction(x)[..., 0].astype(jnp.float32)

    @staticmethod
    def _told(evidence: Evidence) -> Array:
        """Returns what the correction reads of each symbol, [B, P, 2 K, C]."""
        told = [evidence.estimates, jnp.log1p(evidence.counts) / RATIOS]
        return jnp.concatenate(told, axis=-2)


class ListMixture(TableMixture):
    """Adds up shares in the lists, sum_k g_k p_k(v), with learned weights g > 0.

    A symbol that is not listed is not rare for that. So, unlike in `TableMixture`, estimates are
    added to the probabilities of the network and not to its logits, as in Jelinek and Mercer's
    interpolation. To add up log ratios of counts took about 0.2 bits per token more (web text,
    0.9 million tokens of GPT-2). Weights and correction are logarithms here.
    """

    def known(self, evidence: Evidence) -> Array:
        """Returns features of the evidence as a whole, [B, P, HIDDEN]."""
        counted = jnp.log1p(evidence.counted) / COUNTS
        surest = jnp.exp(jnp.max(evidence.estimates, axis=-1))
        kinds = jnp.log1p(jnp.sum(evidence.counts > 0, axis=-1))
        return jax.nn.gelu(self.hidden(jnp.concatenate([counted, surest, kinds], axis=-1)))

    def weights(self, known: Array) -> Array:
        """Returns the logarithms of the weights of the evidence alone, [B, P, K]."""
        return jnp.log(FIRST / self.lookups) + self.of_evidence(known).astype(jnp.float32)

    @staticmethod
    def mixed(weights: Array, evidence: Evidence) -> Array:
        """Returns the logarithm of the sum of shares, with logarithms of weights: [B, P, C]."""
        return jax.nn.logsumexp(weights[..., None] + evidence.estimates, axis=-2)

    @staticmethod
    def _told(evidence: Evidence) -> Array:
        """Returns what the correction reads of each symbol, [B, P, 2 K, C]."""
        seen = evidence.counts > 0
        told = [jnp.where(seen, evidence.estimates, 0.0), jnp.log1p(evidence.counts)]
        return jnp.concatenate(told, axis=-2) / RATIOS


def likeliest(evidence: Evidence, logits: Array) -> tuple[Array, Array]:
    """Returns (shares, symbols) of the listed symbols that are likeliest, each [B, P, EXPECTED].

    logits: logarithms of what is added to their probabilities, [B, P, C].
    """
    added = jnp.where(jnp.any(evidence.counts > 0, axis=-2), jnp.exp(logits), 0.0)
    total = 1.0 + jnp.sum(added, axis=-1, keepdims=True)
    shares, at = jax.lax.top_k(added / total, min(EXPECTED, logits.shape[-1]))
    return shares, jnp.take_along_axis(evidence.symbols, at, axis=-1)
