// Kernels: grids, blocks, barriers, warps. One fiber a CUDA thread, one block at a time.
#include "engine.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "shim.h"

// Declared const for kernels; here they follow the thread that runs.
extern "C" {
uint3 standin_thread_index asm("threadIdx"), standin_block_index asm("blockIdx");
dim3 standin_block_dim asm("blockDim"), standin_grid_dim asm("gridDim");
int standin_warp_size asm("warpSize") = 32;
}

namespace standin {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr int max_threads = 1024;
constexpr std::size_t static_limit = 48 << 10, total_limit = 227 << 10;  // shared memory a block, sm_90
constexpr std::size_t page = 4096;
#if defined(STANDIN_ASAN) || defined(STANDIN_TSAN)
constexpr std::size_t stack_size = 256 << 10;
#else
constexpr std::size_t stack_size = 64 << 10;
#endif
#ifdef STANDIN_TSAN
// Neighbouring blocks run on different contexts, so that nothing orders them; a context keeps its stack.
constexpr int sets = 3;
#else
constexpr int sets = 1;
#endif

enum class State : std::uint8_t { fresh, ready, at_barrier, at_warp, done };

struct Fiber {
  fcontext_t context = nullptr;  // null: never entered
  char* stack = nullptr;         // lowest address
  void* fake_stack = nullptr;    // AddressSanitizer's
  void* tsan = nullptr;
};

struct Thread {
  State state = State::fresh;
  int rank = 0;
  uint3 index{};
  Fiber* fiber = nullptr;
  WarpCall* call = nullptr;
  int vote = 0;  // result of the last barrier
};

// cp.async of a thread: a queue in order, and the number of copies in each committed group and in the open one. Rings,
// as ThreadSanitizer would see a memmove by threads of different blocks.
struct Copies {
  static constexpr unsigned size = 64;
  unsigned copy_begin = 0, copy_end = 0, group_begin = 0, group_end = 0;
  int group_copies[size]{}, open = 0;
  Copy copy[size]{};
};

struct SharedArray {
  const void* key;  // null: the dynamic one
  Buffer buffer;
  std::size_t block;  // for which it has been filled
};

struct Engine {
  const Grid* grid = nullptr;
  Thread threads[max_threads];
  std::vector<Copies> copies = std::vector<Copies>(max_threads);
  int order[max_threads];  // of the threads; the lanes of a warp follow one another
  int warp_begin[32];      // where in it
  int warp_calls[32];      // lanes of a warp that wait in collectives
  std::uint32_t warp_alive[32];
  bool turns = false;  // threads take turns, else a warp runs as far as it can
  Thread* now = nullptr;
  int count = 0, alive = 0, arrived = 0, cursor = 0;
  std::uint64_t random = 1;
  Vote vote = Vote::none;  // the barrier under way
  const char* file = nullptr;
  int line = 0, votes = 0;
  std::size_t block = 0;  // number of blocks begun
  std::vector<SharedArray> shared;
  Fiber fibers[sets][max_threads];
  std::vector<Fiber*> idle;
  Fiber* entered = nullptr;  // the fiber that a first jump enters
  Fiber host;
  std::size_t host_stack_size = 0;
  int calls = 0;                          // threads that wait in a warp's collective
  void *start = nullptr, *end = nullptr;  // of the grid: addresses that order memory
  char fences = 0;
  // ThreadSanitizer: shared memory never seen before by any block
  char *arena = nullptr, *arena_next = nullptr;
};

Engine& engine() {
  static Engine* e = new Engine;  // never destroyed: kernels may run while the process ends
  return *e;
}

unsigned next_random(Engine& e) {  // xorshift64*
  e.random ^= e.random >> 12;
  e.random ^= e.random << 25;
  e.random ^= e.random >> 27;
  return static_cast<unsigned>(e.random * 0x2545f4914f6cdd1dULL >> 32);
}

// ---- Fibers
void fiber_main(transfer_t from);

void make_fiber(Fiber& fiber) {
  if (fiber.stack != nullptr) return;
  void* p =
      mmap(nullptr, stack_size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED || mprotect(p, page, PROT_NONE) != 0) stop("no memory for stacks");
  fiber.stack = static_cast<char*>(p) + page;
  fiber.context = make_fcontext(fiber.stack + stack_size, stack_size, fiber_main);
  fiber.tsan = tsan::create();
}

Fiber* take_fiber(Engine& e, const Thread& t) {
  if (sets > 1) return &e.fibers[e.block % sets][t.rank];
  if (!e.idle.empty()) {
    Fiber* fiber = e.idle.back();
    e.idle.pop_back();
    return fiber;
  }
  Fiber* fiber =
      std::find_if(e.fibers[0], e.fibers[0] + max_threads, [](const Fiber& f) { return f.stack == nullptr; });
  make_fiber(*fiber);
  return fiber;
}

void before_jump([[maybe_unused]] Engine& e, [[maybe_unused]] Fiber& from, Fiber& to) {
#ifdef STANDIN_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, &to == &e.host ? e.host_stack_size : stack_size);
#endif
  tsan::enter(to.tsan);
}

void after_jump([[maybe_unused]] Fiber& to, transfer_t from) {
  *static_cast<fcontext_t*>(from.data) = from.fctx;
#ifdef STANDIN_ASAN
  __sanitizer_finish_switch_fiber(to.fake_stack, nullptr, nullptr);
#endif
}

void jump(Engine& e, Fiber& from, Fiber& to) {
  before_jump(e, from, to);
  e.entered = &to;
  after_jump(from, jump_fcontext(to.context, &from.context));
}

// ---- The order of threads
// The next one that can run. A warp runs as far as it can before the next one does, or, in every second block of random
// order, threads take turns and are now and then passed over.
Thread* pick(Engine& e) {
  Thread* passed = nullptr;
  for (int step = 0; step < e.count; ++step) {
    Thread& t = e.threads[e.order[e.cursor]];
    if (++e.cursor == e.count) e.cursor = 0;
    if (t.state != State::fresh && t.state != State::ready) continue;
    if (!e.turns || passed != nullptr || next_random(e) % 8 != 0) return &t;
    passed = &t;
  }
  return passed;
}

void make_order(Engine& e) {
  const auto arrange = [&](int* begin, int* end, int first) {
    std::iota(begin, end, first);
    if (mode().order == Order::reversed) std::reverse(begin, end);
    if (mode().order == Order::random)
      for (std::ptrdiff_t i = end - begin; i > 1; --i) std::swap(begin[i - 1], begin[next_random(e) % i]);
  };
  const int count = (e.count + 31) / 32;
  int warps[32], at = 0;
  arrange(warps, warps + count, 0);
  for (int i = 0; i < count; ++i) {
    const int lanes = std::min(32, e.count - 32 * warps[i]);
    arrange(e.order + at, e.order + at + lanes, 32 * warps[i]);
    e.warp_begin[warps[i]] = at;
    at += lanes;
  }
}

[[noreturn]] void stop_at_deadlock(Engine& e) {
  std::string where;
  for (int i = 0; i < e.count && where.size() < 300; ++i) {
    const Thread& t = e.threads[i];
    if (t.state == State::at_warp && t.call != nullptr && where.empty())
      where = "thread " + std::to_string(i) + " waits at " + t.call->file + ":" + std::to_string(t.call->line) +
              " for lanes of mask " + std::to_string(t.call->mask) + " that never come there";
  }
  if (e.arrived > 0)
    where += (where.empty() ? "" : ", ") + std::to_string(e.arrived) + " of " + std::to_string(e.alive) +
             " threads wait in __syncthreads at " + e.file + ":" + std::to_string(e.line);
  stop("deadlock: %s", where.c_str());
}

void set_now(Engine& e, Thread& t) {
  e.now = &t;
  standin_thread_index = t.index;
}

void start(Engine& e, Thread& t) {
  if (t.state == State::fresh) t.fiber = take_fiber(e, t);
  t.state = State::ready;
}

// Lets others run until this thread can go on.
void yield(Engine& e) {
  Thread& me = *e.now;
  Thread* next = pick(e);
  if (next == nullptr) stop_at_deadlock(e);
  if (next != &me) {
    start(e, *next);
    set_now(e, *next);
    jump(e, *me.fiber, *next->fiber);
  }
  me.state = State::ready;
}

// ---- Memory order of a group of threads that have met: each after all of them.
template <class Each>
void meet([[maybe_unused]] Engine& e, [[maybe_unused]] Each each) {
#ifdef STANDIN_TSAN
  void* token = std::malloc(8);  // a fresh address: none of its history
  each([&](Thread& t) {
    tsan::enter(t.fiber->tsan);
    tsan::release(token);
  });
  each([&](Thread& t) {
    tsan::enter(t.fiber->tsan);
    tsan::acquire(token);
  });
  tsan::enter(e.now->fiber->tsan);
  std::free(token);
#endif
}

void open_barrier(Engine& e) {
  const int result = e.vote == Vote::all ? e.votes == e.arrived : e.vote == Vote::any ? e.votes > 0 : e.votes;
  meet(e, [&](auto each) {
    for (int i = 0; i < e.count; ++i)
      if (Thread& t = e.threads[i]; t.state == State::at_barrier) each(t);
  });
  for (int i = 0; i < e.count; ++i) {
    Thread& t = e.threads[i];
    if (t.state != State::at_barrier) continue;
    t.state = State::ready;
    t.vote = result;
  }
  e.arrived = e.votes = e.cursor = 0;
}

// ---- Warps
float bf16(std::uint32_t pair, int half) { return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xffff0000u); }

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type", .bf16; element i of a fragment.
void compute_mma(WarpCall* const (&calls)[32]) {
  float A[16][16], B[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
      const int col = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
      A[row][col] = bf16(calls[lane]->a[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) B[in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)][group] = bf16(calls[lane]->b[i / 2], i % 2);
  }
  float D[16][8] = {};
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) D[m][n] += A[m][k] * B[k][n];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 4; ++i) calls[lane]->d[i] += D[i < 2 ? group : group + 8][in_group * 2 + (i & 1)];
  }
}

// PTX ISA, ldmatrix: lane 8j + i holds row i of matrix j; register j of a lane gets the two elements of matrix j that
// begin at row lane / 4, column 2 (lane % 4); with .trans those of the transposed matrix.
void compute_ldmatrix(WarpCall* const (&calls)[32], bool transposed) {
  for (int j = 0; j < 4; ++j) {
    std::uint16_t m[8][8];
    for (int i = 0; i < 8; ++i) std::memcpy(m[i], calls[8 * j + i]->row, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, col = 2 * (lane % 4);
      const std::uint32_t low = transposed ? m[col][row] : m[row][col];
      const std::uint32_t high = transposed ? m[col + 1][row] : m[row][col + 1];
      calls[lane]->r[j] = low | high << 16;
    }
  }
}

// Programming Guide, "Warp Shuffle Functions": the lane that is read, within segments of `width`.
int shuffle_source(const WarpCall& call, int lane) {
  const int segment = lane & ~(call.width - 1);
  switch (call.kind) {
    case Collective::shuffle:
      return segment + (call.lane & (call.width - 1));
    case Collective::shuffle_up:
      return lane - call.lane < segment ? lane : lane - call.lane;
    case Collective::shuffle_down:
      return lane + call.lane >= segment + call.width ? lane : lane + call.lane;
    default:  // a later segment is not read, an earlier one is
      return (lane ^ call.lane) >= segment + call.width ? lane : lane ^ call.lane;
  }
}

void compute_values(WarpCall* const (&calls)[32], Collective kind) {
  std::uint64_t value[32], result = 0;
  bool first = true, every = true;
  for (int lane = 0; lane < 32; ++lane) {
    if (calls[lane] == nullptr) continue;
    const std::uint64_t x = value[lane] = calls[lane]->value;
    const auto less = [&](std::uint64_t a, std::uint64_t b) {
      return calls[lane]->is_signed ? static_cast<std::int64_t>(a) < static_cast<std::int64_t>(b) : a < b;
    };
    every = every && x != 0;
    if (kind == Collective::ballot) result |= x << lane;
    if (kind == Collective::any) result |= x;
    if (kind == Collective::add) result += x;
    if (kind == Collective::min && (first || less(x, result))) result = x;
    if (kind == Collective::max && (first || less(result, x))) result = x;
    first = false;
  }
  if (kind == Collective::all) result = every ? 1 : 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (calls[lane] == nullptr) continue;
    if (kind < Collective::shuffle || kind > Collective::shuffle_xor) {
      calls[lane]->value = result;
      continue;
    }
    const int source = shuffle_source(*calls[lane], lane);  // a lane that takes no part has an undefined value
    calls[lane]->value = source >= 0 && source < 32 && calls[source] != nullptr ? value[source] : ~std::uint64_t{0};
  }
}

// Computes the call that `lane` waits in, if all of its lanes are there.
bool finish_call(Engine& e, int first, int lane) {
  const WarpCall& call = *e.threads[first + lane].call;
  const int w = first / 32;
  if (e.warp_calls[w] < std::popcount(call.mask & e.warp_alive[w])) return false;
  const bool whole = call.kind >= Collective::mma;  // .aligned: the whole warp, the same instruction
  WarpCall* calls[32] = {};
  for (int i = 0; i < 32; ++i) {
    if ((call.mask >> i & 1) == 0) continue;
    Thread* t = first + i < e.count ? &e.threads[first + i] : nullptr;
    if (t == nullptr || t->state == State::done) {
      if (whole) stop("mma or ldmatrix at %s:%d without lane %d of its warp", call.file, call.line, i);
      continue;
    }
    if (t->call == nullptr) return false;
    if (t->call->kind != call.kind || t->call->mask != call.mask || (whole && t->call->line != call.line)) {
      if ((t->call->mask >> lane & 1) == 0) return false;  // it may still come here
      stop("lanes %d and %d of a warp meet in different calls: %s:%d with mask %08x, %s:%d with mask %08x", lane, i,
           call.file, call.line, call.mask, t->call->file, t->call->line, t->call->mask);
    }
    calls[i] = t->call;
  }
  const Collective kind = call.kind;
  if (kind == Collective::sync)
    meet(e, [&](auto each) {
      for (int i = 0; i < 32; ++i)
        if (calls[i] != nullptr) each(e.threads[first + i]);
    });
  else if (kind == Collective::mma)
    compute_mma(calls);
  else if (whole)
    compute_ldmatrix(calls, kind == Collective::ldmatrix_trans);
  else
    compute_values(calls, kind);
  for (int i = 0; i < 32; ++i) {
    if (calls[i] == nullptr) continue;
    e.threads[first + i].call = nullptr;
    e.threads[first + i].state = State::ready;
    --e.warp_calls[w];
  }
  if (!e.turns) e.cursor = e.warp_begin[w];
  return true;
}

// ---- The end of a thread
void finish_thread(Engine& e) {
  Thread& me = *e.now;
  tsan::release(e.end);
  me.state = State::done;
  --e.alive;
  if (e.alive > 0 && e.arrived == e.alive) open_barrier(e);
  const int lane = me.rank % 32, first = me.rank - lane;
  e.warp_alive[first / 32] &= ~(1u << lane);
  for (int i = 0; e.warp_calls[first / 32] > 0 && i < 32 && first + i < e.count;
       ++i) {  // those that waited for this lane alone
    const Thread& t = e.threads[first + i];
    if (t.call != nullptr && (t.call->mask >> lane & 1) != 0) finish_call(e, first, i);
  }
}

void fiber_main(transfer_t from) {
  Engine& e = engine();
  Fiber& fiber = *e.entered;
  after_jump(fiber, from);
  for (;;) {
    tsan::acquire(e.start);
    (*e.grid->body)();
    finish_thread(e);
    Thread* next = pick(e);
    if (next == nullptr && e.alive > 0) stop_at_deadlock(e);
    if (next != nullptr) set_now(e, *next);
    if (sets == 1 && next != nullptr && next->state == State::fresh) {  // no switch needed
      next->state = State::ready;
      next->fiber = &fiber;
      continue;
    }
    if (sets == 1) e.idle.push_back(&fiber);
    if (next != nullptr) start(e, *next);
    jump(e, fiber, next == nullptr ? e.host : *next->fiber);
  }
}

// ---- Names
// Of a kernel, as C++ writes it. Kernels have internal linkage, so that dladdr knows only the file that they are in;
// the file's own symbol table knows them by address (System V ABI, "Symbol Table").
std::string kernel_name(const void* kernel) {
  Dl_info info{};
  if (dladdr(kernel, &info) == 0) return "?";
  const int file = open(info.dli_fname, O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (file < 0 || fstat(file, &status) != 0) return "?";
  void* mapped = mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return "?";
  const auto unmap = [&](void* p) { munmap(p, static_cast<std::size_t>(status.st_size)); };
  const std::unique_ptr<void, decltype(unmap)> owned(mapped, unmap);
  const auto* content = static_cast<const char*>(mapped);
  const auto& header = *static_cast<const Elf64_Ehdr*>(mapped);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(content + header.e_shoff);
  const auto address = reinterpret_cast<std::uintptr_t>(kernel) -
                       (header.e_type == ET_DYN ? reinterpret_cast<std::uintptr_t>(info.dli_fbase) : std::uintptr_t{0});
  for (const Elf64_Shdr* table = sections; table < sections + header.e_shnum; ++table) {
    if (table->sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(content + table->sh_offset);
    const auto* end = symbols + table->sh_size / sizeof(Elf64_Sym);
    const auto* found = std::find_if(symbols, end, [&](const Elf64_Sym& s) {
      return s.st_value == address && ELF64_ST_TYPE(s.st_info) == STT_FUNC;
    });
    if (found == end) continue;
    const char* mangled = content + sections[table->sh_link].sh_offset + found->st_name;
    const std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr),
                                                      std::free);
    return name == nullptr ? mangled : name.get();
  }
  return "?";
}

// ROWNORM_STANDIN_KERNELS=FILE: a line at a kernel's first launch in this process, its name and, behind a tab, the
// command line. Programs that run at the same time append to the same file.
void note_launch(const void* kernel) {
  static const char* const path = std::getenv("ROWNORM_STANDIN_KERNELS");
  static std::set<const void*> noted;
  if (path == nullptr || !noted.insert(kernel).second) return;
  std::ifstream command("/proc/self/cmdline", std::ios::binary);
  std::string words{std::istreambuf_iterator<char>(command), {}};
  std::replace(words.begin(), words.end(), '\0', ' ');
  const std::string line = kernel_name(kernel) + '\t' + words + '\n';
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0 || write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    stop("ROWNORM_STANDIN_KERNELS: cannot write to %s", path);
  close(file);
}

// ---- Blocks
void run_block(Engine& e, std::size_t block) {
  const Grid& g = *e.grid;
  ++e.block;
  standin_block_index = {static_cast<unsigned>(block % g.grid.x), static_cast<unsigned>(block / g.grid.x % g.grid.y),
                         static_cast<unsigned>(block / g.grid.x / g.grid.y)};
  for (int i = 0; i < e.count; ++i) {
    Thread& t = e.threads[i];
    const auto rank = static_cast<unsigned>(i);
    t.state = State::fresh;
    t.rank = i;
    t.index = {rank % g.block.x, rank / g.block.x % g.block.y, rank / g.block.x / g.block.y};
    t.fiber = nullptr;
    t.call = nullptr;
    Copies& c = e.copies[static_cast<std::size_t>(i)];
    c.copy_begin = c.copy_end = c.group_begin = c.group_end = 0;
    c.open = 0;
  }
  e.alive = e.count;
  e.arrived = 0;
  for (int w = 0; w < 32; ++w) {
    const int lanes = std::clamp(e.count - 32 * w, 0, 32);
    e.warp_alive[w] = lanes == 32 ? ~0u : (1u << lanes) - 1;
    e.warp_calls[w] = 0;
  }
  if (mode().order == Order::random) make_order(e);
  e.turns = mode().order == Order::random && e.block % 2 == 0;
  e.cursor = 0;
#ifdef STANDIN_TSAN
  constexpr std::size_t arena_size = 16 << 20;
  if (e.arena == nullptr || e.arena_next + 2 * total_limit > e.arena + arena_size) {  // mapping anew forgets accesses
    e.arena = e.arena_next =
        static_cast<char*>(mmap(e.arena, arena_size, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | (e.arena == nullptr ? 0 : MAP_FIXED), -1, 0));
    tsan::release(e.start);
  }
#endif
  Thread* first = pick(e);
  start(e, *first);
  set_now(e, *first);
  jump(e, e.host, *first->fiber);
  e.now = nullptr;
  for (const SharedArray& s : e.shared)
    if (sets == 1 && !intact(s.buffer))
      stop("a write past the ends of an array in shared memory (%zu bytes)", s.buffer.size);
}

}  // namespace

#ifdef STANDIN_ASAN
static const std::pair<char*, std::size_t>& host_stack() {  // lowest address, size; glibc reads /proc for it
  thread_local const std::pair<char*, std::size_t> stack = [] {
    pthread_attr_t attributes;
    void* lowest = nullptr;
    std::size_t size = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &lowest, &size);
    pthread_attr_destroy(&attributes);
    return std::pair(static_cast<char*>(lowest), size);
  }();
  return stack;
}
#endif

bool in_kernel() { return engine().now != nullptr; }

void run(const Grid& grid) {
  Engine& e = engine();
  note_launch(grid.kernel);
  e.grid = &grid;
  e.count = static_cast<int>(grid.block.x * grid.block.y * grid.block.z);
  e.random = e.random * 31 + mode().seed;
  if (e.random == 0) e.random = 1;
  standin_block_dim = grid.block;
  standin_grid_dim = grid.grid;
  e.host.tsan = tsan::current();
#ifdef STANDIN_ASAN
  e.host.stack = host_stack().first;
  e.host_stack_size = host_stack().second;
#endif
  const std::unique_ptr<char[]> tokens(new char[16]);
  e.start = tokens.get();
  e.end = tokens.get() + 8;
  tsan::release(e.start);
  if (sets > 1)  // here: a context made by a CUDA thread would follow what that thread has done
    for (Fiber(&set)[max_threads] : e.fibers) std::for_each(set, set + e.count, make_fiber);
  make_order(e);
  const std::size_t blocks = std::size_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  const std::size_t count = mode().ends == 0 ? blocks : std::min(blocks, 2 * mode().ends);  // that run
  std::vector<std::size_t> order(mode().order == Order::random ? count : 0);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random(e) % i]);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = !order.empty() ? order[i] : mode().order == Order::reversed ? count - 1 - i : i;
    run_block(e, at < (count + 1) / 2 ? at : blocks - count + at);
  }
  tsan::acquire(e.end);
  for (SharedArray& s : e.shared)
    if (sets == 1) drop_buffer(s.buffer);
  e.shared.clear();
  check_guards("a kernel");
  e.grid = nullptr;
}

void stop(const char* format, ...) {
  char line[800];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  const Engine& e = engine();
  std::fprintf(stderr, "[standin] %s", line);
  if (e.grid != nullptr) {
    std::fprintf(stderr, " [kernel %s, grid %u x %u x %u of %u x %u x %u", kernel_name(e.grid->kernel).c_str(),
                 e.grid->grid.x, e.grid->grid.y, e.grid->grid.z, e.grid->block.x, e.grid->block.y, e.grid->block.z);
    if (e.now != nullptr)
      std::fprintf(stderr, ", block %u %u %u, thread %u %u %u", standin_block_index.x, standin_block_index.y,
                   standin_block_index.z, standin_thread_index.x, standin_thread_index.y, standin_thread_index.z);
    std::fputc(']', stderr);
  }
  std::fputc('\n', stderr);
  std::abort();
}

// ---- What kernels call
bool dropped(const char* file, int line) {
  return mode().drop_line != 0 && line == mode().drop_line && std::string_view(file).ends_with(mode().drop_file);
}

void* shared_array(const void* key, std::size_t bytes) {
  Engine& e = engine();
  auto at = std::find_if(e.shared.begin(), e.shared.end(), [&](const SharedArray& s) { return s.key == key; });
  if (at == e.shared.end()) {
    std::size_t arrays = 0;
    for (const SharedArray& s : e.shared) arrays += s.key == nullptr ? 0 : s.buffer.size;
    if (key != nullptr) arrays += bytes;
    if (arrays > static_limit) stop("%zu bytes of shared arrays, 48 KB is the limit", arrays);
    if (arrays + e.grid->smem > std::min(std::max(static_limit, e.grid->smem_limit + arrays), total_limit))
      stop(
          "%zu bytes of dynamic shared memory beside %zu of arrays: 48 KB together, or as the attribute allows, at "
          "most "
          "227 KB",
          e.grid->smem, arrays);
    at = e.shared.insert(e.shared.end(), {key, {}, 0});
  }
  if (at->block != e.block) {
    at->block = e.block;
#ifdef STANDIN_TSAN
    at->buffer = {e.arena_next, bytes};
    e.arena_next += (bytes + 15) / 16 * 16;
#else
    if (at->buffer.data == nullptr) at->buffer = make_buffer(bytes, 16);
#endif
    fill_fresh(at->buffer.data, bytes);
  }
  return at->buffer.data;
}

void* dynamic_shared() { return shared_array(nullptr, engine().grid->smem); }

int barrier(Vote vote, int predicate, const char* file, int line) {
  Engine& e = engine();
  if (dropped(file, line)) return 0;
  if (e.arrived == 0) {
    e.vote = vote;
    e.file = file;
    e.line = line;
  } else if (e.vote != vote || e.line != line || std::strcmp(e.file, file) != 0) {
    stop("divergent barrier: this thread is at %s:%d, others wait at %s:%d", file, line, e.file, e.line);
  }
  Thread& me = *e.now;
  me.state = State::at_barrier;
  ++e.arrived;
  if (predicate != 0) ++e.votes;
  if (e.arrived == e.alive) open_barrier(e);
  yield(e);
  return me.vote;
}

void fence() {
  Engine& e = engine();
  tsan::acquire(&e.fences);
  tsan::release(&e.fences);
}

void warp(WarpCall& call) {
  if (call.kind == Collective::sync && dropped(call.file, call.line)) return;
  Engine& e = engine();
  Thread& me = *e.now;
  const int lane = me.rank % 32;
  if ((call.mask >> lane & 1) == 0)
    stop("lane %d is not in its own mask %08x at %s:%d", lane, call.mask, call.file, call.line);
  if (call.width < 1 || call.width > 32 || (call.width & (call.width - 1)) != 0)
    stop("width %d of a shuffle at %s:%d, expected 1, 2, 4, 8, 16 or 32", call.width, call.file, call.line);
  me.call = &call;
  ++e.warp_calls[me.rank / 32];
  if (finish_call(e, me.rank - lane, lane)) return;
  me.state = State::at_warp;
  yield(e);
}

bool late_copies() { return mode().late_copies; }

static Copies& copies_of_this_thread() {
  Engine& e = engine();
  return e.copies[static_cast<std::size_t>(e.now->rank)];
}

void queue_copy(const Copy& copy) {
  Copies& me = copies_of_this_thread();
  if (me.copy_end - me.copy_begin == Copies::size)
    stop("more than 64 copies of a thread under way: the stand-in's limit");
  me.copy[me.copy_end++ % Copies::size] = copy;
  ++me.open;
}

void commit_copies() {
  Copies& me = copies_of_this_thread();
  if (me.group_end - me.group_begin == Copies::size) {  // the two oldest become one
    const int oldest = me.group_copies[me.group_begin++ % Copies::size];
    me.group_copies[me.group_begin % Copies::size] += oldest;
  }
  me.group_copies[me.group_end++ % Copies::size] = me.open;
  me.open = 0;
}

bool next_copy(int groups_left, Copy& copy) {
  Copies& me = copies_of_this_thread();
  const auto waits = [&] { return me.group_end - me.group_begin > static_cast<unsigned>(groups_left); };
  while (waits() && me.group_copies[me.group_begin % Copies::size] == 0) ++me.group_begin;
  if (!waits()) return false;
  copy = me.copy[me.copy_begin++ % Copies::size];
  --me.group_copies[me.group_begin % Copies::size];
  return true;
}

void check_copy(const void* shared, const void* global) {
  const Engine& e = engine();
  if (reinterpret_cast<std::uintptr_t>(shared) % 16 != 0 || reinterpret_cast<std::uintptr_t>(global) % 16 != 0)
    stop("cp.async from %p to %p, which are not both aligned to 16", global, shared);
  const auto* p = static_cast<const char*>(shared);
  if (std::none_of(e.shared.begin(), e.shared.end(),
                   [&](const SharedArray& s) { return p >= s.buffer.data && p + 16 <= s.buffer.data + s.buffer.size; }))
    stop("cp.async to %p, which is not in shared memory", shared);
  if (global == nullptr) return;
  const Region source = find(global);
  if (source.place == Place::host || source.left < 16) stop("cp.async from %p, which is not in global memory", global);
}

}  // namespace standin
