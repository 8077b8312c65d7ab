// A backend on the bench: tensors of their own memory (so that the address sanitizer sees an overrun), and values in
// and out as doubles whatever the backend's dtypes are.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device.h"

namespace rownorm {

using Values = std::vector<double>;

class Bench {
 public:
  // Every byte of the workspace is `byte`: with 0xff it holds NaNs, and what is read before it is written shows.
  explicit Bench(const std::string& name, const WorkspaceSizes& sizes = largest, unsigned char byte = 0)
      : backend_(testing::open(name)) {
    const Tensor workspace = zeros(DType::u8, {backend_->workspace_bytes(sizes)});
    if (byte != 0)
      backend_->upload(workspace, std::vector<unsigned char>(static_cast<std::size_t>(workspace.bytes()), byte).data());
    backend_->set_workspace(workspace, sizes);
  }

  Backend* operator->() { return backend_.get(); }
  DType compute() const { return backend_->compute_dtype(); }
  DType master() const { return backend_->master_dtype(); }
  bool is_double() const { return master() == DType::f64; }

  Tensor zeros(DType dtype, Shape shape) {
    Tensor t{nullptr, dtype, shape};
    memory_.push_back(backend_->allocate(t.bytes()));
    t.data = memory_.back().get();
    return t;
  }

  // The values, rounded to dtype.
  Tensor tensor(DType dtype, Shape shape, const Values& values) {
    const Tensor wide = zeros(DType::f64, shape), t = zeros(dtype, shape);
    EXPECT_EQ(static_cast<std::size_t>(t.size()), values.size());
    backend_->upload(wide, values.data());
    backend_->copy(t, wide);
    return t;
  }
  Tensor scalar(double value) { return tensor(DType::f64, {1}, {value}); }
  Tensor ids(const std::vector<std::int32_t>& values) {
    const Tensor t = zeros(DType::i32, {static_cast<std::int64_t>(values.size())});
    backend_->upload(t, values.data());
    return t;
  }

  Values values(Tensor t) {
    Values out(static_cast<std::size_t>(t.size()));
    const Tensor wide = zeros(DType::f64, t.shape);
    backend_->copy(wide, t);
    backend_->download(out.data(), wide);
    return out;
  }
  std::vector<std::int32_t> integers(Tensor t) {
    std::vector<std::int32_t> out(static_cast<std::size_t>(t.size()));
    backend_->download(out.data(), t);
    return out;
  }

  // An update that goes through with the gradients as they are (ok), or one that must change nothing.
  UpdateControl control(bool ok = true) {
    UpdateControl c{scalar(0), scalar(ok), ids({ok})};
    return c;
  }

  // The largest shapes that tests on a bench use.
  static inline const WorkspaceSizes largest{.tokens = 96,
                                             .context = 64,
                                             .width = 64,
                                             .heads = 8,
                                             .vocab = 1400,
                                             .panel = 64,
                                             .diameter = true,
                                             .newton_schulz = {{8, 64, 160}}};

 private:
  std::unique_ptr<Backend> backend_;
  std::vector<Memory> memory_;
};

inline Values normals(std::int64_t n, unsigned seed, double deviation = 1) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0, deviation);
  Values out(static_cast<std::size_t>(n));
  for (double& v : out) v = normal(engine);
  return out;
}

inline std::vector<std::int32_t> random_ids(std::int64_t n, std::int64_t below, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
  for (auto& id : ids) id = static_cast<std::int32_t>(engine() % static_cast<std::uint32_t>(below));
  return ids;
}

// Tests written once for every backend.
class EveryBackend : public ::testing::TestWithParam<std::string> {};

}  // namespace rownorm
