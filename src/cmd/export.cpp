// rownorm export: a checkpoint's model as a folder of Hugging Face's transformers.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/bf16.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/safetensors.h"
#include "cmd/commands.h"
#include "data/tokenizer.h"
#include "model/hugging_face.h"
#include "model/parameters.h"
#include "train/log.h"
#include "train/trained_model.h"

namespace rownorm {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct TokenizerFile {
  fs::path path;
  std::optional<std::int32_t> separator;
  std::string separator_text;
};

// None where there is none to be had: the folder is then for token ids.
std::optional<TokenizerFile> choose_tokenizer(const std::string& option, const Config& config) {
  if (option == "none") return std::nullopt;
  fs::path path = option;
  if (option == "auto") {
    const std::vector<fs::path> found = tokenizers_beside_data(config);
    if (found.size() != 1) {
      log_line(fmt::format("tokenizer: {} beside the run's data; the folder has none (--tokenizer FILE)",
                           found.empty() ? "no tokenizer.json" : "more than one tokenizer.json"));
      return std::nullopt;
    }
    path = found[0];
  }
  const Tokenizer tokenizer = Tokenizer::read(path);
  if (tokenizer.size() != config.model.vocab_size)
    fail(Exit::data, "[export] {}: has {} tokens, model.vocab_size is {}: not this model's (--tokenizer FILE or none)",
         path.string(), tokenizer.size(), config.model.vocab_size);
  const auto separator = tokenizer.separator();
  return TokenizerFile{path, separator, separator ? tokenizer.text_of(*separator) : ""};
}

// Every parameter under its new name, then the gains, all ones.
void write_weights(const fs::path& path, const SafetensorsFile& from, const ModelConfig& model, DType dtype) {
  const std::vector<ParameterInfo> table = parameter_table(model);
  const std::vector<Gain> gains = hugging_face_gains(model);
  std::vector<SafetensorsWriter::Declaration> declarations;
  for (const ParameterInfo& p : table) declarations.push_back({hugging_face_name(p.name), dtype, {p.rows, p.cols}});
  for (const Gain& gain : gains) declarations.push_back({gain.name, dtype, {gain.size}});
  SafetensorsWriter writer(path, declarations, {{"format", "pt"}});

  constexpr std::int64_t chunk = 1 << 20;  // elements at a time
  std::vector<float> values;
  std::vector<std::uint16_t> halves;
  const auto write_values = [&] {
    if (dtype == DType::f32) return writer.write(values.data(), values.size() * sizeof(float));
    halves.resize(values.size());
    std::transform(values.begin(), values.end(), halves.begin(), to_bf16);
    writer.write(halves.data(), halves.size() * sizeof(std::uint16_t));
  };
  for (const ParameterInfo& p : table)
    for (std::int64_t first = 0; first < p.rows * p.cols; first += chunk) {
      const std::int64_t count = std::min(chunk, p.rows * p.cols - first);
      values.resize(static_cast<std::size_t>(count));
      if (!from.read(p.name, Tensor{values.data(), DType::f32, {count}}, first))
        fail(Exit::data, "[export] {}: {} holds a value that is not finite", from.path().string(), p.name);
      write_values();
    }
  for (const Gain& gain : gains) {
    values.assign(static_cast<std::size_t>(gain.size), 1.0f);
    write_values();
  }
  writer.close();
}

void write_json(const fs::path& path, const ordered_json& document) {
  write_text_atomically(path, json_text(document, 2) + "\n");
}

void write_folder(const fs::path& folder, const TrainedModel& trained, DType dtype,
                  const std::optional<TokenizerFile>& tokenizer) {
  const ModelConfig& model = trained.config.model;
  const auto separator = tokenizer ? tokenizer->separator : std::nullopt;
  write_weights(folder / "model.safetensors", SafetensorsFile(trained.checkpoint.path / "model.safetensors"), model,
                dtype);
  write_json(folder / "config.json", hugging_face_config(model, dtype, separator));
  if (!tokenizer) return;
  write_text_atomically(folder / "tokenizer.json", read_text("tokenizer", tokenizer->path));
  ordered_json settings = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                           {"model_max_length", model.context},
                           {"clean_up_tokenization_spaces", false}};
  if (separator) settings["bos_token"] = settings["eos_token"] = tokenizer->separator_text;
  write_json(folder / "tokenizer_config.json", settings);
  if (separator)
    write_json(folder / "generation_config.json", {{"bos_token_id", *separator}, {"eos_token_id", *separator}});
}

}  // namespace

int export_command(const ExportOptions& options) {
  const fs::path output = fs::path(options.output).lexically_normal();
  const fs::path name = output.has_filename() ? output : output.parent_path();
  if (fs::exists(fs::symlink_status(name)))
    fail(Exit::data, "[export] {}: exists already; name another output", name.string());
  const TrainedModel trained = find_trained_model(options.checkpoint);
  const DType dtype = options.dtype == "bf16" ? DType::bf16 : DType::f32;
  const std::optional<TokenizerFile> tokenizer = choose_tokenizer(options.tokenizer, trained.config);

  // Written beside and renamed: under its name the folder is whole.
  const fs::path unfinished = name.parent_path() / fmt::format(".{}.unfinished", name.filename().string());
  std::error_code error;
  fs::remove_all(unfinished, error);
  if (!name.parent_path().empty()) fs::create_directories(name.parent_path(), error);
  if (error || !fs::create_directory(unfinished, error))
    fail(Exit::data, "[export] {}: cannot be created: {}", unfinished.string(), error.message());
  try {
    write_folder(unfinished, trained, dtype, tokenizer);
    sync_directory(unfinished);
    rename_path(unfinished, name);
  } catch (...) {
    fs::remove_all(unfinished, error);
    throw;
  }
  const ordered_json result = {{"output", name.string()},
                               {"checkpoint", trained.name()},
                               {"update", trained.checkpoint.state.at("update")},
                               {"parameters", parameter_count(trained.config.model)},
                               {"dtype", options.dtype},
                               {"tokenizer", tokenizer ? ordered_json(tokenizer->path.string()) : ordered_json()}};
  fmt::print("{}\n", json_text(result, 2));
  return static_cast<int>(Exit::ok);
}

}  // namespace rownorm
