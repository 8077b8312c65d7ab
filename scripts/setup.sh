#!/usr/bin/env bash
# Installs what building, testing and the Python scripts need. See --help.
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config git libcli11-dev nlohmann-json3-dev libspdlog-dev libfmt-dev
  libopenblas-openmp-dev libopenmpi-dev openmpi-bin libgtest-dev libutf8proc-dev libxxhash-dev python3 python3-venv)
lint_packages=(clang-format clang-tidy shellcheck
  clang libclang-rt-dev libomp-dev llvm  # the presets tsan and fuzz: compiler, sanitizers, OpenMP, symbols in reports
  ccache)                                # .ci/run
cuda_packages=(libboost-context-dev)  # the tests that run CUDA kernels on the CPU

usage() {
  cat <<HELP
Usage: scripts/setup.sh [--lint] [--cuda] [--help]

Prepares a Debian (12 or newer) or Ubuntu (24.04 or newer) machine for this repository:
  1. installs the apt packages that are missing, as root or with sudo, of
     ${packages[*]};
  2. selects the OpenMP build of OpenBLAS where several builds are installed;
  3. makes .venv at the repository root and installs scripts/requirements.txt into it.
With --lint also ${lint_packages[*]},
for scripts/lint.sh, scripts/fuzz.sh, .ci/run and the preset tsan.
With --cuda also ${cuda_packages[*]}, for the preset cuda, which further needs NVIDIA's CUDA toolkit (12 or newer).
Runs from any folder. What is in place already is left alone, so a second run takes well under a second.
HELP
}

say() { printf '[setup] %s\n' "$*" >&2; }
fail() { say "$1"; exit "${2:-3}"; }

as_root() {
  if ((EUID == 0)); then
    "$@"
  else
    command -v sudo >/dev/null || fail "$1: needs root and there is no sudo; run this script as root once"
    sudo -n true 2>/dev/null || fail "sudo: wants a password and this script never asks; run 'sudo -v' first"
    sudo -n "$@"
  fi
}

install_packages() {
  command -v apt-get >/dev/null ||
    fail "apt-get: not found, this script knows Debian and Ubuntu only; install the equivalents of: ${packages[*]}"
  local installed missing=() package
  # dpkg-query fails when it has never heard of one of them; what it does list is still right.
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
  for package in "${packages[@]}"; do
    grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  say "installing ${#missing[@]} apt packages: ${missing[*]}"
  as_root apt-get -qq update || say "apt-get update: failed; trying with the package lists at hand"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "${missing[@]}" >&2 ||
    fail "apt-get install: failed (see above); wanted: ${missing[*]}"
}

# Debian registers every OpenBLAS build under the same two names, one for linking and one for running, with priority
# 100 for the pthread build and 95 for the OpenMP build: where apt's NumPy or another package brings the pthread build
# along, it wins silently, and its threads then fight with the trainer's OpenMP threads for the same cores.
select_openblas() {
  local name current wanted
  for name in $(update-alternatives --get-selections | awk '$1 ~ /^libopenblas\.so/ { print $1 }'); do
    current=$(update-alternatives --query "$name" | awk '$1 == "Value:" { print $2 }')
    [[ $current == */openblas-openmp/* ]] && continue
    wanted=$(update-alternatives --list "$name" | grep /openblas-openmp/ | head -n 1) || continue
    say "OpenBLAS: $name was $current, selecting $wanted"
    as_root update-alternatives --set "$name" "$wanted" >/dev/null || fail "$name: cannot select $wanted"
  done
}

install_python() {
  local stamp=.venv/requirements.sha256 checksum
  checksum=$(sha256sum <scripts/requirements.txt)
  if [[ -f $stamp && $(<"$stamp") == "$checksum" ]] && .venv/bin/python -c '' 2>/dev/null; then
    return 0
  fi
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "python3: $(python3 --version 2>&1), the pinned packages need 3.11 or newer"
  say "installing scripts/requirements.txt into .venv"
  python3 -m venv --clear .venv || fail "python3 -m venv .venv: failed (see above)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements.txt >&2 ||
    fail "scripts/requirements.txt: pip could not install it (see above)"
  # Written last, so that an interrupted installation is started anew.
  printf '%s\n' "$checksum" >"$stamp"
}

preset=release
for argument in "$@"; do
  case $argument in
    -h | --help) usage; exit 0 ;;
    --lint) packages+=("${lint_packages[@]}") ;;
    --cuda) packages+=("${cuda_packages[@]}") preset=cuda ;;
    *) fail "$argument: unknown argument; --lint, --cuda and --help are known" 2 ;;
  esac
done

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
install_packages
select_openblas
install_python
say "ready: cmake --preset $preset && cmake --build --preset $preset; Python scripts: .venv/bin/python"
