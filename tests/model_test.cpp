// MODEL: shape rules, dialects, and a file for every check with its message.
#include "ds4_test.h"
#include "gguf_writer.h"

namespace model_test {

using ds4::Gguf;
using ds4::Model;
using W = GgufWriter;

constexpr uint32_t E = 32, V = 8, H = 4, D = 16, R = 8, G = 2, LQ = 12, LO = 6, IH = 3, ID = 8, NE = 4, NU = 2, F = 64, S = 2;

// The tensors of one block; ratio 0, 4 or 128.
static void add_block(W& w, uint32_t il, uint32_t ratio, bool hashed) {
  const auto name = [&](const char* s) { return "blk." + std::to_string(il) + "." + s; };
  const uint32_t mix = S * (S + 2);
  for (const char* hc : {"hc_attn", "hc_ffn"}) {
    w.f32_tensor(name(hc) + "_fn.weight", {S * E, mix}, 0.5f);
    w.f32_tensor(name(hc) + "_scale.weight", {3}, 1);
    w.f32_tensor(name(hc) + "_base.weight", {mix}, 0, 0.25f);
  }
  w.f32_tensor(name("attn_norm.weight"), {E}, 1);
  w.f32_tensor(name("attn_q_a.weight"), {E, LQ}, 1);
  w.f32_tensor(name("attn_q_a_norm.weight"), {LQ}, 1);
  w.f32_tensor(name("attn_q_b.weight"), {LQ, H * D}, 1);
  w.f32_tensor(name("attn_kv.weight"), {E, D}, 1);
  w.f32_tensor(name("attn_kv_a_norm.weight"), {D}, 1);
  w.f32_tensor(name("attn_sinks.weight"), {H}, 1);
  w.f32_tensor(name("attn_output_a.weight"), {D * H / G, G * LO}, 1);
  w.f32_tensor(name("attn_output_b.weight"), {G * LO, E}, 1);
  const auto compressor = [&](const char* prefix, uint32_t width) {
    const uint32_t rows = width * (ratio == 4 ? 2 : 1);
    w.f32_tensor(name(prefix) + "_kv.weight", {E, rows}, 1);
    w.f32_tensor(name(prefix) + "_gate.weight", {E, rows}, 1);
    w.f32_tensor(name(prefix) + "_ape.weight", {rows, ratio}, 1, 1);
    w.f32_tensor(name(prefix) + "_norm.weight", {width}, 1);
  };
  if (ratio != 0) compressor("attn_compressor", D);
  if (ratio == 4) {
    compressor("indexer_compressor", ID);
    w.f32_tensor(name("indexer.attn_q_b.weight"), {LQ, IH * ID}, 1);
    w.f32_tensor(name("indexer.proj.weight"), {E, IH}, 1);
  }
  w.f32_tensor(name("ffn_norm.weight"), {E}, 1);
  w.f32_tensor(name("ffn_gate_inp.weight"), {E, NE}, 1);
  if (hashed) {
    std::string ids;
    for (uint32_t i = 0; i < V * NU; i++) ids += W::raw(int32_t(i % NE));
    w.tensors.push_back({name("ffn_gate_tid2eid.weight"), {NU, V}, 26, ids});
  } else {
    w.f32_tensor(name("exp_probs_b.bias"), {NE}, 1);
  }
  w.f32_tensor(name("ffn_gate_exps.weight"), {E, F, NE}, 1);
  w.f32_tensor(name("ffn_up_exps.weight"), {E, F, NE}, 1);
  w.f32_tensor(name("ffn_down_exps.weight"), {F, E, NE}, 1);
  w.f32_tensor(name("ffn_gate_shexp.weight"), {E, F}, 1);
  w.f32_tensor(name("ffn_up_shexp.weight"), {E, F}, 1);
  w.f32_tensor(name("ffn_down_shexp.weight"), {F, E}, 1);
}

// A complete small model: ratios 0, 4, 128, the first layer routed by token id.
static W tiny() {
  W w;
  w.string("general.architecture", "deepseek4");
  const auto u = [&](const char* key, uint32_t v) { w.u32(std::string("deepseek4.") + key, v); };
  const auto f = [&](const char* key, float v) { w.f32(std::string("deepseek4.") + key, v); };
  u("block_count", 3), u("context_length", 4096), u("embedding_length", E), u("vocab_size", V);
  u("attention.head_count", H), u("attention.head_count_kv", 1), u("attention.key_length", D), u("attention.value_length", D);
  u("rope.dimension_count", R), u("attention.q_lora_rank", LQ), u("attention.output_lora_rank", LO);
  u("attention.output_group_count", G), u("attention.sliding_window", 16);
  w.array<uint32_t>("deepseek4.attention.compress_ratios", W::U32, {0, 4, 128});
  f("attention.compress_rope_freq_base", 120000), u("attention.indexer.head_count", IH), u("attention.indexer.key_length", ID);
  u("attention.indexer.top_k", 5), f("attention.layer_norm_rms_epsilon", 1e-5f), f("rope.freq_base", 5000);
  w.string("deepseek4.rope.scaling.type", "yarn");
  f("rope.scaling.factor", 8), u("rope.scaling.original_context_length", 1024), f("rope.scaling.yarn_beta_fast", 30);
  f("rope.scaling.yarn_beta_slow", 2), u("expert_count", NE), u("expert_used_count", NU), u("expert_shared_count", 1);
  u("expert_feed_forward_length", F), u("expert_group_count", 0), u("expert_gating_func", 4), f("expert_weights_scale", 2.5f);
  w.boolean("deepseek4.expert_weights_norm", true);
  w.array<float>("deepseek4.swiglu_clamp_exp", W::F32, {7, 8, 9});
  u("hash_layer_count", 1), u("hyper_connection.count", S), u("hyper_connection.sinkhorn_iterations", 3), f("hyper_connection.epsilon", 1e-4f);
  w.strings("tokenizer.ggml.tokens", std::vector<std::string>(V, "t"));
  w.f32_tensor("token_embd.weight", {E, V}, 1, 1);
  add_block(w, 0, 0, true);
  add_block(w, 1, 4, false);
  add_block(w, 2, 128, false);
  w.f32_tensor("output_norm.weight", {E}, 1);
  w.f32_tensor("output.weight", {E, V}, 1);
  w.f32_tensor("output_hc_fn.weight", {S * E, S}, 1);
  w.f32_tensor("output_hc_scale.weight", {1}, 1);
  w.f32_tensor("output_hc_base.weight", {S}, 1);
  return w;
}

// A file and its model.
struct Loaded {
  TempDir dir;
  std::unique_ptr<Gguf> file;
  Model model;
  std::string warnings;
  explicit Loaded(const W& w) {
    file = std::make_unique<Gguf>(dir.write("m.gguf", w.bytes()));
    testing::internal::CaptureStderr();
    try {
      model = ds4::load_model(*file);
    } catch (...) {
      testing::internal::GetCapturedStderr();
      throw;
    }
    warnings = testing::internal::GetCapturedStderr();
    for (size_t at; (at = warnings.find(file->path())) != std::string::npos;) warnings.replace(at, file->path().size(), "FILE");
  }
};

// What loading says, with the path replaced by FILE; "" if nothing is wrong.
static std::string message(const W& w) {
  TempDir dir;
  const std::string path = dir.write("m.gguf", w.bytes());
  testing::internal::CaptureStderr();
  std::string s;
  try {
    Gguf g(path);
    ds4::load_model(g);
  } catch (const ds4::Error& e) {
    s = e.what();
  }
  testing::internal::GetCapturedStderr();
  for (size_t at; (at = s.find(path)) != std::string::npos;) s.replace(at, path.size(), "FILE");
  return s;
}

static void expect_tiny_shape(const ds4::Shape& s) {
  EXPECT_EQ(s.n_layer, 3u);
  EXPECT_EQ(s.n_embd, E);
  EXPECT_EQ(s.n_vocab, V);
  EXPECT_EQ(s.n_head, H);
  EXPECT_EQ(s.head_dim, D);
  EXPECT_EQ(s.n_group, G);
  EXPECT_EQ(s.q_rank, LQ);
  EXPECT_EQ(s.o_rank, LO);
  EXPECT_EQ(s.n_expert, NE);
  EXPECT_EQ(s.n_used, NU);
  EXPECT_EQ(s.ff, F);
  EXPECT_EQ(s.ff_shared, F);
  EXPECT_EQ(s.n_hash, 1u);
  EXPECT_EQ(s.idx_heads, IH);
  EXPECT_EQ(s.idx_dim, ID);
  EXPECT_EQ(s.n_hc, S);
  EXPECT_EQ(s.ratios, (std::vector<uint32_t>{0, 4, 128}));
}

TEST(Model, ReadsShapeAndWeights) {
  Loaded l(tiny());
  EXPECT_EQ(l.warnings, "");
  const ds4::Shape& s = l.model.shape;
  expect_tiny_shape(s);
  EXPECT_EQ(s.n_rot, R);
  EXPECT_EQ(s.window, 16u);
  EXPECT_EQ(s.idx_top_k, 5u);
  EXPECT_EQ(s.sinkhorn_iters, 3u);
  EXPECT_EQ(s.n_ctx_train, 4096u);
  EXPECT_EQ(s.rms_eps, 1e-5f);
  EXPECT_EQ(s.hc_eps, 1e-4f);
  EXPECT_EQ(s.expert_scale, 2.5f);
  EXPECT_TRUE(s.expert_norm);
  EXPECT_EQ(s.clamp, (std::vector<float>{7, 8, 9}));
  EXPECT_EQ(s.clamp_shared, s.clamp);
  EXPECT_EQ(s.rope_base, 5000);
  EXPECT_EQ(s.comp_rope_base, 120000);
  EXPECT_EQ(s.yarn_factor, 8);
  EXPECT_EQ(s.yarn_orig_ctx, 1024u);
  EXPECT_EQ(s.yarn_beta_fast, 30);
  EXPECT_EQ(s.yarn_beta_slow, 2);

  ASSERT_EQ(l.model.layers.size(), 3u);
  const ds4::LayerWeights &a = l.model.layers[0], &b = l.model.layers[1], &c = l.model.layers[2];
  EXPECT_EQ(l.model.token_embd.rows, V);
  EXPECT_EQ(l.model.token_embd.cols, E);
  EXPECT_EQ(l.model.token_embd.stride, E * 4);
  EXPECT_EQ(a.hc_attn.base[3], 0.75f);
  EXPECT_EQ(a.hc_attn.scale.size(), 3u);
  EXPECT_EQ(a.tid2eid[5], 1);
  EXPECT_TRUE(a.probs_bias.empty());
  EXPECT_EQ(a.comp.kv.data, nullptr);
  EXPECT_EQ(b.tid2eid, nullptr);
  EXPECT_EQ(b.probs_bias.size(), NE);
  EXPECT_EQ(b.comp.kv.rows, 2 * D);
  EXPECT_EQ(b.comp.ape.size(), 4 * 2 * D);
  EXPECT_EQ(b.comp.ape[2 * D + 1], 2 * D + 2.0f);
  EXPECT_EQ(b.idx_comp.gate.rows, 2 * ID);
  EXPECT_EQ(b.idx_q.rows, IH * ID);
  EXPECT_EQ(b.idx_proj.rows, IH);
  EXPECT_EQ(c.comp.kv.rows, D);
  EXPECT_EQ(c.comp.ape.size(), 128 * D);
  EXPECT_EQ(c.idx_q.data, nullptr);
  EXPECT_EQ(c.experts.gate.rows, NE * F);
  EXPECT_EQ(c.experts.down.rows, NE * E);
  EXPECT_EQ(c.experts.down.cols, F);
}

TEST(Model, MissingKeysComeFromShapes) {
  W w = tiny();
  for (const char* key : {"block_count", "embedding_length", "vocab_size", "attention.head_count", "attention.head_count_kv", "attention.key_length",
                          "attention.value_length", "attention.q_lora_rank", "attention.output_lora_rank", "attention.output_group_count",
                          "attention.compress_ratios", "attention.indexer.head_count", "attention.indexer.key_length", "expert_count",
                          "expert_used_count", "expert_shared_count", "expert_feed_forward_length", "expert_group_count", "expert_gating_func",
                          "hash_layer_count", "hyper_connection.count"}) {
    W one = tiny();
    one.erase(std::string("deepseek4.") + key);
    Loaded l(one);
    EXPECT_EQ(l.warnings, "") << key;
    expect_tiny_shape(l.model.shape);
    w.erase(std::string("deepseek4.") + key);
  }
  w.erase("tokenizer.ggml.tokens");
  Loaded l(w);
  EXPECT_EQ(l.warnings, "");
  expect_tiny_shape(l.model.shape);
}

TEST(Model, MissingConstantsAreFlashsWithAWarning) {
  const auto warning = [](const char* key) {
    W w = tiny();
    w.erase(std::string("deepseek4.") + key);
    return Loaded(w).warnings;
  };
  for (const char* key : {"context_length", "rope.dimension_count", "attention.sliding_window", "attention.indexer.top_k",
                          "attention.compress_rope_freq_base", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor",
                          "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
                          "expert_weights_scale", "expert_weights_norm", "swiglu_clamp_exp", "hyper_connection.sinkhorn_iterations",
                          "hyper_connection.epsilon"}) {
    if (std::string(key) == "rope.dimension_count") continue;      // Flash's 64 does not fit this model
    EXPECT_EQ(warning(key), std::string("ds4: warning: FILE has no deepseek4.") + key + ": DeepSeek V4 Flash's value is used\n");
  }
  W w = tiny();
  for (const char* key : {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
                          "rope.scaling.yarn_beta_slow", "swiglu_clamp_exp", "expert_weights_scale"})
    w.erase(std::string("deepseek4.") + key);
  Loaded l(w);
  EXPECT_EQ(l.warnings,
            "ds4: warning: FILE has no deepseek4.expert_weights_scale, deepseek4.swiglu_clamp_exp, deepseek4.rope.scaling.factor, "
            "deepseek4.rope.scaling.original_context_length, deepseek4.rope.scaling.yarn_beta_fast, deepseek4.rope.scaling.yarn_beta_slow: "
            "DeepSeek V4 Flash's values are used\n");
  EXPECT_EQ(l.model.shape.yarn_factor, 16);
  EXPECT_EQ(l.model.shape.yarn_orig_ctx, 65536u);
  EXPECT_EQ(l.model.shape.yarn_beta_fast, 32);
  EXPECT_EQ(l.model.shape.yarn_beta_slow, 1);
  EXPECT_EQ(l.model.shape.expert_scale, 1.5f);
  EXPECT_EQ(l.model.shape.clamp, (std::vector<float>{10, 10, 10}));
}

TEST(Model, Dialects) {
  W w = tiny();
  w.array<int32_t>("deepseek4.attention.compress_ratios", W::I32, {0, 4, 128, 0});         // one more, for the MTP layer
  w.f32("deepseek4.swiglu_clamp_exp", 5);
  w.array<float>("deepseek4.swiglu_clamp_shexp", W::F32, {1, 2, 3, 4});
  w.erase("deepseek4.attention.compress_rope_freq_base");
  w.f32("deepseek4.rope.freq_base_swa", 140000);
  w.set("deepseek4.embedding_length", W::U64, W::raw(uint64_t(E)));
  w.u32("deepseek4.nextn_predict_layers", 1);            // says what it likes: no nextn tensors, no MTP block
  Loaded l(w);
  EXPECT_EQ(l.warnings, "");
  expect_tiny_shape(l.model.shape);
  EXPECT_EQ(l.model.shape.clamp, (std::vector<float>{5, 5, 5}));
  EXPECT_EQ(l.model.shape.clamp_shared, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(l.model.shape.comp_rope_base, 140000);
}

TEST(Model, MtpBlockIsNotALayer) {
  W w = tiny();
  add_block(w, 3, 0, false);
  w.f32_tensor("blk.3.nextn.eh_proj.weight", {2 * E, E}, 1);
  w.tensor("blk.3.nextn.eh_proj.weight").type = 40;      // nobody reads it
  Loaded outside(w);             // block_count does not count it
  EXPECT_EQ(outside.model.shape.n_layer, 3u);
  w.u32("deepseek4.block_count", 4);
  Loaded inside(w);
  EXPECT_EQ(inside.model.shape.n_layer, 3u);
  EXPECT_EQ(ds4::role_table(inside.model).back().role, std::string("MTP, unused"));
  EXPECT_EQ(ds4::bytes_per_token(inside.model), ds4::bytes_per_token(Loaded(tiny()).model));
  w.erase_tensor("blk.3.nextn.eh_proj.weight");
  w.array<uint32_t>("deepseek4.attention.compress_ratios", W::U32, {0, 4, 128, 0});
  w.array<float>("deepseek4.swiglu_clamp_exp", W::F32, {1, 2, 3, 4});
  EXPECT_EQ(Loaded(w).model.shape.n_layer, 4u);
}

TEST(Model, AnyRoleInAnyType) {
  W w = tiny();
  const auto retype = [&](const std::string& name, uint32_t type, size_t nbytes) {
    w.tensor(name).type = type;
    w.tensor(name).data.assign(nbytes, '\0');
  };
  retype("token_embd.weight", 8, V * 34);                // Q8_0
  retype("blk.1.attn_kv.weight", 39, D * 17);            // MXFP4
  retype("blk.1.ffn_gate_exps.weight", 2, NE * F * 18);  // Q4_0
  retype("blk.2.ffn_gate_exps.weight", 30, NE * F * E * 2);        // BF16
  retype("output_norm.weight", 1, E * 2);                // F16
  for (size_t i = 0; i < E; i++) w.tensor("output_norm.weight").data.replace(2 * i, 2, W::raw(uint16_t(0x3c00 + i)));
  retype("blk.1.attn_compressor_ape.weight", 8, 4 * 34); // Q8_0 where a vector is wanted
  for (size_t r = 0; r < 4; r++) {
    std::string row = W::raw(uint16_t(0x3800));          // 0.5
    for (int i = 0; i < 32; i++) row += char(i - 8 * int(r));
    w.tensor("blk.1.attn_compressor_ape.weight").data.replace(34 * r, 34, row);
  }
  Loaded l(w);
  EXPECT_EQ(l.model.token_embd.type, ds4::Type::Q8_0);
  EXPECT_EQ(l.model.token_embd.stride, 34u);
  EXPECT_EQ(l.model.layers[1].experts.gate.stride, 18u);
  EXPECT_EQ(l.model.layers[2].experts.gate.type, ds4::Type::BF16);
  EXPECT_EQ(l.model.output_norm[2], ds4::f16_to_f32(0x3c02));
  EXPECT_EQ(l.model.layers[1].comp.ape[3 * 32 + 5], 0.5f * (5 - 24));
}

TEST(Model, BytesPerTokenAndRoles) {
  Loaded l(tiny());
  uint64_t expected = E * 4;     // one row of token_embd
  for (const ds4::Tensor& t : l.file->tensors()) {
    const std::string name(t.name);
    if (t.dims[1] == 1 || name == "token_embd.weight" || name.find("_ape.") != std::string::npos || name.find("tid2eid") != std::string::npos) continue;
    expected += name.find("_exps.") != std::string::npos ? t.nbytes * NU / NE : t.nbytes;
  }
  EXPECT_EQ(ds4::bytes_per_token(l.model), expected);
  uint64_t total = 0;
  uint32_t count = 0;
  for (const ds4::RoleUse& u : ds4::role_table(l.model)) {
    EXPECT_STRNE(u.role, "unused");
    total += u.nbytes;
    count += u.count;
    if (std::string(u.role) == "experts down") { EXPECT_EQ(u.nbytes, 3u * NE * E * F * 4); }
  }
  EXPECT_EQ(count, l.file->tensors().size());
  uint64_t all = 0;
  for (const ds4::Tensor& t : l.file->tensors()) all += t.nbytes;
  EXPECT_EQ(total, all);
  ds4::lock_dense_weights(l.model);
}

TEST(Model, OtherFilesAreNamed) {
  const auto arch = [](const char* name) {
    W w = tiny();
    w.string("general.architecture", name);
    return message(w);
  };
  EXPECT_EQ(arch("deepseek41"), "FILE is a DeepSeek V4.1 model (architecture deepseek41), expected a DeepSeek V4 model (deepseek4)");
  EXPECT_EQ(arch("deepseek2"), "FILE is a DeepSeek V2 or V3 model (architecture deepseek2), expected a DeepSeek V4 model (deepseek4)");
  EXPECT_EQ(arch("llama"), "FILE is another model (architecture llama), expected a DeepSeek V4 model (deepseek4)");
  EXPECT_EQ(arch("clip"), "FILE is an image projector (architecture clip), expected a DeepSeek V4 model (deepseek4)");
  EXPECT_EQ(arch("deepseek4_mtp_support"),
            "FILE is an MTP support file, not a model on its own (architecture deepseek4_mtp_support), expected a DeepSeek V4 model (deepseek4)");
  for (const char* drafter : {"dflash", "dspark", "eagle3"})
    EXPECT_EQ(arch(drafter), std::string("FILE is a speculative-decoding drafter, not a model on its own (architecture ") + drafter +
                               "), expected a DeepSeek V4 model (deepseek4)");
  W w = tiny();
  w.erase("general.architecture");
  EXPECT_EQ(message(w), "FILE has no general.architecture, expected deepseek4");
  w = tiny();
  w.tensors.clear();
  EXPECT_EQ(message(w), "FILE has no tensors (a vocabulary only?), expected a whole model");
  w.f32_tensor("mtp.0.attn_norm.weight", {E});
  EXPECT_EQ(message(w), "FILE is an MTP support file (tensor mtp.0.attn_norm.weight), not a model on its own");
  w.tensors[0].name = "dspark.fc.weight";
  EXPECT_EQ(message(w), "FILE is a speculative-decoding drafter (tensor dspark.fc.weight), not a model on its own");
}

TEST(Model, UnsupportedTypesAreNamed) {
  W w = tiny();
  w.tensor("blk.1.attn_kv.weight").type = 40;
  EXPECT_EQ(message(w), "FILE: tensor blk.1.attn_kv.weight has type NVFP4 (40), which is not supported");
  w.tensor("blk.1.attn_kv.weight").type = 104;
  EXPECT_NE(message(w).find("FILE: tensor blk.1.attn_kv.weight has "), std::string::npos);
  EXPECT_NE(message(w).find("104"), std::string::npos);
  w.tensor("blk.1.attn_kv.weight").type = 0x7fffffff;
  EXPECT_EQ(message(w), "FILE: tensor blk.1.attn_kv.weight has unknown type 2147483647");
  w = tiny();
  w.tensor("blk.1.attn_kv.weight").type = 26;
  EXPECT_EQ(message(w), "FILE: tensor blk.1.attn_kv.weight has type I32, expected a float or quantised type");
  w = tiny();
  w.tensor("output_norm.weight").type = 26;
  EXPECT_EQ(message(w), "FILE: tensor output_norm.weight has type I32, expected a float or quantised type");
  w = tiny();
  w.tensor("blk.0.ffn_gate_tid2eid.weight").type = 0;
  EXPECT_EQ(message(w), "FILE: tensor blk.0.ffn_gate_tid2eid.weight has type F32, expected I32");
}

TEST(Model, EveryTensorIsNeededAndItsShapeChecked) {
  const W whole = tiny();
  for (const W::TensorInfo& t : whole.tensors) {
    W w = whole;
    w.erase_tensor(t.name);
    EXPECT_EQ(message(w).substr(0, t.name.size() + 25), "FILE: tensor " + t.name + " is missing,") << t.name;
    w = whole;                   // one row or element less
    W::TensorInfo& cut = w.tensor(t.name);
    cut.dims.back()--;
    if (cut.dims.back() == 0) cut.dims.back() = 2, cut.data += cut.data;
    const std::string s = message(w);
    EXPECT_NE(s.find("FILE: tensor " + t.name + " has dim["), std::string::npos) << s;
    EXPECT_NE(s.find(", expected "), std::string::npos) << s;
    w = whole;                   // one dimension more
    W::TensorInfo& deep = w.tensor(t.name);
    while (deep.dims.size() < 3) deep.dims.push_back(1);
    deep.dims.push_back(2);
    deep.data += deep.data;
    EXPECT_EQ(message(w), "FILE: tensor " + t.name + " has dim[3] = 2, expected 1 (no more dimensions)");
  }
  W w = whole;
  w.tensor("blk.1.attn_q_b.weight").dims[1] = H * D - 1;
  EXPECT_EQ(message(w), "FILE: tensor blk.1.attn_q_b.weight has dim[1] = 63, expected 64 (head_count x key_length)");
}

TEST(Model, MissingTensorsNameTheNearest) {
  W w = tiny();
  w.tensor("blk.1.attn_kv.weight").name = "blk.1.attn_kv_latent.weight";
  EXPECT_EQ(message(w), "FILE: tensor blk.1.attn_kv.weight is missing, nearest present name: blk.1.attn_kv_latent.weight");
  w = tiny();
  w.tensor("output.weight").name = "lm_head.weight";
  EXPECT_EQ(message(w), "FILE: tensor output.weight is missing, nearest present name: lm_head.weight");
  w = tiny();
  w.u32("deepseek4.block_count", 4);
  w.array<uint32_t>("deepseek4.attention.compress_ratios", W::U32, {0, 4, 128, 0});
  w.f32("deepseek4.swiglu_clamp_exp", 10);
  EXPECT_EQ(message(w), "FILE: tensor blk.3.hc_attn_fn.weight is missing: the file holds blk.0 to blk.2");
}

TEST(Model, ExpertIdsAreChecked) {
  for (int32_t bad : {-1, int32_t(NE), INT32_MAX, INT32_MIN}) {
    W w = tiny();
    w.tensor("blk.0.ffn_gate_tid2eid.weight").data.replace(4 * 7, 4, W::raw(bad));
    EXPECT_EQ(message(w), "FILE: tensor blk.0.ffn_gate_tid2eid.weight names expert " + std::to_string(bad) + " for token 3, expected 0 to 3");
  }
}

TEST(Model, BadSizes) {
  const auto with = [](const char* key, uint64_t value) {
    W w = tiny();
    w.set(std::string("deepseek4.") + key, W::U64, W::raw(value));
    return message(w);
  };
  const std::string prefix = "FILE: deepseek4.";
  for (const char* key : {"embedding_length", "vocab_size", "attention.head_count", "attention.key_length", "rope.dimension_count",
                          "attention.q_lora_rank", "attention.output_lora_rank", "attention.output_group_count", "attention.sliding_window",
                          "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k", "expert_count",
                          "expert_used_count", "expert_shared_count", "expert_feed_forward_length", "hyper_connection.count",
                          "hyper_connection.sinkhorn_iterations", "context_length", "rope.scaling.original_context_length"}) {
    EXPECT_EQ(with(key, 0), prefix + key + " is 0, expected 1 to 2147483647");
    EXPECT_EQ(with(key, uint64_t(1) << 40), prefix + key + " is 1099511627776, expected 1 to 2147483647");
  }
  EXPECT_EQ(with("block_count", 0), prefix + "block_count is 0, expected 1 to 3 (the file has blocks up to blk.2)");
  EXPECT_EQ(with("block_count", uint64_t(1) << 40), prefix + "block_count is 1099511627776, expected 1 to 3 (the file has blocks up to blk.2)");
  EXPECT_EQ(with("attention.head_count_kv", 8), prefix + "attention.head_count_kv is 8, expected 1 (one shared head)");
  EXPECT_EQ(with("attention.value_length", 8), prefix + "attention.value_length is 8, expected 16 (key_length)");
  EXPECT_EQ(with("expert_gating_func", 2), prefix + "expert_gating_func is 2, expected 4 (sqrt softplus)");
  EXPECT_EQ(with("expert_group_count", 8), prefix + "expert_group_count is 8, expected 0 or 1 (no groups)");
  EXPECT_EQ(with("attention.key_length", 65537), prefix + "attention.key_length is 65537, expected at most 65536");
  EXPECT_EQ(with("expert_used_count", 257), prefix + "expert_used_count is 257, expected at most 256");
  EXPECT_EQ(with("rope.dimension_count", 7), prefix + "rope.dimension_count is 7, expected an even number");
  EXPECT_EQ(with("rope.dimension_count", 16), prefix + "rope.dimension_count is 16, expected less than 16 (key_length)");
  EXPECT_EQ(with("attention.output_group_count", 3), prefix + "attention.output_group_count is 3, expected a divisor of 4 (head_count)");
  EXPECT_EQ(with("expert_used_count", 5), prefix + "expert_used_count is 5, expected at most 4 (expert_count)");
  EXPECT_EQ(with("hyper_connection.sinkhorn_iterations", 1001), prefix + "hyper_connection.sinkhorn_iterations is 1001, expected at most 1000");
  EXPECT_EQ(with("hyper_connection.count", 17), prefix + "hyper_connection.count is 17, expected at most 16");
  EXPECT_EQ(with("attention.indexer.key_length", 12), prefix + "attention.indexer.key_length is 12, expected a power of two");
  EXPECT_EQ(with("attention.indexer.key_length", 4), prefix + "attention.indexer.key_length is 4, expected at least 8 (rope.dimension_count)");
  EXPECT_EQ(with("hash_layer_count", 4), prefix + "hash_layer_count is 4, expected at most 3 (layers)");
  EXPECT_EQ(with("vocab_size", 9), prefix + "vocab_size is 9, but tokenizer.ggml.tokens has 8 entries");
  EXPECT_EQ(with("embedding_length", 64), "FILE: tensor token_embd.weight has dim[0] = 32, expected 64 (embedding_length)");
  EXPECT_EQ(with("expert_shared_count", INT32_MAX), prefix + "expert_shared_count is 2147483647, too many for experts of width 64");
  EXPECT_EQ(with("expert_shared_count", 2),
            "FILE: tensor blk.0.ffn_gate_shexp.weight has dim[1] = 64, expected 128 (expert_feed_forward_length x expert_shared_count)");
  W w = tiny();
  w.erase("deepseek4.attention.output_group_count");
  w.tensor("blk.0.attn_output_a.weight").dims = {48, 8};
  EXPECT_EQ(message(w), "FILE: tensor blk.0.attn_output_a.weight has dim[0] = 48, expected a divisor of 64 (head_count x key_length)");
  w = tiny();
  w.erase("deepseek4.attention.output_group_count");     // 2^32 groups of one
  w.tensor("blk.0.attn_output_a.weight").dims = {1, 384};
  for (const char* key : {"attention.head_count", "attention.key_length", "attention.value_length"}) w.u32(std::string("deepseek4.") + key, 1 << 16);
  EXPECT_EQ(message(w), prefix + "attention.output_group_count is 2147483647, expected a divisor of 65536 (head_count)");
  w = tiny();
  for (W::TensorInfo& t : w.tensors)
    if (t.name.substr(0, 4) == "blk.") t.name = t.name.substr(0, 6) + "nextn." + t.name.substr(6);
  EXPECT_EQ(message(w), "FILE: every block is an MTP block (blk.N.nextn.*), expected a whole model");
}

TEST(Model, BadNumbers) {
  const auto with = [](const char* key, float value) {
    W w = tiny();
    w.f32(std::string("deepseek4.") + key, value);
    return message(w);
  };
  const std::string prefix = "FILE: deepseek4.";
  for (const char* key : {"attention.layer_norm_rms_epsilon", "hyper_connection.epsilon", "expert_weights_scale", "rope.freq_base",
                          "attention.compress_rope_freq_base", "rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"})
    for (float bad : {NAN, HUGE_VALF, -1.0f}) EXPECT_EQ(with(key, bad).substr(0, prefix.size() + std::strlen(key)), prefix + key) << key << bad;
  EXPECT_EQ(with("rope.scaling.factor", 0.5f), prefix + "rope.scaling.factor is 0.5, expected 1 to 1e+09");
  EXPECT_EQ(with("rope.scaling.yarn_beta_slow", 30.5f), prefix + "rope.scaling.yarn_beta_slow is 30.5, expected at most 30 (yarn_beta_fast)");
  EXPECT_EQ(with("swiglu_clamp_exp", NAN), prefix + "swiglu_clamp_exp[0] is nan, expected a finite number");
  EXPECT_EQ(with("expert_count", 4), prefix + "expert_count is of type f32, expected an integer");
  W w = tiny();
  w.string("deepseek4.rope.scaling.type", "linear");
  EXPECT_EQ(message(w), prefix + "rope.scaling.type is linear, expected yarn");
  w = tiny();
  w.array<float>("deepseek4.swiglu_clamp_exp", W::F32, {1, 2});
  EXPECT_EQ(message(w), prefix + "swiglu_clamp_exp has 2 entries, expected 1 or at least 3 (layers)");
  w = tiny();
  w.array<uint32_t>("deepseek4.attention.compress_ratios", W::U32, {0, 4});
  EXPECT_EQ(message(w), prefix + "attention.compress_ratios has 2 entries, expected at least 3 (layers)");
  w.array<uint32_t>("deepseek4.attention.compress_ratios", W::U32, {0, 4, 64});
  EXPECT_EQ(message(w), prefix + "attention.compress_ratios[2] is 64, expected 0, 4 or 128");
  w.array<float>("deepseek4.attention.compress_ratios", W::F32, {0, 4, 128});
  EXPECT_EQ(message(w), prefix + "attention.compress_ratios is an array of f32, expected integers");
  w = tiny();
  w.u32("tokenizer.ggml.tokens", 1);
  EXPECT_EQ(message(w), "FILE: tokenizer.ggml.tokens is of type u32, expected an array of strings");
  w.strings("tokenizer.ggml.tokens", {});
  w.erase("deepseek4.vocab_size");
  EXPECT_EQ(message(w), "FILE: tokenizer.ggml.tokens has 0 entries, expected 1 or more");
}

}  // namespace model_test
