"""Imports that are interrupted: nothing of them is taken for a run, and the next begins again."""

import json

import pytest
from peer_folders import LETTERS, byte_level, peer_folder

import md4_jax
from md4_jax.config import imports, schema
from md4_jax.config import load as config
from md4_jax.model import importing, listing
from md4_jax.protocols import UserError
from md4_jax.runtime.locks import exclusive
from md4_jax.runtime.paths import Place


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of the same shapes, with the letters in opposite order."""
    folder = peer_folder(tmp_path_factory.mktemp("peer"), "mdlm")
    model = md4_jax.load(folder)
    byte_level(LETTERS[10::-1], []).save(str(folder / "tokenizer.json"))
    return {"forward": model, "backward": md4_jax.load(folder)}


@pytest.fixture
def saves(models, monkeypatch):
    """Makes imports read these models; returns what stands for the saving of checkpoints."""
    monkeypatch.setattr(importing, "load", lambda source, *rest, **options: models[source])

    def use(save) -> None:
        monkeypatch.setattr(importing, "_save", save)

    use(checkpoint)
    return use


def checkpoint(model, workdir) -> None:
    (workdir / "checkpoints" / "0").mkdir(parents=True)


def interrupted(model, workdir) -> None:
    checkpoint(model, workdir)
    (workdir / "base").mkdir()
    raise KeyboardInterrupt


def alphabet(workdir) -> list[str]:
    """The letters of a run, in the order of their numbers."""
    definition = json.loads((workdir / "tokenizer.json").read_text())["tokenizer"]["definition"]
    vocabulary = json.loads(definition)["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.get)


def test_an_interrupted_import_is_no_run_and_leaves_the_next_nothing(saves, tmp_path):
    """Above all not its alphabet, by which the other model would spell other texts."""
    workdir = Place(tmp_path / "run")
    saves(interrupted)
    with pytest.raises(KeyboardInterrupt):
        importing.run("forward", {}, workdir)
    assert alphabet(workdir) == list(LETTERS[:11])
    for read in (
        lambda: config.stored(workdir),
        lambda: schema.load_config(None, {}, workdir),
        lambda: md4_jax.load(workdir),
    ):
        with pytest.raises(UserError, match="repeat the command of the import, which begins again"):
            read()
    assert "holds an import that was interrupted" in listing.table(Place(tmp_path))
    saves(checkpoint)
    importing.run("backward", {}, workdir)
    assert alphabet(workdir) == list(LETTERS[10::-1])
    assert not (workdir / "base").exists() and imports.source_of(workdir) == "backward"
    with pytest.raises(UserError, match="already holds a run"):
        importing.run("forward", {}, workdir)


def test_files_that_no_import_left_are_kept(saves, tmp_path):
    (tmp_path / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match="files of another run or model: tokenizer.json. Use"):
        importing.run("forward", {}, Place(tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_a_run_that_another_import_made_meanwhile_is_kept(saves, models, tmp_path, monkeypatch):
    def load(*arguments, **options):
        (tmp_path / "config.json").write_text("{}")
        return models["forward"]

    monkeypatch.setattr(importing, "load", load)
    with pytest.raises(UserError, match="already holds a run"):
        importing.run("forward", {}, Place(tmp_path))
    assert not (tmp_path / "tokenizer.json").exists()


def test_two_imports_into_one_directory(saves, tmp_path):
    def second(model, workdir):
        with pytest.raises(UserError, match="is in use by"), exclusive(workdir):
            pass

    saves(second)
    importing.run("forward", {}, Place(tmp_path / "run"))
