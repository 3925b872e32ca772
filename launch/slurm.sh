#!/usr/bin/env bash
# Trains on a Slurm cluster of GPU machines, with one process per machine:
#
#   sbatch launch/slurm.sh --config configs/owt.py --workdir /shared/runs/owt
#   launch/slurm.sh --dry-run ARGUMENTS      prints what it would run
#
# The job gets SIGTERM 120 s before its end, saves, and is requeued; the same command then resumes it.
# Fill in:
#SBATCH --job-name=md4_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=md4_jax-%j.log
set -euo pipefail
# Slurm runs a copy of this file; the checkout is the directory where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"

run=(srun --kill-on-bad-exit=1)
if [ "${1:-}" = --dry-run ]; then
  run=(echo srun --kill-on-bad-exit=1)
  shift
fi
case " $* " in
  *" --workdir"*) ;;
  *)
    echo "error: needs --workdir, a directory that all machines see" >&2
    exit 2
    ;;
esac
export MD4_JAX_EXTRA=${MD4_JAX_EXTRA-cuda}
status=0
"${run[@]}" bash launch/worker.sh "$@" || status=$?
# 128 + 15: exit code after SIGTERM, with the run saved.
if [ "$status" -eq 143 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
