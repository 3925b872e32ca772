"""Information profile of a masked model, which predicts the loss of any schedule."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.evals.context import Context, OnBatches, check_sizes, data_length, first_alone
from md4_jax.evals.metrics import bits
from md4_jax.experiment import Experiment, rows_of
from md4_jax.generate import figures
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.draws import draws
from md4_jax.objectives.head import noise_of
from md4_jax.objectives.noising import prompted
from md4_jax.objectives.token_nats import masked_nats
from md4_jax.protocols import Array, Batch, Network, Params, UserError
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import to_global, to_host
from md4_jax.runtime.stopping import stop_if_asked
from md4_jax.samplers import GRIDS, profile


@dataclasses.dataclass(frozen=True)
class InformationProfile(OnBatches):
    """Measures Z(k), the mean cross-entropy of a token given k visible ones: samplers/profile.py.

    Writes information_profile.json, which sample.grid=optimal reads, and a plot of Z and of the
    predicted loss against steps. The prediction is exact for the optimal network.

    every, final, split, data, batch_size, limit, seed  as in `likelihood`
    draws  number of values of k per sequence
    """

    split: str = "validation"

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError unless the model is a masked model of whole texts."""
        masks = isinstance(experiment.process, AnyOrder.needs.processes)
        if not masks or experiment.network.causal:
            raise UserError(
                f"{key} needs process.name='masking' and network.causal=False: it needs "
                "predictions from tokens on both sides"
            )
        if block := getattr(experiment.objective, "block", 0):
            raise UserError(
                f"{key} measures predictions of masks in whole texts, but a model trained with "
                f"objective.block={block} has only seen masks in blocks: remove the evaluator"
            )
        if experiment.objective.needs.ordered:
            raise UserError(
                f"{key} measures predictions of masks in whole texts, but this model was trained "
                "on tokens in a random order: remove the evaluator"
            )
        check_sizes(self, experiment, key)

    def length_of(self, experiment: Experiment) -> tuple[str, int]:
        """Returns (key, tokens) of the sequences that the network reads."""
        return data_length(self, experiment)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Writes and prints the profile; returns its mean and the predicted losses."""
        visible, nats, weight, length = self._measured(experiment, params, context)
        if jax.process_index() != 0:
            return {}
        found = profile.fitted(visible, nats, weight, length)
        losses = predicted(found, experiment.process)
        kept = {
            "step": context.step, "split": self.split, "sequences": len(nats) // self.draws,
            "draws": self.draws, "nats": found.tolist(), **losses,
        }  # fmt: skip
        picture = context.workdir / "figures" / "information_profile.png"
        unit = experiment.domain.unit
        context.say(_table(context.name, losses, length, unit))  # even if the disk is full
        with first_alone():
            path = profile.keep(context.workdir, kept)
            figures.information_profile(found, losses, picture, unit=unit)
        context.say(f"profile: {path}, {picture}")
        named = {
            f"{name}_{steps}_steps_bits_per_token": bits(value) / length
            for name in ("optimal", "cosine", "uniform")
            for steps, value in zip(losses["steps"], losses[name], strict=True)
        }
        mean = bits(float(found.mean()))
        return {"split": self.split, "profile_mean_bits_per_token": mean, **named}

    def _measured(
        self, experiment: Experiment, params: Params, context: Context
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Returns (numbers of visible tokens, mean nats of masks, numbers of masks), and L."""
        key = ("information_profile", experiment.network, self.draws, self.seed)
        if key not in context.programs:
            step = make_profile_step(experiment.network, self.draws, self.seed)
            context.programs[key] = jit(step, experiment.mesh, experiment.network)
        parts, seen = [], 0
        _, length = self.length_of(experiment)
        batches = context.corpus(self.data).eval_batches(
            self.split, **rows_of(experiment, self.batch_size or experiment.train.batch_size)
        )
        for index, batch in enumerate(batches):
            stop_if_asked()
            if batch.tokens.shape[1] != length:  # the rest of the split
                continue
            rows = to_global(batch, experiment.mesh)._replace(text=None)
            with jax.set_mesh(experiment.mesh):
                out = context.programs[key](params, rows, jnp.int32(index))
            whole = to_host(rows.loss_mask).all(axis=1)
            parts.append([to_host(part)[:, whole].ravel() for part in out])
            seen += int(whole.sum())
            if self.limit and seen >= self.limit:
                break
        if not seen:
            raise UserError(
                f"evals.{context.name}: all sequences of the {self.split} split are shorter than "
                "data.length, but the profile needs sequences of full length"
            )
        visible, nats, masks = (np.concatenate(part) for part in zip(*parts, strict=True))
        return visible, nats.astype(np.float64), masks.astype(np.float64), length


def make_profile_step(
    network: Network, draws_per_sequence: int, seed: int
) -> Callable[[Params, Batch, Array], tuple[Array, Array, Array]]:
    """Makes (params, batch, index) -> (visible tokens, nats of a mask, masks), each [draws, B].

    The numbers of visible tokens are stratified over the batch; the nats are means over masks.
    """

    def profile_step(params: Params, batch: Batch, index: Array) -> tuple[Array, Array, Array]:
        denoiser, process = network.denoiser(params, batch.context), params["process"]
        tokens = jnp.sum(batch.loss_mask, axis=1)

        def one(draw: Array) -> tuple[Array, Array, Array]:
            u, keys = draws(seed, index * draws_per_sequence + draw, len(tokens))
            count = jnp.clip(jnp.floor(u * tokens).astype(jnp.int32) + 1, 1, tokens)
            z, noise = process.mask_exactly(keys, batch.tokens, count, batch.loss_mask)
            z = prompted(batch, z)
            nats = masked_nats(denoiser, process, batch, z, process.schedule.inverse(noise))
            masks = jnp.sum(noise_of(process, batch, z), axis=1)
            return tokens - masks, nats / jnp.maximum(masks, 1), masks

        return jax.lax.map(one, jnp.arange(draws_per_sequence))

    return profile_step


def predicted(found: np.ndarray, process: Any) -> dict[str, list]:
    """Returns predicted losses in nats for 1, 2, ... steps: optimal counts, and two grids."""
    length = len(found)
    steps = [2**n for n in range(length.bit_length()) if 2**n <= min(length, 256)]
    losses: dict[str, list] = {"steps": steps}
    losses["optimal"] = [profile.loss(found, profile.best_counts(found, n)) for n in steps]
    for name in ("cosine", "uniform"):
        losses[name] = [
            profile.loss(found, _counts(GRIDS[name](n), process, length)) for n in steps
        ]
    return losses


def _counts(grid: np.ndarray, process: Any, length: int) -> np.ndarray:
    """Returns the number of tokens that each step of a grid unmasks, in order."""
    left = np.floor(np.asarray(process.schedule.one_minus_alpha(grid)) * length + 1e-4)
    left[0], left[-1] = 0, length
    return np.diff(left.astype(int))[::-1]


def _table(name: str, losses: Mapping[str, list], length: int, unit: str) -> str:
    """Formats the predicted losses."""
    lines = [f"{name}: predicted loss of parallel reveals, bits per {unit}"]
    lines.append(f"  {'steps':>6} {'optimal':>9} {'cosine':>9} {'uniform':>9}")
    columns = (losses[key] for key in ("steps", "optimal", "cosine", "uniform"))
    for n, *values in zip(*columns, strict=True):
        lines.append(f"  {n:>6} " + " ".join(f"{bits(v) / length:9.4f}" for v in values))
    return "\n".join(lines)
