#!/usr/bin/env bash
# All that needs a GPU, in stages that have nine minutes each, meant for one H100. Nothing is downloaded.
# docs/guide/gpu.md says what the figures mean.
#
#   bash scripts/gpu_check.sh --out DIR            # all stages, in order of worth
#   bash scripts/gpu_check.sh facts --out DIR      # one of them, or some
#   bash scripts/gpu_check.sh half --dry-run       # the same on a CPU with tiny sizes
#
#   facts     scripts/gpu_facts.py: memory, products, whether rows keep their bits, kernels, attention, steps of a 7B
#   half      tests/gpu in bfloat16 and float16: attention backends, kernels, captured steps
#   profile   launch.profile of a 7B and a 13B with random weights; texts of a model compared with transformers'
#   bench     launch.benchmark: the README's table
#   several   NCCL, and lookahead parallelism on 2, 4, 8 GPUs; on one GPU there is nothing to do
#   large     tests/gpu in float32, ranks that share a GPU, launch.profile of a 34B
#
#   --out DIR      where results are kept, and found by the next call: STAGE.jsonl has a line of JSON a figure, STAGE/ the
#                  reports that it is made of, results.tar.gz all of it
#   --again        measure a stage also where DIR has its results; without, its table is shown
#   --wheels DIR   or LP_WHEELS=DIR: packages that the machine lacks, carried as wheels
#   KEY=VALUE ...  settings of launch.profile, such as W=7 N=5 G=7
#
# LP_REAL_MODEL=FOLDER takes the model in FOLDER instead of the demo model, where texts count.
# Fails if a test or a section of the facts fails, a profile does for any reason but memory, attention=auto is not flash
# attention, texts differ by more than rounding, or a stage takes too long.
# Takes $PYTHON (python3) as it is, with torch, transformers and pytest, and changes nothing of it. The apps also need
# hydra-core with omegaconf and antlr4-python3-runtime; without numba the host's share is that of plain Python.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
LP_SETUP=skip
. "$here/setup.sh"
setup
cd "$root"

STAGES=(facts half profile bench several large)
STAGE_S=540 # what has not ended then is interrupted
dry='' again='' wheels=${LP_WHEELS:-} out='' stages=()
real=(model=demo)
[ -z "${LP_REAL_MODEL:-}" ] || real=(model=hf "model.name='$LP_REAL_MODEL'")
profile_settings=(prefix=1024 "tokens=[1,64,200]" W=16 N=2 G=44 max_new_tokens=64)
exact_settings=(limit=8 max_new_tokens=64 model.dtype=float32 'methods=[lookahead_auto,plain,hf_generate]')
readme_settings=(task=showcase repeats=3 max_new_tokens=64 model.dtype=bfloat16 'methods=[lookahead_auto,plain,prompt_lookup]')
while [ $# -gt 0 ]; do
  case $1 in
    all) stages=("${STAGES[@]}") ;;
    facts | half | profile | bench | several | large) stages+=("$1") ;;
    --dry-run) dry=1 ;;
    --again) again=1 ;;
    --wheels) wheels=${2:?} && shift ;;
    --out) out=${2:?} && shift ;;
    *=*) profile_settings+=("$1") ;;
    *) die "unknown argument $1; see the head of this file" ;;
  esac
  shift
done
[ ${#stages[@]} -gt 0 ] || stages=("${STAGES[@]}")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
out=${out:-$scratch/out}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$wheels" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-index \
    --no-deps --no-compile --target "$scratch/site" "$wheels"/*.whl || die "could not install the wheels in $wheels"
  export PYTHONPATH=$PYTHONPATH:$scratch/site
fi
lacking=$("$python" -c 'import importlib.util as util, sys
print(*(name for name in sys.argv[1:] if util.find_spec(name) is None))' \
  torch transformers pytest psutil rich hydra omegaconf antlr4)
[ -z "$lacking" ] || die "$python has no $lacking; carry wheels in a folder: --wheels DIR"
if [ -n "$dry" ]; then
  export LP_GPU_DRY_RUN=1 CUDA_VISIBLE_DEVICES=
  gpus=2 # ranks on the CPU
  profile_settings+=(model.dtype=float32 shape.layers=2 shape.divide=16 prefix=64 "tokens=[1,16]" W=4 G=12 max_new_tokens=8 rounds=2)
  exact_settings+=(limit=1 max_new_tokens=8)
  readme_settings+=(limit=1 max_new_tokens=8 repeats=1 model.dtype=float32)
else
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  [ "$gpus" != 0 ] || die "torch sees no GPU; --dry-run runs on a CPU"
fi
# Kernels are compiled by as many processes as there are cores: it takes longer than the tests themselves.
workers=$("$python" -c 'import importlib.util as util, os
print(f"-n {min(12, len(os.sched_getaffinity(0)))}" if util.find_spec("xdist") else "")')

limited() { # COMMAND: interrupted when the stage's time is over
  local left=$((STAGE_S - SECONDS + started))
  timeout --foreground --signal INT --kill-after 20 "$((left > 1 ? left : 1))" "$@" || {
    local code=$?
    [ "$code" != 124 ] || echo "$stage: interrupted after $STAGE_S s" >&2
    return "$code"
  }
}

check() { # WORKERS EXPRESSION: the tests in tests/gpu that it selects
  local ranks=()
  [ -z "$dry" ] || ranks=(--ignore=tests/gpu/test_nccl.py) # they need GPUs
  # shellcheck disable=SC2086  # the workers are an option and its value
  limited "$python" -m pytest $1 -m gpu -k "$2" -q -p no:cacheprovider -o junit_family=xunit1 \
    --junitxml="$reports/parity.xml" tests/gpu ${ranks[@]+"${ranks[@]}"} || failed=1
}

# Into NAME.json: what an app says with these settings, started by COMMAND. What the device has no room for is skipped.
measure() { # NAME COMMAND SETTING ...
  local name=$reports/$1 command=$2
  shift 2
  # shellcheck disable=SC2086  # the command is several words
  if ! limited $command "$@" output=json "hydra.run.dir='$reports'" >"$name.json" 2>"$name.err"; then
    : >"$name.json"
    grep -q "too little memory" "$name.err" || { cat "$name.err" >&2 && failed=1; }
  fi
}

shape() { # SHAPE: its profile with random weights
  measure "profile-$1" "$python -m launch.profile" "model=$1" "${profile_settings[@]}"
}

facts() {
  limited "$python" scripts/gpu_facts.py ${dry:+--dry-run} >"$reports/facts.jsonl" || failed=1
}

half() {
  check "$workers" "not float32 and not nccl"
}

profile() {
  shape codellama_7b
  measure benchmark-exact "$python -m launch.benchmark" "${real[@]}" "${exact_settings[@]}" "out='$reports'"
  [ -n "$dry" ] || shape codellama_13b
}

bench() {
  measure benchmark-readme "$python -m launch.benchmark" "${real[@]}" "${readme_settings[@]}" "out='$reports'"
}

several() {
  local ranks
  [ -n "$dry" ] || check "" "nccl and not share_one_gpu"
  for ((ranks = 2; ranks <= gpus; ranks *= 2)); do
    measure "profile-codellama_7b-on-$ranks" \
      "$python -m torch.distributed.run --standalone --nproc-per-node $ranks -m launch.profile" \
      model=codellama_7b "${profile_settings[@]}" plot=false
  done
}

large() {
  check "$workers" "float32 or share_one_gpu"
  [ -n "$dry" ] || shape codellama_34b
}

any_failed=0
for stage in "${stages[@]}"; do
  reports=$out/$stage started=$SECONDS failed=0
  if [ "$stage" = several ] && [ "$gpus" = 1 ]; then
    echo "several: this machine has one GPU; there is nothing to measure"
    continue
  fi
  end="{\"stage\": \"$stage\", \"dry\": ${dry:-0}, \"failed\":" # begins the last line of a stage that has ended
  if [ -z "$again" ] && grep -qsF "$end" "$out/$stage.jsonl"; then
    cat "$reports/figures.txt"
    echo "$stage: measured before; --again measures anew" >&2
    ! grep -qF "$end 1" "$out/$stage.jsonl" || any_failed=1
    continue
  fi
  echo "$stage ..." >&2
  rm -rf "$reports" "$out/$stage.jsonl"
  mkdir "$reports"
  "$stage"
  "$python" scripts/tables.py gpu "$reports" --into "$out/$stage.jsonl" | tee "$reports/figures.txt" || failed=1
  seconds=$((SECONDS - started))
  echo "$end $failed, \"seconds\": $seconds}" >>"$out/$stage.jsonl"
  echo "$stage: $seconds s$([ "$failed" = 0 ] || echo ', FAILED')" >&2
  [ "$failed" = 0 ] || any_failed=1
done
tar -czf "$scratch/results.tar.gz" -C "$out" --exclude results.tar.gz .
mv "$scratch/results.tar.gz" "$out"
exit "$any_failed"
