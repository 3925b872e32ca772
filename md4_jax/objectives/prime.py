"""Bound of partial masking, and the published loss: docs/families/partial_masking.md."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.objectives.head import at_noise, noise_of
from md4_jax.objectives.log_sum_exp import summed
from md4_jax.objectives.noising import SMALLEST_TIME, masked, prompted
from md4_jax.processes.capabilities import RevealsParts
from md4_jax.processes.outputs import widened
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

FORMS = ("bound", "joint")


@dataclasses.dataclass(frozen=True)
class Prime:
    """Bound of partial masking on -log p, in nats (MDM-Prime, arXiv:2505.18495).

    With mu_n(z) the network's distribution over the tokens that agree with z_n, and x_nj the j-th
    sub-token of x_n,

    L(x) = int_0^1 (1 / lambda) E[ sum of -log mu_n(x_nj) over hidden (n, j) ] dlambda,
    mu_n(c) = sum of mu_n[k] over the tokens k whose j-th sub-token is c,

    with each sub-token hidden independently with probability lambda = 1 - alpha_t. In continuous
    time one sub-token is revealed at a time, and its distribution is this marginal. With the
    optimal network the mean of L is the entropy of the data. It is complete for every schedule; if
    that has no such t, a time-conditioned network gets the nearest one.

    form  bound  L
          joint  the paper's loss, -log mu_n[x_n] once for each token with hidden sub-tokens. For
                 the optimal network it lies between 1 / parts of the entropy and the entropy: a
                 training-only loss
    """

    needs: ClassVar[Needs] = Needs((RevealsParts,))
    time_power: ClassVar[int] = 2

    form: str = "bound"

    def __post_init__(self):
        if self.form not in FORMS:
            known = " or ".join(map(repr, FORMS))
            raise UserError(f"objective.form must be {known}, not {self.form!r}")

    def is_bound(self, process: RevealsParts) -> bool:
        return self.form == "bound"

    def for_evaluation(self) -> "Prime":
        """Returns the bound."""
        return Prime()

    def __call__(
        self, denoiser: Denoiser, process: RevealsParts, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        probability = jnp.maximum(u, SMALLEST_TIME)
        z = prompted(batch, process.mask_each(keys, batch.tokens, probability))
        hidden = jnp.mean(process.hidden(z), axis=(1, 2), dtype=jnp.float32)
        extra = {"masked": masked(process, z), "hidden": hidden}
        return self.loss_at(denoiser, process, batch, z, probability), extra

    def loss_at(
        self, denoiser: Denoiser, process: RevealsParts, batch: Batch, z: Array, probability: Array
    ) -> Array:
        """Returns the integrand at z and lambda = probability [B]."""
        digits, t = process.digits, process.schedule.inverse(probability)

        def cost(logits: Array, x: Array, z: Array) -> Array:
            return sub_token_nats(logits, x, process.hidden(z), digits, self.form == "joint")

        nats_BxL = at_noise(
            denoiser, denoiser.features(z, t), noise_of(process, batch, z),
            reduce=cost, rows=(batch.tokens, z),
        )  # fmt: skip
        return jnp.sum(nats_BxL, axis=1) / probability


def sub_token_nats(
    logits: Array, x: Array, hidden: Array, digits: np.ndarray, joint: bool = False
) -> Array:
    """Sums -log of the marginal of x's sub-token over the hidden ones: [..., V] -> [...].

    x       int32 [...]
    hidden  bool [..., parts], the hidden sub-tokens of x. Tokens that differ from x in another one
            have no probability
    digits  int32 [V, parts], the sub-tokens of each token
    joint   returns -log of the probability of all hidden sub-tokens together instead, which is that
            of x
    """

    @jax.custom_vjp
    def nats(logits: Array, x: Array, hidden: Array) -> Array:
        return forward(logits, x, hidden)[0]

    def forward(logits: Array, x: Array, hidden: Array) -> tuple[Array, tuple]:
        wide, groups = _agreeing(logits, x, hidden, digits, joint)
        total = summed(wide)
        parts = [summed(jnp.where(same, wide, -jnp.inf)) for same, _ in groups]
        each = [
            jnp.where(own, total - part, 0.0) for part, (_, own) in zip(parts, groups, strict=True)
        ]
        return sum(each), (logits, x, hidden, total, parts)

    def backward(kept: tuple, slope: Array) -> tuple[Array, None, None]:
        logits, x, hidden, total, parts = kept
        wide, groups = _agreeing(logits, x, hidden, digits, joint)
        number = sum(own.astype(wide.dtype) for _, own in groups)
        found = number[..., None] * jnp.exp(wide - total[..., None])
        for part, (same, own) in zip(parts, groups, strict=True):
            share = jnp.exp(wide - part[..., None])
            found = found - jnp.where(same & own[..., None], share, 0.0)
        return (slope[..., None] * found).astype(logits.dtype), None, None

    nats.defvjp(forward, backward)
    return nats(logits, x, hidden)


def _agreeing(
    logits: Array, x: Array, hidden: Array, digits: np.ndarray, joint: bool
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Returns (logits, -inf where a visible sub-token of x is contradicted, groups of tokens).

    A group is (which tokens are in it: bool [..., V], whether its probability counts: bool [...]).
    There is one for each sub-token, the tokens that have that of x; or, if joint, one of x alone.
    """
    columns = jnp.asarray(digits).T
    groups = [(own[x][..., None] == own, hidden[..., part]) for part, own in enumerate(columns)]
    agrees = functools.reduce(
        jnp.logical_and, (same | own_hidden[..., None] for same, own_hidden in groups)
    )
    if joint:
        groups = [(x[..., None] == jnp.arange(len(digits)), jnp.any(hidden, axis=-1))]
    return jnp.where(agrees, widened(logits), -jnp.inf), groups
