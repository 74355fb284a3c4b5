// The emulated accelerator's runtime: streams that are threads, events, and vector clocks that find races.
//
//   host thread   enqueue(stream, kernel) --- order and clocks are settled here, in the host's order of calls
//   stream thread                             runs the kernels one by one, with random delays in between
//
// Whether a program is free of races follows from the clocks alone, so it does not depend on how the threads happened to
// run. What the program computes does depend on it: memory that is freed too early is filled with NaN.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace emul {

// clock[s] is the number of the last operation of stream s that has certainly ended.
using Clock = std::vector<uint32_t>;

// One recording of a device event.
struct Moment {
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  Clock clock;   // what has ended when the event fires
  uint64_t id;   // its number in the log
  std::chrono::steady_clock::time_point when;

  void fire();
  void wait();
  bool query();
};
using MomentPtr = std::shared_ptr<Moment>;

enum Kind { COMPUTE = 0, SIDE = 1, COMM = 2 };  // default streams, those of users and libraries, those of process groups

// Bytes [from, to) that a kernel reads or writes.
struct Access {
  uintptr_t from, to;
  bool write;
};

struct Stream {
  int number;  // unique in the process: its place in clocks
  int device;
  int64_t id;  // unique on the device: what torch calls stream_id
  Kind kind;
  std::mutex mutex;
  std::condition_variable submitted_more, completed_more;
  std::deque<std::function<void()>> queue;
  uint64_t submitted = 0, completed = 0;
  Clock clock;
  std::mt19937 random;
};

// -- devices and streams
int device_count();
int current_device();
void set_device(int device);
Stream* current(int device = -1);                 // the stream that is current on a device
Stream* exchange_current(Stream* stream);         // returns the one that was current before
Stream* default_stream(int device);
Stream* new_stream(int device, Kind kind);
Stream* stream_of(c10::Stream stream);
c10::Stream wrap(Stream* stream);

// -- work
// Puts a kernel on a stream. `touched` is what it reads and writes; `traffic` says for the log that it is a collective of
// communicator `traffic` (negative: it is none) with `bytes` per rank.
void enqueue(Stream* stream, const std::string& name, const std::vector<Access>& touched, std::function<void()> kernel,
             bool delayed = true, int traffic = -1, size_t bytes = 0);
MomentPtr record(Stream* stream);
void wait_for(Stream* stream, const MomentPtr& moment);
void host_wait(const MomentPtr& moment);
bool host_query(const MomentPtr& moment);
void synchronize(Stream* stream);
void synchronize_device(int device);
bool is_idle(Stream* stream);
void raise_errors();                              // of kernels that failed since the last call
void random_delay(Stream* stream, Kind kind);

// -- memory
void add_access(std::vector<Access>& found, const at::Tensor& tensor, bool write);
void check_alive(const at::Tensor& tensor, const std::string& name);  // raises if its storage was freed or is too small
bool is_pinned(const void* pointer);
void use_pinned(const void* pointer, Stream* stream);  // the block is not reused before the stream's present work has ended
at::Tensor view_as_cpu(void* pointer, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
inline void* data_of(const at::Tensor& tensor) {
  auto* base = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  return base ? base + tensor.storage_offset() * tensor.itemsize() : nullptr;
}
at::Generator default_generator(int device);

// -- settings and what Python asks for
struct Settings {
  double probability[3] = {0, 0, 0};  // of a delay before a kernel, by the stream's Kind
  int longest_us[3] = {0, 0, 0};
  uint32_t seed = 0;
  bool poison_reuse = true;   // fill a block with NaN when it is handed out again
  bool poison_free = false;   // fill it as soon as it is freed: stricter than CUDA, where a stream's own order protects it
  bool detect = true;         // look for races
  bool trace = false;         // races come with the Python stacks of both sides
  bool log = false;           // keep a log of the device's work
};
Settings& settings();
}  // namespace emul
