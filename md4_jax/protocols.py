"""The contracts between the rooms of the package: types only, no behaviour.

Shapes: B sequences, L positions, V clean symbols (0..V-1), D features.
Losses are in nats per sequence, unreduced; `metrics.py` alone converts units.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
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
    """

    tokens: Array
    weight: Array
    context: Mapping[str, Array]


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


class Denoiser(NamedTuple):
    """A network with its parameters bound.

    features(z [B, L], t [B], **context) -> h [B, L, D]
    unembed(h [..., D]) -> float32 logits [..., V] over the clean symbols

    They are apart because a masked loss needs the vocabulary only where a token
    is masked, and a sampler only where one is about to be revealed. groups is the number
    of parts that a batch is split into over devices: what is gathered stays within a part.
    """

    features: Callable[..., Array]
    unembed: Callable[[Array], Array]
    groups: int = 1

    def __call__(self, z: Array, t: Array, **context: Array) -> Array:
        """Logits [B, L, V]."""
        return self.unembed(self.features(z, t, **context))


class Network(NamedTuple):
    """init(key) -> params; bind(params) -> Denoiser. Nothing else is known of it.

    `time_free` says that the features do not depend on t, `causal` that those of a
    position depend on nothing to its right: some bounds and samplers need that, others
    must refuse it.
    """

    init: Callable[[Array], Params]
    bind: Callable[[Params], Denoiser]
    time_free: bool
    causal: bool = False


class Needs(NamedTuple):
    """What an objective or a sampler can be combined with; `build.validate` refuses the rest.

    processes         the classes of processes that it is defined for
    time              its optimal denoiser depends on t: a time-free network is refused
    causal            its network must be causal; where it is False it must not be
    parametrisations  of the process, what the network's outputs may mean; None: any
    why               the reason, ends the sentence that refuses time or parametrisation
    """

    processes: tuple[type, ...]
    time: bool = False
    causal: bool = False
    parametrisations: tuple[str, ...] | None = None
    why: str = ""


class Objective(Protocol):
    """A bound or a loss of one sequence.

    `is_bound(process)` is False for a training-only loss, which is then never
    reported as a likelihood. What a bound has besides the integral or sum over noise
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


class SamplerStep(Protocol):
    """One reverse step from time t to s < t, for the processes that it is defined for."""

    @property
    def needs(self) -> Needs: ...

    def __call__(
        self, denoiser: Denoiser, process: Any, z: Array, s: Array, t: Array, keys: Array
    ) -> Array: ...

    def evaluations(self, steps: int, length: int) -> int:
        """How often the network is called over a grid of so many steps, `finish` excepted."""
        ...

    def unfinished(self, process: Any, z: Array) -> Array:
        """Whether any noise is left at t = 0, a bool []."""
        ...

    def finish(self, denoiser: Denoiser, process: Any, z: Array, keys: Array) -> Array:
        """What is done to noise that is left after the last step."""
        ...
