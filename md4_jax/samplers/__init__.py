"""Samplers and time grids by their name in a config."""

from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.edit import Edit
from md4_jax.samplers.entropy_bound import EntropyBound
from md4_jax.samplers.eso import Eso
from md4_jax.samplers.flow import Flow
from md4_jax.samplers.grids import cosine, log_linear, uniform
from md4_jax.samplers.halton import Halton
from md4_jax.samplers.insertion import Insert
from md4_jax.samplers.jumps import Euler, TauLeaping
from md4_jax.samplers.left_to_right import LeftToRight
from md4_jax.samplers.longest_prefix import LongestPrefix
from md4_jax.samplers.masked_edit import MaskedEdit
from md4_jax.samplers.metropolis import Metropolis
from md4_jax.samplers.orders import AnyOrder, FirstHitting
from md4_jax.samplers.planning import PathPlanning
from md4_jax.samplers.predictor_corrector import PredictorCorrector
from md4_jax.samplers.prism import Prism
from md4_jax.samplers.proseco import ProSeCo
from md4_jax.samplers.psi import Psi
from md4_jax.samplers.remask import Remask
from md4_jax.samplers.reparameterized import Reparameterized
from md4_jax.samplers.resize import Resize
from md4_jax.samplers.self_speculative import SelfSpeculative
from md4_jax.samplers.streaming import Streaming
from md4_jax.samplers.tweedie import Tweedie

SAMPLERS = {
    "ancestral": Ancestral,
    "any_order": AnyOrder,
    "confidence": Confidence,
    "edit": Edit,
    "entropy_bound": EntropyBound,
    "eso": Eso,
    "euler": Euler,
    "first_hitting": FirstHitting,
    "flow": Flow,
    "halton": Halton,
    "insert": Insert,
    "left_to_right": LeftToRight,
    "longest_prefix": LongestPrefix,
    "masked_edit": MaskedEdit,
    "metropolis": Metropolis,
    "path_planning": PathPlanning,
    "predictor_corrector": PredictorCorrector,
    "prism": Prism,
    "proseco": ProSeCo,
    "psi": Psi,
    "remask": Remask,
    "reparameterized": Reparameterized,
    "resize": Resize,
    "self_speculative": SelfSpeculative,
    "streaming": Streaming,
    "tau_leaping": TauLeaping,
    "tweedie": Tweedie,
}

GRIDS = {
    "cosine": cosine,
    "log_linear": log_linear,
    "uniform": uniform,
}
