"""The page of a trace in a real browser, opened from disk."""

import html
import re
import shutil
import subprocess

import numpy as np
import pytest

from md4_jax.data.tokenizers import Characters
from md4_jax.generate import traces

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome"
    ),
]
TEXT = "a <b>\n</script>"
TOKENIZER = Characters("".join(sorted(set(TEXT))))
TITLE = 'Sample 0: "<i>" & more'


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of 15 positions, the first given; position n is drawn at step 2n, as sure as n / 20."""
    x, mask = TOKENIZER.encode(TEXT).astype(int), TOKENIZER.vocab_size
    drawn = np.arange(2 * len(x))[:, None] >= 2 * np.arange(len(x))
    z = np.where(drawn, x, mask)
    confidence = np.where(drawn, np.arange(len(x)) / 20, 0.0)
    confidence[:, 0] = 1.0
    path = traces.trajectory((z[None], confidence[None]), np.arange(len(x)) == 0, TOKENIZER)
    file = tmp_path_factory.mktemp("page") / "page.html"
    traces.html(path, file, TITLE)
    return file


@pytest.fixture(scope="module")
def opened(page, tmp_path_factory):
    """The elements of the page once its script has run."""
    profile = tmp_path_factory.mktemp("profile")

    def opened(fragment: str = "") -> str:
        command = [BROWSER, "--headless", "--disable-gpu", "--no-sandbox", "--dump-dom"]
        command += [f"--user-data-dir={profile}", page.as_uri() + fragment]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return opened


def tokens(dom: str) -> list[tuple[str, str, str]]:
    """(class, style, text) of each token in the order of its position."""
    found = re.findall(r'<span data-n="(\d+)"([^>]*)>([^<]*)</span>', dom)
    assert sorted(int(n) for n, _, _ in found) == list(range(len(found)))
    rows = sorted((int(n), attributes, html.unescape(text)) for n, attributes, text in found)
    kind = lambda a: re.search(r'class="token ?([^"]*)"', a)[1]  # noqa: E731
    return [(kind(a), re.search(r'style="([^"]*)"', a)[1], text) for _, a, text in rows]


def element(dom: str, name: str) -> str:
    """The text of the element of that id."""
    return html.unescape(re.search(rf'<(\w+) id="{name}"[^>]*>(.*?)</\1>', dom, re.DOTALL)[2])


def test_the_script_has_run(opened):
    """Title, slider, a span for each token and a line break where the text has one."""
    dom = opened()
    assert element(dom, "title") == TITLE == html.unescape(re.search("<title>(.*)</title>", dom)[1])
    assert re.search(r'<input id="slider"[^>]* max="14"', dom)  # 15 states
    assert len(tokens(dom)) == len(TEXT) and dom.count("<br>") == 1
    assert element(dom, "label") == "step 0: 0 of 14 tokens drawn"
    assert tokens(dom)[0] == ("prompt", tokens(dom)[0][1], "a")
    assert [(kind, text) for kind, _, text in tokens(dom)[1:]] == [("blank", "·")] * 14


@pytest.mark.parametrize(
    "step, drawn", [(0, 0), (1, 0), (2, 1), (14, 7), (15, 7), (28, 14), (999, 14)]
)
def test_a_step_in_the_address(step, drawn, opened):
    """The last state that is not later than the step; what it has new is marked."""
    dom = opened(f"#step={step}")
    found, text = tokens(dom), TEXT.replace("\n", "↵")
    assert element(dom, "label") == f"step {2 * drawn}: {drawn} of 14 tokens drawn"
    assert [word for _, _, word in found] == [*text[: drawn + 1], *"·" * (14 - drawn)]
    kinds = ["prompt", *[""] * (drawn - 1), *["new"] * bool(drawn), *["blank"] * (14 - drawn)]
    assert [kind for kind, _, _ in found] == kinds
    for n, (_, style, _) in enumerate(found):
        coloured = re.search(r"(?<!-)color: rgb\((.*?)\)", style)
        assert bool(coloured) == (0 < n <= drawn)
        if coloured:
            expected = traces.shades(21)[n].astype(int)
            assert np.abs(np.array(coloured[1].split(","), int) - expected).max() <= 1


def test_an_address_that_names_no_step(opened):
    assert element(opened("#elsewhere"), "label") == "step 0: 0 of 14 tokens drawn"
