// A GGUF file from any bytes: loading it, and running a model that was accepted, works or throws Error.
// The input is the head of the file (metadata and tensor directory, as in seeds/gguf); zeros follow as tensor data.

static int fuzz_gguf(const uint8_t* data, size_t size) {
  using namespace ds4;
  static const int fd = memfd_create("ds4-fuzz", 0);
  static const std::string path = format("/proc/self/fd/%d", fd);
  constexpr size_t kZeros = 4 << 20;
  if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != ssize_t(size) || ftruncate(fd, off_t(size + kZeros)) != 0) std::abort();
  try {
    const Gguf file(path);
    try {
      const Vocab vocab(file);
      Tokenizer tokenizer(vocab);
      std::vector<int32_t> ids;
      std::string back;
      tokenizer.encode_raw("Hello, 123 <think>\n", ids);
      for (int32_t id : ids) vocab.append_bytes(id, back);
    } catch (const Error&) {
    }
    const Model model = load_model(file);
    RunOptions o;
    o.ctx = 40;
    o.threads = 1;
    o.prefill_chunk = 9;
    const MemoryPlan plan = memory_plan(model, o);
    if (plan.cache + plan.scratch > (64u << 20) || model.shape.sinkhorn_iters > 100 || model.shape.n_layer > 8) return 0;
    const std::vector<int32_t> ids(20, int32_t(size % model.shape.n_vocab));
    Engine engine(model, o);
    engine.eval(ids.data(), ids.size());
  } catch (const Error&) {
  }
  return 0;
}
