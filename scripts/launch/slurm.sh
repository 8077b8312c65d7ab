#!/usr/bin/env bash
# A Slurm job of two machines with eight GPUs each, one rank a GPU:
#   sbatch scripts/launch/slurm.sh configs/paper/640m-rownorm.json [--set KEY=VALUE]...
# Submitted again with the same arguments (--requeue does so after a node has failed) it goes on from the newest checkpoint.
#SBATCH --job-name=rownorm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -euo pipefail
usage() {
  echo "usage: sbatch scripts/launch/slurm.sh CONFIG [--set KEY=VALUE]..."
  sed -n '2,4s/^# \{0,1\}//p' "$0"
}
case ${1-} in -h | --help) usage && exit ;; esac
if [ $# -lt 1 ]; then
  usage >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:-.}"
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# --mpi: pmix for an Open MPI (4 or newer) that was built with PMIx, pmi2 for one built with PMI2 and for MPICH;
# `srun --mpi=list` shows what this Slurm has. 120 s before the time is up every rank gets SIGUSR1, finishes its update
# and writes a checkpoint. A rank that fails ends the others. srun does not take --cpus-per-task from sbatch (22.05 on).
exec srun --mpi="${ROWNORM_SLURM_MPI:-pmix}" --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task="$OMP_NUM_THREADS" \
  "${ROWNORM_EXE:-build/cuda/rownorm}" train "$@" --resume
