// The kernels as a library for the host. The test `cuda::tests` builds and loads it.

#include "host.hpp"

// Runs a kernel. Returns 0, or 1 if there is no kernel of this name.
extern "C" __attribute__((visibility("default"))) int ebb_launch(const char* name, unsigned blocks,
                                                                 unsigned threads, void** arguments) {
    const Kernel* kernel = find(name);
    if (kernel == nullptr) {
        return 1;
    }
    kernel->launch(blocks, threads, arguments)();
    return 0;
}
