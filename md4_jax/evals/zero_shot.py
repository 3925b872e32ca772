"""Zero-shot likelihood: the bound of a run on other, widely used data sets."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import TextDomain
from md4_jax.data.sources.corpora import CORPORA, section_of
from md4_jax.data.sources.splits import NoFile, NoText
from md4_jax.data.tokenizer_base import UnknownCharacter
from md4_jax.evals import report
from md4_jax.evals.context import Context, check_sizes, warned
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.experiment import Experiment, rows_of
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import exists, place, replace

FILE = "zero_shot.json"
# Set -> (keys of the section `data`, split): documents and splits as in MDLM's evaluation.
SETS: dict[str, tuple[dict[str, str], str]] = {
    "lambada": (dict(dataset="lambada", detokenise="lambada"), "test"),
    "wikitext2": (dict(dataset="wikitext2_rows", detokenise="wikitext"), "validation"),
    "wikitext103": (dict(dataset="wikitext103_rows", detokenise="wikitext"), "validation"),
    "ptb": (dict(dataset="ptb_sentences", detokenise="ptb"), "validation"),
    "lm1b": (dict(dataset="lm1b", detokenise="lm1b"), "test"),
    "ag_news": (dict(dataset="ag_news", detokenise=""), "test"),
    "arxiv": (
        dict(dataset="arxiv", detokenise="scientific_papers", text_key="article"), "validation"
    ),
    "pubmed": (
        dict(dataset="pubmed", detokenise="scientific_papers", text_key="article"), "validation"
    ),
    "openwebtext": (dict(dataset="openwebtext", detokenise=""), "validation"),
}  # fmt: skip
# OpenWebText is not a default: most models were trained on it, and its archive is large.
USUAL = ",".join(name for name in SETS if name != "openwebtext")
# The run's own data may also be a public corpus, with other keys.
PLAIN = {
    "name": "public", "folder": "", "text_key": "text", "messages_key": "", "prompt_key": "",
    "rejected_key": "", "validation": None, "test": None,
}  # fmt: skip
CHUNKS = {"concatenate": "grid", "documents": "documents"}
BLOCK = 1 << 20  # tokens hashed at once


@dataclasses.dataclass(frozen=True)
class ZeroShot:
    """Evaluates the likelihood bound on other data sets, and records how each set was made.

    every, final, draws, batch_size, limit, seed, objective  as in `likelihood`
    sets    names in SETS, separated by commas
    split   train, validation, test or all; '': the usual split of each set
    path    directory with one directory per set, of the same name; '': the cache, or a download
    chunks  concatenate: documents are concatenated and cut; documents: one per sequence, cut or
            padded
    length  tokens of a sequence; 0: as in training
    stride  new tokens of each sliding sequence; 0: adjacent sequences

    zero_shot.json contains for each set the detokeniser, the chunks, the end of text, the length,
    the number of documents, and SHA-256 of the raw files, of the detokenised text and of the
    tokens. If two results differ, the first differing hash shows at which stage.
    """

    objective: Any
    every: int = 0
    final: bool = False
    sets: str = USUAL
    split: str = ""
    path: str = ""
    chunks: str = "concatenate"
    length: int = 0
    stride: int = 0
    draws: int = 1
    batch_size: int = 0
    limit: int = 0
    seed: int = 0

    needs_data: ClassVar[bool] = False

    def __post_init__(self):
        if not self.chosen:
            raise UserError(f"sets={self.sets!r} must name at least one of {', '.join(SETS)}")
        for name in self.chosen:
            if name not in SETS:
                raise UserError(
                    f"sets contains the unknown name {name!r}. Known are {', '.join(SETS)}"
                )
        if self.chunks not in CHUNKS:
            raise UserError(f"chunks must be {' or '.join(CHUNKS)}, not {self.chunks!r}")
        if self.stride and self.chunks == "documents":
            raise UserError(f"stride={self.stride} needs joined documents: set chunks=concatenate")
        for name in self.chosen:
            self._bound(name)

    @property
    def chosen(self) -> list[str]:
        """Returns the names of the sets."""
        return [name.strip() for name in self.sets.split(",") if name.strip()]

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError for a model that is not a text model, and for sizes that do not fit."""
        if not isinstance(experiment.domain, TextDomain):
            raise UserError(f"{key} is only for models of text, and this model is not one")
        own, length = self.length_of(experiment)
        length_key = f"{key}.{own}" if own else "data.length"
        check_sizes(self, experiment, key, length)
        for name in self.chosen:
            self._bound(name).check_stride(length, f"{key}.", length_key)

    def length_of(self, experiment: Experiment) -> tuple[str, int]:
        """Returns (key, tokens) of the sequences that the network reads."""
        return ("length", self.length) if self.length else ("", experiment.data.length)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns the bound of each set in all units and prints them; writes zero_shot.json."""
        results, manifests = {}, {}
        for name, corpus in self.opened(f"evals.{context.name}", context.corpus).items():
            bound = self._bound(name)
            sequences = bound.sequences(experiment)
            batches = corpus.eval_batches(
                bound.split, stride=self.stride, **rows_of(experiment, sequences)
            )
            found = bound.of_batches(experiment, params, batches, context.programs)
            result = {"split": bound.split, **found}
            context.say(f"{context.name} {name} ({bound.split}): {report.line(result)}")
            manifests[name] = {**self._manifest(name, corpus), "result": report.finite(result)}
            results |= {f"{name}_{key}": value for key, value in result.items()}
        if jax.process_index() == 0:
            kept = {"step": context.step, "sets": manifests}
            with warned(context, FILE):
                replace(context.workdir / FILE, json.dumps(kept, indent=2) + "\n")
                context.say(f"{context.name}: {context.workdir / FILE}")
        return results

    def opened(
        self, key: str, corpus_of: Callable[[Mapping[str, Any]], Corpus]
    ) -> dict[str, Corpus]:
        """Tokenises all sets, downloading missing ones; UserError for a set without text.

        key: config key of the evaluator, for the error
        """
        if self.path:
            self._check_path(key)
        found = {name: corpus_of(self._changes(name)) for name in self.chosen}
        for name, corpus in found.items():
            split = self._bound(name).split
            try:
                corpus.sizes([split])
            except UserError as error:
                where = f"{name} in {self.path}/{name}" if self.path else name
                raise UserError(f"{key}: {where}: {_said(error, key, name, split)}") from error
        return found

    def _check_path(self, key: str) -> None:
        """Raises UserError for a path that is no folder with a folder for each set."""
        root, names = place(self.path, f"{key}.path"), self.chosen
        wrong = "is a file" if root.is_file() else "" if exists(root) else "was not found"
        if wrong:
            raise UserError(
                f"{key}.path={self.path} {wrong}: it must be a folder with one folder for each of "
                f"{key}.sets, such as {self.path}/{names[0]}"
            )
        if missing := [name for name in names if not exists(root / name)]:
            raise UserError(
                f"{key}.path={self.path} has no folder {' and none '.join(missing)}: put the files "
                f"of each set into a folder of its name, or remove it from {key}.sets"
            )

    def _changes(self, name: str) -> dict[str, Any]:
        """Returns the keys of the section `data` that differ from the run's."""
        path = os.path.join(self.path, name) if self.path else None
        keys: dict[str, Any] = {**PLAIN, "path": path, **SETS[name][0]}
        keys |= {"windows": CHUNKS[self.chunks]}
        if self.chunks == "documents":  # whose padding does not count, as the page says
            keys |= {"separate_documents": False, "padding": "hidden"}
        return keys | ({"length": self.length} if self.length else {})

    def _bound(self, name: str) -> LikelihoodBound:
        same = ("draws", "batch_size", "stride", "limit", "seed", "objective")
        options = {key: getattr(self, key) for key in same}
        return LikelihoodBound(split=self.split or SETS[name][1], **options)

    def _manifest(self, name: str, corpus: Corpus) -> dict[str, Any]:
        """Returns a record of how the sequences of a set are made, with a hash of each stage."""
        changes, split = SETS[name][0], self.split or SETS[name][1]
        tokenizer, options = corpus.domain.tokenizer, corpus.options
        documents, characters, text = _text_facts(corpus.source.documents(split))
        tokens = corpus.stream(split)
        end = "nothing after a document"
        if tokenizer.eot_id is not None:
            end = f"token {tokenizer.eot_id} after each document, predicted like any other"
        elif self.chunks == "concatenate" and tokenizer.separator:
            end = f"{tokenizer.separator!r} between documents"
        return {
            "dataset": changes["dataset"], "split": split,
            "detokenise": changes["detokenise"] or "none",
            "chunks": self.chunks, "length": options.length,
            "stride": self.stride or options.length,
            "end_of_text": end, "start_of_text": "none", "limit": self.limit,
            "separate_documents": options.separate_documents,
            "documents": documents, "characters": characters, "tokens": len(tokens),
            "raw_sha256": corpus.source.facts(), "detokenised_sha256": text,
            "tokens_sha256": _tokens_sha256(tokens),
            "tokenizer_sha256": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        }  # fmt: skip


def _said(error: UserError, key: str, name: str, split: str) -> str:
    """Rewords an error about a set with the keys and the split of this evaluator."""
    if isinstance(error, NoFile):
        files = [file.name for file in CORPORA[SETS[name][0]["dataset"]].files]
        files = [file for file in files if section_of(file) == split] or files
        files = files or [f"{split}{ending}" for ending in (".parquet", ".jsonl", ".txt")]
        return (
            f"there is no file in this folder or below it. Put that of the {split} split there, "
            f"such as {' or '.join(files)}, or remove {name} from {key}.sets"
        )
    if isinstance(error, NoText):
        return (
            f"the {split} split has 0 tokens. Add its file, remove {name} from {key}.sets, or "
            f"choose another split by {key}.split"
        )
    if isinstance(error, UnknownCharacter):
        return (
            f"{error}. This run knows only the characters of its own text: {key} needs a run with "
            "tokenizer.name=bytes or bpe"
        )
    said = str(error).replace("data.path", f"{key}.path")
    return (
        said
        if said == str(error)
        else f"{said}. That folder must contain a folder {name} for this set"
    )


def _text_facts(documents: Iterable[str]) -> tuple[int, int, str]:
    """Returns (documents, characters, SHA-256 of all documents in UTF-8, each followed by 0)."""
    hashed, count, characters = hashlib.sha256(), 0, 0
    for document in documents:
        hashed.update(document.encode() + b"\0")
        count, characters = count + 1, characters + len(document)
    return count, characters, hashed.hexdigest()


def _tokens_sha256(tokens: Any) -> str:
    """Returns a SHA-256 of the ids as little-endian int32."""
    hashed = hashlib.sha256()
    for first in range(0, len(tokens), BLOCK):
        hashed.update(np.asarray(tokens[first : first + BLOCK]).astype("<i4").tobytes())
    return hashed.hexdigest()
