"""Unpaired surrogates, which JSON can contain but UTF-8 cannot."""


def without_surrogates(text: str) -> str:
    """Replaces unpaired surrogates by U+FFFD, the replacement character."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
