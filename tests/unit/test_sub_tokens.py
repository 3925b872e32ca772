"""The network that reads partly masked tokens."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_networks

from md4_jax.config import build, schema
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.networks.sub_tokens import SubTokens, SubTokensModule
from md4_jax.processes.partial_masking import PartialMasking
from md4_jax.protocols import UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

CODE = jnp.array([[0, 5, 3, 8, 15, 2]])  # of five symbols: two digits below 4, 0 hidden
ROWS = np.array([[3, 3], [0, 0], [3, 2], [1, 3], [2, 2], [3, 1]])  # of the table; 3: hidden


@pytest.mark.parametrize("vectors", ["concatenated", "summed"])
def test_the_vector_of_a_token(vectors):
    """By hand: halves from one table, or the sum of rows of two tables."""
    network, params = tiny_networks.built(SubTokens, vectors=vectors)
    module = SubTokensModule(SubTokens(**tiny_networks.SIZES, vectors=vectors).resolved("cpu"))
    found = module.apply({"params": params}, CODE, method="_vectors")[0]
    table = np.asarray(params["embedding"])
    if vectors == "concatenated":
        expected = np.concatenate([table[ROWS[:, 0]], table[ROWS[:, 1]]], axis=1)
    else:
        expected = table[ROWS[:, 0]] + table[4 + ROWS[:, 1]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    rows = {"concatenated": (4, 8), "summed": (8, 16)}[vectors]
    assert network.size(params) == sum(x.size for x in jax.tree.leaves(params)) - (
        (128 - rows[0]) * rows[1] + (128 - 5) * 17
    )


def test_initial_vectors_of_tokens_have_the_same_variance():
    for vectors in ("concatenated", "summed"):
        network = SubTokens(vocab_size=4096, size=768, depth=1, heads=2, parts=3, vectors=vectors)
        table = network.build().init(jax.random.key(0))["embedding"]
        each = 1.0 if vectors == "concatenated" else 1 / 3
        assert np.var(table) == pytest.approx(each, rel=0.05)


@pytest.mark.parametrize("shuffle", [0, 7])
def test_a_denoiser_reads_the_codes_of_the_process(shuffle):
    """Also through features of a few positions, and for repeated rows."""
    process = PartialMasking(5, shuffle=shuffle)
    network, params = tiny_networks.built(SubTokens)
    z = process.corrupt(exact.keys_for(0, 3), jnp.arange(15).reshape(3, 5) % 5, jnp.full(3, 0.5))
    t = jnp.array([0.1, 0.6, 1.0])
    denoiser = network.denoiser({"network": params, "process": process})
    plain = network.bind(params)
    expected = plain(process.code(z), t)
    np.testing.assert_allclose(denoiser(z, t), expected, rtol=1e-6)
    index = jnp.array([[1, 3]] * 3)
    few = denoiser.unembed(denoiser.features_at(z, t, index))
    np.testing.assert_allclose(few, np.asarray(expected)[:, [1, 3]], atol=1e-5)
    twice = denoiser.repeated(2)(jnp.repeat(z, 2, 0), jnp.repeat(t, 2))
    np.testing.assert_allclose(twice[::2], expected, atol=1e-5)
    assert np.abs(plain(z, t) - expected).max() > 0.1


def test_sub_tokens_that_are_hidden_do_not_matter():
    process, (network, params) = PartialMasking(5), tiny_networks.built(SubTokens)
    denoiser = network.denoiser({"network": params, "process": process})
    first_alone = jnp.array([[False, True]])
    seen = [process.hide(jnp.array([x]), first_alone)[:, None] for x in (3, 4)]  # 10 and 11
    outputs = [denoiser(z, jnp.array([0.5])) for z in (*seen, jnp.array([[3]]), jnp.array([[4]]))]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    for one, other in ((0, 2), (0, 3), (2, 3)):
        assert np.abs(outputs[one] - outputs[other]).max() > 1e-3


def experiment(own=None, **words):
    """The experiment of the config with other keys; own: whole sections."""
    small = {"network.size": "24", "network.depth": "1", "network.heads": "2", "mesh.data": "1"}
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / "prime_text8.py"), small | words)
    return build.experiment(config | (own or {}), RandomTokens(27, 256))


MASKS = dict(process=dict(name="masking"), objective=dict(name="md4"))
PLAIN = dict(network=dict(name="transformer", size=16, depth=1, heads=2))


@pytest.mark.parametrize(
    "words, said",
    [
        (
            {"network.parts": "2"},
            "with parts=3 does not fit network.name='sub_tokens' with parts=2",
        ),
        (
            {"own": PLAIN},
            "process.name='partial_masking' with parts=3 does not fit network.name='transformer': ",
        ),
        (
            {"own": MASKS},
            "process.name='masking' does not fit network.name='sub_tokens' with parts=3: ",
        ),
        ({"network.embedding": "64"}, "network.embedding=64 must be a multiple of network.parts=3"),
        ({"network.causal": "True"}, "network.name='sub_tokens' needs network.causal=False"),
        ({"network.vectors": "'joined'"}, "network.vectors"),
        ({"sample.name": "confidence"}, "sample.name='confidence' needs process.name="),
    ],
)
def test_what_does_not_fit_is_refused(words, said):
    with pytest.raises(UserError) as error:
        experiment(**words)
    assert said in str(error.value)


def test_the_configs_fit():
    found = experiment()
    assert found.network.parts == 3 and found.process.digits.shape == (27, 3)
    assert found.process.states == 27 + 64
