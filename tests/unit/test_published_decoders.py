"""States in which decoders of LLaDA, Dream, CoDA and Fast-dLLM call networks, at temperature 0."""

import functools
import json

import numpy as np
import pytest
from peer_folders import INSTANCES, LETTERS, peer_folder

import md4_jax
from md4_jax.protocols import Prompt, UserError
from md4_jax.samplers.paths import Parts, whole
from tests import exact

TOLD = json.loads((INSTANCES / "llada_dream_samples.json").read_text())
CODA = json.loads((INSTANCES / "coda.json").read_text())["samples"]
FAST = json.loads((INSTANCES / "fast_dllm_samples.json").read_text())
SCORES = {"entropy": "entropy", "topk_margin": "margin", "maskgit_plus": "probability"}
PROMPT, LENGTH = 6, 16
DRAWN = 16  # tokens after the prompts of Fast-dLLM


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    return functools.cache(lambda name: md4_jax.load(peer_folder(folder, name)))


def states(model, told: dict, **options) -> list[list[int]]:
    """The text before the first step and after each step that changes it."""
    return drawn(model, [told], **options)[0][0]


def drawn(model, told: list[dict], **options) -> list[tuple[list[list[int]], int]]:
    """These states of each text of a batch, and its number of network evaluations."""
    length, rows = max(len(each["states"][0]) for each in told), len(told)
    asked = dict(name="confidence", temperature=0.0, grid="uniform", length=length)
    experiment = model.sampling(asked | options)
    tokens, given = np.zeros((rows, length), np.int32), np.ones((rows, length), bool)
    segments = np.full((rows, length), -1)  # of padding
    for row, each in enumerate(told):
        begin, end = len(each["prompt"]), len(each["states"][0])
        tokens[row, :begin], given[row, begin:end], segments[row, :end] = each["prompt"], False, 0
    context = {} if (segments == 0).all() else {"segments": segments}
    denoiser, scale = experiment.network.denoiser(model.params, context), told[0].get("scale", 1)
    chain, frames = experiment.loop(
        denoiser._replace(unembed=lambda h: scale * denoiser.unembed(h)),
        experiment.process, experiment.sampler_step,
        grid=experiment.grid, keys=exact.keys_for(0, rows), prompt=Prompt(tokens, given),
        trace=rows,
    )  # fmt: skip
    z = np.asarray(whole(frames)[0] if isinstance(frames, Parts) else frames.z)
    return [
        (changes(z[:, row, : len(each["states"][0])].tolist()), int(chain.evaluations[row]))
        for row, each in enumerate(told)
    ]


def changes(states: list) -> list:
    return [z for n, z in enumerate(states) if n == 0 or z != states[n - 1]]


@pytest.mark.parametrize("number", range(len(TOLD["llada"])))
@pytest.mark.cases(3)
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
@pytest.mark.cases(2)
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
@pytest.mark.cases(3)
def test_dream_reveals_the_same_tokens_in_each_step(number, models):
    """Its first steps may reveal none; entropies are those after top-k and top-p."""
    told = TOLD["dream"][number]
    assert states(models("dream"), told, **dream_s(told)) == changes(told["states"])


@pytest.mark.parametrize("number", range(len(CODA)))
@pytest.mark.cases(2)
def test_coda_reveals_the_same_tokens_in_each_step(number, models):
    """By the rules of Dream, which it was made of."""
    told = CODA[number]
    assert states(models("coda"), told, **dream_s(told)) == changes(told["states"])


def dream_s(told: dict) -> dict:
    """Keys that reproduce a run of Dream's decoder."""
    options = {key: told[key] for key in ("top_p", "top_k") if key in told}
    score = SCORES[told["alg"]]
    return options | dict(split="floor", tempered=True, score=score, steps=told["steps"])


def rule_of(told: dict) -> dict:
    """Keys of a run of Fast-dLLM; its steps are those of all blocks together."""
    for rule in ("threshold", "factor"):
        if rule in told:
            return dict(rule=rule, limit=told[rule], steps=DRAWN)
    return dict(split="even", steps=told["steps"])


def batches(told: list[dict]) -> list:
    """Runs that differ only in their prompts, whose lengths may differ, in one batch.

    Those of few prompts are for campaigns.
    """
    found = {}
    for each in told:
        key = {k: v for k, v in each.items() if k not in ("prompt", "states", "evaluations")}
        if each.get("cache") == "none":  # without blocks of their own, one by one
            key["prompt"] = each["prompt"]
        found.setdefault(json.dumps(key), []).append(each)
    few = pytest.mark.campaign
    return [pytest.param(runs, marks=() if len(runs) > 2 else few) for runs in found.values()]


@pytest.mark.parametrize("told", batches(FAST["llada"]))
def test_fast_dllm_reveals_the_same_tokens_of_llada_in_each_step(told, models):
    """Without a cache and with the dual one, in as many network evaluations."""
    options, block = rule_of(told[0]), told[0]["block"]
    if told[0]["cache"] == "dual":
        steps = options["steps"] * block // DRAWN
        options |= dict(block=block, dual_cache=True, steps=steps)
    else:
        options |= dict(semi_autoregressive=block)
    found = drawn(models("llada"), told, **options)
    assert found == [(changes(each["states"]), each["evaluations"]) for each in told]


@pytest.mark.parametrize("told", batches(FAST["dream"]))
def test_fast_dllm_reveals_the_same_tokens_of_dream_in_each_step(told, models):
    """The first token of a block is that of the pass over the whole text, whatever it is."""
    options = rule_of(told[0]) | dict(block=told[0]["block"], steps=told[0]["block"])
    found = drawn(models("dream"), told, dual_cache=True, next_token=True, **options)
    assert found == [(changes(each["states"]), each["evaluations"]) for each in told]


@pytest.mark.slow
def test_fast_dllm_draws_the_first_token_of_dream(models):
    """With its probabilities after temperature and top-p; the last block may be one token."""
    (told,), rows, model = FAST["first"], 2000, models("dream")
    begin = len(told["prompt"])
    options = {key: told[key] for key in ("block", "temperature", "top_p")}
    experiment = model.sampling(
        options | dict(name="confidence", length=begin + 1, dual_cache=True, next_token=True)
    )
    denoiser = experiment.network.denoiser(model.params)
    prompt = Prompt(
        np.tile(np.array([*told["prompt"], 0], np.int32), (rows, 1)),
        np.tile(np.arange(begin + 1) < begin, (rows, 1)),
    )
    chain, _ = experiment.loop(
        denoiser._replace(unembed=lambda h: told["scale"] * denoiser.unembed(h)),
        experiment.process, experiment.sampler_step,
        grid=experiment.grid, keys=exact.keys_for(0, rows), prompt=prompt,
    )  # fmt: skip
    expected = np.array(told["probabilities"])
    share = np.bincount(np.asarray(chain.z[:, -1]), minlength=len(expected)) / rows
    assert (share[expected == 0] == 0).all() and (chain.evaluations == 1).all()
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / rows)).all()


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
