"""Negative log-likelihood of texts under a sampler, along the path of unmasking each text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.evals.context import Context, OnBatches, check_sizes, data_length
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.experiment import Experiment, sample_block
from md4_jax.objectives.head import at_positions
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes.order import numbered
from md4_jax.protocols import Array, Batch, Denoiser, Network, Params, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import NEVER, Chain, ReadsTextAtOnce, RevealsByLogits
from md4_jax.samplers.draw import reading


@dataclasses.dataclass(frozen=True)
class Path:
    """Negative log-likelihood under a sampler's steps along a grid, in nats per sequence [B].

    If the positions to unmask do not depend on the drawn tokens, a single path leads to x:

        -log p(x) = sum over steps, sum over positions n unmasked by the step, -log mu_n(z, t)[x_n],

    where z holds the tokens of x that earlier steps unmasked (arXiv:2603.01367). It is exact for
    any number of tokens per step, and includes the temperature of the sampler. If the positions are
    drawn independently of the network (a random order, or the times of ancestral sampling), this is
    -log p(x | drawn positions), and its mean over draws is a bound on -log p(x). u is unused.
    """

    step: Any
    grid: tuple[float, ...]

    @property
    def needs(self) -> Any:
        """Requirements, which are those of the sampler."""
        return self.step.needs

    def is_bound(self, process: Any) -> bool:
        """Returns whether the sampler has a likelihood with this process."""
        by_logits = isinstance(self.step, RevealsByLogits) and self.step.is_deterministic
        is_read_at_once = isinstance(self.step, ReadsTextAtOnce)
        return by_logits or is_read_at_once or reveal.has_schedule(self.step, process)

    def is_exact(self, network: Network) -> bool:
        """Returns whether only tokens are drawn, so that the value is exact."""
        known = isinstance(self.step, ReadsTextAtOnce | RevealsByLogits)
        return known or getattr(self.step, "has_fixed_order", False)

    def __call__(
        self, denoiser: Denoiser, process: Any, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        del u
        if isinstance(self.step, ReadsTextAtOnce):
            z = self.step.inputs(process, batch.tokens)
            return self._cost(denoiser, z, jnp.zeros(len(z)), batch, batch.loss_mask), {}
        z = jnp.where(batch.loss_mask, process.mask_id, batch.tokens)
        given = jnp.logical_not(batch.loss_mask)
        chain = Chain(z, given, given.astype(jnp.float32), jnp.zeros(len(z), jnp.int32))
        if isinstance(self.step, RevealsByLogits):
            return self._by_logits(denoiser, process, batch, chain), {}
        return self._by_schedule(denoiser, process, batch, chain, keys), {}

    def _by_logits(self, denoiser: Denoiser, process: Any, batch: Batch, chain: Chain) -> Array:
        """Follows a step that selects positions by the network; remaining masks are costed last.

        With a given number of tokens per step no masks remain: the sampler takes further steps.
        """
        x, times = batch.tokens, jnp.asarray(self.grid)

        def reveals(z: Array, t: Array, s: Array | None) -> tuple[Array, Array]:
            here = chain._replace(z=z)
            time = jnp.full(len(z), t) if s is None else self.step.time(process, here, t)
            logits, chosen = denoiser(z, time), process.is_noise(z) & batch.loss_mask
            if s is not None:
                chosen &= self.step.reveals(process, here, logits, s, t)
            nats = token_nats(self.step.transform(logits), x)
            nats = jnp.sum(jnp.where(chosen, nats, 0.0), axis=1)
            return jnp.where(chosen, x, z), nats

        def body(z: Array, index: Array) -> tuple[Array, Array]:
            return reveals(z, times[index], times[index - 1])

        z, nats = jax.lax.scan(body, chain.z, jnp.arange(len(self.grid) - 1, 0, -1))
        nats, end = jnp.sum(nats, axis=0), jnp.zeros_like(times[0])
        if each := getattr(self.step, "per_step", 0):
            further = -(-x.shape[1] // each) - (len(self.grid) - 1)
            z, more = jax.lax.scan(lambda z, _: reveals(z, end, end), z, length=max(0, further))
            return nats + jnp.sum(more, axis=0)
        return nats + reveals(z, end, None)[1]

    def _by_schedule(
        self, denoiser: Denoiser, process: Any, batch: Batch, chain: Chain, keys: Array
    ) -> Array:
        """Follows a schedule that is drawn independently of the network."""
        grid, length = np.asarray(self.grid, np.float32), chain.z.shape[1]
        schedule = reveal.schedule_of(self.step, process, chain, grid, keys)
        rounds = numbered(jnp.where(batch.loss_mask, schedule.round, NEVER))
        most = reveal.capacity_of(self.step, process, grid, length)
        if schedule.rank is not None:
            denoiser = reading(denoiser, schedule.rank)

        def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
            number, nats = state
            here = (rounds == number) & batch.loss_mask
            z = jnp.where((rounds >= number) & batch.loss_mask, process.mask_id, batch.tokens)
            t = jnp.max(jnp.where(here, schedule.time, 0.0), axis=1)
            return number + 1, nats + self._cost(denoiser, z, t, batch, here, most / length)

        last = jnp.max(jnp.where(batch.loss_mask, rounds, -1))
        first = (jnp.int32(0), jnp.zeros(len(chain.z), jnp.result_type(float)))
        return jax.lax.while_loop(lambda state: state[0] <= last, body, first)[1]

    def _cost(
        self, denoiser: Denoiser, z: Array, t: Array, batch: Batch, here: Array, part: float = 1.0
    ) -> Array:
        """Sums -log mu_n(z, t)[x_n] over the positions `here`, at most a fraction `part`: [B]."""

        def nats(logits: Array, x: Array) -> Array:
            return token_nats(self.step.transform(logits), x)

        h_BxLxD, capacities = denoiser.features(z, t), (part,) if part < 1.0 else ()
        rows = (batch.tokens,)
        found = at_positions(denoiser, h_BxLxD, here, reduce=nats, rows=rows, capacities=capacities)
        return jnp.sum(found, axis=1)


@dataclasses.dataclass(frozen=True)
class PathLikelihood(OnBatches):
    """Evaluates -log p of a split under the sampler of the `sample` section: see `Path`.

    every, final, split, data, batch_size, stride, limit, seed  as in `likelihood`
    draws  number of random orders, or sets of unmasking times, per sequence, if they are random
    """

    stride: int = 0

    def __post_init__(self):
        super().__post_init__()
        self._bound(None)

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError for a sampler without a likelihood, and for sizes that do not fit."""
        step, name = experiment.sampler_step, experiment.config["sample"]["name"]
        if not Path(step, ()).is_bound(experiment.process):
            raise UserError(
                f"{key}: sample.name={name!r} has no likelihood along a path, because its "
                "positions depend on the drawn tokens or on noise. Use confidence with "
                "sample.score=margin or entropy, sample.noise=0 and sample.position_temperature=0, "
                "or any_order, first_hitting, ancestral with masks, eso or left_to_right"
            )
        if getattr(step, "is_sharpened", False):
            raise UserError(
                f"{key}: sample.sharpened={step.sharpened} and sample.warmup_steps="
                f"{step.warmup_steps} change the distribution in each step, which this evaluator "
                "does not compute: set sample.sharpened=1 and sample.warmup_steps=0"
            )
        plain = type(step.transform)()
        for option in ("top_k", "top_p"):
            if getattr(step.transform, option) != getattr(plain, option):
                raise UserError(
                    f"{key}: sample.{option}={getattr(step.transform, option)} gives most texts "
                    "the probability 0: remove the key"
                )
        if excluded := experiment.config["sample"].get("exclude", ""):
            raise UserError(
                f"{key}: sample.exclude={excluded!r} gives texts with these entries the "
                "probability 0: set it to ''"
            )
        if step.transform.temperature == 0:
            raise UserError(
                f"{key}: at sample.temperature=0 all texts but one have the probability 0: set a "
                "temperature above 0"
            )
        if experiment.sample.guidance != 1.0:
            raise UserError(
                f"{key}: sample.guidance={experiment.sample.guidance} changes the distribution of "
                "the samples, which this evaluator does not support: set it to 1"
            )
        if experiment.guide is not None:
            raise UserError(
                f"{key}: sample.classifier={experiment.guide.options.classifier} changes the "
                "distribution of the samples, which this evaluator does not support: set it to ''"
            )
        if experiment.steering is not None:
            raise UserError(
                f"{key}: sample.reward.name={experiment.config['sample']['reward']['name']!r} "
                "changes the distribution of the samples, which this evaluator does not support: "
                "set it to none"
            )
        if sample_block(experiment):
            raise UserError(
                f"{key} is only for sampling without blocks, but this run samples in blocks of "
                f"{amount(sample_block(experiment), 'token')}: set sample.block and "
                "objective.block to 0"
            )
        check_sizes(self, experiment, key)

    def length_of(self, experiment: Experiment) -> tuple[str, int]:
        """Returns (key, tokens) of the sequences that the network reads."""
        return data_length(self, experiment)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns the likelihood in all units, each with its standard error, and prints it."""
        path = Path(experiment.sampler_step, tuple(map(float, experiment.grid)))
        result = self._bound(path).run(experiment, params, context)
        asked = experiment.config["sample"]
        return {"sampler": asked["name"], "steps": len(experiment.grid) - 1, **result}

    def _bound(self, path: Path | None) -> LikelihoodBound:
        names = [field.name for field in dataclasses.fields(self)]
        return LikelihoodBound(path, **{name: getattr(self, name) for name in names})
