# Sourced by the launch scripts: a virtual environment with the package and the extras
# named by $1, and the environment variables of a process on this kind of machine. [cuda] becomes
# [cuda13], which needs an NVIDIA driver of version 580 or newer, or [cuda12].
# shellcheck shell=bash

extras="${1:-}"
if [ "$extras" = "[cuda]" ]; then
  version=/proc/driver/nvidia/version
  driver="$(grep -m1 -oE '[0-9]{3,}\.[0-9]+' "$version" 2>/dev/null || echo 0)"
  if [ "${driver%%.*}" -ge 580 ]; then extras="[cuda13]"; else extras="[cuda12]"; fi
fi
# One after another: nodes of a cluster may share this directory.
if command -v flock >/dev/null && [ -w . ]; then
  exec 9>.md4_jax_install.lock
  flock 9
fi
if [ -z "${VIRTUAL_ENV:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
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

# Installed anew only when the requirements or the extras changed.
stamp="$VIRTUAL_ENV/.md4_jax"
wanted="$PWD $extras $(cksum pyproject.toml constraints.txt)"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  echo "installing md4_jax$extras (a few minutes the first time)"
  # The pinned versions are those that the tests ran with; another Python than
  # theirs may need others, which the ranges of pyproject.toml then choose.
  python -m pip install --quiet --disable-pip-version-check -e ".$extras" -c constraints.txt ||
    python -m pip install --quiet --disable-pip-version-check -e ".$extras"
  echo "$wanted" >"$stamp"
fi
exec 9>&-

# Huge pages for XLA's buffers on CPU.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
