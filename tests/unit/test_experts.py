"""Feed-forward layers of experts: what they compute, their gradients, and what the router does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from several_devices import on_eight_devices
from tiny_networks import T, Z, built, logits, perturbed, random_parameters

from md4_jax.networks import experts, grouped, routing
from md4_jax.networks.adapters import merged
from md4_jax.networks.layers import whole
from md4_jax.networks.transformer import Transformer
from md4_jax.options import MeshOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.mesh import make_mesh
from md4_jax.runtime.sharding import path_name, shardings_of

SIZE, EXPERTS, TAKEN = 8, 6, 2
PLAIN = Transformer(
    5, size=SIZE, depth=2, heads=2, hidden=12, experts=EXPERTS, experts_per_token=TAKEN,
    time_conditioning=False, initial="torch",
)  # fmt: skip
# As in LLaDA2: a sigmoid, a bias for the choice, groups, and a layer for all tokens.
GROUPED = dataclasses.replace(
    PLAIN, router="sigmoid", router_bias=True, router_normalised=True, router_scale=2.5,
    router_groups=3, router_groups_taken=2, shared_hidden=10, expert_hidden=7,
)  # fmt: skip
KEYS = dict(
    experts=4, expert_hidden=12, shared_hidden=8, router_bias=True, time_conditioning=False,
    depth=3, dense_layers=1,
)  # fmt: skip


# Nothing is dropped, and all positions are needed.
AS_IT_IS = None, 0, whole


def layer(options, x) -> tuple[experts.Experts, dict]:
    """The layer, with noise on all parameters."""
    module = experts.Experts(options.resolved("cpu"), False)
    params = perturbed(module.init(jax.random.key(0), x, *AS_IT_IS)["params"])
    return module, params


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (silu(x @ gate) * (x @ up)) @ down


def chosen(options, scores: np.ndarray, bias: np.ndarray) -> list[int]:
    """The experts of one token, by the definition of groups, in order."""
    ranked = scores + bias
    groups = np.split(np.arange(options.experts), options.router_groups)
    best = [sum(sorted(ranked[group])[-2:]) for group in groups]
    order = sorted(range(len(groups)), key=lambda g: -best[g])
    is_open = [e for g in order[: options.router_groups_taken] for e in groups[g]]
    if options.router_groups == 1:
        is_open = list(range(options.experts))
    return sorted(is_open, key=lambda e: -ranked[e])[: options.experts_per_token]


def by_hand(options, params: dict, x: np.ndarray) -> np.ndarray:
    """The layer token by token and expert by expert, in float64."""
    p = {path_name(k): np.asarray(v, np.float64) for k, v in jax.tree.leaves_with_path(params)}
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        told = x[place] @ p["router/kernel"]
        if options.router == "sigmoid":
            scores = 1.0 / (1.0 + np.exp(-told))
        else:
            scores = np.exp(told) / np.exp(told).sum()
        taken = chosen(options, scores, p.get("router/bias", np.zeros(options.experts)))
        total = scores[taken].sum() if options.router_normalised else 1.0
        for e in taken:
            own = (p[f"experts_{name}/kernel"][e] for name in ("gate", "up", "down"))
            out[place] += options.router_scale * scores[e] / total * gated(x[place], *own)
        if options.shared_hidden:
            own = (p[f"shared/{name}/kernel"] for name in ("gate", "up", "down"))
            out[place] += gated(x[place], *own)
    return out


@pytest.mark.parametrize("options", [PLAIN, GROUPED], ids=["softmax", "groups"])
@pytest.mark.cases(1)
def test_a_layer_is_the_weighted_sum_of_the_experts_that_are_chosen(options):
    x = np.random.default_rng(1).normal(size=(3, 7, SIZE)).astype(np.float32)
    module, params = layer(options, x)
    found = jax.jit(lambda params: module.apply({"params": params}, x, *AS_IT_IS))(params)
    np.testing.assert_allclose(found, by_hand(options, params, x.astype(np.float64)), atol=2e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [PLAIN, GROUPED], ids=["softmax", "groups"])
def test_gradients_are_those_of_a_sum_over_all_experts(options):
    """In which experts that are not chosen have the weight 0."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, SIZE)), jnp.float32)
    slope = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), jnp.float32)
    module, params = layer(options, x)
    router = experts.Router(options.resolved("cpu"))

    def dense(params, x):
        _, weights, index = router.apply({"params": params["router"]}, x)
        spread = jnp.sum(jax.nn.one_hot(index, options.experts) * weights[..., None], axis=-2)
        kernels = [params[f"experts_{name}"]["kernel"] for name in ("gate", "up", "down")]
        each = [jnp.einsum("bld,edf->blef", x, kernel) for kernel in kernels[:2]]
        out = jnp.einsum("blef,efd,ble->bld", jax.nn.silu(each[0]) * each[1], kernels[2], spread)
        if options.shared_hidden:
            gate, up, down = (params["shared"][n]["kernel"] for n in ("gate", "up", "down"))
            out = out + (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return jnp.sum(out * slope)

    def ours(params, x):
        return jnp.sum(module.apply({"params": params}, x, *AS_IT_IS) * slope)

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(params, x) for f in (ours, dense))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)
    for path, x in jax.tree.leaves_with_path(found[0]):
        assert np.any(x) == (path_name(path) != "router/bias"), path_name(path)


SPREADS = {"one": [0, 9, 0, 0], "none": [3, 0, 0, 6], "even": [2, 3, 2, 2], "many": [70, 0, 1, 300]}


@pytest.mark.quick(3)
@pytest.mark.parametrize("form", ["cpu", "cuda", "default"])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.cases(6)
def test_each_row_meets_its_own_matrix(spread, form, monkeypatch):
    """In the form of each platform, whatever the sizes; and so in the gradients."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, **forms: forms[form](*x))
    sizes, rng = np.array(SPREADS[spread]), np.random.default_rng(4)
    x, w = rng.normal(size=(sizes.sum(), 3)), rng.normal(size=(4, 3, 5))
    slope = rng.normal(size=(len(x), 5))
    of = np.repeat(np.arange(4), sizes)
    args = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    call = lambda x, w: grouped.grouped(x, w, jnp.asarray(sizes), "float32")  # noqa: E731
    found, back = jax.vjp(call, *args)
    np.testing.assert_allclose(found, np.einsum("nd,ndf->nf", x, w[of]), atol=1e-5)
    of_x, of_w = back(jnp.asarray(slope, jnp.float32))
    np.testing.assert_allclose(of_x, np.einsum("nf,ndf->nd", slope, w[of]), atol=1e-5)
    expected = np.stack([x[of == e].T @ slope[of == e] for e in range(4)])
    np.testing.assert_allclose(of_w, expected, atol=1e-4)


def test_products_of_rounded_operands():
    rng = np.random.default_rng(5)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((9, 16), (2, 16, 4)))
    sizes, half = jnp.array([4, 5]), lambda a: np.asarray(a.astype(jnp.bfloat16), np.float64)
    found = grouped.grouped(x, w, sizes, "bfloat16")
    assert found.dtype == jnp.float32
    expected = np.einsum("nd,ndf->nf", half(x), half(w)[np.repeat([0, 1], [4, 5])])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    of_w = jax.grad(lambda w: jnp.sum(grouped.grouped(x, w, sizes, "bfloat16")))(w)
    assert of_w.dtype == jnp.float32
    np.testing.assert_allclose(of_w[1], np.repeat(half(x)[4:].sum(0)[:, None], 4, 1), atol=1e-5)


def test_imbalance_is_one_for_a_perfect_balance_and_counts_choices():
    rng = np.random.default_rng(6)
    index = np.stack([np.arange(12) % 4, (np.arange(12) + 1) % 4], axis=-1).reshape(3, 4, 2)
    even = np.full((3, 4, 4), 0.25, np.float32)
    assert float(experts.imbalance(even, index)) == pytest.approx(1.0)
    scores, index = rng.random((3, 5, 4)), rng.permuted(np.tile(np.arange(4), (3, 5, 1)), axis=-1)
    index = index[..., :2]
    parts = np.bincount(index.ravel(), minlength=4) / index.size
    means = (scores / scores.sum(-1, keepdims=True)).mean((0, 1))
    assert float(experts.imbalance(scores, index)) == pytest.approx(4 * (parts * means).sum())


@pytest.mark.slow
def test_the_balance_is_in_the_gradient_of_training_and_in_no_loss(monkeypatch):
    """The gradient of the mean imbalance of the layers, times network.balance."""
    keys = jax.random.split(jax.random.key(7), len(Z))
    options = dict(experts=4, time_conditioning=False, scan_blocks=False)
    network, params = built(**options)
    pulled, _ = built(**options, balance=0.3)

    def loss(params, network, keys):
        return jnp.mean(jnp.sin(network.bind(params, {}, keys)(Z, T)))

    def terms(params):
        """The imbalance of each layer, of what it reads."""
        found, real = [], experts.imbalance
        with monkeypatch.context() as patch:
            patch.setattr(experts, "imbalance", lambda *x: found.append(real(*x)) or found[-1])
            patch.setattr(experts, "attached", lambda x, term: x)
            pulled.bind(params, {}, keys)(Z, T)
        return sum(found) / len(found)

    def slope(network, keys):
        return jax.jit(jax.value_and_grad(lambda p: loss(p, network, keys)))(params)

    values = [slope(each, keys) for each in (network, pulled)]
    np.testing.assert_allclose(values[0][0], values[1][0], rtol=1e-6)
    expected = jax.jit(jax.grad(terms))(params)
    assert np.abs(expected["blocks_0"]["feed_forward"]["router"]["kernel"]).max() > 1e-3
    change = jax.tree.map(jnp.subtract, values[1][1], values[0][1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.3 * b, atol=2e-6), change, expected)
    _, apart = slope(pulled, None)  # outside of training
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), apart, values[0][1])


def unrolled(params: dict) -> dict:
    """The parameters of scanned blocks as those of single ones."""
    depth = len(jax.tree.leaves(params["blocks"])[0])
    apart = {
        f"blocks_{n}": jax.tree.map(lambda x, n=n: x[n], params["blocks"]) for n in range(depth)
    }
    return {name: x for name, x in params.items() if name != "blocks"} | apart


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name",
    ["all", "index", "blocks", pytest.param("append", marks=pytest.mark.campaign)],
)
def test_blocks_without_experts_come_first_and_blocks_may_be_scanned(name):
    scanned, params = built(**KEYS)
    loop, _ = built(**KEYS, scan_blocks=False)
    assert params["blocks"]["feed_forward"]["experts_up"]["kernel"].shape == (2, 4, 16, 12)
    assert params["first_blocks_0"]["feed_forward"]["up"]["kernel"].shape == (16, 24)
    assert params["blocks"]["feed_forward"]["shared"]["up"]["kernel"].shape == (2, 16, 8)

    def found(network, params):
        denoiser = network.bind(params)
        if name == "all":
            return denoiser(Z, T)
        if name == "index":
            return denoiser.features_at(Z, T, jnp.array([[0, 3], [1, 5], [2, 2]]))
        times = jnp.repeat(T[:, None], 3, axis=1)
        if name == "blocks":
            return denoiser.blocks.features(Z, times, Z % 5, 2)
        cache, out = denoiser.blocks.empty_cache(3, 4), []
        for begin in (0, 2, 4):
            h, _ = denoiser.blocks.append_block(Z[:, begin : begin + 2], T, cache)
            _, cache = denoiser.blocks.append_block(Z[:, begin : begin + 2] % 5, T, cache)
            out.append(h)
        return jnp.concatenate(out, axis=1)

    both = [jax.jit(lambda p, n=n: found(n, p)) for n in (scanned, loop)]
    one, other = both[0](params), both[1](unrolled(params))
    np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)
    if name == "index":
        rows = np.take_along_axis(
            np.asarray(scanned.bind(params).features(Z, T)),
            np.array([[0, 3], [1, 5], [2, 2]])[..., None], axis=1,
        )  # fmt: skip
        np.testing.assert_allclose(one, rows, atol=2e-5)
    if name == "append":
        times = jnp.repeat(T[:, None], 3, axis=1)
        whole = scanned.bind(params).blocks.features(Z, times, Z % 5, 2)
        np.testing.assert_allclose(one[:, :4], whole[:, :4], atol=2e-5)


def test_a_network_for_gpus_computes_the_same():
    """There all blocks are in one iteration of the loop."""
    network, params = built(**KEYS)
    other = Transformer(**(dict(vocab_size=5, size=16, heads=2, hidden=24) | KEYS)).build("gpu")
    np.testing.assert_allclose(logits(other, params), logits(network, params), atol=1e-5)


def test_operations_are_counted_of_the_experts_that_a_token_takes():
    """As of plain layers that are as wide as these together, and the router."""
    keys = dict(time_conditioning=False, depth=3)
    found, params = built(**keys, experts=8, expert_hidden=6, experts_per_token=3, dense_layers=1,
                          shared_hidden=6)  # fmt: skip
    plain, dense = built(**keys, hidden=24)
    router = 2 * 2.0 * 16 * 8
    assert found.flops(params, 6, 0) == pytest.approx(plain.flops(dense, 6, 0) + router)
    # In block diffusion the last layer of the clean half has neither feed-forward nor router.
    assert found.flops(params, 6, 2) == pytest.approx(plain.flops(dense, 6, 2) + 1.5 * router)
    loop, apart = built(**keys, experts=8, expert_hidden=6, experts_per_token=3, dense_layers=1,
                        shared_hidden=6, scan_blocks=False)  # fmt: skip
    assert loop.flops(apart, 6, 2) == pytest.approx(found.flops(params, 6, 2))


def test_adapters_lie_beside_layers_that_all_tokens_take():
    """Not beside experts and the router; folded in, they compute the same."""
    network, params = built(**KEYS, lora_rank=2)
    paths = [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    beside = {p.rsplit("/lora_a", 1)[0] for p in paths if "lora_a" in p}
    attention = {f"attention/{x}" for x in ("query", "key", "value", "out")}
    own = {f"blocks/{x}" for x in attention} | {f"first_blocks_0/{x}" for x in attention}
    for x in ("gate", "up", "down"):
        own |= {f"blocks/feed_forward/shared/{x}", f"first_blocks_0/feed_forward/{x}"}
    assert beside == own
    plain, _ = built(**KEYS)
    np.testing.assert_allclose(
        logits(plain, merged(params, 8.0)), logits(network, params), atol=1e-4
    )


def test_every_parameter_has_a_row_in_the_sharding_table(capsys):
    _, params = built(**KEYS)
    found = shardings_of({"network": params}, make_mesh(MeshOptions(data=1)))["network"]
    specs = found["blocks"]["feed_forward"]
    assert specs["experts_gate"]["kernel"].spec == P(None, None, "fsdp", "tensor")
    assert specs["experts_down"]["kernel"].spec == P(None, None, "tensor", "fsdp")
    assert specs["router"]["kernel"].spec == P(None, "fsdp", None)
    assert not capsys.readouterr().err


def test_half_precision_is_close():
    network, params = built(**KEYS)
    narrow, _ = built(**KEYS, dtype="bfloat16")
    one, other = logits(network, params), logits(narrow, params)
    assert other.dtype == jnp.float32
    assert 0 < np.abs(one - other).max() < 0.2 * np.abs(one).max()


def test_tokens_of_a_block_share_experts():
    """Those with the largest scores of any token of the block; the last block is shorter."""
    scores = np.random.default_rng(5).normal(size=(2, 7, EXPERTS)).astype(np.float32)
    found = np.asarray(routing.within_blocks(jnp.asarray(scores), 3, 2))
    for text, of_text in zip(scores, found, strict=True):
        for begin in (0, 3, 6):
            part = slice(begin, begin + 3)
            best = text[part].max(axis=0)
            shared = [e for e in range(EXPERTS) if sum(best > best[e]) < 2]
            assert len(shared) == 2
            expected = np.full_like(text[part], -np.inf)
            expected[:, shared] = text[part][:, shared]
            np.testing.assert_array_equal(of_text[part], expected)


def test_experts_are_shared_also_where_few_features_are_asked_for():
    """The last layer must read the whole block then, and blocks of other lengths are refused."""
    keys = KEYS | dict(router_block=4, router_block_taken=2)
    network, params = built(**keys)
    z = jnp.arange(16).reshape(2, 8) % 5
    denoiser, t = network.bind(params), jnp.zeros(2)
    whole = denoiser.features(z, t)
    for n in (0, 3, 5, 6):
        alone = denoiser.features_at(z, t, jnp.full((2, 1), n))
        np.testing.assert_allclose(alone[:, 0], whole[:, n], atol=1e-5)
    free, _ = built(**KEYS)
    assert np.abs(free.bind(params).features(z, t) - whole).max() > 1e-3
    with pytest.raises(UserError, match="must be multiples of it, not 2"):
        denoiser.blocks.features(z, jnp.zeros((2, 4)), z, 2)
    with pytest.raises(UserError, match="must be multiples of it, not 2"):
        denoiser.blocks.append_block(z[:, :2], t, denoiser.blocks.empty_cache(2, 8))
    with pytest.raises(UserError, match="dual_cache=True needs network.router_block=0, not 4"):
        denoiser.blocks.around(z, t, 0, None)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(router_block=4), "router_block_taken=0 must lie between network.experts_per_token=2"),
        (dict(router_block=4, router_block_taken=7), "_taken=7 .* and network.experts=6"),
        (dict(router_block=4, router_groups=3, router_groups_taken=2), "router_groups=1, not 3"),
        (dict(experts_per_token=7), "experts_per_token=7 must lie between 1 and 6"),
        (dict(experts_per_token=0), "experts_per_token=0 must lie between 1 and 6"),
        (dict(router_groups=4), "experts=6 must be a multiple of network.router_groups=4"),
        (dict(router_groups=6), "with two experts or more in each group"),
        (dict(router_groups=3, router_groups_taken=4), "router_groups_taken=4 must lie between 1"),
        (dict(router_groups=3, experts_per_token=3), "experts_per_token=3 .* between 1 and 2"),
        (dict(feed_forward="gelu"), "swiglu or glu, not 'gelu'"),
        (dict(dense_layers=2), "dense_layers=2 must be below network.depth=2"),
        (dict(router="tanh"), "network.router must be softmax or sigmoid, not 'tanh'"),
        (dict(balance=-0.1), "network.balance"),
        (dict(experts=0, balance=0.1), "balance=0.1 is only for mixture-of-experts"),
        (dict(experts=0, dense_layers=1), "dense_layers=1 is only for mixture-of-experts"),
        (dict(experts=0, shared_hidden=4), "shared_hidden=4 is only for mixture-of-experts"),
        (dict(rotary_part=0.4), "rotary_part=0.4 .* 1.6, must be an even"),
        (dict(rotary_part=1.5), "rotary_part=1.5 must lie in"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(PLAIN, **options)


def on_meshes() -> None:
    """Outputs and gradients on a mesh of 2 x 2 x 2 devices are those on one."""
    options = dict(vocab_size=5, size=16, heads=2, hidden=24, qk_norm=True, balance=0.1) | KEYS
    network = Transformer(**options).build()
    params = random_parameters(network)
    z = jnp.tile(Z[:2], (4, 1))
    t, keys = jnp.tile(T[:2], 4), jax.random.split(jax.random.key(1), 8)

    def loss(params):
        out = network.bind(params, {}, keys)(z, t)
        return jnp.mean(jnp.sin(out)), out

    expected = jax.jit(jax.grad(loss, has_aux=True))(params)
    mesh = make_mesh(MeshOptions(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        split = jax.device_put(params, shardings_of({"n": params}, mesh)["n"])
        found = jax.jit(jax.grad(loss, has_aux=True))(split)
        rows = jax.jit(lambda p: network.bind(p)(z[:3], t[:3]))(split)  # not to be divided
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), found, expected
    )
    np.testing.assert_allclose(rows, expected[1][:3], atol=2e-5)
    print("meshes agree")


@pytest.mark.campaign
def test_meshes_compute_the_same():
    assert "meshes agree" in on_eight_devices("test_experts", "on_meshes")
