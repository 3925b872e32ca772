"""The states in which the decoders of LLaDA and Dream call their networks, at temperature 0."""

import functools
import json

import numpy as np
import pytest
from peer_folders import INSTANCES, LETTERS, peer_folder

import md4_jax
from md4_jax.protocols import Prompt, UserError
from md4_jax.samplers.loop import sample
from tests import exact

TOLD = json.loads((INSTANCES / "llada_dream_samples.json").read_text())
SCORES = {"entropy": "entropy", "topk_margin": "margin", "maskgit_plus": "probability"}
PROMPT, LENGTH = 6, 16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    return functools.cache(lambda name: md4_jax.load(peer_folder(folder, name)))


def states(model, told: dict, **options) -> list[list[int]]:
    """The text before the first step and after each step that changes it."""
    asked = dict(name="confidence", temperature=0.0, grid="uniform", length=LENGTH)
    experiment = model.sampling(asked | options)
    tokens, given = np.zeros((1, LENGTH), np.int32), np.arange(LENGTH)[None] < PROMPT
    tokens[0, :PROMPT] = told["prompt"]
    _, frames = sample(
        experiment.network.denoiser(model.params), experiment.process, experiment.sampler_step,
        grid=experiment.grid, keys=exact.keys_for(0, 1), prompt=Prompt(tokens, given), trace=1,
    )  # fmt: skip
    return changes(np.asarray(frames.z)[:, 0].tolist())


def changes(states: list) -> list:
    return [z for n, z in enumerate(states) if n == 0 or z != states[n - 1]]


@pytest.mark.parametrize("number", range(len(TOLD["llada"])))
def test_llada_reveals_the_same_tokens_in_each_step(number, models):
    """Steps that do not divide the masks, blocks, and ends of texts that come last or never."""
    model, told = models("llada"), TOLD["llada"][number]
    ends = " ".join(LETTERS[symbol] for symbol in sorted(set(told["ends"])))
    options = {"exclude": ends, "tempered": True} if told["excluded"] else {"late": ends}
    block = told["block"] if told["block"] < LENGTH - PROMPT else 0
    found = states(
        model, told, split="even", steps=told["steps"], semi_autoregressive=block, **options
    )
    assert found == changes(told["states"])


@pytest.mark.parametrize("number", range(len(TOLD["llada"])))
def test_random_order_reveals_as_many_in_each_step(number, models):
    """LLaDA's numbers do not depend on which tokens it reveals."""
    model, told = models("llada"), TOLD["llada"][number]
    block = told["block"] if told["block"] < LENGTH - PROMPT else 0
    options = dict(name="any_order", per_step=0, split="even", steps=told["steps"])
    found = states(model, told, semi_autoregressive=block, **options)
    mask = model.experiment.process.mask_id
    numbers = [[z.count(mask) for z in each] for each in (found, changes(told["states"]))]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("number", range(len(TOLD["dream"])))
def test_dream_reveals_the_same_tokens_in_each_step(number, models):
    """Its first steps may reveal none; entropies are those after top-k and top-p."""
    model, told = models("dream"), TOLD["dream"][number]
    options = {key: told[key] for key in ("top_p", "top_k") if key in told}
    options |= dict(split="floor", tempered=True, score=SCORES[told["alg"]], steps=told["steps"])
    assert states(model, told, **options) == changes(told["states"])


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(split="odd"), "sample.split must be one of grid, even, floor"),
        (dict(split="even", grid="cosine"), "split='even' counts the steps of .*, not of 'cosine'"),
        (dict(split="even", per_step=2), "split='even' is only for sample.rule='count' with"),
        (dict(split="floor", semi_autoregressive=4), "split='floor' has no blocks"),
        (dict(split="floor", name="any_order"), "sample.split must be one of grid, even, not"),
        (dict(split="even", name="any_order"), "split='even' is only for sample.per_step=0, not 1"),
        (
            dict(split="even", name="any_order", per_step=0, grid="cosine"),
            "split='even' counts the steps of .*, not of 'cosine'",
        ),
        (dict(late="0", name="ancestral"), "sample.late='0' needs sample.name=confidence"),
        (dict(late="nothing"), "sample.late='nothing' is not an entry of the vocabulary"),
    ],
)
def test_impossible_options_are_refused(options, words, models):
    with pytest.raises(UserError, match=words):
        models("llada").sampling(dict(name="confidence", grid="uniform") | options)
