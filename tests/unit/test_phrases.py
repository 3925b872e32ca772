"""Numbers in messages: nouns in the singular or plural, and standard errors that are not known."""

import math

import numpy as np
import pytest

from md4_jax.evals import report
from md4_jax.evals.metrics import Likelihood
from md4_jax.protocols.phrases import amount, plus_minus


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [
        (1, "sequence", "1 sequence"),
        (0, "sequence", "0 sequences"),
        (2, "batch", "2 batches"),
        (1, "process", "1 process"),
        (3, "process", "3 processes"),
        (2, "copy", "2 copies"),
        (2, "day", "2 days"),
    ],
)
def test_nouns_follow_their_number(number, noun, said):
    assert amount(number, noun) == said


def test_numbers_in_a_format():
    assert amount(1437, "image", ",") == "1,437 images"
    assert plus_minus(0.01234, ".3f") == " +- 0.012" and plus_minus(0.0, ".1f") == " +- 0.0"
    assert plus_minus(None, ".3f") == plus_minus(math.nan, ".3f") == ""


def result(*nats, exact=False):
    """Draws of a sequence of two tokens."""
    total = Likelihood()
    total.add(np.array(nats)[:, None], np.array([2]))
    return {"draws": len(nats), "exact": exact, **total.result()}


def test_a_single_draw_of_a_single_sequence_has_no_error():
    """2.6 nats over two tokens; draws of 2 and 3 nats have the error 1 / 2 over two tokens."""
    assert report.line(result(2.6)) == (
        "<= 1.8755 bits/token, perplexity <= 3.67 "
        "(1 sequence, 1 draw each; too few for a standard error)"
    )
    assert report.line(result(2.6, exact=True)) == (
        "1.8755 bits/token, perplexity 3.67 (1 sequence; too few for a standard error)"
    )
    assert report.line(result(2.0, 3.0)) == (
        "<= 1.8034 +- 0.3607 bits/token, perplexity <= 3.49 +- 0.87 (1 sequence, 2 draws each)"
    )
    assert report.ladder([4.0], result(2.6)).endswith(" 1.8755  this model (bound)")
    assert report.ladder([4.0], result(2.0, 3.0)).endswith("this model (bound, +- 0.3607)")


def test_a_single_sequence_of_a_classifier_has_no_error():
    found = dict(cross_entropy=0.5, cross_entropy_se=math.nan, accuracy=1.0, accuracy_se=math.nan)
    assert report.classes({**found, "sequences": 1, "draws": 1}) == (
        "cross-entropy of the class 0.5000 nats, accuracy 1.0000 at all times "
        "(1 sequence, 1 draw each; too few for a standard error)"
    )
