#include "model/hugging_face.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace rownorm {
namespace {

using nlohmann::ordered_json;

constexpr std::array<std::pair<std::string_view, std::string_view>, 7> layer_names{{
    {"attn.q", "self_attn.q_proj"},
    {"attn.k", "self_attn.k_proj"},
    {"attn.v", "self_attn.v_proj"},
    {"attn.out", "self_attn.o_proj"},
    {"gate", "mlp.gate_proj"},
    {"up", "mlp.up_proj"},
    {"down", "mlp.down_proj"},
}};

// What decides what the model computes; other keys of a config.json do not.
ordered_json deciding_keys(const ModelConfig& m) {
  return {{"model_type", "qwen3"},
          {"vocab_size", m.vocab_size},
          {"hidden_size", m.width},
          {"intermediate_size", m.mlp_width()},
          {"num_hidden_layers", m.layers},
          {"num_attention_heads", m.heads()},
          {"num_key_value_heads", m.heads()},
          {"head_dim", m.head_dim},
          {"hidden_act", "silu"},
          {"rms_norm_eps", m.norm_eps},
          {"rope_theta", m.rope_base},
          {"attention_bias", false},
          {"tie_word_embeddings", false},
          {"use_sliding_window", false}};
}

}  // namespace

std::string hugging_face_name(const std::string& parameter) {
  if (parameter == "embed.weight") return "model.embed_tokens.weight";
  constexpr std::string_view prefix = "blocks.", suffix = ".weight";
  if (!parameter.starts_with(prefix)) return parameter;  // lm_head.weight
  const std::size_t dot = parameter.find('.', prefix.size());
  const std::string layer = parameter.substr(prefix.size(), dot - prefix.size());
  const std::string matrix = parameter.substr(dot + 1, parameter.size() - suffix.size() - dot - 1);
  const auto found =
      std::find_if(layer_names.begin(), layer_names.end(), [&](const auto& n) { return n.first == matrix; });
  return fmt::format("model.layers.{}.{}.weight", layer, found->second);
}

std::vector<Gain> hugging_face_gains(const ModelConfig& model) {
  std::vector<Gain> gains;
  for (std::int64_t i = 0; i < model.layers; ++i) {
    const auto add = [&](const char* name, std::int64_t size) {
      gains.push_back({fmt::format("model.layers.{}.{}.weight", i, name), size});
    };
    add("input_layernorm", model.width);
    add("self_attn.q_norm", model.head_dim);
    add("self_attn.k_norm", model.head_dim);
    add("post_attention_layernorm", model.width);
  }
  gains.push_back({"model.norm.weight", model.width});
  return gains;
}

ordered_json hugging_face_config(const ModelConfig& model, DType dtype, std::optional<std::int32_t> separator) {
  ordered_json config = {{"architectures", {"Qwen3ForCausalLM"}}};
  config.update(deciding_keys(model));
  config["rope_scaling"] = nullptr;
  config["max_position_embeddings"] = model.context;
  config["initializer_range"] = model.init_std;
  config["attention_dropout"] = 0.0;
  config["use_cache"] = true;
  config["torch_dtype"] = dtype == DType::bf16 ? "bfloat16" : "float32";
  for (const char* key : {"bos_token_id", "eos_token_id"})
    config[key] = separator ? ordered_json(*separator) : ordered_json(nullptr);
  return config;
}

void check_hugging_face_config(const std::filesystem::path& file, const ModelConfig& model) {
  ordered_json found = parse_json(read_text("weights", file));
  if (!found.is_object()) fail(Exit::data, "[weights] {}: not a JSON object", file.string());
  const auto object = [&](const char* key) { return found.contains(key) && found[key].is_object(); };
  // Later versions of transformers write the rotary positions' settings as an object of their own.
  if (!found.contains("rope_theta") && object("rope_parameters") && found["rope_parameters"].contains("rope_theta")) {
    found["rope_theta"] = found["rope_parameters"]["rope_theta"];
    const ordered_json kind = found["rope_parameters"].value("rope_type", ordered_json("default"));
    if (kind != "default") found["rope_scaling"] = kind;
  }
  if (found.contains("rope_scaling") && !found["rope_scaling"].is_null())
    fail(Exit::data, "[weights] {}: rope_scaling is {}, this model has none", file.string(),
         json_text(found["rope_scaling"]));
  const ordered_json wanted = deciding_keys(model);
  for (const auto& [key, expected] : wanted.items()) {
    if (!found.contains(key)) {
      // what Qwen3Config means where the key is absent
      if (expected == false || key == "hidden_act") continue;
      fail(Exit::data, "[weights] {}: has no {}, expected {}", file.string(), key, json_text(expected));
    }
    if (found[key] != expected)
      fail(Exit::data, "[weights] {}: {} is {}, expected {}", file.string(), key, json_text(found[key]),
           json_text(expected));
  }
}

void check_hugging_face_gains(const SafetensorsFile& file, const ModelConfig& model) {
  std::vector<double> values;
  for (const Gain& gain : hugging_face_gains(model)) {
    values.assign(static_cast<std::size_t>(gain.size), 0);
    file.read(gain.name, Tensor{values.data(), DType::f64, {gain.size}});
    for (const double value : values)
      if (value != 1)
        fail(Exit::data, "[weights] {}: {} holds {}, this model's norms have no gains: expected ones",
             file.path().string(), gain.name, value);
  }
}

}  // namespace rownorm
