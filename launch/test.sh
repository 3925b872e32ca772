#!/usr/bin/env bash
# Runs the tests on all cores: makes a virtual environment if there is none, installs the package
# with the test requirements, and runs pytest.
#   ./launch/test.sh           the quick tests, ten minutes on two slow cores
#   ./launch/test.sh --all     also the slow ones
# Other arguments are passed on to pytest: ./launch/test.sh -k tokenizer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The slow tests also build the documentation.
if [ "${1:-}" = --all ]; then extras="[dev,docs]"; else extras="[dev]"; fi
# shellcheck source=launch/environment.sh
source launch/environment.sh "$extras"

# No huge pages: they slow down tests, which compile small programs (21.4 s of processor time instead
# of 20.4 s for a test file, medians of 3).
unset GLIBC_TUNABLES

# 1.5 workers per core, since a test that starts a process waits for it. Each worker takes about a
# gigabyte, and takes over tests of other workers when it is idle.
workers=$(($(getconf _NPROCESSORS_ONLN) * 3 / 2))
arguments=(-q -n "$workers" --maxprocesses 16 --dist worksteal)
if [ "${1:-}" = --all ]; then
  shift
else
  [ $# -gt 0 ] || arguments+=(-m "not slow")
fi
exec python -m pytest "${arguments[@]}" "$@"
