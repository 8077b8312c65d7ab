// Random numbers that are the same everywhere.
//
// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): counter based, for initial
// weights. SeedSequence, PCG64 and Generator.shuffle as in NumPy, for the data order (PAPER 3):
//   >>> numpy.random.default_rng(numpy.random.SeedSequence([seed, epoch, 0])).shuffle(order)
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/tensor.h"

namespace rownorm {

__extension__ typedef unsigned __int128 uint128;  // a compiler's extension, and all that PCG64 needs

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

// out[i], i = 0.. : element `first + i` of the stream of i.i.d. N(0, std^2) named by (seed, stream name); any element
// can be had alone. out is f32 or f64 host memory.
//
// Elements 2b and 2b + 1 are std * r cos(a) and std * r sin(a), r = sqrt(-2 ln u), a = 2 pi v (Box-Muller, in double;
// f32 is the rounded f64). u and v in (0, 1] are ((x >> 11) + 1) / 2^53 of the two 64-bit halves x of the Philox block
// with key = seed, counter = (b, FNV-1a 64 of the stream's name); all 64-bit numbers low word first.
void fill_normal(Tensor out, std::uint64_t seed, std::string_view stream, double std, std::int64_t first = 0);

// numpy.random.SeedSequence(entropy).generate_state: each integer contributes its 32-bit words, low word first, at
// least one word.
class SeedSequence {
 public:
  explicit SeedSequence(std::span<const std::uint64_t> entropy);
  std::vector<std::uint32_t> generate_u32(std::size_t n) const;
  std::vector<std::uint64_t> generate_u64(std::size_t n) const;

 private:
  std::array<std::uint32_t, 4> pool_;
};

// numpy.random.PCG64 (128-bit LCG, XSL-RR output), seeded from a SeedSequence.
class Pcg64 {
 public:
  explicit Pcg64(const SeedSequence& seed);
  std::uint64_t next64();
  std::uint32_t next32();  // low half of a 64-bit output first, then its high half
  uint128 state() const { return state_; }
  uint128 increment() const { return increment_; }

 private:
  uint128 state_, increment_;
  bool has_half_ = false;
  std::uint32_t half_ = 0;
};

// default_rng(SeedSequence(entropy)).shuffle(arange(n)): Fisher-Yates from the last index down, partner in [0, i] by
// masked rejection on next32 (n <= 2^32).
std::vector<std::uint32_t> shuffled_range(std::span<const std::uint64_t> entropy, std::uint32_t n);

}  // namespace rownorm
