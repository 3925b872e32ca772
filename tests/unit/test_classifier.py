"""Classifiers of noisy sequences: their networks, their loss, and what is refused."""

import dataclasses
import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_networks import SIZES_OF, T, random_parameters

from md4_jax.config import build
from md4_jax.config.files import load
from md4_jax.data.pixels import PixelDomain
from md4_jax.networks.classifier import Classifier, PatchClassifier
from md4_jax.objectives.classifier import Classifier as Loss
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Mixture, UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

both_kinds = pytest.mark.parametrize("make", [Classifier, PatchClassifier])
Z = jnp.asarray([[0, 5, 2, 3, 5, 1], [4, 4, 5, 5, 0, 2], [5, 5, 5, 5, 5, 5]])


@functools.cache
def built(make, **options):
    network = make(**(SIZES_OF[make] | options)).build()
    return network, random_parameters(network)


def classified(network, params, z, t=T, **context):
    return np.asarray(network.bind(params, context).classify(z, t))


@pytest.mark.quick(1)
@both_kinds
@pytest.mark.cases(1)
def test_logits_are_of_the_classes_and_depend_on_each_token_and_the_time(make):
    network, params = built(make)
    assert network.classifies and not network.causal and not network.blockwise
    found = classified(network, params, Z)
    assert found.shape == (3, 3) and found.dtype == np.float32
    for n in range(6):
        other = classified(network, params, Z.at[0, n].set(4))
        assert np.abs(other[0] - found[0]).max() > 1e-4
        np.testing.assert_array_equal(other[1:], found[1:])
    assert np.abs(classified(network, params, Z, T + 0.1) - found).max() > 1e-4


@both_kinds
def test_a_label_is_no_input(make):
    """Or the loss would be that of a network which is told the answer."""
    network, params = built(make)
    label = jnp.asarray([0, 1, 2])
    found = classified(network, params, Z, label=label)
    np.testing.assert_array_equal(found, classified(network, params, Z))
    assert not any("label" in name for name in params)


def test_padding_has_no_part_in_the_mean():
    network, params = built(Classifier)
    segments = jnp.where(jnp.arange(6) < 4, 0, -1) * jnp.ones((3, 1), jnp.int32)
    found = classified(network, params, Z, segments=segments)
    short = classified(network, params, Z[:, :4])
    np.testing.assert_allclose(found, short, atol=1e-5)
    assert np.abs(found - classified(network, params, Z)).max() > 1e-3


@both_kinds
def test_one_hot_vectors_are_read_as_the_symbols_they_stand_for(make):
    network, params = built(make)
    mixture = Mixture(jnp.arange(6), jax.nn.one_hot(Z, 6))
    found = classified(network, params, mixture)
    np.testing.assert_allclose(found, classified(network, params, Z), atol=1e-5)


def test_images_of_ordered_numbers_have_no_vectors():
    network, params = built(PatchClassifier, input="intensity")
    assert not network.mixtures
    assert classified(network, params, Z).shape == (3, 3)


@both_kinds
def test_before_the_first_step_all_classes_are_alike(make):
    network, _ = built(make)
    params = jax.jit(network.init)(jax.random.key(0))
    np.testing.assert_array_equal(classified(network, params, Z), 0.0)


def test_the_loss_is_the_entropy_of_the_class_given_a_noisy_sequence():
    """Of the exact classifier, over all draws: within 4 standard errors of its enumeration."""
    of_class, share = np.stack([exact.P_V3L2, exact.P_V3L2[::-1, [1, 2, 0]]]), np.array([0.4, 0.6])
    x, states = exact.sequences(3, 2), exact.sequences(4, 2)
    agrees = ((states[:, None] == 3) | (states[:, None] == x)).all(axis=-1)
    posterior = share * (agrees @ of_class.reshape(2, -1).T)
    table = jnp.log(jnp.asarray(posterior / posterior.sum(axis=1, keepdims=True)))

    def classify(z, t):
        return table[4 * z[:, 0] + z[:, 1]]

    nothing = Denoiser(lambda z, t: z, lambda h: h, classify=classify)
    # With alpha = 1 - t each of the four patterns of masks has the mean of t^k (1 - t)^(2 - k).
    weight = np.array([1 / 3, 1 / 6, 1 / 3])[(states == 3).sum(axis=1)]
    given = posterior.sum(axis=1)
    want = -np.sum(weight[:, None] * posterior * np.log(posterior / given[:, None]))
    rng, count = np.random.default_rng(0), 40_000
    label = rng.choice(2, count, p=share)
    rows = np.array([rng.choice(9, p=of_class[y].ravel()) for y in label])
    u, keys = rng.random(count, np.float32), exact.keys_for(0, count)
    batch = exact.batch_of(x[rows], label=label.astype(np.int32))
    nats, extra = jax.jit(lambda b: Loss()(nothing, Masking(3), b, u, keys))(batch)
    error = np.std(nats) / np.sqrt(count)
    assert abs(np.mean(nats) - want) < 4 * error
    np.testing.assert_array_equal(extra["cross_entropy"], nats)
    assert 0.6 < np.mean(extra["accuracy"]) < 0.9
    assert not Loss().is_bound(Masking(3))


def test_rows_without_tokens_that_count_cost_nothing():
    found = exact.labelled(exact.sequences(2, 2))
    batch = found._replace(loss_mask=np.array([[True] * 2] * 2 + [[False] * 2] * 2))
    nothing = Denoiser(lambda z, t: z, lambda h: h, classify=lambda z, t: jnp.zeros((4, 5)))
    nats, _ = Loss()(nothing, Masking(2), batch, jnp.full(4, 0.5), exact.keys_for(0, 4))
    np.testing.assert_allclose(nats, [np.log(5)] * 2 + [0.0] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(classes=0), "needs network.classes"),
        (dict(classes=1), "of at least 2, .* not 1"),
        (dict(causal=True), "network.causal=True is only for networks that predict tokens"),
        (dict(label_dropout=0.1), "set network.label_dropout=0.0"),
        (dict(lora_rank=2), "set network.lora_rank=0"),
        (dict(tied=True), "set network.tied=False"),
    ],
)
def test_options_of_other_networks_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Classifier(**(SIZES_OF[Classifier] | options))


BASE = load(str(PACKAGE_ROOT / "configs" / "base.py"))
BASE["mesh"]["data"] = 1
DOMAIN = PixelDomain((2, 2, 1), 4, tuple(range(3)))
ITS = dict(
    objective=dict(name="classifier"),
    network=dict(name="dit_classifier", size=16, depth=1, heads=2, embedding=8, patch=1, classes=3),
    evals=dict(test=dict(name="classification", batch_size=8)),
)


def experiment(**sections):
    """An experiment of images with three classes, with other sections."""
    data = dict(name="digits", length=4, labels=True)
    return build.experiment(BASE | dict(data=data) | ITS | sections, DOMAIN)


@pytest.mark.parametrize(
    "sections, words",
    [
        (dict(objective=dict(name="md4")), "objective.name='md4' needs a network that predicts"),
        (
            dict(network=dict(name="dit", size=16, depth=1, heads=2, embedding=8, classes=3)),
            "objective.name='classifier' needs network.name='classifier' or, of images",
        ),
        (dict(network=ITS["network"] | dict(classes=2)), "network.classes=2 must be 3"),
        (dict(evals=dict(test=dict(name="likelihood", objective=dict(name="md4")))), "evals.test"),
        (dict(evals=dict(mine=dict(name="samples"))), "evals.mine.name='samples' needs a network"),
        (
            dict(
                process=dict(name="uniform"),
                network=ITS["network"] | dict(time_conditioning=False),
            ),
            "needs network.time_conditioning=True with process.name='uniform'",
        ),
        (dict(process=dict(name="state_dependent")), "needs noise without learned parameters"),
    ],
)
def test_what_does_not_go_together_is_refused_at_the_start(sections, words):
    assert experiment().network.classifies
    with pytest.raises(UserError, match=words):
        experiment(**sections)


GUIDED = dict(
    network=dict(name="dit", size=16, depth=1, heads=2, embedding=8, patch=1, classes=0),
    objective=dict(name="md4"),
    data=dict(name="digits", length=4, labels=False),
    evals={},
)


def guided(**sample):
    own = dict(name="ancestral", classifier="RUN", label=1) | sample
    config = BASE | GUIDED | dict(sample=BASE["sample"] | own)
    return build.experiment(config, dataclasses.replace(DOMAIN, labels=()))


@pytest.mark.parametrize(
    "sample, words",
    [
        (dict(label=-1), "set sample.label to the number"),
        (dict(name="confidence"), "cannot guide sample.name='confidence': use ancestral"),
        (dict(guidance=2.0, label=1), "sample.guidance=2.0"),
        (dict(classifier_method="newton"), "must be exact or taylor, not 'newton'"),
        (dict(classifier_strength=float("nan")), "must be a finite number"),
    ],
)
def test_samples_that_a_classifier_cannot_guide_are_refused(sample, words):
    made = guided()
    assert made.guide.label == 1 and made.sample.label == -1  # the network has no classes
    with pytest.raises(UserError, match=words):
        guided(**sample)
