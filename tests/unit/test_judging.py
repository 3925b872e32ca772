"""Models that are to judge samples are looked for when a run starts."""

import dataclasses
import json
import re
import sys
import types

import jax
import numpy as np
import pytest
from peer_folders import own_lora, peer_folder, tokenizer
from tiny_networks import random_parameters

import md4_jax
from md4_jax.config import build, inputs, runs, schema
from md4_jax.config import judging as judging_config
from md4_jax.config import load as config
from md4_jax.config.judging import Others, judge_of, says_causal
from md4_jax.data.domains import TextDomain, keep_domain
from md4_jax.data.tokenizers import Characters
from md4_jax.evals import judges
from md4_jax.evals.context import Context
from md4_jax.evals.generative import GenerativePerplexity
from md4_jax.evals.judged import text_size
from md4_jax.evals.likelihood import reported
from md4_jax.evals.rewards import JudgeReward
from md4_jax.evals.samples import DrawnSamples, drawn_samples, with_context
from md4_jax.model import judging
from md4_jax.options import CheckpointOptions
from md4_jax.protocols import UserError, batch_of
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.runtime.paths import place
from md4_jax.samplers import profile
from md4_jax.samplers.batches import context_of
from md4_jax.training.loop import fresh_state

LORA = {"model.layers.0.self_attn.q_proj": 2}


def check(folder, is_causal=lambda key, asked: True):
    judges.check_source("evals.a.judge", str(folder), is_causal)


def test_a_folder_without_a_model_is_no_judge(tmp_path):
    said = "evals.a.judge=.*run contains neither a run with a checkpoint nor a model"
    with pytest.raises(UserError, match="evals.a.judge=.*run is not the directory of a run"):
        check(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=said):
        check(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "30").mkdir()
    for name in ("run", "run/checkpoints/30"):
        check(tmp_path / name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    check(tmp_path / "model")


def test_a_run_without_a_checkpoint_is_missed_at_once(tmp_path):
    """One that has none, whether or not the directory of the checkpoints is there."""
    told = types.SimpleNamespace(checkpoint="newest")
    experiment = types.SimpleNamespace(eval=told, checkpoint=CheckpointOptions())
    for make in (lambda: None, (tmp_path / "checkpoints").mkdir):
        make()
        with pytest.raises(UserError, match="holds no checkpoint yet: train it first"):
            runs.check_checkpoint(experiment, place(tmp_path))


@pytest.mark.parametrize("at", ["run", "run/checkpoints/30"])
def test_a_run_that_is_not_causal_is_refused_at_once(at, tmp_path):
    (tmp_path / "run" / "checkpoints" / "30").mkdir(parents=True)
    is_causal = Others(None, judging.FOREIGN).is_causal
    for network in ({"causal": True}, {}):  # a network of the user's own may not say it
        config.store(place(tmp_path / "run"), {"network": network})
        check(tmp_path / at, is_causal)
    for network in ({"causal": False}, {"name": "unet"}):  # a U-Net has no such key
        config.store(place(tmp_path / "run"), {"network": network})
        with pytest.raises(UserError, match=r"^evals.a.judge=.* is not causal: give a run or a "):
            check(tmp_path / at, is_causal)


def test_a_folder_that_is_not_causal_is_refused_without_its_parameters(tmp_path, monkeypatch):
    is_causal = Others(None, judging.FOREIGN).is_causal
    folders = [peer_folder(tmp_path, name) for name in ("gpt2", "diffusiongemma")]
    folders += [md4_jax.load(folder).save(tmp_path / f"of_{folder.name}") for folder in folders]
    monkeypatch.setattr(np, "frombuffer", None)  # by which arrays are read
    for folder in folders:
        if "gpt2" in folder.name:
            check(folder, is_causal)
        else:
            with pytest.raises(UserError, match="^evals.a.judge=.*gemma is not causal"):
                check(folder, is_causal)


def test_an_adapter_alone_is_no_judge(tmp_path):
    adapter = own_lora(tmp_path / "lora", peer_folder(tmp_path, "qwen2"), LORA)
    said = "^evals.a.judge=.*lora holds only an adapter of "
    with pytest.raises(UserError, match=said):
        check(adapter, Others(None, judging.FOREIGN).is_causal)
    (adapter / "config.json").write_text(json.dumps({"model_type": "zebra"}))
    with pytest.raises(UserError, match="^evals.a.judge=.*lora"):
        check(adapter, Others(None, judging.FOREIGN).is_causal)


@pytest.fixture
def on_the_hub(monkeypatch):
    """Folders by their names on the hub, which is not asked; the package need not be there."""
    folders = {}

    def snapshot(name):
        if name not in folders:
            raise UserError(f"{name} cannot be fetched: no network")
        return place(str(folders[name]))

    monkeypatch.setitem(judges.PACKAGES, "hf:", ((), "hub"))
    monkeypatch.setattr(judging.hub, "snapshot", snapshot)
    return folders


def test_a_judge_on_the_hub_is_fetched_at_once(tmp_path, on_the_hub):
    is_causal = Others(None, judging.FOREIGN).is_causal
    for name in ("gpt2", "diffusiongemma"):
        on_the_hub[f"hf:{name}"] = peer_folder(tmp_path, name)
    check("hf:gpt2", is_causal)
    with pytest.raises(UserError, match="^evals.a.judge=hf:diffusiongemma is not causal"):
        check("hf:diffusiongemma", is_causal)
    said = "^evals.a.judge=hf:none: hf:none cannot be fetched: no network$"
    with pytest.raises(UserError, match=said):
        check("hf:none", is_causal)
    saved = md4_jax.load(on_the_hub["hf:gpt2"]).save(tmp_path / "saved")
    on_the_hub["hf:saved"] = saved
    check("hf:saved", is_causal)


@pytest.mark.parametrize("source", ["hf:gpt2", "path"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "{", "config.json is not readable JSON"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", tokenizer(300, 0).to_str(), "the tokenizer has 125 symbols, but the m"),
        ("model.safetensors", "", "model.safetensors"),
    ],
)
def test_a_judge_that_cannot_be_read_is_refused_at_once(
    source, file, content, said, tmp_path, on_the_hub
):
    folder = peer_folder(tmp_path, "gpt2")
    (folder / file).write_text(content)
    on_the_hub["hf:gpt2"] = folder
    name = str(folder) if source == "path" else source
    with pytest.raises(UserError, match=f"^evals.a.judge={name}:? .*{said}"):
        check(name, Others(None, judging.FOREIGN).is_causal)


def test_a_judge_of_transformers_is_looked_for_at_once(monkeypatch):
    """Its config and its tokenizer; `torch` is only asked for its weights."""
    read = []

    def reader(kind, missing):
        def from_pretrained(name):
            read.append((kind, name))
            if name in missing:
                raise OSError(f"{name} has no {kind}")

        return types.SimpleNamespace(from_pretrained=from_pretrained)

    library = types.ModuleType("transformers")
    library.AutoConfig = reader("config", ["none"])
    library.AutoTokenizer = reader("tokenizer", ["wordless"])
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(judges.PACKAGES, judges.MARK, ((), "judge"))
    check("transformers:gpt2")
    assert read == [("config", "gpt2"), ("tokenizer", "gpt2")]
    for name, lacks in (("none", "config"), ("wordless", "tokenizer")):
        said = f"^evals.a.judge=transformers:{name} cannot be read: {name} has no {lacks}$"
        with pytest.raises(UserError, match=said):
            check(f"transformers:{name}")


KEYS = {
    "data.name": "text", "data.length": "8", "data.label_key": "kind", "data.validation": "0",
    "data.test": "1", "tokenizer.name": "bytes", "network.size": "16", "network.depth": "1",
    "network.heads": "2", "network.hidden": "16", "sample.num": "4", "sample.steps": "4",
    "train.batch_size": "4", "mesh.data": "1",
}  # fmt: skip


CAUSAL = {
    "network__causal": "True", "objective__name": "autoregressive", "sample__name": "left_to_right",
}  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """Makes experiments on texts of so many classes."""

    def made(classes=2, **changes):
        lines = [json.dumps({"kind": n % classes, "text": f"{n}"}) + "\n" for n in range(8)]
        (tmp_path / "texts.jsonl").write_text("".join(lines))
        words = KEYS | {"data.path": str(tmp_path / "texts.jsonl")}
        words |= {key.replace("__", "."): value for key, value in changes.items()}
        asked = schema.load_config(str(PACKAGE_ROOT / "configs" / "base.py"), words)
        return build.experiment(asked, inputs.domain_and_source(asked, None)[0])

    return made


@pytest.mark.slow
def test_a_judge_with_classes_is_told_that_of_the_samples(made, tmp_path):
    experiment = made(network__classes="2", sample__label="1", sample__judge="self")
    params = fresh_state(experiment).whole
    params = {**params, "network": random_parameters(experiment.network)}
    programs, found = {}, {}

    def judged(judge):
        context = Context(
            "samples", 0, place(tmp_path), None, lambda params: judge, None, programs, {}, print
        )
        return DrawnSamples().run(experiment, params, context)["judge_nats_per_token"]

    tokens = drawn_samples(experiment, params, programs).tokens
    bound = reported(experiment)
    for label in (-1, 0, 1):
        told = {"label": np.full(4, label, np.int32)} if label >= 0 else {}
        batch = batch_of(tokens, context=told)
        found[label] = bound.of_batches(experiment, params, [batch], programs)["nats_per_token"]
    assert judged((experiment, params)) == found[1] and len({*found.values()}) == 3
    experiment = experiment._replace(sample=dataclasses.replace(experiment.sample, label=-1))
    drawn = drawn_samples(experiment, params, programs).tokens
    told = context_of(experiment.sample, 4, 2)
    assert {*told["label"].tolist()} == {0, 1}
    expected = bound.of_batches(experiment, params, [batch_of(drawn, context=told)], programs)
    assert judged((experiment, params)) == expected["nats_per_token"]
    experiment = experiment._replace(sample=dataclasses.replace(experiment.sample, label=1))
    plain = made(data__label_key="")
    its = {**params, "network": random_parameters(plain.network)}
    alone = bound.of_batches(plain, its, [batch_of(tokens)], programs)["nats_per_token"]
    assert judged((plain, its)) == alone


def test_each_sample_of_several_batches_keeps_its_class():
    """Rows that fill up the last batch get that of the last sample."""
    batches = iter([batch_of(np.zeros((2, 3), np.int32))] * 3)
    told = {"label": np.arange(5)}
    found = with_context(batches, told, batch_size=2, rows=np.arange(2))
    assert [b.context["label"].tolist() for b in found] == [[0, 1], [2, 3], [4, 4]]


def test_a_judge_with_other_classes_is_refused(made, tmp_path):
    folder = place(tmp_path / "judge")
    asked = {"network__classes": "2", "sample__judge": str(folder)}
    other = made(classes=3, network__classes="3")
    folder.mkdir()
    config.store(folder, other.config)
    keep_domain(other.domain, folder)
    with pytest.raises(UserError, match="judge was trained with network.classes=3, but this run"):
        judge_of(made(sample__label="1", **asked))
    with pytest.raises(UserError, match="judge was trained with network.classes=3, but this run"):
        judge_of(made(**asked))  # each sample has a class
    asked["network__label_dropout"] = "0.1"
    with pytest.raises(UserError, match="label_dropout=0 and cannot judge texts without a class"):
        judge_of(made(**asked))
    other.config["network"]["label_dropout"] = 0.1
    config.store(folder, other.config)
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        judge_of(made(**asked))


def test_a_judge_whose_classes_have_other_names_is_refused():
    """It would be told the classes by the numbers of the samples."""

    def run(*labels, classes=2):
        return types.SimpleNamespace(
            domain=TextDomain(Characters("ab"), 4, labels),
            sample=types.SimpleNamespace(label=1, judge="runs/judge"),
            config={"network": {"classes": classes, "label_dropout": 0.1}},
        )

    own = run("no", "yes")
    for judge in (run("no", "yes"), run(classes=0), run("yes", "no", classes=0)):
        judging_config._check_classes(own, judge)
    with pytest.raises(UserError, match="judge was trained on other .* 'no' instead of 'yes'"):
        judging_config._check_classes(own, run("yes", "no"))


def test_another_run_reads_the_profile_of_its_own_directory(made, tmp_path):
    """sample.grid=optimal is in the config of a run that was made after its profile."""
    folder = place(tmp_path / "judge")
    folder.mkdir()
    other = made(data__label_key="")
    config.store(folder, {**other.config, "sample": {**other.config["sample"], "grid": "optimal"}})
    keep_domain(other.domain, folder)
    profile.keep(folder, {"nats": [8.0 - n for n in range(8)]})
    found, directory = runs.other_run(other, "sample.judge", str(folder))
    assert directory == folder and found.config["sample"]["grid"] == "optimal"


def test_an_end_of_text_is_a_token_of_the_judge(made):
    """Bytes do not spell it, and vocabularies of other models may call it something else."""
    judge = judges.RunJudge(made(data__label_key=""), None, {})
    text = "a\u00e9<|endoftext|><|endoftext|>b c"
    raw = [97, 195, 169, 256, 256, 98, 32, 99]
    (ids,) = judge.tokens([text])
    assert ids.tolist() == raw and judge.tokens(["<|endoftext|>"])[0].tolist() == [256]
    assert judge.counted(text, ids) == text and text_size(text) == (6, 3)
    asked = GenerativePerplexity("runs/ar", end_of_text="first")
    (kept,) = asked._cut(judge, [text])[1]
    assert kept.tolist() == raw[:4] and judge.counted(text, kept) == "a\u00e9<|endoftext|>"
    assert text_size(judge.counted(text, kept)) == (3, 1)
    whole = dataclasses.replace(asked, end_of_text="all")._cut(judge, [text])[1]
    assert whole[0].tolist() == raw
    for length, most in ((0, 8), (4, 4), (99, 8)):  # which results name as judge_length
        assert dataclasses.replace(asked, length=length)._most(judge) == most


def test_a_published_judge_reads_an_end_of_text_as_its_own(tmp_path):
    """The vocabulary of this GPT-2 calls it otherwise, and would spell it by letters."""
    experiment = judging.read("judge", str(peer_folder(tmp_path, "gpt2")), {})[0]
    judge = judges.PublishedJudge(experiment, None, {})
    (ids,) = judge.tokens(["ab<|endoftext|>c"])
    assert experiment.domain.tokenizer.eot == "<|special_0|>" and len(ids) == 4
    assert ids[2] == judge.end and judge.counted("", ids) == "b<|endoftext|>c"
    # One that knows it reads it by itself.
    known = peer_folder(tmp_path / "known", "gpt2")
    told = (known / "tokenizer.json").read_text().replace("<|special_0|>", "<|endoftext|>")
    (known / "tokenizer.json").write_text(told)
    experiment = judging.read("judge", str(known), {})[0]
    judge = judges.PublishedJudge(experiment, None, {})
    assert judge.tokens(["ab<|endoftext|>c"])[0].tolist() == ids.tolist()
    assert judge.counted("", ids) == "b<|endoftext|>c"


class Letters:
    """As much of a tokenizer of transformers as a judge asks: letters, and </s> for the end."""

    eos_token, eos_token_id = "</s>", 0

    def __init__(self, is_fast):
        self.is_fast = is_fast

    def get_vocab(self):
        return {"</s>": 0}

    def __call__(self, text, add_special_tokens, return_offsets_mapping=False):
        if not isinstance(text, str):
            return {"input_ids": [self(one, False)["input_ids"] for one in text]}
        found = list(re.finditer("</s>|.", text))
        ids = [0 if one[0] == "</s>" else ord(one[0]) for one in found]
        return {"input_ids": ids, "offset_mapping": [one.span() for one in found]}

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join(chr(i) if i else "</s>" for i in ids)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_judge_of_transformers_reads_an_end_of_text_as_its_own(is_fast):
    judge, text = object.__new__(judges.TransformersJudge), "ab<|endoftext|>c"
    judge._tokenizer = Letters(is_fast)
    (ids,) = judge.tokens([text])
    assert ids.tolist() == [97, 98, 0, 99]
    assert judge.counted(text, ids) == "b<|endoftext|>c"
    assert judge.counted(text, ids[:3]) == "b<|endoftext|>"
    assert text_size(judge.counted(text, ids)) == (2, 2)


def test_a_published_judge_compiles_once_for_lengths_that_are_close(tmp_path):
    """Padding changes nothing, and neither do other texts of the batch."""
    experiment, params, _ = judging.read("judge", str(peer_folder(tmp_path, "gpt2")), {})
    programs, compiled = {}, []

    def listen(event: str, seconds: float, **more) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    def found(ids):
        judge = judges.PublishedJudge(experiment, params, programs)
        return judge.judge(ids, 2).nats, judge.features(ids, 2)

    ids = [np.arange(1, size, dtype=np.int32) for size in (12, 16, 5, 17)]
    found(ids[:1])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        each = [found([row]) for row in ids]
        for got, one in zip(found(ids), zip(*each, strict=True), strict=True):
            np.testing.assert_allclose(got, np.concatenate(one), rtol=1e-5, atol=1e-6)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled and len(programs) == 2
    longer = np.arange(1, 40, dtype=np.int32)
    assert found([longer])[0] > each[-1][0]


def test_a_judge_is_read_once(made):
    """By evaluations and rewards together; one that cannot judge is asked for again."""
    read, programs = [], {}
    one, other = made(data__label_key=""), made(data__label_key="", **CAUSAL)

    def run_of(key, source):
        read.append((key, source))
        return (other if source == "ar" else one), {}, True

    run_of.is_causal = lambda key, source: True
    first = judges.opened("evals.a.judge", "ar", run_of, programs)
    assert judges.opened("evals.b.judge", "ar", run_of, programs) is first
    for key in ("evals.a.judge", "evals.b.judge"):
        with pytest.raises(UserError, match=f"{key}=masked is not causal"):
            judges.opened(key, "masked", run_of, programs)
    assert [source for _, source in read] == ["ar", "masked", "masked"]


def test_a_reward_shares_the_judge_of_an_evaluation(made, monkeypatch):
    monkeypatch.setattr(judges, "check_source", lambda *told: None)
    programs, other = {}, made(data__label_key="", **CAUSAL)
    run_of = types.SimpleNamespace(is_causal=None)
    judge = judges.opened("evals.a.judge", "ar", lambda *told: (other, {}, True), programs)
    assert JudgeReward("ar").opened(run_of, programs).judge() is judge


def test_a_judge_that_knows_no_text_without_a_class():
    section = {"name": "transformer", "causal": True, "classes": 3}
    with pytest.raises(UserError, match="evals.a.judge=runs/b was .*classes=3 and .* without a"):
        says_causal("evals.a.judge", "runs/b", section)
    assert says_causal("evals.a.judge", "runs/b", {**section, "label_dropout": 0.1})
