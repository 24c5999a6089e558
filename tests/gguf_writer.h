// Writes small GGUF files for tests, valid ones and ones that lie.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

struct GgufWriter {
  enum ValueType : uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64 };
  struct Meta {
    std::string key, value;      // value: type and bytes as they stand in the file
  };
  struct TensorInfo {
    std::string name;
    std::vector<uint64_t> dims;
    uint32_t type;
    std::string data;
    std::optional<uint64_t> offset = std::nullopt;       // instead of the right one
    std::optional<uint32_t> n_dims = std::nullopt;
  };

  uint32_t version = 3;
  uint64_t alignment = 32;       // used for the layout; put "general.alignment" to say so
  std::optional<uint64_t> n_meta, n_tensors;             // instead of the right ones
  std::vector<Meta> meta;
  std::vector<TensorInfo> tensors;

  template <class T>
  static std::string raw(T v) {
    return std::string(reinterpret_cast<const char*>(&v), sizeof v);
  }
  static std::string str(const std::string& s) { return raw(uint64_t(s.size())) + s; }

  // Sets a key to a value given as bytes; replaces an older one.
  void set(const std::string& key, uint32_t type, const std::string& bytes) {
    erase(key);
    meta.push_back({key, raw(type) + bytes});
  }
  void erase(const std::string& key) {
    meta.erase(std::remove_if(meta.begin(), meta.end(), [&](const Meta& m) { return m.key == key; }), meta.end());
  }
  void u32(const std::string& key, uint32_t v) { set(key, U32, raw(v)); }
  void f32(const std::string& key, float v) { set(key, F32, raw(v)); }
  void boolean(const std::string& key, bool v) { set(key, Bool, raw(uint8_t(v))); }
  void string(const std::string& key, const std::string& v) { set(key, String, str(v)); }
  template <class T>
  void array(const std::string& key, uint32_t elem, const std::vector<T>& v) {
    std::string bytes = raw(elem) + raw(uint64_t(v.size()));
    for (const T& x : v) bytes += raw(x);
    set(key, Array, bytes);
  }
  void strings(const std::string& key, const std::vector<std::string>& v) {
    std::string bytes = raw(uint32_t(String)) + raw(uint64_t(v.size()));
    for (const std::string& s : v) bytes += str(s);
    set(key, Array, bytes);
  }

  TensorInfo& tensor(const std::string& name) {
    for (TensorInfo& t : tensors)
      if (t.name == name) return t;
    std::fprintf(stderr, "no tensor %s in the fixture\n", name.c_str());
    std::abort();
  }
  void erase_tensor(const std::string& name) {
    tensors.erase(std::remove_if(tensors.begin(), tensors.end(), [&](const TensorInfo& t) { return t.name == name; }), tensors.end());
  }
  // An F32 tensor whose element i is first + i * step.
  TensorInfo& f32_tensor(const std::string& name, const std::vector<uint64_t>& dims, float first = 0, float step = 0) {
    size_t n = 1;
    for (uint64_t d : dims) n *= size_t(d);
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) v[i] = first + float(i) * step;
    tensors.push_back({name, dims, 0, std::string(reinterpret_cast<const char*>(v.data()), n * 4)});
    return tensors.back();
  }

  // The file. The last tensor is not padded, so cutting any byte cuts something that counts.
  std::string bytes() const {
    std::string out = "GGUF" + raw(version) + raw(n_tensors.value_or(tensors.size())) + raw(n_meta.value_or(meta.size()));
    for (const Meta& m : meta) out += str(m.key) + m.value;
    std::string data;
    for (const TensorInfo& t : tensors) {
      data.resize((data.size() + alignment - 1) / alignment * alignment);
      out += str(t.name) + raw(t.n_dims.value_or(uint32_t(t.dims.size())));
      for (uint64_t d : t.dims) out += raw(d);
      out += raw(t.type) + raw(t.offset.value_or(data.size()));
      data += t.data;
    }
    if (!data.empty()) out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out + data;
  }
};

// A directory of files that disappears at the end of the test.
class TempDir {
 public:
  TempDir() {
    char in_memory[] = "/dev/shm/ds4-test-XXXXXX", on_disk[] = "/tmp/ds4-test-XXXXXX";
    const char* made = mkdtemp(in_memory);
    if (!made) made = mkdtemp(on_disk);
    if (!made) std::abort();
    dir_ = made;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    for (const std::string& f : files_) std::remove(f.c_str());
    rmdir(dir_.c_str());
  }
  // Path of a file in it, which need not exist.
  std::string path(const std::string& name) {
    const std::string p = dir_ + "/" + name;
    if (std::find(files_.begin(), files_.end(), p) == files_.end()) files_.push_back(p);
    return p;
  }
  std::string write(const std::string& name, const std::string& bytes) {
    const std::string p = path(name);
    std::FILE* f = std::fopen(p.c_str(), "wb");
    if (!f || std::fwrite(bytes.data(), 1, bytes.size(), f) != bytes.size() || std::fclose(f) != 0) std::abort();
    return p;
  }
  const std::string& dir() const { return dir_; }

 private:
  std::string dir_;
  std::vector<std::string> files_;
};
