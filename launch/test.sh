#!/usr/bin/env bash
# Runs the tests on all cores: makes a virtual environment if there is none, installs the package
# with what tests need, runs pytest.
#   ./launch/test.sh           the quick tests, a few minutes
#   ./launch/test.sh --all     the slow ones too
# Further arguments go to pytest: ./launch/test.sh -k tokenizer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/environment.sh
source launch/environment.sh "[dev]"

# A worker takes over to a gigabyte; each takes tests from the others when it has none left.
arguments=(-q -n auto --maxprocesses 16 --dist worksteal)
if [ "${1:-}" = --all ]; then
  shift
else
  [ $# -gt 0 ] || arguments+=(-m "not slow")
fi
exec python -m pytest "${arguments[@]}" "$@"
