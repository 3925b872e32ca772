#!/usr/bin/env bash
# Trains on this machine: makes a virtual environment if there is none, installs the package and
# runs it. Arguments are passed on to md4_jax; without arguments it runs the quickstart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Installs the GPU build if there is an NVIDIA driver.
build=""
if [ -r /proc/driver/nvidia/version ]; then build="[cuda]"; fi
# shellcheck source=launch/environment.sh
source launch/environment.sh "$build"

if [ $# -eq 0 ]; then
  set -- --config configs/quickstart.py
fi
exec python -m md4_jax "$@"
