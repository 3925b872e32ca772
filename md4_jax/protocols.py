"""The contracts between the rooms of the package: types, and no behaviour worth the name.

Shapes: B sequences, L positions, V clean symbols (0..V-1), D features.
Losses are in nats per sequence, unreduced; `metrics.py` alone converts units.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Params = Any

# What a bound may consist of besides the integral or sum over noise levels, by the name under
# which an objective reports it.
PARTS = ("reconstruction", "prior")


class UserError(Exception):
    """A mistake that the user can mend: `main` prints it without a traceback."""


class Batch(NamedTuple):
    """What the data loader hands out and every objective receives.

    tokens   int32 [B, L], values 0..V-1
    weight   float32 [B], 1 for a real sequence and 0 for padding of the last batch
    context  what a family needs besides, each [B, ...]: segments of packed
             documents, class labels; handed to the denoiser by name
    given    bool [B, L] or None, tokens that others are predicted from and that have no part in a
             likelihood themselves; only objectives that `takes_given` get any
    text     int32 [B, 2] or None, the bytes and words of text that the others stand for
    """

    tokens: Array
    weight: Array
    context: Mapping[str, Array]
    given: Array | None = None
    text: Array | None = None


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


class Process(Protocol):
    """A forward process q(z_t | x), a pytree: array leaves are learnable and made by `init`."""

    def init(self) -> "Process":
        """The process with its leaves, to be called where parameters are made."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def mask_id(self) -> int | None: ...

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """z_t ~ q(. | x): one key, one row of x [B, L] and one t [B] a sequence."""
        ...

    def learned(self) -> dict[str, Array]:
        """Learned numbers of each symbol, by name, each [V]; empty where nothing is learned."""
        ...

    def prior(self, keys: Array, length: int) -> Array:
        """z_1, the state that sampling starts from, int32 [B, length], one key a sequence."""
        ...


class Memory(NamedTuple):
    """What a network can keep of finished blocks while it works on the next one.

    empty(rows, window) -> past that holds nothing yet and will hold `window` tokens
    after(z [B, P], t [B], past) -> (h [B, P, D], past with z): the features of one block that sees
        itself and what past holds
    """

    empty: Callable[[int, int], Any]
    after: Callable[[Array, Array, Any], tuple[Array, Any]]


class Denoiser(NamedTuple):
    """A network with its parameters bound.

    features(z [B, L], t [B], **context) -> h [B, L, D]
    unembed(h [..., D]) -> float32 logits [..., V] over the clean symbols

    They are apart because a masked loss needs the vocabulary only where a token
    is masked, and a sampler only where one is about to be revealed. groups is the number
    of parts that a batch is split into over devices: what is gathered stays within a part.
    gathered(z, t, index [B, P]) -> h [B, P, D], where the network has a cheaper way than
    computing all features. memory: for networks that can work block by block.
    features takes clean [B, L] and block too, where memory is there: z's blocks of so many
    positions, each at its own t [B, L / block], after the blocks of clean.
    """

    features: Callable[..., Array]
    unembed: Callable[[Array], Array]
    groups: int = 1
    gathered: Callable[[Array, Array, Array], Array] | None = None
    memory: Memory | None = None

    def __call__(self, z: Array, t: Array, **context: Array) -> Array:
        """Logits [B, L, V]."""
        return self.unembed(self.features(z, t, **context))

    def features_at(self, z: Array, t: Array, index: Array) -> Array:
        """Features of the positions index [B, P] alone: [B, P, D]."""
        if self.gathered is not None:
            return self.gathered(z, t, index)
        return jnp.take_along_axis(self.features(z, t), index[..., None], axis=1)


class Network(NamedTuple):
    """init(key) -> params; bind(params) -> Denoiser. Nothing else is known of it.

    `time_free` says that the features do not depend on t, `causal` that those of a
    position depend on nothing to its right: some bounds and samplers need that, others
    must refuse it. `blockwise` that its denoiser has a memory, and features of blocks.
    """

    init: Callable[[Array], Params]
    bind: Callable[[Params], Denoiser]
    time_free: bool
    causal: bool = False
    blockwise: bool = False


class Needs(NamedTuple):
    """What an objective or a sampler can be combined with; `checks.validate` refuses the rest.

    processes         the classes of processes that it is defined for
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

    `is_bound(process)` is False for a training-only loss, which is then never
    reported as a likelihood. Where `is_exact(network)` is there and True, the bound is the
    likelihood itself. What a bound has besides the integral or sum over noise
    levels is among the diagnostics too, by its name in PARTS. u [B] are stratified
    uniforms in [0, 1) over the global batch; the objective makes its own time, step
    or mask count of them. keys [B] holds one random key a sequence, so that neither
    the mesh nor the number of microbatches can change a draw.
    """

    @property
    def needs(self) -> Needs: ...

    def is_bound(self, process: Any) -> bool: ...

    def __call__(
        self, denoiser: Denoiser, process: Any, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        """(nats [B], named diagnostics [B])."""
        ...


class Chain(NamedTuple):
    """Sequences on their way from noise to data.

    z            int32 [B, L], symbols of the process
    given        bool [B, L], the positions that the user fixed: no step changes them
    confidence   float32 [B, L], the probability with which the model drew the token there; 1
                 where it was given, 0 where none was drawn yet
    evaluations  int32 [B], the network evaluations that the sequence has used
    """

    z: Array
    given: Array
    confidence: Array
    evaluations: Array


class Plan(NamedTuple):
    """When each position is drawn, where that does not depend on what the network says.

    round  int32 [B, L], positions of one round are drawn at once, lower rounds first; NEVER
           where no token is drawn
    time   float32 [B, L], of the network evaluation; the same throughout a round of a sequence
    """

    round: Array
    time: Array


NEVER = np.iinfo(np.int32).max


class Template(NamedTuple):
    """tokens int32 [L] and given bool [L]: where given, the token is the user's."""

    tokens: np.ndarray
    given: np.ndarray


class SamplerStep(Protocol):
    """One reverse step from time t to s < t, for the processes that it is defined for.

    `level` is the time at which z stays, for a chain that does not move in time; else None.

    Where the choice of positions does not need the network, a step says so, and all of its
    steps are then chosen beforehand (samplers/planned.py), with the same law and without the
    network evaluations at which nothing is drawn. It has one of

        chance(process, s, t)               P(a mask is revealed), for process masking
        plan(process, chain, grid, keys)    its Plan, and room(length), positions of one round
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def transform(self) -> Any: ...

    @property
    def level(self) -> float | None: ...

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain: ...
