"""Checks of the inputs of a model's Python methods."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from md4_jax.config import foreign
from md4_jax.config.judging import Others
from md4_jax.config.schema import type_of
from md4_jax.data.units import OF_IMAGES
from md4_jax.evals import guides
from md4_jax.experiment import Experiment
from md4_jax.options import PromptOptions, check_whole
from md4_jax.processes.capabilities import ObservesMasks
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount


def check_text(domain: Any, method: str, text: Any) -> None:
    """Raises UserError if the model's domain is not text, or `text` is not a string."""
    if domain.unit in OF_IMAGES or not hasattr(domain, "encode"):
        has = "images" if domain.unit in OF_IMAGES else f"{domain.unit}s"
        raise UserError(f"{method} takes text, and this model has {has}")
    if not isinstance(text, str):
        raise UserError(f"{method} takes text, not {text!r}")


def texts_of(texts: Any) -> list[Any]:
    """Returns one text, or any number of them, as a list; UserError for other types."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes) or not isinstance(texts, Iterable):
        raise UserError(f"score takes a text or a list of texts, not {texts!r}")
    return list(texts)


def prompts_and_reward(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section `sample` without prompts, and with the given reward or none.

    Prompts, reward and classifier of a run's config do not apply to samples drawn from Python. The
    name of a reward may be package.module:attribute, which is imported. UserError for a prompt that
    is not text: None would become the text 'None'.
    """
    for key in ("prompt", "suffix", "template"):
        if not isinstance(asked.get(key, ""), str):
            raise UserError(f"sample.{key} must be text, not {asked[key]!r}")
    reward = asked.get("reward", {"name": "none"})
    if not isinstance(reward, Mapping) or "name" not in reward:
        raise UserError(
            "reward must be the keys of the section sample.reward with its name, such as "
            f"{{'name': 'pattern', 'pattern': 'the'}}, not {reward!r}"
        )
    foreign.allow(foreign.names_in(reward))
    cleared = {k: v for k, v in dataclasses.asdict(PromptOptions()).items() if k != "blank"}
    return {**cleared, "classifier": "", "reward": dict(reward)}


def check_counts(asked: Mapping[str, Any], sampler: str) -> None:
    """Raises UserError for a key of `sample` that must be a whole number and is another value.

    sampler: sample.name of the config. A whole float is refused too, as in `Model.score`.
    """
    for key, value in asked.items():
        if type_of("sample", asked.get("name", sampler), key) is int:
            check_whole(f"sample.{key}", value)


def full(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys of `sample` that draw texts in full; UserError if they end texts early.

    In block diffusion the blanks after the end of a text would remain masks.
    """
    for key in ("stop", "min_entropy"):
        if options.get(key):
            raise UserError(
                f"infill fills every blank of the text, so {key}={options[key]!r} cannot end "
                f"it early: remove {key}, or use sample with a template"
            )
    return {**options, "stop": "", "min_entropy": 0.0}


def of_one(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of `sample` for watching one sample; UserError if there are several.

    options: keys of `sample` that the user gives
    """
    if options.get("num", 1) != 1:
        raise UserError(
            f"watch draws one sample, not num={options['num']}: leave num out, and call watch "
            "again with another seed. sample(num, trace=True) draws several at once"
        )
    return {"num": 1, "trace": True}


def opened(experiment: Experiment, programs: dict) -> Experiment:
    """Returns the experiment with the reward or classifier of its samples loaded."""
    if experiment.steering is None and experiment.guide is None:
        return experiment
    from md4_jax.model import judging  # which imports `load`, and that this file

    return guides.opened(experiment, Others(experiment, judging.FOREIGN), programs)


def checked(experiment: Experiment, tokens: Any, t: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens int32 [B, L], times float32 [B]); UserError for invalid values.

    tokens  symbols of the vocabulary, 0..V-1. V is the mask of a process that has one, and V + 1 an
            absent token of variable-length texts
    """
    rows = np.atleast_2d(_array("tokens", tokens))
    if rows.ndim > 2 or not rows.size:
        raise UserError(
            "tokens must have the shape [B, L] or [L] and must not be empty, but their shape is "
            f"{rows.shape}"
        )
    if not np.issubdtype(rows.dtype, np.integer):
        raise UserError(f"tokens must be whole numbers, not {rows.dtype.name}")
    shape = tuple(experiment.domain.shape)
    if len(shape) == 3 and rows.shape[1] != math.prod(shape):  # of images
        raise UserError(
            f"tokens must be whole images of the shape {shape}, in rows of {math.prod(shape)} "
            f"values, but these rows have {rows.shape[1]}"
        )
    process = experiment.process
    masks, size = hasattr(process, "mask_id"), process.vocab_size
    most = size + 1 if experiment.network.gaps else size + masks - 1
    if experiment.network.parts:  # the masks of some sub-tokens have numbers of their own
        most = process.states - 1
    wrong = rows[(rows < 0) | (rows > most) | ((rows == size) & (not masks))]
    if wrong.size:
        said = f", where {size} is the mask" if masks else ""
        if experiment.network.gaps:
            said += f", {size + 1} no token" if masks else f" and not be {size}: there is no mask"
        raise UserError(f"the token {wrong[0]} must lie between 0 and {most}{said}")
    if isinstance(process, ObservesMasks) and np.any(rows == process.mask_id):
        raise UserError(
            f"the token {process.mask_id} is the mask, but with this process the network reads "
            "masks together with Gaussian noise: logits can only be computed for clean tokens"
        )
    return rows.astype(np.int32), _times(t, len(rows))


def contexts(context: Any, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the context of tokens [B, L] as arrays; UserError if sizes differ."""
    if not isinstance(context, Mapping):
        raise UserError(f"context must be a dict of arrays, not {context!r}")
    shapes, found = {"label": rows.shape[:1], "segments": rows.shape}, {}
    for name, values in context.items():
        array = _array(f"context[{name!r}]", values)
        expected = shapes.get(name, (len(rows), *array.shape[1:]))
        if array.shape != expected or array.dtype.kind in "OSU":
            raise UserError(
                f"context[{name!r}] must be numbers of the shape {expected} for tokens of the "
                f"shape {rows.shape}, but it is {array.dtype.name} of the shape {array.shape}"
            )
        found[name] = array
    return found


def positions(at: Any, rows: np.ndarray) -> np.ndarray:
    """Returns one position for each of the rows [B, L], int32 [B]; UserError if out of range."""
    found = _array("at", at)
    if found.shape not in ((), (1,), (len(rows),)) or not np.issubdtype(found.dtype, np.integer):
        count = amount(len(rows), "sequence")
        raise UserError(f"at must be one position, or one for each of {count}")
    if np.min(found) < 0 or np.max(found) >= rows.shape[1]:
        raise UserError(f"at={at} must lie between 0 and {rows.shape[1] - 1}, the last position")
    return np.broadcast_to(found, len(rows)).astype(np.int32)


def _times(t: Any, rows: int) -> np.ndarray:
    """Returns the times [B]; UserError unless they are one number or B, in [0, 1]."""
    times = _array("t", t, np.float32)
    if times.shape not in ((), (1,), (rows,)):
        count = amount(rows, "sequence")
        raise UserError(f"t must be one number, or one for each of {count}, not {t!r}")
    if not np.all((times >= 0) & (times <= 1)):
        raise UserError(f"t={t} must lie between 0 and 1")
    return np.broadcast_to(times, rows)


def _array(name: str, values: Any, dtype: Any = None) -> np.ndarray:
    """Returns values as an array; UserError for ragged rows and non-numeric values."""
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} must be numbers, in rows of equal length: {error}") from error
