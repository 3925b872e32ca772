"""An optimizer from optax."""

import dataclasses

import optax


@dataclasses.dataclass(frozen=True)
class Lion:
    """Lion (arXiv:2302.06675) at a constant rate."""

    learning_rate: float = 1e-3

    def build(self, num_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
        """(the transformation of gradients, the learning rate of a step)."""
        del num_steps
        return optax.lion(self.learning_rate), optax.constant_schedule(self.learning_rate)
