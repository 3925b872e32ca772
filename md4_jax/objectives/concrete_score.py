"""Concrete score matching on uniform noise: docs/families/concrete_score.md."""

import dataclasses

import jax.numpy as jnp

from md4_jax.objectives.noising import prompted
from md4_jax.objectives.token_nats import counted, excess_squares, ratio_error
from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.processes.draws import split_keys
from md4_jax.processes.neighbours import (
    SMALLEST_TIME,
    degree,
    log_ratios,
    moved,
    random_move,
)
from md4_jax.protocols import Array, Batch, Denoiser, Needs, UserError

FORMS = ("matching", "denoising")


@dataclasses.dataclass(frozen=True)
class ConcreteScore:
    """Squared errors of the concrete score c = s - 1, s_y = p_t(z with y at n) / p_t(z).

    The neighbours N(z) of a sequence differ from it in one token, so |N| = L (V - 1), and the
    relation is symmetric. rho(t) = q(a given other symbol | x) / q(x | x).

    matching   E_{z ~ p_t}[ sum_{i in N(z)} (c_i^2 + 2 c_i) - 2 |N| c(z')_z ], z' uniform in N(z):
               J of arXiv:2211.00802: the squared error minus the constant
               sum_z p_t(z) |c_p(z)|^2 (identity C01), so that the loss may be negative
    denoising  (rho^2 / V) E_q sum_n sum_{y != z_n} (s_y - r_y)^2, r_y = q(y | x_n) / q(z_n | x_n);
               E[r | z] = s, so that the minimiser is the same, with one network evaluation

    time: one noise level in [0, 1]. With 'matching', 0 is the paper's model of clean data, which
    needs data in which every sequence occurs, since c is infinite on the others. None: t ~ U(0, 1),
    and J is weighted by rho^2 too. Ratios are at most 1 / rho, so each weighted term is of order
    one; without the weight draws near t = 0 dominate. It is a training-only loss, since a squared
    error of ratios does not bound a likelihood. UserError for another form, a time outside [0, 1],
    or 'denoising' at 0.
    """

    form: str = "matching"
    time: float | None = None

    def __post_init__(self):
        if self.form not in FORMS:
            raise UserError(f"objective.form must be one of {', '.join(FORMS)}, not {self.form!r}")
        if self.time is not None and not 0 <= self.time <= 1:
            raise UserError(f"objective.time must lie in [0, 1], not {self.time}")
        if self.form == "denoising" and self.time == 0:
            raise UserError(
                "objective.time must be above 0 with objective.form='denoising', because that "
                "form needs noise. objective.form='matching' works without noise"
            )

    @property
    def needs(self) -> Needs:
        """Requires uniform noise, ratios that exist at t = 0, and the time unless it is fixed."""
        return Needs(
            (RedrawsUniformly,),
            time=self.time is None,
            parametrisations=("joint", "score"),
            why="the ratios depend on the noise level, and a mixture's are undefined without noise",
        )

    def is_bound(self, process: RedrawsUniformly) -> bool:
        return False

    def __call__(
        self, denoiser: Denoiser, process: RedrawsUniformly, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        one_level = self.time is not None
        t = jnp.full_like(u, self.time) if one_level else jnp.maximum(u, SMALLEST_TIME)
        noise_keys, move_keys = split_keys(keys)
        z = prompted(batch, process.corrupt(noise_keys, batch.tokens, t))
        extra = {"noised": jnp.mean(z != batch.tokens, axis=1, dtype=jnp.float32)}
        if self.form == "denoising":
            return self.loss_at(denoiser, process, batch, z, t), extra
        move = random_move(move_keys, z, process.vocab_size, batch.loss_mask)
        loss = self.loss_at_move(denoiser, process, batch, z, t, move)
        return loss if one_level else process.ratio(t) ** 2 * loss, extra

    def loss_at(
        self, denoiser: Denoiser, process: RedrawsUniformly, batch: Batch, z: Array, t: Array
    ) -> Array:
        """Returns the denoising form at (z, t) [B]."""
        log_score = log_ratios(process, denoiser(z, t), z, t)
        rho = process.ratio(t)[:, None]
        # The target is rho r. At z itself s = r = 1, so this entry is 0.
        stayed = z == batch.tokens
        at_x, elsewhere = jnp.where(stayed, rho, 1.0), jnp.where(stayed, rho**2, rho)
        error_BxL = ratio_error(log_score, rho, batch.tokens, at_x=at_x, elsewhere=elsewhere)
        return counted(error_BxL, batch) / process.vocab_size

    def loss_at_move(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        batch: Batch,
        z: Array,
        t: Array,
        move: tuple[Array, Array],
    ) -> Array:
        """Returns a sample of J, unweighted, at z and the neighbour with move = (position, symbol).

        One network evaluation reads both, interleaved, so that rows stay on their device. Of the
        neighbour's scores only that of z is needed.
        """
        size, length = z.shape
        both = jnp.stack([z, moved(z, *move)], axis=1).reshape(2 * size, length)
        h = denoiser.repeated(2).features(both, jnp.repeat(t, 2))
        h_Bx2xLxD = h.reshape(size, 2, *h.shape[1:])
        log_score = log_ratios(process, denoiser.unembed(h_Bx2xLxD[:, 0]), z, t)
        where, symbol = (a[:, None] for a in move)
        h_Bx1xD = jnp.take_along_axis(h_Bx2xLxD[:, 1], where[..., None], axis=1)
        log_moved = log_ratios(process, denoiser.unembed(h_Bx1xD), symbol, t)
        here = jnp.take_along_axis(z, where, axis=1)
        log_back = jnp.take_along_axis(log_moved, here[..., None], axis=-1)[:, 0, 0]
        own = counted(excess_squares(log_score), batch)
        neighbours = degree(jnp.sum(batch.loss_mask, axis=1), process.vocab_size)
        return sampled_objective(own, log_back, neighbours)


def sampled_objective(own: Array, log_back: Array, inverse_degree: int | Array) -> Array:
    """Computes own - 2 |N^-1(z)| c(z')_z, whose mean over z ~ p and z' is J on any graph.

    own = sum_{i in N(z)} (c(z)_i^2 + 2 c(z)_i). z' is uniform in N^-1(z), the sequences that have z
    as a neighbour, and log_back = log s(z')_z (arXiv:2211.00802).
    """
    return own - 2.0 * inverse_degree * jnp.expm1(log_back)
