#!/usr/bin/env bash
# Runs the tests: makes a virtual environment if there is none, installs the package
# with what tests need, runs pytest. Arguments are passed on: ./launch/test.sh -m 'not slow'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh
source launch/environment.sh "[dev]"

exec python -m pytest "$@"
