#include "model/parameters.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/random.h"
#include "base/safetensors.h"
#include "model/hugging_face.h"

namespace rownorm {
namespace {

constexpr std::int64_t host_chunk = 1 << 20;  // elements staged on the host at a time

// Stages `count` elements of a matrix through the host in pieces: produce(buffer, first) fills f32 or f64 `buffer` with
// elements [first, first + buffer.size()).
template <class Produce>
void upload_in_chunks(Backend& be, Tensor matrix, DType host_dtype, Produce produce) {
  const Tensor flat = matrix.reshape({matrix.size()});
  const auto room = static_cast<std::size_t>(std::min(host_chunk, flat.size()));
  std::vector<std::byte> buffer(room * static_cast<std::size_t>(size_of(host_dtype)));
  std::vector<double> converted(room);
  for (std::int64_t first = 0; first < flat.size(); first += host_chunk) {
    const std::int64_t n = std::min(host_chunk, flat.size() - first);
    const Tensor host{buffer.data(), host_dtype, {n}};
    produce(host, first);
    const Tensor to = flat.rows(first, first + n);
    if (to.dtype == host_dtype) {
      be.upload(to, host.data);
    } else if (host_dtype == DType::f32 && to.dtype == DType::f64) {
      std::copy_n(host.as<float>(), n, converted.data());
      be.upload(to, converted.data());
    } else {
      throw std::logic_error("[parameters] master weights are f32 or f64");
    }
  }
}

}  // namespace

std::vector<ParameterInfo> parameter_table(const ModelConfig& model) {
  const std::int64_t d = model.width, f = model.mlp_width();
  std::vector<ParameterInfo> table;
  table.push_back({"embed.weight", Role::embedding, -1, model.vocab_size, d});
  for (std::int64_t i = 0; i < model.layers; ++i) {
    const auto add = [&](const char* name, std::int64_t rows, std::int64_t cols) {
      table.push_back({fmt::format("blocks.{}.{}.weight", i, name), Role::hidden, i, rows, cols});
    };
    for (const char* name : {"attn.q", "attn.k", "attn.v", "attn.out"}) add(name, d, d);
    for (const char* name : {"gate", "up"}) add(name, f, d);
    add("down", d, f);
  }
  table.push_back({"lm_head.weight", Role::head, -1, model.vocab_size, d});
  return table;
}

Parameters make_parameters(Arena& arena, const std::string& purpose, const ModelConfig& model, DType dtype) {
  const std::int64_t d = model.width, f = model.mlp_width();
  Parameters p;
  p.embed = arena.add(purpose, dtype, {model.vocab_size, d});
  p.matrices.push_back(p.embed);
  for (std::int64_t i = 0; i < model.layers; ++i) {
    LayerParameters l;
    l.all = arena.add(purpose, dtype, {4 * d * d + 3 * f * d});
    std::int64_t used = 0;
    const auto take = [&](std::int64_t rows, std::int64_t cols) {
      const Tensor view = l.all.rows(used, used + rows * cols).reshape({rows, cols});
      used += rows * cols;
      return view;
    };
    l.qkv = take(3 * d, d);
    l.out = take(d, d);
    l.gate_up = take(2 * f, d);
    l.down = take(d, f);
    p.matrices.insert(p.matrices.end(), {l.qkv.rows(0, d), l.qkv.rows(d, 2 * d), l.qkv.rows(2 * d, 3 * d), l.out,
                                         l.gate_up.rows(0, f), l.gate_up.rows(f, 2 * f), l.down});
    p.layers.push_back(l);
  }
  p.head = arena.add(purpose, dtype, {model.vocab_size, d});
  p.matrices.push_back(p.head);
  return p;
}

void zero(Backend& be, const Parameters& parameters) {
  be.fill(parameters.embed, 0);
  for (const auto& layer : parameters.layers) be.fill(layer.all, 0);
  be.fill(parameters.head, 0);
}

void copy(Backend& be, const Parameters& to, const Parameters& from) {
  if (to.embed.data == from.embed.data) return;
  be.copy(to.embed, from.embed);
  for (std::size_t i = 0; i < to.layers.size(); ++i) be.copy(to.layers[i].all, from.layers[i].all);
  be.copy(to.head, from.head);
}

void initialize(Backend& be, const Parameters& weights, const ModelConfig& model, std::uint64_t seed) {
  const auto table = parameter_table(model);
  for (std::size_t i = 0; i < table.size(); ++i)
    upload_in_chunks(be, weights.matrices[i], DType::f32, [&](Tensor host, std::int64_t first) {
      fill_normal(host, seed, table[i].name, model.init_std, first);
    });
}

void load_weights(Backend& be, const Parameters& weights, const ModelConfig& model, const std::filesystem::path& path) {
  const bool hugging_face = std::filesystem::is_directory(path);
  if (hugging_face) check_hugging_face_config(path / "config.json", model);
  const SafetensorsFile file(hugging_face ? path / "model.safetensors" : path);
  const std::string where = file.path().string();
  std::vector<ParameterInfo> table = parameter_table(model);
  std::set<std::string> known;
  if (hugging_face) {
    check_hugging_face_gains(file, model);
    for (const Gain& gain : hugging_face_gains(model)) known.insert(gain.name);
    for (ParameterInfo& p : table) p.name = hugging_face_name(p.name);
  }
  for (const auto& p : table) {
    known.insert(p.name);
    const auto& entry = file.at(p.name);
    if (entry.shape != std::vector<std::int64_t>{p.rows, p.cols})
      fail(Exit::data, "[weights] {}: {} has shape ({}), expected ({}, {})", where, p.name,
           fmt::join(entry.shape, ", "), p.rows, p.cols);
    if (entry.dtype != "F32" && entry.dtype != "F64" && entry.dtype != "BF16")
      fail(Exit::data, "[weights] {}: {} is {}, expected F32, F64 or BF16", where, p.name, entry.dtype);
  }
  for (const auto& [name, entry] : file.entries())
    if (!known.contains(name))
      fail(Exit::data, "[weights] {}: {} is not a parameter of this model ({} layers)", where, name, model.layers);
  for (std::size_t i = 0; i < table.size(); ++i)
    upload_in_chunks(be, weights.matrices[i], weights.matrices[i].dtype, [&](Tensor host, std::int64_t first) {
      if (!file.read(table[i].name, host, first))
        fail(Exit::data, "[weights] {}: {} holds a value that is not finite", where, table[i].name);
    });
}

}  // namespace rownorm
