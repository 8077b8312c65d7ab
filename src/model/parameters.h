// The parameter table (names and shapes of PAPER 2) and storage of that layout: weights, gradients.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/tensor.h"
#include "model/config.h"
#include "ops/backend.h"

namespace rownorm {

enum class Role { hidden, embedding, head };

struct ParameterInfo {
  std::string name;  // "blocks.3.attn.q.weight"
  Role role;
  std::int64_t layer;  // -1 for embedding and head
  std::int64_t rows, cols;
};

// embed, then each layer's q, k, v, out, gate, up, down, then lm_head. This is also Muon's list of matrices: q, k and v
// are separate although a product treats them as one.
std::vector<ParameterInfo> parameter_table(const ModelConfig& model);

// One layer's matrices in one contiguous block. The products use qkv and gate_up whole.
struct LayerParameters {
  Tensor all;      // (block elements)
  Tensor qkv;      // (3d, d): q, k, v
  Tensor out;      // (d, d)
  Tensor gate_up;  // (2F, d): gate, up
  Tensor down;     // (d, F)
};

struct Parameters {
  Tensor embed;  // (V, d)
  std::vector<LayerParameters> layers;
  Tensor head;                   // (V, d)
  std::vector<Tensor> matrices;  // views in the order of parameter_table
};

Parameters make_parameters(Arena& arena, const std::string& purpose, const ModelConfig& model, DType dtype);

void zero(Backend& be, const Parameters& parameters);
void copy(Backend& be, const Parameters& to, const Parameters& from);  // nothing where they are the same storage

// i.i.d. N(0, init_std^2), one Philox stream a name, rounded to f32 on every backend: independent of device and ranks.
void initialize(Backend& be, const Parameters& weights, const ModelConfig& model, std::uint64_t seed);

// Weights from a safetensors file that holds exactly the table's names and shapes (F32, F64, BF16), or from a folder of
// Hugging Face's transformers that holds this very model (model/hugging_face.h). Error (exit 3): a missing, extra,
// misshapen or non-finite tensor, each with file and name; nothing is loaded before all names and shapes are checked.
void load_weights(Backend& be, const Parameters& weights, const ModelConfig& model, const std::filesystem::path& path);

}  // namespace rownorm
