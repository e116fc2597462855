#!/usr/bin/env bash
# Test loragate on the lowest versions it claims to support: scripts/lowest_versions.sh VENV_DIR [pytest arguments]
#
# Makes a virtual environment with constraints-lowest.txt and runs the quick tests of gates, training, losses, generation and
# contracts in it (vLLM is not installed; its tests skip themselves).
# Settings, from the environment:
#   PYTHON            interpreter that makes the environment (default: python3.11, or else python3)
#   TORCH             requirement of torch (default: the version of constraints.txt, whose CPU build is a small download)
#   TORCH_PIP_ARGS    more arguments for the pip call that installs torch, such as an index with CPU builds
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: $0 VENV_DIR [pytest arguments]" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
venv=$1
shift
torch=${TORCH:-$(grep '^torch==' constraints.txt)}
[ -x "$venv/bin/python" ] || "${PYTHON:-$(command -v python3.11 || command -v python3)}" -m venv "$venv"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install -q ${TORCH_PIP_ARGS:-} "$torch"
"$venv/bin/python" -m pip install -q -c constraints-lowest.txt -e . "$torch" pytest pytest-xdist hypothesis
"$venv/bin/python" -m pip freeze | grep -iE '^(torch|transformers|peft|trl|accelerate|datasets|huggingface_hub|safetensors|numpy)=='
if [ $# -eq 0 ]; then
  set -- tests/gates tests/training tests/contract tests/losses tests/generation -m "not slow"
fi
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
