"""Numbers that no section can mean are refused with their key, whatever they are."""

import copy
import math
import re
import types

import jax
import pytest

from md4_jax.config import build, schema
from md4_jax.config.load import flatten
from md4_jax.options import SampleOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.commit import PACKAGE_ROOT

SHAPES = {"uvit": (64, 64, 3), "dit": (8, 8, 1), "unet": (32, 32, 3)}
ELSEWHERE = {"audit", "data", "evals", "tokenizer"}  # sections that are built elsewhere
NEVER = (2**31, -(2**31), 10**30, math.nan, math.inf, -math.inf)


def numbers(config):
    """The keys that hold a number, and those of the chosen classes that the config leaves out."""
    found = {
        key: value
        for key, value in flatten(config)
        if type(value) in (int, float) and not key.startswith("audit.")
    }
    for section in config.keys() - ELSEWHERE:
        takes = schema.arguments_of(section, config[section].get("name"))
        found |= {
            f"{section}.{key}": kind(1) for key, kind in takes.items() if kind in (int, float)
        }
    return found


def outcome(config, key, value):
    """The error of a config with that value, as text; '' if it is accepted."""
    changed = copy.deepcopy(config)
    *parents, last = key.split(".")
    section = changed
    for parent in parents:
        section = section[parent]
    section[last] = value
    shape = SHAPES.get(config["network"]["name"], (config["data"]["length"],))
    domain = types.SimpleNamespace(vocab_size=27, eot_id=None, unit="character", shape=shape)
    try:
        schema.check_keys(changed)
        build.experiment(changed, domain, jax.devices()[:1])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name",
    [
        "base.py",
        "digits.py",
        *(
            pytest.param(name, marks=pytest.mark.campaign)
            for name in ("imagenet64.py", "cifar10.py", "d3pm_text8.py:uniform")
        ),
    ],
)
def test_numbers_are_accepted_or_refused_with_their_key(name):
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / name), {"mesh.data": "1"})
    assert outcome(config, "mesh.data", 1) == ""
    found = numbers(config)
    assert len(found) > 50
    for key, old in found.items():
        for value in (0, -1, *NEVER) if isinstance(old, int) else (0.0, -1.0, *NEVER):
            said = outcome(config, key, value)
            may_be = value == 2**31 and key.endswith(".seed")
            assert said or value not in NEVER or may_be, (key, value)
            assert not said or key.rpartition(".")[2] in said, (key, value, said)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("network.heads", 0, "network.heads must be at least 1, not 0"),
        ("network.heads", -2, "network.heads must be at least 1, not -2"),
        ("network.size", -768, "network.size must be at least 1, not -768"),
        ("network.hidden", -1, "network.hidden must not be negative, not -1"),
        ("network.local_width", -5, "network.local_width must not be negative, not -5"),
        ("network.norm_eps", 0.0, "network.norm_eps=0.0 must be above 0"),
        ("network.rotary_base", -1.0, "network.rotary_base=-1.0 must be above 0"),
        ("network.rotary_scaling", (8.0, 4.0, 1.0, 8192.0), "must be empty, or .* low < high"),
        ("network.rotary_scaling", (8.0,), "rotary_scaling=\\(8.0,\\) must be empty"),
        ("mesh.data", -1, "mesh.data must not be negative, not -1"),
        ("bench.seconds", -1.0, "bench.seconds must not be negative, not -1.0"),
        ("plan.random_tokens", -1, "plan.random_tokens must not be negative, not -1"),
        ("sample.steps", 2**24 + 1, "sample.steps must be at most 16777216, not 16777217"),
        (
            "sample.length",
            2**30,
            "sample.batch_size=16 times sample.length=1073741824 is 17179869184 tokens",
        ),
        ("train.seconds", math.nan, "train.seconds must be a finite number, not nan"),
        ("sample.guidance", math.inf, "sample.guidance must be a finite number, not inf"),
        ("train.num_steps", 2**31, "train.num_steps must be below 2147483648, not 2147483648"),
        ("train.seed", 2**32, "train.seed must lie between 0 and 4294967295"),
        ("train.seed", 2**32 - 1, r"\A\Z"),
    ],
)
def test_a_number_out_of_range_is_named(key, value, words):
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / "base.py"), {"mesh.data": "1"})
    assert re.search(words, outcome(config, key, value))


def test_guidance_is_finite_also_when_it_is_set_from_python():
    with pytest.raises(UserError, match="sample.guidance must be a finite number, not -inf"):
        SampleOptions(guidance=-math.inf)
