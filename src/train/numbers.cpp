#include "train/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "base/file.h"

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

// "<how many tensors were looked at before> <name>", "" if all are finite.
std::string first_on_this_rank(Backend& be, const Training& t) {
  std::int64_t looked_at = 0;
  std::string found;
  const auto finite = [&](Tensor tensor, const std::string& name) {
    if (!all_finite(be, tensor)) found = fmt::format("{} {}", looked_at, name);
    ++looked_at;
    return found.empty();
  };
  const auto& table = t.optimizer.table;
  for (std::size_t p = 0; p < table.size(); ++p)
    if (!finite(t.weights.matrices[p], table[p].name)) return found;
  for (std::size_t i = 0; i < t.activations.blocks.size(); ++i) {
    const BlockActivations& b = t.activations.blocks[i];
    for (const auto& [name, tensor] : {std::pair{"attention's input", b.normed1},
                                       {"q, k, v", b.qkv},
                                       {"attention's output", b.att},
                                       {"MLP's input", b.normed2},
                                       {"gate and up", b.gate_up},
                                       {"MLP's activations", b.act}})
      if (!finite(tensor, fmt::format("blocks.{}: {}", i, name))) return found;
  }
  if (!finite(t.activations.hidden, "the head's input")) return found;
  for (std::size_t p = table.size(); p-- > 0;)
    if (!finite(t.gradients.matrices[p], "the gradient of " + table[p].name)) return found;
  return found;
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

std::string first_not_finite(Backend& be, Comm& comm, const Training& t) {
  // Of all ranks' findings the one that was looked at first: this rank's as "<how many were finite> <name>".
  const auto findings = comm.all_gather(first_on_this_rank(be, t));
  const std::string* first = nullptr;
  for (const std::string& f : findings)
    if (!f.empty() && (!first || std::stoll(f) < std::stoll(*first))) first = &f;
  return first ? "first found in " + first->substr(first->find(' ') + 1)
               : "every tensor is finite: the logits or a sum overflow";
}

std::string first_difference_of_ranks(Backend& be, Comm& comm, const Training& t) {
  std::string digests;  // of every matrix, a line each
  std::vector<std::byte> values;
  for (const Tensor& matrix : t.weights.matrices) {
    values.resize(static_cast<std::size_t>(matrix.bytes()));
    be.download(values.data(), matrix);
    digests += digest(values) + "\n";
  }
  const auto all = comm.all_gather(digests);
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0]) {
      const auto at = std::ranges::mismatch(all[0], all[r]).in1 - all[0].begin();
      const auto matrix = std::count(all[0].begin(), all[0].begin() + at, '\n');
      return fmt::format("{} is not the same on rank 0 and rank {}",
                         t.optimizer.table[static_cast<std::size_t>(matrix)].name, r);
    }
  return "";
}

}  // namespace rownorm
