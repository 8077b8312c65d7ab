// A tensor is a view: pointer, dtype, shape. It owns nothing and is copied freely; memory comes from an Arena.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace rownorm {

enum class DType : std::uint8_t { f64, f32, bf16, i32, u8 };

std::int64_t size_of(DType dtype);  // bytes of one element
const char* name_of(DType dtype);   // "f64", ...

// Up to four dimensions, row-major and contiguous. A default Shape has rank 0 and size 1.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);  // each dimension >= 0, at most four: else std::logic_error
  int rank() const { return rank_; }
  std::int64_t operator[](int i) const { return dims_[static_cast<std::size_t>(i)]; }
  std::int64_t size() const;  // product of the dimensions
  bool operator==(const Shape&) const = default;
  std::string str() const;  // "(3, 5)"

 private:
  std::array<std::int64_t, 4> dims_{};
  int rank_ = 0;
};

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<double>() {
  return DType::f64;
}
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<std::int32_t>() {
  return DType::i32;
}
template <>
constexpr DType dtype_of<std::uint8_t>() {
  return DType::u8;
}

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape;

  std::int64_t dim(int i) const { return shape[i]; }
  std::int64_t size() const { return shape.size(); }
  std::int64_t bytes() const { return size() * size_of(dtype); }

  // Typed pointer to host memory; std::logic_error if T is not the tensor's dtype.
  template <class T>
  T* as() const {
    require(dtype_of<T>());
    return static_cast<T*>(data);
  }

  Tensor rows(std::int64_t begin, std::int64_t end) const;  // view of rows [begin, end) of the first dimension
  Tensor reshape(Shape to) const;                           // same elements in order; std::logic_error if sizes differ
  std::string str() const;                                  // "(3, 5) f32"

 private:
  void require(DType expected) const;
};

}  // namespace rownorm
