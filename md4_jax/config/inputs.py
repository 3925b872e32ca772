"""Domain and data source of a config, and the corpora of its evaluators."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from md4_jax.autoencoders import Autoencoder
from md4_jax.config import chats, foreign
from md4_jax.config import load as config_lib
from md4_jax.config.load import merged
from md4_jax.config.schema import build_section, class_of, options_from
from md4_jax.data.chat import Chat
from md4_jax.data.codes import CodedImages, CodeDomain, found_autoencoder
from md4_jax.data.conversations import Conversations
from md4_jax.data.corpus import Corpus
from md4_jax.data.detokenise import Detokenised
from md4_jax.data.domains import (
    DOMAIN_FILE,
    Domain,
    TextDomain,
    domain_of,
    read_domain,
    stored_domain,
)
from md4_jax.data.mixtures import corpus_of
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.data.sources.mixture import Part
from md4_jax.data.units import DIMENSION
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, place

PUBLISHED = "; --mode import --from FOLDER (or hf:USER/NAME) makes a run of a published model"


def domain_and_source(config: Mapping[str, Any], workdir: Place | None) -> tuple[Domain, Any]:
    """Returns (domain, source): the run's stored domain, or one that is fitted to the source.

    A new run on text with train.initial and the same tokenizer section takes the tokenizer of the
    initial run, because the parameters were trained with its symbols. UserError without such a run.
    """
    length = options_from(DataOptions, config["data"]).length
    begins = workdir is not None and not (workdir / DOMAIN_FILE).exists()
    initial = _initial(config)
    if begins and initial is not None and not exists(initial / config_lib.FILE):
        raise UserError(f"train.initial={config['train']['initial']} holds no run{PUBLISHED}")
    chat = chats.of_run(config, workdir, initial)
    kept = workdir / DOMAIN_FILE if workdir else None
    if kept is not None and kept.exists():
        domain = read_domain(kept, length, foreign.load)
        return _with_chat(domain, chat), _source(config["data"], chat, domain)
    source = _source(config["data"], chat)

    def tokenizer() -> Any:
        learned = _tokenizer_of_initial(config)
        return build_section("tokenizer", config["tokenizer"]) if learned is None else learned

    return _with_chat(domain_of(source, tokenizer, length), chat), source


def _with_chat(domain: Domain, chat: Chat | None) -> Domain:
    return dataclasses.replace(domain, chat=chat) if isinstance(domain, TextDomain) else domain


def _tokenizer_of_initial(config: Mapping[str, Any]) -> Any:
    """Returns the tokenizer of train.initial; None if it has none or the sections differ."""
    directory = _initial(config)
    if directory is None:
        return None
    theirs = config_lib.stored(directory) if directory.is_dir() else None
    if theirs is None or theirs["tokenizer"] != config["tokenizer"]:
        return None
    domain = stored_domain(directory, theirs["data"]["length"], foreign.load)
    return getattr(domain, "tokenizer", None)  # images have none


def _initial(config: Mapping[str, Any]) -> Place | None:
    """Returns the directory of the run train.initial; None if it is empty."""
    asked = config.get("train", {}).get("initial")
    return checkpoint_of(place(asked, "train.initial"))[0] if asked else None


def checkpoint_of(path: Place) -> tuple[Place, str]:
    """Splits RUN/checkpoints/STEP into (RUN, STEP); for RUN alone, STEP is the newest."""
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return path.parent.parent, path.name
    return path, "newest"


def corpora(
    config: Mapping[str, Any], domain: Domain, run: Corpus | None = None
) -> Callable[[Mapping[str, Any]], Corpus]:
    """Returns a function (changes of the `data` section) -> corpus in the run's domain.

    run: the corpus without changes, if it already exists. Each corpus is made once.
    """
    made: list[tuple[dict, Corpus]] = [] if run is None else [({}, run)]

    def corpus(changes: Mapping[str, Any]) -> Corpus:
        for asked, found in made:
            if asked == dict(changes):
                return found
        made.append((dict(changes), _corpus(merged(config["data"], changes), domain)))
        return made[-1][1]

    return corpus


def _corpus(section: Mapping[str, Any], domain: Domain) -> Corpus:
    options = options_from(DataOptions, section)
    if options.separate_documents and getattr(domain, "eot_id", None) is None:
        raise UserError(
            "data.separate_documents=True needs a tokenizer with an end-of-text token; that of "
            "this run has none"
        )
    if isinstance(domain, TextDomain):
        domain = dataclasses.replace(domain, length=options.length)
    return corpus_of(_source(section, getattr(domain, "chat", None), domain), domain, options)


def _source(section: Mapping[str, Any], chat: Chat | None, domain: Domain | None = None) -> Any:
    """Makes the source of a section; `chat` formats its conversations, if it has any.

    domain: that of the run, whose autoencoder makes the codes of images; None for a new run
    """
    if section.get("parts"):
        own = {key: value for key, value in section.items() if key != "parts"}
        return build_section("data", own, parts=_parts(section, chat))
    source, rules = build_section("data", section), section.get("detokenise", "")
    if getattr(source, "messages_key", ""):
        if rules:
            raise UserError(
                f"data.detokenise={rules!r} is for texts that were split into words and "
                "punctuation, not for the conversations of "
                f"data.messages_key={source.messages_key!r}: remove one of the two keys"
            )
        form = chat or chats.named(section)
        return Conversations(source, form, options_from(DataOptions, section).turns)
    if section.get("autoencoder"):
        return CodedImages(source, _autoencoder(section, domain))
    return Detokenised(source, rules) if rules else source


def _autoencoder(section: Mapping[str, Any], domain: Domain | None) -> Autoencoder:
    """Returns the autoencoder of a run's domain; for a new run, that of the section."""
    if isinstance(domain, CodeDomain):
        return domain.autoencoder
    options = options_from(DataOptions, section)
    return found_autoencoder(options.autoencoder, options.autoencoder_pixels)


@contextlib.contextmanager
def as_before(kept: Mapping[str, Any] | None, workdir: Place) -> Iterator[None]:
    """Adds advice to a UserError about the data if the run in workdir began with other data.

    kept: the config of that run; None for a new one
    """
    try:
        yield
    except UserError as error:
        if kept is None:
            raise
        raise UserError(
            f"{error}\nThe run in {workdir} could read its data when it began. If the data have "
            "changed since then, restore them to resume the run. To train on the new data use "
            "another --workdir"
        ) from error


def evaluators_by_age(
    kept: Mapping[str, Any] | None, asked: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Returns names of evaluators: (those with the same data as when the run began, the others).

    kept: the config of that run; None for a new one. Evaluators on the run's own data are never
    new.
    """
    before, new = (kept or {}).get("evals", {}), []
    for name, section in asked["evals"].items():
        own = section.get("data", {})
        if own and kept is not None and own != before.get(name, {}).get("data"):
            new.append(name)
    return [name for name in asked["evals"] if name not in new], new


def warnings(corpus: Corpus) -> tuple[str, ...]:
    """Returns warnings about the data: sentences about the source and its size."""
    found = corpus.warnings
    if corpus.domain.vocab_size > 1:
        return found
    return (
        *found,
        (
            "the data have only one distinct symbol, so there is nothing to learn: all results in "
            "bits are 0"
        ),
    )


def check_files(section: Mapping[str, Any], chat: Chat | None) -> None:
    """Reads the first training text of each part that reads files; UserError if that fails."""
    of_all = dataclasses.asdict(options_from(DataOptions, section))
    for part in section.get("parts", {}).values() or [section]:
        if part["name"] == "text":
            next(iter(_source({**of_all, **part}, chat).documents("train")), None)


def _parts(section: Mapping[str, Any], chat: Chat | None) -> dict[str, Part]:
    """Makes the sources of a mixture; they share the keys that every source has."""
    of_all = dataclasses.asdict(options_from(DataOptions, section))
    found = {}
    for name, own in sorted(section["parts"].items()):  # whatever their order in a config
        try:
            found[name] = Part(_source({**of_all, **own}, chat), own.get("weight", 1.0))
        except UserError as error:
            raise UserError(f"data.parts.{name}: {error}") from error
    return found


def random_tokens(config: Mapping[str, Any], section: str) -> RandomTokens | None:
    """Makes the domain for bench.random_tokens or plan.random_tokens; None if it is not set.

    Sequences are images if the network reads images.
    """
    size = config[section]["random_tokens"]
    network = class_of("network", config["network"]["name"])
    image = "shape" in inspect.signature(network).parameters
    unit = DIMENSION if image else "token"
    return RandomTokens(size, config["data"]["length"], image, unit=unit) if size else None
