#!/usr/bin/env python3
"""The regression run: every case of tests/regress/*.jsonl, and one hash on every instruction set and thread count; and that
the places which regress/mutants.py breaks are still there.
Closes with "N passed, M failed" (Python standard library only).

    tests/regress_test.py ./ds4 tests/data/nano.gguf

The short files run on every ISA that this CPU has, with one and with three threads; the stories take scalar code half a
minute, so it reads them with three threads only. The long ones run with the best ISA, and on scalar too if CI=true.
Under an emulator (DS4_RUN) the short files run once on every ISA, and scalar code reads no stories, unless CI=true.
"""
import glob
import json
import os
import re
import shlex
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "regress"))
from mutants import MUTANTS, broken_source

LONG = "_long.jsonl"
RUN = shlex.split(os.environ.get("DS4_RUN", ""))


def run(ds4, model, path, options):
    """(passed, failed) of one script file; shows why a case failed"""
    p = subprocess.run([*RUN, ds4, "-q", "--model", model, *options, "--script", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    closing = re.findall(r"^(\d+) passed, (\d+) failed$", p.stderr, re.M)
    passed, failed = map(int, closing[-1]) if closing else (0, 1)
    if p.returncode not in (0, 3):       # a crash after the last case too
        failed = max(failed, 1)
    for line in p.stdout.splitlines() if failed else []:
        result = json.loads(line)
        if not result["pass"]:
            print("FAILED %s %s: %s" % (" ".join(options), result["name"], result["why"]))
    if failed and not closing:
        sys.stdout.write(p.stderr[-2000:])
    return passed, failed


def jobs(isas):
    """(file, options) of every run"""
    files = sorted(glob.glob(os.path.join(HERE, "regress", "*.jsonl")))
    short = [f for f in files if not f.endswith(LONG)]
    everything = os.environ.get("CI") == "true"
    if RUN and not everything:
        return [(f, ["--isa", isa, "-t", "2"]) for isa in isas for f in short if isa != "scalar" or "recall" not in f]
    r = [(f, ["-t", "2"]) for f in files]
    for isa in isas:
        r += [(f, ["--isa", isa, "-t", "1"]) for f in short if isa != "scalar" or "recall" not in f]
        r += [(f, ["--isa", isa, "-t", "3", "--prefill-chunk", "97"]) for f in short]
    if everything:
        r += [(f, ["--isa", "scalar"]) for f in files if f not in short]
    return r


def main():
    ds4, model = sys.argv[1:3]
    version = subprocess.run([*RUN, ds4, "--version"], stdout=subprocess.PIPE, check=True, text=True).stdout
    isas = re.search(r"\((.*)\)", version).group(1).split(", ")
    with open(os.path.join(os.path.dirname(HERE), "ds4.cpp"), encoding="utf-8") as f:
        broken_source(f.read(), MUTANTS)             # stops if a place that mutants.py breaks is gone
    total = [1, 0]
    for f, options in jobs(isas):
        for i, n in enumerate(run(ds4, model, f, options)):
            total[i] += n
    print("%d passed, %d failed" % tuple(total))
    return 1 if total[1] else 0


sys.exit(main())
