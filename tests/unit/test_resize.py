"""Gaps that get longer and shorter: DreamOn's process and sampler, and how it is loaded."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import INSTANCES, peer_folder
from safetensors.numpy import load_file, save_file
from tiny_networks import built

import md4_jax
from md4_jax.evals.samples import drawn_samples
from md4_jax.processes.resizing import Resizing
from md4_jax.protocols import Denoiser, Prompt, UserError
from md4_jax.samplers import loop
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.resize import Memory, Resize, resized
from md4_jax.samplers.transforms import Transform

RECORDED = json.loads((INSTANCES / "dreamon.json").read_text())
# Of the vocabulary of the tiny Dream: mask, expansion, and end of a text, which is the deletion.
MASK, EXPAND, END = 123, 124, 120
LENGTH = 32
V, ABSENT = 124, 125  # symbols without the mask, and what is behind a text


def inward(ids) -> np.ndarray:
    """The model's symbols for entries of the vocabulary."""
    return np.array([V if i == MASK else i - (i > MASK) for i in ids], np.int32)


def prompt_of(ids, length: int = LENGTH) -> Prompt:
    """A text with masks at the beginning of a canvas."""
    tokens = np.full(length, ABSENT, np.int32)
    tokens[: len(ids)] = inward(ids)
    return Prompt(np.where(tokens == V, 0, tokens), tokens != V)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny Dream, whose head is sure of expansions and deletions."""
    found = peer_folder(tmp_path_factory.mktemp("dreamon"), "dream", expand_token_id=EXPAND)
    arrays = {name: x.copy() for name, x in load_file(found / "model.safetensors").items()}
    for row, factor in RECORDED["factors"].items():
        arrays["lm_head.weight"][int(row)] *= np.float32(factor)
    save_file(arrays, found / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def model(folder):
    return md4_jax.load(folder)


@pytest.fixture(scope="module")
def filled(model):
    """A compiled function of a sampler and a prompt, which gives the chain without masks."""
    network, params = model.experiment.network, model.params

    @jax.jit
    def run(params, step, tokens, given, seed):
        denoiser, process = network.denoiser(params), params["process"]
        keys = jax.random.split(jax.random.key(seed), len(tokens))
        chain = loop.start(process, step, Prompt(tokens, given), keys)
        chain = loop.with_memory(denoiser, process, step, chain)
        return step.finish(denoiser, process, chain, keys)

    def call(step, prompts, seed=0):
        tokens, given = (np.stack(x) for x in zip(*prompts, strict=True))
        chain = run(params, step, tokens, given, seed)
        return [row[row != ABSENT] for row in np.asarray(chain.z)], np.asarray(chain.evaluations)

    return call


def step_of(case: dict, **more) -> Resize:
    keys = ("grow", "expansions", "score", "delete_rest")
    transform = Transform(temperature=0.0, top_p=case["top_p"])
    return Resize(**{key: case[key] for key in keys}, transform=transform, **more)


KINDS = [("entropy", False), ("entropy", True), ("margin", False)]
KINDS += [pytest.param("probability", True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("score", "rest"), KINDS)
@pytest.mark.cases(2)
def test_texts_are_those_of_dreamons_own_code(score, rest, filled):
    """And it takes as many network evaluations."""
    asked = (score, rest)
    cases = [c for c in RECORDED["cases"] if (c["score"], c["delete_rest"]) == asked]
    assert len(cases) >= 2
    for case in cases:
        texts, calls = filled(step_of(case), [prompt_of(case["prompt"])])
        np.testing.assert_array_equal(texts[0], inward(case["answer"]))
        assert calls[0] == case["calls"]


def test_recorded_texts_get_longer_and_shorter():
    longer = [c["calls"] > c["prompt"].count(MASK) for c in RECORDED["cases"]]
    shorter = [len(c["answer"]) < len(c["prompt"]) for c in RECORDED["cases"]]
    assert sum(longer) >= 5 and sum(shorter) >= 5


def test_a_sample_does_not_depend_on_its_batch_nor_on_the_room_behind_it(filled):
    case = RECORDED["cases"][12]
    others = [RECORDED["cases"][n]["prompt"] for n in (0, 9)]
    alone, _ = filled(step_of(case), [prompt_of(case["prompt"])])
    among, _ = filled(step_of(case), [prompt_of(ids) for ids in (*others, case["prompt"])])
    np.testing.assert_array_equal(among[2], alone[0])
    longer, _ = filled(step_of(case), [prompt_of(case["prompt"], LENGTH + 7)])
    np.testing.assert_array_equal(longer[0], alone[0])


def table(logits) -> Denoiser:
    """A denoiser with these logits [V] at every position, whatever the text."""
    values = jnp.asarray(logits, jnp.float32)
    found = Denoiser(lambda z, t: jnp.broadcast_to(values, (*z.shape, len(logits))), lambda h: h)
    return found._replace(within=lambda segments: found)


def grown(step: Resize, logits, tokens, given, seeds: int = 1) -> np.ndarray:
    """Texts of a vocabulary of four: a letter 0, another 1, the expansion 2 and the deletion 3."""
    process, denoiser = Resizing(4), table(logits)
    keys = jax.random.split(jax.random.key(0), seeds)
    prompt = Prompt(np.tile(tokens, (seeds, 1)), np.tile(given, (seeds, 1)))

    @jax.jit
    def run(step, keys):
        return loop.sample(
            denoiser, process, step, grid=np.float32([0, 1]), keys=keys, prompt=prompt
        )

    return np.asarray(run(step, keys)[0].z)


@pytest.mark.slow
def test_a_traced_sample_is_the_untraced_one_however_many_steps_it_takes():
    """Also where texts take more steps than a path has frames: of 4 tokens, more than 20."""
    step = Resize(grow=3, expansions=200)
    process, denoiser = Resizing(4), table(np.log([0.01, 0.01, 0.7, 0.28]))
    tokens, given = (np.tile(x, (16, 1)) for x in canvas("____", 4))
    keys = jax.random.split(jax.random.key(1), 16)

    @partial(jax.jit, static_argnames="trace")
    def run(step, trace):
        return loop.sample(
            denoiser, process, step, grid=np.float32([0, 0.5, 1]), keys=keys,
            prompt=Prompt(tokens, given), trace=trace,
        )  # fmt: skip

    (plain, _), (traced, frames) = run(step, 0), run(step, 16)
    assert np.sum(plain.evaluations > 25) >= 8 and len(np.unique(plain.z, axis=0)) > 4
    np.testing.assert_array_equal(traced.z, plain.z)
    np.testing.assert_array_equal(traced.evaluations, plain.evaluations)
    np.testing.assert_array_equal(frames.z[-1], plain.z)


def canvas(text: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and which are given, of a text of 0, 1 and _."""
    tokens = np.full(length, 5, np.int32)
    tokens[: len(text)] = [0 if c == "_" else int(c) for c in text]
    given = np.ones(length, bool)
    given[: len(text)] = [c != "_" for c in text]
    return tokens, given


def test_lengths_follow_the_law_of_a_branching_walk():
    """Of masks that expand with probability p, or else are deleted with q, until none is left.

    One mask with room for two more: enumerated by hand from the tree of draws.
    """
    p, q = 0.3, 0.2
    logits = np.log([1 - p - q, 1e-12, p, q])
    n = 6_000
    step = Resize(grow=2, expansions=2, transform=Transform())
    z = grown(step, logits, *canvas("1_1", 6), seeds=n)
    lengths = np.sum(z != 5, axis=1) - 2
    law = walk_law(1, 3, 2, p, q, 0)
    for length in range(4):
        share, expected = np.mean(lengths == length), law.get(length, 0.0)
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / n) + 1e-9
    assert (z[np.arange(n), lengths + 1] == 1).all() and (z[:, 0] == 1).all()


def walk_law(masks: int, room: int, left: int, p: float, q: float, drawn: int) -> dict:
    """P(number of tokens in the gap), by recursion over what is drawn in the place of a mask."""
    if not masks:
        return {drawn: 1.0}
    expands = p if masks + drawn < room and left else 0.0
    rest = 1.0 if expands else 1.0 / (1.0 - p)  # what cannot be drawn is no part of the law
    found: dict = {}
    for chance, after in (
        (expands, (masks + 1, left - 1, drawn)),
        (q * rest, (masks - 1, left, drawn)),
        ((1 - p - q) * rest, (masks - 1, left, drawn + 1)),
    ):
        if chance:
            for length, share in walk_law(after[0], room, after[1], p, q, after[2]).items():
                found[length] = found.get(length, 0.0) + chance * share
    return found


def test_the_room_and_the_expansions_of_a_text():
    """By hand, of 1__1 and of a text of one mask, on 8 positions."""
    tokens, given = (np.stack(x) for x in zip(canvas("1__1", 8), canvas("_", 8), strict=True))
    chain = loop.start(
        Resizing(4), Resize(), Prompt(tokens, given), jax.random.split(jax.random.key(0))
    )
    found = Resize(grow=3).begin(table(np.zeros(4)), Resizing(4), chain)
    np.testing.assert_array_equal(found.most, [7, 4])
    np.testing.assert_array_equal(found.left, [2 * 6, 2 * 4])
    np.testing.assert_array_equal(found.given, given)
    wide = Resize(grow=9, expansions=5).begin(table(np.zeros(4)), Resizing(4), chain)
    np.testing.assert_array_equal(wide.most, [8, 8])
    np.testing.assert_array_equal(wide.left, [5, 5])


def test_several_at_once():
    """Expansions that have no room stay masks, those on the left first, and gaps stay apart."""
    process, given = Resizing(4), np.array([[1, 0, 0, 1, 0, 0, 0, 0]], bool)
    z = np.array([[1, 2, 2, 0, 2, 3, 5, 5]])
    memory = Memory(given, jnp.array([7]), jnp.array([9]))
    chain = Chain(z, given * False, np.ones(z.shape, np.float32), np.zeros(1), memory=memory)
    found = resized(process, chain, z == 2, z == 3)
    # 5 tokens stay, and there is room for 7: two of three expansions.
    np.testing.assert_array_equal(found.z, [[1, 4, 4, 4, 4, 0, 4, 5]])
    np.testing.assert_array_equal(found.memory.given, [[1, 0, 0, 0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(found.memory.left, [7])
    np.testing.assert_array_equal(found.confidence[0], [1, 0, 0, 0, 0, 1, 0, 1])
    few = resized(
        process, chain._replace(memory=memory._replace(left=jnp.array([1]))), z == 2, z == 3
    )
    np.testing.assert_array_equal(few.z, [[1, 4, 4, 4, 0, 4, 5, 5]])


def test_the_rest_of_a_gap_is_deleted_and_of_no_other():
    """Each of two gaps of three masks ends with its first deletion."""
    logits = np.log([1e-9, 1e-12, 1e-12, 1.0])
    step = Resize(grow=0, delete_rest=True, transform=Transform())
    z = grown(step, logits, *canvas("1___0___1", 9))
    np.testing.assert_array_equal(z[0][:3], [1, 0, 1])
    once = Resize(grow=0, delete_rest=True)
    drawn = np.array([[0, 0, 1, 0, 0, 0, 0, 0]], bool)
    masks = np.array([[0, 1, 1, 1, 0, 1, 1, 0]], bool)
    given = np.array([[1, 0, 0, 0, 1, 0, 0, 1]], bool)
    found = once._deleted(jnp.asarray(drawn), masks, given)
    np.testing.assert_array_equal(found, [[0, 0, 1, 1, 0, 0, 0, 0]])


def test_padding_is_not_seen():
    """Of a network with weights, whose features at a text are those without what is behind it."""
    network, params = built(time_conditioning=False)
    z = jnp.array([[0, 5, 2, 3, 1, 1]])
    seen = network.bind(params).within(jnp.array([[0, 0, 0, 0, -1, -1]]))
    plain = network.bind(params)(z[:, :4], jnp.zeros(1))
    np.testing.assert_allclose(seen(z, jnp.zeros(1))[:, :4], plain, rtol=1e-4, atol=1e-5)
    other = network.bind(params)(z, jnp.zeros(1))[:, :4]
    assert np.abs(other - plain).max() > 1e-3
    assert network.hides and not built(gaps=True)[0].hides
    causal, own = built(causal=True)
    assert not causal.hides and causal.bind(own).within is None


def test_dreamon_is_loaded_and_goes_back(folder, model, tmp_path):
    process = model.experiment.process
    assert (process.expand_id, process.delete_id, process.mask_id) == (V - 1, END, V)
    assert model.samplers() == ["resize"] and model.domain.vocab_size == V
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    exported = model.export(tmp_path / "back")
    assert json.loads((exported / "config.json").read_text())["expand_token_id"] == EXPAND
    held, kept = (load_file(f / "model.safetensors") for f in (folder, exported))
    rows = slice(0, EXPAND + 1)
    np.testing.assert_array_equal(
        np.delete(held["lm_head.weight"][rows], MASK, 0),
        np.delete(kept["lm_head.weight"][rows], MASK, 0),
    )
    again = md4_jax.load(exported)
    assert again.experiment.process == process


def test_infill_changes_the_length_of_gaps(model):
    """The text comes with its given parts, and without what is behind it."""
    found = model.infill("ab____cd", num=4, grow=3)
    assert all(text.startswith("ab") and text.endswith("cd") for text in found.texts)
    assert set(found.lengths) - {8} and max(found.lengths) <= 11
    again = model.infill("ab____cd", num=4, grow=3, seed=0)
    assert again.texts[0] == found.texts[0]


def test_prompt_and_suffix_have_masks_between_them(model):
    options = dict(prompt="ab", suffix="cd", masks=3, grow=0, length=16, num=4)
    found = drawn_samples(model.sampling(options), model.params, model.programs)
    for row, length in zip(found.tokens, found.lengths, strict=True):
        assert length <= 7
        np.testing.assert_array_equal(row[:2], [0, 1])
        np.testing.assert_array_equal(row[length - 2 : length], [2, 3])
    # Only what is before the gap has a place of its own.
    assert found.prompt_mask.sum(axis=1).tolist() == [2] * 4


@pytest.mark.campaign
def test_states_can_be_watched(model):
    frames = list(model.watch("ab", length=12, grow=3, steps=4, temperature=0.0))
    assert (frames[0].z == V).sum() == 4
    assert not (frames[-1].z == V).any()
    direct = model.sample(prompt="ab", length=12, grow=3, steps=4, temperature=0.0, num=1)
    np.testing.assert_array_equal(frames[-1].z, direct.tokens[0])


@pytest.mark.campaign
def test_the_last_state_is_the_sample_also_after_more_steps_than_are_shown(model, monkeypatch):
    """Of two steps of the grid and one further step, for six masks."""
    options = dict(length=16, grow=6, masks=6, steps=2, temperature=1.0)
    direct = model.sample(prompt="ab", num=1, **options)
    assert direct.evaluations[0] > 5
    monkeypatch.setattr(Resize, "rounds", lambda self, length, steps: steps + 1)
    np.testing.assert_array_equal([*model.watch("ab", **options)][-1].z, direct.tokens[0])


@pytest.mark.campaign
def test_a_path_shows_each_step_also_beyond_the_grid(model):
    """With a grid of two steps: one mask more or less at a time, as when it is watched."""
    options = dict(length=12, grow=3, steps=2, per_step=1)
    asked = model.sampling(options | dict(prompt="ab", num=1, trace=True))
    z = drawn_samples(asked, model.params, {}).frames[0][0, :, 0]
    masks = (z == V).sum(axis=1)
    assert masks[0] == 4 and masks[-1] == 0 and np.abs(np.diff(masks)).max() == 1
    seen = list(model.watch("ab", **options))
    assert [state.of for state in seen] == [len(z) - 1] * len(seen) and len(seen) >= 6
    np.testing.assert_array_equal([state.z for state in seen], z[[state.step for state in seen]])
    assert (np.diff(z[seen[-2].step :], axis=0) == 0).all()  # nothing changes after the last mask


REFUSED = [
    ({"sampler": "confidence"}, "needs sample.name='resize'"),
    ({"template": "abc"}, "the text has no gap"),
    ({"prompt": "ab", "stop": "end_of_text"}, "sample.stop='end_of_text' cannot be used with"),
    ({"reward": {"name": "pattern", "pattern": "a"}}, "rewards need texts of a fixed length"),
    ({"block": 2}, "sample.block=2 cannot be used with sample.name='resize'"),
    ({"grow": -1}, "sample.grow must be at least 0, not -1"),
    ({"score": "size"}, "sample.score must be one of"),
    ({"prompt": "abcdefghi", "length": 10, "masks": 4}, r"have 9 \+ 0 tokens \+ 4 masks"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_fit_is_refused(options, message, model):
    with pytest.raises(UserError, match=message):
        model.sample(**options)


def test_chats_are_refused(model):
    from md4_jax.model import answers

    with pytest.raises(UserError, match="can only be used with infill"):
        answers.drawn(model, [np.array([1])], 2, {})
    from md4_jax.server.actions import Playground

    with pytest.raises(UserError, match="which the page does not support"):
        Playground(model, "texts")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (dict(expand_token_id=MASK), "other than the mask 123"),
        (dict(expand_token_id=500), "must be one of the 128 ids"),
        (dict(expand_token_id=EXPAND, eos_token_id=None), "lacks eos_token_id"),
    ],
)
def test_config_json_must_name_an_entry(told, message, tmp_path):
    with pytest.raises(UserError, match=message):
        md4_jax.load(peer_folder(tmp_path, "dream", **told))


def test_the_tokenizer_may_tell_the_expansion(tmp_path):
    """If config.json does not, an entry of that name is it."""
    folder = peer_folder(tmp_path, "dream")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|special_2|>", "<|expand|>"))
    model = md4_jax.load(folder)
    assert isinstance(model.experiment.process, Resizing) and model.experiment.process.expand == 122


def test_symbols_of_the_process_are_two_of_the_vocabulary():
    made = Resizing(5)
    assert (made.expand_id, made.delete_id, made.mask_id, made.absent_id) == (3, 4, 5, 6)
    np.testing.assert_array_equal(made.is_noise(np.arange(7)), [0, 0, 0, 0, 0, 1, 1])
    for options, message in (
        (dict(expand=5), "process.expand=5 must be the id of one of the 5 symbols"),
        (dict(expand=4), "are the same symbol"),
    ):
        with pytest.raises(UserError, match=message):
            Resizing(5, **options)
