"""Config keys that do not depend on the `name` of their section, as dataclasses."""

import dataclasses
import math
import re
from typing import Any

from md4_jax.protocols import UserError

MOST_STEPS = 2**24  # largest number of sampling steps


def check_whole(key: str, value: Any) -> None:
    """Raises UserError for a value that is not a whole number, of Python or numpy."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError(f"{key} must be a whole number, not {value!r}")


def check_seed(key: str, seed: int) -> None:
    """Raises UserError for a seed that is not a 32-bit number."""
    check_whole(key, seed)
    if not 0 <= seed < 2**32:
        raise UserError(f"{key} must lie between 0 and {2**32 - 1}, not {seed}")


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """Sizes of the mesh axes; data=0: all remaining devices."""

    data: int = 0
    fsdp: int = 1
    context: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The `train` section.

    microbatches  number of parts of a batch, computed one after another; 0: chosen by
                  training/microbatches.py
    seconds  wall-clock budget of training; 0: none
    initial  directory of another run; training starts from its averaged parameters. "": none
    trainable  regular expression: parameters of the network whose path contains a match are
             trained, the others are frozen; "": the adapters if there are any
             (network.lora_rank), otherwise all
    time_power  p above 1 draws early times more often, u = v^p with v uniform, and multiplies each
             loss by p v^(p-1). The mean is the same. Its variance is smaller if the loss is
             largest at early times
    """

    num_steps: int = 1000
    batch_size: int = 512
    microbatches: int = 0
    seed: int = 0
    seconds: float = 0.0
    max_skipped_in_a_row: int = 20
    ema: float = 0.9999
    time_power: float = 1.0
    initial: str = ""
    trainable: str = ""

    def __post_init__(self):
        least = {"num_steps": 1, "batch_size": 1, "microbatches": 0, "max_skipped_in_a_row": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise UserError(
                    f"train.{name} must be at least {smallest}, not {getattr(self, name)}"
                )
        check_seed("train.seed", self.seed)
        if self.seconds < 0:
            raise UserError(f"train.seconds must not be negative, not {self.seconds}")
        if not 0 <= self.ema < 1:
            raise UserError(f"train.ema must lie in [0, 1), not {self.ema}")
        if not 1 <= self.time_power <= 10:
            raise UserError(f"train.time_power must lie in [1, 10], not {self.time_power}")
        try:
            re.compile(self.trainable)
        except re.error as error:
            raise UserError(
                f"train.trainable={self.trainable!r} is not a regular expression: {error}"
            ) from error


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """Keys of the `sample` section for every sampler, except transforms and prompts.

    num         number of samples, of each template
    steps       reverse steps T of a named grid
    grid        times of the steps: cosine, uniform, log_linear, a list that falls from 1.0 to 0.0,
                or optimal, computed from the information profile of the run
    length      tokens per sequence; 0: as in training
    block       size of blocks that are sampled one after another, each given those before it; 0:
                objective.block if there is one, else the whole text
    memory      number of tokens of earlier blocks that a block sees; 0: as in training
    cached      whether their keys and values are cached instead of recomputed for each block
    dual_cache  whether a block also sees the later tokens, by keys and values that are computed
                once per block (Fast-dLLM)
    next_token  whether the first token of a block is the most likely one after the previous block,
                for shifted networks (Fast-dLLM v2) and those with a causal context (Nemotron);
                with dual_cache it is drawn at the temperature (Dream in Fast-dLLM)
    stop        tokens after which a text is cut: 'end_of_text', or entries of the vocabulary such
                as '<|eot_id|>', separated by spaces; '' for none
    min_entropy with blocks, a text also ends when the symbols of its last `memory` tokens have an
                entropy below this number of nats, which is a sign of repetition. 0: never
    stride      number of new tokens in each window, for text longer than in training; 0: one
                window, the network sees the whole text at once
    label       class of the samples, for a network with classes; -1: no class or, for a network
                that was trained with label_dropout=0, a random class for each sample
    guidance    weight w of classifier-free guidance: each step follows p(x | label)^w p(x)^(1 - w).
                Without a label the condition is the prompt
    exclude     vocabulary entries, separated by spaces, that are never drawn
    late        vocabulary entries, separated by spaces, that `confidence` reveals last
    batch_size  number of sequences sampled at once
    seed        random seed; sample i depends only on the seed and i
    trace       whether to write an animation of how the first sample is generated
    judge       model whose bound on -log p of the samples is reported: '' none, 'self', or the
                directory of another run with the same tokenizer
    """

    num: int = 4
    steps: int = 256
    grid: str | tuple[float, ...] = "cosine"
    length: int = 0
    stride: int = 0
    block: int = 0
    memory: int = 0
    cached: bool = True
    dual_cache: bool = False
    next_token: bool = False
    stop: str = ""
    min_entropy: float = 0.0
    label: int = -1
    guidance: float = 1.0
    exclude: str = ""
    late: str = ""
    batch_size: int = 16
    seed: int = 0
    trace: bool = False
    judge: str = ""

    def __post_init__(self):
        check_seed("sample.seed", self.seed)
        for name in ("num", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"sample.{name} must be at least 1, not {getattr(self, name)}")
        if self.steps > MOST_STEPS:
            raise UserError(
                f"sample.steps must be at most {MOST_STEPS}, not {self.steps}: float32 cannot "
                "represent more different times"
            )
        for name in ("length", "stride", "block", "memory", "min_entropy"):
            if getattr(self, name) < 0:
                raise UserError(f"sample.{name} must not be negative, not {getattr(self, name)}")
        if self.label < -1:
            raise UserError(f"sample.label must be a class or -1 for none, not {self.label}")
        if not math.isfinite(self.guidance):
            raise UserError(f"sample.guidance must be a finite number, not {self.guidance}")


@dataclasses.dataclass(frozen=True)
class PromptOptions:
    """Keys of the `sample` section that fix tokens.

    prompt     text that every sample begins with
    suffix     text that every sample ends with
    template   text in which each `blank` is one token to be filled; tokens after it are free
    templates  file with a template in each line, sampled `num` times each; a line break within a
               template is written \\n
    blank      the character that marks a token to be filled
    inpaint    image file of the size of the data, to be filled in partly
    image_from examples of the data instead of a file, by split and number: test:3, or test:0,3,7
    mask       image file of the same size: its white pixels are filled in
    box        rectangle that is filled in, instead of a mask: top,left,height,width
    """

    prompt: str = ""
    suffix: str = ""
    template: str = ""
    templates: str = ""
    blank: str = "_"
    inpaint: str = ""
    image_from: str = ""
    mask: str = ""
    box: str = ""

    @property
    def is_given(self) -> bool:
        """Returns whether any token is fixed."""
        given = dataclasses.asdict(self).items()
        return any(value for key, value in given if key != "blank")

    def __post_init__(self):
        if len(self.blank) != 1:
            raise UserError(f"sample.blank must be one character, not {self.blank!r}")
        used = [key for key in ("template", "templates") if getattr(self, key)]
        used += ["prompt or sample.suffix"] if self.prompt or self.suffix else []
        if len(used) > 1:
            raise UserError(f"sample.{used[0]} cannot be combined with sample.{used[1]}")


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """The `checkpoint` section: when checkpoints are saved, and which are kept.

    every       steps between saves; 0: only at the end, or as the other keys say
    seconds     longest time between saves, in addition to `every`; 0: no limit
    keep        how many of the newest checkpoints are kept
    keep_every  steps between checkpoints that are saved and never deleted; 0: none
    best        name of an evaluator: the checkpoint with its lowest result is kept too; "": none
    retries     how often a failed save or log write is retried, after 1, 2, 4, ... seconds
    """

    every: int = 1000
    seconds: float = 0.0
    keep: int = 3
    keep_every: int = 0
    best: str = ""
    retries: int = 5

    def __post_init__(self):
        least = {"every": 0, "keep": 1, "keep_every": 0, "seconds": 0, "retries": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value < smallest:
                raise UserError(f"checkpoint.{name} must be at least {smallest}, not {value}")

    def is_due(self, step: int) -> bool:
        """Returns whether this step is saved independently of time and evaluations."""
        return any(every and step % every == 0 for every in (self.every, self.keep_every))


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """The `eval` section: which checkpoint is evaluated and sampled.

    checkpoint  "newest"; "best", by the evaluator in checkpoint.best; or a step
    """

    checkpoint: str | int = "newest"

    def __post_init__(self):
        if self.checkpoint not in ("newest", "best") and not str(self.checkpoint).isdecimal():
            raise UserError(
                f"eval.checkpoint must be newest, best or a step, not {self.checkpoint!r}"
            )


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """The `log` section.

    every     steps between two lines of metrics
    trackers  programs that also get the metrics of metrics.jsonl: tensorboard, wandb
    profile   first and last step that JAX's profiler traces; (): none
    """

    every: int = 100
    trackers: str = "tensorboard"
    profile: tuple[int, ...] = ()

    def __post_init__(self):
        if self.every < 1:
            raise UserError(f"log.every must be at least 1, not {self.every}")
