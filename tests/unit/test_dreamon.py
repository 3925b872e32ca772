"""Training loss of gaps that get longer and shorter: what is masked, merged and predicted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import INSTANCES
from tiny_networks import built

import md4_jax
from md4_jax.data.tokenizers import Characters, from_json
from md4_jax.objectives.dreamon import DreamOn, Gap, Lesson
from md4_jax.processes.resizing import Resizing
from md4_jax.protocols import Denoiser, UserError, batch_of

LESSONS = json.loads((INSTANCES / "dreamon.json").read_text())["lessons"]
EXPAND, DELETE, MASK, ABSENT = 3, 4, 5, 6
PROCESS = Resizing(5)


def keys_of(count: int):
    return jax.random.split(jax.random.key(1), count)


@pytest.mark.parametrize("lesson", LESSONS)
def test_gaps_are_masked_and_merged_as_dreamons_code_does(lesson):
    """A text 1 GAP 2, of which only the gap may change: counts of all that may become of it."""
    n, ids = lesson["draws"], np.array(lesson["gap"])
    letters = ids[ids != DELETE]
    x = np.concatenate([[1], letters, [2, 0, 0, 0]])
    inside = (np.arange(len(x)) > 0) & (np.arange(len(x)) <= len(letters))
    end = np.array([1 + len(letters)])
    gap = Gap(*(jnp.asarray(a) for a in (inside[None], end, [len(ids) - len(letters)])))
    batch = batch_of(x[None])

    @jax.jit
    def draw(keys):
        ratio = jnp.array([lesson["ratio"]])
        one = lambda key: DreamOn().lesson(PROCESS, batch, gap, ratio, key[None])  # noqa: E731
        return jax.tree.map(lambda a: a[:, 0], jax.vmap(one)(keys))

    z, targets = (np.asarray(a) for a in draw(keys_of(n)))
    found: dict[str, int] = {}
    for row, wanted in zip(z, targets, strict=True):
        held = row[row != ABSENT]
        wanted = np.where(row == MASK, wanted, row)[: len(held)]
        until = len(held) - 1 - np.argmax(held[::-1] == 2)  # the 2 behind the gap, not one in it
        assert held[0] == 1 and until >= 1
        name = "".join(map(str, held[1:until])) + " " + "".join(map(str, wanted[1:until]))
        found[name] = found.get(name, 0) + 1
    for name in found.keys() | lesson["counts"].keys():
        one, other = found.get(name, 0), lesson["counts"].get(name, 0)
        assert abs(one - other) < 5 * np.sqrt(one + other) + 1, name


def test_a_gap_is_a_random_part_with_tokens_on_either_side():
    """Of the tokens that count; the numbers of masks behind it are uniform up to the room."""
    n = 8000
    x, counts = np.zeros((n, 8), int), np.zeros((n, 8), bool)
    counts[:, 2:6] = True
    x[:, 4] = np.arange(n) % 2 * DELETE
    gap = DreamOn(most_deleted=2).gap(PROCESS, batch_of(x, loss_mask=counts), keys_of(n))
    inside = np.asarray(gap.inside)
    assert not inside[1::2, 4].any()
    pairs, shares = np.unique(inside[::2], axis=0, return_counts=True)
    # Starts at the second or the third of four; ends before the last.
    law = {(3, 4): 0.25, (3, 5): 0.25, (4, 5): 0.5}
    for row, share in zip(pairs, shares, strict=True):
        span = np.flatnonzero(row)[[0, -1]] + [0, 1]
        assert abs(share / (n / 2) - law[tuple(span)]) < 4 * np.sqrt(0.25 / (n / 2))
    assert (
        len(pairs) == 3
        and (
            np.asarray(gap.end)[::2] == [r[-1] + 1 for r in map(np.flatnonzero, inside[::2])]
        ).all()
    )
    shares = np.bincount(np.asarray(gap.deleted), minlength=3) / n
    np.testing.assert_allclose(shares, 1 / 3, atol=4 * np.sqrt(2 / 9 / n))
    full = DreamOn(most_deleted=9).gap(PROCESS, batch_of(np.zeros((n, 3), int)), keys_of(n))
    assert set(np.asarray(full.end)) == {2} and set(np.asarray(full.deleted)) == {0, 1}
    none = DreamOn().gap(PROCESS, batch_of(x, loss_mask=counts & False), keys_of(n))
    assert not np.asarray(none.inside).any() and not np.asarray(none.deleted).any()


def test_the_loss_of_given_masks():
    """Numbers of a table of probabilities, added up by hand."""
    p = np.array([0.4, 0.2, 0.1, 0.2, 0.1])
    logits = jnp.log(jnp.asarray(p, jnp.float32))
    plain = Denoiser(lambda z, t: jnp.broadcast_to(logits, (*z.shape, 5)), lambda h: h)
    denoiser = plain._replace(within=lambda segments: plain)
    z = jnp.array([[1, 5, 5, 5, 5, 2], [1, 5, 0, 2, 6, 6]])
    targets = jnp.array([[1, 3, 0, 4, 4, 2], [1, 2, 0, 2, 0, 0]])
    found = DreamOn(deletions=0.5).nats(denoiser, PROCESS, Lesson(z, targets), jnp.zeros(2))
    first = -np.log(0.2) - np.log(0.4) - 0.5 * np.log(0.1)
    np.testing.assert_allclose(found, [first, -np.log(0.1)], rtol=1e-5)


def test_what_is_hidden_changes_nothing():
    """The network sees the text alone."""
    network, params = built(time_conditioning=False)
    z, targets = np.array([[1, 5, 5, 2]] * 2), np.array([[1, 3, 0, 2]] * 2)
    behind = np.array([[0, 0], [1, 2]])
    longer = Lesson(
        np.pad(z, ((0, 0), (0, 2)), constant_values=ABSENT),
        np.concatenate([targets, behind], axis=1),
    )

    @jax.jit
    def cost(params, lesson):
        return DreamOn().nats(network.bind(params), PROCESS, lesson, jnp.zeros(2))

    alone = cost(params, Lesson(z, targets))
    np.testing.assert_allclose(cost(params, longer), alone, rtol=1e-4)


def test_late_times_weigh_less_and_it_is_no_likelihood():
    """By 1 - r, which is what is left of the cost of all masks of the same gaps."""
    flat = Denoiser(lambda z, t: jnp.zeros((*z.shape, 5)), lambda h: h)
    flat = flat._replace(within=lambda segments: flat)
    batch, keys = batch_of(jnp.array([[1, 0, 2, 2, 0, 1]] * 40)), keys_of(40)
    objective = DreamOn(merge=0.0, most_deleted=0)
    for ratio in (0.25, 0.75, 1.0):
        loss, extra = objective(flat, PROCESS, batch, jnp.full(40, ratio), keys)
        masks = 6 * np.asarray(extra["masked"])
        assert masks.any()
        np.testing.assert_allclose(loss, (1 - ratio) * masks * np.log(5), rtol=1e-5)
        assert not np.any(extra["deletions"]) and not np.any(extra["expansions"])
    assert not objective.is_bound(PROCESS)
    with pytest.raises(UserError, match="DreamOn cannot be audited: its texts change their length"):
        md4_jax.audit(objective, PROCESS)


@pytest.mark.parametrize("options", [dict(merge=1.5), dict(deletions=-1), dict(most_deleted=-1)])
def test_wrong_options_are_refused(options):
    with pytest.raises(UserError, match=f"objective.{next(iter(options))} must"):
        DreamOn(**options)


def test_characters_may_have_spare_ids():
    """They are no characters, and files of tokenizers without them stay what they were."""
    plain, more = Characters("ab"), Characters("ab", spare=2)
    assert (plain.vocab_size, more.vocab_size) == (2, 4)
    assert more.decode([0, 2, 1, 3, 4]) == "ab_" and more.encode("ab").tolist() == [0, 1]
    assert "spare" not in plain.to_json() and from_json(more.to_json()) == more
    assert Characters(spare=2).fit(["ba"]) == more
    with pytest.raises(UserError, match="the alphabet of 2 characters"):
        more.encode("c")
    with pytest.raises(UserError, match="tokenizer.spare must not be negative"):
        Characters("ab", spare=-1)
