"""Sizes for timing this package and other programs, as keys of configs/base.py."""

CONFIG = "configs/base.py"
TEXT = "bench.random_tokens=27 data.length=256"
SMALL = "network.size=256 network.depth=4 network.heads=4"
# 4 layers of 256 and 12 of 768 on 27 characters, 4 layers of 256 on GPT-2's vocabulary, and the
# first one with a learned schedule. The condition has the width of MDLM's and SEDD's; that of
# google-deepmind/md4 has 64 features. Layers are unrolled, since slices of stacked parameters are
# slow on CPUs. Numbers of samples and reverse steps are for timing a sampler.
SIZES = {
    "a": f"{TEXT} {SMALL} train.batch_size=16 sample.batch_size=16 sample.steps=64",
    "b": f"{TEXT} train.batch_size=4 sample.batch_size=4 sample.steps=16",
    "c": (
        f"bench.random_tokens=50257 data.length=1024 {SMALL} train.batch_size=2 "
        "sample.batch_size=1 sample.steps=32"
    ),
    "genmd4": (
        f"{TEXT} {SMALL} train.batch_size=16 process.name=state_dependent objective.name=genmd4"
    ),
}
EACH = "network.condition=128 network.scan_blocks=false"
SIZES = {name: f"{keys} {EACH}" for name, keys in SIZES.items()}
