"""Discrete diffusion models of text and images in JAX.

`load` returns a trained model, which can sample, infill, score, save and push: docs/python.md.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from md4_jax.model.model import Model

__version__ = "0.1.0"


def load(
    source: Any,
    config: Mapping[str, Any] | None = None,
    *,
    trust: Iterable[str] = (),
    adapters: Any = "",
) -> "Model":
    """Reads a trained model.

    source    a run directory, or RUN/checkpoints/STEP, a folder that `Model.save` wrote, a folder
              with the safetensors of another project (docs/python.md has them), or a name on the
              Hugging Face hub, hf:USER/NAME or hf:USER/NAME@REVISION. If a folder holds several
              models: one of its safetensors files, or hf:USER/NAME/FILE.safetensors
    config    keys of the config to override, as on the command line: {"mesh.fsdp": 4}
    trust     names of the packages whose code the stored config may import
    adapters  folder, or name on the hub, of a LoRA in PEFT's layout for another project's model.
              It is merged into the weight matrices or, with network.lora_rank, kept separate

    Raises UserError if there is no such model, or if it is damaged or of unknown architecture.
    """
    from md4_jax.model.changes import check_changes, check_source
    from md4_jax.model.finding import found

    check_changes(config or {})
    check_source(source)
    where = found(str(source))  # a wrong name need not wait for the import below and the devices
    from md4_jax.model.load import load as read

    return read(source, config, trust=trust, adapters=adapters, where=where)


def audit(objective: Any, process: Any, **options: Any) -> Any:
    """Checks whether an objective is a bound on -log p with a process: docs/objectives.md.

    Returns an `md4_jax.auditor.Audit`. The options are those of `md4_jax.auditor.audit`.
    """
    from md4_jax.auditor import audit as decide

    return decide(objective, process, **options)


def __getattr__(name: str) -> Any:
    """Imports UserError, the error for all mistakes of users, on first use."""
    if name == "UserError":
        from md4_jax.protocols import UserError

        return UserError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
