// The words of CUDA for the host's compiler: a thread is a turn of a loop.
//
// `kernels.cu` is the text that NVRTC compiles for a device. No kernel has a barrier, so the
// threads of a launch may run one after the other.

#include <math.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__

struct Index {
    unsigned x;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

#include "kernels.cu"

// Every kernel.
#define EACH_KERNEL(OF) \
    OF(sgd) \
    OF(momentum) \
    OF(adam) \
    OF(amsgrad) \
    OF(adagrad) \
    OF(rmsprop) \
    OF(rmsprop_moving) \
    OF(rmsprop_centered) \
    OF(rmsprop_centered_moving) \
    OF(adadelta) \
    OF(ftrl) \
    OF(lamb) \
    OF(squares) \
    OF(squares_of_direction) \
    OF(sum) \
    OF(sum_bf16) \
    OF(sum_f16) \
    OF(round_bf16) \
    OF(round_f16) \
    OF(encode_bf16) \
    OF(encode_f16) \
    OF(decode_bf16) \
    OF(decode_f16) \
    OF(mean) \
    OF(largest) \
    OF(fill) \
    OF(dense_forward) \
    OF(dense_weight_gradient) \
    OF(dense_bias_gradient) \
    OF(dense_input_gradient) \
    OF(relu) \
    OF(relu_slope) \
    OF(tanh_slope) \
    OF(scale) \
    OF(look_up)

// A launch that may run later: arguments are copied at once, as a driver does.
template <auto KERNEL>
struct Launch;
template <class... Parameters, void (*KERNEL)(Parameters...)>
struct Launch<KERNEL> {
    static constexpr std::array<std::size_t, sizeof...(Parameters)> SIZES = {sizeof(Parameters)...};
    // Scalars hold no address. What lies between them may look like one.
    static constexpr std::array<bool, sizeof...(Parameters)> HAS_ADDRESSES = {
        (std::is_pointer_v<Parameters> || std::is_same_v<Parameters, Operands>)...};

    static std::function<void()> of(unsigned blocks, unsigned threads, void** arguments) {
        return copied(blocks, threads, arguments, std::index_sequence_for<Parameters...>());
    }

    template <std::size_t... AT>
    static std::function<void()> copied(unsigned blocks, unsigned threads, void** arguments,
                                        std::index_sequence<AT...>) {
        std::tuple<Parameters...> values(*static_cast<Parameters*>(arguments[AT])...);
        return [=] {
            gridDim.x = blocks;
            blockDim.x = threads;
            for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
                for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
                    std::apply(KERNEL, values);
                }
            }
        };
    }
};

// Whether a kernel's first parameter is a table of passes, and the second one their number.
template <class First>
struct IsTable : std::false_type {};
template <class Rule>
struct IsTable<const Pass<Rule>*> : std::true_type {};
template <class First, class... Rest>
constexpr bool has_table(void (*)(First, Rest...)) {
    return IsTable<First>::value;
}

struct Kernel {
    const char* name;
    std::function<void()> (*launch)(unsigned blocks, unsigned threads, void** arguments);
    // Bytes of each parameter.
    const std::size_t* sizes;
    // Whether there are addresses in it.
    const bool* has_addresses;
    std::size_t parameters;
    bool has_table;
};

#define KERNEL(NAME) \
    {#NAME, Launch<NAME>::of, Launch<NAME>::SIZES.data(), Launch<NAME>::HAS_ADDRESSES.data(), \
     Launch<NAME>::SIZES.size(), has_table(NAME)},
static const Kernel KERNELS[] = {EACH_KERNEL(KERNEL)};

// Returns the kernel of a name, or null.
static const Kernel* find(const char* name) {
    for (const Kernel& kernel : KERNELS) {
        if (std::strcmp(kernel.name, name) == 0) {
            return &kernel;
        }
    }
    return nullptr;
}
