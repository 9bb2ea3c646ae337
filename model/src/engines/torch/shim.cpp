// What `tch` does not reach: buffers of a TorchScript module, what its code does to them, and the switches that keep
// libtorch's results the same from call to call.
//
// Rules: no exception leaves this file. A function that can fail returns nullptr, or a message that the caller gives
// back to `ebb_free`. An `at::Tensor*` handed out is owned by the caller; one taken is only looked at.

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>
#include <torch/headeronly/version.h>

// MKL's, where libtorch has it (not on ARM): the instructions that it is held to.
extern "C" int mkl_serv_cbwr_get(int) __attribute__((weak));

namespace {

using namespace torch::jit;

// One attribute of the module tree that training has to know about. Read by Rust through `ebb_entry`.
struct Entry {
  std::string name;
  at::Tensor tensor; // undefined: the attribute is no tensor
  bool is_parameter = false;
  bool is_buffer = false;
  bool is_written = false;
};

// What running `forward` may do besides returning.
struct Effects {
  std::set<std::string> written; // tensors that it may change, by path from the module
  std::set<std::string> surely;  // those of them, and other attributes, that it changes whenever it runs
  std::set<std::string> assigned; // attributes that it may assign to
  bool writes_unknown = false;   // code that cannot be looked into
  bool draws = false;            // random numbers
};

// A tensor that `forward` is expected to leave as it is.
struct Watched {
  std::string what; // for the message
  at::Tensor tensor;
};

// An attribute that `forward` may assign to, and that is no buffer.
struct Slot {
  std::string name;
  ObjectPtr object;
  size_t index;
};

struct Script {
  Module module;
  std::vector<Entry> entries;
  Effects effects;
  std::vector<Watched> watched;
  std::vector<Slot> slots;
};

char* copy(const std::string& text) {
  char* out = static_cast<char*>(std::malloc(text.size() + 1));
  if (out != nullptr) std::memcpy(out, text.c_str(), text.size() + 1);
  return out;
}

template <typename F>
char* guard(F&& body) {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return copy(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return copy(error.what());
  } catch (...) {
    return copy("an exception that is no std::exception");
  }
}

// "a.b.c" for the chain `self.a.b` plus the attribute c that `node` gets or sets; empty when it does not start at self.
std::string path(const Node* node, const Value* self) {
  std::string name = node->s(attr::name);
  const Value* object = node->input(0);
  while (object != self) {
    const Node* from = object->node();
    if (from->kind() != prim::GetAttr) return "";
    name = from->s(attr::name) + "." + name;
    object = from->input(0);
  }
  return name;
}

void walk(at::ArrayRef<Block*> blocks, std::vector<Node*>& nodes) {
  for (Block* block : blocks) {
    for (Node* node : block->nodes()) {
      nodes.push_back(node);
      walk(node->blocks(), nodes);
    }
  }
}

// Which of the module's attributes a value may be, or be a view of. Followed as far as the code says it: through views, branches, loops,
// tuples and lists. What comes out of code that cannot be looked into is not followed; `Watched` finds the rest when it happens.
class Origins {
 public:
  explicit Origins(const Value* self) : self_(self) {}

  std::set<std::string> of(const Value* value) {
    seen_.clear();
    found_.clear();
    follow(value);
    return found_;
  }

 private:
  void follow(const Value* value) {
    if (!seen_.insert(value).second) return;
    const Node* node = value->node();
    const auto kind = node->kind();
    if (kind == prim::GetAttr) {
      found_.insert(path(node, self_));
    } else if (kind == prim::If) {
      for (const Block* block : node->blocks()) follow(block->outputs().at(value->offset()));
    } else if (kind == prim::Loop) {
      follow(node->input(2 + value->offset()));
      follow(node->blocks().at(0)->outputs().at(1 + value->offset()));
    } else if (kind == prim::Param) {
      const Node* loop = node->owningBlock()->owningNode();
      if (loop == nullptr || loop->kind() != prim::Loop || value->offset() == 0) return;
      follow(loop->input(1 + value->offset()));
      follow(loop->blocks().at(0)->outputs().at(value->offset()));
    } else if (kind == prim::TupleConstruct || kind == prim::ListConstruct || kind == prim::unchecked_cast ||
               kind == prim::TupleUnpack || kind == prim::ListUnpack || kind == prim::TupleIndex ||
               kind == prim::unchecked_unwrap_optional || kind == aten::__getitem__) {
      for (const Value* input : node->inputs()) follow(input);
    } else if (const auto* schema = node->maybeSchema()) {
      const auto& returns = schema->returns();
      const auto* out = value->offset() < returns.size() ? returns[value->offset()].alias_info() : nullptr;
      if (out == nullptr) return;
      const auto views = sets(*out);
      for (size_t i = 0; i < schema->arguments().size() && i < node->inputs().size(); i++) {
        const auto* in = schema->arguments()[i].alias_info();
        if (in == nullptr) continue;
        for (const auto& set : sets(*in)) {
          if (views.count(set) > 0) follow(node->input(i));
        }
      }
    }
  }

  // The names by which a schema says that two tensors, or the elements of lists, are one memory.
  static std::set<c10::Symbol> sets(const c10::AliasInfo& alias) {
    std::set<c10::Symbol> found(alias.beforeSets().begin(), alias.beforeSets().end());
    for (const auto& contained : alias.containedTypes()) found.merge(sets(contained));
    found.erase(c10::AliasInfo::wildcardSet());
    return found;
  }

  const Value* self_;
  std::set<const Value*> seen_;
  std::set<std::string> found_;
};

// Looks through `forward` with everything it calls inlined.
Effects effects_of(const Module& module) {
  Effects effects;
  // With the optimizer off, inlining stops at the first level of calls.
  const GraphOptimizerEnabledGuard inlines_fully(true);
  auto graph = toGraphFunction(module.get_method("forward").function()).graph()->copy();
  Inline(*graph);
  const Value* self = graph->inputs().at(0);
  Origins origins(self);
  std::vector<Node*> nodes;
  walk(graph->block(), nodes);
  for (const Node* node : nodes) {
    const auto kind = node->kind();
    const bool always = node->owningBlock() == graph->block();
    const auto writes = [&](const std::set<std::string>& names) {
      effects.written.insert(names.begin(), names.end());
      if (always) effects.surely.insert(names.begin(), names.end());
    };
    if (kind == prim::CallMethod || kind == prim::CallFunction || kind == prim::fork || kind == prim::awaitable) {
      effects.writes_unknown = effects.draws = true;
    } else if (kind == prim::SetAttr) {
      // An object that is no module, such as that of `torch.no_grad()`, holds no tensor of the module.
      const auto type = node->input(0)->type()->cast<c10::ClassType>();
      if (type != nullptr && !type->is_module()) continue;
      const std::string name = path(node, self);
      effects.assigned.insert(name);
      writes({name});
    } else if (const auto* schema = node->maybeSchema()) {
      for (size_t i = 0; i < schema->arguments().size() && i < node->inputs().size(); i++) {
        const auto& argument = schema->arguments()[i];
        const bool is_tensor = node->input(i)->type()->isSubtypeOf(*c10::OptionalType::ofTensor());
        const bool writes_it = argument.alias_info() != nullptr && argument.alias_info()->isWrite() && is_tensor;
        // Normalisation updates its running statistics although its schema does not say that it writes.
        const bool is_running = argument.name().rfind("running_", 0) == 0;
        if (writes_it || is_running) writes(origins.of(node->input(i)));
      }
    }
    effects.draws = effects.draws || node->isNondeterministic();
  }
  if (effects.written.erase("") > 0) effects.writes_unknown = true;
  return effects;
}

// One tensor under several names is saved as tensors that share memory. Makes them one again, so that autograd sums.
void tie(Module& module) {
  using Place = std::tuple<const void*, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<Place, at::Tensor> seen;
  for (auto owner : module.modules()) {
    const auto type = owner.type();
    for (size_t i = 0; i < type->numAttributes(); i++) {
      const auto value = owner._ivalue()->getSlot(i);
      if (!type->is_parameter(i) || !value.isTensor() || value.toTensor().numel() == 0) continue;
      const auto& tensor = value.toTensor();
      const Place place{
          tensor.storage().data(), tensor.storage_offset(), tensor.sizes().vec(), tensor.strides().vec()};
      owner._ivalue()->setSlot(i, seen.emplace(place, tensor).first->second);
    }
  }
}

void collect(const Module& module, const std::string& prefix, Script& script) {
  const Effects& effects = script.effects;
  const auto type = module.type();
  for (size_t i = 0; i < type->numAttributes(); i++) {
    const std::string name = prefix + type->getAttributeName(i);
    const auto value = module._ivalue()->getSlot(i);
    if (value.isModule()) continue;
    // A buffer that may change is state. Anything else is refused, so only for what is seen: in the code, or when it happens.
    Entry entry{name, {}, type->is_parameter(i), type->is_buffer(i), effects.surely.count(name) > 0};
    if (value.isTensor()) {
      entry.tensor = value.toTensor();
      if (entry.is_buffer) entry.is_written = effects.written.count(name) > 0 || effects.writes_unknown;
    }
    const bool is_assigned = effects.assigned.count(name) > 0 && !(entry.is_buffer && entry.tensor.defined());
    if (is_assigned) script.slots.push_back(Slot{name, module._ivalue(), i});
    if (entry.tensor.defined() && !entry.is_written && !is_assigned) {
      const std::string kind = entry.is_parameter ? "parameter" : entry.is_buffer ? "buffer" : "attribute";
      script.watched.push_back(Watched{"the " + kind + " `" + name + "` itself", entry.tensor});
    }
    if (entry.tensor.defined() || entry.is_written) script.entries.push_back(std::move(entry));
  }
  for (const auto& child : module.named_children()) {
    collect(child.value, prefix + child.name + ".", script);
  }
}

const char* variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != 0 ? value : otherwise;
}

// A short number for a long text (FNV-1a), the same everywhere.
std::string short_hash(const std::string& text) {
  uint32_t hash = 2166136261u;
  for (const unsigned char c : text) hash = (hash ^ c) * 16777619u;
  char out[9];
  std::snprintf(out, sizeof out, "%08x", hash);
  return out;
}

// Whether the processor multiplies tiles of bf16.
bool has_amx() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 22)) != 0;
#else
  return false;
#endif
}

// The instructions beyond AVX2 that oneDNN looks for.
std::string instructions() {
#if defined(__x86_64__)
  std::string found;
  const auto add = [&](bool is_there, const char* name) {
    if (is_there) found += (found.empty() ? "" : "+") + std::string(name);
  };
  add(__builtin_cpu_supports("avx2") != 0, "AVX2");
  add(__builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0, "AVX512");
  add(__builtin_cpu_supports("avx512vnni") != 0, "VNNI");
  add(__builtin_cpu_supports("avx512bf16") != 0, "BF16");
  add(has_amx(), "AMX");
  return found.empty() ? "SSE" : found;
#else
  return "ARM";
#endif
}

// Sizes of the caches, by which the libraries cut long sums into blocks.
std::string caches() {
  std::string text;
  for (const int size : {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE}) {
    text += (text.empty() ? "" : "/") + std::to_string(std::max(0L, sysconf(size)) / 1024);
  }
  return text + " KiB";
}

// The name of a CUDA device, of its driver: CUDA's own headers are not there.
std::string cuda_name(int index) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) return "CUDA";
  const auto get = reinterpret_cast<int (*)(int*, int)>(dlsym(driver, "cuDeviceGet"));
  const auto name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  int device = 0;
  char out[128] = "CUDA";
  if (get != nullptr && name != nullptr && get(&device, index) == 0) name(out, sizeof out, device);
  return out;
}

std::string facts_of(int device) {
  // Which compilers and libraries made it. What it found in this machine is in there too, in lines that differ.
  std::istringstream config(at::show_config());
  std::string build;
  for (std::string line; std::getline(config, line);) {
    if (line.find("CPU capability") == std::string::npos) build += line + "\n";
  }
  std::string text = std::string("libtorch ") + TORCH_VERSION + " (build " + short_hash(build) + "), ";
  if (device >= 0) {
    const auto& hooks = at::detail::getCUDAHooks();
    return text + cuda_name(device) + ", CUDA " + std::to_string(hooks.versionCUDART()) + ", cuDNN " +
        std::to_string(hooks.versionCuDNN());
  }
  const std::string held = variable("ONEDNN_MAX_CPU_ISA", variable("DNNL_MAX_CPU_ISA", ""));
  const std::string mkl = variable("MKL_CBWR", "");
  text += "ATen " + at::get_cpu_capability() + ", oneDNN " + (held.empty() ? instructions() : "at most " + held);
  if (mkl_serv_cbwr_get != nullptr) {
    // MKL_CBWR_ALL of mkl_service.h: the branch with its flags, as MKL has understood the variable.
    text += ", MKL " + (mkl.empty() ? "AUTO" : mkl) + " (" + std::to_string(mkl_serv_cbwr_get(~0)) + ")";
  }
  // Blocks of cache size are those of the widest kernels; whoever is held to one instruction set is to agree with other machines.
  if (held.empty() || mkl.empty()) text += ", caches " + caches();
  return text + ", CPU";
}

// Calls `forward`, and throws if it changes what it is expected to leave as it is: nobody would keep the new value.
c10::IValue call(Script& script, std::vector<c10::IValue> inputs, const torch::jit::Kwargs& named) {
  std::vector<uint32_t> versions;
  std::vector<c10::IValue> values;
  for (const auto& watched : script.watched) versions.push_back(watched.tensor._version());
  for (const auto& slot : script.slots) values.push_back(slot.object->getSlot(slot.index));
  auto answer = script.module.forward(std::move(inputs), named);
  for (size_t i = 0; i < versions.size(); i++) {
    if (script.watched[i].tensor._version() != versions[i]) {
      throw std::runtime_error("forward changes " + script.watched[i].what + "; only the optimizer may change what is trained (for "
          "max_norm and the like, normalise a copy), and code must show which buffers it changes");
    }
  }
  for (size_t i = 0; i < values.size(); i++) {
    const auto now = script.slots[i].object->getSlot(script.slots[i].index);
    if (!now.is(values[i]) && (now.isTensor() || now != values[i])) {
      throw std::runtime_error("forward changes the attribute `" + script.slots[i].name +
          "`, so nobody would keep its value; make it a buffer (register_buffer) or leave it unchanged");
    }
  }
  return answer;
}

// Lets cuBLAS and cuDNN round the inputs of f32 products to TF32. PyTorch lets cuDNN do so unless it is told otherwise.
void allow_tf32(bool allowed) {
  auto& context = at::globalContext();
  context.setAllowTF32CuBLAS(allowed);
  context.setAllowTF32CuDNN(allowed);
}

// Who hears of gradients: takes over the tensor, and answers whether to go on.
using Made = bool (*)(void* context, size_t leaf, at::Tensor* gradient);

// Hears of the gradients of a model while its backward pass runs. libtorch runs the pass of the CPU in the thread that asks for it, and
// that of a device in a thread of its own.
struct Listener {
  std::mutex lock;
  Made made = nullptr;
  void* context = nullptr;

  void set(Made to, void* with) {
    const std::lock_guard<std::mutex> locked(lock);
    made = to;
    context = with;
  }
};

// The hooks of the leaves have it too.
using Hooked = std::shared_ptr<Listener>;

// Lets a listener hear for the time of a call.
struct Listening {
  Listener& listener;
  Listening(Listener& listener, Made made, void* context) : listener(listener) { listener.set(made, context); }
  ~Listening() { listener.set(nullptr, nullptr); }
};

c10::Device device_of(int index) {
  return index < 0 ? c10::Device(at::kCPU) : c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

} // namespace

extern "C" {

void ebb_free(void* memory) { std::free(memory); }

// The file that libtorch's CPU half was loaded from; valid for the life of the process, or nullptr.
const char* ebb_library() {
  Dl_info info;
  return dladdr(reinterpret_cast<void*>(&at::set_num_threads), &info) != 0 ? info.dli_fname : nullptr;
}

// What decides how libtorch rounds, on a CUDA device, or for -1 on the CPU; `out` is for `ebb_free`.
char* ebb_facts(int device, char** out) {
  return guard([&] { *out = copy(facts_of(device)); });
}

// Switches of the whole process.
char* ebb_settings() {
  return guard([] {
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    // It would fill every `empty` with NaN: reading uninitialised memory is a bug that ATen's own operators do not have.
    context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicCuDNN(true);
    context.setBenchmarkCuDNN(false);
    context.setDeterministicMkldnn(true);
    context.setFloat32MatmulPrecision("highest");
    allow_tf32(false);
    // Sums of 16-bit products are f32, whichever algorithm cuBLAS chooses for a shape. PyTorch lets it round partial sums to 16 bits.
    context.setAllowFP16ReductionCuBLAS(false);
    context.setAllowBF16ReductionCuBLAS(false);
    context.setAllowFP16AccumulationCuBLAS(false);
    context.setAllowFP16BF16ReductionMathSDP(false);
    // The profiling executor watches the first calls and then runs other, fused code with other roundings.
    getExecutorMode() = false;
    getProfilingMode() = false;
    setTensorExprFuserEnabled(false);
    overrideCanFuseOnCPU(false);
    overrideCanFuseOnGPU(false);
  });
}

// Whether f32 products on CUDA devices may use TF32: a switch of the whole process.
char* ebb_tf32(bool allowed) {
  return guard([allowed] { allow_tf32(allowed); });
}

// Whether operations of the calling thread compute in bf16, or with `half` in f16, where they lose little by it, on a CUDA device or for -1 on the CPU.
char* ebb_autocast(int device, bool half, bool on) {
  return guard([&] {
    const auto type = device_of(device).type();
    at::autocast::set_autocast_dtype(type, half ? at::kHalf : at::kBFloat16);
    at::autocast::set_autocast_enabled(type, on);
    // The cache of cast weights belongs to the process, and whoever ends a forward pass clears it. With it, another thread would decide
    // whether two uses of a weight share one cast, whose gradient is then summed in bf16 instead of f32.
    at::autocast::set_autocast_cache_enabled(!on);
  });
}

// The switches that decide how results round, a line each; `out` is for `ebb_free`.
char* ebb_switches(char** out) {
  return guard([out] {
    auto& context = at::globalContext();
    std::ostringstream text;
    text << "deterministic " << context.deterministicAlgorithms() << "\n"
         << "cudnn deterministic " << context.deterministicCuDNN() << "\n"
         << "cudnn benchmark " << context.benchmarkCuDNN() << "\n"
         << "cudnn tf32 " << context.allowTF32CuDNN() << "\n"
         << "cublas tf32 " << context.allowTF32CuBLAS() << "\n"
         << "onednn deterministic " << context.deterministicMkldnn() << "\n"
         << "onednn tf32 " << context.allowTF32OneDNN() << "\n"
         << "cublas f16 sums " << (context.allowFP16ReductionCuBLAS() == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK) << "\n"
         << "cublas bf16 sums " << (context.allowBF16ReductionCuBLAS() == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK) << "\n"
         << "cublas f16 accumulation " << context.allowFP16AccumulationCuBLAS() << "\n"
         << "attention 16-bit sums " << context.allowFP16BF16ReductionMathSDP() << "\n"
         << "autocast cpu " << at::autocast::is_autocast_enabled(at::kCPU) << "\n"
         << "autocast cuda " << at::autocast::is_autocast_enabled(at::kCUDA) << "\n"
         << "autocast cache " << at::autocast::is_autocast_cache_enabled() << "\n";
    *out = copy(text.str());
  });
}

// Switches of the calling thread.
char* ebb_thread(int threads) {
  return guard([threads] {
    // A thread's first parallel loop takes over the process's default; asking first makes ours the last word.
    at::get_num_threads();
    at::set_num_threads(threads);
    setGraphExecutorOptimize(false);
  });
}

char* ebb_load(const char* file, int device, Script** out) {
  return guard([&] {
    auto script = std::make_unique<Script>();
    script->module = load(file, device_of(device));
    if (!script->module.find_method("forward")) throw std::runtime_error("the module has no method `forward`");
    tie(script->module);
    script->effects = effects_of(script->module);
    collect(script->module, "", *script);
    *out = script.release();
  });
}

void ebb_drop(Script* script) { delete script; }

size_t ebb_entries(const Script* script) { return script->entries.size(); }

// `name` stays valid as long as the script; `tensor` becomes nullptr when the attribute is no tensor.
char* ebb_entry(
    const Script* script, size_t index, const char** name, at::Tensor** tensor, bool* is_parameter, bool* is_buffer,
    bool* is_written) {
  return guard([&] {
    const Entry& entry = script->entries.at(index);
    *name = entry.name.c_str();
    *tensor = entry.tensor.defined() ? new at::Tensor(entry.tensor) : nullptr;
    *is_parameter = entry.is_parameter;
    *is_buffer = entry.is_buffer;
    *is_written = entry.is_written;
  });
}

// The arguments of `forward` without self, a line each: the name, then ` dictionary` for Dict[str, Tensor], then ` optional` when it
// has a default.
char* ebb_arguments(const Script* script, char** out) {
  return guard([&] {
    std::string text;
    const auto& arguments = script->module.get_method("forward").function().getSchema().arguments();
    const auto dictionary = c10::DictType::create(c10::StringType::get(), c10::TensorType::get());
    for (size_t i = 1; i < arguments.size(); i++) {
      text += arguments[i].name();
      if (*arguments[i].type() == *dictionary) text += " dictionary";
      if (arguments[i].default_value().has_value()) text += " optional";
      text += "\n";
    }
    *out = copy(text);
  });
}

// Whether `forward` may draw random numbers.
bool ebb_draws(const Script* script) { return script->effects.draws; }

// What hears of the gradients of one model; for `ebb_unhook`.
char* ebb_listener(Hooked** out) {
  return guard([&] { *out = new Hooked(std::make_shared<Listener>()); });
}

void ebb_unhook(Hooked* hooked) { delete hooked; }

// From now on `ebb_backward` with this listener tells the gradient of this leaf, by its number. Hooks of a tensor are never removed, so
// this is called once.
char* ebb_hook(const Hooked* hooked, const at::Tensor* leaf, size_t number) {
  return guard([&] {
    leaf->register_hook([listener = *hooked, number](const at::Tensor& gradient) {
      const std::lock_guard<std::mutex> locked(listener->lock);
      if (listener->made == nullptr) return;
      if (!listener->made(listener->context, number, new at::Tensor(gradient))) throw std::runtime_error("a gradient was not taken");
    });
  });
}

// Computes the gradients of a loss for leaves. `made` gets each as soon as all that adds to it was added: on the CPU in this thread, and
// on a device in others, one call at a time. There the device has not computed it yet.
char* ebb_backward(
    const Hooked* hooked, const at::Tensor* loss, const at::Tensor* const* leaves, size_t count, Made made, void* context) {
  return guard([&] {
    torch::autograd::variable_list inputs;
    for (size_t i = 0; i < count; i++) inputs.push_back(*leaves[i]);
    const Listening listening(**hooked, made, context);
    torch::autograd::grad({*loss}, inputs, {}, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
  });
}

// An event of what this thread has told a CUDA device so far. `handle` is what the driver calls it. For `ebb_drop_event`.
char* ebb_event(int device, c10::Event** out, void** handle) {
  return guard([&] {
    const auto on = device_of(device);
    auto event = std::make_unique<c10::Event>(on.type());
    event->record(c10::impl::VirtualGuardImpl(on.type()).getStream(on));
    *handle = event->eventId();
    *out = event.release();
  });
}

void ebb_drop_event(c10::Event* event) { delete event; }

// Calls `forward` with `count` inputs: one after the other (`how` 0), by their names (1), or as one dictionary (2). Without labels it
// gives `outputs` and leaves `loss`. Labels come after the inputs, or as `labels` among names, and then it gives both.
char* ebb_forward(
    Script* script, const at::Tensor* const* tensors, const char* const* names, size_t count, int how, const at::Tensor* labels,
    bool train, at::Tensor** loss, at::Tensor** outputs) {
  return guard([&] {
    script->module.train(train);
    std::vector<c10::IValue> inputs;
    torch::jit::Kwargs named;
    if (how == 2) {
      c10::Dict<std::string, at::Tensor> dictionary;
      for (size_t i = 0; i < count; i++) dictionary.insert(names[i], *tensors[i]);
      inputs.emplace_back(std::move(dictionary));
    }
    for (size_t i = 0; i < count && how != 2; i++) {
      if (how == 1) named.emplace(names[i], *tensors[i]);
      else inputs.emplace_back(*tensors[i]);
    }
    if (labels != nullptr && how == 1) named.emplace("labels", *labels);
    if (labels != nullptr && how != 1) inputs.emplace_back(*labels);
    const auto answer = call(*script, std::move(inputs), named);
    if (labels == nullptr) {
      if (!answer.isTensor()) throw std::runtime_error("forward returns " + answer.type()->str() + ", expected a Tensor");
      *outputs = new at::Tensor(answer.toTensor());
      return;
    }
    const bool fits = answer.isTuple() && answer.toTupleRef().elements().size() == 2 &&
        answer.toTupleRef().elements()[0].isTensor() && answer.toTupleRef().elements()[1].isTensor();
    if (!fits) {
      const std::string found = answer.type()->str();
      throw std::runtime_error("forward returns " + found + ", expected Tuple[Tensor, Tensor]: (mean loss, outputs)");
    }
    const auto& elements = answer.toTupleRef().elements();
    auto first = std::make_unique<at::Tensor>(elements[0].toTensor());
    *outputs = new at::Tensor(elements[1].toTensor());
    *loss = first.release();
  });
}

// The module in evaluation mode with its present weights, on the CPU, as `torch.jit.load` reads it.
char* ebb_save(Script* script, void** bytes, size_t* length) {
  return guard([&] {
    auto module = script->module.deepcopy(c10::Device(at::kCPU));
    module.eval();
    std::ostringstream out;
    module.save(out);
    const std::string content = out.str();
    *bytes = std::malloc(content.size());
    if (*bytes == nullptr) throw std::bad_alloc();
    std::memcpy(*bytes, content.data(), content.size());
    *length = content.size();
  });
}

} // extern "C"
