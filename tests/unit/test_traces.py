"""Pictures of samples: what is in them, not how they look."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image

from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.generate import pages, traces

TOKENIZER = Characters("ab\n<")
A, B, LINE, LESS, MASK = range(5)
GIVEN = np.array([True, False, False])


def frames(*windows):
    """(z, confidence), each [W, F, L], from rows of (symbols, probabilities)."""
    z = np.array([[row[0] for row in window] for window in windows])
    return z, np.array([[row[1] for row in window] for window in windows], np.float32)


@pytest.fixture
def path():
    """'a' is given; '<' comes at step 2 and a line break at step 3 of 5."""
    return traces.trajectory(
        frames(
            [
                ([A, MASK, MASK], [1, 0, 0]),
                ([A, MASK, MASK], [1, 0, 0]),
                ([A, LESS, MASK], [1, 0.25, 0]),
                ([A, LESS, LINE], [1, 0.25, 0.75]),
                ([A, LESS, LINE], [1, 0.25, 0.75]),
                ([A, LESS, LINE], [1, 0.25, 0.75]),
            ]
        ),
        GIVEN,
        TOKENIZER,
    )


def words_of(path):
    return [[path.words[i] if i >= 0 else None for i in row] for row in path.symbol]


def test_equal_frames_are_joined_and_keep_their_step(path):
    assert path.step.tolist() == [0, 2, 3]
    assert words_of(path) == [["a", "·", "·"], ["a", "<", "·"], ["a", "<", "↵"]]
    np.testing.assert_array_equal(path.confidence[1:], [[1, 0.25, 0], [1, 0.25, 0.75]])
    assert path.words[path.mask] == "·" and len(path.words) == 4


def test_a_path_without_a_change_has_one_frame():
    still = traces.trajectory(frames([([A, B], [1, 1])] * 4), np.ones(2, bool), TOKENIZER)
    assert still.step.tolist() == [0] and still.mask == -1


def test_joined_frames_have_the_probabilities_of_the_last():
    """Where every step draws all positions again, what stays was drawn at the end."""
    rows = [([A, B], [0, 0]), ([A, A], [0.2, 0.3]), ([A, A], [0.8, 0.9])]
    drawn = traces.trajectory(frames(rows), np.zeros(2, bool), TOKENIZER)
    assert drawn.step.tolist() == [0, 1]
    np.testing.assert_allclose(drawn.confidence, [[0, 0], [0.8, 0.9]], rtol=1e-6)


def test_windows_go_on_from_one_another():
    """The second begins where the first ended; idle steps at the end of one are not counted."""
    first = [([MASK, MASK, -1], [0, 0, 0]), ([A, MASK, -1], [1, 0, 0]), ([A, B, -1], [1, 1, 0])]
    first.append(first[-1])
    second = [*[([A, B, MASK], [1, 1, 0])] * 3, ([A, B, A], [1, 1, 0.5])]
    two = traces.trajectory(frames(first, second), np.zeros(3, bool), TOKENIZER)
    assert two.step.tolist() == [0, 1, 2, 5]
    assert words_of(two)[2:] == [["a", "b", None], ["a", "b", "a"]]
    z, confidence = frames(first, second)
    number = [np.array([0, 1, 2]), np.array([0, 3])]
    left = [[x[n] for x, n in zip(each, number, strict=True)] for each in (z, confidence)]
    again = traces.trajectory(left, np.zeros(3, bool), TOKENIZER, number)
    for one, other in zip(dataclasses.astuple(two), dataclasses.astuple(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (two.symbol[:3, 2] == -1).all() and two.label(2) == "step 2: 2 of 3 tokens drawn"


def test_what_is_still_open(path):
    assert path.open(0).tolist() == [False, True, True]
    assert path.open(2).tolist() == [False, False, False]
    assert [path.label(i) for i in range(3)] == [
        "step 0: 0 of 2 tokens drawn",
        "step 2: 1 of 2 tokens drawn",
        "step 3: 2 of 2 tokens drawn",
    ]


def test_noise_that_was_never_drawn_is_open_too():
    rows = [([A, B], [0, 0]), ([A, A], [0, 0.3])]
    noise = traces.trajectory(frames(rows), np.zeros(2, bool), TOKENIZER)
    assert noise.mask == -1
    assert noise.open(0).tolist() == [True, True] and noise.open(1).tolist() == [True, False]
    labels = [noise.label(i) for i in (0, 1)]
    assert labels == [f"step {n}: {n + 1} of 2 tokens as at the end" for n in (0, 1)]


def test_words():
    assert traces.word(Characters("_"), 0) == "_" and traces.word(Characters("_"), 1) == "·"
    assert traces.word(Bytes(), ord("\n")) == "↵" and traces.word(Bytes(), ord("\t")) == "⇥"
    assert traces.word(Bytes(), 0xC3) == "\N{REPLACEMENT CHARACTER}"
    assert traces.word(Bytes(), 0x07) == "\N{REPLACEMENT CHARACTER}"
    assert traces.word(Bytes(), 256) == "<|endoftext|>"
    assert traces.word(Bytes(), 258) == "" and traces.word(Bytes(), -1) == ""


def test_colours_go_from_the_first_over_the_middle_to_the_last():
    first, middle, last = traces.COLOURS
    np.testing.assert_array_equal(traces.shades(5)[::2], [first, middle, last])
    np.testing.assert_allclose(traces.shades(5)[1], (first + middle) / 2, atol=0.5)
    assert len(set(traces.SHADES)) == len(traces.SHADES) == 24
    ends = traces._inks(np.array([-1.0, 0.0, 1.0, 2.0]))
    assert ends == [traces.SHADES[i] for i in (0, 0, -1, -1)]


def test_the_layout_of_an_animation_does_not_depend_on_the_text():
    """A grid: where a line or a word ends, a mask does not tell."""
    columns = traces.COLUMNS
    places, lines = traces._layout(columns + 2, 1)
    assert lines == 2 and places[:2] == [(0, 0, 1), (1, 0, 1)]
    assert places[-3:] == [(columns - 1, 0, 1), (0, 1, 1), (1, 1, 1)]
    places, lines = traces._layout(13, traces.WIDE)
    assert lines == 3 and len(set(places)) == 13
    assert max(column + width for column, _, width in places) <= columns


def pixels(image):
    return np.asarray(image.convert("RGB"))


def test_gif(path, tmp_path):
    traces.gif(path, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 3 and image.is_animated and image.info["loop"] == 0
        # One line: margins, 24 pixels and what stands below.
        assert image.size == (552, 32 + 24 + traces.FOOT)
        shown, pauses = [], []
        for index in range(3):
            image.seek(index)
            shown.append(pixels(image))
            pauses.append(image.info["duration"])
    assert pauses == [1000, 400, 3000]
    blue, red = (  # how far the line break of step 3 is from sure, and '<' from unsure
        np.abs(shown[2].astype(int) - traces._inks(np.array([confidence]))[0]).sum(-1)[:-64].min()
        for confidence in (0.75, 0.25)
    )
    assert blue < 30 and red < 30
    text = [frame[: -traces.FOOT].astype(int) for frame in shown]
    cells = [[t[:, 16 + 10 * n : 26 + 10 * n] for n in range(3)] for t in text]
    assert np.abs(cells[0][0] - cells[2][0]).max() < 12 and (cells[0][0] < 100).any()  # given
    for position, at in ((0, None), (1, 1), (2, 2)):
        away = [np.abs(cells[i][position] - traces.NEW).max(-1).min() for i in range(3)]
        assert [bool(far < 12) for far in away] == [i == at for i in range(3)]  # new there alone


def test_a_token_wider_than_its_place_is_cut_off_and_a_mask_stands_in_the_middle(tmp_path):
    end, a = 256, ord("a")
    rows = [([end, a], [0.5, 0.5]), ([a, 257], [0.5, 0]), ([a, end], [0.5, 0.5])]
    path = traces.trajectory(frames(rows), np.zeros(2, bool), Bytes())
    assert path.wide
    traces.gif(path, tmp_path / "a.gif")
    wide = traces.WIDE
    with Image.open(tmp_path / "a.gif") as image:
        drawn = []
        for index in range(3):
            image.seek(index)
            text = pixels(image)[16:38, 16 : 16 + 20 * wide].reshape(22, 2 * wide, 10, 3)
            drawn.append(np.flatnonzero((text.max(axis=-1) < 240).any(axis=(0, 2))).tolist())
    assert drawn == [[*range(wide), wide], [0, wide + (wide - 1) // 2], [0, *range(wide, 2 * wide)]]


def test_a_gif_of_one_frame_and_a_long_one(tmp_path):
    still = traces.trajectory(frames([([A, B], [1, 1])] * 2), np.ones(2, bool), TOKENIZER)
    traces.gif(still, tmp_path / "one.gif")
    with Image.open(tmp_path / "one.gif") as image:
        assert getattr(image, "n_frames", 1) == 1
    length = 1000
    z = np.where(np.arange(length) < np.arange(length + 1)[:, None], B, MASK)
    long = traces.trajectory((z[None], (z != MASK)[None]), np.zeros(length, bool), TOKENIZER)
    assert len(long.step) == length + 1
    traces.gif(long, tmp_path / "long.gif")
    with Image.open(tmp_path / "long.gif") as image:
        assert image.n_frames == traces.FRAMES
        lines = -(-length // traces.COLUMNS)
        assert image.size == (32 + 10 * traces.COLUMNS, 32 + 24 * lines + traces.FOOT)
        image.seek(image.n_frames - 1)
        last = pixels(image)[16 : 16 + 24 * lines]
        assert all((last[24 * i : 24 * i + 24, 16:26] < 200).any() for i in range(lines))


def data_of(file):
    text = file.read_text(encoding="utf-8")
    found = re.search(r"^const data = (\{.*\});$", text, re.MULTILINE)
    return json.loads(found[1]), text


def page(file, title, *paths):
    """The data of the page of these paths, and the page itself."""
    pages.write(paths, file, title, TOKENIZER)
    return data_of(file)


def test_a_page_is_one_file_with_whole_paths(path, tmp_path):
    data, text = page(tmp_path / "a.html", 'step_1: "a" <b>', path, path)
    assert not re.search(r"https?:|//www|src=|href=|@import|url\(|innerHTML", text)
    assert data["title"] == 'step_1: "a" <b>' and data["name"] == "a"
    assert data["shared"] == {"unit": "tokens", "length": 3, "wide": False}
    one, other = data["samples"]
    assert one == other and [f["step"] for f in one["frames"]] == [0, 2, 3]
    assert one["prompt"] == [0] and one["words"][one["mask"]] == "·"
    assert one["words"][one["final"][2]] == "↵"
    state, confidence = np.full(3, -2), np.zeros(3)
    for index, frame in enumerate(one["frames"]):
        for n, symbol, chance in frame["changes"]:
            state[n], confidence[n] = symbol, chance
        np.testing.assert_array_equal(state, path.symbol[index])
        np.testing.assert_allclose(confidence, path.confidence[index])
    assert [len(f["changes"]) for f in one["frames"]] == [3, 1, 1]


def luminance(colour) -> float:
    share = np.asarray(colour) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other) -> float:
    light, dark = sorted((luminance(one) + 0.05, luminance(other) + 0.05), reverse=True)
    return light / dark


def test_colours_of_the_page_are_those_of_the_animation_and_can_be_read():
    """Contrast of at least 4.5 to 1, in both themes, on every ground that a text stands on."""
    names = ("paper", "new", "cell", "back", "panel", "ink", "soft", "back-ink", "unsure", "middle",
             "sure", "accent", "on-accent")  # fmt: skip
    style = pages.STYLE.read_text(encoding="utf-8")
    themes = []
    for part in style.split("@media (prefers-color-scheme: dark)"):
        found = dict(re.findall(r"--([\w-]+): #([0-9a-f]+);", part))
        full = {k: "".join(c * (6 // len(v)) for c in v) for k, v in found.items()}
        themes.append({k: [int(v[i : i + 2], 16) for i in (0, 2, 4)] for k, v in full.items()})
    light, dark = themes
    assert [light[k] for k in ("unsure", "middle", "sure")] == traces.COLOURS.tolist()
    for theme in (light, dark):
        assert set(names) <= set(theme)
        on = {"paper": ("ink", "soft", "back-ink", "accent"), "panel": ("ink", "soft"),
              "cell": ("soft",), "back": ("back-ink",), "accent": ("on-accent",)}  # fmt: skip
        for ground, inks in on.items():
            for ink in inks:
                assert contrast(theme[ground], theme[ink]) >= 4.5, (ground, ink)
        scale = np.array([theme[k] for k in ("unsure", "middle", "sure")], float)
        for p in np.linspace(0, 1, 21):
            mixed = [np.interp(2 * p, [0, 1, 2], c) for c in scale.T]
            for ground in ("paper", "new"):
                assert contrast(mixed, theme[ground]) >= 4.5, (ground, p)


def test_probabilities_that_change_alone_are_told_where_it_shows():
    rows = [
        ([A, A], [0.5, 0.5]),
        ([B, A], [0.5, 0.505]),
        ([A, A], [0.5, 0.9]),
        ([B, A], [0.5, 0.91]),
    ]
    noise = traces.trajectory(frames(rows), np.zeros(2, bool), TOKENIZER)
    changes = [[c for c in frame if c[0] == 1] for frame in pages.changes(noise)]
    assert changes == [[[1, 0, 0.5]], [], [[1, 0, 0.9]], [[1, 0, 0.91]]]


def test_a_token_cannot_end_the_script(tmp_path):
    text = "</script><!--<script>DATA\u2028"
    tokenizer = Characters("".join(sorted(set(text))))
    x = tokenizer.encode(text).astype(int)
    one = np.stack([x, x])[None]
    path = traces.trajectory((one, np.ones(one.shape)), np.zeros(len(x), bool), tokenizer)
    path = traces.Trajectory(
        path.step, path.symbol * 0, path.confidence, path.prompt_mask, [text], path.mask
    )
    data, whole = page(tmp_path / "a.html", text, path)
    assert data["samples"][0]["words"] == [text] and data["title"] == text
    assert whole.count("<script") == 1 and whole.count("</script") == 1 and "<!--" not in whole


def test_values_that_are_no_numbers_stay_json(tmp_path):
    rows = [([MASK], [0]), ([A], [np.nan])]
    path = traces.trajectory(frames(rows), np.zeros(1, bool), TOKENIZER)
    (sample,) = page(tmp_path / "a.html", "t", path)[0]["samples"]
    assert sample["frames"][1]["changes"] == [[0, 0, 0.0]]
    traces.gif(path, tmp_path / "a.gif")


def test_an_animation_shows_the_beginning_of_a_long_text(path, tmp_path):
    """20,000 tokens of several characters would be 80,160 pixels high, more than a GIF may be."""
    symbol = np.resize(path.symbol[-1:], (1, 20_000))
    long = dataclasses.replace(
        path, step=path.step[-1:], symbol=symbol, confidence=np.zeros(symbol.shape),
        prompt_mask=np.zeros(20_000, bool), wide=True,
    )  # fmt: skip
    traces.gif(long, tmp_path / "long.gif")
    with Image.open(tmp_path / "long.gif") as image:
        assert image.height == 2 * 16 + -(-2048 // 6) * 24 + 64
