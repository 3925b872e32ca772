"""Bound of the continuous-time framework tauLDR: docs/families/tauldr.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.objectives.noising import SMALLEST_TIME, prompted
from md4_jax.objectives.token_nats import counted, rate_divergence, rate_excess, token_nats
from md4_jax.processes.capabilities import HasGenerator
from md4_jax.processes.draws import split_keys
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

PASSES = ("one_weighted", "one", "two", "score_entropy")


@dataclasses.dataclass(frozen=True)
class CTMC:
    """Bound of tauLDR (arXiv:2205.14987, section 3.2), including the terms without parameters.

    The reverse rates are beta R[y, z_n] s_y for the model and beta R[y, z_n] r_y given x, with
    r_y = q(y | x_n) / q(z_n | x_n). With Z(z) the total rate of leaving z,

        L(x) = int_{t_1}^1 beta ( E_{z ~ q_t} sum_{n, y} R[y, z_n] (s_y - r_y)
                   - E_{z ~ q_t} Z(z) E_{z' = z after one jump} log(s / r)(z' -> z) ) dt
               + reconstruction at t_1 + KL(q(z_1 | x) || pi).

    in nats per sequence, with t_1 = first_time. The terms in r have no parameters; their mean is
    the constant between L_CT and the denoising score entropy (identity S09). They are subtracted
    draw by draw, so that each draw vanishes with beta as t -> 1. passes:

    two           as above: the network at z and at z', in one call
    one           the network at z' only; the second term is replaced by its mean over all z that
                  can jump to z'. z' has the distribution psi of a chain after a forced jump, while
                  the first term asks for q_t (section 3.3). So it is not a bound: training only
    one_weighted  as 'one', with the first term times q_t(z') / psi(z') = 1 / N(z') (identity T10).
                  Exact, since psi > 0 wherever the integrand is not zero
    score_entropy the network at z only, and the second term summed over all jumps that lead to z:
                  the denoising score entropy (identity S09). It has the least variance, so
                  evaluation uses it instead of the other bounds

    cross_entropy is the weight of an additional loss, the mean of -log mu(x | z) over tokens, with
    which tauLDR trains on CIFAR-10 (0.001). Above 0 the loss is for training only. It teaches the
    posterior of x, from which without masks only the mixture form makes the right steps.

    The mixture's rates grow as 1/t unless the network's output is sharp at t -> 0, so mixture needs
    t_1 > 0; joint takes 0 too.
    """

    needs: ClassVar[Needs] = Needs(
        (HasGenerator,), time=True, why="the optimal denoiser depends on how much noise there is"
    )

    passes: str = "one_weighted"
    first_time: float = 1e-5
    cross_entropy: float = 0.0

    def __post_init__(self):
        if self.passes not in PASSES:
            raise UserError(
                f"objective.passes must be one of {', '.join(PASSES)}, not {self.passes!r}"
            )
        if not 0 <= self.first_time < 1:
            raise UserError(f"objective.first_time must lie in [0, 1), not {self.first_time}")
        if self.cross_entropy < 0:
            raise UserError(
                f"objective.cross_entropy must not be negative, not {self.cross_entropy}"
            )

    def is_bound(self, process: HasGenerator) -> bool:
        return self.passes != "one" and self.cross_entropy == 0.0

    def check(self, process: HasGenerator) -> None:
        """Raises UserError if the cross-entropy has a different optimum from the bound."""
        joint = getattr(process, "parametrisation", "") == "joint"
        if self.cross_entropy > 0 and joint and not process.shows_clean:
            raise UserError(
                f"objective.cross_entropy={self.cross_entropy} needs "
                "process.parametrisation='mixture', not 'joint': the cross-entropy is minimised "
                "by the posterior of x"
            )

    def __call__(
        self, denoiser: Denoiser, process: HasGenerator, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        t = self.first_time + (1.0 - self.first_time) * u
        # At t = 1 beta may be infinite, so t keeps one float32 step from both ends.
        t = jnp.clip(t, SMALLEST_TIME, 1.0 - SMALLEST_TIME)
        noise, more = split_keys(keys)
        z = prompted(batch, process.corrupt(noise, batch.tokens, t))
        if self.passes == "score_entropy":
            return self._with_ends(self.loss_at(denoiser, process, batch, z, t), process, batch, z)
        jumped = process.jump(more, z, batch.loss_mask)
        if self.passes == "two":
            nats = self.loss_at_pair(denoiser, process, batch, z, t, jumped=jumped)
        else:
            nats = self.loss_at(denoiser, process, batch, jumped, t)
            # If all tokens are masked there is no jump, and the term is 0.
            nats = jnp.where(jnp.any(jumped != z, axis=1), nats, 0.0)
        return self._with_ends(nats, process, batch, z)

    def _with_ends(
        self, nats: Array, process: HasGenerator, batch: Batch, z: Array
    ) -> tuple[Array, dict[str, Array]]:
        extra = self.ends(process, batch)
        changed = jnp.mean(z != batch.tokens, axis=1, dtype=jnp.float32)
        return nats + sum(extra.values()), {**extra, "changed": changed}

    @property
    def time_power(self) -> int:
        """Power of `evaluation_times`; 1 with a jump, where early times have rare, large weights.

        With 5 there, 76 to 82% of 95% confidence intervals contained the bound (tools/coverage.py).
        """
        return 5 if self.passes == "score_entropy" else 1

    def for_evaluation(self) -> "CTMC":
        """Returns the bound of the same model with the least variance, without cross_entropy."""
        return dataclasses.replace(self, passes="score_entropy", cross_entropy=0.0)

    def ends(self, process: HasGenerator, batch: Batch) -> dict[str, Array]:
        """Returns the terms at t_1 and t = 1, {"reconstruction": [B], "prior": [B]}."""
        reconstruction = process.reconstruction_nats(batch.tokens, self.first_time)
        each = {"reconstruction": reconstruction, "prior": process.prior_nats(batch.tokens)}
        return {name: counted(nats, batch) for name, nats in each.items()}

    def loss_at_pair(
        self,
        denoiser: Denoiser,
        process: HasGenerator,
        batch: Batch,
        z: Array,
        t: Array,
        *,
        jumped: Array,
    ) -> Array:
        """Returns the integrand of two passes at z ~ q_t and `jumped`, z after one jump: [B]."""
        size, length = z.shape
        # Interleaved, so that rows stay on their device.
        both_BxLx2 = jnp.stack([z, jumped], axis=1).reshape(2 * size, length)
        h = denoiser.repeated(2).features(both_BxLx2, jnp.repeat(t, 2))
        h_Bx2xLxD = h.reshape(size, 2, length, -1)
        outputs = denoiser.unembed(h_Bx2xLxD[:, 0])
        log_score = process.log_score(outputs, z, t)
        ratio = process.score_given(z, batch.tokens, t)
        leaving = rate_excess(process.backward_rates(z), log_score, ratio)
        # After the jump only the position that jumped needs logits.
        position = jnp.argmax(z != jumped, axis=1)[:, None]
        h_there, z_there, back, x = (
            jnp.take_along_axis(a, position[..., None] if a.ndim == 3 else position, axis=1)
            for a in (h_Bx2xLxD[:, 1], jumped, z, batch.tokens)
        )
        log_score = process.log_score(denoiser.unembed(h_there), z_there, t)
        log_ratio = jnp.log(process.score_given(z_there, x, t))
        returning = jnp.take_along_axis(log_score - log_ratio, back[..., None], axis=-1)
        total = counted(process.exit_rate(z), batch)
        nats = counted(leaving, batch) - total * returning[:, 0, 0]
        nats = (1.0 - self.first_time) * process.beta(t) * nats
        return nats + self._auxiliary(process, outputs, batch, z)

    def loss_at(
        self, denoiser: Denoiser, process: HasGenerator, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the integrand of one pass at z ~ psi, a chain at time t after a jump: [B].

        The bound is its mean over psi, in which states without a jump count as 0; with
        passes='score_entropy' its mean over z ~ q_t.
        """
        outputs = denoiser(z, t)
        log_score = process.log_score(outputs, z, t)
        ratio, rates = process.score_given(z, batch.tokens, t), process.backward_rates(z)
        nats = counted(rate_divergence(rates, log_score, ratio), batch)
        if self.passes != "score_entropy":
            many = predecessors(process, ratio, z, batch)
            part = jnp.where(many > 0, 1.0 / jnp.where(many > 0, many, 1.0), 0.0)
            nats = part * nats
            if self.passes == "one":
                nats += (1.0 - part) * counted(rate_excess(rates, log_score, ratio), batch)
        nats = (1.0 - self.first_time) * process.beta(t) * nats
        return nats + self._auxiliary(process, outputs, batch, z)

    def _auxiliary(self, process: HasGenerator, outputs: Array, batch: Batch, z: Array) -> Array:
        """Returns cross_entropy times the mean of -log mu(x) over tokens, 0 where z shows x."""
        if self.cross_entropy == 0.0:
            return jnp.zeros(len(z))
        each = token_nats(outputs, batch.tokens)
        if process.shows_clean:
            each = jnp.where(process.is_noise(z), each, 0.0)
        count = jnp.maximum(jnp.sum(batch.loss_mask, axis=1), 1)
        return self.cross_entropy * counted(each, batch) / count


def predecessors(process: HasGenerator, ratio: Array, z: Array, batch: Batch) -> Array:
    """Computes N(z) = psi(z | x) / q_t(z | x), the weight of the states that can jump to z: [B].

    N = sum_{n, y} R[y, z_n] / Z(z with y at n) r_y (arXiv:2205.14987, section 3.3).
    """
    each = jnp.where(batch.loss_mask, process.exit_rate(z), 0.0)
    states = jnp.arange(ratio.shape[-1])
    others = (jnp.sum(each, axis=1, keepdims=True) - each)[..., None]
    total = others + process.exit_rate(states)
    # Where Z is zero the rate R[y, z_n] is zero as well.
    probability = process.backward_rates(z) / jnp.where(total > 0, total, 1.0)
    return counted(jnp.sum(probability * ratio, axis=2), batch)
