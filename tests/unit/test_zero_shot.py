"""Likelihoods of public data sets, and the file that records how each set was made."""

from md4_jax.evals.context import Context
from md4_jax.evals.zero_shot import ZeroShot
from md4_jax.runtime.paths import place


def test_results_are_kept_where_their_file_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(ZeroShot, "opened", lambda self, key, corpus_of: {})
    (tmp_path / "file").write_text("")
    said = []
    context = Context(
        "zero_shot", 7, place(tmp_path / "file"), None, None, None, {}, {}, said.append
    )
    assert ZeroShot(objective=None).run(None, {}, context) == {}
    assert said == [f"warning: zero_shot.json was not saved in {tmp_path}/file: Not a directory"]
