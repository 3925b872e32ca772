"""Sequences on their way from noise to data, and the steps that take them there: types."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from md4_jax.protocols import Array, Denoiser, Needs


class Chain(NamedTuple):
    """Sequences on their way from noise to data.

    z            int32 [B, L], symbols of the process
    prompt_mask  bool [B, L], the positions that the user fixed: no step changes them
    confidence   float32 [B, L], the probability with which the model drew the token there; 1
                 where the user fixed it, 0 where none was drawn yet
    evaluations  int32 [B], the network evaluations that the sequence has used
    """

    z: Array
    prompt_mask: Array
    confidence: Array
    evaluations: Array


class RevealSchedule(NamedTuple):
    """The round and the time at which each position is drawn, known before the network is called.

    round  int32 [B, L], positions of one round are drawn at once, lower rounds first; NEVER
           where no token is drawn
    time   float32 [B, L], of the network evaluation; the same throughout a round of a sequence
    """

    round: Array
    time: Array


NEVER = np.iinfo(np.int32).max


class SamplerStep(Protocol):
    """One reverse step from time t to s < t, for the processes that `needs` names.

    transform  temperature, top-k and top-p of each token that is drawn
    level      the time at which z stays, for a chain that does not move in time; else None
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
        """Draws z_s given z_t = chain.z, with one random key a sequence."""
        ...


@runtime_checkable
class RevealsIndependently(SamplerStep, Protocol):
    """A step that, on `RevealsMasks`, reveals each mask with one probability, on its own.

    `samplers/reveal.py` may then run all steps of a grid by a `RevealSchedule`, by the same law.
    """

    def reveal_probability(self, process: Any, s: Array, t: Array) -> Array:
        """P(a mask at time t is revealed in the step to s)."""
        ...


@runtime_checkable
class RevealsInOrder(SamplerStep, Protocol):
    """A step that reveals masks one or a few at a time, in an order drawn without the network."""

    def schedule(
        self, process: Any, chain: Chain, grid: Array | np.ndarray, keys: Array
    ) -> RevealSchedule:
        """Draws the order of the masks that are revealed between the ends of the grid."""
        ...

    def per_round(self, length: int) -> int:
        """The most positions of one round."""
        ...
