// Fused CPU kernels for the nano trainer, called from Python through ctypes.
// Every forward has a matching hand-written backward; test_kernels.py compares both with plain
// PyTorch versions of the operations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha,
                            const float* a, int lda, const float* b, int ldb, float beta, float* c,
                            int ldc);

namespace {
constexpr int kRow = 101, kN = 111, kT = 112;

void gemm(bool ta, bool tb, int m, int n, int k, float alpha, const float* a, int lda,
          const float* b, int ldb, float beta, float* c, int ldc) {
  cblas_sgemm(kRow, ta ? kT : kN, tb ? kT : kN, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

inline float dot(const float* a, const float* b, int n) {
  float s = 0;
  for (int i = 0; i < n; i++) s += a[i] * b[i];
  return s;
}
}  // namespace

extern "C" {

// ---- RMS norm over rows of length d; w may be null --------------------------------
void rms_fwd(const float* x, const float* w, float* y, float* rinv, int64_t n, int d, float eps) {
  for (int64_t i = 0; i < n; i++) {
    const float* xi = x + i * d;
    float* yi = y + i * d;
    float r = 1.0f / std::sqrt(dot(xi, xi, d) / d + eps);
    rinv[i] = r;
    if (w)
      for (int j = 0; j < d; j++) yi[j] = xi[j] * r * w[j];
    else
      for (int j = 0; j < d; j++) yi[j] = xi[j] * r;
  }
}

void rms_bwd(const float* x, const float* w, const float* rinv, const float* dy, float* dx,
             float* dw, int64_t n, int d) {
  for (int64_t i = 0; i < n; i++) {
    const float *xi = x + i * d, *gi = dy + i * d;
    float* oi = dx + i * d;
    float r = rinv[i], s = 0;
    if (w) {
      for (int j = 0; j < d; j++) s += gi[j] * w[j] * xi[j];
      float c = s * r * r * r / d;
      for (int j = 0; j < d; j++) oi[j] = gi[j] * w[j] * r - xi[j] * c;
      for (int j = 0; j < d; j++) dw[j] += gi[j] * xi[j] * r;
    } else {
      s = dot(gi, xi, d);
      float c = s * r * r * r / d;
      for (int j = 0; j < d; j++) oi[j] = gi[j] * r - xi[j] * c;
    }
  }
}

// ---- clamped SwiGLU: gu is [n, 2f] (gate | up), out is [n, f] ----------------------
void swiglu_fwd(const float* gu, float* out, int64_t n, int f, float clamp) {
  for (int64_t i = 0; i < n; i++) {
    const float *g = gu + i * 2 * f, *u = g + f;
    float* o = out + i * f;
    for (int j = 0; j < f; j++) {
      float a = std::min(g[j], clamp), b = std::max(-clamp, std::min(u[j], clamp));
      o[j] = a / (1.0f + std::exp(-a)) * b;
    }
  }
}

void swiglu_bwd(const float* gu, const float* dout, float* dgu, int64_t n, int f, float clamp) {
  for (int64_t i = 0; i < n; i++) {
    const float *g = gu + i * 2 * f, *u = g + f, *go = dout + i * f;
    float *dg = dgu + i * 2 * f, *du = dg + f;
    for (int j = 0; j < f; j++) {
      float a = std::min(g[j], clamp), b = std::max(-clamp, std::min(u[j], clamp));
      float s = 1.0f / (1.0f + std::exp(-a)), si = a * s;
      dg[j] = g[j] < clamp ? go[j] * b * (s + si * (1.0f - s)) : 0.0f;
      du[j] = (u[j] < clamp && u[j] > -clamp) ? go[j] * si : 0.0f;
    }
  }
}

// ---- RoPE on the last 2*half dims of each head, adjacent pairs, in place ------------
// x [b*t, heads, hd]; cs/sn [t, half]
void rope_inplace(float* x, const float* cs, const float* sn, int64_t bt, int t, int heads, int hd,
                  int half, float sign) {
  for (int64_t i = 0; i < bt; i++) {
    const float *c = cs + (i % t) * half, *s = sn + (i % t) * half;
    for (int h = 0; h < heads; h++) {
      float* p = x + (i * heads + h) * hd + hd - 2 * half;
      for (int j = 0; j < half; j++) {
        float a = p[2 * j], b = p[2 * j + 1];
        p[2 * j] = a * c[j] - sign * b * s[j];
        p[2 * j + 1] = sign * a * s[j] + b * c[j];
      }
    }
  }
}

// ---- hyper-connections -------------------------------------------------------------
// m [n,24] are the mixes already multiplied by the inverse RMS of the flat state.
// comb is stored as c[row*4+col]; rows are softmaxed first, then columns and rows are
// normalised in turn.  Tokens are processed in groups of L lanes.
constexpr int L = 16;

static void sinkhorn_lane_fwd(float c[16][L], int iters, float eps, float (*save)[16][L]) {
  for (int r = 0; r < 4; r++) {
    for (int l = 0; l < L; l++) {
      float mx = std::max(std::max(c[r * 4][l], c[r * 4 + 1][l]),
                          std::max(c[r * 4 + 2][l], c[r * 4 + 3][l]));
      float e0 = std::exp(c[r * 4][l] - mx), e1 = std::exp(c[r * 4 + 1][l] - mx);
      float e2 = std::exp(c[r * 4 + 2][l] - mx), e3 = std::exp(c[r * 4 + 3][l] - mx);
      float inv = 1.0f / (e0 + e1 + e2 + e3);
      c[r * 4][l] = e0 * inv;
      c[r * 4 + 1][l] = e1 * inv;
      c[r * 4 + 2][l] = e2 * inv;
      c[r * 4 + 3][l] = e3 * inv;
    }
  }
  if (save) memcpy(save[0], c, sizeof(float) * 16 * L);
  for (int i = 0; i < 16; i++)
    for (int l = 0; l < L; l++) c[i][l] += eps;
  int k = 1;
  for (int it = 0; it < iters; it++) {
    if (it > 0) {
      if (save) memcpy(save[k++], c, sizeof(float) * 16 * L);
      for (int r = 0; r < 4; r++)
        for (int l = 0; l < L; l++) {
          float inv =
              1.0f / (c[r * 4][l] + c[r * 4 + 1][l] + c[r * 4 + 2][l] + c[r * 4 + 3][l] + eps);
          for (int q = 0; q < 4; q++) c[r * 4 + q][l] *= inv;
        }
    }
    if (save) memcpy(save[k++], c, sizeof(float) * 16 * L);
    for (int q = 0; q < 4; q++)
      for (int l = 0; l < L; l++) {
        float inv = 1.0f / (c[q][l] + c[4 + q][l] + c[8 + q][l] + c[12 + q][l] + eps);
        for (int r = 0; r < 4; r++) c[r * 4 + q][l] *= inv;
      }
  }
}

// Gradient through y_i = x_i / (sum_j x_j + eps) over the 4 entries starting at s, step st.
static inline void norm_bwd(const float x[16][L], float g[16][L], int s, int st, float eps) {
  for (int l = 0; l < L; l++) {
    float inv = 1.0f / (x[s][l] + x[s + st][l] + x[s + 2 * st][l] + x[s + 3 * st][l] + eps);
    float d = (g[s][l] * x[s][l] + g[s + st][l] * x[s + st][l] +
               g[s + 2 * st][l] * x[s + 2 * st][l] + g[s + 3 * st][l] * x[s + 3 * st][l]) *
              inv;
    for (int i = 0; i < 4; i++) g[s + i * st][l] = (g[s + i * st][l] - d) * inv;
  }
}

void hc_split_fwd(const float* m, const float* scale, const float* base, float* pre, float* post,
                  float* comb, int64_t n, int iters, float eps) {
  for (int64_t i0 = 0; i0 < n; i0 += L) {
    int nl = (int)std::min<int64_t>(L, n - i0);
    float c[16][L] = {};
    for (int l = 0; l < nl; l++) {
      const float* mi = m + (i0 + l) * 24;
      for (int j = 0; j < 4; j++) {
        pre[(i0 + l) * 4 + j] = 1.0f / (1.0f + std::exp(-(mi[j] * scale[0] + base[j]))) + eps;
        post[(i0 + l) * 4 + j] = 2.0f / (1.0f + std::exp(-(mi[4 + j] * scale[1] + base[4 + j])));
      }
      for (int j = 0; j < 16; j++) c[j][l] = mi[8 + j] * scale[2] + base[8 + j];
    }
    sinkhorn_lane_fwd(c, iters, eps, nullptr);
    for (int l = 0; l < nl; l++)
      for (int j = 0; j < 16; j++) comb[(i0 + l) * 16 + j] = c[j][l];
  }
}

void hc_split_bwd(const float* m, const float* scale, const float* base, const float* dpre,
                  const float* dpost, const float* dcomb, float* dm, float* dscale, float* dbase,
                  int64_t n, int iters, float eps) {
  std::vector<float> buf((size_t)(2 * iters + 1) * 16 * L);
  float(*save)[16][L] = reinterpret_cast<float(*)[16][L]>(buf.data());
  for (int64_t i0 = 0; i0 < n; i0 += L) {
    int nl = (int)std::min<int64_t>(L, n - i0);
    float c[16][L] = {}, g[16][L] = {};
    for (int l = 0; l < nl; l++) {
      const float* mi = m + (i0 + l) * 24;
      for (int j = 0; j < 16; j++) c[j][l] = mi[8 + j] * scale[2] + base[8 + j];
      for (int j = 0; j < 16; j++) g[j][l] = dcomb[(i0 + l) * 16 + j];
    }
    sinkhorn_lane_fwd(c, iters, eps, save);
    int k = 2 * iters - 1;  // index of the input of the last column pass
    for (int it = iters - 1; it >= 0; it--) {
      for (int q = 0; q < 4; q++) norm_bwd(save[k], g, q, 4, eps);
      k--;
      if (it > 0) {
        for (int r = 0; r < 4; r++) norm_bwd(save[k], g, r * 4, 1, eps);
        k--;
      }
    }
    for (int r = 0; r < 4; r++)
      for (int l = 0; l < L; l++) {  // softmax
        float d = 0;
        for (int q = 0; q < 4; q++) d += g[r * 4 + q][l] * save[0][r * 4 + q][l];
        for (int q = 0; q < 4; q++) g[r * 4 + q][l] = (g[r * 4 + q][l] - d) * save[0][r * 4 + q][l];
      }
    for (int l = 0; l < nl; l++) {
      const float* mi = m + (i0 + l) * 24;
      float* o = dm + (i0 + l) * 24;
      for (int j = 0; j < 4; j++) {
        float s = 1.0f / (1.0f + std::exp(-(mi[j] * scale[0] + base[j])));
        float z = dpre[(i0 + l) * 4 + j] * s * (1 - s);
        o[j] = z * scale[0];
        dscale[0] += z * mi[j];
        dbase[j] += z;
        s = 1.0f / (1.0f + std::exp(-(mi[4 + j] * scale[1] + base[4 + j])));
        z = dpost[(i0 + l) * 4 + j] * 2 * s * (1 - s);
        o[4 + j] = z * scale[1];
        dscale[1] += z * mi[4 + j];
        dbase[4 + j] += z;
      }
      for (int j = 0; j < 16; j++) {
        o[8 + j] = g[j][l] * scale[2];
        dscale[2] += g[j][l] * mi[8 + j];
        dbase[8 + j] += g[j][l];
      }
    }
  }
}

// out[n,d] = sum_h w[n,h] x[n,h,d];  rinv[n] = 1/rms(x[n,:,:])
void hc_rinv(const float* x, float* rinv, int64_t n, int hd4, float eps) {
  for (int64_t i = 0; i < n; i++)
    rinv[i] = 1.0f / std::sqrt(dot(x + i * hd4, x + i * hd4, hd4) / hd4 + eps);
}
void hc_wsum(const float* x, const float* w, float* out, int64_t n, int d) {
  for (int64_t i = 0; i < n; i++) {
    const float *a = x + i * 4 * d, *p = w + i * 4;
    float* o = out + i * d;
    for (int j = 0; j < d; j++)
      o[j] = p[0] * a[j] + p[1] * a[d + j] + p[2] * a[2 * d + j] + p[3] * a[3 * d + j];
  }
}
// dw = <dout, x_h>;  dx = w_h dout + coef[n] x   (added to what dx already holds)
void hc_wsum_dw(const float* x, const float* dout, float* dw, int64_t n, int d) {
  for (int64_t i = 0; i < n; i++)
    for (int h = 0; h < 4; h++) dw[i * 4 + h] = dot(x + (i * 4 + h) * d, dout + i * d, d);
}
void hc_wsum_dx(const float* x, const float* w, const float* coef, const float* dout, float* dx,
                int64_t n, int d) {
  for (int64_t i = 0; i < n; i++)
    for (int h = 0; h < 4; h++) {
      const float *a = x + (i * 4 + h) * d, *g = dout + i * d;
      float* o = dx + (i * 4 + h) * d;
      float wh = w[i * 4 + h], c = coef[i];
      for (int j = 0; j < d; j++) o[j] += wh * g[j] + c * a[j];
    }
}

// out[dst] = post[dst] y + sum_src comb[src*4+dst] res[src]
void hc_post_fwd(const float* y, const float* res, const float* post, const float* comb, float* out,
                 int64_t n, int d) {
  for (int64_t i = 0; i < n; i++) {
    const float *r = res + i * 4 * d, *yy = y + i * d, *c = comb + i * 16, *p = post + i * 4;
    for (int t = 0; t < 4; t++) {
      float* o = out + (i * 4 + t) * d;
      float c0 = c[t], c1 = c[4 + t], c2 = c[8 + t], c3 = c[12 + t], pt = p[t];
      for (int j = 0; j < d; j++)
        o[j] = pt * yy[j] + c0 * r[j] + c1 * r[d + j] + c2 * r[2 * d + j] + c3 * r[3 * d + j];
    }
  }
}
void hc_post_bwd(const float* y, const float* res, const float* post, const float* comb,
                 const float* g, float* dy, float* dres, float* dpost, float* dcomb, int64_t n,
                 int d) {
  for (int64_t i = 0; i < n; i++) {
    const float *r = res + i * 4 * d, *yy = y + i * d, *c = comb + i * 16, *p = post + i * 4,
                *gi = g + i * 4 * d;
    float *oy = dy + i * d, *orr = dres + i * 4 * d;
    for (int j = 0; j < d; j++)
      oy[j] = p[0] * gi[j] + p[1] * gi[d + j] + p[2] * gi[2 * d + j] + p[3] * gi[3 * d + j];
    for (int s = 0; s < 4; s++) {
      float c0 = c[s * 4], c1 = c[s * 4 + 1], c2 = c[s * 4 + 2], c3 = c[s * 4 + 3];
      for (int j = 0; j < d; j++)
        orr[s * d + j] = c0 * gi[j] + c1 * gi[d + j] + c2 * gi[2 * d + j] + c3 * gi[3 * d + j];
    }
    for (int t = 0; t < 4; t++) {
      dpost[i * 4 + t] = dot(gi + t * d, yy, d);
      for (int s = 0; s < 4; s++) dcomb[i * 16 + s * 4 + t] = dot(gi + t * d, r + s * d, d);
    }
  }
}

// ---- attention: window of W raw rows plus visible compressed rows plus sink ---------
// q [b,t,h,hd], k [b,t,hd], c [b,nc,hd] (ratio tokens per row), sink [h].
// sel: optional [b,t,nc] bytes, 0 hides a compressed row.  p keeps the probabilities,
// one slab of (w*h) x (2w+ncb) per query block, laid out one after the other.
static int vis(int t, int ratio, int nc) { return ratio ? std::min(nc, (t + 1) / ratio) : 0; }

static void gather(std::vector<float>& kc, const float* k, const float* c, int q0, int nq, int w,
                   int hd, int nv) {
  int lo = std::max(0, q0 - w), nr = q0 + nq - lo;
  kc.resize((size_t)(nr + nv) * hd);
  memcpy(kc.data(), k + (size_t)lo * hd, sizeof(float) * nr * hd);
  if (nv) memcpy(kc.data() + (size_t)nr * hd, c, sizeof(float) * nv * hd);
}

int64_t attn_psize(int b, int t, int h, int w, int nc, int ratio) {
  int64_t s = 0;
  for (int q0 = 0; q0 < t; q0 += w) {
    int nq = std::min(w, t - q0), lo = std::max(0, q0 - w);
    s += (int64_t)nq * h * (q0 + nq - lo + vis(q0 + nq - 1, ratio, nc));
  }
  return s * b;
}

void attn_fwd(const float* q, const float* k, const float* c, const float* sink, const uint8_t* sel,
              float* out, float* p, float* psink, int b, int t, int h, int hd, int w, int nc,
              int ratio) {
  std::vector<float> kc;
  const float scale = 1.0f / std::sqrt((float)hd);
  for (int ib = 0; ib < b; ib++)
    for (int q0 = 0; q0 < t; q0 += w) {
      int nq = std::min(w, t - q0), lo = std::max(0, q0 - w), nr = q0 + nq - lo;
      int nv = vis(q0 + nq - 1, ratio, nc), nk = nr + nv;
      gather(kc, k + (size_t)ib * t * hd, c ? c + (size_t)ib * nc * hd : nullptr, q0, nq, w, hd,
             nv);
      const float* qb = q + ((size_t)ib * t + q0) * h * hd;
      gemm(false, true, nq * h, nk, hd, scale, qb, hd, kc.data(), hd, 0, p, nk);
      for (int i = 0; i < nq; i++) {
        int tq = q0 + i, a = std::max(0, tq - w + 1) - lo, e = tq - lo + 1, v = vis(tq, ratio, nc);
        const uint8_t* sl = sel ? sel + ((size_t)ib * t + tq) * nc : nullptr;
        for (int hh = 0; hh < h; hh++) {
          float* s = p + ((size_t)i * h + hh) * nk;
          float* sc = s + nr;
          if (sl)
            for (int j = 0; j < v; j++)
              if (!sl[j]) sc[j] = -1e30f;
          float mx = sink[hh];
          for (int j = a; j < e; j++) mx = std::max(mx, s[j]);
          for (int j = 0; j < v; j++) mx = std::max(mx, sc[j]);
          for (int j = 0; j < a; j++) s[j] = 0;
          for (int j = e; j < nr; j++) s[j] = 0;
          for (int j = v; j < nv; j++) sc[j] = 0;
          float sum = 0, es = std::exp(sink[hh] - mx);
          for (int j = a; j < e; j++) {
            s[j] = std::exp(s[j] - mx);
            sum += s[j];
          }
          for (int j = 0; j < v; j++) {
            sc[j] = std::exp(sc[j] - mx);
            sum += sc[j];
          }
          float inv = 1.0f / (sum + es);
          for (int j = a; j < e; j++) s[j] *= inv;
          for (int j = 0; j < v; j++) sc[j] *= inv;
          psink[((size_t)ib * t + tq) * h + hh] = es * inv;
        }
      }
      gemm(false, false, nq * h, hd, nk, 1, p, nk, kc.data(), hd, 0,
           out + ((size_t)ib * t + q0) * h * hd, hd);
      p += (size_t)nq * h * nk;
    }
}

void attn_bwd(const float* q, const float* k, const float* c, const float* p, const float* psink,
              const float* dout, float* dq, float* dk, float* dc, float* dsink, int b, int t, int h,
              int hd, int w, int nc, int ratio) {
  std::vector<float> kc, ds, dkc;
  const float scale = 1.0f / std::sqrt((float)hd);
  for (int ib = 0; ib < b; ib++)
    for (int q0 = 0; q0 < t; q0 += w) {
      int nq = std::min(w, t - q0), lo = std::max(0, q0 - w), nr = q0 + nq - lo;
      int nv = vis(q0 + nq - 1, ratio, nc), nk = nr + nv;
      gather(kc, k + (size_t)ib * t * hd, c ? c + (size_t)ib * nc * hd : nullptr, q0, nq, w, hd,
             nv);
      ds.resize((size_t)nq * h * nk);
      dkc.resize((size_t)nk * hd);
      const float* gb = dout + ((size_t)ib * t + q0) * h * hd;
      const float* qb = q + ((size_t)ib * t + q0) * h * hd;
      gemm(false, true, nq * h, nk, hd, 1, gb, hd, kc.data(), hd, 0, ds.data(), nk);
      for (int r = 0; r < nq * h; r++) {
        const float* pr = p + (size_t)r * nk;
        float* dr = ds.data() + (size_t)r * nk;
        float d = dot(pr, dr, nk);
        for (int j = 0; j < nk; j++) dr[j] = pr[j] * (dr[j] - d);
        dsink[r % h] -= psink[((size_t)ib * t + q0) * h + r] * d;
      }
      gemm(false, false, nq * h, hd, nk, scale, ds.data(), nk, kc.data(), hd, 0,
           dq + ((size_t)ib * t + q0) * h * hd, hd);
      gemm(true, false, nk, hd, nq * h, scale, ds.data(), nk, qb, hd, 0, dkc.data(), hd);
      gemm(true, false, nk, hd, nq * h, 1, p, nk, gb, hd, 1, dkc.data(), hd);
      float* dkb = dk + ((size_t)ib * t + lo) * hd;
      for (int j = 0; j < nr * hd; j++) dkb[j] += dkc[j];
      if (nv) {
        float* dcb = dc + (size_t)ib * nc * hd;
        for (int j = 0; j < nv * hd; j++) dcb[j] += dkc[(size_t)nr * hd + j];
      }
      p += (size_t)nq * h * nk;
    }
}

// Head-summed probability mass that each query puts on each compressed row: the
// target distribution of the indexer.  out [b,t,nc].
void attn_comp_mass(const float* p, float* out, int b, int t, int h, int w, int nc, int ratio) {
  memset(out, 0, sizeof(float) * (size_t)b * t * nc);
  for (int ib = 0; ib < b; ib++)
    for (int q0 = 0; q0 < t; q0 += w) {
      int nq = std::min(w, t - q0), lo = std::max(0, q0 - w), nr = q0 + nq - lo;
      int nv = vis(q0 + nq - 1, ratio, nc), nk = nr + nv;
      for (int i = 0; i < nq; i++)
        for (int hh = 0; hh < h; hh++) {
          const float* s = p + ((size_t)i * h + hh) * nk + nr;
          float* o = out + ((size_t)ib * t + q0 + i) * nc;
          for (int j = 0; j < nv; j++) o[j] += s[j];
        }
      p += (size_t)nq * h * nk;
    }
}
}
