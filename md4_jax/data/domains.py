"""Domains: the meaning of symbols, and the file that stores it in a run."""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from md4_jax import autoencoders
from md4_jax.data import chat as chats
from md4_jax.data import tokenizers
from md4_jax.data.chat import Chat
from md4_jax.data.codes import CodeDomain
from md4_jax.data.labelled import classes
from md4_jax.data.names import Load, UnknownClass, class_of
from md4_jax.data.pixels import PixelDomain
from md4_jax.protocols import Array, UserError
from md4_jax.runtime.paths import Place, replace

DOMAIN_FILE = "tokenizer.json"
# Names of what `keep_domain` writes.
KEPT = (DOMAIN_FILE, chats.FILE, autoencoders.FOLDER)


class Domain(Protocol):
    """Meaning of a sequence of symbols.

    vocab_size  symbols are the integers 0..vocab_size-1
    shape       shape of one example: (256,) for text, (32, 32, 3) for an image
    unit        name of one symbol in reports: "token", "character", "dimension" or "code"
    labels      names of the classes of examples, in order; () without classes

    The symbols of an example, in row-major order, are a sequence of L = prod(shape) symbols.
    Objectives, processes and samplers work on sequences [B, L] and do not know the shape.
    A domain also has `from_json(fields, load)`, a class method; see `domain_from_json`. Domains of
    images, of shape (rows, columns, channels), may have `picture`, the shape (H, W, C) of the
    images if it is another one, and `decode_rows`, which decodes many rows at once.
    A domain may have files of its own: `keep(directory)` writes them, and `beside(directory)`
    returns the domain with those of a directory.
    """

    vocab_size: int
    shape: tuple[int, ...]
    unit: str
    labels: tuple[str | int, ...]

    def to_json(self) -> str:
        """Returns a JSON object from which `domain_from_json` makes an equal domain.

        Its key "domain" is a name in DOMAINS, or package.module:attribute of the class.
        """

    def decode(self, row: Sequence[int] | Array) -> Any:
        """Returns the text of the symbols, or the uint8 array of an image."""


@dataclasses.dataclass(frozen=True)
class TextDomain:
    """Text of `length` tokens.

    tokenizer  one of data/tokenizers.py, or any object with the same interface
    length     tokens of one sequence
    labels     names of the classes of texts: class k is labels[k]. (): no classes
    chat       chat template, which a run stores in a separate file. None: there is none
    """

    tokenizer: Any
    length: int
    labels: tuple[str | int, ...] = ()
    chat: Chat | None = None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def shape(self) -> tuple[int]:
        return (self.length,)

    @property
    def unit(self) -> str:
        return "character" if self.tokenizer.is_character else "token"

    @property
    def eot_id(self) -> int | None:
        return self.tokenizer.eot_id

    def encode(self, text: str) -> Array:
        """Returns the token ids of a text; UserError if it has characters without a token."""
        try:
            return self.tokenizer.encode(text)
        except (TypeError, UnicodeEncodeError) as error:
            half = re.search("[\ud800-\udfff]", text)
            if half is None:
                raise
            raise UserError(
                f"the text has half of a surrogate pair, {half[0]!r}, at offset {half.start()}: it "
                "is not a character. Was the text decoded with another encoding than its own?"
            ) from error

    def decode(self, row: Sequence[int] | Array) -> str:
        """Returns the text of any number of token ids; the mask is shown as '_'."""
        return self.tokenizer.decode(row)

    def to_json(self) -> str:
        """Returns the JSON object of the domain, which contains that of the tokenizer."""
        tokenizer = json.loads(self.tokenizer.to_json())
        labels = {"labels": self.labels} if self.labels else {}
        fields = {"domain": "text", "length": self.length, **labels, "tokenizer": tokenizer}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], load: Load | None) -> "TextDomain":
        """Makes the domain from the parsed JSON object."""
        tokenizer = tokenizers.from_json(json.dumps(fields["tokenizer"]), load)
        return cls(tokenizer, fields["length"], tuple(fields.get("labels", ())))


DOMAINS = {"text": TextDomain, "pixels": PixelDomain, "codes": CodeDomain}


def domain_from_json(text: str, length: int, load: Load | None = None) -> Domain:
    """Makes the domain that `to_json` wrote.

    length  tokens of a sequence, for files of older versions, which hold a tokenizer but no length
    load    finds the class of a name that is not built in, such as package.module:attribute
    """
    fields = json.loads(text)
    if "domain" not in fields:
        return TextDomain(tokenizers.from_json(text, load), length)
    return class_of(fields["domain"], DOMAINS, "domain", load).from_json(fields, load)


def domain_of(source: Any, tokenizer: Callable[[], Any], length: int) -> Domain:
    """Returns the domain of a source: its own, or text with a tokenizer fitted to the source.

    tokenizer  makes the tokenizer; called for text only
    """
    if hasattr(source, "domain"):
        return source.domain()
    labels = classes(source.labelled("train")) if getattr(source, "label_key", "") else ()
    return TextDomain(tokenizer().fit(source.documents("train")), length, labels)


def same_symbols(one: Domain, other: Domain) -> bool:
    """Returns whether symbols mean the same in two domains; shapes and classes may differ."""
    bare = [json.loads(domain.to_json()) for domain in (one, other)]
    for fields in bare:
        for key in ("length", "shape", "labels"):
            fields.pop(key, None)
    return bare[0] == bare[1]


def other_class(one: Domain, other: Domain) -> str:
    """Describes the first class of a domain that has another name in the other, '' if none has.

    The first domain may lack the last classes. One without classes fits any other, and so do
    classes without names, which are numbers, if there are as many.
    """
    own, its = (tuple(getattr(domain, "labels", ())) for domain in (one, other))
    unnamed = any(not any(isinstance(name, str) for name in names) for names in (own, its))
    if not its or own == its[: len(own)] or (unnamed and len(own) == len(its)):
        return ""
    both = zip(own, [*map(repr, its), *["no class"] * len(own)], strict=False)
    number, pair = next((n, pair) for n, pair in enumerate(both) if repr(pair[0]) != pair[1])
    return f"class {number} is {pair[0]!r} instead of {pair[1]}"


def keep_domain(domain: Domain, workdir: Place) -> None:
    """Writes the domain of a run with a checksum, and its chat template, atomically.

    A file that exists is left unchanged.
    """
    chat = getattr(domain, "chat", None)
    if chat is not None and Chat.kept(workdir) is None:
        chat.keep(workdir)
    if hasattr(domain, "keep"):
        domain.keep(workdir)
    kept = workdir / DOMAIN_FILE
    if not kept.exists():
        fields = json.loads(domain.to_json())
        replace(kept, json.dumps({**fields, "crc32": _crc32(fields)}))


def stored_domain(workdir: Place, length: int, load: Load | None = None) -> Domain:
    """Reads the stored domain of a run, so that sampling needs no data; UserError if missing."""
    kept = workdir / DOMAIN_FILE
    if not kept.exists():
        raise UserError(
            f"{kept} is missing: copy it from where this run or model comes from, or train in this "
            "--workdir first"
        )
    return read_domain(kept, length, load)


def read_domain(kept: Place, length: int, load: Load | None = None) -> Domain:
    """Reads a domain file; UserError, which names the file, if it is truncated or changed."""
    try:
        domain = domain_from_json(_checked(kept.read_text(encoding="utf-8")), length, load)
    except UnknownClass as error:
        raise UserError(f"{kept}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, UserError) as error:
        raise UserError(
            f"{kept} is damaged, or is not the tokenizer of a run ({_first_line(error)}). Restore "
            "it from a copy. If you have none, move the file away and repeat the command that "
            "trained the run: with the same data it makes the same tokenizer"
        ) from error
    return domain.beside(kept.parent) if hasattr(domain, "beside") else domain


def _checked(text: str) -> str:
    """Returns the JSON of a domain; UserError if the checksum, which old files lack, is wrong."""
    fields = json.loads(text)
    if fields.pop("crc32", None) not in (None, _crc32(fields)):
        raise UserError("its checksum is wrong")
    return json.dumps(fields)


def _crc32(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
