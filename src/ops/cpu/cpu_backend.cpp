// Construction, memory and transport of the CPU backend.
#include "ops/cpu/cpu_backend.h"

#include <cblas.h>
#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "base/bf16.h"
#include "base/error.h"
#include "ops/host_memory.h"
#include "ops/open.h"

namespace rownorm {

std::unique_ptr<Backend> make_cpu_backend(int processes) { return std::make_unique<cpu::CpuBackend>(processes); }

namespace cpu {
namespace {

// Calls use(pointer to elements) with the type that holds a float dtype; bf16 is told apart by being an integer.
template <class Use>
void with_elements(Tensor t, Use use) {
  if (t.dtype == DType::f64)
    use(static_cast<double*>(t.data));
  else if (t.dtype == DType::f32)
    use(static_cast<float*>(t.data));
  else
    use(static_cast<std::uint16_t*>(t.data));
}

void convert(double& to, double from) { to = from; }
void convert(double& to, float from) { to = from; }
void convert(double& to, std::uint16_t from) { to = from_bf16(from); }
void convert(float& to, double from) { to = static_cast<float>(from); }
void convert(float& to, float from) { to = from; }
void convert(float& to, std::uint16_t from) { to = from_bf16(from); }
void convert(std::uint16_t& to, double from) { to = to_bf16(static_cast<float>(from)); }
void convert(std::uint16_t& to, float from) { to = to_bf16(from); }
void convert(std::uint16_t& to, std::uint16_t from) { to = from; }

}  // namespace

CpuBackend::CpuBackend(int processes) : processes_(processes), threads_(omp_get_max_threads()) {
  // Only the OpenMP build of OpenBLAS sees by itself that it is called from a parallel region.
  if (openblas_get_parallel() == OPENBLAS_THREAD) openblas_set_num_threads(1);
}

std::string CpuBackend::description() const {
  return fmt::format("cpu: {} thread{}, {}, kernels for {}", threads_, threads_ == 1 ? "" : "s", openblas_get_config(),
                     openblas_get_corename());
}

Memory CpuBackend::allocate(std::int64_t bytes) { return allocate_host_memory("cpu", bytes, processes_); }

std::int64_t CpuBackend::workspace_bytes(const WorkspaceSizes& sizes) const {
  Arena attention, loss, range, diameter;
  AttentionScratch(attention, threads_, sizes.context);
  LogitsScratch(loss, sizes.tokens, sizes.vocab);
  LogitsScratch(range, sizes.panel, sizes.vocab);
  if (sizes.diameter) DiameterScratch(diameter, threads_, sizes.vocab, sizes.width);
  std::int64_t most = std::max({attention.bytes(), loss.bytes(), range.bytes(), diameter.bytes()});
  for (const NewtonSchulzSizes& s : sizes.newton_schulz) {
    Arena newton_schulz;
    NewtonSchulzScratch(newton_schulz, threads_, s.matrices, s.short_side, s.long_side);
    most = std::max(most, newton_schulz.bytes());
  }
  return most;
}

void CpuBackend::set_workspace(Tensor workspace, const WorkspaceSizes& sizes) {
  if (workspace.dtype != DType::u8 || workspace.bytes() < workspace_bytes(sizes))
    throw std::logic_error(
        fmt::format("[workspace] {}, expected at least {} u8", workspace.str(), workspace_bytes(sizes)));
  workspace_ = workspace;
}

void CpuBackend::do_upload(Tensor to, const void* host) {
  if (to.bytes() > 0) std::memcpy(to.data, host, static_cast<std::size_t>(to.bytes()));
}

void CpuBackend::do_download(void* host, Tensor from) {
  if (from.bytes() > 0) std::memcpy(host, from.data, static_cast<std::size_t>(from.bytes()));
}

void CpuBackend::do_copy(Tensor to, Tensor from) {
  if (to.dtype == from.dtype) return do_upload(to, from.data);
  with_elements(to, [&](auto* out) {
    with_elements(from, [&](const auto* in) {
      const Index size = to.size();
#pragma omp parallel for schedule(static) num_threads(threads_)
      for (Index i = 0; i < size; ++i) convert(out[i], in[i]);
    });
  });
}

void CpuBackend::do_fill(Tensor t, double value) {
  if (t.dtype == DType::i32) {
    std::fill_n(t.as<std::int32_t>(), t.size(), static_cast<std::int32_t>(value));
    return;
  }
  with_elements(t, [&](auto* out) {
    const Index size = t.size();
#pragma omp parallel for schedule(static) num_threads(threads_)
    for (Index i = 0; i < size; ++i) convert(out[i], value);
  });
}

// ---- matrix products ----

void gemm(Index m, Index n, Index k, float alpha, Operand a, Operand b, float beta, float* c, Index c_stride) {
  const auto transpose = [](const Operand& x) { return x.transposed ? CblasTrans : CblasNoTrans; };
  cblas_sgemm(CblasRowMajor, transpose(a), transpose(b), static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
              alpha, a.data, static_cast<int>(a.stride), b.data, static_cast<int>(b.stride), beta, c,
              static_cast<int>(c_stride));
}

void tiled_gemm(int threads, Index m, Index n, Index k, float alpha, Operand a, Operand b, float beta, float* c,
                Index c_stride) {
  // Tiles whose sides depend on m and n alone: large ones repack less, enough of them keep all threads busy. The longer
  // side is halved, so that as few operands as possible are packed for as many tiles.
  const auto count = [](Index size, Index side) { return (size + side - 1) / side; };
  Index rows = 256, columns = 256;
  while (count(m, rows) * count(n, columns) < 6 && std::max(std::min(rows, m), std::min(columns, n)) > 64)
    (std::min(rows, m) > std::min(columns, n) ? rows : columns) /= 2;
  const Index across = count(n, columns), tiles = count(m, rows) * across;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (Index tile = 0; tile < tiles; ++tile) {
    const Index row = tile / across * rows, column = tile % across * columns;
    const Operand a_tile{a.data + row * (a.transposed ? 1 : a.stride), a.stride, a.transposed};
    const Operand b_tile{b.data + column * (b.transposed ? b.stride : 1), b.stride, b.transposed};
    gemm(std::min(rows, m - row), std::min(columns, n - column), k, alpha, a_tile, b_tile, beta,
         c + row * c_stride + column, c_stride);
  }
}

// Four rows at a time, so that x is read a quarter as often; element j of a row is added to lane j % 16.
void matvec(Index m, Index k, float alpha, const float* w, Index stride, const float* x, float beta, float* y) {
  constexpr Index width = 16, rows = 4;
  using Lanes [[gnu::vector_size(width * sizeof(float))]] = float;
  // By reference: how a vector is returned depends on the CPU that is compiled for, of which g++ warns.
  const auto load = [](Lanes& lanes, const float* from, Index n) {
    std::memcpy(&lanes, from, static_cast<std::size_t>(n) * sizeof(float));
  };
  for (Index begin = 0; begin < m; begin += rows) {
    const float* row[rows];  // past the last row, the last row again
    for (Index i = 0; i < rows; ++i) row[i] = w + std::min(begin + i, m - 1) * stride;
    Lanes sums[rows] = {};
    Index j = 0;
    Lanes of_x{}, of_row{};
    const auto add = [&](Index n) {
      load(of_x, x + j, n);
      for (Index i = 0; i < rows; ++i) {
        load(of_row, row[i] + j, n);
        sums[i] += of_row * of_x;
      }
    };
    for (; j + width <= k; j += width) add(width);
    if (j < k) {
      of_x = of_row = Lanes{};
      add(k - j);
    }
    for (Index i = 0; i < std::min(rows, m - begin); ++i) {
      float lanes[width];
      std::memcpy(lanes, &sums[i], sizeof lanes);
      for (Index half = width / 2; half > 0; half /= 2)
        for (Index lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      float& out = y[begin + i];
      out = alpha * lanes[0] + (beta == 0 ? 0 : beta * out);
    }
  }
}

}  // namespace cpu
}  // namespace rownorm
