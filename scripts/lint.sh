#!/usr/bin/env bash
# clang-format and clang-tidy over the C++ sources, shellcheck over the scripts, ruff over the Python; changes nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The static analyzer takes half of the time; in its shallow mode it looks less far into called functions.
analyzer=(--extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=mode=shallow)
case "${1-}" in
  "") ;;
  --full) analyzer=() ;;
  -h | --help)
    echo "usage: scripts/lint.sh [--full]   (after scripts/setup.sh --lint)"
    echo "  --full  clang's static analyzer in its deep mode, which takes twice as long"
    exit 0 ;;
  *) echo "usage: scripts/lint.sh [--full]" >&2; exit 2 ;;
esac
for tool in clang-format clang-tidy shellcheck .venv/bin/ruff; do
  command -v "$tool" >/dev/null || { echo "[lint] $tool: not found; run scripts/setup.sh --lint" >&2; exit 3; }
done
git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
cmake --preset release >/dev/null
cmake --build --preset release --target rownorm_version >/dev/null
# It counts the suppressed warnings of system headers on stderr; findings are on stdout.
# The largest files first, one at a time, so that all cores end together.
git ls-files 'src/*.cpp' | xargs ls -S | xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p build/release \
  "${analyzer[@]}" 2>/dev/null
git ls-files '*.sh' .ci/run | xargs shellcheck
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "lint: clean"
