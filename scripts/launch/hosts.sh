#!/usr/bin/env bash
# Trains on several machines with Open MPI's mpirun, one rank a GPU. The machines reach each other by ssh and have this
# program, its data and the output under the same paths (a shared file system).
#   scripts/launch/hosts.sh HOSTFILE CONFIG [--set KEY=VALUE]... [--resume]
# HOSTFILE has a line a machine with its number of GPUs:
#   node1 slots=8
#   node2 slots=8
# Example: scripts/launch/hosts.sh hosts.txt configs/paper/640m-rownorm.json --resume
set -euo pipefail
usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; }
case ${1-} in -h | --help) usage && exit ;; esac
if [ $# -lt 2 ]; then
  usage >&2
  exit 2
fi
hosts=$1
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
rownorm=${ROWNORM_EXE:-$here/build/cuda/rownorm}
die() { echo "[hosts] $1" >&2; exit "$2"; }
if [ ! -s "$hosts" ] || [ -d "$hosts" ]; then die "$hosts: no such file, or empty; wants a line a machine" 2; fi
[ -x "$rownorm" ] || die "$rownorm: not there; build it, or set ROWNORM_EXE" 3
# One rank a slot, all cores of its machine left to it. MPI carries little beside texts: any network will do for it. NCCL
# finds InfiniBand itself; NCCL_DEBUG=INFO shows what it takes, NCCL_SOCKET_IFNAME the interface of its sockets.
variables=()
for name in LD_LIBRARY_PATH OMP_NUM_THREADS NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_HCA; do
  if [ -n "${!name-}" ]; then variables+=(-x "$name"); fi
done
exec mpirun --hostfile "$hosts" --map-by slot --bind-to none "${variables[@]}" "$rownorm" train "$@"
