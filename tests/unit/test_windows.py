"""Texts longer than the network's window: filled part by part, each seeing the one before."""

import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.options import MeshOptions, SampleOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Network, Prompt
from md4_jax.runtime.mesh import make_mesh
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.batches import draw_samples, make_sampler, windows
from md4_jax.samplers.grids import cosine
from md4_jax.samplers.loop import sample
from md4_jax.samplers.orders import AnyOrder

MESH = make_mesh(MeshOptions(data=1))
VOCABULARY, WINDOW = 5, 4
PARAMS = {"network": {}, "process": Masking(VOCABULARY)}


def parts(length, window, stride):
    return [(part.start, part.stop) for part in windows(length, window, stride)]


@pytest.mark.parametrize(
    "length, window, stride, expected",
    [
        (4, 4, 2, [(0, 4)]),
        (3, 4, 2, [(0, 3)]),
        (8, 4, 2, [(0, 4), (2, 6), (4, 8)]),
        (7, 4, 2, [(0, 4), (2, 6), (3, 7)]),
        (5, 4, 3, [(0, 4), (1, 5)]),
        (9, 4, 1, [(n, n + 4) for n in range(6)]),
        (10, 4, 3, [(0, 4), (3, 7), (6, 10)]),
        (6, 6, 0, [(0, 6)]),
    ],
)
def test_windows(length, window, stride, expected):
    assert parts(length, window, stride) == expected


def test_windows_cover_the_text_and_overlap_by_what_the_stride_leaves():
    for length in range(1, 40):
        for window in range(2, 9):
            for stride in range(1, window):
                found = parts(length, window, stride)
                assert found[0][0] == 0 and found[-1][1] == length
                assert {b - a for a, b in found} == {min(window, length)}
                for (_, end), (start, after) in itertools.pairwise(found):
                    assert end - start >= window - stride and after > end


def network(features):
    """A network without parameters whose features are logits."""
    return Network(
        lambda key: {},
        lambda params, context, keys: Denoiser(features, lambda h: h),
        time_free=True,
    )


def counting(z, t, **context):
    """Certain of one more than the token on the left; of 0 where there is none."""
    before = jnp.concatenate([jnp.full_like(z[:, :1], VOCABULARY - 1), z[:, :-1]], axis=1)
    return 50.0 * jax.nn.one_hot((before + 1) % VOCABULARY, VOCABULARY)


def free(length):
    return Prompt(np.zeros(length, np.int32), np.zeros(length, bool))


def drawn(template, *, features=counting, step=None, trace=False, window=WINDOW, grid=4, **options):
    step = AnyOrder("left_to_right") if step is None else step
    sampler = make_sampler(network(features), sample, cosine(grid), MESH, trace=trace)
    templates = template if isinstance(template, list) else [template]
    asked = SampleOptions(**{"num": 1, "stride": 2, **options})
    return draw_samples(sampler, PARAMS, step, asked, templates, window=window)


@pytest.mark.parametrize("length, stride", [(3, 1), (4, 3), (8, 2), (11, 3)])
@pytest.mark.cases(2)
def test_a_window_sees_what_those_before_it_have_drawn(length, stride):
    """Each token is one more than the last, also over the ends of windows."""
    out = drawn(free(length), stride=stride, window=min(WINDOW, length), num=2)
    expected = np.arange(length) % VOCABULARY
    np.testing.assert_array_equal(out.tokens, [expected, expected])
    assert not out.prompt_mask.any()


def test_each_window_has_its_own_draws():
    """Of equally likely symbols 64 texts have the same two in the next window by chance alone."""
    equal = lambda z, t, **context: jnp.zeros((*z.shape, VOCABULARY))  # noqa: E731
    tokens = drawn(free(8), features=equal, num=64, batch_size=64).tokens
    pairs = [tokens[:, start : start + 2] for start in (2, 4, 6)]
    for first, second in itertools.combinations(pairs, 2):
        assert (first == second).all(axis=1).mean() < 0.3


def test_each_sample_has_its_own_label_in_every_batch():
    """The network is certain of the label: 5 samples in batches of 2."""
    told = Network(
        lambda key: {},
        lambda params, context, keys: Denoiser(
            lambda z, t: 50.0 * jnp.repeat(
                jax.nn.one_hot(context["label"], VOCABULARY)[:, None], z.shape[1], axis=1
            ),
            lambda h: h,
        ),
        time_free=True,
    )  # fmt: skip
    sampler = make_sampler(told, sample, cosine(4), MESH)
    labels = np.asarray([3, 0, 4, 1, 2], np.int32)
    asked, step = SampleOptions(num=5, batch_size=2), AnyOrder("left_to_right")
    out = draw_samples(sampler, PARAMS, step, asked, [free(3)], window=3, context={"label": labels})
    np.testing.assert_array_equal(out.tokens, np.repeat(labels[:, None], 3, axis=1))


def test_what_a_user_gives_stands_and_is_seen():
    tokens, given = np.zeros(9, np.int32), np.zeros(9, bool)
    tokens[[2, 7]], given[[2, 7]] = 4, True
    out = drawn(Prompt(tokens, given))
    np.testing.assert_array_equal(out.tokens, [[0, 1, 4, 0, 1, 2, 3, 4, 0]])
    np.testing.assert_array_equal(out.prompt_mask, [given])


def test_the_network_sees_no_more_than_a_window_of_tokens_and_masks():
    """Every state that it is given, with its masks: what is known is never a mask again."""
    seen = []

    def recording(z, t, **context):
        jax.debug.callback(lambda z: seen.append(np.asarray(z)[0].tolist()), z, ordered=True)
        return counting(z, t)

    drawn(free(6), features=recording)
    jax.effects_barrier()
    mask = VOCABULARY
    assert seen == [
        [mask, mask, mask, mask], [0, mask, mask, mask], [0, 1, mask, mask], [0, 1, 2, mask],
        [2, 3, mask, mask], [2, 3, 4, mask],
    ]  # fmt: skip


def test_evaluations_of_the_windows_add_up():
    """One at a time: as many as there are tokens to draw, whatever the windows."""
    tokens, given = np.zeros(9, np.int32), np.zeros(9, bool)
    given[:3] = True
    for stride in (1, 3):
        out = drawn([free(9), Prompt(tokens, given)], stride=stride)
        assert out.evaluations.tolist() == [9, 6]


def table(z, t, **context):
    """A denoiser that gives every symbol some probability, and looks at all positions."""
    logits = jnp.asarray(exact.table_logits(VOCABULARY, 2))
    neighbour = jnp.roll(z, 1, axis=1)
    return logits[z * (VOCABULARY + 1) + neighbour, 0]


def random_samples(**options):
    return drawn(free(9), features=table, step=Ancestral(), **options)


@pytest.mark.slow
def test_a_sample_depends_on_the_seed_and_its_number_alone():
    whole = random_samples(num=7, batch_size=7)
    assert whole.tokens.shape == (7, 9) and whole.tokens.max() < VOCABULARY
    assert len({tuple(row) for row in whole.tokens}) == 7
    batches = random_samples(num=7, batch_size=3)  # the last of one row, filled up
    assert batches.tokens.shape == (7, 9) and batches.evaluations.shape == (7,)
    np.testing.assert_array_equal(batches.tokens, whole.tokens)
    np.testing.assert_array_equal(batches.evaluations, whole.evaluations)
    np.testing.assert_array_equal(random_samples(num=2).tokens, whole.tokens[:2])
    assert (random_samples(num=2, seed=1).tokens != whole.tokens[:2]).any()


def test_windows_do_not_draw_alike():
    """With no overlap to see, two windows with the same randomness would be equal."""
    uniform = lambda z, t: jnp.zeros((*z.shape, VOCABULARY))  # noqa: E731
    out = drawn(free(16), features=uniform, step=Ancestral(), stride=3, num=4).tokens
    # Each window after the first draws its last three positions.
    pieces = [out[:, 4 + 3 * n : 7 + 3 * n] for n in range(4)]
    assert all((a != b).any() for i, a in enumerate(pieces) for b in pieces[:i])


def test_templates_come_one_after_another_num_of_each():
    letters = [Prompt(np.full(3, k, np.int32), np.array([True, False, False])) for k in (1, 3)]
    out = drawn(letters, window=3, num=2, batch_size=3)
    np.testing.assert_array_equal(out.tokens, [[1, 2, 3], [1, 2, 3], [3, 4, 0], [3, 4, 0]])
    np.testing.assert_array_equal(out.prompt_mask, [[True, False, False]] * 4)


def test_frames_are_those_of_the_first_sequence_in_the_whole_text():
    tokens, given = np.zeros(6, np.int32), np.zeros(6, bool)
    tokens[5], given[5] = 4, True
    out = drawn([Prompt(tokens, given), free(6)], trace=True)
    z, confidence = out.frames
    mask = VOCABULARY
    assert z.shape == confidence.shape == (2, 5, 1, 6)
    np.testing.assert_array_equal(
        z[:, :, 0],
        [
            [
                [mask, mask, mask, mask, -1, 4], [0, mask, mask, mask, -1, 4],
                [0, 1, mask, mask, -1, 4], [0, 1, 2, mask, -1, 4], [0, 1, 2, 3, -1, 4],
            ],
            [[0, 1, 2, 3, mask, 4]] + 4 * [[0, 1, 2, 3, 4, 4]],
        ],
    )  # fmt: skip
    np.testing.assert_allclose(confidence, np.where((z == mask) | (z < 0), 0.0, 1.0))


def test_no_frames_unless_asked_for():
    assert drawn(free(4)).frames is None


def test_a_token_keeps_its_probability_in_later_windows():
    z, confidence = random_samples(trace=True).frames
    for window in range(1, len(z)):
        start = 4 + 2 * (window - 1)  # what the windows before have filled
        np.testing.assert_array_equal(
            confidence[window, :, 0, :start],
            np.tile(confidence[window - 1, -1, 0, :start], (z.shape[1], 1)),
        )
    assert ((confidence[-1, -1] > 0) & (confidence[-1, -1] < 1)).all()


@pytest.mark.slow
def test_frames_do_not_depend_on_the_batch():
    one = random_samples(num=5, batch_size=5, trace=True)
    other = random_samples(num=5, batch_size=2, trace=True)
    for a, b in zip(one.frames, other.frames, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    np.testing.assert_array_equal(one.frames[0][-1, -1], one.tokens[:1])
