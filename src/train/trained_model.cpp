#include "train/trained_model.h"

#include "ops/open.h"

namespace rownorm {

TrainedModel find_trained_model(const std::filesystem::path& path) {
  Checkpoint checkpoint = find_checkpoint(path);
  Config config = parse_config(checkpoint.state.at("config").dump(), (checkpoint.path / "state.json").string(), {});
  return {std::move(checkpoint), std::move(config)};
}

std::vector<std::filesystem::path> tokenizers_beside_data(const Config& config) {
  std::vector<std::filesystem::path> found;
  for (const std::string& pattern : {config.data.train, config.data.validation}) {
    const std::filesystem::path path = std::filesystem::path(pattern).parent_path() / "tokenizer.json";
    std::error_code missing;
    if (std::filesystem::exists(path, missing) && (found.empty() || !std::filesystem::equivalent(found[0], path)))
      found.push_back(path);
  }
  return found;
}

LoadedModel load_model(const TrainedModel& model, const std::string& device, const std::string& precision,
                       std::int64_t sequences, const std::function<void(Arena&, const Backend&)>& more) {
  const ModelConfig& m = model.config.model;
  LoadedModel loaded;
  loaded.be = open_backend(device, precision);
  Backend& be = *loaded.be;
  WorkspaceSizes sizes;
  sizes.tokens = sequences * m.context;
  sizes.context = m.context;
  sizes.width = m.width;
  sizes.heads = m.heads();
  sizes.vocab = m.vocab_size;
  Parameters master;
  Tensor workspace;
  loaded.memory = allocate_tensors(be, [&](Arena& arena) {
    master = make_parameters(arena, "weights", m, be.master_dtype());
    loaded.weights =
        be.compute_dtype() == be.master_dtype() ? master : make_parameters(arena, "weights", m, be.compute_dtype());
    loaded.activations =
        make_activations(arena, m, sequences, be.compute_dtype(), be.master_dtype(), Passes::forward, Recompute::none);
    more(arena, be);
    workspace = arena.add("workspace", DType::u8, {be.workspace_bytes(sizes)});
  });
  be.set_workspace(workspace, sizes);
  upload_rope(be, loaded.activations, m);
  load_weights(be, master, m, model.checkpoint.path / "model.safetensors");
  copy(be, loaded.weights, master);
  return loaded;
}

}  // namespace rownorm
