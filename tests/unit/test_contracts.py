"""Shapes and dtypes of the contracts in `protocols`, for all that a config can name.

Everything is traced and nothing is compiled, so that the whole product of cases takes seconds.
"""

import chex
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import OF_TOKENS, SIZES_OF

from md4_jax.objectives import OBJECTIVES
from md4_jax.processes.schedules import SCHEDULES

B, L, V = 4, 3, 3
KEYS = jax.ShapeDtypeStruct((B,), jax.random.key(0).dtype)
TOKENS = jax.ShapeDtypeStruct((B, L), jnp.int32)
TIMES = jax.ShapeDtypeStruct((B,), jnp.float32)
DENOISER = exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, V)))
FITTING = [
    (name, of)
    for name, make in OBJECTIVES.items()
    for of, process in exact.PROCESS_CASES.items()
    if exact.fits(make(), process(V))
]
# Processes in continuous time with a law of each step.
STEPS_IN_TIME = [
    name
    for name, make in exact.PROCESS_CASES.items()
    if hasattr(make(V), "reverse_logits") and make(V).timesteps is None
]
every_process = pytest.mark.parametrize("of", exact.PROCESS_CASES)


def check(value, shape: tuple[int, ...], dtype) -> None:
    chex.assert_shape(value, shape)
    chex.assert_type(value, dtype)


@every_process
def test_a_process(of):
    process = exact.PROCESS_CASES[of](V).init()
    check(jax.eval_shape(process.corrupt, KEYS, TOKENS, TIMES), (B, L), jnp.int32)
    prior = jax.eval_shape(lambda keys: process.prior(keys, L), KEYS)
    check(prior, (B, L), jnp.int32)
    for values in process.learned().values():
        check(values, (V,), jnp.float32)


@pytest.mark.parametrize("t", [0.5, 1.0])
@pytest.mark.parametrize("of", STEPS_IN_TIME)
@pytest.mark.cases(9)
def test_a_step_of_no_length_changes_no_symbol(of, t):
    process = exact.PROCESS_CASES[of](V)
    symbols = V + (getattr(process, "mask_id", None) is not None)
    z, time = jnp.arange(symbols)[None], jnp.full(1, t)
    logits = process.reverse_logits(jnp.zeros((1, symbols, V)), z, time, time)
    found = jax.nn.softmax(logits, axis=-1)[0]
    np.testing.assert_allclose(found, np.eye(symbols), atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule(name):
    """Elementwise, and in the dtype of t."""
    schedule = SCHEDULES[name]()
    for function in (
        schedule.alpha, schedule.one_minus_alpha, schedule.dalpha, schedule.inverse
    ):  # fmt: skip
        check(jax.eval_shape(function, TIMES), (B,), jnp.float32)


@pytest.mark.parametrize("name, of", FITTING)
def test_an_objective(name, of):
    objective, process = OBJECTIVES[name](), exact.PROCESS_CASES[of](V).init()
    traced(objective, process)
    if hasattr(objective, "block"):
        traced(type(objective)(L), process)


def traced(objective, process) -> None:
    """Numbers of the right shapes, without a run."""

    def call(x, u, keys):
        batch = exact.labelled([[0] * L] * B)._replace(tokens=x)
        return objective(DENOISER, process, batch, u, keys)

    nats, extra = jax.eval_shape(call, TOKENS, TIMES, KEYS)
    check(nats, (B,), jnp.float32)
    for value in extra.values():
        chex.assert_shape(value, (B,))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.cases(20)
def test_a_network(name, dtype, causal):
    """Logits are float32, whatever the network computes in, and have no column for the mask."""
    make = OF_TOKENS[name]
    options = SIZES_OF[make] | dict(vocab_size=V, dtype=dtype)
    if "shape" in options:
        options["shape"] = (L, 1, 1)
    elif name not in (
        "partition", "modernbert", "lfm2", "esm", "maskgit", "diffusion_gemma", "encoder_decoder",
        "sub_tokens",
    ):  # fmt: skip
        options["causal"] = causal
    network = make(**options).build()
    params = jax.eval_shape(network.init, jax.random.key(0))
    z = jax.ShapeDtypeStruct((B, L), jnp.int32)
    logits = jax.eval_shape(lambda p, z, t: network.bind(p)(z, t), params, z, TIMES)
    check(logits, (B, L, V), jnp.float32)
    assert network.causal is options.get("causal", False)
