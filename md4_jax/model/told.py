"""Values of a published config.json, which note the keys that have been read."""

from collections.abc import Iterator, Mapping
from typing import Any

# Keys that do not change what a network computes for given parameters and tokens.
METADATA = (
    "architectures", "auto_map", "_name_or_path", "_target_", "model_type", "torch_dtype", "dtype",
    "precision", "transformers_version", "quantization_config", "pretrained_model_name_or_path",
    "tokenizer_class", "text_mask_token", "vocab_list", "language", "id2label", "label2id",
    "problem_type", "task_specific_params", "is_folding_model", "esmfold_config",
    "block_norm_eps", "theta",  # of LFM2, whose code reads norm_eps and rope_theta
)  # fmt: skip
TRAINING = (
    "initializer_range", "initializer_cutoff_factor", "init_device", "init_fn", "init_std",
    "init_cutoff_factor", "depth_scaled_init", "reinit_encoder", "reinit_decoder",
    "dropout", "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "embedding_dropout",
    "output_dropout", "residual_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "mlp_dropout", "classifier_dropout", "summary_first_dropout", "classifier_pooling",
    "clf_pooling",
    "router_aux_loss_coef", "output_router_logits", "ar_loss_weight", "dlm_loss_weight",
    "dp_varying_mask_ratio", "train_on_context", "noise_config", "cross_attn", "var_min",
    "block_masking_probability", "mask_block_sizes", "prefix_probability", "truncate_probability",
    "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init",
    "sampling_eps", "t_eps", "T", "ngpus", "training", "optim", "data", "eval", "hydra",
)  # fmt: skip
GENERATION = (
    "use_cache", "temperature", "top_k", "top_p", "do_sample", "max_length", "num_diffusion_steps",
    "repetition_penalty", "sampling", "eval_block_size", "bos_token_id", "eos_token_id",
    "pad_token_id", "cls_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
)  # fmt: skip
# Ways to compute the same function.
KERNELS = (
    "attn_implementation", "_attn_implementation", "attn_backend", "attention_kernel",
    "flash_attention",
    "deterministic_flash_attn", "reference_compile", "pretraining_tp", "fuse_cross_entropy",
    "chunk_size_feed_forward", "moe_backend", "ep_size", "router_dtype", "rope_full_precision",
    "reorder_and_upcast_attn", "block_group_size", "output_attentions", "output_hidden_states",
    "return_dict",
)  # fmt: skip
# Sizes, and parts that the network has if their arrays are there.
ARRAYS = (
    "vocab_size", "embedding_size", "tokens", "n_positions", "hidden_size", "feature_dim",
    "intermediate_size", "dense_intermediate_size", "moe_shared_expert_intermediate_size",
    "mlp_ratio", "head_dim", "num_key_value_heads", "num_shared_experts", "moe_layer_freq",
    "moe_router_enable_expert_bias", "num_encoder_layers", "keep_top_decoder_layers", "cond_dim",
    "timestep_cond_dim", "adaln", "outside_embed", "cfg_num_classes", "layer_norm_with_affine",
    "attention_bias", "use_qkv_bias", "qkv_bias", "qk_norm", "use_qk_norm", "qk_layernorm",
    "max_window_layers", "alibi_bias_max", "attention_layer_norm_with_affine", "use_rmsnorm",
    "rotary_dim", "block_dim", "block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of",
    "block_auto_adjust_ff_dim", "conv_dim", "conv_dim_out",
)  # fmt: skip
HARMLESS = frozenset(METADATA + TRAINING + GENERATION + KERNELS + ARRAYS)
# Values with which an option usually changes nothing.
OFF = (None, False, "", [], {})


class Told(Mapping[str, Any]):
    """Values of config.json that note which keys have been read.

    A key that nothing reads may be an option of the network that is not known here.
    """

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None, prefix: str = ""):
        self._values, self._prefix = dict(values), prefix
        self._read: set[str] = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self._read.add(self._prefix + key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, more: Mapping[str, Any]) -> "Told":
        """Returns the values with more of them, which are none of config.json's own."""
        return Told(self._values | dict(more), self._read, self._prefix)

    def over(self, defaults: Mapping[str, Any]) -> "Told":
        """Returns the values with defaults for those that are missing."""
        return Told(dict(defaults) | self._values, self._read, self._prefix)

    def without(self, *keys: str) -> "Told":
        """Returns the values without some keys, which have no effect on the network."""
        self._read.update(self._prefix + key for key in keys)
        left = {key: value for key, value in self._values.items() if key not in keys}
        return Told(left, self._read, self._prefix)

    def within(self, key: str) -> "Told":
        """Returns the object under a key, whose keys are noted too."""
        return Told(self[key], self._read, f"{self._prefix}{key}.")

    def known(self) -> "Told":
        """Returns the values without those that are null."""
        left = {key: value for key, value in self._values.items() if value is not None}
        return Told(left, self._read, self._prefix)

    def unread(self) -> dict[str, Any]:
        """Returns the values that nothing has read, are not HARMLESS and not off, by name."""
        found = {}
        for key, value in self._values.items():
            name = self._prefix + key
            if name in self._read:
                if isinstance(value, Mapping) and any(n.startswith(f"{name}.") for n in self._read):
                    found |= Told(value, self._read, f"{name}.").unread()
            elif key not in HARMLESS and value not in OFF:
                found[name] = value
        return found
