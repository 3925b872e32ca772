"""Continuations of a text: log-likelihoods, comparison with greedy decoding, and generation."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.texts import Row, bucket, score_rows, takes_segments
from md4_jax.model import answers, outputs
from md4_jax.model.model import Model
from md4_jax.objectives.autoregressive import AlongOrder, Autoregressive
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount

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

    The start of the context is truncated if both are longer than data.length. UserError if the
    continuation is empty or does not fit.
    """
    kept, encode = context.rstrip(), model.domain.encode
    whole = np.asarray(encode(context + continuation), np.int32)
    first, most = len(encode(kept)) if kept else 0, model.length
    if not first < len(whole) <= first + most:
        raise UserError(
            f"a continuation has {amount(len(whole) - first, 'token')}, but must have at least 1 "
            f"and at most {most}, the model's data.length"
        )
    return Pair(whole[max(0, len(whole) - most) : first], whole[first:])


def objective_of(model: Model, name: str) -> Any:
    """Returns the named bound, or for chain_rule the exact likelihood from left to right."""
    if name != CHAIN_RULE:
        return model.bound(name)
    if model.experiment.network.causal:
        return Autoregressive()
    if model.experiment.objective.needs.ordered:
        raise UserError(
            f"likelihood={CHAIN_RULE} evaluates the network on whole texts, but it was trained on "
            "tokens in a random order: remove likelihood to use the bound of eso_orders"
        )
    if block := _block_of(model):
        raise UserError(
            f"likelihood={CHAIN_RULE} masks all later tokens at once, but the network was trained "
            f"on blocks of {amount(block, 'token')}, which do not attend to later blocks: remove "
            "likelihood to use the bound of block diffusion"
        )
    if isinstance(model.experiment.process, RevealsMasks):
        return AlongOrder("left_to_right")
    raise UserError(f"likelihood={CHAIN_RULE} needs process.name='masking' or network.causal=True")


def check_options(model: Model, options: Mapping[str, Any]) -> None:
    """Raises UserError for keys of the section `sample` that are unknown, set by tasks or wrong."""
    if given := sorted(answers.NOT_OF_CHATS & options.keys()):
        raise UserError(f"{given[0]} cannot be set: tasks give the prompts, and their length")
    model.sampling({**options, "num": 1, "length": 0}, prompted=True)


def guidance_of(model: Model, value: Any) -> float:
    """Returns the weight of guidance by the context; UserError if the model has none."""
    try:
        weight = float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"guidance={value!r} must be a number, and 1 means no guidance") from error
    whole = not (_block_of(model) or model.experiment.objective.needs.ordered)
    masked = isinstance(model.experiment.process, RevealsMasks)
    if weight != 1.0 and not (masked and whole):
        raise UserError(
            f"guidance={value} also predicts with the context replaced by masks: it needs "
            "process.name='masking' and a network that was trained on whole texts. Otherwise use "
            "guidance=1"
        )
    return weight


def log_likelihoods(
    model: Model, pairs: Sequence[Pair], bound: LikelihoodBound, guidance: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates log p(continuation | context) in nats, with its standard error, each [N].

    The estimate is that of a lower bound, unless the objective of `bound` is exact. With guidance w
    it is for the model with predictions proportional to p(x | context)^w p(x)^(1 - w), as in SMDM
    (arXiv:2410.18514, w - 1 in its code).
    """
    rows = []
    for index, one in enumerate(pairs):
        tokens = np.concatenate(one)
        counted = np.arange(one.size) >= len(one.context)
        rows.append(Row(index, tokens, counted, np.zeros_like(tokens)))
    nats, error = score_rows(
        model.experiment, model.params, rows, bound, model.programs, guidance=guidance
    )
    return -nats, error


def are_greedy(
    model: Model, pairs: Sequence[Pair], batch_size: int, guidance: float = 1.0
) -> np.ndarray:
    """Returns whether greedy decoding gives each continuation: bool [N].

    Tokens are predicted from left to right, with later tokens masked (in block diffusion those of
    the same block). A continuation is no longer computed after its first different token. False for
    processes without masks.
    """
    masked = isinstance(model.experiment.process, RevealsMasks)
    greedy, block = np.full(len(pairs), masked), _block_of(model)
    pads = block > 0 or takes_segments(model.experiment, model.params)
    lengths = [bucket(one.size, model.length) if pads else one.size for one in pairs]
    if block:
        lengths = [min(model.length, length + -length % block) for length in lengths]
    for step in range(max((len(one.continuation) for one in pairs), default=0)):
        left = [i for i in np.flatnonzero(greedy) if step < len(pairs[i].continuation)]
        for length in sorted({lengths[i] for i in left}):
            rows = [i for i in left if lengths[i] == length]
            for first in range(0, len(rows), batch_size):
                part = rows[first : first + batch_size]
                # A constant number of rows, so that there is one program for each length.
                same = [pairs[part[k % len(part)]] for k in range(batch_size)]
                logits = _logits(model, same, step, length, pads=pads)
                if guidance != 1.0:
                    uncond = _logits(model, same, step, length, pads=pads, hidden=True)
                    logits = guidance * logits + (1.0 - guidance) * uncond
                right = [one.continuation[step] for one in same]
                greedy[part] = (np.argmax(logits, axis=-1) == right)[: len(part)]
    return greedy


def _block_of(model: Model) -> int:
    """Returns the block size in block diffusion; 0: the network reads whole texts."""
    return getattr(model.experiment.objective, "block", 0)


def _logits(
    model: Model,
    pairs: Sequence[Pair],
    step: int,
    length: int,
    *,
    pads: bool,
    hidden: bool = False,
) -> np.ndarray:
    """Returns the logits of token `step` of each continuation, given those before it: [N, V].

    hidden: whether the context is replaced by masks
    """
    if block := _block_of(model):
        return _logits_in_blocks(model, pairs, step, length, block)
    own = model.experiment
    z = np.full((len(pairs), length), own.process.mask_id, np.int32)
    segments, first = np.full(z.shape, -1, np.int32), int(own.network.causal)
    for row, segment, one in zip(z, segments, pairs, strict=True):
        shown = np.concatenate([one.context, one.continuation[:step]])
        row[first : first + len(shown)] = shown
        if hidden:
            row[first : first + len(one.context)] = own.process.mask_id
        segment[: one.size] = 0
    left = np.array([1.0 - step / len(one.continuation) for one in pairs], np.float32)
    t = np.zeros_like(left) if own.network.causal else own.process.schedule.inverse(left)
    at = [len(one.context) + step for one in pairs]
    return model.logits(z, np.asarray(t), {"segments": segments} if pads else None, at)


def _logits_in_blocks(
    model: Model, pairs: Sequence[Pair], step: int, length: int, block: int
) -> np.ndarray:
    """Returns the same in block diffusion, with the token and the rest of its block masked.

    The last block is always read to its end, as when a continuation is drawn.
    """
    z = np.full((len(pairs), length), model.experiment.process.mask_id, np.int32)
    clean, left = np.zeros_like(z), np.zeros(len(pairs), np.float32)
    at = np.array([len(one.context) + step for one in pairs], np.int32)
    for row, (one, place) in enumerate(zip(pairs, at, strict=True)):
        shown = np.concatenate([one.context, one.continuation[:step]])
        z[row, :place] = clean[row, :place] = shown
        begin, end = place - place % block, min(length, place - place % block + block)
        left[row] = (end - place) / (end - max(begin, len(one.context)))
    t = np.asarray(model.experiment.process.schedule.inverse(left), np.float32)
    return outputs.logits_in_blocks(model, z, clean, t, at, block)


def continued(
    model: Model, contexts: Sequence[str], size: int, options: Mapping[str, Any]
) -> list[str]:
    """Draws at most `size` tokens after each context, up to an end of text or of a chat's turn.

    options: keys of the section `sample`, except num and length. The start of a context is
    truncated if both are longer than data.length.
    """
    domain, size = model.domain, min(size, model.length - 1)
    ids = [np.asarray(domain.encode(text) if text else [], np.int32) for text in contexts]
    ids = [row[max(0, len(row) - (model.length - size)) :] for row in ids]
    return [domain.decode(row) for row in answers.drawn(model, ids, size, options)]


def before(text: str, stops: str | Iterable[str]) -> str:
    """Returns the text before the first of these strings."""
    stops = [stops] if isinstance(stops, str) else stops
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
