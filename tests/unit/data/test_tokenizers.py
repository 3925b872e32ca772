"""Tokenizers: round trips, known ids, what they refuse, and that they can be stored."""

import builtins
import json
import sys
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers

from md4_jax.data import TOKENIZERS, bpe_files, long_texts
from md4_jax.data.proteins import Proteins
from md4_jax.data.tokenizers import BytePairs, Bytes, Characters, Text8Symbols, from_json
from md4_jax.protocols import UserError

UNICODE = "naïve façade\n日本語 🙂 tab\there  two spaces, it's 42% "


def samples(tiny_bpe):
    """Each tokenizer with a text that it can encode."""
    return [
        (Text8Symbols(), "the quick brown fox"),
        (Characters(alphabet="zaß🙂 "), "a ß🙂z"),
        (Bytes(), UNICODE),
        (BytePairs(path=str(tiny_bpe)), UNICODE + "hello"),
        (Proteins(), "MKTAYIAKQRBZXUO.-"),
    ]


def test_every_registered_tokenizer_has_a_sample(tiny_bpe):
    assert set(TOKENIZERS.values()) == {type(t) for t, _ in samples(tiny_bpe)}
    assert [(name, kind.name) for name, kind in TOKENIZERS.items() if name != kind.name] == []


def test_decode_inverts_encode(tiny_bpe):
    for tokenizer, text in samples(tiny_bpe):
        ids = tokenizer.encode(text)
        assert np.issubdtype(ids.dtype, np.unsignedinteger)
        assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids.tolist()) == text


def test_tokens_spell_the_bytes_of_their_text(tiny_bpe):
    for tokenizer, text in samples(tiny_bpe):
        spellings = tokenizer.spellings()
        assert len(spellings) == tokenizer.vocab_size
        assert b"".join(spellings[i] for i in tokenizer.encode(text)) == text.encode()


def test_every_entry_of_gpt2_spells_what_the_library_decodes(shared):
    tokenizer = BytePairs(path=str(shared("gpt2_bpe")))
    for i, spelling in enumerate(tokenizer.spellings()):
        assert tokenizer.decode([i]) == spelling.decode("utf-8", "replace")


def test_a_vocabulary_that_is_not_of_bytes_spells_nothing(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    words = Tokenizer(models.BPE({"a": 0, "##b": 1, "<|endoftext|>": 2}, []))
    words.decoder = decoders.WordPiece()
    (tmp_path / "tokenizer.json").write_text(words.to_str())
    assert BytePairs(path=str(tmp_path)).spellings() is None


def test_characters_are_tokens_where_they_say_so(tiny_bpe):
    for tokenizer, text in samples(tiny_bpe):
        assert tokenizer.is_character == (len(tokenizer.encode(text)) == len(text))


def test_a_batch_is_encoded_like_its_texts(tiny_bpe):
    for tokenizer, text in samples(tiny_bpe):
        texts = [text, "", text[:5], text[3:]]
        batch = tokenizer.encode_batch(texts)
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(t).tolist() for t in texts]
        assert tokenizer.encode_batch([]) == []


def test_the_stored_tokenizer_is_the_same(tiny_bpe):
    for tokenizer, text in samples(tiny_bpe):
        stored = tokenizer.to_json()
        again = from_json(stored)
        assert type(again) is type(tokenizer)
        assert again.to_json() == stored
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert (again.vocab_size, again.eot_id) == (tokenizer.vocab_size, tokenizer.eot_id)


def test_a_stored_bpe_needs_no_files(tiny_bpe):
    stored = BytePairs(path=str(tiny_bpe)).to_json()
    for file in tiny_bpe.glob("*.*"):
        file.unlink()
    assert from_json(stored).decode(from_json(stored).encode("hello")) == "hello"


def test_a_stored_limit_of_lengths_cuts_and_fills_no_text(tiny_bpe):
    """A tokenizer.json may hold that of the last call before it was saved."""
    plain = BytePairs(path=str(tiny_bpe))
    limited = tokenizers.Tokenizer.from_str(json.loads(plain.to_json())["definition"])
    limited.enable_truncation(3)
    limited.enable_padding(length=5)
    (tiny_bpe / "tokenizer.json").write_text(limited.to_str())
    texts = ["hello", "", UNICODE]
    whole = [ids.tolist() for ids in plain.encode_batch(texts)]
    assert [len(ids) for ids in whole][:2] == [2, 0] and len(whole[2]) > 5
    for found in (BytePairs(path=str(tiny_bpe)), BytePairs(definition=limited.to_str())):
        assert [ids.tolist() for ids in found.encode_batch(texts)] == whole
        assert found.to_json() == plain.to_json()


def test_the_mask_is_shown(tiny_bpe):
    for tokenizer, text in samples(tiny_bpe):
        ids = tokenizer.encode(text).astype(int)
        mask = tokenizer.vocab_size
        assert tokenizer.decode([mask, *ids, mask, mask]) == f"_{text}__"
        assert tokenizer.decode([mask, *ids], mask="▒") == f"▒{text}"
        assert tokenizer.decode([]) == ""
        for wrong in (-1, mask + 1):
            with pytest.raises(UserError, match=rf"{wrong}.*0\.\.{mask - 1} and the mask {mask}"):
                tokenizer.decode([wrong])


def test_text8_symbols():
    tokenizer = Text8Symbols()
    assert tokenizer.vocab_size == 27 and tokenizer.eot_id is None
    assert tokenizer.encode(" az").tolist() == [0, 1, 26]
    with pytest.raises(UserError, match="'B' at byte offset 2"):
        tokenizer.encode("a Bc")
    with pytest.raises(UserError, match="'ß' at byte offset 3"):
        tokenizer.encode("gro" + "ß")


def test_characters_learn_their_alphabet():
    tokenizer = Characters().fit(iter(["hello", "wörld🙂"]))
    assert tokenizer.alphabet == "".join(sorted(set("hellowörld🙂")))
    assert tokenizer.vocab_size == len(tokenizer.alphabet)
    assert tokenizer.decode(tokenizer.encode("ööh🙂")) == "ööh🙂"


def test_a_given_alphabet_is_kept_in_its_order():
    tokenizer = Characters(alphabet="cab").fit(["xyz"])
    assert tokenizer.encode("abc").tolist() == [1, 2, 0]


def test_characters_refuse_what_they_do_not_know():
    with pytest.raises(UserError, match=r"'é' at offset 3 .*alphabet of 3.*tokenizer\.alphabet"):
        Characters(alphabet="abc").encode("abcé")
    for use in (lambda t: t.encode("a"), lambda t: t.vocab_size, lambda t: t.decode([0])):
        with pytest.raises(UserError, match="no alphabet yet"):
            use(Characters())
    with pytest.raises(UserError, match="twice"):
        Characters(alphabet="aa")
    with pytest.raises(UserError, match="no characters"):
        Characters().fit([""])


def test_bytes_have_an_end_of_text():
    tokenizer = Bytes()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([104, 256, 105, 256]) == "h<|endoftext|>i<|endoftext|>"
    assert tokenizer.decode([0xC3, 104]) == "\N{REPLACEMENT CHARACTER}h"


def test_bpe_merges_and_ends(tiny_bpe):
    tokenizer = BytePairs(path=str(tiny_bpe))
    assert tokenizer.vocab_size == 260 and tokenizer.eot_id == 259
    assert len(tokenizer.encode("hello")) == 2
    (tiny_bpe / "vocab.json").rename(tiny_bpe / "encoder.json")
    (tiny_bpe / "merges.txt").rename(tiny_bpe / "vocab.bpe")
    assert BytePairs(path=str(tiny_bpe)).to_json() == tokenizer.to_json()


def test_bpe_from_a_tokenizer_json(tiny_bpe, tmp_path):
    tokenizer = BytePairs(path=str(tiny_bpe))
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.loads(tokenizer.to_json())["definition"])
    for path in (folder, folder / "tokenizer.json"):
        assert BytePairs(path=str(path)).to_json() == tokenizer.to_json()


def test_an_end_of_text_that_a_file_calls_special_is_shown(tiny_bpe):
    """As GPT-2's own tokenizer.json does."""
    definition = json.loads(json.loads(BytePairs(path=str(tiny_bpe)).to_json())["definition"])
    entry = dict(id=259, content="<|endoftext|>", special=True, single_word=False)
    entry |= dict(lstrip=False, rstrip=False, normalized=False)
    tokenizer = BytePairs(definition=json.dumps(definition | {"added_tokens": [entry]}))
    hello = tokenizer.encode("hello").tolist()
    assert tokenizer.decode([*hello, tokenizer.eot_id, *hello]) == "hello<|endoftext|>hello"


def test_bpe_says_what_it_needs(tiny_bpe, tmp_path):
    with pytest.raises(UserError, match=r"either tokenizer\.path or tokenizer\.hub"):
        BytePairs()
    with pytest.raises(
        UserError, match="there is no tokenizer at .*nowhere"
    ):  # a path wins over a hub
        BytePairs(path=str(tmp_path / "nowhere"), hub="gpt2")
    with pytest.raises(UserError, match=r"nowhere.*encoder\.json and vocab\.bpe.*merges\.txt"):
        BytePairs(path=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no entry '</s>': set tokenizer\.eot"):
        BytePairs(path=str(tiny_bpe), eot="</s>")
    assert BytePairs(path=str(tiny_bpe), eot=None).eot_id is None
    (tiny_bpe / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer\.json"):
        BytePairs(path=str(tiny_bpe / "bad.json"))
    (tiny_bpe / "vocab.json").write_text("[")
    with pytest.raises(UserError, match=r"vocab\.json and .*merges\.txt are not a BPE vocabulary"):
        BytePairs(path=str(tiny_bpe))


def test_an_unreachable_hub_is_asked_once(tmp_path, monkeypatch):
    import tokenizers as library

    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))
    asked, kept = [], tmp_path / "tokenizer.json"

    class Offline:
        def repo_info(self, name, timeout):
            asked.append(name)
            raise OSError(f"no route to {name}")

    def fetch(name):
        raise AssertionError("it would be asked for six times")

    hub = types.SimpleNamespace(
        HfApi=Offline, try_to_load_from_cache=lambda *_: str(kept) if kept.exists() else None
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with monkeypatch.context() as patch:
        patch.setattr(library, "Tokenizer", types.SimpleNamespace(from_pretrained=fetch))
        with pytest.raises(UserError, match=r"'gpt2'.*no route to gpt2.*set tokenizer\.path"):
            BytePairs(hub="gpt2")
    assert asked == ["gpt2"]
    kept.write_text(library.Tokenizer(library.models.BPE()).to_str())
    assert bpe_files.from_hub("gpt2").get_vocab_size() == 0  # that of the hub's cache


def test_a_missing_tokenizers_package(monkeypatch):
    real = builtins.__import__

    def without(name, *args):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install tokenizers"):
        BytePairs(hub="gpt2")


def test_gpt2(shared):
    folder = shared("gpt2_bpe")
    tokenizer = BytePairs(path=str(folder))
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (50257, 50256)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.encode("Hello world").dtype == np.uint16
    assert tokenizer.decode(tokenizer.encode(UNICODE)) == UNICODE
    assert tokenizer.decode([15496, 50256]) == "Hello<|endoftext|>"


def test_a_long_text_is_cut_without_changing_its_tokens(shared, monkeypatch):
    tokenizer = BytePairs(path=str(shared("gpt2_bpe")))
    text = shared("wikitext2/wiki.test.raw").read_text()[:100_000]
    whole = tokenizer.encode(text)
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 1000)
    assert len(list(long_texts.pieces(text, " "))) > 50
    assert tokenizer.encode(text).tolist() == whole.tolist()
    assert tokenizer.encode_batch([text])[0].tolist() == whole.tolist()


@pytest.mark.parametrize("adds", [True, False])
def test_a_long_text_keeps_its_tokens_if_the_vocabulary_puts_a_space_before_it(adds, monkeypatch):
    """As SentencePiece's vocabularies do, of Llama 2 for example."""
    names = ["<unk>", "▁", "a", "b", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    model = models.BPE({name: n for n, name in enumerate(names)}, merges, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    replaced = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * adds + replaced)
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 10)
    text = "ab a b ba a" * 20
    space = long_texts.space_before(tokenizer)
    found = [tokenizer.encode(piece).ids for piece in long_texts.pieces(text, space)]
    assert len(found) > 10 and [i for ids in found for i in ids] == tokenizer.encode(text).ids


QWEN_IDS = [258, 220, 16, 17, 262, 127, 102, 261]


def added(number: int, content: str, *, special: bool = True) -> dict:
    """An entry of added_tokens_decoder, as transformers writes it."""
    flags = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)
    return {str(number): dict(content=content, special=special, **flags)}


def test_qwen_splits_digits_and_has_added_entries(tiny_bpe):
    """The ids are those of transformers' Qwen2Tokenizer with the same three files.

    GPT-2's pattern would keep the space with the digit that follows, and merge the digits.
    """
    entries = json.loads((tiny_bpe / "vocab.json").read_text())
    del entries["<|endoftext|>"]
    merged = {**entries, "Ġ1": 259, "12": 260}
    (tiny_bpe / "vocab.json").write_text(json.dumps(merged))
    (tiny_bpe / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\nĠ 1\n1 2\n")
    told = dict(tokenizer_class="Qwen2Tokenizer", added_tokens_decoder={
        **added(261, "<|endoftext|>"), **added(262, "<tool>", special=False),
    })  # fmt: skip
    (tiny_bpe / "tokenizer_config.json").write_text(json.dumps(told))
    tokenizer = BytePairs(path=str(tiny_bpe))
    assert tokenizer.eot_id == 261 and tokenizer.vocab_size == 263
    assert tokenizer.encode("hell 12<tool>e\u0301<|endoftext|>").tolist() == QWEN_IDS
    told = {"tokenizer_class": "GPT2TokenizerFast"}
    (tiny_bpe / "tokenizer_config.json").write_text(json.dumps(told))
    plain = BytePairs(path=str(tiny_bpe), eot=None)
    assert plain.encode("hell 12").tolist() == [258, 259, QWEN_IDS[3]]


def test_a_tokenizer_json_says_more_than_a_pair_of_files(tiny_bpe):
    definition = json.loads(BytePairs(path=str(tiny_bpe)).to_json())["definition"]
    changed = json.loads(definition)
    changed["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}
    (tiny_bpe / "tokenizer.json").write_text(json.dumps(changed))
    assert json.loads(BytePairs(path=str(tiny_bpe)).to_json())["definition"] != definition


@pytest.mark.parametrize(
    "told, said",
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "tokenizer_class='LlamaTokenizer'.*tokenizer.json"),
        ({"added_tokens_decoder": added(300, "<|x|>")}, "the id 300, but .* gets the id 260"),
        ("[]", "not readable JSON"),
    ],
)
def test_files_of_a_tokenizer_that_do_not_fit(told, said, tiny_bpe):
    content = told if isinstance(told, str) else json.dumps(told)
    (tiny_bpe / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=said):
        BytePairs(path=str(tiny_bpe)).encode("a")
