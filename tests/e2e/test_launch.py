"""The launch scripts, without a network: a stub stands where Python would."""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest

SCRIPTS = sorted(p.name for p in (Path(__file__).parents[2] / "launch").glob("*.sh"))


@pytest.fixture
def launch(tmp_path):
    """A copy of the launch scripts in a directory of their own, and how to run one there."""
    root = tmp_path / "check out"
    shutil.copytree("launch", root / "launch")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(name, root / name)
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    stub = venv / "bin" / "python"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "[%s]" "$word"; done\necho\n')
    stub.chmod(0o755)
    path = f"{venv / 'bin'}:{os.environ['PATH']}"

    def launch(script, *arguments, **variables):
        return subprocess.run(
            ["bash", root / "launch" / script, *arguments],
            cwd=tmp_path,
            env={"PATH": path, "VIRTUAL_ENV": str(venv), "HOME": str(tmp_path), **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.splitlines()

    return launch


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_shell_reads_it(script):
    subprocess.run(["bash", "-n", f"launch/{script}"], check=True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", "-x", f"launch/{script}"], check=True)


def test_local_without_arguments_is_the_quickstart(launch):
    assert launch("local.sh")[-1] == "[-m][md4_jax][--config][configs/quickstart.py]"


def test_local_passes_arguments_on(launch):
    arguments = ("--config", "a b.py", "--config.sample.num=3", "--workdir", "x y", "*")
    assert launch("local.sh", *arguments)[-1] == (
        "[-m][md4_jax][--config][a b.py][--config.sample.num=3][--workdir][x y][*]"
    )


@pytest.mark.parametrize(
    "arguments, passed_on",
    [
        ((), "[-m][not slow]"),
        (("--all",), ""),
        (("--all", "--campaign"), "[--campaign]"),
        (("-k", "a b"), "[-k][a b]"),
    ],
)
def test_tests_are_the_quick_ones_unless_asked_for(arguments, passed_on, launch):
    """Always on all cores, and with tests that are taken over by who has none left."""
    number = os.cpu_count() * 3 // 2
    workers = f"[-m][pytest][-q][-n][{number}][--maxprocesses][16][--dist][worksteal]"
    assert launch("test.sh", *arguments)[-1] == workers + passed_on


def test_machines_that_share_a_directory_install_one_after_another(launch, tmp_path):
    if shutil.which("flock") is None:
        pytest.skip("needs flock")
    found = []
    one = threading.Thread(target=lambda: found.extend(launch("local.sh")))
    with open(tmp_path / "check out" / ".md4_jax_install.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one.start()
        one.join(1.0)
        assert one.is_alive() and not found  # while another installs
    one.join()
    assert any("[install]" in line for line in found)


def test_an_environment_that_was_made_halfway_is_finished(launch, tmp_path):
    """Without python3-venv, Debian's Python leaves .venv with a Python, but nothing to activate."""
    half, made = tmp_path / "check out" / ".venv" / "bin", tmp_path / "made" / "python3"
    half.mkdir(parents=True)
    made.parent.mkdir()
    (half / "python").symlink_to(tmp_path / "venv" / "bin" / "python")
    made.write_text('#!/bin/sh\n[ "$2" != venv ] || echo "VIRTUAL_ENV=$3" >"$3/bin/activate"\n')
    made.chmod(0o755)
    path = f"{made.parent}:{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"
    assert launch("local.sh", VIRTUAL_ENV="", PATH=path)[-1].startswith("[-m][md4_jax]")


def test_the_package_is_installed_once_for_the_same_requirements(launch):
    first, second, other = launch("local.sh"), launch("local.sh"), launch("test.sh")
    assert any("[install]" in line for line in first)
    assert not any("[install]" in line for line in second)
    assert any("[.[dev]]" in line for line in other)


@pytest.mark.parametrize("extra", ["tpu", "cuda", "cuda12", "cuda13", "of Slurm"])
def test_what_a_worker_installs_exists(extra, launch):
    """pip only warns of an extra that does not exist, and the run would then use CPUs."""
    if extra == "of Slurm":
        (extra,) = re.findall(r"MD4_JAX_EXTRA-(\w+)", Path("launch/slurm.sh").read_text())
    (line,) = (x for x in launch("worker.sh", MD4_JAX_EXTRA=extra) if "[install]" in x)
    (found,) = re.findall(r"\[\.\[(\w+)\]\]", line)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert found.startswith(extra) and found in project["optional-dependencies"]


def test_a_worker_joins_the_others(launch, monkeypatch):
    arguments = ("--config", "a.py", "--workdir", "x y")
    expected = "[-m][md4_jax][--distributed][auto][--config][a.py][--workdir][x y]"
    assert launch("worker.sh", *arguments)[-1] == expected


def dry_run(script, *arguments, **variables):
    return subprocess.run(
        [f"launch/{script}", "--dry-run", *arguments],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


ARGUMENTS = ("--config", "configs/owt.py", "--workdir", "/mnt/runs/a b")


def test_the_pod_script_prints_what_it_would_run():
    """The words survive the second shell, which reads them on the worker."""
    done = dry_run("tpu_pod.sh", "run", *ARGUMENTS, PROJECT="mine", ZONE="there", NAME="pod")
    assert done.returncode == 0, done.stderr
    archive, copied, started = done.stdout.splitlines()[:3]
    assert archive.startswith("git archive") and "pod:md4_jax.tar.gz --worker all" in copied
    words = shlex.split(started)
    assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"]
    assert words[-4:] == ["--project", "mine", "--zone", "there"]
    remote = words[words.index("--command") + 1]
    inner = remote[remote.index("launch/worker.sh") :].partition(">~")[0]
    assert shlex.split(inner)[1:] == list(ARGUMENTS)
    created = dry_run("tpu_pod.sh", "create", PROJECT="mine", ACCELERATOR="v6e-64").stdout
    assert "--accelerator-type v6e-64" in created and "--spot" in created


def test_a_pod_gets_no_second_run_while_one_is_under_way(tmp_path):
    """`stop` would end only the second one. The workers' command, run on this machine."""
    done = dry_run("tpu_pod.sh", "run", *ARGUMENTS, PROJECT="mine")
    words = shlex.split(done.stdout.splitlines()[2])
    remote, worker = words[words.index("--command") + 1], tmp_path / "md4_jax" / "launch"
    worker.mkdir(parents=True)
    (worker / "worker.sh").write_text("exec sleep 60\n")
    packed = ["tar", "czf", "md4_jax.tar.gz", "md4_jax"]
    subprocess.run(packed, cwd=tmp_path, check=True)
    here = dict(cwd=tmp_path, env=os.environ | {"HOME": str(tmp_path)}, stderr=subprocess.PIPE)
    codes, pids, errors = [], [], []
    for _ in range(2):
        ended = subprocess.run(["bash", "-c", remote], timeout=60, check=False, **here)
        codes.append(ended.returncode)
        errors.append(ended.stderr)
        pids.append(int((tmp_path / "md4_jax.pid").read_text()))
    os.killpg(pids[0], signal.SIGKILL)
    assert codes == [0, 2] and pids[0] == pids[1]
    assert ended.stderr == b"error: a run is under way: stop it first\n"
    assert errors[0] == b""  # nothing about the file that the first run does not find


def test_the_pod_script_runs_nothing_while_changes_are_not_committed(tmp_path):
    """The workers would train without them."""
    shutil.copytree("launch", tmp_path / "launch")
    (tmp_path / "mine.py").write_text("a config of my own")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [tmp_path / "launch" / "tpu_pod.sh", "run", *ARGUMENTS],
        env={"PATH": os.environ["PATH"], "PROJECT": "mine", "ZONE": "there"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "?? mine.py" in done.stderr
    assert "what is committed" in done.stderr and "gcloud" not in done.stdout


def test_a_pod_is_not_deleted_to_be_resumed_without_its_run(tmp_path):
    """Making it again takes long and costs money; the run could not start on it."""
    done = dry_run("tpu_pod.sh", "resume", "--config", "a.py", PROJECT="mine")
    assert done.returncode == 2 and "resume needs --workdir" in done.stderr
    assert done.stdout == ""
    resumed = dry_run("tpu_pod.sh", "resume", *ARGUMENTS, PROJECT="mine").stdout.splitlines()
    assert [line.split()[4] for line in resumed if line.startswith("gcloud")] == [
        "delete", "create", "scp", "ssh"
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["logs", "stop", "delete"])
def test_the_other_pod_commands(command):
    done = dry_run("tpu_pod.sh", command, PROJECT="mine")
    assert done.returncode == 0 and done.stdout.startswith("gcloud compute tpus ")


def test_the_pod_script_says_what_is_missing():
    assert "set PROJECT" in dry_run("tpu_pod.sh", "create").stderr
    assert "needs --workdir" in dry_run("tpu_pod.sh", "run", PROJECT="mine").stderr
    assert dry_run("tpu_pod.sh", "fly", PROJECT="mine").returncode == 2


def test_the_slurm_script_prints_what_it_would_run():
    done = dry_run("slurm.sh", *ARGUMENTS)
    assert done.stdout == f"srun --kill-on-bad-exit=1 bash launch/worker.sh {' '.join(ARGUMENTS)}\n"
    assert "needs --workdir" in dry_run("slurm.sh", "--config", "a.py").stderr


def test_the_job_set_starts_the_worker():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(Path("launch/gke_jobset.yaml").read_text())
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["command"] == ["bash", "launch/worker.sh"] and "--workdir" in worker["args"]
