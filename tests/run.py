#!/usr/bin/env python3
"""Runs every test of the project and prints one line "N passed, M failed" at the end (Python standard library only).

    tests/run.py --build build              unit tests, make_model, command line, regression run
    tests/run.py --build DIR --unit-only    only DIR/tests (sanitizer builds)
    --run "qemu-aarch64"                    a program to start the binaries with, of a cross build all in DIR: without the
                                            tests of the command line, whose time limits and terminals are the host's
    --filter PATTERN                        handed to GoogleTest
"""
import argparse
import os
import re
import shlex
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed$", re.M)


def gtest(command, env):
    """passed and failed of one GoogleTest binary, whose output is shown"""
    p = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    passed = failed = 0
    for line in p.stdout:
        if line.startswith("[       OK ]"):
            passed += 1
            continue
        if line.startswith("[  FAILED  ]") and line.rstrip().endswith("ms)"):
            failed += 1
        if line.startswith("[ RUN") or line.startswith("[----"):
            continue
        sys.stdout.write(line)
    if p.wait() and not failed:          # a crash or a sanitizer report
        failed += 1
    return passed, failed


def closing_line(command, stream, env):
    """passed and failed of a program that closes `stream` with "N passed, M failed\""""
    p = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    m = CLOSING.findall(p.stdout if stream == "stdout" else p.stderr)
    passed, failed = (int(m[-1][0]), int(m[-1][1])) if m else (0, 1)
    if failed or p.returncode:
        sys.stdout.write(p.stdout[-6000:] + p.stderr[-6000:])
        failed = max(failed, 1)
    return passed, failed


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--build", default="build")
    ap.add_argument("--unit-only", action="store_true")
    ap.add_argument("--run", default="")
    ap.add_argument("--filter", default="*")
    a = ap.parse_args()
    run = shlex.split(a.run)
    env = dict(os.environ, DS4_RUN=a.run, DS4_BUILD=os.path.join(ROOT, a.build), DS4_DATA=os.path.join(ROOT, "tests", "data"))
    env.pop("DS4_MODEL", None)
    total = [0, 0]

    def add(name, result):
        print("%-28s %d passed, %d failed" % (name, *result), flush=True)
        total[0] += result[0]
        total[1] += result[1]

    add("unit tests", gtest(run + [os.path.join(ROOT, a.build, "tests"), "--gtest_brief=0", "--gtest_filter=" + a.filter], env))
    if not a.unit_only:
        ds4 = os.path.join(a.build, "ds4") if run else "./ds4"
        add("model generator", closing_line([sys.executable, "tests/make_model_test.py", os.path.join(a.build, "make_model")], "stdout", env))
        if not run:
            add("command line", closing_line([sys.executable, "tests/cli_test.py", ds4, "tests/data/nano.gguf"], "stdout", env))
        add("regression", closing_line([sys.executable, "tests/regress_test.py", ds4, "tests/data/nano.gguf"], "stdout", env))
    print("%d passed, %d failed" % tuple(total))
    return 1 if total[1] else 0


sys.exit(main())
