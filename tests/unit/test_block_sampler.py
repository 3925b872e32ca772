"""Sampling block by block: the law, the memory, stops, prompts and texts of any length."""

import functools
import os

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.networks.transformer import Transformer
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Accelerator, Prompt
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.orders import FirstHitting
from md4_jax.samplers.paths import Parts, runs, whole
from md4_jax.samplers.stops import Stop

pytestmark = pytest.mark.slow

# Undoes what conftest.py sets.
EMITTERS = "xla_cpu_use_fusion_emitters"
AS_THE_PROGRAM = {EMITTERS: True} if EMITTERS in os.environ["XLA_FLAGS"] else {}

SIZES = dict(vocab_size=5, size=16, depth=2, heads=2, hidden=24)


@functools.cache
def denoiser(*, timed=True, **options):
    network = Transformer(**SIZES, time_conditioning=timed, **options).build()
    params = jax.jit(network.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    noise = lambda x: x + 0.5 * rng.normal(size=x.shape).astype(x.dtype)  # noqa: E731
    return network.bind(jax.tree.map(noise, params))


def drawn(
    rows=8, length=12, given=None, step=None, *, timed=True, trace=False, left=False, **options
):
    tokens = np.zeros((rows, length), np.int32)
    marks = np.zeros((rows, length), bool)
    if given is not None:
        tokens[:, : len(given)], marks[:, : len(given)] = given, True
    options = dict(block=3, window=12) | options
    network = denoiser(timed=timed, causal_context=left)
    blocks = Blocks(**options)
    call = jax.jit(
        lambda keys: blocks(
            network, Masking(5), step or Ancestral(), grid=uniform(4), keys=keys,
            prompt=Prompt(jnp.asarray(tokens), jnp.asarray(marks)), trace=trace,
        ),
        # As the program compiles it: the same bits are promised of that.
        compiler_options=AS_THE_PROGRAM,
    )  # fmt: skip
    return call(exact.keys_for(0, rows))


@pytest.mark.parametrize(
    "window, rows",
    [(12, 1), (6, 8), *(pytest.param(*c, marks=pytest.mark.campaign) for c in ((12, 8), (6, 1)))],
)
@pytest.mark.cases(1)
def test_with_and_without_the_memory_the_samples_are_the_same_bits(rows, window):
    """Eight times the window too, so that it slides."""
    options = dict(rows=rows, length=48, window=window)
    kept, again = drawn(**options)[0], drawn(**options, cached=False)[0]
    for a, b in zip(kept, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(np.unique(np.asarray(kept.z))) > 2


@pytest.mark.parametrize("step", [Ancestral(), FirstHitting(), Confidence()])
@pytest.mark.cases(1)
def test_every_mask_is_drawn_and_what_is_given_stays(step):
    chain, _ = drawn(step=step, given=[1, 2, 3, 4])
    assert (np.asarray(chain.z) < 5).all() and (np.asarray(chain.z)[:, :4] == [1, 2, 3, 4]).all()
    assert (np.asarray(chain.confidence)[:, :4] == 1.0).all()
    assert (np.asarray(chain.evaluations) <= 4 * 3 + 3).all()


@pytest.mark.campaign
def test_a_sample_does_not_depend_on_its_neighbours():
    one, eight = (np.asarray(drawn(rows=rows)[0].z) for rows in (1, 8))
    np.testing.assert_array_equal(one[0], eight[0])


@pytest.mark.campaign
def test_the_last_token_has_the_law_of_the_network_after_the_first_two():
    """Blocks of one after a given pair: chi-squared of the third token, n = 20,000, p > 1e-4."""
    n = 20_000
    chain, _ = drawn(rows=n, length=3, given=[1, 2], block=1, window=3, timed=False)
    network = denoiser(timed=False)
    z, clean, t = np.array([[1, 2, 5]]), np.array([[1, 2, 0]]), jnp.asarray([[0.5, 0.5, 1.0]])
    h = network.blocks.features(z, t, clean, 1)
    p = np.asarray(jax.nn.softmax(network.unembed(h)[0, 2]), np.float64)
    assert laws.accepted(np.bincount(np.asarray(chain.z)[:, 2], minlength=5), p)


def test_a_sequence_ends_with_the_block_that_has_the_stop_in_it():
    free, _ = drawn(length=24)
    stopped, _ = drawn(length=24, stop=Stop((2,)))
    free, stopped = np.asarray(free.z), np.asarray(stopped.z)
    hit = (free.reshape(8, 8, 3) == 2).any(axis=2)
    for row in range(8):
        end = 3 * (1 + int(np.argmax(hit[row]))) if hit[row].any() else 24
        np.testing.assert_array_equal(stopped[row, :end], free[row, :end])
        assert (stopped[row, end:] == 5).all()
    assert hit.any()


@pytest.mark.campaign
def test_a_given_stop_ends_nothing_and_what_is_not_drawn_costs_nothing():
    """One evaluation a token. The stop is given in the first block and in the second, half given;
    the rest of the second is drawn, and may end the sequence as the blocks after it may."""
    options = dict(length=24, given=[4, 0, 1, 4], step=Confidence(per_step=1), timed=False)
    free, chain = drawn(**options)[0], drawn(**options, stop=Stop((4,)))[0]
    stops = np.asarray(free.z)[:, 4:] == 4
    # The first two tokens are those of the second block.
    more = np.where(stops.any(axis=1), (stops.argmax(axis=1) + 1) // 3, 6)
    assert {0, 1, 2, 6} <= set(more)
    np.testing.assert_array_equal((np.asarray(chain.z)[:, 4:] < 5).sum(axis=1), 2 + 3 * more)
    np.testing.assert_array_equal(chain.evaluations, 2 + 3 * more)
    np.testing.assert_array_equal(free.evaluations, 20)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "after, least",
    [pytest.param(False, 1.0, marks=pytest.mark.campaign), (True, 1.2)],
    ids=["", "blocks after a prompt"],
)
def test_a_sequence_ends_once_its_window_repeats_itself(after, least):
    """Of the last 6 tokens too few nats: the same block as when looked at afterwards.

    Blocks that begin after a prompt of one token first have 6 tokens at the seventh of the text.
    """
    options = dict(rows=32 if after else 8, length=24 if after else 48, window=6, timed=False)
    options |= dict(given=[1] if after else None, left=after)
    free, ended = (np.asarray(drawn(**options, stop=Stop(min_entropy=h))[0].z) for h in (0, least))
    stopped, ends = 0, range(7 if after else 6, free.shape[1] + 1, 3)
    for row in range(len(free)):
        nats = [exact_entropy(free[row, end - 6 : end]) for end in ends]
        found = (e for e, h in zip(ends, nats, strict=True) if h < least)
        end = next(found, free.shape[1])
        stopped += end < free.shape[1]
        np.testing.assert_array_equal(ended[row, :end], free[row, :end])
        assert (ended[row, end:] == 5).all()
    assert stopped > 0


def exact_entropy(tokens: np.ndarray) -> float:
    share = np.unique(tokens, return_counts=True)[1] / len(tokens)
    return float(-np.sum(share * np.log(share)))


def test_blocks_of_the_sampler_alone_begin_after_the_prompt():
    """Four given tokens are read as one and three, and further blocks begin after them."""
    rows, length, step = 4, 9, Confidence()
    marks = jnp.broadcast_to(jnp.arange(length) < 4, (rows, length))
    tokens = jnp.zeros((rows, length), jnp.int32).at[:, :4].set(jnp.array([4, 0, 2, 1]))
    network, blocks, zeros = denoiser(), Blocks(3, 9, anywhere=True), jnp.zeros(rows)

    @jax.jit
    def found(keys):
        prompt = Prompt(tokens, marks)
        return blocks(network, Masking(5), step, grid=uniform(2), keys=keys, prompt=prompt)[0].z

    @jax.jit
    def expected(keys):
        cache, z = network.blocks.empty_cache(rows, 12), [tokens[:, :4]]
        for part in (tokens[:, :1], tokens[:, 1:4]):
            cache = network.blocks.read(part, zeros, cache)
        for b in (2, 3):
            own = network._replace(
                features=lambda z, t, cache=cache: network.blocks.append_block(z, t, cache)[0],
                accelerator=Accelerator(),
            )
            chain, _ = sample(
                own, Masking(5), step, grid=uniform(2), prompt=no_prompt(rows, 3),
                keys=jax.vmap(jax.random.fold_in, (0, None))(keys, b),
            )  # fmt: skip
            cache = network.blocks.read(chain.z, zeros, cache)
            z.append(chain.z)
        return jnp.concatenate(z, axis=1)[:, :length]

    keys = exact.keys_for(0, rows)
    assert np.array_equal(found(keys), expected(keys))


@pytest.mark.campaign
def test_the_trace_of_blocks_that_begin_after_prompts():
    """Prompts of 0, 2 and 4 tokens stay in all frames, and the last ones are the samples."""
    given = np.arange(12) < np.array([[0], [2], [4]])
    prompt = Prompt(jnp.full((3, 12), 2), jnp.asarray(given))
    blocks, network = Blocks(block=3, window=12), denoiser(causal_context=True)
    assert network.blocks.anywhere
    call = jax.jit(
        lambda keys: blocks(
            network, Masking(5), Ancestral(), grid=uniform(4), keys=keys, prompt=prompt, trace=3
        )
    )
    chain, parts = call(exact.keys_for(0, 3))
    z, _ = whole(jax.device_get(parts))
    assert (z[:, given] == 2).all() and (z[0][~given] == 5).all()
    np.testing.assert_array_equal(z[-1], chain.z)


@pytest.mark.parametrize("shift", [(0, 0), (1, 2), (-2, 2)])
def test_frames_of_parts_are_those_of_whole_texts(shift):
    """Also of parts that begin before a text, or end behind it."""
    rng = np.random.default_rng(0)
    z, confidence = rng.integers(0, 2, (3, 4, 2, 3)), rng.random((3, 4, 2, 3))
    begin = 3 * np.arange(3)[:, None] - np.array(shift)
    first = (rng.integers(0, 2, (2, 7)), rng.random((2, 7)))
    parts = Parts(z, confidence, begin, first)
    found = whole(parts)
    for row in range(2):
        for each, frames, before in zip(parts[:2], found, first, strict=True):
            text = np.pad(before[row], (3, 4))
            for n in range(12):
                at = 3 + begin[n // 4, row]
                text[at : at + 3] = each[n // 4, n % 4, row]
                np.testing.assert_array_equal(frames[n, row], text[3:10])
        path, symbols, chances = runs([parts], row), found[0][:, row], found[1][:, row]
        kept = [n for n in range(12) if not n or (symbols[n] != symbols[n - 1]).any()]
        ends = [*(n - 1 for n in kept[1:]), 11]
        np.testing.assert_array_equal(path.number[0], kept)
        np.testing.assert_array_equal(path.frames[0][0], symbols[kept])
        np.testing.assert_array_equal(path.frames[1][0], chances[ends])
        assert 3 < len(kept) < 12


def test_the_trace_goes_from_masks_to_the_sample_block_after_block():
    chain, parts = drawn(trace=True)
    assert parts.z.shape == parts.confidence.shape == (4, 5, 1, 3)  # and not of whole texts
    z = whole(jax.device_get(parts))[0][:, 0]
    assert (z[0] == 5).all() and (z[-1] == np.asarray(chain.z)[0]).all()
    masked = (z == 5).reshape(len(z), 4, 3).any(axis=2)
    assert (np.diff(masked.sum(axis=1)) <= 0).all()
    for frame in masked:
        assert (np.diff(frame.astype(int)) >= 0).all()
