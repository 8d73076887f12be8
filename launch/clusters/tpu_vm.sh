#!/usr/bin/env bash
# A TPU VM or pod slice on Google Cloud: create it, install the wheel on all workers, train, look, delete (docs/clusters.md).
#
#     export TPU=router ZONE=us-west4-a TYPE=v5litepod-16 BUCKET=my-bucket
#     launch/clusters/tpu_vm.sh create
#     launch/clusters/tpu_vm.sh setup
#     launch/clusters/tpu_vm.sh train --config=configs/search_r1_qwen25_3b.py --workdir=runs/mine ..
#     launch/clusters/tpu_vm.sh log
#     launch/clusters/tpu_vm.sh stop        # ends the run; `train` with the same workdir resumes it
#     launch/clusters/tpu_vm.sh delete
#
# BUCKET is mounted at ~/bucket, and --workdir is relative to it. SPOT=1 asks for a preemptible slice, VERSION for another
# runtime, PYTHON names another interpreter, EXTRAS other extras. DRY_RUN=1 prints the commands.
set -euo pipefail

fail() {
  echo "tpu_vm.sh: $*" >&2
  exit 2
}

[[ $# -ge 1 ]] || fail "give one of create, setup, train, log, stop, delete"
: "${TPU:?tpu_vm.sh: set TPU, the name of the slice}" "${ZONE:?tpu_vm.sh: set ZONE, such as us-west4-a}"
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3.11}
EXTRAS=${EXTRAS:-scann,serve,bm25,web,tree}

run() {
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

tpus() {
  local verb=$1
  shift
  run gcloud compute tpus tpu-vm "$verb" "$@" --zone="$ZONE" ${PROJECT:+"--project=$PROJECT"}
}

everywhere() {
  tpus ssh "$TPU" --worker=all --command="$1"
}

runtime() {
  case ${TYPE:?tpu_vm.sh: set TYPE, such as v5litepod-16} in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) fail "TYPE=$TYPE: set VERSION, its runtime (gcloud compute tpus tpu-vm versions list --zone=$ZONE)" ;;
  esac
}

create() {
  local version
  version=${VERSION:-$(runtime)}
  tpus create "$TPU" --accelerator-type="${TYPE:?tpu_vm.sh: set TYPE, such as v5litepod-16}" --version="$version" ${SPOT:+--spot}
}

setup() {
  : "${BUCKET:?tpu_vm.sh: set BUCKET, where runs are kept}"
  local wheel
  made=$(mktemp -d) # not local: the trap runs when the function is over
  trap 'rm -rf "$made"' EXIT
  run "${LOCAL_PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir="$made" "$ROOT"
  if [[ -n ${DRY_RUN:-} ]]; then
    wheel=$made/routerl_jax.whl
  else
    wheel=$(echo "$made"/routerl_jax-*.whl)
  fi
  tpus scp "$wheel" "$TPU:" --worker=all
  # Directories must be renamed whole: checkpoints get their names when they are complete.
  everywhere "set -e
$PYTHON -m venv ~/routerl
~/routerl/bin/pip install --quiet --upgrade pip
~/routerl/bin/pip install --quiet \"routerl_jax[$EXTRAS,tpu] @ file://\$HOME/$(basename "$wheel")\"
mkdir -p ~/bucket
mountpoint -q ~/bucket || gcsfuse --implicit-dirs --rename-dir-limit=1000 $BUCKET ~/bucket
~/routerl/bin/python -c 'import libtpu, routerl_jax'"
}

train() {
  local argument words="" workdir=""
  for argument in "$@"; do
    words+=" $(printf '%q' "$argument")"
    if [[ $argument == --workdir=* ]]; then workdir=${argument#--workdir=}; fi
  done
  [[ -n $workdir ]] || fail "train needs --workdir=DIR, relative to the bucket"
  [[ $workdir != /* ]] || fail "--workdir=$workdir: give a path relative to the bucket"
  # Every worker runs the same command, and goes on where a killed run was. The session ends, the run does not.
  everywhere "cd ~/bucket
nohup ~/routerl/bin/python -m launch.train$words --distributed --resume=auto > ~/train.log 2>&1 < /dev/null &
echo \$! > ~/train.pid"
}

log() {
  tpus ssh "$TPU" --worker="${WORKER:-0}" --command="tail -n 40 ~/train.log"
}

stop() {
  everywhere "kill \$(cat ~/train.pid)"
}

delete() {
  tpus delete "$TPU" --quiet
}

case $1 in
  create | setup | train | log | stop | delete) "$@" ;;
  *) fail "there is no $1; give one of create, setup, train, log, stop, delete" ;;
esac
