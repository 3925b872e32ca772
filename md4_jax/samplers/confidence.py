"""Confidence-based unmasking order, as in MaskGIT and LLaDA."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.draws import fold_keys, split_keys
from md4_jax.protocols import Array, Denoiser, Needs, pytree
from md4_jax.runtime.scopes import likely
from md4_jax.samplers import scores
from md4_jax.samplers.chain import NEVER, Chain
from md4_jax.samplers.confidence_checks import check
from md4_jax.samplers.draw import draw_token, entropy, gumbel, probability
from md4_jax.samplers.editing import replaced, settled
from md4_jax.samplers.loop import further_steps, without_noise
from md4_jax.samplers.orders import blocks_of, evenly, in_order, masks_share
from md4_jax.samplers.transforms import Transform


@pytree("transform", "noise", "limit")
@dataclasses.dataclass(frozen=True)
class Confidence:
    """Draws a token for every mask and keeps those with the highest scores.

    score     of a position, from the network's unmodified mu: temperature, top-k and top-p only
              change which token is drawn (LLaDA, arXiv:2502.09992), unless `tempered`:
              probability  log mu of the token (MaskGIT, 2202.04200)
              margin       the largest mu minus the second largest (2502.06768)
              entropy      sum mu log mu, the negative entropy
    rule      how many masks a step unmasks, the highest scores first:
              count        per_step, in as many steps as the text needs; the grid has no effect.
                           If per_step is 0, as many as `split` says
              threshold    all whose probability or margin is at least `limit` (Fast-dLLM,
                           2505.22618)
              factor       the first k, while (k + 1) (1 - c_k) <= limit for the k-th highest
                           probability or margin c_k (Fast-dLLM)
              entropy      as many as possible while the sum of their entropies, without the
                           largest, is at most `limit` nats (EB-Sampler, 2505.24857)
              The last three unmask at least one mask, and at least as many as the grid says, so
              they take at most `steps` steps. With them, and with per_step, the time input of the
              network is that at which the expected fraction of masks is that of the sequence
    split     how the masks are divided among the steps of the grid:
              grid         after a step to s, floor((1 - alpha_s) n) of the n positions outside the
                           prompt are masks
              even         the same number in each step of a block, in the first steps one more
                           (LLaDA's code); for the uniform grid, like floor
              floor        the expected number of those that are left, rounded down; the last step
                           reveals the rest (Dream's code, arXiv:2508.15487)
    tempered  whether scores are those of mu after temperature (1 for 0), top-k and top-p (Dream's
              and SDAR's code). Positions whose token is one of `transform.postponed` come last,
              and the scores of the others are those of mu without these symbols
    semi_autoregressive
              number of positions of a block. Blocks are filled from left to right, counted from the
              end of the prompt; the network sees later blocks as masks (LLaDA). 0: one block
    noise     noise * t * (a Gumbel draw) is added to the score (MaskGIT); for rule='count'
    position_temperature
              masks are drawn one after another without replacement, with odds exp(c / temperature),
              where c is the probability, the margin or the negative entropy (`alg_temp` of Dream's
              code); for rule='count'. 0: those with the highest scores
    edit      each step also draws tokens at the positions of earlier ones, which replace them if
              they are different and have at least this probability (LLaDA2.1's editing threshold;
              inclusionAI, ZHZisZZ/dllm). 0: tokens do not change
    edit_passes
              after the last mask is revealed, further evaluations replace tokens until one of them
              replaces none; at most this number of evaluations

    The samples do not have the distribution of the model. With margin or entropy and without noise
    the positions depend only on the logits, and the evaluator `path` gives the likelihood of the
    samples. With probability the order depends on the drawn tokens, and there is no likelihood.
    Neither is there with `edit`. It also uses the network's outputs at visible tokens, which losses
    on masks do not train.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks,))
    level: ClassVar[None] = None

    score: str = "probability"
    per_step: int = 0
    noise: float = 0.0
    transform: Transform = Transform()
    rule: str = "count"
    limit: float = 0.0
    semi_autoregressive: int = 0
    edit: float = 0.0
    edit_passes: int = 16
    split: str = "grid"
    tempered: bool = False
    position_temperature: float = 0.0

    def __post_init__(self):
        check(self)

    @property
    def is_adaptive(self) -> bool:
        """Whether the number of masks that a step reveals depends on the logits."""
        return self.rule != "count"

    def __call__(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        s: Array,
        t: Array,
        keys: Array,
    ) -> Chain:
        masks = process.is_noise(chain.z)
        due = jnp.minimum(self._due(process, chain, masks, s, t), jnp.sum(masks, axis=1))

        def draw(chain: Chain) -> Chain:
            return self._draw(denoiser, process, chain, due, t=t, keys=keys)

        with likely():
            return jax.lax.cond(jnp.any(due > 0), draw, lambda chain: chain, chain)

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
        """Reveals the masks with the highest scores, at least due [B] in each sequence."""
        token_keys, noise_keys = split_keys(keys)
        draws = due > 0
        outputs, chain = self.read(denoiser, process, chain, self.time(process, chain, t), draws)
        tokens = draw_token(token_keys, self.transform(outputs))
        noise = self.noise * t * gumbel(noise_keys, chain.z)
        if self.position_temperature:  # the largest sums with Gumbel draws are such draws
            noise = self.position_temperature * gumbel(noise_keys, chain.z)
        chosen = self._chosen(process, chain, outputs, tokens, due, noise)
        if self.edit:
            chosen |= draws[:, None] & replaced(process, chain, outputs, tokens, self.edit)
        return chain._replace(
            z=jnp.where(chosen, tokens, chain.z),
            confidence=jnp.where(chosen, probability(outputs, tokens), chain.confidence),
        )

    def read(
        self, denoiser: Denoiser, process: RevealsMasks, chain: Chain, time: Array, draws: Array
    ) -> tuple[Array, Chain]:
        """Returns the logits for a step of the sequences that draw tokens, bool [B], and the chain.

        time  time input of the network, [B]
        """
        return denoiser(chain.z, time), chain._replace(evaluations=chain.evaluations + draws)

    @property
    def is_deterministic(self) -> bool:
        """Whether the positions to reveal depend only on the logits."""
        drawn_first = self.score == "probability" or self.edit or self.transform.postponed
        return not drawn_first and self.noise == 0 and self.position_temperature == 0

    def rounds(self, length: int, steps: int) -> int:
        """Returns the largest number of steps for a text of this length."""
        return max(steps, -(-length // self.per_step)) if self.per_step else steps

    def left(self, process: RevealsMasks, z: Array) -> Array:
        """Marks the masks that further steps draw: bool like z."""
        return process.is_noise(z)

    def step_further(
        self, denoiser: Denoiser, process: RevealsMasks, chain: Chain, keys: Array, number: Array
    ) -> Chain:
        """Takes a step at t = 0, with the keys of `finish`."""
        end, own = jnp.float32(0.0), fold_keys(fold_keys(keys, 0), number)
        return self(denoiser, process, chain, end, end, own)

    def finish(
        self,
        denoiser: Denoiser,
        process: RevealsMasks,
        chain: Chain,
        keys: Array,
        taken: Array | int = 0,
    ) -> Chain:
        """Draws the remaining masks, then replaces tokens until the network changes none.

        With per_step the masks are drawn in further steps, if the grid has too few for the text.
        """
        if self.per_step:
            most = self.rounds(chain.z.shape[1], 0)
            chain = further_steps(self, denoiser, process, chain, keys, taken=taken, most=most)
        chain = without_noise(denoiser, process, self.transform, chain, jnp.float32(0.0), keys)
        if not self.edit:
            return chain
        return settled(
            denoiser, process, chain, keys,
            transform=self.transform, limit=self.edit, passes=self.edit_passes,
        )  # fmt: skip

    def reveals(
        self, process: RevealsMasks, chain: Chain, logits: Array, s: Array, t: Array
    ) -> Array:
        """Marks what the step from t to s reveals, given the network's logits: [B, L]."""
        due = self._due(process, chain, process.is_noise(chain.z), s, t)
        return self._chosen(process, chain, logits, chain.z, due)

    def time(self, process: RevealsMasks, chain: Chain, t: Array) -> Array:
        """Returns the time input of the network in a step from t: [B].

        If the grid does not determine the number of masks, it is the time with this fraction of
        masks.
        """
        if not (self.is_adaptive or self.per_step):
            return jnp.full(len(chain.z), t)
        return process.schedule.inverse(masks_share(chain, process.is_noise(chain.z)))

    def _due(self, process: RevealsMasks, chain: Chain, masks: Array, s: Array, t: Array) -> Array:
        """Returns the least number of masks that the step from t to s reveals: [B]."""
        if self.per_step:
            return jnp.full(len(chain.z), self.per_step)
        if self.split == "even":
            return evenly(masks, chain, s, t, self.semi_autoregressive)
        if self.split == "floor":
            return scores.rounded_down(process, chain, s, t)
        due = scores.by_grid(process, chain, s)
        return jnp.maximum(due, jnp.any(masks, axis=1)) if self.is_adaptive else due

    def _score(self, outputs: Array, tokens: Array) -> Array:
        """Returns the scores that decide on the order of positions: [B, L]."""
        if self.tempered:
            outputs = self.transform.warm(outputs)
        if not self.transform.postponed:
            return scores.score_of(self.score, outputs, tokens)
        last = jnp.asarray(self.transform.postponed)
        score = scores.score_of(self.score, outputs.at[..., last].set(-jnp.inf), tokens)
        return jnp.where(jnp.isin(tokens, last), scores.LEAST, score)

    def _chosen(
        self,
        process: RevealsMasks,
        chain: Chain,
        outputs: Array,
        tokens: Array,
        due: Array,
        noise: Array | float = 0.0,
    ) -> Array:
        """Marks the masks to reveal, at least due [B] in each sequence: bool [B, L]."""
        masks = process.is_noise(chain.z)
        score = self._score(outputs, tokens)
        if self.position_temperature and self.score == "probability":
            score = scores.probabilities(score)
        block = blocks_of(chain, self.semi_autoregressive)
        best_first = in_order(masks, -(score + noise), block)
        if self.is_adaptive:
            first = jnp.min(jnp.where(masks, block, NEVER), axis=1, keepdims=True)
            here = jnp.take_along_axis(masks & (block == first), best_first, axis=1)
            measure = entropy(outputs) if self.rule == "entropy" else score
            if self.rule != "entropy" and self.score == "probability":
                measure = jnp.exp(measure)
            measure = jnp.take_along_axis(measure, best_first, axis=1)
            holds = scores.holds(self.rule, measure, self.limit)
            due = jnp.maximum(due, jnp.sum(here & holds, axis=1))
        return masks & (jnp.argsort(best_first, axis=1) < due[:, None])
