#!/usr/bin/env bash
# From a fresh clone to the paper's comparison on real text: sets up, builds, turns the installed Python's documentation
# and library sources into shards, trains the same model with an AdamW head and with a RowNorm head, and draws
# runs/quickstart/quickstart.png. Stopped in the middle, it goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1-}" in
  "") ;;
  -h | --help) echo "usage: scripts/quickstart.sh   (about seven minutes on two cores; no GPU, no download of text)"; exit 0 ;;
  *) echo "usage: scripts/quickstart.sh" >&2; exit 2 ;;
esac

# Waiting threads sleep: a tenth slower alone, several times faster beside anything else that computes.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

say() { printf '\n== %s\n' "$*"; }

# With NVIDIA's compiler and a GPU that works: the CUDA backend too, which the configs' device "auto" then takes.
preset=release options=()
nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if command -v "$nvcc" >/dev/null && capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null); then
  preset=cuda
  export CUDACXX=$nvcc
  options=(-DROWNORM_CUDA_STANDIN=OFF -DCMAKE_CUDA_ARCHITECTURES="$(head -n 1 <<<"${capability//./}")-real")
fi

say "setup"
scripts/setup.sh

say "build ($preset)"
cmake --preset "$preset" "${options[@]}" >/dev/null
cmake --build --preset "$preset" --target rownorm

say "text to shards"
if [ -f data/quickstart/prepare.json ]; then
  echo "data/quickstart is there already"
else
  .venv/bin/python data/prepare.py --source python-docs --tokenizer train-bpe:4096 --output data/quickstart
fi

for head in adamw rownorm; do
  say "train: $head head"
  "build/$preset/rownorm" train "configs/quickstart-$head.json" --resume
done

say "picture"
.venv/bin/python scripts/plot.py runs/quickstart/adamw runs/quickstart/rownorm --output runs/quickstart/quickstart.png
