"""Log-likelihoods of continuations of a text, their greedy choice, and drawn continuations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.texts import Row, bucket, score_rows, takes_segments
from md4_jax.model import answers
from md4_jax.model.model import Model
from md4_jax.objectives.autoregressive import AlongOrder, Autoregressive
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import UserError

CHAIN_RULE = "chain_rule"


class Pair(NamedTuple):
    """Tokens of a context and of its continuation, int32 [C] and [N]."""

    context: np.ndarray
    continuation: np.ndarray

    @property
    def size(self) -> int:
        """Returns the number of tokens of both."""
        return len(self.context) + len(self.continuation)


def pair(model: Model, context: str, continuation: str) -> Pair:
    """Encodes both as one text; spaces between them belong to the continuation.

    The start of the context is left out if both are longer than data.length. UserError if the
    continuation is empty or does not fit.
    """
    kept, encode = context.rstrip(), model.domain.encode
    whole = np.asarray(encode(context + continuation), np.int32)
    first, most = len(encode(kept)) if kept else 0, model.length
    if not first < len(whole) <= first + most:
        raise UserError(
            f"a continuation has {len(whole) - first} tokens; it must have 1 to {most}, the "
            "data.length of the model"
        )
    return Pair(whole[max(0, len(whole) - most) : first], whole[first:])


def objective_of(model: Model, name: str) -> Any:
    """Returns the bound of a name, or the exact likelihood from left to right for chain_rule."""
    if name != CHAIN_RULE:
        return model.bound(name)
    if model.experiment.network.causal:
        return Autoregressive()
    if isinstance(model.experiment.process, RevealsMasks):
        return AlongOrder("left_to_right")
    raise UserError(f"likelihood={CHAIN_RULE} needs masks or a causal network")


def log_likelihoods(
    model: Model, pairs: Sequence[Pair], bound: LikelihoodBound
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates log p(continuation | context) in nats, with its standard error, each [N].

    It is a lower bound of it, unless the objective of `bound` is exact.
    """
    rows = []
    for index, one in enumerate(pairs):
        tokens = np.concatenate(one)
        counted = np.arange(one.size) >= len(one.context)
        rows.append(Row(index, tokens, counted, np.zeros_like(tokens)))
    nats, error = score_rows(model.experiment, model.params, rows, bound, model.programs)
    return -nats, error


def are_greedy(model: Model, pairs: Sequence[Pair], batch_size: int) -> np.ndarray:
    """Returns whether the most likely token of each step is that of the continuation: bool [N].

    Tokens are taken from left to right, each with the tokens after it masked. Continuations drop
    out at their first other token. False for processes without masks.
    """
    greedy = np.full(len(pairs), isinstance(model.experiment.process, RevealsMasks))
    pads = takes_segments(model.experiment, model.params)
    lengths = [bucket(one.size, model.length) if pads else one.size for one in pairs]
    for step in range(max((len(one.continuation) for one in pairs), default=0)):
        left = [i for i in np.flatnonzero(greedy) if step < len(pairs[i].continuation)]
        for length in sorted({lengths[i] for i in left}):
            rows = [i for i in left if lengths[i] == length]
            for first in range(0, len(rows), batch_size):
                part = rows[first : first + batch_size]
                # Always as many rows, so that there is one program for each length.
                same = [pairs[part[k % len(part)]] for k in range(batch_size)]
                greedy[part] = _next_is(model, same, step, length, pads=pads)[: len(part)]
    return greedy


def _next_is(
    model: Model, pairs: Sequence[Pair], step: int, length: int, *, pads: bool
) -> np.ndarray:
    """Returns whether token `step` of each continuation is the most likely one: bool [N]."""
    own = model.experiment
    z = np.full((len(pairs), length), own.process.mask_id, np.int32)
    segments, first = np.full(z.shape, -1, np.int32), int(own.network.causal)
    for row, segment, one in zip(z, segments, pairs, strict=True):
        shown = np.concatenate([one.context, one.continuation[:step]])
        row[first : first + len(shown)] = shown
        segment[: one.size] = 0
    left = np.array([1.0 - step / len(one.continuation) for one in pairs], np.float32)
    t = np.zeros_like(left) if own.network.causal else own.process.schedule.inverse(left)
    at = [len(one.context) + step for one in pairs]
    logits = model.logits(z, np.asarray(t), {"segments": segments} if pads else None, at)
    return np.argmax(logits, axis=-1) == [one.continuation[step] for one in pairs]


def continued(
    model: Model, contexts: Sequence[str], size: int, options: Mapping[str, Any]
) -> list[str]:
    """Draws at most `size` tokens after each context, up to an end of text or of a chat's turn.

    options: keys of the section `sample`, except num and length. The start of a context is left
    out if both are longer than data.length.
    """
    domain, size = model.domain, min(size, model.length - 1)
    ids = [np.asarray(domain.encode(text) if text else [], np.int32) for text in contexts]
    ids = [row[max(0, len(row) - (model.length - size)) :] for row in ids]
    return [domain.decode(row) for row in answers.drawn(model, ids, size, options)]


def before(text: str, stops: str | Iterable[str]) -> str:
    """Returns the text before the first of these strings."""
    stops = [stops] if isinstance(stops, str) else stops
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
