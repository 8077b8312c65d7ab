// Operations, and the optimizers as far as they are operations, against the golden values (tests/golden/README.md).
#include <gtest/gtest.h>

#include <cmath>

#include "golden.h"
#include "ops/bench.h"

namespace rownorm {
namespace {

class GoldenOps : public EveryBackend {
 protected:
  Bench be{GetParam()};

  // The reference computes what the golden run computed, in double, in another order: 1e-16, which Newton-Schulz grows
  // 250-fold on a matrix of low rank. An f32 backend may differ by `f32`, a small multiple of what the same code in f32
  // differs by (golden "f32_vs_f64").
  double bound(double f32, double f64 = 1e-12) const { return be.is_double() ? f64 : f32; }

  static constexpr double epsilon = 0x1p-24;  // of a rounding to f32
  static constexpr double multiple = 4;       // sums in another order than PyTorch's

  Tensor master(const SafetensorsFile& file, const std::string& name) {
    const auto& shape = file.at(name).shape;
    return be.tensor(be.master(), {shape[0], shape[1]}, golden::values(file, name));
  }
  void expect_close(Tensor actual, const SafetensorsFile& file, const std::string& name, double at_most) {
    EXPECT_LE(golden::relative_l2(be.values(actual), golden::values(file, name)), at_most) << name;
  }
};

// The forward pass of PAPER 2 written out, for the values of the operations whose gradients test_gradients.cpp checks.
TEST_P(GoldenOps, Forward) {
  for (const std::string model : {"model_a", "model_b", "model_c"}) {
    const SafetensorsFile file(golden::path(model + ".safetensors"));
    const auto json = golden::json(model + ".json");
    const std::int64_t B = json["batch"], T = json["seq_len"], N = B * T, d = json["dim"], F = json["mlp_dim"];
    const std::int64_t H = json["n_heads"], head_dim = json["head_dim"], layers = json["layers"];
    const double eps = json["rms_eps"];
    const auto stacked = [&](const std::vector<std::string>& names) {  // weights under one another
      Values values;
      for (const std::string& name : names)
        for (const double v : golden::values(file, "weight/" + name)) values.push_back(v);
      const auto width = file.at("weight/" + names[0]).shape[1];
      return be.tensor(be.compute(), {static_cast<std::int64_t>(values.size()) / width, width}, values);
    };
    const auto ids = [&](const std::string& name) {
      std::vector<std::int32_t> values(static_cast<std::size_t>(N));
      file.read(name, {values.data(), DType::i32, {B, T}});
      return be.ids(values);
    };
    const auto compute = [&](std::int64_t width) { return be.zeros(be.compute(), {N, width}); };
    const auto statistic = [&](std::int64_t width) { return be.zeros(be.master(), {N, width}); };

    const Values cos = golden::values(file, "rope_cos"), sin = golden::values(file, "rope_sin");
    Values rope;
    for (std::int64_t i = 0; i < T * head_dim; ++i) {
      const std::int64_t half = head_dim / 2, at = i / head_dim * half + i % half;
      rope.push_back((i % head_dim < half ? cos : sin)[static_cast<std::size_t>(at)]);
    }
    const Tensor table = be.tensor(be.master(), {T, head_dim}, rope);

    const Tensor x = compute(d), y = compute(d), rstd = be.zeros(be.master(), {N});
    const Tensor qkv = compute(3 * d), att = compute(d), gate_up = compute(2 * F), gated = compute(F);
    be->embedding(x, ids("tokens"), stacked({"embed.weight"}));
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      const std::string block = "blocks." + std::to_string(layer) + ".";
      be->rmsnorm(y, rstd, x, eps);
      be->linear(qkv, y, stacked({block + "attn.q.weight", block + "attn.k.weight", block + "attn.v.weight"}));
      be->qk_norm_rope(qkv, statistic(2 * H), table, eps);
      be->attention(att, statistic(H), qkv, T);
      be->linear(x, att, stacked({block + "attn.out.weight"}), true);
      be->rmsnorm(y, rstd, x, eps);
      be->linear(gate_up, y, stacked({block + "gate.weight", block + "up.weight"}));
      be->swiglu(gated, gate_up);
      be->linear(x, gated, stacked({block + "down.weight"}), true);
    }
    be->rmsnorm(y, rstd, x, eps);
    expect_close(y, file, "hidden", bound(multiple * json["f32_vs_f64"]["hidden"]["rel_l2"].get<double>()));

    const Tensor loss = be.scalar(0);
    be->head_loss(loss, y, stacked({"lm_head.weight"}), ids("targets"), 1 / static_cast<double>(N));
    const double expected = json["cross_entropy_f64"], official_f32 = json["cross_entropy_f32_official"];
    EXPECT_NEAR(be->read(loss), expected, bound(multiple * std::abs(official_f32 - expected))) << model;
  }
}

TEST_P(GoldenOps, NewtonSchulz) {
  const SafetensorsFile file(golden::path("newton_schulz.safetensors"));
  const auto json = golden::json("newton_schulz.json");
  for (const auto& c : json["cases"]) {
    const std::string name = c["name"];
    const Tensor x = master(file, name + "/in");
    be->newton_schulz({{x}}, json["steps"], json["eps"]);
    const double f32 = c["f32_vs_f64"]["rel_l2"];
    expect_close(x, file, name + "/out", f32 == 0 ? 0 : bound(multiple * f32));
  }
}

TEST_P(GoldenOps, NewtonSchulzOfABatchIsEachAlone) {
  const SafetensorsFile file(golden::path("newton_schulz.safetensors"));
  const auto json = golden::json("newton_schulz.json");
  const auto deviation = [&](const std::string& name) {
    for (const auto& c : json["cases"])
      if (c["name"] == name) return c["f32_vs_f64"]["rel_l2"].get<double>();
    return double{0};
  };
  const std::vector<std::string> names{"square_32", "rank3", "square_32"};
  std::vector<Tensor> batch;
  for (const std::string& name : names) batch.push_back(master(file, name + "/in"));
  be->newton_schulz(batch, json["steps"], json["eps"]);
  for (std::size_t i = 0; i < batch.size(); ++i)
    expect_close(batch[i], file, names[i] + "/out", bound(multiple * deviation(names[i])));
}

TEST_P(GoldenOps, RowDiameter) {
  const SafetensorsFile file(golden::path("diameter.safetensors"));
  const auto json = golden::json("diameter.json");
  for (const auto& c : json["cases"]) {
    const std::string name = c["name"];
    const double expected = c["diameter"];
    const Tensor s = master(file, name), distance = be.scalar(-1), pair = be.ids({-1, -1});
    be->row_diameter(distance, pair, s);
    // in f64 on every backend: the inputs are exact in f32, and 12 squares are summed
    EXPECT_NEAR(be->read(distance), expected, 1e-15 * expected) << name;

    const Values values = golden::values(file, name);
    const auto p = be.integers(pair);
    double square = 0;
    for (std::size_t j = 0; j < 12; ++j) {
      const double difference =
          values[static_cast<std::size_t>(p[0]) * 12 + j] - values[static_cast<std::size_t>(p[1]) * 12 + j];
      square += difference * difference;
    }
    EXPECT_NEAR(std::sqrt(square), expected, 1e-15 * expected) << name;
    EXPECT_EQ(p[0]<p[1], expected> 0) << name;
  }
}

TEST_P(GoldenOps, Clip) {
  const SafetensorsFile file(golden::path("clip.safetensors"));
  const auto json = golden::json("clip.json");
  for (const auto& c : json["cases"]) {
    const std::string name = c["name"];
    const int tensors = c["tensors"];
    const Tensor squares = be.scalar(0);
    std::vector<Tensor> grads;
    for (int i = 0; i < tensors; ++i) {
      grads.push_back(master(file, name + "/grad" + std::to_string(i)));
      be->squared_norm(squares, grads.back());
    }
    const UpdateControl control{be.scalar(-1), be.scalar(-1), be.ids({-1})};
    be->clip(control, squares, be.scalar(1), json["max_norm"]);
    // The inputs are doubles; rounding each to f32 moves the norm and the coefficient by no more than that.
    const double norm = c["norm"], coefficient = c["coef"];
    EXPECT_NEAR(be->read(control.norm), norm, bound(epsilon, 1e-14) * norm) << name;
    EXPECT_NEAR(be->read(control.clip), coefficient, bound(epsilon, 1e-14)) << name;
    EXPECT_EQ(be->read(control.ok), 1) << name;
    for (int i = 0; i < tensors; ++i) {
      const Tensor grad = grads[static_cast<std::size_t>(i)];
      be->scale(grad, control.clip, 1);
      // rounded on input, by the coefficient, and once more
      expect_close(grad, file, name + "/clipped" + std::to_string(i), bound(3 * epsilon, 1e-14));
    }
  }
}

// Momentum and AdamW buffers after four updates: at most three roundings an update, all errors in one direction.
constexpr double state_f32 = 12 * 0x1p-24;

TEST_P(GoldenOps, AdamWHead) {
  const SafetensorsFile file(golden::path("optim_head.safetensors"));
  const auto c = golden::json("optim_head.json")["cases"][0];
  ASSERT_EQ(c["name"], "head_adamw");
  const auto& hyper = c["hyper"];
  const Tensor w = master(file, "w0");
  const Tensor step = be.zeros(be.master(), w.shape), exp_avg = be.zeros(be.master(), w.shape);
  const Tensor exp_avg_sq = be.zeros(be.master(), w.shape);
  for (int t = 1; t <= 4; ++t) {
    const auto& expected = c["steps"][static_cast<std::size_t>(t - 1)];
    const Tensor lr = be.scalar(expected["lr"]), grad = master(file, "grad" + std::to_string(t - 1));
    be->adamw(step, exp_avg, exp_avg_sq, grad, lr, be.control(), {hyper["betas"][0], hyper["betas"][1], hyper["eps"]},
              t);
    be->apply_step(w, step, lr, hyper["weight_decay"], be.control());
    const std::string n = std::to_string(t);
    expect_close(step, file, "head_adamw/step" + n,
                 t == 1 ? 0 : bound(multiple * expected["f32"]["step_vs_f64"]["rel_l2"].get<double>()));
    expect_close(w, file, "head_adamw/w" + n,
                 t == 1 ? 0 : bound(multiple * expected["f32"]["param_vs_f64"]["rel_l2"].get<double>()));
    expect_close(exp_avg, file, "head_adamw/exp_avg" + n, bound(state_f32));
    expect_close(exp_avg_sq, file, "head_adamw/exp_avg_sq" + n, bound(state_f32));
  }
}

TEST_P(GoldenOps, RowNormHead) {
  const SafetensorsFile file(golden::path("optim_head.safetensors"));
  const auto json = golden::json("optim_head.json");
  for (std::size_t i = 1; i < 4; ++i) {
    const auto& c = json["cases"][i];
    const auto& hyper = c["hyper"];
    const std::string name = c["name"];
    const double beta = hyper["beta"];
    const Tensor w = master(file, "w0");
    const Tensor step = be.zeros(be.master(), w.shape), buffer = be.zeros(be.master(), w.shape);
    for (int t = 1; t <= 4; ++t) {
      const auto& expected = c["steps"][static_cast<std::size_t>(t - 1)];
      const Tensor lr = be.scalar(expected["lr"]), grad = master(file, "grad" + std::to_string(t - 1));
      be->momentum(step, buffer, grad, be.control(), {beta, 1 - beta, 1 / (1 - std::pow(beta, t)), 0});
      be->row_normalize(step, hyper["eps"]);
      be->scale(step, lr, -1);
      be->apply_step(w, step, lr, hyper["weight_decay"], be.control());
      const std::string n = std::to_string(t);
      expect_close(step, file, name + "/step" + n,
                   t == 1 ? 0 : bound(multiple * expected["f32"]["step_vs_f64"]["rel_l2"].get<double>()));
      expect_close(w, file, name + "/w" + n,
                   t == 1 ? 0 : bound(multiple * expected["f32"]["param_vs_f64"]["rel_l2"].get<double>()));
      expect_close(buffer, file, name + "/momentum_buffer" + n, bound(state_f32));
      const Values rows = be.values(step);  // a zero row of the momentum has an exactly zero step
      EXPECT_EQ(Values(rows.begin() + 5 * 24, rows.begin() + 6 * 24), Values(24, 0.0)) << name;
    }
  }
}

TEST_P(GoldenOps, DiameterAndHilbertRmsOfHeadSteps) {
  const SafetensorsFile file(golden::path("optim_head.safetensors"));
  const Tensor h = be.tensor(be.compute(), {19, 24}, golden::values(file, "panel_hidden"));
  const auto json = golden::json("optim_head.json");
  // The steps are doubles; in f32 each element is rounded, as are the products with h: no more than the golden f32 run
  // deviates, from a step that differs as well (README: 4e-7).
  const double relative = bound(4e-7, 1e-14);
  for (const auto& c : json["cases"])
    for (int t = 1; t <= 4; ++t) {
      const auto& expected = c["steps"][static_cast<std::size_t>(t - 1)];
      const std::string name = c["name"].get<std::string>() + "/step" + std::to_string(t);
      const Tensor s = master(file, name), distance = be.scalar(-1), pair = be.ids({-1, -1});
      be->row_diameter(distance, pair, s);
      const double diameter = expected["diameter"], rms = expected["hilbert_rms"];
      EXPECT_NEAR(be->read(distance), diameter, relative * diameter) << name;

      const Tensor lowest = be.zeros(be.master(), {19}), highest = be.zeros(be.master(), {19});
      be->row_range(lowest, highest, h, s);
      const Values low = be.values(lowest), high = be.values(highest);
      double squares = 0;
      for (std::size_t p = 0; p < 19; ++p) squares += (high[p] - low[p]) * (high[p] - low[p]);
      EXPECT_NEAR(std::sqrt(squares / 19), rms, relative * rms) << name;
    }
}

TEST_P(GoldenOps, AdamWEmbedding) {
  const SafetensorsFile file(golden::path("optim_adamw_embed.safetensors"));
  const auto json = golden::json("optim_adamw_embed.json");
  const auto& hyper = json["hyper"];
  const Tensor w = master(file, "w0"), step = be.zeros(be.master(), w.shape);
  const Tensor exp_avg = be.zeros(be.master(), w.shape), exp_avg_sq = be.zeros(be.master(), w.shape);
  for (int t = 1; t <= 4; ++t) {
    const auto k = static_cast<std::size_t>(t - 1);
    const Tensor lr = be.scalar(hyper["lr"].get<double>() * json["lr_scales"][k].get<double>());
    be->adamw(step, exp_avg, exp_avg_sq, master(file, "grad" + std::to_string(k)), lr, be.control(),
              {hyper["betas"][0], hyper["betas"][1], hyper["eps"]}, t);
    be->apply_step(w, step, lr, hyper["weight_decay"], be.control());
    const std::string n = std::to_string(t);
    expect_close(w, file, "w" + n, t == 1 ? 0 : bound(multiple * json["f32_vs_f64_param"][k]["rel_l2"].get<double>()));
    expect_close(exp_avg, file, "exp_avg" + n, bound(state_f32));
    expect_close(exp_avg_sq, file, "exp_avg_sq" + n, bound(state_f32));
  }
}

TEST_P(GoldenOps, Muon) {
  const SafetensorsFile file(golden::path("optim_muon.safetensors"));
  const auto json = golden::json("optim_muon.json");
  const auto& hyper = json["hyper"];
  const double mu = hyper["momentum"];
  for (const auto& c : json["cases"]) {
    const std::string name = c["name"];
    const double rows = c["rows"], columns = c["cols"];
    const Tensor w = master(file, name + "/w0");
    const Tensor step = be.zeros(be.master(), w.shape), buffer = be.zeros(be.master(), w.shape);
    for (int t = 1; t <= 4; ++t) {
      const auto k = static_cast<std::size_t>(t - 1);
      const Tensor lr = be.scalar(json["lrs"][k]), grad = master(file, name + "/grad" + std::to_string(k));
      be->momentum(step, buffer, grad, be.control(), {mu, 1, mu, 1});
      be->newton_schulz({{step}}, hyper["ns_steps"], hyper["eps"]);
      be->scale(step, lr, -std::sqrt(std::max(1.0, rows / columns)));
      be->apply_step(w, step, lr, hyper["weight_decay"], be.control());
      const std::string n = std::to_string(t);
      expect_close(w, file, name + "/w" + n,
                   t == 1 ? 0 : bound(multiple * c["f32_vs_f64_param"][k]["rel_l2"].get<double>()));
      expect_close(buffer, file, name + "/momentum" + n, bound(state_f32));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, GoldenOps, ::testing::Values(ROWNORM_TEST_BACKENDS),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace rownorm
