"""Eso-LM: a bound of diffusion and left to right, one order for all, and sampling with a cache."""

import functools
import itertools
import json
import math
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import INSTANCES, peer_folder
from safetensors.numpy import load_file
from tiny_networks import built

import md4_jax
from configs import networks
from md4_jax.config import build, schema
from md4_jax.evals.path import Path
from md4_jax.model import continuations
from md4_jax.networks import published
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.eso import Eso, EsoOrders
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Ordered, Prompt, UserError, batch_of
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.samplers import eso, loop
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.guidance import both, combined

V, L, MASK = 2, 3, 2
X = exact.sequences(V, L)
ORDERS = [np.array(order) for order in itertools.permutations(range(L))]
DRAWS = 1 << 15
ENTRIES = np.random.default_rng(0).normal(size=(V + 1, L, L, L, V)).astype(np.float32)


def toy() -> Denoiser:
    """Logits that depend on all that a position may see: symbols, their places and their ranks."""

    def outputs(symbols, place, rank, asked, seen):
        each = jnp.asarray(ENTRIES)[symbols[:, None], place[:, None], rank[:, None], asked]
        return jnp.sum(jnp.where(seen[..., None], each, 0.0), axis=2)

    here = jnp.arange(L)
    asked = here[None, :, None]

    def features(z, t, rank, index=None):
        h = outputs(z, here[None] + 0 * z, rank, asked, rank[:, :, None] >= rank[:, None])
        return h if index is None else jnp.take_along_axis(h, index[..., None], axis=1)

    def predictions(x, t, rank, round):
        before, now = (f(round[:, None], round[:, :, None]) for f in (jnp.less, jnp.equal))
        masks = now & (rank[:, :, None] >= rank[:, None])
        place = here[None] + 0 * x
        of_clean = outputs(x, place, rank, asked, before)
        return of_clean + outputs(jnp.full_like(x, MASK), place, rank, asked, masks)

    return Denoiser(
        lambda z, t: None, lambda h: h, ordered=Ordered(features, predictions, None, None)
    )


def nats(x, order, clean: int, position: int) -> float:
    """-log of x at a position, given the first `clean` tokens of the order and masks after them."""
    logits = np.zeros(V)
    for rank, place in enumerate(order):
        logits += ENTRIES[x[place] if rank < clean else MASK, place, rank, position]
        if place == position:
            break
    return float(np.log(np.exp(logits).sum()) - logits[x[position]])


def sets(size: int):
    return itertools.combinations(range(L), size)


def diffusion(x, alpha_0: float) -> float:
    """The first term, written out: masks with probability m in (1 - alpha_0, 1), all orders."""
    points, weights = exact.quadrature(1.0 - alpha_0, 1.0)
    total = 0.0
    for clean in range(L):
        share = float(weights @ (points ** (L - clean - 1) * (1.0 - points) ** clean))
        for chosen in sets(clean):
            fits = [o for o in ORDERS if set(o[:clean]) == set(chosen)]
            each = [sum(nats(x, o, clean, n) for n in o[clean:]) for o in fits]
            total += share * np.mean(each)
    return total


def chains(x, alpha_0: float) -> list[tuple[float, float, float]]:
    """(probability, nats of all tokens, nats of those from left to right) of each order."""
    found = []
    for first in range(L + 1):
        for chosen in sets(first):
            chance = alpha_0**first * (1.0 - alpha_0) ** (L - first) / math.factorial(first)
            rest = [n for n in range(L) if n not in chosen]
            for begin in itertools.permutations(chosen):
                order = np.array([*begin, *rest])
                each = [nats(x, order, k, order[k]) for k in range(L)]
                found.append((chance, sum(each), sum(each[first:])))
    return found


@functools.cache
def drawn(objective) -> tuple[np.ndarray, np.ndarray]:
    """Means of an objective of the toy for every sequence, with standard errors."""
    u = (np.arange(DRAWS) + 0.5) / DRAWS

    @jax.jit
    def one(x, keys):
        rows = batch_of(jnp.broadcast_to(x, (DRAWS, L)))
        return objective(toy(), Masking(V), rows, jnp.asarray(u, jnp.float32), keys)[0]

    each = np.stack([np.asarray(one(x, exact.keys_for(i, DRAWS))) for i, x in enumerate(X)])
    return each.mean(axis=1), each.std(axis=1) / math.sqrt(DRAWS)


def near(found, wanted) -> None:
    mean, error = found
    assert (np.abs(mean - wanted) < 4.5 * error + 1e-5).all(), (mean, wanted, error)


@pytest.mark.parametrize("alpha_0, split", [(0.4, 0.3), (1.0, 0.5)])
def test_the_bound_is_what_the_sums_say(alpha_0, split):
    """All patterns and orders by hand; with alpha_0 = 1 that is masked diffusion's bound."""
    wanted = [diffusion(x, alpha_0) + sum(p * rest for p, _, rest in chains(x, alpha_0)) for x in X]
    near(drawn(Eso(alpha_0, split)), np.array(wanted))


@pytest.mark.parametrize("alpha_0", [0.4, 1.0])
def test_the_likelihood_of_one_order_is_what_the_sums_say(alpha_0):
    wanted = [sum(p * all_ for p, all_, _ in chains(x, alpha_0)) for x in X]
    near(drawn(EsoOrders(alpha_0)), np.array(wanted))


@pytest.mark.campaign
def test_many_orders_come_near_the_likelihood():
    """Their value lies between -log of the mean and the mean of -log, and sums to 1 at most."""
    found = [chains(x, 0.4) for x in X]
    exactly = np.array([-math.log(sum(p * math.exp(-n) for p, n, _ in each)) for each in found])
    assert np.exp(-exactly).sum() == pytest.approx(1.0)
    one, many = drawn(EsoOrders(0.4)), drawn(EsoOrders(0.4, 8))
    assert (many[0] > exactly - 4.5 * many[1]).all()
    assert (many[0] - exactly < 0.35 * (one[0] - exactly) + 4.5 * many[1]).all()


@pytest.mark.slow
def test_without_diffusion_it_is_the_autoregressive_loss():
    wanted = [sum(nats(x, np.arange(L), n, n) for n in range(L)) for x in X]
    batch, u, keys = batch_of(jnp.asarray(X)), jnp.zeros(len(X)), exact.keys_for(0, len(X))
    for objective in (Eso(0.0), EsoOrders(0.0), Path(eso.Eso(0.0), tuple(uniform(2)))):
        found = objective(toy(), Masking(V), batch, u, keys)[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert Eso(0.0).is_exact(None) and EsoOrders(0.0).is_exact(None)


def test_a_right_denoiser_reaches_the_entropy():
    """Each order then has the same likelihood, and the bound's mean is that."""
    p = np.random.default_rng(1).dirichlet(np.ones(V**L)).reshape((V,) * L)
    denoiser = exact.denoiser_of(exact.perfect_logits(p))
    batch, keys = batch_of(jnp.asarray(X)), exact.keys_for(0, len(X))
    for alpha_0 in (0.0, 0.4, 1.0):
        found = EsoOrders(alpha_0)(denoiser, Masking(V), batch, jnp.zeros(len(X)), keys)[0]
        np.testing.assert_allclose(found, -np.log(p).ravel(), rtol=1e-5)
    rows = np.random.default_rng(2).choice(len(X), 4096, p=p.ravel())
    u = jnp.asarray((np.arange(len(rows)) + 0.5) / len(rows), jnp.float32)
    run = jax.jit(lambda x, k: Eso(0.4)(denoiser, Masking(V), batch_of(x), u, k)[0])
    each = np.asarray(run(jnp.asarray(X[rows]), exact.keys_for(3, len(rows))))
    entropy = -float((p * np.log(p)).sum())
    assert abs(each.mean() - entropy) < 4.5 * each.std() / 64


def test_samples_have_the_likelihood_of_one_order():
    """With a step for each token: the law whose bound is reported, and not that of the loss."""
    count, step = 1 << 15, eso.Eso(0.4, cached=False)
    run = jax.jit(
        lambda k: (
            loop.sample(
                toy(), Masking(V), step, grid=uniform(4096), keys=k, prompt=loop.no_prompt(count, L)
            )[0].z
        )
    )
    drawn = np.asarray(run(exact.keys_for(5, count)))
    found = np.bincount(drawn @ V ** np.arange(L)[::-1], minlength=V**L) / count
    law = np.array([sum(p * math.exp(-n) for p, n, _ in chains(x, 0.4)) for x in X])
    assert (np.abs(found - law) < 4.5 * np.sqrt(law / count)).all()


def answers() -> tuple[dict, Denoiser]:
    """What s-sahoo/Eso-LMs answers with MDLM's tiny parameters, and our network with them."""
    told = json.loads((INSTANCES / "esolm.json").read_text())
    sizes = dict(vocab_size=11, size=32, depth=2, heads=2, condition=16)
    options = Transformer(**networks.DIT | sizes, scan_blocks=False)
    params = published.from_dit(load_file(INSTANCES / "mdlm.safetensors"), options)
    return told, options.build().bind(params)


def rank_of(order) -> jnp.ndarray:
    return jnp.argsort(jnp.asarray(order), axis=1)


def test_published_code_says_the_same():
    """Both passes of its training, the costs of the tokens, and its cached evaluations."""
    told, denoiser = answers()
    x, zeros = jnp.asarray(told["x"]), jnp.zeros(3)

    def close(h, part):
        found = np.asarray(jax.nn.log_softmax(denoiser.unembed(h)))
        masked = np.asarray(part["z"]) == 11
        assert masked.sum() > 20
        wanted = np.asarray(part["log_p"])
        np.testing.assert_allclose(found[masked], wanted[masked], atol=2e-5, rtol=0)

    part = told["diffusion"]
    close(denoiser.ordered.features(jnp.asarray(part["z"]), zeros, rank_of(part["order"])), part)
    masked = np.asarray(part["z"]) == 11
    round = jnp.asarray(masked, jnp.int32)
    close(denoiser.ordered.predictions(x, zeros, rank_of(part["order"]), round), part)
    # Its weight is that of the noise, and ours that of the masks, of the same mean.
    arguments = denoiser, Masking(11), batch_of(x), jnp.asarray(part["z"])
    mine = Eso(0.25).loss_at(*arguments, rank_of(part["order"]), jnp.ones(3, bool))
    share = 16 * (1 - np.asarray(part["alpha"])) / masked.sum(axis=1)
    theirs = np.asarray(part["nats"]).sum(axis=1) * 0.25 / -told["dalpha"]
    np.testing.assert_allclose(mine, theirs * share, rtol=1e-4)
    part = told["sequential"]
    rank = rank_of(part["order"])
    close(denoiser.ordered.predictions(x, zeros, rank, rank), part)
    z = jnp.asarray(part["z"])
    mine = Eso(0.25).loss_at(*arguments[:3], z, rank, jnp.zeros(3, bool))
    np.testing.assert_allclose(mine, np.asarray(part["nats"]).sum(axis=1), rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.cases(1)
def test_its_likeliest_samples_are_drawn(cached, monkeypatch):
    """In its order and its steps, at a temperature of 0."""
    told, denoiser = answers()
    part = told["samples"]
    order, counts = np.asarray(part["order"]), part["counts"]
    round = np.take(np.repeat(np.arange(len(counts)), counts), np.asarray(rank_of(order)))
    schedule = eso.RevealSchedule(jnp.asarray(round), jnp.zeros((3, 16)), rank_of(order))
    monkeypatch.setattr(eso.Eso, "schedule", lambda *_: schedule)
    step = eso.Eso(0.25, cached, eso.Transform(temperature=0.0))
    chain, _ = loop.sample(
        denoiser, Masking(11), step,
        grid=uniform(3), keys=exact.keys_for(0, 3), prompt=loop.no_prompt(3, 16),
    )  # fmt: skip
    np.testing.assert_array_equal(chain.z, part["tokens"])
    assert (np.asarray(chain.evaluations) == len(counts)).all()
    chances = jax.nn.softmax(jnp.asarray(part["logits"])).max(axis=-1)
    np.testing.assert_allclose(chain.confidence, chances, atol=1e-5)


def test_a_published_folder_is_read_and_written(tmp_path):
    """Its bound is that of its network; a model trained here goes into the same layout."""
    model = md4_jax.load(peer_folder(tmp_path, "esolm"))
    assert model.config["objective"] == {"name": "eso", "alpha_0": 0.25}
    assert model.experiment.sampler_step == eso.Eso(0.25)
    with pytest.raises(UserError, match="predicts tokens in an order that is drawn"):
        model.logits([0] * 16)
    with pytest.raises(UserError, match="objective.name='any_order' evaluates .* on whole texts"):
        model.score("ab", objective="any_order")
    with pytest.raises(UserError, match="trained on tokens in a random order: remove likelihood"):
        continuations.objective_of(model, "chain_rule")
    with pytest.raises(UserError, match="guidance=2 also predicts with the context replaced"):
        continuations.guidance_of(model, 2)
    other = md4_jax.load(peer_folder(tmp_path, "mdlm"))
    with pytest.raises(UserError, match="evaluates the network on tokens in a random order"):
        other.score("ab", objective="eso_orders")
    saved = model.save(tmp_path / "saved")
    (saved / "layout.json").unlink()
    changed = md4_jax.load(saved, {"objective.alpha_0": 0.5})
    exported = changed.export(tmp_path / "exported")
    told = json.loads((exported / "config.json").read_text())
    assert (told["model_type"], told["alpha_0"], told["hidden_dim"]) == ("esolm", 0.5, 32)
    ours, theirs = (load_file(x / "model.safetensors") for x in (exported, tmp_path / "esolm"))
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {f"backbone.output_layer.linear.{x}" for x in ("weight", "bias")}:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-7)  # inv_freq is rounded
    whole = {"objective.name": "any_order", "sample.name": "ancestral"}
    with pytest.raises(UserError, match="the model has objective.name='any_order'"):
        md4_jax.load(tmp_path / "esolm", whole).export(tmp_path / "again")


def config(**sections) -> dict:
    told = {f"{section}.name": name for section, name in sections.items()}
    told = {key.replace("__", "."): value for key, value in told.items()}
    words = {"network.time_conditioning": "False", "objective.alpha_0": "0.25"}
    return schema.load_config(str(PACKAGE_ROOT / "configs" / "base.py"), told | words)


ANY = {"vocab_size": 5, "eot_id": None, "unit": "character", "shape": (256,)}


def test_sampler_and_bound_are_those_of_the_training():
    """The share of diffusion too, unless it is given."""
    found = config(objective="eso", sample="eso")
    experiment = build.experiment(found, types.SimpleNamespace(**ANY))
    assert experiment.sampler_step == eso.Eso(0.25)
    assert experiment.evals["test"].objective == EsoOrders(0.25)
    found["sample"]["alpha_0"], found["sample"]["cached"] = 1.0, False
    found["evals"]["test"]["objective"] = {"name": "eso_orders", "orders": 4}
    found["evals"]["validation"]["objective"] = {"name": "eso"}
    experiment = build.experiment(found, types.SimpleNamespace(**ANY))
    assert experiment.sampler_step == eso.Eso(1.0, False)
    assert experiment.evals["test"].objective == EsoOrders(0.25, 4)
    assert experiment.evals["validation"].objective == EsoOrders(0.25)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"network.time_conditioning": True}, "needs network.time_conditioning=False, not True"),
        ({"network.causal": True}, "network.causal=False"),
        ({"network.local_width": 3}, "needs network.local_width=0, not 3"),
        ({"sample.name": "ancestral"}, "'ancestral' evaluates the network on whole texts"),
        ({"evals.test.objective": {"name": "any_order"}}, "set evals.test.objective.name='eso_o"),
        ({"objective": {"name": "md4"}}, "'eso' evaluates the network on tokens in a random"),
        ({"sample.guidance": 2.0, "sample.prompt": "a"}, "sample.name='eso' always reads"),
    ],
)
def test_what_does_not_go_together(changes, said):
    found = config(objective="eso", sample="eso")
    for key, value in changes.items():
        *path, last = key.split(".")
        functools.reduce(lambda section, name: section[name], path, found)[last] = value
    with pytest.raises(UserError, match=said):
        build.experiment(found, types.SimpleNamespace(**ANY))


ROWS, LENGTH = 3, 10
TEXT = np.random.default_rng(4).integers(0, 5, (ROWS, LENGTH)).astype(np.int32)
GIVEN = np.arange(LENGTH) % 4 == np.arange(ROWS)[:, None]


@functools.cache
def samples(step, steps: int, guided: bool = False):
    network, params = built(Transformer, time_conditioning=False, kv_heads=1, depth=1)

    def run(params, keys, given):
        denoiser = network.bind(params)
        if guided:
            join = functools.partial(combined, weight=1.7)
            denoiser = both(denoiser, denoiser, join)
        prompt = Prompt(jnp.asarray(TEXT), given)
        return loop.sample(
            denoiser, Masking(5), step, grid=uniform(steps), keys=keys, prompt=prompt, trace=1
        )

    return lambda given: jax.jit(run)(params, exact.keys_for(1, ROWS), given)


@pytest.mark.quick(1)
@pytest.mark.parametrize("alpha_0, steps", [(0.0, 4), (0.5, 2), (1.0, 2)])
@pytest.mark.parametrize("few", [2, LENGTH])
@pytest.mark.cases(1)
def test_the_cache_changes_no_sample(alpha_0, steps, few, monkeypatch):
    """Also behind prompts, and with a step of more tokens than the smaller program takes."""
    monkeypatch.setattr(eso.reveal, "independent_capacity", lambda *_: few)
    with_cache = samples.__wrapped__(eso.Eso(alpha_0), steps)
    for given in (GIVEN, np.zeros_like(GIVEN)):
        (chain, frames), (plain, others) = (
            run(given) for run in (with_cache, samples(eso.Eso(alpha_0, False), steps))
        )
        np.testing.assert_array_equal(chain.z, plain.z)
        np.testing.assert_array_equal(chain.evaluations, plain.evaluations)
        np.testing.assert_array_equal(frames.z, others.z)
        np.testing.assert_allclose(chain.confidence, plain.confidence, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(chain.z)[given], TEXT[given])
        free = (~given).sum(axis=1)
        most = {0.0: free, 1.0: np.minimum(free, steps)}.get(alpha_0, free)
        assert (np.asarray(chain.evaluations) <= most).all() and (np.asarray(chain.z) < 5).all()


def test_the_cache_does_not_show_padding():
    """Other tokens there, in a segment of their own, change no probability of a drawn token."""
    network, params = built(Transformer, time_conditioning=False, kv_heads=1, depth=1)
    inside = np.broadcast_to(np.arange(LENGTH) < LENGTH - 3, TEXT.shape)
    told = {"segments": jnp.where(inside, 0, -1)}

    @jax.jit
    def run(tokens):
        prompt = Prompt(tokens, jnp.asarray(GIVEN | ~inside))
        keys = exact.keys_for(1, ROWS)
        return loop.sample(
            network.bind(params, told), Masking(5), eso.Eso(0.5), grid=uniform(2), keys=keys,
            prompt=prompt,
        )[0]  # fmt: skip

    one, other = (run(jnp.asarray(x)) for x in (TEXT, np.where(inside, TEXT, (TEXT + 1) % 5)))
    np.testing.assert_array_equal(one.z[inside], other.z[inside])
    np.testing.assert_allclose(one.confidence[inside], other.confidence[inside], atol=1e-6)


@pytest.mark.slow
def test_two_networks_side_by_side_have_a_cache_each():
    given = np.zeros_like(GIVEN)
    found = samples(eso.Eso(0.5), 2, guided=True)(given)[0]
    np.testing.assert_array_equal(found.z, samples(eso.Eso(0.5), 2)(given)[0].z)


def test_prompts_come_first_and_cost_nothing():
    """From left to right where no random order is known."""
    batch = batch_of(jnp.asarray(TEXT), loss_mask=~GIVEN)
    diffused = jnp.asarray([True, False, True])
    z, rank = Eso(0.5).noised(
        Masking(5), batch, jnp.asarray([0.7, 1.0, 0.1]), exact.keys_for(0, ROWS), diffused
    )
    rank, masks = np.asarray(rank), np.asarray(z) == 5
    for row in range(ROWS):
        assert set(rank[row][GIVEN[row]]) == set(range(GIVEN[row].sum()))
        assert rank[row][masks[row]].min() == LENGTH - masks[row].sum()
    assert (np.diff(rank[1][masks[1]]) == 1).all() and not (np.diff(rank[0][masks[0]]) > 0).all()
    assert masks.any(axis=1).all() and not masks[GIVEN].any()
    _, rank = Eso(0.0).noised(
        Masking(5), batch, jnp.ones(ROWS), exact.keys_for(0, ROWS), jnp.zeros(ROWS, bool)
    )
    assert (np.diff(np.asarray(rank)[0][GIVEN[0]]) == 1).all()


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Eso(1.5), "objective.alpha_0 must lie in"),
        (lambda: Eso(0.5, 1.0), "objective.split must lie between 0 and 1, not 1.0"),
        (lambda: EsoOrders(-0.1), "objective.alpha_0 must lie in"),
        (lambda: EsoOrders(orders=0), "objective.orders must be at least 1"),
        (lambda: eso.Eso(2.0), "sample.alpha_0 must lie in"),
    ],
)
def test_wrong_options(make, said):
    with pytest.raises(UserError, match=said):
        make()
