"""Generation of tokens after prompts, on a canvas of prompt and one mask per new token."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from md4_jax.data.chat import Messages
from md4_jax.data.messages import conversation
from md4_jax.evals.samples import drawn_samples
from md4_jax.evals.texts import bucket, takes_segments
from md4_jax.experiment import Experiment, drawn_classes, sample_block
from md4_jax.options import PromptOptions, check_whole
from md4_jax.protocols import Prompt, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.samplers.batches import context_of

# Options of `Model.sample` that a chat does not support.
NOT_OF_CHATS = {
    "num",
    "length",
    "reward",
    *(field.name for field in dataclasses.fields(PromptOptions)),
}


def drawn(
    model: Any, prompts: Sequence[np.ndarray], size: int, options: Mapping[str, Any]
) -> list[np.ndarray]:
    """Draws `size` tokens after each prompt and returns those before the first end.

    A prompt of P tokens needs P + size positions. They are padded to one of few lengths, so that
    few programs are compiled, if padding is masked out.

    prompts  token ids of each, at most data.length - size
    options  keys of the section `sample`, except num and length
    """
    if not prompts:
        return []
    if model.experiment.sampler_step.needs.hides:
        raise UserError(
            f"{model.origin} draws texts that change their length, so it can only be used with "
            "infill and sample: chat and completions draw a fixed number of tokens"
        )
    asked = {**options, "num": 1, "length": 0}
    canvas = _Canvas(model, model.sampling(asked, prompted=True))
    groups: dict[int, list[int]] = {}
    for index, ids in enumerate(prompts):
        groups.setdefault(canvas.length(len(ids) + size), []).append(index)
    stops, found = list(ends(model)), [np.zeros(0, np.int32)] * len(prompts)
    for length, group in sorted(groups.items()):
        experiment = model.sampling({**asked, "length": length}, prompted=True)
        for index, row in zip(
            group, canvas.filled(experiment, [prompts[i] for i in group], size), strict=True
        ):
            ended = np.flatnonzero(np.isin(row, stops))
            found[index] = row[: ended[0]] if len(ended) else row
    return found


def answer(model: Any, messages: str | Messages, size: int, options: Mapping[str, Any]) -> str:
    """Draws at most `size` tokens that answer a conversation; see `Model.chat`."""
    if model.form is None:
        raise UserError(f"{model.origin} has no chat template: use sample with a prompt")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    is_list = isinstance(messages, Sequence)
    messages = conversation("the chat", list(messages) if is_list else messages)
    if refused := sorted(NOT_OF_CHATS & options.keys()):
        raise UserError(
            f"chat does not accept {refused[0]!r}: the prompt is made of the messages, and there "
            "is one answer of at most new_tokens tokens"
        )
    check_whole("new_tokens", size)
    ids = np.asarray(model.domain.encode(model.form.undated().prompt(messages)), np.int32)
    if size < 1 or len(ids) + size > model.length:
        raise UserError(
            f"a chat of {amount(len(ids), 'token')} and new_tokens={size} do not fit: new_tokens "
            f"must be at least 1, and both together at most data.length={model.length}"
        )
    tokenizer = model.domain.tokenizer
    marks = {name for name in _marks(model) if tokenizer.id_of(name) in ends(model)}
    if marks and _ends_early(model, options):
        # Tokens after the end of a turn are cut off, so they need not be drawn.
        options = {"stop": " ".join(sorted(marks)), **options}
    return model.domain.decode(drawn(model, [ids], size, options)[0])


def _ends_early(model: Any, options: Mapping[str, Any]) -> bool:
    """Returns whether a text that has ended is not drawn further: in blocks, and by `streaming`."""
    if options.get("block") or getattr(model.experiment.objective, "block", 0):
        return True
    asked = {**options, "num": 1, "length": 0}
    return hasattr(model.sampling(asked, prompted=True).sampler_step, "stops")


def ends(model: Any) -> set[int]:
    """Returns the tokens that end a text: the end of text, and those that end a turn of a chat."""
    domain = model.domain
    found = {domain.eot_id}
    if model.form is not None:
        found |= {domain.tokenizer.id_of(name) for name in _marks(model)}
    return found - {None, domain.vocab_size}


def _marks(model: Any) -> set[str]:
    """Returns the special tokens that end a turn of a chat."""
    return model.form.ends(getattr(model.domain.tokenizer, "special", ()))


class _Canvas:
    """Sequence of positions for prompts and new tokens.

    Padding is masked out by segments. Block and causal networks do not see later positions.
    """

    def __init__(self, model: Any, experiment: Experiment):
        self._model, block = model, sample_block(experiment)
        # Whether the first block begins where the prompt ends.
        self._after = experiment.network.reads or getattr(experiment.loop, "anywhere", False)
        blind = bool(block) and not experiment.sample.dual_cache
        self._block = block if blind else 0  # with this cache the last block may be shorter
        blind = blind or experiment.objective.needs.windows
        self._ordered = blind or experiment.network.causal
        self._pads = self._ordered or takes_segments(experiment, model.params)

    def length(self, used: int) -> int:
        """Returns the number of positions of a canvas with `used` positions before padding."""
        if not self._pads:
            return used
        return self._whole(bucket(used, self._model.length))

    def filled(
        self, experiment: Experiment, prompts: Sequence[np.ndarray], size: int
    ) -> list[np.ndarray]:
        """Draws on canvases of sample.length and returns the `size` tokens after each prompt."""
        length, most = experiment.sample.length, experiment.sample.batch_size
        # Numbers of rows are powers of two, for the same reason as lengths.
        rows = max(len(prompts), min(most, 2 ** (len(prompts) - 1).bit_length()))
        asked = [self._prompt(ids, size, length) for ids in prompts]
        asked += asked[-1:] * (rows - len(asked))
        context = context_of(experiment.sample, rows, drawn_classes(experiment))
        if self._pads and not self._ordered:
            used = np.array([len(ids) + size for ids in prompts])
            used = np.pad(used, (0, rows - len(used)), mode="edge")
            context["segments"] = np.where(np.arange(length) < used[:, None], 0, -1)
            context["segments"] = context["segments"].astype(np.int32)
        model = self._model
        found = drawn_samples(experiment, model.params, model.programs, asked, context)
        # A text may end early; masks remain after its end.
        stops = np.minimum(found.lengths[: len(prompts)], [len(ids) + size for ids in prompts])
        return [
            row[len(ids) : stop]
            for row, ids, stop in zip(found.tokens, prompts, stops, strict=False)
        ]

    def _prompt(self, ids: np.ndarray, size: int, length: int) -> Prompt:
        """Fixes the prompt and the padding; new tokens are free, up to the end of a block."""
        end = len(ids) + self._whole(size) if self._after else self._whole(len(ids) + size)
        free = min(length, end)
        tokens, given = np.zeros(length, np.int32), np.ones(length, bool)
        tokens[: len(ids)] = ids
        given[len(ids) : free] = False
        return Prompt(tokens, given)

    def _whole(self, length: int) -> int:
        """Rounds up to a multiple of the block size, if all blocks must be whole."""
        return length + -length % self._block if self._block else length
