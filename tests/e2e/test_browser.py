"""The pages of traces in a real browser, opened from disk."""

import json

import numpy as np
import pytest
from browser import AXE, BROWSER, Browser
from playgrounds import of_codes

from md4_jax.data.pixels import PixelDomain
from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.generate import pages, traces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome"
    ),
]
TEXT = "a <b>\n</script>"
TOKENIZER = Characters("".join(sorted(set(TEXT))))
TITLE = 'step_1: "<i>" & more'
DONE = "typeof trace !== 'undefined' && trace.index >= 0"


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


def path_of(z, confidence, domain=TOKENIZER, given=0):
    return traces.trajectory((z[None], confidence[None]), np.arange(z.shape[1]) < given, domain)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two samples of 15 positions.

    In both the first is given, and position n is drawn at step 2n, as sure as n / 20. The second is
    the reverse text; its position 3 is taken back at step 20 and drawn again at the end.
    """
    x, mask = TOKENIZER.encode(TEXT).astype(int), TOKENIZER.vocab_size
    drawn = np.arange(2 * len(x))[:, None] >= 2 * np.arange(len(x))
    confidence = np.where(drawn, np.arange(len(x)) / 20, 0.0)
    confidence[:, 0] = 1.0
    again = drawn.copy()
    again[20:-1, 3] = False
    z = [np.where(drawn, x, mask), np.where(again, x[::-1], mask)]
    both = [path_of(z[0], confidence, given=1)]
    both += [path_of(z[1], np.where(again, confidence, 0.0), given=1)]
    file = tmp_path_factory.mktemp("page") / "page.html"
    pages.write(both, file, TITLE, TOKENIZER)
    return file


@pytest.fixture
def opened(page, browser):
    def opened(fragment: str = "") -> Browser:
        browser.look()
        browser.events.clear()
        browser.open(page.as_uri() + fragment, DONE)
        return browser

    return opened


def tokens(browser) -> list[tuple[str, str, str]]:
    """(class, colour, text) of each token in the order of its position."""
    script = "trace.spans.map(s => [s.className.slice(6), s.style.color, s.textContent])"
    return [tuple(row) for row in browser.evaluate(script)]


def test_the_script_has_run(opened):
    """Title, slider and a cell for each token."""
    browser = opened()
    title = browser.text("#title")
    assert title == f"Sample 0 of {TITLE}" == browser.evaluate("document.title")
    assert browser.evaluate("trace.slider.max") == "14"  # 15 states
    assert browser.text(".label") == "step 0: 0 of 14 tokens drawn"
    assert tokens(browser)[0] == ("prompt", "", "a")
    assert [(kind, text) for kind, _, text in tokens(browser)[1:]] == [("blank", "·")] * 14
    assert browser.problems() == []


@pytest.mark.parametrize(
    "step, drawn", [(0, 0), (1, 0), (2, 1), (14, 7), (15, 7), (28, 14), (999, 14)]
)
def test_a_step_in_the_address(step, drawn, opened):
    """The last state that is not later than the step; what it has new is marked."""
    browser = opened(f"#step={step}")
    found, text = tokens(browser), TEXT.replace("\n", "↵")
    assert browser.text(".label") == f"step {2 * drawn}: {drawn} of 14 tokens drawn"
    assert [word for _, _, word in found] == [*text[: drawn + 1], *"·" * (14 - drawn)]
    kinds = ["prompt", *[""] * (drawn - 1), *["new"] * bool(drawn), *["blank"] * (14 - drawn)]
    assert [kind for kind, _, _ in found] == kinds
    for n, (_, colour, _) in enumerate(found):
        assert bool(colour) == (0 < n <= drawn)
        if colour:
            expected = traces.shades(21)[n].astype(int)
            rgb = np.array(colour.strip("rgb()").split(","), int)
            assert np.abs(rgb - expected).max() <= 1


def test_an_address_that_names_no_step(opened):
    assert opened("#elsewhere").text(".label") == "step 0: 0 of 14 tokens drawn"


def test_masks_do_not_show_the_layout_of_the_text(opened):
    """The places of all cells are the same in every state and for both samples."""
    browser = opened()
    boxes = "trace.spans.map(s => {const b = s.getBoundingClientRect();" \
        "return [b.left, b.top, b.width].map(Math.round)})"  # fmt: skip
    first = browser.evaluate(boxes)
    assert len({tuple(box) for box in first}) == 15 and len({box[2] for box in first}) == 1
    for state in ("trace.show(7)", "trace.show(14)", "choose(1)", "trace.show(9)"):
        browser.evaluate(f"void {state}")
        assert browser.evaluate(boxes) == first
    browser.fill("[aria-label='Layout of the text']", "lines")
    browser.evaluate("void choose(0)")
    widths = browser.evaluate("trace.spans.map(s => s.getBoundingClientRect().width)")
    assert np.ptp(widths[1:]) < 1 and browser.evaluate("trace.spans[5].textContent") == "·"


def test_any_sample_can_be_chosen_and_what_is_taken_back_is_seen(opened):
    browser = opened("#step=20&sample=1")
    assert browser.text("#title") == f"Sample 1 of {TITLE}"
    old = TEXT[::-1][3].replace("\n", "↵")
    assert tokens(browser)[3] == ("back", "", old)
    assert browser.text(".label") == "step 20: 9 of 14 tokens drawn, 1 taken back"
    browser.evaluate("void trace.show(12)")
    assert tokens(browser)[3] == ("blank again", "", "·")
    browser.evaluate("trace.view.focus()")
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        browser.press(key)
    assert browser.text(".detail") == (
        f"Position 3: not drawn yet; {json.dumps(old)} was taken back at step 20"
    )
    browser.fill("#sample", "0")
    assert browser.text("#title") == f"Sample 0 of {TITLE}" and browser.problems() == []


def test_details_by_keyboard(opened):
    browser = opened("#step=14")
    browser.evaluate("trace.slider.focus()")
    browser.press("ArrowRight")
    assert browser.text(".label") == "step 16: 8 of 14 tokens drawn"
    browser.evaluate("trace.view.focus()")
    browser.press("Home")
    assert browser.text(".detail") == 'Position 0: "a", given'
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.text(".detail") == ('Position 2: "<", drawn at step 4 with probability 0.1')
    browser.press("End")
    assert browser.text(".detail") == "Position 14: not drawn yet"
    assert browser.evaluate("trace.spans[14].classList.contains('here')")


def test_it_plays_to_the_end(opened):
    browser = opened("#step=24")
    browser.click(".play")
    assert browser.text(".play") == "Pause"
    browser.wait("trace.index === 14 && trace.play.textContent === 'Play'")
    browser.click(".play")
    browser.wait("trace.index === 0")
    browser.click(".play")
    assert browser.evaluate("location.hash").endswith("&sample=0")


def saved(browser, button: str) -> dict:
    """What a button saves: name, type, size, text of an SVG and sides of a PNG."""
    click = f"[...document.querySelectorAll('button')].find(b => b.textContent === '{button}')"
    return browser.evaluate(
        "new Promise(resolve => {save = async (blob, name) => {"
        "const svg = blob.type.includes('svg');"
        "const image = svg ? {} : await createImageBitmap(blob);"
        "resolve({name, type: blob.type, width: image.width, height: image.height,"
        f"text: svg ? await blob.text() : ''}})}};{click}.click()}})"
    )


def test_pictures_are_saved(opened):
    browser = opened("#step=20&sample=1")
    png, svg = saved(browser, "Save PNG"), saved(browser, "Save SVG")
    assert (png["name"], png["type"]) == ("page-sample1.png", "image/png")
    assert png["width"] >= 640 and png["height"] > 100
    assert svg["name"] == "page-sample1.svg" and svg["text"].startswith("<svg xmlns=")
    assert svg["text"].count("line-through") == 1 and "&lt;i&gt;" in svg["text"]
    assert "step 20: 9 of 14 tokens drawn, 1 taken back" in svg["text"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A colour image of 2 x 3 pixels, channel after channel."""
    domain = PixelDomain((2, 3, 3), 4)
    x = np.arange(18) % 4
    drawn = np.arange(19)[:, None] > np.arange(18)
    path = path_of(np.where(drawn, x, 4), np.where(drawn, 0.5, 0.0), domain)
    file = tmp_path_factory.mktemp("image") / "image.html"
    pages.write([path], file, TITLE, domain)
    return file


def test_the_page_of_an_image(images, browser):
    browser.look()
    browser.events.clear()
    browser.open(images.as_uri() + "#step=7", DONE)
    pixel = "[...trace.canvases[{}].getContext('2d').getImageData({}, {}, 1, 1).data]"
    assert browser.evaluate(pixel.format(0, 0, 0)) == [0, 85, 170, 255]
    assert browser.evaluate(pixel.format(0, 2, 0))[3] == 0
    assert browser.evaluate(pixel.format(1, 0, 0)) == [*traces.COLOURS[1], 255]
    assert browser.text(".label") == "step 7: 7 of 18 values drawn"
    browser.evaluate("trace.view.focus()")
    browser.press("Home")
    said = "Row 0, column 0: red level 0, drawn at step 1 with probability 0.5; green level 1"
    assert browser.text(".detail").startswith(said)
    browser.press("ArrowDown")
    assert browser.text(".detail").startswith("Row 1, column 0: red not drawn yet")
    assert not browser.evaluate("document.getElementById('choice').offsetParent")
    png, svg = saved(browser, "Save PNG"), saved(browser, "Save SVG")
    assert png["width"] > 100 and svg["text"].count("<rect") == 13
    assert (
        svg["text"].count(f"rgb({','.join(map(str, pages.BLANK))})") == 8
        and browser.problems() == []
    )


def test_the_page_of_codes(browser, tmp_path):
    """The image of the codes drawn so far, hatched where one is missing."""
    domain = of_codes().domain
    x, drawn = np.arange(6) * 3, np.arange(7)[:, None] > np.arange(6)
    path = path_of(np.where(drawn, x, 24), np.where(drawn, 0.5, 0.0), domain)
    pages.write([path, path], tmp_path / "codes.html", TITLE, domain)
    browser.look()
    browser.events.clear()
    browser.open((tmp_path / "codes.html").as_uri() + "#step=3", DONE)
    browser.wait("trace.image")
    data = "[...trace.canvases[{}].getContext('2d').getImageData(0, 0, 6, 4).data]"
    image = np.reshape(browser.evaluate(data.format(0)), (4, 6, 4)).astype(int)
    expected = domain.decode(np.where(drawn[3], x, 0)).astype(int)
    assert np.abs(image[:2, :, :3] - expected[:2]).mean() < 8 and (image[:2, :, 3] == 255).all()
    assert (image[2:, :, 3] == 0).all() and expected[2:].any()
    assert browser.text(".label") == "step 3: 3 of 6 codes drawn"
    browser.evaluate("trace.view.focus()")
    browser.press("Home")
    said = "Row 0, column 0: code 0, drawn at step 1 with probability 0.5"
    assert browser.text(".detail") == said
    browser.press("End")
    assert browser.text(".detail") == "Row 1, column 2: not drawn yet"
    browser.evaluate("trace.view.blur()")
    words = browser.evaluate("trace.final().map(symbol => trace.word(symbol))")
    assert words == [str(symbol) for symbol in x]
    png, svg = saved(browser, "Save PNG"), saved(browser, "Save SVG")
    assert png["width"] > 100 and svg["text"].count("<image") == 1
    # The paper, the hatched squares of the image, and the probabilities.
    assert svg["text"].count("<rect") == 1 + 3 + 6 and browser.problems() == []


def test_wide_tokens_and_noise_without_masks(browser, tmp_path):
    """Noise that is left has no probability; at the end all is as at the end."""
    rows = np.array([[65, 256, 66], [67, 256, 66], [67, 68, 66]])
    confidence = np.array([[0, 0, 0], [0.5, 0, 0.2], [0.5, 0.7, 0.2]])
    pages.write([path_of(rows, confidence, Bytes())], tmp_path / "a.html", TITLE, Bytes())
    browser.open((tmp_path / "a.html").as_uri() + "#step=1", DONE)
    assert browser.text(".label") == "step 1: 2 of 3 tokens as at the end"
    assert [kind for kind, _, _ in tokens(browser)] == ["new", "blank", ""]
    assert browser.evaluate("trace.view.classList.contains('wide')")


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not here: npm install --no-save axe-core")
@pytest.mark.parametrize("dark", [False, True])
def test_everyone_can_use_the_pages(dark, browser, page, images):
    browser.look(dark=dark)
    for address in (f"{page.as_uri()}#step=20&sample=1", f"{images.as_uri()}#step=7"):
        browser.open(address, DONE)
        assert browser.accessibility() == []
    browser.look(360, 640, dark=dark)
    browser.open(f"{page.as_uri()}#step=20&sample=1", DONE)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
