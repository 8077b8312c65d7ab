#!/usr/bin/env bash
# Everything that only a GPU can show, in one go: build for the card, kernel tests, compute-sanitizer, golden
# trajectories, where the time of a step goes. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOT'
usage: scripts/gpu_check.sh [--deps FILE] [--output DIR] [--ranks N] [--rehearse]
       scripts/gpu_check.sh --pack FILE
  Builds for the GPU of this machine and checks it, in about six minutes and ten at most; the figures end as a short
  table. Exit code 0: every check passed, else 1. Needs the CUDA toolkit; clocks and settings of the card are left alone.
  --deps FILE   where apt's packages are not at hand: the libraries that --pack put together, unpacked under build/
  --output DIR  logs and the table (default build/gpu_check)
  --ranks N     on N GPUs of this machine, under mpirun: NCCL's exchange, golden's trajectories and the same training on
                1 to N ranks, resumed across them; nothing of what one GPU shows (wants NCCL, Open MPI and .venv)
  --rehearse    the same checks at small sizes through the CPU stand-in: of this script, where there is no GPU
  --pack FILE   writes the libraries that this project needs, from this Debian machine, to FILE (tar.gz, about 25 MB)
Example, for a machine that has the toolkit, CMake, Ninja and a compiler but no network:
  scripts/gpu_check.sh --pack build/deps.tar.gz    # here; carry the sources and this file there
  scripts/gpu_check.sh --deps build/deps.tar.gz    # there
EOT
}

die() { echo "[gpu_check] $1" >&2; exit "${2:-3}"; }

# ---- the libraries, as one file ----

pack() {  # file
  local stage list=(libcli11-dev nlohmann-json3-dev libspdlog-dev libspdlog1.10 libfmt-dev libfmt9 libgtest-dev
    libopenblas-openmp-dev libopenblas0-openmp libgfortran5 libquadmath0 libgomp1 libutf8proc-dev libutf8proc2
    libxxhash-dev pkgconf pkgconf-bin libpkgconf3)
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' RETURN
  local package file
  for package in "${list[@]}"; do
    dpkg-query -W "$package" >/dev/null 2>&1 || die "--pack: $package is not installed; run scripts/setup.sh"
    while read -r file; do
      case $file in /usr/share/doc/* | /usr/share/man/* | */libopenblas*.a) continue ;; esac
      if [ -f "$file" ] || [ -L "$file" ]; then (cd / && cp -P --parents ".$file" "$stage"); fi
    done < <(dpkg -L "$package")
  done
  # What Debian's alternatives choose is named by links through /etc: here by the things themselves.
  local lib=usr/lib/x86_64-linux-gnu
  ln -sf openblas-openmp/libopenblas.so.0 "$stage/$lib/libopenblas.so.0"
  ln -sf openblas-openmp/libopenblas.so "$stage/$lib/libopenblas.so"
  mkdir -p "$stage/$lib/pkgconfig"
  ln -sf ../openblas-openmp/pkgconfig/openblas.pc "$stage/$lib/pkgconfig/openblas.pc"
  # pytest is plain Python; NumPy is not, and has to be there.
  mkdir "$stage/python"
  for package in pytest _pytest pluggy iniconfig packaging pygments; do
    cp -r .venv/lib/python3*/site-packages/$package "$stage/python" || die "--pack: .venv: no $package; run scripts/setup.sh"
  done
  tar -C "$stage" --exclude __pycache__ -czf "$1.part" usr python
  mv "$1.part" "$1"
  echo "[gpu_check] $1: $(du -h "$1" | cut -f1)"
}

use_packed() {  # file
  local prefix=$PWD/build/deps lib
  lib=$prefix/usr/lib/x86_64-linux-gnu
  rm -rf "$prefix"
  mkdir -p "$prefix"
  tar -C "$prefix" -xzf "$1" || die "--deps $1: cannot be unpacked"
  export CMAKE_PREFIX_PATH="$prefix/usr" PKG_CONFIG_SYSROOT_DIR="$prefix"
  export PKG_CONFIG_PATH="$lib/pkgconfig:$prefix/usr/share/pkgconfig" PKG_CONFIG_LIBDIR="$lib/pkgconfig"
  export LD_LIBRARY_PATH="$lib:$lib/openblas-openmp${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  export PYTHONPATH="$prefix/python"
  export LIBRARY_PATH="$lib:$lib/openblas-openmp" CPATH="$prefix/usr/include"
  command -v pkg-config >/dev/null || PATH="$prefix/usr/bin:$PATH"
}

# ---- cuBLAS and NCCL where the toolkit has none: those of Python's wheels (nvidia-cublas, nvidia-nccl) ----

wheels() {  # prints the paths of libcublasLt, cublasLt.h, libnccl and nccl.h, empty where there is none
  local python
  for python in .venv/bin/python python3; do
    command -v "$python" >/dev/null || continue
    "$python" - <<'EOT' && return 0
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
roots = [pathlib.Path(p) for p in (spec.submodule_search_locations if spec else [])]
def first(pattern):
    return next((str(p) for root in roots for p in sorted(root.rglob(pattern))), "")
files = [first(name) for name in ("libcublasLt.so.*", "cublasLt.h", "libnccl.so.2", "nccl.h")]
if not any(files):
    raise SystemExit(1)  # the next Python may have them
print("\n".join(files))
EOT
  done
}

find_libraries() {
  local root found lt lt_header nccl nccl_header
  root=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
  mapfile -t found < <(wheels)
  lt=${found[0]-} lt_header=${found[1]-} nccl=${found[2]-} nccl_header=${found[3]-}
  if [ -z "$(find -L "$root" -maxdepth 4 -name 'libcublasLt.so*' -print -quit 2>/dev/null)" ]; then
    if [ -z "$lt" ] || [ -z "$lt_header" ]; then die "cuBLASLt: not in $root and not in Python's nvidia packages"; fi
    options+=("-DCUDA_cublasLt_LIBRARY=$lt")
    export CPATH=${lt_header%/*}${CPATH:+:$CPATH} LD_LIBRARY_PATH=${lt%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    note "cuBLASLt" "of Python's packages: $(basename "$lt")"
  fi
  if [ -z "$(find -L "$root" -maxdepth 4 -name nccl.h -print -quit 2>/dev/null)" ] && [ -n "$nccl_header" ] && [ -n "$nccl" ]; then
    options+=("-DNCCL_INCLUDE_DIR=${nccl_header%/*}")
    export LD_LIBRARY_PATH="${nccl%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    note "NCCL" "of Python's packages"
  fi
}

deps="" output=build/gpu_check rehearse=0 ranks=1
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --rehearse) rehearse=1; shift; continue ;;
    --pack | --deps | --output | --ranks) [ $# -ge 2 ] || die "$1: wants a value" 2 ;;
    *) usage >&2; exit 2 ;;
  esac
  case "$1" in
    --pack) pack "$2"; exit 0 ;;
    --deps) [ -f "$2" ] || die "--deps $2: no such file" 2; deps=$2 ;;
    --output) output=$2 ;;
    --ranks) [[ $2 =~ ^[1-9][0-9]?$ ]] || die "--ranks $2: wants a whole number from 1 to 99" 2; ranks=$2 ;;
  esac
  shift 2
done

# ---- the machine ----

[ -z "$deps" ] || use_packed "$deps"
mkdir -p "$output" 2>/dev/null || die "--output $output: cannot be made a folder"
table=$output/table.txt
: >"$table"
failed=0
started=$SECONDS
# One GPU's checks end within the ten minutes for which a card may be had, whatever hangs: what comes last is cut.
deadline=570
{ [ "$rehearse" = 0 ] && [ "$ranks" = 1 ]; } || deadline=100000
options=()
export OMP_WAIT_POLICY=passive

note() { printf '%-34s %s\n' "$1" "$2" | tee -a "$table"; }

# Runs one check within its time; its output goes to a log of its own.
check() {  # name seconds command...
  local name=$1 limit=$2 begin=$SECONDS rc=0 left=$((deadline - (SECONDS - started)))
  shift 2
  ((limit <= left)) || limit=$left
  if ((limit < 1)); then
    note "$name" "FAILED: no time left"
    failed=1
    return 0
  fi
  timeout --kill-after=5 "$limit" "$@" >"$output/$name.log" 2>&1 || rc=$?
  case $rc in
    0) note "$name" "passed, $((SECONDS - begin)) s" ;;
    124 | 137) note "$name" "FAILED: not done within $limit s"; failed=1 ;;
    *) note "$name" "FAILED: exit code $rc, $((SECONDS - begin)) s ($output/$name.log)"; failed=1; tail -n 15 "$output/$name.log" ;;
  esac
  return 0
}

if [ "$rehearse" = 1 ]; then
  build=build/cuda
  programs=$build/standin
  note "card" "none: a rehearsal through the stand-in"
else
  command -v nvidia-smi >/dev/null || die "nvidia-smi: not found; this wants a GPU (--rehearse does without)" 5
  command -v nvcc >/dev/null || PATH="${CUDA_HOME:-/usr/local/cuda}/bin:$PATH"
  command -v nvcc >/dev/null || die "nvcc: not found; this wants the CUDA toolkit" 3
  devices=$(nvidia-smi --list-gpus | wc -l)
  ((ranks <= devices)) || die "--ranks $ranks: this machine has $devices GPUs, one a rank is needed" 5
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  [[ $architecture =~ ^[0-9]+$ ]] || die "nvidia-smi: says no compute capability: $architecture" 5
  build=build/gpu
  programs=$build
  note "card" "$(nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader | head -n 1)"
  find_libraries
  note "compiler" "$(nvcc --version | sed -n 's/.*release/nvcc/p'), sm_$architecture"
fi
[ "$ranks" = 1 ] || command -v mpirun >/dev/null || die "--ranks: mpirun not found; run scripts/setup.sh" 5
note "commit" "${ROWNORM_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}"

# ---- build ----

configure_and_build() {
  if [ "$rehearse" = 1 ]; then
    cmake --preset cuda
    cmake --build --preset cuda --target standin_rownorm cuda_tests
  else
    cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DROWNORM_CUDA=ON -DROWNORM_TESTS=ON \
      -DROWNORM_WERROR=OFF -DCMAKE_CUDA_ARCHITECTURES="$architecture-real" "$@"
    cmake --build "$build" --target rownorm rownorm_cuda cuda_tests
  fi
}
export -f configure_and_build
export rehearse build architecture="${architecture-}"
# shellcheck disable=SC2016  # the inner shell expands it
check build 300 bash -euo pipefail -c 'configure_and_build "$@"' build "${options[@]}"
[ "$failed" = 0 ] || die "the build failed: $output/build.log" 1

# ---- the end ----

finish() {
  note "in all" "$((SECONDS - started)) s"
  echo
  cat "$table"
  if [ "$failed" = 1 ]; then echo "some checks FAILED"; else echo "all checks passed"; fi
  return "$failed"
}

# ---- several GPUs ----

if [ "$ranks" -gt 1 ]; then
  [ -x "$programs/test_cuda_ranks" ] || die "--ranks: this build has no NCCL or no MPI (nccl.h, mpi.h)" 5
  [ "$rehearse" = 0 ] || export ROWNORM_STANDIN=devices=$ranks
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
  for ((n = 2; n <= ranks; ++n)); do
    check "exchange-$n" 60 mpirun --oversubscribe --bind-to none -n "$n" "$programs/test_cuda_ranks" "$n"
  done
  unset ROWNORM_STANDIN  # the tests below say themselves what they want of it
  ROWNORM_TEST_RANKS=$(seq -s ' ' 1 "$ranks") ROWNORM_FULL=1 ROWNORM_EXE=$PWD/$programs/rownorm \
    check training 1800 .venv/bin/python -m pytest -q tests/cuda/test_nccl.py
  finish
  exit
fi

# ---- correctness ----

for program in "$programs"/test_cuda_*; do
  [ "$(basename "$program")" != test_cuda_ranks ] || continue
  check "$(basename "$program")" 60 "$program" --gtest_brief=1
done

# ---- speed: where the time of an update goes, and how far every operation is from the card's bounds ----

if [ "$rehearse" = 1 ]; then
  check bench-rehearsal 120 "$programs/rownorm" bench configs/quickstart-rownorm.json --device cuda --updates 1 \
    --set model.layers=1 --set model.context=64 --set batch.sequences=1 --set batch.micro_batch=1
else
  for size in 190m 380m 640m; do
    case $size in 190m) micro=32 ;; 380m) micro=16 ;; *) micro=8 ;; esac
    check "bench-$size" 40 "$programs/rownorm" bench "configs/paper/$size-rownorm.json" --device cuda --updates 6 \
      --set batch.micro_batch=$micro --set "batch.sequences=$((4 * micro))"
  done
fi
rows='^(peak of products|memory bandwidth|update|[0-9]+ tokens/s|Newton-Schulz|attention|head_loss|newton_schulz|row_diameter)'
for log in "$output"/bench-*.log; do
  if [ -f "$log" ]; then
    { grep -E "$rows" "$log" || echo "no figures"; } | sed "s/^/$(basename "$log" .log): /" | tee -a "$table"
  fi
done

# ---- whole runs: golden's trajectories, and a checkpoint that changes its device ----

python=.venv/bin/python
[ -x "$python" ] || python=python3
if "$python" -c 'import numpy, pytest' 2>/dev/null; then
  export ROWNORM_TEST_DEVICES="cuda_fp32 cuda_bf16" ROWNORM_EXE=$PWD/$programs/rownorm
  if [ "$rehearse" = 1 ]; then unset ROWNORM_FULL; else export ROWNORM_FULL=1; fi  # slow where a GPU is stood in for
  check trajectories 200 "$python" -m pytest -q -s tests/cmd/test_trajectories.py
  check checkpoints 200 "$python" -m pytest -q tests/cuda/test_checkpoints.py
else
  note "trajectories" "FAILED: $python has no numpy or no pytest"
  failed=1
fi

# ---- compute-sanitizer, last: it is the slowest. bf16 is what every instance of a tensor-core kernel is for ----

sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
if [ "$rehearse" = 1 ]; then
  note "compute-sanitizer" "left out of a rehearsal"
elif [ -x "$sanitizer" ]; then
  for tool in memcheck racecheck; do
    what=(--tool "$tool" --error-exitcode 9)
    [ "$tool" = racecheck ] || what+=(--leak-check full)
    check "$tool-kernels" 90 "$sanitizer" "${what[@]}" "$programs/test_cuda_kernels" --gtest_brief=1 --gtest_filter='*cuda_bf16*'
    check "$tool-recompute" 60 "$sanitizer" "${what[@]}" "$programs/test_cuda_recompute" --gtest_brief=1
    check "$tool-ops" 60 "$sanitizer" "${what[@]}" "$programs/test_cuda_ops" --gtest_brief=1
  done
else
  note "compute-sanitizer" "FAILED: not found"
  failed=1
fi

finish
