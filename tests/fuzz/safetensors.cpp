#include "base/safetensors.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "reader.h"

namespace rownorm::fuzz {
namespace {

bool readable_as(DType dtype, const std::string& stored) {
  if (dtype == DType::i32) return stored == "I32";
  return stored == "F64" || stored == "F32" || stored == "F16" || stored == "BF16";
}

Shape shape_of(const std::vector<std::int64_t>& s) {
  switch (s.size()) {
    case 0:
      return {};
    case 1:
      return {s[0]};
    case 2:
      return {s[0], s[1]};
    case 3:
      return {s[0], s[1], s[2]};
    default:
      return {s[0], s[1], s[2], s[3]};
  }
}

}  // namespace

Exit refusal() { return Exit::data; }

void read(std::span<const std::byte> input) {
  const SafetensorsFile file(input, "m.safetensors");
  std::size_t bytes = 0;
  for (const auto& [name, entry] : file.entries()) {
    require(entry.data.data() >= input.data() && entry.data.data() + entry.data.size() <= input.data() + input.size(),
            "data outside the file");
    bytes += entry.data.size();
    const std::int64_t n = entry.elements();
    require(n >= 0 && static_cast<std::size_t>(n) <= input.size(), "another number of elements");
    if (entry.shape.size() > 4) continue;  // more than a Tensor has
    std::vector<double> memory(static_cast<std::size_t>(n));
    for (const DType dtype : {DType::f64, DType::f32, DType::i32}) try {
        file.read(name, Tensor{memory.data(), dtype, shape_of(entry.shape)});
        file.read(name, Tensor{memory.data(), dtype, {n - n / 2}}, n / 2);
        require(readable_as(dtype, entry.dtype), "read, but not of a type that can be");
      } catch (const Error&) {
        require(!readable_as(dtype, entry.dtype), "not read, but of a type that can be");
      }
  }
  std::uint64_t header;
  std::memcpy(&header, input.data(), sizeof header);
  require(8 + header + bytes == input.size(), "the tensors do not take the file");
}

// The header's length is that of its object.
std::string repaired(std::string input) {
  std::size_t depth = 0;
  bool quoted = false;
  for (std::size_t i = 8; i < input.size(); ++i) {
    const char c = input[i];
    if (quoted && c == '\\')
      ++i;
    else if (c == '"')
      quoted = !quoted;
    else if (!quoted && c == '{')
      ++depth;
    else if (!quoted && c == '}' && --depth == 0) {
      const std::uint64_t length = i + 1 - 8;
      std::memcpy(input.data(), &length, sizeof length);
      break;
    }
    if (depth == 0) break;
  }
  return input;
}

}  // namespace rownorm::fuzz
