# Sourced by torchrun.sh and scripts/test.sh. `setup [EXTRA]` makes .venv if needed and sets $python.
# PYTHON=...     the interpreter to make .venv with; without it, the first of the usual names that is >= 3.11.
# LP_SETUP=skip  installs nothing and takes $PYTHON (python3) as it is, for images that bring torch along.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  exit 2
}

find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    # Run it: a name on the PATH may be too old, a shim of nothing, or lack venv.
    "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    echo "$candidate"
    return
  done
  die "no Python >= 3.11 with venv among: ${candidates[*]}; install one, or name it with PYTHON=/path/to/python"
}

install() { # BASE EXTRA STAMP VERSION
  local quiet=()
  [ "$(cat "$3" 2>/dev/null)" != "$4" ] || return 0 # another launch did it while this one waited
  echo "set-up: installing into .venv (minutes the first time)" >&2
  [ -t 2 ] || quiet=(--quiet)
  "$python" -m pip --version >/dev/null 2>&1 || "$1" -m venv --clear "$root/.venv" || return
  # Bytecode is compiled when a module is first imported: most of what is installed never is.
  # The odd expansion: an empty array is unbound to bash 3.
  "$python" -m pip install --no-compile ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check \
    -c "$root/constraints.txt" -e "$root${2:+[$2]}" >&2 </dev/null || return
  # The clone's folder on the path: pip's own finder comes after a folder called lp in the current one, such as a clone.
  "$python" -c 'import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "lp-clone.pth").write_text(sys.argv[1] + "\n")' "$root" || return
  echo "$4" >"$3"
}

setup() {
  local extra=${1:-} base stamp version
  if [ "${LP_SETUP:-}" = skip ]; then
    python=${PYTHON:-python3}
    return
  fi
  python=$root/.venv/bin/python
  if [ -n "${PYTHON:-}" ]; then
    base=$(find_python) || exit
    [ ! -x "$python" ] || [ "$("$base" -V)" = "$("$python" -V)" ] ||
      die ".venv has $("$python" -V), PYTHON is $("$base" -V); remove .venv to make it anew, or unset PYTHON"
  fi
  # A stamp says what was installed from, and where to, so that a second call costs nothing.
  stamp=$root/.venv/lp-setup${extra:+-$extra}
  version="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
  [ "$(cat "$stamp" 2>/dev/null)" != "$version" ] || return 0
  base=$(find_python) || exit
  # One set-up at a time: the nodes of a launch may share the clone. The lock is this file, so that none is left over.
  {
    ! command -v flock >/dev/null || flock 9
    install "$base" "$extra" "$stamp" "$version" 9>&- || die "set-up failed; the reason is above"
  } 9>>"$root/scripts/setup.sh"
}
