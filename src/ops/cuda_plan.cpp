#include "ops/cuda_plan.h"

#include <algorithm>

#include "base/error.h"

namespace rownorm::cuda {

Index padded(Index columns) { return (columns + 63) / 64 * 64; }

DType compute_dtype_of(const std::string& precision) {
  return precision == "bf16" || precision == "auto" ? DType::bf16 : DType::f32;
}

Index workspace_bytes(DType compute, const WorkspaceSizes& sizes) {
  if (sizes.heads > 0 && sizes.width / sizes.heads > max_head_dim)
    fail(Exit::usage, "[model] head_dim {}: on device cuda at most {}", sizes.width / sizes.heads, max_head_dim);
  Index most = 0;  // of the operations, which use it in turn
  const auto add = [&](const auto& build) {
    Arena arena;
    build(arena);
    most = std::max(most, arena.bytes());
  };
  add([](Arena& arena) { PartialSums{arena}; });
  add([&](Arena& arena) { AttentionScratch(arena, sizes.tokens, sizes.heads); });
  add([&](Arena& arena) {
    LogitsScratch(arena, compute, std::max(sizes.tokens, sizes.panel), sizes.vocab, sizes.width);
  });
  for (const NewtonSchulzSizes& s : sizes.newton_schulz) add([&](Arena& arena) { NewtonSchulzScratch(arena, s); });
  if (sizes.diameter) add([&](Arena& arena) { DiameterScratch(arena, sizes.vocab, sizes.width); });
  return products_bytes + most;
}

PartialSums::PartialSums(Arena& arena) : sums(arena.add("sums", DType::f64, {parts})) {}

// At most doubled: a row of T = 1 becomes two.
AttentionScratch::AttentionScratch(Arena& arena, Index tokens, Index heads)
    : rows(arena.add("attention", DType::f32, {tokens, heads, 2, 2})) {}

LogitsScratch::LogitsScratch(Arena& arena, DType compute, Index tokens, Index vocab, Index width) {
  const Index count = std::min(rows, tokens), columns = padded(vocab);
  logits = arena.add("logits", DType::f32, {count, columns});
  gradients = compute == DType::f32 ? logits : arena.add("logits", compute, {count, columns});
  weights = arena.add("logits", compute, {columns == vocab ? 0 : columns, width});
  losses = arena.add("logits", DType::f64, {count});
  hidden = arena.add("logits", DType::f32, {compute == DType::f32 ? 0 : count, width});
}

namespace {

DType newton_schulz_dtype(NewtonSchulzPrecision precision) {
  return precision == NewtonSchulzPrecision::bf16 ? DType::bf16 : DType::f32;
}

}  // namespace

NewtonSchulzScratch::NewtonSchulzScratch(Arena& arena, const NewtonSchulzSizes& s)
    : x(arena.add("newton_schulz", newton_schulz_dtype(s.precision), {s.matrices, s.short_side, s.long_side})),
      next(arena.add("newton_schulz", x.dtype, x.shape)),
      gram(arena.add("newton_schulz", x.dtype, {s.matrices, s.short_side, s.short_side})),
      polynomial(arena.add("newton_schulz", x.dtype, gram.shape)),
      squares(arena.add("newton_schulz", DType::f64, {s.matrices})),
      sums(arena) {}

DiameterScratch::DiameterScratch(Arena& arena, Index vocab, Index width)
    : sum(arena.add("diameter", DType::f64, {width})),
      square(arena.add("diameter", DType::f64, {vocab})),
      centred(arena.add("diameter", DType::f32, {vocab, width})),
      half_square(arena.add("diameter", DType::f64, {vocab})),
      products(arena.add("diameter", DType::f32, {std::min(block, vocab), padded(vocab)})),
      found(arena.add("diameter", DType::u8, {block, pair_bytes})),
      state(arena.add("diameter", DType::u8, {state_bytes})) {}

}  // namespace rownorm::cuda
