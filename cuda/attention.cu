// Causal attention by tiles of queries and keys: scores exist for one pair of tiles at a time, in shared memory. All
// arithmetic is in f32. Backward goes over the scores twice, once to sum dk and dv and once to sum dq, so that every
// sum has one owner and a fixed order.
#include <cfloat>
#include <cmath>

#include "cuda/kernel.cuh"

namespace rownorm::cuda {
namespace {

constexpr int threads = 128;

struct Sizes {
  Index T, H, d;
  int head_dim;
  float scale;  // 1 / sqrt(head_dim)
};

// Tiles of R rows of a head, columns padded with zeros to D. A row belongs to `lanes` neighbouring threads of a warp,
// of which the one called `lane` has the columns, and the scores, lane, lane + lanes, ...
template <int D, int R>
struct Tile {
  static constexpr int lanes = threads / R, stride = D + 1;  // no two rows begin in the same bank
  using Rows = float[R][stride];
  using Pairs = float[R][R + 1];  // a value a pair of rows of two tiles
  using Values = float[R];        // a value a row

  template <class T>
  __device__ static void read(Rows& tile, const T* from, Index row_stride, Index first, Index T_rows, int head_dim) {
    for (int i = static_cast<int>(threadIdx.x); i < R * D; i += threads) {
      const int row = i / D, column = i % D;
      const bool inside = first + row < T_rows && column < head_dim;
      tile[row][column] = inside ? to_float(from[(first + row) * row_stride + column]) : 0.0f;
    }
  }

  __device__ static float dot(const float* a, const float* b) {
    float sum = 0;
    for (int c = 0; c < D; ++c) sum += a[c] * b[c];
    return sum;
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

// Which tile, head and sequence a block has; the tiles that see most keys begin first.
struct Place {
  Index first, sequence, head;  // first row of the tile in its sequence

  __device__ Place(const Sizes& s, int rows) {
    const Index tiles = (s.T + rows - 1) / rows, task = blockIdx.x / tiles;
    first = (tiles - 1 - blockIdx.x % tiles) * rows;
    sequence = task / s.H;
    head = task % s.H;
  }
};

// s_ij = q_i . k_j / sqrt(head_dim), j <= i; lse_i = log sum_j exp(s_ij); att_i = sum_j exp(s_ij - lse_i) v_j. Largest
// score and sum so far are carried from tile to tile, and what was summed is scaled when the largest score grows.
template <class T, int D, int R>
__global__ void __launch_bounds__(threads) attention_kernel(T* att, float* lse, const T* qkv, Sizes s) {
  using Own = Tile<D, R>;
  constexpr int lanes = Own::lanes;
  GPU_SHARED(typename Own::Rows, memory, 3);
  GPU_SHARED(typename Own::Pairs, pairs, 1);
  auto &q = memory[0], &k = memory[1], &v = memory[2];
  auto& p = pairs[0];
  const Place place(s, R);
  const Index begin = place.sequence * s.T, column = place.head * s.head_dim;
  const T* in = qkv + begin * 3 * s.d + column;
  const int row = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  const Index i = place.first + row;

  Own::read(q, in, 3 * s.d, place.first, s.T, s.head_dim);
  float highest = -FLT_MAX, sum = 0, out[D / lanes] = {};
  for (Index first = 0; first <= place.first; first += R) {
    __syncthreads();  // the tile before has been used
    Own::read(k, in + s.d, 3 * s.d, first, s.T, s.head_dim);
    Own::read(v, in + 2 * s.d, 3 * s.d, first, s.T, s.head_dim);
    __syncthreads();
    float score[R / lanes], largest = highest;
    GPU_UNROLL
    for (int e = 0; e < R / lanes; ++e) {
      const int j = lane + e * lanes;
      score[e] = first + j <= i ? s.scale * Own::dot(q[row], k[j]) : -INFINITY;
      largest = fmaxf(largest, score[e]);
    }
    largest = Own::row_max(largest);
    const float keep = expf(highest - largest);
    highest = largest;
    float added = 0;
    GPU_UNROLL
    for (int e = 0; e < R / lanes; ++e) {
      const float value = expf(score[e] - highest);
      p[row][lane + e * lanes] = value;
      added += value;
    }
    sum = sum * keep + Own::row_sum(added);
    __syncwarp();  // the threads of a row are of one warp
    GPU_UNROLL
    for (int c = 0; c < D / lanes; ++c) {
      float total = 0;
      for (int j = 0; j < R; ++j) total += p[row][j] * v[j][lane + c * lanes];
      out[c] = out[c] * keep + total;
    }
  }
  if (i >= s.T) return;
  if (lane == 0) lse[(begin + i) * s.H + place.head] = highest + logf(sum);
  GPU_UNROLL
  for (int c = 0; c < D / lanes; ++c) {
    const int at = lane + c * lanes;
    if (at < s.head_dim) att[(begin + i) * s.d + column + at] = from_float<T>(out[c] / sum);
  }
}

// What both passes of backward need of a tile of queries: rows of q, datt, lse and delta_i = datt_i . att_i.
template <class T>
struct Gradient {
  const T *qkv, *att, *datt;
  const float* lse;
};

template <class T, int D, int R>
__device__ void read_queries(typename Tile<D, R>::Rows& q, typename Tile<D, R>::Rows& dout, float* lse, float* delta,
                             const Gradient<T>& in, const Sizes& s, const Place& place, Index first) {
  using Own = Tile<D, R>;
  const Index begin = place.sequence * s.T, column = place.head * s.head_dim;
  Own::read(q, in.qkv + begin * 3 * s.d + column, 3 * s.d, first, s.T, s.head_dim);
  Own::read(dout, in.datt + begin * s.d + column, s.d, first, s.T, s.head_dim);
  const int row = static_cast<int>(threadIdx.x) / Own::lanes, lane = static_cast<int>(threadIdx.x) % Own::lanes;
  const bool inside = first + row < s.T;
  float sum = 0;
  for (int c = lane; inside && c < s.head_dim; c += Own::lanes) {
    const Index at = (begin + first + row) * s.d + column + c;
    sum += to_float(in.datt[at]) * to_float(in.att[at]);
  }
  sum = Own::row_sum(sum);
  if (lane == 0) {
    delta[row] = sum;
    lse[row] = inside ? in.lse[(begin + first + row) * s.H + place.head] : 0;
  }
}

// p_ij = exp(s_ij - lse_i) and ds_ij = p_ij (datt_i . v_j - delta_i) of the pairs j <= i of two tiles, else 0.
template <int D, int R>
__device__ void scores_gradient(typename Tile<D, R>::Pairs& p, typename Tile<D, R>::Pairs& ds,
                                const typename Tile<D, R>::Rows& q, const typename Tile<D, R>::Rows& k,
                                const typename Tile<D, R>::Rows& v, const typename Tile<D, R>::Rows& dout,
                                const float* lse, const float* delta, const Sizes& s, Index first_query,
                                Index first_key) {
  using Own = Tile<D, R>;
  const int row = static_cast<int>(threadIdx.x) / Own::lanes, lane = static_cast<int>(threadIdx.x) % Own::lanes;
  const Index i = first_query + row;
  for (int j = lane; j < R; j += Own::lanes) {
    const bool seen = i < s.T && first_key + j <= i;
    const float probability = seen ? expf(s.scale * Own::dot(q[row], k[j]) - lse[row]) : 0;
    p[row][j] = probability;
    ds[row][j] = seen ? probability * (Own::dot(dout[row], v[j]) - delta[row]) : 0;
  }
}

// dv_j = sum_i p_ij datt_i; dk_j = sum_i ds_ij q_i / sqrt(head_dim): a block has a tile of keys.
template <class T, int D, int R>
__global__ void __launch_bounds__(threads) attention_backward_keys_kernel(T* dqkv, Gradient<T> in, Sizes s) {
  using Own = Tile<D, R>;
  constexpr int lanes = Own::lanes;
  GPU_SHARED(typename Own::Rows, memory, 4);
  GPU_SHARED(typename Own::Pairs, pairs, 2);
  GPU_SHARED(typename Own::Values, rows, 2);
  auto &q = memory[0], &k = memory[1], &v = memory[2], &dout = memory[3];
  const Place place(s, R);
  const Index begin = place.sequence * s.T, column = place.head * s.head_dim;
  const T* own = in.qkv + begin * 3 * s.d + column;
  const int row = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;

  Own::read(k, own + s.d, 3 * s.d, place.first, s.T, s.head_dim);
  Own::read(v, own + 2 * s.d, 3 * s.d, place.first, s.T, s.head_dim);
  float dk[D / lanes] = {}, dv[D / lanes] = {};
  for (Index first = place.first; first < s.T; first += R) {
    __syncthreads();  // the tile before has been used
    read_queries<T, D, R>(q, dout, rows[0], rows[1], in, s, place, first);
    __syncthreads();
    scores_gradient<D, R>(pairs[0], pairs[1], q, k, v, dout, rows[0], rows[1], s, first, place.first);
    __syncthreads();
    GPU_UNROLL
    for (int c = 0; c < D / lanes; ++c)
      for (int i = 0; i < R; ++i) {
        dv[c] += pairs[0][i][row] * dout[i][lane + c * lanes];
        dk[c] += pairs[1][i][row] * q[i][lane + c * lanes];
      }
  }
  const Index j = place.first + row;
  if (j >= s.T) return;
  T* out = dqkv + (begin + j) * 3 * s.d + column;
  GPU_UNROLL
  for (int c = 0; c < D / lanes; ++c) {
    const int at = lane + c * lanes;
    if (at >= s.head_dim) break;
    out[s.d + at] = from_float<T>(s.scale * dk[c]);
    out[2 * s.d + at] = from_float<T>(dv[c]);
  }
}

// dq_i = sum_j ds_ij k_j / sqrt(head_dim): a block has a tile of queries.
template <class T, int D, int R>
__global__ void __launch_bounds__(threads) attention_backward_queries_kernel(T* dqkv, Gradient<T> in, Sizes s) {
  using Own = Tile<D, R>;
  constexpr int lanes = Own::lanes;
  GPU_SHARED(typename Own::Rows, memory, 4);
  GPU_SHARED(typename Own::Pairs, pairs, 2);
  GPU_SHARED(typename Own::Values, rows, 2);
  auto &q = memory[0], &k = memory[1], &v = memory[2], &dout = memory[3];
  const Place place(s, R);
  const Index begin = place.sequence * s.T, column = place.head * s.head_dim;
  const T* own = in.qkv + begin * 3 * s.d + column;
  const int row = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;

  read_queries<T, D, R>(q, dout, rows[0], rows[1], in, s, place, place.first);
  float dq[D / lanes] = {};
  for (Index first = 0; first <= place.first; first += R) {
    __syncthreads();  // the tile before has been used
    Own::read(k, own + s.d, 3 * s.d, first, s.T, s.head_dim);
    Own::read(v, own + 2 * s.d, 3 * s.d, first, s.T, s.head_dim);
    __syncthreads();
    scores_gradient<D, R>(pairs[0], pairs[1], q, k, v, dout, rows[0], rows[1], s, place.first, first);
    __syncwarp();  // the threads of a row are of one warp
    GPU_UNROLL
    for (int c = 0; c < D / lanes; ++c)
      for (int j = 0; j < R; ++j) dq[c] += pairs[1][row][j] * k[j][lane + c * lanes];
  }
  const Index i = place.first + row;
  if (i >= s.T) return;
  GPU_UNROLL
  for (int c = 0; c < D / lanes; ++c) {
    const int at = lane + c * lanes;
    if (at < s.head_dim) dqkv[(begin + i) * 3 * s.d + column + at] = from_float<T>(s.scale * dq[c]);
  }
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
    cached_attention_kernel(T* att, const T* keys, const T* values, const T* qkv, Index position, Sizes s) {
  constexpr int warps = threads / 32, columns = max_head_dim / 32;  // columns of a lane
  using Head = float[max_head_dim];
  GPU_SHARED(Head, outs, warps);
  GPU_SHARED(float, highests, warps);
  GPU_SHARED(float, sums, warps);
  const Index n = blockIdx.x / s.H, first = blockIdx.x % s.H * s.head_dim;
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

// Calls launch<T, D, R>() for the dtype and the width that heads are padded to.
template <class Launch>
void for_heads(DType dtype, int head_dim, Launch launch) {
  if (dtype == DType::bf16)
    head_dim <= 64 ? launch.template operator()<bf16, 64, 32>() : launch.template operator()<bf16, 128, 16>();
  else
    head_dim <= 64 ? launch.template operator()<float, 64, 32>() : launch.template operator()<float, 128, 16>();
}

Sizes sizes_of(Index T, Index H, Index d) {
  const auto head_dim = static_cast<int>(d / H);
  return {T, H, d, head_dim, static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)))};
}

}  // namespace

void CudaBackend::do_attention(Tensor att, Tensor lse, Tensor qkv, Index context) {
  const Index N = att.dim(0);
  const Sizes s = sizes_of(context, lse.dim(1), att.dim(1));
  if (N == 0) return;
  for_heads(compute_, s.head_dim, [&]<class T, int D, int R>() {
    const Index blocks = N / context * s.H * ceil_div(context, R);
    check(gpu_launch(attention_kernel<T, D, R>, ceil_div(blocks, 1), threads, 0, stream_, pointer<T>(att),
                     pointer<float>(lse), pointer<T>(qkv), s),
          "attention");
  });
}

void CudaBackend::do_attention_backward(Tensor dqkv, Tensor datt, Tensor att, Tensor lse, Tensor qkv, Index context) {
  const Index N = att.dim(0);
  const Sizes s = sizes_of(context, lse.dim(1), att.dim(1));
  if (N == 0) return;
  for_heads(compute_, s.head_dim, [&]<class T, int D, int R>() {
    const Index blocks = N / context * s.H * ceil_div(context, R);
    const Gradient<T> in{pointer<T>(qkv), pointer<T>(att), pointer<T>(datt), pointer<float>(lse)};
    check(gpu_launch(attention_backward_keys_kernel<T, D, R>, ceil_div(blocks, 1), threads, 0, stream_,
                     pointer<T>(dqkv), in, s),
          "attention_backward");
    check(gpu_launch(attention_backward_queries_kernel<T, D, R>, ceil_div(blocks, 1), threads, 0, stream_,
                     pointer<T>(dqkv), in, s),
          "attention_backward");
  });
}

void CudaBackend::do_cached_attention(Tensor att, Tensor keys, Tensor values, Tensor qkv, Index position,
                                      Index head_dim) {
  const Index N = att.dim(0), d = att.dim(1);
  const Sizes s = sizes_of(keys.dim(0), d / head_dim, d);
  if (N == 0) return;
  for_elements(compute_, false, [&]<class T, int W>() {
    check(gpu_launch(append_kernel<T>, ceil_div(N, 1), threads, 0, stream_, pointer<T>(keys), pointer<T>(values),
                     pointer<T>(qkv), position, d),
          "cached_attention");
    check(gpu_launch(cached_attention_kernel<T>, ceil_div(N * s.H, 1), threads, 0, stream_, pointer<T>(att),
                     pointer<T>(keys), pointer<T>(values), pointer<T>(qkv), position, s),
          "cached_attention");
  });
}

}  // namespace rownorm::cuda
