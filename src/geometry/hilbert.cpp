#include "geometry/hilbert.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace rownorm {
namespace {

std::vector<double> download_as_double(Backend& be, Tensor t) {
  std::vector<double> values(static_cast<std::size_t>(t.size()));
  if (t.dtype == DType::f64) {
    be.download(values.data(), t);
  } else if (t.dtype == DType::f32) {
    std::vector<float> narrow(values.size());
    be.download(narrow.data(), t);
    std::copy(narrow.begin(), narrow.end(), values.begin());
  } else {
    throw std::logic_error("[hilbert] ranges are f32 or f64");
  }
  return values;
}

}  // namespace

Panel make_panel(Arena& arena, const std::vector<PositionRange>& ranges, std::int64_t width, DType compute,
                 DType master) {
  std::int64_t n = 0;
  for (const auto& [begin, end] : ranges) n += end - begin;
  Panel panel{ranges, {}, {}, {}};
  panel.hidden = arena.add("diagnostics", compute, {n, width});
  panel.lowest = arena.add("diagnostics", master, {n});
  panel.highest = arena.add("diagnostics", master, {n});
  return panel;
}

void collect(Backend& be, const Panel& panel, Tensor hidden, std::int64_t first) {
  std::int64_t row = 0;  // of the panel, where the range begins
  for (const auto& [begin, end] : panel.ranges) {
    const std::int64_t from = std::max(begin, first), to = std::min(end, first + hidden.dim(0));
    if (from < to)
      be.copy(panel.hidden.rows(row + from - begin, row + to - begin), hidden.rows(from - first, to - first));
    row += end - begin;
  }
}

double hilbert_rms(Backend& be, Comm& comm, const Panel& panel, Tensor step) {
  if (comm.size() > 1) comm.all_reduce(panel.hidden, Reduction::sum);  // others hold zeros
  if (step.dim(0) > 0) {
    be.row_range(panel.lowest, panel.highest, panel.hidden, step);
  } else {
    be.fill(panel.lowest, std::numeric_limits<double>::infinity());
    be.fill(panel.highest, -std::numeric_limits<double>::infinity());
  }
  comm.all_reduce(panel.lowest, Reduction::min);
  comm.all_reduce(panel.highest, Reduction::max);
  const auto lowest = download_as_double(be, panel.lowest), highest = download_as_double(be, panel.highest);
  double squares = 0;
  for (std::size_t i = 0; i < lowest.size(); ++i) squares += (highest[i] - lowest[i]) * (highest[i] - lowest[i]);
  return std::sqrt(squares / static_cast<double>(lowest.size()));
}

}  // namespace rownorm
