#!/usr/bin/env bash
# Measure docs/results/ anew and write docs/results.md; about ten minutes on two quiet cores.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
setup
export OMP_NUM_THREADS=1
out=docs/results
rm -rf "$out"
methods='[lookahead_auto,lookahead,lookahead_paper,token_recycling,prompt_lookup,hf_prompt_lookup,hf_generate,autoregressive]'
bench=("$python" -m launch.benchmark output=json limit=4 max_new_tokens=64 repeats=3)
"${bench[@]}" "methods=$methods" quality=true out=$out/greedy
"${bench[@]}" "methods=$methods" sampling=sample sampling.temperature=0.8 out=$out/sampled
NPROC=2 bash torchrun.sh launch.benchmark -m experiment=demo_sweep output=json out=$out/sweep
methods='[lookahead,lookahead@1,autoregressive]'
wide=$(mktemp -d)
trap 'rm -rf "$wide"' EXIT
"$python" scripts/wide_model.py "$wide/wide"
(cd "$wide" && PYTHONPATH=$root "$python" -m launch.scaling model=hf model.name=wide "methods=$methods" limit=1 \
  max_new_tokens=24 W=15 N=5 G=15 repeats=3 project=true ranks=[2] projected_ranks=[1,2] weak=false \
  "out=$root/$out/scaling-wide")
"$python" -m launch.scaling "methods=${methods%]},transformers_tp]" limit=2 max_new_tokens=48 W=8 G=40 repeats=5 \
  project=true ranks=[2] projected_ranks=[1,2,4,8,16] out=$out/scaling-demo
find $out -name '*.png' -delete -o -name 'report.html' -delete
"$python" scripts/results.py
