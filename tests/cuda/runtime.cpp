// A strict CUDA runtime on the host. Device memory is host memory (NaN when new); the current device is each thread's
// own; pinned memory is a table. What is queued on a stream (kernels, copies, messages) runs as LATE as the program
// allows, in a thread of the stream: when somebody waits for it, or another rank for its message. So a wait that is
// missing gives wrong numbers. Said in stderr, or in the file $LATE_CUDA_LOG: ERROR, FOREIGN, KERNEL NOT RUN.
#include "late.h"
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <unordered_map>

namespace late {
using Clock = std::chrono::steady_clock;
struct Moment {
  bool done = false;
  int asked = 0;
  Clock::time_point at;
};
struct Event {
  int device;
  unsigned flags;
  Stream* stream = nullptr;
  uint64_t at = 0;
  std::shared_ptr<Moment> moment;
};
enum Kind { pinned, device_memory, registered };
struct Range {
  size_t n;
  int device;
  Kind kind;
};

template <class T> T& kept() {  // until the process is over: threads use it while destructors run
  static T* value = new T;
  return *value;
}
std::mutex& mu() { return kept<std::mutex>(); }
struct Streams : std::set<Stream*> {};
struct Events : std::set<Event*> {};
struct Ranges : std::map<uintptr_t, Range> {};
struct Counts : std::map<std::string, long> {};
struct Names : std::unordered_map<const void*, std::string> {};

thread_local cudaError_t g_last = cudaSuccess;
thread_local int g_device = 0;
cudaError_t g_failed = cudaSuccess;  // of a kernel: every wait raises it from then on
std::atomic<bool> g_ending{false};
int g_early = number("LATE_CUDA_EARLY", 0);  // 1: streams run what is queued at once, but for the default one; 2: all
constexpr int MOST = 16;
size_t g_used[MOST];
bool g_context[MOST];

int number(const char* variable, int otherwise) {
  const char* v = getenv(variable);
  return v && *v ? atoi(v) : otherwise;
}
int device_count() { static int n = number("LATE_CUDA_DEVICES", 4); return n; }
size_t total_memory() { static size_t n = size_t(number("LATE_CUDA_GIB", 80)) << 30; return n; }

void say(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  const char* path = getenv("LATE_CUDA_LOG");
  FILE* out = path ? fopen(path, "a") : nullptr;
  fprintf(out ? out : stderr, "[late_cuda %d] %s\n", getpid(), text);
  if (out) fclose(out);
}
cudaError_t ret(cudaError_t e) { if (e) g_last = e; return e; }
cudaError_t bad(cudaError_t e, const char* what) { say("ERROR %d (%s)", int(e), what); return ret(e); }
void count(const char* what) { kept<Counts>()[what]++; }

bool is_thread(const char* prefix) {
  char name[17] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return !strncmp(name, prefix, strlen(prefix));
}
void touch(const char* what) {
  g_context[g_device] = true;
  static const char* local = getenv("LATE_CUDA_HOME");  // "local": each rank owns the GPU of its number on this host
  static int home = !local ? -1 : !strcmp(local, "local") ? number("LOCAL_RANK", 0) : atoi(local);
  if (home < 0 || g_device == home || is_thread("pt_nccl")) return;  // torch's own go back to GPU 0 behind their guard
  if (kept<Counts>()["on a GPU that this process does not own"]++ > 5) return;
  char thread[17] = "";
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  say("FOREIGN %s on device %d by thread %s: this process owns %d", what, g_device, thread, home);
}

Range* find(const void* p, uintptr_t* end = nullptr) {
  auto a = uintptr_t(p);
  auto it = kept<Ranges>().upper_bound(a);
  if (it == kept<Ranges>().begin() || a >= (--it)->first + it->second.n) return nullptr;
  if (end) *end = it->first + it->second.n;
  return &it->second;
}
bool is_device(const Range* r) { return r && r->kind == device_memory; }

// ---- queues ----
Stream* default_stream(int device) {
  static Stream* defaults[MOST] = {};
  if (!defaults[device]) {
    kept<Streams>().insert(defaults[device] = new Stream);
    defaults[device]->device = device;
  }
  return defaults[device];
}
Stream* as_stream(cudaStream_t s) {
  if (uintptr_t(s) <= 2) return default_stream(g_device);
  auto* stream = reinterpret_cast<Stream*>(s);
  return kept<Streams>().count(stream) ? stream : nullptr;
}

void run_stream(Stream* s) {
  pthread_setname_np(pthread_self(), "late_stream");
  Lock lock(mu());
  for (;;) {
    s->wake.wait(lock, [&] { return s->wanted > s->done && !s->ops.empty() && !g_ending; });
    Op op = std::move(s->ops.front());
    s->ops.pop_front();
    if (op.on) wait(lock, op.on, op.to);
    if (op.run) {
      lock.unlock();
      op.run();
      op.run = nullptr;
      lock.lock();
    }
    if (op.moment) {
      op.moment->done = true;
      op.moment->at = Clock::now();
    }
    s->done++;
    if (!s->waited_for.empty() && *s->waited_for.begin() <= s->done) s->over.notify_all();
  }
}
void end() {  // of the process: no kernel begins while it is taken apart
  g_ending = true;
  usleep(20000);
}
void want(Stream* s, uint64_t to) {
  if (s->wanted >= to) return;
  s->wanted = to;
  if (s->done >= to) return;
  if (!s->has_thread) {
    static bool ends = !atexit(end);
    (void)ends;
    s->has_thread = true;
    std::thread(run_stream, s).detach();
  }
  s->wake.notify_one();
}
void wait(Lock& lock, Stream* s, uint64_t to) {
  if (s->done >= to) return;
  want(s, to);
  auto mine = s->waited_for.insert(to);
  s->over.wait(lock, [&] { return s->done >= to; });
  s->waited_for.erase(mine);
}
void wait_for_all(Lock& lock, int device) {
  auto streams = kept<Streams>();  // a copy: others may be made while this waits
  for (auto* s : streams) if (device < 0 || s->device == device) want(s, s->queued);
  for (auto* s : streams) if (device < 0 || s->device == device) wait(lock, s, s->queued);
}
uint64_t push(Stream* s, Op op) {
  s->ops.push_back(std::move(op));
  s->queued++;
  bool early = g_early == 2 || (g_early == 1 && s != default_stream(s->device));
  if (early || s->ops.size() > 20000) want(s, s->queued);
  else if (s->wanted >= s->queued) s->wake.notify_one();
  return s->queued;
}
}  // namespace late
using namespace late;

// ---- for kernels.cpp and tests ----
API void late_cuda_push(cudaStream_t st, std::function<void()> run) {
  Lock lock(mu());
  auto* s = as_stream(st);
  if (!s) return say("ERROR a kernel on a dead stream");
  if (g_last) say("ERROR %d was left by an earlier call: torch would raise it behind this kernel", int(g_last));
  g_last = cudaSuccess;
  touch("a kernel");
  count("kernels");
  Op op;
  op.run = std::move(run);
  push(s, std::move(op));
}
API void late_cuda_wait(cudaStream_t st, const char* why) {
  Lock lock(mu());
  touch("a kernel");
  count(why);
  if (auto* s = as_stream(st)) wait(lock, s, s->queued);
}
API void late_cuda_fail(const char* what) {
  say("ERROR a kernel has failed: %s", what);
  g_failed = cudaErrorAssert;
}
API void late_cuda_set_early(int early) { g_early = early; }
API long late_cuda_count(const char* what) { Lock lock(mu()); return kept<Counts>()[what]; }
API void late_cuda_report() {
  Lock lock(mu());
  for (auto& [what, n] : kept<Counts>()) say("%8ld %s", n, what.c_str());
}

// ---- devices ----
API cudaError_t cudaGetDeviceCount(int* n) { *n = device_count(); return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= device_count()) return bad(cudaErrorInvalidDevice, "cudaSetDevice");
  Lock lock(mu());
  g_device = d;
  touch("cudaSetDevice");  // since CUDA 12 it makes the context
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) { *d = g_device; return cudaSuccess; }
#undef cudaGetDeviceProperties
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d < 0 || d >= device_count()) return bad(cudaErrorInvalidDevice, "cudaGetDeviceProperties");
  memset(p, 0, sizeof *p);
  strcpy(p->name, "late_cuda");
  p->uuid.bytes[0] = char(d + 1);
  p->totalGlobalMem = total_memory();
  p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32; p->major = 9; p->pciBusID = d + 1;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->multiProcessorCount = 132; p->l2CacheSize = 52428800; p->maxThreadsPerMultiProcessor = 2048;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = 233472; p->sharedMemPerBlockOptin = 232448; p->regsPerMultiprocessor = 65536;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  static const std::map<int, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrWarpSize, 32}, {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxBlockDimX, 1024}};
  auto it = values.find(a);
  *v = it == values.end() ? 0 : it->second;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { *least = 0; *most = -5; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) { *can = a != b; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  Lock lock(mu());
  count("cudaDeviceSynchronize");
  touch("cudaDeviceSynchronize");
  wait_for_all(lock, g_device);
  return ret(g_failed);
}
API cudaError_t cudaGetLastError() { auto e = g_last; g_last = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError() { return g_last; }
API const char* cudaGetErrorString(cudaError_t e) {
  switch (int(e)) {
    case 0: return "no error";
    case 1: return "invalid argument";
    case 2: return "out of memory";
    case 600: return "device not ready";
    case 710: return "device-side assert triggered";
    default: return "error of late_cuda";
  }
}
API const char* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* v) { *v = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* out, int n, int d) {
  snprintf(out, n, "0000:%02x:00.0", d + 1);
  return cudaSuccess;
}

// ---- memory ----
API cudaError_t cudaMalloc(void** p, size_t n) {
  Lock lock(mu());
  touch("cudaMalloc");
  count("cudaMalloc");
  *p = nullptr;
  if (!n) return cudaSuccess;
  if (g_used[g_device] + n > total_memory() || posix_memalign(p, 512, n)) return ret(cudaErrorMemoryAllocation);
  memset(*p, 0xFF, n);  // NaN, in floats
  kept<Ranges>()[uintptr_t(*p)] = {n, g_device, device_memory};
  g_used[g_device] += n;
  return cudaSuccess;
}
static cudaError_t release(void* p, Kind kind, const char* what, bool owned) {
  Lock lock(mu());
  if (!p && owned) return cudaSuccess;
  auto& ranges = kept<Ranges>();
  auto it = ranges.find(uintptr_t(p));
  if (it == ranges.end() || it->second.kind != kind) return bad(cudaErrorInvalidValue, what);
  if (owned) wait_for_all(lock, -1);
  if (kind == device_memory) g_used[it->second.device] -= it->second.n;
  uintptr_t begin = it->first, end = begin + it->second.n;
  for (auto* s : kept<Streams>())
    for (auto& op : s->ops)
      if (op.host < end && begin < op.host_end) say("ERROR %s: a copy of that memory is queued", what);
  ranges.erase(it);
  if (owned) free(p);
  count(what);
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) { return release(p, device_memory, "cudaFree", true); }
API cudaError_t cudaFreeHost(void* p) { return release(p, pinned, "cudaFreeHost", true); }
API cudaError_t cudaHostUnregister(void* p) { return release(p, registered, "cudaHostUnregister", false); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(mu());
  touch("cudaMemGetInfo");
  *total = total_memory();
  *free = total_memory() - g_used[g_device];
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  Lock lock(mu());
  touch("cudaHostAlloc");
  count("cudaHostAlloc");
  if (posix_memalign(p, 4096, n + !n)) return ret(cudaErrorMemoryAllocation);
  memset(*p, 0xFF, n);
  kept<Ranges>()[uintptr_t(*p)] = {n + !n, g_device, pinned};
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  Lock lock(mu());
  touch("cudaHostRegister");
  if (!p || !n) return bad(cudaErrorInvalidValue, "cudaHostRegister of nothing");
  auto next = kept<Ranges>().lower_bound(uintptr_t(p));
  if (find(p) || (next != kept<Ranges>().end() && next->first < uintptr_t(p) + n))
    return bad(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister twice");
  static size_t sum = 0, limit = size_t(number("LATE_CUDA_PIN_MIB", 1 << 20)) << 20;
  if (sum + n > limit) return ret(cudaErrorMemoryAllocation);
  sum += n;
  kept<Ranges>()[uintptr_t(p)] = {n, g_device, registered};
  count("cudaHostRegister");
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock(mu());
  memset(a, 0, sizeof *a);
  Range* r = find(p);
  a->device = r ? r->device : -2;
  a->type = !r ? cudaMemoryTypeUnregistered : is_device(r) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  if (r) a->devicePointer = const_cast<void*>(p);
  if (!is_device(r)) a->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}
static cudaError_t copy(Lock& lock, void* dst, const void* src, size_t n, cudaMemcpyKind kind, Stream* s) {
  if (!s) return bad(cudaErrorInvalidResourceHandle, "copy on a dead stream");
  if (!n) return cudaSuccess;
  uintptr_t to_end = 0, from_end = 0;
  Range *to = find(dst, &to_end), *from = find(src, &from_end);
  if ((to && uintptr_t(dst) + n > to_end) || (from && uintptr_t(src) + n > from_end))
    return bad(cudaErrorInvalidValue, "copy beyond the end of its memory");
  bool down = is_device(from), up = is_device(to);
  if ((kind == cudaMemcpyHostToDevice && (!up || down)) || (kind == cudaMemcpyDeviceToHost && (up || !down)) ||
      (kind == cudaMemcpyDeviceToDevice && !(up && down)))
    return bad(cudaErrorInvalidValue, "copy in another direction than told");
  touch("copy");
  bool pageable = (!up && !to) || (!down && !from);
  count(up && down ? "copies on the device"
        : up       ? pageable ? "copies to the device, pageable" : "copies to the device, pinned"
        : pageable ? "copies to the host, pageable" : "copies to the host, pinned");
  if (pageable && !up) {  // the host waits until the bytes are there
    wait(lock, s, s->queued);
    memcpy(dst, src, n);
    return ret(g_failed);
  }
  Op op;
  if (pageable) {  // their bytes are taken now
    auto bytes = std::make_shared<std::string>(static_cast<const char*>(src), n);
    op.run = [=] { memcpy(dst, bytes->data(), n); };
  } else {
    auto host = up ? down ? nullptr : src : dst;
    if (host) op.host = uintptr_t(host), op.host_end = op.host + n;
    op.run = [=] {
      if (host) {
        Lock look(mu());
        if (!find(host)) return say("ERROR a queued copy runs after its host memory was unpinned");
      }
      memmove(dst, src, n);
    };
  }
  push(s, std::move(op));
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind kind, cudaStream_t st) {
  Lock lock(mu());
  return copy(lock, d, s, n, kind, as_stream(st));
}
API cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  return cudaMemcpyAsync(d, s, n, cudaMemcpyDeviceToDevice, st);
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind kind) {
  Lock lock(mu());
  auto* stream = default_stream(g_device);
  wait_for_all(lock, g_device);
  if (auto e = copy(lock, d, s, n, kind, stream)) return e;
  wait(lock, stream, stream->queued);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t st) {
  Lock lock(mu());
  auto* s = as_stream(st);
  if (!s) return bad(cudaErrorInvalidResourceHandle, "memset on a dead stream");
  touch("cudaMemsetAsync");
  Op op;
  op.run = [=] { memset(p, v, n); };
  push(s, std::move(op));
  return cudaSuccess;
}

// ---- streams ----
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Lock lock(mu());
  touch("cudaStreamCreate");
  auto* s = new Stream;  // never freed: events may name it
  s->device = g_device;
  s->flags = flags;
  s->priority = priority;
  kept<Streams>().insert(s);
  *out = reinterpret_cast<cudaStream_t>(s);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
template <class F> static cudaError_t with_stream(cudaStream_t st, const char* what, F f) {
  Lock lock(mu());
  auto* s = as_stream(st);
  return s ? f(lock, s) : bad(cudaErrorInvalidResourceHandle, what);
}
API cudaError_t cudaStreamDestroy(cudaStream_t st) {
  return with_stream(st, "cudaStreamDestroy", [](Lock& lock, Stream* s) {
    wait(lock, s, s->queued);
    kept<Streams>().erase(s);
    return cudaSuccess;
  });
}
API cudaError_t cudaStreamGetPriority(cudaStream_t st, int* p) {
  return with_stream(st, "cudaStreamGetPriority", [=](Lock&, Stream* s) { *p = s->priority; return cudaSuccess; });
}
API cudaError_t cudaStreamSynchronize(cudaStream_t st) {
  return with_stream(st, "cudaStreamSynchronize", [](Lock& lock, Stream* s) {
    count("cudaStreamSynchronize");
    wait(lock, s, s->queued);
    return ret(g_failed);
  });
}
static cudaError_t query(Stream* s, uint64_t to, int* asked) {
  if (g_failed) return ret(g_failed);
  if (s->done >= to) return cudaSuccess;
  // Who asks again and again waits for it. torch's watchdog of NCCL only looks, ten times a second; but at the end of a
  // process group it waits for what nobody else does.
  if (++*asked > (is_thread("pt_nccl") ? 10 : 3)) want(s, to);
  return ret(cudaErrorNotReady);
}
API cudaError_t cudaStreamQuery(cudaStream_t st) {
  return with_stream(st, "cudaStreamQuery", [](Lock&, Stream* s) {
    int asked = 3;
    return query(s, s->queued, &asked);
  });
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t st, cudaEvent_t e, unsigned) {
  return with_stream(st, "cudaStreamWaitEvent", [=](Lock&, Stream* s) {
    auto* event = reinterpret_cast<Event*>(e);
    if (!kept<Events>().count(event)) return bad(cudaErrorInvalidResourceHandle, "cudaStreamWaitEvent");
    if (!event->stream || event->moment->done) return cudaSuccess;  // never recorded, or over
    Op op;
    op.on = event->stream;
    op.to = event->at;
    push(s, std::move(op));
    return cudaSuccess;
  });
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t st, cudaHostFn_t f, void* data) {
  return with_stream(st, "cudaLaunchHostFunc", [=](Lock&, Stream* s) {
    Op op;
    op.run = [=] { f(data); };
    push(s, std::move(op));
    return cudaSuccess;
  });
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* c) {
  *c = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#undef cudaStreamGetCaptureInfo
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* c, unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *c = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- events ----
template <class F> static cudaError_t with_event(cudaEvent_t e, const char* what, F f) {
  Lock lock(mu());
  auto* event = reinterpret_cast<Event*>(e);
  return kept<Events>().count(event) ? f(lock, event) : bad(cudaErrorInvalidResourceHandle, what);
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  Lock lock(mu());
  touch("cudaEventCreate");
  auto* e = new Event{g_device, flags};
  kept<Events>().insert(e);
  *out = reinterpret_cast<cudaEvent_t>(e);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  return with_event(e, "cudaEventDestroy", [](Lock&, Event* event) {
    kept<Events>().erase(event);
    delete event;
    return cudaSuccess;
  });
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t st, unsigned) {
  return with_event(e, "cudaEventRecord", [=](Lock&, Event* event) {
    auto* s = as_stream(st);
    if (!s) return bad(cudaErrorInvalidResourceHandle, "cudaEventRecord on a dead stream");
    if (event->device != s->device) return bad(cudaErrorInvalidResourceHandle, "cudaEventRecord on another device");
    Op op;
    op.moment = event->moment = std::make_shared<Moment>();
    event->stream = s;
    event->at = push(s, std::move(op));
    return cudaSuccess;
  });
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t st) { return cudaEventRecordWithFlags(e, st, 0); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  return with_event(e, "cudaEventQuery", [](Lock&, Event* event) {
    return event->moment ? query(event->stream, event->at, &event->moment->asked) : cudaSuccess;
  });
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  return with_event(e, "cudaEventSynchronize", [](Lock& lock, Event* event) {
    count("cudaEventSynchronize");
    if (event->moment) wait(lock, event->stream, event->at);
    return ret(g_failed);
  });
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  return with_event(a, "cudaEventElapsedTime", [=](Lock&, Event* x) {
    auto* y = reinterpret_cast<Event*>(b);
    if (!kept<Events>().count(y) || !x->moment || !y->moment || (x->flags | y->flags) & cudaEventDisableTiming)
      return bad(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime");
    if (!x->moment->done || !y->moment->done) return bad(cudaErrorNotReady, "cudaEventElapsedTime before the end");
    *ms = std::chrono::duration<float, std::milli>(y->moment->at - x->moment->at).count();
    return cudaSuccess;
  });
}

// ---- kernels that kernels.cpp does not replace ----
API cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void** args, size_t, cudaStream_t st) {
  Lock lock(mu());
  std::string name = "KERNEL NOT RUN: " + kept<Names>()[f];
  auto* s = as_stream(st);
  if (s && name.find("spin_kernel") != name.npos) {  // of torch.cuda._sleep
    Op op;
    op.run = [us = *static_cast<int64_t*>(args[0]) / 2000] { usleep(us); };
    push(s, std::move(op));
    return cudaSuccess;
  }
  if (!kept<Counts>()[name]++) say("%s", name.c_str());
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** args) {
  return cudaLaunchKernel(f, c->gridDim, c->blockDim, args, 0, c->stream);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 a, dim3 b, void** args, size_t n, cudaStream_t st) {
  return cudaLaunchKernel((const void*)f, a, b, args, n, st);
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
API void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                int*) {
  Lock lock(mu());
  kept<Names>()[host] = name ? name : "?";
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 0; }
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* n, void* s) {
  *g = *b = dim3{1, 1, 1};
  *n = 0;
  *static_cast<void**>(s) = nullptr;
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- the driver: torch asks for all of it when memory is short ----
API int cuDevicePrimaryCtxGetState(int d, unsigned* flags, int* active) {
  *flags = 0;
  *active = g_context[d];
  return 0;
}
static int no_such_function() { return 801; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  bool is_there = !strcmp(name, "cuDevicePrimaryCtxGetState");
  *f = is_there ? (void*)cuDevicePrimaryCtxGetState : (void*)no_such_function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
