#include "model/transformer.h"

#include <algorithm>
#include <cmath>

namespace rownorm {
namespace {

// x += attention(norm(x)); x += mlp(norm(x)). attend() makes b.att of b.qkv, rotated by `rope`, a row a position.
template <class Attend>
void block_forward(Backend& be, const ModelConfig& model, const LayerParameters& w, const Activations& a,
                   const BlockActivations& b, Tensor rope, Attend attend) {
  be.rmsnorm(b.normed1, b.rstd1, a.x, model.norm_eps);
  be.linear(b.qkv, b.normed1, w.qkv);
  be.qk_norm_rope(b.qkv, b.rstd_qk, rope, model.norm_eps);
  attend();
  be.linear(a.x, b.att, w.out, true);

  be.rmsnorm(b.normed2, b.rstd2, a.x, model.norm_eps);
  be.linear(b.gate_up, b.normed2, w.gate_up);
  be.swiglu(b.act, b.gate_up);
  be.linear(a.x, b.act, w.down, true);
}

// Of whole sequences.
void block_forward(Backend& be, const ModelConfig& model, const LayerParameters& w, const Activations& a,
                   const BlockActivations& b) {
  block_forward(be, model, w, a, b, a.rope, [&] { be.attention(b.att, b.lse, b.qkv, a.context); });
}

// The same from bottom to top. a.dx is the gradient of the block's output before and of its input after: each branch
// adds to it, as each forward branch adds to x.
void block_backward(Backend& be, const LayerParameters& w, const LayerParameters& g, const Activations& a,
                    const BlockActivations& b) {
  const Tensor dgate_up = Tensor{a.dwide.data, a.dwide.dtype, b.gate_up.shape};
  be.linear_weight_grad(g.down, a.dx, b.act);
  be.linear_input_grad(a.dact, a.dx, w.down);
  be.swiglu_backward(dgate_up, a.dact, b.gate_up);
  be.linear_weight_grad(g.gate_up, dgate_up, b.normed2);
  be.linear_input_grad(a.dbranch, dgate_up, w.gate_up);
  be.rmsnorm_backward(a.dx, a.dbranch, b.normed2, b.rstd2);

  const Tensor dqkv = Tensor{a.dwide.data, a.dwide.dtype, b.qkv.shape};
  be.linear_weight_grad(g.out, a.dx, b.att);
  be.linear_input_grad(a.dbranch, a.dx, w.out);
  be.attention_backward(dqkv, a.dbranch, b.att, b.lse, b.qkv, a.context);
  be.qk_norm_rope_backward(dqkv, b.qkv, b.rstd_qk, a.rope);
  be.linear_weight_grad(g.qkv, dqkv, b.normed1);
  be.linear_input_grad(a.dbranch, dqkv, w.qkv);
  be.rmsnorm_backward(a.dx, a.dbranch, b.normed1, b.rstd1);
}

}  // namespace

Activations make_activations(Arena& arena, const ModelConfig& model, std::int64_t sequences, DType compute,
                             DType master, Passes passes, Recompute recompute) {
  const std::int64_t n = sequences * model.context, d = model.width, f = model.mlp_width(), heads = model.heads();
  const std::string purpose = "activations";
  const bool with_backward = passes == Passes::forward_and_backward;
  Activations a;
  a.context = model.context;
  a.tokens = arena.add(purpose, DType::i32, {n});
  a.targets = arena.add(purpose, DType::i32, {n});
  a.rope = arena.add(purpose, master, {model.context, model.head_dim});
  a.x = arena.add(purpose, compute, {n, d});
  a.hidden = arena.add(purpose, compute, {n, d});
  a.rstd_final = arena.add(purpose, master, {n});
  const bool one_block = !with_backward || recompute == Recompute::block;
  for (std::int64_t i = 0; i < (one_block ? 1 : model.layers); ++i) {
    BlockActivations b;
    b.normed1 = arena.add(purpose, compute, {n, d});
    b.rstd1 = arena.add(purpose, master, {n});
    b.qkv = arena.add(purpose, compute, {n, 3 * d});
    b.rstd_qk = arena.add(purpose, master, {n, 2 * heads});
    b.att = arena.add(purpose, compute, {n, d});
    b.lse = arena.add(purpose, master, {n, heads});
    b.normed2 = arena.add(purpose, compute, {n, d});
    b.rstd2 = arena.add(purpose, master, {n});
    b.gate_up = arena.add(purpose, compute, {n, 2 * f});
    b.act = arena.add(purpose, compute, {n, f});
    a.blocks.push_back(b);
  }
  if (!with_backward) return a;
  if (recompute == Recompute::block)
    for (std::int64_t i = 0; i < model.layers; ++i) a.block_inputs.push_back(arena.add(purpose, compute, {n, d}));
  a.dx = arena.add(purpose, compute, {n, d});
  a.dhidden = arena.add(purpose, compute, {n, d});
  a.dbranch = arena.add(purpose, compute, {n, d});
  a.dwide = arena.add(purpose, compute, {n, std::max(3 * d, 2 * f)});
  a.dact = arena.add(purpose, compute, {n, f});
  return a;
}

// angle(position, i) = position * base^(-2i / head_dim), computed in f64.
void upload_rope(Backend& be, const Activations& a, const ModelConfig& model) {
  const std::int64_t half = model.head_dim / 2;
  std::vector<double> table(static_cast<std::size_t>(a.rope.size()));
  for (std::int64_t t = 0; t < model.context; ++t)
    for (std::int64_t i = 0; i < half; ++i) {
      const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(model.head_dim);
      const double angle = static_cast<double>(t) * std::pow(model.rope_base, -exponent);
      double* row = table.data() + t * model.head_dim;
      row[i] = std::cos(angle);
      row[half + i] = std::sin(angle);
    }
  if (a.rope.dtype == DType::f64) {
    be.upload(a.rope, table.data());
  } else {
    std::vector<float> rounded(table.size());
    std::transform(table.begin(), table.end(), rounded.begin(), [](double v) { return static_cast<float>(v); });
    be.upload(a.rope, rounded.data());
  }
}

Activations first_sequences(const Activations& a, std::int64_t sequences) {
  return first_rows(a, sequences * a.context);
}

Activations first_rows(const Activations& a, std::int64_t n) {
  const auto cut = [n](Tensor& t) {
    if (t.shape.rank() > 0) t = t.rows(0, n);
  };
  Activations part = a;
  for (Tensor* t : {&part.tokens, &part.targets, &part.x, &part.hidden, &part.rstd_final, &part.dx, &part.dhidden,
                    &part.dbranch, &part.dwide, &part.dact})
    cut(*t);
  for (Tensor& t : part.block_inputs) cut(t);
  for (BlockActivations& b : part.blocks)
    for (Tensor* t :
         {&b.normed1, &b.rstd1, &b.qkv, &b.rstd_qk, &b.att, &b.lse, &b.normed2, &b.rstd2, &b.gate_up, &b.act})
      cut(*t);
  return part;
}

void forward(Backend& be, const ModelConfig& model, const Parameters& weights, Activations& a,
             const std::function<void(std::int64_t)>& need) {
  need(-1);
  be.embedding(a.x, a.tokens, weights.embed);
  for (std::size_t i = 0; i < weights.layers.size(); ++i) {
    need(static_cast<std::int64_t>(i));
    if (!a.block_inputs.empty()) be.copy(a.block_inputs[i], a.x);
    block_forward(be, model, weights.layers[i], a, a.blocks[a.blocks.size() == 1 ? 0 : i]);
  }
  be.rmsnorm(a.hidden, a.rstd_final, a.x, model.norm_eps);
}

KeyValueCache make_cache(Arena& arena, const ModelConfig& model, DType compute) {
  KeyValueCache cache;
  for (std::int64_t i = 0; i < model.layers; ++i)
    for (std::vector<Tensor>* part : {&cache.keys, &cache.values})
      part->push_back(arena.add("cache", compute, {model.context, model.width}));
  return cache;
}

void extend(Backend& be, const ModelConfig& model, const Parameters& weights, Activations& a,
            const KeyValueCache& cache, std::int64_t position) {
  const Tensor rope = a.rope.rows(position, position + a.tokens.dim(0));
  const BlockActivations& b = a.blocks[0];
  be.embedding(a.x, a.tokens, weights.embed);
  for (std::size_t i = 0; i < weights.layers.size(); ++i)
    block_forward(be, model, weights.layers[i], a, b, rope,
                  [&] { be.cached_attention(b.att, cache.keys[i], cache.values[i], b.qkv, position, model.head_dim); });
  be.rmsnorm(a.hidden, a.rstd_final, a.x, model.norm_eps);
}

void backward(Backend& be, const ModelConfig& model, const Parameters& weights, const Parameters& gradients,
              Activations& a, const std::function<void(std::int64_t)>& complete) {
  be.fill(a.dx, 0);
  be.rmsnorm_backward(a.dx, a.dhidden, a.hidden, a.rstd_final);
  for (std::size_t i = weights.layers.size(); i-- > 0;) {
    const BlockActivations& b = a.blocks[a.block_inputs.empty() ? i : 0];
    if (!a.block_inputs.empty()) {  // recompute this block's activations from its input
      be.copy(a.x, a.block_inputs[i]);
      block_forward(be, model, weights.layers[i], a, b);
    }
    block_backward(be, weights.layers[i], gradients.layers[i], a, b);
    complete(static_cast<std::int64_t>(i));
  }
  be.embedding_backward(gradients.embed, a.tokens, a.dx);
  complete(-1);
}

}  // namespace rownorm
