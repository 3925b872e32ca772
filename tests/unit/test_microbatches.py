"""The number of microbatches that `train.microbatches=0` stands for."""

from types import SimpleNamespace

import pytest

from md4_jax.options import TrainOptions
from md4_jax.training import loop
from md4_jax.training.microbatches import resolved


def experiment(rows, length, asked=0, *, platform="cpu", devices=1, name="transformer"):
    flat = [SimpleNamespace(platform=platform)] * devices
    return SimpleNamespace(
        mesh=SimpleNamespace(devices=SimpleNamespace(size=devices, flat=flat)),
        config={"network": {"name": name}},
        data=SimpleNamespace(length=length),
        train=TrainOptions(batch_size=rows, microbatches=asked, seed=7),
    )


def chosen(*asked, **where) -> int:
    train = resolved(experiment(*asked, **where))
    assert (train.batch_size, train.seed) == (asked[0], 7)
    return train.microbatches


@pytest.mark.parametrize(
    "rows, length, count",
    [
        (16, 256, 4),
        (16, 64, 1),
        (4, 256, 1),
        (12, 256, 3),
        (64, 128, 8),
        (4, 1024, 2),  # of 2 sequences, mirror images of each other
        (2, 1024, 1),
        (15, 1024, 1),
        (10, 256, 1),
    ],
)
def test_a_transformer_on_a_cpu_takes_parts_of_whole_pairs_and_1024_tokens(rows, length, count):
    assert chosen(rows, length) == count


def test_all_others_take_the_batch_whole():
    assert chosen(16, 256, platform="gpu") == chosen(16, 256, platform="tpu") == 1
    assert chosen(16, 256, devices=2) == 1
    assert chosen(16, 256, name="dit") == 1


def test_a_number_that_is_asked_for_is_taken():
    assert chosen(16, 256, asked=1) == 1
    assert chosen(16, 256, asked=8, platform="gpu", devices=2) == 8


def test_the_step_takes_the_number_that_was_chosen(monkeypatch):
    made = []
    monkeypatch.setattr(loop, "make_train_step", lambda *parts, **more: made.append(parts))
    monkeypatch.setattr(loop, "jit", lambda *parts, **more: None)
    parts = experiment(16, 256)
    rate = SimpleNamespace(follows_seconds=False, bounded=True)
    vars(parts).update(network=None, objective=None, optimizer=None, learning_rate=rate)
    loop.step_program(parts, {})
    assert made[0][3].microbatches == 4
