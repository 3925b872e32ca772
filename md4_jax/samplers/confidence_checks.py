"""Checks of the options of `Confidence`, with errors that name the keys of the section `sample`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from md4_jax.protocols import UserError
from md4_jax.samplers import scores

CHOICES = {"score": scores.SCORES, "rule": scores.RULES, "split": scores.SPLITS}
LEAST_0 = (
    "per_step", "semi_autoregressive", "noise", "position_temperature", "limit", "edit",
    "edit_passes",
)  # fmt: skip


def check(step: Any) -> None:
    """Raises UserError for options of a `Confidence` that are impossible or have no effect."""
    for key, values in CHOICES.items():
        if (value := getattr(step, key)) not in values:
            raise UserError(f"sample.{key} must be one of {', '.join(values)}, not {value!r}")
    for key in LEAST_0:
        value = getattr(step, key)
        if isinstance(value, float | int) and value < 0:
            raise UserError(f"sample.{key} must not be negative, not {value}")
    _check_rule(step)
    _check_noise(step)
    _check_blocks(step)


def _check_rule(step: Any) -> None:
    if step.rule in ("threshold", "factor") and step.score == "entropy":
        raise UserError(
            f"sample.rule={step.rule!r} compares probabilities with sample.limit: set "
            "sample.score='probability' or 'margin', not 'entropy'"
        )
    is_told = isinstance(step.limit, float | int)  # and not traced, within a program
    if is_told and step.limit and not step.is_adaptive:
        raise UserError(
            f"sample.limit={step.limit} has no effect with sample.rule='count': set "
            f"sample.rule to one of {', '.join(scores.RULES[1:])}"
        )
    if is_told and step.rule == "threshold" and not 0 < step.limit <= 1:
        raise UserError(
            "sample.rule='threshold' compares probabilities with sample.limit, which must be "
            f"above 0 and at most 1, such as 0.9, not {step.limit}"
        )
    if step.split != "grid" and (step.is_adaptive or step.per_step):
        raise UserError(
            f"sample.split={step.split!r} is only for sample.rule='count' with "
            f"sample.per_step=0, not {step.rule!r} with {step.per_step}"
        )
    if step.is_adaptive and step.per_step:
        raise UserError(
            f"sample.per_step={step.per_step} is only for sample.rule='count', because "
            f"{step.rule!r} chooses the number of tokens itself: set sample.per_step=0"
        )


def _check_noise(step: Any) -> None:
    is_noisy = isinstance(step.noise, float | int) and step.noise  # and not traced
    for key, is_set in (("noise", is_noisy), ("position_temperature", step.position_temperature)):
        if step.is_adaptive and is_set:
            raise UserError(
                f"sample.{key}={is_set} is only for sample.rule='count', not {step.rule!r}"
            )
    if is_noisy and step.position_temperature:
        raise UserError(
            f"sample.noise={step.noise} and sample.position_temperature="
            f"{step.position_temperature} both change the order at random: set one of them to 0"
        )


def _check_blocks(step: Any) -> None:
    if step.split == "floor" and step.semi_autoregressive:
        raise UserError(
            f"sample.split='floor' has no blocks: set sample.semi_autoregressive="
            f"{step.semi_autoregressive} to 0, or sample.split='even'"
        )
    if step.edit > 1:
        raise UserError(
            "sample.edit is the smallest probability with which a token is replaced and must "
            f"be at most 1, not {step.edit}"
        )
    if step.edit and step.semi_autoregressive:
        raise UserError(
            f"sample.edit={step.edit} replaces tokens of the block that is being drawn, and "
            f"sample.semi_autoregressive={step.semi_autoregressive} draws all blocks within "
            "one sequence: set one of them to 0. For block diffusion set sample.block"
        )


def check_random(step: Any, keys: Sequence[str]) -> None:
    """Raises UserError for keys of the order by confidence that are set for a random order."""
    if step.order != "random":
        return
    for field in dataclasses.fields(step):
        value = getattr(step, field.name)
        # Not the transform, and no traced value, within a program.
        is_set = isinstance(value, bool | int | float | str) and value != field.default
        if field.name in keys and is_set:
            raise UserError(
                f"sample.{field.name}={value!r} is only for sample.order='confidence', not "
                f"'random': set sample.{field.name}={field.default!r}"
            )
