"""A network learns two classes of text; every sampler draws the class that it is asked for."""

import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from playgrounds import of_text

from md4_jax.networks.transformer import Transformer
from md4_jax.objectives import OBJECTIVES
from md4_jax.options import MeshOptions, SampleOptions, TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Prompt, UserError, batch_of
from md4_jax.runtime.mesh import make_mesh
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.batches import context_of, draw_samples, make_sampler
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import sample
from md4_jax.training.step import init_state, make_train_step

pytestmark = pytest.mark.slow

V, L, N, ROWS, STEPS = 6, 4, 400, 256, 300
MESH = make_mesh(MeshOptions(data=1))
OPTIONS = TrainOptions(batch_size=ROWS, ema=0.9)
# What is trained -> (process, objective, causal).
TRAINED = {
    "masking": (Masking(V), OBJECTIVES["md4"](), False),
    "uniform": (Uniform(V, parametrisation="mixture"), OBJECTIVES["cross_entropy"](), False),
    "autoregressive": (Masking(V), OBJECTIVES["autoregressive"](), True),
    "block": (Masking(V), OBJECTIVES["block"](block=2), False),
    "uniform block": (
        Uniform(V, parametrisation="mixture"), OBJECTIVES["cross_entropy"](block=2), False,
    ),
}  # fmt: skip
BLOCKS = Blocks(block=2, window=L)
CASES = [
    *(("masking", name, sample) for name in exact.samplers_for(Masking(V))),
    *(("uniform", name, sample) for name in ("ancestral", "euler", "tweedie")),
    ("autoregressive", "left_to_right", sample),
    ("block", "ancestral", BLOCKS),
    ("block", "first_hitting", BLOCKS),
    ("uniform block", "ancestral", BLOCKS),
    ("uniform block", "euler", BLOCKS),
]


def texts(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [rows, L], label [rows]): even symbols in class 0 and odd ones in class 1.

    Each token is with probability 0.8 the next symbol of its class, else the same again.
    """
    label = rng.integers(0, 2, rows)
    steps = np.cumsum(rng.random((rows, L)) < 0.8, axis=1) + rng.integers(0, 3, (rows, 1))
    return (2 * (steps % 3) + label[:, None]).astype(np.int32), label.astype(np.int32)


@functools.cache
def trained(name: str):
    """(network, parameters) after a few hundred steps."""
    process, objective, causal = TRAINED[name]
    sizes = dict(vocab_size=V, size=32, depth=1, heads=2, hidden=64, scan_blocks=False)
    network = Transformer(**sizes, causal=causal, classes=2, label_dropout=0.2).build()
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))
    state = init_state(jax.random.key(0), network, process, optimizer)
    rng = np.random.default_rng(0)
    batches = tuple(jnp.asarray(x.reshape(STEPS, ROWS, -1)) for x in texts(rng, STEPS * ROWS))
    step = make_train_step(network, objective, optimizer, OPTIONS)

    def body(state, drawn):
        batch = batch_of(drawn[0], context={"label": drawn[1][:, 0]})
        return step(state, batch)[0], None

    state, _ = jax.jit(lambda state: jax.lax.scan(body, state, batches))(state)
    return network, state.ema


def drawn(trained_on: str, name: str, loop, steps=24, **options):
    """The tokens [N, L] of a sampler."""
    network, params = trained(trained_on)
    sampler = make_sampler(network, loop, uniform(steps), MESH)
    context = options.pop("context", None)
    asked = SampleOptions(num=N, batch_size=N, **options)
    free = Prompt(np.zeros(L, np.int32), np.zeros(L, bool))
    out = draw_samples(
        sampler,
        params,
        SAMPLERS[name](**OWN.get(name, {})),
        asked,
        [free],
        window=L,
        context=context,
    )
    return out.tokens


# Few symbols make up these texts, and would be drawn again.
OWN = {"reparameterized": dict(resample=0.0)}
# The others are of campaigns.
ORDINARY = {("masking", "ancestral"): []}


def marked():
    return [
        pytest.param(
            *case, id=" ".join(case[:2]), marks=ORDINARY.get(case[:2], pytest.mark.campaign)
        )
        for case in CASES
    ]


@pytest.mark.parametrize("trained_on, name, loop", marked())
@pytest.mark.campaign
def test_samples_are_of_the_class_that_is_asked_for(trained_on, name, loop):
    """With a label at least 96% of the tokens are of its class; without, half of the samples.

    n = 400, the half within 4 standard errors. In most samples all tokens are of one class.
    """
    for label in (0, 1):
        right = drawn(trained_on, name, loop, label=label) % 2 == label
        assert right.mean() > 0.96
    odd = (drawn(trained_on, name, loop) % 2).mean(axis=1)
    assert ((odd == 0) | (odd == 1)).mean() > 0.65
    if name in ("confidence", "path_planning"):  # sure first, which favours one class
        assert 0.02 < odd.mean() < 0.98
    else:
        assert abs(odd.mean() - 0.5) < 4 * odd.std() / np.sqrt(N)


def test_each_sample_may_have_a_label_of_its_own():
    label = np.random.default_rng(1).integers(0, 2, N)
    right = drawn("masking", "ancestral", sample, context={"label": label}) % 2 == label[:, None]
    assert right.mean() > 0.96


def test_no_label_means_no_context():
    assert context_of(SampleOptions(), 3) == {}
    np.testing.assert_array_equal(context_of(SampleOptions(label=4), 3)["label"], [4, 4, 4])


def test_a_class_is_drawn_by_the_number_of_the_sample_and_the_seed():
    label = context_of(SampleOptions(), 600, 3)["label"]
    assert label.dtype == np.int32
    counts = np.bincount(label)  # 200 each, with a standard deviation of 11.5
    assert len(counts) == 3 and (abs(counts - 200) < 50).all()
    np.testing.assert_array_equal(context_of(SampleOptions(num=9), 40, 3)["label"], label[:40])
    assert (context_of(SampleOptions(seed=1), 600, 3)["label"] != label).mean() > 0.5
    assert (context_of(SampleOptions(label=2), 6, 3)["label"] == 2).all()


@pytest.mark.campaign
def test_a_network_that_knows_no_text_without_a_class_draws_one():
    """Each sample is that of its class; scores need one."""
    model = of_text({"label_dropout": 0.0})
    label = context_of(SampleOptions(seed=3), 6, 2)["label"]
    assert {*label.tolist()} == {0, 1}
    found, *named = (model.sample(6, seed=3, steps=4, label=k).tokens for k in (-1, 0, 1))
    assert (named[0] != named[1]).any(axis=1).all()
    np.testing.assert_array_equal(found, np.where(label[:, None] == 0, *named))
    np.testing.assert_array_equal([*model.watch(seed=3, steps=4)][-1].z, found[0])
    for ask in (model.score, model.token_costs):
        with pytest.raises(
            UserError, match="label=-1 means no class.* set label to a class, 0 to 1"
        ):
            ask("to be")
    assert model.score("to be", label=1, draws=2).nats.shape == (1,)


def test_a_label_below_minus_one_is_refused():
    with pytest.raises(UserError, match="sample.label must be a class or -1 for none, not -2"):
        SampleOptions(label=-2)
