#!/usr/bin/env bash
# Lint, types and the tests, with a seeded subset of the drawn cases; minutes, set-up included. Arguments go to pytest,
# whose workers are WORKERS (2).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

stage() {
  local start=$SECONDS
  "$@"
  echo "-- $1: $((SECONDS - start)) s"
}
run() { "$python" -m "$@"; }
lint() { run ruff check --quiet && run ruff format --check --quiet; }
types() { run mypy --no-error-summary; }

stage setup dev
stage lint
stage types
# Last and bare, so that the closing lines are pytest's own, its time among them.
exec "$python" -m pytest -n "${WORKERS:-2}" "$@"
