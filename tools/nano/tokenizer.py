"""Byte-level BPE with the ASCII part of the joyai-llm pre-tokenizer: codec and trainer.

    tokenizer.py OUT.json N_VOCAB      learns a vocabulary from the training text
"""
import collections
import json
import random
import re
import sys

from data import NAMES, ONES, SPECIALS, TENS, Chat, Story

P = r"!-/:-@\[-`{-~"
SPLIT = re.compile(rf"[0-9]{{1,3}}|[{P}][A-Za-z]+|[^\r\nA-Za-z0-9{P}]?[A-Za-z\u0080-\uffff]+"
                   rf"| ?[{P}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")


def byte_alphabet():
    """GPT-2's printable stand-in for each byte value."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(b if b in keep else next(shifted)) for b in range(256)]


TO_UNIT = byte_alphabet()
TO_BYTE = {u: b for b, u in enumerate(TO_UNIT)}


def to_units(text):
    return [TO_UNIT[b] for b in text.encode()]


class Tokenizer:
    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            d = json.load(f)
        self.tokens, self.merges, self.n_normal = d["tokens"], d["merges"], d["n_normal"]
        self.id = {t: i for i, t in enumerate(self.tokens)}
        self.rank = {tuple(m.split(" ")): i for i, m in enumerate(self.merges)}
        self.cache = {}

    def piece(self, text):
        """Token ids of one pre-token."""
        got = self.cache.get(text)
        if got is None:
            u = to_units(text)
            while len(u) > 1:
                rank, i = min((self.rank.get(p, 1 << 30), i) for i, p in enumerate(zip(u, u[1:])))
                if rank == 1 << 30:
                    break
                u[i:i + 2] = [u[i] + u[i + 1]]
            got = self.cache[text] = [self.id[x] for x in u]
        return got

    def encode(self, text):
        """Special tokens are recognised."""
        out = []
        for i, part in enumerate(SPECIAL.split(text)):
            if i % 2:
                out.append(self.id[part])
            else:
                for p in SPLIT.findall(part):
                    out += self.piece(p)
        return out

    def decode(self, ids):
        raw = b"".join(self.tokens[i].encode() if i >= self.n_normal else
                       bytes(TO_BYTE[c] for c in self.tokens[i]) for i in ids)
        return raw.decode(errors="replace")

    def count(self, text):
        return sum(len(self.piece(p)) for p in SPLIT.findall(text))


def train(texts, n_vocab, boost):
    """Greedy merges over pre-token counts; digits are never merged. boost: extra counts."""
    counts = collections.Counter(boost)
    for t in texts:
        counts.update(SPLIT.findall(t))
    pieces = [(to_units(w), c) for w, c in counts.items() if not w.isdigit()]
    vocab, merges = list(TO_UNIT), []
    while len(vocab) < n_vocab - len(SPECIALS):
        pairs = collections.Counter()
        for u, c in pieces:
            for p in zip(u, u[1:]):
                pairs[p] += c
        (a, b), c = max(pairs.items(), key=lambda x: (x[1], x[0]), default=(("", ""), 0))
        if c < 2:
            break
        merges.append(f"{a} {b}")
        if a + b not in vocab:
            vocab.append(a + b)
        for u, _ in pieces:
            for i in range(len(u) - 1):
                if u[i:i + 2] == [a, b]:                 # false too where a merge shortened u
                    u[i:i + 2] = [a + b]
    return {"tokens": vocab + SPECIALS, "merges": merges, "n_normal": len(vocab)}


def main():
    path, n_vocab = sys.argv[1], int(sys.argv[2])
    rng = random.Random(7)
    story, chat, texts = Story(rng), Chat(rng), []
    for _ in range(1500):
        docs = [story.document(6, 400, lambda s: len(s.split()), turns=2)[0]]
        docs += [chat.document() for _ in range(6)]
        for d in docs:
            texts += SPECIAL.split("".join(t for t, _ in d))[::2]
    whole = [p + w for w in NAMES + ONES + TENS[2:] for p in ("", " ")]
    whole += ["-" + w for w in ONES[1:10]]               # names and number words are one token each
    with open(path, "w", encoding="utf-8") as f:
        json.dump(train(texts, n_vocab, dict.fromkeys(whole, 4000)), f, ensure_ascii=False)
    tok = Tokenizer(path)
    print(len(tok.tokens), "tokens,", len(tok.merges), "merges")
    assert all(tok.decode(tok.encode(t)) == t for t in texts[:1000])


if __name__ == "__main__":
    main()
