"""The work of a compiled training step, counted, beside the formula."""

import jax
import numpy as np
import planned
import pytest

from md4_jax.config import build, schema
from md4_jax.data.random_tokens import RandomTokens
from md4_jax.objectives.head import CAPACITIES
from md4_jax.perf import bench

pytestmark = pytest.mark.slow

LENGTH, ROWS, SIZE = 64, 8, 64
SYMBOLS = 8192


def step(objective, length=LENGTH, symbols=SYMBOLS, **overrides):
    """(products of the compiled step, the formula's FLOPs without the head)."""
    config = schema.load_config(
        "configs/base.py",
        {
            "network.size": str(SIZE), "network.heads": "2", "network.depth": "2",
            "network.time_conditioning": "False", "data.length": str(length),
            "train.batch_size": str(ROWS), "objective.name": objective,
            "bench.random_tokens": str(symbols), "bench.parts": "train", **overrides,
        },
    )  # fmt: skip
    experiment = build.experiment(config, RandomTokens(symbols), jax.devices()[:1])
    part = bench.MAKERS["train"](experiment, None)
    head = 6.0 * ROWS * length * SIZE * symbols
    return part.flops, part.model - head, head


@pytest.mark.campaign
@pytest.mark.parametrize("scan", ["True", "False"])
def test_the_head_costs_its_smallest_capacity(scan):
    """17/32 of the positions, of the 81% of the formula's step that the head is."""
    flops, trunk, head = step("any_order", **{"network.scan_blocks": scan})
    assert head / (head + trunk) > 0.8
    assert flops == pytest.approx(trunk + CAPACITIES[0] * head, rel=0.03)


def test_where_every_position_counts_so_does_the_head():
    flops, trunk, head = step(
        "autoregressive", **{"network.causal": "True", "sample.name": "left_to_right"}
    )
    assert flops == pytest.approx(trunk + head, rel=0.03)


@pytest.mark.parametrize(
    "length, block, most, shifted",
    [
        (64, 8, 1.0, False),
        *(
            pytest.param(*more, marks=pytest.mark.campaign)
            for more in ((256, 64, 1.0, False), (512, 16, 1.25, False), (64, 8, 1.0, True))
        ),
    ],
)
@pytest.mark.campaign
def test_block_diffusion_computes_what_its_mask_allows(length, block, most, shifted):
    """Both halves of 2 L once, and of their (2 L)^2 scores no more than the allowed ones, where
    tiles are blocks, or those and what fills up tiles: a dense mask has 2 to 4 times as many.
    Sums that are products with ones count too, less than a hundredth."""
    words = {"objective.block": str(block), "sample.block": str(block)}
    words["network.shifted"] = str(shifted)
    flops, trunk, head = step("block", length=length, symbols=127, **words)
    a_score = 12.0 * ROWS * SIZE * length
    # Of a token: of both halves, and in the last layer of one, unless the network is shifted.
    allowed = (4 if shifted else 3) * (length + block) / 2
    scores = (flops - head - trunk) / a_score + allowed
    assert 1.0 - 1e-6 <= scores / allowed <= most + 0.01


@pytest.mark.campaign
def test_a_step_of_a_unet_counts_its_convolutions():
    """Forward, gradients of the pixels, and those of the weights with 16 of 36 products."""
    images = {
        "network.name": "unet", "network.channels": "64", "network.blocks": "1",
        "data.length": str(16 * 16 * 3), "train.batch_size": "2",
    }  # fmt: skip
    config = schema.load_config("configs/base.py", images)
    domain = RandomTokens(256, 16 * 16 * 3, image=True)
    experiment = build.experiment(config, domain, jax.devices()[:1])
    part = bench.MAKERS["train"](experiment, None)
    assert part.flops == pytest.approx(part.model * (2 + 16 / 36) / 3, rel=0.1)


def test_what_is_exact_is_timed_with_one_draw():
    """And a bound with all of its draws."""
    experiment = planned.experiment(**planned.LEFT_TO_RIGHT, evals__test__draws=8)
    assert bench.MAKERS["eval"](experiment, None).tokens == 4 * 16
    experiment = planned.experiment(evals__test__draws=8)
    assert bench.MAKERS["eval"](experiment, None).tokens == 8 * 4 * 16


@pytest.mark.parametrize("keys, there", planned.SEGMENTS)
def test_a_batch_has_segments_where_the_data_have_them(keys, there):
    batch = bench._batch(planned.experiment(**keys), 4)
    assert (list(batch.context) == ["segments"]) == there
    assert all(x.shape == (4, 16) for x in jax.tree.leaves(batch))


@pytest.mark.parametrize("keys, changes, there", planned.LABELS)
def test_a_batch_has_classes_where_the_data_have_them(keys, changes, there):
    """The program that trains reads them: {label: int32 [B]}."""
    batch = bench._batch(planned.experiment(**keys), 4, changes)
    assert ("label" in batch.context) == there
    assert not there or (batch.context["label"].shape, batch.context["label"].dtype) == ((4,), "i4")


def test_an_evaluation_has_sequences_of_its_own_data():
    data = dict(separate_documents=True, length=8)
    batch = bench._batch(planned.experiment(), 4, data)
    assert "segments" in batch.context and batch.tokens.shape == (4, 8)


def test_a_sample_beyond_the_window_is_timed_window_by_window():
    """Three windows of 16 tokens; the network has no positions for 32."""
    keys = dict(sample__length=32, sample__stride=8, network__positions=16)
    experiment = planned.experiment(**keys)
    part = bench.MAKERS["sample"](experiment, None)
    assert part.tokens == 2 * 32 and len(part.call()) == 3
    # 4 steps for 16 tokens, and for each window of 8 new ones; some of them reveal none.
    assert 5 < part.evaluations <= 3 * 4
    params = planned.parameters(experiment)
    each = experiment.network.flops(params, 16)
    assert part.model == pytest.approx(part.evaluations * 2 * 16 * each)


def test_attention_of_a_longer_sample_is_counted_at_its_length():
    experiment = planned.experiment(sample__length=64)
    part = bench.MAKERS["sample"](experiment, None)
    each = experiment.network.flops(planned.parameters(experiment), 64)
    assert part.model == pytest.approx(part.evaluations * 2 * 64 * each)


def test_evaluations_of_a_window_are_counted_as_they_were():
    """Each reads twice the window, and there are as many as the network asks for."""
    keys = dict(objective__name="wedlm", sample__name="streaming", sample__width=3)
    experiment = planned.experiment(**keys, sample__limit=2.0)
    part = bench.MAKERS["sample"](experiment, None)
    each = experiment.network.flops(planned.parameters(experiment), 16)
    rows = part.tokens // 16
    assert 1 <= part.evaluations <= 16
    assert part.model == pytest.approx(part.evaluations * rows * 2 * 3 * each)


def test_a_process_makes_its_rows_of_a_batch(monkeypatch):
    """The last two of four, as one of two processes."""
    experiment = planned.experiment()
    whole = jax.device_get(bench._batch(experiment, 4).tokens)
    monkeypatch.setattr(bench, "local_rows", lambda mesh, size: np.arange(size // 2, size))
    monkeypatch.setattr(bench, "to_global", lambda tree, mesh: tree)
    np.testing.assert_array_equal(bench._batch(experiment, 4).tokens, whole[2:])


def test_processes_call_a_program_equally_often(monkeypatch):
    """As often as the fastest of them needs; one call more tells how long it takes."""
    calls = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(bench, "max_over_processes", lambda count: 7)
    assert bench.window(lambda: calls.append(1), 1e-9) > 0
    assert len(calls) == 1 + 7


@pytest.mark.parametrize(
    "objective, options, both",
    [
        ("wedlm", {"block_size": "8", "left_to_right": "1.0"}, True),
        ("wedlm", {"block_size": "8", "left_to_right": "0.0"}, False),
        ("eso_orders", {}, False),
    ],
)
@pytest.mark.cases(1)
def test_objectives_in_an_order_read_noisy_symbols_and_clean_text(objective, options, both):
    """Both halves of 2 L once, but the last layer of one if the other is not predicted. The masks
    allow about half of the scores of L tokens, and the program computes (2 L)^2."""
    words = {f"objective.{key}": value for key, value in options.items()}
    words |= {"sample.name": "eso" if objective == "eso_orders" else "streaming"}
    words |= {"network.local_width": "0", "network.head_bias": "False"}
    flops, trunk, head = step(objective, symbols=127, **words)
    block, layers = int(options.get("block_size", 1)), 4 if both else 3
    a_score = 12.0 * ROWS * SIZE * LENGTH
    scores = trunk - a_score * layers * (LENGTH + block) / 2 + a_score * layers * 2 * LENGTH
    assert flops == pytest.approx(scores + head, rel=0.03)
