// What every test file stands on: the engine without its main, GoogleTest, and where files are.
#pragma once
#define DS4_NO_MAIN
#include "../ds4.cpp"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace ds4 {

inline std::string env_or(const char* name, const char* fallback) {
  const char* v = std::getenv(name);
  return v && *v ? v : fallback;
}
// tests/data/NAME, and a file that tests make in the build directory.
inline std::string data_path(const std::string& name) { return env_or("DS4_DATA", "tests/data") + "/" + name; }
inline std::string build_path(const std::string& name) { return env_or("DS4_BUILD", "build") + "/" + name; }
// How to start one of the project's tools (DS4_RUN: an emulator for cross builds).
inline std::string tool_command(const std::string& tool) { return env_or("DS4_RUN", "") + " '" + build_path(tool) + "'"; }

inline std::string read_binary(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw Error("cannot read " + path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// The message of the Error that f throws; "" when it throws none.
template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace ds4
