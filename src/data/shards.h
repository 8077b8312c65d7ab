// Token shards in llm.c's format (PAPER 3): 256 little-endian int32 (magic 20240520, version 1, token count, zeros),
// then `count` uint16 tokens. Files are memory-mapped; nothing in them is trusted.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"

namespace rownorm {

inline constexpr std::int32_t shard_magic = 20240520;
inline constexpr std::int64_t shard_header_bytes = 1024;

// Paths for a pattern: a plain file name, or a glob with * ? [] in any component; sorted by file name (then by path).
// Error (exit 3) when nothing matches or a match is a folder.
std::vector<std::filesystem::path> expand_pattern(const std::string& pattern);

struct ShardInfo {
  std::filesystem::path path;
  std::int64_t tokens = 0;    // from the header; the file's size agrees
  std::string header_digest;  // XXH3-128 of the 1024 header bytes
  std::string name() const { return path.filename().string(); }
};

// Reads and checks the header and the size. Error (exit 3): missing, unreadable, a folder, shorter than a header, wrong
// magic or version, negative or impossible count, file longer or shorter than the count says.
ShardInfo read_shard_info(const std::filesystem::path& path);
ShardInfo parse_shard(std::span<const std::byte> file, const std::filesystem::path& path);  // the same for its bytes

// A set of shards, in name order. Opening checks every header; a shard's tokens are scanned (each < vocab_size) when
// the shard is first used, before any of its tokens is.
class ShardSet {
 public:
  // `role` ("train", "validation") appears in messages.
  ShardSet(std::string role, const std::string& pattern, std::int64_t vocab_size);
  // One shard without a file, each token < vocab_size.
  ShardSet(std::string role, std::vector<std::uint16_t> tokens, std::int64_t vocab_size);

  const std::vector<ShardInfo>& shards() const { return shards_; }
  std::int64_t tokens() const;  // of all shards

  // Tokens of shard s, scanned. Error (exit 3) with file, position and value of the first token >= vocab_size.
  std::span<const std::uint16_t> tokens_of(std::size_t s);

  bool scanned(std::size_t s) const { return open_.empty() || open_[s] != nullptr; }

  // Error (exit 3) if tokens that were copied out of shard s are not < vocab_size: the file was overwritten in use.
  void check_copied(std::size_t s, std::span<const std::int32_t> tokens) const;

 private:
  std::string role_;
  std::int64_t vocab_size_;
  std::vector<ShardInfo> shards_;
  std::vector<std::unique_ptr<MappedFile>> open_;  // null until first used; none of a shard in memory
  std::vector<std::uint16_t> in_memory_;
};

// Position and value of the first token >= vocab_size, or -1.
struct BadToken {
  std::int64_t position = -1;
  std::uint16_t value = 0;
};
BadToken find_bad_token(std::span<const std::uint16_t> tokens, std::int64_t vocab_size);

}  // namespace rownorm
