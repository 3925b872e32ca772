"""Programs are compiled once, before their first call, and the compiler's memory is given back."""

import jax
import jax.numpy as jnp

from md4_jax.runtime import compiling


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
