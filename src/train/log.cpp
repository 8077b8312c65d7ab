#include "train/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/error.h"

namespace rownorm {
namespace {

bool progress_on_screen = false, errors_only = false, silent = false;

void clear_progress() {
  if (progress_on_screen) std::fputs("\r\x1b[K", stderr);
  progress_on_screen = false;
}

std::string duration(double seconds) {
  const auto s = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e9));
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  return fmt::format("{}h{:02}m", s / 3600, s / 60 % 60);
}

}  // namespace

void start_log() {
  auto logger = std::make_shared<spdlog::logger>("rownorm", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("[%H:%M:%S] %v");
  spdlog::set_default_logger(logger);
}

void log_errors_only() {
  errors_only = true;
  spdlog::set_level(spdlog::level::err);
}

void log_nothing() {
  log_errors_only();
  silent = true;
}

void log_to_file(const std::filesystem::path& path) {
  if (std::error_code error; std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error))
    fail(Exit::data, "[log] {}: is not a regular file", path.string());
  try {
    auto sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path.string());
    sink->set_pattern("[%Y-%m-%d %H:%M:%S] [%l] %v");
    spdlog::default_logger()->sinks().push_back(sink);
    spdlog::default_logger()->flush_on(spdlog::level::info);
    // A full disk must not stop a run because of its log; what matters is reported where it is written.
    spdlog::default_logger()->set_error_handler([](const std::string&) {});
  } catch (const spdlog::spdlog_ex& e) {
    fail(Exit::data, "[log] {}: {}", path.string(), e.what());
  }
}

void log_line(const std::string& message) {
  clear_progress();
  spdlog::info("{}", message);
}

void log_warning(const std::string& message) {
  clear_progress();
  spdlog::warn("warning: {}", message);
}

void log_error(std::string message) {
  clear_progress();
  // One line whatever the message holds: paths and values may contain anything.
  std::replace_if(
      message.begin(), message.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  try {
    auto& sinks = spdlog::default_logger()->sinks();
    if (sinks.size() > 1) sinks[1]->log({"rownorm", spdlog::level::err, message});
    spdlog::default_logger()->flush();
  } catch (const spdlog::spdlog_ex&) {  // the disk is full, which may be what the message says
  }
  if (!silent) std::fprintf(stderr, "%s\n", message.c_str());
}

std::string describe(const ProgressState& s) {
  std::string rate = s.tokens_per_second >= 1e4 ? fmt::format("{:.1f}k", s.tokens_per_second / 1e3)
                                                : fmt::format("{:.0f}", s.tokens_per_second);
  return fmt::format("update {}/{}  loss {:.4f}  {} tok/s  ETA {}", s.update, s.last_update, s.loss, rate,
                     duration(s.seconds_left));
}

void show_progress(const ProgressState& state) {
  static const bool terminal = isatty(STDERR_FILENO) == 1;
  if (!terminal || errors_only || state.tokens_per_second == 0) return;  // nothing measured yet
  std::fprintf(stderr, "\r\x1b[K%s", describe(state).c_str());
  std::fflush(stderr);
  progress_on_screen = true;
}

}  // namespace rownorm
