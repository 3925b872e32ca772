"""Checks of a sampler that drafts tokens and verifies them from left to right."""

from md4_jax.experiment import Experiment
from md4_jax.protocols import UserError

BLOCKS = (
    "texts are drawn block by block with it, but this sampler reads the whole text before a draft, "
    "and sample.width is the size of a draft"
)


def check_drafts(experiment: Experiment) -> None:
    """Raises UserError for settings of `sample` that a sampler with drafts does not support."""
    if not experiment.sampler_step.needs.verifies:
        return
    own, steered = experiment.sample, experiment.steering is not None
    reward = experiment.config["sample"]["reward"]["name"] if steered else "none"
    name = experiment.config["sample"]["name"]
    for key, value, fits, why in (
        ("block", own.block, 0, BLOCKS),
        ("memory", own.memory, 0, BLOCKS),
        ("min_entropy", own.min_entropy, 0.0, BLOCKS),
        ("dual_cache", own.dual_cache, False, BLOCKS),
        ("next_token", own.next_token, False, BLOCKS),
        ("guidance", own.guidance, 1.0, "a token is verified by the predictions of one network"),
        ("reward.name", reward, "none", "particles would need all missing tokens at once"),
    ):
        if value != fits:
            raise UserError(
                f"sample.{key}={value} cannot be used with sample.name={name!r}: {why}. Set "
                f"sample.{key}={fits}"
            )
