// The next token from a position's logits, on the host and in double: the same logits and the same random number give
// the same token everywhere.
#pragma once
#include <cstdint>
#include <span>

namespace rownorm {

struct Sampling {
  double temperature = 1;  // finite and >= 0; 0: the most likely token, the smallest of equal ones
  std::int64_t top_k = 0;  // only the k most likely tokens; 0: all
  double top_p = 1;        // in (0, 1]: of those only the most likely ones that together reach p of their probability
};

// Token i with probability proportional to exp(logits_i / temperature) among those that top_k leaves and then top_p
// (Holtzman et al. 2019, "The curious case of neural text degeneration"); equal logits rank by token. `uniform` in
// [0, 1) picks: the first token, by number, at which the running sum exceeds uniform times the whole.
// All logits finite, at least one.
std::int32_t sample_token(std::span<const double> logits, const Sampling& sampling, double uniform);

}  // namespace rownorm
