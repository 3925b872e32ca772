"""Loading of a model: a run, a saved folder, or a checkpoint of another project."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from md4_jax.config import build, foreign, runs, same_network, schema
from md4_jax.config import load as config_lib
from md4_jax.data import bpe_files, smiles
from md4_jax.data.chat import Chat
from md4_jax.data.domains import Domain, TextDomain, stored_domain
from md4_jax.data.tokenizers import END_OF_TEXT, BytePairs
from md4_jax.experiment import Experiment
from md4_jax.model import dreamon, esm, finding, maskgit, parameters, peers, peft_reading, surplus
from md4_jax.model import origins as places
from md4_jax.model.finding import Found
from md4_jax.model.layout import Layout, Watched
from md4_jax.model.model import Model
from md4_jax.model.peer import UNKNOWN, Peer
from md4_jax.networks.published import Arrays, MaskLast, Put
from md4_jax.protocols import Params, UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime import devices
from md4_jax.runtime.compiling import keep_programs
from md4_jax.runtime.paths import Place
from md4_jax.runtime.tensors import Tensors, is_folder
from md4_jax.training.report import kept
from md4_jax.training.trainable import trained_beside

# Largest number of rows of a padded table without an entry: below 128, or one in 50. LFM2 has
# 65,536 rows for 64,400 entries.
SPARE, PADDED = 127, 50


def load(
    source: Any,
    config: Mapping[str, Any] | None = None,
    *,
    trust: Iterable[str] = (),
    adapters: Any = "",
    where: Found | None = None,
) -> Model:
    """Reads a model; see `md4_jax.load`. where: its location, if it was found already."""
    foreign.allow(trust)
    where = where or finding.found(str(source))
    devices.platform()
    keep_programs()
    folder, changes = runs.named_checkpoint(where.folder)
    changes |= {key: str(value) for key, value in (config or {}).items()}
    told = finding.told_by(folder)
    finding.check_whole(where, told)
    if told.get("package") == "md4_jax":
        if adapters:
            raise UserError(
                f"adapters={adapters} can only be added to a published model, but {folder} was "
                "saved by md4_jax"
            )
        return _own(folder, told, changes)
    return _of_others(where, told, changes, finding.named(str(source), where), adapters)


def _own(folder: Place, told: Mapping[str, Any], changes: Mapping[str, str]) -> Model:
    """Reads a run directory, or a folder that `Model.save` wrote."""
    is_run = (folder / "checkpoints").exists()
    asked = schema.load_config(None, changes, folder, may_differ=not is_run)
    domain = stored_domain(folder, asked["data"]["length"], foreign.load)
    experiment = build.experiment(asked, domain, workdir=folder)
    facts = {"commit": told.get("commit", "unknown"), "results": told.get("results", {})}
    if is_run:
        with parameters.silent_checkpoints():
            step, params = runs.averaged(experiment, folder)
        facts["results"] = _results(folder, step)
    elif is_folder(folder):
        before = (config_lib.stored(folder) or {})["network"]
        _check_scale(folder, before, asked["network"])
        same_network.check_sizes(before, asked["network"], domain, str(folder))
        step, params = told.get("step", 0), parameters.own(experiment, Tensors(folder))
    elif "step" in told:
        raise UserError(f"{folder} lacks the model.safetensors of a saved model: copy it again")
    else:
        raise UserError(f"{folder} holds no checkpoint yet: train it first")
    form, layout = Chat.kept(folder), Layout.kept(folder)
    if layout is not None and step and _trains_others(experiment, params):
        layout = layout.of_other_parameters()
    return Model(experiment, params, step, str(folder), facts, form, layout)


def _check_scale(folder: Place, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError if saved adapters would be scaled differently."""
    was, is_now = (section.get("lora_alpha") for section in (before, now))
    if before.get("lora_rank") and was != is_now:
        raise UserError(
            f"the adapters of {folder} were trained with network.lora_alpha={was}, but "
            f"network.lora_alpha={is_now} would scale them by another factor: remove the key"
        )


def _trains_others(experiment: Experiment, params: Params) -> bool:
    """Returns whether the config trains more than adapters."""
    trainable = experiment.train.trainable
    return bool(trained_beside(experiment.network, params["network"], trainable))


def _of_others(
    where: Found, told: Mapping[str, Any], changes: Mapping[str, str], name: str, adapters: Any
) -> Model:
    """Reads the checkpoint of another project; name: its name, for the layout."""
    folder, tensors = where.folder, Tensors(*where)
    told, peer = _peer(folder, told, tensors)
    asked = peers.config_of(peer, _tokenizer(folder, peer))
    before = dict(asked["network"])
    foreign.allow(foreign.names_in(changes))
    config_lib.override(asked, changes, schema.type_of)
    schema.check_keys(asked)
    domain = _domain(folder, peer, asked)
    lora = None
    if adapters:
        places.check_modules(peer, folder)
        lora = peft_reading.read(finding.folder_of(str(adapters)), tensors)
    same_network.check_sizes(before, asked["network"], domain, str(folder))
    begin = None
    if lora is not None and asked["network"]["lora_rank"]:
        begin = _beside(lora, tensors, peer, domain, asked, changes)
    experiment = build.experiment(asked, domain)
    mask = asked["tokenizer"].get("mask")
    folded = lora is not None and begin is None
    stored = peft_reading.Merged(tensors, lora) if folded else tensors
    arrays = Watched(_ordered(stored, peer, mask, domain.vocab_size + 1))
    params = parameters.converted(experiment, arrays, peer.convert, str(where.place), begin)
    surplus.check_used(tensors, peer, arrays.names)
    if folded:
        lora.check_read(arrays.names)
    layout = Layout.of(told, tensors, mask, arrays.names, "" if folded else name)
    surplus.warn(peer)
    facts, form = {"commit": "unknown", "results": {}}, Chat.of_folder(folder)
    return Model(experiment, params, 0, str(where.place), facts, form, layout)


def _peer(
    folder: Place, told: Mapping[str, Any], tensors: Tensors
) -> tuple[Mapping[str, Any], Peer]:
    """Returns what config.json tells, completed by other files of the folder, and the peer."""
    surplus.check_types(told, tensors)
    told = dreamon.with_expansion(told, folder)
    masked = peers.with_mask(told, folder)
    peer = peers.peer(masked, tensors)
    surplus.check_head(told, tensors, peer)
    # Its mask may say what it is.
    return (masked if peers.kind_of(told, tensors) != peer.kind else told), peer


def described(where: Found, told: Mapping[str, Any]) -> Peer:
    """Returns the description of another project's checkpoint, without reading its arrays.

    UserError if its config, names and shapes of arrays, or tokenizer do not fit each other.
    """
    _, peer = _peer(where.folder, told, Tensors(*where))
    _domain(where.folder, peer, peers.config_of(peer, _tokenizer(where.folder, peer)))
    return peer


def _beside(
    lora: peft_reading.Adapters,
    tensors: Tensors,
    peer: Peer,
    domain: Domain,
    asked: dict[str, Any],
    changes: Mapping[str, str],
) -> Callable[[Params, Put], Params]:
    """Returns a function that converts the adapters of a folder to those of the network.

    Also sets keys of `asked` from the folder, unless `changes` have them.
    """
    shapes = {name: tensors.shape(name) for name in tensors}

    def options() -> Any:
        return schema.build_section("network", asked["network"], vocab_size=domain.vocab_size)

    origins = places.origins(peer, shapes, options(), str(tensors.folder))
    for key, value in lora.settings(asked["network"]["lora_rank"], origins).items():
        section, name = key.split(".")
        if key not in changes:
            asked[section][name] = value
    return peft_reading.beginning(lora, origins, options())


def _ordered(tensors: Arrays, peer: Peer, mask: int | None, rows: int) -> Arrays:
    """Returns the arrays with the row of the mask after those of the symbols."""
    if mask is not None:
        return MaskLast(tensors, peer.tables, mask, rows)
    if peer.begins is not None:
        return MaskLast(tensors, peer.tables, peer.begins, rows, added=True)
    return tensors


def _tokenizer(folder: Place, peer: Peer) -> dict[str, Any]:
    """Returns the config section of the tokenizer in the folder, or else on the hub."""
    if peer.kind == maskgit.KIND:  # of images
        return {}
    if peer.kind == esm.KIND:
        return esm.tokenizer_of(folder)
    if bpe_files.is_in(folder):
        found = bpe_files.from_path(str(folder))
        end = None if peer.ends is None else found.id_to_token(peer.ends)
        ends = (END_OF_TEXT, peer.eot, *((smiles.END,) if end is None else ()))
        named = (name for name in ends if found.token_to_id(name) is not None)
        return {"name": "bpe", "path": str(folder), "eot": next(named, end)}
    return {"name": "bpe", "hub": peer.tokenizer, "eot": peer.eot}


def _domain(folder: Place, peer: Peer, asked: dict[str, Any]) -> Domain:
    """Makes the domain and sets `size` and `mask` of the tokenizer; UserError if it does not match.

    Entries of the tokenizer beyond the model's symbols must be added tokens. One symbol may have no
    entry; if the row of the mask is given, several may have none, since tables are padded.
    """
    if peer.kind == maskgit.KIND:
        return maskgit.domain(folder, peer, asked)
    mask = asked["tokenizer"].pop("mask", None)
    tokenizer = schema.build_section("tokenizer", asked["tokenizer"])
    entries, symbols = tokenizer.vocab_size, peer.symbols
    if mask is None and peer.begins is not None:
        return _with_new_mask(folder, peer, tokenizer, asked)
    rows, spare = (symbols, 1) if mask is None else (symbols + 1, max(SPARE, symbols // PADDED))
    if mask is not None:
        _check_mask(folder, peer, mask)
        symbols = min(rows, max(entries, mask + 1, peer.most + 1)) - 1
    if entries != symbols or mask not in (None, symbols):
        fits = isinstance(tokenizer, BytePairs) and (
            tokenizer.added_from(rows) if entries > rows else rows - entries <= spare
        )
        if not fits:
            raise _foreign_tokenizer(entries, folder, rows)
        asked["tokenizer"]["size"] = symbols
        if mask not in (None, symbols):
            asked["tokenizer"]["mask"] = mask
        tokenizer = schema.build_section("tokenizer", asked["tokenizer"])
    return _of_text(tokenizer, peer, asked)


def _with_new_mask(folder: Place, peer: Peer, tokenizer: Any, asked: dict[str, Any]) -> Domain:
    """Makes the domain of a model without a mask: its symbols are the entries of the tokenizer.

    UserError if the model has fewer rows than the tokenizer, or far more.
    """
    entries, rows = tokenizer.vocab_size, peer.symbols
    if not entries <= rows <= entries + max(SPARE, rows // PADDED):
        raise _foreign_tokenizer(entries, folder, rows)
    if not 0 <= peer.begins < entries:
        raise UserError(
            f"{folder}: config.json says that texts begin with the token {peer.begins}, but the "
            f"tokenizer has only {amount(entries, 'entry')}"
        )
    return _of_text(tokenizer, peer, asked)


def _of_text(tokenizer: Any, peer: Peer, asked: Mapping[str, Any]) -> TextDomain:
    """Makes the domain; class names are numbers, since checkpoints have no names."""
    labels = range(peer.sections["network"].get("classes", 0))
    return TextDomain(tokenizer, asked["data"]["length"], tuple(labels))


def _foreign_tokenizer(entries: int, folder: Place, rows: int) -> UserError:
    return UserError(
        f"the tokenizer has {entries} symbols, but the model in {folder} has {rows}: give the "
        "tokenizer with which it was trained, by config={'tokenizer.path': FOLDER}"
    )


def _check_mask(folder: Place, peer: Peer, mask: int) -> None:
    """Raises UserError if the row of the mask is not a row of the model."""
    if not peer.tables:
        raise UserError(
            f"tokenizer.mask={mask} is only for models whose mask can be any entry of the "
            f"vocabulary. In {folder} ({peer.kind}) the mask comes after the vocabulary, or there "
            "is none"
        )
    if mask == UNKNOWN:
        raise UserError(
            f"{folder}: config.json lacks mask_token_id, which cannot be found from the arrays: "
            "add it, or give config={'tokenizer.mask': ID}"
        )
    if not 0 <= mask <= peer.symbols:
        raise UserError(
            f"{folder}: the mask is {mask} (mask_token_id of config.json, or tokenizer.mask), but "
            f"must be below the vocabulary size of {peer.symbols + 1}"
        )


def _results(workdir: Place, step: int) -> dict[str, Any]:
    """Returns the results at the end of training, if that was at this step, by evaluator."""
    final = [row for row in kept(workdir) if "command" not in row]
    return {row["eval"]: row for row in final if row.get("step") == step}
