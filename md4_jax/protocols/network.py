"""Networks, and denoisers: networks with bound parameters and context."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.protocols.batch import Array, Params
from md4_jax.protocols.ordered import Ordered, on_signal


class Accelerator(NamedTuple):
    """Optional faster versions of a network's functions, with the same results.

    groups       numbers of parts into which devices split a batch and its sequences; gathers are
                 local to a part
    features_at  (z, t, index [B, P]) -> h [B, P, D]: features of only some positions, or None
    padded       h [..., D] -> logits [..., V'], which are -inf beyond the V symbols, or None
    platform     cpu, gpu or tpu
    features_where  (z, t, chosen: bool [B, L]) -> h [B, L, D], correct at the chosen positions, or
                 None
    """

    groups: tuple[int, int] = (1, 1)
    features_at: Callable[[Array, Array, Array], Array] | None = None
    padded: Callable[[Array], Array] | None = None
    platform: str = "cpu"
    features_where: Callable[[Array, Array, Array], Array] | None = None


class Blockwise(NamedTuple):
    """Functions of a denoiser that works block by block, for block diffusion.

    A causal one has no `features`; it appends one token at a time.

    features      (z, t [B, G], clean [B, L], block, clean_t []) -> h [B, L, D]: a block of z at its
                  time sees itself and the earlier blocks of clean, at clean_t. The last block may
                  be shorter
    empty_cache   (rows, window) -> a key-value cache that will hold `window` tokens
    append_block  (z [B, P], t [B], cache) -> (h [B, P, D], cache with z): one block that sees
                  itself and what the cache holds
    around        (z [B, P], t [B], begin, cache) -> (h [B, P, D], cache with z): a part of a text,
                  from begin, [] or [B], on, that also sees all other parts in the cache; None: z
                  is the whole text. Positions of a part beyond its text are not seen.
                  Shifted networks also take a fifth argument, True if the first token of the part
                  is known, so that its features do not matter
    following     cache -> (h [B, D], bool []): the features of the next token, if the network
                  already has them, and whether there is a token before it
    read_block    append_block for a block of clean tokens, if these see less than noisy ones; h may
                  be None
    read_blocks   (clean [B, G P], cache, P) -> cache with G blocks of P clean tokens, in one pass;
                  the cache holds the whole text so far. None: they are read one by one
    reading       (clean [B, L], t [B]) -> h [B, L, D] that predict the next token at each position,
                  for a network that reads clean tokens from left to right
    beginning     (cache, first [B]) -> the empty cache of texts that begin at these positions;
                  earlier ones are not attended to. None: all begin at 0
    anywhere      whether blocks of the network may begin anywhere, after training in blocks too
    takes_begin   whether `features` takes begin=[B], where the first block begins
    ordered       `Ordered` with a cache, for a network that reads clean tokens from left to right:
                  a block that begins anywhere in each text, and sees the cached tokens before it
    """

    features: Callable[..., Array] | None
    empty_cache: Callable[[int, int], Any]
    append_block: Callable[[Array, Array, Any], tuple[Array, Any]]
    around: Callable[..., tuple[Array, Any]] | None = None
    following: Callable[[Any], tuple[Array, Array]] | None = None
    read_block: Callable[[Array, Array, Any], tuple[Array, Any]] | None = None
    read_blocks: Callable[[Array, Any, int], Any] | None = None
    reading: Callable[[Array, Array], Array] | None = None
    beginning: Callable[[Any, Array], Any] | None = None
    anywhere: bool = False
    takes_begin: bool = False
    ordered: Ordered | None = None

    def read(self, clean: Array, t: Array, cache: Any) -> Any:
        """Returns the cache with a block of clean tokens [B, P]."""
        return (self.read_block or self.append_block)(clean, t, cache)[1]

    def with_signal(self, signal: Callable[[Array], Array]) -> "Blockwise":
        """Returns the same functions, whose network gets signal(t) as its time input."""

        def features(z: Array, t: Array, clean: Array, block: int, **begin: Array) -> Array:
            return self.features(z, signal(t), clean, block, signal(jnp.zeros(())), **begin)

        names = ("append_block", "around", "read_block", "reading")
        adapted = {name: on_signal(getattr(self, name), signal) for name in names}
        adapted["ordered"] = self.ordered and self.ordered.with_signal(signal)
        return self._replace(features=self.features and features, **adapted)


class Denoiser(NamedTuple):
    """Network with bound parameters, context and dropout key: a function of (z, t).

    features  (z [B, L], t [B]) -> h [B, L, D]
    unembed   h [..., D] -> float32 logits [..., V]; losses and samplers need few positions
    rebind    n -> the denoiser with each row of context and keys repeated n times, or None
    teacher   `Teacher` of objectives/distillation.py, for an objective that needs one, or None
    behaviour `Behaviour` of objectives/policy.py, the model that drew the batch, or None
    gaps      (z, t) -> (h [B, L + 1, D], including the end of the text, outputs for the number of
              missing tokens [B, L + 1]: `Grows`), or None
    edits     like gaps, with the features for the token that replaces each mask, and the logit of
              its deletion: (h, h for replacements, [B, L + 1, 2]), or None
    swapped   (x, group: bool [B, L]) -> h [B, L, D], each token from the other group, or None
    recall    logits [B, L, V] of an earlier call -> signal of a `Conditioned`, or None
    classify  (z, t) -> logits of the class of each sequence [B, C], or None. A network that
              `classifies` predicts no tokens
    ordered   `Ordered`, its functions of tokens in an order of their own, or None
    within    segments int32 [B, L] -> the denoiser in which a token attends only to tokens of its
              own segment, or None
    label     classes [B] that the network reads in training, some of them hidden, or None
    quality   h [..., D] -> logits [...] of the probability that a token is right, or None
    """

    features: Callable[[Array, Array], Array]
    unembed: Callable[[Array], Array]
    accelerator: Accelerator = Accelerator()
    blocks: Blockwise | None = None
    rebind: Callable[[int], "Denoiser"] | None = None
    teacher: Any = None
    gaps: Callable[[Array, Array], tuple[Array, Array]] | None = None
    edits: Callable[[Array, Array], tuple[Array, Array, Array]] | None = None
    swapped: Callable[[Array, Array], Array] | None = None
    recall: Callable[[Array], Array] | None = None
    classify: Callable[[Array, Array], Array] | None = None
    ordered: Ordered | None = None
    within: Callable[[Array], "Denoiser"] | None = None
    behaviour: Any = None
    label: Array | None = None
    quality: Callable[[Array], Array] | None = None

    def __call__(self, z: Array, t: Array) -> Array:  # logits [B, L, V]
        return self.unembed(self.features(z, t))

    def features_at(self, z: Array, t: Array, index: Array) -> Array:
        """Returns the features of only the positions index [B, P]: [B, P, D]."""
        if self.accelerator.features_at is not None:
            return self.accelerator.features_at(z, t, index)
        return jnp.take_along_axis(self.features(z, t), index[..., None], axis=1)

    def features_where(self, z: Array, t: Array, chosen: Array) -> Array:
        """Returns h [B, L, D] that is correct where chosen, bool [B, L], is true."""
        if self.accelerator.features_where is not None:
            return self.accelerator.features_where(z, t, chosen)
        return self.features(z, t)

    def repeated(self, count: int) -> "Denoiser":
        """Returns the denoiser for batches with each row repeated `count` times in a row."""
        return self if self.rebind is None else self.rebind(count)

    def with_signal(
        self, signal: Callable[[Array], Array], read: Callable[[Array], Array] = lambda z: z
    ) -> "Denoiser":
        """Returns the same denoiser, whose network gets signal(t) as its time input, and read(z).

        read is not for `blocks`, `gaps`, `edits`, `classify` and `ordered`.
        """
        shortcuts, rebind, within = self.accelerator, self.rebind, self.within
        return self._replace(
            features=on_signal(self.features, signal, read),
            accelerator=shortcuts._replace(
                features_at=on_signal(shortcuts.features_at, signal, read),
                features_where=on_signal(shortcuts.features_where, signal, read),
            ),
            blocks=self.blocks and self.blocks.with_signal(signal),
            rebind=rebind and (lambda count: rebind(count).with_signal(signal, read)),
            gaps=on_signal(self.gaps, signal),
            edits=on_signal(self.edits, signal),
            classify=on_signal(self.classify, signal),
            ordered=self.ordered and self.ordered.with_signal(signal),
            within=within and (lambda segments: within(segments).with_signal(signal, read)),
        )


class Network(NamedTuple):
    """Functions and properties of a network.

    init       key -> parameters
    bind       (parameters, context, keys) -> Denoiser. context is that of a batch; keys [B] are for
               dropout, None except in training. With a companion, its `bound` is a last argument
    time_free  its features do not depend on t
    causal     the features of a position depend on nothing to its right
    blockwise  its denoisers have `blocks`
    flops      (parameters, length, block, or 0) -> FLOPs per token of a forward pass, or None
    padding    number of entries of its parameters that belong to no symbol and are never used
    products   operands of most of its matrix products: float32, or bfloat16 rounded from float32
    companion  `networks.tables.Tables`, tables of counts that support the network, or None
    mixtures   its denoisers read a `Mixture` too
    gaps       its denoisers have `gaps`, and z may hold V + 1
    edits      its denoisers have `edits`
    adapters   regular expression of the paths of the only trained parameters, '' for all
    added      regular expression of the paths of others that a model without them can be given, and
               that are then trained beside adapters; '' for none
    parameters type in which frozen parameters are stored: float32 or bfloat16
    swapped    its denoisers have `swapped`
    recalls    its denoisers have `recall`, and read a `Conditioned` too
    reads      the blocks of its denoisers have `reading`
    ordered    its denoisers have `ordered`
    marked     it adds end tokens to each text: a sequence is one text of known length
    splits     devices can share a sequence, each with a part of its positions
    classifies its denoisers have `classify`, and predict no tokens
    hides      its denoisers have `within`
    encodes    it has a separate encoder for clean blocks, which is unused without blocks
    quality    its denoisers have `quality`
    parts      number of sub-tokens of the tokens whose codes it reads instead of z; 0: it reads z
    """

    init: Callable[[Array], Params]
    bind: Callable[..., Denoiser]
    time_free: bool
    causal: bool = False
    blockwise: bool = False
    flops: Callable[[Params, int, int], float] | None = None
    padding: int = 0
    products: str = "float32"
    companion: Any = None
    mixtures: bool = False
    adapters: str = ""
    added: str = ""
    parameters: str = "float32"
    gaps: bool = False
    edits: bool = False
    swapped: bool = False
    recalls: bool = False
    reads: bool = False
    marked: bool = False
    splits: bool = False
    classifies: bool = False
    ordered: bool = False
    hides: bool = False
    encodes: bool = False
    quality: bool = False
    parts: int = 0

    def size(self, params: Params) -> int:
        """Returns the number of parameters (arrays or their shapes), without padding."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(params)) - self.padding

    def denoiser(
        self, params: Params, context: Mapping[str, Array] | None = None, keys: Array | None = None
    ) -> Denoiser:
        """Returns the denoiser of params {'network', 'process', ...}, a function of (z, t)."""
        known = () if self.companion is None else (self.companion.bound(params["companion"]),)
        bound = self.bind(params["network"], context or {}, keys, *known)
        process = params["process"]
        return bound.with_signal(process.signal, *((process.code,) if self.parts else ()))
