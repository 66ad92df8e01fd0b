#!/bin/sh
# compute-sanitizer over a short run of every kernel: reads and writes out of bounds (memcheck), and
# with TOOL=racecheck, initcheck or synccheck what those look for. It comes with the CUDA toolkit.
#
#   [TOOL=memcheck] [PYTHON=.venv/bin/python] [SANITIZER=compute-sanitizer] tests/gpu/sanitize.sh
#
# Run it once without the sanitizer first (`-k sanitizer`): Triton's cache then holds the kernels.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
sanitizer=${SANITIZER:-compute-sanitizer}
# Every tensor is an allocation of its own: a read past its end is not inside torch's pool.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# cuda-bindings asks the driver for functions that it may not have: no error of a kernel.
exec "$sanitizer" --tool "${TOOL:-memcheck}" --report-api-errors no --error-exitcode 1 --print-limit 20 \
    "$python" -m pytest -q -p no:cacheprovider -m gpu -k "sanitizer and ${SELECT:-test}" tests/gpu
