// What `rownorm bench` measures (bench.cpp) and how it is told (bench_report.cpp).
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ops/backend.h"
#include "train/config.h"

namespace rownorm::bench {

using Index = std::int64_t;

enum class Phase { gradients, optimizer, diameter, hilbert, validation };

inline bool in_update(Phase phase) { return phase == Phase::gradients || phase == Phase::optimizer; }

struct Call {
  Phase phase;
  Work work;
  Index from = 0, to = 0;  // marks
};

// One of the three linear operations with its sizes: y(N,m) = x(N,k) w(m,k)^T, dx(N,k) = dy(N,m) w(m,k),
// dw(m,k) += dy(N,m)^T x(N,k).
struct Product {
  std::string operation;
  Index N, m, k;
  friend bool operator<(const Product& a, const Product& b) {
    return std::tie(a.operation, a.N, a.m, a.k) < std::tie(b.operation, b.N, b.m, b.k);
  }
  double flops() const { return 2 * static_cast<double>(N) * static_cast<double>(m) * static_cast<double>(k); }
};

struct Use {
  std::set<std::string> within;  // operations
  Index count = 0;               // in an update
};

struct Round {
  double peak = 0, stream = 0;      // FLOP/s, bytes/s; 0: the device has no such figure
  std::vector<double> alone;        // seconds of each product
  std::map<Phase, double> seconds;  // of each phase
  std::vector<double> calls;        // seconds of each operation
  double update() const { return seconds.at(Phase::gradients) + seconds.at(Phase::optimizer); }
};

// All of a bench.
struct Measured {
  const Config& config;
  std::string device;           // the backend's description
  Index validation_tokens = 0;  // of config.evaluation.tokens, that were measured; 0: no validation
  std::vector<Call> calls{};    // of an update and the measurements, in order
  std::map<Product, Use> products{};
  std::vector<Round> rounds{};
};

// The figures of docs/bench.md, and the same as tables on stdout.
nlohmann::ordered_json report(const Measured& measured);
void print_text(const nlohmann::ordered_json& report);

}  // namespace rownorm::bench
