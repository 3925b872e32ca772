"""Public corpora by name, and data sets of the Hugging Face hub; downloaded if missing."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
import tarfile
import threading
from collections.abc import Iterator, Mapping

from md4_jax.data import contents, download, hub
from md4_jax.data.cache import full_disk_named
from md4_jax.data.lock import alone
from md4_jax.data.sources import formats
from md4_jax.data.sources.corpora import ALL_THREE, CORPORA, File, Recipe, section_of
from md4_jax.data.sources.files import check_messages
from md4_jax.data.sources.patterns import data_below, matching, name_below
from md4_jax.data.sources.records import Document, Part
from md4_jax.data.sources.splits import ALL, bounds, check_split, digest
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, cache_root, version

Published = File | hub.HubFile


@dataclasses.dataclass(frozen=True)
class PublicText:
    """Documents of a public corpus, with its customary splits.

    dataset     a name in CORPORA, such as openwebtext, lm1b or wikitext103, or OWNER/NAME of a data
                set on the Hugging Face hub
    path        the files, if they are not in the cache directory: a file, a directory or a
                pattern. None: look in the cache, then download
    folder      folder with the files to use in a data set on the hub; "": the corpus's own, or all
    text_key    key of the text in a JSON line, or column of a Parquet file
    messages_key  key of a conversation, instead of a text; see data/conversations.py
    prompt_key  key of the messages before those, if they are a separate list
    rejected_key  key of the same conversation with a rejected last answer, for
                objective.name="preference". "": there is none
    validation  size of the split if the corpus does not have it: a fraction of the training
                documents if below 1, else their number. None: the customary size
    test        likewise; the last documents are test, those before them validation
    keep_files  whether to keep downloaded files of the hub after storing their tokens in shards

    Raises UserError if it is unknown, or cannot be downloaded or read.
    """

    dataset: str
    path: str | None = None
    folder: str = ""
    text_key: str = "text"
    messages_key: str = ""
    prompt_key: str = ""
    rejected_key: str = ""
    validation: float | None = None
    test: float | None = None
    keep_files: bool = True

    is_large = has_documents = True

    def __post_init__(self):
        if self.dataset not in CORPORA and self.dataset.count("/") != 1:
            raise UserError(
                f"data.dataset={self.dataset!r} is not known. Known are {', '.join(CORPORA)}, and "
                "OWNER/NAME of any data set on the Hugging Face hub"
            )
        if self.prompt_key and not self.messages_key:
            raise UserError(
                f"data.prompt_key={self.prompt_key!r} needs data.messages_key: it is here the key "
                "of the messages before those of data.messages_key. For plain prompts and "
                "answers use data.name=text and data.path"
            )
        check_messages(self)

    @property
    def title(self) -> str:
        return self.dataset.replace("/", "_")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns a warning if the files are not the published ones."""
        published = {file.sha256 for file in self._recipe.files} - {""}
        found = [(name, sha) for name, sha in self.facts() if published and sha not in published]
        return tuple(
            f"{name} (SHA-256 {sha[:8]}...) is not the published file: results on it are not "
            f"comparable with published results on {self.dataset}"
            for name, sha in found[:1]
        )

    def fingerprint(self) -> str:
        """Returns a hash of the files and of the arguments."""
        return digest(self.content(), self.validation, self.test)

    def content(self) -> str:
        """Returns a hash of the documents that does not depend on the splits."""
        key = [self.text_key] if not self.messages_key else ["messages", self.messages_key]
        key += ["prompt", self.prompt_key] if self.prompt_key else []
        key += ["rejected", self.rejected_key] if self.rejected_key else []
        sections = [self._section(self._name(path)) for path in self._given]
        if sections != [self._section(path.name) for path in self._given]:
            key += ["sections", *sections]  # older versions looked at names alone
        if self.dataset not in CORPORA and any(map(formats.is_new_table, self._given)):
            key.append("records")  # older versions read such a file as one text
        return digest("public", self.dataset, self.facts(), *key)

    def facts(self) -> list[list[str | int]]:
        """Returns [name, SHA-256] of each file; published files may be absent."""
        return contents.facts_of(self._given) if self.path is not None else self._facts

    @functools.cached_property
    def _facts(self) -> list[list[str | int]]:
        found = []
        for file in self._published:
            path = self._local(file)
            if not path.exists() and file.sha256:
                found.append([path.name, file.sha256])
            else:
                found += contents.facts_of([Place(self._fetched(file))])
        return found

    def sections(self) -> dict[str, list[Part]]:
        """Returns the files of each section, in order; missing ones are downloaded when read."""
        found: dict[str, list[Part]] = {name: [] for name in self._sections}
        if self.path is None and self._recipe.hub:
            section = lambda file: self._section(file.name)  # noqa: E731
            files = sorted(self._published, key=lambda file: [*found].index(section(file)))
            for file in files:
                own = (self._read_published, self._discard, self._begin)
                calls = (functools.partial(call, file) for call in own)
                found[section(file)].append(Part(file.size, *calls))
            return found
        paths = self._given or [Place(self._fetched(file)) for file in self._published]
        pairs = ((self._name(given), path) for given in paths for path in _unpacked(given))
        for name, path in pairs:
            is_whole = formats.is_archive(path) and len(found) > 1
            for section in found if is_whole else [self._section(name)]:
                read = functools.partial(self._read, path, section if is_whole else "")
                state = functools.partial(version, path)
                found[section].append(Part(path.stat().length, read, state=state))
        return found

    def ranges(self, split: str, documents: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """Returns the documents of a split, as ranges (section, first, last plus one)."""
        check_split(split)
        if split == ALL:
            return [(name, 0, count) for name, count in documents.items()]
        if split != "train" and split in self._sections:
            return [(split, 0, documents.get(split, 0))]
        amounts = {name: 0.0 if name in self._sections else self._amount(name)
                   for name in ALL_THREE[1:]}  # fmt: skip
        return [("train", *bounds(documents.get("train", 0), split, unit="documents", **amounts))]

    def documents(self, split: str) -> Iterator[str]:
        """Yields the documents of the split, one at a time."""
        return (document.text for document in self.conversations(split))

    def conversations(self, split: str) -> Iterator[Document]:
        """Yields the documents of the split: conversations, if there is a messages_key."""
        for section, start, stop in self.ranges(split, self._counts):
            yield from itertools.islice(self._documents(section), start, stop)

    def _documents(self, section: str) -> Iterator[Document]:
        parts = self.sections()[section]
        pairs = itertools.zip_longest(parts, parts[1:])
        return itertools.chain.from_iterable(part.documents(after) for part, after in pairs)

    @functools.cached_property
    def _counts(self) -> dict[str, int]:
        return {name: sum(1 for _ in self._documents(name)) for name in self._sections}

    def _amount(self, name: str) -> float:
        asked = getattr(self, name)
        return getattr(self._recipe, name) if asked is None else asked

    @functools.cached_property
    def _recipe(self) -> Recipe:
        found = CORPORA.get(self.dataset) or Recipe(hub=self.dataset)
        return found._replace(folder=self.folder or found.folder)

    @functools.cached_property
    def _sections(self) -> tuple[str, ...]:
        """Returns the sections of the published corpus."""
        if self.dataset in CORPORA:
            return self._recipe.sections
        names = list(map(self._name, self._given)) or [file.name for file in self._published]
        found = set(map(section_of, names)) | {"train"}
        return tuple(name for name in ALL_THREE if name in found)

    def _section(self, name: str) -> str:
        found = section_of(name)
        return found if found in self._sections else "train"

    def _name(self, path: Place) -> str:
        """Returns the path of a file relative to data.path if that is a folder, else its name."""
        return path.name if self.path is None else name_below(self.path, path)

    @functools.cached_property
    def _given(self) -> list[Place]:
        if self.path is None:
            return []
        return matching(self.path) if self.dataset in CORPORA else data_below(self.path)

    @functools.cached_property
    def _published(self) -> tuple[Published, ...] | list[Published]:
        recipe = self._recipe
        return hub.files(recipe.hub, recipe.folder) if recipe.hub else recipe.files

    def _local(self, file: Published) -> pathlib.Path:
        is_file = isinstance(file, File)
        return cache_root() / file.name if is_file else file.local(self._recipe.hub)

    def _fetched(self, file: Published) -> pathlib.Path:
        if isinstance(file, hub.HubFile):
            if begun := self._begun.pop(file, None):
                begun.join()
            return file.fetched(self._recipe.hub)
        path = self._local(file)
        advice = f"Fetch it elsewhere, then either put it at {path} or set data.path to it"
        return download.fetch(file.url, path, sha256=file.sha256, instead=advice)

    @functools.cached_property
    def _begun(self) -> dict[hub.HubFile, threading.Thread]:
        """Downloads that were started ahead of reading their file."""
        return {}

    def _begin(self, file: hub.HubFile) -> None:
        """Starts downloading a file in the background; reading it retries and raises errors.

        The thread ends with the process; the next process resumes the download.
        """

        def download() -> None:
            with contextlib.suppress(UserError):
                file.fetched(self._recipe.hub)

        if file not in self._begun and not self._local(file).exists():
            self._begun[file] = threading.Thread(target=download, daemon=True)
            self._begun[file].start()

    def _read_published(self, file: hub.HubFile) -> Iterator[Document]:
        path = self._fetched(file)
        yield from self._read(Place(path), "")

    def _discard(self, file: hub.HubFile) -> None:
        if file.sha256 and not self.keep_files:  # the others are hashed at each start
            self._local(file).unlink(missing_ok=True)

    def _read(self, path: Place, section: str) -> Iterator[Document]:
        """Yields the documents of a file; of an archive, only those of the section if given."""
        keys = formats.Keys(self.text_key)
        if self.messages_key:
            keys = formats.Keys("", "", self.prompt_key, self.messages_key, self.rejected_key)
        found = formats.read(path, keys)
        if self.dataset in CORPORA and formats.is_new_table(path):  # its recipe makes the rows
            found = iter([formats.whole(path)])
        if section:
            found = (one for one in found if self._section(one.member) == section)
        return self._recipe.shape(found)


def _unpacked(path: Place) -> list[Place]:
    """Returns the archives inside OpenWebText's archive, sorted by name; else the file itself.

    They are unpacked first because their order in the archive is not that of the customary splits.
    """
    if not path.name.startswith("openwebtext.tar"):
        return [path]
    sha = contents.facts_of([path])[0][1]
    folder = cache_root() / f"openwebtext-{str(sha)[:16]}"
    with alone(folder.with_suffix(".lock"), "unpacking OpenWebText"), full_disk_named(folder):
        if not folder.exists():
            print(f"unpacking {path} into {folder}", flush=True)
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _unpack(path, partial)
            os.replace(partial, folder)
    return sorted(map(Place, folder.iterdir()))


def _unpack(path: Place, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(formats.INNER):
                    target = folder / pathlib.PurePosixPath(member.name).name
                    with target.open("wb") as own:
                        shutil.copyfileobj(archive.extractfile(member), own)
    except formats.ERRORS as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(f"{path} cannot be read: {error}. Fetch it again") from error
    if not any(folder.iterdir()):
        raise UserError(
            f"{path} contains no *{formats.INNER}: it is not the archive of OpenWebText"
        )
