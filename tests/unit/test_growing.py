"""The network of texts that grow: its second output, what it sees, and what is refused."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import SIZES, built

from md4_jax.config import audits, build, schema
from md4_jax.evals.samples import drawn_samples
from md4_jax.generate.prompts import check_beginnings
from md4_jax.model import inputs
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.edit_flow import EditFlow
from md4_jax.objectives.flexmdm import FlexMDM
from md4_jax.objectives.masked_edit_flow import MaskedEditFlow
from md4_jax.processes.deletion import Deletion
from md4_jax.processes.edits import Edits
from md4_jax.processes.insertion import Insertion
from md4_jax.protocols import Prompt, UserError, batch_of
from md4_jax.runtime.commit import PACKAGE_ROOT

V, ABSENT = SIZES["vocab_size"], SIZES["vocab_size"] + 1
Z = np.array([[0, 5, 2, 3], [4, 6, 6, 6], [6, 6, 6, 6]])
T = np.array([0.1, 0.6, 1.0], np.float32)
PAIRS = [
    (FlexMDM(), Insertion(V)), (EditFlow(), Deletion(V)), (MaskedEditFlow(), Edits(V, masks=2)),
]  # fmt: skip
CONFIGS = {"flex_owt": FlexMDM, "edit_owt:empty": EditFlow, "edit_owt:masks": MaskedEditFlow}


def said(z, **options):
    network, params = built(gaps=True, **options)
    call = jax.jit(lambda p, z, t: network.bind(p).gaps(z, t))
    return [np.asarray(x) for x in call(params, jnp.asarray(z), jnp.asarray(T))]


@pytest.mark.parametrize("options", [dict(local_width=3), dict(tied=True)])
def test_what_is_said_does_not_depend_on_what_is_absent(options):
    """Nor, so, on the length of the array; but on the number of tokens that are there."""
    h, outputs = said(Z, **options)
    longer_h, longer = said(np.pad(Z, ((0, 0), (0, 5)), constant_values=ABSENT), **options)
    for row, count in enumerate([4, 1, 0]):
        np.testing.assert_allclose(
            longer_h[row, : count + 1], h[row, : count + 1], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            longer[row, : count + 1], outputs[row, : count + 1], rtol=1e-4, atol=1e-5
        )
    assert h.shape[:2] == (3, 5) and outputs.shape == (3, 5) and outputs.dtype == np.float32
    other = Z.copy()
    other[0, 3] = ABSENT
    assert np.abs(said(other, **options)[1][0, :3] - outputs[0, :3]).min() > 1e-4


def test_what_is_said_of_masks_does_not_depend_on_what_is_absent_either():
    """And the deletion of a mask and what replaces it have outputs of their own."""
    network, params = built(gaps=True, edits=True)
    call = jax.jit(lambda p, z: network.bind(p).edits(z, jnp.asarray(T)))
    longer = call(params, np.pad(Z, ((0, 0), (0, 5)), constant_values=ABSENT))
    short = call(params, Z)
    for found, expected in zip(longer, short, strict=True):
        assert expected.shape[:2] == (3, 5)
        for row, count in enumerate([4, 1, 0]):
            here = expected[row, : count + 1]
            np.testing.assert_allclose(found[row, : count + 1], here, rtol=1e-4, atol=1e-5)
    h, replacing, outputs = short
    assert np.abs(h - replacing).max() > 0.1
    assert np.abs(outputs[..., 0] - outputs[..., 1]).max() > 0.1


def test_segments_of_padding_are_not_those_of_z():
    """A batch of documents marks the padding of x, which lies elsewhere in z."""
    network, params = built(gaps=True)
    padding = {"segments": jnp.array([[0, 0, -1, -1]] * 3)}
    found, plain = (network.bind(params, context)(Z, T) for context in (padding, {}))
    np.testing.assert_array_equal(found, plain)


def test_a_new_network_expects_the_share_of_tokens_that_are_absent():
    network = Transformer(**SIZES, gaps=True).build()
    process, params = Insertion(V), network.init(jax.random.key(0))
    _, outputs = network.bind(params).gaps(jnp.asarray(Z), jnp.asarray(T))
    expected = np.exp(process.log_missing(outputs, jnp.asarray(T)))
    np.testing.assert_allclose(expected, np.tile(T[:, None], (1, 5)), rtol=1e-6)
    # Without gaps nothing is added.
    plain = jax.eval_shape(Transformer(**SIZES).build().init, jax.random.key(0))
    assert "missing" in params and "missing" not in plain


@pytest.mark.quick(1)
@pytest.mark.parametrize("objective, process", PAIRS)
@pytest.mark.cases(1)
def test_the_loss_has_a_finite_gradient_at_all_times_and_none_in_rows_that_fill_up(
    objective, process
):
    network, params = built(gaps=True, edits=objective.needs.edits)
    tokens = jnp.array([[1, 2, 3, 0]] * 4)
    u, keys = jnp.array([0.0, 1e-4, 0.5, 1 - 2.0**-24]), jax.random.split(jax.random.key(0), 4)

    def loss(p, mask):
        batch = batch_of(tokens, loss_mask=mask)
        return jnp.sum(objective(network.bind(p), process, batch, u, keys)[0])

    slopes = jax.jit(jax.grad(loss))
    for mask in (np.tile([True, True, True, False], (4, 1)), np.zeros((4, 4), bool)):
        found = jax.tree.leaves(slopes(params, mask))
        assert all(np.isfinite(x).all() for x in found)
        assert any(np.any(x != 0) for x in found) == mask.any()


@pytest.mark.parametrize("key, value", [("causal", True), ("tables", 640), ("shifted", True)])
def test_options_that_do_not_go_together(key, value):
    with pytest.raises(UserError, match=f"network.*network.{key if key != 'shifted' else 'gaps'}="):
        Transformer(**SIZES, gaps=True, **{key: value})


def experiment(name="flex_owt", **changes):
    """The experiment of a config with `section__key` changed, on one device."""
    small = {"network__size": 16, "network__depth": 1, "network__heads": 2, "mesh__data": 1}
    words = {key.replace("__", "."): str(value) for key, value in (small | changes).items()}
    file, *which = name.split(":")
    path = ":".join([str(PACKAGE_ROOT / "configs" / f"{file}.py"), *which])
    config = schema.load_config(path, words)
    own = dict(vocab_size=27, eot_id=0, unit="token", shape=(1023,), encode=lambda text: [0])
    return build.experiment(config, types.SimpleNamespace(**own))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_is_evaluated_by_its_own_bound(name):
    found = experiment(name)
    assert isinstance(found.evals["test"].objective, CONFIGS[name]) and found.network.gaps


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.cases(1)
def test_samples_have_their_own_lengths_and_begin_with_the_prompt(name):
    small = dict(sample__length=12, sample__steps=3, sample__num=20, sample__prompt="the")
    small |= dict(process__masks=8) if name.endswith("masks") else {}
    found = experiment(name, **small)
    params = {"network": found.network.init(jax.random.key(0)), "process": found.process}
    drawn = drawn_samples(found, params, {})
    for row, length in zip(drawn.tokens, drawn.lengths, strict=True):
        assert (row[:length] < 27).all() and (row[length:] == 28).all() and row[0] == 0
    assert len(set(drawn.lengths)) > 2


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(network__gaps=False), "objective.name='flexmdm' needs network.gaps=True"),
        (dict(objective__name="md4"), "objective.name='md4' needs process.name='masking'"),
        (dict(network__time_conditioning=False), "needs network.time_conditioning=True"),
        (dict(sample__stride=8), "sample.stride=8 cannot be used with network.gaps=True"),
        (dict(sample__judge="self"), "a judge needs texts of a fixed length"),
        (
            dict(sample__reward__name="pattern", sample__reward__pattern="a"),
            "sample.reward.name='pattern' cannot be combined with network.gaps=True",
        ),
        (dict(sample__suffix="the"), "only the beginning of a text can be given"),
        (dict(sample__template="a_b"), "only the beginning of a text can be given"),
        (
            dict(data__separate_documents=True),
            "data.separate_documents=True packs several documents",
        ),
        (dict(process__insertion__name="nothing"), "unknown process.insertion.name 'nothing'"),
    ],
)
def test_what_is_refused_at_the_start(changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        experiment(**changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(network__gaps=False), "objective.name='edit_flow' needs network.gaps=True"),
        (dict(network__time_conditioning=False), "needs network.time_conditioning=True"),
        (dict(objective__name="flexmdm"), "needs process.name='insertion', not 'deletion'"),
        (dict(sample__name="insert"), "sample.name='insert' needs process.name='insertion'"),
        (dict(sample__suffix="the"), "only the beginning of a text can be given"),
    ],
)
def test_what_is_refused_with_insertions_of_tokens(changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        experiment("edit_owt:empty", **changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(network__edits=False), "needs network.edits=True and network.gaps=True"),
        (
            dict(network__gaps=False),
            "network.edits=True, which also predicts deletions of masks, needs",
        ),
        (dict(objective__name="edit_flow"), "needs process.name='deletion', not 'edits'"),
        (dict(process__name="deletion"), "needs process.name='edits', not 'deletion'"),
        (dict(process__masks=0), "process.masks must be at least 1, not 0"),
        (dict(process__masks=1024), "process.masks=1024 must be at most data.length=1023"),
        (dict(sample__length=100), "process.masks=128 must be at most sample.length=100"),
    ],
)
def test_what_is_refused_with_masks_that_are_edited(changes, words):
    with pytest.raises(UserError, match=re.escape(words)):
        experiment("edit_owt:masks", **changes)


@pytest.mark.parametrize(
    "name, mask", [("flex_owt", True), ("edit_owt:empty", False), ("edit_owt:masks", True)]
)
def test_what_may_be_shown_to_the_network(name, mask):
    """28 is no token; 27 is the mask, if there is one."""
    found = experiment(name)
    inputs.checked(found, [0, 26, 28], 0.5)
    with pytest.raises(UserError, match="token 29 must lie between 0 and 28"):
        inputs.checked(found, [0, 29], 0.5)
    if mask:
        inputs.checked(found, [0, 27], 0.5)
        return
    with pytest.raises(UserError, match="token 27 must .* and not be 27: there is no mask"):
        inputs.checked(found, [0, 27], 0.5)


def test_other_objectives_do_not_take_such_a_network():
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / "mdlm_owt.py"), {
        "network.gaps": "True", "network.time_conditioning": "True", "mesh.data": "1",
    })  # fmt: skip
    domain = types.SimpleNamespace(vocab_size=27, eot_id=0, unit="token", shape=(1024,))
    with pytest.raises(UserError, match=r"objective.name='md4' needs network.gaps=False"):
        build.experiment(config, domain)


def test_the_auditor_says_that_it_knows_texts_of_one_length():
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / "flex_owt.py"), {})
    with pytest.raises(UserError, match="cannot be audited: its texts have different lengths"):
        audits.objectives(config)


def test_a_prompt_is_a_beginning():
    tokens = np.zeros(4, np.int32)
    check_beginnings([Prompt(tokens, np.array([True, True, False, False]))])
    with pytest.raises(UserError, match="grow"):
        check_beginnings([Prompt(tokens, np.array([True, False, True, False]))])
