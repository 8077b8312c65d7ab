// The quintic Newton-Schulz iteration of Muon (PAPER 4), on all matrices of a shape at once: in f32, with products in
// f32 or tf32, or in bf16 with sums in f32.
#include "cuda/kernel.cuh"

namespace rownorm::cuda {
namespace {

constexpr int threads = 256;

// x / (sqrt(square) + eps); a zero matrix stays zero
template <class T>
__global__ void normalize_kernel(T* to, const float* from, const double* square, double eps, Index size) {
  const double norm = sqrt(*square), normalizer = norm == 0 ? 0 : 1 / (norm + eps);
  GPU_LOOP(i, size) to[i] = from_float<T>(static_cast<float>(static_cast<double>(from[i]) * normalizer));
}

}  // namespace

// For m <= n: A = x x^T, x = a x + (b A + c A A) x. For m > n the same on the transpose: A = x^T x,
// x = a x + x (b A + c A A).
void CudaBackend::do_newton_schulz(std::span<const Tensor> matrices, int steps, double eps,
                                   NewtonSchulzPrecision precision) {
  const auto count = static_cast<Index>(matrices.size());
  const Index m = matrices[0].dim(0), n = matrices[0].dim(1), side = std::min(m, n), size = m * n;
  if (size == 0) return;
  const bool tall = m > n;
  const Multiply how = precision == NewtonSchulzPrecision::tf32 ? Multiply::tf32 : Multiply::f32;
  Arena arena = scratch();
  const NewtonSchulzScratch memory(arena, {count, side, std::max(m, n), precision});
  const DType dtype = memory.x.dtype;
  const auto matrix_of = [&](Tensor all, Index i) { return all.rows(i, i + 1).reshape({m, n}); };

  do_fill(memory.squares, 0);
  for (Index i = 0; i < count; ++i) {
    const Tensor matrix = matrices[static_cast<std::size_t>(i)], square = memory.squares.rows(i, i + 1);
    add_squares(square, matrix, memory.sums);
    for_elements(dtype, false, [&]<class T, int>() {
      check(gpu_launch(normalize_kernel<T>, loop_blocks(size, threads), threads, 0, stream_,
                       pointer<T>(matrix_of(memory.x, i)), pointer<float>(matrix), pointer<double>(square), eps, size),
            "newton_schulz");
    });
  }

  const auto square = [&](Tensor t) { return Operand{t.data, dtype, side, false, side * side}; };
  const auto into = [&](Tensor t, Index stride, Index step) { return Result{t.data, dtype, stride, step}; };
  Tensor x = memory.x, next = memory.next;
  for (int step = 0; step < steps; ++step) {
    const Operand own{x.data, dtype, n, false, size}, flipped{x.data, dtype, n, true, size};
    products_->multiply(side, side, tall ? m : n, 1, tall ? flipped : own, tall ? own : flipped, 0,
                        into(memory.gram, side, side * side), how, nullptr, count);
    products_->multiply(side, side, side, newton_schulz_c, square(memory.gram), square(memory.gram), newton_schulz_b,
                        into(memory.polynomial, side, side * side), how, memory.gram.data, count);
    if (tall)
      products_->multiply(m, n, n, 1, own, square(memory.polynomial), newton_schulz_a, into(next, n, size), how, x.data,
                          count);
    else
      products_->multiply(m, n, m, 1, square(memory.polynomial), own, newton_schulz_a, into(next, n, size), how, x.data,
                          count);
    std::swap(x, next);
  }
  for (Index i = 0; i < count; ++i) do_copy(matrices[static_cast<std::size_t>(i)], matrix_of(x, i));
}

}  // namespace rownorm::cuda
