#!/usr/bin/env bash
# Makes .venv-hf, in which st/test_huggingface.py runs transformers with PyTorch on the CPU: apart from .venv, because neither is
# needed by mindresume. Prints the interpreter. Does nothing when it is there already. About 1 GB, 1 to 3 minutes.
#
#   PYTHON_BOOTSTRAP=/path/to/python3.11   the interpreter to make it with (default: python3)
#   TORCH="torch==2.13.0+cpu"              what pip shall install: a CPU build, by version, or the path of a wheel; pip's own settings
#                                          (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) say where such a build is to be had
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
    # Without its dependencies: those of some builds are several GB of libraries for devices that are not used here.
    if ! install --no-deps "$TORCH"; then
        echo "$TORCH is not to be had here; set TORCH to a CPU build of PyTorch for $("$PYTHON" --version)." >&2
        exit 2
    fi
    install "$TRANSFORMERS" "safetensors==0.7.0" "numpy<2.4" "setuptools>=77.0.3,<82" filelock typing-extensions sympy networkx jinja2 fsspec
    "$PYTHON" -c "import torch; from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM" >&2
    touch "$STAMP"
fi
echo "$PYTHON"
