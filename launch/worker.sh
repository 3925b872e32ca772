#!/usr/bin/env bash
# What runs on each machine of a pod or cluster, whoever starts it: installs the package once,
# then runs it together with the others. Arguments are passed on to md4_jax.
#   MD4_JAX_EXTRA        what to install besides: tpu (default), cuda, cuda12, cuda13, or empty
#   MD4_JAX_DISTRIBUTED  auto (default), or HOST:PORT,PROCESSES,INDEX
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${MD4_JAX_EXTRA-tpu}
# shellcheck source=launch/environment.sh
source launch/environment.sh "${extra:+[$extra]}"

# A line may stand on several machines at once: the logs of all are told apart by the name.
export PYTHONUNBUFFERED=1
exec python -m md4_jax --distributed "${MD4_JAX_DISTRIBUTED:-auto}" "$@"
