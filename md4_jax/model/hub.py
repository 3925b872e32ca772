"""Download and upload of folders and files on the Hugging Face hub, with its cache."""

import os
import pathlib
import re
import socket
import urllib.parse
from typing import Any

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.tensors import TORCH

MARK = "hf:"
ENDING = ".safetensors"
ENDINGS = (ENDING, *TORCH)  # of a file that may be named itself
# A checkpoint's files; none of them runs code when it is read. Templates run in a sandbox.
BESIDE = ("*.json", "*.jinja", "*.txt", "*.bpe", "README.md")


def snapshot(name: str) -> Place:
    """Returns a folder or a file in the hub's cache, downloaded if needed.

    name  USER/NAME or USER/NAME@REVISION for the folder, whose subfolders are not fetched;
          USER/NAME/FILE.safetensors or USER/NAME@REVISION/FILE.safetensors for one file, which may
          be in a subfolder, and the small ones beside it. It may end in .pt or .pth too
    """
    repository, revision, file = parts(name.removeprefix(MARK))
    above = file.rpartition("/")[0]
    # Subfolders may contain many other models.
    wanted = {"ignore_patterns": [f"*/*{ENDING}"], "allow_patterns": [f"*{ENDING}", *BESIDE]}
    if file:
        beside = [f"{above}/{each}" for each in BESIDE] if above else list(BESIDE)
        wanted = {"allow_patterns": [file, *beside]}
    library = _library()
    try:
        if re.fullmatch("[0-9a-f]{40}", revision):
            _ask_for_commit(library, repository, revision)
        folder = Place(library.snapshot_download(repository, revision=revision or None, **wanted))
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"{MARK}{repository} is not in the hub's cache and cannot be fetched: {_first(error)}"
        ) from error
    if file and not (folder / file).exists():
        raise UserError(f"{MARK}{repository} has no file {file}")
    return folder / file if file else folder


def parts(name: str) -> tuple[str, str, str]:
    """Splits USER/NAME@REVISION/FILE.safetensors: (USER/NAME, REVISION, FILE.safetensors).

    Revision and file may be missing, and are "" then. Before a file a revision has no slash.
    """
    if name.endswith(ENDINGS):
        match = re.fullmatch(r"([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", name)
        if match is None:
            raise UserError(f"{MARK}{name} must be {MARK}USER/NAME/FILE{ENDING}")
        return match[1], match[2] or "", match[3]
    repository, _, revision = name.partition("@")
    return repository, revision, ""


def _ask_for_commit(library: Any, repository: str, commit: str) -> None:
    """Raises the library's error unless the commit is in the cache, or the hub answers.

    Without a network, the library itself tries to list the files of a commit six times within 23 s,
    with a warning each time; for a branch it tries once.
    """
    from huggingface_hub import constants

    name = f"models--{repository.replace('/', '--')}"
    if not (pathlib.Path(constants.HF_HUB_CACHE) / name / "snapshots" / commit).is_dir():
        library.HfApi().repo_info(repository, revision=commit, timeout=10)


def push(folder: Place, name: str, *, private: bool) -> str:
    """Uploads a folder as USER/NAME and returns its address."""
    library = _library()
    try:
        interface = library.HfApi()
        address = interface.create_repo(name, private=private, exist_ok=True)
        interface.upload_folder(repo_id=name, folder_path=str(folder))
    except Exception as error:
        raise UserError(f"{name} cannot be pushed to the hub: {_first(error)}") from error
    return str(address)


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError("the hub needs a package: pip install -e '.[hub]'") from error
    return huggingface_hub


def _first(error: BaseException) -> str:
    """Returns the first line of an error of the library, or that the hub has no address here."""
    cause = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
            return f"the address of {address.netloc} was not found. Is there a network?"
        cause = cause.__cause__ or cause.__context__
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return first.removeprefix("Got: ")[:200]
