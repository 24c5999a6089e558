"""ctypes bindings and autograd functions around kernels.cpp, which is built when needed."""
import ctypes
import os
import subprocess

import torch


def build():
    """Compiles kernels.cpp for this machine, against the BLAS that PyTorch uses."""
    here = os.path.dirname(os.path.abspath(__file__))
    source, lib = here + "/kernels.cpp", os.path.normpath(here + "/../../build/nano/libnano.so")
    if not os.path.exists(lib) or os.path.getmtime(lib) < os.path.getmtime(source):
        os.makedirs(os.path.dirname(lib), exist_ok=True)
        subprocess.run([os.environ.get("CXX", "g++"), "-O3", "-march=native", "-ffast-math",
                        "-shared", "-fPIC", source, "-o", lib, "-l:libblas.so.3"], check=True)
    return lib


_so = ctypes.CDLL(build())
_so.attn_psize.restype = ctypes.c_int64
F, I = ctypes.c_float, ctypes.c_int


def P(t):
    return ctypes.c_void_p(t.data_ptr() if t is not None else None)


def N(n):
    return ctypes.c_int64(n)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        x = x.contiguous()
        d = x.shape[-1]
        n = x.numel() // d
        y, r = torch.empty_like(x), torch.empty(n)
        _so.rms_fwd(P(x), P(w), P(y), P(r), N(n), I(d), F(eps))
        ctx.save_for_backward(x, w, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        dy = dy.contiguous()
        d = x.shape[-1]
        dx = torch.empty_like(x)
        dw = torch.zeros_like(w) if w is not None else None
        _so.rms_bwd(P(x), P(w), P(r), P(dy), P(dx), P(dw), N(x.numel() // d), I(d))
        return dx, dw, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu, clamp):
        gu = gu.contiguous()
        f = gu.shape[-1] // 2
        out = gu.new_empty(*gu.shape[:-1], f)
        _so.swiglu_fwd(P(gu), P(out), N(out.numel() // f), I(f), F(clamp))
        ctx.save_for_backward(gu)
        ctx.clamp = clamp
        return out

    @staticmethod
    def backward(ctx, g):
        gu, = ctx.saved_tensors
        g = g.contiguous()
        f = g.shape[-1]
        d = torch.empty_like(gu)
        _so.swiglu_bwd(P(gu), P(g), P(d), N(g.numel() // f), I(f), F(ctx.clamp))
        return d, None


class Rope(torch.autograd.Function):
    """x [b, t, h, hd]; rotates the last 2*half dims."""
    @staticmethod
    def forward(ctx, x, cs, sn, sign):
        y = x.contiguous().clone()
        b, t, h, hd = y.shape
        _so.rope_inplace(P(y), P(cs), P(sn), N(b * t), I(t), I(h), I(hd), I(cs.shape[1]), F(sign))
        ctx.a = (cs, sn, sign)
        return y

    @staticmethod
    def backward(ctx, g):
        cs, sn, sign = ctx.a
        g = g.contiguous().clone()
        b, t, h, hd = g.shape
        _so.rope_inplace(P(g), P(cs), P(sn), N(b * t), I(t), I(h), I(hd), I(cs.shape[1]), F(-sign))
        return g, None, None, None


class HcPre(torch.autograd.Function):
    """x [n,4,d] -> (collapsed [n,d], post [n,4], comb [n,4,4] indexed [src][dst])."""
    @staticmethod
    def forward(ctx, x, fn, scale, base, iters, hc_eps, eps):
        x = x.contiguous()
        n, _, d = x.shape
        r = torch.empty(n)
        _so.hc_rinv(P(x), P(r), N(n), I(4 * d), F(eps))
        raw = x.view(n, 4 * d) @ fn.t()
        m = raw * r[:, None]
        pre, post, comb = torch.empty(n, 4), torch.empty(n, 4), torch.empty(n, 4, 4)
        _so.hc_split_fwd(P(m), P(scale), P(base), P(pre), P(post), P(comb), N(n), I(iters), F(hc_eps))
        out = torch.empty(n, d)
        _so.hc_wsum(P(x), P(pre), P(out), N(n), I(d))
        ctx.save_for_backward(x, fn, scale, base, r, raw, m, pre)
        ctx.a = (iters, hc_eps)
        return out, post, comb

    @staticmethod
    def backward(ctx, dout, dpost, dcomb):
        x, fn, scale, base, r, raw, m, pre = ctx.saved_tensors
        iters, hc_eps = ctx.a
        n, _, d = x.shape
        dout, dpost, dcomb = dout.contiguous(), dpost.contiguous(), dcomb.contiguous()
        dpre = torch.empty(n, 4)
        _so.hc_wsum_dw(P(x), P(dout), P(dpre), N(n), I(d))
        dm, ds, db = torch.empty_like(m), torch.zeros_like(scale), torch.zeros_like(base)
        _so.hc_split_bwd(P(m), P(scale), P(base), P(dpre), P(dpost), P(dcomb), P(dm), P(ds), P(db),
                         N(n), I(iters), F(hc_eps))
        draw = dm * r[:, None]
        coef = (dm * raw).sum(1) * r * r * r * (-1.0 / (4 * d))
        dx = (draw @ fn).view_as(x)
        _so.hc_wsum_dx(P(x), P(pre), P(coef), P(dout), P(dx), N(n), I(d))
        return dx, draw.t() @ x.view(n, 4 * d), ds, db, None, None, None


class HcPost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, res, post, comb):
        y = y.contiguous()
        out = torch.empty_like(res)
        n, _, d = res.shape
        _so.hc_post_fwd(P(y), P(res), P(post), P(comb), P(out), N(n), I(d))
        ctx.save_for_backward(y, res, post, comb)
        return out

    @staticmethod
    def backward(ctx, g):
        y, res, post, comb = ctx.saved_tensors
        g = g.contiguous()
        n, _, d = res.shape
        dy, dr, dp, dc = (torch.empty_like(t) for t in (y, res, post, comb))
        _so.hc_post_bwd(P(y), P(res), P(post), P(comb), P(g), P(dy), P(dr), P(dp), P(dc), N(n), I(d))
        return dy, dr, dp, dc


class Attention(torch.autograd.Function):
    """q [b,t,h,hd], k [b,t,hd], c [b,nc,hd] or None, sink [h], sel [b,t,nc] uint8 or None."""
    @staticmethod
    def forward(ctx, q, k, c, sink, sel, window, ratio, mass_out):
        q, k = q.contiguous(), k.contiguous()
        c = c.contiguous() if c is not None else None
        b, t, h, hd = q.shape
        nc = c.shape[1] if c is not None else 0
        size = _so.attn_psize(I(b), I(t), I(h), I(window), I(nc), I(ratio))
        p, ps, out = torch.empty(size), torch.empty(b, t, h), torch.empty_like(q)
        a = (I(b), I(t), I(h), I(hd), I(window), I(nc), I(ratio))
        _so.attn_fwd(P(q), P(k), P(c), P(sink), P(sel), P(out), P(p), P(ps), *a)
        if mass_out is not None:
            _so.attn_comp_mass(P(p), P(mass_out), I(b), I(t), I(h), I(window), I(nc), I(ratio))
        ctx.save_for_backward(q, k, c, p, ps, sink)
        ctx.a = a
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, c, p, ps, sink = ctx.saved_tensors
        g = g.contiguous()
        dq, dk, dsink = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(sink)
        dc = torch.zeros_like(c) if c is not None else None
        _so.attn_bwd(P(q), P(k), P(c), P(p), P(ps), P(g), P(dq), P(dk), P(dc), P(dsink), *ctx.a)
        return dq, dk, dc, dsink, None, None, None, None


class Experts(torch.autograd.Function):
    """Routed experts: x [n,d], sel [n,k], wt [n,k], w13 [e,2f,d], w2 [e,d,f]."""
    @staticmethod
    def forward(ctx, x, sel, wt, w13, w2, clamp):
        n, k = sel.shape
        e, f2, d = w13.shape
        flat = sel.reshape(-1)
        order = torch.argsort(flat, stable=True)
        cnt = torch.bincount(flat, minlength=e).tolist()
        xs = x[torch.div(order, k, rounding_mode="floor")]
        gu, h, y = torch.empty(n * k, f2), torch.empty(n * k, f2 // 2), torch.empty(n * k, d)
        o = 0
        for i, m in enumerate(cnt):
            if m:
                torch.mm(xs[o:o + m], w13[i].t(), out=gu[o:o + m])
            o += m
        _so.swiglu_fwd(P(gu), P(h), N(n * k), I(f2 // 2), F(clamp))
        o = 0
        for i, m in enumerate(cnt):
            if m:
                torch.mm(h[o:o + m], w2[i].t(), out=y[o:o + m])
            o += m
        inv = torch.empty_like(order)
        inv[order] = torch.arange(n * k)
        yu = y[inv].view(n, k, d)
        ctx.save_for_backward(xs, wt, w13, w2, gu, h, yu, order, inv)
        ctx.a = (cnt, clamp)
        return torch.einsum("nkd,nk->nd", yu, wt)

    @staticmethod
    def backward(ctx, g):
        xs, wt, w13, w2, gu, h, yu, order, inv = ctx.saved_tensors
        cnt, clamp = ctx.a
        n, k, d = yu.shape
        e, f2, _ = w13.shape
        g = g.contiguous()
        dwt = (yu * g[:, None]).sum(-1)
        dy = (g[:, None] * wt[:, :, None]).view(n * k, d)[order]
        dh, dgu, dxs = torch.empty_like(h), torch.empty_like(gu), torch.empty_like(xs)
        dw13, dw2 = torch.zeros_like(w13), torch.zeros_like(w2)
        o = 0
        for i, m in enumerate(cnt):
            if m:
                torch.mm(dy[o:o + m], w2[i], out=dh[o:o + m])
                torch.mm(dy[o:o + m].t(), h[o:o + m], out=dw2[i])
            o += m
        _so.swiglu_bwd(P(gu), P(dh), P(dgu), N(n * k), I(f2 // 2), F(clamp))
        o = 0
        for i, m in enumerate(cnt):
            if m:
                torch.mm(dgu[o:o + m], w13[i], out=dxs[o:o + m])
                torch.mm(dgu[o:o + m].t(), xs[o:o + m], out=dw13[i])
            o += m
        return dxs[inv].view(n, k, d).sum(1), None, dwt, dw13, dw2, None
