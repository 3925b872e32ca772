"""Description of a published model in terms of this package, and checks of its config.json."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from md4_jax.data.tokenizers import END_OF_TEXT
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

GPT2 = "gpt2"
UNKNOWN = -1  # a mask that config.json should name and does not


class Peer(NamedTuple):
    """Description of a published model in terms of this package.

    kind       name of the project
    length     number of tokens of a sequence
    symbols    size of the vocabulary, without the mask; larger if some rows have no entry
    sections   sections of the config: network, process, objective
    convert    function of networks/published.py
    tokenizer  name on the hub of the vocabulary, for a folder that has none
    tables     names of the arrays with a row for each entry, if the mask may be any of them
    mask       row of the mask; None: the last one, or one that is added
    begins     row of the begin-of-text token, for a model without a mask: the vector of a new mask,
               which is added after the symbols, is initialised with this row
    ends       row of the end-of-text token, if config.json has it
    told_of    (config.json, kind, shifted=, block=, context=) -> config.json of a diffusion model
               adapted from it
    renamed    name of an array -> its name in such a model
    copied     name of an array -> the array of which it is a copy, if it is one
    buffers    regular expression of the names of arrays that are not parameters of the network and
               are not written
    transposed  whether linear layers are stored as [in, out], unlike those of PyTorch
    doubled    whether its code has two modules for each layer, with shared matrices
    eot        entry of `tokenizer` that ends a text
    grows      those of `tables` that get a row for a new mask; (): all of them
    most       largest row with a meaning that is not an entry of the tokenizer
    head       name of the array of a head that is not tied; "": unknown
    unread     values of config.json that may be options of the network that are not known here
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
    head: str = ""
    unread: Mapping[str, Any] = MappingProxyType({})


def of_masks(
    told: Mapping[str, Any], tensors: Tensors, network: dict[str, Any], convert: Callable,
    tables: tuple[str, str], longest: int,
) -> Peer:  # fmt: skip
    """Describes a model in the layout of transformers as a masked model of whole texts.

    network  section `network` of the config
    tables   names of the arrays of embedding and head; the second may be missing
    longest  default largest number of tokens of a sequence

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
        tables=tuple(name for name in tables if name in tensors), head=tables[1],
        mask=told.get("mask_token_id", UNKNOWN), ends=first(told.get("eos_token_id")),
    )  # fmt: skip


def from_the_left(found: Peer, told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Changes the description of a masked model to that of a causal one, without a mask."""
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
    """Changes the description of a masked model to block diffusion, with whole blocks."""
    sections = {**found.sections, "objective": {"name": "block", "block": block}}
    return found._replace(length=found.length - found.length % max(block, 1), sections=sections)


def in_an_order(found: Peer, objective: Mapping[str, Any], sample: Mapping[str, Any]) -> Peer:
    """Changes the description of a masked model to one that reads in an order, such as Eso-LM."""
    sections = {"objective": dict(objective), "sample": dict(sample)}
    return found._replace(sections={**found.sections, **sections})


def needed(told: Mapping[str, Any], tensors: Tensors, key: str) -> Any:
    """Returns the value of a key of config.json; UserError if it is missing."""
    if key not in told:
        raise lacks(tensors, key)
    return told[key]


def lacks(tensors: Tensors, key: str) -> UserError:
    """Makes the error for a key that is missing in config.json."""
    return UserError(
        f"{tensors.folder}: config.json lacks {key}, which cannot be found from the arrays: add it"
    )


def check_built(told: Mapping[str, Any], tensors: Tensors, built: Mapping[str, Any]) -> None:
    """Raises UserError if config.json has options that are not supported here.

    built: keys and their only supported values
    """
    for key, value in built.items():
        if told.get(key, value) not in (value, None):
            raise UserError(
                f"{tensors.folder}: config.json says {key}={told[key]!r}; only {value!r} is "
                "supported"
            )


def agree(told: Mapping[str, Any], tensors: Tensors, **found: int) -> None:
    """Raises UserError if a size in config.json differs from that of the arrays."""
    for key, size in found.items():
        if told.get(key, size) != size:
            raise UserError(
                f"{tensors.folder}: config.json says {key}={told[key]}, but its arrays have {size}"
            )
