"""Cross-entropy of the class of a noisy sequence, for guidance: docs/samplers.md#classifiers."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.objectives.noising import noised
from md4_jax.processes.capabilities import HasRates, HasReverse, RevealsBySymbol, RevealsMasks
from md4_jax.protocols import Array, Batch, Denoiser, Needs, Process, UserError


@dataclasses.dataclass(frozen=True)
class Classifier:
    """Loss -log p(y | z_t, t) of the label y of x, with z_t ~ q(. | x) and t ~ U(0, 1).

    Its minimiser is the posterior of y given the noisy sequence, which guides a model of x without
    labels (arXiv:2412.10193, arXiv:2406.01572). It is in nats per sequence, and not a bound on
    -log p(x): a training-only loss. Tokens that do not count stay clean.
    """

    needs: ClassVar[Needs] = Needs((RevealsMasks, HasReverse, HasRates), classifies=True)

    def is_bound(self, process: Process) -> bool:
        return False

    def check(self, process: Process) -> None:
        """Raises UserError for noise that is learned: that of the model would be another one."""
        if isinstance(process, RevealsBySymbol):
            raise UserError(
                "objective.name='classifier' needs noise without learned parameters, but "
                "process.name='state_dependent' learns its schedule: set process.name='masking'"
            )

    def __call__(
        self, denoiser: Denoiser, process: Process, batch: Batch, u: Array, keys: Array
    ) -> tuple[Array, dict[str, Array]]:
        if "label" not in batch.context:
            raise UserError(
                "objective.name='classifier' needs data with labels, such as data.name='text' with "
                "data.label_key, or images with data.labels=True"
            )
        z, t = noised(process, batch, u, keys)
        label = batch.context["label"]
        log_p = jax.nn.log_softmax(denoiser.classify(z, t).astype(jnp.float32))
        nats = -jnp.take_along_axis(log_p, label[:, None], axis=1)[:, 0]
        right = jnp.argmax(log_p, axis=1) == label
        # Padding rows of the last batch of an evaluation.
        nats = jnp.where(jnp.any(batch.loss_mask, axis=1), nats, 0.0)
        return nats, {"cross_entropy": nats, "accuracy": right.astype(jnp.float32)}
