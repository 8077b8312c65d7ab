// Shards for the tests of this room.
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "data/shards.h"

namespace rownorm {

inline std::vector<std::byte> shard_bytes(const std::vector<std::uint16_t>& tokens) {
  std::array<std::int32_t, 256> header{shard_magic, 1, static_cast<std::int32_t>(tokens.size())};
  std::vector<std::byte> bytes(sizeof(header) + 2 * tokens.size());
  std::memcpy(bytes.data(), header.data(), sizeof(header));
  if (!tokens.empty()) std::memcpy(bytes.data() + sizeof(header), tokens.data(), 2 * tokens.size());
  return bytes;
}

inline std::filesystem::path write_bytes(const std::filesystem::path& path, const std::vector<std::byte>& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  EXPECT_TRUE(file) << path;
  return path;
}

inline std::filesystem::path write_shard(const std::filesystem::path& path, const std::vector<std::uint16_t>& tokens) {
  return write_bytes(path, shard_bytes(tokens));
}

// first, first + 1, ...: a token says where it came from.
inline std::vector<std::uint16_t> counting(std::size_t n, std::uint16_t first = 0) {
  std::vector<std::uint16_t> tokens(n);
  for (std::size_t i = 0; i < n; ++i) tokens[i] = static_cast<std::uint16_t>(first + i);
  return tokens;
}

}  // namespace rownorm
