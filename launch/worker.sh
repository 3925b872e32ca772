#!/usr/bin/env bash
# Runs on each machine of a pod or cluster: installs the package once, then runs it together with
# the other machines. Arguments are passed on to md4_jax.
#   MD4_JAX_EXTRA        extra to install: tpu (default), cuda, cuda12, cuda13, or empty
#   MD4_JAX_DISTRIBUTED  auto (default), or HOST:PORT,PROCESSES,INDEX
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${MD4_JAX_EXTRA-tpu}
# shellcheck source=launch/environment.sh
source launch/environment.sh "${extra:+[$extra]}"

# Prefixes each line with the machine's name, since the logs of all machines may be mixed.
export PYTHONUNBUFFERED=1
exec python -m md4_jax --distributed "${MD4_JAX_DISTRIBUTED:-auto}" "$@"
