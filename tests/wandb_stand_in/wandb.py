"""Stand-in for the package wandb: keeps what it is told in place of sending it."""

told = []


class Image:
    def __init__(self, pixels):
        self.shape = pixels.shape


class Html:
    def __init__(self, text):
        self.text = text


class Settings:
    def __init__(self, finish_timeout):
        pass


class Run:
    def define_metric(self, name, step_metric):
        told.append(("define_metric", name, step_metric))

    def log(self, row):
        told.append(("log", row))

    def finish(self, exit_code):
        told.append(("finish", exit_code))


def init(**options):
    told.append(("init", options))
    return Run()
