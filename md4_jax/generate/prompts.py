"""What the user fixes of a sample: prompt, suffix and templates -> tokens and where they stand."""

import dataclasses
from typing import Any

import numpy as np

from md4_jax.protocols import Prompt, UserError
from md4_jax.runtime.paths import place

SHOWN = 60  # characters of a text in the message that refuses it


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """The part of the `sample` section that fixes tokens.

    prompt     text that every sample begins with
    suffix     text that every sample ends with
    template   text in which each `blank` is one token to be filled; what follows it is free
    templates  file with a template in each line, sampled `num` times each; a line break within a
               template is written \\n
    blank      the visible character of a token to be filled
    """

    prompt: str = ""
    suffix: str = ""
    template: str = ""
    templates: str = ""
    blank: str = "_"

    def __post_init__(self):
        if len(self.blank) != 1:
            raise UserError(f"sample.blank must be one character, not {self.blank!r}")
        used = [key for key in ("template", "templates") if getattr(self, key)]
        used += ["prompt or sample.suffix"] if self.prompt or self.suffix else []
        if len(used) > 1:
            raise UserError(f"sample.{used[0]} cannot be combined with sample.{used[1]}")

    def build(self, tokenizer: Any, length: int) -> list[Prompt]:
        """One template, or those of the file; UserError for text that does not fit."""
        if self.templates:
            return [
                self._filled(
                    tokenizer, text, length, f"line {number} of sample.templates={self.templates}"
                )
                for number, text in self._lines()
            ]
        if self.template:
            return [self._filled(tokenizer, self.template, length, "sample.template")]
        first, last = (
            self._encoded(tokenizer, text, f"sample.{key}")
            for key, text in (("prompt", self.prompt), ("suffix", self.suffix))
        )
        if len(first) + len(last) > length:
            raise UserError(
                f"sample.prompt and sample.suffix have {len(first)} + {len(last)} tokens, more "
                f"than the {length} of a sample: shorten them or raise sample.length"
            )
        tokens, given = np.zeros(length, np.int32), np.zeros(length, bool)
        tokens[: len(first)], given[: len(first)] = first, True
        tokens[length - len(last) :], given[length - len(last) :] = last, True
        return [Prompt(tokens, given)]

    def _lines(self) -> list[tuple[int, str]]:
        """(number, template) of the lines with text; nothing but a line feed ends a line."""
        try:
            text = place(self.templates, "sample.templates").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"sample.templates={self.templates} cannot be read: {error}") from error
        lines = enumerate(text.split("\n"), start=1)
        found = [(number, line.replace("\\n", "\n")) for number, line in lines if line]
        if not found:
            raise UserError(f"sample.templates={self.templates} has no line with text")
        return found

    def _filled(self, tokenizer: Any, text: str, length: int, name: str) -> Prompt:
        tokens: list[int] = []
        given: list[bool] = []
        for index, piece in enumerate(text.split(self.blank)):
            if index:
                tokens.append(0)
                given.append(False)
            ids = self._encoded(tokenizer, piece, name)
            tokens += ids
            given += [True] * len(ids)
        if len(tokens) > length:
            raise UserError(
                f"{name} has {len(tokens)} tokens, more than the {length} of a sample: shorten it "
                "or raise sample.length"
            )
        rest = length - len(tokens)
        return Prompt(np.asarray(tokens + [0] * rest, np.int32), np.asarray(given + [False] * rest))

    def _encoded(self, tokenizer: Any, text: str, name: str) -> list[int]:
        if not text:
            return []
        try:
            return [int(i) for i in tokenizer.encode(text)]
        except UserError as error:
            shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
            raise UserError(f"{name}, {shown!r}: {error}") from error
