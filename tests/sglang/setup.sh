#!/bin/sh
# Sets up a virtual environment in which the real SGLang runs without a GPU.
# Usage: tests/sglang/setup.sh VENV VERSION   (VERSION: one that has a pins-VERSION.txt here; PYTHON, TORCH from the environment)
#
# SGLang's own requirements pull in CUDA builds of several gigabytes, none of which is needed on a CPU: SGLang and the three packages
# that would bring them along are installed without dependencies, and what the server imports is named here.
set -eu
venv=$1
version=$2
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@"; }
pip "${TORCH:-torch==2.13.0}"
pip --no-deps -c "$here/pins-$version.txt" sglang torchvision xgrammar compressed-tensors
pip -c "$here/pins-$version.txt" -r "$here/requirements.txt"
pip -e "$root"
