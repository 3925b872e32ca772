#!/usr/bin/env bash
# Runs the tests on all cores: makes a virtual environment if there is none, installs the package
# with what tests need, runs pytest.
#   ./launch/test.sh           the quick tests, a quarter of an hour on two slow cores
#   ./launch/test.sh --all     the slow ones too
# Further arguments go to pytest: ./launch/test.sh -k tokenizer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The slow tests build the documentation too.
if [ "${1:-}" = --all ]; then extras="[dev,docs]"; else extras="[dev]"; fi
# shellcheck source=launch/environment.sh
source launch/environment.sh "$extras"

# Tests compile small programs, which fresh huge pages make slower: 21.4 s of processor time instead
# of 20.4 s for a file of tests (medians of 3).
unset GLIBC_TUNABLES

# Half as many workers again as cores, since a test that started a process waits for it; each takes
# about a gigabyte, and tests from the others when it has none left.
workers=$(($(getconf _NPROCESSORS_ONLN) * 3 / 2))
arguments=(-q -n "$workers" --maxprocesses 16 --dist worksteal)
if [ "${1:-}" = --all ]; then
  shift
else
  [ $# -gt 0 ] || arguments+=(-m "not slow")
fi
exec python -m pytest "${arguments[@]}" "$@"
