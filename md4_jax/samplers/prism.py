"""Unmasking that masks tokens of low quality again: docs/families/prism.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Accelerator, Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.chain import NEVER, Chain
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.confidence_checks import check_random
from md4_jax.samplers.draw import gumbel
from md4_jax.samplers.orders import blocks_of, ranked
from md4_jax.samplers.reveal import draw_where

ORDERS = ("random", "confidence")
# Keys of `Confidence` for the order of masks.
OF_AN_ORDER = ("score", "noise", "rule", "limit", "tempered", "position_temperature")


@pytree("transform", "noise", "limit", "eta", "remasked")
@dataclasses.dataclass(frozen=True)
class Prism(Confidence):
    """Unmasks tokens, and masks those of lowest quality again (PRISM, arXiv:2510.01384).

    The network says how probable it is that each visible token is right (`network.quality`). A step
    masks the m worst ones, and unmasks m more masks than it would otherwise; one evaluation of the
    network decides on both. So after a step there are as many masks as without remasking. A token
    is not unmasked in the step that masks it. The prompt does not change.

    remasked  m; of a fraction, such as 0.25, one more token with this probability
    eta       if above 0, m has a binomial distribution instead: each token that the model has drawn
              counts with probability min(eta, (1 - alpha_s) / alpha_t), as in `Remask` with 'cap',
              where alpha is the fraction of such tokens before and after the step
    since, until  tokens are remasked only in steps from t in (until, since]
    order     random      masks are unmasked in random order
              confidence  in the order of `Confidence`, with its keys

    With fewer than m masks left, or fewer than m tokens drawn, a step remasks fewer. With
    `semi_autoregressive` it remasks tokens of the present block only. The samples do not have the
    distribution of the model.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,), quality=True)

    remasked: float = 1.0
    eta: float = 0.0
    since: float = 1.0
    until: float = 0.0
    order: str = "random"

    def __post_init__(self):
        super().__post_init__()
        _check(self)

    @property
    def is_deterministic(self) -> bool:
        """Whether samples have a likelihood."""
        return False

    def _draw(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        due: Array,
        *,
        t: Array,
        keys: Array,
    ) -> Chain:
        """Reveals masks, at least due [B] in each sequence, and masks the worst tokens."""
        reveal_keys, count_keys = split_keys(keys)
        masks = process.is_noise(chain.z)
        h = denoiser.features(chain.z, self.time(process, chain, t))
        block = blocks_of(chain, self.semi_autoregressive)
        first = jnp.min(jnp.where(masks, block, NEVER), axis=1, keepdims=True)
        visible = ~masks & ~chain.prompt_mask & (block == first)
        left = jnp.maximum(jnp.sum(masks & (block == first), axis=1) - due, 0)
        number = jnp.where(due > 0, self._number(visible, left, t, count_keys), 0)
        worst = visible & (ranked(denoiser.quality(h), visible) < number[:, None])
        # Without a second evaluation of the network.
        read = denoiser._replace(
            features=lambda z, t: h, accelerator=Accelerator(denoiser.accelerator.groups)
        )
        more = due + number
        if self.order == "confidence":
            out = super()._draw(read, process, chain, more, t=t, keys=reveal_keys)
        else:
            token_keys, order_keys = split_keys(reveal_keys)
            noise = gumbel(order_keys, chain.z)
            chosen = self._chosen(process, chain, None, chain.z, more, noise)
            # 4 times as fast as logits of all positions, at V = 50257, 1024 tokens in 32 steps on
            # CPU.
            out = draw_where(read, self.transform, chain, chosen, t=t, keys=token_keys)
        return out._replace(
            z=jnp.where(worst, process.mask_id, out.z),
            confidence=jnp.where(worst, 0.0, out.confidence),
        )

    def _number(self, visible: Array, left: Array, t: Array, keys: Array) -> Array:
        """Returns how many of the visible tokens [B, L] a step from t masks again: int32 [B].

        left  number of masks that the step would leave
        """
        draws, count = uniforms(keys, visible.shape[1]), jnp.sum(visible, axis=1)
        sigma = jnp.minimum(self.eta, left / jnp.maximum(count, 1))
        binomial = jnp.sum(visible & (draws < sigma[:, None]), axis=1)
        fixed = jnp.floor(self.remasked + draws[:, 0]).astype(binomial.dtype)
        number = jnp.minimum(jnp.where(self.eta > 0, binomial, fixed), jnp.minimum(left, count))
        return jnp.where((t > self.until) & (t <= self.since), number, 0)

    def _score(self, outputs: Array | None, tokens: Array) -> Array:
        """Returns the scores that decide on the order of masks: [B, L]."""
        if self.order == "random":
            return jnp.zeros(tokens.shape)
        return super()._score(outputs, tokens)


def _check(step: Prism) -> None:
    """Raises UserError for options that are impossible or have no effect."""
    told = {key: getattr(step, key) for key in ("remasked", "eta")}
    told = {key: value for key, value in told.items() if isinstance(value, float | int)}
    if told.get("remasked", 0) < 0:
        raise UserError(f"sample.remasked must not be negative, not {step.remasked}")
    if not 0 <= told.get("eta", 0) <= 1:
        raise UserError(f"sample.eta must lie in [0, 1], not {step.eta}")
    if not 0 <= step.until < step.since <= 1:
        raise UserError(
            "sample.until and sample.since need 0 <= until < since <= 1, "
            f"not {step.until} and {step.since}"
        )
    if step.order not in ORDERS:
        raise UserError(
            f"sample.order must be {' or '.join(map(repr, ORDERS))}, not {step.order!r}"
        )
    if step.edit:
        raise UserError(
            f"sample.edit={step.edit} replaces tokens, but sample.name='prism' masks them again: "
            "set sample.edit=0"
        )
    check_random(step, OF_AN_ORDER)
