// Memory: a caching allocator with CUDA's rules for streams, pinned host memory, and what kernels touch of a tensor.
//
// A block belongs to the stream that was current when it was allocated. Once freed it serves the next allocation of its
// size on that stream at once, newest first: the stream's own order makes that safe, and nothing protects other streams
// that still use it. Whoever is handed a block finds NaNs in it.
#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

namespace emul {
namespace {

constexpr int NAN_BYTE = 0xff;

size_t rounded(size_t bytes) {
  size_t size = 512;
  while (size < bytes) size <<= 1;
  return size;
}
void* fresh(size_t size) {
  void* pointer = nullptr;
  if (posix_memalign(&pointer, 512, size)) throw std::bad_alloc();
  std::memset(pointer, NAN_BYTE, size);
  return pointer;
}

// -- device memory

struct Block {
  void* pointer;
  size_t size, asked;
  Stream* stream;
  std::set<Stream*> users;  // other streams that record_stream named
};
struct Pool {
  std::mutex mutex;
  std::map<std::pair<int, size_t>, std::vector<Block*>> free;  // by stream and size
  std::unordered_map<void*, Block*> live;
  std::vector<std::pair<Block*, std::vector<MomentPtr>>> deferred;  // freed, but in use on other streams
  size_t allocated = 0, peak = 0, reserved = 0;
};
Pool& pool() { static auto* all = new Pool; return *all; }

void poison(Block* block, const char* why) {
  auto from = reinterpret_cast<uintptr_t>(block->pointer);
  void* pointer = block->pointer;
  size_t size = block->size;
  enqueue(block->stream, why, {{from, from + size, true}}, [=] { std::memset(pointer, NAN_BYTE, size); }, false);
}

void make_reusable(Block* block) {
  if (settings().poison_free) poison(block, "memory is freed");
  std::lock_guard<std::mutex> lock(pool().mutex);
  pool().free[{block->stream->number, block->size}].push_back(block);
}

void free_block(void* pointer) {
  if (pointer == nullptr) return;
  Block* block;
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    block = pool().live.at(pointer);
    pool().live.erase(pointer);
    pool().allocated -= block->asked;
  }
  if (block->users.empty()) return make_reusable(block);
  std::vector<MomentPtr> uses;
  for (auto* stream : block->users) uses.push_back(record(stream));
  block->users.clear();
  std::lock_guard<std::mutex> lock(pool().mutex);
  pool().deferred.emplace_back(block, std::move(uses));
}

void collect_deferred() {
  std::vector<std::pair<Block*, std::vector<MomentPtr>>> all;
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    all.swap(pool().deferred);
  }
  for (auto& one : all) {
    bool over = true;
    for (auto& moment : one.second) over = over && host_query(moment);
    if (over) {
      make_reusable(one.first);
    } else {
      std::lock_guard<std::mutex> lock(pool().mutex);
      pool().deferred.push_back(one);
    }
  }
}

void use_on(void* pointer, Stream* stream) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  auto found = pool().live.find(pointer);
  if (found != pool().live.end() && found->second->stream != stream) found->second->users.insert(stream);
}

struct DeviceMemory final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(c10::kPrivateUse1, current_device());
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    collect_deferred();
    auto* stream = current();
    size_t size = rounded(bytes);
    Block* block;
    bool reused;
    {
      std::lock_guard<std::mutex> lock(pool().mutex);
      auto& candidates = pool().free[{stream->number, size}];
      reused = !candidates.empty();
      if (reused) {
        block = candidates.back();
        candidates.pop_back();
      } else {
        block = new Block{fresh(size), size, bytes, stream, {}};
        pool().reserved += size;
      }
      block->asked = bytes;
      pool().live[block->pointer] = block;
      pool().allocated += bytes;
      pool().peak = std::max(pool().peak, pool().allocated);
    }
    if (!reused || settings().poison_reuse) poison(block, "memory is handed out");
    return {block->pointer, block->pointer, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto out = reinterpret_cast<uintptr_t>(to), in = reinterpret_cast<uintptr_t>(from);
    enqueue(current(), "copy_data", {{in, in + bytes, false}, {out, out + bytes, true}}, [=] { std::memcpy(to, from, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { use_on(data.get(), stream_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> lock(pool().mutex);
    stats.allocated_bytes[0].current = stats.active_bytes[0].current = pool().allocated;
    stats.allocated_bytes[0].peak = stats.active_bytes[0].peak = pool().peak;
    stats.reserved_bytes[0].current = pool().reserved;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { pool().peak = pool().allocated; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {size_t(1) << 33, size_t(1) << 34}; }
};
DeviceMemory device_memory;
const bool device_memory_is_set = (c10::SetAllocator(c10::kPrivateUse1, &device_memory, 0), true);

// -- pinned host memory: a freed block waits for the copies that use it

struct HostBlock {
  void* pointer;
  size_t size;
  std::vector<MomentPtr> uses;
};
struct HostPool {
  std::mutex mutex;
  std::map<uintptr_t, HostBlock*> live;
  std::map<size_t, std::vector<HostBlock*>> free;
};
HostPool& host_pool() { static auto* all = new HostPool; return *all; }

HostBlock* block_around(const void* pointer) {
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto it = host_pool().live.upper_bound(at);
  if (it == host_pool().live.begin()) return nullptr;
  --it;
  return at < it->first + it->second->size ? it->second : nullptr;
}
void free_host_block(void* pointer) {
  if (pointer == nullptr) return;
  std::lock_guard<std::mutex> lock(host_pool().mutex);
  auto found = host_pool().live.find(reinterpret_cast<uintptr_t>(pointer));
  auto* block = found->second;
  host_pool().live.erase(found);
  if (block->uses.empty()) std::memset(block->pointer, NAN_BYTE, block->size);
  host_pool().free[block->size].push_back(block);
}

struct PinnedMemory final : public at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_host_block, c10::Device(c10::kCPU)};
    size_t size = rounded(bytes);
    std::lock_guard<std::mutex> lock(host_pool().mutex);
    HostBlock* block = nullptr;
    auto& candidates = host_pool().free[size];
    for (auto it = candidates.begin(); it != candidates.end() && block == nullptr; ++it) {
      bool over = true;
      for (auto& moment : (*it)->uses) over = over && moment->query();
      if (over) {
        block = *it;
        candidates.erase(it);
        break;
      }
    }
    if (block == nullptr) block = new HostBlock{fresh(size), size, {}};
    block->uses.clear();
    std::memset(block->pointer, NAN_BYTE, size);
    host_pool().live[reinterpret_cast<uintptr_t>(block->pointer)] = block;
    return {block->pointer, block->pointer, &free_host_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* pointer, void*, c10::Stream stream) override { use_pinned(pointer, stream_of(stream)); return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_memory_;
const bool pinned_memory_is_set = (at::setHostAllocator(at::kPrivateUse1, &pinned_memory_, 0), true);

// The byte ranges of a strided tensor: exact where that takes at most `budget` of them, else its hull.
void add_ranges(std::vector<Access>& found, uintptr_t base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t itemsize,
                bool write, int64_t& budget) {
  int64_t numel = 1, span = 1;
  for (size_t dim = 0; dim < sizes.size(); dim++) {
    numel *= sizes[dim];
    span += (sizes[dim] - 1) * strides[dim];
  }
  if (numel == 0) return;
  bool dense = span == numel;  // without holes, though perhaps permuted
  if (sizes.empty() || dense || budget <= 0 || sizes[0] > 512) {
    found.push_back({base, base + static_cast<uintptr_t>(span * itemsize), write});
    return;
  }
  int64_t rows = strides[0] == 0 ? 1 : sizes[0];
  if (rows > 1) budget -= rows;
  for (int64_t row = 0; row < rows; row++) {
    auto start = base + static_cast<uintptr_t>(row * strides[0] * itemsize);
    add_ranges(found, start, sizes.slice(1), strides.slice(1), itemsize, write, budget);
  }
}

}  // namespace

c10::Allocator* pinned_allocator() { return &pinned_memory_; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(host_pool().mutex);
  return block_around(pointer) != nullptr;
}
void use_pinned(const void* pointer, Stream* stream) {
  auto moment = record(stream);
  std::lock_guard<std::mutex> lock(host_pool().mutex);
  if (auto* block = block_around(pointer)) block->uses.push_back(moment);
}
void use_block_on(const c10::DataPtr& data, Stream* stream) { use_on(data.get(), stream); }

int device_of(void* pointer) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  for (auto& [start, block] : pool().live) {
    auto* first = static_cast<char*>(start);
    if (pointer >= first && pointer < first + block->size) return block->stream->device;
  }
  return current_device();
}

void add_access(std::vector<Access>& found, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  int64_t budget = 2048;
  auto base = reinterpret_cast<uintptr_t>(data_of(tensor));
  add_ranges(found, base, tensor.sizes(), tensor.strides(), tensor.itemsize(), write, budget);
}
void check_alive(const at::Tensor& tensor, const std::string& name) {
  if (tensor.numel() == 0) return;
  int64_t elements = tensor.storage_offset() + 1;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  size_t needed = elements * tensor.itemsize(), held = tensor.storage().nbytes();
  TORCH_CHECK(tensor.storage().data() != nullptr && needed <= held, "emulated device: '", name, "' was launched on a tensor ",
              "whose memory is gone: it needs ", needed, " bytes, its storage has ", held, "; on CUDA an illegal access");
}
at::Tensor view_as_cpu(void* pointer, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  static char nothing[64];
  return at::from_blob(pointer ? pointer : nothing, sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU));
}

void bind_memory(pybind11::module& module) {
  module.def("memory", [] {
    std::lock_guard<std::mutex> lock(pool().mutex);
    pybind11::dict stats;
    stats["allocated"] = pool().allocated;
    stats["peak"] = pool().peak;
    stats["reserved"] = pool().reserved;
    return stats;
  });
  module.def("reset_peak", [] { pool().peak = pool().allocated; });
}
}  // namespace emul
