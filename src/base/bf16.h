// bfloat16 as its bits: the upper half of a float.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace rownorm {

inline float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// To nearest, ties to even; what is too large becomes infinite, a NaN stays one.
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace rownorm
