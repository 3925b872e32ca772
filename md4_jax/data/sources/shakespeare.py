"""Shakespeare, a small corpus shipped with the package."""

import dataclasses
import importlib.resources
from collections.abc import Iterator

from md4_jax.data.sources.splits import bounds, digest


@dataclasses.dataclass(frozen=True)
class Shakespeare:
    """1.1 million characters of Shakespeare, public domain, split 90/5/5 by characters."""

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def fingerprint(self) -> str:
        """Returns a hash of the content."""
        return digest("shakespeare", _text())

    def documents(self, split: str) -> Iterator[str]:
        """Yields the split as one document."""
        text = _text()
        start, stop = bounds(len(text), split, validation=0.05, test=0.05, unit="characters")
        yield text[start:stop]


def _text() -> str:
    corpus = importlib.resources.files("md4_jax.data") / "corpus" / "shakespeare.txt"
    return corpus.read_text(encoding="utf-8")
