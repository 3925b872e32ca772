"""GenMD4 on text8, at a size for two CPU cores: each symbol has a learned schedule."""

from configs import text8_fast


def get_config():
    config = text8_fast.get_config()
    config.process = dict(name="state_dependent", initial_power=2.0)
    config.objective = dict(name="genmd4", first_time=1e-3)
    config.network.time_conditioning = True
    config.optim.process_learning_rate = 1e-2
    config.train.num_steps, config.optim.clock = 2500, "steps"
    # The integrand grows with t, so few draws per sequence give a noisy estimate.
    config.evals.validation.draws = config.evals.test.draws = 16
    return config
