#!/usr/bin/env bash
# The tests of the CUDA module, on a machine with NVIDIA's toolkit and no GPU. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOT'
usage: scripts/test_cuda.sh [--full] [--arch LIST]
  Builds the CUDA module with nvcc, where warnings and spilled registers are errors, for the architectures of LIST
  (default 90-real), and compares what each kernel takes of the GPU with cuda/ptxas.txt. Then runs the tests of the module
  on the CPU (docs/gpu.md): in forward order and in a mode that changes everything else, with every kernel launched by
  some test, and the commands and golden trajectories.
  --full  for all four architectures, in every mode, with the slow tests, a rehearsal of gpu_check.sh, under address,
          undefined-behaviour and thread sanitizers (in three modes), and without each barrier in turn: an hour or two.
EOT
}

full=0 arch=90-real
while (($#)); do
  case $1 in
    --full) full=1 arch="80-real;90-real;100-real;120" ;;
    --arch) (($# > 1)) || { usage >&2; exit 2; }; arch=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done

nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
command -v "$nvcc" >/dev/null || { echo "[test_cuda] $nvcc: not found; install NVIDIA's CUDA toolkit or set CUDACXX" >&2; exit 3; }
export CUDACXX=$nvcc
# The tests run beside each other, and so small that threads only cost.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

if ((full)); then
  export ROWNORM_FULL=1
  scripts/setup.sh --cuda --lint
else
  scripts/setup.sh --cuda
fi
say() { printf '[test_cuda] %s (%d s)\n' "$*" "$SECONDS"; }

cmake --preset cuda -DCMAKE_CUDA_ARCHITECTURES="$arch" >/dev/null
cmake --build --preset cuda --target rownorm_cuda cuda_tests
.venv/bin/python scripts/ptxas.py
say "built"

# ctest runs one test a process. The suite of the stand-in itself goes through the modes on its own.
log=$PWD/build/cuda/kernels.log
rm -f "$log"
ROWNORM_STANDIN_KERNELS=$log ctest --preset cuda -j "$(nproc)" -R '^(standin|cuda)\.' --output-log build/cuda/ctest.log \
  --quiet || { cat build/cuda/ctest.log; exit 1; }
.venv/bin/python tests/cuda_standin/kernels.py "$log" build/cuda/standin/librownorm_cuda.so
say "tests of every kernel passed"

mixed='random=1,lazy,late,huge'
modes=("$mixed")
((full)) && modes=(reversed random=1 random=2 random=3 lazy late huge low 'reversed,lazy,late,low' "${modes[@]}")
# Whole programs, each in two parts: they start once. test_cuda_large chooses its own mode, test_cuda_ranks needs mpirun.
in_modes() {  # preset modes...
  local preset=$1 mode
  shift
  for mode in "$@"; do
    export ROWNORM_STANDIN=$mode
    # shellcheck disable=SC2016  # the inner shell expands it
    find "build/$preset/standin" -name 'test_cuda_*' ! -name '*_large' ! -name '*_ranks' ! -name '*.cmake' -type f -executable |
      sort | sed 'p' | awk '{ print $0, NR % 2 }' | xargs -P "$(nproc)" -L 1 bash -c '
        export GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$2
        out=$("$1" --gtest_brief=1 2>&1) || { echo "$out"; exit 255; }' part ||
      { echo "[test_cuda] preset $preset, ROWNORM_STANDIN=$mode: failed" >&2; exit 1; }
    unset ROWNORM_STANDIN
  done
  say "preset $preset: passed in $*"
}
in_modes cuda "${modes[@]}"

ROWNORM_EXE=$PWD/build/cuda/standin/rownorm ROWNORM_TEST_DEVICES="cuda_fp32 cuda_bf16" \
  .venv/bin/python -m pytest -q -n "$(nproc)" --dist worksteal tests/cuda tests/cmd/test_trajectories.py tests/cmd/test_cuda.py
say "commands passed"

sanitized() {  # preset, targets
  local preset=$1
  shift
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset" --target "$@"
  ctest --preset "$preset" -j "$(nproc)" --output-log "build/$preset/ctest.log" --quiet ||
    { cat "build/$preset/ctest.log"; exit 1; }
  say "preset $preset: passed"
}
if ((full)); then
  scripts/gpu_check.sh --rehearse --output build/rehearsal
  say "gpu_check.sh rehearsed"
  for preset in cuda-asan cuda-tsan; do
    sanitized "$preset" cuda_tests
    in_modes "$preset" 'reversed,low' "$mixed"
  done
  .venv/bin/python tests/cuda_standin/drops.py "$log" build/cuda-tsan/standin
  say "without each barrier in turn: noticed"
fi
echo "all tests of the CUDA module passed"
