#!/usr/bin/env bash
# Set up .venv if needed, then launch one app on every device of this machine:
#
#   bash torchrun.sh                              # a demonstration: the demo model, compared with plain decoding
#   bash torchrun.sh launch.generate W=7 N=5 G=7  # an app and its overrides
#   bash torchrun.sh launch.generate "def f(a):"  # a prompt as it is; - for standard input
#   bash torchrun.sh launch.serve model=hf model.name=FOLDER   # endpoints for editors; see docs/guide/serve.md
#   bash torchrun.sh launch.batch in.jsonl out.jsonl   # answers a file of requests; see docs/guide/batches.md
#   bash torchrun.sh launch.chat                  # rank 0 reads the keyboard; Ctrl-C stops an answer, not the ranks
#   NPROC=2 bash torchrun.sh                      # two ranks; default: one a GPU, or one on the CPU
#   NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=host0:29500 bash torchrun.sh ...   # on each node, with its own NODE_RANK
#   NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=host0:29500 bash torchrun.sh launch.scaling ranks=[1,8,16]   # launches ranks itself
#
#   MAX_RESTARTS=3 NPROC=8 bash torchrun.sh ...   # ranks that fail start again, all of them, and go on from a journal
#
# PYTHON and LP_SETUP: see scripts/setup.sh. LP_RUN_DIR: where the run writes. OMP_NUM_THREADS: threads of a rank.
# Exit code: the app's (docs/guide/interrupts-and-restarts.md has them), or 1 where ranks differ.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"

[ $# -gt 0 ] || set -- compare=true # the demonstration ends with a table; a text that is asked for doesn't wait for one
app=launch.generate
case "${1:-}" in
  "" | -* | *=* | '~'*) ;; # an option or an override: the default app's
  *)
    app=$1
    shift
    ;;
esac
case "$app" in
  launch.generate | launch.chat | launch.serve | launch.batch | launch.benchmark | launch.scaling | launch.profile | \
    launch.tune | launch.ngrams | launch.corpus | launch.doctor)
    module=(launch.cli "${app#launch.}")
    ;;
  launch.*) module=() ;; # no app of ours
  *) module=("$app") ;; # a program of yours: any other module of this folder
esac
if [ ${#module[@]} = 0 ] || { [ "${module[0]}" != launch.cli ] && [ ! -f "$root/${app//.//}.py" ]; }; then
  die "there is no app '$app'; the apps are
  launch.generate    continue prompts and show the text (the default)
  launch.chat        talk to a model at a terminal
  launch.serve       serve a model over the HTTP endpoints that editors and clients call
  launch.batch       answer a file of requests, which are those of the endpoints
  launch.benchmark   measure methods on the prompts of a task
  launch.scaling     measure or project methods over numbers of ranks
  launch.profile     show where the time of a step goes
  launch.tune        find the fastest W, N, G on this machine
  launch.ngrams      measure what a model writes after 1 to 3 tokens, for the pool
  launch.corpus      make an index of a folder's files, from which the pool drafts
  launch.doctor      say what this machine, and a model on it, can do, and why not
To continue a text: bash torchrun.sh launch.generate TEXT"
fi

case "$app" in launch.serve | launch.batch) setup serve,grammar ;; *) setup ;; esac

case "$app" in launch.ngrams | launch.corpus | launch.doctor) NPROC=1 NNODES=1 MAX_RESTARTS=0 ;; esac # tools of one process
nproc=${NPROC:-} nnodes=${NNODES:-1}
if [ -z "$nproc" ]; then
  nproc=1
  # torch knows best (CUDA_VISIBLE_DEVICES), but takes seconds: ask only where there is a driver.
  if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || command -v nvidia-smi >/dev/null; then
    nproc=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')
  fi
fi
case "$nproc" in "" | 0* | *[!0-9]*) die "NPROC is '$nproc'; it must be an integer >= 1" ;; esac
restarts=${MAX_RESTARTS:-0}
case "$restarts" in *[!0-9]*) die "MAX_RESTARTS is '$restarts'; it must be an integer >= 0" ;; esac
case "$nnodes" in "" | 0* | *[!0-9]*) die "NNODES is '$nnodes'; it must be an integer >= 1" ;; esac

# Chosen once, here: ${now:} of Hydra differs from rank to rank.
export LP_RUN_DIR="${LP_RUN_DIR:-outputs/$(date +%Y-%m-%d_%H-%M-%S)-$$}"
# A clone runs as it stands, also where it is not installed (LP_SETUP=skip).
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

# exec: signals and the exit code pass without this shell between.
if [ "$app" = launch.scaling ] || { [ "$nproc" = 1 ] && [ "$nnodes" = 1 ] && [ "$restarts" = 0 ]; }; then
  # One process needs no torchrun, which would add seconds and turn every exit code into 1; launch.scaling runs torchrun
  # itself, once for each number of ranks. The variables of an outer launcher would make it wait for ranks that never come.
  unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
  exec "$python" -m "${module[@]}" "$@"
fi

# A chat goes on after Ctrl-C; a server and a batch finish their texts.
case "$app" in
  launch.chat) export LP_FORWARD=SIGINT ;;
  launch.serve) export LP_FORWARD=SIGINT,SIGTERM ;;
  launch.batch) export LP_FORWARD=SIGINT,SIGTERM ;;
esac
where=(--standalone) # a free port
if [ "$nnodes" != 1 ]; then
  [ -n "${NODE_RANK:-}" ] && [ -n "${RDZV_ENDPOINT:-}" ] ||
    die "NNODES=$nnodes needs NODE_RANK=0..$((nnodes - 1)) and RDZV_ENDPOINT=host:port, a free port of node 0"
  # static: node 0 holds rank 0, whose output is the run's; c10d would number the nodes as they come.
  where=(--nnodes "$nnodes" --node-rank "$NODE_RANK" --rdzv-backend static --rdzv-endpoint "$RDZV_ENDPOINT")
fi
rank=("$python" -u -m "${module[@]}" "$@")
# Ranks end with torchrun also when it is killed without a chance to end them (Linux).
! command -v setpriv >/dev/null || rank=(setpriv --pdeathsig KILL "${rank[@]}")
exec "$python" -m launch.torchrun "${where[@]}" --nproc-per-node "$nproc" --max-restarts "$restarts" --no-python "${rank[@]}"
