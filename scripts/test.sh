#!/usr/bin/env bash
# Lint, types and the tests, with a seeded subset of the drawn cases; minutes, set-up included. Arguments go to pytest,
# whose workers are WORKERS (2).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

# Tests start some hundred processes. One that may not write bytecode, or whose packages lack it, spends a quarter of its
# start on compiling what it imports, each time again: here it is kept, away from the sources.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$root/.venv/bytecode

stage() {
  local start=$SECONDS
  "$@"
  echo "-- $1: $((SECONDS - start)) s"
}
run() { "$python" -m "$@"; }
lint() { run ruff check --quiet && run ruff format --check --quiet; }
types() { run mypy --no-error-summary; }
# The functions that numba compiles: else every process that comes first would compile all of them, for a minute.
compile() { run lp.compile_functions; }
# What tests import: else each worker would make all of it first, at the same time as the other.
bytecode() { run pytest --collect-only -qq >/dev/null; }

stage setup dev
stage lint
# One core's work; the other core compiles.
{ stage types; stage bytecode; } &
stage compile
wait $!
# Last and bare, so that the closing lines are pytest's own, its time among them.
exec "$python" -m pytest -n "${WORKERS:-2}" --dist loadgroup "$@"
