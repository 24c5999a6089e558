// Any bytes through the encoder and back: same bytes, no control token out of plain text, chunk borders leave no trace.

static int fuzz_tokenizer(const uint8_t* data, size_t size) {
  using namespace ds4;
  const char* model = std::getenv("DS4_FUZZ_MODEL");
  static const Gguf file(model ? model : "tests/data/nano.gguf");
  static const Vocab vocab(file);
  static Tokenizer tokenizer(vocab);
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto decode = [](const std::vector<int32_t>& ids) {
    std::string s;
    for (int32_t id : ids) vocab.append_bytes(id, s);
    return s;
  };
  std::vector<int32_t> plain, raw, chunked;
  tokenizer.encode_plain(text, plain);
  tokenizer.encode_raw(text, raw);
  if (decode(plain) != text || decode(raw) != text) std::abort();
  for (int32_t id : plain)
    if (vocab.is_added(id)) std::abort();
  const size_t cut = size ? data[0] % size : 0;
  const Chunk chunks[] = {{text.substr(0, cut), false}, {text.substr(cut), false}};
  tokenizer.encode_chunks(chunks, 2, chunked);
  if (chunked != plain) std::abort();
  for (PreTokenizer pre : {PreTokenizer::Qwen2, PreTokenizer::Llama3}) {
    size_t n = 0;
    split_text(pre, text, [&](const uint8_t* p, const uint8_t* q) {
      if (p != data + n || q <= p) std::abort();
      n += size_t(q - p);
    });
    if (n != size) std::abort();
  }
  return 0;
}
