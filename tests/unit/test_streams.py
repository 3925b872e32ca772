"""Streams that are closed when the program starts, or lack characters."""

import io
import subprocess
import sys

import pytest

from md4_jax.runtime.streams import Lasting


@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- 2>&-"])
def test_a_file_does_not_get_what_was_for_a_closed_stream(closed, tmp_path):
    """The next file that is opened would have the number of the stream.

    Libraries in C and handlers of signals write to the number.
    """
    code = (
        "import os; from md4_jax.runtime import streams; streams.outlive(); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print('lost', flush=True); "
        "os.write(2, b'lost'); file.write('a')"
    )
    shell = f'exec {sys.executable} -c "$0" {closed}'
    ended = subprocess.run(
        ["sh", "-c", shell, code], timeout=120, check=False, stdout=subprocess.DEVNULL
    )
    assert ended.returncode == 0
    assert (tmp_path / "file").read_text() == "a"


def test_characters_that_the_locale_lacks_are_spelled():
    """And the rest of the text is not lost with them."""
    raw = io.BytesIO()
    stream = Lasting(io.TextIOWrapper(raw, "latin-1"))
    print("é → a", file=stream, flush=True)
    assert raw.getvalue().decode("latin-1") == "é \\u2192 a\n"
