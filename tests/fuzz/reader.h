// A reader of files as its two drivers see it: libfuzzer.cpp (preset fuzz) and seeded.cpp (a test of every preset).
// <reader>.cpp defines the three functions; a new reader is such a file, its line in CMakeLists.txt and its corpus.
#pragma once
#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/error.h"

namespace rownorm::fuzz {

// Reads `input` and uses everything that was read. Throws the reader's Error where it refuses; any other exception, a
// crash or a sanitizer's report is a finding.
void read(std::span<const std::byte> input);

// The input with what random changes hardly ever get right (a length, a digest) made to agree, so that the checks
// behind it are reached.
std::string repaired(std::string input);

// The exit code of a refusal.
Exit refusal();

inline void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

inline std::string text_of(std::span<const std::byte> input) {
  return {reinterpret_cast<const char*>(input.data()), input.size()};
}

// Whether the input is read; a refusal must be one line with the reader's exit code.
inline bool accepts(std::span<const std::byte> input) {
  try {
    read(input);
    return true;
  } catch (const Error& error) {
    const std::string_view line = error.what();
    const bool printable = std::ranges::all_of(line, [](char c) { return static_cast<unsigned char>(c) >= ' '; });
    if (error.code() != refusal() || !line.starts_with('[') || line.size() >= 2000 || !printable)
      throw std::logic_error(fmt::format("not a refusal: exit {}, {}", static_cast<int>(error.code()), line));
    return false;
  }
}

}  // namespace rownorm::fuzz
