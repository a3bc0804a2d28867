#!/usr/bin/env bash
# Makes .venv-hf, in which st/test_huggingface.py runs transformers with PyTorch on the CPU. It is separate from .venv, because
# mindresume needs neither. Prints the path of its Python. Does nothing if it exists already. About 1 GB, 1 to 3 minutes.
#
#   PYTHON_BOOTSTRAP=/path/to/python3.11   the interpreter to make it with (default: python3)
#   TORCH="torch==2.13.0+cpu"              what pip installs: a CPU build, by version or as the path of a wheel; pip's settings
#                                          (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) tell it where to find one
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HF_VENV:-$ROOT/.venv-hf}"
PYTHON="$VENV/bin/python"
BOOTSTRAP="${PYTHON_BOOTSTRAP:-python3}"
TORCH="${TORCH:-torch==2.13.0+cpu}"
TRANSFORMERS="transformers==4.57.1"
STAMP="$VENV/.made-$(echo "$TORCH $TRANSFORMERS" | cksum | tr ' ' '-')"

if [ ! -e "$STAMP" ]; then
    rm -rf "$VENV"
    source "$ROOT/scripts/machine.sh"
    make_venv "$BOOTSTRAP" "$VENV" >&2
    install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" >&2; }
    # Without dependencies: some builds depend on several GB of libraries for devices that are not used here.
    if ! install --no-deps "$TORCH"; then
        echo "$TORCH cannot be installed here; set TORCH to a CPU build of PyTorch for $("$PYTHON" --version)." >&2
        exit 2
    fi
    install "$TRANSFORMERS" "safetensors==0.7.0" "numpy<2.4" "setuptools>=77.0.3,<82" filelock typing-extensions sympy networkx jinja2 fsspec
    "$PYTHON" -c "import torch; from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM" >&2
    touch "$STAMP"
fi
echo "$PYTHON"
