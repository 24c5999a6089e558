#include "ds4_test.h"


namespace ds4 {
namespace {

// -- stop texts ----

TEST(StopFilter, FindsTheEarliestTextHoweverTheStreamIsCut) {
  const std::vector<std::string> stops = {"END", "<|x|>", "EN!", "abab"};
  Rng rng(1);
  for (int round = 0; round < 3000; round++) {
    std::string text;
    const char* const parts[] = {"E", "N", "D", "!", "<|", "x", "|>", "a", "b", " ", "\n"};
    for (size_t n = rng.next_u64() % 24; n > 0; n--) text += parts[rng.next_u64() % 11];
    size_t want = text.size();
    for (const std::string& s : stops) want = std::min(want, text.find(s));
    StopFilter filter(stops);
    std::string out;
    bool found = false;
    for (size_t at = 0; at < text.size() && !found;) {
      const size_t n = 1 + rng.next_u64() % 4;
      found = filter.feed(std::string_view(text).substr(at, n), out);
      EXPECT_EQ(text.compare(0, out.size(), out), 0);
      at += n;
    }
    filter.finish(out);
    EXPECT_EQ(out, text.substr(0, want)) << text;
    EXPECT_EQ(found, want < text.size());
  }
}

TEST(StopFilter, HoldsBackOnlyWhatMayBecomeAStopText) {
  const std::vector<std::string> stops = {"</s>"};
  StopFilter filter(stops);
  std::string out;
  filter.feed("one </", out);
  EXPECT_EQ(out, "one ");
  filter.feed("p", out);
  EXPECT_EQ(out, "one </p");
}

// -- options ----

Options session_parse(std::initializer_list<const char*> words) {
  std::vector<char*> argv = {const_cast<char*>("ds4")};
  for (const char* w : words) argv.push_back(const_cast<char*>(w));
  return parse_options(int(argv.size()), argv.data());
}

TEST(OptionTable, EveryNameFindsItsOptionAndIsExplained) {
  const std::string help = help_text();
  std::vector<std::string> seen;
  for (const Option& o : kOptions) {
    const std::string names = o.names;
    for (size_t at = 0; at < names.size();) {
      const size_t end = std::min(names.find(", ", at), names.size());
      const std::string name = names.substr(at, end - at);
      EXPECT_EQ(&kOptions[find_option(name)], &o) << name;
      EXPECT_EQ(std::count(seen.begin(), seen.end(), name), 0) << name << " is there twice";
      EXPECT_NE(help.find(name), std::string::npos);
      seen.push_back(name);
      at = end + 2;
    }
  }
}

TEST(OptionTable, Values) {
  const Options o = session_parse({"-n", "7", "--temp=0.25", "--top-k", "40", "--seed", "18446744073709551615", "--stop", "a",
                                   "--stop=b=c", "-c", "100", "--repeat-last-n", "-1"});
  EXPECT_EQ(o.generate.max_tokens, 7);
  EXPECT_EQ(o.generate.sampler.temp, 0.25);
  EXPECT_EQ(o.generate.sampler.top_k, 40);
  EXPECT_EQ(*o.seed, UINT64_MAX);
  EXPECT_EQ(o.generate.stop, (std::vector<std::string>{"a", "b=c"}));
  EXPECT_EQ(o.run.ctx, 100u);
  EXPECT_EQ(o.generate.sampler.repeat_last_n, -1);
  EXPECT_TRUE(was_given(o, "--ctx"));
  EXPECT_FALSE(was_given(o, "--min-p"));
  for (const char* bad : {"-1", "1.5", "", " 3", "3 ", "0x10", "4294967296", "99999999999999999999"})
    EXPECT_NE(error_of([&] { session_parse({"-n", bad}); }), "") << bad;
  for (const char* bad : {"", "x", "1x", " 1", "nan", "-0.1", "1e99"})
    EXPECT_NE(error_of([&] { session_parse({"--temp", bad}); }), "") << bad;
}

// -- script expectations ----

TEST(Facts, ExactlyOneLineEach) {
  const Json facts = Json::parse(R"({"Ann": "12", "Bo": 7})", "facts");
  EXPECT_EQ(facts_failure("Ann=12\nBo=7", facts), "");
  EXPECT_EQ(facts_failure("Here:\n  Bo=7 \r\nAnn=12\nCy=3\n", facts), "");
  EXPECT_NE(facts_failure("Bo = 7\nAnn=12", facts), "");
  EXPECT_NE(facts_failure("Bo=7\nBo = 8\nAnn=12", facts), "");
  EXPECT_NE(facts_failure("Ann=12", facts), "");
  EXPECT_NE(facts_failure("Ann=12\nBo=8", facts), "");
  EXPECT_NE(facts_failure("Ann=12\nBo=7\nAnn=13", facts), "");
  EXPECT_NE(facts_failure("Ann=12\nBo=7\nBo=7", facts), "");
  EXPECT_NE(facts_failure("Anna=12\nBo=7", facts), "");
}

// -- characters on a screen ----

TEST(Glyphs, StepsOverMarksAndWideCharacters) {
  const std::string s = "ae\u0301\u65e5\xff\u00e9\xf0\x9f\x99\x82z";
  std::vector<size_t> forward = {0}, backward = {s.size()};
  while (forward.back() < s.size()) forward.push_back(next_glyph(s, forward.back()));
  while (backward.back() > 0) backward.push_back(previous_glyph(s, backward.back()));
  std::reverse(backward.begin(), backward.end());
  EXPECT_EQ(forward, backward);
  EXPECT_EQ(forward, (std::vector<size_t>{0, 1, 4, 7, 8, 10, 14, 15}));
  EXPECT_EQ(glyph_at(s, 4).columns, 2);
  EXPECT_EQ(glyph_at(s, 2).columns, 0);
  EXPECT_EQ(glyph_at("\xe6\x97", 0).nbytes, 1u);
}

// -- session ----

struct NanoRun {
  Gguf file;
  Vocab vocab{file};
  Tokenizer tokenizer{vocab};
  Model model = load_model(file);
  Engine engine;
  std::atomic<bool> stop{false};
  Session session;
  static RunOptions options() {
    RunOptions o;
    o.ctx = 600;
    o.threads = 1;
    return o;
  }
  explicit NanoRun(const std::string& path = data_path("nano.gguf")) : file(path), engine(model, options()), session(engine, vocab, &stop) {}
  std::vector<int32_t> prompt(std::string_view text) {
    const Prompt p = render_chat(Json::array().push(chat_message("user", text)), ChatOptions{false});
    std::vector<int32_t> ids;
    const std::vector<Chunk> chunks = p.chunks();
    tokenizer.encode_chunks(chunks.data(), chunks.size(), ids);
    return ids;
  }
  Answer ask(const std::vector<int32_t>& ids, GenerateOptions o = {}) {
    o.sampler.temp = 0;
    Rng rng(1);
    return session.answer(ids, o, rng, {});
  }
};

TEST(Session, AnswersTheSameFromAnyCacheState) {
  NanoRun run;
  const std::vector<int32_t> a = run.prompt("What is the capital of France?"), b = run.prompt("What is the capital of Japan?");
  std::string filler;
  for (int i = 0; i < 60; i++) filler += "Bob was assigned the number thirty-four. ";
  const std::vector<int32_t> c = run.prompt(filler);
  const Answer first = run.ask(a);
  EXPECT_EQ(first.reply.text, "The capital of France is Paris.");
  EXPECT_EQ(first.cached_tokens, 0u);
  const Answer again = run.ask(a);                       // rewinds over its own answer
  EXPECT_EQ(again.hash, first.hash);
  EXPECT_GE(again.cached_tokens + 1, a.size());
  const Answer other = run.ask(b);
  EXPECT_GT(other.cached_tokens, 4u);
  EXPECT_EQ(other.reply.text, "The capital of Japan is Tokyo.");
  run.ask(c);
  const Answer last = run.ask(a);                        // too far back: from the start
  EXPECT_EQ(last.hash, first.hash);
  EXPECT_EQ(last.tokens, first.tokens);
  NanoRun fresh;
  EXPECT_EQ(fresh.ask(b).hash, other.hash);
}

TEST(Session, InterruptedReadingLeavesNoStaleLogits) {
  NanoRun run;
  const std::vector<int32_t> a = run.prompt("What is the capital of France?"), b = run.prompt("What is the capital of Japan?");
  const size_t common = size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  run.ask(a);
  run.stop = true;
  EXPECT_EQ(run.ask(b).finish, Finish::interrupted);
  run.stop = false;
  const std::vector<int32_t> prefix(a.begin(), a.begin() + ptrdiff_t(common));     // exactly what the cache holds now
  NanoRun fresh;
  EXPECT_EQ(run.ask(prefix).hash, fresh.ask(prefix).hash);
}

TEST(Session, NextTurnReadsOnlyItself) {
  NanoRun run;
  Json messages = Json::array().push(chat_message("user", "My name is Clara."));
  std::vector<int32_t> ids = run.prompt("My name is Clara.");
  const Answer a = run.ask(ids);
  ids.insert(ids.end(), a.tokens.begin(), a.tokens.end());
  messages.push(reply_message(a.reply)).push(chat_message("user", "What is my name?"));
  const Prompt more = render_chat(messages, ChatOptions{false}, 2, a.tokens.back() != run.vocab.eos);
  const std::vector<Chunk> chunks = more.chunks();
  const size_t before = ids.size();
  run.tokenizer.encode_chunks(chunks.data(), chunks.size(), ids);
  const Answer b = run.ask(ids);
  EXPECT_EQ(b.cached_tokens, before - 1);                // all but the end token, which was sampled and never evaluated
  EXPECT_NE(b.reply.text.find("Clara"), std::string::npos);
  NanoRun fresh;
  EXPECT_EQ(fresh.ask(ids).hash, b.hash);
}

TEST(Session, EndsForEveryReason) {
  NanoRun run;
  const std::vector<int32_t> ids = run.prompt("Hello");
  GenerateOptions o;
  EXPECT_EQ(run.ask(ids, o).finish, Finish::stop);
  o.max_tokens = 3;
  EXPECT_EQ(run.ask(ids, o).tokens.size(), 3u);
  EXPECT_EQ(run.ask(ids, o).finish, Finish::length);
  o = {};
  o.ignore_eos = true;
  const Answer full = run.ask(ids, o);
  EXPECT_EQ(full.finish, Finish::context);
  EXPECT_EQ(full.prompt_tokens + full.tokens.size(), run.engine.ctx() + 1u);
  EXPECT_GT(std::count(full.tokens.begin(), full.tokens.end(), run.vocab.eos), 0);
  EXPECT_EQ(full.reply.text.find(kEosText), std::string::npos) << "the end of a turn is not text";
  o = {};
  o.stop = {"help you"};
  EXPECT_EQ(run.ask(ids, o).finish, Finish::stop_text);
  EXPECT_EQ(run.ask(ids, o).reply.text, "Hello! How can I ");
  run.stop = true;
  EXPECT_EQ(run.ask(run.prompt("Who are you?")).finish, Finish::interrupted);
  run.stop = false;
  EXPECT_EQ(run.ask(ids).reply.text, "Hello! How can I help you today?");
  EXPECT_NE(error_of([&] { run.ask(std::vector<int32_t>(700, 5)); }), "");
  EXPECT_NE(error_of([&] { run.ask({}); }), "");
}

TEST(Session, BrokenWeightsEndInAFault) {
  std::string bytes = read_binary(data_path("nano.gguf"));
  {
    const Gguf file(data_path("nano.gguf"));
    const Tensor* router = file.find_tensor("blk.3.ffn_gate_inp.weight");
    ASSERT_TRUE(router && router->type == Type::F16);
    const size_t at = bytes.find(std::string(reinterpret_cast<const char*>(router->data), 64));
    ASSERT_NE(at, std::string::npos);
    bytes.replace(at, 2, "\xff\x7f");                        // a NaN
  }
  const std::string path = build_path("nan_router.gguf");
  std::ofstream(path, std::ios::binary) << bytes;
  NanoRun run(path);
  const Answer a = run.ask(run.prompt("Hello"));
  EXPECT_EQ(a.finish, Finish::fault);
  EXPECT_TRUE(a.tokens.empty());
}

TEST(Session, ComparesWithExpectedTokens) {
  NanoRun run;
  const std::vector<int32_t> ids = run.prompt("Hello");
  std::vector<int32_t> expected = run.ask(ids).tokens;
  Rng rng(1);
  GenerateOptions o;
  o.sampler.temp = 0;
  EXPECT_EQ(run.session.answer(ids, o, rng, {}, {}, &expected).first_difference, SIZE_MAX);
  expected[3] = 42;
  const Answer a = run.session.answer(ids, o, rng, {}, {}, &expected);
  EXPECT_EQ(a.first_difference, 3u);
  EXPECT_GE(a.difference_gap, a.difference_margin);
  EXPECT_GT(a.difference_margin, 0);
}

// The reply as ReplyStream shows it, token by token.
TEST(ReplyStream, StreamsReasoningTextAndCalls) {
  NanoRun run;
  const std::string block =
      "<\uff5cDSML\uff5ctool_calls>\n<\uff5cDSML\uff5cinvoke name=\"f\">\n<\uff5cDSML\uff5cparameter name=\"a\" "
      "string=\"false\">[1]"
      "</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5ctool_calls>";
  std::vector<int32_t> ids;
  run.tokenizer.encode_raw("Let me see.</think>I look.\n\n" + block + " more", ids);
  GenerateOptions o;
  o.thinking = o.tools = true;
  std::string reasoning, text;
  const ShowPiece show = [&](std::string_view piece, bool thought) { (thought ? reasoning : text) += piece; };
  ReplyStream stream(run.vocab, o, show);
  size_t n = 0, greedy = 0;
  while (n < ids.size() && !stream.feed(ids[n])) greedy += stream.greedy(), n++;
  EXPECT_LT(n, ids.size() - 1) << "stops at the end of the block";
  EXPECT_GT(greedy, 20u);
  EXPECT_EQ(stream.finish(), Finish::tool_calls);
  const Reply reply = stream.end();
  EXPECT_EQ(reply.reasoning, "Let me see.");
  EXPECT_EQ(reply.text, "I look.");
  EXPECT_EQ(reasoning, reply.reasoning);
  EXPECT_EQ(text, reply.text);
  ASSERT_EQ(reply.calls.size(), 1u);
  EXPECT_EQ(reply.calls[0].arguments.dump(), R"({"a": [1]})");

  // A block that broke first takes nothing from the one that follows.
  ids.clear();
  run.tokenizer.encode_raw("Write <\uff5cDSML\uff5ctool_calls>:\n\n" + block, ids);
  o.thinking = false;
  const ShowPiece nobody;
  ReplyStream second(run.vocab, o, nobody);
  size_t greedy_again = 0;
  for (n = 0; n < ids.size() && !second.feed(ids[n]); n++) greedy_again += second.greedy();
  EXPECT_EQ(second.finish(), Finish::tool_calls);
  EXPECT_GE(greedy_again, greedy);
}

TEST(Statistics, LineHasItsForm) {
  Options o;
  o.given.assign(kOptionCount, false);
  o.model = data_path("nano.gguf");
  Runtime rt(o);
  Answer a;
  a.prompt_tokens = 60, a.cached_tokens = 8, a.read_tokens = 52, a.tokens.assign(11, 1), a.prompt_seconds = 2, a.seconds = 5;
  const std::string line = stats_line(rt, a);
  double gb_per_second = -1;
  char hash[9] = "";
  int end = 0;
  std::sscanf(line.c_str(), "prompt 52 tok 26.0 t/s | answer 11 tok 2.0 t/s %lf GB/s | ctx 71/4096 | #%8[0-9a-f]%n", &gb_per_second, hash, &end);
  EXPECT_TRUE(gb_per_second >= 0 && std::strlen(hash) == 8 && size_t(end) == line.size()) << line;
  a.read_tokens = 5;                           // interrupted after five
  a.tokens.clear();
  EXPECT_NE(stats_line(rt, a).find("ctx 13/4096"), std::string::npos) << stats_line(rt, a);
}

}  // namespace
}  // namespace ds4
