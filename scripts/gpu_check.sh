#!/usr/bin/env bash
# All that needs a GPU, in one command and one table: every test in tests/gpu (attention, kernels, captured steps, NCCL),
# then profiles of three shapes with random weights, and of one of them on 2, 4, ... GPUs. Nothing is downloaded.
# docs/gpu.md says what the figures mean.
#
#   bash scripts/gpu_check.sh                 # on a machine with a GPU; some minutes
#   bash scripts/gpu_check.sh --dry-run       # the same on a CPU with tiny sizes; a minute
#   bash scripts/gpu_check.sh --wheels DIR    # or LP_WHEELS=DIR: packages that the machine lacks, carried as wheels
#   bash scripts/gpu_check.sh --out DIR       # keep the reports: parity.xml, profile-*.json, profile.png, figures.txt
#   bash scripts/gpu_check.sh KEY=VALUE ...   # settings of launch.profile, such as W=7 N=5 G=7
#
# Fails if a test fails, if a profile does for any reason but memory, or if attention=auto is not flash attention.
# Takes $PYTHON (python3) as it is, with torch, transformers and pytest, and changes nothing of it. The apps also need
# hydra-core with omegaconf and antlr4-python3-runtime; without numba the host's share is that of plain Python.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
LP_SETUP=skip
. "$here/setup.sh"
setup
cd "$root"

dry='' wheels=${LP_WHEELS:-} out=''
shapes=(codellama_7b codellama_13b codellama_34b)
profile=(prefix=1024 "tokens=[1,64,200]" W=16 N=2 G=44 max_new_tokens=64)
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry=1 ;;
    --wheels) wheels=${2:?} && shift ;;
    --out) out=${2:?} && shift ;;
    *=*) profile+=("$1") ;;
    *) die "unknown argument $1; see the head of this file" ;;
  esac
  shift
done

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
  shapes=(codellama_7b)
  profile+=(model.dtype=float32 shape.layers=2 shape.divide=16 prefix=64 "tokens=[1,16]" W=4 G=12 max_new_tokens=8 rounds=2)
else
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "torch sees no GPU; --dry-run runs on a CPU"
fi

failed=0
# Into profile-NAME.json: the app with these settings, started by COMMAND. What the device has no room for is skipped.
measure() { # NAME COMMAND SETTING ...
  local name=$out/profile-$1 command=$2
  shift 2
  # shellcheck disable=SC2086  # the command is several words
  if ! $command launch.profile "$@" "${profile[@]}" output=json "hydra.run.dir='$out'" >"$name.json" 2>"$name.err"; then
    : >"$name.json"
    grep -q "too little memory" "$name.err" || { cat "$name.err" >&2 && failed=1; }
  fi
}

tests=(tests/gpu)
[ -z "$dry" ] || tests=(tests/gpu --ignore=tests/gpu/test_nccl.py) # whose ranks need GPUs
"$python" -m pytest -m gpu -q -p no:cacheprovider -o junit_family=xunit1 --junitxml="$out/parity.xml" "${tests[@]}" ||
  failed=1
for shape in "${shapes[@]}"; do
  measure "$shape" "$python -m" "model=$shape"
done
gpus=2
[ -n "$dry" ] || gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
for ((ranks = 2; ranks <= gpus; ranks *= 2)); do
  measure "${shapes[0]}-on-$ranks" "$python -m torch.distributed.run --standalone --nproc-per-node $ranks -m" \
    "model=${shapes[0]}" plot=false
done
"$python" scripts/tables.py gpu "$out" | tee "$out/figures.txt" || failed=1
exit "$failed"
