#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster by xpk (https://github.com/AI-Hypercomputer/xpk; docs/clusters.md).
#
#     docker build -f launch/clusters/Dockerfile --target=tpu -t REGION-docker.pkg.dev/PROJECT/REPOSITORY/routerl_jax:tpu .
#     docker push REGION-docker.pkg.dev/PROJECT/REPOSITORY/routerl_jax:tpu
#     export CLUSTER=research ZONE=us-west4-a TYPE=v5litepod-256 IMAGE=REGION-docker.pkg.dev/PROJECT/REPOSITORY/routerl_jax:tpu
#     launch/clusters/gke.sh router-1 --config=configs/search_r1_qwen25_3b.py --workdir=/bucket/runs/mine ..
#
# The first word is the workload's name. --workdir must lie in storage that all pods mount: STORAGE names a storage of the
# cluster (xpk storage attach). DRY_RUN=1 prints the command.
set -euo pipefail

fail() {
  echo "gke.sh: $*" >&2
  exit 2
}

[[ $# -ge 2 && $1 != -* ]] || fail "give a name for the workload, then the flags of launch.train"
: "${CLUSTER:?gke.sh: set CLUSTER}" "${ZONE:?gke.sh: set ZONE}" "${TYPE:?gke.sh: set TYPE, such as v5litepod-256}"
: "${IMAGE:?gke.sh: set IMAGE, built with --target=tpu}"
name=$1
shift

words="" workdir=""
for argument in "$@"; do
  words+=" $(printf '%q' "$argument")"
  if [[ $argument == --workdir=* ]]; then workdir=${argument#--workdir=}; fi
done
[[ $workdir == /* ]] || fail "give --workdir=DIR, a whole path in storage that all pods mount"

# A pod that is started again goes on where its run was.
command="exec python -m launch.train$words --distributed --resume=auto"
submit=(
  xpk workload create
  --cluster="$CLUSTER" --zone="$ZONE" ${PROJECT:+"--project=$PROJECT"}
  --workload="$name" --tpu-type="$TYPE" --num-slices=1 --docker-image="$IMAGE"
  ${STORAGE:+"--storage=$STORAGE"}
  --max-restarts="${RESTARTS:-3}"
  --command="$command"
)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%q ' "${submit[@]}"
  echo
else
  exec "${submit[@]}"
fi
