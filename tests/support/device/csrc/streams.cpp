// Streams, events, the race detector and the log.
#include "runtime.h"

#include <torch/csrc/utils/pybind.h>

#include <iostream>
#include <map>
#include <thread>

namespace emul {
namespace {

// Guards clocks, the shadow memory, the lists of streams, races and errors. Never destroyed: threads outlive main.
std::mutex& global() { static auto* mutex = new std::mutex; return *mutex; }

Clock& host_clock() { static auto* clock = new Clock; return *clock; }

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

std::vector<Stream*>& all_streams() { static auto* all = new std::vector<Stream*>; return *all; }
std::vector<std::vector<Stream*>>& streams_by_device() {
  static auto* all = new std::vector<std::vector<Stream*>>(device_count());
  return *all;
}

// Runs Python-free waiting without the interpreter lock, if this thread has it: kernels of other threads may need it.
struct WithoutInterpreter {
  std::unique_ptr<pybind11::gil_scoped_release> released;
  WithoutInterpreter() { if (PyGILState_Check()) released = std::make_unique<pybind11::gil_scoped_release>(); }
};

// -- races: who wrote each byte last, and who has read it since

struct Toucher {
  int stream = -1;
  uint32_t time = 0;
  std::shared_ptr<std::string> name;
};
struct Segment {
  uintptr_t to;
  Toucher writer;
  std::vector<Toucher> readers;  // since the last write, the last of each stream
};
std::map<uintptr_t, Segment>& shadow() { static auto* map = new std::map<uintptr_t, Segment>; return *map; }

struct Race { int count = 0; std::string text; };
std::map<std::string, Race>& races() { static auto* map = new std::map<std::string, Race>; return *map; }
std::vector<std::string>& errors() { static auto* list = new std::vector<std::string>; return *list; }

void split_at(uintptr_t at) {
  auto it = shadow().upper_bound(at);
  if (it == shadow().begin()) return;
  --it;
  if (it->first < at && at < it->second.to) {
    Segment right = it->second;
    it->second.to = at;
    shadow().emplace(at, std::move(right));
  }
}

std::string described(const Toucher& toucher) {
  static const char* kinds[] = {"compute", "side", "comm"};
  auto* stream = all_streams()[toucher.stream];
  return "'" + toucher.name->substr(0, toucher.name->find('\n')) + "' on " + kinds[stream->kind] + " stream " + std::to_string(stream->number);
}

void report(const char* what, const Toucher& first, const Toucher& second) {
  auto& race = races()[std::string(what) + ": " + described(first) + ", then " + described(second)];
  if (race.count++ == 0) race.text = "first: " + *first.name + "\nthen: " + *second.name;
}

void touch(const Access& access, Stream* stream, const std::shared_ptr<std::string>& name) {
  if (access.from >= access.to) return;
  split_at(access.from);
  split_at(access.to);
  const Toucher me{stream->number, stream->clock[stream->number], name};
  auto ended = [&](const Toucher& other) {
    if (other.stream < 0 || other.stream == stream->number) return true;
    return static_cast<size_t>(other.stream) < stream->clock.size() && stream->clock[other.stream] >= other.time;
  };
  auto it = shadow().lower_bound(access.from);
  for (uintptr_t at = access.from; at < access.to; ++it) {
    if (it == shadow().end() || it->first > at) {
      uintptr_t to = it == shadow().end() ? access.to : std::min(access.to, it->first);
      it = shadow().emplace_hint(it, at, Segment{to, {}, {}});
    }
    Segment& segment = it->second;
    if (!ended(segment.writer)) report(access.write ? "write after write" : "read after write", segment.writer, me);
    if (access.write) {
      for (auto& reader : segment.readers) if (!ended(reader)) report("write after read", reader, me);
      segment.writer = me;
      segment.readers.clear();
    } else {
      bool known = false;
      for (auto& reader : segment.readers) if (reader.stream == me.stream) { reader = me; known = true; }
      if (!known) segment.readers.push_back(me);
    }
    at = segment.to;
  }
}

// -- the log: what a simulation of other durations needs

// (what: "run", "record" or "wait"; stream; kernel's name; communicator or -1; bytes; number of the moment)
using Entry = std::tuple<std::string, int, std::string, int, size_t, uint64_t>;
std::vector<Entry>& journal() { static auto* list = new std::vector<Entry>; return *list; }
uint64_t moments = 0;

pybind11::object* tracer = nullptr;
std::string traced(const std::string& name) {
  if (!settings().trace || tracer == nullptr) return name;
  pybind11::gil_scoped_acquire locked;
  return name + "\n" + pybind11::cast<std::string>((*tracer)());
}

// -- threads

void run(Stream* stream) {
  for (;;) {
    std::function<void()> kernel;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->submitted_more.wait(lock, [&] { return !stream->queue.empty(); });
      kernel = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    try {
      kernel();
    } catch (const std::exception& error) {
      std::string text = error.what();
      text = text.substr(0, text.find("Exception raised from"));
      std::lock_guard<std::mutex> lock(global());
      errors().push_back(text);
      std::cerr << "[emulated device] kernel failed: " << text << std::endl;
    }
    kernel = nullptr;  // what it holds dies before anybody sees it completed
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->completed++;
    stream->completed_more.notify_all();
  }
}

void push(Stream* stream, std::function<void()> kernel) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->queue.push_back(std::move(kernel));
  stream->submitted++;
  stream->submitted_more.notify_one();
}

void tick(Stream* stream) {
  join(stream->clock, host_clock());
  stream->clock[stream->number]++;
}

thread_local int this_device = 0;
thread_local std::vector<Stream*> this_threads_streams;

void make_default_streams() {
  static std::once_flag once;
  std::call_once(once, [] { for (int device = 0; device < device_count(); device++) new_stream(device, COMPUTE); });
}

}  // namespace

Settings& settings() { static auto* all = new Settings; return *all; }

void Moment::fire() {
  std::lock_guard<std::mutex> lock(mutex);
  done = true;
  when = std::chrono::steady_clock::now();
  reached.notify_all();
}
void Moment::wait() {
  std::unique_lock<std::mutex> lock(mutex);
  reached.wait(lock, [&] { return done; });
}
bool Moment::query() {
  std::lock_guard<std::mutex> lock(mutex);
  return done;
}

int device_count() { return 4; }
int current_device() { return this_device; }
void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "emulated device: there is no device ", device);
  this_device = device;
}

Stream* new_stream(int device, Kind kind) {
  std::lock_guard<std::mutex> lock(global());
  auto* stream = new Stream;
  stream->number = static_cast<int>(all_streams().size());
  stream->device = device;
  stream->kind = kind;
  stream->id = static_cast<int64_t>(streams_by_device()[device].size());
  all_streams().push_back(stream);
  streams_by_device()[device].push_back(stream);
  stream->clock.assign(stream->number + 1, 0);
  stream->random.seed(settings().seed * 1000003u + stream->number * 7919u);
  std::thread(run, stream).detach();
  return stream;
}
Stream* default_stream(int device) {
  make_default_streams();
  std::lock_guard<std::mutex> lock(global());
  return streams_by_device()[device < 0 ? this_device : device][0];
}
Stream* current(int device) {
  if (device < 0) device = this_device;
  if (this_threads_streams.empty()) this_threads_streams.assign(device_count(), nullptr);
  auto*& stream = this_threads_streams[device];
  if (stream == nullptr) stream = default_stream(device);
  return stream;
}
Stream* exchange_current(Stream* stream) {
  auto* before = current(stream->device);
  this_threads_streams[stream->device] = stream;
  return before;
}
Stream* stream_of(c10::Stream stream) {
  make_default_streams();
  std::lock_guard<std::mutex> lock(global());
  return streams_by_device()[stream.device_index()].at(stream.id());
}
c10::Stream wrap(Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, stream->device), stream->id);
}

void random_delay(Stream* stream, Kind kind) {
  double probability = settings().probability[kind];
  int longest = settings().longest_us[kind];
  if (probability <= 0 || longest <= 0) return;
  double drawn = (stream->random() & 0xffffff) / double(0x1000000);
  if (drawn < probability) std::this_thread::sleep_for(std::chrono::microseconds(1 + stream->random() % longest));
}

void enqueue(Stream* stream, const std::string& name, const std::vector<Access>& touched, std::function<void()> kernel,
             bool delayed, int traffic, size_t bytes) {
  auto label = std::make_shared<std::string>(traced(name));
  std::lock_guard<std::mutex> lock(global());
  tick(stream);
  if (settings().detect) for (auto& access : touched) touch(access, stream, label);
  if (settings().log) {
    if (traffic < 0) for (auto& access : touched) bytes += access.to - access.from;
    journal().emplace_back("run", stream->number, name, traffic, bytes, 0);
  }
  if (delayed) push(stream, [stream, kernel = std::move(kernel)] { random_delay(stream, stream->kind); kernel(); });
  else push(stream, std::move(kernel));
}
MomentPtr record(Stream* stream) {
  auto moment = std::make_shared<Moment>();
  std::lock_guard<std::mutex> lock(global());
  tick(stream);
  moment->clock = stream->clock;
  moment->id = ++moments;
  if (settings().log) journal().emplace_back("record", stream->number, "", -1, 0, moment->id);
  push(stream, [moment] { moment->fire(); });
  return moment;
}
void wait_for(Stream* stream, const MomentPtr& moment) {
  if (!moment) return;
  std::lock_guard<std::mutex> lock(global());
  tick(stream);
  join(stream->clock, moment->clock);
  if (settings().log) journal().emplace_back("wait", stream->number, "", -1, 0, moment->id);
  push(stream, [moment] { moment->wait(); });
}
void host_wait(const MomentPtr& moment) {
  if (!moment) return;
  { WithoutInterpreter free; moment->wait(); }
  std::lock_guard<std::mutex> lock(global());
  join(host_clock(), moment->clock);
}
bool host_query(const MomentPtr& moment) {
  if (!moment) return true;
  if (!moment->query()) return false;
  std::lock_guard<std::mutex> lock(global());
  join(host_clock(), moment->clock);
  return true;
}
void synchronize(Stream* stream) {
  Clock then;
  uint64_t target;
  {
    std::lock_guard<std::mutex> lock(global());
    then = stream->clock;
    std::lock_guard<std::mutex> inner(stream->mutex);
    target = stream->submitted;
  }
  {
    WithoutInterpreter free;
    std::unique_lock<std::mutex> lock(stream->mutex);
    stream->completed_more.wait(lock, [&] { return stream->completed >= target; });
  }
  { std::lock_guard<std::mutex> lock(global()); join(host_clock(), then); }
  raise_errors();
}
void synchronize_device(int device) {
  make_default_streams();
  std::vector<Stream*> all;
  { std::lock_guard<std::mutex> lock(global()); all = streams_by_device()[device < 0 ? this_device : device]; }
  for (auto* stream : all) synchronize(stream);
}
bool is_idle(Stream* stream) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->completed >= stream->submitted;
}
void raise_errors() {
  std::string first;
  {
    std::lock_guard<std::mutex> lock(global());
    if (!errors().empty()) first = errors()[0];
    errors().clear();
  }
  TORCH_CHECK(first.empty(), "emulated device: a kernel failed: ", first);
}

void bind_streams(pybind11::module& module) {
  module.def("set_delays", [](std::vector<double> probability, std::vector<int> longest_us, uint32_t seed) {
    std::lock_guard<std::mutex> lock(global());
    for (int kind = 0; kind < 3; kind++) {
      settings().probability[kind] = probability[kind];
      settings().longest_us[kind] = longest_us[kind];
    }
    settings().seed = seed;
    for (auto* stream : all_streams()) stream->random.seed(seed * 1000003u + stream->number * 7919u);
  });
  module.def("set_checks", [](bool poison_reuse, bool poison_free, bool detect, bool trace) {
    settings().poison_reuse = poison_reuse;
    settings().poison_free = poison_free;
    settings().detect = detect;
    settings().trace = trace;
  });
  module.def("set_tracer", [](pybind11::object function) { tracer = new pybind11::object(std::move(function)); });
  module.def("races", [] {
    std::vector<std::tuple<std::string, int, std::string>> found;
    std::lock_guard<std::mutex> lock(global());
    for (auto& [what, race] : races()) found.emplace_back(what, race.count, race.text);
    races().clear();
    return found;
  });
  module.def("set_log", [](bool on) { std::lock_guard<std::mutex> lock(global()); settings().log = on; journal().clear(); });
  module.def("take_log", [] {
    std::vector<Entry> taken;
    std::lock_guard<std::mutex> lock(global());
    taken.swap(journal());
    return taken;
  });
  module.def("current_stream_number", [] { return current()->number; });
  module.def("mark_log", [](const std::string& name) {  // a note in the log, at the host's present place
    std::lock_guard<std::mutex> lock(global());
    if (settings().log) journal().emplace_back("note", -1, name, -1, 0, 0);
  });
  // A kernel on the current stream that ends when the returned function is called: tests hold a stream back with it.
  module.def("hold", [] {
    auto gate = std::make_shared<Moment>();
    enqueue(current(), "hold", {}, [gate] { gate->wait(); }, false);
    return pybind11::cpp_function([gate] { gate->fire(); });
  });
}
}  // namespace emul
