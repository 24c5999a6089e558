#!/usr/bin/env python3
"""Measures with ds4 itself how well a model remembers: recall of the numbers assigned in generated
stories (make_story.py), over the length of the story and the number of facts.

    recall.py --model tests/data/nano.gguf --style nano --svg recall.svg
    recall.py --model ds4flash.gguf --lengths 4000,16000,32000 --facts 16 --stories 2 -- --threads 16

What follows -- goes to ds4. A fact counts when the answer has exactly its line Name=number. Prints
a table; --csv and --svg write it to files. Python standard library only.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile

from make_story import STYLES, make_case

HERE = os.path.dirname(os.path.abspath(__file__))
COLORS = ["#1f6fb2", "#d1672a", "#3a8f4d", "#8452a8", "#a8323e", "#6b6b6b"]


def right_facts(facts, reply):
    """How many of facts {name: number} the reply states on a line of their own, unambiguously."""
    said = {}
    for line in reply.split("\n"):
        name, equals, number = line.strip().partition("=")
        if equals:
            said.setdefault(name, []).append(number)
    return sum(said.get(n) == [k] for n, k in facts.items())


def measure(command, cases):
    """Runs the cases in one ds4 process; yields (case, right facts, prompt tokens)."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as f, tempfile.TemporaryFile("w+") as log:
        f.writelines(json.dumps(c) + "\n" for c in cases)
        f.flush()
        run = subprocess.Popen([*command, "--script", f.name, "--quiet"], stdout=subprocess.PIPE,
                               stderr=log, encoding="utf-8")
        n = 0
        for case, line in zip(cases, run.stdout):
            result = json.loads(line)
            if not result["tokens_out"]:
                run.kill()
                raise SystemExit(f"recall: {case['name']}: no answer: {result.get('why')}")
            n += 1
            yield case, right_facts(case["facts"], result["text"]), result["prompt_tokens"]
        run.stdout.close()
        if run.wait() not in (0, 3) or n < len(cases):   # 3: an expectation did not hold
            log.seek(0)
            raise SystemExit(f"recall: ds4 stopped with {run.returncode} after {n} of {len(cases)}\n{log.read()}")


def table(command, style, lengths, facts, stories, seed):
    """One row per cell: asked length, facts, mean prompt tokens, recall per fact, whole answers."""
    cases, cells = [], {}
    for n in lengths:
        for k in facts:
            cells[n, k] = []
            cases += [make_case(style, seed + i, k, n_tokens=n) for i in range(stories)]
    order = [cell for cell in cells for _ in range(stories)]
    rows = []
    print("length facts  tokens  recall  whole answers")
    for cell, (_, right, tokens) in zip(order, measure(command, cases)):
        got = cells[cell]
        got.append((right, tokens))
        if len(got) == stories:
            length, k = cell
            mean = sum(t for _, t in got) / stories
            recall = sum(r for r, _ in got) / (k * stories)
            whole = sum(r == k for r, _ in got) / stories
            rows.append((length, k, round(mean), recall, whole))
            print(f"{length:6d} {k:5d} {mean:7.0f} {recall:7.3f} {whole:8.3f}", flush=True)
    return rows


def svg(rows, title):
    """Recall per fact over the length of the story (logarithmic), one line per number of facts."""
    width, height, left, right, top, bottom = 640, 320, 56, 20, 44, 48
    lengths = sorted({r[0] for r in rows})
    low, high = math.log(lengths[0]), math.log(max(lengths[-1], lengths[0] * 2))
    x = lambda n: left + (math.log(n) - low) / (high - low) * (width - left - right)
    y = lambda v: top + (1 - v) * (height - top - bottom)
    text = lambda px, py, s, anchor="middle", more="": (
        f'<text x="{px:.0f}" y="{py:.0f}" text-anchor="{anchor}" {more}>{s}</text>')
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
           f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="#fff"/>',
           text(width / 2, 20, title, more='font-size="14"'),
           text(width / 2, height - 10, "length of the story in tokens")]
    for v in (0, 0.25, 0.5, 0.75, 1):
        out.append(f'<path d="M{left} {y(v):.1f}H{width - right}" stroke="#ddd"/>')
        out.append(text(left - 8, y(v) + 4, f"{v:.0%}", "end"))
    for n in lengths:
        out.append(text(x(n), height - bottom + 18, f"{n:,}"))
    for i, k in enumerate(sorted({r[1] for r in rows})):
        color = COLORS[i % len(COLORS)]
        points = [(x(r[0]), y(r[3])) for r in sorted(rows) if r[1] == k]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{6 - i % 3 * 2}" fill="{color}"/>'
                for px, py in points]                    # nested, so that equal points all show
        label = height - bottom - 14 - 16 * i
        out.append(f'<circle cx="{left + 12}" cy="{label - 4}" r="4" fill="{color}"/>')
        out.append(text(left + 22, label, f"{k} fact{'s' * (k != 1)}", "start"))
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    numbers = lambda s: [int(v) for v in s.split(",")]
    ap = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ds4", default=os.path.join(HERE, "../ds4"))
    ap.add_argument("--model", default=os.path.join(HERE, "../tests/data/nano.gguf"))
    ap.add_argument("--style", choices=STYLES, help="nano if the model's name says so, else prose")
    ap.add_argument("--lengths", type=numbers, default=[256, 512, 1024, 2048, 3900])
    ap.add_argument("--facts", type=numbers, default=[4, 8, 16])
    ap.add_argument("--stories", type=int, default=8, help="per cell of the table")
    ap.add_argument("--seed", type=int, default=1000, help="of the first story of a cell")
    ap.add_argument("--csv")
    ap.add_argument("--svg")
    ap.add_argument("--title", help="of the drawing")
    a = ap.parse_args(argv[:cut])
    name = os.path.basename(a.model)
    style = a.style or ("nano" if "nano" in name else "prose")
    command = [a.ds4, "--model", a.model, "--ctx", str(max(a.lengths) * 9 // 8 + 512), *argv[cut + 1:]]
    rows = table(command, style, a.lengths, a.facts, a.stories, a.seed)
    if a.csv:
        with open(a.csv, "w") as f:
            f.write("length,facts,tokens,recall,whole\n")
            f.writelines(f"{n},{k},{t},{r:.4f},{w:.4f}\n" for n, k, t, r, w in rows)
    if a.svg:
        with open(a.svg, "w", encoding="utf-8") as f:
            f.write(svg(rows, a.title or f"Recall of assigned numbers, {name}"))


if __name__ == "__main__":
    main()
