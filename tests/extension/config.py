"""A run in which every section that can be extended is: sums, learned from hybrid noise."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = dict(name="extension.data:Sums", lines=4000, largest=9, length=32)
    config.tokenizer = dict(name="extension.tokenizer:SumSymbols")
    config.process = dict(name="extension.process:Hybrid", masked=0.7)
    config.objective = dict(name="extension.objective:CleanCrossEntropy")
    config.network = dict(name="extension.network:GatedConvolutions", width=64)
    config.optim = dict(name="extension.optimizer:Lion", learning_rate=2e-3)
    config.train.update(num_steps=300, batch_size=32, ema=0.99)
    config.sample = dict(
        name="extension.sampler:GuessAndNoise", num=8, steps=32, grid="uniform", length=32
    )
    config.evals = dict(
        validation=dict(name="likelihood", split="validation", every=100, final=False, limit=64),
        test=dict(name="likelihood", objective=dict(name="d3pm", timesteps=100)),
        sums=dict(name="extension.evaluator:RightSums"),
        samples=dict(name="samples"),
    )
    config.log.every = 50
    return config
