"""A run trained on conversations answers them, without the files that it was trained from."""

import importlib.util
import json
import shutil

import pytest
from peer_folders import TEMPLATE, chat_folder

import md4_jax
from md4_jax import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jinja2") is None, reason="needs pip install -e '.[chat]'"
    ),
]
KEYS = {
    "data.name": "text", "data.messages_key": "messages", "data.length": 72,
    "tokenizer.name": "bpe", "train.num_steps": 500, "train.batch_size": 16,
    "log.every": 100, "evals.validation.every": 0, "evals.samples.final": False,
    "checkpoint.every": 0, "network.depth": 2, "network.products": "float32",
}  # fmt: skip
ANSWERS = {"hi": "hello", "who": "me"}


@pytest.fixture
def talks(tmp_path):
    """60 conversations of two turns, in which each question has its answer."""
    order = [("hi", "who"), ("who", "hi")] * 30
    file = tmp_path / "talks.jsonl"
    with file.open("w") as lines:
        for questions in order:
            talk = [
                {"from": who, "value": said}
                for question in questions
                for who, said in (("human", question), ("gpt", ANSWERS[question]))
            ]
            lines.write(json.dumps({"messages": talk}) + "\n")
    return file


def test_a_run_answers_as_the_assistant_did(tiny, talks, tmp_path, capsys):
    """Both turns are learned, with their ends; the run needs the tokenizer's folder no more."""
    folder, run = chat_folder(tmp_path), tmp_path / "run"
    keys = {**KEYS, "data.path": talks, "data.turns": "each", "data.padding": "end_of_text"}
    keys |= {"tokenizer.path": folder}
    assignments = [f"--config.{key}={value}" for key, value in keys.items()]
    assert main.run(["--config", str(tiny), "--workdir", str(run), *assignments]) == 0
    said = capsys.readouterr().out
    assert "nan" not in said
    shutil.rmtree(folder)
    assert json.loads((run / "chat.json").read_text())["template"] == TEMPLATE
    model = md4_jax.load(run)
    for question, answer in ANSWERS.items():
        assert model.chat(question, 8, sampler="confidence", temperature=0) == answer
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    talk.append({"role": "user", "content": "who"})
    assert model.chat(talk, 8, sampler="confidence", temperature=0) == "me"
    saved = md4_jax.load(model.save(tmp_path / "saved"))
    assert saved.chat("hi", 8, sampler="confidence", temperature=0) == "hello"
    assert main.run(["--workdir", str(run), "--mode", "eval"]) == 0


@pytest.mark.campaign
def test_an_imported_run_takes_the_template_that_it_is_told(talks, tmp_path, capsys):
    """Of a chat model its own, unless data.chat_template names another."""
    folder, other = chat_folder(tmp_path), tmp_path / "other.jinja"
    other.write_text(
        "{% for m in messages %}<|role|>{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|role|>{% endif %}"
    )
    keys = {
        "data.path": talks, "data.messages_key": "messages", "data.length": 64,
        "train.num_steps": 1, "train.batch_size": 2, "optim.warmup_steps": 0,
        "evals.validation.every": 0, "evals.test.limit": 2, "evals.samples.final": False,
        "network.scan_blocks": False,
    }  # fmt: skip
    for name, more, template in (
        ("own", {}, TEMPLATE),
        ("told", {"data.chat_template": other}, other.read_text()),
    ):
        run = tmp_path / name
        flags = ["--mode", "import", "--from", str(folder), "--workdir", str(run)]
        flags += [f"--config.{key}={value}" for key, value in {**keys, **more}.items()]
        assert main.run(flags) == 0
        assert json.loads((run / "chat.json").read_text())["template"] == template
    assert main.run(["--workdir", str(tmp_path / "own")]) == 0
    assert "train" in capsys.readouterr().out
    assert md4_jax.load(tmp_path / "own").step == 1
