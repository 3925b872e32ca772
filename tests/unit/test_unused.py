"""Keys of the command line that a mode does not use are refused, unless they are the run's own."""

import copy

import pytest

from md4_jax.config import unused
from md4_jax.protocols import UserError

KEPT = {
    "data": {"path": "a.txt", "chat_template": ""},
    "tokenizer": {"path": "t.json"},
    "train": {"seconds": 5.0, "microbatches": 0},
    "checkpoint": {"every": 1, "best": ""},
    "sample": {"steps": 4, "judge": "", "image_from": ""},
    "evals": {
        "validation": {"name": "likelihood", "final": False, "draws": 1},
        "test": {"name": "likelihood", "draws": 1, "objective": {"name": "auto"}},
        "known": {"name": "known_words", "num": 1},
        "models": {"name": "ngrams"},
        "drawn": {"name": "samples"},
        "mine": {"name": "package.module:Mine"},
    },
}

SELF, RUN = {"sample__judge": "self"}, {"sample__judge": "runs/other"}


def asked(**values):
    config = copy.deepcopy(KEPT)
    for key, value in values.items():
        *parents, last = key.split("__")
        section = config
        for parent in parents:
            section = section[parent]
        section[last] = value
    return config, [key.replace("__", ".") for key in values]


@pytest.mark.parametrize(
    "mode, evals, values, reason",
    [
        ("sample", (), {"data__chat_template": "b"}, "no data are read"),
        ("sample", (), {"data__path": "b.txt", "sample__image_from": "test:1"}, ""),
        ("sample", (), {"train__seconds": 9}, "it is for --mode train"),
        ("sample", (), {"tokenizer__path": "b"}, "the run has kept its tokenizer"),
        ("sample", (), {"evals__test__draws": 2}, "no evaluator runs"),
        ("sample", (), {"evals__test__draws": 2, **SELF}, ""),
        ("sample", (), {"evals__test__objective__name": "md4", **SELF}, ""),
        ("sample", (), {"evals__test__objective__name": "md4", **RUN}, "batch_size, seed of"),
        ("sample", (), {"evals__test__seed": 2, **RUN}, ""),
        ("sample", (), {"evals__test__limit": 2, **SELF}, "reads only draws, .* of evals.test"),
        ("sample", (), {"evals__known__num": 2, **SELF}, "reads only draws, .* of evals.test"),
        ("sample", (), {"evals__validation__draws": 2, **SELF}, "of evals.test"),
        ("sample", (), {"evals__validation__final": True, **SELF}, ""),  # it becomes the main one
        ("sample", (), {"evals__test__final": False, **SELF}, ""),
        ("sample", (), {"evals__models__final": False, **SELF}, "of evals.test"),
        ("sample", (), {"sample__steps": 9}, ""),
        ("eval", ("test",), {"data__path": "b.txt"}, ""),
        ("eval", ("test",), {"train__microbatches": 2}, "it is for --mode train"),
        ("eval", ("test",), {"checkpoint__every": 2}, "it is for --mode train"),
        ("eval", ("test",), {"checkpoint__best": "test"}, ""),
        ("eval", ("test",), {"evals__test__draws": 2}, ""),
        ("eval", ("models",), {"evals__test__draws": 2}, "that run, models"),
        ("eval", ("test", "models"), {"sample__steps": 9}, "test, models draw no samples"),
        ("eval", ("test", "known"), {"sample__steps": 9}, ""),
        ("eval", ("known",), {"evals__test__draws": 2}, "among the evaluators that run, known"),
        ("eval", ("known",), SELF, "only evaluators of the kind samples use it"),
        ("eval", ("drawn",), SELF, ""),
        ("eval", ("mine",), SELF, ""),
        ("eval", ("mine",), {"evals__test__draws": 2}, ""),
        ("eval", ("drawn",), {"evals__test__draws": 2}, "that run, drawn"),
        ("eval", ("drawn",), {"evals__test__draws": 2, **SELF}, ""),
        ("eval", ("drawn",), {"evals__test__split": "all", **SELF}, "of evals.test"),
    ],
)
def test_a_key_that_changes_nothing_is_refused(mode, evals, values, reason):
    config, keys = asked(**values)
    unused.check(mode, KEPT, KEPT, keys, evals)  # the run's own values may be repeated
    if not reason:
        unused.check(mode, KEPT, config, keys, evals)
        return
    said = f"{keys[0]}={next(iter(values.values()))!r} changes nothing in --mode {mode}: .*{reason}"
    with pytest.raises(UserError, match=said):
        unused.check(mode, KEPT, config, keys, evals)
    unused.check(mode, KEPT, config, [], evals)  # it differs in a file, not on the command line
