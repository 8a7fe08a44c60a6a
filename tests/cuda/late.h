// What the three parts share: the runtime's queues, which NCCL's messages and the kernels are put into.
#pragma once
#include <cuda_runtime_api.h>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#define API extern "C" __attribute__((visibility("default")))

namespace late {
struct Moment;
struct Stream;

struct Op {
  std::function<void()> run;         // without the lock, in the stream's thread
  Stream* on = nullptr;              // waits for this stream
  uint64_t to = 0;                   // until it has done so many
  std::shared_ptr<Moment> moment;    // of an event
  uintptr_t host = 0, host_end = 0;  // host memory that a copy touches
};

struct Stream {
  int device = 0, priority = 0;
  unsigned flags = 0;
  bool has_thread = false;
  std::deque<Op> ops;
  uint64_t queued = 0, done = 0, wanted = 0;
  std::multiset<uint64_t> waited_for;
  std::condition_variable wake, over;
};

using Lock = std::unique_lock<std::mutex>;
std::mutex& mu();
extern thread_local int g_device;
int number(const char* variable, int otherwise);
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void count(const char* what);                        // locked
void touch(const char* what);                        // locked: the current device is used
Stream* as_stream(cudaStream_t stream);              // locked: null if there is none
uint64_t push(Stream* stream, Op op);                // locked: its number
void want(Stream* stream, uint64_t to);              // locked: run it, soon
void wait(Lock& lock, Stream* stream, uint64_t to);  // and wait until that is done
}  // namespace late
