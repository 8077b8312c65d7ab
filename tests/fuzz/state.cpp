// A checkpoint's state.json, beside two files that hold "{}" as safetensors.
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "base/temporary_folder.h"
#include "reader.h"
#include "train/checkpoint.h"
#include "train/run_directory.h"

namespace rownorm::fuzz {
namespace {

using nlohmann::ordered_json;

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

const std::string empty_tensors("\x02\0\0\0\0\0\0\0{}", 10);

const TemporaryFolder& checkpoint() {
  static const TemporaryFolder folder;
  static const bool written = [] {
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) write(folder / name, empty_tensors);
    return true;
  }();
  require(written, "no files");
  return folder;
}

}  // namespace

Exit refusal() { return Exit::data; }

void read(std::span<const std::byte> input) {
  write(checkpoint() / "state.json", text_of(input));
  const ordered_json state = read_checkpoint_state(checkpoint().path);
  const RunState run = run_state(state);
  require(run.update >= 0 && run.loss_count >= 0 && run.clipped_count >= 0, "counts");
  require(difference(state.at("dataset"), "at the checkpoint", state.at("dataset"), "now").empty(),
          "differs from itself");
  require(differences_on_resume(state.at("config"), state.at("config")).empty(), "differs from itself");
  differences_on_resume(state.at("config"), ordered_json::parse(R"({"model":{"width":4},"seed":0})"));
  require(!json_text(state, 2).empty(), "no text");
}

// The digests are those of the document and of the two files.
std::string repaired(std::string input) {
  ordered_json state = parse_json(input);
  if (!state.is_object()) return input;
  const ordered_json file = {{"bytes", empty_tensors.size()},
                             {"xxh128", digest(std::as_bytes(std::span(empty_tensors)))}};
  if (state.contains("files") && state["files"].is_object())
    for (auto& said : state["files"]) said = file;
  state.erase("xxh128");
  const std::string text = json_text(state);
  state["xxh128"] = digest(std::as_bytes(std::span(text)));
  return json_text(state);
}

}  // namespace rownorm::fuzz
