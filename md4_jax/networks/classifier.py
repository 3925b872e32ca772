"""Classifiers p(y | z_t, t) of noisy sequences: a transformer or a DiT with pooled features."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from md4_jax.networks.binding import repeated
from md4_jax.networks.context import check_least, checked_context
from md4_jax.networks.depth import unrolled
from md4_jax.networks.dit import DiT, PatchModule, forward_flops
from md4_jax.networks.dropout import DROPOUT, folded
from md4_jax.networks.flops import formula
from md4_jax.networks.linear import Linear, rounded
from md4_jax.networks.positions import check_length
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.trunk import TransformerModule
from md4_jax.protocols import Accelerator, Array, Denoiser, Network, Params, UserError
from md4_jax.runtime.sharding import token_groups

# Keys of networks that predict tokens, with the only values that are allowed here.
OF_TOKENS = {
    "causal": False, "causal_context": False, "shifted": False, "tables": 0, "gaps": False,
    "edits": False, "tied": False, "output": "categorical", "label_dropout": 0.0, "balance": 0.0,
    "router_z": 0.0, "lora_rank": 0,
}  # fmt: skip


class ClassModule(TransformerModule):
    """Transformer that returns logits of the class of a sequence, not of its tokens.

    classes  number of classes. Those of `options` are inputs, and are 0
    """

    classes: int = 0

    def setup(self):
        super().setup()
        o = self.options
        self.class_head = Linear(self.classes, jnp.float32, zeros=True, bias=o.head_bias)

    def __call__(self, z_BxL: Array, t_B: Array) -> Array:
        return self.class_logits(z_BxL, t_B)

    def class_logits(
        self,
        z_BxL: Array,
        t_B: Array,
        segments: Array | None = None,
        keys: Array | None = None,
    ) -> Array:
        """Returns float32 logits [B, C] of the mean of the features.

        segments  int32 [B, L]: positions with a segment below 0 are padding, which is not averaged
        """
        h_BxNxD = TransformerModule.features(self, z_BxL, t_B, segments, None, keys)
        h_BxNxD = h_BxNxD.astype(jnp.float32)
        if segments is None:
            return self.class_head(jnp.mean(h_BxNxD, axis=1))
        share_BxL = (segments >= 0).astype(jnp.float32)
        share_BxL = share_BxL / jnp.maximum(jnp.sum(share_BxL, axis=1, keepdims=True), 1.0)
        return self.class_head(jnp.einsum("bl,bld->bd", share_BxL, h_BxNxD))

    def _headed(self, x_BxNxD: Array, condition_BxGxD: Array | None) -> Array:
        # Features of patches too are averaged: features of single dimensions are not needed.
        return TransformerModule._headed(self, x_BxNxD, condition_BxGxD)


class PatchClassModule(ClassModule, PatchModule):
    """Classifier of images that reads patches."""


class Binding(NamedTuple):
    """Binds parameters, context and dropout keys to a classifier, which takes no label."""

    options: Any
    module: ClassModule

    def __call__(
        self, params: Params, context: Mapping[str, Array] | None = None, keys: Array | None = None
    ) -> Denoiser:
        """Returns the denoiser, which has `classify`. Raises UserError for other context."""
        o = self.options
        keys = None if keys is None else folded(keys, DROPOUT)  # they also draw the noise
        context = {name: x for name, x in (context or {}).items() if name != "label"}
        context = checked_context(o, context, keys, o.takes)
        if keys is not None and any((o.dropout, o.attention_dropout, o.embedding_dropout)):
            context["keys"] = keys
        return self._bound(params, context)

    def _bound(self, params: Params, context: dict[str, Array]) -> Denoiser:
        def classify(z: Array, t: Array) -> Array:
            check_length(self.options, z)
            variables = {"params": params}
            return self.module.apply(variables, z, t, **context, method="class_logits")

        def rebind(count: int) -> Denoiser:
            return self._bound(params, repeated(context, count))

        shortcuts = Accelerator(token_groups())
        return Denoiser(_refuse, _refuse, shortcuts, rebind=rebind, classify=classify)


def _refuse(*_: Array) -> Array:
    raise UserError("a classifier predicts the class of a sequence, not its tokens")


@dataclasses.dataclass(frozen=True)
class Classifier(Transformer):
    """Options of a classifier of noisy texts: those of Transformer, except those of its head.

    The network reads (z_t, t), averages the features of all tokens, and computes the logits of the
    classes from the mean by a linear layer.

    classes    number of classes, which are the outputs
    head_bias  bias of that layer
    """

    classifies: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("segments",)

    def __post_init__(self):
        super().__post_init__()
        _check(self, "classifier")

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options = self.resolved(platform)
        return _network(options, _trunk(options, Transformer), ClassModule, 2, platform)


@dataclasses.dataclass(frozen=True)
class PatchClassifier(DiT):
    """Options of a classifier of noisy images: those of DiT, except those of its head.

    The network is that of `Classifier` with patches as tokens.
    """

    classifies: ClassVar[bool] = True
    name: ClassVar[str] = "dit_classifier"
    takes: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        super().__post_init__()
        _check(self, self.name)

    def build(self, platform: str = "cpu") -> Network:
        """Makes the network for a platform."""
        options, length = self.resolved(platform), math.prod(self.shape)
        return _network(options, _trunk(options, DiT), PatchClassModule, length, platform)


def _check(options: Any, name: str) -> None:
    """Raises UserError if there are no classes, and for keys of networks that predict tokens."""
    check_least(options, classes=0)
    if options.classes < 2:
        raise UserError(
            f"network.name={name!r} needs network.classes of at least 2, the number of classes of "
            f"the data, not {options.classes}"
        )
    for key, fits in OF_TOKENS.items():
        if getattr(options, key) != fits:
            raise UserError(
                f"network.{key}={getattr(options, key)!r} is only for networks that predict "
                f"tokens: with network.name={name!r} set network.{key}={fits!r}"
            )


def _trunk(options: Any, base: type) -> Any:
    """Returns the same options for a network without class labels as inputs."""
    names = [field.name for field in dataclasses.fields(base)]
    return base(**{name: getattr(options, name) for name in names} | {"classes": 0})


def _network(options: Any, trunk: Any, kind: type, length: int, platform: str) -> Network:
    """Makes the network from a trunk; length: sequence length of the initialising call."""
    module = kind(trunk, unroll=unrolled(options, platform), classes=options.classes)

    def init(key: Array) -> Params:
        rolled = kind(trunk, classes=options.classes)
        return rolled.init(key, jnp.zeros((1, length), jnp.int32), jnp.zeros((1,)))["params"]

    rows = options.vocab_size + 1
    padding = (rounded(rows) - rows) * (options.embedding or options.size) * options.has_vectors
    is_image = isinstance(options, DiT)
    flops = functools.partial(forward_flops, options=options)
    return Network(
        init, Binding(options, module), not options.time_conditioning,
        flops=flops if is_image else formula(options, options.depth), padding=padding,
        products=options.products, parameters=options.parameters, mixtures=options.has_vectors,
        classifies=True,
    )  # fmt: skip
