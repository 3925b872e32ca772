"""Names and times of a program's operations."""

import jax
import jax.numpy as jnp
import pytest

from md4_jax.perf.names import (
    GRAPHS,
    Event,
    by_name,
    check_shown,
    is_product,
    label,
    own_times,
    summary,
    table,
)
from md4_jax.protocols import UserError


@pytest.mark.parametrize(
    "name, short",
    [
        ("jit(step)/jvp(Net.apply)/blocks_3/q/dot_general", "Net.apply/blocks/q/dot_general"),
        ("jit(step)/transpose(jvp(Net))/Net/blocks_11/mul", "Net/blocks/mul, back"),
        ("jit(step)/jvp(jit(log_softmax))/exp", "log_softmax/exp"),
        ("jit(step)/vmap()/add", "add"),
    ],
)  # fmt: skip
def test_a_name_is_without_numbers_of_layers_and_wrappers(name, short):
    assert label(name) == short


def test_an_operation_does_not_count_what_runs_inside_of_it():
    """A loop of 100 with two bodies of 20 and 30, of which one has a part of 5, then another."""
    line = [
        Event("after", 110, 7), Event("body", 10, 20), Event("body", 50, 30),
        Event("part", 55, 5), Event("loop", 0, 100),
    ]  # fmt: skip
    found = {}
    for instruction, nanoseconds in own_times(line):
        found[instruction] = found.get(instruction, 0) + nanoseconds
    assert found == {"loop": 50, "body": 45, "part": 5, "after": 7}


def test_a_gpu_is_told_how_to_show_names():
    check_shown("cpu", "")
    check_shown("gpu", f"--xla_something=1 {GRAPHS}")
    for flags in ("", f"{GRAPHS}FUSION"):
        with pytest.raises(UserError, match=f"needs XLA_FLAGS={GRAPHS} before the"):
            check_shown("gpu", flags)


def test_operations_of_a_real_program():
    """A large product is most of what a program does, and has the name of the source."""

    def program(a):
        with jax.named_scope("first"):
            b = jnp.tanh(a)
        with jax.named_scope("second"):
            return b @ b

    a = jnp.full((1200, 1200), 0.5)
    compiled = jax.jit(program).lower(a).compile()
    seconds = by_name(compiled.as_text(), lambda: compiled(a))
    (product,) = [name for name in seconds if is_product(name)]
    assert product == "second/dot_general" and next(iter(seconds)) == product
    assert any(name.startswith("first/tanh") for name in seconds)
    found = summary(seconds, 1)
    assert list(found["longest"]) == [product] and found["products"] == seconds[product]
    assert found["other"] == pytest.approx(sum(seconds.values()) - seconds[product])
    assert "| second/dot_general |" in table("train", found)
