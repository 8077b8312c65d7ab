// The runtime: memory, streams, events. Work of a stream is a queue; eager mode runs it at once, lazy mode when the
// host waits for it, and only what it must (CUDA Runtime API, "Stream synchronization behavior", "API synchronization
// behavior").
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "shim.h"

namespace standin {
namespace {

#ifdef STANDIN_ASAN
constexpr std::size_t guard = 0;
#else
constexpr std::size_t guard = 256;
#endif
constexpr std::size_t huge = std::size_t{1} << 30;  // mapped, not filled: a test may address more than there is
constexpr int guard_byte = 0xff;                    // NaN where it is read

struct Allocation {
  Place place;
  Buffer buffer;
};

struct Stream;

struct Event {
  Stream* stream = nullptr;  // null: never recorded
  std::uint64_t position = 0;
  bool timing = true;
  double time = 0.0;  // ms
  char token = 0;
};

struct After {  // work that comes first: a stream up to a position, and the address that orders memory behind it
  Stream* stream;
  std::uint64_t position;
  void* token;
};

struct Item {
  std::vector<After> after;
  Work work;
};

struct Stream {
  bool blocking = true;  // waits for the default stream, and it for this one
  bool priority = false;
  std::uint64_t begun = 0, done = 0;
  std::deque<Item> items;  // position of the first: done
  void* tsan = nullptr;
  char given = 0, finished = 0;  // addresses that order memory
};

struct State {
  std::recursive_mutex mutex;
  std::map<const char*, Allocation, std::greater<>> allocations;  // by address, descending
  std::size_t device_bytes = 0;
  Stream default_stream;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::map<const void*, std::size_t> smem_limits;
  std::size_t handles = 0;
  std::size_t waits = 0;        // of the host for work that was not done
  std::size_t event_waits = 0;  // calls of cudaStreamWaitEvent
  cudaError_t last = cudaSuccess;
};

State& state() {
  static State* s = [] {
    auto* made = new State;  // never destroyed
    made->default_stream.tsan = tsan::create();
    return made;
  }();
  return *s;
}

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) state().last = error;
  return error;
}

// ---- Leaks, at the end of the process
struct AtEnd {
  ~AtEnd() {
    const Live l = live();
    if (l.device + l.pinned + l.streams + l.events + l.handles == 0) return;
    std::fprintf(stderr,
                 "[standin] leaked: %zu device allocations (%zu bytes), %zu pinned ones, %zu streams, %zu events, %zu "
                 "cuBLASLt objects\n",
                 l.device, l.bytes, l.pinned, l.streams, l.events, l.handles);
    std::fflush(nullptr);
    _exit(86);
  }
} at_end;

// Milliseconds. Not through the C library, where ThreadSanitizer would see a write to the host's stack by a stream.
double now() {
  timespec t{};
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

thread_local int current_device = 0;  // all the same to the stand-in: a process uses one

// ---- Streams
Stream& stream_of(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return state().default_stream;
  auto* s = reinterpret_cast<Stream*>(stream);
  if (!state().streams.contains(s)) stop("a stream that was never created, or has been destroyed");
  return *s;
}

void run_until(Stream& s, std::uint64_t position) {
  while (s.done < position) {
    Item item = std::move(s.items.front());
    s.items.pop_front();
    for (const After& a : item.after) run_until(*a.stream, a.position);
    void* host = tsan::current();
    tsan::enter(s.tsan);
    tsan::acquire(&s.given);
    for (const After& a : item.after) tsan::acquire(a.token);
    item.work();
    item.work = nullptr;  // its memory goes where it was read
    tsan::release(&s.finished);
    tsan::enter(host);
    ++s.done;
  }
}

// The host waits.
void wait_for(Stream& s, std::uint64_t position) {
  if (s.done < position) ++state().waits;
  run_until(s, position);
}

void wait_for(Stream& s) {
  wait_for(s, s.begun);
  tsan::acquire(&s.finished);
}

void wait_for_all() {  // the streams created last first
  for (auto s = state().streams.rbegin(); s != state().streams.rend(); ++s) wait_for(**s);
  wait_for(state().default_stream);
}

void enqueue_item(Stream& s, Item item) {
  if (in_kernel()) stop("a runtime call inside a kernel");
  Stream& first = state().default_stream;
  if (&s == &first) {
    for (Stream* other : state().streams)
      if (other->blocking) item.after.push_back({other, other->begun, &other->finished});
  } else if (s.blocking) {
    item.after.push_back({&first, first.begun, &first.finished});
  }
  s.items.push_back(std::move(item));
  ++s.begun;
  tsan::release(&s.given);
  if (!mode().lazy || (mode().ahead && s.priority)) run_until(s, s.begun);
}

Event& event_of(cudaEvent_t event) {
  auto* e = reinterpret_cast<Event*>(event);
  if (!state().events.contains(e)) stop("an event that was never created, or has been destroyed");
  return *e;
}

// ---- Memory
cudaError_t allocate(void** p, std::size_t size, Place place) {
  State& s = state();
  *p = nullptr;
  if (size == 0) return cudaSuccess;
  if (place == Place::device && size > mode().memory - std::min(mode().memory, s.device_bytes))
    return result(cudaErrorMemoryAllocation);
  const Buffer buffer = make_buffer(size, 256);
  if (buffer.data == nullptr) return result(cudaErrorMemoryAllocation);
  fill_fresh(buffer.data, size);
  s.allocations[buffer.data] = {place, buffer};
  if (place == Place::device) s.device_bytes += size;
  *p = buffer.data;
  return cudaSuccess;
}

cudaError_t release(void* p, Place place, const char* call) {
  State& s = state();
  if (p == nullptr) return cudaSuccess;
  wait_for_all();
  const auto at = s.allocations.find(static_cast<char*>(p));
  if (at == s.allocations.end() || at->second.place != place) stop("%s of %p, which it did not allocate", call, p);
  if (!intact(at->second.buffer)) stop("a write past the ends of an allocation of %zu bytes", at->second.buffer.size);
  if (place == Place::device) s.device_bytes -= at->second.buffer.size;
  drop_buffer(at->second.buffer);
  s.allocations.erase(at);
  return cudaSuccess;
}

void check_range(const void* p, std::size_t size, bool device, const char* call) {
  const Region r = find(p);
  if (device != (r.place == Place::device))
    stop("%s: %p is %s memory, expected the other kind", call, p, r.place == Place::device ? "device" : "host");
  if (r.place != Place::host && size > r.left)
    stop("%s of %zu bytes at %p, where an allocation ends after %zu", call, size, p, r.left);
}

cudaError_t copy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream, bool wait) {
  if (size == 0) return cudaSuccess;
  const bool to_device = find(to).place == Place::device, from_device = find(from).place == Place::device;
  if (kind != cudaMemcpyDefault) {
    check_range(to, size, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
                "cudaMemcpy, destination");
    check_range(from, size, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, "cudaMemcpy, source");
  } else {
    check_range(to, size, to_device, "cudaMemcpy, destination");
    check_range(from, size, from_device, "cudaMemcpy, source");
  }
  Stream& s = stream_of(stream);
  // From pageable memory a copy is staged before the call returns, to pageable memory it ends before.
  if (find(from).place == Place::host && !wait) {
    auto staged =
        std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
    enqueue_item(s, {{}, [=] { std::memcpy(to, staged->data(), size); }});
  } else {
    enqueue_item(s, {{}, [=] { std::memcpy(to, from, size); }});
  }
  if (wait || find(to).place == Place::host) wait_for(s);
  return cudaSuccess;
}

// Pages that are given back read as zeros, and need no memory until they are written.
void clear_pages(char* p, std::size_t size) {
  constexpr std::uintptr_t page = 4096;
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  char* first = p + (address + page - 1) / page * page - address;
  const std::size_t whole = (static_cast<std::size_t>(p + size - first)) / page * page;
  std::memset(p, 0, static_cast<std::size_t>(first - p));
  madvise(first, whole, MADV_DONTNEED);
  std::memset(first + whole, 0, static_cast<std::size_t>(p + size - first) - whole);
}

cudaError_t set(void* p, int value, std::size_t size, cudaStream_t stream) {
  if (size == 0) return cudaSuccess;
  check_range(p, size, true, "cudaMemset");
  enqueue_item(stream_of(stream), {{}, [=] {
                                     if (value == 0 && size >= huge)
                                       clear_pages(static_cast<char*>(p), size);
                                     else
                                       std::memset(p, value, size);
                                   }});
  return cudaSuccess;
}

// The number that a word of ROWNORM_STANDIN ends with.
template <class Number>
Number number_of(const std::string& word, const char* value) {
  Number number{};
  const char* end = value + std::strlen(value);
  const auto [stopped, error] = std::from_chars(value, end, number);
  if (error != std::errc() || stopped != end || number < Number{})
    stop("ROWNORM_STANDIN: %s, expected a number of its range behind =", word.c_str());
  return number;
}

Mode mode_from_environment() {
  Mode m;
  const char* text = std::getenv("ROWNORM_STANDIN");
  std::string rest = text == nullptr ? "" : text;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string word = rest.substr(0, comma);
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
    const std::string key = word.substr(0, word.find('='));
    const char* value = key.size() < word.size() ? word.c_str() + key.size() + 1 : "";
    if (key == "forward")
      m.order = Order::forward;
    else if (key == "reversed")
      m.order = Order::reversed;
    else if (key == "random")
      m.order = Order::random, m.seed = number_of<unsigned>(word, value);
    else if (key == "eager" || key == "lazy" || key == "ahead")
      m.lazy = key != "eager", m.ahead = key == "ahead";
    else if (key == "early" || key == "late")
      m.late_copies = key == "late";
    else if (key == "nan")
      m.fill = Fill::nan;
    else if (key == "huge")
      m.fill = Fill::huge;
    else if (key == "low")
      m.fill = Fill::low;
    else if (key == "drop") {
      const std::string site = value;
      m.drop_file = site.substr(0, site.find(':'));
      m.drop_line = number_of<int>(word, value + site.find(':') + 1);
    } else if (key == "memory")
      m.memory = static_cast<std::size_t>(std::min(number_of<double>(word, value), 0x1p20) * 0x1p30);
    else if (key == "ends")
      m.ends = number_of<std::size_t>(word, value);
    else if (key == "devices")
      m.devices = number_of<int>(word, value);
    else if (key == "first_device")
      m.first_device = number_of<int>(word, value);
    else if (key == "no_wait")
      m.no_wait = number_of<int>(word, value);
    else if (key == "skip")
      m.skip = number_of<int>(word, value);
    else if (key == "twice")
      m.twice = number_of<int>(word, value);
    else if (key == "async_error")
      m.async_error = number_of<int>(word, value);
    else if (key == "no_code")
      m.no_code = true;
    else if (key == "flip")
      m.flip = number_of<int>(word, value);
    else
      stop(
          "ROWNORM_STANDIN: %s, expected forward, reversed, random=SEED, eager, lazy, ahead, early, late, nan, huge, "
          "low, memory=GIB, ends=BLOCKS, devices=COUNT, first_device=NUMBER, no_code, drop=FILE:LINE, no_wait=N, "
          "skip=N, twice=N, async_error=N, flip=N",
          word.c_str());
  }
  return m;
}

}  // namespace

Mode& mode() {
  static Mode m = mode_from_environment();
  return m;
}

std::size_t standin_waits() { return state().waits; }

Live live() {
  const State& s = state();
  Live l{0, 0, s.streams.size(), s.events.size(), s.handles, s.device_bytes};
  for (const auto& [p, a] : s.allocations) ++(a.place == Place::device ? l.device : l.pinned);
  return l;
}

std::recursive_mutex& lock() { return state().mutex; }
void count_handle(int change) { state().handles += static_cast<std::size_t>(change); }

Buffer make_buffer(std::size_t size, std::size_t alignment) {
  if (size >= huge) {
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return {};
    madvise(p, size, MADV_NOHUGEPAGE);  // what is touched here and there stays small
    return {static_cast<char*>(p), size};
  }
  void* p = nullptr;
  if (posix_memalign(&p, alignment, size + 2 * guard) != 0) return {};
  char* data = static_cast<char*>(p) + guard;
  if (guard > 0) std::memset(p, guard_byte, guard);
  if (guard > 0) std::memset(data + size, guard_byte, guard);
  return {data, size};
}

bool intact(const Buffer& buffer) {
  if (guard == 0 || buffer.data == nullptr || buffer.size >= huge) return true;
  for (std::size_t i = 0; i < guard; ++i)
    if (static_cast<unsigned char>(buffer.data[buffer.size + i]) != guard_byte ||
        static_cast<unsigned char>(buffer.data[i - guard]) != guard_byte)
      return false;
  return true;
}

void drop_buffer(Buffer& buffer) {
  if (buffer.size >= huge)
    munmap(buffer.data, buffer.size);
  else
    std::free(buffer.data == nullptr ? nullptr : buffer.data - guard);
  buffer = {};
}

void fill_fresh(void* p, std::size_t size) {
  if (size >= huge) return;
#ifdef STANDIN_TSAN  // memset would count as an access
  for (std::size_t i = 0; i < size; ++i)
    static_cast<volatile unsigned char*>(p)[i] = static_cast<unsigned char>(mode().fill);
#else
  std::memset(p, static_cast<int>(mode().fill), size);
#endif
}

Region find(const void* p) {
  const State& s = state();
  const auto* address = static_cast<const char*>(p);
  const auto at = s.allocations.lower_bound(address);  // the one that begins last at or before it
  if (at == s.allocations.end() || address > at->first + at->second.buffer.size) return {};
  return {at->second.place, static_cast<std::size_t>(at->first + at->second.buffer.size - address)};
}

void check_guards(const char* after) {
  for (const auto& [p, a] : state().allocations)
    if (!intact(a.buffer)) stop("%s wrote past the ends of an allocation of %zu bytes", after, a.buffer.size);
}

std::size_t smem_limit(const void* kernel) {
  const auto at = state().smem_limits.find(kernel);
  return at == state().smem_limits.end() ? 0 : at->second;
}

void check_pointer(const void* p, int parameter) {
  const std::lock_guard<std::recursive_mutex> held(lock());
  if (p != nullptr && find(p).place == Place::host)
    stop("a kernel is given %p as parameter %d: host memory, or freed", p, parameter);
}

void check_words([[maybe_unused]] const void* bytes, [[maybe_unused]] std::size_t size,
                 [[maybe_unused]] int parameter) {
#ifndef STANDIN_TSAN  // whose own memory lies everywhere
  const std::lock_guard<std::recursive_mutex> held(lock());
  for (std::size_t i = 0; i + 8 <= size; i += 8) {
    std::uintptr_t word = 0;
    std::memcpy(&word, static_cast<const char*>(bytes) + i, 8);
    // Where programs and their heaps, libraries and stacks lie on x86-64; numbers there are told apart by msync.
    if (word < 0x550000000000 || word > 0x7fffffffffff) continue;
    const auto* p = reinterpret_cast<const void*>(word);
    if (find(p).place == Place::host && msync(reinterpret_cast<void*>(word / 4096 * 4096), 1, MS_ASYNC) == 0)
      stop("a kernel is given %p inside parameter %d, a struct: host memory, or freed", p, parameter);
  }
#endif
}

cudaError_t enqueue_work(cudaStream_t stream, Work work) {
  enqueue_item(stream_of(stream), {{}, std::move(work)});
  return cudaSuccess;
}

// Compute capability 9.0 (Programming Guide, "Technical Specifications per Compute Capability").
cudaError_t enqueue(Launch launch, cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> held(lock());
  const dim3 b = launch.block, g = launch.grid;
  const std::size_t limit = smem_limit(launch.kernel);
  if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 1024 || b.y > 1024 || b.z > 64 || std::size_t{b.x} * b.y * b.z > 1024 ||
      g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535)
    return result(cudaErrorInvalidConfiguration);
  if (launch.smem > std::max<std::size_t>(limit, 48 << 10)) return result(cudaErrorInvalidValue);
  return enqueue_work(stream, [launch = std::move(launch), limit] {
    run({launch.kernel, launch.grid, launch.block, launch.smem, limit, &launch.body});
  });
}

}  // namespace standin

using namespace standin;
#define HELD const std::lock_guard<std::recursive_mutex> held(lock())

extern "C" {

// ---- Memory
cudaError_t cudaMalloc(void** p, std::size_t size) {
  HELD;
  return allocate(p, size, Place::device);
}
cudaError_t cudaFree(void* p) {
  HELD;
  return release(p, Place::device, "cudaFree");
}
cudaError_t cudaMallocHost(void** p, std::size_t size) {
  HELD;
  return allocate(p, size, Place::pinned);
}
cudaError_t cudaHostAlloc(void** p, std::size_t size, unsigned) { return cudaMallocHost(p, size); }
cudaError_t cudaFreeHost(void* p) {
  HELD;
  return release(p, Place::pinned, "cudaFreeHost");
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind kind) {
  HELD;
  return copy(to, from, size, kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  HELD;
  return copy(to, from, size, kind, stream, false);
}
cudaError_t cudaMemset(void* p, int value, std::size_t size) {
  HELD;
  return set(p, value, size, nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, std::size_t size, cudaStream_t stream) {
  HELD;
  return set(p, value, size, stream);
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  HELD;
  *total = mode().memory;
  *free = mode().memory - std::min(mode().memory, state().device_bytes);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  HELD;
  const Place place = find(p).place;
  *attributes = {};
  attributes->type = place == Place::device   ? cudaMemoryTypeDevice
                     : place == Place::pinned ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
  if (place != Place::host) attributes->devicePointer = const_cast<void*>(p);
  if (place != Place::device) attributes->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}

// ---- Streams
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  HELD;
  auto* s = new Stream;
  s->blocking = flags != cudaStreamNonBlocking;
  s->tsan = tsan::create();
  state().streams.insert(s);
  *stream = reinterpret_cast<cudaStream_t>(s);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const cudaError_t error = cudaStreamCreateWithFlags(stream, flags);
  reinterpret_cast<Stream*>(*stream)->priority = priority < 0;
  return error;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  HELD;
  Stream& s = stream_of(stream);
  if (&s == &state().default_stream) return result(cudaErrorInvalidResourceHandle);
  wait_for_all();  // others may wait for it
  for (Event* e : state().events)
    if (e->stream == &s) e->stream = &state().default_stream, e->position = 0;
  tsan::destroy(s.tsan);
  state().streams.erase(&s);
  delete &s;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  HELD;
  wait_for(stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  HELD;
  Stream& s = stream_of(stream);
  if (s.done < s.begun) return cudaErrorNotReady;
  tsan::acquire(&s.finished);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  HELD;
  Event& e = event_of(event);
  if (++state().event_waits == static_cast<std::size_t>(mode().no_wait)) return cudaSuccess;
  if (e.stream == nullptr) return cudaSuccess;  // never recorded: nothing to wait for
  enqueue_item(stream_of(stream), {{{e.stream, e.position, &e.token}}, [] {}});
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  HELD;
  return enqueue_work(stream, [=] { function(data); });
}
cudaError_t cudaDeviceSynchronize() {
  HELD;
  wait_for_all();
  return cudaSuccess;
}

// ---- Events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  HELD;
  auto* e = new Event;
  e->timing = (flags & cudaEventDisableTiming) == 0;
  state().events.insert(e);
  *event = reinterpret_cast<cudaEvent_t>(e);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  HELD;
  Event& e = event_of(event);
  wait_for_all();
  state().events.erase(&e);
  delete &e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  HELD;
  Event& e = event_of(event);
  Stream& s = stream_of(stream);
  e.stream = &s;
  e.position = s.begun + 1;
  enqueue_item(s, {{}, [&e] {
                     e.time = now();
                     tsan::release(&e.token);
                   }});
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  HELD;
  Event& e = event_of(event);
  if (e.stream == nullptr) return cudaSuccess;
  wait_for(*e.stream, e.position);
  tsan::acquire(&e.token);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  HELD;
  Event& e = event_of(event);
  if (e.stream == nullptr) return cudaSuccess;
  if (e.stream->done < e.position) return cudaErrorNotReady;
  tsan::acquire(&e.token);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  HELD;
  const Event &b = event_of(begin), &e = event_of(end);
  if (b.stream == nullptr || e.stream == nullptr || !b.timing || !e.timing)
    return result(cudaErrorInvalidResourceHandle);
  if (b.stream->done < b.position || e.stream->done < e.position) return cudaErrorNotReady;
  *ms = static_cast<float>(e.time - b.time);
  return cudaSuccess;
}

// ---- The device
cudaError_t cudaGetDeviceCount(int* count) {
  *count = mode().devices;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= mode().devices) return result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= mode().devices) return result(cudaErrorInvalidDevice);
  *p = {};
  p->uuid.bytes[0] = static_cast<char>(mode().first_device + device);
  std::snprintf(p->name, sizeof p->name, "stand-in");
  p->major = 9;
  p->totalGlobalMem = mode().memory;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->multiProcessorCount = 4;
  p->maxThreadsPerMultiProcessor = 2048;
  p->l2CacheSize = 4 << 20;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device); error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    default:
      stop("cudaDeviceGetAttribute(%d): the stand-in does not know it", static_cast<int>(attribute));
  }
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  HELD;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;  // hints
  if (value < 0 || value > 227 << 10) return result(cudaErrorInvalidValue);
  state().smem_limits[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (mode().no_code) return result(cudaErrorNoKernelImageForDevice);
  *attributes = {};
  return cudaSuccess;
}

// ---- Errors
cudaError_t cudaPeekAtLastError() { return state().last; }
cudaError_t cudaGetLastError() { return std::exchange(state().last, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    default:
      return "unrecognized error code";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    default:
      return "unrecognized error code";
  }
}

}  // extern "C"
