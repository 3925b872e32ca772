"""Bound of masked diffusion for variable-length texts: docs/families/flexible_length.md."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from md4_jax.objectives.head import at_noise
from md4_jax.objectives.noising import SMALLEST_TIME
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.event_rates import reveal_rate
from md4_jax.processes.insertion import Noised
from md4_jax.processes.lengths import Grows, InsertsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs


@dataclasses.dataclass(frozen=True)
class FlexMDM:
    """Bound of FlexMDM on -log p of a text with its length, in nats (arXiv:2509.01025).

    L(x) = int_0^1 E_q[ u_t sum_{z_n = m} -log mu_n(z_t, t)[x_n] + v_t sum_g D(c_g, y_g) ] dt
           - K(x),      D(c, y) = y - c + c log(c / y),

    where c_g is the number of missing tokens in gap g, y_g the network's expectation of it,
    u = -b' / (1 - b) and v = -a' / (1 - a). K(x) is the mean of the sum of log c_g when the tokens
    of a text are inserted in random order. The paper's loss is L + K, where K does not depend on
    the network. With K subtracted, the optimal network reaches -log p(x) on average.
    """

    needs: ClassVar[Needs] = Needs(
        (InsertsMasks,),
        time=True,
        gaps=True,
        why="how many tokens are missing depends on t",
    )
    time_power: ClassVar[int] = 2

    def is_bound(self, process: InsertsMasks) -> bool:
        return process.is_complete

    def __call__(
        self, denoiser: Denoiser, process: InsertsMasks, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        t = jnp.maximum(u, SMALLEST_TIME)
        x, fixed = texts(process, batch)
        noised = process.noised(keys, x, t, fixed)
        unmasking, insertion = self.terms_at(denoiser, process, batch, noised, t)
        return with_orders(process, batch, noised.z, unmasking=unmasking, insertion=insertion)

    def terms_at(
        self, denoiser: Denoiser, process: InsertsMasks, batch: Batch, noised: Noised, t: Array
    ) -> tuple[Array, Array]:
        """Returns the integrands of unmasking and of insertion at (z, t), each [B]."""
        z, source, _ = noised
        h_BxMxD, outputs = denoiser.gaps(z, t)
        targets = jnp.take_along_axis(batch.tokens, source, axis=1)
        masks = z == process.mask_id
        h_BxLxD = h_BxMxD[:, :-1]
        nats = at_noise(denoiser, h_BxLxD, masks, reduce=token_nats, padded=True, rows=(targets,))
        excess = gap_excess(process, batch, noised, outputs, t)
        unmasking = reveal_rate(process.schedule, t) * jnp.sum(nats, axis=1)
        return unmasking, reveal_rate(process.insertion, t) * excess


def texts(process: Grows, batch: Batch) -> tuple[Array, Array]:
    """Returns (tokens padded with absent_id, which tokens are never noised), both [B, L].

    A text ends with its last token that counts; later ones are padding. Earlier tokens that do not
    count are its prompt.
    """
    counts = jnp.asarray(batch.loss_mask)
    text = jnp.cumsum(counts[:, ::-1], axis=1)[:, ::-1] > 0
    return jnp.where(text, batch.tokens, process.absent_id), text & ~counts


def gap_excess(process: Grows, batch: Batch, noised: Any, outputs: Array, t: Array) -> Array:
    """Returns sum_g D(c_g, y_g) over the gaps in which tokens may be missing, [B].

    noised: a text with its z, source and missing, as those of `Noised`
    """
    held = noised.z != process.absent_id
    _, fixed = texts(process, batch)
    # The source of a mask to be deleted is undefined.
    tokens = ~process.is_noise(noised.z)
    stays = tokens & jnp.take_along_axis(fixed, noised.source, axis=1)
    opened = open_gaps(held, stays, noised.missing)
    divergence = poisson_divergence(noised.missing, process.log_missing(outputs, t))
    return jnp.sum(jnp.where(opened, divergence, 0.0), axis=1)


def open_gaps(held: Array, fixed: Array, missing: Array) -> Array:
    """Marks the gaps in which tokens may be missing, bool [B, L + 1].

    held marks the symbols of z, fixed those of a prompt, both [B, L]. No token is missing between
    adjacent tokens of a prompt, nor before its first one.
    """
    before = jnp.pad(fixed, ((0, 0), (1, 0)), constant_values=True)
    behind = jnp.pad(fixed, ((0, 0), (0, 1)))
    there = jnp.pad(held, ((0, 0), (1, 0)), constant_values=True)
    return there & ~(before & behind & (missing == 0))


def poisson_divergence(count: Array, log_expected: Array) -> Array:
    """Computes y - c + c log(c / y) >= 0 for c = count and log y, float like log y.

    It is the divergence of jump processes with the rates c and y, without cancellation for y near
    c.
    """
    count = count.astype(log_expected.dtype)
    d = log_expected - jnp.log(jnp.maximum(count, 1.0))
    return jnp.where(count > 0, count * (jnp.expm1(d) - d), jnp.exp(log_expected))


def with_orders(
    process: Grows, batch: Batch, z: Array, *, insertion: Array, **tokens: Array
) -> tuple[Array, dict[str, Array]]:
    """Returns the loss of given tokens and insertions, less K, and its terms by name, each [B]."""
    # A row without counted tokens is padding of a batch, and costs nothing.
    insertion = jnp.where(jnp.any(batch.loss_mask, axis=1), insertion, 0.0)
    terms = {**tokens, "insertion": insertion, "orders": -order_nats(batch.loss_mask)}
    present = jnp.mean(z != process.absent_id, axis=1, dtype=jnp.float32)
    return sum(terms.values()), terms | {"present": present}


def order_nats(counts: Array) -> Array:
    """Returns K of each text, [B]: the mean of sum log c over insertions in random order.

    counts [B, L] marks the tokens that are inserted. A run of n of them between tokens of a prompt
    adds K_n = log n + (2 / n) sum_{i < n} K_i, since the first insertion splits the run in two.
    """
    length, place = counts.shape[1], jnp.arange(counts.shape[1])
    table = jnp.asarray(order_table(length), jnp.float32)
    counts = jnp.asarray(counts)
    others = jnp.where(counts, -1, place)
    run = place - jnp.maximum.accumulate(others, axis=1)
    ends = counts & ~jnp.pad(counts[:, 1:], ((0, 0), (0, 1)))
    return jnp.sum(jnp.where(ends, table[run], 0.0), axis=1)


def order_table(length: int) -> np.ndarray:
    """Returns K_n for n = 0..length, float64."""
    found, total = np.zeros(length + 1), 0.0
    for n in range(1, length + 1):
        found[n] = np.log(n) + 2.0 * total / n
        total += found[n]
    return found
