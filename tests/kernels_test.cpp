// Blocks, dequantisation and matrix products: golden rows of every type, the bound of the int8 dot, and the same bits
// on every ISA, for every number of tokens and every range of rows.
#include "ds4_test.h"

#include <cinttypes>

namespace ds4 {
namespace {

constexpr Type kQuantTypes[] = {Type::Q4_0,    Type::Q4_1,  Type::Q5_0,   Type::Q5_1,  Type::Q8_0,  Type::Q2_K,   Type::Q3_K,  Type::Q4_K,
                                Type::Q5_K,    Type::Q6_K,  Type::IQ2_XXS, Type::IQ2_XS, Type::IQ3_XXS, Type::IQ1_S, Type::IQ4_NL, Type::IQ3_S,
                                Type::IQ2_S,   Type::IQ4_XS, Type::IQ1_M,  Type::TQ1_0, Type::TQ2_0, Type::MXFP4};

// tests/data/quant/rows.bin: for each of kQuantTypes the blocks of a row of 1536 values, then the values; at the end 1536
// activations. Made by ggml's quantisers from normal numbers.
struct GoldenRow {
  std::string blocks;
  std::vector<float> values;
};
constexpr size_t kGoldenElems = 1536;

std::vector<float> floats_at(const std::string& data, size_t offset) {
  std::vector<float> v(kGoldenElems);
  std::memcpy(v.data(), data.data() + offset, 4 * kGoldenElems);
  return v;
}
std::map<Type, GoldenRow> golden_rows(std::vector<float>* x) {
  const std::string data = read_binary(data_path("quant/rows.bin"));
  std::map<Type, GoldenRow> rows;
  size_t at = 0;
  for (Type t : kQuantTypes) {
    const size_t n = size_t(row_bytes(t, kGoldenElems));
    rows[t] = {data.substr(at, n), floats_at(data, at + n)};
    at += n + 4 * kGoldenElems;
  }
  *x = floats_at(data, at);
  EXPECT_EQ(data.size(), at + 4 * kGoldenElems);
  return rows;
}

// A weight matrix in memory that ends exactly where its last block ends.
struct TestMatrix {
  std::vector<uint8_t> bytes;
  Matrix m;
  TestMatrix(Type t, uint32_t rows, uint32_t cols) {
    const size_t stride = size_t(row_bytes(t, cols));
    bytes.resize(stride * rows);
    m = {t, bytes.data(), stride, rows, cols};
  }
};

// Half scales of a block of type t: their offsets.
std::vector<size_t> scale_offsets(Type t) {
  switch (t) {
    case Type::Q4_1: case Type::Q5_1: case Type::Q4_K: case Type::Q5_K: return {0, 2};
    case Type::Q2_K: return {80, 82};
    case Type::Q3_K: case Type::Q6_K: case Type::TQ1_0: case Type::TQ2_0: return {type_info(t).block_bytes - 2};
    case Type::MXFP4: case Type::IQ1_M: return {};
    default: return {0};
  }
}

// Random blocks with sensible scales.
void fill_random(TestMatrix& w, uint64_t seed) {
  Rng rng(seed);
  for (uint8_t& b : w.bytes) b = uint8_t(rng.next_u64() >> 33);
  if (w.m.type == Type::F32) {
    for (size_t i = 0; i < w.bytes.size(); i += 4) { const float f = rng.next_float() - 0.5f; std::memcpy(&w.bytes[i], &f, 4); }
  } else if (w.m.type == Type::F16 || w.m.type == Type::BF16) {
    for (size_t i = 0; i < w.bytes.size(); i += 2) {
      const float f = rng.next_float() - 0.5f;
      const uint16_t h = w.m.type == Type::F16 ? f32_to_f16(f) : uint16_t(bit_cast<uint32_t>(f) >> 16);
      std::memcpy(&w.bytes[i], &h, 2);
    }
  }
  const TypeInfo& info = type_info(w.m.type);
  if (info.block_elems == 1) return;
  for (size_t i = 0; i < w.bytes.size(); i += info.block_bytes) {
    for (size_t o : scale_offsets(w.m.type)) {
      const uint16_t h = f32_to_f16((rng.next_float() - 0.3f) * 0.02f);
      std::memcpy(&w.bytes[i + o], &h, 2);
    }
    if (w.m.type == Type::MXFP4) w.bytes[i] = uint8_t(120 + rng.next_u64() % 8);
    if (w.m.type == Type::IQ1_M) w.bytes[i + 55] = uint8_t((w.bytes[i + 55] & 0x0f) | (rng.next_u64() & 1 ? 0x20 : 0xa0));
  }
}

std::vector<std::vector<float>> random_tokens(size_t n, size_t cols, uint64_t seed) {
  Rng rng(seed);
  std::vector<std::vector<float>> x(n, std::vector<float>(cols));
  for (size_t t = 0; t < n; t++)
    for (float& v : x[t]) v = (rng.next_float() + rng.next_float() - 1.0f) * (rng.next_u64() % 97 == 0 ? 20.0f : 1.0f);
  return x;
}

// Activations of several tokens in the form the kernels take.
struct Acts {
  std::vector<std::vector<float>> tokens;
  std::vector<AlignedBuffer<uint8_t>> rows;
  std::vector<const void*> quantized;
  std::vector<const float*> floats;
  Acts(const Kernels& k, const std::vector<std::vector<float>>& x) : tokens(x) {
    for (const auto& v : tokens) {
      rows.emplace_back(act_bytes(v.size()));
      k.quantize(v.data(), rows.back().data(), v.size());
      quantized.push_back(rows.back().data());
      floats.push_back(v.data());
    }
  }
};

// The product of all rows with the first n tokens, [n][rows]; what is not computed stays -1.
std::vector<std::vector<float>> multiply(const Kernels& k, const Matrix& w, const Acts& x, size_t n, bool exact, size_t r0, size_t r1) {
  std::vector<std::vector<float>> out(n, std::vector<float>(w.rows, -1.0f));
  std::vector<float*> p;
  for (auto& o : out) p.push_back(o.data());
  if (exact) k.matmul_float(w, r0, r1, x.floats.data(), p.data(), n);
  else k.matmul_int8(w, r0, r1, x.quantized.data(), p.data(), n);
  return out;
}

// Equal bits, or both not a number.
bool same(float a, float b) { return bit_cast<uint32_t>(a) == bit_cast<uint32_t>(b) || (a != a && b != b); }
size_t count_different(const std::vector<float>& a, const std::vector<float>& b) {
  size_t n = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); i++) n += same(a[i], b[i]) ? 0 : 1;
  return n;
}

// Each instruction set, as it runs on AMD's CPUs and on others.
class KernelsTest : public testing::TestWithParam<std::tuple<const Kernels*, bool>> {
 protected:
  KernelsTest() { g_one_stream = g_fast_byte_tables = std::get<1>(GetParam()); }
  ~KernelsTest() override { g_one_stream = g_fast_byte_tables = is_amd(); }
  const Kernels* isa() const { return std::get<0>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Isa, KernelsTest, testing::Combine(testing::ValuesIn(usable_kernels()), testing::Bool()),
                         [](const auto& p) { return std::string(std::get<0>(p.param)->name) + (std::get<1>(p.param) ? "_amd" : ""); });

TEST(Blocks, TypesAreKnownById) {
  EXPECT_STREQ(type_info(Type::IQ2_XXS).name, "IQ2_XXS");
  EXPECT_STREQ(type_info(39)->name, "MXFP4");
  EXPECT_FALSE(type_info(uint32_t(Type::NVFP4))->supported());
  EXPECT_EQ(type_info(41), nullptr);
  EXPECT_EQ(row_bytes(Type::Q4_K, 512), 288u);
  size_t n = 0;
  for (uint32_t id = 0; type_info(id); id++) n += type_info(id)->supported();
  EXPECT_EQ(n, 26u);
}

TEST_P(KernelsTest, DequantizesGoldenRowsExactly) {
  std::vector<float> x;
  for (const auto& [type, row] : golden_rows(&x)) {
    std::vector<float> y(kGoldenElems);
    isa()->dequantize(type, row.blocks.data(), y.data(), kGoldenElems);
    size_t wrong = 0;
    for (size_t i = 0; i < kGoldenElems; i++) wrong += y[i] != row.values[i];
    EXPECT_EQ(wrong, 0u) << type_info(type).name;
  }
}

// Every byte pattern the types' fields can hold, also rows that end within a group of 512.
TEST_P(KernelsTest, DequantizesAsScalar) {
  for (Type t : kQuantTypes) {
    for (uint32_t cols : {type_info(t).block_elems, 3 * type_info(t).block_elems, 4096u}) {
      TestMatrix w(t, 3, cols);
      fill_random(w, cols);
      std::vector<float> a(cols), b(cols);
      for (size_t r = 0; r < 3; r++) {
        scalar::kernels.dequantize(t, w.m.data + r * w.m.stride, a.data(), cols);
        isa()->dequantize(t, w.m.data + r * w.m.stride, b.data(), cols);
        EXPECT_EQ(count_different(a, b), 0u) << type_info(t).name << " cols " << cols;
      }
    }
  }
}

TEST_P(KernelsTest, QuantizesAsDefined) {
  for (size_t n : {1, 31, 32, 33, 512, 1000, 4096}) {
    std::vector<float> x = random_tokens(1, n, n)[0];
    if (n > 100) std::fill(x.begin() + 32, x.begin() + 64, 0.0f);
    if (n > 200) x[130] = 1e-42f, x[170] = -3e30f;
    AlignedBuffer<uint8_t> act(act_bytes(n)), ref(act_bytes(n));
    isa()->quantize(x.data(), act.data(), n);
    scalar::kernels.quantize(x.data(), ref.data(), n);
    const ActRow row = act_row(act.data(), n);
    EXPECT_EQ(std::memcmp(act.data(), ref.data(), size_t(reinterpret_cast<const uint8_t*>(row.qt) - act.data())), 0) << n;
    if (std::string_view(isa()->name) == "avx2")
      for (size_t i = 0; i < size_t(align_up(n, 512)); i++) {
        const size_t lane_of[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
        EXPECT_EQ(row.qt[i / 512 * 512 + i % 32 / 8 * 128 + lane_of[i / 32 % 16] * 8 + i % 8], row.q[i]);
      }
    if (std::string_view(isa()->name) == "avx512")
      for (size_t i = 0; i < size_t(align_up(n, 512)); i++) {
        const size_t b = i / 32, t = i % 8, entry = i % 32 / 8;
        EXPECT_EQ(row.qt[b / 16 * 512 + i % 32 / 4 * 64 + b % 16 * 4 + i % 4], row.q[i]);
        EXPECT_EQ(row.qe[32 * b + 4 * t + entry], row.q[i]);
        EXPECT_EQ(row.qet[b / 16 * 512 + 64 * t + b % 16 * 4 + entry], row.q[i]);
      }
    for (size_t i = 0; i < size_t(align_up(n, 512)); i++) {
      const double v = i < n ? double(x[i]) : 0.0;
      EXPECT_LE(std::fabs(v - double(row.d[i / 32]) * row.q[i]), double(row.d[i / 32]) * 0.50001 + 1e-36) << i;
      EXPECT_GE(row.q[i], -127);
    }
  }
}

// |int8 dot - exact dot| <= sum over activation blocks of (scale / 2) * sum |w|, plus float rounding.
TEST_P(KernelsTest, Int8DotWithinBound) {
  std::vector<float> x;
  for (const auto& [type, row] : golden_rows(&x)) {
    const Acts acts(*isa(), {x});
    const Matrix w = {type, reinterpret_cast<const uint8_t*>(row.blocks.data()), row.blocks.size(), 1, uint32_t(kGoldenElems)};
    const float got = multiply(*isa(), w, acts, 1, false, 0, 1)[0][0];
    const ActRow a = act_row(acts.quantized[0], kGoldenElems);
    double exact = 0, bound = 0, size = 0;
    for (size_t i = 0; i < kGoldenElems; i++) {
      exact += double(row.values[i]) * double(x[i]);
      bound += double(a.d[i / 32]) / 2 * std::fabs(double(row.values[i]));
      size += std::fabs(double(row.values[i]) * double(x[i]));
    }
    EXPECT_LE(std::fabs(double(got) - exact), bound + 1e-6 * size) << type_info(type).name;
    const float plain = multiply(*isa(), w, acts, 1, true, 0, 1)[0][0];
    EXPECT_LE(std::fabs(double(plain) - exact), 1e-6 * size) << type_info(type).name;
  }
}

// Decode and tile shapes, row ranges, tails: all bits as scalar's one row and one token at a time.
void expect_same_products(const Kernels& k, const TestMatrix& w, size_t n_tokens, bool exact) {
  const auto tokens = random_tokens(n_tokens, w.m.cols, w.m.cols + n_tokens);
  const Acts acts(k, tokens);
  std::vector<std::vector<float>> want(n_tokens);
  for (size_t t = 0; t < n_tokens; t++) {
    Acts one(scalar::kernels, {tokens[t]});
    for (size_t r = 0; r < w.m.rows; r++) want[t].push_back(multiply(scalar::kernels, w.m, one, 1, exact, r, r + 1)[0][r]);
  }
  const std::string what = std::string(type_info(w.m.type).name) + (exact ? " float" : " int8") + " cols " + std::to_string(w.m.cols);
  for (size_t n : {size_t(1), size_t(2), size_t(3), size_t(4), size_t(5), size_t(8), size_t(17), n_tokens}) {
    if (n > n_tokens) continue;
    const auto got = multiply(k, w.m, acts, n, exact, 0, w.m.rows);
    for (size_t t = 0; t < n; t++) EXPECT_EQ(count_different(want[t], got[t]), 0u) << what << " n " << n << " token " << t;
  }
  for (size_t n : {size_t(1), size_t(4), size_t(7), n_tokens}) {
    if (n > n_tokens) continue;
    const size_t r0 = w.m.rows / 3, r1 = w.m.rows - w.m.rows / 4;
    const auto got = multiply(k, w.m, acts, n, exact, r0, r1);
    for (size_t r = 0; r < w.m.rows; r++)
      EXPECT_TRUE(same(got[n - 1][r], r >= r0 && r < r1 ? want[n - 1][r] : -1.0f)) << what << " rows " << r0 << ".." << r1 << " row " << r;
  }
}

TEST_P(KernelsTest, ProductsAsScalar) {
  for (Type t : kQuantTypes) {
    const uint32_t block = type_info(t).block_elems;
    for (auto [cols, rows, tokens] : {std::array<uint32_t, 3>{block, 5, 6}, {block * 3, 17, 40}, {std::max(block, 128u) * 5, 35, 18}, {block * 11, 5, 9}, {768, 9, 4}, {8192, 9, 5}}) {
      TestMatrix w(t, rows, cols);
      fill_random(w, cols + rows);
      expect_same_products(*isa(), w, tokens, false);
      if (cols < 2048) expect_same_products(*isa(), w, std::min(tokens, 6u), true);
    }
  }
}

TEST_P(KernelsTest, FloatProductsAsScalar) {
  for (Type t : {Type::F32, Type::F16, Type::BF16})
    for (auto [cols, rows, tokens] : {std::array<uint32_t, 3>{1, 1, 6}, {24, 9, 9}, {100, 6, 17}, {1024, 11, 40}, {4096, 3, 2}}) {
      TestMatrix w(t, rows, cols);
      fill_random(w, cols + rows);
      expect_same_products(*isa(), w, tokens, true);
    }
}

// Blocks no quantiser writes: all ones, all 0x80, zeros, infinite and NaN scales, the smallest and largest MXFP4 scale.
TEST_P(KernelsTest, ExtremeBlocksAsScalar) {
  for (Type t : kQuantTypes) {
    const TypeInfo& info = type_info(t);
    const uint32_t cols = std::max(info.block_elems * 3, 768u);
    for (int pattern : {0x00, 0x80, 0xff, 0x7f, 0x01, 0x55}) {
      for (int scale : {-1, 0x0000, 0x0001, 0x7bff, 0x7c00, 0xfc00, 0x7e00}) {
        TestMatrix w(t, 5, cols);
        std::fill(w.bytes.begin(), w.bytes.end(), uint8_t(pattern));
        if (scale >= 0) {
          const uint16_t h = uint16_t(scale);
          for (size_t i = 0; i < w.bytes.size(); i += info.block_bytes)
            for (size_t o : scale_offsets(t)) std::memcpy(&w.bytes[i + o], &h, 2);
        }
        expect_same_products(*isa(), w, 9, false);
        std::vector<float> a(cols), b(cols);
        scalar::kernels.dequantize(t, w.m.data, a.data(), cols);
        isa()->dequantize(t, w.m.data, b.data(), cols);
        EXPECT_EQ(count_different(a, b), 0u) << info.name << " pattern " << pattern << " scale " << scale;
      }
    }
  }
}

// Every count of heads and rows: as one head at a time on scalar.
TEST_P(KernelsTest, AttendsAsScalar) {
  for (bool plain : {false, true})
    for (size_t dim : {16, 40, 96, 160, 512})
      for (size_t n_rows : {1, 2, 3, 4, 7, 16, 17, 50}) {
        constexpr size_t kHeads = 19;
        const size_t width = size_t(align_up(n_rows, 16));
        const auto queries = random_tokens(1, kHeads * dim + 15, dim + n_rows)[0];
        const auto values = random_tokens(n_rows, size_t(align_up(dim, 16)), dim * n_rows + 1);
        std::vector<std::vector<uint16_t>> halves(n_rows);
        std::vector<const void*> rows;
        for (size_t i = 0; i < n_rows; i++) {
          for (size_t k = 0; k < values[i].size(); k++) halves[i].push_back(k < dim ? f32_to_f16(values[i][k]) : uint16_t(0));
          rows.push_back(plain ? static_cast<const void*>(values[i].data()) : halves[i].data());
        }
        const std::vector<float> sinks = random_tokens(1, kHeads, 7)[0];
        auto attend = [&](const Kernels& k, size_t first, size_t n) {
          std::vector<float> scores(kAttendHeads * width), out(n * dim);
          k.attend({queries.data() + first * dim, n, dim, rows.data(), n_rows, plain, sinks.data() + first, 0.1f, scores.data(), out.data()});
          return out;
        };
        std::vector<float> want;
        for (size_t h = 0; h < kHeads; h++) {
          const auto one = attend(scalar::kernels, h, 1);
          want.insert(want.end(), one.begin(), one.end());
        }
        for (size_t n : {1, 2, 5, 8, 9, 19}) {
          const auto got = attend(*isa(), 0, n);
          EXPECT_EQ(count_different(got, {want.begin(), want.begin() + ptrdiff_t(n * dim)}), 0u) << "plain " << plain << " dim " << dim << " rows " << n_rows << " heads " << n;
        }
      }
}

TEST_P(KernelsTest, RouterScoresAsDefined) {
  std::vector<float> x = {0, -0.0f, 1, -1, 20, -20, 39.9f, 40, 41, 1e30f, -87, -1e30f, INFINITY, -INFINITY, NAN, -NAN};
  Rng rng(5);
  for (int i = 0; i < 1000; i++) x.push_back(60 * rng.next_float() - 30);
  std::vector<float> y = x, want = x;
  isa()->router_scores(y.data(), y.size());
  scalar::kernels.router_scores(want.data(), want.size());
  EXPECT_EQ(std::memcmp(y.data(), want.data(), y.size() * sizeof(float)), 0);
  for (size_t i = 0; i < x.size(); i++) {
    const double exact = x[i] > 700 ? double(x[i]) : std::log1p(std::exp(double(x[i])));
    if (std::isnan(x[i])) EXPECT_TRUE(std::isnan(y[i]));
    else EXPECT_FLOAT_EQ(y[i], float(std::sqrt(exact))) << x[i];
  }
}

// A clamp must not make a number of what is not one: the model's error would go on as a plausible value.
TEST_P(KernelsTest, NanStaysNan) {
  const Kernels& k = *isa();
  constexpr size_t kDim = 128, kRot = 32, kAt = 37;
  for (const float nan : {NAN, -NAN}) {
    std::vector<float> x = random_tokens(1, kDim, 1)[0];
    const std::vector<float> plain = x;
    x[kAt] = nan;

    std::vector<uint16_t> with(kDim), without(kDim);
    k.store_kv_row(x.data(), kDim, kRot, false, with.data());
    k.store_kv_row(plain.data(), kDim, kRot, false, without.data());
    for (size_t i = 0; i < kDim; i++) EXPECT_TRUE(i == kAt ? std::isnan(f16_to_f32(with[i])) : with[i] == without[i]) << i;

    k.store_index_row(x.data(), kDim, false, with.data());           // the transform spreads it
    for (size_t i = 0; i < kDim; i++) EXPECT_TRUE(std::isnan(f16_to_f32(with[i]))) << i;

    std::vector<float> qt(kDim * 16);
    k.index_query(x.data(), 1, kDim, false, qt.data());
    for (size_t i = 0; i < qt.size(); i++) EXPECT_EQ(std::isnan(qt[i]), i % 16 == 0) << i;

    for (const float bad : {nan, INFINITY, -INFINITY}) {               // quantised too: else weights would make a number of it
      x[kAt] = bad;
      std::vector<float> y(4);
      AlignedBuffer<uint8_t> act(act_bytes(kDim));
      std::vector<uint8_t> q8(kDim / 32 * sizeof(BlockQ8_0), 1);
      k.quantize(x.data(), act.data(), kDim);
      const void* acts = act.data();
      float* out = y.data();
      k.matmul_int8({Type::Q8_0, q8.data(), q8.size(), 1, kDim}, 0, 1, &acts, &out, 1);
      EXPECT_TRUE(std::isnan(y[0])) << bad;
    }
    x[kAt] = nan;

    for (float clamp : {0.0f, 7.0f}) {
      std::vector<float> gate = x, up = plain;
      k.swiglu(gate.data(), up.data(), clamp, 1.0f, kDim);
      for (size_t i = 0; i < kDim; i++) EXPECT_EQ(std::isnan(gate[i]), i == kAt) << i;
      gate = plain;
      k.swiglu(gate.data(), x.data(), clamp, 1.0f, kDim);
      for (size_t i = 0; i < kDim; i++) EXPECT_EQ(std::isnan(gate[i]), i == kAt) << i;
    }
  }
}

TEST_P(KernelsTest, ScoresIndexRowsAsScalar) {
  constexpr size_t kDim = 128, kRows = 13;
  for (bool plain : {false, true})
    for (size_t n_head : {1, 16, 24, 64}) {
      const size_t width = size_t(align_up(n_head, 16));
      const auto q = random_tokens(1, n_head * kDim, n_head)[0], values = random_tokens(1, kRows * kDim, 3)[0];
      std::vector<float> weights = random_tokens(1, n_head, 5)[0], want(kRows), qt(width * kDim);
      weights.resize(width);
      std::vector<uint16_t> halves;
      for (float v : values) halves.push_back(f32_to_f16(v));
      const uint8_t* rows = plain ? reinterpret_cast<const uint8_t*>(values.data()) : reinterpret_cast<const uint8_t*>(halves.data());
      const size_t stride = kDim * (plain ? sizeof(float) : sizeof(uint16_t));
      scalar::kernels.index_query(q.data(), n_head, kDim, plain, qt.data());
      for (size_t i = 0; i < kRows; i++) scalar::kernels.index_scores(qt.data(), weights.data(), n_head, rows + i * stride, stride, 1, kDim, plain, &want[i]);
      for (size_t n = 1; n <= kRows; n++) {
        std::vector<float> got(n);
        isa()->index_scores(qt.data(), weights.data(), n_head, rows, stride, n, kDim, plain, got.data());
        EXPECT_EQ(count_different(got, {want.begin(), want.begin() + ptrdiff_t(n)}), 0u) << "plain " << plain << " heads " << n_head << " rows " << n;
      }
    }
}

}  // namespace
}  // namespace ds4
