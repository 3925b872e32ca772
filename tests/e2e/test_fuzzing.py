"""Files damaged at random: each is read as before, or refused in one sentence."""

import warnings

import fuzzing
import pytest

from md4_jax.runtime import streams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("number", [12, pytest.param(400, marks=pytest.mark.campaign)])
def test_files_damaged_at_random(number, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))
    streams.silence_libraries()
    found, wrong = {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, target in fuzzing.targets(trained, tmp_path).items():
            *found[name], faults = fuzzing.tried(name, target, number, seed=0)
            wrong += faults
    assert not wrong, f"{len(wrong)} of {number * len(found)}: " + "\n".join(wrong[:40])
    assert sum(refused for _, refused in found.values()) > number * len(found) / 4
    with capsys.disabled():
        if number > 12:
            for name, (alike, refused) in found.items():
                print(f"| {name} | {number} | {alike} | {refused} |")
