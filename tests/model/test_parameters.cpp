#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>

#include "base/error.h"
#include "device.h"
#include "golden.h"
#include "model/parameters.h"
#include "model/transformer.h"
#include "ops/open.h"

namespace rownorm {
namespace {

ModelConfig small() {
  ModelConfig m;
  m.vocab_size = 11;
  m.context = 4;
  m.layers = 2;
  m.width = 6;
  m.head_dim = 2;
  return m;
}

TEST(Parameters, CountIsTheTablesSum) {
  for (const std::int64_t ratio : {1, 4, 5}) {
    ModelConfig m = small();
    m.mlp_ratio = ratio;
    std::int64_t sum = 0;
    for (const auto& p : parameter_table(m)) sum += p.rows * p.cols;
    EXPECT_EQ(sum, parameter_count(m));
  }
}

TEST(Parameters, ViewsCoverEachLayersBlockWithoutOverlap) {
  const auto be = open_backend("reference", "auto");
  const ModelConfig m = small();
  Parameters p;
  const testing::Device memory(*be, {}, [&](Arena& arena) { p = make_parameters(arena, "weights", m, DType::f64); });
  const auto table = parameter_table(m);
  for (std::size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(p.matrices[i].shape, (Shape{table[i].rows, table[i].cols})) << table[i].name;
    be->fill(p.matrices[i], static_cast<double>(i + 1));
  }
  for (std::size_t i = 0; i < table.size(); ++i)
    for (const double v : testing::get(*be, p.matrices[i])) EXPECT_EQ(v, static_cast<double>(i + 1)) << table[i].name;
  for (const auto& layer : p.layers)
    for (const double v : testing::get(*be, layer.all)) EXPECT_NE(v, 0);
}

TEST(Parameters, InitialWeightsAreTheSameOnEveryBackendAndNormal) {
  ModelConfig m = small();
  m.width = 64;
  m.head_dim = 32;
  m.vocab_size = 301;
  const auto reference = open_backend("reference", "auto"), cpu = open_backend("cpu", "auto");
  const auto values = [&](Backend& be, std::uint64_t seed) {
    Parameters p;
    const testing::Device memory(be, {},
                                 [&](Arena& arena) { p = make_parameters(arena, "weights", m, be.master_dtype()); });
    initialize(be, p, m, seed);
    std::vector<std::vector<double>> all;
    for (const Tensor& t : p.matrices) all.push_back(testing::get(be, t));
    return all;
  };
  const auto a = values(*reference, 0);
  EXPECT_EQ(a, values(*cpu, 0));
  EXPECT_NE(a, values(*cpu, 1));
  EXPECT_NE(a[1], a[2]);  // one stream a name
  for (const auto& matrix : a) {
    double sum = 0, squares = 0;
    for (const double v : matrix) {
      sum += v;
      squares += v * v;
    }
    const auto n = static_cast<double>(matrix.size());
    EXPECT_NEAR(sum / n, 0, 5 * 0.02 / std::sqrt(n));  // five standard errors
    EXPECT_NEAR(std::sqrt(squares / n), 0.02, 5 * 0.02 / std::sqrt(2 * n));
  }
}

TEST(Activations, TheRopeTableHasTheConfigsBase) {
  ModelConfig m = small();
  m.width = 12;
  m.head_dim = 6;
  m.rope_base = 100;
  const auto be = open_backend("reference", "auto");
  Activations a;
  const testing::Device memory(*be, {}, [&](Arena& arena) {
    a = make_activations(arena, m, 1, DType::f64, DType::f64, Passes::forward, Recompute::none);
  });
  upload_rope(*be, a, m);
  const auto table = testing::get(*be, a.rope);
  for (std::size_t t = 0; t < 4; ++t)
    for (std::size_t i = 0; i < 3; ++i) {
      const double angle = static_cast<double>(t) / std::pow(100.0, static_cast<double>(i) / 3);
      EXPECT_NEAR(table[t * 6 + i], std::cos(angle), 1e-15);
      EXPECT_NEAR(table[t * 6 + 3 + i], std::sin(angle), 1e-15);
    }
}

class LoadWeights : public ::testing::Test {
 protected:
  using Edit = std::function<void(std::vector<SafetensorsWriter::Declaration>&, std::vector<std::vector<float>>&)>;

  // Writes the table's tensors after `edit`, loads them, and returns the error's message ("" for none).
  std::string load(const Edit& edit) {
    const ModelConfig m = small();
    std::vector<SafetensorsWriter::Declaration> names;
    std::vector<std::vector<float>> data;
    for (const auto& p : parameter_table(m)) {
      names.push_back({p.name, DType::f32, {p.rows, p.cols}});
      data.emplace_back(static_cast<std::size_t>(p.rows * p.cols), 0.5f);
    }
    edit(names, data);
    const auto path = std::filesystem::path(::testing::TempDir()) / "load_weights_test.safetensors";
    {
      SafetensorsWriter writer(path, names);
      for (const auto& d : data) writer.write(d.data(), d.size() * sizeof(float));
      writer.close();
    }
    const auto be = open_backend("cpu", "auto");
    Parameters p;
    const testing::Device memory(*be, {}, [&](Arena& arena) { p = make_parameters(arena, "w", m, DType::f32); });
    std::string message;
    try {
      load_weights(*be, p, m, path);
      for (const double v : testing::get(*be, p.head)) EXPECT_EQ(v, 0.5);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      message = e.what();
    }
    std::filesystem::remove(path);
    return message;
  }
};

TEST_F(LoadWeights, Whole) {
  EXPECT_EQ(load([](auto&, auto&) {}), "");
}

TEST_F(LoadWeights, MissingExtraMisshapenNotFinite) {
  EXPECT_NE(load([](auto& names, auto& data) {
              names.pop_back();
              data.pop_back();
            }).find("lm_head.weight"),
            std::string::npos);
  EXPECT_NE(load([](auto& names, auto& data) {
              names.push_back({"blocks.2.down.weight", DType::f32, {1, 1}});
              data.push_back({1});
            }).find("blocks.2.down.weight is not a parameter"),
            std::string::npos);
  EXPECT_NE(load([](auto& names, auto&) {
              names[0].shape = {6, 11};
            }).find("embed.weight has shape (6, 11), expected (11, 6)"),
            std::string::npos);
  EXPECT_NE(load([](auto&, auto& data) {
              data[3][5] = std::numeric_limits<float>::quiet_NaN();
            }).find("blocks.0.attn.v.weight holds a value that is not finite"),
            std::string::npos);
}

}  // namespace
}  // namespace rownorm
