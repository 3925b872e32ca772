"""The table of runs: `md4_jax ls`."""

import json
import os

import pytest

from md4_jax import main
from md4_jax.config import command, load, schema
from md4_jax.model import listing
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import place
from md4_jax.training.report import kept


def made(folder, steps=(), results=(), **keys):
    """A directory as a run leaves it, without arrays."""
    folder.mkdir(parents=True)
    load.store(place(folder), schema.load_config("configs/quickstart.py", keys))
    for step in steps:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    lines = [json.dumps({"commit": "c" * 40, "exact": False, **row}) for row in results]
    (folder / "evaluations.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def result(bits, name="test", **more):
    both = {f"bits_per_{unit}{end}": n for unit in ("token", "character")
            for end, n in (("", bits), ("_se", 0.01))}  # fmt: skip
    return {"eval": name, "step": 20, **both, **more}


def test_runs_by_their_bits(tmp_path, capsys):
    again = result(1.0, command="--mode eval")  # on other data, perhaps
    made(tmp_path / "a", (10, 20), [result(2.5), again])
    made(tmp_path / "b", (), [{"eval": "samples"}], **{"network.depth": "3"})
    made(tmp_path / "c", (7,), [result(2.25, "validation")], **{"objective.name": "md4"})
    (tmp_path / "notes").mkdir()
    assert main.run(["ls", str(tmp_path)]) == 0
    head, c, a, b = capsys.readouterr().out.splitlines()
    assert head.split() == list(listing.HEAD)
    assert a.split()[:3] == ["a", "any_order", "transformer"]
    assert "20 of 3,500  <= 2.5000 +- 0.0100 bits/character  test" in a and a.endswith("c" * 12)
    assert c.split()[:2] == ["c", "md4"] and "7 of" in c and "validation" in c
    assert "transformer 3 x" in b and "0 of 3,500" in b and "bits" not in b


def test_a_result_that_is_no_number_comes_last_and_damages_no_run(tmp_path):
    """evaluations.jsonl holds null for nan, and so does the error of a single draw."""
    nothing = {f"bits_per_{unit}{end}": None for unit in ("token", "character")
               for end in ("", "_se")}  # fmt: skip
    made(tmp_path / "a", (5,), [{**result(0.0), **nothing}])
    made(tmp_path / "b", (), [result(9.0)])
    _, b, a = listing.table(place(tmp_path)).splitlines()
    assert b.startswith("b ")
    assert "5 of 3,500  <= nan bits/character" in a and " test " in a


def test_a_run_alone_and_a_broken_one(tmp_path):
    run = made(tmp_path / "run", (5,))
    assert len(listing.table(place(run)).splitlines()) == 2
    (run / "config.json").write_text("{")
    assert "unreadable" in listing.table(place(tmp_path))


@pytest.mark.parametrize(
    "content, why",
    [
        ('{"package": "other"}', "was not written by md4_jax"),
        ('{"package": "md4_jax", "config": {"network": {}}}', "is not a config that md4_jax wrote"),
        (None, "Is a directory"),
    ],
)
def test_below_the_table_is_why_a_run_cannot_be_read(content, why, tmp_path):
    made(tmp_path / "a")
    (tmp_path / "b").mkdir()
    file = tmp_path / "b" / "config.json"
    file.mkdir() if content is None else file.write_text(content)
    *_, b, last = listing.table(place(tmp_path)).splitlines()
    assert b.split() == ["b", "unreadable"]
    assert last.startswith("b: ")
    assert why in last


def test_damaged_results_hide_no_run_and_names_break_no_line(tmp_path):
    run = made(tmp_path / "a\nb\033[1m", (5,))
    (run / "evaluations.jsonl").unlink()
    (run / "evaluations.jsonl").mkdir()
    _, row, last = listing.table(place(tmp_path)).splitlines()
    assert row.split()[:2] == [r"'a\nb\x1b[1m'", "any_order"]
    assert "5 of 3,500" in row
    assert "evaluations.jsonl cannot be read: " in last


def test_a_result_that_a_crash_cut_short_hides_no_other(tmp_path):
    """Nor do lines that hold none."""
    run = made(tmp_path / "a", (20,), [result(2.5)])
    with open(run / "evaluations.jsonl", "a") as file:
        file.write('null\n{"step": 20}\n' + "[" * 9999 + '\n{"eval": "te')
    assert [row["eval"] for row in kept(place(run))] == ["test"]
    _, row = listing.table(place(tmp_path)).splitlines()
    assert "2.5000 +- 0.0100" in row


def test_a_run_that_may_not_be_entered_is_a_row(tmp_path, monkeypatch):
    made(tmp_path / "a")
    made(tmp_path / "b", (5,))
    stat = os.stat

    def refuse(path, **options):
        if "/b/" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    *_, b, last = listing.table(place(tmp_path)).splitlines()
    assert b.split() == ["b", "unreadable"]
    assert last == f"b: {tmp_path}/b/config.json cannot be read: Permission denied"


@pytest.mark.parametrize(
    "name, said",
    [
        ("none", "there is no folder .*none: md4_jax ls DIR"),
        ("file", "file is a file: md4_jax ls DIR"),
        ("empty", "empty holds no run: md4_jax ls DIR"),
    ],
)
def test_nothing_there(name, said, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=said):
        main.run(["ls", str(tmp_path / name)])


def test_short_words():
    assert command.parse(["ls"])[0].workdir is None
    assert command.parse(["ls", "--workdir", "a"])[0].workdir == "a"
    assert command.parse(["serve", "a", "--port", "1"])[0].source == "a"
