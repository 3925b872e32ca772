"""The network that reads partly masked tokens."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_networks
from peer_folders import answers, peer_folder
from safetensors.numpy import load_file

import md4_jax
from md4_jax.config import build, schema
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.networks.sub_tokens import SubTokens, SubTokensModule
from md4_jax.objectives.prime import Prime
from md4_jax.processes.partial_masking import PartialMasking
from md4_jax.protocols import UserError, batch_of
from md4_jax.protocols.sub_tokens import joined_code
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
        network = SubTokens(vocab_size=512, size=192, depth=1, heads=2, parts=3, vectors=vectors)
        table = jax.jit(network.build().init)(jax.random.key(0))["embedding"]
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


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(model of the published layout, symbols of its partly masked tokens, answers)."""
    folder, told = peer_folder(tmp_path_factory.mktemp("prime"), "mdm_prime"), answers("mdm_prime")
    model, parts = md4_jax.load(folder), jnp.asarray(told["parts"])
    code = joined_code(jnp.where(parts == 4, 0, parts + 1), 4)
    z = jnp.where(jnp.all(parts < 4, axis=-1), jnp.asarray(told["clean"]), 11 + code)
    return model, z, told


def test_the_network_of_mdm_prime(published):
    """Its own code's logits, without a time and with one, and its loss with carry-over."""
    model, z, told = published
    process, network = model.experiment.process, model.experiment.network
    assert (process.parts, process.shuffle, process.conditioning) == (2, 0, "zero")
    t, params = jnp.asarray(told["t"], jnp.float32), model.params
    denoiser = network.denoiser(params)
    np.testing.assert_allclose(denoiser(z, t), told["outputs_sigma_zero"], atol=1e-5)
    np.testing.assert_allclose(model.logits(z, 0.5), told["outputs_sigma_zero"], atol=1e-5)
    timed = network.bind(params["network"])(process.code(z), jnp.asarray(told["sigma"]))
    np.testing.assert_allclose(timed, told["outputs"], atol=1e-5)
    batch = batch_of(jnp.asarray(told["clean"]))
    # Their t is uniform, and the weight of a hidden token 1 / t; ours is uniform in 1 - alpha.
    noise = process.schedule.one_minus_alpha(t)
    nats = Prime("joint").loss_at(denoiser, process, batch, z, noise)
    np.testing.assert_allclose(nats * noise / t, np.sum(told["nats"], axis=1), rtol=1e-5)


def test_a_model_trained_here_is_written_like_mdm_prime(published, tmp_path):
    model, z, _ = published
    saved = model.save(tmp_path / "saved")
    (saved / "layout.json").unlink()
    exported = md4_jax.load(saved).export(tmp_path / "exported")
    ours = load_file(exported / "model.safetensors")
    theirs = load_file(PACKAGE_ROOT / "tests" / "published" / "mdm_prime.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=1e-6, err_msg=name)
    again = md4_jax.load(exported)
    np.testing.assert_array_equal(again.logits(z, 0.5), model.logits(z, 0.5))
    shuffled = md4_jax.load(saved, {"process.shuffle": 1})
    with pytest.raises(UserError, match="mdm_prime, needs process.shuffle=0"):
        shuffled.export(tmp_path / "shuffled")
