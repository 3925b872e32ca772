"""Samplers whose steps depend on whole texts or on other networks, on eight devices as on one."""

import jax
import numpy as np
import pytest
from several_devices import on_eight_devices
from tiny_networks import built

from md4_jax.networks.classifier import Classifier
from md4_jax.networks.encoder_decoder import EncoderDecoder
from md4_jax.networks.transformer import Transformer
from md4_jax.options import MeshOptions
from md4_jax.options.guide import ClassifierOptions
from md4_jax.processes.masking import Masking
from md4_jax.processes.resizing import Resizing
from md4_jax.protocols import Prompt
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import to_global, to_host
from md4_jax.samplers import loop
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.batches import make_sampler
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.classifier import Guide
from md4_jax.samplers.eso import Eso
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.reparameterized import Reparameterized
from md4_jax.samplers.resize import Resize

ROWS, LENGTH, SYMBOLS = 8, 8, 5
FREE = dict(time_conditioning=False)
# Two tokens, two masks and one more token; the rest of the row is free.
GAP = np.tile([0, 1, 0, 0, 2, *[SYMBOLS + 1] * 3], (ROWS, 1)).astype(np.int32)
OF_GAP = Prompt(GAP, np.tile([True] * 2 + [False] * 2 + [True] * 4, (ROWS, 1)))
NOTHING = loop.no_prompt(ROWS, LENGTH)
# Network, its options, process, step, prompt, method of a classifier, and what runs the steps.
CASES = {
    "eso": (Transformer, FREE, Masking, Eso(0.5), NOTHING, "", loop.sample),
    "reparameterized": (
        Transformer, FREE, Masking, Reparameterized(resample=0.25), NOTHING, "", loop.sample,
    ),
    "resize": (Transformer, FREE, Resizing, Resize(grow=3, noise=0.3), OF_GAP, "", loop.sample),
    "exact": (Transformer, FREE, Masking, Ancestral(), NOTHING, "exact", loop.sample),
    "taylor": (Transformer, FREE, Masking, Ancestral(), NOTHING, "taylor", loop.sample),
    "blocks of E2D2": (
        EncoderDecoder, dict(decoder_depth=1), Masking, Ancestral(), NOTHING, "", Blocks(4, 8),
    ),
}  # fmt: skip


def on_meshes() -> None:
    """Draws each case on one device and on eight."""
    jax.config.update("jax_disable_most_optimizations", True)  # or it compiles for minutes
    meshes = [make_mesh(MeshOptions(data=n), jax.devices()[:n]) for n in (1, 8)]
    for name, (make, options, process, step, prompt, method, run) in CASES.items():
        network, params = built(make, **options)
        whole, guidance = {"network": params, "process": process(SYMBOLS).init()}, 1.0
        if method:
            judge, own = built(Classifier, **FREE)
            own = {"network": own, "process": Masking(SYMBOLS)}
            guidance = Guide(ClassifierOptions("c", 2.0, method), 1, judge, own)
            whole = guidance.beside(whole)
        found = []
        for mesh in meshes:
            sampler = make_sampler(network, run, uniform(4), mesh, guidance=guidance)
            given = to_global((prompt, {}), mesh)
            with jax.set_mesh(mesh):
                keys = jax.random.split(jax.random.key(0), ROWS)
                chain, _ = sampler.program(whole, step, keys, *given)
            found.append(to_host((chain.z, chain.evaluations)))
        for one, eight in zip(*found, strict=True):
            np.testing.assert_array_equal(one, eight, err_msg=name)
        assert len(np.unique(found[0][0], axis=0)) > 1, name
    print("meshes agree")


@pytest.mark.campaign
def test_tokens_and_evaluations_are_those_of_one_device():
    assert "meshes agree" in on_eight_devices("test_samplers_on_devices", "on_meshes")
