// The optimizers against golden's published modules in float64, and ownership.
#include <gtest/gtest.h>

#include <set>

#include "comm/comm.h"
#include "device.h"
#include "golden.h"
#include "ops/open.h"
#include "optim/adamw.h"
#include "optim/muon.h"
#include "optim/optimizer.h"
#include "optim/rownorm.h"

namespace rownorm {
namespace {

using Values = std::vector<double>;

// One matrix with everything an optimizer touches.
struct Bench {
  std::unique_ptr<Backend> be;
  std::unique_ptr<Comm> comm = make_single_process();
  Slot slot;
  Tensor lr, column_sums;
  UpdateControl control;
  std::unique_ptr<testing::Device> memory;

  Bench(const std::string& device, std::int64_t rows, std::int64_t cols) : be(testing::open(device)) {
    WorkspaceSizes sizes;
    sizes.newton_schulz = {{1, std::min(rows, cols), std::max(rows, cols)}};
    sizes.vocab = rows;
    sizes.width = cols;
    const DType master = be->master_dtype();
    memory = std::make_unique<testing::Device>(*be, sizes, [&](Arena& arena) {
      for (Tensor* t : {&slot.weight, &slot.gradient, &slot.step, &slot.first, &slot.second})
        *t = arena.add("slot", master, {rows, cols});
      lr = arena.add("slot", DType::f64, {1});
      column_sums = arena.add("slot", DType::f64, {cols});
      control = {arena.add("slot", DType::f64, {1}), arena.add("slot", DType::f64, {1}),
                 arena.add("slot", DType::i32, {1})};
    });
    be->fill(control.clip, 1);
    be->fill(control.ok, 1);
  }

  void step(const OptimizerConfig& config, double rate, std::int64_t t) {
    be->fill(lr, rate);
    if (config.algorithm == Algorithm::muon) muon_step(*be, config, {&slot, 1}, lr, control);
    if (config.algorithm == Algorithm::adamw) adamw_step(*be, config, slot, lr, control, t);
    if (config.algorithm == Algorithm::rownorm)
      rownorm_step(*be, nullptr, config, slot, slot.weight.dim(0), column_sums, lr, control, t);
    be->apply_step(slot.weight, slot.step, lr, config.weight_decay, control);
  }
};

void expect_close(Bench& b, Tensor t, const SafetensorsFile& file, const std::string& name, double bound) {
  EXPECT_LE(golden::relative_l2(testing::get(*b.be, t), golden::values(file, name)), bound) << name;
}

OptimizerConfig config_from(const nlohmann::json& hyper) {
  OptimizerConfig c;
  c.lr = hyper["lr"];
  c.weight_decay = hyper["weight_decay"];
  c.eps = hyper["eps"];
  if (hyper.contains("momentum")) {
    c.algorithm = Algorithm::muon;
    c.momentum = hyper["momentum"];
    c.nesterov = hyper["nesterov"];
    c.newton_schulz_steps = hyper["ns_steps"];
  } else if (hyper.contains("betas")) {
    c.algorithm = Algorithm::adamw;
    c.betas = {hyper["betas"][0], hyper["betas"][1]};
  } else {
    c.algorithm = Algorithm::rownorm;
    c.beta = hyper["beta"];
  }
  return c;
}

class Golden : public ::testing::TestWithParam<const char*> {
 protected:
  bool exact() const { return std::string(GetParam()) == "reference"; }
  // f32: golden's own float32 runs differ by up to 1.1e-7 (parameters), 1.1e-6 (Muon's change of a parameter, which
  // five Newton-Schulz iterations amplify); moments carry a few roundings of 6e-8 each.
  double parameter_bound() const { return exact() ? 1e-12 : 3e-7; }
  double state_bound() const { return exact() ? 1e-12 : 5e-7; }
};

TEST_P(Golden, Muon) {
  const auto json = golden::json("optim_muon.json");
  const SafetensorsFile file(golden::path("optim_muon.safetensors"));
  const OptimizerConfig config = config_from(json["hyper"]);
  for (const auto& c : json["cases"]) {
    const std::string name = c["name"];
    Bench b(GetParam(), c["rows"], c["cols"]);
    testing::put(*b.be, b.slot.weight, golden::values(file, name + "/w0"));
    for (int k = 0; k < 4; ++k) {
      testing::put(*b.be, b.slot.gradient, golden::values(file, name + "/grad" + std::to_string(k)));
      b.step(config, json["lrs"][static_cast<std::size_t>(k)], k + 1);
      expect_close(b, b.slot.weight, file, name + "/w" + std::to_string(k + 1), parameter_bound());
      expect_close(b, b.slot.first, file, name + "/momentum" + std::to_string(k + 1), state_bound());
    }
  }
}

TEST_P(Golden, HeadParametersStatesAndSteps) {
  const auto json = golden::json("optim_head.json");
  const SafetensorsFile file(golden::path("optim_head.safetensors"));
  for (const auto& c : json["cases"]) {
    const std::string name = c["name"];
    const OptimizerConfig config = config_from(c["hyper"]);
    Bench b(GetParam(), json["rows"], json["dim"]);
    testing::put(*b.be, b.slot.weight, golden::values(file, "w0"));
    for (int k = 0; k < 4; ++k) {
      const std::string number = std::to_string(k + 1);
      testing::put(*b.be, b.slot.gradient, golden::values(file, "grad" + std::to_string(k)));
      b.step(config, c["steps"][static_cast<std::size_t>(k)]["lr"], k + 1);
      expect_close(b, b.slot.weight, file, name + "/w" + number, parameter_bound());
      expect_close(b, b.slot.step, file, name + "/step" + number, state_bound());
      if (config.algorithm == Algorithm::adamw) {
        expect_close(b, b.slot.first, file, name + "/exp_avg" + number, state_bound());
        expect_close(b, b.slot.second, file, name + "/exp_avg_sq" + number, state_bound());
      } else {
        expect_close(b, b.slot.first, file, name + "/momentum_buffer" + number, state_bound());
        const auto step = testing::get(*b.be, b.slot.step);  // the row without any gradient stays exactly zero
        const std::size_t cols = json["dim"], zero_row = json["zero_gradient_row_every_step"];
        for (std::size_t j = 0; j < cols; ++j) EXPECT_EQ(step[zero_row * cols + j], 0);
      }
    }
  }
}

TEST_P(Golden, AdamWOnTheEmbeddingIsDense) {
  const auto json = golden::json("optim_adamw_embed.json");
  const SafetensorsFile file(golden::path("optim_adamw_embed.safetensors"));
  const OptimizerConfig config = config_from(json["hyper"]);
  const auto shape = file.at("w0").shape;
  Bench b(GetParam(), shape[0], shape[1]);
  testing::put(*b.be, b.slot.weight, golden::values(file, "w0"));
  for (int k = 0; k < 4; ++k) {
    const std::string number = std::to_string(k + 1);
    testing::put(*b.be, b.slot.gradient, golden::values(file, "grad" + std::to_string(k)));
    b.step(config, config.lr * json["lr_scales"][static_cast<std::size_t>(k)].get<double>(), k + 1);
    expect_close(b, b.slot.weight, file, "w" + number, parameter_bound());
    expect_close(b, b.slot.first, file, "exp_avg" + number, state_bound());
    expect_close(b, b.slot.second, file, "exp_avg_sq" + number, state_bound());
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Golden, ::testing::Values(ROWNORM_TEST_BACKENDS));

// Muon away from its defaults against plain loops (the golden cases all have the defaults).
TEST(Muon, MomentumNesterovAndStepsAreTheConfigs) {
  const std::int64_t rows = 5, cols = 3;
  const auto gradient = [](int k) {
    Values g;
    for (int i = 0; i < rows * cols; ++i) g.push_back(std::sin(0.7 * i * i + k));
    return g;
  };
  // X <- a X + (b X X^T + c (X X^T)^2) X on the side with fewer rows: here on the transpose, written with X^T X.
  const auto newton_schulz = [](Values x, int steps, double eps) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    for (double& v : x) v /= std::sqrt(squares) + eps;
    for (int s = 0; s < steps; ++s) {
      double a[3][3] = {}, polynomial[3][3] = {};
      for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j)
          for (int r = 0; r < rows; ++r)
            a[i][j] += x[static_cast<std::size_t>(r * 3 + i)] * x[static_cast<std::size_t>(r * 3 + j)];
      for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j) {
          polynomial[i][j] = -4.7750 * a[i][j] + (i == j ? 3.4445 : 0);
          for (int l = 0; l < 3; ++l) polynomial[i][j] += 2.0315 * a[i][l] * a[l][j];
        }
      Values next(x.size());
      for (int r = 0; r < rows; ++r)
        for (int j = 0; j < 3; ++j)
          for (int l = 0; l < 3; ++l)
            next[static_cast<std::size_t>(r * 3 + j)] += x[static_cast<std::size_t>(r * 3 + l)] * polynomial[l][j];
      x = next;
    }
    return x;
  };
  for (const bool nesterov : {false, true}) {
    OptimizerConfig config;
    config.algorithm = Algorithm::muon;
    config.momentum = 0.8;
    config.nesterov = nesterov;
    config.newton_schulz_steps = 3;
    config.eps = 1e-5;
    Bench b("reference", rows, cols);
    Values buffer(rows * cols, 0);
    for (int k = 0; k < 2; ++k) {
      const Values g = gradient(k);
      testing::put(*b.be, b.slot.gradient, g);
      b.step(config, 0.01, k + 1);
      Values direction;
      for (std::size_t i = 0; i < g.size(); ++i) {
        buffer[i] = 0.8 * buffer[i] + g[i];
        direction.push_back(nesterov ? g[i] + 0.8 * buffer[i] : buffer[i]);
      }
      Values expected = newton_schulz(direction, 3, 1e-5);
      for (double& v : expected) v *= -0.01 * std::sqrt(5.0 / 3.0);
      EXPECT_LE(golden::relative_l2(testing::get(*b.be, b.slot.step), expected), 1e-13);
    }
  }
}

// The definition in plain loops, on a gradient whose columns do not add up to zero: both projections show.
TEST(ProjectedRowNorm, CentresBeforeAndAfterNormalising) {
  const std::int64_t rows = 4, cols = 3;
  Values g;
  for (int i = 0; i < rows * cols; ++i) g.push_back(1 + std::sin(2.1 * i));
  const auto centred = [](Values x) {
    for (int j = 0; j < cols; ++j) {
      double mean = 0;
      for (int i = 0; i < rows; ++i) mean += x[static_cast<std::size_t>(i * cols + j)] / rows;
      for (int i = 0; i < rows; ++i) x[static_cast<std::size_t>(i * cols + j)] -= mean;
    }
    return x;
  };
  Values expected = centred(g);  // Bhat of the first step is the gradient
  for (int i = 0; i < rows; ++i) {
    double squares = 0;
    for (int j = 0; j < cols; ++j) squares += std::pow(expected[static_cast<std::size_t>(i * cols + j)], 2);
    for (int j = 0; j < cols; ++j) expected[static_cast<std::size_t>(i * cols + j)] /= std::sqrt(squares) + 1e-8;
  }
  expected = centred(expected);
  for (double& v : expected) v *= -0.01;
  OptimizerConfig config;
  config.algorithm = Algorithm::rownorm;
  config.eps = 1e-8;
  config.projected = true;
  Bench b("reference", rows, cols);
  testing::put(*b.be, b.slot.gradient, g);
  b.step(config, 0.01, 1);
  EXPECT_LE(golden::relative_l2(testing::get(*b.be, b.slot.step), expected), 1e-13);
}

// S = -lr P RN(P Bhat) against its definition, and: the projections change only a common row shift when 1^T G = 0.
TEST(ProjectedRowNorm, IsTheDefinitionAndACommonRowShift) {
  const std::int64_t rows = 23, cols = 7;
  Values g;
  for (int i = 0; i < rows * cols; ++i) g.push_back(std::sin(1.7 * i * i + 0.3));
  for (int j = 0; j < cols; ++j) {  // centred columns, as every cross-entropy gradient's
    double mean = 0;
    for (int i = 0; i < rows; ++i) mean += g[static_cast<std::size_t>(i * cols + j)] / rows;
    for (int i = 0; i < rows; ++i) g[static_cast<std::size_t>(i * cols + j)] -= mean;
  }
  OptimizerConfig config;
  config.algorithm = Algorithm::rownorm;
  config.eps = 1e-8;
  const auto step_of = [&](bool projected) {
    Bench b("reference", rows, cols);
    testing::put(*b.be, b.slot.gradient, g);
    config.projected = projected;
    b.step(config, 0.01, 1);
    return testing::get(*b.be, b.slot.step);
  };
  const Values plain = step_of(false), projected = step_of(true);
  Values expected = plain;  // minus each column's mean
  for (int j = 0; j < cols; ++j) {
    double mean = 0;
    for (int i = 0; i < rows; ++i) mean += plain[static_cast<std::size_t>(i * cols + j)] / rows;
    for (int i = 0; i < rows; ++i) expected[static_cast<std::size_t>(i * cols + j)] -= mean;
  }
  EXPECT_LE(golden::relative_l2(projected, expected), 1e-13);
  EXPECT_GT(golden::relative_l2(projected, plain), 1e-3);
}

TEST(Ownership, EveryRowHasOneOwnerForAnyNumberOfRanks) {
  ModelConfig m;
  m.vocab_size = 5;
  m.context = 8;
  m.layers = 3;
  m.width = 4;
  m.head_dim = 2;
  const auto table = parameter_table(m);
  for (const auto head : {Algorithm::rownorm, Algorithm::adamw, Algorithm::muon})
    for (const int ranks : {1, 2, 3, 4, 7}) {
      OptimizerConfigs configs;
      configs.hidden.algorithm = Algorithm::muon;
      configs.head.algorithm = head;
      std::vector<std::int64_t> next(table.size(), 0);
      std::vector<std::set<int>> layer_owner(3);
      for (const Piece& p : divide(table, configs, ranks)) {
        EXPECT_EQ(p.begin, next[p.parameter]);  // in order, no gap, no overlap
        next[p.parameter] = p.end;
        EXPECT_GE(p.owner, 0);
        EXPECT_LT(p.owner, ranks);
        if (table[p.parameter].role == Role::hidden)
          layer_owner[static_cast<std::size_t>(table[p.parameter].layer)].insert(p.owner);
        const bool whole = table[p.parameter].role == Role::head && head == Algorithm::muon;
        EXPECT_TRUE(!whole || p.end == m.vocab_size);
      }
      for (std::size_t i = 0; i < table.size(); ++i) EXPECT_EQ(next[i], table[i].rows);
      for (const auto& owners : layer_owner) EXPECT_EQ(owners.size(), 1u);
    }
}

// A model's weights and gradients, of made-up numbers, with its optimizer.
struct Model {
  std::unique_ptr<Backend> be;
  OptimizerConfigs configs;
  std::unique_ptr<Comm> comm = make_single_process();
  Parameters weights, gradients;
  Optimizer optimizer;
  UpdateControl control;
  std::unique_ptr<testing::Device> memory;

  Model(const char* device, const ModelConfig& m, const OptimizerConfigs& c) : be(testing::open(device)), configs(c) {
    WorkspaceSizes sizes;
    sizes.newton_schulz = newton_schulz_sizes(m, configs);
    sizes.vocab = m.vocab_size;
    sizes.width = m.width;
    memory = std::make_unique<testing::Device>(*be, sizes, [&](Arena& arena) {
      weights = make_parameters(arena, "w", m, be->master_dtype());
      gradients = make_parameters(arena, "g", m, be->master_dtype());
      optimizer = make_optimizer(arena, m, configs, be->master_dtype(), 0, 1);
      control = {arena.add("c", DType::f64, {1}), arena.add("c", DType::f64, {1}), arena.add("c", DType::i32, {1})};
    });
    be->fill(control.clip, 1);
    be->fill(control.ok, 1);
    initialize(*be, weights, m, 0);
    initialize(*be, gradients, m, 1);
  }

  void update(double lr_scale, std::int64_t t) {
    rownorm::update(*be, *comm, optimizer, configs, weights, gradients, control, lr_scale, t);
  }
};

// Matrices of several layers go to newton_schulz together where their increments fit where the head's must. With V =
// 300 that is two layers of five, then two, then one; with V = 13 each alone. The bits of the weights are the same, and
// no call has more matrices than newton_schulz_sizes says.
TEST(Update, LayersTogetherAreEachAlone) {
  struct Calls : Observer {
    std::int64_t count = 0, most = 0;
    void begin(const Work& work) override {
      if (std::string(work.operation) != "newton_schulz") return;
      ++count;
      most = std::max(most, work.sizes[0]);
    }
    void end() override {}
  };
  for (const char* device : {ROWNORM_TEST_BACKENDS})
    for (const std::int64_t mlp_ratio : {1, 4}) {
      ModelConfig m;
      m.context = 4;
      m.layers = 5;
      m.width = 8;
      m.head_dim = 4;
      m.mlp_ratio = mlp_ratio;
      OptimizerConfig muon, adamw;
      muon.algorithm = Algorithm::muon;
      adamw.algorithm = Algorithm::adamw;
      muon.lr = adamw.lr = 0.01;
      const OptimizerConfigs configs{muon, adamw, adamw};
      const std::int64_t shapes = mlp_ratio == 1 ? 1 : 3, largest = mlp_ratio == 1 ? 7 : 4;  // matrices of a layer

      std::vector<Values> alone;
      for (const auto& [vocab, together] : {std::pair{13, 1}, {mlp_ratio == 1 ? 112 : 300, 2}}) {
        m.vocab_size = vocab;
        Model b(device, m, configs);
        Calls calls;
        b.be->observe(&calls);
        b.update(1, 1);
        b.be->observe(nullptr);
        EXPECT_EQ(calls.count, shapes * (together == 1 ? 5 : 3));
        EXPECT_EQ(calls.most, largest * together);
        std::int64_t planned = 0;
        for (const NewtonSchulzSizes& s : newton_schulz_sizes(m, configs)) planned = std::max(planned, s.matrices);
        EXPECT_EQ(planned, calls.most);
        for (std::size_t i = 1; i + 1 < b.weights.matrices.size(); ++i) {
          const Values now = testing::get(*b.be, b.weights.matrices[i]);
          if (together == 1)
            alone.push_back(now);
          else
            EXPECT_EQ(now, alone[i - 1]) << device << " " << b.optimizer.table[i].name;
        }
      }
    }
}

// Any algorithm in any role, through update(): finite, changes every matrix, and the head's S is what was applied.
TEST(Update, AnyAlgorithmServesAnyRole) {
  ModelConfig m;
  m.vocab_size = 13;
  m.context = 4;
  m.layers = 2;
  m.width = 8;
  m.head_dim = 4;
  for (const char* device : {ROWNORM_TEST_BACKENDS})
    for (const auto algorithm : {Algorithm::muon, Algorithm::adamw, Algorithm::rownorm})
      for (const bool projected : {false, true}) {
        if (projected && algorithm != Algorithm::rownorm) continue;
        OptimizerConfig c;
        c.algorithm = algorithm;
        c.lr = 0.01;
        c.eps = 1e-8;
        c.projected = projected;
        const OptimizerConfigs configs{c, c, c};
        Model b(device, m, configs);
        Backend* be = b.be.get();
        const auto& [weights, gradients, optimizer, control] = std::tie(b.weights, b.gradients, b.optimizer, b.control);
        std::vector<Values> before;
        for (const Tensor& w : weights.matrices) before.push_back(testing::get(*be, w));
        b.update(0.5, 1);
        for (std::size_t i = 0; i < before.size(); ++i) {
          const Values after = testing::get(*be, weights.matrices[i]);
          const double change = golden::relative_l2(after, before[i]);
          EXPECT_GT(change, 1e-3) << optimizer.table[i].name;
          EXPECT_LT(change, 10) << optimizer.table[i].name;
          if (projected) {  // 1^T S = 0 in every role: the row count of the projection is the matrix's own
            const std::int64_t cols = optimizer.table[i].cols, rows = optimizer.table[i].rows;
            for (std::int64_t j = 0; j < cols; ++j) {
              double sum = 0;
              for (std::int64_t r = 0; r < rows; ++r)
                sum +=
                    after[static_cast<std::size_t>(r * cols + j)] - before[i][static_cast<std::size_t>(r * cols + j)];
              EXPECT_NEAR(sum, 0, 1e-6) << optimizer.table[i].name;  // f32 weights of size 0.02, up to 32 rows
            }
          }
        }
        const Values step = testing::get(*be, owned_head_step(optimizer, 0));
        Values applied = testing::get(*be, weights.head);
        for (std::size_t i = 0; i < applied.size(); ++i) applied[i] -= before.back()[i];
        EXPECT_LE(golden::relative_l2(applied, step), 1e-5);  // f32: the difference of weights four times its size
        const std::size_t per_matrix = algorithm == Algorithm::adamw ? 2 : 1;
        EXPECT_EQ(named_state(optimizer, configs).size(), per_matrix * optimizer.table.size());

        // Nothing moves when the update's numbers were not finite.
        be->fill(control.ok, 0);
        be->fill(control.clip, 0);
        std::vector<Values> weights_before, state_before;
        for (const Tensor& w : weights.matrices) weights_before.push_back(testing::get(*be, w));
        for (const auto& s : named_state(optimizer, configs)) state_before.push_back(testing::get(*be, s.tensor));
        be->fill(gradients.matrices[3], NAN);
        b.update(0.5, 2);
        std::size_t k = 0;
        for (const Tensor& w : weights.matrices) EXPECT_EQ(testing::get(*be, w), weights_before[k++]);
        k = 0;
        for (const auto& s : named_state(optimizer, configs)) EXPECT_EQ(testing::get(*be, s.tensor), state_before[k++]);
      }
}

}  // namespace
}  // namespace rownorm
