"""Problems so small that every sequence, mask pattern and state can be enumerated.

The numbers of the identities (M05 and so on) belong to these instances:
V symbols 0..V-1, the mask is V, sequences in lexicographic order, nats.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from md4_jax import protocols
from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.autoregressive import AlongOrder
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.candi import CANDI
from md4_jax.objectives.concrete_score import ConcreteScore
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.distillation import Teacher
from md4_jax.objectives.gidd import GIDD
from md4_jax.objectives.md4 import DiscreteMD4
from md4_jax.objectives.policy import Policy
from md4_jax.objectives.prime import Prime
from md4_jax.objectives.radd import TDCE
from md4_jax.objectives.sdtt import SDTT
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.objectives.wedlm import WeDLM
from md4_jax.processes import PROCESSES
from md4_jax.processes.duality import strongest
from md4_jax.processes.gaussian_masking import GaussianMasking
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.rates import Rates
from md4_jax.processes.schedules import LogLinear
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Batch, Blockwise, Denoiser, Ordered
from md4_jax.samplers import SAMPLERS
from md4_jax.samplers.chain import Chain
from md4_jax.samplers.loop import no_prompt, sample

# All calls have this many rows, so that operations are compiled once and not once a test.
CHUNK = 1024

P_V3L1 = np.array([0.5, 0.3, 0.2])
P_V3L2 = np.array([[0.20, 0.05, 0.10], [0.02, 0.25, 0.08], [0.15, 0.05, 0.10]])
P_V2L3 = np.array([0.20, 0.05, 0.08, 0.12, 0.03, 0.22, 0.10, 0.20]).reshape(2, 2, 2)


# Every process of the registry, and those whose parametrisation changes what is computed.
# At one length `resizing` is `masking`; what changes the length has tests of its own.
PROCESS_CASES = {name: make for name, make in PROCESSES.items() if name != "resizing"} | {
    "transition": lambda vocab_size: Transition(vocab_size, timesteps=5, beta_end=9.0),
    "transition, mixture": lambda vocab_size: Transition(
        vocab_size, timesteps=5, kernel="uniform", parametrisation="mixture"
    ),
    "transition, absorbing": lambda vocab_size: Transition(
        vocab_size, timesteps=5, kernel="absorbing"
    ),
    "rates, absorbing": lambda vocab_size: Rates(vocab_size, kernel="absorbing"),
    "rates, gaussian": lambda vocab_size: Rates(vocab_size, kernel="gaussian_symmetric"),
    "rates, mixture": lambda vocab_size: Rates(vocab_size, parametrisation="mixture"),
    "uniform, mixture": lambda vocab_size: Uniform(vocab_size, parametrisation="mixture"),
    "uniform, score": lambda vocab_size: Uniform(vocab_size, LogLinear(), "score"),
    "gaussian_masking, joint": lambda vocab_size: GaussianMasking(
        vocab_size, parametrisation="joint"
    ),
    "hybrid, masks alone": lambda vocab_size: Hybrid(vocab_size, uniform=0.0),
}


# Every objective of the registry, and those whose options change what is computed.
OBJECTIVE_CASES = {name: make() for name, make in OBJECTIVES.items()} | {
    "block": BlockDiffusion(3),
    "blocks of one": BlockDiffusion(1),
    "a time for each block": BlockDiffusion(3, "times"),
    "uniform noise in blocks": UniformELBO(2),
    "cross-entropy in blocks": CrossEntropy(2),
    "four steps": DiscreteMD4(4),
    "four steps, uniform decoder": DiscreteMD4(4, "uniform"),
    "masked language model": AnyOrder(weight_power=0.0),
    "few masks": AnyOrder(max_masked=0.4),
    "t_dce, constant as drawn": TDCE(drawn_constant=True),
    "right to left": AlongOrder("right_to_left"),
    "gidd, clip": GIDD("clip"),
    "gidd, dynamic": GIDD("dynamic"),
    "candi, cross entropy": CANDI("cross_entropy"),
    "prime, joint": Prime("joint"),
    "concrete score, one level": ConcreteScore(time=0.3),
    "concrete score, denoising": ConcreteScore("denoising"),
    "policy, near the start": Policy(kl=0.3),
    "wedlm, a bound": WeDLM(2, left_to_right=0.0),
    "sdtt, three steps": SDTT(steps=5, per_step=3, divergence="kl"),
}


def fits(user, process) -> bool:
    """Whether an objective or a sampler can be combined with a process."""
    allowed, own = user.needs.parametrisations, getattr(process, "parametrisation", None)
    if user.needs.verifies:  # which no table of outputs can do
        return False
    return isinstance(process, user.needs.processes) and (None in (allowed, own) or own in allowed)


# (objective, vocab_size -> process) of all that go together, by name.
FITTING = {
    f"{name}, {process}": (objective, lambda vocab_size, make=make: make(vocab_size).init())
    for name, objective in OBJECTIVE_CASES.items()
    for process, make in PROCESS_CASES.items()
    if fits(objective, make(2))
}


def samplers_for(process) -> dict:
    """The samplers of the registry, by name, that go with a process and any denoiser."""
    return {
        name: make
        for name, make in SAMPLERS.items()
        if fits(make(), process) and not (make().needs.causal or make().needs.ordered)
    }


def sequences(symbols: int, length: int) -> np.ndarray:
    """All sequences, int32 [symbols^L, L]; with V + 1 symbols all noised states."""
    return np.array(list(itertools.product(range(symbols), repeat=length)), np.int32)


def patterns(length: int) -> np.ndarray:
    """All mask patterns, bool [2^L, L]."""
    return sequences(2, length).astype(bool)


def batch_of(tokens, **context) -> Batch:
    """A batch, whose worse answers are its sequences read backwards, with rewards of 1."""
    tokens = np.asarray(tokens, np.int32)
    return with_opinions(protocols.batch_of(tokens, context=context))


def labelled(tokens) -> Batch:
    """The same of class 0, for every objective."""
    return batch_of(tokens, label=np.zeros(len(tokens), np.int32))


def with_opinions(batch: Batch) -> Batch:
    """The batch with worse answers, and with rewards and advantages of 1."""
    ones = np.ones(len(batch.tokens), np.float32)
    return batch._replace(rejected=batch.tokens[:, ::-1], reward=ones, advantage=ones)


def keys_for(seed: int, count: int):
    return jax.random.split(jax.random.key(seed), count)


def table_logits(vocab: int, length: int) -> np.ndarray:
    """[(V+1)^L, L, V]: sin(1 + 2.1 code(z) + 3.7 n + 5.3 k), a wrong but positive denoiser."""
    code = np.arange((vocab + 1) ** length)[:, None, None]
    position, symbol = np.arange(length)[:, None], np.arange(vocab)
    return np.sin(1.0 + 2.1 * code + 3.7 * position + 5.3 * symbol)


def perfect_logits(p: np.ndarray) -> np.ndarray:
    """[(V+1)^L, L, V]: log P(x_n = k | the unmasked tokens); nonsense where nothing is masked."""
    vocab, length = p.shape[0], p.ndim
    x = sequences(vocab, length)
    out = np.tile(3.0 * np.arange(vocab), ((vocab + 1) ** length, length, 1))
    for row, z in enumerate(sequences(vocab + 1, length)):
        agrees = ((z == vocab) | (x == z)).all(axis=1) * p.ravel()
        for n in np.flatnonzero(z == vocab):
            mass = np.array([agrees[x[:, n] == k].sum() for k in range(vocab)])
            out[row, n] = np.log(mass / mass.sum())
    return out


def of_outputs(outputs: Callable, *, given: Callable | None = None) -> Denoiser:
    """The denoiser with outputs(z, t); asked about blocks, with given(z, t, clean, block).

    Of a mixture it sees the symbol with most weight. Its teacher sees the same and says another
    thing. Without `given` it looks at no clean block, and is told the times as they come. It has
    gaps, of texts that grow, and expects the prior number of tokens in each. Of a text in two
    groups it says of each what it says where that group is masked. Its classes are as many as its
    symbols, and their logits the mean of those of the tokens. In an order, masks before a
    position look to it like those after it. Its logit of the quality of a token is its first
    output minus the last.
    """

    def swapped(x, group):
        t = jnp.zeros(len(x))
        mask_id = jax.eval_shape(outputs, x, t).shape[-1]
        first, second = (outputs(jnp.where(part, mask_id, x), t) for part in (group, ~group))
        return jnp.where(group[..., None], first, second)

    def in_order(z, t, rank, index=None):
        mask_id = jax.eval_shape(outputs, z, t).shape[-1]
        here, parts = jnp.arange(z.shape[1]), []
        for n in range(z.shape[1]):
            seen = (rank < rank[:, n : n + 1]) | (here == n)
            parts.append(outputs(jnp.where(seen, z, mask_id), t)[:, n])
        h = jnp.stack(parts, axis=1)
        return h if index is None else jnp.take_along_axis(h, index[..., None], axis=1)

    def predictions(x, t, rank, round):
        mask_id = jax.eval_shape(outputs, x, t).shape[-1]
        parts = [
            outputs(jnp.where(round < round[:, n : n + 1], x, mask_id), t)[:, n]
            for n in range(x.shape[1])
        ]
        return jnp.stack(parts, axis=1)

    def streams(z, x, t, rank, round, index):
        mask_id = jax.eval_shape(outputs, x, t).shape[-1]
        here, noisy, clean = jnp.arange(x.shape[1]), [], []
        for n in range(x.shape[1]):
            before = (rank < rank[:, n : n + 1]) | (here == n)
            shown = jnp.where(before & (round == round[:, n : n + 1]), z, mask_id)
            shown = jnp.where(round < round[:, n : n + 1], x, shown)
            noisy.append(outputs(shown, t)[:, n])
            clean.append(outputs(jnp.where(here <= n, x, mask_id), t)[:, n])
        h = jnp.stack([*noisy, *clean], axis=1)
        return h if index is None else jnp.take_along_axis(h, index[..., None], axis=1)

    blocks = Blockwise(given or (lambda z, t, clean, block: outputs(z, t)), None, None)
    denoiser = Denoiser(
        lambda z, t: outputs(strongest(z), t),
        lambda h: h,
        blocks=blocks,
        gaps=lambda z, t: (at_end(outputs(z, t)), jnp.zeros((len(z), z.shape[1] + 1))),
        edits=lambda z, t: (
            *(at_end(outputs(z, time)) for time in (t, 0.5 * t)),
            jnp.zeros((len(z), z.shape[1] + 1, 2)),
        ),
        swapped=swapped,
        classify=lambda z, t: jnp.mean(outputs(z, t), axis=1),
        ordered=Ordered(in_order, predictions, None, None, streams=streams),
        quality=lambda h: h[..., 0] - h[..., -1],
    )
    return taught(denoiser, Denoiser(lambda z, t: _turned(outputs(z, t)), lambda h: h))


def block_table(logits: np.ndarray) -> Denoiser:
    """A table's denoiser asked about blocks: what comes after a block is mask."""
    base, vocab = denoiser_of(logits), logits.shape[2]

    def features(z, t, clean, block):
        place, parts = jnp.arange(z.shape[1]) // block, []
        for b in range(t.shape[1]):
            seen = jnp.where(place == b, z, jnp.where(place < b, clean, vocab))
            parts.append(base.features(seen, t[:, b])[:, b * block : (b + 1) * block])
        return jnp.concatenate(parts, axis=1)

    return of_outputs(base.features, given=features)


def at_end(h):
    """h [B, L, D] with that of the end of a text, as a network of texts that grow has it."""
    return jnp.concatenate([h, h[:, -1:]], axis=1)


def _turned(outputs):
    return outputs + 0.5 * jnp.cos(jnp.arange(outputs.shape[-1])).astype(outputs.dtype)


def taught(denoiser: Denoiser, teacher: Denoiser, round: int = 0) -> Denoiser:
    """The denoiser with a teacher, in a round of a distillation."""
    return denoiser._replace(teacher=Teacher(teacher, jnp.int32(round)))


def denoiser_of(logits: np.ndarray, *, time: float = 0.0) -> Denoiser:
    """The denoiser of a table over noised states; with `time` it depends on t as well."""
    _, length, vocab = logits.shape
    digits = (vocab + 1) ** np.arange(length)[::-1]

    def features(z, t):
        t = t.reshape(len(t), -1)[:, :1]  # of the first block, where each has its own
        drift = jnp.cos(3.0 * t[:, :, None] + jnp.arange(vocab))
        return jnp.asarray(logits)[jnp.sum(z * digits, axis=1)] + time * drift

    return of_outputs(features)


def quadrature(low: float = 0.0, high: float = 1.0, nodes: int = 40, power: int = 1):
    """Gauss-Legendre (points, weights); power > 1 removes a singularity at `low`."""
    v, w = np.polynomial.legendre.leggauss(nodes)
    v, w = 0.5 * (v + 1.0), 0.5 * w
    return low + (high - low) * v**power, w * (high - low) * power * v ** (power - 1)


def over_patterns(loss_at: Callable, mask_id: int, x: np.ndarray, t, masks=None) -> np.ndarray:
    """loss_at(batch, z, t) for x [X, L], t [N] and every mask pattern: float64 [X, N, M]."""
    masks = patterns(x.shape[1]) if masks is None else masks
    t = np.asarray(t)
    shape = (len(x), len(t), len(masks), x.shape[1])
    tokens = np.broadcast_to(x[:, None, None, :], shape).reshape(-1, x.shape[1])
    z = np.where(masks, mask_id, x[:, None, None, :])
    z = np.broadcast_to(z, shape).reshape(-1, x.shape[1]).astype(np.int32)
    times = np.broadcast_to(t[None, :, None], shape[:3]).ravel()
    rows = np.arange(-(-len(z) // CHUNK) * CHUNK) % len(z)
    values = [
        loss_at(batch_of(tokens[part]), jnp.asarray(z[part]), jnp.asarray(times[part]))
        for part in rows.reshape(-1, CHUNK)
    ]
    return np.concatenate(values)[: len(z)].astype(np.float64).reshape(shape[:3])


def expected(loss_at: Callable, mask_id: int, x: np.ndarray, t, masked_probability) -> np.ndarray:
    """The mean over masks that hide each token with that probability [N]: [X, N]."""
    u = np.asarray(masked_probability, np.float64)[:, None, None]
    weight = np.where(patterns(x.shape[1]), u, 1.0 - u).prod(axis=-1)
    return (over_patterns(loss_at, mask_id, x, t) * weight).sum(axis=-1)


def bind(objective, denoiser: Denoiser, process) -> Callable:
    """loss_at with its denoiser and process: (batch, z, t) -> nats [B]."""
    return lambda batch, z, t: objective.loss_at(denoiser, process, batch, z, t)


def continuous(denoiser: Denoiser, process, x: np.ndarray, **rule) -> np.ndarray:
    """MD4's integral over t by quadrature, [X]."""
    loss_at = bind(OBJECTIVES["md4"](), denoiser, process)
    t, weight = quadrature(**rule)
    masked = process.schedule.one_minus_alpha(jnp.asarray(t))
    return expected(loss_at, process.mask_id, x, t, masked) @ weight


def discrete(objective, denoiser: Denoiser, process, x: np.ndarray) -> np.ndarray:
    """The T-step bound by enumeration of steps and masks, [X]."""
    steps = np.arange(objective.first_step, objective.timesteps + 1)
    loss_at = bind(objective, denoiser, process)
    masked = objective.masked_probability(process, jnp.asarray(steps))
    return expected(loss_at, process.mask_id, x, steps, masked).mean(axis=1)


def any_order(denoiser: Denoiser, process, x: np.ndarray, objective=None, nodes=20) -> np.ndarray:
    """The exact-k bound by enumeration of k and patterns, t from Beta(k, L - k + 1): [X]."""
    loss_at = bind(objective or OBJECTIVES["any_order"](), denoiser, process)
    length, total = x.shape[1], np.zeros(len(x))
    u, weight = quadrature(nodes=nodes)
    t = process.schedule.inverse(jnp.asarray(u))
    for k in range(1, length + 1):
        masks = patterns(length)[patterns(length).sum(axis=1) == k]
        law = weight * stats.beta.pdf(u, k, length - k + 1)
        values = over_patterns(loss_at, process.mask_id, x, t, masks)
        total += (values.mean(axis=2) @ law) / length
    return total


def chain_of(z, given=None) -> Chain:
    """A chain at z [B, L] of which nothing is given, or so much."""
    z = jnp.asarray(z, jnp.int32)
    given = jnp.zeros(z.shape, bool) if given is None else jnp.asarray(given)
    return Chain(z, given, jnp.where(given, 1.0, 0.0), jnp.zeros(len(z), jnp.int32))


def drawn(denoiser: Denoiser, process, step, grid, keys, *, length: int = 2):
    """(z [B, L], evaluations [B]) of a whole run from noise, compiled."""
    call = jax.jit(
        lambda keys, prompt: sample(denoiser, process, step, grid=grid, keys=keys, prompt=prompt)[0]
    )
    chain = call(keys, no_prompt(len(keys), length))
    return chain.z, chain.evaluations


def ancestral_law(denoiser: Denoiser, process, grid: np.ndarray, length: int) -> np.ndarray:
    """The exact law of ancestral sampling over all (V+1)^L states, enumerated step by step."""
    z = sequences(process.mask_id + 1, length)
    law = np.zeros(len(z))
    law[-1] = 1.0
    masked = (z == process.mask_id)[:, :, None]
    stay = np.eye(process.mask_id + 1)[z]
    for s, t in zip(grid[-2::-1], grid[:0:-1], strict=True):
        mu = np.asarray(jax.nn.softmax(denoiser(z, jnp.full(len(z), t))), np.float64)
        reveal = float(process.reveal_probability(jnp.asarray(s), jnp.asarray(t)))
        move = np.concatenate([reveal * mu, np.full((*mu.shape[:2], 1), 1.0 - reveal)], axis=-1)
        kernel = np.where(masked, move, stay)
        chosen = [kernel[:, n][:, z[:, n]] for n in range(length)]
        law = law @ np.prod(chosen, axis=0)
    return law


def noise_law(process, x: np.ndarray, t) -> np.ndarray:
    """q(z | x, t) of uniform noise over all V^L states: x [X, L], t [N] -> float64 [X, N, Z]."""
    t = jnp.asarray(t)
    alpha, noise = (
        np.asarray(f(t), np.float64)[None, :, None, None]
        for f in (process.schedule.alpha, process.schedule.one_minus_alpha)
    )
    z = sequences(process.vocab_size, x.shape[1])
    same = x[:, None, None] == z[None, None]
    return (alpha * same + noise / process.vocab_size).prod(axis=-1)


def over_states(loss_at: Callable, vocab: int, x: np.ndarray, t) -> np.ndarray:
    """loss_at(batch, z, t) for x [X, L], t [N] and every z of V^L: float64 [X, N, Z]."""
    z, t = sequences(vocab, x.shape[1]), np.asarray(t)
    shape = (len(x), len(t), len(z))
    which, when, what = (axis.ravel() for axis in np.indices(shape))
    rows = np.arange(-(-len(which) // CHUNK) * CHUNK) % len(which)
    values = [
        loss_at(batch_of(x[which[part]]), jnp.asarray(z[what[part]]), jnp.asarray(t[when[part]]))
        for part in rows.reshape(-1, CHUNK)
    ]
    return np.concatenate(values)[: len(which)].astype(np.float64).reshape(shape)


def uniform_integral(objective, denoiser: Denoiser, process, x: np.ndarray, **rule) -> np.ndarray:
    """The mean of loss_at over t ~ U(0, 1) and z by quadrature and enumeration, [X]."""
    t, weight = quadrature(**({"nodes": 60, "power": 3} | rule))
    values = over_states(bind(objective, denoiser, process), process.vocab_size, x, t)
    return (values * noise_law(process, x, t)).sum(axis=2) @ weight


def uniform_outputs(process, p: np.ndarray) -> Denoiser:
    """What is exact for data p with the process's parametrisation: see `Uniform`."""
    vocab, x = p.shape[0], sequences(p.shape[0], p.ndim)
    picks, parametrisation = np.eye(vocab)[x], process.parametrisation

    def features(z, t):
        alpha, noise = process.schedule.alpha(t), process.schedule.one_minus_alpha(t)
        alpha, each = alpha[:, None, None], noise[:, None, None] / vocab
        law = each + alpha * (jnp.asarray(x)[None] == z[:, None])
        whole = p.ravel() * jnp.prod(law, axis=-1)
        if parametrisation == "mixture":
            return jnp.log(jnp.einsum("bx,xlk->blk", whole, picks))
        others = jnp.einsum("bxl,xlk->blk", whole[..., None] / law, picks)
        if parametrisation == "joint":
            return jnp.log(others)
        moved = alpha * others + each * jnp.sum(others, axis=-1, keepdims=True)
        return jnp.log(moved) - jnp.log(jnp.sum(whole, axis=-1))[:, None, None]

    return Denoiser(features, lambda h: h)


def uniform_marginals(p: np.ndarray, noise_s: float, noise_t: float) -> np.ndarray:
    """p(z_s^n = y | z_t) of data p by Bayes over all z_s, at two levels of 1 - alpha: [Z, L, V]."""
    vocab, length = p.shape[0], p.ndim
    z = sequences(vocab, length)
    same = z[:, None] == z[None]

    def kernel(noise):
        return ((1.0 - noise) * same + noise / vocab).prod(axis=-1)

    joint = (p.ravel() @ kernel(noise_s))[:, None] * kernel((noise_t - noise_s) / (1.0 - noise_s))
    posterior = joint / joint.sum(axis=0)
    return np.einsum("sz,sny->zny", posterior, np.eye(vocab)[z])


def uniform_law(p: np.ndarray, noises) -> np.ndarray:
    """The law over V^L of steps down these levels of 1 - alpha, from uniform symbols: [Z].

    Each step draws all positions from their exact marginals, independently.
    """
    z = sequences(p.shape[0], p.ndim)
    law = np.full(len(z), 1.0 / len(z))
    for noise_t, noise_s in itertools.pairwise(noises):
        marginals = uniform_marginals(p, noise_s, noise_t)
        chosen = [marginals[:, n][:, z[:, n]] for n in range(p.ndim)]
        law = law @ np.prod(chosen, axis=0)
    return law
