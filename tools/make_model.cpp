// make_model — writes a GGUF v3 file of architecture "deepseek4" filled with seeded random weights.
//
//   c++ -std=c++17 -O2 -ffp-contract=off -pthread make_model.cpp -o make_model
//   make_model --preset tiny-f32 -o tiny.gguf
//   make_model --preset slice --n-layer 5 -o slice.gguf          # the real Flash dimensions, 5 layers
//   make_model --preset micro-q --type down=Q4_K --layer-type 1:gate_up=IQ3_XXS -o x.gguf
//   make_model --list                                            # presets, roles, types, gains
//
// Every byte is a pure function of (seed, tensor name, position), so the same flags write the same
// file on any machine with any number of threads. Dense tensors (F32, F16, BF16) are normal
// samples. Block-quantised ones are random valid blocks whose scales are chosen so that the
// dequantised weights have the wanted standard deviation and (nearly) zero mean: no weight is ever
// quantised, which is why this runs as fast as the disk.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

// =============================================================================
// 1. TENSOR TYPES
// =============================================================================

// Mean square of first, first + step, ... (count values).
double mean_square(double first, int count, double step = 1) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += (first + i * step) * (first + i * step);
  return sum / count;
}
double mean_square(std::initializer_list<int> values) {
  double sum = 0;
  for (int v : values) sum += double(v) * v;
  return sum / double(values.size());
}

// clang-format off
enum TypeId : uint32_t {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12,
  Q5_K = 13, Q6_K = 14, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21,
  IQ2_S = 22, IQ4_XS = 23, I32 = 26, IQ1_M = 29, BF16 = 30, TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39,
};
// clang-format on

struct Type {
  const char* name;
  TypeId id;              // the number in the file
  uint32_t elems, bytes;  // per block
  double unit_ms = 0;     // mean square of one element of a random block whose scale is 1
  int scale_at = -1;      // byte offset of the f16 scale; -1: none, or not in one place
  double min_factor = 0;  // the f16 after the scale is min_factor * scale, which centres the block
};

const double kSigned4 = mean_square({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
const double kHalfOdd16 = mean_square(0.5, 16), kOdd8 = mean_square(1, 8, 2);
const double kGrid1 = 0.59418 + 0.125 * 0.125;  // IQ1 codebook and its +-1/8 shift

// The long constants are the mean squares of the codebooks.
// clang-format off
const Type kTypes[] = {
    {"F32", F32, 1, 4},
    {"F16", F16, 1, 2},
    {"Q4_0", Q4_0, 32, 18, mean_square(-8, 16), 0},
    {"Q4_1", Q4_1, 32, 20, mean_square(-7.5, 16), 0, -7.5},
    {"Q5_0", Q5_0, 32, 22, mean_square(-16, 32), 0},
    {"Q5_1", Q5_1, 32, 24, mean_square(-15.5, 32), 0, -15.5},
    {"Q8_0", Q8_0, 32, 34, mean_square(-127, 255), 0},
    {"Q2_K", Q2_K, 256, 84, mean_square(4, 12) * 1.25, 80, 1.5},
    {"Q3_K", Q3_K, 256, 110, mean_square(-32, 64) * mean_square(-4, 8), 108},
    {"Q4_K", Q4_K, 256, 144, mean_square(16, 48) * mean_square(-7.5, 16), 0, 7.5},
    {"Q5_K", Q5_K, 256, 176, mean_square(16, 48) * mean_square(-15.5, 32), 0, 15.5},
    {"Q6_K", Q6_K, 256, 210, mean_square(-128, 256) * mean_square(-32, 64), 208},
    {"IQ2_XXS", IQ2_XXS, 256, 66, kHalfOdd16 / 16 * 534.430, 0},
    {"IQ2_XS", IQ2_XS, 256, 74, kHalfOdd16 / 16 * 586.476, 0},
    {"IQ3_XXS", IQ3_XXS, 256, 98, kHalfOdd16 / 4 * 951.641, 0},
    {"IQ1_S", IQ1_S, 256, 50, kOdd8 * kGrid1, 0},
    {"IQ4_NL", IQ4_NL, 32, 18, kSigned4, 0},
    {"IQ3_S", IQ3_S, 256, 110, mean_square(1, 16, 2) * 57.672, 0},
    {"IQ2_S", IQ2_S, 256, 82, kHalfOdd16 / 16 * 596.842, 0},
    {"IQ4_XS", IQ4_XS, 256, 136, mean_square(-32, 64) * kSigned4, 0},
    {"I32", I32, 1, 4},
    {"IQ1_M", IQ1_M, 256, 56, kOdd8 * kGrid1},
    {"BF16", BF16, 1, 2},
    {"TQ1_0", TQ1_0, 256, 54, 2.0 / 3.0, 52},
    {"TQ2_0", TQ2_0, 256, 66, mean_square({-1, 0, 0, 1}), 64},
    {"MXFP4", MXFP4, 32, 17, mean_square({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12})},
};
// clang-format on

const Type* find_type(const std::string& name) {
  for (const Type& t : kTypes)
    if (name == t.name) return &t;
  return nullptr;
}
const Type* weight_type(const std::string& name) {
  const Type* t = find_type(name);
  if (!t || t->id == I32) fail("unknown weight type '" + name + "' (see --list)");
  return t;
}

// =============================================================================
// 2. RANDOM NUMBERS AND ROUNDING
// =============================================================================

uint64_t mix64(uint64_t z) {  // the output function of splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
uint64_t fnv1a64(const std::string& s) {
  uint64_t h = 0xCBF29CE484222325u;
  for (unsigned char c : s) h = (h ^ c) * 0x100000001B3u;
  return h;
}

// The stream of one tensor: word(i) = mix64(base + (i + 1) * golden). Bytes and u16 values are the
// little-endian pieces of consecutive words.
struct Stream {
  uint64_t base;
  Stream(uint64_t seed, const std::string& name) : base(mix64(seed) ^ fnv1a64(name)) {}
  uint64_t word(uint64_t i) const { return mix64(base + (i + 1) * 0x9E3779B97F4A7C15u); }
  uint16_t u16(uint64_t i) const { return uint16_t(word(i / 4) >> (i % 4 * 16)); }
};

// double -> half in one rounding, to nearest even; going through float would round twice.
uint16_t to_f16(double x) {
  uint64_t u;
  memcpy(&u, &x, 8);
  const uint16_t sign = uint16_t(u >> 48 & 0x8000);
  const double a = std::fabs(x);
  if (a < 0x1p-14) return uint16_t(sign | uint16_t(std::nearbyint(a * 0x1p24)));
  if (a >= 65520) return uint16_t(sign | 0x7C00);
  u = (u & ~(uint64_t(1) << 63)) - (uint64_t(1023 - 15) << 52);
  return uint16_t(sign | (u + (uint64_t(1) << 41) - 1 + (u >> 42 & 1)) >> 42);
}
double from_f16(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double a = e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
  return h & 0x8000 ? -a : a;
}
uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// normal()[u] = the standard normal quantile of (u + 0.5) / 65536, rounded to 1 / 65536, which
// hides last-bit differences between math libraries. Three Newton steps on erf after a rational start.
const std::vector<double>& normal() {
  static const std::vector<double> table = [] {
    std::vector<double> v(65536);
    for (int u = 32768; u < 65536; u++) {
      const double p = (u + 0.5) / 65536, t = std::sqrt(-2 * std::log(1 - p));
      double x = t - (2.515517 + 0.802853 * t + 0.010328 * t * t) /
                         (1 + 1.432788 * t + 0.189269 * t * t + 0.001308 * t * t * t);
      for (int step = 0; step < 3; step++)
        x -= (0.5 * (1 + std::erf(x / std::sqrt(2.0))) - p) / (std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI));
      v[size_t(u)] = std::nearbyint(x * 65536) / 65536;
      v[size_t(65535 - u)] = -v[size_t(u)];
    }
    return v;
  }();
  return table;
}

// =============================================================================
// 3. MODEL DESCRIPTION
// =============================================================================

// What a tensor is used for; the types of a preset go by role. attn: q_a q_b kv output_a output_b;
// indexer: indexer.attn_q_b; hc: every hc_*_fn.
const char* const kRoles[] = {"token_embd", "output", "attn", "shexp", "gate_up", "down", "router",
                              "comp", "ape", "indexer", "indexer_proj", "indexer_comp", "hc", "nextn"};
using RoleTypes = std::map<std::string, std::string>;

// clang-format off
// antirez's mix, and what llama.cpp's converter writes from the released checkpoint.
const RoleTypes kAntirez = {
    {"token_embd", "F16"}, {"output", "Q8_0"}, {"attn", "Q8_0"}, {"shexp", "Q8_0"}, {"gate_up", "IQ2_XXS"},
    {"down", "Q2_K"}, {"router", "F16"}, {"comp", "F16"}, {"ape", "F16"}, {"indexer", "F16"},
    {"indexer_proj", "F16"}, {"indexer_comp", "F16"}, {"hc", "F16"}, {"nextn", "Q8_0"}};
const RoleTypes kOfficial = {
    {"token_embd", "BF16"}, {"output", "BF16"}, {"attn", "Q8_0"}, {"shexp", "Q8_0"}, {"gate_up", "MXFP4"},
    {"down", "MXFP4"}, {"router", "BF16"}, {"comp", "BF16"}, {"ape", "F32"}, {"indexer", "Q8_0"},
    {"indexer_proj", "BF16"}, {"indexer_comp", "BF16"}, {"hc", "F32"}, {"nextn", "Q8_0"}};
// clang-format on

RoleTypes all_roles(const std::string& type) {
  RoleTypes types;
  for (const char* role : kRoles) types[role] = type;
  return types;
}

// clang-format off
// Output standard deviation of each projection for an input of unit rms.
const std::pair<const char*, double> kGains[] = {
    {"token_embd", 1.0}, {"output", 3.0}, {"q_a", 1.0}, {"q_b", 1.0}, {"kv", 1.0}, {"out_a", 2.0},
    {"out_b", 1.0}, {"shexp_in", 2.0}, {"shexp_down", 0.35}, {"exp_in", 4.0}, {"exp_down", 0.12},
    {"router", 1.5}, {"comp", 1.0}, {"comp_gate", 1.5}, {"ape", 1.0}, {"idx_q", 1.0}, {"idx_proj", 1.0},
    {"hc", 1.0}, {"nextn", 1.0}, {"sinks", 1.0}, {"probs_b", 0.2}, {"norm", 0.2}, {"hc_base", 1.0},
    {"hc_diag", 2.0}};
// clang-format on

struct Config {  // defaults: DeepSeek V4 Flash
  int64_t n_layer = 43, n_embd = 4096, n_vocab = 129280, n_head = 64, head_dim = 512, n_rot = 64,
          out_groups = 8, q_lora = 1024, o_lora = 1024, n_expert = 256, n_used = 6, n_shared = 1,
          ff_exp = 2048, hash_layers = 3, swa = 128, idx_heads = 64, idx_dim = 128, idx_top_k = 512,
          hc = 4, sinkhorn = 20, yarn_orig_ctx = 65536, context_length = 1048576;
  double rms_eps = 1e-6, hc_eps = 1e-6, rope_base = 10000, comp_rope_base = 160000, yarn_factor = 16,
         yarn_beta_fast = 32, yarn_beta_slow = 1, expert_scale = 1.5, swiglu_clamp = 10;
  std::vector<int64_t> ratios;  // one per layer: 0, 4 or 128
  RoleTypes types = kAntirez;
  std::map<std::pair<int64_t, std::string>, std::string> layer_types;
  std::map<std::string, double> gain{std::begin(kGains), std::end(kGains)};
  uint64_t seed = 1;
  std::string mtp = "none", name, out;
  unsigned threads = std::max(1u, std::thread::hardware_concurrency());
};

// clang-format off
const std::pair<const char*, int64_t Config::*> kDims[] = {
    {"n-layer", &Config::n_layer}, {"n-embd", &Config::n_embd}, {"n-vocab", &Config::n_vocab},
    {"n-head", &Config::n_head}, {"head-dim", &Config::head_dim}, {"n-rot", &Config::n_rot},
    {"out-groups", &Config::out_groups}, {"q-lora", &Config::q_lora}, {"o-lora", &Config::o_lora},
    {"n-expert", &Config::n_expert}, {"n-used", &Config::n_used}, {"n-shared", &Config::n_shared},
    {"ff-exp", &Config::ff_exp}, {"hash-layers", &Config::hash_layers}, {"swa", &Config::swa},
    {"idx-heads", &Config::idx_heads}, {"idx-dim", &Config::idx_dim}, {"idx-top-k", &Config::idx_top_k},
    {"hc", &Config::hc}, {"sinkhorn", &Config::sinkhorn}, {"yarn-orig-ctx", &Config::yarn_orig_ctx},
    {"context-length", &Config::context_length}};
const std::pair<const char*, double Config::*> kReals[] = {
    {"rms-eps", &Config::rms_eps}, {"hc-eps", &Config::hc_eps}, {"rope-base", &Config::rope_base},
    {"comp-rope-base", &Config::comp_rope_base}, {"yarn-factor", &Config::yarn_factor},
    {"yarn-beta-fast", &Config::yarn_beta_fast}, {"yarn-beta-slow", &Config::yarn_beta_slow},
    {"expert-scale", &Config::expert_scale}, {"swiglu-clamp", &Config::swiglu_clamp}};
// clang-format on

std::vector<int64_t> default_ratios(int64_t n_layer) {
  std::vector<int64_t> r;
  for (int64_t i = 0; i < n_layer; i++) r.push_back(i < 2 ? 0 : (i % 2 ? 128 : 4));
  return r;
}

// The smaller sublayer outputs of most presets ("calm"): against a larger residual stream int8
// rounding of activations does not grow chaotically over the layers.
void calm(Config& c) { c.gain["out_b"] = 0.3, c.gain["exp_down"] = 0.03, c.gain["shexp_down"] = 0.1; }

// Twelve indexer heads or more keep scores of exactly 0 (every head cut off by the ReLU) rare;
// equal scores would leave the choice of rows open.
void shrink(Config& c) {
  c.n_layer = 6, c.n_embd = 64, c.n_vocab = 272, c.n_head = 4, c.head_dim = 96, c.n_rot = 32, c.out_groups = 2;
  c.q_lora = 32, c.o_lora = 16, c.n_expert = 6, c.n_used = 2, c.ff_exp = 32, c.hash_layers = 2, c.swa = 16;
  c.idx_heads = 12, c.idx_dim = 64, c.idx_top_k = 8;
  c.ratios = {0, 0, 4, 128, 4, 128};
}
void shrink_256(Config& c) {  // rows of 256 for the K and IQ formats
  shrink(c), calm(c);
  c.n_embd = 256, c.ff_exp = 256, c.n_expert = 4, c.head_dim = 160, c.idx_dim = 128;
}

// clang-format off
struct Preset { const char* name; void (*apply)(Config&); };
const Preset kPresets[] = {
    {"flash", calm},                                     // all 43 layers: about 80 GB
    {"micro-q", [](Config& c) {                          // the three attention kinds, for format sweeps
       shrink_256(c), c.n_expert = 3, c.n_layer = 3, c.ratios = {0, 4, 128}, c.hash_layers = 1; }},
    {"slice", [](Config& c) { calm(c), c.n_layer = 5; }},
    {"slice-mxfp4", [](Config& c) { calm(c), c.n_layer = 5, c.types = kOfficial; }},
    {"tiny-ds4", [](Config& c) {
       shrink_256(c), c.n_head = 8, c.head_dim = 192, c.n_rot = 64, c.out_groups = 4, c.q_lora = 64;
       c.o_lora = 32, c.hash_layers = 3, c.idx_heads = 16; }},
    {"tiny-f32", [](Config& c) { shrink(c), c.types = all_roles("F32"); }},
    {"tiny-mxfp4", [](Config& c) { shrink(c), calm(c), c.types = kOfficial; }},
    {"tiny-pro", [](Config& c) {                         // as V4 Pro: compressed from layer 0
       shrink(c), c.types = all_roles("F32"), c.n_layer = 4, c.ratios = {128, 128, 4, 128};
       c.hash_layers = 1, c.n_used = 3, c.expert_scale = 2.5, c.out_groups = 4; }},
};

enum class Fill { Weights, HcBase, HcScale, ExpertIds };  // HcBase: normal, the square part's diagonal raised
// clang-format on

struct Tensor {
  std::string name;
  std::vector<int64_t> dims;  // fastest first
  const Type* type;
  Fill fill;
  double std, mean;
  uint64_t unit_bytes, n_units, offset = 0;  // unit: element, block or row of expert ids
  uint64_t nbytes() const { return unit_bytes * n_units; }
};

// Lists the tensors of a model in file order.
class Builder {
 public:
  explicit Builder(const Config& config) : c(config) {}

  std::vector<Tensor> build() {
    if (c.mtp == "ds4") {  // the separate support file: mtp.0.* only
      block(0, 0, false, "mtp.0.");
      weight("mtp.0.e_proj.weight", {c.n_embd, c.n_embd}, "nextn", "nextn", 0);
      weight("mtp.0.h_proj.weight", {c.n_embd, c.n_embd}, "nextn", "nextn", 0);
      for (const char* s : {"enorm", "hnorm", "norm"}) norm(std::string("mtp.0.") + s + ".weight", c.n_embd);
      head("mtp.0.hc_head", 0);
      return list;
    }
    add("token_embd.weight", {c.n_embd, c.n_vocab}, type("token_embd", -1), Fill::Weights, gain("token_embd"));
    for (int64_t il = 0; il < c.n_layer; il++)
      block(il, c.ratios[size_t(il)], il < c.hash_layers, "blk." + std::to_string(il) + ".");
    norm("output_norm.weight", c.n_embd);
    weight("output.weight", {c.n_embd, c.n_vocab}, "output", "output", -1);
    head("output_hc", -1);
    if (c.mtp == "llama") {  // one more block in the same file
      const std::string p = "blk." + std::to_string(c.n_layer) + ".";
      block(c.n_layer, 0, false, p);
      weight(p + "nextn.eh_proj.weight", {2 * c.n_embd, c.n_embd}, "nextn", "nextn", c.n_layer);
      for (const char* s : {"enorm", "hnorm", "shared_head_norm"}) norm(p + "nextn." + s + ".weight", c.n_embd);
    }
    return list;
  }

 private:
  using Dims = std::vector<int64_t>;
  const Config& c;
  std::vector<Tensor> list;

  double gain(const char* name) const { return c.gain.at(name); }
  const Type* type(const char* role, int64_t il) const {
    const auto it = c.layer_types.find({il, role});
    return weight_type(it != c.layer_types.end() ? it->second : c.types.at(role));
  }

  void add(const std::string& name, Dims dims, const Type* t, Fill fill, double std, double mean = 0) {
    if (dims[0] % t->elems)
      fail(name + ": row length " + std::to_string(dims[0]) + " is not a multiple of the " + t->name + " block (" +
           std::to_string(t->elems) + ")");
    uint64_t n = 1;
    for (int64_t d : dims) n *= uint64_t(d);
    uint64_t unit = t->bytes, n_units = n / t->elems;
    if (fill == Fill::ExpertIds) unit = uint64_t(dims[0]) * 4, n_units = uint64_t(dims[1]);
    list.push_back({name, std::move(dims), t, fill, std, mean, unit, n_units});
  }
  // w [dims[1]][dims[0]] that maps an input of unit rms to outputs of standard deviation gain.
  void weight(const std::string& name, Dims dims, const char* role, const char* gain_name, int64_t il) {
    const double std = gain(gain_name) / std::sqrt(double(dims[0]));
    add(name, std::move(dims), type(role, il), Fill::Weights, std);
  }
  void vec(const std::string& name, int64_t n, double std, double mean) {
    add(name, {n}, find_type("F32"), Fill::Weights, std, mean);
  }
  void norm(const std::string& name, int64_t n) { vec(name, n, gain("norm"), 1); }

  void head(const std::string& p, int64_t il) {  // the hyper-connection that closes the stack
    weight(p + "_fn.weight", {c.hc * c.n_embd, c.hc}, "hc", "hc", il);
    vec(p + "_base.weight", c.hc, gain("hc_base"), 0);
    add(p + "_scale.weight", {1}, find_type("F32"), Fill::HcScale, 0);
  }
  void hyper_connection(const std::string& p, int64_t il) {
    const int64_t mix = (2 + c.hc) * c.hc;
    weight(p + "_fn.weight", {c.hc * c.n_embd, mix}, "hc", "hc", il);
    add(p + "_scale.weight", {3}, find_type("F32"), Fill::HcScale, 0);
    add(p + "_base.weight", {mix}, find_type("F32"), Fill::HcBase, gain("hc_base"), gain("hc_diag"));
  }
  void compressor(const std::string& p, int64_t width, int64_t head, int64_t ratio, const char* role, int64_t il) {
    weight(p + "_kv.weight", {c.n_embd, width}, role, "comp", il);
    weight(p + "_gate.weight", {c.n_embd, width}, role, "comp_gate", il);
    add(p + "_ape.weight", {width, ratio}, type("ape", il), Fill::Weights, gain("ape"));
    norm(p + "_norm.weight", head);
  }

  void block(int64_t il, int64_t ratio, bool hash_routed, const std::string& p) {
    const int64_t E = c.n_embd, D = c.head_dim, F = c.ff_exp, G = c.out_groups, X = c.n_expert;
    hyper_connection(p + "hc_attn", il);
    norm(p + "attn_norm.weight", E);
    weight(p + "attn_q_a.weight", {E, c.q_lora}, "attn", "q_a", il);
    norm(p + "attn_q_a_norm.weight", c.q_lora);
    weight(p + "attn_q_b.weight", {c.q_lora, c.n_head * D}, "attn", "q_b", il);
    weight(p + "attn_kv.weight", {E, D}, "attn", "kv", il);
    norm(p + "attn_kv_a_norm.weight", D);
    vec(p + "attn_sinks.weight", c.n_head, gain("sinks"), 0);
    weight(p + "attn_output_a.weight", {D * (c.n_head / G), G * c.o_lora}, "attn", "out_a", il);
    weight(p + "attn_output_b.weight", {G * c.o_lora, E}, "attn", "out_b", il);
    if (ratio) compressor(p + "attn_compressor", ratio == 4 ? 2 * D : D, D, ratio, "comp", il);
    if (ratio == 4) {
      weight(p + "indexer.attn_q_b.weight", {c.q_lora, c.idx_heads * c.idx_dim}, "indexer", "idx_q", il);
      weight(p + "indexer.proj.weight", {E, c.idx_heads}, "indexer_proj", "idx_proj", il);
      compressor(p + "indexer_compressor", 2 * c.idx_dim, c.idx_dim, ratio, "indexer_comp", il);
    }
    hyper_connection(p + "hc_ffn", il);
    norm(p + "ffn_norm.weight", E);
    weight(p + "ffn_gate_inp.weight", {E, X}, "router", "router", il);
    if (hash_routed)
      add(p + "ffn_gate_tid2eid.weight", {c.n_used, c.n_vocab}, find_type("I32"), Fill::ExpertIds, 0);
    else
      vec(p + "exp_probs_b.bias", X, gain("probs_b"), 0);
    weight(p + "ffn_gate_exps.weight", {E, F, X}, "gate_up", "exp_in", il);
    weight(p + "ffn_up_exps.weight", {E, F, X}, "gate_up", "exp_in", il);
    weight(p + "ffn_down_exps.weight", {F, E, X}, "down", "exp_down", il);
    weight(p + "ffn_gate_shexp.weight", {E, F * c.n_shared}, "shexp", "shexp_in", il);
    weight(p + "ffn_up_shexp.weight", {E, F * c.n_shared}, "shexp", "shexp_in", il);
    weight(p + "ffn_down_shexp.weight", {F * c.n_shared, E}, "shexp", "shexp_down", il);
  }
};

// =============================================================================
// 4. TENSOR DATA
// =============================================================================

// Makes any piece of one tensor. Pieces begin at multiples of 8 units, so at whole random words.
class Maker {
 public:
  Maker(const Config& config, const Tensor& tensor)
      : c(config), t(tensor), id(tensor.type->id), random(config.seed, tensor.name) {
    if (t.fill != Fill::Weights) return;
    if (t.type->elems > 1) prepare_blocks();
    if (id != F16 && id != BF16) return;
    samples.resize(65536);
    for (size_t u = 0; u < 65536; u++) {
      const double v = normal()[u] * t.std + t.mean;
      samples[u] = id == F16 ? to_f16(v) : to_bf16(float(v));
    }
  }

  // Writes units [first, first + count) to out, which has room for 8 bytes more.
  void make(uint64_t first, uint64_t count, uint8_t* out) const {
    if (t.fill == Fill::ExpertIds) return expert_ids(first, count, out);
    if (id == F32) return floats(first, count, out);
    const uint64_t word0 = first * t.unit_bytes / 8, n_words = (count * t.unit_bytes + 7) / 8;
    if (t.type->elems == 1) {
      for (uint64_t i = 0; i < n_words; i++) {
        uint64_t w = random.word(word0 + i);
        w = uint64_t(samples[w & 0xFFFF]) | uint64_t(samples[w >> 16 & 0xFFFF]) << 16 |
            uint64_t(samples[w >> 32 & 0xFFFF]) << 32 | uint64_t(samples[w >> 48]) << 48;
        memcpy(out + 8 * i, &w, 8);
      }
      return;
    }
    for (uint64_t i = 0; i < n_words; i++) {
      const uint64_t w = random.word(word0 + i);
      memcpy(out + 8 * i, &w, 8);
    }
    for (uint64_t i = 0; i < count; i++) finish_block(out + i * t.unit_bytes);
  }

 private:
  const Config& c;
  const Tensor& t;
  const TypeId id;
  const Stream random;
  std::vector<uint16_t> samples;             // F16, BF16: one per u16
  std::array<uint16_t, 256> scale, minimum;  // blocks: f16 by random byte
  int exponent = 0;                          // MXFP4: the middle one of three

  // The scales spread evenly over [0.75, 1.25] * d: 1.0209 in mean square.
  void prepare_blocks() {
    const double d = t.std / std::sqrt(t.type->unit_ms * 1.0209);
    for (size_t i = 0; i < 256; i++) {
      scale[i] = to_f16(d * (0.75 + double(i) / 510));
      minimum[i] = to_f16(t.type->min_factor * from_f16(scale[i]));
    }
    exponent = int(std::nearbyint(std::log2(d / std::sqrt(1.75)))) + 128;  // value = fp4x2 * 2^(e-128)
  }

  void floats(uint64_t first, uint64_t count, uint8_t* out) const {
    const std::vector<double>& n01 = normal();
    const uint64_t hc = uint64_t(c.hc);
    uint64_t w = 0;
    for (uint64_t k = first; k < first + count; k++, w >>= 16) {
      if (k % 4 == 0) w = random.word(k / 4);
      double v = t.fill == Fill::HcScale ? 0.5 + double(w & 0xFFFF) / 65536 : n01[w & 0xFFFF] * t.std;
      if (t.fill == Fill::Weights) v += t.mean;
      if (t.fill == Fill::HcBase && k >= 2 * hc && (k - 2 * hc) % (hc + 1) == 0) v += t.mean;
      const float f = float(v);
      memcpy(out + 4 * (k - first), &f, 4);
    }
  }

  // n_used different experts per token: those with the smallest of n_expert random keys, in order.
  void expert_ids(uint64_t first, uint64_t count, uint8_t* out) const {
    const uint64_t n = uint64_t(c.n_expert);
    const size_t used = size_t(c.n_used);
    std::vector<std::pair<uint64_t, int32_t>> best(used);
    for (uint64_t token = first; token < first + count; token++) {
      size_t have = 0;
      for (uint64_t e = 0; e < n; e++) {
        const uint64_t key = random.word(token * n + e);
        if (have == used && key >= best[used - 1].first) continue;
        size_t at = have < used ? have++ : used - 1;
        for (; at && best[at - 1].first > key; at--) best[at] = best[at - 1];
        best[at] = {key, int32_t(e)};
      }
      for (size_t i = 0; i < used; i++) memcpy(out + ((token - first) * used + i) * 4, &best[i].second, 4);
    }
  }

  // Turns random bytes into a block with a sensible scale.
  void finish_block(uint8_t* b) const {
    if (id == IQ1_M) {  // the scale lies in the top nibbles of four u16
      const uint16_t d = scale[b[49]];
      for (int k = 0; k < 4; k++) b[49 + 2 * k] = uint8_t((b[49 + 2 * k] & 15) | (d >> (4 * k) & 15) << 4);
      return;
    }
    if (id == MXFP4) {
      b[0] = uint8_t(std::clamp(exponent - 1 + b[0] % 3, 1, 254));
      return;
    }
    uint8_t* at = b + t.type->scale_at;
    const uint8_t choice = *at;
    memcpy(at, &scale[choice], 2);
    if (t.type->min_factor != 0) memcpy(at + 2, &minimum[choice], 2);
    if (id == Q8_0) {
      for (int i = 2; i < 34; i++) b[i] = uint8_t(b[i] + (b[i] == 0x80));  // never -128, as a real quantiser
    } else if (id == Q2_K) {                                               // minimum = scale, one less or one more
      for (int i = 0; i < 16; i++) {
        const int s = 4 + b[i] % 12, m = std::clamp(s + b[i] / 12 % 3 - 1, 0, 15);
        b[i] = uint8_t(s | m << 4);
      }
    } else if (id == Q4_K || id == Q5_K) {
      uint8_t s[8], m[8];
      for (int i = 0; i < 8; i++) {
        s[i] = uint8_t(16 + b[4 + i] % 48);
        m[i] = uint8_t(std::clamp(s[i] + b[4 + i] / 48 % 3 - 1, 0, 63));
      }
      for (int i = 0; i < 4; i++) {  // 6-bit packing of eight scales and minimums
        b[4 + i] = uint8_t(s[i] | (s[i + 4] >> 4) << 6);
        b[8 + i] = uint8_t(m[i] | (m[i + 4] >> 4) << 6);
        b[12 + i] = uint8_t((s[i + 4] & 15) | (m[i + 4] & 15) << 4);
      }
    } else if (id == TQ2_0) {  // code 3 does not exist: make it 1
      for (int i = 0; i < 64; i++) b[i] = uint8_t(b[i] & ~(b[i] & b[i] << 1 & 0xAA));
    }
  }
};

// =============================================================================
// 5. TOKENIZER
// =============================================================================

struct Vocabulary {
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> types;  // 1 normal, 3 control, 4 user defined, 5 unused
};

std::string utf8(uint32_t cp) {  // cp < 0x800
  if (cp < 0x80) return std::string(1, char(cp));
  return {char(0xC0 | cp >> 6), char(0x80 | (cp & 63))};
}
size_t n_chars(const std::string& s) {
  return size_t(std::count_if(s.begin(), s.end(), [](char ch) { return (ch & 0xC0) != 0x80; }));
}

// A byte-level BPE vocabulary: 256 bytes, some English merges, then pairs, triples and quadruples of
// common characters until n_vocab is reached, with the special tokens of the family at the end.
Vocabulary make_vocabulary(size_t n_vocab) {
  std::array<std::string, 256> alphabet;  // GPT-2's printable stand-in for each byte
  for (uint32_t b = 0, next = 256; b < 256; b++)
    alphabet[b] = utf8((b > 32 && b < 127) || (b > 160 && b < 173) || b > 173 ? b : next++);
  const std::vector<std::string> special = {"<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"};
  const size_t need = 3 + 256 + special.size();
  if (n_vocab < need) fail("n_vocab must be at least " + std::to_string(need));
  const size_t last = n_vocab - special.size();

  Vocabulary v;
  v.tokens = {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"};
  v.tokens.insert(v.tokens.end(), alphabet.begin(), alphabet.end());
  v.types.assign(v.tokens.size(), 1);
  v.types[0] = v.types[1] = v.types[2] = 3;
  std::set<std::string> have(v.tokens.begin(), v.tokens.end());
  const auto add = [&](const std::string& a, const std::string& b) {
    if (v.tokens.size() >= last || !have.count(a) || !have.count(b) || have.count(a + b)) return;
    v.merges.push_back(a + " " + b);
    v.tokens.push_back(a + b);
    v.types.push_back(1);
    have.insert(a + b);
  };
  for (const char* m : {"Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "e n", "o r",
                        "Ġ w", "Ġ o", "i s", "i t", "Ġ c", "e s", "a n", "Ġ b", "Ġ f", "o u", "in g", "Ġ p",
                        "e d", "a l", "a r", "Ġo f", "Ġa n", "Ġan d", "Ġ d", "Ġ m", "i c", "l e", "Ġt o", "o m",
                        "Ġi n", "Ġ h", "en t", "Ġ l", "r o", "s t"})
    add(std::string(m, strchr(m, ' ')), strchr(m, ' ') + 1);
  std::vector<std::string> letters;
  for (unsigned char ch : std::string(" etaoinshrdlucmfwypvbgkqjxz.,'-0123456789ETAOINSHRDLUCMFWYPVBGKQJXZ"))
    letters.push_back(alphabet[ch]);
  std::vector<std::string> stems = letters;
  for (size_t length = 2; length <= 4 && v.tokens.size() < last; length++) {
    for (const std::string& a : stems)
      for (const std::string& b : letters) add(a, b);
    stems.clear();
    for (size_t i = 259; i < v.tokens.size(); i++)
      if (n_chars(v.tokens[i]) == length) stems.push_back(v.tokens[i]);
  }
  while (v.tokens.size() < last) {
    v.tokens.push_back("<｜place▁holder▁no▁" + std::to_string(v.tokens.size()) + "｜>");
    v.types.push_back(5);
  }
  for (const std::string& s : special) {
    v.tokens.push_back(s);
    v.types.push_back(s.back() == '>' && s.find("think") != std::string::npos ? 4 : 3);
  }
  return v;
}

// =============================================================================
// 6. THE FILE
// =============================================================================

// Little-endian bytes; the metadata calls count their entries.
struct Header {
  std::string bytes;
  uint64_t n_entries = 0;
  std::string prefix;  // put before every key

  template <class T>
  void raw(T v) { bytes.append(reinterpret_cast<const char*>(&v), sizeof v); }
  void text(const std::string& s) { raw(uint64_t(s.size())), bytes += s; }
  void key(const std::string& k, uint32_t type) { text(prefix + k), raw(type), n_entries++; }

  void u32(const std::string& k, int64_t v) { key(k, 4), raw(uint32_t(v)); }
  void u32s(std::initializer_list<std::pair<const char*, int64_t>> entries) {
    for (const auto& [k, v] : entries) u32(k, v);
  }
  void f32(const std::string& k, double v) { key(k, 6), raw(float(v)); }
  void flag(const std::string& k, bool v) { key(k, 7), raw(uint8_t(v)); }
  void string(const std::string& k, const std::string& v) { key(k, 8), text(v); }
  void array(const std::string& k, uint32_t type, size_t n) { key(k, 9), raw(type), raw(uint64_t(n)); }
};

Header make_metadata(const Config& c) {
  Header h;
  const int64_t n_all = c.n_layer + (c.mtp == "llama");
  h.string("general.architecture", c.mtp == "ds4" ? "deepseek4_mtp_support" : "deepseek4");
  h.string("general.name", c.name);
  h.u32("general.quantization_version", 2);
  h.u32("general.alignment", 32);
  h.prefix = "deepseek4.";
  // clang-format off
  h.u32s({{"block_count", n_all}, {"context_length", c.context_length}, {"embedding_length", c.n_embd},
          {"vocab_size", c.n_vocab}, {"attention.head_count", c.n_head}, {"attention.head_count_kv", 1},
          {"attention.key_length", c.head_dim}, {"attention.value_length", c.head_dim},
          {"rope.dimension_count", c.n_rot}, {"attention.q_lora_rank", c.q_lora},
          {"attention.output_lora_rank", c.o_lora}, {"attention.output_group_count", c.out_groups},
          {"attention.sliding_window", c.swa}, {"attention.indexer.head_count", c.idx_heads},
          {"attention.indexer.key_length", c.idx_dim}, {"attention.indexer.top_k", c.idx_top_k}});
  h.f32("attention.layer_norm_rms_epsilon", c.rms_eps);
  h.f32("attention.compress_rope_freq_base", c.comp_rope_base);
  h.array("attention.compress_ratios", 4, size_t(n_all));
  for (int64_t i = 0; i < n_all; i++) h.raw(uint32_t(i < c.n_layer ? c.ratios[size_t(i)] : 0));
  h.u32s({{"expert_count", c.n_expert}, {"expert_used_count", c.n_used}, {"expert_shared_count", c.n_shared},
          {"expert_feed_forward_length", c.ff_exp}, {"expert_group_count", 0}, {"expert_group_used_count", 0},
          {"expert_gating_func", 4}});
  h.f32("expert_weights_scale", c.expert_scale);
  h.flag("expert_weights_norm", true);
  h.array("swiglu_clamp_exp", 6, size_t(n_all));
  for (int64_t i = 0; i < n_all; i++) h.raw(float(c.swiglu_clamp));
  h.u32s({{"hash_layer_count", c.hash_layers}, {"hyper_connection.count", c.hc},
          {"hyper_connection.sinkhorn_iterations", c.sinkhorn}});
  h.f32("hyper_connection.epsilon", c.hc_eps);
  h.f32("rope.freq_base", c.rope_base);
  h.string("rope.scaling.type", "yarn");
  h.f32("rope.scaling.factor", c.yarn_factor);
  h.u32("rope.scaling.original_context_length", c.yarn_orig_ctx);
  h.f32("rope.scaling.yarn_beta_fast", c.yarn_beta_fast);
  h.f32("rope.scaling.yarn_beta_slow", c.yarn_beta_slow);
  // clang-format on
  if (c.mtp == "llama") h.u32("nextn_predict_layers", 1);
  if (c.mtp == "ds4") return h;

  const Vocabulary v = make_vocabulary(size_t(c.n_vocab));
  h.prefix = "tokenizer.ggml.";
  h.string("model", "gpt2");
  h.string("pre", "joyai-llm");
  h.array("tokens", 8, v.tokens.size());
  for (const std::string& s : v.tokens) h.text(s);
  h.array("token_type", 5, v.types.size());
  for (int32_t t : v.types) h.raw(t);
  h.array("merges", 8, v.merges.size());
  for (const std::string& s : v.merges) h.text(s);
  h.u32("bos_token_id", 0);
  h.u32("eos_token_id", 1);
  h.u32("padding_token_id", 2);
  h.flag("add_bos_token", true);
  h.flag("add_eos_token", false);
  return h;
}

class OutputFile {
 public:
  explicit OutputFile(const std::string& path) : path_(path) {
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (fd_ < 0) fail(path + ": " + strerror(errno));
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() {  // leaves no half model, but removes nothing that is not a file
    struct stat st;
    if (fd_ >= 0 && fstat(fd_, &st) == 0 && S_ISREG(st.st_mode)) unlink(path_.c_str());
    if (fd_ >= 0) close(fd_);
  }
  void write(const void* data, uint64_t n, uint64_t offset) const {
    for (auto p = static_cast<const char*>(data); n;) {
      const ssize_t k = pwrite(fd_, p, size_t(n), off_t(offset));
      if (k < 0 && errno == EINTR) continue;
      if (k <= 0) fail(path_ + ": " + strerror(errno));
      p += k, n -= uint64_t(k), offset += uint64_t(k);
    }
  }
  void finish(uint64_t size) {  // gaps are the zero padding
    if (ftruncate(fd_, off_t(size)) || close(std::exchange(fd_, -1))) fail(path_ + ": " + strerror(errno));
  }

 private:
  std::string path_;
  int fd_ = -1;
};

// Generates the tensor in pieces of about 32 MiB and writes it at its place, on all threads; large pieces leave it in large pages.
void write_tensor(const Config& c, const Tensor& t, const OutputFile& file, uint64_t file_offset) {
  const Maker maker(c, t);
  const uint64_t piece = std::max<uint64_t>(8, (32u << 20) / t.unit_bytes / 8 * 8);
  const uint64_t n_pieces = (t.n_units + piece - 1) / piece;
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      std::vector<uint8_t> buffer(size_t(std::min(piece, t.n_units) * t.unit_bytes + 8));
      for (uint64_t i; (i = next++) < n_pieces;) {
        const uint64_t first = i * piece, count = std::min(piece, t.n_units - first);
        maker.make(first, count, buffer.data());
        file.write(buffer.data(), count * t.unit_bytes, file_offset + first * t.unit_bytes);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      error = std::current_exception();
    }
  };
  std::vector<std::thread> pool;
  for (unsigned i = 1; i < std::min<uint64_t>(c.threads, n_pieces); i++) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  if (error) std::rethrow_exception(error);
}

void write_model(const Config& c) {
  const auto start = std::chrono::steady_clock::now();
  const auto align = [](uint64_t n) { return (n + 31) / 32 * 32; };
  std::vector<Tensor> tensors = Builder(c).build();
  const Header meta = make_metadata(c);
  Header head;
  head.bytes = "GGUF";
  head.raw(uint32_t(3)), head.raw(uint64_t(tensors.size())), head.raw(meta.n_entries);
  head.bytes += meta.bytes;
  uint64_t offset = 0;
  for (Tensor& t : tensors) {
    t.offset = offset, offset += align(t.nbytes());
    head.text(t.name), head.raw(uint32_t(t.dims.size()));
    for (int64_t d : t.dims) head.raw(uint64_t(d));
    head.raw(uint32_t(t.type->id)), head.raw(t.offset);
  }
  const uint64_t data = align(head.bytes.size());
  OutputFile file(c.out);
  file.write(head.bytes.data(), head.bytes.size(), 0);
  for (const Tensor& t : tensors) write_tensor(c, t, file, data + t.offset);
  file.finish(data + offset);
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("%s: %zu tensors, %.2f MiB, %.1f s\n", c.out.c_str(), tensors.size(), double(data + offset) / 1048576, s);
}

// =============================================================================
// 7. COMMAND LINE
// =============================================================================

template <class T, class F>
void print_list(const char* title, const T& items, F name) {
  printf("%s:", title);
  const char* separator = " ";
  for (const auto& item : items) printf("%s%s", std::exchange(separator, ", "), name(item).c_str());
  printf("\n");
}
void print_lists() {
  print_list("presets", kPresets, [](const Preset& p) { return std::string(p.name); });
  print_list("roles  ", kRoles, [](const char* r) { return std::string(r); });
  print_list("types  ", kTypes, [](const Type& t) { return std::string(t.name); });
  print_list("gains  ", kGains, [](const std::pair<const char*, double>& g) {
    char s[64];
    snprintf(s, sizeof s, "%s=%g", g.first, g.second);
    return std::string(s);
  });
}
void print_help() {
  printf(
      "make_model [options] -o FILE     random-weight deepseek4 GGUF, the same bytes for the same options\n"
      "  --preset NAME (tiny-f32)  --seed N (1)  --name TEXT  --threads N  --list\n"
      "  --ratios A,B,...   compress ratio per layer: 0, 4 or 128 (sets the number of layers)\n"
      "  --all-types TYPE   --type ROLE=TYPE   --layer-type LAYER:ROLE=TYPE   --gain NAME=VALUE\n"
      "  --mtp none|llama|ds4   llama: one nextn block in the file; ds4: only the mtp.0.* support file\n ");
  for (const auto& d : kDims) printf(" --%s", d.first);
  for (const auto& r : kReals) printf(" --%s", r.first);
  printf("\n");
}

int64_t to_int(const std::string& option, const std::string& s, int64_t low, int64_t high) {
  char* end;
  errno = 0;
  const long long v = strtoll(s.c_str(), &end, 10);
  if (s.empty() || *end || errno || v < low || v > high) fail(option + ": '" + s + "' is not a number in range");
  return v;
}
double to_real(const std::string& option, const std::string& s) {
  char* end;
  const double v = strtod(s.c_str(), &end);
  if (s.empty() || *end || !std::isfinite(v)) fail(option + ": '" + s + "' is not a number");
  return v;
}
// "a=b" -> {a, b}
std::pair<std::string, std::string> split(const std::string& option, const std::string& s, char separator) {
  const size_t at = s.find(separator);
  if (at == std::string::npos) fail(option + ": '" + s + "' has no '" + separator + "'");
  return {s.substr(0, at), s.substr(at + 1)};
}
std::pair<std::string, std::string> role_and_type(const std::string& option, const std::string& s) {
  const auto rt = split(option, s, '=');
  if (std::find(std::begin(kRoles), std::end(kRoles), rt.first) == std::end(kRoles))
    fail(option + ": unknown role '" + rt.first + "' (see --list)");
  weight_type(rt.second);
  return rt;
}

using Options = std::vector<std::pair<std::string, std::string>>;

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i++) {
    std::string option = argv[i], value;
    const size_t equals = option.find('=');
    if (option == "--list" || option == "--help" || option == "-h") {
    } else if (option.compare(0, 2, "--") == 0 && equals != std::string::npos) {
      value = option.substr(equals + 1), option.resize(equals);
    } else if (++i < argc) {
      value = argv[i];
    } else {
      fail(option + " needs a value");
    }
    options.emplace_back(option, value);
  }
  return options;
}

// A preset first, then dimensions and types in the order given; --all-types goes before every --type.
Config make_config(const Options& options) {
  Config c;
  constexpr int64_t kMax32 = (int64_t(1) << 32) - 1;
  std::string preset = "tiny-f32";
  for (const auto& o : options)
    if (o.first == "--preset") preset = o.second;
  const auto p = std::find_if(std::begin(kPresets), std::end(kPresets), [&](const Preset& x) { return preset == x.name; });
  if (p == std::end(kPresets)) fail("unknown preset '" + preset + "' (see --list)");
  p->apply(c);
  bool layers_given = false, ratios_given = false;
  for (const auto& o : options)
    if (o.first == "--all-types") weight_type(o.second), c.types = all_roles(o.second);
  for (const auto& [option, value] : options) {
    bool known = option == "--preset" || option == "--all-types";
    for (const auto& d : kDims)
      if (option == std::string("--") + d.first) {
        const bool may_be_0 = d.second == &Config::hash_layers || d.second == &Config::n_layer;
        c.*d.second = to_int(option, value, !may_be_0, kMax32), known = true;
      }
    for (const auto& r : kReals)
      if (option == std::string("--") + r.first) c.*r.second = to_real(option, value), known = true;
    if (option == "--n-layer") {
      layers_given = true;
    } else if (option == "-o" || option == "--out") {
      c.out = value;
    } else if (option == "--seed") {
      c.seed = uint64_t(to_int(option, value, INT64_MIN, INT64_MAX));
    } else if (option == "--name") {
      c.name = value;
    } else if (option == "--threads") {
      c.threads = unsigned(to_int(option, value, 1, 1024));
    } else if (option == "--ratios") {
      ratios_given = true, c.ratios.clear();
      for (size_t at = 0; at <= value.size(); at = std::min(value.find(',', at), value.size()) + 1)
        c.ratios.push_back(to_int(option, value.substr(at, value.find(',', at) - at), 0, kMax32));
    } else if (option == "--type") {
      const auto rt = role_and_type(option, value);
      c.types[rt.first] = rt.second;
    } else if (option == "--layer-type") {
      const auto lt = split(option, value, ':');
      const auto rt = role_and_type(option, lt.second);
      c.layer_types[{to_int(option, lt.first, -1, kMax32), rt.first}] = rt.second;
    } else if (option == "--gain") {
      const auto g = split(option, value, '=');
      if (!c.gain.count(g.first)) fail("--gain: unknown name '" + g.first + "' (see --list)");
      c.gain[g.first] = to_real(option, g.second);
    } else if (option == "--mtp") {
      if (value != "none" && value != "llama" && value != "ds4") fail("--mtp is none, llama or ds4, not '" + value + "'");
      c.mtp = value;
    } else if (!known) {
      fail("unknown option " + option + " (see --help)");
    }
  }
  if (ratios_given && !layers_given) c.n_layer = int64_t(c.ratios.size());
  if (!ratios_given && (layers_given || c.ratios.empty())) c.ratios = default_ratios(c.n_layer);
  if (int64_t(c.ratios.size()) < c.n_layer) fail("--ratios is shorter than --n-layer");
  c.hash_layers = std::min(c.hash_layers, c.n_layer);
  if (c.name.empty()) c.name = "random-" + preset + "-s" + std::to_string(int64_t(c.seed));
  if (c.n_head % c.out_groups) fail("n_head must be a multiple of out_groups");
  if (c.n_used > c.n_expert) fail("n_used must not exceed n_expert");
  if (c.out.empty()) fail("-o FILE is required");
  return c;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = read_options(argc, argv);
    for (const auto& o : options) {
      if (o.first == "--list") return print_lists(), 0;
      if (o.first == "--help" || o.first == "-h") return print_help(), 0;
    }
    write_model(make_config(options));
    return 0;
  } catch (const std::exception& e) {
    fprintf(stderr, "make_model: %s\n", e.what());
    return 1;
  }
}
