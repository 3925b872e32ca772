"""Files of data.path: one file, a folder, a pattern, or an address in an object store."""

import contextlib
import glob
import itertools
import os
from collections.abc import Iterator

from md4_jax.data import hub
from md4_jax.data.sources import formats
from md4_jax.data.sources.splits import NoFile
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, is_remote, place

# Folders at the root of a disk that only the operating system may read.
OF_SYSTEM = ("lost+found", "System Volume Information", "$RECYCLE.BIN")


def matching(path: str | tuple[str, ...]) -> list[Place]:
    """Returns the files of data.path, sorted; UserError if there are none."""
    patterns = (path,) if isinstance(path, str) else tuple(path)
    found = sorted({file for pattern in patterns for file in _match(pattern)})
    if not found:
        said = f"data.path: no file matches {' or '.join(map(repr, patterns))}"
        local = [os.path.expanduser(x) for x in patterns if not is_remote(x)]
        if empty := [x for x in local if os.path.isdir(x)]:
            said += f": there is no file in the folder {os.path.abspath(empty[0])} or below it"
        elif several := next((x for x in patterns if "," in x and not is_remote(x)), ""):
            names = [name.strip() for name in several.split(",")]
            said += (
                ". For several files give a pattern in quotes, such as 'books/*.txt', or a list: "
                f'--config.data.path="{names}"'
            )
        elif len(local) == len(patterns) and all(x and not os.path.isabs(x) for x in local):
            said += (
                f" in {os.getcwd()}, where this command was started: start it where the file is, "
                "or give the whole path"
            )
        raise NoFile(said)
    for file in found:
        if not (is_remote(file) or os.access(file, os.R_OK)):
            raise UserError(f"data.path: the file {file} cannot be read: Permission denied")
    return found


def data_below(path: str) -> list[Place]:
    """Returns the files of data.path for a data set of the hub, sorted.

    In a folder, such as a clone of its repository, texts about the data set and files of other
    kinds are ignored. A file or a pattern is read as given. UserError if there are no files.
    """
    found = matching(path)
    if not place(path, "data.path").is_dir():
        return found
    data = [file for file in found if hub.is_data(file.name.lower(), formats.ENDINGS)]
    if not data:
        raise UserError(
            f"data.path: no file in the folder {path} or below it is a data file (.parquet, "
            f".jsonl, .ndjson, .json, .csv, .tsv, .txt or an archive). To read {found[0].name} "
            "anyway, set data.path to it, or to a pattern in quotes, such as 'pages/*.html'"
        )
    return data


def _match(pattern: str) -> list[Place]:
    if is_remote(pattern):
        return _match_objects(place(pattern, "data.path"))
    pattern = os.path.expanduser(pattern)
    _check_way(pattern)
    if os.path.isfile(pattern):
        return [Place(pattern)]  # even if its name contains a *
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**")
    _check_folders(pattern)
    return [Place(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def _check_way(path: str) -> None:
    """Raises UserError if a folder on the path may not be entered."""
    try:
        os.stat(path)
    except PermissionError as error:
        raise UserError(f"data.path: {path} cannot be read: {error.strerror}") from error
    except (OSError, ValueError):
        return  # there is no such file; `matching` reports it


def _check_folders(pattern: str) -> None:
    """Raises UserError if a folder that the pattern searches cannot be read, or contains itself.

    `glob` itself silently skips the first, and follows a link to the second about 40 times.
    """
    parts = os.path.normpath(pattern).split(os.sep)
    for number, part in enumerate(parts):
        if glob.has_magic(part):
            above = os.sep.join(parts[:number] or ["."]) or os.sep
            for top in glob.iglob(above, recursive=True):
                for folder in _below(top) if part == "**" else [top]:
                    _check_folder(folder)


def _below(folder: str) -> Iterator[str]:
    """Yields a folder and those below it that `glob` would search, each before those below it."""
    yield folder
    with contextlib.suppress(OSError):  # a file, or a folder that is gone
        with os.scandir(folder) as entries:
            paths = [entry.path for entry in entries if not entry.name.startswith(".")]
        for path in filter(os.path.isdir, paths):
            if os.path.islink(path):
                _check_link(path)
            yield from _below(path)


def _check_link(link: str) -> None:
    """Raises UserError for a link to a folder that contains the link."""
    way = [os.path.abspath(link)]
    while way[-1] != os.path.dirname(way[-1]):
        way.append(os.path.dirname(way[-1]))
    if os.path.realpath(link) in map(os.path.realpath, way[1:]):
        raise UserError(
            f"data.path: the link {link} leads to {os.path.realpath(link)}, which contains it, so "
            "its files would be read again and again. Remove the link, or leave it out by a "
            "pattern such as 'books/*.txt'"
        )


def _check_folder(folder: str) -> None:
    """Raises UserError for a folder that cannot be listed or entered."""
    if os.path.basename(os.path.normpath(folder)) in OF_SYSTEM:
        return
    try:
        with os.scandir(folder):
            os.stat(os.path.join(folder, os.curdir))
    except PermissionError as error:
        folder = os.path.normpath(folder)
        raise UserError(
            f"data.path: the folder {folder} cannot be read: {error.strerror}. Let this user read "
            "it, or leave it out by a pattern such as 'books/*.txt'"
        ) from error
    except OSError:
        return  # a file, or a folder that is gone


def _match_objects(pattern: Place) -> list[Place]:
    """Returns the objects at an address, below it or matching it."""
    if exists(pattern) and not pattern.is_dir():
        return [pattern]
    bucket = Place(*pattern.parts[:3])
    within = "/".join(pattern.parts[3:])
    found = bucket.glob(f"{within}/**" if pattern.is_dir() else within)
    return [path for path in found if not path.is_dir()]


def name_below(pattern: str, path: Place) -> str:
    """Returns the path of a file relative to data.path, or to the fixed part of its pattern."""
    both = zip(Place(os.path.expanduser(pattern)).parts, path.parts, strict=False)
    known = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
    return "/".join(path.parts[known:]) or path.name
