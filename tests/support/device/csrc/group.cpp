// A process group backend with the stream semantics of NCCL: collectives are kernels, the host never waits.
//
// With asyncOp=False a collective runs on the current stream, otherwise on a stream of the communicator's that first waits
// for the current one, and `wait()` makes the then current stream wait. A communicator runs its collectives one at a time, in
// the order of the calls; that order protects nobody's memory. The bytes travel through gloo, on the stream's thread.
#include "runtime.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>
#include <map>

namespace emul {
namespace {
using namespace c10d;
using BackendPtr = c10::intrusive_ptr<Backend>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

// Tensors as the kernel gets them: raw memory that it does not own.
struct Raw {
  void* pointer;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  explicit Raw(const at::Tensor& tensor)
      : pointer(tensor.numel() ? data_of(tensor) : nullptr), sizes(tensor.sizes().vec()), strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}
  at::Tensor tensor() const { return view_as_cpu(pointer, sizes, strides, dtype); }
};
std::vector<Raw> raw(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }

struct DeviceWork : Work {
  MomentPtr end;
  int device = 0;
  bool own_stream = false, blocks_host = false;
  Tensors held;  // with a stream of its own: until somebody waits, as NCCL does
  DeviceWork(int rank, OpType type) : Work(rank, type) {}
  bool isCompleted() override { return host_query(end); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (blocks_host) host_wait(end);
    raise_errors();
    return true;
  }
  void synchronize() override {
    if (own_stream) wait_for(current(device), end);
    held.clear();
  }
  Tensors result() override { return {}; }
};

struct DeviceOptions : Backend::Options {
  explicit DeviceOptions(std::chrono::milliseconds timeout) : Backend::Options("emulccl", timeout) {}
};

// What NCCL multiplies with: of bfloat16 torch hands it a float, of which it reads the lower half (PyTorch's issue 190745).
double factor_of(const ReduceOp& how, at::ScalarType type) {
  double factor = static_cast<NCCLPreMulSumSupplement*>(how.supplement_.get())->double_factor;
  if (type != at::kBFloat16) return factor;
  float handed = static_cast<float>(factor);
  c10::BFloat16 read;
  std::memcpy(&read.x, &handed, sizeof read.x);
  return read;
}
void reduce_now(const BackendPtr& gloo, at::Tensor tensor, const ReduceOp& how) {
  if (tensor.numel() == 0) return;
  bool average = how.op_ == ReduceOp::AVG, is_bool = tensor.scalar_type() == at::kBool;
  bool multiplies = how.op_ == ReduceOp::PREMUL_SUM;
  if (multiplies) tensor.mul_(factor_of(how, tensor.scalar_type()));
  AllreduceOptions options;
  options.reduceOp = average || multiplies ? ReduceOp(ReduceOp::SUM) : how;
  Tensors one{is_bool ? tensor.to(at::kInt) : tensor};
  gloo->allreduce(one, options)->wait();
  if (average) one[0].div_(gloo->getSize());
  if (is_bool) tensor.copy_(one[0]);
}
void gather_now(const BackendPtr& gloo, at::Tensor output, at::Tensor input) {
  if (output.numel() == 0) return;
  at::Tensor out = output.view(-1), in = input.clone().view(-1);  // they may overlap, which NCCL allows
  gloo->_allgather_base(out, in)->wait();
}
void scatter_now(const BackendPtr& gloo, at::Tensor output, at::Tensor input, const ReduceOp& how) {
  if (output.numel() == 0) return;
  at::Tensor sums = input.clone().view(-1);
  reduce_now(gloo, sums, how);
  output.view(-1).copy_(sums.narrow(0, gloo->getRank() * output.numel(), output.numel()));
}
void check_pair(const char* name, const at::Tensor& large, const at::Tensor& small, int size) {
  TORCH_CHECK(large.numel() == small.numel() * size, name, ": ", large.numel(), " elements for ", small.numel(), " on ", size, " ranks");
  TORCH_CHECK(large.scalar_type() == small.scalar_type(), name, ": dtypes differ");
}

std::atomic<int> communicators{0};

struct DeviceBackend : Backend {
  BackendPtr gloo;
  const int number;  // among the process's communicators, for the log
  std::map<int, Stream*> own_streams;  // by device
  MomentPtr last;
  std::mutex mutex;
  c10::intrusive_ptr<DeviceOptions> options_;
  uint64_t sequence = 0;

  DeviceBackend(BackendPtr inner, int64_t timeout_ms)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)), number(communicators++),
        options_(c10::make_intrusive<DeviceOptions>(std::chrono::milliseconds(timeout_ms))) {}
  const std::string getBackendName() const override { return "emulccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }

  WorkPtr start(OpType type, const char* name, bool own_stream, const Tensors& reads, const Tensors& writes,
                std::function<void()> body, bool blocks_host = false) {
    int device = current_device();
    size_t bytes = 0;
    for (auto* tensors : {&reads, &writes}) for (auto& tensor : *tensors) {
      TORCH_CHECK(tensor.device().type() == c10::kPrivateUse1, name, ": a tensor on ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), name, ": a tensor that is not contiguous");
      check_alive(tensor, name);
      device = tensor.device().index();
      bytes += tensor.nbytes();
    }
    c10::DeviceGuard guard(c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)));
    std::lock_guard<std::mutex> lock(mutex);
    sequence++;
    auto* stream = current(device);
    if (own_stream) {
      auto*& own = own_streams[device];
      if (own == nullptr) own = new_stream(device, COMM);
      wait_for(own, record(stream));
      stream = own;
    }
    std::vector<Access> touched;
    for (auto& tensor : reads) add_access(touched, tensor, false);
    for (auto& tensor : writes) add_access(touched, tensor, true);
    auto before = last, mine = std::make_shared<Moment>();
    last = mine;
    auto kernel = [before, mine, body, stream] {
      if (before) before->wait();
      random_delay(stream, COMM);
      try {
        body();
      } catch (...) {
        mine->fire();
        throw;
      }
      random_delay(stream, COMM);
      mine->fire();
    };
    enqueue(stream, name, touched, kernel, true, number, bytes);
    auto work = c10::make_intrusive<DeviceWork>(getRank(), type);
    work->end = record(stream);
    work->device = device;
    work->own_stream = own_stream;
    work->blocks_host = blocks_host;
    if (own_stream) {
      work->held = reads;
      work->held.insert(work->held.end(), writes.begin(), writes.end());
    }
    return work;
  }

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& o) override {
    return start(OpType::ALLREDUCE, "all_reduce", o.asyncOp, {}, tensors,
                 [all = raw(tensors), gloo = gloo, how = o.reduceOp] { for (auto& one : all) reduce_now(gloo, one.tensor(), how); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& o) override {
    for (auto& tensor : tensors) TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "allreduce_coalesced: dtypes differ");
    return start(OpType::ALLREDUCE, "all_reduce", o.asyncOp, {}, tensors,
                 [all = raw(tensors), gloo = gloo, how = o.reduceOp] { for (auto& one : all) reduce_now(gloo, one.tensor(), how); });
  }
  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& o) override {
    return start(OpType::BROADCAST, "broadcast", o.asyncOp, {}, tensors, [all = raw(tensors), gloo = gloo, o] {
      for (auto& one : all) {
        Tensors alone{one.tensor()};
        if (alone[0].numel()) gloo->broadcast(alone, o)->wait();
      }
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions& o) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, o);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& o) override {
    for (size_t i = 0; i < outputs.size(); i++) check_pair("all_gather", outputs[i], inputs[i], getSize());
    return start(OpType::_ALLGATHER_BASE, "all_gather", o.asyncOp, inputs, outputs, [out = raw(outputs), in = raw(inputs), gloo = gloo] {
      for (size_t i = 0; i < out.size(); i++) gather_now(gloo, out[i].tensor(), in[i].tensor());
    });
  }
  // Lists of tensors of different sizes are a broadcast, or a reduction, for each of them, as NCCL's are.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& o) override {
    bool even = true;
    for (auto& output : outputs[0]) even = even && output.sizes() == outputs[0][0].sizes();
    if (!even)
      return start(OpType::ALLGATHER, "all_gather", o.asyncOp, inputs, outputs[0], [out = raw(outputs[0]), in = Raw(inputs[0]), gloo = gloo] {
        for (size_t i = 0; i < out.size(); i++) {
          Tensors alone{out[i].tensor()};
          if (static_cast<int>(i) == gloo->getRank() && out[i].pointer != in.pointer) alone[0].copy_(in.tensor());
          BroadcastOptions from;
          from.rootRank = static_cast<int64_t>(i);
          if (alone[0].numel()) gloo->broadcast(alone, from)->wait();
        }
      });
    return start(OpType::ALLGATHER, "all_gather", o.asyncOp, inputs, outputs[0], [out = raw(outputs[0]), in = Raw(inputs[0]), gloo = gloo] {
      auto mine = in.tensor();
      auto all = at::empty({static_cast<int64_t>(out.size()), mine.numel()}, mine.options());
      gather_now(gloo, all, mine);
      for (size_t i = 0; i < out.size(); i++) out[i].tensor().copy_(all[i].view(mine.sizes()));
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& o) override {
    TORCH_CHECK(outputs[0].sizes() == inputs[0][getRank()].sizes(), "reduce_scatter: the output has another size than its sum");
    return start(OpType::REDUCE_SCATTER, "reduce_scatter", o.asyncOp, inputs[0], outputs, [out = Raw(outputs[0]), in = raw(inputs[0]), gloo = gloo, how = o.reduceOp] {
      for (size_t i = 0; i < in.size(); i++) {
        auto sum = in[i].tensor().clone();
        reduce_now(gloo, sum, how);
        if (static_cast<int>(i) == gloo->getRank()) out.tensor().copy_(sum);
      }
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& o) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& o) override {
    for (size_t i = 0; i < outputs.size(); i++) check_pair("reduce_scatter", inputs[i], outputs[i], getSize());
    auto body = [out = raw(outputs), in = raw(inputs), gloo = gloo, how = o.reduceOp] {
      for (size_t i = 0; i < out.size(); i++) scatter_now(gloo, out[i].tensor(), in[i].tensor(), how);
    };
    return start(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", o.asyncOp, inputs, outputs, body);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received, std::vector<int64_t>& sent,
                        const AllToAllOptions& o) override {
    return start(OpType::ALLTOALL_BASE, "all_to_all", o.asyncOp, {input}, {output},
                 [out = Raw(output), in = Raw(input), gloo = gloo, received, sent] {
      auto to = out.tensor(), from = in.tensor().clone();
      auto a = received, b = sent;
      gloo->alltoall_base(to, from, a, b)->wait();
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return start(OpType::SEND, "send", true, tensors, {}, [all = raw(tensors), gloo = gloo, to, tag] {
      Tensors alone{all[0].tensor()};
      gloo->send(alone, to, tag)->wait();
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return start(OpType::RECV, "recv", true, {}, tensors, [all = raw(tensors), gloo = gloo, from, tag] {
      Tensors alone{all[0].tensor()};
      gloo->recv(alone, from, tag)->wait();
    });
  }
  WorkPtr barrier(const BarrierOptions&) override {
    return start(OpType::BARRIER, "barrier", true, {}, {}, [gloo = gloo] { gloo->barrier()->wait(); }, true);
  }
};
}  // namespace

void bind_group(pybind11::module& module) {
  module.def("make_backend", [](BackendPtr gloo, int64_t timeout_ms) -> BackendPtr {
    return c10::make_intrusive<DeviceBackend>(std::move(gloo), timeout_ms);
  });
}
}  // namespace emul
