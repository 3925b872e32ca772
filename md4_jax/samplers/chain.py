"""Types for sampling: the state of a batch, reveal schedules and sampler steps."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from md4_jax.protocols import Array, Denoiser, Needs


class Chain(NamedTuple):
    """State of a batch of sequences between noise and data.

    z            int32 [B, L], symbols of the process
    prompt_mask  bool [B, L], the positions fixed by the user, which no step changes
    confidence   float32 [B, L], the probability with which the model drew the token; 1 in the
                 prompt, 0 where no token is drawn yet
    evaluations  int32 [B], network evaluations so far
    observed     float32 [B, L, V], the continuous state of a process that `ObservesMasks`, or None
    memory       state that a step that `Remembers` passes to the next one, arrays [B, ...], or None
    """

    z: Array
    prompt_mask: Array
    confidence: Array
    evaluations: Array
    observed: Array | None = None
    memory: Any = None


class RevealSchedule(NamedTuple):
    """Round and time at which each position is drawn, chosen before the network is called.

    round  int32 [B, L]. Positions of a round are drawn at once, lower rounds first; NEVER where no
           token is drawn
    time   float32 [B, L], the time of the network evaluation, the same within a round of a sequence
    rank   int32 [B, L], the order for a network that reads in an order, or None
    factor  float32 [B, L], by which logits are multiplied, the same within a round; None: 1
    """

    round: Array
    time: Array
    rank: Array | None = None
    factor: Array | None = None

    def sharper(
        self, transform: Callable[[Array], Array], index: Array
    ) -> Callable[[Array], Array]:
        """Returns the transform of logits [B, P, V] in the round of the positions index [B, P]."""
        if self.factor is None:
            return transform
        factor_Bx1 = jnp.take_along_axis(self.factor, index[:, :1], axis=1)
        return lambda logits: transform(logits * factor_Bx1[..., None])


NEVER = np.iinfo(np.int32).max


class SamplerStep(Protocol):
    """One reverse step from time t to s < t, for processes with the capabilities in `needs`.

    transform  `Transform` of the logits of each drawn token: temperature, top-k and top-p
    level      the constant time of a chain whose time does not change (`metropolis`); else None
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def transform(self) -> Any: ...

    @property
    def level(self) -> float | None: ...

    def __call__(
        self, denoiser: Denoiser, process: Any, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        """Draws z_s given z_t = chain.z, with one random key per sequence."""


@runtime_checkable
class RevealsIndependently(SamplerStep, Protocol):
    """A step that reveals masks independently, all with the same probability (`RevealsMasks`).

    `samplers/reveal.py` may then draw all steps of a grid as one `RevealSchedule`, with the same
    distribution.
    """

    def reveal_probability(self, process: Any, s: Array, t: Array) -> Array:
        """P(a mask at time t is revealed in the step to s)."""


@runtime_checkable
class RevealsInOrder(SamplerStep, Protocol):
    """A step that reveals masks one or a few at a time, in an order drawn without the network."""

    def schedule(
        self, process: Any, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Draws the order of the masks that are revealed between the ends of the grid."""

    def per_round(self, length: int) -> int:
        """Returns the largest number of positions in a round."""

    def rounds(self, length: int, steps: int) -> int:
        """Returns the largest number of rounds of a text, with a grid of `steps` steps."""


@runtime_checkable
class Caches(SamplerStep, Protocol):
    """A step that may draw all tokens of a grid with a cache: the same tokens, faster."""

    def is_cached(self, denoiser: Denoiser) -> bool:
        """Returns whether it uses the cache with this network."""

    def positions_read(self, process: Any, grid: np.ndarray, length: int) -> float:
        """Returns about how many positions all evaluations of a text read with the cache."""


@runtime_checkable
class ReadsParts(Caches, Protocol):
    """A step that reads part of the text in each evaluation, as often as the outputs demand."""

    def positions_each(self, length: int) -> int:
        """Returns how many positions of a text of this length an evaluation reads."""


@runtime_checkable
class FillsCached(Caches, Protocol):
    """A step that fills positions from left to right, and reads each token once with a cache."""

    def filled_in(self, grid: np.ndarray, length: int) -> np.ndarray:
        """Returns the step of the grid, 0 the first, that fills each position: int [length]."""

    def fill_cached(
        self, denoiser: Denoiser, process: Any, chain: Chain, keys_of: Callable[[Array], Array]
    ) -> Chain:
        """Draws all tokens; keys_of: n -> keys [B] of the step that fills position n."""


@runtime_checkable
class RevealsCached(RevealsInOrder, Caches, Protocol):
    """A step that may draw its schedule with a cache."""

    def run_cached(
        self, denoiser: Denoiser, process: Any, chain: Chain, schedule: RevealSchedule, **more: Any
    ) -> Chain:
        """Draws every position of the schedule; more: keys and grid, as of the schedule."""


@runtime_checkable
class RevealsByOutputs(Protocol):
    """A process whose masks are revealed with a probability that depends on the outputs there."""

    def revealed(self, outputs: Array, s: Array, t: Array) -> Array:
        """Returns P(a mask at time t is revealed in the step to s), [B, L]."""


@runtime_checkable
class Finishes(SamplerStep, Protocol):
    """A step with its own way to remove the remaining noise at the end."""

    def finish(self, denoiser: Denoiser, process: Any, chain: Chain, keys: Array) -> Chain:
        """Returns the chain without noise, given one random key a sequence."""


@runtime_checkable
class GoesOn(Finishes, Protocol):
    """A step whose `finish` takes further steps first, if the grid has too few for the text."""

    def finish(
        self, denoiser: Denoiser, process: Any, chain: Chain, keys: Array, taken: Array | int = 0
    ) -> Chain:
        """Returns the chain without noise; taken: number of further steps before this call."""

    def rounds(self, length: int, steps: int) -> int:
        """Returns the number of steps that a path shows: the grid's, and further ones.

        If a text takes more steps, the last frame of its path shows the state after all of them.
        """

    def left(self, process: Any, z: Array) -> Array:
        """Marks the masks that further steps draw: bool like z."""

    def step_further(
        self, denoiser: Denoiser, process: Any, chain: Chain, keys: Array, number: Array
    ) -> Chain:
        """Takes a further step; the first has number 0. keys: those of `finish`."""


@runtime_checkable
class Remembers(SamplerStep, Protocol):
    """A step that reads the state that the previous step has left in the chain's `memory`."""

    def begin(self, denoiser: Denoiser, process: Any, chain: Chain) -> Any:
        """Returns the memory for the first step."""


@runtime_checkable
class RevealsByLogits(SamplerStep, Protocol):
    """A step that uses the network to choose the positions to reveal."""

    @property
    def is_deterministic(self) -> bool:
        """Whether the positions depend only on the logits, so that samples have a likelihood."""

    def reveals(self, process: Any, chain: Chain, logits: Array, s: Array, t: Array) -> Array:
        """Marks the positions that the step to s reveals, given the network's logits: [B, L]."""

    def time(self, process: Any, chain: Chain, t: Array) -> Array:
        """Returns the time input of the network in a step from t: [B]."""


@runtime_checkable
class ReadsTextAtOnce(SamplerStep, Protocol):
    """A step that draws each token given only those before it in some order.

    One call of the network at time 0 predicts all tokens of a known text (teacher forcing).
    """

    def inputs(self, process: Any, z: Array) -> Array:
        """Returns the symbols that the network reads to predict all tokens of z: int like z."""


def rounds_of(step: SamplerStep, length: int, steps: int) -> int:
    """Returns the largest number of steps of a text's path, with a grid of `steps` steps."""
    own = isinstance(step, RevealsInOrder | GoesOn)
    return step.rounds(length, steps) if own else steps
