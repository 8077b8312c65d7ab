// What the CUDA backend needs of memory beside a run's tensors. It takes no device to know that: --dry-run plans for
// one that is elsewhere, and the module (cuda/) builds the same structs over the workspace that it was given.
#pragma once
#include <cstdint>
#include <string>

#include "base/arena.h"
#include "ops/backend.h"

namespace rownorm::cuda {

using Index = std::int64_t;

inline constexpr Index max_head_dim = 128;  // of the attention kernels

// What cuBLASLt may use; cuBLAS itself takes as much on a Hopper GPU.
inline constexpr Index products_bytes = Index{32} << 20;

// Pinned memory of the host through which its buffers pass, piece by piece.
inline constexpr Index staging_pieces = 32, staging_piece_bytes = Index{256} << 10;
inline constexpr Index staging_bytes = staging_pieces * staging_piece_bytes;

// Of activations and the weights that products read; precision "bf16" (or "auto"), "tf32" or "fp32".
DType compute_dtype_of(const std::string& precision);

// Of one block, cuBLASLt's part first. Error (exit 2) for heads that the kernels do not have.
Index workspace_bytes(DType compute, const WorkspaceSizes& sizes);

// Rounded up to a multiple of 64: rows of so many logits or distances are of whole 16-byte accesses.
Index padded(Index columns);

// ---- what an operation needs of the workspace: built over a measuring arena to size it, over the workspace to use it

struct PartialSums {
  static constexpr Index parts = 1024;  // most blocks that one sum is shared by
  Tensor sums;                          // (parts) f64
  explicit PartialSums(Arena& arena);
};

struct AttentionScratch {
  Tensor rows;  // (tokens, heads, 2, 2) f32: pairs of values of each head's rows, their number rounded up to even
  AttentionScratch(Arena& arena, Index tokens, Index heads);
};

struct LogitsScratch {
  static constexpr Index rows = 1024;  // of tokens, a chunk
  Tensor logits;                       // (rows, columns) f32; columns = padded(V)
  Tensor gradients;                    // the same in compute precision: scale (softmax - onehot); logits itself in f32
  Tensor weights;  // (columns, d) in compute precision: w and rows of zeros; empty where columns = V
  Tensor losses;   // (rows) f64
  Tensor hidden;   // (rows, d) f32: a chunk of h where it is bf16, for row_range
  LogitsScratch(Arena& arena, DType compute, Index tokens, Index vocab, Index width);
};

struct NewtonSchulzScratch {
  Tensor x, next;           // (matrices, short, long) f32, or bf16 in that precision
  Tensor gram, polynomial;  // (matrices, short, short) the same: A, and b A + c A A
  Tensor squares;           // (matrices) f64
  PartialSums sums;
  NewtonSchulzScratch(Arena& arena, const NewtonSchulzSizes& sizes);
};

struct DiameterScratch {
  static constexpr Index block = 1024;  // rows a product
  // A pair of rows with its distance, and what the search knows: types of the kernels.
  static constexpr Index pair_bytes = 16, state_bytes = 48;
  Tensor sum;          // (d) f64, of all rows
  Tensor square;       // (V) f64, ||row - mean||^2
  Tensor centred;      // (V,d) f32, (row - mean) times a power of two
  Tensor half_square;  // (V) f64, ||centred||^2 / 2
  Tensor products;     // (min(block, V), columns) f32; columns = padded(V)
  Tensor found;        // the best pair of each block of a kernel
  Tensor state;        // what the search knows
  DiameterScratch(Arena& arena, Index vocab, Index width);
};

}  // namespace rownorm::cuda
