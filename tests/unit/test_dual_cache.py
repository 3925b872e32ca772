"""Blocks that see both sides, with keys and values of all other tokens from before the block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import chat_folder, peer_folder, says_a_or_ends
from tiny_networks import bound

import md4_jax
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Accelerator, Prompt, UserError
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import sample
from tests import exact

V, L, P = 5, 12, 3
Z = jnp.array([[0, 5, 3, 5, 5, 1, 2, 5, 4, 0, 5, 5], [5, 5, 1, 1, 0, 2, 5, 5, 5, 3, 3, 4]])
T = jnp.zeros(2)
SEGMENTS = jnp.array([[0] * 9 + [-1] * 3, [0] * 4 + [1] * 8])


@pytest.mark.quick(1)
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one text", "segments"])
@pytest.mark.parametrize(
    "options",
    [
        {}, dict(scan_blocks=False, kv_heads=2, head_dim=6), dict(shifted=True),
        dict(shifted=True, scan_blocks=False),
    ],
)  # fmt: skip
@pytest.mark.cases(2)
def test_a_window_among_its_own_text_has_the_features_of_the_whole(options, segments):
    denoiser = bound(segments=segments, **options)
    whole = denoiser.features(Z, T)
    h, cache = denoiser.blocks.around(Z, T, 0, None)
    np.testing.assert_allclose(h, whole, atol=1e-5)
    for begin in ([0, 0], [4, 4], [9, 9], [3, 8], [-1, 10]):  # the last extend beyond the text
        places = np.array(begin)[:, None] + np.arange(P)
        inside, row = (places >= 0) & (places < L), np.arange(2)[:, None]
        z = jnp.where(inside, Z[row, places.clip(0, L - 1)], 4)
        h, again = denoiser.blocks.around(z, T, jnp.array(begin), cache)
        expected = whole[row, places.clip(0, L - 1)]
        np.testing.assert_allclose(h[inside], expected[inside], atol=1e-5)
        for kept, found in zip(*map(jax.tree.leaves, (cache, again)), strict=True):
            if kept.ndim > 1:  # all but the places of the windows
                np.testing.assert_allclose(kept, found, atol=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_keys_and_values_of_others_are_those_of_before(shifted):
    """In the first layer they depend on no neighbour, so that with one layer nothing is lost."""
    changed = Z.at[:, 4:7].set(jnp.array([[1, 2, 3], [4, 4, 5]]))
    for depth, same in ((1, True), (2, False)):
        denoiser = bound(depth=depth, shifted=shifted)
        cache = denoiser.blocks.around(Z, T, 0, None)[1]
        h = denoiser.blocks.around(changed[:, 4:7], T, 4, cache)[0]
        assert np.allclose(h, denoiser.features(changed, T)[:, 4:7], atol=1e-5) == same


def in_full(denoiser, step, *, steps: int, keys, prompt: Prompt):
    """The same blocks, each step of which reads the whole text."""
    z = jnp.where(prompt.mask, prompt.tokens, V)
    for b in range(L // P):
        part = slice(b * P, (b + 1) * P)

        def features(inner, t, z=z, part=part):
            return denoiser.features(z.at[:, part].set(inner), t)[:, part]

        own = denoiser._replace(features=features, accelerator=Accelerator())
        chain, _ = sample(
            own, Masking(V), step, grid=uniform(steps),
            keys=jax.vmap(jax.random.fold_in, (0, None))(keys, b),
            prompt=jax.tree.map(lambda x, part=part: x[:, part], prompt),
        )  # fmt: skip
        z = z.at[:, part].set(chain.z)
    return z


@pytest.mark.slow
@pytest.mark.parametrize(
    "shifted, depth, steps, step",
    [
        (False, 1, 3, Ancestral()), (True, 2, 1, Confidence()),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                (True, 1, 3, Confidence()), (True, 1, 3, Ancestral()), (False, 1, 3, Confidence()),
                (False, 2, 1, Ancestral()), (True, 2, 1, Ancestral()), (False, 2, 1, Confidence()),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.cases(1)
def test_samples_are_exact_where_nothing_has_changed_since(shifted, depth, steps, step):
    """With one layer, or one step for each block. Two tokens at the end are given."""
    rows = 6
    given = jnp.arange(L) >= L - 2
    prompt = Prompt(jnp.full((rows, L), 2), jnp.broadcast_to(given, (rows, L)))
    denoiser, keys = bound(depth=depth, shifted=shifted), exact.keys_for(0, rows)
    blocks = Blocks(P, L, dual_cache=True)
    found, _ = blocks(denoiser, Masking(V), step, grid=uniform(steps), keys=keys, prompt=prompt)
    expected = in_full(denoiser, step, steps=steps, keys=keys, prompt=prompt)
    assert np.array_equal(found.z, expected) and len(np.unique(found.z, axis=0)) > 1
    # A pass over the whole text before each block, which is that of its first step.
    assert np.all(found.evaluations >= L // P)
    assert np.all(found.evaluations <= L // P * steps)


def test_later_tokens_are_seen():
    """Another given end changes the first block, unlike in block diffusion."""
    given = jnp.broadcast_to(jnp.arange(L) >= L - 3, (64, L))
    found = []
    for token in (0, 4):
        prompt = Prompt(jnp.full((64, L), token), given)
        chain, _ = Blocks(P, L, dual_cache=True)(
            bound(), Masking(V), Ancestral(), grid=uniform(2), keys=exact.keys_for(0, 64),
            prompt=prompt,
        )  # fmt: skip
        found.append(chain.z[:, :P])
    assert np.any(found[0] != found[1])


@pytest.mark.slow
def test_a_sample_does_not_depend_on_the_prompts_of_its_batch():
    """Also in a text that is no multiple of the block; its last block is shorter."""
    given = np.array([0, 2, 4, 9])[:, None]
    tokens, marks = np.full((4, L - 1), 2), np.arange(L - 1) < given
    denoiser, keys = bound(shifted=True), exact.keys_for(0, 4)
    step = Confidence(rule="threshold", limit=0.3)
    blocks = Blocks(P, L, dual_cache=True, next_token=True)

    @jax.jit
    def draw(keys, tokens, marks):
        prompt = Prompt(tokens, marks)
        return blocks(denoiser, Masking(V), step, grid=uniform(P), keys=keys, prompt=prompt)[0]

    found = draw(keys, tokens, marks)
    assert (found.z < V).all() and len(np.unique(found.z, axis=0)) == 4
    for row in range(4):
        part = slice(row, row + 1)
        alone = draw(keys[part], tokens[part], marks[part])
        assert np.array_equal(alone.z[0], found.z[row])
        assert alone.evaluations[0] == found.evaluations[row]


@pytest.mark.slow
def test_a_chat_may_be_drawn_with_it(tmp_path):
    """Each token is 'a' or the end of the turn, with probability 1/2; padding is not seen."""
    folder = chat_folder(tmp_path)
    says_a_or_ends(folder)
    model = md4_jax.load(folder)
    options = dict(sampler="confidence", block=4, dual_cache=True, steps=4)
    answers = {model.chat("hi", 8, seed=seed, **options) for seed in range(6)}
    assert len(answers) > 1 and all(set(answer) <= {"a"} for answer in answers)


def test_a_dream_is_drawn_in_blocks_with_it(tmp_path):
    """With one step for each block they are those of full passes; the first one is after "ab"."""
    model = md4_jax.load(peer_folder(tmp_path, "dream"))
    options = dict(num=2, prompt="ab", length=16, block=4, steps=1, sampler="confidence")
    kept = model.sample(dual_cache=True, temperature=0.0, **options).tokens
    z = np.full((1, 16), model.domain.vocab_size)
    z[0, :2] = model.domain.encode("ab")
    for begin in range(2, 16, 4):
        here = (np.arange(16) >= begin) & (np.arange(16) < begin + 4)
        z = np.where(here, np.argmax(model.logits(z), axis=-1), z)
    assert np.array_equal(kept, np.repeat(z, 2, axis=0))


@pytest.mark.slow
def test_blocks_after_the_end_of_a_turn_are_not_drawn(tmp_path):
    """sample.stop names any entry of the vocabulary, and a chat names the end of its turns."""
    folder = chat_folder(tmp_path)
    says_a_or_ends(folder)
    model = md4_jax.load(folder)
    options = dict(num=16, length=32, block=4, steps=4, sampler="confidence")
    free, ended = (model.sample(**options, stop=stop) for stop in ("", "<|eot_id|>"))
    turn = model.domain.tokenizer.id_of("<|eot_id|>")
    for whole, cut, length in zip(free.tokens, ended.tokens, ended.lengths, strict=True):
        first = int(np.argmax(whole == turn))
        drawn = 4 * (1 + first // 4)
        assert length == 1 + first and np.array_equal(whole[:drawn], cut[:drawn])
    # Nor is a given text part of a text that ended in the block before it.
    given = dict(options, num=64, length=8, template="_" * 4 + "abab", stop="<|eot_id|>")
    found = model.sample(**given)
    early = (found.tokens[:, :4] == turn).any(axis=1)
    assert early.any() and (found.lengths[early] <= 4).all() and (found.lengths[~early] == 8).all()
    assert ended.evaluations.sum() < free.evaluations.sum() / 2
    with pytest.raises(UserError, match="sample.stop='nothing' is not an entry of the vocabulary"):
        model.sample(**options, stop="nothing")
    with pytest.raises(UserError, match=r"sample.stop='<\|mask\|>' is not an entry"):
        model.sample(**options, stop="<|mask|>")


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(dual_cache=True), "sample.dual_cache=True is only for sampling block by block"),
        (dict(dual_cache=True, block=4, memory=8), "set sample.memory=0 and sample.cached=True"),
        (dict(dual_cache=True, block=4, cached=False), "set sample.memory=0"),
    ],
)
def test_what_does_not_go_with_it(options, said, tmp_path):
    model = md4_jax.load(chat_folder(tmp_path))
    with pytest.raises(UserError, match=said):
        model.sample(num=1, **options)


def test_a_network_that_is_told_the_time_is_refused(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "md4_text"))
    with pytest.raises(UserError, match="dual_cache=True needs network.time_conditioning=False"):
        model.sample(num=1, block=4, dual_cache=True)
