#!/usr/bin/env bash
# Sets up, builds and runs every test. About eight minutes on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOT'
usage: scripts/test.sh [--full]
  Sets up (scripts/setup.sh), builds the release preset and runs all tests.
  --full  also the long ones: 10^5 mutated inputs a reader, more kills, real memory of the 190M config,
          every test again under the address and undefined-behaviour sanitizers, the C++ ones under the thread
          sanitizer, a minute of fuzzing a reader, clang-format and clang-tidy.
EOT
}

full=0
case "${1-}" in
  "") ;;
  --full) full=1 ;;
  -h | --help) usage; exit 0 ;;
  *) usage >&2; exit 2 ;;
esac

if [ "$full" = 1 ]; then
  scripts/setup.sh --lint
  export ROWNORM_FULL=1
else
  scripts/setup.sh
fi
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # the tests run beside each other

build_and_test() {  # preset
  cmake --preset "$1" >/dev/null
  cmake --build --preset "$1"
  ctest --preset "$1" -j "$(nproc)"
  ROWNORM_EXE="$PWD/build/$1/rownorm" .venv/bin/python -m pytest -q -n "$(nproc)" --dist worksteal tests
}

.venv/bin/ruff check .
.venv/bin/ruff format --check .
build_and_test release
if [ "$full" = 1 ]; then
  scripts/lint.sh --full
  build_and_test asan
  cmake --preset tsan >/dev/null
  cmake --build --preset tsan
  ctest --preset tsan -j "$(nproc)"
  scripts/fuzz.sh 60
fi
echo "all tests passed"
