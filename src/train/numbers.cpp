#include "train/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <vector>

namespace rownorm {
namespace {

bool all_finite(Backend& be, Tensor t) {
  constexpr std::int64_t chunk = 1 << 20;  // elements on the host at a time
  const Tensor flat = t.reshape({t.size()});
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min(chunk, t.size()) * size_of(t.dtype)));
  for (std::int64_t first = 0; first < t.size(); first += chunk) {
    const Tensor part = flat.rows(first, std::min(first + chunk, t.size()));
    be.download(buffer.data(), part);
    if (!all_finite(buffer.data(), part.dtype, part.size())) return false;
  }
  return true;
}

}  // namespace

bool all_finite(const void* host, DType dtype, std::int64_t n) {
  const auto every = [n](const auto* values, auto finite) { return std::all_of(values, values + n, finite); };
  if (dtype == DType::f64) return every(static_cast<const double*>(host), [](double x) { return std::isfinite(x); });
  if (dtype == DType::f32) return every(static_cast<const float*>(host), [](float x) { return std::isfinite(x); });
  if (dtype == DType::bf16)  // exponent bits all set: infinite or not a number
    return every(static_cast<const std::uint16_t*>(host), [](unsigned x) { return (x & 0x7f80) != 0x7f80; });
  throw std::logic_error(fmt::format("[numbers] {} is always finite", name_of(dtype)));
}

std::string first_not_finite(Backend& be, const Training& t) {
  const auto found = [](const std::string& where) { return "first found in " + where; };
  const auto& table = t.optimizer.table;
  for (std::size_t p = 0; p < table.size(); ++p)
    if (!all_finite(be, t.master.matrices[p])) return found(table[p].name);
  for (std::size_t i = 0; i < t.activations.blocks.size(); ++i) {
    const BlockActivations& b = t.activations.blocks[i];
    for (const auto& [name, tensor] : {std::pair{"attention's input", b.normed1},
                                       {"q, k, v", b.qkv},
                                       {"attention's output", b.att},
                                       {"MLP's input", b.normed2},
                                       {"gate and up", b.gate_up},
                                       {"MLP's activations", b.act}})
      if (!all_finite(be, tensor)) return found(fmt::format("blocks.{}: {}", i, name));
  }
  if (!all_finite(be, t.activations.hidden)) return found("the head's input");
  for (std::size_t p = table.size(); p-- > 0;)
    if (!all_finite(be, t.gradients.matrices[p])) return found("the gradient of " + table[p].name);
  return "every tensor is finite: the logits or a sum overflow";
}

}  // namespace rownorm
