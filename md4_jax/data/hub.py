"""Files of a data set on the Hugging Face hub, by its web API."""

import http.client
import json
import os
import pathlib
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import NamedTuple

from md4_jax.data.cache import new_file
from md4_jax.data.download import TIMEOUT_SECONDS, fetch
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import cache_root

FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".txt", ".txt.gz")
# The hub converts other formats to Parquet, on a separate branch.
BRANCHES = ("main", "refs/convert/parquet")
# Names of texts about a data set, which are not part of it. Names with a number, or with more than
# one word after the first, are those of documents, such as notice_2020_0001.txt.
ABOUT = re.compile(
    r"(?:(?:licen[cs]e|readme|copying|requirements)(?:[-_.][a-z]+)?|notice|changelog|citation)"
    r"\.txt(?:\.gz|\.xz)?",
    re.IGNORECASE,
)
# Files that the package `datasets` writes beside the data.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


class HubFile(NamedTuple):
    """File of a data set: path in it, address, bytes, and SHA-256 ('' for a small file)."""

    name: str
    url: str
    size: int
    sha256: str

    def local(self, dataset: str) -> pathlib.Path:
        """Returns the path for the downloaded file; it may not exist yet.

        UserError for a name that leaves the folder of the data set, as a server may give it.
        """
        if self.name.startswith("/") or ".." in self.name.split("/"):
            raise UserError(
                f"data.dataset={dataset}: {_address()} names the file {self.name!r}, which would "
                "be written outside of the cache directory. Use another data set or server"
            )
        return cache_root() / "hub" / dataset / self.name

    def fetched(self, dataset: str) -> pathlib.Path:
        """Returns the path of the file after downloading it if it is missing."""
        path = self.local(dataset)
        advice = f"Fetch it elsewhere and put it at {path}"
        return fetch(self.url, path, sha256=self.sha256, headers=_login(), instead=advice)


def files(dataset: str, folder: str) -> list[HubFile]:
    """Lists the text files of a data set below a folder, sorted by name.

    The first call queries the hub and stores the answer, so that later calls need no network and
    return the same files. UserError if the data set does not exist or access is denied.
    """
    kept = cache_root() / "hub" / dataset / _listing(folder)
    found = [file for file in _kept(kept) if is_data(file.name)]  # older versions kept all texts
    if found:
        return found
    for branch in BRANCHES:
        found = found or _listed(dataset, folder, branch)
    if not found:
        raise UserError(
            f"data.dataset={dataset} has no text files ({', '.join(FORMATS)}) in the folder "
            f"{folder!r} (data.folder)"
        )
    with new_file(kept) as temporary:
        temporary.write_text(json.dumps(found))
    return found


def model_file(model: str, name: str) -> pathlib.Path:
    """Returns the path of a file of a model, OWNER/NAME, after downloading it if it is missing."""
    path = cache_root() / "hub" / "models" / model / name
    url = f"{_address()}/{model}/resolve/main/{_quoted(name, '/')}"
    return fetch(url, path, headers=_login(), instead=f"Fetch it elsewhere and put it at {path}")


def _listing(folder: str) -> str:
    """Returns the name of the file that stores the listing of a folder, unique to the folder."""
    return _quoted(folder, "/").replace("_", "%5F").replace("/", "_") + ".listing.json"


def _kept(path: pathlib.Path) -> list[HubFile]:
    """Returns the files of a stored listing; [] if there is none or it is damaged."""
    if not path.exists():
        return []
    try:
        return [HubFile(*fields) for fields in json.loads(path.read_text())]
    except (ValueError, TypeError):
        return []


def _listed(dataset: str, folder: str, branch: str) -> list[HubFile]:
    base = f"{_address()}/api/datasets/{_quoted(dataset, '/')}"
    try:
        revision = json.loads(_ask(f"{base}/revision/{_quoted(branch)}")[0])["sha"]
        page, entries = f"{base}/tree/{revision}/{_quoted(folder, '/')}?recursive=true", []
        while page:
            text, page = _ask(page)
            entries += json.loads(text)
    except urllib.error.HTTPError as error:
        error.close()
        if branch != BRANCHES[0]:
            return []
        raise _refusal(dataset, folder, error) from error
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise UserError(
            f"data.dataset={dataset}: {_address()} did not answer ({error}). Without a network "
            "put its files into a folder and set data.path to it"
        ) from error
    prefix = f"{_address()}/datasets/{_quoted(dataset, '/')}/resolve/{revision}/"
    return [
        HubFile(
            e["path"], prefix + _quoted(e["path"], "/"), e["size"], e.get("lfs", {}).get("oid", "")
        )
        for e in sorted(entries, key=lambda entry: entry["path"])
        if e["type"] == "file" and is_data(e["path"])
    ]


def is_data(name: str, endings: tuple[str, ...] = FORMATS) -> bool:
    """Returns whether a file with this name is data, and not a text about the data set.

    endings: file name endings that count as data
    """
    own = name.rpartition("/")[2]
    return own.endswith(endings) and own not in DESCRIPTIONS and not ABOUT.fullmatch(own)


def _ask(url: str) -> tuple[str, str]:
    """Returns (answer, address of the next page or '')."""
    request = urllib.request.Request(url, headers=_login())
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        following = re.search(r'<([^>]+)>;\s*rel="next"', response.headers.get("Link") or "")
        return response.read().decode(), following.group(1) if following else ""


def _refusal(dataset: str, folder: str, error: urllib.error.HTTPError) -> UserError:
    if error.code == 404 and folder:
        what = f"there is no such data set, or it has no folder {folder!r} (data.folder)"
    else:
        what = "there is no such data set, or it needs a login"
    return UserError(
        f"data.dataset={dataset}: {what} (HTTP {error.code} of {_address()}). Check the name. "
        "For a private data set, or one with terms to accept, accept them on its page and set "
        "the environment variable HF_TOKEN"
    )


def _address() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _login() -> dict[str, str]:
    token = os.environ.get("HF_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _quoted(text: str, safe: str = "") -> str:
    return urllib.parse.quote(text, safe=safe)
