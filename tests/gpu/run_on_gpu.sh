#!/usr/bin/env bash
# What CI cannot do: the tests of the scan backends and their timings on an NVIDIA GPU, summed up in
# tests/gpu/reports/<gpu>-<date>.md, and where there are several GPUs runs on them, by nccl. Takes under 8 minutes once
# PyTorch is installed, 4 more with several GPUs; call it from anywhere.
#
#   tests/gpu/run_on_gpu.sh                  uses the environment of `make test`, .venv, and makes it if need be
#   PYTHON=python3 tests/gpu/run_on_gpu.sh   uses a Python (name or full path) that has what pyproject.toml requires
#
# A GPU needs the CUDA build of PyTorch, in the version that constraints.txt pins. On Linux pip's ordinary wheel is that
# build, so .venv has it unless pip was pointed at an index of CPU builds; `pip show torch` then ends its version in
# +cpu, and the index to install from instead is on PyTorch's page "Get Started".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ -z ${PYTHON:-} ]]; then
    make --no-print-directory .venv/installed-test
    PYTHON=.venv/bin/python
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: no GPU for the PyTorch of $PYTHON: install its CUDA build, and see that nvidia-smi lists the GPU" >&2
    exit 2
fi

unset TRITON_INTERPRET
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

limited() { # seconds, step, command...: Ctrl-C after so many seconds, so that what is done by then is still written
    echo "$2 (at most $1 s)"
    timeout --foreground --signal=INT --kill-after=20 "$1" "${@:3}" ||
        echo "- $2: failed or out of time" | tee -a "$results/problems.md" >&2
}

limited 300 "1/3 the backends agree" \
    "$PYTHON" -m pytest -q -m "not slow" -p no:cacheprovider --junitxml="$results/tests.xml" \
    tests/scan/test_linear_triton.py tests/scan/test_selective_triton.py
if (($("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') > 1)); then
    limited 240 "several GPUs are as one" \
        "$PYTHON" -m pytest -q -m "not slow" -p no:cacheprovider --junitxml="$results/devices.xml" \
        tests/devices/test_one_rank_or_many.py tests/devices/test_evaluation_on_ranks.py \
        tests/devices/test_context_parallel.py tests/devices/test_long_sequences.py
fi
limited 50 "2/3 errors, and mamba_ssm if it is installed" "$PYTHON" tests/gpu/compare.py "$results/compare.md"
limited 90 "3/3 bench scan" "$PYTHON" -m fprnn_lightning bench scan --output "$results/scan.csv"

"$PYTHON" tests/gpu/report.py "$results"
[[ ! -e $results/problems.md ]]
