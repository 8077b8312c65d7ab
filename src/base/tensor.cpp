#include "base/tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace rownorm {

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::u8:
      return 1;
  }
  throw std::logic_error("[tensor] unknown dtype");
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  throw std::logic_error("[tensor] unknown dtype");
}

Shape::Shape(std::initializer_list<std::int64_t> dims) {
  if (dims.size() > dims_.size()) throw std::logic_error("[shape] more than four dimensions");
  if (std::any_of(dims.begin(), dims.end(), [](std::int64_t d) { return d < 0; }))
    throw std::logic_error("[shape] a dimension is negative");
  std::copy(dims.begin(), dims.end(), dims_.begin());
  rank_ = static_cast<int>(dims.size());
}

std::int64_t Shape::size() const {
  std::int64_t product = 1;
  for (int i = 0; i < rank_; ++i) product *= (*this)[i];
  return product;
}

std::string Shape::str() const {
  std::string text = "(";
  for (int i = 0; i < rank_; ++i) text += fmt::format("{}{}", i ? ", " : "", (*this)[i]);
  return text + ")";
}

Tensor Tensor::rows(std::int64_t begin, std::int64_t end) const {
  if (shape.rank() < 1 || begin < 0 || begin > end || end > shape[0])
    throw std::logic_error(fmt::format("[rows] [{}, {}) of a tensor {}", begin, end, str()));
  const std::int64_t row = shape[0] == 0 ? 0 : size() / shape[0];
  Tensor view = *this;
  if (data) view.data = static_cast<char*>(data) + begin * row * size_of(dtype);  // null: a measuring arena's
  const std::int64_t n = end - begin;
  switch (shape.rank()) {
    case 1:
      view.shape = {n};
      break;
    case 2:
      view.shape = {n, shape[1]};
      break;
    case 3:
      view.shape = {n, shape[1], shape[2]};
      break;
    default:
      view.shape = {n, shape[1], shape[2], shape[3]};
  }
  return view;
}

Tensor Tensor::reshape(Shape to) const {
  if (to.size() != size()) throw std::logic_error(fmt::format("[reshape] {} to {}", str(), to.str()));
  Tensor view = *this;
  view.shape = to;
  return view;
}

std::string Tensor::str() const { return fmt::format("{} {}", shape.str(), name_of(dtype)); }

void Tensor::require(DType expected) const {
  if (dtype != expected) throw std::logic_error(fmt::format("[tensor] {} read as {}", str(), name_of(expected)));
}

}  // namespace rownorm
