"""Trains the nano model from nothing and exports it: see README.md.

    train.sh                       all stages, then nano.gguf, the recall table and the goldens
    train.sh --smoke               two minutes of the first stage: the loss must fall
    train.sh --from sparse         go on from the checkpoint of the stage before "sparse"
"""
import argparse
import ctypes
import dataclasses
import json
import os
import random
import signal
import time
import traceback

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

import export_gguf
import goldens
import model as M
from data import EOS, NAMES, ONES, PEOPLE, TENS, Chat, Story
from tokenizer import Tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))

# Curriculum of story lengths: (tokens, fewest facts, most facts). A run moves up a level when
# recall on the present one, averaged over some steps, passes ADVANCE.
LEVELS = [(112, 2, 4), (160, 3, 8), (288, 4, 10), (576, 6, 14), (1152, 8, 16), (2048, 8, 16)]
ADVANCE = 0.85


@dataclasses.dataclass
class Stage:
    name: str
    mtok: float                        # length in millions of tokens
    level: int                         # where the curriculum starts
    p_story: float                     # share of rows that begin with a story; the rest is chat
    mode: str = "dense"                # attention: see model.Attn.forward
    top_k: int = 512                   # rows the sparse attention chooses
    people: bool = False               # stories tell of PEOPLE only, not of all NAMES
    tokens: int = 3072                 # per step and worker
    windows: tuple = (128, 32)         # one drawn per step; with a short sliding window the
                                       # compressed rows must carry recall in short stories too
    muon: float = 0.04                 # learning rates
    adam: float = 3e-3
    decay: float = 0.05                # last share of the stage, over which the rates fall
    warmup: int = 50                   # steps
    probe: float = 0.5                 # weight of the Binding loss
    echo: float = 0.5                  # see Story.document
    ledger: float = 0.3


STAGES = [
    Stage("short", 1.3, level=0, p_story=1.0, people=True),
    Stage("long", 0.9, level=3, p_story=1.0, people=True),
    Stage("names", 1.6, level=5, p_story=0.65, mode="index", tokens=4096),
    Stage("sparse", 2.3, level=5, p_story=0.5, mode="sparse", top_k=64, tokens=4096, decay=0.9),
    Stage("polish", 13.2, level=5, p_story=0.4, mode="sparse", top_k=64, muon=0.02, adam=1.5e-3,
          windows=(128, 128, 128, 32), decay=0.7, warmup=20, probe=0.0, echo=0.3),
]


def encode(tok, segments):
    ids, weights = [], []
    for text, weight in segments:
        x = tok.encode(text)
        ids += x
        weights += [weight] * len(x)
    return ids, weights


class Batches:
    """Rows of a story followed by chat, cut to one length."""

    def __init__(self, tok, seed, stage):
        self.tok, self.stage = tok, stage
        self.rng = random.Random(seed)
        self.story = Story(self.rng, PEOPLE if stage.people else None)
        self.chat = Chat(self.rng)

    def story_document(self, level, **options):
        """Token ids and weights of a story that fits the level."""
        t, low, high = LEVELS[level]
        budget = self.rng.randint(LEVELS[level - 1][0] if level else 90, t) - 4
        n = self.rng.randint(low, high)
        while True:
            ids, w = encode(self.tok, self.story.document(n, budget, self.tok.count, **options)[0])
            if len(ids) <= t:
                return ids, w
            n = max(1, n - 1)

    def row(self, t, level):
        r, s = self.rng, self.stage
        ids, w = [], []
        if r.random() < s.p_story:
            ids, w = self.story_document(level, turns=r.choice([1, 1, 2]), ask_all=0.85,
                                         noise=r.random(), echo=s.echo,
                                         ledger=s.ledger if level < 3 else 0.0)
        n_story = len(ids)
        while len(ids) < t + 1:
            a, b = encode(self.tok, self.chat.document())
            ids += a
            w += b
        return ids[:t + 1], w[:t + 1], n_story

    def batch(self, level):
        """inputs, targets, target weights [rows][t]; tokens of story per row [rows]"""
        t = LEVELS[level][0]
        rows = [self.row(t, level) for _ in range(max(1, self.stage.tokens // t))]
        ids, w, story = (torch.tensor(v) for v in zip(*rows))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), w[:, 1:].contiguous(), story


class Binding:
    """Training aid. A linear probe on the input of the first compressed attention must tell whose
    number it is, both at the number words of an assertion and at the "=" of an answer line. One
    probe for both places puts the name into the same directions, where attention can match it."""

    def __init__(self, tok, n_embd):
        self.name = {}
        for i, n in enumerate(NAMES):
            self.name[tok.id[n]] = self.name[tok.id["Ġ" + n]] = i
        number = ["Ġ" + x for x in ONES + TENS[2:]] + ["-" + x for x in ONES[1:10]]
        self.number = {tok.id[x] for x in number if x in tok.id}
        self.lead = {tok.id[x] for x in ("Ġnumber", "Ġassigned", "number", ":") if x in tok.id}
        self.equals = tok.id["="]
        self.head = torch.nn.Linear(n_embd, len(NAMES), bias=False)

    def labels(self, ids, story):
        """[rows][t]: index of the person a number belongs to, -1 elsewhere"""
        out = torch.full(ids.shape, -1)
        for r, row in enumerate(ids.tolist()):
            person, in_number = -1, False
            for i, t in enumerate(row[:int(story[r])]):
                if t in self.name:
                    person, in_number = self.name[t], False
                elif t in self.number:
                    if person >= 0 and (in_number or row[i - 1] in self.lead):
                        out[r, i], in_number = person, True
                else:
                    in_number = False
                    if t == self.equals and row[i - 1] in self.name:
                        out[r, i] = self.name[row[i - 1]]
        return out

    def loss(self, x, labels):
        """The loss and the probe's accuracy."""
        y = labels.view(-1)
        known = y >= 0
        if not known.any():
            return x.new_zeros(()), 0.0
        z = self.head(x.view(len(y), -1)[known])
        return F.cross_entropy(z, y[known]), (z.argmax(-1) == y[known]).float().mean().item()


def newton_schulz(g, steps=5):
    """About the orthogonal factor of g."""
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-2, -1)
    for _ in range(steps):
        s = x @ x.transpose(-2, -1)
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.transpose(-2, -1) if tall else x


class Muon:
    """Orthogonalised momentum, for the hidden matrices."""

    def __init__(self, params, rate, momentum=0.95):
        self.params, self.rate, self.momentum = params, rate, momentum
        self.mean = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, scale):
        for p, m in zip(self.params, self.mean):
            if p.grad is not None:
                m.lerp_(p.grad, 1 - self.momentum)
                u = newton_schulz(p.grad.lerp(m, self.momentum))
                shape = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.add_(u, alpha=-self.rate * scale * shape)


def split_parameters(model):
    """(for Muon, for Adam, embeddings)"""
    hidden = {"q_a", "q_b", "kv", "o_a", "o_b", "sh13", "sh2", "idx_q_b", "w13", "w2"}
    muon, adam, embedding = [], [], []
    for n, p in model.named_parameters():
        leaf = n.split(".")[-1]
        if leaf in hidden or (leaf == "gate" and "comp" in n):
            muon.append(p)
        else:
            (embedding if n in ("tok", "out") else adam).append(p)
    return muon, adam, embedding


class Sync:
    """Joins the worker processes after each step: gradients are averaged, expert loads and
    counters summed, so that every worker does the same update."""

    def __init__(self, params, loads, n_counters, n_workers):
        self.params, self.n = params, n_workers
        self.sums = loads + [torch.zeros(n_counters)]
        self.counters = self.sums[-1]
        size = sum(t.numel() for t in params + self.sums)
        self.shared = torch.zeros(n_workers, size).share_memory_()
        self.barrier = mp.get_context("fork").Barrier(n_workers, timeout=900)

    @torch.no_grad()
    def run(self, rank):
        if self.n == 1:
            return
        zero = lambda p: p.grad if p.grad is not None else torch.zeros_like(p)
        torch.cat([zero(p).view(-1) for p in self.params] + [t.view(-1) for t in self.sums],
                  out=self.shared[rank])
        self.barrier.wait()
        total = self.shared.sum(0)
        self.barrier.wait()                              # all have read before anyone writes again
        at = 0
        for t in self.params + self.sums:
            part = total[at:at + t.numel()].view_as(t)
            at += t.numel()
            if any(t is s for s in self.sums):
                t.copy_(part)
            elif t.grad is not None:
                t.grad.copy_(part / self.n)
            elif part.any():                             # only another worker used this parameter
                t.grad = part / self.n


class TiedNames:
    """"Bob" at a line start and " Bob" are different tokens. Their input embeddings are kept
    equal, so that matching a name needs no learning per name."""

    def __init__(self, tok, embedding):
        self.e = embedding
        pairs = [(tok.id[n], tok.id["Ġ" + n]) for n in NAMES]
        self.a, self.b = (torch.tensor(v) for v in zip(*pairs))

    @torch.no_grad()
    def apply(self):
        a, b = self.e[self.a], self.e[self.b]
        m = (a + b) / 2
        length = (a.norm(dim=1, keepdim=True) + b.norm(dim=1, keepdim=True)) / 2
        self.e[self.a] = self.e[self.b] = m * (length / m.norm(dim=1, keepdim=True))


@torch.no_grad()
def recall(model, tok, docs, mode, max_tokens=4096):
    """docs: (ids, weights) of stories with one question. Share of right numbers and of wholly
    right answers, teacher forced: the greedy answer, whenever that is right."""
    eq = tok.id["="]
    right = total = exact = 0
    was_training = model.training
    model.eval()
    t = max(len(ids) for ids, _ in docs)
    per = max(1, max_tokens // t)
    for i in range(0, len(docs), per):
        chunk = docs[i:i + per]
        x = torch.full((len(chunk), t), tok.id[EOS])
        for row, (ids, _) in zip(x, chunk):
            row[:len(ids)] = torch.tensor(ids)
        guess = model(x, mode).argmax(-1)
        for row, got, (ids, w) in zip(x, guess, chunk):
            start = next(k for k in range(len(ids)) if w[k] == 1.0)
            ok = (got[start - 1:len(ids) - 1] == row[start:len(ids)]).tolist()
            exact += all(ok)
            for k in (k for k, id in enumerate(ids[start:]) if id == eq):
                total += 1
                right += ok[k + 1] and ok[k + 2]         # numbers have two digits
    model.train(was_training)
    return right / max(1, total), exact / len(docs)


def recall_table(model, tok, mode, n_docs=12):
    """The published table: recall over story length and number of facts, unseen stories."""
    print("length facts per-fact whole-answer")
    for length in (256, 512, 1024, 2000, 4000):
        for n_facts in (4, 8, 16):
            story = Story(random.Random(777 + length * 31 + n_facts))
            docs = [encode(tok, story.document(n_facts, length, tok.count, ask_all=1.0)[0])
                    for _ in range(n_docs)]
            fact, whole = recall(model, tok, docs, mode)
            print(f"{length:6d} {n_facts:5d} {fact:8.3f} {whole:12.3f}", flush=True)


class Run:
    """One stage on one worker."""

    def __init__(self, stage, model, tok, seed, workers, log):
        self.stage, self.model, self.tok, self.log = stage, model, tok, log
        self.workers, self.seed, self.rank = workers, seed, 0
        self.hidden, adam, embedding = split_parameters(model)
        self.muon = Muon(self.hidden, stage.muon)
        self.binding = None
        if stage.probe:
            self.binding = Binding(tok, model.cfg.n_embd)
            adam.append(self.binding.head.weight)
        model.layers[2].keep_input = bool(stage.probe)
        self.small = adam + embedding
        self.adam = torch.optim.Adam([{"params": adam, "k": 1.0}, {"params": embedding, "k": 1.5}],
                                     betas=(0.9, 0.95), eps=1e-9, foreach=True)
        self.names = TiedNames(tok, model.tok)
        loads = [layer.ffn.load for layer in model.layers if not layer.ffn.hashed]
        self.sync = Sync(self.hidden + self.small, loads, 3, workers)

    def forward(self, x, y, w, story):
        """The loss to minimise; fills self.stat."""
        aux, s = [], self.stat
        logits = self.model(x, self.stage.mode, aux)
        ce = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1), reduction="none")
        ce = ce.view_as(w)
        loss = total = (ce * w).sum() / w.sum()
        if aux:
            total = total + sum(aux)
            s["indexer"] += sum(aux).item()
        if self.binding:
            labels = self.binding.labels(x, story)
            probe, hits = self.binding.loss(self.model.layers[2].kept, labels)
            total = total + self.stage.probe * probe
            s["probe"] += hits
        with torch.no_grad():                            # numbers of the stories' answers
            inside = torch.arange(x.shape[1])[None] < story[:, None] - 1
            first = (x == self.tok.id["="]) & inside & (w == 1)
            ok = logits.argmax(-1) == y
            right = (ok[:, :-1] & ok[:, 1:] & first[:, :-1]).sum().item()
            asked = first[:, :-1].sum().item()
            chat = ~inside & (w == 1)
            s["loss"] += loss.item()
            s["chat"] += ce[chat].mean().item() if chat.any() else 0.0
            s["recall"] += right / max(1, asked)
            s["n"] += 1
        return total, right, asked

    def update(self, scale, step):
        clip = [p for p in self.small if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(clip, 1.0)
        for g in self.adam.param_groups:
            g["lr"] = self.stage.adam * scale * g["k"]
        self.adam.step()
        self.names.apply()
        self.muon.step(scale)
        for layer in self.model.layers:
            layer.ffn.balance(0.002 * scale)
        return float(norm)

    def report(self, **record):
        line = json.dumps(record)
        print(line, flush=True)
        with open(self.log, "a") as f:
            f.write(line + "\n")

    def run(self, seconds=None):
        for i in range(1, self.workers):
            if os.fork() == 0:
                self.rank = i
                ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the parent
                break
        try:
            self.loop(seconds)
        except BaseException:
            self.sync.barrier.abort()                    # the others must not wait for this one
            if not self.rank:
                raise
            traceback.print_exc()
        if self.rank:
            os._exit(0)
        for _ in range(1, self.workers):
            os.wait()

    def loop(self, seconds):
        st, model, cfg = self.stage, self.model, self.model.cfg
        shared = random.Random(self.seed)                # the same draws on every worker
        data = Batches(self.tok, self.seed + 7919 * self.rank, st)
        held_out = Batches(self.tok, 12345, st)
        level, accuracy, step, n_tok, full_window = st.level, 0.0, 0, 0, cfg.window
        self.stat = dict.fromkeys(("n", "loss", "chat", "recall", "indexer", "probe"), 0.0)
        start = time.time()
        self.names.apply()
        model.train()
        done = False
        while not done:
            left = 1 - n_tok / (st.mtok * 1e6)
            scale = min(1.0, (step + 1) / st.warmup, max(0.02, left / st.decay))
            lv = level if shared.random() < 0.75 else shared.randint(0, level)
            x, y, w, story = data.batch(lv)
            cfg.window = shared.choice(st.windows)
            model.zero_grad(set_to_none=True)
            if self.binding:
                self.binding.head.weight.grad = None
            loss, right, asked = self.forward(x, y, w, story)
            loss.backward()
            cfg.window = full_window
            late = self.rank == 0 and seconds is not None and time.time() - start > seconds
            self.sync.counters.copy_(torch.tensor([right, asked, late]))
            self.sync.run(self.rank)
            norm = self.update(scale, step)
            step += 1
            n_tok += x.numel() * self.workers
            right, asked, stop = self.sync.counters.tolist()
            done = stop or n_tok >= st.mtok * 1e6
            if asked and lv == level:
                accuracy = 0.95 * accuracy + 0.05 * right / asked
            if accuracy > ADVANCE and level < len(LEVELS) - 1:
                level, accuracy = level + 1, 0.0
            if self.rank == 0 and (step % (10 if seconds else 25) == 0 or done):
                n, elapsed = self.stat.pop("n"), time.time() - start
                self.report(stage=st.name, step=step, mtok=round(n_tok / 1e6, 3), level=level,
                            sec=round(elapsed), tok_per_s=round(n_tok / elapsed),
                            norm=round(norm, 3),
                            **{k: round(v / n, 4) for k, v in self.stat.items()})
                self.stat = dict.fromkeys(("n", *self.stat), 0.0)
            if self.rank == 0 and step % 500 == 0:
                docs = lambda v: [held_out.story_document(v, ask_all=1.0) for _ in range(16)]
                self.report(stage=st.name, step=step,
                            recall={LEVELS[v][0]: recall(model, self.tok, docs(v), st.mode)
                                    for v in range(level + 1)})


def main():
    ap = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", default=os.path.join(HERE, "../../build/nano"))
    ap.add_argument("--workers", type=int, default=2, help="processes that share each step")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--from", dest="first", choices=[s.name for s in STAGES], default="short")
    ap.add_argument("--smoke", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    os.makedirs(a.out, exist_ok=True)
    path = lambda name: os.path.join(a.out, name)
    tok = Tokenizer(os.path.join(HERE, "tokenizer.json"))
    names = [s.name for s in STAGES]
    at = names.index(a.first)
    if at:
        model = M.load(path(names[at - 1] + ".pt"))
    else:
        model = M.Model(M.Config(n_vocab=len(tok.tokens)))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters", model.cfg)
    for i, stage in enumerate(STAGES[at:at + 1] if a.smoke else STAGES[at:], at):
        model.cfg.top_k = stage.top_k
        run = Run(stage, model, tok, a.seed + 1000 * i, a.workers, path("log.jsonl"))
        run.run(120 if a.smoke else None)
        if not a.smoke:
            M.save(path(stage.name + ".pt"), model)
    if a.smoke:
        return
    model.layers[2].keep_input = False
    recall_table(model, tok, STAGES[-1].mode)
    export_gguf.export(model, tok, path("nano.gguf"), "Q8_0")
    goldens.write(model, tok, a.out, "Q8_0")


if __name__ == "__main__":
    main()
