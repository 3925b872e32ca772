"""Checks that a causal Qwen, Llama or Mistral is the one of transformers, not adapted from it.

Models that were adapted to diffusion often keep the model_type. Read as a causal model such a
network would compute other logits than its authors' code, such as with attention to both sides.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

# Classes of transformers, also under older names.
CLASSES = (
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM",
    "LLaMAForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM",
)  # fmt: skip


def checked(told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the keys of config.json to warn of; UserError for a model of another class.

    told: with the mask of the tokenizer, if config.json names none
    """
    kind = told.get("model_type")
    for name in told.get("architectures") or []:
        if name not in CLASSES:
            raise UserError(
                f"{tensors.folder}: config.json says model_type={kind!r}, which is a left-to-right "
                f"model, but names the class {name!r}, which is not known: it may attend to both "
                "sides, or predict other positions. If it computes what transformers' "
                f"{kind} computes, remove `architectures`"
            )
    if told.get("mask_token_id") is not None:
        raise UserError(
            f"{tensors.folder}: config.json or the tokenizer names a mask "
            f"(mask_token_id={told['mask_token_id']}), but model_type={kind!r} is a left-to-right "
            "model, which has none. A diffusion model must have the model_type of its project, "
            f"such as 'a2d-{kind}' of dLLM, which attends to both sides and predicts each token at "
            "its own position. To read a left-to-right model, remove the mask"
        )
    own = told.get("auto_map")
    return {"auto_map": own} if own else {}
