// What a test says to the stand-in: how the device behaves. ROWNORM_STANDIN in the environment sets the first mode,
// e.g. ROWNORM_STANDIN=random=7,lazy,late (forward | reversed | random=SEED, eager | lazy | ahead, early | late, nan |
// huge | low, memory=GIB, ends=BLOCKS, devices=COUNT, first_device=NUMBER, no_code). ROWNORM_STANDIN_KERNELS=FILE has
// the names of launched kernels appended to FILE.
#pragma once
#include <cstddef>
#include <string>

namespace standin {

enum class Order { forward, reversed, random };

// What memory holds before it is written, each byte: NaN in every format, or, as a maximum drops NaNs and so does a
// minimum, the numbers 3.4e38 and -1.7e38.
enum class Fill : unsigned char { nan = 0xff, huge = 0x7f, low = 0xfe };

struct Mode {
  Order order = Order::forward;  // of the blocks of a grid and of the threads of a block
  unsigned seed = 1;             // of random
  bool lazy = false;             // streams work only when the host waits for them
  bool ahead = false;            // lazy, but streams made with a priority work at once: ahead of all others
  bool late_copies = false;      // cp.async copies at the wait, not at once
  Fill fill = Fill::nan;
  std::size_t memory = std::size_t{80} << 30;  // of the device, bytes
  // Of each grid only the first and the last `ends` blocks run; 0: all. For the addresses of tensors that are too large
  // to be worked on whole.
  std::size_t ends = 0;
  int devices = 1;       // that this process sees
  int first_device = 0;  // which of the machine's is its number 0
  bool no_code = false;  // the module has no code for it
  // A planted fault: __syncthreads, __syncwarp or cp_async_wait of this line is not there. The end of a path; 0: none.
  std::string drop_file{};
  int drop_line = 0;
  // Others, each of the N-th call of its kind in this process, from 1 on; 0: none.
  int no_wait = 0;      // cudaStreamWaitEvent does nothing
  int skip = 0;         // a collective of NCCL does nothing, on this rank
  int twice = 0;        // ncclReduce, made twice (on all ranks, or they do not meet)
  int async_error = 0;  // from the N-th collective on, NCCL says that the communicator has failed, on this rank
  int flip = 0;         // of the result of a collective one bit is wrong, on this rank
};
Mode& mode();

struct Live {
  std::size_t device, pinned, streams, events, handles, bytes;
};
// How often the host has waited for work that was not done yet; only in lazy mode is there such work. A test that opens
// a module finds it there by name.
extern "C" std::size_t standin_waits();

Live live();  // what has not been released; anything left when the process ends is reported and fails it

}  // namespace standin
