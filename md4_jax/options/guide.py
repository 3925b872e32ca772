"""Keys of the section `sample` for classifier guidance."""

import dataclasses
import math

from md4_jax.protocols import UserError

METHODS = ("exact", "taylor")


@dataclasses.dataclass(frozen=True)
class ClassifierOptions:
    """Keys of the `sample` section for guidance by a classifier: docs/samplers.md#classifiers.

    classifier           directory of a run with objective.name=classifier; samples are guided
                         towards its class sample.label. '': none
    classifier_strength  gamma in p(z_s | z_t) p(y | z_s)^gamma. 0: no guidance; 1: p(z_s | z_t, y)
    classifier_method    exact: the classifier evaluates every sequence that differs from z_t in one
                         token; taylor: a first-order approximation from one evaluation and gradient
    """

    classifier: str = ""
    classifier_strength: float = 1.0
    classifier_method: str = "exact"

    def __post_init__(self):
        if self.classifier_method not in METHODS:
            known = " or ".join(METHODS)
            raise UserError(
                f"sample.classifier_method must be {known}, not {self.classifier_method!r}"
            )
        if not math.isfinite(self.classifier_strength):
            raise UserError(
                "sample.classifier_strength must be a finite number, not "
                f"{self.classifier_strength}"
            )
