"""Prompts, suffixes and templates: which tokens stand where, and what is refused."""

import numpy as np
import pytest

from md4_jax.data.tokenizers import BytePairs, Bytes, Characters, Text8Symbols
from md4_jax.generate import prompts
from md4_jax.options import PromptOptions
from md4_jax.protocols import UserError

TEXT8 = Text8Symbols()  # the space is 0 and 'a' is 1
FREE = None


def built(length, tokenizer=TEXT8, **options):
    return prompts.templates(PromptOptions(**options), tokenizer, length)


def one(length, tokenizer=TEXT8, **options):
    """The only template as a list: a token where it is given, FREE elsewhere."""
    (template,) = built(length, tokenizer, **options)
    return listed(template)


def listed(template):
    assert template.tokens.dtype == np.int32 and template.mask.dtype == bool
    assert template.tokens.shape == template.mask.shape
    return [int(k) if g else FREE for k, g in zip(*template, strict=True)]


def test_what_a_user_may_not_have_meant_is_said():
    said = lambda length, is_exact=True, **options: prompts.remarks(  # noqa: E731
        PromptOptions(**options), built(length, **options), is_exact
    )
    assert said(4, template="a_b") == said(4, prompt="abc") == said(4) == []
    (remark,) = said(4, template="abc")
    assert "sample.template has no blank '_': the template is only the beginning" in remark
    (remark,) = said(4, prompt="ab", suffix="cd")
    assert "all 4 tokens of a sample are given, so nothing is drawn" in remark
    (remark,) = said(4, is_exact=False, suffix="d")
    assert "with this kind of noise samples follow a prompt only approximately" in remark
    assert said(4, is_exact=False) == []


def test_nothing_is_given_by_default():
    assert one(3) == [FREE] * 3


def test_a_prompt_stands_at_the_beginning_and_a_suffix_at_the_end():
    assert one(5, prompt="ab") == [1, 2, FREE, FREE, FREE]
    assert one(5, suffix="yz") == [FREE, FREE, FREE, 25, 26]
    assert one(5, prompt="ab", suffix=" z") == [1, 2, FREE, 0, 26]
    assert one(4, prompt="ab", suffix="yz") == [1, 2, 25, 26]


def test_a_prompt_may_hold_the_sign_of_a_blank():
    assert one(3, Characters("_a"), prompt="_a") == [0, 1, FREE]


@pytest.mark.parametrize(
    "template, tokens",
    [
        ("a_c", [1, FREE, 3]),
        ("a__d", [1, FREE, FREE, 4]),
        ("_b_", [FREE, 2, FREE]),
        ("____", [FREE] * 4),
        ("abcd", [1, 2, 3, 4]),
        (" _ _", [0, FREE, 0, FREE]),
    ],
)
def test_a_template_is_filled_at_its_blanks(template, tokens):
    assert one(len(template), template=template) == tokens
    other = template.replace("_", "#")
    assert one(len(template), template=other, blank="#") == tokens


def test_what_follows_a_short_template_is_free():
    assert one(6, template="a_c") == [1, FREE, 3, FREE, FREE, FREE]


def test_a_blank_of_another_sign_leaves_the_underscore_to_the_tokenizer():
    assert one(3, Characters("_a"), template="_#a", blank="#") == [0, FREE, 1]


def test_a_character_of_several_tokens_is_given_whole():
    assert one(5, Bytes(), template="é_a") == [0xC3, 0xA9, FREE, ord("a"), FREE]
    assert one(4, Bytes(), prompt="é", suffix="b") == [0xC3, 0xA9, FREE, ord("b")]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(template="abc_e"), "sample.template has 5 tokens, more than the 4 of a sample"),
        (dict(prompt="abcde"), "sample.prompt and sample.suffix have 5 [+] 0 tokens, .* the 4 of"),
        (dict(prompt="abc", suffix="yz"), "have 3 [+] 2 tokens, more than the 4 of a sample"),
    ],
)
def test_too_long(options, words):
    with pytest.raises(UserError, match=f"{words}.*sample.length"):
        built(4, **options)
    assert built(5, **options)


def test_length_is_counted_in_tokens_and_not_in_characters():
    with pytest.raises(UserError, match="sample.template has 5 tokens, more than the 4"):
        built(4, Bytes(), template="éé_")


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(prompt="ab9"), "sample.prompt, 'ab9': .*'9' at byte offset 2"),
        (dict(suffix="Z"), "sample.suffix, 'Z': .*'Z' at byte offset 0"),
        (dict(template="a_b\nc_"), r"sample.template, 'b\\nc': .*'\\n' at byte offset 1"),
        (dict(template="a_b", blank="#"), "sample.template, 'a_b': .*'_' at byte offset 1"),
    ],
)
def test_symbols_outside_the_vocabulary(options, words):
    with pytest.raises(UserError, match=words):
        built(16, **options)


def test_a_long_text_is_not_repeated_whole_when_it_is_refused():
    with pytest.raises(UserError, match="'Q' at byte offset 1000") as refused:
        built(2000, prompt="a" * 1000 + "Q")
    assert len(str(refused.value)) < 400


@pytest.fixture
def templates(tmp_path):
    """Makes a file of templates."""

    def templates(text):
        path = tmp_path / "templates.txt"
        path.write_bytes(text.encode())
        return str(path)

    return templates


def test_a_file_has_a_template_in_each_line(templates):
    path = templates("ab_\n\n_z\r\na\u2028b c\n  \n")
    tokenizer = Characters(" abcz\u2028")
    found = [listed(t) for t in built(5, tokenizer, templates=path)]
    space, a, b, c, z, mark = range(6)
    assert found == [
        [a, b, FREE, FREE, FREE],
        [FREE, z, FREE, FREE, FREE],
        [a, mark, b, space, c],
        [space, space, FREE, FREE, FREE],
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_template(templates):
    (only,) = built(3, Characters("ab\ufeff"), templates=templates("\ufeffab\r\n"))
    assert listed(only) == [0, 1, FREE]


def test_a_line_break_is_written_as_an_escape(templates):
    path = templates("a\\n_\\n\n")
    (only,) = built(4, Characters("\na"), templates=path)
    assert listed(only) == [1, 0, FREE, 0]


def test_the_blank_counts_in_a_file_too(templates):
    (only,) = built(3, templates=templates("a#c"), blank="#")
    assert listed(only) == [1, FREE, 3]


@pytest.mark.parametrize(
    "line, words",
    [
        ("a9", "'a9': .*'9' at byte offset 1"),
        ("abcdef", "has 6 tokens, more than the 4 of a sample"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_in_the_file(line, words, templates):
    path = templates(f"ab\n\n{line}\nabcdefgh\n")
    with pytest.raises(UserError, match=f"line 3 of sample.templates={path},? {words}"):
        built(4, templates=path)


def test_a_file_that_cannot_be_used_is_named(tmp_path, templates):
    for path, words in (
        (tmp_path / "none.txt", "cannot be read: .*No such file"),
        (tmp_path, "cannot be read: .*directory"),
        (templates("\n\n"), "has no line with text"),
        (templates(""), "has no line with text"),
    ):
        with pytest.raises(UserError, match=f"sample.templates={path} {words}"):
            built(4, templates=str(path))
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=f"sample.templates={path} cannot be read: .*utf-8"):
        built(4, templates=str(path))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(prompt="a", template="b"), "sample.template .*with sample.prompt or sample.suffix"),
        (dict(suffix="a", template="b"), "sample.template .*with sample.prompt or sample.suffix"),
        (dict(suffix="a", templates="f"), "sample.templates .*with sample.prompt or sample.suf"),
        (dict(template="a", templates="f"), "sample.template .*with sample.templates"),
        (dict(blank=""), "sample.blank must be one character, not ''"),
        (dict(blank="__"), "sample.blank must be one character, not '__'"),
    ],
)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(UserError, match=words):
        PromptOptions(**options)


def test_a_prompt_is_made_of_pieces(tmp_path):
    """Each text between two blanks is cut into pieces of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*symbols, "he", "<|endoftext|>"])}
    made = Tokenizer(models.BPE(vocabulary, [("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = BytePairs(path=str(tmp_path))
    he, h, e = (vocabulary[piece] for piece in ("he", "h", "e"))
    assert one(3, tokenizer, prompt="hehe") == [he, he, FREE]
    assert one(4, tokenizer, template="he_h") == [he, FREE, h, FREE]
    assert one(5, tokenizer, template="h_e_he") == [h, FREE, e, FREE, he]
