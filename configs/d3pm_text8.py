"""D3PM on text8 (arXiv:2107.03006, appendix B.2): configs/d3pm_text8.py:absorbing and uniform.

The paper reports <= 1.45 (absorbing) and <= 1.61 (uniform) bits per character on the test split for
its own code, with 1000 steps. Size and recipe are the paper's. The network is not: the paper uses a
T5 encoder with relative positions, and adds the time to its input. This package has not been
trained to the end with these settings.
"""

from configs import base

# Noise, and the weight of the auxiliary cross-entropy. For masks, the paper's mutual information
# schedule is the linear one.
FAMILIES = dict(
    absorbing=(dict(name="masking", schedule=dict(name="linear")), 0.01),
    uniform=(dict(name="uniform", schedule=dict(name="shifted_cosine", shift=0.008)), 0.0),
)


def get_config(name):
    config = base.get_config()
    config.data.windows = "every"
    config.process, weight = FAMILIES[name]
    bound = dict(name="d3pm", timesteps=1000, decoder="denoiser")
    config.objective = dict(bound, cross_entropy=weight)
    config.evals.validation.objective = config.evals.test.objective = bound
    config.network.update(
        size=768, depth=12, heads=12, feed_forward="gelu", norm_parameters="scale",
        head_bias=False, condition=128,
    )  # fmt: skip
    config.optim.update(learning_rate=5e-4, warmup_steps=10_000, decay="rsqrt", clip=0.25)
    config.sample.update(steps=1000, grid="uniform")
    return config
