// D(S) = max_{i<j} ||s_i - s_j||_2 (PAPER 1, 5): all pairs are screened by tensor cores, and every pair that the
// screen's rounding error leaves in doubt is evaluated in f64 on the stored values. What the screen drops cannot attain
// the maximum, so the result is that of the full search in f64.
//
// The screen. Let y_i = t (s_i - c), c the mean row, t the power of two that brings the largest radius max ||y_i|| into
// [1, 2); neither changes which pair is the largest. The largest distance found so far, times t, is L.
//   (a) x_i is y_i rounded to tf32, E the largest ||x_i - y_i||, which is computed. Distances of x and y differ by 2 E
//       at most, so a pair with ||y_p - y_q|| >= L has ||x_p - x_q||^2 / 2 >= max(0, L - 2 E)^2 / 2.
//   (b) ||x_p - x_q||^2 / 2 = h_p + (h_q - x_p . x_q), h = ||x||^2 / 2. Let R be the largest ||x||. Tensor cores
//       multiply tf32 numbers exactly; they add n products to a sum with all of them shifted to the largest and cut off
//       at 24 bits or more (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ CS
//       2021), an error of at most (n + 1) 2^-23 times the largest, which is at most R^2: for n >= 4 and d products in
//       all less than d u R^2 with u = 2^-22. Sums in f32 without tensor cores are within that too. Rounding h_q <=
//       R^2 / 2 to f32 and the subtraction in f32 add less than u R^2.
// A pair is therefore a candidate unless fl(x_p . x_q) - fl(h_q) > h_p - max(0, L - 2 E)^2 / 2 + (d + 8) u R^2, the
// right side with its own f64 rounding added and rounded up to f32. Subnormal roundings, below d 2^-120 in all, are
// added too; those of (a) are in E.
#include <climits>
#include <cmath>

#include "cuda/kernel.cuh"

namespace rownorm::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;

struct Pair {
  double square = 0;
  std::int32_t i = 0, j = 0;

  __device__ bool precedes(const Pair& other) const {
    if (square != other.square) return square > other.square;
    return i != other.i ? i < other.i : j < other.j;
  }
  __device__ void take(const Pair& other) {
    if (other.square > 0 && other.precedes(*this)) *this = other;
  }
};

struct State {
  std::int32_t bad;   // the first row with an element that is not finite; INT_MAX: none
  std::int32_t from;  // the row that the walk is at
  double scale;       // t
  double radius;      // R
  double error;       // E
  Pair best;
};

static_assert(sizeof(Pair) == DiameterScratch::pair_bytes && sizeof(State) == DiameterScratch::state_bytes);

struct Rows {
  const float* data;
  Index count, width;

  // The pair (i, j) with its distance, by a warp; every lane's.
  __device__ Pair compare(Index i, Index j) const {
    double sum = 0;
    for (Index k = threadIdx.x % 32; k < width; k += 32) {
      const double difference = static_cast<double>(data[i * width + k]) - static_cast<double>(data[j * width + k]);
      sum += difference * difference;
    }
    const auto a = static_cast<std::int32_t>(i), b = static_cast<std::int32_t>(j);
    return {warp_sum(sum), a < b ? a : b, a < b ? b : a};
  }
};

// The best of a block's warps, of which each lane has its warp's; thread 0 has it.
__device__ Pair block_best(const Pair& own) {
  GPU_SHARED(double, squares, warps);
  GPU_SHARED(int2, pairs, warps);
  if (threadIdx.x % 32 == 0) {
    squares[threadIdx.x / 32] = own.square;
    pairs[threadIdx.x / 32] = make_int2(own.i, own.j);
  }
  __syncthreads();
  Pair best = own;
  if (threadIdx.x == 0)
    for (int warp = 1; warp < warps; ++warp) best.take({squares[warp], pairs[warp].x, pairs[warp].y});
  return best;
}

__global__ void begin_kernel(State* state) {
  *state = State{};
  state->bad = INT_MAX;
}

// A warp a row: its square distance from the mean, and whether it is finite.
__global__ void radius_kernel(State* state, double* square, Rows s, const double* sum) {
  const Index row = static_cast<Index>(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= s.count) return;
  double total = 0;
  bool finite = true;
  for (Index k = threadIdx.x % 32; k < s.width; k += 32) {
    const float x = s.data[row * s.width + k];
    finite = finite && std::isfinite(x);
    const double y = static_cast<double>(x) - sum[k] / static_cast<double>(s.count);
    total += y * y;
  }
  total = warp_sum(total);
  finite = __all_sync(0xffffffffu, finite) != 0;
  if (threadIdx.x % 32 != 0) return;
  square[row] = total;
  if (!finite) atomicMin(&state->bad, static_cast<int>(row));
}

// One block: the scale, and the row farthest from the mean, at which the walk begins.
__global__ void find_scale_kernel(State* state, const double* square, Index count) {
  GPU_SHARED(double, squares, threads);
  GPU_SHARED(int, rows, threads);
  double most = -1;
  int row = 0;
  for (Index i = threadIdx.x; i < count; i += threads)
    if (square[i] > most) {
      most = square[i];
      row = static_cast<int>(i);
    }
  squares[threadIdx.x] = most;
  rows[threadIdx.x] = row;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 1; other < threads; ++other)
    if (squares[other] > most || (squares[other] == most && rows[other] < row)) {
      most = squares[other];
      row = rows[other];
    }
  const double radius = most > 0 ? sqrt(most) : 1;
  state->scale = state->bad == INT_MAX ? ldexp(1.0, -ilogb(radius)) : 1;
  state->from = row;
}

// The nearest number of 11 significant bits, ties away from zero.
__device__ inline float to_tf32(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & ~0x1fffu); }

// A warp a row: x = t (row - mean) in tf32, h = ||x||^2 / 2 and the square of what rounding left out.
__global__ void centre_kernel(float* centred, double* half_square, double* left_out, const State* state, Rows s,
                              const double* sum) {
  const Index row = static_cast<Index>(blockIdx.x) * warps + threadIdx.x / 32;
  if (row >= s.count) return;
  double total = 0, errors = 0;
  for (Index k = threadIdx.x % 32; k < s.width; k += 32) {
    const double mean = sum[k] / static_cast<double>(s.count);
    const double y = state->scale * (static_cast<double>(s.data[row * s.width + k]) - mean);
    const float x = to_tf32(static_cast<float>(y));
    centred[row * s.width + k] = x;
    total += static_cast<double>(x) * static_cast<double>(x);
    errors += (static_cast<double>(x) - y) * (static_cast<double>(x) - y);
  }
  total = warp_sum(total);
  errors = warp_sum(errors);
  if (threadIdx.x % 32 != 0) return;
  half_square[row] = total / 2;
  left_out[row] = errors;
}

// One block: R and E, a little larger than what was computed, for the rounding of that.
__global__ void bounds_kernel(State* state, const double* half_square, const double* left_out, Index count) {
  GPU_SHARED(double2, most, threads);
  double half = 0, error = 0;
  for (Index i = threadIdx.x; i < count; i += threads) {
    half = fmax(half, half_square[i]);
    error = fmax(error, left_out[i]);
  }
  most[threadIdx.x] = make_double2(half, error);
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 1; other < threads; ++other) {
    half = fmax(half, most[other].x);
    error = fmax(error, most[other].y);
  }
  state->radius = sqrt(2 * half) * (1 + 1e-6);
  state->error = sqrt(error) * (1 + 1e-6);
}

// The farthest from the row that the walk is at, of the rows that a block's warps take.
__global__ void walk_kernel(Pair* found, const State* state, Rows s) {
  Pair best;
  for (Index row = static_cast<Index>(blockIdx.x) * warps + threadIdx.x / 32; row < s.count;
       row += static_cast<Index>(gridDim.x) * warps)
    best.take(s.compare(state->from, row));
  best = block_best(best);
  if (threadIdx.x == 0) found[blockIdx.x] = best;
}

// One warp: what blocks found joins what is known; the walk goes on from the other end of the best pair.
__global__ void collect_kernel(State* state, const Pair* found, int count) {
  Pair best = state->best;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) best.take(found[i]);
  for (int step = 16; step > 0; step /= 2)
    best.take({__shfl_xor_sync(0xffffffffu, best.square, step), __shfl_xor_sync(0xffffffffu, best.i, step),
               __shfl_xor_sync(0xffffffffu, best.j, step)});
  if (threadIdx.x != 0) return;
  state->from = state->from == best.i ? best.j : best.i;
  state->best = best;
}

// A block a row p of products(rows, stride), row first + p of all, against the columns q > p, which are rows first + q.
__global__ void screen_kernel(Pair* found, const float* products, Index stride, const double* half_square,
                              const State* state, Rows s, Index first) {
  constexpr double u = 0x1p-22;
  const double k = static_cast<double>(s.width) + 8, underflow = k * 0x1p-120;
  const double rounding = k * 0x1p-52;  // relative, of any sum of d squares in f64
  const Index p = blockIdx.x;
  const double h_p = half_square[first + p], radius = state->radius;
  Pair best = state->best;
  const auto limit = [&] {
    const double lower = state->scale * sqrt(best.square) * (1 - 2 * rounding);
    const double below = fmax(0.0, lower - 2 * state->error);
    return nextafterf(static_cast<float>(h_p - below * below / 2 + (k * u + rounding) * radius * radius + underflow),
                      INFINITY);
  };
  float highest = limit();
  // Without a best pair all rows are equal, as the walk has seen.
  const Index end = best.square > 0 && state->bad == INT_MAX ? s.count - first : 0;
  for (Index begin = p + 1 + static_cast<Index>(threadIdx.x / 32) * 32; begin < end; begin += threads) {
    const Index q = begin + threadIdx.x % 32;
    const bool candidate =
        q < end && !(products[p * stride + q] - static_cast<float>(half_square[first + q]) > highest);
    const unsigned candidates = __ballot_sync(0xffffffffu, candidate);
    for (unsigned left = candidates; left != 0; left &= left - 1)
      best.take(s.compare(first + p, first + begin + __ffs(static_cast<int>(left)) - 1));
    if (candidates != 0) highest = limit();
  }
  best = block_best(best);
  if (threadIdx.x == 0) found[p] = best;
}

__global__ void answer_kernel(double* distance, std::int32_t* pair, const State* state) {
  const bool bad = state->bad != INT_MAX;
  *distance = bad ? NAN : sqrt(state->best.square);
  pair[0] = bad ? state->bad : state->best.i;
  pair[1] = bad ? state->bad : state->best.j;
}

}  // namespace

void CudaBackend::do_row_diameter(Tensor distance, Tensor pair, Tensor s, Index share, Index shares) {
  const Index V = s.dim(0), d = s.dim(1);
  Arena arena = scratch();
  const DiameterScratch memory(arena, V, d);
  const Rows rows{pointer<float>(s), V, d};
  auto* state = pointer<State>(memory.state);
  auto* found = pointer<Pair>(memory.found);
  const auto launch = [&](auto* kernel, unsigned blocks, unsigned block_threads, auto... arguments) {
    check(gpu_launch(kernel, blocks, block_threads, 0, stream_, arguments...), "row_diameter");
  };
  const auto collect = [&](Index count) { launch(collect_kernel, 1, 32, state, found, static_cast<int>(count)); };

  launch(begin_kernel, 1, 1, state);
  if (V > 0) {
    const unsigned blocks = ceil_div(V, warps);
    do_column_sum(memory.sum, s);
    launch(radius_kernel, blocks, threads, state, pointer<double>(memory.square), rows, pointer<double>(memory.sum));
    launch(find_scale_kernel, 1, threads, state, pointer<double>(memory.square), V);
    // From here on `square` holds what rounding left out of each row.
    launch(centre_kernel, blocks, threads, pointer<float>(memory.centred), pointer<double>(memory.half_square),
           pointer<double>(memory.square), state, rows, pointer<double>(memory.sum));
    launch(bounds_kernel, 1, threads, state, pointer<double>(memory.half_square), pointer<double>(memory.square), V);

    // A good lower bound first: from the row farthest from the mean to the row farthest from it, and so on.
    const auto walkers = std::min<unsigned>(blocks, DiameterScratch::block);
    for (int step = 0; step < 8; ++step) {
      launch(walk_kernel, walkers, threads, found, state, rows);
      collect(walkers);
    }

    const Index stride = memory.products.dim(1);
    for (Index begin = 0, part = 0; begin < V; begin += DiameterScratch::block, ++part) {
      if (part % shares != share) continue;
      const Index count = std::min(DiameterScratch::block, V - begin);
      const Operand x{memory.centred.rows(begin, V).data, DType::f32, d},
          transposed{memory.centred.rows(begin, V).data, DType::f32, d, true};
      products_->multiply(count, V - begin, d, 1, x, transposed, 0, {memory.products.data, DType::f32, stride},
                          Multiply::tf32);
      launch(screen_kernel, static_cast<unsigned>(count), threads, found, pointer<float>(memory.products), stride,
             pointer<double>(memory.half_square), state, rows, begin);
      collect(count);
    }
  }
  launch(answer_kernel, 1, 1, pointer<double>(distance), pointer<std::int32_t>(pair), state);
}

}  // namespace rownorm::cuda
