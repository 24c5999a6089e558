// peer_bench MODEL THREADS PROMPT GEN — tokens per second of llama.cpp: reading PROMPT tokens, then GEN single ones.
// Prints "prompt P decode D"; the better of two runs each. bench_peers.py gives ds4 the same ids.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Tokens per second of handing n tokens to the model `batch` at a time; ends the program on an error.
static double rate(llama_context* context, llama_token* tokens, int n, int batch) {
  const double start = seconds();
  for (int i = 0; i < n; i += batch)
    if (llama_decode(context, llama_batch_get_one(tokens + i, std::min(batch, n - i))) != 0) {
      std::fprintf(stderr, "peer_bench: llama_decode failed\n");
      std::exit(1);
    }
  return n / (seconds() - start);
}

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: peer_bench MODEL THREADS PROMPT GEN\n");
    return 2;
  }
  const int threads = std::atoi(argv[2]), n_prompt = std::atoi(argv[3]), n_gen = std::atoi(argv[4]);
  llama_backend_init();
  llama_model_params mp = llama_model_default_params();
  mp.n_gpu_layers = 0;
  mp.use_extra_bufts = false;                  // no repacked copy of the weights: it hardly helps and doubles the memory
  llama_model* model = llama_model_load_from_file(argv[1], mp);
  llama_context_params cp = llama_context_default_params();
  cp.n_ctx = uint32_t(n_prompt + n_gen + 256);
  cp.n_batch = 4096;
  cp.n_threads = cp.n_threads_batch = threads;
  llama_context* context = model ? llama_init_from_model(model, cp) : nullptr;
  if (!context) return 1;
  std::vector<llama_token> tokens(size_t(n_prompt + n_gen));
  uint32_t seed = 1;
  for (llama_token& t : tokens) {
    seed = seed * 1664525u + 1013904223u;
    t = llama_token((seed >> 8) % 100000 + 1000);
  }
  double prompt = 0, decode = 0;
  for (int run = 0; run < 2; run++) {
    llama_memory_clear(llama_get_memory(context), true);
    prompt = std::max(prompt, rate(context, tokens.data(), n_prompt, 512));
    decode = std::max(decode, rate(context, tokens.data() + n_prompt, n_gen, 1));
  }
  std::printf("prompt %.3f decode %.3f\n", prompt, decode);
  return 0;
}
