"""What a run keeps of its domain: written once, whole or not at all, and read as it was."""

import dataclasses
import json
import math
import os
import sys

import numpy as np
import pytest
from pixels import Pixels

from md4_jax.config import inputs
from md4_jax.data import domains
from md4_jax.data.codes import CodeDomain
from md4_jax.data.domains import (
    DOMAIN_FILE,
    TextDomain,
    domain_from_json,
    keep_domain,
    same_symbols,
    stored_domain,
)
from md4_jax.data.pixels import PixelDomain
from md4_jax.data.tokenizers import BytePairs, Bytes, Characters, Text8Symbols, Tokenizer
from md4_jax.protocols import UserError
from md4_jax.runtime import paths

AB = TextDomain(Characters("ab"), 7)


@dataclasses.dataclass(frozen=True)
class Upper(Tokenizer):
    """A tokenizer of one's own: the letters A.. up to a last one."""

    last: str = "C"

    eot_id = None
    separator = ""
    is_character = True

    @property
    def vocab_size(self):
        return ord(self.last) - ord("A") + 1

    def encode(self, text):
        return np.array([ord(c) - ord("A") for c in text], np.uint8)

    def join(self, ids):
        return "".join(chr(ord("A") + i) for i in ids)


def load(name):
    """Finds package.module:attribute, as configs do."""
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules.get(module), attribute, None)
    if found is None:
        raise UserError(f"there is no {name}")
    return found


@pytest.fixture
def workdir(tmp_path):
    return paths.place(tmp_path)


def test_text_as_a_domain():
    domain = TextDomain(Bytes(), 16)
    assert (domain.vocab_size, domain.shape, domain.unit) == (257, (16,), "token")
    assert (domain.eot_id, domain.unit) == (256, "token")
    assert domain.decode(domain.encode("naïve")) == "naïve"
    assert TextDomain(Text8Symbols(), 8).unit == "character"


def test_every_domain_is_stored_and_made_again(tiny_bpe):
    for tokenizer in (Bytes(), Text8Symbols(), Characters("ba\n"), BytePairs(path=str(tiny_bpe))):
        again = domain_from_json(TextDomain(tokenizer, 12).to_json(), length=99)
        assert again.length == 12 and again.to_json() == TextDomain(tokenizer, 12).to_json()
        assert again.decode(again.encode("ab" * 3)) == "ab" * 3


def test_a_domain_and_a_tokenizer_of_ones_own():
    mine = TextDomain(Upper("F"), 5)
    assert domain_from_json(mine.to_json(), 5, load) == mine
    assert mine.decode([5, 0]) == "FA" and json.loads(mine.to_json())["tokenizer"]["last"] == "F"
    image = Pixels((2, 2, 3))
    again = domain_from_json(image.to_json(), 5, load)
    assert again == image and math.prod(again.shape) == 12
    assert again.decode(range(12))[1, 0].tolist() == [6, 7, 8]


def test_a_class_that_is_gone_is_named(workdir):
    """It is not the file that is damaged then."""
    for domain, module in ((TextDomain(Upper(), 5), __name__), (Pixels((2, 2)), Pixels.__module__)):
        text = domain.to_json().replace(f"{module}:", "gone.module:")
        (workdir / DOMAIN_FILE).write_text(text)
        for how, reason in ((load, "there is no gone.module:"), (None, "only built-in names")):
            with pytest.raises(UserError, match="'gone.module:.*cannot be imported") as caught:
                stored_domain(workdir, 5, how)
            assert reason in str(caught.value) and "damaged" not in str(caught.value)
            assert str(workdir / DOMAIN_FILE) in str(caught.value)


def test_a_file_of_before_domains_is_read(workdir):
    (workdir / DOMAIN_FILE).write_text('{"name": "characters", "alphabet": "ab"}')
    assert stored_domain(workdir, 7) == AB
    keep_domain(AB, workdir)
    assert (workdir / DOMAIN_FILE).read_text() == '{"name": "characters", "alphabet": "ab"}'


def test_symbols_are_the_same_whatever_the_length():
    assert same_symbols(AB, TextDomain(Characters("ab"), 9))
    assert not same_symbols(AB, TextDomain(Characters("ba"), 7))
    assert same_symbols(Pixels((2, 2)), Pixels((4, 4)))
    assert not same_symbols(AB, Pixels((7,)))


def test_a_domain_is_written_once(workdir):
    kept = workdir / DOMAIN_FILE
    keep_domain(AB, workdir)
    assert stored_domain(workdir, 7) == AB
    before = os.stat(kept)
    keep_domain(AB, workdir)
    keep_domain(TextDomain(Characters("ba"), 7), workdir)
    after = os.stat(kept)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert stored_domain(workdir, 7) == AB


def test_a_kill_while_a_domain_is_written_leaves_none(workdir, monkeypatch):
    """Whatever is half written has another name."""

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_domain(AB, workdir)
    assert not (workdir / DOMAIN_FILE).exists()
    monkeypatch.undo()
    keep_domain(AB, workdir)
    assert stored_domain(workdir, 7) == AB


@pytest.mark.parametrize("size", range(len(AB.to_json())))
def test_a_domain_cut_short_is_named(size, workdir):
    kept = workdir / DOMAIN_FILE
    kept.write_text(AB.to_json()[:size])
    with pytest.raises(UserError, match="tokenizer.json is damaged") as caught:
        stored_domain(workdir, 7)
    assert str(kept) in str(caught.value)
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        inputs.domain_and_source({"data": {"name": "shakespeare"}}, workdir)


@pytest.mark.parametrize(
    "content",
    [
        "[]", "3", "{}", '{"name": "no"}', '{"name": 3}', '{"name": "bytes", "x": 1}',
        '{"domain": "no"}', '{"domain": "text", "length": 3}', '{"domain": []}',
    ],
)  # fmt: skip
def test_what_is_no_domain_is_named(content, workdir):
    (workdir / DOMAIN_FILE).write_text(content)
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        stored_domain(workdir, 7)


def test_a_run_without_a_domain_is_named(workdir):
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        stored_domain(workdir, 7)
    config = {"data": {"name": "shakespeare", "length": 64}, "tokenizer": {"name": "bytes"}}
    assert inputs.domain_and_source(config, workdir)[0] == TextDomain(Bytes(), 64)


def test_the_built_in_domains_say_their_names():
    made = {"text": AB, "pixels": PixelDomain((2, 2, 1))}
    made["codes"] = CodeDomain((2, 2, 1), 5, "0")
    assert made.keys() == domains.DOMAINS.keys()
    for name, domain in made.items():
        assert json.loads(domain.to_json())["domain"] == name
