"""Unmasking with corrections of earlier tokens in between: docs/families/self_correction.md."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Denoiser, UserError, pytree
from md4_jax.samplers.chain import NEVER, Chain
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.confidence_checks import check_random
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.orders import blocks_of

ORDERS = ("random", "confidence")


class Steps(NamedTuple):
    """Steps that have drawn tokens of the present block: int32 [B], and that block, int32 [B]."""

    number: Array
    block: Array


class Correction(NamedTuple):
    """State of a correction.

    number  int32 [], evaluations so far
    active  bool [B], sequences that the last evaluation has changed
    y       int32 [B, L], text without masks
    h       float [B, L, D], features of the text that was read last
    used    int32 [B], evaluations of each sequence
    """

    number: Array
    active: Array
    y: Array
    h: Array
    used: Array


@pytree("transform", "noise", "limit")
@dataclasses.dataclass(frozen=True)
class ProSeCo(Confidence):
    """Unmasks tokens, and lets the network correct all of them in between (arXiv:2602.11590).

    In a step with a correction the network fills in all masks by their most likely tokens. It then
    reads this text and replaces every token outside the prompt by the most likely one, until none
    changes or after `corrections` evaluations. Visible tokens become those of the corrected text,
    and the step draws the tokens of masks from the network's last outputs. The masks of later
    blocks are filled in too, but not corrected.

    corrections  most evaluations of a correction, beside the one of the step
    every        a correction in every n-th step of a block that draws tokens; 1: in each
    order        random      each mask is revealed with the probability of `Ancestral`
                 confidence  masks are revealed as by `Confidence`, with its keys

    It is for networks that are trained to correct (objective `proseco`): others predict visible
    tokens badly. The samples do not have the distribution of the model.
    """

    corrections: int = 4
    every: int = 1
    order: str = "random"

    def __post_init__(self):
        super().__post_init__()
        _check(self)

    @property
    def is_deterministic(self) -> bool:
        """Whether samples have a likelihood."""
        return False

    def begin(self, denoiser: Denoiser, process: RevealsMasks, chain: Chain) -> Steps:
        """Returns the memory for the first step."""
        zeros = jnp.zeros(len(chain.z), jnp.int32)
        return Steps(zeros, zeros)

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        if self.order == "confidence":
            return super().__call__(denoiser, process, chain, s, t, keys)
        reveal_keys, token_keys = split_keys(keys)
        revealed = uniforms(reveal_keys, chain.z.shape[1]) < process.reveal_probability(s, t)
        chosen = process.is_noise(chain.z) & revealed

        def draw(chain: Chain) -> Chain:
            times, draws = jnp.full(len(chain.z), t), jnp.any(chosen, axis=1)
            outputs, chain = self.read(denoiser, process, chain, times, draws)
            tokens = draw_token(token_keys, self.transform(outputs))
            return chain._replace(
                z=jnp.where(chosen, tokens, chain.z),
                confidence=jnp.where(chosen, probability(outputs, tokens), chain.confidence),
            )

        return jax.lax.cond(jnp.any(chosen), draw, lambda chain: chain, chain)

    def read(
        self, denoiser: Denoiser, process: RevealsMasks, chain: Chain, time: Array, draws: Array
    ) -> tuple[Array, Chain]:
        """Returns the logits for a step, and the chain with corrected tokens; see `Confidence`."""
        masks, block = process.is_noise(chain.z), blocks_of(chain, self.semi_autoregressive)
        first = jnp.min(jnp.where(masks, block, NEVER), axis=1)
        number = jnp.where(first == chain.memory.block, chain.memory.number, 0) + draws
        here = ~chain.prompt_mask & (block <= first[:, None])
        asked = draws & (number % self.every == 0)
        found = self._corrected(denoiser, masks, here, chain.z, time, asked)
        outputs = denoiser.unembed(found.h)
        new = asked[:, None] & here & ~masks & (found.y != chain.z)
        return outputs, chain._replace(
            z=jnp.where(new, found.y, chain.z),
            confidence=jnp.where(new, probability(outputs, found.y), chain.confidence),
            evaluations=chain.evaluations + draws + found.used,
            memory=Steps(number, jnp.where(draws, first, chain.memory.block)),
        )

    def _corrected(
        self,
        denoiser: Denoiser,
        masks: Array,
        here: Array,
        z: Array,
        time: Array,
        asked: Array,
    ) -> Correction:
        """Corrects the positions `here` [B, L] of the texts that are asked [B]."""

        def best(h: Array) -> Array:
            return jnp.argmax(denoiser.unembed(h), axis=-1).astype(z.dtype)

        def correct(state: Correction) -> Correction:
            h = denoiser.features(state.y, time)
            y = jnp.where(state.active[:, None] & here, best(h), state.y)
            return Correction(
                state.number + 1,
                jnp.any(y != state.y, axis=1),
                y,
                jnp.where(state.active[:, None, None], h, state.h),
                state.used + state.active,
            )

        def goes_on(state: Correction) -> Array:
            return (state.number < self.corrections) & jnp.any(state.active)

        h = denoiser.features(z, time)
        y, zeros = jnp.where(masks, best(h), z), jnp.zeros(len(z), jnp.int32)
        return jax.lax.while_loop(goes_on, correct, Correction(jnp.int32(0), asked, y, h, zeros))


def _check(step: ProSeCo) -> None:
    """Raises UserError for options that are impossible or have no effect."""
    for key in ("corrections", "every"):
        if getattr(step, key) < 1:
            raise UserError(f"sample.{key} must be at least 1, not {getattr(step, key)}")
    if step.order not in ORDERS:
        raise UserError(
            f"sample.order must be {' or '.join(map(repr, ORDERS))}, not {step.order!r}"
        )
    if step.edit:
        raise UserError(
            f"sample.edit={step.edit} replaces tokens, which sample.name='proseco' does by its "
            "corrections: set sample.edit=0"
        )
    check_random(step, [field.name for field in dataclasses.fields(Confidence)])
