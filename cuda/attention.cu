// Causal attention. In bf16 the work is flash_attention.cu's; what is here computes in f32, by tiles of queries and
// keys: scores exist for one pair of tiles at a time, in shared memory.
#include <cfloat>
#include <cmath>

#include "cuda/attention.cuh"

namespace rownorm::cuda {

namespace {

constexpr int threads = 128;

// Tiles of R rows of a head, columns padded with zeros to D. A row of the block's own tile belongs to `lanes`
// neighbouring threads of a warp, of which the one called `lane` has the columns, and of the rows of another tile
// those, lane, lane + lanes, ...
template <int D, int R>
struct Tile {
  static constexpr int lanes = threads / R, stride = D + 1;  // no two rows begin in the same bank
  using Rows = float[R][stride];
  using Pairs = float[R][R + 1];  // a value a row of the own and a row of another tile
  using Sums = float[D / lanes];  // a row's columns of a thread
  int row = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;

  __device__ static void read(Rows& tile, const float* from, Index row_stride, int first, const AttentionSizes& s) {
    for (int i = static_cast<int>(threadIdx.x); i < R * D; i += threads) {
      const int row = i / D, column = i % D;
      const bool inside = first + row < s.T && column < s.head_dim;
      tile[row][column] = inside ? from[(first + row) * row_stride + column] : 0.0f;
    }
  }

  __device__ static float dot(const float* a, const float* b) {
    float sum = 0;
    for (int c = 0; c < D; ++c) sum += a[c] * b[c];
    return sum;
  }

  // sums += the own row of weights times the rows of a tile
  __device__ void add(Sums& sums, const Pairs& weights, const Rows& rows) const {
    GPU_UNROLL
    for (int c = 0; c < D / lanes; ++c) {
      float total = 0;
      for (int j = 0; j < R; ++j) total += weights[row][j] * rows[j][lane + c * lanes];
      sums[c] += total;
    }
  }

  __device__ void write(float* to, const Sums& sums, float factor, int head_dim) const {
    GPU_UNROLL
    for (int c = 0; c < D / lanes; ++c)
      if (lane + c * lanes < head_dim) to[lane + c * lanes] = factor * sums[c];
  }

  __device__ static float row_sum(float x) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }
  __device__ static float row_max(float x) {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
  }
};

// s_ij = q_i . k_j / sqrt(head_dim), j <= i; lse_i = log sum_j exp(s_ij); att_i = sum_j exp(s_ij - lse_i) v_j. Largest
// score and sum so far are carried from tile to tile, and what was summed is scaled when the largest score grows.
template <int D, int R>
__global__ void __launch_bounds__(threads)
    attention_kernel(float* att, float* lse, const float* qkv, AttentionSizes s) {
  using Own = Tile<D, R>;
  constexpr int lanes = Own::lanes;
  GPU_SHARED(typename Own::Rows, memory, 3);
  GPU_SHARED(typename Own::Pairs, pairs, 1);
  auto &q = memory[0], &k = memory[1], &v = memory[2];
  auto& p = pairs[0];
  const Place place(s, R, true);
  const float* in = qkv + place.begin * 3 * s.d + place.head * s.head_dim;
  const Own own;
  const int i = place.first + own.row;

  Own::read(q, in, 3 * s.d, place.first, s);
  float highest = -FLT_MAX, sum = 0;
  typename Own::Sums out = {};
  for (int first = 0; first <= place.first; first += R) {
    __syncthreads();  // the tile before has been used
    Own::read(k, in + s.d, 3 * s.d, first, s);
    Own::read(v, in + 2 * s.d, 3 * s.d, first, s);
    __syncthreads();
    float score[R / lanes], largest = highest;
    GPU_UNROLL
    for (int e = 0; e < R / lanes; ++e) {
      const int j = own.lane + e * lanes;
      score[e] = first + j <= i ? s.scale * Own::dot(q[own.row], k[j]) : -INFINITY;
      largest = fmaxf(largest, score[e]);
    }
    largest = Own::row_max(largest);
    const float keep = expf(highest - largest);
    highest = largest;
    float added = 0;
    GPU_UNROLL
    for (int e = 0; e < R / lanes; ++e) added += p[own.row][own.lane + e * lanes] = expf(score[e] - highest);
    sum = sum * keep + Own::row_sum(added);
    GPU_UNROLL
    for (int c = 0; c < D / lanes; ++c) out[c] *= keep;
    __syncwarp();  // the threads of a row are of one warp
    own.add(out, p, v);
  }
  if (i >= s.T) return;
  if (own.lane == 0) lse[(place.begin + i) * s.H + place.head] = highest + logf(sum);
  own.write(att + (place.begin + i) * s.d + place.head * s.head_dim, out, 1 / sum, s.head_dim);
}

// What backward needs of a row i of a head: -lse_i sqrt(head_dim) and -delta_i, delta_i = datt_i . att_i, so that sums
// which begin with them give exponents and differences. Eight threads a row, W elements at a time.
template <class T, int W>
__global__ void row_statistics_kernel(float2* rows, const T* datt, const T* att, const float* lse, AttentionSizes s) {
  constexpr int lanes = 8;
  const Index item = (static_cast<Index>(blockIdx.x) * threads + threadIdx.x) / lanes, even = s.T + s.T % 2;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const Index task = item / even, i = item % even, n = task / s.H * s.T + i, head = task % s.H;
  const bool inside = task < s.tasks && i < s.T;
  float sum = 0;
  for (int c = lane * W; inside && c < s.head_dim; c += lanes * W) {
    float a[W], b[W];
    load(a, datt + n * s.d + head * s.head_dim + c);
    load(b, att + n * s.d + head * s.head_dim + c);
    for (int e = 0; e < W; ++e) sum += a[e] * b[e];
  }
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0 && task < s.tasks) rows[item] = inside ? float2{-lse[n * s.H + head] / s.scale, -sum} : float2{0, 0};
}

// p_ij = exp(s_ij - lse_i), ds_ij = p_ij (datt_i . v_j - delta_i), j <= i. A block has a tile of keys and goes over the
// queries that see them: dv_j = sum_i p_ij datt_i, dk_j = sum_i ds_ij q_i / sqrt(head_dim); or, !keys, a tile of
// queries and goes over keys: dq_i = sum_j ds_ij k_j / sqrt(head_dim). So every sum has one owner and a fixed order.
template <int D, int R, bool keys>
__global__ void __launch_bounds__(threads)
    attention_backward_kernel(float* dqkv, const float* datt, const float2* rows, const float* qkv, AttentionSizes s) {
  using Own = Tile<D, R>;
  GPU_SHARED(typename Own::Rows, memory, 4);
  GPU_SHARED(typename Own::Pairs, pairs, 2);
  auto &p = pairs[0], &ds = pairs[1];
  const Place place(s, R, !keys);
  const Index offset = place.begin * 3 * s.d + place.head * s.head_dim;
  const Own own;
  rows += place.task * (s.T + s.T % 2);
  const auto read = [&](bool of_keys, typename Own::Rows& a, typename Own::Rows& b, int first) {
    const float *in = qkv + offset, *out = datt + place.begin * s.d + place.head * s.head_dim;
    Own::read(a, of_keys ? in + s.d : in, 3 * s.d, first, s);
    Own::read(b, of_keys ? in + 2 * s.d : out, of_keys ? 3 * s.d : s.d, first, s);
  };

  read(keys, memory[0], memory[1], place.first);
  typename Own::Sums da = {}, db = {};  // dk or dq, dv
  for (int first = keys ? place.first : 0; keys ? first < s.T : first <= place.first; first += R) {
    __syncthreads();  // the tile before has been used
    read(!keys, memory[2], memory[3], first);
    __syncthreads();
    for (int j = own.lane; j < R; j += Own::lanes) {
      const int key = keys ? place.first + own.row : first + j, query = keys ? first + j : place.first + own.row;
      const bool seen = key <= query && query < s.T;
      const float2 of = seen ? rows[query] : float2{0, 0};
      const float probability = seen ? expf(s.scale * (Own::dot(memory[0][own.row], memory[2][j]) + of.x)) : 0;
      p[own.row][j] = probability;
      ds[own.row][j] = seen ? probability * (Own::dot(memory[1][own.row], memory[3][j]) + of.y) : 0;
    }
    __syncwarp();  // the threads of a row are of one warp
    own.add(da, ds, memory[2]);
    if (keys) own.add(db, p, memory[3]);
  }
  if (place.first + own.row >= s.T) return;
  float* to = dqkv + offset + (place.first + own.row) * 3 * s.d;
  own.write(keys ? to + s.d : to, da, s.scale, s.head_dim);
  if (keys) own.write(to + 2 * s.d, db, 1, s.head_dim);
}

// ---- attention to a cache ----

// The new keys and values join the cache: a block a row.
template <class T>
__global__ void append_kernel(T* keys, T* values, const T* qkv, Index position, Index d) {
  const Index n = blockIdx.x;
  for (Index j = threadIdx.x; j < d; j += threads) {
    keys[(position + n) * d + j] = qkv[(3 * n + 1) * d + j];
    values[(position + n) * d + j] = qkv[(3 * n + 2) * d + j];
  }
}

// A block a (row, head). Each warp goes over every fourth key and carries its own largest score and sums, as
// attention_kernel does; the warps' are then put together in order.
template <class T>
__global__ void __launch_bounds__(threads)
    cached_attention_kernel(T* att, const T* keys, const T* values, const T* qkv, Index position, AttentionSizes s) {
  constexpr int warps = threads / 32, columns = max_head_dim / 32;  // columns of a lane
  using Head = float[max_head_dim];
  GPU_SHARED(Head, outs, warps);
  GPU_SHARED(float, highests, warps);
  GPU_SHARED(float, sums, warps);
  const int block = static_cast<int>(blockIdx.x);
  const Index n = block / s.H, first = block % s.H * s.head_dim;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float q[columns], out[columns] = {}, highest = -FLT_MAX, sum = 0;
  GPU_UNROLL
  for (int c = 0; c < columns; ++c) {
    const int at = lane + 32 * c;
    q[c] = at < s.head_dim ? to_float(qkv[3 * n * s.d + first + at]) : 0;
  }
  for (Index j = warp; j <= position + n; j += warps) {
    float product = 0;
    GPU_UNROLL
    for (int c = 0; c < columns; ++c)
      if (lane + 32 * c < s.head_dim) product += q[c] * to_float(keys[j * s.d + first + lane + 32 * c]);
    const float score = s.scale * warp_sum(product), largest = fmaxf(highest, score);
    const float keep = expf(highest - largest), p = expf(score - largest);
    highest = largest;
    sum = sum * keep + p;
    GPU_UNROLL
    for (int c = 0; c < columns; ++c)
      if (lane + 32 * c < s.head_dim) out[c] = out[c] * keep + p * to_float(values[j * s.d + first + lane + 32 * c]);
  }
  GPU_UNROLL
  for (int c = 0; c < columns; ++c) outs[warp][lane + 32 * c] = out[c];
  if (lane == 0) {
    highests[warp] = highest;
    sums[warp] = sum;
  }
  __syncthreads();
  const int at = static_cast<int>(threadIdx.x);
  if (at >= s.head_dim) return;
  float largest = highests[0], total = 0, all = 0;
  for (int w = 1; w < warps; ++w) largest = fmaxf(largest, highests[w]);
  for (int w = 0; w < warps; ++w) {
    const float keep = expf(highests[w] - largest);
    total += sums[w] * keep;
    all += outs[w][at] * keep;
  }
  att[n * s.d + first + at] = from_float<T>(all / total);
}

static_assert(max_head_dim <= threads);

// Calls launch<D, R>() for the width that heads are padded to.
template <class Launch>
void for_heads(int head_dim, Launch launch) {
  head_dim <= 64 ? launch.template operator()<64, 32>() : launch.template operator()<128, 16>();
}

AttentionSizes sizes_of(Index N, Index T, Index H, Index d) {
  const auto head_dim = static_cast<int>(d / H);
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  return {static_cast<int>(T), static_cast<int>(H), d, N / T * H, head_dim, static_cast<float>(scale)};
}

}  // namespace

void CudaBackend::do_attention(Tensor att, Tensor lse, Tensor qkv, Index context) {
  const AttentionSizes s = sizes_of(att.dim(0), context, lse.dim(1), att.dim(1));
  if (s.tasks == 0) return;
  if (compute_ == DType::bf16)
    return flash_attention(pointer<bf16>(att), pointer<float>(lse), pointer<bf16>(qkv), s, stream_);
  for_heads(s.head_dim, [&]<int D, int R>() {
    check(gpu_launch(attention_kernel<D, R>, Place::blocks(s, R), threads, 0, stream_, pointer<float>(att),
                     pointer<float>(lse), pointer<float>(qkv), s),
          "attention");
  });
}

void CudaBackend::do_attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv, Index context) {
  const AttentionSizes s = sizes_of(att.dim(0), context, lse.dim(1), att.dim(1));
  if (s.tasks == 0) return;
  Arena arena = scratch();
  auto* rows = pointer<float2>(AttentionScratch(arena, att.dim(0), s.H).rows);
  for_elements(compute_, fits16(s.head_dim, compute_, {datt.data, att.data}), [&]<class T, int W>() {
    check(gpu_launch(row_statistics_kernel<T, W>, ceil_div(8 * s.tasks * (s.T + s.T % 2), threads), threads, 0, stream_,
                     rows, pointer<T>(datt), pointer<T>(att), pointer<float>(lse), s),
          "attention_backward");
  });
  if (compute_ == DType::bf16)
    return flash_attention_backward(pointer<bf16>(dqkv), pointer<bf16>(datt), rows, pointer<bf16>(qkv), s, stream_);
  for_heads(s.head_dim, [&]<int D, int R>() {
    const auto backward = [&](auto* kernel) {
      check(gpu_launch(kernel, Place::blocks(s, R), threads, 0, stream_, pointer<float>(dqkv), pointer<float>(datt),
                       rows, pointer<float>(qkv), s),
            "attention_backward");
    };
    backward(attention_backward_kernel<D, R, true>);
    backward(attention_backward_kernel<D, R, false>);
  });
}

void CudaBackend::do_cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, Index position,
                                      Index head_dim) {
  const Index N = att.dim(0), d = att.dim(1);
  const AttentionSizes s = sizes_of(N, 1, d / head_dim, d);  // rows do not see one another
  if (N == 0) return;
  for_elements(compute_, false, [&]<class T, int W>() {
    check(gpu_launch(append_kernel<T>, ceil_div(N, 1), threads, 0, stream_, pointer<T>(keys), pointer<T>(values),
                     pointer<T>(qkv), position, d),
          "cached_attention");
    check(gpu_launch(cached_attention_kernel<T>, ceil_div(s.tasks, 1), threads, 0, stream_, pointer<T>(att),
                     pointer<T>(keys), pointer<T>(values), pointer<T>(qkv), position, s),
          "cached_attention");
  });
}

}  // namespace rownorm::cuda
