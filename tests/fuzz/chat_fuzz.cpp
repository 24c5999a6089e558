// libFuzzer: JSON, the reply parsers, the gate and UTF-8 output on any bytes.
// The first byte chooses the modes and the seed of the cuts; the rest is the text.

namespace chat_fuzz {

using namespace ds4;

static void require(bool ok) {
  if (!ok) __builtin_trap();
}

static void fuzz_json(std::string_view text) {
  std::string once;
  try {
    const Json v = Json::parse(text, "input");
    once = v.dump();
    if (v.is_array()) render_chat(v, ChatOptions());
  } catch (const Error&) {
  }
  if (!once.empty()) require(Json::parse(once, "dump").dump() == once && utf8_lossy(once) == once);
}

static void fuzz_reply(std::string_view text, bool thinking, bool tools, Rng& rng) {
  Completion strict;
  const bool ok = parse_completion(text, thinking, strict);
  ReplyParser whole(thinking, tools), cut(thinking, tools);
  Utf8Stream utf8;
  std::string shown, streamed;
  whole.feed(text);
  for (size_t i = 0, n; i < text.size(); i += n) {
    n = std::min<size_t>(text.size() - i, 1 + size_t(rng.next_u64() % 6));
    cut.feed(text.substr(i, n));
    shown += cut.new_text();
    streamed += utf8.push(text.substr(i, n));
    require(utf8_lossy(streamed) == streamed || text.size() > 256);
  }
  require(cut.greedy() == whole.greedy());
  cut.finish();
  whole.finish();
  shown += cut.new_text();
  require(shown == whole.reply().text && cut.reply().reasoning == whole.reply().reasoning);
  require(tool_calls_json(cut.reply().calls).dump() == tool_calls_json(whole.reply().calls).dump());
  require(streamed + utf8.flush() == utf8_lossy(text));
  if (!thinking && whole.reply().calls.empty()) require(whole.reply().text == text);
  if (ok && strict.calls.empty() && !tools) require(whole.reply().reasoning == strict.reasoning);
  for (char c : terminal_safe(text)) require(uint8_t(c) >= 0x20 || c == '\n' || c == '\t');
}

static int fuzz_chat(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  Rng rng(data[0]);
  fuzz_json(text);
  fuzz_reply(text, data[0] & 1, data[0] & 2, rng);
  return 0;
}

}  // namespace chat_fuzz
