"""Detokenisation of corpora whose text was split into tokens: docs/zero_shot.md.

Each rule is (pattern, replacement), applied in order. The rules are those of published evaluations
(SEDD, arXiv:2310.16834; MDLM, 2406.07524; for WikiText those of Megatron-LM), so that numbers are
comparable. Their oddities, such as "N" becoming 1 in WikiText, are kept.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from md4_jax.data.sources.records import Document, Part
from md4_jax.data.sources.splits import digest
from md4_jax.protocols import UserError

Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


def _literal(*pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((re.escape(old), new.replace("\\", r"\\")) for old, new in pairs)


# Removes the spaces inside brackets and quotes.
_WIKITEXT = _rules(
    *_literal(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    *_literal((" : ", ": "), (" ; ", "; "), (" . ", ". ")),
    *_literal((" ! ", "! "), (" ? ", "? "), (" , ", ", ")),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    *_literal(("= = = =", "===="), ("= = =", "==="), ("= =", "==")),
    *_literal((" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"), ("\n ", "\n")),
    *_literal((" N ", " 1 "), (" 's", "'s")),
)
_PTB = _rules(
    *_literal((" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (" \n ", "\n"), ("\\/", "/")),
    (r" N(?= )", " 1"),
    *_literal(("$ 1", "$1"), ("# 1", "#1"), ("<unk>", "?")),
)
_LM1B = _rules(
    *_literal(("http : / / ", "http://"), ("https : / / ", "https://")),
    (r" '(\w+)", r"'\1"),
    (r" (\w+) \. ", r" \1. "),
    (r" (\w+) \.$", r" \1."),
    *_literal((" ? ", "? ")),
    (r" \?$", "?"),
    *_literal((" ! ", "! ")),
    (r" !$", "!"),
    *_literal((" , ", ", "), (" : ", ": "), (" ; ", "; "), (" / ", "/")),
    (r'" ([^"]+) "', r'"\1"'),
    (r"' ([^']+) '", r"'\1'"),
    (r"\( ([^()]+) \)", r"(\1)"),
    (r"\[ ([^\[\]]+) \]", r"[\1]"),
    *_literal(("$ ", "$"), ("\N{POUND SIGN} ", "\N{POUND SIGN}")),
)


def _by(*rules: Rules) -> Callable[[str], str]:
    def detokenised(text: str) -> str:
        for pattern, replacement in (rule for some in rules for rule in some):
            text = pattern.sub(replacement, text)
        return text

    return detokenised


def lambada(text: str) -> str:
    """Straightens quotes and begins a passage with a line break, as OpenAI did for GPT-2."""
    straight = text.replace("\N{LEFT DOUBLE QUOTATION MARK}", '"')
    return "\n" + straight.replace("\N{RIGHT DOUBLE QUOTATION MARK}", '"').strip()


DETOKENISERS: dict[str, Callable[[str], str]] = {
    "lambada": lambada,
    "lm1b": _by(_LM1B),
    "ptb": _by(_PTB),
    "scientific_papers": _by(_WIKITEXT, _LM1B),
    "wikitext": _by(_WIKITEXT),
}


class Detokenised:
    """Source with detokenised documents; other attributes are those of the wrapped source.

    name: one of DETOKENISERS; UserError for another
    """

    def __init__(self, source: Any, name: str):
        if name not in DETOKENISERS:
            raise UserError(
                f"data.detokenise={name!r} is not known. Known are {', '.join(DETOKENISERS)}, and "
                "'' for none"
            )
        if not hasattr(source, "documents"):
            raise UserError(f"data.detokenise={name!r} is only for text: set data.detokenise=''")
        self._source, self._name = source, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # for copy and pickle
            raise AttributeError(name)
        found = getattr(self._source, name)
        return self._sections if name == "sections" else found

    def fingerprint(self) -> str:
        """Returns a hash of the documents, with the name of the rules."""
        return digest("detokenised", self._name, self._source.fingerprint())

    def content(self) -> str:
        """Returns a hash of the documents that does not depend on the splits."""
        return digest("detokenised", self._name, self._source.content())

    def documents(self, split: str) -> Iterator[str]:
        """Yields the documents of the split, one at a time."""
        return map(DETOKENISERS[self._name], self._source.documents(split))

    def labelled(self, split: str) -> Iterator[Any]:
        """Yields the documents of the split with their labels."""
        change = DETOKENISERS[self._name]
        return (one._replace(text=change(one.text)) for one in self._source.labelled(split))

    def pairs(self, split: str) -> Iterator[tuple[str, str]]:
        """Yields the prompts of the split with their answers."""
        change = DETOKENISERS[self._name]
        return ((change(prompt), change(answer)) for prompt, answer in self._source.pairs(split))

    def rejected(self, split: str) -> Iterator[str]:
        """Yields the rejected answers to the prompts of the split."""
        return map(DETOKENISERS[self._name], self._source.rejected(split))

    def _sections(self) -> dict[str, list[Part]]:
        """Returns the files of each section; they yield detokenised documents."""
        sections = self._source.sections()
        return {name: [self._part(part) for part in parts] for name, parts in sections.items()}

    def _part(self, part: Part) -> Part:
        change = DETOKENISERS[self._name]

        def read() -> Iterator[Document]:
            return (one._replace(text=change(one.text)) for one in part.read())

        return part._replace(read=read)
