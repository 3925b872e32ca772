"""A user's mistakes: the message says what to change, and nothing on the disk has changed."""

import json
import random
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from md4_jax.config import inputs, schema
from md4_jax.config import load as config_lib
from md4_jax.data.domains import TextDomain, keep_domain
from md4_jax.data.sources import text8
from md4_jax.data.tokenizers import Bytes, Characters
from md4_jax.runtime.paths import place

# Assignments of the command line -> what the message must hold.
CONFIG = [
    # Unknown names: the nearest is suggested, the known ones are listed.
    (["train.batch_sise=8"], ["key in train 'batch_sise'", "mean 'batch_size'?", "num_steps"]),
    (["network.dept=3"], ["key in network 'dept'", "mean 'depth'?", "heads"]),
    (["process.schedule.pover=2"], ["key in process.schedule 'pover'"]),
    (["trian.batch_size=8"], ["config section 'trian'", "mean 'train'?", "checkpoint"]),
    (["train.inner.key=8"], ["config section 'train.inner'"]),
    (["zzz=8"], ["config section 'zzz'. Known: ", "checkpoint"]),
    (["data.name=shakespear"], ["data.name 'shakespear'", "mean 'shakespeare'?"]),
    (["tokenizer.name=byte"], ["tokenizer.name 'byte'", "mean 'bytes'?"]),
    (["process.name=masked"], ["process.name 'masked'", "mean 'masking'?"]),
    (["process.schedule.name=cosin"], ["process.schedule.name 'cosin'", "mean 'cosine'?"]),
    (["objective.name=md5"], ["objective.name 'md5'", "mean 'md4'?"]),
    (["evals.test.objective.name=anyorder"], ["evals.test.objective.name", "mean 'any_order'?"]),
    (["evals.test.name=likelyhood"], ["evals.test.name", "mean 'likelihood'?"]),
    (
        ["evals.test.features.name=rndom", "evals.test.name=frechet"],
        ["evals.test.features.name", "mean 'random'?"],
    ),
    (["network.name=transformers"], ["network.name", "mean 'transformer'?"]),
    (["optim.name=adam"], ["optim.name 'adam'", "mean 'adamw'?"]),
    (["sample.name=ancestry"], ["sample.name 'ancestry'", "mean 'ancestral'?"]),
    (["sample.reward.name=patern"], ["sample.reward.name 'patern'", "mean 'pattern'?"]),
    (["sample.grid=cosinus"], ["sample.grid 'cosinus'", "mean 'cosine'?", "uniform"]),
    # Values of a wrong type or out of range.
    (["train.batch_size=8.5"], ["train.batch_size must be a whole number, not 8.5"]),
    (["train.batch_size=many"], ["train.batch_size must be a whole number, not 'many'"]),
    (["train.batch_size=True"], ["train.batch_size must be a whole number, not True"]),
    (["optim.learning_rate=fast"], ["optim.learning_rate must be a number, not 'fast'"]),
    (["network.remat=half"], ["network.remat must be none, dots or full, not 'half'"]),
    (["network=3"], ["network must be a section"]),
    (
        ["network.tables=640", "data.windows=every"],
        ["network.tables=640 needs data.windows='grid', not 'every'"],
    ),
    (["train.num_steps=0"], ["train.num_steps must be at least 1, not 0"]),
    (["train.ema=1.0"], ["train.ema must lie in [0, 1), not 1.0"]),
    (["log.every=0"], ["log.every must be at least 1, not 0"]),
    (["log.profile=10"], ["log.profile must be a list of whole numbers, such as 1,2, not 10"]),
    (["checkpoint.every=-1"], ["checkpoint.every must be at least 0, not -1"]),
    (
        ["evals.test.split=dev"],
        ["evals.test.split must be train, validation, test or all, not 'dev'"],
    ),
    (["sample.num=0"], ["sample.num must be at least 1, not 0"]),
    (["sample.temperature=-1"], ["temperature", "-1"]),
    (["sample.top_p=1.5"], ["top_p", "1.5"]),
    (["data.length=1"], ["data.length must be at least 2, not 1"]),
    (["optim.warmup_steps=31"], ["optim.warmup_steps=31", "train.num_steps=30"]),
    (["optim.decay=cosin"], ["optim.decay must be one of cosine, linear, constant, rsqrt, not"]),
    (["network.dtype=float16"], ["network.dtype must be float32 or bfloat16, not 'float16'"]),
    (["network.lora_rank=-1"], ["network.lora_rank must not be negative, not -1"]),
    (["network.lora_dropout=0.1"], ["network.lora_dropout=0.1", "network.lora_rank=0"]),
    (["network.lora_rank=4"], ["network.lora_rank trains adapters of a model"]),
    (["network.parameters=bfloat16"], ["network.parameters='bfloat16'", "network.lora_rank"]),
    (["train.trainable=lora"], ["train.trainable='lora' matches none of the network's"]),
    (["train.trainable=("], ["train.trainable='(' is not a regular expression"]),
    # Sections that do not go together, with both numbers.
    (["network.size=30", "network.heads=4"], ["network.size=30", "network.heads=4"]),
    (["train.microbatches=3"], ["train.batch_size=8", "train.microbatches=3", "which is 3"]),
    (["mesh.data=64"], ["data=64 x fsdp=1 x context=1 x tensor=1 needs 64 devices", "there are "]),
    (["mesh.fsdp=0"], ["mesh.fsdp must be at least 1, not 0"]),
    (
        ["evals.test.objective.name=any_order", "evals.test.objective.weight_power=0.5"],
        ["'any_order'", "is not a bound"],
    ),
    (["data.separate_documents=True"], ["data.separate_documents=True", "'characters' has none"]),
    # Data.
    (["data.name=text", "data.path=/nowhere/*.txt"], ["data.path", "'/nowhere/*.txt'"]),
    (["data.name=text"], ["data.path is needed by data.name='text'"]),
    (["data.name=text8", "data.path=/nowhere/text8"], ["data.path", "no file /nowhere/text8"]),
    (["data.length=2000000"], ["train split has 1003", "data.length=2000000"]),
    (["tokenizer.alphabet=abc"], ["character 'F' at offset 0", "alphabet of 3 characters"]),
    (["tokenizer.name=text8"], ["'a' to 'z' and the space", "'F' at byte offset 0"]),
    (["tokenizer.name=bpe"], ["tokenizer.path or tokenizer.hub"]),
    (["tokenizer.name=bpe", "tokenizer.path=/nowhere"], ["tokenizer.path", "/nowhere"]),
]


@pytest.mark.parametrize("assignments, said", CONFIG, ids=[c[0][0] for c in CONFIG])
def test_a_wrong_config(assignments, said, tiny, tmp_path, refused):
    workdir = tmp_path / "run"
    flags = [f"--config.{assignment}" for assignment in assignments]
    message = refused("--config", tiny, "--workdir", workdir, *flags)
    for words in said:
        assert words in message
    assert not workdir.exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--config", "configs/nothing.py"], "configs/nothing.py: there is no such file"),
        (["--config", "README.md"], "README.md"),
        (["--config", "md4_jax/protocols/batch.py"], "get_config"),
        (["--config", "configs/base.py", "--config.train.seed"], "needs a value"),
        ([], "there is no --config and no --workdir of a run: give --config FILE"),
        (["--mode", "eval"], "or the --workdir of a run to use its config"),
        (
            ["--workdir", "/nowhere/run"],
            "there is no --config and no run in --workdir /nowhere/run",
        ),
        (["--config", "configs/base.py", "--mode", "eval"], "--mode eval needs the --workdir"),
        (["--config", "configs/base.py", "--mode", "sample"], "--mode sample needs the --workdir"),
        (  # before it waits for process 0
            ["--config", "configs/base.py", "--distributed", "127.0.0.1:1,2,1"],
            "--distributed needs the --workdir",
        ),
    ],
)
def test_wrong_arguments(arguments, said, refused):
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--config"], "usage: python -m md4_jax"),
        (["--config", "x", "--zzz=y"], "usage: python -m md4_jax"),
        (["--config", "x", "--mode", "trian"], "unknown --mode 'trian'; did you mean 'train'?"),
        (["--config", "x", "--worksdir=y"], "unknown flag --worksdir: did you mean --workdir?"),
    ],
)
def test_wrong_flags(arguments, said, run):
    ended = run(*arguments)
    assert ended.code == 2
    assert said in ended.err and not ended.out


@pytest.fixture
def train_on(tiny, tmp_path, refused):
    """The message when a corpus is refused."""

    def train_on(name, path, *assignments):
        workdir = tmp_path / "run"
        flags = [f"--config.data.name={name}", f"--config.data.path={path}"]
        flags += [f"--config.{assignment}" for assignment in assignments]
        message = refused("--config", tiny, "--workdir", workdir, *flags)
        assert not workdir.exists()
        return message

    return train_on


def letters(count: int) -> bytes:
    return bytes(random.Random(0).choices(b" abcdefghijklmnopqrstuvwxyz", k=count))


def test_text8_with_a_foreign_byte(train_on, tmp_path):
    path = tmp_path / "text8"
    path.write_bytes(letters(1234) + b"A" + letters(1000))
    message = train_on("text8", path, "tokenizer.name=text8")
    assert "b'A' at offset 1234" in message and str(path) in message


@pytest.mark.parametrize("is_zip", [False, True])
def test_text8_of_the_right_size_and_wrong_content(is_zip, train_on, tmp_path, monkeypatch):
    content = letters(5000)
    monkeypatch.setattr(text8, "TEXT_BYTES", len(content))
    path = tmp_path / "text8"
    if is_zip:
        path = tmp_path / "text8.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("text8", content)
    else:
        path.write_bytes(content)
    message = train_on("text8", path, "tokenizer.name=text8")
    assert f"CRC-32 is {zlib.crc32(content):08x} instead of {text8.TEXT_CRC:08x}" in message


def test_text8_zip_cut_short(train_on, tmp_path):
    path = tmp_path / "text8.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text8", letters(5000))
    path.write_bytes(path.read_bytes()[:3000])
    assert "not a whole zip file" in train_on("text8", path, "tokenizer.name=text8")


@pytest.mark.parametrize("size", [0, 3, 40])
@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_a_corpus_shorter_than_a_sequence(size, tokenizer, train_on, tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(letters(size))
    message = train_on("text", path, f"tokenizer.name={tokenizer}", "data.length=64")
    if size == 40:
        assert "tokens, fewer than one sequence" in message and "data.length=64" in message


@pytest.mark.parametrize("split, said", [("validation", "validation"), ("test", "test")])
def test_nothing_to_evaluate_on(split, said, train_on, tmp_path):
    """Said at the start, not when the training is over."""
    path = tmp_path / "some.txt"
    path.write_bytes(letters(2000))
    message = train_on("text", path, f"data.{split}=0")
    assert f"the {said} split has 0 tokens" in message


def test_a_character_that_training_text_lacks(train_on, tmp_path):
    """Found at the start, though it stands in the test split."""
    path = tmp_path / "some.txt"
    path.write_bytes(letters(2000) + b"Q")
    message = train_on("text", path)
    assert "character 'Q' at offset" in message and "when it began" not in message


def test_a_file_that_is_not_utf8(train_on, tmp_path):
    path = tmp_path / "some.txt"
    path.write_bytes(letters(300) + b"\xff" + letters(300))
    assert "offset 300" in train_on("text", path)


def test_broken_json_lines(train_on, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "a"}\n' * 30 + '{"text": \n')
    assert "line 31: not JSON" in train_on("text", path)


def begun(tmp_path, tiny, text):
    """The flags of a run on a text, which has its config and tokenizer but is not trained yet."""
    (tmp_path / "some.txt").write_text(text)
    said = {"data.name": "text", "data.path": str(tmp_path / "some.txt")}
    asked = schema.load_config(str(tiny), said)
    config_lib.store(place(tmp_path / "run"), asked)
    domain = TextDomain(Characters("".join(sorted(set(text)))), asked["data"]["length"])
    keep_domain(domain, place(tmp_path / "run"))
    return ["--workdir", tmp_path / "run"]


def test_a_text_that_got_new_characters(tiny, tmp_path, refused):
    """A run that is resumed is told that its data may have changed; a new one is not."""
    (tmp_path / "run").mkdir()
    flags = begun(tmp_path, tiny, letters(3000).decode())
    (tmp_path / "some.txt").write_text(letters(3000).decode() + "Q")
    message = refused(*flags)
    assert "character 'Q' at offset" in message
    assert f"The run in {tmp_path / 'run'} could read its data when it began" in message


@pytest.mark.parametrize("symbols, said", [(1, 1), (2, 0)])
def test_data_of_one_symbol_are_remarked_upon(symbols, said):
    domain = SimpleNamespace(vocab_size=symbols)
    found = inputs.warnings(SimpleNamespace(warnings=(), domain=domain))
    assert len(found) == said and all("nothing to learn" in text for text in found)


def test_a_saved_model_is_no_run(tiny, tmp_path, refused):
    (tmp_path / "run").mkdir()
    flags = begun(tmp_path, tiny, letters(3000).decode())
    (tmp_path / "run" / "model.safetensors").touch()
    for mode in ("eval", "sample"):
        message = refused(*flags, "--mode", mode)
        assert f"{tmp_path / 'run'} is a published model, not a run: make a run of" in message


@pytest.mark.parametrize(
    "name, line", [("some.csv", "id,body\n1,a b\n"), ("some.jsonl", '{"body": 1}')]
)
def test_records_without_the_key_of_the_text(name, line, train_on, tmp_path):
    (tmp_path / name).write_text(line)
    message = train_on("text", tmp_path / name)
    assert (
        "no key 'text' (data.text_key); it has body" in message and ": set data.text_key" in message
    )


@pytest.mark.parametrize("name", ["run[1]", "run?", "*", "a\\b", "seed[0]/run"])
def test_a_workdir_whose_checkpoints_could_not_be_read(name, tiny, tmp_path, refused):
    message = refused("--config", tiny, "--workdir", f"{tmp_path}/{name}")
    assert f"--workdir {tmp_path}/{name}: checkpoints in a path with" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_is_read_whatever_its_directory_is_called_later(copy, tiny, run, tmp_path):
    moved = copy.rename(tmp_path / "run[1]")
    for mode in ("eval", "sample"):
        assert run("--config", tiny, "--workdir", moved, "--mode", mode).code == 0


@pytest.mark.slow
def test_another_config_in_the_workdir(copy, tiny, refused, snapshot, run):
    before = snapshot(copy)
    at = ("--config", tiny, "--workdir", copy)
    other = ("--config.network.depth=3", "--config.train.num_steps=60", "--config.sample.num=1")
    for mode in ("train", "eval", "sample"):
        message = refused(*at, *other, "--mode", mode)
        assert "was made by another config" in message and str(copy) in message
        assert "network.depth: 1 in the workdir, 3 asked for" in message
        assert "train.num_steps: 30 in the workdir, 60 asked for" in message
        assert "sample.num" not in message
    assert snapshot(copy) == before
    assert run(*at, "--mode", "sample").code == 0


@pytest.mark.slow
def test_another_kind_of_section_in_the_workdir(copy, tiny, refused):
    message = refused("--config", tiny, "--workdir", copy, "--config.objective.name=any_order")
    assert "objective.name: 'md4' in the workdir, 'any_order' asked for" in message


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval", "sample", "bench", "plan"])
def test_a_run_of_its_own_config_may_change_what_is_free_alone(mode, copy, refused, snapshot):
    before = snapshot(copy)
    flags = ("--mode", mode, "--config.train.batch_size=4", "--config.sample.num=1")
    message = refused("--workdir", copy, *flags)
    assert f"{copy} was made by another config" in message and "sample.num" not in message
    assert "train.batch_size: 8 in the workdir, 4 asked for" in message
    assert "key in train 'batch_sise'" in refused("--workdir", copy, "--config.train.batch_sise=4")
    assert snapshot(copy) == before


@pytest.mark.parametrize("mode", ["train", "eval", "sample"])
@pytest.mark.parametrize("foreign", ["no config", "another's config", "no JSON", "a file"])
def test_a_workdir_of_somebody_else(mode, foreign, tiny, tmp_path, refused, snapshot):
    workdir = tmp_path / "run"
    (workdir / "checkpoints" / "100").mkdir(parents=True)
    (workdir / "checkpoints" / "100" / "weights").write_bytes(b"precious")
    if foreign == "another's config":
        (workdir / "config.json").write_text('{"model": "llama"}')
    elif foreign == "no JSON":
        (workdir / "config.json").write_text("learning_rate = 3")
    elif foreign == "a file":
        workdir = tmp_path / "file"
        workdir.write_text("precious")
    before = snapshot(tmp_path)
    message = refused("--config", tiny, "--workdir", workdir, "--mode", mode)
    assert str(workdir) in message
    assert snapshot(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "sample"])
def test_nothing_trained_yet(mode, tiny, tmp_path, refused, copy):
    message = refused("--config", tiny, "--workdir", tmp_path / "none", "--mode", mode)
    assert "holds no run: train one first" in message
    assert not (tmp_path / "none").exists()
    for file in (copy / "checkpoints").iterdir():
        file.rename(tmp_path / file.name)
    (copy / "checkpoints").rmdir()
    message = refused("--config", tiny, "--workdir", copy, "--mode", mode)
    assert "holds no checkpoint yet" in message
    assert not (copy / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "sample"])
def test_a_key_that_changes_nothing(mode, copy, refused):
    message = refused("--workdir", copy, "--mode", mode, "--config.train.seconds=3")
    assert f"train.seconds=3 changes nothing in --mode {mode}: it is for --mode train" in message


@pytest.mark.slow
def test_network_that_the_mesh_does_not_divide(tiny, tmp_path, start):
    """Both numbers, and no workdir that would then hold the wrong network to its config."""
    workdir = tmp_path / "run"
    process = start(
        *("-m", "md4_jax.main", "--config", tiny, "--workdir", workdir),
        *("--config.mesh.data=1", "--config.mesh.fsdp=3"),
        *("--config.train.batch_size=9", "--config.evals.test.batch_size=9"),
        "--config.evals.validation.batch_size=9",
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert "which is not a multiple of mesh.fsdp=3" in err and "Traceback" not in err
    assert not workdir.exists()


@pytest.mark.slow
def test_batch_that_the_mesh_does_not_divide(tiny, tmp_path, start):
    workdir = tmp_path / "run"
    process = start(
        *("-m", "md4_jax.main", "--config", tiny, "--workdir", workdir),
        *("--config.mesh.data=8", "--config.train.batch_size=12"),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert "train.batch_size=12" in err and "8 batch shards" in err
    assert not workdir.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, words",
    [
        (("data.length=30",), ["data.length=30", "divisible by mesh.context=8"]),
        (("network.tables=640",), ["mesh.context=8", "network.tables=0", "Set mesh.context=1"]),
    ],
)
@pytest.mark.cases(1)
def test_sequences_that_the_mesh_cannot_split(more, words, tiny, tmp_path, start):
    workdir = tmp_path / "run"
    process = start(
        *("-m", "md4_jax.main", "--config", tiny, "--workdir", workdir),
        *(f"--config.{one}" for one in ("mesh.data=1", "mesh.context=8", *more)),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert all(word in err for word in words) and "Traceback" not in err
    assert not workdir.exists()


def test_ids_outside_of_the_vocabulary(tiny, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(Bytes, "encode", lambda self, text: np.array([3, 257], np.uint16))
    workdir = tmp_path / "run"
    message = refused("--config", tiny, "--workdir", workdir, "--config.tokenizer.name=bytes")
    assert "ids 3..257, outside of its vocabulary 0..256" in message
    assert not workdir.exists()


def test_every_registry_has_a_row():
    named = {assignment[0].split("=")[0] for assignment, _ in CONFIG}
    # Inside another schedule, and of texts that grow: test_the_second_schedule_is_known_by_name.
    others = {"process.schedule.base", "process.insertion", "process.insertion.base"}
    registries = set(schema.REGISTRIES) - others
    assert {f"{registry}.name".replace("*", "test") for registry in registries} <= named


def test_the_second_schedule_is_known_by_name(refused):
    message = refused("--config", "configs/flex_owt.py", "--config.process.insertion.name=cosin")
    assert "process.insertion.name 'cosin'" in message and "mean 'cosine'?" in message


@pytest.mark.slow
def test_the_stored_config_is_what_was_asked(trained, tiny):
    stored = json.loads((Path(trained) / "config.json").read_text())
    assert stored["config"] == schema.load_config(str(tiny), {})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "sample"])
@pytest.mark.cases(1)
def test_devices_that_jax_does_not_find(mode, copy, program):
    ended = program("--mode", mode, "--workdir", copy, JAX_PLATFORMS="cuda")
    assert ended.code == 2
    assert ended.err.startswith("error: JAX_PLATFORMS=cuda asks for devices that JAX does not find")
    assert "Traceback" not in ended.err
