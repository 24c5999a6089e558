"""Checks every fused kernel against plain PyTorch, values and gradients."""
import math
import sys

import torch
import torch.nn.functional as F

import kernels as K

torch.manual_seed(0)
torch.set_num_threads(1)


failed = []


def compare(name, fast, slow, args):
    leaf = lambda a: torch.is_tensor(a) and a.is_floating_point()
    xs, ys = ([a.clone().requires_grad_() if leaf(a) else a for a in args] for _ in range(2))
    a, b = fast(*xs), slow(*ys)
    a, b = (a if isinstance(a, tuple) else (a,)), (b if isinstance(b, tuple) else (b,))
    w = [torch.randn_like(t) for t in a]
    sum((t * v).sum() for t, v in zip(a, w)).backward()
    sum((t * v).sum() for t, v in zip(b, w)).backward()
    err = max((t - v).abs().max().item() for t, v in zip(a, b))
    ge = max(((x.grad - y.grad).abs().max() / (y.grad.abs().max() + 1e-9)).item()
             for x, y in zip(xs, ys) if leaf(x))
    good = err < 1e-4 and ge < 1e-4
    if not good:
        failed.append(name)
    print(f"{name:10s} value {err:.2e} grad {ge:.2e}", "ok" if good else "BAD")


def rms(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 if w is None else w)


compare("rms", lambda x, w: K.RmsNorm.apply(x, w, 1e-6), rms,
        [torch.randn(50, 96), torch.randn(96)])
compare("rms0", lambda x: K.RmsNorm.apply(x, None, 1e-6), lambda x: rms(x, None),
        [torch.randn(50, 96)])


def swiglu(gu):
    g, u = gu.chunk(2, -1)
    return F.silu(g.clamp(max=2.0)) * u.clamp(-2.0, 2.0)


compare("swiglu", lambda x: K.SwiGLU.apply(x, 2.0), swiglu, [torch.randn(40, 64) * 2])


def rope(x, cs, sn, sign):
    n = 2 * cs.shape[1]
    a, b = x[..., -n::2], x[..., -n + 1::2]
    c, s = cs[None, :, None], sn[None, :, None] * sign
    return torch.cat([x[..., :-n], torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)], -1)


th = torch.randn(10, 8)
compare("rope", lambda x: K.Rope.apply(x, th.cos(), th.sin(), -1.0),
        lambda x: rope(x, th.cos(), th.sin(), -1.0), [torch.randn(2, 10, 3, 24)])


def hc_pre(x, fn, scale, base, iters=20, eps=1e-3):
    n, _, d = x.shape
    m = rms(x.view(n, -1), None) @ fn.t()
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + eps
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    c = (m[:, 8:] * scale[2] + base[8:]).view(n, 4, 4).softmax(-1) + eps
    c = c / (c.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(2, keepdim=True) + eps)
        c = c / (c.sum(1, keepdim=True) + eps)
    return (x * pre[:, :, None]).sum(1), post, c


compare("hc_pre", lambda *a: K.HcPre.apply(*a, 20, 1e-3, 1e-6), hc_pre,
        [torch.randn(37, 4, 32), torch.randn(24, 128) * .3, torch.randn(3), torch.randn(24)])
compare("hc_post", K.HcPost.apply,
        lambda y, r, p, c: y[:, None] * p[:, :, None] + torch.einsum("nst,nsd->ntd", c, r),
        [torch.randn(37, 32), torch.randn(37, 4, 32), torch.randn(37, 4), torch.randn(37, 4, 4)])


def attention(q, k, c, sink, sel, w, ratio):
    b, t, h, hd = q.shape
    i, j = torch.arange(t)[:, None], torch.arange(t)[None]
    s = torch.einsum("bthd,bjd->bthj", q, k) / math.sqrt(hd)
    s = s.masked_fill(~((j <= i) & (j > i - w))[None, :, None], -1e30)
    sc = torch.einsum("bthd,bjd->bthj", q, c) / math.sqrt(hd)
    vis = ((torch.arange(c.shape[1])[None] + 1) * ratio <= i + 1)[None, :, None]
    if sel is not None:
        vis = vis & sel[:, :, None].bool()
    sc = sc.masked_fill(~vis, -1e30)
    p = torch.cat([s, sc, sink.view(1, 1, h, 1).expand(b, t, h, 1)], -1).softmax(-1)
    return torch.einsum("bthj,bjd->bthd", p[..., :-1], torch.cat([k, c], 1))


A = [torch.randn(2, 70, 3, 16), torch.randn(2, 70, 16), torch.randn(2, 17, 16), torch.randn(3)]
compare("attn", lambda q, k, c, s: K.Attention.apply(q, k, c, s, None, 16, 4, None),
        lambda q, k, c, s: attention(q, k, c, s, None, 16, 4), A)
sel = (torch.rand(2, 70, 17) < 0.5).to(torch.uint8)
compare("attn sel", lambda q, k, c, s: K.Attention.apply(q, k, c, s, sel, 16, 4, None),
        lambda q, k, c, s: attention(q, k, c, s, sel, 16, 4), A)
compare("attn raw", lambda q, k, s: K.Attention.apply(q, k, None, s, None, 16, 0, None),
        lambda q, k, s: attention(q, k, k[:, :0], s, None, 16, 4), [A[0], A[1], A[3]])


def experts(x, wt, w13, w2):
    out = 0
    for j in range(2):
        gu = torch.einsum("nd,nfd->nf", x, w13[SEL[:, j]])
        out = out + wt[:, j:j + 1] * torch.einsum("nf,ndf->nd", swiglu(gu), w2[SEL[:, j]])
    return out


SEL = torch.stack([torch.randperm(5)[:2] for _ in range(60)])
compare("experts", lambda x, wt, a, b: K.Experts.apply(x, SEL, wt, a, b, 2.0), experts,
        [torch.randn(60, 24), torch.rand(60, 2), torch.randn(5, 32, 24) * .3, torch.randn(5, 24, 16) * .3])
sys.exit("failed: " + ", ".join(failed) if failed else 0)
