// Gradients with and without recomputing each block's activations.
#include <gtest/gtest.h>

#include "device.h"
#include "model/transformer.h"

namespace rownorm {
namespace {

class RecomputeOn : public ::testing::TestWithParam<const char*> {};

TEST_P(RecomputeOn, GradientsAreBitIdentical) {
  ModelConfig m;
  m.vocab_size = 37;
  m.context = 9;
  m.layers = 3;
  m.width = 24;
  m.head_dim = 8;
  const auto be = testing::open(GetParam());
  const DType compute = be->compute_dtype(), master = be->master_dtype();
  const WorkspaceSizes sizes{
      .tokens = 18, .context = m.context, .width = m.width, .heads = m.heads(), .vocab = m.vocab_size};
  const auto gradients_with = [&](Recompute recompute) {
    Parameters initial, weights, gradients;
    Activations a;
    Tensor loss;
    const testing::Device memory(*be, sizes, [&](Arena& arena) {
      initial = make_parameters(arena, "weights", m, master);
      weights = make_parameters(arena, "weights", m, compute);
      gradients = make_parameters(arena, "gradients", m, master);
      a = make_activations(arena, m, 2, compute, master, Passes::forward_and_backward, recompute);
      loss = arena.add("step", DType::f64, {1});
    });
    upload_rope(*be, a, m);
    initialize(*be, initial, m, 3);
    copy(*be, weights, initial);
    std::vector<double> ids;
    for (int i = 0; i < 18; ++i) ids.push_back(i * 7 % 37);
    testing::put(*be, a.tokens, ids);
    testing::put(*be, a.targets, ids);
    forward(*be, m, weights, a);
    be->head_loss(loss, a.dhidden, gradients.head, a.hidden, weights.head, a.targets, 1.0 / 18);
    backward(*be, m, weights, gradients, a, [](std::int64_t) {});
    std::vector<double> all;
    for (const Tensor& g : gradients.matrices)
      for (const double v : testing::get(*be, g)) all.push_back(v);
    return all;
  };
  EXPECT_EQ(gradients_with(Recompute::none), gradients_with(Recompute::block));
}

INSTANTIATE_TEST_SUITE_P(All, RecomputeOn, ::testing::Values(ROWNORM_TEST_BACKENDS));

}  // namespace
}  // namespace rownorm
