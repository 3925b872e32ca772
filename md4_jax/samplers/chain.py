"""Sequences on their way from noise to data, and the steps that take them there: types."""

from typing import Any, NamedTuple, Protocol

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
    """When each position is drawn, where that does not depend on what the network says.

    round  int32 [B, L], positions of one round are drawn at once, lower rounds first; NEVER
           where no token is drawn
    time   float32 [B, L], of the network evaluation; the same throughout a round of a sequence
    """

    round: Array
    time: Array


NEVER = np.iinfo(np.int32).max


class SamplerStep(Protocol):
    """One reverse step from time t to s < t, for the processes that it is defined for.

    `level` is the time at which z stays, for a chain that does not move in time; else None.

    Where the choice of positions does not need the network, a step says so, and all of its
    steps are then chosen beforehand (samplers/reveal.py), with the same law and without the
    network evaluations at which nothing is drawn. It has one of

        chance(process, s, t)                   P(a mask is revealed), for processes RevealsMasks
        schedule(process, chain, grid, keys)    its RevealSchedule, and per_round(length), the
                                                positions of one round
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
