"""Bounds and losses by their name in a config."""

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.autoregressive import AlongOrder, Autoregressive
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.candi import CANDI
from md4_jax.objectives.classifier import Classifier
from md4_jax.objectives.concrete_score import ConcreteScore
from md4_jax.objectives.cross_entropy import CrossEntropy
from md4_jax.objectives.ctmc import CTMC
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.dcd import DCD
from md4_jax.objectives.dreamon import DreamOn
from md4_jax.objectives.duo import Duo
from md4_jax.objectives.edit_flow import EditFlow
from md4_jax.objectives.eso import Eso, EsoOrders
from md4_jax.objectives.every_order import EveryOrder
from md4_jax.objectives.flexmdm import FlexMDM
from md4_jax.objectives.generalized_kl import GeneralizedKL
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.gidd import GIDD
from md4_jax.objectives.masked_edit_flow import MaskedEditFlow
from md4_jax.objectives.md4 import MD4, DiscreteMD4
from md4_jax.objectives.partition import Partition
from md4_jax.objectives.policy import Policy
from md4_jax.objectives.preference import Preference
from md4_jax.objectives.prime import Prime
from md4_jax.objectives.prism import Prism
from md4_jax.objectives.proseco import ProSeCo
from md4_jax.objectives.radd import TDCE, LambdaDCE
from md4_jax.objectives.reparameterized import Reparameterized
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.sdlm import SDLM
from md4_jax.objectives.sdtt import SDTT
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.objectives.wedlm import WeDLM

OBJECTIVES = {
    "md4": MD4,
    "md4_discrete": DiscreteMD4,
    "any_order": AnyOrder,
    "t_dce": TDCE,
    "lambda_dce": LambdaDCE,
    "along_order": AlongOrder,
    "autoregressive": Autoregressive,
    "block": BlockDiffusion,
    "every_order": EveryOrder,
    "eso": Eso,
    "eso_orders": EsoOrders,
    "wedlm": WeDLM,
    "sdlm": SDLM,
    "genmd4": GenMD4,
    "concrete_score": ConcreteScore,
    "score_entropy": ScoreEntropy,
    "uniform_elbo": UniformELBO,
    "cross_entropy": CrossEntropy,
    "generalized_kl": GeneralizedKL,
    "duo": Duo,
    "gidd": GIDD,
    "d3pm": D3PM,
    "ctmc": CTMC,
    "sdtt": SDTT,
    "dcd": DCD,
    "reparameterized": Reparameterized,
    "prism": Prism,
    "proseco": ProSeCo,
    "policy": Policy,
    "preference": Preference,
    "flexmdm": FlexMDM,
    "edit_flow": EditFlow,
    "masked_edit_flow": MaskedEditFlow,
    "dreamon": DreamOn,
    "partition": Partition,
    "candi": CANDI,
    "prime": Prime,
    "classifier": Classifier,
}
