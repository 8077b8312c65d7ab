// Reading the expected values of tests/golden, and the measure in which they are compared.
#pragma once
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/safetensors.h"

namespace rownorm::golden {

inline std::string path(const std::string& name) { return std::string(ROWNORM_GOLDEN) + "/" + name; }

inline nlohmann::json json(const std::string& name) { return nlohmann::json::parse(std::ifstream(path(name))); }

// Any float tensor as doubles.
inline std::vector<double> values(const SafetensorsFile& file, const std::string& name) {
  const auto& entry = file.at(name);
  std::vector<double> out(static_cast<std::size_t>(entry.elements()));
  Shape shape;
  const auto& s = entry.shape;
  if (s.size() == 1) shape = {s[0]};
  if (s.size() == 2) shape = {s[0], s[1]};
  if (s.size() == 3) shape = {s[0], s[1], s[2]};
  file.read(name, Tensor{out.data(), DType::f64, shape});
  return out;
}

// ||a - b||_2 / ||b||_2; the plain norm of a where b is zero. NaN if any element is.
inline double relative_l2(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return NAN;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(norm > 0 ? difference / norm : difference);
}

}  // namespace rownorm::golden
