"""Figures: the numbers that they show, and that something is drawn; not how it looks."""

import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image, ImageDraw
from tool_modules import tool_module

from md4_jax.generate import figures
from md4_jax.generate.traces import Trajectory
from md4_jax.runtime.paths import place
from md4_jax.training import report

A, B, MASK = range(3)


def drawing(file):
    """Its size, after a look that there is more in it than an empty frame."""
    with Image.open(file) as image:
        shown = np.asarray(image.convert("RGB"))
        assert image.format == "PNG"
    assert len({zlib.crc32(row.tobytes()) for row in shown}) > 100
    return shown.shape[1], shown.shape[0]


@pytest.fixture
def labels(monkeypatch):
    """The labels of the axes of all figures that are saved during a test."""
    kept = []

    def keep(figure, path):
        del path
        kept.extend((axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes)

    monkeypatch.setattr(figures, "_save", keep)
    return kept


@pytest.mark.parametrize("unit", ["character", "dimension", "token"])
def test_the_loss_of_a_run_is_labelled_in_the_unit_of_its_data(unit, tmp_path, labels):
    """Whether or not a bound was evaluated, whose name in the log would tell the unit."""
    (tmp_path / report.METRICS).write_text('{"step": 1, "train_bits_per_token": 2.5}\n')
    domain, log = SimpleNamespace(unit=unit), SimpleNamespace(trackers="jsonl")
    report.summary(SimpleNamespace(domain=domain, log=log), place(str(tmp_path)), 1, {})
    assert labels == [("step", f"bits per {unit}")]


def test_a_profile_is_labelled_in_the_unit_of_its_data(tmp_path, labels):
    losses = {"steps": [1], "optimal": [1.0], "cosine": [1.0], "uniform": [1.0]}
    figures.information_profile(np.ones(2), losses, tmp_path / "profile.png", unit="character")
    assert labels == [
        ("visible characters k", "cross-entropy of another character Z(k), bits"),
        ("steps", "predicted loss of parallel reveals, bits per character"),
    ]


@pytest.mark.parametrize("unit", ["character", "dimension", "token"])
def test_a_frontier_is_labelled_in_the_unit_of_its_rows(unit, tmp_path, labels):
    row = {"temperature": 1.0, "network_evaluations": 8, "unigram_entropy_bits": 3.0}
    row |= {"judge_bits_per_token": 2.0, f"judge_bits_per_{unit}": 2.0}
    figures.frontier([row], tmp_path / "frontier.png")
    assert labels[0] == (
        "network evaluations a sequence", f"bound on -log p under the judge, bits/{unit}",
    )  # fmt: skip


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
    np.testing.assert_allclose(figures.spread_apart([3.0, 1.0, 2.0], 1.0), [3.0, 1.0, 2.0])
    np.testing.assert_allclose(
        figures.spread_apart([2.0, 5.0, 2.2, 2.1], 1.0), [1.1, 5.0, 3.1, 2.1]
    )
    np.testing.assert_allclose(
        figures.spread_apart([1.0, 1.0, 1.6], 1.0), [0.2, 1.2, 2.2], atol=1e-12
    )
    joined = np.array([2.0, 4.0, 3.0]) - 0.95 / 3  # the last two, then all three
    np.testing.assert_allclose(figures.spread_apart([2.0, 3.05, 3.0], 1.0), joined)
    assert figures.spread_apart([], 1.0).size == 0


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
