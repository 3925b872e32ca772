"""Layout of a published checkpoint: names and shapes of its arrays, for export.

Every function of networks/published.py only renames, transposes and slices arrays. To invert it,
it is applied to the indices of all entries in place of their values: the result gives the origin of
each entry of a parameter.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.config.schema import build_section
from md4_jax.model import peers
from md4_jax.model.agreement import Difference, Meaning, differences, with_changes
from md4_jax.model.peer import Peer
from md4_jax.networks.depth import STACKED
from md4_jax.networks.published import Arrays, MaskLast, Read, View
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import Place, replace
from md4_jax.runtime.sharding import path_name, to_host
from md4_jax.runtime.tensors import TYPES, Tensors

FILE = "layout.json"
# Files that are exported unchanged. The chat template is written to the first.
FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# Largest size of other arrays, such as frequencies, that are stored with the layout.
KEPT = 4096
# Keys of a network that affect its outputs and cannot be inferred from the shapes of its arrays.
UNTOLD = (
    "shifted", "causal", "causal_context", "heads", "norm_eps", "rotary_base", "rotary_scaling",
    "rotary_part", "rotary_ramp", "rotary_gain", "rotary_type", "query_scaling", "window", "cap",
    "global_every", "local_base", "experts_per_token", "router", "router_normalised", "rotary_half",
    "router_scale", "router_groups", "router_groups_taken", "router_block", "router_block_taken",
    "condition_activation", "token_dropout", "decoder_depth", "decoder_reads", "shared_blocks",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """Description of a folder of another project, without the values of its parameters.

    config   its config.json
    arrays   name -> (type in safetensors, shape)
    mask     row of the mask, if it may be any row of the tables; None: the last, or none
    others   values of the arrays that are not converted to parameters
    base     folder, or name on the hub, of the base parameters of the adapters; "": the parameters
             have changed, or the base is not known
    files    texts of the small FILES of the folder, by name
    """

    config: Mapping[str, Any]
    arrays: Mapping[str, tuple[str, tuple[int, ...]]]
    mask: int | None
    others: Mapping[str, Any]
    base: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, told: Mapping[str, Any], tensors: Tensors, mask: int | None, read: set[str], base: str
    ) -> "Layout":
        """Describes a folder; read: names of the arrays that were converted to parameters."""
        found = {name: tensors.stored(name) for name in tensors}
        small = [n for n, s in found.items() if n not in read and math.prod(s.shape) <= KEPT]
        others = {name: np.asarray(tensors[name], np.float64).tolist() for name in small}
        arrays = {name: (stored.type, tuple(stored.shape)) for name, stored in found.items()}
        beside = {name: tensors.folder / name for name in FILES}
        files = {name: file.read_text("utf-8") for name, file in beside.items() if file.exists()}
        return cls(told, arrays, mask, others, base, files)

    @classmethod
    def kept(cls, folder: Place) -> Union["Layout", None]:
        """Reads the file written by `keep`; None if there is none."""
        if not (folder / FILE).exists():
            return None
        try:
            fields = json.loads((folder / FILE).read_text(encoding="utf-8"))
            arrays = {n: (kind, tuple(shape)) for n, (kind, shape) in fields["arrays"].items()}
            if unknown := {kind for kind, _ in arrays.values()} - TYPES.keys():
                raise ValueError(f"unknown types {unknown}")
            base, texts = fields.get("base", ""), fields.get("files", {})
            if not all(name in FILES and isinstance(text, str) for name, text in texts.items()):
                raise ValueError(f"its files are not texts of {', '.join(FILES)}")
            return cls(fields["config"], arrays, fields["mask"], fields["others"], base, texts)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / FILE} is damaged: {error}") from error

    def of_other_parameters(self) -> "Layout":
        """Returns the layout for a model whose parameters have changed since they were read."""
        return dataclasses.replace(self, base="")

    def keep(self, folder: Place) -> None:
        """Writes the file that `kept` reads, atomically."""
        replace(folder / FILE, json.dumps(dataclasses.asdict(self)) + "\n")


class Numbered(Mapping):
    """Arrays of a layout with the indices 1, 2, ... of all entries in place of their values.

    Names, shapes and small arrays are available as in `Tensors`.
    """

    def __init__(self, layout: Layout, folder: str):
        self.folder = folder
        self._shapes = {name: shape for name, (_, shape) in layout.arrays.items()}
        self._others = layout.others
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        self.starts = np.concatenate([[1], 1 + np.cumsum(sizes)])
        self._place = {name: place for place, name in enumerate(self._shapes)}

    def __getitem__(self, name: str) -> np.ndarray:
        begin, shape = self.starts[self._place[name]], self._shapes[name]
        return np.arange(begin, begin + math.prod(shape)).reshape(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array."""
        return self._shapes[name]

    def small(self, name: str) -> np.ndarray:
        """Returns the values of an array that is not converted to a parameter."""
        return np.asarray(self._others[name])

    def count(self, pattern: str) -> int:
        """Returns 1 + the largest number that the group of a pattern matches in names; 0: none."""
        found = (re.match(pattern, name) for name in self._shapes)
        return max((int(match.group(1)) + 1 for match in found if match), default=0)


def exported(
    layout: Layout, params: Params, own: Meaning, folder: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns config.json and the arrays of a network in its original layout.

    folder: the original folder, for messages. Entries without a parameter, such as the mask's
    column of the head, are zeros.
    """
    options, block = own.options, own.block
    peer = peers.peer(layout.config, Numbered(layout, folder))
    layout = _of_parameters(layout, peer)
    if peer.begins is not None and not options.causal:
        layout = _with_mask(layout, peer, options, block)
        peer = peer._replace(tables=tuple(map(peer.renamed, peer.tables)))
    numbers = Numbered(layout, folder)
    out = {
        name: np.zeros(shape, jnp.dtype(TYPES[kind]))
        for name, (kind, shape) in layout.arrays.items()
    }
    values = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}

    def put(path: str, layers: Sequence[Read]) -> None:
        value = np.asarray(to_host(values.pop(path)))
        for part, read in zip(
            value if path.startswith(STACKED) else value[None], layers, strict=True
        ):
            _place(np.asarray(read()).ravel(), part.ravel(), numbers, out)

    arrays, rows = numbers, options.vocab_size + 1
    if layout.mask is not None:
        arrays = MaskLast(numbers, peer.tables, layout.mask, rows)
    elif peer.begins is not None:  # texts still begin with the mask: its row goes where it was from
        arrays = MaskLast(numbers, peer.tables, peer.begins, rows, added=True)
    read = Watched(arrays)
    peer.convert(read, options, put)
    if values:
        raise UserError(
            f"the layout of {folder} has no array for the parameter {min(values)!r}: use save"
        )
    _fill(out, layout, read.names, peer, folder)
    told = with_changes(_with_block(layout.config, peer, options, block), peer, own)
    _check_told(told, numbers, own)
    return told, out


def _check_told(told: Mapping[str, Any], numbers: Numbered, own: Meaning) -> None:
    """Raises UserError for a key that affects outputs and differs from config.json."""
    found = peers.config_of(peers.peer(told, numbers), {})
    read = build_section("network", found["network"], vocab_size=own.options.vocab_size)
    for key, ours, theirs in (*_of_network(own.options, read, own.block), *differences(own, found)):
        raise UserError(
            f"the model has {key}={ours!r}, but in the layout of {numbers.folder} it would be "
            f"read with {theirs!r}: use save, which keeps every key, or load the model without "
            "this change"
        )


def _of_network(ours: Any, theirs: Any, block: int) -> list[Difference]:
    """Returns the keys of UNTOLD in which the options of networks differ."""
    keys = [key for key in UNTOLD if block or key != "causal_context"]
    pairs = ((key, getattr(ours, key, None), getattr(theirs, key, None)) for key in keys)
    return [Difference(f"network.{key}", a, b) for key, a, b in pairs if a != b]


def _with_block(config: Mapping[str, Any], peer: Peer, options: Any, block: int) -> dict[str, Any]:
    """Returns config.json with the current block size and shift of the model."""
    context = options.causal_context
    had = {"shifted": False, "causal_context": False} | peer.sections["network"]
    same = peer.sections["objective"].get("block", 0) == block
    same = same and (had["causal_context"] == context or not block)
    same = same and had["shifted"] == options.shifted
    if peer.begins is not None or same:
        return dict(config)
    if peer.told_of is not None:
        form = {"shifted": options.shifted, "block": block, "context": context}
        return peer.told_of(config, peer.kind, **form)
    return dict(config)


def with_mask(told: Mapping[str, Any], folder: Place, mask: int | None) -> Mapping[str, Any]:
    """Returns config.json with the row of the mask, unless the folder already implies this row.

    told: config.json, for a folder that already has its arrays and its tokenizer
    """
    found = peers.peer(peers.with_mask(told, folder), Tensors(folder)).mask
    # Some kinds have none to name: causal ones, and those in which it is always the last row.
    return told if mask is None or found in (None, mask) else {**told, "mask_token_id": mask}


class Watched(View):
    """Arrays, with the `names` of those that have been read."""

    def __init__(self, arrays: Arrays):
        super().__init__(arrays)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.names.add(name)
        return super().__getitem__(name)


def _place(
    number: np.ndarray, value: np.ndarray, numbers: Numbered, out: Mapping[str, np.ndarray]
) -> None:
    """Writes values to the entries with these indices; padding has the index 0 and no entry."""
    number, value = number[number > 0], value[number > 0]
    of = np.searchsorted(numbers.starts, number, side="right") - 1
    if np.any(of[1:] < of[:-1]):  # else the entries of each array lie together
        order = np.argsort(of, kind="stable")
        of, number, value = of[order], number[order], value[order]
    names, begins = list(numbers), np.flatnonzero(np.diff(of, prepend=-1))
    for begin, end in zip(begins, [*begins[1:], len(of)], strict=True):
        flat = out[names[of[begin]]].reshape(-1)
        flat[number[begin:end] - numbers.starts[of[begin]]] = value[begin:end]


def _fill(
    out: dict[str, np.ndarray], layout: Layout, read: set[str], peer: Peer, folder: str
) -> None:
    """Fills the arrays without parameters: with those that they copy, or with stored values."""
    for name in out.keys() - read:
        tied = [other for other in peer.tables if name in peer.tables and other in read]
        tied += [other for other in (peer.copied(name),) if other in read]
        if tied:
            out[name][...] = out[tied[0]]
        elif name in layout.others:
            out[name][...] = np.asarray(layout.others[name]).astype(out[name].dtype)
        else:
            raise UserError(
                f"the array {name!r} of {folder} is not part of the network and was not kept, so "
                "the model cannot be written in the layout that it came from"
            )


def _of_parameters(layout: Layout, peer: Peer) -> Layout:
    """Drops the buffers, which the code of the project creates itself."""
    arrays = {n: x for n, x in layout.arrays.items() if not re.fullmatch(peer.buffers, n)}
    return dataclasses.replace(layout, arrays=arrays)


def _with_mask(layout: Layout, peer: Peer, options: Any, block: int) -> Layout:
    """Makes the layout of a diffusion model from that of a causal one.

    The mask is a new entry, or an existing one that was chosen.
    """
    mask = options.vocab_size if layout.mask is None else layout.mask
    arrays = dict(layout.arrays)
    for name in peer.grows or peer.tables:
        kind, (rows, *rest) = arrays[name]
        arrays[name] = kind, (max(rows, mask + 1), *rest)
    rows = arrays[peer.tables[0]][1][0]
    arrays = {peer.renamed(name): stored for name, stored in arrays.items()}
    form = {"shifted": options.shifted, "block": block, "context": options.causal_context}
    config = peer.told_of(layout.config, peer.kind, **form)
    config |= {"mask_token_id": mask, "vocab_size": rows}
    return dataclasses.replace(layout, config=config, arrays=arrays, mask=mask)
