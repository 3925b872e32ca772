"""The commands that README and docs show are ones that the program takes, with keys that exist."""

import re
import shlex
from pathlib import Path

import pytest

import md4_jax
from md4_jax.config import command, schema
from md4_jax.protocols import UserError

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"(?:^(?: {4}.*)?\n)+", re.M)
STARTS = ("python -m md4_jax ", "python -m md4_jax.main ", "md4_jax ", "./launch/local.sh ")
# Runs that a command without --config may be about, since a page does not say which.
RUNS = ("quickstart", "digits", "text8", "owt")
SPAN = re.compile(r"--config\.|--(?:config|mode|workdir) \S")


def commands(text: str) -> list[str]:
    """The commands in the indented and fenced blocks of a page, each on one line."""
    blocks = BLOCK.findall(text) + re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith(STARTS)]


def spans(text: str) -> list[str]:
    """The arguments that a page shows within a line: `--mode eval`, `--config.sample.num=8`."""
    outside = BLOCK.sub("\n", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [span for span in re.findall(r"`([^`\n]+)`", outside) if SPAN.match(span)]


def arguments(line: str) -> list[str]:
    """The arguments of a command; [] for a synopsis such as [--config FILE]."""
    words = shlex.split(line, comments=True)
    words = words[3 if words[0] == "python" else 1 :]
    return [] if any(word.startswith("[--") for word in words) else words


@pytest.mark.parametrize("flag", ["--workdir", "--config", "--distributed", "--host"])
def test_an_empty_flag_is_a_variable_that_was_not_set(flag):
    """An empty --workdir would be the current directory, and an empty --host all networks."""
    with pytest.raises(
        UserError, match=f"^{flag} is empty, perhaps because a shell .* leave {flag}"
    ):
        command.parse([flag, ""])


@pytest.mark.parametrize(
    "words, said",
    [
        ("--mode trian", "unknown --mode 'trian'; did you mean 'train'?"),
        ("evl runs/q", "unknown mode 'evl'; did you mean 'eval'?"),
        ("zzz runs/q", "unknown mode 'zzz'. Known: audit, bench, eval,"),
        ("resume runs/q", "unknown mode 'resume': to resume a run give --workdir DIR alone"),
        ("--mode resume", "unknown --mode 'resume': to resume a run give --workdir DIR alone"),
        ("--confg a.py", "unknown flag --confg: did you mean --config?"),
        ("--workdri=a", "unknown flag --workdri: did you mean --workdir?"),
        ("--config a.py train", "argument train: the mode must be the first argument, or"),
        ("runs/q", "unknown argument runs/q: the mode must be the first argument. To draw samples "
                   "from the run in that directory type md4_jax sample runs/q. Other modes"),
        ("Q --config.seed=1", "type md4_jax sample Q. Other modes"),
        ("hf:A/B", "md4_jax serve hf:A/B, or md4_jax import hf:A/B --workdir DIR"),
        ("--config owt runs/q", "to name the directory of a run type --workdir runs/q"),
        ("a.py --workdir b", "unknown argument a.py: did you mean --config a.py?"),
        ("--train.seed=8", "did you mean --config.train.seed=8?"),
        ("train.seed=8", "did you mean --config.train.seed=8?"),
        ("--confg.train.seed=8", "did you mean --config.train.seed=8?"),
    ],
)  # fmt: skip
def test_a_misspelt_flag_is_answered_by_the_nearest(words, said):
    with pytest.raises(UserError) as error:
        command.parse(words.split())
    assert said in str(error.value)


def test_the_value_of_an_unknown_flag_is_no_run(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--nothing-like-it", "runs/q"])
    assert "unknown arguments: --nothing-like-it runs/q; keys are" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        ("eval a --topology cpu:8", "--topology=cpu:8 is for --mode plan, not --mode eval"),
        (
            "sample hf:USER/NAME",
            "--workdir=hf:USER/NAME must be a folder: md4_jax import hf:USER/NAME --workdir DIR",
        ),
        ("ls runs --config a.py", "--config=a.py is not for --mode ls, which lists the runs in"),
        ("ls runs --config.data.length=8", "--config.data.length is not for --mode ls"),
    ],
)
def test_what_is_of_another_mode_is_refused(words, said):
    with pytest.raises(UserError) as error:
        command.parse(words.split())
    assert said in str(error.value)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        command.parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"md4_jax {md4_jax.__version__}\n"


@pytest.mark.parametrize(
    "words, long",
    [
        ("train --config a.py", "--mode train --config a.py"),
        ("train runs/a", "--mode train --workdir runs/a"),
        ("eval runs/a --evals b", "--mode eval --workdir runs/a --evals b"),
        ("sample runs/a", "--mode sample --workdir runs/a"),
        ("serve runs/a", "--mode serve --from runs/a"),
        ("import hf:gpt2 --workdir a", "--mode import --from hf:gpt2 --workdir a"),
        ("ls", "--mode ls"),
        ("ls runs", "--mode ls --workdir runs"),
    ],
)
def test_the_mode_may_be_the_first_word(words, long):
    assert command.parse(words.split()) == command.parse(long.split())


def test_an_evaluator_that_is_named_twice_runs_once():
    assert command.parse(["--mode", "eval", "--evals", "b,a,b"])[0].evals == ("b", "a")


def complaint(words: list[str]) -> str:
    """What the program would say against the arguments; '' if nothing."""
    words = [re.sub(r"=N$", "=1", word) for word in words]
    try:
        flags, assignments = command.parse(words)
    except SystemExit:
        return f"no such flag, or no such mode: {' '.join(words)}"
    except UserError as error:
        return str(error)
    if flags.mode == "import":
        return ""
    told = flags.config if flags.config and flags.config != "FILE" else None
    found = [loaded(config, assignments) for config in ([told] if told else RUNS)]
    return "" if "" in found else found[0]


def loaded(config: str, assignments: dict[str, str]) -> str:
    """The error of loading a config with assignments; '' if there is none."""
    try:
        schema.load_config(config, assignments)
    except UserError as error:
        return f"--config {config}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_program_takes_the_commands_of_a_page(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    shown = [arguments(line) for line in commands(text)]
    shown += [shlex.split(span) for span in spans(text)]
    wrong = {" ".join(words): complaint(words) for words in shown}
    assert {words: said for words, said in wrong.items() if said} == {}


def test_scripts_take_the_flags_that_pages_show():
    """Each --flag of a `python tools/X.py` is in that script."""
    wrong = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for script, rest in re.findall(r"python (tools/\w+\.py)([^`\n#|]*)", text):
            source = (ROOT / script).read_text()
            flags = re.findall(r"(?<=\s)--[a-z][\w-]*", rest.partition(" -- ")[0])
            wrong += [
                (page.name, script, flag)
                for flag in flags
                if f'"{flag}"' not in source and flag not in ("--help", "--config")
            ]
    assert wrong == []


def test_a_wrong_command_is_noticed(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = "Text.\n\n    python -m md4_jax --config configs/quickstart.py \\\n      --config.{}\n"
    (line,) = commands(page.format("network.depth=2  # small"))
    assert complaint(arguments(line)) == ""
    (line,) = commands(page.format("network.deph=2"))
    assert "deph" in complaint(arguments(line))
    assert complaint(["--mode", "trane"]) != ""
    assert "nowhere.py" in complaint(["--config", "configs/nowhere.py"])
