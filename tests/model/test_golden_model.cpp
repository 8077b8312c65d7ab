// One forward and backward pass of the whole network against the independent float64 implementation (golden/README).
#include <gtest/gtest.h>

#include "device.h"
#include "golden.h"
#include "model/transformer.h"
#include "ops/open.h"

namespace rownorm {
namespace {

struct Case {
  const char* model;
  const char* device;
  Recompute recompute;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return std::string(info.param.model) + "_" + info.param.device +
         (info.param.recompute == Recompute::block ? "_recompute" : "");
}

ModelConfig model_of(const nlohmann::json& json) {
  ModelConfig m;
  m.vocab_size = json["vocab"];
  m.context = json["seq_len"];
  m.layers = json["layers"];
  m.width = json["dim"];
  m.head_dim = json["head_dim"];
  return m;
}

WorkspaceSizes workspace_of(const ModelConfig& m, std::int64_t tokens) {
  WorkspaceSizes sizes;
  sizes.tokens = tokens;
  sizes.context = m.context;
  sizes.width = m.width;
  sizes.heads = m.heads();
  sizes.vocab = m.vocab_size;
  return sizes;
}

class GoldenModel : public ::testing::TestWithParam<Case> {};

TEST_P(GoldenModel, LogitsHiddenLossAndEveryGradient) {
  const auto [name, device, recompute] = GetParam();
  const auto json = golden::json(std::string(name) + ".json");
  const SafetensorsFile file(golden::path(std::string(name) + ".safetensors"));
  const ModelConfig m = model_of(json);
  const std::int64_t batch = json["batch"], n = batch * m.context;

  const auto be = testing::open(device);
  const DType dtype = be->compute_dtype();
  Parameters weights, gradients;
  Activations a;
  Tensor loss, logits;
  const testing::Device memory(*be, workspace_of(m, n), [&](Arena& arena) {
    weights = make_parameters(arena, "weights", m, dtype);
    gradients = make_parameters(arena, "gradients", m, dtype);
    a = make_activations(arena, m, batch, dtype, dtype, Passes::forward_and_backward, GetParam().recompute);
    loss = arena.add("step", DType::f64, {1});
    logits = arena.add("step", dtype, {n, m.vocab_size});
  });
  upload_rope(*be, a, m);
  const auto table = parameter_table(m);
  ASSERT_EQ(table.size(), json["parameters"].size());
  for (std::size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(table[i].name, json["parameters"][i]["name"]);  // the published order
    testing::put(*be, weights.matrices[i], golden::values(file, "weight/" + table[i].name));
  }
  const auto upload_ids = [&](Tensor t, const char* id) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
    file.read(id, Tensor{ids.data(), DType::i32, {batch, m.context}});
    be->upload(t, ids.data());
  };
  upload_ids(a.tokens, "tokens");
  upload_ids(a.targets, "targets");

  std::vector<std::int64_t> completed;
  forward(*be, m, weights, a);
  be->linear(logits, a.hidden, weights.head);
  be->head_loss(loss, a.dhidden, gradients.head, a.hidden, weights.head, a.targets, 1 / static_cast<double>(n));
  backward(*be, m, weights, gradients, a, [&](std::int64_t layer) { completed.push_back(layer); });

  // f64: 1e-9. f32: a plain float32 run of the published code differs by up to 7e-7 (logits) and 1.5e-6 (gradients);
  // other orders of summation cost about the same again.
  const bool exact = dtype == DType::f64;
  const double forward_bound = exact ? 1e-9 : 1.2e-6, gradient_bound = exact ? 1e-9 : 3e-6;
  EXPECT_LE(golden::relative_l2(testing::get(*be, logits), golden::values(file, "logits")), forward_bound);
  EXPECT_LE(golden::relative_l2(testing::get(*be, a.hidden), golden::values(file, "hidden")), forward_bound);
  const double expected = json["cross_entropy_f64"];
  EXPECT_NEAR(be->read(loss), expected, (exact ? 1e-9 : 1e-6) * expected);
  double squares = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const auto gradient = testing::get(*be, gradients.matrices[i]);
    EXPECT_LE(golden::relative_l2(gradient, golden::values(file, "grad/" + table[i].name)), gradient_bound)
        << table[i].name;
    for (const double g : gradient) squares += g * g;
  }
  const double norm = json["global_grad_norm_f64"];
  EXPECT_NEAR(std::sqrt(squares), norm, gradient_bound * norm);

  std::vector<std::int64_t> order;
  for (std::int64_t layer = m.layers; layer-- > 0;) order.push_back(layer);
  order.push_back(-1);
  EXPECT_EQ(completed, order);

  // A smaller batch in the same memory: the first sequence alone has the first sequence's hidden states.
  const auto all = testing::get(*be, a.hidden);
  Activations first = first_sequences(a, 1);
  forward(*be, m, weights, first);
  const auto alone = testing::get(*be, first.hidden);
  EXPECT_LE(golden::relative_l2(alone, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(alone.size())}),
            exact ? 1e-14 : forward_bound);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* device : {ROWNORM_TEST_BACKENDS}) {
    for (const char* model : {"model_a", "model_b", "model_c"}) all.push_back({model, device, Recompute::none});
    all.push_back({"model_c", device, Recompute::block});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModel, ::testing::ValuesIn(cases()), case_name);

class GoldenModelWithCache : public ::testing::TestWithParam<std::tuple<std::string, const char*>> {};

// A golden batch's sequences through the cache in pieces of several sizes, prompt and single tokens: the same logits.
TEST_P(GoldenModelWithCache, Logits) {
  const auto& [name, device] = GetParam();
  const auto json = golden::json(name + ".json");
  const SafetensorsFile file(golden::path(name + ".safetensors"));
  const ModelConfig m = model_of(json);
  const std::int64_t batch = json["batch"], T = m.context, V = m.vocab_size;

  const auto be = testing::open(device);
  const DType dtype = be->compute_dtype();
  Parameters weights;
  Activations a;
  KeyValueCache cache;
  Tensor logits;
  const testing::Device memory(*be, workspace_of(m, T), [&](Arena& arena) {
    weights = make_parameters(arena, "weights", m, dtype);
    a = make_activations(arena, m, 1, dtype, dtype, Passes::forward, Recompute::none);
    cache = make_cache(arena, m, dtype);
    logits = arena.add("step", dtype, {T, V});
  });
  upload_rope(*be, a, m);
  const auto table = parameter_table(m);
  for (std::size_t i = 0; i < table.size(); ++i)
    testing::put(*be, weights.matrices[i], golden::values(file, "weight/" + table[i].name));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(batch * T));
  file.read("tokens", Tensor{tokens.data(), DType::i32, {batch, T}});
  const std::vector<double> expected = golden::values(file, "logits");
  // As for the whole sequence: the same sums in another order.
  const double bound = dtype == DType::f64 ? 1e-9 : 1.2e-6;

  // Against forward() in f64 only the order of sums of at most 4d products differs: a few roundings of 1e-16 each.
  std::vector<std::vector<double>> of_sequence;
  for (std::int64_t b = 0; b < batch; ++b) {
    be->upload(a.tokens, tokens.data() + b * T);
    forward(*be, m, weights, a);
    be->linear(logits, a.hidden, weights.head);
    of_sequence.push_back(testing::get(*be, logits));
  }

  for (const std::int64_t piece : {std::int64_t{1}, std::int64_t{3}, T - 1, T})
    for (std::int64_t b = 0; b < batch; ++b) {  // the cache of the sequence before is overwritten as it is read
      be->fill(logits, NAN);
      for (std::int64_t begin = 0; begin < T; begin += piece) {
        const std::int64_t end = std::min(begin + piece, T);
        Activations part = first_rows(a, end - begin);
        be->upload(part.tokens, tokens.data() + b * T + begin);
        extend(*be, m, weights, part, cache, begin);
        be->linear(logits.rows(begin, end), part.hidden, weights.head);
      }
      const auto actual = testing::get(*be, logits);
      EXPECT_LE(golden::relative_l2(actual, {expected.begin() + b * T * V, expected.begin() + (b + 1) * T * V}), bound)
          << "pieces of " << piece << ", sequence " << b;
      EXPECT_LE(golden::relative_l2(actual, of_sequence[static_cast<std::size_t>(b)]),
                dtype == DType::f64 ? 1e-13 : bound)
          << "pieces of " << piece << ", sequence " << b;
    }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModelWithCache,
                         ::testing::Combine(::testing::Values("model_a", "model_b", "model_c"),
                                            ::testing::Values(ROWNORM_TEST_BACKENDS)));

}  // namespace
}  // namespace rownorm
