#include "base/random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <numeric>
#include <stdexcept>

namespace rownorm {

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key[0] += 0x9E3779B9;  // golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

namespace {

std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

// http://www.isthe.com/chongo/tech/comp/fnv
std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

// The upper 53 bits of two words (the second is the high one) as a uniform number in (0, 1].
double uniform(std::uint32_t first, std::uint32_t second) {
  return static_cast<double>(((std::uint64_t{second} << 32 | first) >> 11) + 1) * 0x1p-53;
}

template <class T>
void fill(Tensor out, std::uint64_t seed, std::uint64_t stream, double std, std::int64_t first) {
  T* values = out.as<T>();
  const std::int64_t end = first + out.size();
  for (std::int64_t block = first / 2; 2 * block < end; ++block) {
    const auto b = static_cast<std::uint64_t>(block);
    const auto words = philox4x32({low(b), high(b), low(stream), high(stream)}, {low(seed), high(seed)});
    const double radius = std::sqrt(-2 * std::log(uniform(words[0], words[1])));
    const double angle = 2 * std::numbers::pi * uniform(words[2], words[3]);
    if (2 * block >= first) values[2 * block - first] = static_cast<T>(std * (radius * std::cos(angle)));
    if (2 * block + 1 < end) values[2 * block + 1 - first] = static_cast<T>(std * (radius * std::sin(angle)));
  }
}

}  // namespace

void fill_normal(Tensor out, std::uint64_t seed, std::string_view stream, double std, std::int64_t first) {
  if (first < 0) throw std::logic_error("[random] the first element of a stream is 0");
  const std::uint64_t hash = fnv1a(stream);
  if (out.dtype == DType::f64)
    fill<double>(out, seed, hash, std, first);
  else
    fill<float>(out, seed, hash, std, first);
}

// numpy/random/bit_generator.pyx, after O'Neill's seed_seq_fe ("Developing a seed_seq alternative", 2015).
SeedSequence::SeedSequence(std::span<const std::uint64_t> entropy) {
  std::vector<std::uint32_t> words;
  for (const std::uint64_t value : entropy) {
    words.push_back(low(value));
    if (high(value) != 0) words.push_back(high(value));
  }
  words.resize(std::max(words.size(), pool_.size()));

  std::uint32_t constant = 0x43b0d7e5;
  const auto hash = [&constant](std::uint32_t value) {
    value ^= constant;
    constant *= 0x931e8875;
    value *= constant;
    return value ^ value >> 16;
  };
  const auto mix = [](std::uint32_t x, std::uint32_t y) {
    const std::uint32_t value = 0xca01f9dd * x - 0x4973f715 * y;
    return value ^ value >> 16;
  };
  for (std::size_t i = 0; i < pool_.size(); ++i) pool_[i] = hash(words[i]);
  for (std::size_t from = 0; from < pool_.size(); ++from)
    for (std::size_t to = 0; to < pool_.size(); ++to)
      if (from != to) pool_[to] = mix(pool_[to], hash(pool_[from]));
  for (std::size_t from = pool_.size(); from < words.size(); ++from)
    for (std::uint32_t& to : pool_) to = mix(to, hash(words[from]));
}

std::vector<std::uint32_t> SeedSequence::generate_u32(std::size_t n) const {
  std::vector<std::uint32_t> state(n);
  std::uint32_t constant = 0x8b51f9dd;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint32_t value = pool_[i % pool_.size()] ^ constant;
    constant *= 0x58f38ded;
    value *= constant;
    state[i] = value ^ value >> 16;
  }
  return state;
}

std::vector<std::uint64_t> SeedSequence::generate_u64(std::size_t n) const {
  const std::vector<std::uint32_t> words = generate_u32(2 * n);
  std::vector<std::uint64_t> state(n);
  for (std::size_t i = 0; i < n; ++i) state[i] = std::uint64_t{words[2 * i + 1]} << 32 | words[2 * i];
  return state;
}

namespace {

constexpr uint128 wide(std::uint64_t upper, std::uint64_t lower) { return static_cast<uint128>(upper) << 64 | lower; }

constexpr uint128 multiplier = wide(0x2360ed051fc65da4, 0x4385df649fccf645);

}  // namespace

Pcg64::Pcg64(const SeedSequence& seed) {
  const std::vector<std::uint64_t> words = seed.generate_u64(4);
  increment_ = wide(words[2], words[3]) << 1 | 1;
  state_ = (increment_ + wide(words[0], words[1])) * multiplier + increment_;
}

std::uint64_t Pcg64::next64() {
  state_ = state_ * multiplier + increment_;
  const auto upper = static_cast<std::uint64_t>(state_ >> 64), lower = static_cast<std::uint64_t>(state_);
  return std::rotr(upper ^ lower, static_cast<int>(upper >> 58));
}

std::uint32_t Pcg64::next32() {
  if (has_half_) {
    has_half_ = false;
    return half_;
  }
  const std::uint64_t value = next64();
  has_half_ = true;
  half_ = high(value);
  return low(value);
}

std::vector<std::uint32_t> shuffled_range(std::span<const std::uint64_t> entropy, std::uint32_t n) {
  std::vector<std::uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  Pcg64 generator{SeedSequence(entropy)};
  for (std::uint32_t i = n; i-- > 1;) {
    const std::uint32_t mask = ~std::uint32_t{0} >> std::countl_zero(i);  // the smallest 2^k - 1 >= i
    std::uint32_t partner;
    do partner = generator.next32() & mask;
    while (partner > i);
    std::swap(order[i], order[partner]);
  }
  return order;
}

}  // namespace rownorm
