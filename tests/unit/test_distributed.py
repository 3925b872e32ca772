"""What a process of several prints when it cannot go on."""

import jax
import pytest

from md4_jax.runtime import distributed


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset"), False),
        # As it is raised where a result is read.
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"), False),
        (ValueError("a fault"), True),
    ],
)
def test_a_lost_partner_is_no_traceback(error, is_fault, monkeypatch, capsys):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert distributed.fault(error) == 1
    said = capsys.readouterr().err
    assert ("ValueError: a fault" in said) is is_fault
    assert said.count(str(error)) == 1 + is_fault
    assert "repeat the command in every process" in said
