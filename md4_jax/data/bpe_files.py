"""Byte-level BPE vocabularies from files or from the hub."""

import tempfile

from md4_jax.paths import Place, is_remote, place
from md4_jax.protocols import UserError

PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


def from_path(path: str):
    """A `tokenizers.Tokenizer` from a directory or a tokenizer.json; UserError without one."""
    here = place(path, "tokenizer.path")
    if here.is_file():
        return from_definition(here.read_text(encoding="utf-8"), str(here))
    for vocabulary, merges in PAIRS:
        if (here / vocabulary).is_file() and (here / merges).is_file():
            with tempfile.TemporaryDirectory() as folder:  # the library reads local files alone
                pair = [_local(here / name, folder) for name in (vocabulary, merges)]
                return _from_pair(*pair)
    if (here / "tokenizer.json").is_file():
        return from_path(str(here / "tokenizer.json"))
    expected = ", or ".join(" and ".join(pair) for pair in (*PAIRS, ("tokenizer.json",)))
    raise UserError(f"tokenizer.path: no tokenizer at {here}; it should hold {expected}")


def _local(path: Place, folder: str) -> Place:
    return path.copy(Place(folder) / path.name) if is_remote(path) else path


def from_definition(definition: str, origin: str = "the stored tokenizer"):
    """A `tokenizers.Tokenizer` from the contents of a tokenizer.json."""
    try:
        return _library().Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{origin} is not a tokenizer.json: {error}") from error


def from_hub(name: str):
    """A `tokenizers.Tokenizer` from the Hugging Face hub or its local cache."""
    try:
        return _library().Tokenizer.from_pretrained(name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"tokenizer {name!r} could not be fetched from the Hugging Face hub ({error}). Without "
            "a network put its tokenizer.json, or encoder.json and vocab.bpe, into a directory "
            "and set tokenizer.path to it instead of tokenizer.hub."
        ) from error


def _from_pair(vocabulary: Place, merges: Place):
    library = _library()
    try:
        model = library.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:
        raise UserError(f"{vocabulary} and {merges} are no BPE vocabulary: {error}") from error
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _library():
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "the tokenizer 'bpe' needs the package tokenizers: pip install tokenizers"
        ) from error
    return tokenizers
