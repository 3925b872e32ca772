"""Forward processes q(z_t | x) by their name in a config."""

from md4_jax.processes.deletion import Deletion
from md4_jax.processes.edits import Edits
from md4_jax.processes.gaussian_masking import GaussianMasking
from md4_jax.processes.hybrid import Hybrid
from md4_jax.processes.insertion import Insertion
from md4_jax.processes.masking import Masking
from md4_jax.processes.metric_path import MetricPath
from md4_jax.processes.partial_masking import PartialMasking
from md4_jax.processes.rates import Rates
from md4_jax.processes.resizing import Resizing
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform

PROCESSES = {
    "masking": Masking,
    "state_dependent": StateDependent,
    "uniform": Uniform,
    "hybrid": Hybrid,
    "transition": Transition,
    "rates": Rates,
    "insertion": Insertion,
    "deletion": Deletion,
    "edits": Edits,
    "gaussian_masking": GaussianMasking,
    "metric_path": MetricPath,
    "partial_masking": PartialMasking,
    "resizing": Resizing,
}
