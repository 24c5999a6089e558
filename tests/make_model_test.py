#!/usr/bin/env python3
"""Checks that tools/make_model writes the files whose hashes tests/data/forward/index.txt lists,
with one thread and with several, and that its errors are one line.

    make_model_test.py MAKE_MODEL
"""
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile

INDEX = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data/forward/index.txt")


def main():
    tool = [*shlex.split(os.environ.get("DS4_RUN", "")), os.path.abspath(sys.argv[1])]
    cases = [line.split(None, 4)[1:] for line in open(INDEX) if line.startswith("model ")]
    passed = failed = 0
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "model.gguf")
        for name, _, want, options in cases:
            for threads in "1", "3":
                subprocess.run([*tool, *shlex.split(options), "--threads", threads, "-o", path],
                               check=True, stdout=subprocess.DEVNULL)
                with open(path, "rb") as f:
                    got = hashlib.sha256(f.read()).hexdigest()
                if got == want:
                    passed += 1
                else:
                    failed += 1
                    print(f"{name}, {threads} threads: sha256 {got}, expected {want}")
        for options, message in [
                ("--preset x -o " + path, "unknown preset 'x'"),
                ("--n-layer 2", "-o FILE is required"),
                ("--all-types Q4_K -o " + path, "is not a multiple of the Q4_K block"),
                ("-o " + os.path.join(tmp, "no/where"), "No such file")]:
            r = subprocess.run([*tool, *shlex.split(options)], capture_output=True, text=True)
            if r.returncode == 1 and message in r.stderr and r.stderr.count("\n") == 1:
                passed += 1
            else:
                failed += 1
                print(f"{options}: expected one line with \"{message}\", got {r.returncode} {r.stderr!r}")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


sys.exit(main())
