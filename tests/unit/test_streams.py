"""Streams that are closed when the program starts, or lack characters."""

import io
import subprocess
import sys

from md4_jax.runtime.streams import Lasting


def test_a_file_does_not_get_what_was_for_a_closed_stream(tmp_path):
    """The next file that is opened would have the number of the stream."""
    code = (
        "from md4_jax.runtime import streams; streams.outlive(); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print('lost', flush=True); file.write('a')"
    )
    shell = f'exec {sys.executable} -c "$0" >&- 2>&-'
    ended = subprocess.run(["sh", "-c", shell, code], timeout=120, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "file").read_text() == "a"


def test_characters_that_the_locale_lacks_are_spelled():
    """And the rest of the text is not lost with them."""
    raw = io.BytesIO()
    stream = Lasting(io.TextIOWrapper(raw, "latin-1"))
    print("é → a", file=stream, flush=True)
    assert raw.getvalue().decode("latin-1") == "é \\u2192 a\n"
