// Vocabulary, pre-tokenizers, merging, added tokens, decoding.
// DS4_VOCAB and DS4_VOCAB_QWEN name GGUF files with the real vocabularies: then the ids of their cases are checked too.
#include "ds4_test.h"

#include <sstream>

namespace ds4 {
namespace {

std::string tok_unhex(const std::string& hex) {
  std::string s;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) s += char(std::stoi(hex.substr(i, 2), nullptr, 16));
  return s;
}

std::vector<int32_t> tok_numbers(const std::string& list) {
  std::vector<int32_t> v;
  std::istringstream in(list);
  for (std::string n; list != "-" && std::getline(in, n, ',');) v.push_back(std::stoi(n));
  return v;
}

struct TokCase {
  std::string mode, text, pieces, ids;
};

std::vector<TokCase> tok_cases(const std::string& file) {
  std::vector<TokCase> cases;
  std::istringstream in(read_binary(data_path("tokenizer/" + file)));
  for (std::string line; std::getline(in, line);) {
    TokCase c;
    if (line[0] == '#') continue;
    std::istringstream(line) >> c.mode >> c.text >> c.pieces >> c.ids;
    cases.push_back(c);
  }
  EXPECT_GT(cases.size(), 100u) << file;
  return cases;
}

void tok_check_pieces(const std::string& file, PreTokenizer pre) {
  for (const TokCase& c : tok_cases(file)) {
    if (c.pieces == "-") continue;
    std::vector<int32_t> got;
    split_text(pre, tok_unhex(c.text), [&](const uint8_t* p, const uint8_t* q) { got.push_back(int32_t(q - p)); });
    EXPECT_EQ(got, tok_numbers(c.pieces)) << file << " " << c.text;
  }
}

std::string tok_decode(const Vocab& vocab, const std::vector<int32_t>& ids) {
  std::string s;
  for (int32_t id : ids) vocab.append_bytes(id, s);
  return s;
}

void tok_check_ids(const std::string& file, const std::string& vocab_file) {
  const Gguf gguf(vocab_file);
  const Vocab vocab(gguf);
  Tokenizer tokenizer(vocab);
  for (const TokCase& c : tok_cases(file)) {
    std::vector<int32_t> got, want = tok_numbers(c.ids);
    std::string text = c.mode == "chunks" ? "" : tok_unhex(c.text);
    if (c.mode == "plain") tokenizer.encode_plain(text, got);
    if (c.mode == "raw") tokenizer.encode_raw(text, got);
    if (c.mode == "decode") got = want;
    if (c.mode == "chunks") {
      std::vector<std::string> parts;
      std::vector<Chunk> chunks;
      std::istringstream in(c.text);
      for (std::string part; std::getline(in, part, ',');) parts.push_back(part[0] + tok_unhex(part.substr(1)));
      for (const std::string& part : parts) {
        chunks.push_back({std::string_view(part).substr(1), part[0] == 't'});
        text += part.substr(1);
      }
      tokenizer.encode_chunks(chunks.data(), chunks.size(), got);
    }
    EXPECT_EQ(got, want) << file << " " << c.mode << " " << c.text;
    EXPECT_EQ(tok_decode(vocab, got), text) << file << " " << c.mode << " " << c.text;
  }
}

// A GGUF with nothing but a vocabulary: the byte symbols are ids 0-255, then `tokens`. Fields that start with '!' or are
// negative are left out of the file.
struct TokFile {
  std::string model = "gpt2", pre = "deepseek-v3";
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> types;    // of `tokens`; short: normal
  int bos = 0, eos = 1, skip_byte = -1, n_types = -1;
  bool no_tokens = false, no_merges = false;

  template <class T>
  static std::string le(T v) { return std::string(reinterpret_cast<const char*>(&v), sizeof v); }
  static std::string str(const std::string& s) { return le(uint64_t(s.size())) + s; }
  static std::string strings(const std::vector<std::string>& v) {
    std::string s = le(9u) + le(8u) + le(uint64_t(v.size()));
    for (const std::string& t : v) s += str(t);
    return s;
  }
  std::string write() const {
    std::vector<std::string> all;
    for (int b = 0; b < 256; b++) {
      char symbol[2];
      const size_t n = write_symbol(uint8_t(b), symbol);
      if (b != skip_byte) all.emplace_back(symbol, n);
    }
    all.insert(all.end(), tokens.begin(), tokens.end());
    std::string kinds;
    const size_t n = n_types < 0 ? all.size() : size_t(n_types);
    for (size_t i = 0; i < n; i++) kinds += le(i >= 256 && i - 256 < types.size() ? types[i - 256] : 1);
    std::vector<std::pair<std::string, std::string>> kv;
    kv.emplace_back("general.architecture", le(8u) + str("deepseek4"));
    if (model[0] != '!') kv.emplace_back("tokenizer.ggml.model", le(8u) + str(model));
    if (pre[0] != '!') kv.emplace_back("tokenizer.ggml.pre", le(8u) + str(pre));
    if (!no_tokens) kv.emplace_back("tokenizer.ggml.tokens", strings(all));
    if (!no_merges) kv.emplace_back("tokenizer.ggml.merges", strings(merges));
    kv.emplace_back("tokenizer.ggml.token_type", le(9u) + le(5u) + le(uint64_t(n)) + kinds);
    if (bos >= 0) kv.emplace_back("tokenizer.ggml.bos_token_id", le(4u) + le(uint32_t(bos)));
    if (eos >= 0) kv.emplace_back("tokenizer.ggml.eos_token_id", le(4u) + le(uint32_t(eos)));
    std::string out = "GGUF" + le(3u) + le(uint64_t(0)) + le(uint64_t(kv.size()));
    for (const auto& [key, value] : kv) out += str(key) + value;
    out.resize(align_up(out.size(), 32));
    const std::string path = build_path("tokenizer_test.gguf");
    std::ofstream(path, std::ios::binary) << out;
    return path;
  }
  std::string error() const {
    return error_of([&] {
      const Gguf gguf(write());
      const Vocab vocab(gguf);
    });
  }
};

struct TokLoaded {
  Gguf gguf;
  Vocab vocab{gguf};
  Tokenizer tokenizer{vocab};
  explicit TokLoaded(const std::string& path) : gguf(path) {}
  std::vector<int32_t> plain(std::string_view s) { return ids.clear(), tokenizer.encode_plain(s, ids), ids; }
  std::vector<int32_t> raw(std::string_view s) { return ids.clear(), tokenizer.encode_raw(s, ids), ids; }
  std::vector<int32_t> ids;
};

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST(Vocab, HashIsFnv1a64) {
  EXPECT_EQ(fnv1a(""), 0xcbf29ce484222325u);
  EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(fnv1a("foobar"), 0x85944171f73967e8u);
  EXPECT_EQ(fnv1a("bar", 3, fnv1a("foo")), fnv1a("foobar"));
}

TEST(Vocab, FindsEveryTokenOfTheFile) {
  const Gguf gguf(data_path("nano.gguf"));
  const Vocab vocab(gguf);
  ASSERT_EQ(vocab.size(), 1536);
  EXPECT_EQ(vocab.n_merges(), 1271u);
  for (int32_t id = 0; id < vocab.size(); id++) EXPECT_EQ(vocab.find(vocab.text(id)), id);
  EXPECT_EQ(vocab.find("no such token"), -1);
  EXPECT_EQ(vocab.find(""), -1);
  EXPECT_EQ(vocab.bos, vocab.find("<｜begin▁of▁sentence｜>"));
  EXPECT_EQ(vocab.eos, vocab.find("<｜end▁of▁sentence｜>"));
  EXPECT_TRUE(vocab.is_control(vocab.bos));
  EXPECT_TRUE(vocab.is_added(vocab.find("<think>")));
  EXPECT_FALSE(vocab.is_added(vocab.byte_id('a')));
  for (int32_t id : {-1, 1536, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(vocab.text(id), "");
    EXPECT_EQ(tok_decode(vocab, {id}), "");
    EXPECT_FALSE(vocab.is_added(id));
  }
}

TEST(Vocab, RefusesBrokenFiles) {
  TokFile f;
  f.tokens = {"ab", "abc"};
  f.merges = {"a b", "ab c"};
  EXPECT_EQ(f.error(), "");
  const auto with = [&](auto change) {
    TokFile g = f;
    change(g);
    return g.error();
  };
  EXPECT_SAYS(with([](TokFile& g) { g.model = "!"; }), "no tokenizer.ggml.model");
  EXPECT_SAYS(with([](TokFile& g) { g.model = "llama"; }), "'llama', expected 'gpt2'");
  EXPECT_SAYS(with([](TokFile& g) { g.no_tokens = true; }), "no tokenizer.ggml.tokens");
  EXPECT_SAYS(with([](TokFile& g) { g.no_merges = true; }), "no tokenizer.ggml.merges");
  EXPECT_SAYS(with([](TokFile& g) { g.n_types = 7; }), "token_type has 7 entries, expected 258, one for each token");
  EXPECT_SAYS(with([](TokFile& g) { g.skip_byte = 'x'; }), "lacks 'x', the symbol of byte 0x78");
  EXPECT_SAYS(with([](TokFile& g) { g.bos = 258; }), "bos_token_id is 258, expected below the 258 tokens");
  EXPECT_SAYS(with([](TokFile& g) { g.eos = 1 << 30; }), "eos_token_id is 1073741824");
  for (const char* broken : {"ab", "", " ab", "ab ", "a b c", "a  b"})
    EXPECT_SAYS(with([&](TokFile& g) { g.merges.push_back(broken); }), "expected two tokens and one space between");
  EXPECT_SAYS(with([](TokFile& g) { g.merges.push_back("ac b"); }), "merges[2] is 'ac b': the left side is not a token");
  EXPECT_SAYS(with([](TokFile& g) { g.merges.push_back("a cb"); }), "the right side is not a token");
  EXPECT_SAYS(with([](TokFile& g) { g.merges.push_back("a c"); }), "the result is not a token");
}

TEST(Vocab, AcceptsWhatRealFilesHave) {
  TokFile f;
  f.tokens = {"ab", "unused", "unused", "", "<x>"};       // texts may repeat: the first owns it
  f.types = {1, 5, 5, 2, 3};
  f.merges = {"a b"};
  f.bos = f.eos = -1;
  TokLoaded t(f.write());
  EXPECT_EQ(t.vocab.find("unused"), 257);
  EXPECT_EQ(t.vocab.bos, -1);
  EXPECT_EQ(t.vocab.eos, -1);
  EXPECT_EQ(t.raw("ab<x>"), (std::vector<int32_t>{256, 260}));
  for (const char* pre : {"never-heard-of", "!"}) {
    f.pre = pre;
    const Gguf gguf(f.write());
    testing::internal::CaptureStderr();
    EXPECT_EQ(Vocab(gguf).pre, PreTokenizer::DeepSeek);
    const std::string warning = testing::internal::GetCapturedStderr();
    EXPECT_SAYS(warning, pre[0] == '!' ? "tokenizer.ggml.pre is missing: splitting" : "pre is 'never-heard-of', unknown: splitting");
  }
}

TEST(Tokenizer, ClassTableIsUnicode16) {
  EXPECT_EQ(fnv1a(class_table(), 0x110000), 0xd856c6714de2045bu);
}

TEST(Tokenizer, SplitsAsTheReferenceDoes) {
  tok_check_pieces("deepseek-v4.txt", PreTokenizer::DeepSeek);
  tok_check_pieces("nano.txt", PreTokenizer::DeepSeek);
  tok_check_pieces("qwen2.txt", PreTokenizer::Qwen2);
}

TEST(Tokenizer, IdsOfTheSmallVocabulary) { tok_check_ids("nano.txt", data_path("nano.gguf")); }

TEST(Tokenizer, IdsOfTheRealVocabularies) {
  const std::string v4 = env_or("DS4_VOCAB", ""), qwen = env_or("DS4_VOCAB_QWEN", "");
  if (v4.empty() && qwen.empty()) GTEST_SKIP() << "neither DS4_VOCAB nor DS4_VOCAB_QWEN is set";
  if (!v4.empty()) tok_check_ids("deepseek-v4.txt", v4);
  if (!qwen.empty()) tok_check_ids("qwen2.txt", qwen);
}

// Any bytes: invalid, truncated and overlong UTF-8, surrogates, NUL.
TEST(Tokenizer, RandomBytesComeBack) {
  TokLoaded t(data_path("nano.gguf"));
  const std::string pieces[] = {"the ", "\xe4\xbd\xa0", "\xe4\xbd", "\xf0\x9f\x98\x80", "\xc0\x80", "\xed\xa0\x80", "<think>",
                                "\r\n", "  ", "123", "\xf4\x90\x80\x80", "'s", std::string(1, '\0'), "\xe3\x80\x82"};
  Rng rng(3);
  for (int i = 0; i < 100000; i++) {
    std::string s;
    const bool parts = rng.next_u64() % 2;
    for (size_t n = rng.next_u64() % 24; n > 0; n--) {
      if (parts && rng.next_u64() % 4) s += pieces[rng.next_u64() % 14];
      else s += char(rng.next_u64() >> 56);
    }
    ASSERT_EQ(tok_decode(t.vocab, t.plain(s)), s);
    for (int32_t id : t.ids) ASSERT_FALSE(t.vocab.is_added(id));
    ASSERT_EQ(tok_decode(t.vocab, t.raw(s)), s);
  }
}

// The definition of BPE, word for word: the adjacent pair of lowest rank, the leftmost of equals, until none is left.
std::vector<int32_t> tok_merge_slowly(const Vocab& vocab, const std::string& s) {
  std::vector<int32_t> ids;
  for (char c : s) ids.push_back(vocab.byte_id(uint8_t(c)));
  for (;;) {
    uint32_t best = kNoMerge;
    size_t at = 0;
    for (size_t i = 0; i + 1 < ids.size(); i++) {
      const uint32_t rank = vocab.find_merge(ids[i], ids[i + 1]);
      if (rank < best) best = rank, at = i;
    }
    if (best == kNoMerge) return ids;
    ids[at] = vocab.merged(best);
    ids.erase(ids.begin() + ptrdiff_t(at) + 1);
  }
}

TEST(Tokenizer, MergesInOrderOfRank) {
  TokLoaded t(data_path("nano.gguf"));
  Rng rng(5);
  for (int i = 0; i < 3000; i++) {
    std::string s;
    const size_t n = 1 + rng.next_u64() % (i % 10 ? 100 : 700), letters = 2 + rng.next_u64() % 12;
    for (size_t k = 0; k < n; k++) s += "etanihorslud"[rng.next_u64() % letters];
    ASSERT_EQ(t.plain(s), tok_merge_slowly(t.vocab, s)) << s;
    ASSERT_EQ(t.plain(s), tok_merge_slowly(t.vocab, s)) << s;    // from the cache, if it is short
  }
}

// Merges that no training would give: in any order, several for one token.
TEST(Tokenizer, MergesInAnyOrderOfRanks) {
  Rng rng(6);
  const auto below = [&](size_t n) { return size_t(rng.next_u64() % n); };
  size_t n_certain = 0;
  for (int round = 0; round < 60; round++) {
    TokFile f;
    const size_t letters = 2 + below(6);
    std::vector<std::string> parts;
    for (size_t i = 0; i < letters; i++) parts.push_back(std::string(1, char('a' + i)));
    for (size_t i = 2 + below(30); i > 0; i--) {
      const std::string a = parts[below(parts.size())], b = parts[below(parts.size())];
      f.merges.insert(f.merges.begin() + ptrdiff_t(below(f.merges.size() + 1)), a + " " + b);
      if (std::find(parts.begin(), parts.end(), a + b) == parts.end()) parts.push_back(a + b);
    }
    f.tokens.assign(parts.begin() + ptrdiff_t(letters), parts.end());
    TokLoaded t(f.write());
    for (uint32_t rank = 0; rank < t.vocab.n_merges(); rank++) n_certain += t.vocab.is_certain(rank);
    for (int i = 0; i < 200; i++) {
      std::string s;
      for (size_t n = 1 + below(i % 20 ? 40 : 300); n > 0; n--) s += char('a' + below(letters));
      ASSERT_EQ(t.plain(s), tok_merge_slowly(t.vocab, s)) << s;
    }
  }
  EXPECT_GT(n_certain, 50u);
}

TEST(Tokenizer, LongPiecesAreFast) {
  const Gguf gguf(env_or("DS4_VOCAB", data_path("nano.gguf").c_str()));
  const Vocab vocab(gguf);
  const auto results = bench_tokenizer(vocab, "");
  EXPECT_EQ(results.size(), 10u);
  for (const TokenizerBench& r : results) EXPECT_LT(r.seconds, 10.0) << r.name;         // 0.2 s without sanitizers
  EXPECT_EQ(bench_tokenizer(vocab, "the\xff text").at(0).bytes, 9u);
}

// Whatever built it: else the speeds of two builds are not of the same text.
TEST(Tokenizer, BenchTextIsTheSame) {
  const Gguf gguf(data_path("nano.gguf"));
  const Vocab vocab(gguf);
  BenchText text(vocab);
  EXPECT_EQ(fnv1a(text.make({BenchText::English}, 100000)), 0x451a5720f5c1ad4au);
  EXPECT_EQ(fnv1a(text.make({BenchText::Code}, 100000)), 0x6ad43341a656b4c1u);
}

TEST(Tokenizer, AddedTokensLeftmostThenLongest) {
  TokFile f;
  f.tokens = {"<a>", "<a>b", "b<", "<think>", "Ġ<"};
  f.types = {3, 3, 4, 4, 1};
  f.merges = {"Ġ <"};
  TokLoaded t(f.write());
  EXPECT_EQ(t.raw("<a>"), (std::vector<int32_t>{256}));
  EXPECT_EQ(t.raw("<a>b<a>"), (std::vector<int32_t>{257, 256}));
  EXPECT_EQ(t.raw("b<a>"), (std::vector<int32_t>{258, t.vocab.byte_id('a'), t.vocab.byte_id('>')}));
  EXPECT_EQ(t.raw("<a<a>"), (std::vector<int32_t>{t.vocab.byte_id('<'), t.vocab.byte_id('a'), 256}));
  EXPECT_EQ(t.raw(" <<think>"), (std::vector<int32_t>{260, 259}));
  EXPECT_EQ(t.raw("<thin"), t.plain("<thin"));
  EXPECT_EQ(t.plain("<a>").size(), 3u);               // typed by a user: text
  EXPECT_EQ(t.plain("<think>").size(), 7u);
  EXPECT_EQ(tok_decode(t.vocab, {259, 260}), "<think> <");
}

// Text runs on across the borders of chunks, added tokens do not.
TEST(Tokenizer, ChunksAreOneText) {
  TokFile f;
  f.tokens = {"<a>", ">\"", ">\"{"};
  f.types = {3};
  f.merges = {"> \"", ">\" {"};
  TokLoaded t(f.write());
  const auto encode = [&](const std::vector<Chunk>& chunks) {
    t.ids.clear();
    t.tokenizer.encode_chunks(chunks.data(), chunks.size(), t.ids);
    return t.ids;
  };
  EXPECT_EQ(encode({{"<a>>", true}, {"\"", false}, {"{", true}}), (std::vector<int32_t>{256, 258}));
  EXPECT_EQ(encode({{"<a>", false}}), t.plain("<a>"));
  EXPECT_EQ(encode({{"<", true}, {"a>", true}}), t.plain("<a>"));
  EXPECT_EQ(encode({{"<", true}, {"a>", false}}), t.plain("<a>"));
  EXPECT_EQ(encode({}).size(), 0u);
}

TEST(Tokenizer, Llama3TakesWholeTokensFirst) {
  TokFile f;
  f.pre = "llama-bpe";
  f.tokens = {"ab", "bc", "abc", "xyz"};
  f.types = {1, 1, 1, 3};
  f.merges = {"b c", "a b"};                          // merging would give a, bc
  TokLoaded t(f.write());
  EXPECT_EQ(t.plain("abc"), (std::vector<int32_t>{258}));
  EXPECT_EQ(t.plain("abcc"), (std::vector<int32_t>{t.vocab.byte_id('a'), 257, t.vocab.byte_id('c')}));
  EXPECT_EQ(t.plain("xyz").size(), 3u);               // never an added token
  EXPECT_EQ(t.plain("123456").size(), 6u);
  std::vector<size_t> lengths;
  split_text(t.vocab.pre, "12345 I'LL'ſ", [&](const uint8_t* p, const uint8_t* q) { lengths.push_back(size_t(q - p)); });
  EXPECT_EQ(lengths, (std::vector<size_t>{3, 2, 2, 3, 3}));
}

}  // namespace
}  // namespace ds4
