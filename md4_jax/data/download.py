"""Downloads that resume, with a checksum."""

import hashlib
import http.client
import os
import pathlib
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

import tqdm

from md4_jax.data.cache import full_disk_named
from md4_jax.data.lock import alone
from md4_jax.protocols import UserError

TIMEOUT_SECONDS = 60
ATTEMPTS = 5  # in a row without new bytes
PAUSE_SECONDS = 2.0
BLOCK_BYTES = 1 << 18


class Cut(OSError):
    """Raised if a connection ends before the whole file is received."""


def fetch(
    url: str,
    path: pathlib.Path,
    *,
    sha256: str = "",
    size: int = 0,
    headers: Mapping[str, str] | None = None,
    instead: str = "",
) -> pathlib.Path:
    """Downloads a file to `path`, unless it exists; only a complete file gets this name.

    sha256   of the content, in hexadecimal; '': not published
    size     bytes; 0: the number that the server reports
    instead  advice for the error message: what to do without this download

    An interrupted download resumes where it ended, also in another process. Raises UserError with
    the address if it fails, and if size or checksum differ from the published ones.
    """
    if path.exists():  # also in a cache of somebody else, whose lock cannot be opened
        return path
    with alone(path.with_name(path.name + ".lock"), f"the download of {path.name}"):
        if path.exists():
            return path
        partial = path.with_name(path.name + ".partial")
        advice = f" {instead}" if instead else ""
        try:
            with full_disk_named(path.parent):
                _whole(url, partial, headers or {})
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{url} could not be downloaded ({error}).{advice}") from error
        found = partial.stat().st_size
        if size and found != size:
            partial.unlink()
            raise UserError(f"{url}: received {found:,} bytes instead of {size:,}.{advice}")
        if sha256 and (wrong := _sha256(partial)) != sha256:
            partial.unlink()
            raise UserError(
                f"{url}: the downloaded file has the SHA-256 {wrong} instead of {sha256}, so it "
                f"is damaged or another file. It was deleted: repeat the command.{advice}"
            )
        os.replace(partial, path)
        _tag(partial).unlink(missing_ok=True)
    return path


def _whole(url: str, partial: pathlib.Path, headers: Mapping[str, str]) -> None:
    """Downloads to `partial`, retrying as long as new bytes arrive."""
    failures = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            return _rest(url, partial, headers)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416 and before:  # there are no further bytes
                partial.unlink()
            elif error.code < 500:
                raise
            reason = error
        except (Cut, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            reason = error
        after = partial.stat().st_size if partial.exists() else 0
        failures = 0 if after > before else failures + 1
        if failures == ATTEMPTS:
            raise reason
        time.sleep(PAUSE_SECONDS)


def _rest(url: str, partial: pathlib.Path, headers: Mapping[str, str]) -> None:
    """Downloads the missing end of `partial`; the whole file if the server's has changed."""
    have = partial.stat().st_size if partial.exists() else 0
    tag = _tag(partial).read_text() if have and _tag(partial).exists() else ""
    wanted = {"Range": f"bytes={have}-", "If-Range": tag} if tag else {}
    request = urllib.request.Request(url, headers=wanted)
    for name, value in headers.items():  # a redirection must not get the login
        request.add_unredirected_header(name, value)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        goes_on = response.status == 206
        have = have if goes_on else 0
        _tag(partial).write_text(_version(response.headers))
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with (
            partial.open("ab" if goes_on else "wb") as file,
            tqdm.tqdm(
                desc=partial.stem, initial=have, total=total, unit="B", unit_scale=True
            ) as progress,
        ):
            while block := response.read(BLOCK_BYTES):
                file.write(block)
                progress.update(len(block))
    size = partial.stat().st_size
    if total is not None and size < total:
        raise Cut(f"the connection ended after {size:,} of {total:,} bytes")


def _version(headers: Mapping[str, str]) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def _tag(partial: pathlib.Path) -> pathlib.Path:
    """Returns the path of the file with the server's version tag (ETag)."""
    return partial.with_name(partial.name + ".etag")


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
