#!/usr/bin/env python3
"""Shows that the regression run bites: breaks ds4.cpp in one sign or index at a time, in a scratch copy, and tells which
cases notice, by what they say (text, facts, tokens) and by their hashes. The table in README.md comes from here.

    tests/regress/mutants.py [--only FAMILY] [--build DIR]

One build holds all of them; the environment variable DS4_MUTANT chooses. A mutant whose place in ds4.cpp is gone is an
error: move it. Python standard library only; ten minutes on two quiet cores.
"""
import argparse
import glob
import json
import os
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# family, what is broken, a piece of ds4.cpp that occurs once, the expression in it, what stands there instead
MUTANTS = [
    ("dense int8", "scale of the next block", "acc = fma(sum, mul(load(g.d), load(x.d + b)), acc);", "sum", "neg(sum)"),
    ("dense int8", "rows of a tile exchanged", "const uint8_t* row = w.data + std::min(r + k, r1 - 1) * w.stride;\n      const uint8_t* next", "r + k", "r + (k ^ 1)"),
    ("float rows", "sign of a product", "const f32x16 m = in_register(load_row<type>(row[i], k));", "load_row<type>(row[i], k)", "neg(load_row<type>(row[i], k))"),
    ("routed experts", "sigmoid of -u in SwiGLU", "exp(neg(u))", "neg(u)", "u"),
    ("routed experts", "weight of the first expert for all", "ws.expert_weight[p], shape.ff", "ws.expert_weight[p]", "ws.expert_weight[t * K]"),
    ("routed experts", "selection bias subtracted", "const float score = g[e] + w.probs_bias[e];", "w.probs_bias[e]", "-w.probs_bias[e]"),
    ("routed experts", "hash table of the span's first token", "size_t(span.tokens[t]) * K", "span.tokens[t]", "span.tokens[0]"),
    ("compressor", "softmax of -z", "const f32x16 e = exp(sub(load_upto(z[t] + d, m), top));", "sub(load_upto(z[t] + d, m), top)", "sub(top, load_upto(z[t] + d, m))"),
    ("compressor", "position bias of the next slot", "(pos + t) % r * parts[i].width", "pos + t", "pos + t + 1"),
    ("compressor", "halves exchanged", "r == 4 && p >= block * r ? part.dim : 0", "p >= block * r", "p < block * r"),
    ("compressor", "ring one slot off at a chunk's end", "kept = size_t(p % c.state_rows) * part.width;", "p % c.state_rows", "(p + 1) % c.state_rows"),
    ("compressor", "waiting rows one slot off", "slot = p % kMaxWaiting;", "p % kMaxWaiting", "(p + 1) % kMaxWaiting"),
    ("compressor", "a rewound row still waits", "c.waiting = std::min(c.waiting, span.pos);", "std::min(c.waiting, span.pos)", "c.waiting"),
    ("indexer", "negative part of q.row", "total[r] = fma(w0, max(acc[r][0], zero()), total[r]);", "max(acc[r][0], zero())", "min(acc[r][0], zero())"),
    ("indexer", "lowest scores chosen", "return u & 0x80000000u ? ~u : u | 0x80000000u;", "u & 0x80000000u ? ~u : u | 0x80000000u", "u & 0x80000000u ? u : ~(u | 0x80000000u)"),
    ("indexer", "sign of every other entry of stored rows", "f32_to_f16(y[16 * i]) : uint16_t(0);", "y[16 * i]", "i & 1 ? -y[16 * i] : y[16 * i]"),
    ("indexer", "selection of the next token", "const uint32_t* selected = ws.selected + t * shape.idx_top_k;", "t * shape.idx_top_k", "(t ^ 1) * shape.idx_top_k"),
    ("attention", "sign of the scores", "1.0f / std::sqrt(float(D)),\n", "std::sqrt(float(D))", "-std::sqrt(float(D))"),
    ("attention", "sign of the sink", "store(sink, exp(set1(a.sinks[h0 + size_t(h)] - m)));", "a.sinks[h0 + size_t(h)]", "-a.sinks[h0 + size_t(h)]"),
    ("attention", "window one row short", "? pos + 1 - shape.window : 0; p <= pos; p++", "pos + 1 - shape.window", "pos + 2 - shape.window"),
    ("attention", "newest compressed row unseen", "const uint32_t compressed = c.ratio ? (pos + 1) / c.ratio : 0;", "(pos + 1) / c.ratio", "pos / c.ratio"),
    ("HC", "mixing matrix transposed", "set1(C[j * n_hc + k])", "C[j * n_hc + k]", "C[k * n_hc + j]"),
    ("HC", "one Sinkhorn round fewer", "for (uint32_t it = 1; it < s.sinkhorn_iters; it++)", "it < s.sinkhorn_iters", "it + 1 < s.sinkhorn_iters"),
    ("HC", "sign of the post base", "hc.base[S + i]));", "hc.base[S + i]", "-hc.base[S + i]"),
    ("head", "sign of the base", "pre[i] = float(sigmoid_f64(mix[i] * hc.scale[0] + hc.base[i])) + eps;", "hc.base[i]", "hc.fn.rows == S ? -hc.base[i] : hc.base[i]"),
    ("head", "norm of the first layer", "r.hc_pre(r.model.hc_head, r.model.output_norm, span.first, span);", "r.model.output_norm", "r.model.layers[0].attn_norm"),
    ("norm", "eps subtracted", "sum_squares(x, n) / float(n) + eps", "eps", "-eps"),
    ("norm", "mean over n - 1", "sum_squares(x, n) / float(n) + eps", "float(n)", "float(n - 1)"),
    ("RoPE", "sign of a sine", "x[2 * i] = a * c - b * s;", "b * s", "-b * s"),
    ("RoPE", "output not turned back", "cs, -1.0f, shape.n_rot", "-1.0f", "1.0f"),
    ("RoPE", "compressed rows at the block's end", "angles(r, block * r, cs);", "block * r", "block * r + r - 1"),
    ("RoPE", "plain frequencies in compressed layers", "angles(4, span.pos + t,", "4", "0"),
    ("RoPE", "indexer queries not turned", "rope_row(4, t), 1.0f, shape.n_rot", "1.0f", "-1.0f"),
    ("cached rows", "FP8 range of E5M2's half", "load_upto(x + i, end - i), inv), 448.0f, 0x1p-6f", "448.0f", "240.0f"),
]
SAYS = {"text", "facts", "tokens_out", "finish"}


def broken_source(text, mutants):
    """ds4.cpp with every mutant in it, chosen at run time"""
    edits = []
    for number, (family, what, piece, old, new) in enumerate(mutants, 1):
        if text.count(piece) != 1 or old not in piece:
            raise SystemExit("mutants: %s, %s: %r is %d times in ds4.cpp, expected once" % (family, what, piece, text.count(piece)))
        edits.append((text.index(piece) + piece.index(old), old, "(ds4_mutant == %d ? (%s) : (%s))" % (number, new, old)))
    for at, old, new in sorted(edits, reverse=True):
        text = text[:at] + new + text[at + len(old):]
    start = text.index("\nnamespace ds4 {")
    return text[:start] + '\nstatic const int ds4_mutant = std::getenv("DS4_MUTANT") ? std::atoi(std::getenv("DS4_MUTANT")) : 0;\n' + text[start:]


def short_answers(directory):
    """The script files with every answer cut one token after its wanted end: a broken model rarely finds one itself."""
    paths = []
    for path in sorted(glob.glob(os.path.join(HERE, "*.jsonl")), key=lambda p: ("_long" in p, p)):
        with open(path, encoding="utf-8") as f:
            cases = [json.loads(line) for line in f]
        paths.append(os.path.join(directory, os.path.basename(path)))
        with open(paths[-1], "w", encoding="utf-8") as f:
            f.writelines(json.dumps({**c, "n": len(c["tokens_out"]) + 1}) + "\n" for c in cases)
    return paths


def failures(ds4, number, paths):
    """{case: set of the expectations that failed}; the long stories, being slow, only when the others say nothing"""
    failed = {}
    for path in paths:
        if path.endswith("_long.jsonl") and any(why & SAYS for why in failed.values()):
            continue
        p = subprocess.run([ds4, "-q", "--prefill-chunk", "97", "--model", os.path.join(ROOT, "tests/data/nano.gguf"), "--script", path], env=dict(os.environ, DS4_MUTANT=str(number)),
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
        if p.returncode not in (0, 3):
            failed["(exit code %d)" % p.returncode] = {"text"}
        for line in p.stdout.splitlines():
            result = json.loads(line)
            if not result["pass"]:
                failed["%s: %s" % (os.path.basename(path)[:-len(".jsonl")], result["name"].replace("recall ", ""))] = {w.split(":")[0].split("[")[0] for w in result["why"].split("; ")}
    return failed


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="families that contain this")
    ap.add_argument("--build", default=os.path.join(ROOT, "build", "mutants"))
    a = ap.parse_args()
    os.makedirs(a.build, exist_ok=True)
    source, ds4 = os.path.join(a.build, "ds4.cpp"), os.path.join(a.build, "ds4")
    with open(os.path.join(ROOT, "ds4.cpp"), encoding="utf-8") as f:
        text = broken_source(f.read(), MUTANTS)
    with open(source, "w", encoding="utf-8") as f:
        f.write(text)
    subprocess.run(["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-pthread", source, "-o", ds4], check=True)
    paths = short_answers(a.build)
    failed = failures(ds4, 0, paths)
    if failed:
        raise SystemExit("mutants: cases fail with nothing broken: " + ", ".join(failed))
    print("| family | broken | fail by text | fail in all | first by text |\n|---|---|---|---|---|")
    for number, (family, what, *_) in enumerate(MUTANTS, 1):
        if a.only not in family:
            continue
        failed = failures(ds4, number, paths)
        said = [name for name, why in failed.items() if why & SAYS]
        print("| %s | %s | %d | %d | %s |" % (family, what, len(said), len(failed), said[0] if said else "hashes only" if failed else "**nothing**"), flush=True)


if __name__ == "__main__":
    main()
