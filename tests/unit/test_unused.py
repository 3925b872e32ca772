"""Keys of the command line that a mode does not use are refused, unless they are the run's own."""

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
        "test": {"name": "likelihood", "draws": 1},
        "known": {"name": "known_words", "num": 1},
        "models": {"name": "ngrams"},
    },
}


def asked(**values):
    config = {name: dict(section) for name, section in KEPT.items()}
    config["evals"] = {name: dict(section) for name, section in KEPT["evals"].items()}
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
        ("sample", (), {"evals__test__draws": 2, "sample__judge": "self"}, ""),
        ("sample", (), {"sample__steps": 9}, ""),
        ("eval", ("test",), {"data__path": "b.txt"}, ""),
        ("eval", ("test",), {"train__microbatches": 2}, "it is for --mode train"),
        ("eval", ("test",), {"checkpoint__every": 2}, "it is for --mode train"),
        ("eval", ("test",), {"checkpoint__best": "test"}, ""),
        ("eval", ("test",), {"evals__test__draws": 2}, ""),
        ("eval", ("models",), {"evals__test__draws": 2}, "that run, models"),
        ("eval", ("test", "models"), {"sample__steps": 9}, "test, models draw no samples"),
        ("eval", ("test", "known"), {"sample__steps": 9}, ""),
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
