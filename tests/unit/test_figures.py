"""Figures: the numbers that they show, and that something is drawn; not how it looks."""

import sys
import zlib

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image, ImageDraw
from tool_modules import tool_module

from md4_jax.generate import figures
from md4_jax.generate.traces import Trajectory

A, B, MASK = range(3)


def drawing(file):
    """Its size, after a look that there is more in it than an empty frame."""
    with Image.open(file) as image:
        shown = np.asarray(image.convert("RGB"))
        assert image.format == "PNG"
    assert len({zlib.crc32(row.tobytes()) for row in shown}) > 100
    return shown.shape[1], shown.shape[0]


def test_reveal_times():
    """Steps end at the times 0.5, 0.25 and 0; a position has the end of its step."""
    grid = np.array([0.0, 0.25, 0.5, 1.0])
    z = np.full((4, 3), MASK)
    z[1:, 2] = A
    z[2:, 0] = B
    z[3:, 1] = A
    np.testing.assert_array_equal(figures.reveal_times(z[None], grid, MASK), [0.25, 0.0, 0.5])


def test_reveal_times_of_windows():
    grid = np.array([0.0, 0.5, 1.0])
    first = [[MASK, MASK, -1], [A, MASK, -1], [A, B, -1]]
    second = [[A, B, MASK], [A, B, B], [A, B, B]]
    times = figures.reveal_times(np.array([first, second]), grid, MASK)
    np.testing.assert_array_equal(times, [0.5, 0.0, 0.5])


def test_numbers_are_moved_apart_and_no_further_than_need_be():
    np.testing.assert_allclose(figures.apart([3.0, 1.0, 2.0], 1.0), [3.0, 1.0, 2.0])
    np.testing.assert_allclose(figures.apart([2.0, 5.0, 2.2, 2.1], 1.0), [1.1, 5.0, 3.1, 2.1])
    np.testing.assert_allclose(figures.apart([1.0, 1.0, 1.6], 1.0), [0.2, 1.2, 2.2], atol=1e-12)
    joined = np.array([2.0, 4.0, 3.0]) - 0.95 / 3  # the last two, then all three
    np.testing.assert_allclose(figures.apart([2.0, 3.05, 3.0], 1.0), joined)
    assert figures.apart([], 1.0).size == 0


@pytest.mark.parametrize("ladder", [[4.8, 3.5, 2.41, 2.40, 2.405], [2.5] * 12, [90.0, 2.1, 2.0]])
def test_the_labels_of_n_grams_do_not_overlap(ladder, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: kept.append(figure))
    rows = [{"step": n, "train_bits_per_token": 2.0 + 3.0 / n} for n in range(1, 9)]
    figures.loss_curve(rows, tmp_path / "loss.png", ladder)
    (figure,) = kept
    figure.canvas.draw()
    texts = [text for text in figure.axes[0].texts if text.get_text().endswith("-gram")]
    boxes = [Text.get_window_extent(text) for text in texts]  # without their lines
    assert len(boxes) == len(ladder)
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])
    assert [text.xy[1] for text in texts] == ladder  # where their lines begin


@pytest.mark.parametrize("count", [3, 300])
def test_powers(count, tmp_path):
    symbols = ["$_$", " a", "\\n"] * (count // 3)
    tokens, times = np.array([0, count - 1, 0]), np.array([0.1, 0.5, 1.0])
    figures.powers(symbols, np.linspace(0.1, 4, count), tokens, times, tmp_path / "w.png")
    width, height = drawing(tmp_path / "w.png")
    assert 900 < width < 1600 and 500 < height < 1200
    figures.powers(symbols, np.linspace(0.1, 4, count), tokens[:0], times[:0], tmp_path / "w.png")


def test_frontier(tmp_path):
    rows = [
        {
            "temperature": temperature, "network_evaluations": used, "judge_bits_per_token": 2.0,
            "judge_bits_per_token_se": None, "unigram_entropy_bits": 3.0 + used / 100,
        }
        for temperature in (0.5, 1.0) for used in (30.5, 8.0)
    ]  # fmt: skip
    rows.append(rows[0] | {"judge_bits_per_token": None})
    figures.frontier(rows, tmp_path / "frontier.png")
    width, height = drawing(tmp_path / "frontier.png")
    assert 900 < width < 1600 and 400 < height < 900
    figures.frontier(rows[:1], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "frontier.png").read_bytes()


def test_orders_of_a_run_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["orders.py", "--workdir", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^error: --workdir .*: there is no folder .*none$"):
        tool_module("orders").main()


def test_orders_are_painted_from_early_to_late_with_what_was_taken_back_in_a_frame():
    """b, then a, then a mask in the place of b and c there: two states of three are a change."""
    tool = tool_module("orders")
    symbol = np.array([[0, 0, -1], [0, 2, -1], [1, 2, -1], [1, 0, -1], [1, 3, -1]])
    path = Trajectory(
        np.arange(5), symbol, np.ones(symbol.shape), np.zeros(3, bool), ["_", "a", "b", "c"], 0
    )
    image = Image.new("RGB", (100, 100), "white")
    tool.panel(ImageDraw.Draw(image), 0, "title", path)
    shown = np.asarray(image, int)
    top = tool.TITLE
    inside = [shown[top + 1, tool.MARGIN + place * tool.CELL + 1] for place in range(3)]
    for share, found in zip((0.5, 1.0, 0.0), inside, strict=True):
        np.testing.assert_allclose(found, tool.EARLY + share * (tool.LATE - tool.EARLY), atol=1)
    corners = [tuple(shown[top, tool.MARGIN + place * tool.CELL]) for place in range(3)]
    assert [corner == tool.TAKEN for corner in corners] == [False, True, False]
