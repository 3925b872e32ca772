"""Programs are compiled once, before their first call, and the compiler's memory is given back.

On GPUs draws for initial values are made in a kernel, which compiles sooner.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from md4_jax.options import MeshOptions
from md4_jax.runtime import compiling
from md4_jax.runtime.mesh import make_mesh
from md4_jax.training import loop


def test_a_program_is_compiled_once(monkeypatch):
    trims, compiled = [], []
    monkeypatch.setattr(compiling, "give_back", lambda: trims.append(len(compiled)))

    def listen(event: str, seconds: float, **more) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        fn, x = jax.jit(lambda x: x * 3.25 + 0.125), jnp.arange(4.0)
        compiled.clear()
        program = compiling.compile_ahead(fn, x)
        assert fn(x).tolist() == program(x).tolist() == [0.125, 3.375, 6.625, 9.875]
        assert len(compiled) == 1 and trims == [1]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def lowered_for_gpus() -> str:
    draw = jax.jit(lambda: jax.random.normal(jax.random.key(0), (8, 16)))
    return draw.trace().lower(lowering_platforms=("cuda",)).as_text()


def test_draws_are_a_kernel_of_gpus_where_asked_for_and_nowhere_else():
    with compiling.draws_as_kernels():
        within = lowered_for_gpus()
    with pytest.raises(KeyError), compiling.draws_as_kernels():
        raise KeyError
    assert "cu_threefry2x32" in within
    assert "cu_threefry2x32" not in lowered_for_gpus()


def test_initial_values_are_drawn_so(monkeypatch):
    asked = []

    def init(experiment) -> dict[str, jax.Array]:
        asked.append(jax.config.jax_threefry_gpu_kernel_lowering)
        return {"x": jnp.zeros(2)}

    monkeypatch.setattr(loop, "_init", init)
    loop.fresh_state(SimpleNamespace(mesh=make_mesh(MeshOptions(data=1))))
    assert asked == [False, True]  # the shapes, then the values
