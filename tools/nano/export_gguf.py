"""Writes a trained checkpoint as GGUF.

    export_gguf.py CHECKPOINT OUT.gguf [F32|F16|Q8_0]

Q8_0 is the usual mix of V4 Flash: attention, experts and output in Q8_0; embedding, router,
compressor, indexer and hyper-connection matrices in F16.
"""
import os
import struct
import sys

import numpy as np

import model as M
from data import BOS, EOS
from tokenizer import Tokenizer

U32, I32, F32, BOOL, STR, ARR = 4, 5, 6, 7, 8, 9
GGML = {"F32": 0, "F16": 1, "Q8_0": 8, "I32": 26}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{{ '<｜Assistant｜></think>' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}")


def string(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def scalar(t, v):
    if t == STR:
        return string(v)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[t], v)


def quantize(a):
    """Q8_0 blocks of 32: float16 scales d and int8 q, a ~ d * q, halves away from zero."""
    b = a.astype(np.float32).reshape(-1, 32)
    d = np.abs(b).max(1, keepdims=True) / 127.0
    v = b * np.where(d > 0, 1 / np.maximum(d, 1e-30), 0).astype(np.float32)
    return d.astype(np.float16), (np.sign(v) * np.floor(np.abs(v) + 0.5)).astype(np.int8)


class Writer:
    def __init__(self):
        self.kv, self.tensors = [], []

    def put(self, key, t, v):
        if isinstance(v, list):
            body = struct.pack("<IIQ", ARR, t, len(v)) + b"".join(scalar(t, x) for x in v)
        else:
            body = struct.pack("<I", t) + scalar(t, v)
        self.kv.append(string(key) + body)

    def add(self, name, a, kind):
        """a: numpy array; its last axis is GGUF dimension 0."""
        if kind == "Q8_0":
            d, q = quantize(a)
            data = np.concatenate([d.view(np.uint8), q.view(np.uint8)], 1).tobytes()
        else:
            data = a.astype({"F32": "<f4", "F16": "<f2", "I32": "<i4"}[kind]).tobytes()
        self.tensors.append((name, a.shape[::-1], kind, data))

    def write(self, path):
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.kv))
        head += b"".join(self.kv)
        off = 0
        for name, dims, kind, data in self.tensors:
            n = len(dims)
            head += string(name) + struct.pack(f"<I{n}QIQ", n, *dims, GGML[kind], off)
            off += -(-len(data) // 32) * 32
        with open(path, "wb") as f:
            f.write(head + b"\0" * (-len(head) % 32))
            for *_x, data in self.tensors:
                f.write(data + b"\0" * (-len(data) % 32))


def metadata(w, c, tok, name):
    w.put("general.architecture", STR, "deepseek4")
    w.put("general.name", STR, name)
    w.put("general.quantization_version", U32, 2)
    w.put("general.alignment", U32, 32)
    a = "deepseek4."
    for k, v in dict(
            block_count=c.n_layer, context_length=c.ctx_train, embedding_length=c.n_embd,
            vocab_size=c.n_vocab, expert_count=c.n_expert, expert_used_count=c.n_used,
            expert_shared_count=1, expert_feed_forward_length=c.n_ff, expert_group_count=0,
            expert_group_used_count=0, expert_gating_func=4, hash_layer_count=c.n_hash).items():
        w.put(a + k, U32, v)
    for k, v in {"head_count": c.n_head, "head_count_kv": 1, "key_length": c.head_dim,
                 "value_length": c.head_dim, "q_lora_rank": c.lora_q, "output_lora_rank": c.lora_o,
                 "output_group_count": c.groups, "sliding_window": c.window,
                 "indexer.head_count": c.idx_heads, "indexer.key_length": c.idx_dim,
                 "indexer.top_k": c.top_k}.items():
        w.put(a + "attention." + k, U32, v)
    w.put(a + "attention.layer_norm_rms_epsilon", F32, c.eps)
    w.put(a + "attention.compress_rope_freq_base", F32, c.comp_rope_base)
    w.put(a + "attention.compress_ratios", U32, [c.ratio(i) for i in range(c.n_layer)])
    w.put(a + "expert_weights_scale", F32, c.expert_scale)
    w.put(a + "expert_weights_norm", BOOL, True)
    w.put(a + "swiglu_clamp_exp", F32, [c.clamp] * c.n_layer)
    w.put(a + "hyper_connection.count", U32, 4)
    w.put(a + "hyper_connection.sinkhorn_iterations", U32, c.hc_iters)
    w.put(a + "hyper_connection.epsilon", F32, c.hc_eps)
    w.put(a + "rope.dimension_count", U32, c.n_rot)
    w.put(a + "rope.freq_base", F32, c.rope_base)
    w.put(a + "rope.scaling.type", STR, "yarn")
    w.put(a + "rope.scaling.factor", F32, c.rope_factor)
    w.put(a + "rope.scaling.original_context_length", U32, c.rope_orig_ctx)
    w.put(a + "rope.scaling.yarn_beta_fast", F32, c.beta_fast)
    w.put(a + "rope.scaling.yarn_beta_slow", F32, c.beta_slow)
    t = "tokenizer.ggml."
    types = [1 if i < tok.n_normal else 4 if s in ("<think>", "</think>") else 3
             for i, s in enumerate(tok.tokens)]
    w.put(t + "model", STR, "gpt2")
    w.put(t + "pre", STR, "joyai-llm")
    w.put(t + "tokens", STR, tok.tokens)
    w.put(t + "token_type", I32, types)
    w.put(t + "merges", STR, tok.merges)
    w.put(t + "bos_token_id", U32, tok.id[BOS])
    w.put(t + "eos_token_id", U32, tok.id[EOS])
    w.put(t + "padding_token_id", U32, tok.id["<｜▁pad▁｜>"])
    w.put(t + "add_bos_token", BOOL, True)
    w.put(t + "add_eos_token", BOOL, False)
    w.put("tokenizer.chat_template", STR, TEMPLATE)


def tensors(w, m, kind):
    """Every tensor of the model, in file order, its matrices as kind."""
    small = "F32" if kind == "F32" else "F16"
    n = lambda p: p.detach().numpy()

    def comp(pfx, c):
        w.add(pfx + "_kv.weight", n(c.kv), small)
        w.add(pfx + "_gate.weight", n(c.gate), small)
        w.add(pfx + "_ape.weight", n(c.ape), small)
        w.add(pfx + "_norm.weight", n(c.norm), "F32")

    w.add("token_embd.weight", n(m.tok), small)
    for i, l in enumerate(m.layers):
        b, a, f = f"blk.{i}.", l.attn, l.ffn
        for s, h in (("attn", l.hc_attn), ("ffn", l.hc_ffn)):
            w.add(f"{b}hc_{s}_fn.weight", n(h.fn), small)
            w.add(f"{b}hc_{s}_scale.weight", n(h.scale), "F32")
            w.add(f"{b}hc_{s}_base.weight", n(h.base), "F32")
        w.add(b + "attn_norm.weight", n(l.attn_norm), "F32")
        w.add(b + "attn_q_a.weight", n(a.q_a), kind)
        w.add(b + "attn_q_a_norm.weight", n(a.q_a_norm), "F32")
        w.add(b + "attn_q_b.weight", n(a.q_b), kind)
        w.add(b + "attn_kv.weight", n(a.kv), kind)
        w.add(b + "attn_kv_a_norm.weight", n(a.kv_norm), "F32")
        w.add(b + "attn_sinks.weight", n(a.sinks), "F32")
        w.add(b + "attn_output_a.weight", n(a.o_a), kind)
        w.add(b + "attn_output_b.weight", n(a.o_b), kind)
        if a.ratio:
            comp(b + "attn_compressor", a.comp)
        if a.ratio == 4:
            comp(b + "indexer_compressor", a.idx_comp)
            w.add(b + "indexer.attn_q_b.weight", n(a.idx_q_b), small)
            w.add(b + "indexer.proj.weight", n(a.idx_proj), small)
        w.add(b + "ffn_norm.weight", n(l.ffn_norm), "F32")
        w.add(b + "ffn_gate_inp.weight", n(f.gate_inp), small)
        if f.hashed:
            w.add(b + "ffn_gate_tid2eid.weight", n(f.tid2eid), "I32")
        else:
            w.add(b + "exp_probs_b.bias", n(f.bias), "F32")
        ff = m.cfg.n_ff
        w.add(b + "ffn_gate_exps.weight", n(f.w13[:, :ff]), kind)
        w.add(b + "ffn_up_exps.weight", n(f.w13[:, ff:]), kind)
        w.add(b + "ffn_down_exps.weight", n(f.w2), kind)
        w.add(b + "ffn_gate_shexp.weight", n(f.sh13[:ff]), kind)
        w.add(b + "ffn_up_shexp.weight", n(f.sh13[ff:]), kind)
        w.add(b + "ffn_down_shexp.weight", n(f.sh2), kind)
    w.add("output_norm.weight", n(m.norm), "F32")
    w.add("output.weight", n(m.out), kind)
    w.add("output_hc_fn.weight", n(m.hc_fn), small)
    w.add("output_hc_base.weight", n(m.hc_base), "F32")
    w.add("output_hc_scale.weight", n(m.hc_scale), "F32")


class Rounder:
    """Takes a Writer's place: the arrays share the model's memory and are rounded there."""

    def add(self, _name, a, kind):
        if kind == "F16":
            a[...] = a.astype(np.float16).astype(np.float32)
        elif kind == "Q8_0":
            d, q = quantize(a)
            a[...] = (q * d.astype(np.float32)).reshape(a.shape)


def round_weights(model, kind):
    """Gives the model the weights that a reader of the exported file sees."""
    tensors(Rounder(), model, kind)


def export(model, tok, path, kind, name="nano deepseek4"):
    w = Writer()
    metadata(w, model.cfg, tok, name)
    tensors(w, model, kind)
    w.write(path)
    print(f"{path}: {len(w.tensors)} tensors, {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    export(M.load(sys.argv[1]), Tokenizer(os.path.join(here, "tokenizer.json")), sys.argv[2],
           sys.argv[3] if len(sys.argv) > 3 else "Q8_0")
