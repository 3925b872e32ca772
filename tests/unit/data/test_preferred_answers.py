"""Preferences between conversations that differ in their last answer."""

import importlib.util
import json

import chex
import numpy as np
import pytest

from md4_jax.data.chat import Chat
from md4_jax.data.conversations import Conversations
from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import domain_of
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.public import PublicText
from md4_jax.data.tokenizers import Bytes
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jinja2") is None, reason="needs pip install -e '.[chat]'"
)
CHAT = Chat(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}",
    {"eos_token": ";"},
)
KEYS = dict(messages_key="chosen", rejected_key="rejected", validation=0, test=0)
LENGTH = 24


def talk(*said):
    """Messages of the user and of the assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A corpus of pairs of conversations, of which nothing is kept yet."""
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))

    def corpus(pairs, *, before=(), turns="last", padding="end_of_text", kind="text", **options):
        path = tmp_path / "pairs.jsonl"
        records = [dict(prompt=before, chosen=better, rejected=worse) for better, worse in pairs]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        options = KEYS | options
        made = TextFiles(str(path), **options)
        if kind == "public":
            made = PublicText("me/pairs", str(path), **options)
        source = Conversations(made, CHAT, turns)
        domain = domain_of(source, Bytes, LENGTH)
        return Corpus(source, domain, DataOptions(LENGTH, padding=padding, turns=turns))

    return corpus


def shown(row) -> str:
    return "".join("$" if n == 256 else chr(n) for n in row)


@pytest.mark.parametrize("kind", ["text", "public"])
def test_both_answers_come_after_the_same_conversation(kind, corpus, capsys):
    """The first answer is context. A pair without room for an answer is left out as a whole."""
    pairs = [
        (talk("hi", "yo", "who", "me"), talk("hi", "yo", "who", "nobody")),
        (talk("a question without room", "x"), talk("a question without room", "y")),
        (talk("q", "quite a long answer, cut"), talk("q", "")),
    ]
    data = corpus(pairs, kind=kind)
    batch = next(data.train_batches(batch_size=2, seed=0, rows=np.arange(2)))
    order = np.argsort(batch.tokens[:, 2])
    assert [shown(row) for row in batch.tokens[order]] == [
        "u:hi;a:yo;u:who;a:me;$$$", "u:q;a:quite a long answe",
    ]  # fmt: skip
    assert [shown(row) for row in batch.rejected[order]] == [
        "u:hi;a:yo;u:who;a:nobody", "u:q;a:;$$$$$$$$$$$$$$$$$",
    ]  # fmt: skip
    counted = ["".join("x" if c else "-" for c in row) for row in batch.loss_mask[order]]
    assert counted == [18 * "-" + 6 * "x", 6 * "-" + 18 * "x"]
    assert not batch.context
    assert "1 of 3 conversations of the train split are left out" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["text", "public"])
def test_what_comes_before_may_be_a_list_of_its_own(kind, corpus):
    """The rows are those of whole conversations, and with other messages before them others."""
    before, better, worse = talk("hi", "yo", "who"), talk("", "me")[1:], talk("", "nobody")[1:]
    sources = set()
    for asked in (before, before[:2] + talk("who?")):
        whole = corpus([(asked + better, asked + worse)], kind=kind)
        expected = next(whole.train_batches(batch_size=1, seed=0, rows=np.arange(1)))
        apart = corpus([(better, worse)], kind=kind, prompt_key="prompt", before=asked)
        found = next(apart.train_batches(batch_size=1, seed=0, rows=np.arange(1)))
        chex.assert_trees_all_equal(found, expected)
        sources |= {whole.source.fingerprint(), apart.source.fingerprint()}
    assert len(sources) == 4
    without = corpus([(better, worse)], kind=kind, before=asked)
    assert without.source.fingerprint() != apart.source.fingerprint()


@pytest.mark.parametrize(
    "before, said",
    [("hi", "conversation, which is a list of messages, not a str"), ([], "an empty list")],
)
def test_what_comes_before_is_no_list_of_messages(before, said, corpus):
    with pytest.raises(UserError, match=f"pairs.jsonl, line 1: 'prompt' must be .*{said}"):
        answers = talk("", "yes")[1:], talk("", "no")[1:]
        corpus([answers], prompt_key="prompt", before=before).sizes(["train"])


def test_other_worse_answers_are_other_data(corpus):
    """So are the same files without them: the rows that are kept of a run are its own."""
    for kind in ("text", "public"):
        found = set()
        for said, key in (("no", "rejected"), ("nay", "rejected"), ("nay", "")):
            data = corpus([(talk("q", "yes"), talk("q", said))], kind=kind, rejected_key=key)
            found.add((data.source.fingerprint(), data.fingerprint()["crc32"]))
        assert len({source for source, _ in found}) == len({rows for _, rows in found}) == 3


@pytest.mark.parametrize(
    "worse, said",
    [
        (talk("q"), "the last message of 'rejected' must be an answer"),
        (talk("q", "no", "why"), "the last message of 'rejected' must be an answer"),
        (talk("q", "yes", "why", "no"), "have 2 and 4 messages"),
        (talk("p", "no"), "'chosen' and 'rejected' must be the same .* differ in message 1"),
        ([], "'rejected' must be a conversation, .* not an empty list"),
    ],
)
def test_conversations_that_cannot_be_compared(worse, said, corpus):
    right = (talk("q", "yes"), talk("q", "no"))
    with pytest.raises(UserError, match=f"pairs.jsonl, line 2: .*{said}"):
        corpus([right, (talk("q", "yes"), worse)]).sizes(["train"])


def test_the_first_message_alone_is_no_answer(corpus):
    alone = [{"role": "assistant", "content": "hi"}]
    with pytest.raises(UserError, match="the last message of 'chosen' must be an answer"):
        corpus([(alone, alone)]).sizes(["train"])


def test_keys_that_do_not_go_together(corpus):
    pairs = [(talk("q", "yes"), talk("q", "no"))]
    for turns in ("all", "each"):
        with pytest.raises(UserError, match=f"but data.turns='{turns}' also trains"):
            corpus(pairs, turns=turns)
    with pytest.raises(UserError, match="needs data.padding='end_of_text'"):
        corpus(pairs, padding="hidden").sizes(["train"])
    with pytest.raises(UserError, match=r"line 1: no key 'bad' \(data.rejected_key\); it has ch"):
        corpus(pairs, rejected_key="bad").sizes(["train"])
    with pytest.raises(UserError, match="set data.prompt_key .* or data.messages_key to the key"):
        PublicText("me/pairs", rejected_key="bad")
    with pytest.raises(UserError, match="needs data.messages_key: it is here"):
        PublicText("me/pairs", prompt_key="prompt", rejected_key="bad")


def test_a_token_that_is_not_known_is_reported_with_its_place(corpus, tmp_path):
    """Also where only the worse answer has it."""
    pairs = [(talk("q", "yes"), talk("q", said)) for said in ("no", "no\u00e9")]
    data = corpus(pairs)
    assert data.source.origin("train", 7).endswith("pairs.jsonl, line 2")
    assert data.source.origin("train", 3).endswith("pairs.jsonl, line 1")
