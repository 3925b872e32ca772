"""D3PM on CIFAR-10 (arXiv:2107.03006): configs/d3pm_cifar10.py:gauss, :uniform and :absorbing.

Settings for images of google-research/d3pm. Its loss is in bits per step, and the loss here in nats
over all 1000 steps, so the gradient is clipped at 1000 log 2. The paper reports <= 3.44 (gauss with
logistic outputs), 5.08 (uniform) and 4.40 (absorbing) bits per dimension for its own code. Its
network is slightly different, and its absorbing state is a grey level. This package has not been
trained to the end with these settings.
"""

from configs import base, networks

STEPS = 1000
GAUSS = dict(name="transition", kernel="gaussian", timesteps=STEPS, beta_start=1e-4, beta_end=0.02)
UNIFORM = dict(name="uniform", schedule=dict(name="shifted_cosine"), parametrisation="joint")
ABSORBING = dict(name="masking", schedule=dict(name="linear"))
# name: (process, weight of the cross-entropy, output of the network)
FAMILIES = dict(
    gauss=(GAUSS, 0.001, "truncated_logistic"),
    uniform=(UNIFORM, 0.0, "categorical"),
    absorbing=(ABSORBING, 0.001, "categorical"),
)


def get_config(name):
    config = base.get_config()
    process, weight, output = FAMILIES[name]
    config.data = dict(name="cifar10", length=32 * 32 * 3, labels=False, flip=True)
    config.process = process
    bound = dict(name="d3pm", timesteps=STEPS, decoder="denoiser")
    config.objective = dict(bound, cross_entropy=weight)
    config.network = dict(
        networks.DDPM, name="unet", time_conditioning=True, dropout=0.1, output=output
    )  # fmt: skip
    config.optim.update(learning_rate=2e-4, warmup_steps=0, decay="constant", clip=693.0)
    config.train.update(num_steps=1_500_000, batch_size=128)
    config.evals.validation.update(split="test", every=50_000, objective=bound)
    config.evals.test.objective = bound
    config.sample.update(steps=STEPS, grid="uniform")
    return config
