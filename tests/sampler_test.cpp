// The sampler: literal draws, exact agreement with the version that sorts, distributions, numerical faults.
#include "ds4_test.h"

using namespace ds4;

namespace {

std::vector<float> sampler_logits(const std::string& kind, size_t n, Rng& rng) {
  std::vector<float> l(n);
  for (float& x : l) {
    const float u = rng.next_float();
    if (kind == "flat") x = 1.25f;
    else if (kind == "tied") x = std::floor(6 * u);
    else if (kind == "wide") x = 200 * u - 100;
    else if (kind == "tail") x = 4 * std::log(u + 1e-4f);
    else x = 5 * (u + rng.next_float() + rng.next_float() - 1.5f);
  }
  if (kind == "peaked")
    for (int i = 0; i < 5; i++) l[rng.next_u64() % n] += 6 + 3 * rng.next_float();
  if (kind == "faulty") {
    const float bad[] = {NAN, INFINITY, -INFINITY, -NAN, -3e38f};
    for (size_t i = 0; i < n; i += 1 + rng.next_u64() % 7) l[i] = bad[rng.next_u64() % 5];
  }
  return l;
}

SamplerParams sampler_off() {     // every filter off
  SamplerParams p;
  p.min_p = 0;
  return p;
}

template <class T>
T sampler_pick(Rng& rng, std::initializer_list<T> of) { return of.begin()[rng.next_u64() % of.size()]; }

SamplerParams sampler_random_params(Rng& rng, size_t n) {
  SamplerParams p;
  p.temp = sampler_pick(rng, {0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.5, 100.0});
  p.top_k = sampler_pick(rng, {0, 0, 1, 2, 5, 40, int32_t(n / 2), int32_t(n), 1024});
  p.top_p = sampler_pick(rng, {1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.99, 0.999999});
  p.min_p = sampler_pick(rng, {0.0, 0.0, 1e-9, 0.05, 0.5, 1.0});
  p.repeat_last_n = sampler_pick(rng, {0, 5, 64, -1});
  p.repeat_penalty = sampler_pick(rng, {1.0f, 1.1f, 3.0f, 0.5f});
  p.presence = sampler_pick(rng, {0.0f, 0.5f, -2.0f});
  p.frequency = sampler_pick(rng, {0.0f, 0.3f});
  for (size_t i = 4; i > 0; i--) std::swap(p.order.at[i], p.order.at[rng.next_u64() % (i + 1)]);
  if (rng.next_u64() % 4 == 0) p.order.n = uint8_t(1 + rng.next_u64() % 5);
  return p;
}

// Upper bound of a chi-square variable with df degrees of freedom, 4.5 deviations out (Wilson-Hilferty).
double sampler_chi2_limit(double df) {
  const double h = 2 / (9 * df);
  return df * std::pow(1 - h + 4.5 * std::sqrt(h), 3);
}

// Probabilities after top-k, top-p, min-p in the default order, by their definitions in double.
std::vector<double> sampler_exact(const std::vector<float>& l, const SamplerParams& p) {
  std::vector<size_t> order(l.size());
  for (size_t i = 0; i < l.size(); i++) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return l[a] > l[b]; });
  if (p.top_k > 0) order.resize(std::min(order.size(), size_t(p.top_k)));
  const auto weight = [&](size_t i) { return std::exp((double(l[i]) - double(l[order[0]])) / p.temp); };
  const auto mass = [&] {
    double sum = 0;
    for (size_t i : order) sum += weight(i);
    return sum;
  };
  if (p.top_p < 1) {
    const double want = p.top_p * mass() * (1 - 1e-12);
    double sum = weight(order[0]);
    size_t keep = 1;
    while (sum < want) sum += weight(order[keep++]);
    order.resize(keep);
  }
  while (p.min_p > 0 && weight(order.back()) < p.min_p * (1 - 1e-12)) order.pop_back();
  std::vector<double> q(l.size());
  const double total = mass();
  for (size_t i : order) q[i] = std::max(weight(i) / total, 1e-300);   // survivors are never 0
  return q;
}

}  // namespace

TEST(Sampler, RandomNumbersAreXorshift64Star) {
  const auto first = [](uint64_t seed) {
    Rng r(seed);
    return std::vector<uint64_t>{r.next_u64(), r.next_u64(), r.next_u64()};
  };
  EXPECT_EQ(first(0), (std::vector<uint64_t>{0x0d83b3e29a21487aull, 0x54c44c79f1fe9d67ull, 0xa845f342007a0e78ull}));
  EXPECT_EQ(first(1), (std::vector<uint64_t>{0x47e4ce4b896cdd1dull, 0xabcfa6a8e079651dull, 0xb9d10d8feb731f57ull}));
  EXPECT_EQ(first(42), (std::vector<uint64_t>{0x56ce4ab7719ba3a0ull, 0xc841eb53ebbb2ddaull, 0xca466be0c9980276ull}));
  EXPECT_EQ(first(~0ull), (std::vector<uint64_t>{0xf92cc9e5c6000000ull, 0x8ff484d8fd1eaee3ull, 0x346c95f3326fabc6ull}));
  Rng r(42);
  EXPECT_EQ(r.next_float(), 5688906.0f / 16777216.0f);
}

// Computed apart from this program, in exact integers.
TEST(Sampler, LiteralDraws) {
  const float l[] = {0, 1, 2, 3, 2.5f, -1, 1.5f, 0.5f};
  using Ids = std::vector<int32_t>;
  struct Case { double temp; int32_t top_k; double top_p, min_p; uint64_t seed; Ids ids; };
  const Case cases[] = {
      {1, 0, 1, 0, 0, {1, 3, 4, 3, 3, 3, 4, 3, 3, 4, 0, 4}},      {1, 0, 1, 0, 1, {3, 4, 4, 3, 1, 4, 4, 4, 3, 4, 3, 2}},
      {1, 0, 1, 0, 42, {3, 4, 4, 6, 4, 4, 2, 3, 3, 4, 3, 3}},     {0.7, 0, 1, 0.05, 0, {2, 3, 3, 3, 3, 3, 4, 3, 3, 4, 1, 4}},
      {0.7, 0, 1, 0.05, 1, {3, 3, 4, 3, 2, 4, 4, 3, 3, 4, 3, 3}}, {0.7, 0, 1, 0.05, 42, {3, 4, 4, 6, 4, 4, 3, 3, 3, 3, 3, 3}},
      {1, 3, 1, 0, 0, {2, 3, 3, 3, 3, 3, 4, 3, 3, 4, 2, 4}},      {1, 3, 1, 0, 42, {3, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3}},
      {1, 0, 0.8, 0, 1, {3, 4, 4, 3, 2, 4, 4, 4, 3, 4, 3, 3}},    {1, 0, 0.8, 0, 42, {3, 4, 4, 6, 4, 4, 3, 3, 3, 4, 3, 3}}};
  for (const Kernels* k : usable_kernels()) {
    Sampler sampler(8, k);
    for (const Case& c : cases) {
      SamplerParams p;
      p.temp = c.temp, p.top_k = c.top_k, p.top_p = c.top_p, p.min_p = c.min_p;
      Rng rng(c.seed);
      Ids ids;
      for (size_t i = 0; i < c.ids.size(); i++) ids.push_back(sampler.sample(l, p, rng, nullptr, 0));
      EXPECT_EQ(ids, c.ids) << k->name << " temp " << c.temp << " top-k " << c.top_k << " seed " << c.seed;
    }
  }
}

TEST(Sampler, DefaultsAndStageLists) {
  const SamplerParams p;
  EXPECT_EQ(p.temp, 1);
  EXPECT_EQ(p.top_k, 0);
  EXPECT_EQ(p.top_p, 1);
  EXPECT_EQ(p.min_p, 0.05);
  const StageList list = parse_samplers("min-p,temp");
  ASSERT_EQ(list.n, 2);
  EXPECT_EQ(list.at[0], Stage::min_p);
  EXPECT_EQ(list.at[1], Stage::temp);
  EXPECT_EQ(parse_samplers("penalties,temp,top-k,top-p,min-p").at, StageList().at);
  for (const char* bad : {"", "temp,", "topk", "temp,temp", "temp top-k", "temp,top-k,top-p,min-p,penalties,temp"}) {
    try {
      parse_samplers(bad);
      ADD_FAILURE() << bad;
    } catch (const Error& e) {
      EXPECT_EQ(e.code, kExitUsage);
      EXPECT_NE(std::string(e.what()).find("--samplers"), std::string::npos);
    }
  }
}

TEST(Sampler, GreedyTakesTheLowestIdAndDrawsNothing) {
  std::vector<float> l(1000, 0.5f);
  l[700] = l[300] = l[999] = 2;
  Sampler sampler(1000);
  Rng rng(5);
  SamplerParams temp0 = sampler_off(), k1 = sampler_off(), p0 = sampler_off(), one = sampler_off();
  temp0.temp = 0, k1.top_k = 1, p0.top_p = 0;
  for (const SamplerParams& p : {temp0, k1, p0}) EXPECT_EQ(sampler.sample(l.data(), p, rng, nullptr, 0), 300);
  temp0.order = parse_samplers("top-p,min-p");                   // greedy even when no temperature stage is there
  EXPECT_EQ(sampler.sample(l.data(), temp0, rng, nullptr, 0), 300);
  l[700] = l[999] = 0;
  one.min_p = 1;
  EXPECT_EQ(sampler.sample(l.data(), one, rng, nullptr, 0), 300);
  EXPECT_EQ(rng.state, 5u);
  one.min_p = 0.2;
  sampler.sample(l.data(), one, rng, nullptr, 0);                // two or more survive: exactly one number
  Rng once(5);
  once.next_u64();
  EXPECT_EQ(rng.state, once.state);
}

TEST(Sampler, EqualsTheVersionThatSorts) {
  Rng rng(2024);
  const std::vector<const Kernels*> isas = usable_kernels();
  for (const char* kind : {"random", "peaked", "flat", "tied", "wide", "tail", "faulty"}) {
    for (size_t n : {1, 2, 15, 16, 17, 255, 256, 257, 300, 1111, 5000}) {
      const std::vector<float> l = sampler_logits(kind, n, rng);
      std::vector<std::unique_ptr<Sampler>> samplers;
      for (const Kernels* k : isas) samplers.push_back(std::make_unique<Sampler>(int32_t(n), k));
      for (int round = 0; round < (n > 1000 ? 5 : 20); round++) {
        const SamplerParams p = sampler_random_params(rng, n);
        std::vector<int32_t> history;
        for (size_t i = rng.next_u64() % 100; i > 0; i--) history.push_back(int32_t(rng.next_u64() % (n + 2)) - 1);
        for (size_t i = 0; i < 10 && !history.empty(); i++) history.push_back(history[rng.next_u64() % history.size()]);
        for (int draw = 0; draw < 4; draw++) {
          Rng plain(rng.next_u64());
          const uint64_t seed = plain.state;
          const int32_t want = sample_plainly(*isas[0], l.data(), n, p, plain, history.data(), history.size());
          for (size_t i = 0; i < isas.size(); i++) {
            Rng ours(seed);
            const int32_t id = samplers[i]->sample(l.data(), p, ours, history.data(), history.size());
            ASSERT_EQ(id, want) << isas[i]->name << ' ' << kind << ' ' << n << " temp " << p.temp << " k " << p.top_k << " p " << p.top_p << " min-p " << p.min_p;
            ASSERT_EQ(ours.state, plain.state) << isas[i]->name << ' ' << kind << ' ' << n;
          }
        }
      }
    }
  }
}

TEST(Sampler, EqualsTheVersionThatSortsOnAWholeVocabulary) {
  const std::vector<float> l = make_bench_logits(129280, 3);
  Sampler sampler(129280);
  for (const auto& [temp, top_k, top_p] : {std::tuple{0.8, 0, 0.9}, {0.8, 0, 0.97}, {1.5, 0, 0.95}, {1.0, 1024, 1.0}, {50.0, 3000, 0.5}, {1.0, 0, 1.0}}) {
    SamplerParams p = sampler_off();
    p.temp = temp, p.top_k = top_k, p.top_p = top_p;
    for (uint64_t seed : {1, 2}) {
      Rng ours(seed), plain(seed);
      EXPECT_EQ(sampler.sample(l.data(), p, ours, nullptr, 0), sample_plainly(*best_kernels(), l.data(), l.size(), p, plain, nullptr, 0)) << temp << ' ' << top_p;
    }
  }
}

TEST(Sampler, DistributionsFitTheExactOnes) {
  const size_t n = 1200, draws = 1000;
  Rng rng(11);
  Sampler sampler{int32_t(n)};
  int tested = 0;
  for (const char* kind : {"peaked", "flat", "tied"}) {
    const std::vector<float> l = sampler_logits(kind, n, rng);
    for (int32_t top_k : {0, 1, 2, 40, 1024}) for (double top_p : {0.0, 0.1, 0.9, 1.0}) for (double min_p : {0.0, 0.05, 1.0}) for (double temp : {1e-6, 0.7, 1.0, 100.0}) {
      SamplerParams p;
      p.temp = temp, p.top_k = top_k, p.top_p = top_p, p.min_p = min_p;
      const std::vector<double> q = sampler_exact(l, p);
      std::vector<int> count(n);
      for (size_t i = 0; i < draws; i++) count[size_t(sampler.sample(l.data(), p, rng, nullptr, 0))]++;
      std::vector<size_t> order(n);
      for (size_t i = 0; i < n; i++) order[i] = i;
      std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return q[a] > q[b]; });
      double chi2 = 0, expected = 0, df = -1;
      int seen = 0;
      for (size_t i = 0; i < n; i++) {                           // bins of at least eight expected draws
        if (q[order[i]] == 0) { ASSERT_EQ(count[order[i]], 0) << "a token that was filtered out"; }
        expected += double(draws) * q[order[i]];
        seen += count[order[i]];
        if (expected < 8 && i + 1 < n) continue;
        if (expected > 1e-3) chi2 += (seen - expected) * (seen - expected) / expected;
        df += expected >= 8;
        expected = seen = 0;
      }
      tested++;
      EXPECT_LE(chi2, sampler_chi2_limit(std::max(df, 1.0))) << kind << " k " << top_k << " p " << top_p << " min-p " << min_p << " temp " << temp;
    }
  }
  EXPECT_EQ(tested, 720);
}

TEST(Sampler, SurvivorsFollowTheDefinitions) {
  Rng rng(8);
  for (const char* kind : {"random", "peaked", "flat", "tied", "wide", "tail"}) {
    const std::vector<float> l = sampler_logits(kind, 700, rng);
    for (int round = 0; round < 60; round++) {
      SamplerParams p = sampler_random_params(rng, 700);
      p.order = StageList();
      p.repeat_last_n = 0;
      if (p.temp == 0) p.temp = 1;
      const std::vector<double> q = sampler_exact(l, p);
      double temp;
      std::vector<bool> ours(700), exact(700);
      for (const Candidate& c : filter_plainly(*best_kernels(), l.data(), 700, p, nullptr, 0, &temp)) ours[size_t(c.id)] = true;
      for (size_t i = 0; i < 700; i++) exact[i] = q[i] > 0;
      if (p.top_p > 0.9999 && p.top_p < 1) continue;             // finer than the weights
      EXPECT_EQ(ours, exact) << kind << " k " << p.top_k << " p " << p.top_p << " min-p " << p.min_p << " temp " << p.temp;
    }
  }
}

TEST(Sampler, MinPCutIsTheLowestFloatThatPasses) {
  Rng rng(6);
  for (int i = 0; i < 1000; i++) {
    const float top = 40 * rng.next_float() - 20;
    const double temp = 0.1 + double(rng.next_float()), min_p = 0.01 + 0.9 * double(rng.next_float());
    const float cut = min_p_cut(top, temp, min_p);
    const double exact = double(top) + temp * log_f64(min_p);
    EXPECT_GE(double(cut), exact);
    EXPECT_LT(double(std::nextafter(cut, -INFINITY)), exact);
  }
  EXPECT_EQ(min_p_cut(1.5f, 1e-6, 1), 1.5f);
  EXPECT_EQ(min_p_cut(1.5f, 1e300, 0.5), -0x1.fffffep127f);
}

TEST(Sampler, FiltersCommuteWhereTheyShould) {
  Rng rng(77);
  const std::vector<float> l = sampler_logits("peaked", 3000, rng);
  Sampler sampler(3000);
  SamplerParams p;
  p.temp = 3, p.top_k = 30, p.min_p = 0.2, p.repeat_penalty = 1.3f;
  const std::vector<int32_t> history = {5, 6, 7, 5, 2999};
  const auto draws = [&](const char* order) {
    p.order = parse_samplers(order);
    Rng r(1);
    std::vector<int32_t> ids;
    for (int i = 0; i < 200; i++) ids.push_back(sampler.sample(l.data(), p, r, history.data(), history.size()));
    return ids;
  };
  const std::vector<int32_t> want = draws("temp,top-k,min-p");
  EXPECT_EQ(draws("temp,min-p,top-k"), want);
  EXPECT_EQ(draws("top-k,temp,min-p"), want);
  EXPECT_NE(draws("top-k,min-p,temp"), want);                    // min-p then looks at temperature 1
  EXPECT_EQ(draws("penalties,temp,top-k,min-p"), draws("temp,penalties,min-p,top-k"));
}

TEST(Sampler, PenaltiesFollowTheFormula) {
  SamplerParams p;
  p.repeat_penalty = 2, p.presence = 0.5f, p.frequency = 0.25f;
  EXPECT_EQ(penalized(3, 1, p, 1), 0.75f);                       // 3 / 2 - 0.25 - 0.5
  EXPECT_EQ(penalized(-3, 2, p, 1), -7);                         // -3 * 2 - 2 * 0.25 - 0.5
  EXPECT_EQ(penalized(3, 1, p, 2), 0);                           // after a temperature of 2
  EXPECT_EQ(penalized(-1e30f, 1, p, 1), -1e30f);
  const float l[] = {1, 3, 2.9f, 0};
  const int32_t history[] = {1, 2, 3, 3};
  SamplerParams greedy = sampler_off();
  greedy.temp = 0, greedy.presence = 2.5f;
  Sampler sampler(4);
  Rng rng(1);
  const auto best = [&](int32_t last_n) { greedy.repeat_last_n = last_n; return sampler.sample(l, greedy, rng, history, 4); };
  EXPECT_EQ(best(0), 1);
  EXPECT_EQ(best(2), 1);
  EXPECT_EQ(best(3), 1);                                         // 2 is penalised, 1 is not
  EXPECT_EQ(best(4), 0);
  EXPECT_EQ(best(-1), 0);
  EXPECT_EQ(best(1000), 0);
}

TEST(Sampler, NeverPicksWhatIsNotFinite) {
  for (size_t n : {1, 7, 300, 1000}) {
    Sampler sampler{int32_t(n)};
    Rng rng(3);
    std::vector<LogProb> best;
    for (float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
      std::vector<float> l(n, bad);
      SamplerParams greedy;
      greedy.temp = 0;
      EXPECT_EQ(sampler.sample(l.data(), SamplerParams(), rng, nullptr, 0), -1);
      EXPECT_EQ(sampler.sample(l.data(), greedy, rng, nullptr, 0), -1);
      EXPECT_EQ(sampler.log_probs(l.data(), 0, 3, best), -1e30f);
      EXPECT_TRUE(best.empty());
      l[n / 2] = -2.5f;                                          // the only one left
      for (SamplerParams p : {SamplerParams(), greedy, sampler_off()}) {
        EXPECT_EQ(sampler.sample(l.data(), p, rng, nullptr, 0), int32_t(n / 2));
        p.temp = 100, p.top_p = 0.5, p.top_k = 3, p.repeat_penalty = 1.5f;
        const std::vector<int32_t> all = {0, int32_t(n / 2), int32_t(n - 1)};
        EXPECT_EQ(sampler.sample(l.data(), p, rng, all.data(), 3), int32_t(n / 2));
      }
      EXPECT_EQ(sampler.margin(l.data()), 1e30f);
      EXPECT_EQ(sampler.log_probs(l.data(), int32_t(n / 2), 3, best), 0);
      EXPECT_EQ(best.size(), 1u);
    }
    EXPECT_EQ(rng.state, 3u);
  }
}

TEST(Sampler, LogProbabilitiesAndMargin) {
  Rng rng(4);
  for (const char* kind : {"random", "peaked", "flat", "tied"}) {
    const size_t n = 2100;
    const std::vector<float> l = sampler_logits(kind, n, rng);
    Sampler sampler{int32_t(n)};
    std::vector<size_t> order(n);
    for (size_t i = 0; i < n; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return l[a] > l[b]; });
    double sum = 0;
    for (float x : l) sum += std::exp(double(x) - double(l[order[0]]));
    const auto want = [&](size_t i) { return double(l[i]) - double(l[order[0]]) - std::log(sum); };
    std::vector<LogProb> best;
    for (size_t n_best : {size_t(0), size_t(1), size_t(5), size_t(50), n, n + 9}) {
      EXPECT_NEAR(sampler.log_probs(l.data(), 77, n_best, best), want(77), 2e-6);
      ASSERT_EQ(best.size(), std::min(n_best, n));
      for (size_t i = 0; i < best.size(); i++) {
        ASSERT_EQ(best[i].id, int32_t(order[i]));
        ASSERT_NEAR(best[i].value, want(order[i]), 2e-6);
      }
    }
    EXPECT_EQ(sampler.log_probs(l.data(), -1, 2, best), -1e30f);
    EXPECT_EQ(sampler.margin(l.data()), l[order[0]] - l[order[1]]);
  }
}

TEST(Sampler, FindsLoops) {
  std::vector<int32_t> ids = {1, 2, 3};
  const auto loops = [&](size_t times) { return ends_in_loop(ids.data(), ids.size(), times); };
  EXPECT_FALSE(loops(2));
  for (int round = 0; round < 3; round++)
    for (int32_t i = 10; i < 19; i++) ids.push_back(i);
  EXPECT_TRUE(loops(2));
  EXPECT_TRUE(loops(3));
  EXPECT_FALSE(loops(4));
  EXPECT_FALSE(loops(1));
  EXPECT_FALSE(loops(0));
  ids.push_back(99);
  EXPECT_FALSE(loops(2));
  ids.assign(15, 7);                                             // a span has at least eight tokens
  EXPECT_FALSE(loops(2));
  ids.push_back(7);
  EXPECT_TRUE(loops(2));
}
