// What the attention kernels share: their sizes, and which tile of which head a block has.
#pragma once
#include "cuda/kernel.cuh"

namespace rownorm::cuda {

struct AttentionSizes {  // a kernel's parameter: in an order without padding
  int T, H;
  Index d;
  Index tasks;  // heads of all sequences
  int head_dim;
  float scale;  // 1 / sqrt(head_dim)
};

// Blocks go over the heads of a group at once, the tiles with most to do first: `last_first` where queries look back at
// keys, else where keys look ahead at queries. A group's keys and values (at T = 2048, head_dim 64: 16 MiB) stay in the
// L2 cache.
struct Place {
  static constexpr Index group = 32;
  Index task, begin;  // (sequence, head) as one number; the sequence's first row
  int head, first;    // the tile's first row within the sequence

  __device__ Place(const AttentionSizes& s, int rows, bool last_first) {
    const Index tiles = (s.T + rows - 1) / rows, before = blockIdx.x / (group * tiles) * group;
    const Index heads = min(group, s.tasks - before), rank = (blockIdx.x - before * tiles) / heads;
    task = before + (blockIdx.x - before * tiles) % heads;
    begin = task / s.H * s.T;
    head = static_cast<int>(task % s.H);
    first = static_cast<int>(last_first ? tiles - 1 - rank : rank) * rows;
  }

  static unsigned blocks(const AttentionSizes& s, int rows) { return ceil_div(s.tasks * ((s.T + rows - 1) / rows), 1); }
};

// In bf16, on tensor cores (flash_attention.cu). rows(tasks, T rounded up to even, 2) f32: -lse_i sqrt(head_dim) and
// -datt_i . att_i of each head, zeros where i = T.
void flash_attention(bf16* att, float* lse, const bf16* qkv, const AttentionSizes& s, cudaStream_t stream);
void flash_attention_backward(bf16* dqkv, const bf16* datt, const float2* rows, const bf16* qkv,
                              const AttentionSizes& s, cudaStream_t stream);

}  // namespace rownorm::cuda
