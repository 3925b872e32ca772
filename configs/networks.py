"""Options of published networks, except sizes: config.network.update(networks.MD4)."""

# google-deepmind/md4 on text. Its condition has 64 features, computed from the time.
MD4 = dict(
    feed_forward="glu", norm="layer", norm_eps=1e-5, time_embedding="md4", condition=64,
    head_bias=False, initial="depth_scaled", dropout_shared=True,
)  # fmt: skip
# The time-free version uses RMSNorm.
MD4_TIME_FREE = dict(MD4, norm="rms", time_conditioning=False)
# The DiT of SEDD, MDLM, Duo, BD3-LM and GIDD.
DIT = dict(
    feed_forward="gelu", norm="layer", norm_eps=1e-5, norm_parameters="scale",
    time_embedding="dit", condition=128, initial="torch",
)  # fmt: skip
# RADD's DiT is time-free.
RADD = dict(DIT, norm_parameters="affine", time_conditioning=False)
# LLaDA (arXiv:2502.09992), a bidirectional LLaMA.
LLADA = dict(
    norm_eps=1e-5, norm_parameters="scale", head_bias=False, rotary_base=500_000.0,
    time_conditioning=False, initial="torch",
)  # fmt: skip
QWEN3 = dict(LLADA, norm_eps=1e-6, rotary_base=1e6, qk_norm=True)  # E2D2's layers too
# GPT-2, and DiffuGPT (arXiv:2410.17891), a bidirectional GPT-2: with network.positions.
GPT2 = dict(
    feed_forward="gelu", qkv_bias=True, out_bias=True, norm="layer", norm_eps=1e-5,
    norm_parameters="affine", head_bias=False, tied=True, time_conditioning=False,
)  # fmt: skip
# ModernBERT (arXiv:2412.13663) with its language modelling head: network.name="modernbert".
MODERNBERT = dict(
    feed_forward="geglu", norm="layer", norm_eps=1e-5, norm_parameters="scale", tied=True,
    rotary_base=160_000.0, time_conditioning=False, initial="torch", scan_blocks=False,
)  # fmt: skip
LFM2 = dict(QWEN3, norm_eps=1e-5, tied=True, scan_blocks=False)  # network.name="lfm2"
# ESM-2 (Lin et al., 2023), and DPLM (arXiv:2402.18567): network.name="esm".
ESM = dict(GPT2, feed_forward="gelu_exact", head_bias=True, initial="torch")
# The U-Net of D3PM and tauLDR on CIFAR-10 (DDPM, arXiv:2006.11239): network.name="unet".
DDPM = dict(
    channels=128, blocks=2, multipliers=(1, 2, 2, 2), attention_at=(16,), input="intensity",
    output="truncated_logistic",
)  # fmt: skip
