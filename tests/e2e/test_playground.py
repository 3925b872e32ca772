"""The playground in a real browser: each action, from the page to the model and back."""

import json
import urllib.parse

import numpy as np
import pytest
from browser import AXE, BROWSER, Browser
from PIL import Image
from playgrounds import of_codes, of_images, of_text, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome"
    ),
]
READY = "document.body.dataset.ready"
IDLE = "document.getElementById('stop').disabled"
DONE = f"{IDLE} && document.getElementById('status').textContent.startsWith('Done')"


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def address():
    with served(of_text()) as address:
        yield address


@pytest.fixture(scope="module")
def pictures():
    with served(of_images()) as address:
        yield address


@pytest.fixture
def page(browser, address):
    """The page, with 8 steps."""
    browser.look()
    browser.open(address, READY)
    browser.fill("#steps-0", 8)
    browser.events.clear()
    yield browser
    assert browser.problems() == []


def write(browser, text: str, count: int) -> None:
    browser.fill("#text", text)
    browser.wait(f"tokens.length === {count}")


def fill_in(browser) -> None:
    browser.click("#fill")
    browser.wait(DONE)


def result(browser, n: int = 0) -> str:
    return browser.evaluate(f"panes[{n}].trace.spans.map(s => s.textContent).join('')")


def test_words_are_hidden_and_filled_in(page):
    write(page, "to be _r not", 12)
    words = page.evaluate("[...document.querySelectorAll('#strip button')].map(b => b.textContent)")
    assert words == ["to", "be", "_", "r", "not"]
    page.click("#strip button:nth-child(2)")
    assert page.evaluate("document.querySelector('#strip button:nth-child(2)').ariaPressed")
    assert page.text("#count") == "12 of 32 characters, 3 hidden"
    fill_in(page)
    found = result(page)
    assert len(found) == 12 and found[:3] == "to " and found[5] == " " and found[7:] == "r not"
    assert page.text("#status") == f"Done: {found.replace('↵', chr(10))}"
    assert page.evaluate("panes[0].trace.frames.length") > 1
    page.evaluate("panes[0].trace.view.focus()")
    page.press("End")
    assert page.text("#pane-0 .detail") == 'Position 11: "t", given'


def test_what_was_typed_last_is_filled_in(page):
    """The tokens of the text come later: the hidden ones of the text before are not asked for."""
    write(page, "to be or not", 12)
    page.click("#hide-all")
    page.evaluate(
        "sent = []; { const whole = fetch; window.fetch = (path, options) => "
        "(sent.push([path, JSON.parse(options.body)]), whole(path, options)); }"
    )
    page.evaluate("document.getElementById('text').value = 'to_'; void fill()")
    page.wait(DONE)
    sent = page.evaluate("sent")
    assert [path for path, _ in sent] == ["/api/tokens", "/api/sample"]
    assert (sent[1][1]["text"], sent[1][1]["hidden"]) == ("to_", [0, 1])
    assert len(result(page)) == 3
    page.evaluate("document.getElementById('text').value = 'é'; void fill()")
    page.wait(f"{IDLE} && document.getElementById('status').classList.contains('error')")
    assert "é" in page.text("#status") and len(page.evaluate("sent")) == 3
    page.events.clear()  # Chromium reports the answer 400 as an error of the network


def test_it_is_seen_as_it_is_drawn(page):
    """The first state is shown before the last one is there."""
    page.fill("#steps-0", 64)
    page.evaluate(
        "seen = []; new MutationObserver(() => seen.push(panes[0]?.trace.index)).observe("
        "document.getElementById('pane-0'), {childList: true, subtree: true, characterData: true})"
    )
    fill_in(page)
    assert len(set(page.evaluate("seen.filter(i => i !== undefined)"))) > 5


def test_single_characters_and_all_and_none(page):
    write(page, "to be", 5)
    page.click("#singly")
    page.click("#strip button:nth-child(4)")
    assert page.evaluate("[...hidden]") == [3]
    page.click("#hide-all")
    assert page.text("#count") == "5 of 32 characters, 5 hidden"
    page.click("#show-all")
    assert page.text("#count") == "5 of 32 characters, 0 hidden"


def test_script_tags_are_text(page):
    tags = "<img src=x onerror=f()></script>"
    page.evaluate("window.f = () => { window.ran = true; }")
    write(page, tags, 32)
    fill_in(page)
    assert result(page) == tags
    page.click("#costs")
    page.wait("!document.getElementById('heat').hidden")
    assert page.text("#heat-tokens") == tags
    assert not page.evaluate("window.ran || document.querySelector('img')")


def test_two_samplers_side_by_side(page):
    page.click("#compare")
    page.fill("#sampler-1", "remask")
    page.fill("#strategy-1", "rescale")
    page.fill("#eta-1", 1)
    page.fill("#steps-1", 16)
    fill_in(page)
    titles = [page.text(f"#pane-title-{n}") for n in (0, 1)]
    assert titles[0].startswith("ancestral") and titles[1].startswith("remask, rescale, 1")
    assert len(result(page, 0)) == len(result(page, 1)) == 32 and result(page, 0) != result(page, 1)
    back = "panes[1].trace.frames.some((_, i) => (panes[1].trace.show(i), " \
        "document.querySelector('#pane-1 .token.back')))"  # fmt: skip
    assert page.evaluate(f"Boolean({back})")


def test_a_link_holds_the_settings(page, address):
    write(page, "to be", 5)
    page.click("#strip button:first-child")
    for selector, value in (("#seed", 5), ("#temperature", 0.5), ("#label", 1), ("#guidance", 2),
                            ("#sampler-0", "confidence"), ("#score-0", "margin")):  # fmt: skip
        page.fill(selector, value)
    fill_in(page)
    before, link = result(page), page.evaluate("location.href")
    found = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(link).fragment))
    assert found["text"] == "to be" and found["hidden"] == "0.1" and found["seed"] == "5"
    page.open(link, READY)
    assert page.evaluate("location.href") == link and page.text("#count").endswith("2 hidden")
    assert page.evaluate("document.getElementById('score-0').value") == "margin"
    fill_in(page)
    assert result(page) == before
    page.open(f"{address}#sampler-0=../etc&steps-0=7&seed=x&hidden=99.a&picture=%&x=1", READY)
    assert page.evaluate("document.getElementById('sampler-0').value") == "ancestral"


def value_of(browser, *names: str) -> list[str]:
    values = "names => names.map(id => document.getElementById(id).value)"
    return browser.evaluate(f"({values})({list(names)})")


def test_a_link_says_the_same_in_a_page_with_other_settings(page):
    """It leaves out usual values, which are not those that the page has by now."""
    link = page.evaluate("location.href")
    write(page, "to be", 5)
    page.click("#hide-all")
    page.click("#continues")
    page.click("#compare")
    changed = dict(seed=5, temperature=0.5, label=1, guidance=2, length=16) | {"steps-0": 4}
    for name, value in (changed | {"sampler-0": "confidence", "score-0": "margin"}).items():
        page.fill(f"#{name}", value)
    page.evaluate(f"location.href = {link!r}")
    page.wait("tokens.length === 0")
    assert value_of(page, *changed, "sampler-0") == ["0", "1", "-1", "1", "32", "8", "ancestral"]
    assert page.evaluate("location.href") == link and page.text("#count") == ""
    page.fill("#sampler-0", "confidence")
    page.fill("#score-0", "margin")
    page.evaluate("location.hash = 'sampler-0=confidence&text=a&seed=3'")
    page.wait("tokens.length === 1")
    assert value_of(page, "score-0", "steps-0", "seed") == ["probability", "64", "3"]


def test_the_link_to_the_results_changes_no_settings(page):
    write(page, "to be", 5)
    page.click("#hide-all")
    page.evaluate("gone = new Promise(done => addEventListener('hashchange', done)); 0")
    page.click(".skip")
    assert page.evaluate("gone.then(() => location.hash)") == "#results"
    assert page.evaluate("hidden.size") == 5 and value_of(page, "steps-0") == ["8"]


def test_the_heat_map(page):
    write(page, "to be", 5)
    page.fill("#label", 0)
    page.click("#costs")
    page.wait("!document.getElementById('heat').hidden")
    said = page.text("#heat-said")
    assert "bits per character" in said and "an upper bound" in said and "±" in said
    shares = page.evaluate("heat.spans.map(s => s.style.background)")
    assert len(shares) == 5 and any("100%" in share for share in shares)
    page.evaluate("document.getElementById('heat-tokens').focus()")
    page.press("End")
    assert page.text("#heat-detail").startswith('Position 4, "e": ')


def test_mistakes_are_sentences(page):
    page.fill("#text", "é")
    page.wait("document.getElementById('status').classList.contains('error')")
    assert "é" in page.text("#status")
    write(page, "a" * 33, 33)
    page.click("#fill")
    page.wait(f"{IDLE} && document.getElementById('status').textContent.includes('33 characters')")
    page.evaluate("void 0")
    page.events.clear()  # Chromium reports the answer 400 as an error of the network


def test_stop(page):
    """The page itself stops at the second state: a slow browser could come after the last one."""
    page.fill("#steps-0", 1024)
    page.evaluate(
        "watch = new MutationObserver(() => { if (panes[0]?.trace.frames.length > 1) "
        "{ watch.disconnect(); document.getElementById('stop').click(); } }); watch.observe("
        "document.getElementById('pane-0'), {childList: true, subtree: true, characterData: true})"
    )
    page.click("#fill")
    page.wait(f"{IDLE} && document.getElementById('status').textContent === 'Stopped.'")
    assert 1 < page.evaluate("panes[0].trace.frames.length") < 1024
    page.fill("#steps-0", 8)
    fill_in(page)


def test_by_keyboard_alone(page):
    page.evaluate("document.getElementById('text').focus()")
    for letter in "ab":
        page.press(letter)
    page.wait("tokens.length === 2")
    page.press("Tab")
    assert page.evaluate("document.activeElement.parentElement.id") == "strip"
    page.press(" ", "Space")
    assert page.text("#count") == "2 of 32 characters, 2 hidden"
    page.evaluate("document.getElementById('fill').focus()")
    page.press(" ", "Space")
    page.wait(DONE)
    assert len(result(page)) == 2


def test_a_part_of_a_picture_is_filled_in(browser, pictures):
    browser.look()
    browser.open(pictures, READY)
    browser.fill("#steps-0", 8)
    fill_in(browser)
    assert browser.text("#covered") == "From noise: all pixels are drawn"
    browser.click("#take")
    canvas = "document.getElementById('picture')"
    browser.evaluate(f"{canvas}.focus()")
    browser.press("ArrowRight")
    browser.press(" ", "Space")
    assert browser.text("#covered") == "1 of 16 pixels are hidden"
    browser.click("#cover-half")
    before = browser.evaluate("[...picture.values]")
    fill_in(browser)
    found = browser.evaluate("picture.last")
    assert all(found[i] == before[i] for i in range(16) if i % 4 < 2)
    box = browser.evaluate(f"(b => [b.left, b.top, b.width])({canvas}.getBoundingClientRect())")
    at = {"x": box[0] + box[2] / 8, "y": box[1] + box[2] / 8, "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
        browser.send("Input.dispatchMouseEvent", type=kind, **at)
    assert browser.evaluate("picture.cover[0]") == 1
    link = browser.evaluate("location.href")
    browser.open(link, READY)
    assert browser.text("#covered") == "9 of 16 pixels are hidden"
    browser.evaluate("location.hash = 'seed=1'")
    browser.wait("document.getElementById('seed').value === '1'")
    assert browser.text("#covered") == "From noise: all pixels are drawn"
    assert browser.problems() == []


def test_a_picture_from_a_file(browser, pictures, tmp_path):
    Image.new("RGB", (40, 20), (255, 255, 255)).save(tmp_path / "white.png")
    browser.open(pictures, READY)
    choose(browser, tmp_path / "white.png")
    browser.wait("picture.values")
    assert browser.evaluate("[...picture.values]") == [255] * 16
    assert browser.text("#status") == "white.png: 40 x 20 pixels, shown as 4 x 4"


def choose(browser, file) -> None:
    browser.send("DOM.enable")
    root = browser.send("DOM.getDocument")["root"]["nodeId"]
    node = browser.send("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    browser.send("DOM.setFileInputFiles", nodeId=node, files=[str(file)])


def test_codes_of_a_picture_are_filled_in(browser, tmp_path):
    """The picture is what the autoencoder makes of the file; the hidden codes are drawn."""
    model = of_codes()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "own.png")
    browser.look()
    browser.events.clear()
    with served(model) as address:
        browser.open(address, READY)
        assert browser.text("#covered") == "From noise: all codes are drawn"
        browser.fill("#steps-0", 8)
        choose(browser, tmp_path / "own.png")
        said = "own.png: 6 x 4 pixels, shown as 6 x 4, as the autoencoder makes them"
        browser.wait(f"document.getElementById('status').textContent === {json.dumps(said)}")
        given = browser.evaluate("picture.values")
        assert given == model.domain.encode(pixels).tolist()
        browser.click("#cover-half")
        assert browser.text("#covered") == "2 of 6 codes are hidden"
        data = "document.getElementById('picture').getContext('2d').getImageData(0, 0, 6, 4).data"
        image = np.reshape(browser.evaluate(f"[...{data}]"), (4, 6, 4)).astype(int)
        decoded = model.domain.decode(np.array(given)).astype(int)
        assert np.abs(image - np.pad(decoded, [(0, 0)] * 2 + [(0, 1)]))[:, :4, :3].mean() < 8
        assert (image[..., 3] == [[255] * 4 + [0] * 2] * 4).all()
        fill_in(browser)
        # Whichever step is shown, the last one is taken.
        browser.evaluate("void panes[0].trace.show(0)")
        browser.click("#take")
        browser.wait("document.getElementById('covered').textContent.startsWith('0')")
        found = browser.evaluate("picture.values")
        assert [found[n] for n in (0, 1, 3, 4)] == [given[n] for n in (0, 1, 3, 4)]
        assert max(found) < 24
        assert browser.evaluate("picture.image.src === panes[0].trace.frames.at(-1).picture")
    assert browser.problems() == []


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not here: npm install --no-save axe-core")
@pytest.mark.parametrize("dark", [False, True])
def test_everyone_can_use_the_page(dark, browser, address, pictures):
    """No violation, with results on the page; nothing is wider than a phone of 360 pixels."""
    browser.look(dark=dark)
    browser.open(f"{address}#text=to+be+or+not&hidden=3.4&compare=1&sampler-1=remask", READY)
    fill_in(browser)
    browser.click("#costs")
    browser.wait("!document.getElementById('heat').hidden")
    browser.click("#fill")
    browser.wait(DONE)
    browser.evaluate("document.getElementById('heat').hidden = false")
    assert browser.accessibility() == []
    browser.look(360, 640, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    browser.open(pictures, READY)
    fill_in(browser)
    assert browser.accessibility() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
