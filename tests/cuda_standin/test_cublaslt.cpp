// Products of the stand-in's cuBLASLt against the plain sum in double, as the cuBLAS documentation defines them.
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support.h"

namespace rownorm {
namespace {

using namespace standin_test;

void ok(cublasStatus_t status) { ASSERT_EQ(status, CUBLAS_STATUS_SUCCESS); }

struct Shape {
  cudaDataType_t in, out;
  cublasComputeType_t compute;
  bool transpose_a, transpose_b, by_row;
  int batch;
  float beta;
};

// x with 1 + 8 + `bits` bits, to nearest even.
double rounded(float x, int bits) {
  const int drop = 23 - bits;
  return std::ldexp(std::nearbyint(std::ldexp(x, 23 - std::ilogb(x) - drop)), std::ilogb(x) - 23 + drop);
}

void test(const Shape& s) {
  const std::size_t m = 5, n = 7, k = 11, batch = static_cast<std::size_t>(s.batch);
  auto random = [state = std::uint32_t{12345}]() mutable {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 8388608.0f - 1.0f + 0.01f / 3.0f;
  };
  // A matrix as stored: rows x columns, leading dimension two more than it must be.
  struct Matrix {
    std::size_t rows, columns, ld, stride;
    bool by_row;
    std::size_t at(std::size_t b, std::size_t i, std::size_t j) const {
      return b * stride + (by_row ? i * ld + j : j * ld + i);
    }
  };
  const auto matrix = [&](std::size_t rows, std::size_t columns) {
    const std::size_t ld = (s.by_row ? columns : rows) + 2;
    return Matrix{rows, columns, ld, ld * (s.by_row ? rows : columns) + 3, s.by_row};
  };
  const Matrix a = s.transpose_a ? matrix(k, m) : matrix(m, k), b = s.transpose_b ? matrix(n, k) : matrix(k, n);
  const Matrix d = matrix(m, n);
  const auto fill = [&](const Matrix& x) {
    std::vector<float> v(x.stride * batch);
    for (float& e : v) e = random();
    return v;
  };
  std::vector<float> A = fill(a), B = fill(b), D = fill(d);
  const int bits = s.compute == CUBLAS_COMPUTE_32F_FAST_16BF || s.in == CUDA_R_16BF ? 7
                   : s.compute == CUBLAS_COMPUTE_32F_FAST_TF32                      ? 10
                                                                                    : 23;

  const auto upload = [](const std::vector<float>& v, cudaDataType_t type) {
    std::vector<std::uint16_t> bytes;
    for (const float x : v) {
      if (type == CUDA_R_16BF) {
        bytes.push_back(std::bit_cast<std::uint16_t>(__nv_bfloat16(x)));
      } else {
        bytes.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x)));
        bytes.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16));
      }
    }
    return bytes;
  };
  const Device<std::uint16_t> da(upload(A, s.in)), db(upload(B, s.in)), dd(upload(D, s.out)), workspace(2048);

  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t la = nullptr, lb = nullptr, ld = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  ok(cublasLtCreate(&handle));
  ok(cublasLtMatmulDescCreate(&product, s.compute, CUDA_R_32F));
  const std::int32_t ta = s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, tb = s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  ok(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta));
  ok(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb));
  const auto layout = [&](cublasLtMatrixLayout_t* l, const Matrix& x, cudaDataType_t type) {
    ok(cublasLtMatrixLayoutCreate(l, type, x.rows, x.columns, static_cast<std::int64_t>(x.ld)));
    const std::int32_t order = s.by_row ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL, count = s.batch;
    const auto stride = static_cast<std::int64_t>(x.stride);
    ok(cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order));
    ok(cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    ok(cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  };
  layout(&la, a, s.in);
  layout(&lb, b, s.in);
  layout(&ld, d, s.out);
  ok(cublasLtMatmulPreferenceCreate(&preference));
  const std::uint64_t most = 4096;
  ok(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  ok(cublasLtMatmulAlgoGetHeuristic(handle, product, la, lb, ld, ld, preference, 1, &found, &count));
  ASSERT_EQ(count, 1);
  ASSERT_LE(found.workspaceSize, most);
  const float alpha = 1.5f, beta = s.beta;
  ok(cublasLtMatmul(handle, product, &alpha, da, la, db, lb, &beta, dd, ld, dd, ld, &found.algo, workspace, most,
                    nullptr));

  // A little workspace is wanted where it may be had; too little is refused.
  EXPECT_EQ(
      cublasLtMatmul(handle, product, &alpha, da, la, db, lb, &beta, dd, ld, dd, ld, &found.algo, nullptr, 0, nullptr),
      CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(handle, product, lb, la, ld, ld, preference, 1, &found, &count),
            CUBLAS_STATUS_NOT_SUPPORTED);  // the sides exchanged do not fit

  const std::vector<std::uint16_t> bytes = dd.host();
  for (std::size_t i = 0; i < batch; ++i)
    for (std::size_t row = 0; row < m; ++row)
      for (std::size_t column = 0; column < n; ++column) {
        double sum = 0.0, size = 0.0;
        for (std::size_t j = 0; j < k; ++j) {
          const double x = rounded(A[s.transpose_a ? a.at(i, j, row) : a.at(i, row, j)], bits) *
                           rounded(B[s.transpose_b ? b.at(i, column, j) : b.at(i, j, column)], bits);
          sum += x;
          size += std::abs(x);
        }
        const std::size_t at = d.at(i, row, column);
        const double before = s.out == CUDA_R_16BF ? rounded(D[at], 7) : D[at];
        const double expected = 1.5 * sum + (beta == 0.0f ? 0.0 : beta * before);
        const double got = s.out == CUDA_R_16BF
                               ? std::bit_cast<float>(std::uint32_t{bytes[at]} << 16)
                               : std::bit_cast<float>(bytes[2 * at] | std::uint32_t{bytes[2 * at + 1]} << 16);
        // fp32 sums of k + 2 terms, each rounded once, and the output's own rounding.
        const double bound = (1.5 * size + std::abs(before)) * 13.0 * 0x1p-24 +
                             (s.out == CUDA_R_16BF ? std::abs(expected) * 0x1p-8 : 0.0);
        EXPECT_NEAR(got, expected, bound);
      }

  ok(cublasLtMatmulPreferenceDestroy(preference));
  for (cublasLtMatrixLayout_t l : {la, lb, ld}) ok(cublasLtMatrixLayoutDestroy(l));
  ok(cublasLtMatmulDescDestroy(product));
  ok(cublasLtDestroy(handle));
  EXPECT_EQ(standin::live().handles, 0u);
}

TEST(CublasLt, Products) {
  for (const bool ta : {false, true})
    for (const bool tb : {false, true})
      for (const bool by_row : {false, true})
        for (const int batch : {1, 3})
          for (const float beta : {0.0f, 1.0f}) {
            SCOPED_TRACE(testing::Message() << ta << tb << by_row << " batch " << batch << " beta " << beta);
            test({CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F, ta, tb, by_row, batch, beta});
            test({CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, ta, tb, by_row, batch, beta});
            test({CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, ta, tb, by_row, batch, beta});
            test({CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, ta, tb, by_row, batch, beta});
            test({CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_16BF, ta, tb, by_row, batch, beta});
          }
}

}  // namespace
}  // namespace rownorm
