"""A published model in the words of this package, and checks of what its config.json says."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from md4_jax.data.tokenizers import END_OF_TEXT
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

GPT2 = "gpt2"
UNKNOWN = -1  # a mask that config.json should name and does not


class Peer(NamedTuple):
    """Published model in the words of this package.

    kind       name of the project
    length     tokens of a sequence
    symbols    size of the vocabulary, without the mask; more if some rows have no entry
    sections   sections of the config: network, process, objective
    convert    function of networks/published.py
    tokenizer  name on the hub of the vocabulary, for a folder that has none
    tables     names of the arrays with a row for each entry, if the mask may be any of them
    mask       row of the mask; None: the last one, or one that is added
    begins     row that begins a text, for a model without a mask: the vector of the mask, which is
               added behind the symbols, starts as that of this row
    ends       row that ends a text, if config.json tells it
    told_of    (config.json, kind, shifted=, block=, context=) -> config.json of a diffusion model
               made of it
    renamed    name of an array -> its name in such a model
    copied     name of an array -> the array of which it is a copy, if it is one
    buffers    regular expression of the names of arrays that are no parameters of the network, and
               are not written
    transposed  whether linear layers are stored as [in, out], and not as PyTorch's are
    doubled    whether its code has two modules for each layer, with the same matrices
    eot        entry of `tokenizer` that ends a text
    grows      those of `tables` that get a row for a new mask; (): all of them
    most       largest row that stands for something beside the entries of the tokenizer
    """

    kind: str
    length: int
    symbols: int
    sections: dict[str, dict[str, Any]]
    convert: Callable
    tokenizer: str = GPT2
    tables: tuple[str, ...] = ()
    mask: int | None = None
    begins: int | None = None
    ends: int | None = None
    told_of: Callable | None = None
    renamed: Callable[[str], str] = str
    copied: Callable[[str], str] = str
    buffers: str = ""
    transposed: bool = False
    doubled: bool = False
    eot: str = END_OF_TEXT
    grows: tuple[str, ...] = ()
    most: int = 0


def of_masks(
    told: Mapping[str, Any], tensors: Tensors, network: dict[str, Any], convert: Callable,
    tables: tuple[str, str], longest: int,
) -> Peer:  # fmt: skip
    """Returns a model in the layout of transformers as one of masks that sees whole texts.

    network  section of the network
    tables   names of the arrays of embedding and head, of which the second may not be there
    longest  most tokens of a sequence by default

    Its mask is `mask_token_id`, or UNKNOWN.
    """
    rows = tensors.shape(tables[0])[0]
    agree(told, tensors, vocab_size=rows)
    sections = {
        "network": network,
        "process": {"name": "masking", "schedule": {"name": "linear"}},
        "objective": {"name": "md4"},
    }
    return Peer(
        str(told.get("model_type", "")).lower(),
        min(longest, told.get("max_position_embeddings", longest)),
        rows - 1, sections, convert,
        tables=tuple(name for name in tables if name in tensors),
        mask=told.get("mask_token_id", UNKNOWN), ends=first(told.get("eos_token_id")),
    )  # fmt: skip


def from_the_left(found: Peer, told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Returns a model of masks as a causal one, which has none: each token sees those before it."""
    found.sections["network"]["causal"] = True
    found.sections["objective"] = {"name": "autoregressive"}
    found.sections["sample"] = {"name": "left_to_right"}
    begins = first(told.get("bos_token_id"))
    if begins is None and found.ends is None:
        raise lacks(tensors, "bos_token_id")
    begins = found.ends if begins is None else begins
    return found._replace(symbols=found.symbols + 1, mask=None, begins=begins)


def first(found: Any) -> Any:
    """Returns the first of several ids, or the only one."""
    if isinstance(found, list):
        return found[0] if found else None
    return found


def in_blocks(found: Peer, block: int) -> Peer:
    """Returns a model of masks as one of block diffusion, with sequences of whole blocks."""
    sections = {**found.sections, "objective": {"name": "block", "block": block}}
    return found._replace(length=found.length - found.length % max(block, 1), sections=sections)


def in_an_order(found: Peer, alpha_0: float) -> Peer:
    """Returns a model of masks as one that reads tokens in an order, as Eso-LM does."""
    objective = {"name": "eso", "alpha_0": float(alpha_0)}
    return found._replace(
        sections={**found.sections, "objective": objective, "sample": {"name": "eso"}}
    )


def needed(told: Mapping[str, Any], tensors: Tensors, key: str) -> Any:
    """Returns what config.json says under a key; UserError if it says nothing."""
    if key not in told:
        raise lacks(tensors, key)
    return told[key]


def lacks(tensors: Tensors, key: str) -> UserError:
    """Makes the error for a key that config.json lacks."""
    return UserError(
        f"{tensors.folder}: config.json lacks {key}, which the arrays do not tell: add it"
    )


def check_built(told: Mapping[str, Any], tensors: Tensors, built: Mapping[str, Any]) -> None:
    """Raises UserError if config.json switches on what a network here does not have.

    built: keys and the only values that they may have, if they are there
    """
    for key, value in built.items():
        if told.get(key, value) not in (value, None):
            raise UserError(
                f"{tensors.folder}: config.json says {key}={told[key]!r}; only {value!r} is known"
            )


def agree(told: Mapping[str, Any], tensors: Tensors, **found: int) -> None:
    """Raises UserError if config.json says another size than the arrays have."""
    for key, size in found.items():
        if told.get(key, size) != size:
            raise UserError(
                f"{tensors.folder}: config.json says {key}={told[key]}, and its arrays have {size}"
            )
