"""Experiments of a tiny network on random tokens, as --mode bench and --mode plan make them."""

import jax

from md4_jax.config import build, schema
from md4_jax.data.random_tokens import RandomTokens

SYMBOLS = 27
SIZES = {
    "network.size": "32", "network.heads": "2", "network.depth": "1", "network.hidden": "32",
    "network.time_conditioning": "False", "network.scan_blocks": "False", "data.length": "16",
    "train.batch_size": "4", "sample.batch_size": "2", "sample.steps": "4",
    "objective.name": "any_order", "bench.random_tokens": str(SYMBOLS), "bench.parts": "train",
}  # fmt: skip
LEFT_TO_RIGHT = {
    "objective.name": "autoregressive", "network.causal": "True", "sample.name": "left_to_right",
}  # fmt: skip


def experiment(**keys):
    """One device; keys with __ in place of dots."""
    asked = {key.replace("__", "."): str(value) for key, value in keys.items()}
    config = schema.load_config("configs/base.py", SIZES | asked)
    return build.experiment(config, RandomTokens(SYMBOLS), jax.devices()[:1])


def parameters(made):
    """Shapes of the network's parameters."""
    return jax.eval_shape(made.network.init, jax.random.key(0))


# Keys of data whose batches say which tokens see each other, or do not.
SEGMENTS = (
    (dict(data__separate_documents=True), True),
    (dict(data__windows="documents"), True),
    (dict(data__windows="documents", data__padding="end_of_text"), False),
    (dict(data__name="text", data__path="FILE", data__prompt_key="question"), True),
    (dict(evals__test__data="{'separate_documents': True}"), False),
    (dict(), False),
)

# Keys of data whose batches have classes, or do not, and an evaluator's own keys of data.
LABELS = (
    (dict(network__classes=3), {}, True),
    (dict(), {}, False),
    (dict(network__classes=3, network__label_dropout=0.1), {"label_key": ""}, False),
    (dict(network__classes=3), {"label_key": "author"}, True),
)
