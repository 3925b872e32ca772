"""Halton-MaskGIT: its network, file and sampler against recorded answers of its own code."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_saved
from autoencoder_folders import PUBLISHED, llamagen, write
from safetensors.numpy import load_file

import md4_jax
from md4_jax.networks import NETWORKS
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, UserError
from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import Tensors
from md4_jax.samplers import reveal
from md4_jax.samplers.chain import NEVER, Chain, RevealSchedule
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.halton import Halton, halton_order, shares
from md4_jax.samplers.transforms import Transform

TOLD = json.loads((PUBLISHED / "maskgit.json").read_text())
SHAPE = (4, 4, 1)
ORDER = json.loads((PUBLISHED / "halton_order.json").read_text())


def folder(where, **changes):
    """Writes a folder with the published files: the model, its tokenizer, and the head count."""
    where.mkdir()
    arrays = {"module." + n: x for n, x in load_file(PUBLISHED / "maskgit.safetensors").items()}
    content = {"iter": 3, "model_state_dict": arrays | changes, "optimizer_state_dict": None}
    torch_saved.write(where / "ImageNet.pth", content)
    llamagen(where / "vq_ds16_c2i.pt")
    (where / "config.json").write_text(json.dumps(TOLD["config"]))
    return where


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return md4_jax.load(folder(tmp_path_factory.mktemp("maskgit") / "a") / "ImageNet.pth")


def logits(model, labels):
    context = {} if labels is None else {"label": np.array(labels)}
    return model.logits(np.array(TOLD["tokens"])[: 2 if labels is None else 4], 0.5, context)


def test_logits_are_those_of_its_code(loaded):
    np.testing.assert_allclose(logits(loaded, TOLD["labels"]), TOLD["outputs"], atol=3e-5)
    np.testing.assert_allclose(logits(loaded, None), TOLD["no_label"], atol=3e-5)
    # The last label is that of no class.
    assert TOLD["labels"][3] == loaded.config["network"]["classes"] == 5


def test_an_export_has_the_arrays_of_the_file(loaded, tmp_path):
    out = loaded.export(tmp_path / "out")
    old, new = Tensors(place(loaded.origin).parent, "ImageNet.pth"), Tensors(place(out))
    assert set(old) == set(new) and len(old) == 32
    for name in old:
        np.testing.assert_array_equal(old[name], new[name], name)
    shutil.copy(place(loaded.origin).parent / "config.json", out / "config.json")
    again = md4_jax.load(out)
    assert again.domain.sha256 == loaded.domain.sha256
    np.testing.assert_array_equal(logits(again, TOLD["labels"]), logits(loaded, TOLD["labels"]))


def test_samples_are_images_and_follow_the_guidance(loaded, tmp_path):
    found = loaded.sample(num=3, label=3, guidance=1.5, steps=4)
    assert np.shape(found.texts) == (3, 8, 8, 3) and found.texts[0].dtype == np.uint8
    assert found.evaluations.tolist() == [8, 8, 8]
    np.testing.assert_array_equal(loaded.domain.decode_rows(found.tokens), found.texts)
    watched = list(loaded.watch(label=3, guidance=1.5, steps=4))
    np.testing.assert_array_equal(watched[-1].z, found.tokens[0])
    saved = md4_jax.load(loaded.save(tmp_path / "saved"))
    again = saved.sample(num=3, label=3, guidance=1.5, steps=4)
    np.testing.assert_array_equal(again.tokens, found.tokens)


def test_guidance_is_that_of_its_sampler(loaded):
    # (1 + w) of the class - w of none; then the most likely code is drawn.
    found = loaded.sample(num=1, label=3, guidance=3.0, steps=1, temperature=0.0)
    z = np.full((1, 16), 40)
    told, free = (loaded.logits(z, 1.0, {"label": np.array([y])}) for y in (3, 5))
    np.testing.assert_array_equal(found.tokens, np.argmax(3 * told - 2 * free, axis=-1))


@pytest.mark.parametrize(
    ("changes", "config", "said"),
    [
        ({"in_proj.weight": np.zeros((2, 2), np.float32)}, TOLD["config"], "joins codes"),
        ({}, {}, "config.json lacks n_heads"),
        ({}, {"n_heads": 4}, "has 30 features of all heads and 16 positions, which do not fit 4"),
    ],
)
def test_other_models_are_refused(changes, config, said, tmp_path):
    where = folder(tmp_path / "a", **changes)
    (where / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        md4_jax.load(where / "ImageNet.pth")


def test_another_autoencoder_is_refused(tmp_path):
    where, other = folder(tmp_path / "a"), write("vqgan_amused", tmp_path / "b")
    with pytest.raises(UserError, match=r"has \d+ codes, but the model in .* has 40: give the aut"):
        md4_jax.load(where / "ImageNet.pth", {"data.autoencoder": str(other)})


def test_keys_that_its_network_lacks_are_refused():
    with pytest.raises(UserError, match="network.name='maskgit' needs network.causal=False"):
        NETWORKS["maskgit"](vocab_size=8, size=16, heads=2, causal=True)


@pytest.mark.parametrize("side", [4, 5, 16, 24])
def test_the_order_is_that_of_its_sampler(side):
    np.testing.assert_array_equal(halton_order(side, side), ORDER["orders"][str(side)])


def chain(rows, length, prompt=0):
    mask = jnp.broadcast_to(jnp.arange(length) < prompt, (rows, length))
    z = jnp.where(mask, 1, 3)
    return Chain(z, mask, jnp.zeros(z.shape), jnp.zeros(rows, jnp.int32))


def steps_of(step, side, steps, rows=1, prompt=0):
    keys = jax.random.split(jax.random.key(0), rows)
    grid = uniform(steps)
    draw = jax.jit(lambda: step.schedule(Masking(3), chain(rows, side**2, prompt), grid, keys))
    return jax.tree.map(np.asarray, draw())


@pytest.mark.parametrize("name", ORDER["counts"])
@pytest.mark.cases(4)
def test_as_many_are_drawn_in_each_step_as_by_its_sampler(name):
    side, steps = map(int, name.split())
    found = steps_of(Halton((side, side, 1)), side, steps).round[0]
    np.testing.assert_array_equal(
        np.bincount(found[found < NEVER], minlength=steps), ORDER["counts"][name]
    )
    if name == "16 8":
        np.testing.assert_array_equal(found, ORDER["steps_16_8"])


@pytest.mark.parametrize("of", [shares, jax.jit(shares)])
def test_a_third_is_rounded_down_however_it_is_computed(of):
    # (2 / pi) arcsin(1 / 2) = 1 / 3: its sampler has drawn 191 of 576 after half of the steps.
    for steps in (2, 12, 32, 64):
        drawn = np.cumsum(ORDER["counts"].get(f"24 {steps}", [191, 385]))[steps // 2 - 1]
        assert drawn == 191 == np.floor(np.float32(576) * of(uniform(steps))[steps // 2 - 1])


def test_a_randomised_order_is_a_rolled_one():
    plain = steps_of(Halton(SHAPE), 4, 16).round[0]
    place_of, step_of = np.argsort(halton_order(4, 4)), np.sort(plain)
    rolled = [tuple(step_of[(place_of + start) % 16]) for start in range(16)]
    # torch.roll by 5, as its sampler does.
    recorded = [4 * row + column for row, column in ORDER["rolled"]["4 5"]]
    np.testing.assert_array_equal(np.argsort(recorded), (place_of + 5) % 16)
    found = {tuple(row) for row in steps_of(Halton(SHAPE, randomised=True), 4, 16, rows=40).round}
    assert found <= set(rolled) and len(found) > 8


def test_a_prompt_is_left_out_and_all_masks_are_drawn():
    found = steps_of(Halton(SHAPE, randomised=True), 4, 5, rows=3, prompt=6).round
    assert np.all(found[:, :6] == NEVER) and np.all(found[:, 6:] < 5)


def test_logits_are_sharpened_as_by_its_sampler():
    # torch.linspace(1, 1.2, 5), by which its sampler multiplies logits.
    found = steps_of(Halton(SHAPE, sharpened=1.2), 4, 5)
    np.testing.assert_allclose(found.factor, np.array([1, 1.05, 1.1, 1.15, 1.2])[found.round])
    # Squared by temp_pow=2, and halved in temp_warmup=2 steps.
    warm = steps_of(Halton(SHAPE, sharpened=1.2, sharpened_power=2.0, warmup_steps=2), 4, 5)
    factors = np.array([0.5, 0.55125, 1.21, 1.3225, 1.44])
    np.testing.assert_allclose(warm.factor, factors[found.round], rtol=1e-6)
    np.testing.assert_array_equal(warm.round, found.round)
    drawn = {}

    def transform(x):
        jax.debug.callback(lambda x: drawn.update({round(float(x[0, 0, 0]), 4): None}), x)
        return Transform(temperature=0.0)(x)

    ones = Denoiser(lambda z, t: jnp.ones((*z.shape, 3)), lambda h: h)
    reveal.run(
        ones, transform, chain(1, 16), RevealSchedule(*found),
        keys=jax.random.split(jax.random.key(0), 1), capacity=16,
    )  # fmt: skip
    jax.effects_barrier()
    assert sorted(drawn) == [1.0, 1.05, 1.1, 1.15, 1.2]


@pytest.mark.parametrize(
    "changes", [dict(randomised=True), dict(sharpened=1.2), dict(warmup_steps=1)]
)
def test_single_steps_that_depend_on_others_are_refused(changes):
    keys = jax.random.split(jax.random.key(0), 1)
    with pytest.raises(UserError, match="draws all steps at once"):
        Halton(SHAPE, **changes)(None, Masking(3), chain(1, 16), 0.5, 1.0, keys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(warmup_steps=-1), "sample.warmup_steps must not be negative, not -1"),
        (dict(sharpened_power=2.0), "sharpened_power=2.0 has no effect with sample.sharpened=1"),
    ],
)
def test_factors_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        Halton(SHAPE, **changes)


def test_texts_and_parts_of_images_are_refused(loaded):
    with pytest.raises(UserError, match=r"of these data has the shape \(12,\)"):
        Halton((12,))
    with pytest.raises(UserError, match="draws whole images of 16 symbols, not 9 at once"):
        steps_of(Halton(SHAPE), 3, 2)


def test_channels_of_a_pixel_follow_each_other():
    place_of = np.argsort(halton_order(2, 3))
    found = Halton((2, 3, 2))._order(12)
    np.testing.assert_array_equal(found.reshape(6, 2), 2 * place_of[:, None] + [0, 1])
