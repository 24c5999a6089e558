#!/usr/bin/env python3
"""ds4 beside llama.cpp on the same file, alternating, at the same thread count; prints medians and ratios, and ds4's decoding
speed in per cent of what reading all weights of a token would allow, at the measured speed of reading a buffer ("of memory")
or the weights in place ("of weights"). --warm-weights puts the file into large pages first, where the system has them, for
both programs. Python standard library only.

    tools/bench_peers.py --ds4 ./ds4 --peer DIR --model slice5.gguf [--threads 1,2] [--prompts 32,512] [--rounds 3]

DIR holds peer_bench, built from tools/peer: README, "On a server: memory and speed", tells how.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile


def ours(a, threads, prompt, gen):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
        seed = 1
        for _ in range(prompt):          # the ids that peer_bench uses
            seed = (seed * 1664525 + 1013904223) & 0xFFFFFFFF
            f.write("%d " % ((seed >> 8) % 100000 + 1000))
        f.flush()
        out = subprocess.run([a.ds4, "-q", "--warm-weights", "--model", a.model, "-t", str(threads), "-c", str(prompt + gen + 64), "--prompt-tokens", f.name, "-n", str(gen + 1),
                              "--temp", "0", "--ignore-eos", "--json"], stdout=subprocess.PIPE, check=True, text=True).stdout
    j = json.loads(out)
    return prompt / j["prompt_ms"] * 1e3, (j["completion_tokens"] - 1) / j["completion_ms"] * 1e3      # the last one is not computed with


def peer(a, threads, prompt, gen):
    out = subprocess.run([os.path.join(a.peer, "peer_bench"), a.model, str(threads), str(prompt), str(gen)],
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True).stdout
    m = re.search(r"prompt ([\d.]+) decode ([\d.]+)", out)
    return float(m[1]), float(m[2])


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ds4", default="./ds4")
    ap.add_argument("--peer", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--threads", default="1,2")
    ap.add_argument("--prompts", default="32,512")
    ap.add_argument("--gen", type=int, default=16)
    ap.add_argument("--rounds", type=int, default=3)
    a = ap.parse_args()
    print("%-8s %-10s %10s %10s %8s" % ("threads", "what", "ds4", "llama.cpp", "ratio"))
    gigabytes = token_gigabytes(a)
    for threads in map(int, a.threads.split(",")):
        decode, share = [], []
        for prompt in map(int, a.prompts.split(",")):
            rows = []
            for _ in range(a.rounds):
                rows.append((ours(a, threads, prompt, a.gen), peer(a, threads, prompt, a.gen)))
                share.append([100 * rows[-1][0][1] * gigabytes / speed for speed in memory(a, threads)])
            decode += [(o[1], p[1]) for o, p in rows]
            show(threads, "prompt %d" % prompt, [(o[0], p[0]) for o, p in rows])
        show(threads, "decode", decode)
        for of, shares in zip(("of memory", "of weights"), zip(*share)):
            print("%-8d %-10s %9.0f%%" % (threads, of, statistics.median(shares)), flush=True)


def memory(a, threads):
    """GB/s of reading with so many threads: of a buffer, of the model's weights in place."""
    out = subprocess.run([a.ds4, "--bench", "memory", "--warm-weights", "-t", str(threads), "--model", a.model, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True).stdout
    speeds = {row["of"]: row["GB/s"] for row in json.loads(out)["rows"] if row["threads"] == threads}
    return [speeds[of] for of in ("buffer", "weights") if of in speeds]              # no weights where the cache holds them


def token_gigabytes(a):
    out = subprocess.run([a.ds4, "--inspect", "--json", "--model", a.model], stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(out)["bytes_per_token"] / 1e9


def show(threads, what, pairs):
    print("%-8d %-10s %10.2f %10.2f %7.2fx" % (threads, what, statistics.median(o for o, _ in pairs), statistics.median(p for _, p in pairs),
                                              statistics.median(o / p for o, p in pairs)), flush=True)


main()
