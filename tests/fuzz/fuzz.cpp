// All fuzz targets as one libFuzzer program: the engine is compiled once for them. DS4_FUZZ names the target.
#define DS4_NO_MAIN
#include "../../ds4.cpp"

#include "chat_fuzz.cpp"
#include "gguf_fuzz.cpp"
#include "tokenizer_fuzz.cpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string target = std::getenv("DS4_FUZZ") ? std::getenv("DS4_FUZZ") : "";
  if (target == "chat") return chat_fuzz::fuzz_chat(data, size);
  if (target == "gguf") return fuzz_gguf(data, size);
  if (target == "tokenizer") return fuzz_tokenizer(data, size);
  std::fprintf(stderr, "DS4_FUZZ is '%s', expected chat, gguf or tokenizer\n", target.c_str());
  std::exit(2);
}
