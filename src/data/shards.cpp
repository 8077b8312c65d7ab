#include "data/shards.h"

#include <glob.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "base/error.h"

namespace rownorm {

static_assert(std::endian::native == std::endian::little, "shards are read in place and are little-endian");

std::vector<std::filesystem::path> expand_pattern(const std::string& pattern) {
  std::error_code ignored;
  if (std::filesystem::is_directory(pattern, ignored))
    fail(Exit::data, "[shard] {}: is a folder, must be a file or a pattern such as {}", pattern,
         (std::filesystem::path(pattern) / "*.bin").string());
  if (std::filesystem::exists(pattern, ignored) || pattern.find_first_of("*?[") == pattern.npos) return {pattern};

  glob_t matches{};
  const int status = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &matches);
  std::vector<std::filesystem::path> paths(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  globfree(&matches);
  if (status == GLOB_NOSPACE) throw std::bad_alloc();
  if (paths.empty()) fail(Exit::data, "[shard] {}: no file matches this pattern", pattern);
  for (const auto& path : paths)
    if (std::filesystem::is_directory(path, ignored))
      fail(Exit::data, "[shard] {}: is a folder, but matches {}; only files may", path.string(), pattern);
  std::ranges::sort(paths, {}, [](const auto& path) { return std::tuple(path.filename(), path); });
  return paths;
}

ShardInfo parse_shard(std::span<const std::byte> file, const std::filesystem::path& path) {
  const auto size = static_cast<std::int64_t>(file.size());
  if (size == 0) fail(Exit::data, "[shard] {}: the file is empty", path.string());
  if (size < shard_header_bytes)
    fail(Exit::data, "[shard] {}: the file holds {} bytes, a header alone has {} (truncated?)", path.string(), size,
         shard_header_bytes);

  std::array<std::int32_t, 3> header;
  std::memcpy(header.data(), file.data(), sizeof(header));
  const auto [magic, version, count] = header;
  if (magic != shard_magic)
    fail(Exit::data, "[shard] {}: magic number {}, must be {} (not a token shard?)", path.string(), magic, shard_magic);
  if (version != 1) fail(Exit::data, "[shard] {}: format version {}, must be 1", path.string(), version);
  if (count <= 0) fail(Exit::data, "[shard] {}: header says {} tokens, must be at least 1", path.string(), count);
  if (const std::int64_t bytes = size - shard_header_bytes; bytes != 2 * std::int64_t{count})
    fail(Exit::data, "[shard] {}: header says {} tokens, the file holds {}{} ({})", path.string(), count, bytes / 2,
         bytes % 2 != 0 ? " and an odd byte" : "", bytes < 2 * std::int64_t{count} ? "truncated?" : "too long");
  return {path, count, digest(file.first(shard_header_bytes))};
}

ShardInfo read_shard_info(const std::filesystem::path& path) {
  const MappedFile file("shard", path);
  return parse_shard(file.bytes(), path);
}

BadToken find_bad_token(std::span<const std::uint16_t> tokens, std::int64_t vocab_size) {
  if (vocab_size > UINT16_MAX) return {};
  constexpr std::size_t chunk = 1 << 14;
  for (std::size_t begin = 0; begin < tokens.size(); begin += chunk) {
    const auto part = tokens.subspan(begin, std::min(chunk, tokens.size() - begin));
    std::uint16_t largest = 0;  // the maximum first: this loop is vectorised, a search that may stop is not
    for (const std::uint16_t token : part) largest = std::max(largest, token);
    if (largest < vocab_size) continue;
    const auto bad = std::ranges::find_if(part, [&](std::uint16_t token) { return token >= vocab_size; });
    return {static_cast<std::int64_t>(begin) + (bad - part.begin()), *bad};
  }
  return {};
}

ShardSet::ShardSet(std::string role, const std::string& pattern, std::int64_t vocab_size)
    : role_(std::move(role)), vocab_size_(vocab_size) {
  for (const auto& path : expand_pattern(pattern)) shards_.push_back(read_shard_info(path));
  open_.resize(shards_.size());
}

ShardSet::ShardSet(std::string role, std::vector<std::uint16_t> tokens, std::int64_t vocab_size)
    : role_(std::move(role)),
      vocab_size_(vocab_size),
      shards_{{"memory", static_cast<std::int64_t>(tokens.size()), ""}},
      in_memory_(std::move(tokens)) {
  if (const BadToken bad = find_bad_token(in_memory_, vocab_size); bad.position >= 0)
    throw std::logic_error(
        fmt::format("[shard] token {} in memory is {}, expected less than {}", bad.position, bad.value, vocab_size));
}

std::int64_t ShardSet::tokens() const {
  std::int64_t sum = 0;
  for (const ShardInfo& shard : shards_) sum += shard.tokens;
  return sum;
}

std::span<const std::uint16_t> ShardSet::tokens_of(std::size_t s) {
  const ShardInfo& shard = shards_.at(s);
  if (open_.empty()) return in_memory_;
  const auto tokens_in = [&](const MappedFile& file) {
    return std::span(reinterpret_cast<const std::uint16_t*>(file.bytes().data() + shard_header_bytes),
                     static_cast<std::size_t>(shard.tokens));
  };
  if (!open_[s]) {
    auto file = std::make_unique<MappedFile>("shard", shard.path);
    if (parse_shard(file->bytes(), shard.path).header_digest != shard.header_digest)
      fail(Exit::data, "[shard] {}: the header has changed since the run began", shard.path.string());
    if (const BadToken bad = find_bad_token(tokens_in(*file), vocab_size_); bad.position >= 0)
      fail(Exit::data, "[shard] {}: token {} of the {} data is {}, must be less than model.vocab_size {}",
           shard.path.string(), bad.position, role_, bad.value, vocab_size_);
    open_[s] = std::move(file);
  }
  return tokens_in(*open_[s]);
}

void ShardSet::check_copied(std::size_t s, std::span<const std::int32_t> tokens) const {
  const auto largest = std::ranges::max_element(tokens);
  if (largest != tokens.end() && *largest >= vocab_size_)
    fail(Exit::data, "[shard] {}: changed while in use: now holds token {}, must be less than model.vocab_size {}",
         shards_.at(s).path.string(), *largest, vocab_size_);
}

}  // namespace rownorm
