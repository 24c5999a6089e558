// The whole network against stored float64 reference logits, and its bits against themselves: any chunking, threads, ISA.
#include "ds4_test.h"

#include <fstream>
#include <sstream>

namespace ds4 {
namespace {

struct ForwardCase {
  std::string name, sha256, recipe;
  size_t n_vocab = 0;
  std::string hash[3];  // of all logits: exact plain, exact, default
};
struct ForwardChoice {
  std::string model, kind;
  uint32_t layer = 0;
  size_t n = 0, offset = 0;
};
struct ForwardIndex {
  std::vector<size_t> positions;
  std::vector<ForwardCase> models;
  std::vector<ForwardChoice> choices;
  std::vector<int32_t> tokens;
};

const ForwardIndex& forward_index() {
  static const ForwardIndex index = [] {
    ForwardIndex r;
    std::ifstream file(data_path("forward/index.txt"));
    for (std::string line; std::getline(file, line);) {
      std::istringstream in(line);
      std::string word;
      in >> word;
      if (word == "positions") for (size_t p; in >> p;) r.positions.push_back(p);
      if (word == "model") {
        ForwardCase c;
        in >> c.name >> c.n_vocab >> c.sha256;
        std::getline(in, c.recipe);
        r.models.push_back(c);
      }
      if (word == "bits") {
        in >> word;
        for (ForwardCase& c : r.models)
          if (c.name == word) in >> c.hash[0] >> c.hash[1] >> c.hash[2];
      }
      if (word == "choices") {
        ForwardChoice c;
        in >> c.model >> c.layer >> c.kind >> c.n >> c.offset;
        r.choices.push_back(c);
      }
    }
    std::ifstream tokens(data_path("forward/tokens.txt"));
    for (int32_t t; tokens >> t;) r.tokens.push_back(t);
    return r;
  }();
  return index;
}

// A model file made once per build directory.
std::string forward_model(const ForwardCase& c) {
  const std::string path = build_path("models/" + c.name + ".gguf");
  if (access(path.c_str(), R_OK) != 0) {
    const std::string command = "mkdir -p '" + build_path("models") + "' && " + tool_command("make_model") + c.recipe + " -o '" + path + ".tmp' >/dev/null && mv '" + path + ".tmp' '" + path + "'";
    if (std::system(command.c_str()) != 0) throw Error("cannot make " + path + " with: " + command);
  }
  return path;
}

// Logits of all tokens, [n][n_vocab].
std::vector<float> forward_logits(const Model& model, const RunOptions& o, const std::vector<int32_t>& tokens, size_t step = 0, const TapSink& taps = {}) {
  Engine engine(model, o);
  if (taps) engine.set_taps(taps);
  std::vector<float> logits(tokens.size() * model.shape.n_vocab);
  if (step == 0) step = tokens.size();
  for (size_t at = 0; at < tokens.size(); at += step) {
    const size_t n = std::min(step, tokens.size() - at);
    EXPECT_EQ(engine.eval(tokens.data() + at, n, logits.data() + at * model.shape.n_vocab), n);
  }
  return logits;
}

std::string hash_of(const std::vector<float>& logits) {
  return format("%016llx", static_cast<unsigned long long>(fnv1a(logits.data(), logits.size() * sizeof(float))));
}

size_t argmax_of(const float* x, size_t n) { return size_t(std::max_element(x, x + n) - x); }

struct Comparison {
  double max = 0, rms = 0, median_of_max = 0;
  size_t argmax_equal = 0, n = 0;
};

// Compares rows of `logits` at the stored positions with reference number `which` (0 plain, 1 rounded).
Comparison compare_with_reference(const ForwardCase& c, size_t which, const std::vector<float>& logits) {
  const ForwardIndex& index = forward_index();
  const std::string raw = read_binary(data_path("forward/" + c.name + ".f32"));
  const size_t P = index.positions.size(), V = c.n_vocab;
  EXPECT_EQ(raw.size(), 2 * P * V * 4);
  Comparison r;
  std::vector<double> worst;
  double squares = 0;
  for (size_t i = 0; i < P; i++) {
    std::vector<float> want(V);
    std::memcpy(want.data(), raw.data() + (which * P + i) * V * 4, V * 4);
    const float* got = logits.data() + index.positions[i] * V;
    double m = 0;
    for (size_t k = 0; k < V; k++) {
      const double d = std::fabs(double(got[k]) - double(want[k]));
      m = std::max(m, d);
      squares += d * d;
    }
    worst.push_back(m);
    r.max = std::max(r.max, m);
    r.argmax_equal += argmax_of(got, V) == argmax_of(want.data(), V);
  }
  std::sort(worst.begin(), worst.end());
  r.median_of_max = worst[P / 2];
  r.rms = std::sqrt(squares / double(P * V));
  r.n = P;
  return r;
}

class Forward : public testing::TestWithParam<size_t> {
 protected:
  const ForwardCase& c = forward_index().models[GetParam()];
  Gguf file{forward_model(c)};
  Model model = load_model(file);
  const std::vector<int32_t>& tokens = forward_index().tokens;
  RunOptions options(bool exact, bool plain) const {
    RunOptions o;
    o.ctx = 512;
    o.threads = 2;
    o.exact = exact;
    o.plain_kv = plain;
    return o;
  }
};

TEST_P(Forward, ExactPlainEqualsTheReference) {
  const ForwardIndex& index = forward_index();
  std::map<std::string, std::vector<int32_t>> choices;
  TapSink sink = [&](const std::string& name, const void* data, size_t rows, size_t cols, bool integer) {
    if (!integer) return;
    const int32_t* p = static_cast<const int32_t*>(data);
    std::vector<int32_t>& all = choices[name];
    all.insert(all.end(), p, p + rows * cols);
  };
  const std::vector<float> logits = forward_logits(model, options(true, true), tokens, 0, sink);
  const Comparison r = compare_with_reference(c, 0, logits);
  EXPECT_LE(r.max, 1e-3);
  EXPECT_EQ(r.argmax_equal, r.n);
  EXPECT_EQ(hash_of(logits), c.hash[0]);
  for (const ForwardChoice& choice : index.choices) {
    if (choice.model != c.name) continue;
    const std::string raw = read_binary(data_path("forward/" + c.name + ".i16"));
    const std::vector<int32_t>& got = choices[format("l%u.%s", choice.layer, choice.kind == "rows" ? "idx_selected" : "experts")];
    ASSERT_EQ(got.size(), tokens.size() * choice.n) << choice.layer << choice.kind;
    for (size_t t = 0; t < tokens.size(); t++) {
      std::vector<int32_t> a(got.begin() + ptrdiff_t(t * choice.n), got.begin() + ptrdiff_t((t + 1) * choice.n)), b;
      for (size_t k = 0; k < choice.n; k++) b.push_back(load_le<int16_t>(raw.data() + choice.offset + (t * choice.n + k) * 2));
      if (choice.kind == "experts") { std::sort(a.begin(), a.end()); std::sort(b.begin(), b.end()); }
      ASSERT_EQ(a, b) << c.name << " layer " << choice.layer << " " << choice.kind << " at position " << t;
    }
  }
}

TEST_P(Forward, ExactWithRoundedCacheIsNearTheReference) {
  const std::vector<float> logits = forward_logits(model, options(true, false), tokens);
  const Comparison r = compare_with_reference(c, 1, logits);
  EXPECT_EQ(hash_of(logits), c.hash[1]);
  EXPECT_LE(r.median_of_max, 2e-2);
  EXPECT_GE(r.argmax_equal, r.n - (c.name == "tiny-ds4" ? 2 : 1));
}

TEST_P(Forward, DefaultIsNearTheReference) {
  const std::vector<float> logits = forward_logits(model, options(false, false), tokens);
  const Comparison r = compare_with_reference(c, 1, logits);
  EXPECT_EQ(hash_of(logits), c.hash[2]);
  EXPECT_LE(r.rms, c.name == "tiny-ds4" ? 0.45 : 0.30);
  EXPECT_GE(r.argmax_equal, r.n - (c.name == "tiny-ds4" ? 4 : 3));
}

TEST_P(Forward, SameBitsForEveryChunkingThreadCountAndIsa) {
  const std::vector<float> want = forward_logits(model, options(false, false), tokens);
  auto expect_same = [&](const RunOptions& o, size_t step, const std::string& what) {
    const std::vector<float> got = forward_logits(model, o, tokens, step);
    EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0) << c.name << ": " << what;
  };
  for (uint32_t chunk : {1u, 3u, 4u, 7u, 8u, 9u, 64u, 127u, 128u, 129u}) {
    RunOptions o = options(false, false);
    o.prefill_chunk = chunk;
    expect_same(o, 0, format("prefill chunk %u", chunk));
  }
  expect_same(options(false, false), 1, "token by token");
  expect_same(options(false, false), 50, "calls of 50 tokens");
  for (int threads : {1, 3, 7}) {
    RunOptions o = options(false, false);
    o.threads = threads;
    expect_same(o, 0, format("%d threads", threads));
  }
  for (const Kernels* k : usable_kernels()) {
    RunOptions o = options(false, false);
    o.kernels = k;
    expect_same(o, 0, k->name);
    expect_same(o, 64, std::string(k->name) + ", calls of 64 tokens");
    expect_same(o, 1, std::string(k->name) + ", token by token");
  }
}

TEST_P(Forward, SameBitsForEveryIsaInTheOtherModes) {
  const std::vector<int32_t> some(tokens.begin(), tokens.begin() + 150);
  for (bool exact : {false, true})
    for (bool plain : {false, true}) {
      if (!exact && !plain) continue;
      const std::vector<float> want = forward_logits(model, options(exact, plain), some);
      for (const Kernels* k : usable_kernels()) {
        RunOptions o = options(exact, plain);
        o.kernels = k;
        o.prefill_chunk = 33;
        for (const size_t step : {0, 1}) {             // in chunks of 33, token by token
          const std::vector<float> got = forward_logits(model, o, some, step);
          EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0)
              << c.name << " " << k->name << " exact " << exact << " plain " << plain << " step " << step;
        }
      }
    }
}

TEST_P(Forward, RewindingLeavesNoTrace) {
  const std::vector<float> want = forward_logits(model, options(false, false), tokens);
  const size_t V = model.shape.n_vocab;
  Engine engine(model, options(false, false));
  engine.eval(tokens.data(), 300);
  ASSERT_TRUE(engine.rewind(260));
  const std::vector<int32_t> other(40, tokens[7]);
  engine.eval(other.data(), other.size());           // a different continuation
  ASSERT_TRUE(engine.rewind(251));
  EXPECT_FALSE(engine.rewind(252));
  engine.eval(tokens.data() + 251, tokens.size() - 251);
  EXPECT_EQ(std::memcmp(engine.logits(), want.data() + (tokens.size() - 1) * V, V * sizeof(float)), 0) << c.name;
  EXPECT_FALSE(engine.rewind(100));                  // too far back: the caller starts over
  ASSERT_TRUE(engine.rewind(0));
  engine.eval(tokens.data(), 10);
  EXPECT_EQ(std::memcmp(engine.logits(), want.data() + 9 * V, V * sizeof(float)), 0) << c.name;
}

// Tokens wait for their compressor inputs; a wrong continuation that is taken back must leave none of its own.
TEST_P(Forward, RewindingOverWaitingInputsLeavesNoTrace) {
  const std::vector<float> want = forward_logits(model, options(false, false), tokens);
  const size_t V = model.shape.n_vocab;
  Engine engine(model, options(false, false));
  size_t n = 118;                                    // blocks of 128 end in what follows
  engine.eval(tokens.data(), n);
  for (size_t wrong = 1; wrong <= 2 * kMaxWaiting; wrong++) {
    if (wrong % 2) engine.eval(tokens.data(), wrong);
    else for (size_t i = 0; i < wrong; i++) engine.eval(&tokens[(n + 3 * i + 11) % tokens.size()], 1);
    ASSERT_TRUE(engine.rewind(uint32_t(n)));
    for (const size_t step : {1, 1, 3, 1}) {
      engine.eval(tokens.data() + n, step);
      n += step;
      ASSERT_EQ(std::memcmp(engine.logits(), want.data() + (n - 1) * V, V * sizeof(float)), 0) << c.name << " position " << n - 1 << " after " << wrong;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Forward, testing::Range<size_t>(0, forward_index().models.size()),
                         [](const testing::TestParamInfo<size_t>& i) {
                           std::string s = forward_index().models[i.param].name;
                           for (char& ch : s) if (ch == '-') ch = '_';
                           return s;
                         });

TEST(ForwardErrors, TokensAndContext) {
  const ForwardCase& c = forward_index().models[0];
  Gguf file(forward_model(c));
  const Model model = load_model(file);
  RunOptions o;
  o.ctx = 8;
  o.threads = 1;
  Engine engine(model, o);
  const std::vector<int32_t> nine(9, 5), bad{1, 272};
  EXPECT_THROW(engine.eval(nine.data(), 9), Error);
  EXPECT_THROW(engine.eval(bad.data(), 2), Error);
  EXPECT_EQ(engine.position(), 0u);
  EXPECT_EQ(engine.eval(nine.data(), 8), 8u);
  EXPECT_THROW(engine.eval(nine.data(), 1), Error);
  std::atomic<bool> stop{true};
  engine.reset();
  EXPECT_EQ(engine.eval(nine.data(), 8, nullptr, &stop), 0u);
}

// Nothing in the cache grows with context x heads: doubling the context adds a quarter and a 128th of a row per token.
TEST(ForwardMemory, CacheGrowsWithCompressedRowsOnly) {
  const ForwardCase& c = forward_index().models[0];
  Gguf file(forward_model(c));
  const Model model = load_model(file);
  RunOptions o;
  o.ctx = 1 << 18;
  const uint64_t a = memory_plan(model, o).cache;
  o.ctx = 1 << 19;
  const uint64_t b = memory_plan(model, o).cache;
  uint64_t rows = 0;
  for (uint32_t r : model.shape.ratios)
    if (r) rows += uint64_t(1 << 18) / r * 2 * (align_up(model.shape.head_dim, 16) + (r == 4 ? align_up(model.shape.idx_dim, 16) : 0));
  EXPECT_NEAR(double(b - a), double(rows), 4096.0);
}

}  // namespace
}  // namespace ds4
