"""Config sections that select parts of the program: bench and plan."""

import dataclasses

from md4_jax.protocols import UserError


def words(text: str) -> list[str]:
    """Splits 'a, b' into ['a', 'b']."""
    return [part.strip() for part in text.split(",") if part.strip()]


BENCH_PARTS = ("train", "eval", "sample", "data")


class _Parts:
    parts: str

    @property
    def chosen(self) -> list[str]:
        return words(self.parts)

    def check(self, section: str, known: tuple[str, ...]) -> None:
        if not self.chosen:
            raise UserError(f"{section}.parts is empty: name some of {', '.join(known)}")
        for part in self.chosen:
            if part not in known:
                raise UserError(
                    f"{section}.parts contains the unknown part {part!r}. Known are "
                    f"{', '.join(known)}"
                )


@dataclasses.dataclass(frozen=True)
class BenchOptions(_Parts):
    """The `bench` section.

    parts       parts to time: train, eval, sample, data
    windows     number of repetitions; the table has their median, minimum and maximum
    seconds     least duration of a repetition
    random_tokens  vocabulary size of random tokens, which need no data; 0: the config's data and
                tokenizer
    names       number of the slowest operations to list, by their names in the source; 0: none
    """

    parts: str = "train,eval,sample,data"
    windows: int = 5
    seconds: float = 2.0
    random_tokens: int = 0
    names: int = 0

    def __post_init__(self):
        self.check("bench", BENCH_PARTS)
        if self.windows < 1:
            raise UserError(f"bench.windows must be at least 1, not {self.windows}")
        for key in ("names", "seconds", "random_tokens"):
            if getattr(self, key) < 0:
                raise UserError(f"bench.{key} must not be negative, not {getattr(self, key)}")
        if self.random_tokens and "data" in self.chosen:
            raise UserError("bench.random_tokens uses no data: remove data from bench.parts")


@dataclasses.dataclass(frozen=True)
class PlanOptions(_Parts):
    """The `plan` section: programs and devices of --mode plan.

    topology    v5e:16x16, v5p:4x4x8, v6e:8x8 (these need libtpu), a100:8, h100:8,
                h200:8 (CUDA's libraries), cpu:8
    parts       programs to compile: train, eval, sample
    random_tokens  vocabulary size, to plan without data; 0: that of the config's tokenizer
    """

    topology: str = "v5e:8x8"
    parts: str = "train,eval,sample"
    random_tokens: int = 0

    def __post_init__(self):
        self.check("plan", BENCH_PARTS[:3])
        if self.random_tokens < 0:
            raise UserError(f"plan.random_tokens must not be negative, not {self.random_tokens}")
