"""Halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""


def without_surrogates(text: str) -> str:
    """Replaces half a surrogate pair by U+FFFD, the sign for what cannot be read."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
