// ds4.cpp — DeepSeek V4 Flash on plain CPUs, in one file.                                  MIT, see LICENSE
//
// =============================================================================
// 0. MAP — what this is, how to read it, what always holds.
// =============================================================================
// A GGUF file of architecture `deepseek4` goes in, a chat comes out. Read from top to bottom: every section stands only
// on the ones above it. `grep -n '^// [0-9]*\. ' ds4.cpp` is the table of contents:
//
//    1  BASE        includes, errors, checked sizes, memory                                    std
//    2  NUMBERS     half, bfloat16, FP8, FP4, hashes, random numbers, exact double math        1
//    3  BLOCKS      weight block layouts, grids, activation rows, the kernel table             1 2
//    4  VECTOR      f32x16, i32x16, i8x64: the same lanes on AVX-512, AVX2, NEON, scalar       1-3
//    5  KERNELS     unpack, quantise, matrix products, norms, attention, sampler passes        4
//    6  DISPATCH    sections 4 and 5 stamped once per instruction set; pick one                5
//    7  THREADS     one pool, dynamic chunks, robust to a busy core                            1
//    8  GGUF        map files and shards, index metadata and tensors, trust nothing            1 2 3
//    9  MODEL       shape and weights, bound by name, every dimension checked                  1 3 6 8
//   10  VOCAB       FNV-1a open-addressing table of tokens, merges                             2 8
//   11  TOKENIZER   Unicode classes, splitters, byte-pair merging, added tokens                2 10
//   12  CHAT        JSON, prompt template, tool calls (DSML), UTF-8 out                        1 11
//   13  CACHE       raw window, compressed rows, compressor state                              1 3 9
//   14  LAYER       hyper-connections, attention, indexer, router, experts                     6 7 9 13
//   15  FORWARD     embed, layers, head: tokens in, logits out                                 14
//   16  SAMPLER     penalties, temperature, top-k, top-p, min-p, draw                          2 5 6
//   17  SESSION     prefix reuse, token loop, stop rules, statistics                           11 12 15 16
//   18  TERMINAL    line editor, colour, progress, Ctrl-C                                      1 7 12
//   19  CLI         option table, chat, scripts, inspection, benchmarks                        17 18
//   20  MAIN        run, report the error, exit code                                           19
//
// To follow one token: Session::generate (17) -> Engine::eval (15) -> LayerRunner::run (14) -> Kernels (5).
//
// What always holds:
// - Results are defined bit for bit. Instruction set, thread count, prompt chunking and cache history never change one:
//   threads and tiles split rows and tokens, never a sum; float sums run in sixteen lanes, element k in lane k % 16;
//   integer sums are exact; fusing is written fma(a, b, c); no libm function decides a bit.
// - A span of tokens has one code path: a span of one is decoding, a longer one is prompt reading.
// - Weight matrices are views into the mapped file and are never copied; scratch and cache are sized once, at start.
// - Every number from a file is checked before it is used; bad input is an Error with one sentence, never a crash.
// - stdout carries the answer only.
//
// The file is compiled in several passes: the first runs through section 5 for the scalar kernels, then section 6
// includes the file again for each instruction set (sections 4 and 5 only), then everything else follows once.

#ifndef DS4_PASS                 // first of several passes over this file: see 6. DISPATCH
#define DS4_PASS 0
#define DS4_MAIN_PASS

// =============================================================================
// 1. BASE — includes, build guards, errors, checked sizes, clock.   uses: std
// =============================================================================
// Everything below stands on this. Errors of the user's making (file, prompt, option) are thrown
// as Error and caught once, in main.

#if defined(__FAST_MATH__)
#error "ds4.cpp must not be built with -ffast-math: its results are defined bit for bit"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ds4.cpp reads GGUF in place and needs a little-endian machine"
#endif
#if defined(__SIZEOF_POINTER__) && __SIZEOF_POINTER__ < 8
#error "ds4.cpp maps files of 80 GB and needs a 64-bit machine"
#endif

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstddef>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#if !defined(__clang__)          // GCC 12 warns about its own _mm512_undefined_*() (PR105593)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF     // GCC: -ffp-contract=off in the Makefile
#endif

#define DS4_INLINE inline __attribute__((always_inline))
#define DS4_STR_(x) #x
#define DS4_STR(x) DS4_STR_(x)
#define DS4_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define DS4_UNROLL_VECTORS DS4_PRAGMA(unroll)
#define DS4_TARGET_PUSH(isa) DS4_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define DS4_TARGET_POP DS4_PRAGMA(clang attribute pop)
#else
#define DS4_UNROLL_VECTORS DS4_PRAGMA(GCC unroll 16)
#define DS4_TARGET_PUSH(isa) DS4_PRAGMA(GCC push_options) DS4_PRAGMA(GCC target(isa))
#define DS4_TARGET_POP DS4_PRAGMA(GCC pop_options)
#endif

namespace ds4 {

constexpr char kVersion[] = "0.1.0";

// Exit codes of the program (table in the README).
enum ExitCode { kExitOk = 0, kExitBadInput = 1, kExitUsage = 2, kExitMismatch = 3, kExitFault = 4, kExitInterrupted = 130 };

// An error the user can act on. what() is one line: the thing, what was found, what was expected.
struct Error : std::runtime_error {
  explicit Error(const std::string& message, int exit_code = kExitBadInput) : std::runtime_error(message), code(exit_code) {}
  int code;
};

static std::string vformat(const char* fmt, va_list args) {
  va_list copy;
  va_copy(copy, args);
  const int n = std::vsnprintf(nullptr, 0, fmt, copy);
  va_end(copy);
  std::string s(n > 0 ? size_t(n) : 0, '\0');
  if (n > 0) std::vsnprintf(s.data(), s.size() + 1, fmt, args);
  return s;
}

// printf into a string.
__attribute__((format(printf, 1, 2))) static std::string format(const char* fmt, ...) {
  va_list args;
  va_start(args, fmt);
  std::string s = vformat(fmt, args);
  va_end(args);
  return s;
}

static unsigned long long ull(uint64_t n) { return n; }      // for %llu

// "1 token", "2 tokens".
static std::string counted(uint64_t n, const char* noun) {
  return format("%llu %s%s", ull(n), noun, n == 1 ? "" : "s");
}

// Throws Error with exit code 1 (bad input).
[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char* fmt, ...) {
  va_list args;
  va_start(args, fmt);
  std::string s = vformat(fmt, args);
  va_end(args);
  throw Error(s);
}

// Throws Error with exit code 2 (bad usage).
[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail_usage(const char* fmt, ...) {
  va_list args;
  va_start(args, fmt);
  std::string s = vformat(fmt, args);
  va_end(args);
  throw Error(s, kExitUsage);
}

// The text with control characters (C0, DEL, C1 as UTF-8) as \xNN, but for those in `keep`.
static std::string escape_controls(std::string_view s, std::string_view keep) {
  std::string out;
  for (size_t i = 0; i < s.size(); i++) {
    uint8_t c = uint8_t(s[i]);
    const bool c1 = c == 0xc2 && i + 1 < s.size() && (s[i + 1] & 0xe0) == 0x80;      // U+0080..U+009F
    if (c1) c = uint8_t(s[++i]);
    if (c1 || c == 0x7f || (c < 0x20 && keep.find(char(c)) == keep.npos)) out += format("\\x%02x", c);
    else out += char(c);
  }
  return out;
}

static bool g_quiet = false;     // -q: no notes, warnings, progress or statistics on stderr

// One line on stderr, "ds4: warning: ...", unless -q. It quotes file names, which may hold anything.
__attribute__((format(printf, 1, 2))) static void warn(const char* fmt, ...) {
  if (g_quiet) return;
  va_list args;
  va_start(args, fmt);
  const std::string s = vformat(fmt, args);
  va_end(args);
  std::fprintf(stderr, "ds4: warning: %s\n", escape_controls(s, "").c_str());
}

// Sizes that come from a file are multiplied and added only through these.
// They throw Error naming `what` when the result does not fit into 64 bits.
static uint64_t checked_mul(uint64_t a, uint64_t b, const char* what) {
  uint64_t r;
  if (__builtin_mul_overflow(a, b, &r)) fail("%s: %llu x %llu overflows 64 bits", what, ull(a), ull(b));
  return r;
}
static uint64_t checked_add(uint64_t a, uint64_t b, const char* what) {
  uint64_t r;
  if (__builtin_add_overflow(a, b, &r)) fail("%s: %llu + %llu overflows 64 bits", what, ull(a), ull(b));
  return r;
}
// Rounds n up to a multiple of the power of two `align`.
constexpr uint64_t align_up(uint64_t n, uint64_t align) { return (n + align - 1) & ~(align - 1); }
constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// Seconds of the monotonic clock.
static double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Median time of f() in seconds, for benchmarks: one call to warm up and at least `least` more, then on for `budget`
// seconds, at most `most` calls in all.
template <class F>
static double median_seconds(const F& f, double budget = 0.4, size_t least = 3, size_t most = 1000) {
  std::vector<double> times;
  const double begin = now_seconds();
  do {
    const double start = now_seconds();
    f();
    times.push_back(now_seconds() - start);
  } while (times.size() < least + 1 || (now_seconds() - begin < budget && times.size() < most));
  times.erase(times.begin());
  std::nth_element(times.begin(), times.begin() + ptrdiff_t(times.size() / 2), times.end());
  return times[times.size() / 2];
}

// Asks for pages of 2 MB behind [p, p + n): what is read in a stream loses a sixth of its speed in pages of 4 kB. False if the
// system knows no such request.
constexpr size_t kLargePage = size_t(2) << 20;
static bool want_large_pages(void* p, size_t n) { return madvise(p, n, MADV_HUGEPAGE) == 0; }

static bool is_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}
// How a core reads memory fastest. AMD's fetch one stream ahead by themselves, and being asked for more slows them down (Zen 4:
// plain reading 31 GB/s, from four places asked for ahead 23; Q8_0 rows 29 and 24). Others want several places at once, asked for.
static bool g_one_stream = is_amd();
// Whether a byte is looked up among 128 (vpermi2b) as fast as among 64; on Intel it takes three operations.
static bool g_fast_byte_tables = is_amd();

// Memory aligned to a cache line (64 bytes), from 4 MB on in large pages, zeroed; T must be trivial.
template <class T>
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t n) { resize(n); }
  // Drops the contents. Throws Error when the memory is not there.
  void resize(size_t n) {
    data_.reset();
    size_ = n;
    if (n == 0) return;
    const uint64_t wanted = checked_mul(n, sizeof(T), "buffer"), align = wanted < 2 * kLargePage ? 64 : kLargePage;
    const size_t nbytes = size_t(checked_add(wanted, align - 1, "buffer") / align * align);
    void* p = std::aligned_alloc(size_t(align), nbytes);
    if (!p) fail("out of memory: %.1f MB wanted", double(nbytes) / 1e6);
    if (align == kLargePage) want_large_pages(p, nbytes);
    std::memset(p, 0, nbytes);
    data_.reset(static_cast<T*>(p));
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t size_ = 0;
};

// Memory handed out in order from one anonymous mapping; pages (of 2 MB, if there are) that nobody touches cost nothing.
// Lay out twice with the same calls: the first pass only counts, map() gets the memory, the second hands it out.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { if (base_) munmap(base_, size_); }
  // n zeroed elements at a multiple of 64 bytes, and 64 bytes more: vector loads may look past the end (null while counting).
  template <class T>
  T* take(uint64_t n) {
    const uint64_t at = used_;
    used_ = checked_add(used_, align_up(checked_add(checked_mul(n, sizeof(T), "memory"), 64, "memory"), 64), "memory");
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  uint64_t bytes() const { return used_; }
  void map(const char* what) {
    size_ = size_t(used_);
    void* p = mmap(nullptr, std::max<size_t>(size_, 64), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("out of memory: the %s wants %.1f MB", what, double(used_) / 1e6);
    want_large_pages(p, size_);
    base_ = static_cast<uint8_t*>(p);
    used_ = 0;
  }

 private:
  uint8_t* base_ = nullptr;
  uint64_t used_ = 0;
  size_t size_ = 0;
};

}  // namespace ds4

// =============================================================================
// 2. NUMBERS — number formats one value at a time, hashes, random numbers, exact double math.   uses: 1
// =============================================================================
// The scalar definitions that vector code must reproduce bit for bit.

namespace ds4 {

template <class To, class From>
DS4_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
DS4_INLINE T load_le(const void* p) {     // unaligned little-endian load
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

// IEEE half -> float, exact; NaN payloads kept (quietened the way F16C does it).
static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, em = h & 0x7fff;
  if (em > 0x7c00) return bit_cast<float>(sign | 0x7fc00000u | (em & 0x3ff) << 13);
  if (em == 0x7c00) return bit_cast<float>(sign | 0x7f800000u);
  if (em >= 0x0400) return bit_cast<float>(sign | ((em << 13) + 0x38000000u));
  return bit_cast<float>(sign | bit_cast<uint32_t>(float(em) * 0x1p-24f));
}

// float -> IEEE half, round to nearest even, overflow to infinity.
static inline uint16_t f32_to_f16(float f) {
  const uint32_t u = bit_cast<uint32_t>(f), sign = (u >> 16) & 0x8000, em = u & 0x7fffffff;
  if (em > 0x7f800000) return uint16_t(sign | 0x7e00 | ((em >> 13) & 0x3ff));
  if (em >= 0x477ff000) return uint16_t(sign | 0x7c00);              // 65520 and more
  if (em < 0x38800000) {                                            // subnormal half: let the adder round
    const float r = bit_cast<float>(em) + 0.5f;
    return uint16_t(sign | (bit_cast<uint32_t>(r) - 0x3f000000u));
  }
  const uint32_t r = em + 0xfff + ((em >> 13) & 1);
  return uint16_t(sign | ((r - 0x38000000u) >> 13));
}

// bfloat16 is the upper half of a float.
static inline float bf16_to_f32(uint16_t h) { return bit_cast<float>(uint32_t(h) << 16); }

// Smallest power of two s with amax / s <= top, for top = 1.m * 2^e given as mantissa limit and exponent.
static inline float pow2_scale(float amax, uint32_t top_mantissa, int top_exponent) {
  const uint32_t u = bit_cast<uint32_t>(amax);
  const int e = int(u >> 23) - 127 - top_exponent + ((u & 0x7fffff) > top_mantissa ? 1 : 0);
  return bit_cast<float>(uint32_t(std::max(e, -126) + 127) << 23);
}
// Scale of one FP8 block: amax / s <= 448 = 1.75 * 2^8, amax floored at 1e-4.
static inline float fp8_scale(float amax) { return pow2_scale(std::max(amax, 1e-4f), 0x600000, 8); }
// Scale of one FP4 block: amax / s <= 6 = 1.5 * 2^2, amax floored at 6 * 2^-126.
static inline float fp4_scale(float amax) { return pow2_scale(std::max(amax, 6.0f * 0x1p-126f), 0x400000, 2); }

// FNV-1a, 64 bits. Start from kFnvBasis; chain by passing the previous hash.
constexpr uint64_t kFnvBasis = 14695981039346656037ull, kFnvPrime = 1099511628211ull;
static inline uint64_t fnv1a(const void* data, size_t n, uint64_t h = kFnvBasis) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * kFnvPrime;
  return h;
}
static inline uint64_t fnv1a(std::string_view s) { return fnv1a(s.data(), s.size()); }

// xorshift64*: state 0 becomes the golden ratio, so every seed works.
struct Rng {
  uint64_t state;
  explicit Rng(uint64_t seed = 0) : state(seed) {}
  uint64_t next_u64() {
    uint64_t x = state ? state : 0x9e3779b97f4a7c15ull;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    state = x;
    return x * 0x2545f4914f6cdd1dull;
  }
  // Uniform in [0, 1): the top 24 bits.
  float next_float() { return float(next_u64() >> 40) * 0x1p-24f; }
};

// exp, log and sin/cos in double with nothing but + - * / and fma, so that no libm decides a bit.
// Absolute errors below 1e-15 of the result (exp: relative; sincos: for |x| < 1e8).
static DS4_INLINE double exp_f64(double x) {
  if (x != x) return x;
  x = std::min(std::max(x, -708.0), 709.0);
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  double r = std::fma(n, -6.93147180369123816490e-01, x);
  r = std::fma(n, -1.90821492927058770002e-10, r);
  double p = 1.0 / 6227020800.0;                                    // Taylor to r^13, |r| <= 0.3466
  static constexpr double kC[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                  1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  for (double c : kC) p = std::fma(p, r, c);
  return p * bit_cast<double>(uint64_t(int64_t(n) + 1023) << 52);
}

// Natural logarithm of a positive normal x.
static DS4_INLINE double log_f64(double x) {
  uint64_t u = bit_cast<uint64_t>(x);
  int e = int(u >> 52) - 1023;
  double m = bit_cast<double>((u & 0xfffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.4142135623730951) { m *= 0.5; e++; }
  const double s = (m - 1.0) / (m + 1.0), z = s * s;                // log m = 2 atanh s, |s| <= 0.1716
  double p = 1.0 / 23;
  static constexpr double kC[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3};
  for (double c : kC) p = std::fma(p, z, c);
  const double t = std::fma(s * z, p, s);
  return std::fma(double(e), 6.93147180369123816490e-01, std::fma(double(e), 1.90821492927058770002e-10, 2.0 * t));
}

// log(1 + exp(x)) and the logistic function.
static DS4_INLINE double softplus_f64(double x) {
  if (!(x <= 40.0)) return x;                                       // NaN stays NaN
  const double e = exp_f64(x);
  if (e < 1e-5) return e * (1.0 - e * (0.5 - e * (1.0 / 3)));       // log1p for tiny e
  return log_f64(1.0 + e);
}
static inline double sigmoid_f64(double x) { return 1.0 / (1.0 + exp_f64(-x)); }

static inline void sincos_f64(double x, double* s, double* c) {
  const double n = std::floor(x * 0.63661977236758134308 + 0.5);    // x = n * pi/2 + r
  double r = std::fma(n, -1.57079632679489655800e+00, x);
  r = std::fma(n, -6.12323399573676603587e-17, r);
  const double z = r * r;
  double ps = -1.0 / 1307674368000.0, pc = 1.0 / 20922789888000.0;  // sin to r^15, cos to r^16, |r| <= pi/4
  static constexpr double kS[] = {1.0 / 6227020800, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6};
  static constexpr double kC[] = {-1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5};
  for (double k : kS) ps = std::fma(ps, z, k);
  for (double k : kC) pc = std::fma(pc, z, k);
  const double sn = std::fma(r * z, ps, r), cs = std::fma(z, pc, 1.0);
  switch (int64_t(n) & 3) {
    case 0: *s = sn; *c = cs; break;
    case 1: *s = cs; *c = -sn; break;
    case 2: *s = -sn; *c = -cs; break;
    default: *s = -cs; *c = sn; break;
  }
}

}  // namespace ds4

// =============================================================================
// 3. BLOCKS — tensor types, their blocks as they lie in the file, grids, the kernel table's shape.   uses: 1 2
// =============================================================================
// A row of a matrix is a sequence of blocks; h16 fields are IEEE halves; everything is little-endian and unaligned.
// `lo`, `hi`: low and high nibble. Element i of a block of 256 is in 32-group i/32 and 16-group i/16.

namespace ds4 {

enum class Type : uint32_t {         // ids of ggml; the gaps were types that are gone
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q8_1 = 9, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
  Q6_K = 14, Q8_K = 15, IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23,
  I8 = 24, I16 = 25, I32 = 26, I64 = 27, F64 = 28, IQ1_M = 29, BF16 = 30, TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39, NVFP4 = 40,
};

struct BlockQ4_0 { uint16_t d; uint8_t q[16]; };                                   // d*(q-8); 0-15 lo, 16-31 hi
struct BlockQ4_1 { uint16_t d, m; uint8_t q[16]; };                                // d*q + m
struct BlockQ5_0 { uint16_t d; uint8_t h[4], q[16]; };                             // bit 4 of q[j] is bit j of h; d*(q-16)
struct BlockQ5_1 { uint16_t d, m; uint8_t h[4], q[16]; };                          // d*q + m
struct BlockQ8_0 { uint16_t d; int8_t q[32]; };                                    // d*q
struct BlockMXFP4 { uint8_t e, q[16]; };                                           // 2^(e-128) * kFp4[q]
struct BlockIQ4_NL { uint16_t d; uint8_t q[16]; };                                 // d*kIq4[q]
struct BlockQ2_K { uint8_t s[16], q[64]; uint16_t d, m; };                         // d*lo(s)*q - m*hi(s)
struct BlockQ3_K { uint8_t h[32], q[64], s[12]; uint16_t d; };                     // d*(s-32)*(q-4), bit 2 of q in h
struct BlockQ4_K { uint16_t d, m; uint8_t s[12], q[128]; };                        // d*s*q - m*mn
struct BlockQ5_K { uint16_t d, m; uint8_t s[12], h[32], q[128]; };                 // same; bit 4 of q in h
struct BlockQ6_K { uint8_t ql[128], qh[64]; int8_t s[16]; uint16_t d; };           // d*s*(q-32)
struct BlockTQ1_0 { uint8_t q[48], h[4]; uint16_t d; };                            // d*(q-1), five base-3 digits a byte
struct BlockTQ2_0 { uint8_t q[64]; uint16_t d; };                                  // d*(q-1)
struct BlockIQ1_S { uint16_t d; uint8_t q[32]; uint16_t h[8]; };                   // d*(2s+1) * (grid +- 1/8)
struct BlockIQ1_M { uint8_t q[32], h[16]; uint16_t s[4]; };                        // d: top nibbles of s[0..3]
struct BlockIQ2_XXS { uint16_t d; struct { uint8_t q[4], a[4]; } g[8]; };          // d/8 * (2s+1) * +-grid; a = signs | s << 28
struct BlockIQ2_XS { uint16_t d, q[32]; uint8_t s[8]; };                           // q = grid | signs << 9
struct BlockIQ2_S { uint16_t d; uint8_t q[32], sg[32], h[8], s[8]; };              // grid index q | two bits of h
struct BlockIQ3_XXS { uint16_t d; uint8_t q[64], a[8][4]; };                       // d/4 * (2s+1) * +-grid
struct BlockIQ3_S { uint16_t d; uint8_t q[64], h[8], sg[32], s[4]; };              // d * (2s+1) * +-grid
struct BlockIQ4_XS { uint16_t d, sh; uint8_t sl[4], q[128]; };                     // d*(s-32)*kIq4[q]

struct TypeInfo {
  const char* name;
  uint32_t block_elems = 0, block_bytes = 0;
  bool supported() const { return block_bytes != 0; }          // else known by name, but no kernel reads it
};

// What is known about the ggml type `id`; null if no ggml type has this id.
static inline const TypeInfo* type_info(uint32_t id) {
  static constexpr TypeInfo kTypes[] = {
      {"F32", 1, 4},      {"F16", 1, 2},        {"Q4_0", 32, 18},    {"Q4_1", 32, 20},     {"Q4_2"},
      {"Q4_3"},           {"Q5_0", 32, 22},     {"Q5_1", 32, 24},    {"Q8_0", 32, 34},     {"Q8_1"},
      {"Q2_K", 256, 84},  {"Q3_K", 256, 110},   {"Q4_K", 256, 144},  {"Q5_K", 256, 176},   {"Q6_K", 256, 210},
      {"Q8_K"},           {"IQ2_XXS", 256, 66}, {"IQ2_XS", 256, 74}, {"IQ3_XXS", 256, 98}, {"IQ1_S", 256, 50},
      {"IQ4_NL", 32, 18}, {"IQ3_S", 256, 110},  {"IQ2_S", 256, 82},  {"IQ4_XS", 256, 136}, {"I8"},
      {"I16"},            {"I32", 1, 4},        {"I64"},             {"F64"},              {"IQ1_M", 256, 56},
      {"BF16", 1, 2},     {"Q4_0_4_4"},         {"Q4_0_4_8"},        {"Q4_0_8_8"},         {"TQ1_0", 256, 54},
      {"TQ2_0", 256, 66}, {"IQ4_NL_4_4"},       {"IQ4_NL_4_8"},      {"IQ4_NL_8_8"},       {"MXFP4", 32, 17},
      {"NVFP4"},
  };
  return id < sizeof(kTypes) / sizeof(kTypes[0]) ? &kTypes[id] : nullptr;
}
static inline const TypeInfo& type_info(Type t) { return *type_info(uint32_t(t)); }

static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24, "GGUF");
static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockMXFP4) == 17 && sizeof(BlockIQ4_NL) == 18, "GGUF");
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144 && sizeof(BlockQ5_K) == 176, "GGUF");
static_assert(sizeof(BlockQ6_K) == 210 && sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66, "GGUF");
static_assert(sizeof(BlockIQ1_S) == 50 && sizeof(BlockIQ1_M) == 56 && sizeof(BlockIQ4_XS) == 136, "GGUF");
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82, "GGUF");
static_assert(sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110, "GGUF");

// Bytes of a row of n elements, n a multiple of the block.
static inline uint64_t row_bytes(Type t, uint64_t n) {
  return n / type_info(t).block_elems * type_info(t).block_bytes;
}

// -- value tables ----

constexpr int8_t kFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};                // twice E2M1
constexpr int8_t kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// A grid is a list of vectors of N values out of L levels. Read as base-L numbers, first value lowest, it ascends;
// stored are the gaps, a printable character each ('@' = 0, backslash skipped, '~' = 61 more to come).
// An entry becomes N bytes of an integer E, byte i = levels[digit i].
template <class E, size_t kSize>
constexpr std::array<E, kSize> expand_grid(const char* gaps, const uint8_t* levels, unsigned n_levels) {
  std::array<E, kSize> grid{};
  unsigned code = 0;
  for (size_t k = 0; k < kSize; gaps++) {
    code += unsigned(*gaps - '@' - (*gaps > '\\' ? 1 : 0));
    if (*gaps == '~') continue;
    E e = 0;
    unsigned rest = code;
    for (size_t i = 0; i < sizeof(E); i++, rest /= n_levels) e |= E(levels[rest % n_levels]) << (8 * i);
    grid[k++] = e;
  }
  return grid;
}

// The levels are stored with an offset that makes every signed value a positive byte (see Format in 5. KERNELS):
// IQ2 8 25 43 and IQ3_XXS 4 .. 62 plus 64, IQ3_S 1 3 .. 15 plus 16, IQ1 eight times -1 0 1 plus 9.
constexpr uint8_t kLevels2[3] = {72, 89, 107}, kLevels1[3] = {1, 9, 17};
constexpr uint8_t kLevels3xxs[8] = {68, 76, 84, 92, 100, 108, 116, 126}, kLevels3s[8] = {17, 19, 21, 23, 25, 27, 29, 31};

alignas(64) constexpr std::array<uint64_t, 256> kGrid2xxs = expand_grid<uint64_t, 256>(
    "@BBBBBBFBDBBBFFDBFBFLHBFDN_LLBReZBFJBFBDLJBFLFBDLNTBJXBR_RFDBFLDBFBVXXyJ~IBFJHRLFDNFLRHJqJsFLDLTkacN~GBFR]ZD~GomBFVP"
    "HBsHqB~SBFRNi]T~dXLq~~DuBFFDBFFHDJBFRR]HDXHXHJ_FLePVJ}~UBFRDskDJyaRFDFBeFXZo~I~SBX~MgkJFa}}~QFRX_iy_eD~YBo~~L~~~`BFT"
    "]]LL~C~KBFDNReacVTRg~U~[~MFLFoVi{sTJ~[~~{m~~XcV_~M~d~~~~Tq", kLevels2, 3);
alignas(64) constexpr std::array<uint64_t, 512> kGrid2xs = expand_grid<uint64_t, 512>(
    "@BBBBBBBBBBBBDBBBBBBBDBFBBBDBDBJBBBBBBBBBBFBBBDBFFDBFRBBBDBFJBFDNHTBBBBBBBDBFBBBDBBDJBFRBBBDBFJBFJH]BFNDB]XBBBBBBFDF"
    "BFFLRHBBFR]FTRFmDJBBBBBBBDBFBBBDBFHBBFRBBBDBFJBFRLBNBBDRReBBBDBFJBDBLF]BFRwLVqBFBPLTVDo~GkBBBBBBBFJBFRRJBFRFPaTcXDBF"
    "PBw]JaLP}DFBJVTN{LXLgDBTBBBBBBBDBFBBBBBBFDFBFRBBBDBFJBFRDPHBFBNBwBBBDBDBJBFRLPBFLFmJHVFoBFRDHHcJTFPa~QBBBDBFFDBFR]BF"
    "DNBu_sBBFJHRJRHFqFiaVHLPHc]JB~rXBFRLHLTB~jN_PN~ORDm~[us~CcHcBBBDBFHBBFRBVBBBBDRJFgReBPFDBFBBNRPT_oTg]FPVJBVH~dcFHJDB"
    "FRNPXT]~MTTDZFF~CgBm~^ig}aeBDBJHooFcDBDT]Rei~~VTTJBDqFFwBoBgP", kLevels2, 3);
alignas(64) constexpr std::array<uint64_t, 1024> kGrid2s = expand_grid<uint64_t, 1024>(
    "@BBBBBBBBBBBBDBBBBBBBDBBBBBBBDBFDDBBBBBBBBDBFBBBDBBBBDBDBFBBFBFBBBDBFHBBBBBDNDDDHHBBBBBBBDBBBBBBBBBBBBBBBFBBBBDBDBFB"
    "BBBBBBBBDBDBBBBBBBDBFBBBDBFJBBBBDNDBDBFJBFRBBBDBBBBDDBBBBBBBBDBFDHNBBFBBBDHDBDBFJHRJBHDBJcLBBBBBBBDBBDBBBDBBBBBBBDBB"
    "DDBDBFBBBBBBBBBBBBDBBBBBBBDBFBBBDBPBDBDFBFDFBPBFRBBBDBBBBDBDBBBBBBBDBFBBBDBFJBBBBBBBDBFBBBDBFJBFRDBDBFJBFRZBBBBBDBDH"
    "BBBDBFJBXBBBDBFJBFPVJFRNiBBBDBBBBDDBBFBBHFHDNBBFBBFHBBFBFJBFRHLDBDFXBPDBBBBDBDBFBBBDBFJBFRDBDBFJBFND]BFRPgDFBPBFZRBB"
    "F{VL]LBTBBBBBBBBBBBDBBBBBBBBBBBFBFDBDBFBBBDBBBBBBFBBBBBBBDBFBBBDBFJBFBBBFFDBDBFJBXBBBBBBBBBBBBDBBBBBBBDBFBBBDBFJBBBB"
    "BBBDBFBBBDBFHBBFRBBBDBFJBFRVFBDBBBBDBFBBBDBFLFRBBBDBFJBFRNNBFRwBBBDBBBBBBBDBBBBBBBDBFBBBDBPBBBBBBBDBFBBBDBFJBFRDBDBF"
    "JBFPB]BBBBBBBDBFBBBDBFJBFRBBBDBFJBFR]BFNDwBBBDBFJBFHJ]BFRwPkTDBBDBBBDBFDBDBFLFRBBBDBFJBFRPNFRNaHDBDBFJBFR]BFRHPNP~EP"
    "BFiTLZ~WmHBBBDBDBDFBFBBBDHDFBPBDBBBBDBFBBBDBPBFPBDDBBPBFoBBBBBBBDHBBBDBFJBFRBBBDBFJBFRHTBFPBwDFBPBFgHBXVuVBLRHBDBBBB"
    "FFBBBDBFJBFRDFBPBFHgBFRsDBBBDBFJBFRNNBFRkDHaPcBFNDuBcD~nRDDDHFBBFgF]VcFLDB_DBPDBFRcNFP~juPsoT]BJBDeT", kLevels2, 3);
constexpr std::array<uint64_t, 2048> kGrid1s = expand_grid<uint64_t, 2048>(
    "@BBBBBCEBDBEFBBHEBDBEEBDBDAFBBBAEFDBDBDBBBAGFBBHEBDBEEBDBEFFEDBBDBBCCBBDBKBBHFFFDDAOFFFBAAHBBHBDDAABAABBBBBBBICBBBBA"
    "ABNDLBFBBBCADBFFBDKBDBEEBDBEFDHEBDBEEBDBEFBDEAFHACFBDLBBBFEBDBEEBDBEFFCCEBBBBEEBDBJABDEAFBFDBDBACLBBECFBBBBBBBDBDFDA"
    "AAAAABBDHHBFBPBBHEEBDBBBDBHFBBHFDBEABACDECAABBBAABDBBFDBCABAABBACDBDBBAABBBBBBBBAAEAAAABABBAABBBAABBAABAABAABBFBAAHA"
    "ABBDDBAABBBCAAACBABAAFCCBHDLDHFBBBBDBBAABBBFFBJNBBDBCGAABDBAABAADDHCABBDDBIGGBGBBBBBBDDBFFDCJBDBEEBBBBEFFCCEBDBEEBBB"
    "BEFBDFGADFBBBBAAHEEBFFEBBCEBDBEFDBFFEBBCEBDBEHBBFHAABDBBBFHFBDCCLFFFBDBDBACDBBJBCABBBBBBFEBEFFFFEAFEBDHJBDBEEBDBEFBJ"
    "EBDBJBDBHCBDFJBDBFBBBFEEBEAEBDBJBDBEFDBFEBDBEEBDBEFDHLDBBBBBBPDCDDABBBDBAABBDBFBBBBAABAEBBBBBDBBEAAKFBBHFJBDDDIEJFLC"
    "IFBBBBAAEABBBBDBBBBEAFCABDBBAABBDDBBAABBABAAAACBAABDAABDBAABAEBBBCCEABBBBDBBBBCAABABDBBDCDDAFBBHFCDEGEBDBDBBBFFBBBFF"
    "CACACABDBBDDDBAAAABBBBACFBDBAADBBBPPBBFBBDDNJFBAABDBDBBDBDBDBAABFBHBFBCADBFBAABBAAAABDAABBBAABBAAAAAAAABBAABDBFBAABB"
    "DDBDFBDBBHBDBBAABDBIEBBCADIAFBAAAACCBBBBAABAAABAAAAABAAAABBFBBBAABCBADBAAAABBAAAAABABBAABBAAAAAAABAAAAAAAAAABAAAAABB"
    "ACAAABAAAACBAABBAAABAACBABABAAAAAAACCAAAAAAAAAAAAABBACDBAAAABCDCBAAAEAABBDBDGEBBBBAAAABBAAGEBBBBDFCABDBBAABFFBAABBAA"
    "AAAAAABBAABCCCCBAAAAFHCGDADABFBACCAAADBBBBGCBAABBLHBBFHFDAABBBBBCMHFBBBDBFACBFCCCABFACDECBFDBLDBKADHAACMFDHOABACBDBB"
    "BBBBBBAABAABBHACBBAAAABBBDFBBBCABNAABBABAABCBAABGBABCABACBAAEEFEEAABDBBBBAAABADBCBBDDBAABCBCOBFFJBDBFFFEHEBFDFBBBBAC"
    "AADBAABBDDCAEEFBACLDAMBDBDBBDACGGCBFDBDBJBDBEEABBBFEBDBEEBDBEFBBBFFBDBBBAAAEBBFCEBBFEBDBEEBDBKBDFEBDBEEBDBMDLBGCDBBD"
    "NDLFDBDFBBACBDBAABAEAABBBBBBBBBHNDBFFBDAADCABDCEFGDFBDBEEBDBBCFBDFCBBDBEEBDBEAEBBHFBBBBBBDBBJJBFEBDBEEBDBEFBBMBDBEEB"
    "DBEFDAAFFDBFBBHAEFBBBFFBBBBDBBBBBBBDEABAABDBHBFBBDBBBFFBDFHBBBBBBHBFHBKCBBDDBHDHBBAAAABAABHBFAABDFBDBBAABAABCCCABBAA"
    "BBAAAAAAAABBAABCCBDAAAABAABBBBBBFDCBEBFBACABABFBEADACAAHBBFJBFFDDBBACDAIFDBFHBBBBBBBAABBDBBBBBBAABDBACBBFBBDBDHIIHBB"
    "BDBDLFBAAMBDBEEBDBEFBBBKBDBEEBDBECCBBBAOBCCBBBBJEBCBMDBAGDDBEFDBFEBDBEEBDBQFFBFCABBBCAAAF]BBBBBHBDBFBAABFDBBAABDBBPF"
    "DCBCHBCCBAACBLDDABCBBDBDBJBDBKBBBKBDBEEBDBEHDCCFHDDBDBKEMBDBJBDBKBBMBDBEEBDB", kLevels1, 3);
// The entries of IQ1 with both shifts: bit 11 of a number is the sign of the shift.
constexpr std::array<uint64_t, 4096> shift_grid(const std::array<uint64_t, 2048>& a) {
  std::array<uint64_t, 4096> grid{};
  for (size_t i = 0; i < 2048; i++) grid[i] = a[i] + 0x0101010101010101u, grid[2048 + i] = a[i] - 0x0101010101010101u;
  return grid;
}
alignas(64) constexpr std::array<uint64_t, 4096> kGrid1 = shift_grid(kGrid1s);
alignas(64) constexpr std::array<uint32_t, 256> kGrid3xxs = expand_grid<uint32_t, 256>(
    "@BBEBDABGIYBDBEBGDCBGKLHBBEGBGBDJFNDFABKdSTEKLBDFSPtWTDBUNPBEBGBEBBKAXBGGBpBEBGGcFBNIMPKDdiDRSL~PNaBGBEBDCI`BBCBGG[D"
    "AHBGFABMAMTGDmDbNXTJ[~HBKW]GBGBUMEFBNIKB[BEMUPOR~@OSFFL[`RUiUTKNBLD~PTOAPFQ_`fKbNU~PCBNsWWHFPW`NaHj^KDdHW~RmNsPBN^a_"
    "feF~IbfriNsBBARPmJk[EVMNUbP`BR~G", kLevels3xxs, 8);
alignas(64) constexpr std::array<uint32_t, 512> kGrid3s = expand_grid<uint32_t, 512>(
    "@AACBAAABBBADFEBCBBBEBGCCAAABDADCCDBDGMDEFADBACCCDCDFCBBBMCHFDCBGBCFDBMBDCKDBCFFCFOJBLBDEFDBOEKCBNQOGBBLBDEMDTAABDAB"
    "BBABGCBNBCIFABCBDEGCFGBNFBJCBADFFCJCJGCCACFFADEQFKBEBMBGDBDUGCFGBOhDCMB[BEBGLDQFHABBBABBBCBDABGBBCBMACBCBFCDCCDCFGXC"
    "CJBEGBJDJCDBCDIBEBGFNKFICGCDYCGEIMAKMHBEJ]DTDMBKEZGBBBCGBBEBCBJFHBBGEBMPJDBJFJBLYGDEBDAIBDFNHFEDGQFDMGBKEJJMSSaBMBKd"
    "DFFDCCGGPJEBBGFEFFDTBEEDJEOCFLEBEBGDdBRKAYLBJbYQTXEKKFYFDFNDCCLFEBBEGIaFIJEFMWEAOMELFFCLJLeLSBxaBNxBBLBUPPG^VRFKEFHL"
    "EOvNONCYTU[jBvDCIBLBLFPGKOB]CDFCGQYXCNVDFEXkPaWh", kLevels3s, 8);

// -- matrices and activations ----

// A weight matrix [rows][cols] as it lies in the file.
struct Matrix {
  Type type;
  const uint8_t* data;
  size_t stride;                     // bytes from row to row
  uint32_t rows, cols;
};

// An activation row quantised per 32: x ~ d * q. It lies in act_bytes(n) bytes aligned to 64; n_pad = n rounded up to 512
// (the padding is zero). The sums serve weights that are stored with an offset or a minimum.
struct ActRow {
  int8_t* q;                         // [n_pad], -127 .. 127
  float* d;                          // [n_pad / 32]
  float *md, *md_lo, *md_hi;         // [n_pad / 32] -d * (sum of q over the 32, its first 16, its last 16)
  int32_t *c, *c_lo, *c_hi;          // [n_pad / 32] -128 * (the same sums)
  // qt: q, of 16 blocks side by side: bytes 4t .. 4t + 3 of block l at 64t + 4l; AVX2 bytes 8t .. 8t + 7 at 128t + 8 * lane_of(l).
  // IQ2, IQ3 on AVX-512: byte 4t + i of a block of qe is byte 8i + t of its q; qet is to qe as qt is to q.
  int8_t *qt, *qe, *qet;             // [n_pad] written only where they are read
};
static inline size_t act_bytes(size_t n) { return size_t(align_up(n, 512)) / 32 * (4 * 32 + 7 * 4); }
static inline ActRow act_row(const void* act, size_t n) {
  const size_t n_pad = size_t(align_up(n, 512)), nb = n_pad / 32;
  int8_t* q = static_cast<int8_t*>(const_cast<void*>(act));            // only quantize writes
  float* f = reinterpret_cast<float*>(q + n_pad);
  int32_t* i = reinterpret_cast<int32_t*>(f + 4 * nb);
  int8_t* t = reinterpret_cast<int8_t*>(i + 3 * nb);
  return {q, f, f + nb, f + 2 * nb, f + 3 * nb, i, i + nb, i + 2 * nb, t, t + n_pad, t + 2 * n_pad};
}

// What kernels and LAYER keep on the stack, so what a model may have at most.
constexpr uint32_t kMaxStreams = 16, kMaxIndexDim = 1024, kMaxRatio = 128, kMaxRot = 1024, kMaxGroups = 256;

// Heads that `attend` computes at once, at most: rows of its scratch.
constexpr size_t kAttendHeads = 8;

// Attention of some query heads over one list of cached rows.
struct AttendArgs {
  const float* q;                  // [n_head][dim]
  size_t n_head, dim;
  const void* const* rows;         // n_rows cached rows
  size_t n_rows;
  bool plain;                      // rows are float32, else half
  const float* sinks;              // [n_head]
  float scale;
  float* scores;                   // scratch, kAttendHeads * align_up(n_rows, 16)
  float* out;                      // [n_head][dim]
};

// The kernels of one ISA: the only way the sections after 6 reach code that is compiled per ISA.
struct Kernels {
  const char* name;                  // "scalar" "avx2" "avx512" "neon"
  // y[n] = the row's values, exactly; any type but I32, n a multiple of the type's block.
  void (*dequantize)(Type type, const void* row, float* y, size_t n);
  // act = x[n] quantised per 32 (any n): d = amax / 127, q = nearest even of x / d.
  void (*quantize)(const float* x, void* act, size_t n);
  // out[t][r] = row r of w . x[t] for r0 <= r < r1, t < n; a result never depends on n, r0 or r1.
  // x: activation rows of w.cols elements, from the same ISA's quantize; w: any type but F32, F16, BF16.
  void (*matmul_int8)(const Matrix& w, size_t r0, size_t r1, const void* const* x, float* const* out, size_t n);
  // The same with float activations; w: any type but I32, quantised ones dequantised exactly.
  void (*matmul_float)(const Matrix& w, size_t r0, size_t r1, const float* const* x, float* const* out, size_t n);

  float (*sum_squares)(const float* x, size_t n);
  void (*rms_norm)(const float* x, const float* w, float eps, float* y, size_t n);
  void (*hc_mix)(const float* H, const float* pre, size_t n_hc, float* y, size_t n);
  void (*hc_update)(float* H, const float* out, const float* post, const float* C, size_t n_hc, size_t n);
  void (*add_to)(float* y, const float* x, size_t n);
  void (*swiglu)(float* gate, const float* up, float clamp, float weight, size_t n);
  void (*router_scores)(float* x, size_t n);
  void (*rope)(float* x, const float* cs, float sign, size_t n_rot);
  void (*store_kv_row)(const float* x, size_t dim, size_t n_rot, bool plain, void* row);
  void (*attend)(const AttendArgs& a);
  void (*compress)(const float* const* k, const float* const* z, size_t n_slots, float* out, size_t dim);
  void (*store_index_row)(const float* x, size_t dim, bool plain, void* row);
  void (*index_query)(const float* q, size_t n_head, size_t dim, bool plain, float* qt);
  void (*index_scores)(const float* qt, const float* w, size_t n_head, const uint8_t* rows, size_t stride, size_t n_rows, size_t dim, bool plain, float* scores);

  void (*block_max)(const float* x, size_t n, float* out);
  void (*block_mass)(const float* x, size_t n, const float* maxima, float top, float scale, uint64_t* out);
  uint64_t (*weigh)(const float* v, size_t n, float top, float scale, uint64_t* w);
  size_t (*collect)(const float* x, size_t n, int32_t first, float cut, int32_t* id, float* v);
  size_t (*keep_ids)(float* v, int32_t* id, size_t n, float lo, float hi);
  size_t (*keep_weights)(float* v, uint64_t* w, size_t n, float lo, float hi);
  uint64_t (*split)(const float* v, const uint64_t* w, size_t n, float cut, float* above, float* below);
};

}  // namespace ds4
#endif                           // end of the first pass; sections 4 and 5 belong to every pass

// =============================================================================
// 4. VECTOR — sixteen floats or ints, sixty-four bytes; the same result on every ISA.   uses: 1-3   (every pass)
// =============================================================================
// The scalar version at the end is the definition of the others. Lane i of a vector is element i in memory.
// f32x16: max(a, b) is a > b ? a : b and min(a, b) is a < b ? a : b, so b where a is NaN; fma rounds once; reductions
// fold halves 16 -> 8 -> 4 -> 2 -> 1, lane i with lane i + width / 2.
// i8x64 holds bytes; kBias tells how int8 weights are kept for the integer dots: as w + kBias.

#undef DS4_UNROLL                // a loop over vectors, unrolled completely so that arrays of them become registers
#if DS4_PASS > 0
#define DS4_UNROLL DS4_UNROLL_VECTORS
#else
#define DS4_UNROLL               // scalar vectors are arrays: nothing gained, and compiling takes minutes
#endif

// Returns a vector with v[i] = expr.
#define DS4_EACH(type, expr) type r; DS4_UNROLL for (int i = 0; i < int(sizeof(r.v) / sizeof(r.v[0])); i++) r.v[i] = expr; return r

#if DS4_PASS == 3
#define DS4_ISA avx512
DS4_TARGET_PUSH("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni")
#elif DS4_PASS == 2
#define DS4_ISA avx2
DS4_TARGET_PUSH("avx2,fma,f16c")
#elif DS4_PASS == 1
#define DS4_ISA neon
#else
#define DS4_ISA scalar
#endif

namespace ds4 {
namespace DS4_ISA {
namespace {

#if DS4_PASS >= 2   // -- AVX2 and AVX-512 ----

DS4_INLINE __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
DS4_INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
DS4_INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
DS4_INLINE __m128i halves8(const void* from, size_t stride) {
  const uint8_t* p = static_cast<const uint8_t*>(from);
  return _mm_setr_epi16(load_le<int16_t>(p), load_le<int16_t>(p + stride), load_le<int16_t>(p + 2 * stride), load_le<int16_t>(p + 3 * stride),
                        load_le<int16_t>(p + 4 * stride), load_le<int16_t>(p + 5 * stride), load_le<int16_t>(p + 6 * stride), load_le<int16_t>(p + 7 * stride));
}
DS4_INLINE float fold_add(__m256 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
DS4_INLINE float fold_max(__m256 a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// Grid entries by loads to all places and blends: no insertions, which wait for one port of Intel's, and no gathers, slow on AMD's.
template <class I> DS4_INLINE __m256i grid8_half(const uint64_t* grid, const I* a) {
  const __m256i u = _mm256_blend_epi32(_mm256_set1_epi64x(int64_t(grid[a[0]])), _mm256_set1_epi64x(int64_t(grid[a[1]])), 0x0c);
  const __m256i v = _mm256_blend_epi32(_mm256_set1_epi64x(int64_t(grid[a[2]])), _mm256_set1_epi64x(int64_t(grid[a[3]])), 0xc0);
  return _mm256_blend_epi32(u, v, 0xf0);
}
template <class I> DS4_INLINE __m256i grid4_half(const uint32_t* grid, const I* a) {
  auto at = [&](int i) { return _mm256_set1_epi32(int32_t(grid[a[i]])); };
  const __m256i u = _mm256_blend_epi32(_mm256_blend_epi32(at(0), at(1), 0x02), _mm256_blend_epi32(at(2), at(3), 0x08), 0x0c);
  const __m256i v = _mm256_blend_epi32(_mm256_blend_epi32(at(4), at(5), 0x20), _mm256_blend_epi32(at(6), at(7), 0x80), 0xc0);
  return _mm256_blend_epi32(u, v, 0xf0);
}
#endif

#if DS4_PASS == 3   // -- AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later) ----

constexpr int kBias = 128;           // vpdpbusd multiplies unsigned by signed bytes
constexpr int kFloatRows = 8, kFloatTokens = 3;   // a tile of sums that fits into registers: float products, attention
struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };
struct i8x64 { __m512i v; };

DS4_INLINE __m512i load512(const void* p) { return _mm512_loadu_si512(p); }
DS4_INLINE __mmask16 first_lanes(size_t n) { return __mmask16((1u << n) - 1); }

DS4_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
DS4_INLINE f32x16 set1(float a) { return {_mm512_set1_ps(a)}; }
DS4_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
DS4_INLINE f32x16 in_register(f32x16 a) { asm("" : "+v"(a.v)); return a; }   // GCC would load it again at every use
DS4_INLINE f32x16 load_partial(const float* p, size_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
DS4_INLINE f32x16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(load256(p))}; }
// Sixteen halves, stride bytes apart: eight from p and eight from q (AVX-512 and AVX2 only), or all from p.
DS4_INLINE f32x16 load_f16(const void* p, const void* q, size_t stride) {
  return {_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(halves8(p, stride)), halves8(q, stride), 1))};
}
DS4_INLINE f32x16 load_f16(const uint8_t* p, size_t stride) { return load_f16(p, p + 8 * stride, stride); }
DS4_INLINE f32x16 load_bf16(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16))}; }
DS4_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
DS4_INLINE void store_partial(float* p, size_t n, f32x16 a) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
DS4_INLINE void store_i8(int8_t* p, f32x16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }
DS4_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
DS4_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
DS4_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
DS4_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
DS4_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
DS4_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
DS4_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
DS4_INLINE f32x16 nearest(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
DS4_INLINE f32x16 pow2(f32x16 n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))}; }
DS4_INLINE f32x16 and_bits(f32x16 a, uint32_t bits) { return {_mm512_and_ps(a.v, _mm512_castsi512_ps(_mm512_set1_epi32(int(bits))))}; }
DS4_INLINE f32x16 xor_bits(f32x16 a, uint32_t bits) { return {_mm512_xor_ps(a.v, _mm512_castsi512_ps(_mm512_set1_epi32(int(bits))))}; }
DS4_INLINE f32x16 copysign(f32x16 mag, f32x16 sgn) { return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sgn.v), _mm512_castps_si512(mag.v), 0xca))}; }
DS4_INLINE float reduce_add(f32x16 a) { return fold_add(_mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1))); }
DS4_INLINE float reduce_max(f32x16 a) { return fold_max(_mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1))); }

DS4_INLINE f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
DS4_INLINE i32x16 set1_i32(int32_t a) { return {_mm512_set1_epi32(a)}; }
DS4_INLINE i32x16 load_i32(const void* p) { return {load512(p)}; }
DS4_INLINE i32x16 odd_words(__m512i a, __m512i b) {
  return {_mm512_permutex2var_epi32(a, _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), b)};
}
DS4_INLINE i32x16 odd_words(const void* p, const void* q) { return odd_words(load512(p), load512(q)); }
DS4_INLINE i32x16 load_i32(const void* p, const void* q) { return {_mm512_inserti64x4(_mm512_castsi256_si512(load256(p)), load256(q), 1)}; }
DS4_INLINE i32x16 load_u8(const void* p, const void* q) { return {_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(load64(p), load64(q)))}; }
// AVX-512 and AVX2 only: bytes as words, two in a lane; those of w times those of e, summed in each lane.
DS4_INLINE i32x16 load_u8_words(const void* p, const void* q) { return {_mm512_cvtepu8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(load128(p)), load128(q), 1))}; }
DS4_INLINE i32x16 dot_words(i32x16 w, i32x16 e) { return {_mm512_madd_epi16(w.v, e.v)}; }
DS4_INLINE i32x16 load_i16(const void* p, const void* q) { return {_mm512_cvtepi16_epi32(_mm256_inserti128_si256(_mm256_castsi128_si256(load128(p)), load128(q), 1))}; }
DS4_INLINE void store_i32(void* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
DS4_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
DS4_INLINE i32x16 sub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
DS4_INLINE i32x16 mul(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
DS4_INLINE i32x16 and_bits(i32x16 a, uint32_t bits) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(int(bits)))}; }
DS4_INLINE i32x16 or_(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int k> DS4_INLINE i32x16 shl(i32x16 a) { return {_mm512_slli_epi32(a.v, k)}; }
template <int k> DS4_INLINE i32x16 shr(i32x16 a) { return {_mm512_srli_epi32(a.v, k)}; }
template <int k> DS4_INLINE i32x16 sar(i32x16 a) { return {_mm512_srai_epi32(a.v, k)}; }
DS4_INLINE f32x16 as_f32(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }

DS4_INLINE i8x64 load8(const void* p) { return {load512(p)}; }
DS4_INLINE i8x64 load8(const void* p, const void* q) { return {_mm512_inserti64x4(_mm512_castsi256_si512(load256(p)), load256(q), 1)}; }
DS4_INLINE void store8(void* p, i8x64 a) { _mm512_storeu_si512(p, a.v); }
DS4_INLINE i8x64 set1_8(int a) { return {_mm512_set1_epi8(char(a))}; }
DS4_INLINE i8x64 add8(i8x64 a, i8x64 b) { return {_mm512_add_epi8(a.v, b.v)}; }
DS4_INLINE i8x64 xor8(i8x64 a, i8x64 b) { return {_mm512_xor_si512(a.v, b.v)}; }
DS4_INLINE i8x64 and8(i8x64 a, i8x64 b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int k> DS4_INLINE i8x64 shl8(i8x64 a) { return {_mm512_slli_epi16(a.v, k)}; }
template <int k> DS4_INLINE i8x64 shr8(i8x64 a, int mask) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, k), _mm512_set1_epi8(char(mask)))}; }
DS4_INLINE i8x64 top_sevens(const void* p, const void* q) {
  const __m256i a = _mm512_cvtepi16_epi8(_mm512_srli_epi16(load512(p), 9)), b = _mm512_cvtepi16_epi8(_mm512_srli_epi16(load512(q), 9));
  return {_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)};
}
DS4_INLINE i8x64 nibbles(const void* p, const void* q) {
  const __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(load128(p))), _mm256_broadcastsi128_si256(load128(q)), 1);
  constexpr long long k4 = 0x0004000400040004;
  return {_mm512_and_si512(_mm512_srlv_epi16(v, _mm512_set_epi64(k4, k4, 0, 0, k4, k4, 0, 0)), _mm512_set1_epi8(15))};
}
template <int s0, int s1> DS4_INLINE i8x64 fields(const void* p, int mask) {
  const __m512i shift = _mm512_inserti64x4(_mm512_set1_epi16(s0), _mm256_set1_epi16(s1), 1);
  return {_mm512_and_si512(_mm512_srlv_epi16(_mm512_broadcast_i64x4(load256(p)), shift), _mm512_set1_epi8(char(mask)))};
}
DS4_INLINE i8x64 lookup(const void* table, i8x64 a) { return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load128(table)), a.v)}; }
DS4_INLINE i8x64 mul_lanes(i8x64 a, const void* s) {
  constexpr int l0 = INT32_MIN + 0x8000, l1 = l0 + 0x10001, l2 = l1 + 0x10001, l3 = l2 + 0x10001;   // words: byte of the lane, zero
  const __m512i lane = _mm512_set_epi32(l3, l3, l3, l3, l2, l2, l2, l2, l1, l1, l1, l1, l0, l0, l0, l0);
  const __m512i w = _mm512_and_si512(_mm512_shuffle_epi8(_mm512_set1_epi32(load_le<int32_t>(s)), lane), _mm512_set1_epi8(15));
  return {_mm512_shuffle_epi8(_mm512_mullo_epi16(w, _mm512_set1_epi32(0x03020100)), a.v)};
}
DS4_INLINE i8x64 add_where(i8x64 a, uint64_t mask, int c) { return {_mm512_mask_add_epi8(a.v, mask, a.v, _mm512_set1_epi8(char(c)))}; }
DS4_INLINE i8x64 reflect_where(i8x64 a, const void* bits, int c) { return {_mm512_mask_sub_epi8(a.v, load_le<uint64_t>(bits), _mm512_set1_epi8(char(c)), a.v)}; }
DS4_INLINE void zip8(i8x64 a, i8x64 b, i8x64* lo, i8x64* hi) {
  const __m512i l = _mm512_unpacklo_epi8(a.v, b.v), h = _mm512_unpackhi_epi8(a.v, b.v);
  *lo = {_mm512_permutex2var_epi64(l, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), h)};
  *hi = {_mm512_permutex2var_epi64(l, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), h)};
}
DS4_INLINE i8x64 nibble_pairs(const void* p, const void* q) {
  const __m512i v = _mm512_cvtepu8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(load128(p)), load128(q), 1));
  return {_mm512_and_si512(_mm512_or_si512(v, _mm512_slli_epi16(v, 4)), _mm512_set1_epi8(15))};
}
template <class I> DS4_INLINE i8x64 grid8(const uint64_t* grid, const I* a, const I* b) { return {_mm512_inserti64x4(_mm512_castsi256_si512(grid8_half(grid, a)), grid8_half(grid, b), 1)}; }
template <class I> DS4_INLINE i8x64 grid4(const uint32_t* grid, const I* a) { return {_mm512_inserti64x4(_mm512_castsi256_si512(grid4_half(grid, a)), grid4_half(grid, a + 8), 1)}; }
DS4_INLINE i8x64 digit3(i8x64 a, const void* power) {
  const __m512i p = load512(power), odd = _mm512_set1_epi16(int16_t(0xff00));
  const __m512i lo = _mm512_mulhi_epu16(_mm512_mullo_epi16(_mm512_slli_epi16(a.v, 8), p), _mm512_set1_epi16(3));
  const __m512i hi = _mm512_mulhi_epu16(_mm512_mullo_epi16(_mm512_and_si512(a.v, odd), p), _mm512_set1_epi16(3 * 256));
  return {_mm512_or_si512(_mm512_and_si512(hi, odd), lo)};
}
DS4_INLINE f32x16 bytes_to_f32(const void* w) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load128(w)))}; }

// Sums of 4 -> sums of 16: word j of lane group l of the result is the sum of 128-bit lane l of z[j] (a: z[0..3], b: z[4..7]).
DS4_INLINE void sum_lanes(const __m512i* z, __m512i* a, __m512i* b) {
  __m512i t[4];
  DS4_UNROLL
  for (int i = 0; i < 4; i++) t[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(z[2 * i], z[2 * i + 1]), _mm512_unpackhi_epi32(z[2 * i], z[2 * i + 1]));
  *a = _mm512_add_epi32(_mm512_unpacklo_epi64(t[0], t[1]), _mm512_unpackhi_epi64(t[0], t[1]));
  *b = _mm512_add_epi32(_mm512_unpacklo_epi64(t[2], t[3]), _mm512_unpackhi_epi64(t[2], t[3]));
}
// From (blocks 0 2 4 6 1 3 5 7, 8 10 ..) to natural order.
DS4_INLINE i32x16 block_order(__m512i a) {
  return {_mm512_permutexvar_epi32(_mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0), a)};
}
template <int kStride> DS4_INLINE void dot_bytes(const void* w, const int8_t* x, __m512i* a, __m512i* b) {
  const uint8_t* p = static_cast<const uint8_t*>(w);
  __m512i z[8];
  DS4_UNROLL
  for (int i = 0; i < 8; i++, p += 2 * kStride) {
    const __m512i v = kStride == 32 ? load512(p) : _mm512_xor_si512(load8(p, p + kStride).v, _mm512_set1_epi8(-128));
    z[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), v, load512(x + 64 * i));
  }
  sum_lanes(z, a, b);
}
template <bool kSigned> DS4_INLINE void dot_halves(const void* w, const int8_t* x, i32x16* lo, i32x16* hi) {
  __m512i a, b;
  dot_bytes<32>(w, x, &a, &b);
  *lo = block_order(_mm512_shuffle_i32x4(a, b, 0x88));
  *hi = block_order(_mm512_shuffle_i32x4(a, b, 0xdd));
}
template <bool kSigned, int kStride = 32> DS4_INLINE i32x16 dot_blocks(const void* w, const int8_t* x) {
  __m512i a, b;
  dot_bytes<kStride>(w, x, &a, &b);
  return block_order(_mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd)));
}
template <bool kSigned> DS4_INLINE i32x16 dot4(i32x16 acc, i8x64 w, const int8_t* x) { return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(load_le<int32_t>(x)))}; }
// For blocks in lanes, AVX-512 and AVX2 only (see KERNELS): a lane is a piece of kPiece bytes; that of block l is lane_of(l).
constexpr size_t kPiece = 4;
constexpr size_t lane_of(size_t l) { return l; }
using LaneSum = i32x16;
DS4_INLINE LaneSum no_sum() { return {_mm512_setzero_si512()}; }
DS4_INLINE i8x64 join(__m256i a, __m256i b) { return {_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1)}; }
// Eight bytes of each of sixteen blocks, from those of blocks 0, 1, 4, 5 and so on (AVX-512: words 0, 1 of them in w[0], w[1]).
DS4_INLINE void pieces(i8x64 a0145, i8x64 a2367, i8x64* w) {
  const __m512 u = _mm512_castsi512_ps(a0145.v), v = _mm512_castsi512_ps(a2367.v);
  w[0] = {_mm512_castps_si512(_mm512_shuffle_ps(u, v, 0x88))};
  w[1] = {_mm512_castps_si512(_mm512_shuffle_ps(u, v, 0xdd))};
}
// acc + w . x for eight values of each block, w unsigned; AVX2 also +-w, by the bits of a byte of the block's word of signs.
DS4_INLINE LaneSum dot_lanes(LaneSum acc, const i8x64* w, const int8_t* x) {
  return {_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(acc.v, w[0].v, load512(x)), w[1].v, load512(x + 64))};
}
// The sums over values 0 - 15 and 16 - 31 as words; without kBoth lo + hi is right, with kSmall no weight is above 32.
template <bool kBoth, bool kSmall> DS4_INLINE void finish(LaneSum a, LaneSum b, i32x16* lo, i32x16* hi) { *lo = a, *hi = b; }
DS4_INLINE void zip(i32x16 a, i32x16 b, i32x16* lo, i32x16* hi) {
  *lo = {_mm512_permutex2var_epi32(a.v, _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0), b.v)};
  *hi = {_mm512_permutex2var_epi32(a.v, _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8), b.v)};
}

#elif DS4_PASS == 2   // -- AVX2 (Haswell, Zen and later) ----

constexpr int kBias = 0;
constexpr int kFloatRows = 4, kFloatTokens = 1;
struct f32x16 { __m256 v[2]; };
struct i32x16 { __m256i v[2]; };
struct i8x64 { __m256i v[2]; };

DS4_INLINE void store128(void* p, __m128i a) { _mm_storeu_si128(static_cast<__m128i*>(p), a); }
DS4_INLINE void store256(void* p, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
DS4_INLINE __m256i first_lanes(size_t n, int from) {             // lane i: all ones if from + i < n
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n) - from), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}

DS4_INLINE f32x16 zero() { DS4_EACH(f32x16, _mm256_setzero_ps()); }
DS4_INLINE f32x16 set1(float a) { DS4_EACH(f32x16, _mm256_set1_ps(a)); }
DS4_INLINE f32x16 half_pair(uint16_t lo, uint16_t hi) { return {{_mm256_set1_ps(_cvtsh_ss(lo)), _mm256_set1_ps(_cvtsh_ss(hi))}}; }
DS4_INLINE f32x16 in_register(f32x16 a) { return a; }
DS4_INLINE f32x16 load(const float* p) { DS4_EACH(f32x16, _mm256_loadu_ps(p + 8 * i)); }
DS4_INLINE f32x16 load_partial(const float* p, size_t n) { DS4_EACH(f32x16, _mm256_maskload_ps(p + 8 * i, first_lanes(n, 8 * i))); }
DS4_INLINE f32x16 load_f16(const uint16_t* p) { DS4_EACH(f32x16, _mm256_cvtph_ps(load128(p + 8 * i))); }
DS4_INLINE f32x16 load_f16(const void* p, const void* q, size_t stride) { return {{_mm256_cvtph_ps(halves8(p, stride)), _mm256_cvtph_ps(halves8(q, stride))}}; }
DS4_INLINE f32x16 load_f16(const uint8_t* p, size_t stride) { return load_f16(p, p + 8 * stride, stride); }
DS4_INLINE f32x16 load_bf16(const uint16_t* p) { DS4_EACH(f32x16, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p + 8 * i)), 16))); }
DS4_INLINE void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.v[0]); _mm256_storeu_ps(p + 8, a.v[1]); }
DS4_INLINE void store_partial(float* p, size_t n, f32x16 a) {
  _mm256_maskstore_ps(p, first_lanes(n, 0), a.v[0]);
  _mm256_maskstore_ps(p + 8, first_lanes(n, 8), a.v[1]);
}
DS4_INLINE void store_i8(int8_t* p, f32x16 a) {
  const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(a.v[0]), _mm256_cvtps_epi32(a.v[1]));   // a0-3 b0-3 | a4-7 b4-7
  store128(p, _mm_shuffle_epi32(_mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)), 0xd8));
}
DS4_INLINE f32x16 add(f32x16 a, f32x16 b) { DS4_EACH(f32x16, _mm256_add_ps(a.v[i], b.v[i])); }
DS4_INLINE f32x16 sub(f32x16 a, f32x16 b) { DS4_EACH(f32x16, _mm256_sub_ps(a.v[i], b.v[i])); }
DS4_INLINE f32x16 mul(f32x16 a, f32x16 b) { DS4_EACH(f32x16, _mm256_mul_ps(a.v[i], b.v[i])); }
DS4_INLINE f32x16 div(f32x16 a, f32x16 b) { DS4_EACH(f32x16, _mm256_div_ps(a.v[i], b.v[i])); }
DS4_INLINE f32x16 max(f32x16 a, f32x16 b) { DS4_EACH(f32x16, _mm256_max_ps(a.v[i], b.v[i])); }
DS4_INLINE f32x16 min(f32x16 a, f32x16 b) { DS4_EACH(f32x16, _mm256_min_ps(a.v[i], b.v[i])); }
DS4_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { DS4_EACH(f32x16, _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i])); }
DS4_INLINE f32x16 nearest(f32x16 a) { DS4_EACH(f32x16, _mm256_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
DS4_INLINE f32x16 pow2(f32x16 n) { DS4_EACH(f32x16, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v[i]), _mm256_set1_epi32(127)), 23))); }
DS4_INLINE f32x16 and_bits(f32x16 a, uint32_t bits) { DS4_EACH(f32x16, _mm256_and_ps(a.v[i], _mm256_castsi256_ps(_mm256_set1_epi32(int(bits))))); }
DS4_INLINE f32x16 xor_bits(f32x16 a, uint32_t bits) { DS4_EACH(f32x16, _mm256_xor_ps(a.v[i], _mm256_castsi256_ps(_mm256_set1_epi32(int(bits))))); }
DS4_INLINE f32x16 copysign(f32x16 mag, f32x16 sgn) { DS4_EACH(f32x16, _mm256_or_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), mag.v[i]), _mm256_and_ps(_mm256_set1_ps(-0.0f), sgn.v[i]))); }
DS4_INLINE float reduce_add(f32x16 a) { return fold_add(_mm256_add_ps(a.v[0], a.v[1])); }
DS4_INLINE float reduce_max(f32x16 a) { return fold_max(_mm256_max_ps(a.v[0], a.v[1])); }

DS4_INLINE f32x16 to_f32(i32x16 a) { DS4_EACH(f32x16, _mm256_cvtepi32_ps(a.v[i])); }
DS4_INLINE i32x16 set1_i32(int32_t a) { DS4_EACH(i32x16, _mm256_set1_epi32(a)); }
DS4_INLINE __m256i odd_words_half(const void* p) {
  const __m256i v = _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(load256(p)), _mm256_castsi256_ps(load256(static_cast<const uint8_t*>(p) + 32)), 0xdd));
  return _mm256_permute4x64_epi64(v, 0xd8);
}
DS4_INLINE i32x16 odd_words(const void* p, const void* q) { return {{odd_words_half(p), odd_words_half(q)}}; }
DS4_INLINE i32x16 load_i32(const void* p, const void* q) { return {{load256(p), load256(q)}}; }
DS4_INLINE i32x16 load_i32(const void* p) { return load_i32(p, static_cast<const uint8_t*>(p) + 32); }
DS4_INLINE i32x16 load_u8(const void* p, const void* q) { return {{_mm256_cvtepu8_epi32(load64(p)), _mm256_cvtepu8_epi32(load64(q))}}; }
DS4_INLINE i32x16 load_u8_words(const void* p, const void* q) { return {{_mm256_cvtepu8_epi16(load128(p)), _mm256_cvtepu8_epi16(load128(q))}}; }
// Two words in each lane: those of lo, then those of hi.
DS4_INLINE i32x16 words(i32x16 lo, i32x16 hi) { DS4_EACH(i32x16, _mm256_blend_epi16(lo.v[i], _mm256_slli_epi32(hi.v[i], 16), 0xaa)); }
DS4_INLINE i32x16 dot_words(i32x16 w, i32x16 e) { DS4_EACH(i32x16, _mm256_madd_epi16(w.v[i], e.v[i])); }
DS4_INLINE i32x16 load_i16(const void* p, const void* q) { return {{_mm256_cvtepi16_epi32(load128(p)), _mm256_cvtepi16_epi32(load128(q))}}; }
DS4_INLINE void store_i32(void* p, i32x16 a) { store256(p, a.v[0]); store256(static_cast<uint8_t*>(p) + 32, a.v[1]); }
DS4_INLINE i32x16 add(i32x16 a, i32x16 b) { DS4_EACH(i32x16, _mm256_add_epi32(a.v[i], b.v[i])); }
DS4_INLINE i32x16 sub(i32x16 a, i32x16 b) { DS4_EACH(i32x16, _mm256_sub_epi32(a.v[i], b.v[i])); }
DS4_INLINE i32x16 mul(i32x16 a, i32x16 b) { DS4_EACH(i32x16, _mm256_mullo_epi32(a.v[i], b.v[i])); }
DS4_INLINE i32x16 or_(i32x16 a, i32x16 b) { DS4_EACH(i32x16, _mm256_or_si256(a.v[i], b.v[i])); }
DS4_INLINE i32x16 and_bits(i32x16 a, uint32_t bits) { DS4_EACH(i32x16, _mm256_and_si256(a.v[i], _mm256_set1_epi32(int(bits)))); }
template <int k> DS4_INLINE i32x16 shl(i32x16 a) { DS4_EACH(i32x16, _mm256_slli_epi32(a.v[i], k)); }
template <int k> DS4_INLINE i32x16 shr(i32x16 a) { DS4_EACH(i32x16, _mm256_srli_epi32(a.v[i], k)); }
template <int k> DS4_INLINE i32x16 sar(i32x16 a) { DS4_EACH(i32x16, _mm256_srai_epi32(a.v[i], k)); }
DS4_INLINE f32x16 as_f32(i32x16 a) { DS4_EACH(f32x16, _mm256_castsi256_ps(a.v[i])); }

DS4_INLINE i8x64 load8(const void* p, const void* q) { return {{load256(p), load256(q)}}; }
DS4_INLINE i8x64 load8(const void* p) { return load8(p, static_cast<const uint8_t*>(p) + 32); }
DS4_INLINE void store8(void* p, i8x64 a) { store256(p, a.v[0]); store256(static_cast<uint8_t*>(p) + 32, a.v[1]); }
DS4_INLINE i8x64 set1_8(int a) { DS4_EACH(i8x64, _mm256_set1_epi8(char(a))); }
DS4_INLINE i8x64 add8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, _mm256_add_epi8(a.v[i], b.v[i])); }
DS4_INLINE i8x64 xor8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, _mm256_xor_si256(a.v[i], b.v[i])); }
DS4_INLINE i8x64 and8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, _mm256_and_si256(a.v[i], b.v[i])); }
template <int k> DS4_INLINE i8x64 shl8(i8x64 a) { DS4_EACH(i8x64, _mm256_slli_epi16(a.v[i], k)); }
template <int k> DS4_INLINE i8x64 shr8(i8x64 a, int mask) { return and8({{_mm256_srli_epi16(a.v[0], k), _mm256_srli_epi16(a.v[1], k)}}, set1_8(mask)); }
DS4_INLINE __m256i top_sevens_half(const void* p) {
  const __m256i a = _mm256_srli_epi16(load256(p), 9), b = _mm256_srli_epi16(load256(static_cast<const uint8_t*>(p) + 32), 9);
  return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
}
DS4_INLINE i8x64 top_sevens(const void* p, const void* q) { return {{top_sevens_half(p), top_sevens_half(q)}}; }
DS4_INLINE __m256i nibbles_half(const void* p) {
  const __m128i a = load128(p);
  return _mm256_and_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(a), _mm_srli_epi16(a, 4), 1), _mm256_set1_epi8(15));
}
DS4_INLINE i8x64 nibbles(const void* p, const void* q) { return {{nibbles_half(p), nibbles_half(q)}}; }
template <int s0, int s1> DS4_INLINE i8x64 fields(const void* p, int mask) {
  const __m256i a = load256(p);
  return and8({{_mm256_srli_epi16(a, s0), _mm256_srli_epi16(a, s1)}}, set1_8(mask));
}
DS4_INLINE i8x64 lookup(const void* table, i8x64 a) {
  const __m256i t = _mm256_broadcastsi128_si256(load128(table));
  return {{_mm256_shuffle_epi8(t, a.v[0]), _mm256_shuffle_epi8(t, a.v[1])}};
}
DS4_INLINE __m256i mul_lanes_half(__m256i a, __m256i s, int l0, int l1) {
  const __m256i w = _mm256_and_si256(_mm256_shuffle_epi8(s, _mm256_setr_epi32(l0, l0, l0, l0, l1, l1, l1, l1)), _mm256_set1_epi8(15));
  return _mm256_shuffle_epi8(_mm256_mullo_epi16(w, _mm256_set1_epi32(0x03020100)), a);
}
DS4_INLINE i8x64 mul_lanes(i8x64 a, const void* s) {
  const __m256i w = _mm256_set1_epi32(load_le<int32_t>(s));
  constexpr int l0 = INT32_MIN + 0x8000, l1 = l0 + 0x10001, l2 = l1 + 0x10001, l3 = l2 + 0x10001;   // words: byte of the lane, zero
  return {{mul_lanes_half(a.v[0], w, l0, l1), mul_lanes_half(a.v[1], w, l2, l3)}};
}
DS4_INLINE i8x64 repeat8(__m256i v) {                              // v: the eight bytes in each quad word
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  return {{_mm256_shuffle_epi8(v, spread), _mm256_shuffle_epi8(v, _mm256_or_si256(spread, _mm256_set1_epi8(4)))}};
}
DS4_INLINE i8x64 bit_mask(__m256i v) {                             // byte i: all ones if bit i is set
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const i8x64 b = repeat8(v);
  return {{_mm256_cmpeq_epi8(_mm256_and_si256(b.v[0], bit), bit), _mm256_cmpeq_epi8(_mm256_and_si256(b.v[1], bit), bit)}};
}
DS4_INLINE i8x64 add_where(i8x64 a, uint64_t mask, int c) { return add8(a, and8(bit_mask(_mm256_set1_epi64x(int64_t(mask))), set1_8(c))); }
DS4_INLINE i8x64 reflect_where(i8x64 a, const void* bits, int c) {   // c - a = (a ^ (c - 1)) + 1
  const i8x64 m = bit_mask(_mm256_set1_epi64x(load_le<int64_t>(bits))), b = xor8(a, and8(m, set1_8(c - 1)));
  return {{_mm256_sub_epi8(b.v[0], m.v[0]), _mm256_sub_epi8(b.v[1], m.v[1])}};
}
DS4_INLINE void zip8(i8x64 a, i8x64 b, i8x64* lo, i8x64* hi) {
  DS4_UNROLL
  for (int i = 0; i < 2; i++) {
    const __m256i l = _mm256_unpacklo_epi8(a.v[i], b.v[i]), h = _mm256_unpackhi_epi8(a.v[i], b.v[i]);
    *(i == 0 ? lo : hi) = {{_mm256_permute2x128_si256(l, h, 0x20), _mm256_permute2x128_si256(l, h, 0x31)}};
  }
}
DS4_INLINE i8x64 nibble_pairs(const void* p, const void* q) {
  const __m256i a = _mm256_cvtepu8_epi16(load128(p)), b = _mm256_cvtepu8_epi16(load128(q));
  return and8({{_mm256_or_si256(a, _mm256_slli_epi16(a, 4)), _mm256_or_si256(b, _mm256_slli_epi16(b, 4))}}, set1_8(15));
}
template <class I> DS4_INLINE i8x64 grid8(const uint64_t* grid, const I* a, const I* b) { return {{grid8_half(grid, a), grid8_half(grid, b)}}; }
template <class I> DS4_INLINE i8x64 grid4(const uint32_t* grid, const I* a) { return {{grid4_half(grid, a), grid4_half(grid, a + 8)}}; }
DS4_INLINE __m256i digit3_half(__m256i a, __m256i p) {
  const __m256i odd = _mm256_set1_epi16(int16_t(0xff00));
  const __m256i lo = _mm256_mulhi_epu16(_mm256_mullo_epi16(_mm256_slli_epi16(a, 8), p), _mm256_set1_epi16(3));
  const __m256i hi = _mm256_mulhi_epu16(_mm256_mullo_epi16(_mm256_and_si256(a, odd), p), _mm256_set1_epi16(3 * 256));
  return _mm256_or_si256(_mm256_and_si256(hi, odd), lo);
}
DS4_INLINE i8x64 digit3(i8x64 a, const void* power) { return {{digit3_half(a.v[0], load256(power)), digit3_half(a.v[1], load256(static_cast<const uint8_t*>(power) + 32))}}; }
DS4_INLINE f32x16 bytes_to_f32(const void* w) {
  const __m128i b = load128(w);
  return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(b, b)))}};
}

// Eight sums of 4 products. Pairs stay within 16 bits: |w| * |x| * 2 <= 128 * 127 * 2, x is never -128.
template <bool kSigned> DS4_INLINE __m256i dot4_half(__m256i w, __m256i x) {
  const __m256i p = kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
  return _mm256_madd_epi16(p, _mm256_set1_epi16(1));
}
template <bool kSigned, int kStride = 32> DS4_INLINE void dot_halves(const void* w, const int8_t* x, i32x16* lo, i32x16* hi) {
  const uint8_t* b = static_cast<const uint8_t*>(w);
  DS4_UNROLL
  for (int i = 0; i < 2; i++, b += 8 * kStride, x += 256) {
    __m256i u[2];
    DS4_UNROLL
    for (int j = 0; j < 2; j++) {                                  // lane 0: first halves of four blocks, lane 1: second halves
      __m256i p[4];
      DS4_UNROLL
      for (int k = 0; k < 4; k++) p[k] = dot4_half<kSigned>(load256(b + (4 * j + k) * kStride), load256(x + 32 * (4 * j + k)));
      u[j] = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
    }
    lo->v[i] = _mm256_permute2x128_si256(u[0], u[1], 0x20);
    hi->v[i] = _mm256_permute2x128_si256(u[0], u[1], 0x31);
  }
}
template <bool kSigned> DS4_INLINE i32x16 dot4(i32x16 acc, i8x64 w, const int8_t* x) {
  const __m256i b = _mm256_set1_epi32(load_le<int32_t>(x));
  return add(acc, {{dot4_half<kSigned>(w.v[0], b), dot4_half<kSigned>(w.v[1], b)}});
}
// Lanes hold blocks 0 1 4 5 2 3 6 7, 8 9 12 13 10 11 14 15, so that nothing crosses the halves of a register. Sums are of 16
// bits while they add four products: 4 * 63 * 127 < 2^15.
constexpr size_t kPiece = 8;
constexpr size_t lane_of(size_t l) { return (l & 9) | (l & 2) << 1 | (l & 4) >> 1; }
struct LaneSum { __m256i v[4]; };
DS4_INLINE LaneSum no_sum() { DS4_EACH(LaneSum, _mm256_setzero_si256()); }
DS4_INLINE i8x64 join(__m256i a, __m256i b) { return {{a, b}}; }
DS4_INLINE void pieces(i8x64 a0145, i8x64 a2367, i8x64* w) { w[0] = {{a0145.v[0], a2367.v[0]}}, w[1] = {{a0145.v[1], a2367.v[1]}}; }
DS4_INLINE LaneSum dot_lanes(LaneSum acc, const i8x64* w, const int8_t* x) {
  DS4_EACH(LaneSum, _mm256_add_epi16(acc.v[i], _mm256_maddubs_epi16(w[i / 2].v[i % 2], load256(x + 32 * i))));
}
// Byte `byte` of words 0, 1, 4 and 5 in each byte of their blocks' lanes; byte + 8: that of words 2, 3, 6 and 7.
DS4_INLINE __m256i byte_in_lanes(__m256i words, int byte) {
  const __m256i first = _mm256_set_epi64x(0x0404040404040404, 0, 0x0404040404040404, 0);
  return _mm256_shuffle_epi8(words, _mm256_add_epi8(first, _mm256_set1_epi8(char(byte))));
}
// A byte of each block's word of signs: for eight values what is negative, or not; then acc + +-w . x.
struct LaneSigns { __m256i v[4]; };
DS4_INLINE LaneSigns lane_signs(i8x64 signs, int byte) {
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
  const __m256i positive = _mm256_set1_epi64x(0x01406070787c7e7f);                    // negative once the byte's bit is added, never 0
  DS4_EACH(LaneSigns, _mm256_add_epi8(positive, _mm256_and_si256(bit, byte_in_lanes(signs.v[i / 2], byte + i % 2 * 8))));
}
DS4_INLINE LaneSum dot_lanes(LaneSum acc, const i8x64* w, const LaneSigns& s, const int8_t* x) {
  DS4_EACH(LaneSum, _mm256_add_epi16(acc.v[i], _mm256_maddubs_epi16(w[i / 2].v[i % 2], _mm256_sign_epi8(load256(x + 32 * i), s.v[i]))));
}
// Signed w need sums of 32 bits, two for each block.
DS4_INLINE LaneSum dot_signed_lanes(LaneSum acc, const i8x64* w, const int8_t* x) {
  DS4_EACH(LaneSum, _mm256_add_epi32(acc.v[i], dot4_half<true>(w[i / 2].v[i % 2], load256(x + 32 * i))));
}
DS4_INLINE i32x16 fold_lanes(LaneSum a) { return {{_mm256_hadd_epi32(a.v[0], a.v[1]), _mm256_hadd_epi32(a.v[2], a.v[3])}}; }
template <bool kBoth, bool kSmall> DS4_INLINE void finish(LaneSum a, LaneSum b, i32x16* lo, i32x16* hi) {
  const __m256i one = _mm256_set1_epi16(1);
  DS4_UNROLL
  for (int i = 0; i < 4; i++) {
    if (!kBoth && kSmall) { a.v[i] = _mm256_madd_epi16(_mm256_add_epi16(a.v[i], b.v[i]), one); continue; }
    a.v[i] = _mm256_madd_epi16(a.v[i], one), b.v[i] = _mm256_madd_epi16(b.v[i], one);
    if (!kBoth) a.v[i] = _mm256_add_epi32(a.v[i], b.v[i]);
  }
  *lo = fold_lanes(a);
  *hi = kBoth ? fold_lanes(b) : set1_i32(0);
}
DS4_INLINE __m256i zip_half(__m256i a, __m256i b, bool high) {
  const __m256i l = _mm256_unpacklo_epi32(a, b), h = _mm256_unpackhi_epi32(a, b);
  return high ? _mm256_permute2x128_si256(l, h, 0x31) : _mm256_permute2x128_si256(l, h, 0x20);
}
DS4_INLINE void zip(i32x16 a, i32x16 b, i32x16* lo, i32x16* hi) {
  *lo = {{zip_half(a.v[0], b.v[0], false), zip_half(a.v[0], b.v[0], true)}};
  *hi = {{zip_half(a.v[1], b.v[1], false), zip_half(a.v[1], b.v[1], true)}};
}

#elif DS4_PASS == 1   // -- NEON (AArch64) ----

constexpr int kBias = 0;
constexpr int kFloatRows = 2, kFloatTokens = 2;
struct f32x16 { float32x4_t v[4]; };
struct i32x16 { int32x4_t v[4]; };
struct i8x64 { uint8x16_t v[4]; };

DS4_INLINE f32x16 set1(float a) { DS4_EACH(f32x16, vdupq_n_f32(a)); }
DS4_INLINE f32x16 zero() { return set1(0.0f); }
DS4_INLINE f32x16 half_pair(uint16_t lo, uint16_t hi) { DS4_EACH(f32x16, vdupq_n_f32(f16_to_f32(i < 2 ? lo : hi))); }
DS4_INLINE f32x16 in_register(f32x16 a) { return a; }
DS4_INLINE f32x16 load(const float* p) { DS4_EACH(f32x16, vld1q_f32(p + 4 * i)); }
DS4_INLINE f32x16 load_f16(const uint16_t* p) { DS4_EACH(f32x16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
DS4_INLINE f32x16 load_f16(const uint8_t* p, size_t stride) {
  uint16_t h[16];
  for (size_t i = 0; i < 16; i++) std::memcpy(&h[i], p + i * stride, 2);
  return load_f16(h);
}
DS4_INLINE f32x16 load_bf16(const uint16_t* p) { DS4_EACH(f32x16, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
DS4_INLINE void store(float* p, f32x16 a) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]); }
DS4_INLINE f32x16 load_partial(const float* p, size_t n) { float t[16] = {}; std::memcpy(t, p, 4 * n); return load(t); }
DS4_INLINE void store_partial(float* p, size_t n, f32x16 a) { float t[16]; store(t, a); std::memcpy(p, t, 4 * n); }
DS4_INLINE void store_i8(int8_t* p, f32x16 a) {
  for (int i = 0; i < 4; i += 2)
    vst1_s8(p + 4 * i, vmovn_s16(vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.v[i])), vmovn_s32(vcvtnq_s32_f32(a.v[i + 1])))));
}
DS4_INLINE f32x16 add(f32x16 a, f32x16 b) { DS4_EACH(f32x16, vaddq_f32(a.v[i], b.v[i])); }
DS4_INLINE f32x16 sub(f32x16 a, f32x16 b) { DS4_EACH(f32x16, vsubq_f32(a.v[i], b.v[i])); }
DS4_INLINE f32x16 mul(f32x16 a, f32x16 b) { DS4_EACH(f32x16, vmulq_f32(a.v[i], b.v[i])); }
DS4_INLINE f32x16 div(f32x16 a, f32x16 b) { DS4_EACH(f32x16, vdivq_f32(a.v[i], b.v[i])); }
DS4_INLINE f32x16 max(f32x16 a, f32x16 b) { DS4_EACH(f32x16, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
DS4_INLINE f32x16 min(f32x16 a, f32x16 b) { DS4_EACH(f32x16, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
DS4_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { DS4_EACH(f32x16, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
DS4_INLINE f32x16 nearest(f32x16 a) { DS4_EACH(f32x16, vrndnq_f32(a.v[i])); }
DS4_INLINE f32x16 pow2(f32x16 n) { DS4_EACH(f32x16, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23))); }
DS4_INLINE f32x16 and_bits(f32x16 a, uint32_t bits) { DS4_EACH(f32x16, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), vdupq_n_u32(bits)))); }
DS4_INLINE f32x16 xor_bits(f32x16 a, uint32_t bits) { DS4_EACH(f32x16, vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a.v[i]), vdupq_n_u32(bits)))); }
DS4_INLINE f32x16 copysign(f32x16 mag, f32x16 sgn) { DS4_EACH(f32x16, vbslq_f32(vdupq_n_u32(0x80000000u), sgn.v[i], mag.v[i])); }
DS4_INLINE float reduce_add(f32x16 a) {
  const float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
DS4_INLINE float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
DS4_INLINE float reduce_max(f32x16 a) {
  float32x4_t s = max4(max4(a.v[0], a.v[2]), max4(a.v[1], a.v[3]));
  s = max4(s, vextq_f32(s, s, 2));
  return vgetq_lane_f32(max4(s, vextq_f32(s, s, 1)), 0);
}

DS4_INLINE f32x16 to_f32(i32x16 a) { DS4_EACH(f32x16, vcvtq_f32_s32(a.v[i])); }
DS4_INLINE i32x16 set1_i32(int32_t a) { DS4_EACH(i32x16, vdupq_n_s32(a)); }
DS4_INLINE int32x4_t words4(const void* p, int i) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i)); }
DS4_INLINE i32x16 odd_words(const void* p, const void* q) { DS4_EACH(i32x16, vuzp2q_s32(words4(i < 2 ? p : q, 2 * (i & 1)), words4(i < 2 ? p : q, 2 * (i & 1) + 1))); }
DS4_INLINE i32x16 load_i32(const void* p, const void* q) { DS4_EACH(i32x16, words4(i < 2 ? p : q, i & 1)); }
DS4_INLINE i32x16 load_i32(const void* p) { return load_i32(p, static_cast<const uint8_t*>(p) + 32); }
DS4_INLINE i32x16 load_u8(const void* p, const void* q) {
  const uint16x8_t l = vmovl_u8(vld1_u8(static_cast<const uint8_t*>(p))), h = vmovl_u8(vld1_u8(static_cast<const uint8_t*>(q)));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(l))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(l))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(h))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(h)))}};
}
DS4_INLINE i32x16 load_i16(const void* p, const void* q) { DS4_EACH(i32x16, vmovl_s16(vreinterpret_s16_u8(vld1_u8(static_cast<const uint8_t*>(i < 2 ? p : q) + 8 * (i & 1))))); }
DS4_INLINE void store_i32(void* p, i32x16 a) { for (int i = 0; i < 4; i++) vst1q_u8(static_cast<uint8_t*>(p) + 16 * i, vreinterpretq_u8_s32(a.v[i])); }
DS4_INLINE i32x16 add(i32x16 a, i32x16 b) { DS4_EACH(i32x16, vaddq_s32(a.v[i], b.v[i])); }
DS4_INLINE i32x16 sub(i32x16 a, i32x16 b) { DS4_EACH(i32x16, vsubq_s32(a.v[i], b.v[i])); }
DS4_INLINE i32x16 mul(i32x16 a, i32x16 b) { DS4_EACH(i32x16, vmulq_s32(a.v[i], b.v[i])); }
DS4_INLINE i32x16 and_bits(i32x16 a, uint32_t bits) { DS4_EACH(i32x16, vandq_s32(a.v[i], vdupq_n_s32(int32_t(bits)))); }
DS4_INLINE i32x16 or_(i32x16 a, i32x16 b) { DS4_EACH(i32x16, vorrq_s32(a.v[i], b.v[i])); }
template <int k> DS4_INLINE i32x16 shl(i32x16 a) { DS4_EACH(i32x16, vshlq_n_s32(a.v[i], k)); }
template <int k> DS4_INLINE i32x16 shr(i32x16 a) { DS4_EACH(i32x16, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), k))); }
template <int k> DS4_INLINE i32x16 sar(i32x16 a) { DS4_EACH(i32x16, vshrq_n_s32(a.v[i], k)); }
DS4_INLINE f32x16 as_f32(i32x16 a) { DS4_EACH(f32x16, vreinterpretq_f32_s32(a.v[i])); }

DS4_INLINE i8x64 load8(const void* p, const void* q) { DS4_EACH(i8x64, vld1q_u8(static_cast<const uint8_t*>(i < 2 ? p : q) + 16 * (i & 1))); }
DS4_INLINE i8x64 load8(const void* p) { return load8(p, static_cast<const uint8_t*>(p) + 32); }
DS4_INLINE void store8(void* p, i8x64 a) { for (int i = 0; i < 4; i++) vst1q_u8(static_cast<uint8_t*>(p) + 16 * i, a.v[i]); }
DS4_INLINE i8x64 set1_8(int a) { DS4_EACH(i8x64, vdupq_n_u8(uint8_t(a))); }
DS4_INLINE i8x64 add8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, vaddq_u8(a.v[i], b.v[i])); }
DS4_INLINE i8x64 xor8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, veorq_u8(a.v[i], b.v[i])); }
DS4_INLINE i8x64 and8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, vandq_u8(a.v[i], b.v[i])); }
template <int k> DS4_INLINE i8x64 shl8(i8x64 a) { DS4_EACH(i8x64, vshlq_n_u8(a.v[i], k)); }
template <int k> DS4_INLINE i8x64 shr8(i8x64 a, int mask) { DS4_EACH(i8x64, vandq_u8(vshrq_n_u8(a.v[i], k), vdupq_n_u8(uint8_t(mask)))); }
DS4_INLINE i8x64 top_sevens(const void* p, const void* q) {
  DS4_EACH(i8x64, vshrq_n_u8(vld2q_u8(static_cast<const uint8_t*>(i < 2 ? p : q) + 32 * (i & 1)).val[1], 1));
}
DS4_INLINE i8x64 nibbles(const void* p, const void* q) {
  const uint8x16_t a = vld1q_u8(static_cast<const uint8_t*>(p)), b = vld1q_u8(static_cast<const uint8_t*>(q)), m = vdupq_n_u8(15);
  return {{vandq_u8(a, m), vshrq_n_u8(a, 4), vandq_u8(b, m), vshrq_n_u8(b, 4)}};
}
template <int s0, int s1> DS4_INLINE i8x64 fields(const void* p, int mask) {
  const uint8_t* b = static_cast<const uint8_t*>(p);
  DS4_EACH(i8x64, vandq_u8(vshlq_u8(vld1q_u8(b + 16 * (i & 1)), vdupq_n_s8(int8_t(i < 2 ? -s0 : -s1))), vdupq_n_u8(uint8_t(mask))));
}
DS4_INLINE i8x64 lookup(const void* table, i8x64 a) { const uint8x16_t t = vld1q_u8(static_cast<const uint8_t*>(table)); DS4_EACH(i8x64, vqtbl1q_u8(t, a.v[i])); }
DS4_INLINE i8x64 mul_lanes(i8x64 a, const void* s) { DS4_EACH(i8x64, vmulq_u8(a.v[i], vdupq_n_u8(static_cast<const uint8_t*>(s)[i] & 15))); }
DS4_INLINE uint8x16_t bit_mask(uint64_t mask, int i) {           // byte j: all ones if bit 16i + j is set
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  const uint8x8_t lo = vdup_n_u8(uint8_t(mask >> (16 * i))), hi = vdup_n_u8(uint8_t(mask >> (16 * i + 8)));
  return vtstq_u8(vcombine_u8(lo, hi), bit);
}
DS4_INLINE i8x64 add_where(i8x64 a, uint64_t mask, int c) { DS4_EACH(i8x64, vaddq_u8(a.v[i], vandq_u8(bit_mask(mask, i), vdupq_n_u8(uint8_t(c))))); }
DS4_INLINE i8x64 reflect_where(i8x64 a, const void* bits, int c) { DS4_EACH(i8x64, vbslq_u8(bit_mask(load_le<uint64_t>(bits), i), vsubq_u8(vdupq_n_u8(uint8_t(c)), a.v[i]), a.v[i])); }
DS4_INLINE void zip8(i8x64 a, i8x64 b, i8x64* lo, i8x64* hi) {
  for (int i = 0; i < 4; i++) {
    i8x64* to = i < 2 ? lo : hi;
    to->v[2 * i % 4] = vzip1q_u8(a.v[i], b.v[i]);
    to->v[2 * i % 4 + 1] = vzip2q_u8(a.v[i], b.v[i]);
  }
}
DS4_INLINE i8x64 nibble_pairs(const void* p, const void* q) {
  const i8x64 n = nibbles(p, q);
  return {{vzip1q_u8(n.v[0], n.v[1]), vzip2q_u8(n.v[0], n.v[1]), vzip1q_u8(n.v[2], n.v[3]), vzip2q_u8(n.v[2], n.v[3])}};
}
DS4_INLINE uint8x8_t grid_entry(const uint64_t* grid, size_t i) { return vld1_u8(reinterpret_cast<const uint8_t*>(grid + i)); }
template <class I> DS4_INLINE i8x64 grid8(const uint64_t* grid, const I* a, const I* b) {
  DS4_EACH(i8x64, vcombine_u8(grid_entry(grid, (i < 2 ? a : b)[2 * (i & 1)]), grid_entry(grid, (i < 2 ? a : b)[2 * (i & 1) + 1])));
}
template <class I> DS4_INLINE i8x64 grid4(const uint32_t* grid, const I* a) {
  DS4_EACH(i8x64, vreinterpretq_u8_u32(uint32x4_t{grid[a[4 * i]], grid[a[4 * i + 1]], grid[a[4 * i + 2]], grid[a[4 * i + 3]]}));
}
DS4_INLINE uint8x16_t digit3_quarter(uint8x16_t a, const void* power, int i) {
  const uint16x8_t p = vmulq_n_u16(vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t*>(power) + 16 * i)), 257);   // both bytes of the pair
  const uint8x16_t v = vmulq_u8(a, vreinterpretq_u8_u16(p));
  return vsubq_u8(vdupq_n_u8(0), vaddq_u8(vcgeq_u8(v, vdupq_n_u8(86)), vcgeq_u8(v, vdupq_n_u8(171))));
}
DS4_INLINE i8x64 digit3(i8x64 a, const void* power) { DS4_EACH(i8x64, digit3_quarter(a.v[i], power, i)); }
DS4_INLINE f32x16 bytes_to_f32(const void* w) {
  const int8x16_t b = vreinterpretq_s8_u8(vld1q_u8(static_cast<const uint8_t*>(w)));
  const int16x8_t l = vmovl_s8(vget_low_s8(b)), h = vmovl_s8(vget_high_s8(b));
  return to_f32({{vmovl_s16(vget_low_s16(l)), vmovl_s16(vget_high_s16(l)), vmovl_s16(vget_low_s16(h)), vmovl_s16(vget_high_s16(h))}});
}

// Four sums of 4 products of 16 bytes.
DS4_INLINE int32x4_t dot4_quarter(int8x16_t a, int8x16_t b) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(vdupq_n_s32(0), a, b);
#else
  return vpaddq_s32(vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))), vpaddlq_s16(vmull_high_s8(a, b)));
#endif
}
template <bool kSigned, int kStride = 32> DS4_INLINE void dot_halves(const void* w, const int8_t* x, i32x16* lo, i32x16* hi) {
  const int8_t* p = static_cast<const int8_t*>(w);
  for (int i = 0; i < 4; i++, x += 128) {
    int32x4_t l[4], h[4];
    for (int k = 0; k < 4; k++, p += kStride) {
      l[k] = dot4_quarter(vld1q_s8(p), vld1q_s8(x + 32 * k));
      h[k] = dot4_quarter(vld1q_s8(p + 16), vld1q_s8(x + 32 * k + 16));
    }
    lo->v[i] = vpaddq_s32(vpaddq_s32(l[0], l[1]), vpaddq_s32(l[2], l[3]));
    hi->v[i] = vpaddq_s32(vpaddq_s32(h[0], h[1]), vpaddq_s32(h[2], h[3]));
  }
}
template <bool kSigned> DS4_INLINE i32x16 dot4(i32x16 acc, i8x64 w, const int8_t* x) {
  const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(load_le<int32_t>(x)));
  DS4_EACH(i32x16, vaddq_s32(acc.v[i], dot4_quarter(vreinterpretq_s8_u8(w.v[i]), b)));
}
DS4_INLINE void zip(i32x16 a, i32x16 b, i32x16* lo, i32x16* hi) {
  for (int i = 0; i < 4; i++) {
    i32x16* to = i < 2 ? lo : hi;
    to->v[2 * i % 4] = vzip1q_s32(a.v[i], b.v[i]);
    to->v[2 * i % 4 + 1] = vzip2q_s32(a.v[i], b.v[i]);
  }
}

#else   // -- scalar: what every operation means ----

constexpr int kBias = 0;
constexpr int kFloatRows = 2, kFloatTokens = 2;
struct f32x16 { float v[16]; };
struct i32x16 { int32_t v[16]; };
struct i8x64 { uint8_t v[64]; };

DS4_INLINE f32x16 set1(float a) { DS4_EACH(f32x16, a); }
DS4_INLINE f32x16 zero() { return set1(0.0f); }
DS4_INLINE f32x16 half_pair(uint16_t lo, uint16_t hi) { const float l = f16_to_f32(lo), h = f16_to_f32(hi); DS4_EACH(f32x16, i < 8 ? l : h); }
DS4_INLINE f32x16 load(const float* p) { DS4_EACH(f32x16, p[i]); }
DS4_INLINE f32x16 in_register(f32x16 a) { return a; }                          // for values that are used several times
DS4_INLINE f32x16 load_partial(const float* p, size_t n) { DS4_EACH(f32x16, size_t(i) < n ? p[i] : 0.0f); }   // n <= 16
DS4_INLINE f32x16 load_f16(const uint16_t* p) { DS4_EACH(f32x16, f16_to_f32(p[i])); }
DS4_INLINE f32x16 load_f16(const uint8_t* p, size_t stride) { DS4_EACH(f32x16, f16_to_f32(load_le<uint16_t>(p + size_t(i) * stride))); }
DS4_INLINE f32x16 load_bf16(const uint16_t* p) { DS4_EACH(f32x16, bf16_to_f32(p[i])); }
DS4_INLINE void store(float* p, f32x16 a) { for (int i = 0; i < 16; i++) p[i] = a.v[i]; }
DS4_INLINE void store_partial(float* p, size_t n, f32x16 a) { for (size_t i = 0; i < n; i++) p[i] = a.v[i]; }
DS4_INLINE void store_i8(int8_t* p, f32x16 a) { for (int i = 0; i < 16; i++) p[i] = int8_t(std::nearbyint(a.v[i])); }   // -127 .. 127
DS4_INLINE f32x16 add(f32x16 a, f32x16 b) { DS4_EACH(f32x16, a.v[i] + b.v[i]); }
DS4_INLINE f32x16 sub(f32x16 a, f32x16 b) { DS4_EACH(f32x16, a.v[i] - b.v[i]); }
DS4_INLINE f32x16 mul(f32x16 a, f32x16 b) { DS4_EACH(f32x16, a.v[i] * b.v[i]); }
DS4_INLINE f32x16 div(f32x16 a, f32x16 b) { DS4_EACH(f32x16, a.v[i] / b.v[i]); }
DS4_INLINE f32x16 max(f32x16 a, f32x16 b) { DS4_EACH(f32x16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
DS4_INLINE f32x16 min(f32x16 a, f32x16 b) { DS4_EACH(f32x16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
DS4_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { DS4_EACH(f32x16, std::fma(a.v[i], b.v[i], c.v[i])); }
DS4_INLINE f32x16 nearest(f32x16 a) { DS4_EACH(f32x16, std::nearbyint(a.v[i])); }
DS4_INLINE f32x16 pow2(f32x16 n) { DS4_EACH(f32x16, bit_cast<float>(uint32_t(int32_t(n.v[i]) + 127) << 23)); }   // 2^n, -126 <= n <= 127
DS4_INLINE f32x16 and_bits(f32x16 a, uint32_t bits) { DS4_EACH(f32x16, bit_cast<float>(bit_cast<uint32_t>(a.v[i]) & bits)); }
DS4_INLINE f32x16 xor_bits(f32x16 a, uint32_t bits) { DS4_EACH(f32x16, bit_cast<float>(bit_cast<uint32_t>(a.v[i]) ^ bits)); }
DS4_INLINE f32x16 copysign(f32x16 mag, f32x16 sgn) { DS4_EACH(f32x16, std::copysign(mag.v[i], sgn.v[i])); }
DS4_INLINE float reduce_add(f32x16 a) {
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) a.v[i] = a.v[i] + a.v[i + w];
  return a.v[0];
}
DS4_INLINE float reduce_max(f32x16 a) {
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
  return a.v[0];
}

DS4_INLINE f32x16 to_f32(i32x16 a) { DS4_EACH(f32x16, float(a.v[i])); }
DS4_INLINE i32x16 set1_i32(int32_t a) { DS4_EACH(i32x16, a); }
DS4_INLINE i32x16 odd_words(const void* p, const void* q) { DS4_EACH(i32x16, load_le<int32_t>(static_cast<const uint8_t*>(i < 8 ? p : q) + 8 * (i & 7) + 4)); }   // words 1 3 .. 15
DS4_INLINE i32x16 load_i32(const void* p, const void* q) { i32x16 r; std::memcpy(r.v, p, 32); std::memcpy(r.v + 8, q, 32); return r; }
DS4_INLINE i32x16 load_i32(const void* p) { return load_i32(p, static_cast<const uint8_t*>(p) + 32); }
DS4_INLINE i32x16 load_u8(const void* p, const void* q) { DS4_EACH(i32x16, static_cast<const uint8_t*>(i < 8 ? p : q)[i & 7]); }
DS4_INLINE i32x16 load_i16(const void* p, const void* q) { DS4_EACH(i32x16, load_le<int16_t>(static_cast<const uint8_t*>(i < 8 ? p : q) + 2 * (i & 7))); }
DS4_INLINE void store_i32(void* p, i32x16 a) { std::memcpy(p, a.v, 64); }
DS4_INLINE i32x16 add(i32x16 a, i32x16 b) { DS4_EACH(i32x16, a.v[i] + b.v[i]); }
DS4_INLINE i32x16 sub(i32x16 a, i32x16 b) { DS4_EACH(i32x16, a.v[i] - b.v[i]); }
DS4_INLINE i32x16 mul(i32x16 a, i32x16 b) { DS4_EACH(i32x16, a.v[i] * b.v[i]); }
DS4_INLINE i32x16 and_bits(i32x16 a, uint32_t bits) { DS4_EACH(i32x16, int32_t(uint32_t(a.v[i]) & bits)); }
DS4_INLINE i32x16 or_(i32x16 a, i32x16 b) { DS4_EACH(i32x16, a.v[i] | b.v[i]); }
template <int k> DS4_INLINE i32x16 shl(i32x16 a) { DS4_EACH(i32x16, int32_t(uint32_t(a.v[i]) << k)); }
template <int k> DS4_INLINE i32x16 shr(i32x16 a) { DS4_EACH(i32x16, int32_t(uint32_t(a.v[i]) >> k)); }
template <int k> DS4_INLINE i32x16 sar(i32x16 a) { DS4_EACH(i32x16, a.v[i] >> k); }
DS4_INLINE f32x16 as_f32(i32x16 a) { DS4_EACH(f32x16, bit_cast<float>(a.v[i])); }

DS4_INLINE i8x64 load8(const void* p, const void* q) { i8x64 r; std::memcpy(r.v, p, 32); std::memcpy(r.v + 32, q, 32); return r; }
DS4_INLINE i8x64 load8(const void* p) { i8x64 r; std::memcpy(r.v, p, 64); return r; }
DS4_INLINE void store8(void* p, i8x64 a) { std::memcpy(p, a.v, 64); }
DS4_INLINE i8x64 set1_8(int a) { DS4_EACH(i8x64, uint8_t(a)); }
DS4_INLINE i8x64 add8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, uint8_t(a.v[i] + b.v[i])); }
DS4_INLINE i8x64 xor8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, a.v[i] ^ b.v[i]); }
DS4_INLINE i8x64 and8(i8x64 a, i8x64 b) { DS4_EACH(i8x64, a.v[i] & b.v[i]); }
template <int k> DS4_INLINE i8x64 shl8(i8x64 a) { DS4_EACH(i8x64, uint8_t(a.v[i] << k)); }                     // nothing may leave the byte
template <int k> DS4_INLINE i8x64 shr8(i8x64 a, int mask) { DS4_EACH(i8x64, uint8_t((a.v[i] >> k) & mask)); }  // mask < 256 >> k
// The upper seven bits of 32 words of 16 bits at p, then at q.
DS4_INLINE i8x64 top_sevens(const void* p, const void* q) { DS4_EACH(i8x64, static_cast<const uint8_t*>(i < 32 ? p : q)[2 * (i & 31) + 1] >> 1); }
// p[16] low nibbles, high nibbles, q[16] low nibbles, high nibbles.
DS4_INLINE i8x64 nibbles(const void* p, const void* q) { DS4_EACH(i8x64, (static_cast<const uint8_t*>(i < 32 ? p : q)[i & 15] >> (i & 16) / 4) & 15); }
// (p[32] >> s0) & mask, (p[32] >> s1) & mask; mask < 256 >> max(s0, s1).
template <int s0, int s1> DS4_INLINE i8x64 fields(const void* p, int mask) { DS4_EACH(i8x64, uint8_t((static_cast<const uint8_t*>(p)[i & 31] >> (i < 32 ? s0 : s1)) & mask)); }
DS4_INLINE i8x64 lookup(const void* table, i8x64 a) { DS4_EACH(i8x64, static_cast<const uint8_t*>(table)[a.v[i] & 15]); }   // a < 16
// a < 4 times the low nibble of s[i / 16].
DS4_INLINE i8x64 mul_lanes(i8x64 a, const void* s) { DS4_EACH(i8x64, uint8_t(a.v[i] * (static_cast<const uint8_t*>(s)[i / 16] & 15))); }
DS4_INLINE i8x64 add_where(i8x64 a, uint64_t mask, int c) { DS4_EACH(i8x64, uint8_t(a.v[i] + (mask >> i & 1 ? c : 0))); }
// c - a where the bit is set; a < c, a power of two.
DS4_INLINE i8x64 reflect_where(i8x64 a, const void* bits, int c) { DS4_EACH(i8x64, uint8_t(static_cast<const uint8_t*>(bits)[i / 8] >> (i & 7) & 1 ? c - a.v[i] : a.v[i])); }
// a[0] b[0] a[1] b[1] ..: the first 64 to lo.
DS4_INLINE void zip8(i8x64 a, i8x64 b, i8x64* lo, i8x64* hi) {
  for (int i = 0; i < 64; i++) (i < 32 ? lo : hi)->v[2 * i % 64] = a.v[i], (i < 32 ? lo : hi)->v[2 * i % 64 + 1] = b.v[i];
}
// Low nibble, high nibble of p[0], of p[1] .. p[15], q[0] .. q[15].
DS4_INLINE i8x64 nibble_pairs(const void* p, const void* q) { DS4_EACH(i8x64, (static_cast<const uint8_t*>(i < 32 ? p : q)[i % 32 / 2] >> 4 * (i & 1)) & 15); }
// Grid entries of 8 bytes, number a[0] .. a[3], b[0] .. b[3]; of 4 bytes, number a[0] .. a[15].
template <class I> DS4_INLINE i8x64 grid8(const uint64_t* grid, const I* a, const I* b) { DS4_EACH(i8x64, uint8_t(grid[i < 32 ? a[i / 8] : b[i / 8 - 4]] >> 8 * (i & 7))); }
template <class I> DS4_INLINE i8x64 grid4(const uint32_t* grid, const I* a) { DS4_EACH(i8x64, uint8_t(grid[a[i / 4]] >> 8 * (i & 3))); }
// Top base-3 digit of (a * power mod 256) / 256; power: uint16_t[32], one for two bytes.
DS4_INLINE i8x64 digit3(i8x64 a, const void* power) { DS4_EACH(i8x64, uint8_t(uint8_t(a.v[i] * static_cast<const uint16_t*>(power)[i / 2]) * 3 >> 8)); }
// Sixteen weight bytes as dot_blocks takes them: unsigned where kBias is 128, else signed.
DS4_INLINE f32x16 bytes_to_f32(const void* w) { DS4_EACH(f32x16, static_cast<const int8_t*>(w)[i]); }

// Exact sums over the first and the last 16 of 16 blocks of 32 bytes, kStride apart, times x[512]. kSigned: some byte may be
// negative (where kBias is 0).
template <bool kSigned, int kStride = 32> DS4_INLINE void dot_halves(const void* w, const int8_t* x, i32x16* lo, i32x16* hi) {
  const int8_t* p = static_cast<const int8_t*>(w);
  for (int b = 0; b < 16; b++, p += kStride, x += 32) {
    lo->v[b] = hi->v[b] = 0;
    for (int i = 0; i < 16; i++) lo->v[b] += p[i] * x[i], hi->v[b] += p[16 + i] * x[16 + i];
  }
}
// acc[l] + sum of w[4l + i] * x[i], i < 4.
template <bool kSigned> DS4_INLINE i32x16 dot4(i32x16 acc, i8x64 w, const int8_t* x) {
  DS4_EACH(i32x16, acc.v[i] + int8_t(w.v[4 * i]) * x[0] + int8_t(w.v[4 * i + 1]) * x[1] + int8_t(w.v[4 * i + 2]) * x[2] + int8_t(w.v[4 * i + 3]) * x[3]);
}
// a[0] b[0] a[1] b[1] ..: the first sixteen to lo.
DS4_INLINE void zip(i32x16 a, i32x16 b, i32x16* lo, i32x16* hi) {
  for (int i = 0; i < 16; i++) (i < 8 ? lo : hi)->v[2 * i % 16] = a.v[i], (i < 8 ? lo : hi)->v[2 * i % 16 + 1] = b.v[i];
}
#endif

#if DS4_PASS != 3                // AVX-512 adds them before it puts them in order
// Exact sums over the blocks. Another kStride than 32 is of blocks in the file, signed without kBias: w + kBias is taken.
template <bool kSigned, int kStride = 32> DS4_INLINE i32x16 dot_blocks(const void* w, const int8_t* x) {
  i32x16 lo, hi;
  dot_halves<kSigned, kStride>(w, x, &lo, &hi);
  return add(lo, hi);
}
#endif

// The first n of sixteen, or all where n >= 16; the rest is zero, or stays.
DS4_INLINE f32x16 load_upto(const float* p, size_t n) { return n < 16 ? load_partial(p, n) : load(p); }
DS4_INLINE void store_upto(float* p, size_t n, f32x16 a) { if (n < 16) store_partial(p, n, a); else store(p, a); }
DS4_INLINE f32x16 abs(f32x16 a) { return and_bits(a, 0x7fffffffu); }
DS4_INLINE f32x16 neg(f32x16 a) { return xor_bits(a, 0x80000000u); }

// =============================================================================
// 5. KERNELS — everything that is computed in bulk, written once against section 4.   uses: 4   (every pass)
// =============================================================================
// Floats: element k of a dot product goes to lane k % 16 by fma, one accumulator per result, lanes folded at the end.
// int8: the unit is a block of 32 activations. Its integer sum S (sub-block scales included) is exact; block b does
//   lane[b % 16] = fma(S, d_w * d_x, lane), and where the type has a minimum m:  lane = fma(m, -d_x * sum(q_x), lane).
// Decoding keeps the 16 blocks of a group in lanes, the prompt tile keeps 16 rows in lanes: the same operations on the
// same numbers, so the same bits.

// e^x: x = n ln 2 + r, a polynomial for e^r, the exponent field for 2^n. Inputs are clamped to [-87.3, 88].
DS4_INLINE f32x16 exp(f32x16 x) {
  x = min(max(x, set1(-87.3f)), set1(88.0f));
  const f32x16 n = nearest(mul(x, set1(1.44269504f)));
  f32x16 r = fma(n, set1(-0.693145752f), x);
  r = fma(n, set1(-1.42860677e-6f), r);
  f32x16 p = set1(1.98412698e-4f);
  p = fma(p, r, set1(1.38888889e-3f));
  p = fma(p, r, set1(8.33333333e-3f));
  p = fma(p, r, set1(4.16666667e-2f));
  p = fma(p, r, set1(1.66666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return mul(p, pow2(n));
}

// -- unpacking: every quantised type in one form ----

// Sixteen blocks of 32 values; value i of block b is
//   d[b] * s * (q[32b + i] - offset) - m,   offset from the type's Format, and by its kind
//   kPlain, kSigned: s = 1, m = 0   kMin: m = e0[b]   kMin16: m = e0[b] for i < 16, else e1[b]
//   kScaled: s = e0[b] or e1[b], m = 0.
// d * s * (q - offset) is exact in float. q are unsigned bytes below 128, but int8 in kSigned formats, whose offset is 0, and
// any unsigned byte where the offset is kBias.
struct Group {
  alignas(64) int8_t q[512];
  alignas(64) float d[16], e0[16], e1[16];
  alignas(64) uint8_t s[64];                   // scratch of the unpackers
};
enum class Kind { kPlain, kSigned, kMin, kMin16, kScaled };     // e0 from kMin on, e1 from kMin16 on

DS4_INLINE f32x16 halves(const uint16_t* p, size_t stride, size_t n) {
  const uint8_t* b = reinterpret_cast<const uint8_t*>(p);
  if (n == 16) return load_f16(b, stride);
  alignas(32) uint16_t h[16] = {};
  for (size_t i = 0; i < n; i++) std::memcpy(&h[i], b + i * stride, 2);
  return load_f16(h);
}
template <class B> DS4_INLINE f32x16 d_lanes(const B* b, size_t n) { return halves(&b->d, sizeof(B), n); }

// Of the 16 blocks of two 256-blocks a and b (twice the same where there is one), as far as the type has them. e0, e1: scales of
// their halves, or e: both as signed words (Q2_K, on AVX-512 IQ2_XS and IQ2_S); m0, m1: minimums, of their halves or m0 of the
// whole block.
struct LaneScales { f32x16 d, e0, e1, m0, m1; i32x16 e; };
#if DS4_PASS == 3
// These kernels are short of the ports that shuffle and convert. Halves converted from memory need no shuffle, a table makes
// floats of nibbles in one instruction instead of two.
DS4_INLINE __m512 four_halves(uint64_t h) {
  __m128 v;
  asm("vcvtph2ps %1, %0" : "=v"(v) : "m"(h));
  return _mm512_castps128_ps512(v);
}
// Element lo of v in lanes 0 to 7, hi in the others.
template <int lo, int hi>
DS4_INLINE f32x16 lane_pair(__m512 v) { return {_mm512_permutexvar_ps(_mm512_setr_epi32(lo, lo, lo, lo, lo, lo, lo, lo, hi, hi, hi, hi, hi, hi, hi, hi), v)}; }
DS4_INLINE f32x16 half_pair(uint16_t lo, uint16_t hi) { return lane_pair<0, 1>(four_halves(uint64_t(lo) | uint64_t(hi) << 16)); }
template <class B>
DS4_INLINE void dm_pairs(const B* a, const B* b, f32x16* d, f32x16* m) {
  static_assert(offsetof(B, m) == offsetof(B, d) + 2, "read as one word");
  const __m512 v = four_halves(load_le<uint32_t>(&a->d) | uint64_t(load_le<uint32_t>(&b->d)) << 32);
  *d = lane_pair<0, 2>(v), *m = lane_pair<1, 3>(v);
}
DS4_INLINE f32x16 nibble_f32(i32x16 v) { return {_mm512_permutexvar_ps(v.v, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))}; }   // of v & 15
#else
template <class B> DS4_INLINE void dm_pairs(const B* a, const B* b, f32x16* d, f32x16* m) { *d = half_pair(a->d, b->d), *m = half_pair(a->m, b->m); }
DS4_INLINE f32x16 nibble_f32(i32x16 v) { return to_f32(and_bits(v, 15)); }
#endif
template <class B> DS4_INLINE f32x16 d_pair(const B* a, const B* b) { return half_pair(a->d, b->d); }

// The 8 nibbles, 8 two-bit fields of x as bytes, lowest first.
DS4_INLINE uint64_t spread4(uint64_t x) {
  x = (x | x << 16) & 0x0000ffff0000ffffu;
  x = (x | x << 8) & 0x00ff00ff00ff00ffu;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
}
DS4_INLINE uint64_t spread2(uint64_t x) {
  x = (x | x << 24) & 0x000000ff000000ffu;
  x = (x | x << 12) & 0x000f000f000f000fu;
  return (x | x << 6) & 0x0303030303030303u;
}
// The 4 lowest fields of two, three bits of words as bytes.
DS4_INLINE i32x16 spread2(i32x16 x) {
  return or_(or_(and_bits(x, 3), and_bits(shl<6>(x), 3 << 8)), or_(and_bits(shl<12>(x), 3 << 16), and_bits(shl<18>(x), 3 << 24)));
}
DS4_INLINE i32x16 spread3(i32x16 x) {
  return or_(or_(and_bits(x, 7), and_bits(shl<5>(x), 7 << 8)), or_(and_bits(shl<10>(x), 7 << 16), and_bits(shl<15>(x), 7 << 24)));
}
// g.s = one signed scale per 16 values, as floats into e0 and e1.
DS4_INLINE void split_scales(Group& g) {
  const i32x16 w = load_i16(g.s, g.s + 16);
  store(g.e0, to_f32(sar<24>(shl<24>(w))));
  store(g.e1, to_f32(sar<8>(w)));
}

// Every unpacker: the n blocks at p, n <= 16 of 32 values or n <= 2 of 256; what lies behind them in g may be anything.
static void unpack_q8_0(const uint8_t* p, size_t n, Group& g) {
  const BlockQ8_0* b = reinterpret_cast<const BlockQ8_0*>(p);
  for (size_t i = 0; i < n; i += 2) store8(g.q + 32 * i, xor8(load8(b[i].q, b[i + 1 < n ? i + 1 : i].q), set1_8(kBias)));
  store(g.d, d_lanes(b, n));
}

constexpr std::array<int8_t, 16> biased(const int8_t* values, int bias) {
  std::array<int8_t, 16> t{};
  for (size_t i = 0; i < 16; i++) t[i] = int8_t(uint8_t(values[i] + bias));
  return t;
}
alignas(16) constexpr std::array<int8_t, 16> kFp4Bytes = biased(kFp4, 12), kIq4Bytes = biased(kIq4, kBias);

// 2^(e-128) may be subnormal: two normal factors, 2^(h-64) and 2^(e-h-64) with h = e / 2.
DS4_INLINE f32x16 fp4_scales(const uint8_t* exponents) {
  const i32x16 e = load_u8(exponents, exponents + 8), h = shr<1>(e);
  return mul(as_f32(shl<23>(add(h, set1_i32(63)))), as_f32(shl<23>(add(sub(e, h), set1_i32(63)))));
}
// The types of 32 values of 4 bits, some with a fifth, a minimum or a table.
template <class B>
static void unpack_nibbles(const uint8_t* p, size_t n, Group& g) {
  constexpr bool kFp4 = std::is_same_v<B, BlockMXFP4>, kIq4 = std::is_same_v<B, BlockIQ4_NL>;
  const B* b = reinterpret_cast<const B*>(p);
  for (size_t i = 0; i < n; i += 2) {
    const B& next = b[i + 1 < n ? i + 1 : i];
    i8x64 v = nibbles(b[i].q, next.q);
    if constexpr (std::is_same_v<B, BlockQ5_0> || std::is_same_v<B, BlockQ5_1>) v = add_where(v, load_le<uint32_t>(b[i].h) | uint64_t(load_le<uint32_t>(next.h)) << 32, 16);
    if constexpr (kFp4 || kIq4) v = lookup((kFp4 ? kFp4Bytes : kIq4Bytes).data(), v);
    store8(g.q + 32 * i, v);
  }
  if constexpr (kFp4) {
    for (size_t i = 0; i < n; i++) g.s[i] = b[i].e;
    store(g.d, fp4_scales(g.s));
  } else {
    store(g.d, d_lanes(b, n));
  }
  if constexpr (std::is_same_v<B, BlockQ4_1> || std::is_same_v<B, BlockQ5_1>) store(g.e0, neg(halves(&b->m, sizeof(B), n)));
}
DS4_INLINE uint64_t iq4_xs_scales(const BlockIQ4_XS* b) { return spread4(load_le<uint32_t>(b->sl)) | spread2(b->sh) << 4; }
static void unpack_iq4_xs(const uint8_t* p, size_t n, Group& g) {
  const BlockIQ4_XS* b = reinterpret_cast<const BlockIQ4_XS*>(p);
  for (size_t i = 0; i < n; i++) {
    for (size_t j = 0; j < 4; j++) store8(g.q + 256 * i + 64 * j, lookup(kIq4Bytes.data(), nibbles(b[i].q + 32 * j, b[i].q + 32 * j + 16)));
    const uint64_t s = iq4_xs_scales(b + i);
    std::memcpy(g.s + 8 * i, &s, 8);
  }
  store(g.d, mul(d_pair(b, b + n - 1), to_f32(sub(load_u8(g.s, g.s + 8), set1_i32(32)))));
}

static void unpack_q2_k(const uint8_t* p, size_t n, Group& g) {
  const BlockQ2_K* b = reinterpret_cast<const BlockQ2_K*>(p);
  for (size_t i = 0; i < n; i++) {                                 // the scale of 16 fits into the byte: 3 * 15
    for (size_t h = 0; h < 2; h++) {
      int8_t* q = g.q + 256 * i + 128 * h;
      store8(q, mul_lanes(fields<0, 2>(b[i].q + 32 * h, 3), b[i].s + 8 * h));
      store8(q + 64, mul_lanes(fields<4, 6>(b[i].q + 32 * h, 3), b[i].s + 8 * h + 4));
    }
  }
  f32x16 d, m;
  dm_pairs(b, b + n - 1, &d, &m);
  const i32x16 s = load_i16(b[0].s, b[n - 1].s);
  store(g.d, d);
  store(g.e0, mul(m, nibble_f32(shr<4>(s))));
  store(g.e1, mul(m, nibble_f32(shr<12>(s))));
}
// Sixteen scales of six bits, minus 32.
DS4_INLINE void q3_scales(const uint8_t* s, uint8_t* out) {
  const uint64_t lo = load_le<uint64_t>(s), hi = load_le<uint32_t>(s + 8), top = 0x8080808080808080u;
  const uint64_t a = (lo & 0x0f0f0f0f0f0f0f0fu) | (hi & 0x03030303u) << 4 | (hi & 0x0c0c0c0cu) << 34;
  const uint64_t c = (lo >> 4 & 0x0f0f0f0f0f0f0f0fu) | (hi & 0x30303030u) | (hi & 0xc0c0c0c0u) << 30;
  const uint64_t r[2] = {((a | top) - (top >> 2)) ^ top, ((c | top) - (top >> 2)) ^ top};
  std::memcpy(out, r, 16);
}
static void unpack_q3_k(const uint8_t* p, size_t n, Group& g) {
  const BlockQ3_K* b = reinterpret_cast<const BlockQ3_K*>(p);
  for (size_t i = 0; i < n; i++) {
    int8_t* q = g.q + 256 * i;
    store8(q, add8(fields<0, 2>(b[i].q, 3), shl8<2>(fields<0, 1>(b[i].h, 1))));
    store8(q + 64, add8(fields<4, 6>(b[i].q, 3), shl8<2>(fields<2, 3>(b[i].h, 1))));
    store8(q + 128, add8(fields<0, 2>(b[i].q + 32, 3), shl8<2>(fields<4, 5>(b[i].h, 1))));
    store8(q + 192, add8(fields<4, 6>(b[i].q + 32, 3), shl8<2>(fields<6, 7>(b[i].h, 1))));
    q3_scales(b[i].s, g.s + 16 * i);
  }
  store(g.d, d_pair(b, b + n - 1));
  split_scales(g);
}
// Eight scales and eight minimums of six bits: sc[k] to s, mn[k] to s + 16.
DS4_INLINE void q4_scales(const uint8_t* p, uint8_t* s) {
  const uint32_t a = load_le<uint32_t>(p), b = load_le<uint32_t>(p + 4), c = load_le<uint32_t>(p + 8);
  const uint32_t sc[2] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)};
  const uint32_t mn[2] = {b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
  std::memcpy(s, sc, 8);
  std::memcpy(s + 16, mn, 8);
}
template <class B>                             // Q4_K, or Q5_K with a fifth bit
static void unpack_q4_k(const uint8_t* p, size_t n, Group& g) {
  const B* b = reinterpret_cast<const B*>(p);
  for (size_t i = 0; i < n; i++) {
    i8x64 v[4];
    DS4_UNROLL
    for (size_t j = 0; j < 4; j++) v[j] = fields<0, 4>(b[i].q + 32 * j, 15);
    if constexpr (std::is_same_v<B, BlockQ5_K>) {
      const i8x64 high[4] = {fields<0, 1>(b[i].h, 1), fields<2, 3>(b[i].h, 1), fields<4, 5>(b[i].h, 1), fields<6, 7>(b[i].h, 1)};
      DS4_UNROLL
      for (size_t j = 0; j < 4; j++) v[j] = add8(v[j], shl8<4>(high[j]));
    }
    DS4_UNROLL
    for (size_t j = 0; j < 4; j++) store8(g.q + 256 * i + 64 * j, v[j]);
    q4_scales(b[i].s, g.s + 8 * i);
  }
  f32x16 d, m;
  dm_pairs(b, b + n - 1, &d, &m);
  store(g.d, mul(d, to_f32(load_u8(g.s, g.s + 8))));
  store(g.e0, mul(m, to_f32(load_u8(g.s + 16, g.s + 24))));
}
static void unpack_q6_k(const uint8_t* p, size_t n, Group& g) {
  const BlockQ6_K* b = reinterpret_cast<const BlockQ6_K*>(p);
  for (size_t i = 0; i < n; i++) {
    for (size_t h = 0; h < 2; h++) {
      const i8x64 lo = load8(b[i].ql + 64 * h);
      int8_t* q = g.q + 256 * i + 128 * h;
      store8(q, add8(and8(lo, set1_8(15)), shl8<4>(fields<0, 2>(b[i].qh + 32 * h, 3))));
      store8(q + 64, add8(shr8<4>(lo, 15), shl8<4>(fields<4, 6>(b[i].qh + 32 * h, 3))));
    }
    std::memcpy(g.s + 16 * i, b[i].s, 16);
  }
  store(g.d, d_pair(b, b + n - 1));
  split_scales(g);
}
static void unpack_tq2_0(const uint8_t* p, size_t n, Group& g) {
  const BlockTQ2_0* b = reinterpret_cast<const BlockTQ2_0*>(p);
  for (size_t i = 0; i < n; i++)
    for (size_t h = 0; h < 2; h++) {
      store8(g.q + 256 * i + 128 * h, fields<0, 2>(b[i].q + 32 * h, 3));
      store8(g.q + 256 * i + 128 * h + 64, fields<4, 6>(b[i].q + 32 * h, 3));
    }
  store(g.d, d_pair(b, b + n - 1));
}
// Digit k of a byte is the top one of the byte times 3^k. The values: 5 digits of q[0..31], 5 of q[32..47], 4 of h.
struct Tq1Tables {
  uint16_t power[4][32];                       // of the bytes of four times 64 values
  uint8_t first32[64], first48[64];            // masks
  uint8_t low16[64], last4[64];                // 0 .. 15 in each lane; places of h in the last 16 bytes of the block
};
constexpr Tq1Tables make_tq1_tables() {
  Tq1Tables t{};
  constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
  for (size_t i = 0; i < 256; i++) t.power[i / 64][i % 64 / 2] = kPowers[i < 160 ? i / 32 : i < 240 ? (i - 160) / 16 : (i - 240) / 4];
  for (size_t i = 0; i < 64; i++) t.first32[i] = i < 32 ? 255 : 0, t.first48[i] = i < 48 ? 255 : 0, t.low16[i] = uint8_t(i % 16), t.last4[i] = uint8_t(10 + i % 4);
  return t;
}
alignas(64) constexpr Tq1Tables kTq1Tables = make_tq1_tables();
static void unpack_tq1_0(const uint8_t* p, size_t n, Group& g) {
  const BlockTQ1_0* b = reinterpret_cast<const BlockTQ1_0*>(p);
  auto where = [](const uint8_t* mask, i8x64 x, i8x64 y) { return xor8(y, and8(xor8(x, y), load8(mask))); };
  for (size_t i = 0; i < n; i++) {
    const i8x64 a = load8(b[i].q, b[i].q), c = lookup(b[i].q + 32, load8(kTq1Tables.low16)), h = lookup(b[i].q + 38, load8(kTq1Tables.last4));
    const i8x64 v[4] = {a, a, where(kTq1Tables.first32, a, c), where(kTq1Tables.first48, c, h)};
    for (size_t k = 0; k < 4; k++) store8(g.q + 256 * i + 64 * k, digit3(v[k], kTq1Tables.power[k]));
  }
  store(g.d, d_pair(b, b + n - 1));
}

DS4_INLINE i8x64 as_bytes(i32x16 a) {
  alignas(64) uint8_t t[64];
  store_i32(t, a);
  return load8(t);
}
// Seven sign bits in the low bits of every byte -> eight: the last makes the number of ones even.
DS4_INLINE i8x64 with_parity(i8x64 s) {
  alignas(16) static constexpr uint8_t kOdd[16] = {0, 128, 128, 0, 128, 0, 0, 128, 128, 0, 0, 128, 0, 128, 128, 0};
  return add8(s, lookup(kOdd, and8(xor8(s, shr8<4>(s, 15)), set1_8(15))));
}
// Words of 4 x 7 sign bits and a 4-bit scale on top: the signs as 4 bytes.
DS4_INLINE i8x64 sign_bytes(i32x16 v) {
  const i32x16 u = or_(and_bits(v, 0x3fff), and_bits(shl<2>(v), 0x3fff0000));
  return with_parity(as_bytes(or_(and_bits(u, 0x007f007f), and_bits(shl<1>(u), 0x7f007f00))));
}
// unit * (2s + 1), s = the top four bits.
#if DS4_PASS == 3
DS4_INLINE f32x16 top_scale(i32x16 v, float unit) {
  const f32x16 odd = {_mm512_setr_ps(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
  return {_mm512_permutexvar_ps(shr<28>(v).v, mul(odd, set1(unit)).v)};
}
#else
DS4_INLINE f32x16 top_scale(i32x16 v, float unit) { return mul(to_f32(or_(shr<27>(v), set1_i32(1))), set1(unit)); }
#endif
// Bytes of two scales of k bits, the lower for the first 16 values: both as 2s + 1.
template <int k> DS4_INLINE void odd_scales(i32x16 v, LaneScales& g) {
  constexpr uint32_t mask = (2u << k) - 2;
  g.e0 = to_f32(or_(and_bits(shl<1>(v), mask), set1_i32(1)));
  g.e1 = to_f32(or_(and_bits(shr<k - 1>(v), mask), set1_i32(1)));
}

// -- unpacking: types whose values are vectors from a grid ----

// Sixteen blocks of 32, from two blocks of the file (which may be the same).
struct GridGroup {
  LaneScales scales;
  i8x64 signs;                                 // [block] byte j: the signs of values 8j .. 8j + 7; not of IQ1
  alignas(64) uint16_t index[128];             // numbers of the grid entries, where the file does not have them as bytes
};
// index[k] = low[k] | high[k] << 8, 64 of them.
DS4_INLINE void join_bytes(i8x64 low, i8x64 high, uint16_t* index) {
  i8x64 a, b;
  zip8(low, high, &a, &b);
  store8(index, a);
  store8(index + 32, b);
}

DS4_INLINE void read_grid(const BlockIQ2_XXS* a, const BlockIQ2_XXS* b, GridGroup& g) {
  const i32x16 v = odd_words(a->g, b->g);
  g.signs = sign_bytes(v);
  g.scales.d = mul(d_pair(a, b), top_scale(v, 0.125f));
}
DS4_INLINE void read_grid(const BlockIQ2_XS* a, const BlockIQ2_XS* b, GridGroup& g) {
  store_i32(g.index, and_bits(load_i32(a->q), 0x01ff01ff));
  store_i32(g.index + 32, and_bits(load_i32(b->q), 0x01ff01ff));
  g.signs = with_parity(top_sevens(a->q, b->q));
  g.scales.d = mul(d_pair(a, b), set1(0.125f));
  odd_scales<4>(load_u8(a->s, b->s), g.scales);
}
DS4_INLINE void read_grid(const BlockIQ2_S* a, const BlockIQ2_S* b, GridGroup& g) {
  join_bytes(load8(a->q, b->q), as_bytes(spread2(load_u8(a->h, b->h))), g.index);
  g.signs = load8(a->sg, b->sg);
  g.scales.d = mul(d_pair(a, b), set1(0.125f));
  odd_scales<4>(load_u8(a->s, b->s), g.scales);
}
DS4_INLINE void read_grid(const BlockIQ3_XXS* a, const BlockIQ3_XXS* b, GridGroup& g) {
  const i32x16 v = load_i32(a->a, b->a);
  g.signs = sign_bytes(v);
  g.scales.d = mul(d_pair(a, b), top_scale(v, 0.25f));
}
DS4_INLINE f32x16 iq3_s_scales(const BlockIQ3_S* a, const BlockIQ3_S* b) {
  const uint64_t s[2] = {spread4(load_le<uint32_t>(a->s)), spread4(load_le<uint32_t>(b->s))};
  return to_f32(or_(shl<1>(load_u8(&s[0], &s[1])), set1_i32(1)));
}
DS4_INLINE void read_grid(const BlockIQ3_S* a, const BlockIQ3_S* b, GridGroup& g) {
  join_bytes(load8(a->q), add_where(set1_8(0), load_le<uint64_t>(a->h), 1), g.index);
  join_bytes(load8(b->q), add_where(set1_8(0), load_le<uint64_t>(b->h), 1), g.index + 64);
  g.signs = load8(a->sg, b->sg);
  g.scales.d = mul(d_pair(a, b), iq3_s_scales(a, b));
}
DS4_INLINE void read_grid(const BlockIQ1_S* a, const BlockIQ1_S* b, GridGroup& g) {
  const i32x16 h = load_i16(a->h, b->h);                           // of each 32: 4 x 3 bits of numbers, scale, sign of the shift
  join_bytes(load8(a->q, b->q), as_bytes(or_(spread3(h), and_bits(sar<31>(h), 0x08080808))), g.index);
  g.scales.d = mul(mul(d_pair(a, b), set1(0.125f)), to_f32(or_(and_bits(shr<11>(h), 14), set1_i32(1))));
}
DS4_INLINE uint16_t iq1_m_d(const BlockIQ1_M* b) {                 // the product moves nibble k from bit 16k to bit 48 + 4k
  return uint16_t((load_le<uint64_t>(b->s) >> 12 & 0x000f000f000f000fu) * 0x0001001001001000u >> 48);
}
DS4_INLINE uint64_t iq1_m_scales(const BlockIQ1_M* b) {            // a byte of two scales for each 32
  const uint64_t s = load_le<uint64_t>(b->s), m = 0x003f003f003f003fu;
  return (s & m) | (s << 2 & m << 8);
}
DS4_INLINE void read_grid(const BlockIQ1_M* a, const BlockIQ1_M* b, GridGroup& g) {
  join_bytes(load8(a->q, b->q), nibble_pairs(a->h, b->h), g.index);      // of each 8: 3 bits of the number, sign of the shift
  const uint64_t s[2] = {iq1_m_scales(a), iq1_m_scales(b)};
  g.scales.d = mul(half_pair(iq1_m_d(a), iq1_m_d(b)), set1(0.125f));
  odd_scales<3>(load_u8(&s[0], &s[1]), g.scales);
}

// A type's grid, offset and kind as in Format; kStep numbers lie between those of a block of 32 and the next.
template <class Block> struct GridType { static constexpr bool kGrid = false, kScaled = false; };
template <const auto& kTable, int kOff, int kNumbers, bool kTwoScales>
struct GridTraits {
  static constexpr auto& table = kTable;
  static constexpr int kOffset = kOff, kStep = kNumbers;
  static constexpr bool kGrid = true, kScaled = kTwoScales, kSigns = kOff != 9;   // IQ1 has a shift, in its numbers
};
template <> struct GridType<BlockIQ2_XXS> : GridTraits<kGrid2xxs, 64, 8, false> {};
template <> struct GridType<BlockIQ2_XS> : GridTraits<kGrid2xs, 64, 4, true> {};
template <> struct GridType<BlockIQ2_S> : GridTraits<kGrid2s, 64, 4, true> {};
template <> struct GridType<BlockIQ3_XXS> : GridTraits<kGrid3xxs, 64, 8, false> {};
template <> struct GridType<BlockIQ3_S> : GridTraits<kGrid3s, 16, 8, false> {};
template <> struct GridType<BlockIQ1_S> : GridTraits<kGrid1, 9, 4, false> {};
template <> struct GridType<BlockIQ1_M> : GridTraits<kGrid1, 9, 4, true> {};
// The numbers of b, the first or second 256 values (h).
DS4_INLINE const uint8_t* grid_index(const BlockIQ2_XXS* b, const GridGroup&, size_t) { return b->g[0].q; }
DS4_INLINE const uint8_t* grid_index(const BlockIQ3_XXS* b, const GridGroup&, size_t) { return b->q; }
template <class Block> DS4_INLINE const uint16_t* grid_index(const Block*, const GridGroup& g, size_t h) { return g.index + 8 * GridType<Block>::kStep * h; }

// 64 values from the numbers at a; those of the second 32 at b.
template <class I> DS4_INLINE i8x64 grid_values(const uint64_t* grid, const I* a, const I* b) { return grid8(grid, a, b); }
template <class I> DS4_INLINE i8x64 grid_values(const uint32_t* grid, const I* a, const I*) { return grid4(grid, a); }
template <class Block>
static void unpack_grid(const uint8_t* p, size_t n, Group& g) {
  using T = GridType<Block>;
  const Block* b = reinterpret_cast<const Block*>(p);
  GridGroup r;
  read_grid(b, b + n - 1, r);
  if constexpr (T::kSigns) store8(g.s, r.signs);
  for (size_t i = 0; i < n; i++) {
    const auto* at = grid_index(b + i, r, i);
    for (size_t j = 0; j < 4; j++, at += 2 * T::kStep) {
      const uint8_t* signs = g.s + 32 * i + 8 * j;
      const i8x64 v = grid_values(T::table.data(), at, at + T::kStep);
      store8(g.q + 256 * i + 64 * j, T::kSigns ? reflect_where(v, signs, 2 * T::kOffset) : v);
    }
  }
  store(g.d, r.scales.d);
  if constexpr (T::kScaled) store(g.e0, r.scales.e0), store(g.e1, r.scales.e1);
}

struct Format {
  void (*unpack)(const uint8_t* p, size_t n, Group& g);
  Kind kind;
  int offset;
};
template <class Block> constexpr Format grid_format() { return {unpack_grid<Block>, GridType<Block>::kScaled ? Kind::kScaled : Kind::kPlain, GridType<Block>::kOffset}; }
constexpr Kind kInt8 = kBias == 0 ? Kind::kSigned : Kind::kPlain;        // the file's weights are int8
static Format format_of(Type type) {
  switch (type) {
    case Type::Q8_0: return {unpack_q8_0, kInt8, kBias};
    case Type::Q4_0: return {unpack_nibbles<BlockQ4_0>, Kind::kPlain, 8};
    case Type::Q4_1: return {unpack_nibbles<BlockQ4_1>, Kind::kMin, 0};
    case Type::Q5_0: return {unpack_nibbles<BlockQ5_0>, Kind::kPlain, 16};
    case Type::Q5_1: return {unpack_nibbles<BlockQ5_1>, Kind::kMin, 0};
    case Type::MXFP4: return {unpack_nibbles<BlockMXFP4>, Kind::kPlain, 12};
    case Type::IQ4_NL: return {unpack_nibbles<BlockIQ4_NL>, kInt8, kBias};
    case Type::IQ4_XS: return {unpack_iq4_xs, kInt8, kBias};
    case Type::Q2_K: return {unpack_q2_k, Kind::kMin16, 0};
    case Type::Q3_K: return {unpack_q3_k, Kind::kScaled, 4};
    case Type::Q4_K: return {unpack_q4_k<BlockQ4_K>, Kind::kMin, 0};
    case Type::Q5_K: return {unpack_q4_k<BlockQ5_K>, Kind::kMin, 0};
    case Type::Q6_K: return {unpack_q6_k, Kind::kScaled, 32};
    case Type::TQ1_0: return {unpack_tq1_0, Kind::kPlain, 1};
    case Type::TQ2_0: return {unpack_tq2_0, Kind::kPlain, 1};
    case Type::IQ1_S: return grid_format<BlockIQ1_S>();
    case Type::IQ1_M: return grid_format<BlockIQ1_M>();
    case Type::IQ2_XXS: return grid_format<BlockIQ2_XXS>();
    case Type::IQ2_XS: return grid_format<BlockIQ2_XS>();
    case Type::IQ2_S: return grid_format<BlockIQ2_S>();
    case Type::IQ3_XXS: return grid_format<BlockIQ3_XXS>();
    case Type::IQ3_S: return grid_format<BlockIQ3_S>();
    default: return {};                        // not a quantised type
  }
}

// A row of a quantised matrix as groups of 512 values; the last may be shorter.
struct RowReader {
  Format format;
  size_t block_elems, block_bytes, cols;
  RowReader(Type type, size_t n) : format(format_of(type)), block_elems(type_info(type).block_elems), block_bytes(type_info(type).block_bytes), cols(n) {}
  size_t groups() const { return (cols + 511) / 512; }
  size_t elems(size_t g) const { return std::min<size_t>(512, cols - 512 * g); }
  size_t group_bytes() const { return 512 / block_elems * block_bytes; }
  DS4_INLINE void unpack(const uint8_t* row, size_t g, Group& out) const { format.unpack(row + g * group_bytes(), elems(g) / block_elems, out); }
};

// -- dequantise, quantise ----

static void dequantize(Type type, const void* row, float* y, size_t n) noexcept {
  const uint16_t* h = static_cast<const uint16_t*>(row);
  if (type == Type::F32) { std::memcpy(y, row, 4 * n); return; }
  if (type == Type::F16 || type == Type::BF16) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, type == Type::F16 ? load_f16(h + i) : load_bf16(h + i));
    for (; i < n; i++) y[i] = type == Type::F16 ? f16_to_f32(h[i]) : bf16_to_f32(h[i]);
    return;
  }
  const RowReader reader(type, n);
  const Kind kind = reader.format.kind;
  const f32x16 offset = set1(float(reader.format.offset));
  Group g = {};
  for (size_t i = 0; i < n; i += 16) {
    if (i % 512 == 0) reader.unpack(static_cast<const uint8_t*>(row), i / 512, g);
    const size_t k = i % 512, b = k / 32;
    const float* e = k % 32 == 0 ? g.e0 : g.e1;
    const float scale = kind == Kind::kScaled ? g.d[b] * e[b] : g.d[b];
    f32x16 v = mul(sub(bytes_to_f32(g.q + k), offset), set1(scale));
    if (kind == Kind::kMin) v = sub(v, set1(g.e0[b]));
    if (kind == Kind::kMin16) v = sub(v, set1(e[b]));
    store(y + i, v);
  }
}

// Below 2^-126 the scale has no finite inverse: such blocks become zero. A block with a NaN or an infinity becomes NaN.
static void quantize(const float* x, void* act, size_t n) noexcept {
  const size_t n_pad = size_t(align_up(n, 512));
  const ActRow row = act_row(act, n);
  for (size_t i = 0; i < n_pad; i += 32) {
    f32x16 a[2];
    for (size_t j = 0, k = i; j < 2; j++, k += 16) a[j] = k < n ? load_upto(x + k, n - k) : zero();
    const float amax = reduce_max(max(abs(a[0]), abs(a[1]))), scale = amax / 127.0f;
    const bool normal = scale >= 0x1p-126f;
    const f32x16 inverse = set1(normal ? 127.0f / amax : 0.0f);
    float sum[2];
    for (size_t j = 0; j < 2; j++) {
      a[j] = nearest(mul(a[j], inverse));
      store_i8(row.q + i + 16 * j, min(max(a[j], set1(-127.0f)), set1(127.0f)));
      sum[j] = reduce_add(a[j]);
    }
    const size_t b = i / 32;
    const bool number = sum[0] - sum[1] == sum[0] - sum[1];
    const float d = !number ? NAN : normal ? scale : 0.0f;
    if (!number) sum[0] = sum[1] = 0;
    row.d[b] = d;
    row.md_lo[b] = -(d * sum[0]);
    row.md_hi[b] = -(d * sum[1]);
    row.md[b] = -(d * (sum[0] + sum[1]));
    row.c_lo[b] = -128 * int32_t(sum[0]);
    row.c_hi[b] = -128 * int32_t(sum[1]);
    row.c[b] = row.c_lo[b] + row.c_hi[b];
#if DS4_PASS >= 2
    const size_t lane = b / 16 * 512 + lane_of(b % 16) * kPiece;
    for (size_t t = 0; t < 32 / kPiece; t++) std::memcpy(row.qt + lane + 16 * kPiece * t, row.q + i + kPiece * t, kPiece);
#endif
#if DS4_PASS == 3
    const __m256i order = _mm256_setr_epi32(0x18100800, 0x19110901, 0x1a120a02, 0x1b130b03, 0x1c140c04, 0x1d150d05, 0x1e160e06, 0x1f170f07);
    int8_t* qe = row.qe + i;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(qe), _mm256_permutexvar_epi8(order, load256(row.q + i)));
    for (size_t t = 0; t < 8; t++) std::memcpy(row.qet + lane + 64 * t, qe + 4 * t, 4);
#endif
  }
}

// -- int8 matrix product, few tokens: a row at a time, 16 blocks in lanes ----

// acc + group g of the row . activations; b: the group's first block of 32.
template <Kind kind>
DS4_INLINE f32x16 add_group(f32x16 acc, const Group& g, int offset, const ActRow& x, size_t b) {
  f32x16 sum;
  if constexpr (kind == Kind::kScaled) {
    i32x16 lo, hi;
    dot_halves<false>(g.q, x.q + 32 * b, &lo, &hi);
    const i32x16 off = set1_i32(offset);
    lo = add(lo, mul(sar<7>(load_i32(x.c_lo + b)), off));
    hi = add(hi, mul(sar<7>(load_i32(x.c_hi + b)), off));
    sum = fma(to_f32(lo), load(g.e0), mul(to_f32(hi), load(g.e1)));          // integers below 2^24: exact
  } else {
    i32x16 s = dot_blocks<kind == Kind::kSigned>(g.q, x.q + 32 * b);
    if constexpr (kind == Kind::kPlain) s = add(s, mul(sar<7>(load_i32(x.c + b)), set1_i32(offset)));
    sum = to_f32(s);
  }
  acc = fma(sum, mul(load(g.d), load(x.d + b)), acc);
  if constexpr (kind == Kind::kMin) acc = fma(load(g.e0), load(x.md + b), acc);
  if constexpr (kind == Kind::kMin16) acc = fma(load(g.e1), load(x.md_hi + b), fma(load(g.e0), load(x.md_lo + b), acc));
  return acc;
}

// The lanes from n on keep their old value: blocks that do not exist leave no trace, not even in the sign of a zero.
DS4_INLINE f32x16 first_of(f32x16 a, size_t n, f32x16 old) {
  if (n >= 16) return a;
  alignas(64) float t[16];
  store(t, old);
  store_partial(t, n, a);
  return load(t);
}

// Up to so many tokens a row at a time, beyond it tiles. Measured in Gweights/s, rows / tiles (Zen 4, 4096 columns, weights in L2):
//   tokens   AVX-512: 2           3            4            6            8      AVX2: 2            4           6           8
//   Q8_0     24.9 / 11.2  19.3 / 10.5  15.5 / 12.2  10.3 / 10.5   7.7 /  9.5  17.2 / 7.7  10.5 / 6.9   7.3 / 5.4   5.6 / 4.8
//   MXFP4    32.6 / 12.4  26.6 / 11.6  22.9 / 11.2  15.7 /  9.7  10.6 /  8.9  21.9 / 9.8  14.1 / 7.1  10.0 / 6.0   7.8 / 5.3
//   IQ4_XS   33.9 / 14.1  27.8 / 10.3  23.8 / 12.5  16.4 / 10.7  10.5 /  9.8  16.4 / 9.1  10.2 / 6.8   7.5 / 5.3   5.9 / 4.7
//   IQ2_XXS  37.4 / 24.7  30.0 / 21.7  23.5 / 20.0  15.9 / 15.7  10.2 / 13.8  11.0 / 8.0   7.7 / 6.1   6.0 / 5.3   4.8 / 4.7
//   IQ2_XS   24.4 /  9.0  19.7 /  8.6  16.6 /  8.1  11.3 /  7.3   8.4 /  6.7  10.3 / 7.4   7.0 / 5.7   5.4 / 4.7   4.3 / 4.3
//   IQ3_XXS  34.4 /  8.5  28.1 /  8.1  23.3 /  7.9  15.1 /  7.1  10.1 /  6.7   8.7 / 7.2   6.6 / 5.6   5.2 / 4.9   4.3 / 4.4
//   IQ1_S    17.2 /  8.5  14.5 /  8.4  12.0 /  8.0   8.5 /  7.2   7.0 /  6.7  12.7 / 7.7   8.3 / 5.8   6.5 / 5.2   5.1 / 4.5
//   Q2_K     41.0 / 15.6  30.5 / 14.1  24.4 / 13.4  16.4 / 11.0  10.1 /  9.8  20.7 / 9.8  12.1 / 7.3   8.2 / 5.9   6.2 / 5.2
//   Q4_K     33.8 / 14.1  28.1 / 13.2  24.1 / 12.5  16.8 / 10.6  11.0 /  9.6  20.1 / 10.9 13.1 / 8.0   9.7 / 6.5   7.7 / 5.7
// NEON and scalar are not measured.
constexpr size_t kMaxRowTokens = 8;
static size_t row_tokens(Type type) {
  if (DS4_PASS < 2) return 4;
  if (DS4_PASS == 2) return 8;
  switch (type) {
    case Type::Q8_0: return 4;
    case Type::IQ2_XXS: return 6;
    case Type::Q3_K: case Type::Q5_1: case Type::Q6_K: case Type::TQ2_0: return 3;
    default: return 8;
  }
}

// Asks for what kN places, `gap` bytes apart, are going to read: into L2, whose many open requests keep the memory busy, then
// into L1; each line once, the places in turn, so that none waits for another; nothing where g_one_stream. Behind a place's end
// lies the next place, which has been read. Asked for instead is where the places of the next call begin, if it takes as many rows right behind these:
// LAYER cuts equal chunks, THREADS gives a thread neighbouring ones. Q8_0, 256 kB of rows a call, times as long as plain
// reading: 1.02; into L1 only 1.08; 512 bytes less or more ahead 1.04; a kB less 1.04, that without regard to the next call 1.09.
template <int kN>
class Ahead {
 public:
  DS4_INLINE Ahead(const uint8_t* first, size_t gap) : first_(first), gap_(gap), done_(g_one_stream ? SIZE_MAX : 0) {}
  // For what lies ahead of the first `end` bytes of each place.
  DS4_INLINE void ask(size_t end) {
    for (; done_ < end; done_ += 64) {
      const uint8_t *far = line(2560), *near = line(1792);
      DS4_UNROLL
      for (int k = 0; k < kN; k++) {
        __builtin_prefetch(far + size_t(k) * gap_, 0, 2);
        __builtin_prefetch(near + size_t(k) * gap_, 0, 3);
      }
    }
  }

 private:
  // Of the first place; past its end, of where the next call's first place begins.
  DS4_INLINE const uint8_t* line(size_t distance) const {
    const size_t at = done_ + distance;
    return first_ + at + (at < gap_ ? 0 : (kN - 1) * gap_);
  }
  const uint8_t* first_;
  size_t gap_, done_;
};

// Rows r0 to r1 of w times n tokens; add(row, i, acc) adds group i of a row to acc[token], n_groups whole ones, and add_last a
// shorter one behind them, if there is one. One token reads four places at once, unless g_one_stream, a quarter of the rows
// each, which keeps more requests open: two places take 9 % longer, eight 1 % less; neighbouring rows as places gain nothing.
constexpr int kPlaces = 4;
template <bool kMayBeOne, class Add, class AddLast>
DS4_INLINE void for_rows(const Matrix& w, size_t r0, size_t r1, size_t n_groups, bool has_last, size_t group_bytes, size_t n, float* const* out, const Add& add,
                         const AddLast& add_last) {
  const size_t quarter = kMayBeOne && n == 1 && !g_one_stream ? (r1 - r0) / kPlaces : 0, gap = quarter * w.stride, rest = r0 + kPlaces * quarter;
  if (quarter > 0) {
    Ahead<kPlaces> ahead(w.data + r0 * w.stride, gap);
    for (size_t r = r0; r < r0 + quarter; r++) {
      f32x16 acc[kPlaces];
      DS4_UNROLL
      for (int k = 0; k < kPlaces; k++) acc[k] = zero();
      const uint8_t* row = w.data + r * w.stride;
      for (size_t i = 0; i < n_groups; i++) {
        const size_t at = (r - r0) * w.stride + i * group_bytes;
        DS4_UNROLL
        for (int k = 0; k < kPlaces; k++) {
          ahead.ask(at + size_t(k + 1) * group_bytes / kPlaces);
          add(row + size_t(k) * gap, i, acc + k);
        }
      }
      for (int k = 0; has_last && k < kPlaces; k++) add_last(row + size_t(k) * gap, n_groups, acc + k);
      DS4_UNROLL
      for (int k = 0; k < kPlaces; k++) out[0][r + size_t(k) * quarter] = reduce_add(acc[k]);
    }
  }
  if (rest == r1) return;
  Ahead<1> ahead(w.data + rest * w.stride, 0);
  for (size_t r = rest; r < r1; r++) {
    const uint8_t* row = w.data + r * w.stride;
    f32x16 acc[kMaxRowTokens];
    for (size_t t = 0; t < n; t++) acc[t] = zero();
    for (size_t i = 0; i < n_groups; i++) {
      ahead.ask((r - rest) * w.stride + (i + 1) * group_bytes);
      add(row, i, acc);
    }
    if (has_last) add_last(row, n_groups, acc);
    for (size_t t = 0; t < n; t++) out[t][r] = reduce_add(acc[t]);
  }
}

template <Kind kind>
static void matmul_rows(const Matrix& w, size_t r0, size_t r1, const void* const* x, float* const* out, size_t n) {
  const RowReader reader(w.type, w.cols);
  Group g = {};
  const auto add_whole = [&](const uint8_t* row, size_t i, f32x16* acc) __attribute__((always_inline)) {
    reader.unpack(row, i, g);
    for (size_t t = 0; t < n; t++)
      acc[t] = first_of(add_group<kind>(acc[t], g, reader.format.offset, act_row(x[t], w.cols), 16 * i), reader.elems(i) / 32, acc[t]);
  };
  for_rows<true>(w, r0, r1, reader.groups(), false, reader.group_bytes(), n, out, add_whole, add_whole);
}

// Q8_0 straight from the file.
template <bool kOne>
static void matmul_rows_q8_0(const Matrix& w, size_t r0, size_t r1, const void* const* x, float* const* out, size_t n_tokens) {
  const size_t n = kOne ? 1 : n_tokens;        // known when compiled
  const RowReader reader(w.type, w.cols);
  const auto add_whole = [&](const uint8_t* row, size_t i, f32x16* acc) __attribute__((always_inline)) {
    const uint8_t* p = row + i * (16 * sizeof(BlockQ8_0));
    const f32x16 d = d_lanes(reinterpret_cast<const BlockQ8_0*>(p), 16);
    for (size_t t = 0; t < n; t++) {
      const ActRow a = act_row(x[t], w.cols);
      i32x16 s = dot_blocks<true, sizeof(BlockQ8_0)>(p + 2, a.q + 512 * i);
      if constexpr (kBias != 0) s = add(s, load_i32(a.c + 16 * i));
      acc[t] = fma(to_f32(s), mul(d, load(a.d + 16 * i)), acc[t]);
    }
  };
  const auto add_last = [&](const uint8_t* row, size_t i, f32x16* acc) {
    Group g = {};
    reader.unpack(row, i, g);
    for (size_t t = 0; t < n; t++) acc[t] = first_of(add_group<kInt8>(acc[t], g, kBias, act_row(x[t], w.cols), 16 * i), reader.elems(i) / 32, acc[t]);
  };
  for_rows<kOne>(w, r0, r1, w.cols / 512, w.cols % 512 != 0, reader.group_bytes(), n, out, add_whole, add_last);
}

#if DS4_PASS >= 2
// -- few tokens, AVX2 and AVX-512: the 16 blocks of two 256-blocks side by side, straight from the file ----
// Word t of lane l is values 4t .. 4t + 3 of block l (IQ2, IQ3 on AVX-512: t, 8 + t, 16 + t, 24 + t), on AVX2 quad word t values
// 8t .. 8t + 7 of the block of that lane: products need no sum across lanes, or one of neighbours at the end. The numbers are
// those of the Group form, so the results are too.

// Eight blocks of 32, to have 256 values like other types.
template <class B> struct Eight { B b[8]; };
template <class B> DS4_INLINE const uint8_t* nibbles_of(const Eight<B>& a, size_t k) { return a.b[k].q; }
DS4_INLINE const uint8_t* nibbles_of(const BlockIQ4_XS& a, size_t k) { return a.q + 16 * k; }
// As in Format, and whether there is a minimum for 32 values.
template <class Block> constexpr int kLaneOffset = 0;
template <> constexpr int kLaneOffset<BlockTQ1_0> = 1;
template <> constexpr int kLaneOffset<Eight<BlockQ4_0>> = 8;
template <> constexpr int kLaneOffset<Eight<BlockQ5_0>> = 16;
template <> constexpr int kLaneOffset<Eight<BlockMXFP4>> = 12;
template <> constexpr int kLaneOffset<Eight<BlockIQ4_NL>> = kBias;
template <> constexpr int kLaneOffset<BlockIQ4_XS> = kBias;
template <class Block, class... Others> constexpr bool kIsOneOf = (std::is_same_v<Block, Others> || ...);
template <class Block> constexpr bool kHasMin = kIsOneOf<Block, BlockQ4_K, BlockQ5_K, Eight<BlockQ4_1>>;
template <class Block> constexpr bool kIsIq4 = kIsOneOf<Block, BlockIQ4_XS, Eight<BlockIQ4_NL>>;

DS4_INLINE void load_scales(const BlockTQ1_0* a, const BlockTQ1_0* b, LaneScales& g) { g.d = d_pair(a, b); }
DS4_INLINE void load_scales(const BlockIQ4_XS* a, const BlockIQ4_XS* b, LaneScales& g) {
  const uint64_t s[2] = {iq4_xs_scales(a), iq4_xs_scales(b)};
  g.d = mul(d_pair(a, b), to_f32(sub(load_u8(&s[0], &s[1]), set1_i32(32))));
}
DS4_INLINE __m256i fifth_words(const Eight<BlockQ5_0>& a) {
  const auto h = [&](size_t k) __attribute__((always_inline)) { return load_le<int32_t>(a.b[k].h); };
  return _mm256_setr_epi32(h(0), h(1), h(2), h(3), h(4), h(5), h(6), h(7));
}
template <class B>
DS4_INLINE void load_scales(const Eight<B>* a, const Eight<B>* b, LaneScales& g) {
  if constexpr (std::is_same_v<B, BlockMXFP4>) {
    alignas(16) uint8_t e[16];
    for (size_t k = 0; k < 8; k++) e[k] = a->b[k].e, e[8 + k] = b->b[k].e;
    g.d = fp4_scales(e);
  } else {
    g.d = load_f16(&a->b[0].d, &b->b[0].d, sizeof(B));
  }
  if constexpr (kHasMin<Eight<B>>) g.m0 = neg(load_f16(&a->b[0].m, &b->b[0].m, sizeof(B)));
}
DS4_INLINE void load_scales(const BlockQ2_K* a, const BlockQ2_K* b, LaneScales& g) {
  const i32x16 s = load_u8_words(a->s, b->s);
  f32x16 m;
  dm_pairs(a, b, &g.d, &m);
  g.e = and_bits(s, 0x000f000f);
  g.m0 = mul(m, nibble_f32(shr<4>(s)));
  g.m1 = mul(m, nibble_f32(shr<20>(s)));
}
template <class Block>                         // Q4_K and Q5_K
DS4_INLINE void load_q4_scales(const Block* a, const Block* b, LaneScales& g) {
  uint8_t s[32];
  q4_scales(a->s, s);
  q4_scales(b->s, s + 8);
  f32x16 d, m;
  dm_pairs(a, b, &d, &m);
  g.d = mul(d, to_f32(load_u8(s, s + 8)));
  g.m0 = mul(m, to_f32(load_u8(s + 16, s + 24)));
}
DS4_INLINE void load_scales(const BlockQ4_K* a, const BlockQ4_K* b, LaneScales& g) { load_q4_scales(a, b, g); }
DS4_INLINE void load_scales(const BlockQ5_K* a, const BlockQ5_K* b, LaneScales& g) { load_q4_scales(a, b, g); }
// acc + what the sums over values 0-15 and 16-31 of the 16 blocks from b on are worth. Q2_K: both are below 2^13 and come as
// the signed words of lo.
template <class Block>
DS4_INLINE f32x16 add_sums(f32x16 acc, i32x16 lo, i32x16 hi, const LaneScales& g, const ActRow& x, size_t b) {
  if constexpr (std::is_same_v<Block, BlockQ2_K>) {
    acc = fma(to_f32(dot_words(lo, g.e)), mul(g.d, load(x.d + b)), acc);
    return fma(g.m1, load(x.md_hi + b), fma(g.m0, load(x.md_lo + b), acc));
  } else if constexpr (GridType<Block>::kScaled) {
    return fma(fma(to_f32(lo), g.e0, mul(to_f32(hi), g.e1)), mul(g.d, load(x.d + b)), acc);
  } else {
    acc = fma(to_f32(add(lo, hi)), mul(g.d, load(x.d + b)), acc);
    return kHasMin<Block> ? fma(g.m0, load(x.md + b), acc) : acc;
  }
}

// Values 8i .. 8i + 7 of the sixteen blocks whose numbers begin at a and b.
template <int kStep, class I> DS4_INLINE void grid_pieces(const uint64_t* grid, const I* a, const I* b, size_t i, i8x64* w) {
  auto entries = [&](const I* p, size_t k0, size_t k1, size_t k2, size_t k3) {
    const I index[4] = {p[kStep * k0 + i], p[kStep * k1 + i], p[kStep * k2 + i], p[kStep * k3 + i]};
    return grid8_half(grid, index);
  };
  pieces(join(entries(a, 0, 1, 4, 5), entries(b, 0, 1, 4, 5)), join(entries(a, 2, 3, 6, 7), entries(b, 2, 3, 6, 7)), w);
}
#if DS4_PASS == 2
template <int kStep, class I> DS4_INLINE void grid_pieces(const uint32_t* grid, const I* a, const I* b, size_t i, i8x64* w) {
  auto entries = [&](const I* p) {                                 // blocks 0, 1, 4, 5 from p on
    const I index[8] = {p[0], p[1], p[kStep], p[kStep + 1], p[4 * kStep], p[4 * kStep + 1], p[5 * kStep], p[5 * kStep + 1]};
    return grid4_half(grid, index);
  };
  w[0] = join(entries(a + 2 * i), entries(a + 2 * i + 2 * kStep)), w[1] = join(entries(b + 2 * i), entries(b + 2 * i + 2 * kStep));
}
#endif
// A grid as dot_lanes wants it: without the offset, where there are signs.
template <class T, size_t n> constexpr std::array<T, n> minus_each(std::array<T, n> a, uint8_t v) {
  for (T& entry : a) entry -= T(0x0101010101010101) * v;
  return a;
}
template <class T> alignas(64) constexpr auto kPlainGrid = minus_each(T::table, T::kOffset);
template <class T> DS4_INLINE auto row_grid() {
  if constexpr (T::kSigns) return kPlainGrid<T>.data();
  else return T::table.data();
}

// Else GCC works out the address of every load on its own and keeps them all in memory.
DS4_INLINE const int8_t* one_base(const int8_t* p) { asm("" : "+r"(p)); return p; }

// acc[t] += the 16 blocks of a and b, read into g, times the activations of token t from block `at` on, for n tokens; for more
// than one the weights are put together first.
template <class Block, bool kOne>
DS4_INLINE void add_grid(const Block* a, const Block* b, const GridGroup& g, const void* const* x, size_t cols, size_t at, size_t n, f32x16* acc) {
  using T = GridType<Block>;
  constexpr size_t kParts = kOne ? 1 : 4;
  const auto *ia = grid_index(a, g, 0), *ib = grid_index(b, g, 1);
  i8x64 w[kParts][2];
#if DS4_PASS == 2
  LaneSigns signs[kParts];
#endif
  const auto put_together = [&](size_t i) __attribute__((always_inline)) {
    grid_pieces<T::kStep>(row_grid<T>(), ia, ib, i, w[i % kParts]);
#if DS4_PASS == 2
    if constexpr (T::kSigns) signs[i % kParts] = lane_signs(g.signs, int(i));
#endif
  };
  DS4_UNROLL
  for (size_t i = 0; i < 4; i++) if (!kOne) put_together(i);
  for (size_t t = 0; t < n; t++) {
    const ActRow row = act_row(x[t], cols);
    const int8_t* q = one_base(row.qt + 32 * at);
    LaneSum sums[2] = {no_sum(), no_sum()};
    DS4_UNROLL
    for (size_t i = 0; i < 4; i++) {
      if (kOne) put_together(i);
#if DS4_PASS == 2
      if constexpr (T::kSigns) sums[i / 2] = dot_lanes(sums[i / 2], w[i % kParts], signs[i % kParts], q + 128 * i);
      else
#endif
      sums[i / 2] = dot_lanes(sums[i / 2], w[i % kParts], q + 128 * i);
    }
    i32x16 lo, hi;
    finish<T::kScaled, T::kOffset <= 16>(sums[0], sums[1], &lo, &hi);
    if constexpr (!T::kSigns) {
      const i32x16 offset = set1_i32(T::kOffset);
      lo = add(lo, mul(sar<7>(load_i32((T::kScaled ? row.c_lo : row.c) + at)), offset));
      if constexpr (T::kScaled) hi = add(hi, mul(sar<7>(load_i32(row.c_hi + at)), offset));
    }
    const f32x16 sum = add_sums<Block>(acc[t], lo, hi, g.scales, row, at);
    acc[t] = a != b ? sum : first_of(sum, 8, acc[t]);
  }
}
// One place at a time: bound by arithmetic. Where numbers are put together they are first written down for several groups: lookups
// that wait for theirs fill the CPU's scheduler, and nothing behind them starts.
template <class Block, bool kOne>
static void matmul_rows_grid(const Matrix& w, size_t r0, size_t r1, const void* const* x, float* const* out, size_t n_tokens) {
  constexpr size_t kBatch = std::is_same_v<Block, BlockIQ2_XXS> || std::is_same_v<Block, BlockIQ3_XXS> ? 1 : 4;
  const size_t n = kOne ? 1 : n_tokens;
  const size_t n_blocks = w.cols / 256;
  Ahead<1> ahead(w.data + r0 * w.stride, 0);
  for (size_t r = r0; r < r1; r++) {
    const Block* row = reinterpret_cast<const Block*>(w.data + r * w.stride);
    f32x16 acc[kMaxRowTokens];
    for (size_t t = 0; t < n; t++) acc[t] = zero();
    for (size_t i0 = 0; i0 < n_blocks; i0 += 2 * kBatch) {
      GridGroup g[kBatch];
      for (size_t k = 0, i = i0; k < kBatch && i < n_blocks; k++, i += 2) {
        ahead.ask((r - r0) * w.stride + (i + 2) * sizeof(Block));
        read_grid(row + i, row + i + (i + 1 < n_blocks), g[k]);
      }
      for (size_t k = 0, i = i0; k < kBatch && i < n_blocks; k++, i += 2) add_grid<Block, kOne>(row + i, row + i + (i + 1 < n_blocks), g[k], x, w.cols, 8 * i, n, acc);
    }
    for (size_t t = 0; t < n; t++) out[t][r] = reduce_add(acc[t]);
  }
}
#endif

#if DS4_PASS == 2
// What add_lanes needs. One token's weights are put together when they are used, those of more tokens before, but not those of
// Q2_K, which are quick to put together (2 tokens: 20.4 Gweights/s against 18.1).
template <class Block, bool kOne> constexpr bool kKept = !kOne && !std::is_same_v<Block, BlockQ2_K>;
template <class Block, bool kOne>
struct LaneGroup {
  LaneScales scales;
  const Block* block[2];
  i8x64 kept[4][2];
};
DS4_INLINE __m256i quad_at(const void* p) { return _mm256_set1_epi64x(load_le<int64_t>(p)); }
DS4_INLINE __m256i quads_at(const uint8_t* p, const uint8_t* q) { return _mm256_blend_epi32(quad_at(p), quad_at(q), 0xf0); }
DS4_INLINE __m256i shifted(__m256i a, int even, int odd, char mask) { return _mm256_and_si256(_mm256_srlv_epi64(a, _mm256_set_epi64x(odd, even, odd, even)), _mm256_set1_epi8(mask)); }
// Values 8i .. 8i + 7 of the 8 blocks of 32: of 0 1 4 5 in v[0], of 2 3 6 7 in v[1].
DS4_INLINE i8x64 lane_pieces(const BlockQ2_K& b, int i) {
  const __m256i q = quads_at(b.q + 8 * i, b.q + 32 + 8 * i);
  return {{shifted(q, 0, 2, 3), shifted(q, 4, 6, 3)}};
}
template <class Block>                         // Q4_K and Q5_K
DS4_INLINE i8x64 q4_pieces(const Block& b, int i) {
  return {{shifted(quads_at(b.q + 8 * i, b.q + 64 + 8 * i), 0, 4, 15), shifted(quads_at(b.q + 32 + 8 * i, b.q + 96 + 8 * i), 0, 4, 15)}};
}
DS4_INLINE i8x64 lane_pieces(const BlockQ4_K& b, int i) { return q4_pieces(b, i); }
DS4_INLINE __m256i sixteen_where(__m256i a, __m256i bit) { return _mm256_and_si256(_mm256_set1_epi8(16), _mm256_cmpeq_epi8(_mm256_and_si256(a, bit), bit)); }
DS4_INLINE i8x64 lane_pieces(const BlockQ5_K& b, int i) {
  const __m256i h = quad_at(b.h + 8 * i), bit = _mm256_set_epi64x(0x2020202020202020, 0x1010101010101010, 0x0202020202020202, 0x0101010101010101);
  return add8(q4_pieces(b, i), {{sixteen_where(h, bit), sixteen_where(h, _mm256_slli_epi16(bit, 2))}});
}
// TQ1_0: the powers of 3 for quad words 0 and 1, 2, 3 of the 8 blocks, in lanes.
using QuadPowers = std::array<std::array<uint16_t, 32>, 3>;
constexpr QuadPowers make_quad_powers() {
  QuadPowers t{};
  for (size_t k = 0; k < 3; k++)
    for (size_t block = 0; block < 8; block++)
      for (size_t i = 0; i < 4; i++) {
        const size_t v = 32 * block + 8 * (k == 0 ? 0 : k + 1) + 2 * i;
        t[k][4 * lane_of(block) + i] = kTq1Tables.power[v / 64][v % 64 / 2];
      }
  return t;
}
alignas(64) constexpr QuadPowers kQuadPowers = make_quad_powers();
DS4_INLINE i8x64 lane_pieces(const BlockTQ1_0& b, int i) {
  const __m256i q = quad_at(b.q + 8 * i), c = quad_at(b.q + 32 + 8 * (i % 2));
  __m256i last = _mm256_blend_epi32(q, c, 0xf0);
  if (i >= 2) last = _mm256_blend_epi32(last, _mm256_set1_epi32(load_le<int32_t>(b.h)), 0xc0);
  const uint16_t* power = kQuadPowers[i < 2 ? 0 : size_t(i) - 1].data();
  return {{digit3_half(_mm256_blend_epi32(q, c, 0xc0), load256(power)), digit3_half(last, load256(power + 16))}};
}
// 16 where the bit of a value is set in its block's word of h, for values 8k .. 8k + 7.
DS4_INLINE i8x64 fifth_bits(__m256i h, int k) {
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
  DS4_EACH(i8x64, sixteen_where(byte_in_lanes(h, k + 8 * i), bit));
}
template <class Block>
DS4_INLINE i8x64 nibble_pieces(const Block& b, int i) {
  const auto blocks = [&](size_t k) __attribute__((always_inline)) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(nibbles_of(b, k))), load128(nibbles_of(b, k + 4)), 1);
  };
  const auto quads = [&](size_t k) __attribute__((always_inline)) {
    return i % 2 == 0 ? _mm256_unpacklo_epi64(blocks(k), blocks(k + 1)) : _mm256_unpackhi_epi64(blocks(k), blocks(k + 1));
  };
  const i8x64 v = {{quads(0), quads(2)}};
  return i < 2 ? and8(v, set1_8(15)) : shr8<4>(v, 15);
}
DS4_INLINE i8x64 lane_pieces(const BlockIQ4_XS& b, int i) { return lookup(kIq4Bytes.data(), nibble_pieces(b, i)); }
template <class B>
DS4_INLINE i8x64 lane_pieces(const Eight<B>& b, int i) {
  i8x64 v = nibble_pieces(b, i);
  if constexpr (std::is_same_v<B, BlockQ5_0>) v = add8(v, fifth_bits(fifth_words(b), i));
  if constexpr (std::is_same_v<B, BlockMXFP4>) v = lookup(kFp4Bytes.data(), v);
  if constexpr (std::is_same_v<B, BlockIQ4_NL>) v = lookup(kIq4Bytes.data(), v);
  return v;
}
template <class Block, bool kOne>
DS4_INLINE void load_lanes(const Block* a, const Block* b, LaneGroup<Block, kOne>& g) {
  load_scales(a, b, g.scales);
  g.block[0] = a, g.block[1] = b;
  DS4_UNROLL
  for (int i = 0; i < 4; i++)
    if (kKept<Block, kOne>) g.kept[i][0] = lane_pieces(*a, i), g.kept[i][1] = lane_pieces(*b, i);
}
template <class Block, bool kOne>
DS4_INLINE f32x16 add_lanes(f32x16 acc, const LaneGroup<Block, kOne>& g, const ActRow& x, size_t b) {
  LaneSum sum[2] = {no_sum(), no_sum()};
  const int8_t* q = one_base(x.qt + 32 * b);
  DS4_UNROLL
  for (int i = 0; i < 4; i++) {
    i8x64 w[2];
    DS4_UNROLL
    for (int k = 0; k < 2; k++) w[k] = kKept<Block, kOne> ? g.kept[i][k] : lane_pieces(*g.block[k], i);
    sum[i / 2] = kIsIq4<Block> ? dot_signed_lanes(sum[i / 2], w, q + 128 * i) : dot_lanes(sum[i / 2], w, q + 128 * i);
  }
  i32x16 lo, hi = set1_i32(0);
  if constexpr (kIsIq4<Block>) lo = add(fold_lanes(sum[0]), fold_lanes(sum[1]));
  else finish<std::is_same_v<Block, BlockQ2_K>, true>(sum[0], sum[1], &lo, &hi);
  if constexpr (kLaneOffset<Block> != 0) lo = add(lo, mul(sar<7>(load_i32(x.c + b)), set1_i32(kLaneOffset<Block>)));
  if constexpr (std::is_same_v<Block, BlockQ2_K>) lo = words(lo, hi);
  return add_sums<Block>(acc, lo, hi, g.scales, x, b);
}
#elif DS4_PASS == 3
// Weights plus kLaneOffset, of grid types plus kBias or kScaledBias; of Q2_K and Q4_K times 2^field_shifts.
template <class Block>
struct LaneWeights {
  __m512i w[8];
  LaneScales scales;
};
template <class Block, bool> using LaneGroup = LaneWeights<Block>;

// A grid has few levels, so an entry of eight values is two bytes of 2-bit codes and one of four values two bytes of 3-bit codes:
// its tables lie in registers, or nearly. The byte of an entry stays where its number is, so a lane holds the entries of one
// group of 32 (of four values: the even ones, then the odd ones), and activations lie that way too (qet).
template <size_t kN> struct CodeTables { uint8_t part[2][kN]; };
template <class T, size_t kN>
constexpr CodeTables<kN> make_codes(const std::array<T, kN>& grid, const uint8_t* levels) {
  constexpr size_t kBits = sizeof(T) == 8 ? 2 : 3, kPart = sizeof(T) / 2;
  CodeTables<kN> t{};
  for (size_t e = 0; e < kN; e++)
    for (size_t k = 0; k < sizeof(T); k++) {
      size_t code = 0;
      while (levels[code] != (grid[e] >> 8 * k & 255)) code++;
      t.part[k / kPart][e] = uint8_t(t.part[k / kPart][e] | code << kBits * (k % kPart));
    }
  return t;
}
alignas(64) constexpr CodeTables<256> kCodes2xxs = make_codes(kGrid2xxs, kLevels2), kCodes3xxs = make_codes(kGrid3xxs, kLevels3xxs);
alignas(64) constexpr CodeTables<512> kCodes2xs = make_codes(kGrid2xs, kLevels2), kCodes3s = make_codes(kGrid3s, kLevels3s);
alignas(64) constexpr CodeTables<1024> kCodes2s = make_codes(kGrid2s, kLevels2);

// Bytes of a table for 64 numbers: their lowest bytes, and masks of their bits from 7 on.
template <size_t kN>
DS4_INLINE __m512i lookup_codes(const uint8_t* table, __m512i low, const __mmask64* bits) {
  if constexpr (kN == 128) return _mm512_permutex2var_epi8(load512(table), low, load512(table + 64));
  else return _mm512_mask_mov_epi8(lookup_codes<kN / 2>(table, low, bits), bits[kN == 256 ? 0 : kN == 512 ? 1 : 2], lookup_codes<kN / 2>(table + kN / 2, low, bits));
}

// What a six-bit index of code and signs stands for, plus a bias. 2-bit codes, two values with their signs: codes in bits 0-3 and
// signs in 4-5 for values 0, 1 and 4, 5; codes in 2-5, signs in 0-1 for values 2, 3 and 6, 7, which saves shifting the signs.
// 3-bit codes: value 0 or 2 of a part in bits 0-2, its sign in 3 or 4; value 1 or 3 in bits 3-5, its sign in 0 or 1.
struct ValueTable { uint8_t value[4][64]; };
constexpr ValueTable make_values2(int bias) {
  ValueTable t{};
  for (int i = 0; i < 64; i++)
    for (int k = 0; k < 4; k++) {
      const int code = i >> (k < 2 ? 2 * k : 2 * k - 2) & 3, sign = i >> (k < 2 ? 4 + k : k - 2) & 1;
      const int v = code < 3 ? kLevels2[code] - GridType<BlockIQ2_XXS>::kOffset : 0;
      t.value[k][i] = uint8_t(bias + (sign ? -v : v));
    }
  return t;
}
constexpr ValueTable make_values3(const uint8_t* levels, int offset) {
  ValueTable t{};
  for (int i = 0; i < 64; i++)
    for (int k = 0; k < 4; k++) {
      const int v = levels[k % 2 == 0 ? i & 7 : i >> 3] - offset, sign = i >> (k % 2 == 0 ? 3 + k / 2 : k / 2) & 1;
      t.value[k][i] = uint8_t(kBias + (sign ? -v : v));
    }
  return t;
}
// With two scales for 32 values sums of two products must fit into 16 bits.
constexpr int kScaledBias = 64;
alignas(64) constexpr ValueTable kValues2 = make_values2(kBias), kValues2Scaled = make_values2(kScaledBias);
alignas(64) constexpr ValueTable kValues3xxs = make_values3(kLevels3xxs, GridType<BlockIQ3_XXS>::kOffset);
alignas(64) constexpr ValueTable kValues3s = make_values3(kLevels3s, GridType<BlockIQ3_S>::kOffset);

// w[t] = value t of 64 entries of eight; signs of values 2, 3, 6, 7, 0, 1, 4, 5 from bit 0 on.
DS4_INLINE void values2(const ValueTable& t, const __m512i* code, __m512i signs, __m512i* w) {
  DS4_UNROLL
  for (int h = 0; h < 2; h++) {
    const __m512i sign = h == 0 ? signs : _mm512_srli_epi16(signs, 2);
    const __m512i index[2] = {_mm512_ternarylogic_epi32(code[h], sign, _mm512_set1_epi8(0x0f), 0xe4), _mm512_ternarylogic_epi32(_mm512_srli_epi16(code[h], 2), sign, _mm512_set1_epi8(0x3c), 0xe4)};
    DS4_UNROLL
    for (int k = 0; k < 4; k++) w[4 * h + k] = _mm512_permutexvar_epi8(index[k / 2], load512(t.value[k]));
  }
}
// w[t] = value t of 64 entries of four; signs of values 1, 3, -, 0, 2 from bit 0 on.
DS4_INLINE void values3(const ValueTable& t, const __m512i* code, __m512i signs, __m512i* w) {
  DS4_UNROLL
  for (int k = 0; k < 4; k++) {
    const __m512i index = _mm512_ternarylogic_epi32(code[k / 2], signs, _mm512_set1_epi8(k % 2 == 0 ? 0x07 : 0x38), 0xe4);
    w[k] = _mm512_permutexvar_epi8(index, load512(t.value[k]));
  }
}

// For gf2p8affine: the signs of values 0-7 from bits 0-7 to where values2 wants them, and to where values3 wants those of 0-3 and
// of 4-7. With parity: the eighth sign is that of the other seven. Those of IQ2_XS begin at bit 1.
constexpr int64_t kSigns2 = 0x0408408001021020, kSigns2Parity = 0x0408407f01021020, kSigns2XsParity = 0x081080fe02042040;
constexpr int64_t kSigns3[2] = {0x0208000104000000, 0x2080001040000000}, kSigns3Parity[2] = {0x0208000104000000, 0x207f001040000000};
DS4_INLINE __m512i move_bits(__m512i a, int64_t matrix) { return _mm512_gf2p8affine_epi64_epi8(a, _mm512_set1_epi64(matrix), 0); }

struct ByteIndexes { uint8_t even[64], odd[64], sevens[64]; };     // the bytes of two registers; fields of 7 bits in words of 32
constexpr ByteIndexes make_byte_indexes() {
  ByteIndexes t{};
  for (size_t i = 0; i < 64; i++) t.even[i] = uint8_t(2 * i), t.odd[i] = uint8_t(2 * i + 1), t.sevens[i] = uint8_t(32 * (i / 4 % 2) + 7 * (i % 4));
  return t;
}
alignas(64) constexpr ByteIndexes kByteIndexes = make_byte_indexes();
DS4_INLINE __m512i even_bytes(__m512i a, __m512i b) { return _mm512_permutex2var_epi8(a, load512(kByteIndexes.even), b); }
DS4_INLINE __m512i odd_bytes(__m512i a, __m512i b) { return _mm512_permutex2var_epi8(a, load512(kByteIndexes.odd), b); }
DS4_INLINE __m512i sevens(__m512i words) { return _mm512_multishift_epi64_epi8(load512(kByteIndexes.sevens), words); }

// Sixteen groups of 32, each eight bytes (four grid indices, a word of signs and scale), eight in ga and eight in gb:
// w[t] = value t of all entries, plus kBias. Returns (2 * scale + 1) / 8 of the groups.
DS4_INLINE f32x16 iq2_xxs_values(__m512i ga, __m512i gb, __m512i* w) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i entry = _mm512_permutex2var_epi32(ga, even, gb), aux = odd_words(ga, gb).v;
  const __mmask64 bit7 = _mm512_movepi8_mask(entry);
  __m512i code[2];
  if (g_fast_byte_tables) {
    DS4_UNROLL
    for (int h = 0; h < 2; h++) code[h] = lookup_codes<256>(kCodes2xxs.part[h], entry, &bit7);
  } else {
    const __mmask64 bit6 = _mm512_test_epi8_mask(entry, _mm512_set1_epi8(64));
    DS4_UNROLL
    for (int h = 0; h < 2; h++) {
      const uint8_t* p = kCodes2xxs.part[h];
      const __m512i lower = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(entry, load512(p)), bit6, entry, load512(p + 64));
      const __m512i upper = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(entry, load512(p + 128)), bit6, entry, load512(p + 192));
      code[h] = _mm512_mask_mov_epi8(lower, bit7, upper);
    }
  }
  values2(kValues2, code, move_bits(sevens(aux), kSigns2Parity), w);
  return top_scale({aux}, 0.125f);
}

DS4_INLINE void load_lanes(const BlockIQ2_XXS* a, const BlockIQ2_XXS* b, LaneWeights<BlockIQ2_XXS>& g) {
  g.scales.d = mul(d_pair(a, b), iq2_xxs_values(load512(a->g), load512(b->g), g.w));
}
// Of nibbles, lower first, both as 2s + 1 in words.
DS4_INLINE i32x16 odd_words_of_nibbles(i32x16 v) { return or_(and_bits(or_(shl<1>(v), shl<13>(v)), 0x001e001e), set1_i32(0x00010001)); }
DS4_INLINE void load_lanes(const BlockIQ2_XS* a, const BlockIQ2_XS* b, LaneWeights<BlockIQ2_XS>& g) {
  const __m512i qa = load512(a->q), qb = load512(b->q), entry = even_bytes(qa, qb), high = odd_bytes(qa, qb);
  const __mmask64 bits[2] = {_mm512_movepi8_mask(entry), _mm512_test_epi8_mask(high, _mm512_set1_epi8(1))};
  const __m512i code[2] = {lookup_codes<512>(kCodes2xs.part[0], entry, bits), lookup_codes<512>(kCodes2xs.part[1], entry, bits)};
  values2(kValues2Scaled, code, move_bits(high, kSigns2XsParity), g.w);
  g.scales.d = mul(d_pair(a, b), set1(0.125f));
  g.scales.e = odd_words_of_nibbles(load_u8(a->s, b->s));
}
DS4_INLINE void load_lanes(const BlockIQ2_S* a, const BlockIQ2_S* b, LaneWeights<BlockIQ2_S>& g) {
  const __m512i entry = load8(a->q, b->q).v;
  const uint64_t ha = load_le<uint64_t>(a->h), hb = load_le<uint64_t>(b->h), m = 0x5555555555555555;
  const __mmask64 bits[3] = {_mm512_movepi8_mask(entry), _pext_u64(ha, m) | _pext_u64(hb, m) << 32, _pext_u64(ha, ~m) | _pext_u64(hb, ~m) << 32};
  const __m512i code[2] = {lookup_codes<1024>(kCodes2s.part[0], entry, bits), lookup_codes<1024>(kCodes2s.part[1], entry, bits)};
  values2(kValues2Scaled, code, move_bits(load8(a->sg, b->sg).v, kSigns2), g.w);
  g.scales.d = mul(d_pair(a, b), set1(0.125f));
  g.scales.e = odd_words_of_nibbles(load_u8(a->s, b->s));
}
DS4_INLINE void load_lanes(const BlockIQ3_XXS* a, const BlockIQ3_XXS* b, LaneWeights<BlockIQ3_XXS>& g) {
  const __m512i qa = load512(a->q), qb = load512(b->q), aux = load8(a->a, b->a).v, signs = sevens(aux);
  DS4_UNROLL
  for (int h = 0; h < 2; h++) {
    const __m512i entry = h == 0 ? even_bytes(qa, qb) : odd_bytes(qa, qb);
    const __mmask64 bit7 = _mm512_movepi8_mask(entry);
    const __m512i code[2] = {lookup_codes<256>(kCodes3xxs.part[0], entry, &bit7), lookup_codes<256>(kCodes3xxs.part[1], entry, &bit7)};
    values3(kValues3xxs, code, move_bits(signs, kSigns3Parity[h]), g.w + 4 * h);
  }
  g.scales.d = mul(d_pair(a, b), top_scale({aux}, 0.25f));
}
DS4_INLINE void load_lanes(const BlockIQ3_S* a, const BlockIQ3_S* b, LaneWeights<BlockIQ3_S>& g) {
  const __m512i qa = load512(a->q), qb = load512(b->q), signs = load8(a->sg, b->sg).v;
  const uint64_t ha = load_le<uint64_t>(a->h), hb = load_le<uint64_t>(b->h);
  DS4_UNROLL
  for (int h = 0; h < 2; h++) {
    const __m512i entry = h == 0 ? even_bytes(qa, qb) : odd_bytes(qa, qb);
    const uint64_t m = h == 0 ? 0x5555555555555555 : 0xaaaaaaaaaaaaaaaa;
    const __mmask64 bits[2] = {_mm512_movepi8_mask(entry), _pext_u64(ha, m) | _pext_u64(hb, m) << 32};
    const __m512i code[2] = {lookup_codes<512>(kCodes3s.part[0], entry, bits), lookup_codes<512>(kCodes3s.part[1], entry, bits)};
    values3(kValues3s, code, move_bits(signs, kSigns3[h]), g.w + 4 * h);
  }
  g.scales.d = mul(d_pair(a, b), iq3_s_scales(a, b));
}

// At which bit of its bytes each lane's fields begin, Q2_K or Q4_K. They stay there: a sum comes out 2^shift times too large,
// still below 16 * 240 * 127 < 2^19, and add_lanes shifts it back exactly.
template <class Block>
DS4_INLINE __m512i field_shifts() {
  return _mm512_broadcast_i32x4(std::is_same_v<Block, BlockQ2_K> ? _mm_setr_epi32(0, 2, 4, 6) : _mm_setr_epi32(0, 4, 0, 4));
}

DS4_INLINE void load_lanes(const BlockQ2_K* a, const BlockQ2_K* b, LaneWeights<BlockQ2_K>& g) {
  const __m512i qa = load512(a->q), qb = load512(b->q), fields = _mm512_sllv_epi32(_mm512_set1_epi8(3), field_shifts<BlockQ2_K>());
  const __m512i half[2] = {_mm512_shuffle_i32x4(qa, qb, 0x88), _mm512_shuffle_i32x4(qa, qb, 0xdd)};        // words 0-3, 4-7 of four 32-byte parts
  DS4_UNROLL
  for (int h = 0; h < 2; h++) {
    g.w[4 * h] = _mm512_and_si512(_mm512_shuffle_epi32(half[h], _MM_PERM_AAAA), fields);
    g.w[4 * h + 1] = _mm512_and_si512(_mm512_shuffle_epi32(half[h], _MM_PERM_BBBB), fields);
    g.w[4 * h + 2] = _mm512_and_si512(_mm512_shuffle_epi32(half[h], _MM_PERM_CCCC), fields);
    g.w[4 * h + 3] = _mm512_and_si512(_mm512_shuffle_epi32(half[h], _MM_PERM_DDDD), fields);
  }
  load_scales(a, b, g.scales);
}

// Word k of each block's nibbles, Q4_K or Q5_K, with those of its neighbour: q has them at field_shifts<BlockQ4_K>.
template <class Block>
DS4_INLINE void load_q4_words(const Block* a, const Block* b, __m512i* q) {
  const __m512i a0 = load512(a->q), a1 = load512(a->q + 64), b0 = load512(b->q), b1 = load512(b->q + 64);
  const __m512i first = _mm512_setr_epi32(0, 0, 8, 8, 16, 16, 24, 24, 0, 0, 8, 8, 16, 16, 24, 24);
  DS4_UNROLL
  for (int k = 0; k < 8; k++) {
    const __m512i at = _mm512_add_epi32(first, _mm512_set1_epi32(k));
    q[k] = _mm512_mask_blend_epi32(0xff00, _mm512_permutex2var_epi32(a0, at, a1), _mm512_permutex2var_epi32(b0, at, b1));
  }
}
DS4_INLINE void load_lanes(const BlockQ4_K* a, const BlockQ4_K* b, LaneWeights<BlockQ4_K>& g) {
  const __m512i fields = _mm512_sllv_epi32(_mm512_set1_epi8(15), field_shifts<BlockQ4_K>());
  load_q4_words(a, b, g.w);
  DS4_UNROLL
  for (int k = 0; k < 8; k++) g.w[k] = _mm512_and_si512(g.w[k], fields);
  load_scales(a, b, g.scales);
}

// TQ1_0: where the words of sixteen blocks are in q and h of two, 16 words for each, and the powers of 3 for words 0 - 3, 4 .. 7.
struct WordTables {
  uint32_t word[8][16];
  uint16_t power[5][32];
};
constexpr WordTables make_word_tables() {
  WordTables t{};
  for (size_t k = 0; k < 8; k++)
    for (size_t lane = 0; lane < 16; lane++) {
      const size_t block = lane % 8, first = 32 * block + 4 * k;       // the first value of the word
      t.word[k][lane] = uint32_t(lane / 8 * 16 + (block < 5 ? k : first < 240 ? 8 + k % 4 : 12));
      for (size_t i = 0; i < 2; i++) t.power[k < 4 ? 0 : k - 3][2 * lane + i] = kTq1Tables.power[first / 64][first % 64 / 2];
    }
  return t;
}
alignas(64) constexpr WordTables kWordTables = make_word_tables();
DS4_INLINE void load_lanes(const BlockTQ1_0* a, const BlockTQ1_0* b, LaneWeights<BlockTQ1_0>& g) {
  const __m512i qa = _mm512_maskz_loadu_epi32(0x1fff, a->q), qb = _mm512_maskz_loadu_epi32(0x1fff, b->q);   // q and h
  DS4_UNROLL
  for (int w = 0; w < 8; w++) g.w[w] = digit3({_mm512_permutex2var_epi32(qa, load512(kWordTables.word[w]), qb)}, kWordTables.power[w < 4 ? 0 : w - 3]).v;
  load_scales(a, b, g.scales);
}

DS4_INLINE void load_lanes(const BlockQ5_K* a, const BlockQ5_K* b, LaneWeights<BlockQ5_K>& g) {
  const __m512i h = load8(a->h, b->h).v, part = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8);
  const __m512i bit = _mm512_sllv_epi32(_mm512_set1_epi8(1), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7));
  load_q4_words(a, b, g.w);
  DS4_UNROLL
  for (int k = 0; k < 8; k++) {
    const __mmask64 fifth = _mm512_test_epi8_mask(_mm512_permutexvar_epi32(_mm512_add_epi32(part, _mm512_set1_epi32(k)), h), bit);
    g.w[k] = _mm512_and_si512(_mm512_srlv_epi32(g.w[k], field_shifts<BlockQ4_K>()), _mm512_set1_epi8(15));
    g.w[k] = _mm512_mask_add_epi8(g.w[k], fifth, g.w[k], _mm512_set1_epi8(16));
  }
  load_scales(a, b, g.scales);
}
// w[k], w[4 + k] = the low, high nibbles of word k of all blocks.
template <class Block>
DS4_INLINE void load_nibbles(const Block* a, const Block* b, __m512i* w) {
  __m512i q[4], half[4], word[4];
  DS4_UNROLL
  for (size_t k = 0; k < 4; k++) {                                     // blocks k, 4 + k of a, of b
    q[k] = _mm512_inserti32x4(_mm512_castsi128_si512(load128(nibbles_of(*a, k))), load128(nibbles_of(*a, 4 + k)), 1);
    q[k] = _mm512_inserti32x4(_mm512_inserti32x4(q[k], load128(nibbles_of(*b, k)), 2), load128(nibbles_of(*b, 4 + k)), 3);
  }
  DS4_UNROLL
  for (int k = 0; k < 2; k++) half[k] = _mm512_unpacklo_epi32(q[2 * k], q[2 * k + 1]), half[2 + k] = _mm512_unpackhi_epi32(q[2 * k], q[2 * k + 1]);
  DS4_UNROLL
  for (int k = 0; k < 2; k++) word[2 * k] = _mm512_unpacklo_epi64(half[2 * k], half[2 * k + 1]), word[2 * k + 1] = _mm512_unpackhi_epi64(half[2 * k], half[2 * k + 1]);
  DS4_UNROLL
  for (int k = 0; k < 4; k++) w[k] = _mm512_and_si512(word[k], _mm512_set1_epi8(15)), w[4 + k] = _mm512_and_si512(_mm512_srli_epi16(word[k], 4), _mm512_set1_epi8(15));
}
DS4_INLINE void look_up(const std::array<int8_t, 16>& values, __m512i* w) {
  DS4_UNROLL
  for (int k = 0; k < 8; k++) w[k] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load128(values.data())), w[k]);
}
DS4_INLINE void load_lanes(const BlockIQ4_XS* a, const BlockIQ4_XS* b, LaneWeights<BlockIQ4_XS>& g) {
  load_nibbles(a, b, g.w);
  look_up(kIq4Bytes, g.w);
  load_scales(a, b, g.scales);
}
template <class B>
DS4_INLINE void load_lanes(const Eight<B>* a, const Eight<B>* b, LaneWeights<Eight<B>>& g) {
  load_nibbles(a, b, g.w);
  if constexpr (std::is_same_v<B, BlockMXFP4>) look_up(kFp4Bytes, g.w);
  if constexpr (std::is_same_v<B, BlockIQ4_NL>) look_up(kIq4Bytes, g.w);
  if constexpr (std::is_same_v<B, BlockQ5_0>) {
    const __m512i h = _mm512_inserti64x4(_mm512_castsi256_si512(fifth_words(*a)), fifth_words(*b), 1);
    DS4_UNROLL
    for (int k = 0; k < 8; k++) {                                      // byte k / 2 of a lane has the bits of words k and k ^ 1
      const __m512i from = _mm512_add_epi8(_mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c)), _mm512_set1_epi8(char(k / 2)));
      const __mmask64 fifth = _mm512_test_epi8_mask(_mm512_shuffle_epi8(h, from), _mm512_set1_epi32(k % 2 == 0 ? 0x08040201 : int(0x80402010)));
      g.w[k] = _mm512_mask_add_epi8(g.w[k], fifth, g.w[k], _mm512_set1_epi8(16));
    }
  }
  load_scales(a, b, g.scales);
}

// acc + the 16 blocks from b on times the activations.
template <class Block>
DS4_INLINE f32x16 add_lanes(f32x16 acc, const LaneWeights<Block>& g, const ActRow& x, size_t b) {
  using T = GridType<Block>;
  const int8_t* q = (T::kGrid ? x.qet : x.qt) + 32 * b;
  __m512i lo = _mm512_setzero_si512(), hi = lo;
  if constexpr (T::kScaled) {                  // sums of values 0-15 and 16-31 in words; -sums of the activations, then products
    const __m512i sums = _mm512_mask_blend_epi16(0x55555555, _mm512_slli_epi32(load512(x.c_hi + b), 9), _mm512_srai_epi32(load512(x.c_lo + b), 7));
    lo = _mm512_mullo_epi32(_mm512_madd_epi16(sums, g.scales.e.v), _mm512_set1_epi32(kScaledBias));
    DS4_UNROLL
    for (int t = 0; t < 4; t++) lo = _mm512_dpwssd_epi32(lo, _mm512_maddubs_epi16(g.w[t], load512(q + 64 * t)), g.scales.e.v);
    DS4_UNROLL
    for (int t = 4; t < 8; t++) hi = _mm512_dpwssd_epi32(hi, _mm512_maddubs_epi16(g.w[t], load512(q + 64 * t)), g.scales.e.v);
    return fma(to_f32(i32x16{_mm512_add_epi32(lo, hi)}), mul(g.scales.d, load(x.d + b)), acc);               // below 2^24: exact
  }
  if constexpr (T::kGrid || kLaneOffset<Block> == kBias) lo = load512(x.c + b);                             // -kBias * sum
  else if constexpr (kLaneOffset<Block> != 0) lo = _mm512_mullo_epi32(_mm512_srai_epi32(load512(x.c + b), 7), _mm512_set1_epi32(kLaneOffset<Block>));
  DS4_UNROLL
  for (int t = 0; t < 4; t++) lo = _mm512_dpbusd_epi32(lo, g.w[t], load512(q + 64 * t));
  DS4_UNROLL
  for (int t = 4; t < 8; t++) hi = _mm512_dpbusd_epi32(hi, g.w[t], load512(q + 64 * t));
  if constexpr (std::is_same_v<Block, BlockQ2_K>) {
    const __m512i up = _mm512_sub_epi32(_mm512_set1_epi32(16), field_shifts<Block>());
    lo = _mm512_mask_blend_epi16(0x55555555, _mm512_sllv_epi32(hi, up), _mm512_srav_epi32(lo, field_shifts<Block>()));
  }
  if constexpr (std::is_same_v<Block, BlockQ4_K>) {
    lo = _mm512_srav_epi32(lo, field_shifts<Block>());
    hi = _mm512_srav_epi32(hi, field_shifts<Block>());
  }
  return add_sums<Block>(acc, {lo}, {hi}, g.scales, x, b);
}
#endif

#if DS4_PASS >= 2
template <class Block, bool kOne>
static void matmul_rows_lanes(const Matrix& w, size_t r0, size_t r1, const void* const* x, float* const* out, size_t n_tokens) {
  const size_t n = kOne ? 1 : n_tokens;
  const size_t n_blocks = w.cols / 256;
  const auto add_whole = [&](const uint8_t* row, size_t i, f32x16* acc) __attribute__((always_inline)) {
    const Block* a = reinterpret_cast<const Block*>(row) + 2 * i;
    LaneGroup<Block, kOne> g;
    load_lanes(a, a + 1, g);
    for (size_t t = 0; t < n; t++) acc[t] = add_lanes(acc[t], g, act_row(x[t], w.cols), 16 * i);
  };
  const auto add_last = [&](const uint8_t* row, size_t i, f32x16* acc) {
    const Block* a = reinterpret_cast<const Block*>(row) + 2 * i;
    LaneGroup<Block, kOne> g;
    load_lanes(a, a, g);
    for (size_t t = 0; t < n; t++) acc[t] = first_of(add_lanes(acc[t], g, act_row(x[t], w.cols), 16 * i), 8, acc[t]);
  };
  for_rows<kOne>(w, r0, r1, n_blocks / 2, n_blocks % 2 != 0, 2 * sizeof(Block), n, out, add_whole, add_last);
}
#endif

// -- int8 matrix product, many tokens: tiles of 16 rows in lanes ----

// One block of 32 columns of 16 rows. w[k][row][i] = value 4k + i of the row's block as in its Group (value 8i + k where
// activations are read from qe), but where kBias is not 0 with kBias in place of the type's offset.
struct PanelBlock {
  alignas(64) int8_t w[8][64];
  float d[16], e0[16], e1[16];                 // [row]
};
constexpr size_t kTileRows = 16, kTileTokens = 16;

// Word i of out[j] = word j of in[i] + c for 16 x 16 words of 32 bits, by four perfect shuffles. in[i] lies in_step bytes
// behind in[i - 1], out[j] out_step behind out[j - 1], but out[8] lies half_step behind out[0].
DS4_INLINE void transpose16(const void* in, size_t in_step, uint32_t c, void* out, size_t out_step, size_t half_step) {
  i32x16 a[16], t[16];
  DS4_UNROLL
  for (size_t i = 0; i < 16; i++) a[i] = add(load_i32(static_cast<const uint8_t*>(in) + i * in_step), set1_i32(int32_t(c)));
  DS4_UNROLL
  for (size_t k = 0; k < 2; k++) {
    DS4_UNROLL
    for (size_t i = 0; i < 8; i++) zip(a[i], a[i + 8], &t[2 * i], &t[2 * i + 1]);
    DS4_UNROLL
    for (size_t i = 0; i < 8; i++) zip(t[i], t[i + 8], &a[2 * i], &a[2 * i + 1]);
  }
  DS4_UNROLL
  for (size_t i = 0; i < 16; i++) store_i32(static_cast<uint8_t*>(out) + i / 8 * half_step + i % 8 * out_step, a[i]);
}

// Rows r .. r + 15 of w (the last one repeated where there are fewer) into panel[cols / 32], filled up to a multiple of 16.
template <Kind kind>
static void build_panel(const Matrix& w, size_t r, size_t r1, const RowReader& reader, PanelBlock* panel) {
  constexpr size_t kBlock = sizeof(PanelBlock);
  Group g[kTileRows] = {};
  const uint32_t move = kBias != 0 ? uint32_t(kBias - reader.format.offset) * 0x01010101u : 0;   // no byte overflows
  for (size_t i = 0; i < reader.groups(); i++, panel += 16) {
    for (size_t k = 0; k < kTileRows; k++) {
      const uint8_t* row = w.data + std::min(r + k, r1 - 1) * w.stride;
      const uint8_t* next = row + kTileRows * w.stride + i * reader.group_bytes();           // of the next panel
      for (size_t j = 0; j < reader.group_bytes(); j += 64) __builtin_prefetch(next + j, 0, 2);
      reader.unpack(row, i, g[k]);
    }
    for (size_t b = 0; b < reader.elems(i) / 32; b += 2) transpose16(g[0].q + 32 * b, sizeof(Group), move, panel[b].w, 64, kBlock);
    transpose16(g[0].d, sizeof(Group), 0, panel->d, kBlock, 8 * kBlock);
    if constexpr (kind >= Kind::kMin) transpose16(g[0].e0, sizeof(Group), 0, panel->e0, kBlock, 8 * kBlock);
    if constexpr (kind >= Kind::kMin16) transpose16(g[0].e1, sizeof(Group), 0, panel->e1, kBlock, 8 * kBlock);
  }
}

#if DS4_PASS == 3
// The same with the decoding of sixteen rows at once, rows in lanes from the start: no byte is unpacked in row order.
// 8 x 8 quad words, out[j] = quad word j of all in[i].
DS4_INLINE void transpose8(const __m512i* in, __m512i* out) {
  __m512i a[8], b[8];
  DS4_UNROLL
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm512_unpacklo_epi64(in[2 * i], in[2 * i + 1]);        // lane l: quad word 2l of rows 2i, 2i + 1
    a[2 * i + 1] = _mm512_unpackhi_epi64(in[2 * i], in[2 * i + 1]);
  }
  DS4_UNROLL
  for (int h = 0; h < 2; h++) {                                        // h: odd quad words
    b[h] = _mm512_shuffle_i64x2(a[h], a[2 + h], 0x88), b[2 + h] = _mm512_shuffle_i64x2(a[h], a[2 + h], 0xdd);
    b[4 + h] = _mm512_shuffle_i64x2(a[4 + h], a[6 + h], 0x88), b[6 + h] = _mm512_shuffle_i64x2(a[4 + h], a[6 + h], 0xdd);
    out[h] = _mm512_shuffle_i64x2(b[h], b[4 + h], 0x88), out[4 + h] = _mm512_shuffle_i64x2(b[h], b[4 + h], 0xdd);
    out[2 + h] = _mm512_shuffle_i64x2(b[2 + h], b[6 + h], 0x88), out[6 + h] = _mm512_shuffle_i64x2(b[2 + h], b[6 + h], 0xdd);
  }
}

DS4_INLINE void load_panel(const BlockIQ2_XXS* const* rows, PanelBlock* panel) {
  __m512i in[8], ga[8], gb[8], w[8];
  alignas(32) uint16_t d[16];
  for (int k = 0; k < 16; k++) d[k] = rows[k]->d;
  for (int k = 0; k < 8; k++) in[k] = load512(rows[k]->g);
  transpose8(in, ga);
  for (int k = 0; k < 8; k++) in[k] = load512(rows[8 + k]->g);
  transpose8(in, gb);
  const f32x16 scale = load_f16(d);
  for (int b = 0; b < 8; b++) {
    const f32x16 group_scale = iq2_xxs_values(ga[b], gb[b], w);
    DS4_UNROLL
    for (int k = 0; k < 8; k++) _mm512_store_si512(panel[b].w[k], w[k]);
    store(panel[b].d, mul(scale, group_scale));
  }
}

DS4_INLINE void load_panel(const BlockQ2_K* const* rows, PanelBlock* panel) {
  alignas(64) uint32_t front[16][16], back[16][16];                    // words 0..15 and 5..20 of the rows' blocks: scales, q, d and m
  static_assert(offsetof(BlockQ2_K, s) == 0 && offsetof(BlockQ2_K, q) == 16 && offsetof(BlockQ2_K, d) == 80, "read as words");
  i32x16 a[16], t[16];
  for (int part = 0; part < 2; part++) {
    for (int k = 0; k < 16; k++) a[k] = load_i32(reinterpret_cast<const uint8_t*>(rows[k]) + 20 * part);
    DS4_UNROLL
    for (int k = 0; k < 2; k++) {
      DS4_UNROLL
      for (int i = 0; i < 8; i++) zip(a[i], a[i + 8], &t[2 * i], &t[2 * i + 1]);
      DS4_UNROLL
      for (int i = 0; i < 8; i++) zip(t[i], t[i + 8], &a[2 * i], &a[2 * i + 1]);
    }
    for (int k = 0; k < 16; k++) store_i32((part ? back : front)[k], a[k]);
  }
  const __m512i dm = load512(back[15]), nibble = _mm512_set1_epi32(15), three = _mm512_set1_epi8(3), bias = _mm512_set1_epi8(char(kBias));
  const f32x16 d = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(dm))}, m = {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(dm, 16)))};
  for (int b = 0; b < 8; b++) {
    const __m512i s = _mm512_srl_epi32(load512(front[b / 2]), _mm_cvtsi32_si128(b % 2 * 16));
    __m512i scale[2];                                                  // in both halves of a word: a byte of q times it stays a byte
    for (int h = 0; h < 2; h++) {
      const __m512i v = _mm512_and_si512(_mm512_srli_epi32(s, unsigned(8 * h)), nibble);
      scale[h] = _mm512_or_si512(v, _mm512_slli_epi32(v, 16));
    }
    for (int k = 0; k < 8; k++) {
      const int word = b / 4 * 8 + k;                                  // of q
      const __m512i q = load512(word < 12 ? front[4 + word] : back[word - 1]);
      const __m512i two = _mm512_and_si512(_mm512_srl_epi32(q, _mm_cvtsi32_si128(b % 4 * 2)), three);
      _mm512_store_si512(panel[b].w[k], _mm512_add_epi8(_mm512_mullo_epi16(two, scale[k / 4]), bias));
    }
    store(panel[b].d, d);
    store(panel[b].e0, mul(m, {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(s, 4), nibble))}));
    store(panel[b].e1, mul(m, {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(s, 12), nibble))}));
  }
}

template <class Block>
static void build_panel_lanes(const Matrix& w, size_t r, size_t r1, const RowReader& reader, PanelBlock* panel) {
  const Block* rows[kTileRows];
  for (size_t i = 0; i < reader.cols / 256; i++, panel += 8) {
    for (size_t k = 0; k < kTileRows; k++) {
      rows[k] = reinterpret_cast<const Block*>(w.data + std::min(r + k, r1 - 1) * w.stride) + i;
      const uint8_t* next = reinterpret_cast<const uint8_t*>(rows[k]) + kTileRows * w.stride;
      __builtin_prefetch(next, 0, 2);
      __builtin_prefetch(next + 64, 0, 2);
    }
    load_panel(rows, panel);
  }
}
#endif

// A token of a tile is passed as where its q is, for panels of IQ2_XXS its qe.
DS4_INLINE const uint8_t* tile_token(Type type, const void* act, size_t n) {
  const ActRow row = act_row(act, n);
  return reinterpret_cast<const uint8_t*>(DS4_PASS == 3 && type == Type::IQ2_XXS ? row.qe : row.q);
}
// Where the other parts of any ActRow of n elements lie, in bytes from its tile_token.
struct ActLayout {
  ptrdiff_t d, md, md_lo, md_hi, c, c_lo, c_hi;
  ActLayout(Type type, const void* act, size_t n) {
    const ActRow row = act_row(act, n);
    auto at = [&](const void* part) { return static_cast<const uint8_t*>(part) - tile_token(type, act, n); };
    d = at(row.d), md = at(row.md), md_lo = at(row.md_lo), md_hi = at(row.md_hi), c = at(row.c), c_lo = at(row.c_lo), c_hi = at(row.c_hi);
  }
};

// acc[t] += panel block b . x[t] for T tokens; offset: of the weights as they are in the panel.
template <Kind kind, int T>
DS4_INLINE void multiply_block(const PanelBlock& p, const i8x64* w, size_t b, const uint8_t* const* x, const ActLayout& at, int offset, f32x16 (*acc)[16]) {
  constexpr bool kScaled = kind == Kind::kScaled, kNoOffset = kind == Kind::kSigned || kind == Kind::kMin || kind == Kind::kMin16;
  auto start = [&](const uint8_t* sums) {                          // -offset * (sum of x)
    const int32_t c = load_le<int32_t>(sums + 4 * b);
    return set1_i32(kBias != 0 ? c : kNoOffset ? 0 : (c >> 7) * offset);
  };
  auto scalar = [&](const uint8_t* floats) { return set1(load_le<float>(floats + 4 * b)); };
  i32x16 s[T], hi[T];
  const int8_t* q[T];
  DS4_UNROLL
  for (int t = 0; t < T; t++) {
    q[t] = reinterpret_cast<const int8_t*>(x[t]) + 32 * b;
    s[t] = start(x[t] + (kScaled ? at.c_lo : at.c));
    if constexpr (kScaled) hi[t] = start(x[t] + at.c_hi);
  }
  DS4_UNROLL
  for (int k = 0; k < 8; k++) {
    DS4_UNROLL
    for (int t = 0; t < T; t++) {
      i32x16& sum = kScaled && k >= 4 ? hi[t] : s[t];
      sum = dot4<kind == Kind::kSigned>(sum, w[k], q[t] + 4 * k);
    }
  }
  DS4_UNROLL
  for (int t = 0; t < T; t++) {
    f32x16 sum = to_f32(s[t]), a = acc[t][b % 16];
    if constexpr (kScaled) sum = fma(sum, load(p.e0), mul(to_f32(hi[t]), load(p.e1)));
    a = fma(sum, mul(load(p.d), scalar(x[t] + at.d)), a);
    if constexpr (kind == Kind::kMin) a = fma(load(p.e0), scalar(x[t] + at.md), a);
    if constexpr (kind == Kind::kMin16) a = fma(load(p.e1), scalar(x[t] + at.md_hi), fma(load(p.e0), scalar(x[t] + at.md_lo), a));
    acc[t][b % 16] = a;
  }
}

// out[t][0 .. n_rows) = the panel's rows . x[t] for n <= kTileTokens tokens. acc[t][lane]: lane = block % 16, a vector of 16 rows.
template <Kind kind>
static void multiply_panel(const PanelBlock* panel, size_t cols, const ActLayout& at, const uint8_t* const* x, size_t n, int offset, float* const* out, size_t r, size_t n_rows) {
  f32x16 acc[kTileTokens][16];
  for (size_t t = 0; t < n; t++)
    for (f32x16& a : acc[t]) a = zero();
  for (size_t b = 0; b < cols / 32; b++) {
    const PanelBlock& p = panel[b];
    i8x64 w[8];
    DS4_UNROLL
    for (int k = 0; k < 8; k++) w[k] = load8(p.w[k]);
    size_t t = 0;
    for (; t + 4 <= n; t += 4) multiply_block<kind, 4>(p, w, b, x + t, at, offset, acc + t);
    for (; t < n; t++) multiply_block<kind, 1>(p, w, b, x + t, at, offset, acc + t);
  }
  for (size_t t = 0; t < n; t++) {
    for (size_t h = 8; h; h /= 2)
      for (size_t i = 0; i < h; i++) acc[t][i] = add(acc[t][i], acc[t][i + h]);
    store_partial(out[t] + r, n_rows, acc[t][0]);
  }
}

// n blocks that belong to the thread. Limit: where the memory is not there the program ends.
static PanelBlock* panel_memory(size_t n) noexcept {
  static thread_local AlignedBuffer<PanelBlock> panels;
  if (panels.size() < n) panels.resize(n);
  return panels.data();
}

// A stripe of rows becomes panels that stay in the L2 cache while all tokens pass over them. One token tile needs no stripe:
// shorter turns of reading and computing keep the memory busy.
template <Kind kind>
static void matmul_tiles(const Matrix& w, size_t r0, size_t r1, const void* const* x, float* const* out, size_t n) {
  const size_t stripe = n > kTileTokens ? 4 : 1;                   // panels
  const RowReader reader(w.type, w.cols);
  const ActLayout at(w.type, x[0], w.cols);
  auto build = build_panel<kind>;
#if DS4_PASS == 3
  if (w.type == Type::IQ2_XXS) build = build_panel_lanes<BlockIQ2_XXS>;
  if (w.type == Type::Q2_K) build = build_panel_lanes<BlockQ2_K>;
#endif
  const size_t step = size_t(align_up(w.cols, 512)) / 32;
  PanelBlock* panels = panel_memory(stripe * step);
  for (size_t r = r0; r < r1; r += stripe * kTileRows) {
    const size_t n_panels = std::min<size_t>(stripe, ceil_div(r1 - r, kTileRows));
    for (size_t k = 0; k < n_panels; k++) build(w, r + k * kTileRows, r1, reader, panels + k * step);
    for (size_t t = 0; t < n; t += kTileTokens) {
      const uint8_t* rows[kTileTokens];
      const size_t nt = std::min(kTileTokens, n - t);
      for (size_t i = 0; i < nt; i++) rows[i] = tile_token(w.type, x[t + i], w.cols);
      for (size_t k = 0; k < n_panels; k++) {
        const size_t row = r + k * kTileRows;
        multiply_panel<kind>(panels + k * step, w.cols, at, rows, nt, reader.format.offset, out + t, row, std::min(kTileRows, r1 - row));
      }
    }
  }
}

static void matmul_int8(const Matrix& w, size_t r0, size_t r1, const void* const* x, float* const* out, size_t n) noexcept {
  using Multiply = void (*)(const Matrix&, size_t, size_t, const void* const*, float* const*, size_t);
  constexpr Multiply kRows[] = {matmul_rows<Kind::kPlain>, matmul_rows<Kind::kSigned>, matmul_rows<Kind::kMin>, matmul_rows<Kind::kMin16>, matmul_rows<Kind::kScaled>};
  constexpr Multiply kTiles[] = {matmul_tiles<Kind::kPlain>, matmul_tiles<Kind::kSigned>, matmul_tiles<Kind::kMin>, matmul_tiles<Kind::kMin16>, matmul_tiles<Kind::kScaled>};
  const size_t kind = size_t(format_of(w.type).kind);
  if (n > row_tokens(w.type)) return kTiles[kind](w, r0, r1, x, out, n);
#if DS4_PASS >= 2
  auto lanes = [&](auto block) {
    using Block = decltype(block);
    (n == 1 ? matmul_rows_lanes<Block, true> : matmul_rows_lanes<Block, false>)(w, r0, r1, x, out, n);
  };
  auto grid = [&](auto block) {
    using Block = decltype(block);
    (n == 1 ? matmul_rows_grid<Block, true> : matmul_rows_grid<Block, false>)(w, r0, r1, x, out, n);
  };
  auto coded = [&](auto block) {               // their grids' entries are looked up in byte tables on AVX-512
#if DS4_PASS == 3
    lanes(block);
#else
    grid(block);
#endif
  };
  if (w.cols % 256 == 0) {
    switch (w.type) {
      case Type::Q4_0: return lanes(Eight<BlockQ4_0>{});
      case Type::Q4_1: return lanes(Eight<BlockQ4_1>{});
      case Type::Q5_0: return lanes(Eight<BlockQ5_0>{});
      case Type::MXFP4: return lanes(Eight<BlockMXFP4>{});
      case Type::IQ4_NL: return lanes(Eight<BlockIQ4_NL>{});
      default: break;
    }
  }
  switch (w.type) {
    case Type::Q2_K: return lanes(BlockQ2_K{});
    case Type::Q4_K: return lanes(BlockQ4_K{});
    case Type::Q5_K: return lanes(BlockQ5_K{});
    case Type::IQ4_XS: return lanes(BlockIQ4_XS{});
    case Type::TQ1_0: return lanes(BlockTQ1_0{});
    case Type::IQ1_S: return grid(BlockIQ1_S{});
    case Type::IQ1_M: return grid(BlockIQ1_M{});
    case Type::IQ2_XXS: return coded(BlockIQ2_XXS{});
    case Type::IQ2_XS: return coded(BlockIQ2_XS{});
    case Type::IQ2_S: return coded(BlockIQ2_S{});
    case Type::IQ3_XXS: return coded(BlockIQ3_XXS{});
    case Type::IQ3_S: return coded(BlockIQ3_S{});
    default: break;
  }
#endif
  if (w.type == Type::Q8_0) return (n == 1 ? matmul_rows_q8_0<true> : matmul_rows_q8_0<false>)(w, r0, r1, x, out, n);
  kRows[kind](w, r0, r1, x, out, n);
}

// -- float matrix product ----

// Sixteen floats of a row of F32, F16 or BF16, from element k on.
template <Type type>
DS4_INLINE f32x16 load_row(const void* row, size_t k) {
  if constexpr (type == Type::F32) return load(static_cast<const float*>(row) + k);
  else if constexpr (type == Type::F16) return load_f16(static_cast<const uint16_t*>(row) + k);
  else return load_bf16(static_cast<const uint16_t*>(row) + k);
}

// out[t][r] = row r of w . x[t] for kN * n rows from r0 on and kTokens tokens, straight from the file: kN places of n rows
// each, read at once.
template <Type type, int kN, int kTokens>
DS4_INLINE void dot_places(const Matrix& w, size_t r0, size_t n, const float* const* x, float* const* out) {
  constexpr size_t kElem = type == Type::F32 ? 4 : 2;
  const size_t gap = n * w.stride, cols = w.cols;
  Ahead<kN> ahead(w.data + r0 * w.stride, gap);
  for (size_t r = 0; r < n; r++) {
    const uint8_t* row[kN];
    f32x16 acc[kN][kTokens], v[kTokens];
    DS4_UNROLL
    for (int i = 0; i < kN; i++) {
      row[i] = w.data + (r0 + r) * w.stride + size_t(i) * gap;
      DS4_UNROLL
      for (int t = 0; t < kTokens; t++) acc[i][t] = zero();
    }
    size_t k = 0;
    for (; k + 16 <= cols; k += 16) {
      ahead.ask(r * w.stride + (k + 16) * kElem);
      DS4_UNROLL
      for (int t = 0; t < kTokens; t++) v[t] = load(x[t] + k);
      DS4_UNROLL
      for (int i = 0; i < kN; i++) {
        const f32x16 m = in_register(load_row<type>(row[i], k));
        DS4_UNROLL
        for (int t = 0; t < kTokens; t++) acc[i][t] = fma(m, v[t], acc[i][t]);
      }
    }
    if (k < cols) {
      DS4_UNROLL
      for (int i = 0; i < kN; i++) {
        alignas(64) uint8_t tail[64] = {};
        std::memcpy(tail, row[i] + k * kElem, (cols - k) * kElem);
        DS4_UNROLL
        for (int t = 0; t < kTokens; t++) acc[i][t] = fma(load_row<type>(tail, 0), load_partial(x[t] + k, cols - k), acc[i][t]);
      }
    }
    DS4_UNROLL
    for (int i = 0; i < kN; i++) {
      DS4_UNROLL
      for (int t = 0; t < kTokens; t++) out[t][r0 + r + size_t(i) * n] = reduce_add(acc[i][t]);
    }
  }
}
// Rows r0 to r1, with as many places as there are registers for: also where g_one_stream, as four sums at once are worth more
// there (Zen 4: F32 21.7 -> 27.9 GB/s, F16 20 -> 22).
template <Type type, int kTokens>
DS4_INLINE void matmul_places(const Matrix& w, size_t r0, size_t r1, const float* const* x, float* const* out) {
  constexpr int kN = kTokens == 1 || DS4_PASS == 3 ? kPlaces : 1;
  const size_t n = (r1 - r0) / kN, rest = r0 + kN * n;
  if (n > 0) dot_places<type, kN, kTokens>(w, r0, n, x, out);
  if (rest < r1) dot_places<type, 1, kTokens>(w, rest, r1 - rest, x, out);
}
// Four tokens at a time; where two or three are left, the last one fills up.
template <Type type>
static void matmul_few(const Matrix& w, size_t r0, size_t r1, const float* const* x, float* const* out, size_t n) {
  for (size_t t0 = 0; t0 < n; t0 += 4) {
    if (n - t0 == 1) return matmul_places<type, 1>(w, r0, r1, x + t0, out + t0);
    const float* xs[4];
    float* outs[4];
    for (size_t i = 0; i < 4; i++) xs[i] = x[std::min(t0 + i, n - 1)], outs[i] = out[std::min(t0 + i, n - 1)];
    matmul_places<type, 4>(w, r0, r1, xs, outs);
  }
}

// acc[t][i] += w[i] . x[t] over n columns for kFloatRows x kTokens results in registers; w is padded with zeros to 16.
template <int kTokens>
DS4_INLINE void dot_tile(const float* const* w, const float* const* x, size_t k0, size_t n, f32x16 (*acc)[kFloatRows]) {
  f32x16 a[kTokens][kFloatRows];
  const float* p[kTokens];
  DS4_UNROLL
  for (int t = 0; t < kTokens; t++) {
    p[t] = x[t] + k0;
    DS4_UNROLL
    for (int i = 0; i < kFloatRows; i++) a[t][i] = acc[t][i];
  }
  auto step = [&](size_t k, auto load_x) {
    f32x16 v[kTokens];
    DS4_UNROLL
    for (int t = 0; t < kTokens; t++) v[t] = load_x(p[t] + k);
    DS4_UNROLL
    for (int i = 0; i < kFloatRows; i++) {
      const f32x16 row = in_register(load(w[i] + k));
      DS4_UNROLL
      for (int t = 0; t < kTokens; t++) a[t][i] = fma(row, v[t], a[t][i]);
    }
  };
  size_t k = 0;
  for (; k + 16 <= n; k += 16) step(k, [](const float* q) { return load(q); });
  if (k < n) step(k, [&](const float* q) { return load_partial(q, n - k); });
  DS4_UNROLL
  for (int t = 0; t < kTokens; t++) {
    DS4_UNROLL
    for (int i = 0; i < kFloatRows; i++) acc[t][i] = a[t][i];
  }
}

// Few tokens read float weights straight from the file. For more, and other types, a few rows become floats, some columns at a
// time, in the L1 cache, and all tokens of a batch pass over them.
static void matmul_float(const Matrix& w, size_t r0, size_t r1, const float* const* x, float* const* out, size_t n) noexcept {
  constexpr size_t kFew = 8;                   // measured up to this
  if (n <= kFew && w.type == Type::F32) return matmul_few<Type::F32>(w, r0, r1, x, out, n);
  if (n <= kFew && w.type == Type::F16) return matmul_few<Type::F16>(w, r0, r1, x, out, n);
  if (n <= kFew && w.type == Type::BF16) return matmul_few<Type::BF16>(w, r0, r1, x, out, n);
  constexpr size_t kCols = 512, kBatch = 48, kStep = kFloatTokens;
  const TypeInfo& info = type_info(w.type);
  alignas(64) float panel[kFloatRows][kCols];
  f32x16 acc[kBatch][kFloatRows];
  for (size_t r = r0; r < r1; r += kFloatRows) {
    for (size_t t0 = 0; t0 < n; t0 += kBatch) {
      const size_t nt = std::min(kBatch, n - t0);
      for (size_t t = 0; t < nt; t++)
        for (f32x16& a : acc[t]) a = zero();
      for (size_t k = 0; k < w.cols; k += kCols) {
        const size_t nk = std::min<size_t>(kCols, w.cols - k);
        const float* rows[kFloatRows];
        for (size_t i = 0; i < kFloatRows; i++) {                  // behind the last row comes itself again
          const uint8_t* data = w.data + std::min(r + i, r1 - 1) * w.stride + k / info.block_elems * info.block_bytes;
          const bool plain = w.type == Type::F32 && nk % 16 == 0;
          rows[i] = plain ? reinterpret_cast<const float*>(data) : panel[i];
          if (plain) continue;
          dequantize(w.type, data, panel[i], nk);
          std::fill(panel[i] + nk, panel[i] + align_up(nk, 16), 0.0f);
        }
        size_t t = 0;
        for (; t + kStep <= nt; t += kStep) dot_tile<kFloatTokens>(rows, x + t0 + t, k, nk, acc + t);
        for (; t < nt; t++) dot_tile<1>(rows, x + t0 + t, k, nk, acc + t);
      }
      for (size_t t = 0; t < nt; t++)
        for (size_t i = 0; i < std::min<size_t>(kFloatRows, r1 - r); i++) out[t0 + t][r + i] = reduce_add(acc[t][i]);
    }
  }
}

// -- norms and hyper connections --------------------------------------------

// sum_k x[k]^2 in sixteen lanes.
static float sum_squares(const float* x, size_t n) noexcept {
  f32x16 acc = zero();
  size_t i = 0;
  for (; i + 16 <= n; i += 16) { const f32x16 v = load(x + i); acc = fma(v, v, acc); }
  if (i < n) { const f32x16 v = load_partial(x + i, n - i); acc = fma(v, v, acc); }
  return reduce_add(acc);
}

// y = x / sqrt(mean(x^2) + eps) * w; w null: no weight. y may be x.
static void rms_norm(const float* x, const float* w, float eps, float* y, size_t n) noexcept {
  const f32x16 inv = set1(1.0f / std::sqrt(sum_squares(x, n) / float(n) + eps));
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x16 v = mul(load(x + i), inv);
    store(y + i, w ? mul(v, load(w + i)) : v);
  }
  if (i < n) {
    const f32x16 v = mul(load_partial(x + i, n - i), inv);
    store_partial(y + i, n - i, w ? mul(v, load_partial(w + i, n - i)) : v);
  }
}

// y[d] = sum_s pre[s] H[s][d]; H [n_hc][n].
static void hc_mix(const float* H, const float* pre, size_t n_hc, float* y, size_t n) noexcept {
  for (size_t i = 0; i < n; i += 16) {
    f32x16 acc = zero();
    for (size_t s = 0; s < n_hc; s++) acc = fma(set1(pre[s]), load_upto(H + s * n + i, n - i), acc);
    store_upto(y + i, n - i, acc);
  }
}

// H'[k][d] = post[k] out[d] + sum_j C[j][k] H[j][d], in place; H [n_hc][n], C [n_hc][n_hc], n_hc <= kMaxStreams.
static void hc_update(float* H, const float* out, const float* post, const float* C, size_t n_hc, size_t n) noexcept {
  for (size_t i = 0; i < n; i += 16) {
    const size_t m = std::min<size_t>(16, n - i);
    f32x16 old[kMaxStreams];
    for (size_t j = 0; j < n_hc; j++) old[j] = load_upto(H + j * n + i, m);
    const f32x16 o = load_upto(out + i, m);
    for (size_t k = 0; k < n_hc; k++) {
      f32x16 acc = mul(set1(post[k]), o);
      for (size_t j = 0; j < n_hc; j++) acc = fma(set1(C[j * n_hc + k]), old[j], acc);
      store_upto(H + k * n + i, m, acc);
    }
  }
}

// y += x.
static void add_to(float* y, const float* x, size_t n) noexcept {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) store(y + i, add(load(y + i), load(x + i)));
  for (; i < n; i++) y[i] += x[i];
}

// gate = u sigmoid(u) v weight, u = min(gate, clamp), v = clamp(up, -clamp, clamp); clamp <= 1e-6: none.
static void swiglu(float* gate, const float* up, float clamp, float weight, size_t n) noexcept {
  const bool clamped = clamp > 1e-6f;
  const f32x16 hi = set1(clamp), lo = set1(-clamp), one = set1(1.0f), w = set1(weight);
  for (size_t i = 0; i < n; i += 16) {
    f32x16 u = load_upto(gate + i, n - i), v = load_upto(up + i, n - i);
    if (clamped) { u = min(hi, u); v = max(lo, min(hi, v)); }       // NaN stays
    const f32x16 h = mul(mul(mul(u, v), w), div(one, add(one, exp(neg(u)))));
    store_upto(gate + i, n - i, h);
  }
}

// x = sqrt(log(1 + exp(x))), in double. A kernel, because plain x86-64 code calls libm for every fma.
static void router_scores(float* x, size_t n) noexcept {
  for (size_t i = 0; i < n; i++) x[i] = float(std::sqrt(softplus_f64(x[i])));
}

// -- rotary embedding, cached rows --------------------------------------------

// Rotates neighbour pairs: (a, b) -> (a cos - b sin, a sin + b cos); cs holds n_rot/2 cosines, then n_rot/2 sines;
// sign -1 turns back. x: the n_rot rotary entries.
static void rope(float* x, const float* cs, float sign, size_t n_rot) noexcept {
  const size_t half = n_rot / 2;
  for (size_t i = 0; i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1], c = cs[i], s = sign * cs[half + i];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = a * s + b * c;
  }
}

// Cached rows are zero-padded to a multiple of 16 entries.
static void store_plain_row(const float* x, size_t dim, void* row) {
  std::memcpy(row, x, dim * sizeof(float));
  std::memset(static_cast<float*>(row) + dim, 0, (size_t(align_up(dim, 16)) - dim) * sizeof(float));
}

// v rounded to a number of few bits, ties to even, at most +-top; NaN stays. least: the smallest normal one;
// magic = 1.5 * 2^(23 - m) for m bits of fraction. The last bit of c is worth the distance between such numbers at v, so
// adding c rounds.
DS4_INLINE f32x16 round_to(f32x16 v, float top, float least, float magic) {
  const f32x16 a = min(set1(top), abs(v)), c = mul(max(and_bits(a, 0x7f800000u), set1(least)), set1(magic));
  return copysign(sub(add(a, c), c), v);
}

// Writes one cached row of dim entries. plain: float32. Otherwise half, after FP8 E4M3 rounding of the first dim - n_rot
// entries in blocks of 64 with power-of-two scales.
static void store_kv_row(const float* x, size_t dim, size_t n_rot, bool plain, void* row) noexcept {
  if (plain) return store_plain_row(x, dim, row);
  uint16_t* out = static_cast<uint16_t*>(row);
  for (size_t b = 0; b < dim - n_rot; b += 64) {
    const size_t end = std::min(b + 64, dim - n_rot);
    float amax = 0;
    for (size_t i = b; i < end; i++) amax = std::max(amax, std::fabs(x[i]));
    const float s = fp8_scale(amax);
    const f32x16 inv = set1(1.0f / s), scale = set1(s);
    for (size_t i = b; i < end; i += 16) {
      float y[16];
      store(y, mul(round_to(mul(load_upto(x + i, end - i), inv), 448.0f, 0x1p-6f, 0x1.8p20f), scale));
      for (size_t k = i; k < std::min(i + 16, end); k++) out[k] = f32_to_f16(y[k - i]);
    }
  }
  for (size_t i = dim - n_rot; i < dim; i++) out[i] = f32_to_f16(x[i]);
  std::memset(out + dim, 0, (size_t(align_up(dim, 16)) - dim) * sizeof(uint16_t));
}

// -- attention ------------------------------------------------------------------

// Tiles of kFloatRows heads, and kFloatTokens rows or vectors of values; heads left over one at a time. 160 rows of 512, Gmac/s,
// AVX-512: 4 x 4 58, 8 x 2 63, 8 x 3 66; AVX2: 4 x 4 30, 2 x 3 31, 2 x 2 35, 4 x 1 40. NEON is not measured.
static_assert(kFloatRows <= int(kAttendHeads), "scratch");

// scores[h][i] = scale q_h . row_i for kH heads and kR rows; q [kH][dim].
template <Type type, int kH, int kR>
static inline void score_tile(const float* q, const void* const* rows, size_t dim, float scale, float* scores, size_t stride) {
  f32x16 acc[kH][kR];
  DS4_UNROLL
  for (int h = 0; h < kH; h++) {
    DS4_UNROLL
    for (int r = 0; r < kR; r++) acc[h][r] = zero();
  }
  auto step = [&](size_t k, auto load_q) __attribute__((always_inline)) {
    f32x16 w[kR];
    DS4_UNROLL
    for (int r = 0; r < kR; r++) w[r] = in_register(load_row<type>(rows[r], k));
    DS4_UNROLL
    for (int h = 0; h < kH; h++) {
      const f32x16 v = in_register(load_q(q + size_t(h) * dim + k));
      DS4_UNROLL
      for (int r = 0; r < kR; r++) acc[h][r] = fma(v, w[r], acc[h][r]);
    }
  };
  size_t k = 0;
  for (; k + 16 <= dim; k += 16) step(k, [](const float* p) { return load(p); });
  if (k < dim) step(k, [&](const float* p) { return load_partial(p, dim - k); });
  DS4_UNROLL
  for (int h = 0; h < kH; h++) {
    DS4_UNROLL
    for (int r = 0; r < kR; r++) scores[size_t(h) * stride + size_t(r)] = reduce_add(acc[h][r]) * scale;
  }
}

// out[h][d0 .. d0 + 16 kV) = norm[h] sum_i p[h][i] row_i[d], rows in ascending order; the last vector is cut at dim.
template <Type type, int kH, int kV>
static inline void value_tile(const float* p, size_t stride, const float* norm, const void* const* rows, size_t n_rows, size_t d0, size_t dim, float* out) {
  f32x16 acc[kH][kV];
  DS4_UNROLL
  for (int h = 0; h < kH; h++) {
    DS4_UNROLL
    for (int v = 0; v < kV; v++) acc[h][v] = zero();
  }
  for (size_t i = 0; i < n_rows; i++) {
    f32x16 w[kV];
    DS4_UNROLL
    for (int v = 0; v < kV; v++) w[v] = in_register(load_row<type>(rows[i], d0 + 16 * size_t(v)));
    DS4_UNROLL
    for (int h = 0; h < kH; h++) {
      const f32x16 a = in_register(set1(p[size_t(h) * stride + i]));
      DS4_UNROLL
      for (int v = 0; v < kV; v++) acc[h][v] = fma(a, w[v], acc[h][v]);
    }
  }
  DS4_UNROLL
  for (int h = 0; h < kH; h++) {
    DS4_UNROLL
    for (int v = 0; v < kV; v++) {
      const size_t d = d0 + 16 * size_t(v);
      store_upto(out + size_t(h) * dim + d, dim - d, mul(acc[h][v], set1(norm[h])));
    }
  }
}

template <Type type, int kH>
static inline void attend_heads(const AttendArgs& a, size_t h0) {
  const size_t stride = size_t(align_up(a.n_rows, 16)), padded = size_t(align_up(a.dim, 16));
  constexpr int kWidth = kH == 1 ? 4 : kFloatTokens;
  const float* q = a.q + h0 * a.dim;
  size_t i = 0;
  for (; i + kWidth <= a.n_rows; i += kWidth) score_tile<type, kH, kWidth>(q, a.rows + i, a.dim, a.scale, a.scores + i, stride);
  for (; i < a.n_rows; i++) score_tile<type, kH, 1>(q, a.rows + i, a.dim, a.scale, a.scores + i, stride);
  float norm[kH];
  for (int h = 0; h < kH; h++) {                 // softmax whose denominator also holds the sink
    float* s = a.scores + size_t(h) * stride;
    float m = a.sinks[h0 + size_t(h)];
    for (size_t k = 0; k < a.n_rows; k++) m = std::max(m, s[k]);
    f32x16 sum = zero();
    for (size_t k = 0; k < a.n_rows; k += 16) {
      const size_t n = a.n_rows - k;
      const f32x16 e = exp(sub(load_upto(s + k, n), set1(m)));
      store_upto(s + k, n, e);
      sum = add(sum, n < 16 ? load_partial(s + k, n) : e);
    }
    float sink[16];
    store(sink, exp(set1(a.sinks[h0 + size_t(h)] - m)));
    norm[h] = 1.0f / (reduce_add(sum) + sink[0]);
  }
  float* out = a.out + h0 * a.dim;
  size_t d = 0;
  for (; d + 16 * kWidth <= padded; d += 16 * kWidth) value_tile<type, kH, kWidth>(a.scores, stride, norm, a.rows, a.n_rows, d, a.dim, out);
  for (; d < padded; d += 16) value_tile<type, kH, 1>(a.scores, stride, norm, a.rows, a.n_rows, d, a.dim, out);
}

// Attention of n_head queries over one list of rows that serve as keys and values:
// s_i = scale q.row_i, m = max(sink, max s_i), out = sum_i exp(s_i - m) row_i / (exp(sink - m) + sum_i exp(s_i - m)).
template <Type type>
static void attend_rows(const AttendArgs& a) {
  size_t h = 0;
  for (; h + kFloatRows <= a.n_head; h += kFloatRows) attend_heads<type, kFloatRows>(a, h);
  for (; h < a.n_head; h++) attend_heads<type, 1>(a, h);
}
static void attend(const AttendArgs& a) noexcept { if (a.plain) attend_rows<Type::F32>(a); else attend_rows<Type::F16>(a); }

// -- compressor and indexer -----------------------------------------------------

// out[d] = sum_t softmax_t(z[t][d]) k[t][d], every entry d on its own; k, z: n_slots row pointers.
static void compress(const float* const* k, const float* const* z, size_t n_slots, float* out, size_t dim) noexcept {
  for (size_t d = 0; d < dim; d += 16) {
    const size_t m = dim - d;
    f32x16 top = load_upto(z[0] + d, m);
    for (size_t t = 1; t < n_slots; t++) top = max(top, load_upto(z[t] + d, m));
    f32x16 sum = zero(), acc = zero();
    for (size_t t = 0; t < n_slots; t++) {
      const f32x16 e = exp(sub(load_upto(z[t] + d, m), top));
      sum = add(sum, e);
      acc = fma(e, load_upto(k[t] + d, m), acc);
    }
    store_upto(out + d, m, div(acc, sum));
  }
}

// Indexer queries of one token, [n_head][dim] -> [dim][align_up(n_head, 16)] so that heads lie in lanes, padding heads zero.
// Unless plain: an orthonormal Walsh-Hadamard transform in natural order, then FP4 E2M1 in blocks of 32 with power-of-two
// scales.
static void index_query(const float* q, size_t n_head, size_t dim, bool plain, float* qt) noexcept {
  const size_t width = size_t(align_up(n_head, 16));
  for (size_t k = 0; k < dim; k++)
    for (size_t h = 0; h < width; h++) qt[k * width + h] = h < n_head ? q[h * dim + k] : 0.0f;
  if (plain) return;
  const f32x16 norm = set1(1.0f / std::sqrt(float(dim)));
  for (size_t v = 0; v < width; v += 16) {
    float* y = qt + v;
    for (size_t h = 1; h < dim; h *= 2)
      for (size_t i = 0; i < dim; i += 2 * h)
        for (size_t j = i; j < i + h; j++) {
          const f32x16 a = load(y + j * width), b = load(y + (j + h) * width);
          store(y + j * width, add(a, b));
          store(y + (j + h) * width, sub(a, b));
        }
    for (size_t b = 0; b < dim; b += 32) {
      const size_t end = std::min(b + 32, dim);
      f32x16 amax = zero();
      for (size_t k = b; k < end; k++) { const f32x16 x = mul(load(y + k * width), norm); store(y + k * width, x); amax = max(amax, abs(x)); }
      float s[16], inv[16];
      store(s, amax);
      for (int l = 0; l < 16; l++) { s[l] = fp4_scale(s[l]); inv[l] = 1.0f / s[l]; }
      for (size_t k = b; k < end; k++) store(y + k * width, mul(round_to(mul(load(y + k * width), load(inv)), 6.0f, 1.0f, 0x1.8p22f), load(s)));
    }
  }
}

// One finished indexer row, the steps of index_query, stored as half; plain: float32.
static void store_index_row(const float* x, size_t dim, bool plain, void* row) noexcept {
  if (plain) return store_plain_row(x, dim, row);
  float y[16 * kMaxIndexDim];
  index_query(x, 1, dim, false, y);
  uint16_t* out = static_cast<uint16_t*>(row);
  for (size_t i = 0; i < size_t(align_up(dim, 16)); i++) out[i] = i < dim ? f32_to_f16(y[16 * i]) : uint16_t(0);
}

template <Type type, int kR>
static inline void index_score_tile(const float* qt, const float* w, size_t width, const void* const* rows, size_t dim, float* scores) {
  float x[kR][kMaxIndexDim];
  for (int r = 0; r < kR; r++)
    for (size_t k = 0; k < dim; k += 16) store(x[r] + k, load_row<type>(rows[r], k));
  f32x16 total[kR];
  DS4_UNROLL
  for (int r = 0; r < kR; r++) total[r] = zero();
  for (size_t v = 0; v < width; v += 32) {        // two vectors of heads at a time
    const bool two = v + 16 < width;
    f32x16 acc[kR][2];
    DS4_UNROLL
    for (int r = 0; r < kR; r++) acc[r][0] = acc[r][1] = zero();
    for (size_t k = 0; k < dim; k++) {
      const f32x16 q0 = in_register(load(qt + k * width + v)), q1 = in_register(two ? load(qt + k * width + v + 16) : zero());
      DS4_UNROLL
      for (int r = 0; r < kR; r++) {
        const f32x16 b = in_register(set1(x[r][k]));
        acc[r][0] = fma(q0, b, acc[r][0]);
        acc[r][1] = fma(q1, b, acc[r][1]);
      }
    }
    const f32x16 w0 = load(w + v), w1 = two ? load(w + v + 16) : zero();
    DS4_UNROLL
    for (int r = 0; r < kR; r++) {
      total[r] = fma(w0, max(acc[r][0], zero()), total[r]);
      total[r] = fma(w1, max(acc[r][1], zero()), total[r]);
    }
  }
  DS4_UNROLL
  for (int r = 0; r < kR; r++) scores[r] = reduce_add(total[r]);
}

// scores[c] = sum_h w[h] max(0, q_h . row_c) for n_rows rows; qt from index_query, w [align_up(n_head, 16)] zero-padded.
template <Type type>
static void index_rows(const float* qt, const float* w, size_t width, const uint8_t* rows, size_t stride, size_t n_rows, size_t dim, float* scores) {
  constexpr size_t kRows = DS4_PASS == 3 ? 6 : 2;                  // 2 kRows sums: on AVX2 six rows would take 24 of 16 registers
  const void* p[kRows];
  size_t i = 0;
  for (; i + kRows <= n_rows; i += kRows) {
    for (size_t r = 0; r < kRows; r++) p[r] = rows + (i + r) * stride;
    index_score_tile<type, kRows>(qt, w, width, p, dim, scores + i);
  }
  for (; i < n_rows; i++) { p[0] = rows + i * stride; index_score_tile<type, 1>(qt, w, width, p, dim, scores + i); }
}
static void index_scores(const float* qt, const float* w, size_t n_head, const uint8_t* rows, size_t stride, size_t n_rows, size_t dim, bool plain,
                         float* scores) noexcept {
  const size_t width = size_t(align_up(n_head, 16));
  if (plain) index_rows<Type::F32>(qt, w, width, rows, stride, n_rows, dim, scores);
  else index_rows<Type::F16>(qt, w, width, rows, stride, n_rows, dim, scores);
}

// -- ops for the sampler ----
// Lane masks, compaction, and weights: sixteen 64-bit integers. Comparisons with NaN are false. add_pair(s, a, b)
// adds round(a) and round(b), each below 2^31, to the total of s, in any of its lanes. pack(out, p, m) copies
// the elements of p[0..16) whose bit is set in m to out, in order, and may write all of out[0..16).
#if DS4_PASS == 3
struct mask16 { __mmask16 v; };
struct u64x16 { __m512i v[2]; };
DS4_INLINE mask16 ge(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
DS4_INLINE uint32_t bits(mask16 m) { return m.v; }
DS4_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
DS4_INLINE f32x16 shift_exponent(f32x16 p, f32x16 u) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), _mm512_slli_epi32(_mm512_castps_si512(u.v), 23)))};
}
DS4_INLINE u64x16 to_u64(f32x16 a) { return {{_mm512_cvtps_epi64(_mm512_castps512_ps256(a.v)), _mm512_cvtps_epi64(_mm512_extractf32x8_ps(a.v, 1))}}; }
DS4_INLINE u64x16 zero_u64() { return {{_mm512_setzero_si512(), _mm512_setzero_si512()}}; }
DS4_INLINE u64x16 add(u64x16 a, u64x16 b) { return {{_mm512_add_epi64(a.v[0], b.v[0]), _mm512_add_epi64(a.v[1], b.v[1])}}; }
DS4_INLINE u64x16 add_pair(u64x16 s, f32x16 a, f32x16 b) {
  const __m512i w = _mm512_add_epi32(_mm512_cvtps_epi32(a.v), _mm512_cvtps_epi32(b.v));
  return {{_mm512_add_epi64(s.v[0], _mm512_and_si512(w, _mm512_set1_epi64(0xffffffff))), _mm512_add_epi64(s.v[1], _mm512_srli_epi64(w, 32))}};
}
DS4_INLINE u64x16 only(mask16 m, u64x16 a) { return {{_mm512_maskz_mov_epi64(__mmask8(m.v), a.v[0]), _mm512_maskz_mov_epi64(__mmask8(m.v >> 8), a.v[1])}}; }
DS4_INLINE u64x16 load(const uint64_t* p) { return {{_mm512_loadu_si512(p), _mm512_loadu_si512(p + 8)}}; }
DS4_INLINE void store(uint64_t* p, u64x16 a) { _mm512_storeu_si512(p, a.v[0]); _mm512_storeu_si512(p + 8, a.v[1]); }
DS4_INLINE uint64_t total(u64x16 a) { return uint64_t(_mm512_reduce_add_epi64(_mm512_add_epi64(a.v[0], a.v[1]))); }
DS4_INLINE void pack(float* out, const float* p, uint32_t m) { _mm512_storeu_ps(out, _mm512_maskz_compress_ps(__mmask16(m), _mm512_loadu_ps(p))); }
DS4_INLINE void pack(int32_t* out, const int32_t* p, uint32_t m) {
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(__mmask16(m), _mm512_loadu_si512(p)));
}
DS4_INLINE void pack(uint64_t* out, const uint64_t* p, uint32_t m) {
  const u64x16 a = load(p);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi64(__mmask8(m), a.v[0]));
  _mm512_storeu_si512(out + __builtin_popcount(m & 0xff), _mm512_maskz_compress_epi64(__mmask8(m >> 8), a.v[1]));
}
DS4_INLINE void pack_ids(int32_t* out, int32_t first, uint32_t m) {    // ids first..first + 15 in place of p
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(__mmask16(m), _mm512_add_epi32(_mm512_set1_epi32(first), lane)));
}
#elif DS4_PASS == 2
struct mask16 { __m256 v[2]; };
struct u64x16 { __m256i v[4]; };
DS4_INLINE mask16 ge(f32x16 a, f32x16 b) { return {{_mm256_cmp_ps(a.v[0], b.v[0], _CMP_GE_OQ), _mm256_cmp_ps(a.v[1], b.v[1], _CMP_GE_OQ)}}; }
DS4_INLINE uint32_t bits(mask16 m) { return uint32_t(_mm256_movemask_ps(m.v[0])) | uint32_t(_mm256_movemask_ps(m.v[1])) << 8; }
DS4_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {{_mm256_blendv_ps(b.v[0], a.v[0], m.v[0]), _mm256_blendv_ps(b.v[1], a.v[1], m.v[1])}}; }
DS4_INLINE __m256 shift_half(__m256 p, __m256 u) { return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(u), 23))); }
DS4_INLINE f32x16 shift_exponent(f32x16 p, f32x16 u) { return {{shift_half(p.v[0], u.v[0]), shift_half(p.v[1], u.v[1])}}; }
DS4_INLINE __m256i to_u64(__m128 a) {                                      // below 2^51: the adder aligns the integer to the low bits
  const __m256d magic = _mm256_set1_pd(0x1.8p52);
  return _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(a), magic)), _mm256_castpd_si256(magic));
}
DS4_INLINE u64x16 to_u64(f32x16 a) {
  return {{to_u64(_mm256_castps256_ps128(a.v[0])), to_u64(_mm256_extractf128_ps(a.v[0], 1)), to_u64(_mm256_castps256_ps128(a.v[1])),
           to_u64(_mm256_extractf128_ps(a.v[1], 1))}};
}
DS4_INLINE u64x16 zero_u64() { const __m256i z = _mm256_setzero_si256(); return {{z, z, z, z}}; }
DS4_INLINE u64x16 add(u64x16 a, u64x16 b) { for (int i = 0; i < 4; i++) a.v[i] = _mm256_add_epi64(a.v[i], b.v[i]); return a; }
DS4_INLINE u64x16 add_pair(u64x16 s, f32x16 a, f32x16 b) {
  for (int i = 0; i < 2; i++) {
    const __m256i w = _mm256_add_epi32(_mm256_cvtps_epi32(a.v[i]), _mm256_cvtps_epi32(b.v[i]));
    s.v[2 * i] = _mm256_add_epi64(s.v[2 * i], _mm256_and_si256(w, _mm256_set1_epi64x(0xffffffff)));
    s.v[2 * i + 1] = _mm256_add_epi64(s.v[2 * i + 1], _mm256_srli_epi64(w, 32));
  }
  return s;
}
DS4_INLINE u64x16 only(mask16 m, u64x16 a) {
  for (int i = 0; i < 4; i++) {
    const __m256i h = _mm256_castps_si256(m.v[i / 2]);
    a.v[i] = _mm256_and_si256(a.v[i], _mm256_cvtepi32_epi64(i % 2 ? _mm256_extracti128_si256(h, 1) : _mm256_castsi256_si128(h)));
  }
  return a;
}
DS4_INLINE u64x16 load(const uint64_t* p) { u64x16 r; for (int i = 0; i < 4; i++) r.v[i] = _mm256_loadu_si256((const __m256i*)(p + 4 * i)); return r; }
DS4_INLINE void store(uint64_t* p, u64x16 a) { for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i*)(p + 4 * i), a.v[i]); }
DS4_INLINE uint64_t total(u64x16 a) {
  uint64_t t[4];
  _mm256_storeu_si256((__m256i*)t, _mm256_add_epi64(_mm256_add_epi64(a.v[0], a.v[1]), _mm256_add_epi64(a.v[2], a.v[3])));
  return t[0] + t[1] + t[2] + t[3];
}
struct PackTable { uint8_t lane[256][8]; };                            // [mask]: the lanes whose bit is set, in order
constexpr PackTable make_pack_table() {
  PackTable t{};
  for (int m = 0; m < 256; m++)
    for (int lane = 0, k = 0; lane < 8; lane++)
      if (m >> lane & 1) t.lane[m][k++] = uint8_t(lane);
  return t;
}
constexpr PackTable kPackTable = make_pack_table();
DS4_INLINE __m256i packed_lanes(uint32_t m) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kPackTable.lane[m & 0xff])); }
DS4_INLINE void pack(int32_t* out, const int32_t* p, uint32_t m) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 8));
  _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(a, packed_lanes(m)));
  _mm256_storeu_si256((__m256i*)(out + __builtin_popcount(m & 0xff)), _mm256_permutevar8x32_epi32(b, packed_lanes(m >> 8)));
}
DS4_INLINE void pack(float* out, const float* p, uint32_t m) {
  const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
  _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(a, packed_lanes(m)));
  _mm256_storeu_ps(out + __builtin_popcount(m & 0xff), _mm256_permutevar8x32_ps(b, packed_lanes(m >> 8)));
}
DS4_INLINE void pack(uint64_t* out, const uint64_t* p, uint32_t m) {
  for (int i = 0; i < 4; i++, m >>= 4) {                                   // every bit twice: a weight is two lanes
    const uint32_t twice = 3 * ((m & 1) | (m & 2) << 1 | (m & 4) << 2 | (m & 8) << 3);
    const __m256i a = _mm256_loadu_si256((const __m256i*)(p + 4 * i));
    _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(a, packed_lanes(twice)));
    out += __builtin_popcount(m & 15);
  }
}
DS4_INLINE void pack_ids(int32_t* out, int32_t first, uint32_t m) {
  _mm256_storeu_si256((__m256i*)out, _mm256_add_epi32(_mm256_set1_epi32(first), packed_lanes(m)));
  _mm256_storeu_si256((__m256i*)(out + __builtin_popcount(m & 0xff)), _mm256_add_epi32(_mm256_set1_epi32(first + 8), packed_lanes(m >> 8)));
}
#else
#if DS4_PASS == 1
struct mask16 { uint32x4_t v[4]; };
struct u64x16 { uint64x2_t v[8]; };
DS4_INLINE mask16 ge(f32x16 a, f32x16 b) { mask16 r; for (int i = 0; i < 4; i++) r.v[i] = vcgeq_f32(a.v[i], b.v[i]); return r; }
DS4_INLINE uint32_t bits(mask16 m) {
  const uint32x4_t bit = {1, 2, 4, 8};
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= vaddvq_u32(vandq_u32(m.v[i], bit)) << (4 * i);
  return r;
}
DS4_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { for (int i = 0; i < 4; i++) a.v[i] = vbslq_f32(m.v[i], a.v[i], b.v[i]); return a; }
DS4_INLINE f32x16 shift_exponent(f32x16 p, f32x16 u) {
  for (int i = 0; i < 4; i++) p.v[i] = vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p.v[i]), vshlq_n_u32(vreinterpretq_u32_f32(u.v[i]), 23)));
  return p;
}
DS4_INLINE u64x16 to_u64(f32x16 a) {
  u64x16 r;
  for (int i = 0; i < 4; i++) {
    r.v[2 * i] = vcvtnq_u64_f64(vcvt_f64_f32(vget_low_f32(a.v[i])));
    r.v[2 * i + 1] = vcvtnq_u64_f64(vcvt_high_f64_f32(a.v[i]));
  }
  return r;
}
DS4_INLINE u64x16 zero_u64() { u64x16 r; for (uint64x2_t& x : r.v) x = vdupq_n_u64(0); return r; }
DS4_INLINE u64x16 add(u64x16 a, u64x16 b) { for (int i = 0; i < 8; i++) a.v[i] = vaddq_u64(a.v[i], b.v[i]); return a; }
DS4_INLINE u64x16 add_pair(u64x16 s, f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; i++) s.v[i] = vpadalq_u32(s.v[i], vaddq_u32(vcvtnq_u32_f32(a.v[i]), vcvtnq_u32_f32(b.v[i])));
  return s;
}
DS4_INLINE u64x16 only(mask16 m, u64x16 a) {
  for (int i = 0; i < 4; i++) {
    const int32x4_t h = vreinterpretq_s32_u32(m.v[i]);
    a.v[2 * i] = vandq_u64(a.v[2 * i], vreinterpretq_u64_s64(vmovl_s32(vget_low_s32(h))));
    a.v[2 * i + 1] = vandq_u64(a.v[2 * i + 1], vreinterpretq_u64_s64(vmovl_high_s32(h)));
  }
  return a;
}
DS4_INLINE u64x16 load(const uint64_t* p) { u64x16 r; for (int i = 0; i < 8; i++) r.v[i] = vld1q_u64(p + 2 * i); return r; }
DS4_INLINE void store(uint64_t* p, u64x16 a) { for (int i = 0; i < 8; i++) vst1q_u64(p + 2 * i, a.v[i]); }
DS4_INLINE uint64_t total(u64x16 a) { uint64_t t = 0; for (uint64x2_t x : a.v) t += vaddvq_u64(x); return t; }
#else  // scalar
struct mask16 { uint32_t v; };
struct u64x16 { uint64_t v[16]; };
DS4_INLINE mask16 ge(f32x16 a, f32x16 b) { mask16 r{0}; for (int i = 0; i < 16; i++) r.v |= uint32_t(a.v[i] >= b.v[i]) << i; return r; }
DS4_INLINE uint32_t bits(mask16 m) { return m.v; }
DS4_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) { for (int i = 0; i < 16; i++) a.v[i] = m.v >> i & 1 ? a.v[i] : b.v[i]; return a; }
DS4_INLINE f32x16 shift_exponent(f32x16 p, f32x16 u) {                     // p 2^n, where u = 1.5 2^23 + n
  for (int i = 0; i < 16; i++) p.v[i] = bit_cast<float>(bit_cast<uint32_t>(p.v[i]) + (bit_cast<uint32_t>(u.v[i]) << 23));
  return p;
}
DS4_INLINE u64x16 to_u64(f32x16 a) { u64x16 r; for (int i = 0; i < 16; i++) r.v[i] = uint64_t(std::nearbyint(a.v[i])); return r; }   // ties to even
DS4_INLINE u64x16 zero_u64() { return {{}}; }
DS4_INLINE u64x16 add(u64x16 a, u64x16 b) { for (int i = 0; i < 16; i++) a.v[i] += b.v[i]; return a; }
DS4_INLINE u64x16 add_pair(u64x16 s, f32x16 a, f32x16 b) { return add(s, add(to_u64(a), to_u64(b))); }
DS4_INLINE u64x16 only(mask16 m, u64x16 a) { for (int i = 0; i < 16; i++) a.v[i] = m.v >> i & 1 ? a.v[i] : 0; return a; }
DS4_INLINE u64x16 load(const uint64_t* p) { u64x16 r; std::memcpy(r.v, p, sizeof r.v); return r; }
DS4_INLINE void store(uint64_t* p, u64x16 a) { std::memcpy(p, a.v, sizeof a.v); }
DS4_INLINE uint64_t total(u64x16 a) { uint64_t t = 0; for (uint64_t x : a.v) t += x; return t; }
#endif
template <class T>
DS4_INLINE void pack(T* out, const T* p, uint32_t m) { for (; m; m &= m - 1) *out++ = p[__builtin_ctz(m)]; }
DS4_INLINE void pack_ids(int32_t* out, int32_t first, uint32_t m) { for (; m; m &= m - 1) *out++ = first + __builtin_ctz(m); }
#endif

// -- sampling ----
// The passes over logits that section 16 is made of. Beside the largest logit `top`, a candidate with logit l weighs
//   W = round(2^40 exp((l - top) / T)),   0 <= W <= 2^40,   W(top) = 2^40,
// an integer. Sums of integers are exact, hence the same in any order: top-p and the draw compare sums made over
// lanes, blocks and lists, and all of them agree on every ISA. Lanes and folds of floats would not.

// The weights of sixteen logits before rounding; scale = log2(e) / T, floor = -42 / scale. With (l - top) scale = n + r,
// |r| <= 1/2, this is 2^n p(r), p the minimax polynomial of 2^40 2^r with p(0) = 2^40 (relative error 4.4e-7). It rounds
// to 0 from the floor on, and for -inf and NaN.
DS4_INLINE f32x16 weights_of(f32x16 l, f32x16 top, f32x16 scale, f32x16 floor) {
  const f32x16 magic = set1(0x1.8p23f);                        // its unit in the last place is 1: adding it rounds to n
  const f32x16 d = max(sub(l, top), floor), u = fma(d, scale, magic), r = fma(d, scale, sub(magic, u));
  f32x16 p = set1(0x1.23a608p30f);
  p = fma(p, r, set1(0x1.3cbea8p33f));
  p = fma(p, r, set1(0x1.c74322p35f));
  p = fma(p, r, set1(0x1.ebfa4ep37f));
  p = fma(p, r, set1(0x1.62e39ep39f));
  p = fma(p, r, set1(0x1p40f));
  return shift_exponent(p, u);
}

// p[0..16), with -inf from n on.
DS4_INLINE f32x16 load_or_floor(const float* p, size_t n) {
  if (n >= 16) return load(p);
  float x[16];
  for (size_t i = 0; i < 16; i++) x[i] = i < n ? p[i] : -INFINITY;
  return load(x);
}

// out[b] = the largest of x[256 b .. 256 b + 256), the last block may be short. NaN is passed over; -inf if nothing is left.
static void block_max(const float* x, size_t n, float* out) noexcept {
  for (; n >= 256; n -= 256, x += 256) {
    f32x16 m[4];
    for (size_t j = 0; j < 4; j++) m[j] = max(load(x + 16 * j), set1(-INFINITY));
    for (size_t i = 64; i < 256; i += 64)
      for (size_t j = 0; j < 4; j++) m[j] = max(load(x + i + 16 * j), m[j]);
    *out++ = reduce_max(max(max(m[0], m[1]), max(m[2], m[3])));
  }
  if (n == 0) return;
  f32x16 m = set1(-INFINITY);
  for (size_t i = 0; i < n; i += 16) m = max(load_or_floor(x + i, n - i), m);
  *out = reduce_max(m);
}

// out[b] = the sum of the weights of block b of 256 logits, whose largest is maxima[b] <= top.
static void block_mass(const float* x, size_t n, const float* maxima, float top, float scale, uint64_t* out) noexcept {
  const f32x16 t = set1(top), s = set1(scale), f = set1(-42.0f / scale);
  for (; n > 0; x += 256) {
    const size_t len = n < 256 ? n : 256;
    u64x16 sum = zero_u64();
    if (len == 256 && (*maxima++ - top) * scale < -10) {         // nearly every block: no weight reaches 2^31
      for (size_t i = 0; i < 256; i += 32) sum = add_pair(sum, weights_of(load(x + i), t, s, f), weights_of(load(x + i + 16), t, s, f));
    } else {
      for (size_t i = 0; i < len; i += 16) sum = add(sum, to_u64(weights_of(load_or_floor(x + i, len - i), t, s, f)));
    }
    *out++ = total(sum);
    n -= len;
  }
}

// w[i] = weight of v[i]; returns their sum. w has room for n rounded up to 16.
static uint64_t weigh(const float* v, size_t n, float top, float scale, uint64_t* w) noexcept {
  const f32x16 t = set1(top), s = set1(scale), f = set1(-42.0f / scale);
  u64x16 sum = zero_u64();
  for (size_t i = 0; i < n; i += 16) {
    const u64x16 k = to_u64(weights_of(load_or_floor(v + i, n - i), t, s, f));
    store(w + i, k);
    sum = add(sum, k);
  }
  return total(sum);
}

// The elements of x[0..n) that are >= cut, as (first + index, value) in id and v, which have 16 elements to spare.
// Returns how many. Without a branch on the data: where a good part passes, a branch would be mispredicted all the time.
static size_t collect(const float* x, size_t n, int32_t first, float cut, int32_t* id, float* v) noexcept {
  const f32x16 c = set1(cut);
  size_t k = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const uint32_t m = bits(ge(load(x + i), c));
    pack(v + k, x + i, m);
    pack_ids(id + k, first + int32_t(i), m);
    k += size_t(__builtin_popcount(m));
  }
  for (; i < n; i++)
    if (x[i] >= cut) { id[k] = first + int32_t(i); v[k++] = x[i]; }
  return k;
}

// Keeps, in place and in order, the pairs (v, payload) with lo <= v <= hi; returns how many. Both arrays have 16 to spare, and
// lo is above -inf, with which a short vector is filled up.
template <class T>
static size_t keep(float* v, T* payload, size_t n, float lo, float hi) noexcept {
  const f32x16 l = set1(lo), h = set1(hi);
  size_t k = 0;
  for (size_t i = 0; i < n; i += 16) {
    const f32x16 x = load_or_floor(v + i, n - i);
    const uint32_t m = bits(ge(x, l)) & bits(ge(h, x));
    pack(v + k, v + i, m);
    pack(payload + k, payload + i, m);
    k += size_t(__builtin_popcount(m));
  }
  return k;
}

// Returns the sum of w over the elements with v >= cut, which is above -inf; *above is the smallest v >= cut, *below the largest
// v < cut.
static uint64_t split(const float* v, const uint64_t* w, size_t n, float cut, float* above, float* below) noexcept {
  const f32x16 c = set1(cut), inf = set1(INFINITY), floor = set1(-INFINITY);
  u64x16 sum = zero_u64();
  f32x16 a = inf, b = floor;
  for (size_t i = 0; i < n; i += 16) {
    const f32x16 x = load_or_floor(v + i, n - i);
    const mask16 m = ge(x, c);
    sum = add(sum, only(m, load(w + i)));
    a = min(a, select(m, x, inf));
    b = max(b, select(m, floor, x));
  }
  *above = -reduce_max(sub(set1(0.0f), a));
  *below = reduce_max(b);
  return total(sum);
}

}  // namespace

const Kernels kernels = {DS4_STR(DS4_ISA), dequantize, quantize, matmul_int8, matmul_float,
                         sum_squares, rms_norm, hc_mix, hc_update, add_to, swiglu, router_scores, rope, store_kv_row, attend, compress, store_index_row, index_query, index_scores,
                         block_max, block_mass, weigh, collect, keep<int32_t>, keep<uint64_t>, split};

}  // namespace DS4_ISA
}  // namespace ds4
#if DS4_PASS >= 2
DS4_TARGET_POP
#endif
#undef DS4_ISA
#undef DS4_PASS

#ifdef DS4_MAIN_PASS             // the first pass comes here once: the other ISAs, then everything else
#undef DS4_MAIN_PASS

// =============================================================================
// 6. DISPATCH — sections 4 and 5 once per ISA, one table of kernels each, the choice among them.   uses: 5
// =============================================================================
// The file includes itself by its name; only sections 4 and 5 are not skipped then. DS4_SCALAR_ONLY leaves the other
// instruction sets out: a portable build, and one that compiles in a fraction of the time (fuzzing).

#if defined(DS4_SCALAR_ONLY)
#elif defined(__aarch64__)
#define DS4_PASS 1
#include "ds4.cpp"
#elif defined(__x86_64__)
#define DS4_PASS 2
#include "ds4.cpp"
#define DS4_PASS 3
#include "ds4.cpp"
#endif

namespace ds4 {

// The tables this CPU can run: scalar first, the fastest last. All give the same bits.
static std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> all{&scalar::kernels};
#if defined(DS4_SCALAR_ONLY)
#elif defined(__aarch64__)
  all.push_back(&neon::kernels);
#elif defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");            // these CPUs have F16C
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (avx2) all.push_back(&avx2::kernels);
  if (avx2 && avx512) all.push_back(&avx512::kernels);
#endif
  return all;
}
static const Kernels* best_kernels() { return usable_kernels().back(); }

// Null: no such ISA, or not on this CPU.
static const Kernels* find_kernels(std::string_view isa) {
  for (const Kernels* k : usable_kernels())
    if (isa == k->name) return k;
  return nullptr;
}

}  // namespace ds4

// =============================================================================
// 7. THREADS — one pool, dynamic chunks, robust to a busy core.   uses: 1
// =============================================================================
// In: a number of chunks and a function. Out: every chunk done once: each thread has a run of neighbours and helps the others
// after it. A token of Flash is some 475 such jobs (11 a layer) of 0.02 to 2 ms, so workers spin between jobs and sleep only when
// nothing comes.
// Results never depend on who did what.

namespace ds4 {

static DS4_INLINE void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Blocks or unblocks (SIG_BLOCK, SIG_UNBLOCK) for this thread what the thread at the terminal waits for.
static void mask_terminal_signals(int how) {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGCONT, SIGWINCH}) sigaddset(&set, signal);
  pthread_sigmask(how, &set, nullptr);
}

// A place where one thread waits for another: spins for a while, then sleeps.
class Parker {
 public:
  // Returns when ready() is true; ready reads atomics with seq_cst and whoever makes it true calls wake() afterwards.
  // Sets *slept before it sleeps.
  template <class Ready>
  void wait(const Ready& ready, double spin_seconds, std::atomic<bool>* slept = nullptr) {
    const double until = now_seconds() + spin_seconds;
    do {
      for (int i = 0; i < 64; i++) {
        if (ready()) return;
        spin_pause();
      }
    } while (now_seconds() < until);
    if (slept) *slept = true;
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_ = true;                          // seq_cst: either ready() below sees the change, or wake() sees asleep_
    while (!ready()) wakeup_.wait(lock);
    asleep_ = false;
  }
  void wake() {
    if (!asleep_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wakeup_.notify_one();
  }

 private:
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  std::condition_variable wakeup_;
};

class ThreadPool {
 public:
  // n - 1 workers; the caller of run() is the n-th thread.
  explicit ThreadPool(int n_threads) : n_threads_(std::max(1, n_threads)), workers_(new Worker[size_t(n_threads_)]) {
    for (int i = 1; i < n_threads_; i++) {
      try {
        workers_[i].thread = std::thread([this, i] { work(i); });
      } catch (const std::system_error& e) {
        warn("only %d of %d threads could be started: %s", i, n_threads_, e.what());
        n_threads_ = i;
      }
    }
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    quit_ = true;
    for (int i = 1; i < n_threads_; i++) {
      workers_[i].parker.wake();
      workers_[i].thread.join();
    }
  }
  int size() const { return n_threads_; }

  // Calls f(chunk, thread) once for every chunk in [0, n_chunks), thread in [0, size()); returns when all are done.
  // Each thread has a run of neighbouring chunks, in ascending order, so that what it prefetches behind a chunk is mostly
  // its own next one; who is done with his own takes from the others'. No allocation; f must not throw and not call run().
  template <class F>
  void run(size_t n_chunks, const F& f) {
    if (n_threads_ == 1 || n_chunks <= 1) {
      for (size_t c = 0; c < n_chunks; c++) f(c, 0);
      return;
    }
    n_chunks_ = n_chunks;
    context_ = &f;
    call_ = [](const void* context, size_t chunk, int thread) { (*static_cast<const F*>(context))(chunk, thread); };
    run_job();
  }

 private:
  // All in seconds. A scheduler slice is 3 to 4 ms, a decode chunk 0.01 to 0.1 ms.
  static constexpr double kSpin = 100e-6;            // of an idle worker, and of the caller waiting for the last chunks
  static constexpr double kStall = 300e-6;           // a worker later than this plus two chunks was preempted
  static constexpr double kCredit = 5e-3;            // most a worker can lose at once without consequences
  static constexpr double kGain = 0.4;               // what the workers earn per second of work, together
  static constexpr double kFirstBench = 10e-3, kLongestBench = 320e-3;

  // Another program on a worker's core makes the scheduler take the core away for a slice at a time, with a chunk half
  // done and everybody waiting. So each worker has an account: it earns its share while it works (a second thread makes
  // decoding at least a fifth faster, memory being the limit), it pays for the time others waited for it. Overdrawn, it
  // sits on the bench, asleep, for a while that doubles each time until an account is full again: probing a core that
  // stays busy costs one slice in kLongestBench, and one slice lost now and then costs nothing.
  struct alignas(64) Worker {
    std::atomic<size_t> unclaimed{0};        // chunks of its part that nobody has taken yet; the next is end - unclaimed
    size_t end = 0;                          // of its part
    std::atomic<bool> benched{false};
    std::atomic<double> finished{0};         // when, if the caller was asleep waiting for it
    double credit = kCredit;                 // this and the next two belong to the caller
    double bench_seconds = kFirstBench;      // how long next time
    double until = 0;                        // when it leaves the bench
    long page_faults = 0;                    // from disk, at the last count; the worker's
    Parker parker;
    std::thread thread;
  };

  void run_job() {
    const double begin = now_seconds();
    size_t n_active = 1;
    for (int i = 1; i < n_threads_; i++) {
      Worker& w = workers_[i];
      if (w.benched && begin >= w.until) w.benched = false;
      n_active += !w.benched;
    }
    open_ = n_chunks_;
    size_t part = 0, first = 0;
    for (int i = 0; i < n_threads_; i++) {
      Worker& w = workers_[i];
      if (w.benched) continue;               // its part is empty since the last job
      w.end = ceil_div(n_chunks_ * ++part, n_active);        // the caller has the first
      w.unclaimed = w.end - first;
      first = w.end;
    }
    job_++;                                  // seq_cst, pairs with the sleep of a worker
    for (int i = 1; i < n_threads_; i++)
      if (!workers_[i].benched) workers_[i].parker.wake();
    const size_t n_mine = work_off(0);
    const double idle_from = now_seconds();
    if (open_ != 0) wait_for_the_last(idle_from, n_mine ? (idle_from - begin) / double(n_mine) : HUGE_VAL);
    const double earned = (idle_from - begin) * kGain / n_threads_;
    for (int i = 1; i < n_threads_; i++) {
      Worker& w = workers_[i];
      if (w.benched) continue;
      w.credit = std::min(kCredit, w.credit + earned);
      if (w.credit == kCredit) w.bench_seconds = kFirstBench;
    }
  }

  // Takes chunks until none is left, first from its own part; returns how many.
  size_t work_off(int thread) {
    size_t n_done = 0;
    for (int i = 0; i < n_threads_; i++) {
      Worker& w = workers_[(thread + i) % n_threads_];
      for (size_t left = w.unclaimed; left > 0;) {
        if (!w.unclaimed.compare_exchange_weak(left, left - 1)) continue;
        // The claimed chunk keeps the job alive: its fields cannot change before open_ is down to 0.
        call_(context_, w.end - left, thread);
        n_done++;
        left = w.unclaimed;
      }
    }
    if (n_done == 0) return 0;
    if (thread != 0 && caller_waits_) note_finish(workers_[thread]);
    if (open_.fetch_sub(n_done) == n_done && thread != 0) caller_.wake();
    return n_done;
  }

  void work(int thread) {
    mask_terminal_signals(SIG_BLOCK);
    Worker& me = workers_[thread];
    for (uint64_t seen = 0; !quit_;) {
      me.parker.wait([&] { return quit_ || (job_ != seen && !me.benched); }, me.benched ? 0 : kSpin);
      seen = job_;
      work_off(thread);
    }
  }

  // The caller has nothing left to do since idle_from; a chunk took it own_chunk (infinite: it had none, so nobody is late).
  // Waits for the workers and charges those that were late.
  void wait_for_the_last(double idle_from, double own_chunk) {
    caller_.wait([&] { return open_ == 0; }, kSpin, &caller_waits_);
    if (!caller_waits_) return;
    caller_waits_ = false;
    const double due = idle_from + 2 * own_chunk;
    for (int i = 1; i < n_threads_; i++) {
      Worker& w = workers_[i];
      if (w.finished <= due + kStall) continue;
      w.credit -= w.finished - due;
      if (w.credit >= 0) continue;
      w.credit = 0;
      w.benched = true;
      w.until = w.finished + w.bench_seconds;
      w.bench_seconds = std::min(2 * w.bench_seconds, kLongestBench);
    }
  }

  // A worker that was held up by reading its weights from disk was not preempted: it is as good as any other.
  static void note_finish(Worker& me) {
    double finished = now_seconds();
#if defined(RUSAGE_THREAD)
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) {
      if (usage.ru_majflt != me.page_faults) finished = 0;
      me.page_faults = usage.ru_majflt;
    }
#endif
    me.finished = finished;
  }

  int n_threads_;
  std::unique_ptr<Worker[]> workers_;        // [0] is the caller's: only its part is used
  std::atomic<bool> quit_{false};
  // The job: plain fields are written before the parts' unclaimed and read after a claim.
  size_t n_chunks_ = 0;
  const void* context_ = nullptr;
  void (*call_)(const void*, size_t, int) = nullptr;
  alignas(64) std::atomic<uint64_t> job_{0};         // number of the last job
  alignas(64) std::atomic<size_t> open_{0};          // chunks not finished yet
  std::atomic<bool> caller_waits_{false};            // asleep: workers note when they finish
  Parker caller_;
};

// -- how many threads ----

// First line of a small file, empty if it cannot be read.
static std::string read_line(const std::string& path) {
  std::string line;
  if (std::FILE* f = std::fopen(path.c_str(), "re")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof buffer, f)) line = buffer;
    std::fclose(f);
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.pop_back();
  return line;
}

// CPUs that one control group grants: v2 "cpu.max" = "QUOTA PERIOD" or "max PERIOD", v1 two files, quota -1: no limit.
// Infinity if there is no limit.
static double cgroup_cpus(const std::string& dir) {
  double quota = -1, period = 0;
  if (std::sscanf(read_line(dir + "/cpu.max").c_str(), "%lf %lf", &quota, &period) != 2) {
    quota = std::atof(read_line(dir + "/cpu.cfs_quota_us").c_str());
    period = std::atof(read_line(dir + "/cpu.cfs_period_us").c_str());
  }
  return quota > 0 && period > 0 ? quota / period : HUGE_VAL;
}

// The tightest limit of the groups this process is in and their parents. `self` lists lines "N:controllers:/path"
// (/proc/self/cgroup); `root` is where the hierarchies are mounted (/sys/fs/cgroup). In a container the path may not
// exist below root: then root itself is the group.
static double cgroup_cpu_limit(const std::string& self, const std::string& root) {
  double limit = HUGE_VAL;
  std::FILE* f = std::fopen(self.c_str(), "re");
  if (!f) return limit;
  char line[4096];
  while (std::fgets(line, sizeof line, f)) {
    const char* controllers = std::strchr(line, ':');
    const char* path = controllers ? std::strchr(controllers + 1, ':') : nullptr;
    if (!path) continue;
    const std::string list = "," + std::string(controllers + 1, path) + ",";
    std::string group(path + 1, std::strcspn(path + 1, "\n"));
    std::vector<std::string> mounts;
    if (list == ",,") mounts = {root, root + "/unified"};
    else if (list.find(",cpu,") != std::string::npos) mounts = {root + "/cpu", root + "/cpu,cpuacct"};
    for (const std::string& mount : mounts) {
      for (std::string at = group;; at.resize(at.rfind('/'))) {
        limit = std::min(limit, cgroup_cpus(mount + at));
        if (at.find('/') == std::string::npos) break;
      }
    }
  }
  std::fclose(f);
  return limit;
}

// Physical cores this process may use: its affinity mask with SMT siblings counted once, at most the cgroup's CPU quota.
static int physical_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return int(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::string> cores;            // sibling lists seen
  int n = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    const std::string siblings = read_line(format("/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu));
    if (!siblings.empty() && std::find(cores.begin(), cores.end(), siblings) != cores.end()) continue;
    cores.push_back(siblings);
    n++;
  }
  const double limit = cgroup_cpu_limit("/proc/self/cgroup", "/sys/fs/cgroup");
  return std::max(1, limit < n ? int(limit) : n);
}

}  // namespace ds4

// =============================================================================
// 8. GGUF — map the file, index metadata and tensors.   uses: 1 2 3
// =============================================================================
// In: a path, to a GGUF v2/v3 file or to any shard of a split one. Out: metadata values and tensors that are views into
// the mapping, found by hash. The file may come from a stranger: every count, length, type, dimension and offset is
// compared with what is left of the file before it is used, so nothing that leaves this section points outside it.

namespace ds4 {

// A name from a file, safe to print: all but printable ASCII becomes \xNN, long names end in "...".
static std::string printable(std::string_view s, size_t max_bytes = 96) {
  std::string out;
  for (size_t i = 0; i < s.size() && i < max_bytes; i++) {
    const uint8_t c = uint8_t(s[i]);
    if (c < 0x20 || c >= 0x7f) out += format("\\x%02x", c);
    else out += char(c);
  }
  return s.size() > max_bytes ? out + "..." : out;
}

// -- mapping ----

struct GgufOptions {
  bool no_mmap = false;          // read the file into memory instead of mapping it
  bool mlock = false;            // keep every page resident; a warning if the system refuses
  bool warm = false;             // read all of it now, into large pages where the system has them
};

// Tells the system that [p, p + n) is needed soon, so that it starts reading. Never fails.
static void prefetch_pages(const void* p, size_t n) {
  if (n == 0) return;
  static const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = uintptr_t(p) & ~(page - 1), end = uintptr_t(p) + n;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

// Keeps [p, p + n) in memory. False (errno tells why) if the system refuses.
static bool lock_pages(const void* p, size_t n) { return n == 0 || mlock(p, n) == 0; }

// A mapped file that shrinks, or a disk that fails, raises SIGBUS at some load deep in a kernel. The handler knows the
// mapped ranges and turns it into a message. Slots are claimed and released by MappedFile only.
struct FaultRange {
  std::atomic<uintptr_t> begin{0}, end{0};
  char path[256] = {};
};
static FaultRange g_fault_ranges[64];

static void on_sigbus(int sig, siginfo_t* info, void*) {
  const uintptr_t at = uintptr_t(info->si_addr);
  for (const FaultRange& r : g_fault_ranges) {
    if (at < r.begin.load() || at >= r.end.load()) continue;
    char line[400];
    size_t n = 0;
    auto put = [&](const char* s) { while (*s && n < sizeof line - 1) line[n++] = *s++; };
    char digits[24] = {};
    char* d = digits + sizeof digits - 1;
    for (uintptr_t v = at - r.begin.load(), more = 1; more; v /= 10, more = v) *--d = char('0' + v % 10);
    put("ds4: ");
    put(r.path);
    put(": cannot read at offset ");
    put(d);
    put(": the file was cut short or its disk failed while it was in use\n");
    if (write(2, line, n) < 0) _exit(kExitBadInput);
    _exit(kExitBadInput);
  }
  signal(sig, SIG_DFL);          // not ours: the load faults again and the default action follows
}

// The bytes of one file, read-only: mapped, or read into anonymous memory.
class MappedFile {
 public:
  MappedFile(const std::string& path, const GgufOptions& options) : path_(path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);      // NONBLOCK: a pipe must not hang us
    if (fd < 0) fail("cannot open %s: %s", path.c_str(), std::strerror(errno));
    struct Closer {
      int fd;
      ~Closer() { if (fd >= 0) close(fd); }
    } closer{fd};
    struct stat st;
    if (fstat(fd, &st) != 0) fail("cannot stat %s: %s", path.c_str(), std::strerror(errno));
    if (S_ISDIR(st.st_mode)) fail("%s is a directory, expected a GGUF file", path.c_str());
    if (!S_ISREG(st.st_mode)) fail("%s is not a regular file, expected a GGUF file", path.c_str());
    if (st.st_size == 0) fail("%s is empty, expected a GGUF file", path.c_str());
    size_ = size_t(st.st_size);
    if (options.no_mmap) read_all(fd);
    else map(fd);
    if (options.warm && !options.no_mmap) fd_ = std::exchange(closer.fd, -1);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (slot_) {
      slot_->end = 0;
      slot_->begin = 0;
    }
    if (data_) munmap(const_cast<uint8_t*>(data_), size_);
    if (fd_ >= 0) close(fd_);
  }

  // Asks for pages of 2 MB. Where a file can lie in memory in such pieces, reading weights costs a third less time (address
  // translation); for a model that does not fit into memory, pieces that large would be wrong.
  void use_large_pages() { large_pages_ = want_large_pages(const_cast<uint8_t*>(data_), size_); }

  // Reads every page. What another program wrote or read before can lie in memory in pages of 4 kB, and the system may have
  // split pages of 2 MB. Where files can have those, a piece with small pages is dropped and read again, unless that does not
  // help. The pages are then in memory but not mapped: each costs a fault at its first use.
  void warm() {
    constexpr size_t kPiece = 32 * kLargePage;
    const auto unmap_pages = [&](size_t at, size_t n) { madvise(const_cast<uint8_t*>(data_) + at, n, MADV_DONTNEED); };
    bool renew = large_pages_;
    if (renew) fdatasync(fd_);                   // pages that are not on disk yet are not dropped
    if (renew) unmap_pages(0, size_);            // large_page_bytes() then sees one piece at a time, and is fast
    for (size_t at = 0; at < size_; at += kPiece) {
      const size_t n = std::min(size_ - at, kPiece);
      touch(at, n);
      if (!renew) continue;
      const size_t large = large_page_bytes();
      unmap_pages(at, n);
      if (large >= n / kLargePage * kLargePage) continue;
      posix_fadvise(fd_, off_t(at), off_t(n), POSIX_FADV_DONTNEED);
      touch(at, n);
      renew = large_page_bytes() > large || large >= n / 2;    // not on every system or file; a single page may be in use elsewhere
      unmap_pages(at, n);
    }
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

  // Keeps every page in memory, or says that it cannot.
  void lock() const {
    if (!lock_pages(data_, size_))
      warn("%s: cannot keep %.1f GB in memory: %s (see ulimit -l)", path_.c_str(), double(size_) / 1e9, std::strerror(errno));
  }

  const std::string& path() const { return path_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void map(int fd) {
    void* p = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) fail("cannot map %s: %s", path_.c_str(), std::strerror(errno));
    data_ = static_cast<const uint8_t*>(p);
    watch();
  }

  void touch(size_t at, size_t n) const {
    static const size_t page = size_t(sysconf(_SC_PAGESIZE));
    if (!large_pages_) prefetch_pages(data_ + at, n);        // reads ahead into small pages
    for (size_t end = at + n; at < end; at += page) (void)*static_cast<const volatile uint8_t*>(data_ + at);
  }

  // How much of the mapping is reached by one translation for each 2 MB; 0 where the system does not tell.
  size_t large_page_bytes() const {
    std::FILE* f = std::fopen("/proc/self/smaps", "re");
    if (!f) return 0;
    size_t kb = 0, field;
    char line[512];
    for (bool ours = false; std::fgets(line, sizeof line, f);) {
      unsigned long long begin, end;
      if (std::sscanf(line, "%llx-%llx ", &begin, &end) == 2) ours = begin >= uintptr_t(data_) && begin < uintptr_t(data_) + size_;
      else if (ours && std::sscanf(line, "FilePmdMapped: %zu", &field) == 1) kb += field;
    }
    std::fclose(f);
    return kb * 1024;
  }

  void read_all(int fd) {
    void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail("no memory for %s: %.1f GB wanted", path_.c_str(), double(size_) / 1e9);
    data_ = static_cast<const uint8_t*>(p);
    want_large_pages(p, size_);
    for (size_t at = 0; at < size_;) {
      const ssize_t n = pread(fd, static_cast<char*>(p) + at, std::min(size_ - at, size_t(1) << 28), off_t(at));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        const std::string why = n < 0 ? std::strerror(errno) : "the file was cut short";
        munmap(p, size_);        // no destructor after a throwing constructor
        fail("cannot read %s at offset %zu: %s", path_.c_str(), at, why.c_str());
      }
      at += size_t(n);
    }
    mprotect(p, size_, PROT_READ);
  }

  // Makes a fault in this mapping a message instead of a crash.
  void watch() {
    static const bool installed = [] {
      struct sigaction action = {};
      action.sa_sigaction = on_sigbus;
      action.sa_flags = SA_SIGINFO;
      return sigaction(SIGBUS, &action, nullptr) == 0;
    }();
    if (!installed) return;
    for (FaultRange& r : g_fault_ranges) {
      uintptr_t free_slot = 0;
      if (!r.begin.compare_exchange_strong(free_slot, uintptr_t(data_))) continue;
      const size_t n = std::min(path_.size(), sizeof r.path - 1);
      std::memcpy(r.path, path_.data(), n);
      r.path[n] = '\0';
      r.end = uintptr_t(data_) + size_;
      slot_ = &r;
      return;
    }
  }

  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;                  // kept for warm()
  bool large_pages_ = false;     // asked for
  FaultRange* slot_ = nullptr;
};

// -- reading ----

enum class ValueType : uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64 };

// Bytes of a fixed-size value; 0 for strings, arrays and unknown types.
static uint32_t value_bytes(ValueType t) {
  static const uint8_t kBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  return uint32_t(t) < sizeof kBytes ? kBytes[uint32_t(t)] : 0;
}
// Of a type that was read: those are known.
static const char* value_type_name(ValueType t) {
  static const char* const kNames[] = {"u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};
  return kNames[uint32_t(t)];
}

// Reads forward through one file. The first read past the end throws, naming the file, the offset and what was wanted.
class Cursor {
 public:
  explicit Cursor(const MappedFile& file) : file_(file), at_(file.data()), end_(file.data() + file.size()) {}
  size_t offset() const { return size_t(at_ - file_.data()); }
  size_t left() const { return size_t(end_ - at_); }
  const uint8_t* here() const { return at_; }

  template <class T>
  T read(const char* what) {
    const uint8_t* p = skip(sizeof(T), what);
    return load_le<T>(p);
  }
  // u64 length, then the bytes.
  std::string_view read_string(const char* what) {
    const uint64_t n = read<uint64_t>(what);
    if (n > left()) {
      fail("%s: %s at offset %zu is %llu bytes long, but only %zu bytes are left (truncated?)", file_.path().c_str(), what, offset() - 8,
           ull(n), left());
    }
    return {reinterpret_cast<const char*>(skip(n, what)), size_t(n)};
  }
  const uint8_t* skip(uint64_t n, const char* what) {
    if (n > left()) {
      fail("%s: truncated at byte %zu: %s at offset %zu needs %llu bytes, %zu are left", file_.path().c_str(), file_.size(), what, offset(),
           ull(n), left());
    }
    const uint8_t* p = at_;
    at_ += n;
    return p;
  }
  // A count of things that take at least `min_bytes` each: refused before anything is allocated for them.
  uint64_t check_count(uint64_t n, uint64_t min_bytes, const char* what) const {
    if (n > left() / min_bytes) {
      fail("%s: %s is %llu, but the %zu bytes left after offset %zu hold at most %llu (truncated or damaged?)", file_.path().c_str(), what,
           ull(n), left(), offset(), ull(left() / min_bytes));
    }
    return n;
  }

 private:
  const MappedFile& file_;
  const uint8_t* at_;
  const uint8_t* end_;
};

// Array of strings in the mapping: iterate once from the front, each step reads one length. Checked when the file was loaded.
class StringArray {
 public:
  struct Iterator {
    const uint8_t* at;
    size_t index;
    std::string_view operator*() const { return {reinterpret_cast<const char*>(at + 8), size_t(load_le<uint64_t>(at))}; }
    Iterator& operator++() {
      at += 8 + load_le<uint64_t>(at);
      index++;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return index != other.index; }
  };
  StringArray(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  size_t size() const { return size_; }
  Iterator begin() const { return {data_, 0}; }
  Iterator end() const { return {nullptr, size_}; }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Hash index over names that are stored elsewhere: FNV-1a, open addressing, at most half full.
class NameIndex {
 public:
  // Indexes names name_of(0) .. name_of(n - 1). Returns the first i whose name was there before, or n.
  template <class NameOf>
  size_t build(size_t n, const NameOf& name_of) {
    size_t capacity = 16;
    while (capacity < 2 * n) capacity *= 2;
    slots_.assign(capacity, 0);
    for (size_t i = 0; i < n; i++) {
      size_t s = size_t(fnv1a(name_of(i))) & (capacity - 1);
      for (; slots_[s]; s = (s + 1) & (capacity - 1))
        if (name_of(slots_[s] - 1) == name_of(i)) return i;
      slots_[s] = uint32_t(i + 1);
    }
    return n;
  }
  // Index of the name, or -1.
  template <class NameOf>
  int64_t find(std::string_view name, const NameOf& name_of) const {
    if (slots_.empty()) return -1;
    for (size_t s = size_t(fnv1a(name)) & (slots_.size() - 1); slots_[s]; s = (s + 1) & (slots_.size() - 1))
      if (name_of(slots_[s] - 1) == name) return int64_t(slots_[s]) - 1;
    return -1;
  }

 private:
  std::vector<uint32_t> slots_;    // index + 1; 0: free
};

// -- file ----

// One tensor; the data lies in the mapping. `type` may be one that no kernel reads: then nbytes is 0 (see load_model).
struct Tensor {
  std::string_view name;
  uint32_t n_dims;
  uint64_t dims[4];              // [0] is contiguous; unused dimensions are 1
  Type type;
  const uint8_t* data;
  uint64_t nbytes;
  uint32_t shard;
};

class Gguf {
  // Names by number, for the indices.
  auto tensor_name() const { return [this](size_t i) { return tensors_[i].name; }; }
  auto value_key() const { return [this](size_t i) { return values_[i].key; }; }

 public:
  // Maps the file and, if it is a shard of a split one, all its siblings. Throws Error naming file, place, found, expected.
  explicit Gguf(const std::string& path, const GgufOptions& options = {}) : path_(path), options_(options) {
    const ShardName name = parse_shard_name(path);
    if (name.count > 1) {
      open_shards(name);
    } else {
      files_.push_back(std::make_unique<MappedFile>(path, options));
      const SplitInfo split = parse_file(0);
      if (split.count > 1) {
        fail("%s is shard %llu of %llu of a split model, but its name does not end in -%05llu-of-%05llu.gguf, so the others cannot be found",
             path.c_str(), ull(split.no + 1), ull(split.count), ull(split.no + 1), ull(split.count));
      }
    }
    index_tensors();
    const bool fits = double(file_bytes()) < 0.8 * double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
    for (const auto& f : files_) {
      if (fits && !options.no_mmap) f->use_large_pages();
      if (options.warm) f->warm();
      if (options.mlock) f->lock();
    }
  }
  Gguf(const Gguf&) = delete;
  Gguf& operator=(const Gguf&) = delete;

  const std::string& path() const { return path_; }
  uint64_t file_bytes() const {
    uint64_t n = 0;
    for (const auto& f : files_) n += f->size();
    return n;
  }
  size_t shard_count() const { return files_.size(); }
  const std::string& shard_path(const Tensor& t) const { return files_[t.shard]->path(); }

  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Tensor* find_tensor(std::string_view name) const {
    const int64_t i = tensor_index_.find(name, tensor_name());
    return i < 0 ? nullptr : &tensors_[size_t(i)];
  }

  // -- metadata: absent is nullopt, another type than asked for throws ----
  bool has(std::string_view key) const { return find_value(key) != nullptr; }

  std::optional<uint64_t> find_uint(std::string_view key) const {
    const Value* v = find_value(key);
    if (!v) return std::nullopt;
    if (!is_integer(v->type)) fail_type(*v, "an integer");
    const int64_t n = load_int(v->type, v->data);
    if (n < 0 && v->type != ValueType::U64) fail("%s: %s is %lld, expected 0 or more", meta_path_.c_str(), printable(key).c_str(), (long long)n);
    return uint64_t(n);
  }
  std::optional<double> find_float(std::string_view key) const {
    const Value* v = find_value(key);
    if (!v) return std::nullopt;
    if (!is_number(v->type)) fail_type(*v, "a number");
    return load_number(v->type, v->data);
  }
  std::optional<bool> find_bool(std::string_view key) const {
    const Value* v = find_value(key);
    if (!v) return std::nullopt;
    if (v->type != ValueType::Bool) fail_type(*v, "a bool");
    return *v->data != 0;
  }
  std::optional<std::string_view> find_string(std::string_view key) const {
    const Value* v = find_value(key);
    if (!v) return std::nullopt;
    if (v->type != ValueType::String) fail_type(*v, "a string");
    return std::string_view(reinterpret_cast<const char*>(v->data), size_t(v->count));
  }
  std::optional<StringArray> find_strings(std::string_view key) const {
    const Value* v = find_value(key);
    if (!v) return std::nullopt;
    if (v->type != ValueType::Array || v->elem != ValueType::String) fail_type(*v, "an array of strings");
    return StringArray(v->data, size_t(v->count));
  }
  // An array of numbers, or one number as an array of one.
  std::optional<std::vector<double>> find_numbers(std::string_view key) const {
    const Value* v = find_list(key, is_number, "numbers");
    if (!v) return std::nullopt;
    std::vector<double> out(size_t(v->count));
    for (size_t i = 0; i < out.size(); i++) out[i] = load_number(v->elem, v->data + i * value_bytes(v->elem));
    return out;
  }
  // The same for integers that fit into 32 bits.
  std::optional<std::vector<int32_t>> find_ints(std::string_view key) const {
    const Value* v = find_list(key, is_integer, "integers");
    if (!v) return std::nullopt;
    std::vector<int32_t> out(size_t(v->count));
    for (size_t i = 0; i < out.size(); i++) {
      const int64_t n = load_int(v->elem, v->data + i * value_bytes(v->elem));
      if (n < INT32_MIN || n > INT32_MAX) {
        fail("%s: %s[%zu] is %lld, expected a 32-bit integer", meta_path_.c_str(), printable(key).c_str(), i, (long long)n);
      }
      out[i] = int32_t(n);
    }
    return out;
  }

 private:
  struct Value {
    std::string_view key;
    ValueType type, elem;        // elem: of an array, else the same as type
    uint64_t count;              // bytes of a string, elements of an array, else 1
    const uint8_t* data;
  };
  struct SplitInfo {
    uint64_t no = 0, count = 0;
    std::optional<uint64_t> tensors;
  };
  // Twelve times the tensors of DeepSeek V4 Flash: indexing names whose hashes collide takes the square of their number.
  static constexpr unsigned kMostNames = 1 << 14;
  // "PREFIX-00002-of-00003SUFFIX", SUFFIX ".gguf" or nothing; count 0: not such a name.
  struct ShardName {
    std::string prefix, suffix;
    uint32_t no = 0, count = 0;  // no starts at 1
  };

  const Value* find_value(std::string_view key) const {
    const int64_t i = value_index_.find(key, value_key());
    return i < 0 ? nullptr : &values_[size_t(i)];
  }
  static bool is_integer(ValueType t) { return t <= ValueType::I32 || t == ValueType::U64 || t == ValueType::I64; }
  static bool is_number(ValueType t) { return is_integer(t) || t == ValueType::F32 || t == ValueType::F64; }
  // u64 comes back as its bits.
  static int64_t load_int(ValueType t, const uint8_t* p) {
    switch (t) {
      case ValueType::U8: return *p;
      case ValueType::I8: return int8_t(*p);
      case ValueType::U16: return load_le<uint16_t>(p);
      case ValueType::I16: return load_le<int16_t>(p);
      case ValueType::U32: return load_le<uint32_t>(p);
      case ValueType::I32: return load_le<int32_t>(p);
      default: return load_le<int64_t>(p);
    }
  }
  static double load_number(ValueType t, const uint8_t* p) {
    if (t == ValueType::F32) return double(load_le<float>(p));
    if (t == ValueType::F64) return load_le<double>(p);
    if (t == ValueType::U64) return double(load_le<uint64_t>(p));
    return double(load_int(t, p));
  }
  [[noreturn]] void fail_type(const Value& v, const char* expected) const {
    fail("%s: %s is %s%s, expected %s", meta_path_.c_str(), printable(v.key).c_str(), v.type == ValueType::Array ? "an array of " : "of type ",
         value_type_name(v.elem), expected);
  }
  // An array of a type that `is` accepts, or one such value; null if the key is absent.
  const Value* find_list(std::string_view key, bool (*is)(ValueType), const char* expected) const {
    const Value* v = find_value(key);
    if (!v) return nullptr;
    if (!is(v->elem)) fail_type(*v, expected);
    constexpr uint64_t kMost = 1 << 24;      // 100 times the longest array in use
    if (v->count > kMost) fail("%s: %s has %llu elements, expected at most %llu", meta_path_.c_str(), printable(key).c_str(), ull(v->count), ull(kMost));
    return v;
  }

  static ShardName parse_shard_name(const std::string& path) {
    ShardName name;
    std::string stem = path;
    if (stem.size() >= 5 && stem.compare(stem.size() - 5, 5, ".gguf") == 0) {
      name.suffix = ".gguf";
      stem.resize(stem.size() - 5);
    }
    if (stem.size() < 15) return name;
    constexpr char kPattern[] = "-00000-of-00000";
    const char* tail = stem.c_str() + stem.size() - 15;
    for (size_t i = 0; i < 15; i++)
      if (kPattern[i] == '0' ? tail[i] < '0' || tail[i] > '9' : tail[i] != kPattern[i]) return name;
    name.prefix = stem.substr(0, stem.size() - 15);
    name.no = uint32_t(std::atoi(tail + 1));
    name.count = uint32_t(std::atoi(tail + 10));
    return name;
  }

  void open_shards(const ShardName& name) {
    if (name.no < 1 || name.no > name.count) {
      fail("%s: its name says shard %u of %u, expected 1 to %u", path_.c_str(), name.no, name.count, name.count);
    }
    if (access(path_.c_str(), F_OK) != 0) fail("cannot open %s: %s", path_.c_str(), std::strerror(errno));
    std::optional<uint64_t> n_tensors;
    for (uint32_t no = 1; no <= name.count; no++) {
      const std::string path = name.prefix + format("-%05u-of-%05u", no, name.count) + name.suffix;
      if (access(path.c_str(), F_OK) != 0) fail("shard %u of %u is missing: %s (needed by %s)", no, name.count, path.c_str(), path_.c_str());
      files_.push_back(std::make_unique<MappedFile>(path, options_));
      const SplitInfo split = parse_file(no - 1);
      if (split.count == 0) continue;            // split without keys: the name decides
      if (split.count != name.count) fail("%s: split.count is %llu, but its name says %u", path.c_str(), ull(split.count), name.count);
      if (split.no != no - 1) fail("%s: split.no is %llu, but its name says shard %u (expected %u)", path.c_str(), ull(split.no), no, no - 1);
      if (!n_tensors) n_tensors = split.tensors;
    }
    if (n_tensors && *n_tensors != tensors_.size()) {
      fail("%s: split.tensors.count is %llu, but the %u shards hold %zu tensors", path_.c_str(), ull(*n_tensors), name.count, tensors_.size());
    }
  }

  // Says what a file without GGUF's magic is, where users are known to end up with such files.
  [[noreturn]] static void refuse_magic(const MappedFile& file) {
    static const struct { const char* start; const char* what; } kKnown[] = {
      {"<!DO", " (an HTML page?)"}, {"<!do", " (an HTML page?)"}, {"<htm", " (an HTML page?)"}, {"<HTM", " (an HTML page?)"},
      {"<?xm", " (an XML page?)"}, {"vers", " (a git-lfs pointer?)"}, {"{\"er", " (a server's error message?)"}, {"PK\3\4", " (a zip or PyTorch file?)"},
      {"lmgg", " (a GGML file from before GGUF)"}, {"fmgg", " (a GGML file from before GGUF)"}, {"tjgg", " (a GGML file from before GGUF)"},
    };
    const std::string_view start(reinterpret_cast<const char*>(file.data()), std::min(file.size(), size_t(4)));
    const char* what = "";
    for (const auto& k : kKnown)
      if (start == std::string_view(k.start, 4)) what = k.what;
    fail("%s is not a GGUF file: starts with '%s'%s, expected 'GGUF'", file.path().c_str(), printable(start).c_str(), what);
  }

  // Reads one file's header, metadata and tensor directory; appends its tensors. Metadata of the first shard is kept.
  SplitInfo parse_file(uint32_t shard) {
    const MappedFile& file = *files_[shard];
    const char* path = file.path().c_str();
    Cursor in(file);
    if (file.size() < 4 || std::memcmp(file.data(), "GGUF", 4) != 0) refuse_magic(file);
    in.skip(4, "the magic");
    const uint32_t version = in.read<uint32_t>("the version");
    if (version != 0 && (version & 0xffff) == 0) fail("%s is a big-endian GGUF file (version %u), expected little-endian", path, __builtin_bswap32(version));
    if (version != 2 && version != 3) fail("%s is GGUF version %u, expected 2 or 3", path, version);
    const uint64_t n_tensors = in.read<uint64_t>("the tensor count");
    const uint64_t n_values = in.read<uint64_t>("the metadata count");
    // Smallest entries: key 8+1, type 4, value 1; name 8+1, dimensions 4+8, type 4, offset 8.
    in.check_count(n_values, 14, "the metadata count");
    in.check_count(n_tensors, 33, "the tensor count");
    if (n_values > kMostNames) fail("%s: the metadata count is %llu, expected at most %u", path, ull(n_values), kMostNames);

    std::vector<Value> first;                    // a later shard's metadata is checked, asked for the split keys and dropped
    first.swap(values_);
    meta_path_ = file.path();
    read_values(in, file, n_values);
    SplitInfo split;
    split.no = find_uint("split.no").value_or(0);
    split.count = find_uint("split.count").value_or(0);
    split.tensors = find_uint("split.tensors.count");
    const uint64_t alignment = find_uint("general.alignment").value_or(32);
    if (alignment < 8 || alignment > 1 << 20 || (alignment & (alignment - 1)) != 0) {
      fail("%s: general.alignment is %llu, expected a power of two from 8 to 1048576", path, ull(alignment));
    }
    read_tensors(in, file, n_tensors, alignment, shard);
    if (shard > 0) {
      values_.swap(first);
      meta_path_ = files_[0]->path();
      value_index_.build(values_.size(), value_key());
    }
    return split;
  }

  void read_values(Cursor& in, const MappedFile& file, uint64_t n_values) {
    const char* path = file.path().c_str();
    values_.reserve(size_t(std::min<uint64_t>(n_values, 1024)));
    for (uint64_t i = 0; i < n_values; i++) {
      const size_t at = in.offset();
      Value v = {};
      v.key = in.read_string("a metadata key");
      if (v.key.empty()) fail("%s: metadata key %llu at offset %zu is empty", path, ull(i), at);
      v.type = v.elem = ValueType(in.read<uint32_t>("a value type"));
      v.count = 1;
      const std::string what = "the value of " + printable(v.key);
      if (v.type == ValueType::String) {
        const std::string_view s = in.read_string(what.c_str());
        v.count = s.size();
        v.data = reinterpret_cast<const uint8_t*>(s.data());
      } else if (v.type == ValueType::Array) {
        read_array(in, file, v);
      } else if (const uint32_t n = value_bytes(v.type)) {
        v.data = in.skip(n, what.c_str());
        if (v.type == ValueType::Bool && *v.data > 1) fail("%s: %s is %u, expected a bool (0 or 1)", path, printable(v.key).c_str(), *v.data);
      } else {
        fail("%s: %s at offset %zu has value type %u, expected 0 to 12", path, printable(v.key).c_str(), at, uint32_t(v.type));
      }
      values_.push_back(v);
    }
    const size_t twice = value_index_.build(values_.size(), value_key());
    if (twice < values_.size()) fail("%s: metadata key %s is there twice", path, printable(values_[twice].key).c_str());
  }

  void read_array(Cursor& in, const MappedFile& file, Value& v) {
    const char* path = file.path().c_str();
    const std::string key = printable(v.key);
    v.elem = ValueType(in.read<uint32_t>("an element type"));
    if (v.elem == ValueType::Array) fail("%s: %s is an array of arrays, expected numbers or strings", path, key.c_str());
    const uint32_t elem_bytes = value_bytes(v.elem);
    if (elem_bytes == 0 && v.elem != ValueType::String) fail("%s: %s has element type %u, expected 0 to 12", path, key.c_str(), uint32_t(v.elem));
    v.count = in.read<uint64_t>("an array length");
    in.check_count(v.count, elem_bytes ? elem_bytes : 8, ("the length of " + key).c_str());
    v.data = in.here();
    if (elem_bytes) in.skip(v.count * elem_bytes, key.c_str());
    else for (uint64_t i = 0; i < v.count; i++) in.read_string(key.c_str());
  }

  void read_tensors(Cursor& in, const MappedFile& file, uint64_t n_tensors, uint64_t alignment, uint32_t shard) {
    const char* path = file.path().c_str();
    const size_t begin = tensors_.size();
    tensors_.reserve(begin + size_t(std::min<uint64_t>(n_tensors, 4096)));
    for (uint64_t i = 0; i < n_tensors; i++) {
      const size_t at = in.offset();
      Tensor t = {};
      t.name = in.read_string("a tensor name");
      if (t.name.empty()) fail("%s: tensor name %llu at offset %zu is empty", path, ull(i), at);
      const std::string name = printable(t.name);
      t.n_dims = in.read<uint32_t>("a tensor's dimension count");
      if (t.n_dims < 1 || t.n_dims > 4) fail("%s: tensor %s has %u dimensions, expected 1 to 4", path, name.c_str(), t.n_dims);
      std::fill(t.dims, t.dims + 4, 1);
      for (uint32_t d = 0; d < t.n_dims; d++) t.dims[d] = in.read<uint64_t>("a tensor dimension");
      t.type = Type(in.read<uint32_t>("a tensor type"));
      t.shard = shard;
      t.nbytes = tensor_bytes(file, t);
      const uint64_t offset = in.read<uint64_t>("a tensor offset");
      if (offset % alignment != 0) fail("%s: tensor %s has offset %llu, expected a multiple of %llu", path, name.c_str(), ull(offset), ull(alignment));
      t.data = reinterpret_cast<const uint8_t*>(uintptr_t(offset));        // relative until the directory has been read
      tensors_.push_back(t);
    }
    const uint64_t data_begin = align_up(in.offset(), alignment), data_bytes = file.size() - std::min<uint64_t>(file.size(), data_begin);
    for (size_t i = begin; i < tensors_.size(); i++) {
      Tensor& t = tensors_[i];
      const uint64_t offset = uintptr_t(t.data);
      if (offset > data_bytes || t.nbytes > data_bytes - offset) {
        fail("%s: tensor %s has %llu bytes at offset %llu of the tensor data, but the file has only %llu bytes of it (truncated?)", path,
             printable(t.name).c_str(), ull(t.nbytes), ull(offset), ull(data_bytes));
      }
      t.data = file.data() + data_begin + offset;
    }
    check_overlaps(path, begin);
  }

  // Bytes of a tensor whose dimensions and type are set; 0 for types no kernel reads.
  static uint64_t tensor_bytes(const MappedFile& file, const Tensor& t) {
    const std::string name = file.path() + ": tensor " + printable(t.name);
    uint64_t n_elems = 1;
    for (uint32_t d = 0; d < t.n_dims; d++) {
      if (t.dims[d] == 0) fail("%s has dim[%u] = 0, expected 1 or more", name.c_str(), d);
      n_elems = checked_mul(n_elems, t.dims[d], name.c_str());
    }
    const TypeInfo* info = type_info(uint32_t(t.type));
    if (!info || !info->supported()) return 0;
    if (t.dims[0] % info->block_elems != 0) {
      fail("%s has rows of %llu elements, expected a multiple of %u (type %s)", name.c_str(), ull(t.dims[0]), info->block_elems, info->name);
    }
    return checked_mul(n_elems / info->block_elems, info->block_bytes, name.c_str());
  }

  void check_overlaps(const char* path, size_t begin) const {
    std::vector<const Tensor*> sorted;
    for (size_t i = begin; i < tensors_.size(); i++) sorted.push_back(&tensors_[i]);
    std::sort(sorted.begin(), sorted.end(), [](const Tensor* a, const Tensor* b) { return a->data < b->data; });
    for (size_t i = 1; i < sorted.size(); i++) {
      const Tensor &a = *sorted[i - 1], &b = *sorted[i];
      if (a.data + a.nbytes > b.data) fail("%s: tensors %s and %s overlap", path, printable(a.name).c_str(), printable(b.name).c_str());
    }
  }

  void index_tensors() {
    if (tensors_.size() > kMostNames) fail("%s: the tensor count is %zu, expected at most %u", path_.c_str(), tensors_.size(), kMostNames);
    const size_t twice = tensor_index_.build(tensors_.size(), tensor_name());
    if (twice < tensors_.size()) {
      fail("%s: tensor %s is there twice", shard_path(tensors_[twice]).c_str(), printable(tensors_[twice].name).c_str());
    }
  }

  std::string path_, meta_path_;     // as given; of the file whose metadata is indexed
  GgufOptions options_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::vector<Value> values_;
  std::vector<Tensor> tensors_;
  NameIndex value_index_, tensor_index_;
};

}  // namespace ds4

// =============================================================================
// 9. MODEL — shape from metadata and tensors, weights bound by name, everything checked.   uses: 1 3 6 8
// =============================================================================
// In: a Gguf. Out: a Model whose every dimension is known, consistent and safe to compute with; matrices are views into
// the mapping, small vectors are copies as float. A metadata key that is missing is derived from tensor shapes; a
// constant that no shape tells gets DeepSeek V4 Flash's value and is named in one warning. A key that is there
// decides, and tensors that disagree with it are refused.

namespace ds4 {

struct Shape {
  uint32_t n_layer, n_embd, n_vocab, n_head, head_dim, n_rot, n_group, q_rank, o_rank, window;
  uint32_t n_expert, n_used, ff, ff_shared, n_hash;          // ff: width of one expert; layers below n_hash route by token id
  uint32_t idx_heads, idx_dim, idx_top_k;                    // 0 if no layer has ratio 4
  uint32_t n_hc, sinkhorn_iters;
  uint64_t n_ctx_train;
  std::vector<uint32_t> ratios;                              // [n_layer]: 0, 4 or 128 tokens per compressed row
  float rms_eps, hc_eps, expert_scale;
  bool expert_norm;                                          // router weights divided by their sum
  std::vector<float> clamp, clamp_shared;                    // [n_layer]; <= 1e-6: no clamp
  double rope_base, comp_rope_base;                          // layers with ratio 0; the others
  double yarn_factor, yarn_beta_fast, yarn_beta_slow;
  uint64_t yarn_orig_ctx;
};

struct Compressor {
  Matrix kv, gate;               // [m * width][n_embd]; m = 2 for ratio 4, else 1
  std::vector<float> ape;        // [ratio][m * width]
  std::vector<float> norm;       // [width]
};
struct HyperConn {
  Matrix fn;                     // [n_hc * (n_hc + 2)][n_hc * n_embd]; the head's: [n_hc][n_hc * n_embd]
  std::vector<float> scale, base;
};
// Expert e is rows [e * ff, (e + 1) * ff) of gate and up, and rows [e * n_embd, (e + 1) * n_embd) of down.
struct Experts {
  Matrix gate, up, down;
};
struct LayerWeights {
  HyperConn hc_attn, hc_ffn;
  std::vector<float> attn_norm, q_a_norm, kv_norm, sinks, ffn_norm;
  Matrix q_a, q_b, kv, out_a, out_b;
  Compressor comp;               // ratio != 0
  Compressor idx_comp;           // ratio 4, as are the next two
  Matrix idx_q, idx_proj;
  Matrix router;
  std::vector<float> probs_bias; // [n_expert]; empty in hash-routed layers
  const int32_t* tid2eid;        // [n_vocab][n_used], each in [0, n_expert); null in the others
  Experts experts;
  Matrix sh_gate, sh_up, sh_down;
};
struct Model {
  Shape shape;
  Matrix token_embd, output;
  std::vector<float> output_norm;
  HyperConn hc_head;
  std::vector<LayerWeights> layers;
  const Gguf* file;
};

// -- names ----

// What a tensor is for, by the part of its name after "blk.N.".
static const char* role_of(std::string_view name) {
  static const struct { const char* name; const char* role; } kRoles[] = {
    {"token_embd.weight", "token_embd"}, {"output.weight", "output"}, {"output_norm.weight", "vectors"},
    {"output_hc_fn.weight", "hc"}, {"output_hc_scale.weight", "vectors"}, {"output_hc_base.weight", "vectors"},
    {"hc_attn_fn.weight", "hc"}, {"hc_attn_scale.weight", "vectors"}, {"hc_attn_base.weight", "vectors"},
    {"hc_ffn_fn.weight", "hc"}, {"hc_ffn_scale.weight", "vectors"}, {"hc_ffn_base.weight", "vectors"},
    {"attn_norm.weight", "vectors"}, {"ffn_norm.weight", "vectors"}, {"attn_q_a_norm.weight", "vectors"},
    {"attn_kv_a_norm.weight", "vectors"}, {"attn_sinks.weight", "vectors"}, {"exp_probs_b.bias", "vectors"},
    {"attn_q_a.weight", "attention"}, {"attn_q_b.weight", "attention"}, {"attn_kv.weight", "attention"},
    {"attn_output_a.weight", "attention"}, {"attn_output_b.weight", "attention"},
    {"attn_compressor_kv.weight", "compressor"}, {"attn_compressor_gate.weight", "compressor"},
    {"attn_compressor_ape.weight", "compressor"}, {"attn_compressor_norm.weight", "vectors"},
    {"indexer.attn_q_b.weight", "indexer"}, {"indexer.proj.weight", "indexer"},
    {"indexer_compressor_kv.weight", "indexer"}, {"indexer_compressor_gate.weight", "indexer"},
    {"indexer_compressor_ape.weight", "indexer"}, {"indexer_compressor_norm.weight", "vectors"},
    {"ffn_gate_inp.weight", "router"}, {"ffn_gate_tid2eid.weight", "hash routing"},
    {"ffn_gate_exps.weight", "experts gate/up"}, {"ffn_up_exps.weight", "experts gate/up"}, {"ffn_down_exps.weight", "experts down"},
    {"ffn_gate_shexp.weight", "shared expert"}, {"ffn_up_shexp.weight", "shared expert"}, {"ffn_down_shexp.weight", "shared expert"},
  };
  for (const auto& r : kRoles)
    if (name == r.name) return r.role;
  return nullptr;
}

// Splits "blk.N.rest" into N and rest; N = -1 and the whole name for other names.
struct BlockName {
  int64_t block;
  std::string_view rest;
};
static BlockName split_block_name(std::string_view name) {
  if (name.substr(0, 4) != "blk.") return {-1, name};
  int64_t n = 0;
  size_t i = 4;
  for (; i < name.size() && i < 12 && name[i] >= '0' && name[i] <= '9'; i++) n = n * 10 + (name[i] - '0');
  if (i == 4 || i >= name.size() || name[i] != '.') return {-1, name};
  return {n, name.substr(i + 1)};
}

// Levenshtein distance of two short names.
static size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); j++) row[j] = j;
  for (size_t i = 1; i <= a.size(); i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const size_t substitute = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// -- loading ----

class ModelLoader {
 public:
  explicit ModelLoader(const Gguf& file) : file_(file), path_(file.path().c_str()) {}

  Model load() {
    check_architecture();
    Shape& s = model_.shape;
    model_.file = &file_;
    read_layers();
    check_types();
    read_shape();
    read_constants();
    warn_assumed();
    check_shape();
    model_.token_embd = matrix("token_embd.weight", {s.n_embd, "embedding_length"}, {s.n_vocab, "vocabulary size"});
    model_.output = matrix("output.weight", {s.n_embd, "embedding_length"}, {s.n_vocab, "vocabulary size"});
    model_.output_norm = floats("output_norm.weight", {s.n_embd, "embedding_length"});
    model_.hc_head = hyper_connection("output_hc", {s.n_hc, "hyper_connection.count"}, 1);
    for (uint32_t il = 0; il < s.n_layer; il++) model_.layers.push_back(bind_layer(il));
    return std::move(model_);
  }

 private:
  struct Dim {
    uint64_t n;
    const char* what;            // for the message when a tensor disagrees
  };

  // -- what kind of file ----
  void check_architecture() const {
    const std::string arch = printable(file_.find_string("general.architecture").value_or(""));
    if (arch.empty()) fail("%s has no general.architecture, expected deepseek4", path_);
    if (arch != "deepseek4") {
      const auto contains = [&](const char* s) { return arch.find(s) != std::string::npos; };
      const char* kind = contains("mtp") ? "an MTP support file, not a model on its own"
                         : contains("dflash") || contains("dspark") || contains("eagle") || contains("draft") ? "a speculative-decoding drafter, not a model on its own"
                         : arch == "deepseek41" ? "a DeepSeek V4.1 model"
                         : arch == "deepseek2"  ? "a DeepSeek V2 or V3 model"
                         : arch == "clip"       ? "an image projector"
                                                : "another model";
      fail("%s is %s (architecture %s), expected a DeepSeek V4 model (deepseek4)", path_, kind, arch.c_str());
    }
    if (file_.tensors().empty()) fail("%s has no tensors (a vocabulary only?), expected a whole model", path_);
    if (file_.find_tensor("token_embd.weight")) return;
    for (const Tensor& t : file_.tensors()) {
      if (t.name.substr(0, 4) == "mtp.") fail("%s is an MTP support file (tensor %s), not a model on its own", path_, printable(t.name).c_str());
      if (t.name.substr(0, 7) == "dspark." || t.name.substr(0, 7) == "dflash.")
        fail("%s is a speculative-decoding drafter (tensor %s), not a model on its own", path_, printable(t.name).c_str());
    }
  }

  // Tensors no kernel reads are refused by name, except in MTP blocks, which are not computed.
  void check_types() const {
    for (const Tensor& t : file_.tensors()) {
      const uint32_t id = uint32_t(t.type);
      const TypeInfo* info = type_info(id);
      if ((info && info->supported()) || split_block_name(t.name).block >= int64_t(model_.shape.n_layer)) continue;
      if (info) fail("%s: tensor %s has type %s (%u), which is not supported", path_, printable(t.name).c_str(), info->name, id);
      fail("%s: tensor %s has unknown type %u", path_, printable(t.name).c_str(), id);
    }
  }

  // -- metadata ----
  static std::string key_name(const char* key) { return std::string("deepseek4.") + key; }

  // A size, 1 to 2^31 - 1; 0 if the key is absent.
  uint32_t find_size(const char* key) const {
    const std::optional<uint64_t> n = file_.find_uint(key_name(key));
    if (!n) return 0;
    if (*n < 1 || *n > INT32_MAX) fail("%s: deepseek4.%s is %llu, expected 1 to %d", path_, key, ull(*n), INT32_MAX);
    return uint32_t(*n);
  }
  // A size that a tensor tells when the key is absent.
  uint32_t size_or_dim(const char* key, const std::string& tensor, int d) {
    const uint32_t n = find_size(key);
    return n ? n : tensor_dim(tensor, d);
  }
  uint32_t tensor_dim(const std::string& tensor, int d) const {
    const uint64_t n = need(tensor).dims[d];
    if (n > INT32_MAX) fail("%s: tensor %s has dim[%d] = %llu, expected at most %d", path_, tensor.c_str(), d, ull(n), INT32_MAX);
    return uint32_t(n);
  }
  // A size that nothing but its key tells.
  uint32_t size_or_flash(const char* key, uint32_t flash) {
    const uint32_t n = find_size(key);
    if (!n) assumed_.push_back(key_name(key));
    return n ? n : flash;
  }
  // A finite number in [least, most]; `other` is a second name of the key.
  double number_or_flash(const char* key, double flash, double least, double most, const char* other = nullptr) {
    std::optional<double> x = file_.find_float(key_name(key));
    if (!x && other && file_.has(key_name(other))) x = file_.find_float(key_name(key = other));
    if (!x) assumed_.push_back(key_name(key));
    if (x && !(*x >= least && *x <= most)) fail("%s: deepseek4.%s is %g, expected %g to %g", path_, key, *x, least, most);
    return x.value_or(flash);
  }
  // One number per layer, from an array at least that long or from one number for all.
  std::vector<float> per_layer(const char* key, const std::vector<double>& found) const {
    const uint32_t n_layer = model_.shape.n_layer;
    if (found.size() != 1 && found.size() < n_layer) {
      fail("%s: deepseek4.%s has %zu entries, expected 1 or at least %u (layers)", path_, key, found.size(), n_layer);
    }
    std::vector<float> out(n_layer);
    for (uint32_t il = 0; il < n_layer; il++) {
      const double x = found[found.size() == 1 ? 0 : il];
      if (!(std::fabs(x) <= 1e30)) fail("%s: deepseek4.%s[%u] is %g, expected a finite number", path_, key, il, x);
      out[il] = float(x);
    }
    return out;
  }

  static std::string blk(uint32_t il, const char* rest) { return format("blk.%u.%s", il, rest); }

  // n_layer and the compress ratio of each layer.
  void read_layers() {
    Shape& s = model_.shape;
    int64_t last = -1;
    for (const Tensor& t : file_.tensors()) last = std::max(last, split_block_name(t.name).block);
    const uint64_t n_blocks = file_.find_uint("deepseek4.block_count").value_or(uint64_t(last + 1));
    if (n_blocks == 0 || n_blocks > file_.tensors().size()) {
      fail("%s: deepseek4.block_count is %llu, expected 1 to %llu (the file has blocks up to blk.%lld)", path_, ull(n_blocks), ull(uint64_t(last + 1)),
           (long long)last);
    }
    s.n_layer = uint32_t(n_blocks);
    std::vector<bool> is_mtp(n_blocks);
    for (const Tensor& t : file_.tensors()) {
      const BlockName name = split_block_name(t.name);
      if (name.block >= 0 && name.block < int64_t(n_blocks) && name.rest.substr(0, 6) == "nextn.") is_mtp[size_t(name.block)] = true;
    }
    while (s.n_layer > 0 && is_mtp[s.n_layer - 1]) s.n_layer--;
    if (s.n_layer == 0) fail("%s: every block is an MTP block (blk.N.nextn.*), expected a whole model", path_);

    const std::optional<std::vector<int32_t>> ratios = file_.find_ints("deepseek4.attention.compress_ratios");
    if (ratios && ratios->size() < s.n_layer) {
      fail("%s: deepseek4.attention.compress_ratios has %zu entries, expected at least %u (layers)", path_, ratios->size(), s.n_layer);
    }
    for (uint32_t il = 0; il < s.n_layer; il++) {
      int64_t r = 0;
      if (ratios) r = (*ratios)[il];
      else if (const Tensor* ape = file_.find_tensor(blk(il, "attn_compressor_ape.weight"))) r = int64_t(ape->dims[1]);
      if (r != 0 && r != 4 && r != 128) {
        fail("%s: deepseek4.attention.compress_ratios[%u] is %lld, expected 0, 4 or 128", path_, il, (long long)r);
      }
      s.ratios.push_back(uint32_t(r));
    }
  }

  // Sizes: from their keys, else from the tensors.
  void read_shape() {
    Shape& s = model_.shape;
    s.n_embd = size_or_dim("embedding_length", "token_embd.weight", 0);
    s.n_vocab = find_size("vocab_size");
    if (const std::optional<StringArray> tokens = file_.find_strings("tokenizer.ggml.tokens")) {
      if (s.n_vocab && s.n_vocab != tokens->size()) {
        fail("%s: deepseek4.vocab_size is %u, but tokenizer.ggml.tokens has %zu entries", path_, s.n_vocab, tokens->size());
      }
      if (tokens->size() == 0 || tokens->size() > INT32_MAX) fail("%s: tokenizer.ggml.tokens has %zu entries, expected 1 or more", path_, tokens->size());
      s.n_vocab = uint32_t(tokens->size());
    }
    if (!s.n_vocab) s.n_vocab = tensor_dim("token_embd.weight", 1);

    s.n_head = size_or_dim("attention.head_count", "blk.0.attn_sinks.weight", 0);
    s.head_dim = find_size("attention.key_length");
    if (!s.head_dim) s.head_dim = size_or_dim("attention.value_length", "blk.0.attn_kv.weight", 1);
    s.q_rank = size_or_dim("attention.q_lora_rank", "blk.0.attn_q_a.weight", 1);
    s.n_group = find_size("attention.output_group_count");
    if (!s.n_group) {                            // attn_output_a rows take n_head / n_group heads
      const uint64_t group = tensor_dim("blk.0.attn_output_a.weight", 0), all = uint64_t(s.n_head) * s.head_dim;
      if (all % group != 0) {
        fail("%s: tensor blk.0.attn_output_a.weight has dim[0] = %llu, expected a divisor of %llu (head_count x key_length)", path_, ull(group), ull(all));
      }
      s.n_group = uint32_t(std::min<uint64_t>(all / group, INT32_MAX));        // too large for check_shape in any case
    }
    s.o_rank = find_size("attention.output_lora_rank");
    if (!s.o_rank) s.o_rank = std::max(1u, tensor_dim("blk.0.attn_output_a.weight", 1) / s.n_group);

    s.n_expert = size_or_dim("expert_count", "blk.0.ffn_gate_inp.weight", 1);
    s.ff = size_or_dim("expert_feed_forward_length", "blk.0.ffn_gate_exps.weight", 1);
    if (const uint32_t n_shared = find_size("expert_shared_count")) {
      const uint64_t wide = uint64_t(s.ff) * n_shared;
      if (wide > INT32_MAX) fail("%s: deepseek4.expert_shared_count is %u, too many for experts of width %u", path_, n_shared, s.ff);
      s.ff_shared = uint32_t(wide);
    } else {
      s.ff_shared = tensor_dim("blk.0.ffn_gate_shexp.weight", 1);
    }
    if (const std::optional<uint64_t> n = file_.find_uint("deepseek4.hash_layer_count")) {
      if (*n > s.n_layer) fail("%s: deepseek4.hash_layer_count is %llu, expected at most %u (layers)", path_, ull(*n), s.n_layer);
      s.n_hash = uint32_t(*n);
    } else {
      while (s.n_hash < s.n_layer && file_.find_tensor(blk(s.n_hash, "ffn_gate_tid2eid.weight"))) s.n_hash++;
    }
    s.n_used = find_size("expert_used_count");
    if (!s.n_used) s.n_used = s.n_hash ? tensor_dim("blk.0.ffn_gate_tid2eid.weight", 0) : size_or_flash("expert_used_count", 6);
    s.n_hc = size_or_dim("hyper_connection.count", "output_hc_base.weight", 0);

    const auto first = std::find(s.ratios.begin(), s.ratios.end(), 4u);
    if (first != s.ratios.end()) {
      const uint32_t il = uint32_t(first - s.ratios.begin());
      s.idx_heads = size_or_dim("attention.indexer.head_count", blk(il, "indexer.proj.weight"), 1);
      s.idx_dim = size_or_dim("attention.indexer.key_length", blk(il, "indexer_compressor_norm.weight"), 0);
      s.idx_top_k = size_or_flash("attention.indexer.top_k", 512);
    }
  }

  // Numbers that no tensor tells.
  void read_constants() {
    Shape& s = model_.shape;
    constexpr double kHuge = 1e30, kTiny = 1e-30;
    s.n_rot = size_or_flash("rope.dimension_count", 64);
    s.window = size_or_flash("attention.sliding_window", 128);
    s.sinkhorn_iters = size_or_flash("hyper_connection.sinkhorn_iterations", 20);
    s.n_ctx_train = size_or_flash("context_length", 1048576);
    s.rms_eps = float(number_or_flash("attention.layer_norm_rms_epsilon", 1e-6, kTiny, 1));
    s.hc_eps = float(number_or_flash("hyper_connection.epsilon", 1e-6, 0, 1));
    s.expert_scale = float(number_or_flash("expert_weights_scale", 1.5, kTiny, kHuge));
    const std::optional<bool> norm = file_.find_bool("deepseek4.expert_weights_norm");
    if (!norm) assumed_.push_back("deepseek4.expert_weights_norm");
    s.expert_norm = norm.value_or(true);

    std::optional<std::vector<double>> clamp = file_.find_numbers("deepseek4.swiglu_clamp_exp");
    if (!clamp) assumed_.push_back("deepseek4.swiglu_clamp_exp");
    s.clamp = per_layer("swiglu_clamp_exp", clamp.value_or(std::vector<double>{10}));
    clamp = file_.find_numbers("deepseek4.swiglu_clamp_shexp");
    s.clamp_shared = clamp ? per_layer("swiglu_clamp_shexp", *clamp) : s.clamp;

    s.rope_base = number_or_flash("rope.freq_base", 10000, 1.0001, kHuge);
    s.comp_rope_base = number_or_flash("attention.compress_rope_freq_base", 160000, 1.0001, kHuge, "rope.freq_base_swa");
    s.yarn_factor = number_or_flash("rope.scaling.factor", 16, 1, 1e9);
    s.yarn_orig_ctx = size_or_flash("rope.scaling.original_context_length", 65536);
    s.yarn_beta_fast = number_or_flash("rope.scaling.yarn_beta_fast", 32, kTiny, 1e9);
    s.yarn_beta_slow = number_or_flash("rope.scaling.yarn_beta_slow", 1, kTiny, 1e9);
    const std::string scaling = printable(file_.find_string("deepseek4.rope.scaling.type").value_or("yarn"));
    if (scaling != "yarn") fail("%s: deepseek4.rope.scaling.type is %s, expected yarn", path_, scaling.c_str());
  }

  void warn_assumed() const {
    if (assumed_.empty()) return;
    std::string list;
    for (const std::string& key : assumed_) list += (list.empty() ? "" : ", ") + key;
    warn("%s has no %s: DeepSeek V4 Flash's value%s used", path_, list.c_str(), assumed_.size() > 1 ? "s are" : " is");
  }

  // Conditions that the computation relies on and that no tensor shape guarantees.
  void check_shape() const {
    const Shape& s = model_.shape;
    const auto expect = [&](bool ok, const char* key, uint64_t found, const std::string& expected) {
      if (!ok) fail("%s: deepseek4.%s is %llu, expected %s", path_, key, ull(found), expected.c_str());
    };
    const uint64_t kv_heads = file_.find_uint("deepseek4.attention.head_count_kv").value_or(1);
    const uint64_t value_dim = file_.find_uint("deepseek4.attention.value_length").value_or(s.head_dim);
    const uint64_t gating = file_.find_uint("deepseek4.expert_gating_func").value_or(4);
    const uint64_t expert_groups = file_.find_uint("deepseek4.expert_group_count").value_or(0);
    expect(s.head_dim <= 65536, "attention.key_length", s.head_dim, "at most 65536");        // cached rows have 32-bit strides
    expect(kv_heads == 1, "attention.head_count_kv", kv_heads, "1 (one shared head)");
    expect(value_dim == s.head_dim, "attention.value_length", value_dim, format("%u (key_length)", s.head_dim));
    expect(gating == 4, "expert_gating_func", gating, "4 (sqrt softplus)");
    expect(expert_groups <= 1, "expert_group_count", expert_groups, "0 or 1 (no groups)");
    expect(s.n_rot % 2 == 0, "rope.dimension_count", s.n_rot, "an even number");
    expect(s.n_rot <= kMaxRot, "rope.dimension_count", s.n_rot, format("at most %u", kMaxRot));
    expect(s.n_rot < s.head_dim, "rope.dimension_count", s.n_rot, format("less than %u (key_length)", s.head_dim));
    expect(s.n_head % s.n_group == 0, "attention.output_group_count", s.n_group, format("a divisor of %u (head_count)", s.n_head));
    expect(s.n_used <= 256, "expert_used_count", s.n_used, "at most 256");
    expect(s.n_used <= s.n_expert, "expert_used_count", s.n_used, format("at most %u (expert_count)", s.n_expert));
    expect(s.sinkhorn_iters <= 1000, "hyper_connection.sinkhorn_iterations", s.sinkhorn_iters, "at most 1000");
    expect(s.window <= 1u << 20, "attention.sliding_window", s.window, "at most 1048576");
    expect(s.idx_top_k <= 1u << 20, "attention.indexer.top_k", s.idx_top_k, "at most 1048576");
    expect(s.n_group <= kMaxGroups, "attention.output_group_count", s.n_group, format("at most %u", kMaxGroups));
    expect(s.n_hc <= kMaxStreams, "hyper_connection.count", s.n_hc, format("at most %u", kMaxStreams));
    if (s.yarn_beta_slow > s.yarn_beta_fast) {
      fail("%s: deepseek4.rope.scaling.yarn_beta_slow is %g, expected at most %g (yarn_beta_fast)", path_, s.yarn_beta_slow, s.yarn_beta_fast);
    }
    if (s.idx_dim) {
      expect(s.idx_dim <= kMaxIndexDim, "attention.indexer.key_length", s.idx_dim, format("at most %u", kMaxIndexDim));
      expect((s.idx_dim & (s.idx_dim - 1)) == 0, "attention.indexer.key_length", s.idx_dim, "a power of two");
      expect(s.idx_dim >= s.n_rot, "attention.indexer.key_length", s.idx_dim, format("at least %u (rope.dimension_count)", s.n_rot));
    }
  }

  // -- tensors ----
  const Tensor& need(const std::string& name) const {
    if (const Tensor* t = file_.find_tensor(name)) return *t;
    fail_missing(name);
  }

  // Names the missing tensor and the nearest one: of the same block if there is such a block, a name without a known
  // role before one that has its own.
  [[noreturn]] void fail_missing(const std::string& name) const {
    const int64_t block = split_block_name(name).block;
    const Tensor* nearest = nullptr;
    size_t best = SIZE_MAX;
    int64_t first = INT64_MAX, last = -1;
    bool block_there = false;
    for (const Tensor& t : file_.tensors()) {
      const BlockName other = split_block_name(t.name);
      if (other.block >= 0) {
        first = std::min(first, other.block);
        last = std::max(last, other.block);
      }
      block_there |= other.block == block;
      if (other.block != block || t.name.size() > 100) continue;
      const size_t distance = edit_distance(name, t.name) + (role_of(other.rest) ? 1000 : 0);
      if (distance < best) {
        best = distance;
        nearest = &t;
      }
    }
    if (!block_there && last >= 0) fail("%s: tensor %s is missing: the file holds blk.%lld to blk.%lld", path_, name.c_str(), (long long)first, (long long)last);
    fail("%s: tensor %s is missing%s%s", path_, name.c_str(), nearest ? ", nearest present name: " : "", nearest ? printable(nearest->name).c_str() : "");
  }

  // The tensor of that name if its dimensions are exactly these.
  const Tensor& need_shape(const std::string& name, Dim d0, Dim d1, Dim d2) const {
    const Tensor& t = need(name);
    const Dim want[4] = {d0, d1, d2, {1, "no more dimensions"}};
    for (int d = 0; d < 4; d++) {
      if (t.dims[d] != want[d].n) {
        fail("%s: tensor %s has dim[%d] = %llu, expected %llu (%s)", path_, name.c_str(), d, ull(t.dims[d]), ull(want[d].n), want[d].what);
      }
    }
    return t;
  }
  static Dim none() { return {1, "no more dimensions"}; }

  const Tensor& need_weights(const std::string& name, Dim d0, Dim d1, Dim d2) const {
    const Tensor& t = need_shape(name, d0, d1, d2);
    if (t.type == Type::I32) fail("%s: tensor %s has type I32, expected a float or quantised type", path_, name.c_str());
    return t;
  }
  // [rows * slices][cols], slices outermost.
  Matrix matrix(const std::string& name, Dim cols, Dim rows, Dim slices = none()) const {
    const Tensor& t = need_weights(name, cols, rows, slices);
    const uint64_t n_rows = checked_mul(rows.n, slices.n, name.c_str());
    if (n_rows > UINT32_MAX || cols.n > INT32_MAX) fail("%s: tensor %s has %llu rows of %llu, too many", path_, name.c_str(), ull(n_rows), ull(cols.n));
    return {t.type, t.data, size_t(row_bytes(t.type, cols.n)), uint32_t(n_rows), uint32_t(cols.n)};
  }
  // A small tensor as float: [rows][cols].
  std::vector<float> floats(const std::string& name, Dim cols, Dim rows = none()) const {
    const Tensor& t = need_weights(name, cols, rows, none());
    std::vector<float> out(size_t(cols.n * rows.n));
    best_kernels()->dequantize(t.type, t.data, out.data(), out.size());
    return out;
  }

  HyperConn hyper_connection(const std::string& prefix, Dim rows, uint64_t n_scale) const {
    const Shape& s = model_.shape;
    HyperConn hc;
    hc.fn = matrix(prefix + "_fn.weight", {uint64_t(s.n_hc) * s.n_embd, "hyper_connection.count x embedding_length"}, rows);
    hc.scale = floats(prefix + "_scale.weight", {n_scale, "scales"});
    hc.base = floats(prefix + "_base.weight", rows);
    return hc;
  }
  Compressor compressor(const std::string& prefix, Dim width, uint32_t ratio) const {
    const Dim embd = {model_.shape.n_embd, "embedding_length"};
    const Dim rows = {width.n * (ratio == 4 ? 2 : 1), ratio == 4 ? "2 x the row width" : width.what};
    Compressor c;
    c.kv = matrix(prefix + "_kv.weight", embd, rows);
    c.gate = matrix(prefix + "_gate.weight", embd, rows);
    c.ape = floats(prefix + "_ape.weight", rows, {ratio, "compress ratio"});
    c.norm = floats(prefix + "_norm.weight", width);
    return c;
  }

  LayerWeights bind_layer(uint32_t il) const {
    const Shape& s = model_.shape;
    const Dim embd = {s.n_embd, "embedding_length"}, head = {s.head_dim, "key_length"}, q_rank = {s.q_rank, "q_lora_rank"};
    const Dim heads = {uint64_t(s.n_head) * s.head_dim, "head_count x key_length"};
    const Dim group = {heads.n / s.n_group, "head_count x key_length / output_group_count"};
    const Dim low = {uint64_t(s.n_group) * s.o_rank, "output_group_count x output_lora_rank"};
    const Dim mix = {uint64_t(s.n_hc) * (s.n_hc + 2), "hyper_connection.count x (count + 2)"};
    LayerWeights w = {};
    w.hc_attn = hyper_connection(blk(il, "hc_attn"), mix, 3);
    w.attn_norm = floats(blk(il, "attn_norm.weight"), embd);
    w.q_a = matrix(blk(il, "attn_q_a.weight"), embd, q_rank);
    w.q_a_norm = floats(blk(il, "attn_q_a_norm.weight"), q_rank);
    w.q_b = matrix(blk(il, "attn_q_b.weight"), q_rank, heads);
    w.kv = matrix(blk(il, "attn_kv.weight"), embd, head);
    w.kv_norm = floats(blk(il, "attn_kv_a_norm.weight"), head);
    w.sinks = floats(blk(il, "attn_sinks.weight"), {s.n_head, "head_count"});
    w.out_a = matrix(blk(il, "attn_output_a.weight"), group, low);
    w.out_b = matrix(blk(il, "attn_output_b.weight"), low, embd);
    if (s.ratios[il] != 0) w.comp = compressor(blk(il, "attn_compressor"), head, s.ratios[il]);
    if (s.ratios[il] == 4) {
      w.idx_q = matrix(blk(il, "indexer.attn_q_b.weight"), q_rank, {uint64_t(s.idx_heads) * s.idx_dim, "indexer.head_count x indexer.key_length"});
      w.idx_proj = matrix(blk(il, "indexer.proj.weight"), embd, {s.idx_heads, "indexer.head_count"});
      w.idx_comp = compressor(blk(il, "indexer_compressor"), {s.idx_dim, "indexer.key_length"}, 4);
    }
    w.hc_ffn = hyper_connection(blk(il, "hc_ffn"), mix, 3);
    w.ffn_norm = floats(blk(il, "ffn_norm.weight"), embd);
    bind_ffn(il, w);
    return w;
  }

  void bind_ffn(uint32_t il, LayerWeights& w) const {
    const Shape& s = model_.shape;
    const Dim embd = {s.n_embd, "embedding_length"}, ff = {s.ff, "expert_feed_forward_length"}, n_expert = {s.n_expert, "expert_count"};
    const Dim shared = {s.ff_shared, "expert_feed_forward_length x expert_shared_count"};
    w.router = matrix(blk(il, "ffn_gate_inp.weight"), embd, n_expert);
    if (il < s.n_hash) w.tid2eid = expert_table(blk(il, "ffn_gate_tid2eid.weight"));
    else w.probs_bias = floats(blk(il, "exp_probs_b.bias"), n_expert);
    w.experts.gate = matrix(blk(il, "ffn_gate_exps.weight"), embd, ff, n_expert);
    w.experts.up = matrix(blk(il, "ffn_up_exps.weight"), embd, ff, n_expert);
    w.experts.down = matrix(blk(il, "ffn_down_exps.weight"), ff, embd, n_expert);
    w.sh_gate = matrix(blk(il, "ffn_gate_shexp.weight"), embd, shared);
    w.sh_up = matrix(blk(il, "ffn_up_shexp.weight"), embd, shared);
    w.sh_down = matrix(blk(il, "ffn_down_shexp.weight"), shared, embd);
  }

  // Expert ids per token; every one is checked, because they become addresses.
  const int32_t* expert_table(const std::string& name) const {
    const Shape& s = model_.shape;
    const Tensor& t = need_shape(name, {s.n_used, "expert_used_count"}, {s.n_vocab, "vocabulary size"}, none());
    if (t.type != Type::I32) fail("%s: tensor %s has type %s, expected I32", path_, name.c_str(), type_info(uint32_t(t.type))->name);
    const int32_t* ids = reinterpret_cast<const int32_t*>(t.data);
    const size_t n = size_t(s.n_used) * s.n_vocab;
    for (size_t i = 0; i < n; i++) {
      if (uint32_t(ids[i]) >= s.n_expert) {
        fail("%s: tensor %s names expert %d for token %zu, expected 0 to %u", path_, name.c_str(), ids[i], i / s.n_used, s.n_expert - 1);
      }
    }
    return ids;
  }

  const Gguf& file_;
  const char* path_;
  Model model_ = {};
  std::vector<std::string> assumed_;
};

// The model of a GGUF file, which must outlive it. Throws Error: one sentence with file, tensor or key, found, expected.
static Model load_model(const Gguf& file) { return ModelLoader(file).load(); }

// -- what the weights weigh ----

// Calls f(matrix, is_expert) for every matrix that a decoded token multiplies with (token_embd is not one).
template <class F>
static void for_each_matrix(const Model& m, const F& f) {
  f(m.output, false);
  f(m.hc_head.fn, false);
  for (const LayerWeights& w : m.layers) {
    for (const Matrix* x : {&w.hc_attn.fn, &w.hc_ffn.fn, &w.q_a, &w.q_b, &w.kv, &w.out_a, &w.out_b, &w.comp.kv, &w.comp.gate, &w.idx_comp.kv,
                            &w.idx_comp.gate, &w.idx_q, &w.idx_proj, &w.router, &w.sh_gate, &w.sh_up, &w.sh_down})
      if (x->data) f(*x, false);
    for (const Matrix* x : {&w.experts.gate, &w.experts.up, &w.experts.down}) f(*x, true);
  }
}

// Bytes of the weights that a decoded token is multiplied with: all dense matrices, n_used of n_expert experts, one row of
// token_embd. Fewer are read (--bench profile counts them): several tokens share one reading of the compressors' weights, and
// the indexer's are not used in short contexts.
static uint64_t bytes_per_token(const Model& m) {
  uint64_t n = m.token_embd.stride;
  for_each_matrix(m, [&](const Matrix& w, bool is_expert) {
    const uint64_t nbytes = uint64_t(w.rows) * w.stride;
    n += is_expert ? nbytes / m.shape.n_expert * m.shape.n_used : nbytes;
  });
  return n;
}

// Keeps all matrices but the experts in memory (--mlock-dense); a warning if the system refuses.
static void lock_dense_weights(const Model& m) {
  uint64_t locked = 0, refused = 0;
  for_each_matrix(m, [&](const Matrix& w, bool is_expert) {
    const uint64_t nbytes = uint64_t(w.rows) * w.stride;
    if (!is_expert) (lock_pages(w.data, nbytes) ? locked : refused) += nbytes;
  });
  if (refused) {
    warn("%s: cannot keep %.1f GB of dense weights in memory, %.1f GB are: %s (see ulimit -l)", m.file->path().c_str(), double(refused) / 1e9,
         double(locked) / 1e9, std::strerror(errno));
  }
}

// One line of the type table of --inspect.
struct RoleUse {
  const char* role;
  Type type;
  uint32_t count;
  uint64_t nbytes;
};

// Tensors of the file by role and type, in the order in which the file has them. Tensors without a role are "unused".
static std::vector<RoleUse> role_table(const Model& m) {
  std::vector<RoleUse> table;
  for (const Tensor& t : m.file->tensors()) {
    const BlockName name = split_block_name(t.name);
    const char* role = name.block >= int64_t(m.shape.n_layer) ? "MTP, unused" : role_of(name.rest);
    if (!role) role = "unused";
    auto same = [&](const RoleUse& u) { return u.type == t.type && std::strcmp(u.role, role) == 0; };
    auto it = std::find_if(table.begin(), table.end(), same);
    if (it == table.end()) it = table.insert(table.end(), {role, t.type, 0, 0});
    it->count++;
    it->nbytes += t.nbytes;
  }
  return table;
}

}  // namespace ds4

// =============================================================================
// 10. VOCAB — token texts and their hash table, the merge table, special ids.   uses: 2 8
// =============================================================================
// In: the tokenizer.ggml.* keys of a GGUF. Out: text -> id, id -> text or bytes, (id, id) -> merge, each in O(1).
// Texts are views into the mapping, so the Gguf must outlive the Vocab. Nothing is allocated per token, no id is
// hard-wired, and a file that breaks the rules below is refused with the key, the index and the text that broke them.

namespace ds4 {

// -- byte alphabet ----
// GPT-2's printable stand-ins for bytes: 21-7E, A1-AC and AE-FF stand for themselves (as code points), the other
// 68 bytes, ascending, for U+0100..U+0143. So the space is U+0120 and the line feed U+010A.
struct ByteAlphabet {
  uint16_t symbol[256];          // byte -> code point
  int16_t byte[0x144];           // code point -> byte, -1 outside the alphabet
  constexpr ByteAlphabet() : symbol(), byte() {
    for (int16_t& b : byte) b = -1;
    uint16_t extra = 0x100;
    for (uint16_t b = 0; b < 256; b++) {
      const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      symbol[b] = itself ? b : extra++;
      byte[symbol[b]] = int16_t(b);
    }
  }
};
constexpr ByteAlphabet kByteAlphabet;

// Writes the UTF-8 form of the symbol of byte b to out[2]; returns its length.
static size_t write_symbol(uint8_t b, char* out) {
  const unsigned c = kByteAlphabet.symbol[b];
  if (c < 0x80) return out[0] = char(c), 1;
  out[0] = char(0xc0 | c >> 6);
  out[1] = char(0x80 | (c & 63));
  return 2;
}

// -- vocabulary ----
enum class PreTokenizer { DeepSeek, Qwen2, Llama3 };

constexpr uint32_t kNoMerge = UINT32_MAX;    // above every rank
constexpr int kTokenBits = 21, kRankBits = 22;    // limits on a vocabulary: two ids and a rank fit into 64 bits
constexpr uint32_t kTokenMask = (1u << kTokenBits) - 1, kRankMask = (1u << kRankBits) - 1;

class Vocab {
 public:
  // Throws Error when the file has no byte-level BPE vocabulary or a broken one; warns of an unknown pre-tokenizer.
  explicit Vocab(const Gguf& file);

  int32_t size() const { return int32_t(texts_.size()); }
  bool contains(int32_t id) const { return uint32_t(id) < texts_.size(); }
  // The token as the file spells it (byte alphabet, or literal text for added tokens); empty for no such id.
  std::string_view text(int32_t id) const { return contains(id) ? texts_[size_t(id)] : std::string_view(); }
  // Id of the token spelled `key` in the file, -1 if there is none; of several the lowest.
  int32_t find(std::string_view key) const { return find(fnv1a(key), key, {}); }
  // Appends the bytes the token stands for: its text mapped back through the byte alphabet, or, if any character is not
  // in the alphabet, the text itself (added tokens). Nothing for no such id.
  void append_bytes(int32_t id, std::string& out) const;
  bool is_control(int32_t id) const { return contains(id) && types_[size_t(id)] == 3; }
  bool is_added(int32_t id) const { return is_control(id) || (contains(id) && types_[size_t(id)] == 4); }
  int32_t byte_id(uint8_t b) const { return byte_ids_[b]; }
  size_t longest_text() const { return longest_text_; }
  size_t n_merges() const { return merged_.size(); }
  // Rank of the merge of two adjacent tokens (the lower, the earlier), or kNoMerge; and the token a merge makes.
  uint32_t find_merge(int32_t left, int32_t right) const {
    const uint64_t pair = pair_of(left, right), bit = hash_pair(pair) >> filter_shift_;
    if (!(filter_[bit / 64] >> bit % 64 & 1)) return kNoMerge;
    const uint64_t m = merges_[merge_slot(pair)];
    return m == kFree ? kNoMerge : uint32_t(m) & kRankMask;
  }
  int32_t merged(uint32_t rank) const { return int32_t(merged_[rank] & ~kCertain); }
  // True if the two tokens, wherever they stand side by side, get merged whatever is around them, so that it may as well
  // be done at once.
  bool is_certain(uint32_t rank) const { return merged_[rank] & kCertain; }

  int32_t bos = -1, eos = -1;    // -1: the file names none
  PreTokenizer pre = PreTokenizer::DeepSeek;
  bool ignore_merges = false;    // a piece that is a token as a whole is emitted without looking at merges (Llama 3)

 private:
  struct Slot { uint32_t tag; int32_t id; };          // upper half of the text's hash; id -1: free
  static constexpr uint64_t kFree = ~0ull;
  static constexpr uint32_t kCertain = 1u << 31;
  static uint64_t pair_of(int32_t left, int32_t right) { return uint64_t(left) << kTokenBits | uint64_t(right); }
  int32_t find(uint64_t hash, std::string_view a, std::string_view b) const;
  static uint64_t hash_pair(uint64_t pair) { return pair * 0x9e3779b97f4a7c15ull; }    // the top bits depend on all bits
  size_t merge_slot(uint64_t pair) const;
  void load_tokens(const Gguf& file);
  void load_merges(const Gguf& file);
  void mark_certain_merges();
  void load_specials(const Gguf& file);

  std::vector<std::string_view> texts_;
  std::vector<int32_t> types_;
  std::vector<Slot> slots_;      // open addressing: power of two >= 2 n + 16 slots, linear probing
  std::vector<uint64_t> merges_; // likewise: pair << kRankBits | rank; small, as merging text waits for its cache misses
  std::vector<uint32_t> merged_; // by rank: the resulting id, and the bit kCertain
  std::vector<uint64_t> filter_; // a bit per quarter slot: most pairs are no merge, and this says so from the L2 cache
  int merge_shift_ = 0, filter_shift_ = 0;
  size_t longest_text_ = 0;
  int32_t byte_ids_[256];
};

// Slots of a hash table for n entries.
static size_t table_capacity(size_t n) {
  size_t capacity = 32;
  while (capacity < 2 * n + 16) capacity *= 2;
  return capacity;
}

// Id of the token spelled a + b, whose FNV-1a hash the caller has, or -1.
inline int32_t Vocab::find(uint64_t hash, std::string_view a, std::string_view b) const {
  const size_t mask = slots_.size() - 1;
  for (size_t i = hash & mask; slots_[i].id >= 0; i = (i + 1) & mask) {
    if (slots_[i].tag != uint32_t(hash >> 32)) continue;
    const std::string_view t = texts_[size_t(slots_[i].id)];
    if (t.size() == a.size() + b.size() && t.substr(0, a.size()) == a && t.substr(a.size()) == b) return slots_[i].id;
  }
  return -1;
}

// Where the merge of `pair` is, or the free slot where it would be.
inline size_t Vocab::merge_slot(uint64_t pair) const {
  const size_t mask = merges_.size() - 1;
  size_t i = size_t(hash_pair(pair) >> merge_shift_);
  while (merges_[i] >> kRankBits != pair && merges_[i] != kFree) i = (i + 1) & mask;
  return i;
}

Vocab::Vocab(const Gguf& file) {
  const auto model = file.find_string("tokenizer.ggml.model");
  if (!model) fail("%s: no tokenizer.ggml.model: the file has no vocabulary", file.path().c_str());
  if (*model != "gpt2") {
    fail("%s: tokenizer.ggml.model is '%s', expected 'gpt2' (byte-level BPE)", file.path().c_str(), printable(*model).c_str());
  }
  load_tokens(file);
  load_merges(file);
  load_specials(file);
}

void Vocab::load_tokens(const Gguf& file) {
  const char* path = file.path().c_str();
  const auto tokens = file.find_strings("tokenizer.ggml.tokens");
  if (!tokens || tokens->size() == 0) fail("%s: no tokenizer.ggml.tokens", path);
  const size_t n = tokens->size();
  if (n > (1u << kTokenBits)) fail("%s: tokenizer.ggml.tokens has %zu entries, expected at most 2^%d", path, n, kTokenBits);
  const auto types = file.find_ints("tokenizer.ggml.token_type");
  const auto scores = file.find_numbers("tokenizer.ggml.scores");
  const auto check_size = [&](const char* key, size_t found) {
    if (found != n) fail("%s: tokenizer.ggml.%s has %zu entries, expected %zu, one for each token", path, key, found, n);
  };
  if (types) check_size("token_type", types->size());
  if (scores) check_size("scores", scores->size());
  if (!types) warn("%s: no tokenizer.ggml.token_type: no special token will be recognised", path);
  types_ = types ? *types : std::vector<int32_t>(n, 1);
  texts_.reserve(n);
  slots_.assign(table_capacity(n), Slot{0, -1});
  const size_t mask = slots_.size() - 1;
  for (std::string_view t : *tokens) {
    const int32_t id = int32_t(texts_.size());
    const uint64_t hash = fnv1a(t);
    texts_.push_back(t);
    longest_text_ = std::max(longest_text_, t.size());
    if (find(hash, t, {}) >= 0) continue;              // unused ids may share a text: the first owns it
    size_t i = hash & mask;
    while (slots_[i].id >= 0) i = (i + 1) & mask;
    slots_[i] = {uint32_t(hash >> 32), id};
  }
  for (int b = 0; b < 256; b++) {
    char symbol[2];
    const std::string_view key(symbol, write_symbol(uint8_t(b), symbol));
    byte_ids_[b] = find(key);
    if (byte_ids_[b] >= 0) continue;
    fail("%s: tokenizer.ggml.tokens lacks '%s', the symbol of byte 0x%02x", path, printable(key).c_str(), b);
  }
}

void Vocab::load_merges(const Gguf& file) {
  const char* path = file.path().c_str();
  const auto merges = file.find_strings("tokenizer.ggml.merges");
  if (!merges) fail("%s: no tokenizer.ggml.merges", path);
  const size_t n = merges->size();
  if (n >= (1u << kRankBits)) fail("%s: tokenizer.ggml.merges has %zu entries, expected less than 2^%d", path, n, kRankBits);
  merged_.reserve(n);
  merges_.assign(table_capacity(n), kFree);
  merge_shift_ = 64;
  for (size_t capacity = merges_.size(); capacity > 1; capacity /= 2) merge_shift_--;
  filter_shift_ = merge_shift_ - 2;
  filter_.assign(merges_.size() / 16, 0);
  for (std::string_view m : *merges) {
    const auto broken = [&](const char* why) {
      fail("%s: tokenizer.ggml.merges[%zu] is '%s': %s", path, merged_.size(), printable(m).c_str(), why);
    };
    const size_t gap = m.find(' ');
    if (gap == m.npos || gap == 0 || gap + 1 == m.size() || m.find(' ', gap + 1) != m.npos) {
      broken("expected two tokens and one space between");
    }
    const std::string_view a = m.substr(0, gap), b = m.substr(gap + 1);
    const uint64_t hash_a = fnv1a(a);
    const int32_t left = find(hash_a, a, {}), right = find(b), merged = find(fnv1a(b.data(), b.size(), hash_a), a, b);
    if (left < 0) broken("the left side is not a token");
    if (right < 0) broken("the right side is not a token");
    if (merged < 0) broken("the result is not a token");
    const uint64_t pair = pair_of(left, right), bit = hash_pair(pair) >> filter_shift_;
    merges_[merge_slot(pair)] = pair << kRankBits | merged_.size();
    merged_.push_back(uint32_t(merged));
    filter_[bit / 64] |= 1ull << bit % 64;
  }
  mark_certain_merges();
}

// (a, b) -> c of rank r is certain if every other pair that a is the right or b the left side of has a higher rank: then
// nothing takes a or b away before its turn. Doing it early changes nothing else if every pair with c on either side has a
// higher rank too: none of those could have come before its turn either. About a quarter of the merges are certain, and
// half of those in a CJK text, where they put the bytes of a character together.
void Vocab::mark_certain_merges() {
  std::vector<uint32_t> as_left(texts_.size(), kNoMerge), as_right(texts_.size(), kNoMerge);    // lowest ranks
  const auto each = [&](auto f) {
    for (uint64_t m : merges_)
      if (m != kFree) f(m >> kRankBits >> kTokenBits, m >> kRankBits & kTokenMask, uint32_t(m) & kRankMask);
  };
  each([&](size_t left, size_t right, uint32_t rank) {
    as_left[left] = std::min(as_left[left], rank);
    as_right[right] = std::min(as_right[right], rank);
  });
  each([&](size_t left, size_t right, uint32_t rank) {
    const uint32_t c = merged_[rank];
    const uint32_t rivals = std::min(std::min(as_right[left], as_left[right]), std::min(as_left[c], as_right[c]));
    if (rivals > rank) merged_[rank] |= kCertain;
  });
}

void Vocab::load_specials(const Gguf& file) {
  const auto token_id = [&](const char* key) {
    const auto id = file.find_uint(key);
    if (id && *id >= texts_.size()) {
      fail("%s: %s is %llu, expected below the %zu tokens", file.path().c_str(), key, ull(*id), texts_.size());
    }
    return id ? int32_t(*id) : -1;
  };
  bos = token_id("tokenizer.ggml.bos_token_id");
  eos = token_id("tokenizer.ggml.eos_token_id");
  const auto name = file.find_string("tokenizer.ggml.pre");
  const auto is = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is({"qwen2", "deepseek-r1-qwen"})) {
    pre = PreTokenizer::Qwen2;
  } else if (is({"llama-bpe", "llama3", "llama-v3"})) {
    pre = PreTokenizer::Llama3;
    ignore_merges = true;
  } else if (!is({"joyai-llm", "deepseek-v3", "deepseek-v4"})) {
    const std::string found = name ? "'" + printable(*name) + "', unknown" : "missing";
    warn("%s: tokenizer.ggml.pre is %s: splitting text as DeepSeek V4 does", file.path().c_str(), found.c_str());
  }
}

void Vocab::append_bytes(int32_t id, std::string& out) const {
  const std::string_view t = text(id);
  const size_t start = out.size();
  for (size_t i = 0; i < t.size(); i++) {
    unsigned c = uint8_t(t[i]);
    if (c >= 0x80) {             // the alphabet ends at U+0143: two bytes, the first C2..C5
      const unsigned low = i + 1 < t.size() ? uint8_t(t[++i]) : 0;
      c = c >= 0xc2 && c <= 0xc5 && (low & 0xc0) == 0x80 ? (c & 31) << 6 | (low & 63) : 0x144;
    }
    if (c >= 0x144 || kByteAlphabet.byte[c] < 0) {
      out.resize(start);
      out.append(t);
      return;
    }
    out.push_back(char(kByteAlphabet.byte[c]));
  }
}

}  // namespace ds4

// =============================================================================
// 11. TOKENIZER — character classes, pre-tokenizers, merge loop, added tokens, bench.   uses: 2 10
// =============================================================================
// In: any bytes. Out: ids whose bytes are exactly those bytes, and the same ids as the model was trained with for all
// valid UTF-8: text -> added tokens cut out (trusted text only) -> pieces (split_text) -> byte tokens -> merges.

namespace ds4 {

// -- character classes ----
// Unicode 16.0.0 general categories \p{L} \p{M} \p{N} \p{P} \p{S} and \s (W), pairwise disjoint; O is everything else.
// Run lengths from U+0000 on, made by tools/make_unicode.py: a class letter, then the length in base 32 (0-9a-v) if not 1.
constexpr char kClassRuns[] =
    "O9W5OiWP3SP6SP4NaP2S3P2LqP3SPSLqPSPSO6WOqWPS5PS2LPSOS4N2SLP2SNLPN3PLnSLvSLeaS4LcSeL5S7LSLShM3gL5SL2O2L4PLO4S2LPL3O"
    "LOLkOL2jSL4bSM7L56OL16O2LP6L19P2O2S3OM1dPMPM2PM2PMO8LrO4L4P2OhS3P2SP2S2MbPOP3L1bMlNaP4L2ML33PLM7OSM6L2M2SM4L2NaL3"
    "S2LPeO2LMLuMrO2L2pMbLOeNaL11M9L2SP3LO2MS2LmM4LM9LM3LM5O2PfOLpM3O2POLbO5LoSL6O8M9L1aMoOM11L1mM3LMiLM7LaM2P2NaPLgM3O"
    "L8O2L2O2LmOL7OLO3L4O2MLM7O2M2O2M3LO8MO4L2OL3M2O2NaL2S2N6S2LPMO2M3OL6O4L2O2LmOL7OL2OL2OL2O2MOM5O4M2O2M3O3MO7L4OLO7"
    "NaM2L3MPOaM3OL9OL3OLmOL7OL2OL5O2MLM8OM3OM3O2LOfL2M2O2NaPSO7LM6OM3OL8O2L2O2LmOL7OL2OL5O2MLM7O2M2O2M3O7M3O4L2OL3M2O2"
    "NaSLN6OaMLOL6O3L3OL4O3L2OLOL2O3L2O3L3O3LcO4M5O3M3OM4O2LO6MOeNdS8O5M5L8OL3OLnOLgO2MLM7OM3OM4O7M2OL3O2LO2L2M2O2NaO7P"
    "N7SLM3PL8OL3OLnOLaOL5O2MLM7OM3OM4O7M2O6L2OL2M2O2NaOL2MOcM4L9OL3OL19M2LM7OM3OM4LSO4L3MN7L3M2O2NjSL6OM3OLiO3LoOL9OL"
    "O2L7O3MO4M6OMOM8O6NaO2M2POcL1gML2M7O4SL7M8PNaP2O15L2OLOL5OLoOLOLaML2M9LO2L5OLOM7ONaO2L4O10LS3PfSPS3M2S6NkSMSMSMP4"
    "M2L8OL14O4MkPM2L5MbOM14OS8MS6OS2P5S4P2O15L1bMkLNaP6L6M4L4M3LM3L2M7L3M4LdMcLMNaM4S2L16OLO5LO2L1bPLadOL4O2L7OLOL4O2"
    "L19OL4O2L11OL4O2L7OLOL4O2LfOL1pOL4O2L23O2M3P9NkO3LgSaO6L2mO2L6O2PLjcSPLhWLqP2O3L2bP3N3L8O7LiM4O9LjM3P2O9LiM2OcLdO"
    "L3OM2OcL1kM10P3LP3SLMO2NaO6NaO6PbM3OMNaO6L2pO7L5M2L12MLO5L26OaLvOMcO4McO4SO3P2NaLuO2L5ObL1cO4LqO6NbO3S12LnM5O2P2"
    "L1lMaOMtO2MNaO6NaO6P7LP6O2MvO1hM5L1fMhL8OP2NaP7SaM9S9P3M3LuMdL2NaL1cMeO8P4L14MkO3P5NaO3L3NaL14P2LbO5L1bO2L3P8O8M3P"
    "MlL4ML6ML2M3LO5L60M20L8mO2L6O2L16O2L6O2L8OLOLOLOLvO2L1lOL7SLS3L3OL7S3L4O2L6OS3LdS3O2L3OL7S2OWbO5PoW2O5WPkSPdSPcWOg"
    "NLO2N6S3P2LNaS3P2OLdO3S11OfM11OfS2LS4LS2LaSLS3L5S6LSLSLSL4SLbS2L4S5L5S4LSN1jL2N5S2O4SboP4StP2S7vOmSbOlN1sS2eNmSj8"
    "PeNuS1hP2SvPaScjPmS1vP4S10P2SbmO2S10OS39L75S6L4M3L2O5P4NP2L16OLO5LO2L1oO7LPOeMLnO9L7OL7OL7OL7OL7OL7OL7OL7OM10P1fL"
    "P10S2PcO12SqOS2pOcS6mOqSgWP3SL2NPaS2PcSN9M6PL5S2N3L2PS2OL2mO2M2S2L3PL2qPL4O5L1bOL2uOS2N4SaL10S16O9SLgSvONaSuN8SNf"
    "S10NaS17NfSa0L6e0S20LlkdO3S1nO9L1eP2L8dP3LgNaL2OkL1fM4PMaPLvM2L26NaM2P6O8SnL9S2L37S2L23O2L2OLOL8OlLgML3ML4MLnM5S4M"
    "O3N6S4O6L1kP4O8M2L1iMiO8P2NaO6MiL6P3LPL2MNaLsM8P2LnMdObPLtO3M4L1fMePdOLNaO4P2L5MLaNaL5OL19MeO9L3ML8M2O2NaO2P4LnS3L"
    "M3L1iMLM3L2M2L5M2LMLOoL3P2LbM5P2L3M2OaL6O2L6O2L6O9L7OL7OL1bSLeS2O4L3jM8PM2O2NaO6Lat4OcLnO4L1hO884LbeO2L3aO16L7OcL5"
    "O5LMLaSLdOL5OLOL2OL2OL3cShOgLbbP2SgL20O2L1mO7SO10LcS4MgPaO6MgP13OPeSPS3OPSP2O4L5OL47O4P3SP6SP4NaP2S3P2LqP3SPSLqPSP"
    "SP7L2pO3L6O2L6O2L6O2L3O3S7OS7OdS2O2LcOLqOLjOL2OLfO2LeO12L3rO5P3O4N1dO3S9N1pShN2S3OSdO3SO1fS1dMO42LtO3L1hOfMNrO4L10"
    "N4O9LkNL8NO5L16M5O5LuOPL14O4L8PN5O1aL4uO2NaO6L14O4L14O4L18O8L1kObPLbOLfOL7OL2OLbOLfOL7OL2O3L1kOcL9nO9LmOaL8OoL6O"
    "L1aOL9O25L6O2LOL1cOL2O3LO2LnOPN8LnS2N7LvO8N9O1gLjOL2O5N5LmN6O3PLqO5PO20L1oO4N2L2NgO2N1eLM3OM2O5M4L4OL3OLtO2M3O4MN9"
    "O7P9O7LtN2PLtN3O10L8SLsM2O4N5P7O9L1mO3P7LmO2N8LjO5N8LiO7P4OcN7O2gL29O1nL1jOdL1jO7N6L14M4O8NaO6NaLsO3M5PLnO8S2O6gNv"
    "OL1aOM2PO2L2OgL3O1nM4LtNaLO8LmMbN4P5OmLiM4P4O16LlN7OkLnO9M3L1lMfP7O4NuML2M2LO9M4L1dMbP2OP4MOdLpO7NaO6M3L14MeONaP4L"
    "M2LO8L13MP2LO9M3L1gMeL4P4M4PM2NaLPLP3ONkObLiOLpMcP6ML2MO1uL7OLOL4OLfOLaPO6L1fMcO5NaO6M4OL8O2L2O2LmOL7OL2OL5OM2LM7"
    "O2M2O2M3O2LO6MO5L5M2O2M7O3M5ObLaOLO2LOL16OLM9OMO2MOM4OM5LMLP2OP2O8M2OtL1lMiL4P5NaP2OPML3OuL1gMkL2PLO8NaO56L1fM7O2"
    "M9PnL4M2O12L1gMhP3LObNaO6PdOjL1bMdLPO6NaO6NkOsLrO2MfO4NcP3SL7O5pL1cMfPO34L20NjOcL8O2LO2L8OL2OLoM6OM2O2M4LMLM2P3O9"
    "NaO26L8O2L17M7O2M7LPLMOrLMaL18M7LM4P8MO8LMbL1eMgP3LP5OdL29O7PaO5mL11POeNaO6L9OL15M8OM8LP5OaNtO3P2LuO2MmOMeO29L7OL2"
    "OL16M6O3MOM2OM7LMO8NaO6L6OL2OL10M5OM2OM5LO7NaO9mLjM4P2O7M2LMLdOL12M7O3M5PdNaMO2lLOfNlStOdPLsqO36N3fOP5ObL64O2icL31"
    "P2OdL11gOgML6MfOaL3srO5Li7O6lpLuMiNaO1m6LhpO7LvONaO4P2L2fONaO6LuO2M5POaL1gM7P5S4L4PSOaNaON7OLlO5LjOdgL1dP3NaO66L20"
    "NnP4O35L2bO4MLM1nO7M4LdO20L2PLMObM2OeL5voO8L16mO19LaO8n7L4OL7OL2OL93OfLOtL3O2LOeL4O8LccO284L3bO5LdO3L9O7LaO2SM2P"
    "O3r0S7gNaO6SdkO2cM1eO2MnO9S3kO1sS7mOaS17O2S1sM5S3M6O8M8S2M7SuM4S1tOlS22M3SO3qNkOcNkOcS2nO9NpO47L2lOL27OL2O2LO2L2O2"
    "L4OLcOLOL7OL21OL4O2L8OL7OLsOL4OL5OLO3L7OLakO2LpSLpSLvSLpSLvSLpSLvSLpSLvSLpSL8O2N1iSg0M1nS4M1iS8MSeMS2P5OfM5OMfO12g"
    "LvO6L6O6lM7OMhO2M7OM2OM5O5L1uO11MO3gL1dO3M7L7O2NaO4LSOa0LuMOhL1cM4NaO5SOegLsM4NaO6mLuM2LNaO4POf0L7OL4OL2OLfOL65O2"
    "N9M7O19L24M7LO4NaO4P2OohN1rSN3SN4O2cN1dSNfO62L4OLrOL2OLO2LOLaOL4OLOLO6LO4LOLOLOL3OL2OLO2LOLOLOLOLOL2OLO2L4OL7OL4O"
    "L4OLOLaOLhO5L3OL5OLhO1kS2O8eS1cO4S34OcSfO2SfOSfOS15OaNdS51O1oStOdS1cO4S9O7S2OeS6O4qSuoO4ShO3SdO3S3nO4S2vO6ScO4SOf"
    "ScO4S1oO8SaO6S18O8SuO2ScO4S2O1uSakOcSeO2SdO3SaO5S1oO7SfO2SbO6S9O7S4jOS2sNaO106L19n0O10L41qO6L6uO2L5k2OeL79hOfLje"
    "O2d2LguO1f2L4qbO5L430OlnagM7g";

// Class bits of a character. Class O has none of the first six.
namespace cls {
enum : uint8_t { L = 1, M = 2, N = 4, P = 8, S = 16, W = 32, LM = L | M, PS = P | S, Any = 63, Cjk = 64, Newline = 128 };
}

// Class bits of every code point. 1.1 MB of zero pages of which only those with assigned characters are ever touched.
static const uint8_t* class_table() {
  static uint8_t table[0x110000];
  static const uint8_t* const filled = [] {
    const char* s = kClassRuns;
    for (size_t c = 0; *s;) {
      const char k = *s++;
      size_t n = 0;
      for (; *s && (*s < 'A' || *s > 'Z'); s++) n = n * 32 + size_t(*s <= '9' ? *s - '0' : *s - 'a' + 10);
      if (n == 0) n = 1;
      const size_t bit = std::string_view("LMNPSW").find(k);
      if (bit != std::string_view::npos) std::memset(table + c, 1 << bit, n);
      c += n;
    }
    for (size_t c = 0x4e00; c <= 0x9fa5; c++) table[c] |= cls::Cjk;
    for (size_t c = 0x3040; c <= 0x30ff; c++) table[c] |= cls::Cjk;
    table[size_t('\r')] |= cls::Newline;
    table[size_t('\n')] |= cls::Newline;
    return table;
  }();
  return filled;
}

// A character of a text: its class bits and its length in bytes; {0, 0} is the end.
struct Char {
  uint8_t bits, len;
};

// The character at p < end. A byte that starts no valid UTF-8 sequence is a character of class O by itself, which keeps
// its own byte token, so that any input comes back from its ids.
DS4_INLINE Char read_char(const uint8_t* table, const uint8_t* p, const uint8_t* end) {
  const uint32_t b = p[0];
  if (b < 0x80) return {table[b], 1};
  const auto tail = [p](int i) { return p[i] & 63u; };
  const auto valid = [p, end](int n) {
    if (end - p < n) return false;
    for (int i = 1; i < n; i++)
      if ((p[i] & 0xc0) != 0x80) return false;
    return true;
  };
  if (b >= 0xe0 && b < 0xf0 && valid(3)) {
    const uint32_t c = (b & 15) << 12 | tail(1) << 6 | tail(2);
    if (c >= 0x800 && (c < 0xd800 || c > 0xdfff)) return {table[c], 3};
  } else if (b >= 0xc2 && b < 0xe0 && valid(2)) {
    return {table[(b & 31) << 6 | tail(1)], 2};
  } else if (b >= 0xf0 && b < 0xf5 && valid(4)) {
    const uint32_t c = (b & 7) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3);
    if (c >= 0x10000 && c < 0x110000) return {table[c], 4};
  }
  return {0, 1};
}

// -- pre-tokenizers ----
// A walk over the characters of a text. `cur` is the character at p, or the end as soon as a character differs from
// `span` in one of the bits `border`: piece ends and lookahead treat a border as the end of the text.
struct TextCursor {
  const uint8_t* table;
  const uint8_t* p;
  const uint8_t* end;
  uint8_t span = 0, border = 0;
  Char cur = {0, 0};

  DS4_INLINE Char peek(const uint8_t* q) const {
    if (q == end) return {0, 0};
    const Char c = read_char(table, q, end);
    return (c.bits ^ span) & border ? Char{0, 0} : c;
  }
  void next() { p += cur.len, cur = peek(p); }
  void skip(uint8_t classes) {
    while (cur.bits & classes) next();
  }
  void skip_digits(int most) {
    for (; most > 0 && (cur.bits & cls::N); most--) next();
  }
};

// \s*[\r\n]+ | \s+(?!\S) | \s+   with t behind the first character `c` of the white space, which began at `start`.
// If the run holds a CR or LF the piece ends after the last one; else it is the run, but for the last character if
// something follows (that one then joins the next piece or stands alone).
static void skip_space(TextCursor& t, Char c, const uint8_t* start) {
  const uint8_t* last = start;
  const uint8_t* after_newline = c.bits & cls::Newline ? t.p : nullptr;
  while (t.cur.bits & cls::W) {
    last = t.p;
    const bool newline = t.cur.bits & cls::Newline;
    t.next();
    if (newline) after_newline = t.p;
  }
  if (after_newline) {
    t.p = after_newline;
  } else if (t.cur.len && last != start) {
    t.p = last;
  }
}

// DeepSeek V3 and V4. Three splits in sequence, each looking only inside the pieces of the one before:
//   1. \p{N}{1,3}
//   2. [U+4E00-9FA5 U+3040-30FF]+
//   3. (a) [!-/:-@\[-`{-~][A-Za-z]+ | (b) [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+ | (c)  ?[\p{P}\p{S}]+[\r\n]*
//      | (d) \s*[\r\n]+ | \s+(?!\S) | \s+
// and what no alternative matches stays together as a piece. A border between numbers, CJK and the rest therefore acts
// as the end of the text. emit(p, q) gets each piece in order.
template <class F>
static void split_deepseek(const uint8_t* text, const uint8_t* end, const F& emit) {
  TextCursor t{class_table(), text, end};
  while (t.p < end) {
    const uint8_t* const start = t.p;
    t.border = 0;
    t.cur = t.peek(t.p);
    if (t.cur.bits & cls::N) {
      t.skip_digits(3);
      emit(start, t.p);
      continue;
    }
    const Char c = t.cur;
    t.span = c.bits;
    t.border = cls::Cjk | cls::N;
    t.next();
    if (c.bits & cls::PS && *start < 0x80 && t.cur.bits & cls::L && *t.p < 0x80) {                     // (a)
      do t.next();
      while (t.cur.bits & cls::L && *t.p < 0x80);
    } else if (c.bits & cls::LM || (!(c.bits & (cls::PS | cls::Newline)) && t.cur.bits & cls::LM)) {   // (b)
      t.skip(cls::LM);
    } else if (c.bits & cls::PS || (*start == ' ' && t.cur.bits & cls::PS)) {                          // (c)
      t.skip(cls::PS);
      t.skip(cls::Newline);
    } else if (c.bits & cls::W) {                                                                      // (d)
      skip_space(t, c, start);
    } else {                     // class O not before a letter, and all of its like that follow
      while (t.cur.len && !(t.cur.bits & cls::Any) && !(t.peek(t.p + t.cur.len).bits & cls::LM)) t.next();
    }
    emit(start, t.p);
  }
}

// Bytes of (?i:'s|'t|'re|'ve|'m|'ll|'d) behind its apostrophe, at p; 0 if there is none. U+017F folds to s.
static size_t contraction(const uint8_t* p, const uint8_t* end) {
  const auto lower = [&](int i) { return end - p > i ? p[i] | 0x20 : 0; };
  const int a = lower(0), b = lower(1);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 1;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 2;
  return end - p >= 2 && p[0] == 0xc5 && p[1] == 0xbf ? 2 : 0;
}

// Qwen 2 (max_digits 1) and Llama 3 (max_digits 3), one pass:
//   (a) (?i:'s|'t|'re|'ve|'m|'ll|'d) | (b) [^\r\n\p{L}\p{N}]?\p{L}+ | (c) \p{N}{1,max_digits}
//   | (d)  ?[^\s\p{L}\p{N}]+[\r\n]* | (e) \s*[\r\n]+ | \s+(?!\S) | \s+
template <class F>
static void split_tiktoken(const uint8_t* text, const uint8_t* end, int max_digits, const F& emit) {
  TextCursor t{class_table(), text, end};
  const auto is_mark = [](Char c) { return c.len && !(c.bits & (cls::W | cls::L | cls::N)); };
  while (t.p < end) {
    const uint8_t* const start = t.p;
    const Char c = t.cur = t.peek(t.p);
    t.next();
    const size_t suffix = *start == '\'' ? contraction(t.p, end) : 0;
    if (suffix) {                                                                                      // (a)
      t.p += suffix;
    } else if (c.bits & cls::L || (!(c.bits & (cls::N | cls::Newline)) && t.cur.bits & cls::L)) {      // (b)
      t.skip(cls::L);
    } else if (c.bits & cls::N) {                                                                      // (c)
      t.skip_digits(max_digits - 1);
    } else if (is_mark(c) || (*start == ' ' && is_mark(t.cur))) {                                      // (d)
      while (is_mark(t.cur)) t.next();
      t.skip(cls::Newline);
    } else {                                                                                           // (e)
      skip_space(t, c, start);
    }
    emit(start, t.p);
  }
}

// Cuts text into the pieces inside which tokens are merged; emit(p, q) gets each in order.
template <class F>
static void split_text(PreTokenizer pre, std::string_view text, const F& emit) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(text.data());
  if (pre == PreTokenizer::DeepSeek) return split_deepseek(p, p + text.size(), emit);
  split_tiktoken(p, p + text.size(), pre == PreTokenizer::Qwen2 ? 1 : 3, emit);
}

// -- encoder ----
// A part of a prompt. Only in trusted parts (the template's own) does the text of an added token mean that token.
struct Chunk {
  std::string_view text;
  bool trusted;
};

// Turns text into ids, which are appended to `out`. Keeps scratch and a cache of pieces: one Tokenizer per thread.
class Tokenizer {
 public:
  explicit Tokenizer(const Vocab& vocab);
  // The text of a special token is ordinary text.
  void encode_plain(std::string_view text, std::vector<int32_t>& out);
  // Added tokens are recognised: the leftmost, of those the longest; each gap is encoded by itself.
  void encode_raw(std::string_view text, std::vector<int32_t>& out) {
    const Chunk chunk{text, true};
    encode_chunks(&chunk, 1, out);
  }
  // Added tokens are recognised inside one trusted chunk. All text between two of them is one text for the
  // pre-tokenizer, across the borders of chunks: that is how the model has seen it.
  void encode_chunks(const Chunk* chunks, size_t n, std::vector<int32_t>& out);
  const Vocab& vocab() const { return vocab_; }

 private:
  static constexpr size_t kCacheBits = 14, kCacheKey = 31, kCacheIds = 7;
  struct Cached {                // one cache line: a piece of 2..31 bytes and its ids
    uint64_t key[4];             // the bytes, zeros, and in the last byte the length (0: free)
    int32_t ids[kCacheIds], n;
  };
  struct Symbol {                // of a long piece: a token, its neighbours, its merge with the next one
    int32_t id;
    uint32_t prev, next, rank;
  };
  static constexpr size_t kShort = 48;

  void encode_piece(const uint8_t* p, size_t n, std::vector<int32_t>& out);
  bool encode_whole(const uint8_t* p, size_t n, std::vector<int32_t>& out);
  void merge_piece(const uint8_t* p, size_t n, std::vector<int32_t>& out);
  void merge_short(size_t n, std::vector<int32_t>& out);
  void merge_long(size_t n, std::vector<int32_t>& out);
  std::pair<int32_t, size_t> match_added(std::string_view text) const;

  const Vocab& vocab_;
  std::vector<int32_t> added_;   // ids of the added tokens, in the order of their texts
  bool starts_added_[256] = {};  // by first byte
  AlignedBuffer<Cached> cache_;
  std::vector<int32_t> ids_;     // of the piece in work: its tokens so far,
  std::vector<uint32_t> ranks_;  // and the rank of each one's merge with the next
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> heap_;
  std::string run_, spelling_;
};

Tokenizer::Tokenizer(const Vocab& vocab) : vocab_(vocab), cache_(size_t(1) << kCacheBits) {
  static_assert(sizeof(Cached) == 64, "one cache line");
  for (int32_t id = 0; id < vocab.size(); id++) {
    const std::string_view t = vocab.text(id);
    if (!vocab.is_added(id) || t.empty()) continue;
    added_.push_back(id);
    starts_added_[uint8_t(t[0])] = true;
  }
  std::sort(added_.begin(), added_.end(), [&](int32_t a, int32_t b) {
    const int order = vocab.text(a).compare(vocab.text(b));
    return order < 0 || (order == 0 && a < b);
  });
}

// Longest added token that `text` begins with: {id, length}, or {-1, 0}. Narrows the sorted list one byte at a time;
// in it, a token that ends where the search stands comes before all that go on.
std::pair<int32_t, size_t> Tokenizer::match_added(std::string_view text) const {
  std::pair<int32_t, size_t> best{-1, 0};
  auto lo = added_.begin(), hi = added_.end();
  for (size_t d = 0; d < text.size() && lo != hi; d++) {
    const uint8_t c = uint8_t(text[d]);
    lo = std::partition_point(lo, hi, [&](int32_t id) { return vocab_.text(id).size() <= d || uint8_t(vocab_.text(id)[d]) < c; });
    hi = std::partition_point(lo, hi, [&](int32_t id) { return uint8_t(vocab_.text(id)[d]) == c; });
    if (lo != hi && vocab_.text(*lo).size() == d + 1) best = {*lo, d + 1};
  }
  return best;
}

void Tokenizer::encode_plain(std::string_view text, std::vector<int32_t>& out) {
  if (text.size() > UINT32_MAX) fail("text of %zu bytes, expected less than 4 GB", text.size());
  split_text(vocab_.pre, text, [&](const uint8_t* p, const uint8_t* q) { encode_piece(p, size_t(q - p), out); });
}

void Tokenizer::encode_chunks(const Chunk* chunks, size_t n, std::vector<int32_t>& out) {
  run_.clear();
  for (size_t k = 0; k < n; k++) {
    const std::string_view s = chunks[k].text;
    size_t begin = 0;
    for (size_t i = 0; chunks[k].trusted && i < s.size(); i++) {
      if (!starts_added_[uint8_t(s[i])]) continue;
      const auto [id, length] = match_added(s.substr(i));
      if (id < 0) continue;
      run_.append(s, begin, i - begin);
      encode_plain(run_, out);
      run_.clear();
      out.push_back(id);
      begin = i + length;
      i = begin - 1;
    }
    run_.append(s, begin);
  }
  encode_plain(run_, out);
}

// One piece of n >= 1 bytes: the cache, or the merges.
void Tokenizer::encode_piece(const uint8_t* p, size_t n, std::vector<int32_t>& out) {
  if (n == 1) return out.push_back(vocab_.byte_id(*p));
  if (n > kCacheKey) return merge_piece(p, n, out);
  uint64_t key[4] = {};
  std::memcpy(key, p, n);
  key[3] |= uint64_t(n) << 56;
  uint64_t hash = (key[0] ^ (key[1] + key[3]) * 0x9e3779b97f4a7c15ull ^ key[2]) * 0xd6e8feb86659fd93ull;
  hash ^= hash >> 32;
  Cached& c = cache_[size_t(hash * 0xd6e8feb86659fd93ull >> (64 - kCacheBits))];
  if (std::memcmp(c.key, key, sizeof key) == 0) {
    out.insert(out.end(), c.ids, c.ids + c.n);
    return;
  }
  const size_t before = out.size();
  merge_piece(p, n, out);
  if (out.size() - before > kCacheIds) return;
  std::memcpy(c.key, key, sizeof key);
  c.n = int32_t(out.size() - before);
  std::copy(out.begin() + ptrdiff_t(before), out.end(), c.ids);
}

// Llama 3: a piece that is a token as a whole needs no merges. An added token is not one of these.
bool Tokenizer::encode_whole(const uint8_t* p, size_t n, std::vector<int32_t>& out) {
  if (!vocab_.ignore_merges || n > vocab_.longest_text()) return false;
  spelling_.resize(2 * n);
  size_t length = 0;
  for (size_t i = 0; i < n; i++) length += write_symbol(p[i], spelling_.data() + length);
  const int32_t id = vocab_.find(std::string_view(spelling_.data(), length));
  if (id < 0 || vocab_.is_added(id)) return false;
  out.push_back(id);
  return true;
}

// Merges the pair of lowest rank, the leftmost of equals, until no pair merges. Certain merges come first.
void Tokenizer::merge_piece(const uint8_t* p, size_t n, std::vector<int32_t>& out) {
  if (encode_whole(p, n, out)) return;
  if (ids_.size() < n) ids_.resize(n), ranks_.resize(n);
  size_t m = 0;
  for (size_t i = 0; i < n; i++) {
    int32_t id = vocab_.byte_id(p[i]);
    while (m > 0) {
      const uint32_t rank = ranks_[m - 1] = vocab_.find_merge(ids_[m - 1], id);
      if (rank == kNoMerge || !vocab_.is_certain(rank)) break;
      id = vocab_.merged(rank);
      m--;
    }
    ids_[m++] = id;
  }
  m <= kShort ? merge_short(m, out) : merge_long(m, out);
}

// The first n of ids_ and ranks_, few enough that looking through all is faster than keeping order.
void Tokenizer::merge_short(size_t n, std::vector<int32_t>& out) {
  int32_t* const id = ids_.data();
  uint32_t* const rank = ranks_.data();
  while (n > 1) {
    uint32_t lowest = kNoMerge;
    for (size_t i = 0; i + 1 < n; i++) lowest = std::min(lowest, rank[i]);
    if (lowest == kNoMerge) break;
    const size_t i = size_t(std::find(rank, rank + n, lowest) - rank);
    id[i] = vocab_.merged(lowest);
    n--;
    for (size_t k = i + 1; k < n; k++) id[k] = id[k + 1], rank[k - 1] = rank[k];
    if (i + 1 < n) rank[i] = vocab_.find_merge(id[i], id[i + 1]);
    if (i > 0) rank[i - 1] = vocab_.find_merge(id[i - 1], id[i]);
  }
  out.insert(out.end(), id, id + n);
}

// The same in O(n log n): a heap of (rank, position). An entry is stale when the merge at its position has another rank
// by now; a rank belongs to one pair of ids, so equal rank means equal ids.
void Tokenizer::merge_long(size_t n, std::vector<int32_t>& out) {
  constexpr uint32_t kEnd = UINT32_MAX;
  if (symbols_.size() < n) symbols_.resize(n);
  heap_.clear();
  Symbol* s = symbols_.data();
  const auto push = [&](uint32_t i) {
    if (s[i].rank != kNoMerge) heap_.push_back(uint64_t(s[i].rank) << 32 | i);
    return s[i].rank != kNoMerge;
  };
  for (uint32_t i = 0; i < n; i++) {
    const bool last = i + 1 == n;
    s[i] = {ids_[i], i - 1, last ? kEnd : i + 1, last ? kNoMerge : ranks_[i]};
    push(i);
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const uint32_t i = uint32_t(heap_.back()), rank = uint32_t(heap_.back() >> 32);
    heap_.pop_back();
    if (s[i].rank != rank) continue;
    const uint32_t gone = s[i].next;
    s[i].id = vocab_.merged(rank);
    s[i].next = s[gone].next;
    s[gone].rank = kNoMerge;
    if (s[i].next != kEnd) s[s[i].next].prev = i;
    for (uint32_t k : {i, s[i].prev}) {
      if (k == kEnd) continue;
      s[k].rank = s[k].next == kEnd ? kNoMerge : vocab_.find_merge(s[k].id, s[s[k].next].id);
      if (push(k)) std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
  }
  for (uint32_t i = 0; i != kEnd; i = s[i].next) out.push_back(s[i].id);
}

// -- bench ----
// Text to measure with, drawn from the vocabulary's own tokens: the n-th of a script comes about n times less often than
// the first, as in real text, and some words are two tokens run together, so that merging has work to do.
class BenchText {
 public:
  enum Script { English, Code, Chinese, Japanese };
  explicit BenchText(const Vocab& vocab);
  // Appends one line. One draw per statement: the order of several in an expression is the compiler's choice.
  void add_line(Script script, std::string& out);
  // nbytes of lines, a paragraph of each of `scripts` in turn.
  std::string make(std::initializer_list<Script> scripts, size_t nbytes);
  // nbytes, each drawn from `alphabet`, or any byte if that is empty.
  std::string noise(std::string_view alphabet, size_t nbytes);

 private:
  enum List { Words, Ideographs, Kana };
  size_t below(size_t n) { return size_t(rng_.next_u64() % n); }
  std::string pick(List list);

  std::vector<std::string> lists_[3];
  Rng rng_{1};
};

BenchText::BenchText(const Vocab& vocab) {
  std::string t;
  for (int32_t id = 0; id < vocab.size(); id++) {
    t.clear();
    if (!vocab.is_added(id)) vocab.append_bytes(id, t);
    const uint8_t* p = reinterpret_cast<const uint8_t*>(t.data());
    bool lower = t.size() > 2 && t[0] == ' ', cjk = !t.empty(), kana = cjk;
    for (size_t i = 1; i < t.size(); i++) lower &= t[i] >= 'a' && t[i] <= 'z';
    for (size_t i = 0; i < t.size();) {
      const Char c = read_char(class_table(), p + i, p + t.size());
      cjk &= (c.bits & cls::Cjk) != 0 && p[i] >= 0xe4;
      kana &= (c.bits & cls::Cjk) != 0 && p[i] == 0xe3;
      i += c.len;
    }
    if (lower) lists_[Words].push_back(t);
    if (cjk) lists_[Ideographs].push_back(t);
    if (kana) lists_[Kana].push_back(t);
  }
  if (lists_[Words].empty()) lists_[Words] = {" the", " lazy", " dog"};
  if (lists_[Ideographs].empty()) lists_[Ideographs] = {"\u6587", "\u5b57", "\u8bed"};
  if (lists_[Kana].empty()) lists_[Kana] = {"\u3042", "\u3044", "\u30a2"};
}

std::string BenchText::pick(List list) {
  const std::vector<std::string>& words = lists_[list];
  const double u = double(rng_.next_u64() >> 11) * 0x1p-53;
  return words[std::min(size_t(exp_f64(u * log_f64(double(words.size())))), words.size()) - 1];
}

void BenchText::add_line(Script script, std::string& out) {
  const auto add_word = [&] {
    out += pick(Words).substr(1);
    if (!below(10)) out += pick(Words).substr(1);
  };
  const size_t n = 4 + below(16);
  if (script == English) {
    for (size_t i = 0; i < n; i++) {
      if (i) out += ' ';
      if (below(24)) add_word();
      else out += std::to_string(below(3000));
      if (!below(9)) out += ',';
    }
    out += below(4) ? ". " : ".\n\n";
  } else if (script == Code) {
    static const char* const kGlue[] = {" = ", "(", ", ", ") + ", "->", "[i + 1]", " == 0x1f", ");", " < ", "\"", ".", "::"};
    out.append(2 * below(8), ' ');
    for (size_t i = 0; i < n / 2; i++) {
      add_word();
      if (!below(2)) out += '_', add_word();
      out += kGlue[below(12)];
    }
    out += below(6) ? "\n" : " {\n";
  } else {
    for (size_t i = 0; i < n; i++) {
      out += pick(Ideographs);
      if (script == Japanese) out += pick(Kana);
      if (!below(7)) out += "\uff0c";
    }
    out += below(3) ? "\u3002" : "\u3002\n";
  }
}

std::string BenchText::make(std::initializer_list<Script> scripts, size_t nbytes) {
  std::string out;
  while (out.size() < nbytes) {
    for (Script s : scripts)
      for (const size_t end = out.size() + 2000; out.size() < end;) add_line(s, out);
  }
  out.resize(nbytes);
  return out;
}

std::string BenchText::noise(std::string_view alphabet, size_t nbytes) {
  std::string out(nbytes, '\0');
  for (char& c : out) c = alphabet.empty() ? char(rng_.next_u64() >> 56) : alphabet[below(alphabet.size())];
  return out;
}

struct TokenizerBench {
  const char* name;
  uint64_t bytes, tokens;
  double seconds;                // best of three, each with an empty piece cache
};

// Encodes `text`, or, if that is empty, a megabyte each of several scripts, a mixture, and what is hard to merge.
// Throws Error if decoding does not give the text back.
static std::vector<TokenizerBench> bench_tokenizer(const Vocab& vocab, std::string_view text) {
  constexpr size_t kBytes = 1000000;
  constexpr char kBase64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::vector<TokenizerBench> results;
  std::vector<int32_t> ids;
  const auto run = [&](const char* name, std::string_view s) {
    TokenizerBench r{name, s.size(), 0, 0};
    for (int i = 0; i < 3; i++) {
      Tokenizer tokenizer(vocab);
      ids.clear();
      const double start = now_seconds();
      tokenizer.encode_plain(s, ids);
      const double seconds = now_seconds() - start;
      if (i == 0 || seconds < r.seconds) r.seconds = seconds;
    }
    std::string back;
    for (int32_t id : ids) vocab.append_bytes(id, back);
    if (back != s) fail("tokenizer: the bytes of %zu ids differ from the text (%s)", ids.size(), name);
    r.tokens = ids.size();
    results.push_back(r);
  };
  if (!text.empty()) return run("given text", text), results;
  BenchText maker(vocab);
  run("english", maker.make({BenchText::English}, kBytes));
  run("code", maker.make({BenchText::Code}, kBytes));
  run("chinese", maker.make({BenchText::Chinese}, kBytes));
  run("japanese", maker.make({BenchText::Japanese}, kBytes));
  run("mixed", maker.make({BenchText::English, BenchText::Code, BenchText::Chinese, BenchText::Japanese}, kBytes));
  run("one letter", std::string(kBytes, 'a'));
  run("spaces", std::string(kBytes, ' '));
  run("base64", maker.noise(std::string_view(kBase64, 64), kBytes));
  run("letters", maker.noise(std::string_view(kBase64 + 26, 26), kBytes));
  run("random bytes", maker.noise({}, kBytes));
  return results;
}

}  // namespace ds4

// =============================================================================
// 12. CHAT — JSON, prompt rendering, tool calls (DSML), reply parsing, UTF-8 out.   uses: 1 11
// =============================================================================
// Enters: messages as JSON, bytes of generated tokens. Leaves: a prompt as trusted and untrusted chunks, a reply
// split into reasoning, text and tool calls. What reads a reply takes its bytes in any pieces (and the think tokens as
// such) with the same result, in O(1) per byte; a finished tool block is read once more.

namespace ds4 {

// -- UTF-8 output ----

constexpr std::string_view kReplacement = "\xef\xbf\xbd";          // U+FFFD

// Length of the scalar value at the start of s (s not empty), *valid = true; or of the maximal invalid subpart there
// (what becomes one U+FFFD), *valid = false; 0 when s ends inside a sequence that more bytes could complete.
static size_t utf8_next(std::string_view s, bool* valid) {
  const uint8_t b = uint8_t(s[0]);
  const size_t n = b < 0x80 ? 1 : b < 0xc2 ? 0 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : b < 0xf5 ? 4 : 0;
  *valid = n != 0;
  if (n < 2) return 1;
  for (size_t i = 1; i < n; i++) {
    if (i == s.size()) return 0;
    // The second byte also keeps out overlong forms, surrogates and values above U+10FFFF.
    const uint8_t c = uint8_t(s[i]);
    const uint8_t lo = i > 1 ? 0x80 : b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80;
    const uint8_t hi = i > 1 ? 0xbf : b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
    if (c < lo || c > hi) {
      *valid = false;
      return i;
    }
  }
  return n;
}

// Turns a stream of bytes into valid UTF-8: what is complete leaves at once, at most three bytes wait.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes) {
    std::string out;
    held_.append(bytes);
    size_t pos = 0;
    while (pos < held_.size()) {
      bool valid;
      const size_t n = utf8_next(std::string_view(held_).substr(pos), &valid);
      if (n == 0) break;
      out.append(valid ? std::string_view(held_).substr(pos, n) : kReplacement);
      pos += n;
    }
    held_.erase(0, pos);
    return out;
  }
  // The end of the stream: a sequence left open becomes one U+FFFD.
  std::string flush() {
    const bool open = !held_.empty();
    held_.clear();
    return std::string(open ? kReplacement : std::string_view());
  }

 private:
  std::string held_;
};

// The bytes as valid UTF-8, every maximal invalid subpart as U+FFFD.
static std::string utf8_lossy(std::string_view bytes) {
  Utf8Stream u;
  std::string s = u.push(bytes);
  return s + u.flush();
}

// Text that can't steer a terminal: control characters (C0, DEL, C1) but newline and tab as \xNN, invalid bytes as U+FFFD.
static std::string terminal_safe(std::string_view text) { return escape_controls(utf8_lossy(text), "\n\t"); }

// -- JSON ----

// Shortest decimal that reads back as v, laid out as Python's repr: 0.0001 <= |v| < 1e16 without an exponent.
static std::string float_repr(double v) {
  if (v != v) return "NaN";
  if (std::isinf(v)) return v < 0 ? "-Infinity" : "Infinity";
  char buf[40];
  for (int digits = 1; digits <= 17; digits++) {
    std::snprintf(buf, sizeof buf, "%.*e", digits - 1, v);
    if (std::strtod(buf, nullptr) == v) break;
    // At a power of two the gap below is half the gap above: 46 of them have a 16-digit form just above the nearest one.
    char* last = std::strchr(buf, 'e') - 1;
    if (digits == 16 && *last != '9' && (++*last, std::strtod(buf, nullptr) == v)) break;
  }
  std::string d;                                                     // significant digits, d[0] . d[1..] * 10^e
  const char* p = buf;
  for (; *p != 'e'; p++)
    if (*p >= '0' && *p <= '9') d += *p;
  const int e = std::atoi(p + 1);
  while (d.size() > 1 && d.back() == '0') d.pop_back();
  const std::string sign = std::signbit(v) ? "-" : "";
  if (e < -4 || e >= 16) return sign + d.substr(0, 1) + (d.size() > 1 ? "." + d.substr(1) : "") + format("e%+03d", e);
  if (e < 0) return sign + "0." + std::string(size_t(-e - 1), '0') + d;
  if (d.size() <= size_t(e) + 1) return sign + d + std::string(size_t(e) + 1 - d.size(), '0') + ".0";
  return sign + d.substr(0, size_t(e) + 1) + "." + d.substr(size_t(e) + 1);
}

// A JSON value. Numbers keep their lexeme, objects the order of their keys (a repeated key: first place, last value, as
// in Python). parse() takes what Python's json.loads takes: NaN and Infinity too, and lone \ud800 escapes, which become
// their three-byte form. dump() equals json.dumps(ensure_ascii=False); it is always valid UTF-8.
class Json {
 public:
  enum class Kind : uint8_t { kNull, kBool, kNumber, kString, kArray, kObject };
  static constexpr int kMaxDepth = 500;

  Json() = default;
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  Json(T v) : kind_(std::is_same_v<T, bool> ? Kind::kBool : Kind::kNumber) {
    if constexpr (std::is_same_v<T, bool>) bool_ = v;
    else if constexpr (std::is_integral_v<T>) text_ = std::to_string(v);
    else if (std::isfinite(v)) text_ = float_repr(double(v));
    else kind_ = Kind::kNull;
  }
  Json(std::string s) : kind_(Kind::kString), text_(std::move(s)) {}
  Json(std::string_view s) : Json(std::string(s)) {}
  Json(const char* s) : Json(std::string(s)) {}
  static Json number(std::string lexeme) { return Json(Kind::kNumber, std::move(lexeme)); }
  static Json array() { return Json(Kind::kArray, {}); }
  static Json object() { return Json(Kind::kObject, {}); }
  // The value from byte `at` on; what precedes it only counts in "WHAT: line L, column C (offset N): expected ..., found ...",
  // the Error it throws.
  static Json parse(std::string_view text, std::string_view what, size_t at = 0);

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_array() const { return kind_ == Kind::kArray; }
  bool is_object() const { return kind_ == Kind::kObject; }
  const std::string& text() const { return text_; }                  // of a string; lexeme of a number
  size_t size() const { return items_.size(); }                      // elements or members
  const Json& operator[](size_t i) const { return items_[i]; }
  const std::string& key(size_t i) const { return keys_[i]; }        // of member i
  const std::vector<Json>& items() const { return items_; }

  Json& push(Json v) { items_.push_back(std::move(v)); return *this; }
  Json& set(std::string_view key, Json v);                           // adds or replaces
  Json& insert(size_t i, Json v) { items_.insert(items_.begin() + ptrdiff_t(i), std::move(v)); return *this; }
  Json& item(size_t i) { return items_[i]; }
  Json* find(std::string_view key) { return const_cast<Json*>(std::as_const(*this).find(key)); }
  // Member, or nullptr when there is none, when it is null, or when this is no object.
  const Json* find(std::string_view key) const;
  // The same, and nullptr for what is false to Python's bool().
  const Json* find_truthy(std::string_view key) const;

  // The value with its type checked; Error "WHAT must be a string, found number 3".
  const std::string& as_string(const std::string& what) const;
  bool as_bool(const std::string& what) const;
  double as_double(const std::string& what) const;
  int64_t as_int(const std::string& what) const;
  const Json& as_array(const std::string& what) const { return expect(Kind::kArray, what); }
  const Json& as_object(const std::string& what) const { return expect(Kind::kObject, what); }
  // A member with its type checked; absent or null gives the default. Errors read "WHAT: "KEY" must be ...".
  std::string string_or(std::string_view key, std::string_view otherwise, const std::string& what) const;
  bool bool_or(std::string_view key, bool otherwise, const std::string& what) const;

  std::string dump() const { std::string s; dump_to(s); return s; }

 private:
  friend class JsonParser;
  Json(Kind kind, std::string text) : kind_(kind), text_(std::move(text)) {}
  const Json& expect(Kind kind, const std::string& what) const;
  std::string describe() const;
  void dump_to(std::string& out) const;
  bool is_truthy() const;
  Kind kind_ = Kind::kNull;
  bool bool_ = false;
  std::string text_;
  std::vector<std::string> keys_;
  std::vector<Json> items_;
};

static bool is_json_integer(std::string_view lexeme) { return lexeme.find_first_not_of("-0123456789") == lexeme.npos; }

static void dump_string(std::string_view s, std::string& out) {
  out += '"';
  for (char c : utf8_lossy(s)) {
    if (c == '"' || c == '\\') (out += '\\') += c;
    else if (uint8_t(c) >= 0x20) out += c;
    else if (const char* e = std::strchr("\nn\rr\tt\bb\ff", c); c && e) (out += '\\') += e[1];
    else out += format("\\u%04x", c);
  }
  out += '"';
}

void Json::dump_to(std::string& out) const {
  switch (kind_) {
    case Kind::kNull: out += "null"; return;
    case Kind::kBool: out += bool_ ? "true" : "false"; return;
    case Kind::kNumber:
      if (is_json_integer(text_)) out += text_ == "-0" ? "0" : text_;
      else out += float_repr(std::strtod(text_.c_str(), nullptr));
      return;
    case Kind::kString: dump_string(text_, out); return;
    case Kind::kArray:
    case Kind::kObject: break;
  }
  out += is_array() ? '[' : '{';
  for (size_t i = 0; i < items_.size(); i++) {
    if (i) out += ", ";
    if (is_object()) {
      dump_string(keys_[i], out);
      out += ": ";
    }
    items_[i].dump_to(out);
  }
  out += is_array() ? ']' : '}';
}

bool Json::is_truthy() const {
  switch (kind_) {
    case Kind::kNull: return false;
    case Kind::kBool: return bool_;
    case Kind::kNumber: return std::strtod(text_.c_str(), nullptr) != 0;
    case Kind::kString: return !text_.empty();
    default: return !items_.empty();
  }
}

Json& Json::set(std::string_view key, Json v) {
  for (size_t i = 0; i < keys_.size(); i++)
    if (keys_[i] == key) {
      items_[i] = std::move(v);
      return *this;
    }
  kind_ = Kind::kObject;
  keys_.emplace_back(key);
  return push(std::move(v));
}

const Json* Json::find(std::string_view key) const {
  for (size_t i = 0; i < keys_.size(); i++)
    if (keys_[i] == key) return items_[i].is_null() ? nullptr : &items_[i];
  return nullptr;
}

const Json* Json::find_truthy(std::string_view key) const {
  const Json* v = find(key);
  return v && v->is_truthy() ? v : nullptr;
}

static const char* kind_name(Json::Kind k) {
  constexpr const char* kNames[] = {"null", "a boolean", "a number", "a string", "an array", "an object"};
  return kNames[size_t(k)];
}

std::string Json::describe() const {
  if (kind_ == Kind::kArray || kind_ == Kind::kObject) return kind_name(kind_);
  if (text_.size() > 40) return std::string(kind_name(kind_)) + " of " + std::to_string(text_.size()) + " bytes";
  return dump();
}

const Json& Json::expect(Kind kind, const std::string& what) const {
  if (kind_ != kind) fail("%s must be %s, found %s", what.c_str(), kind_name(kind), describe().c_str());
  return *this;
}
const std::string& Json::as_string(const std::string& what) const { return expect(Kind::kString, what).text_; }
bool Json::as_bool(const std::string& what) const { return expect(Kind::kBool, what).bool_; }
double Json::as_double(const std::string& what) const { return std::strtod(expect(Kind::kNumber, what).text_.c_str(), nullptr); }
int64_t Json::as_int(const std::string& what) const {
  errno = 0;
  const int64_t v = std::strtoll(text_.c_str(), nullptr, 10);
  if (kind_ != Kind::kNumber || !is_json_integer(text_) || errno)
    fail("%s must be an integer of 64 bits, found %s", what.c_str(), describe().c_str());
  return v;
}

static std::string member_name(const std::string& what, std::string_view key) { return what + ": \"" + std::string(key) + "\""; }
std::string Json::string_or(std::string_view key, std::string_view otherwise, const std::string& what) const {
  const Json* v = find(key);
  return v ? v->as_string(member_name(what, key)) : std::string(otherwise);
}
bool Json::bool_or(std::string_view key, bool otherwise, const std::string& what) const {
  const Json* v = find(key);
  return v ? v->as_bool(member_name(what, key)) : otherwise;
}

class JsonParser {
 public:
  JsonParser(std::string_view text, std::string_view what, size_t at) : s_(text), what_(what), pos_(at) {}

  Json document() {
    if (pos_ == 0 && s_.substr(0, 3) == "\xef\xbb\xbf") pos_ = 3;     // a byte order mark
    Json v = value(0);
    skip_space();
    if (pos_ < s_.size()) error("the end");
    return v;
  }

 private:
  [[noreturn]] void error(const char* expected) const {
    const std::string_view before = s_.substr(0, pos_);
    const size_t line = 1 + size_t(std::count(before.begin(), before.end(), '\n'));
    const size_t column = pos_ - (before.rfind('\n') + 1) + 1;       // rfind: npos + 1 = 0
    std::string found = "the end";
    if (pos_ < s_.size()) found = uint8_t(s_[pos_] - 0x21) < 0x5e ? format("'%c'", s_[pos_]) : format("byte 0x%02x", uint8_t(s_[pos_]));
    fail("%s: line %zu, column %zu (offset %zu): expected %s, found %s",
         std::string(what_).c_str(), line, column, pos_, expected, found.c_str());
  }
  char peek() const { return pos_ < s_.size() ? s_[pos_] : '\0'; }   // NUL starts nothing in JSON
  bool take(char c) { return pos_ < s_.size() && s_[pos_] == c ? (pos_++, true) : false; }
  bool take(std::string_view word) { return s_.substr(pos_, word.size()) == word ? (pos_ += word.size(), true) : false; }
  void skip_space() { pos_ = std::min(s_.find_first_not_of(" \t\n\r", pos_), s_.size()); }

  Json value(int depth) {
    skip_space();
    if (depth > Json::kMaxDepth) error("at most 500 nested arrays and objects");
    switch (peek()) {
      case '{': return object(depth);
      case '[': return array(depth);
      case '"': return Json(string());
      case 't': if (take("true")) return Json(true); break;
      case 'f': if (take("false")) return Json(false); break;
      case 'n': if (take("null")) return Json(); break;
      default: if (const size_t n = number_length()) return Json::number(std::string(s_.substr((pos_ += n) - n, n)));
    }
    error("a JSON value");
  }

  // -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?  or NaN, Infinity, -Infinity; 0 when there is none here.
  size_t number_length() const {
    for (std::string_view word : {"NaN", "Infinity", "-Infinity"})
      if (s_.substr(pos_, word.size()) == word) return word.size();
    const auto at = [&](size_t i) { return i < s_.size() ? s_[i] : '\0'; };
    const auto digits = [&](size_t i) {
      while (at(i) >= '0' && at(i) <= '9') i++;
      return i;
    };
    const size_t first = pos_ + (at(pos_) == '-');
    size_t end = at(first) == '0' ? first + 1 : digits(first);
    if (end == first) return 0;
    if (at(end) == '.' && digits(end + 1) > end + 1) end = digits(end + 1);
    if (at(end) == 'e' || at(end) == 'E') {
      const size_t e = end + 1 + (at(end + 1) == '-' || at(end + 1) == '+');
      if (digits(e) > e) end = digits(e);
    }
    return end - pos_;
  }

  Json array(int depth) {
    Json a = Json::array();
    pos_++;
    skip_space();
    if (take(']')) return a;
    while (true) {
      a.push(value(depth + 1));
      skip_space();
      if (take(']')) return a;
      if (!take(',')) error("',' or ']'");
    }
  }

  Json object(int depth) {
    Json o = Json::object();
    std::map<std::string, size_t, std::less<>> index;
    pos_++;
    skip_space();
    if (take('}')) return o;
    while (true) {
      skip_space();
      if (peek() != '"') error("a member name in quotes");
      std::string key = string();
      skip_space();
      if (!take(':')) error("':'");
      Json v = value(depth + 1);
      const auto [it, is_new] = index.emplace(key, o.size());
      if (is_new) {
        o.keys_.push_back(std::move(key));
        o.items_.push_back(std::move(v));
      } else {
        o.items_[it->second] = std::move(v);
      }
      skip_space();
      if (take('}')) return o;
      if (!take(',')) error("',' or '}'");
    }
  }

  std::string string() {
    std::string out;
    pos_++;
    while (true) {
      const size_t plain = pos_;
      while (pos_ < s_.size() && uint8_t(s_[pos_]) >= 0x20 && s_[pos_] != '"' && s_[pos_] != '\\') pos_++;
      out.append(s_.substr(plain, pos_ - plain));
      if (take('"')) return out;
      if (!take('\\')) error("'\"' (control characters in a string are escaped)");
      if (take('u')) {
        append_utf16_escape(out);
      } else {
        constexpr std::string_view kFrom = "\"\\/bfnrt", kTo = "\"\\/\b\f\n\r\t";
        const size_t i = pos_ < s_.size() ? kFrom.find(s_[pos_]) : kFrom.npos;
        if (i == kFrom.npos) error("one of \" \\ / b f n r t u");
        out += kTo[i];
        pos_++;
      }
    }
  }

  uint32_t hex4() {
    uint32_t v = 0;
    for (int i = 0; i < 4; i++, pos_++) {
      const char c = peek();
      if (!std::isxdigit(uint8_t(c))) error("four hexadecimal digits");
      v = v * 16 + uint32_t(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    return v;
  }

  // After "\u": the code unit, or the pair of them that makes one scalar value.
  void append_utf16_escape(std::string& out) {
    uint32_t cp = hex4();
    if (cp >= 0xd800 && cp < 0xdc00 && s_.substr(pos_, 2) == "\\u") {
      const size_t back = pos_;
      pos_ += 2;
      const uint32_t low = hex4();
      if (low >= 0xdc00 && low < 0xe000) cp = 0x10000 + ((cp - 0xd800) << 10) + (low - 0xdc00);
      else pos_ = back;
    }
    if (cp < 0x80) out += char(cp);
    else if (cp < 0x800) (out += char(0xc0 | cp >> 6)) += char(0x80 | (cp & 63));
    else {
      if (cp < 0x10000) out += char(0xe0 | cp >> 12);
      else (out += char(0xf0 | cp >> 18)) += char(0x80 | (cp >> 12 & 63));
      (out += char(0x80 | (cp >> 6 & 63))) += char(0x80 | (cp & 63));
    }
  }

  std::string_view s_, what_;
  size_t pos_;
};

Json Json::parse(std::string_view text, std::string_view what, size_t at) { return JsonParser(text, what, at).document(); }

// -- prompt ----

constexpr std::string_view kBosText = "<｜begin▁of▁sentence｜>", kEosText = "<｜end▁of▁sentence｜>";
constexpr std::string_view kUserText = "<｜User｜>", kAssistantText = "<｜Assistant｜>", kReminderText = "<｜latest_reminder｜>";
constexpr std::string_view kThinkText = "<think>", kThinkEndText = "</think>", kDsmlText = "｜DSML｜";

// Reasoning effort, only said in thinking mode. The text it adds depends on what the checkpoint was trained on.
enum class Effort : uint8_t { kNone, kLow, kHigh, kMax };
enum class EffortProfile : uint8_t { kPreview, k0731 };

constexpr std::string_view kEffortAbsolute =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, "
    "and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";
constexpr std::string_view kEffortBeyond =
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause "
    "rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no "
    "assumption remains unchecked and no error remains undiscovered.\n\n";

//            none  low   high      max
// preview    -     -     -         Absolute
// 0731       -     -     Absolute  Beyond
static std::string_view effort_text(Effort effort, EffortProfile profile) {
  if (effort == Effort::kMax) return profile == EffortProfile::kPreview ? kEffortAbsolute : kEffortBeyond;
  return effort == Effort::kHigh && profile == EffortProfile::k0731 ? kEffortAbsolute : std::string_view();
}

// The profile of a file, from its tokenizer.chat_template and general.name ("" when it has none).
static EffortProfile detect_effort_profile(std::string_view chat_template, std::string_view name) {
  const auto has = [](std::string_view s, std::string_view part) { return s.find(part) != s.npos; };
  return has(chat_template, "Beyond maximum") || has(name, "0731") || has(name, "0813") ? EffortProfile::k0731 : EffortProfile::kPreview;
}

constexpr std::string_view kToolsHead =
    "\n\n## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    "\"<｜DSML｜tool_calls>\" block like the following:\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"$TOOL_NAME\">\n"
    "<｜DSML｜parameter name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n...\n"
    "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"$TOOL_NAME2\">\n...\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, booleans, arrays, "
    "objects), pass the value in JSON format and set `string=\"false\"`.\n\n"
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> "
    "BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n### Available Tool Schemas\n\n";
constexpr std::string_view kToolsTail =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";
constexpr std::string_view kFormatHead = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

// A prompt: template text (trusted: its special tokens are tokens) and data (never special) in order.
class Prompt {
 public:
  void trusted(std::string_view s) { add(s, true); }
  void user(std::string_view s) { add(s, false); }
  const std::string& text() const { return text_; }
  // Views into this prompt, for Tokenizer::encode_chunks.
  std::vector<Chunk> chunks() const {
    std::vector<Chunk> out;
    size_t begin = 0;
    for (const Span& s : spans_) {
      out.push_back({std::string_view(text_).substr(begin, s.end - begin), s.trusted});
      begin = s.end;
    }
    return out;
  }

 private:
  struct Span {
    size_t end;
    bool trusted;
  };
  void add(std::string_view s, bool is_trusted) {
    if (s.empty()) return;
    text_ += s;
    if (!spans_.empty() && spans_.back().trusted == is_trusted) spans_.back().end = text_.size();
    else spans_.push_back({text_.size(), is_trusted});
  }
  std::string text_;
  std::vector<Span> spans_;
};

struct ChatOptions {
  bool thinking = true;
  Effort effort = Effort::kNone;
  EffortProfile profile = EffortProfile::kPreview;
  bool drop_thinking = true;                  // earlier turns lose their reasoning, unless a message carries tools
  bool add_bos = true;
  std::string source = "messages";            // what error messages call the conversation
  size_t n_before = 0;                        // messages before the first of the source
};

// True when any message carries tools.
static bool has_tools(const Json& messages) {
  return std::any_of(messages.items().begin(), messages.items().end(), [](const Json& m) { return m.find_truthy("tools"); });
}

// The function of a tool; a bare function object with a name is one itself. Throws Error naming `what`.
static const Json& tool_function(const Json& tool, const std::string& what) {
  const Json* f = tool.as_object(what).find("function");
  if (!f && tool.find("name")) return tool;
  if (!f) fail("%s has no \"function\"", what.c_str());
  return f->as_object(what + ": \"function\"");
}

// Renders a conversation (spec of the official encoder): fold -> drop -> one text per turn.
class ChatRenderer {
 public:
  ChatRenderer(const Json& messages, const ChatOptions& options)
      : options_(options), drop_(options.drop_thinking && !has_tools(messages)) {
    messages.as_array(options.source);
    for (size_t i = 0; i < messages.size(); i++) fold(messages[i], i);
    order_results();
    find_last_user();
    if (options_.thinking && drop_ && last_user_ > 0) {              // developer turns before the last user turn vanish
      const auto end = turns_.begin() + last_user_;
      turns_.erase(std::remove_if(turns_.begin(), end, [](const Turn& t) { return t.role == "developer"; }), end);
      find_last_user();
    }
  }

  // Everything from message `held` on; see render_chat.
  Prompt render(size_t held, bool close_turn) {
    if (held == 0 && options_.add_bos) out_.trusted(kBosText);
    if (close_turn) out_.trusted(kEosText);
    for (size_t i = 0; i < turns_.size(); i++)
      if (turns_[i].index >= held) render_turn(i);
    return std::move(out_);
  }

 private:
  struct Block {                               // part of a user turn
    bool is_result;
    std::string id, text;
  };
  struct Turn {
    std::string role;
    const Json* message;                       // the first one folded into this turn
    size_t index;                              // of that message
    std::vector<Block> blocks;                 // role user only
    std::string what;                          // "messages[3]"
    std::string task;
  };

  // String, list of parts, or nothing, as text.
  static std::string content_text(const Turn& t) {
    const Json* c = t.message->find("content");
    const std::string what = member_name(t.what, "content");
    if (!c) return {};
    if (!c->is_array()) return c->as_string(what);
    std::string out;
    for (size_t i = 0; i < c->size(); i++) {
      const Json& part = (*c)[i].as_object(what + format("[%zu]", i));
      const std::string type = part.string_or("type", "None", what);
      if (i) out += "\n\n";
      out += type == "text" ? part.string_or("text", "", what) : "[Unsupported " + type + "]";
    }
    return out;
  }

  // A tool result joins the user turn before it, and so does a user message unless that turn carries a task.
  void fold(const Json& m, size_t index) {
    Turn t{"", &m, index, {}, options_.source + format("[%zu]", index - std::min(index, options_.n_before)), ""};
    m.as_object(t.what);
    t.role = m.string_or("role", "", t.what);
    t.task = m.string_or("task", "", t.what);
    if (t.role != "tool" && t.role != "user") {
      turns_.push_back(std::move(t));
      return;
    }
    const bool is_result = t.role == "tool";
    Block b{is_result, m.string_or("tool_call_id", "", t.what), content_text(t)};
    const bool joins = !turns_.empty() && turns_.back().role == "user" && (is_result || turns_.back().task.empty());
    if (!joins) {
      t.role = "user";
      if (is_result) t.task.clear();
      turns_.push_back(std::move(t));
    }
    turns_.back().blocks.push_back(std::move(b));
  }

  // Results of one turn stand in the order of the calls they answer (stable; unknown ids count as the first).
  void order_results() {
    std::map<std::string, size_t> order;
    for (Turn& t : turns_) {
      if (const Json* calls = t.role == "assistant" ? t.message->find_truthy("tool_calls") : nullptr) {
        order.clear();
        for (size_t i = 0; i < calls->size(); i++)
          if (const std::string id = (*calls)[i].string_or("id", "", t.what); !id.empty()) order[id] = i;
      }
      if (t.role != "user" || order.empty()) continue;
      std::vector<Block> results;
      for (const Block& b : t.blocks)
        if (b.is_result) results.push_back(b);
      const auto rank = [&](const Block& b) {
        const auto it = order.find(b.id);
        return it == order.end() ? 0 : it->second;
      };
      std::stable_sort(results.begin(), results.end(), [&](const Block& a, const Block& b) { return rank(a) < rank(b); });
      size_t next = 0;
      for (Block& b : t.blocks)
        if (b.is_result) b = std::move(results[next++]);
    }
  }

  void find_last_user() {
    last_user_ = -1;
    for (size_t i = 0; i < turns_.size(); i++)
      if (turns_[i].role == "user" || turns_[i].role == "developer") last_user_ = ptrdiff_t(i);
  }

  void render_turn(size_t i) {
    const Turn& t = turns_[i];
    if (i == 0 && options_.thinking) out_.trusted(effort_text(options_.effort, options_.profile));
    if (t.role == "system") {
      out_.user(content_text(t));
      render_extras(t);
    } else if (t.role == "developer") {
      const std::string content = content_text(t);
      if (content.empty()) fail("%s: a developer message needs \"content\"", t.what.c_str());
      out_.trusted(kUserText);
      out_.user(content);
      render_extras(t);
    } else if (t.role == "user") {
      render_user(t);
    } else if (t.role == "latest_reminder") {
      out_.trusted(kReminderText);
      out_.user(content_text(t));
    } else if (t.role == "assistant") {
      render_assistant(i);
    } else {
      fail("%s: \"role\" is \"%s\", expected system, developer, user, assistant, tool or latest_reminder", t.what.c_str(),
           t.role.c_str());
    }
    const bool asks_on = i + 1 < turns_.size() && turns_[i + 1].role != "assistant" && turns_[i + 1].role != "latest_reminder";
    if (asks_on) return;
    if (!t.task.empty()) render_task(t);
    else if (t.role == "user" || t.role == "developer") open_answer(!drop_ || ptrdiff_t(i) >= last_user_);
  }

  void open_answer(bool may_think) {
    out_.trusted(kAssistantText);
    out_.trusted(options_.thinking && may_think ? kThinkText : kThinkEndText);
  }

  void render_task(const Turn& t) {
    bool known = false;
    for (std::string_view s : {"action", "query", "authority", "domain", "title", "read_url"}) known |= t.task == s;
    if (!known)
      fail("%s: \"task\" is \"%s\", expected action, query, authority, domain, title or read_url", t.what.c_str(), t.task.c_str());
    if (t.task == "action") open_answer(true);
    out_.trusted("<｜" + t.task + "｜>");
  }

  void render_user(const Turn& t) {
    out_.trusted(kUserText);
    for (size_t k = 0; k < t.blocks.size(); k++) {
      if (k) out_.trusted("\n\n");
      if (t.blocks[k].is_result) out_.trusted("<tool_result>");
      out_.user(t.blocks[k].text);
      if (t.blocks[k].is_result) out_.trusted("</tool_result>");
    }
  }

  // Tool schemas and response format, after a system or developer text.
  void render_extras(const Turn& t) {
    if (const Json* tools = t.message->find_truthy("tools")) {
      out_.trusted(kToolsHead);
      tools->as_array(member_name(t.what, "tools"));
      for (size_t i = 0; i < tools->size(); i++) {
        if (i) out_.user("\n");
        out_.user(tool_function((*tools)[i], member_name(t.what, "tools") + format("[%zu]", i)).dump());
      }
      out_.trusted(kToolsTail);
    }
    if (const Json* format = t.message->find_truthy("response_format")) {
      out_.trusted(kFormatHead);
      out_.user(format->dump());
    }
  }

  void render_assistant(size_t i) {
    const Turn& t = turns_[i];
    const Json& m = *t.message;
    const bool after_task = i > 0 && !turns_[i - 1].task.empty();
    if (options_.thinking && !after_task && (!drop_ || ptrdiff_t(i) > last_user_)) {
      out_.user(m.string_or("reasoning_content", m.string_or("reasoning", "", t.what), t.what));
      out_.trusted(kThinkEndText);
    }
    out_.user(content_text(t));
    if (const Json* calls = m.find_truthy("tool_calls")) render_calls(t, *calls);
    if (!m.find_truthy("wo_eos")) out_.trusted(kEosText);
  }

  void render_calls(const Turn& t, const Json& calls) {
    calls.as_array(member_name(t.what, "tool_calls"));
    out_.trusted("\n\n<｜DSML｜tool_calls>\n");
    for (size_t i = 0; i < calls.size(); i++) {
      const std::string what = member_name(t.what, "tool_calls") + format("[%zu]", i);
      const Json* f = calls[i].as_object(what).find("function");
      if (!f) f = &calls[i];
      if (i) out_.trusted("\n");
      out_.trusted("<｜DSML｜invoke name=\"");
      out_.user(f->as_object(what).string_or("name", "", what));
      out_.trusted("\">\n");
      const Json args = call_arguments(*f, what);
      for (size_t k = 0; k < args.size(); k++) {
        if (k) out_.trusted("\n");
        out_.trusted("<｜DSML｜parameter name=\"");
        out_.user(args.key(k));
        out_.trusted(args[k].is_string() ? "\" string=\"true\">" : "\" string=\"false\">");
        out_.user(args[k].is_string() ? args[k].text() : args[k].dump());
        out_.trusted("</｜DSML｜parameter>");
      }
      out_.trusted("\n</｜DSML｜invoke>");
    }
    out_.trusted("\n</｜DSML｜tool_calls>");
  }

  // The arguments are JSON text, or already an object; text that is no JSON object becomes one string named `arguments`.
  static Json call_arguments(const Json& function, const std::string& what) {
    const Json* a = function.find("arguments");
    if (a && a->is_object()) return *a;
    const std::string text = a ? a->as_string(member_name(what, "arguments")) : "{}";
    try {
      Json parsed = Json::parse(text, what);
      if (parsed.is_object()) return parsed;
    } catch (const Error&) {
    }
    return Json::object().set("arguments", text);
  }

  const ChatOptions& options_;
  bool drop_;
  ptrdiff_t last_user_ = -1;
  std::vector<Turn> turns_;
  Prompt out_;
};

// The prompt of a conversation: an array of {"role", "content", ...}. With held > 0, a cache holds the first `held`
// messages (the last of them an assistant's, with the ids as sampled, reasoning included) and only what follows is
// rendered; it starts at a special token, so its ids appended to the held ones are the cache afterwards. close_turn
// puts the end-of-turn token first, for an answer that did not sample it. Throws Error naming the message and key.
static Prompt render_chat(const Json& messages, const ChatOptions& options, size_t held = 0, bool close_turn = false) {
  return ChatRenderer(messages, options).render(held, close_turn);
}

static Json chat_message(std::string_view role, std::string_view content) {
  return Json::object().set("role", role).set("content", content);
}

// The conversation with `tools` on its system message; one without text is put first if there is none.
static Json with_tools(Json messages, const Json& tools) {
  for (size_t i = 0; i < messages.size(); i++)
    if (const Json* role = messages[i].find("role"); role && role->text() == "system") {     // render_chat checks its type
      messages.item(i).set("tools", tools);
      return messages;
    }
  messages.insert(0, chat_message("system", "").set("tools", tools));
  return messages;
}

// -- tool call syntax (DSML) ----

// The spellings a model may use; the first is the official one. '<' occurs only at the start of each literal, so a
// failed partial match never hides the start of another: the matchers below restart at the failing byte.
struct DsmlSyntax {
  std::string_view open, close, invoke, invoke_end, param, param_end;
};
constexpr DsmlSyntax kDsml[] = {
    {"<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "<｜DSML｜invoke", "</｜DSML｜invoke>", "<｜DSML｜parameter", "</｜DSML｜parameter>"},
    {"<DSML｜tool_calls>", "</DSML｜tool_calls>", "<DSML｜invoke", "</DSML｜invoke>", "<DSML｜parameter", "</DSML｜parameter>"},
    {"<tool_calls>", "</tool_calls>", "<invoke", "</invoke>", "<parameter", "</parameter>"},
};
constexpr std::string_view kDsmlSpace = " \t\n\r\v\f";

// Matches one literal of a set in a byte stream; at most one literal is buffered.
class LiteralMatcher {
 public:
  static constexpr int kPartial = -1, kRefuted = -2;
  // Returns the index of the literal that c completes (the buffer is then empty), kPartial, or kRefuted: the buffer
  // then still holds the failed match, c included.
  int push(char c, std::initializer_list<std::string_view> literals) {
    buf_[len_++] = c;
    bool partial = false;
    int i = 0;
    for (std::string_view s : literals) {
      if (s == pending()) return len_ = 0, i;
      partial |= s.size() > len_ && s.substr(0, len_) == pending();
      i++;
    }
    return partial ? kPartial : kRefuted;
  }
  // Drops a refuted match; what remains is c if it can start another one.
  void restart(char c) {
    buf_[0] = c;
    len_ = c == '<';
  }
  std::string_view pending() const { return {buf_, len_}; }

 private:
  char buf_[32];                              // the longest literal has 23 bytes
  size_t len_ = 0;
};

// Follows a tool block from behind its opening literal on: whether the next byte is structure (tags, attributes, JSON
// punctuation), where sampling is greedy, or free text. A function of the bytes alone.
class DsmlGate {
 public:
  enum class State : uint8_t {
    kStruct,          // tags, white space between them, a started closing tag
    kStr,             // body of a string parameter
    kJson,            // JSON parameter outside quotes
    kJsonStr,         // JSON parameter inside quotes
    kDone,            // the block is closed: for good
    kBroken,          // after bytes that cannot be a tag: for good
  };
  explicit DsmlGate(const DsmlSyntax& syntax) : syn_(&syntax) {}
  State feed(char c) {
    switch (mode_) {
      case Mode::kTag: step_tag(c); break;
      case Mode::kAttributes: step_attributes(c); break;
      case Mode::kBody: step_body(c); break;
      case Mode::kEnd: break;
    }
    return state_;
  }
  bool greedy() const { return state_ == State::kStruct || state_ == State::kJson; }
  const DsmlSyntax& syntax() const { return *syn_; }
  std::string_view refuted() const { return match_.pending(); }       // kBroken: the bytes that are no tag

 private:
  enum class Mode : uint8_t { kTag, kAttributes, kBody, kEnd };

  void enter(Mode mode, State state) {
    mode_ = mode;
    state_ = state;
  }

  void step_tag(char c) {
    if (match_.pending().empty() && kDsmlSpace.find(c) != kDsmlSpace.npos) return;
    const int i = match_.push(c, {syn_->close, syn_->invoke_end, syn_->param, syn_->invoke});
    if (i == 0) enter(Mode::kEnd, State::kDone);
    if (i == LiteralMatcher::kRefuted) enter(Mode::kEnd, State::kBroken);
    if (i < 2) return;
    is_param_ = i == 2;
    is_string_ = false;
    attr_len_ = 0;
    mode_ = Mode::kAttributes;
  }

  // Up to '>', looking for ` string="true"`, whose first byte occurs only there.
  void step_attributes(char c) {
    constexpr std::string_view kString = " string=\"true\"";
    if (c == '>') {
      in_quotes_ = escaped_ = false;
      if (!is_param_) enter(Mode::kTag, State::kStruct);
      else enter(Mode::kBody, is_string_ ? State::kStr : State::kJson);
      return;
    }
    if (c == kString[attr_len_]) attr_len_++;
    else attr_len_ = c == ' ';
    if (attr_len_ == kString.size()) {
      is_string_ = true;
      attr_len_ = 0;
    }
  }

  // A parameter's value ends at the first closing literal, even inside JSON quotes: the parser ends it there too.
  void step_body(char c) {
    switch (match_.push(c, {syn_->param_end})) {
      case 0: return enter(Mode::kTag, State::kStruct);
      case LiteralMatcher::kRefuted:
        if (match_.pending().size() > 1) escaped_ = false;           // the bytes held back were payload: no quotes among them
        match_.restart(c);
        if (c != '<' && !is_string_) step_json(c);
        break;
      default: break;
    }
    if (match_.pending().size() >= 2 && !in_quotes_) state_ = State::kStruct;   // "</": finish the tag
    else state_ = is_string_ ? State::kStr : in_quotes_ ? State::kJsonStr : State::kJson;
  }

  void step_json(char c) {
    if (!in_quotes_) in_quotes_ = c == '"';
    else if (escaped_) escaped_ = false;
    else if (c == '\\') escaped_ = true;
    else if (c == '"') in_quotes_ = false;
  }

  Mode mode_ = Mode::kTag;
  State state_ = State::kStruct;
  bool is_param_ = false, is_string_ = false, in_quotes_ = false, escaped_ = false;
  uint8_t attr_len_ = 0;
  const DsmlSyntax* syn_;
  LiteralMatcher match_;
};

// -- tool call parsing ----

struct DsmlParam {
  std::string name, value;
  bool is_string;                             // else the value is JSON
};
struct DsmlCall {
  std::string name;
  std::vector<DsmlParam> params;
};

// Reads one block from its opening literal through its closing one. Strict: the exact form of the official encoder.
// Tolerant: any white space between tags, attributes in any order, `string` may be missing (a string then).
class DsmlReader {
 public:
  DsmlReader(std::string_view block, const DsmlSyntax& syntax, bool strict) : rest_(block), syn_(syntax), strict_(strict) {}
  // True when the block is well formed; rest() is then what follows it.
  bool read(std::vector<DsmlCall>& calls) {
    if (!take(syn_.open) || !gap()) return false;
    while (!take(syn_.close)) {
      DsmlCall call;
      if (!take(syn_.invoke) || !read_invoke_name(call.name)) return false;
      while (take(syn_.param)) {
        DsmlParam p;
        if (!read_param(p) || !gap()) return false;
        for (const DsmlParam& other : call.params)
          if (other.name == p.name) return false;
        call.params.push_back(std::move(p));
      }
      if (!take(syn_.invoke_end) || !gap()) return false;
      calls.push_back(std::move(call));
    }
    return true;
  }
  std::string_view rest() const { return rest_; }

 private:
  bool take(std::string_view literal) {
    if (rest_.substr(0, literal.size()) != literal) return false;
    rest_.remove_prefix(literal.size());
    return true;
  }
  void skip_space() { rest_.remove_prefix(std::min(rest_.find_first_not_of(kDsmlSpace), rest_.size())); }
  bool gap() { return strict_ ? take("\n") : (skip_space(), true); }

  // Strict: \s*name="NAME">\n up to the next tag, where names may hold anything, even `">`; one more newline is fine.
  bool read_invoke_name(std::string& name) {
    if (!strict_) {
      std::string flag;
      return read_attributes(name, flag) && gap();
    }
    skip_space();
    if (!take("name=\"")) return false;
    const std::string_view end_tag = syn_.invoke_end.substr(0, syn_.invoke_end.size() - 1);
    const size_t n = std::min(rest_.find(syn_.param), rest_.find(end_tag));
    if (n == rest_.npos) return false;
    const std::string_view header = rest_.substr(0, n);
    rest_.remove_prefix(n);
    for (std::string_view tail : {"\">\n\n", "\">\n"}) {
      if (header.size() < tail.size() || header.substr(header.size() - tail.size()) != tail) continue;
      name = header.substr(0, header.size() - tail.size());
      return true;
    }
    return false;
  }

  bool read_param(DsmlParam& p) {
    if (strict_) return read_strict_param(p);
    std::string flag = "true";
    if (!read_attributes(p.name, flag)) return false;
    const size_t n = rest_.find(syn_.param_end);
    if (n == rest_.npos) return false;
    p.value = rest_.substr(0, n);
    rest_.remove_prefix(n + syn_.param_end.size());
    p.is_string = flag == "true";
    return p.is_string || flag == "false";
  }

  // ` name="NAME" string="true|false">VALUE` up to the first closing literal; what only lacks its '<' or '>' spoils it.
  bool read_strict_param(DsmlParam& p) {
    constexpr std::string_view kTrue = "\" string=\"true\">", kFalse = "\" string=\"false\">";
    if (!take(" name=\"")) return false;
    const size_t n = rest_.find(syn_.param_end.substr(1, syn_.param_end.size() - 2));
    if (n == rest_.npos || n == 0) return false;
    const std::string_view value = rest_.substr(0, n - 1);
    rest_.remove_prefix(n - 1);
    const size_t t = value.find(kTrue), f = value.find(kFalse);
    if (t == f || !take(syn_.param_end)) return false;               // t == f: both npos
    p.is_string = t < f;
    p.name = value.substr(0, std::min(t, f));
    p.value = value.substr(p.name.size() + (t < f ? kTrue : kFalse).size());
    return true;
  }

  // Tolerant: name="..." and string="..." in any order, up to a '>' that follows a quote. Nothing is escaped, so a
  // value runs to the last quote before the other attribute or the end.
  bool read_attributes(std::string& name, std::string& flag) {
    size_t end = rest_.find('>');
    while (end != rest_.npos && !ends_in_quote(rest_.substr(0, end))) end = rest_.find('>', end + 1);
    if (end == rest_.npos || rest_.find('<') < end) return false;    // a '<' begins another tag: this one never ended
    const std::string_view tag = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    const size_t n = find_attribute(tag, "name=\""), s = find_attribute(tag, "string=\"");
    if (n == tag.npos || tag.find_first_not_of(kDsmlSpace) != std::min(n, s)) return false;
    const auto value = [&](size_t begin, size_t other, std::string& out) {
      const std::string_view v = other > begin ? tag.substr(begin, other - begin) : tag.substr(begin);
      if (!ends_in_quote(v)) return false;
      out = v.substr(0, v.rfind('"'));
      return true;
    };
    return value(n + 6, s, name) && (s == tag.npos || value(s + 8, n, flag));
  }
  static bool ends_in_quote(std::string_view s) {
    const size_t i = s.find_last_not_of(kDsmlSpace);
    return i != s.npos && s[i] == '"';
  }
  // Where `key` stands after white space.
  static size_t find_attribute(std::string_view tag, std::string_view key) {
    size_t i = tag.find(key);
    while (i != tag.npos && (i == 0 || kDsmlSpace.find(tag[i - 1]) == kDsmlSpace.npos)) i = tag.find(key, i + 1);
    return i;
  }

  std::string_view rest_;
  const DsmlSyntax& syn_;
  bool strict_;
};

// {"name": value, ...} with strings escaped and JSON values as the model wrote them.
[[maybe_unused]] static std::string dsml_arguments(const DsmlCall& call) {
  std::string out = "{";
  for (const DsmlParam& p : call.params) {
    if (out.size() > 1) out += ", ";
    dump_string(p.name, out);
    out += ": ";
    if (p.is_string) dump_string(p.value, out);
    else out += p.value;
  }
  return out + "}";
}

// A whole completion in the official grammar: [reasoning</think>]content[\n\n block]EOS. False when it deviates at all.
struct Completion {
  std::string reasoning, content;
  std::vector<DsmlCall> calls;
};
[[maybe_unused]] static bool parse_completion(std::string_view text, bool thinking, Completion& out) {
  constexpr std::string_view kBlock = "\n\n<｜DSML｜tool_calls";
  if (thinking) {
    const size_t n = text.find(kThinkEndText);
    if (n == text.npos || text.find(kBlock) < n) return false;
    out.reasoning = text.substr(0, n);
    text.remove_prefix(n + kThinkEndText.size());
  }
  const size_t eos = text.find(kEosText), block = text.find(kBlock), n = std::min(eos, block);
  if (n == text.npos) return false;
  out.content = text.substr(0, n);
  for (std::string_view special : {kBosText, kThinkText, kThinkEndText, kDsmlText, kEosText})
    if (out.content.find(special) != out.content.npos || out.reasoning.find(special) != out.reasoning.npos) return false;
  text.remove_prefix(n);
  if (block > eos) return text == kEosText;
  DsmlReader reader(text.substr(2), kDsml[0], true);
  return reader.read(out.calls) && reader.rest() == kEosText;
}

// -- reply ----

struct ToolCall {
  std::string id, name;
  Json arguments;                             // an object
};
struct Reply {
  std::string reasoning, text;
  std::vector<ToolCall> calls;
};

// RFC 8259 has no NaN and no infinities, so a call with one could not be passed on.
static bool has_only_finite_numbers(const Json& v) {
  if (v.kind() == Json::Kind::kNumber) return is_json_integer(v.text()) || std::isfinite(v.as_double("number"));
  return std::all_of(v.items().begin(), v.items().end(), has_only_finite_numbers);
}

// Splits a reply while it is generated. What is certain is in reply() at once; only what may turn out to be a control
// text or a tool block is held back. Without tools, or in reasoning, or when malformed or cut short, a block is text.
class ReplyParser {
 public:
  enum class Control : uint8_t { kNone, kThinkOpen, kThinkClose };

  // thinking_open: the prompt ended in <think>. first_call: number of the first call's id, for ids unique in a chat.
  ReplyParser(bool thinking_open, bool tools, size_t first_call = 0)
      : mode_(thinking_open ? Mode::kReasoning : Mode::kAnswer), tools_(tools), first_call_(first_call) {}

  // The bytes of one token, or any piece of them. The think tokens are acted on wherever they come outside tool blocks;
  // the same text spelled by other tokens only ends reasoning.
  void feed(std::string_view bytes, Control control = Control::kNone) {
    if (control != Control::kNone && (mode_ == Mode::kReasoning || mode_ == Mode::kAnswer)) {
      finish();
      mode_ = control == Control::kThinkOpen ? Mode::kReasoning : Mode::kAnswer;
      return;
    }
    for (char c : bytes) step(c);
  }
  // The end of the reply: what was held back is text.
  void finish() {
    if (mode_ == Mode::kReasoning) reply_.reasoning += match_.pending();
    if (mode_ == Mode::kAnswer) release_held(match_.pending());
    if (mode_ == Mode::kBlock) release_block(block_.size());
    match_ = {};
  }
  bool done() const { return mode_ == Mode::kDone; }                  // a tool block is complete: stop generating
  bool greedy() const { return mode_ == Mode::kBlock && gate_.greedy(); }      // inside the structure of a tool block
  const Reply& reply() const { return reply_; }
  // What came since the last call. Within the piece of one token, reasoning comes before text.
  std::string_view new_reasoning() { return fresh(reply_.reasoning, reasoning_seen_); }
  std::string_view new_text() { return fresh(reply_.text, text_seen_); }

 private:
  enum class Mode : uint8_t { kReasoning, kAnswer, kBlock, kDone };

  static std::string_view fresh(const std::string& s, size_t& seen) {
    return std::string_view(s).substr(std::exchange(seen, s.size()));
  }
  void step(char c) {
    switch (mode_) {
      case Mode::kReasoning: return step_reasoning(c);
      case Mode::kAnswer: return step_answer(c);
      case Mode::kBlock: return step_block(c);
      case Mode::kDone: return;
    }
  }

  void step_reasoning(char c) {
    const int i = match_.push(c, {kThinkEndText});
    if (i == 0) mode_ = Mode::kAnswer;
    if (i != LiteralMatcher::kRefuted) return;
    const std::string_view p = match_.pending();
    reply_.reasoning += c == '<' ? p.substr(0, p.size() - 1) : p;
    match_.restart(c);
  }

  // The separator of a tool block is "\n\n": up to two newlines wait with the started opening literal.
  void step_answer(char c) {
    if (!tools_) {
      reply_.text += c;
      return;
    }
    const int i = match_.push(c, {kDsml[0].open, kDsml[1].open, kDsml[2].open});
    if (i >= 0) {
      block_ = std::string(newlines_, '\n').append(kDsml[i].open);
      separator_ = std::exchange(newlines_, 0);
      gate_ = DsmlGate(kDsml[i]);
      mode_ = Mode::kBlock;
    }
    if (i != LiteralMatcher::kRefuted) return;
    const std::string_view p = match_.pending();
    if (p.size() > 1) release_held(p.substr(0, p.size() - 1));
    match_.restart(c);
    if (c == '\n' && newlines_ < 2) newlines_++;
    else if (c == '\n') reply_.text += c;
    else if (c != '<') release_held({&c, 1});
  }
  void release_held(std::string_view then) {
    reply_.text.append(std::exchange(newlines_, 0), '\n').append(then);
  }

  void step_block(char c) {
    block_ += c;
    const DsmlGate::State state = gate_.feed(c);
    if (state == DsmlGate::State::kBroken) {                          // another block may start in the bytes that broke it
      const std::string rest(gate_.refuted());
      release_block(block_.size() - rest.size());
      for (char r : rest) step_answer(r);
    } else if (state == DsmlGate::State::kDone) {
      if (accept_block()) mode_ = Mode::kDone;
      else release_block(block_.size());
    }
  }
  void release_block(size_t n) {
    reply_.text.append(block_, 0, n);
    block_.clear();
    mode_ = Mode::kAnswer;
  }

  // Takes the calls of the finished block; false when it does not parse.
  bool accept_block() {
    std::vector<DsmlCall> calls;
    DsmlReader reader(std::string_view(block_).substr(separator_), gate_.syntax(), false);
    if (!reader.read(calls) || calls.empty()) return false;
    std::vector<ToolCall> parsed;
    for (const DsmlCall& call : calls) {
      Json arguments = Json::object();
      for (const DsmlParam& p : call.params) {
        Json value(p.value);
        if (!p.is_string) try {
            value = Json::parse(p.value, "argument");
          } catch (const Error&) {
            return false;
          }
        if (!has_only_finite_numbers(value)) return false;
        arguments.set(p.name, std::move(value));
      }
      parsed.push_back({"call_" + std::to_string(first_call_ + parsed.size()), call.name, std::move(arguments)});
    }
    reply_.calls = std::move(parsed);
    return true;
  }

  Mode mode_;
  bool tools_;
  size_t first_call_, newlines_ = 0, separator_ = 0, reasoning_seen_ = 0, text_seen_ = 0;
  LiteralMatcher match_;
  DsmlGate gate_{kDsml[0]};
  std::string block_;
  Reply reply_;
};

// [{"id", "name", "arguments": {...}}], as --json prints them.
static Json tool_calls_json(const std::vector<ToolCall>& calls) {
  Json out = Json::array();
  for (const ToolCall& c : calls) out.push(Json::object().set("id", c.id).set("name", c.name).set("arguments", c.arguments));
  return out;
}

// The reply as a message of the conversation, in the form render_chat reads.
static Json reply_message(const Reply& reply) {
  Json m = chat_message("assistant", reply.text);
  if (!reply.reasoning.empty()) m.set("reasoning_content", reply.reasoning);
  Json calls = Json::array();
  for (const ToolCall& c : reply.calls) {
    Json f = Json::object().set("name", c.name).set("arguments", c.arguments.dump());
    calls.push(Json::object().set("id", c.id).set("type", "function").set("function", std::move(f)));
  }
  if (calls.size()) m.set("tool_calls", std::move(calls));
  return m;
}

}  // namespace ds4

// =============================================================================
// 13. CACHE — what attention remembers: raw window, compressed rows, compressor state.   uses: 1 3 9
// =============================================================================
// Per layer: a ring of the last raw rows, all compressed rows (one per `ratio` tokens), the indexer's rows (ratio 4),
// a ring of the newest compressor inputs, and the rows x that wait for theirs. Nothing grows with context x heads. All rings
// are indexed by absolute position. How the tokens were cut into spans decides which of them still wait, never a result.

namespace ds4 {

// How an Engine is to run; none of it changes a result but exact and plain_kv.
struct RunOptions {
  uint32_t ctx = 32768;            // tokens the cache can hold
  int threads = 0;                 // 0: physical cores
  uint32_t prefill_chunk = 512;    // most tokens computed together
  bool exact = false;              // float activations at quantised weights
  bool plain_kv = false;           // cached rows as float32, not rounded
  const Kernels* kernels = nullptr;  // null: the best this CPU has
};

// A compressed row is needed only when its block is full. So compressor inputs are not computed until a token ends a block or
// so many tokens wait: decoding reads the compressors' weights once for 4 tokens (ratio 4) or 8 (ratio 128), not for each.
constexpr uint32_t kMaxWaiting = 8;

struct LayerCache {
  uint32_t ratio;
  uint8_t* window;                 // [window_rows][kv_stride]: row of position p at p % window_rows
  uint8_t* rows;                   // [ctx / ratio][kv_stride]: compressed row c covers positions c*ratio ..
  uint8_t* index_rows;             // [ctx / 4][index_stride]
  float *k, *z;                    // [state_rows][width]: compressor inputs of position p < waiting at p % state_rows
  float *index_k, *index_z;        // the indexer's, [state_rows][2 * idx_dim]
  float* x;                        // [kMaxWaiting][n_embd]: attention input of position p >= waiting at p % kMaxWaiting
  uint8_t* x_int8;                 // [kMaxWaiting][act_bytes(n_embd)]: x quantised
  uint32_t width;                  // m * head_dim, m = 2 for ratio 4
  uint32_t state_rows;
  uint32_t waiting;                // the first position whose compressor inputs are not computed yet
};

// Rewinding by up to this many tokens finds every ring intact.
constexpr uint32_t kRewindRows = 56;

class Cache {
 public:
  // count_only: bytes() is right, nothing is allocated.
  Cache(const Shape& s, const RunOptions& o, bool count_only = false) : ctx_(o.ctx) {
    const uint32_t element = o.plain_kv ? 4 : 2;
    kv_stride_ = uint32_t(align_up(s.head_dim, 16)) * element;
    index_stride_ = uint32_t(align_up(s.idx_dim, 16)) * element;
    window_rows_ = s.window + std::max(o.prefill_chunk, kRewindRows);
    layers_.resize(s.n_layer);
    lay_out(s);
    if (count_only) return;
    arena_.map("key-value cache");
    lay_out(s);
  }
  uint64_t bytes() const { return arena_.bytes(); }
  uint32_t kv_stride() const { return kv_stride_; }
  uint32_t index_stride() const { return index_stride_; }
  LayerCache& layer(uint32_t il) { return layers_[il]; }
  uint8_t* window_row(const LayerCache& l, uint32_t pos) const { return l.window + size_t(pos % window_rows_) * kv_stride_; }

  uint32_t position() const { return position_; }
  void advance(uint32_t n) { position_ += n; newest_ = std::max(newest_, position_); }
  // Forgets the tokens from `position` on; false (and nothing changes) when the rings no longer hold what that needs.
  bool rewind(uint32_t position) {
    if (position > position_) return false;
    if (position != 0 && newest_ - position > kRewindRows) return false;
    position_ = position;
    if (position == 0) newest_ = 0;
    return true;
  }

 private:
  void lay_out(const Shape& s) {
    for (uint32_t il = 0; il < s.n_layer; il++) {
      LayerCache& l = layers_[il];
      l.ratio = s.ratios[il];
      l.window = arena_.take<uint8_t>(uint64_t(window_rows_) * kv_stride_);
      if (l.ratio == 0) continue;
      l.width = (l.ratio == 4 ? 2 : 1) * s.head_dim;
      l.state_rows = (l.ratio == 4 ? 8 : l.ratio) + kRewindRows;
      l.rows = arena_.take<uint8_t>(uint64_t(ctx_ / l.ratio) * kv_stride_);
      l.k = arena_.take<float>(uint64_t(l.state_rows) * l.width);
      l.z = arena_.take<float>(uint64_t(l.state_rows) * l.width);
      l.x = arena_.take<float>(uint64_t(kMaxWaiting) * s.n_embd);
      l.x_int8 = arena_.take<uint8_t>(kMaxWaiting * act_bytes(s.n_embd));
      if (l.ratio != 4) continue;
      l.index_rows = arena_.take<uint8_t>(uint64_t(ctx_ / 4) * index_stride_);
      l.index_k = arena_.take<float>(uint64_t(l.state_rows) * 2 * s.idx_dim);
      l.index_z = arena_.take<float>(uint64_t(l.state_rows) * 2 * s.idx_dim);
    }
  }

  uint32_t ctx_, window_rows_, kv_stride_, index_stride_, position_ = 0;
  uint32_t newest_ = 0;            // highest position ever written since the last reset
  std::vector<LayerCache> layers_;
  Arena arena_;
};

}  // namespace ds4

// =============================================================================
// 14. LAYER — one transformer block over a span of tokens.   uses: 6 7 9 13
// =============================================================================
// Enters: hyper-connection streams of a span of tokens that follow what the cache holds. Leaves: the streams after the
// layer, and the cache grown by the span.
// A span of one token is decoding, a longer one is prompt reading: the same code, the same bits.

namespace ds4 {

struct Span {
  const int32_t* tokens;
  uint32_t n;                      // tokens in the span
  uint32_t pos;                    // absolute position of the first
  uint32_t first;                  // the first token whose output is wanted; the ones before only feed the cache
};

// Activation rows with a pointer to each, so that a matrix can read any selection of them.
struct Rows {
  float* data = nullptr;           // [n][cols]
  float** row = nullptr;
  uint32_t cols = 0;
  void take(Arena& a, uint64_t n, uint32_t n_cols) {
    cols = n_cols;
    data = a.take<float>(n * n_cols);
    row = a.take<float*>(n);
    if (row)
      for (uint64_t i = 0; i < n; i++) row[i] = data + i * n_cols;
  }
};

// Rows that matrices read: as floats and quantised once to int8 (see KERNELS).
struct ActRows : Rows {
  const void** q = nullptr;
  void take(Arena& a, uint64_t n, uint32_t n_cols) {
    Rows::take(a, n, n_cols);
    uint8_t* store = a.take<uint8_t>(n * act_bytes(n_cols));
    q = a.take<const void*>(n);
    if (q)
      for (uint64_t i = 0; i < n; i++) q[i] = store + i * act_bytes(n_cols);
  }
};

// Part of a parallel job: out[i][r] = row r of w . x[i] for n rows x.
struct MatmulTask {
  Matrix w;
  const ActRows* acts;             // its floats or its int8 copy, whichever w takes
  size_t offset;                   // first row of acts, unless `pick` lists the rows
  const uint32_t* pick;
  float* const* out;
  uint32_t n;
  bool as_float;                   // router and hc matrices: float activations whatever the type
};

enum ProfilePart { kPartEmbed, kPartHc, kPartAttnIn, kPartCompress, kPartIndex, kPartAttend, kPartAttnOut, kPartRouter, kPartExperts, kPartHead, kParts };
constexpr const char* kPartNames[kParts] = {"embed", "hyper connections", "attention in", "compressor", "indexer", "attention", "attention out", "router + shared up", "experts", "head"};

struct ByteRange {
  const uint8_t* data;
  size_t n;
};
// Where a run spends its time, and the weights that each part read.
struct Profile {
  double seconds[kParts] = {};
  uint64_t bytes[kParts] = {};
  std::vector<ByteRange>* read = nullptr;      // receives them, if wanted
  ProfilePart part = kPartEmbed;
};
struct ProfileTimer {
  ProfileTimer(Profile* profile, ProfilePart part) : to(profile), t0(profile ? now_seconds() : 0) { if (to) to->part = part; }
  ~ProfileTimer() { if (to) to->seconds[to->part] += now_seconds() - t0; }
  Profile* to;
  double t0;
};

// Intermediate results for --dump-taps: name, data (float or int32), rows, columns.
using TapSink = std::function<void(const std::string& name, const void* data, size_t rows, size_t cols, bool integer)>;

// Everything a span needs besides weights and cache; sized once for `prefill_chunk` tokens.
struct Workspace {
  ActRows streams, x, qr, o, low, hidden, hidden_shared;   // o: row g * chunk + t
  ActRows comp_x;                  // pointers only, [chunk + kMaxWaiting]: rows of a LayerCache's x, then of x
  Rows mix, q, kv, k, z, index_k, index_z, iq, iw, attn, up, up_shared, down, down_shared, logits_router;
  float** low_group = nullptr;     // [n_group][chunk]: where group g of token t goes
  float *post = nullptr, *comb = nullptr, *rope_cs = nullptr;  // rope_cs [2][chunk][n_rot]: plain, compressed
  float *qt = nullptr, *index_scores = nullptr;
  uint32_t *selected = nullptr, *rank = nullptr;
  int32_t* experts = nullptr;      // [chunk][n_used]
  float* expert_weight = nullptr;
  uint32_t* pair_token = nullptr;  // (token, slot) pairs ordered by expert
  uint32_t* pair_row = nullptr;
  float **pair_gate = nullptr, **pair_up = nullptr, **pair_down = nullptr;
  const void** thread_rows = nullptr;          // [threads][max_rows]
  float *thread_scores = nullptr, *thread_row = nullptr;
  uint32_t max_rows = 0, index_batch = 1;      // index_batch: tokens whose indexer scores are held at once
};

class LayerRunner {
 public:
  LayerRunner(const Model& m, const RunOptions& o, bool count_only = false);
  uint64_t bytes() const { return arena_.bytes(); }
  void prepare(const Span& span);              // rotary angles of the span
  void run(uint32_t il, const Span& span);
  void hc_pre(const HyperConn& hc, const std::vector<float>& norm, uint32_t first, const Span& span);
  void matmul(const MatmulTask* tasks, size_t n);
  template <class F>
  void for_each(size_t n, const F& f) { pool.run(n, f); }      // f(i, thread), in parallel when there is more than one
  void tap(uint32_t il, const char* name, const void* data, size_t rows, size_t cols, bool integer = false) {
    if (taps) taps(format("l%u.%s", il, name), data, rows, cols, integer);
  }

  const Model& model;
  const Shape& shape;
  const RunOptions options;
  const Kernels& kernels;
  ThreadPool pool;
  Cache cache;
  Workspace ws;
  TapSink taps;
  Profile* profile = nullptr;                  // when measured

 private:
  void lay_out();
  void angles(uint32_t ratio, uint64_t pos, float* cs) const;
  void hc_post(const Span& span);
  void attention(uint32_t il, const Span& span);
  uint32_t take_waiting(LayerCache& c, const Span& span);
  void compress_blocks(uint32_t il, uint32_t pos, uint32_t n);
  bool index_needed(const LayerCache& c, const Span& span) const;
  void select_rows(uint32_t il, const Span& span);
  void attend(uint32_t il, const Span& span, size_t t, uint32_t group, int thread);
  void route(uint32_t il, const Span& span, size_t t);
  void feed_forward(uint32_t il, const Span& span);
  void tap_window(uint32_t il, const Span& span);
  void tap_compressed(uint32_t il, uint64_t block0, uint64_t block1);
  void tap_selected(uint32_t il, const Span& span);
  const float* rope_row(uint32_t ratio, size_t t) const { return ws.rope_cs + (size_t(ratio != 0) * options.prefill_chunk + t) * shape.n_rot; }
  void quantize(const ActRows& a, size_t i) const { if (!options.exact) kernels.quantize(a.row[i], const_cast<void*>(a.q[i]), a.cols); }

  std::vector<double> freq_[2];                // radians per position: plain layers, compressed layers
  std::vector<MatmulTask> tasks_;              // a job over all experts
  std::vector<size_t> chunk_end_;              // of each task of the running job
  std::vector<uint32_t> expert_end_;           // [n_expert + 1]: where an expert's pairs end
  Arena arena_;
};

// Rotary frequencies of compressed layers (YaRN): f' = f keep + f / factor (1 - keep), keep falling from 1 to 0 between
// the pair numbers whose wavelengths turn beta_fast and beta_slow times in the original context.
static std::vector<double> rope_frequencies(const Shape& s, bool compressed) {
  const uint32_t half = s.n_rot / 2;
  const double base = compressed ? s.comp_rope_base : s.rope_base, log_base = log_f64(base);
  std::vector<double> f(half);
  for (uint32_t i = 0; i < half; i++) f[i] = exp_f64(-2.0 * i / s.n_rot * log_base);
  if (!compressed || s.yarn_factor <= 1.0) return f;
  auto pair_of = [&](double turns) { return s.n_rot * log_f64(double(s.yarn_orig_ctx) / (turns * 6.283185307179586)) / (2.0 * log_base); };
  const double lo = std::max(0.0, std::floor(pair_of(s.yarn_beta_fast)));
  const double hi = std::min(double(s.n_rot) - 1.0, std::ceil(pair_of(s.yarn_beta_slow)));
  for (uint32_t i = 0; i < half; i++) {
    const double keep = 1.0 - std::min(std::max((i - lo) / std::max(0.001, hi - lo), 0.0), 1.0);
    f[i] = f[i] * keep + f[i] / s.yarn_factor * (1.0 - keep);
  }
  return f;
}

LayerRunner::LayerRunner(const Model& m, const RunOptions& o, bool count_only)
    : model(m), shape(m.shape), options(o), kernels(*o.kernels), pool(count_only ? 1 : o.threads), cache(m.shape, o, count_only) {
  freq_[0] = rope_frequencies(shape, false);
  freq_[1] = rope_frequencies(shape, true);
  tasks_.resize(2 * shape.n_expert);
  chunk_end_.resize(std::max<size_t>(tasks_.size(), kMaxGroups));
  expert_end_.resize(shape.n_expert + 1);
  lay_out();
  if (count_only) return;
  arena_.map("scratch memory");
  lay_out();
}

void LayerRunner::lay_out() {
  const Shape& s = shape;
  const uint64_t T = options.prefill_chunk, pairs = T * s.n_used;
  const uint32_t wide = 2 * s.head_dim, group = s.head_dim * s.n_head / s.n_group;
  ws.streams.Rows::take(arena_, T, s.n_hc * s.n_embd);       // only ever read as floats
  ws.x.take(arena_, T, s.n_embd);
  ws.qr.take(arena_, T, s.q_rank);
  ws.o.take(arena_, T * s.n_group, group);
  ws.low.take(arena_, T, s.n_group * s.o_rank);
  ws.hidden.take(arena_, pairs, s.ff);
  ws.hidden_shared.take(arena_, T, s.ff_shared);
  ws.mix.take(arena_, T, s.n_hc * (s.n_hc + 2));
  ws.q.take(arena_, T, s.n_head * s.head_dim);
  ws.kv.take(arena_, T, s.head_dim);
  ws.comp_x.row = arena_.take<float*>(T + kMaxWaiting);
  ws.comp_x.q = arena_.take<const void*>(T + kMaxWaiting);
  ws.k.take(arena_, T + kMaxWaiting, wide);
  ws.z.take(arena_, T + kMaxWaiting, wide);
  ws.index_k.take(arena_, T + kMaxWaiting, 2 * s.idx_dim);
  ws.index_z.take(arena_, T + kMaxWaiting, 2 * s.idx_dim);
  ws.iq.take(arena_, T, s.idx_heads * s.idx_dim);
  ws.iw.take(arena_, T, uint32_t(align_up(s.idx_heads, 16)));
  ws.attn.take(arena_, T, s.n_embd);
  ws.up.take(arena_, pairs, s.ff);
  ws.up_shared.take(arena_, T, s.ff_shared);
  ws.down.take(arena_, pairs, s.n_embd);
  ws.down_shared.take(arena_, T, s.n_embd);
  ws.logits_router.take(arena_, T, s.n_expert);
  ws.low_group = arena_.take<float*>(T * s.n_group);
  if (ws.low_group)
    for (uint64_t i = 0; i < T * s.n_group; i++) ws.low_group[i] = ws.low.row[i % T] + i / T * s.o_rank;
  ws.post = arena_.take<float>(T * s.n_hc);
  ws.comb = arena_.take<float>(T * s.n_hc * s.n_hc);
  ws.rope_cs = arena_.take<float>(2 * T * s.n_rot);
  const uint64_t index_max = options.ctx / 4 + 1;
  ws.index_batch = uint32_t(std::max<uint64_t>(1, std::min<uint64_t>(T, (4u << 20) / index_max)));
  ws.qt = arena_.take<float>(uint64_t(ws.index_batch) * s.idx_dim * align_up(s.idx_heads, 16));
  ws.index_scores = arena_.take<float>(ws.index_batch * index_max);
  ws.rank = arena_.take<uint32_t>(uint64_t(options.threads) * index_max);
  ws.selected = arena_.take<uint32_t>(T * s.idx_top_k);
  ws.experts = arena_.take<int32_t>(pairs);
  ws.expert_weight = arena_.take<float>(pairs);
  ws.pair_token = arena_.take<uint32_t>(pairs);
  ws.pair_row = arena_.take<uint32_t>(pairs);
  ws.pair_gate = arena_.take<float*>(pairs);
  ws.pair_up = arena_.take<float*>(pairs);
  ws.pair_down = arena_.take<float*>(pairs);
  ws.max_rows = s.window + std::max(s.idx_top_k, options.ctx / 128 + 1);
  ws.thread_rows = arena_.take<const void*>(uint64_t(options.threads) * ws.max_rows);
  ws.thread_scores = arena_.take<float>(uint64_t(options.threads) * kAttendHeads * align_up(ws.max_rows, 16));
  ws.thread_row = arena_.take<float>(uint64_t(options.threads) * std::max(s.head_dim, s.idx_dim));
}

// Cosines and sines of one position, float from double angles.
void LayerRunner::angles(uint32_t ratio, uint64_t pos, float* cs) const {
  const uint32_t half = shape.n_rot / 2;
  for (uint32_t i = 0; i < half; i++) {
    double s, c;
    sincos_f64(double(pos) * freq_[ratio != 0][i], &s, &c);
    cs[i] = float(c);
    cs[half + i] = float(s);
  }
}

void LayerRunner::prepare(const Span& span) {
  for_each(span.n, [&](size_t t, int) {
    angles(0, span.pos + t, ws.rope_cs + t * shape.n_rot);
    angles(4, span.pos + t, ws.rope_cs + (options.prefill_chunk + t) * shape.n_rot);
  });
}

// Rows of a chunk: whole register tiles for four tokens and more; for fewer, at most about `most` bytes and what takes 15 to
// 25 us. The same for all chunks of a task but the last, so that Ahead finds where the next one's places begin.
static size_t chunk_rows(const Matrix& w, size_t n_tokens, size_t most = SIZE_MAX) {
  return n_tokens >= 4 ? 64 : std::max<size_t>(4, size_t(align_up(std::min(most, size_t(256) << 10) / std::max<size_t>(w.stride, 1), 4)));
}

// Runs all tasks as one parallel job, cut into chunks of rows; about four or more for each thread.
void LayerRunner::matmul(const MatmulTask* tasks, size_t n_tasks) {
  size_t bytes = 0;
  for (size_t i = 0; i < n_tasks; i++) {
    const size_t n = size_t(tasks[i].w.rows) * tasks[i].w.stride;
    bytes += n;
    if (profile && profile->read) profile->read->push_back({tasks[i].w.data, n});
  }
  if (profile) profile->bytes[profile->part] += bytes;
  const size_t most = bytes / size_t(4 * pool.size());
  auto rows_of = [&](const MatmulTask& t) { return chunk_rows(t.w, t.n, most); };
  size_t total = 0;
  for (size_t i = 0; i < n_tasks; i++) chunk_end_[i] = total += ceil_div(tasks[i].w.rows, rows_of(tasks[i]));
  pool.run(total, [&](size_t chunk, int) {
    const size_t i = size_t(std::upper_bound(chunk_end_.begin(), chunk_end_.begin() + ptrdiff_t(n_tasks), chunk) - chunk_end_.begin());
    const MatmulTask& t = tasks[i];
    const size_t rows = rows_of(t), r0 = (chunk - (i ? chunk_end_[i - 1] : 0)) * rows, r1 = std::min<size_t>(r0 + rows, t.w.rows);
    const bool as_float = t.as_float || options.exact || t.w.type == Type::F32 || t.w.type == Type::F16 || t.w.type == Type::BF16;
    constexpr uint32_t kBatch = 64;              // pointers gathered at a time for a picked selection
    const void* picked[kBatch];
    for (uint32_t b = 0; b < t.n; b += t.pick ? kBatch : t.n) {
      const uint32_t n = t.pick ? std::min(kBatch, t.n - b) : t.n;
      const void* const* x = as_float ? reinterpret_cast<const void* const*>(t.acts->row) + t.offset : t.acts->q + t.offset;
      if (t.pick) {
        for (uint32_t k = 0; k < n; k++) picked[k] = as_float ? static_cast<const void*>(t.acts->row[t.pick[b + k]]) : t.acts->q[t.pick[b + k]];
        x = picked;
      }
      if (as_float) kernels.matmul_float(t.w, r0, r1, reinterpret_cast<const float* const*>(x), t.out + b, n);
      else kernels.matmul_int8(t.w, r0, r1, x, t.out + b, n);
    }
  });
}

// -- 14a hyper connections ----------------------------------------------------

// From mix (the S (S + 2) outputs of fn) to pre, post and the nearly doubly stochastic C, in this order:
// softmax over rows + eps; columns / (sum + eps); then iterations - 1 times rows / (sum + eps), columns / (sum + eps).
// The head's fn has only pre.
static void hc_coefficients(const float* mix, const HyperConn& hc, const Shape& s, float* pre, float* post, float* C) {
  const uint32_t S = s.n_hc;
  const float eps = s.hc_eps;
  for (uint32_t i = 0; i < S; i++) pre[i] = float(sigmoid_f64(mix[i] * hc.scale[0] + hc.base[i])) + eps;
  if (hc.fn.rows == S) return;
  for (uint32_t i = 0; i < S; i++) post[i] = 2.0f * float(sigmoid_f64(mix[S + i] * hc.scale[1] + hc.base[S + i]));
  for (uint32_t j = 0; j < S; j++) {
    float* row = C + j * S;
    float top = -INFINITY, sum = 0;
    for (uint32_t k = 0; k < S; k++) { row[k] = mix[2 * S + j * S + k] * hc.scale[2] + hc.base[2 * S + j * S + k]; top = std::max(top, row[k]); }
    for (uint32_t k = 0; k < S; k++) { row[k] = float(exp_f64(double(row[k]) - double(top))); sum += row[k]; }
    for (uint32_t k = 0; k < S; k++) row[k] = row[k] / sum + eps;
  }
  auto scale_lines = [&](uint32_t step, uint32_t inner) {
    for (uint32_t a = 0; a < S; a++) {
      float sum = 0;
      for (uint32_t b = 0; b < S; b++) sum += C[a * step + b * inner];
      for (uint32_t b = 0; b < S; b++) C[a * step + b * inner] /= sum + eps;
    }
  };
  scale_lines(1, S);
  for (uint32_t it = 1; it < s.sinkhorn_iters; it++) {
    scale_lines(S, 1);
    scale_lines(1, S);
  }
}

// streams of the tokens from `first` on -> x = rms(sum_s pre[s] H[s]) * norm, quantised; post and comb for hc_post.
void LayerRunner::hc_pre(const HyperConn& hc, const std::vector<float>& norm, uint32_t first, const Span& span) {
  ProfileTimer timer(profile, kPartHc);
  const uint32_t S = shape.n_hc, E = shape.n_embd;
  const MatmulTask task{hc.fn, &ws.streams, first, nullptr, ws.mix.row + first, span.n - first, true};
  matmul(&task, 1);
  for_each(span.n - first, [&](size_t i, int) {
    const size_t t = first + i;
    float* mix = ws.mix.row[t];
    const float inv = 1.0f / std::sqrt(kernels.sum_squares(ws.streams.row[t], ws.streams.cols) / float(ws.streams.cols) + shape.rms_eps);
    for (uint32_t k = 0; k < hc.fn.rows; k++) mix[k] *= inv;
    float pre[kMaxStreams];
    hc_coefficients(mix, hc, shape, pre, ws.post + t * S, ws.comb + t * S * S);
    kernels.hc_mix(ws.streams.row[t], pre, S, ws.x.row[t], E);
    kernels.rms_norm(ws.x.row[t], norm.data(), shape.rms_eps, ws.x.row[t], E);
    quantize(ws.x, t);
  });
}

// streams' = post * attn + C^T streams for the wanted tokens.
void LayerRunner::hc_post(const Span& span) {
  ProfileTimer timer(profile, kPartHc);
  const uint32_t S = shape.n_hc, first = span.first;
  for_each(span.n - first, [&](size_t i, int) {
    const size_t t = first + i;
    kernels.hc_update(ws.streams.row[t], ws.attn.row[t], ws.post + t * S, ws.comb + t * S * S, S, shape.n_embd);
  });
}

// -- 14b attention --------------------------------------------------------------

// x -> attn. Cached rows of the span are written before any of its tokens looks at them; each token sees only its past.
void LayerRunner::attention(uint32_t il, const Span& span) {
  const LayerWeights& w = model.layers[il];
  LayerCache& c = cache.layer(il);
  const uint32_t first = span.first, n = span.n, m = n - first;
  uint32_t n_comp = 0;
  {
    ProfileTimer timer(profile, kPartAttnIn);
    if (c.ratio) n_comp = take_waiting(c, span);
    MatmulTask tasks[8];
    size_t k = 0;
    tasks[k++] = {w.kv, &ws.x, 0, nullptr, ws.kv.row, n, false};
    if (n_comp) {
      tasks[k++] = {w.comp.kv, &ws.comp_x, 0, nullptr, ws.k.row, n_comp, false};
      tasks[k++] = {w.comp.gate, &ws.comp_x, 0, nullptr, ws.z.row, n_comp, false};
    }
    if (n_comp && c.ratio == 4) {
      tasks[k++] = {w.idx_comp.kv, &ws.comp_x, 0, nullptr, ws.index_k.row, n_comp, false};
      tasks[k++] = {w.idx_comp.gate, &ws.comp_x, 0, nullptr, ws.index_z.row, n_comp, false};
    }
    if (m) tasks[k++] = {w.q_a, &ws.x, first, nullptr, ws.qr.row + first, m, false};
    if (m && index_needed(c, span)) tasks[k++] = {w.idx_proj, &ws.x, first, nullptr, ws.iw.row + first, m, false};
    matmul(tasks, k);
    for_each(n, [&](size_t t, int) {
      float* kv = ws.kv.row[t];
      kernels.rms_norm(kv, w.kv_norm.data(), shape.rms_eps, kv, shape.head_dim);
      kernels.rope(kv + shape.head_dim - shape.n_rot, rope_row(c.ratio, t), 1.0f, shape.n_rot);
      kernels.store_kv_row(kv, shape.head_dim, shape.n_rot, options.plain_kv, cache.window_row(c, uint32_t(span.pos + t)));
      if (t < first) return;
      kernels.rms_norm(ws.qr.row[t], w.q_a_norm.data(), shape.rms_eps, ws.qr.row[t], shape.q_rank);
      quantize(ws.qr, t);
    });
  }
  if (taps) tap_window(il, span);
  if (n_comp) {
    ProfileTimer timer(profile, kPartCompress);
    compress_blocks(il, span.pos + n - n_comp, n_comp);
  }
  if (m == 0) return;
  {
    ProfileTimer timer(profile, kPartAttnIn);
    const MatmulTask tasks[2] = {{w.q_b, &ws.qr, first, nullptr, ws.q.row + first, m, false}, {w.idx_q, &ws.qr, first, nullptr, ws.iq.row + first, m, false}};
    matmul(tasks, index_needed(c, span) ? 2 : 1);
  }
  if (index_needed(c, span)) {
    ProfileTimer timer(profile, kPartIndex);
    select_rows(il, span);
  }
  if (taps && c.ratio == 4) tap_selected(il, span);
  {
    ProfileTimer timer(profile, kPartAttend);
    for_each(size_t(m) * shape.n_group, [&](size_t i, int thread) { attend(il, span, first + i / shape.n_group, uint32_t(i % shape.n_group), thread); });
  }
  ProfileTimer timer(profile, kPartAttnOut);
  MatmulTask tasks[kMaxGroups];
  for (uint32_t g = 0; g < shape.n_group; g++) {
    Matrix rows = w.out_a;
    rows.data += size_t(g) * shape.o_rank * rows.stride;
    rows.rows = shape.o_rank;
    tasks[g] = {rows, &ws.o, size_t(g) * options.prefill_chunk + first, nullptr, ws.low_group + size_t(g) * options.prefill_chunk + first, m, false};
  }
  matmul(tasks, shape.n_group);
  for_each(m, [&](size_t i, int) { quantize(ws.low, first + i); });
  const MatmulTask out{w.out_b, &ws.low, first, nullptr, ws.attn.row + first, m, false};
  matmul(&out, 1);
}

// If a token of the span ends a block, or kMaxWaiting tokens or more wait with it: points ws.comp_x at the rows x of all
// waiting tokens, those of the span last, and returns their number. Else keeps the span's rows in the cache and returns 0.
uint32_t LayerRunner::take_waiting(LayerCache& c, const Span& span) {
  c.waiting = std::min(c.waiting, span.pos);     // the cache may have been rewound
  const uint32_t end = span.pos + span.n, n = end - c.waiting;
  const size_t stride = act_bytes(shape.n_embd);
  if (end / c.ratio == c.waiting / c.ratio && n < kMaxWaiting) {
    for (uint32_t t = 0; t < span.n; t++) {
      const size_t slot = (span.pos + t) % kMaxWaiting;
      std::memcpy(c.x + slot * shape.n_embd, ws.x.row[t], shape.n_embd * sizeof(float));
      std::memcpy(c.x_int8 + slot * stride, ws.x.q[t], stride);
    }
    return 0;
  }
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t p = c.waiting + i, slot = p % kMaxWaiting;
    ws.comp_x.row[i] = p < span.pos ? c.x + size_t(slot) * shape.n_embd : ws.x.row[p - span.pos];
    ws.comp_x.q[i] = p < span.pos ? c.x_int8 + slot * stride : ws.x.q[p - span.pos];
  }
  return n;
}

// ws.k, ws.z, ws.index_k, ws.index_z hold the compressor inputs of n tokens from position pos on. Makes the compressed rows
// whose last token is one of them, then keeps the newest inputs in the rings.
// Ratio 4 pools eight slots: the first half of the outputs of the four tokens before the block and the second half of
// those of its own four (block 0 has only its own); any other ratio pools the tokens of the block.
void LayerRunner::compress_blocks(uint32_t il, uint32_t pos, uint32_t n) {
  const LayerWeights& w = model.layers[il];
  LayerCache& c = cache.layer(il);
  const uint32_t r = c.ratio, D = shape.head_dim, ID = shape.idx_dim;
  struct Part { const Compressor& w; const Rows &k, &z; float *ring_k, *ring_z; uint32_t width, dim; };
  const Part parts[] = {{w.comp, ws.k, ws.z, c.k, c.z, c.width, D}, {w.idx_comp, ws.index_k, ws.index_z, c.index_k, c.index_z, 2 * ID, ID}};
  const size_t n_parts = r == 4 ? 2 : 1;         // the second is the indexer's
  for_each(n, [&](size_t t, int) {               // scores get their position bias before they are kept
    for (size_t i = 0; i < n_parts; i++) kernels.add_to(parts[i].z.row[t], parts[i].w.ape.data() + (pos + t) % r * parts[i].width, parts[i].width);
  });
  const uint64_t block0 = pos / r, block1 = (uint64_t(pos) + n) / r;
  for_each(size_t(block1 - block0) * n_parts, [&](size_t i, int thread) {
    const Part& part = parts[i % n_parts];
    const uint64_t block = block0 + i / n_parts;
    const float *ks[kMaxRatio], *zs[kMaxRatio];
    size_t slots = 0;
    for (uint64_t p = block * r - (r == 4 && block ? 4 : 0); p < (block + 1) * r; p++, slots++) {
      const size_t half = r == 4 && p >= block * r ? part.dim : 0, kept = size_t(p % c.state_rows) * part.width;
      ks[slots] = (p >= pos ? part.k.row[p - pos] : part.ring_k + kept) + half;
      zs[slots] = (p >= pos ? part.z.row[p - pos] : part.ring_z + kept) + half;
    }
    float* row = ws.thread_row + size_t(thread) * std::max(D, ID);
    kernels.compress(ks, zs, slots, row, part.dim);
    kernels.rms_norm(row, part.w.norm.data(), shape.rms_eps, row, part.dim);
    float cs[kMaxRot];
    angles(r, block * r, cs);
    kernels.rope(row + part.dim - shape.n_rot, cs, 1.0f, shape.n_rot);
    if (&part == parts) kernels.store_kv_row(row, D, shape.n_rot, options.plain_kv, c.rows + block * cache.kv_stride());
    else kernels.store_index_row(row, ID, options.plain_kv, c.index_rows + block * cache.index_stride());
  });
  for (size_t i = 0; i < n_parts; i++) {
    for (uint32_t t = n - std::min(n, c.state_rows); t < n; t++) {
      const size_t kept = size_t((pos + t) % c.state_rows) * parts[i].width, nbytes = parts[i].width * sizeof(float);
      std::memcpy(parts[i].ring_k + kept, parts[i].k.row[t], nbytes);
      std::memcpy(parts[i].ring_z + kept, parts[i].z.row[t], nbytes);
    }
  }
  c.waiting = pos + n;
  if (taps) tap_compressed(il, block0, block1);
}

// True when a token of the span sees more compressed rows than the indexer lets through.
bool LayerRunner::index_needed(const LayerCache& c, const Span& span) const { return c.ratio == 4 && (uint64_t(span.pos) + span.n) / 4 > shape.idx_top_k; }

// The k highest of n scores, equal scores: the smaller index; writes their indices ascending to rank[0..k), rank holds n.
static void top_k(const float* score, uint32_t n, uint32_t k, uint32_t* rank) {
  auto key = [&](uint32_t i) {                   // order-preserving integer, so that a NaN is only some number
    const uint32_t u = bit_cast<uint32_t>(score[i] == 0.0f ? 0.0f : score[i]);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
  };
  for (uint32_t i = 0; i < n; i++) rank[i] = key(i);
  std::nth_element(rank, rank + k - 1, rank + n, std::greater<uint32_t>());
  const uint32_t least = rank[k - 1];
  auto n_least = k - std::count_if(rank, rank + k, [&](uint32_t x) { return x > least; });
  for (uint32_t i = 0, m = 0; m < k; i++) {
    const uint32_t x = key(i);
    if (x > least || (x == least && n_least-- > 0)) rank[m++] = i;
  }
}

// The idx_top_k visible compressed rows with the highest scores sum_h w_h max(0, iq_h . row), equal scores: the smaller
// row number; ascending row numbers in ws.selected.
void LayerRunner::select_rows(uint32_t il, const Span& span) {
  LayerCache& c = cache.layer(il);
  const uint32_t K = shape.idx_top_k, width = uint32_t(align_up(shape.idx_heads, 16));
  const size_t index_max = options.ctx / 4 + 1, qt_size = size_t(shape.idx_dim) * width;
  constexpr uint32_t kBlock = 384;               // rows per chunk
  const float weight = 1.0f / std::sqrt(float(shape.idx_heads) * float(shape.idx_dim));
  auto visible = [&](size_t t) { return uint32_t((span.pos + t + 1) / 4); };
  for (uint32_t t0 = span.first; t0 < span.n; t0 += ws.index_batch) {
    const uint32_t m = std::min(ws.index_batch, span.n - t0);
    for_each(m, [&](size_t i, int) {
      const size_t t = t0 + i;
      if (visible(t) <= K) return;
      for (uint32_t h = 0; h < shape.idx_heads; h++)
        kernels.rope(ws.iq.row[t] + (h + 1) * shape.idx_dim - shape.n_rot, rope_row(4, t), 1.0f, shape.n_rot);
      kernels.index_query(ws.iq.row[t], shape.idx_heads, shape.idx_dim, options.plain_kv, ws.qt + i * qt_size);
      for (uint32_t h = 0; h < width; h++) ws.iw.row[t][h] = h < shape.idx_heads ? ws.iw.row[t][h] * weight : 0.0f;
    });
    const size_t blocks = ceil_div(visible(t0 + m - 1), kBlock);
    for_each(size_t(m) * blocks, [&](size_t chunk, int) {
      const size_t i = chunk / blocks, t = t0 + i, b = chunk % blocks * kBlock, n = visible(t);
      if (n <= K || b >= n) return;
      kernels.index_scores(ws.qt + i * qt_size, ws.iw.row[t], shape.idx_heads, c.index_rows + b * cache.index_stride(), cache.index_stride(),
                           std::min<size_t>(kBlock, n - b), shape.idx_dim, options.plain_kv, ws.index_scores + i * index_max + b);
    });
    for_each(m, [&](size_t i, int thread) {
      const size_t t = t0 + i;
      const uint32_t n = visible(t);
      if (n <= K) return;
      uint32_t* rank = ws.rank + size_t(thread) * index_max;
      top_k(ws.index_scores + i * index_max, n, K, rank);
      std::copy(rank, rank + K, ws.selected + t * K);
    });
  }
}

// One output group of heads of one token: queries normed and rotated, attention over the visible rows, rotated back.
void LayerRunner::attend(uint32_t il, const Span& span, size_t t, uint32_t group, int thread) {
  const LayerWeights& w = model.layers[il];
  const LayerCache& c = cache.layer(il);
  const uint32_t D = shape.head_dim, heads = shape.n_head / shape.n_group, pos = uint32_t(span.pos + t);
  const void** rows = ws.thread_rows + size_t(thread) * ws.max_rows;
  size_t n = 0;
  for (uint32_t p = pos + 1 > shape.window ? pos + 1 - shape.window : 0; p <= pos; p++) rows[n++] = cache.window_row(c, p);
  const uint32_t compressed = c.ratio ? (pos + 1) / c.ratio : 0;
  if (c.ratio == 4 && compressed > shape.idx_top_k) {
    const uint32_t* selected = ws.selected + t * shape.idx_top_k;
    for (uint32_t i = 0; i < shape.idx_top_k; i++) rows[n++] = c.rows + size_t(selected[i]) * cache.kv_stride();
  } else {
    for (uint32_t i = 0; i < compressed; i++) rows[n++] = c.rows + size_t(i) * cache.kv_stride();
  }
  float* q = ws.q.row[t] + size_t(group) * heads * D;
  const size_t o_row = size_t(group) * options.prefill_chunk + t;
  float* o = ws.o.row[o_row];
  const float* cs = rope_row(c.ratio, t);
  for (uint32_t h = 0; h < heads; h++) {
    kernels.rms_norm(q + size_t(h) * D, nullptr, shape.rms_eps, q + size_t(h) * D, D);
    kernels.rope(q + size_t(h + 1) * D - shape.n_rot, cs, 1.0f, shape.n_rot);
  }
  kernels.attend({q, heads, D, rows, n, options.plain_kv, w.sinks.data() + group * heads, 1.0f / std::sqrt(float(D)),
                  ws.thread_scores + size_t(thread) * kAttendHeads * align_up(ws.max_rows, 16), o});
  for (uint32_t h = 0; h < heads; h++) kernels.rope(o + size_t(h + 1) * D - shape.n_rot, cs, -1.0f, shape.n_rot);
  quantize(ws.o, o_row);
}

// -- 14c router and experts -------------------------------------------------------

// Chooses n_used experts of token t: the hash table's in the first layers, else the highest g + bias (equal ones: the
// smaller number), with g = sqrt(softplus(logit)); weights g / max(sum g, 6.1e-5) * scale. One g that is not a number makes all
// weights so: sampling reports it.
void LayerRunner::route(uint32_t il, const Span& span, size_t t) {
  const LayerWeights& w = model.layers[il];
  const uint32_t K = shape.n_used;
  float *g = ws.logits_router.row[t], *weight = ws.expert_weight + t * K;
  int32_t* chosen = ws.experts + t * K;
  kernels.router_scores(g, shape.n_expert);
  if (w.tid2eid) {                               // checked when loaded, but the file may have been written to since
    for (uint32_t k = 0; k < K; k++) chosen[k] = int32_t(std::min(uint32_t(w.tid2eid[size_t(span.tokens[t]) * K + k]), shape.n_expert - 1));
  } else {
    uint32_t n = 0;
    for (uint32_t e = 0; e < shape.n_expert; e++) {          // weight[0 .. n): the highest so far, descending
      const float score = g[e] + w.probs_bias[e];
      if (n == K && !(score > weight[K - 1])) continue;
      uint32_t k = n < K ? n++ : K - 1;
      for (; k > 0 && score > weight[k - 1]; k--) weight[k] = weight[k - 1], chosen[k] = chosen[k - 1];
      weight[k] = score;
      chosen[k] = int32_t(e);
    }
  }
  float sum = 0, zero = 0;
  for (uint32_t e = 0; e < shape.n_expert; e++) zero += g[e] * 0.0f;
  for (uint32_t k = 0; k < K; k++) sum += g[chosen[k]];
  for (uint32_t k = 0; k < K; k++) weight[k] = (shape.expert_norm ? g[chosen[k]] / std::max(sum, 6.1e-5f) : g[chosen[k]]) * shape.expert_scale + zero;
}

// x -> attn (reused for the output): the chosen experts in slot order plus the shared expert.
void LayerRunner::feed_forward(uint32_t il, const Span& span) {
  const LayerWeights& w = model.layers[il];
  const uint32_t first = span.first, m = span.n - first, K = shape.n_used;
  {
    ProfileTimer timer(profile, kPartRouter);
    // The router's matrix is too small for a job of its own.
    const MatmulTask tasks[] = {{w.router, &ws.x, first, nullptr, ws.logits_router.row + first, m, true},
                                {w.sh_gate, &ws.x, first, nullptr, ws.hidden_shared.row + first, m, false},
                                {w.sh_up, &ws.x, first, nullptr, ws.up_shared.row + first, m, false}};
    matmul(tasks, 3);
    for_each(m, [&](size_t i, int) { route(il, span, first + i); });
  }
  ProfileTimer timer(profile, kPartExperts);
  // (token, slot) pairs by expert, tokens ascending: a counting sort
  std::vector<uint32_t>& end = expert_end_;
  std::fill(end.begin(), end.end(), 0);
  for (size_t i = size_t(first) * K; i < size_t(span.n) * K; i++) end[size_t(ws.experts[i]) + 1]++;
  for (size_t e = 0; e < shape.n_expert; e++) end[e + 1] += end[e];
  for (size_t i = size_t(first) * K; i < size_t(span.n) * K; i++) {
    const uint32_t at = end[size_t(ws.experts[i])]++;      // afterwards end[e] is the end of expert e
    ws.pair_token[at] = uint32_t(i / K);
    ws.pair_row[at] = uint32_t(i);
    ws.pair_gate[at] = ws.hidden.row[i];
    ws.pair_up[at] = ws.up.row[i];
    ws.pair_down[at] = ws.down.row[i];
  }
  auto expert = [](const Matrix& all, size_t e, uint32_t rows) {
    Matrix one = all;
    one.data += e * rows * all.stride;
    one.rows = rows;
    return one;
  };
  size_t n = 0;
  for (size_t e = 0; e < shape.n_expert; e++) {
    const uint32_t a = e ? end[e - 1] : 0, count = end[e] - a;
    if (!count) continue;
    tasks_[n++] = {expert(w.experts.gate, e, shape.ff), &ws.x, 0, ws.pair_token + a, ws.pair_gate + a, count, false};
    tasks_[n++] = {expert(w.experts.up, e, shape.ff), &ws.x, 0, ws.pair_token + a, ws.pair_up + a, count, false};
  }
  matmul(tasks_.data(), n);
  for_each(size_t(m) * (K + 1), [&](size_t i, int) {
    const size_t t = first + i / (K + 1), k = i % (K + 1), p = t * K + k;
    if (k < K) {
      kernels.swiglu(ws.hidden.row[p], ws.up.row[p], shape.clamp[il], ws.expert_weight[p], shape.ff);
      quantize(ws.hidden, p);
    } else {
      kernels.swiglu(ws.hidden_shared.row[t], ws.up_shared.row[t], shape.clamp_shared[il], 1.0f, shape.ff_shared);
      quantize(ws.hidden_shared, t);
    }
  });
  n = 0;
  tasks_[n++] = {w.sh_down, &ws.hidden_shared, first, nullptr, ws.down_shared.row + first, m, false};
  for (size_t e = 0; e < shape.n_expert; e++) {
    const uint32_t a = e ? end[e - 1] : 0, count = end[e] - a;
    if (count) tasks_[n++] = {expert(w.experts.down, e, shape.n_embd), &ws.hidden, 0, ws.pair_row + a, ws.pair_down + a, count, false};
  }
  matmul(tasks_.data(), n);
  for_each(m, [&](size_t i, int) {
    const size_t t = first + i;
    float* out = ws.attn.row[t];
    std::memcpy(out, ws.down.row[t * K], shape.n_embd * sizeof(float));
    for (uint32_t k = 1; k < K; k++) kernels.add_to(out, ws.down.row[t * K + k], shape.n_embd);
    if (taps) std::memcpy(ws.down.row[t * K], out, shape.n_embd * sizeof(float));   // kept for the moe_out tap
    kernels.add_to(out, ws.down_shared.row[t], shape.n_embd);
  });
}

// Cached rows as floats, for the taps.
static void row_floats(const uint8_t* row, size_t dim, bool plain, float* out) {
  for (size_t i = 0; i < dim; i++) out[i] = plain ? load_le<float>(row + 4 * i) : f16_to_f32(load_le<uint16_t>(row + 2 * i));
}

void LayerRunner::tap_window(uint32_t il, const Span& span) {
  for (uint32_t t = 0; t < span.n; t++) {
    row_floats(cache.window_row(cache.layer(il), span.pos + t), shape.head_dim, options.plain_kv, ws.thread_row);
    tap(il, "kv_rows", ws.thread_row, 1, shape.head_dim);
  }
}

void LayerRunner::tap_compressed(uint32_t il, uint64_t block0, uint64_t block1) {
  const LayerCache& c = cache.layer(il);
  for (uint64_t b = block0; b < block1; b++) {
    row_floats(c.rows + b * cache.kv_stride(), shape.head_dim, options.plain_kv, ws.thread_row);
    tap(il, "comp_rows", ws.thread_row, 1, shape.head_dim);
    if (c.ratio != 4) continue;
    row_floats(c.index_rows + b * cache.index_stride(), shape.idx_dim, options.plain_kv, ws.thread_row);
    tap(il, "idx_rows", ws.thread_row, 1, shape.idx_dim);
  }
}

// The rows each wanted token looks at, padded with -1 to idx_top_k.
void LayerRunner::tap_selected(uint32_t il, const Span& span) {
  const uint32_t K = shape.idx_top_k;
  std::vector<int32_t> row(K);
  for (uint32_t t = span.first; t < span.n; t++) {
    const uint32_t visible = (span.pos + t + 1) / 4;
    for (uint32_t i = 0; i < K; i++) row[i] = visible > K ? int32_t(ws.selected[size_t(t) * K + i]) : i < visible ? int32_t(i) : -1;
    tap(il, "idx_selected", row.data(), 1, K, true);
  }
}

// -- 14d the whole block -----------------------------------------------------------

void LayerRunner::run(uint32_t il, const Span& span) {
  const LayerWeights& w = model.layers[il];
  const Shape& s = shape;
  const uint32_t first = span.first, m = span.n - first;
  hc_pre(w.hc_attn, w.attn_norm, 0, span);
  tap(il, "attn_in", ws.x.row[0], span.n, s.n_embd);
  attention(il, span);
  if (m == 0) return;
  tap(il, "attn_out", ws.attn.row[first], m, s.n_embd);
  hc_post(span);
  tap(il, "hc_after_attn", ws.streams.row[first], m, s.n_hc * s.n_embd);
  hc_pre(w.hc_ffn, w.ffn_norm, first, span);
  tap(il, "ffn_in", ws.x.row[first], m, s.n_embd);
  feed_forward(il, span);
  tap(il, "experts", ws.experts + size_t(first) * s.n_used, m, s.n_used, true);
  tap(il, "expert_weights", ws.expert_weight + size_t(first) * s.n_used, m, s.n_used);
  if (taps)
    for (uint32_t t = first; t < span.n; t++) tap(il, "moe_out", ws.down.row[size_t(t) * s.n_used], 1, s.n_embd);
  tap(il, "ffn_out", ws.attn.row[first], m, s.n_embd);
  hc_post(span);
  tap(il, "hc_out", ws.streams.row[first], m, s.n_hc * s.n_embd);
}

}  // namespace ds4

// =============================================================================
// 15. FORWARD — tokens in, logits out: embed, layers, head.   uses: 14
// =============================================================================
// One conversation: the model, its cache and its scratch memory. eval() is the only way forward; how the tokens are cut into
// calls and chunks never changes a bit of what comes out.

namespace ds4 {

// Bytes a run needs besides the operating system's and the vocabulary.
struct MemoryPlan {
  uint64_t weights, cache, scratch;
};

// Fills what the user left open: kernels, threads, and no more context or chunk than makes sense.
static RunOptions resolve(RunOptions o, const Shape& s) {
  if (!o.kernels) o.kernels = best_kernels();
  if (o.threads <= 0) o.threads = physical_cores();
  o.ctx = uint32_t(std::min<uint64_t>(o.ctx, s.n_ctx_train));
  o.prefill_chunk = std::max(1u, std::min(o.prefill_chunk, o.ctx));
  return o;
}

class Engine {
 public:
  // Throws Error when the memory is not there.
  Engine(const Model& m, const RunOptions& o) : runner_(m, resolve(o, m.shape)), logits_(m.shape.n_vocab), logit_rows_(runner_.options.prefill_chunk) {}

  uint32_t position() const { return runner_.cache.position(); }       // tokens in the cache
  uint32_t ctx() const { return runner_.options.ctx; }
  const RunOptions& options() const { return runner_.options; }
  const Model& model() const { return runner_.model; }
  const float* logits() const { return logits_.data(); }               // [n_vocab] of the newest position
  void reset() { runner_.cache.rewind(0); }
  // Forgets the tokens from `position` on; false when that state is gone (then reset and eval again).
  bool rewind(uint32_t position) { return runner_.cache.rewind(position); }
  void set_taps(TapSink sink) { runner_.taps = std::move(sink); }
  void set_profile(Profile* profile) { runner_.profile = profile; }    // null: not measured

  // Appends n tokens; afterwards logits() belongs to the last one. all_logits: receives n rows of n_vocab.
  // *stop, looked at between chunks, ends early: logits() are not valid then. progress(tokens so far) is called after each chunk.
  // Returns the number of tokens appended. Throws Error for an id outside the vocabulary or a full context.
  size_t eval(const int32_t* tokens, size_t n, float* all_logits = nullptr, const std::atomic<bool>* stop = nullptr,
              const std::function<void(size_t)>& progress = {});

 private:
  void eval_chunk(const Span& span, float* all_logits);

  LayerRunner runner_;
  AlignedBuffer<float> logits_;
  std::vector<float*> logit_rows_;             // where the output matrix writes
};

static MemoryPlan memory_plan(const Model& m, const RunOptions& o) {
  const LayerRunner sizes(m, resolve(o, m.shape), true);
  return {m.file->file_bytes(), sizes.cache.bytes(), sizes.bytes()};
}

size_t Engine::eval(const int32_t* tokens, size_t n, float* all_logits, const std::atomic<bool>* stop, const std::function<void(size_t)>& progress) {
  const Shape& s = runner_.shape;
  if (n > ctx() - position()) fail("%zu tokens do not fit: %u of %u are in the context", n, position(), ctx());
  for (size_t i = 0; i < n; i++)
    if (tokens[i] < 0 || uint32_t(tokens[i]) >= s.n_vocab) fail("token %zu is %d, expected an id below %u", i, tokens[i], s.n_vocab);
  size_t done = 0;
  while (done < n && !(stop && stop->load(std::memory_order_relaxed))) {
    const uint32_t m = uint32_t(std::min<size_t>(runner_.options.prefill_chunk, n - done));
    const bool last = done + m == n;
    const Span span{tokens + done, m, position(), all_logits ? 0 : last ? m - 1 : m};
    eval_chunk(span, all_logits ? all_logits + done * s.n_vocab : nullptr);
    runner_.cache.advance(m);
    done += m;
    if (progress) progress(done);
  }
  return done;
}

// One chunk through the network. span.first: the first token whose logits are wanted (n: none, only the cache grows);
// the layers before the last need every token, the last one only those.
void Engine::eval_chunk(const Span& span, float* all_logits) {
  LayerRunner& r = runner_;
  const Shape& s = r.shape;
  {
    ProfileTimer timer(r.profile, kPartEmbed);
    r.prepare(span);
    r.for_each(span.n, [&](size_t t, int) {
      float* streams = r.ws.streams.row[t];
      r.kernels.dequantize(r.model.token_embd.type, r.model.token_embd.data + size_t(span.tokens[t]) * r.model.token_embd.stride, streams, s.n_embd);
      for (uint32_t k = 1; k < s.n_hc; k++) std::memcpy(streams + size_t(k) * s.n_embd, streams, s.n_embd * sizeof(float));
    });
  }
  if (r.taps) r.taps("hc_embed", r.ws.streams.row[0], span.n, size_t(s.n_hc) * s.n_embd, false);
  Span every = span;
  every.first = 0;
  for (uint32_t il = 0; il < s.n_layer; il++) r.run(il, il + 1 < s.n_layer ? every : span);
  if (span.first == span.n) return;
  r.hc_pre(r.model.hc_head, r.model.output_norm, span.first, span);
  ProfileTimer timer(r.profile, kPartHead);
  if (r.taps) r.taps("result_norm", r.ws.x.row[span.first], span.n - span.first, s.n_embd, false);
  const uint32_t n = span.n - span.first;
  for (uint32_t t = 0; t < n; t++) logit_rows_[t] = all_logits ? all_logits + size_t(t) * s.n_vocab : logits_.data();
  const MatmulTask task{r.model.output, &r.ws.x, span.first, nullptr, logit_rows_.data(), n, false};
  r.matmul(&task, 1);
  if (all_logits) std::memcpy(logits_.data(), logit_rows_[n - 1], s.n_vocab * sizeof(float));
}

}  // namespace ds4

// =============================================================================
// 16. SAMPLER — penalties, temperature, top-k, top-p, min-p, draw.   uses: 2 5 6
// =============================================================================
// Enters: one vector of logits, parameters, a generator, the tokens so far. Leaves: a token id, or -1 when no
// logit is finite. The logits are only read. Guaranteed: the same id on every ISA; the generator advances by
// exactly one number, or by none where there is nothing to choose; no allocation after construction.
//
// How it is fast: one pass finds the maximum of every block of 256 logits. Whatever survives a filter lies in
// blocks whose maximum passes it, so the rest of the vocabulary is never touched again; the survivors are a list
// (id, logit) in id order. top-k and top-p bisect that list for the logit at their edge: nothing is sorted.
// Only top-p over the whole vocabulary, and a draw without any filter, weigh every logit.

namespace ds4 {

enum class Stage : uint8_t { penalties, temp, top_k, top_p, min_p };
static const char* const kStageNames[] = {"penalties", "temp", "top-k", "top-p", "min-p"};

// The stages that run, in their order, each at most once.
struct StageList {
  uint8_t n = 5;
  std::array<Stage, 5> at = {Stage::penalties, Stage::temp, Stage::top_k, Stage::top_p, Stage::min_p};
};

// A stage that is not in `order` does nothing, except that temp 0 is greedy wherever it stands.
struct SamplerParams {
  double temp = 1;              // 0: the best token
  int32_t top_k = 0;            // 0: off
  double top_p = 1;             // 1: off
  double min_p = 0.05;          // 0: off
  float repeat_penalty = 1;     // 1: off
  float presence = 0, frequency = 0;
  int32_t repeat_last_n = 64;   // tokens that count for the penalties; 0: off, -1: all
  StageList order;
};

// "temp,top-k" -> stages. Throws a usage error naming the word that is wrong.
static StageList parse_samplers(std::string_view list) {
  StageList stages;
  stages.n = 0;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string word(list.substr(begin, end - begin));
    begin = end + 1;
    const auto* name = std::find(std::begin(kStageNames), std::end(kStageNames), word);
    if (name == std::end(kStageNames))
      fail_usage("--samplers: '%s' is not a stage; known are penalties, temp, top-k, top-p, min-p", word.c_str());
    const Stage stage = Stage(name - kStageNames);
    if (std::count(stages.at.begin(), stages.at.begin() + stages.n, stage)) fail_usage("--samplers: '%s' is there twice", word.c_str());
    stages.at[stages.n++] = stage;
  }
  return stages;
}

constexpr float kLowest = -0x1.fffffep127f;    // the lowest finite float
constexpr float kLogitFloor = -1e30f;          // no penalised logit and no log-probability is below
constexpr uint64_t kFullWeight = 1ull << 40;   // weight of the best candidate, see section 5

// Penalties on the logit l of a token that stands c times among the last tokens, in logits of temperature T:
//   l <- (l > 0 ? l / repeat : l * repeat) - (c frequency + presence) T,   kept within +-1e30.
// (T = 1 unless temperature came first: l / T - x = (l - x T) / T.)
static float penalized(float l, int32_t c, const SamplerParams& p, double temp) {
  if (!std::isfinite(l)) return l;
  l = l > 0 ? l / p.repeat_penalty : l * p.repeat_penalty;
  l -= float((double(c) * double(p.frequency) + double(p.presence)) * temp);
  return std::min(std::max(l, kLogitFloor), -kLogitFloor);
}
static bool has_penalties(const SamplerParams& p) {
  return p.repeat_last_n != 0 && (p.repeat_penalty != 1 || p.presence != 0 || p.frequency != 0);
}
// The part of the history that counts.
static size_t penalty_window(const SamplerParams& p, size_t n_history) {
  return p.repeat_last_n < 0 ? n_history : std::min(n_history, size_t(p.repeat_last_n));
}

// min-p keeps p_i >= min_p p_max, that is l_i >= l_max + T ln min_p: the smallest float not below that.
static float min_p_cut(float top, double temp, double min_p) {
  if (min_p >= 1) return top;
  const double cut = std::max(double(top) + temp * log_f64(min_p), double(kLowest));
  const float f = float(cut);
  return double(f) < cut ? std::nextafter(f, INFINITY) : f;
}
// top-p keeps the shortest prefix whose mass is at least p: in integer weights, at least this.
static uint64_t top_p_target(double p, uint64_t mass) {
  return std::clamp<uint64_t>(uint64_t(std::ceil(p * double(mass))), 1, mass);
}
// The draw takes the first candidate whose cumulated weight exceeds u mass, u in [0, 1).
static uint64_t draw_target(Rng& rng, uint64_t mass) { return uint64_t(double(rng.next_float()) * double(mass)); }
// log2(e) / T, kept where the products in section 5 stay finite.
static float weight_scale(double temp) { return float(std::clamp(1.4426950408889634 / temp, 1e-30, 1e36)); }

// A token and its log-probability.
struct LogProb {
  int32_t id;
  float value;
};

class Sampler {
 public:
  explicit Sampler(int32_t n_vocab, const Kernels* kernels = best_kernels())
      : k_(*kernels), n_(size_t(n_vocab)), n_blocks_(size_t(ceil_div(n_, kBlock))) {
    if (n_vocab <= 0 || n_vocab > kMostTokens) fail("a vocabulary of %d tokens can't be sampled, expected 1 to %d", n_vocab, kMostTokens);
    overlay_.resize(n_);
    counts_.resize(n_);
    mass_.resize(n_blocks_);
    changed_.resize(n_blocks_);
    marks_.resize(n_blocks_ * kWords);
    maxima_.resize(n_blocks_ + 16);                              // vector code writes up to sixteen elements more
    fold_.resize(n_blocks_ + 16);
    ids_.resize(n_ + 32);
    v_.resize(n_ + 32);
    edge_v_.resize(n_ + 2 * kBlock);
    edge_w_.resize(n_ + 2 * kBlock);
  }

  // The next token after `history`, from logits[n_vocab]; -1: none of them is finite.
  int32_t sample(const float* logits, const SamplerParams& p, Rng& rng, const int32_t* history, size_t n_history) {
    if (!begin(logits)) return -1;
    for (size_t i = 0; i < p.order.n; i++) {
      switch (p.order.at[i]) {
        case Stage::penalties: penalties(p, history, n_history); break;
        case Stage::temp: if (p.temp > 0) temp_ *= p.temp; else keep_best(); break;
        case Stage::top_k: if (p.top_k > 0) top_k(size_t(p.top_k)); break;
        case Stage::top_p: if (p.top_p < 1) top_p(p.top_p); break;
        case Stage::min_p: if (p.min_p > 0) min_p(p.min_p); break;
      }
    }
    if (!(p.temp > 0)) keep_best();
    return draw(rng);
  }

  // Log-probability of `chosen` (any id, or -1) in the distribution that the logits are as they came:
  //   l_i - top - ln sum_j exp(l_j - top);  -1e30 for a token that can't be.
  // `best` gets the n_best most probable tokens, best first, ties by id.
  float log_probs(const float* logits, int32_t chosen, size_t n_best, std::vector<LogProb>& best) {
    best.clear();
    if (!begin(logits)) return kLogitFloor;
    const float top = top_;
    const double log_sum = log_f64(double(mass_all()) / double(kFullWeight));
    const auto log_prob = [&](float l) { return std::max(float(double(l) - double(top) - log_sum), kLogitFloor); };
    if (n_best > 0) {
      top_k(n_best);
      if (!listed_) collect(kLowest);
      for (size_t i = 0; i < count_; i++) best.push_back({ids_[i], v_[i]});
      std::sort(best.begin(), best.end(), [](const LogProb& a, const LogProb& b) { return a.value != b.value ? a.value > b.value : a.id < b.id; });
      for (LogProb& b : best) b.value = log_prob(b.value);
    }
    const float l = chosen >= 0 && size_t(chosen) < n_ ? logits[chosen] : -INFINITY;
    return std::isfinite(l) ? log_prob(l) : kLogitFloor;
  }

  // Largest minus second largest finite logit; 1e30 where there is no second.
  float margin(const float* logits) {
    if (!begin(logits)) return -kLogitFloor;
    float second = -INFINITY;
    bool seen = false;                                           // the first of equal best ones is the best
    for (size_t b = 0; b < n_blocks_; b++) {
      if (maxima_[b] != top_ || seen) { second = std::max(second, maxima_[b]); continue; }
      const float* x = view(b);
      for (size_t i = 0; i < length(b); i++)
        if (x[i] == top_ && !seen) seen = true; else if (x[i] > second) second = x[i];
    }
    return std::min(top_ - second, -kLogitFloor);
  }

 private:
  static constexpr int32_t kMostTokens = 1 << 23;               // their weights together fit into 64 bits
  static constexpr size_t kBlock = 256, kWords = kBlock / 64;

  size_t length(size_t b) const { return std::min(kBlock, n_ - b * kBlock); }

  // -- logits seen through changes ----
  // A changed logit is a bit in marks_ and a value in overlay_; everything reads blocks through view().

  float logit(size_t id) const { return marks_[id / 64] >> (id % 64) & 1 ? overlay_[id] : logits_[id]; }
  void change(size_t id, float value) {
    marks_[id / 64] |= uint64_t(1) << (id % 64);
    changed_[id / kBlock] = 1;
    overlay_[id] = value;
  }
  // Block b with its changes; valid until the next call.
  const float* view(size_t b) {
    const float* x = logits_ + b * kBlock;
    if (!changed_[b]) return x;
    std::memcpy(block_, x, length(b) * sizeof(float));
    for (size_t w = 0; w < kWords; w++)
      for (uint64_t m = marks_[b * kWords + w]; m; m &= m - 1) {
        const size_t i = 64 * w + size_t(__builtin_ctzll(m));
        block_[i] = overlay_[b * kBlock + i];
      }
    return block_;
  }

  // Starts on new logits: all of them are candidates. False when none is finite.
  bool begin(const float* logits) {
    logits_ = logits;
    for (size_t b = 0; b < n_blocks_; b++)
      if (changed_[b]) { changed_[b] = 0; std::fill_n(&marks_[b * kWords], kWords, 0); }
    temp_ = 1;
    listed_ = false;
    k_.block_max(logits, n_, maxima_.data());
    top_ = largest(maxima_.data(), n_blocks_);
    if (top_ == INFINITY) {                                      // NaN and -inf never pass a comparison; +inf would
      for (size_t i = 0; i < n_; i++)
        if (logits[i] == INFINITY) change(i, -INFINITY);
      refresh_maxima();
    }
    return top_ > -INFINITY;
  }
  void refresh_maxima() {
    for (size_t b = 0; b < n_blocks_; b++)
      if (changed_[b]) k_.block_max(view(b), length(b), &maxima_[b]);
    top_ = largest(maxima_.data(), n_blocks_);
  }
  float largest(const float* v, size_t n) {
    for (; n > 1; v = fold_.data(), n = size_t(ceil_div(n, kBlock))) k_.block_max(v, n, fold_.data());
    return v[0];
  }
  // Sum of all weights; those of each block are left in mass_.
  uint64_t mass_all() {
    const float scale = weight_scale(temp_);
    for (size_t b = 0, end; b < n_blocks_; b = end) {
      end = b + 1;
      if (!changed_[b]) while (end < n_blocks_ && !changed_[end]) end++;
      k_.block_mass(view(b), std::min(end * kBlock, n_) - b * kBlock, &maxima_[b], top_, scale, &mass_[b]);
    }
    uint64_t mass = 0;
    for (size_t b = 0; b < n_blocks_; b++) mass += mass_[b];
    return mass;
  }

  // -- the list of survivors ----

  // Candidates become the list of all logits >= cut.
  void collect(float cut) {
    count_ = 0;
    for (size_t b = 0; b < n_blocks_; b++)
      if (maxima_[b] >= cut) count_ += k_.collect(view(b), length(b), int32_t(b * kBlock), cut, &ids_[count_], &v_[count_]);
    listed_ = true;
    low_ = cut;
  }
  // A cut that at least `rank` logits pass, not many more while rank is small: the rank-th largest block maximum.
  float rank_cut(size_t rank) {
    if (rank > n_blocks_) return kLowest;
    std::copy_n(maxima_.data(), n_blocks_, edge_v_.data());
    std::fill_n(edge_w_.data(), n_blocks_, 1);
    const uint64_t finite = k_.keep_weights(edge_v_.data(), edge_w_.data(), n_blocks_, kLowest, -kLowest);
    return rank > finite ? kLowest : find_edge(finite, kLowest, rank, top_).value;
  }

  // In descending order of edge_v_[0..n), the value at which the cumulated edge_w_ reaches target, how many elements
  // have this value, and what of target is left to them. All values lie in [low, top_], all weights together reach
  // target, target > 0. Bisection on the value: every step keeps only the side that holds the edge, so n falls fast.
  struct Edge { float value; size_t count; uint64_t left; };
  // A good guess of the value makes it fall faster.
  Edge find_edge(size_t n, float low, uint64_t target, float guess) {
    float high = top_;
    for (float middle = guess, above, below; low < high; middle = 0.5f * low + 0.5f * high) {
      if (!(middle > low && middle <= high)) middle = high;
      const uint64_t mass = k_.split(edge_v_.data(), edge_w_.data(), n, middle, &above, &below);
      if (mass >= target) {
        low = above;
      } else {
        target -= mass;
        high = below;
      }
      n = k_.keep_weights(edge_v_.data(), edge_w_.data(), n, low, high);
    }
    return {high, n, target};
  }
  // Cuts the list at the value where the cumulated edge_w_ (one per list element) reaches target; of the elements
  // on the edge the first ones in id order stay.
  void cut_list(uint64_t target, float guess) {
    std::copy_n(v_.data(), count_, edge_v_.data());
    const Edge edge = find_edge(count_, low_, target, guess);
    uint64_t ties = ceil_div(edge.left, edge_w_[0]);             // elements of one value have one weight
    keep_from(low_ = edge.value);
    if (ties >= edge.count) return;
    size_t kept = 0;
    for (size_t i = 0; i < count_; i++) {
      const bool tied = v_[i] == edge.value;
      if (tied && ties == 0) continue;
      ties -= tied;
      ids_[kept] = ids_[i];
      v_[kept++] = v_[i];
    }
    count_ = kept;
  }
  void keep_from(float cut) { count_ = k_.keep_ids(v_.data(), ids_.data(), count_, cut, -kLowest); }

  // Candidates become the best one, the lowest id of equal ones.
  void keep_best() {
    int32_t best = 0;
    if (listed_) {
      best = ids_[size_t(std::find(v_.data(), v_.data() + count_, top_) - v_.data())];
    } else {
      const size_t b = size_t(std::find(maxima_.data(), maxima_.data() + n_blocks_, top_) - maxima_.data());
      const float* x = view(b);
      best = int32_t(b * kBlock + size_t(std::find(x, x + length(b), top_) - x));
    }
    listed_ = true;
    count_ = 1;
    ids_[0] = best;
    v_[0] = low_ = top_;
  }

  // -- stages ----

  // Penalties, see penalized(). Tokens of the history that are no candidates any more stay out.
  void penalties(const SamplerParams& p, const int32_t* history, size_t n_history) {
    if (!has_penalties(p)) return;
    const size_t window = penalty_window(p, n_history);
    const auto for_history = [&](const auto& f) {
      for (const int32_t* t = history + (n_history - window); t != history + n_history; t++)
        if (*t >= 0 && size_t(*t) < n_) f(size_t(*t));
    };
    for_history([&](size_t id) { counts_[id]++; });
    if (listed_) {
      for (size_t i = 0; i < count_; i++)
        if (counts_[size_t(ids_[i])]) v_[i] = penalized(v_[i], counts_[size_t(ids_[i])], p, temp_);
      for_history([&](size_t id) { counts_[id] = 0; });
      low_ = kLowest;
      top_ = largest(v_.data(), count_);
    } else {
      for_history([&](size_t id) {
        if (counts_[id]) change(id, penalized(logit(id), counts_[id], p, temp_));
        counts_[id] = 0;
      });
      refresh_maxima();
    }
  }

  // top-k: the k highest logits, ties at the edge by lowest id.
  void top_k(size_t k) {
    if (k == 1) return keep_best();
    if (!listed_) {
      if (k >= n_) return;
      collect(rank_cut(k));
      if (count_ < k && low_ > kLowest) collect(kLowest);
    }
    if (count_ <= k) return;
    std::fill_n(edge_w_.data(), count_, 1);
    cut_list(k, low_);
  }

  // top-p: with p_i the softmax of the candidates, the shortest prefix in descending order with a mass >= p.
  void top_p(double p) {
    if (!(p > 0)) return keep_best();
    const float scale = weight_scale(temp_);
    if (listed_) return cut_list(top_p_target(p, k_.weigh(v_.data(), count_, top_, scale, edge_w_.data())), top_);
    // Lists of growing length until one holds the target. Below the third cut every logit weighs less than the n-th
    // part of what may be missing, so that one is long enough but for roundings.
    const uint64_t mass = mass_all(), target = top_p_target(p, mass);
    for (int attempt = 0;; attempt++) {
      const float last = low_;
      switch (attempt) {
        case 0: collect(rank_cut(64)); break;
        case 1: collect(rank_cut(n_blocks_ - n_blocks_ / 8)); break;
        case 2: collect(min_p_cut(top_, temp_, (1 - p) * double(mass) / (double(n_) * double(kFullWeight)))); break;
        default: collect(kLowest);
      }
      if (k_.weigh(v_.data(), count_, top_, scale, edge_w_.data()) >= target) return cut_list(target, attempt == 0 ? top_ : last);
    }
  }

  // min-p: p_i >= min_p p_max, see min_p_cut().
  void min_p(double min_p) {
    const float cut = min_p_cut(top_, temp_, min_p);
    if (!listed_) return collect(cut);
    if (cut > low_) keep_from(low_ = cut);
  }

  // -- draw ----

  // One candidate, with probability weight / mass; the only one without a random number.
  int32_t draw(Rng& rng) {
    const float scale = weight_scale(temp_);
    if (!listed_) {
      const uint64_t mass = mass_all();
      if (mass > kFullWeight) {
        uint64_t target = draw_target(rng, mass);
        size_t b = 0;
        for (; mass_[b] <= target; b++) target -= mass_[b];
        k_.weigh(view(b), length(b), top_, scale, edge_w_.data());
        return int32_t(b * kBlock + walk(target));
      }
      collect(kLowest);                                         // one that weighs anything: is it the only one?
    }
    if (count_ == 1) return ids_[0];
    return ids_[walk(draw_target(rng, k_.weigh(v_.data(), count_, top_, scale, edge_w_.data())))];
  }
  // The index at which the cumulated edge_w_ exceeds target.
  size_t walk(uint64_t target) const {
    size_t i = 0;
    for (; edge_w_[i] <= target; i++) target -= edge_w_[i];
    return i;
  }

  const Kernels& k_;
  const size_t n_, n_blocks_;
  const float* logits_ = nullptr;
  AlignedBuffer<float> overlay_;                 // [n] changed logits
  AlignedBuffer<int32_t> counts_;                // [n] how often a token stands in the history; zero between calls
  AlignedBuffer<float> maxima_, fold_;           // [n_blocks] largest logit of each block; scratch of largest()
  AlignedBuffer<uint64_t> mass_;                 // [n_blocks] weight of each block
  AlignedBuffer<uint8_t> changed_;               // [n_blocks]
  AlignedBuffer<uint64_t> marks_;                // [n_blocks][4] one bit per changed logit
  AlignedBuffer<int32_t> ids_;                   // [count] survivors in id order, once listed_
  AlignedBuffer<float> v_;                       // [count] their logits
  AlignedBuffer<float> edge_v_;                  // scratch: values and weights of find_edge, weights of the draw
  AlignedBuffer<uint64_t> edge_w_;
  size_t count_ = 0;
  double temp_ = 1;                              // product of the temperatures so far
  float top_ = 0, low_ = 0;                      // largest candidate; a value no list element is below
  bool listed_ = false;
  float block_[kBlock];
};

// True when the last span of at least 8 tokens stands `times` times in a row at the end of ids[0..n).
static bool ends_in_loop(const int32_t* ids, size_t n, size_t times) {
  constexpr size_t kMinSpan = 8;
  if (times < 2) return false;
  for (size_t span = kMinSpan; span <= n / times; span++) {
    const size_t want = span * (times - 1);                      // ids[i] == ids[i - span] for the last `want` ids
    size_t same = 0;
    while (same < want && ids[n - 1 - same] == ids[n - 1 - same - span]) same++;
    if (same == want) return true;
  }
  return false;
}

// -- the same by sorting ----
// What the stages mean, written for reading: every candidate is an object, every stage sorts and allocates.
// --bench sampler measures it beside Sampler, and both must agree on every id.

struct Candidate {
  int32_t id;
  float logit;
};

// The candidates that the stages leave, in id order.
static std::vector<Candidate> filter_plainly(const Kernels& k, const float* logits, size_t n, const SamplerParams& p,
                                                              const int32_t* history, size_t n_history, double* temp) {
  std::vector<Candidate> all;
  for (size_t i = 0; i < n; i++)
    if (std::isfinite(logits[i])) all.push_back({int32_t(i), logits[i]});
  const auto best_first = [](const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; };
  const auto keep = [&](size_t count) { all.resize(std::min(all.size(), std::max<size_t>(count, 1))); };
  *temp = 1;
  std::vector<Stage> order(p.order.at.begin(), p.order.at.begin() + p.order.n);
  if (p.temp == 0) order.push_back(Stage::temp);
  for (Stage stage : order) {
    if (all.empty()) break;
    if (stage == Stage::penalties && has_penalties(p)) {
      std::map<int32_t, int32_t> counts;
      for (size_t i = n_history - penalty_window(p, n_history); i < n_history; i++) counts[history[i]]++;
      for (Candidate& c : all)
        if (counts.count(c.id)) c.logit = penalized(c.logit, counts[c.id], p, *temp);
    }
    std::sort(all.begin(), all.end(), best_first);
    if (stage == Stage::temp && p.temp > 0) *temp *= p.temp;
    if (stage == Stage::temp && p.temp == 0) keep(1);
    if (stage == Stage::top_k && p.top_k > 0) keep(size_t(p.top_k));
    if (stage == Stage::min_p && p.min_p > 0)
      while (all.back().logit < min_p_cut(all[0].logit, *temp, p.min_p)) all.pop_back();
    if (stage == Stage::top_p && p.top_p < 1) {
      std::vector<float> l;
      for (const Candidate& c : all) l.push_back(c.logit);
      std::vector<uint64_t> w(l.size() + 16);
      const uint64_t target = top_p_target(p.top_p, k.weigh(l.data(), l.size(), l[0], weight_scale(*temp), w.data()));
      uint64_t mass = 0;
      size_t count = 0;
      while (mass < target) mass += w[count++];
      keep(count);
    }
  }
  std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return all;
}

static int32_t sample_plainly(const Kernels& k, const float* logits, size_t n, const SamplerParams& p, Rng& rng,
                                               const int32_t* history, size_t n_history) {
  double temp;
  const std::vector<Candidate> all = filter_plainly(k, logits, n, p, history, n_history, &temp);
  if (all.size() <= 1) return all.empty() ? -1 : all[0].id;
  std::vector<float> l;
  for (const Candidate& c : all) l.push_back(c.logit);
  std::vector<uint64_t> w(l.size() + 16);
  const uint64_t mass = k.weigh(l.data(), l.size(), *std::max_element(l.begin(), l.end()), weight_scale(temp), w.data());
  const uint64_t target = draw_target(rng, mass);
  size_t i = 0;
  for (uint64_t sum = w[0]; sum <= target; sum += w[i]) i++;
  return all[i].id;
}

// -- bench ----

struct SamplerBenchRow {
  const char* chain;
  int32_t n_vocab;
  double us, plain_us;          // per call: ours, by sorting
};

// Normal logits (deviation 2.5) with twenty peaks 8 to 12 higher.
static std::vector<float> make_bench_logits(size_t n, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> logits(n);
  for (float& l : logits) {
    l = -6;
    for (int i = 0; i < 12; i++) l += rng.next_float();          // twelve uniform numbers: nearly normal, variance 1
    l *= 2.5f;
  }
  for (int i = 0; i < 20; i++) logits[rng.next_u64() % n] += 8 + 4 * rng.next_float();
  return logits;
}

// Times every chain of the README's table on one thread; each time is the median of several runs.
static std::vector<SamplerBenchRow> bench_sampler(const Kernels* kernels) {
  struct Chain { const char* name; double temp; int32_t top_k; double top_p, min_p; bool penalties, flat; };
  constexpr Chain kChains[] = {{"greedy", 0, 0, 1, 0, false, false},
                               {"default: temp 1, min-p 0.05", 1, 0, 1, 0.05, false, false},
                               {"penalties, temp 0.8, min-p 0.05", 0.8, 0, 1, 0.05, true, false},
                               {"temp 0.8, top-p 0.9", 0.8, 0, 0.9, 0, false, false},
                               {"temp 0.8, top-k 40, top-p 0.95, min-p 0.05", 0.8, 40, 0.95, 0.05, false, false},
                               {"temp 1, no filter", 1, 0, 1, 0, false, false},
                               {"temp 1, top-p 0.9, all logits equal", 1, 0, 0.9, 0, false, true},
                               {"temp 1000, top-p 0.9", 1000, 0, 0.9, 0, false, false}};
  std::vector<SamplerBenchRow> rows;
  for (int32_t n : {151936, 129280}) {
    const std::vector<float> peaked = make_bench_logits(size_t(n), 1), equal(size_t(n), 1.5f);
    std::vector<int32_t> history;
    Rng rng(7);
    for (int i = 0; i < 64; i++) history.push_back(int32_t(rng.next_u64() % uint64_t(n)));
    Sampler sampler(n, kernels);
    for (const Chain& c : kChains) {
      SamplerParams p;
      p.temp = c.temp, p.top_k = c.top_k, p.top_p = c.top_p, p.min_p = c.min_p;
      if (c.penalties) p.repeat_penalty = 1.1f, p.presence = 0.1f, p.frequency = 0.1f;
      const std::vector<float>& logits = c.flat ? equal : peaked;
      const int32_t* past = history.data();
      const double ours = median_seconds([&] { sampler.sample(logits.data(), p, rng, past, history.size()); }, 0.02, 5);
      const double plain = median_seconds([&] { sample_plainly(*kernels, logits.data(), size_t(n), p, rng, past, history.size()); }, 0, 3);
      rows.push_back({c.name, n, 1e6 * ours, 1e6 * plain});
    }
  }
  return rows;
}


}  // namespace ds4

// =============================================================================
// 17. SESSION — tokens in, tokens out: prefix reuse, token loop, stop rules, statistics.   uses: 11 12 15 16
// =============================================================================
// A Session owns what the cache of its Engine holds, token by token. answer() brings the cache to a
// prompt, computing only what differs, and samples until a stop rule holds. The token loop allocates
// nothing once its buffers have grown and does no I/O but the caller's `show`.

namespace ds4 {

enum class Finish { stop, length, context, loop, stop_text, tool_calls, interrupted, fault };
static const char* finish_name(Finish f) {
  static const char* const kNames[] = {"stop", "length", "context", "loop", "stop-text", "tool_calls", "interrupted", "fault"};
  return kNames[int(f)];
}

struct GenerateOptions {
  SamplerParams sampler;
  int64_t max_tokens = INT64_MAX;
  std::vector<std::string> stop;       // texts that end the answer and are not part of it
  bool ignore_eos = false;
  int loop_stop = 0;                   // N: end when the last span of >= 8 tokens stands N times in a row
  int n_logprobs = -1;                 // best log-probabilities kept per token; -1: none, not even the chosen one's
  bool parse = true;                   // a chat reply: split reasoning, text and calls; else text as it is
  bool thinking = false;               // the prompt ends in <think>
  bool tools = false;                  // tool structure is sampled greedily and ends the answer
  size_t first_call = 0;               // number of the first call's id
  bool hash = true;                    // of all logits: half a millisecond per token with a full vocabulary
};

struct TokenLogprobs {
  LogProb chosen;
  std::vector<LogProb> top;            // best first
};

struct Answer {
  std::vector<int32_t> tokens;         // as sampled, the end token included
  Reply reply;                         // reasoning, text up to a stop text, calls: bytes as the model gave them
  Finish finish = Finish::stop;
  size_t prompt_tokens = 0, cached_tokens = 0, read_tokens = 0;      // read: computed now; fewer than the rest if interrupted
  double prompt_seconds = 0, seconds = 0;
  uint64_t hash = kFnvBasis;           // FNV-1a over every logits vector that was sampled from
  float margin = INFINITY;             // smallest gap between the two best logits
  std::vector<TokenLogprobs> logprobs;
  // Against an expected answer: the first token that differs, and at that place the margin and how far
  // the expected token lies below the sampled one (negative: above).
  size_t first_difference = SIZE_MAX;
  float difference_margin = 0, difference_gap = 0;
};

// Passes text on until one of the stop texts turns up, and withholds what may still become one.
class StopFilter {
 public:
  explicit StopFilter(const std::vector<std::string>& stops) : stops_(stops) {}
  // Appends to out what is certain. True when a stop text was found: what precedes it is in out.
  bool feed(std::string_view piece, std::string& out) {
    if (found_) return true;
    held_ += piece;
    size_t at = std::string::npos, keep = 0;
    for (const std::string& s : stops_) at = std::min(at, held_.find(s));
    if (at == std::string::npos) {
      for (const std::string& s : stops_)
        for (size_t n = std::min(s.size() - 1, held_.size()); n > keep; n--)
          if (held_.compare(held_.size() - n, n, s, 0, n) == 0) keep = n;
      at = held_.size() - keep;
    } else {
      found_ = true;
    }
    out.append(held_, 0, at);
    held_.erase(0, at);
    return found_;
  }
  void finish(std::string& out) {
    if (!found_) out += held_;
    held_.clear();
  }

 private:
  const std::vector<std::string>& stops_;
  std::string held_;
  bool found_ = false;
};

// Receives the pieces of an answer as they become certain.
using ShowPiece = std::function<void(std::string_view piece, bool reasoning)>;

// From sampled tokens to what the reader sees: parser and stop texts.
class ReplyStream {
 public:
  ReplyStream(const Vocab& vocab, const GenerateOptions& o, const ShowPiece& show)
      : vocab_(vocab), options_(o), show_(show), parser_(o.thinking, o.tools, o.first_call), stops_(o.stop),
        think_open_(vocab.find(kThinkText)), think_close_(vocab.find(kThinkEndText)) {}
  bool greedy() const { return parser_.greedy(); }
  // True when the answer is complete: stop text or tool calls.
  bool feed(int32_t id) {
    bytes_.clear();
    if (id != vocab_.eos) vocab_.append_bytes(id, bytes_);           // --ignore-eos goes on behind it; it is never shown
    if (!options_.parse) return pass_on(bytes_);
    using Control = ReplyParser::Control;
    parser_.feed(bytes_, id == think_open_ ? Control::kThinkOpen : id == think_close_ ? Control::kThinkClose : Control::kNone);
    return pass_on_parsed() || parser_.done();
  }
  Finish finish() const { return stopped_ ? Finish::stop_text : Finish::tool_calls; }
  // The end: what was held back is text after all.
  Reply end() {
    if (options_.parse) {
      parser_.finish();
      pass_on_parsed();
    }
    std::string rest;
    stops_.finish(rest);
    emit(rest);
    Reply reply = parser_.reply();
    reply.text = std::move(text_);
    return reply;
  }

 private:
  bool pass_on_parsed() {
    if (const std::string_view thought = parser_.new_reasoning(); !thought.empty() && show_) show_(thought, true);
    return pass_on(parser_.new_text());
  }
  bool pass_on(std::string_view piece) {
    piece_.clear();
    stopped_ = stops_.feed(piece, piece_);
    emit(piece_);
    return stopped_;
  }
  void emit(std::string_view piece) {
    text_ += piece;
    if (!piece.empty() && show_) show_(piece, false);
  }
  const Vocab& vocab_;
  const GenerateOptions& options_;
  const ShowPiece& show_;
  ReplyParser parser_;
  StopFilter stops_;
  int32_t think_open_, think_close_;
  bool stopped_ = false;
  std::string bytes_, piece_, text_;
};

class Session {
 public:
  using ReadProgress = std::function<void(size_t done, size_t total)>;

  // *stop becoming true ends whatever runs, between two tokens or two prompt chunks.
  Session(Engine& engine, const Vocab& vocab, const std::atomic<bool>* stop)
      : engine_(engine), vocab_(vocab), stop_(stop), sampler_(vocab.size(), engine.options().kernels) {
    cached_.reserve(engine.ctx());
  }

  Engine& engine() { return engine_; }

  // What helps when the context is too small.
  std::string room_for_more() const {
    const uint64_t most = engine_.model().shape.n_ctx_train;
    return engine_.ctx() < most ? format("--ctx, in a chat /ctx, allows up to %llu", ull(most)) : std::string("the model has no larger one");
  }

  // Brings the cache to exactly `prompt` and leaves the logits of its last token. Only what follows the longest
  // prefix the cache can go back to is computed. Returns how many tokens were there already. When *stop came, what
  // was read so far stays: is_at(prompt) is then false.
  size_t read(const std::vector<int32_t>& prompt, const ReadProgress& progress = {}) {
    if (prompt.empty()) fail("the prompt is empty");
    if (prompt.size() > engine_.ctx())
      fail("the prompt has %zu tokens, more than the context of %u; %s", prompt.size(), engine_.ctx(), room_for_more().c_str());
    const size_t most = std::min(cached_.size(), prompt.size() - 1);                // the last token's logits are needed
    size_t common = 0;
    while (common < most && cached_[common] == prompt[common]) common++;
    if (!engine_.rewind(uint32_t(common))) engine_.reset();
    const size_t kept = engine_.position(), todo = prompt.size() - kept;
    cached_.resize(kept);
    const size_t done = engine_.eval(prompt.data() + kept, todo, nullptr, stop_, [&](size_t n) {
      if (progress) progress(n, todo);
    });
    cached_.insert(cached_.end(), prompt.begin() + ptrdiff_t(kept), prompt.begin() + ptrdiff_t(kept + done));
    return kept;
  }
  bool is_at(const std::vector<int32_t>& prompt) const { return cached_ == prompt; }

  // Reads `prompt` and samples an answer. `expected` (may be null) is compared with it token by token.
  Answer answer(const std::vector<int32_t>& prompt, const GenerateOptions& o, Rng& rng, const ShowPiece& show,
                const ReadProgress& progress = {}, const std::vector<int32_t>* expected = nullptr) {
    Answer a;
    a.prompt_tokens = prompt.size();
    const double start = now_seconds();
    a.cached_tokens = read(prompt, progress);
    a.read_tokens = cached_.size() - a.cached_tokens;
    a.prompt_seconds = now_seconds() - start;
    if (!is_at(prompt)) {
      a.finish = Finish::interrupted;
      return a;
    }
    generate(a, o, rng, show, expected);
    a.seconds = now_seconds() - start - a.prompt_seconds;
    return a;
  }

 private:
  void generate(Answer& a, const GenerateOptions& o, Rng& rng, const ShowPiece& show, const std::vector<int32_t>* expected) {
    ReplyStream reply(vocab_, o, show);
    SamplerParams greedy = o.sampler;
    greedy.temp = 0;
    a.tokens.reserve(engine_.ctx() - cached_.size() + 1);
    for (;;) {
      if (stop_ && stop_->load(std::memory_order_relaxed)) { a.finish = Finish::interrupted; break; }
      const float* logits = engine_.logits();
      const int32_t id = sampler_.sample(logits, reply.greedy() ? greedy : o.sampler, rng, cached_.data(), cached_.size());
      if (id < 0) { a.finish = Finish::fault; break; }
      record(a, o, logits, id, expected);
      if (id == vocab_.eos && !o.ignore_eos) { a.finish = Finish::stop; break; }
      if (reply.feed(id)) { a.finish = reply.finish(); break; }
      if (ends_in_loop(a.tokens.data(), a.tokens.size(), size_t(o.loop_stop))) { a.finish = Finish::loop; break; }
      if (int64_t(a.tokens.size()) >= o.max_tokens) { a.finish = Finish::length; break; }
      if (engine_.position() >= engine_.ctx()) { a.finish = Finish::context; break; }
      engine_.eval(&id, 1);
      cached_.push_back(id);
    }
    a.reply = reply.end();
  }

  // Notes a sampled token and what its logits say.
  void record(Answer& a, const GenerateOptions& o, const float* logits, int32_t id, const std::vector<int32_t>* expected) {
    const size_t n_vocab = size_t(vocab_.size()), at = a.tokens.size();
    if (o.hash) a.hash = fnv1a(logits, n_vocab * sizeof(float), a.hash);
    const float margin = sampler_.margin(logits);
    a.margin = std::min(a.margin, margin);
    if (expected && a.first_difference == SIZE_MAX && (at >= expected->size() || (*expected)[at] != id)) {
      a.first_difference = at;
      a.difference_margin = margin;
      const bool known = at < expected->size() && vocab_.contains((*expected)[at]);
      a.difference_gap = known ? logits[id] - logits[(*expected)[at]] : NAN;
    }
    a.tokens.push_back(id);
    if (o.n_logprobs < 0) return;
    std::vector<LogProb> top;
    const float value = sampler_.log_probs(logits, id, size_t(o.n_logprobs), top);
    a.logprobs.push_back({{id, value}, std::move(top)});
  }

  Engine& engine_;
  const Vocab& vocab_;
  const std::atomic<bool>* stop_;
  Sampler sampler_;
  std::vector<int32_t> cached_;        // the tokens in the engine's cache
};


}  // namespace ds4

// =============================================================================
// 18. TERMINAL — colour policy, output, progress, Ctrl-C, line editor.   uses: 1 7 12
// =============================================================================
// No escape byte ever reaches a stream that is not a terminal. Everything here degrades to plain
// lines when stdin or stdout is redirected or TERM is "dumb".

namespace ds4 {

// -- streams ----

// What the two output streams are, decided once. color_*: escape sequences may be written there.
struct Streams {
  bool in_tty = false, out_tty = false, err_tty = false;
  bool out_color = false, err_color = false, editor = false;
};
static Streams g_streams;
static termios g_modes;              // of the terminal at stdin, before anything changed them
constexpr std::string_view kPasteOn = "\x1b[?2004h", kPasteOff = "\x1b[?2004l";       // marks around what is pasted

enum class ColorMode { automatic, always, never };

// NO_COLOR (any non-empty value) and TERM=dumb switch colours off in automatic mode.
// "always" does not colour a redirected stream: the promise above is stronger.
static void detect_streams(ColorMode mode) {
  const char* term = std::getenv("TERM");
  const char* no_color = std::getenv("NO_COLOR");
  const bool dumb = !term || !*term || !std::strcmp(term, "dumb");
  const bool color = mode == ColorMode::always || (mode == ColorMode::automatic && !dumb && !(no_color && *no_color));
  Streams& s = g_streams;
  s.in_tty = isatty(STDIN_FILENO), s.out_tty = isatty(STDOUT_FILENO), s.err_tty = isatty(STDERR_FILENO);
  s.out_color = s.out_tty && color;
  s.err_color = s.err_tty && color;
  s.editor = s.in_tty && s.out_tty && !dumb;
  tcgetattr(STDIN_FILENO, &g_modes);
}

// Thrown when the reader of an answer on stdout has gone: the program ends without a word.
struct PipeClosed {};

// Writes all of s. Not by stdio, which drops what it holds when a signal (Ctrl-C while a pager waits) interrupts it.
// Throws Error naming `what`; PipeClosed on stdout itself, but not on a copy of it, which dumps have.
static void write_all(int fd, std::string_view s, const char* what) {
  while (!s.empty()) {
    const ssize_t n = write(fd, s.data(), s.size());
    if (n >= 0) s.remove_prefix(size_t(n));
    else if (errno == EPIPE && fd == STDOUT_FILENO) throw PipeClosed();
    else if (errno != EINTR) fail("%s: %s", what, std::strerror(errno));
  }
}
// Writes to stdout; nothing else does, but for TypingMode and restore_terminal.
static void write_out(std::string_view s) { write_all(STDOUT_FILENO, s, "standard output"); }

static void tell_list(const char* fmt, va_list args) { std::fprintf(stderr, "%s\n", terminal_safe(vformat(fmt, args)).c_str()); }

// A line for the user on stderr: one that was asked for, and one that -q silences.
__attribute__((format(printf, 1, 2))) static void tell(const char* fmt, ...) {
  va_list args;
  va_start(args, fmt);
  tell_list(fmt, args);
  va_end(args);
}
__attribute__((format(printf, 1, 2))) static void note(const char* fmt, ...) {
  va_list args;
  va_start(args, fmt);
  if (!g_quiet) tell_list(fmt, args);
  va_end(args);
}

// An error quotes files, options and messages, which may hold anything; it stays one line.
static void print_error(std::string_view message) {
  std::fprintf(stderr, "ds4: %s\n", escape_controls(utf8_lossy(message), "").c_str());
}
[[maybe_unused]] static void print_error(const std::exception& e) {
  print_error(dynamic_cast<const std::bad_alloc*>(&e) ? "out of memory" : std::string_view(e.what()));
}

// Columns and rows.
static std::pair<int, int> terminal_size() {
  winsize w{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) != 0 || w.ws_col == 0 || w.ws_row == 0) return {80, 24};
  return {w.ws_col, std::max<int>(w.ws_row, 2)};
}

// -- interrupts ----

static std::atomic<bool> g_interrupted{false};
static std::atomic<int> g_interrupts_unseen{0};
static std::atomic<bool> g_reading{false};         // a prompt: a step of it may take half a minute

// For handlers: the terminal as it was, unless another job has it.
static void restore_terminal() {
  if (tcgetpgrp(STDIN_FILENO) != getpgrp()) return;
  if (g_streams.editor) (void)!write(STDOUT_FILENO, kPasteOff.data(), kPasteOff.size());
  tcsetattr(STDIN_FILENO, TCSANOW, &g_modes);
}
static void restore_terminal_and_end(int signal_number) {
  restore_terminal();
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

// While one of these lives, the signal has this handler, and ends a wait for the terminal.
class SignalScope {
 public:
  SignalScope(int signal, void (*handler)(int)) : signal_(signal) {
    struct sigaction action{};
    action.sa_handler = handler;
    sigemptyset(&action.sa_mask);                    // no SA_RESTART
    sigaction(signal_, &action, &before_);
  }
  ~SignalScope() { sigaction(signal_, &before_, nullptr); }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

 private:
  const int signal_;
  struct sigaction before_ {};
};

// While one of these lives, Ctrl-C sets g_interrupted instead of ending the process. A third one that nobody has looked at
// ends it all the same, so that a stuck program can be left; the second warns of that, the first if a prompt is being read.
class InterruptScope : SignalScope {
 public:
  InterruptScope() : SignalScope(SIGINT, press) { take(); }
  // True if Ctrl-C was pressed since the last call.
  static bool take() {
    g_interrupts_unseen = 0;
    return g_interrupted.exchange(false);
  }

 private:
  static void press(int) {
    static constexpr char kHint[] = "\n(stops when this step is done; the third Ctrl-C ends ds4)\n";
    g_interrupted = true;
    const int n = ++g_interrupts_unseen, error = errno;
    if (n >= 3) {
      restore_terminal();
      _exit(kExitInterrupted);
    }
    if (n == (g_reading ? 1 : 2) && !g_quiet) (void)!write(STDERR_FILENO, kHint, sizeof kHint - 1);
    errno = error;
  }
};

// -- progress ----

// "reading 512/1234 tokens, 31.2 t/s, 23 s left" on one line of a terminal's stderr, at most ten
// times a second, and not before half a second has passed. Wiped with blanks, no escape needed.
class Progress {
 public:
  Progress() { g_reading = true; }
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(size_t done, size_t total) {
    const double now = now_seconds();
    if (g_quiet || !g_streams.err_tty || now - last_ < 0.1 || done == 0) return;
    last_ = now;
    const double rate = double(done) / (now - start_);
    const std::string s = format("reading %zu/%zu tokens, %.1f t/s, %.0f s left", done, total, rate, double(total - std::min(done, total)) / rate);
    std::fprintf(stderr, "\r%-*s", int(width_), s.c_str());
    width_ = std::max(width_, s.size());
  }
  void clear() {
    if (width_) std::fprintf(stderr, "\r%*s\r", int(width_) + 2, "");      // 2: an echoed ^C
    width_ = 0;
    g_reading = false;
  }

 private:
  size_t width_ = 0;
  double start_ = now_seconds(), last_ = start_ + 0.4;
};

// -- text on a screen ----

// One character at s[i]: its length in bytes and the columns it takes (0: combining, 2: East Asian wide).
// A byte that is no UTF-8 counts as one character of one column.
struct Glyph {
  size_t nbytes;
  int columns;
};

static int columns_of(uint32_t c) {
  struct Range {
    uint32_t lo, hi;
  };
  static const Range kZero[] = {{0x300, 0x36f},     {0x483, 0x489},     {0x591, 0x5bd},     {0x610, 0x61a},     {0x64b, 0x65f},
                                {0x6d6, 0x6dc},     {0x900, 0x902},     {0x93c, 0x93c},     {0x941, 0x948},     {0x94d, 0x94d},
                                {0xe31, 0xe31},     {0xe34, 0xe3a},     {0xe47, 0xe4e},     {0x1160, 0x11ff},   {0x1ab0, 0x1aff},
                                {0x1dc0, 0x1dff},   {0x200b, 0x200f},   {0x202a, 0x202e},   {0x2060, 0x2064},   {0x20d0, 0x20f0},
                                {0x302a, 0x302d},   {0x3099, 0x309a},   {0xfe00, 0xfe0f},   {0xfe20, 0xfe2f},   {0xfeff, 0xfeff},
                                {0x1f3fb, 0x1f3ff}, {0xe0020, 0xe007f}, {0xe0100, 0xe01ef}};
  static const Range kWide[] = {
      {0x1100, 0x115f},   {0x231a, 0x231b},  {0x23e9, 0x23ec},   {0x25fd, 0x25fe},   {0x2614, 0x2615},   {0x2648, 0x2653},
      {0x26a1, 0x26a1},   {0x26bd, 0x26be},  {0x2705, 0x2705},   {0x2728, 0x2728},   {0x274c, 0x274c},   {0x2753, 0x2757},
      {0x2e80, 0x303e},   {0x3041, 0xa4cf},  {0xa960, 0xa97f},   {0xac00, 0xd7a3},   {0xf900, 0xfaff},   {0xfe30, 0xfe6f},
      {0xff00, 0xff60},   {0xffe0, 0xffe6},  {0x16fe0, 0x1b2ff}, {0x1f300, 0x1f64f}, {0x1f680, 0x1f6ff}, {0x1f900, 0x1f9ff},
      {0x1fa70, 0x1faff}, {0x20000, 0x3fffd}};
  for (const Range& r : kZero)
    if (c >= r.lo && c <= r.hi) return 0;
  for (const Range& r : kWide)
    if (c >= r.lo && c <= r.hi) return 2;
  return 1;
}

static Glyph glyph_at(std::string_view s, size_t i) {
  const uint8_t b = uint8_t(s[i]);
  const size_t n = b < 0xc2 ? 1 : b < 0xe0 ? 2 : b < 0xf0 ? 3 : b < 0xf5 ? 4 : 1;
  if (n == 1 || i + n > s.size()) return {1, 1};
  uint32_t c = b & (0x7f >> n);
  for (size_t k = 1; k < n; k++) {
    if ((uint8_t(s[i + k]) & 0xc0) != 0x80) return {1, 1};
    c = c << 6 | (uint8_t(s[i + k]) & 0x3f);
  }
  return {n, columns_of(c)};
}

// The start of the character before / after position i; combining marks belong to their base.
static size_t next_glyph(std::string_view s, size_t i) {
  if (i >= s.size()) return s.size();
  i += glyph_at(s, i).nbytes;
  while (i < s.size() && glyph_at(s, i).columns == 0) i += glyph_at(s, i).nbytes;
  return i;
}
static size_t previous_glyph(std::string_view s, size_t i) {
  while (i > 0) {
    size_t k = i - 1;
    while (k > 0 && i - k < 4 && (uint8_t(s[k]) & 0xc0) == 0x80) k--;
    if (k + glyph_at(s, k).nbytes != i) k = i - 1;      // stray continuation bytes: one at a time
    i = k;
    if (glyph_at(s, i).columns != 0) break;
  }
  return i;
}

// -- history ----

// Entered messages, oldest first, kept one a line ("\n" and "\\" escaped) in a file only its owner
// can read. Problems with the file are nobody's business: history is a convenience.
class History {
 public:
  explicit History(std::string path) : path_(std::move(path)) {
    FILE* f = path_.empty() ? nullptr : std::fopen(path_.c_str(), "re");
    if (!f) return;
    std::string s;
    for (int c; (c = std::fgetc(f)) != EOF;) {
      if (c == '\\') {
        c = std::fgetc(f);
        s += c == 'n' ? '\n' : char(c);
      } else if (c == '\n') {
        entries_.push_back(std::move(s));
        s.clear();
      } else {
        s += char(c);
      }
    }
    std::fclose(f);
    if (entries_.size() > kKeep) {
      entries_.erase(entries_.begin(), entries_.end() - kKeep / 2);
      save(0, true);
    }
  }
  size_t size() const { return entries_.size(); }
  const std::string& operator[](size_t i) const { return entries_[i]; }
  void add(const std::string& s) {
    if (s.empty() || s.size() > 65536 || (!entries_.empty() && entries_.back() == s)) return;
    entries_.push_back(s);
    save(entries_.size() - 1);
  }
  // $XDG_STATE_HOME/ds4/history, else ~/.local/state/ds4/history; the folders are made. "" if there is no home.
  static std::string default_path() {
    const char* state = std::getenv("XDG_STATE_HOME");
    const char* home = std::getenv("HOME");
    std::string dir;
    if (state && *state == '/') dir = state;
    else if (home && *home == '/') dir = std::string(home) + "/.local/state";
    else return {};
    dir += "/ds4";
    for (size_t i = 1; i <= dir.size(); i++)
      if (i == dir.size() || dir[i] == '/') mkdir(dir.substr(0, i).c_str(), 0700);
    return dir + "/history";
  }

 private:
  static constexpr size_t kKeep = 2000;
  // Appends the entries from `first` on to the file (another chat may do so too), or replaces it by them.
  void save(size_t first, bool replace = false) {
    if (path_.empty()) return;
    const std::string target = replace ? path_ + ".new" : path_;
    const int fd = open(target.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (replace ? O_TRUNC : 0), 0600);
    if (fd < 0) return;
    fchmod(fd, 0600);
    std::string out;
    for (size_t i = first; i < entries_.size(); i++) {
      for (char c : entries_[i]) out += c == '\n' ? std::string("\\n") : c == '\\' ? std::string("\\\\") : std::string(1, c);
      out += '\n';
    }
    const bool good = write(fd, out.data(), out.size()) == ssize_t(out.size());
    close(fd);
    if (replace && good) std::rename(target.c_str(), path_.c_str());
  }
  std::string path_;
  std::vector<std::string> entries_;
};

// -- line editor ----

enum class Input { line, interrupt, end };

// The process was continued after a stop (fg after Ctrl-Z, SIGCONT from anywhere): the line is to be drawn again.
static std::atomic<bool> g_continued{false};

// Reads what the user types at a terminal: in raw mode with editing, or plain lines where stdout is none or TERM is "dumb".
class LineEditor {
 public:
  explicit LineEditor(std::string history_path) : history_(std::move(history_path)) {}
  ~LineEditor() { tcsetattr(STDIN_FILENO, TCSADRAIN, &g_modes); }
  // One line (it may hold newlines: Ctrl-J, paste). On interrupt, `text` is what had been typed.
  Input read(const std::string& prompt, std::string& text) {
    text.clear();
    g_continued = false;
    const SignalScope continues(SIGCONT, [](int) { g_continued = true; }), resizes(SIGWINCH, [](int) {});
    TypingMode mode;
    if (!g_streams.editor) return read_plain(mode, prompt, text);
    if (int n = 0; ioctl(STDIN_FILENO, FIONREAD, &n) == 0) typed_ahead_ = n;
    prompt_ = prompt;
    prompt_columns_ = 0;
    for (size_t i = 0; i < prompt.size(); i += glyph_at(prompt, i).nbytes) prompt_columns_ += glyph_at(prompt, i).columns;
    line_.clear();
    cursor_ = 0;
    above_.clear();
    edited_.clear();
    at_ = history_.size();
    const Input result = edit(mode);
    cursor_ = line_.size();
    draw();
    write_out(result == Input::interrupt ? "^C\r\n" : "\r\n");
    text = line_;
    return result;
  }
  void remember(const std::string& message) { history_.add(message); }

 private:
  // While one of these lives, the terminal has the modes for typing: with an editor raw with bracketed paste. Signals come only
  // during the wait for a byte, so that none is overlooked before it. Afterwards Ctrl-C does not flush what is typed ahead.
  class TypingMode {
   public:
    TypingMode() { enter(); }
    ~TypingMode() { leave(); }
    TypingMode(const TypingMode&) = delete;
    TypingMode& operator=(const TypingMode&) = delete;
    void enter() {
      mask_terminal_signals(SIG_BLOCK);
      termios modes = g_modes;
      if (g_streams.editor) {
        modes.c_iflag &= ~tcflag_t(BRKINT | ICRNL | INPCK | ISTRIP | IXON);
        modes.c_lflag &= ~tcflag_t(ECHO | ICANON | IEXTEN | ISIG);
        modes.c_cc[VMIN] = 1;
        modes.c_cc[VTIME] = 0;
      }
      set(modes);
      if (g_streams.editor) write_out(kPasteOn);
    }
    void leave() {
      if (g_streams.editor) (void)!write(STDOUT_FILENO, kPasteOff.data(), kPasteOff.size());
      termios modes = g_modes;
      modes.c_lflag |= NOFLSH;
      set(modes);
      mask_terminal_signals(SIG_UNBLOCK);
    }

   private:
    static void set(const termios& modes) {
      while (tcsetattr(STDIN_FILENO, TCSADRAIN, &modes) != 0 && errno == EINTR) {}    // bg, then fg: stopped and continued in here
    }
  };

  enum Key : int {
    kUp = 256, kDown, kLeft, kRight, kHome, kEnd, kDelete, kWordLeft, kWordRight, kEraseWord, kEraseNext, kPaste, kBreak,
    kIgnore, kRedraw, kHangup
  };

  Input read_plain(TypingMode& mode, const std::string& prompt, std::string& text) {
    std::fputs(prompt.c_str(), stderr);
    for (;;) {
      if (g_continued.exchange(false)) mode.enter(), std::fputs(prompt.c_str(), stderr);
      if (InterruptScope::take()) return std::fputc('\n', stderr), Input::interrupt;
      const int c = next_byte();
      if (c == '\n') return Input::line;
      if (c == kHangup) return std::fputc('\n', stderr), text.empty() ? Input::end : Input::line;    // Ctrl-D
      if (c < 256) text += char(c);
    }
  }

  // The next byte, or kRedraw after a signal, kHangup at the end of input, kIgnore after `timeout_ms` (-1: never).
  int next_byte(int timeout_ms = -1) {
    if (pending_at_ < pending_.size()) return uint8_t(pending_[pending_at_++]);
    pollfd p{STDIN_FILENO, POLLIN, 0};
    const timespec timeout{0, timeout_ms * 1000000L};
    sigset_t none;
    sigemptyset(&none);
    const int ready = ppoll(&p, 1, timeout_ms < 0 ? nullptr : &timeout, &none);
    if (ready <= 0) return ready < 0 ? kRedraw : kIgnore;
    char chunk[4096];
    const ssize_t n = ::read(STDIN_FILENO, chunk, sizeof chunk);
    if (n <= 0) return kHangup;
    pending_.assign(chunk, size_t(n));
    std::replace(pending_.begin(), pending_.begin() + std::min<ssize_t>(n, typed_ahead_), '\n', '\r');
    typed_ahead_ = std::max(0, typed_ahead_ - int(n));
    pending_at_ = 1;
    return uint8_t(pending_[0]);
  }
  bool input_waits() const { return pending_at_ < pending_.size(); }

  int read_key() {
    const int c = next_byte();
    if (c != 27) return c;
    int c1 = next_byte(40);
    while (c1 == 27) c1 = next_byte(40);               // Alt with an arrow, in some terminals
    if (c1 == 'b') return kWordLeft;
    if (c1 == 'f') return kWordRight;
    if (c1 == 'd') return kEraseNext;
    if (c1 == 8 || c1 == 127) return kEraseWord;
    if (c1 == '\r' || c1 == '\n') return kBreak;
    if (c1 != '[' && c1 != 'O') return kIgnore;
    std::string args;
    int last = next_byte(40);
    for (; (last >= '0' && last <= '9') || last == ';'; last = next_byte(40)) args += char(last);
    const std::string modifier = args.substr(args.find_last_of(';') + 1);
    const bool word = modifier == "5" || modifier == "3";                                   // with Ctrl, with Alt
    switch (last) {
      case 'A': return kUp;
      case 'B': return kDown;
      case 'C': return word ? kWordRight : kRight;
      case 'D': return word ? kWordLeft : kLeft;
      case 'H': return kHome;
      case 'F': return kEnd;
      case '~':
        if (args == "200") return kPaste;
        if (args == "1" || args == "7") return kHome;
        if (args == "4" || args == "8") return kEnd;
        if (args == "3") return kDelete;
        return kIgnore;
      default: return kIgnore;
    }
  }

  void insert(std::string_view s) {
    line_.insert(cursor_, s);
    cursor_ += s.size();
  }

  // Everything up to the end mark of a bracketed paste, as text: CR and CR LF become newlines, other control bytes go.
  void paste() {
    static const std::string kEndMark = "\x1b[201~";
    std::string raw;
    while (raw.size() < kEndMark.size() || raw.compare(raw.size() - kEndMark.size(), std::string::npos, kEndMark) != 0) {
      const int c = next_byte();
      if (c == kHangup) break;
      if (c < 256) raw += char(c);
    }
    if (raw.size() >= kEndMark.size()) raw.resize(raw.size() - kEndMark.size());
    std::string text;
    for (size_t i = 0; i < raw.size(); i++) {
      const char c = raw[i];
      if (c == '\r') {
        text += '\n';
        if (i + 1 < raw.size() && raw[i + 1] == '\n') i++;
      } else if (c == '\n' || c == '\t' || (uint8_t(c) >= 32 && c != 127)) {
        text += c;
      }
    }
    insert(text);
  }

  size_t line_start(size_t i) const {
    const size_t k = i ? line_.rfind('\n', i - 1) : std::string::npos;
    return k == std::string::npos ? 0 : k + 1;
  }
  size_t line_end(size_t i) const { return std::min(line_.find('\n', i), line_.size()); }
  static bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t'; }
  size_t word_left(size_t i) const {
    while (i > 0 && is_space(line_[i - 1])) i--;
    while (i > 0 && !is_space(line_[i - 1])) i--;
    return i;
  }
  size_t word_right(size_t i) const {
    while (i < line_.size() && is_space(line_[i])) i++;
    while (i < line_.size() && !is_space(line_[i])) i++;
    return i;
  }
  void erase(size_t from, size_t to) {
    line_.erase(from, to - from);
    cursor_ = from;
  }
  // As erase, for Ctrl-Y to bring back.
  void kill(size_t from, size_t to) {
    if (from < to) killed_ = line_.substr(from, to - from);
    erase(from, to);
  }

  // Up and Down: within a message of several lines first, then through the history.
  void move_vertically(int direction) {
    const size_t start = line_start(cursor_), end = line_end(cursor_);
    if (direction < 0 ? start > 0 : end < line_.size()) {
      size_t column = 0;
      for (size_t i = start; i < cursor_; i = next_glyph(line_, i)) column++;
      cursor_ = direction < 0 ? line_start(start - 1) : end + 1;
      for (const size_t stop = line_end(cursor_); column > 0 && cursor_ < stop; column--) cursor_ = next_glyph(line_, cursor_);
      return;
    }
    if (direction < 0 ? at_ == 0 : at_ == history_.size()) return;
    edited_[at_] = line_;
    at_ += size_t(direction);
    const auto edited = edited_.find(at_);
    line_ = edited != edited_.end() ? edited->second : history_[at_];
    cursor_ = line_.size();
  }

  Input edit(TypingMode& mode) {
    for (;;) {
      if (InterruptScope::take()) return Input::interrupt;             // from outside: as a key Ctrl-C makes no signal here
      if (g_continued.exchange(false)) mode.enter(), above_.clear();    // the shell had the terminal meanwhile
      if (!input_waits()) draw();
      const int key = read_key();
      switch (key) {
        case kHangup: return Input::end;
        case 3: return Input::interrupt;                                                  // Ctrl-C
        case 4:                                                                           // Ctrl-D
          if (line_.empty()) return Input::end;
          [[fallthrough]];
        case kDelete: erase(cursor_, next_glyph(line_, cursor_)); break;
        case '\r': return Input::line;
        case '\n': case kBreak: insert("\n"); break;                                    // Ctrl-J, Alt-Enter
        case '\t': insert("\t"); break;
        case 8: case 127: { const size_t to = cursor_; erase(previous_glyph(line_, to), to); } break;
        case 1: case kHome: cursor_ = line_start(cursor_); break;                         // Ctrl-A
        case 5: case kEnd: cursor_ = line_end(cursor_); break;                            // Ctrl-E
        case 2: case kLeft: cursor_ = previous_glyph(line_, cursor_); break;
        case 6: case kRight: cursor_ = next_glyph(line_, cursor_); break;
        case 16: case kUp: move_vertically(-1); break;
        case 14: case kDown: move_vertically(+1); break;
        case kWordLeft: cursor_ = word_left(cursor_); break;
        case kWordRight: cursor_ = word_right(cursor_); break;
        case 11: kill(cursor_, line_end(cursor_)); break;                                 // Ctrl-K
        case 21: kill(line_start(cursor_), cursor_); break;                               // Ctrl-U
        case 23: case kEraseWord: kill(word_left(cursor_), cursor_); break;               // Ctrl-W, Alt-Backspace
        case kEraseNext: kill(cursor_, word_right(cursor_)); break;                       // Alt-D
        case 25: insert(killed_); break;                                                  // Ctrl-Y
        case 12: write_out("\x1b[H\x1b[2J"), above_.clear(); break;                       // Ctrl-L
        case 26:                                                                          // Ctrl-Z
          write_out("\r\n");
          mode.leave();
          raise(SIGTSTP);
          g_continued = false;
          mode.enter();
          above_.clear();
          break;
        case kPaste: paste(); break;
        default:
          if (key >= 32 && key < 256) insert(std::string_view(std::string(1, char(key))));
      }
    }
  }

  // How far above the cursor the last drawing begins. A terminal that got narrower has wrapped its rows again, each by itself
  // since they end in line feeds; those known not to (GNU screen, xterm) have cut them.
  int rows_above(int width) const {
    static const bool cuts = std::getenv("STY") || (std::getenv("XTERM_VERSION") && !std::getenv("TMUX"));
    int n = 0, column = 0;
    for (size_t i = 0; i < above_.size();) {
      const Glyph g = glyph_at(above_, i);
      if (above_[i] == '\n' || (!cuts && column + g.columns > width)) n++, column = 0;
      if (above_[i] != '\n') column += g.columns;
      i += g.nbytes;
    }
    return n;
  }

  // Draws prompt and text from the row where the last drawing began. Only the rows around the
  // cursor are shown when the text is taller than the screen.
  void draw() {
    const auto [width, height] = terminal_size();
    std::vector<std::string> rows(1, prompt_);
    int column = prompt_columns_, cursor_row = 0, cursor_column = column;
    size_t cursor_end = 0;                         // of the character under it, in its row
    for (size_t i = 0;; ) {
      if (column >= width) rows.emplace_back(), column = 0;
      if (i == cursor_) cursor_row = int(rows.size()) - 1, cursor_column = column, cursor_end = rows.back().size();
      if (i >= line_.size()) break;
      if (line_[i] == '\n') {
        rows.emplace_back(size_t(prompt_columns_), ' ');
        column = prompt_columns_;
        i++;
        continue;
      }
      Glyph g = glyph_at(line_, i);
      std::string shown = line_.substr(i, g.nbytes);
      if (shown == "\t") shown = "    ", g.columns = 4;
      else if (terminal_safe(shown) != shown) shown = "?", g.columns = 1;
      if (column + g.columns > width) rows.emplace_back(), column = 0;
      if (i == cursor_) cursor_row = int(rows.size()) - 1, cursor_column = column;
      rows.back() += shown;
      if (i == cursor_) cursor_end = rows.back().size();
      column += g.columns;
      i += g.nbytes;
    }
    const int first = std::max(0, cursor_row - height + 1), last = std::min(int(rows.size()), first + height);
    std::string out = "\r";
    if (const int n = rows_above(width)) out += format("\x1b[%dA", n);
    out += "\x1b[J";
    for (int r = first; r < last; r++) out += (r > first ? "\r\n" : "") + rows[size_t(r)];
    if (last - 1 > cursor_row) out += format("\x1b[%dA", last - 1 - cursor_row);
    out += "\r";
    if (cursor_column > 0) out += format("\x1b[%dC", cursor_column);
    write_out(out);
    above_.clear();
    for (int r = first; r < cursor_row; r++) above_ += rows[size_t(r)] + "\n";
    above_ += rows[size_t(cursor_row)].substr(0, cursor_end);
  }

  // During an answer too: the terminal keeps leave()'s modes.
  const SignalScope terminates_{SIGTERM, restore_terminal_and_end}, quits_{SIGQUIT, restore_terminal_and_end}, hangs_up_{SIGHUP, restore_terminal_and_end};
  History history_;
  std::string prompt_, line_, pending_, killed_;
  std::map<size_t, std::string> edited_;      // lines of the history as they were left, and the new one
  std::string above_;                // the last drawing up to the character under the cursor
  size_t cursor_ = 0, at_ = 0, pending_at_ = 0;
  int prompt_columns_ = 0;
  int typed_ahead_ = 0;              // bytes of lines typed before raw mode, which made their Enter a newline
};

// One message of the user. A line that starts with """ opens a block that ends with """ at the end of
// a line; a line that ends in \ goes on with the next. End of input inside either leaves what there was in `text`.
struct Message {
  Input input = Input::line;
  std::string text;
  bool block = false;                // came as a block: never a command
};

static Message read_message(LineEditor& editor, const std::string& prompt) {
  const std::string more(prompt.size(), '.'), quotes = "\"\"\"";
  Message m;
  std::string line;
  m.input = editor.read(prompt, m.text);
  m.block = m.input == Input::line && m.text.compare(0, 3, quotes) == 0;
  if (m.block) {
    m.text.erase(0, 3);
    const auto closed = [&] { return m.text.size() >= 3 && m.text.compare(m.text.size() - 3, 3, quotes) == 0; };
    while (!closed()) {
      m.input = editor.read(more, line);
      m.text += (m.text.empty() ? "" : "\n") + line;
      if (m.input != Input::line) return m;
    }
    m.text.resize(m.text.size() - 3);
    if (!m.text.empty() && m.text.back() == '\n') m.text.pop_back();
    return m;
  }
  while (m.input == Input::line && !m.text.empty() && m.text.back() == '\\') {
    m.text.back() = '\n';
    m.input = editor.read(more, line);
    m.text += line;
  }
  return m;
}


}  // namespace ds4

// =============================================================================
// 19. CLI — option table, one-shot, chat, scripts, diagnostics, benchmarks.   uses: 17 18
// =============================================================================
// One table drives parsing, --help and /set. Every command loads only what it needs: --dump-tokens
// never looks at a tensor, --inspect allocates no cache.

namespace ds4 {

// The parts of a text between separators.
static std::vector<std::string_view> parts_of(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  for (size_t at = 0, end = 0; end < text.size() || parts.empty(); at = end + separator.size()) {
    end = std::min(text.find(separator, at), text.size());
    parts.push_back(text.substr(at, end - at));
  }
  return parts;
}

// -- files ----

// A whole file as bytes; "-" is stdin, once. Throws Error naming it.
static std::string read_file(const std::string& path) {
  static bool stdin_read = false;
  if (path == "-" && std::exchange(stdin_read, true)) fail_usage("standard input is wanted twice, by '-' or as the prompt: it can be read once");
  FILE* f = path == "-" ? stdin : std::fopen(path.c_str(), "rbe");
  if (!f) fail("%s: %s", path.c_str(), std::strerror(errno));
  std::string s;
  char chunk[65536];
  while (!std::feof(f) && !std::ferror(f)) s.append(chunk, std::fread(chunk, 1, sizeof chunk, f));      // a terminal ends more than once
  const int error = std::ferror(f) ? errno : 0;
  if (f != stdin) std::fclose(f);
  if (error) fail("%s: %s", path == "-" ? "standard input" : path.c_str(), std::strerror(error));
  return s;
}

// The text of a file without a byte order mark and without the end of its last line, which is not part of what it says.
static std::string read_text(const std::string& path) {
  std::string s = read_file(path);
  if (s.compare(0, 3, "\xef\xbb\xbf") == 0) s.erase(0, 3);
  if (!s.empty() && s.back() == '\n') s.pop_back();
  if (!s.empty() && s.back() == '\r') s.pop_back();
  return s;
}

// A file ("-": stdout) that is written piece by piece; errors name it, also that its reader has gone: half a dump is none.
// What it held before stays until the first piece comes.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path)
      : path_(path == "-" ? "standard output" : path), begun_(path == "-"),
        fd_(begun_ ? dup(STDOUT_FILENO) : open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666)) {
    if (fd_ < 0) fail("%s: %s", path_.c_str(), std::strerror(errno));
  }
  ~OutputFile() { if (fd_ >= 0) ::close(fd_); }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(std::string_view bytes) {
    if (!std::exchange(begun_, true)) (void)!ftruncate(fd_, 0);      // fails on a pipe or a device: nothing to cut there
    write_all(fd_, bytes, path_.c_str());
  }
  void close() {
    if (::close(std::exchange(fd_, -1)) != 0) fail("%s: %s", path_.c_str(), std::strerror(errno));
  }

 private:
  std::string path_;
  bool begun_;
  int fd_;
};

// Replaces a file in one step: a temporary one beside it, then a rename.
static void write_file(const std::string& path, std::string_view text) {
  const std::string temporary = path + format(".%d.new", int(getpid()));
  FILE* f = std::fopen(temporary.c_str(), "wbe");
  if (!f) fail("%s: %s", temporary.c_str(), std::strerror(errno));
  const bool good = std::fwrite(text.data(), 1, text.size(), f) == text.size();
  if (std::fclose(f) != 0 || !good || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(temporary.c_str());
    fail("%s: %s", path.c_str(), std::strerror(error));
  }
}

// -- options ----

enum class Command {
  chat, script, inspect, check, dump_tokens, dump_logits, dump_logprobs, dump_taps, perplexity, bench, help, version
};
enum class Think { off, on, max };

struct Options {
  Command command = Command::chat;
  std::string command_arg;                     // FILE, DIR or WHAT of the command
  std::string model, isa;
  RunOptions run;
  GgufOptions gguf;
  bool mlock_dense = false;
  std::optional<std::string> prompt, prompt_file, prompt_tokens, messages, system, tools;
  bool raw = false, no_bos = false, no_special = false;
  Think think = Think::on;
  Effort effort = Effort::kNone;
  std::optional<EffortProfile> profile;        // default: detected
  bool keep_thinking = false, hide_think = false;
  GenerateOptions generate;
  std::optional<uint64_t> seed;
  bool json = false, verbose = false, update = false, demo = false;
  std::optional<bool> stats;
  ColorMode color = ColorMode::automatic;
  std::vector<int> given;                      // how many times, by place in the option table
};

// The value of one option on its way into Options; a bad one is a usage error that names the option.
struct OptionValue {
  std::string name, text;
  bool on = true;                              // of a flag
  uint64_t uint(uint64_t lo, uint64_t hi, const char* or_else = "") const {
    errno = 0;
    char* end = nullptr;
    const unsigned long long v = std::strtoull(text.c_str(), &end, 10);
    if (text.empty() || text[0] < '0' || text[0] > '9' || *end || errno || v < lo || v > hi)
      fail_usage("%s: '%s' is not a whole number from %llu to %llu%s", name.c_str(), text.c_str(), ull(lo), ull(hi), or_else);
    return v;
  }
  double number(double lo, double hi) const {
    char* end = nullptr;
    const double v = std::strtod(text.c_str(), &end);
    if (text.empty() || *end || text[0] == ' ' || !(v >= lo && v <= hi))
      fail_usage("%s: '%s' is not a number from %g to %g", name.c_str(), text.c_str(), lo, hi);
    return v;
  }
  // The place of the text in `choices`, names separated by '|'.
  int choice(std::string_view choices) const {
    const auto names = parts_of(choices, "|");
    const auto it = std::find(names.begin(), names.end(), text);
    if (it == names.end()) fail_usage("%s: '%s' is none of %s", name.c_str(), text.c_str(), std::string(choices).c_str());
    return int(it - names.begin());
  }
};

struct Option {
  const char* names;                           // "-m, --model"
  const char* arg;                             // "" : a flag; in [] when it may be left out
  const char* help;                            // starts a group of --help when it begins with '#'
  void (*apply)(Options&, const OptionValue&) = nullptr;
  bool in_chat = false;                        // /set may change it
};

// What an option does: o are the options, g and s those of generating and sampling, v is the value.
#define DS4_SET(...)                                \
  [](Options& o, const OptionValue& v) {            \
    [[maybe_unused]] auto& g = o.generate;          \
    [[maybe_unused]] auto& s = g.sampler;           \
    (void)v;                                        \
    __VA_ARGS__;                                    \
  }

static void set_command(Options& o, Command command, const OptionValue& v) {
  if (o.command >= Command::help) return;
  if (o.command != Command::chat)
    fail_usage("%s: only one of --script, --inspect, --check, --dump-..., --perplexity-file, --bench at a time", v.name.c_str());
  o.command = command;
  o.command_arg = v.text;
}

static const Option kOptions[] = {
  {"", "", "#Model and machine"},
  {"-m, --model", "FILE", "GGUF file, or any shard of a split one (default: $DS4_MODEL, else ds4flash.gguf)",
   DS4_SET(o.model = v.text)},
  {"--demo", "", "the small model that comes with the source (tests/data/nano.gguf), --nothink, --temp 0", DS4_SET(o.demo = v.on)},
  {"-c, --ctx", "N", "context in tokens (default: 32768, at most the model's)", DS4_SET(o.run.ctx = uint32_t(v.uint(1, 1u << 30)))},
  {"-t, --threads", "N", "worker threads (default: the physical cores this process may use)",
   DS4_SET(o.run.threads = int(v.uint(1, 1024)))},
  {"--isa", "NAME", "force a kernel set: scalar, avx2, avx512, neon", DS4_SET(o.isa = v.text; v.choice("scalar|avx2|avx512|neon"))},
  {"--prefill-chunk", "N", "prompt tokens per step, 512 by default; never changes results",
   DS4_SET(o.run.prefill_chunk = uint32_t(v.uint(1, 65536)))},
  {"--no-mmap", "", "read the file into memory instead of mapping it", DS4_SET(o.gguf.no_mmap = v.on)},
  {"--mlock", "", "keep all weights in memory", DS4_SET(o.gguf.mlock = v.on)},
  {"--mlock-dense", "", "keep all weights but the experts in memory", DS4_SET(o.mlock_dense = v.on)},
  {"--warm-weights", "", "read all weights first, into large pages", DS4_SET(o.gguf.warm = v.on)},
  {"--exact", "", "float activations with every weight type: slow, for checking quantised kernels", DS4_SET(o.run.exact = v.on)},
  {"--plain-kv", "", "keep cached rows as float32, not rounded the official way", DS4_SET(o.run.plain_kv = v.on)},

  {"", "", "#Prompt"},
  {"-p, --prompt", "TEXT", "the user message; without it the chat starts, or a piped stdin is read", DS4_SET(o.prompt = v.text)},
  {"-f, --prompt-file", "FILE", "the message from a file ('-': stdin) without its last newline, after TEXT and a blank line with -p",
   DS4_SET(o.prompt_file = v.text)},
  {"--prompt-tokens", "FILE", "token ids (JSON array or white space), used as they are", DS4_SET(o.prompt_tokens = v.text)},
  {"--messages", "FILE", "the conversation so far: a JSON array of messages; an assistant's text at its end is continued",
   DS4_SET(o.messages = v.text)},
  {"--raw", "", "no chat template: special tokens recognised, BOS put before unless it is there", DS4_SET(o.raw = v.on)},
  {"--no-bos", "", "with --raw: no BOS", DS4_SET(o.no_bos = v.on)},
  {"--no-special", "", "with --raw: the text of special tokens is ordinary text", DS4_SET(o.no_special = v.on)},
  {"-sys, --system", "TEXT", "system prompt", DS4_SET(o.system = v.text)},
  {"-sysf, --system-file", "FILE", "system prompt from a file, read as -f's", DS4_SET(o.system = read_text(v.text))},
  {"--tools", "FILE", "JSON array of function tools the model may call", DS4_SET(o.tools = v.text)},
  {"--think", "", "reason first (default)", DS4_SET(o.think = Think::on)},
  {"--nothink", "", "answer at once", DS4_SET(o.think = Think::off)},
  {"--think-max", "", "reason with the greatest effort; needs --ctx 393216 or more", DS4_SET(o.think = Think::max)},
  {"--effort", "LEVEL", "reasoning effort: low, high, max", DS4_SET(o.effort = Effort(1 + v.choice("low|high|max"))), true},
  {"--effort-profile", "NAME", "which effort texts the model knows: preview, 0731 (default: detected)",
   DS4_SET(o.profile = EffortProfile(v.choice("preview|0731"))), true},
  {"--keep-thinking", "", "earlier reasoning stays in the rendered conversation (the chat keeps it by default)",
   DS4_SET(o.keep_thinking = v.on), true},
  {"--hide-think", "", "reasoning is generated but not shown", DS4_SET(o.hide_think = v.on), true},

  {"", "", "#Answer"},
  {"-n, --tokens", "N", "most tokens to generate (default: to the end of the turn)",
   DS4_SET(g.max_tokens = v.text == "unlimited" ? INT64_MAX : int64_t(v.uint(1, INT32_MAX))), true},
  {"--temp", "F", "temperature, 1 by default; 0 is greedy", DS4_SET(s.temp = v.number(0, 1e6)), true},
  {"--top-k", "N", "keep the N most probable tokens (0: off)", DS4_SET(s.top_k = int32_t(v.uint(0, INT32_MAX))), true},
  {"--top-p", "F", "keep the most probable tokens whose mass reaches F (1: off)", DS4_SET(s.top_p = v.number(0, 1)), true},
  {"--min-p", "F", "keep tokens at least F times as probable as the best, 0.05 by default",
   DS4_SET(s.min_p = v.number(0, 1)), true},
  {"--repeat-penalty", "F", "divides the logits of recent tokens (1: off)",
   DS4_SET(s.repeat_penalty = float(v.number(1e-6, 1e6))), true},
  {"--repeat-last-n", "N", "how many tokens count as recent, 64 by default (0: off, -1: all)",
   DS4_SET(s.repeat_last_n = v.text == "-1" ? -1 : int32_t(v.uint(0, INT32_MAX, " or -1"))), true},
  {"--presence-penalty", "F", "subtracted from logits of recent tokens (0: off)",
   DS4_SET(s.presence = float(v.number(-1e6, 1e6))), true},
  {"--frequency-penalty", "F", "subtracted once per occurrence (0: off)", DS4_SET(s.frequency = float(v.number(-1e6, 1e6))), true},
  {"--samplers", "LIST", "stages in order (default: penalties,temp,top-k,top-p,min-p)",
   DS4_SET(s.order = parse_samplers(v.text)), true},
  {"--seed", "N", "seed of the random numbers (default: drawn and printed)", DS4_SET(o.seed = v.uint(0, UINT64_MAX)), true},
  {"--stop", "TEXT", "end the answer before this text; may be given several times",
   DS4_SET(if (v.text.empty()) fail_usage("%s: empty text", v.name.c_str()); g.stop.push_back(v.text)), true},
  {"--ignore-eos", "", "go on after the end of the turn (for benchmarks)", DS4_SET(g.ignore_eos = v.on), true},
  {"--loop-stop", "N", "end when the last 8 or more tokens stand N times in a row (0: off)",
   DS4_SET(g.loop_stop = int(v.uint(0, 1000))), true},

  {"", "", "#Output"},
  {"--json", "", "one JSON object per answer on stdout", DS4_SET(o.json = v.on)},
  {"--logprobs", "N", "the N best log-probabilities per token, with --json or --dump-logprobs",
   DS4_SET(g.n_logprobs = int(v.uint(0, 1000)))},
  {"--stats", "", "one line of statistics per answer on stderr (default: if that is a terminal)", DS4_SET(o.stats = v.on), true},
  {"--no-stats", "", "none", DS4_SET(o.stats = false)},
  {"--color", "WHEN", "auto, always, never; NO_COLOR and TERM=dumb are honoured",
   DS4_SET(o.color = ColorMode(v.choice("auto|always|never")))},
  {"-q, --quiet", "", "no notes, warnings, progress or statistics on stderr", DS4_SET(g_quiet = v.on; o.verbose = false; o.stats = false)},
  {"-v, --verbose", "", "details of loading, time per section, token tables", DS4_SET(o.verbose = v.on; g_quiet = false)},

  {"", "", "#Other commands"},
  {"--script", "FILE", "run prompts with expectations (JSON lines), greedy by default; exit code 3 if one fails",
   DS4_SET(set_command(o, Command::script, v))},
  {"--update", "", "with --script: write what was observed into the file", DS4_SET(o.update = v.on)},
  {"--inspect", "", "describe the model: shape, tokenizer, types, memory; with --json as an object",
   DS4_SET(set_command(o, Command::inspect, v))},
  {"--check", "", "search all tensors for values that are not finite", DS4_SET(set_command(o, Command::check, v))},
  {"--dump-tokens", "", "the prompt's token ids as JSON", DS4_SET(set_command(o, Command::dump_tokens, v))},
  {"--dump-logits", "FILE", "float32 logits of every prompt position ('-': stdout)", DS4_SET(set_command(o, Command::dump_logits, v))},
  {"--dump-logprobs", "FILE", "log-probabilities of every generated token as JSON ('-': stdout)",
   DS4_SET(set_command(o, Command::dump_logprobs, v))},
  {"--dump-taps", "DIR", "intermediate tensors of the prompt, one file each", DS4_SET(set_command(o, Command::dump_taps, v))},
  {"--perplexity-file", "FILE", "perplexity of a text in windows of --ctx tokens", DS4_SET(set_command(o, Command::perplexity, v))},
  {"--bench", "[WHAT]", "measure memory (with -m also its weights), kernels, model (default), sampler, tokenizer or profile",
   DS4_SET(set_command(o, Command::bench, v); if (!v.text.empty()) v.choice("memory|kernels|model|sampler|tokenizer|profile"))},
  {"-h, --help", "", "this text", DS4_SET(o.command = Command::help)},
  {"--version", "", "version and kernel sets", DS4_SET(o.command = Command::version)},
};
#undef DS4_SET
constexpr size_t kOptionCount = sizeof kOptions / sizeof kOptions[0];

// The place of an option by one of its names ("-m", "--model"); SIZE_MAX if there is none.
static size_t find_option(std::string_view name) {
  for (size_t i = 0; i < kOptionCount; i++)
    for (const std::string_view one : parts_of(kOptions[i].names, ", "))
      if (one == name && !name.empty()) return i;
  return SIZE_MAX;
}

static bool was_given(const Options& o, std::string_view name) { return o.given[find_option(name)] > 0; }

// Fills Options from the command line. Throws usage errors.
static Options parse_options(int argc, char** argv) {
  Options o;
  o.given.assign(kOptionCount, 0);
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    const size_t equals = word.compare(0, 2, "--") == 0 ? word.find('=') : std::string::npos;
    const size_t k = find_option(word.substr(0, equals));
    if (k == SIZE_MAX) {
      if (!word.empty() && word[0] == '-') fail_usage("unknown option '%s'; --help lists them", word.c_str());
      fail_usage("'%s' is no option; the prompt goes after -p, the model after -m", word.c_str());
    }
    const Option& option = kOptions[k];
    OptionValue v{word.substr(0, equals), "", true};
    const bool wants = option.arg[0] && option.arg[0] != '[';
    if (equals != std::string::npos) {
      if (!option.arg[0]) fail_usage("%s takes no value", v.name.c_str());
      v.text = word.substr(equals + 1);
    } else if (wants) {
      if (i + 1 >= argc) fail_usage("%s: a value (%s) is missing", v.name.c_str(), option.arg);
      v.text = argv[++i];
    } else if (option.arg[0] && i + 1 < argc && argv[i + 1][0] != '-') {
      v.text = argv[++i];
    }
    for (const char* name : {"FILE", "DIR"})
      if (v.text.empty() && !std::strcmp(option.arg, name)) fail_usage("%s: the name (%s) is empty", v.name.c_str(), name);
    option.apply(o, v);
    o.given[k]++;
  }
  return o;
}

// Refuses the likeliest of what would silently do nothing: an option without the one it belongs to, a part of a prompt beside
// a whole one, a prompt nobody reads. A setting that has no effect may come from an alias and passes.
static void check_partners(const Options& o) {
  if (was_given(o, "--logprobs") && !o.json && o.command != Command::dump_logprobs)
    fail_usage("--logprobs needs --json or --dump-logprobs");
  for (const char* name : {"--no-bos", "--no-special"})
    if (was_given(o, name) && !o.raw) fail_usage("%s needs --raw", name);
  if (o.update && o.command != Command::script) fail_usage("--update needs --script");
  if (o.update && o.command_arg == "-") fail_usage("--update needs a script in a file");
  const auto refuse = [&](std::initializer_list<const char*> names, std::initializer_list<const char*> others, const char* why) {
    for (const char* name : names)
      for (const char* other : others)
        if (was_given(o, name) && was_given(o, other)) fail_usage("%s and %s: %s", name, other, why);
  };
  const auto prompts = {"-p", "-f", "--prompt-tokens", "--messages", "--raw", "-sys", "-sysf", "--tools"};
  for (const char* name : prompts)
    if (const size_t k = find_option(name); o.given[k] > 1 && kOptions[k].arg[0]) fail_usage("%s is given twice, expected once", name);
  refuse(prompts, {"--script"}, "a script has its own prompts");
  refuse({"-p", "-f", "--messages", "--raw", "-sys", "-sysf", "--tools"}, {"--prompt-tokens"}, "the ids are the whole prompt");
  refuse({"--messages", "-sys", "-sysf", "--tools"}, {"--raw"}, "there is no chat template to put it in");
  refuse({"-sys"}, {"-sysf"}, "there is one system prompt");
  refuse(prompts, {"--inspect", "--check", "--perplexity-file"}, "no prompt is read");
  refuse({"-p", "--prompt-tokens", "--messages", "--raw", "-sys", "-sysf", "--tools"}, {"--bench"}, "no prompt is read");
  if (o.command_arg != "tokenizer") refuse({"-f"}, {"--bench"}, "only --bench tokenizer reads a text");
  refuse({"--json"}, {"--dump-tokens", "--dump-logits", "--dump-logprobs", "--dump-taps"}, "a dump has its own format");
  if (o.think == Think::max) refuse({"--effort"}, {"--think-max"}, "both say how much to reason");
}

// The option table as text: two columns, names padded.
static std::string help_text() {
  std::string s =
      "ds4 [options]                       chat in the terminal\n"
      "ds4 [options] -p TEXT               one prompt, one answer\n"
      "ds4 [options] -f FILE               the same from a file; '-f -' or a pipe: from stdin\n"
      "ds4 [options] --script FILE.jsonl   many prompts with expectations\n";
  for (const Option& option : kOptions) {
    if (option.help[0] == '#') {
      s += format("\n%s\n", option.help + 1);
      continue;
    }
    const std::string left = std::string(option.names[1] == '-' ? "    " : "") + option.names + " " + option.arg;
    s += format("  %-28s %s\n", left.c_str(), option.help);
  }
  return s + "\nOf a setting given twice the last counts, also of --think and --nothink, -q and -v; a second prompt or command is refused.\n"
             "\nExit codes: 0 done, 1 bad input, 2 bad usage, 3 an expectation failed, 4 numerical fault, 130 interrupted.\n";
}

// -- what commands work on ----

// Loads the file, vocabulary, weights and cache, each when it is first asked for.
class Runtime {
 public:
  explicit Runtime(Options o) : o_(std::move(o)) {}
  const Options& options() const { return o_; }
  Options& options() { return o_; }

  const Gguf& file() {
    if (!file_) file_.emplace(model_path(), o_.gguf);
    return *file_;
  }
  const Vocab& vocab() {
    if (!vocab_) vocab_.emplace(file());
    return *vocab_;
  }
  Tokenizer& tokenizer() {
    if (!tokenizer_) tokenizer_.emplace(vocab());
    return *tokenizer_;
  }
  const Model& model() {
    if (model_) return *model_;
    model_.emplace(load_model(file()));
    if (o_.mlock_dense) lock_dense_weights(*model_);
    return *model_;
  }
  const Kernels* kernels() const {
    const Kernels* k = o_.isa.empty() ? best_kernels() : find_kernels(o_.isa);
    if (!k) fail_usage("--isa %s: this CPU or build has %s", o_.isa.c_str(), isa_names().c_str());
    return k;
  }
  // The options of a run as they will be: kernels, threads and context decided.
  RunOptions run_options() {
    RunOptions r = o_.run;
    r.kernels = kernels();
    const uint64_t most = model().shape.n_ctx_train;
    if (r.ctx > most && was_given(o_, "--ctx"))
      warn_once(format("--ctx %u is more than the model's %llu tokens, which it is now", r.ctx, ull(most)));
    r = resolve(r, model().shape);
    if (r.threads > physical_cores())
      warn_once(format("%d threads on %s: more threads than cores are slower", r.threads, counted(uint64_t(physical_cores()), "core").c_str()));
    return r;
  }
  Session& session() {
    if (session_) return *session_;
    if (vocab().size() != int32_t(model().shape.n_vocab))
      fail("%s: the vocabulary has %d tokens, the weights %u rows", file().path().c_str(), vocab().size(), model().shape.n_vocab);
    const RunOptions r = run_options();
    if (o_.verbose || g_streams.err_tty) {
      const MemoryPlan plan = memory_plan(model(), r);
      note("%s: %s %s; context %u: %s cache, %s scratch; %s, %s", file().path().c_str(),
           size_text(plan.weights).c_str(), o_.gguf.no_mmap ? "read" : "mapped", r.ctx, size_text(plan.cache).c_str(), size_text(plan.scratch).c_str(),
           counted(uint64_t(r.threads), "thread").c_str(), r.kernels->name);
    }
    open_session(r);
    return *session_;
  }
  // Another context: the old cache stays if the new one can't be had.
  void resize(uint32_t ctx) {
    const uint32_t before = o_.run.ctx;
    o_.run.ctx = ctx;
    try {
      open_session(run_options());
    } catch (...) {
      o_.run.ctx = before;
      throw;
    }
  }
  // Seconds of each part of the computation since the last call; only with --verbose.
  Profile take_profile() { return std::exchange(profile_, Profile()); }
  // What measurements depend on.
  Json facts() {
    const RunOptions r = engine_ ? engine_->options() : run_options();
    return Json::object().set("threads", r.threads).set("isa", r.kernels->name).set("file", file().path());
  }

  void warn_once(const std::string& message) {
    if (std::find(warned_.begin(), warned_.end(), message) != warned_.end()) return;
    warned_.push_back(message);
    warn("%s", message.c_str());
  }

  static std::string isa_names() {
    std::string s;
    for (const Kernels* k : usable_kernels()) s += (s.empty() ? "" : ", ") + std::string(k->name);
    return s;
  }
  static std::string size_text(uint64_t nbytes) {
    const double v = double(nbytes);
    return v < 1e6 ? format("%.1f kB", v / 1e3) : v < 1e9 ? format("%.1f MB", v / 1e6) : format("%.2f GB", v / 1e9);
  }

  // The file that --model, --demo, $DS4_MODEL or the default name means; an Error when there is none.
  std::string model_path() const {
    if (!o_.model.empty()) return o_.model;
    if (o_.demo) {
      constexpr char kNano[] = "tests/data/nano.gguf";
      if (access(kNano, F_OK) != 0) fail("--demo: no %s here; run it in the directory of ds4's source, or name a file with --model", kNano);
      return kNano;
    }
    if (const char* path = std::getenv("DS4_MODEL"); path && *path) return path;
    if (access("ds4flash.gguf", F_OK) == 0) return "ds4flash.gguf";
    fail("no model: name a DeepSeek V4 GGUF with -m FILE or $DS4_MODEL, or link it as ./ds4flash.gguf "
         "(Hugging Face has DeepSeek-V4-Flash GGUF files); 'make demo' in ds4's source needs none");
  }

 private:
  void open_session(const RunOptions& r) {
    auto engine = std::make_unique<Engine>(model(), r);
    session_ = std::make_unique<Session>(*engine, vocab(), &g_interrupted);
    engine_ = std::move(engine);
    if (o_.verbose) engine_->set_profile(&profile_);
  }
  Options o_;
  std::optional<Gguf> file_;
  std::optional<Vocab> vocab_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<Model> model_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Session> session_;
  Profile profile_;                            // with --verbose
  std::vector<std::string> warned_;
};

// -- prompts ----

// A prompt as ids, and how the reply to it is to be read.
struct Request {
  std::vector<int32_t> ids;
  bool parse = true, thinking = false, tools = false;
};

constexpr uint32_t kThinkMaxContext = 393216;

static ChatOptions chat_options(Runtime& rt, Think think, bool keep_thinking) {
  const Options& o = rt.options();
  ChatOptions c;
  c.thinking = think != Think::off;
  c.drop_thinking = !keep_thinking;
  c.profile = o.profile ? *o.profile
                        : detect_effort_profile(rt.file().find_string("tokenizer.chat_template").value_or(""),
                                                rt.file().find_string("general.name").value_or(""));
  c.effort = o.effort;
  if (think == Think::max) {
    if (o.command == Command::dump_tokens || rt.run_options().ctx >= kThinkMaxContext) c.effort = Effort::kMax;
    else rt.warn_once("--think-max needs a context of 393216 tokens and has less: plain thinking");
  }
  return c;
}

static std::vector<int32_t> encode_prompt(Runtime& rt, const Prompt& prompt) {
  std::vector<int32_t> ids;
  const std::vector<Chunk> chunks = prompt.chunks();
  rt.tokenizer().encode_chunks(chunks.data(), chunks.size(), ids);
  return ids;
}

// An assistant's text at the end is the beginning of the answer: its turn stays open. Throws Error where nothing is asked.
static Request chat_request(Runtime& rt, Json messages, const ChatOptions& c) {
  const size_t n = messages.size(), n_given = n - c.n_before;
  const bool asks = rt.options().command != Command::dump_tokens;
  if (asks && n_given == 0) fail("%s: no messages", c.source.c_str());
  const Json* role = n ? messages[n - 1].find("role") : nullptr;       // render_chat checks its type
  const bool calls = role && messages[n - 1].find_truthy("tool_calls");
  if (asks && role && (calls || role->text() == "system"))
    fail("%s[%zu]: the last message is of role %s, expected %s after it", c.source.c_str(), n_given - 1, role->text().c_str(),
         calls ? "the results of its calls" : "a message to answer");
  if (role && role->text() == "assistant" && !calls) messages.item(n - 1).set("wo_eos", true);
  Request r;
  r.ids = encode_prompt(rt, render_chat(messages, c));
  r.thinking = !r.ids.empty() && r.ids.back() == rt.vocab().find(kThinkText);
  r.tools = has_tools(messages);
  return r;
}

static Json read_json_array(const std::string& path) {
  Json array = Json::parse(read_file(path), path);
  return array.as_array(path), array;
}

static Json load_tools(const std::string& path) {
  Json tools = read_json_array(path);
  for (size_t i = 0; i < tools.size(); i++) tool_function(tools[i], path + format("[%zu]", i));
  return tools;
}

static Json with_system(Json messages, const std::string& system) {
  return messages.insert(0, chat_message("system", system)), messages;
}

// Token ids as a JSON array or separated by white space.
static std::vector<int32_t> parse_ids(std::string_view text, const std::string& what, int32_t n_vocab) {
  std::vector<int32_t> ids;
  const auto add = [&](const Json& v) {
    const int64_t id = v.as_int(what + format(": token %zu", ids.size()));
    if (id < 0 || id >= n_vocab)
      fail("%s: token %zu is %lld, expected 0 to %d", what.c_str(), ids.size(), (long long)id, n_vocab - 1);
    ids.push_back(int32_t(id));
  };
  constexpr std::string_view kSpace = " \t\r\n";
  size_t at = text.find_first_not_of(kSpace);
  if (at != text.npos && text[at] == '[') {
    const Json array = Json::parse(text, what);
    for (const Json& v : array.items()) add(v);
    return ids;
  }
  while (at != text.npos) {
    const size_t end = std::min(text.find_first_of(kSpace, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    add(word.find_first_not_of("0123456789") == word.npos ? Json::number(std::string(word)) : Json(word));
    at = text.find_first_not_of(kSpace, end);
  }
  return ids;
}

static Json ids_json(const std::vector<int32_t>& ids) {
  Json out = Json::array();
  for (const int32_t id : ids) out.push(id);
  return out;
}

// The text of -p and -f together: TEXT, a blank line, the file. A piped stdin is read when nothing else is given.
static std::optional<std::string> prompt_text(const Options& o) {
  const auto from_file = [&](const std::string& path) { return o.raw ? read_file(path) : read_text(path); };
  if (o.prompt && o.prompt_file) return *o.prompt + "\n\n" + from_file(*o.prompt_file);
  if (o.prompt) return o.prompt;
  if (o.prompt_file) return from_file(*o.prompt_file);
  if (!o.messages && !o.prompt_tokens && !g_streams.in_tty) return from_file("-");
  return std::nullopt;
}

// The request of a one-shot run. Throws a usage error when there is no prompt or it is empty.
static Request one_shot_request(Runtime& rt) {
  const Options& o = rt.options();
  rt.model_path();                                // who has no model learns that first, not that stdin is empty
  const std::optional<std::string> text = prompt_text(o);
  const bool may_be_empty = o.command == Command::dump_tokens;
  if (!may_be_empty && text && text->empty()) fail_usage("the prompt is empty");
  if (!text && !o.messages && !o.prompt_tokens) fail_usage("no prompt: give one with -p, -f, --messages or --prompt-tokens");
  Request r;
  if (o.prompt_tokens) {
    r.ids = parse_ids(read_file(*o.prompt_tokens), *o.prompt_tokens, rt.vocab().size());
    r.parse = false;
  } else if (o.raw) {
    if (o.no_special) rt.tokenizer().encode_plain(*text, r.ids);
    else rt.tokenizer().encode_raw(*text, r.ids);
    const int32_t bos = rt.vocab().bos;
    if (!o.no_bos && bos >= 0 && (r.ids.empty() || r.ids[0] != bos)) r.ids.insert(r.ids.begin(), bos);
    r.parse = false;
  } else {
    Json messages = o.messages ? read_json_array(*o.messages) : Json::array();
    if (text) messages.push(chat_message("user", *text));
    const size_t n_given = messages.size();
    if (o.system) messages = with_system(std::move(messages), *o.system);
    if (o.tools) messages = with_tools(std::move(messages), load_tools(*o.tools));
    ChatOptions c = chat_options(rt, o.think, o.keep_thinking);
    if (o.messages) c.source = *o.messages;
    c.n_before = messages.size() - n_given;
    r = chat_request(rt, messages, c);
  }
  if (!may_be_empty && r.ids.empty()) fail_usage("the prompt is empty");
  return r;
}

static GenerateOptions generate_options(const Options& o, const Request& r) {
  GenerateOptions g = o.generate;
  g.parse = r.parse;
  g.thinking = r.thinking;
  g.tools = r.tools;
  return g;
}

// -- showing answers ----

// Shows an answer as it comes: text on stdout; reasoning dimmed there on a terminal, else on stderr. Nothing with --json and
// --dump-logprobs.
class AnswerPrinter {
 public:
  explicit AnswerPrinter(const Options& o) : silent_(o.json || o.command == Command::dump_logprobs), hide_(o.hide_think) {}
  void show(std::string_view piece, bool reasoning) {
    if (silent_ || (reasoning && hide_)) return;
    if (reasoning != reasoning_) switch_to(reasoning);
    put((reasoning ? thought_ : text_).push(piece), reasoning);
  }
  void finish() {
    if (silent_) return;
    put((reasoning_ ? thought_ : text_).flush(), reasoning_);
    if (reasoning_) switch_to(false);
    if (last_ != '\n' && last_ != 0) put("\n", false);
  }

 private:
  void switch_to(bool reasoning) {
    if (!reasoning) {
      put(thought_.flush(), true);
      if (g_streams.out_tty || !g_quiet) put(g_streams.out_tty ? "\n\n" : "\n", true);
    }
    const char* dim = reasoning ? "\x1b[2m" : "\x1b[0m";
    if (g_streams.out_color) write_out(dim);
    else if (!g_streams.out_tty && g_streams.err_color && !g_quiet) std::fputs(dim, stderr);
    reasoning_ = reasoning;
  }
  void put(const std::string& s, bool reasoning) {
    if (s.empty()) return;
    if (!reasoning) last_ = s.back();
    if (!reasoning || g_streams.out_tty) return write_out(g_streams.out_tty ? terminal_safe(s) : s);
    if (!g_quiet) std::fputs((g_streams.err_tty ? terminal_safe(s) : s).c_str(), stderr);
  }
  bool silent_, hide_, reasoning_ = false;
  char last_ = 0;
  Utf8Stream text_, thought_;
};

static std::string hash_text(uint64_t hash) { return format("%08x", uint32_t(hash)); }

static bool wants_stats(const Options& o) { return o.stats.value_or(g_streams.err_tty); }

// "prompt 52 tok 31.2 t/s | answer 118 tok 9.4 t/s 15.1 GB/s | ctx 170/32768 | #1f3a9c02"; the prompt without what the
// cache held. The last token of a full context was sampled but has no place in it.
static std::string stats_line(Runtime& rt, const Answer& a) {
  const size_t n = a.tokens.size(), ctx = rt.session().engine().ctx();
  const auto rate = [](size_t count, double seconds) { return seconds > 0 ? double(count) / seconds : 0.0; };
  // The first token comes from the prompt's last logits; an interrupted answer was about to get one more.
  const double speed = rate(n - (n && a.finish != Finish::interrupted), a.seconds);
  return format("prompt %zu tok %.1f t/s | answer %zu tok %.1f t/s %.1f GB/s | ctx %zu/%zu | #%s", a.read_tokens,
                rate(a.read_tokens, a.prompt_seconds), n, speed, speed * double(bytes_per_token(rt.model())) / 1e9,
                std::min(a.cached_tokens + a.read_tokens + n, ctx), ctx, hash_text(a.hash).c_str());
}

// What is wanted of the statistics line and of the time per section.
static void print_stats(Runtime& rt, const Answer& a) {
  if (wants_stats(rt.options())) tell("%s", stats_line(rt, a).c_str());
  if (!rt.options().verbose) return;
  const Profile profile = rt.take_profile();
  for (int p = 0; p < kParts; p++) note("  %-18s %10.1f ms", kPartNames[p], 1e3 * profile.seconds[p]);
}

// A number, or null where there is none (JSON has no NaN).
static Json fixed(double v, int digits = 2) { return std::isfinite(v) ? Json::number(format("%.*f", digits, v)) : Json(); }

static Json token_json(const Vocab& vocab, const LogProb& t) {
  std::string bytes;
  vocab.append_bytes(t.id, bytes);
  return Json::object().set("id", t.id).set("text", bytes).set("logprob", fixed(double(t.value), 6));
}

static Json logprobs_json(const Vocab& vocab, const std::vector<TokenLogprobs>& list) {
  Json out = Json::array();
  for (const TokenLogprobs& t : list) {
    Json top = Json::array();
    for (const LogProb& best : t.top) top.push(token_json(vocab, best));
    out.push(token_json(vocab, t.chosen).set("top", std::move(top)));
  }
  return out;
}

static Json answer_json(Runtime& rt, const Answer& a, const GenerateOptions& g, uint64_t seed) {
  Json j = Json::object();
  j.set("text", a.reply.text);
  if (g.thinking && !rt.options().hide_think) j.set("reasoning", a.reply.reasoning);
  if (!a.reply.calls.empty()) j.set("tool_calls", tool_calls_json(a.reply.calls));
  j.set("finish", finish_name(a.finish)).set("prompt_tokens", a.prompt_tokens).set("cached_tokens", a.cached_tokens);
  j.set("completion_tokens", a.tokens.size());
  j.set("prompt_ms", fixed(1e3 * a.prompt_seconds, 3)).set("completion_ms", fixed(1e3 * a.seconds, 3));
  j.set("seed", seed).set("hash", hash_text(a.hash));
  if (g.n_logprobs >= 0) j.set("logprobs", logprobs_json(rt.vocab(), a.logprobs));
  return j;
}

static uint64_t random_seed() {
  uint32_t seed = 0;                           // short enough to be typed again
  if (getentropy(&seed, sizeof seed) != 0) seed = uint32_t(uint64_t(now_seconds() * 1e9)) ^ uint32_t(getpid()) << 16;
  return seed;
}

// Runs a request and shows its answer.
static Answer run_request(Runtime& rt, const Request& r, Rng& rng, AnswerPrinter& printer) {
  Progress progress;
  const auto show = [&](std::string_view piece, bool reasoning) {
    progress.clear();
    printer.show(piece, reasoning);
  };
  Answer a;
  try {
    a = rt.session().answer(r.ids, generate_options(rt.options(), r), rng, show,
                            [&](size_t done, size_t total) { progress.show(done, total); });
  } catch (const std::exception&) {
    progress.clear();
    printer.finish();
    throw;
  }
  progress.clear();
  printer.finish();
  return a;
}

// Says what stdout does not: tool calls, and why an answer ended when that is not its natural end.
static void explain_finish(Runtime& rt, const Answer& a) {
  const uint32_t ctx = rt.session().engine().ctx();
  if (!rt.options().json)
    for (const ToolCall& call : a.reply.calls)
      note("call %s: %s %s", call.id.c_str(), call.name.c_str(), call.arguments.dump().c_str());
  if (a.finish == Finish::context)
    note("ds4: the context of %s is full, %zu of them the prompt's; %s", counted(ctx, "token").c_str(), a.prompt_tokens, rt.session().room_for_more().c_str());
  if (a.finish == Finish::length && !rt.options().json)
    note("ds4: stopped after %s (-n)", counted(a.tokens.size(), "token").c_str());
  if (a.finish == Finish::loop) note("ds4: stopped: the answer repeats itself (--loop-stop)");
  if (a.finish == Finish::fault)
    print_error(format("numerical fault: none of the %u logits is finite; --check looks for broken weights", rt.model().shape.n_vocab));
}

static int exit_code(Finish f) { return f == Finish::fault ? kExitFault : f == Finish::interrupted ? kExitInterrupted : kExitOk; }

// One prompt, one answer: shown, as JSON on stdout, or with --dump-logprobs as JSON in a file.
static int run_one_shot(Runtime& rt) {
  Options& o = rt.options();
  const Request r = one_shot_request(rt);
  const bool dump = o.command == Command::dump_logprobs;
  o.generate.hash = dump || o.json || wants_stats(o);
  if (dump && !was_given(o, "--logprobs")) o.generate.n_logprobs = 10;
  rt.session();
  std::optional<OutputFile> file;
  if (dump) file.emplace(o.command_arg);
  InterruptScope interrupts;
  const uint64_t seed = o.seed.value_or(random_seed());
  Rng rng(seed);
  AnswerPrinter printer(o);
  const Answer a = run_request(rt, r, rng, printer);
  if (dump) {
    Json j = Json::object().set("finish", finish_name(a.finish)).set("seed", seed).set("hash", hash_text(a.hash));
    file->write(j.set("tokens", logprobs_json(rt.vocab(), a.logprobs)).dump() + "\n");
    file->close();
  } else if (o.json) {
    write_out(answer_json(rt, a, generate_options(o, r), seed).dump() + "\n");
  }
  explain_finish(rt, a);
  if (!o.seed && o.generate.sampler.temp > 0 && !o.json && !dump) note("seed %llu", ull(seed));
  print_stats(rt, a);
  return exit_code(a.finish);
}

// -- scripts ----

// One case of a script file: what to ask, and what to expect. Its own keys give the defaults, options of the command
// line win.
struct ScriptCase {
  Json json;
  size_t line = 0;                             // from 1
  std::string name, what;                      // what: "FILE: line 3 (name)", for messages
  Request request;
  uint32_t ctx = 0;
  GenerateOptions generate;
  uint64_t seed = 0;
  std::vector<int32_t> expected;               // of "tokens_out"
};

// A case with all its keys checked, and its prompt as ids. Nothing is computed yet.
static ScriptCase read_case(Runtime& rt, Json json, size_t line, uint32_t default_ctx) {
  Options o = rt.options();                    // as the keys and the command line want them
  ScriptCase c;
  c.line = line;
  std::string& what = c.what = format("%s: line %zu", o.command_arg.c_str(), line);
  c.json = std::move(json);
  c.json.as_object(what);
  c.name = c.json.string_or("name", "", what);
  if (!c.name.empty()) what += " (" + c.name + ")";
  const auto named = [&](const char* key) { return member_name(what, key); };
  constexpr const char* kKeys[] = {"name", "prompt", "messages", "system", "tokens_in", "ctx", "think", "n", "temp", "top_k", "top_p", "min_p", "seed", "stop",
                                   "text", "contains", "facts", "tokens_out", "hash", "finish"};
  for (size_t i = 0; i < c.json.size(); i++)       // a misspelt expectation would always hold
    if (std::find(std::begin(kKeys), std::end(kKeys), c.json.key(i)) == std::end(kKeys))
      warn("%s: the key \"%s\" is unknown and does nothing", what.c_str(), printable(c.json.key(i)).c_str());

  o.run.ctx = default_ctx;
  if (!was_given(o, "--temp")) o.generate.sampler.temp = 0;
  const auto apply = [&](const char* key, const char* option, const std::string& value) {
    kOptions[find_option(option)].apply(o, {named(key), value});
  };
  constexpr const char* kSettings[][2] = {{"ctx", "--ctx"}, {"n", "-n"}, {"temp", "--temp"}, {"top_k", "--top-k"}, {"top_p", "--top-p"}, {"min_p", "--min-p"}, {"seed", "--seed"}};
  for (const auto& [key, option] : kSettings)
    if (const Json* v = c.json.find(key)) {
      v->as_double(named(key));                // a number even where it does not count
      if (!was_given(o, option)) apply(key, option, v->text());
    }
  if (const Json* stop = c.json.find("stop"); stop && !was_given(o, "--stop")) {
    const Json one = Json::array().push(*stop);
    for (const Json& s : (stop->is_string() ? one : stop->as_array(named("stop"))).items())
      apply("stop", "--stop", s.as_string(named("stop")));
  }
  c.ctx = rt.options().run.ctx = o.run.ctx;    // there for chat_options
  c.seed = o.seed.value_or(0);

  const Json *tokens = c.json.find("tokens_in"), *given = c.json.find("messages"), *prompt = c.json.find("prompt");
  if (const int n = !!tokens + !!given + !!prompt; n != 1)
    fail("%s: %d of \"prompt\", \"messages\" and \"tokens_in\", expected one", what.c_str(), n);
  if (tokens && c.json.find("system")) fail("%s: \"system\" beside \"tokens_in\", expected one of them", what.c_str());
  Think think = c.json.bool_or("think", false, what) ? Think::on : Think::off;
  if (was_given(o, "--think") || was_given(o, "--nothink") || was_given(o, "--think-max")) think = o.think;
  if (tokens) {
    c.request.ids = parse_ids(tokens->as_array(named("tokens_in")).dump(), named("tokens_in"), rt.vocab().size());
    c.request.parse = false;
  } else {
    Json messages = given ? given->as_array(named("messages")) : Json::array().push(chat_message("user", prompt->as_string(named("prompt"))));
    const size_t n_given = messages.size();
    if (c.json.find("system")) messages = with_system(std::move(messages), c.json.string_or("system", "", what));
    ChatOptions chat = chat_options(rt, think, o.keep_thinking);
    chat.source = what;
    chat.n_before = messages.size() - n_given;
    c.request = chat_request(rt, messages, chat);
  }
  if (c.request.ids.empty()) fail("%s: the prompt is empty", what.c_str());
  c.generate = generate_options(o, c.request);

  for (const char* key : {"text", "hash"}) c.json.string_or(key, "", what);
  if (const Json* parts = c.json.find("contains"))
    for (const Json& part : parts->as_array(named("contains")).items()) part.as_string(named("contains"));
  if (const Json* facts = c.json.find("facts"))
    for (const Json& fact : facts->as_object(named("facts")).items())
      if (!fact.is_string()) fact.as_double(named("facts"));
  if (const Json* ids = c.json.find("tokens_out")) c.expected = parse_ids(ids->as_array(named("tokens_out")).dump(), named("tokens_out"), INT32_MAX);
  if (const std::string finish = c.json.string_or("finish", "", what); !finish.empty())
    OptionValue{named("finish"), finish}.choice("stop|length|context|loop|stop-text|tool_calls");
  return c;
}

// The text from byte `at` on as it may stand in a message of one line.
static std::string excerpt(std::string_view text, size_t at, size_t most = 40) {
  return at >= text.size() ? "the end" : Json(text.substr(at, most)).dump() + (text.size() > at + most ? "..." : "");
}

// "" or why the reply does not hold the facts: of its lines, trimmed, exactly one is Name=number, and none gives the name
// another number.
static std::string facts_failure(std::string_view reply, const Json& facts) {
  const auto trim = [](std::string_view s) {
    const size_t b = std::min(s.find_first_not_of(" \t\r"), s.size());
    return s.substr(b, s.find_last_not_of(" \t\r") + 1 - b);
  };
  for (size_t i = 0; i < facts.size(); i++) {
    const std::string& name = facts.key(i);
    const std::string wanted = name + "=" + facts[i].text();
    size_t exact = 0, other = 0;
    std::string got;
    for (std::string_view line : parts_of(reply, "\n")) {
      line = trim(line);
      const size_t equals = line.find('=');
      if (equals == line.npos || trim(line.substr(0, equals)) != name) continue;
      exact += line == wanted;
      other += trim(line.substr(equals + 1)) != facts[i].text();
      got += (got.empty() ? "" : " and ") + std::string(line);
    }
    if (exact != 1 || other) return "facts: " + (got.empty() ? name + " is missing" : got) + ", expected one line " + wanted;
  }
  return "";
}

// The first difference between two token lists, with both margins: how sure the model was of its token, and how far it
// put the expected one below.
static std::string token_difference(const Vocab& vocab, const Answer& a, const std::vector<int32_t>& expected) {
  const size_t at = a.first_difference;
  const auto shown = [&](const std::vector<int32_t>& ids) -> std::string {
    if (at >= ids.size()) return "the end";
    std::string bytes;
    vocab.append_bytes(ids[at], bytes);
    return format("%d %s", ids[at], Json(bytes).dump().c_str());
  };
  if (at == SIZE_MAX) return format("tokens_out: %s, expected %zu", counted(a.tokens.size(), "token").c_str(), expected.size());
  std::string s = format("tokens_out[%zu]: %s, expected %s", at, shown(a.tokens).c_str(), shown(expected).c_str());
  s += format(" (margin there %.3f", double(a.difference_margin));
  if (std::isfinite(a.difference_gap)) s += format(", the expected token %.3f below the sampled one", double(a.difference_gap));
  return s + ")";
}

// "" when every expectation of the case holds, else why not.
static std::string case_failure(const Vocab& vocab, const ScriptCase& c, const Answer& a) {
  const std::string& text = a.reply.text;
  std::vector<std::string> why;
  if (c.json.find("tokens_out") && a.tokens != c.expected) why.push_back(token_difference(vocab, a, c.expected));
  if (const Json* t = c.json.find("text"); t && t->text() != text) {
    const std::string& wanted = t->text();
    const size_t at =
        size_t(std::mismatch(text.begin(), text.begin() + ptrdiff_t(std::min(text.size(), wanted.size())), wanted.begin()).first -
               text.begin());
    why.push_back(format("text: at byte %zu %s, expected %s", at, excerpt(text, at).c_str(), excerpt(wanted, at).c_str()));
  }
  if (const Json* parts = c.json.find("contains"))
    for (const Json& part : parts->items())
      if (text.find(part.text()) == text.npos) why.push_back("contains: no " + part.dump() + " in the text");
  if (const Json* facts = c.json.find("facts"))
    if (const std::string s = facts_failure(text, *facts); !s.empty()) why.push_back(s);
  if (const std::string h = c.json.string_or("hash", "", c.what); !h.empty() && h != hash_text(a.hash))
    why.push_back("hash: " + hash_text(a.hash) + ", expected " + h);
  const std::string finish = c.json.string_or("finish", "", c.what);
  if (finish.empty() ? a.finish == Finish::fault : finish != finish_name(a.finish))
    why.push_back(std::string("finish: ") + finish_name(a.finish) + ", expected " + (finish.empty() ? "no fault" : finish));
  std::string s;
  for (const std::string& w : why) s += (s.empty() ? "" : "; ") + w;
  return s;
}

// The case with what was observed in every expectation it has; one without any gets text and hash.
static Json updated_case(Json j, const Answer& a) {
  const auto has = [&](const char* key) { return j.find(key) != nullptr; };
  const bool none = !has("text") && !has("contains") && !has("facts") && !has("tokens_out") && !has("hash") && !has("finish");
  const std::string& text = a.reply.text;
  if (none || has("text")) j.set("text", text);
  if (none || has("hash")) j.set("hash", hash_text(a.hash));
  if (has("finish")) j.set("finish", finish_name(a.finish));
  if (has("tokens_out")) j.set("tokens_out", ids_json(a.tokens));
  if (Json* parts = j.find("contains"))
    for (size_t i = 0; i < parts->size(); i++)
      if (text.find((*parts)[i].text()) == text.npos) {
        *parts = Json::array().push(text);
        break;
      }
  if (Json* facts = j.find("facts"))
    for (size_t i = 0; i < facts->size(); i++) {
      const size_t at = ("\n" + text).rfind("\n" + facts->key(i) + "=");
      if (at == std::string::npos) continue;
      const size_t from = at + facts->key(i).size() + 1;
      facts->item(i) = Json(text.substr(from, std::min(text.find('\n', from), text.size()) - from));
    }
  return j;
}

struct CaseResult {
  Answer answer;
  std::string why;                             // "": every expectation holds
  bool ran = false;                            // there is an answer to judge
};

static CaseResult run_case(Runtime& rt, const ScriptCase& c) {
  CaseResult r;
  if (std::min(uint64_t(c.ctx), rt.model().shape.n_ctx_train) != rt.session().engine().ctx()) rt.resize(c.ctx);
  Rng rng(c.seed);
  Progress progress;
  try {
    r.answer = rt.session().answer(
        c.request.ids, c.generate, rng, {}, [&](size_t done, size_t total) { progress.show(done, total); },
        c.json.find("tokens_out") ? &c.expected : nullptr);
    r.why = case_failure(rt.vocab(), c, r.answer);
    r.ran = r.answer.finish != Finish::fault;
  } catch (const Error& e) {                   // a prompt longer than the context: the case's fault, not the script's
    r.why = e.what();
  }
  return r;
}

static Json result_json(Runtime& rt, const ScriptCase& c, const CaseResult& r) {
  Json out = Json::object().set("name", c.name).set("pass", r.why.empty());
  if (!r.why.empty()) out.set("why", r.why);
  const Json rest = answer_json(rt, r.answer, c.generate, c.seed);
  for (size_t i = 0; i < rest.size(); i++) out.set(rest.key(i), rest[i]);
  const float margin = std::isfinite(r.answer.margin) ? r.answer.margin : 0.0f;
  return out.set("tokens_out", ids_json(r.answer.tokens)).set("margin", fixed(double(margin), 4));
}

static int run_script(Runtime& rt) {
  const Options& o = rt.options();
  const std::string path = o.command_arg, text = read_file(path);
  const uint32_t default_ctx = o.run.ctx;
  rt.session();
  InterruptScope interrupts;
  std::vector<std::string> lines;
  std::vector<ScriptCase> cases;               // all are read before the first runs: an error in the last line costs nothing
  for (const std::string_view line : parts_of(text, "\n")) {
    lines.emplace_back(line);
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const size_t at = size_t(line.data() - text.data());
    try {
      cases.push_back(read_case(rt, Json::parse(std::string_view(text).substr(0, at + line.size()), path, at), lines.size(), default_ctx));
    } catch (const Error& e) {
      fail("%s", e.what());                    // bad usage of an option is bad input here
    }
  }
  if (lines.back().empty()) lines.pop_back();
  if (cases.empty()) fail("%s: no cases", path.c_str());
  if (o.update) write_file(path, text);        // that it can't be replaced shows now, not after the last case
  OutputFile out("-");
  size_t passed = 0, failed = 0, not_run = 0;
  bool interrupted = false;
  for (const ScriptCase& c : cases) {
    const CaseResult r = run_case(rt, c);
    if ((interrupted = r.answer.finish == Finish::interrupted)) break;
    (r.why.empty() ? passed : failed)++;
    not_run += !r.ran;
    out.write(result_json(rt, c, r).dump() + "\n");
    if (!r.why.empty()) note("FAILED %s", escape_controls((c.name.empty() ? c.what : c.name) + ": " + r.why, "").c_str());
    print_stats(rt, r.answer);
    if (o.update && r.ran) lines[c.line - 1] = updated_case(c.json, r.answer).dump();
  }
  if (o.update && !interrupted) {
    std::string updated;
    for (const std::string& line : lines) updated += line + "\n";
    write_file(path, updated);
    note("updated %s", path.c_str());
  }
  std::fprintf(stderr, "%zu passed, %zu failed\n", passed, failed);
  return interrupted ? kExitInterrupted : (o.update ? not_run : failed) ? kExitMismatch : kExitOk;
}

// -- chat ----

// The conversation in the terminal. `ids_` is the transcript as the model saw it: rendered messages and sampled tokens,
// never sampled tokens rendered again; it covers the first `held_` messages.
class Chat {
 public:
  explicit Chat(Runtime& rt)
      : rt_(rt), o_(rt.options()), seed_(o_.seed.value_or(random_seed())), rng_(seed_), editor_(History::default_path()) {}

  int run() {
    rt_.session();
    InterruptScope interrupts;
    if (o_.tools) tools_ = load_tools(*o_.tools);
    greet();
    bool leaving = false;
    for (;;) {
      Message m = read_message(editor_, "> ");
      const bool empty = m.text.empty() && !m.block;
      const std::string quotes = m.block && m.text[0] == '/' ? "\"\"\"" : "";            // brought back it is no command either
      if (m.input == Input::end) {
        if (empty) return kExitOk;
        m.text.resize(m.text.find_last_not_of('\n') + 1);
        editor_.remember(quotes + m.text);
        note("(not sent%s; Ctrl-D again leaves)", g_streams.editor && !m.text.empty() ? ": Up brings it back" : "");
        leaving = false;
        continue;
      }
      if (m.input == Input::interrupt) {
        if (leaving && empty) return kExitOk;
        leaving = empty;
        if (leaving) note("(Ctrl-C again or Ctrl-D leaves)");
        continue;
      }
      leaving = false;
      if (m.text.find_first_not_of(" \t\r\n") == m.text.npos) continue;
      editor_.remember(quotes + m.text + quotes);
      try {
        if (!m.block && m.text[0] == '/' && m.text.compare(0, 2, "//") != 0 && m.text.find('\n') == m.text.npos) {
          if (!command(m.text)) return kExitOk;
        } else {
          say(!m.block && m.text[0] == '/' ? m.text.substr(1) : m.text);
        }
      } catch (const std::exception& e) {
        print_error(e);
      }
    }
  }

 private:
  struct State {                               // what /regen and an interrupt go back to
    Json messages = Json::array();
    std::vector<int32_t> ids;
    size_t held = 0, n_calls = 0;
    bool open_turn = false;                    // the last answer did not end with the end token
    std::vector<std::string> pending;          // ids of tool calls without a result
  };

  void greet() {
    if (o_.demo) {
      note("Nano, a 4.7 MB toy of DeepSeek V4's architecture: small sums, capitals, memory, 60 names (Clara, Bob, ...).\n"
           "Try  What is 12 + 7?\n"
           "     My name is Clara. What is my name?\n"
           "/help lists commands, Ctrl-D leaves.");
    } else {
      note("ds4 %s. /help lists commands, Ctrl-D leaves.", kVersion);
    }
    if (!o_.seed && o_.generate.sampler.temp > 0) note("seed %llu", ull(seed_));
  }

  // -- turns ----

  void say(const std::string& text) {
    const State before = state_;
    state_.messages.push(chat_message("user", text));
    state_.pending.clear();
    turn(before);
  }

  // Lets the model answer the messages. On an error, or an interrupt before the first token, all is as `before`.
  void turn(const State& before) {
    try {
      Request r;
      const ChatOptions c = chat_options(rt_, o_.think, keep_thinking_);
      Json messages = state_.messages;
      if (o_.system) messages = with_system(std::move(messages), *o_.system);
      if (!tools_.is_null()) messages = with_tools(std::move(messages), tools_);
      const size_t added = messages.size() - state_.messages.size();
      if (!keep_thinking_ || state_.held == 0) {
        r = chat_request(rt_, messages, c);
      } else {
        r.ids = state_.ids;
        const std::vector<int32_t> more = encode_prompt(rt_, render_chat(messages, c, state_.held + added, state_.open_turn));
        r.ids.insert(r.ids.end(), more.begin(), more.end());
        r.thinking = r.ids.back() == rt_.vocab().find(kThinkText);
        r.tools = has_tools(messages);
      }
      o_.generate.first_call = state_.n_calls;
      AnswerPrinter printer(o_);
      last_ = run_request(rt_, r, rng_, printer);
      if (o_.json) write_out(answer_json(rt_, last_, generate_options(o_, r), seed_).dump() + "\n");
      explain_finish(rt_, last_);
      print_stats(rt_, last_);
      InterruptScope::take();
      if (last_.tokens.empty()) {
        if (last_.finish == Finish::interrupted) note("(interrupted before the answer began: the message is taken back)");
        state_ = before;
        return;
      }
      state_.ids = std::move(r.ids);
      state_.ids.insert(state_.ids.end(), last_.tokens.begin(), last_.tokens.end());
      state_.open_turn = last_.tokens.back() != rt_.vocab().eos;
      state_.messages.push(reply_message(last_.reply));
      state_.held = state_.messages.size();
      state_.n_calls += last_.reply.calls.size();
      state_.pending.clear();
      for (const ToolCall& call : last_.reply.calls) state_.pending.push_back(call.id);
      if (!state_.pending.empty()) note("/tool %s gives its result", state_.pending[0].c_str());
      before_ = before;
    } catch (...) {
      InterruptScope::take();
      state_ = before;
      throw;
    }
  }

  // The transcript is rendered anew at the next turn: its beginning has changed.
  void render_again() {
    state_.ids.clear();
    state_.held = 0;
    state_.open_turn = false;
    before_.reset();
  }

  // -- commands ----

  // False when the chat is to end. Throws Error, with nothing changed, for a bad argument.
  bool command(const std::string& line) {
    const size_t space = std::min(line.find(' '), line.size());
    std::string name = line.substr(1, space - 1);
    std::string arg = line.substr(std::min(line.find_first_not_of(' ', space), line.size()));
    arg.resize(arg.find_last_not_of(' ') + 1);
    struct Entry {
      const char *name, *arg, *help;           // as in the option table
      void (Chat::*run)(const std::string&);
    };
    static const Entry kCommands[] = {
      {"help", "", "this list", nullptr},
      {"clear", "", "start anew; system prompt, tools and settings stay", &Chat::clear},
      {"regen", "", "another answer to the last message", &Chat::regenerate},
      {"read", "FILE", "send the text of a file", &Chat::read},
      {"ctx", "N", "another context size", &Chat::resize},
      {"system", "[TEXT]", "another system prompt, or none", &Chat::system},
      {"tools", "[FILE]", "tools the model may call (JSON array), or none", &Chat::tools},
      {"tool", "ID", "give the result of a tool call", &Chat::tool},
      {"think", "", "reason before answering", &Chat::think},
      {"think-max", "", "reason with the greatest effort", &Chat::think_max},
      {"nothink", "", "answer at once", &Chat::no_think},
      {"set", "[NAME VALUE]", "change a setting (temp, top-k, min-p, tokens, seed, ...)", &Chat::set},
      {"show", "", "settings, memory, context", &Chat::show},
      {"stats", "", "statistics of the last answer", &Chat::stats},
      {"quit", "", "leave (also /exit, /bye, Ctrl-D)", nullptr},
    };
    if (name == "exit" || name == "bye") name = "quit";
    for (const Entry& e : kCommands) {
      if (name != e.name) continue;
      if (!e.arg[0] && !arg.empty()) fail("/%s takes no argument", e.name);
      if (e.arg[0] && e.arg[0] != '[' && arg.empty()) fail("usage: /%s %s", e.name, e.arg);
      if (e.run) return (this->*e.run)(arg), true;
      if (name == "quit") return false;
      for (const Entry& c : kCommands) tell("  /%-19s %s", (c.name + std::string(" ") + c.arg).c_str(), c.help);
      tell("  \"\"\" opens and closes a block, \\ at the end continues a line, Ctrl-J makes a new one; //text sends /text");
      return true;
    }
    fail("unknown command /%s; /help lists them, //%s sends it as text", name.c_str(), name.c_str());
  }

  void clear(const std::string&) {
    state_ = State();
    before_.reset();
    note("(new chat)");
  }
  void regenerate(const std::string&) {
    if (!before_) fail("there is no answer to make again");
    if (o_.generate.sampler.temp == 0) note("(at temperature 0 it is the same answer; /set temp 1 makes others)");
    const State now = state_, base = *before_;
    state_ = base;
    state_.messages = Json::array();
    for (size_t i = 0; i + 1 < now.messages.size(); i++) state_.messages.push(now.messages[i]);      // all but the answer
    turn(now);
    before_ = base;
  }
  // Stdin is the chat itself: here "-" is a file's name.
  static std::string chat_path(const std::string& path) { return path == "-" ? "./-" : path; }
  void read(const std::string& path) {
    const std::string text = read_text(chat_path(path));
    if (text.find_first_not_of(" \t\r\n") == text.npos) fail("%s: nothing in it", path.c_str());
    say(text);
  }
  void resize(const std::string& arg) {
    const uint64_t n = OptionValue{"/ctx", arg, true}.uint(1, 1u << 30);
    if (n < state_.ids.size()) fail("/ctx %s: the chat has %zu tokens already", arg.c_str(), state_.ids.size());
    rt_.resize(uint32_t(n));
    const uint32_t ctx = rt_.session().engine().ctx();
    note("(context %u%s; the chat is read again at the next turn)", ctx, ctx < n ? ", the model's most" : "");
  }
  void system(const std::string& text) {
    if (text.empty()) o_.system.reset();
    else o_.system = text;
    render_again();
    note(text.empty() ? "(no system prompt)" : "(system prompt set)");
  }
  void tools(const std::string& path) {
    tools_ = path.empty() ? Json() : load_tools(chat_path(path));
    render_again();
    note(path.empty() ? "(no tools)" : "(tools: %zu)", tools_.size());
  }
  void tool(const std::string& id) {
    const auto it = std::find(state_.pending.begin(), state_.pending.end(), id);
    if (it == state_.pending.end()) {
      std::string open;
      for (const std::string& s : state_.pending) open += " " + s;
      fail("no tool call '%s' waits for a result%s%s", id.c_str(), open.empty() ? "" : "; waiting:", open.c_str());
    }
    Message m = read_message(editor_, "result> ");
    if (m.input != Input::line) fail("no result: %s still waits", id.c_str());
    if (!m.block && m.text[0] == '@') m.text = read_file(chat_path(m.text.substr(1)));
    const State before = state_;
    state_.pending.erase(state_.pending.begin() + (it - state_.pending.begin()));
    state_.messages.push(chat_message("tool", m.text).set("tool_call_id", id));
    if (state_.pending.empty()) turn(before);
    else before_.reset(), note("/tool %s gives the next result", state_.pending[0].c_str());
  }
  void think(const std::string&) { set_think(Think::on, "(thinks before it answers)"); }
  void think_max(const std::string&) {
    if (rt_.session().engine().ctx() < kThinkMaxContext)
      fail("/think-max needs a context of %u tokens, this one has %u", kThinkMaxContext, rt_.session().engine().ctx());
    set_think(Think::max, "(thinks with the greatest effort)");
  }
  void no_think(const std::string&) { set_think(Think::off, "(answers at once)"); }
  // The effort text stands at the beginning of the chat, so a change of it renders the chat again.
  void set_think(Think think, const char* message) {
    const auto prefix = [&] {
      const ChatOptions c = chat_options(rt_, o_.think, true);
      return c.thinking ? effort_text(c.effort, c.profile) : std::string_view();
    };
    const std::string_view before = prefix();
    o_.think = think;
    if (prefix() != before) render_again();
    note("%s", message);
  }
  void set(const std::string& arg) {
    const size_t space = std::min(arg.find(' '), arg.size());
    std::string name = arg.substr(0, space), value = arg.substr(std::min(arg.find_first_not_of(' ', space), arg.size()));
    if (arg.empty()) return show("");
    if (name.compare(0, 2, "--") != 0) name = "--" + name;
    const size_t k = find_option(name);
    if (k == SIZE_MAX || !kOptions[k].in_chat)
      fail("/set: no setting '%s'; /show lists them", arg.substr(0, space).c_str());
    OptionValue v{"/set " + name.substr(2), value, true};
    if (!kOptions[k].arg[0]) {
      if (value != "on" && value != "off") fail("%s: on or off, not '%s'", v.name.c_str(), v.text.c_str());
      v.on = value == "on";
    }
    Options changed = o_;
    if (name == "--stop" && value.empty()) changed.generate.stop.clear();
    else kOptions[k].apply(changed, v);
    const bool again = changed.effort != o_.effort || changed.profile != o_.profile;
    o_ = std::move(changed);
    note("(%s %s)", name.c_str() + 2, value.c_str());
    if (name == "--keep-thinking") keep_thinking_ = v.on;
    if (name == "--seed") rng_ = Rng(seed_ = *o_.seed);
    if (again) render_again();
  }
  void show(const std::string&) {
    const Engine& engine = rt_.session().engine();
    const SamplerParams& s = o_.generate.sampler;
    const MemoryPlan plan = memory_plan(rt_.model(), engine.options());
    tell("  model    %s, %s; cache %s, scratch %s", rt_.file().path().c_str(), Runtime::size_text(plan.weights).c_str(),
         Runtime::size_text(plan.cache).c_str(), Runtime::size_text(plan.scratch).c_str());
    tell("  machine  %s, %s", counted(uint64_t(engine.options().threads), "thread").c_str(), engine.options().kernels->name);
    tell("  context  %zu of %s, %s", state_.ids.size(), counted(engine.ctx(), "token").c_str(), counted(state_.messages.size(), "message").c_str());
    const char *const kThinkNames[] = {"nothink", "think", "think-max"}, *const kEffortNames[] = {"unset", "low", "high", "max"};
    const auto on_off = [](bool on) { return on ? "on" : "off"; };
    tell("  mode     %s, effort %s, keep-thinking %s, hide-think %s", kThinkNames[int(o_.think)],
         kEffortNames[int(o_.effort)], on_off(keep_thinking_), on_off(o_.hide_think));
    std::string order;
    for (size_t i = 0; i < s.order.n; i++) order += std::string(i ? "," : "") + kStageNames[size_t(s.order.at[i])];
    tell("  sampling temp %g, top-k %d, top-p %g, min-p %g, seed %llu, samplers %s", s.temp, s.top_k, s.top_p, s.min_p,
         ull(seed_), order.c_str());
    tell("           repeat-penalty %g, repeat-last-n %d, presence-penalty %g, frequency-penalty %g", double(s.repeat_penalty),
         s.repeat_last_n, double(s.presence), double(s.frequency));
    tell("  answer   tokens %s, loop-stop %d, %s, ignore-eos %s",
         o_.generate.max_tokens == INT64_MAX ? "unlimited" : std::to_string(o_.generate.max_tokens).c_str(),
         o_.generate.loop_stop, counted(o_.generate.stop.size(), "stop text").c_str(), on_off(o_.generate.ignore_eos));
    if (o_.system) tell("  system   %s", o_.system->c_str());
    if (!tools_.is_null()) tell("  tools    %zu", tools_.size());
  }
  void stats(const std::string&) {
    if (last_.prompt_tokens == 0) fail("no answer yet");
    tell("%s", stats_line(rt_, last_).c_str());
  }

  Runtime& rt_;
  Options& o_;
  uint64_t seed_;
  Rng rng_;
  LineEditor editor_;
  State state_;
  std::optional<State> before_;                // what /regen goes back to, if it can
  Json tools_;
  Answer last_;
  bool keep_thinking_ = true;                  // earlier reasoning stays unless `/set keep-thinking off`
};

// -- diagnostics ----

static int run_dump_tokens(Runtime& rt) {
  const Request r = one_shot_request(rt);
  if (rt.options().verbose)
    for (size_t i = 0; i < r.ids.size(); i++) {
      std::string bytes, hex;
      rt.vocab().append_bytes(r.ids[i], bytes);
      for (char c : bytes) hex += format("%02x", uint8_t(c));
      note("%6zu %7d  %-24s %s", i, r.ids[i], hex.c_str(), Json(bytes).dump().c_str());
    }
  OutputFile("-").write(ids_json(r.ids).dump() + "\n");
  return kExitOk;
}

// Calls f(position, logits) for every position of the prompt; at most a chunk's logits are held at once.
template <class F>
static bool for_each_logits(Runtime& rt, const std::vector<int32_t>& ids, const F& f) {
  Engine& engine = rt.session().engine();
  const size_t n_vocab = rt.model().shape.n_vocab;
  if (ids.size() > engine.ctx()) fail("the prompt has %zu tokens, more than the context of %u", ids.size(), engine.ctx());
  const size_t most = std::max<size_t>(1, (size_t(256) << 20) / (4 * n_vocab));      // 256 MB of logits
  const size_t chunk = std::min<size_t>({ids.size(), engine.options().prefill_chunk, most});
  AlignedBuffer<float> logits(chunk * n_vocab);
  Progress progress;
  engine.reset();
  for (size_t at = 0; at < ids.size(); at += chunk) {
    const size_t n = std::min(chunk, ids.size() - at);
    if (engine.eval(ids.data() + at, n, logits.data(), &g_interrupted) < n) return false;
    for (size_t t = 0; t < n; t++) f(at + t, logits.data() + t * n_vocab);
    progress.show(at + n, ids.size());
  }
  return true;
}

static int run_dump_logits(Runtime& rt) {
  const Request r = one_shot_request(rt);
  rt.session();
  OutputFile out(rt.options().command_arg);       // before the next line: Ctrl-C ends the wait for a FIFO's reader
  InterruptScope interrupts;
  const size_t row = rt.model().shape.n_vocab * sizeof(float);
  const bool done = for_each_logits(rt, r.ids, [&](size_t, const float* logits) { out.write({reinterpret_cast<const char*>(logits), row}); });
  out.close();
  return done ? kExitOk : kExitInterrupted;
}

// DIR/NAME.f32 or .i32 per intermediate tensor, rows in the order of positions.
static int run_dump_taps(Runtime& rt) {
  const Request r = one_shot_request(rt);
  const std::string dir = rt.options().command_arg;
  if (mkdir(dir.c_str(), 0777) != 0 && errno != EEXIST) fail("%s: %s", dir.c_str(), std::strerror(errno));
  Engine& engine = rt.session().engine();
  std::map<std::string, std::unique_ptr<OutputFile>> files;
  InterruptScope interrupts;
  engine.set_taps([&](const std::string& name, const void* data, size_t rows, size_t cols, bool integer) {
    std::unique_ptr<OutputFile>& f = files[name];
    if (!f) f = std::make_unique<OutputFile>(dir + "/" + name + (integer ? ".i32" : ".f32"));
    f->write({static_cast<const char*>(data), rows * cols * 4});
  });
  // With the logits of every position wanted, the last layer computes every position too.
  const bool done = for_each_logits(rt, r.ids, [](size_t, const float*) {});
  for (auto& f : files) f.second->close();
  return done ? kExitOk : kExitInterrupted;
}

// -ln p(token) under the logits, in double.
static double negative_log_likelihood(const float* logits, size_t n, int32_t token) {
  const float top = *std::max_element(logits, logits + n);
  double sum = 0;
  for (size_t i = 0; i < n; i++) sum += exp_f64(double(logits[i]) - double(top));
  return double(top) - double(logits[token]) + log_f64(sum);
}

static int run_perplexity(Runtime& rt) {
  const std::string path = rt.options().command_arg;
  std::vector<int32_t> text;
  rt.tokenizer().encode_plain(read_file(path), text);
  if (text.empty()) fail("%s: nothing in it", path.c_str());
  const int32_t bos = rt.vocab().bos;
  if (bos < 0) fail("%s: the vocabulary has no BOS token to begin a window with", rt.file().path().c_str());
  const size_t ctx = rt.session().engine().ctx(), n_vocab = rt.model().shape.n_vocab;
  if (ctx < 2) fail_usage("--ctx: a window needs 2 tokens or more");
  InterruptScope interrupts;
  double nll = 0;
  for (size_t at = 0; at < text.size(); at += ctx - 1) {
    std::vector<int32_t> window(1, bos);
    window.insert(window.end(), text.begin() + ptrdiff_t(at), text.begin() + ptrdiff_t(std::min(text.size(), at + ctx - 1)));
    const std::vector<int32_t> read(window.begin(), window.end() - 1);
    const auto score = [&](size_t t, const float* logits) { nll += negative_log_likelihood(logits, n_vocab, window[t + 1]); };
    if (!for_each_logits(rt, read, score)) return kExitInterrupted;
    const size_t done = std::min(text.size(), at + ctx - 1);
    if (g_streams.err_tty) note("%zu of %zu tokens, perplexity %.4f", done, text.size(), std::exp(nll / double(done)));
  }
  Json j = Json::object().set("tokens", text.size()).set("nll", nll).set("perplexity", std::exp(nll / double(text.size())));
  write_out(j.dump() + "\n");
  return kExitOk;
}

static Json shape_json(const Shape& s) {
  Json ratios = Json::array();
  for (uint32_t r : s.ratios) ratios.push(r);
  Json j = Json::object();
  j.set("layers", s.n_layer).set("embedding", s.n_embd).set("vocabulary", s.n_vocab).set("context", s.n_ctx_train);
  j.set("heads", s.n_head).set("head_dim", s.head_dim).set("rotary_dim", s.n_rot).set("q_rank", s.q_rank);
  j.set("output_groups", s.n_group).set("output_rank", s.o_rank).set("window", s.window);
  j.set("compress_ratios", std::move(ratios));
  j.set("experts", s.n_expert).set("experts_used", s.n_used).set("expert_width", s.ff).set("shared_width", s.ff_shared);
  j.set("hash_layers", s.n_hash).set("expert_scale", s.expert_scale);
  j.set("indexer_heads", s.idx_heads).set("indexer_dim", s.idx_dim).set("indexer_top_k", s.idx_top_k);
  j.set("hyper_connections", s.n_hc).set("sinkhorn_iterations", s.sinkhorn_iters);
  j.set("rope_base", s.rope_base).set("compress_rope_base", s.comp_rope_base);
  j.set("yarn_factor", s.yarn_factor).set("yarn_original_context", s.yarn_orig_ctx);
  return j;
}

static Json tokenizer_json(Runtime& rt) {
  const Vocab& v = rt.vocab();
  size_t added = 0;
  for (int32_t id = 0; id < v.size(); id++) added += v.is_added(id);
  Json j = Json::object().set("tokens", v.size()).set("merges", v.n_merges()).set("special", added);
  j.set("pre", rt.file().find_string("tokenizer.ggml.pre").value_or("")).set("bos", v.bos).set("eos", v.eos);
  return j.set("effort_profile", chat_options(rt, Think::off, false).profile == EffortProfile::k0731 ? "0731" : "preview");
}

// The object of --inspect --json for people.
static std::string inspect_text(const Json& j) {
  const auto size = [](const Json& v) { return Runtime::size_text(uint64_t(v.as_int("size"))); };
  std::string out;
  const auto line = [&](const std::string& name, const std::string& value) {
    out += format("  %-22s %s\n", name.c_str(), terminal_safe(value).c_str());
  };
  const auto section = [&](const char* title, const Json& values) {
    out += format("\n%s\n", title);
    for (size_t i = 0; i < values.size(); i++) line(values.key(i), values[i].is_string() ? values[i].text() : values[i].dump());
  };
  out += "Model\n";
  for (const char* key : {"file", "name"}) line(key, j.find(key)->text());
  line("size", size(*j.find("file_bytes")) + " in " + counted(uint64_t(j.find("shards")->as_int("shards")), "file"));
  line("tensors", j.find("tensors")->dump());
  section("Shape", *j.find("shape"));
  section("Tokenizer", *j.find("tokenizer"));
  out += "\nWeights\n";
  for (const Json& t : j.find("types")->items()) {
    const std::string count = t.find("tensors")->dump();
    line(t.find("role")->text(), format("%-8s %5s tensor%s %12s", t.find("type")->text().c_str(), count.c_str(), count == "1" ? " " : "s", size(*t.find("bytes")).c_str()));
  }
  line("weights per token", size(*j.find("bytes_per_token")));
  const Json& memory = *j.find("memory");
  out += "\nMemory for --ctx " + memory.find("ctx")->dump() + "\n";
  for (const char* key : {"weights", "cache", "scratch"}) line(key, size(*memory.find(key)) + (key[0] != 'w' ? "" : memory.find("mapped")->as_bool("mapped") ? ", mapped" : ", read"));
  return out;
}

static int run_inspect(Runtime& rt) {
  const Model& m = rt.model();
  const Gguf& file = rt.file();
  const RunOptions run = rt.run_options();
  const MemoryPlan plan = memory_plan(m, run);
  Json types = Json::array();
  for (const RoleUse& r : role_table(m)) {
    const TypeInfo* info = type_info(uint32_t(r.type));          // null: an MTP block may have any type
    Json use = Json::object().set("role", r.role).set("type", info ? info->name : format("type %u", uint32_t(r.type)));
    types.push(use.set("tensors", r.count).set("bytes", r.nbytes));
  }
  Json memory = Json::object().set("ctx", run.ctx).set("weights", plan.weights).set("mapped", !rt.options().gguf.no_mmap);
  memory.set("cache", plan.cache).set("scratch", plan.scratch);
  Json j = Json::object().set("file", file.path()).set("name", file.find_string("general.name").value_or(""));
  j.set("shards", file.shard_count()).set("file_bytes", file.file_bytes()).set("tensors", file.tensors().size());
  j.set("shape", shape_json(m.shape)).set("tokenizer", tokenizer_json(rt)).set("types", std::move(types));
  j.set("bytes_per_token", bytes_per_token(m)).set("memory", std::move(memory));
  write_out(rt.options().json ? j.dump() + "\n" : inspect_text(j));
  return kExitOk;
}

// Dequantises everything once and reports rows that hold a NaN or an infinity.
static int run_check(Runtime& rt) {
  const Gguf& file = rt.file();
  const Options& o = rt.options();
  ThreadPool pool(o.run.threads ? o.run.threads : physical_cores());
  const Kernels* k = rt.kernels();
  Json found = Json::array();
  uint64_t values = 0, not_finite = 0, skipped = 0;
  for (const Tensor& t : file.tensors()) {
    const TypeInfo* info = type_info(uint32_t(t.type));
    if (!info || !info->supported() || t.dims[0] == 0) { skipped++; continue; }
    const uint64_t cols = t.dims[0], rows = t.dims[1] * t.dims[2] * t.dims[3], stride = t.nbytes / std::max<uint64_t>(rows, 1);
    values += cols * rows;
    if (t.type == Type::I32) continue;
    std::vector<std::vector<float>> row_of(size_t(pool.size()), std::vector<float>(size_t(align_up(cols, 512))));
    constexpr uint64_t kRowsPerChunk = 64;
    std::vector<std::vector<std::pair<uint64_t, uint64_t>>> bad(size_t(ceil_div(rows, kRowsPerChunk)));      // row, values
    pool.run(bad.size(), [&](size_t chunk, int thread) {
      float* x = row_of[size_t(thread)].data();
      for (uint64_t r = chunk * kRowsPerChunk; r < std::min(rows, (chunk + 1) * kRowsPerChunk); r++) {
        k->dequantize(t.type, t.data + r * stride, x, cols);
        uint64_t count = 0;
        for (uint64_t i = 0; i < cols; i++) count += (bit_cast<uint32_t>(x[i]) & 0x7f800000u) == 0x7f800000u;
        if (count) bad[chunk].push_back({r, count});
      }
    });
    for (const auto& chunk : bad)
      for (const auto& [row, count] : chunk) {
        not_finite += count;
        if (found.size() < 10000) found.push(Json::object().set("tensor", t.name).set("row", row).set("values", count));
      }
  }
  Json j = Json::object().set("tensors", file.tensors().size() - skipped).set("skipped", skipped).set("values", values);
  write_out(j.set("non_finite", not_finite).set("rows", std::move(found)).dump() + "\n");
  return not_finite ? kExitBadInput : kExitOk;
}

// -- benchmarks ----

// Rows of cells (texts and numbers): an aligned table on stderr as they come, at the end CSV or one JSON object on stdout; no
// CSV where the table was just shown on the same terminal.
class BenchTable {
 public:
  BenchTable(const char* what, std::vector<Json> columns) : what_(what), columns_(std::move(columns)) {}
  void add(std::vector<Json> row) {
    if (rows_.empty()) print_row(columns_);
    print_row(row);
    rows_.push_back(std::move(row));
  }
  // `facts`: an object, threads, ISA, file, hash ...: what the numbers hold for.
  void print(bool json, const Json& facts) const {
    std::string line, header, values;
    for (size_t i = 0; i < facts.size(); i++) {
      line += (i ? ", " : "") + facts.key(i) + " " + facts[i].text();
      header += "," + facts.key(i);
      values += "," + csv(facts[i]);
    }
    note("%s", line.c_str());
    if (json) return write_out(object(facts).dump() + "\n");
    if (g_streams.out_tty && g_streams.err_tty && !g_quiet) return;
    std::string out = csv_row(columns_) + header + "\n";
    for (const auto& row : rows_) out += csv_row(row) + values + "\n";
    write_out(out);
  }

 private:
  Json object(const Json& facts) const {
    Json out = Json::object().set("bench", what_), rows = Json::array();
    for (size_t i = 0; i < facts.size(); i++) out.set(facts.key(i), facts[i]);
    for (const auto& row : rows_) {
      Json cells = Json::object();
      for (size_t c = 0; c < row.size(); c++) cells.set(columns_[c].text(), row[c]);
      rows.push(std::move(cells));
    }
    return out.set("rows", std::move(rows));
  }
  static std::string csv(const Json& cell) {
    if (cell.text().find_first_of(",\"\r\n") == std::string::npos) return cell.text();
    std::string out;
    for (const char c : cell.text()) out += c == '"' ? "\"\"" : std::string(1, c);
    return "\"" + out + "\"";
  }
  static std::string csv_row(const std::vector<Json>& row) {
    std::string out;
    for (size_t c = 0; c < row.size(); c++) out += (c ? "," : "") + csv(row[c]);
    return out;
  }
  static void print_row(const std::vector<Json>& row) {
    std::string line;
    for (size_t c = 0; c < row.size(); c++) line += format(c ? " %13s" : "%-26s", row[c].text().c_str());
    note("%s", line.c_str());
  }
  const char* what_;
  std::vector<Json> columns_;
  std::vector<std::vector<Json>> rows_;
};

// Reads one word of each cache line of all ranges, as fast as this core's requests allow: the line is what memory delivers.
// Four places per thread, asked for ahead, unless g_one_stream. Measured against it on Intel, two threads: one place 0.94, eight
// 0.95, four without asking 0.86.
class PlainReader {
 public:
  explicit PlainReader(const std::vector<ByteRange>& ranges) {
    constexpr size_t kPiece = 1 << 20;
    for (const ByteRange& r : ranges)
      for (size_t at = 0; at < r.n; at += kPiece) {
        pieces_.push_back({r.data + at, std::min(kPiece, r.n - at)});
        bytes_ += pieces_.back().n;
      }
  }
  size_t bytes() const { return bytes_; }
  void run(ThreadPool& pool) const {
    pool.run(pieces_.size(), [&](size_t i, int) {
      constexpr size_t kPlaces = 4, kLine = 64;
      const uint8_t* p = pieces_[i].data;
      const size_t n = pieces_[i].n, quarter = n / kPlaces / kLine * kLine;
      uint64_t sum = 0;
      for (size_t at = 0; g_one_stream && at + kLine <= n; at += kLine) sum ^= load_le<uint64_t>(p + at);
      for (size_t at = 0; !g_one_stream && at < quarter; at += kLine)
        for (size_t k = 0; k < kPlaces; k++) {
          const uint8_t* q = p + k * quarter + at;
          __builtin_prefetch(q + 3072, 0, 2);
          __builtin_prefetch(q + 1024, 0, 3);
          sum ^= load_le<uint64_t>(q);
        }
      volatile uint64_t sink = sum;            // or the compiler reads nothing
      (void)sink;
    });
  }

 private:
  std::vector<ByteRange> pieces_;
  size_t bytes_ = 0;
};

// Bytes per second that the pool's threads read.
static double read_bandwidth(ThreadPool& pool, const PlainReader& reader) {
  return double(reader.bytes()) / median_seconds([&] { reader.run(pool); }, 1.0, 5);
}

// Memory that programs can get without swapping, in bytes; 0 if unknown. Limit: a container's own limit is not looked at.
static uint64_t available_memory() {
  unsigned long long kb = 0;
  if (std::FILE* f = std::fopen("/proc/meminfo", "re")) {
    char line[256];
    while (std::fgets(line, sizeof line, f) && std::sscanf(line, "MemAvailable: %llu", &kb) != 1) {}
    std::fclose(f);
  }
  return kb * 1024;
}

// Reads a buffer of eight times the last cache, at most a quarter of the memory available, but never less than 512 MB (also
// where the cache's size is unknown): a cache of 480 MB keeps part of 512 MB, which then reads a seventh faster. With --model
// also as many bytes of its weights in place, unless they fit into the cache.
static void bench_memory(Runtime& rt) {
  const Options& o = rt.options();
  const size_t least = size_t(512) << 20;
  const size_t cache = size_t(std::max(0L, std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE))));
  const size_t n_bytes = std::max(least, std::min(8 * cache, size_t(available_memory() / 4)));
  AlignedBuffer<uint8_t> buffer(n_bytes);
  std::vector<std::pair<const char*, PlainReader>> readers = {{"buffer", PlainReader({{buffer.data(), buffer.size()}})}};
  if (!o.model.empty()) {
    std::vector<ByteRange> weights;
    size_t left = n_bytes;
    for (const Tensor& t : rt.file().tensors()) {
      const size_t n = std::min(left, size_t(t.nbytes));
      if (n > 0) weights.push_back({t.data, n});
      left -= n;
    }
    if (n_bytes - left > cache) readers.emplace_back("weights", PlainReader(weights));
    else note("the weights fit into the last cache: their reading says nothing about memory");
  }
  ThreadPool pool(o.run.threads ? o.run.threads : physical_cores());
  BenchTable table("memory", {"of", "threads", "GB/s", "MB"});
  for (const auto& [name, reader] : readers)
    for (int n = 1; n <= pool.size(); n = n < pool.size() && n * 2 > pool.size() ? pool.size() : n * 2) {
      ThreadPool part(n);
      table.add({name, n, fixed(read_bandwidth(part, reader) / 1e9), fixed(double(reader.bytes()) / 1e6, 0)});
    }
  table.print(o.json, Json::object().set("cache_MB", fixed(double(cache) / 1e6, 0)));
}

// Random bytes, which any quantised block may be; float types get values of a common size.
static void fill_weights(AlignedBuffer<uint8_t>& weights, Type type, Rng& rng) {
  for (size_t i = 0; i < weights.size(); i += 8) {
    uint64_t r = rng.next_u64();
    if (type == Type::F32) r = (r & 0x807fffff807fffffull) | 0x3f0000003f000000ull;
    if (type == Type::F16) r = (r & 0x83ff83ff83ff83ffull) | 0x3800380038003800ull;
    if (type == Type::BF16) r = (r & 0x807f807f807f807full) | 0x3f003f003f003f00ull;
    std::memcpy(weights.data() + i, &r, 8);
  }
  if (type != Type::MXFP4) return;               // its scales are exponents: random ones would make sums that are not normal numbers
  for (size_t i = 0; i < weights.size(); i += sizeof(BlockMXFP4)) weights[i] = uint8_t(118 + weights[i] % 8);
}

// Every weight type x ISA: one token's activations (decode) with 512 MB of weights, a sixteenth of that for scalar, and 64
// tokens' (prompt) with 512 rows. The ceiling is plain reading of the same 512 MB, of which a large last cache keeps a part.
static void bench_kernels(const Options& o) {
  constexpr size_t kBytes = size_t(512) << 20, kCols = 4096, kTokens = 64;
  ThreadPool pool(o.run.threads ? o.run.threads : physical_cores());
  AlignedBuffer<uint8_t> weights(kBytes);
  Rng rng(1);
  fill_weights(weights, Type::Q8_0, rng);
  const double ceiling = read_bandwidth(pool, PlainReader({{weights.data(), kBytes}}));
  AlignedBuffer<float> x(kTokens * kCols);
  for (size_t i = 0; i < x.size(); i++) x[i] = rng.next_float() - 0.5f;
  bool was_float = false;
  BenchTable table("kernels", {"type", "isa", "GB/s", "Gweights/s", "ceiling_%", "prompt_Gmac/s"});
  for (uint32_t id = 0; id < 64; id++) {
    const TypeInfo* info = type_info(id);
    const Type type = Type(id);
    if (!info || !info->supported() || type == Type::I32) continue;
    const bool is_float = type == Type::F32 || type == Type::F16 || type == Type::BF16;
    if (is_float || was_float || type == Type::MXFP4) fill_weights(weights, type, rng);      // the others share their random bytes
    was_float = is_float;
    const size_t stride = row_bytes(type, kCols), rows = kBytes / stride;
    const Matrix w{type, weights.data(), stride, uint32_t(rows), uint32_t(kCols)};
    AlignedBuffer<float> out(std::max(rows, kTokens * 512));
    for (const Kernels* k : usable_kernels()) {
      if (!o.isa.empty() && o.isa != k->name) continue;
      AlignedBuffer<uint8_t> act(kTokens * act_bytes(kCols));
      const void* xq[kTokens];
      const float* xf[kTokens];
      float* y[kTokens];
      for (size_t t = 0; t < kTokens; t++) {
        xq[t] = act.data() + t * act_bytes(kCols), xf[t] = x.data() + t * kCols, y[t] = out.data() + t * 512;
        k->quantize(xf[t], act.data() + t * act_bytes(kCols), kCols);
      }
      const auto multiply = [&](size_t n_rows, size_t n_tokens, float* const* to) {
        const size_t step = chunk_rows(w, n_tokens);
        pool.run(ceil_div(n_rows, step), [&](size_t c, int) {
          const size_t r0 = c * step, r1 = std::min(n_rows, r0 + step);
          if (is_float) k->matmul_float(w, r0, r1, xf, to, n_tokens);
          else k->matmul_int8(w, r0, r1, xq, to, n_tokens);
        });
      };
      float* single[1] = {out.data()};
      const size_t n_rows = k == &scalar::kernels ? rows / 16 : rows;
      const double decode = median_seconds([&] { multiply(n_rows, 1, single); }, 0.2) * double(rows) / double(n_rows);
      const double prompt = median_seconds([&] { multiply(std::min<size_t>(rows, 512), kTokens, y); }, 0.1);
      table.add({info->name, k->name, fixed(double(kBytes) / decode / 1e9), fixed(double(rows * kCols) / decode / 1e9),
                 fixed(100 * double(kBytes) / decode / ceiling, 1),
                 fixed(double(std::min<size_t>(rows, 512) * kCols * kTokens) / prompt / 1e9, 1)});
    }
  }
  table.print(o.json, Json::object().set("threads", pool.size()).set("ceiling_GB/s", fixed(ceiling / 1e9)));
}

// Prompt reading and decoding speed of the model on random tokens. --ctx bounds the contexts that are tried.
static void bench_model(Runtime& rt) {
  Engine& engine = rt.session().engine();
  const uint32_t n_vocab = rt.model().shape.n_vocab;
  Rng rng(1);
  std::vector<int32_t> tokens(engine.ctx());
  for (int32_t& t : tokens) t = int32_t(rng.next_u64() % n_vocab);
  const double gb = double(bytes_per_token(rt.model())) / 1e9;
  BenchTable table("model", {"what", "tokens", "t/s", "GB/s", "ms"});
  uint64_t hash = kFnvBasis;
  for (const uint32_t n : {32u, 128u, 512u, 2048u}) {
    if (n > engine.ctx()) break;
    const auto run = [&] {
      engine.reset();
      engine.eval(tokens.data(), n);
    };
    const double start = now_seconds();
    run();
    const double once = now_seconds() - start, t = once > 5 ? once : median_seconds(run, 1.0, 2);
    hash = fnv1a(engine.logits(), n_vocab * sizeof(float), hash);
    table.add({"prefill", n, fixed(n / t, 1), Json(), fixed(1e3 * t, 1)});
  }
  engine.reset();
  for (const uint32_t context : {0u, 512u, 2048u, 8192u, 16384u, 32768u, 65536u}) {
    constexpr uint32_t kRun = kMaxWaiting, kMost = 8;          // single tokens differ in which weights they read, runs of kRun do not
    if (context + kMost * kRun > engine.ctx()) break;
    if (context > engine.position()) engine.eval(tokens.data() + engine.position(), context - engine.position());
    const auto run = [&] { for (uint32_t i = 0; i < kRun; i++) engine.eval(tokens.data() + engine.position(), 1); };
    const double t = median_seconds(run, 2, 3, kMost) / kRun;
    table.add({"decode", context, fixed(1 / t, 2), fixed(gb / t), fixed(1e3 * t)});
  }
  table.print(rt.options().json, rt.facts().set("hash", hash_text(hash)));
}

static void run_sampler_bench(const Options& o, const Kernels* kernels) {
  BenchTable table("sampler", {"chain", "vocabulary", "us", "plain_us", "times"});
  for (const SamplerBenchRow& r : bench_sampler(kernels))
    table.add({r.chain, r.n_vocab, fixed(r.us, 1), fixed(r.plain_us, 1), fixed(r.plain_us / r.us, 1)});
  table.print(o.json, Json::object().set("threads", 1).set("isa", kernels->name));
}

// Where the time of one decoded token and of a prompt chunk goes, and how long plain reading of its weights takes.
static void bench_profile(Runtime& rt) {
  Engine& engine = rt.session().engine();
  Rng rng(1);
  std::vector<int32_t> tokens(engine.ctx());
  for (int32_t& t : tokens) t = int32_t(rng.next_u64() % rt.model().shape.n_vocab);
  const uint32_t n_prompt = std::min(512u, engine.ctx() / 2), n_decode = std::min(32u, engine.ctx() - n_prompt);
  ThreadPool pool(engine.options().threads);
  std::vector<PlainReader> readers;
  readers.reserve(n_decode);
  Profile profile[2];
  double total[2] = {}, read_seconds = 0;
  engine.eval(tokens.data(), n_prompt);                 // once unmeasured: pages, caches
  for (uint32_t i = 0; i < n_decode; i++) {
    Profile first;
    std::vector<ByteRange> read;
    first.read = &read;
    engine.set_profile(&first);
    engine.eval(&tokens[n_prompt + i], 1);
    readers.emplace_back(read);
  }
  engine.reset();
  engine.set_profile(&profile[0]);
  double start = now_seconds();
  engine.eval(tokens.data(), n_prompt);
  total[0] = now_seconds() - start;
  engine.set_profile(&profile[1]);
  for (uint32_t i = 0; i < n_decode; i++) {
    start = now_seconds();
    engine.eval(&tokens[n_prompt + i], 1);
    total[1] += now_seconds() - start;
    start = now_seconds();
    readers[(i + n_decode / 2) % n_decode].run(pool);   // another token's experts; only for models larger than the caches
    read_seconds += now_seconds() - start;
  }
  engine.set_profile(nullptr);
  BenchTable table("profile", {"part", "decode_ms", "decode_%", "decode_GB/s", "prefill_ms", "prefill_%"});
  double other[2] = {total[0], total[1]};
  uint64_t all_bytes = 0;
  const auto row = [&](const char* name, double prefill, double decode, uint64_t nbytes) {
    table.add({name, fixed(1e3 * decode / n_decode, 3), fixed(100 * decode / total[1], 1), fixed(decode > 0 ? double(nbytes) / 1e9 / decode : 0),
               fixed(1e3 * prefill / n_prompt, 3), fixed(100 * prefill / total[0], 1)});
  };
  for (int p = 0; p < kParts; p++) {
    row(kPartNames[p], profile[0].seconds[p], profile[1].seconds[p], profile[1].bytes[p]);
    all_bytes += profile[1].bytes[p];
    for (int phase = 0; phase < 2; phase++) other[phase] -= profile[phase].seconds[p];
  }
  row("other", other[0], other[1], 0);
  row("all", total[0], total[1], all_bytes);
  table.add({"plain reading", fixed(1e3 * read_seconds / n_decode, 3), fixed(100 * read_seconds / total[1], 1), fixed(double(all_bytes) / 1e9 / read_seconds), "", ""});
  table.print(rt.options().json, rt.facts());
}

static void run_tokenizer_bench(Runtime& rt) {
  const Options& o = rt.options();
  rt.file();
  const double start = now_seconds();
  const Vocab& vocab = rt.vocab();
  const double load = now_seconds() - start;
  BenchTable table("tokenizer", {"text", "MB", "tokens", "MB/s", "ms"});
  for (const TokenizerBench& r : bench_tokenizer(vocab, o.prompt_file ? read_file(*o.prompt_file) : std::string()))
    table.add({r.name, fixed(double(r.bytes) / 1e6), r.tokens, fixed(double(r.bytes) / 1e6 / r.seconds),
               fixed(1e3 * r.seconds)});
  table.print(o.json, Json::object().set("file", rt.file().path()).set("vocabulary_ms", fixed(1e3 * load, 1)).set("threads", 1));
}

static int run_bench(Runtime& rt) {
  const Options& o = rt.options();
  const std::string what = o.command_arg.empty() ? "model" : o.command_arg;
  rt.kernels();                                  // throws if --isa names none of this CPU's
  if (what == "memory") bench_memory(rt);
  else if (what == "kernels") bench_kernels(o);
  else if (what == "sampler") run_sampler_bench(o, rt.kernels());
  else if (what == "tokenizer") run_tokenizer_bench(rt);
  else if (what == "profile") bench_profile(rt);
  else bench_model(rt);
  return kExitOk;
}

// -- entry ----

#ifdef DS4_COMMIT
constexpr char kCommit[] = " " DS4_COMMIT;
#else
constexpr char kCommit[] = "";
#endif

// The whole program but for errors: main prints those.
[[maybe_unused]] static int run(int argc, char** argv) {
  Options o = parse_options(argc, argv);
  detect_streams(o.color);
  if (o.command == Command::help) return write_out(help_text()), kExitOk;
  if (o.command == Command::version)
    return write_out(format("ds4 %s%s (%s)\n", kVersion, kCommit, Runtime::isa_names().c_str())), kExitOk;
  check_partners(o);
  if (o.demo && !was_given(o, "--temp")) o.generate.sampler.temp = 0;
  if (o.demo && !was_given(o, "--think") && !was_given(o, "--think-max")) o.think = Think::off;
  Runtime rt(std::move(o));
  const Options& set = rt.options();
  switch (set.command) {
    case Command::script: return run_script(rt);
    case Command::inspect: return run_inspect(rt);
    case Command::check: return run_check(rt);
    case Command::dump_tokens: return run_dump_tokens(rt);
    case Command::dump_logits: return run_dump_logits(rt);
    case Command::dump_logprobs: return run_one_shot(rt);
    case Command::dump_taps: return run_dump_taps(rt);
    case Command::perplexity: return run_perplexity(rt);
    case Command::bench: return run_bench(rt);
    default: break;
  }
  const bool asked = set.prompt || set.prompt_file || set.prompt_tokens || set.messages || set.raw;
  return asked || !g_streams.in_tty ? run_one_shot(rt) : Chat(rt).run();
}


}  // namespace ds4

// =============================================================================
// 20. MAIN — run, report the error, exit code.   uses: 19
// =============================================================================

#ifndef DS4_NO_MAIN
int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);                       // a reader that goes away ends the program quietly, not by a signal
  for (int fd = 0; fd < 3; fd++)                  // a stream that was closed fails when used, and no file takes its number
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) != fd) return ds4::kExitBadInput;
  try {
    return ds4::run(argc, argv);
  } catch (const ds4::PipeClosed&) {
    return ds4::kExitOk;
  } catch (const ds4::Error& e) {
    ds4::print_error(e);
    return e.code;
  } catch (const std::exception& e) {
    ds4::print_error(e);
    return ds4::kExitBadInput;
  }
}
#endif  // DS4_NO_MAIN

#endif  // DS4_MAIN_PASS
