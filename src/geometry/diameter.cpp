#include "geometry/diameter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <tuple>
#include <vector>

namespace rownorm {

DiameterTensors make_diameter(Arena& arena, std::int64_t vocab) {
  return {arena.add("diagnostics", DType::f64, {1}), arena.add("diagnostics", DType::i32, {2}),
          arena.add("diagnostics", DType::f64, {vocab})};
}

StepGeometry measure_step(Backend& be, Comm& comm, const DiameterTensors& tensors, Tensor step) {
  be.row_diameter(tensors.distance, tensors.pair, step, comm.rank(), comm.size());
  be.row_norms(tensors.norms, step);

  StepGeometry g;
  be.download(g.pair.data(), tensors.pair);
  g.diameter = be.read(tensors.distance);
  // The farthest pair of all shares; of equal ones the lexicographically first, for any number of ranks.
  const auto shares = comm.all_gather(fmt::format("{} {} {}", g.diameter, g.pair[0], g.pair[1]));
  for (const std::string& text : shares) {
    StepGeometry share;
    char* rest = nullptr;
    share.diameter = std::strtod(text.c_str(), &rest);  // an istream would refuse NaN, which every share then has
    std::istringstream(rest) >> share.pair[0] >> share.pair[1];
    if (std::tie(g.diameter, share.pair) < std::tie(share.diameter, g.pair))
      std::tie(g.diameter, g.pair) = std::tie(share.diameter, share.pair);
  }

  std::vector<double> norms(static_cast<std::size_t>(step.dim(0)));
  be.download(norms.data(), tensors.norms);
  const auto middle = norms.begin() + (step.dim(0) - 1) / 2;
  std::nth_element(norms.begin(), middle, norms.end());
  g.row_norm_median = *middle;
  g.row_norm_max = *std::max_element(norms.begin(), norms.end());
  return g;
}

}  // namespace rownorm
