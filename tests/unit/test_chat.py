"""Chats: templates filled in, answers that end with their turn, and canvases of few lengths."""

import importlib
import json
import sys
import types

import numpy as np
import pytest
from peer_folders import TEMPLATE, chat_folder, peer_folder, says_a_or_ends

import md4_jax
from md4_jax.data import chat
from md4_jax.data.chat import Chat
from md4_jax.evals import samples
from md4_jax.model import answers, importing
from md4_jax.protocols import Prompt, UserError
from md4_jax.runtime.paths import Place

needs_jinja = pytest.mark.skipif(
    importlib.util.find_spec("jinja2") is None, reason="needs pip install -e '.[chat]'"
)
TALK = [
    {"role": "user", "content": " hi\n"},
    {"role": "assistant", "content": "abc"},
    {"role": "user", "content": "d{{ x }}e"},
]
WRITTEN = (
    "<|start|><|role|>user<|said|>\n\nhi<|eot_id|>"
    "<|role|>assistant<|said|>\n\nabc<|eot_id|>"
    "<|role|>user<|said|>\n\nd{{ x }}e<|eot_id|>"
)
TURN = "<|role|>assistant<|said|>\n\n"
GREEDY = {"name": "any_order", "order": "left_to_right", "top_k": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="module")
def model(folder):
    return md4_jax.load(folder)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A model whose tokens are 'a' or the end of the turn."""
    made = chat_folder(tmp_path_factory.mktemp("talkers"))
    says_a_or_ends(made)
    return md4_jax.load(made)


def form(template: str, **tokens: str) -> Chat:
    return Chat(template, tokens)


@needs_jinja
def test_a_conversation_is_written_as_its_template_says(model):
    assert model.form.render(TALK, answered=False) == WRITTEN
    assert model.form.render(TALK) == model.form.prompt(TALK) == WRITTEN + TURN
    text = model.form.prompt(TALK[:2])
    assert model.domain.decode(model.domain.encode(text)) == text
    begun = [*TALK, {"role": "assistant", "content": "hi the"}]
    assert model.form.prompt(begun) == WRITTEN + TURN + "hi the"
    assert model.form.prompt([*TALK, {"role": "assistant", "content": " "}]) == WRITTEN + TURN
    short = [*TALK, {"role": "assistant", "content": "e"}]  # a letter of the marks themselves
    assert model.form.prompt(short) == WRITTEN + TURN + "e"


@needs_jinja
def test_templates_get_what_transformers_gives_them():
    """Blocks take up no lines; loops may be left; JSON has no escapes of HTML."""
    made = form(
        "{% for message in messages %}\n"
        "    {% if loop.index0 == 1 %}\n"
        "        {% break %}\n"
        "    {% endif %}\n"
        "{{ message | tojson }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}",
        eos_token="</s>",
    )
    said = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}]
    assert made.render(said) == '{"role": "user", "content": "<é>"}</s>\n4'


@needs_jinja
def test_blocks_that_mark_the_answer_for_transformers_are_rendered():
    """As by its render_jinja_template, also their scope: what is set within is lost after them."""
    made = form(
        "{% set a = 1 %}\n"
        "{% for m in messages %}\n"
        "<{{ m.role }}>{% generation %}{% set a = 2 %}{{ m.content }}{{ a }}|{% endgeneration %}\n"
        "    {% generation %}\n"
        "  x{{ a }}\n"
        "    {%- endgeneration %}\n"
        "{% endfor %}"
    )
    said = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "b"}]
    assert made.render(said) == "<user><é>2|  x1<assistant>b2|  x1"


@needs_jinja
def test_a_template_is_told_that_there_are_no_tools():
    """Undefined, they would not be none, and a template would list them."""
    made = form("{% if tools is not none or documents is not none %}[TOOLS]{% endif %}x")
    assert made.render(TALK) == "x"


@needs_jinja
@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ raise_exception('no system') }}", "refuses the messages: no system"),
        ("{% for %}", "cannot be filled in: TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "cannot be filled in: SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "cannot be filled in: SecurityError"),
        ("{{ messages[0].content + 1 }}", "cannot be filled in: TypeError"),
        ("{% include '/etc/passwd' %}", "cannot be filled in: TypeError"),
    ],
)
def test_templates_of_others_run_in_a_sandbox(template, said):
    with pytest.raises(UserError, match=said):
        form(template).render(TALK)


@needs_jinja
def test_a_template_is_compiled_once_for_all_conversations(monkeypatch):
    """It is told today's date whenever it is filled in, or the day that it has for good."""
    from jinja2 import Environment

    compiled, compile, noon, today = [], Environment.compile, chat._noon, ["2026-01-03"]

    def counted(self, source, *args, **more):
        compiled.append(source)
        return compile(self, source, *args, **more)

    monkeypatch.setattr(Environment, "compile", counted)
    monkeypatch.setattr(chat, "_noon", lambda day: noon(day or today[0]))
    chat._compiled.cache_clear()
    template = "{{ strftime_now('%d') }} {{ messages[-1].content }}"
    told = [form(template).render([{"role": "user", "content": text}]) for text in "ab"]
    today[0] = "2026-01-04"
    told += [form(template).render([{"role": "user", "content": "a"}])]
    assert told == ["03 a", "03 b", "04 a"] and compiled == [template]
    assert Chat(template, {}, "2026-01-31").render(TALK).startswith("31 ")
    assert compiled == [template, template]


@needs_jinja
def test_an_answer_ends_with_what_the_template_writes_after_it():
    special = ("<|start|>", "<|im_end|>", "<|role|>", "</s>")
    ends = lambda template, **tokens: form(template, **tokens).ends(special)  # noqa: E731
    one = "{% for m in messages %}<|role|>{{ m.content }}\n<|im_end|><|start|>{% endfor %}"
    assert ends(one) == {"<|im_end|>"}
    assert ends(one, eos_token="</s>") == {"<|im_end|>", "</s>"}
    assert ends("{{ messages[1].content }}\n", eos_token="<|none|>") == set()


@needs_jinja
def test_the_ends_of_a_model(model):
    names = {model.domain.decode([token]) for token in answers.ends(model)}
    assert names == {"<|endoftext|>", "<|eot_id|>"}


@needs_jinja
def test_an_answer_ends_at_the_end_of_its_turn(talker, monkeypatch):
    """Its tokens are those that were drawn before the first <|eot_id|>, and no other text."""
    drawn = []

    def spy(*arguments):
        drawn.append(samples.drawn_samples(*arguments))
        return drawn[-1]

    monkeypatch.setattr(answers, "drawn_samples", spy)
    eot, found = talker.domain.tokenizer.id_of("<|eot_id|>"), []
    for seed in range(8):
        found.append(talker.chat("hi", 20, steps=4, seed=seed))
        start = len(talker.domain.encode(talker.form.prompt([{"role": "user", "content": "hi"}])))
        tokens = drawn[-1].tokens[0, start : start + 20].tolist()
        assert set(tokens) <= {2, eot} and len(tokens) == 20
        assert found[-1] == "a" * tokens.index(eot)
    assert len(set(found)) > 1


@needs_jinja
def test_blocks_after_the_end_of_a_turn_are_not_drawn(talker, monkeypatch):
    """Whichever of the marks ends it: the model says <|eot_id|>, and <|endoftext|> is one too."""
    counts = []

    def spy(*arguments):
        found = samples.drawn_samples(*arguments)
        counts.append(int(found.lengths[0]))
        return found

    monkeypatch.setattr(answers, "drawn_samples", spy)
    for seed in range(4):
        said = talker.chat("hi", 32, block=4, steps=4, seed=seed)
        used = len(talker.domain.encode(talker.form.prompt(TALK[:1]))) + len(said) + 1
        assert counts[-1] <= used + 3  # the block in which it ends


@needs_jinja
@pytest.mark.parametrize(
    "messages, options, said",
    [
        ([{"role": "robot", "content": "hi"}], {}, "the chat, message 1: the role 'robot' is not"),
        ([{"role": "user", "content": ["hi"]}], {}, "message 1: 'content' must be text, not a li"),
        ({"role": "user", "content": "hi"}, {}, "the chat must be a conversation, .* not a dict"),
        ([], {}, "the chat must be a conversation, .* not an empty list"),
        ("hi", {"num": 3}, "chat does not accept 'num'"),
        ("hi", {"reward": {"name": "none"}}, "chat does not accept 'reward'"),
        ("hi", {"prompt": "no"}, "chat does not accept 'prompt'"),
        ("hi", {"new_tokens": "8"}, "new_tokens must be a whole number, not '8'"),
    ],
)
def test_chats_that_are_refused(messages, options, said, model):
    with pytest.raises(UserError, match=said):
        model.chat(messages, **options)


@needs_jinja
def test_messages_may_be_spelled_as_sharegpt_does(model):
    options = {"new_tokens": 3, "steps": 2, "seed": 5}
    spelled = [{"from": "human", "value": "hi"}]
    assert model.chat(spelled, **options) == model.chat("hi", **options)


@needs_jinja
def test_an_answer_has_at_most_its_new_tokens(model):
    length = len(model.domain.encode(model.form.prompt(TALK[:1])))
    assert length == len("user" + "hi" + "assistant") + 6 + 4  # marks and line feeds
    said = rf"a chat of {length} tokens and new_tokens={65 - length} do not fit: .*=64"
    with pytest.raises(UserError, match=said):
        model.chat(TALK[:1], 65 - length)
    with pytest.raises(UserError, match="new_tokens=0 do not fit"):
        model.chat(TALK[:1], 0)
    with pytest.raises(UserError, match="unknown key in sample 'stepz'"):
        model.chat(TALK[:1], 4, stepz=1)


@needs_jinja
def test_padding_of_a_canvas_changes_nothing(model):
    """Greedy answers are those of one token after the other on a canvas without padding."""
    prompts = [model.domain.encode(text) for text in ("abc", "hi the", "<|role|>b" * 8)]
    found = answers.drawn(model, prompts, 6, GREEDY)
    ends, mask = answers.ends(model), model.domain.vocab_size
    for ids, answer in zip(prompts, found, strict=True):
        z = np.concatenate([ids, np.full(6, mask)])
        for place in range(len(ids), len(z)):
            z[place] = model.logits(z)[place].argmax()
        expected = z[len(ids) :].tolist()
        ended = [n for n, token in enumerate(expected) if token in ends]
        assert answer.tolist() == expected[: min(ended, default=6)]


@pytest.mark.campaign
@needs_jinja
def test_an_answer_may_be_guided_by_its_prompt(model):
    """Logits of weight w are w times those after the prompt, and 1 - w times those without it."""
    ids, mask = model.domain.encode("abc"), model.domain.vocab_size
    (found,) = answers.drawn(model, [ids], 4, GREEDY | {"guidance": 3.0})
    z = np.concatenate([ids, np.full(4, mask)])
    for place in range(len(ids), len(z)):
        hidden = np.concatenate([np.full(len(ids), mask), z[len(ids) :]])
        told, free = (model.logits(x)[place] for x in (z, hidden))
        z[place] = (3.0 * told - 2.0 * free).argmax()
    expected = z[len(ids) :].tolist()
    ended = [n for n, token in enumerate(expected) if token in answers.ends(model)]
    assert found.tolist() == expected[: min(ended, default=4)]
    plain = answers.drawn(model, [ids], 4, GREEDY)[0].tolist()
    assert plain != found.tolist()
    assert model.chat("hi", 4, steps=2, guidance=2.0) is not None
    assert model.infill("a_c", steps=2, guidance=2.0).tokens.shape == (1, 3)
    next(model.watch(Prompt(np.array([0, 1, 0]), np.array([1, 1, 0]) > 0), guidance=2.0, length=3))


@needs_jinja
@pytest.mark.parametrize("text, free, length", [("abc", 8, 12), ("abcdefghij", 6, 16)])
@pytest.mark.cases(1)
def test_the_last_block_is_drawn_whole(text, free, length, model, monkeypatch):
    """Of six tokens in blocks of 4, the first of which begins after the prompt, eight are drawn,
    if the 16 positions of the canvas hold them."""
    prompts = []

    def spy(*arguments):
        prompts.extend(arguments[3])
        return samples.drawn_samples(*arguments)

    monkeypatch.setattr(answers, "drawn_samples", spy)
    options = {"block": 4, "name": "any_order", "order": "left_to_right", "top_k": 1}
    (found,) = answers.drawn(model, [model.domain.encode(text)], 6, options)
    (prompt,) = prompts
    assert np.flatnonzero(~prompt.mask).tolist() == list(range(len(text), len(text) + free))
    whole = model.sample(1, text, length=length, **options).tokens[0, len(text) :]
    ended = [n for n, token in enumerate(whole) if token in answers.ends(model)]
    assert found.tolist() == whole[: min([6, *ended])].tolist()


@needs_jinja
def test_few_shapes_are_compiled(model, monkeypatch):
    """Lengths are 16, 32 or data.length, and numbers of rows powers of two."""
    shapes = []

    def spy(experiment, params, programs, prompts, context):
        shapes.append((len(prompts), len(prompts[0].tokens)))
        assert all(len(values) == len(prompts) for values in context.values())
        # Nothing else is drawn: the padding counts as given.
        assert {int((~prompt.mask).sum()) for prompt in prompts} == {6}
        return samples.drawn_samples(experiment, params, programs, prompts, context)

    monkeypatch.setattr(answers, "drawn_samples", spy)
    prompts = [np.zeros(n, np.int32) for n in (1, 2, 9, 20, 58)]
    answers.drawn(model, prompts, 6, {**GREEDY, "batch_size": 8})
    assert shapes == [(4, 16), (1, 32), (1, 64)]
    prompts = [np.zeros(1, np.int32)] * 11
    assert len(answers.drawn(model, prompts, 6, {**GREEDY, "batch_size": 4})) == 11
    assert shapes[3:] == [(11, 16)]
    assert answers.drawn(model, [], 6, GREEDY) == []


@needs_jinja
@pytest.mark.slow
def test_chats_survive_saving_and_importing(talker, tmp_path):
    saved = md4_jax.load(talker.save(tmp_path / "saved"))
    assert saved.form == talker.form
    importing.run(str(tmp_path / "saved"), {"optim.warmup_steps": "0"}, Place(tmp_path / "run"))
    run = md4_jax.load(tmp_path / "run")
    answered = [m.chat(TALK, 8, steps=4, seed=3) for m in (talker, saved, run)]
    assert answered[0] == answered[1] == answered[2]


def test_a_folder_of_its_own_layout(tmp_path):
    """A file of the template goes before tokenizer_config.json; of several, the default one."""
    where = Place(tmp_path)
    assert Chat.of_folder(where) is None and Chat.kept(where) is None
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "bos_token": None, "eos_token": {"content": "</s>"}})
    )
    assert Chat.of_folder(where) == Chat("d", {"eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Chat.of_folder(where).template == "file"
    Chat("é", {"bos_token": "<s>"}).keep(where)
    assert Chat.kept(where) == Chat("é", {"bos_token": "<s>"})
    (tmp_path / "chat.json").write_text('{"template": "x", "tokens": {"bos_token": 3}}')
    with pytest.raises(UserError, match="chat.json is damaged"):
        Chat.kept(where)


@needs_jinja
@pytest.mark.parametrize(
    "template, line, said",
    [
        ("a\n\n{% for %}", 3, "TemplateSyntaxError"),
        ("a\n{{ messages.append(1) }}", 2, "SecurityError"),
        ("{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}\n\n", 2, "TypeError"),
        ("{% macro f(x) %}\n\n{{ x + 1 }}{% endmacro %}\n{{ f('') }}", 3, "TypeError"),
    ],
)
def test_an_error_of_a_template_names_its_file_and_line(template, line, said, tmp_path):
    where = Place(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    chats = {"tokenizer_config.json": Chat.of_folder(where)}
    (tmp_path / "chat_template.jinja").write_text(template)
    chats["chat_template.jinja"] = Chat.of_folder(where)
    (tmp_path / "other.jinja").write_text(template)
    chats["other.jinja"] = Chat.of_path(where / "other.jinja").dated()
    chats["other.jinja"].keep(where)
    chats["chat.json"] = Chat.kept(where)
    for name, made in chats.items():
        words = f"^line {line} of the chat template in .*/{name} cannot be filled in: {said}: "
        with pytest.raises(UserError, match=words):
            made.render(TALK)


def test_a_template_that_is_no_text_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": {"default": "d"}}')
    with pytest.raises(UserError, match="tokenizer_config.json is damaged: its 'chat_template' mu"):
        Chat.of_folder(Place(tmp_path))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="chat_template.jinja is not text in UTF-8: "):
        Chat.of_folder(Place(tmp_path))


def test_special_tokens_in_a_file_of_their_own(tmp_path):
    """As older folders have it; entries of the vocabulary in tokenizer_config.json replace it."""
    own, older = (tmp_path / f"{name}.json" for name in ("tokenizer_config", "special_tokens_map"))
    told = {"chat_template": "d", "eos_token": "</old>", "pad_token": "<pad>"}
    own.write_text(json.dumps(told))
    older.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert Chat.of_folder(Place(tmp_path)) == Chat("d", tokens)
    (tmp_path / "other.jinja").write_text("o")
    assert Chat.of_path(Place(tmp_path / "other.jinja")) == Chat("o", tokens)
    own.write_text(json.dumps({**told, "added_tokens_decoder": {}}))
    assert Chat.of_folder(Place(tmp_path)).tokens == {"eos_token": "</old>", "pad_token": "<pad>"}


def test_a_model_without_a_template_says_so(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "mdlm"))
    with pytest.raises(UserError, match="mdlm has no chat template: use sample"):
        model.chat("ab")
    assert not (model.save(tmp_path / "saved") / "chat.json").exists()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    chat._compiled.cache_clear()  # where an earlier test has compiled the template
    for name in ("jinja2", "jinja2.sandbox"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[chat\]'"):
        form(TEMPLATE).render(TALK)


@needs_jinja
@pytest.mark.parametrize(
    "messages, said",
    [
        ([], "a chat needs at least one message"),
        ([{"role": "user", "content": None}], "a message has no content"),
        ([{"role": "user"}], "a message must be a dict with the keys 'role' and 'content'"),
        (["hi"], "a message must be a dict with the keys"),
    ],
)
def test_messages_that_are_none(messages, said):
    with pytest.raises(UserError, match=said):
        form(TEMPLATE).prompt(messages)


@pytest.fixture
def harness(monkeypatch):
    """The class for lm_eval, whose place a stand-in takes if it is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        parts = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api")}
        parts["lm_eval.__main__"] = types.SimpleNamespace(cli_evaluate=None)
        parts["lm_eval.api.model"] = types.SimpleNamespace(LM=object)
        parts["lm_eval.api.registry"] = types.SimpleNamespace(
            register_model=lambda name: lambda cls: cls
        )
        for name, part in parts.items():
            monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.delitem(sys.modules, "md4_jax.model.harness", raising=False)
    yield importlib.import_module("md4_jax.model.harness").Harness
    sys.modules.pop("md4_jax.model.harness", None)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"drawz": 64}, "unknown key in sample 'drawz'"),
        ({"sampler": "nix"}, "unknown sample.name 'nix'"),
        ({"num": 3}, "num cannot be set: tasks give the prompts"),
        ({"steps": "many"}, "sample.steps must be a whole number, not 'many'"),
        ({"batch_size": 0}, "sample.batch_size must be at least 1"),
        ({"draws": "many"}, "draws must be a whole number, not 'many'"),
        ({"seed": 1.5}, "seed must be a whole number, not"),
        ({"max_gen_toks": "x"}, "max_gen_toks must be a whole number, not 'x'"),
    ],
)
def test_the_harness_refuses_options_that_a_task_may_not_read(options, said, harness, tmp_path):
    """Log-likelihoods do not depend on keys of samples: a misspelled `draws` would be ignored."""
    with pytest.raises(UserError, match=said):
        harness(str(peer_folder(tmp_path, "mdlm")), **options)


@needs_jinja
def test_the_harness_applies_the_template(harness, folder, talker, tmp_path):
    made = harness(str(folder), steps=4, greedy=False)
    assert made.apply_chat_template(TALK) == WRITTEN + TURN
    begun = [*TALK, {"role": "assistant", "content": "so"}]
    assert made.apply_chat_template(begun, add_generation_prompt=False) == WRITTEN + TURN + "so"
    assert made.chat_template(True) == TEMPLATE and made.chat_template(False) == ""
    assert "/" not in made.tokenizer_name
    with pytest.raises(UserError, match="--apply_chat_template tools: give no name"):
        made.chat_template("tools")
    made.model = talker
    ask = types.SimpleNamespace(args=(WRITTEN + TURN, {"max_gen_toks": 7, "until": ["aaaa"]}))
    (text,) = made.generate_until([ask])
    assert set(text) <= {"a"} and len(text) < 4
    plain = harness(str(peer_folder(tmp_path, "mdlm")))
    with pytest.raises(UserError, match="has no chat template: remove --apply_chat_template"):
        plain.apply_chat_template(TALK)
