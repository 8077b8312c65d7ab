// The network of PAPER 2, forward and backward, as math over the operations of a Backend.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "base/arena.h"
#include "model/config.h"
#include "model/parameters.h"
#include "ops/backend.h"

namespace rownorm {

enum class Recompute { none, block };

// What a block's backward needs of its forward; N tokens, d width, F MLP width, H heads.
struct BlockActivations {
  Tensor normed1;  // (N, d)  attention's input
  Tensor rstd1;    // (N)
  Tensor qkv;      // (N, 3d) normed, rotated q | k, and v
  Tensor rstd_qk;  // (N, 2H)
  Tensor att;      // (N, d)
  Tensor lse;      // (N, H)
  Tensor normed2;  // (N, d)  MLP's input
  Tensor rstd2;    // (N)
  Tensor gate_up;  // (N, 2F)
  Tensor act;      // (N, F)  silu(gate) * up
};

struct Activations {
  std::int64_t context = 0;
  Tensor tokens, targets;                // (N) i32
  Tensor rope;                           // (T, head_dim) cos | sin
  Tensor x;                              // (N, d)  residual stream, overwritten layer by layer
  Tensor hidden;                         // (N, d)  final norm: the head's input
  Tensor rstd_final;                     // (N)
  std::vector<BlockActivations> blocks;  // one a layer; one in all when blocks are recomputed or there is no backward
  std::vector<Tensor> block_inputs;      // (N, d) a layer, when blocks are recomputed
  // backward
  Tensor dx;       // (N, d)  gradient of the residual stream
  Tensor dhidden;  // (N, d)
  Tensor dbranch;  // (N, d)  gradient of a branch's input or of the attention's output
  Tensor dwide;    // (N, max(3d, 2F))  dqkv or dgate_up
  Tensor dact;     // (N, F)
};

enum class Passes { forward, forward_and_backward };

Activations make_activations(Arena& arena, const ModelConfig& model, std::int64_t sequences, DType compute,
                             DType master, Passes passes, Recompute recompute);
void upload_rope(Backend& be, const Activations& a, const ModelConfig& model);

// The same memory seen as a smaller batch of whole sequences.
Activations first_sequences(const Activations& a, std::int64_t sequences);
// The same memory seen as n rows, the next tokens of one sequence for extend().
Activations first_rows(const Activations& a, std::int64_t n);

// a.hidden from a.tokens. need(-1) is called before the embedding is first read, need(layer) before a layer's weights
// are, from the first layer on.
void forward(
    Backend& be, const ModelConfig& model, const Parameters& weights, Activations& a,
    const std::function<void(std::int64_t)>& need = [](std::int64_t) {});

// Keys, normed and rotated, and values of one sequence's positions so far, for generation.
struct KeyValueCache {
  std::vector<Tensor> keys, values;  // (T, d) a layer
};

KeyValueCache make_cache(Arena& arena, const ModelConfig& model, DType compute);

// The forward of the next tokens of one sequence: a.hidden from the N = a.tokens.dim(0) tokens at positions
// [position, position + N), position + N <= T. The cache holds the positions before, and these too on return; going
// back to an earlier position is allowed. Hidden states equal those of forward() on the whole sequence to rounding.
void extend(Backend& be, const ModelConfig& model, const Parameters& weights, Activations& a,
            const KeyValueCache& cache, std::int64_t position);

// Gradients of the loss whose gradient with respect to the final hidden states is a.dhidden; added to `gradients`
// (the head's own gradient comes from head_loss). complete(layer) is called when a layer's gradients are final, from
// the last layer down, then complete(-1) for the embedding's.
void backward(Backend& be, const ModelConfig& model, const Parameters& weights, const Parameters& gradients,
              Activations& a, const std::function<void(std::int64_t)>& complete);

}  // namespace rownorm
