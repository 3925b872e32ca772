"""What a program takes of a chip, what fits it, and what is said where it does not."""

import json
import subprocess
import sys
import types

import jax
import planned
import pytest

from md4_jax.options import MeshOptions
from md4_jax.perf import aot as plans
from md4_jax.perf.aot import Plan, check_fits, seconds, table
from md4_jax.perf.chips import CHIPS, TARGETS, described, devices_of
from md4_jax.protocols import UserError
from md4_jax.runtime.mesh import make_mesh

EXPERIMENT = types.SimpleNamespace(
    config={"network": {"remat": "none", "dtype": "bfloat16"}},
    train=types.SimpleNamespace(microbatches=2),
    mesh=types.SimpleNamespace(shape={"fsdp": 4, "context": 2}),
    network=types.SimpleNamespace(splits=True),
)


def program(gib: float) -> Plan:
    """One that needs so much: a quarter of it arguments, a quarter outputs."""
    part = int(gib * 2**28)
    return Plan(part, part, 2 * part, 819e9, {"all-reduce": (2, 1e11)}, 197e12, 0.0, 0.0, 1.0)


def test_a_program_that_is_too_large_is_refused_with_the_numbers():
    chip = CHIPS["TPU v5 lite"]
    check_fits({"train": program(15.0)}, chip, EXPERIMENT)
    words = r"the eval program needs 20.0 GiB .* has 16: 5.0 arguments, 5.0 outputs and 10.0 temp"
    with pytest.raises(UserError, match=words) as refused:
        check_fits({"train": program(15.0), "eval": program(20.0)}, chip, EXPERIMENT)
    remat, *rest = "network.remat=dots or full", "train.microbatches than 2", "mesh.fsdp than 4"
    for word in (remat, *rest, "mesh.context than 2"):
        assert word in str(refused.value)


def test_what_a_network_without_blocks_to_recompute_can_do():
    own = {"config": {"network": {"name": "uvit"}}, "network": types.SimpleNamespace(splits=False)}
    said = plans.remedies(types.SimpleNamespace(**{**vars(EXPERIMENT), **own}))
    assert said.startswith("Try a larger train.microbatches than 2, ") and "context" not in said


def test_the_least_times_of_a_chip():
    """197 TFLOP, 819 GB and 100 GB on v5e: 1 s, 1 s and half a second."""
    chip = CHIPS["TPU v5 lite"]
    assert seconds(program(1.0), chip) == pytest.approx((1.0, 1.0, 0.5))
    shown = table({"train": program(1.0)}, chip)
    assert "| 256.0 MiB | 256.0 MiB | 512.0 MiB |" in shown and "2 all-reduce" in shown
    assert "| 100% |" in shown and "GiB" not in table({"train": program(1.0)}, None)


@pytest.mark.parametrize(
    "said, words",
    [
        (
            "INTERNAL: RET_CHECK failure (hlo.cc:1)",
            r"XLA failed: INTERNAL: RET_CHECK .*jax\[tpu\]==",
        ),
        ("RESOURCE_EXHAUSTED: Ran out of 5G. HLO module", "does not fit the chip: Ran out of 5G"),
    ],
)
def test_what_the_compiler_refuses(said, words):
    def compile():
        raise jax.errors.JaxRuntimeError(said)

    lowered = types.SimpleNamespace(compile=compile)
    fn = types.SimpleNamespace(lower=lambda: lowered)
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])
    experiment = types.SimpleNamespace(**{**vars(EXPERIMENT), "mesh": mesh})
    with pytest.raises(UserError, match=words):
        plans._compiled(experiment, fn, 1.0)


@pytest.mark.parametrize(
    "topology", ["cpu:0", "cpu:4000", "cpu:x", "v99:3x3", "b200:8", "nothing", "h100:0", "h200"]
)
def test_a_topology_that_there_is_not(topology, monkeypatch):
    def missing(*arguments, **more):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(UserError, match=f"--topology {topology}[: ]") as found:
        devices_of(topology)
    said = (
        "set the environment variable XLA_FLAGS="
        if topology[:3] == "cpu"
        else "A topology is given as"
    )
    assert said in str(found.value) and "(the default)" not in str(found.value)
    assert "no such thing" in str(found.value) or topology[:3] != "v99"
    with pytest.raises(UserError, match=r"^--topology v5e:8x8 \(the default\): no such thing\. "):
        devices_of("v5e:8x8")


def test_the_chips_are_those_of_the_published_tables():
    """Memory in GiB and bf16 TFLOP/s of v4, v5e, v5p and v6e."""
    found = {n: (c.memory / 2**30, c.flops / 1e12) for n, c in CHIPS.items() if n[:3] == "TPU"}
    assert found == {
        "TPU v4": (32, 275), "TPU v5 lite": (16, 197), "TPU v5": (95, 459), "TPU v6 lite": (32, 918)
    }  # fmt: skip


def test_the_links_are_those_of_one_direction():
    """What a chip receives: NVIDIA publishes 600 and 900 GB/s, Google 400 and 1200, of both."""
    both = {
        "NVIDIA A100-SXM4-80GB": 600e9, "NVIDIA H100 80GB HBM3": 900e9, "NVIDIA H200": 900e9,
        "TPU v5 lite": 400e9, "TPU v5": 1200e9,
    }  # fmt: skip
    assert {name: 2 * CHIPS[name].links for name in both} == both
    # 450 GB in a second, beside arithmetic and memory that take less.
    p = program(1.0)._replace(collectives={"all-gather": (1, 450e9)})
    assert seconds(p, CHIPS["NVIDIA H100 80GB HBM3"])[2] == 1.0


def test_a_gpu_is_described_as_xla_asks(monkeypatch):
    """An H200 has 132 multiprocessors, 141 GB, and compute capability 9.0."""
    asked = {}

    def topology(name, platform, **more):
        asked.update(more, platform=platform)
        return types.SimpleNamespace(devices=["a", "b"])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", topology)
    assert devices_of("h200:2") == devices_of("H200:2") == ["a", "b"]
    assert asked["platform"] == "cuda" and asked["topology"] == "1x1x2"
    words = "core_count: 132 ", "device_memory_size: 141000000000 ", "major: 9 minor: 0 "
    assert all(word in asked["target_config"] for word in words)
    assert {TARGETS[name].kind for name in TARGETS} == {n for n in CHIPS if n[:6] == "NVIDIA"}
    for target in TARGETS.values():
        text = described(target)
        assert text.count("{") == text.count("}") == 4 and f'"{target.kind}"' in text


def test_what_is_exact_is_planned_with_one_draw():
    one, eight = (
        plans._eval(planned.experiment(**planned.LEFT_TO_RIGHT, evals__test__draws=draws))
        for draws in (1, 8)
    )
    assert one.flops == eight.flops and one.moved == eight.moved


def test_a_sample_takes_the_steps_of_a_grid_that_is_a_list():
    """Not those of sample.steps; the loop's body is counted as often as it runs."""
    listed, named = (
        plans._sample(planned.experiment(**keys))
        for keys in (
            dict(sample__grid="[1.0,0.5,0.0]", sample__steps=256),
            dict(sample__grid="uniform", sample__steps=2),
        )
    )
    assert listed.flops == named.flops
    assert listed.moved == pytest.approx(named.moved, rel=0.01)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["confidence", "any_order"])
@pytest.mark.cases(1)
def test_a_sample_of_so_many_tokens_a_step_takes_the_steps_that_they_need(name):
    """16 tokens, 2 in a step: 8 steps, though the grid has 4."""
    counted, named = (
        plans._sample(planned.experiment(sample__name=name, **keys))
        for keys in (
            dict(sample__per_step=2, sample__steps=4),
            dict(sample__per_step=0, sample__steps=8),
        )
    )
    assert counted.flops == named.flops


ORDERED = dict(objective__name="eso", sample__name="eso", network__size=64, network__hidden=128)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "keys",
    [
        ORDERED | dict(sample__alpha_0=0.0, objective__alpha_0=0.0),
        ORDERED | dict(sample__alpha_0=0.25),
        ORDERED | dict(sample__name="streaming", sample__width=4),
        {key.replace(".", "__"): value for key, value in planned.LEFT_TO_RIGHT.items()},
    ],
    ids=["left to right in an order", "a quarter by diffusion", "streaming", "left to right"],
)
@pytest.mark.cases(2)
def test_evaluations_with_a_cache_are_planned_as_they_are(keys, monkeypatch):
    """The formula of FLOPs gives the products of the compiled program, each loop as it runs."""
    found, traffic = [], plans.traffic
    monkeypatch.setattr(plans, "traffic", lambda *a: found.append(traffic(*a)) or found[-1])
    made = plans._sample(planned.experiment(**keys, data__length=48, sample__steps=8))
    assert made.flops == pytest.approx(found[0].products, rel=0.1)


UNIFORM = dict(process__name="uniform", objective__name="uniform_elbo")
BLOCKS = dict(objective__name="block", objective__block=8, network__causal_context=True)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "keys, least, most",
    [
        (UNIFORM | dict(sample__name="predictor_corrector", sample__corrections=3), 0.99, 1.01),
        (UNIFORM | dict(sample__name="entropy_bound"), 0.99, 1.01),
        (dict(sample__name="predictor_corrector"), 0.3, 0.8),
        (dict(sample__name="remask"), 0.3, 1.0),
        (dict(sample__name="confidence", sample__block=8), 0.9, 1.5),
        (ORDERED | dict(sample__name="streaming", sample__cached=False), 0.3, 1.0),
        (BLOCKS | dict(sample__name="self_speculative"), 0.9, 3.0),
    ],
    ids=lambda keys: keys["sample__name"] if isinstance(keys, dict) else "",
)
@pytest.mark.cases(2)
def test_the_network_is_counted_in_every_step_and_once(keys, least, most, monkeypatch):
    """Loops within a step run about once, and evaluations that are rarely left out are made.

    Of masks, the head is computed where some are revealed, at fewer positions than in the formula.
    """
    found, traffic = [], plans.traffic
    monkeypatch.setattr(plans, "traffic", lambda *a: found.append(traffic(*a)) or found[-1])
    keys = dict(network__size=64, network__hidden=128, data__length=48, sample__steps=8) | keys
    made = plans._sample(planned.experiment(**keys))
    assert least < found[0].products / made.flops < most


def test_a_sample_beyond_the_window_is_planned_window_by_window():
    """Three windows of 16 tokens; the network has no positions for 32."""
    one = plans._sample(planned.experiment(network__positions=16))
    keys = dict(sample__length=32, sample__stride=8, network__positions=16)
    all_of_them = plans._sample(planned.experiment(**keys))
    assert all_of_them.flops == 3 * one.flops and all_of_them.moved == 3 * one.moved
    assert all_of_them.memory == one.memory


def test_attention_of_a_longer_sample_is_planned_at_its_length():
    experiment = planned.experiment(sample__length=64)
    each = experiment.network.flops(planned.parameters(experiment), 64)
    assert plans._sample(experiment).flops == pytest.approx(4 * 2 * 64 * each)


@pytest.mark.parametrize("keys, there", planned.SEGMENTS)
def test_a_batch_has_segments_where_the_data_have_them(keys, there):
    batch = plans._batch(planned.experiment(**keys), 4)
    assert (list(batch.context) == ["segments"]) == there
    assert all(x.shape == (4, 16) for x in jax.tree.leaves(batch))


@pytest.mark.parametrize("keys, changes, there", planned.LABELS)
def test_a_batch_has_classes_where_the_data_have_them(keys, changes, there):
    """The program that trains reads them: {label: int32 [B]}."""
    batch = plans._batch(planned.experiment(**keys), 4, changes)
    assert ("label" in batch.context) == there
    assert not there or (batch.context["label"].shape, batch.context["label"].dtype) == ((4,), "i4")


def test_an_evaluation_has_sequences_of_its_own_data():
    data = dict(separate_documents=True, length=8)
    batch = plans._batch(planned.experiment(), 4, data)
    assert "segments" in batch.context and batch.tokens.shape == (4, 8)


@pytest.mark.slow
def test_a_training_step_is_compiled_for_a_gpu_that_is_not_there():
    """Where CUDA's libraries are: with cuDNN's kernel, and in one piece."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs pip install 'jax[cuda13]'")
    keys = (
        "data.length=64 network.size=128 network.heads=2 network.depth=3 network.dtype=bfloat16 "
        "network.dropout=0 network.attention_dropout=0 network.embedding_dropout=0 "
        "train.batch_size=4 train.microbatches=1 plan.random_tokens=27 plan.parts=train"
    )
    words = (f"--config.{key}" for key in keys.split())
    command = [sys.executable, "-m", "md4_jax.main", "--config=text8", "--mode=plan", *words]
    run = subprocess.run(
        [*command, "--topology=h100:2"], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert (found["kind"], found["devices"]) == ("NVIDIA H100 80GB HBM3", 2)
    assert found["train"]["temporaries"] > 0 and "all-reduce" in found["train"]["collectives"]
