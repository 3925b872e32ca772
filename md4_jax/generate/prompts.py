"""Prompt tokens and masks from the texts or images given by the user."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from md4_jax.generate import inpainting
from md4_jax.generate.pictures import has_pictures
from md4_jax.options import PromptOptions
from md4_jax.protocols import Prompt, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import place

SHOWN = 60  # characters of a text in an error


class Resized(NamedTuple):
    """Placement of a text in a sample if its length may change.

    absent  symbol after the text, which ends with its template
    masks   number of masks between sample.prompt and sample.suffix
    """

    absent: int
    masks: int


def templates(
    options: PromptOptions, domain: Any, length: int,
    example: inpainting.Example | None = None, resized: Resized | None = None,
) -> list[Prompt]:  # fmt: skip
    """Returns the prompts of the options, one or several; UserError for text that does not fit.

    example  reads the images of sample.image_from, see `inpainting.prompts`
    resized  None: texts have the length of the sample, and positions after a template are free
    """
    found = _templates(options, domain, length, example, resized)
    if resized is not None:
        return [_closed(prompt, resized.absent) for prompt in found]
    return [prompt._replace(tokens=np.maximum(prompt.tokens, 0)) for prompt in found]


def _closed(prompt: Prompt, absent: int) -> Prompt:
    """Sets tokens of -1 to the absent symbol; UserError for a text without masks."""
    behind = prompt.tokens < 0
    if not np.any(~prompt.mask & ~behind):
        raise UserError(
            "the text has no gap to fill: mark the masks with which it begins as blanks '_' in "
            "sample.template, or give sample.prompt and sample.suffix, between which "
            "sample.masks masks are put"
        )
    return Prompt(np.where(behind, absent, prompt.tokens).astype(np.int32), prompt.mask | behind)


def _templates(
    options: PromptOptions, domain: Any, length: int,
    example: inpainting.Example | None, resized: Resized | None,
) -> list[Prompt]:  # fmt: skip
    """Returns the prompts; free tokens after the text are -1."""
    if has_pictures(domain):
        return inpainting.prompts(options, domain, example)
    for key in inpainting.OF_IMAGES:
        if getattr(options, key):
            raise UserError(
                f"sample.{key} is only for images, and this run has text: use sample.template"
            )
    if options.templates:
        where = f"of sample.templates={options.templates}"
        return [
            _filled(options, domain, text, length, f"line {number} {where}")
            for number, text in _lines(options.templates)
        ]
    if options.template:
        return [_filled(options, domain, options.template, length, "sample.template")]
    first, last = (
        _encoded(domain, text, f"sample.{key}")
        for key, text in (("prompt", options.prompt), ("suffix", options.suffix))
    )
    free = resized.masks if resized else length - len(first) - len(last)
    size = len(first) + free + len(last)
    if free < 0 or size > length:
        gap = f" + {amount(free, 'mask')}" if resized else ""
        raise UserError(
            f"sample.prompt and sample.suffix have {len(first)} + "
            f"{amount(len(last), 'token')}{gap}, more than the {length} of a sample: shorten them "
            "or raise sample.length"
        )
    tokens = [*first, *[0] * free, *last, *[-1] * (length - size)]
    given = [*[True] * len(first), *[False] * free, *[True] * len(last), *[False] * (length - size)]
    return [Prompt(np.asarray(tokens, np.int32), np.asarray(given))]


def remarks(options: PromptOptions, prompts: Sequence[Prompt], is_exact: bool) -> list[str]:
    """Returns remarks on likely mistakes: a template without blanks, or nothing to draw.

    is_exact: whether samples follow the conditional distribution given the prompt, for the optimal
    network
    """
    said = []
    if not is_exact and any(np.asarray(prompt.mask).any() for prompt in prompts):
        said.append(
            "with this kind of noise samples follow a prompt only approximately, because the "
            "network reads the prompt with noise. A masked model, or one trained on pairs of "
            "prompts and answers, follows it exactly (docs/samplers.md)"
        )
    if options.template and options.blank not in options.template:
        said.append(
            f"sample.template has no blank {options.blank!r}: the template is only the beginning "
            "of samples, as sample.prompt would be"
        )
    full = [prompt for prompt in prompts if np.asarray(prompt.mask).all()]
    if full:
        said.append(
            f"all {full[0].mask.size} tokens of a sample are given, so nothing is drawn: give "
            "fewer tokens, or raise sample.length"
        )
    return said


def check_beginnings(prompts: Iterable[Prompt]) -> None:
    """Raises UserError for prompts, each [L], that are not the beginning of a growing text."""
    for prompt in prompts:
        if (np.diff(np.asarray(prompt.mask, np.int8)) > 0).any():
            raise UserError(
                "texts of this model grow to the right, so only the beginning of a text can be "
                "given: remove sample.suffix and all text after a blank of sample.template, or "
                "use a model with process.name='masking'"
            )


def template_lines(options: PromptOptions) -> list[str]:
    """Returns the templates of the file in the options; [] if there is none."""
    return [text for _, text in _lines(options.templates)] if options.templates else []


def _lines(path: str) -> list[tuple[int, str]]:
    """Returns (number, template) of the lines that are not empty; only line feeds end lines."""
    try:
        text = place(path, "sample.templates").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"sample.templates={path} cannot be read: {error}") from error
    # Windows editors put a byte order mark first, which is not part of the text.
    lines = enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
    found = [(number, line.replace("\\n", "\n")) for number, line in lines if line]
    if not found:
        raise UserError(f"sample.templates={path} has no line with text")
    return found


def _filled(options: PromptOptions, domain: Any, text: str, length: int, name: str) -> Prompt:
    """Makes the prompt of a template; its blanks and the positions after it are free."""
    tokens: list[int] = []
    given: list[bool] = []
    for index, piece in enumerate(text.split(options.blank)):
        if index:
            tokens.append(0)
            given.append(False)
        ids = _encoded(domain, piece, name)
        tokens += ids
        given += [True] * len(ids)
    if len(tokens) > length:
        raise UserError(
            f"{name} has {amount(len(tokens), 'token')}, more than the {length} of a sample: "
            "shorten it or raise sample.length"
        )
    rest = length - len(tokens)
    return Prompt(np.asarray(tokens + [-1] * rest, np.int32), np.asarray(given + [False] * rest))


def _encoded(domain: Any, text: str, name: str) -> list[int]:
    if not text:
        return []
    try:
        return [int(i) for i in domain.encode(text)]
    except UserError as error:
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        raise UserError(f"{name}, {shown!r}: {error}") from error
