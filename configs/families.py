"""All families, with network, recipe and data of text8_fast.py: configs/families.py:NAME."""

from configs import text8_fast

MASKS, PLUG_IN = (dict(name=name, schedule=dict(name="linear")) for name in ("masking", "uniform"))
SCORE = dict(PLUG_IN, schedule=dict(name="log_linear", eps=1e-3), parametrisation="score")
MIXTURE = dict(PLUG_IN, schedule=dict(name="geometric", minimum=1e-4), parametrisation="mixture")
FREE, GRID = dict(time_conditioning=False), dict(grid="uniform")
FORMS = dict(concrete_score=dict(form="denoising"), ctmc=dict(passes="score_entropy"))
FORMS |= dict(duo=dict(low=-2.67, high=1.6, until=2400), gidd=dict(weights="dynamic"))
FAMILIES = dict(  # name: (process, objective, reported bound, changes of network and of sample)
    md4=(MASKS, "md4", "any_order", {}, {}), any_order=(MASKS, "any_order", "any_order", FREE, {}),
    radd_t_dce=(MASKS, "t_dce", "any_order", FREE, {}),
    radd_lambda_dce=(MASKS, "lambda_dce", "any_order", FREE, {}),
    sedd_absorb=(MASKS, "score_entropy", "score_entropy", {}, {}),
    d3pm_absorb=(MASKS, "d3pm", "any_order", {}, {}),
    genmd4=(dict(name="state_dependent", initial_power=2.0), "genmd4", "genmd4", {}, {}),
    sedd_uniform=(SCORE, "score_entropy", "score_entropy", {}, {}),
    concrete_score=(PLUG_IN, "concrete_score", "uniform_elbo", {}, {}),
    udlm=(PLUG_IN, "uniform_elbo", "uniform_elbo", {}, {}),
    d3pm_uniform=(PLUG_IN, "d3pm", "d3pm", {}, {}), duo=(PLUG_IN, "duo", "uniform_elbo", {}, {}),
    gidd=(dict(name="hybrid", uniform=0.1), "gidd", "gidd", {}, GRID),
    uniform_ce=(MIXTURE, "cross_entropy", "uniform_elbo", {}, {}),
    d3pm_gauss=(dict(name="transition", timesteps=256, beta_end=0.08), "d3pm", "d3pm", {}, GRID),
    tauldr_absorb=(dict(name="rates", kernel="absorbing"), "ctmc", "auto", {}, {}),
    tauldr_uniform=(dict(name="rates", kernel="uniform"), "ctmc", "auto", {}, {}),
    block=(MASKS, "block", "auto", dict(FREE, local_width=0), {}),
    e2d2=(MASKS, "block", "auto", dict(FREE, local_width=0, name="encoder_decoder"), {}),
    eso=(MASKS, "eso", "eso_orders", dict(FREE, local_width=0), dict(name="eso")),
    ar=(MASKS, "autoregressive", "autoregressive", dict(causal=True), dict(name="left_to_right")),
)  # fmt: skip


def get_config(name):
    config, (process, objective, bound, network, sample) = text8_fast.get_config(), FAMILIES[name]
    config.train.num_steps, config.optim.clock = 4800, "steps"  # the same for all, to compare them
    config.process, config.objective = process, dict(name=objective, **FORMS.get(objective, {}))
    config.evals.validation.objective = config.evals.test.objective = dict(name=bound)
    config.update(network={"time_conditioning": True} | network, sample={"steps": 256} | sample)
    return config
