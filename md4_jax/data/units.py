"""Amounts of data in the terms of people: images for images, tokens for text."""

# `Domain.unit` of images, of levels and of codes.
DIMENSION, CODE = "dimension", "code"
OF_IMAGES = (DIMENSION, CODE)
# All units, those of special domains first: a result in such a unit has bits_per_token too.
UNITS = ("character", *OF_IMAGES, "token")


def split_size(unit: str, sequences: int, tokens: int) -> str:
    """Describes a split: its images, or its tokens and the whole sequences that they make."""
    if unit in OF_IMAGES:
        return f"{sequences:,} images, {tokens:,} {unit}s"
    return f"{tokens:,} tokens, {sequences:,} whole sequences"


def batch_size(unit: str, sequences: int, length: int) -> str:
    """Describes a batch of sequences of this length."""
    if unit in OF_IMAGES:
        return f"{sequences} images of {length} {unit}s"
    return f"{sequences} x {length} tokens"


def speed(unit: str, tokens: float, length: int) -> str:
    """Describes a number of tokens per second, in sequences of this length."""
    if unit in OF_IMAGES:
        return f"{tokens / length:,.1f} images/s"
    return f"{tokens:,.0f} {unit}s/s"
