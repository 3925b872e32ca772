# Sourced by the launch scripts: makes a virtual environment with the package and the extras in $1,
# and sets the environment variables for this kind of machine. [cuda] becomes [cuda13] with an NVIDIA
# driver of version 580 or newer, else [cuda12].
# shellcheck shell=bash

extras="${1:-}"
if [ "$extras" = "[cuda]" ]; then
  version=/proc/driver/nvidia/version
  driver="$(grep -m1 -oE '[0-9]{3,}\.[0-9]+' "$version" 2>/dev/null || echo 0)"
  if [ "${driver%%.*}" -ge 580 ]; then extras="[cuda13]"; else extras="[cuda12]"; fi
fi
# One process at a time, since nodes of a cluster may share this directory.
if command -v flock >/dev/null && [ -w . ]; then
  exec 9>.md4_jax_install.lock
  flock 9
fi
if [ -z "${VIRTUAL_ENV:-}" ]; then
  # `activate` is the last file that venv writes: where pip for it is missing, venv stops before it.
  if [ ! -x .venv/bin/python ] || [ ! -f .venv/bin/activate ]; then
    python="$(command -v python3 || command -v python || true)"
    if [ -z "$python" ]; then
      echo "error: no python3 found; install Python 3.11 or newer" >&2
      exit 2
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "error: Python 3.11 or newer is needed, $("$python" --version) is too old" >&2
      exit 2
    fi
    echo "making a virtual environment in .venv"
    "$python" -m venv .venv
  fi
  # shellcheck disable=SC1091
  source .venv/bin/activate
fi

# Reinstalls only if the requirements or the extras have changed.
stamp="$VIRTUAL_ENV/.md4_jax"
wanted="$PWD $extras $(cksum pyproject.toml constraints.txt)"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  echo "installing md4_jax$extras (a few minutes the first time)"
  # Pinned versions are those of the tests. Another Python version may need other versions, which
  # are then chosen from the ranges in pyproject.toml.
  python -m pip install --quiet --disable-pip-version-check -e ".$extras" -c constraints.txt ||
    python -m pip install --quiet --disable-pip-version-check -e ".$extras"
  echo "$wanted" >"$stamp"
fi
exec 9>&-

# Uses huge pages for XLA's buffers on CPUs.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
