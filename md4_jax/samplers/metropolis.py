"""Metropolis-Hastings with a model's ratios: docs/families/concrete_score.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RedrawsUniformly
from md4_jax.processes.draws import fold_keys, split_keys, uniforms
from md4_jax.processes.neighbours import degree, log_ratios, moved, random_move
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.transforms import Transform


@pytree()
@dataclasses.dataclass(frozen=True)
class Metropolis:
    """Runs a Markov chain from the prior that converges to p_t at t = level.

    A proposal z' changes one token of z to one of the V - 1 others, both drawn uniformly. It is
    accepted with probability min(1, s |N(z)| / |N(z')|), where s = p_t(z') / p_t(z) is the model's
    ratio (arXiv:2211.00802; identity C02). Every sequence has |N| = L (V - 1) neighbours, so that
    the degrees cancel. T grid steps make T * proposals proposals of one network evaluation each.
    Convergence takes many times L (V - 1) proposals; how many is not known in advance.

    level 0 samples clean data (`concrete_score` with time=0). For a higher level the noise
    is removed after the chain in one step, p(x | z_level) at each position. No token is drawn
    from a distribution, so temperature, top-k and top-p must be 1, 0 and 1; UserError otherwise.
    """

    needs: ClassVar[Needs] = Needs(
        (RedrawsUniformly,),
        parametrisations=("joint", "score"),
        why="the ratios of a mixture are undefined without noise",
    )

    proposals: int = 64
    level: float = 0.0
    transform: Transform = Transform()

    def __post_init__(self):
        if self.proposals < 1:
            raise UserError(f"sample.proposals must be at least 1, not {self.proposals}")
        if not 0 <= self.level <= 1:
            raise UserError(f"sample.level must lie in [0, 1], not {self.level}")
        for key, value in dataclasses.asdict(self.transform).items():
            plain = getattr(Transform(), key)
            if value != plain:
                raise UserError(
                    f"sample.{key} must be {plain!r} with sample.name='metropolis', which does "
                    f"not draw tokens from a distribution, not {value}"
                )

    @property
    def evaluations_each(self) -> int:
        """Network evaluations of a step of the grid."""
        return self.proposals

    def __call__(
        self,
        denoiser: Denoiser,
        process: RedrawsUniformly,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        def propose(chain: Chain, index: Array) -> tuple[Chain, None]:
            here = fold_keys(keys, index)
            return self.propose(denoiser, process, chain, here), None

        return jax.lax.scan(propose, chain, jnp.arange(self.proposals))[0]

    def propose(
        self, denoiser: Denoiser, process: RedrawsUniformly, chain: Chain, keys: Array
    ) -> Chain:
        """Makes one proposal for each sequence and accepts or rejects it; prompts stay."""
        z, times = chain.z, jnp.full(chain.z.shape[:1], self.level)
        move_keys, chance_keys = split_keys(keys)
        where, symbol = random_move(move_keys, z, process.vocab_size, ~chain.prompt_mask)
        index = where[:, None]
        outputs = denoiser.unembed(denoiser.features_at(z, times, index))
        here = jnp.take_along_axis(z, index, axis=1)
        log_score = log_ratios(process, outputs, here, times)[:, 0]
        ratio = jnp.exp(jnp.take_along_axis(log_score, symbol[:, None], axis=1))
        neighbours = degree(z.shape[1], process.vocab_size)
        accepted = acceptance(ratio, neighbours, neighbours)
        taken = uniforms(chance_keys, 1) < accepted
        taken &= ~jnp.take_along_axis(chain.prompt_mask, index, axis=1)
        changed = taken & (jnp.arange(z.shape[1]) == index)
        confidence = jnp.where(changed, accepted, chain.confidence)
        return evaluated(chain, jnp.where(taken, moved(z, where, symbol), z), confidence)


def acceptance(ratio: Array, degree: Array | int, degree_proposed: Array | int) -> Array:
    """Acceptance probability min(1, ratio |N(x)| / |N(x')|), with ratio = p(x') / p(x).

    A proposal x -> x' is made with probability 1 / |N(x)|, and x' -> x with 1 / |N(x')|. Without
    their ratio the stationary distribution would be wrong (identity C02). The graph must be
    undirected.
    """
    return jnp.minimum(1.0, ratio * degree / degree_proposed)
