// GGUF: every check has a file that trips it, and the message is part of the test.
#include "ds4_test.h"
#include "gguf_writer.h"

namespace gguf_test {

using ds4::Gguf;
using W = GgufWriter;

// Two keys and two tensors.
static W small() {
  W w;
  w.string("general.architecture", "test");
  w.u32("test.n", 7);
  w.f32_tensor("a.weight", {4, 3}, 1, 1);
  w.f32_tensor("b.weight", {8}, 100, 1);
  return w;
}

// What loading these bytes says, with the path replaced by FILE; "" if nothing is wrong.
static std::string message(const std::string& bytes) {
  TempDir dir;
  const std::string path = dir.write("m.gguf", bytes);
  try {
    Gguf g(path);
    return "";
  } catch (const ds4::Error& e) {
    std::string s = e.what();
    for (size_t at; (at = s.find(path)) != std::string::npos;) s.replace(at, path.size(), "FILE");
    return s;
  }
}
static std::string message(const W& w) { return message(w.bytes()); }

TEST(Gguf, ReadsValuesAndTensors) {
  W w = small();
  w.set("i.i8", W::I8, W::raw(int8_t(-5)));
  w.set("i.u16", W::U16, W::raw(uint16_t(65535)));
  w.set("i.u64", W::U64, W::raw(uint64_t(1) << 40));
  w.set("i.i64", W::I64, W::raw(int64_t(9)));
  w.set("f.f64", W::F64, W::raw(0.25));
  w.f32("f.f32", 1.5f);
  w.boolean("b", true);
  w.strings("words", {"", "alpha", std::string("nul\0!", 5)});
  w.array<uint8_t>("bytes", W::U8, {1, 2, 255});
  w.array<float>("floats", W::F32, {0.5f, -2});
  for (uint32_t version : {2u, 3u}) {
    w.version = version;
    TempDir dir;
    Gguf g(dir.write("m.gguf", w.bytes()));
    EXPECT_EQ(g.find_string("general.architecture"), "test");
    EXPECT_EQ(g.find_uint("test.n"), 7u);
    EXPECT_EQ(g.find_uint("i.u16"), 65535u);
    EXPECT_EQ(g.find_uint("i.u64"), uint64_t(1) << 40);
    EXPECT_EQ(g.find_uint("i.i64"), 9u);
    EXPECT_EQ(g.find_float("i.i8"), -5.0);
    EXPECT_EQ(g.find_float("f.f64"), 0.25);
    EXPECT_EQ(g.find_float("f.f32"), 1.5);
    EXPECT_EQ(g.find_bool("b"), true);
    EXPECT_TRUE(g.has("b"));
    EXPECT_FALSE(g.has("c"));
    EXPECT_EQ(g.find_uint("c"), std::nullopt);
    EXPECT_EQ(g.find_numbers("bytes"), (std::vector<double>{1, 2, 255}));
    EXPECT_EQ(g.find_numbers("floats"), (std::vector<double>{0.5, -2}));
    EXPECT_EQ(g.find_numbers("test.n"), (std::vector<double>{7}));
    EXPECT_EQ(g.find_ints("bytes"), (std::vector<int32_t>{1, 2, 255}));
    std::vector<std::string_view> words;
    const ds4::StringArray array = *g.find_strings("words");
    for (std::string_view s : array) words.push_back(s);
    EXPECT_EQ(words, (std::vector<std::string_view>{"", "alpha", std::string_view("nul\0!", 5)}));

    ASSERT_EQ(g.tensors().size(), 2u);
    const ds4::Tensor* a = g.find_tensor("a.weight");
    ASSERT_NE(a, nullptr);
    EXPECT_EQ(a->n_dims, 2u);
    EXPECT_EQ(a->dims[0], 4u);
    EXPECT_EQ(a->dims[1], 3u);
    EXPECT_EQ(a->dims[2], 1u);
    EXPECT_EQ(a->nbytes, 48u);
    EXPECT_EQ(ds4::load_le<float>(a->data + 44), 12.0f);
    EXPECT_EQ(ds4::load_le<float>(g.find_tensor("b.weight")->data), 100.0f);
    EXPECT_EQ(g.find_tensor("c.weight"), nullptr);
  }
}

TEST(Gguf, FindsAmongManyNames) {
  W w;
  for (int i = 0; i < 3000; i++) w.meta.push_back({"key." + std::to_string(i), W::raw(uint32_t(W::U32)) + W::raw(uint32_t(i))});
  for (int i = 0; i < 300; i++) w.f32_tensor("blk." + std::to_string(i), {1}, float(i));
  TempDir dir;
  Gguf g(dir.write("m.gguf", w.bytes()));
  for (uint64_t i = 0; i < 3000; i++) EXPECT_EQ(g.find_uint("key." + std::to_string(i)), i);
  for (int i = 0; i < 300; i++) EXPECT_EQ(ds4::load_le<float>(g.find_tensor("blk." + std::to_string(i))->data), float(i));
  EXPECT_EQ(g.find_uint("key.3000"), std::nullopt);
}

TEST(Gguf, ReadsAndLocksAndWarmsInsteadOfMapping) {
  TempDir dir;
  const std::string path = dir.write("m.gguf", small().bytes());
  for (const ds4::GgufOptions& o : {ds4::GgufOptions{true, false, false}, {false, true, false}, {false, false, true}, {true, true, true}}) {
    Gguf g(path, o);
    EXPECT_EQ(ds4::load_le<float>(g.find_tensor("b.weight")->data), 100.0f);
    ds4::prefetch_pages(g.find_tensor("b.weight")->data, 32);
  }
}

TEST(Gguf, WrongTypesOfValues) {
  W w = small();
  w.f32("f", 1);
  w.set("neg", W::I32, W::raw(int32_t(-3)));
  w.strings("words", {"a"});
  w.array<int64_t>("wide", W::I64, {1, int64_t(1) << 40});
  TempDir dir;
  Gguf g(dir.write("m.gguf", w.bytes()));
  const auto says = [&](auto&& f) -> std::string {
    try {
      f();
      return "";
    } catch (const ds4::Error& e) {
      return std::string(e.what()).substr(g.path().size());
    }
  };
  EXPECT_EQ(says([&] { g.find_uint("f"); }), ": f is of type f32, expected an integer");
  EXPECT_EQ(says([&] { g.find_uint("neg"); }), ": neg is -3, expected 0 or more");
  EXPECT_EQ(says([&] { g.find_uint("words"); }), ": words is an array of string, expected an integer");
  EXPECT_EQ(says([&] { g.find_float("general.architecture"); }), ": general.architecture is of type string, expected a number");
  EXPECT_EQ(says([&] { g.find_bool("f"); }), ": f is of type f32, expected a bool");
  EXPECT_EQ(says([&] { g.find_string("f"); }), ": f is of type f32, expected a string");
  EXPECT_EQ(says([&] { g.find_strings("wide"); }), ": wide is an array of i64, expected an array of strings");
  EXPECT_EQ(says([&] { g.find_strings("f"); }), ": f is of type f32, expected an array of strings");
  EXPECT_EQ(says([&] { g.find_numbers("words"); }), ": words is an array of string, expected numbers");
  EXPECT_EQ(says([&] { g.find_ints("f"); }), ": f is of type f32, expected integers");
  EXPECT_EQ(says([&] { g.find_ints("wide"); }), ": wide[1] is 1099511627776, expected a 32-bit integer");
}

TEST(Gguf, RefusesWhatIsNotGguf) {
  EXPECT_EQ(message(""), "FILE is empty, expected a GGUF file");
  EXPECT_EQ(message("<!DOCTYPE html>"), "FILE is not a GGUF file: starts with '<!DO' (an HTML page?), expected 'GGUF'");
  EXPECT_EQ(message("version https://git-lfs"), "FILE is not a GGUF file: starts with 'vers' (a git-lfs pointer?), expected 'GGUF'");
  EXPECT_EQ(message("{\"error\":1}"), "FILE is not a GGUF file: starts with '{\"er' (a server's error message?), expected 'GGUF'");
  EXPECT_EQ(message("PK\3\4...."), "FILE is not a GGUF file: starts with 'PK\\x03\\x04' (a zip or PyTorch file?), expected 'GGUF'");
  EXPECT_EQ(message("tjgg...."), "FILE is not a GGUF file: starts with 'tjgg' (a GGML file from before GGUF), expected 'GGUF'");
  EXPECT_EQ(message("GG"), "FILE is not a GGUF file: starts with 'GG', expected 'GGUF'");
  EXPECT_EQ(message("GGUF"), "FILE: truncated at byte 4: the version at offset 4 needs 4 bytes, 0 are left");
  EXPECT_EQ(message("GGUF" + W::raw(uint32_t(1)) + std::string(16, '\0')), "FILE is GGUF version 1, expected 2 or 3");
  EXPECT_EQ(message("GGUF" + W::raw(uint32_t(4)) + std::string(16, '\0')), "FILE is GGUF version 4, expected 2 or 3");
  EXPECT_EQ(message("GGUF" + W::raw(uint32_t(0)) + std::string(16, '\0')), "FILE is GGUF version 0, expected 2 or 3");
  EXPECT_EQ(message("GGUF" + W::raw(uint32_t(0x03000000)) + std::string(16, '\0')),
            "FILE is a big-endian GGUF file (version 3), expected little-endian");
}

TEST(Gguf, RefusesWhatIsNotAFile) {
  const auto says = [](const std::string& path) -> std::string {
    try {
      Gguf g(path);
      return "";
    } catch (const ds4::Error& e) {
      return e.what();
    }
  };
  TempDir dir;
  EXPECT_EQ(says(dir.dir()), dir.dir() + " is a directory, expected a GGUF file");
  EXPECT_EQ(says(dir.path("no.gguf")), "cannot open " + dir.path("no.gguf") + ": No such file or directory");
  EXPECT_EQ(says("/dev/null"), "/dev/null is not a regular file, expected a GGUF file");
  EXPECT_EQ(says("/proc/version"), "/proc/version is empty, expected a GGUF file");  // qemu gives /proc/self/stat a size
  const std::string fifo = dir.path("pipe.gguf");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(says(fifo), fifo + " is not a regular file, expected a GGUF file");
  if (geteuid() != 0) {
    const std::string secret = dir.write("secret.gguf", small().bytes());
    chmod(secret.c_str(), 0);
    EXPECT_EQ(says(secret), "cannot open " + secret + ": Permission denied");
  }
}

TEST(Gguf, EveryTruncationIsRefused) {
  W w = small();
  w.strings("words", {"x", "", "yz"});
  w.array<int32_t>("ints", W::I32, {1, 2});
  const std::string whole = w.bytes();
  ASSERT_EQ(message(whole), "");
  for (size_t n = 0; n < whole.size(); n++) {
    const std::string s = message(whole.substr(0, n));
    EXPECT_NE(s.find("FILE"), std::string::npos) << "cut at byte " << n;
    EXPECT_EQ(s.find('\n'), std::string::npos);
  }
  EXPECT_EQ(message(whole.substr(0, whole.size() - 1)),
            "FILE: tensor b.weight has 32 bytes at offset 64 of the tensor data, but the file has only 95 bytes of it (truncated?)");
}

TEST(Gguf, EveryByteFlippedIsHandled) {
  const std::string whole = small().bytes();
  for (size_t i = 0; i < whole.size(); i++) {
    for (int bit = 0; bit < 8; bit++) {
      std::string bad = whole;
      bad[i] = char(bad[i] ^ (1 << bit));
      message(bad);              // refused or not, but never worse
    }
  }
}

TEST(Gguf, CountsAreCheckedBeforeAllocating) {
  const double begin = ds4::now_seconds();
  W w = small();
  w.n_tensors = uint64_t(1) << 63;
  EXPECT_EQ(message(w).substr(0, 50), "FILE: the tensor count is 9223372036854775808, but");
  w.n_tensors = 0xffffffffu;
  EXPECT_NE(message(w).find("the tensor count is 4294967295, but the 264 bytes left after offset 24 hold at most 8"), std::string::npos) << message(w);
  w = small();
  w.n_meta = UINT64_MAX;
  EXPECT_NE(message(w).find("the metadata count is 18446744073709551615, but the"), std::string::npos);
  w = small();
  w.n_meta = 3;                  // it fits but is wrong: the first tensor is read as a value
  EXPECT_NE(message(w).find("FILE: a tensor name at offset "), std::string::npos);
  w = small();
  w.set("arr", W::Array, W::raw(uint32_t(W::F64)) + W::raw(uint64_t(1) << 61));
  EXPECT_NE(message(w).find("FILE: the length of arr is 2305843009213693952, but the"), std::string::npos) << message(w);
  w.set("arr", W::Array, W::raw(uint32_t(W::String)) + W::raw(uint64_t(1) << 40));
  EXPECT_NE(message(w).find("FILE: the length of arr is 1099511627776, but the"), std::string::npos) << message(w);
  w.set("arr", W::String, W::raw(UINT64_MAX));
  EXPECT_NE(message(w).find("FILE: the value of arr at offset"), std::string::npos) << message(w);
  EXPECT_NE(message(w).find("is 18446744073709551615 bytes long, but only"), std::string::npos) << message(w);
  EXPECT_LT(ds4::now_seconds() - begin, 0.05 * 8);
}

TEST(Gguf, NamesAreFew) {
  const auto with = [](int n_meta, int n_tensors) {
    W w;
    for (int i = 0; i < n_meta; i++) w.meta.push_back({std::to_string(i), W::raw(uint32_t(W::U8)) + "x"});
    for (int i = 0; i < n_tensors; i++) w.f32_tensor(std::to_string(i), {1});
    return message(w);
  };
  EXPECT_EQ(with(16384, 16384), "");
  EXPECT_EQ(with(16385, 1), "FILE: the metadata count is 16385, expected at most 16384");
  EXPECT_EQ(with(1, 16385), "FILE: the tensor count is 16385, expected at most 16384");
}

TEST(Gguf, BadMetadata) {
  W w = small();
  w.set("odd", 13, "");
  EXPECT_NE(message(w).find("FILE: odd at offset "), std::string::npos);
  EXPECT_NE(message(w).find(" has value type 13, expected 0 to 12"), std::string::npos);
  w = small();
  w.set("odd", W::Array, W::raw(uint32_t(99)) + W::raw(uint64_t(1)));
  EXPECT_EQ(message(w), "FILE: odd has element type 99, expected 0 to 12");
  w.set("odd", W::Array, W::raw(uint32_t(W::Array)) + W::raw(uint64_t(1)) + W::raw(uint32_t(W::U8)) + W::raw(uint64_t(0)));
  EXPECT_EQ(message(w), "FILE: odd is an array of arrays, expected numbers or strings");
  w = small();
  w.set("odd", W::Bool, W::raw(uint8_t(2)));
  EXPECT_EQ(message(w), "FILE: odd is 2, expected a bool (0 or 1)");
  w = small();
  w.meta.push_back(w.meta[1]);
  EXPECT_EQ(message(w), "FILE: metadata key test.n is there twice");
  w = small();
  w.u32("", 1);
  EXPECT_NE(message(w).find("FILE: metadata key 2 at offset "), std::string::npos);
  EXPECT_NE(message(w).find(" is empty"), std::string::npos);
}

TEST(Gguf, BadAlignment) {
  for (uint32_t a : {0u, 1u, 3u, 4u, 33u, 1u << 21, 1u << 30}) {
    W w = small();
    w.u32("general.alignment", a);
    EXPECT_EQ(message(w), "FILE: general.alignment is " + std::to_string(a) + ", expected a power of two from 8 to 1048576");
  }
  W w = small();
  w.string("general.alignment", "32");
  EXPECT_EQ(message(w), "FILE: general.alignment is of type string, expected an integer");
  for (uint32_t a : {8u, 64u, 4096u}) {
    w = small();
    w.alignment = a;
    w.u32("general.alignment", a);
    EXPECT_EQ(message(w), "");
  }
}

TEST(Gguf, BadDimensions) {
  W w = small();
  for (uint32_t n : {0u, 5u, 0xffffffffu}) {
    w.tensor("a.weight").n_dims = n;
    EXPECT_EQ(message(w), "FILE: tensor a.weight has " + std::to_string(n) + " dimensions, expected 1 to 4");
  }
  w = small();
  w.tensor("a.weight").dims = {4, 0};
  EXPECT_EQ(message(w), "FILE: tensor a.weight has dim[1] = 0, expected 1 or more");
  w.tensor("a.weight").dims = {uint64_t(1) << 33, uint64_t(1) << 33};
  EXPECT_EQ(message(w), "FILE: tensor a.weight: 8589934592 x 8589934592 overflows 64 bits");
  w.tensor("a.weight").dims = {uint64_t(1) << 62};
  EXPECT_EQ(message(w), "FILE: tensor a.weight: 4611686018427387904 x 4 overflows 64 bits");
  w.tensor("a.weight").dims = {uint64_t(1) << 61};
  EXPECT_NE(message(w).find("FILE: tensor a.weight has 9223372036854775808 bytes at offset 0"), std::string::npos);
  w.tensor("a.weight").dims = {40};
  w.tensor("a.weight").type = 8;
  EXPECT_EQ(message(w), "FILE: tensor a.weight has rows of 40 elements, expected a multiple of 32 (type Q8_0)");
  w = small();
  w.tensor("a.weight").name = "";
  EXPECT_NE(message(w).find("FILE: tensor name 0 at offset "), std::string::npos);
  w = small();
  w.tensor("b.weight").name = "a.weight";
  EXPECT_EQ(message(w), "FILE: tensor a.weight is there twice");
}

TEST(Gguf, BadOffsets) {
  W w = small();
  w.tensor("b.weight").offset = 65;
  EXPECT_EQ(message(w), "FILE: tensor b.weight has offset 65, expected a multiple of 32");
  w.tensor("b.weight").offset = 32;
  EXPECT_EQ(message(w), "FILE: tensors a.weight and b.weight overlap");
  w.tensor("b.weight").offset = 0;
  EXPECT_NE(message(w).find(" overlap"), std::string::npos);
  w.tensor("b.weight").offset = 96;
  EXPECT_EQ(message(w), "FILE: tensor b.weight has 32 bytes at offset 96 of the tensor data, but the file has only 96 bytes of it (truncated?)");
  w.tensor("b.weight").offset = uint64_t(0) - 32;
  EXPECT_EQ(message(w), "FILE: tensor b.weight has 32 bytes at offset 18446744073709551584 of the tensor data, but the file has only 96 bytes of it (truncated?)");
}

TEST(Gguf, TypesNoKernelReadsHaveNoBytes) {
  W w = small();
  w.tensor("a.weight").type = 40;
  w.tensor("b.weight").type = 12345;
  TempDir dir;
  Gguf g(dir.write("m.gguf", w.bytes()));
  EXPECT_EQ(g.find_tensor("a.weight")->nbytes, 0u);
  EXPECT_EQ(uint32_t(g.find_tensor("b.weight")->type), 12345u);
}

TEST(Gguf, NamesAreSafeToPrint) {
  W w = small();
  w.tensor("a.weight").name = "\x1b[31m" + std::string(200, 'x');
  w.tensor(w.tensors[0].name).dims = {0};
  const std::string s = message(w);
  EXPECT_NE(s.find("tensor \\x1b[31mxxx"), std::string::npos) << s;
  EXPECT_NE(s.find("xxx... has dim[0]"), std::string::npos) << s;
}

// -- split files ----

// Three shards of `small` plus one tensor: metadata only, a, b + c.
struct Shards {
  TempDir dir;
  std::string path[3];
  W w[3];
  explicit Shards(const char* pattern = "m-%05d-of-00003.gguf") {
    w[0].string("general.architecture", "test");
    w[0].u32("test.n", 7);
    w[1].f32_tensor("a", {4}, 1, 1);
    w[2].f32_tensor("b", {4}, 11, 1);
    w[2].f32_tensor("c", {4}, 21, 1);
    for (int i = 0; i < 3; i++) {
      w[i].set("split.no", W::U16, W::raw(uint16_t(i)));
      w[i].set("split.count", W::U16, W::raw(uint16_t(3)));
      w[i].set("split.tensors.count", W::I32, W::raw(int32_t(3)));
      char name[64];
      std::snprintf(name, sizeof name, pattern, i + 1);
      path[i] = dir.path(name);
    }
  }
  std::string load(int which = 0) {
    for (int i = 0; i < 3; i++) dir.write(path[i].substr(path[i].rfind('/') + 1), w[i].bytes());
    return open(which);
  }
  std::string open(int which) {
    try {
      Gguf g(path[which]);
      EXPECT_EQ(g.shard_count(), 3u);
      EXPECT_EQ(g.find_uint("test.n"), 7u);
      EXPECT_EQ(g.tensors().size(), 3u);
      EXPECT_EQ(ds4::load_le<float>(g.find_tensor("a")->data), 1.0f);
      EXPECT_EQ(ds4::load_le<float>(g.find_tensor("c")->data), 21.0f);
      EXPECT_EQ(g.shard_path(*g.find_tensor("c")), path[2]);
      return "";
    } catch (const ds4::Error& e) {
      std::string s = e.what();
      for (int i = 0; i < 3; i++)
        for (size_t at; (at = s.find(path[i])) != std::string::npos;) s.replace(at, path[i].size(), "SHARD" + std::to_string(i + 1));
      return s;
    }
  }
};

TEST(GgufSplit, AnyShardOpensAll) {
  for (const char* pattern : {"m-%05d-of-00003.gguf", "m.gguf-%05d-of-00003.gguf", "m.gguf-%05d-of-00003"}) {
    Shards s(pattern);
    for (int i = 0; i < 3; i++) EXPECT_EQ(s.load(i), "") << pattern;
  }
  Shards bare;                   // without keys the names decide
  for (W& w : bare.w)
    for (const char* key : {"split.no", "split.count", "split.tensors.count"}) w.erase(key);
  EXPECT_EQ(bare.load(1), "");
}

TEST(GgufSplit, MissingAndTruncatedShardsAreNamed) {
  Shards s;
  EXPECT_EQ(s.load(), "");
  std::remove(s.path[1].c_str());
  EXPECT_EQ(s.open(1), "cannot open SHARD2: No such file or directory");
  EXPECT_EQ(s.open(0), "shard 2 of 3 is missing: SHARD2 (needed by SHARD1)");
  const std::string whole = s.w[1].bytes();
  s.dir.write("m-00002-of-00003.gguf", whole.substr(0, whole.size() - 2));
  EXPECT_EQ(s.open(2), "SHARD2: tensor a has 16 bytes at offset 0 of the tensor data, but the file has only 14 bytes of it (truncated?)");
  s.dir.write("m-00002-of-00003.gguf", "");
  EXPECT_EQ(s.open(2), "SHARD2 is empty, expected a GGUF file");
}

TEST(GgufSplit, CountsMustAgree) {
  Shards s;
  s.w[1].set("split.count", W::U16, W::raw(uint16_t(4)));
  EXPECT_EQ(s.load(), "SHARD2: split.count is 4, but its name says 3");
  s.w[1].set("split.count", W::U16, W::raw(uint16_t(3)));
  s.w[1].set("split.no", W::U16, W::raw(uint16_t(2)));
  EXPECT_EQ(s.load(), "SHARD2: split.no is 2, but its name says shard 2 (expected 1)");
  s.w[1].set("split.no", W::U16, W::raw(uint16_t(1)));
  s.w[0].set("split.tensors.count", W::I32, W::raw(int32_t(5)));
  EXPECT_EQ(s.load(), "SHARD1: split.tensors.count is 5, but the 3 shards hold 3 tensors");
  s.w[0].set("split.tensors.count", W::I32, W::raw(int32_t(3)));
  s.w[2].tensors[0].name = "a";
  EXPECT_EQ(s.load(), "SHARD3: tensor a is there twice");
}

TEST(GgufSplit, RenamedShard) {
  Shards s;
  const std::string path = s.dir.write("renamed.gguf", s.w[1].bytes());
  try {
    Gguf g(path);
    FAIL();
  } catch (const ds4::Error& e) {
    EXPECT_EQ(std::string(e.what()), path + " is shard 2 of 3 of a split model, but its name does not end in -00002-of-00003.gguf, so the others cannot be found");
  }
  EXPECT_EQ(message(s.w[0].bytes()).substr(0, 23), "FILE is shard 1 of 3 of");
  const std::string odd = s.dir.write("m-00007-of-00003.gguf", s.w[1].bytes());
  try {
    Gguf g(odd);
    FAIL();
  } catch (const ds4::Error& e) {
    EXPECT_EQ(std::string(e.what()), odd + ": its name says shard 7 of 3, expected 1 to 3");
  }
}

TEST(GgufDeathTest, FileThatShrinksWhileMapped) {
  W w;
  w.f32_tensor("big", {1 << 16}, 1);
  TempDir dir;
  const std::string path = dir.write("m.gguf", w.bytes());
  EXPECT_EXIT(
    {
      Gguf g(path);
      if (truncate(path.c_str(), 4096) != 0) std::abort();
      const volatile uint8_t* p = g.find_tensor("big")->data;
      (void)p[200000];
    },
    testing::ExitedWithCode(1), "ds4: .*m.gguf: cannot read at offset [0-9]+: the file was cut short or its disk failed while it was in use");
}

}  // namespace gguf_test
