"""Amounts and speeds in the terms of the data, by hand."""

import planned
import pytest

from md4_jax.config.inputs import random_tokens
from md4_jax.config.schema import load_config
from md4_jax.data import Digits, units
from md4_jax.perf.bench_table import table

TIMES = dict(seconds=2.0, seconds_min=2.0, seconds_max=2.0, peak_rss_gib=1.0)


@pytest.mark.parametrize(
    ("unit", "split", "batch", "speed"),
    [
        ("dimension", "1,437 images, 91,968 dimensions", "8 images of 64 dimensions", "2.5"),
        ("character", "91,968 tokens, 1,437 whole sequences", "8 x 64 tokens", "160 characters/s"),
    ],
)
def test_images_are_counted_as_images(unit, split, batch, speed):
    assert units.split_size(unit, 1437, 1437 * 64) == split
    assert units.batch_size(unit, 8, 64) == batch
    assert units.speed(unit, 160.0, 64).startswith(speed)
    assert units.speed("dimension", 160.0, 64) == "2.5 images/s"


def test_one_is_no_plural():
    assert units.split_size("character", 1, 1) == "1 token, 1 whole sequence"
    assert units.split_size("code", 1, 1437) == "1 image, 1,437 codes"
    assert units.batch_size("dimension", 1, 64) == "1 image of 64 dimensions"


def test_the_table_of_times():
    text = table({"data": TIMES | dict(tokens_per_second=640.0)})
    assert "| tokens/s |" in text and "| 640 |" in text
    image = table({"data": TIMES | dict(tokens_per_second=640.0, images_per_second=10.0)})
    assert "| images/s |" in image and "| 10.0 |" in image


@pytest.mark.parametrize(("file", "unit"), [("digits", "dimension"), ("base", "token")])
def test_random_tokens_of_a_network_of_images_are_images(file, unit):
    config = load_config(f"configs/{file}.py", {"bench.random_tokens": str(planned.SYMBOLS)})
    assert random_tokens(config, "bench").unit == unit
    assert file == "base" or Digits().domain().unit == unit
