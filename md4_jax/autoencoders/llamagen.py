"""Published VQ autoencoder of LlamaGen (arXiv:2406.06525), in the terms of diffusers' VQModel.

Its file has no settings: all but the groups of norms follow from the arrays. Codes are the nearest
in direction: vectors and codebook are divided by their lengths. The length of a vector changes its
code only by rounding.
"""

import re
from typing import Any

import numpy as np

from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

KIND = "LlamaGen"  # _class_name in config.json of a copy
GROUPS = 32  # of its group norms
CODEBOOK = "quantize.embedding.weight"
USAGE = "quantize.codebook_used"  # which codes training used last
# Patterns in its names of arrays -> those of diffusers, in this order.
NAMES = {
    r"^encoder\.conv_blocks\.": "encoder.down_blocks.",
    r"^decoder\.conv_blocks\.": "decoder.up_blocks.",
    r"\.res\.": ".resnets.",
    r"\.attn\.": ".attentions.",
    r"\.mid\.0\.": ".mid_block.resnets.0.",
    r"\.mid\.1\.": ".mid_block.attentions.0.",
    r"\.mid\.2\.": ".mid_block.resnets.1.",
    r"\.(down|up)sample\.": r".\1samplers.0.",
    r"\.nin_shortcut\.": ".conv_shortcut.",
    r"\.norm_out\.": ".conv_norm_out.",
    r"(\.attentions\.\d+)\.norm\.": r"\1.group_norm.",
    r"(\.attentions\.\d+)\.([qkv])\.": r"\1.to_\2.",
    r"\.proj_out\.": ".to_out.0.",
}


def settings(tensors: Tensors, name: str) -> dict[str, Any]:
    """Returns the keys that config.json of diffusers would have, from the shapes of the arrays.

    name: file, for messages. UserError for arrays of another model
    """
    needed = (CODEBOOK, "encoder.conv_in.weight", "decoder.conv_out.weight", "encoder.mid.1.q.bias")
    if missing := [each for each in needed if each not in tensors]:
        raise UserError(
            f"{name} is not the VQ autoencoder of LlamaGen, as vq_ds16_c2i.pt is: it has no array "
            f"{missing[0]!r}"
        )
    levels = tensors.count(r"encoder\.conv_blocks\.(\d+)\.")
    blocks = range(levels)
    return {
        "_class_name": KIND,
        "l2_norm": True,
        "in_channels": tensors.shape("encoder.conv_in.weight")[1],
        "out_channels": tensors.shape("decoder.conv_out.weight")[0],
        "down_block_types": _types(tensors, "encoder", levels, "DownEncoderBlock2D"),
        "up_block_types": _types(tensors, "decoder", levels, "UpDecoderBlock2D"),
        "block_out_channels": [
            tensors.shape(f"encoder.conv_blocks.{n}.res.0.conv1.weight")[0] for n in blocks
        ],
        "layers_per_block": tensors.count(r"encoder\.conv_blocks\.0\.res\.(\d+)\."),
        "num_vq_embeddings": tensors.shape(CODEBOOK)[0],
        "norm_num_groups": GROUPS,
    }


def _types(tensors: Tensors, part: str, levels: int, plain: str) -> list[str]:
    """Returns the type of each level of resolution, in the order of computation."""
    attends = (f"{part}.conv_blocks.{n}.attn.0.q.weight" in tensors for n in range(levels))
    return [f"Attn{plain}" if each else plain for each in attends]


def arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    """Returns the arrays in float32 by their names in diffusers."""
    found = {}
    for name in tensors:
        if name == USAGE:
            continue
        ours = name
        for pattern, new in NAMES.items():
            ours = re.sub(pattern, new, ours)
        found[ours] = np.asarray(tensors[name], np.float32)
    return found
