#include "model/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace rownorm {

std::int32_t sample_token(std::span<const double> logits, const Sampling& sampling, double uniform) {
  const auto best = std::ranges::max_element(logits);  // the first of equal ones
  if (sampling.temperature == 0) return static_cast<std::int32_t>(best - logits.begin());

  std::vector<std::int32_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto more_likely = [&](std::int32_t a, std::int32_t b) {
    const double za = logits[static_cast<std::size_t>(a)], zb = logits[static_cast<std::size_t>(b)];
    return za != zb ? za > zb : a < b;
  };
  if (sampling.top_k > 0 && sampling.top_k < std::ssize(tokens)) {
    std::nth_element(tokens.begin(), tokens.begin() + sampling.top_k, tokens.end(), more_likely);
    tokens.resize(static_cast<std::size_t>(sampling.top_k));
    std::ranges::sort(tokens);
  }
  const auto weight = [&](std::int32_t token) {
    return std::exp((logits[static_cast<std::size_t>(token)] - *best) / sampling.temperature);
  };
  const auto sum = [&] {
    return std::accumulate(tokens.begin(), tokens.end(), 0.0,
                           [&](double before, std::int32_t token) { return before + weight(token); });
  };

  double total = sum();
  if (sampling.top_p < 1) {
    // Tokens below this share together hold less than half of what may be left out, so none of them is needed: only
    // the few others are sorted.
    const double least = 0.5 * (1 - sampling.top_p) * total / static_cast<double>(tokens.size());
    std::erase_if(tokens, [&](std::int32_t token) { return weight(token) < least; });
    std::ranges::sort(tokens, more_likely);
    double reached = 0;
    std::size_t count = 0;
    while (count < tokens.size() && reached < sampling.top_p * total) reached += weight(tokens[count++]);
    tokens.resize(count);
    std::ranges::sort(tokens);
    total = sum();
  }

  double reached = 0;
  for (const std::int32_t token : tokens)
    if ((reached += weight(token)) > uniform * total) return token;
  return tokens.back();  // not reached: the last sum is the total, and uniform is less than 1
}

}  // namespace rownorm
