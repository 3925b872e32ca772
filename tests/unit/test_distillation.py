"""Distillation: divergences, targets whose draws are certain, rounds of the training step."""

import dataclasses
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from md4_jax.config import beginnings, build, schema
from md4_jax.data.domains import TextDomain
from md4_jax.data.tokenizers import Characters
from md4_jax.networks.transformer import Transformer
from md4_jax.networks.unet import UNet
from md4_jax.objectives import head
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.dcd import DCD
from md4_jax.objectives.distillation import DIVERGENCES
from md4_jax.objectives.sdtt import SDTT
from md4_jax.options import TrainOptions
from md4_jax.perf import bench
from md4_jax.processes import duality
from md4_jax.processes.draws import draw_symbol
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, UserError
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.training import teaching
from md4_jax.training.step import init_state, make_train_step

ROWS, V, L = 8, 3, 2
every_divergence = pytest.mark.parametrize("name", DIVERGENCES)
STATES = exact.sequences(V + 1, L)
KEYS = exact.keys_for(0, len(STATES))
TIMES = jnp.linspace(0.05, 0.95, len(STATES))
X = exact.batch_of(np.where(STATES == V, 1, STATES))
TABLE = exact.table_logits(V, L)


def by_hand(name, student, teacher):
    """A divergence in float64 from its definition: q of the student, p of the teacher."""
    q, p = special.softmax(student, axis=-1), special.softmax(teacher, axis=-1)
    if name == "reverse_kl":
        return special.rel_entr(q, p).sum(axis=-1)
    if name == "kl":
        return special.rel_entr(p, q).sum(axis=-1)
    if name == "tvd":
        return np.maximum(p - q, 0.0).sum(axis=-1)
    return ((np.log(p) - np.log(q)) ** 2).mean(axis=-1)


@every_divergence
def test_a_divergence_is_what_its_name_says(name):
    rng = np.random.default_rng(0)
    student, teacher = 2.0 * rng.normal(size=(2, 50, 5))
    found = DIVERGENCES[name](jnp.float32(student), jnp.float32(teacher))
    np.testing.assert_allclose(found, by_hand(name, student, teacher), rtol=2e-5)


@every_divergence
@pytest.mark.cases(2)
def test_a_symbol_that_neither_can_have_costs_nothing(name):
    """As the mask of a vocabulary that has one; its gradient is finite."""
    student, teacher = jnp.array([[0.3, -1.0, 0.5]]), jnp.array([[1.0, 0.0, -0.5]])
    ending = [(0, 0), (0, 1)]
    longer = [jnp.pad(x, ending, constant_values=-jnp.inf) for x in (student, teacher)]
    same, scale = DIVERGENCES[name](student, teacher), 3 / 4 if name == "mse" else 1.0
    np.testing.assert_allclose(DIVERGENCES[name](*longer), scale * same, rtol=1e-6)
    slope = jax.grad(lambda x: DIVERGENCES[name](x, longer[1]).sum())(longer[0])
    assert np.isfinite(slope).all() and np.abs(slope[0, :3]).max() > 0.01


def distilled(objective, student, teacher, z=STATES, t=TIMES, round=0, process=None):
    """loss_at of SDTT for outputs (z, t) -> logits of both: [B]."""
    both = exact.taught(exact.of_outputs(student), exact.of_outputs(teacher), round)
    process = process or Masking(V)
    batch = exact.batch_of(np.where(np.asarray(z) == V, 1, z))
    return objective.loss_at(both, process, batch, jnp.asarray(z), t, KEYS[: len(z)])


def of_table(table, time=0.5):
    return exact.denoiser_of(table, time=time).features


@every_divergence
@pytest.mark.cases(2)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(name):
    """Of one step: no loss and no gradient; another student has both."""
    objective, table = SDTT(per_step=1, divergence=name), jnp.float32(TABLE)

    def loss(own):
        return distilled(objective, of_table(own), of_table(table)).sum()

    # Neither is more than rounding, and the slope of an absolute value at 0 is 0.
    value, slope = jax.value_and_grad(loss)(table)
    assert abs(float(value)) < 1e-5 and np.abs(slope).max() < 1e-5
    value, slope = jax.value_and_grad(loss)(0.5 * table)
    assert float(value) > 0.1 and np.abs(slope).max() > 0.01


@every_divergence
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.cases(6)
def test_a_student_of_a_certain_text_is_ideal(name, steps):
    """Of one possible text all targets are alike in every step: no loss for who knows it."""
    certain = lambda z, t: jnp.broadcast_to(jnp.array([0.0, 40.0, 0.0]), (*z.shape, V))  # noqa: E731
    objective = SDTT(steps=8, per_step=steps, divergence=name)
    assert float(jnp.abs(distilled(objective, certain, certain)).max()) < 1e-5


@every_divergence
def test_the_teacher_has_no_gradient(name):
    def loss(teacher):
        student = lambda z, t: jnp.zeros((*z.shape, V))  # noqa: E731
        return distilled(SDTT(divergence=name), student, of_table(teacher)).sum()

    value, slope = jax.value_and_grad(loss)(jnp.float32(TABLE))
    assert float(value) > 0.1
    np.testing.assert_array_equal(slope, 0.0)


def targets(objective, teacher, z, t, round=0):
    both = exact.taught(exact.of_outputs(teacher), exact.of_outputs(teacher), round)
    batch = exact.batch_of(np.zeros_like(z))
    return objective.targets(both, Masking(V), batch, jnp.asarray(z), t, KEYS[: len(z)])


def test_a_step_that_reveals_all_gives_all_targets():
    """At t below dt: the teacher's distribution at z itself, at t."""
    teacher, t = of_table(TABLE), jnp.full(len(STATES), 0.2)
    found = targets(SDTT(steps=4, per_step=4), teacher, STATES, t)
    expected = teacher(jnp.asarray(STATES), t)
    masks = STATES == V
    np.testing.assert_allclose(found[masks], expected[masks], rtol=1e-6)


def test_masks_that_no_step_reveals_have_the_last_target():
    """A million steps reveal next to nothing: the teacher at z, two steps of three earlier."""
    told = []

    def teacher(z, t):
        told.append(t)
        return jnp.broadcast_to(t[:, None, None], (*z.shape, V))

    t, z = jnp.full(4, 0.5), np.full((4, L), V)
    found = targets(SDTT(steps=10**6, per_step=3), teacher, z, t)
    np.testing.assert_allclose(found, 0.5 - 2e-6, rtol=0, atol=2e-7)
    later = targets(SDTT(steps=10**6, per_step=3), teacher, z, t, round=8)
    np.testing.assert_allclose(later, 0.5 - 2e-6 * 3**8, rtol=1e-5)


def test_clean_tokens_and_prompts_are_no_masks():
    """The teacher reads them as they are, and they cost nothing."""
    seen = []

    def teacher(z, t):
        jax.debug.callback(lambda z: seen.append(np.asarray(z)), z)
        return jnp.zeros((*z.shape, V))

    student = lambda z, t: jnp.broadcast_to(jnp.arange(V, dtype=jnp.float32), (*z.shape, V))  # noqa: E731
    objective = SDTT(steps=2, per_step=2, divergence="kl")
    z = np.array([[0, V], [2, 1], [V, V]])
    nats = distilled(objective, student, teacher, z, jnp.full(3, 0.9))
    jax.effects_barrier()
    assert len(seen) == 2 and all((s[:2, 0] == [0, 2]).all() and s[1, 1] == 1 for s in seen)
    np.testing.assert_allclose(nats / nats[0], [1.0, 0.0, 2.0], rtol=1e-6)


def test_a_symbol_is_drawn_by_its_part_of_the_bits():
    """Bits in order fall into the symbols in order, each to 2^-31; 0 is never drawn."""
    law = jnp.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    bits = jnp.array([0, 2**30 - 1, 2**30, 3 * 2**30 - 1, 3 * 2**30, 2**32 - 1], jnp.uint32)
    found = draw_symbol(jnp.broadcast_to(law, (6, 6)), bits)
    np.testing.assert_array_equal(found, [1, 1, 3, 3, 4, 4])


@pytest.mark.parametrize("at_once", [2**20, 12])
def test_however_the_head_is_computed_the_loss_is_the_same(monkeypatch, at_once):
    """At all positions, or at those that need it, and a chunk of logits at a time."""
    objective, t = SDTT(steps=20, per_step=2, divergence="kl"), jnp.full(len(STATES), 0.4)
    arguments = objective, of_table(0.5 * TABLE), of_table(TABLE), STATES, t
    plain = distilled(*arguments)
    monkeypatch.setattr(head, "LEAST_VOCABULARY", 2)
    monkeypatch.setattr(head, "LOGITS", head.Logits(at_once, at_once))
    np.testing.assert_allclose(distilled(*arguments), plain, rtol=1e-5)
    assert float(plain.max()) > 0.05


# DCD


def test_a_trajectory_leaves_x_once_and_for_one_symbol():
    x = jnp.tile(jnp.arange(5), (400, 4))
    levels = [jnp.full(400, gamma) for gamma in np.linspace(-5.0, 5.0, 9)]
    found = np.stack(duality.trajectory(exact.keys_for(1, 400), x, levels, 5))
    same = found == np.asarray(x)
    assert (same[:-1] >= same[1:]).all()
    last = found[-1]
    assert ((found == last) | same).all() and found.dtype == np.int32
    assert same[0].mean() > 0.95 > 0.5 > same[-1].mean()


def recorded(round, u):
    """(times told to the student, to the teacher, nats) of one call of DCD."""
    told = {}

    def outputs(name):
        def features(z, t):
            told[name] = np.asarray(t)
            return jnp.zeros((*z.shape, V))

        return Denoiser(features, lambda h: h)

    objective = DCD(steps=16, low=-3.0, high=2.0)
    batch = exact.batch_of(np.ones((len(u), L)))
    both = exact.taught(outputs("student"), outputs("teacher"), round)
    nats, extra = objective(both, Uniform(V), batch, jnp.asarray(u), exact.keys_for(0, len(u)))
    np.testing.assert_array_equal(extra["round"], round)
    return told["student"], told["teacher"], nats


@pytest.mark.parametrize("round, step", [(0, 1 / 16), (2, 4 / 16), (4, 1.0)])
@pytest.mark.cases(1)
def test_the_teacher_sees_less_noise_by_a_step(round, step):
    """Levels gamma are linear in time; a later round has a longer step; none goes beyond 1."""
    u = np.array([0.0, 0.3, 0.7, 0.9999], np.float32)
    later, earlier, nats = recorded(round, u)
    t = np.minimum(u + step, 1.0)
    for found, time in ((later, t), (earlier, t - step)):
        noise = duality.level(jnp.float32(-3.0 + 5.0 * time), V).noise
        np.testing.assert_allclose(found, noise, rtol=1e-5)
    np.testing.assert_allclose(nats, 0.0, atol=1e-6)  # outputs are all alike


# Rounds of the training step

TOKENS = np.random.default_rng(0).integers(0, 5, (ROWS, 6)).astype(np.int32)
OPTIONS = TrainOptions(num_steps=6, batch_size=ROWS, ema=0.5)


def network(**options):
    sizes = dict(size=16, depth=1, heads=2, hidden=32, scan_blocks=False) | options
    return Transformer(5, **sizes).build()


def moved(tree, seed):
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    return jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape), tree)


def states(objective, process, count, options=OPTIONS, net=None, trainable=""):
    """The states before the first step and after each, with the metrics of each."""
    net, optimizer = net or network(), optax.sgd(0.3)
    state = init_state(jax.random.key(0), net, process, optimizer, trainable, taught=True)
    # A teacher that is not the student from the start, so that there is something to learn.
    state = state._replace(
        params=moved(state.params, 1),
        teacher=moved(state.teacher, 2),
        frozen=moved(state.frozen, 3),
    )
    step = jax.jit(make_train_step(net, objective, optimizer, options))
    found, metrics = [state], []
    for _ in range(count):
        state, told = step(state, exact.batch_of(TOKENS))
        found.append(state)
        metrics.append(told)
    return found, metrics


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.cases(1)
def test_the_student_becomes_the_teacher_of_the_next_round(averaged):
    """To the bit, at the first step of each round but the first; or its moving average does."""
    objective = SDTT(steps=64, round_steps=2, averaged=averaged)
    found, metrics = states(objective, Masking(5), 5)
    source = [s.ema if averaged else s.params for s in found]
    expected = [found[0].teacher] * 3 + [source[2]] * 2 + [source[4]]
    for state, teacher in zip(found, expected, strict=True):
        assert_same(state.teacher, teacher)
    assert [float(m["round"]) for m in metrics] == [0, 0, 1, 1, 2]
    assert all(float(m["nats"]) > 0 and float(m["grad_norm"]) > 0 for m in metrics)
    # From then on the teacher's part in the loss is the new one's.
    other = found[2]._replace(teacher=moved(found[2].teacher, 3))
    step = jax.jit(make_train_step(network(), objective, optax.sgd(0.3), OPTIONS))
    assert_same(step(other, exact.batch_of(TOKENS))[0], found[3])


def test_one_round_keeps_its_teacher():
    found, _ = states(SDTT(round_steps=0), Masking(5), 3)
    assert_same(found[-1].teacher, found[0].teacher)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "objective, process",
    [
        (SDTT(steps=8), Masking(5, LogLinear(1e-3), "sigma")),
        pytest.param(DCD(steps=8, low=-2.7, high=1.6), Uniform(5), marks=pytest.mark.campaign),
    ],
)
def test_microbatches_change_nothing(objective, process):
    whole, metrics = states(objective, process, 2)
    parts, same = states(objective, process, 2, dataclasses.replace(OPTIONS, microbatches=4))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4)  # noqa: E731
    jax.tree.map(close, parts[-1].params, whole[-1].params)
    assert float(same[-1]["nats"]) == pytest.approx(float(metrics[-1]["nats"]), rel=1e-4)


@pytest.mark.slow
def test_a_teacher_shares_what_is_frozen():
    """Adapters alone are kept twice, and the teacher's are those that it reads."""
    net = network(lora_rank=2)
    found, metrics = states(SDTT(steps=8, round_steps=1), Masking(5), 2, net=net)
    start = found[0]
    assert jax.tree.structure(start.teacher) == jax.tree.structure(start.params)
    assert start.frozen and float(metrics[0]["nats"]) > 0
    assert_same(found[2].teacher, found[1].params)
    assert_same(found[2].frozen, start.frozen)


@pytest.mark.campaign
def test_a_teacher_has_no_dropout():
    """Where the student has none, both make one number: the loss of equal networks is 0."""
    net, process = network(dropout=0.5), Masking(5)
    state = init_state(jax.random.key(0), net, process, optax.sgd(0.0), taught=True)
    state = state._replace(params=moved(state.params, 1))
    state = state._replace(teacher=state.params)
    told = {}
    for name, made in (("without", network()), ("with", net)):
        objective = SDTT(per_step=1)
        step = jax.jit(make_train_step(made, objective, optax.sgd(0.0), OPTIONS))
        told[name] = float(step(state, exact.batch_of(TOKENS))[1]["nats"])
    assert abs(told["without"]) < 1e-4 and told["with"] > 0.01


def test_without_a_teacher_there_is_no_loss():
    denoiser = Denoiser(lambda z, t: jnp.zeros((*z.shape, V)), lambda h: h)
    for objective, process in ((SDTT(), Masking(V)), (DCD(), Uniform(V))):
        with pytest.raises(ValueError, match="needs a teacher"):
            objective(denoiser, process, X, TIMES, KEYS)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: SDTT(steps=0), "objective.steps must be at least 1, not 0"),
        (lambda: SDTT(per_step=0), "objective.per_step must be at least 1, not 0"),
        (lambda: SDTT(steps=2, per_step=3), "per_step=3 must be at most objective.steps=2"),
        (lambda: DCD(round_steps=-1), "objective.round_steps must be at least 0, not -1"),
        (lambda: DCD(low=1.0, high=1.0), "objective.low=1.0 must be below objective.high=1.0"),
        (lambda: SDTT(divergence="js"), "divergence must be one of reverse_kl, kl, tvd, mse"),
    ],
)
def test_options_out_of_range(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize(
    "objective, rounds",
    [
        (SDTT(steps=8, round_steps=10), 3),  # students of 4, 2 and 1 steps
        (SDTT(steps=10, per_step=3, round_steps=10), 2),  # of 3.3 and 1.1 steps
        (DCD(steps=8, round_steps=10), 4),  # teachers that are 1/8, 1/4, 1/2 and 1 ahead
        (SDTT(steps=2, round_steps=10), 1),
    ],
)
def test_rounds_end_where_one_step_is_left(objective, rounds):
    objective.check_rounds(10 * rounds)
    most = objective.span * float(objective.step_size(jnp.int32(rounds - 1)))
    assert most <= 1.0 < most * objective.growth
    words = f"makes {rounds + 1} rounds.*{rounds} are enough.*to at most {10 * rounds},"
    with pytest.raises(UserError, match=words):
        objective.check_rounds(10 * rounds + 1)
    dataclasses.replace(objective, round_steps=0).check_rounds(10**6)


@pytest.mark.parametrize(
    "values, words",
    [
        (
            {"objective.name": "sdtt", "process.name": "uniform"},
            "objective.name='sdtt' needs process.name='masking' or 'resizing', not 'uniform'",
        ),
        (
            {"objective.name": "dcd"},
            "objective.name='dcd' needs process.name='uniform', not 'masking'",
        ),
        (
            {"objective.name": "sdtt", "objective.round_steps": "100"},
            "train.num_steps=1000000 with objective.round_steps=100 makes 10000 rounds",
        ),
    ],
)
def test_a_config_that_cannot_be_distilled_is_refused(values, words):
    asked = {"mesh.data": "1", **values}
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / "text8.py"), asked)
    domain = types.SimpleNamespace(vocab_size=27, eot_id=None, unit="character", shape=(256,))
    with pytest.raises(UserError, match=words):
        build.experiment(config, domain, jax.devices()[:1])


def test_the_work_of_a_step_counts_the_teacher():
    """Three forward passes for the student, and one for each step of its teacher."""
    net, forward = network(), 1000.0
    net = net._replace(flops=lambda params, length, block: forward)
    state = init_state(jax.random.key(0), net, Masking(5), optax.sgd(0.1), taught=True)
    data = types.SimpleNamespace(length=6)
    for objective, passes in ((SDTT(per_step=3), 6), (DCD(), 4), (AnyOrder(), 3)):
        experiment = types.SimpleNamespace(network=net, objective=objective, data=data)
        assert bench.training_flops(experiment, state) == passes * forward


def test_a_teacher_of_repeated_rows_has_their_labels():
    """Rows that are repeated, as for several draws of noise, keep what is bound to them."""
    made = network(classes=3)
    params = moved(made.init(jax.random.key(0)), 1)
    before = {"network": moved(params, 2), "process": Masking(5)}
    taught = teaching.with_teacher(made, before, jnp.int32(1))
    denoiser = taught.bind(params, {"label": jnp.asarray([0, 2])}, None)
    several, times = denoiser.repeated(2), jnp.full(4, 0.5)
    z = jnp.asarray(np.repeat(TOKENS[:2], 2, axis=0))
    for one, many in ((denoiser, several), (denoiser.teacher.denoiser, several.teacher.denoiser)):
        expected = np.repeat(one(TOKENS[:2], times[:2]), 2, axis=0)
        np.testing.assert_allclose(many(z, times), expected, rtol=1e-5, atol=1e-6)
    assert int(several.teacher.round) == 1


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.cases(1)
def test_a_teacher_reads_the_classes_that_training_hides_from_its_student(images):
    """A student without a class has the target of a teacher without it: equal models agree."""
    made, rows = network(classes=3, label_dropout=0.5), 16
    if images:
        sizes = dict(shape=(2, 1, 1), channels=64, blocks=1)
        made = UNet(5, classes=3, label_dropout=0.5, **sizes).build()
    params = moved(made.init(jax.random.key(0)), 1)
    whole = {"network": params, "process": Masking(5)}
    taught = teaching.with_teacher(made, whole, jnp.int32(0))
    context, z = {"label": jnp.arange(rows) % 3}, jnp.full((rows, 2), 5)
    student = taught.denoiser(whole, context, jax.random.split(jax.random.key(4), rows))
    logits, targets, told, free = (
        np.asarray(denoiser(z, jnp.full(rows, 0.5)))
        for denoiser in (
            student, student.teacher.denoiser, made.denoiser(whole, context), made.denoiser(whole)
        )
    )  # fmt: skip
    np.testing.assert_allclose(logits, targets, rtol=1e-5, atol=1e-6)
    away = [np.abs(logits - each).max(axis=(1, 2)) for each in (told, free)]
    hidden = away[0] > away[1]
    assert 0 < hidden.sum() < rows
    np.testing.assert_array_less(np.where(hidden, away[1], away[0]), 1e-5)


def test_a_teacher_of_other_classes_is_refused():
    """It would be told the classes by the numbers of the student's data."""

    def run(*labels):
        return types.SimpleNamespace(
            domain=TextDomain(Characters("ab"), 4, labels),
            process=Masking(2),
            train=types.SimpleNamespace(initial="runs/teacher"),
            config={"objective": {"name": "sdtt"}},
        )

    beginnings._check_teacher(run("no", "yes"), run("no", "yes"))
    with pytest.raises(UserError, match="teacher cannot be .* class 1 is 'yes' instead of 'so'"):
        beginnings._check_teacher(run("no", "yes"), run("no", "so"))


def test_parameters_of_a_run_with_other_numbers_of_its_classes_are_refused():
    """Vectors of classes are copied by number; new classes may be anywhere."""

    def run(*labels, classes=2):
        return types.SimpleNamespace(
            domain=TextDomain(Characters("ab"), 4, labels),
            train=types.SimpleNamespace(initial="runs/one"),
            config={"network": {"classes": classes}},
        )

    for own in (("no", "yes"), ("no", "so"), ("good", "bad"), (0, 1), ()):
        beginnings._check_places(run(*own), run("no", "yes"))
    beginnings._check_places(run("yes", "no", classes=0), run("no", "yes", classes=0))
    said = "initial=runs/one has .* 'yes' is class 0 of this run, but class 1 of that run"
    with pytest.raises(UserError, match=said):
        beginnings._check_places(run("yes", "no"), run("no", "yes"))
