"""Byte-level BPE vocabularies from files or from the hub, and the bytes of their entries."""

import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from md4_jax.data import smiles
from md4_jax.data.words import Encode
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, is_remote, place

CONFIG = "tokenizer_config.json"
ADDED = ("lstrip", "rstrip", "normalized", "single_word", "special")
# Split of Qwen's tokenizers, as a regular expression: single digits, and no leading space for them.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Class of a tokenizer in transformers -> how it splits a text before merging pairs; None: by
# GPT-2's pattern.
SPLITS = {"GPT2Tokenizer": None, "Qwen2Tokenizer": QWEN, "DreamTokenizer": QWEN}
PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


def from_path(path: str):
    """Reads a `tokenizers.Tokenizer` from a directory or a tokenizer.json; else UserError."""
    here = place(path, "tokenizer.path")
    if here.is_file():
        return from_definition(here.read_text(encoding="utf-8"), str(here))
    if (here / "tokenizer.json").is_file():
        return from_path(str(here / "tokenizer.json"))
    for vocabulary, merges in PAIRS:
        if (here / vocabulary).is_file() and (here / merges).is_file():
            with tempfile.TemporaryDirectory() as folder:  # the library reads local files only
                pair = [_local(here / name, folder) for name in (vocabulary, merges)]
                return _from_pair(*pair, _config(here))
    if is_in(here):
        return smiles.tokenizer_of(_json(here / smiles.FILE), str(here / smiles.FILE))
    expected = ", or ".join(" and ".join(pair) for pair in (("tokenizer.json",), *PAIRS))
    raise UserError(f"tokenizer.path: there is no tokenizer at {here}. It must contain {expected}")


def is_in(folder: Place) -> bool:
    """Returns whether the folder of a model contains a vocabulary."""
    if (folder / "tokenizer.json").is_file():
        return True
    if not (folder / smiles.FILE).is_file():
        return False
    return (folder / "merges.txt").is_file() or _class_of(folder) in smiles.CLASSES


def mask_of(folder: Place) -> int | None:
    """Returns the id of the mask according to the files of a tokenizer; None if they have none."""
    for file in (folder / CONFIG, folder / "special_tokens_map.json"):
        try:
            config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise UserError(f"{file} is not readable JSON: {error}") from error
        mask = config.get("mask_token") if isinstance(config, dict) else None
        mask = mask.get("content") if isinstance(mask, dict) else mask
        if isinstance(mask, str):
            return from_path(str(folder)).token_to_id(mask)
    return None


def spellings(tokenizer, ids: Sequence[int]) -> list[bytes] | None:
    """Returns the bytes of the entries with these ids, empty where an id has no entry.

    Returns None for a vocabulary whose decoder is not byte-level: the text of an entry then
    depends on its neighbours.
    """
    if '"ByteLevel"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return None
    byte_of = byte_of_character()
    entries = [tokenizer.id_to_token(int(i)) or "" for i in ids]
    # An entry with any other character is its own text, as in the library.
    return [
        bytes(byte_of[c] for c in entry) if byte_of.keys() >= set(entry) else entry.encode()
        for entry in entries
    ]


def limited(encode: Encode, tokenizer, size: int) -> Encode:
    """Wraps the function to raise UserError for a text with an id of `size` or above."""

    def checked(texts: list[str]) -> list[np.ndarray]:
        found = encode(texts)
        largest = max((int(ids.max()) for ids in found if ids.size), default=0)
        if largest >= size:
            raise UserError(
                f"the text has {tokenizer.id_to_token(largest)!r}, "
                "which is not a symbol of the model"
            )
        return found

    return checked


def without_mask(encode: Encode, tokenizer, size: int, mask: int) -> Encode:
    """Wraps the function so that ids above the mask are lower by one: 0..size-1.

    UserError for a text that contains the mask, or an entry beyond the `size` symbols and the mask.
    """
    checked = limited(encode, tokenizer, size + 1)

    def moved(texts: list[str]) -> list[np.ndarray]:
        found = checked(texts)
        if any((ids == mask).any() for ids in found):
            raise UserError(
                f"the text has {tokenizer.id_to_token(mask)!r}, which is the mask of the model: "
                "to mark tokens to be filled in, use sample.template or Model.infill"
            )
        return [ids - (ids > mask) for ids in found]

    return moved


def added_from(tokenizer, index: int, size: int) -> bool:
    """Returns whether all entries index..size-1 are added tokens: no ordinary word has them."""
    added = tokenizer.get_added_tokens_decoder()
    return all(i in added for i in range(index, size))


def special(tokenizer) -> tuple[str, ...]:
    """Returns the special tokens of the vocabulary, in the order of their ids."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return tuple(entry.content for _, entry in added if entry.special)


def byte_of_character() -> dict[str, int]:
    """Returns {character of a byte-level entry: its byte}.

    Bytes that are printable in Latin-1 are their own characters; the others are U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    written = {chr(byte): byte for byte in printable}
    return written | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _local(path: Place, folder: str) -> Place:
    return path.copy(Place(folder) / path.name) if is_remote(path) else path


def from_definition(definition: str, origin: str = "the stored tokenizer"):
    """Makes a `tokenizers.Tokenizer` from the contents of a tokenizer.json."""
    try:
        return _of_whole_texts(_library().Tokenizer.from_str(definition))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{origin} is not a tokenizer.json: {error}") from error


def _of_whole_texts(tokenizer):
    """Returns the tokenizer without truncation and padding.

    A tokenizer.json may contain both: the limits of the last call before it was saved.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def from_hub(name: str):
    """Fetches a `tokenizers.Tokenizer` from the Hugging Face hub or its local cache.

    Files below `tokenizers` in the cache directory take precedence.
    """
    own = cache_root() / "tokenizers" / name
    if own.is_dir():
        return from_path(str(own))
    library = _library()
    try:
        import huggingface_hub  # which tokenizers needs

        kept = _cached(huggingface_hub, name)
        try:  # once, where the library asks for a file six times in 23 s, with a warning each time
            there = huggingface_hub.HfApi().repo_info(name, timeout=10)
        except Exception:
            if not kept:
                raise
            return from_path(kept)
        names = {file.rfilename for file in there.siblings}
        if "tokenizer.json" not in names and smiles.FILE in names:
            files = [smiles.FILE, CONFIG]
            return from_path(huggingface_hub.snapshot_download(name, allow_patterns=files))
        return _of_whole_texts(library.Tokenizer.from_pretrained(name))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"tokenizer {name!r} could not be fetched from the Hugging Face hub ({error}). Without "
            f"a network put its tokenizer.json, or encoder.json and vocab.bpe, into {own}, or into "
            "another directory and set tokenizer.path to it instead of tokenizer.hub."
        ) from error


def _cached(hub: Any, name: str) -> str:
    """Returns a cached tokenizer.json of the hub, or a folder with molecules' vocabulary, or ""."""
    kept = hub.try_to_load_from_cache(name, "tokenizer.json")
    if isinstance(kept, str):
        return kept
    kept = hub.try_to_load_from_cache(name, smiles.FILE)
    return str(pathlib.Path(kept).parent) if isinstance(kept, str) else ""


def _config(folder: Place) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json, or {}; UserError for an unknown class."""
    file = folder / CONFIG
    if not file.is_file():
        return {}
    config, kind = _json(file), _class_of(folder) or "GPT2Tokenizer"
    if kind not in SPLITS:
        raise UserError(
            f"{file} says tokenizer_class={config['tokenizer_class']!r}, and md4_jax does not know "
            f"how that class splits a text: put the model's tokenizer.json into {folder}, which "
            "defines it"
        )
    return config


def _class_of(folder: Place) -> str:
    """Returns the class in tokenizer_config.json, without "Fast"; "" if it has none."""
    file = folder / CONFIG
    kind = _json(file).get("tokenizer_class") if file.is_file() else None
    return (kind or "").removesuffix("Fast")


def _json(file: Place) -> dict[str, Any]:
    """Returns the object in a JSON file; UserError if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} is not readable JSON: it holds no object")
    return found


def _from_pair(vocabulary: Place, merges: Place, config: Mapping[str, Any]):
    library = _library()
    try:
        model = library.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:
        raise UserError(f"{vocabulary} and {merges} are not a BPE vocabulary: {error}") from error
    tokenizer, split = library.Tokenizer(model), library.pre_tokenizers
    tokenizer.pre_tokenizer = split.ByteLevel(add_prefix_space=False)
    pattern = SPLITS[(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")]
    if pattern:
        tokenizer.normalizer = library.normalizers.NFC()
        first = split.Split(library.Regex(pattern), "isolated")
        second = split.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = split.Sequence([first, second])
    tokenizer.decoder = library.decoders.ByteLevel()
    _add(tokenizer, config.get("added_tokens_decoder") or {}, vocabulary)
    return tokenizer


def _add(tokenizer, entries: Mapping[str, Mapping[str, Any]], vocabulary: Place) -> None:
    """Adds the entries {id: its properties}; UserError if they do not get these ids."""
    library = _library()
    for number, properties in sorted(entries.items(), key=lambda item: int(item[0])):
        flags = {key: bool(properties.get(key, False)) for key in ADDED}
        entry = library.AddedToken(properties["content"], **flags)
        add = tokenizer.add_special_tokens if entry.special else tokenizer.add_tokens
        add([entry])
        if (found := tokenizer.token_to_id(entry.content)) != int(number):
            raise UserError(
                f"{CONFIG} gives {entry.content!r} the id {number}, but with {vocabulary.name} it "
                f"gets the id {found}: the two files do not belong together. Fetch both again"
            )


def _library():
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "the tokenizer 'bpe' needs the package tokenizers: pip install tokenizers"
        ) from error
    return tokenizers
