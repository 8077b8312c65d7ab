// Diameter and Hilbert RMS of golden's head steps, and the panel's bookkeeping.
#include <gtest/gtest.h>

#include "comm/comm.h"
#include "device.h"
#include "geometry/diameter.h"
#include "geometry/hilbert.h"
#include "golden.h"
#include "ops/open.h"

namespace rownorm {
namespace {

class Golden : public ::testing::TestWithParam<const char*> {};

TEST_P(Golden, DiameterAndHilbertRmsOfEveryHeadStep) {
  const auto json = golden::json("optim_head.json");
  const SafetensorsFile file(golden::path("optim_head.safetensors"));
  const auto be = testing::open(GetParam());
  const auto comm = make_single_process();
  const bool exact = be->master_dtype() == DType::f64;
  const std::int64_t rows = json["rows"], d = json["dim"], positions = json["panel_tokens"];
  Tensor step, hidden;
  DiameterTensors tensors;
  Panel panel;
  WorkspaceSizes sizes;
  sizes.vocab = rows;
  sizes.width = d;
  sizes.panel = positions;
  sizes.diameter = true;
  const testing::Device memory(*be, sizes, [&](Arena& arena) {
    step = arena.add("step", be->master_dtype(), {rows, d});
    hidden = arena.add("hidden", be->compute_dtype(), {positions, d});
    tensors = make_diameter(arena, rows);
    panel = make_panel(arena, {{100, 100 + positions}}, d, be->compute_dtype(), be->master_dtype());
  });
  testing::put(*be, hidden, golden::values(file, "panel_hidden"));
  // The panel's rows arrive in two batches of validation positions that do not fit its range.
  be->fill(panel.hidden, 0);
  collect(*be, panel, hidden.rows(0, 5), 100);
  collect(*be, panel, hidden.rows(5, positions), 105);

  for (const auto& c : json["cases"])
    for (std::size_t k = 0; k < 4; ++k) {
      const auto values = golden::values(file, c["name"].get<std::string>() + "/step" + std::to_string(k + 1));
      testing::put(*be, step, values);
      const StepGeometry g = measure_step(*be, *comm, tensors, step);
      const double diameter = c["steps"][k]["diameter_brute_force"], rms = c["steps"][k]["hilbert_rms"];
      // f32: S is rounded once (6e-8 of a row); the products S h of length 24 add about sqrt(24) roundings.
      EXPECT_NEAR(g.diameter, diameter, (exact ? 1e-14 : 2e-7) * diameter);
      EXPECT_NEAR(hilbert_rms(*be, *comm, panel, step), rms, (exact ? 1e-13 : 1e-6) * rms);

      std::vector<double> norms;
      for (std::int64_t i = 0; i < rows; ++i) {
        double squares = 0;
        for (std::int64_t j = 0; j < d; ++j) squares += std::pow(values[static_cast<std::size_t>(i * d + j)], 2);
        norms.push_back(std::sqrt(squares));
      }
      std::sort(norms.begin(), norms.end());
      EXPECT_NEAR(g.row_norm_max, norms.back(), 2e-7 * norms.back());
      EXPECT_NEAR(g.row_norm_median, norms[static_cast<std::size_t>(rows / 2)], 2e-7 * norms.back());
      if (diameter > 0) {
        double squares = 0;
        for (std::int64_t j = 0; j < d; ++j)
          squares += std::pow(
              values[static_cast<std::size_t>(g.pair[0] * d + j)] - values[static_cast<std::size_t>(g.pair[1] * d + j)],
              2);
        EXPECT_NEAR(std::sqrt(squares), diameter, 1e-12 * diameter);  // the pair attains it
        EXPECT_LT(g.pair[0], g.pair[1]);
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Backends, Golden, ::testing::Values(ROWNORM_TEST_BACKENDS));

TEST(StepGeometry, MedianOfAnEvenNumberOfRowsIsTheLowerMiddleOne) {
  const auto be = open_backend("reference", "auto");
  const auto comm = make_single_process();
  Tensor step;
  DiameterTensors tensors;
  const testing::Device memory(*be, {}, [&](Arena& arena) {
    step = arena.add("step", DType::f64, {4, 1});
    tensors = make_diameter(arena, 4);
  });
  testing::put(*be, step, {-3, 1, 7, 2});
  const StepGeometry g = measure_step(*be, *comm, tensors, step);
  EXPECT_EQ(g.row_norm_median, 2);
  EXPECT_EQ(g.row_norm_max, 7);
  EXPECT_EQ(g.diameter, 10);
  EXPECT_EQ(g.pair, (std::array<std::int32_t, 2>{0, 2}));
}

TEST(Panel, RangesComeInTheirOrderFromAnyBatches) {
  const auto be = open_backend("reference", "auto");
  const std::int64_t d = 2, positions = 40;
  Tensor hidden;
  Panel panel;
  const testing::Device memory(*be, {}, [&](Arena& arena) {
    hidden = arena.add("hidden", DType::f64, {positions, d});
    panel = make_panel(arena, {{30, 33}, {2, 9}, {15, 16}}, d, DType::f64, DType::f64);
  });
  std::vector<double> values;
  for (std::int64_t p = 0; p < positions; ++p) values.insert(values.end(), {static_cast<double>(p), -1.0});
  testing::put(*be, hidden, values);
  const std::vector<double> expected{30, 31, 32, 2, 3, 4, 5, 6, 7, 8, 15};
  for (const std::int64_t batch : {1, 3, 8, 40}) {
    be->fill(panel.hidden, 0);
    for (std::int64_t first = 0; first < positions; first += batch)
      collect(*be, panel, hidden.rows(first, std::min(first + batch, positions)), first);
    const auto rows = testing::get(*be, panel.hidden);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(rows[2 * i], expected[i]) << "batch " << batch;
  }
}

}  // namespace
}  // namespace rownorm
