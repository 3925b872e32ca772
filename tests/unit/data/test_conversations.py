"""Conversations: which tokens of which templates count, what is cut, and what is refused."""

import dataclasses
import datetime
import functools
import importlib.util
import itertools
import json
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from peer_folders import LETTERS, MARKS, TEMPLATE, byte_level

from md4_jax.config import inputs, schema
from md4_jax.data.chat import Chat
from md4_jax.data.conversations import Conversations
from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import TextDomain, domain_of, keep_domain
from md4_jax.data.sources.files import TextFiles
from md4_jax.data.sources.public import PublicText
from md4_jax.data.sources.splits import digest
from md4_jax.data.tokenizers import BytePairs, Bytes, Characters
from md4_jax.evals.zero_shot import ZeroShot
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jinja2") is None, reason="needs pip install -e '.[chat]'"
)
LLADA = Chat(TEMPLATE, {"bos_token": "<|start|>", "eos_token": "<|endoftext|>"})
CHATML = Chat(
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "be<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    {"eos_token": "<|im_end|>"},
)
PLAIN = Chat(
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}",
    {},
)
# Qwen3's way: what was thought is left out of all turns but the last.
FORGETS = Chat(
    "{% for m in messages %}{{ m.role[0] }}:"
    "{{ m.content if loop.last else m.content.split('=')[-1] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}",
    {},
)
TALK = [("user", "hi"), ("assistant", "abc"), ("user", "de"), ("assistant", " f ")]
TODAY = datetime.date.today().isoformat()
# Single characters that stand for tokens here. The mask of the LLaDA-like vocabulary is its entry
# 122, which is no token, so that those behind it move down by one.
SIGNS = {"llada": {120: "^", 121: "$", 122: "[", 123: "]", 124: "."},
         "chatml": {28: "<", 29: ">", 30: "$"}, "bytes": {256: "$"}}  # fmt: skip


def messages(turns, names=("role", "content")):
    return [dict(zip(names, turn, strict=True)) for turn in turns]


def written(path, talks, key="talk"):
    path.write_text("".join(json.dumps({key: talk}) + "\n" for talk in talks))
    return str(path)


@pytest.fixture
def vocabularies(tmp_path):
    """Tokenizers: a line feed is 0, a space 1, and the letters a to z are 2 to 27."""
    byte_level("\u010a\u0120" + LETTERS[:118], MARKS).save(str(tmp_path / "llada.json"))
    marks = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    byte_level("\u010a\u0120" + LETTERS[:26], marks).save(str(tmp_path / "chatml.json"))
    return {
        "llada": BytePairs(path=str(tmp_path / "llada.json"), mask=122),
        "chatml": BytePairs(path=str(tmp_path / "chatml.json")),
        "bytes": Bytes(),
    }


@pytest.fixture
def corpus(tmp_path, vocabularies):
    """A corpus of JSON lines without held-out splits."""

    def corpus(talks, chat=LLADA, kind="llada", *, length=64, turns="all", padding="hidden"):
        path = written(tmp_path / "talks.jsonl", talks)
        files = TextFiles(path, messages_key="talk", validation=0, test=0)
        source = Conversations(files, chat, turns)
        domain = domain_of(source, lambda: vocabularies[kind], length)
        return Corpus(source, domain, DataOptions(length, padding=padding))

    return corpus


def shown(data, kind="llada", size=4):
    """(text, x where it counts, x where it is seen) of each row of the training split."""
    batch = next(data.eval_batches("train", batch_size=size, rows=np.arange(size)))

    def sign(token):
        if kind == "bytes":
            return chr(token) if token < 256 else "$"
        return SIGNS[kind].get(token) or ("/ " + "abcdefghijklmnopqrstuvwxyz")[token]

    seen = batch.context.get("segments", np.zeros_like(batch.tokens)) == 0
    rows = zip(batch.tokens, batch.loss_mask, seen, strict=True)
    return [
        tuple("".join(map(str, part)) for part in (map(sign, row), map(x, mask), map(x, visible)))
        for row, mask, visible in rows
        if mask.any()
    ]


def x(is_so):
    return "x" if is_so else "-"


def padded(text, length, fill):
    return text + fill * (length - len(text))


def expected(text, counts, length=64):
    """A row without its padding, which is token 0: a line feed, or the byte 0."""
    assert len(text) == len(counts)
    return (
        padded(text, length, "/"),
        padded(counts, length, "-"),
        padded("x" * len(text), length, "-"),
    )


def test_the_assistants_turns_count_with_their_ends(corpus):
    """A template in the manner of LLaDA's: marks are single tokens, text is trimmed."""
    found = shown(corpus([messages(TALK)], length=72))
    text = "^[user]//hi.[assistant]//abc.[user]//de.[assistant]//f."
    counts = "-" * len("^[user]//hi.[assistant]//") + "xxxx"
    counts += "-" * len("[user]//de.[assistant]//") + "xx"
    assert found == [expected(text, counts, 72)]


def test_what_a_template_writes_behind_the_end_of_a_turn_does_not_count(corpus):
    """ChatML: a line feed stands behind <|im_end|>, and a system message is put in front."""
    talk = messages([*TALK, ("user", "last word")])
    found = shown(
        corpus([talk, messages([("system", "s"), *TALK[:2]])], CHATML, "chatml", length=80),
        "chatml",
    )
    text = "<system/be>/<user/hi>/<assistant/abc>/<user/de>/<assistant/ f >"
    counts = "-" * len("<system/be>/<user/hi>/<assistant/") + "xxxx"
    counts += "-" * len("/<user/de>/<assistant/") + "xxxx"
    assert found[0] == expected(text, counts, 80)
    text = "<system/s>/<user/hi>/<assistant/abc>"
    assert found[1] == expected(text, "-" * (len(text) - 4) + "xxxx", 80)


def test_a_template_that_always_begins_the_next_answer(corpus):
    """As some older ones do, whatever they are asked."""
    always = TEMPLATE.replace("{% if add_generation_prompt %}", "{% if true %}")
    found = shown(corpus([messages(TALK)], Chat(always, LLADA.tokens), length=72))
    assert found == shown(corpus([messages(TALK)], length=72))


def test_an_answer_without_a_special_token_ends_with_the_text(corpus):
    found = shown(corpus([messages(TALK)], PLAIN, "bytes", length=32), "bytes")
    text, counts = "u:hi\na:abc\nu:de\na: f$", "-------xxx--------xxx"
    row, counted, seen = expected(text, counts, 32)
    assert found == [(row[: len(text)].replace("/", "\n") + "\0" * 11, counted, seen)]


def test_sharegpt_spells_messages_in_another_way(corpus):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    talk = [("system", "be"), *TALK]
    other = messages([(names[role], text) for role, text in talk], ("from", "value"))
    assert shown(corpus([other], length=80)) == shown(corpus([messages(talk)], length=80))
    assert shown(corpus([other], length=80))[0][0].startswith("^[system]//be.[user]//hi.[assis")


def test_one_turn_of_each_sequence_counts(corpus):
    first, second = "^[user]//hi.[assistant]//abc.", "[user]//de.[assistant]//f."
    last = expected(first + second, "-" * (len(first + second) - 2) + "xx", 72)
    alone = expected(first, "-" * (len(first) - 4) + "xxxx", 72)
    assert shown(corpus([messages(TALK)], turns="last", length=72)) == [last]
    assert shown(corpus([messages(TALK)], turns="each", length=72)) == [alone, last]


def test_a_message_that_answers_nothing_does_not_count(corpus):
    found = shown(corpus([messages([("assistant", "yo"), *TALK[:2]])]))
    text = "^[assistant]//yo.[user]//hi.[assistant]//abc."
    assert found == [expected(text, "-" * (len(text) - 4) + "xxxx")]


def test_ends_of_text_that_fill_a_row_count(corpus):
    (row,) = shown(corpus([messages(TALK[:2])], length=32, padding="end_of_text"))
    assert row == (padded("^[user]//hi.[assistant]//abc.", 32, "$"), "-" * 25 + "x" * 7, "x" * 32)
    (row,) = shown(corpus([messages(TALK[:2])], length=29, padding="end_of_text"))
    assert row == ("^[user]//hi.[assistant]//abc.", "-" * 25 + "xxxx", "x" * 29)


def test_long_conversations_are_cut_and_empty_ones_left_out(corpus, capsys):
    """26 tokens are the first 25 and the 'a' of 'abc'; 'long' leaves none."""
    long = messages([("user", "a long question"), ("assistant", "a")])
    talks = [messages(TALK[:2]), long, messages([("user", "hi")])]
    data = corpus(talks, length=26)
    assert shown(data) == [("^[user]//hi.[assistant]//a", "-" * 25 + "x", "x" * 26)]
    assert data.sizes(["train"]) == {"train": (1, 1)}
    said = capsys.readouterr().out
    assert (
        "2 of 3 conversations of the train split are cut: they have more than data.length=26"
        in said
    )
    assert "2 of 3 conversations of the train split are left out: they have no answer" in said
    with pytest.raises(UserError, match="none of the 3 conversations of the train .*length=25 tok"):
        corpus(talks, length=25).sizes(["train"])


def test_sizes_and_streams_are_of_the_tokens_that_count(corpus):
    data = corpus([messages(TALK), messages(TALK[:2])], length=72)
    assert data.sizes(["train"]) == {"train": (2, 6 + 4)}
    assert data.stream("train").tolist() == [2, 3, 4, 124, 7, 124, 2, 3, 4, 124]
    batch = next(data.train_batches(batch_size=2, rows=np.arange(2), seed=0))
    assert sorted(batch.loss_mask.sum(1)) == [4, 6]


def test_texts_are_cut_where_a_model_begins_to_answer(tmp_path):
    """A merge of the last letter of a prompt with the first of an answer does not happen."""
    vocabulary = {letter: n for n, letter in enumerate("\u010aabtux:")} | {
        "ta": 7,
        "<|endoftext|>": 8,
    }
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("t", "a")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = BytePairs(path=str(tmp_path))
    chat = Chat(
        "{% for m in messages %}{{ 'u' if m.role == 'user' else 't' }}{{ m.content }}:{% endfor %}"
        "{% if add_generation_prompt %}t{% endif %}",
        {},
    )
    talk = messages([("user", "x"), ("assistant", "ab"), ("user", "ta"), ("assistant", "b")])
    path = written(tmp_path / "talks.jsonl", [talk])
    files = TextFiles(path, messages_key="talk", validation=0, test=0)
    data = Corpus(Conversations(files, chat, "all"), TextDomain(tokenizer, 13), DataOptions(13))
    batch = next(data.eval_batches("train", batch_size=1, rows=np.arange(1)))
    u, t, a, b, colon, ta, end = 4, 3, 1, 2, 6, 7, 8
    row = [u, 5, colon, t, a, b, colon, u, ta, colon, t, b, colon]
    assert batch.tokens[0].tolist() == row and end not in row
    assert "".join(map(x, batch.loss_mask[0])) == "----xxx----xx"
    assert tokenizer.encode(chat.prompt(talk[:1])).tolist() == row[:4]
    assert tokenizer.encode("tab:").tolist() == [ta, b, colon]


def test_a_template_that_changes_earlier_turns(corpus):
    talk = messages(
        [("user", "q"), ("assistant", "think=abc"), ("user", "de"), ("assistant", "f=g")]
    )
    once = messages([("user", "q"), ("assistant", "yes")])
    with pytest.raises(
        UserError, match=r"talks.jsonl, line 2: the chat template writes message 2, or"
    ):
        corpus([once, talk], FORGETS, "bytes").sizes(["train"])
    text = [
        row[0].split("$")[0]
        for row in shown(corpus([once, talk], FORGETS, "bytes", turns="each"), "bytes")
    ]
    assert text == ["u:q;a:yes;", "u:q;a:think=abc;", "u:q;a:abc;u:de;a:f=g;"]


def test_an_answer_ends_with_its_first_end(corpus):
    """Not with those that the template writes behind it, of the text or of the turn again."""
    both = Chat(TEMPLATE.replace("<|eot_id|>", "<|eot_id|><|endoftext|><|eot_id|>"), LLADA.tokens)
    ((text, counts, _),) = shown(corpus([messages(TALK[:2])], both))
    assert text.rstrip("/") == "^[user]//hi.$.[assistant]//abc."  # what follows is cut off
    assert counts.rstrip("-") == "-" * len("^[user]//hi.$.[assistant]//") + "xxxx"


def test_a_header_that_nothing_asks_for(corpus):
    """Without a generation prompt a model would have to write the header of its answer."""
    bare = Chat("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}", {})
    with pytest.raises(
        UserError, match="line 1: the chat template begins an answer with 'a:', but"
    ):
        corpus([messages(TALK)], bare, "bytes").sizes(["train"])
    # Llama 2's way: no header at all, and so none is asked for.
    plain = Chat(
        "{% for m in messages %}{{ '[' + m.content + '] ' if m.role == 'user' else m.content }}"
        "{% endfor %}",
        {},
    )
    ((text, counts, _),) = shown(corpus([messages(TALK[:2])], plain, "bytes"), "bytes")
    assert text[:9] == "[hi] abc$" and counts[:9] == "-----xxxx"


def test_half_a_surrogate_pair_is_replaced(corpus):
    talk = messages([("user", "h\ud83d"), ("assistant", "a\ud83d")])
    ((text, counts, _),) = shown(corpus([talk], PLAIN, "bytes"), "bytes")
    told = "".join(map(chr, "u:h\ufffd\na:a\ufffd\n".encode()))
    assert text.startswith(told.rstrip("\n"))
    assert counts.count("x") == len("a\ufffd".encode()) + 1
    assert PLAIN.prompt(talk) == "u:h\ufffd\na:a\ufffd"


def test_a_run_keeps_the_day_that_its_template_tells(corpus, tmp_path, folder):
    """So that its conversations stay the same; of a template without a date no day matters."""
    dated = Chat("{{ strftime_now('%d %b %Y') }}" + PLAIN.template, {}, "2026-01-31")
    assert dated.render(messages(TALK[:1])) == "31 Jan 2026u:hi\na:"
    assert dated.dated() == dated and dated.undated().dated().day == TODAY
    other = dataclasses.replace(dated, day="2026-02-01")
    one = [messages(TALK)]
    assert corpus(one, dated).source.fingerprint() != corpus(one, other).source.fingerprint()
    assert (
        corpus(one, PLAIN).source.fingerprint() == corpus(one, PLAIN.dated()).source.fingerprint()
    )
    run = Place(tmp_path / "run")
    run.mkdir()
    dated.keep(run)
    assert Chat.kept(run) == dated
    assert inputs.domain_and_source(config(tmp_path), run)[1].chat == dated
    (run / "chat.json").write_text('{"template": "x", "tokens": {}, "day": "31st"}')
    with pytest.raises(UserError, match="chat.json is damaged: its date 'day' is '31st'"):
        Chat.kept(run)


def test_another_template_than_that_of_the_run_is_refused(tmp_path, folder):
    run = Place(tmp_path / "run")
    run.mkdir()
    LLADA.keep(run)
    (run / "config.json").write_text(json.dumps({"package": "md4_jax", "config": config(tmp_path)}))
    other, same = tmp_path / "other.jinja", tmp_path / "same.jinja"
    other.write_text(PLAIN.template)
    same.write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLADA.tokens))
    with pytest.raises(UserError, match="other.jinja differs from the chat template in"):
        inputs.domain_and_source(config(tmp_path, chat_template=str(other)), run)
    asked = config(tmp_path, chat_template=str(same))
    assert inputs.domain_and_source(asked, run)[1].chat == LLADA


def test_a_template_that_refuses_a_conversation(corpus):
    strict = Chat("{% if messages[0].role != 'user' %}{{ raise_exception('who?') }}{% endif %}", {})
    with pytest.raises(UserError, match="talks.jsonl, line 1: the chat template refuses .*who"):
        corpus([messages([("system", "s"), *TALK])], strict).sizes(["train"])


def test_a_text_with_the_mask_is_named(corpus):
    talks = [messages(TALK), messages([("user", "hi"), ("assistant", "a<|mask|>")])]
    said = r"the train split, .*talks.jsonl, line 2: the text has '<\|mask\|>'"
    with pytest.raises(UserError, match=said):
        corpus(talks).sizes(["train"])


@pytest.mark.parametrize(
    "talk, said",
    [
        ([], "must be a conversation, which is a list of messages, not an empty list"),
        ("hi", "must be a conversation, which is a list of messages, not a str"),
        (["hi"], "message 1: it needs the keys 'role' and 'content', .* but has 'hi'"),
        ([{}], "message 1: it needs the keys 'role' and 'content', .* but has {}"),
        ([{"role": "user"}], "message 1: it needs .* 'from' and 'value', but has role"),
        ([{"role": "user", "content": None}], r"message 1: it .* but has role, content \(null\)"),
        ([*messages(TALK[:1]), {"role": "bot", "content": "a"}],
         "message 2: the role 'bot' is not known; known are system, user, assistant, tool, human"),
        ([{"role": ["user"], "content": "a"}], r"message 1: the role \['user'\] is not known"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}],
         "message 1: 'content' must be text, not a list"),
        ([{"from": "human", "value": 3}], "message 1: 'value' must be text, not a number: 3"),
    ],
)  # fmt: skip
def test_records_that_are_no_conversations(talk, said, corpus):
    with pytest.raises(UserError, match=f"talks.jsonl, line 2: 'talk'.*{said}"):
        corpus([messages(TALK), talk]).sizes(["train"])


def test_keys_that_do_not_go_together(tmp_path):
    for options in ({"text_key": "t"}, {"label_key": "t"}):
        (key,) = options
        said = f"data.messages_key='talk' and data.{key}='t' cannot be combined"
        with pytest.raises(UserError, match=said):
            TextFiles("x", messages_key="talk", **options)
    with pytest.raises(UserError, match="data.messages_key='talk' and data.text_key='t'"):
        PublicText("a/b", messages_key="talk", text_key="t")
    with pytest.raises(UserError, match="data.turns must be 'all', 'last' or 'each', not 'first'"):
        DataOptions(turns="first")
    (tmp_path / "talk.txt").write_text("hi")
    with pytest.raises(UserError, match="data.messages_key='talk' needs files of records"):
        list(TextFiles(str(tmp_path / "*.txt"), messages_key="talk").conversations("all"))
    path = written(tmp_path / "talks.jsonl", [messages(TALK)], key="talks")
    with pytest.raises(
        UserError, match=r"line 1: no key 'talk' \(data.messages_key\); it has talks"
    ):
        list(TextFiles(path, messages_key="talk").conversations("all"))


def test_other_conversations_templates_and_turns_are_other_data(corpus):
    one, other = [messages(TALK)], Chat(TEMPLATE, {**LLADA.tokens, "bos_token": ""})
    # The last has the tokens of the first, of which others count.
    made = [corpus(one), corpus(one, other), corpus(one, PLAIN), corpus(one, turns="last")]
    assert len({data.source.fingerprint() for data in made}) == 4
    assert len({data.fingerprint()["crc32"] for data in made}) == 4
    before = corpus(one).source.fingerprint()
    assert corpus([*one, *one]).source.fingerprint() != before


def test_texts_with_tools_that_older_versions_wrote_are_not_used_again(corpus):
    """Those of other templates are."""
    for template, is_same in ((PLAIN.template, True), (PLAIN.template + "{{ tools }}", False)):
        source = corpus([messages(TALK)], Chat(template, {})).source
        older = digest("conversations", source._source.fingerprint(), template, [], "all")
        assert (source.fingerprint() == older) == is_same


def test_rows_of_another_length_or_padding_are_others(corpus):
    """All in one cache."""
    found = set()
    for padding, length in itertools.product(("hidden", "end_of_text"), (64, 65)):
        data = corpus([messages(TALK)], length=length, padding=padding)
        ((text, _, _),) = shown(data, size=1)
        assert len(text) == length
        found.add(json.dumps(data.fingerprint()))
    assert len(found) == 4


@pytest.mark.parametrize("kind", ["text", "public"])
def test_the_messages_of_other_keys_are_others(kind, tmp_path):
    """Both those that count and those before them, all of one file."""
    first, second, path = messages(TALK[:2]), messages(TALK[2:]), str(tmp_path / "talks.jsonl")
    record = {"talk": first, "chat": second, "before": first, "earlier": second}
    Path(path).write_text(json.dumps(record) + "\n")
    make = TextFiles if kind == "text" else functools.partial(PublicText, "a/b")
    sources, rows = set(), set()
    for talk, before in (("talk", ""), ("chat", ""), ("talk", "before"), ("talk", "earlier")):
        files = make(path=path, messages_key=talk, prompt_key=before, validation=0, test=0)
        source = Conversations(files, PLAIN, "last")
        data = Corpus(source, TextDomain(Bytes(), 64), DataOptions(64, turns="last"))
        ((text, _, _),) = shown(data, "bytes", size=1)
        sources.add(files.fingerprint())
        rows.add(text)
    assert len(sources) == len(rows) == 4


def test_conversations_in_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    talks = [messages(TALK), [{**messages(TALK[:1])[0], "name": "me"}, *messages(TALK[1:2])]]
    table = pyarrow.table({"talk": talks, "other": [1, 2]})
    parquet.write_table(table, tmp_path / "train.parquet")
    expected = [messages(TALK), [{**messages(TALK[:1])[0], "name": "me"}, *messages(TALK[1:2])]]
    files = TextFiles(str(tmp_path / "train.parquet"), messages_key="talk")
    assert [list(one.messages) for one in files.conversations("all")] == expected
    public = PublicText("a/b", str(tmp_path), messages_key="talk", test=0, validation=0)
    assert [list(one.messages) for one in public.conversations("train")] == expected
    assert public.content() != PublicText("a/b", str(tmp_path), text_key="talk").content()


def config(tmp_path, **data):
    path = written(tmp_path / "talks.jsonl", [messages(TALK)] * 30)
    data = {"name": "text", "path": path, "messages_key": "talk", "length": 64, **data}
    return {"data": data, "tokenizer": {"name": "bpe", "path": str(tmp_path / "chat"), "mask": 122}}


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder with a template."""
    made = tmp_path / "chat"
    made.mkdir()
    byte_level("\u010a\u0120" + LETTERS[:118], MARKS).save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|start|>"}))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def test_a_run_keeps_the_template_of_its_tokenizer(tmp_path, folder):
    workdir = Place(tmp_path / "run")
    workdir.mkdir()
    domain, source = inputs.domain_and_source(config(tmp_path), workdir)
    assert source.chat == domain.chat == Chat(TEMPLATE, {"bos_token": "<|start|>"}, TODAY)
    keep_domain(domain, workdir)
    assert Chat.kept(workdir) == domain.chat
    for file in folder.iterdir():
        file.unlink()
    (folder / "chat_template.jinja").write_text("another")
    again, source = inputs.domain_and_source(config(tmp_path), workdir)
    assert again.chat == source.chat == domain.chat
    keep_domain(TextDomain(Bytes(), 4, chat=PLAIN), workdir)
    assert Chat.kept(workdir) == domain.chat


def test_the_template_that_a_config_means(tmp_path, folder):
    """That of data.chat_template, else that of train.initial, else that of the tokenizer."""
    asked, run = config(tmp_path), Place(tmp_path / "first")
    (tmp_path / "own.jinja").write_text("own")
    named = config(tmp_path, chat_template=str(tmp_path / "own.jinja"))
    assert inputs.domain_and_source(named, None)[1].chat == Chat("own", {}, TODAY)
    run.mkdir()
    PLAIN.keep(run)
    for initial in (run, run / "checkpoints" / "3"):
        asked["train"] = named["train"] = {"initial": str(initial)}
        assert inputs.domain_and_source(asked, None)[1].chat == PLAIN.dated()
        assert inputs.domain_and_source(named, None)[1].chat == Chat("own", {}, TODAY)
    named["data"]["chat_template"] = str(folder)
    assert inputs.domain_and_source(named, None)[0].chat == Chat(
        TEMPLATE, {"bos_token": "<|start|>"}, TODAY
    )
    del asked["train"]
    asked["tokenizer"]["path"] = str(folder / "tokenizer.json")
    assert inputs.domain_and_source(asked, None)[0].chat.template == TEMPLATE


def test_templates_that_are_not_there(tmp_path, folder):
    asked = config(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(
        UserError, match="data.messages_key='talk' needs a chat template, .*set data"
    ):
        inputs.domain_and_source(asked, None)
    asked["tokenizer"] = {"name": "bytes"}
    with pytest.raises(UserError, match="data.messages_key='talk' needs a chat template"):
        inputs.domain_and_source(asked, None)
    for wrong in (folder, tmp_path / "none"):
        with pytest.raises(
            UserError,
            match=f"data.chat_template={wrong} was not found or contains no chat template",
        ):
            inputs.domain_and_source(config(tmp_path, chat_template=str(wrong)), None)
    asked = config(tmp_path, detokenise="ptb", chat_template=written(tmp_path / "a.jinja", [1]))
    with pytest.raises(
        UserError, match="data.detokenise='ptb' .* conversations of data.messages_key='talk'"
    ):
        inputs.domain_and_source(asked, None)


def test_zero_shot_sets_of_a_run_on_conversations_are_plain_text():
    changes = ZeroShot(objective=None, sets="lambada")._changes("lambada")
    section = {"name": "public", "dataset": "me/talks", "messages_key": "talk", "length": 8}
    source = schema.build_section("data", inputs.merged(section, changes))
    assert source.dataset == "lambada" and not source.messages_key


def test_padding_of_zero_shot_documents_does_not_count(tmp_path):
    """Also for a run that learns how its texts end, and pads them with ends of text."""
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text('{"text": "He said go"}\n')
    own = {"name": "text", "length": 32, "windows": "documents", "padding": "end_of_text"}
    sets = dict(sets="lambada", path=str(tmp_path), chunks="documents")
    changes = ZeroShot(objective=None, **sets)._changes("lambada")
    corpus = inputs.corpora({"data": own}, TextDomain(Bytes(), 32))(changes)
    (batch,) = corpus.eval_batches("test", batch_size=1, rows=np.arange(1))
    assert batch.loss_mask.sum() == len("\nHe said go") + 1  # with its end
    assert batch.context["segments"].min() == -1


def zero_shot_error(tokenizer, path: str, **options) -> str:
    """What the evaluator says of its set ptb, of which the validation split is usual."""
    own = {"name": "text", "length": 32}
    corpus_of = inputs.corpora({"data": own}, TextDomain(tokenizer, 32))
    with pytest.raises(UserError) as found:
        asked = {"sets": "ptb", "path": path} | options
        ZeroShot(objective=None, **asked).opened("evals.z", corpus_of)
    return str(found.value)


def test_zero_shot_advises_what_helps_against_each_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))
    add = "Add its file, remove ptb from evals.z.sets, or choose another split by evals.z.split"
    start, nothing = f"evals.z: ptb in {tmp_path}/ptb: ", "has 0 tokens. "
    nowhere = str(tmp_path / "none")
    assert zero_shot_error(Bytes(), nowhere).startswith(
        f"evals.z.path={nowhere} was not found: it must be a folder with one folder for each of "
        f"evals.z.sets, such as {nowhere}/ptb"
    )
    missing = zero_shot_error(Bytes(), str(tmp_path))
    assert missing.startswith(f"evals.z.path={tmp_path} has no folder ptb: put the files")
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "below").mkdir()
    for name, files in (
        ("ptb", "ptb.valid.txt"),
        ("wikitext2", "validation.parquet or validation.jsonl or validation.txt"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        assert zero_shot_error(Bytes(), str(tmp_path), sets=name) == (
            f"evals.z: {name} in {tmp_path}/{name}: there is no file in this folder or below it. "
            f"Put that of the validation split there, such as {files}, or remove {name} from "
            "evals.z.sets"
        )
    (tmp_path / "ptb" / "ptb.train.txt").write_text(" they fell \n")
    missing = zero_shot_error(Bytes(), str(tmp_path))
    assert missing == f"{start}the validation split {nothing}{add}"
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" they fell \n")
    assert zero_shot_error(Bytes(), str(tmp_path), split="test") == (
        f"{start}the test split {nothing}{add}"
    )
    unknown = zero_shot_error(Characters("abc"), str(tmp_path))
    assert "the character 't' at offset 0" in unknown and add not in unknown
    assert unknown.endswith("evals.z needs a run with tokenizer.name=bytes or bpe")

    def offline(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr("md4_jax.data.download._whole", offline)
    monkeypatch.setattr("md4_jax.data.hub._ask", offline)
    said = zero_shot_error(Bytes(), "")
    assert "evals.z.path to it. That folder must contain a folder ptb" in said, said
    assert "no network" in said and add not in said and "data.path" not in said


def test_windows_of_zero_shot_that_blocks_do_not_fit():
    """4 of 16 tokens are given before each window: whole blocks of 4, but not of 8."""
    data, train = types.SimpleNamespace(length=16), types.SimpleNamespace(batch_size=2)
    mesh = types.SimpleNamespace(shape={"data": 1, "fsdp": 1})
    domain = TextDomain(Bytes(), 16)
    experiment = types.SimpleNamespace(domain=domain, data=data, train=train, mesh=mesh)
    found = ZeroShot(objective=BlockDiffusion(4), sets="lambada", stride=12)
    found.check(experiment, "evals.sets")
    with pytest.raises(
        UserError, match="evals.sets.stride=12 leaves data.length=16 - 12 = 4 tokens"
    ):
        dataclasses.replace(found, objective=BlockDiffusion(8)).check(experiment, "evals.sets")
    own = dataclasses.replace(found, objective=BlockDiffusion(8), length=24)
    with pytest.raises(UserError, match="evals.sets.stride=12 leaves evals.sets.length=24 - 12"):
        own.check(experiment, "evals.sets")


def test_a_tokenizer_learns_from_what_the_template_writes(tmp_path):
    asked = config(tmp_path)
    (tmp_path / "plain.jinja").write_text(PLAIN.template)
    asked["data"]["chat_template"] = str(tmp_path / "plain.jinja")
    asked["tokenizer"] = {"name": "characters"}
    domain, _ = inputs.domain_and_source(asked, None)
    assert domain.tokenizer == Characters("\n :abcdefhiu")


def test_evaluators_read_conversations_of_their_own(tmp_path, folder):
    asked = config(tmp_path)
    domain, _ = inputs.domain_and_source(asked, None)
    other = written(tmp_path / "other.jsonl", [messages(TALK[:2])] * 30)
    corpus = inputs.corpora(asked, domain)({"path": other, "turns": "last"})
    assert corpus.source.chat == domain.chat and corpus.domain.chat == domain.chat
    (row,) = shown(corpus, size=32)[:1]
    assert row[0].startswith("^[user]//hi.[assistant]//abc.")
