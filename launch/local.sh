#!/usr/bin/env bash
# Trains on this machine: makes a virtual environment if there is none, installs the
# package, runs it. Without arguments: the quickstart. Other arguments are passed on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The GPU build where there is an NVIDIA driver; that of CUDA 13 needs version 580 or newer.
build=""
if [ -r /proc/driver/nvidia/version ]; then
  driver="$(grep -m1 -oE '[0-9]{3,}\.[0-9]+' /proc/driver/nvidia/version || echo 0)"
  if [ "${driver%%.*}" -ge 580 ]; then build="[cuda13]"; else build="[cuda12]"; fi
fi
# shellcheck source=launch/environment.sh
source launch/environment.sh "$build"

if [ $# -eq 0 ]; then
  set -- --config configs/quickstart.py
fi
exec python -m md4_jax.main "$@"
