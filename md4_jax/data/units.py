"""Amounts of data in the terms of people: images for images, tokens for text."""

from md4_jax.protocols.phrases import amount

# `Domain.unit` of images, of levels and of codes.
DIMENSION, CODE = "dimension", "code"
OF_IMAGES = (DIMENSION, CODE)
# All units, those of special domains first: a result in such a unit has bits_per_token too.
UNITS = ("character", *OF_IMAGES, "token")


def split_size(unit: str, sequences: int, tokens: int) -> str:
    """Describes a split: its images, or its tokens and the whole sequences that they make."""
    if unit in OF_IMAGES:
        return f"{amount(sequences, 'image', ',')}, {amount(tokens, unit, ',')}"
    return f"{amount(tokens, 'token', ',')}, {amount(sequences, 'whole sequence', ',')}"


def batch_size(unit: str, sequences: int, length: int) -> str:
    """Describes a batch of sequences of this length."""
    if unit in OF_IMAGES:
        return f"{amount(sequences, 'image')} of {amount(length, unit)}"
    return f"{sequences} x {amount(length, 'token')}"


def speed(unit: str, tokens: float, length: int) -> str:
    """Describes a number of tokens per second, in sequences of this length."""
    if unit in OF_IMAGES:
        return f"{tokens / length:,.1f} images/s"
    return f"{tokens:,.0f} {unit}s/s"
