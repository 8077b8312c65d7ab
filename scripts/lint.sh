#!/usr/bin/env bash
# clang-format and clang-tidy over the C++ sources; needs clang-format, clang-tidy and a configured release preset.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1-}" in
  "") ;;
  -h | --help) echo "usage: scripts/lint.sh   (checks only; nothing is changed)"; exit 0 ;;
  *) echo "usage: scripts/lint.sh" >&2; exit 2 ;;
esac
mapfile -t sources < <(git ls-files 'src/*.cpp' 'src/*.h' 'tests/*.cpp' 'tests/*.h')
clang-format --dry-run -Werror "${sources[@]}"
cmake --preset release >/dev/null
git ls-files 'src/*.cpp' | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p build/release
echo "clang-format and clang-tidy are clean"
