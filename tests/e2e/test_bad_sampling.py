"""A user's mistakes in the `sample` section: the value, what is allowed, and nothing written."""

import shutil

import pytest

from md4_jax.evals.samples import DrawnSamples

pytestmark = pytest.mark.slow

TRANSITION = ("process.name=transition", "process.timesteps=4", "objective.name=d3pm")
UNIFORM = ("process.name=uniform", "objective.name=uniform_elbo")
SCORE = (
    *("process.name=uniform", "process.parametrisation=score", "objective.name=score_entropy"),
    *("process.schedule.name=log_linear", "process.schedule.eps=1e-3"),
)
GENMD4 = ("process.name=state_dependent", "objective.name=genmd4")
RATES = ("process.name=rates", "objective.name=ctmc")

REWARD = ("reward.name=pattern", "reward.pattern=the")

# Assignments of the command line, those of `sample` without it -> what the message must hold.
VALUES = [
    (["steps=0"], ["sample.steps must be at least 1, not 0"]),
    (["steps=-3"], ["sample.steps must be at least 1, not -3"]),
    (["batch_size=0"], ["sample.batch_size must be at least 1, not 0"]),
    (["length=-1"], ["sample.length must not be negative, not -1"]),
    (["stride=-1"], ["sample.stride must not be negative, not -1"]),
    (["stride=16"], ["sample.stride=16 must be less than data.length=16"]),
    (["stride=20", "length=40"], ["sample.stride=20 must be less than data.length=16"]),
    (["top_p=0"], ["sample.top_p must lie in (0, 1], not 0"]),
    (["top_p=1.5"], ["sample.top_p must lie in (0, 1], not 1.5"]),
    (["top_k=-1"], ["sample.top_k must not be negative, not -1"]),
    (["temperature=-0.5"], ["sample.temperature must not be negative, not -0.5"]),
    (["trace=maybe"], ["sample.trace must be true or false, not 'maybe'"]),
    (["jugde=self"], ["key in sample 'jugde'", "mean 'judge'?"]),
    # Grids.
    (["grid=[1.0,1.0,0.0]"], ["sample.grid", "fall strictly from 1.0 to 0.0", "[1.0, 1.0, 0.0]"]),
    (["grid=[0.0,1.0]"], ["sample.grid", "fall strictly from 1.0 to 0.0", "[0.0, 1.0]"]),
    (["grid=[0.5,0.0]"], ["sample.grid", "fall strictly from 1.0 to 0.0", "[0.5, 0.0]"]),
    (["grid=[1.0,0.5]"], ["sample.grid", "fall strictly from 1.0 to 0.0", "[1.0, 0.5]"]),
    (["grid=[1.0]"], ["sample.grid", "[1.0]", "as in [1.0, 0.5, 0.0]"]),
    (["grid=[]"], ["sample.grid", "as in [1.0, 0.5, 0.0]"]),
    (["grid=[1.0,"], ["sample.grid=[1.0, is not a list of numbers", "[1.0, 0.5, 0.0]"]),
    (["grid=[1.0,half,0.0]"], ["sample.grid=[1.0,half,0.0] is not a list of numbers"]),
    (["grid=[[1.0],[0.0]]"], ["sample.grid=[[1.0],[0.0]] is not a list of numbers"]),
    (["grid=(1.0)"], ["sample.grid=(1.0) is not a list of numbers"]),
    (["grid=8"], ["unknown sample.grid '8'", "cosine", "log_linear", "uniform"]),
    # Texts.
    (["template=aaaaaaaaaaaaaaa__"], ["sample.template has 17 tokens", "the 16 of a sample"]),
    (["prompt=aaaaaaaaa", "suffix=bbbbbbbb"], ["have 9 + 8 tokens", "the 16 of a sample"]),
    (["prompt=aaaa", "length=3"], ["have 4 + 0 tokens", "the 3 of a sample"]),
    (["prompt=Zoë"], ["sample.prompt, 'Zoë'", "'ë' at offset 2"]),
    (["suffix=x=1"], ["sample.suffix, 'x=1'", "'=' at offset 1"]),
    (["template=_ö"], ["sample.template, 'ö'", "'ö' at offset 0"]),
    (["blank=__"], ["sample.blank must be one character, not '__'"]),
    (["blank="], ["sample.blank must be one character, not ''"]),
    (["prompt=a", "template=b_"], ["sample.template cannot be combined with sample.prompt"]),
    (["templates=/nowhere.txt"], ["sample.templates=/nowhere.txt cannot be read"]),
    # Arguments of the samplers.
    (["name=remask", "strategy=max"], ["sample.strategy", "cap, rescale, confidence", "'max'"]),
    (["name=remask", "eta=2"], ["sample.eta must lie in [0, 1], not 2"]),
    (["name=remask", "since=0.3", "until=0.3"], ["until < since <= 1", "not 0.3 and 0.3"]),
    (["name=remask", "since=0.2", "until=0.5"], ["until < since <= 1", "not 0.5 and 0.2"]),
    (["name=remask", "held=1.0"], ["sample.held", "(0, 1), not 1.0"]),
    (["name=remask", "loop=True"], ["sample.loop=True needs sample.since < 1"]),
    (["name=confidence", "score=best"], ["sample.score", "probability, margin, entropy", "'best'"]),
    (["name=confidence", "noise=-1"], ["sample.noise must not be negative, not -1"]),
    (["name=confidence", "per_step=-1"], ["sample.per_step must not be negative, not -1"]),
    (["name=any_order", "order=sorted"], ["sample.order", "random, left_to_right", "'sorted'"]),
    (["name=any_order", "per_step=-1"], ["sample.per_step must not be negative, not -1"]),
    (
        ["name=predictor_corrector", "predictor=gibbs"],
        ["sample.predictor", "ancestral, euler, tau_leaping", "'gibbs'"],
    ),
    (["name=predictor_corrector", "corrections=0"], ["sample.corrections", "at least 1, not 0"]),
    (["name=predictor_corrector", "size=0"], ["sample.size must be positive, not 0"]),
    (["name=tau_leaping", "several=all"], ["sample.several", "first, reject, sum", "'all'"]),
    (
        ["name=tau_leaping", "several=sum"],
        ["sample.several='sum'", "process.kernel='gaussian_target' or"],
    ),
    (["reward.name=patern"], ["unknown sample.reward.name 'patern'", "mean 'pattern'?"]),
    (["reward.name=pattern"], ["sample.reward.name='pattern' needs sample.reward.pattern"]),
    (
        ["reward.name=pattern", "reward.pattern=th("],
        ["sample.reward.pattern='th('", "not a regular"],
    ),
    (["reward.particles=0"], ["sample.reward.particles must be at least 1, not 0"]),
    (["reward.every=0"], ["sample.reward.every must be at least 1, not 0"]),
    (["reward.threshold=2"], ["sample.reward.threshold must lie in [0, 1], not 2"]),
    ([*REWARD, "stride=8", "length=40"], ["sample.reward.name='pattern'", "sample.stride=8"]),
    ([*REWARD, "block=8"], ["sample.reward.name='pattern' cannot be combined with sample.block=8"]),
    (
        [*REWARD, "trace=True"],
        ["sample.reward.name='pattern' cannot be combined with sample.trace=True"],
    ),
    ([*REWARD, "name=any_order"], ["with sample.per_step=1", "Set sample.per_step=0"]),
    (["name=ancestral", "order=random"], ["key in sample 'order'"]),  # another sampler's
]
# Sampler, settings of other sections -> what it would need.
MISFITS = [
    ("tweedie", TRANSITION, ["'masking' or 'uniform'", "not 'transition'"]),
    ("euler", TRANSITION, ["'masking' or 'state_dependent' or 'uniform' or 'hybrid' or 'rates'"]),
    ("tau_leaping", TRANSITION, ["not 'transition'"]),
    ("remask", UNIFORM, ["process.name='masking'", "not 'uniform'"]),
    ("any_order", UNIFORM, ["process.name='masking'", "not 'uniform'"]),
    ("first_hitting", GENMD4, ["process.name='masking'", "not 'state_dependent'"]),
    ("predictor_corrector", GENMD4, ["'masking' or 'uniform' or 'rates'", "'state_dependent'"]),
    ("tweedie", GENMD4, ["'masking' or 'uniform'", "not 'state_dependent'"]),
    ("confidence", RATES, ["process.name='masking'", "not 'rates'"]),
    ("tweedie", RATES, ["'masking' or 'uniform'", "not 'rates'"]),
    ("metropolis", (), ["process.name='uniform'", "not 'masking'"]),
    ("left_to_right", (), ["network.causal=True"]),
]


@pytest.fixture
def said_of(tiny, tmp_path, refused):
    """The message when training with these assignments is refused, which writes nothing."""

    def said_of(*assignments) -> str:
        flags = [f"--config.{assignment}" for assignment in assignments]
        message = refused("--config", tiny, "--workdir", tmp_path / "run", *flags)
        assert not list(tmp_path.iterdir())
        return message

    return said_of


@pytest.mark.parametrize("assignments, said", VALUES, ids=[" ".join(v[0]) for v in VALUES])
def test_a_wrong_value(assignments, said, said_of):
    message = said_of(*(f"sample.{assignment}" for assignment in assignments))
    for words in said:
        assert words in message


@pytest.mark.parametrize("name, others, said", MISFITS, ids=[f"{m[0]} {m[1]}" for m in MISFITS])
def test_a_sampler_that_does_not_fit(name, others, said, said_of):
    message = said_of(*others, f"sample.name={name}")
    assert f"sample.name={name!r} needs " in message
    for words in said:
        assert words in message


def test_a_process_with_steps_of_its_own_takes_no_others(said_of):
    for settings in (["steps=8"], ["steps=4", "grid=cosine"], ["grid=[1.0,0.5,0.0]"]):
        message = said_of(*TRANSITION, *(f"sample.{setting}" for setting in settings))
        assert "must be 4 and sample.grid=" in message and "process.timesteps=4" in message


@pytest.mark.parametrize("setting", ["temperature=0.5", "top_k=3", "top_p=0.9"])
def test_ratios_are_no_distribution_to_be_changed(setting, said_of):
    message = said_of(*SCORE, f"sample.{setting}")
    assert (
        f"sample.{setting} needs a network that predicts probabilities" in message
        and "'score'" in message
    )


def test_a_wrong_line_of_a_file_is_named(tiny, tmp_path, refused):
    path, workdir = tmp_path / "templates.txt", tmp_path / "run"
    path.write_text("To be_\n\n_ß\n")
    flags = ("--config", tiny, "--workdir", workdir, f"--config.sample.templates={path}")
    message = refused(*flags)
    assert f"line 3 of sample.templates={path}, 'ß'" in message and "'ß' at offset 0" in message
    assert not workdir.exists()


WHEN_SAMPLING = [
    ("steps=0", "sample.steps must be at least 1, not 0"),
    ("template=aaaaaaaaaaaaaaaaa", "sample.template has 17 tokens, more than the 16 of a sample"),
    ("prompt=Zoë", "'ë' at offset 2"),
    ("name=metropolis", "needs process.name='uniform', not 'masking'"),
    ("grid=[1.0,1.0,0.0]", "must fall strictly from 1.0 to 0.0"),
]


@pytest.mark.parametrize("assignment, said", WHEN_SAMPLING)
def test_the_same_when_a_run_is_sampled(assignment, said, tiny, copy, refused, snapshot):
    before = snapshot(copy)
    at = ("--config", tiny, "--workdir", copy, "--mode", "sample")
    assert said in refused(*at, f"--config.sample.{assignment}")
    assert snapshot(copy) == before


def test_where_samples_cannot_be_written_none_is_drawn(tiny, copy, refused, monkeypatch):
    shutil.rmtree(copy / "samples")
    (copy / "samples").write_text("")
    monkeypatch.setattr(DrawnSamples, "run", lambda *arguments: pytest.fail("samples are drawn"))
    message = refused("--config", tiny, "--workdir", copy, "--mode", "sample")
    assert f"error: {copy / 'samples'} is a file, and not a directory" in message
