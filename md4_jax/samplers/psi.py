"""Psi-samplers, in which predicted clean tokens are noised again: docs/samplers.md."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from md4_jax.processes.capabilities import HasReverse
from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.protocols import Array, Denoiser, Needs, UserError, pytree
from md4_jax.samplers.ancestral import evaluated
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.draw import draw_token, probability
from md4_jax.samplers.transforms import Transform, predicts_ratios


@pytree("transform", "kappa")
@dataclasses.dataclass(frozen=True)
class Psi:
    """Takes a reverse step, or draws clean tokens and adds noise again (arXiv:2602.21185).

        z_s ~ kappa p(z_s | z_t) + (1 - kappa) sum_x q(z_s | x) p(x | z_t)

    independently at each position, from one network evaluation. Both parts lead to the distribution
    of the process at s. The second may change any token again, so errors can be corrected. kappa 1
    is `ancestral`. For masks `remask` does the same, with sigma = (1 - kappa) (1 - alpha_s).

    since, until  kappa counts in steps from t in (until, since]; in the others it is 1
    greedy_tail   the step to t = 0 takes the most likely tokens (Duo, arXiv:2506.10892)
    """

    needs: ClassVar[Needs] = Needs((HasReverse,))
    level: ClassVar[None] = None

    kappa: float = 0.95
    since: float = 1.0
    until: float = 0.0
    greedy_tail: bool = False
    transform: Transform = Transform()

    def __post_init__(self):
        if isinstance(self.kappa, float | int) and not 0 <= self.kappa <= 1:
            raise UserError(f"sample.kappa must lie in [0, 1], not {self.kappa}")
        if not 0 <= self.until < self.since <= 1:
            raise UserError(
                "sample.until and sample.since need 0 <= until < since <= 1, "
                f"not {self.until} and {self.since}"
            )

    def __call__(
        self, denoiser: Denoiser, process: HasReverse, chain: Chain, s: Array, t: Array, keys: Array
    ) -> Chain:
        choice_keys, reverse_keys, guess_keys, noise_keys = split_keys(keys, 4)
        before, now = (jnp.full(len(chain.z), time) for time in (s, t))
        transform = self.transform
        if self.greedy_tail:
            warm = jnp.where(s > 0.0, transform.temperature, 0.0)
            transform = dataclasses.replace(transform, temperature=warm)
        outputs, of_ratios = denoiser(chain.z, now), predicts_ratios(process)
        outputs = outputs if of_ratios else transform(outputs)

        reverse = process.reverse_logits(outputs, chain.z, before, now)
        clean = process.clean_logits(outputs, chain.z, now)
        if of_ratios:
            reverse, clean = transform(reverse), transform(clean)
        stepped = draw_token(reverse_keys, reverse)
        guess = draw_token(guess_keys, clean)
        noised = process.corrupt(noise_keys, guess, before)

        active = (t > self.until) & (t <= self.since)
        kappa = jnp.where(active, self.kappa, 1.0)
        steps = uniforms(choice_keys, chain.z.shape[1]) < kappa
        z = jnp.where(steps, stepped, noised)
        drawn = jnp.where(steps, probability(reverse, stepped), probability(clean, guess))
        return evaluated(chain, z, jnp.where(process.is_noise(z), 0.0, drawn))
