"""Comparison of families on pixels: configs/image_families.py:md4, :d3pm and :tauldr.

MNIST without classes, with the network of configs/mnist.py. D3PM (arXiv:2107.03006) has its
discretised Gaussian noise, and tauLDR (arXiv:2205.14987) its Gaussian rates, as in
configs/d3pm_cifar10.py and configs/tauldr_cifar10.py. The loss is the reported bound. Results are
in docs/images.md.
"""

from configs import d3pm_cifar10, mnist, tauldr_cifar10

FAMILIES = dict(
    md4=mnist.get_config,
    d3pm=lambda: d3pm_cifar10.get_config("gauss"),
    tauldr=tauldr_cifar10.get_config,
)


def get_config(name):
    config = mnist.get_config()
    config.data.update(labels=False, test=10_000.0)
    config.network.update(classes=0, label_dropout=0.0)
    del config.evals.unlabelled
    if name == "md4":
        return config
    family = FAMILIES[name]()
    config.process, config.objective = family.process, family.objective
    if name == "tauldr":
        # In equally many steps, 2.35 bits per dimension of MNIST instead of 2.93 with its own loss.
        config.objective = family.evals.test.objective
    config.optim.adam_learning_rate = 0.002  # of the head for the location, among others
    # In a short trial the first of 1000 steps had the largest cost, but uniform times rarely draw
    # it.
    config.train.time_power = 2.0 if name == "d3pm" else 1.0
    config.network.update(input="intensity", output="truncated_logistic", time_conditioning=True)
    for each in (config.evals.validation, config.evals.test):
        each.objective = family.evals.test.objective
    config.sample = family.sample
    return config
