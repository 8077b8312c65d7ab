// The calls of cuBLASLt that the backend makes: D = alpha op(A) op(B) + beta C, column-major or row-major, bf16 or fp32
// in and out, fp32 accumulation, batches by stride. Inputs are rounded as the compute type says (fp32, tf32, bf16) and
// go through OpenBLAS in fp32.
#include <cblas.h>
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine.h"

namespace standin {
namespace {

struct Product {  // cublasLtMatmulDesc_t
  cublasComputeType_t compute;
  cudaDataType_t scale;
  cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
};

struct Layout {  // cublasLtMatrixLayout_t
  cudaDataType_t type;
  std::int64_t rows, columns, ld;
  std::int32_t batch = 1;
  std::int64_t stride = 0;
  cublasLtOrder_t order = CUBLASLT_ORDER_COL;
};

struct Preference {  // cublasLtMatmulPreference_t
  std::size_t workspace = 0;
};

constexpr std::size_t workspace_wanted = 4096;  // bytes, so that forgetting it shows

std::size_t bytes(cudaDataType_t type) { return type == CUDA_R_16BF ? 2 : 4; }

bool known(const Layout& l) {
  return (l.type == CUDA_R_16BF || l.type == CUDA_R_32F) && l.rows > 0 && l.columns > 0 && l.batch > 0 &&
         l.ld >= (l.order == CUBLASLT_ORDER_COL ? l.rows : l.columns) &&
         (l.order == CUBLASLT_ORDER_COL || l.order == CUBLASLT_ORDER_ROW);
}

bool consistent(const Product& p, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const std::int64_t m = p.a == CUBLAS_OP_N ? a.rows : a.columns, k = p.a == CUBLAS_OP_N ? a.columns : a.rows;
  const std::int64_t kb = p.b == CUBLAS_OP_N ? b.rows : b.columns, n = p.b == CUBLAS_OP_N ? b.columns : b.rows;
  const bool compute = p.compute == CUBLAS_COMPUTE_32F || p.compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
                       p.compute == CUBLAS_COMPUTE_32F_FAST_TF32 || p.compute == CUBLAS_COMPUTE_32F_FAST_16BF;
  return compute && p.scale == CUDA_R_32F && known(a) && known(b) && known(c) && known(d) && a.type == b.type &&
         c.type == d.type && !(a.type == CUDA_R_32F && c.type == CUDA_R_16BF) && k == kb && d.rows == m &&
         d.columns == n && c.rows == m && c.columns == n && a.batch == d.batch && b.batch == d.batch &&
         c.batch == d.batch;
}

float rounded(float x, int bits) {  // to nearest even, the lowest `bits` of the significand gone
  if (x != x) return x;
  auto u = std::bit_cast<std::uint32_t>(x);
  u += (std::uint32_t{1} << (bits - 1)) - 1 + (u >> bits & 1);
  return std::bit_cast<float>(u >> bits << bits);
}

// One matrix as fp32, column-major without gaps. Lines are read with memcpy, which the sanitizers see.
void read(std::vector<float>& out, const char* data, const Layout& l, cublasComputeType_t compute) {
  const bool by_row = l.order == CUBLASLT_ORDER_ROW;
  const auto lines = static_cast<std::size_t>(by_row ? l.rows : l.columns),
             length = static_cast<std::size_t>(by_row ? l.columns : l.rows);
  std::vector<char> line(length * bytes(l.type));
  out.resize(lines * length);
  for (std::size_t j = 0; j < lines; ++j) {
    std::memcpy(line.data(), data + j * static_cast<std::size_t>(l.ld) * bytes(l.type), line.size());
    for (std::size_t i = 0; i < length; ++i) {
      float x = 0.0f;
      if (l.type == CUDA_R_16BF) {
        std::uint16_t half = 0;
        std::memcpy(&half, line.data() + 2 * i, 2);
        x = std::bit_cast<float>(std::uint32_t{half} << 16);
      } else {
        std::memcpy(&x, line.data() + 4 * i, 4);
        if (compute == CUBLAS_COMPUTE_32F_FAST_TF32) x = rounded(x, 13);
        if (compute == CUBLAS_COMPUTE_32F_FAST_16BF) x = rounded(x, 16);
      }
      out[by_row ? i * lines + j : j * length + i] = x;
    }
  }
}

void write(char* data, const Layout& l, const std::vector<float>& values) {
  const bool by_row = l.order == CUBLASLT_ORDER_ROW;
  const auto lines = static_cast<std::size_t>(by_row ? l.rows : l.columns),
             length = static_cast<std::size_t>(by_row ? l.columns : l.rows);
  std::vector<char> line(length * bytes(l.type));
  for (std::size_t j = 0; j < lines; ++j) {
    for (std::size_t i = 0; i < length; ++i) {
      const float x = values[by_row ? i * lines + j : j * length + i];
      if (l.type == CUDA_R_16BF) {
        const __nv_bfloat16 half(x);
        std::memcpy(line.data() + 2 * i, &half, 2);
      } else {
        std::memcpy(line.data() + 4 * i, &x, 4);
      }
    }
    std::memcpy(data + j * static_cast<std::size_t>(l.ld) * bytes(l.type), line.data(), line.size());
  }
}

std::size_t extent(const Layout& l) {
  const bool by_row = l.order == CUBLASLT_ORDER_ROW;
  const std::int64_t lines = by_row ? l.rows : l.columns, length = by_row ? l.columns : l.rows;
  return static_cast<std::size_t>((l.batch - 1) * l.stride + (lines - 1) * l.ld + length) * bytes(l.type);
}

void check_matrix(const void* p, const Layout& l, const char* name) {
  const Region r = find(p);
  if (r.place == Place::host || r.left < extent(l))
    stop("cublasLtMatmul: %s needs %zu bytes of device memory at %p, there are %zu", name, extent(l), p, r.left);
  if (reinterpret_cast<std::uintptr_t>(p) % bytes(l.type) != 0)
    stop("cublasLtMatmul: %s at %p is not aligned", name, p);
}

void multiply(const Product& p, float alpha, const char* A, const Layout& a, const char* B, const Layout& b, float beta,
              const char* C, const Layout& c, char* D, const Layout& d) {
  std::vector<float> left, right, sum;
  for (std::int32_t batch = 0; batch < d.batch; ++batch) {
    const auto at = [&](const Layout& l) { return static_cast<std::size_t>(batch * l.stride) * bytes(l.type); };
    read(left, A + at(a), a, p.compute);
    read(right, B + at(b), b, p.compute);
    sum.assign(static_cast<std::size_t>(d.rows * d.columns), 0.0f);
    if (beta != 0.0f) read(sum, C + at(c), c, CUBLAS_COMPUTE_32F);
    const auto transpose = [](cublasOperation_t op) { return op == CUBLAS_OP_N ? CblasNoTrans : CblasTrans; };
    const auto k = static_cast<blasint>(p.a == CUBLAS_OP_N ? a.columns : a.rows);
    cblas_sgemm(CblasColMajor, transpose(p.a), transpose(p.b), static_cast<blasint>(d.rows),
                static_cast<blasint>(d.columns), k, alpha, left.data(), static_cast<blasint>(a.rows), right.data(),
                static_cast<blasint>(b.rows), beta, sum.data(), static_cast<blasint>(d.rows));
    write(D + at(d), d, sum);
  }
}

template <class T, class U>
cublasStatus_t take(T& to, const void* from, std::size_t size) {
  if (size != sizeof(U)) return CUBLAS_STATUS_INVALID_VALUE;
  U value;
  std::memcpy(&value, from, size);
  to = static_cast<T>(value);
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t destroy(const void* object) {
  delete static_cast<const T*>(object);
  count_handle(-1);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(0));
  count_handle(1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy<int>(handle); }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(new Product{compute, scale});
  count_handle(1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return destroy<Product>(desc); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t size) {
  auto& p = *reinterpret_cast<Product*>(desc);
  cublasOperation_t* op = attribute == CUBLASLT_MATMUL_DESC_TRANSA   ? &p.a
                          : attribute == CUBLASLT_MATMUL_DESC_TRANSB ? &p.b
                                                                     : nullptr;
  if (op == nullptr)
    stop("cublasLtMatmulDescSetAttribute(%d): the stand-in does not know it", static_cast<int>(attribute));
  return take<cublasOperation_t, std::int32_t>(*op, value, size);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t columns, std::int64_t ld) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(
      new Layout{type, static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns), ld});
  count_handle(1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy<Layout>(layout); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                std::size_t size) {
  auto& l = *reinterpret_cast<Layout*>(layout);
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return take<std::int32_t, std::int32_t>(l.batch, value, size);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return take<std::int64_t, std::int64_t>(l.stride, value, size);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return take<std::int64_t, std::int64_t>(l.ld, value, size);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return take<cublasLtOrder_t, std::int32_t>(l.order, value, size);
    default:
      stop("cublasLtMatrixLayoutSetAttribute(%d): the stand-in does not know it", static_cast<int>(attribute));
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  count_handle(1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    std::size_t size) {
  auto& p = *reinterpret_cast<Preference*>(preference);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return take<std::size_t, std::uint64_t>(p.workspace, value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return CUBLAS_STATUS_SUCCESS;
    default:
      stop("cublasLtMatmulPreferenceSetAttribute(%d): the stand-in does not know it", static_cast<int>(attribute));
  }
}

// One algorithm, which wants a little workspace where it may have some.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int requested, cublasLtMatmulHeuristicResult_t* results, int* returned) {
  *returned = 0;
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  if (!consistent(*reinterpret_cast<Product*>(desc), *reinterpret_cast<Layout*>(a), *reinterpret_cast<Layout*>(b),
                  *reinterpret_cast<Layout*>(c), *reinterpret_cast<Layout*>(d)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  results[0] = {};
  results[0].workspaceSize = std::min(reinterpret_cast<Preference*>(preference)->workspace, workspace_wanted);
  results[0].algo.data[0] = results[0].workspaceSize;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].wavesCount = 1.0f;
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                              const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, std::size_t workspace_size,
                              cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> held(lock());
  const Product p = *reinterpret_cast<Product*>(desc);
  const Layout la = *reinterpret_cast<Layout*>(a), lb = *reinterpret_cast<Layout*>(b);
  const Layout lc = *reinterpret_cast<Layout*>(c), ld = *reinterpret_cast<Layout*>(d);
  if (!consistent(p, la, lb, lc, ld)) return CUBLAS_STATUS_INVALID_VALUE;
  const std::size_t wanted = algo == nullptr ? 0 : algo->data[0];
  if (workspace_size < wanted) return CUBLAS_STATUS_INVALID_VALUE;
  if (wanted > 0) {
    const Region r = find(workspace);
    if (r.place != Place::device || r.left < workspace_size || reinterpret_cast<std::uintptr_t>(workspace) % 16 != 0)
      stop("cublasLtMatmul: %zu bytes of workspace at %p, expected device memory aligned to 16", workspace_size,
           workspace);
  }
  float x = 0.0f, y = 0.0f;
  std::memcpy(&x, alpha, sizeof x);
  std::memcpy(&y, beta, sizeof y);
  check_matrix(A, la, "A");
  check_matrix(B, lb, "B");
  if (y != 0.0f) check_matrix(C, lc, "C");
  check_matrix(D, ld, "D");
  enqueue_work(stream, [=] {
    if (wanted > 0) std::memset(workspace, 0xff, wanted);  // it belongs to this product alone
    multiply(p, x, static_cast<const char*>(A), la, static_cast<const char*>(B), lb, y, static_cast<const char*>(C), lc,
             static_cast<char*>(D), ld);
  });
  return CUBLAS_STATUS_SUCCESS;
}

std::size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS_?";
  }
}
const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

}  // extern "C"
