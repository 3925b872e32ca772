"""Formatting of evaluation results."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from md4_jax.data.units import OF_IMAGES, UNITS
from md4_jax.evals.metrics import perplexity
from md4_jax.protocols import PARTS
from md4_jax.protocols.phrases import TOO_FEW, amount, plus_minus

# Figures of a classifier.
CLASSES = ("cross_entropy", "accuracy")


def line(result: dict[str, Any]) -> str:
    """Formats a result: '<= 2.345 +- 0.012 bits/token, ...'; without '<=' if it is exact."""
    unit = next(u for u in UNITS if f"bits_per_{u}" in result)
    parts = {part: result.get(f"{part}_bits_per_token") for part in PARTS}
    sign = "" if result["exact"] else "<= "
    other = ", ".join(f"{part} {bits:z.4f}" for part, bits in parts.items() if bits)
    other = other and f" (including {other})"

    def said(name: str, form: str) -> str:
        return f"{sign}{result[name]:{form}}{plus_minus(result[f'{name}_se'], form)}"

    words = [f"{said(f'bits_per_{unit}', '.4f')} bits/{unit}{other}"]
    if "bits_per_byte" in result and result["bytes"] != result["tokens"]:
        words.append(f"{said('bits_per_byte', '.4f')} bits/byte")
    if unit not in OF_IMAGES:
        words.append(f"perplexity {said('perplexity', '.2f')}")
    # Of a text with few words it may be too large for a float.
    most = perplexity(math.inf)
    if result.get("word_perplexity", most) < most and unit == "token":
        words.append(f"word perplexity {said('word_perplexity', '.5g')}")
    counts = _counts(result, "bits_per_token", draws=not result["exact"])
    padded = "; padding counts among the tokens, not among bytes and words" * ("padding" in result)
    return f"{', '.join(words)} ({counts}){padded}"


def classes(result: Mapping[str, Any]) -> str:
    """Formats the result for a classifier of noisy sequences."""
    error, of_accuracy = (plus_minus(result[f"{name}_se"], ".4f") for name in CLASSES)
    return (
        f"cross-entropy of the class {result['cross_entropy']:.4f}{error} nats, accuracy "
        f"{result['accuracy']:.4f}{of_accuracy} at all times ({_counts(result, CLASSES[0])})"
    )


def _counts(result: Mapping[str, Any], figure: str, *, draws: bool = True) -> str:
    """Returns '12 sequences, 1 draw each', and whether they are too few for an error."""
    said = amount(result["sequences"], "sequence")
    said += f", {amount(result['draws'], 'draw')} each" if draws else ""
    return said if plus_minus(result[f"{figure}_se"], "") else f"{said}; {TOO_FEW}"


def finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Converts numbers to JSON values: None for those that are not finite, at any depth."""

    def of(value: Any) -> Any:
        if isinstance(value, Mapping):
            return finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: of(value) for key, value in numbers.items()}


def label(name: str, split: str) -> str:
    """Returns the name of an evaluator, followed by its split if the names differ."""
    return name if name == split else f"{name} ({split} split)"


def quality(result: Mapping[str, Any]) -> str:
    """Formats the comparison of sampled images with real ones."""
    others = ("split", "samples", "images", "copies", "picture")
    numbers = {k: v for k, v in result.items() if k not in others}
    words = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items())
    copies = ""
    if "copies" in result:
        copies = f"; {amount(result['copies'], 'copy')} of training images"
    counts = f"{amount(result['samples'], 'sample')}, {amount(result['images'], 'image')}"
    return f"{words} ({counts}){copies}"


def learned(process: Any, domain: Any, most: int = 10) -> str:
    """Formats learned values of symbols: their range, and the largest and smallest ones."""
    lines = []
    for name, values in process.learned().items():
        values = np.asarray(values)
        order = np.argsort(-values, kind="stable")
        lines.append(
            f"{name} by symbol: min {values.min():z.4f}, mean {values.mean():z.4f}, "
            f"max {values.max():.4f}"
        )
        for word, ids in (("largest", order[:most]), ("smallest", order[::-1][:most])):
            each = ", ".join(f"{_symbol(domain, i)} {values[i]:.3f}" for i in ids)
            lines.append(f"  {word}: {each}")
    return "\n".join(lines)


def _symbol(domain: Any, symbol: int) -> str:
    """Returns the text of a symbol in quotes, or the level of a pixel."""
    return str(symbol) if domain.unit in OF_IMAGES else repr(domain.decode([symbol]))


def ladder(
    levels: list[float],
    result: Mapping[str, Any] | None,
    text: str = "",
    whole: str = "",
    *,
    unit: str = "token",
) -> str:
    """Formats a table of n-gram models and, if its result is given, the model; best last.

    text   description of the data of the n-gram models; omitted if the result is on the same data
    whole  description of the data of the result, if it is larger
    unit   name of a symbol: the domain's `unit`
    """
    rows = [(level, f"{order}-gram model") for order, level in enumerate(levels, start=1)]
    if result is not None:
        error = plus_minus(result["bits_per_token_se"], ".4f")
        kind = "exact" if result["exact"] else f"bound{',' * bool(error)}{error}"
        on = f", on {whole}" if whole else ""
        rows.append((result["bits_per_token"], f"this model ({kind}{on})"))
    body = "\n".join(f"  {level:7.4f}  {name}" for level, name in sorted(rows, reverse=True))
    same = "text" if unit in ("token", "character") else "data"
    where = f"on the same {same}" if result is not None and not whole else f"of {text}"
    return f"bits per {unit} {where}:\n{body}"
