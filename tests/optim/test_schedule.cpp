#include <gtest/gtest.h>

#include "golden.h"
#include "optim/schedule.h"

namespace rownorm {
namespace {

TEST(Schedule, GoldenTables) {
  const auto json = golden::json("schedule.json");
  std::size_t checked = 0;
  for (const auto& table : json["tables"]) {
    const std::int64_t total = table["total"], warmup = table["warmup"];
    for (std::size_t i = 0; i < table["scale"].size(); ++i) {
      const std::int64_t t =
          table.contains("steps") ? table["steps"][i].get<std::int64_t>() : static_cast<std::int64_t>(i);
      // a cosine and four roundings of numbers of size one
      EXPECT_NEAR(lr_scale(t, total, warmup, table["min_ratio"]), table["scale"][i].get<double>(), 1e-15)
          << "total " << total << " warmup " << warmup << " t " << t;
      ++checked;
    }
  }
  EXPECT_GT(checked, 80u);
}

TEST(Schedule, FirstUpdateIsZeroAndTheLastExactlyTheMinimum) {
  EXPECT_EQ(lr_scale(0, 1200, 120, 0.1), 0.0);
  EXPECT_EQ(lr_scale(120, 1200, 120, 0.1), 1.0);
  EXPECT_EQ(lr_scale(1199, 1200, 120, 0.1), 0.1);
  EXPECT_EQ(lr_scale(5000, 1200, 120, 0.1), 0.1);
}

}  // namespace
}  // namespace rownorm
