"""A run whose checkpoints are gone is not begun again: its log would be deleted."""

import json

import pytest

from md4_jax.config import imports, runs
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place

ROWS = {"metrics.jsonl": [{"step": 3}, {"step": 9}]}
NINE, IMPORT = "it has been trained to step 9", "it was made of hf:a/b by an import"
SAVED = [
    ({"every": 7}, ROWS, NINE),
    ({"every": 0, "keep_every": 8}, ROWS, NINE),
    ({"every": 0}, {"evaluations.jsonl": [{"eval": "test", "step": 9}]}, NINE),
    ({"every": 7}, {"import.json": [{"from": "hf:a/b", "is_complete": True}]}, IMPORT),
]
# The last row may be of a step that is not saved yet.
UNSAVED = [
    ({"every": 9}, ROWS),
    ({"every": 0}, ROWS),
    ({"every": 7}, ROWS | {"first_save.json": [{"step": 7}]}),
    ({"every": 7}, {}),
    ({"every": 7}, {"import.json": [{"from": "hf:a/b", "is_complete": False}]}),
]


def written(directory, files) -> Place:
    for name, lines in files.items():
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Place(directory)


@pytest.mark.parametrize("options, files, why", SAVED)
def test_a_run_that_had_a_checkpoint_is_not_begun_again(options, files, why, tmp_path):
    workdir, kept = written(tmp_path, files), {"checkpoint": options}
    with pytest.raises(UserError, match=f"holds no checkpoint, but {why}: its checkpoints were"):
        runs.check_not_lost(workdir, kept)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    runs.check_not_lost(workdir, kept)


@pytest.mark.parametrize("options, files", UNSAVED)
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(options, files, tmp_path):
    (tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    runs.check_not_lost(written(tmp_path, files), {"checkpoint": options})


def test_a_new_run_may_have_any_files_beside_it(tmp_path):
    runs.check_not_lost(written(tmp_path, ROWS), None)


def test_a_damaged_note_of_an_import_is_none(tmp_path):
    for text in ("", "{", "[1]", '{"is_complete": true}'):
        (tmp_path / imports.FILE).write_text(text)
        assert not imports.has_begun(Place(tmp_path)) and not imports.source_of(Place(tmp_path))
