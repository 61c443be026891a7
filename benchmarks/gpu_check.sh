#!/usr/bin/env bash
# What jaxckpt does on a GPU, in 6 minutes: benchmarks/gpu_check.py tells what, and takes the same arguments.
# Needs a Python with the dependencies of jaxckpt, JAX for the GPU, orbax-checkpoint, pytest and hypothesis; PYTHON names it.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=5 360 "${PYTHON:-python3}" benchmarks/gpu_check.py --json benchmarks/results/gpu_check.json "$@"
