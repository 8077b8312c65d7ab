// Messages for people: stderr, and train.log once a run directory exists. On a terminal a progress line stays at the
// bottom; elsewhere only whole lines are written.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>

namespace rownorm {

void start_log();                                     // stderr only
void log_errors_only();                               // of the ranks the first one speaks
void log_nothing();                                   // errors neither
void log_to_file(const std::filesystem::path& path);  // and appended to this file; Error (exit 3) if it cannot be
void log_line(const std::string& message);
void log_warning(const std::string& message);
// The last line on stderr: the message alone, without a time; with a time in the log file.
void log_error(std::string message);

struct ProgressState {
  std::int64_t update = 0, last_update = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double seconds_left = 0;
};
// Rewrites the progress line on a terminal; does nothing elsewhere.
void show_progress(const ProgressState& state);
// "update 120/1200  loss 4.321  9.8k tok/s  ETA 3m20s"
std::string describe(const ProgressState& state);

}  // namespace rownorm
