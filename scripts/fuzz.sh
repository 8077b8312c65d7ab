#!/usr/bin/env bash
# Fuzzes every reader of files, one after the other. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'HELP'
usage: scripts/fuzz.sh [SECONDS [READER]...]   (after scripts/setup.sh --lint)
  Builds the preset fuzz (clang, libFuzzer, address and undefined-behaviour sanitizers) and feeds each reader of
  tests/fuzz (or those named) for SECONDS, 60 by default, one core at a time, from tests/fuzz/corpus and from what
  earlier calls found (build/fuzz/corpus). Prints executions and covered edges; the first crash, leak, hang or large
  allocation ends it with exit 1, and the input is named. A mended one belongs into tests/fuzz/corpus/READER, named
  valid-* or refused-*.
HELP
}

seconds=60
case "${1-}" in
  "") ;;
  -h | --help) usage; exit 0 ;;
  *) seconds=$1; shift ;;
esac
if ! [[ $seconds =~ ^[1-9][0-9]*$ ]]; then
  usage >&2
  exit 2
fi
readers=("$@")
if ((${#readers[@]} == 0)); then
  for folder in tests/fuzz/corpus/*/; do readers+=("$(basename "$folder")"); done
fi
for reader in "${readers[@]}"; do
  [[ -n $reader && -d tests/fuzz/corpus/$reader ]] || { echo "[fuzz] $reader: no folder of tests/fuzz/corpus" >&2; exit 2; }
done
command -v clang++ >/dev/null || { echo "[fuzz] clang++: not found; run scripts/setup.sh --lint" >&2; exit 3; }

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target "${readers[@]/#/fuzz_}"
export OMP_NUM_THREADS=1
if [[ -w /dev/shm ]]; then export TMPDIR="${TMPDIR-/dev/shm}"; fi  # two readers take files only
export ASAN_OPTIONS="${ASAN_OPTIONS-detect_leaks=1}" UBSAN_OPTIONS="${UBSAN_OPTIONS-print_stacktrace=1}"
for reader in "${readers[@]}"; do
  found=build/fuzz/corpus/$reader log=build/fuzz/$reader.log
  mkdir -p "$found"
  if ! build/fuzz/tests/fuzz/"fuzz_$reader" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 \
    -malloc_limit_mb=16 -print_final_stats=1 -artifact_prefix="build/fuzz/$reader-" \
    "$found" "tests/fuzz/corpus/$reader" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    echo "[fuzz] $reader: a finding, see above and $log, which names the input" >&2
    exit 1
  fi
  awk -v reader="$reader" '
    /^#[0-9]+/ { for (i = 1; i < NF; i++) if ($i == "cov:") edges = $(i + 1) }
    /number_of_executed_units/ { runs = $2 }
    END { printf "%12s %10d executions, %5d edges\n", reader, runs, edges }' "$log"
done
