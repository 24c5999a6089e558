"""The DeepSeek V4 architecture (deepseek4) at toy scale, for training on a CPU.

Shapes: b rows, t tokens a row, n = b * t; H heads of hd; nc compressed rows."""
import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels as K


@dataclass
class Config:
    n_vocab: int = 1536
    n_embd: int = 128
    n_layer: int = 6
    n_head: int = 4
    head_dim: int = 64
    n_rot: int = 32
    lora_q: int = 64
    groups: int = 2
    lora_o: int = 64
    window: int = 128
    n_expert: int = 8
    n_used: int = 2
    n_ff: int = 128
    n_hash: int = 2
    idx_heads: int = 4
    idx_dim: int = 64
    top_k: int = 512
    hc_iters: int = 20
    hc_eps: float = 1e-6
    eps: float = 1e-6
    expert_scale: float = 1.5
    clamp: float = 10.0
    rope_base: float = 10000.0
    comp_rope_base: float = 160000.0
    rope_factor: float = 16.0
    rope_orig_ctx: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ctx_train: int = 4096
    mimic: int = 1  # start half of the heads as similar-content lookup

    def ratio(self, il):
        return 0 if il < 2 else (4 if il % 2 == 0 else 128)


def rope_table(cfg, compressed, positions):
    """cos and sin of the rotation angles, [len(positions), n_rot/2] (YaRN on compressed layers)."""
    half = cfg.n_rot // 2
    base = cfg.comp_rope_base if compressed else cfg.rope_base
    inv = base ** (-2.0 * torch.arange(half, dtype=torch.float64) / cfg.n_rot)
    if compressed and cfg.rope_factor > 1:
        def dim(rotations):                              # that turns so often over the context
            return (cfg.n_rot * math.log(cfg.rope_orig_ctx / (rotations * 2 * math.pi)) /
                    (2 * math.log(base)))
        low = max(0, math.floor(dim(cfg.beta_fast)))
        high = min(cfg.n_rot - 1, math.ceil(dim(cfg.beta_slow)))
        i = torch.arange(half, dtype=torch.float64)
        ramp = 1 - ((i - low) / max(0.001, high - low)).clamp(0, 1)
        inv = inv / cfg.rope_factor * (1 - ramp) + inv * ramp
    th = positions.double()[:, None] * inv[None]
    return th.cos().float().contiguous(), th.sin().float().contiguous()


def mat(o, i, gain=1.0):
    return nn.Parameter(torch.randn(o, i) * (gain / math.sqrt(i)))


class Compressor(nn.Module):
    def __init__(self, cfg, ratio, dim, wkv=None):
        super().__init__()
        self.ratio, self.dim, self.eps = ratio, dim, cfg.eps
        co = 2 if ratio == 4 else 1
        if wkv is None:
            w = torch.randn(dim, cfg.n_embd) / math.sqrt(cfg.n_embd)
        else:
            w = wkv.detach().clone()
        self.kv = nn.Parameter(w.repeat(co, 1))
        self.gate = nn.Parameter(torch.randn(co * dim, cfg.n_embd) * 0.02)
        self.ape = nn.Parameter(torch.zeros(ratio, co * dim))
        self.norm = nn.Parameter(torch.ones(dim))

    def forward(self, x, tab):
        b, t, _ = x.shape
        r, d = self.ratio, self.dim
        nc = t // r
        if nc == 0:
            return None
        x = x[:, :nc * r]
        kv = F.linear(x, self.kv).view(b, nc, r, -1)
        s = F.linear(x, self.gate).view(b, nc, r, -1) + self.ape
        if r == 4:
            kv = torch.cat([F.pad(kv[:, :-1, :, :d], (0, 0, 0, 0, 1, 0)), kv[..., d:]], 2)
            s = torch.cat([F.pad(s[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=-1e30), s[..., d:]], 2)
        pooled = (kv * s.softmax(2)).sum(2)
        c = K.RmsNorm.apply(pooled, self.norm, self.eps)
        cs, sn = (v[:nc * r:r].contiguous() for v in tab)
        return K.Rope.apply(c[:, :, None], cs, sn, 1.0)[:, :, 0]


class Attn(nn.Module):
    def __init__(self, cfg, il):
        super().__init__()
        self.cfg, self.ratio = cfg, cfg.ratio(il)
        H, hd, D = cfg.n_head, cfg.head_dim, cfg.n_embd
        self.q_a = mat(cfg.lora_q, D)
        self.q_a_norm = nn.Parameter(torch.ones(cfg.lora_q))
        self.q_b = mat(H * hd, cfg.lora_q)
        self.kv = mat(hd, D)
        self.kv_norm = nn.Parameter(torch.ones(hd))
        self.sinks = nn.Parameter(torch.zeros(H))
        self.o_a = mat(cfg.groups * cfg.lora_o, H * hd // cfg.groups)
        self.o_b = mat(D, cfg.groups * cfg.lora_o, 0.5)
        with torch.no_grad():
            # Half of the heads start as "attend to similar content, copy it": q ~ k and
            # output ~ input.  Name lookup emerges from this far sooner than from noise.
            a, s = self.kv, 2 ** 0.5
            qb = self.q_b.view(H, hd, cfg.lora_q)
            for h in range(0, H, 2) if cfg.mimic else ():
                qb[h] = 0.8 * s * (a @ self.q_a.t()) + 0.6 * qb[h]
            oa = self.o_a.view(cfg.groups, cfg.lora_o, H // cfg.groups, hd)
            for g in range(cfg.groups) if cfg.mimic else ():
                for h in range(0, H // cfg.groups, 2):
                    oa[g, :, h] = 0.8 * torch.eye(cfg.lora_o, hd) + 0.2 * oa[g, :, h]
                    ob = self.o_b[:, g * cfg.lora_o:(g + 1) * cfg.lora_o]
                    ob[...] = 0.5 * a[:cfg.lora_o].t() + 0.3 * ob
        if self.ratio:
            self.comp = Compressor(cfg, self.ratio, hd, self.kv)
        if self.ratio == 4:
            self.idx_comp = Compressor(cfg, 4, cfg.idx_dim)
            self.idx_q_b = mat(cfg.idx_heads * cfg.idx_dim, cfg.lora_q)
            self.idx_proj = mat(cfg.idx_heads, D)

    def index_scores(self, x, qr, tab):
        cfg = self.cfg
        b, t, _ = x.shape
        k = self.idx_comp(x, tab)
        q = F.linear(qr, self.idx_q_b).view(b, t, cfg.idx_heads, cfg.idx_dim)
        q = K.Rope.apply(q, tab[0], tab[1], 1.0)
        w = F.linear(x, self.idx_proj) / math.sqrt(cfg.idx_heads * cfg.idx_dim)
        s = torch.relu(torch.bmm(q.reshape(b, -1, cfg.idx_dim), k.transpose(1, 2)))
        return (s.view(b, t, cfg.idx_heads, -1) * w[..., None]).sum(2)

    def forward(self, x, tab, mode, aux):
        """mode: dense | index (dense attention plus indexer loss) | sparse (top-k selection)."""
        cfg = self.cfg
        b, t, _ = x.shape
        H, hd = cfg.n_head, cfg.head_dim
        qr = K.RmsNorm.apply(F.linear(x, self.q_a), self.q_a_norm, cfg.eps)
        q = F.linear(qr, self.q_b).view(b, t, H, hd)
        q = K.Rope.apply(K.RmsNorm.apply(q, None, cfg.eps), tab[0], tab[1], 1.0)
        k = K.RmsNorm.apply(F.linear(x, self.kv), self.kv_norm, cfg.eps)
        k = K.Rope.apply(k[:, :, None], tab[0], tab[1], 1.0)[:, :, 0]
        c = self.comp(x, tab) if self.ratio else None
        sel = mass = None
        if self.ratio == 4 and mode != "dense" and c is not None:
            nc = c.shape[1]
            s = self.index_scores(x.detach(), qr.detach(), tab)
            visible = (torch.arange(nc)[None] + 1) * 4 <= torch.arange(t)[:, None] + 1
            s = s.masked_fill(~visible, -1e30)
            if mode == "sparse" and nc > cfg.top_k:
                top = s.detach().topk(cfg.top_k, -1).indices
                sel = torch.zeros(b, t, nc, dtype=torch.uint8).scatter_(2, top, 1)
            mass = torch.empty(b, t, nc)
        ratio = self.ratio if c is not None else 0
        o = K.Attention.apply(q, k, c, self.sinks, sel, cfg.window, ratio, mass)
        if mass is not None and torch.is_grad_enabled():
            tot = mass.sum(-1, keepdim=True)
            lp = s.log_softmax(-1).masked_fill(~visible, 0)
            if sel is not None:
                lp = s.masked_fill(sel == 0, -1e30).log_softmax(-1).masked_fill(sel == 0, 0)
            tgt = mass / (tot + 1e-9)
            kl = (tgt * ((tgt + 1e-9).log() - lp)).sum(-1)
            wgt = tot[..., 0] / H
            aux.append((kl * wgt).sum() / (wgt.sum() + 1e-6))
        o = K.Rope.apply(o, tab[0], tab[1], -1.0)
        g = cfg.groups
        o = torch.einsum("ngi,goi->ngo", o.reshape(b * t, g, H * hd // g),
                         self.o_a.view(g, cfg.lora_o, -1))
        return F.linear(o.reshape(b, t, -1), self.o_b)


class Moe(nn.Module):
    def __init__(self, cfg, il):
        super().__init__()
        self.cfg, self.hashed = cfg, il < cfg.n_hash
        D, ff, E = cfg.n_embd, cfg.n_ff, cfg.n_expert
        self.gate_inp = mat(E, D, 0.5)
        self.w13 = nn.Parameter(torch.randn(E, 2 * ff, D) / math.sqrt(D))
        self.w2 = nn.Parameter(torch.randn(E, D, ff) * (0.5 / math.sqrt(ff)))
        self.sh13 = mat(2 * ff, D)
        self.sh2 = mat(D, ff, 0.5)
        if self.hashed:
            g = torch.Generator().manual_seed(1000 + il)
            t = torch.stack([torch.randperm(E, generator=g)[:cfg.n_used]
                             for _ in range(cfg.n_vocab)])
            self.register_buffer("tid2eid", t)
        else:
            self.register_buffer("bias", torch.zeros(E))
            self.register_buffer("load", torch.zeros(E))

    def forward(self, x, tok):
        cfg = self.cfg
        p = torch.sqrt(F.softplus(F.linear(x, self.gate_inp)) + 1e-12)
        if self.hashed:
            sel = self.tid2eid[tok]
        else:
            sel = (p.detach() + self.bias).topk(cfg.n_used, -1).indices
            if self.training:
                self.load += torch.bincount(sel.reshape(-1), minlength=cfg.n_expert)
        w = p.gather(1, sel)
        w = w / w.sum(-1, keepdim=True) * cfg.expert_scale
        y = K.Experts.apply(x, sel, w, self.w13, self.w2, cfg.clamp)
        return y + F.linear(K.SwiGLU.apply(F.linear(x, self.sh13), cfg.clamp), self.sh2)

    def balance(self, rate):
        if not self.hashed:
            self.bias += rate * torch.sign(self.load.mean() - self.load)
            self.bias -= self.bias.mean()
            self.load.zero_()


class Hc(nn.Module):
    """Control of one sublayer: fn -> 4 pre weights, 4 post weights, 4x4 mixing matrix."""
    def __init__(self, cfg, k):
        super().__init__()
        self.fn = nn.Parameter(torch.randn(24, 4 * cfg.n_embd) / math.sqrt(4 * cfg.n_embd))
        self.scale = nn.Parameter(torch.full((3,), 0.1))
        base = torch.zeros(24)
        base[:4] = -2.0
        base[k % 4] = 0.85
        base[4:8] = torch.randn(4) * 0.5
        base[8:] = torch.eye(4).reshape(-1) * 4.0
        self.base = nn.Parameter(base)


class Layer(nn.Module):
    def __init__(self, cfg, il):
        super().__init__()
        self.cfg = cfg
        self.hc_attn, self.hc_ffn = Hc(cfg, 2 * il), Hc(cfg, 2 * il + 1)
        self.attn_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.ffn_norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.attn, self.ffn = Attn(cfg, il), Moe(cfg, il)
        self.keep_input, self.kept = False, None  # for the binding probe of train.py

    def forward(self, s, tok, b, t, tab, mode, aux):
        c = self.cfg
        h = self.hc_attn
        x, post, comb = K.HcPre.apply(s, h.fn, h.scale, h.base, c.hc_iters, c.hc_eps, c.eps)
        x = K.RmsNorm.apply(x, self.attn_norm, c.eps)
        if self.keep_input:
            self.kept = x
        y = self.attn(x.view(b, t, -1), tab, mode, aux).view(b * t, -1)
        s = K.HcPost.apply(y, s, post, comb)
        h = self.hc_ffn
        x, post, comb = K.HcPre.apply(s, h.fn, h.scale, h.base, c.hc_iters, c.hc_eps, c.eps)
        x = K.RmsNorm.apply(x, self.ffn_norm, c.eps)
        return K.HcPost.apply(self.ffn(x, tok), s, post, comb)


class Model(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.tok = nn.Parameter(torch.randn(cfg.n_vocab, cfg.n_embd) * 0.5)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.n_layer))
        self.hc_fn = nn.Parameter(torch.randn(4, 4 * cfg.n_embd) / math.sqrt(4 * cfg.n_embd))
        self.hc_scale = nn.Parameter(torch.full((1,), 0.1))
        self.hc_base = nn.Parameter(torch.full((4,), -1.1))
        self.norm = nn.Parameter(torch.ones(cfg.n_embd))
        self.out = mat(cfg.n_vocab, cfg.n_embd, 0.5)
        self.tabs = {}

    def table(self, t, comp):
        if (t, comp) not in self.tabs:
            self.tabs[t, comp] = rope_table(self.cfg, comp, torch.arange(t))
        return self.tabs[t, comp]

    def hidden(self, ids, mode="dense", aux=None):
        b, t = ids.shape
        tok = ids.reshape(-1)
        s = F.embedding(tok, self.tok)[:, None].repeat(1, 4, 1)
        for il, layer in enumerate(self.layers):
            s = layer(s, tok, b, t, self.table(t, self.cfg.ratio(il) != 0), mode, aux)
        flat = K.RmsNorm.apply(s.view(b * t, -1), None, self.cfg.eps)
        w = torch.sigmoid(F.linear(flat, self.hc_fn) * self.hc_scale + self.hc_base)
        w = w + self.cfg.hc_eps
        x = (s * w[:, :, None]).sum(1)
        return K.RmsNorm.apply(x, self.norm, self.cfg.eps)

    def forward(self, ids, mode="dense", aux=None):
        return F.linear(self.hidden(ids, mode, aux), self.out).view(*ids.shape, -1)


def save(path, model):
    torch.save({"cfg": asdict(model.cfg), "state": model.state_dict()}, path)


def load(path):
    d = torch.load(path, map_location="cpu")
    m = Model(Config(**d["cfg"]))
    m.load_state_dict(d["state"])
    return m
