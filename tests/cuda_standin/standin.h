// What a test says to the stand-in: how the device behaves. ROWNORM_STANDIN in the environment sets the first mode,
// e.g. ROWNORM_STANDIN=random=7,lazy,late (forward | reversed | random=SEED, eager | lazy, early | late, nan | huge |
// low, memory=GIB). ROWNORM_STANDIN_KERNELS=FILE has the names of launched kernels appended to FILE.
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
  bool late_copies = false;      // cp.async copies at the wait, not at once
  Fill fill = Fill::nan;
  std::size_t memory = std::size_t{80} << 30;  // of the device, bytes
  // A planted fault: __syncthreads, __syncwarp or cp_async_wait of this line is not there. The end of a path; 0: none.
  std::string drop_file{};
  int drop_line = 0;
};
Mode& mode();

struct Live {
  std::size_t device, pinned, streams, events, handles, bytes;
};
Live live();  // what has not been released; anything left when the process ends is reported and fails it

}  // namespace standin
