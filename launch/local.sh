#!/usr/bin/env bash
# Trains on this machine: makes a virtual environment if there is none, installs the
# package, runs it. Without arguments: the quickstart. Other arguments are passed on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The GPU build where there is an NVIDIA driver.
build=""
if [ -r /proc/driver/nvidia/version ]; then build="[cuda]"; fi
# shellcheck source=launch/environment.sh
source launch/environment.sh "$build"

if [ $# -eq 0 ]; then
  set -- --config configs/quickstart.py
fi
exec python -m md4_jax "$@"
