"""Types that the folders of the package share: batches, denoisers, and protocols.

Shapes: B sequences, L positions, V clean symbols (0..V-1), S symbols of a process (V, or V + 1
with a mask), D features. Losses are in nats per sequence, unreduced; `evals/metrics.py` alone
converts units. Any object with the attributes of a protocol satisfies it; none is a base class.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Params = Any

# Names of the terms of a bound that are not part of its integral or sum over noise levels.
PARTS = ("reconstruction", "prior", "orders")


class UserError(Exception):
    """Mistake that the user can fix; `main` prints it without a traceback."""


class Batch(NamedTuple):
    """Batch of sequences, from the data loader to every objective.

    tokens     int32 [B, L], values 0..V-1
    loss_mask  bool [B, L], True for tokens whose likelihood is computed. The others (a prompt, the
               text before a window, padding) are conditioned on: never noised, never counted
    context    other inputs of the network by name, each [B, ...]: `segments` of documents, `label`
    text       int32 [B, 2] or None, numbers of bytes and words of the counted tokens' text
    number     int32 [B] or None, which sequence of the training data each one is
    """

    tokens: Array
    loss_mask: Array
    context: Mapping[str, Array]
    text: Array | None = None
    number: Array | None = None


def batch_of(
    tokens: Array, *, loss_mask: Array | None = None, context: Mapping[str, Array] | None = None
) -> Batch:
    """Makes a batch; every token counts unless loss_mask says otherwise."""
    library = jnp if isinstance(tokens, jax.Array) else np
    all_count = library.ones(tokens.shape, bool)
    return Batch(tokens, all_count if loss_mask is None else loss_mask, context or {})


@runtime_checkable
class Schedule(Protocol):
    """The signal level alpha_t of a forward process; elementwise in t in [0, 1].

    `one_minus_alpha` is not `1 - alpha(t)`, which has no digits left near t = 0 in float32.
    """

    def alpha(self, t: Array) -> Array: ...

    def one_minus_alpha(self, t: Array) -> Array: ...

    def dalpha(self, t: Array) -> Array: ...

    def inverse(self, one_minus_alpha: Array) -> Array:
        """Returns the t with this 1 - alpha, clamped to [0, 1]."""


@runtime_checkable
class Process(Protocol):
    """Forward process q(z_t | x), a pytree: array leaves are learnable and made by `init`.

    timesteps    number of discrete steps; None in continuous time
    shows_clean  whether every symbol that `is_noise` does not mark is clean. If so, the network
                 sees a prompt without noise; otherwise with the noise of time t
    """

    vocab_size: int
    timesteps: int | None
    shows_clean: bool

    def init(self) -> "Process":
        """Returns the process with its learnable leaves; called where parameters are made."""

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B]."""

    def prior(self, keys: Array, length: int) -> Array:
        """Draws z_1, the state that sampling starts from: int32 [B, length], from keys [B]."""

    def is_noise(self, z: Array) -> Array:
        """Marks symbols that carry no information on x, such as the mask: bool like z."""

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may hold noise that a sampler ending at t must remove: bool []."""

    def signal(self, t: Array) -> Array:
        """Returns the time input of the network: t, alpha_t or sigma_t = -log alpha_t."""

    def learned(self) -> dict[str, Array]:
        """Returns learned values of each symbol, {name: [V]}; empty if nothing is learned."""


class Accelerator(NamedTuple):
    """Optional shortcuts of a network, which save time and change no result.

    groups, platform  parts that devices split a batch into, gathers stay within one; cpu, gpu, tpu
    features_at  (z, t, index [B, P]) -> h [B, P, D]: features of some positions alone, or None
    padded       h [..., D] -> logits [..., V'], which are -inf beyond the V symbols, or None
    """

    groups: int = 1
    features_at: Callable[[Array, Array, Array], Array] | None = None
    padded: Callable[[Array], Array] | None = None
    platform: str = "cpu"


class Blockwise(NamedTuple):
    """Functions of a denoiser that works block by block, for block diffusion.

    features      (z, t [B, G], clean [B, L], block, clean_t []) -> h [B, L, D]: a block of z at its
                  time sees itself and earlier ones of clean, at clean_t. The last may be shorter
    empty_cache   (rows, window) -> a key-value cache that will hold `window` tokens
    append_block  (z [B, P], t [B], cache) -> (h [B, P, D], cache with z): one block that sees
                  itself and what the cache holds
    around        (z [B, P], t [B], begin [], cache) -> (h [B, P, D], cache with z): a part of a
                  text that also sees all others in the cache; None: z is the whole text
    """

    features: Callable[..., Array]
    empty_cache: Callable[[int, int], Any]
    append_block: Callable[[Array, Array, Any], tuple[Array, Any]]
    around: Callable[..., tuple[Array, Any]] | None = None

    def told(self, signal: Callable[[Array], Array]) -> "Blockwise":
        """Returns the same functions, in which the network gets signal(t) in place of t."""

        def features(z: Array, t: Array, clean: Array, block: int) -> Array:
            return self.features(z, signal(t), clean, block, signal(jnp.zeros(())))

        append_block, around = (_telling(f, signal) for f in (self.append_block, self.around))
        return Blockwise(features, self.empty_cache, append_block, around)


def _telling(function: Callable | None, signal: Callable) -> Callable | None:
    return function and (lambda z, t, *rest: function(z, signal(t), *rest))


class Denoiser(NamedTuple):
    """Network with parameters, context and dropout key bound: a function of (z, t) alone.

    features  (z [B, L], t [B]) -> h [B, L, D]
    unembed   h [..., D] -> float32 logits [..., V], of which losses and samplers need but some
    rebind    n -> the denoiser with each row of context and keys repeated n times, or None
    gaps      (z, t) -> (h, outputs on what is missing, [B, L + 1]: `InsertsMasks`), or None
    teacher   `Teacher` of objectives/distillation.py, for an objective that needs one, or None
    """

    features: Callable[[Array, Array], Array]
    unembed: Callable[[Array], Array]
    accelerator: Accelerator = Accelerator()
    blocks: Blockwise | None = None
    rebind: Callable[[int], "Denoiser"] | None = None
    teacher: Any = None
    gaps: Callable[[Array, Array], tuple[Array, Array]] | None = None

    def __call__(self, z: Array, t: Array) -> Array:  # logits [B, L, V]
        return self.unembed(self.features(z, t))

    def features_at(self, z: Array, t: Array, index: Array) -> Array:
        """Features of the positions index [B, P] alone: [B, P, D]."""
        if (own := self.accelerator.features_at) is not None:
            return own(z, t, index)
        return jnp.take_along_axis(self.features(z, t), index[..., None], axis=1)

    def repeated(self, count: int) -> "Denoiser":
        """Returns the denoiser for batches with each row repeated `count` times in a row."""
        return self if self.rebind is None else self.rebind(count)

    def told(self, signal: Callable[[Array], Array]) -> "Denoiser":
        """Returns the same denoiser, in which the network gets signal(t) in place of t."""
        shortcuts, rebind = self.accelerator, self.rebind
        return self._replace(
            features=_telling(self.features, signal),
            accelerator=shortcuts._replace(features_at=_telling(shortcuts.features_at, signal)),
            blocks=self.blocks and self.blocks.told(signal),
            rebind=rebind and (lambda count: rebind(count).told(signal)),
            gaps=_telling(self.gaps, signal),
        )


class Network(NamedTuple):
    """Functions and properties of a network.

    init       key -> parameters
    bind       (parameters, context, keys) -> Denoiser. context is that of a batch; keys [B] are for
               dropout, None outside of training. What a companion has `bound` comes last
    time_free, causal  its features do not depend on t; on nothing to the right of their position
    blockwise  its denoisers have `blocks`
    flops      (parameters, length, block, or 0) -> FLOPs per token of a forward pass, or None
    padding    number of entries of its parameters that stand for no symbol and are never used
    products   operands of most of its matrix products: float32, or bfloat16 rounded from float32
    companion  `networks.tables.Tables`, which learn beside it and tell it what they know, or None
    mixtures, gaps  its denoisers read a `Mixture` too; have `gaps`, and z may hold V + 1
    adapters   regular expression of the paths of parameters that alone are trained, '' for all
    parameters type in which those that are not trained are stored: float32 or bfloat16
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
    parameters: str = "float32"
    gaps: bool = False

    def size(self, params: Params) -> int:
        """Returns the number of parameters (arrays or their shapes), without padding."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(params)) - self.padding

    def denoiser(
        self, params: Params, context: Mapping[str, Array] | None = None, keys: Array | None = None
    ) -> Denoiser:
        """Returns the denoiser of params {'network', 'process', ...}, a function of (z, t)."""
        known = () if self.companion is None else (self.companion.bound(params["companion"]),)
        bound = self.bind(params["network"], context or {}, keys, *known)
        return bound.told(params["process"].signal)


class Needs(NamedTuple):
    """Requirements of an objective or a sampler, which `checks.validate` enforces.

    processes         protocols, of which the process must satisfy at least one
    time              its optimal denoiser depends on t: a time-free network is refused
    causal            True: its network must be causal; False: it must not be
    blockwise, mixtures, gaps  its network must work block by block; read a `Mixture`; have `gaps`
    teacher           its denoiser comes with the `teacher` of the training state
    parametrisations  allowed values of process.parametrisation; None: any
    why               reason, with which the error for time or parametrisation ends
    """

    processes: tuple[type, ...]
    time: bool = False
    causal: bool = False
    blockwise: bool = False
    mixtures: bool = False
    teacher: bool = False
    parametrisations: tuple[str, ...] | None = None
    why: str = ""
    gaps: bool = False


class Objective(Protocol):
    """Loss of each sequence: a bound on -log p, or a training-only loss.

    `is_bound(process)` is False for a training-only loss, which is never reported as a likelihood.
    If `is_exact(network)` is there and True, the bound is the likelihood itself. If it has a
    `time_power` p > 1, it weighs noise at a small u by about 1 / u, and evaluation draws u = v^p
    (`objectives/draws.py`). If its `until` is above 0, training takes `afterwards`, with the same
    diagnostics, from that step on. If it has `for_evaluation()`, that is the same bound with less
    noise, which auto takes. The diagnostics include the terms of the bound that are named in PARTS.
    u [B] are antithetic uniforms in [0, 1) over the global batch; the objective turns them into
    times, steps or numbers of masks. keys [B] holds one random key for each sequence.
    """

    @property
    def needs(self) -> Needs: ...

    def is_bound(self, process: Any) -> bool: ...

    def __call__(
        self, denoiser: Denoiser, process: Any, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns (nats [B], {name: diagnostic [B]})."""


class Mixture(NamedTuple):
    """Mixture of K symbols at each position, [B, L, K], which some networks read in place of z."""

    symbols: Array
    weights: Array


class Prompt(NamedTuple):
    """Tokens that the user fixes, at any positions of one sequence or of a batch.

    tokens  int32 [L] or [B, L], ignored where mask is False
    mask    bool, like tokens: the positions that the user fixed
    """

    tokens: Array
    mask: Array
