#include "base/arena.h"

#include <algorithm>
#include <stdexcept>

#include "base/error.h"

namespace rownorm {

Tensor Arena::add(const std::string& purpose, DType dtype, Shape shape) {
  std::int64_t bytes = size_of(dtype);
  for (int i = 0; i < shape.rank(); ++i)
    if (__builtin_mul_overflow(bytes, shape[i], &bytes))
      fail(Exit::device, "[memory] {}: a tensor {} {} exceeds 2^63 bytes", purpose, shape.str(), name_of(dtype));
  std::int64_t end = 0;
  if (__builtin_add_overflow(bytes, alignment - 1, &bytes) ||
      __builtin_add_overflow(used_, bytes / alignment * alignment, &end))
    fail(Exit::device, "[memory] {}: the plan exceeds 2^63 bytes", purpose);
  if (end > capacity_) throw std::logic_error("[arena] exhausted: the plan and its use differ");

  Tensor tensor{base_ ? base_ + used_ : nullptr, dtype, shape};
  auto entry = std::find_if(purposes_.begin(), purposes_.end(), [&](const auto& p) { return p.first == purpose; });
  if (entry == purposes_.end()) entry = purposes_.insert(entry, {purpose, 0});
  entry->second += end - used_;
  used_ = end;
  return tensor;
}

std::string human_bytes(std::int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string describe(const Arena& arena) {
  std::string text;
  for (const auto& [purpose, bytes] : arena.by_purpose()) text += fmt::format("{} {}, ", purpose, human_bytes(bytes));
  return text + fmt::format("total {}", human_bytes(arena.bytes()));
}

}  // namespace rownorm
