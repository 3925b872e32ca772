"""Prompts with their answers: each pair is one sequence, of which only the answer counts."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from md4_jax.data import packing
from md4_jax.data.labelled import Padding
from md4_jax.data.sequences import Rows
from md4_jax.protocols import UserError


def rows(source: Any, domain: Any, split: str, length: int, padding: Padding) -> Rows:
    """Returns the pairs of a split as rows of `length` tokens; the prompt is only conditioned on.

    Prompt and answer are encoded by themselves. An answer ends with the tokenizer's end of text, if
    it has one. Longer answers are cut, shorter ones are padded. A pair whose prompt leaves no room
    for an answer is left out, and their number is printed. Pairs are tokenised once and kept on
    disk.

    Raises UserError if no pair is left.
    """
    tokenizer = domain.tokenizer
    described = [source.fingerprint(), tokenizer.to_json(), split, "pairs", length, *padding]
    size = max(tokenizer.vocab_size, length + 1)
    pieces = lambda: _pieces(source, tokenizer, split, length, padding)  # noqa: E731
    found = packing.opened(*packing.kept(described, size, split, pieces)).reshape(-1, length + 2)
    return Rows(found[:, :length], lengths=found[:, length], begins=found[:, length + 1])


def _pieces(
    source: Any, tokenizer: Any, split: str, length: int, padding: Padding
) -> Iterator[np.ndarray]:
    """Yields rows: `length` tokens, how many of them count or come before, and where they begin."""

    def encoded(part: int) -> Iterator[np.ndarray]:
        texts = (pair[part] for pair in source.pairs(split))
        return packing.encoded(source, tokenizer, split, texts)

    kept = left_out = 0
    for prompt, answer in zip(encoded(0), encoded(1), strict=True):
        if len(prompt) < length:
            kept += 1
            yield np.append(padding.row(np.concatenate([prompt, answer]), length), len(prompt))
        else:
            left_out += 1
    if left_out and not kept:
        raise UserError(
            f"all {left_out:,} prompts of the {split} split have data.length={length} tokens or "
            "more, which leaves no room for an answer: raise data.length"
        )
    if left_out:
        print(
            f"{left_out:,} of {kept + left_out:,} pairs of the {split} split are left out: their "
            f"prompts have data.length={length} tokens or more",
            flush=True,
        )
