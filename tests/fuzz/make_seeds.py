#!/usr/bin/env python3
"""Writes what fuzzing starts from: DIR/chat, DIR/gguf, DIR/tokenizer and the dictionary DIR/words.

    tests/fuzz/make_seeds.py MAKE_MODEL DIR
"""
import json
import os
import struct
import subprocess
import sys

DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
MAKE_MODEL, OUT = sys.argv[1:]
SMALL = "--n-head 2 --n-rot 8 --ff-exp {e} --n-embd {e} --q-lora {e} --o-lora {e} --head-dim {d} --idx-heads 2 --idx-dim {i} --swa 8 "
MODELS = {
    "three-layers": "--preset tiny-f32 --ratios 0,4,128 --hash-layers 1 --out-groups 2 --n-expert 4 --n-used 2 --idx-top-k 4 " + SMALL.format(e=32, d=32, i=16),
    "quantised": "--preset micro-q --ratios 4 --hash-layers 0 --out-groups 1 --n-expert 2 --n-used 1 --idx-top-k 2 --hc 2 " + SMALL.format(e=256, d=128, i=32),
    "mtp": "--preset tiny-f32 --ratios 0 --mtp llama --hash-layers 0 --out-groups 2 --n-expert 4 --n-used 2 " + SMALL.format(e=32, d=32, i=16),
}
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def write(folder, name, data):
    os.makedirs(os.path.join(OUT, folder), exist_ok=True)
    with open(os.path.join(OUT, folder, name), "wb") as f:
        f.write(data)


def head_of(b):
    """a GGUF file without its tensor data"""
    def string(at):
        return at + 8 + struct.unpack_from("<Q", b, at)[0]

    def value(at, kind):
        if kind == 8:
            return string(at)
        if kind != 9:
            return at + SIZES[kind]
        kind, n = struct.unpack_from("<IQ", b, at)
        at += 12
        for _ in range(n):
            at = value(at, kind)
        return at

    n_tensors, n_meta = struct.unpack_from("<QQ", b, 8)
    at = 24
    for _ in range(n_meta):
        at = string(at)
        at = value(at + 4, struct.unpack_from("<I", b, at)[0])
    for _ in range(n_tensors):
        at = string(at)
        at += 16 + 8 * struct.unpack_from("<I", b, at)[0]
    return b[:at]


def rows(name):
    with open(os.path.join(DATA, "chat", name), encoding="utf-8") as f:
        return [json.loads(line) for line in f]


for name, options in MODELS.items():
    path = os.path.join(OUT, name + ".gguf")
    os.makedirs(OUT, exist_ok=True)
    subprocess.run([MAKE_MODEL, *options.split(), "-o", path], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(path, "rb") as f:
        write("gguf", name, head_of(f.read()))
    os.unlink(path)
for i, r in enumerate(rows("dsml-gate.jsonl") + rows("dsml-parse.jsonl")):
    open_thought = r.get("thinking_open", r.get("thinking"))
    write("chat", "reply%02d" % i, bytes([2 | bool(open_thought)]) + r["text"].encode())
for i, r in enumerate(rows("chat.jsonl")):
    write("chat", "messages%02d" % i, b"\0" + json.dumps(r["messages"], ensure_ascii=bool(i % 2)).encode())
    write("tokenizer", "rendered%02d" % i, r["text"].encode())
with open(os.path.join(DATA, "tokenizer", "nano.txt")) as f:
    for i, line in enumerate(f):
        words = line.split()
        if i % 9 == 0 and words[0] in ("plain", "raw") and words[1] != "-":
            write("tokenizer", "text%03d" % i, bytes.fromhex(words[1]))
words = ["<｜DSML｜", "</｜DSML｜", "tool_calls>", "invoke name=\"", "parameter name=\"", " string=\"true\">", " string=\"false\">", "<think>", "</think>", "<｜User｜>",
         "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "\"role\":", "\"content\":", "\"tool_calls\":", "\"assistant\"", "\"system\"", "\\ud83d", "deepseek4.", ".weight"]
with open(os.path.join(OUT, "words"), "w") as f:
    for w in words:
        f.write('"%s"\n' % "".join(chr(b) if 0x20 < b < 0x7f and b not in b'"\\' else "\\x%02x" % b for b in w.encode()))
