"""Linen module of the transformer. Array names end in their shapes: B, L, D, G groups."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.networks.by_symbol import Symbols, symbols_of
from md4_jax.networks.cache import Cache, layers_of
from md4_jax.networks.chosen import is_mask
from md4_jax.networks.condition import TIME_EMBEDDINGS, FinalModulation, TimeEmbedding, activations
from md4_jax.networks.context import label_rows
from md4_jax.networks.depth import bound, first_blocks, gathered, one_by_one, stack
from md4_jax.networks.dropout import EMBEDDING, folded, kept, layer_keys, scaled
from md4_jax.networks.evidence import Evidence
from md4_jax.networks.growing import growing_features, symbols_read
from md4_jax.networks.layers import noisy_half, norm, rows
from md4_jax.networks.linear import Linear, embedding_init, rounded
from md4_jax.networks.mixture import likeliest
from md4_jax.networks.ordinal import LocationScale, log_probabilities
from md4_jax.networks.positions import places, places_from, places_of_halves, with_places
from md4_jax.networks.products import product
from md4_jax.networks.unembedding import of_symbols, tied_head
from md4_jax.networks.vectors import mixed, vectors_of
from md4_jax.protocols import Array, Mixture
from md4_jax.runtime.sharding import BATCH_AXES, CONTEXT, constrain, splits_parameters


class TransformerModule(nn.Module):
    """Maps tokens z [B, L] in 0..V and times t [B] to features [B, L, D] and logits [B, L, V].

    options   those of `Transformer`
    segments  int32 [B, L]: a token sees only tokens of its own segment
    label     int32 [B]: a class in 0..classes-1; any other number: no class
    keys      [B]: for dropout; None: nothing is dropped
    evidence  of the tables, if there are any
    by_symbol whether the first block may compute queries, keys and values once for each symbol
    unroll    number of blocks per iteration of the scan over blocks. It is not used if a mesh
              splits parameters: without a loop XLA would gather those of all blocks at once
    """

    options: Any
    block: int = 0
    unroll: int = 1
    by_symbol: bool = False

    def setup(self):
        o = self.options
        self.compute_dtype = jnp.dtype(o.dtype)
        width, condition = o.embedding or o.size, o.condition or o.size
        if o.has_vectors:
            rows = (rounded(symbols_read(o)), width)
            self.embedding = self.param("embedding", embedding_init(o.initial, width), rows)
        if o.positions:
            rows = (o.positions, o.size)
            self.positions = self.param("positions", embedding_init(o.initial, o.size), rows)
        if o.embedding:
            self.embedding_in = Linear(
                o.size, self.compute_dtype, bias=True, initial=o.initial, products=o.products
            )
        if o.time_conditioning:
            form = TIME_EMBEDDINGS[o.time_embedding]
            self.time = TimeEmbedding(condition, form, self.compute_dtype, o.initial)
        if o.classes:
            table = nn.initializers.normal(1.0)
            self.label_table = self.param("label_table", table, (o.classes + 1, condition))
        if self.is_conditioned:
            self.final_modulation = FinalModulation(self.compute_dtype, activations(o)[1])
        self.final_norm = norm(o, conditioned=self.is_conditioned)
        if o.is_ordinal:
            self.head = LocationScale()
        elif not o.tied:
            self.head = Linear(
                rounded(o.vocab_size), self.compute_dtype, zeros=True, bias=o.head_bias,
                products=o.products,
            )  # fmt: skip
        elif o.head_bias:
            rows = (rounded(symbols_read(o)),)
            self.head_bias = self.param("head_bias", nn.initializers.zeros, rows)
        if o.gaps:
            self.missing = Linear(1 + o.edits, jnp.float32, zeros=True, bias=True)
        if o.edits:
            self.replaced = Linear(o.size, self.compute_dtype, zeros=True, products=o.products)
        self.first_blocks = first_blocks(o, self.block)
        self.blocks = stack(o, self.block, self._at_once)
        if o.tables:
            lookups = o.counts.neighbourhood.lookups
            self.mixture = o.counts.mixture(
                lookups, self.compute_dtype, o.products, o.tables_hidden
            )

    @property
    def _at_once(self) -> int:
        return 1 if splits_parameters() else self.unroll

    @property
    def is_conditioned(self) -> bool:
        """Whether layers are conditioned on the time or the class of the sequence."""
        return self.options.time_conditioning or self.options.classes > 0

    def __call__(self, z_BxL: Array, t_B: Array) -> Array:
        if self.options.gaps:
            return self.unembed(growing_features(self, z_BxL, t_B))
        if not self.options.tables:
            return self.unembed(self.features(z_BxL, t_B))
        nothing = self.options.counts.nothing(z_BxL)
        return self.unembed(self.features(z_BxL, t_B, evidence=nothing))

    def features(
        self,
        z_BxL: Array,
        t_B: Array,
        segments: Array | None = None,
        label: Array | None = None,
        keys: Array | None = None,
        index: Array | None = None,
        evidence: Evidence | None = None,
    ) -> Array:
        """Returns h [B, L, D], or with index [B, P] the features of these positions, [B, P, D].

        An index [B, L] of booleans marks the positions at which h [B, L, D] must be correct.
        With tables, the last features contain the terms that the tables add to the logits.
        """
        condition = self._condition(t_B[:, None], label)
        x_BxLxD = self.embedded(z_BxL, partial(places, segments=segments), keys)
        if evidence is None:
            return self._trunk(x_BxLxD, condition, segments, keys, index, symbols_of(self, z_BxL))
        known_BxLxH = self.mixture.known(evidence)
        expected = self.mixture.mixed(self.mixture.weights(known_BxLxH), evidence)
        x_BxLxD = x_BxLxD + self._expected(z_BxL, expected, evidence)
        h_BxPxD = self._trunk(x_BxLxD, condition, segments, keys, index)
        if index is not None and not is_mask(index):
            evidence, known_BxLxH = evidence.at(index), rows(known_BxLxH, index)
        added = self.mixture.logits(h_BxPxD, evidence, known_BxLxH)
        carried = self.options.counts.carried(added, evidence)
        return jnp.concatenate([h_BxPxD.astype(jnp.float32), carried], axis=-1)

    def _expected(self, z_BxL: Array, logits_BxLxC: Array, evidence: Evidence) -> Array:
        """Returns the expected vector of each masked token minus the mean vector; 0 elsewhere.

        With lists, the sum is over the most likely symbols and no mean is subtracted.
        """
        o = self.options
        if evidence.symbols is None:
            shares = (jax.nn.softmax(logits_BxLxC) - 1 / o.vocab_size).astype(self.compute_dtype)
            vectors = self.embedding[: o.vocab_size].astype(self.compute_dtype)
            x_BxLxD = product(shares, vectors, o.products)
        else:
            shares, symbols = likeliest(evidence, logits_BxLxC)
            x_BxLxCxD = self._vectors(symbols)
            x_BxLxD = jnp.einsum("blc,blcd->bld", shares.astype(x_BxLxCxD.dtype), x_BxLxCxD)
        if o.embedding:
            x_BxLxD = self.embedding_in(x_BxLxD)
        return jnp.where((z_BxL == o.vocab_size)[..., None], x_BxLxD, 0.0)

    def block_features(
        self,
        z_BxL: Array,
        t_BxG: Array,
        clean_BxL: Array,
        clean_t: Array,
        segments: Array | None = None,
        label: Array | None = None,
        keys: Array | None = None,
    ) -> Array:
        """Returns h [B, L, D] of z, where a block sees itself and the earlier blocks of clean.

        t has a time for each of the G = L / block blocks; clean_t is the time of clean, a number or
        [B, 1]. One pass of length 2 L reads both. The last layer computes only keys and values of
        clean, unless the network is shifted: then h of both is returned, [B, 2 L, D].
        """
        both_Bx2L = jnp.concatenate([z_BxL, clean_BxL], axis=1)
        times = jnp.concatenate([t_BxG, jnp.full_like(t_BxG, clean_t)], axis=1)
        x_Bx2LxD = self.embedded(both_Bx2L, partial(places_of_halves, segments=segments), keys)
        return self._trunk(x_Bx2LxD, self._condition(times, label), segments, keys, None)

    def _condition(self, t_BxG: Array, label_B: Array | None) -> Array | None:
        """Embeds the time of each group, plus the class: [B, G, D]."""
        o, of_each, condition_BxGxD = self.options, activations(self.options)[0], None
        if o.time_conditioning:
            condition_BxGxD = of_each(self.time(t_BxG))
        if o.classes:
            row_BxD = label_rows(self.label_table, label_B, len(t_BxG))
            row_Bx1xD = of_each(row_BxD.astype(self.compute_dtype))[:, None]
            if condition_BxGxD is None:
                return jnp.broadcast_to(row_Bx1xD, (*t_BxG.shape, row_Bx1xD.shape[-1]))
            condition_BxGxD = condition_BxGxD + row_Bx1xD
        return condition_BxGxD

    def _trunk(
        self,
        x_BxLxD: Array,
        condition_BxGxD: Array | None,
        segments: Array | None,
        keys: Array | None,
        index: Array | None,
        symbols: Symbols | None = None,
    ) -> Array:
        each_DxB, around = layer_keys(keys, self.options.depth), (condition_BxGxD, segments)
        x_BxLxD = one_by_one(self.first_blocks, x_BxLxD, around, each_DxB)
        each_DxB = None if each_DxB is None else each_DxB[self.options.dense_layers :]
        if not self.options.depth:
            x_BxLxD = x_BxLxD if index is None else rows(x_BxLxD, index)
        elif self.options.scan_blocks and (index is not None or self.block):
            x_BxLxD = gathered(
                self.options, self.block, (self.variables["params"]["blocks"], each_DxB), x_BxLxD,
                around, index=index, unroll=self._at_once,
            )  # fmt: skip
        elif self.options.scan_blocks:
            x_BxLxD, _ = self.blocks(x_BxLxD, *around, each_DxB)
        else:
            x_BxLxD = one_by_one(self.blocks, x_BxLxD, around, each_DxB, index, symbols)
        if self.block and condition_BxGxD is not None and not self.options.shifted:
            condition_BxGxD = noisy_half(condition_BxGxD)
        return self._headed(x_BxLxD, condition_BxGxD)

    def embedded(self, z_BxL: Array, where: Callable | None, keys: Array | None = None) -> Array:
        o = self.options
        x_BxLxD = constrain(self._vectors(z_BxL), BATCH_AXES, CONTEXT, None)
        if o.embedding:
            x_BxLxD = constrain(self.embedding_in(x_BxLxD), BATCH_AXES, CONTEXT, None)
        if o.positions:
            x_BxLxD = with_places(x_BxLxD, self.positions, where)
        if keys is not None and o.embedding_dropout:
            keep = kept(folded(keys, EMBEDDING), o.embedding_dropout, x_BxLxD.shape[1:])
            x_BxLxD = scaled(x_BxLxD, keep, o.embedding_dropout)
        return x_BxLxD

    def _vectors(self, z: Array | Mixture) -> Array:
        symbols = z.symbols if isinstance(z, Mixture) else z
        x = vectors_of(self.embedding, symbols, self.compute_dtype, self.options.vocab_size)
        return mixed(z, x, self.options.products) if isinstance(z, Mixture) else x

    def _headed(self, x_BxLxD: Array, condition_BxGxD: Array | None) -> Array:
        x_BxLxD = self.final_norm(x_BxLxD)
        if condition_BxGxD is None:
            return x_BxLxD
        shift, scale = self.final_modulation(condition_BxGxD, x_BxLxD.shape)
        return x_BxLxD * (1.0 + scale) + shift

    def append_block(
        self, z_BxP: Array, t_B: Array, cache: Cache, label: Array | None, segments: Array | None
    ) -> tuple[Array, Cache]:
        """Returns (h [B, P, D], cache with z) for a block z after, or among, the cached tokens."""
        first, most = cache.first, self.options.positions
        where = partial(places_from, first=first, segments=segments, most=most)
        x_BxPxD, condition = self.embedded(z_BxP, where), self._condition(t_B[:, None], label)
        found = []

        def one(block: Callable, number: int, x: Array) -> Array:
            own = cache._replace(**{name: part[number] for name, part in layers_of(cache).items()})
            x, appended = block(x, condition, segments, cache=own)
            found.append(appended)
            return x

        for number, block in enumerate(self.first_blocks):
            x_BxPxD = one(block, number, x_BxPxD)
        begun = len(found)
        if self.options.scan_blocks:
            rest = {name: part[begun:] for name, part in layers_of(cache).items()}
            x_BxPxD, appended = jax.lax.scan(
                lambda x, layer: bound(self.options, self.block, layer[0])(
                    x, condition, segments, cache=cache._replace(**layer[1])
                ),
                x_BxPxD, (self.variables["params"]["blocks"], rest), unroll=self._at_once,
            )  # fmt: skip
            if found:
                appended = jax.tree.map(
                    lambda *x: jnp.concatenate([jnp.stack(x[:-1]), x[-1]]), *found, appended
                )
        else:
            for number, block in enumerate(self.blocks):
                x_BxPxD = one(block, begun + number, x_BxPxD)
            appended = jax.tree.map(lambda *x: jnp.stack(x), *found)
        return self._headed(x_BxPxD, condition), cache.append(**appended)

    def unembed(self, h: Array, first: Array | None = None) -> Array:
        if not self.options.tables:
            return self.logits(h)
        counts = self.options.counts
        own, carried = jnp.split(h, [self.options.size], axis=-1)
        if own.ndim == 3:
            # Without it, XLA computes a wrong gradient of the slice on a 2 x 2 x 2 mesh.
            own = constrain(own, BATCH_AXES, CONTEXT, None)
        logits = self.logits(own)
        return counts.added(logits if first is None else logits + first, carried)

    def logits(self, h: Array, *, padded: bool = False) -> Array:
        """Returns the logits of all symbols; padded: and -inf for the other rows of the head."""
        o = self.options
        if o.is_ordinal:
            return log_probabilities(self.head(h), o.vocab_size)
        if o.tied:
            head = tied_head(self.embedding, self.head_bias if o.head_bias else None, o)
        else:
            head = self.head
        return of_symbols(head, h, o.vocab_size, padded=padded)
