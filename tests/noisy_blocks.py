"""Models in blocks: what a loaded one computes and draws, and one made of laws."""

import jax.numpy as jnp
import numpy as np

from md4_jax.evals.samples import drawn_samples
from md4_jax.protocols import Blockwise, Denoiser, Prompt

BLOCK = 4
# Keys that make a block diffusion model of a causal one.
ADAPTED = {"objective.name": "block", "network.causal": False, "sample.name": "ancestral"}


def of_blocks(model, z, clean) -> np.ndarray:
    """Logits of each noisy block, given the clean blocks before it."""
    denoiser = model.experiment.network.denoiser(model.params)
    z, clean = jnp.asarray(z), jnp.asarray(clean)
    times = jnp.zeros((len(z), z.shape[1] // BLOCK))
    return denoiser.unembed(denoiser.blocks.features(z, times, clean, BLOCK))


def drawn(model, prompt, length: int, **options):
    """The tokens of a text that begins with the prompt, and the evaluations that they took."""
    experiment = model.sampling({"num": 1, "length": length, "temperature": 0.0, **options})
    tokens, given = np.zeros(length, np.int32), np.arange(length) < len(prompt)
    tokens[: len(prompt)] = prompt
    found = drawn_samples(experiment, model.params, {}, [Prompt(tokens, given)])
    return found.tokens[0].tolist(), int(found.evaluations[0])


def in_blocks(make) -> Denoiser:
    """A denoiser that works in blocks alone; make: the text before a block -> its denoiser."""

    def features(z, t, clean, block):
        found = []
        for number, begin in enumerate(range(0, z.shape[1], block)):
            part = slice(begin, begin + block)
            found.append(make(clean[:, :begin]).features(z[:, part], t[:, number]))
        return jnp.concatenate(found, axis=1)

    return Denoiser(None, lambda h: h, blocks=Blockwise(features, None, None))
