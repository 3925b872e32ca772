"""GenMD4 at a size for two CPU cores: a schedule learned for each symbol of text8."""

from configs import text8_fast


def get_config():
    config = text8_fast.get_config()
    config.process = dict(name="state_dependent", initial_power=2.0)
    config.objective = dict(name="genmd4", first_time=1e-3)
    config.network.time_conditioning = True
    config.optim.process_learning_rate = 1e-2
    config.train.num_steps = 2500
    # Its integrand grows with t, so that few draws of t a sequence are noisy.
    config.evals.validation.draws = config.evals.test.draws = 16
    return config
