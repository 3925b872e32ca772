#!/usr/bin/env bash
# Trains on this machine: makes a virtual environment if there is none, installs the
# package, runs it. Without arguments: the quickstart. Other arguments are passed on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh
source launch/environment.sh ""

if [ $# -eq 0 ]; then
  set -- --config configs/quickstart.py
fi
exec python -m md4_jax.main "$@"
