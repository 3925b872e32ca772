"""A classifier of noisy digits, for guiding a digit model without classes."""

from configs import digits


def get_config():
    config = digits.get_config()
    config.objective = dict(name="classifier")
    config.network = dict(
        name="dit_classifier", patch=2, size=128, depth=4, heads=4, embedding=16,
        time_conditioning=False, qk_norm=True, dropout=0.1, classes=10, scan_blocks=False,
    )  # fmt: skip
    config.evals = dict(
        validation=dict(name="classification", every=250, final=False, split="validation"),
        test=dict(name="classification", split="test", draws=16),
    )
    config.plan.parts, config.bench.parts = "train", "train,data"
    return config
