// The whole suite as one translation unit: the engine is compiled once for all of it.
#include "kernels_test.cpp"
#include "threads_test.cpp"
#include "gguf_test.cpp"
#include "model_test.cpp"
#include "tokenizer_test.cpp"
#include "chat_test.cpp"
#include "forward_test.cpp"
#include "sampler_test.cpp"
#include "session_test.cpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
