// Embedding, RMSNorm, rotary positions and SwiGLU, each with its backward (PAPER 2). All are bound by memory.
#include "cuda/kernel.cuh"

namespace rownorm::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int ahead = 4;  // rows that a thread of embedding_backward reads at a time

// ---- embedding: a block a token ----

template <class T, int W>
__global__ void embedding_kernel(T* y, const std::int32_t* tokens, const T* w, Index d) {
  const Index n = blockIdx.x, token = tokens[n];
  for (Index i = static_cast<Index>(threadIdx.x) * W; i < d; i += static_cast<Index>(blockDim.x) * W) {
    float x[W];
    load(x, w + token * d + i);
    store(y + n * d + i, x);
  }
}

// Block b adds to the rows i of dw with i % blocks == b, so that each row is summed by one block, and each element by
// one thread, in order of n. `threads` tokens at a time are looked at; those of this block are listed, in order. (A
// round needs no third barrier: of_warp has been read before its second, the list before the first of the next round.)
template <class T, int W>
__global__ void embedding_backward_kernel(float* dw, const std::int32_t* tokens, const T* dy, Index N, Index d) {
  GPU_SHARED(Index, listed, threads);
  GPU_SHARED(int, of_warp, warps);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (Index begin = 0; begin < N; begin += threads) {
    const Index n = begin + threadIdx.x;
    const bool mine = n < N && static_cast<unsigned>(tokens[n]) % gridDim.x == blockIdx.x;
    const unsigned votes = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1)), count = 0;
    for (int other = 0; other < warps; ++other) {
      if (other < warp) before += of_warp[other];
      count += of_warp[other];
    }
    if (mine) listed[before] = n;
    __syncthreads();
    for (Index i = static_cast<Index>(threadIdx.x) * W; i < d; i += static_cast<Index>(threads) * W) {
      // A frequent token's rows come one after another: its sum stays in registers, and several rows are on their way.
      Index at = -1;  // of the sum in dw
      float sum[W] = {};
      for (int k = 0; k < count; k += ahead) {
        float x[ahead][W];
        GPU_UNROLL
        for (int a = 0; a < ahead; ++a)
          if (k + a < count) load(x[a], dy + listed[k + a] * d + i);
        GPU_UNROLL
        for (int a = 0; a < ahead; ++a) {
          if (k + a >= count) break;
          const Index to = tokens[listed[k + a]] * d + i;
          if (to != at) {
            if (at >= 0) store(dw + at, sum);
            load(sum, dw + to);
            at = to;
          }
          for (int j = 0; j < W; ++j) sum[j] += x[a][j];
        }
      }
      if (at >= 0) store(dw + at, sum);
    }
  }
}

// ---- RMSNorm: a warp a row ----

template <class T, int W>
__global__ void rmsnorm_kernel(T* y, float* rstd, const T* x, Index rows, Index d, float eps) {
  const Index row = static_cast<Index>(blockIdx.x) * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float sum = 0;
  for (Index i = lane * W; i < d; i += 32 * W) {
    float v[W];
    load(v, x + row * d + i);
    for (int j = 0; j < W; ++j) sum += v[j] * v[j];
  }
  const float r = 1 / sqrtf(warp_sum(sum) / static_cast<float>(d) + eps);
  if (lane == 0) rstd[row] = r;
  for (Index i = lane * W; i < d; i += 32 * W) {
    float v[W];
    load(v, x + row * d + i);
    for (int j = 0; j < W; ++j) v[j] *= r;
    store(y + row * d + i, v);
  }
}

// dx += rstd (dy - y mean(dy y))
template <class T, int W>
__global__ void rmsnorm_backward_kernel(T* dx, const T* dy, const T* y, const float* rstd, Index rows, Index d) {
  const Index row = static_cast<Index>(blockIdx.x) * warps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float sum = 0;
  for (Index i = lane * W; i < d; i += 32 * W) {
    float g[W], v[W];
    load(g, dy + row * d + i);
    load(v, y + row * d + i);
    for (int j = 0; j < W; ++j) sum += g[j] * v[j];
  }
  const float mean = warp_sum(sum) / static_cast<float>(d), r = rstd[row];
  for (Index i = lane * W; i < d; i += 32 * W) {
    float g[W], v[W], out[W];
    load(g, dy + row * d + i);
    load(v, y + row * d + i);
    load(out, dx + row * d + i);
    for (int j = 0; j < W; ++j) out[j] += r * (g[j] - v[j] * mean);
    store(dx + row * d + i, out);
  }
}

// ---- QK-norm and rotation: `group` lanes, a power of two, have a head of q or k of a token ----

__device__ float group_sum(float x, int group) {
  for (int step = group / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

struct HeadSizes {
  Index N, d, T, heads, head_dim;  // heads of q and k together
};

// The head that this thread's group has. Those past the last have none, but take part in the warp's sums.
struct HeadOfGroup {
  Index n, head, at;  // token, head, and where it begins in qkv(N,3d)
  bool some;
  int lane;

  __device__ HeadOfGroup(const HeadSizes& s, int group) {
    const Index index = static_cast<Index>(blockIdx.x) * (threads / group) + threadIdx.x / static_cast<unsigned>(group);
    n = index / s.heads;
    head = index % s.heads;
    at = n * 3 * s.d + head * s.head_dim;
    some = n < s.N;
    lane = static_cast<int>(threadIdx.x) % group;
  }
};

template <class T, int W>
__global__ void qk_norm_rope_kernel(T* qkv, float* rstd, const float* rope, HeadSizes s, float eps, int group) {
  const HeadOfGroup own(s, group);
  const Index half = s.head_dim / 2, end = own.some ? half : 0;
  T *first = qkv + own.at, *second = first + half;
  float sum = 0;
  for (Index i = own.lane * W; i < end; i += group * W) {
    float a[W], b[W];
    load(a, first + i);
    load(b, second + i);
    for (int j = 0; j < W; ++j) sum += a[j] * a[j] + b[j] * b[j];
  }
  const float r = 1 / sqrtf(group_sum(sum, group) / static_cast<float>(s.head_dim) + eps);
  if (own.some && own.lane == 0) rstd[own.n * s.heads + own.head] = r;
  const float *cos = rope + own.n % s.T * s.head_dim, *sin = cos + half;
  for (Index i = own.lane * W; i < end; i += group * W) {
    float a[W], b[W];
    load(a, first + i);
    load(b, second + i);
    for (int j = 0; j < W; ++j) {
      const float x = a[j] * r, y = b[j] * r;
      a[j] = x * cos[i + j] - y * sin[i + j];
      b[j] = y * cos[i + j] + x * sin[i + j];
    }
    store(first + i, a);
    store(second + i, b);
  }
}

// dx = R^T [rstd (dz - z mean(dz z))], z the rotated head
template <class T, int W>
__global__ void qk_norm_rope_backward_kernel(T* dqkv, const T* qkv, const float* rstd, const float* rope, HeadSizes s,
                                             int group) {
  const HeadOfGroup own(s, group);
  const Index half = s.head_dim / 2, end = own.some ? half : 0;
  T *first = dqkv + own.at, *second = first + half;
  const T *z_first = qkv + own.at, *z_second = z_first + half;
  float sum = 0;
  for (Index i = own.lane * W; i < end; i += group * W) {
    float a[W], b[W], za[W], zb[W];
    load(a, first + i);
    load(b, second + i);
    load(za, z_first + i);
    load(zb, z_second + i);
    for (int j = 0; j < W; ++j) sum += a[j] * za[j] + b[j] * zb[j];
  }
  const float mean = group_sum(sum, group) / static_cast<float>(s.head_dim);
  const float r = own.some ? rstd[own.n * s.heads + own.head] : 0;
  const float *cos = rope + own.n % s.T * s.head_dim, *sin = cos + half;
  for (Index i = own.lane * W; i < end; i += group * W) {
    float a[W], b[W], za[W], zb[W];
    load(a, first + i);
    load(b, second + i);
    load(za, z_first + i);
    load(zb, z_second + i);
    for (int j = 0; j < W; ++j) {
      const float x = r * (a[j] - za[j] * mean), y = r * (b[j] - zb[j] * mean);
      a[j] = x * cos[i + j] + y * sin[i + j];
      b[j] = y * cos[i + j] - x * sin[i + j];
    }
    store(first + i, a);
    store(second + i, b);
  }
}

// ---- SwiGLU: y = silu(gate) up, silu(x) = x sigmoid(x); a block a row ----

template <class T, int W>
__global__ void swiglu_kernel(T* y, const T* gate_up, Index F) {
  const Index n = blockIdx.x;
  const T *gate = gate_up + 2 * n * F, *up = gate + F;
  for (Index i = static_cast<Index>(threadIdx.x) * W; i < F; i += static_cast<Index>(threads) * W) {
    float g[W], u[W];
    load(g, gate + i);
    load(u, up + i);
    for (int j = 0; j < W; ++j) g[j] = g[j] / (1 + expf(-g[j])) * u[j];
    store(y + n * F + i, g);
  }
}

// silu'(x) = sigmoid(x) (1 + x sigmoid(-x)). Both sigmoids without cancellation from one exponential: with
// e = exp(-|x|) they are 1 / (1 + e) and e / (1 + e), the larger for the positive argument.
template <class T, int W>
__global__ void swiglu_backward_kernel(T* dgate_up, const T* dy, const T* gate_up, Index F) {
  const Index n = blockIdx.x;
  const T *gate = gate_up + 2 * n * F, *up = gate + F;
  T *dgate = dgate_up + 2 * n * F, *dup = dgate + F;
  for (Index i = static_cast<Index>(threadIdx.x) * W; i < F; i += static_cast<Index>(threads) * W) {
    float g[W], u[W], d[W];
    load(g, gate + i);
    load(u, up + i);
    load(d, dy + n * F + i);
    for (int j = 0; j < W; ++j) {
      const float x = g[j], e = expf(-fabsf(x)), larger = 1 / (1 + e), smaller = e * larger;
      const float sigmoid = x < 0 ? smaller : larger, opposite = x < 0 ? larger : smaller;
      g[j] = d[j] * u[j] * sigmoid * (1 + x * opposite);
      u[j] = d[j] * (x * sigmoid);
    }
    store(dgate + i, g);
    store(dup + i, u);
  }
}

}  // namespace

void CudaBackend::do_embedding(Tensor y, Tensor tokens, Tensor w) {
  const Index N = y.dim(0), d = y.dim(1);
  if (N == 0) return;
  for_elements(compute_, fits16(d, compute_, {y.data, w.data}), [&]<class T, int W>() {
    check(gpu_launch(embedding_kernel<T, W>, ceil_div(N, 1), 128, 0, stream_, pointer<T>(y),
                     pointer<std::int32_t>(tokens), pointer<T>(w), d),
          "embedding");
  });
}

void CudaBackend::do_embedding_backward(Tensor dw, Tensor tokens, Tensor dy) {
  const Index N = dy.dim(0), d = dy.dim(1);
  if (N == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<Index>(dw.dim(0), 1024));
  for_elements(compute_, fits16(d, compute_, {dw.data, dy.data}), [&]<class T, int W>() {
    check(gpu_launch(embedding_backward_kernel<T, W>, blocks, threads, 0, stream_, pointer<float>(dw),
                     pointer<std::int32_t>(tokens), pointer<T>(dy), N, d),
          "embedding_backward");
  });
}

void CudaBackend::do_rmsnorm(Tensor y, Tensor rstd, Tensor x, double eps) {
  const Index N = x.dim(0), d = x.dim(1);
  if (N == 0) return;
  for_elements(compute_, fits16(d, compute_, {y.data, x.data}), [&]<class T, int W>() {
    check(gpu_launch(rmsnorm_kernel<T, W>, ceil_div(N, warps), threads, 0, stream_, pointer<T>(y), pointer<float>(rstd),
                     pointer<T>(x), N, d, static_cast<float>(eps)),
          "rmsnorm");
  });
}

void CudaBackend::do_rmsnorm_backward(Tensor dx, Tensor dy, Tensor y, Tensor rstd) {
  const Index N = y.dim(0), d = y.dim(1);
  if (N == 0) return;
  for_elements(compute_, fits16(d, compute_, {dx.data, dy.data, y.data}), [&]<class T, int W>() {
    check(gpu_launch(rmsnorm_backward_kernel<T, W>, ceil_div(N, warps), threads, 0, stream_, pointer<T>(dx),
                     pointer<T>(dy), pointer<T>(y), pointer<float>(rstd), N, d),
          "rmsnorm_backward");
  });
}

namespace {

HeadSizes head_sizes(Tensor qkv, Tensor rstd, Tensor rope) {
  return {qkv.dim(0), qkv.dim(1) / 3, rope.dim(0), rstd.dim(1), rope.dim(1)};
}

// Lanes for `count` pieces of half a head: enough for all at once, or a warp.
int group_of(Index count) {
  int lanes = 1;
  while (lanes < 32 && lanes < count) lanes *= 2;
  return lanes;
}

}  // namespace

void CudaBackend::do_qk_norm_rope(Tensor qkv, Tensor rstd, Tensor rope, double eps) {
  const HeadSizes s = head_sizes(qkv, rstd, rope);
  if (s.N == 0) return;
  for_elements(compute_, fits16(s.head_dim / 2, compute_, {qkv.data}), [&]<class T, int W>() {
    const int group = group_of(s.head_dim / 2 / W);
    check(gpu_launch(qk_norm_rope_kernel<T, W>, ceil_div(s.N * s.heads, threads / group), threads, 0, stream_,
                     pointer<T>(qkv), pointer<float>(rstd), pointer<float>(rope), s, static_cast<float>(eps), group),
          "qk_norm_rope");
  });
}

void CudaBackend::do_qk_norm_rope_backward(Tensor dqkv, Tensor qkv, Tensor rstd, Tensor rope) {
  const HeadSizes s = head_sizes(qkv, rstd, rope);
  if (s.N == 0) return;
  for_elements(compute_, fits16(s.head_dim / 2, compute_, {dqkv.data, qkv.data}), [&]<class T, int W>() {
    const int group = group_of(s.head_dim / 2 / W);
    check(gpu_launch(qk_norm_rope_backward_kernel<T, W>, ceil_div(s.N * s.heads, threads / group), threads, 0, stream_,
                     pointer<T>(dqkv), pointer<T>(qkv), pointer<float>(rstd), pointer<float>(rope), s, group),
          "qk_norm_rope_backward");
  });
}

void CudaBackend::do_swiglu(Tensor y, Tensor gate_up) {
  const Index N = y.dim(0), F = y.dim(1);
  if (N == 0) return;
  for_elements(compute_, fits16(F, compute_, {y.data, gate_up.data}), [&]<class T, int W>() {
    check(gpu_launch(swiglu_kernel<T, W>, ceil_div(N, 1), threads, 0, stream_, pointer<T>(y), pointer<T>(gate_up), F),
          "swiglu");
  });
}

void CudaBackend::do_swiglu_backward(Tensor dgate_up, Tensor dy, Tensor gate_up) {
  const Index N = dy.dim(0), F = dy.dim(1);
  if (N == 0) return;
  for_elements(compute_, fits16(F, compute_, {dgate_up.data, dy.data, gate_up.data}), [&]<class T, int W>() {
    check(gpu_launch(swiglu_backward_kernel<T, W>, ceil_div(N, 1), threads, 0, stream_, pointer<T>(dgate_up),
                     pointer<T>(dy), pointer<T>(gate_up), F),
          "swiglu_backward");
  });
}

}  // namespace rownorm::cuda
