#!/usr/bin/env bash
# Trains on GPUs of a Slurm cluster, a process for each (docs/clusters.md). Flags of sbatch come first, those of launch.train last:
#
#     sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/clusters/slurm.sh \
#         --config=configs/search_r1_qwen25_3b.py --workdir=/shared/runs/mine ..
#
# Submit it from the directory in which Python is found (.venv there, or PYTHON). --workdir must be on a file system that all
# nodes see. A job that is preempted or runs out of time and is queued again goes on where it was.
#SBATCH --job-name=routerl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

PYTHON=${PYTHON:-.venv/bin/python}
if [[ " $*" != *" --workdir="?* ]]; then
  echo "slurm.sh: give --workdir=DIR, on a file system that all nodes see" >&2
  exit 2
fi
resume=()
if [[ ${PROGRAM:-launch.train} == launch.train ]]; then resume=(--resume=auto); fi

# JAX takes the GPU whose number is the task's on its node, so every task must see all GPUs of its node: no --gpus-per-task.
exec srun --kill-on-bad-exit=1 "$PYTHON" -m "${PROGRAM:-launch.train}" "$@" --distributed ${resume[@]+"${resume[@]}"}
