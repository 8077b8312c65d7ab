#include <cstdint>
#include <cstring>

#include "data/shards.h"
#include "reader.h"

namespace rownorm::fuzz {

Exit refusal() { return Exit::data; }

void read(std::span<const std::byte> input) {
  const ShardInfo info = parse_shard(input, "m.bin");
  require(info.tokens >= 1 && 1024 + 2 * static_cast<std::size_t>(info.tokens) == input.size(), "another size");
  require(info.header_digest.size() == 32, "no digest");
  std::vector<std::uint16_t> tokens(static_cast<std::size_t>(info.tokens));
  std::memcpy(tokens.data(), input.data() + 1024, 2 * tokens.size());
  for (const std::int64_t vocabulary : {std::int64_t{1}, std::int64_t{tokens.front()} + 1, std::int64_t{65536}}) {
    std::int64_t first = 0;
    while (first < info.tokens && tokens[static_cast<std::size_t>(first)] < vocabulary) ++first;
    require(find_bad_token(tokens, vocabulary).position == (first == info.tokens ? -1 : first), "another bad token");
  }
}

// The count of tokens (the third word) is the file's.
std::string repaired(std::string input) {
  if (input.size() < 1026) return input;
  const auto count = static_cast<std::int32_t>((input.size() - 1024) / 2);
  std::memcpy(input.data() + 8, &count, sizeof count);
  input.resize(1024 + 2 * static_cast<std::size_t>(count));
  return input;
}

}  // namespace rownorm::fuzz
