#include "cuda/products.h"

#include <cublasLt.h>

#include <array>
#include <map>
#include <stdexcept>

#include "base/error.h"
#include "ops/cuda_plan.h"

namespace rownorm::cuda {
namespace {

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(Exit::device, "[cuda] {}: {}", call, cublasLtGetStatusString(status));
}

cudaDataType_t type_of(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// Bytes that an address is a multiple of, at most 256: what a kernel may assume.
std::uint32_t alignment_of(const void* address) {
  std::uint32_t alignment = 256;
  while (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) alignment /= 2;
  return alignment;
}

// cuBLASLt's own objects, given back on destruction.
template <class Handle, cublasStatus_t (*destroy)(Handle)>
class Owned {
 public:
  explicit Owned(Handle handle) : handle_(handle) {}
  ~Owned() { destroy(handle_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Handle get() const { return handle_; }

 private:
  Handle handle_;
};
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cublasLtMatmulDesc_t description(Multiply how, bool first_transposed, bool second_transposed) {
  cublasLtMatmulDesc_t made = nullptr;
  const auto compute = how == Multiply::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  check(cublasLtMatmulDescCreate(&made, compute, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const std::int32_t first = first_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const std::int32_t second = second_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  check(cublasLtMatmulDescSetAttribute(made, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "TRANSA");
  check(cublasLtMatmulDescSetAttribute(made, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "TRANSB");
  return made;
}

// Of a row-major (rows, columns) matrix, which is the transposed one to cuBLASLt.
cublasLtMatrixLayout_t layout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                              std::int64_t count, std::int64_t step) {
  cublasLtMatrixLayout_t made = nullptr;
  check(cublasLtMatrixLayoutCreate(&made, type_of(dtype), static_cast<std::uint64_t>(columns),
                                   static_cast<std::uint64_t>(rows), stride),
        "cublasLtMatrixLayoutCreate");
  const auto batch = static_cast<std::int32_t>(count);
  check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
        "BATCH_COUNT");
  check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step),
        "STRIDED_BATCH_OFFSET");
  return made;
}

cublasLtMatmulPreference_t preference(const std::array<std::uint32_t, 4>& alignments) {
  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  const auto set = [made](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof value), "cublasLtMatmulPreference");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(products_bytes));
  // Split sums only where the parts are f32, not of the result's dtype, and added in a fixed order: in the workspace.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[3]);
  return made;
}

// One shape of product with all that its algorithm may depend on; found again by `key`.
struct Plan {
  Description description;
  Layout first, second, result;
  cublasLtMatmulAlgo_t algorithm{};
};

using Key = std::array<std::int64_t, 21>;

}  // namespace

struct Products::Library {
  cublasLtHandle_t handle = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans;
  ~Library() {
    plans.clear();
    cublasLtDestroy(handle);
  }
};

Products::Products(cudaStream_t stream) : stream_(stream) {
  cublasLtHandle_t handle = nullptr;
  check(cublasLtCreate(&handle), "cublasLtCreate");
  library_ = std::make_unique<Library>();
  library_->handle = handle;
}

Products::~Products() = default;

// A row-major matrix is its transpose to cuBLASLt, so that it is asked for d^T = b^T a^T: b is its first operand.
void Products::multiply(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, const Operand& a,
                        const Operand& b, double beta, const Result& d, Multiply how, const void* c,
                        std::int64_t count) {
  if (m == 0 || n == 0 || count == 0) return;
  if (!c) c = d.data;
  if (k == 0) {
    if (beta != 1 || c != d.data) throw std::logic_error("[products] k = 0, expected at least 1 to write a product");
    return;
  }
  const std::array<std::uint32_t, 4> alignments{alignment_of(b.data), alignment_of(a.data), alignment_of(c),
                                                alignment_of(d.data)};
  const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
  const Key key{m,
                n,
                k,
                count,
                number(how),
                number(beta != 0),
                number(c != d.data),
                number(a.dtype),
                a.stride,
                number(a.transposed),
                a.step,
                number(b.dtype),
                b.stride,
                number(b.transposed),
                b.step,
                number(d.dtype),
                d.stride,
                d.step,
                alignments[0] * 1024L + alignments[1],
                alignments[2],
                alignments[3]};
  std::unique_ptr<Plan>& plan = library_->plans[key];
  if (!plan) {
    const auto stored = [count](const Operand& x, std::int64_t rows, std::int64_t columns) {
      return layout(x.dtype, x.transposed ? columns : rows, x.transposed ? rows : columns, x.stride, count, x.step);
    };
    auto made = std::unique_ptr<Plan>(new Plan{Description(description(how, b.transposed, a.transposed)),
                                               Layout(stored(b, k, n)), Layout(stored(a, m, k)),
                                               Layout(layout(d.dtype, m, n, d.stride, count, d.step))});
    const Preference wanted(preference(alignments));
    cublasLtMatmulHeuristicResult_t chosen{};
    int found = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(library_->handle, made->description.get(), made->first.get(), made->second.get(),
                                       made->result.get(), made->result.get(), wanted.get(), 1, &chosen, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0)
      fail(Exit::device, "[cuda] cuBLASLt has no product of ({}, {}) {} and ({}, {}) {} into {}: {}", m, k,
           name_of(a.dtype), k, n, name_of(b.dtype), name_of(d.dtype), cublasLtGetStatusString(status));
    made->algorithm = chosen.algo;
    plan = std::move(made);
  }
  const auto by = static_cast<float>(alpha), keep = static_cast<float>(beta);
  check(cublasLtMatmul(library_->handle, plan->description.get(), &by, b.data, plan->first.get(), a.data,
                       plan->second.get(), &keep, c, plan->result.get(), d.data, plan->result.get(), &plan->algorithm,
                       workspace_, static_cast<std::size_t>(products_bytes), stream_),
        "cublasLtMatmul");
}

}  // namespace rownorm::cuda
