"""Contracts between the rooms of the package: types, and next to no behaviour.

Shapes: B sequences, L positions, V clean symbols (0..V-1), S symbols of a process (V, or V + 1
with a mask), D features. Losses are in nats per sequence, unreduced; `evals/metrics.py` alone
converts units. A forward process, an objective, a sampler or a network is any object that has
the attributes of its protocol: nothing here is a base class.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Params = Any

# Terms of a bound besides the integral or sum over noise levels, by the name under which an
# objective reports them.
PARTS = ("reconstruction", "prior")


class UserError(Exception):
    """A mistake that the user can mend: `main` prints it without a traceback."""


class Batch(NamedTuple):
    """Sequences as the data loader hands them out and every objective receives them.

    tokens     int32 [B, L], values 0..V-1
    loss_mask  bool [B, L], the tokens whose likelihood is asked for. The others (a prompt, the
               text before a window, padding) are conditioned on: never noised, never counted
    context    what a network is told of each sequence besides, by name, each [B, ...]:
               `segments` of packed documents, a class `label`
    text       int32 [B, 2] or None, the bytes and words of text that the counted tokens stand for
    """

    tokens: Array
    loss_mask: Array
    context: Mapping[str, Array]
    text: Array | None = None


def batch_of(
    tokens: Array,
    *,
    loss_mask: Array | None = None,
    context: Mapping[str, Array] | None = None,
    text: Array | None = None,
) -> Batch:
    """Makes a batch; every token counts unless loss_mask says otherwise."""
    if loss_mask is None:
        library = jnp if isinstance(tokens, jax.Array) else np
        loss_mask = library.ones(tokens.shape, bool)
    return Batch(tokens, loss_mask, context or {}, text)


@runtime_checkable
class Schedule(Protocol):
    """The signal level alpha_t of a forward process; elementwise in t in [0, 1].

    `one_minus_alpha` is computed, never `1 - alpha(t)`: near t = 0 the
    subtraction has no digits left in float32.
    """

    def alpha(self, t: Array) -> Array: ...

    def one_minus_alpha(self, t: Array) -> Array: ...

    def dalpha(self, t: Array) -> Array: ...

    def inverse(self, one_minus_alpha: Array) -> Array:
        """The t with that 1 - alpha, clamped to [0, 1] where there is none."""
        ...


@runtime_checkable
class Process(Protocol):
    """A forward process q(z_t | x), a pytree: array leaves are learnable and made by `init`.

    vocab_size   V
    timesteps    the number of its steps, None in continuous time
    shows_clean  whether every symbol that `is_noise` does not mark is the clean one. Then a
                 prompt is shown to the network as it is; otherwise with the noise of the time
    """

    vocab_size: int
    timesteps: int | None
    shows_clean: bool

    def init(self) -> "Process":
        """The process with its leaves, to be called where parameters are made."""
        ...

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x): one key, one row of x [B, L] and one t [B] a sequence."""
        ...

    def prior(self, keys: Array, length: int) -> Array:
        """Draws z_1, the state that sampling starts from: int32 [B, length], one key a sequence."""
        ...

    def is_noise(self, z: Array) -> Array:
        """Whether a symbol says nothing of x, as the mask does: bool like z."""
        ...

    def expected_noise(self) -> float:
        """Returns the largest mean share of symbols that `is_noise` marks at t and 1 - t."""
        ...

    def noise_left(self, t: Array) -> Array:
        """Whether z_t may hold noise, which a sampler that ends at t has to take away: bool []."""
        ...

    def signal(self, t: Array) -> Array:
        """Tells the network the time: t itself, alpha_t or sigma_t = -log alpha_t."""
        ...

    def learned(self) -> dict[str, Array]:
        """Learned numbers of each symbol, by name, each [V]; empty where nothing is learned."""
        ...


class Accelerator(NamedTuple):
    """Shortcuts of a network that change no number; whoever ignores them computes the same.

    groups       number of parts that a batch is split into over devices: what is gathered stays
                 within a part
    features_at  (z, t, index [B, P]) -> h [B, P, D]: features of some positions alone, cheaper
                 than all of them. None: there is no cheaper way
    """

    groups: int = 1
    features_at: Callable[[Array, Array, Array], Array] | None = None


class Blockwise(NamedTuple):
    """The part of a denoiser that works block by block, for block diffusion.

    features      (z, t [B, G], clean [B, L], block, clean_t []) -> h [B, L, D]: each of the G
                  blocks of z, at its own time, sees itself and the earlier blocks of clean, at
                  clean_t. The last block may be shorter
    empty_cache   (rows, window) -> a key-value cache that will hold `window` tokens
    append_block  (z [B, P], t [B], cache) -> (h [B, P, D], cache with z): one block that sees
                  itself and what the cache holds
    """

    features: Callable[..., Array]
    empty_cache: Callable[[int, int], Any]
    append_block: Callable[[Array, Array, Any], tuple[Array, Any]]

    def told(self, signal: Callable[[Array], Array]) -> "Blockwise":
        """The same, told signal(t) where it is called with t."""

        def features(z: Array, t: Array, clean: Array, block: int) -> Array:
            return self.features(z, signal(t), clean, block, signal(jnp.zeros(())))

        return self._replace(
            features=features,
            append_block=lambda z, t, cache: self.append_block(z, signal(t), cache),
        )


class Denoiser(NamedTuple):
    """A network with parameters, context and dropout key bound: a function of (z, t) alone.

    features  (z [B, L], t [B]) -> h [B, L, D]
    unembed   h [..., D] -> float32 logits [..., V] over the clean symbols
    rebind    n -> the denoiser whose context and keys come n times each; None: it has none

    features and unembed are apart because a masked loss needs the vocabulary only where a
    token is masked, and a sampler only where one is about to be revealed.
    """

    features: Callable[[Array, Array], Array]
    unembed: Callable[[Array], Array]
    accelerator: Accelerator = Accelerator()
    blocks: Blockwise | None = None
    rebind: Callable[[int], "Denoiser"] | None = None

    def __call__(self, z: Array, t: Array) -> Array:
        """Logits [B, L, V]."""
        return self.unembed(self.features(z, t))

    def features_at(self, z: Array, t: Array, index: Array) -> Array:
        """Features of the positions index [B, P] alone: [B, P, D]."""
        if self.accelerator.features_at is not None:
            return self.accelerator.features_at(z, t, index)
        return jnp.take_along_axis(self.features(z, t), index[..., None], axis=1)

    def repeated(self, count: int) -> "Denoiser":
        """The same denoiser for batches in which each sequence comes `count` times in a row."""
        return self if self.rebind is None else self.rebind(count)

    def told(self, signal: Callable[[Array], Array]) -> "Denoiser":
        """The same denoiser, told signal(t) where it is called with t."""
        at, blocks, rebind = self.accelerator.features_at, self.blocks, self.rebind
        if at is not None:
            at = lambda z, t, index: self.accelerator.features_at(z, signal(t), index)  # noqa: E731
        if blocks is not None:
            blocks = blocks.told(signal)
        if rebind is not None:
            rebind = lambda count: self.rebind(count).told(signal)  # noqa: E731
        return Denoiser(
            lambda z, t: self.features(z, signal(t)),
            self.unembed,
            self.accelerator._replace(features_at=at),
            blocks,
            rebind,
        )


class Network(NamedTuple):
    """A network and what is known of it.

    init       key -> parameters
    bind       (parameters, context, keys) -> Denoiser. context {name: [B, ...]} is told with each
               sequence, keys [B] are for dropout, None outside of training
    time_free  its features do not depend on t
    causal     the features of a position depend on nothing to its right
    blockwise  its denoisers have `blocks`
    flops      (parameters, length, block) -> floating-point operations of one token through the
               network once; block 0 outside of block diffusion. None: not known
    """

    init: Callable[[Array], Params]
    bind: Callable[[Params, Mapping[str, Array], Array | None], Denoiser]
    time_free: bool
    causal: bool = False
    blockwise: bool = False
    flops: Callable[[Params, int, int], float] | None = None

    def denoiser(
        self, params: Params, context: Mapping[str, Array] | None = None, keys: Array | None = None
    ) -> Denoiser:
        """The denoiser of params {'network', 'process'}, told of the time what the process says."""
        bound = self.bind(params["network"], context or {}, keys)
        return bound.told(params["process"].signal)


class Needs(NamedTuple):
    """What an objective or a sampler can be combined with; `checks.validate` refuses the rest.

    processes         protocols of processes, one of which the process must have
    time              its optimal denoiser depends on t: a time-free network is refused
    causal            its network must be causal; where it is False it must not be
    blockwise         its network must be able to work block by block
    parametrisations  of the process, what the network's outputs may mean; None: any
    why               the reason, ends the sentence that refuses time or parametrisation
    """

    processes: tuple[type, ...]
    time: bool = False
    causal: bool = False
    blockwise: bool = False
    parametrisations: tuple[str, ...] | None = None
    why: str = ""


class Objective(Protocol):
    """A bound or a loss of one sequence.

    `is_bound(process)` is False for a training-only loss, which is then never reported as a
    likelihood. Where `is_exact(network)` is there and True, the bound is the likelihood itself.
    Terms besides the integral or sum over noise levels are among the diagnostics too, by their
    name in PARTS. u [B] are antithetic uniforms in [0, 1) over the global batch; the objective
    makes its own time, step or mask count of them. keys [B] holds one random key a sequence, so
    that neither the mesh nor the number of microbatches can change a draw.
    """

    @property
    def needs(self) -> Needs: ...

    def is_bound(self, process: Any) -> bool: ...

    def __call__(
        self, denoiser: Denoiser, process: Any, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        """(nats [B], named diagnostics [B])."""
        ...


class Prompt(NamedTuple):
    """Tokens that the user fixes, anywhere in a sequence; of one sequence or of a batch.

    tokens  int32 [L] or [B, L], of any value where mask is False
    mask    bool, like tokens: the positions that the user fixed
    """

    tokens: Array
    mask: Array
