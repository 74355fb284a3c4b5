// ATen on the emulated device: a kernel is the CPU's, run by the stream's thread on the raw memory.
//
// Shapes of results come from the meta kernel, so that the host does not wait. Operators without one, those whose shapes
// depend on data and those that draw random numbers run synchronously.
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

namespace emul {
namespace {
using c10::IValue;
using torch::jit::Stack;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::kPrivateUse1; }

// A tensor as a kernel gets it: raw memory and geometry. It owns nothing of the device, as a CUDA kernel does not: memory
// that is freed before the kernel runs is somebody else's by then. CPU tensors are held.
struct Operand {
  bool defined = false, wrapped_number = false;
  at::Tensor host;
  void* pointer = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;

  Operand() = default;
  explicit Operand(const at::Tensor& tensor) : defined(tensor.defined()) {
    if (!defined) return;
    if (on_device(tensor)) raw(tensor, data_of(tensor));
    else host = tensor;
  }
  static Operand pinned(const at::Tensor& tensor) {
    Operand made;
    made.defined = true;
    made.raw(tensor, const_cast<void*>(tensor.const_data_ptr()));
    return made;
  }
  at::Tensor tensor() const {
    if (!defined || host.defined()) return host;
    auto made = view_as_cpu(pointer, sizes, strides, dtype);
    if (wrapped_number) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

 private:
  void raw(const at::Tensor& tensor, void* at) {
    pointer = at;
    sizes = tensor.sizes().vec();
    strides = tensor.strides().vec();
    dtype = tensor.scalar_type();
    wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  }
};

void copy_now(const Operand& to, const Operand& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.tensor().copy_(from.tensor());
}

// -- memory and geometry

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, c10::GetAllocator(c10::kPrivateUse1), keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto* memory = c10::GetAllocator(c10::kPrivateUse1);
  return at::detail::empty_strided_generic(size, stride, memory, keys, c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  size_t needed = (self.storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
at::Tensor& set_storage_at(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t elements = storage.nbytes() / self.itemsize();
  return set_storage_at(self, std::move(storage), 0, {elements}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::kPrivateUse1), true);
  return set_storage_at(self, std::move(storage), 0, {0}, {});
}

// -- copies

bool flies(const at::Tensor& host, const at::Tensor& device, bool non_blocking) {
  return non_blocking && host.scalar_type() == device.scalar_type() && host.is_contiguous() && device.is_contiguous() &&
         is_pinned(host.const_data_ptr());
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto from = source.sizes() == to.sizes() ? source : source.expand(to.sizes());
  c10::DeviceGuard guard(on_device(to) ? to.device() : from.device());
  auto* stream = current();
  std::vector<Access> touched;
  if (on_device(from)) { check_alive(from, "copy_ (source)"); add_access(touched, from, false); }
  if (on_device(to)) { check_alive(to, "copy_ (destination)"); add_access(touched, to, true); }
  if (on_device(from) && on_device(to)) {
    TORCH_CHECK(from.device() == to.device(), "emulated device: copies between devices are not there");
    enqueue(stream, "copy_", touched, [a = Operand(to), b = Operand(from)] { copy_now(a, b); });
  } else if (on_device(to) && flies(from, to, non_blocking)) {
    add_access(touched, from, false);
    enqueue(stream, "copy_ pinned to device", touched, [a = Operand(to), b = Operand::pinned(from)] { copy_now(a, b); });
    use_pinned(from.const_data_ptr(), stream);
  } else if (on_device(to)) {  // pageable memory is read before the call returns
    auto staged = at::empty(from.sizes(), from.options().pinned_memory(false)).copy_(from.detach());
    enqueue(stream, "copy_ host to device", touched, [a = Operand(to), b = Operand(staged)] { copy_now(a, b); });
    if (!non_blocking) synchronize(stream);
  } else if (flies(to, from, non_blocking)) {
    add_access(touched, to, true);
    enqueue(stream, "copy_ device to pinned", touched, [a = Operand::pinned(to), b = Operand(from)] { copy_now(a, b); });
    use_pinned(to.const_data_ptr(), stream);
  } else {
    enqueue(stream, "copy_ device to host", touched, [a = Operand(to), b = Operand(from)] { copy_now(a, b); });
    synchronize(stream);
  }
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  check_alive(self, "item");
  std::vector<Access> touched;
  add_access(touched, self, false);
  auto read = std::make_shared<at::Tensor>();
  enqueue(current(), "item", touched, [from = Operand(self), read] { *read = from.tensor().clone(); });
  synchronize(current());
  return read->item();
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  c10::getDeviceAllocator(c10::kPrivateUse1)->recordStream(self.storage().data_ptr(), stream);
}

// -- everything else

const std::set<std::string> SYNCHRONOUS = {
    "aten::nonzero", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::masked_select", "aten::multinomial",
    "aten::bincount", "aten::histc", "aten::randperm.generator_out", "aten::is_set_to", "aten::allclose", "aten::linalg_svd"};

template <class Change>
IValue with_tensors(const IValue& value, Change change) {  // the value with its tensors changed
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}
IValue elsewhere(const IValue& value, c10::Device device) { return value.isDevice() ? IValue(device) : value; }

at::Tensor to_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  c10::Device meta(at::kMeta);
  auto sizes = tensor.sizes(), strides = tensor.strides();
  auto made = at::detail::empty_strided_meta(sizes, strides, tensor.scalar_type(), std::nullopt, meta, std::nullopt);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// One call of an operator on its way to the device.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const std::string name;
  std::vector<IValue> arguments;
  std::optional<at::Device> device;
  bool draws = false;       // takes a random generator
  bool makes = false;       // returns new tensors
  bool fills_empty = false; // has an out= argument that it is to resize
  std::vector<Access> touched;

  Call(const c10::OperatorHandle& handle, Stack* stack)
      : op(handle), schema(handle.schema()), name(toString(schema.operator_name())) {
    auto count = static_cast<int64_t>(schema.arguments().size());
    arguments.assign(stack->end() - count, stack->end());
    for (size_t i = 0; i < arguments.size(); i++) {
      with_tensors(arguments[i], [&](const at::Tensor& tensor) {
        if (on_device(tensor) && !device) device = tensor.device();
        return tensor;
      });
      if (arguments[i].isDevice() && !device && arguments[i].toDevice().type() == c10::kPrivateUse1)
        device = arguments[i].toDevice();
      draws = draws || is_generator(i);
      fills_empty = fills_empty || (is_out(i) && arguments[i].toTensor().numel() == 0);
    }
    for (auto& result : schema.returns()) {
      bool is_view = result.alias_info() && !result.alias_info()->isWrite();
      TORCH_CHECK(!is_view, "emulated device: the view operator ", name, " has no kernel");
      makes = makes || !result.alias_info();
    }
    if (!device) device = at::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device()));
  }

  bool is_generator(size_t i) const { return schema.arguments()[i].type()->str().find("Generator") != std::string::npos; }
  bool writes(size_t i) const {
    auto* alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  bool is_out(size_t i) const { return writes(i) && schema.arguments()[i].kwarg_only() && arguments[i].isTensor(); }

  // Results as meta tensors; none if there is no meta kernel.
  std::optional<Stack> shapes() const {
    Stack stack;
    for (auto& value : arguments) stack.push_back(elsewhere(with_tensors(value, to_meta), at::kMeta));
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      if (name == "aten::native_layer_norm") return shapes_of_layer_norm(stack);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (auto& value : stack) if (!value.isTensor() && !value.isTensorList()) return std::nullopt;
    return stack;
  }
  static Stack shapes_of_layer_norm(const Stack& stack) {  // the CPU's statistics have another dtype than meta's
    auto x = stack[0].toTensor();
    auto kept = x.sizes().vec();
    for (size_t dim = kept.size() - stack[1].toIntVector().size(); dim < kept.size(); dim++) kept[dim] = 1;
    bool mixed = stack[2].isTensor() && stack[2].toTensor().scalar_type() == at::kFloat;
    auto options = x.options().dtype(mixed ? at::kFloat : x.scalar_type());
    return {at::empty(x.sizes(), x.options()), at::empty(kept, options), at::empty(kept, options)};
  }
  void resize_outputs(const Stack& shapes) {
    size_t result = 0;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!writes(i)) continue;
      if (arguments[i].isTensor() && result < shapes.size() && shapes[result].isTensor()) {
        auto tensor = arguments[i].toTensor();
        auto sizes = shapes[result].toTensor().sizes();
        if (tensor.sizes() != sizes) tensor.resize_(sizes);
      }
      result++;
    }
  }

  // The kernel: runs later, on the stream's thread, and returns what the CPU's kernel does.
  std::function<Stack()> kernel(const at::Generator& generator) {
    std::vector<std::function<IValue()>> made;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (is_generator(i)) {
        made.push_back([generator] { return IValue(generator); });
        continue;
      }
      std::vector<Operand> operands;
      with_tensors(arguments[i], [&](const at::Tensor& tensor) {
        operands.push_back(operand(tensor, writes(i)));
        return tensor;
      });
      // The lambda must not hold the device's tensors: a kernel does not own memory.
      bool single = arguments[i].isTensor(), list = arguments[i].isTensorList();
      if (single) made.push_back([operands] { return IValue(operands[0].tensor()); });
      else if (list) made.push_back([operands] {
        std::vector<at::Tensor> tensors;
        for (auto& one : operands) tensors.push_back(one.tensor());
        return IValue(tensors);
      });
      else if (arguments[i].isOptionalTensorList()) {
        std::vector<bool> there;
        for (const auto& one : arguments[i].toOptionalTensorVector()) there.push_back(one.has_value());
        made.push_back([operands, there] {
          c10::List<std::optional<at::Tensor>> tensors;
          size_t next = 0;
          for (bool one : there) tensors.push_back(one ? std::optional<at::Tensor>(operands[next++].tensor()) : std::nullopt);
          return IValue(tensors);
        });
      } else {
        made.push_back([value = elsewhere(arguments[i], at::kCPU)] { return value; });
      }
    }
    return [made, op = op] {
      Stack stack;
      for (auto& argument : made) stack.push_back(argument());
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      return stack;
    };
  }
  Operand operand(const at::Tensor& tensor, bool write) {
    if (on_device(tensor)) {
      check_alive(tensor, name);
      add_access(touched, tensor, write);
    }
    Operand made(tensor);
    if (made.host.defined() && !write) {  // scalars on the host: their values now
      made.host = tensor.detach().clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return made;
  }

  IValue argument_returned_as(size_t result) const {
    auto* wanted = schema.returns()[result].alias_info();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto* alias = schema.arguments()[i].alias_info();
      if (alias && *alias == *wanted) return arguments[i];
    }
    TORCH_CHECK(false, "emulated device: ", name, " returns an argument that its schema does not name");
  }

  Stack run_synchronously() {
    at::Generator generator, cpu;
    if (draws) {
      for (size_t i = 0; i < arguments.size(); i++)
        if (is_generator(i)) generator = arguments[i].isNone() ? default_generator(device->index()) : arguments[i].toGenerator();
      cpu = at::detail::createCPUGenerator();
      cpu.set_state(generator.get_state());
    }
    auto results = std::make_shared<Stack>();
    auto body = kernel(cpu);
    enqueue(current(), name, touched, [body, results] { *results = body(); });
    synchronize(current());
    if (draws) generator.set_state(cpu.get_state());
    Stack returned;
    for (size_t i = 0; i < results->size(); i++) {
      if (schema.returns()[i].alias_info()) returned.push_back(argument_returned_as(i));
      else returned.push_back(with_tensors((*results)[i], [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        auto moved = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device));
        return copy_from(tensor, moved, false);
      }));
    }
    return returned;
  }

  Stack run_asynchronously(const Stack& shapes) {
    auto body = kernel({});
    std::vector<std::vector<Operand>> outputs(schema.returns().size());
    Stack returned;
    for (size_t i = 0; i < schema.returns().size(); i++) {
      if (schema.returns()[i].alias_info()) {
        returned.push_back(argument_returned_as(i));
        continue;
      }
      returned.push_back(with_tensors(shapes[i], [&](const at::Tensor& meta) {
        at::Tensor made;
        if (meta.defined()) made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(*device));
        add_access(touched, made, true);
        outputs[i].emplace_back(made);
        return made;
      }));
    }
    enqueue(current(), name, touched, [body, outputs, name = name] {
      auto results = body();
      for (size_t i = 0; i < outputs.size(); i++) {
        size_t next = 0;
        if (!outputs[i].empty()) with_tensors(results[i], [&](const at::Tensor& tensor) {
          auto& to = outputs[i][next++];
          if (to.defined && tensor.defined()) {
            TORCH_CHECK(at::IntArrayRef(to.sizes) == tensor.sizes(), "meta and real shapes differ in ", name);
            copy_now(to, Operand(tensor));
          }
          return tensor;
        });
      }
    });
    return returned;
  }
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  c10::DeviceGuard guard(*call.device);
  bool synchronous = call.draws || SYNCHRONOUS.count(call.name);
  std::optional<Stack> shapes = Stack();
  if (!synchronous && (call.makes || call.fills_empty)) shapes = call.shapes();
  synchronous = synchronous || !shapes;
  if (!synchronous && call.fills_empty) call.resize_outputs(*shapes);
  Stack returned = synchronous ? call.run_synchronously() : call.run_asynchronously(*shapes);
  torch::jit::drop(*stack, call.arguments.size());
  stack->insert(stack->end(), returned.begin(), returned.end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace
}  // namespace emul
