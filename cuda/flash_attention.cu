// Causal attention in bf16 on tensor cores, in the manner of FlashAttention-2 (Dao, 2023). Scores exist only in
// registers, in f32, as fragments of mma.m16n8k16; P and dS are rounded to bf16 to be multiplied. A warp has rows of
// the block's own tile and goes over the rows that these see, which come through shared memory by cp.async: the next
// tile travels while one is used. Backward goes over the scores twice, a block a tile of keys for dk and dv and a block
// a tile of queries for dq, so that every sum has one owner and a fixed order.
#include <cfloat>
#include <cmath>

#include "cuda/attention.cuh"

namespace rownorm::cuda {
namespace {

constexpr int threads = 128, warps = threads / 32;
constexpr float log2_e = 1.44269504f;

// Tiles for heads padded with zeros to D = 64 or 128 columns: with more rows a warp would need more than 255 registers.
template <int D>
struct Form {
  static constexpr int M = 128 / D;           // 16 x 16 fragments that a warp has below one another
  static constexpr int own = 16 * M * warps;  // rows of a block's own tile: 128 or 64
  static constexpr int step = own / 2;        // rows of a tile that it goes over
  static constexpr int part = 32;             // columns of scores that backward has at a time
  static constexpr int stride = D + 8;        // of rows in shared memory: 8 rows' 16 bytes lie in 32 different banks
  static constexpr int stage = 2 * step * stride;  // elements of two tiles
  static constexpr int statistics = step * 4;      // elements that take as much as a float2 a row
  static constexpr int forward_bytes = 2 * stage * 2;
  static constexpr int backward_bytes = 2 * (2 * own * stride + 2 * (stage + statistics));
};

// ---- between global and shared memory ----

// `rows` rows of a head from `first` on, zeros beyond row T and column head_dim. Copies are under way on return.
template <int D, int rows, bool aligned>
__device__ void load_rows(bf16* tile, const bf16* from, int stride, int first, const AttentionSizes& s) {
  constexpr int lanes = D / 8;  // threads that share a row
  const int at = static_cast<int>(threadIdx.x) / lanes, column = static_cast<int>(threadIdx.x) % lanes * 8;
  from += column;
  const auto load_row = [&](int row) {
    const bf16* p = from + static_cast<Index>(first + row) * stride;
    bf16* to = tile + row * Form<D>::stride + column;
    const bool inside = first + row < s.T;
    if constexpr (aligned) {
      cp_async_16(to, p, inside && column < s.head_dim);
    } else {
      Pack16<bf16> pack;
      for (int c = 0; c < pack.size; ++c) pack[c] = inside && column + c < s.head_dim ? p[c] : from_float<bf16>(0);
      store16(to, pack);
    }
  };
  if constexpr (aligned) {
    GPU_UNROLL
    for (int row = at; row < rows; row += threads / lanes) load_row(row);
  } else {  // rare, and unrolled it would take registers that the scores need
    GPU_NO_UNROLL
    for (int row = at; row < rows; row += threads / lanes) load_row(row);
  }
}

// A warp's 16 M rows of sums, rounded, by way of `tile`, which is the warp's own; `to` is row 0, of which `left` exist.
template <int D, bool aligned>
__device__ void store_rows(bf16* to, Index stride, bf16* tile, int left, int head_dim) {
  constexpr int lanes = D / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % lanes * 8;
  for (int row = lane / lanes; row < 16 * Form<D>::M && row < left; row += 32 / lanes) {
    const Pack16<bf16> pack = load16(tile + row * Form<D>::stride + column);
    if constexpr (aligned) {
      if (column < head_dim) store16(to + row * stride + column, pack);
    } else {
      for (int c = 0; c < pack.size && column + c < head_dim; ++c) to[row * stride + column + c] = pack[c];
    }
  }
}

// ---- fragments: a lane's x[m][n][e] is row 16 m + lane / 4 + 8 (e / 2), column 8 n + 2 (lane % 4) + e % 2 ----

__device__ inline int column_less_row(int m, int n, int e) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return 8 * n - 16 * m + 2 * (lane % 4) - lane / 4 + e % 2 - e / 2 * 8;
}

template <int M, int N, class Do>
__device__ void each(float (&x)[M][N][4], Do action) {
  GPU_UNROLL
  for (int m = 0; m < M; ++m) {
    GPU_UNROLL
    for (int n = 0; n < N; ++n) {
      GPU_UNROLL
      for (int e = 0; e < 4; ++e) action(x[m][n][e], m, n, e);
    }
  }
}

// Two values in the low and the high half of a register, and one of them again.
__device__ inline std::uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ inline float unpack(std::uint32_t pair, int which) {
  return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000u);
}

template <int D, int M>
__device__ void put_rows(bf16* tile, const float (&x)[M][D / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  GPU_UNROLL
  for (int m = 0; m < M; ++m) {
    GPU_UNROLL
    for (int n = 0; n < D / 8; ++n) {
      GPU_UNROLL
      for (int half = 0; half < 2; ++half) {
        bf16* to = tile + (16 * m + lane / 4 + 8 * half) * Form<D>::stride + 8 * n + 2 * (lane % 4);
        *reinterpret_cast<std::uint32_t*>(to) = pack(x[m][n][2 * half], x[m][n][2 * half + 1]);
      }
    }
  }
}

// Which 16 bytes a lane points ldmatrix to, from the first of 16 rows and columns: so that four 8 x 8 matrices become
// a[0..3] of A, or of a transposed B two n's b[0..1]; and of a B whose rows are its columns two n's b[0..1].
template <int D>
__device__ int offset_a() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return lane % 16 * Form<D>::stride + lane / 16 * 8;
}
template <int D>
__device__ int offset_b() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return (lane / 16 * 8 + lane % 8) * Form<D>::stride + lane / 8 % 2 * 8;
}

// x (16 M x 8 N) += a (16 M x 16) B, where B's element (k, n) is row n, column k of what b points to (offset_b), or, by
// rows, row k, column n (offset_a).
template <int D, bool by_rows, int M, int N>
__device__ void multiply(float (&x)[M][N][4], const std::uint32_t (&a)[M][4], const bf16* b) {
  GPU_UNROLL
  for (int n = 0; n < N; n += 2) {
    std::uint32_t four[4];
    if constexpr (by_rows)
      ldmatrix_x4_trans(four, b + 8 * n);
    else
      ldmatrix_x4(four, b + 8 * n * Form<D>::stride);
    const std::uint32_t b0[2] = {four[0], four[1]}, b1[2] = {four[2], four[3]};
    GPU_UNROLL
    for (int m = 0; m < M; ++m) {
      mma_m16n8k16(x[m][n], a[m], b0);
      mma_m16n8k16(x[m][n + 1], a[m], b1);
    }
  }
}

// x, rounded, as fragments of A.
template <int M, int N>
__device__ void round_rows(std::uint32_t (&a)[N / 2][M][4], const float (&x)[M][N][4]) {
  GPU_UNROLL
  for (int k = 0; k < N / 2; ++k) {
    GPU_UNROLL
    for (int m = 0; m < M; ++m) {
      GPU_UNROLL
      for (int i = 0; i < 4; ++i) a[k][m][i] = pack(x[m][2 * k + i / 2][i % 2 * 2], x[m][2 * k + i / 2][i % 2 * 2 + 1]);
    }
  }
}

// x (16 M x D) += a (16 M x 16 K) times 16 K rows of a tile (from offset_a).
template <int D, int M, int K>
__device__ void multiply_rows(float (&x)[M][D / 8][4], const std::uint32_t (&a)[K][M][4], const bf16* rows) {
  GPU_UNROLL
  for (int k = 0; k < K; ++k) multiply<D, true>(x, a[k], rows + 16 * k * Form<D>::stride);
}

template <int D>
__device__ void load_a(std::uint32_t (&a)[Form<D>::M][4], const bf16* from) {
  GPU_UNROLL
  for (int m = 0; m < Form<D>::M; ++m) ldmatrix_x4(a[m], from + 16 * m * Form<D>::stride);
}

// Over the four lanes of a row.
__device__ inline float row_sum(float x) {
  for (int step = 1; step < 4; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ inline float row_max(float x) {
  for (int step = 1; step < 4; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// ---- s_ij = q_i . k_j / sqrt(head_dim), j <= i; lse_i = log sum_j exp(s_ij); att_i = sum_j exp(s_ij - lse_i) v_j ----

// The largest score so far and the sums are carried from tile to tile, and what was summed is scaled when the largest
// score grows. A maximum drops a NaN; its exponential, and so the sum, is one.
template <int D, bool aligned>
__global__ void __launch_bounds__(threads, 2)
    flash_attention_kernel(bf16* att, float* lse, const bf16* qkv, AttentionSizes s) {
  using F = Form<D>;
  constexpr int M = F::M, N = F::step / 8, stride = F::stride;
  GPU_DYN_SMEM(bf16, memory);
  const Place place(s, F::own, true);
  const int d = static_cast<int>(s.d);
  const bf16* in = qkv + place.begin * 3 * d + place.head * s.head_dim;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = place.first + 16 * M * warp;
  const int tiles = (min(place.first + F::own, s.T) - 1) / F::step + 1;
  const auto load = [&](int tile) {
    bf16* stage = memory + tile % 2 * F::stage;
    load_rows<D, F::step, aligned>(stage, in + d, 3 * d, tile * F::step, s);
    load_rows<D, F::step, aligned>(stage + F::step * stride, in + 2 * d, 3 * d, tile * F::step, s);
    cp_async_commit();
  };

  static_assert(F::own * stride == F::stage);  // q comes by way of the second stage
  load_rows<D, F::own, aligned>(memory + F::stage, in, 3 * d, place.first, s);
  cp_async_commit();
  load(0);
  cp_async_wait<1>();
  __syncthreads();
  std::uint32_t q[D / 16][M][4];
  GPU_UNROLL
  for (int k = 0; k < D / 16; ++k) load_a<D>(q[k], memory + F::stage + 16 * M * warp * stride + offset_a<D>() + 16 * k);

  const float c = s.scale * log2_e;
  float out[M][D / 8][4] = {}, highest[M][2], sum[M][2] = {};
  GPU_UNROLL
  for (int m = 0; m < M; ++m) highest[m][0] = highest[m][1] = -FLT_MAX;
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // the tile has come, and the one before it has been used
    if (tile + 1 < tiles) load(tile + 1);
    const int first_key = tile * F::step;
    if (first_key > first_row + 16 * M - 1) continue;
    const bf16* k_tile = memory + tile % 2 * F::stage;
    float x[M][N][4] = {};
    GPU_UNROLL
    for (int k = 0; k < D / 16; ++k) multiply<D, false>(x, q[k], k_tile + offset_b<D>() + 16 * k);
    if (first_key + F::step - 1 > first_row) {
      each(x, [&](float& score, int m, int n, int e) {
        if (first_key + column_less_row(m, n, e) > first_row) score = -INFINITY;
      });
    }
    GPU_UNROLL
    for (int m = 0; m < M; ++m) {
      GPU_UNROLL
      for (int half = 0; half < 2; ++half) {
        float largest = highest[m][half];
        GPU_UNROLL
        for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(x[m][n][2 * half], x[m][n][2 * half + 1]));
        largest = row_max(largest);
        const float keep = fast_exp2(c * (highest[m][half] - largest)), shift = -c * largest;
        highest[m][half] = largest;
        sum[m][half] *= keep;
        GPU_UNROLL
        for (int n = 0; n < N; ++n) {
          GPU_UNROLL
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            x[m][n][e] = fast_exp2(fmaf(x[m][n][e], c, shift));
            sum[m][half] += x[m][n][e];
          }
        }
        GPU_UNROLL
        for (int n = 0; n < D / 8; ++n) {
          out[m][n][2 * half] *= keep;
          out[m][n][2 * half + 1] *= keep;
        }
      }
    }
    std::uint32_t p[N / 2][M][4];
    round_rows(p, x);
    multiply_rows<D>(out, p, k_tile + F::step * stride + offset_a<D>());
  }

  GPU_UNROLL
  for (int m = 0; m < M; ++m) {
    GPU_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float total = row_sum(sum[m][half]), inverse = 1 / total;
      const int i = first_row + 16 * m + lane / 4 + 8 * half;
      if (lane % 4 == 0 && i < s.T)
        lse[(place.begin + i) * s.H + place.head] = s.scale * highest[m][half] + logf(total);
      GPU_UNROLL
      for (int n = 0; n < D / 8; ++n) {
        out[m][n][2 * half] *= inverse;
        out[m][n][2 * half + 1] *= inverse;
      }
    }
  }
  bf16* tile = memory + tiles % 2 * F::stage + 16 * M * warp * stride;  // the stage that nobody reads any more
  put_rows<D>(tile, out);
  __syncwarp();
  store_rows<D, aligned>(att + (place.begin + first_row) * s.d + place.head * s.head_dim, s.d, tile, s.T - first_row,
                         s.head_dim);
}

// ---- p_ij = exp(s_ij - lse_i), ds_ij = p_ij (datt_i . v_j - delta_i), j <= i:
// dv_j = sum_i p_ij datt_i, dk_j = sum_i ds_ij q_i / sqrt(head_dim), dq_i = sum_j ds_ij k_j / sqrt(head_dim) ----

// keys: the own tile is of k and v and goes over q and datt, scores are k q^T; otherwise the other way round. Products
// begin with the rows' statistics, so that they end as exponents and as datt_i . v_j - delta_i.
template <int D, bool keys, bool aligned>
__global__ void __launch_bounds__(threads, 2)
    flash_attention_backward_kernel(bf16* dqkv, const bf16* datt, const float2* rows, const bf16* qkv,
                                    AttentionSizes s) {
  using F = Form<D>;
  constexpr int M = F::M, N = F::part / 8, stride = F::stride;
  GPU_DYN_SMEM(bf16, memory);
  const Place place(s, F::own, !keys);
  const int d = static_cast<int>(s.d);
  const bf16* in = qkv + place.begin * 3 * d + place.head * s.head_dim;
  const bf16* dout = datt + place.begin * s.d + place.head * s.head_dim;
  rows += place.task * (s.T + s.T % 2);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = place.first + 16 * M * warp;
  bf16 *own_a = memory + 16 * M * warp * stride, *own_b = own_a + F::own * stride;  // the warp's rows
  bf16* stages = memory + 2 * F::own * stride;
  const int begin = keys ? place.first / F::step : 0;
  const int end = ((keys ? s.T : min(place.first + F::own, s.T)) - 1) / F::step + 1;
  const auto load = [&](int tile) {
    bf16* stage = stages + tile % 2 * (F::stage + F::statistics);
    const int first = tile * F::step;
    load_rows<D, F::step, aligned>(stage, keys ? in : in + d, 3 * d, first, s);
    load_rows<D, F::step, aligned>(stage + F::step * stride, keys ? dout : in + 2 * d, keys ? d : 3 * d, first, s);
    const int two = 2 * static_cast<int>(threadIdx.x);  // rows
    if (keys && two < F::step) cp_async_16(stage + F::stage + 4 * two, rows + first + two, first + two < s.T);
    cp_async_commit();
  };

  load_rows<D, F::own, aligned>(memory, keys ? in + d : in, 3 * d, place.first, s);
  load_rows<D, F::own, aligned>(memory + F::own * stride, keys ? in + 2 * d : dout, keys ? 3 * d : d, place.first, s);
  cp_async_commit();
  load(begin);
  float2 of_row[M][2];
  if constexpr (!keys) {
    GPU_UNROLL
    for (int m = 0; m < M; ++m) {
      GPU_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int i = first_row + 16 * m + lane / 4 + 8 * half;
        of_row[m][half] = i < s.T ? rows[i] : float2{0, 0};
      }
    }
  }
  // x += (own rows of a tile) (rows of another)^T
  const auto products = [&](float(&x)[M][N][4], const bf16* own, const bf16* other) {
#pragma unroll 2  // all four would take more registers than there are
    for (int k = 0; k < D / 16; ++k) {
      std::uint32_t a[M][4];
      load_a<D>(a, own + offset_a<D>() + 16 * k);
      multiply<D, false>(x, a, other + offset_b<D>() + 16 * k);
    }
  };

  const float c = s.scale * log2_e;
  float da[M][D / 8][4] = {}, db[keys ? M : 1][D / 8][4] = {};  // dk or dq, dv
  for (int tile = begin; tile < end; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // the tile has come, and the one before it has been used
    if (tile + 1 < end) load(tile + 1);
    for (int part = 0; part < F::step; part += F::part) {
      const int first = tile * F::step + part;
      const int first_key = keys ? first_row : first, last_key = first_key + (keys ? 16 * M : F::part) - 1;
      const int first_query = keys ? first : first_row, last_query = first_query + (keys ? F::part : 16 * M) - 1;
      if (first_key > last_query) continue;
      const bf16* stage = stages + tile % 2 * (F::stage + F::statistics);
      const bf16 *other_a = stage + part * stride, *other_b = other_a + F::step * stride;
      const auto* of_column = reinterpret_cast<const float2*>(stage + F::stage) + part + 2 * (lane % 4);
      const auto statistics = [&](int m, int n, int e) { return keys ? of_column[8 * n + e % 2] : of_row[m][e / 2]; };
      float p[M][N][4], ds[M][N][4];
      each(p, [&](float& x, int m, int n, int e) { x = statistics(m, n, e).x; });
      products(p, own_a, other_a);
      each(p, [&](float& x, int, int, int) { x = fast_exp2(c * x); });
      if (last_key > first_query) {
        each(p, [&](float& x, int m, int n, int e) {
          const int ahead = first + column_less_row(m, n, e) - first_row;
          if (keys ? ahead < 0 : ahead > 0) x = 0;
        });
      }
      std::uint32_t rounded[N / 2][M][4];
      round_rows(rounded, p);
      if constexpr (keys) multiply_rows<D>(db, rounded, other_b + offset_a<D>());
      each(ds, [&](float& x, int m, int n, int e) { x = statistics(m, n, e).y; });
      products(ds, own_b, other_b);
      each(ds, [&](float& x, int m, int n, int e) {  // by the rounded p, which takes half as many registers
        x *= unpack(rounded[n / 2][m][n % 2 * 2 + e / 2], e % 2);
      });
      round_rows(rounded, ds);
      multiply_rows<D>(da, rounded, other_a + offset_a<D>());
    }
  }

  each(da, [&](float& x, int, int, int) { x *= s.scale; });
  bf16* to = dqkv + (in - qkv) + static_cast<Index>(first_row) * 3 * d;
  __syncwarp();  // the warp's own rows have been used
  put_rows<D>(own_a, da);
  if constexpr (keys) put_rows<D>(own_b, db);
  __syncwarp();
  store_rows<D, aligned>(keys ? to + d : to, 3 * d, own_a, s.T - first_row, s.head_dim);
  if constexpr (keys) store_rows<D, aligned>(to + 2 * d, 3 * d, own_b, s.T - first_row, s.head_dim);
}

// Calls launch<D, aligned>() for the width that heads are padded to and for rows that allow 16-byte accesses.
template <class Launch>
void for_heads(int head_dim, std::initializer_list<const void*> pointers, Launch launch) {
  const bool aligned = fits16(head_dim, DType::bf16, pointers);
  if (head_dim <= 64)
    aligned ? launch.template operator()<64, true>() : launch.template operator()<64, false>();
  else
    aligned ? launch.template operator()<128, true>() : launch.template operator()<128, false>();
}

// One block a tile.
template <int D, class... Parameters, class... Arguments>
void launch_tiles(void (*kernel)(Parameters...), int bytes, const AttentionSizes& s, cudaStream_t stream,
                  const char* operation, const Arguments&... arguments) {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        operation);
  check(gpu_launch(kernel, Place::blocks(s, Form<D>::own), threads, static_cast<std::size_t>(bytes), stream,
                   arguments..., s),
        operation);
}

}  // namespace

void flash_attention(bf16* att, float* lse, const bf16* qkv, const AttentionSizes& s, cudaStream_t stream) {
  for_heads(s.head_dim, {att, qkv}, [&]<int D, bool aligned>() {
    launch_tiles<D>(flash_attention_kernel<D, aligned>, Form<D>::forward_bytes, s, stream, "attention", att, lse, qkv);
  });
}

void flash_attention_backward(bf16* dqkv, const bf16* datt, const float2* rows, const bf16* qkv,
                              const AttentionSizes& s, cudaStream_t stream) {
  for_heads(s.head_dim, {dqkv, datt, qkv}, [&]<int D, bool aligned>() {
    launch_tiles<D>(flash_attention_backward_kernel<D, true, aligned>, Form<D>::backward_bytes, s, stream,
                    "attention_backward", dqkv, datt, rows, qkv);
    launch_tiles<D>(flash_attention_backward_kernel<D, false, aligned>, Form<D>::backward_bytes, s, stream,
                    "attention_backward", dqkv, datt, rows, qkv);
  });
}

}  // namespace rownorm::cuda
