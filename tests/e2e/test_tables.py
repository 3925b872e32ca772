"""Tables of counts in a run: what they count before the first step, and how long that may take."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import md4_jax
from md4_jax.networks import codes
from md4_jax.training import counting

pytestmark = pytest.mark.slow

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@pytest.fixture
def words(tiny, tmp_path):
    made = ("--config", tiny, "--workdir", tmp_path / "run", "--config.network.tables=640")
    made += ("--config.train.num_steps=6", "--config.evals.validation.every=0")
    return (*made, "--config.evals.test.limit=8", "--config.sample.num=1")


def counted(workdir) -> tuple[int, int]:
    """Number of sequences, and of the tokens in the table of no neighbours, which has one row."""
    found = md4_jax.load(workdir).params["companion"]
    return int(found["sequences"]), int(codes.decoded(found["counts"][0]).sum())


@pytest.mark.campaign
def test_each_token_of_the_training_text_is_counted(words, run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a tale of few words " * 2000)
    own = ("name=text", f"path={text}", "validation=0.05", "test=0.05")
    words = (*words, *(f"--config.data.{word}" for word in own))
    ended = run(*words)
    assert ended.code == 0, ended
    sequences, counts = counted(tmp_path / "run")
    data = next(line for line in ended.out.splitlines() if "data        train" in line)
    told, whole = (int(word.replace(",", "")) for word in data.split() if word[0].isdigit())
    assert sequences == whole == told // 16 > 2_000
    assert counts == pytest.approx(whole * 16, rel=1 / 16)
    assert f"counting {whole * 16:,} tokens" in ended.out
    again = run(*words, "--config.evals.test.limit=16")
    assert again.code == 0 and "counting" not in again.out, again


@pytest.mark.campaign
def test_no_more_tokens_than_asked_for_are_counted(words, run, tmp_path):
    ended = run(*words, "--config.network.tables_tokens=1001")
    assert ended.code == 0, ended
    sequences, counts = counted(tmp_path / "run")
    assert sequences == 63 and counts == pytest.approx(63 * 16, rel=1 / 16)
    assert "counting 1,008 tokens" in ended.out


@pytest.mark.campaign
def test_counting_is_part_of_the_seconds(words, run, monkeypatch):
    monkeypatch.setattr(counting, "filled", lambda experiment, corpus, state: (state, 1e6))
    ended = run(*words, "--config.train.seconds=1000000")
    assert ended.code == 0 and "stopped at step 1 of 6: the budget" in ended.out + ended.err, ended


def test_counting_that_takes_all_seconds_is_an_error(words, refused):
    few = "--config.network.tables_tokens=1001"
    said = refused(*words, few, "--config.train.seconds=0.001")
    assert (
        "which is all of train.seconds=0.001: raise train.seconds, or reduce network.tables_tok"
        in said
    )


@pytest.fixture
def characters(tiny, tmp_path):
    """Words of a run on a text of 1,500 different characters, some much more frequent."""
    drawn = np.random.default_rng(0).zipf(1.2, 40_000) % 1500
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(0x4E00 + int(number)) for number in drawn), encoding="utf-8")
    words = ("data.name=text", f"data.path={path}", "data.validation=0.05", "data.test=0.05")
    words += ("network.tables=16384", "network.tables_hidden=8", "train.num_steps=6")
    words += ("network.depth=1", "evals.validation.every=0", "sample.num=1", "log.every=1")
    return ("--config", tiny, *(f"--config.{word}" for word in words))


def text_of(model) -> str:
    """Some of the characters that a model knows."""
    return model.domain.decode(np.arange(6, dtype=np.int32))


@pytest.mark.campaign
def test_tables_of_a_large_vocabulary_list_the_most_frequent(characters, run, tmp_path):
    ended = run(*characters, "--workdir", tmp_path / "run", "--config.network.tables_tokens=19990")
    assert ended.code == 0 and "counting 20,000 tokens" in ended.out, ended
    model = md4_jax.load(tmp_path / "run")
    model.save(tmp_path / "saved")
    lists, known = model.params["companion"], text_of(model)
    told = model.score([known]).bits_per_token
    assert md4_jax.load(tmp_path / "saved").score([known]).bits_per_token == told
    assert int(lists["sequences"]) == 20_000 // 16
    # Each half counts half of the tokens in the table of no neighbours, which has one row.
    counts, others = (codes.decoded(lists[name][:, 0]) for name in ("counts", "others"))
    np.testing.assert_allclose(counts.sum(axis=1) + others, 10_000, rtol=1 / 16)
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    frequent, _ = Counter(text[:10_000]).most_common(1)[0]
    first = model.domain.decode(np.asarray(lists["symbols"][:1, 0, 0], np.int32))
    assert first == frequent
    assert len(model.sample(num=1).texts[0]) == 16
    model.params = model.params | {"companion": jax.tree.map(jnp.zeros_like, lists)}
    assert model.score([known]).bits_per_token != told


@pytest.mark.campaign
def test_lists_are_the_same_on_every_mesh(characters, start, tiny, tmp_path, rows):
    found, words = {}, []
    meshes = {"one": ("mesh.data=1",), "mixed": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")}
    for name, mesh in meshes.items():
        own = [f"--config.{word}" for word in ("network.size=64", "network.heads=8", *mesh)]
        words += [*characters, "--workdir", tmp_path / name, *own, "--"]
    process = start(tiny.with_name("driver.py"), "runs", *words, **EIGHT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    for name in meshes:
        kept = [row for row in rows(tmp_path / name) if "train_bits_per_token" in row]
        found[name] = [row["train_bits_per_token"] for row in kept]
    assert len(found["one"]) == 6
    np.testing.assert_allclose(found["mixed"], found["one"], rtol=2e-5)
