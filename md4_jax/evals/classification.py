"""Evaluation of a classifier of noisy sequences."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.evals import report
from md4_jax.evals.context import Context, OnBatches, check_sizes, data_length
from md4_jax.experiment import Experiment, rows_of
from md4_jax.objectives.classifier import Classifier
from md4_jax.objectives.draws import antithetic_times, draws
from md4_jax.protocols import Array, Batch, Network, Params, UserError
from md4_jax.runtime.compiling import jit
from md4_jax.runtime.sharding import to_global, to_host
from md4_jax.runtime.stopping import stop_if_asked


@dataclasses.dataclass(frozen=True)
class Classification(OnBatches):
    """Estimates the mean of -log p(y | z_t, t) over t ~ U(0, 1), and the accuracy.

    every, final, split, data, batch_size, limit, seed  as in `likelihood`
    draws  number of noise draws per sequence
    """

    final: bool = True

    main_figure: ClassVar[str] = "cross_entropy"

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError unless the network is a classifier, and for an invalid batch size."""
        if not experiment.network.classifies:
            raise UserError(
                f"{key}.name='classification' needs network.name='classifier' or, of images, "
                f"'dit_classifier', not {experiment.config['network']['name']!r}"
            )
        check_sizes(self, experiment, key)

    def length_of(self, experiment: Experiment) -> tuple[str, int]:
        """Returns (key, tokens) of the sequences that the network reads."""
        return data_length(self, experiment)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns cross-entropy in nats and accuracy, with standard errors, and prints them."""
        key = ("classification", experiment.network, self.draws, self.seed)
        if key not in context.programs:
            step = make_step(experiment.network, self.draws, self.seed)
            context.programs[key] = jit(step, experiment.mesh, experiment.network)
        size = self.batch_size or experiment.train.batch_size
        batches = context.corpus(self.data).eval_batches(self.split, **rows_of(experiment, size))
        found: list[np.ndarray] = []
        for index, batch in enumerate(batches):
            stop_if_asked()
            rows = to_global(batch._replace(text=None), experiment.mesh)
            with jax.set_mesh(experiment.mesh):
                each = context.programs[key](params, rows, jnp.int32(index))
            counts = to_host(rows.loss_mask).any(axis=1)
            found.append(np.asarray(to_host(each), np.float64)[:, counts])
            if self.limit and sum(part.shape[1] for part in found) >= self.limit:
                break
        result = _numbers(np.concatenate(found, axis=1), self.draws)
        context.say(f"{report.label(context.name, self.split)}: {report.classes(result)}")
        return {"split": self.split, **result}


def make_step(network: Network, count: int, seed: int) -> Callable[[Params, Batch, Array], Array]:
    """Makes (params, global batch, batch index) -> means over `count` draws, [2, B].

    Row 0 is the cross-entropy of each sequence, row 1 the fraction of correct classes. Times are
    drawn as by `make_eval_step` of likelihood.py.
    """

    def step(params: Params, batch: Batch, index: Array) -> Array:
        denoiser, process = network.denoiser(params, batch.context), params["process"]
        objective = Classifier()
        size = batch.tokens.shape[0]
        u, _ = draws(seed, index, size)

        def one(draw: Array) -> Array:
            _, keys = draws(seed, index * count + draw, size)
            own = jax.vmap(antithetic_times, (0, None))(u, count)[:, draw]
            nats, extra = objective(denoiser, process, batch, own, keys)
            return jnp.stack([nats, extra["accuracy"]])

        return jnp.mean(jax.lax.map(one, jnp.arange(count)), axis=0)

    return step


def _numbers(each: np.ndarray, count: int) -> dict[str, Any]:
    """Returns means and standard errors over N sequences, from [2, N]."""
    total = each.shape[1]
    numbers: dict[str, Any] = {"sequences": total, "draws": count}
    for name, values in zip(("cross_entropy", "accuracy"), each, strict=True):
        error = values.std(ddof=1) / np.sqrt(total) if total > 1 else np.nan
        numbers |= {name: float(values.mean()), f"{name}_se": float(error)}
    return numbers
