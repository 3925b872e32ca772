"""Prompts with answers: each pair is one sequence, and only the answer counts in the loss."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from md4_jax.data import packing
from md4_jax.data.labelled import Padding, check_rejected, print_cut
from md4_jax.data.sequences import Rows
from md4_jax.protocols import UserError


def rows(source: Any, domain: Any, split: str, length: int, padding: Padding) -> Rows:
    """Returns the pairs of a split as rows of `length` tokens; the prompt is context.

    Prompt and answer are encoded separately. An answer ends with the tokenizer's end of text, if it
    has one. Longer answers are cut, shorter ones are padded. A pair is dropped if the prompt leaves
    no room for an answer. Both numbers are printed. Pairs are tokenised once and stored on disk. If
    the source has rejected answers, their rows, with the same prompts, are `rejected`.

    Raises UserError if no pair remains, and for rejected answers if padding does not count.
    """
    has_worse = check_rejected(source, padding)
    tokenizer = domain.tokenizer
    size = max(tokenizer.vocab_size, length + 1)

    def of(kind: str, answers: Callable[[], Iterable[str]]) -> np.ndarray:
        described = [source.fingerprint(), tokenizer.to_json(), split, kind, length, *padding]
        pieces = lambda: _pieces(  # noqa: E731
            source, tokenizer, split, length, padding, answers(), is_worse=kind == "rejected"
        )
        found = packing.opened(*packing.kept(source, described, size, split, pieces))
        return found.reshape(-1, length + 2)

    found = of("pairs", lambda: (answer for _, answer in source.pairs(split)))
    rejected = None
    if has_worse:
        rejected = of("rejected", lambda: source.rejected(split))[:, :length]
    return Rows(
        found[:, :length], lengths=found[:, length], begins=found[:, length + 1], rejected=rejected
    )


def _pieces(
    source: Any,
    tokenizer: Any,
    split: str,
    length: int,
    padding: Padding,
    answers: Iterable[str],
    *,
    is_worse: bool,
) -> Iterator[np.ndarray]:
    """Yields rows: `length` tokens, where the padding begins, and where the answer begins.

    is_worse: whether these are the rejected answers; the same pairs are dropped for both kinds
    """
    encoded = lambda texts: packing.encoded(source, tokenizer, split, texts)  # noqa: E731
    prompts = (prompt for prompt, _ in source.pairs(split))
    kept = cut = left_out = 0
    for prompt, answer in zip(encoded(prompts), encoded(answers), strict=True):
        if len(prompt) < length:
            both = np.concatenate([prompt, answer])
            kept, cut = kept + 1, cut + (len(both) > length)
            yield np.append(padding.row(both, length), len(prompt))
        else:
            left_out += 1
    if left_out and not kept:
        raise UserError(
            f"all {left_out:,} prompts of the {split} split have data.length={length} tokens or "
            "more, which leaves no room for an answer: raise data.length"
        )
    what = "pairs with the worse answer" if is_worse else "pairs"
    print_cut(what, split, length, cut, kept + left_out)
    if left_out and not is_worse:
        print(
            f"{left_out:,} of {kept + left_out:,} pairs of the {split} split are left out: their "
            f"prompts have data.length={length} tokens or more",
            flush=True,
        )
