"""Units, the pooled likelihood with its standard error, and the written rows."""

import contextlib
import functools
import io
import json
import math
import os
import termios

import numpy as np
import pytest

from md4_jax.evals.metrics import Likelihood, bits
from md4_jax.evals.texts import Scores
from md4_jax.options import LogOptions
from md4_jax.protocols import UserError
from md4_jax.training.trackers import Tracked, Trackers
from md4_jax.training.writers import NullWriter, Progress, Writer, read_rows


def likelihood(*parts, unit="token"):
    total = Likelihood()
    for nats, length, weight in parts:
        tokens = np.where(np.asarray(weight) > 0, length, 0)
        total.add(np.asarray(nats), tokens)
    return total.result(unit)


def test_p01_bits_and_perplexity_of_one_sequence():
    """NELBO(1,2) = 2.6044967281 nats over two tokens."""
    result = likelihood(([[2.6044967281]], 2, [1.0]))
    assert result["bits_per_token"] == pytest.approx(1.8787472568, rel=1e-9)
    assert result["perplexity"] == pytest.approx(3.6775558637, rel=1e-9)
    assert 2 ** result["bits_per_token"] == pytest.approx(result["perplexity"], rel=1e-12)
    assert math.isnan(result["bits_per_token_se"])
    assert bits(math.log(27)) == pytest.approx(4.7548875022, rel=1e-9)


def test_a_single_sequence_has_the_error_of_its_draws():
    """Draws of 2, 3, 4 and 7 nats: variance 14 / 3, of the mean a quarter, over two tokens."""
    result = likelihood(([[2.0], [3.0], [4.0], [7.0]], 2, [1.0]))
    assert result["nats_per_token"] == 2.0
    assert result["nats_per_token_se"] == pytest.approx(math.sqrt(14 / 3 / 4) / 2)


def test_p01_nats_and_tokens_are_pooled_before_they_are_divided():
    result = likelihood(([[3.0]], 2, [1.0]), ([[50.0]], 20, [1.0]))
    assert result["perplexity"] == pytest.approx(11.123843962, rel=1e-9)
    assert result["tokens"] == 22 and result["sequences"] == 2


def test_sequences_of_one_batch_may_have_other_lengths():
    result = likelihood(([[3.0, 50.0, 9.0]], [2, 20, 7], [1.0, 1.0, 0.0]))
    assert result["perplexity"] == pytest.approx(11.123843962, rel=1e-9)
    assert result["tokens"] == 22 and result["sequences"] == 2


def test_draws_of_a_sequence_are_averaged_and_padding_is_left_out():
    result = likelihood(([[1.0, 4.0, 99.0], [3.0, 8.0, np.nan]], 2, [1.0, 1.0, 0.0]))
    assert result["sequences"] == 2 and result["tokens"] == 4
    assert result["nats_per_token"] == pytest.approx((2.0 + 6.0) / 4)


def test_only_characters_have_bits_per_character():
    part = ([[1.0, 2.0]], 4, [1.0, 1.0])
    assert "bits_per_character" not in likelihood(part)
    result = likelihood(part, unit="character")
    assert result["bits_per_character"] == result["bits_per_token"]
    assert result["bits_per_character_se"] == result["bits_per_token_se"]


def test_bytes_and_words_are_pooled_like_tokens():
    """53 nats over 22 bytes and over 5 words; the error is that of a ratio over each."""
    total = Likelihood()
    text = [[2, 1], [20, 4], [9, 9]]
    total.add(np.array([[3.0, 50.0, np.nan]]), np.array([7, 7, 0]), text=np.array(text))
    result = total.result()
    assert (result["tokens"], result["bytes"], result["words"]) == (14, 22, 5)
    assert result["bits_per_byte"] == pytest.approx(53 / 22 / math.log(2), rel=1e-12)
    assert result["word_perplexity"] == pytest.approx(math.exp(53 / 5), rel=1e-12)
    # sqrt(2 ((3 - 2 r)^2 + (50 - 20 r)^2)) / 22 with r = 53 / 22; and over words, r = 53 / 5.
    error = 2 * abs(3 - 2 * 53 / 22) / 22
    assert result["bits_per_byte_se"] == pytest.approx(error / math.log(2), rel=1e-12)
    relative = result["word_perplexity_se"] / result["word_perplexity"]
    assert relative == pytest.approx(2 * abs(3 - 53 / 5) / 5, rel=1e-12)


def test_what_has_no_text_has_nothing_per_byte_or_word():
    assert not {"bits_per_byte", "bytes"} & likelihood(([[1.0, 2.0]], 4, [1.0, 1.0])).keys()
    total = Likelihood()  # ends of texts alone, then spaces
    total.add(np.ones((1, 1)), np.array([2]), text=np.array([[0, 0]]))
    assert not {"bits_per_byte", "word_perplexity"} & total.result().keys()
    total.add(np.ones((1, 1)), np.array([2]), text=np.array([[2, 0]]))
    result = total.result()
    assert "bits_per_byte" in result and "word_perplexity" not in result


def test_the_standard_error_of_equal_lengths_is_that_of_a_mean():
    nats = np.array([3.0, 5.0, 10.0, 2.0])
    result = likelihood((nats[None, :3], 5, [1, 1, 1]), (nats[None, 3:], 5, [1]))
    expected = nats.std(ddof=1) / math.sqrt(4) / 5
    assert result["nats_per_token_se"] == pytest.approx(expected, rel=1e-12)
    assert result["bits_per_token_se"] == pytest.approx(expected / math.log(2.0), rel=1e-12)
    relative = result["perplexity_se"] / result["perplexity"]
    assert relative == pytest.approx(expected, rel=1e-12)


def test_the_standard_error_of_unequal_lengths_is_the_spread_of_the_ratio():
    """The known truth: the ratio over 4000 repetitions with lengths 4 and 40 scatters as stated."""
    rng = np.random.default_rng(0)
    ratios, errors = [], []
    for _ in range(4000):
        long = rng.random(50) < 0.3
        nats = rng.normal(2.0, 0.3, 50) * np.where(long, 40.0, 4.0)
        result = likelihood(
            (nats[None, long], 40, np.ones(long.sum())),
            (nats[None, ~long], 4, np.ones((~long).sum())),
        )
        ratios.append(result["nats_per_token"])
        errors.append(result["nats_per_token_se"])
    # The scatter of 4000 is known to 1.1 %; the ratio's error formula is first-order in 1/50.
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.07)


def test_a_hopeless_model_has_a_finite_perplexity():
    found = likelihood(([[1e6, 1e6]], 2, [1.0, 1.0]))["perplexity"]
    nats, tokens = np.array([1e6, 2.0]), np.array([2, 2])
    scores = Scores(nats, nats, tokens, tokens, True, "md4")
    with np.errstate(all="raise"):
        assert math.isfinite(found) and scores.perplexity.tolist() == [found, math.e]


def write(directory, resume_step, *rows):
    run = Tracked(directory, {}, resume_step)
    make = functools.partial(Trackers, ["tensorboard"], run, print)
    writer = Writer(directory, resume_step=resume_step, trackers=make)
    for step, numbers in rows:
        writer.write(step, numbers)
    writer.close()
    return writer


def test_rows_after_the_resumed_step_are_dropped(tmp_path):
    write(tmp_path, 0, (10, {"a": 1.0}), (20, {"a": 2.0}), (20, {"b": 3}), (30, {"a": 4.0}))
    writer = write(tmp_path, 20, (30, {"a": 5.0}))
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 10, "a": 1.0},
        {"step": 20, "a": 2.0},
        {"step": 20, "b": 3},
        {"step": 30, "a": 5.0},
    ]
    assert writer.has(20, "b") and writer.has(30, "a") and not writer.has(10, "b")
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_new_run_in_an_old_directory_keeps_no_row(tmp_path):
    write(tmp_path, 0, (10, {"a": 1.0}))
    assert not write(tmp_path, 0).has(10, "a")
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_last_line_that_a_crash_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2.0}\n{"step": 2, "a": 3')
    assert read_rows(path) == [{"step": 1, "a": 2.0}]
    write(tmp_path, 5, (6, {"a": 4.0}))
    assert [row["step"] for row in read_rows(path)] == [1, 6]


def test_every_line_is_strict_json(tmp_path):
    """Also where a number is not finite; float32 keeps its shortest decimal."""
    numbers = {
        "a": np.nan,
        "b": np.float32(np.inf),
        "c": np.float32(0.1),
        "d": np.int32(3),
        "e": "x",
    }
    write(tmp_path, 0, (1, numbers))

    def refuse(name):
        raise AssertionError(name)

    line = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(line, parse_constant=refuse)
    assert row["a"] == "nan" and row["b"] == "inf" and row["d"] == 3 and row["e"] == "x"
    assert np.float32(row["c"]) == np.float32(0.1)


def test_other_processes_write_nothing_and_remember():
    writer = NullWriter()
    writer.write(3, {"a": 1.0})
    assert writer.has(3, "a") and not writer.has(3, "b") and not writer.has(4, "a")
    writer.close()


def test_progress_is_plain_when_piped_and_silent_elsewhere():
    for enabled in (True, False):
        stream = io.StringIO()
        progress = Progress(100, 0, enabled=enabled, stream=stream)
        progress.advance()
        progress.show(40, "2.000 bits", 0.5)
        progress.say("hello")
        progress.close()
        expected = "step 40/100  2.000 bits  2:00 left\nhello\n" if enabled else ""
        assert stream.getvalue() == expected


def test_progress_tells_how_long_the_budget_lasts():
    stream = io.StringIO()
    progress = Progress(100, 0, enabled=True, stream=stream, budget=lambda: 61.9)
    progress.show(40, "2.000 bits", 0.5)
    progress.show(90, "2.000 bits", 0.5)
    progress.close()
    first, second = stream.getvalue().splitlines()
    assert first.endswith("1:01 left") and second.endswith("0:20 left")


def _all_of(screen: int) -> bytes:
    """What a terminal that is closed has shown; a single read may return only the first part."""
    found = b""
    with contextlib.suppress(OSError):  # the end, on Linux
        while part := os.read(screen, 4096):
            found += part
    return found


def test_a_terminal_of_80_columns_shows_the_time_left():
    """What does not fit is cut off at the end."""
    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with open(terminal, "w") as stream:
        progress = Progress(3500, 0, enabled=True, stream=stream)
        progress.show(100, "training loss 2.358 +- 0.023 bits/character, 19,828 characters/s", 20.0)
        progress.advance()
        progress.close()
    shown = _all_of(screen).decode().strip().split("\r")
    os.close(screen)
    assert "2:50 left, training loss 2.358 +- 0.023 bits" in shown[-1] and len(shown[-1]) <= 80


def test_log_options():
    with pytest.raises(UserError, match="log.every must be at least 1, not 0"):
        LogOptions(every=0)


def test_numbers_of_an_older_run_have_their_name_of_today(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "eval_nats": 1.5, "train_eval_x": 2}\n')
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 3, "validation/nats": 1.5, "train_eval_x": 2}
    ]


def test_an_evaluator_may_be_called_eval(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "eval_long/nats": 1.5}\n')
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 3, "eval_long/nats": 1.5}]
