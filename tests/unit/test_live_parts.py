"""Texts that are drawn part by part: their states are the frames of a whole run."""

import numpy as np
import pytest
from peer_folders import peer_folder
from playgrounds import of_blocks, of_text

import md4_jax
from md4_jax.evals.samples import drawn_samples
from md4_jax.samplers.live_parts import LiveBlocks


@pytest.fixture(scope="module")
def masked():
    return of_blocks(8)


def same_path(model, prompt: str = "", **options) -> list:
    """Asserts that the states are frames, and those in which a symbol changes; returns them."""
    asked = {"name" if key == "sampler" else key: value for key, value in options.items()}
    asked = model.sampling(asked | {"num": 1, "seed": 1, "trace": True, "prompt": prompt})
    drawn = drawn_samples(asked, model.params, {})
    length = drawn.tokens.shape[1]
    z, confidence = (x[:, :, 0].reshape(-1, length) for x in drawn.frames)
    last = len(z) - 1
    changed = {n for n in range(last + 1) if n in (0, last) or (z[n] != z[n - 1]).any()}
    seen = list(model.watch(prompt, seed=1, **options))
    steps = [state.step for state in seen]
    assert steps == sorted(set(steps)) and changed <= set(steps)
    assert {state.of for state in seen} == {last}
    np.testing.assert_array_equal([state.z for state in seen], z[steps])
    chances = [state.confidence for state in seen]
    np.testing.assert_allclose(chances, confidence[steps], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(seen[-1].z, drawn.tokens[0])
    assert seen[-1].evaluations == drawn.evaluations[0]
    for state in seen:
        np.testing.assert_array_equal(state.z[: state.settled], seen[-1].z[: state.settled])
    settled = {state.settled for state in seen}
    ends_early = "min_entropy" in options  # after the first block that is drawn
    assert {0, length} <= settled and (ends_early or len(settled) > 2)
    return seen


@pytest.mark.campaign
def test_blocks_and_steps_beyond_the_grid(masked):
    """One token a step, and 2 steps in the grid: more are shown while masks are left."""
    seen = same_path(masked, "to be, or no", length=16, sampler="confidence", per_step=1, steps=2)
    mask = masked.domain.vocab_size
    assert [state.step for state in seen] == [0, *range(9, 14), 17]
    assert [(state.z == mask).sum() for state in seen] == [4, 4, 3, 2, 1, 0, 0]


ABOUT = dict(local_width=0, time_conditioning=False)
LINEAR = dict(name="linear")
SHIFTED = dict(network=ABOUT | dict(shifted=True), block=8, name="masking")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(
    "make, options",
    [
        (lambda: of_blocks(8), dict(sampler="ancestral")),
        (lambda: of_blocks(8, "uniform"), dict(sampler="ancestral")),
        (lambda: of_blocks(8, "uniform"), dict(sampler="entropy_bound")),
        (lambda: of_blocks(8), dict(sampler="any_order", per_step=1)),
        (lambda: of_blocks(8), dict(sampler="ancestral", min_entropy=9.0, memory=8)),
        (lambda: of_blocks(8), dict(sampler="remask", label=1, guidance=2.0, cached=False)),
        (lambda: of_text(ABOUT), dict(sampler="ancestral", block=8, dual_cache=True)),
        (lambda: of_text(**SHIFTED, schedule=LINEAR), dict(sampler="ancestral", next_token=True)),
        (of_text, dict(sampler="ancestral", length=80, stride=16)),
        (of_text, dict(sampler="any_order", per_step=2, length=80, stride=16)),
        (of_text, dict(sampler="confidence", per_step=1, length=80, stride=16)),
    ],
)
def test_the_states_of_parts_are_those_of_a_whole_run(make, options):
    same_path(make(), "to be, or no", steps=4, **options)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("name, prompt", [("bd3lm", ""), ("nemotron", "abc")])
def test_the_states_of_published_models(name, prompt, tmp_path):
    """Blocks of a Nemotron-Labs-Diffusion begin where the prompt ends."""
    model = md4_jax.load(peer_folder(tmp_path, name), {"mesh.data": 1})
    assert len(same_path(model, prompt, steps=4)) > 4


@pytest.mark.campaign
def test_a_block_is_not_begun_before_its_states_are_asked_for(masked, monkeypatch):
    called, call = [], LiveBlocks._call

    def counted(self, program, *rest):
        called.append(program)
        return call(self, program, *rest)

    monkeypatch.setattr(LiveBlocks, "_call", counted)
    settings = dict(length=16, sampler="confidence", per_step=1, steps=2)
    states = masked.watch("to be", **settings)
    assert not called
    assert next(states).step == 0 and len(called) == 2  # the text is begun, and its first block
    for state in states:
        if state.step == 3:  # which draws the last token of the first block
            break
    assert len(called) == 2
    states.close()
    assert len(called) == 2
    assert len(list(masked.watch("to be", **settings))) > 9 and len(called) == 2 + 5
