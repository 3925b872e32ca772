"""What the tests of the data room share."""

import http.server
import json
import pathlib
import threading

import pytest

from md4_jax.data import download

SHARED = pathlib.Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own, so that nothing is downloaded or found by chance."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("MD4_JAX_CACHE", str(directory))
    return directory


@pytest.fixture
def shared():
    """Path of a file of the real data; the test is skipped where it is not."""

    def find(name: str) -> pathlib.Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"needs the real data ../shared/data/{name}")
        return path

    return find


@pytest.fixture
def tiny_bpe(tmp_path):
    """A directory with a byte-level BPE of three merges in Hugging Face's file names."""
    from tokenizers import pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*symbols, "he", "ll", "hell", "<|endoftext|>"]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\n")
    return tmp_path


class Server(http.server.ThreadingHTTPServer):
    """Web server of this machine, with ranges and with faults.

    files    {path: content}
    codes    {path: status of the refusal}
    links    {path: Link header}
    cut      bytes of an answer after which the connection ends; 0: never
    asked    (path, Range header) of each request
    headers  of the last request
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.codes, self.links = {}, {}, {}
        self.asked, self.cut, self.headers = [], 0, {}
        self.tag = '"one"'

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server, range_ = self.server, self.headers.get("Range", "")
        server.asked.append((self.path, range_))
        server.headers = dict(self.headers)
        content = server.files.get(self.path)
        if content is None:
            return self.send_error(server.codes.get(self.path, 404))
        goes_on = bool(range_) and self.headers.get("If-Range") == server.tag
        first = int(range_.removeprefix("bytes=").rstrip("-")) if goes_on else 0
        if goes_on and first >= len(content):
            return self.send_error(416)
        self.send_response(206 if goes_on else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", server.tag)
        self.send_header("Link", server.links.get(self.path, ""))
        self.end_headers()
        self.wfile.write(content[first : first + server.cut] if server.cut else content[first:])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.0)
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()
