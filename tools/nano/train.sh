#!/bin/sh
# Trains the nano model: train.py with one BLAS thread per worker, the lowest priority and a heap
# that keeps its memory (fewer page faults). Options go to train.py.
set -e
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=67108864
exec nice -n 19 "${PYTHON:-/usr/bin/python3}" "$(dirname "$0")/train.py" "$@"
