// A model as a folder of Hugging Face's transformers. The architecture of PAPER 2 is that of Qwen3ForCausalLM with all
// gains one: RMSNorm before attention, MLP and head, RMSNorm over each head of q and k before rotary positions that
// pair i with i + head_dim/2, SwiGLU, no biases, embedding and head apart. (transformers,
// models/qwen3/modeling_qwen3.py; a folder is config.json and model.safetensors.)
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/safetensors.h"
#include "base/tensor.h"
#include "model/config.h"

namespace rownorm {

// "blocks.3.attn.q.weight" of parameter_table -> "model.layers.3.self_attn.q_proj.weight".
std::string hugging_face_name(const std::string& parameter);

// The vectors that such a model has besides the parameters: the gains of its norms, in the order of their layers.
struct Gain {
  std::string name;
  std::int64_t size;
};
std::vector<Gain> hugging_face_gains(const ModelConfig& model);

// config.json. `dtype` (f32 or bf16) is that of the weights, `separator` the token that begins and ends documents.
nlohmann::ordered_json hugging_face_config(const ModelConfig& model, DType dtype,
                                           std::optional<std::int32_t> separator);

// That the model of a folder is this one. Error (exit 3) with file, key and both values: another architecture, another
// size, a feature that this model has not (a sliding window, scaled rotary positions, tied embeddings, ...), a missing
// gain or one that is not all ones.
void check_hugging_face_config(const std::filesystem::path& file, const ModelConfig& model);
void check_hugging_face_gains(const SafetensorsFile& file, const ModelConfig& model);

}  // namespace rownorm
