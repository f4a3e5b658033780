#!/usr/bin/env bash
# Runs the fast suite with the newest releases of everything, with the pinned ones, and with the oldest of the ranges in
# pyproject.toml: `bash scripts/versions.sh [newest|pinned|oldest]... [-- ARGUMENTS OF PYTEST]`, all three by default.
# Each environment is made once, in .versions/NAME (VERSIONS=folder puts it elsewhere); `newest` anew after a day.
# A run that was stopped, or that failed, goes on with the tests that have not passed on this very code and environment.
# WORKERS (2) are pytest's. NICE=10 leaves the machine to others.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
versions=${VERSIONS:-$root/.versions}

names=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    newest | pinned | oldest) names+=("$1") ;;
    *) die "no environment is called $1; there are newest, pinned and oldest" ;;
  esac
  shift
done
[ $# -eq 0 ] || shift
[ ${#names[@]} -gt 0 ] || names=(oldest pinned newest)

say() { printf '%s\n' "versions: $*" >&2; }

# What an environment was made from. The newest releases are others tomorrow.
recipe() {
  cat pyproject.toml constraints.txt scripts/lowest_versions.py | cksum
  [ "$1" != newest ] || date +%F
}

# In a function that is asked for its status, as these two are, set -e is off: a step that fails has to say so itself.
make() { # NAME: the environment, unless it is there
  local folder=$versions/$1 base
  local arguments=(-e "$root[dev,serve,grammar,quantized]")
  if [ "$(cat "$folder/lp-recipe" 2>/dev/null)" = "$(recipe "$1")" ]; then
    say "$1: $folder is there"
    "$folder/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check -e "$root" # of this clone, not of the last one
    return
  fi
  base=$(find_python) || exit
  say "$1: installing into $folder (minutes)"
  "$base" -m venv --clear "$folder" || return
  case $1 in
    pinned) arguments+=(-c constraints.txt) ;;
    oldest)
      "$folder/bin/python" scripts/lowest_versions.py >"$folder/lowest.txt" || return
      arguments+=(-c "$folder/lowest.txt")
      ;;
  esac
  "$folder/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "${arguments[@]}" || return
  recipe "$1" >"$folder/lp-recipe"
}

suite() { # NAME, arguments of pytest: the fast suite; what has passed is in the ledger of this code and environment
  local name=$1 python=$versions/$1/bin/python key ledger status=0
  shift
  key=$({ "$python" -m pip freeze --disable-pip-version-check && git ls-files -oc --exclude-standard -z | xargs -0 cat; } 2>/dev/null | cksum | cut -d' ' -f1)
  ledger=$versions/$name-$key.txt
  touch "$ledger"
  say "$name: $("$python" -c 'import importlib.metadata as m, platform; print("Python " + platform.python_version(), *(f"{n} {m.version(n)}" for n in ("torch", "transformers", "triton", "numpy", "pytest")), sep=", ")')"
  say "$name: $(wc -l <"$ledger") tests have passed on this code before; what passes is added to $ledger"
  nice -n "${NICE:-0}" "$python" -m lp.compile_functions || return # what numba compiles: else every process would
  # Its settings by name: else pytest looks for them above all paths of its arguments, of which the ledger's may be far away.
  nice -n "${NICE:-0}" "$python" -m pytest -c pyproject.toml --rootdir "$root" -n "${WORKERS:-2}" --dist loadgroup \
    -p tests.support.ledger --ledger "$ledger" "$@" || status=$?
  # Nothing was left to run; or a path of the arguments is wrong, of which pytest-xdist says no more either.
  [ $status -ne 5 ] || ! "$python" -m pytest -c pyproject.toml --rootdir "$root" --collect-only -qq "$@" >/dev/null || status=0
  say "$name: $(grep -c '^passed' "$ledger") passed, $(grep -c '^skipped' "$ledger") skipped, in all runs on this code; $([ $status -eq 0 ] && echo "none failed" || echo "some FAILED")"
  return $status
}

failed=()
for name in "${names[@]}"; do
  if ! make "$name"; then
    say "$name: the environment could not be made; the reason is above"
    failed+=("$name")
  elif ! suite "$name" "$@"; then
    failed+=("$name")
  fi
done
[ ${#failed[@]} -eq 0 ] || die "failed with: ${failed[*]}"
say "all pass with: ${names[*]}"
