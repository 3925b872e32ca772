"""Likelihoods of single texts, by the same estimator as for a split."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from md4_jax.data.sequences import Windows
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.metrics import bits, perplexity
from md4_jax.experiment import Experiment, drawn_classes
from md4_jax.protocols import Batch, Params, UserError, batch_of
from md4_jax.runtime.sharding import batch_shards, local_rows, to_global, to_host
from md4_jax.runtime.stopping import stop_if_asked

# Lengths of batches are this number times a power of two, so that few programs are compiled.
SHORTEST = 16
# Draws of one estimate, at the times u and 1 - u; estimates of a text are independent.
PAIR = 2


class Scores(NamedTuple):
    """Costs -log p of N texts in nats, or bounds on them, with standard errors.

    nats       float64 [N], cost of each text
    nats_se    float64 [N], standard error of the Monte Carlo estimate; 0 if it is exact
    tokens     int64 [N], number of tokens of each text
    bytes      int64 [N], number of UTF-8 bytes of each text
    exact      whether the costs are -log p itself instead of a bound
    objective  name of the bound
    """

    nats: np.ndarray
    nats_se: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    exact: bool
    objective: str

    @property
    def bits(self) -> np.ndarray:
        return bits(self.nats)

    @property
    def bits_se(self) -> np.ndarray:
        return bits(self.nats_se)

    @property
    def nats_per_token(self) -> np.ndarray:
        return self.nats / self.tokens

    @property
    def bits_per_token(self) -> np.ndarray:
        return self.bits / self.tokens

    @property
    def bits_per_token_se(self) -> np.ndarray:
        return self.bits_se / self.tokens

    @property
    def bits_per_byte(self) -> np.ndarray:
        return self.bits / self.bytes

    @property
    def perplexity(self) -> np.ndarray:
        return perplexity(self.nats_per_token)


class Row(NamedTuple):
    """Piece of a text for one row of a batch: tokens, loss mask and segments, each [L]."""

    text: int
    tokens: np.ndarray
    counted: np.ndarray
    segments: np.ndarray

    def padded(self, length: int) -> "Row":
        """Appends tokens that do not count, in a separate segment that no token attends to."""
        more = (0, length - len(self.tokens))
        return Row(
            self.text,
            np.pad(self.tokens, more),
            np.pad(self.counted, more),
            np.pad(self.segments, more, constant_values=-1),
        )


def score_texts(
    experiment: Experiment,
    params: Params,
    texts: Sequence[str],
    bound: LikelihoodBound,
    programs: dict,
    label: int = -1,
) -> Scores:
    """Estimates the bound for each text, of any length, with its Monte Carlo error.

    A text longer than `data.length` is cut into windows like a split.

    bound: evaluator with the objective, draws, batch size, stride and seed to use
    label: class of the texts; -1: none

    UserError for a stride or a label that does not fit the model.
    """
    bound.check_stride(experiment.data.length)
    tokens = [encoded(experiment, index, text) for index, text in enumerate(texts)]
    rows = [row for index, ids in enumerate(tokens) for row in _rows(experiment, bound, index, ids)]
    nats, error = score_rows(experiment, params, rows, bound, programs, label)
    return Scores(
        nats,
        error,
        np.array([len(ids) for ids in tokens]),
        np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts]),
        bound.is_exact(experiment.network),
        type(bound.objective).__name__,
    )


def score_rows(
    experiment: Experiment,
    params: Params,
    rows: Sequence[Row],
    bound: LikelihoodBound,
    programs: dict,
    label: int = -1,
    guidance: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates the bound for the counted tokens of each text, given the others of its rows.

    guidance: weight of guidance by the other tokens, as in `likelihood.make_eval_step`.
    Returns nats and their standard errors, each [texts]; the rows of a text are summed.
    """
    check_label(experiment, label)
    is_exact = bound.is_exact(experiment.network)
    repeats = 1 if is_exact else max(2, -(-bound.draws // PAIR))
    # The seed enters by the batch indices, so that all seeds share one program.
    first = int(np.random.SeedSequence(bound.seed).generate_state(1)[0] % 2**28)
    shared = dataclasses.replace(bound, draws=1 if is_exact else PAIR, seed=0)
    estimator = shared.estimator(experiment, programs, guidance)
    nats = np.zeros((repeats, 1 + max((row.text for row in rows), default=-1)))
    pads = takes_segments(experiment, params)
    for number, group in enumerate(_groups(rows, experiment, bound, pads)):
        stop_if_asked()
        batch = _batch(experiment, group, bound.sequences(experiment), pads, label)
        for repeat in range(repeats):
            found = estimator.nats(params, batch, first + number * repeats + repeat)["nats"]
            each = to_host(found).astype(np.float64).mean(axis=0)
            np.add.at(nats[repeat], [row.text for row in group], each[: len(group)])
    error = nats.std(axis=0, ddof=1) / np.sqrt(repeats) if repeats > 1 else np.zeros(nats.shape[1])
    return nats.mean(axis=0), error


def takes_segments(experiment: Experiment, params: Params) -> bool:
    """Returns whether the network can ignore padding by its segments."""
    context = {"segments": np.zeros((1, 2), np.int32)}
    try:
        jax.eval_shape(lambda p: experiment.network.bind(p["network"], context, None) and 0, params)
    except UserError:
        return False
    return True


def check_label(experiment: Experiment, label: Any) -> None:
    """Raises UserError for a label that is neither a class of the network nor an allowed -1."""
    classes = experiment.config["network"].get("classes", 0)
    if isinstance(label, bool) or not isinstance(label, int | np.integer) or label < -1:
        raise UserError(f"label must be the number of a class, or -1 for none, not {label!r}")
    if label >= 0 and not classes:
        raise UserError(f"label={label} is a class, but the network has no classes: set label=-1")
    if label >= classes > 0:
        raise UserError(
            f"label={label} must be less than network.classes={classes}, or -1 for no class"
        )
    if label < 0 and drawn_classes(experiment):
        raise UserError(
            "label=-1 means no class, but this network was trained with network.label_dropout=0 "
            "and can only evaluate a text together with its class: set label to a class, 0 to "
            f"{classes - 1}"
        )


def encoded(experiment: Experiment, index: int, text: str) -> np.ndarray:
    """Returns the tokens of a text; UserError, with the index of the text, if it has none."""
    if not isinstance(text, str):
        raise UserError(f"text {index} must be text, not {text!r}")
    try:
        ids = experiment.domain.encode(text)
    except UserError as error:
        raise UserError(f"text {index}: {error}") from error
    if len(ids) == 0:
        raise UserError(f"text {index} is empty, so that it has no likelihood")
    return np.asarray(ids)


def _rows(
    experiment: Experiment, bound: LikelihoodBound, index: int, ids: np.ndarray
) -> Iterator[Row]:
    """Yields the windows of a text, cut like a split."""
    length = experiment.data.length
    eot_id = experiment.domain.eot_id if experiment.data.separate_documents else None
    step = bound.stride or length
    windows = Windows(ids, length, step, conditional=bool(bound.stride), eot_id=eot_id)
    parts = [windows.take(np.array([number])) for number in range(len(windows))]
    rest = windows.rest()
    for part in parts if rest is None else [*parts, rest]:
        tokens = part.tokens[0]
        segments = part.context.get("segments", np.zeros_like(part.tokens))[0]
        yield Row(index, tokens, part.loss_mask[0], segments)


def _groups(
    rows: Sequence[Row], experiment: Experiment, bound: LikelihoodBound, pads: bool
) -> Iterator[list[Row]]:
    """Yields groups of rows of equal length, padded if `pads`, at most a batch each."""
    by_length: dict[int, list[Row]] = {}
    for row in rows:
        length = len(row.tokens)
        if pads:
            length = bucket(length, experiment.data.length)
            row = row.padded(length)
        by_length.setdefault(length, []).append(row)
    size = bound.sequences(experiment)
    for length in sorted(by_length):
        group = by_length[length]
        yield from (group[first : first + size] for first in range(0, len(group), size))


def bucket(length: int, most: int) -> int:
    """Returns the smallest SHORTEST * 2^k that is at least `length`, limited to `most`."""
    return min(most, SHORTEST * 2 ** max(0, (-(-length // SHORTEST) - 1).bit_length()))


def _batch(experiment: Experiment, group: list[Row], size: int, pads: bool, label: int) -> Batch:
    """Returns the global batch of rows, filled up with rows in which no token counts."""
    shards = batch_shards(experiment.mesh)
    size = -(-min(size, 2 ** (len(group) - 1).bit_length()) // shards) * shards
    own = local_rows(experiment.mesh, size)

    def stacked(parts: list[np.ndarray]) -> np.ndarray:
        found = np.stack(parts)
        return np.pad(found, ((0, size - len(found)), (0, 0)))[own]

    context = {"segments": stacked([row.segments for row in group])} if pads else {}
    if label >= 0:
        context["label"] = np.full(size, label, np.int32)[own]
    counted = stacked([row.counted for row in group])
    tokens = stacked([row.tokens.astype(np.int32) for row in group])
    return to_global(batch_of(tokens, loss_mask=counted, context=context), experiment.mesh)
